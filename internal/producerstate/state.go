// Package producerstate remembers, for one partition, what its idempotent and transactional producers wrote
// last: enough to recognise a repeated batch, to refuse one out of order, and to know which transactions are
// open. The rules are those of Kafka 4.4's ProducerStateManager (KIP-98, KIP-360, KIP-890).
//
// The state is a function of the batches of the log. It does no I/O and takes the time as a parameter. A State
// is not safe for concurrent use.
package producerstate

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sort"

	"github.com/varve-io/varve/internal/recordbatch"
)

// Why a batch or marker is refused. Kafka's code is in parentheses.
var (
	// ErrOutOfOrderSequence: a gap in the sequence, or a repeated batch that is not among the last five
	// (OUT_OF_ORDER_SEQUENCE_NUMBER 45).
	ErrOutOfOrderSequence = errors.New("out of order sequence number")
	// ErrInvalidProducerEpoch: a newer instance of the producer has written (INVALID_PRODUCER_EPOCH 47).
	ErrInvalidProducerEpoch = errors.New("invalid producer epoch")
	// ErrInvalidTxnState: a plain batch while the producer has a transaction open (INVALID_TXN_STATE 48).
	ErrInvalidTxnState = errors.New("invalid transaction state")
	// ErrCoordinatorFenced: a marker of an older coordinator (TRANSACTION_COORDINATOR_FENCED 52).
	ErrCoordinatorFenced = errors.New("transaction coordinator is fenced")
)

// batchesKept is the number of batches by which a repetition is recognised; clients have as many in flight.
const batchesKept = 5

// AbortedTxn is a transaction that an abort marker ended, as the transaction index keeps it.
type AbortedTxn struct {
	ProducerID       int64
	FirstOffset      int64
	LastOffset       int64 // the marker's
	LastStableOffset int64 // of the partition once this transaction has ended
}

// Duplicate is where a repeated batch was appended the first time.
type Duplicate struct {
	FirstOffset, LastOffset, Timestamp int64
}

// Active is a producer as DescribeProducers shows it.
type Active struct {
	ProducerID       int64
	Epoch            int16
	LastSequence     int32 // -1 without a batch
	LastTimestamp    int64
	CoordinatorEpoch int32 // -1 before the first marker
	TxnFirstOffset   int64 // -1 if no transaction is open
	LastOffset       int64 // of the last batch of its epoch; -1 without one
}

type batch struct {
	lastSequence int32
	offsetDelta  int32
	lastOffset   int64
	timestamp    int64
}

func (b *batch) firstSequence() int32 {
	if b.lastSequence < b.offsetDelta {
		// The numbers wrapped inside the batch.
		return math.MaxInt32 - (b.offsetDelta - b.lastSequence) + 1
	}
	return b.lastSequence - b.offsetDelta
}

type producer struct {
	epoch            int16
	coordinatorEpoch int32
	count            int8 // of batches, oldest first
	batches          [batchesKept]batch
	txnFirst         int64 // -1 if none is open
	lastTimestamp    int64
	lastMarker       int64 // its offset, -1 where none is known; not in snapshots
}

func (p *producer) lastSequence() int32 {
	if p.count == 0 {
		return -1
	}
	return p.batches[p.count-1].lastSequence
}

func (p *producer) lastOffset() int64 {
	if p.count == 0 {
		return -1
	}
	return p.batches[p.count-1].lastOffset
}

func (p *producer) setEpoch(epoch int16) {
	if p.epoch != epoch {
		p.epoch, p.count = epoch, 0
	}
}

func (p *producer) push(b batch) {
	if p.count == batchesKept {
		copy(p.batches[:], p.batches[1:])
		p.count--
	}
	p.batches[p.count] = b
	p.count++
}

// txn is a transaction by its offsets. last is the marker's, once it has one.
type txn struct{ producerID, first, last int64 }

