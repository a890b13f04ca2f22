package s3

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/varve-io/varve/internal/objstore"
)

// wrap turns an error of the client library into ours. Codes come first, since clones use odd statuses.
func (b *Bucket) wrap(op, key string, err error) error {
	if err == nil {
		return nil
	}
	e := &objstore.Error{Op: op, Key: key, Err: err}
	if own := (*objstore.Error)(nil); errors.As(err, &own) {
		return err
	}
	var resp minio.ErrorResponse
	if !errors.As(err, &resp) {
		if errors.Is(err, io.ErrUnexpectedEOF) && op == "get" {
			e.Kind = objstore.ErrShortBody
		}
		return e
	}
	e.Code = resp.Code
	e.Kind = kind(resp.Code, resp.StatusCode)
	if e.Kind == objstore.ErrClockSkew {
		if skew := time.Duration(b.transport.skew.Load()).Round(time.Second); skew != 0 {
			e.Err = fmt.Errorf("local clock is %s ahead of the store's (negative: behind): %w", skew, err)
		}
	}
	return e
}

func kind(code string, status int) error {
	switch code {
	case "NoSuchUpload", "ConditionalRequestConflict", "OperationAborted":
		return nil // an upload that somebody else ended, or a race: try again from the start
	case "NoSuchKey", "NoSuchBucket", "NotFound":
		return objstore.ErrNotFound
	case "PreconditionFailed":
		return objstore.ErrExists
	case "RequestTimeTooSkewed", "RequestExpired":
		return objstore.ErrClockSkew
	case "SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded":
		return objstore.ErrThrottled
	case "NotImplemented":
		return objstore.ErrUnsupported
	case "AccessDenied", "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken",
		"InvalidAccessKeyId", "SignatureDoesNotMatch":
		return objstore.ErrAccess
	}
	switch status {
	case http.StatusNotFound:
		return objstore.ErrNotFound
	case http.StatusUnauthorized, http.StatusForbidden:
		return objstore.ErrAccess
	case http.StatusPreconditionFailed:
		return objstore.ErrExists
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		return objstore.ErrThrottled
	case http.StatusNotImplemented:
		return objstore.ErrUnsupported
	}
	return nil
}

// do runs one request. Refused credentials are refreshed once, by one caller, at most every RefreshInterval;
// whoever was refused before that refresh tries once more.
func (b *Bucket) do(ctx context.Context, op, key string, fn func() error) error {
	start := time.Now()
	err := b.wrap(op, key, fn())
	if err == nil || !errors.Is(err, objstore.ErrAccess) || ctx.Err() != nil || !b.refresh(start, err) {
		return err
	}
	return b.wrap(op, key, fn())
}

// refresh makes the next request ask for credentials again; false where that cannot help.
func (b *Bucket) refresh(asked time.Time, cause error) bool {
	if b.opts.AccessKey != "" {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.refreshed.After(asked) {
		return true
	}
	if time.Since(b.refreshed) < b.opts.RefreshInterval {
		return false
	}
	b.refreshed = time.Now()
	b.creds.Expire()
	b.opts.Logger.Warn("object store refused the credentials, asking for new ones", "bucket", b.String(), "cause", cause)
	return true
}
