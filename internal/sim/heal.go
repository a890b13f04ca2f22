package sim

import (
	"fmt"

	"github.com/varve-io/varve/internal/checker"
	"github.com/varve-io/varve/internal/committed"
	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/txn"
)

// restMs is how long the healed cluster may take to come to rest.
const restMs = 60_000

// heal ends the storm, waits until the cluster is at rest, and looks at all of it.
func (s *sim) heal() {
	s.note("calm")
	s.calm = true
	clear(s.net.cut)
	s.bucket.away = false
	for _, n := range s.nodes {
		n.fs.Heal()
	}
	if s.topicID.IsZero() && !s.until(func() string {
		if s.topicID.IsZero() {
			return "there is no topic"
		}
		return ""
	}) {
		return
	}
	s.sane()
	if s.until(s.restless) {
		s.final()
	}
}

// sane sets the topic as it was meant to be.
func (s *sim) sane() {
	if s.quorum.active < 0 {
		s.quorum.succeed()
	}
	for _, n := range s.nodes {
		n.fs.Heal()
		if n.run == nil {
			s.after(s.between(1, 300), n.start)
		} else if n.hurt {
			r := n.run
			s.after(s.between(1, 300), func() { r.repair() })
		}
	}
	if s.quorum.active < 0 {
		s.after(300, s.sane)
		return
	}
	s.set("remote.storage.enable", "true", "remote.log.delete.on.disable", "false", "remote.log.copy.disable", "false", "local.retention.bytes", s.plan.local(),
		"unclean.leader.election.enable", "false")
	s.rescue()
}

// rescue elects leaders where the last in sync has lost its data, as an operator would who has everybody back.
func (s *sim) rescue() {
	defer s.after(500, s.rescue)
	for _, n := range s.nodes {
		if b := s.quorum.img.Brokers[n.id]; n.run == nil || b == nil || b.Fenced {
			return
		}
	}
	for _, id := range s.ids {
		if p := s.state(id); p != nil && p.Lost {
			s.try(controller.ElectLeadersCommand{Unclean: true, Partitions: []controller.PartitionRef{{Topic: p.Topic, Index: p.Index}}})
		}
	}
}

// until runs until nothing is said to be wrong, which must not take for ever. It must hold for a while.
func (s *sim) until(wrong func() string) bool {
	end := s.now + restMs
	held := int64(-1)
	what := ""
	checked := int64(-1)
	for s.now < end {
		if !s.step() {
			return false
		}
		if s.now < checked+50 {
			continue
		}
		checked = s.now
		if what = wrong(); what != "" {
			held = -1
		} else if held < 0 {
			held = s.now
		} else if s.now-held >= 2*tierMs {
			return true
		}
	}
	s.check.Fail(checker.Liveness, tp.Partition{Topic: topic}, "after %d ms of calm: %s", restMs, what)
	return false
}

// restless says what is not at rest, "" for nothing.
func (s *sim) restless() string {
	for _, p := range s.clients.streams {
		if p.raw != nil {
			return fmt.Sprintf("%s: producer %d waits, tries %d", p.id, p.pid, p.tries)
		}
	}
	for _, id := range s.ids {
		if why := s.unsettled(id, s.state(id)); why != "" {
			return fmt.Sprintf("%s: %s", id, why)
		}
	}
	return s.undecided()
}

func (s *sim) unsettled(id tp.Partition, p *metadata.Partition) string {
	if p.Leader < 0 || len(p.ISR) != len(p.Replicas) || len(p.Adding)+len(p.Removing) > 0 {
		what := ""
		for _, member := range p.Replicas {
			if r := s.replica(id, member); r != nil && r.m != nil {
				phase, err := r.m.machine.Phase()
				what += fmt.Sprintf("; %d at %d: %v %v", member, r.p.Log().Offsets().End, phase, err)
			}
		}
		return fmt.Sprintf("leader %d, ISR %v of %v (+%v -%v)%s", p.Leader, p.ISR, p.Replicas, p.Adding, p.Removing, what)
	}
	lead := s.replica(id, p.Leader)
	if lead == nil {
		return fmt.Sprintf("its leader %d is out of service", p.Leader)
	}
	end := lead.p.Log().Offsets().End
	for _, member := range p.ISR {
		r := s.replica(id, member)
		if r == nil {
			return fmt.Sprintf("replica %d is out of service", member)
		}
		o, lo := r.p.Log().Offsets(), lead.p.Log().Offsets()
		if o.End != end || r.p.HighWatermark() != end || o.LogStart != lo.LogStart && !(s.plan.trims() && o.LogStart > lo.LogStart) {
			phase := ""
			if r.m != nil {
				p, err := r.m.machine.Phase()
				phase = fmt.Sprint(p, " ", err)
			}
			return fmt.Sprintf("replica %d is at %+v, high watermark %d, leader %d at %+v %s", member, o, r.p.HighWatermark(), p.Leader, lo, phase)
		}
	}
	if marks, err := lead.p.Offsets(tp.NoEpoch); err != nil || marks.LastStable != end && !s.forgiven() {
		return fmt.Sprintf("a transaction is open from %d on, the log ends at %d: %v", marks.LastStable, end, err)
	}
	if id.Topic != topic {
		return "" // the cluster's own topics are not tiered
	}
	for _, seg := range p.Remote {
		if seg.State != tier.CopyFinished {
			return fmt.Sprintf("segment %s [%d, %d] is %s", seg.ID, seg.Start, seg.End, seg.State)
		}
	}
	if t := lead.t; t == nil || t.running {
		return "the tier is busy"
	}
	remote := p.Remote.End()
	if s.forgiven() {
		return "" // what lies behind a transaction that hangs stays here
	}
	if sealed := lead.p.Log().Sealed(); len(sealed) > 0 && sealed[len(sealed)-1].End > remote {
		return fmt.Sprintf("the tier ends at %d, the sealed log at %d", remote, sealed[len(sealed)-1].End)
	}
	return ""
}

