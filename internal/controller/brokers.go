package controller

import (
	"maps"
	"net"
	"slices"
	"strconv"

	"github.com/varve-io/varve/internal/metadata"
)

// Run registers a run of a broker under a new epoch; it begins fenced. The run before is fenced with it. It is refused
// while a run on another address has a session: two machines share an id. On the same address the old run cannot be alive,
// since two processes cannot hold one port. A run on another data directory than before has none of the data that it is in
// sync with.
func (c RegisterCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	if img.ClusterID == "" {
		return nil, nil, refuse(ErrFenced, "The cluster has no name yet.") // in a moment it has
	}
	r := c.Broker
	peer, ok := r.Peer()
	switch {
	case r.ID < 0:
		return nil, nil, refuse(ErrInvalidRequest, "broker id %d is negative", r.ID)
	case !ok || peer.Host == "" || peer.Port <= 0:
		return nil, nil, refuse(ErrInvalidRequest, "broker %d names no address for other nodes: it has no listener %q", r.ID, r.PeerListener)
	case r.Incarnation.IsZero():
		return nil, nil, refuse(ErrInvalidRequest, "broker %d names no incarnation", r.ID)
	}
	b := newBatch(img, env)
	old, known := img.Brokers[r.ID]
	if known {
		if old.Incarnation == r.Incarnation {
			return nil, Registered{old.Epoch}, nil
		}
		was, _ := old.Peer()
		if b.alive(r.ID) && (was.Host != peer.Host || was.Port != peer.Port) {
			return nil, nil, refuse(ErrDuplicateBroker, "broker id %d is in use by %s, which is alive: give this node an id of its own, or stop that one", r.ID,
				net.JoinHostPort(was.Host, strconv.Itoa(int(was.Port))))
		}
	}
	r.Epoch, r.BrokerState = img.LastBrokerEpoch+1, metadata.BrokerState{Fenced: true}
	b.records, b.states[r.ID] = append(b.records, r), r.BrokerState
	if known && !old.Fenced {
		b.fence([]int32{r.ID})
	}
	if known && !old.Directory.IsZero() && !r.Directory.IsZero() && old.Directory != r.Directory {
		b.emptied(r.ID)
	}
	return b.finish(), Registered{r.Epoch}, nil
}

// fence takes brokers that are fenced by now out of ISRs and leaderships. The last members of an ISR stay in it, one or all that were
// fenced at once: they have everything, and any of them may lead when it is back.
func (b *batch) fence(ids []int32) {
	b.walk(func(t *metadata.Topic, p metadata.PartitionRecord) {
		if !slices.ContainsFunc(ids, func(id int32) bool { return slices.Contains(p.Replicas, id) }) {
			return
		}
		if isr := filter(p.ISR, b.unfenced); len(isr) > 0 {
			p.ISR = isr
		}
		b.set(t, b.elect(t, p))
	})
}

// emptied takes a broker that lost its disk out of ISRs. The last member stays, marked, where another replica may have more; where there
// is no other it goes on from the tier.
func (b *batch) emptied(id int32) {
	b.walk(func(t *metadata.Topic, p metadata.PartitionRecord) {
		if !slices.Contains(p.ISR, id) || len(p.Replicas) == 1 {
			return
		}
		if others := without(p.ISR, []int32{id}); others != nil {
			p.ISR = others
		} else {
			p.Leader, p.Lost = -1, true
		}
		b.set(t, b.elect(t, p))
	})
}

// Halted makes the records that say that no broker runs and nothing is led, while everybody stays in the ISRs: whoever comes first, with
// its data, leads.
func Halted(img *metadata.Image) []metadata.Record {
	b := newBatch(img, Env{})
	for _, id := range slices.Sorted(maps.Keys(img.Brokers)) {
		if r := img.Brokers[id]; !r.Fenced || r.ShuttingDown {
			b.setState(r, metadata.BrokerState{Fenced: true})
		}
	}
	b.walk(func(t *metadata.Topic, p metadata.PartitionRecord) {
		p.Leader = -1
		b.set(t, p)
	})
	return b.finish()
}

// Run notes that a broker lives: it unfences a run that is ready, and lets one go that wants to leave. Partitions are
// visited only for those.
//
// A run that leaves is first relieved of what another in-sync replica can lead; the reply then is still no. The next
// heartbeat, when others had the time to take over, fences it and lets it go. So it should come soon after.
func (c HeartbeatCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	r, ok := img.Brokers[c.Broker]
	if !ok || r.Epoch != c.Epoch {
		return nil, nil, refuse(ErrFenced, "broker %d is not registered with epoch %d: another run of it has taken over, or it was unregistered", c.Broker, c.Epoch)
	}
	switch {
	case c.Leave && r.Fenced:
		return nil, HeartbeatReply{Fenced: true, Leave: true}, nil
	case c.Leave:
		return leave(newBatch(img, env), r)
	case c.Ready && r.Fenced && !r.ShuttingDown: // a run that has left does not come back: a late heartbeat must not revive it
		b := newBatch(img, env)
		b.setState(r, metadata.BrokerState{})
		b.walk(func(t *metadata.Topic, p metadata.PartitionRecord) {
			if p.Leader < 0 && slices.Contains(p.Replicas, r.ID) {
				b.set(t, b.elect(t, p))
			}
		})
		return b.finish(), HeartbeatReply{}, nil
	}
	return nil, HeartbeatReply{Fenced: r.Fenced}, nil
}

func leave(b *batch, r *metadata.BrokerRecord) ([]metadata.Record, any, error) {
	state := metadata.BrokerState{ShuttingDown: true}
	b.states[r.ID] = state
	moved := false
	b.walk(func(t *metadata.Topic, p metadata.PartitionRecord) {
		if !slices.Contains(p.ISR, r.ID) || len(p.ISR) == 1 {
			return
		}
		if p.Leader == r.ID {
			if p = elect(p, b.electorate(p), false); p.Leader == r.ID {
				return
			}
			moved = true
		}
		p.ISR = without(p.ISR, []int32{r.ID})
		b.set(t, p)
	})
	if moved {
		if !r.ShuttingDown {
			b.setState(r, state)
		}
		return b.finish(), HeartbeatReply{}, nil
	}
	state.Fenced = true
	b.setState(r, state)
	b.fence([]int32{r.ID})
	return b.finish(), HeartbeatReply{Fenced: true, Leave: true}, nil
}

// Run forgets a broker that is fenced and, unless forced, in no replica list. Its dynamic configs go with it.
func (c UnregisterCommand) Run(img *metadata.Image, _ Env) ([]metadata.Record, any, error) {
	r, ok := img.Brokers[c.Broker]
	if !ok {
		return nil, nil, refuse(ErrUnknownBroker, "No broker with id %d is registered.", c.Broker)
	}
	if !r.Fenced {
		return nil, nil, refuse(ErrInvalidRequest, "Broker %d is running: stop it first.", c.Broker)
	}
	if !c.Force {
		n := 0
		for _, t := range img.TopicsByID {
			for _, p := range t.Partitions {
				if slices.Contains(p.Replicas, c.Broker) {
					n++
				}
			}
		}
		if n > 0 {
			return nil, nil, refuse(ErrBrokersInUse, "Broker %d still has %d replica(s): move them off with varve broker drain %d first.", c.Broker, n, c.Broker)
		}
	}
	var records []metadata.Record
	if len(img.BrokerConfigs[c.Broker]) > 0 {
		records = append(records, metadata.BrokerConfigRecord{Broker: c.Broker})
	}
	return append(records, metadata.UnregisterBrokerRecord{ID: c.Broker}), nil, nil
}
