package objstore

import (
	"context"
	"io"
	"strings"
	"sync"
	"time"
)

// Op names an operation in a Fault.
type Op string

// The operations that faults apply to.
const (
	OpPut     Op = "put"
	OpGet     Op = "get"
	OpStat    Op = "stat"
	OpList    Op = "list"
	OpDelete  Op = "delete"
	OpPresign Op = "presign"
)

// Fault describes what goes wrong. It strikes operations Op ("" is any) on keys that contain Key, after it let
// Skip of them pass, Times times (0 is for ever).
type Fault struct {
	Op    Op
	Key   string
	Skip  int
	Times int
	// Err is returned; nil lets the operation go on (with Block, Short or Corrupt).
	Err error
	// AfterEffect performs the operation before Err is returned.
	AfterEffect bool
	// Block holds the operation until the channel is closed or yields, or its context ends.
	Block <-chan struct{}
	// Short cuts this many bytes off the end of a get's body and ends it with ErrShortBody.
	Short int64
	// Corrupt inverts the byte at CorruptAt of a get's body.
	Corrupt   bool
	CorruptAt int64
}

// Faults is a Bucket for tests that fails as told and counts operations.
type Faults struct {
	b      Bucket
	mu     sync.Mutex
	faults []*Fault
	counts map[Op]int
	active map[Op]int
}

// WithFaults wraps b; without faults it changes nothing.
func WithFaults(b Bucket) *Faults {
	return &Faults{b: b, counts: map[Op]int{}, active: map[Op]int{}}
}

// Add arms a fault. The first armed fault that matches an operation strikes.
func (f *Faults) Add(x Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.faults = append(f.faults, &x)
}

// Clear disarms all faults.
func (f *Faults) Clear() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.faults = nil
}

// Count is how many operations of that kind were called.
func (f *Faults) Count(op Op) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.counts[op]
}

// Blocked is how many operations of that kind wait in a Block.
func (f *Faults) Blocked(op Op) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.active[op]
}

func (f *Faults) strike(op Op, key string) *Fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts[op]++
	for i, x := range f.faults {
		if x.Op != "" && x.Op != op || !strings.Contains(key, x.Key) {
			continue
		}
		if x.Skip > 0 {
			x.Skip--
			continue
		}
		hit := *x
		if x.Times > 0 {
			if x.Times--; x.Times == 0 {
				f.faults = append(f.faults[:i:i], f.faults[i+1:]...)
			}
		}
		return &hit
	}
	return &Fault{}
}

func (f *Faults) around(ctx context.Context, op Op, key string, do func() error) (*Fault, error) {
	x := f.strike(op, key)
	if x.Block != nil {
		f.mu.Lock()
		f.active[op]++
		f.mu.Unlock()
		var err error
		select {
		case <-x.Block:
		case <-ctx.Done():
			err = ctx.Err()
		}
		f.mu.Lock()
		f.active[op]--
		f.mu.Unlock()
		if err != nil {
			return x, &Error{Op: string(op), Key: key, Err: err}
		}
	}
	if x.Err != nil && !x.AfterEffect {
		return x, &Error{Op: string(op), Key: key, Code: "injected", Err: x.Err}
	}
	if err := do(); err != nil {
		return x, err
	}
	if x.Err != nil {
		return x, &Error{Op: string(op), Key: key, Code: "injected", Err: x.Err}
	}
	return x, nil
}

func (f *Faults) String() string { return f.b.String() }

// Put implements Bucket.
func (f *Faults) Put(ctx context.Context, key string, body io.ReaderAt, size int64, opts PutOptions) error {
	_, err := f.around(ctx, OpPut, key, func() error { return f.b.Put(ctx, key, body, size, opts) })
	return err
}

// Get implements Bucket.
func (f *Faults) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	var r io.ReadCloser
	x, err := f.around(ctx, OpGet, key, func() (err error) {
		r, err = f.b.Get(ctx, key, off, n)
		return err
	})
	if err != nil {
		if r != nil {
			r.Close()
		}
		return nil, err
	}
	if x.Short == 0 && !x.Corrupt {
		return r, nil
	}
	defer r.Close()
	data, err := io.ReadAll(r)
	if err != nil {
		return nil, err
	}
	if x.Corrupt && x.CorruptAt < int64(len(data)) {
		data[x.CorruptAt] ^= 0xff
	}
	end := io.Reader(strings.NewReader(""))
	if x.Short > 0 {
		data = data[:max(0, int64(len(data))-x.Short)]
		end = failingReader{&Error{Op: "get", Key: key, Kind: ErrShortBody}}
	}
	return io.NopCloser(io.MultiReader(strings.NewReader(string(data)), end)), nil
}

type failingReader struct{ err error }

func (r failingReader) Read([]byte) (int, error) { return 0, r.err }

// Stat implements Bucket.
func (f *Faults) Stat(ctx context.Context, key string) (info Info, err error) {
	_, err = f.around(ctx, OpStat, key, func() (err error) {
		info, err = f.b.Stat(ctx, key)
		return err
	})
	return info, err
}

// List implements Bucket.
func (f *Faults) List(ctx context.Context, prefix, after string, fn func(Info) error) error {
	_, err := f.around(ctx, OpList, prefix, func() error { return f.b.List(ctx, prefix, after, fn) })
	return err
}

// Delete implements Bucket.
func (f *Faults) Delete(ctx context.Context, key string) error {
	_, err := f.around(ctx, OpDelete, key, func() error { return f.b.Delete(ctx, key) })
	return err
}

// PresignGet implements Bucket.
func (f *Faults) PresignGet(ctx context.Context, key string, ttl time.Duration) (u string, err error) {
	_, err = f.around(ctx, OpPresign, key, func() (err error) {
		u, err = f.b.PresignGet(ctx, key, ttl)
		return err
	})
	return u, err
}

// ListUploads implements MultipartLister.
func (f *Faults) ListUploads(ctx context.Context, prefix string, fn func(Upload) error) error {
	return ListUploads(ctx, f.b, prefix, fn)
}

// AbortUpload implements MultipartLister.
func (f *Faults) AbortUpload(ctx context.Context, u Upload) error { return AbortUpload(ctx, f.b, u) }
