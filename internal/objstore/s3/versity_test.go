package s3_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/objstore/objstoretest"
	"github.com/varve-io/varve/internal/objstore/s3"
	"github.com/varve-io/varve/internal/s3test"
)

func open(t *testing.T, o s3.Options) *s3.Bucket {
	t.Helper()
	b, err := s3.New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

// expired waits until a URL that was signed for the least time is refused.
func expired(t *testing.T, url string) string {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); <-tick.C {
		resp, err := http.Get(url)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode == http.StatusForbidden {
			return url
		}
	}
	t.Fatal("the URL does not expire")
	return ""
}

func TestRealServer(t *testing.T) {
	server := s3test.Start(t)
	o := server.Options()
	o.PartSize = 5 << 20
	b := open(t, o)
	t.Run("suite", func(t *testing.T) { objstoretest.Run(t, b, 12<<20) })
	t.Run("presign", func(t *testing.T) {
		if err := b.Put(t.Context(), "signed/o", strings.NewReader("0123456789"), 10, objstore.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		u, err := b.PresignGet(t.Context(), "signed/o", time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		for url, want := range map[string]int{u: http.StatusPartialContent, u[:len(u)-4] + "0000": http.StatusForbidden} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Range", "bytes=2-4")
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			data, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || resp.StatusCode != want || want == http.StatusPartialContent && string(data) != "234" {
				t.Errorf("status %d, want %d: %q %v", resp.StatusCode, want, data, err)
			}
		}
	})
	t.Run("signed", func(t *testing.T) {
		key := "signed/key with spaces+ü.log"
		if err := b.Put(t.Context(), key, strings.NewReader("0123456789"), 10, objstore.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		u, err := b.PresignGet(t.Context(), key, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		old, err := b.PresignGet(t.Context(), key, -time.Hour) // S3 signs one second at least
		if err != nil {
			t.Fatal(err)
		}
		plain := o
		plain.AccessKey, plain.SecretKey = "", ""
		reader := open(t, plain)
		for _, c := range []struct {
			name, url, key string
			off, n         int64
			want           string
			kind           error
		}{
			{"range", u, key, 2, 3, "234", nil},
			{"rest", u, key, 7, -1, "789", nil},
			{"all", u, key, 0, -1, "0123456789", nil},
			{"over the end", u, key, 8, 10, "89", nil},
			{"behind the end", u, key, 20, 5, "", nil},
			{"nothing", u, key, 3, 0, "", nil},
			{"another object", u, "signed/o", 0, -1, "", objstore.ErrAccess},
			{"another host", strings.Replace(u, "127.0.0.1", "127.0.0.2", 1), key, 0, -1, "", objstore.ErrAccess},
			{"another bucket", strings.Replace(u, server.Bucket, "other", 1), key, 0, -1, "", objstore.ErrAccess},
			{"another scheme", strings.Replace(u, "http:", "https:", 1), key, 0, -1, "", objstore.ErrAccess},
			{"a user", strings.Replace(u, "http://", "http://me@", 1), key, 0, -1, "", objstore.ErrAccess},
			{"no URL", "::", key, 0, -1, "", objstore.ErrAccess},
			{"changed", u[:len(u)-4] + "0000", key, 0, -1, "", objstore.ErrAccess},
			{"expired", expired(t, old), key, 0, -1, "", objstore.ErrExpired},
		} {
			r, err := reader.GetSigned(t.Context(), c.url, c.key, c.off, c.n)
			var got []byte
			if err == nil {
				got, err = io.ReadAll(r)
				r.Close()
			}
			if string(got) != c.want || !errors.Is(err, c.kind) || (err == nil) != (c.kind == nil) || err != nil && strings.Contains(err.Error(), "X-Amz") {
				t.Errorf("%s: %q, %v", c.name, got, err)
			}
		}
	})
	t.Run("failed multipart leaves nothing", func(t *testing.T) {
		data := failing{bytes.NewReader(make([]byte, 12<<20)), 6 << 20}
		if err := b.Put(t.Context(), "broken/o", data, 12<<20, objstore.PutOptions{}); !errors.Is(err, errDisk) {
			t.Errorf("%v", err)
		}
		if err := b.ListUploads(t.Context(), "broken/", func(u objstore.Upload) error {
			t.Errorf("left %+v", u)
			return nil
		}); err != nil {
			t.Error(err)
		}
	})
	t.Run("unfinished upload is found and aborted", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		core := b.Core()
		id, err := core.NewMultipartUpload(ctx, server.Bucket, "dead/o", s3.NoOptions)
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		var found []objstore.Upload
		if err := b.ListUploads(t.Context(), "dead/", func(u objstore.Upload) error { found = append(found, u); return nil }); err != nil {
			t.Fatal(err)
		}
		if len(found) != 1 || found[0].ID != id || found[0].Key != "dead/o" {
			t.Fatalf("%+v", found)
		}
		for range 2 {
			if err := b.AbortUpload(t.Context(), found[0]); err != nil {
				t.Error(err)
			}
		}
		if err := b.ListUploads(t.Context(), "dead/", func(u objstore.Upload) error { return errors.New(u.Key) }); err != nil {
			t.Errorf("still there: %v", err)
		}
	})
	t.Run("wrong secret", func(t *testing.T) {
		o := server.Options()
		o.SecretKey = "wrong"
		_, err := objstore.Check(t.Context(), open(t, o))
		if !errors.Is(err, objstore.ErrAccess) || strings.Contains(err.Error(), "wrong\"") {
			t.Errorf("%v", err)
		}
	})
}

var errDisk = errors.New("disk broke")

type failing struct {
	r     io.ReaderAt
	after int64
}

func (f failing) ReadAt(p []byte, off int64) (int, error) {
	if off >= f.after {
		return 0, errDisk
	}
	return f.r.ReadAt(p, off)
}
