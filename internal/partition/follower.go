package partition

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/log"
)

// Following is what a follower's fetches start from.
type Following struct {
	Leader      int32
	LeaderEpoch int32
	LogStart    int64
	End         int64
	LastEpoch   int32 // of the last batch, -1 without one
	Empty       bool  // nothing is in the local log
	RemoteEnd   int64 // last offset in the tier by the image, -1 none
}

// Following describes the replica as a follower. ok is false of one that leads, is offline, or has no leader.
func (p *Partition) Following() (f Following, ok bool) {
	s := p.published.Load()
	if s.offline != nil || s.role.Leader < 0 || s.role.Leader == p.self {
		return Following{}, false
	}
	o := s.log.Offsets()
	f = Following{Leader: s.role.Leader, LeaderEpoch: s.role.LeaderEpoch, LogStart: o.LogStart, End: o.End, LastEpoch: -1, Empty: o.Size == 0, RemoteEnd: s.remote.End()}
	if e, ok := s.log.LatestEpoch(); ok {
		f.LastEpoch = e.Epoch
	}
	return f, true
}

// follows checks, under the lock, that this replica follows in exactly that epoch: what a leader of another epoch sent is
// never applied (KAFKA-18991).
func (p *Partition) follows(epoch int32) error {
	switch {
	case p.offline != nil || p.held != nil:
		return fmt.Errorf("%w: %s: %w", ErrOffline, p.id, cmp.Or(p.offline, p.held))
	case p.role.Leader == p.self || p.role.Leader < 0:
		return fmt.Errorf("%w: %s does not follow", ErrNotLeader, p.id)
	case p.role.LeaderEpoch != epoch:
		return fmt.Errorf("%w: %s follows in epoch %d, not %d", ErrFencedEpoch, p.id, p.role.LeaderEpoch, epoch)
	}
	return nil
}

// Fetched is what a leader answered to a follower.
type Fetched struct {
	LeaderEpoch   int32 // that the fetch was made in
	Offset        int64 // that was asked for
	Records       []byte
	HighWatermark int64
	LogStart      int64
	Now           time.Time
}

// TakeFetched appends what the leader has and follows its high watermark and log start. Batches of a newer epoch than the
// fetch's, and all behind them, are left out (KAFKA-18723). restarted says that an empty log began anew at another
// offset, and that its checkpoints are to be written.
func (p *Partition) TakeFetched(f Fetched) (restarted bool, err error) {
	restarted, rolled, err := p.takeFetched(f)
	if rolled && p.hooks.Rolled != nil {
		p.hooks.Rolled(p)
	}
	return restarted, err
}

func (p *Partition) takeFetched(f Fetched) (restarted, rolled bool, err error) {
	p.mu.Lock()
	defer p.notifyAndUnlock(Committed)
	if err := p.follows(f.LeaderEpoch); err != nil {
		return false, false, err
	}
	before := p.log.Offsets()
	if f.Offset != before.End {
		return false, false, fmt.Errorf("%w: an answer for offset %d came when the log ended at %d", ErrFencedEpoch, f.Offset, before.End)
	}
	if len(f.Records) > 0 {
		_, err = p.log.AppendAsFollower(f.Records, f.LeaderEpoch, f.Now)
		var gap *log.UnexpectedOffsetError
		if errors.As(err, &gap) && (before.Size == 0 || before.End <= f.LogStart) && gap.First < before.End && before.End <= gap.Last {
			// The leader's log starts inside a batch (DeleteRecords): a log that is empty, or of what the leader has deleted, may begin with
			// that batch.
			restarted = true
			if err = p.log.TruncateFullyAndStartAt(gap.First, min(before.LogStart, gap.First), nil, nil); err == nil {
				p.hw = gap.First
				_, err = p.log.AppendAsFollower(f.Records, f.LeaderEpoch, f.Now)
			}
		}
		if err != nil {
			p.fail(err)
			return restarted, false, err
		}
	}
	after := p.log.Offsets()
	p.hw = max(min(f.HighWatermark, after.End), min(p.hw, after.End))
	p.log.SetHighWatermark(p.hw)
	if err := p.raiseLogStart(f.LogStart); err != nil {
		return restarted, false, err
	}
	return restarted, after.ActiveBase != before.ActiveBase, nil
}

// Truncate cuts a follower's log to offset, as an answer in leaderEpoch asked for. The recovery point falls with it: the
// caller checkpoints it before it appends again.
func (p *Partition) Truncate(leaderEpoch int32, offset int64) error {
	p.mu.Lock()
	defer p.notifyAndUnlock(Committed)
	if err := p.follows(leaderEpoch); err != nil {
		return err
	}
	err := p.log.TruncateTo(offset)
	p.fail(err)
	p.hw = min(p.hw, p.log.Offsets().End) // also where only a part of it was done
	if err == nil {
		p.log.SetRemoteEnd(p.remote.End())
	}
	return err
}

// EndOfEpoch is the local end of a leader epoch, for finding where two logs part (leaderepoch.Cache.EndOffsetFor).
func (p *Partition) EndOfEpoch(epoch int32) (int32, int64) {
	l := p.Log()
	if l == nil {
		return leaderepoch.UndefinedEpoch, leaderepoch.UndefinedOffset
	}
	return l.EndOffsetForEpoch(epoch)
}

// Restart replaces a follower's log by an empty one that continues at next, with the lineage and producers of that place
// (log.TruncateFullyAndStartAt: at once or not at all). The caller checkpoints recovery point and log start before it appends.
func (p *Partition) Restart(leaderEpoch int32, next, logStart int64, epochs []leaderepoch.Entry, snapshot []byte) error {
	p.mu.Lock()
	defer p.notifyAndUnlock(Committed)
	if err := p.follows(leaderEpoch); err != nil {
		return err
	}
	return p.restart(next, logStart, epochs, snapshot)
}

func (p *Partition) restart(next, logStart int64, epochs []leaderepoch.Entry, snapshot []byte) error {
	err := p.log.TruncateFullyAndStartAt(next, logStart, epochs, snapshot)
	p.fail(err)
	if err == nil {
		p.hw = next
		p.log.SetRemoteEnd(p.remote.End())
	}
	return err
}
