package sim

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/varve-io/varve/internal/checker"
	"github.com/varve-io/varve/internal/fetch"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

// clients are producers and consumers, at node 0 of the network.
type clients struct {
	s         *sim
	streams   []*stream
	consumers []*consumer
	accounts  []*account
}

func (c *clients) init(s *sim) {
	c.s = s
	for index := range s.plan.partitions {
		id := tp.Partition{Topic: topic, Index: int32(index)}
		for k := range 2 {
			c.streams = append(c.streams, &stream{s: s, id: id, pid: int64(10*index + k + 1), all: k == 0 || s.chance(2)})
		}
		c.consumers = append(c.consumers, &consumer{s: s, id: id, offset: -1}, &consumer{s: s, id: id, offset: -1, direct: true})
	}
	if s.o.Transactions {
		c.initTransactions()
	}
}

func (c *clients) begin() {
	for _, p := range c.streams {
		p.later()
	}
	for _, x := range c.consumers {
		x.later()
	}
	for _, a := range c.accounts {
		a.begin()
	}
}

// stream is one idempotent producer in one partition. It has one batch under way at most.
type stream struct {
	s     *sim
	id    tp.Partition
	pid   int64
	epoch int16
	seq   int32
	all   bool

	raw        []byte // the batch under way, nil for none
	count      int32
	generation int
	number     int
	tries      int
}

func (p *stream) later() { p.s.after(p.s.between(20, 250), p.produce) }

func (p *stream) produce() {
	if p.raw != nil || p.s.calm {
		return
	}
	b := recordbatch.NewBuilder()
	b.ProducerID, b.ProducerEpoch, b.BaseSequence = p.pid, p.epoch, p.seq
	p.count = int32(p.s.between(1, 3))
	for range p.count {
		p.number++
		b.Add(recordbatch.Record{Timestamp: p.s.now, Value: fmt.Appendf(nil, "producer %d, record %d %0*d", p.pid, p.number, p.s.rng.IntN(60), 0)})
	}
	raw, err := b.Build()
	if err != nil {
		p.s.check.Fail("settings", p.id, "%v", err)
		return
	}
	p.raw, p.tries, p.generation = raw, 0, p.s.check.Generation(p.id)
	p.send()
}

// leader is where a client believes a partition's leader to be.
func (s *sim) leader(id tp.Partition) int32 {
	p := s.state(id)
	switch {
	case p == nil:
		return -1
	case s.chance(20) && !s.calm:
		return int32(s.between(1, int64(len(s.nodes))))
	}
	return p.Leader
}

func (p *stream) send() {
	if p.raw == nil {
		return
	}
	p.tries++
	to := p.s.node(p.s.leader(p.id))
	if to == nil {
		p.s.after(p.s.between(50, 150), p.send)
		return
	}
	raw := p.raw
	p.s.net.call(0, to.id, 1200, func(answer func(func())) {
		to.append(p, raw, func(first, last int64, err error) {
			answer(func() { p.answered(raw, first, err) })
		})
	}, func() { p.answered(raw, -1, errLost) })
}

// waits reports whether a batch is the one under way, and not one from before that took a long way.
func (p *stream) waits(raw []byte) bool { return len(p.raw) > 0 && &p.raw[0] == &raw[0] }

func (p *stream) answered(raw []byte, first int64, err error) {
	if !p.waits(raw) {
		return
	}
	switch {
	case err == nil:
		p.seq = recordbatch.AddSequence(p.seq, p.count)
		p.raw = nil
		p.later()
	case errors.Is(err, producerstate.ErrOutOfOrderSequence), errors.Is(err, producerstate.ErrInvalidProducerEpoch):
		p.s.stats.Refused++
		p.s.note("%s: producer %d begins epoch %d: %v", p.id, p.pid, p.epoch+1, err)
		p.epoch, p.seq, p.raw = p.epoch+1, 0, nil
		p.later()
	default:
		p.s.after(p.s.between(30, 200), p.send)
	}
}

// ack is a write that waits for all replicas.
type ack struct {
	first, last int64
	epoch       int32
	duplicate   bool
	seen        *checker.Ack // of a client
	deadline    int64
	answer      func(first, last int64, err error)
}

