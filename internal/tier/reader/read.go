package reader

import (
	"context"
	"errors"
	"fmt"

	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tier"
)

// Result is what Read returns: whole batches with correct checksums.
type Result struct {
	Records []byte
	// FirstOffset is the base offset of the first batch, which may lie below the offset asked for; without
	// batches it is the offset asked for.
	FirstOffset int64
	// NextOffset is where to go on: behind the last batch, or behind the segments that hold nothing more.
	NextOffset int64
}

// Read returns batches from the one that holds offset, across segments, up to maxBytes and below upTo (exclusive). With
// minOne the first batch is returned even if it is larger. Intact batches before a damaged one are returned
// without an error; the next read then fails with a *CorruptError, so that nothing is skipped in silence.
func (r *Reader) Read(ctx context.Context, segs tier.Segments, offset int64, maxBytes int, upTo int64, minOne bool) (Result, error) {
	res := Result{FirstOffset: offset, NextOffset: offset}
	if offset >= upTo {
		return res, nil
	}
	if segs.Find(offset) == nil {
		return res, fmt.Errorf("%w: %d", ErrNotInTier, offset)
	}
	sequential := r.tails.begin(r, segs.Find(offset), offset)
	var end position
	for {
		seg := segs.Find(res.NextOffset)
		if seg == nil || res.NextOffset >= upTo {
			break
		}
		full, at, err := r.readSegment(ctx, seg, &res, maxBytes, upTo, minOne)
		if err != nil {
			if len(res.Records) > 0 {
				break
			}
			return res, err
		}
		end = at
		if full {
			break
		}
	}
	if len(res.Records) > 0 {
		r.tails.end(r, segs.Find(offset), res.NextOffset)
		if sequential {
			r.ahead(segs, end)
		}
	}
	return res, nil
}

// position is a place in a segment's plain log.
type position struct {
	seg *tier.Segment
	pos int64
}

// readSegment adds batches of one segment to res. full says that nothing of later segments may follow.
func (r *Reader) readSegment(ctx context.Context, seg *tier.Segment, res *Result, maxBytes int, upTo int64, minOne bool) (full bool, at position, err error) {
	m, err := r.manifest(ctx, seg)
	if err != nil {
		return false, at, err
	}
	pos := int64(0)
	if res.NextOffset > seg.Start {
		if pos, err = r.floor(ctx, seg, m, res.NextOffset); err != nil {
			return false, at, err
		}
	}
	if size, to := r.blockSize(m), pos+int64(maxBytes-len(res.Records)); (to-1)/size > pos/size {
		r.prefetch(seg, m, pos, to) // several blocks at once; the first comes first
	}
	w := r.walk(ctx, seg, m, pos)
	defer func() { w.Release() }() // of the scanner that it has at the end
	for w.Next() {
		h := w.Header()
		if h.LastOffset() < res.NextOffset {
			continue
		}
		if h.NextOffset() > upTo {
			return true, position{seg, w.Pos()}, nil
		}
		if len(res.Records)+h.Size > maxBytes && (len(res.Records) > 0 || !minOne) {
			return true, position{seg, w.Pos()}, nil
		}
		first := len(res.Records) == 0
		if first {
			res.Records = make([]byte, 0, max(0, min(int64(maxBytes), m.Size()-w.Pos(), 1<<20)))
		}
		if res.Records, err = w.batch(res.Records); err != nil {
			return false, at, err
		}
		if first {
			res.FirstOffset = h.BaseOffset
		}
		res.NextOffset = h.NextOffset()
	}
	if err := w.err(); err != nil {
		return false, at, err
	}
	// Compaction may have removed the last offsets of the range.
	res.NextOffset = max(res.NextOffset, seg.End+1)
	return false, position{seg, m.Size()}, nil
}

// floor is a position at or before the batch that holds offset.
func (r *Reader) floor(ctx context.Context, seg *tier.Segment, m *remoteformat.Segment, offset int64) (int64, error) {
	index, err := r.Index(ctx, seg, remoteformat.OffsetIndex)
	if err != nil {
		return 0, err
	}
	p, err := segment.NewOffsetIndex(seg.Start, index).Lookup(offset)
	if err == nil && (p.Position < 0 || p.Position >= max(m.Size(), 1) || p.Offset < seg.Start || p.Offset > seg.End) {
		err = fmt.Errorf("offset index points at %d of %d bytes for offset %d", p.Position, m.Size(), p.Offset)
	}
	if err != nil {
		return 0, &CorruptError{seg.Object(r.o.Prefix, remoteformat.ObjectIndexes), offset, err}
	}
	return p.Position, nil
}

// walker walks the batches of a segment and checks that their offsets rise within the segment's.
type walker struct {
	*segment.Scanner
	l    *logReader
	next int64 // least offset that the next batch may have
	bad  error
}

func (r *Reader) walk(ctx context.Context, seg *tier.Segment, m *remoteformat.Segment, pos int64) *walker {
	l := &logReader{ctx: ctx, r: r, seg: seg, m: m}
	return &walker{Scanner: segment.NewScanner(l, pos, m.Size()), l: l, next: seg.Start}
}

// Next moves to the next batch; it ends at the end of the segment or with err.
func (w *walker) Next() bool {
	if w.bad != nil {
		return false
	}
	if !w.Scanner.Next() {
		// The scanner reads a little ahead. Where that failed, what lies before the failure is still good.
		from, to := w.End(), w.l.failedAt
		if w.Err() == nil || w.l.failed == nil || to <= from {
			return false
		}
		w.Release()
		w.Scanner = segment.NewScanner(w.l, from, to)
		if !w.Scanner.Next() {
			w.bad = w.wrap(w.l.failed)
			return false
		}
	}
	h := w.Header()
	if h.BaseOffset < w.next || h.LastOffset() > w.l.seg.End {
		w.bad = w.corrupt(fmt.Errorf("batch of offsets %d to %d where %d to %d is due", h.BaseOffset, h.LastOffset(), w.next, w.l.seg.End))
		return false
	}
	w.next = h.NextOffset()
	return true
}

// batch appends the current batch, whose checksum is right, to dst.
func (w *walker) batch(dst []byte) ([]byte, error) {
	h := w.Header()
	out, err := w.l.append(dst, w.Pos(), int64(h.Size))
	if err == nil {
		if err = recordbatch.VerifyCRC(out[len(dst):]); err == nil {
			return out, nil
		}
		err = &segment.CorruptError{Position: w.Pos(), Err: err}
	}
	w.next = h.BaseOffset
	return dst, w.wrap(err)
}

// err is what ended the walk early.
func (w *walker) err() error {
	if w.bad == nil {
		if w.l.failed != nil {
			w.bad = w.wrap(w.l.failed)
		} else {
			w.bad = w.wrap(w.Err())
		}
	}
	return w.bad
}

// wrap says in an error about damage from which offset on it matters.
func (w *walker) wrap(err error) error {
	if c := (*CorruptError)(nil); errors.As(err, &c) {
		return &CorruptError{c.Object, w.next, c.Err}
	}
	if c := (*segment.CorruptError)(nil); errors.As(err, &c) {
		return w.corrupt(err)
	}
	return err
}

// corrupt makes the error and drops the cached bytes, which may have been damaged on their way only.
func (w *walker) corrupt(err error) error {
	seg, m, r := w.l.seg, w.l.m, w.l.r
	r.forgetBlocks(seg, m, w.Pos(), min(w.Pos()+recordbatch.HeaderSize+int64(w.Header().Size), m.Size()))
	return &CorruptError{seg.Object(r.o.Prefix, remoteformat.ObjectLog), w.next, err}
}
