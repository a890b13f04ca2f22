package sim

import (
	"errors"
	"fmt"

	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

// quorum stands for the metadata log and the controller on its leader: one ordered log of batches, durable once they are
// in it. What can happen to a proposal is that it does not get in, or that it does and nobody hears of it.
type quorum struct {
	s             *sim
	img           *metadata.Image
	active        int32 // node of the active controller, -1 none
	sessions      *controller.Sessions
	lastPreferred int64
}

func (q *quorum) init(s *sim) {
	q.s, q.img, q.active = s, metadata.Empty(), -1
	q.sessions = controller.NewSessions(sessionMs, graceMs)
}

func (q *quorum) wall() int64 {
	if n := q.s.node(q.active); n != nil {
		return n.wall()
	}
	return q.s.now
}

// elect makes a node the active controller.
func (q *quorum) elect(id int32) {
	q.active = id
	q.s.note("controller: node %d", id)
	q.sessions = controller.NewSessions(sessionMs, graceMs)
	q.sessions.Begin(q.img, q.wall(), nil)
	q.lastPreferred = q.wall()
}

// depose leaves the quorum without a leader for a while.
func (q *quorum) depose() {
	if q.active < 0 {
		return
	}
	q.s.note("controller: none")
	q.active = -1
	q.s.after(q.s.between(50, 600), q.succeed)
}

func (q *quorum) succeed() {
	if q.active >= 0 {
		return
	}
	var up []int32
	for _, n := range q.s.nodes {
		if n.run != nil {
			up = append(up, n.id)
		}
	}
	if len(up) == 0 {
		q.s.after(200, q.succeed)
		return
	}
	q.elect(up[q.s.rng.IntN(len(up))])
}

func (q *quorum) env() controller.Env {
	now := q.wall()
	return controller.Env{Now: now, Random: random{q.s}, Broker: q.s.static, TierAvailable: true,
		Alive: func(id int32) bool { return q.sessions.Alive(id, now) },
		Thin:  func(id int32, p controller.PartitionRef) bool { return q.sessions.Thin(id, p) }}
}

// run runs a command at the active controller. The records are in the log when it returns without an error.
func (q *quorum) run(c controller.Command) (any, error) {
	env := q.env()
	register, registers := c.(controller.RegisterCommand)
	if h, ok := c.(controller.HeartbeatCommand); ok {
		q.sessions.Touch(h.Broker, h.Epoch, env.Now)
		q.sessions.SetThin(h.Broker, h.Thin)
	}
	records, reply, err := c.Run(q.img, env)
	if err != nil {
		return nil, err
	}
	if registers && len(records) > 0 {
		if next, err := q.img.Apply(records); err == nil {
			q.s.lastCopies(register.Broker.ID, next)
		}
		if q.s.o.Bug == KeepInISR {
			records = records[:1]
		}
	}
	return reply, q.append(records)
}

func (q *quorum) append(records []metadata.Record) error {
	if len(records) == 0 {
		return nil
	}
	next, err := q.img.Apply(records)
	if err != nil {
		q.s.check.Fail("metadata", tp.Partition{}, "impossible records: %v", err)
		return err
	}
	next.Index = q.img.Index + 1
	q.img = next
	for _, r := range records {
		q.saw(r)
	}
	for _, n := range q.s.nodes {
		q.s.deliver(n)
	}
	return nil
}

// saw takes note of a record for the checks.
func (q *quorum) saw(record metadata.Record) {
	s := q.s
	switch r := record.(type) {
	case metadata.PartitionRecord:
		id := tp.Partition{Topic: q.img.TopicsByID[r.Topic].Name, Index: r.Index}
		s.note("%s: leader %d, epoch %d/%d, ISR %v of %v (+%v -%v) unclean %v lost %v", id, r.Leader, r.LeaderEpoch, r.PartitionEpoch, r.ISR, r.Replicas, r.Adding, r.Removing, r.Unclean, r.Lost)
		s.stats.Elections++
		if r.Unclean {
			s.stats.Unclean++
			s.check.Reset(id, 0, r.LeaderEpoch)
		}
	case metadata.RemoteSegmentRecord:
		s.note("%s-%d: copy [%d, %d] of %s by %d starts", topic, r.Segment.Partition, r.Segment.Start, r.Segment.End, r.Segment.ID, r.Segment.Broker)
		s.check.Remote(tp.Partition{Topic: topic, Index: r.Segment.Partition}, s.partition(r.Segment.Partition).Remote)
	case metadata.RemoteStateRecord:
		id := tp.Partition{Topic: topic, Index: r.Index}
		if r.ID.IsZero() {
			s.note("%s: log start %d", id, r.LogStart)
			return
		}
		s.note("%s: %s is %s", id, r.ID, r.State)
		remote := s.partition(r.Index).Remote
		s.check.Remote(id, remote)
		if r.State == tier.CopyFinished {
			s.stats.Copied++
			if seg := remote.Get(r.ID); seg != nil {
				s.check.Copied(id, seg, s.bucket.log(seg))
			}
		}
	case metadata.RemoteDisableRecord:
		s.note("%s-%d: leaves the tier, log start %d", topic, r.Index, r.LogStart)
	case metadata.BrokerStateRecord:
		s.note("broker %d/%d: fenced %v, leaving %v", r.ID, r.Epoch, r.Fenced, r.ShuttingDown)
	case metadata.BrokerRecord:
		s.note("broker %d/%d is registered", r.ID, r.Epoch)
	case metadata.TopicConfigRecord:
		s.note("settings: %v", r.Configs)
	}
}

func contains(list []int32, id int32) bool {
	for _, x := range list {
		if x == id {
			return true
		}
	}
	return false
}

// lastCopies is told that a broker registers anew, with the image that has it so. Where it counts as in sync all the same and lost data
// since, the partition may go on without that. If its disk is another, it must not where others may have more; an unclean election
// decides what is left.
func (s *sim) lastCopies(id int32, next *metadata.Image) {
	n := s.node(id)
	emptied := n.disk != n.known
	n.known = n.disk
	for slot, part := range s.ids {
		if !n.lost[slot] {
			continue
		}
		if _, p, ok := next.Partition(part); ok && contains(p.ISR, id) && !(emptied && len(p.Replicas) > 1) {
			s.taint(part, p, fmt.Sprintf("broker %d was one of the last in sync and lost data", id))
		}
		n.lost[slot] = false
	}
}

// taint gives up what is not in the tier.
func (s *sim) taint(id tp.Partition, p *metadata.Partition, why string) {
	s.note("%s: the history ends here: %s", id, why)
	s.stats.Tainted++
	s.check.Reset(id, p.Remote.End()+1, p.LeaderEpoch+1)
}

// deliver brings the newest image to a node, in its time.
func (s *sim) deliver(n *node) {
	if n.run == nil || n.awaited {
		return
	}
	delay := s.between(0, 20)
	if s.plan.has(Stale) && !s.calm && s.chance(8) {
		delay = s.between(100, 2500)
	}
	n.awaited = true
	s.after(delay, func() {
		n.awaited = false
		switch {
		case n.run == nil:
		case s.quorum.active < 0 || !s.net.open(s.quorum.active, n.id):
			s.deliver(n)
		default:
			n.run.follow(s.quorum.img)
		}
	})
}

// ticks are the controller's own.
func (s *sim) ticks() {
	s.after(150, s.ticks)
	q := &s.quorum
	if q.active < 0 {
		return
	}
	now := q.wall()
	c := controller.TickCommand{Silent: q.sessions.Silent(q.img, now)}
	if s.plan.has(Elections) && now-q.lastPreferred >= 5000 {
		c.Preferred, q.lastPreferred = true, now
	}
	if len(c.Silent) > 0 {
		s.note("controller: silent are %v", c.Silent)
	}
	if _, err := q.run(c); err != nil {
		s.check.Fail("metadata", tp.Partition{}, "tick: %v", err)
	}
}

// ask sends a command of a broker to the controller. With wait done runs only when the broker lives by the outcome.
func (r *run) ask(c controller.Command, limit int64, wait bool, done func(reply any, err error)) {
	s := r.n.s
	over := false
	finish := func(reply any, err error) {
		if over || r.n.run != r {
			return
		}
		over = true
		done(reply, err)
		s.touch(r)
	}
	s.after(limit, func() { finish(nil, errLost) })
	to := s.quorum.active
	if to < 0 {
		s.after(20, func() { finish(nil, errNoController) })
		return
	}
	s.net.send(r.n.id, to, func() {
		if s.quorum.active != to {
			s.net.send(to, r.n.id, func() { finish(nil, errNoController) })
			return
		}
		fate := 0 // 1: not proposed, 2: proposed, and nobody hears of it
		if s.plan.has(Controllers) && !s.calm && s.chance(25) {
			fate = 1 + s.rng.IntN(2)
		}
		if fate == 1 {
			return
		}
		reply, err := s.quorum.run(c)
		index := s.quorum.img.Index
		if fate == 2 {
			return
		}
		s.net.send(to, r.n.id, func() {
			if err != nil || !wait {
				finish(reply, err)
				return
			}
			r.await(index, func() { finish(reply, nil) })
		})
	})
}

// refused tells an answer of the controller from the lack of one.
func refused(err error) bool {
	var e *controller.Error
	return errors.As(err, &e)
}
