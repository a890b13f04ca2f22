package group

import (
	"slices"

	"github.com/varve-io/varve/internal/grouprecord"
)

// SyncRequest is one SyncGroup.
type SyncRequest struct {
	MemberID, InstanceID   string
	Generation             int32
	ProtocolType, Protocol string            // "" before v5
	Assignments            map[string][]byte // by member id; from the leader
}

// Sync handles SyncGroup: members wait until the leader's assignment is written.
func (g *Group) Sync(r SyncRequest, token Token, now int64) Effects {
	reply := func(result SyncResult) Effects { return Effects{Syncs: []SyncReply{{token, result}}} }
	m, err := g.check(r.MemberID, r.InstanceID)
	switch {
	case err != nil:
		return reply(SyncResult{Err: err})
	case r.Generation != g.generation:
		return reply(SyncResult{Err: ErrIllegalGeneration})
	case r.ProtocolType != "" && r.ProtocolType != g.protocolType, r.Protocol != "" && r.Protocol != g.protocol:
		return reply(SyncResult{Err: ErrInconsistentProtocol})
	}
	switch g.state {
	case PreparingRebalance:
		return reply(SyncResult{Err: ErrRebalanceInProgress})
	case Stable:
		m.deadline = now + m.SessionMs
		return reply(g.assigned(m))
	case CompletingRebalance:
		var e Effects
		if m.syncing != 0 {
			e.Syncs = append(e.Syncs, SyncReply{m.syncing, SyncResult{Err: ErrRebalanceInProgress}})
		}
		m.syncing, m.synced = token, true
		if m.ID == g.leader && !g.persisting {
			for _, other := range g.members {
				other.Assignment = r.Assignments[other.ID]
			}
			g.persisting = true
			e.Write, e.Confirm = []grouprecord.Entry{g.record()}, true
		}
		return e
	}
	return reply(SyncResult{Err: ErrUnknownMember})
}

func (g *Group) assigned(m *Member) SyncResult {
	return SyncResult{ProtocolType: g.protocolType, Protocol: g.protocol, Assignment: m.Assignment}
}

// Persisted reports whether the record of the present generation's assignment was written. The generation is the one of
// the effect that asked for it: a rebalance may have begun meanwhile, and then nothing happens.
func (g *Group) Persisted(generation int32, failed error, now int64) Effects {
	var e Effects
	if g.state != CompletingRebalance || g.generation != generation || !g.persisting {
		return e
	}
	g.persisting = false
	if failed != nil {
		for _, id := range g.order {
			m := g.members[id]
			m.Assignment = nil
			if m.syncing != 0 {
				e.Syncs = append(e.Syncs, SyncReply{m.syncing, SyncResult{Err: failed}})
				m.syncing, m.deadline = 0, now+m.SessionMs
			}
		}
		e.add(g.prepare(now))
		return e
	}
	g.enter(Stable, now)
	for _, id := range g.order {
		m := g.members[id]
		if m.syncing != 0 {
			e.Syncs = append(e.Syncs, SyncReply{m.syncing, g.assigned(m)})
			m.syncing, m.deadline = 0, now+m.SessionMs
		}
	}
	return e
}

// Heartbeat keeps a member alive and tells it of a rebalance.
func (g *Group) Heartbeat(memberID, instanceID string, generation int32, now int64) error {
	m, err := g.check(memberID, instanceID)
	switch {
	case err != nil:
		return err
	case generation != g.generation:
		return ErrIllegalGeneration
	}
	m.deadline = now + m.SessionMs
	if g.state == PreparingRebalance {
		return ErrRebalanceInProgress
	}
	return nil
}

// Leave removes a member: by id, or by instance id with or without the id (an admin's removal, KIP-345).
func (g *Group) Leave(memberID, instanceID string, now int64) (Effects, error) {
	if instanceID != "" {
		known, ok := g.statics[instanceID]
		if !ok {
			return Effects{}, ErrUnknownMember
		}
		if memberID != "" && memberID != known {
			return Effects{}, ErrFencedInstance
		}
		memberID = known
	}
	if _, ok := g.pending[memberID]; ok {
		delete(g.pending, memberID)
		return Effects{}, nil
	}
	m, ok := g.members[memberID]
	if !ok {
		return Effects{}, ErrUnknownMember
	}
	return g.remove(m, ErrUnknownMember, now), nil
}

// remove takes a member out, answers what it has parked, and lets the rest of the group move on.
func (g *Group) remove(m *Member, why error, now int64) Effects {
	var e Effects
	if m.joining != 0 {
		e.Joins = append(e.Joins, JoinReply{m.joining, failedJoin(m.ID, why)})
	}
	if m.syncing != 0 {
		e.Syncs = append(e.Syncs, SyncReply{m.syncing, SyncResult{Err: why}})
	}
	g.drop(m)
	switch {
	case g.state == Stable || g.state == CompletingRebalance:
		e.add(g.prepare(now))
		e.add(g.maybeComplete(now))
	case g.state == PreparingRebalance && len(g.members) == 0:
		e.add(g.completeJoin(now))
	case g.state == PreparingRebalance:
		e.add(g.maybeComplete(now))
	}
	return e
}

// drop forgets a member without any consequence.
func (g *Group) drop(m *Member) {
	delete(g.members, m.ID)
	if m.InstanceID != "" {
		delete(g.statics, m.InstanceID)
	}
	g.order = slices.DeleteFunc(g.order, func(id string) bool { return id == m.ID })
	if g.leader == m.ID {
		g.leader = ""
	}
}

// Description is what DescribeGroups shows.
type Description struct {
	State        State
	ProtocolType string
	Protocol     string // only of a stable group
	Members      []DescribedMember
}

// DescribedMember is one member of a description.
type DescribedMember struct {
	ID, InstanceID, ClientID, ClientHost string
	Metadata, Assignment                 []byte
}

// Describe lists the group's state and members, oldest first.
func (g *Group) Describe() Description {
	d := Description{State: g.state, ProtocolType: g.protocolType}
	if g.state == Stable {
		d.Protocol = g.protocol
	}
	for _, id := range g.order {
		m := g.members[id]
		described := DescribedMember{ID: m.ID, InstanceID: m.InstanceID, ClientID: m.ClientID, ClientHost: m.ClientHost}
		if g.state == Stable {
			described.Metadata, described.Assignment = m.metadata(g.protocol), m.Assignment
		}
		d.Members = append(d.Members, described)
	}
	return d
}
