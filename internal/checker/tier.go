package checker

import (
	"bytes"
	"slices"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

// Remote observes what the metadata says of a partition's remote segments.
func (c *Checker) Remote(p tp.Partition, remote tier.Segments) {
	if err := remote.Check(); err != nil {
		c.Fail(RemoteSet, p, "%v", err)
	}
}

// Copied observes a segment that has just become readable, with the bytes of its object.
func (c *Checker) Copied(p tp.Partition, s *tier.Segment, raw []byte) {
	h := c.of(p)
	batches, _, err := split(raw)
	if err != nil {
		c.Fail(RemoteData, p, "segment %s [%d, %d]: %v", s.ID, s.Start, s.End, err)
		return
	}
	if s.LeaderEpoch < h.minEpoch {
		return
	}
	at := s.Start
	for i, b := range batches {
		known, same := h.same(b)
		switch {
		case i == 0 && (b.base > s.Start || b.last < s.Start) || i > 0 && b.base != at:
			c.Fail(RemoteData, p, "segment %s [%d, %d] has %s where %d is due", s.ID, s.Start, s.End, label(b), at)
		case known && !same:
			c.Fail(RemoteData, p, "segment %s [%d, %d] has %s, where the history has %s", s.ID, s.Start, s.End, label(b), h.describe(b.base))
		case !known && h.end >= 0 && b.base >= h.end:
			c.Fail(RemoteData, p, "segment %s [%d, %d] has %s, which is not committed: the history ends at %d", s.ID, s.Start, s.End, label(b), h.end)
		}
		at = b.last + 1
	}
	if at != s.End+1 {
		c.Fail(RemoteData, p, "segment %s [%d, %d] ends at %d", s.ID, s.Start, s.End, at-1)
	}
}

// Rest is a replica in sync when the cluster has come to rest.
type Rest struct {
	Replica
	Epochs    []leaderepoch.Entry
	Producers []producerstate.Active
}

// Settled compares the replicas of a partition at rest with its leader, which is the first. With trimmed a leader may have
// lost its word on where the log starts, and the others know better.
func (c *Checker) Settled(p tp.Partition, all []Rest, trimmed bool) {
	h := c.of(p)
	for i := range all {
		r, lead := &all[i], &all[0]
		if r.End != lead.End || r.HighWatermark != lead.End || r.LogStart != lead.LogStart && !(trimmed && r.LogStart > lead.LogStart) {
			c.Fail(Liveness, p, "broker %d rests at log start %d, high watermark %d, end %d, its leader %d at %d, %d, %d", r.Broker, r.LogStart, r.HighWatermark, r.End,
				lead.Broker, lead.LogStart, lead.HighWatermark, lead.End)
			continue
		}
		mine, theirs := r.Epochs, lead.Epochs
		if trimmed {
			from := max(first(mine), first(theirs), r.LogStart)
			mine, theirs = leaderepoch.New(mine).EntriesInRange(from, r.End), leaderepoch.New(theirs).EntriesInRange(from, r.End)
		}
		if h.generation == 0 && !slices.Equal(until(mine, r.End), until(theirs, r.End)) {
			c.Fail(Lineage, p, "broker %d has %v, its leader %d has %v (log start %d, end %d)", r.Broker, r.Epochs, lead.Broker, lead.Epochs, lead.LogStart, lead.End)
		}
		if h.generation == 0 { // of a broken history replicas may have had to cut below what they have
			c.sameProducers(p, h, r, lead)
		}
		from := max(r.LocalStart, lead.LocalStart)
		data, err := r.Read(from, r.End)
		other, lerr := lead.Read(from, r.End)
		if err != nil || lerr != nil || !bytes.Equal(data, other) {
			c.Fail(Agreement, p, "brokers %d and %d differ from offset %d on (%v, %v)", r.Broker, lead.Broker, from, err, lerr)
		}
	}
}

// sameProducers compares what two replicas know of producers. A replica that began at the log start need not know those
// whose last batch lies before it, and no batch of theirs is left.
func (c *Checker) sameProducers(p tp.Partition, h *history, r, lead *Rest) {
	find := func(list []producerstate.Active, id int64) *producerstate.Active {
		i := slices.IndexFunc(list, func(a producerstate.Active) bool { return a.ProducerID == id })
		if i < 0 {
			return nil
		}
		return &list[i]
	}
	for i := range lead.Producers {
		a := &lead.Producers[i]
		b := find(r.Producers, a.ProducerID)
		if b == nil {
			if known, ok := h.producers[a.ProducerID]; ok && known.lastOffset >= max(lead.LogStart, r.LogStart) {
				c.Fail(Producers, p, "broker %d does not know producer %d, whose last batch ends at %d", r.Broker, a.ProducerID, known.lastOffset)
			}
		} else if x, y := *a, *b; x != y {
			if min(x.LastOffset, y.LastOffset) < 0 && max(x.LastOffset, y.LastOffset) < lead.LogStart { // nor the last batch of one whose marker it has
				x.LastSequence, x.LastOffset = y.LastSequence, y.LastOffset
			}
			if min(x.CoordinatorEpoch, y.CoordinatorEpoch) < 0 && lead.LogStart > 0 { // or its last marker
				x.CoordinatorEpoch = y.CoordinatorEpoch
			}
			if x.TxnFirstOffset >= 0 && x.TxnFirstOffset < lead.LogStart && y.TxnFirstOffset >= lead.LogStart { // or where its transaction began
				x.TxnFirstOffset = y.TxnFirstOffset
			}
			if x == y {
				continue
			}
			c.Fail(Producers, p, "broker %d has %+v, its leader %d %+v", r.Broker, *b, lead.Broker, *a)
		}
	}
	for i := range r.Producers {
		b := &r.Producers[i]
		if known, ok := h.producers[b.ProducerID]; find(lead.Producers, b.ProducerID) == nil && ok && known.lastOffset >= max(lead.LogStart, r.LogStart) {
			c.Fail(Producers, p, "leader %d does not know producer %d, whose last batch ends at %d", lead.Broker, b.ProducerID, known.lastOffset)
		}
	}
}

func first(list []leaderepoch.Entry) int64 {
	if len(list) == 0 {
		return 0
	}
	return list[0].StartOffset
}

// until leaves out epochs without a record: a log that is empty need not have them.
func until(list []leaderepoch.Entry, end int64) []leaderepoch.Entry {
	for len(list) > 0 && list[len(list)-1].StartOffset >= end {
		list = list[:len(list)-1]
	}
	return list
}
