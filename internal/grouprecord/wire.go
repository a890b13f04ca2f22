package grouprecord

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/varve-io/varve/internal/tp"
)

// The values of consumer groups are in Kafka's flexible encoding, version 0 (KIP-482): lengths are unsigned varints of n+1, 0 is null, and
// every structure ends with tagged fields.

func appendString(b []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint16(b, uint16(len(s))), s...)
}

func appendCompact(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))+1), s...)
}

func appendNullable(b []byte, s *string) []byte {
	if s == nil {
		return append(b, 0)
	}
	return appendCompact(b, *s)
}

func appendInts(b []byte, ints []int32) []byte {
	b = binary.AppendUvarint(b, uint64(len(ints))+1)
	for _, n := range ints {
		b = binary.BigEndian.AppendUint32(b, uint32(n))
	}
	return b
}

func appendStrings(b []byte, list []string) []byte {
	b = binary.AppendUvarint(b, uint64(len(list))+1)
	for _, s := range list {
		b = appendCompact(b, s)
	}
	return b
}

// appendTag0 ends a structure whose only tagged field has number 0.
func appendTag0(b, field []byte) []byte {
	b = append(b, 1, 0)
	return append(binary.AppendUvarint(b, uint64(len(field))), field...)
}

func sortedIDs[V any](m map[tp.UUID]V) []tp.UUID {
	return slices.SortedFunc(maps.Keys(m), func(a, b tp.UUID) int { return bytes.Compare(a[:], b[:]) })
}

func appendValue(b []byte, value any) []byte {
	switch v := value.(type) {
	case *GroupEpoch:
		b = binary.BigEndian.AppendUint32(b, uint32(v.Epoch))
		if v.MetadataHash == 0 {
			return append(b, 0)
		}
		return appendTag0(b, binary.BigEndian.AppendUint64(nil, uint64(v.MetadataHash)))
	case *Member:
		b = appendNullable(b, v.InstanceID)
		b = appendNullable(b, v.RackID)
		b = appendCompact(b, v.ClientID)
		b = appendCompact(b, v.ClientHost)
		b = appendStrings(b, v.Topics)
		b = appendCompact(b, v.Regex)
		b = binary.BigEndian.AppendUint32(b, uint32(v.RebalanceMs))
		b = appendNullable(b, v.Assignor)
		if v.Classic == nil {
			return appendTag0(b, []byte{0}) // null, and not the empty structure that a missing field stands for
		}
		c := binary.BigEndian.AppendUint32([]byte{1}, uint32(v.Classic.SessionMs)) // 1: the structure is not null
		c = binary.AppendUvarint(c, uint64(len(v.Classic.Protocols))+1)
		for _, p := range v.Classic.Protocols {
			c = appendCompact(c, p.Name)
			c = append(binary.AppendUvarint(c, uint64(len(p.Metadata))+1), p.Metadata...)
			c = append(c, 0)
		}
		return appendTag0(b, append(c, 0))
	case *TargetEpoch:
		b = binary.BigEndian.AppendUint32(b, uint32(v.Epoch))
		if v.At == 0 {
			return append(b, 0)
		}
		return appendTag0(b, binary.BigEndian.AppendUint64(nil, uint64(v.At)))
	case Assignment:
		b = binary.AppendUvarint(b, uint64(len(v))+1)
		for _, id := range sortedIDs(v) {
			b = append(b, id[:]...)
			b = append(appendInts(b, v[id]), 0)
		}
		return append(b, 0)
	case *Current:
		b = binary.BigEndian.AppendUint32(b, uint32(v.Epoch))
		b = binary.BigEndian.AppendUint32(b, uint32(v.PreviousEpoch))
		b = append(b, byte(v.State))
		b = appendOwned(b, v.Assigned)
		b = appendOwned(b, v.Revoking)
		return append(b, 0)
	case *Regex:
		b = appendStrings(b, v.Topics)
		b = binary.BigEndian.AppendUint64(b, uint64(v.Version))
		b = binary.BigEndian.AppendUint64(b, uint64(v.At))
		return append(b, 0)
	}
	panic(fmt.Sprintf("grouprecord: a value of type %T is never written", value))
}

func appendOwned(b []byte, owned Owned) []byte {
	b = binary.AppendUvarint(b, uint64(len(owned))+1)
	for _, id := range sortedIDs(owned) {
		b = append(b, id[:]...)
		partitions := slices.Sorted(maps.Keys(owned[id]))
		epochs := make([]int32, len(partitions))
		for i, p := range partitions {
			epochs[i] = owned[id][p]
		}
		b = appendInts(b, partitions)
		b = appendTag0(b, appendInts(nil, epochs))
	}
	return b
}

// reader reads Kafka's encoding. After the first failure all it gives is zero.
type reader struct {
	b   []byte
	err error
}

var (
	errShort  = errors.New("too few bytes")
	errLength = errors.New("length beyond the bytes there are")
	errNull   = errors.New("null where there must be a value")
)

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err = err
	}
	r.b = nil
}

func (r *reader) take(n int) []byte {
	if n < 0 || len(r.b) < n {
		r.fail(errShort)
		return nil
	}
	out := r.b[:n]
	r.b = r.b[n:]
	return out
}

func (r *reader) int8() int8 {
	if b := r.take(1); b != nil {
		return int8(b[0])
	}
	return 0
}

func (r *reader) int16() int16 {
	if b := r.take(2); b != nil {
		return int16(binary.BigEndian.Uint16(b))
	}
	return 0
}

