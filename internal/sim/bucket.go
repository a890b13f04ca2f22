package sim

import (
	"context"
	"errors"
	"io"

	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/tier"
)

const keyPrefix = "sim/"

// bucket is an object store that fails by chance, before or after the effect.
type bucket struct {
	*objstore.Memory
	s       *sim
	away    bool
	excused map[string]bool // objects that a deposed leader wrote after their record was gone
}

func newBucket(s *sim) *bucket {
	return &bucket{Memory: objstore.NewMemory(), s: s, excused: map[string]bool{}}
}

var errStore = errors.New("503 slow down")

func (b *bucket) around(op, key string, do func() error) error {
	fail := func() error { return &objstore.Error{Op: op, Key: key, Code: "injected", Err: errStore} }
	if b.s.calm {
		return do()
	}
	if b.away {
		return fail()
	}
	fate := 0
	if b.s.plan.has(Store) && b.s.chance(12) {
		fate = 1 + b.s.rng.IntN(2)
	}
	if fate == 1 {
		return fail()
	}
	err := do()
	if err == nil && fate == 2 {
		return fail()
	}
	return err
}

// Put implements objstore.Bucket.
func (b *bucket) Put(ctx context.Context, key string, body io.ReaderAt, size int64, opts objstore.PutOptions) error {
	return b.around("put", key, func() error { return b.Memory.Put(ctx, key, body, size, opts) })
}

// Get implements objstore.Bucket.
func (b *bucket) Get(ctx context.Context, key string, off, n int64) (r io.ReadCloser, err error) {
	err = b.around("get", key, func() (err error) {
		r, err = b.Memory.Get(ctx, key, off, n)
		return err
	})
	if err != nil {
		return nil, err
	}
	return r, nil
}

// Stat implements objstore.Bucket.
func (b *bucket) Stat(ctx context.Context, key string) (info objstore.Info, err error) {
	err = b.around("stat", key, func() (err error) {
		info, err = b.Memory.Stat(ctx, key)
		return err
	})
	return info, err
}

// Delete implements objstore.Bucket.
func (b *bucket) Delete(ctx context.Context, key string) error {
	return b.around("delete", key, func() error { return b.Memory.Delete(ctx, key) })
}

var parts = []remoteformat.Object{remoteformat.ObjectLog, remoteformat.ObjectIndexes, remoteformat.ObjectManifest}

// log is what is stored of a segment's batches, whatever the weather.
func (b *bucket) log(seg *tier.Segment) []byte {
	raw, err := objstore.ReadAll(b.s.ctx, b.Memory, seg.Object(keyPrefix, remoteformat.ObjectLog), 1<<20)
	if err != nil {
		return nil
	}
	return raw
}

// excuse notes objects that came too late: their writer was deposed meanwhile and their record is gone. Nobody can help
// that but the janitor.
func (b *bucket) excuse(seg *tier.Segment) {
	p := b.s.partition(seg.Partition)
	known := p != nil && p.Remote.Get(seg.ID) != nil && p.Remote.Get(seg.ID).State == tier.CopyStarted
	if p != nil && (known || p.Leader == seg.Broker && p.LeaderEpoch == seg.LeaderEpoch) {
		return
	}
	for _, o := range parts {
		b.excused[seg.Object(keyPrefix, o)] = true
	}
}

// strays are objects that no record knows.
func (b *bucket) strays() []string {
	known := map[string]bool{}
	for _, t := range b.s.quorum.img.TopicsByID {
		for _, p := range t.Partitions {
			for _, seg := range p.Remote {
				for _, o := range parts {
					known[seg.Object(keyPrefix, o)] = true
				}
			}
		}
	}
	var out []string
	err := b.Memory.List(b.s.ctx, "", "", func(i objstore.Info) error {
		if !known[i.Key] && !b.excused[i.Key] {
			out = append(out, i.Key)
		}
		return nil
	})
	if err != nil {
		out = append(out, err.Error())
	}
	return out
}
