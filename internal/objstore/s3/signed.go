package s3

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/varve-io/varve/internal/objstore"
)

// GetSigned implements objstore.SignedReader. The URL must be of this bucket at this endpoint, and of this very object; redirects are
// not followed. No credentials are used. The URL is in no error.
func (b *Bucket) GetSigned(ctx context.Context, signed, key string, off, n int64) (io.ReadCloser, error) {
	fail := func(kind, err error) (io.ReadCloser, error) {
		return nil, &objstore.Error{Op: "get signed", Key: key, Kind: kind, Err: err}
	}
	u, err := url.Parse(signed)
	if err != nil {
		return fail(objstore.ErrAccess, errors.New("signed URL is no URL")) // url.Error would repeat it
	}
	if err := b.owns(u, key); err != nil {
		return fail(objstore.ErrAccess, err)
	}
	off = max(off, 0)
	if n == 0 {
		return io.NopCloser(strings.NewReader("")), nil
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, signed, nil)
	if err != nil {
		return fail(objstore.ErrAccess, errors.New("signed URL cannot be asked for"))
	}
	ranged := off > 0 || n > 0
	switch {
	case n > 0:
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", off, off+n-1))
	case off > 0:
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-", off))
	}
	resp, err := b.signed.Do(req)
	if err != nil {
		if e := (*url.Error)(nil); errors.As(err, &e) {
			err = e.Err // without the URL
		}
		return fail(nil, err)
	}
	switch {
	case resp.StatusCode == http.StatusPartialContent && ranged, resp.StatusCode == http.StatusOK && off == 0:
		left := resp.ContentLength
		if n > 0 && (left < 0 || left > n) {
			left = n
		}
		return b.body(key, resp.Body, left), nil
	case resp.StatusCode == http.StatusOK:
		resp.Body.Close()
		return fail(objstore.ErrUnsupported, errors.New("the store answered a ranged read with the whole object"))
	}
	defer resp.Body.Close()
	return b.refused(resp, key)
}

// owns tells whether a URL addresses an object of this bucket, in the path or in the name of the host.
func (b *Bucket) owns(u *url.URL, key string) error {
	host, secure, err := b.opts.endpoint()
	if err != nil {
		return err
	}
	hosts := []string{host}
	if b.opts.Endpoint == "" {
		hosts = append(hosts, "s3."+b.opts.Region+".amazonaws.com", "s3.dualstack."+b.opts.Region+".amazonaws.com")
	}
	for _, h := range hosts {
		if (u.Scheme == "https") == secure && (u.Scheme == "https" || u.Scheme == "http") && u.User == nil &&
			(u.Host == h && u.Path == "/"+b.opts.Bucket+"/"+key || u.Host == b.opts.Bucket+"."+h && u.Path == "/"+key) {
			return nil
		}
	}
	return fmt.Errorf("signed URL points to %s%s, not to this object of bucket %s at %s", u.Host, u.EscapedPath(), b.opts.Bucket, host)
}

// maxErrorBody bounds what is read of a refusal, in bytes.
const maxErrorBody = 64 << 10

// refused turns a refusal into an error.
func (b *Bucket) refused(resp *http.Response, key string) (io.ReadCloser, error) {
	e := &objstore.Error{Op: "get signed", Key: key, Err: errors.New("status " + strconv.Itoa(resp.StatusCode))}
	var said struct {
		Code    string `xml:"Code"`
		Message string `xml:"Message"`
	}
	if text, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody)); err == nil && xml.NewDecoder(bytes.NewReader(text)).Decode(&said) == nil {
		e.Code = said.Code
	}
	e.Kind = kind(said.Code, resp.StatusCode)
	switch {
	case said.Code == "InvalidRange":
		return io.NopCloser(strings.NewReader("")), nil
	case resp.StatusCode >= 300 && resp.StatusCode < 400:
		e.Kind, e.Err = objstore.ErrAccess, errors.New("the store redirects, which is not followed")
	case e.Kind == objstore.ErrAccess && (strings.Contains(strings.ToLower(said.Message), "expired") || strings.HasPrefix(said.Code, "ExpiredToken")):
		e.Kind = objstore.ErrExpired
	}
	return nil, e
}
