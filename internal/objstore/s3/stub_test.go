package s3_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/objstore/s3"
)

// stub is a server that is as difficult as real clones are.
type stub struct {
	mu       sync.Mutex
	requests []*http.Request
	answer   func(n int, w http.ResponseWriter, r *http.Request) // n counts from 1
}

func (s *stub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.requests = append(s.requests, r)
	n := len(s.requests)
	s.mu.Unlock()
	s.answer(n, w, r)
}

func (s *stub) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.requests)
}

func start(t *testing.T, answer func(n int, w http.ResponseWriter, r *http.Request)) (*stub, s3.Options) {
	s := &stub{answer: answer}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	return s, s3.Options{Bucket: "buck", Endpoint: server.URL, PathStyle: true, AccessKey: "a", SecretKey: "s"}
}

func fail(w http.ResponseWriter, status int, code string) {
	w.WriteHeader(status)
	fmt.Fprintf(w, "<Error><Code>%s</Code><Message>no</Message></Error>", code)
}

// A signed URL leads nowhere but to the bucket, and gives no credentials away.
func TestSignedReadsOfDifficultStores(t *testing.T) {
	answers := map[string]func(w http.ResponseWriter, r *http.Request){
		"redirect": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/buck/other", http.StatusTemporaryRedirect)
		},
		"whole": func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "0123456789") },
		"endless": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusPartialContent)
			fmt.Fprint(w, strings.Repeat("x", 1<<20))
		},
		"short": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "4")
			w.WriteHeader(http.StatusPartialContent)
			fmt.Fprint(w, "01")
		},
		"throttled": func(w http.ResponseWriter, _ *http.Request) { fail(w, 503, "SlowDown") },
		"no XML": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(403)
			fmt.Fprint(w, strings.Repeat("<a>", 1<<16))
		},
		"gone": func(w http.ResponseWriter, _ *http.Request) { fail(w, 404, "NoSuchKey") },
	}
	kinds := map[string]error{"redirect": objstore.ErrAccess, "whole": objstore.ErrUnsupported, "endless": nil, "short": objstore.ErrShortBody,
		"throttled": objstore.ErrThrottled, "no XML": objstore.ErrAccess, "gone": objstore.ErrNotFound}
	for name, answer := range answers {
		server, o := start(t, func(_ int, w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") != "" {
				t.Errorf("%s: credentials were sent", name)
			}
			answer(w, r)
		})
		b, err := s3.New(o)
		if err != nil {
			t.Fatal(err)
		}
		body, err := b.GetSigned(t.Context(), o.Endpoint+"/buck/k?X-Amz-Signature=secret", "k", 2, 4)
		var got []byte
		if err == nil {
			got, err = io.ReadAll(body)
			body.Close()
		}
		if !errors.Is(err, kinds[name]) || (err == nil) != (kinds[name] == nil) || len(got) > 4 || err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %q, %v", name, got, err)
		}
		if n := server.count(); n != 1 {
			t.Errorf("%s: %d requests", name, n)
		}
		b.Close()
	}
}

func TestPutIsPlain(t *testing.T) {
	for _, md5 := range []bool{false, true} {
		_, o := start(t, func(_ int, w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			switch {
			case strings.Contains(r.Header.Get("Content-Encoding"), "aws-chunked"), strings.HasPrefix(r.Header.Get("X-Amz-Content-Sha256"), "STREAMING"):
				fail(w, 400, "InvalidChunked")
			case len(r.Trailer) > 0, r.Header.Get("X-Amz-Trailer") != "":
				fail(w, 400, "NoTrailers")
			case md5 != (r.Header.Get("Content-Md5") != ""):
				fail(w, 400, "ContentMD5")
			case string(body) != "hello":
				fail(w, 400, "BodyDiffers")
			}
			for h := range r.Header {
				if strings.HasPrefix(h, "X-Amz-Checksum") {
					fail(w, 400, "NoChecksums")
				}
			}
		})
		o.ContentMD5 = md5
		if err := open(t, o).Put(t.Context(), "k", strings.NewReader("hello"), 5, objstore.PutOptions{CreateOnly: true}); err != nil {
			t.Errorf("md5 %v: %v", md5, err)
		}
	}
}

func TestKindsOfErrors(t *testing.T) {
	for _, c := range []struct {
		status int
		code   string
		want   error
		retry  bool
	}{
		{404, "NoSuchKey", objstore.ErrNotFound, false}, {403, "AccessDenied", objstore.ErrAccess, false},
		{503, "SlowDown", objstore.ErrThrottled, true}, {429, "Whatever", objstore.ErrThrottled, true},
		{501, "NotImplemented", objstore.ErrUnsupported, false}, {412, "PreconditionFailed", objstore.ErrExists, false},
		{403, "RequestTimeTooSkewed", objstore.ErrClockSkew, true}, {500, "InternalError", nil, true}, {400, "ExpiredToken", objstore.ErrAccess, false},
	} {
		s, o := start(t, func(_ int, w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Date", time.Now().Add(20*time.Minute).UTC().Format(http.TimeFormat))
			fail(w, c.status, c.code)
		})
		_, err := open(t, o).Get(t.Context(), "k", 0, 5)
		if err == nil || c.want != nil && !errors.Is(err, c.want) || objstore.Retriable(err) != c.retry || !strings.Contains(err.Error(), c.code) {
			t.Errorf("%d %s: %v", c.status, c.code, err)
		}
		if s.count() != 1 {
			t.Errorf("%s: %d requests", c.code, s.count())
		}
		if c.want == objstore.ErrClockSkew && !strings.Contains(err.Error(), "local clock is -") {
			t.Errorf("skew not told: %v", err)
		}
	}
}

