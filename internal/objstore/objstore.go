// Package objstore is the seam to an object store: the Bucket interface, drivers for memory and for a
// directory, and wrappers for retries, metrics, prefixes and injected faults.
//
// Guarantees of every Bucket: an object appears whole or not at all; a Put with CreateOnly never replaces an
// object; Delete of a missing key succeeds; List is in ascending byte order of keys. All methods may be
// called concurrently, and return when ctx ends. Errors are *Error and match one of the sentinels below, or
// none of them: then they are transient.
package objstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

// Info describes one object. LastModified is the store's clock; ETag is opaque and changes with the content.
type Info struct {
	Key          string
	Size         int64
	ETag         string
	LastModified time.Time
}

// PutOptions modify Put. CreateOnly makes it fail with ErrExists where the key is taken.
type PutOptions struct {
	CreateOnly bool
}

// Bucket is one bucket, or a prefix of one.
type Bucket interface {
	// Put stores size bytes of body, which is read from 0 at each attempt. ErrExists with CreateOnly.
	Put(ctx context.Context, key string, body io.ReaderAt, size int64, opts PutOptions) error
	// Get streams n bytes from off, or all from off where n < 0. A range past the end is cut, one that
	// begins at or past the end is empty. The reader yields ErrShortBody if the store breaks off early.
	// The caller closes it.
	Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error)
	// Stat returns the object's description or ErrNotFound.
	Stat(ctx context.Context, key string) (Info, error)
	// List calls fn for each object whose key begins with prefix and is greater than after. An error of fn
	// ends the listing and is returned as it is.
	List(ctx context.Context, prefix, after string, fn func(Info) error) error
	// Delete removes the object; a missing one is success.
	Delete(ctx context.Context, key string) error
	// PresignGet returns a URL that reads the object without credentials until ttl has passed, or ErrUnsupported.
	PresignGet(ctx context.Context, key string, ttl time.Duration) (string, error)
	// String is the bucket's URL, without secrets.
	String() string
}

// Upload is a multipart upload that was begun and neither completed nor aborted. No object listing shows it.
type Upload struct {
	Key       string
	ID        string
	Initiated time.Time
	Bytes     int64
}

// MultipartLister is what a Bucket with multipart uploads also implements.
type MultipartLister interface {
	ListUploads(ctx context.Context, prefix string, fn func(Upload) error) error
	AbortUpload(ctx context.Context, u Upload) error
}

// ListUploads lists unfinished uploads of b below prefix; ErrUnsupported where b has no such thing.
func ListUploads(ctx context.Context, b Bucket, prefix string, fn func(Upload) error) error {
	if m, ok := b.(MultipartLister); ok {
		return m.ListUploads(ctx, prefix, fn)
	}
	return &Error{Op: "list uploads", Key: prefix, Kind: ErrUnsupported}
}

// AbortUpload ends an unfinished upload and frees its parts; a missing one is success.
func AbortUpload(ctx context.Context, b Bucket, u Upload) error {
	if m, ok := b.(MultipartLister); ok {
		return m.AbortUpload(ctx, u)
	}
	return &Error{Op: "abort upload", Key: u.Key, Kind: ErrUnsupported}
}

// SignedReader is what a Bucket also implements whose objects can be read by a URL that somebody else signed.
type SignedReader interface {
	// GetSigned is Get by a URL from PresignGet. ErrAccess where it is not of that object in this bucket, ErrExpired where its time is over.
	GetSigned(ctx context.Context, url, key string, off, n int64) (io.ReadCloser, error)
}

// Sentinels that an *Error may match with errors.Is.
var (
	ErrNotFound    = errors.New("no such object")
	ErrExists      = errors.New("object exists")
	ErrAccess      = errors.New("access denied")
	ErrExpired     = errors.New("signed URL has expired")
	ErrThrottled   = errors.New("throttled by the store")
	ErrClockSkew   = errors.New("clocks of store and client differ too much")
	ErrUnsupported = errors.New("not supported by this store")
	ErrShortBody   = errors.New("body shorter than promised")
	ErrBadKey      = errors.New("key not usable")
)

// Error says which operation on which key failed. Kind is a sentinel or nil, Code the store's own word for it.
type Error struct {
	Op, Key, Code string
	Kind          error
	Err           error
}

// Error names operation, key, code and cause.
func (e *Error) Error() string {
	s := fmt.Sprintf("object store: %s %q", e.Op, e.Key)
	if e.Kind != nil {
		s += ": " + e.Kind.Error()
	}
	if e.Code != "" {
		s += " (" + e.Code + ")"
	}
	if e.Err != nil && e.Err != e.Kind {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap lets errors.Is see both the kind and the cause.
func (e *Error) Unwrap() []error {
	var out []error
	if e.Kind != nil {
		out = append(out, e.Kind)
	}
	if e.Err != nil {
		out = append(out, e.Err)
	}
	return out
}

// Retriable reports whether the same call may succeed soon without anybody changing anything. A skewed clock
// counts, because each attempt is signed anew; the end of a context does not.
func Retriable(err error) bool {
	if err == nil {
		return false
	}
	for _, final := range []error{ErrNotFound, ErrExists, ErrAccess, ErrExpired, ErrUnsupported, ErrBadKey, context.Canceled} {
		if errors.Is(err, final) {
			return false
		}
	}
	return true
}

// Outcome is a word for metrics and logs: ok, not_found, exists, access, throttled, clock_skew,
// unsupported, short_body, cancelled or error.
func Outcome(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, ErrNotFound):
		return "not_found"
	case errors.Is(err, ErrExists):
		return "exists"
	case errors.Is(err, ErrAccess):
		return "access"
	case errors.Is(err, ErrThrottled):
		return "throttled"
	case errors.Is(err, ErrClockSkew):
		return "clock_skew"
	case errors.Is(err, ErrUnsupported):
		return "unsupported"
	case errors.Is(err, ErrShortBody):
		return "short_body"
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return "cancelled"
	}
	return "error"
}
