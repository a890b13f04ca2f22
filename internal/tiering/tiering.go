// Package tiering carries out the plans of the tier for the partitions that this broker leads: it uploads sealed ranges,
// records them, deletes what retention lets go, and clears away topics that were deleted. What is to be done is decided
// by package tier; what may be recorded, by the controller.
//
// A partition has at most one pass at a time. A pass begins when a segment was sealed, when the image changed, and after
// the task interval; it repeats until nothing is due. A failing pass is tried again after a growing, bounded pause.
package tiering

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tier/uploader"
	"github.com/varve-io/varve/internal/tp"
)

// Control runs commands at the active controller and returns when this broker lives by what they changed; *control.Client is one.
type Control interface {
	Do(ctx context.Context, command controller.Command) (any, error)
}

// Options of New. All but Observe are required.
type Options struct {
	Self        int32
	Bucket      objstore.Bucket
	Upload      uploader.Options
	Control     Control
	Image       func() *metadata.Image
	Config      func(topic string) tier.Config
	Forget      func(segment tp.UUID) // drop what is cached of a segment
	Interval    time.Duration         // remote.log.manager.task.interval.ms
	DeleteDelay time.Duration         // objects outlive their record of deletion by this
	Workers     int                   // remote.log.manager.copier.thread.pool.size
	Log         *slog.Logger
	Observe     func(Event)
}

// Event is something that metrics count.
type Event struct {
	Topic    string
	Copied   int64 // bytes of a finished upload
	Started  bool  // an upload began
	Deleted  int   // segments whose objects are gone
	Err      error // an upload or, with Deleting, a deletion failed
	Deleting bool
}

// Service runs the passes. Lead and Stop may be called from anywhere; Run owns all goroutines.
type Service struct {
	o     Options
	slots *semaphore.Weighted

	mu     sync.Mutex
	parts  map[tp.Partition]*entry
	poked  chan struct{}
	orphan time.Time // next look at deleted topics
	sweeps bool      // one is under way
	// copies are the uploads under way. What is being written must not be cleared away yet, or objects would be left that
	// no record knows.
	copies map[tp.UUID]bool
}

// entry is one partition that this broker leads.
type entry struct {
	part     *partition.Partition
	due      time.Time
	running  bool
	again    bool // something changed during the pass
	failures int
	lag      Lag
	copying  tp.UUID
}

// Lag is what is sealed and not yet in the tier (KIP-963), and what is being copied now.
type Lag struct {
	Bytes, Segments int64
	Copying         tp.UUID // zero for none
	Err             error   // why the last pass failed, nil if it did not
}

// New returns a service without partitions.
func New(o Options) *Service {
	return &Service{o: o, slots: semaphore.NewWeighted(int64(o.Workers)), parts: map[tp.Partition]*entry{}, copies: map[tp.UUID]bool{}, poked: make(chan struct{}, 1)}
}

// Lead adds a tiered partition that this broker leads, or looks at it anew.
func (s *Service) Lead(p *partition.Partition) {
	s.mu.Lock()
	e := s.parts[p.ID()]
	if e == nil || e.part != p {
		e = &entry{part: p}
		s.parts[p.ID()] = e
	}
	e.due = time.Time{}
	if e.running {
		e.again = true
	}
	s.mu.Unlock()
	s.poke()
}

// Poke makes a partition due at once, if it is a tiered one.
func (s *Service) Poke(p *partition.Partition) {
	s.mu.Lock()
	e := s.parts[p.ID()]
	if e != nil && e.failures == 0 {
		e.due = time.Time{}
		e.again = e.running
	}
	s.mu.Unlock()
	if e != nil {
		s.poke()
	}
}

// Stop forgets a partition. A pass that is under way ends by itself, refused by the controller.
func (s *Service) Stop(id tp.Partition) {
	s.mu.Lock()
	delete(s.parts, id)
	s.mu.Unlock()
}

// Sweep makes the service look at deleted topics.
func (s *Service) Sweep() {
	s.mu.Lock()
	s.orphan = time.Time{}
	s.mu.Unlock()
	s.poke()
}

// Lag tells how far the tier is behind a partition.
func (s *Service) Lag(id tp.Partition) (Lag, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.parts[id]
	if !ok {
		return Lag{}, false
	}
	l := e.lag
	l.Copying = e.copying
	return l, true
}

