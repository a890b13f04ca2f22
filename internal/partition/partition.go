// Package partition is one replica of a partition: its log, its role, its high watermark and what the tier holds of it.
// It answers what may be appended, what may be read, and where reading has to go on; it does not know requests.
//
// Concurrency: all methods may be called from any goroutine. One mutex guards the role and orders appends; the log has its
// own, which is only ever taken inside it. What readers ask for (offsets, leadership, the tier) is published after every
// change and read without a lock, so that fetches never wait for a write.
package partition

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

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
)

// Partition is one replica.
type Partition struct {
	// OnRoll hears that a segment was sealed, after the append that did it. Set it before the partition is shared; it must not wait.
	OnRoll func(*Partition)
	// OnTrim hears that DeleteRecords moved the log start, under the same terms.
	OnTrim func(*Partition)

	id      tp.Partition
	topicID tp.UUID

	published atomic.Pointer[state]

	mu       sync.Mutex
	log      *log.Log // nil while offline
	offline  error
	leader   int32 // -1 none
	self     int32
	epoch    int32
	hw       int64
	remote   tier.Segments
	watchers map[*Waiter]struct{}
}

// state is what readers see; it is never changed once published.
type state struct {
	log        *log.Log
	offline    error
	leader     int32
	epoch      int32
	hw, stable int64
	remote     tier.Segments
}

// publishLocked makes the present state visible to readers.
func (p *Partition) publishLocked() {
	s := &state{log: p.log, offline: p.offline, leader: p.leader, epoch: p.epoch, hw: p.hw, stable: p.hw, remote: p.remote}
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
	p.mu.Unlock()
}

// New returns a replica over an open log. The high watermark starts at hw, clamped to the log, as the checkpoint had it.
func New(id tp.Partition, topicID tp.UUID, self int32, l *log.Log, hw int64) *Partition {
	p := &Partition{id: id, topicID: topicID, self: self, log: l, leader: -1, epoch: -1, watchers: map[*Waiter]struct{}{}}
	o := l.Offsets()
	p.hw = min(max(hw, o.LocalLogStart), o.End)
	l.SetHighWatermark(p.hw)
	p.publishLocked()
	return p
}

// Offline returns a replica whose log could not be opened; every use of it answers with the cause.
func Offline(id tp.Partition, topicID tp.UUID, self int32, cause error) *Partition {
	p := &Partition{id: id, topicID: topicID, self: self, leader: -1, epoch: -1, offline: cause, watchers: map[*Waiter]struct{}{}}
	p.publishLocked()
	return p
}

// ID names the partition and TopicID its topic's incarnation.
func (p *Partition) ID() tp.Partition { return p.id }

// TopicID is the id of the partition's topic.
func (p *Partition) TopicID() tp.UUID { return p.topicID }

// Lead makes the replica follow what the image says of its leadership. As the only member of its ISR a leader commits all
// that it holds.
func (p *Partition) Lead(leader, epoch int32) {
	p.mu.Lock()
	defer p.notifyAndUnlock() // who waits here may have to go elsewhere
	if epoch <= p.epoch {
		return
	}
	p.leader, p.epoch = leader, epoch
	if leader != p.self || p.offline != nil {
		return
	}
	// The lineage gets the epoch with the first batch of it: an epoch without records leaves no trace, and a restart with
	// thousands of partitions needs no thousand fsyncs.
	p.commit(p.log.Offsets().End)
}

// EndOffsetForEpoch answers OffsetForLeaderEpoch (KIP-279): where the records of an epoch end, and which epoch that is.
func (p *Partition) EndOffsetForEpoch(epoch int32) (int32, int64) {
	s := p.published.Load()
	if s.log == nil {
		return tp.NoEpoch, tp.NoOffset
	}
	if epoch == s.epoch {
		return epoch, s.log.Offsets().End
	}
	return s.log.EndOffsetForEpoch(epoch)
}

// fail takes the partition offline for good, until it is opened again.
func (p *Partition) fail(err error) {
	if p.offline == nil && errors.Is(err, log.ErrLogDead) {
		p.offline = err
	}
}

// commit advances the high watermark.
func (p *Partition) commit(hw int64) {
	if hw > p.hw {
		p.hw = hw
		p.log.SetHighWatermark(hw)
	}
}

