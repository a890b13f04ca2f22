// Package s3 is an objstore.Bucket over Amazon S3 and everything that speaks its protocol.
//
// It makes one attempt per call, except that refused credentials are refreshed once (see Options) and that parts of
// a large object are retried by themselves; repeat whole calls with objstore.WithRetries. Each request is signed
// anew. All methods may be called concurrently.
package s3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/varve-io/varve/internal/objstore"
)

// Bucket is one S3 bucket.
type Bucket struct {
	core      minio.Core
	opts      Options
	url       string
	transport *transport
	creds     *credentials.Credentials
	signed    *http.Client // for URLs that others signed
	parts     sync.Pool    // *[]byte of PartSize

	mu        sync.Mutex
	refreshed time.Time
}

// New prepares access to a bucket; it sends nothing.
func New(o Options) (*Bucket, error) {
	o, err := o.filled()
	if err != nil {
		return nil, err
	}
	host, secure, err := o.endpoint()
	if err != nil {
		return nil, err
	}
	t, err := newTransport(o)
	if err != nil {
		return nil, err
	}
	lookup := minio.BucketLookupAuto
	if o.PathStyle {
		lookup = minio.BucketLookupPath
	}
	creds := o.credentials(&http.Client{Transport: t.Transport, Timeout: 10 * time.Second})
	core, err := minio.NewCore(host, &minio.Options{Creds: creds, Secure: secure, Transport: t, Region: o.Region,
		BucketLookup: lookup, MaxRetries: 1})
	if err != nil {
		return nil, fmt.Errorf("s3: %w", err)
	}
	b := &Bucket{core: *core, opts: o, url: "s3://" + o.Bucket, transport: t, creds: creds}
	b.signed = &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	if o.Endpoint != "" {
		b.url += " at " + host
	}
	b.parts.New = func() any {
		p := make([]byte, o.PartSize)
		return &p
	}
	return b, nil
}

// String is the bucket's name and the store's address.
func (b *Bucket) String() string { return b.url }

// Close drops idle connections; the bucket stays usable.
func (b *Bucket) Close() error {
	b.transport.CloseIdleConnections()
	return nil
}

// Get implements objstore.Bucket.
func (b *Bucket) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	off = max(off, 0)
	if n == 0 {
		return io.NopCloser(strings.NewReader("")), nil
	}
	var o minio.GetObjectOptions
	ranged := off > 0 || n > 0
	if n > 0 {
		if err := o.SetRange(off, off+n-1); err != nil {
			return nil, b.wrap("get", key, err)
		}
	} else if off > 0 {
		if err := o.SetRange(off, 0); err != nil {
			return nil, b.wrap("get", key, err)
		}
	}
	var r io.ReadCloser
	var info minio.ObjectInfo
	var header http.Header
	err := b.do(ctx, "get", key, func() (err error) {
		r, info, header, err = b.core.GetObject(ctx, b.opts.Bucket, key, o)
		return err
	})
	if err != nil {
		if e := (*objstore.Error)(nil); errors.As(err, &e) && e.Code == "InvalidRange" {
			return io.NopCloser(strings.NewReader("")), nil
		}
		return nil, err
	}
	if ranged && header.Get("Content-Range") == "" {
		if off > 0 {
			r.Close()
			return nil, &objstore.Error{Op: "get", Key: key, Kind: objstore.ErrUnsupported,
				Err: errors.New("the store answered a ranged read with the whole object")}
		}
		if info.Size < 0 || n < info.Size {
			info.Size = n
		}
	}
	return b.body(key, r, info.Size), nil
}

// body reads size bytes of r. Of a chunked answer, below 0, the framing itself tells a broken body.
func (b *Bucket) body(key string, r io.ReadCloser, size int64) io.ReadCloser {
	if size < 0 {
		return &body{b: b, key: key, r: r, left: 1 << 62, open: true}
	}
	return &body{b: b, key: key, r: r, left: size}
}

// body ends with ErrShortBody where the connection ends before the promised length.
type body struct {
	b    *Bucket
	key  string
	r    io.ReadCloser
	left int64
	open bool // left is not known
}

func (b *body) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, io.EOF
	}
	if int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := b.r.Read(p)
	b.left -= int64(n)
	switch {
	case err == nil || err == io.EOF && (b.left == 0 || b.open):
		return n, err
	case err == io.EOF:
		err = io.ErrUnexpectedEOF
	}
	return n, b.b.wrap("get", b.key, err)
}

func (b *body) Close() error { return b.r.Close() }

