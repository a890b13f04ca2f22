package remoteformat

import (
	"encoding/binary"
	"fmt"
	"unicode/utf8"
)

// CustomMetadata is what the plugin may put into Kafka's own metadata of a segment. Nil fields are absent. It tells
// where a segment is even after the configured prefix has changed.
type CustomMetadata struct {
	RemoteSize *int64  // bytes of all three objects
	Prefix     *string // key prefix
	Path       *string // Key.Path
}

// Tags of the fields.
const (
	tagRemoteSize = 0
	tagPrefix     = 1
	tagPath       = 2
)

// Encode writes a block of tagged fields, nil if there are none.
func (c CustomMetadata) Encode() []byte {
	var fields []byte
	n := uint64(0)
	add := func(tag uint64, value []byte) {
		n++
		fields = binary.AppendUvarint(fields, tag)
		fields = binary.AppendUvarint(fields, uint64(len(value)))
		fields = append(fields, value...)
	}
	if c.RemoteSize != nil {
		add(tagRemoteSize, binary.AppendVarint(nil, *c.RemoteSize))
	}
	text := func(tag uint64, s *string) {
		if s != nil {
			add(tag, append(binary.AppendUvarint(nil, uint64(len(*s))+1), *s...))
		}
	}
	text(tagPrefix, c.Prefix)
	text(tagPath, c.Path)
	if n == 0 {
		return nil
	}
	return append(binary.AppendUvarint(nil, n), fields...)
}

// ParseCustomMetadata reads such a block. No bytes are no fields; unknown tags are skipped.
func ParseCustomMetadata(b []byte) (CustomMetadata, error) {
	var c CustomMetadata
	if len(b) == 0 {
		return c, nil
	}
	bad := func(what string) (CustomMetadata, error) {
		return CustomMetadata{}, fmt.Errorf("%w: %s", ErrCustomMetadata, what)
	}
	uvarint := func() (uint64, bool) {
		v, n := binary.Uvarint(b)
		if n <= 0 {
			return 0, false
		}
		b = b[n:]
		return v, true
	}
	count, ok := uvarint()
	if !ok {
		return bad("count")
	}
	last := -1
	for range count {
		tag, ok := uvarint()
		size, ok2 := uvarint()
		if !ok || !ok2 || size > uint64(len(b)) || tag > 1<<31 || int(tag) <= last {
			return bad("field")
		}
		last = int(tag)
		value := b[:size]
		b = b[size:]
		switch tag {
		case tagRemoteSize:
			v, n := binary.Varint(value)
			if n != len(value) || n == 0 {
				return bad("size")
			}
			c.RemoteSize = &v
		case tagPrefix, tagPath:
			n, w := binary.Uvarint(value)
			if w <= 0 || n == 0 || n-1 != uint64(len(value)-w) || !utf8.Valid(value[w:]) {
				return bad("text")
			}
			s := string(value[w:])
			if tag == tagPrefix {
				c.Prefix = &s
			} else {
				c.Path = &s
			}
		}
	}
	if len(b) > 0 {
		return bad("bytes left over")
	}
	return c, nil
}
