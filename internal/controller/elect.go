package controller

import (
	"slices"

	"github.com/varve-io/varve/internal/metadata"
)

// electorate is what an election knows about the brokers.
type electorate struct {
	unfenced func(broker int32) bool
	leaving  func(broker int32) bool // it has asked to shut down
	alive    func(broker int32) bool // its session is valid: preferred to one whose fencing is near
	thin     func(broker int32) bool // it holds too little local data to be preferred (KIP-1303)
}

// usable brokers may become leaders and join ISRs.
func (e electorate) usable(broker int32) bool { return e.unfenced(broker) && !e.leaving(broker) }

// elect finds a leader for p. The present one stays while it is in the ISR, unfenced and not leaving. Else the first of
// the ISR in assignment order that is usable is elected, replicas with little local data after all others: deprioritized,
// never excluded, so that a partition does not stay without a leader because of them (KIP-1303). Where there is none a
// present leader that is leaving stays, then with unclean the first usable replica outside the ISR becomes the whole ISR
// (unclean.leader.election.enable), and last the leader is -1 and the ISR what it was. A member that lost its data comes after
// the replicas outside the ISR.
//
// The answer shares no slice that differs from p's. Epochs are left to the caller.
func elect(p metadata.PartitionRecord, e electorate, unclean bool) metadata.PartitionRecord {
	present := p.Leader >= 0 && slices.Contains(p.ISR, p.Leader) && e.unfenced(p.Leader)
	if present && !e.leaving(p.Leader) {
		return p
	}
	best, rank := int32(-1), 0
	for _, r := range p.Replicas {
		if p.Lost || !slices.Contains(p.ISR, r) || !e.usable(r) {
			continue
		}
		n := 1
		if e.alive(r) {
			n += 2
		}
		if !e.thin(r) {
			n++
		}
		if n > rank {
			best, rank = r, n
		}
	}
	switch {
	case best >= 0:
		p.Leader = best
		// With a leader there again, fenced members that were kept for want of any other have no place in the ISR.
		p.ISR = filter(p.ISR, e.unfenced)
		return p
	case present:
		return p
	case unclean:
		for _, r := range append(without(p.Replicas, p.ISR), p.ISR...) {
			if e.usable(r) && (p.Lost || !slices.Contains(p.ISR, r)) {
				p.Leader, p.ISR, p.Unclean, p.Lost = r, []int32{r}, true, false
				return p
			}
		}
	}
	p.Leader = -1
	return p
}

// preferred makes the first replica the leader if it is fit for that now.
func preferred(p metadata.PartitionRecord, e electorate) (metadata.PartitionRecord, bool) {
	first := p.Replicas[0]
	if p.Lost || p.Leader == first || !slices.Contains(p.ISR, first) || !e.usable(first) || !e.alive(first) {
		return p, false
	}
	p.Leader = first
	return p, true
}

// filter returns a new list of the elements that keep is true for.
func filter(list []int32, keep func(int32) bool) []int32 {
	out := make([]int32, 0, len(list))
	for _, id := range list {
		if keep(id) {
			out = append(out, id)
		}
	}
	return out
}

// without returns a new list of what is in list and not in drop, nil if that is nothing.
func without(list, drop []int32) []int32 {
	out := filter(list, func(id int32) bool { return !slices.Contains(drop, id) })
	if len(out) == 0 {
		return nil
	}
	return out
}

// subset reports whether all of a is in b.
func subset(a, b []int32) bool {
	return !slices.ContainsFunc(a, func(id int32) bool { return !slices.Contains(b, id) })
}
