package coordinator

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"
	"unicode/utf16"

	"github.com/varve-io/varve/internal/commit"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/recordbatch"
)

// patience is how long a request waits for a partition that is expected. A broker that has just heard of a new leader names it
// as the coordinator at once, which may be before that one is ready.
const patience = time.Second

// PartitionFor is the partition of the topic that holds a group or transactional id: the absolute value of Java's hash of the id,
// modulo the number of partitions. The hash without an absolute value counts as 0, as in Kafka (Utils.abs).
func PartitionFor(id string, partitions int) int32 {
	h := javaHash(id)
	switch {
	case h == math.MinInt32:
		h = 0
	case h < 0:
		h = -h
	}
	return h % int32(partitions)
}

// javaHash is String.hashCode, which counts UTF-16 units.
func javaHash(s string) int32 {
	var h int32
	for _, c := range utf16.Encode([]rune(s)) {
		h = 31*h + int32(c)
	}
	return h
}

// seat is a partition of one of the topics, whose content a coordinator keeps in memory while this broker leads it.
type seat struct {
	part  *partition.Partition
	epoch int32           // leader epoch
	ctx   context.Context // ends with the leadership
	end   context.CancelFunc

	mu      sync.Mutex
	loading bool
	failed  error
	closed  bool
}

// newSeat takes a partition that this broker leads.
func newSeat(ctx context.Context, part *partition.Partition) seat {
	_, epoch := part.Leadership()
	ctx, end := context.WithCancel(ctx)
	return seat{part: part, epoch: epoch, ctx: ctx, end: end, loading: true}
}

// keeper is a seat with what it keeps.
type keeper interface {
	seated() *seat
	load()  // reads the partition
	close() // answers whoever waits
}

func (s *seat) seated() *seat { return s }

// lock locks a seat that is ready.
func (s *seat) lock() error {
	s.mu.Lock()
	switch {
	case s.closed:
		s.mu.Unlock()
		return ErrNotCoordinator
	case s.loading:
		s.mu.Unlock()
		return ErrLoading
	case s.failed != nil:
		s.mu.Unlock()
		return fmt.Errorf("%w: %w", ErrUnavailable, s.failed)
	}
	// Another broker may coordinate already, as long as this one does not reach the controller: what is in memory may be of the past.
	if _, err := s.part.Offsets(s.epoch); errors.Is(err, partition.ErrNotLeader) || errors.Is(err, partition.ErrFencedEpoch) {
		s.mu.Unlock()
		return fmt.Errorf("%w: %w", ErrNotCoordinator, err)
	}
	return nil
}

// settle waits until what was read, up to end, is committed, or the leadership ends. Until then the next leader may be one that does not have it, so that
// nothing must come of it: no marker, and no answer.
func (s *seat) settle(end int64) {
	read := commit.Write{Part: s.part, Next: end, Epoch: s.epoch}
	for tries := 0; s.ctx.Err() == nil; tries++ {
		if commit.Wait(s.ctx, time.Minute, []commit.Write{read})[0] == nil {
			return
		}
		s.pause(tries)
	}
}

// pause is the pause after so many tries; the end of the leadership ends it.
func (s *seat) pause(tries int) {
	select {
	case <-s.ctx.Done():
	case <-time.After(min(backoffMin<<min(tries, 10), backoffMax)):
	}
}

// hosts are the partitions of one topic that this broker coordinates.
type hosts[K keeper] struct {
	mu      sync.Mutex
	seats   map[int32]K
	closed  bool
	changed chan struct{} // closed when a partition is there or loaded
}

func newHosts[K keeper]() hosts[K] {
	return hosts[K]{seats: map[int32]K{}, changed: make(chan struct{})}
}

func (h *hosts[K]) broadcastLocked() {
	close(h.changed)
	h.changed = make(chan struct{})
}

// elect puts a keeper, which is loading, in its place and loads it. done is called when that has ended.
func (h *hosts[K]) elect(index int32, k K, done func()) {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		done()
		return
	}
	old, had := h.seats[index]
	h.seats[index] = k
	h.broadcastLocked()
	h.mu.Unlock()
	if had {
		old.close()
	}
	go func() {
		defer done()
		k.load()
		h.mu.Lock()
		defer h.mu.Unlock()
		h.broadcastLocked()
	}()
}

func (h *hosts[K]) resign(index int32) {
	h.mu.Lock()
	k, had := h.seats[index]
	delete(h.seats, index)
	h.mu.Unlock()
	if had {
		k.close()
	}
}

// close resigns everywhere and for good.
func (h *hosts[K]) close() {
	h.mu.Lock()
	h.closed = true
	h.broadcastLocked()
	seats := h.seats
	h.seats = map[int32]K{}
	h.mu.Unlock()
	for _, k := range seats {
		k.close()
	}
}

// all are the present keepers, ready or not.
func (h *hosts[K]) all() []K {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []K
	for _, k := range h.seats {
		out = append(out, k)
	}
	return out
}

