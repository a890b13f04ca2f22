package group

import (
	"cmp"
	"encoding/binary"
	"maps"
	"slices"
)

// TopicPartition names a partition in committed offsets.
type TopicPartition struct {
	Topic     string
	Partition int32
}

// Offset is one committed offset.
type Offset struct {
	Offset      int64
	LeaderEpoch int32 // -1 unknown
	Metadata    string
	CommittedAt int64 // ms
	ExpiresAt   int64 // ms, set by old clients that ask for a retention of their own; -1 otherwise
	At          int64 // offset of its record in the topic: the later one of two commits counts
}

// Committer is who commits: a member, or an admin or self-assigned consumer with generation -1 and no ids.
type Committer struct {
	MemberID, InstanceID string
	Generation           int32
}

// MayCommit checks a committer (KIP-211 and the rules for groups in use).
func (g *Group) MayCommit(c Committer, now int64) error {
	if c.Generation < 0 && c.MemberID == "" && c.InstanceID == "" {
		if g.state != Empty {
			return ErrUnknownMember
		}
		return nil
	}
	m, err := g.check(c.MemberID, c.InstanceID)
	if err != nil {
		if len(g.members) == 0 && c.Generation >= 0 {
			return ErrIllegalGeneration
		}
		return err
	}
	if c.Generation != g.generation {
		return ErrIllegalGeneration
	}
	if g.state == CompletingRebalance {
		return ErrRebalanceInProgress
	}
	m.deadline = now + m.SessionMs // a commit is a sign of life
	return nil
}

// MayCommitInTxn checks a committer in a transaction: one that names a member has to be it; old clients name none (KIP-447).
func (g *Group) MayCommitInTxn(c Committer, now int64) error {
	if c.Generation < 0 && c.MemberID == "" && c.InstanceID == "" || c.Generation < 0 && g.state == Empty {
		return nil
	}
	m, err := g.check(c.MemberID, c.InstanceID)
	if err != nil {
		return err
	}
	if c.Generation != g.generation {
		return ErrIllegalGeneration
	}
	m.deadline = now + m.SessionMs
	return nil
}

// SetPending takes a commit of a transaction that is not decided yet.
func (g *Group) SetPending(producerID int64, tp TopicPartition, o Offset) {
	if g.pendingOffsets[producerID] == nil {
		if g.pendingOffsets == nil {
			g.pendingOffsets = map[int64]map[TopicPartition]Offset{}
		}
		g.pendingOffsets[producerID] = map[TopicPartition]Offset{}
	}
	g.pendingOffsets[producerID][tp] = o
}

// EndTxn makes the commits of a producer's transaction count, unless a later commit came in between, or forgets them.
func (g *Group) EndTxn(producerID int64, commit bool) {
	for tp, o := range g.pendingOffsets[producerID] {
		if before, ok := g.offsets[tp]; commit && (!ok || before.At < o.At) {
			g.offsets[tp] = o
		}
	}
	delete(g.pendingOffsets, producerID)
}

// Unstable says whether a transaction that is not decided yet has a commit for the partition (KIP-447).
func (g *Group) Unstable(tp TopicPartition) bool {
	for _, offsets := range g.pendingOffsets {
		if _, ok := offsets[tp]; ok {
			return true
		}
	}
	return false
}

// CheckMetadata refuses texts that are too long.
func (g *Group) CheckMetadata(text string) error {
	if len(text) > g.config.MetadataMax {
		return ErrMetadataTooLarge
	}
	return nil
}

// CommitRecord is the record of a commit; SetOffset applies it once it is durable.
func (g *Group) CommitRecord(tp TopicPartition, o Offset) Record { return offsetRecord(g.id, tp, o) }

// SetOffset makes a committed offset visible.
func (g *Group) SetOffset(tp TopicPartition, o Offset) { g.offsets[tp] = o }

// Offset returns a committed offset.
func (g *Group) Offset(tp TopicPartition) (Offset, bool) {
	o, ok := g.offsets[tp]
	return o, ok
}

// Offsets lists the partitions with committed offsets in order.
func (g *Group) Offsets() []TopicPartition {
	return slices.SortedFunc(maps.Keys(g.offsets), func(a, b TopicPartition) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	})
}