func (s *Service) poke() {
	select {
	case s.poked <- struct{}{}:
	default:
	}
}

// Run starts passes until ctx ends, then waits for those that run. They end with ctx, whatever the store does.
func (s *Service) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.poked:
		case <-timer.C:
		}
		now := time.Now()
		ready, next, sweep := s.ready(now)
		for _, e := range ready {
			wg.Add(1)
			go func() {
				defer wg.Done()
				s.pass(ctx, e)
			}()
		}
		if sweep {
			wg.Add(1)
			go func() {
				defer wg.Done()
				s.sweep(ctx)
			}()
		}
		timer.Reset(time.Until(next))
	}
}

// ready marks the partitions that are due as running and tells when the next one will be.
func (s *Service) ready(now time.Time) (ready []*entry, next time.Time, sweep bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next = now.Add(s.o.Interval)
	for _, e := range s.parts {
		switch {
		case e.running:
		case !e.due.After(now):
			e.running = true
			ready = append(ready, e)
		case e.due.Before(next):
			next = e.due
		}
	}
	if !s.orphan.After(now) && !s.sweeps {
		sweep, s.sweeps = true, true
		s.orphan = now.Add(s.o.Interval)
	}
	if !s.sweeps && s.orphan.Before(next) {
		next = s.orphan
	}
	return ready, next, sweep
}

const backoffMin = time.Second

