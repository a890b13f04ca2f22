package broker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/time/rate"

	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tier"
)

const (
	backfillPause = 5 * time.Second // between looks for replicas to fill
	backfillRead  = 1 << 20
)

// backfill gives replicas that started from the tier a past of their own: segment by segment, the newest first, from the
// bucket and never from a leader, at follower.backfill.bytes.per.second, as far as their local retention keeps them. One
// replica at a time: it is no hurry, and the next leader is a thicker one.
func (b *broker) backfill(ctx context.Context) error {
	limit := rate.NewLimiter(0, backfillRead)
	for {
		perSecond := b.config().Int64("follower.backfill.bytes.per.second")
		limit.SetLimit(rate.Limit(perSecond))
		filled := false
		for _, p := range b.replicas.all() {
			if perSecond == 0 || ctx.Err() != nil {
				break
			}
			done, err := b.backfillOne(ctx, p, limit)
			filled = filled || done
			if err != nil && ctx.Err() == nil && !errors.Is(err, log.ErrNotAdjoining) {
				b.log.Warn("a replica was not filled from the tier, it will be tried again", "partition", p.ID().String(), "cause", err)
			}
		}
		pause := backfillPause
		if filled {
			pause = 0
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

// backfillOne puts one more segment in front of a replica's local log, if it may have one.
func (b *broker) backfillOne(ctx context.Context, p *partition.Partition, limit *rate.Limiter) (done bool, err error) {
	l, remote := p.Log(), p.Remote()
	if l == nil || p.Cause() != nil {
		return false, nil
	}
	o := l.Offsets()
	s := missing(o, l.Config(), remote, time.Now())
	if s == nil {
		return false, nil
	}
	front, err := l.NewFront(s.Start)
	if err != nil {
		return false, err
	}
	for at := s.Start; at < o.LocalLogStart; {
		part, err := b.tier.reader.Read(ctx, remote, at, backfillRead, o.LocalLogStart, true)
		if err == nil && part.Records.Size() == 0 {
			err = fmt.Errorf("nothing at offset %d of segment %s", at, s.ID)
		}
		for _, piece := range part.Records {
			for len(piece) > 0 && err == nil {
				n := min(len(piece), limit.Burst())
				if err = limit.WaitN(ctx, n); err == nil {
					_, err = front.Write(piece[:n])
				}
				piece = piece[n:]
			}
		}
		if err != nil {
			return false, errors.Join(err, front.Abort())
		}
		at = part.NextOffset
	}
	aborted, _, err := b.tier.reader.Aborted(ctx, remote, s.Start, o.LocalLogStart)
	if err != nil {
		return false, errors.Join(err, front.Abort())
	}
	if err := front.Commit(aborted); err != nil {
		return false, err
	}
	b.log.Info("local log was filled from the tier", "partition", p.ID().String(), "local log start", l.Offsets().LocalLogStart)
	return true, nil
}

// missing is the remote segment that the local log should have in front, nil if none: it ends where the local log begins,
// and local retention would keep it.
func missing(o log.Offsets, c log.Config, remote tier.Segments, now time.Time) *tier.Segment {
	if !c.Tiered || o.LocalLogStart <= o.LogStart {
		return nil
	}
	s := remote.Find(o.LocalLogStart - 1)
	if s == nil || s.Start < o.LogStart {
		return nil
	}
	ms, bytes := c.LocalRetention()
	if ms >= 0 && now.UnixMilli()-s.MaxTimestamp > ms || bytes >= 0 && o.Size+s.Size > bytes {
		return nil
	}
	return s
}
