package controller

import (
	"slices"

	"github.com/varve-io/varve/internal/metadata"
)

// Run changes ISRs as the leaders of the partitions propose (KIP-497), and completes the reassignments that waited for
// them. Replicas whose run is not the registered one do not join (KIP-903).
func (c AlterPartitionsCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	r, ok := img.Brokers[c.Broker]
	if !ok || r.Epoch != c.Epoch || r.Fenced {
		return nil, nil, refuse(ErrFenced, "broker %d of epoch %d is not registered, or fenced", c.Broker, c.Epoch)
	}
	b := newBatch(img, env)
	reply := AlterPartitionsReply{Errors: make([]*Error, len(c.Partitions))}
	for i, change := range c.Partitions {
		reply.Errors[i] = b.alterISR(c.Broker, change)
	}
	return b.finish(), reply, nil
}

func (b *batch) alterISR(broker int32, c ISRChange) *Error {
	t, held, err := find(b.img, c.PartitionRef)
	if err != nil {
		return err
	}
	p := b.get(held)
	earlier := b.partitions[c.PartitionRef]
	switch {
	case p.LeaderEpoch != c.LeaderEpoch:
		return refuse(ErrFenced, "%s-%d is in leader epoch %d, not %d", t.Name, p.Index, p.LeaderEpoch, c.LeaderEpoch)
	case p.PartitionEpoch != c.PartitionEpoch || !same(held.PartitionRecord, p) || earlier != nil && earlier.renew:
		return refuse(ErrStalePartitionEpoch, "%s-%d is past partition epoch %d", t.Name, p.Index, c.PartitionEpoch)
	case p.Leader != broker:
		return refuse(ErrFenced, "%s-%d is led by %d, not by %d", t.Name, p.Index, p.Leader, broker)
	case len(c.Epochs) != len(c.ISR):
		return refuse(ErrInvalidRequest, "%d broker epochs for an ISR of %d", len(c.Epochs), len(c.ISR))
	case !slices.Contains(c.ISR, broker):
		return refuse(ErrInvalidRequest, "the ISR of %s-%d must hold its leader %d", t.Name, p.Index, broker)
	}
	for i, id := range c.ISR {
		if !slices.Contains(p.Replicas, id) || slices.Contains(c.ISR[:i], id) {
			return refuse(ErrInvalidRequest, "the ISR of %s-%d holds %d, which is no replica or in it twice", t.Name, p.Index, id)
		}
		r, registered := b.img.Brokers[id]
		switch {
		case registered && c.Epochs[i] != -1 && c.Epochs[i] != r.Epoch:
			return refuse(ErrIneligibleReplica, "replica %d of %s-%d is of broker epoch %d, not %d", id, t.Name, p.Index, r.Epoch, c.Epochs[i])
		case !slices.Contains(p.ISR, id) && !b.usable(id):
			return refuse(ErrIneligibleReplica, "replica %d of %s-%d is fenced or shutting down", id, t.Name, p.Index)
		}
	}
	if len(c.ISR) != len(p.ISR) || !subset(c.ISR, p.ISR) {
		p.ISR = filter(p.Replicas, func(id int32) bool { return slices.Contains(c.ISR, id) })
	}
	b.set(t, p)
	b.partitions[c.PartitionRef].renew = true // also of the present ISR: what the leader proposed before, and never heard of, comes too late then
	return nil
}
