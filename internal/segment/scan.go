package segment

import (
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/varve-io/varve/internal/recordbatch"
)

// CorruptError says where bytes are no batch. Err tells why; errors.Is(err, recordbatch.ErrShort) holds when
// the batch is merely cut off by the end.
type CorruptError struct {
	Position int64
	Err      error
}

func (e *CorruptError) Error() string { return fmt.Sprintf("position %d: %v", e.Position, e.Err) }

// Unwrap is Err.
func (e *CorruptError) Unwrap() error { return e.Err }

// Window is how much a scanner reads at a time if batches are smaller, in bytes.
const (
	headerWindow = 4 << 10
	batchWindow  = 64 << 10
)

// windows holds idle read buffers; nothing of their contents is used again.
var windows = sync.Pool{New: func() any { return new([]byte) }}

// Scanner walks the batches of a range of bytes:
//
//	s := segment.NewScanner(r, pos, end)
//	defer s.Release()
//	for s.Next() { use(s.Header(), s.Pos()) }
//	err := s.Err()
type Scanner struct {
	r         io.ReaderAt
	next, end int64 // of the batch after the current one; of the range
	pos       int64
	h         recordbatch.Header
	err       error
	window    *[]byte
	from      int64 // position of the window's first byte
	ahead     int   // bytes to read at once
}

// NewScanner walks the batches in [pos, end) of r by their headers. Only bytes that exist are read, so that the
// memory it takes is bounded by the largest batch that Batch was asked for.
func NewScanner(r io.ReaderAt, pos, end int64) *Scanner {
	w, _ := windows.Get().(*[]byte)
	*w = (*w)[:0]
	return &Scanner{r: r, next: pos, end: end, window: w, ahead: headerWindow}
}

// NewBatchScanner is NewScanner for callers that read most batches whole.
func NewBatchScanner(r io.ReaderAt, pos, end int64) *Scanner {
	s := NewScanner(r, pos, end)
	s.ahead = batchWindow
	return s
}

// Release gives the buffer back. The scanner, and bytes from Batch, must not be used after.
func (s *Scanner) Release() {
	if s.window != nil && cap(*s.window) <= 1<<20 {
		windows.Put(s.window)
	}
	s.window = nil
}

// Next moves to the next batch. It ends at the end of the range or with an error.
func (s *Scanner) Next() bool {
	if s.err != nil || s.next >= s.end {
		return false
	}
	s.pos = s.next
	n := min(int64(recordbatch.HeaderSize), s.end-s.pos)
	b, err := s.view(s.pos, int(n))
	if err != nil {
		s.err = err
		return false
	}
	h, err := recordbatch.ParseHeader(b)
	if err == nil && int64(h.Size) > s.end-s.pos {
		err = fmt.Errorf("%w: batch of %d bytes, %d left", recordbatch.ErrShort, h.Size, s.end-s.pos)
	}
	if err != nil {
		s.err = &CorruptError{s.pos, err}
		return false
	}
	s.h = h
	s.next = s.pos + int64(h.Size)
	return true
}

// view returns n bytes at pos, which must lie in the range.
func (s *Scanner) view(pos int64, n int) ([]byte, error) {
	if off := pos - s.from; off >= 0 && off+int64(n) <= int64(len(*s.window)) {
		return (*s.window)[off : off+int64(n)], nil
	}
	size := int(min(s.end-pos, int64(max(n, s.ahead))))
	if cap(*s.window) < size {
		*s.window = make([]byte, size)
	}
	*s.window = (*s.window)[:size]
	s.from = pos
	if got, err := s.r.ReadAt(*s.window, pos); got < size {
		*s.window = (*s.window)[:0]
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, fmt.Errorf("read %d bytes at %d: %w", size, pos, err)
	}
	return (*s.window)[:n], nil
}

// Header is the header of the current batch and Pos its position.
func (s *Scanner) Header() *recordbatch.Header { return &s.h }

// Pos is the position of the current batch.
func (s *Scanner) Pos() int64 { return s.pos }

// End is the position after the current batch, and the start position before the first Next.
func (s *Scanner) End() int64 { return s.next }

// Batch reads the current batch whole. The bytes are valid until the next call.
func (s *Scanner) Batch() ([]byte, error) { return s.view(s.pos, s.h.Size) }

// Err is what ended the walk early: a *CorruptError, or the reader's error.
func (s *Scanner) Err() error { return s.err }