// leads checks that this replica leads and is usable. epoch -1 asks for no particular epoch.
func (p *Partition) leads(s *state, epoch int32) error {
	if s.offline != nil {
		return fmt.Errorf("%w: %s: %w", ErrOffline, p.id, s.offline)
	}
	if s.leader != p.self {
		return fmt.Errorf("%w: %s is led by %d", ErrNotLeader, p.id, s.leader)
	}
	switch {
	case epoch < 0 || epoch == s.epoch:
		return nil
	case epoch < s.epoch:
		return fmt.Errorf("%w: %s is in epoch %d, not %d", ErrFencedEpoch, p.id, s.epoch, epoch)
	}
	return fmt.Errorf("%w: %s is in epoch %d, not %d", ErrUnknownEpoch, p.id, s.epoch, epoch)
}

// Append appends batches as leader and stamps them with the leader's epoch. With one replica in sync they are committed
// at once. internal allows control batches and several batches, for the coordinators.
func (p *Partition) Append(records []byte, now time.Time, internal bool) (log.AppendResult, error) {
	p.mu.Lock()
	if err := p.leads(p.published.Load(), tp.NoEpoch); err != nil {
		p.mu.Unlock()
		return log.AppendResult{}, err
	}
	active := p.log.Offsets().ActiveBase
	r, err := p.log.AppendAsLeader(log.AppendRequest{Records: records, LeaderEpoch: p.epoch, Now: now, Internal: internal})
	if err != nil {
		if p.fail(err); p.offline != nil {
			p.notifyAndUnlock()
		} else {
			p.unlock()
		}
		return r, err
	}
	o := p.log.Offsets()
	p.commit(o.End)
	p.notifyAndUnlock()
	if o.ActiveBase != active && p.OnRoll != nil {
		p.OnRoll(p)
	}
	return r, nil
}

// Offsets are the partition's marks at one moment.
type Offsets struct {
	log.Offsets
	HighWatermark int64
	LastStable    int64
	Leader        int32
	LeaderEpoch   int32
	RemoteEnd     int64 // last offset in the tier, -1 none
}

// Offsets returns the marks, and an error if this replica does not lead in epoch (-1 any).
func (p *Partition) Offsets(epoch int32) (Offsets, error) {
	s := p.published.Load()
	if err := p.leads(s, epoch); err != nil {
		return Offsets{Leader: s.leader, LeaderEpoch: s.epoch}, err
	}
	return Offsets{Offsets: s.log.Offsets(), HighWatermark: s.hw, LastStable: s.stable, Leader: s.leader, LeaderEpoch: s.epoch, RemoteEnd: s.remote.End()}, nil
}

// Log is the partition's log, nil if it is offline.
func (p *Partition) Log() *log.Log { return p.published.Load().log }

// Cause says why the partition is offline, nil if it is not.
func (p *Partition) Cause() error { return p.published.Load().offline }

// Remote is what the tier holds. The value is immutable.
func (p *Partition) Remote() tier.Segments { return p.published.Load().remote }

// Leadership is the leader and its epoch.
func (p *Partition) Leadership() (leader, epoch int32) {
	s := p.published.Load()
	return s.leader, s.epoch
}

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
	if logStart <= p.log.Offsets().LogStart {
		return nil
	}
	err := p.log.AdvanceLogStart(min(logStart, p.hw))
	p.fail(err)
	return err
}

// DeleteRecords moves the log start up to offset; -1 means the high watermark. It returns the new log start (KIP-107).
func (p *Partition) DeleteRecords(offset int64) (int64, error) {
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
	if err == nil && p.OnTrim != nil {
		p.OnTrim(p)
	}
	return p.log.Offsets().LogStart, err
}

// Close closes the log.
func (p *Partition) Close() error {
	p.mu.Lock()
	p.leader = -1
	l := p.log
	if p.offline == nil {
		p.offline = errors.New("closed")
	}
	p.notifyAndUnlock()
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
	p.leader = -1
	p.notifyAndUnlock()
}

// Waiter is told when something about the partitions it watches may have changed.
type Waiter struct {
	C chan struct{} // holds at most one signal
}

// NewWaiter returns a waiter that watches nothing yet.
func NewWaiter() *Waiter { return &Waiter{C: make(chan struct{}, 1)} }

// Watch registers w; a change between Watch and a look at the partition is signalled.
func (p *Partition) Watch(w *Waiter) {
	p.mu.Lock()
	p.watchers[w] = struct{}{}
	p.mu.Unlock()
}

// Unwatch removes w.
func (p *Partition) Unwatch(w *Waiter) {
	p.mu.Lock()
	delete(p.watchers, w)
	p.mu.Unlock()
}

// notifyAndUnlock publishes and signals the watchers. Sending to a channel with room never waits, so it may happen under the lock.
func (p *Partition) notifyAndUnlock() {
	p.publishLocked()
	for w := range p.watchers {
		select {
		case w.C <- struct{}{}:
		default:
		}
	}
	p.mu.Unlock()
}
