package recordbatch

import (
	"encoding/binary"
	"fmt"
)

// ControlType is the kind of a control record.
type ControlType int16

// The kinds that a partition's log may hold.
const (
	ControlAbort        ControlType = 0
	ControlCommit       ControlType = 1
	ControlLeaderChange ControlType = 2
)

// Control is a control record. CoordinatorEpoch is that of the transaction coordinator which ended the
// transaction, and -1 for other kinds.
type Control struct {
	Type             ControlType
	CoordinatorEpoch int32
}

// ParseControl reads the key and value of a control record.
func ParseControl(key, value []byte) (Control, error) {
	c := Control{CoordinatorEpoch: -1}
	if len(key) < 4 || int16(binary.BigEndian.Uint16(key)) < 0 {
		return c, fmt.Errorf("%w: control record key %.16x", ErrInvalidRecord, key)
	}
	c.Type = ControlType(binary.BigEndian.Uint16(key[2:]))
	if c.Type == ControlAbort || c.Type == ControlCommit {
		if len(value) < 6 || int16(binary.BigEndian.Uint16(value)) < 0 {
			return c, fmt.Errorf("%w: value %.16x of a transaction marker", ErrInvalidRecord, value)
		}
		c.CoordinatorEpoch = int32(binary.BigEndian.Uint32(value[2:]))
	}
	return c, nil
}

// ControlOf reads the first record of a control batch. ok is false when compaction left none in it.
func ControlOf(batch []byte) (c Control, ok bool, err error) {
	it, err := Records(batch, 1<<20)
	if err != nil {
		return c, false, err
	}
	if !it.Header().IsControl() {
		return c, false, fmt.Errorf("%w: batch at offset %d is no control batch", ErrInvalidRecord, it.Header().BaseOffset)
	}
	if !it.Next() {
		return c, false, it.Err()
	}
	c, err = ParseControl(it.rec.Key, it.rec.Value)
	return c, err == nil, err
}

// Marker describes the batch that ends a transaction on a partition.
type Marker struct {
	ProducerID       int64
	ProducerEpoch    int16
	Commit           bool
	CoordinatorEpoch int32
	Timestamp        int64 // milliseconds
	BaseOffset       int64
	LeaderEpoch      int32
}

// EndTxnMarker builds that batch.
func EndTxnMarker(m Marker) []byte {
	var key [4]byte
	if m.Commit {
		key[3] = byte(ControlCommit)
	}
	var value [6]byte
	binary.BigEndian.PutUint32(value[2:], uint32(m.CoordinatorEpoch))
	b := NewBuilder()
	b.BaseOffset, b.LeaderEpoch = m.BaseOffset, m.LeaderEpoch
	b.ProducerID, b.ProducerEpoch = m.ProducerID, m.ProducerEpoch
	b.Transactional, b.Control = true, true
	b.Add(Record{Timestamp: m.Timestamp, Key: key[:], Value: value[:]})
	out, err := b.Build()
	if err != nil {
		// One record without compression always fits.
		panic("recordbatch: " + err.Error())
	}
	return out
}
