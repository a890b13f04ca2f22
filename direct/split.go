package direct

import (
	"fmt"

	"github.com/varve-io/varve/internal/recordbatch"
)

// piece is one whole batch with a correct checksum. Its bytes are data[at:at+size] of what was fed, or own.
type piece struct {
	own         []byte // a batch that lay across the border of two ranges
	at, size    int
	first, last int64
	abort       int64 // producer id of an abort marker, -1 for other batches
}

// splitter cuts the bytes of a location, which arrive in order and cut anywhere, into batches. Progress is measured in
// offsets of batch headers, never in bytes: the first batch delivered holds the asked offset, each other one begins right
// behind the one before it, and the last ends at the location's end. Objects with gaps (compaction) are legal in Kafka,
// but a gap looks just like a lost batch, and the broker knows the difference. It is pure.
type splitter struct {
	next     int64 // offset that the next batch must bring
	end      int64 // last offset of the location
	left     int64 // bytes of the location that were not fed yet
	maxBatch int
	started  bool
	carry    []byte // start of a batch whose rest is in the next range
}

// feed takes the next bytes. What it returns is good also when it returns an error; then nothing more may be fed.
func (s *splitter) feed(data []byte) (out []piece, err error) {
	s.left -= int64(len(data))
	at := 0
	for len(s.carry) > 0 {
		need := recordbatch.HeaderSize
		if len(s.carry) >= need {
			h, err := s.header(s.carry, int64(len(data)-at))
			if err != nil {
				return out, err
			}
			if need = h.Size; len(s.carry) == need {
				if out, err = s.take(out, &h, s.carry, piece{own: s.carry}); err != nil {
					return out, err
				}
				s.carry = nil
				break
			}
		}
		n := min(need-len(s.carry), len(data)-at)
		if n == 0 {
			return out, s.over()
		}
		s.carry = append(s.carry, data[at:at+n]...)
		at += n
	}
	for at < len(data) && !s.ended() {
		rest := data[at:]
		if len(rest) < recordbatch.HeaderSize {
			s.carry = append([]byte(nil), rest...)
			break
		}
		h, err := s.header(rest, 0)
		if err != nil {
			return out, err
		}
		if len(rest) < h.Size {
			s.carry = append(make([]byte, 0, min(h.Size, 1<<20+len(rest))), rest...)
			break
		}
		if out, err = s.take(out, &h, rest[:h.Size], piece{at: at, size: h.Size}); err != nil {
			return out, err
		}
		at += h.Size
	}
	return out, s.over()
}

// header parses the header at the start of b; ahead is how many bytes of the present range follow b.
func (s *splitter) header(b []byte, ahead int64) (recordbatch.Header, error) {
	h, err := recordbatch.ParseHeader(b)
	switch {
	case err != nil:
		err = fmt.Errorf("%w: where offset %d is due: %w", ErrDamaged, s.next, err)
	case int64(h.Size) > int64(len(b))+ahead+s.left:
		err = fmt.Errorf("%w: batch at offset %d of %d bytes leaves its segment", ErrDamaged, h.BaseOffset, h.Size)
	case h.Size > s.maxBatch:
		err = fmt.Errorf("%w: %d bytes at offset %d", errTooLarge, h.Size, h.BaseOffset)
	}
	return h, err
}

// take checks a whole batch and appends it, unless it lies below the asked offset.
func (s *splitter) take(out []piece, h *recordbatch.Header, b []byte, p piece) ([]piece, error) {
	if !s.started && h.LastOffset() < s.next {
		return out, nil
	}
	if err := h.Verify(b); err != nil {
		return out, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if h.BaseOffset > s.next || s.started && h.BaseOffset != s.next || h.LastOffset() > s.end {
		return out, fmt.Errorf("%w: batch of offsets %d to %d where %d of at most %d is due", ErrDamaged, h.BaseOffset, h.LastOffset(), s.next, s.end)
	}
	p.first, p.last, p.abort = h.BaseOffset, h.LastOffset(), -1
	if h.IsControl() {
		c, ok, err := recordbatch.ControlOf(b)
		if err != nil {
			return out, fmt.Errorf("%w: %w", ErrDamaged, err)
		}
		if ok && c.Type == recordbatch.ControlAbort {
			p.abort = h.ProducerID
		}
	}
	s.started, s.next = true, h.NextOffset()
	return append(out, p), nil
}

// ended reports whether the last offset was delivered. What the range has behind it is none of the reader's business.
func (s *splitter) ended() bool { return s.started && s.next > s.end }

// over checks the end of the location.
func (s *splitter) over() error {
	if s.left > 0 || len(s.carry) == 0 && s.next == s.end+1 {
		return nil
	}
	return fmt.Errorf("%w: range ends at offset %d of %d with %d bytes of a batch", ErrDamaged, s.next, s.end, len(s.carry))
}
