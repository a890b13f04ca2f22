package kafkatier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
	"github.com/varve-io/varve/internal/remotelog"
	"github.com/varve-io/varve/internal/tp"
)

// Options of Open. Seeds and Layout are needed; other zero values take the defaults in parentheses.
type Options struct {
	// Seeds are bootstrap brokers, HOST:PORT.
	Seeds []string
	// Client are more options of the Locator's own client, such as kgo.DialTLSConfig and kgo.SASL.
	Client []kgo.Opt
	// Layout is how the brokers' storage plug-in names its objects.
	Layout Layout
	// MetadataTopic is the topic that tells of remote segments (__remote_log_metadata).
	MetadataTopic string
	// Validity is for how long a location may be used without another look (30 s). Brokers delete objects as soon as they
	// have said so; one that is gone is a fallback.
	Validity time.Duration
	// Patience is how long the first question about a partition waits until what the metadata topic says of it was read
	// (2 s). After that the broker is asked, and the reading goes on.
	Patience time.Duration
	// CacheBytes bounds the cached indexes (32 MiB). One index may be larger by itself.
	CacheBytes int64
	// Logger gets what goes wrong with the metadata topic; nil is silence.
	Logger *slog.Logger
}

const (
	factsFresh = time.Second      // age of what leaders said when a location is given
	factsOld   = 5 * time.Second  // and when none is given
	badFor     = time.Minute      // how long a segment is left alone whose indexes are of no use
	idleAfter  = 10 * time.Minute // how long a partition is followed that nobody asks for
	maxParts   = 1 << 16          // partitions that are kept; of more the broker is asked
	pieceLimit = 30 * time.Second // for one index
)

// Locator implements direct.Locator. Close ends it.
type Locator struct {
	o      Options
	layout layout
	client *kgo.Client
	pieces *pieces
	follow *follower

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu    sync.Mutex
	parts map[partKey]*part
	bad   map[tp.UUID]time.Time // segments that are left alone, and until when
}

var _ direct.Locator = (*Locator)(nil)

// partKey is a partition as a client names it: by the topic's name or by its id.
type partKey struct {
	topic string
	id    tp.UUID
	index int32
}

// part is what is known of a partition that clients ask for. The Locator's mutex guards it, except for asking.
type part struct {
	key     partKey
	used    time.Time
	asking  sync.Mutex // held while leaders are asked
	facts   facts
	failed  time.Time // when leaders could not be asked
	waited  bool      // somebody was patient once
	listing *listing  // of layouts that list
}

// Open connects to the cluster and begins to follow. The fetcher gives it the object store, and the keys of encrypted segments.
func Open(fetcher *objectstore.Fetcher, o Options) (*Locator, error) {
	if len(o.Seeds) == 0 || o.Layout == nil {
		return nil, errors.New("kafkatier: seeds and a layout are needed")
	}
	if o.MetadataTopic == "" {
		o.MetadataTopic = remotelog.Topic
	}
	for _, d := range []struct {
		p   *time.Duration
		def time.Duration
	}{{&o.Validity, 30 * time.Second}, {&o.Patience, 2 * time.Second}} {
		if *d.p < 0 {
			return nil, fmt.Errorf("kafkatier: negative duration %s", *d.p)
		}
		if *d.p == 0 {
			*d.p = d.def
		}
	}
	if o.CacheBytes <= 0 {
		o.CacheBytes = 32 << 20
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	layout, err := o.Layout(fetcher)
	if err != nil {
		return nil, fmt.Errorf("kafkatier: %w", err)
	}
	opts := append([]kgo.Opt{kgo.SeedBrokers(o.Seeds...), kgo.ClientID("varve-kafkatier"), kgo.KeepControlRecords(), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchMaxPartitionBytes(1 << 20), kgo.FetchMaxBytes(8 << 20), kgo.DisableClientMetrics(), kgo.RetryTimeout(3 * time.Second)}, o.Client...)
	client, err := kgo.NewClient(opts...)
	if err != nil {
		return nil, fmt.Errorf("kafkatier: %w", err)
	}
	l := &Locator{o: o, layout: layout, client: client, parts: map[partKey]*part{}, bad: map[tp.UUID]time.Time{}}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.pieces = newPieces(l.ctx, o.CacheBytes)
	l.follow = newFollower(client, o.MetadataTopic, o.Logger)
	l.wg.Go(func() { l.follow.run(l.ctx) })
	l.wg.Go(l.janitor)
	return l, nil
}

// Close ends the Locator's connections and waits for its goroutines. It is safe to call it again.
func (l *Locator) Close() {
	l.cancel()
	l.wg.Wait()
	l.pieces.wait()
	l.client.Close()
}

// janitor forgets partitions that nobody asks for.
func (l *Locator) janitor() {
	tick := time.NewTicker(idleAfter / 10)
	defer tick.Stop()
	for {
		select {
		case <-l.ctx.Done():
			return
		case now := <-tick.C:
			l.sweep(now)
		}
	}
}

func (l *Locator) sweep(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	inUse := map[*followed]bool{}
	for key, p := range l.parts {
		if now.Sub(p.used) >= idleAfter || p.facts.at.IsZero() && !p.failed.IsZero() && now.Sub(p.failed) >= factsOld {
			delete(l.parts, key)
		} else if p.facts.log != nil {
			inUse[p.facts.log] = true
		}
	}
	for id, until := range l.bad {
		if !now.Before(until) {
			delete(l.bad, id)
		}
	}
	l.follow.keep(inUse)
}