// append is the broker's side of Produce.
func (n *node) append(p *stream, raw []byte, answer func(first, last int64, err error)) {
	r := n.run
	if r == nil {
		return
	}
	part := r.parts[n.s.slot(p.id)]
	if part == nil {
		answer(-1, -1, partition.ErrNotLeader)
		return
	}
	res, err := part.p.Append(partition.Write{Records: slices.Clone(raw), Now: at(n.wall()), AllReplicas: p.all})
	n.s.touch(r)
	if err != nil {
		state, role := n.s.state(p.id), part.p.Role()
		if errors.Is(err, producerstate.ErrOutOfOrderSequence) && p.all && p.waits(raw) && p.epoch == 0 && n.s.check.Generation(p.id) == 0 && role.LeaderEpoch == state.LeaderEpoch {
			n.s.check.Fail(checker.Idempotent, p.id, "producer %d, whose every batch was acknowledged by all replicas, is refused by leader %d: %v", p.pid, n.id, err)
		}
		answer(-1, -1, err)
		return
	}
	if !p.all {
		answer(res.FirstOffset, res.LastOffset, nil)
		return
	}
	h, _ := recordbatch.ParseHeader(raw)
	a := &ack{first: res.FirstOffset, last: res.LastOffset, epoch: res.Epoch, duplicate: res.Duplicate, deadline: n.s.now + 1000, answer: answer,
		seen: &checker.Ack{ProducerID: h.ProducerID, Epoch: h.ProducerEpoch, Sequence: h.BaseSequence, First: res.FirstOffset, Last: res.LastOffset, Leader: res.Epoch, Generation: p.generation}}
	part.acks = append(part.acks, a)
	n.s.after(1001, func() { n.s.touch(r) })
}

// settleAcks answers the writes that are committed or will not be.
func (part *replica) settleAcks() {
	s := part.r.n.s
	part.acks = slices.DeleteFunc(part.acks, func(a *ack) bool {
		committed, err := part.p.Await(a.last+1, a.epoch)
		if s.o.Bug == AckEarly && err == nil {
			committed = true
		}
		switch {
		case err != nil:
			a.answer(-1, -1, err)
		case committed:
			if a.seen != nil {
				s.stats.Acked++
				s.check.Acked(part.id, *a.seen)
			}
			a.answer(a.first, a.last, nil)
		case s.now > a.deadline:
			if err := part.p.LateWrite(); err != nil {
				a.answer(-1, -1, err)
			} else {
				a.answer(-1, -1, errLost)
			}
		default:
			return false
		}
		return true
	})
}

// consumer reads one partition from its start to its end, again and again.
type consumer struct {
	s         *sim
	id        tp.Partition
	direct    bool // takes locations and reads the bucket itself
	committed bool // reads what is committed
	keep      bool // keeps the offsets of what it is shown
	kept      []int64
	offset    int64
	idle      int // empty answers in a row
	rounds    int // times that it has reached the end
}

func (c *consumer) later() { c.s.after(c.s.between(30, 150), c.poll) }

func (c *consumer) poll() {
	if c.s.calm {
		return // the last read is heal's
	}
	to := c.s.leader(c.id)
	if c.s.chance(4) {
		to = int32(c.s.between(1, int64(len(c.s.nodes))))
	}
	n := c.s.node(to)
	if n == nil {
		c.later()
		return
	}
	c.s.net.call(0, n.id, 1000, func(answer func(func())) {
		if n.run != nil {
			n.run.serve(c)
			answer(c.later)
		}
	}, c.later)
}

