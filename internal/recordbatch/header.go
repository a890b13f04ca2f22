// Package recordbatch knows Kafka's record batch, format 2 (Kafka protocol guide, "Record Batch"): its header,
// checksum, records, codecs and control records, the rules by which a leader accepts one, and how to build one.
//
// A batch is a slice of bytes. Functions never keep the slices they are given, and records that an iterator
// returns share the memory of the batch. Nothing here does I/O or knows the time; all functions are safe for
// concurrent use on different slices.
//
//	 0 baseOffset int64      21 attributes int16       43 producerId int64
//	 8 batchLength int32     23 lastOffsetDelta int32  51 producerEpoch int16
//	12 leaderEpoch int32     27 baseTimestamp int64    53 baseSequence int32
//	16 magic int8            35 maxTimestamp int64     57 count int32
//	17 crc uint32, CRC-32C of 21..end                  61 records
package recordbatch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
)

// Positions in a batch.
const (
	HeaderSize = 61 // bytes before the first record
	// LengthOverhead is what batchLength leaves out: the base offset and itself.
	LengthOverhead = 12

	posLength    = 8
	posEpoch     = 12
	posMagic     = 16
	posCRC       = 17
	posAttrs     = 21
	posLastDelta = 23
	posBaseTime  = 27
	posMaxTime   = 35
	posProducer  = 43
	posProdEpoch = 51
	posSequence  = 53
	posCount     = 57
)

// Attribute bits.
const (
	attrCodec         = 0x07
	attrLogAppendTime = 0x08
	attrTransactional = 0x10
	attrControl       = 0x20
	attrDeleteHorizon = 0x40
)

// Codec is the compression of a batch's records.
type Codec int8

// The codecs of format 2.
const (
	CodecNone Codec = iota
	CodecGzip
	CodecSnappy
	CodecLZ4
	CodecZstd
)

// String is Kafka's name of the codec in configs: "none", "gzip", ….
func (c Codec) String() string {
	switch c {
	case CodecNone:
		return "none"
	case CodecGzip:
		return "gzip"
	case CodecSnappy:
		return "snappy"
	case CodecLZ4:
		return "lz4"
	case CodecZstd:
		return "zstd"
	}
	return fmt.Sprintf("codec(%d)", int8(c))
}

// What can be wrong with a batch. Kafka's code for each is in parentheses.
var (
	// ErrShort is returned when there are fewer bytes than a header, or than the header says. It wraps into
	// ErrCorrupt where a whole batch was due.
	ErrShort = errors.New("record batch is cut short")
	// ErrCorrupt: a checksum, length or compressed body is wrong (CORRUPT_MESSAGE 2).
	ErrCorrupt = errors.New("record batch is corrupt")
	// ErrInvalidRecord: well-formed, but against the rules (INVALID_RECORD 87).
	ErrInvalidRecord = errors.New("invalid record")
	// ErrInvalidTimestamp: a record is too far from the broker's clock (INVALID_TIMESTAMP 32).
	ErrInvalidTimestamp = errors.New("invalid timestamp")
	// ErrTooLarge: a batch exceeds max.message.bytes (MESSAGE_TOO_LARGE 10).
	ErrTooLarge = errors.New("record batch is too large")
	// ErrUnsupportedMagic: a message set of format 0 or 1 (UNSUPPORTED_FOR_MESSAGE_FORMAT 43).
	ErrUnsupportedMagic = errors.New("unsupported message format")
	// ErrUnsupportedCompression: a codec number that nobody defined (UNSUPPORTED_COMPRESSION_TYPE 76).
	ErrUnsupportedCompression = errors.New("unsupported compression type")
)