// pass works on a partition until nothing is due, and sets its next time.
func (s *Service) pass(ctx context.Context, e *entry) {
	err := s.slots.Acquire(ctx, 1)
	if err == nil {
		for more := true; more && err == nil; {
			more, err = s.step(ctx, e)
		}
		s.slots.Release(1)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.poke()
	e.running, e.copying = false, tp.UUID{}
	wait := s.o.Interval
	e.lag.Err = nil
	switch {
	case err != nil && ctx.Err() == nil && !errors.Is(err, errMoved):
		wait = min(backoffMin<<min(e.failures, 10), s.o.Interval)
		e.failures++
		e.lag.Err = err
		s.o.Log.Warn("tiering failed, it will be tried again", "partition", e.part.ID().String(), "cause", err)
	default:
		e.failures = 0
		if e.again {
			wait = 0
		}
	}
	e.again = false
	e.due = time.Now().Add(wait)
}

// errMoved ends a pass of a partition that is led by somebody else now, or in another epoch.
var errMoved = errors.New("leadership moved")

// step makes one plan and carries it out. more asks for another step.
func (s *Service) step(ctx context.Context, e *entry) (more bool, err error) {
	p := e.part
	marks, err := p.Offsets(tp.NoEpoch)
	if err != nil {
		return false, errMoved
	}
	l := p.Log()
	if l == nil {
		return false, errMoved
	}
	c := l.Config()
	if !c.Tiered {
		return false, s.leave(ctx, p, marks)
	}
	in := tier.Input{ActiveSize: l.ActiveSize(), Remote: p.Remote(), LogStart: marks.LogStart, Stable: min(marks.HighWatermark, marks.LastStable),
		HighWatermark: marks.HighWatermark, LeaderEpoch: marks.LeaderEpoch, Config: s.o.Config(p.ID().Topic), Now: time.Now()}
	in.Config.DeleteDelay = s.o.DeleteDelay
	for _, seg := range l.Sealed() {
		in.Local = append(in.Local, tier.Local{Start: seg.Base, End: seg.End, Size: seg.Size, MaxTimestamp: seg.MaxTimestamp})
	}
	lag := Lag{}
	lag.Bytes, lag.Segments = tier.Lag(in)
	s.mu.Lock()
	e.lag.Bytes, e.lag.Segments = lag.Bytes, lag.Segments
	s.mu.Unlock()

	plan := tier.MakePlan(in)
	if plan.Skipped > 0 {
		s.o.Log.Warn("data past its retention goes without ever having been uploaded: uploads are behind by more than the retention", "partition", p.ID().String(), "bytes", plan.Skipped)
	}
	ids := append(plan.Abandon, plan.Delete...)
	if len(ids) > 0 || plan.LogStart > marks.LogStart {
		if err := s.record(ctx, controller.StartDeleteCommand{Topic: p.TopicID(), Index: p.ID().Index, Leader: s.o.Self, Epoch: marks.LeaderEpoch,
			Segments: ids, LogStart: plan.LogStart}); err != nil {
			return false, err
		}
		more = true
	}
	cleaned := s.clean(ctx, p.TopicID(), p.ID(), in.Remote, plan.Clean)
	if plan.Copy == nil || cleaned != nil && !errors.Is(cleaned, objstore.ErrAccess) {
		return more, cleaned
	}
	// A bucket that may not be deleted from fills up, but that is no reason for the disk to.
	return true, errors.Join(cleaned, s.copy(ctx, e, l, marks, *plan.Copy))
}

// record runs a controller command and waits until the partition has taken its result over.
func (s *Service) record(ctx context.Context, command controller.Command) error {
	_, err := s.o.Control.Do(ctx, command)
	if errors.Is(err, controller.ErrFenced) || errors.Is(err, controller.ErrUnknownTopic) {
		return fmt.Errorf("%w: %w", errMoved, err)
	}
	return err
}

// copy uploads one range: CopyStarted, the objects, CopyFinished.
func (s *Service) copy(ctx context.Context, e *entry, l *log.Log, marks partition.Offsets, c tier.Copy) (err error) {
	p := e.part
	src, err := l.UploadRange(c.Start, min(marks.HighWatermark, marks.LastStable))
	if err != nil || src == nil {
		return err
	}
	defer src.Close()
	// The tier must never hold what the disk may still forget: after a power cut the log would give the offsets out again.
	if err := l.FlushUpTo(src.End + 1); err != nil {
		return err
	}
	id, err := tp.NewUUID(rand.Reader)
	if err != nil {
		return err
	}
	seg := tier.Segment{ID: id, Topic: p.ID().Topic, TopicID: p.TopicID(), Partition: p.ID().Index, Start: src.Start, End: src.End, MaxTimestamp: src.MaxTimestamp,
		Size: src.Size, Epochs: src.Epochs, LeaderEpoch: marks.LeaderEpoch, Broker: s.o.Self, EventTime: time.Now().UnixMilli(), State: tier.CopyStarted, TxnIndexEmpty: len(src.TxnIndex) == 0}
	started := false
	s.mu.Lock()
	s.copies[id] = true
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.copies, id)
		e.copying = tp.UUID{}
		if errors.Is(err, errMoved) {
			s.orphan = time.Time{} // the topic may be gone, and its sweep waited for this upload
		}
		s.mu.Unlock()
		if started && err != nil && ctx.Err() == nil {
			s.o.Observe(Event{Topic: seg.Topic, Err: err})
			s.withdraw(ctx, &seg, err)
		}
	}()
	if err := s.record(ctx, controller.StartCopyCommand{Segment: seg}); err != nil {
		return err
	}
	started = true
	s.mu.Lock()
	e.copying = id
	s.mu.Unlock()
	s.o.Observe(Event{Topic: seg.Topic, Started: true})
	result, err := uploader.Upload(ctx, s.o.Bucket, &seg, uploader.Source{Log: src.Log, Size: src.Size, OffsetIndex: src.OffsetIndex, TimeIndex: src.TimeIndex,
		TxnIndex: src.TxnIndex, ProducerSnapshot: src.ProducerSnapshot, LeaderEpochs: src.LeaderEpochs}, s.o.Upload)
	if err != nil {
		return fmt.Errorf("upload offsets %d to %d: %w", seg.Start, seg.End, err)
	}
	if err := s.record(ctx, controller.FinishCopyCommand{Segment: seg, Finished: controller.Finished{ObjectBytes: result.ObjectBytes, CRC: result.CRC, Format: result.Format, CustomMetadata: result.CustomMetadata}}); err != nil {
		return err
	}
	s.o.Observe(Event{Topic: seg.Topic, Copied: seg.Size})
	s.o.Log.Info("segment is in the tier", "partition", p.ID().String(), "start", seg.Start, "end", seg.End, "bytes", seg.Size)
	return nil
}

