package segment

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
)

// Indexes are the indexes of a segment that grows, in memory. The slices that Offsets, Times and Txns return
// stay as they are while more is added.
type Indexes struct {
	base      int64
	interval  int64
	sinceLast int64 // bytes after the batch of the last entry, that batch included
	offsets   []byte
	times     []byte
	txns      []byte

	lastOffset int64           // of the offset index; base-1 without entries
	lastTime   int64           // of the time index; -1 without entries
	max        TimestampOffset // of the batches; (-1, -1) without any
}

// NewIndexes makes empty indexes of a segment that begins at base; interval is index.interval.bytes.
func NewIndexes(base int64, interval int) *Indexes {
	return &Indexes{base: base, interval: int64(interval), lastOffset: base - 1, lastTime: -1, max: TimestampOffset{-1, -1}}
}

// LoadIndexes continues indexes that were read from files, which have been checked, of a segment of size bytes.
func LoadIndexes(base int64, interval int, offsets, times, txns []byte, size int64) (*Indexes, error) {
	x := NewIndexes(base, interval)
	x.offsets, x.times, x.txns = offsets, times, txns
	last, err := x.OffsetIndex().before(len(offsets)/OffsetEntrySize, nil)
	if err != nil {
		return nil, err
	}
	if len(offsets) > 0 {
		x.lastOffset = last.Offset
	}
	x.sinceLast = size - last.Position
	if x.max, err = x.TimeIndex().Last(); err != nil {
		return nil, err
	}
	if x.lastTime = x.max.Timestamp; x.lastTime < 0 {
		x.max.Offset = -1
	}
	return x, nil
}

// Add takes the batch at a position. Kafka's rule: a batch gets an entry if more than the interval lies between
// it and the one that got the last.
func (x *Indexes) Add(h *recordbatch.Header, pos int64) {
	last := h.LastOffset()
	if h.MaxTimestamp > x.max.Timestamp {
		x.max = TimestampOffset{h.MaxTimestamp, last}
	}
	if x.sinceLast > x.interval && last > x.lastOffset && fits(last, x.base) {
		x.offsets = binary.BigEndian.AppendUint32(x.offsets, uint32(last-x.base))
		x.offsets = binary.BigEndian.AppendUint32(x.offsets, uint32(pos))
		x.lastOffset = last
		x.addTime()
		x.sinceLast = 0
	}
	x.sinceLast += int64(h.Size)
}

// Observe takes the timestamp of a batch that is in the offset index, or has no place there, already.
func (x *Indexes) Observe(h *recordbatch.Header) {
	if h.MaxTimestamp > x.max.Timestamp {
		x.max = TimestampOffset{h.MaxTimestamp, h.LastOffset()}
	}
}

// SetTxns replaces the transaction index.
func (x *Indexes) SetTxns(b []byte) { x.txns = b }

func (x *Indexes) addTime() {
	if x.max.Timestamp > x.lastTime && fits(x.max.Offset, x.base) {
		x.times = binary.BigEndian.AppendUint64(x.times, uint64(x.max.Timestamp))
		x.times = binary.BigEndian.AppendUint32(x.times, uint32(x.max.Offset-x.base))
		x.lastTime = x.max.Timestamp
	}
}

// AddTxn takes a transaction that a marker in this segment aborted.
func (x *Indexes) AddTxn(t producerstate.AbortedTxn) { x.txns = AppendTxn(x.txns, t) }

// Seal adds the last time entry, so that the index's end is the segment's maximum.
func (x *Indexes) Seal() { x.addTime() }

// Offsets is the offset index as a file.
func (x *Indexes) Offsets() []byte { return x.offsets[:len(x.offsets):len(x.offsets)] }

// Times is the time index as a file.
func (x *Indexes) Times() []byte { return x.times[:len(x.times):len(x.times)] }

// Txns is the transaction index as a file; nil without aborted transactions.
func (x *Indexes) Txns() []byte { return x.txns[:len(x.txns):len(x.txns)] }

// OffsetIndex looks up in the entries so far.
func (x *Indexes) OffsetIndex() *OffsetIndex { return NewOffsetIndex(x.base, x.Offsets()) }

// TimeIndex looks up in the entries so far.
func (x *Indexes) TimeIndex() *TimeIndex { return NewTimeIndex(x.base, x.Times()) }

// Max is the maximum timestamp and the last offset of the first batch that has it; (-1, -1) without any.
func (x *Indexes) Max() TimestampOffset { return x.max }

// BuildIndexes makes the offset and time index of the batches in [from, to) of r for a segment that begins
// there, at offset base: their positions count from `from`. Remote segments may begin in the middle of a local
// one, and of its batch (DeleteRecords). It reads headers only.
func BuildIndexes(r io.ReaderAt, from, to, base int64, interval int) (*Indexes, error) {
	x := NewIndexes(base, interval)
	s := NewScanner(r, from, to)
	defer s.Release()
	for s.Next() {
		h := s.Header()
		begins := h.BaseOffset >= base || s.Pos() == from && h.LastOffset() >= base
		if !begins || !fits(h.LastOffset(), base) {
			return nil, &CorruptError{s.Pos(), fmt.Errorf("%w: offset %d in a segment from %d", recordbatch.ErrCorrupt, h.BaseOffset, base)}
		}
		x.Add(s.Header(), s.Pos()-from)
	}
	if s.Err() != nil {
		return nil, fmt.Errorf("build indexes: %w", s.Err())
	}
	x.Seal()
	return x, nil
}
