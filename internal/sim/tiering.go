package sim

import (
	"errors"
	"fmt"

	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tier/uploader"
	"github.com/varve-io/varve/internal/tp"
)

// task is what package tiering keeps of a partition that is led here. Its passes follow tiering.step, tiering.copy and
// tiering.clean, order for order; what they wait for takes simulated time.
type task struct {
	part     *replica
	due      int64
	running  bool
	again    bool
	failures int
	timed    bool
}

func (t *task) stopped() bool {
	r := t.part.r
	return !r.alive() || !t.part.here()
}

// lead is tiering.Service.Lead.
func (part *replica) lead() {
	if part.t == nil {
		part.t = &task{part: part}
	}
	t := part.t
	t.due = 0
	if t.running {
		t.again = true
	}
	t.schedule()
}

// poke is tiering.Service.Poke.
func (part *replica) poke() {
	if t := part.t; t != nil && t.failures == 0 {
		t.due, t.again = 0, t.running
		t.schedule()
	}
}

func (t *task) schedule() {
	if t.timed || t.running {
		return
	}
	t.timed = true
	s := t.part.r.n.s
	s.after(max(1, t.due-s.now), func() {
		t.timed = false
		switch {
		case t.stopped() || t.part.t != t || t.running:
		case t.due > s.now:
			t.schedule()
		default:
			t.running = true
			t.step()
		}
	})
}

// end ends a pass.
func (t *task) end(err error) {
	s := t.part.r.n.s
	t.running = false
	wait := int64(tierMs)
	switch {
	case err != nil && !errors.Is(err, errMoved):
		s.note("%s: broker %d: tiering failed: %v", t.part.id, t.part.r.n.id, err)
		wait = min(int64(500)<<min(t.failures, 4), 2000)
		t.failures++
	default:
		t.failures = 0
		if t.again {
			wait = 0
		}
	}
	t.again = false
	t.due = s.now + wait
	s.touch(t.part.r)
	t.schedule()
}

// next ends a step: more asks for another.
func (t *task) next(more bool, err error) {
	if more && err == nil {
		t.step()
		return
	}
	t.end(err)
}

var errMoved = errors.New("leadership moved")

// record runs a command and goes on when the partition lives by what it changed.
func (t *task) record(c controller.Command, then func(error)) {
	t.part.r.ask(c, 5000, true, func(_ any, err error) {
		if errors.Is(err, controller.ErrFenced) || errors.Is(err, controller.ErrUnknownTopic) {
			err = fmt.Errorf("%w: %w", errMoved, err)
		}
		then(err)
	})
}

func (t *task) step() {
	part := t.part
	r, s, p := part.r, part.r.n.s, part.p
	marks, err := p.Offsets(tp.NoEpoch)
	if err != nil || p.Log() == nil {
		t.end(errMoved)
		return
	}
	l := p.Log()
	if !l.Config().Tiered {
		t.leave(marks)
		return
	}
	in := tier.Input{ActiveSize: l.ActiveSize(), Remote: p.Remote(), LogStart: marks.LogStart, Stable: min(marks.HighWatermark, marks.LastStable),
		HighWatermark: marks.HighWatermark, LeaderEpoch: marks.LeaderEpoch, Config: r.tierConfig(), Now: at(r.n.wall())}
	if s.o.Bug == UploadUncommitted {
		in.Stable = marks.End
	}
	for _, seg := range l.Sealed() {
		in.Local = append(in.Local, tier.Local{Start: seg.Base, End: seg.End, Size: seg.Size, MaxTimestamp: seg.MaxTimestamp})
	}
	plan := tier.MakePlan(in)
	if s.o.Bug == DeleteEarly && len(in.Remote.Finished()) > 2 {
		_ = uploader.Delete(s.ctx, s.bucket.Memory, keyPrefix, in.Remote.Finished()[0])
	}
	ids := append(plan.Abandon, plan.Delete...)
	deletes := len(ids) > 0 || plan.LogStart > marks.LogStart
	rest := func() {
		t.clean(in.Remote, plan.Clean, func(err error) {
			if plan.Copy == nil || err != nil {
				t.next(deletes, err)
				return
			}
			t.copy(l, marks, in.Stable, *plan.Copy, func(err error) { t.next(true, err) })
		})
	}
	if !deletes {
		rest()
		return
	}
	t.record(controller.StartDeleteCommand{Topic: p.TopicID(), Index: part.id.Index, Leader: r.n.id, Epoch: marks.LeaderEpoch, Segments: ids, LogStart: plan.LogStart}, func(err error) {
		if err != nil {
			t.end(err)
			return
		}
		rest()
	})
}

