// Package assignor divides the partitions of topics among the members of a consumer group, as the coordinator does under KIP-848. It is pure:
// the same input gives the same output.
package assignor

import (
	"bytes"
	"cmp"
	"container/heap"
	"slices"

	"github.com/varve-io/varve/internal/grouprecord"
	"github.com/varve-io/varve/internal/tp"
)

// Member is what an assignor knows of a member.
type Member struct {
	ID         string
	InstanceID string                 // "" of a dynamic one
	Topics     []tp.UUID              // subscribed, in ascending order without repetition; each has to be in Topics
	Had        grouprecord.Assignment // its target so far
}

// Topics are the numbers of partitions of topics.
type Topics map[tp.UUID]int32

// Assign gives each member its partitions: every partition of a subscribed topic goes to exactly one of the topic's subscribers. Members with
// nothing are left out.
type Assign func(members []Member, topics Topics) map[string]grouprecord.Assignment

// Names of the assignors, as clients and group.consumer.assignors say them.
const (
	UniformName = "uniform"
	RangeName   = "range"
)

// ByName finds an assignor; nil if there is none of that name.
func ByName(name string) Assign {
	switch name {
	case UniformName:
		return Uniform
	case RangeName:
		return Range
	}
	return nil
}

func compareIDs(a, b tp.UUID) int { return bytes.Compare(a[:], b[:]) }

// Range gives each subscriber of a topic a contiguous range of its partitions, the first ones one more where they do not come out even.
// Static members come first, by instance id, then the others by member id: members that subscribe to the same topics with as many
// partitions get the same ranges of each, so that they may join them. What members had before does not count.
func Range(members []Member, topics Topics) map[string]grouprecord.Assignment {
	members = slices.SortedFunc(slices.Values(members), func(a, b Member) int {
		if a.InstanceID != "" && b.InstanceID != "" {
			return cmp.Compare(a.InstanceID, b.InstanceID)
		}
		if (a.InstanceID == "") != (b.InstanceID == "") {
			return cmp.Compare(b.InstanceID, a.InstanceID)
		}
		return cmp.Compare(a.ID, b.ID)
	})
	subscribers := map[tp.UUID]int32{}
	for _, m := range members {
		for _, t := range m.Topics {
			subscribers[t]++
		}
	}
	out := map[string]grouprecord.Assignment{}
	begun, next := map[tp.UUID]int32{}, map[tp.UUID]int32{} // members that had their turn, and where the next one begins
	for _, m := range members {
		for _, t := range m.Topics {
			n := topics[t] / subscribers[t]
			if begun[t] < topics[t]%subscribers[t] {
				n++
			}
			for range n {
				give(out, m.ID, t, next[t])
				next[t]++
			}
			begun[t]++
		}
	}
	return out
}

func give(out map[string]grouprecord.Assignment, id string, topic tp.UUID, partition int32) {
	if out[id] == nil {
		out[id] = grouprecord.Assignment{}
	}
	out[id][topic] = append(out[id][topic], partition)
}

// Uniform gives members as equal numbers of partitions as their subscriptions allow, and leaves with them as much of what they had as that
// allows. Where all subscribe to the same, the numbers differ by at most one. Otherwise no partition could go from one subscriber of its
// topic to another that has two fewer.
func Uniform(members []Member, topics Topics) map[string]grouprecord.Assignment {
	if len(members) == 0 {
		return nil
	}
	members = slices.SortedFunc(slices.Values(members), func(a, b Member) int { return cmp.Compare(a.ID, b.ID) })
	u := newUniform(members, topics)
	if same := len(u.order) > 0 && !slices.ContainsFunc(members, func(m Member) bool { return !slices.Equal(m.Topics, members[0].Topics) }); same {
		u.trim()
	}
	u.fill()
	u.balance()
	out := map[string]grouprecord.Assignment{}
	for _, t := range u.order {
		for p, owner := range u.owners[t] {
			give(out, members[owner].ID, t, int32(p))
		}
	}
	return out
}

const nobody = -1

// uniform is an assignment in the making. Members are known by their position.
type uniform struct {
	members     []Member
	order       []tp.UUID         // the subscribed topics, those with the fewest subscribers for their partitions first
	subscribers map[tp.UUID][]int // members
	owners      map[tp.UUID][]int // member by partition
	load        []int             // partitions by member
}

