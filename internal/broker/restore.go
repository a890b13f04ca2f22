package broker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
)

// restoredLog is a log that continues where the tier ends.
type restoredLog struct {
	log    *log.Log
	target target
}

var errRestoring = errors.New("the local log ends before the tier does, and is being restored from the bucket")

// restore makes a log that lost what the tier holds (its folder was emptied, or a disk forgot) continue behind the tier's
// end, with the lineage and the producers of that place: new records must never get offsets that the tier has given out.
// Until the bucket answers, the partition is offline and says why; others are not held up.
func (b *broker) restore(ctx context.Context, l *log.Log, t target) {
	end := t.state.Remote.End()
	b.log.Warn("log is restored from the tier", "partition", t.id.String(), "local end", l.Offsets().End, "tier end", end)
	b.replicas.put(partition.Offline(t.id, t.topic.ID, b.self, errRestoring))
	b.restores.Add(1)
	go func() {
		defer b.restores.Done()
		for pause := time.Second; ; pause = min(2*pause, 30*time.Second) {
			err := b.continueBehind(ctx, l, t)
			if err == nil {
				select {
				case b.restored <- restoredLog{l, t}:
					return
				case <-ctx.Done():
				}
			}
			if ctx.Err() == nil {
				b.log.Warn("restoring a log from the tier failed, it will be tried again", "partition", t.id.String(), "cause", err)
			}
			select {
			case <-ctx.Done():
				b.warn("a log was not closed", l.Close())
				return
			case <-time.After(pause):
			}
		}
	}()
}

// continueBehind replaces the log by an empty one behind the tier's end.
func (b *broker) continueBehind(ctx context.Context, l *log.Log, t target) error {
	remote := t.state.Remote
	segment := remote.Find(remote.End())
	epochs, err := b.tier.reader.LeaderEpochs(ctx, segment)
	if err != nil {
		return fmt.Errorf("leader epochs of segment %s: %w", segment.ID, err)
	}
	snapshot, err := b.tier.reader.ProducerSnapshot(ctx, segment)
	if err != nil {
		return fmt.Errorf("producers of segment %s: %w", segment.ID, err)
	}
	_, start, _ := b.dir.of(t.id)
	start = max(start, t.state.LogStart, remote.Start())
	return l.TruncateFullyAndStartAt(segment.End+1, start, epochs, snapshot)
}

// finishRestore puts a restored log into service, unless its topic has gone meanwhile.
func (b *broker) finishRestore(r restoredLog) {
	img := b.applied.Load()
	topic, state, ok := img.Partition(r.target.id)
	waiting, hosted := b.replicas.Get(r.target.id)
	if !ok || topic.ID != r.target.topic.ID || !hosted || !errors.Is(waiting.Cause(), errRestoring) {
		if _, err := r.log.Delete(); err != nil {
			b.log.Warn("a restored log of a deleted topic was left behind", "partition", r.target.id.String(), "cause", err)
		}
		return
	}
	b.host(r.log, target{r.target.id, topic, state}, config.TopicValues(config.TopicDefaults(b.config()), topic.Configs))
	b.log.Info("log continues behind the tier", "partition", r.target.id.String(), "at", r.log.Offsets().End)
	// The old recovery point must not outlive the old log.
	b.checkpoint(log.RecoveryPointFile, log.LogStartFile)
}
