package producerstate

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// ErrMalformed is wrapped by all errors of ParseSnapshot.
var ErrMalformed = errors.New("malformed producer snapshot")

// Entry is a producer as a snapshot file keeps it: its last batch alone.
type Entry struct {
	ProducerID       int64
	Epoch            int16
	LastSequence     int32 // -1 without a batch
	LastOffset       int64 // -1 without a batch
	OffsetDelta      int32 // last minus first offset of the batch
	Timestamp        int64 // milliseconds
	CoordinatorEpoch int32 // -1 before the first marker
	TxnFirstOffset   int64 // -1 if no transaction is open
}

const (
	snapshotVersion = 1
	snapshotHead    = 10 // version, checksum, count
	entrySize       = 46
)

// MarshalSnapshot writes Kafka's producer snapshot file, version 1:
//
//	int16 version · uint32 CRC-32C of what follows · int32 count · entries of
//	int64 producer id · int16 epoch · int32 last sequence · int64 last offset · int32 offset delta ·
//	int64 timestamp · int32 coordinator epoch · int64 first offset of the open transaction
func MarshalSnapshot(entries []Entry) []byte {
	be := binary.BigEndian
	b := make([]byte, snapshotHead, snapshotHead+entrySize*len(entries))
	be.PutUint16(b, snapshotVersion)
	be.PutUint32(b[6:], uint32(len(entries)))
	for _, e := range entries {
		b = be.AppendUint64(b, uint64(e.ProducerID))
		b = be.AppendUint16(b, uint16(e.Epoch))
		b = be.AppendUint32(b, uint32(e.LastSequence))
		b = be.AppendUint64(b, uint64(e.LastOffset))
		b = be.AppendUint32(b, uint32(e.OffsetDelta))
		b = be.AppendUint64(b, uint64(e.Timestamp))
		b = be.AppendUint32(b, uint32(e.CoordinatorEpoch))
		b = be.AppendUint64(b, uint64(e.TxnFirstOffset))
	}
	be.PutUint32(b[2:], crc32.Checksum(b[6:], crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// ParseSnapshot reads that file. Another version, a wrong checksum or a wrong length are errors.
func ParseSnapshot(b []byte) ([]Entry, error) {
	be := binary.BigEndian
	if len(b) < snapshotHead {
		return nil, fmt.Errorf("%w: %d bytes", ErrMalformed, len(b))
	}
	if v := int16(be.Uint16(b)); v != snapshotVersion {
		return nil, fmt.Errorf("%w: version %d, want %d", ErrMalformed, v, snapshotVersion)
	}
	if got, want := crc32.Checksum(b[6:], crc32.MakeTable(crc32.Castagnoli)), be.Uint32(b[2:]); got != want {
		return nil, fmt.Errorf("%w: checksum %08x, file says %08x", ErrMalformed, got, want)
	}
	count := int64(int32(be.Uint32(b[6:])))
	if count < 0 || count*entrySize != int64(len(b)-snapshotHead) {
		return nil, fmt.Errorf("%w: %d entries in %d bytes", ErrMalformed, count, len(b))
	}
	entries := make([]Entry, count)
	for i := range entries {
		p := b[snapshotHead+i*entrySize:]
		entries[i] = Entry{
			ProducerID:       int64(be.Uint64(p)),
			Epoch:            int16(be.Uint16(p[8:])),
			LastSequence:     int32(be.Uint32(p[10:])),
			LastOffset:       int64(be.Uint64(p[14:])),
			OffsetDelta:      int32(be.Uint32(p[22:])),
			Timestamp:        int64(be.Uint64(p[26:])),
			CoordinatorEpoch: int32(be.Uint32(p[34:])),
			TxnFirstOffset:   int64(be.Uint64(p[38:])),
		}
		if entries[i].OffsetDelta < 0 {
			return nil, fmt.Errorf("%w: entry %d: offset delta %d", ErrMalformed, i, entries[i].OffsetDelta)
		}
	}
	return entries, nil
}
