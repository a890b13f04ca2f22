package controller

import (
	"slices"

	"github.com/varve-io/varve/internal/metadata"
)

// maxDraining bounds the reassignments that draining keeps in flight, so that copies do not starve what is live.
const maxDraining = 100

// Run fences who is silent and goes on with what takes time. With nothing to do it visits no partition.
func (c TickCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	b := newBatch(img, env)
	var silent []int32
	for _, id := range c.Silent {
		if r, ok := img.Brokers[id]; ok && b.unfenced(id) {
			b.setState(r, metadata.BrokerState{Fenced: true, ShuttingDown: r.ShuttingDown})
			silent = append(silent, id)
		}
	}
	if len(silent) > 0 {
		b.fence(silent)
	}
	if c.Preferred {
		b.electPreferred()
	}
	for id := range img.Brokers {
		if draining(img, id) {
			b.drain()
			break
		}
	}
	return b.finish(), nil, nil
}

// drain starts reassignments that replace replicas on draining brokers, each by the best placed broker: of a rack that the
// partition is not in yet if there is one, then with the least load. A partition that is being reassigned is left alone.
func (b *batch) drain() {
	names := b.img.TopicNames()
	inFlight := 0
	for _, name := range names {
		for _, p := range b.img.Topics[name].Partitions {
			if now := b.get(p); len(now.Adding)+len(now.Removing) > 0 {
				inFlight++
			}
		}
	}
	var pl *placer
	for _, name := range names {
		t := b.img.Topics[name]
		for _, p := range t.Partitions {
			now := b.get(p)
			if inFlight >= maxDraining {
				return
			}
			if len(now.Adding)+len(now.Removing) > 0 || !slices.ContainsFunc(now.Replicas, func(id int32) bool { return draining(b.img, id) }) {
				continue
			}
			if pl == nil { // only now: a drained broker stays marked, and costs one pass without this
				pl = newPlacer(b.img, filter(b.img.BrokerIDs(), func(id int32) bool { return b.usable(id) && !draining(b.img, id) }), nil)
			}
			target := slices.Clone(now.Replicas)
			for i, id := range target {
				if draining(b.img, id) {
					if to, ok := pl.replace(target, i); ok {
						target[i] = to
					}
				}
			}
			if !slices.Equal(target, now.Replicas) && b.reassign(t, now, target) == nil {
				inFlight++
			}
		}
	}
}

// checkDrain refuses to drain a broker that has a replica with nowhere to go.
func checkDrain(img *metadata.Image, broker int32) error {
	if broker == ClusterWide {
		return refuse(ErrInvalidRequest, "%s is for one broker: name it.", drainKey)
	}
	others := filter(img.BrokerIDs(), func(id int32) bool { return id != broker && !draining(img, id) })
	for _, name := range img.TopicNames() {
		for _, p := range img.Topics[name].Partitions {
			target := without(p.Replicas, p.Removing)
			if slices.Contains(target, broker) && subset(others, target) {
				return refuse(ErrInvalidRequest, "Broker %d cannot be drained: topic %s has replication factor %d, and only %d other broker(s) are registered and not draining. Add a broker, or reassign the topic to fewer replicas.",
					broker, name, len(target), len(others))
			}
		}
	}
	return nil
}
