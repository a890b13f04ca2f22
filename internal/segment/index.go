package segment

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"sort"
)

// ErrIndex says that an index is not one, or contradicts its segment. It can be rebuilt from the segment.
var ErrIndex = errors.New("damaged index")

// Entry sizes in bytes.
const (
	OffsetEntrySize = 8
	TimeEntrySize   = 12
)

// entries are fixed-size entries in memory or in a file.
type entries struct {
	data []byte      // if r is nil
	r    io.ReaderAt // else
	n    int
	size int
	buf  [TimeEntrySize]byte
}

func newEntries(data []byte, size int) entries {
	return entries{data: data, n: len(data) / size, size: size}
}

func (e *entries) at(i int) ([]byte, error) {
	if e.r == nil {
		return e.data[i*e.size : (i+1)*e.size], nil
	}
	b := e.buf[:e.size]
	if n, err := e.r.ReadAt(b, int64(i)*int64(e.size)); n < e.size {
		return nil, fmt.Errorf("%w: read entry %d: %w", ErrIndex, i, err)
	}
	return b, nil
}

// search finds the first entry for which after holds.
func (e *entries) search(after func([]byte) bool) (int, error) {
	var failed error
	i := sort.Search(e.n, func(i int) bool {
		b, err := e.at(i)
		if err != nil {
			failed = err
			return true
		}
		return after(b)
	})
	return i, failed
}

// OffsetPosition is an entry of an offset index: the last offset of a batch and the position where it begins.
type OffsetPosition struct{ Offset, Position int64 }

// OffsetIndex looks up positions:
//
//	int32 offset - base · int32 position, both rising strictly
type OffsetIndex struct {
	base int64
	e    entries
}

// NewOffsetIndex reads an index from memory. Bytes after the last whole entry are ignored.
func NewOffsetIndex(base int64, data []byte) *OffsetIndex {
	return &OffsetIndex{base, newEntries(data, OffsetEntrySize)}
}

// OpenOffsetIndex reads an index of size bytes entry by entry from r. It is not safe for concurrent use.
func OpenOffsetIndex(base int64, r io.ReaderAt, size int64) *OffsetIndex {
	return &OffsetIndex{base, entries{r: r, n: int(size / OffsetEntrySize), size: OffsetEntrySize}}
}

// Len is the number of entries.
func (x *OffsetIndex) Len() int { return x.e.n }

func (x *OffsetIndex) decode(b []byte) OffsetPosition {
	return OffsetPosition{x.base + int64(int32(binary.BigEndian.Uint32(b))), int64(int32(binary.BigEndian.Uint32(b[4:])))}
}

// At returns entry i.
func (x *OffsetIndex) At(i int) (OffsetPosition, error) {
	b, err := x.e.at(i)
	if err != nil {
		return OffsetPosition{}, err
	}
	return x.decode(b), nil
}

// before returns the entry before i, or the start of the segment.
func (x *OffsetIndex) before(i int, err error) (OffsetPosition, error) {
	if err != nil || i == 0 {
		return OffsetPosition{x.base, 0}, err
	}
	return x.At(i - 1)
}

// Lookup returns the greatest entry whose offset is at most target, or (base, 0): a batch that holds target
// does not begin before that position.
func (x *OffsetIndex) Lookup(target int64) (OffsetPosition, error) {
	return x.before(x.e.search(func(b []byte) bool { return x.decode(b).Offset > target }))
}

// FloorPosition returns the last entry at or before a position, or (base, 0).
func (x *OffsetIndex) FloorPosition(pos int64) (OffsetPosition, error) {
	return x.before(x.e.search(func(b []byte) bool { return x.decode(b).Position > pos }))
}

// CeilingPosition returns the first entry at or after a position: its offset is an upper bound for what lies
// before it. ok is false if there is none.
func (x *OffsetIndex) CeilingPosition(pos int64) (p OffsetPosition, ok bool, err error) {
	i, err := x.e.search(func(b []byte) bool { return x.decode(b).Position >= pos })
	if err != nil || i == x.e.n {
		return OffsetPosition{}, false, err
	}
	p, err = x.At(i)
	return p, err == nil, err
}

