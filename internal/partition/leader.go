package partition

import (
	"fmt"
	"slices"
	"time"

	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/tp"
)

// joinPatience is how long a follower that has nearly caught up holds the high watermark, so that it can reach it and join.
const joinPatience = time.Second

// leadership is what a leader knows of its followers in one leader epoch.
type leadership struct {
	start     int64 // end of the log when the epoch began
	followers map[int32]*followerOf
	// proposed is an ISR that is on its way to the controller, nil if none is. Until it is settled, what is in either ISR
	// must have a record before it is committed: it may be elected with either.
	proposed []int32
	// undecided are the members of proposals that got no answer. They may be in the ISR at any time until the image has a newer
	// partition epoch, which the next proposal brings about, also one of the present ISR.
	undecided []int32
	asking    bool
	again     time.Time // not before: the controller refused the last one
}

// followerOf is a follower as its leader sees it.
type followerOf struct {
	end       int64     // its log end, -1 before its first fetch
	start     int64     // of its log, -1 before its first fetch
	local     int64     // where its local log starts
	epoch     int64     // of its broker's run, -1 unknown
	caughtUp  time.Time // when it last had all there was
	fetched   time.Time
	leaderEnd int64     // this log's end at that fetch
	joining   time.Time // since when the high watermark waits for it to join the ISR; zero for not
}

func newFollower() *followerOf { return &followerOf{end: -1, start: -1, epoch: -1, leaderEnd: -1} }

func newLeadership(r *Role, self int32, end int64, now time.Time) *leadership {
	l := &leadership{start: end, followers: map[int32]*followerOf{}}
	for _, id := range r.Replicas {
		if id == self {
			continue
		}
		f := newFollower()
		if slices.Contains(r.ISR, id) {
			f.caughtUp = now // a grace: nobody can have fetched from a leader that is new (KAFKA-19996)
		}
		l.followers[id] = f
	}
	return l
}

// settled takes over an ISR that the image has: whatever was proposed is decided.
func (l *leadership) settled(r *Role, self int32) {
	l.proposed, l.undecided, l.asking = nil, nil, false
	for _, id := range r.Replicas {
		if id != self && l.followers[id] == nil {
			l.followers[id] = newFollower()
		}
	}
	for id, f := range l.followers {
		if !slices.Contains(r.Replicas, id) {
			delete(l.followers, id)
		} else if slices.Contains(r.ISR, id) {
			f.joining = time.Time{}
		}
	}
}

// elects says whether a replica that is not in the ISR may be elected all the same, for all that is known of proposals.
func (l *leadership) elects(id int32) bool {
	return slices.Contains(l.proposed, id) || slices.Contains(l.undecided, id)
}

// advance moves the high watermark up to what every replica that may be elected has. It stays while fewer replicas than
// min.insync.replicas are in sync: what only they have is not committed, whatever a write asked for.
func (p *Partition) advance(now time.Time) (moved bool) {
	if len(p.role.ISR) < p.role.minISR() {
		return false
	}
	hw := p.log.Offsets().End
	for id, f := range p.lead.followers {
		if f.joining.IsZero() && !slices.Contains(p.role.ISR, id) && !p.lead.elects(id) {
			continue
		}
		if !f.joining.IsZero() && now.Sub(f.joining) > joinPatience && !p.lead.elects(id) {
			f.joining = time.Time{} // too slow: it may try again once it is near
			continue
		}
		hw = min(hw, f.end)
	}
	if hw <= p.hw {
		return false
	}
	p.hw = hw
	p.log.SetHighWatermark(hw)
	if p.floor > 0 {
		_ = p.raiseLogStart(p.floor) // a log that fails is out of service
	}
	return true
}

// Write is what a leader is to append.
type Write struct {
	Records  []byte // the caller's; may be changed in place
	Now      time.Time
	Internal bool // allows control batches and several batches, for the coordinators
	// AllReplicas refuses the write while too few replicas are in sync (acks=all).
	AllReplicas bool
	// InEpoch refuses the write in any leader epoch but Epoch, which a coordinator's state was read in.
	InEpoch bool
	Epoch   int32
	// V2, Confirmed and ConfirmedAt are those of log.AppendRequest.
	V2, Confirmed bool
	ConfirmedAt   int64
}

// TxnState is log.TxnState; nothing is open in a partition without a log.
func (p *Partition) TxnState(producerID int64, epoch int16) (end int64, open bool) {
	if l := p.Log(); l != nil {
		return l.TxnState(producerID, epoch)
	}
	return 0, false
}

// Appended is where a write went; Epoch is the leader epoch that it was written in.
type AppendResult struct {
	log.AppendResult
	Epoch int32
}

