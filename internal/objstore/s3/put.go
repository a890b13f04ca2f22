package s3

import (
	"bytes"
	"context"
	"crypto/md5"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"io"
	"sync/atomic"
	"time"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sync/errgroup"

	"github.com/varve-io/varve/internal/objstore"
)

// Put implements objstore.Bucket: one request up to PartSize, a multipart upload above. A multipart upload that
// fails is aborted; one whose process dies is found by ListUploads.
func (b *Bucket) Put(ctx context.Context, key string, body io.ReaderAt, size int64, opts objstore.PutOptions) error {
	if opts.CreateOnly && (b.opts.NoCreateOnly || size > b.opts.PartSize) {
		// The condition is only tested at the end of a multipart upload, so look first.
		if _, err := b.Stat(ctx, key); err == nil {
			return &objstore.Error{Op: "put", Key: key, Kind: objstore.ErrExists}
		}
	}
	po := minio.PutObjectOptions{DisableContentSha256: true, DisableMultipart: true}
	if opts.CreateOnly && !b.opts.NoCreateOnly {
		po.SetMatchETagExcept("*")
	}
	if size > b.opts.PartSize {
		return b.putParts(ctx, key, body, size, po)
	}
	buf := b.parts.Get().(*[]byte)
	defer b.parts.Put(buf)
	r, err := readPart(body, *buf, 0, size)
	if err != nil {
		return &objstore.Error{Op: "put", Key: key, Err: err}
	}
	md5sum, sha := b.sums((*buf)[:size])
	return b.do(ctx, "put", key, func() error {
		if _, err := r.Seek(0, io.SeekStart); err != nil {
			return err
		}
		_, err := b.core.PutObject(ctx, b.opts.Bucket, key, r, size, md5sum, sha, po)
		return err
	})
}

func (b *Bucket) sums(p []byte) (md5Base64, sha256Hex string) {
	if b.opts.ContentMD5 {
		sum := md5.Sum(p)
		md5Base64 = base64.StdEncoding.EncodeToString(sum[:])
	}
	if !b.opts.UnsignedPayload {
		sum := sha256.Sum256(p)
		sha256Hex = hex.EncodeToString(sum[:])
	}
	return md5Base64, sha256Hex
}

func (b *Bucket) putParts(ctx context.Context, key string, body io.ReaderAt, size int64, po minio.PutObjectOptions) (err error) {
	partSize := b.opts.PartSize
	if n := (size + 9999) / 10000; n > partSize { // S3 allows 10,000 parts
		partSize = n
	}
	var id string
	err = b.do(ctx, "put", key, func() (err error) {
		id, err = b.core.NewMultipartUpload(ctx, b.opts.Bucket, key, minio.PutObjectOptions{})
		return err
	})
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			// The caller's context may be over; parts cost money, so allow a moment.
			actx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			b.abort(actx, key, id)
		}
	}()
	parts := make([]minio.CompletePart, (size+partSize-1)/partSize)
	// One failed part stops new ones but lets those under way finish: a part that arrives after the abort may
	// bring the upload back.
	var g errgroup.Group
	var failed atomic.Bool
	g.SetLimit(b.opts.Concurrency)
	for i := range parts {
		if failed.Load() || ctx.Err() != nil {
			break
		}
		off := int64(i) * partSize
		g.Go(func() error {
			part, err := b.putPart(ctx, key, id, i+1, body, off, min(partSize, size-off))
			parts[i] = part
			if err != nil {
				failed.Store(true)
			}
			return err
		})
	}
	if err = g.Wait(); err != nil {
		return err
	}
	if err = ctx.Err(); err != nil {
		return b.wrap("put", key, err)
	}
	return b.do(ctx, "put", key, func() error {
		_, err := b.core.CompleteMultipartUpload(ctx, b.opts.Bucket, key, id, parts, po)
		return err
	})
}

// abort ends an upload, again where a late part brought it back; S3 asks for that. It is best effort.
func (b *Bucket) abort(ctx context.Context, key, id string) {
	for range 3 {
		if b.AbortUpload(ctx, objstore.Upload{Key: key, ID: id}) != nil {
			return
		}
		if _, err := b.core.ListObjectParts(ctx, b.opts.Bucket, key, id, 0, 1); err != nil {
			return
		}
	}
}

func (b *Bucket) putPart(ctx context.Context, key, id string, number int, body io.ReaderAt, off, n int64) (minio.CompletePart, error) {
	buf := b.parts.Get().(*[]byte)
	defer b.parts.Put(buf)
	if int64(len(*buf)) < n {
		*buf = make([]byte, n)
	}
	r, err := readPart(body, *buf, off, n)
	if err != nil {
		return minio.CompletePart{}, &objstore.Error{Op: "put", Key: key, Err: err}
	}
	md5sum, sha := b.sums((*buf)[:n])
	var part minio.ObjectPart
	err = objstore.Retry(ctx, objstore.RetryPolicy{Attempts: 3}, func(int) error {
		return b.do(ctx, "put", key, func() (err error) {
			r = bytes.NewReader((*buf)[:n])
			part, err = b.core.PutObjectPart(ctx, b.opts.Bucket, key, id, number, r, n,
				minio.PutObjectPartOptions{Md5Base64: md5sum, Sha256Hex: sha, DisableContentSha256: true})
			return err
		})
	})
	return minio.CompletePart{PartNumber: number, ETag: part.ETag}, err
}
