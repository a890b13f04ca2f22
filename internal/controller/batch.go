package controller

import (
	"cmp"
	"slices"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/metadata"
)

const (
	uncleanKey = "unclean.leader.election.enable"
	drainKey   = "varve.broker.drain"
)

// batch collects the changes of one command over an image: brokers' states, and at most one new record per partition,
// however many steps change it.
type batch struct {
	img        *metadata.Image
	env        Env
	records    []metadata.Record // those about brokers; they come before the partitions'
	states     map[int32]metadata.BrokerState
	partitions map[PartitionRef]*touched
	defaults   map[string]bool // broker defaults of boolean topic configs that were asked for
}

// touched is a partition as it was and as it shall be.
type touched struct {
	topic *metadata.Topic
	was   *metadata.PartitionRecord
	now   metadata.PartitionRecord
	renew bool // gets a new partition epoch though nothing changes
}

func newBatch(img *metadata.Image, env Env) *batch {
	return &batch{img: img, env: env, states: map[int32]metadata.BrokerState{}, partitions: map[PartitionRef]*touched{}, defaults: map[string]bool{}}
}

// setState changes a registered broker's state.
func (b *batch) setState(broker *metadata.BrokerRecord, s metadata.BrokerState) {
	b.states[broker.ID] = s
	b.records = append(b.records, metadata.BrokerStateRecord{ID: broker.ID, Epoch: broker.Epoch, BrokerState: s})
}

// state is a broker's state after what the batch did so far.
func (b *batch) state(id int32) (metadata.BrokerState, bool) {
	if s, ok := b.states[id]; ok {
		return s, true
	}
	if r, ok := b.img.Brokers[id]; ok {
		return r.BrokerState, true
	}
	return metadata.BrokerState{}, false
}

func (b *batch) unfenced(id int32) bool {
	s, ok := b.state(id)
	return ok && !s.Fenced
}

func (b *batch) leaving(id int32) bool {
	s, _ := b.state(id)
	return s.ShuttingDown
}

func (b *batch) usable(id int32) bool { return b.unfenced(id) && !b.leaving(id) }

func (b *batch) alive(id int32) bool {
	if b.env.Alive == nil {
		return b.unfenced(id)
	}
	return b.env.Alive(id)
}

func (b *batch) electorate(p metadata.PartitionRecord) electorate {
	return electorate{b.unfenced, b.leaving, b.alive, func(id int32) bool {
		return b.env.Thin != nil && b.env.Thin(id, PartitionRef{p.Topic, p.Index})
	}}
}

// unclean is the effective unclean.leader.election.enable of a topic.
func (b *batch) unclean(t *metadata.Topic) bool {
	if v, ok := t.Configs[uncleanKey]; ok {
		return v == "true"
	}
	v, ok := b.defaults[uncleanKey]
	if !ok {
		v = config.TopicDefaults(b.env.brokerValues(b.img))[uncleanKey] == "true"
		b.defaults[uncleanKey] = v
	}
	return v
}

func (b *batch) elect(t *metadata.Topic, p metadata.PartitionRecord) metadata.PartitionRecord {
	p = elect(p, b.electorate(p), false)
	if p.Leader < 0 && b.unclean(t) {
		p = elect(p, b.electorate(p), true)
	}
	return p
}

// get is a partition as the batch has it so far.
func (b *batch) get(p *metadata.Partition) metadata.PartitionRecord {
	if len(b.partitions) > 0 {
		if c, ok := b.partitions[PartitionRef{p.Topic, p.Index}]; ok {
			return c.now
		}
	}
	now := p.PartitionRecord
	now.Unclean = false
	return now
}

// set changes a partition. Epochs need not be set, finish does that. Slices of the record must not be those of the image
// with other content.
func (b *batch) set(t *metadata.Topic, p metadata.PartitionRecord) {
	ref := PartitionRef{p.Topic, p.Index}
	if c, ok := b.partitions[ref]; ok {
		c.now = p
		return
	}
	b.partitions[ref] = &touched{topic: t, was: &t.Partitions[p.Index].PartitionRecord, now: p}
}

// walk calls f for every partition, in no order: f must decide about each one alone.
func (b *batch) walk(f func(*metadata.Topic, metadata.PartitionRecord)) {
	for _, t := range b.img.TopicsByID {
		for _, p := range t.Partitions {
			f(t, b.get(p))
		}
	}
}

// finish completes reassignments that became complete and returns the records: brokers', then partitions' in the order
// of topic names and indexes. Every record raises its partition epoch by one, those with another leader the leader epoch.
func (b *batch) finish() []metadata.Record {
	list := make([]*touched, 0, len(b.partitions))
	for _, c := range b.partitions {
		c.now = b.complete(c.now)
		if c.renew || !same(*c.was, c.now) {
			list = append(list, c)
		}
	}
	slices.SortFunc(list, func(x, y *touched) int {
		return cmp.Or(cmp.Compare(x.topic.Name, y.topic.Name), cmp.Compare(x.now.Index, y.now.Index))
	})
	records := b.records
	for _, c := range list {
		c.now.PartitionEpoch = c.was.PartitionEpoch + 1
		c.now.LeaderEpoch = c.was.LeaderEpoch
		if c.now.Leader != c.was.Leader {
			c.now.LeaderEpoch++
		}
		records = append(records, c.now)
	}
	return records
}

// same compares what a record is about, without epochs and marks.
func same(a, b metadata.PartitionRecord) bool {
	return a.Leader == b.Leader && a.Lost == b.Lost && slices.Equal(a.Replicas, b.Replicas) && slices.Equal(a.ISR, b.ISR) && slices.Equal(a.Adding, b.Adding) &&
		slices.Equal(a.Removing, b.Removing)
}

// complete ends a reassignment when every replica of its target is in sync (KIP-455). It waits where nobody of the target
// could lead.
func (b *batch) complete(p metadata.PartitionRecord) metadata.PartitionRecord {
	if len(p.Adding) == 0 && len(p.Removing) == 0 {
		return p
	}
	next := p
	next.Replicas, next.Adding, next.Removing = without(p.Replicas, p.Removing), nil, nil
	if !subset(next.Replicas, p.ISR) {
		return p
	}
	next.ISR = without(p.ISR, p.Removing)
	if next = elect(next, b.electorate(p), false); next.Leader < 0 {
		return p
	}
	return next
}

// find is a partition of a living topic.
func find(img *metadata.Image, ref PartitionRef) (*metadata.Topic, *metadata.Partition, *Error) {
	t, ok := img.TopicsByID[ref.Topic]
	if !ok || ref.Index < 0 || int(ref.Index) >= len(t.Partitions) {
		return nil, nil, refuse(ErrUnknownTopic, "This server does not host this topic-partition.")
	}
	return t, t.Partitions[ref.Index], nil
}

// draining reports whether a broker is to be emptied.
func draining(img *metadata.Image, broker int32) bool {
	return img.BrokerConfigs[broker][drainKey] == "true"
}
