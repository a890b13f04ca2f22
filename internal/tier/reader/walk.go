package reader

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/tier"
)

// walker walks the batches of a segment where they lie in its cached blocks, and checks that their offsets rise within the
// segment's.
type walker struct {
	l        *logReader
	pos, end int64 // of the current batch
	h        recordbatch.Header
	next     int64 // least offset that the next batch may have
	bad      error
	batch    Pieces // the current batch, once asked for
	head     [recordbatch.HeaderSize]byte
}

func (r *Reader) walk(ctx context.Context, seg *tier.Segment, m *remoteformat.Segment, pos int64) *walker {
	return &walker{l: &logReader{ctx: ctx, r: r, seg: seg, m: m}, end: pos, next: seg.Start}
}

// Header is the header of the current batch and Pos its position.
func (w *walker) Header() *recordbatch.Header { return &w.h }

// Pos is the position of the current batch.
func (w *walker) Pos() int64 { return w.pos }

// Next moves to the next batch; it ends at the end of the segment or with err.
func (w *walker) Next() bool {
	size := w.l.m.Size()
	if w.bad != nil || w.end >= size {
		return false
	}
	w.pos, w.h = w.end, recordbatch.Header{}
	head, err := w.l.pieces(w.batch[:0], w.pos, min(recordbatch.HeaderSize, size-w.pos))
	if err != nil {
		w.bad = w.wrap(err)
		return false
	}
	flat := head[0]
	if len(head) > 1 { // it lies across blocks
		flat = head.AppendTo(w.head[:0])
	}
	w.batch = head[:0]
	h, err := recordbatch.ParseHeader(flat)
	if err == nil && int64(h.Size) > size-w.pos {
		err = fmt.Errorf("%w: batch of %d bytes, %d left", recordbatch.ErrShort, h.Size, size-w.pos)
	}
	inside := w.pos == 0 && h.BaseOffset < w.next && h.LastOffset() >= w.next // the range begins in the middle of a batch
	if err == nil && (h.BaseOffset < w.next && !inside || h.LastOffset() > w.l.seg.End) {
		err = fmt.Errorf("batch of offsets %d to %d where %d to %d is due", h.BaseOffset, h.LastOffset(), w.next, w.l.seg.End)
	}
	if err != nil {
		w.bad = w.corrupt(fmt.Errorf("position %d: %w", w.pos, err))
		return false
	}
	w.h, w.end, w.next = h, w.pos+int64(h.Size), h.NextOffset()
	return true
}

// Batch returns the current batch, whose checksum is right. The slice of pieces is good until the next call.
func (w *walker) Batch() (Pieces, error) {
	var err error
	if w.batch, err = w.l.pieces(w.batch[:0], w.pos, int64(w.h.Size)); err == nil {
		if err = w.h.VerifyPieces(w.batch); err == nil {
			return w.batch, nil
		}
		w.next = w.h.BaseOffset
		return nil, w.corrupt(fmt.Errorf("position %d: %w", w.pos, err))
	}
	w.next = w.h.BaseOffset
	return nil, w.wrap(err)
}

// err is what ended the walk early.
func (w *walker) err() error { return w.bad }

// wrap says in an error about damage from which offset on it matters.
func (w *walker) wrap(err error) error {
	if c := (*CorruptError)(nil); errors.As(err, &c) {
		return &CorruptError{c.Object, w.next, c.Err}
	}
	return err
}

// corrupt makes the error and drops the cached bytes, which may have been damaged on their way only.
func (w *walker) corrupt(err error) error {
	seg, m, r := w.l.seg, w.l.m, w.l.r
	r.forgetBlocks(seg, m, w.pos, min(w.pos+recordbatch.HeaderSize+int64(w.h.Size), m.Size()))
	return &CorruptError{seg.Object(r.o.Prefix, remoteformat.ObjectLog), w.next, err}
}

// logReader gives the plain log of a segment to one call, block by block.
type logReader struct {
	ctx context.Context
	r   *Reader
	seg *tier.Segment
	m   *remoteformat.Segment
	// block is the block used last, or what is intact of it, and start its position.
	block []byte
	start int64
	// failed is the first failure and failedAt the position where it begins.
	failed   error
	failedAt int64
}

// at returns the bytes from a position to the end of its block.
func (l *logReader) at(pos int64) ([]byte, error) {
	if pos >= l.m.Size() {
		return nil, io.ErrUnexpectedEOF
	}
	if n := pos - l.start; n >= 0 && n < int64(len(l.block)) {
		return l.block[n:], nil
	}
	if l.failed != nil && pos >= l.failedAt {
		return nil, l.failed
	}
	size := l.r.blockSize(l.m)
	number := int(pos / size)
	b, err := l.r.load(l.ctx, key{l.seg.ID, kindBlock, number}, l.r.fetchBlock(l.seg, l.m, number))
	l.start, l.block = int64(number)*size, nil
	if b != nil {
		l.block = b.data
	}
	if err != nil {
		l.failed, l.failedAt = err, l.start+int64(len(l.block))
		if pos >= l.failedAt {
			return nil, err
		}
	}
	return l.block[pos-l.start:], nil
}

// pieces appends to dst where n bytes from a position lie.
func (l *logReader) pieces(dst Pieces, pos, n int64) (Pieces, error) {
	for n > 0 {
		b, err := l.at(pos)
		if err != nil {
			return dst, err
		}
		b = b[:min(n, int64(len(b)))]
		dst = append(dst, b)
		pos, n = pos+int64(len(b)), n-int64(len(b))
	}
	return dst, nil
}
