package recordbatch

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
)

// Builder makes one batch. Set the exported fields before Build; NewBuilder sets them to "none".
type Builder struct {
	BaseOffset    int64
	LeaderEpoch   int32
	Codec         Codec
	Level         int // of the codec; 0 is its default
	ProducerID    int64
	ProducerEpoch int16
	BaseSequence  int32
	Transactional bool
	Control       bool
	LogAppendTime bool

	records   []byte
	scratch   []byte
	count     int32
	lastDelta int32
	firstTime int64
	maxTime   int64
}

// NewBuilder returns a builder of a plain batch at offset 0: no producer, no leader epoch, no codec.
func NewBuilder() *Builder {
	return &Builder{LeaderEpoch: -1, ProducerID: -1, ProducerEpoch: -1, BaseSequence: -1, lastDelta: -1}
}

// Grow makes room for records whose keys, values and headers take so many bytes.
func (b *Builder) Grow(records, bytes int) {
	const overhead = 16 // of a record: seven numbers, most of one byte
	b.records = slices.Grow(b.records, bytes+records*overhead)
}

// Add appends a record right after the one before it; its Offset is ignored.
func (b *Builder) Add(r Record) { b.add(b.lastDelta+1, &r) }

// AddAt appends a record at r.Offset, which must lie above those before it and at or above BaseOffset, with
// gaps such as compaction leaves.
func (b *Builder) AddAt(r Record) { b.add(int32(r.Offset-b.BaseOffset), &r) }

func (b *Builder) add(delta int32, r *Record) {
	if b.count == 0 {
		b.firstTime, b.maxTime = r.Timestamp, r.Timestamp
	}
	b.maxTime = max(b.maxTime, r.Timestamp)
	b.records, b.scratch = appendRecord(b.records, b.scratch, r, b.firstTime, delta)
	b.count++
	b.lastDelta = delta
}

// appendRecord appends a record of a batch with that base timestamp; scratch is memory to be given back to the next call.
func appendRecord(to, scratch []byte, r *Record, baseTime int64, delta int32) (records, again []byte) {
	s := append(scratch[:0], 0)
	s = binary.AppendVarint(s, r.Timestamp-baseTime)
	s = binary.AppendVarint(s, int64(delta))
	s = appendBytes(s, r.Key)
	s = appendBytes(s, r.Value)
	s = binary.AppendVarint(s, int64(len(r.Headers)))
	for _, h := range r.Headers {
		s = binary.AppendVarint(s, int64(len(h.Key)))
		s = append(s, h.Key...)
		s = appendBytes(s, h.Value)
	}
	to = binary.AppendVarint(to, int64(len(s)))
	return append(to, s...), s
}

func appendBytes(s, field []byte) []byte {
	if field == nil {
		return binary.AppendVarint(s, -1)
	}
	s = binary.AppendVarint(s, int64(len(field)))
	return append(s, field...)
}

// Count is the number of records added, and Size that of their bytes before compression.
func (b *Builder) Count() int { return int(b.count) }

// Size is the size of the batch before compression, in bytes.
func (b *Builder) Size() int { return HeaderSize + len(b.records) }

// Build returns the batch. A builder without records, or with more than a batch can hold, is an error.
func (b *Builder) Build() ([]byte, error) {
	if b.count == 0 {
		return nil, fmt.Errorf("%w: build of an empty batch", ErrInvalidRecord)
	}
	out := make([]byte, HeaderSize, HeaderSize+len(b.records))
	out, err := compress(b.Codec, b.Level, out, b.records)
	if err != nil {
		return nil, err
	}
	if len(out)-LengthOverhead > math.MaxInt32 {
		return nil, fmt.Errorf("%w: %d bytes", ErrTooLarge, len(out))
	}
	attrs := uint16(b.Codec)
	for _, f := range []struct {
		set bool
		bit uint16
	}{{b.LogAppendTime, attrLogAppendTime}, {b.Transactional, attrTransactional}, {b.Control, attrControl}} {
		if f.set {
			attrs |= f.bit
		}
	}
	be := binary.BigEndian
	be.PutUint64(out, uint64(b.BaseOffset))
	be.PutUint32(out[posLength:], uint32(len(out)-LengthOverhead))
	be.PutUint32(out[posEpoch:], uint32(b.LeaderEpoch))
	out[posMagic] = 2
	be.PutUint16(out[posAttrs:], attrs)
	be.PutUint32(out[posLastDelta:], uint32(b.lastDelta))
	be.PutUint64(out[posBaseTime:], uint64(b.firstTime))
	be.PutUint64(out[posMaxTime:], uint64(b.maxTime))
	be.PutUint64(out[posProducer:], uint64(b.ProducerID))
	be.PutUint16(out[posProdEpoch:], uint16(b.ProducerEpoch))
	be.PutUint32(out[posSequence:], uint32(b.BaseSequence))
	be.PutUint32(out[posCount:], uint32(b.count))
	be.PutUint32(out[posCRC:], Checksum(out))
	return out, nil
}
