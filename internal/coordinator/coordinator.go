// Package coordinator hosts consumer groups on the partitions of __consumer_offsets: it loads them from the log, serves
// the requests of their members, writes what has to last, and keeps their clocks. The rules of a group are package group's.
//
// Concurrency: all methods may be called from any goroutine. Each partition of the topic has a lock of its own, under
// which its groups change and their records are appended; a waiting request holds no lock.
package coordinator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"time"
	"unicode/utf16"

	"github.com/varve-io/varve/internal/commit"
	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/recordbatch"
)

// Topic is the internal topic that holds groups and offsets.
const Topic = "__consumer_offsets"

var (
	// ErrNotCoordinator: another broker hosts the group (NOT_COORDINATOR 16).
	ErrNotCoordinator = errors.New("not the coordinator of the group")
	// ErrLoading: the group's partition is still being read (COORDINATOR_LOAD_IN_PROGRESS 14).
	ErrLoading = errors.New("group coordinator is loading")
	// ErrUnavailable: there is no coordinator at the moment (COORDINATOR_NOT_AVAILABLE 15).
	ErrUnavailable = errors.New("group coordinator is not available")
)

// Config is asked for at each use, so that changes take effect.
type Config struct {
	Group      group.Config
	Partitions int // of the topic
	// CommitTimeout is how long records may take to be committed (offsets.commit.timeout.ms).
	CommitTimeout time.Duration
	// Expects says whether this broker is to coordinate a partition's groups, or may be, for all it knows: a request that comes
	// before the partition is ready waits for it then, a moment. Nil never expects any.
	Expects func(index int32) bool
}

// patience is how long a request waits for a partition that is expected. A broker that has just heard of a new leader names it
// as the coordinator at once, which may be before that one is ready.
const patience = time.Second

// Groups hosts the groups of this broker.
type Groups struct {
	config func() Config
	log    *slog.Logger

	mu      sync.Mutex
	shards  map[int32]*shard
	closed  bool
	changed chan struct{} // closed when a partition is there or loaded
}

// New returns a host without partitions.
func New(config func() Config, log *slog.Logger) *Groups {
	return &Groups{config: config, log: log, shards: map[int32]*shard{}, changed: make(chan struct{})}
}

func (gs *Groups) broadcastLocked() {
	close(gs.changed)
	gs.changed = make(chan struct{})
}

// shard is one partition of the topic.
type shard struct {
	index int32
	part  *partition.Partition
	owner *Groups

	mu      sync.Mutex
	loading bool
	failed  error
	closed  bool
	groups  map[string]*hosted
	token   group.Token
	joins   map[group.Token]chan group.JoinResult
	syncs   map[group.Token]chan group.SyncResult
}

// hosted is a group and its clock.
type hosted struct {
	*group.Group
	timer *time.Timer
	due   int64
}

// PartitionFor is the partition of the topic that holds a group: the absolute value of Java's hash of the id, modulo the
// number of partitions. The hash without an absolute value counts as 0, as in Kafka (Utils.abs).
func PartitionFor(groupID string, partitions int) int32 {
	h := javaHash(groupID)
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

// Elect makes this broker the coordinator of a partition's groups. It reads the partition in the background; until then
// requests get ErrLoading. done is called when loading has ended.
func (gs *Groups) Elect(part *partition.Partition, done func()) {
	index := part.ID().Index
	s := &shard{index: index, part: part, owner: gs, loading: true, groups: map[string]*hosted{},
		joins: map[group.Token]chan group.JoinResult{}, syncs: map[group.Token]chan group.SyncResult{}}
	gs.mu.Lock()
	if gs.closed {
		gs.mu.Unlock()
		done()
		return
	}
	old := gs.shards[index]
	gs.shards[index] = s
	gs.broadcastLocked()
	gs.mu.Unlock()
	if old != nil {
		old.close()
	}
	go func() {
		defer done()
		s.load()
		gs.mu.Lock()
		defer gs.mu.Unlock()
		gs.broadcastLocked()
	}()
}

// Resign stops coordinating a partition's groups.
func (gs *Groups) Resign(index int32) {
	gs.mu.Lock()
	s := gs.shards[index]
	delete(gs.shards, index)
	gs.mu.Unlock()
	if s != nil {
		s.close()
	}
}

// Close resigns everywhere and for good: parked requests are answered with ErrNotCoordinator.
func (gs *Groups) Close() {
	gs.mu.Lock()
	gs.closed = true
	gs.broadcastLocked()
	shards := gs.shards
	gs.shards = map[int32]*shard{}
	gs.mu.Unlock()
	for _, s := range shards {
		s.close()
	}
}

func (s *shard) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, h := range s.groups {
		h.timer.Stop()
	}
	for t, c := range s.joins {
		c <- group.JoinResult{Err: ErrNotCoordinator, Generation: -1}
		delete(s.joins, t)
	}
	for t, c := range s.syncs {
		c <- group.SyncResult{Err: ErrNotCoordinator}
		delete(s.syncs, t)
	}
}

