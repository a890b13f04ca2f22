// Package partition is one replica of a partition: its log, its role, its high watermark and what the tier holds of it.
// It answers what may be appended, what may be read, and where reading has to go on; it does not know requests.
//
// Concurrency: all methods may be called from any goroutine. One mutex guards the role; the log has its own, which is
// only ever taken inside it. Waiters are woken outside of both.
package partition

import (
	"errors"
	"fmt"
	"sync"
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

	id      tp.Partition
	topicID tp.UUID

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

// New returns a replica over an open log. The high watermark starts at hw, clamped to the log, as the checkpoint had it.
func New(id tp.Partition, topicID tp.UUID, self int32, l *log.Log, hw int64) *Partition {
	p := &Partition{id: id, topicID: topicID, self: self, log: l, leader: -1, epoch: -1, watchers: map[*Waiter]struct{}{}}
	o := l.Offsets()
	p.hw = min(max(hw, o.LocalLogStart), o.End)
	l.SetHighWatermark(p.hw)
	return p
}

// Offline returns a replica whose log could not be opened; every use of it answers with the cause.
func Offline(id tp.Partition, topicID tp.UUID, self int32, cause error) *Partition {
	return &Partition{id: id, topicID: topicID, self: self, leader: -1, epoch: -1, offline: cause, watchers: map[*Waiter]struct{}{}}
}

// ID names the partition and TopicID its topic's incarnation.
func (p *Partition) ID() tp.Partition { return p.id }

// TopicID is the id of the partition's topic.
func (p *Partition) TopicID() tp.UUID { return p.topicID }

// Lead makes the replica follow what the image says of its leadership. As the only member of its ISR a leader commits all
// that it holds.
func (p *Partition) Lead(leader, epoch int32) {
	p.mu.Lock()
	defer p.mu.Unlock()
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
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.log == nil {
		return tp.NoEpoch, tp.NoOffset
	}
	if epoch == p.epoch {
		return epoch, p.log.Offsets().End
	}
	return p.log.EndOffsetForEpoch(epoch)
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
func (p *Partition) leads(epoch int32) error {
	if p.offline != nil {
		return fmt.Errorf("%w: %s: %w", ErrOffline, p.id, p.offline)
	}
	if p.leader != p.self {
		return fmt.Errorf("%w: %s is led by %d", ErrNotLeader, p.id, p.leader)
	}
	switch {
	case epoch < 0 || epoch == p.epoch:
		return nil
	case epoch < p.epoch:
		return fmt.Errorf("%w: %s is in epoch %d, not %d", ErrFencedEpoch, p.id, p.epoch, epoch)
	}
	return fmt.Errorf("%w: %s is in epoch %d, not %d", ErrUnknownEpoch, p.id, p.epoch, epoch)
}

// Append appends batches as leader and stamps them with the leader's epoch. With one replica in sync they are committed
// at once. internal allows control batches and several batches, for the coordinators.
func (p *Partition) Append(records []byte, now time.Time, internal bool) (log.AppendResult, error) {
	p.mu.Lock()
	if err := p.leads(tp.NoEpoch); err != nil {
		p.mu.Unlock()
		return log.AppendResult{}, err
	}
	active := p.log.Offsets().ActiveBase
	r, err := p.log.AppendAsLeader(log.AppendRequest{Records: records, LeaderEpoch: p.epoch, Now: now, Internal: internal})
	if err != nil {
		p.fail(err)
		p.mu.Unlock()
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
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.leads(epoch); err != nil {
		return Offsets{Leader: p.leader, LeaderEpoch: p.epoch}, err
	}
	o := Offsets{Offsets: p.log.Offsets(), HighWatermark: p.hw, LastStable: p.hw, Leader: p.leader, LeaderEpoch: p.epoch, RemoteEnd: p.remote.End()}
	if first, ok := p.log.FirstUnstable(p.hw); ok {
		o.LastStable = min(first, p.hw)
	}
	return o, nil
}

// Log is the partition's log, nil if it is offline.
func (p *Partition) Log() *log.Log {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log
}

// Cause says why the partition is offline, nil if it is not.
func (p *Partition) Cause() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.offline
}

// Remote is what the tier holds. The value is immutable.
func (p *Partition) Remote() tier.Segments {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.remote
}

// Leadership is the leader and its epoch.
func (p *Partition) Leadership() (leader, epoch int32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.leader, p.epoch
}

// SetRemote takes over what the image says of the tier: what may be deleted locally, and where the log starts.
func (p *Partition) SetRemote(remote tier.Segments, logStart int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.remote = remote
	if p.offline != nil {
		return nil
	}
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
	defer p.mu.Unlock()
	if err := p.leads(tp.NoEpoch); err != nil {
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
func (p *Partition) HighWatermark() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hw
}

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

// notifyAndUnlock signals the watchers. Sending to a channel with room never waits, so it may happen under the lock.
func (p *Partition) notifyAndUnlock() {
	for w := range p.watchers {
		select {
		case w.C <- struct{}{}:
		default:
		}
	}
	p.mu.Unlock()
}