// undecided says which transaction or producer of transactions is not at rest.
func (s *sim) undecided() string {
	if s.forgiven() {
		return ""
	}
	for _, a := range s.clients.accounts {
		for _, p := range a.processes {
			if !p.over && (!p.ready || p.tx != nil || p.replaced()) {
				return fmt.Sprintf("%s is not at rest: ready %v, transaction %v, paused until %d", p, p.ready, p.tx, p.until-s.begun)
			}
		}
		p := a.processes[len(a.processes)-1]
		if p.over {
			return fmt.Sprintf("%s has no successor", p)
		}
		var held *txn.Held
		if part := s.leading(transactionsOf(a.id)); part != nil && part.ledger != nil && part.ledger.ids[a.id] != nil {
			held = &part.ledger.ids[a.id].held
		}
		if held == nil || held.Doubtful() || held.NextDeadline() > 0 || held.Pending() != nil {
			return fmt.Sprintf("%s is %+v", a.id, held)
		}
		if a.input == nil {
			continue
		}
		if part := s.leading(offsetsOf(a.group())); part == nil || part.desk == nil || part.desk.loading {
			return fmt.Sprintf("group %q is loading", a.group())
		}
		if part := s.leading(*a.input); part == nil || p.position < part.p.Log().Offsets().End {
			return fmt.Sprintf("%s has got to %d", p, p.position)
		}
	}
	return ""
}

// forgiven says that transactions may hang, since a history was broken by force and a decision may be lost with it.
func (s *sim) forgiven() bool { return s.o.Transactions && s.check.Broken() }

// leading is a partition at its leader, nil while that is out of service.
func (s *sim) leading(id tp.Partition) *replica {
	if p := s.state(id); p != nil {
		return s.replica(id, p.Leader)
	}
	return nil
}

// replica is a replica that is in service.
func (s *sim) replica(id tp.Partition, broker int32) *replica {
	n, p, slot := s.node(broker), s.state(id), s.slot(id)
	if n == nil || n.run == nil || n.run.parts[slot] == nil || n.run.parts[slot].p.Cause() != nil {
		return nil
	}
	if part := n.run.parts[slot]; part.p.Log() != nil {
		if leader, epoch := part.p.Leadership(); leader == p.Leader && epoch == p.LeaderEpoch {
			return part
		}
	}
	return nil
}

// final looks at the cluster at rest.
func (s *sim) final() {
	for _, id := range s.ids {
		p := s.state(id)
		var rest []checker.Rest
		for _, member := range append([]int32{p.Leader}, p.ISR...) {
			part := s.replica(id, member)
			l := part.p.Log()
			rest = append(rest, checker.Rest{Replica: part.seen(), Epochs: l.Epochs(), Producers: l.Producers(at(s.now))})
		}
		s.check.Settled(id, rest, s.plan.trims())
		if start := rest[0].LogStart; start > 0 && !s.plan.trims() && s.check.Generation(id) == 0 {
			s.check.Fail(checker.LogStart, id, "it is %d, though nothing was ever to be deleted", start)
		}
		s.readAll(p, id, rest[0], false)
		if id.Topic == topic {
			s.readAll(p, id, rest[0], true)
		}
	}
	s.finalTransactions()
	for _, key := range s.bucket.strays() {
		s.check.Fail(checker.Dangling, tp.Partition{Topic: topic}, "no record knows object %s", key)
	}
}

func (s *sim) finalTransactions() {
	if s.forgiven() {
		return
	}
	var inputs []checker.Input
	for _, a := range s.clients.accounts {
		if a.input == nil {
			continue
		}
		in := checker.Input{Partition: *a.input}
		s.leading(offsetsOf(a.group())).r.fetchOffset(a.group(), committed.Partition{Topic: in.Partition.Topic, Partition: in.Partition.Index}, func(offset int64, _ bool, err error) {
			if in.Offset = offset; err != nil {
				s.check.Fail(checker.Liveness, in.Partition, "group %q: %v", a.group(), err)
			}
		})
		inputs = append(inputs, in)
	}
	s.check.TransactionsSettled(inputs)
}

// readAll reads a partition from its start to its end.
func (s *sim) readAll(p *metadata.Partition, id tp.Partition, lead checker.Rest, direct bool) {
	c := &consumer{s: s, id: id, offset: lead.LogStart, direct: direct}
	r := s.node(p.Leader).run
	for c.offset < lead.End {
		was := c.offset
		if r.serve(c); s.check.Err() != nil {
			return
		}
		if c.offset <= was {
			s.check.Fail(checker.Reading, id, "broker %d gives nothing at offset %d of [%d, %d), direct %v (local from %d, tier %d)", p.Leader, was, lead.LogStart, lead.End, direct, lead.LocalStart, p.Remote.End())
			return
		}
	}
	if end := s.check.End(id); end >= 0 && c.offset != end && s.check.Generation(id) == 0 {
		s.check.Fail(checker.Durability, id, "it ends at %d, the history at %d", c.offset, end)
	}
}