// Header is the fixed part of a batch. Size is the length of the whole batch in bytes.
//
// After ParseHeader: Size ≥ HeaderSize, BaseOffset ≥ 0, LastOffsetDelta ≥ 0, Count ≥ 0, and the last offset
// does not overflow.
type Header struct {
	BaseOffset      int64
	Size            int
	LeaderEpoch     int32
	CRC             uint32
	Attributes      int16
	LastOffsetDelta int32
	BaseTimestamp   int64 // the delete horizon if HasDeleteHorizon; milliseconds
	MaxTimestamp    int64
	ProducerID      int64
	ProducerEpoch   int16
	BaseSequence    int32
	Count           int32
}

// ParseHeader reads the header at the start of b, which may hold less or more than the batch. It returns
// ErrShort for fewer than HeaderSize bytes, ErrUnsupportedMagic for formats 0 and 1, and ErrCorrupt for what
// cannot be. It does not look at the checksum.
func ParseHeader(b []byte) (Header, error) {
	var h Header
	if len(b) > posMagic && (b[posMagic] == 0 || b[posMagic] == 1) {
		return h, fmt.Errorf("%w: magic %d", ErrUnsupportedMagic, b[posMagic])
	}
	if len(b) < HeaderSize {
		return h, fmt.Errorf("%w: %d bytes of a header of %d", ErrShort, len(b), HeaderSize)
	}
	b = b[:HeaderSize]
	if b[posMagic] != 2 {
		return h, fmt.Errorf("%w: magic %d", ErrCorrupt, int8(b[posMagic]))
	}
	length := int32(binary.BigEndian.Uint32(b[posLength:]))
	if length < HeaderSize-LengthOverhead {
		return h, fmt.Errorf("%w: length %d", ErrCorrupt, length)
	}
	h.BaseOffset = int64(binary.BigEndian.Uint64(b))
	h.Size = int(length) + LengthOverhead
	h.LeaderEpoch = int32(binary.BigEndian.Uint32(b[posEpoch:]))
	h.CRC = binary.BigEndian.Uint32(b[posCRC:])
	h.Attributes = int16(binary.BigEndian.Uint16(b[posAttrs:]))
	h.LastOffsetDelta = int32(binary.BigEndian.Uint32(b[posLastDelta:]))
	h.BaseTimestamp = int64(binary.BigEndian.Uint64(b[posBaseTime:]))
	h.MaxTimestamp = int64(binary.BigEndian.Uint64(b[posMaxTime:]))
	h.ProducerID = int64(binary.BigEndian.Uint64(b[posProducer:]))
	h.ProducerEpoch = int16(binary.BigEndian.Uint16(b[posProdEpoch:]))
	h.BaseSequence = int32(binary.BigEndian.Uint32(b[posSequence:]))
	h.Count = int32(binary.BigEndian.Uint32(b[posCount:]))
	switch {
	case h.BaseOffset < 0 || h.LastOffsetDelta < 0 || h.BaseOffset > math.MaxInt64-1-int64(h.LastOffsetDelta):
		return h, fmt.Errorf("%w: base offset %d, last offset delta %d", ErrCorrupt, h.BaseOffset, h.LastOffsetDelta)
	case h.Count < 0:
		return h, fmt.Errorf("%w: %d records", ErrCorrupt, h.Count)
	}
	return h, nil
}

// LastOffset is the offset of the last record, or of the last one that compaction removed.
func (h *Header) LastOffset() int64 { return h.BaseOffset + int64(h.LastOffsetDelta) }

// NextOffset is the offset after the batch.
func (h *Header) NextOffset() int64 { return h.LastOffset() + 1 }

// Codec is the compression; it may be a number that nobody defined.
func (h *Header) Codec() Codec { return Codec(h.Attributes & attrCodec) }

// LogAppendTime reports whether MaxTimestamp is the broker's, and that of all records.
func (h *Header) LogAppendTime() bool { return h.Attributes&attrLogAppendTime != 0 }

// IsTransactional reports whether the batch belongs to a transaction.
func (h *Header) IsTransactional() bool { return h.Attributes&attrTransactional != 0 }

// IsControl reports whether the records are markers, not data.
func (h *Header) IsControl() bool { return h.Attributes&attrControl != 0 }