// ready returns the keeper of an id, locked. It waits for one that is expected, for a moment.
func (h *hosts[K]) ready(id string, place func() (partitions int, expects func(int32) bool)) (K, error) {
	var late <-chan time.Time
	for {
		partitions, expects := place()
		index := PartitionFor(id, partitions)
		h.mu.Lock()
		k, there := h.seats[index]
		changed, closed := h.changed, h.closed
		h.mu.Unlock()
		err := ErrNotCoordinator
		if there {
			err = k.seated().lock()
		}
		switch {
		case err == nil:
			return k, nil
		case closed || expects == nil || !expects(index) || !errors.Is(err, ErrNotCoordinator) && !errors.Is(err, ErrLoading):
			return k, err
		}
		if late == nil {
			timer := time.NewTimer(patience)
			defer timer.Stop()
			late = timer.C
		}
		select {
		case <-changed:
		case <-late:
			return k, err
		}
	}
}

// Record is a record of one of the topics; a nil value is a tombstone.
type Record struct{ Key, Value []byte }

// batchBytes bounds a batch of records: all tombstones of a large group must not become one that the topic refuses.
const batchBytes = 512 << 10

// InTxn is the transaction that records belong to. Unless Checked it was confirmed when the partition ended at ConfirmedAt, and is over if
// a marker followed since.
type InTxn struct {
	ProducerID  int64
	Epoch       int16
	Checked     bool
	ConfirmedAt int64
}

// append appends records and returns what to wait for. An error says that nothing was written, or that the log is out of service.
func (s *seat) append(records []Record, by *InTxn) (commit.Write, error) {
	return Append(s.part, records, by, s.epoch, time.Now())
}

// Append appends records of a coordinator, as batches of at most batchBytes (or one record), and returns what to wait for. by is the
// transaction that they belong to, nil for none, epoch the leader epoch in which the coordinator read the partition: in another one nothing
// is written.
func Append(part *partition.Partition, records []Record, by *InTxn, epoch int32, at time.Time) (commit.Write, error) {
	var all []byte
	fresh := func() *recordbatch.Builder {
		b := recordbatch.NewBuilder()
		if by != nil {
			b.ProducerID, b.ProducerEpoch, b.Transactional = by.ProducerID, by.Epoch, true
		}
		return b
	}
	b := fresh()
	b.Grow(len(records), min(size(records), batchBytes))
	build := func() error {
		batch, err := b.Build()
		if all == nil {
			all = batch // mostly the only one
		} else {
			all = append(all, batch...)
		}
		return err
	}
	for _, r := range records {
		if b.Count() > 0 && b.Size()+len(r.Key)+len(r.Value) > batchBytes {
			if err := build(); err != nil {
				return commit.Write{}, err
			}
			b = fresh()
		}
		b.Add(recordbatch.Record{Timestamp: at.UnixMilli(), Key: r.Key, Value: r.Value})
	}
	if err := build(); err != nil {
		return commit.Write{}, err
	}
	w := partition.Write{Records: all, Now: at, Internal: true, AllReplicas: true, InEpoch: true, Epoch: epoch}
	if by != nil && !by.Checked {
		w.Confirmed, w.ConfirmedAt = true, by.ConfirmedAt
	}
	r, err := part.Append(w)
	if err != nil {
		return commit.Write{}, err
	}
	return commit.Write{Part: part, Next: r.LastOffset + 1, Epoch: r.Epoch}, nil
}

// size is the number of bytes of records' keys and values.
func size(records []Record) (n int) {
	for _, r := range records {
		n += len(r.Key) + len(r.Value)
	}
	return n
}

// committedWithin waits until a write is committed.
func committedWithin(limit time.Duration, w commit.Write) error {
	return commit.Wait(context.Background(), limit, []commit.Write{w})[0]
}

// Read reads a coordinator's log up to its present end, which it returns: the high watermark of a new leader may be below what its predecessor
// answered, and all that is in its log will be committed or nothing that comes after it. use gets records with their batch, and each
// control batch once, with its control record's key and value. It does not ask who leads: a broker that is not sure for a moment reads all
// the same, and goes on when it is.
func Read(l *log.Log, use func(*recordbatch.Header, *recordbatch.Record)) (end int64, err error) {
	if l == nil {
		return -1, partition.ErrOffline
	}
	marks := l.Offsets()
	for at := marks.LogStart; at < marks.End; {
		view, err := l.Read(at, 4<<20, marks.End, true)
		if err != nil {
			var out *log.OffsetOutOfRangeError
			if errors.As(err, &out) && out.LocalLogStart > at {
				at = out.LocalLogStart // retention moved on meanwhile
				continue
			}
			return -1, err
		}
		b, err := view.AppendTo(nil)
		next := view.NextOffset
		view.Release()
		if err != nil {
			return -1, err
		}
		if len(b) == 0 {
			at = max(next, at+1) // a hole that compaction left
			continue
		}
		for len(b) > 0 {
			h, err := recordbatch.ParseHeader(b)
			if err != nil {
				return -1, err
			}
			if err := h.Verify(b); err != nil {
				return -1, err
			}
			it, err := recordbatch.Records(b, 0)
			if err != nil {
				return -1, err
			}
			for it.Next() {
				use(&h, it.Record())
			}
			if it.Err() != nil {
				return -1, it.Err()
			}
			at, b = h.NextOffset(), b[h.Size:]
		}
	}
	return marks.End, nil
}

// wait returns what arrives on c, or failed when ctx ends first.
func wait[R any](ctx context.Context, c <-chan R, failed R) R {
	select {
	case r := <-c:
		return r
	case <-ctx.Done():
		return failed
	}
}
