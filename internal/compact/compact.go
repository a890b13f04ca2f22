// Package compact decides what compaction does to a log: when one is due and how far it may go, the last offset of every key, and
// which batches and records stay. It is pure; the log engine reads and writes for it. The rules are those of Kafka 4.4's LogCleaner
// (KIP-58 and KIP-354 for the lags, KIP-534 for tombstones and markers).
package compact

import (
	"crypto/sha256"
	"encoding/binary"
	"math"
	"math/bits"

	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
)

// Segment is what a plan must know of a finished segment. FirstTimestamp and MaxTimestamp are in ms, -1 without any.
type Segment struct {
	Base, Next, Size             int64
	FirstTimestamp, MaxTimestamp int64
}

// Config are a topic's settings: min.cleanable.dirty.ratio, min. and max.compaction.lag.ms, delete.retention.ms.
type Config struct {
	DirtyRatio        float64
	MinLagMs          int64
	MaxLagMs          int64 // math.MaxInt64 is none
	DeleteRetentionMs int64
}

// Plan is how far a log can be compacted. From is where the records begin that no compaction has seen, To where those end that
// this one may look at: the base of the first segment that stays out, which may be the active one.
type Plan struct {
	From, To    int64
	Clean, Wait int64 // bytes below From; bytes in [From, To)
	Due         bool
}

// Ratio is the share of bytes that no compaction has seen.
func (p *Plan) Ratio() float64 {
	if p.Wait == 0 {
		return 0
	}
	return float64(p.Wait) / float64(p.Clean+p.Wait)
}

// MakePlan plans for the finished segments of a log, in order. Only records below stable count (the last stable offset), and only
// whole segments. cleaned is where the last compaction ended, whatever is known of it.
func MakePlan(segments []Segment, cleaned, stable, now int64, c Config) Plan {
	if len(segments) == 0 {
		return Plan{From: cleaned, To: cleaned}
	}
	last := segments[len(segments)-1]
	p := Plan{From: cleaned}
	if cleaned < segments[0].Base || cleaned > last.Next {
		p.From = segments[0].Base // retention passed it, or the log is another one
	}
	p.To = p.From
	oldest := int64(math.MaxInt64)
	for _, s := range segments {
		if s.Next <= p.From {
			p.Clean += s.Size
			continue
		}
		if s.Next > stable || c.MinLagMs > 0 && s.MaxTimestamp > now-c.MinLagMs {
			break
		}
		p.To = s.Next
		p.Wait += s.Size
		if s.FirstTimestamp >= 0 {
			oldest = min(oldest, s.FirstTimestamp)
		}
	}
	late := c.MaxLagMs < math.MaxInt64 && oldest < now-c.MaxLagMs
	p.Due = p.Wait > 0 && (p.Ratio() > c.DirtyRatio || late)
	return p
}

// Map has the last offset of each key. Its memory is bounded, for 30 bytes a key where it is full. Keys are known by 128 bits of their
// SHA-256, so that nobody can make two that count as one.
type Map struct {
	slots []slot
	max   int // slots that it may grow to
	count int
	// Latest is the last offset that was looked at, -1 before the first: records above it all stay.
	Latest int64
}

type slot struct {
	hi, lo uint64
	offset int64 // one more than it is, so that 0 is an empty slot
}

const (
	slotBytes  = 24
	firstSlots = 1 << 14 // a map begins with fewer
	growth     = 8
)

// NewMap makes a map for records in a range of so many offsets, that takes at most `memory` bytes. It holds one key at the least. It
// begins small and grows with the keys, since a table that is larger than they need costs a cache miss for every record; what it
// takes while it grows is in the bound.
func NewMap(memory int, offsets int64) *Map {
	most := int64(memory) / slotBytes * growth / (growth + 1)
	m := &Map{max: int(max(min(most, offsets+offsets/8+1), 2)), Latest: -1}
	n := m.max
	for n > firstSlots {
		n /= growth
	}
	m.slots = make([]slot, n)
	return m
}

// Room is the number of keys that can still be taken.
func (m *Map) Room() int { return max(m.max*9/10, 1) - m.count }

// Len is the number of keys.
func (m *Map) Len() int { return m.count }

// find returns the slot of a key, or the empty one where it belongs.
func (m *Map) find(key []byte) (s *slot, hi, lo uint64) {
	sum := sha256.Sum256(key)
	hi, lo = binary.LittleEndian.Uint64(sum[:]), binary.LittleEndian.Uint64(sum[8:])
	return m.at(hi, lo), hi, lo
}

// at probes from the place that the hash has in proportion.
func (m *Map) at(hi, lo uint64) *slot {
	for i, _ := bits.Mul64(hi, uint64(len(m.slots))); ; i++ {
		if i == uint64(len(m.slots)) {
			i = 0
		}
		if s := &m.slots[i]; s.offset == 0 || s.hi == hi && s.lo == lo {
			return s
		}
	}
}

// Put takes a record; offsets must rise. There must be room for it.
func (m *Map) Put(key []byte, offset int64) {
	s, hi, lo := m.find(key)
	if s.offset == 0 {
		if m.count++; len(m.slots) < m.max && m.count > len(m.slots)*3/4 {
			m.grow()
			s = m.at(hi, lo)
		}
	}
	*s = slot{hi, lo, offset + 1}
}

func (m *Map) grow() {
	old := m.slots
	n := len(old) * growth
	if n > m.max/growth { // the last step, so that no other would be left
		n = m.max
	}
	m.slots = make([]slot, n)
	for _, s := range old {
		if s.offset > 0 {
			*m.at(s.hi, s.lo) = s
		}
	}
}

