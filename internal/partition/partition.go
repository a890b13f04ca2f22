// Package partition is one replica of a partition: its log, its role, its high watermark and what the tier holds of it.
// As leader it tracks its followers, advances the high watermark and proposes the ISR (leader.go); as follower it takes
// over what its leader has, and only what the leader of its own epoch has (follower.go). It knows no requests, no
// connections and no clock.
//
// Concurrency: all methods may be called from any goroutine. One mutex guards the role and orders appends; the log has its
// own, which is only ever taken inside it. What readers ask for (offsets, leadership, the tier) is published after every
// change and read without a lock, so that fetches never wait for a write.
package partition

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

var (
	// ErrNotLeader refuses what only a leader may do.
	ErrNotLeader = errors.New("not leader or follower")
	// ErrFencedEpoch and ErrUnknownEpoch refuse a request made in another leader epoch than the partition's (KIP-320).
	ErrFencedEpoch  = errors.New("fenced leader epoch")
	ErrUnknownEpoch = errors.New("unknown leader epoch")
	// ErrOffline is a partition whose log cannot be used; the cause is wrapped with it.
	ErrOffline = errors.New("partition is offline")
	// ErrNotEnoughReplicas refuses a write for all replicas while the ISR is below min.insync.replicas;
	// ErrNotEnoughAfterAppend says that it fell below while the write waited.
	ErrNotEnoughReplicas    = errors.New("not enough replicas are in sync")
	ErrNotEnoughAfterAppend = errors.New("not enough replicas are in sync to commit what was appended")
)

// Hooks hear of changes, outside of the partition's lock; they must not wait. Any may be nil.
type Hooks struct {
	Rolled  func(*Partition) // a segment was sealed
	Trimmed func(*Partition) // DeleteRecords moved the log start
	ISRDue  func(*Partition) // Propose has something to say
}

// Partition is one replica.
type Partition struct {
	id      tp.Partition
	topicID tp.UUID
	self    int32
	hooks   Hooks

	published atomic.Pointer[state]

	mu        sync.Mutex
	log       *log.Log // nil while offline
	offline   error
	held      error // like offline, until Resume
	role      Role
	suspended bool
	lead      *leadership // nil unless this replica leads
	hw        int64
	floor     int64 // the log start that the image has and this log has not yet, 0 for none
	remote    tier.Segments
	watchers  [events]map[*Waiter]struct{} // by Event
	isrDue    bool                         // ISRDue is to be called when the lock is free
}

// Role is what the image says of a partition's replicas. Slices are not changed by anybody.
type Role struct {
	Leader         int32 // -1 none
	LeaderEpoch    int32
	PartitionEpoch int32
	Replicas, ISR  []int32
	MinISR         int // min.insync.replicas of the topic; the number of replicas caps it
}

// minISR is how many replicas must be in sync for a write for all of them (Kafka's effectiveMinIsr).
func (r *Role) minISR() int { return min(max(r.MinISR, 1), len(r.Replicas)) }

// state is what readers see; it is never changed once published.
type state struct {
	log        *log.Log
	offline    error
	suspended  bool
	role       Role
	start      int64 // of a leader's epoch
	hw, stable int64
	remote     tier.Segments
}

// publishLocked makes the present state visible to readers.
func (p *Partition) publishLocked() {
	s := &state{log: p.log, offline: cmp.Or(p.offline, p.held), suspended: p.suspended, role: p.role, start: -1, hw: p.hw, stable: p.hw, remote: p.remote}
	if p.lead != nil {
		s.start = p.lead.start
	}
	if p.log != nil {
		if first, ok := p.log.FirstUnstable(p.hw); ok {
			s.stable = min(first, p.hw)
		}
	}
	p.published.Store(s)
}

// unlock publishes and lets go of the lock.
func (p *Partition) unlock() {
	p.publishLocked()
	p.release()
}

// release lets go of the lock and then calls what waits for that.
func (p *Partition) release() {
	due := p.isrDue
	p.isrDue = false
	p.mu.Unlock()
	if due && p.hooks.ISRDue != nil {
		p.hooks.ISRDue(p)
	}
}

// New returns a replica over an open log, without a role. The high watermark starts at hw, clamped to the log, as the
// checkpoint had it.
func New(id tp.Partition, topicID tp.UUID, self int32, l *log.Log, hw int64, h Hooks) *Partition {
	p := vacant(id, topicID, self, h)
	p.log = l
	o := l.Offsets()
	p.hw = min(max(hw, o.LocalLogStart), o.End)
	l.SetHighWatermark(p.hw)
	p.publishLocked()
	return p
}