// newUniform begins with what members had and may keep.
func newUniform(members []Member, topics Topics) *uniform {
	u := &uniform{members: members, subscribers: map[tp.UUID][]int{}, owners: map[tp.UUID][]int{}, load: make([]int, len(members))}
	for i, m := range members {
		for _, t := range m.Topics {
			if u.owners[t] == nil {
				u.order = append(u.order, t)
				u.owners[t] = slices.Repeat([]int{nobody}, int(topics[t]))
			}
			u.subscribers[t] = append(u.subscribers[t], i)
			for _, p := range m.Had[t] {
				if int(p) < len(u.owners[t]) && u.owners[t][p] == nobody {
					u.owners[t][p] = i
					u.load[i]++
				}
			}
		}
	}
	slices.SortFunc(u.order, func(a, b tp.UUID) int {
		perSubscriber := func(t tp.UUID) float64 { return float64(topics[t]) / float64(len(u.subscribers[t])) }
		return cmp.Or(cmp.Compare(perSubscriber(b), perSubscriber(a)), cmp.Compare(len(u.subscribers[a]), len(u.subscribers[b])), compareIDs(a, b))
	})
	return u
}

// trim takes from members that all subscribe to the same what they have beyond their share. Those with the most keep one more where
// shares do not come out even.
func (u *uniform) trim() {
	total := 0
	for _, owners := range u.owners {
		total += len(owners)
	}
	share, more := total/len(u.members), total%len(u.members)
	most := slices.Clone(u.subscribers[u.order[0]])
	slices.SortFunc(most, func(a, b int) int { return cmp.Or(cmp.Compare(u.load[b], u.load[a]), cmp.Compare(a, b)) })
	quota := make([]int, len(u.members))
	for n, i := range most {
		quota[i] = share
		if n < more {
			quota[i]++
		}
	}
	for _, t := range u.order {
		for p, owner := range u.owners[t] {
			if owner != nobody && u.load[owner] > quota[owner] {
				u.owners[t][p] = nobody
				u.load[owner]--
			}
		}
	}
}

// fill gives each partition that nobody has to the subscriber with the least.
func (u *uniform) fill() {
	for _, t := range u.order {
		h := &byLoad{slices.Clone(u.subscribers[t]), u.load}
		heap.Init(h)
		for p, owner := range u.owners[t] {
			if owner == nobody {
				u.owners[t][p] = h.members[0]
				u.load[h.members[0]]++
				heap.Fix(h, 0)
			}
		}
	}
}

// byLoad is a heap of members, the one with the fewest partitions on top.
type byLoad struct {
	members, load []int
}

func (h *byLoad) Len() int { return len(h.members) }
func (h *byLoad) Less(i, j int) bool {
	a, b := h.members[i], h.members[j]
	return h.load[a] < h.load[b] || h.load[a] == h.load[b] && a < b
}
func (h *byLoad) Swap(i, j int) { h.members[i], h.members[j] = h.members[j], h.members[i] }
func (h *byLoad) Push(any)      {}
func (h *byLoad) Pop() any      { return nil }

// balanceRounds bounds the passes over all topics. Each one that changes something makes loads more equal.
const balanceRounds = 16

// balance moves partitions from subscribers with more to those with less, as long as that makes them more equal.
func (u *uniform) balance() {
	for range balanceRounds {
		moved := false
		for _, t := range u.order {
			for u.move(t) {
				moved = true
			}
		}
		if !moved {
			return
		}
	}
}

// move moves one partition of a topic, from its owner with the most, if that has two more than the subscriber with the least.
func (u *uniform) move(t tp.UUID) bool {
	from, at := nobody, 0
	for p, owner := range u.owners[t] {
		if from == nobody || u.load[owner] >= u.load[from] {
			from, at = owner, p
		}
	}
	if from == nobody {
		return false
	}
	to := slices.MinFunc(u.subscribers[t], func(a, b int) int { return cmp.Or(cmp.Compare(u.load[a], u.load[b]), cmp.Compare(a, b)) })
	if u.load[from]-u.load[to] < 2 {
		return false
	}
	u.owners[t][at] = to
	u.load[from]--
	u.load[to]++
	return true
}
