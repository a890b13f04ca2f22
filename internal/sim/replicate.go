package sim

import (
	"errors"
	"time"

	"github.com/varve-io/varve/internal/checker"
	"github.com/varve-io/varve/internal/fetch"
	"github.com/varve-io/varve/internal/follower"
	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tp"
)

// member is one partition that follows, as in replication.member: it belongs to one leader and one epoch.
type member struct {
	part    *replica
	leader  int32
	epoch   int32
	machine *follower.Machine
	waiting bool // an event will look at it
}

func (m *member) stopped() bool {
	return !m.part.r.alive() || m.part.m != m || !m.part.here()
}

// followLeader is replication.Service.Follow.
func (part *replica) followLeader() {
	role := part.p.Role()
	if role.Leader < 0 || role.Leader == part.r.n.id {
		part.m = nil
		return
	}
	if part.m != nil && part.m.leader == role.Leader && part.m.epoch == role.LeaderEpoch {
		part.m.soon(1)
		return
	}
	s := part.r.n.s
	part.m = &member{part: part, leader: role.Leader, epoch: role.LeaderEpoch, machine: follower.New(part.p, func() follower.Config {
		c := part.p.Log().Config()
		return follower.Config{Tiered: c.Tiered, Compacted: c.Compact, FromTier: s.plan.fromTier, Backoff: backoffMs * time.Millisecond}
	})}
	part.m.soon(1)
}

// soon looks for the next step after ms.
func (m *member) soon(ms int64) {
	if m.waiting {
		return
	}
	m.waiting = true
	m.part.r.n.s.after(ms, func() {
		m.waiting = false
		m.next()
	})
}

func (m *member) next() {
	if m.stopped() {
		return
	}
	s, r := m.part.r.n.s, m.part.r
	switch step := m.machine.Next(r.n.steady()); step.Kind {
	case follower.Wait:
		m.soon(max(1, step.Until.UnixMilli()-s.now))
	case follower.Fetch:
		m.fetch(step)
	case follower.Ask:
		m.ask(step)
	case follower.Load:
		s.after(s.between(1, 200), func() { m.load(step) })
	}
}

// done sees to what a step brought about, and goes on.
func (m *member) done(e follower.Effect, pause int64) {
	r, s := m.part.r, m.part.r.n.s
	if e.Truncated {
		s.stats.Truncated++
		s.note("%s: broker %d cut its log to %d", m.part.id, r.n.id, m.part.p.Log().Offsets().End)
	}
	if e.Restarted {
		s.note("%s: broker %d starts anew: %+v", m.part.id, r.n.id, m.part.p.Log().Offsets())
	}
	if e.Checkpoint && s.o.Bug != NoCheckpoint {
		r.checkpoint(log.RecoveryPointFile, log.LogStartFile)
	}
	s.touch(r)
	m.soon(pause)
}

func (m *member) fetch(step follower.Step) {
	s, r := m.part.r.n.s, m.part.r
	o := m.part.p.Log().Offsets()
	part := fetch.Part{Topic: m.part.id.Topic, TopicID: m.part.p.TopicID(), Index: m.part.id.Index, Offset: step.Offset, MaxBytes: 600, CurrentEpoch: step.LeaderEpoch,
		LastFetchedEpoch: step.LastEpoch, LogStart: o.LogStart, LocalStart: o.LocalLogStart}
	if s.o.Bug == NoDivergence {
		part.LastFetchedEpoch = -1
	}
	from := fetch.Follower{ID: r.n.id, Epoch: r.epoch}
	s.net.call(r.n.id, step.Leader, 1000, func(answer func(func())) {
		s.node(step.Leader).serveFollower(part, from, func(a follower.Answer) {
			answer(func() {
				if m.stopped() {
					return
				}
				pause := int64(1)
				if a.Code == follower.OK && len(a.Records) == 0 && !a.Diverging {
					pause = s.between(1, 10)
				}
				m.done(m.machine.Fetched(step, a, r.n.steady()), pause)
			})
		})
	}, func() {
		if !m.stopped() {
			m.done(m.machine.Fetched(step, follower.Answer{Code: follower.TryAgain, Err: errLost}, r.n.steady()), 1)
		}
	})
}

// parked is a fetch that waits at the leader until there is more.
type parked struct {
	over   bool
	answer func()
}

// serveFollower is the leader's side of a fetch of a follower.
func (n *node) serveFollower(part fetch.Part, from fetch.Follower, answer func(follower.Answer)) {
	r, s := n.run, n.s
	if r == nil {
		return // the connection is refused, which the follower finds out in its time
	}
	results := r.fetch.Fetch(s.ctx, &fetch.Request{Parts: []fetch.Part{part}, MaxBytes: 600, MinBytes: 1, Follower: &from, Now: n.steady()})
	s.touch(r)
	a := answerOf(&results[0])
	host := r.parts[s.slot(tp.Partition{Topic: part.Topic, Index: part.Index})]
	if host != nil && host.p.Cause() == nil && s.o.Bug == FakeFollowed {
		_ = host.p.Followed(partition.FollowerFetch{Follower: from.ID, BrokerEpoch: from.Epoch, LeaderEpoch: part.CurrentEpoch, Offset: host.p.Log().Offsets().End, Now: n.steady()})
	}
	if a.Code != follower.OK || a.Diverging || len(a.Records) > 0 || host == nil {
		answer(a)
		return
	}
	p := &parked{}
	p.answer = func() {
		if !p.over {
			p.over = true
			answer(a)
		}
	}
	host.parked = append(host.parked, p)
	s.after(s.between(100, 300), func() {
		if r.alive() {
			p.answer()
		}
	})
}

