package controller

import (
	"slices"

	"github.com/varve-io/varve/internal/metadata"
)

// Run elects preferred leaders, or with Unclean any living replica where there is no leader (KIP-460).
func (c ElectLeadersCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	b := newBatch(img, env)
	var reply ElectLeadersReply
	add := func(ref PartitionRef, err *Error) {
		reply.Partitions, reply.Errors = append(reply.Partitions, ref), append(reply.Errors, err)
	}
	for _, ref := range c.Partitions {
		t, p, err := find(img, ref)
		if err == nil {
			err = b.electNow(t, p, c.Unclean)
		}
		add(ref, err)
	}
	if c.Partitions == nil {
		for _, name := range img.TopicNames() {
			t := img.Topics[name]
			for _, p := range t.Partitions {
				if err := b.electNow(t, p, c.Unclean); err == nil || err.Kind != ErrElectionNotNeeded {
					add(PartitionRef{p.Topic, p.Index}, err)
				}
			}
		}
	}
	return b.finish(), reply, nil
}

// electNow obeys an admin, so replicas with little local data are as good as others.
func (b *batch) electNow(t *metadata.Topic, held *metadata.Partition, unclean bool) *Error {
	p := b.get(held)
	if unclean {
		if p.Leader >= 0 {
			return refuse(ErrElectionNotNeeded, "Leader election not needed for topic partition.")
		}
		p = elect(p, b.electorate(p), true)
		if p.Leader < 0 {
			return refuse(ErrEligibleLeadersNotAvailable, "No replica of %s-%d is alive.", t.Name, p.Index)
		}
		b.set(t, p)
		return nil
	}
	if p.Leader == p.Replicas[0] {
		return refuse(ErrElectionNotNeeded, "Leader election not needed for topic partition.")
	}
	next, ok := preferred(p, b.electorate(p))
	if !ok {
		return refuse(ErrPreferredLeaderNotAvailable, "The preferred leader %d of %s-%d is not alive or not in sync.", p.Replicas[0], t.Name, p.Index)
	}
	b.set(t, next)
	return nil
}

// electPreferred is the periodic election (auto.leader.rebalance.enable). It leaves alone what is led by another because
// the preferred replica holds little local data.
func (b *batch) electPreferred() {
	b.walk(func(t *metadata.Topic, p metadata.PartitionRecord) {
		e := b.electorate(p)
		if p.Leader < 0 {
			b.set(t, b.elect(t, p))
		} else if next, ok := preferred(p, e); ok && !e.thin(next.Leader) {
			b.set(t, next)
		}
	})
}

// electLeaderless elects in topics that allow unclean elections by now.
func (b *batch) electLeaderless(topics ...*metadata.Topic) {
	for _, t := range topics {
		if !b.unclean(t) {
			continue
		}
		for _, p := range t.Partitions {
			if now := b.get(p); now.Leader < 0 && slices.ContainsFunc(now.Replicas, b.usable) {
				b.set(t, b.elect(t, now))
			}
		}
	}
}