// shard returns the shard of a group, locked and ready. It waits for one that is expected, for a moment.
func (gs *Groups) shard(groupID string) (*shard, error) {
	var late <-chan time.Time
	for {
		c := gs.config()
		index := PartitionFor(groupID, c.Partitions)
		gs.mu.Lock()
		s, changed, closed := gs.shards[index], gs.changed, gs.closed
		gs.mu.Unlock()
		err := ErrNotCoordinator
		if s != nil {
			err = s.lock()
		}
		switch {
		case err == nil:
			return s, nil
		case closed || c.Expects == nil || !c.Expects(index) || !errors.Is(err, ErrNotCoordinator) && !errors.Is(err, ErrLoading):
			return nil, err
		}
		if late == nil {
			timer := time.NewTimer(patience)
			defer timer.Stop()
			late = timer.C
		}
		select {
		case <-changed:
		case <-late:
			return nil, err
		}
	}
}

func (s *shard) lock() error {
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
	return nil
}

func now() int64 { return time.Now().UnixMilli() }

// group returns a hosted group, made if create.
func (s *shard) group(id string, create bool) *hosted {
	h := s.groups[id]
	if h == nil && create {
		h = s.host(group.New(id, s.owner.config().Group, now()))
	}
	return h
}

func (s *shard) host(g *group.Group) *hosted {
	h := &hosted{Group: g}
	h.timer = time.AfterFunc(math.MaxInt64, func() { s.tick(h) })
	s.groups[g.ID()] = h
	return h
}

func (s *shard) tick(h *hosted) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.groups[h.ID()] != h {
		return
	}
	h.due = 0
	s.apply(h, h.Tick(now()))
}

// apply carries out what an event made happen and sets the group's clock.
func (s *shard) apply(h *hosted, e group.Effects) {
	for more := true; more; {
		more = false
		generation := h.Generation()
		var err error
		if len(e.Write) > 0 {
			if err = s.append(e.Write); err != nil {
				s.owner.log.Error("group state was not written", "group", h.ID(), "cause", err)
				err = notPersisted(err)
			}
		}
		for _, r := range e.Joins {
			if c, ok := s.joins[r.Token]; ok {
				c <- r.Result
				delete(s.joins, r.Token)
			}
		}
		for _, r := range e.Syncs {
			if c, ok := s.syncs[r.Token]; ok {
				c <- r.Result
				delete(s.syncs, r.Token)
			}
		}
		if e.Confirm {
			e, more = h.Persisted(generation, err, now()), true
		}
	}
	if due := h.NextDeadline(); due != h.due {
		h.due = due
		if due == 0 {
			h.timer.Stop()
		} else {
			h.timer.Reset(time.Duration(max(due-now(), 0)) * time.Millisecond)
		}
	}
}

// notPersisted tells members what a failed write means to them.
func notPersisted(err error) error {
	if errors.Is(err, recordbatch.ErrTooLarge) {
		return fmt.Errorf("%w: the group's state exceeds max.message.bytes of %s: lower the number of members or the size of their metadata (group.max.size bounds the first): %w", group.ErrNotPersisted, Topic, err)
	}
	if errors.Is(err, partition.ErrNotLeader) {
		return ErrNotCoordinator
	}
	return fmt.Errorf("%w: %v", ErrUnavailable, err) // whatever it was, members ask their coordinator again
}

// batchBytes bounds a batch of group records: all tombstones of a large group must not become one that the topic refuses.
const batchBytes = 512 << 10