// CeilingOffset returns the first entry with an offset of at least target. ok is false if there is none.
func (x *OffsetIndex) CeilingOffset(target int64) (p OffsetPosition, ok bool, err error) {
	i, err := x.e.search(func(b []byte) bool { return x.decode(b).Offset >= target })
	if err != nil || i == x.e.n {
		return OffsetPosition{}, false, err
	}
	p, err = x.At(i)
	return p, err == nil, err
}

// Check compares the last entry with the segment: next is the offset after it, size its bytes.
func (x *OffsetIndex) Check(next, size int64) error {
	if x.e.n == 0 {
		return nil
	}
	last, err := x.At(x.e.n - 1)
	if err != nil {
		return err
	}
	if last.Offset < x.base || last.Offset >= next || last.Position <= 0 || last.Position >= size {
		return fmt.Errorf("%w: last entry %v of a segment [%d, %d) of %d bytes", ErrIndex, last, x.base, next, size)
	}
	return nil
}

// TimestampOffset is an entry of a time index: up to and including the batch that ends at Offset, no record is
// later than Timestamp.
type TimestampOffset struct{ Timestamp, Offset int64 }

// TimeIndex looks up offsets by time:
//
//	int64 timestamp · int32 offset - base, timestamps rising strictly
type TimeIndex struct {
	base int64
	e    entries
}

// NewTimeIndex reads an index from memory. Bytes after the last whole entry are ignored.
func NewTimeIndex(base int64, data []byte) *TimeIndex {
	return &TimeIndex{base, newEntries(data, TimeEntrySize)}
}

// OpenTimeIndex reads an index of size bytes entry by entry from r. It is not safe for concurrent use.
func OpenTimeIndex(base int64, r io.ReaderAt, size int64) *TimeIndex {
	return &TimeIndex{base, entries{r: r, n: int(size / TimeEntrySize), size: TimeEntrySize}}
}

// Len is the number of entries.
func (x *TimeIndex) Len() int { return x.e.n }

func (x *TimeIndex) decode(b []byte) TimestampOffset {
	return TimestampOffset{int64(binary.BigEndian.Uint64(b)), x.base + int64(int32(binary.BigEndian.Uint32(b[8:])))}
}

// At returns entry i.
func (x *TimeIndex) At(i int) (TimestampOffset, error) {
	b, err := x.e.at(i)
	if err != nil {
		return TimestampOffset{}, err
	}
	return x.decode(b), nil
}

// Lookup returns the entry with the greatest timestamp of at most target, or (-1, base).
func (x *TimeIndex) Lookup(target int64) (TimestampOffset, error) {
	i, err := x.e.search(func(b []byte) bool { return x.decode(b).Timestamp > target })
	if err != nil || i == 0 {
		return TimestampOffset{-1, x.base}, err
	}
	return x.At(i - 1)
}

// Last returns the last entry, or (-1, base).
func (x *TimeIndex) Last() (TimestampOffset, error) {
	if x.e.n == 0 {
		return TimestampOffset{-1, x.base}, nil
	}
	return x.At(x.e.n - 1)
}

// Check compares the last entry with the segment: next is the offset after it.
func (x *TimeIndex) Check(next int64) error {
	last, err := x.Last()
	if err != nil || x.e.n == 0 {
		return err
	}
	zeros := x.e.n > 1 && last == TimestampOffset{0, x.base}
	if last.Offset < x.base || last.Offset >= next || last.Timestamp < 0 || zeros {
		return fmt.Errorf("%w: last time entry %v of a segment [%d, %d)", ErrIndex, last, x.base, next)
	}
	return nil
}

// fits says whether an offset can be told from a base in 32 bits.
func fits(offset, base int64) bool { return offset >= base && offset-base <= math.MaxInt32 }
