package reader

import (
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

// tail is where a read of a partition ended.
type tail struct {
	topic     tp.UUID
	partition int32
	offset    int64
}

// tails remembers the ends of recent reads; one that begins at such an end is sequential. Guarded by Reader.mu.
type tails struct {
	seen map[tail]bool
	fifo []tail
}

const maxTails = 4096

func (t *tails) begin(r *Reader, s *tier.Segment, offset int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return offset == s.Start || t.seen[tail{s.TopicID, s.Partition, offset}]
}

func (t *tails) end(r *Reader, s *tier.Segment, next int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	x := tail{s.TopicID, s.Partition, next}
	if t.seen[x] {
		return
	}
	if len(t.fifo) >= maxTails {
		delete(t.seen, t.fifo[0])
		t.fifo = t.fifo[1:]
	}
	t.seen[x] = true
	t.fifo = append(t.fifo, x)
}

// ahead fetches what a sequential reader will want next, up to ReadAheadBytes behind at and into later segments. It
// never waits: where a manifest is missing it is asked for, and the next read goes on from there.
func (r *Reader) ahead(segs tier.Segments, at position) {
	budget := r.o.ReadAheadBytes
	for s := at; s.seg != nil && budget > 0; s = (position{segs.Find(s.seg.End + 1), 0}) {
		m := r.peek(s.seg)
		if m == nil {
			return
		}
		if !r.prefetch(s.seg, m, s.pos, s.pos+budget) {
			return
		}
		budget -= m.Size() - s.pos
	}
}

// peek returns a cached manifest, or asks for it and returns nil.
func (r *Reader) peek(seg *tier.Segment) *remoteformat.Segment {
	p, _, _ := r.begin(key{seg.ID, kindManifest, 0}, r.o.Workers, r.fetchManifest(seg))
	if p == nil {
		return nil
	}
	return p.segment
}

// bounds of a range in an offset index.
func endPosition(x *segment.OffsetIndex, pos, size int64) (int64, error) {
	p, ok, err := x.CeilingPosition(pos)
	if err != nil || !ok {
		return size, err
	}
	return min(p.Position, size), nil
}
