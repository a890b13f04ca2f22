package consumergroup

import (
	"slices"

	"github.com/varve-io/varve/internal/grouprecord"
	"github.com/varve-io/varve/internal/tp"
)

// Partitions are what a member says that it owns, by topic id; nil if it says nothing.
type Partitions map[tp.UUID][]int32

// within says that the member owns nothing but partitions of an assignment.
func (p Partitions) within(owned grouprecord.Owned) bool {
	for t, partitions := range p {
		for _, i := range partitions {
			if _, ok := owned[t][i]; !ok {
				return false
			}
		}
	}
	return p != nil
}

// holds says that the member owns a partition of an assignment, or may, for all it says.
func (p Partitions) holds(owned grouprecord.Owned) bool {
	for t, partitions := range p {
		for _, i := range partitions {
			if _, ok := owned[t][i]; ok {
				return true
			}
		}
	}
	return p == nil
}

// reconcile leads a member one step towards its target: it gives up what is not in it, goes over to the assignment epoch, and gets what nobody
// else has. changed says that the topics that it subscribes to just changed: they may be fewer than the target knows.
func (c *Changes) reconcile(m *member, changed bool, says Partitions, env Env, now int64) {
	g := c.g
	if !changed && m.reconciled(g.target.Epoch) {
		return
	}
	next := g.next(m, g.subscription(m.said, env.Image), changed, says)
	if same(next, m.has) {
		return
	}
	c.put(grouprecord.KindCurrent, m.id, next)
	k := g.clocks[m.id]
	switch {
	case m.classic():
	case next.State == grouprecord.UnrevokedPartitions:
		k.rebalance, k.epoch = now+int64(m.said.RebalanceMs), next.Epoch
	default:
		k.rebalance = 0
	}
}

func (g *Group) next(m *member, subscribed []tp.UUID, changed bool, says Partitions) *grouprecord.Current {
	switch {
	case m.has.State == grouprecord.Stable && m.has.Epoch == g.target.Epoch:
		return g.narrowed(m, subscribed, says)
	case m.has.State == grouprecord.UnrevokedPartitions && says.holds(m.has.Revoking):
		if !changed {
			return m.has
		}
		return g.narrowed(m, subscribed, says)
	}
	return g.advanced(m, subscribed, says)
}

// narrowed takes topics away from a member that it does not subscribe to any more, and leaves it where it is otherwise.
func (g *Group) narrowed(m *member, subscribed []tp.UUID, says Partitions) *grouprecord.Current {
	next := &grouprecord.Current{Epoch: m.has.Epoch, PreviousEpoch: m.has.Epoch, State: m.has.State, Assigned: grouprecord.Owned{}, Revoking: clone(m.has.Revoking)}
	left := false
	for t, partitions := range m.has.Assigned {
		if among(subscribed, t) {
			next.Assigned[t] = partitions
			continue
		}
		left = true
		for p, epoch := range partitions {
			set(next.Revoking, t, p, epoch)
		}
	}
	switch {
	case !left:
		return m.has
	case says.holds(next.Revoking):
		next.State = grouprecord.UnrevokedPartitions
	default: // it has given them up already
		next.Revoking = m.has.Revoking
	}
	return next
}

// advanced computes what a member has next, if it may leave its present step.
func (g *Group) advanced(m *member, subscribed []tp.UUID, says Partitions) *grouprecord.Current {
	target := g.targets[m.id]
	keeps, revokes, gets := grouprecord.Owned{}, grouprecord.Owned{}, grouprecord.Owned{}
	wanted := func(t tp.UUID, p int32) bool {
		_, found := slices.BinarySearch(target[t], p)
		return found && among(subscribed, t)
	}
	for t, partitions := range m.has.Assigned {
		for p, epoch := range partitions {
			if wanted(t, p) {
				set(keeps, t, p, epoch)
			} else {
				set(revokes, t, p, epoch)
			}
		}
	}
	waits := false
	for t, partitions := range target {
		if !among(subscribed, t) {
			continue
		}
		for _, p := range partitions {
			if _, has := keeps[t][p]; has {
				continue
			}
			if owner, taken := g.owners[t][p]; taken && owner != m.id {
				waits = true
				continue
			}
			set(gets, t, p, g.target.Epoch)
		}
	}
	next := &grouprecord.Current{Epoch: g.target.Epoch, PreviousEpoch: m.has.Epoch, Assigned: keeps, Revoking: grouprecord.Owned{}}
	if len(revokes) > 0 && says.holds(revokes) {
		next.Epoch, next.State, next.Revoking = m.has.Epoch, grouprecord.UnrevokedPartitions, revokes
		return next
	}
	for t, partitions := range gets {
		for p, epoch := range partitions {
			set(next.Assigned, t, p, epoch)
		}
	}
	if waits {
		next.State = grouprecord.UnreleasedPartitions
	}
	return next
}

// among says whether a topic is one of some, which are in ascending order.
func among(topics []tp.UUID, t tp.UUID) bool {
	_, found := slices.BinarySearchFunc(topics, t, compareIDs)
	return found
}

func set(o grouprecord.Owned, t tp.UUID, p, epoch int32) {
	if o[t] == nil {
		o[t] = map[int32]int32{}
	}
	o[t][p] = epoch
}

func clone(o grouprecord.Owned) grouprecord.Owned {
	out := grouprecord.Owned{}
	for t, partitions := range o {
		for p, epoch := range partitions {
			set(out, t, p, epoch)
		}
	}
	return out
}
