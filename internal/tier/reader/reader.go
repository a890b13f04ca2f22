// Package reader reads the tier: batches by offset, offsets by time, aborted transactions, and what a new replica
// needs to begin.
//
// Every object is read in pieces that are cached: manifests, indexes, and blocks of the log. A piece is fetched once
// however many ask for it, in the background: a caller whose context ends gets its error, the piece still arrives in the
// cache, so that a slow store delays readers but cannot starve them. Failed reads are never cached. Whatever is returned
// has passed its batch checksums. A Reader is safe for concurrent use; the number of fetches is bounded.
package reader

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/tp"
)

// Errors of a Reader. Others are transient failures of the store, or the end of the caller's context.
var (
	// ErrSegmentGone: an object of the segment does not exist, as retention won. Ask the image again.
	ErrSegmentGone = errors.New("remote segment is gone")
	// ErrCorrupt: stored bytes are not what metadata says; a *CorruptError tells where.
	ErrCorrupt = errors.New("remote data is corrupt")
	// ErrBusy: too many fetches are waiting already.
	ErrBusy = errors.New("too many remote reads")
	// ErrClosed: the Reader has been closed.
	ErrClosed = errors.New("remote reader is closed")
	// ErrNotInTier: no finished segment holds the offset.
	ErrNotInTier = errors.New("offset is not in the tier")
)

// CorruptError names the object and the offset of the log from where it cannot be read.
type CorruptError struct {
	Object string
	Offset int64
	Err    error
}

// Error names object, offset and cause.
func (e *CorruptError) Error() string {
	return fmt.Sprintf("remote data is corrupt: object %q at offset %d: %v", e.Object, e.Offset, e.Err)
}

// Unwrap gives ErrCorrupt and the cause.
func (e *CorruptError) Unwrap() []error { return []error{ErrCorrupt, e.Err} }

// Options of a Reader. Zero sizes and numbers take the defaults in parentheses.
type Options struct {
	Bucket objstore.Bucket
	// Prefix is put in front of all keys as it is.
	Prefix  string
	Keyring *remoteformat.Keyring
	// IndexCacheBytes (64 MiB) bounds manifests and indexes, ChunkCacheBytes (128 MiB) log bytes in memory. A piece larger
	// than a cache stays until the next one.
	IndexCacheBytes, ChunkCacheBytes int64
	// BlockBytes (1 MiB) is what is fetched at once, rounded to whole chunks.
	BlockBytes int64
	// ReadAheadBytes (8 MiB) is how far behind a sequential read fetching goes on, across segments; -1 is not at all.
	ReadAheadBytes int64
	// Workers (8) fetches run at once, MaxPending (100) more may wait; beyond that reads are ErrBusy.
	Workers, MaxPending int
	// FetchTimeout (1 min) ends a fetch that nobody may be waiting for any more.
	FetchTimeout time.Duration
	// FetchRate bounds bytes fetched from the store; nil is no bound.
	FetchRate *rate.Limiter
	// Metrics may be nil.
	Metrics *Metrics
}

func (o Options) filled() Options {
	for _, x := range []struct {
		p   *int64
		def int64
	}{{&o.IndexCacheBytes, 64 << 20}, {&o.ChunkCacheBytes, 128 << 20}, {&o.BlockBytes, 1 << 20}, {&o.ReadAheadBytes, 8 << 20}} {
		if *x.p == 0 {
			*x.p = x.def
		}
	}
	if o.Workers <= 0 {
		o.Workers = 8
	}
	if o.MaxPending <= 0 {
		o.MaxPending = 100
	}
	if o.FetchTimeout <= 0 {
		o.FetchTimeout = time.Minute
	}
	if o.Metrics == nil {
		o.Metrics, _ = NewMetrics(nil) // cannot fail without a registry
	}
	return o
}

// Reader reads remote segments of all partitions of a broker.
type Reader struct {
	o       Options
	base    context.Context // ends with Close; fetches run under it
	cancel  context.CancelFunc
	workers chan struct{}
	running sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	flights map[key]*flight
	indexes *cache
	blocks  *cache
	tails   tails
}

// New returns a Reader. Close it.
func New(o Options) *Reader {
	o = o.filled()
	r := &Reader{o: o, workers: make(chan struct{}, o.Workers), flights: map[key]*flight{},
		indexes: newCache(o.IndexCacheBytes), blocks: newCache(o.ChunkCacheBytes), tails: tails{seen: map[tail]bool{}}}
	r.base, r.cancel = context.WithCancel(context.Background())
	return r
}

// Close ends all fetches and waits for them. Calls under way and later ones return ErrClosed.
func (r *Reader) Close() error {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.cancel()
	r.running.Wait()
	return nil
}

// Forget drops what is cached of a segment, because its objects are going away.
func (r *Reader) Forget(id tp.UUID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.indexes.forget(id)
	r.blocks.forget(id)
}
