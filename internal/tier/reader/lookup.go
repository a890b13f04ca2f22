package reader

import (
	"context"
	"fmt"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tier"
)

// Aborted returns the aborted transactions with records in [from, upTo), from the transaction indexes of the segment
// that holds from and of later ones. complete is false where the local log may hold more: ask it for the same range.
func (r *Reader) Aborted(ctx context.Context, segs tier.Segments, from, upTo int64) (txns []producerstate.AbortedTxn, complete bool, err error) {
	for _, s := range segs {
		if s.State != tier.CopyFinished || s.End < from || s.TxnIndexEmpty {
			continue
		}
		index, err := r.Index(ctx, s, remoteformat.TransactionIndex)
		if err != nil {
			return nil, false, err
		}
		if txns, complete, err = segment.SearchTxns(txns, index, from, upTo); err != nil {
			return nil, false, &CorruptError{s.Object(r.o.Prefix, remoteformat.ObjectIndexes), s.Start, err}
		}
		if complete {
			return txns, true, nil
		}
	}
	return txns, false, nil
}

// TimestampOffset is a record found by its time. Epoch is the leader epoch of its batch.
type TimestampOffset struct {
	Timestamp, Offset int64
	Epoch             int32
}

// OffsetForTimestamp finds the first record of the tier, at logStart or above, that is not earlier than ts (ms).
func (r *Reader) OffsetForTimestamp(ctx context.Context, segs tier.Segments, ts, logStart int64) (TimestampOffset, bool, error) {
	for _, s := range segs {
		if s.State != tier.CopyFinished || s.MaxTimestamp < ts || s.End < logStart {
			continue
		}
		if t, ok, err := r.searchTime(ctx, s, ts, logStart); ok || err != nil {
			return t, ok, err
		}
	}
	return TimestampOffset{}, false, nil
}

// MaxTimestamp finds the first record with the greatest timestamp of the tier, at logStart or above.
func (r *Reader) MaxTimestamp(ctx context.Context, segs tier.Segments, logStart int64) (TimestampOffset, bool, error) {
	var best *tier.Segment
	for _, s := range segs {
		if s.State == tier.CopyFinished && s.End >= logStart && (best == nil || s.MaxTimestamp > best.MaxTimestamp) {
			best = s
		}
	}
	if best == nil {
		return TimestampOffset{}, false, nil
	}
	if t, ok, err := r.searchTime(ctx, best, best.MaxTimestamp, logStart); ok || err != nil || best.Start >= logStart {
		return t, ok, err
	}
	// The record is below the log start: look at all that is left.
	var found TimestampOffset
	ok := false
	for _, s := range segs {
		if s.State != tier.CopyFinished || s.End < logStart || ok && s.MaxTimestamp <= found.Timestamp {
			continue
		}
		t, some, err := r.maxFrom(ctx, s, logStart)
		if err != nil {
			return TimestampOffset{}, false, err
		}
		if some && (!ok || t.Timestamp > found.Timestamp) {
			found, ok = t, true
		}
	}
	return found, ok, nil
}

// searchTime finds the first record of a segment that is at logStart or above and not earlier than ts.
func (r *Reader) searchTime(ctx context.Context, seg *tier.Segment, ts, logStart int64) (TimestampOffset, bool, error) {
	index, err := r.Index(ctx, seg, remoteformat.TimestampIndex)
	if err != nil {
		return TimestampOffset{}, false, err
	}
	floor, err := segment.NewTimeIndex(seg.Start, index).Lookup(ts)
	if err != nil {
		return TimestampOffset{}, false, &CorruptError{seg.Object(r.o.Prefix, remoteformat.ObjectIndexes), seg.Start, err}
	}
	found := TimestampOffset{}
	ok := false
	err = r.records(ctx, seg, max(floor.Offset, logStart), func(h *recordbatch.Header) bool { return h.MaxTimestamp >= ts },
		func(h *recordbatch.Header, x *recordbatch.Record) bool {
			if x.Timestamp < ts || x.Offset < logStart {
				return true
			}
			found, ok = TimestampOffset{x.Timestamp, x.Offset, h.LeaderEpoch}, true
			return false
		})
	return found, ok, err
}