func TestShortBody(t *testing.T) {
	_, o := start(t, func(_ int, w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "10")
		w.Header().Set("Content-Range", "bytes 0-9/10")
		w.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
		w.WriteHeader(http.StatusPartialContent)
		io.WriteString(w, "12345")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	if _, err := objstore.ReadRange(t.Context(), open(t, o), "k", 0, 10); !errors.Is(err, objstore.ErrShortBody) {
		t.Errorf("%v", err)
	}
}

func TestRangeIgnored(t *testing.T) {
	_, o := start(t, func(_ int, w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
		io.WriteString(w, "0123456789")
	})
	b := open(t, o)
	if got, err := objstore.ReadRange(t.Context(), b, "k", 0, 4); err != nil || string(got) != "0123" {
		t.Errorf("%q %v", got, err)
	}
	if _, err := objstore.ReadRange(t.Context(), b, "k", 2, 4); !errors.Is(err, objstore.ErrUnsupported) {
		t.Errorf("%v", err)
	}
}

func TestCredentialsAreRefreshedOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "credentials")
	write := func(key string) {
		if err := os.WriteFile(file, []byte("[default]\naws_access_key_id="+key+"\naws_secret_access_key=s\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("AWS_ACCESS_KEY_ID", "")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "")
	write("old")
	valid := "old"
	s, o := start(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		if !strings.Contains(r.Header.Get("Authorization"), "Credential="+valid+"/") {
			fail(w, 403, "InvalidAccessKeyId")
		}
	})
	o.AccessKey, o.SecretKey, o.CredentialsFile = "", "", file
	o.RefreshInterval = time.Hour
	b := open(t, o)
	put := func() error { return b.Put(t.Context(), "k", strings.NewReader("x"), 1, objstore.PutOptions{}) }
	if err := put(); err != nil {
		t.Fatal(err)
	}
	valid = "new"
	write("new")
	if err := put(); err != nil || s.count() > 3 {
		t.Errorf("after rotation: %v, %d requests", err, s.count())
	}
	valid = "never"
	before := s.count()
	for range 3 {
		if err := put(); !errors.Is(err, objstore.ErrAccess) {
			t.Errorf("%v", err)
		}
	}
	if n := s.count() - before; n > 4 {
		t.Errorf("refresh loop: %d requests for 3 puts", n)
	}
}

// A multipart upload whose completion answers 500 after it took effect ends in one object and in success.
func TestCompletionFailsAfterEffect(t *testing.T) {
	var stored []byte
	parts := map[string][]byte{}
	uploads := 0
	_, o := start(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		switch {
		case r.Method == http.MethodHead:
			if stored == nil {
				w.WriteHeader(404)
				return
			}
			w.Header().Set("Content-Length", fmt.Sprint(len(stored)))
			w.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
		case r.Method == http.MethodGet:
			w.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
			w.Write(stored)
		case r.Method == http.MethodPost && q.Has("uploads"):
			uploads++
			io.WriteString(w, "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
		case r.Method == http.MethodPut:
			parts[q.Get("partNumber")], _ = io.ReadAll(r.Body)
			w.Header().Set("ETag", `"e"`)
		case r.Method == http.MethodPost:
			if stored != nil {
				fail(w, 412, "PreconditionFailed")
				return
			}
			if r.Header.Get("If-None-Match") != "*" {
				fail(w, 400, "NoCondition")
				return
			}
			stored = append(append([]byte{}, parts["1"]...), parts["2"]...)
			fail(w, 500, "InternalError")
		}
	})
	o.PartSize, o.Concurrency = 5<<20, 1
	b := objstore.WithRetries(open(t, o), objstore.RetryPolicy{Attempts: 3, Base: time.Millisecond})
	data := bytes.Repeat([]byte("varve"), 6<<20/5)
	if err := b.Put(t.Context(), "k", bytes.NewReader(data), int64(len(data)), objstore.PutOptions{CreateOnly: true}); err != nil {
		t.Errorf("%v", err)
	}
	if !bytes.Equal(stored, data) || uploads != 1 {
		t.Errorf("%d bytes stored in %d uploads", len(stored), uploads)
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []s3.Options{{}, {Bucket: "b", PartSize: 100}, {Bucket: "b", Endpoint: "ftp://x"}, {Bucket: "b", Endpoint: "http://user:secret@x"}, {Bucket: "b", CAFile: "/nowhere"}} {
		_, err := s3.New(o)
		if err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%+v: %v", o, err)
		}
	}
}
