package reader

import (
	"context"
	"errors"
	"fmt"

	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/tier"
)

// bytes fetches a range of an object, all of it where n < 0, up to limit. Of an object that ends within the range it
// returns what there is, with a *CorruptError.
func (r *Reader) bytes(ctx context.Context, seg *tier.Segment, o remoteformat.Object, off, n, limit int64) ([]byte, error) {
	name := seg.Object(r.o.Prefix, o)
	if err := wait(ctx, r.o.FetchRate, max(n, 0)); err != nil {
		return nil, fmt.Errorf("remote read: %w", err)
	}
	var b []byte
	var err error
	if n < 0 {
		b, err = objstore.ReadAll(ctx, r.o.Bucket, name, limit)
	} else {
		b, err = objstore.ReadRange(ctx, r.o.Bucket, name, off, n)
	}
	switch {
	case errors.Is(err, objstore.ErrNotFound):
		return nil, fmt.Errorf("%w: %w", ErrSegmentGone, err)
	case errors.Is(err, objstore.ErrShortBody):
		// A broken connection passes; an object that ends before the range does stays.
		if info, serr := r.o.Bucket.Stat(ctx, name); serr == nil && n >= 0 && info.Size < off+n {
			if b, err = objstore.ReadRange(ctx, r.o.Bucket, name, off, max(info.Size-off, 0)); err == nil {
				err = &CorruptError{name, seg.Start, fmt.Errorf("object has %d bytes, needed are %d to %d", info.Size, off, off+n)}
			}
			return b, err
		}
	}
	if err == nil {
		r.o.Metrics.fetched.Add(float64(len(b)))
	}
	return b, err
}

// manifest returns the segment's decoder.
func (r *Reader) manifest(ctx context.Context, seg *tier.Segment) (*remoteformat.Segment, error) {
	p, err := r.load(ctx, key{seg.ID, kindManifest, 0}, r.fetchManifest(seg))
	if err != nil {
		return nil, err
	}
	return p.segment, nil
}

func (r *Reader) fetchManifest(seg *tier.Segment) func(context.Context) (*piece, error) {
	return func(ctx context.Context) (*piece, error) {
		b, err := r.bytes(ctx, seg, remoteformat.ObjectManifest, 0, -1, remoteformat.MaxManifestSize)
		if err != nil {
			return nil, err
		}
		name := seg.Object(r.o.Prefix, remoteformat.ObjectManifest)
		m, err := remoteformat.Open(b, r.o.Keyring)
		if errors.Is(err, remoteformat.ErrManifest) {
			return nil, &CorruptError{name, seg.Start, err}
		}
		if err != nil {
			return nil, fmt.Errorf("remote segment %s: %w", seg.ID, err)
		}
		if seg.Size > 0 && m.Size() != seg.Size {
			return nil, &CorruptError{name, seg.Start, fmt.Errorf("manifest of %d bytes for a segment of %d", m.Size(), seg.Size)}
		}
		if got := m.Manifest().Metadata; got.ID != seg.ID {
			return nil, &CorruptError{name, seg.Start, fmt.Errorf("manifest of segment %s", got.ID)}
		}
		return &piece{segment: m, cost: 4*int64(len(b)) + 512}, nil
	}
}

// Index returns the plain bytes of one index of a segment, nil if the segment has none of that kind. They must not be
// changed.
func (r *Reader) Index(ctx context.Context, seg *tier.Segment, kind remoteformat.IndexKind) ([]byte, error) {
	m, err := r.manifest(ctx, seg)
	if err != nil {
		return nil, err
	}
	span, ok := m.Span(kind)
	if !ok || span.Size == 0 {
		return nil, nil
	}
	p, err := r.load(ctx, key{seg.ID, kindIndex, int(kind)}, r.fetchIndex(seg, m, kind, span))
	if err != nil {
		return nil, err
	}
	return p.data, nil
}

func (r *Reader) fetchIndex(seg *tier.Segment, m *remoteformat.Segment, kind remoteformat.IndexKind, span remoteformat.Span) func(context.Context) (*piece, error) {
	return func(ctx context.Context) (*piece, error) {
		b, err := r.bytes(ctx, seg, remoteformat.ObjectIndexes, span.Position, span.Size, 0)
		if err != nil {
			return nil, err
		}
		if b, err = m.DecodeIndex(kind, b); err != nil {
			return nil, &CorruptError{seg.Object(r.o.Prefix, remoteformat.ObjectIndexes), seg.Start, err}
		}
		return &piece{data: b, cost: int64(len(b)) + 128}, nil
	}
}

// blockSize is the plain bytes of a block: any number where the object is plain, whole chunks otherwise.
func (r *Reader) blockSize(m *remoteformat.Segment) int64 {
	if m.Plain() {
		return r.o.BlockBytes
	}
	chunk := m.Chunks().ChunkSize
	return max(1, r.o.BlockBytes/chunk) * chunk
}

// fetchBlock returns with an error about damage what is intact in front of it.
func (r *Reader) fetchBlock(seg *tier.Segment, m *remoteformat.Segment, number int) func(context.Context) (*piece, error) {
	return func(ctx context.Context) (*piece, error) {
		size := r.blockSize(m)
		from := int64(number) * size
		to := min(from+size, m.Size())
		if m.Plain() {
			b, err := r.bytes(ctx, seg, remoteformat.ObjectLog, from, to-from, 0)
			return &piece{data: b, cost: int64(len(b)) + 128}, err
		}
		x := m.Chunks()
		off, n, _, _ := x.StoredRange(from, to)
		b, err := r.bytes(ctx, seg, remoteformat.ObjectLog, off, n, 0)
		first, last, _ := x.Range(from, to)
		out := make([]byte, 0, min(to-from, 64*int64(len(b))))
		for i := first; i <= last; i++ {
			c := x.Chunk(i)
			at := c.StoredPosition - off
			if at+c.StoredSize > int64(len(b)) {
				break
			}
			plain, derr := m.DecodeChunk(i, b[at:at+c.StoredSize])
			if derr != nil {
				err = &CorruptError{seg.Object(r.o.Prefix, remoteformat.ObjectLog), seg.Start, derr}
				break
			}
			out = append(out, plain...)
		}
		return &piece{data: out, cost: int64(cap(out)) + 128}, err
	}
}

// forgetBlocks drops the blocks of a range, after their bytes turned out wrong, so that a retry fetches them anew.
func (r *Reader) forgetBlocks(seg *tier.Segment, m *remoteformat.Segment, from, to int64) {
	size := r.blockSize(m)
	r.mu.Lock()
	defer r.mu.Unlock()
	for number := int(from / size); int64(number)*size < to; number++ {
		r.blocks.drop(key{seg.ID, kindBlock, number})
	}
}

// prefetch starts the fetches of blocks in [from, to) without waiting, as long as workers are idle.
func (r *Reader) prefetch(seg *tier.Segment, m *remoteformat.Segment, from, to int64) bool {
	size := r.blockSize(m)
	to = min(to, m.Size())
	for number := int(from / size); int64(number)*size < to; number++ {
		k := key{seg.ID, kindBlock, number}
		r.mu.Lock()
		there := r.blocks.has(k) // has, since get would count as a use
		r.mu.Unlock()
		if there {
			continue
		}
		if _, _, err := r.begin(k, r.o.Workers, r.fetchBlock(seg, m, number)); err != nil {
			return false
		}
	}
	return true
}