// append writes records, in one append, as batches of at most batchBytes (or one record), and returns when they are
// committed. The shard stays locked meanwhile, so that what is answered is always what a successor would read.
func (s *shard) append(records []group.Record) error {
	at := time.Now()
	var all []byte
	b := recordbatch.NewBuilder()
	build := func() error {
		batch, err := b.Build()
		all = append(all, batch...)
		return err
	}
	for _, r := range records {
		if b.Count() > 0 && b.Size()+len(r.Key)+len(r.Value) > batchBytes {
			if err := build(); err != nil {
				return err
			}
			b = recordbatch.NewBuilder()
		}
		b.Add(recordbatch.Record{Timestamp: at.UnixMilli(), Key: r.Key, Value: r.Value})
	}
	if err := build(); err != nil {
		return err
	}
	r, err := s.part.Append(partition.Write{Records: all, Now: at, Internal: true, AllReplicas: true})
	if err != nil {
		return err
	}
	return commit.Wait(context.Background(), s.owner.config().CommitTimeout, []commit.Write{{Part: s.part, Next: r.LastOffset + 1, Epoch: r.Epoch}})[0]
}

// load folds the partition's records into groups. Records that do not parse are skipped with one line for all: one bad
// record must not take a thousand groups down.
func (s *shard) load() {
	groups := map[string]*group.Group{}
	skipped, first := 0, error(nil)
	skip := func(err error) {
		if skipped++; first == nil {
			first = err
		}
	}
	start := time.Now()
	c := s.owner.config().Group
	err := s.each(func(r *recordbatch.Record) {
		entry, ok, err := group.ParseRecord(r.Key, r.Value)
		if err != nil || !ok {
			if err != nil {
				skip(fmt.Errorf("offset %d: %w", r.Offset, err))
			}
			return
		}
		g := groups[entry.GroupID]
		if g == nil {
			g = group.New(entry.GroupID, c, start.UnixMilli())
			groups[entry.GroupID] = g
		}
		switch {
		case entry.Offset != nil:
			g.SetOffset(*entry.Key, *entry.Offset)
		case entry.Key != nil:
			g.ForgetOffset(*entry.Key)
		case entry.Group != nil:
			g.Restore(entry.Group, start.UnixMilli())
		default:
			delete(groups, entry.GroupID)
		}
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loading, s.failed = false, err
	if err != nil {
		s.owner.log.Error("groups could not be loaded", "partition", s.part.ID().String(), "cause", err)
		return
	}
	if skipped > 0 {
		s.owner.log.Warn("unreadable group records were skipped", "partition", s.part.ID().String(), "count", skipped, "first", first)
	}
	if s.closed {
		return
	}
	for _, g := range groups {
		s.apply(s.host(g), group.Effects{})
	}
}

// each reads the partition up to its end: the high watermark of a new leader may be below what its predecessor answered,
// and all that is in its log will be committed or nothing that comes after it.
func (s *shard) each(use func(*recordbatch.Record)) error {
	marks, err := s.part.Offsets(-1)
	if err != nil {
		return err
	}
	l := s.part.Log()
	for at := marks.LogStart; at < marks.End; {
		view, err := l.Read(at, 4<<20, marks.End, true)
		if err != nil {
			var out *log.OffsetOutOfRangeError
			if errors.As(err, &out) && out.LocalLogStart > at {
				at = out.LocalLogStart // retention moved on meanwhile
				continue
			}
			return err
		}
		b, err := view.AppendTo(nil)
		next := view.NextOffset
		view.Release()
		if err != nil {
			return err
		}
		if len(b) == 0 {
			at = max(next, at+1) // a hole that compaction left
			continue
		}
		for len(b) > 0 {
			h, err := recordbatch.ParseHeader(b)
			if err != nil {
				return err
			}
			if err := h.Verify(b); err != nil {
				return err
			}
			if !h.IsControl() {
				it, err := recordbatch.Records(b, 0)
				if err != nil {
					return err
				}
				for it.Next() {
					use(it.Record())
				}
				if it.Err() != nil {
					return it.Err()
				}
			}
			at, b = h.NextOffset(), b[h.Size:]
		}
	}
	return nil
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
