package group

import "slices"

// JoinRequest is one JoinGroup.
type JoinRequest struct {
	MemberID, InstanceID string
	ClientID, ClientHost string
	SessionMs            int64
	RebalanceMs          int64
	ProtocolType         string
	Protocols            []Protocol
	NewID                string // the id to give to a member that has none yet
	RequireID            bool   // JoinGroup v4+: a dynamic member must come back with its id (KIP-394)
	SupportsSkip         bool   // JoinGroup v9+ (KIP-814)
}

// Join handles JoinGroup. The answer comes as an effect under token, at once or later.
func (g *Group) Join(r JoinRequest, token Token, now int64) Effects {
	reply := func(result JoinResult) Effects { return Effects{Joins: []JoinReply{{token, result}}} }
	if r.SessionMs < g.config.SessionMinMs || r.SessionMs > g.config.SessionMaxMs {
		return reply(failedJoin(r.MemberID, ErrInvalidSession))
	}
	if g.state == Dead {
		return reply(failedJoin(r.MemberID, ErrUnknownMember))
	}
	if !g.accepts(r) {
		return reply(failedJoin(r.MemberID, ErrInconsistentProtocol))
	}
	if r.MemberID == "" {
		return g.joinNew(r, token, now)
	}
	m, err := g.check(r.MemberID, r.InstanceID)
	if err == ErrUnknownMember && g.statics[r.InstanceID] == "" {
		if _, ok := g.pending[r.MemberID]; ok && r.InstanceID == "" {
			delete(g.pending, r.MemberID)
			return g.add(r, r.MemberID, token, now)
		}
	}
	if err != nil {
		return reply(failedJoin(r.MemberID, err))
	}
	switch g.state {
	case PreparingRebalance:
		return g.rejoin(m, r, token, now)
	case CompletingRebalance:
		if sameProtocols(m.Protocols, r.Protocols) {
			return reply(g.joined(m)) // its answer was lost
		}
		return g.rejoin(m, r, token, now)
	case Stable:
		if m.ID == g.leader || !sameProtocols(m.Protocols, r.Protocols) {
			return g.rejoin(m, r, token, now)
		}
		return reply(g.joined(m))
	}
	return reply(failedJoin(r.MemberID, ErrUnknownMember))
}

// accepts checks that some strategy would still be common to all members.
func (g *Group) accepts(r JoinRequest) bool {
	if r.ProtocolType == "" || len(r.Protocols) == 0 {
		return false
	}
	if len(g.members) == 0 {
		return true
	}
	if r.ProtocolType != g.protocolType {
		return false
	}
	return slices.ContainsFunc(r.Protocols, func(p Protocol) bool {
		for _, m := range g.members {
			if m.ID != r.MemberID && (r.InstanceID == "" || m.InstanceID != r.InstanceID) && !m.supports(p.Name) {
				return false
			}
		}
		return true
	})
}

func (g *Group) joinNew(r JoinRequest, token Token, now int64) Effects {
	if old, ok := g.statics[r.InstanceID]; ok && r.InstanceID != "" {
		return g.replaceStatic(g.members[old], r, token, now)
	}
	if len(g.members)+len(g.pending) >= g.config.SizeMax {
		return Effects{Joins: []JoinReply{{token, failedJoin("", ErrGroupFull)}}}
	}
	if r.RequireID && r.InstanceID == "" {
		g.pending[r.NewID] = now + r.SessionMs
		return Effects{Joins: []JoinReply{{token, failedJoin(r.NewID, ErrMemberIDRequired)}}}
	}
	return g.add(r, r.NewID, token, now)
}

func (g *Group) add(r JoinRequest, id string, token Token, now int64) Effects {
	m := &Member{ID: id, InstanceID: r.InstanceID, ClientID: r.ClientID, ClientHost: r.ClientHost}
	if len(g.members) == 0 {
		g.protocolType = r.ProtocolType
	}
	g.members[id] = m
	g.order = append(g.order, id)
	if r.InstanceID != "" {
		g.statics[r.InstanceID] = id
	}
	if g.state == PreparingRebalance && g.delayEnd > 0 {
		g.delayExtended = true
	}
	return g.rejoin(m, r, token, now)
}

// rejoin parks the member's request and starts or advances a rebalance.
func (g *Group) rejoin(m *Member, r JoinRequest, token Token, now int64) Effects {
	var e Effects
	if m.joining != 0 { // a second request replaces the first, whose connection is most likely gone
		e.Joins = append(e.Joins, JoinReply{m.joining, failedJoin(m.ID, ErrRebalanceInProgress)})
	}
	m.Protocols, m.SessionMs, m.RebalanceMs = r.Protocols, r.SessionMs, r.RebalanceMs
	m.ClientID, m.ClientHost = r.ClientID, r.ClientHost
	m.deadline, m.joining = now+m.SessionMs, token
	if g.state != PreparingRebalance {
		e.add(g.prepare(now))
	}
	e.add(g.maybeComplete(now))
	return e
}