func (r *Reader) maxFrom(ctx context.Context, seg *tier.Segment, logStart int64) (TimestampOffset, bool, error) {
	found := TimestampOffset{}
	ok := false
	err := r.records(ctx, seg, logStart, func(h *recordbatch.Header) bool { return !ok || h.MaxTimestamp > found.Timestamp },
		func(h *recordbatch.Header, x *recordbatch.Record) bool {
			if x.Offset >= logStart && (!ok || x.Timestamp > found.Timestamp) {
				found, ok = TimestampOffset{x.Timestamp, x.Offset, h.LeaderEpoch}, true
			}
			return true
		})
	return found, ok, err
}

// records calls fn for the records of the batches from the one that holds offset on, of those that want asks for, until
// it returns false.
func (r *Reader) records(ctx context.Context, seg *tier.Segment, offset int64, want func(*recordbatch.Header) bool, fn func(*recordbatch.Header, *recordbatch.Record) bool) error {
	m, err := r.manifest(ctx, seg)
	if err != nil {
		return err
	}
	pos, err := r.floor(ctx, seg, m, max(offset, seg.Start))
	if err != nil {
		return err
	}
	w := r.walk(ctx, seg, m, pos)
	for w.Next() {
		h := w.Header()
		if h.LastOffset() < offset || !want(h) {
			continue
		}
		batch, err := w.Batch()
		if err != nil {
			return err
		}
		it, err := recordbatch.Records(batch.Bytes(), recordbatch.DefaultDecompressLimit)
		if err != nil {
			return w.corrupt(err)
		}
		for it.Next() {
			if !fn(h, it.Record()) {
				return nil
			}
		}
		if err := it.Err(); err != nil {
			return w.corrupt(err)
		}
	}
	return w.err()
}

// Locate returns the plain bytes [start, end) of the segment's log that a direct reader of offset should fetch: whole
// batches, at least one, about maxBytes of them, to the granularity of the offset index.
func (r *Reader) Locate(ctx context.Context, seg *tier.Segment, offset int64, maxBytes int64) (start, end int64, err error) {
	if offset < seg.Start || offset > seg.End {
		return 0, 0, fmt.Errorf("%w: %d in segment %s of %d to %d", ErrNotInTier, offset, seg.ID, seg.Start, seg.End)
	}
	m, err := r.manifest(ctx, seg)
	if err != nil {
		return 0, 0, err
	}
	if start, err = r.floor(ctx, seg, m, offset); err != nil {
		return 0, 0, err
	}
	index, err := r.Index(ctx, seg, remoteformat.OffsetIndex)
	if err != nil {
		return 0, 0, err
	}
	// The end lies behind the entry after the batch that holds offset, or the batch might be cut.
	x := segment.NewOffsetIndex(seg.Start, index)
	least := start + 1
	if p, ok, err := x.CeilingOffset(offset); err != nil {
		return 0, 0, &CorruptError{seg.Object(r.o.Prefix, remoteformat.ObjectIndexes), offset, err}
	} else if !ok {
		least = m.Size()
	} else {
		least = max(least, p.Position+1)
	}
	end, err = endPosition(x, max(least, start+max(min(maxBytes, m.Size()), 0)), m.Size())
	if err == nil && end <= start {
		err = fmt.Errorf("offset index of %d entries contradicts itself", x.Len())
	}
	if err != nil {
		return 0, 0, &CorruptError{seg.Object(r.o.Prefix, remoteformat.ObjectIndexes), offset, err}
	}
	return start, end, nil
}

// LeaderEpochs returns the lineage of the partition up to the segment's end, as stored with it.
func (r *Reader) LeaderEpochs(ctx context.Context, seg *tier.Segment) ([]leaderepoch.Entry, error) {
	b, err := r.Index(ctx, seg, remoteformat.LeaderEpochIndex)
	if err != nil {
		return nil, err
	}
	entries, err := leaderepoch.Parse(b)
	if err != nil {
		return nil, &CorruptError{seg.Object(r.o.Prefix, remoteformat.ObjectIndexes), seg.Start, err}
	}
	return entries, nil
}

// ProducerSnapshot returns the state of producers at the segment's end + 1, as a snapshot file that has been checked;
// nil if the segment has none.
func (r *Reader) ProducerSnapshot(ctx context.Context, seg *tier.Segment) ([]byte, error) {
	b, err := r.Index(ctx, seg, remoteformat.ProducerSnapshot)
	if err != nil || len(b) == 0 {
		return nil, err
	}
	if _, err := producerstate.ParseSnapshot(b); err != nil {
		return nil, &CorruptError{seg.Object(r.o.Prefix, remoteformat.ObjectIndexes), seg.Start, err}
	}
	return b, nil
}
