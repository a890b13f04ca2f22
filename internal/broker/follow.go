package broker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tp"
)

type partitionOf = partition.Partition

// watch follows the image until ctx ends.
func (b *broker) watch(ctx context.Context) error {
	for {
		changed := b.quorum.Changed()
		for b.follow(ctx) {
			if ctx.Err() != nil {
				return nil
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// awaitMax is how long a command waits for the partitions here. What takes longer, the opening of thousands of them, goes
// on after the answer, and clients try again where it has not come to yet.
const awaitMax = 2 * time.Second

// await returns when the partitions live by an image of at least this index, or after awaitMax.
func (b *broker) await(ctx context.Context, index uint64) error {
	late := time.NewTimer(awaitMax)
	defer late.Stop()
	for {
		changed := *b.changed.Load()
		if b.applied.Load().Index >= index {
			return nil
		}
		select {
		case <-changed:
		case <-late.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// openBatch is how many new partitions are opened before the image is looked at again: a topic of thousands must not
// hold up a change of leaders.
const openBatch = 256

// follow brings the partitions from the image that was seen last to the newest one; more says that some are still to be
// opened. It is only ever called by one goroutine.
func (b *broker) follow(ctx context.Context) (more bool) {
	old, img := b.seen, b.quorum.Image()
	if old != img {
		b.catchUp(ctx, old, img)
		b.seen = img
	} else if len(b.unopened) == 0 {
		return false
	}
	if b.openSome(ctx, img); len(b.unopened) > 0 {
		return true
	}
	b.applied.Store(img)
	next := make(chan struct{})
	close(*b.changed.Swap(&next))
	return false
}

// catchUp acts on what changed between two images, but for the opening of partitions.
func (b *broker) catchUp(ctx context.Context, old, img *metadata.Image) {
	delta := metadata.Diff(old, img)
	if delta.Configs {
		b.overlay(img)
		b.throttles.limit(b.config())
		b.cleaner.bound(b.config())
		if b.tier != nil {
			b.tier.limit(b.config())
		}
		delta.Changed = nil // defaults changed: every topic may be touched
		for _, name := range img.TopicNames() {
			delta.Changed = append(delta.Changed, img.Topics[name])
		}
	}
	a := reconcile(old, delta, b.self, func(id tp.Partition) (tp.UUID, bool) {
		p, ok := b.replicas.Get(id)
		if !ok {
			return tp.UUID{}, false
		}
		return p.TopicID(), true
	})
	for _, id := range a.remove {
		b.remove(id)
	}
	// Nothing that is known of a deleted partition may be taken for its successor of the same name, now or after a crash.
	if len(a.remove) > 0 && b.dir.forget(a.remove) {
		b.checkpoint(checkpoints...)
	}
	for _, t := range delta.Removed {
		if _, again := img.Topics[t.Name]; !again {
			b.metrics.Forget(t.Name)
			if b.tier != nil {
				b.tier.metrics.forget(t.Name)
			}
		}
	}
	values := b.topicValues()
	for _, t := range a.follow {
		if p, ok := b.replicas.Get(t.id); ok && p.TopicID() == t.topic.ID {
			b.adjust(ctx, p, t, values(t.topic))
		} else {
			b.unopened = append(b.unopened, t.id)
		}
	}
	if s := b.tieringOf(); s != nil && len(img.Deleting) > 0 {
		s.Sweep()
	}
}

// topicValues returns a function that gives topics' effective configs, and computes those of each topic once.
func (b *broker) topicValues() func(*metadata.Topic) config.Values {
	defaults := config.TopicDefaults(b.config())
	known := map[tp.UUID]config.Values{}
	return func(t *metadata.Topic) config.Values {
		v, ok := known[t.ID]
		if !ok {
			v = config.TopicValues(defaults, t.Configs)
			known[t.ID] = v
		}
		return v
	}
}

// openSome opens the next partitions, all at once, as img has them.
func (b *broker) openSome(ctx context.Context, img *metadata.Image) {
	n := min(len(b.unopened), openBatch)
	if n == 0 {
		return
	}
	values := b.topicValues()
	var group errgroup.Group
	group.SetLimit(workers())
	for _, id := range b.unopened[:n] {
		topic, state, ok := img.Partition(id)
		if _, open := b.replicas.Get(id); !ok || open || !slices.Contains(state.Replicas, b.self) {
			continue // gone again, or noted twice
		}
		v := values(topic)
		group.Go(func() error {
			b.open(ctx, target{id, topic, state}, v)
			return nil
		})
	}
	group.Wait()
	b.unopened = slices.Delete(b.unopened, 0, n)
}

// open opens a partition's log and starts to lead or follow. A log that cannot be opened leaves the partition offline.
func (b *broker) open(ctx context.Context, t target, v config.Values) {
	dir := filepath.Join(b.dir.path, t.id.String())
	synced := b.dir.mark(log.RecoveryPointFile, t.id)
	l, err := log.Open(log.Options{FS: b.dir.fs, Dir: dir, Partition: t.id, TopicID: t.topic.ID, Config: logConfig(v, b.config().Int64("producer.id.expiration.ms")),
		Clean: b.dir.clean, RecoveryPoint: synced, LogStart: b.dir.mark(log.LogStartFile, t.id), Compacted: b.dir.mark(log.CompactedFile, t.id),
		Now: time.Now(), Logger: b.log, Files: b.files, Jitter: jitter})
	if err != nil {
		b.log.Error("partition is offline", "partition", t.id.String(), "cause", err)
		b.replicas.put(partition.Offline(t.id, t.topic.ID, b.self, err))
		return
	}
	p := partition.New(t.id, t.topic.ID, b.self, l, b.dir.mark(log.HighWatermarkFile, t.id), partition.Hooks{Trimmed: b.flusher.mark, ISRDue: b.isrs.mark, Rolled: b.rolled})
	b.replicas.put(p)
	if l.Offsets().RecoveryPoint < synced {
		// Of a log that is gone. What is written to this one must not count as synced.
		b.checkpoint(log.RecoveryPointFile)
	}
	p.Suspend(!b.lease.held())
	b.adjust(ctx, p, t, v)
}

// rolled sees to a segment that was sealed.
func (b *broker) rolled(p *partition.Partition) {
	b.flusher.mark(p)
	if s := b.tieringOf(); s != nil {
		s.Poke(p)
	}
}

// adjust makes an open partition follow its target.
func (b *broker) adjust(ctx context.Context, p *partition.Partition, t target, v config.Values) {
	l := p.Log()
	if l != nil {
		l.SetConfig(logConfig(v, b.config().Int64("producer.id.expiration.ms")))
	}
	before, epoch := p.Leadership()
	leads := t.state.Leader == b.self
	if leads && l != nil && p.Cause() == nil && b.tier != nil && partition.Lacks(l, t.state.Remote) {
		b.restore(ctx, p, t)
	}
	p.Assume(partition.Role{Leader: t.state.Leader, LeaderEpoch: t.state.LeaderEpoch, PartitionEpoch: t.state.PartitionEpoch,
		Replicas: t.state.Replicas, ISR: t.state.ISR, MinISR: v.Int("min.insync.replicas")}, time.Now())
	if err := p.SetRemote(t.state.Remote, t.state.LogStart); err != nil {
		b.log.Error("log start could not be moved", "partition", t.id.String(), "to", t.state.LogStart, "cause", err)
	}
	if l == nil {
		return
	}
	if leads || t.state.Leader < 0 {
		b.replication.Stop(t.id)
	} else {
		b.replication.Follow(p, b.followerConfig(p))
	}
	if host := b.coordinatorOf(t.id.Topic); host != nil {
		switch {
		case leads && (before != b.self || epoch != t.state.LeaderEpoch):
			host.Elect(p, func() {})
		case !leads && before == b.self:
			host.Resign(t.id.Index)
		}
	}
	if s := b.tieringOf(); s != nil {
		if leads && (v.Bool("remote.storage.enable") || len(t.state.Remote) > 0) {
			s.Lead(p)
		} else {
			s.Stop(t.id)
		}
	}
}

// remove closes a partition that is not this broker's any more and deletes its folder after file.delete.delay.ms.
func (b *broker) remove(id tp.Partition) {
	p, ok := b.replicas.take(id)
	if !ok {
		return
	}
	l := p.Log()
	p.Retire() // first: who waits on it lets go then
	b.replication.Stop(id)
	if host := b.coordinatorOf(id.Topic); host != nil {
		host.Resign(id.Index)
	}
	if s := b.tieringOf(); s != nil {
		s.Stop(id)
	}
	var delay time.Duration
	var path string
	var err error
	switch {
	case l != nil:
		delay = time.Duration(l.Config().FileDeleteDelayMs) * time.Millisecond
		path, err = l.Delete()
	default:
		// What could not be opened must not stay in the way of a topic of the same name.
		path, err = b.dir.setAside(id, p.TopicID())
	}
	if path == "" && err == nil {
		return
	}
	if err != nil {
		b.log.Error("a deleted partition's folder could not be set aside", "partition", id.String(), "cause", err)
		return
	}
	// A restart before the delay is over removes it at once.
	time.AfterFunc(delay, func() {
		if err := b.dir.fs.RemoveAll(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			b.log.Warn("a deleted partition's folder could not be removed", "folder", path, "cause", err)
		}
	})
}

// closeLogs closes every log and, if all went well and the end is a clean one, says so for the next start. Logs whose turn
// does not come by the deadline are left as a crash would leave them, which the next start mends.
func (b *broker) closeLogs(clean bool, deadline time.Time) error {
	var group errgroup.Group
	group.SetLimit(workers())
	var mu sync.Mutex
	closed := map[tp.Partition]bool{}
	var failed error
	late := 0
	for _, p := range b.replicas.all() {
		group.Go(func() error {
			if time.Now().After(deadline) {
				mu.Lock()
				defer mu.Unlock()
				clean, late = false, late+1
				return nil
			}
			dead := p.Cause() != nil && !errors.Is(p.Cause(), errRestoring)
			var err error
			if !dead {
				if err = p.Close(); err != nil {
					err = fmt.Errorf("close %s: %w", p.ID(), err)
				}
			}
			mu.Lock()
			defer mu.Unlock()
			if dead {
				clean = clean && p.Log() == nil // one that died has to be scanned when it is opened again
				return nil
			}
			closed[p.ID()], failed = err == nil, errors.Join(failed, err)
			return nil
		})
	}
	group.Wait()
	if late > 0 {
		b.log.Warn("the time to stop was over before all logs were closed: the next start checks their ends", "left", late)
	}
	failed = errors.Join(failed, b.dir.save(func(known marks) marks {
		m := b.marks(known)
		for _, p := range b.replicas.all() {
			if closed[p.ID()] {
				m[log.RecoveryPointFile][p.ID()] = p.Log().Offsets().End
			}
		}
		return m
	}, checkpoints...))
	if failed == nil && clean {
		failed = b.dir.markClean(b.epoch.Load())
	}
	return failed
}

// marks collects what the checkpoints are to hold. Of partitions that are not open, yet or any more, they keep what they hold.
func (b *broker) marks(known marks) marks {
	m := marks{}
	for name, of := range known {
		m[name] = maps.Clone(of)
	}
	for _, p := range b.replicas.all() {
		l := p.Log()
		if l == nil {
			continue
		}
		o := l.Offsets()
		id := p.ID()
		m[log.RecoveryPointFile][id], m[log.HighWatermarkFile][id] = o.RecoveryPoint, p.HighWatermark()
		few := func(name string, at int64, needed bool) { // checkpoints that few partitions need
			if needed {
				m[name][id] = at
			} else {
				delete(m[name], id)
			}
		}
		compacted := l.Compacted()
		few(log.LogStartFile, o.LogStart, l.Config().Tiered || o.LogStart > 0)
		few(log.CompactedFile, compacted, compacted > 0)
	}
	return m
}

// checkpoint writes the named checkpoints.
func (b *broker) checkpoint(names ...string) {
	b.warn("checkpoint was not written", b.dir.save(b.marks, names...))
}

// topicGone says whether a topic is not in the image, for the expiry of offsets.
func (b *broker) topicGone(topic string) bool {
	_, ok := b.quorum.Image().Topics[topic]
	return !ok && controller.CheckTopicName(topic) == nil
}