// Stat implements objstore.Bucket.
func (b *Bucket) Stat(ctx context.Context, key string) (objstore.Info, error) {
	var info minio.ObjectInfo
	err := b.do(ctx, "stat", key, func() (err error) {
		info, err = b.core.StatObject(ctx, b.opts.Bucket, key, minio.StatObjectOptions{})
		return err
	})
	if err != nil {
		return objstore.Info{}, err
	}
	return objstore.Info{Key: key, Size: info.Size, ETag: info.ETag, LastModified: info.LastModified}, nil
}

// List implements objstore.Bucket.
func (b *Bucket) List(ctx context.Context, prefix, after string, fn func(objstore.Info) error) error {
	owner := false
	var own error
	err := b.do(ctx, "list", prefix, func() error {
		for o := range b.core.ListObjectsIter(ctx, b.opts.Bucket, minio.ListObjectsOptions{Prefix: prefix, Recursive: true,
			StartAfter: after, FetchOwner: &owner}) {
			if o.Err != nil {
				return o.Err
			}
			if strings.HasSuffix(o.Key, "/") || o.Key <= after { // folder markers; stores that ignore start-after
				continue
			}
			after = o.Key // so that a second attempt continues
			if own = fn(objstore.Info{Key: o.Key, Size: o.Size, ETag: o.ETag, LastModified: o.LastModified}); own != nil {
				return nil
			}
		}
		return ctx.Err()
	})
	if own != nil {
		return own
	}
	return err
}

// Delete implements objstore.Bucket.
func (b *Bucket) Delete(ctx context.Context, key string) error {
	err := b.do(ctx, "delete", key, func() error {
		return b.core.RemoveObject(ctx, b.opts.Bucket, key, minio.RemoveObjectOptions{})
	})
	if e := (*objstore.Error)(nil); errors.As(err, &e) && e.Kind == objstore.ErrNotFound && e.Code != "NoSuchBucket" {
		return nil
	}
	return err
}

// PresignGet implements objstore.Bucket. ttl is cut to seven days, the most that S3 signs.
func (b *Bucket) PresignGet(ctx context.Context, key string, ttl time.Duration) (string, error) {
	ttl = min(max(ttl.Truncate(time.Second), time.Second), 7*24*time.Hour)
	u, err := b.core.PresignedGetObject(ctx, b.opts.Bucket, key, ttl, nil)
	if err != nil {
		return "", b.wrap("presign", key, err)
	}
	return u.String(), nil
}

// ListUploads implements objstore.MultipartLister.
func (b *Bucket) ListUploads(ctx context.Context, prefix string, fn func(objstore.Upload) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for u := range b.core.ListIncompleteUploads(ctx, b.opts.Bucket, prefix, true) {
		if u.Err != nil {
			return b.wrap("list uploads", prefix, u.Err)
		}
		size, err := b.uploadSize(ctx, u.Key, u.UploadID)
		if err != nil {
			return err
		}
		if err := fn(objstore.Upload{Key: u.Key, ID: u.UploadID, Initiated: u.Initiated, Bytes: size}); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return b.wrap("list uploads", prefix, err)
	}
	return nil
}

// uploadSize sums the parts that an unfinished upload holds, 0 if it has just ended.
func (b *Bucket) uploadSize(ctx context.Context, key, id string) (int64, error) {
	var size int64
	for marker := 0; ; {
		res, err := b.core.ListObjectParts(ctx, b.opts.Bucket, key, id, marker, 1000)
		if err != nil {
			err = b.wrap("list parts", key, err)
			if e := (*objstore.Error)(nil); errors.As(err, &e) && (e.Code == "NoSuchUpload" || errors.Is(e, objstore.ErrAccess)) {
				return size, nil
			}
			return 0, err
		}
		for _, p := range res.ObjectParts {
			size += p.Size
		}
		if !res.IsTruncated || res.NextPartNumberMarker <= marker {
			return size, nil
		}
		marker = res.NextPartNumberMarker
	}
}

// AbortUpload implements objstore.MultipartLister.
func (b *Bucket) AbortUpload(ctx context.Context, u objstore.Upload) error {
	err := b.do(ctx, "abort upload", u.Key, func() error {
		return b.core.AbortMultipartUpload(ctx, b.opts.Bucket, u.Key, u.ID)
	})
	if e := (*objstore.Error)(nil); errors.As(err, &e) && e.Code == "NoSuchUpload" {
		return nil
	}
	return err
}

var _ interface {
	objstore.Bucket
	objstore.MultipartLister
} = (*Bucket)(nil)

// readPart fills a buffer with n bytes from off, so that they can be hashed and sent as often as needed.
func readPart(body io.ReaderAt, buf []byte, off, n int64) (*bytes.Reader, error) {
	got, err := body.ReadAt(buf[:n], off)
	if int64(got) < n {
		if err == nil || err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return nil, fmt.Errorf("read body at %d: %d bytes of %d: %w", off, got, n, err)
	}
	return bytes.NewReader(buf[:n]), nil
}
