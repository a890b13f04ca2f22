package objstore

import (
	"bytes"
	"context"
	"fmt"
	"hash/crc32"
	"io"
	"sort"
	"strings"
	"sync"
	"time"
)

// Memory is a Bucket in memory, for tests and for trying things out.
type Memory struct {
	mu      sync.RWMutex
	objects map[string]memObject
}

type memObject struct {
	data []byte
	time time.Time
	etag string
}

// NewMemory returns an empty bucket.
func NewMemory() *Memory { return &Memory{objects: map[string]memObject{}} }

// String is "mem:".
func (m *Memory) String() string { return "mem:" }

// Put implements Bucket.
func (m *Memory) Put(ctx context.Context, key string, body io.ReaderAt, size int64, opts PutOptions) error {
	if err := ctx.Err(); err != nil {
		return &Error{Op: "put", Key: key, Err: err}
	}
	if err := checkKey(key); err != nil {
		return &Error{Op: "put", Key: key, Kind: ErrBadKey, Err: err}
	}
	data, err := io.ReadAll(io.NewSectionReader(body, 0, size))
	if err != nil || int64(len(data)) != size {
		return &Error{Op: "put", Key: key, Err: fmt.Errorf("body has %d bytes of %d: %w", len(data), size, errOr(err, io.ErrUnexpectedEOF))}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, taken := m.objects[key]; taken && opts.CreateOnly {
		return &Error{Op: "put", Key: key, Kind: ErrExists}
	}
	m.objects[key] = memObject{data: data, time: time.Now(), etag: fmt.Sprintf("%08x", crc32.ChecksumIEEE(data))}
	return nil
}

func errOr(err, other error) error {
	if err != nil {
		return err
	}
	return other
}

func (m *Memory) object(ctx context.Context, op, key string) (memObject, error) {
	if err := ctx.Err(); err != nil {
		return memObject{}, &Error{Op: op, Key: key, Err: err}
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	o, ok := m.objects[key]
	if !ok {
		return o, &Error{Op: op, Key: key, Kind: ErrNotFound}
	}
	return o, nil
}

// Get implements Bucket.
func (m *Memory) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	o, err := m.object(ctx, "get", key)
	if err != nil {
		return nil, err
	}
	off, n = clip(int64(len(o.data)), off, n)
	return io.NopCloser(bytes.NewReader(o.data[off : off+n])), nil
}

// clip cuts a wanted range to an object of size bytes.
func clip(size, off, n int64) (int64, int64) {
	off = min(max(off, 0), size)
	if n < 0 || n > size-off {
		n = size - off
	}
	return off, n
}

// Stat implements Bucket.
func (m *Memory) Stat(ctx context.Context, key string) (Info, error) {
	o, err := m.object(ctx, "stat", key)
	if err != nil {
		return Info{}, err
	}
	return Info{Key: key, Size: int64(len(o.data)), ETag: o.etag, LastModified: o.time}, nil
}

// List implements Bucket.
func (m *Memory) List(ctx context.Context, prefix, after string, fn func(Info) error) error {
	m.mu.RLock()
	var all []Info
	for key, o := range m.objects {
		if strings.HasPrefix(key, prefix) && key > after {
			all = append(all, Info{Key: key, Size: int64(len(o.data)), ETag: o.etag, LastModified: o.time})
		}
	}
	m.mu.RUnlock()
	sort.Slice(all, func(i, j int) bool { return all[i].Key < all[j].Key })
	for _, info := range all {
		if err := ctx.Err(); err != nil {
			return &Error{Op: "list", Key: prefix, Err: err}
		}
		if err := fn(info); err != nil {
			return err
		}
	}
	return nil
}

// Delete implements Bucket.
func (m *Memory) Delete(ctx context.Context, key string) error {
	if err := ctx.Err(); err != nil {
		return &Error{Op: "delete", Key: key, Err: err}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.objects, key)
	return nil
}

// PresignGet implements Bucket: ErrUnsupported.
func (m *Memory) PresignGet(_ context.Context, key string, _ time.Duration) (string, error) {
	return "", &Error{Op: "presign", Key: key, Kind: ErrUnsupported}
}