func (r *reader) int32() int32 {
	if b := r.take(4); b != nil {
		return int32(binary.BigEndian.Uint32(b))
	}
	return 0
}

func (r *reader) int64() int64 {
	if b := r.take(8); b != nil {
		return int64(binary.BigEndian.Uint64(b))
	}
	return 0
}

func (r *reader) string() string { return string(r.take(int(r.int16()))) }

func (r *reader) uuid() (u tp.UUID) {
	copy(u[:], r.take(16))
	return u
}

func (r *reader) uvarint() uint64 {
	n, size := binary.Uvarint(r.b)
	if size <= 0 || size > 5 {
		r.fail(errShort)
		return 0
	}
	r.b = r.b[size:]
	return n
}

// length reads the length of something whose elements take at least size bytes each; -1 is null.
func (r *reader) length(size int) int {
	n := int64(r.uvarint()) - 1
	if r.err != nil {
		return -1
	}
	if n > int64(len(r.b)/size) {
		r.fail(errLength)
		return -1
	}
	return int(n)
}

func (r *reader) nullable() *string {
	n := r.length(1)
	if n < 0 {
		return nil
	}
	s := string(r.take(n))
	return &s
}

func (r *reader) compact() string {
	s := r.nullable()
	if s == nil {
		r.fail(errNull)
		return ""
	}
	return *s
}

func (r *reader) bytes() []byte {
	n := r.length(1)
	if n < 0 {
		r.fail(errNull)
		return nil
	}
	return slices.Clone(r.take(n))
}

func (r *reader) ints() []int32 {
	var out []int32
	for n := r.length(4); n > 0; n-- {
		out = append(out, r.int32())
	}
	return out
}

func (r *reader) strings() []string {
	var out []string
	for n := r.length(1); n > 0 && r.err == nil; n-- {
		out = append(out, r.compact())
	}
	return out
}

// tags reads the tagged fields that end a structure; zero gets the field with number 0, the only one there is.
func (r *reader) tags(zero func(*reader)) {
	for n := r.uvarint(); n > 0 && r.err == nil; n-- {
		tag, size := r.uvarint(), r.uvarint()
		if size > uint64(len(r.b)) {
			r.fail(errLength)
			return
		}
		field := reader{b: r.take(int(size))}
		if tag == 0 && zero != nil {
			if zero(&field); field.err != nil {
				r.fail(field.err)
			}
		}
	}
}

func (r *reader) value(kind Kind) any {
	switch kind {
	case KindGroupEpoch:
		v := &GroupEpoch{Epoch: r.int32()}
		r.tags(func(f *reader) { v.MetadataHash = f.int64() })
		return v
	case KindPartitions:
		return &PartitionMetadata{}
	case KindMember:
		v := &Member{InstanceID: r.nullable(), RackID: r.nullable(), ClientID: r.compact(), ClientHost: r.compact(), Topics: r.strings()}
		if regex := r.nullable(); regex != nil {
			v.Regex = *regex
		}
		v.RebalanceMs, v.Assignor = r.int32(), r.nullable()
		r.tags(func(f *reader) { v.Classic = f.classic() })
		return v
	case KindTargetEpoch:
		v := &TargetEpoch{Epoch: r.int32()}
		r.tags(func(f *reader) { v.At = f.int64() })
		return v
	case KindTarget:
		v := Assignment{}
		for n := r.length(18); n > 0 && r.err == nil; n-- {
			id, partitions := r.uuid(), r.ints()
			r.tags(nil)
			if slices.Sort(partitions); len(partitions) > 0 {
				v[id] = slices.Compact(partitions)
			}
		}
		r.tags(nil)
		return v
	case KindCurrent:
		v := &Current{Epoch: r.int32(), PreviousEpoch: r.int32(), State: MemberState(r.int8())}
		if v.State < Stable || v.State > UnreleasedPartitions {
			v.State = Unknown
		}
		v.Assigned, v.Revoking = r.owned(v.Epoch), r.owned(v.Epoch)
		r.tags(nil)
		return v
	case KindRegex:
		v := &Regex{Topics: r.strings(), Version: r.int64(), At: r.int64()}
		r.tags(nil)
		return v
	}
	r.fail(fmt.Errorf("kind %d has no value", kind))
	return nil
}

func (r *reader) classic() *Classic {
	if r.uvarint() == 0 {
		return nil
	}
	c := &Classic{SessionMs: r.int32()}
	for n := r.length(3); n > 0 && r.err == nil; n-- {
		p := Protocol{Name: r.compact(), Metadata: r.bytes()}
		r.tags(nil)
		c.Protocols = append(c.Protocols, p)
	}
	r.tags(nil)
	if len(c.Protocols) == 0 {
		r.fail(errors.New("classic member without a protocol"))
	}
	return c
}

// owned reads partitions with their epochs; where a record of an older version has none, they are those of the member.
func (r *reader) owned(epoch int32) Owned {
	out := Owned{}
	for n := r.length(18); n > 0 && r.err == nil; n-- {
		id, partitions := r.uuid(), r.ints()
		var epochs []int32
		r.tags(func(f *reader) { epochs = f.ints() })
		if len(partitions) == 0 {
			continue
		}
		out[id] = map[int32]int32{}
		for i, p := range partitions {
			out[id][p] = max(epoch, 0)
			if len(epochs) == len(partitions) {
				out[id][p] = epochs[i]
			}
		}
	}
	return out
}