// HasDeleteHorizon reports whether BaseTimestamp is the time from which compaction may drop tombstones.
func (h *Header) HasDeleteHorizon() bool { return h.Attributes&attrDeleteHorizon != 0 }

// HasProducer reports whether a producer id is set (idempotent or transactional).
func (h *Header) HasProducer() bool { return h.ProducerID >= 0 }

// LastSequence is the sequence number of the last record; -1 without a base sequence. Numbers wrap from
// 2^31-1 to 0.
func (h *Header) LastSequence() int32 {
	if h.BaseSequence < 0 {
		return -1
	}
	return AddSequence(h.BaseSequence, h.LastOffsetDelta)
}

// AddSequence advances a sequence number by n ≥ 0, wrapping from 2^31-1 to 0.
func AddSequence(sequence, n int32) int32 {
	if sequence > math.MaxInt32-n {
		return n - (math.MaxInt32 - sequence) - 1
	}
	return sequence + n
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Checksum is the CRC-32C of the batch, which covers the attributes and all that follows. The batch must be
// whole.
func Checksum(batch []byte) uint32 { return crc32.Checksum(batch[posAttrs:], castagnoli) }

// VerifyCRC checks the first batch of b, which must hold it whole: ErrShort or ErrCorrupt.
func VerifyCRC(b []byte) error {
	h, err := ParseHeader(b)
	if err != nil {
		return err
	}
	return h.Verify(b)
}

// Verify checks the checksum of the batch at the start of b against the header that was read from it.
func (h *Header) Verify(b []byte) error {
	if len(b) < h.Size {
		return fmt.Errorf("%w: %d of %d bytes", ErrShort, len(b), h.Size)
	}
	if got := Checksum(b[:h.Size]); got != h.CRC {
		return fmt.Errorf("%w: batch at offset %d: checksum %08x, header says %08x", ErrCorrupt, h.BaseOffset, got, h.CRC)
	}
	return nil
}

// VerifyPieces checks the checksum of the batch whose bytes are the pieces, one after the other and nothing else, against
// the header that was read from them: ErrShort or ErrCorrupt.
func (h *Header) VerifyPieces(pieces [][]byte) error {
	var sum uint32
	size, skip := 0, posAttrs
	for _, b := range pieces {
		size += len(b)
		n := min(skip, len(b))
		skip -= n
		sum = crc32.Update(sum, castagnoli, b[n:])
	}
	switch {
	case size != h.Size:
		return fmt.Errorf("%w: %d of %d bytes", ErrShort, size, h.Size)
	case sum != h.CRC:
		return fmt.Errorf("%w: batch at offset %d: checksum %08x, header says %08x", ErrCorrupt, h.BaseOffset, sum, h.CRC)
	}
	return nil
}

// SetBaseOffset writes the base offset, which the checksum does not cover. b must hold a header.
func SetBaseOffset(b []byte, offset int64) { binary.BigEndian.PutUint64(b[:8], uint64(offset)) }

// SetLeaderEpoch writes the partition leader epoch, which the checksum does not cover. b must hold a header.
func SetLeaderEpoch(b []byte, epoch int32) {
	binary.BigEndian.PutUint32(b[posEpoch:posMagic], uint32(epoch))
}

// SetMaxTimestamp writes the maximum timestamp and its kind and recomputes the checksum of the batch, which
// must be exactly b. With logAppendTime all records take that time.
func SetMaxTimestamp(b []byte, timestamp int64, logAppendTime bool) {
	attrs := binary.BigEndian.Uint16(b[posAttrs:]) &^ attrLogAppendTime
	if logAppendTime {
		attrs |= attrLogAppendTime
	}
	binary.BigEndian.PutUint16(b[posAttrs:], attrs)
	binary.BigEndian.PutUint64(b[posMaxTime:], uint64(timestamp))
	binary.BigEndian.PutUint32(b[posCRC:], Checksum(b))
}
