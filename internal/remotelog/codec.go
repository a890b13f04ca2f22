package remotelog

import (
	"encoding/binary"
	"fmt"
	"unicode/utf8"

	"github.com/varve-io/varve/internal/leaderepoch"
)

const (
	frameVersion  = 1
	recordVersion = 0
	// tagTxnIndexEmpty is a tagged field that brokers write since Kafka 4.
	tagTxnIndexEmpty = 0
)

// Parse reads the value of a record. Tagged fields that are not known are skipped; ErrUnknown is another version or kind.
// The result shares no memory with b.
func Parse(b []byte) (Record, error) {
	d := decoder{b: b}
	frame, key, version := d.uvarint(), d.uvarint(), d.uvarint()
	switch {
	case d.bad:
		return nil, fmt.Errorf("%w: %d bytes", ErrMalformed, len(b))
	case frame != frameVersion || key > 3 || version != recordVersion:
		return nil, fmt.Errorf("%w: frame %d, kind %d, version %d", ErrUnknown, frame, key, version)
	}
	var r Record
	switch key {
	case 0:
		s := &Segment{}
		d.segmentID(&s.PartitionID, (*[16]byte)(&s.ID))
		d.segment(s)
		r = s
	case 1:
		u := &Update{}
		d.segmentID(&u.PartitionID, (*[16]byte)(&u.ID))
		u.Broker, u.EventTime = d.int32(), d.int64()
		u.Custom, u.State = d.nullableBytes(), State(d.int8())
		d.tags(nil)
		r = u
	case 2:
		p := &PartitionDelete{}
		d.partition(&p.PartitionID)
		p.Broker, p.EventTime, p.State = d.int32(), d.int64(), d.int8()
		d.tags(nil)
		r = p
	default:
		s := &Snapshot{}
		d.uuid((*[16]byte)(&s.ID))
		d.segment(&s.Segment)
		r = s
	}
	if d.bad || len(d.b) > 0 {
		return nil, fmt.Errorf("%w: kind %d of %d bytes", ErrMalformed, key, len(b))
	}
	return r, nil
}

// Marshal writes the value of a record as Kafka does.
func Marshal(r Record) []byte {
	b := binary.AppendUvarint([]byte{frameVersion}, r.key())
	e := encoder{append(b, recordVersion)}
	switch r := r.(type) {
	case *Segment:
		e.segmentID(r.PartitionID, r.ID)
		e.segment(r)
	case *Update:
		e.segmentID(r.PartitionID, r.ID)
		e.int32(r.Broker)
		e.int64(r.EventTime)
		e.nullableBytes(r.Custom)
		e.b = append(e.b, byte(r.State), 0)
	case *PartitionDelete:
		e.partition(r.PartitionID)
		e.int32(r.Broker)
		e.int64(r.EventTime)
		e.b = append(e.b, byte(r.State), 0)
	case *Snapshot:
		e.b = append(e.b, r.ID[:]...)
		e.segment(&r.Segment)
	}
	return e.b
}

// decoder reads Kafka's flexible encoding; once bad it returns zeros.
type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) take(n uint64) []byte {
	if d.bad || n > uint64(len(d.b)) {
		d.bad, d.b = true, nil
		return nil
	}
	out := d.b[:n]
	d.b = d.b[n:]
	return out
}

func (d *decoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.b)
	if d.bad || n <= 0 {
		d.bad, d.b = true, nil
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) int8() int8 {
	if b := d.take(1); b != nil {
		return int8(b[0])
	}
	return 0
}

func (d *decoder) int32() int32 {
	if b := d.take(4); b != nil {
		return int32(binary.BigEndian.Uint32(b))
	}
	return 0
}

func (d *decoder) int64() int64 {
	if b := d.take(8); b != nil {
		return int64(binary.BigEndian.Uint64(b))
	}
	return 0
}

func (d *decoder) uuid(u *[16]byte) { copy(u[:], d.take(16)) }

func (d *decoder) nullableBytes() []byte {
	n := d.uvarint()
	if n == 0 {
		return nil
	}
	return append([]byte{}, d.take(n-1)...)
}

func (d *decoder) string() string {
	n := d.uvarint()
	if n == 0 {
		d.bad = true // not nullable
		return ""
	}
	b := d.take(n - 1)
	d.bad = d.bad || !utf8.Valid(b)
	return string(b)
}

// tags reads a section of tagged fields.
func (d *decoder) tags(known func(tag uint64, value []byte)) {
	last := int64(-1)
	for n := d.uvarint(); n > 0 && !d.bad; n-- {
		tag := d.uvarint()
		value := d.take(d.uvarint())
		if d.bad = d.bad || tag > 1<<32 || int64(tag) <= last; d.bad {
			return
		}
		if last = int64(tag); known != nil {
			known(tag, value)
		}
	}
}

func (d *decoder) partition(p *PartitionID) {
	p.Topic = d.string()
	d.uuid((*[16]byte)(&p.TopicID))
	p.Index = d.int32()
	d.tags(nil)
}

func (d *decoder) segmentID(p *PartitionID, id *[16]byte) {
	d.partition(p)
	d.uuid(id)
	d.tags(nil)
}

func (d *decoder) segment(s *Segment) {
	s.Start, s.End, s.Broker, s.MaxTimestamp, s.EventTime = d.int64(), d.int64(), d.int32(), d.int64(), d.int64()
	for n := d.uvarint(); n > 1 && !d.bad; n-- {
		s.Epochs = append(s.Epochs, leaderepoch.Entry{Epoch: d.int32(), StartOffset: d.int64()})
		d.tags(nil)
	}
	s.Size, s.Custom, s.State = d.int32(), d.nullableBytes(), State(d.int8())
	d.tags(func(tag uint64, value []byte) {
		if tag == tagTxnIndexEmpty {
			s.TxnIndexEmpty = len(value) == 1 && value[0] != 0
			d.bad = d.bad || len(value) != 1
		}
	})
}

type encoder struct{ b []byte }

func (e *encoder) int32(v int32) { e.b = binary.BigEndian.AppendUint32(e.b, uint32(v)) }
func (e *encoder) int64(v int64) { e.b = binary.BigEndian.AppendUint64(e.b, uint64(v)) }

func (e *encoder) nullableBytes(b []byte) {
	if b == nil {
		e.b = append(e.b, 0)
		return
	}
	e.b = append(binary.AppendUvarint(e.b, uint64(len(b))+1), b...)
}

func (e *encoder) partition(p PartitionID) {
	e.b = append(binary.AppendUvarint(e.b, uint64(len(p.Topic))+1), p.Topic...)
	e.b = append(e.b, p.TopicID[:]...)
	e.int32(p.Index)
	e.b = append(e.b, 0)
}

func (e *encoder) segmentID(p PartitionID, id [16]byte) {
	e.partition(p)
	e.b = append(append(e.b, id[:]...), 0)
}

func (e *encoder) segment(s *Segment) {
	e.int64(s.Start)
	e.int64(s.End)
	e.int32(s.Broker)
	e.int64(s.MaxTimestamp)
	e.int64(s.EventTime)
	e.b = binary.AppendUvarint(e.b, uint64(len(s.Epochs))+1)
	for _, x := range s.Epochs {
		e.int32(x.Epoch)
		e.int64(x.StartOffset)
		e.b = append(e.b, 0)
	}
	e.int32(s.Size)
	e.nullableBytes(s.Custom)
	e.b = append(e.b, byte(s.State))
	if s.TxnIndexEmpty {
		e.b = append(e.b, 1, tagTxnIndexEmpty, 1, 1)
	} else {
		e.b = append(e.b, 0)
	}
}