// copy uploads one range.
func (t *task) copy(l *log.Log, marks partition.Offsets, stable int64, c tier.Copy, then func(error)) {
	part := t.part
	r, s := part.r, part.r.n.s
	src, err := l.UploadRange(c.Start, stable)
	if err != nil || src == nil {
		then(err)
		return
	}
	finish := func(err error) {
		src.Close()
		then(err)
	}
	if err := l.FlushUpTo(src.End + 1); err != nil {
		finish(err)
		return
	}
	id, err := tp.NewUUID(random{s})
	if err != nil {
		finish(err)
		return
	}
	seg := tier.Segment{ID: id, Topic: part.id.Topic, TopicID: part.p.TopicID(), Partition: part.id.Index, Start: src.Start, End: src.End, MaxTimestamp: src.MaxTimestamp,
		Size: src.Size, Epochs: src.Epochs, LeaderEpoch: marks.LeaderEpoch, Broker: r.n.id, EventTime: r.n.wall(), State: tier.CopyStarted, TxnIndexEmpty: len(src.TxnIndex) == 0}
	r.copies[id] = true
	done := func(err error) {
		delete(r.copies, id)
		finish(err)
	}
	t.record(controller.StartCopyCommand{Segment: seg}, func(err error) {
		if err != nil {
			done(err)
			return
		}
		slow := s.between(1, 30)
		if s.plan.has(Store) && !s.calm && s.chance(6) {
			slow = s.between(100, 3000)
		}
		s.after(slow, func() {
			if !r.alive() {
				src.Close()
				return
			}
			result, err := uploader.Upload(s.ctx, s.bucket, &seg, uploader.Source{Log: src.Log, Size: src.Size, OffsetIndex: src.OffsetIndex, TimeIndex: src.TimeIndex,
				TxnIndex: src.TxnIndex, ProducerSnapshot: src.ProducerSnapshot, LeaderEpochs: src.LeaderEpochs}, uploader.Options{Prefix: keyPrefix})
			s.bucket.excuse(&seg)
			if err != nil {
				done(fmt.Errorf("upload: %w", err))
				return
			}
			t.record(controller.FinishCopyCommand{Segment: seg, Finished: controller.Finished{ObjectBytes: result.ObjectBytes, CRC: result.CRC, Format: result.Format,
				CustomMetadata: result.CustomMetadata}}, done)
		})
	})
}

// clean deletes objects and then forgets the segments.
func (t *task) clean(remote tier.Segments, ids []tp.UUID, then func(error)) {
	r, s := t.part.r, t.part.r.n.s
	if len(ids) == 0 {
		then(nil)
		return
	}
	id, rest := ids[0], ids[1:]
	seg := remote.Get(id)
	if seg == nil || r.copies[id] {
		t.clean(remote, rest, then)
		return
	}
	r.reader.Forget(id)
	if s.o.Bug != LeaveObjects {
		if err := uploader.Delete(s.ctx, s.bucket, keyPrefix, seg); err != nil {
			then(err)
			return
		}
	}
	t.record(controller.FinishDeleteCommand{Topic: t.part.p.TopicID(), Index: t.part.id.Index, Segments: []tp.UUID{id}}, func(err error) {
		if err != nil {
			then(err)
			return
		}
		s.stats.Cleaned++
		t.clean(remote, rest, then)
	})
}

// leave takes the partition out of the tier after its topic stopped being tiered.
func (t *task) leave(marks partition.Offsets) {
	part := t.part
	r, p := part.r, part.p
	if len(p.Remote()) == 0 {
		t.end(nil)
		return
	}
	t.record(controller.DisableRemoteCommand{Topic: p.TopicID(), Index: part.id.Index, Leader: r.n.id, Epoch: marks.LeaderEpoch, LogStart: marks.LocalLogStart}, func(err error) {
		if err != nil {
			t.end(err)
			return
		}
		var ids []tp.UUID
		for _, seg := range p.Remote() {
			if seg.Deletable(at(r.n.wall()), r.tierConfig().DeleteDelay) {
				ids = append(ids, seg.ID)
			}
		}
		t.clean(p.Remote(), ids, t.end)
	})
}