// State is the state of all producers up to, and excluding, some offset, which the caller keeps. Use New.
type State struct {
	producers map[int64]*producer
	ongoing   []txn // in order of first
	// completed holds transactions whose marker may lie at or above the high watermark: until that has passed,
	// their records are not stable.
	completed []txn
}

// New returns an empty state.
func New() *State { return &State{producers: map[int64]*producer{}} }

// FromSnapshot makes a state of a snapshot's entries. Producers that expired by now are left out, as in Apply
// of Expire.
func FromSnapshot(entries []Entry, nowMs, expirationMs int64) *State {
	s := New()
	for _, e := range entries {
		p := &producer{epoch: e.Epoch, coordinatorEpoch: e.CoordinatorEpoch, txnFirst: e.TxnFirstOffset, lastTimestamp: e.Timestamp, lastMarker: -1}
		if e.TxnFirstOffset < 0 {
			p.txnFirst = -1
		}
		if expired(p, nowMs, expirationMs) {
			continue
		}
		if e.LastOffset >= 0 {
			p.push(batch{e.LastSequence, e.OffsetDelta, e.LastOffset, e.Timestamp})
		}
		s.producers[e.ProducerID] = p
		if p.txnFirst >= 0 {
			s.ongoing = append(s.ongoing, txn{producerID: e.ProducerID, first: p.txnFirst})
		}
	}
	sort.Slice(s.ongoing, func(i, j int) bool { return s.ongoing[i].first < s.ongoing[j].first })
	return s
}

// Snapshot returns the entries of a snapshot file, in order of producer ids.
func (s *State) Snapshot() []Entry {
	entries := make([]Entry, 0, len(s.producers))
	for _, id := range s.ids() {
		p := s.producers[id]
		e := Entry{ProducerID: id, Epoch: p.epoch, LastSequence: -1, LastOffset: -1, Timestamp: p.lastTimestamp,
			CoordinatorEpoch: p.coordinatorEpoch, TxnFirstOffset: p.txnFirst}
		if p.count > 0 {
			b := &p.batches[p.count-1]
			e.LastSequence, e.LastOffset, e.OffsetDelta = b.lastSequence, b.lastOffset, b.offsetDelta
		}
		entries = append(entries, e)
	}
	return entries
}

func (s *State) ids() []int64 { return slices.Sorted(maps.Keys(s.producers)) }

// Check says whether a leader may append a client's data batch: the header as received, before offsets are
// assigned. A repeated one of the last five batches is no error but has a Duplicate. With coordinator the
// batch comes from a group coordinator, which has no sequence numbers. The state does not change.
//
// A producer that the state does not know may start at any sequence number. A known one continues at the next
// one, or at 0 with a higher epoch.
func (s *State) Check(h *recordbatch.Header, coordinator bool) (dup Duplicate, isDup bool, err error) {
	if !h.HasProducer() || h.IsControl() {
		return dup, false, nil
	}
	p := s.producers[h.ProducerID]
	if p == nil {
		return dup, false, nil
	}
	if h.ProducerEpoch < p.epoch {
		return dup, false, fmt.Errorf("%w: producer %d: epoch %d, last seen %d", ErrInvalidProducerEpoch, h.ProducerID, h.ProducerEpoch, p.epoch)
	}
	if coordinator {
		return dup, false, nil
	}
	if h.ProducerEpoch == p.epoch {
		for i := range p.batches[:p.count] {
			b := &p.batches[i]
			if b.firstSequence() == h.BaseSequence && b.lastSequence == h.LastSequence() {
				return Duplicate{b.lastOffset - int64(b.offsetDelta), b.lastOffset, b.timestamp}, true, nil
			}
		}
		if last := p.lastSequence(); h.BaseSequence != recordbatch.AddSequence(max(last, 0), 1) || last < 0 {
			if last >= 0 || h.BaseSequence != 0 {
				return dup, false, fmt.Errorf("%w: producer %d, epoch %d: sequence %d after %d", ErrOutOfOrderSequence, h.ProducerID, p.epoch, h.BaseSequence, last)
			}
		}
	} else if h.BaseSequence != 0 {
		return dup, false, fmt.Errorf("%w: producer %d: sequence %d at the start of epoch %d, last seen epoch %d", ErrOutOfOrderSequence, h.ProducerID, h.BaseSequence, h.ProducerEpoch, p.epoch)
	}
	if p.txnFirst >= 0 && !h.IsTransactional() {
		return dup, false, fmt.Errorf("%w: producer %d: plain batch within the transaction from offset %d", ErrInvalidTxnState, h.ProducerID, p.txnFirst)
	}
	return dup, false, nil
}