// DeleteOffset returns the tombstone that deletes a committed offset, and whether there was one. A topic to which members
// are subscribed is refused (KIP-496).
func (g *Group) DeleteOffset(tp TopicPartition) (Record, bool, error) {
	if g.subscribed(tp.Topic) {
		return Record{}, false, ErrSubscribed
	}
	if _, ok := g.offsets[tp]; !ok {
		return Record{}, false, nil
	}
	return offsetTombstone(g.id, tp), true, nil
}

// ForgetOffset drops a committed offset once its tombstone is durable, and what transactions would make of it.
func (g *Group) ForgetOffset(tp TopicPartition) {
	delete(g.offsets, tp)
	for _, pending := range g.pendingOffsets {
		delete(pending, tp)
	}
}

// MayDelete tells whether the whole group may be deleted.
func (g *Group) MayDelete() error {
	if g.state != Empty {
		return ErrNotEmpty
	}
	return nil
}

// MayDeleteOffsets tells whether single offsets may be deleted: of empty groups, and of consumers' groups by topic.
func (g *Group) MayDeleteOffsets() error {
	if g.state != Empty && g.protocolType != consumerProtocol {
		return ErrNotEmpty
	}
	return nil
}

// Tombstones deletes the group and all that it committed.
func (g *Group) Tombstones() []Record {
	var out []Record
	for _, tp := range g.Offsets() {
		out = append(out, offsetTombstone(g.id, tp))
	}
	for _, pending := range g.pendingOffsets {
		for tp := range pending {
			if _, ok := g.offsets[tp]; !ok {
				out = append(out, offsetTombstone(g.id, tp))
			}
		}
	}
	return append(out, groupTombstone(g.id))
}

// OffsetTombstones deletes some committed offsets; ForgetOffset follows once they are durable.
func (g *Group) OffsetTombstones(partitions []TopicPartition) []Record {
	var out []Record
	for _, tp := range partitions {
		out = append(out, offsetTombstone(g.id, tp))
	}
	return out
}

// Kill marks a deleted group, so that whoever still holds it gets an error.
func (g *Group) Kill(now int64) { g.enter(Dead, now) }

// Expired lists the committed offsets that have outlived their retention, and whether the group itself has nothing left to
// live for then. Offsets of a group in use stay, but for topics that its consumers no longer read (KIP-211).
func (g *Group) Expired(now int64) (offsets []TopicPartition, group bool) {
	if g.state != Empty && (g.protocolType != consumerProtocol || g.state != Stable) {
		return nil, false
	}
	for _, tp := range g.Offsets() {
		o := g.offsets[tp]
		base := o.CommittedAt
		if g.state == Empty && g.protocolType != "" {
			base = max(base, g.since)
		}
		due := base + g.config.OffsetRetentionMs
		if o.ExpiresAt >= 0 {
			due = o.ExpiresAt
		}
		if now >= due && !g.subscribed(tp.Topic) && !g.Unstable(tp) {
			offsets = append(offsets, tp)
		}
	}
	return offsets, g.state == Empty && len(g.pending) == 0 && len(g.pendingOffsets) == 0 && len(offsets) == len(g.offsets)
}

const consumerProtocol = "consumer"

// subscribed tells whether a member of a consumers' group reads the topic. A subscription that does not parse counts as reading all.
func (g *Group) subscribed(topic string) bool {
	if g.state == Empty || g.protocolType != consumerProtocol {
		return false
	}
	for _, m := range g.members {
		for _, p := range m.Protocols {
			topics, ok := SubscribedTopics(p.Metadata)
			if !ok || slices.Contains(topics, topic) {
				return true
			}
		}
	}
	return false
}

// SubscribedTopics reads the topics of a consumer's subscription (ConsumerProtocolSubscription, any version).
func SubscribedTopics(b []byte) ([]string, bool) {
	if len(b) < 6 {
		return nil, false
	}
	n := int(int32(binary.BigEndian.Uint32(b[2:])))
	b = b[6:]
	var topics []string
	for i := 0; i < n; i++ {
		if len(b) < 2 {
			return nil, false
		}
		size := int(binary.BigEndian.Uint16(b))
		if len(b) < 2+size {
			return nil, false
		}
		topics = append(topics, string(b[2:2+size]))
		b = b[2+size:]
	}
	return topics, n >= 0
}