// Offline returns a replica whose log could not be opened; every use of it answers with the cause.
func Offline(id tp.Partition, topicID tp.UUID, self int32, cause error) *Partition {
	p := vacant(id, topicID, self, Hooks{})
	p.offline = cause
	p.publishLocked()
	return p
}

func vacant(id tp.Partition, topicID tp.UUID, self int32, h Hooks) *Partition {
	return &Partition{id: id, topicID: topicID, self: self, hooks: h, role: Role{Leader: -1, LeaderEpoch: -1, PartitionEpoch: -1},
		watchers: [events]map[*Waiter]struct{}{{}, {}, {}}}
}

// ID names the partition and TopicID its topic's incarnation.
func (p *Partition) ID() tp.Partition { return p.id }

// TopicID is the id of the partition's topic.
func (p *Partition) TopicID() tp.UUID { return p.topicID }

// Assume makes the replica what the image says. An image older than the one before changes nothing.
func (p *Partition) Assume(r Role, now time.Time) {
	p.mu.Lock()
	defer p.notifyAndUnlock(everything...) // who waits here may have to go elsewhere
	moved := r.LeaderEpoch != p.role.LeaderEpoch
	if r.LeaderEpoch < p.role.LeaderEpoch || r.PartitionEpoch < p.role.PartitionEpoch || !moved && r.Leader != p.role.Leader {
		return // an epoch has one leader
	}
	altered := r.PartitionEpoch != p.role.PartitionEpoch
	p.role = r
	if p.offline != nil || p.held != nil {
		return
	}
	p.play(moved, altered, now)
}

// play begins or goes on with the role.
func (p *Partition) play(moved, altered bool, now time.Time) {
	switch r := &p.role; {
	case r.Leader != p.self:
		p.lead = nil
		return
	case moved || p.lead == nil:
		p.lead = newLeadership(&p.role, p.self, p.log.Offsets().End, now)
	case altered:
		p.lead.settled(&p.role, p.self)
	}
	p.advance(now)
}

// Hold takes the replica out of service, whatever its role is or becomes, until Resume: its log lacks what the tier
// holds, and must not give out those offsets again.
func (p *Partition) Hold(cause error) {
	p.mu.Lock()
	p.held, p.lead = cause, nil
	p.notifyAndUnlock(everything...)
}

// Rebuild gives a held replica an empty log that continues at next (log.TruncateFullyAndStartAt). The caller checkpoints
// recovery point and log start before Resume.
func (p *Partition) Rebuild(next, logStart int64, epochs []leaderepoch.Entry, snapshot []byte) error {
	p.mu.Lock()
	defer p.unlock()
	if p.offline != nil || p.held == nil {
		return fmt.Errorf("%w: %s is not held: %w", ErrOffline, p.id, p.offline)
	}
	return p.restart(next, logStart, epochs, snapshot)
}

// Resume puts a held replica back into service.
func (p *Partition) Resume(now time.Time) {
	p.mu.Lock()
	defer p.notifyAndUnlock(everything...)
	if p.held != nil && p.offline == nil {
		p.held = nil
		p.play(true, false, now)
	}
}

// Suspend makes a leader refuse everything, and a later call with false lets it go on: a broker that does not reach the
// controller may have been replaced without knowing it.
func (p *Partition) Suspend(suspended bool) {
	p.mu.Lock()
	p.suspended = suspended
	p.notifyAndUnlock(everything...)
}

// EndOffsetForEpoch answers OffsetForLeaderEpoch (KIP-279): where the records of an epoch end, and which epoch that is.
// A leader's own epoch counts from the moment it leads, though the lineage gets it with the first batch: an epoch without
// records leaves no trace in any replica, and a restart with thousands of partitions needs no thousand fsyncs.
func (p *Partition) EndOffsetForEpoch(epoch int32) (int32, int64) {
	s := p.published.Load()
	if s.log == nil {
		return tp.NoEpoch, tp.NoOffset
	}
	if s.start >= 0 {
		switch latest, ok := s.log.LatestEpoch(); {
		case epoch == s.role.LeaderEpoch:
			return epoch, s.log.Offsets().End
		case ok && epoch > latest.Epoch && epoch < s.role.LeaderEpoch:
			return latest.Epoch, s.log.Offsets().End
		case !ok && epoch >= 0 && epoch < s.role.LeaderEpoch:
			// Nothing is left of any epoch: the leader's own is the first, as Kafka's lineage has it from the start.
			return epoch, s.start
		}
	}
	return s.log.EndOffsetForEpoch(epoch)
}