// serve answers a consumer. What it is given is looked at here, before it gets lost.
func (r *run) serve(c *consumer) (progress bool) {
	s := r.n.s
	p, ok := r.Get(c.id)
	if !ok {
		return false
	}
	leads := p.Leads()
	_, epoch := p.Leadership()
	if c.offset < 0 {
		marks, err := p.Offsets(tp.NoEpoch)
		if err != nil {
			return false
		}
		c.offset, c.idle = marks.LogStart, 0
		return true
	}
	part := fetch.Part{Topic: c.id.Topic, Index: c.id.Index, Offset: c.offset, MaxBytes: int(s.between(1, 1500)), CurrentEpoch: s.state(c.id).LeaderEpoch, LastFetchedEpoch: -1,
		WantLocation: c.direct}
	req := &fetch.Request{Parts: []fetch.Part{part}, MaxBytes: part.MaxBytes, MinBytes: 1, TierWait: time.Minute, AnyReplica: true, Committed: c.committed && s.o.Bug != ReadUndecided}
	if c.direct {
		req.Formats = []string{tier.FormatKafkaV1}
	}
	res := r.fetch.Fetch(s.ctx, req)[0]
	s.touch(r)
	via := fmt.Sprintf("broker %d", r.n.id)
	var raw []byte
	switch {
	case res.Err != nil:
		if errors.Is(res.Err, fetch.ErrOffsetOutOfRange) {
			s.note("%s: a consumer at %d is out of range at broker %d: %v", c.id, c.offset, r.n.id, res.Err)
			if marks, err := p.Offsets(tp.NoEpoch); err == nil && leads && s.check.Generation(c.id) == 0 && c.offset >= marks.LogStart && c.offset <= s.check.End(c.id) {
				s.check.Fail(checker.Reading, c.id, "%s: offset %d is out of range, though it lies in [%d, %d]", via, c.offset, marks.LogStart, s.check.End(c.id))
			}
			c.offset = -1
		}
		return false
	case res.View != nil:
		raw, _ = res.View.AppendTo(nil)
		res.View.Release()
	case len(res.Locations) > 0:
		at := res.Locations[0]
		b, err := objstore.ReadRange(s.ctx, s.bucket, at.ObjectKey, at.StartPosition, at.EndPosition-at.StartPosition)
		if err != nil {
			return false // it would read through the broker now
		}
		s.stats.Direct++
		raw, via = whole(b, c.offset), "direct read by "+via
	default:
		raw = res.Records.Bytes()
	}
	if len(raw) == 0 {
		if c.idle++; c.idle > 5 && leads && c.offset >= res.HighWatermark {
			c.offset = -1
			c.rounds++
		}
		return false
	}
	c.idle = 0
	if leads {
		s.stats.Read++
	} else {
		s.stats.FollowerRead++
	}
	r.observe() // what is read must have been seen to be committed
	if c.committed {
		c.filter(p, raw, res.Aborted, via)
	}
	c.offset = s.check.Read(c.id, checker.Read{Epoch: epoch, Offset: c.offset, Records: raw, Leads: leads, Via: via})
	return true
}

// filter is what a read_committed client does with an answer: it leaves out what the list of aborted transactions names.
func (c *consumer) filter(p *partition.Partition, raw []byte, aborted []producerstate.AbortedTxn, via string) {
	aborted = slices.Clone(aborted)
	slices.SortFunc(aborted, func(a, b producerstate.AbortedTxn) int { return cmp.Compare(a.FirstOffset, b.FirstOffset) })
	hidden := map[int64]bool{} // by producer id
	var shown []checker.Shown
	for len(raw) > 0 {
		h, err := recordbatch.ParseHeader(raw)
		if err != nil {
			return // Read tells
		}
		for len(aborted) > 0 && aborted[0].FirstOffset <= h.LastOffset() {
			hidden[aborted[0].ProducerID] = true
			aborted = aborted[1:]
		}
		switch {
		case h.IsControl():
			if m, ok, err := recordbatch.ControlOf(raw[:h.Size]); err == nil && ok && m.Type == recordbatch.ControlAbort {
				delete(hidden, h.ProducerID)
			}
		case h.IsTransactional():
			_, open := p.TxnState(h.ProducerID, h.ProducerEpoch)
			shown = append(shown, checker.Shown{Base: h.BaseOffset, Shown: !hidden[h.ProducerID], Open: open})
			if hidden[h.ProducerID] {
				c.s.stats.Hidden++
				break
			}
			fallthrough
		default:
			for at := max(h.BaseOffset, c.offset); c.keep && at <= h.LastOffset(); at++ {
				c.kept = append(c.kept, at)
			}
		}
		raw = raw[h.Size:]
	}
	c.s.check.Committed(c.id, via, shown)
}

// whole leaves out batches before offset, where the range of an object may begin, and one that is cut off at its end.
func whole(b []byte, offset int64) []byte {
	at := 0
	for at < len(b) {
		h, err := recordbatch.ParseHeader(b[at:])
		if err != nil || at+h.Size > len(b) {
			break
		}
		if h.LastOffset() < offset {
			b = b[h.Size:]
			continue
		}
		at += h.Size
	}
	return b[:at]
}
