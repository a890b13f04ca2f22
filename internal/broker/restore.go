package broker

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/replication"
)

// restores are the partitions that are being restored.
type restores struct{ sync.WaitGroup }

var errRestoring = errors.New("the local log ends before the tier does, and is being restored from the bucket")

// restore makes a leader whose log lacks what the tier holds (its folder was emptied, a disk forgot, or nobody better was
// left to be elected) continue behind the tier's end, with the lineage and the producers of that place: new records must
// never get offsets that the tier has given out. Until the bucket answers, the partition is offline and says why; others are
// not held up. Followers need nothing of the kind: they ask their leaders where to go on.
func (b *broker) restore(ctx context.Context, p *partition.Partition, t target) {
	end := t.state.Remote.End()
	b.log.Warn("log is restored from the tier", "partition", t.id.String(), "local end", p.Log().Offsets().End, "tier end", end)
	p.Hold(errRestoring)
	b.restores.Add(1)
	go func() {
		defer b.restores.Done()
		for pause := time.Second; ; pause = min(2*pause, 30*time.Second) {
			err := b.continueBehind(ctx, p, t)
			if err == nil {
				b.log.Info("log continues behind the tier", "partition", t.id.String(), "at", p.Log().Offsets().End)
				return
			}
			if now, ok := b.replicas.Get(t.id); ctx.Err() != nil || !ok || now != p {
				return
			}
			b.log.Warn("restoring a log from the tier failed, it will be tried again", "partition", t.id.String(), "cause", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
		}
	}()
}

// continueBehind replaces the log by an empty one behind the tier's end.
func (b *broker) continueBehind(ctx context.Context, p *partition.Partition, t target) error {
	remote := t.state.Remote
	segment := remote.Find(remote.End())
	epochs, snapshot, err := replication.Auxiliary(ctx, b.tier.reader, segment)
	if err != nil {
		return err
	}
	start := max(b.dir.mark(log.LogStartFile, t.id), t.state.LogStart, remote.Start())
	if err := p.Rebuild(segment.End+1, start, epochs, snapshot); err != nil {
		return err
	}
	b.checkpoint(log.RecoveryPointFile, log.LogStartFile) // the old recovery point must not outlive the old log
	p.Resume(time.Now())
	// Who looked at it meanwhile has turned away.
	if leader, _ := p.Leadership(); leader >= 0 && leader != b.self {
		b.replication.Follow(p, b.followerConfig(p))
	}
	b.tier.service.Poke(p)
	return nil
}