// replaceStatic lets an instance that lost its member id (a restarted process) take its old place (KIP-345). In a stable
// group with an unchanged subscription nobody else notices.
func (g *Group) replaceStatic(old *Member, r JoinRequest, token Token, now int64) Effects {
	var e Effects
	if old.joining != 0 {
		e.Joins = append(e.Joins, JoinReply{old.joining, failedJoin(old.ID, ErrFencedInstance)})
	}
	if old.syncing != 0 {
		e.Syncs = append(e.Syncs, SyncReply{old.syncing, SyncResult{Err: ErrFencedInstance}})
	}
	wasLeader := g.leader == old.ID
	unchanged := string(old.metadata(g.protocol)) == string((&Member{Protocols: r.Protocols}).metadata(g.protocol)) && (&Member{Protocols: r.Protocols}).supports(g.protocol)
	m := *old
	m.ID, m.joining, m.syncing, m.synced = r.NewID, 0, 0, old.synced
	m.Protocols, m.SessionMs, m.RebalanceMs, m.ClientID, m.ClientHost = r.Protocols, r.SessionMs, r.RebalanceMs, r.ClientID, r.ClientHost
	m.deadline = now + m.SessionMs
	delete(g.members, old.ID)
	g.members[m.ID], g.statics[r.InstanceID] = &m, m.ID
	g.order[slices.Index(g.order, old.ID)] = m.ID
	if wasLeader {
		g.leader = m.ID
	}
	if g.state == Stable && unchanged {
		e.Write = append(e.Write, g.record())
		result := g.joined(&m)
		if wasLeader {
			// An old client must not compute an assignment that nobody waits for: it is told of the leader's former id.
			if r.SupportsSkip {
				result.SkipAssignment = true
			} else {
				result.Leader, result.Members = old.ID, nil
			}
		}
		e.Joins = append(e.Joins, JoinReply{token, result})
		return e
	}
	if g.state == CompletingRebalance && unchanged {
		e.Joins = append(e.Joins, JoinReply{token, g.joined(&m)})
		return e
	}
	e.add(g.rejoin(&m, r, token, now))
	return e
}

// prepare begins a rebalance: everybody has to join again.
func (g *Group) prepare(now int64) Effects {
	var e Effects
	for _, id := range g.order {
		m := g.members[id]
		m.synced = false
		m.Assignment = nil
		if m.syncing != 0 {
			e.Syncs = append(e.Syncs, SyncReply{m.syncing, SyncResult{Err: ErrRebalanceInProgress}})
			m.syncing, m.deadline = 0, now+m.SessionMs
		}
	}
	g.delayEnd, g.delayExtended = 0, false
	longest := int64(0)
	for _, m := range g.members {
		longest = max(longest, m.RebalanceMs)
	}
	if g.state == Empty && g.config.InitialDelayMs > 0 {
		g.delayEnd = now + min(g.config.InitialDelayMs, longest)
	}
	g.rebalanceEnd = now + longest
	g.persisting = false
	g.enter(PreparingRebalance, now)
	return e
}

// maybeComplete ends the joining phase once every member has joined. Ids that were handed out and never used do not hold it.
func (g *Group) maybeComplete(now int64) Effects {
	if g.state != PreparingRebalance || g.delayEnd > 0 {
		return Effects{}
	}
	for _, m := range g.members {
		if m.joining == 0 {
			return Effects{}
		}
	}
	return g.completeJoin(now)
}

// completeJoin drops dynamic members that did not come, and starts the next generation with the others.
func (g *Group) completeJoin(now int64) Effects {
	var e Effects
	for _, id := range slices.Clone(g.order) {
		if m := g.members[id]; m.joining == 0 && m.InstanceID == "" {
			g.drop(m)
		}
	}
	g.generation++
	if g.generation < 0 {
		g.generation = 1
	}
	g.delayEnd = 0
	if len(g.members) == 0 {
		g.protocol, g.leader = "", ""
		g.enter(Empty, now)
		e.Write = append(e.Write, g.record())
		return e
	}
	g.protocol = g.vote()
	if m, ok := g.members[g.leader]; !ok || m.joining == 0 {
		g.leader = ""
		for _, id := range g.order {
			if g.members[id].joining != 0 {
				g.leader = id
				break
			}
		}
	}
	if g.leader == "" {
		// Only silent static members are left; their sessions decide. Wait for one of them as long again.
		g.generation--
		longest := int64(0)
		for _, m := range g.members {
			longest = max(longest, m.RebalanceMs)
		}
		g.rebalanceEnd = now + longest
		return e
	}
	g.enter(CompletingRebalance, now)
	longest := int64(0)
	for _, id := range g.order {
		m := g.members[id]
		longest = max(longest, m.RebalanceMs)
		if m.joining == 0 {
			m.synced = true // silent static member: keeps its place, is not waited for
			continue
		}
		e.Joins = append(e.Joins, JoinReply{m.joining, g.joined(m)})
		m.joining, m.deadline = 0, now+m.SessionMs
	}
	g.rebalanceEnd = now + longest
	return e
}

// vote selects the strategy: among those that all members support, the one most members like best; ties go to the name first in order.
func (g *Group) vote() string {
	votes := map[string]int{}
	for _, m := range g.members {
		for _, p := range m.Protocols {
			if g.common(p.Name) {
				votes[p.Name]++
				break
			}
		}
	}
	best := ""
	for _, id := range g.order {
		for _, p := range g.members[id].Protocols {
			if n := votes[p.Name]; n > 0 && (best == "" || n > votes[best]) {
				best = p.Name
			}
		}
	}
	return best
}

func (g *Group) common(name string) bool {
	for _, m := range g.members {
		if !m.supports(name) {
			return false
		}
	}
	return true
}

// joined is the answer for a member of the present generation; the leader learns of all members.
func (g *Group) joined(m *Member) JoinResult {
	r := JoinResult{MemberID: m.ID, Generation: g.generation, ProtocolType: g.protocolType, Protocol: g.protocol, Leader: g.leader}
	if m.ID == g.leader {
		for _, id := range g.order {
			o := g.members[id]
			r.Members = append(r.Members, JoinMember{o.ID, o.InstanceID, o.metadata(g.protocol)})
		}
	}
	return r
}
