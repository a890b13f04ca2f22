package group

import (
	"encoding/binary"
	"slices"
)

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

// Kill marks a deleted group, so that whoever still holds it gets an error.
func (g *Group) Kill(now int64) { g.enter(Dead, now) }

// Retention says what the group's offsets that are due have to be kept for: none may expire while expire is false; since is when the group
// was last in use, 0 if that is of no account (KIP-211). Offsets of topics that its consumers read stay in any case.
func (g *Group) Retention() (expire bool, since int64) {
	switch {
	case g.state == Empty && g.protocolType != "":
		return true, g.since
	case g.state == Empty:
		return true, 0
	}
	return g.protocolType == consumerProtocol && g.state == Stable, 0
}

// Idle says that nobody is in the group, nor has asked to be.
func (g *Group) Idle() bool { return g.state == Empty && len(g.pending) == 0 }

const consumerProtocol = "consumer"

// Subscribed tells whether a member of a consumers' group reads the topic. A subscription that does not parse counts as reading all.
func (g *Group) Subscribed(topic string) bool {
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
