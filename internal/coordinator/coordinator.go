// Package coordinator hosts consumer groups on the partitions of __consumer_offsets: it loads them from the log, serves
// the requests of their members, writes what has to last, and keeps their clocks. The rules of a group are package group's.
//
// Concurrency: all methods may be called from any goroutine. Each partition of the topic has a lock of its own, under
// which its groups change and their records are appended; a waiting request holds no lock.
package coordinator

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"time"

	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/producerstate"
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

// Groups hosts the groups of this broker.
type Groups struct {
	hosts  hosts[*shard]
	config func() Config
	log    *slog.Logger
}

// New returns a host without partitions.
func New(config func() Config, log *slog.Logger) *Groups {
	return &Groups{config: config, log: log, hosts: newHosts[*shard]()}
}

// shard is one partition of the topic.
type shard struct {
	seat
	owner *Groups

	groups map[string]*hosted
	token  group.Token
	joins  map[group.Token]chan group.JoinResult
	syncs  map[group.Token]chan group.SyncResult
	txns   map[int64]map[string]bool // groups with commits of transactions that are not decided, by producer id
	late   []ended                   // that came while the partition was being read
}

// hosted is a group and its clock.
type hosted struct {
	*group.Group
	timer *time.Timer
	due   int64
}

// Elect makes this broker the coordinator of a partition's groups. It reads the partition in the background; until then
// requests get ErrLoading. done is called when loading has ended.
func (gs *Groups) Elect(part *partition.Partition, done func()) {
	_, epoch := part.Leadership()
	gs.hosts.elect(part.ID().Index, &shard{seat: seat{part: part, epoch: epoch, loading: true}, owner: gs, groups: map[string]*hosted{},
		joins: map[group.Token]chan group.JoinResult{}, syncs: map[group.Token]chan group.SyncResult{}}, done)
}

// Resign stops coordinating a partition's groups.
func (gs *Groups) Resign(index int32) { gs.hosts.resign(index) }

// Close resigns everywhere and for good: parked requests are answered with ErrNotCoordinator.
func (gs *Groups) Close() { gs.hosts.close() }

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
	return gs.hosts.ready(groupID, func() (int, func(int32) bool) {
		c := gs.config()
		return c.Partitions, c.Expects
	})
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
			if _, err = s.append(e.Write); err != nil {
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
	if errors.Is(err, partition.ErrNotLeader) || errors.Is(err, partition.ErrFencedEpoch) {
		return ErrNotCoordinator
	}
	if errors.Is(err, producerstate.ErrInvalidProducerEpoch) || errors.Is(err, producerstate.ErrInvalidTxnState) {
		return err // of a transaction that is over, which no repetition mends
	}
	return fmt.Errorf("%w: %v", ErrUnavailable, err) // whatever it was, members ask their coordinator again
}

// append writes records and returns when they are committed, with the offset of the last. The shard stays locked meanwhile, so that what
// is answered is always what a successor would read.
func (s *shard) append(records []group.Record) (at int64, err error) {
	w, err := s.seat.append(plain(records), nil)
	if err != nil {
		return 0, err
	}
	return w.Next - 1, committed(s.owner.config().CommitTimeout, w)
}

func plain(records []group.Record) []Record {
	out := make([]Record, len(records))
	for i, r := range records {
		out[i] = Record(r)
	}
	return out
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
	_, err := Read(s.part.Log(), func(h *recordbatch.Header, r *recordbatch.Record) {
		if h.IsControl() {
			// A marker that cannot be read decides nothing, as when it was appended.
			if m, err := recordbatch.ParseControl(r.Key, r.Value); err == nil && m.Type <= recordbatch.ControlCommit {
				s.endTxn(h.ProducerID, m.Type == recordbatch.ControlCommit, func(id string) *group.Group { return groups[id] })
			}
			return
		}
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
			entry.Offset.At = r.Offset
			if h.IsTransactional() {
				g.SetPending(h.ProducerID, *entry.Key, *entry.Offset)
				s.inTxn(h.ProducerID, entry.GroupID)
			} else {
				g.SetOffset(*entry.Key, *entry.Offset)
			}
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
	for _, e := range s.late {
		s.endTxn(e.producerID, e.commit, func(id string) *group.Group { return groups[id] })
	}
	s.late = nil
	for _, g := range groups {
		s.apply(s.host(g), group.Effects{})
	}
}