// Superseded says whether a later record than the one at offset has its key.
func (m *Map) Superseded(key []byte, offset int64) bool {
	s, _, _ := m.find(key)
	return s.offset > offset+1
}

// Transactions follows the transactions of a log from its start on, to tell which batches were aborted and which markers have
// nothing left to decide.
type Transactions struct {
	aborted []producerstate.AbortedTxn // in order of their first offsets; those not reached yet
	ongoing map[int64]*abortedTxn      // by producer
	decided map[int64]bool             // producers of which a batch was seen that is not aborted, before its marker
}

type abortedTxn struct {
	producerstate.AbortedTxn
	seen bool // a batch of it is left
}

// NewTransactions takes the aborted transactions with records in the range, sorted by their first offsets.
func NewTransactions(aborted []producerstate.AbortedTxn) *Transactions {
	return &Transactions{aborted: aborted, ongoing: map[int64]*abortedTxn{}, decided: map[int64]bool{}}
}

func (t *Transactions) reach(offset int64) {
	for len(t.aborted) > 0 && t.aborted[0].FirstOffset <= offset {
		t.ongoing[t.aborted[0].ProducerID] = &abortedTxn{AbortedTxn: t.aborted[0]}
		t.aborted = t.aborted[1:]
	}
}

// Data takes a batch that is not a control batch, and says whether its records were aborted.
func (t *Transactions) Data(h *recordbatch.Header) bool {
	t.reach(h.LastOffset())
	if !h.IsTransactional() {
		return false
	}
	if a := t.ongoing[h.ProducerID]; a != nil {
		a.seen = true
		return true
	}
	t.decided[h.ProducerID] = true
	return false
}

// Marker takes a control batch, whose bytes are whole. idle says that no batch of its transaction is left, so that it may go in its
// time. keep is the entry that the transaction index must still have.
func (t *Transactions) Marker(h *recordbatch.Header, batch []byte) (idle bool, keep *producerstate.AbortedTxn) {
	t.reach(h.LastOffset())
	c, ok, err := recordbatch.ControlOf(batch)
	if err != nil {
		return false, nil // it is not understood, so it stays
	}
	if !ok {
		return true, nil
	}
	switch c.Type {
	case recordbatch.ControlAbort:
		a := t.ongoing[h.ProducerID]
		delete(t.ongoing, h.ProducerID)
		if a == nil || !a.seen {
			return true, nil
		}
		return false, &a.AbortedTxn
	case recordbatch.ControlCommit:
		seen := t.decided[h.ProducerID]
		delete(t.decided, h.ProducerID)
		return !seen, nil
	}
	return false, nil
}

// LastBatch is the last that is known of a producer: the offset of its last record, or -1 where its last word is a marker of that epoch.
type LastBatch struct {
	Offset int64
	Epoch  int16
}

// Cleaner decides about the batches of a log, in their order.
type Cleaner struct {
	Map       *Map
	Txns      *Transactions
	Producers map[int64]LastBatch // those that the log knows still
	Now       int64
	Config    Config
	Limit     int // bytes of records of one compressed batch; 0 is the default

	batches recordbatch.Compactor
}

// Verdict is what becomes of a batch. Batch is nil if it goes, and overwritten by the next call of Clean. Aborted is an entry that the transaction index must have.
type Verdict struct {
	Batch   []byte
	Aborted *producerstate.AbortedTxn
	Records int // that stay
}

// Clean decides about one whole batch.
func (c *Cleaner) Clean(h *recordbatch.Header, batch []byte) (Verdict, error) {
	var v Verdict
	drop, idle := false, false
	if h.IsControl() {
		idle, v.Aborted = c.Txns.Marker(h, batch)
		drop = idle && h.HasDeleteHorizon() && h.BaseTimestamp <= c.Now
	} else {
		drop = c.Txns.Data(h)
	}
	tombstones := false
	keep := func(r *recordbatch.Record) bool {
		if drop {
			return false
		}
		if h.IsControl() || r.Offset > c.Map.Latest {
			tombstones = tombstones || r.Value == nil
			return true
		}
		if r.Key == nil || c.Map.Superseded(r.Key, r.Offset) {
			return false
		}
		if r.Value != nil {
			return true
		}
		if h.HasDeleteHorizon() && h.BaseTimestamp <= c.Now {
			return false
		}
		tombstones = true
		return true
	}
	out, kept, err := c.batches.Compact(batch, c.Limit, -1, keep)
	if err != nil {
		return v, err
	}
	if kept > 0 && !h.HasDeleteHorizon() && (idle || !h.IsControl() && tombstones) {
		horizon := c.Now + min(c.Config.DeleteRetentionMs, math.MaxInt64-c.Now)
		if out, kept, err = c.batches.Compact(batch, c.Limit, horizon, keep); err != nil {
			return v, err
		}
	}
	v.Batch, v.Records = out, kept
	if kept == 0 && !c.last(h) {
		v.Batch = nil
	}
	return v, nil
}

// last says whether the batch is the last that is known of its producer, which must not be forgotten with its records.
func (c *Cleaner) last(h *recordbatch.Header) bool {
	p, ok := c.Producers[h.ProducerID]
	if !ok || !h.HasProducer() {
		return false
	}
	if p.Offset >= 0 {
		return h.LastOffset() == p.Offset
	}
	return h.IsControl() && h.ProducerEpoch == p.Epoch
}
