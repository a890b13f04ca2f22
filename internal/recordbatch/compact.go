package recordbatch

import (
	"encoding/binary"
	"fmt"
	"math"
)

// Compactor rewrites batches for a compaction, which takes one after the other: what it makes is overwritten by the next, so that a log
// of any length costs the memory of its largest batch. It is for one caller at a time.
type Compactor struct{ records, out, scratch []byte }

// Compact rewrites a whole batch without the records that keep refuses, as compaction does (KIP-534 for horizon, Kafka's
// MemoryRecords.filterTo for the rest): base offset, last offset, producer, sequence and leader epoch stay, so that nothing that
// is known of the batch from its header changes. A horizon that is not negative becomes the batch's delete horizon, in ms; records
// keep their times. Compressed records are decompressed to at most limit bytes (0: DefaultDecompressLimit) and compressed again.
//
// Where nothing changes, out is batch itself. With kept == 0 out is a header without records. The checksum of batch is not looked at.
func (c *Compactor) Compact(batch []byte, limit int, horizon int64, keep func(*Record) bool) (out []byte, kept int, err error) {
	it, err := Records(batch, limit)
	if err != nil {
		return nil, 0, err
	}
	h, body := it.h, it.b
	batch = batch[:h.Size]
	rebase := horizon >= 0
	base := h.BaseTimestamp
	if rebase {
		base = horizon
	}
	records := c.records[:0]
	defer func() { c.records = records }()
	latest := int64(math.MinInt64)
	for {
		from := len(body) - len(it.b)
		if !it.Next() {
			break
		}
		r := it.Record()
		if !keep(r) {
			continue
		}
		kept++
		latest = max(latest, r.Timestamp)
		if raw := body[from : len(body)-len(it.b)]; !rebase {
			records = append(records, raw...)
		} else {
			records, c.scratch = appendRecord(records, c.scratch, r, base, int32(r.Offset-h.BaseOffset))
		}
	}
	if it.err != nil {
		return nil, 0, it.err
	}
	if kept == int(h.Count) && !rebase {
		return batch, kept, nil
	}
	out = append(c.out[:0], batch[:HeaderSize]...)
	attrs := binary.BigEndian.Uint16(batch[posAttrs:])
	if kept == 0 {
		attrs &^= attrCodec | attrDeleteHorizon
		base, latest = h.MaxTimestamp, h.MaxTimestamp
	} else {
		if out, err = compress(h.Codec(), 0, out, records); err != nil {
			return nil, 0, err
		}
		if rebase {
			attrs |= attrDeleteHorizon
		}
		if h.LogAppendTime() {
			latest = h.MaxTimestamp
		}
	}
	c.out = out
	if len(out)-LengthOverhead > math.MaxInt32 {
		return nil, 0, fmt.Errorf("%w: %d bytes once compacted", ErrTooLarge, len(out))
	}
	be := binary.BigEndian
	be.PutUint32(out[posLength:], uint32(len(out)-LengthOverhead))
	be.PutUint16(out[posAttrs:], attrs)
	be.PutUint64(out[posBaseTime:], uint64(base))
	be.PutUint64(out[posMaxTime:], uint64(latest))
	be.PutUint32(out[posCount:], uint32(kept))
	be.PutUint32(out[posCRC:], Checksum(out))
	return out, kept, nil
}
