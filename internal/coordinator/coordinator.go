// Package coordinator hosts consumer groups on the partitions of __consumer_offsets: it loads them from the log, serves
// the requests of their members, writes what has to last, and keeps their clocks. The rules of a group are those of package group, if its
// members use the classic protocol, or of consumergroup; what it has committed is package committed's.
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
	"time"

	"github.com/varve-io/varve/internal/commit"
	"github.com/varve-io/varve/internal/committed"
	"github.com/varve-io/varve/internal/consumergroup"
	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/grouprecord"
	"github.com/varve-io/varve/internal/metadata"
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
	// ErrMetadataTooLarge: the text beside a committed offset is too long (OFFSET_METADATA_TOO_LARGE 12).
	ErrMetadataTooLarge = errors.New("offset metadata too large")
)

// Config is asked for at each use, so that changes take effect.
type Config struct {
	Group             group.Config
	Consumer          func(group string) consumergroup.Config // what holds for a consumer group
	Image             func() *metadata.Image
	MetadataMax       int // bytes of the text beside a committed offset
	OffsetRetentionMs int64
	Partitions        int // of the topic
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

// hosted is a group: what it has committed, who is in it, and its clock.
type hosted struct {
	id      string
	offsets *committed.Offsets
	members membership
	timer   *time.Timer
	due     int64
}

// membership is who is in a group, and what they agreed on: a *group.Group, or a *consumergroup.Group.
type membership interface {
	NextDeadline() int64
	MayDelete() error
	Subscribed(topic string) bool
}

// classic is the membership of a group of the classic protocol, nil if it is another.
func (h *hosted) classic() *group.Group {
	g, _ := h.members.(*group.Group)
	return g
}

// consumer is the membership of a group of the consumer protocol, nil if it is another.
func (h *hosted) consumer() *consumergroup.Group {
	g, _ := h.members.(*consumergroup.Group)
	return g
}

// empty says that a group has no members.
func (h *hosted) empty() bool { return h.members.MayDelete() == nil }

// Elect makes this broker the coordinator of a partition's groups. It reads the partition in the background; until then
// requests get ErrLoading. done is called when loading has ended.
func (gs *Groups) Elect(part *partition.Partition, done func()) {
	gs.hosts.elect(part.ID().Index, &shard{seat: newSeat(context.Background(), part), owner: gs, groups: map[string]*hosted{},
		joins: map[group.Token]chan group.JoinResult{}, syncs: map[group.Token]chan group.SyncResult{}}, done)
}

// Resign stops coordinating a partition's groups.
func (gs *Groups) Resign(index int32) { gs.hosts.resign(index) }

// Close resigns everywhere and for good: parked requests are answered with ErrNotCoordinator.
func (gs *Groups) Close() { gs.hosts.close() }

func (s *shard) close() {
	s.end()
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

// group returns a hosted group. With create it is made, as a classic one without members.
func (s *shard) group(id string, create bool) *hosted {
	h := s.groups[id]
	if h == nil && create {
		h = s.host(id, committed.New(id), group.New(id, s.owner.config().Group, now()))
	}
	return h
}

func (s *shard) host(id string, offsets *committed.Offsets, members membership) *hosted {
	h := &hosted{id: id, offsets: offsets, members: members}
	h.timer = time.AfterFunc(math.MaxInt64, func() { s.tick(h) })
	s.groups[id] = h
	return h
}

func (s *shard) tick(h *hosted) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.groups[h.id] != h {
		return
	}
	h.due = 0
	switch g := h.members.(type) {
	case *group.Group:
		s.apply(h, g.Tick(now()))
	case *consumergroup.Group:
		if err := s.change(h, g.Tick(s.env(h.id), now())); err != nil {
			s.owner.log.Error("group state was not written", "group", h.id, "cause", err)
			h.due = now() + retryMs // the members are still due: not at once again
			h.timer.Reset(retryMs * time.Millisecond)
		}
	}
}

// retryMs is the pause before members are put out again that could not be, since nothing could be written.
const retryMs = 1000

func (s *shard) env(groupID string) consumergroup.Env {
	c := s.owner.config()
	return consumergroup.Env{Config: c.Consumer(groupID), Classic: c.Group, Image: c.Image()}
}

// change writes what changed in a group of the consumer protocol. If nothing could be written nothing has changed. An error may also mean that
// it is not known yet whether what was written will last: the group goes on from there, as all that comes after builds on it.
func (s *shard) change(h *hosted, c *consumergroup.Changes) error {
	var err error
	if len(c.Records) > 0 {
		var w commit.Write
		if w, err = s.seat.append(encoded(c.Records), nil); err != nil {
			c.Undo()
			return notPersisted(err)
		}
		err = committedWithin(s.owner.config().CommitTimeout, w)
	}
	if c.Classic != nil {
		h.members = c.Classic
		if c.Rebalance {
			s.apply(h, c.Classic.Rebalance(now()))
		}
	}
	s.setClock(h)
	if err != nil {
		return notPersisted(err)
	}
	return nil
}

// apply carries out what an event made happen in a classic group and sets its clock.
func (s *shard) apply(h *hosted, e group.Effects) {
	for more := true; more; {
		more = false
		generation := h.classic().Generation()
		var err error
		if len(e.Write) > 0 {
			if _, err = s.append(e.Write); err != nil {
				s.owner.log.Error("group state was not written", "group", h.id, "cause", err)
				err = notPersisted(err)
			}
		}
		s.reply(e)
		if e.Confirm {
			e, more = h.classic().Persisted(generation, err, now()), true
		}
	}
	s.setClock(h)
}

// reply ends requests that were parked.
func (s *shard) reply(e group.Effects) {
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
}

func (s *shard) setClock(h *hosted) {
	if due := h.members.NextDeadline(); due != h.due {
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
func (s *shard) append(records []grouprecord.Entry) (at int64, err error) {
	w, err := s.seat.append(encoded(records), nil)
	if err != nil {
		return 0, err
	}
	return w.Next - 1, committedWithin(s.owner.config().CommitTimeout, w)
}

func encoded(records []grouprecord.Entry) []Record {
	out := make([]Record, len(records))
	for i, e := range records {
		out[i] = Record(e.Record())
	}
	return out
}

// loaded is a group on the way into memory. It has records of at most one membership.
type loaded struct {
	offsets  *committed.Offsets
	classic  *group.Group
	consumer *consumergroup.Group
}

// load folds the partition's records into groups. Records that do not parse are skipped with one line for all: one bad
// record must not take a thousand groups down.
func (s *shard) load() {
	groups := map[string]*loaded{}
	skipped, first := 0, error(nil)
	skip := func(err error) {
		if skipped++; first == nil {
			first = err
		}
	}
	offsets := func(id string) *committed.Offsets {
		if l := groups[id]; l != nil {
			return l.offsets
		}
		return nil
	}
	start := time.Now()
	c := s.owner.config()
	end, err := Read(s.part.Log(), func(h *recordbatch.Header, r *recordbatch.Record) {
		if h.IsControl() {
			// A marker that cannot be read decides nothing, as when it was appended.
			if m, err := recordbatch.ParseControl(r.Key, r.Value); err == nil && m.Type <= recordbatch.ControlCommit {
				s.endTxn(h.ProducerID, m.Type == recordbatch.ControlCommit, offsets)
			}
			return
		}
		e, ok, err := grouprecord.Parse(r.Key, r.Value)
		if err != nil || !ok {
			if err != nil {
				skip(fmt.Errorf("offset %d: %w", r.Offset, err))
			}
			return
		}
		l := groups[e.Group]
		if l == nil {
			l = &loaded{offsets: committed.New(e.Group)}
			groups[e.Group] = l
		}
		o, isOffset := e.Value.(*grouprecord.Offset)
		switch {
		case isOffset && h.IsTransactional():
			l.offsets.SetPending(h.ProducerID, e.Partition, *o, r.Offset)
			s.inTxn(h.ProducerID, e.Group)
		case isOffset:
			l.offsets.Set(e.Partition, *o, r.Offset)
		case e.Kind == grouprecord.KindOffset:
			l.offsets.Forget(e.Partition)
		default:
			l.fold(e, c.Group, start.UnixMilli())
		}
	})
	if err == nil {
		s.settle(end)
	}
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
		s.endTxn(e.producerID, e.commit, offsets)
	}
	s.late = nil
	for id, l := range groups {
		switch {
		case l.consumer != nil:
			l.consumer.Loaded(c.Consumer(id), start.UnixMilli())
			s.setClock(s.host(id, l.offsets, l.consumer))
		case l.classic != nil:
			s.setClock(s.host(id, l.offsets, l.classic))
		case !l.offsets.Empty():
			s.setClock(s.host(id, l.offsets, group.New(id, c.Group, start.UnixMilli())))
		}
	}
}

// fold takes a record of a membership in.
func (l *loaded) fold(e grouprecord.Entry, c group.Config, now int64) {
	switch {
	case e.Kind == grouprecord.KindClassicGroup && e.Value == nil:
		l.classic = nil
	case e.Kind == grouprecord.KindClassicGroup:
		l.classic, l.consumer = group.New(e.Group, c, now), nil
		l.classic.Restore(e, now)
	case e.Kind == grouprecord.KindGroupEpoch && e.Value == nil:
		l.consumer = nil
	case e.Value != nil && l.consumer == nil:
		l.consumer, l.classic = consumergroup.New(e.Group), nil
		l.consumer.Apply(e)
	case l.consumer != nil:
		l.consumer.Apply(e)
	}
}
