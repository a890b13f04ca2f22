package sim

import (
	"errors"
	"time"

	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
)

func (part *replica) proposeSoon() {
	if part.isrDue {
		return
	}
	part.isrDue = true
	part.r.n.s.after(1, func() {
		part.isrDue = false
		part.propose()
	})
}

// propose is broker.proposeAll for one partition.
func (part *replica) propose() {
	r, s := part.r, part.r.n.s
	if !r.alive() || !part.here() || r.epoch < 0 {
		return
	}
	o, ok := part.p.Propose(r.n.steady(), lagMs*time.Millisecond)
	if !ok {
		return
	}
	s.note("%s: broker %d proposes ISR %v in %d/%d", part.id, r.n.id, o.ISR, o.LeaderEpoch, o.PartitionEpoch)
	c := controller.AlterPartitionsCommand{Broker: r.n.id, Epoch: r.epoch, Partitions: []controller.ISRChange{{PartitionRef: controller.PartitionRef{Topic: part.p.TopicID(), Index: part.id.Index},
		LeaderEpoch: o.LeaderEpoch, PartitionEpoch: o.PartitionEpoch, ISR: o.ISR, Epochs: o.Epochs}}}
	r.ask(c, sessionMs, false, func(reply any, err error) {
		out := partition.Accepted
		switch {
		case refused(err):
			out = partition.Refused
		case err != nil:
			out = partition.Unknown
		case reply.(controller.AlterPartitionsReply).Errors[0] != nil:
			out = partition.Refused
		}
		part.p.Settle(o, out, r.n.steady())
		if out != partition.Accepted {
			s.note("%s: broker %d: ISR %v: outcome %d", part.id, r.n.id, o.ISR, out)
			s.after(2000, part.propose)
		}
	})
}

// heartbeats keep the sessions of a machine's brokers, whatever runs there.
func (s *sim) heartbeats(n *node) {
	s.after(heartbeatMs, func() { s.heartbeats(n) })
	r := n.run
	if r == nil || r.epoch < 0 || r.leaving {
		return
	}
	if me, ok := r.img.Brokers[n.id]; !ok || me.Epoch != r.epoch {
		return // its partitions are not open yet
	}
	if s.now-r.contact >= sessionMs {
		r.suspend(true)
	}
	sent := s.now
	c := controller.HeartbeatCommand{Broker: n.id, Epoch: r.epoch, Applied: r.img.Index, Ready: true, Thin: r.thin()}
	r.ask(c, sessionMs, false, func(reply any, err error) {
		switch {
		case err == nil:
			r.contact = max(r.contact, sent)
			if s.now-r.contact < sessionMs {
				r.suspend(false)
			}
		case errors.Is(err, controller.ErrFenced):
			s.note("broker %d: its run %d is over", n.id, r.epoch)
			r.suspend(true)
			n.kill(r)
			s.after(s.between(10, 500), n.start)
		}
	})
	s.after(sent+sessionMs-s.now, func() { // lease.go: the timer of the session
		if r.alive() && s.now-r.contact >= sessionMs {
			r.suspend(true)
		}
	})
}

func (r *run) suspend(suspended bool) {
	if r.suspended == suspended {
		return
	}
	r.suspended = suspended
	r.n.s.note("broker %d: suspended %v", r.n.id, suspended)
	for _, part := range r.parts {
		if part != nil {
			part.p.Suspend(suspended)
		}
	}
	r.n.s.touch(r)
}

// thin lists replicas that hold less than a segment of what the tier has more of (KIP-1303).
func (r *run) thin() []controller.PartitionRef {
	var out []controller.PartitionRef
	for _, part := range r.parts {
		if part == nil {
			continue
		}
		if l := part.p.Log(); l != nil && part.p.Cause() == nil && isThin(l) {
			out = append(out, controller.PartitionRef{Topic: part.p.TopicID(), Index: part.id.Index})
		}
	}
	return out
}

func isThin(l *log.Log) bool {
	o, c := l.Offsets(), l.Config()
	return c.Tiered && o.LocalLogStart > o.LogStart && o.Size < c.SegmentBytes
}