// fail takes the partition offline for good, until it is opened again.
func (p *Partition) fail(err error) {
	if p.offline == nil && errors.Is(err, log.ErrLogDead) {
		p.offline = err
		p.lead = nil
	}
}

// usable checks that the log can be used and that epoch, unless it is -1, is the present leader epoch.
func (p *Partition) usable(s *state, epoch int32) error {
	if s.offline != nil {
		return fmt.Errorf("%w: %s: %w", ErrOffline, p.id, s.offline)
	}
	switch {
	case epoch < 0 || epoch == s.role.LeaderEpoch:
		return nil
	case epoch < s.role.LeaderEpoch:
		return fmt.Errorf("%w: %s is in epoch %d, not %d", ErrFencedEpoch, p.id, s.role.LeaderEpoch, epoch)
	}
	return fmt.Errorf("%w: %s is in epoch %d, not %d", ErrUnknownEpoch, p.id, s.role.LeaderEpoch, epoch)
}

// leads checks that this replica leads and is usable. epoch -1 asks for no particular epoch.
func (p *Partition) leads(s *state, epoch int32) error {
	switch {
	case s.offline != nil:
	case s.role.Leader != p.self:
		return fmt.Errorf("%w: %s is led by %d", ErrNotLeader, p.id, s.role.Leader)
	case s.suspended:
		return fmt.Errorf("%w: %s is led by somebody else, perhaps: this broker does not reach the controller", ErrNotLeader, p.id)
	}
	return p.usable(s, epoch)
}

// Offsets are the partition's marks at one moment.
type Offsets struct {
	log.Offsets
	HighWatermark int64
	LastStable    int64
	Leader        int32
	LeaderEpoch   int32
	EpochStart    int64 // of a leader: its log end when the epoch began, -1 of others
	RemoteEnd     int64 // last offset in the tier, -1 none
}

// PendingUpload is the first offset that is not in the tier and can be fetched (KIP-1023, ListOffsets -6): never below the
// local log, where nothing is left to upload, and never hidden behind the high watermark, since a follower needs it
// most when everything is uploaded.
func (o Offsets) PendingUpload() int64 { return max(o.RemoteEnd+1, o.LogStart, o.LocalLogStart) }

func (s *state) marks() Offsets {
	return Offsets{Offsets: s.log.Offsets(), HighWatermark: s.hw, LastStable: s.stable, Leader: s.role.Leader, LeaderEpoch: s.role.LeaderEpoch, EpochStart: s.start, RemoteEnd: s.remote.End()}
}

// Offsets returns the marks, and an error if this replica does not lead in epoch (-1 any).
func (p *Partition) Offsets(epoch int32) (Offsets, error) {
	s := p.published.Load()
	if err := p.leads(s, epoch); err != nil {
		return Offsets{Leader: s.role.Leader, LeaderEpoch: s.role.LeaderEpoch}, err
	}
	return s.marks(), nil
}

// ReplicaOffsets returns the marks of a leader or follower (KIP-392): a follower's high watermark is the one that its leader told it last.
func (p *Partition) ReplicaOffsets(epoch int32) (Offsets, error) {
	s := p.published.Load()
	err := p.usable(s, epoch)
	if err == nil && (s.role.Leader < 0 || s.suspended) {
		err = fmt.Errorf("%w: %s has no leader", ErrNotLeader, p.id)
	}
	if err != nil {
		return Offsets{Leader: s.role.Leader, LeaderEpoch: s.role.LeaderEpoch}, err
	}
	return s.marks(), nil
}

// Log is the partition's log, nil if it is offline.
func (p *Partition) Log() *log.Log { return p.published.Load().log }

// Cause says why the partition is offline, nil if it is not.
func (p *Partition) Cause() error { return p.published.Load().offline }

// Remote is what the tier holds. The value is immutable.
func (p *Partition) Remote() tier.Segments { return p.published.Load().remote }

// Role is the role of this moment.
func (p *Partition) Role() Role { return p.published.Load().role }

// Leadership is the leader and its epoch.
func (p *Partition) Leadership() (leader, epoch int32) {
	s := p.published.Load()
	return s.role.Leader, s.role.LeaderEpoch
}

// Leads reports whether this replica leads.
func (p *Partition) Leads() bool { return p.published.Load().role.Leader == p.self }

// SetRemote takes over what the image says of the tier: what may be deleted locally, and where the log starts.
func (p *Partition) SetRemote(remote tier.Segments, logStart int64) error {
	p.mu.Lock()
	defer p.unlock()
	p.remote = remote
	if p.offline != nil {
		return nil
	}
	// Readers must know where to find what the log may let go from the next line on.
	p.publishLocked()
	p.log.SetRemoteEnd(remote.End())
	o := p.log.Offsets()
	p.floor = max(logStart, reachable(remote, max(logStart, o.LogStart), o.LocalLogStart))
	return p.raiseLogStart(p.floor)
}

