package broker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tp"
)

// restoredLog is a log that continues where the tier ends.
type restoredLog struct {
	log    *log.Log
	target target
}

// restores are the partitions that are being restored.
type restores struct {
	all sync.WaitGroup

	mu     sync.Mutex
	cancel map[tp.Partition]func() // ends one and waits for it
}

var errRestoring = errors.New("the local log ends before the tier does, and is being restored from the bucket")

// restore makes a log that lost what the tier holds (its folder was emptied, or a disk forgot) continue behind the tier's
// end, with the lineage and the producers of that place: new records must never get offsets that the tier has given out.
// Until the bucket answers, the partition is offline and says why; others are not held up.
func (b *broker) restore(ctx context.Context, l *log.Log, t target) {
	end := t.state.Remote.End()
	b.log.Warn("log is restored from the tier", "partition", t.id.String(), "local end", l.Offsets().End, "tier end", end)
	b.replicas.put(partition.Offline(t.id, t.topic.ID, b.self, errRestoring))
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	b.restores.mu.Lock()
	if b.restores.cancel == nil {
		b.restores.cancel = map[tp.Partition]func(){}
	}
	b.restores.cancel[t.id] = func() {
		cancel()
		<-ended
	}
	b.restores.mu.Unlock()
	b.restores.all.Add(1)
	go func() {
		defer b.restores.all.Done()
		defer close(ended)
		defer cancel()
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

// stopRestore ends the restoring of a partition and waits until its log is closed.
func (b *broker) stopRestore(id tp.Partition) {
	b.restores.mu.Lock()
	stop := b.restores.cancel[id]
	delete(b.restores.cancel, id)
	b.restores.mu.Unlock()
	if stop != nil {
		stop()
	}
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

// finishRestore puts a restored log into service. Its topic is there: remove would have ended the restoring, and both are
// called by one goroutine.
func (b *broker) finishRestore(r restoredLog) {
	b.restores.mu.Lock()
	delete(b.restores.cancel, r.target.id)
	b.restores.mu.Unlock()
	topic, state, ok := b.applied.Load().Partition(r.target.id)
	if !ok {
		b.warn("a log was not closed", r.log.Close())
		return
	}
	b.host(r.log, target{r.target.id, topic, state}, config.TopicValues(config.TopicDefaults(b.config()), topic.Configs))
	b.log.Info("log continues behind the tier", "partition", r.target.id.String(), "at", r.log.Offsets().End)
	// The old recovery point must not outlive the old log.
	b.checkpoint(log.RecoveryPointFile, log.LogStartFile)
}