// CheckMarker says whether a leader may append a marker that ends a transaction. One of transaction version 2 has to raise the epoch:
// else it came late, for a transaction that has its marker, and would end the next one (KIP-890).
func (s *State) CheckMarker(h *recordbatch.Header, c recordbatch.Control, v2 bool) error {
	p := s.producers[h.ProducerID]
	if p == nil {
		return nil
	}
	if h.ProducerEpoch < p.epoch || v2 && h.ProducerEpoch == p.epoch {
		return fmt.Errorf("%w: marker of producer %d: epoch %d, last seen %d", ErrInvalidProducerEpoch, h.ProducerID, h.ProducerEpoch, p.epoch)
	}
	if c.CoordinatorEpoch < p.coordinatorEpoch {
		return fmt.Errorf("%w: marker of producer %d: coordinator epoch %d, last seen %d", ErrCoordinatorFenced, h.ProducerID, c.CoordinatorEpoch, p.coordinatorEpoch)
	}
	return nil
}

// Outdated says whether an error of CheckMarker means that the partition has no use for the marker: it has a newer coordinator's, or its
// producer went on from there.
func Outdated(err error) bool {
	return errors.Is(err, ErrInvalidProducerEpoch) || errors.Is(err, ErrCoordinatorFenced)
}

// CheckTxn says whether a batch that was confirmed to belong to its producer's transaction when the log ended at an offset still does: a
// marker since then says that the transaction is over, and another may have begun.
func (s *State) CheckTxn(h *recordbatch.Header, confirmed int64) error {
	if p := s.producers[h.ProducerID]; p != nil && p.lastMarker >= confirmed {
		return fmt.Errorf("%w: producer %d: the transaction ended at offset %d", ErrInvalidTxnState, h.ProducerID, p.lastMarker)
	}
	return nil
}

// InTxn says whether a producer has a transaction open.
func (s *State) InTxn(producerID int64, epoch int16) bool {
	p := s.producers[producerID]
	return p != nil && p.txnFirst >= 0 && p.epoch == epoch
}

// Append takes a batch of data that is in the log, with its final offsets. It checks nothing.
func (s *State) Append(h *recordbatch.Header) {
	if !h.HasProducer() || h.IsControl() {
		return
	}
	p := s.get(h.ProducerID)
	p.setEpoch(h.ProducerEpoch)
	p.push(batch{h.LastSequence(), h.LastOffsetDelta, h.LastOffset(), h.MaxTimestamp})
	p.lastTimestamp = h.MaxTimestamp
	if h.IsTransactional() && p.txnFirst < 0 {
		p.txnFirst = h.BaseOffset
		s.ongoing = append(s.ongoing, txn{producerID: h.ProducerID, first: h.BaseOffset})
	}
}

