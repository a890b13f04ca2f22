package consumergroup

import (
	"maps"
	"slices"

	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/grouprecord"
	"github.com/varve-io/varve/internal/metadata"
)

// Commit is who commits offsets, of what, and how.
type Commit struct {
	group.Committer // Generation is the member epoch
	Partitions      []grouprecord.TopicPartition
	InTxn           bool
	Old             bool // by a version of OffsetCommit that does not know of member epochs (below 9)
}

// MayCommit checks a committer. One that is a few epochs behind may still commit what it has owned all along (KIP-1251).
func (g *Group) MayCommit(r Commit, img *metadata.Image) error {
	if r.Generation < 0 && len(g.said) == 0 || r.InTxn && r.Generation == -1 && r.MemberID == "" && r.InstanceID == "" {
		return nil
	}
	m := g.member(r.MemberID)
	stale := func(generation, epoch string, args ...any) error {
		if m.classic() {
			return refuse(group.ErrIllegalGeneration, generation, args...)
		}
		return refuse(ErrStaleMemberEpoch, epoch, args...)
	}
	switch {
	case m == nil:
		return g.unknown(r.MemberID)
	case r.Old && !r.InTxn && !m.classic():
		return refuse(ErrUnsupportedByProtocol, "OffsetCommit version 9 or above must be used by members using the consumer group protocol")
	case r.Generation == m.has.Epoch:
		return nil
	case r.Generation > m.has.Epoch:
		return stale("Received generation id %d is newer than current member epoch %d.", "Received member epoch %d is newer than current member epoch %d.", r.Generation, m.has.Epoch)
	}
	for _, p := range r.Partitions {
		epoch, ok := int32(0), false
		if t, there := img.Topics[p.Topic]; there {
			if epoch, ok = m.has.Assigned[t.ID][p.Partition]; !ok {
				epoch, ok = m.has.Revoking[t.ID][p.Partition]
			}
		}
		if text := "Partition %s-%d is not assigned or pending revocation for member."; !ok {
			return stale(text, text, p.Topic, p.Partition)
		}
		if r.Generation < epoch {
			return stale("Received generation id %d is older than assignment epoch %d for partition %s-%d.", "Received member epoch %d is older than assignment epoch %d for partition %s-%d.", r.Generation, epoch, p.Topic, p.Partition)
		}
	}
	return nil
}

// MayFetch checks who asks for committed offsets: a member in its present epoch, or nobody in particular.
func (g *Group) MayFetch(memberID *string, epoch int32) error {
	if memberID == nil && epoch < 0 {
		return nil
	}
	m := g.member(text(memberID))
	switch {
	case m == nil:
		return g.unknown(text(memberID))
	case m.has.Epoch == epoch:
		return nil
	case m.classic():
		return refuse(group.ErrIllegalGeneration, "The received generation id %d does not match the expected member epoch %d.", epoch, m.has.Epoch)
	}
	return refuse(ErrStaleMemberEpoch, "The received member epoch %d does not match the expected member epoch %d.", epoch, m.has.Epoch)
}

// MayDelete tells whether the whole group may be deleted.
func (g *Group) MayDelete() error {
	if len(g.said) > 0 {
		return group.ErrNotEmpty
	}
	return nil
}

// Subscribed tells whether a member reads a topic.
func (g *Group) Subscribed(topic string) bool {
	if g.topics[topic] > 0 {
		return true
	}
	for p := range g.patterns {
		if r := g.regexes[p]; r != nil && slices.Contains(r.Topics, topic) {
			return true
		}
	}
	return false
}

// Description is what ConsumerGroupDescribe shows.
type Description struct {
	State           State
	Epoch           int32
	AssignmentEpoch int32
	Assignor        string
	Members         []DescribedMember
}

// DescribedMember is one member of a description.
type DescribedMember struct {
	ID       string
	Epoch    int32
	Said     grouprecord.Member
	Assigned grouprecord.Assignment // with what it has to give up
	Target   grouprecord.Assignment
}

// Describe lists the group's state and members by their ids.
func (g *Group) Describe(c Config) Description {
	d := Description{State: g.State(), Epoch: g.epoch.Epoch, AssignmentEpoch: g.target.Epoch, Assignor: g.assignor(c)}
	for _, id := range g.ids() {
		m := g.member(id)
		both := clone(m.has.Assigned)
		for t, partitions := range m.has.Revoking {
			for p, epoch := range partitions {
				set(both, t, p, epoch)
			}
		}
		d.Members = append(d.Members, DescribedMember{ID: id, Epoch: m.has.Epoch, Said: *m.said, Assigned: plain(both), Target: maps.Clone(g.targets[id])})
	}
	return d
}