// Append appends batches as leader and stamps them with the leader's epoch. They are committed when the high watermark is
// above them; see Await.
func (p *Partition) Append(w Write) (AppendResult, error) {
	p.mu.Lock()
	wanted := tp.NoEpoch
	if w.InEpoch {
		wanted = w.Epoch
	}
	err := p.leads(p.published.Load(), wanted)
	if err == nil && w.AllReplicas && len(p.role.ISR) < p.role.minISR() {
		err = fmt.Errorf("%w: %s has %d in sync, min.insync.replicas is %d", ErrNotEnoughReplicas, p.id, len(p.role.ISR), p.role.minISR())
	}
	if err != nil {
		p.mu.Unlock()
		return AppendResult{}, err
	}
	epoch := p.role.LeaderEpoch
	active := p.log.Offsets().ActiveBase
	r, err := p.log.AppendAsLeader(log.AppendRequest{Records: w.Records, LeaderEpoch: epoch, Now: w.Now, Internal: w.Internal,
		V2: w.V2, Confirmed: w.Confirmed, ConfirmedAt: w.ConfirmedAt})
	if err != nil {
		if p.fail(err); p.offline != nil {
			p.notifyAndUnlock(everything...)
		} else {
			p.unlock()
		}
		return AppendResult{AppendResult: r}, err
	}
	rolled := p.log.Offsets().ActiveBase != active
	if p.advance(w.Now) {
		p.notifyAndUnlock(Appended, Committed)
	} else {
		p.notifyAndUnlock(Appended)
	}
	if rolled && p.hooks.Rolled != nil {
		p.hooks.Rolled(p)
	}
	return AppendResult{r, epoch}, nil
}

// Await says whether all below offset, written in a leader epoch, is committed. An error means that it will not be by
// this leader: another may have it all the same.
func (p *Partition) Await(offset int64, epoch int32) (committed bool, err error) {
	s := p.published.Load()
	if err := p.leads(s, tp.NoEpoch); err != nil {
		return false, err
	}
	if s.role.LeaderEpoch != epoch {
		return false, fmt.Errorf("%w: %s has moved on to epoch %d", ErrNotLeader, p.id, s.role.LeaderEpoch)
	}
	return s.hw >= offset, nil
}

// LateWrite is the error of a write that was not committed in its time.
func (p *Partition) LateWrite() error {
	if s := p.published.Load(); len(s.role.ISR) < s.role.minISR() {
		return fmt.Errorf("%w: %s has %d in sync, min.insync.replicas is %d", ErrNotEnoughAfterAppend, p.id, len(s.role.ISR), s.role.minISR())
	}
	return nil
}

// FollowerFetch is what a follower tells by a fetch: all below Offset is in its log.
type FollowerFetch struct {
	Follower    int32
	BrokerEpoch int64 // of its run, -1 unknown
	LeaderEpoch int32
	Offset      int64
	LogStart    int64
	LocalStart  int64 // where its local log starts
	Now         time.Time
}

// Followed takes note of a fetch of a follower whose log does not diverge from this one up to the fetch's offset. It may
// advance the high watermark, and make the follower a candidate for the ISR.
func (p *Partition) Followed(r FollowerFetch) error {
	p.mu.Lock()
	if err := p.leads(p.published.Load(), r.LeaderEpoch); err != nil {
		p.mu.Unlock()
		return err
	}
	f := p.lead.followers[r.Follower]
	if f == nil || r.BrokerEpoch >= 0 && r.BrokerEpoch < f.epoch {
		p.mu.Unlock()
		return fmt.Errorf("%w: broker %d (epoch %d) is no replica of %s", ErrNotLeader, r.Follower, r.BrokerEpoch, p.id)
	}
	end := p.log.Offsets().End
	switch {
	case r.Offset >= end:
		f.caughtUp = r.Now
	case f.leaderEnd >= 0 && r.Offset >= f.leaderEnd && f.fetched.After(f.caughtUp):
		f.caughtUp = f.fetched
	}
	near := r.Offset >= end || f.leaderEnd >= 0 && r.Offset >= f.leaderEnd
	trimmed := r.LogStart != f.start
	f.end, f.start, f.local, f.epoch, f.fetched, f.leaderEnd = r.Offset, r.LogStart, r.LocalStart, r.BrokerEpoch, r.Now, end
	// One that does not say which run it is might join after that run has ended, and lost what it had.
	if !slices.Contains(p.role.ISR, r.Follower) && near && f.joining.IsZero() && r.BrokerEpoch >= 0 && !r.Now.Before(p.lead.again) {
		f.joining = r.Now
	}
	lead := p.lead
	moved := p.advance(r.Now)
	// Only from the high watermark and the start of the epoch on may it join: it could be elected at once.
	if !f.joining.IsZero() && f.end >= max(p.hw, lead.start) && !lead.asking {
		p.isrDue = true
	}
	if trimmed {
		p.signal(Trimmed)
	}
	if moved {
		p.notifyAndUnlock(Committed)
	} else {
		p.release()
	}
	return nil
}