// AppendMarker takes a batch with a control record that is in the log. If it aborts an open transaction, that
// is returned for the transaction index. Kinds other than commit and abort change nothing.
func (s *State) AppendMarker(h *recordbatch.Header, c recordbatch.Control) (aborted AbortedTxn, isAborted bool) {
	if !h.HasProducer() || c.Type != recordbatch.ControlAbort && c.Type != recordbatch.ControlCommit {
		return aborted, false
	}
	p := s.get(h.ProducerID)
	p.setEpoch(h.ProducerEpoch)
	p.coordinatorEpoch = c.CoordinatorEpoch
	p.lastTimestamp, p.lastMarker = h.MaxTimestamp, h.LastOffset()
	if p.txnFirst < 0 {
		return aborted, false
	}
	t := txn{h.ProducerID, p.txnFirst, h.LastOffset()}
	p.txnFirst = -1
	s.ongoing = slices.DeleteFunc(s.ongoing, func(o txn) bool { return o.producerID == t.producerID })
	i := sort.Search(len(s.completed), func(i int) bool { return s.completed[i].first > t.first })
	s.completed = slices.Insert(s.completed, i, t)
	if c.Type == recordbatch.ControlCommit {
		return aborted, false
	}
	stable := t.last + 1
	if len(s.ongoing) > 0 {
		stable = s.ongoing[0].first
	}
	return AbortedTxn{t.producerID, t.first, t.last, stable}, true
}

func (s *State) get(id int64) *producer {
	p := s.producers[id]
	if p == nil {
		p = &producer{epoch: -1, coordinatorEpoch: -1, txnFirst: -1, lastMarker: -1}
		s.producers[id] = p
	}
	return p
}

// FirstUnstable is the first offset of the oldest transaction that is open, or whose marker is not below the
// high watermark.
func (s *State) FirstUnstable(highWatermark int64) (int64, bool) {
	first, ok := int64(math.MaxInt64), false
	if len(s.ongoing) > 0 {
		first, ok = s.ongoing[0].first, true
	}
	for _, t := range s.completed { // in order of first
		if t.last >= highWatermark {
			if t.first < first {
				first, ok = t.first, true
			}
			break
		}
	}
	return first, ok
}

// Idlest is the open transaction whose producer has not written for longest: its first offset and the timestamp of that producer's last
// batch, in ms.
func (s *State) Idlest() (first, lastTimestamp int64, ok bool) {
	for _, t := range s.ongoing {
		if at := s.producers[t.producerID].lastTimestamp; !ok || at < lastTimestamp {
			first, lastTimestamp, ok = t.first, at, true
		}
	}
	return first, lastTimestamp, ok
}

// HighWatermarkTo forgets completed transactions that the high watermark has passed. It must not fall after.
func (s *State) HighWatermarkTo(highWatermark int64) {
	if len(s.completed) > 0 {
		s.completed = slices.DeleteFunc(s.completed, func(t txn) bool { return t.last < highWatermark })
	}
}

// TruncateBefore forgets completed transactions that ended below the new log start. Producers stay known until
// they expire (KIP-360).
func (s *State) TruncateBefore(logStart int64) {
	s.completed = slices.DeleteFunc(s.completed, func(t txn) bool { return t.last < logStart })
}

func expired(p *producer, nowMs, expirationMs int64) bool {
	return p.txnFirst < 0 && expirationMs >= 0 && nowMs-p.lastTimestamp >= expirationMs
}

// Expire forgets the producers whose last batch or marker is older than producer.id.expiration.ms and who have
// no transaction open, and returns their number.
func (s *State) Expire(nowMs, expirationMs int64) int {
	before := len(s.producers)
	maps.DeleteFunc(s.producers, func(_ int64, p *producer) bool { return expired(p, nowMs, expirationMs) })
	return before - len(s.producers)
}

// Active lists the producers in order of their ids.
func (s *State) Active() []Active {
	out := make([]Active, 0, len(s.producers))
	for _, id := range s.ids() {
		p := s.producers[id]
		out = append(out, Active{id, p.epoch, p.lastSequence(), p.lastTimestamp, p.coordinatorEpoch, p.txnFirst, p.lastOffset()})
	}
	return out
}

// Len is the number of producers.
func (s *State) Len() int { return len(s.producers) }

// Clone returns an independent copy, with all kept batches.
func (s *State) Clone() *State {
	c := &State{producers: make(map[int64]*producer, len(s.producers)), ongoing: slices.Clone(s.ongoing), completed: slices.Clone(s.completed)}
	for id, p := range s.producers {
		q := *p
		c.producers[id] = &q
	}
	return c
}