// wake answers the fetches that wait, since the log has grown or the role changed.
func (part *replica) wake() {
	parked := part.parked
	part.parked = nil
	for _, p := range parked {
		p.answer()
	}
}

// answerOf is kafkaapi's answer and replication's reading of it in one.
func answerOf(res *fetch.Result) follower.Answer {
	a := follower.Answer{Err: res.Err, HighWatermark: res.HighWatermark, LogStart: res.LogStart}
	if res.View != nil {
		var err error
		if a.Records, err = res.View.AppendTo(nil); err != nil {
			a.Code, a.Err = follower.TryAgain, err
		}
		res.View.Release()
		a.Full = len(a.Records) >= 300
	}
	if res.Diverging != nil {
		a.Diverging, a.Epoch, a.EndOffset = true, res.Diverging.Epoch, res.Diverging.EndOffset
	}
	switch {
	case res.Err == nil:
	case errors.Is(res.Err, fetch.ErrMovedToTier):
		a.Code = follower.MovedToTier
	case errors.Is(res.Err, fetch.ErrOffsetOutOfRange), errors.Is(res.Err, log.ErrOffsetOutOfRange):
		a.Code = follower.OutOfRange
	case errors.Is(res.Err, partition.ErrFencedEpoch):
		a.Code = follower.Fenced
	default:
		a.Code = follower.TryAgain
	}
	return a
}

// ask is replication's asker: one question after the other, the end last.
func (m *member) ask(step follower.Step) {
	s, r := m.part.r.n.s, m.part.r
	var o follower.Offsets
	o.Pending = -1
	fail := func(err error) { m.done(m.machine.Listed(step, o, err, r.n.steady()), 1) }
	questions := []func(partition.Offsets){
		func(x partition.Offsets) { o.Start = x.LogStart },
		func(x partition.Offsets) { o.LocalStart = x.LocalLogStart },
	}
	if step.Pending {
		questions = append(questions, func(x partition.Offsets) { o.Pending = x.PendingUpload() })
	}
	questions = append(questions, func(x partition.Offsets) { o.End = x.End })
	var put func(i int)
	put = func(i int) {
		if i == len(questions) {
			s.note("%s: broker %d asked broker %d: %+v", m.part.id, r.n.id, step.Leader, o)
			m.done(m.machine.Listed(step, o, nil, r.n.steady()), 1)
			return
		}
		s.net.call(r.n.id, step.Leader, 1000, func(answer func(func())) {
			to := s.node(step.Leader).run
			if to == nil {
				return
			}
			err := error(partition.ErrNotLeader)
			var marks partition.Offsets
			if host := to.parts[m.part.slot]; host != nil {
				if marks, err = host.p.Offsets(step.LeaderEpoch); err == nil && !host.p.Log().Config().Tiered {
					marks.RemoteEnd = -1
				}
			}
			answer(func() {
				switch {
				case m.stopped():
				case err != nil:
					fail(err)
				default:
					questions[i](marks)
					put(i + 1)
				}
			})
		}, func() {
			if !m.stopped() {
				fail(errLost)
			}
		})
	}
	put(0)
}

// load is replication's load: lineage and producers from the bucket.
func (m *member) load(step follower.Step) {
	if m.stopped() {
		return
	}
	s, r := m.part.r.n.s, m.part.r
	epochs, err := r.reader.LeaderEpochs(s.ctx, step.Segment)
	var snapshot []byte
	if err == nil {
		snapshot, err = r.reader.ProducerSnapshot(s.ctx, step.Segment)
	}
	s.note("%s: broker %d loads the state at %d: %v", m.part.id, r.n.id, step.Segment.End+1, err)
	switch {
	case err != nil:
	case s.o.Bug == ForgetProducers:
		snapshot = nil
	case s.o.Bug == ForgetEpochs:
		epochs = []leaderepoch.Entry{{Epoch: step.Segment.LeaderEpoch, StartOffset: 0}}
	}
	s.stats.Loads++
	m.done(m.machine.Loaded(step, epochs, snapshot, err, r.n.steady()), 1)
}

// observe shows the replicas to the checks and wakes who waits for them.
func (r *run) observe() {
	if !r.alive() {
		return
	}
	for _, part := range r.parts {
		if part == nil {
			continue
		}
		l := part.p.Log()
		if l == nil || part.p.Cause() != nil {
			part.settleAcks()
			part.wake()
			continue
		}
		r.n.quiet = true
		r.n.s.check.Replica(part.id, part.seen())
		r.n.quiet = false
		if end := l.Offsets().End; end != part.end || !part.p.Leads() {
			part.end = end
			part.wake()
		}
		part.settleAcks()
	}
}

// seen is the replica as the checks see it.
func (part *replica) seen() checker.Replica {
	l := part.p.Log()
	o := l.Offsets()
	leader, epoch := part.p.Leadership()
	return checker.Replica{Broker: part.r.n.id, Run: part.r.number, Leads: leader == part.r.n.id, Epoch: epoch, LogStart: o.LogStart, LocalStart: o.LocalLogStart,
		End: o.End, HighWatermark: part.p.HighWatermark(), Shaky: part.r.n.hurt, Remote: part.p.Remote(), Read: func(from, upTo int64) ([]byte, error) {
			var out []byte
			for from < upTo {
				v, err := l.Read(from, 1<<20, upTo, true)
				if err != nil {
					return nil, err
				}
				if v.Size() == 0 {
					v.Release()
					return out, nil
				}
				out, err = v.AppendTo(out)
				from = v.NextOffset
				v.Release()
				if err != nil {
					return nil, err
				}
			}
			return out, nil
		}}
}
