package recordbatch

import (
	"encoding/binary"
	"fmt"
)

// Record is one record. When an iterator gave it, Key, Value and the headers share the batch's memory.
type Record struct {
	Offset    int64
	Timestamp int64  // milliseconds
	Key       []byte // nil is null
	Value     []byte // nil is null
	Headers   []RecordHeader
}

// RecordHeader is one header of a record. Names may repeat and be empty; a nil value is null.
type RecordHeader struct {
	Key   string
	Value []byte
}

// Iterator walks the records of a batch:
//
//	it, err := recordbatch.Records(batch, limit)
//	for it.Next() { use(it.Record()) }
//	err = it.Err()
type Iterator struct {
	h    Header
	b    []byte
	left int32
	rec  Record
	err  error
}

// Records opens the first batch of b, which must be whole, and decompresses it if needed, to at most limit
// bytes (0: DefaultDecompressLimit). It does not verify the checksum.
func Records(b []byte, limit int) (*Iterator, error) {
	h, err := ParseHeader(b)
	if err != nil {
		return nil, err
	}
	if len(b) < h.Size {
		return nil, fmt.Errorf("%w: %d of %d bytes", ErrShort, len(b), h.Size)
	}
	body := b[HeaderSize:h.Size]
	if h.Codec() != CodecNone {
		if body, err = decompress(h.Codec(), nil, body, limit); err != nil {
			return nil, fmt.Errorf("batch at offset %d: %w", h.BaseOffset, err)
		}
	}
	return &Iterator{h: h, b: body, left: h.Count}, nil
}

// Header is the header of the batch.
func (it *Iterator) Header() *Header { return &it.h }

// Next moves to the next record. It ends at the batch's record count, or with an error.
func (it *Iterator) Next() bool {
	if it.err != nil {
		return false
	}
	if it.left == 0 {
		if len(it.b) != 0 {
			it.err = fmt.Errorf("%w: batch at offset %d: %d bytes after the last record", ErrInvalidRecord, it.h.BaseOffset, len(it.b))
		}
		return false
	}
	p, rest, err := parseRecord(it.b)
	if err != nil {
		it.err = fmt.Errorf("batch at offset %d, %d records from its end: %w", it.h.BaseOffset, it.left, err)
		return false
	}
	it.left--
	it.b = rest
	it.rec.Offset = it.h.BaseOffset + p.offsetDelta
	it.rec.Timestamp = it.h.BaseTimestamp + p.timeDelta
	if it.h.LogAppendTime() {
		it.rec.Timestamp = it.h.MaxTimestamp
	}
	it.rec.Key, it.rec.Value = p.key, p.value
	it.rec.Headers = it.rec.Headers[:0]
	for b := p.headers; len(b) > 0; {
		// parseRecord has walked these bytes, so that no length can fail.
		var rh RecordHeader
		var key []byte
		key, b, _ = lengthBytes(b)
		rh.Key = string(key)
		rh.Value, b, _ = lengthBytes(b)
		it.rec.Headers = append(it.rec.Headers, rh)
	}
	return true
}

// Record is the current record; it is overwritten by Next.
func (it *Iterator) Record() *Record { return &it.rec }

// Err is what ended the walk early, or nil.
func (it *Iterator) Err() error { return it.err }

// parsed is a record as it lies in the batch.
type parsed struct {
	timeDelta   int64
	offsetDelta int64
	key, value  []byte
	headers     []byte
}

var errRecord = fmt.Errorf("%w: malformed", ErrInvalidRecord)

// parseRecord reads the record at the start of b and checks all its lengths; it allocates nothing.
func parseRecord(b []byte) (p parsed, rest []byte, err error) {
	size, n := varint(b)
	if n <= 0 || size < 0 || size > int64(len(b)-n) {
		return p, nil, errRecord
	}
	rest = b[n+int(size):]
	b = b[n : n+int(size)]
	if len(b) == 0 {
		return p, nil, errRecord
	}
	b = b[1:] // attributes: none are defined
	if p.timeDelta, n = varint(b); n <= 0 {
		return p, nil, errRecord
	}
	b = b[n:]
	if p.offsetDelta, n = varint(b); n <= 0 || p.offsetDelta != int64(int32(p.offsetDelta)) {
		return p, nil, errRecord
	}
	b = b[n:]
	var ok bool
	if p.key, b, ok = lengthBytes(b); !ok {
		return p, nil, errRecord
	}
	if p.value, b, ok = lengthBytes(b); !ok {
		return p, nil, errRecord
	}
	count, n := varint(b)
	if n <= 0 || count < 0 || count > int64(len(b)-n) {
		return p, nil, errRecord
	}
	b = b[n:]
	p.headers = b
	for ; count > 0; count-- {
		var name []byte
		if name, b, ok = lengthBytes(b); !ok || name == nil {
			return p, nil, errRecord
		}
		if _, b, ok = lengthBytes(b); !ok {
			return p, nil, errRecord
		}
	}
	if len(b) != 0 {
		return p, nil, errRecord
	}
	return p, rest, nil
}

// varint reads a zig-zag number; most are of one byte.
func varint(b []byte) (int64, int) {
	if len(b) > 0 && b[0] < 0x80 {
		u := int64(b[0])
		return u>>1 ^ -(u & 1), 1
	}
	return binary.Varint(b)
}

// lengthBytes reads a length, -1 for null, and that many bytes.
func lengthBytes(b []byte) (field, rest []byte, ok bool) {
	size, n := varint(b)
	if n <= 0 || size < -1 || size > int64(len(b)-n) {
		return nil, nil, false
	}
	if size < 0 {
		return nil, b[n:], true
	}
	end := n + int(size)
	return b[n:end:end], b[end:], true
}
