package reader

import (
	"context"
	"fmt"

	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tier"
)

// Result is what Read returns: whole batches with correct checksums.
type Result struct {
	Records Pieces
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
			if res.Records.Size() > 0 {
				break
			}
			return res, err
		}
		end = at
		if full {
			break
		}
	}
	if res.Records.Size() > 0 {
		res.Records = res.Records.clipped()
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
	if size, to := r.blockSize(m), pos+int64(maxBytes-res.Records.Size()); (to-1)/size > pos/size {
		r.prefetch(seg, m, pos, to) // several blocks at once; the first comes first
	}
	w, have := r.walk(ctx, seg, m, pos), res.Records.Size()
	for w.Next() {
		h := w.Header()
		if h.LastOffset() < res.NextOffset {
			continue
		}
		if h.NextOffset() > upTo {
			return true, position{seg, w.Pos()}, nil
		}
		if have+h.Size > maxBytes && (have > 0 || !minOne) {
			return true, position{seg, w.Pos()}, nil
		}
		batch, err := w.Batch()
		if err != nil {
			return false, at, err
		}
		if have == 0 {
			res.FirstOffset = h.BaseOffset
		}
		res.Records, have = res.Records.join(batch), have+h.Size
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
