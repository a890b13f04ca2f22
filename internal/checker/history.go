package checker

import (
	"bytes"
	"fmt"
	"sort"

	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tp"
)

// history is what is committed of one partition.
type history struct {
	batches    []batch // by offset, without gaps
	end        int64   // behind the last one; -1 if the history may begin anywhere
	producers  map[int64]producer
	ends       map[int32]int64 // committed end as the leaders of an epoch brought it about
	led        map[leadership]int64
	replicas   map[int32]*replica
	generation int
	minEpoch   int32
	logStart   int64 // the highest that a leader had
}

type batch struct {
	base, last int64
	raw        []byte
}

type producer struct {
	epoch      int16
	last       int32
	lastOffset int64
}

// leadership is one replica's time as leader.
type leadership struct {
	broker int32
	epoch  int32
}

// find returns the number of the batch that holds offset, or would.
func (h *history) find(offset int64) int {
	return sort.Search(len(h.batches), func(i int) bool { return h.batches[i].last >= offset })
}

// split cuts bytes into batches.
func split(raw []byte) (out []batch, headers []recordbatch.Header, err error) {
	for len(raw) > 0 {
		hd, err := recordbatch.ParseHeader(raw)
		if err == nil {
			err = hd.Verify(raw)
		}
		if err != nil {
			return out, headers, err
		}
		out = append(out, batch{hd.BaseOffset, hd.LastOffset(), raw[:hd.Size]})
		headers = append(headers, hd)
		raw = raw[hd.Size:]
	}
	return out, headers, nil
}

// commit takes the next batch into the history. What a producer wrote below logStart may be forgotten with it: a replica that
// began at the log start never knew it (KIP-360).
func (h *history) commit(b batch, hd *recordbatch.Header, epoch int32, logStart int64) *Violation {
	if h.end >= 0 && b.base != h.end {
		return &Violation{Check: Durability, Text: fmt.Sprintf("batch [%d, %d] is committed in epoch %d where the history ends at %d", b.base, b.last, epoch, h.end)}
	}
	h.batches = append(h.batches, batch{b.base, b.last, bytes.Clone(b.raw)})
	h.end = b.last + 1
	h.ends[epoch] = h.end
	if !hd.HasProducer() || hd.IsControl() || hd.BaseSequence < 0 { // a coordinator numbers nothing
		return nil
	}
	was, known := h.producers[hd.ProducerID]
	h.producers[hd.ProducerID] = producer{hd.ProducerEpoch, hd.LastSequence(), b.last}
	switch {
	case !known || was.lastOffset < logStart:
	case hd.ProducerEpoch < was.epoch,
		hd.ProducerEpoch == was.epoch && hd.BaseSequence != recordbatch.AddSequence(was.last, 1),
		hd.ProducerEpoch > was.epoch && hd.BaseSequence != 0:
		return &Violation{Check: Idempotent, Text: fmt.Sprintf("batch [%d, %d] of producer %d has epoch %d, sequences %d to %d behind epoch %d, sequence %d at offset %d",
			b.base, b.last, hd.ProducerID, hd.ProducerEpoch, hd.BaseSequence, hd.LastSequence(), was.epoch, was.last, was.lastOffset)}
	}
	return nil
}

// same holds a batch against the history; known is false above its end and where it was forgotten.
func (h *history) same(b batch) (known, same bool) {
	if h.end < 0 || b.base >= h.end || len(h.batches) == 0 || b.last < h.batches[0].base {
		return false, false
	}
	i := h.find(b.base)
	if i == len(h.batches) {
		return false, false
	}
	return true, bytes.Equal(h.batches[i].raw, b.raw)
}

// describe tells what the history has at an offset.
func (h *history) describe(offset int64) string {
	i := h.find(offset)
	if i == len(h.batches) {
		return fmt.Sprintf("nothing (it ends at %d)", h.end)
	}
	return label(h.batches[i])
}

func label(b batch) string {
	hd, err := recordbatch.ParseHeader(b.raw)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("[%d, %d] of epoch %d, producer %d/%d sequence %d", b.base, b.last, hd.LeaderEpoch, hd.ProducerID, hd.ProducerEpoch, hd.BaseSequence)
}

// Ack is a write that was acknowledged for all replicas.
type Ack struct {
	ProducerID  int64
	Epoch       int16
	Sequence    int32
	First, Last int64
	Leader      int32 // epoch that it was given in
	Generation  int   // of the partition when the write began
}

// Acked is told of an acknowledgement at the moment when the leader gives it, after the leader itself was observed.
func (c *Checker) Acked(p tp.Partition, a Ack) {
	h := c.of(p)
	if a.Generation != h.generation || a.Leader < h.minEpoch || h.generation > 0 && (len(h.batches) == 0 || a.First < h.batches[0].base) {
		return
	}
	i := h.find(a.First)
	if i < len(h.batches) && h.batches[i].base == a.First && h.batches[i].last == a.Last {
		hd, err := recordbatch.ParseHeader(h.batches[i].raw)
		if err == nil && hd.ProducerID == a.ProducerID && hd.ProducerEpoch == a.Epoch && hd.BaseSequence == a.Sequence {
			return
		}
	}
	c.Fail(Acknowledge, p, "producer %d/%d sequence %d was acknowledged at [%d, %d], where the history has %s", a.ProducerID, a.Epoch, a.Sequence, a.First, a.Last, h.describe(a.First))
}

// Read is what a reader was given for an offset.
type Read struct {
	Epoch   int32 // of the replica that answered
	Offset  int64
	Records []byte
	Leads   bool   // it led then
	Via     string // for the text
}

// Read checks an answer with records and returns the offset to go on at.
func (c *Checker) Read(p tp.Partition, r Read) (next int64) {
	h := c.of(p)
	batches, _, err := split(r.Records)
	if err != nil {
		c.Fail(Reading, p, "%s at %d: %v", r.Via, r.Offset, err)
	}
	next = r.Offset
	for i, b := range batches {
		if r.Epoch >= h.minEpoch && (r.Leads || h.generation == 0) {
			if i == 0 && (b.base > r.Offset || b.last < r.Offset) || i > 0 && b.base != next {
				c.Fail(Reading, p, "%s at %d, then %d: got %s", r.Via, r.Offset, next, label(b))
			}
			known, same := h.same(b)
			if !known && h.end >= 0 && b.base >= h.end {
				c.Fail(Reading, p, "%s at %d: got %s, which is not committed: the history ends at %d", r.Via, r.Offset, label(b), h.end)
			} else if known && !same {
				c.Fail(Reading, p, "%s at %d: got %s, where the history has %s", r.Via, r.Offset, label(b), h.describe(b.base))
			}
		}
		next = b.last + 1
	}
	return next
}