// reachable is the first offset from start on from which all is in the tier, or local and to be tiered. What lies before a gap
// is gone: a process that ended between moving its log start and noting it down forgets that it did. So is what lies
// before the tier: it can never get there, and the leader that made the tier had deleted it.
func reachable(remote tier.Segments, start, local int64) int64 {
	start = max(start, remote.Start())
	at := local
	for i := len(remote) - 1; i >= 0 && at > start; i-- {
		if s := remote[i]; s.State == tier.CopyFinished && s.Start < at && s.End >= at-1 {
			at = s.Start
		}
	}
	return max(at, start)
}

// raiseLogStart moves the log start up, at least to where the image has it, but not beyond the high watermark: the floor waits for that.
func (p *Partition) raiseLogStart(to int64) error {
	to = max(to, p.floor)
	if p.floor <= p.hw {
		p.floor = 0
	}
	if to = min(to, p.hw); to <= p.log.Offsets().LogStart {
		return nil
	}
	err := p.log.AdvanceLogStart(to)
	p.fail(err)
	return err
}

// DeleteRecords moves the log start up to offset; -1 means the high watermark. It returns the new log start (KIP-107).
func (p *Partition) DeleteRecords(offset int64) (int64, error) {
	start, err := p.deleteRecords(offset)
	if err == nil && p.hooks.Trimmed != nil {
		p.hooks.Trimmed(p)
	}
	return start, err
}

func (p *Partition) deleteRecords(offset int64) (int64, error) {
	p.mu.Lock()
	defer p.unlock()
	if err := p.leads(p.published.Load(), tp.NoEpoch); err != nil {
		return tp.NoOffset, err
	}
	if offset == -1 {
		offset = p.hw
	}
	if o := p.log.Offsets(); offset > p.hw || offset < 0 {
		return tp.NoOffset, &log.OffsetOutOfRangeError{Requested: offset, LogStart: o.LogStart, LocalLogStart: o.LocalLogStart, End: p.hw}
	}
	err := p.log.AdvanceLogStart(offset)
	p.fail(err)
	return p.log.Offsets().LogStart, err
}

// Close closes the log.
func (p *Partition) Close() error {
	p.mu.Lock()
	p.role.Leader, p.lead = -1, nil
	l := p.log
	if p.offline == nil {
		p.offline = errors.New("closed")
	}
	p.notifyAndUnlock(everything...)
	if l == nil {
		return nil
	}
	return l.Close()
}

// HighWatermark is the high watermark, whatever the role.
func (p *Partition) HighWatermark() int64 { return p.published.Load().hw }

// Retire stops serving: the partition is about to be deleted. Waiting fetches look again and find that out.
func (p *Partition) Retire() {
	p.mu.Lock()
	p.role.Leader, p.lead = -1, nil
	p.notifyAndUnlock(everything...)
}

// Event is what a waiter waits for. A change of the role is each of them.
type Event int8

const (
	Appended  Event = iota // the log end moved: followers
	Committed              // the high watermark moved: consumers, and writes for all replicas
	Trimmed                // the log start of a follower moved: who deletes records
	events                 // how many there are
)

// everything is what may have changed with the role.
var everything = []Event{Appended, Committed, Trimmed}

// Waiter is told when something about the partitions it watches may have changed.
type Waiter struct {
	C chan struct{} // holds at most one signal
}

// NewWaiter returns a waiter that watches nothing yet.
func NewWaiter() *Waiter { return &Waiter{C: make(chan struct{}, 1)} }

// Watch registers w; a change between Watch and a look at the partition is signalled.
func (p *Partition) Watch(w *Waiter, e Event) {
	p.mu.Lock()
	p.watchers[e][w] = struct{}{}
	p.mu.Unlock()
}

// Unwatch removes w.
func (p *Partition) Unwatch(w *Waiter, e Event) {
	p.mu.Lock()
	delete(p.watchers[e], w)
	p.mu.Unlock()
}

// notifyAndUnlock publishes and signals the watchers. Sending to a channel with room never waits, so it may happen under the lock.
func (p *Partition) notifyAndUnlock(events ...Event) {
	p.publishLocked()
	p.signal(events...)
	p.release()
}

func (p *Partition) signal(events ...Event) {
	for _, e := range events {
		for w := range p.watchers[e] {
			select {
			case w.C <- struct{}{}:
			default:
			}
		}
	}
}
