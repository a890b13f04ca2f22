package group

import (
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/grouprecord"
)

func key(group string) grouprecord.Key {
	return grouprecord.Key{Kind: grouprecord.KindClassicGroup, Group: group}
}

// Record is the group's present state.
func (g *Group) Record() grouprecord.Entry { return g.record() }

// Tombstone deletes the group's state.
func (g *Group) Tombstone() grouprecord.Entry { return grouprecord.Entry{Key: key(g.id)} }

// record is the group's present state.
func (g *Group) record() grouprecord.Entry {
	v := kmsg.NewGroupMetadataValue()
	v.ProtocolType, v.Generation, v.CurrentStateTimestamp = g.protocolType, g.generation, g.since
	if g.protocol != "" {
		v.Protocol = &g.protocol
	}
	if g.leader != "" {
		v.Leader = &g.leader
	}
	for _, id := range g.order {
		m := g.members[id]
		r := kmsg.NewGroupMetadataValueMember()
		r.MemberID, r.ClientID, r.ClientHost = m.ID, m.ClientID, m.ClientHost
		if m.InstanceID != "" {
			r.InstanceID = &m.InstanceID
		}
		r.RebalanceTimeoutMillis, r.SessionTimeoutMillis = int32(m.RebalanceMs), int32(m.SessionMs)
		r.Subscription, r.Assignment = nonNil(m.metadata(g.protocol)), nonNil(m.Assignment)
		v.Members = append(v.Members, r)
	}
	return grouprecord.Entry{Key: key(g.id), Value: &v}
}

func nonNil(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// Restore puts the state of a record into a group that was just made by New: the coordinator that wrote it is gone, and
// its members have one session timeout to be heard of.
func (g *Group) Restore(e grouprecord.Entry, now int64) {
	v, ok := e.Value.(*kmsg.GroupMetadataValue)
	if !ok {
		return
	}
	g.protocolType, g.generation = v.ProtocolType, v.Generation
	g.members, g.statics, g.order = map[string]*Member{}, map[string]string{}, nil
	g.protocol, g.leader = deref(v.Protocol), deref(v.Leader)
	for _, r := range v.Members {
		m := &Member{ID: r.MemberID, InstanceID: deref(r.InstanceID), ClientID: r.ClientID, ClientHost: r.ClientHost,
			SessionMs: int64(r.SessionTimeoutMillis), RebalanceMs: int64(r.RebalanceTimeoutMillis), Assignment: r.Assignment, synced: true,
			Protocols: []Protocol{{g.protocol, r.Subscription}}, deadline: now + int64(r.SessionTimeoutMillis)}
		g.members[m.ID] = m
		g.order = append(g.order, m.ID)
		if m.InstanceID != "" {
			g.statics[m.InstanceID] = m.ID
		}
	}
	g.state = Empty
	if len(g.members) > 0 {
		g.state = Stable
	}
	g.since = now
	if v.CurrentStateTimestamp > 0 {
		g.since = v.CurrentStateTimestamp
	}
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
