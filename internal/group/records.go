package group

import (
	"encoding/binary"
	"fmt"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// Record is a record of __consumer_offsets; a nil Value is a tombstone.
type Record struct {
	Key, Value []byte
}

// Versions of the keys (the first two bytes) and of the values that we write, as Kafka 4.4 does.
const (
	offsetKeyVersion   = 1
	groupKeyVersion    = 2
	offsetValueVersion = 3
	groupValueVersion  = 3
)

func offsetKey(group string, tp TopicPartition) []byte {
	k := kmsg.NewOffsetCommitKey()
	k.Version, k.Group, k.Topic, k.Partition = offsetKeyVersion, group, tp.Topic, tp.Partition
	return k.AppendTo(nil)
}

func offsetRecord(group string, tp TopicPartition, o Offset) Record {
	v := kmsg.NewOffsetCommitValue()
	v.Version = offsetValueVersion
	if o.ExpiresAt >= 0 {
		v.Version = 1 // the only version that carries an expiry of its own
		v.ExpireTimestamp = o.ExpiresAt
	}
	v.Offset, v.LeaderEpoch, v.Metadata, v.CommitTimestamp = o.Offset, o.LeaderEpoch, o.Metadata, o.CommittedAt
	return Record{offsetKey(group, tp), v.AppendTo(nil)}
}

func offsetTombstone(group string, tp TopicPartition) Record {
	return Record{Key: offsetKey(group, tp)}
}

func groupKey(group string) []byte {
	k := kmsg.NewGroupMetadataKey()
	k.Version, k.Group = groupKeyVersion, group
	return k.AppendTo(nil)
}

func groupTombstone(group string) Record { return Record{Key: groupKey(group)} }

// record is the group's present state.
func (g *Group) record() Record {
	v := kmsg.NewGroupMetadataValue()
	v.Version = groupValueVersion
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
	return Record{groupKey(g.id), v.AppendTo(nil)}
}

func nonNil(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// Entry is one parsed record of __consumer_offsets. Exactly one of Offset and Group tells what it is about; a tombstone
// leaves its value nil.
type Entry struct {
	GroupID string
	Key     *TopicPartition // set for offsets
	Offset  *Offset
	Group   *kmsg.GroupMetadataValue
}

// ParseRecord reads a record. ok is false for kinds of records that classic groups do not use, which are skipped.
func ParseRecord(key, value []byte) (e Entry, ok bool, err error) {
	if len(key) < 2 {
		return e, false, fmt.Errorf("group record: key of %d bytes", len(key))
	}
	switch version := binary.BigEndian.Uint16(key); version {
	case 0, 1:
		k := kmsg.NewOffsetCommitKey()
		if err := k.ReadFrom(key); err != nil {
			return e, false, fmt.Errorf("group record: offset key: %w", err)
		}
		e.GroupID, e.Key = k.Group, &TopicPartition{k.Topic, k.Partition}
		if value == nil {
			return e, true, nil
		}
		v := kmsg.NewOffsetCommitValue()
		if err := v.ReadFrom(value); err != nil {
			return e, false, fmt.Errorf("group record: offset of group %q: %w", k.Group, err)
		}
		o := Offset{Offset: v.Offset, LeaderEpoch: -1, Metadata: v.Metadata, CommittedAt: v.CommitTimestamp, ExpiresAt: -1}
		if v.Version >= 3 {
			o.LeaderEpoch = v.LeaderEpoch
		}
		if v.Version == 1 {
			o.ExpiresAt = v.ExpireTimestamp
		}
		e.Offset = &o
		return e, true, nil
	case 2:
		k := kmsg.NewGroupMetadataKey()
		if err := k.ReadFrom(key); err != nil {
			return e, false, fmt.Errorf("group record: group key: %w", err)
		}
		e.GroupID = k.Group
		if value == nil {
			return e, true, nil
		}
		v := kmsg.NewGroupMetadataValue()
		if err := v.ReadFrom(value); err != nil {
			return e, false, fmt.Errorf("group record: state of group %q: %w", k.Group, err)
		}
		e.Group = &v
		return e, true, nil
	default:
		return e, false, nil
	}
}

// Restore puts the state of a record into a group that was just made by New: the coordinator that wrote it is gone, and
// its members have one session timeout to be heard of.
func (g *Group) Restore(v *kmsg.GroupMetadataValue, now int64) {
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
