package broker

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/varve-io/varve/internal/log"
)

// background starts what runs beside the server.
func (b *broker) background(ctx context.Context, group *errgroup.Group) {
	group.Go(func() error { return b.watch(ctx) })
	group.Go(func() error { return b.keepSession(ctx) })
	group.Go(func() error { return b.replication.Run(ctx) })
	group.Go(func() error { return b.proposeISRs(ctx) })
	group.Go(func() error { return b.flushMarked(ctx) })
	if b.tier != nil {
		group.Go(func() error { return b.tier.service.Run(ctx) })
		group.Go(func() error { b.checkBucket(ctx); return nil })
		group.Go(func() error { return b.backfill(ctx) })
	}
	b.compactLogs(ctx, group)
	ms := b.static.Millis
	every(ctx, group, ms("log.initial.task.delay.ms"), ms("log.retention.check.interval.ms"), b.retain)
	every(ctx, group, ms("producer.id.expiration.check.interval.ms"), ms("producer.id.expiration.check.interval.ms"), func() {
		now := time.Now()
		for _, p := range b.replicas.all() {
			if l := p.Log(); l != nil {
				l.ExpireProducers(now)
			}
		}
	})
	every(ctx, group, ms("offsets.retention.check.interval.ms"), ms("offsets.retention.check.interval.ms"), func() {
		if err := b.groups.Expire(b.topicGone); err != nil {
			b.log.Warn("offsets were not expired", "cause", err)
		}
	})
	expired := ms("transaction.remove.expired.transaction.cleanup.interval.ms")
	every(ctx, group, expired, expired, func() {
		if err := b.transactions.Expire(); err != nil {
			b.log.Warn("transactional ids were not expired", "cause", err)
		}
	})
	every(ctx, group, ms("log.flush.offset.checkpoint.interval.ms"), ms("log.flush.offset.checkpoint.interval.ms"), func() {
		b.checkpoint(log.RecoveryPointFile, log.LogStartFile)
	})
	every(ctx, group, ms("replica.high.watermark.checkpoint.interval.ms"), ms("replica.high.watermark.checkpoint.interval.ms"), func() {
		b.checkpoint(log.HighWatermarkFile)
	})
}

// every runs do after first and then with pauses of interval until ctx ends.
func every(ctx context.Context, group *errgroup.Group, first, interval time.Duration, do func()) {
	group.Go(func() error {
		timer := time.NewTimer(first)
		defer timer.Stop()
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-timer.C:
				do()
				timer.Reset(max(interval, time.Millisecond))
			}
		}
	})
}

// retain applies local retention to every partition.
func (b *broker) retain() {
	now := time.Now()
	moved := false
	for _, p := range b.replicas.all() {
		l := p.Log()
		if l == nil || p.Cause() != nil {
			continue
		}
		if first, late := b.late(p, now); late {
			b.log.Warn("a transaction hangs: readers of committed records, the tier and compaction stand still behind it; see varve txn find-hanging", "partition", p.ID().String(), "first offset", first)
		}
		r, err := l.ApplyRetention(now)
		if errors.Is(err, log.ErrClosed) {
			continue // it has just been deleted
		}
		if err != nil {
			b.log.Error("retention failed", "partition", p.ID().String(), "cause", err)
			continue
		}
		if r.Rolled {
			b.rolled(p)
		}
		if len(r.Deleted) > 0 {
			moved = true
			b.log.Info("local segments were deleted by retention", "partition", p.ID().String(), "segments", len(r.Deleted), "local log start", l.Offsets().LocalLogStart)
		}
		if r.Blocking != nil {
			b.log.Warn("a segment's records claim to be from the future, so it and all after it outlive retention.ms", "partition", p.ID().String(), "base offset", r.Blocking.Base, "max timestamp", r.Blocking.MaxTimestamp)
		}
	}
	if moved {
		b.checkpoint(log.LogStartFile)
	}
}

func (b *broker) warn(what string, err error) {
	if err != nil {
		b.log.Warn(what, "cause", err)
	}
}

// jitter draws the share of segment.jitter.ms.
func jitter() int64 { return rand.Int64() }

// diskUsage tells the size of the volume under path and what an unprivileged writer may still use.
func diskUsage(path string) func() (total, usable int64) {
	return func() (int64, int64) {
		var s unix.Statfs_t
		if err := unix.Statfs(path, &s); err != nil {
			return -1, -1
		}
		return int64(s.Blocks) * s.Bsize, int64(s.Bavail) * s.Bsize
	}
}
