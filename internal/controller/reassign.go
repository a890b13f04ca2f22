package controller

import (
	"slices"

	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

// Run begins, replaces and cancels reassignments (KIP-455).
func (c ReassignCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	b := newBatch(img, env)
	reply := ReassignReply{Errors: make([]*Error, len(c.Partitions))}
	for i, r := range c.Partitions {
		reply.Errors[i] = b.reassignOne(r)
	}
	return b.finish(), reply, nil
}

func (b *batch) reassignOne(r Reassignment) *Error {
	t, held, ok := b.img.Partition(tp.Partition{Topic: r.Topic, Index: r.Index})
	if t == nil {
		return refuse(ErrUnknownTopic, "Unable to find a topic named %s.", r.Topic)
	}
	if !ok {
		return refuse(ErrUnknownTopic, "Unable to find partition %s:%d.", r.Topic, r.Index)
	}
	p := b.get(held)
	if r.Replicas == nil {
		if len(p.Adding) == 0 && len(p.Removing) == 0 {
			return refuse(ErrNoReassignment, "No partition reassignment is in progress.")
		}
		return b.restrict(t, p, without(p.Replicas, p.Adding), nil, nil)
	}
	if err := checkReplicas(b.img, r.Replicas); err != nil {
		return err
	}
	return b.reassign(t, p, r.Replicas)
}

// reassign aims a partition at target, from the replicas that it had before any reassignment.
func (b *batch) reassign(t *metadata.Topic, p metadata.PartitionRecord, target []int32) *Error {
	current := without(p.Replicas, p.Adding)
	removing := without(current, target)
	return b.restrict(t, p, slices.Concat(target, removing), without(target, current), removing)
}

// restrict sets a partition's replicas and takes all others out of its ISR, which must leave somebody.
func (b *batch) restrict(t *metadata.Topic, p metadata.PartitionRecord, replicas, adding, removing []int32) *Error {
	isr := filter(p.ISR, func(id int32) bool { return slices.Contains(replicas, id) })
	if len(isr) == 0 {
		return refuse(ErrInvalidAssignment, "Nobody but the replicas %v, which would go, is in sync in %s-%d.", p.ISR, t.Name, p.Index)
	}
	p.Replicas, p.ISR, p.Adding, p.Removing = replicas, isr, adding, removing
	b.set(t, b.elect(t, p))
	return nil
}
