package objstore

import (
	"context"
	"io"
	"strings"
	"time"
)

// WithPrefix is the part of b below prefix, which is put in front of keys as it is. Keys seen by callers lack it.
func WithPrefix(b Bucket, prefix string) Bucket {
	if prefix == "" {
		return b
	}
	return &prefixed{b, prefix}
}

type prefixed struct {
	b      Bucket
	prefix string
}

func (p *prefixed) String() string { return strings.TrimSuffix(p.b.String(), "/") + "/" + p.prefix }

func (p *prefixed) Put(ctx context.Context, key string, body io.ReaderAt, size int64, opts PutOptions) error {
	return p.b.Put(ctx, p.prefix+key, body, size, opts)
}

func (p *prefixed) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	return p.b.Get(ctx, p.prefix+key, off, n)
}

func (p *prefixed) Stat(ctx context.Context, key string) (Info, error) {
	info, err := p.b.Stat(ctx, p.prefix+key)
	info.Key = strings.TrimPrefix(info.Key, p.prefix)
	return info, err
}

func (p *prefixed) List(ctx context.Context, prefix, after string, fn func(Info) error) error {
	if after != "" {
		after = p.prefix + after
	}
	return p.b.List(ctx, p.prefix+prefix, after, func(info Info) error {
		info.Key = strings.TrimPrefix(info.Key, p.prefix)
		return fn(info)
	})
}

func (p *prefixed) Delete(ctx context.Context, key string) error {
	return p.b.Delete(ctx, p.prefix+key)
}

func (p *prefixed) PresignGet(ctx context.Context, key string, ttl time.Duration) (string, error) {
	return p.b.PresignGet(ctx, p.prefix+key, ttl)
}

func (p *prefixed) GetSigned(ctx context.Context, url, key string, off, n int64) (io.ReadCloser, error) {
	if r, ok := p.b.(SignedReader); ok {
		return r.GetSigned(ctx, url, p.prefix+key, off, n)
	}
	return nil, &Error{Op: "get signed", Key: key, Kind: ErrUnsupported}
}

func (p *prefixed) ListUploads(ctx context.Context, prefix string, fn func(Upload) error) error {
	return ListUploads(ctx, p.b, p.prefix+prefix, func(u Upload) error {
		u.Key = strings.TrimPrefix(u.Key, p.prefix)
		return fn(u)
	})
}

func (p *prefixed) AbortUpload(ctx context.Context, u Upload) error {
	u.Key = p.prefix + u.Key
	return AbortUpload(ctx, p.b, u)
}