// LowWatermark is the least log start of this leader and of those of its followers that alive tells of: from where on records are
// still there (KIP-107); -1 if one of them has not fetched yet.
func (p *Partition) LowWatermark(alive func(broker int32) bool) (int64, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.leads(p.published.Load(), tp.NoEpoch); err != nil {
		return tp.NoOffset, err
	}
	low := p.log.Offsets().LogStart
	for id, f := range p.lead.followers {
		if alive(id) {
			low = min(low, f.start)
		}
	}
	return low, nil
}

// Proposal is an ISR that a leader wants.
type Proposal struct {
	LeaderEpoch, PartitionEpoch int32
	ISR                         []int32
	Epochs                      []int64 // of the members' runs, -1 unknown
}

// Propose returns the ISR that the leader wants if that is not the present one; the answer goes to Settle. Members that
// have not caught up for lagMax leave, followers that reached the high watermark join. After a proposal that got no answer the present one is
// proposed, too: what was proposed before then comes too late.
func (p *Partition) Propose(now time.Time, lagMax time.Duration) (Proposal, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.lead
	if l == nil || p.offline != nil || p.suspended || l.asking || now.Before(l.again) {
		return Proposal{}, false
	}
	o := Proposal{LeaderEpoch: p.role.LeaderEpoch, PartitionEpoch: p.role.PartitionEpoch}
	end := p.log.Offsets().End
	for _, id := range p.role.Replicas {
		f := l.followers[id]
		in := slices.Contains(p.role.ISR, id)
		switch {
		case id == p.self:
			o.ISR, o.Epochs = append(o.ISR, id), append(o.Epochs, -1)
			continue
		case f == nil, in && f.end < end && now.Sub(f.caughtUp) > lagMax:
			continue
		case !in && (f.joining.IsZero() || f.end < max(p.hw, l.start)):
			continue
		}
		o.ISR, o.Epochs = append(o.ISR, id), append(o.Epochs, f.epoch)
	}
	if sameMembers(o.ISR, p.role.ISR) && len(l.undecided) == 0 {
		l.proposed = nil
		return Proposal{}, false
	}
	l.proposed, l.asking = o.ISR, true
	return o, true
}

// sameMembers compares two ISRs as sets.
func sameMembers(a, b []int32) bool {
	if len(a) != len(b) {
		return false
	}
	for _, id := range a {
		if !slices.Contains(b, id) {
			return false
		}
	}
	return true
}

// Outcome is what became of a proposal.
type Outcome int8

const (
	Accepted Outcome = iota // the image will have it, or has it
	Refused                 // it will never be
	Unknown                 // no answer came: it may be or not
)

// Settle tells what became of a proposal. A refused follower may be proposed again after a pause.
func (p *Partition) Settle(o Proposal, out Outcome, now time.Time) {
	p.mu.Lock()
	defer p.notifyAndUnlock(Committed)
	l := p.lead
	if l == nil || p.role.LeaderEpoch != o.LeaderEpoch || p.role.PartitionEpoch != o.PartitionEpoch {
		return // the image was faster
	}
	switch out {
	case Accepted:
		return // and the image settles it
	case Unknown:
		l.undecided = append(l.undecided, o.ISR...)
	case Refused:
		l.proposed = nil
		for _, f := range l.followers {
			f.joining = time.Time{}
		}
	}
	l.asking, l.again = false, now.Add(joinPatience)
	p.advance(now)
}

// FollowerState is a follower as its leader sees it.
type FollowerState struct {
	ID         int32
	LocalStart int64
	End        int64 // -1 unknown
	InSync     bool
	CaughtUp   time.Time
}

// Followers lists them by id; nil if this replica does not lead.
func (p *Partition) Followers() []FollowerState {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lead == nil {
		return nil
	}
	var out []FollowerState
	for id, f := range p.lead.followers {
		out = append(out, FollowerState{id, f.local, f.end, slices.Contains(p.role.ISR, id), f.caughtUp})
	}
	slices.SortFunc(out, func(a, b FollowerState) int { return int(a.ID) - int(b.ID) })
	return out
}