// withdraw removes what an upload left behind whose segment another broker has cleared away meanwhile, as the new leader or
// because the topic was deleted: nobody would look for it again. A segment that the metadata still has is somebody's to clear away.
func (s *Service) withdraw(ctx context.Context, seg *tier.Segment, cause error) {
	if !errors.Is(cause, controller.ErrUnknownTopic) { // its image tells no more than the controller did
		img := s.o.Image()
		t, ok := img.TopicsByID[seg.TopicID]
		if !ok {
			t, ok = img.Deleting[seg.TopicID]
		}
		// The image had the segment before the upload began.
		if ok && t.Partitions[seg.Partition].Remote.Get(seg.ID) != nil {
			return
		}
	}
	if err := uploader.Delete(ctx, s.o.Bucket, s.o.Upload.Prefix, seg); err != nil && ctx.Err() == nil {
		s.o.Log.Warn("objects of an upload that is not wanted any more were not removed, tier fsck finds them", "topic", seg.Topic, "partition", seg.Partition, "segment", seg.ID.String(), "cause", err)
	}
}

// clean deletes the objects of segments and then forgets the segments.
func (s *Service) clean(ctx context.Context, topic tp.UUID, id tp.Partition, remote tier.Segments, ids []tp.UUID) error {
	for _, segmentID := range ids {
		seg := remote.Get(segmentID)
		s.mu.Lock()
		busy := s.copies[segmentID]
		s.mu.Unlock()
		if seg == nil || busy {
			continue
		}
		s.o.Forget(segmentID)
		if err := uploader.Delete(ctx, s.o.Bucket, s.o.Upload.Prefix, seg); err != nil {
			if ctx.Err() == nil {
				s.o.Observe(Event{Topic: id.Topic, Err: err, Deleting: true})
			}
			return fmt.Errorf("delete remote segment %s: %w", segmentID, err)
		}
		if err := s.record(ctx, controller.FinishDeleteCommand{Topic: topic, Index: id.Index, Segments: []tp.UUID{segmentID}}); err != nil {
			return err
		}
		s.o.Observe(Event{Topic: id.Topic, Deleted: 1})
	}
	return nil
}

// leave takes a partition out of the tier after its topic stopped being tiered (KIP-950).
func (s *Service) leave(ctx context.Context, p *partition.Partition, marks partition.Offsets) error {
	remote := p.Remote()
	if len(remote) == 0 {
		return nil
	}
	if err := s.record(ctx, controller.DisableRemoteCommand{Topic: p.TopicID(), Index: p.ID().Index, Leader: s.o.Self, Epoch: marks.LeaderEpoch, LogStart: marks.LocalLogStart}); err != nil {
		return err
	}
	return s.clean(ctx, p.TopicID(), p.ID(), p.Remote(), deletable(p.Remote(), s.o.DeleteDelay))
}

func deletable(remote tier.Segments, delay time.Duration) []tp.UUID {
	var ids []tp.UUID
	for _, seg := range remote {
		if seg.Deletable(time.Now(), delay) {
			ids = append(ids, seg.ID)
		}
	}
	return ids
}

// sweeper is the broker that clears deleted topics away: one is enough, and the first that lives will do.
func sweeper(img *metadata.Image, self int32) int32 {
	for _, id := range img.BrokerIDs() {
		if !img.Brokers[id].Fenced {
			return id
		}
	}
	return self
}

// sweep removes the objects of deleted topics. It goes on where it was after a restart, since the image remembers them.
func (s *Service) sweep(ctx context.Context) {
	defer func() {
		s.mu.Lock()
		s.sweeps = false
		s.mu.Unlock()
	}()
	img := s.o.Image()
	if sweeper(img, s.o.Self) != s.o.Self {
		return
	}
	for _, t := range img.DeletingTopics() {
		for _, p := range t.Partitions {
			var ids []tp.UUID
			for _, seg := range p.Remote {
				ids = append(ids, seg.ID)
			}
			if len(ids) == 0 {
				continue
			}
			if err := s.clean(ctx, t.ID, tp.Partition{Topic: t.Name, Index: p.Index}, p.Remote, ids); err != nil {
				if ctx.Err() == nil && !errors.Is(err, errMoved) { // another broker may have done it
					s.o.Log.Warn("remote data of a deleted topic was not removed, it will be tried again", "topic", t.Name, "id", t.ID.String(), "cause", err)
				}
				break
			}
		}
	}
}
