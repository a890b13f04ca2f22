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
