package sim

import (
	"fmt"
	"syscall"

	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

// inject brings one fault after another.
func (s *sim) inject() {
	s.after(s.between(s.plan.every/2, 3*s.plan.every), func() {
		if s.calm {
			return
		}
		s.inject()
		if s.topicID.IsZero() {
			return
		}
		var kinds []Fault
		for i := range faultNames {
			if k := Fault(1) << i; s.plan.has(k) {
				kinds = append(kinds, k)
			}
		}
		if len(kinds) > 0 {
			s.strike(kinds[s.rng.IntN(len(kinds))])
		}
	})
}

func (s *sim) anyNode() *node { return s.nodes[s.rng.IntN(len(s.nodes))] }

func (s *sim) anyPartition() *metadata.Partition {
	return s.partition(int32(s.rng.IntN(s.plan.partitions)))
}

// comesBack starts a machine again after a while.
func (s *sim) comesBack(n *node) {
	away := s.between(5, 400)
	if s.chance(3) {
		away = s.between(400, 5000)
	}
	s.after(away, n.start)
}

func (s *sim) strike(kind Fault) {
	n := s.anyNode()
	switch kind {
	case Cuts:
		to := int32(s.between(0, int64(len(s.nodes))))
		if to == n.id {
			return
		}
		link := [2]int32{n.id, to}
		if s.chance(2) {
			link = [2]int32{to, n.id}
		}
		s.note("cut: %v", link)
		s.net.cut[link] = true
		s.after(s.between(100, 4000), func() { delete(s.net.cut, link) })
	case Kills:
		if n.run != nil {
			s.stats.Kills++
			n.kill(n.run)
			s.comesBack(n)
		}
	case Power:
		if s.spares(n) {
			s.note("broker %d: power is cut", n.id)
			s.stats.Power++
			n.power()
			s.comesBack(n)
		}
	case Wipes:
		if s.spares(n) && s.chance(2) {
			s.note("broker %d: the disk is replaced", n.id)
			s.stats.Wipes++
			n.wipe()
			s.comesBack(n)
		}
	case Disks:
		f := vfs.Fault{Op: []vfs.Op{vfs.OpWrite, vfs.OpSync, vfs.OpOpen, vfs.OpRename, vfs.OpSyncDir, vfs.OpTruncate}[s.rng.IntN(6)], Nth: 1 + s.rng.IntN(6), Err: syscall.EIO, Partial: s.rng.IntN(40)}
		if s.chance(2) {
			f.Op, f.Err = vfs.OpWrite, syscall.ENOSPC
		}
		s.note("broker %d: its disk fails: %+v", n.id, f)
		n.hurt = true
		n.fs.Inject(f)
	case Outages:
		s.note("bucket: away")
		s.bucket.away = true
		s.after(s.between(200, 4000), func() { s.bucket.away = false })
	case Clocks:
		n.skew = s.between(-3000, 3000)
		s.note("broker %d: clock is off by %d", n.id, n.skew)
	case Moves:
		s.move()
	case Elections:
		s.try(controller.ElectLeadersCommand{})
	case Shutdowns:
		if n.run != nil {
			n.run.shutdown()
		}
	case Configs:
		s.configure()
	case Unclean:
		s.setting("unclean.leader.election.enable", fmt.Sprint(s.chance(2)))
		if s.chance(2) {
			s.try(controller.ElectLeadersCommand{Unclean: true})
		}
	case Trims:
		s.trim()
	case Disabling:
		s.disable()
	case Controllers:
		s.quorum.depose()
	}
}

// spares says that a machine may lose its data: where it is in sync somebody else is, too, who is there. Now and then
// nobody is asked; then the checks know that a partition has lost its last copy.
func (s *sim) spares(n *node) bool {
	for slot, part := range s.ids {
		p := s.state(part)
		if p == nil {
			return false
		}
		if !contains(p.ISR, n.id) {
			continue
		}
		others := 0
		for _, id := range p.ISR {
			if m := s.node(id); m != n && m.run != nil && !m.lost[slot] {
				others++
			}
		}
		if others == 0 && (s.o.Transactions || !s.chance(12)) {
			return false
		}
	}
	return true
}

func (s *sim) try(c controller.Command) {
	if _, err := s.command(c); err != nil {
		s.note("admin: %T: %v", c, err)
	}
}

func (s *sim) move() {
	p := s.anyPartition()
	if p == nil {
		return
	}
	c := controller.Reassignment{Topic: topic, Index: p.Index}
	if !s.chance(6) {
		for _, i := range s.rng.Perm(len(s.nodes))[:min(s.plan.factor, len(s.nodes))] {
			c.Replicas = append(c.Replicas, int32(i+1))
		}
	}
	s.note("admin: reassign %s-%d to %v", topic, p.Index, c.Replicas)
	s.try(controller.ReassignCommand{Partitions: []controller.Reassignment{c}})
}

func (s *sim) set(pairs ...string) {
	var changes []controller.Change
	for i := 0; i < len(pairs); i += 2 {
		changes = append(changes, controller.Change{Key: pairs[i], Op: controller.Set, Value: &pairs[i+1]})
	}
	s.try(controller.AlterTopicCommand{Topic: topic, Changes: changes})
}

func (s *sim) setting(key, value string) { s.set(key, value) }

func (s *sim) configure() {
	switch s.rng.IntN(5) {
	case 0:
		s.set("local.retention.bytes", "-2", "remote.log.copy.disable", "true")
	case 1:
		s.set("remote.log.copy.disable", "false", "local.retention.bytes", s.plan.local())
	case 2:
		s.plan.fromTier = !s.plan.fromTier
		s.note("admin: from tier %v", s.plan.fromTier)
	case 3:
		s.set("min.insync.replicas", fmt.Sprint(1+s.rng.IntN(s.plan.factor)))
	case 4:
		s.set("internal.segment.bytes", fmt.Sprint(450+s.rng.IntN(1000)))
	}
}

func (s *sim) disable() {
	if s.chance(2) {
		s.set("remote.storage.enable", "false", "remote.log.delete.on.disable", "true", "remote.log.copy.disable", "false")
		return
	}
	s.set("remote.storage.enable", "true", "remote.log.delete.on.disable", "false", "local.retention.bytes", s.plan.local())
}

// trim is DeleteRecords, by whoever believes to lead.
func (s *sim) trim() {
	id := tp.Partition{Topic: topic, Index: int32(s.rng.IntN(s.plan.partitions))}
	n := s.node(s.leader(id))
	if n == nil || n.run == nil || n.run.parts[s.slot(id)] == nil {
		return
	}
	part := n.run.parts[s.slot(id)]
	marks, err := part.p.Offsets(tp.NoEpoch)
	if err != nil || marks.HighWatermark <= marks.LogStart {
		return
	}
	start, err := part.p.DeleteRecords(s.between(marks.LogStart, marks.HighWatermark))
	s.note("%s: records below %d are deleted: %v", id, start, err)
	s.touch(n.run)
}
