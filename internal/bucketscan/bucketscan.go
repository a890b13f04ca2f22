// Package bucketscan reads what is in a bucket with no Kafka running: the segments that internal/bucketlayout recognizes, their
// records, and whether they are whole. It only ever reads. A Reader is safe for concurrent use.
package bucketscan

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/varve-io/varve/internal/bucketlayout"
	"github.com/varve-io/varve/internal/inspect"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/segment"
)

// ErrNoTxnIndex: the layout keeps no transaction indexes, so nothing tells which transactions were aborted.
var ErrNoTxnIndex = errors.New("this layout has no transaction indexes")

// Reader reads a bucket. Keys opens encrypted objects; nil for none.
type Reader struct {
	Bucket objstore.Bucket
	Keys   *remoteformat.Keyring
}

// List gathers all objects.
func (r *Reader) List(ctx context.Context) (*bucketlayout.Catalog, error) {
	var c bucketlayout.Catalog
	err := r.Bucket.List(ctx, "", "", func(i objstore.Info) error {
		c.Add(i.Key, i.Size)
		return nil
	})
	return &c, err
}

// object is an object as a file, read in large pieces. What the store failed with is kept, since it is no damage.
type object struct {
	ctx    context.Context
	bucket objstore.Bucket
	key    string
	size   int64
	at     int64
	window []byte
	failed error
}

const pieceSize = 4 << 20

// ReadAt implements io.ReaderAt.
func (o *object) ReadAt(p []byte, off int64) (int, error) {
	n := 0
	for n < len(p) {
		at := off + int64(n)
		if at >= o.size {
			return n, io.EOF
		}
		if at < o.at || at >= o.at+int64(len(o.window)) {
			b, err := objstore.ReadRange(o.ctx, o.bucket, o.key, at, min(pieceSize, o.size-at))
			if err != nil {
				o.failed = err
				return n, err
			}
			o.at, o.window = at, b
		}
		n += copy(p[n:], o.window[at-o.at:])
	}
	return n, nil
}

func (r *Reader) object(ctx context.Context, f *bucketlayout.Found, k bucketlayout.Kind) *object {
	return &object{ctx: ctx, bucket: r.Bucket, key: f.Key(k), size: f.Objects[k]}
}

// manifest returns the manifest of a segment, nil in layouts that have none.
func (r *Reader) manifest(ctx context.Context, f *bucketlayout.Found) ([]byte, error) {
	if f.Layout != bucketlayout.Aiven {
		return nil, nil
	}
	return objstore.ReadAll(ctx, r.Bucket, f.Key(bucketlayout.Manifest), remoteformat.MaxManifestSize)
}

// read hands the items of one object to emit. Failures of the store are returned as they are, damage as *inspect.DamageError.
func (r *Reader) read(ctx context.Context, f *bucketlayout.Found, k bucketlayout.Kind, o inspect.Options, emit func(inspect.Item) error) error {
	object := r.object(ctx, f, k)
	o.Keys = r.Keys
	err := inspect.Read(object.key, object, object.size, o, emit)
	if object.failed != nil {
		return object.failed
	}
	return err
}

// Records hands every batch of a segment, and the records of each behind it, to emit in order; markers are among them. An error
// of emit ends it and is returned.
func (r *Reader) Records(ctx context.Context, f *bucketlayout.Found, emit func(inspect.Item) error) error {
	m, err := r.manifest(ctx, f)
	if err != nil {
		return err
	}
	return r.read(ctx, f, bucketlayout.Log, inspect.Options{Kind: inspect.KindLog, Records: true, Full: true, Manifest: m}, emit)
}

// Aborted are the transactions that ended in a segment by being aborted.
func (r *Reader) Aborted(ctx context.Context, f *bucketlayout.Found) (out []producerstate.AbortedTxn, err error) {
	emit := func(i inspect.Item) error {
		if a, ok := i.(*inspect.Aborted); ok {
			out = append(out, producerstate.AbortedTxn{ProducerID: a.ProducerID, FirstOffset: a.FirstOffset, LastOffset: a.LastOffset, LastStableOffset: a.LastStableOffset})
		}
		return nil
	}
	switch f.Layout {
	case bucketlayout.Aiven:
		m, err := r.manifest(ctx, f)
		if err != nil {
			return nil, err
		}
		return out, r.read(ctx, f, bucketlayout.Indexes, inspect.Options{Kind: inspect.KindIndexes, Manifest: m}, emit)
	case bucketlayout.Kafka:
		if _, ok := f.Objects[bucketlayout.TxnIndex]; !ok {
			return nil, nil
		}
		err := r.read(ctx, f, bucketlayout.TxnIndex, inspect.Options{Kind: inspect.KindTxnIndex}, emit)
		return out, err
	}
	return nil, ErrNoTxnIndex
}

// End is the last offset of a segment: as the manifest says, or else as its last batch does.
func (r *Reader) End(ctx context.Context, f *bucketlayout.Found) (int64, error) {
	if f.Layout == bucketlayout.Aiven {
		b, err := r.manifest(ctx, f)
		if err != nil {
			return 0, err
		}
		m, err := remoteformat.ParseManifest(b)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", f.Key(bucketlayout.Manifest), err)
		}
		return m.Metadata.End, nil
	}
	log, from := r.object(ctx, f, bucketlayout.Log), int64(0)
	if size, ok := f.Objects[bucketlayout.Index]; ok { // it spares most of the log
		x := segment.OpenOffsetIndex(f.Base, r.object(ctx, f, bucketlayout.Index), size)
		if n := x.Len(); n > 0 {
			if p, err := x.At(n - 1); err == nil && p.Position >= 0 && p.Position < log.size {
				from = p.Position
			}
		}
	}
	scan := segment.NewBatchScanner(log, from, log.size)
	defer scan.Release()
	end := f.Base - 1
	for scan.Next() {
		end = scan.Header().LastOffset()
	}
	if err := scan.Err(); err != nil {
		return end, fmt.Errorf("%s: %w", log.key, err)
	}
	return end, nil
}
