package fetcherplugin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/varve-io/varve/direct"
)

// TestMain makes the test's own executable the plug-in.
func TestMain(m *testing.M) {
	if os.Getenv(handshake.MagicCookieKey) == handshake.MagicCookieValue {
		Serve(func(p map[string]string) (direct.Fetcher, error) {
			switch p["open"] {
			case "fails":
				return nil, errors.New("no such store")
			case "panics":
				panic("at the start")
			case "hangs":
				select {}
			case "dies":
				os.Exit(3)
			}
			return actor{}, nil
		})
		return
	}
	os.Exit(m.Run())
}

// actor does what the object's key says.
type actor struct{}

func (actor) Formats() []string { return []string{"X", "Y"} }

// byteAt is the content of every object.
func byteAt(i int64) byte { return byte(i ^ i>>8) }

func content(start, end int64) []byte {
	b := make([]byte, end-start)
	for i := range b {
		b[i] = byteAt(start + int64(i))
	}
	return b
}

func (actor) FetchLogSegment(ctx context.Context, s direct.Segment, start, end int64) (io.ReadCloser, error) {
	whole := content(start, end)
	switch what, arg, _ := strings.Cut(s.ObjectKey, ":"); what {
	case "whole":
		return io.NopCloser(bytes.NewReader(whole)), nil
	case "same": // the segment came as it was
		want := direct.Segment{SegmentID: [16]byte{1, 15: 9}, ObjectKey: "same", Format: "X", CustomMetadata: []byte{1}, Size: 10, BaseOffset: 5, LogGrant: "log", ManifestGrant: "manifest"}
		if fmt.Sprintf("%+v", s) != fmt.Sprintf("%+v", want) || s.LogGrant != want.LogGrant || s.ManifestGrant != want.ManifestGrant {
			return nil, fmt.Errorf("got %+v", s)
		}
		return io.NopCloser(bytes.NewReader(whole)), nil
	case "error":
		return nil, fmt.Errorf("%w: by order", kinds[arg])
	case "long":
		return nil, errors.New(strings.Repeat("x", 1<<20))
	case "none":
		return nil, nil
	case "panics":
		panic("in the fetch")
	case "body":
		return io.NopCloser(io.MultiReader(bytes.NewReader(whole), failing{arg})), nil
	case "waits": // until it is told to stop
		<-ctx.Done()
		os.WriteFile(arg, nil, 0o600)
		return nil, ctx.Err()
	case "drips": // until the reader hangs up
		return &dripping{ctx, arg}, nil
	case "stuck":
		select {}
	case "exits":
		os.Exit(4)
	}
	return nil, errors.New("what?")
}

type failing struct{ how string }

func (f failing) Read([]byte) (int, error) {
	switch f.how {
	case "panics":
		panic("in the body")
	case "exits":
		os.Exit(5)
	}
	return 0, fmt.Errorf("%w: in the body", kinds[f.how])
}

type dripping struct {
	ctx  context.Context
	file string
}

func (d *dripping) Read(p []byte) (int, error) {
	<-d.ctx.Done()
	return 0, d.ctx.Err()
}

func (d *dripping) Close() error { return os.WriteFile(d.file, nil, 0o600) }

func open(t *testing.T, o Options) *Fetcher {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	o.Path, o.RestartMin = self, time.Millisecond
	f, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Close)
	return f
}

// read fetches a range of an object.
func read(ctx context.Context, f *Fetcher, key string, start, end int64) ([]byte, error) {
	body, err := f.FetchLogSegment(ctx, direct.Segment{ObjectKey: key}, start, end)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(body)
}

// eventually polls.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(30 * time.Second); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not in 30 s", what)
		}
	}
}

func TestRangesComeThrough(t *testing.T) {
	f := open(t, Options{})
	if got := fmt.Sprint(f.Formats()); got != "[X Y]" {
		t.Error(got)
	}
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			start, end := int64(i*1000), int64(i*1000+i*i*5000)
			if got, err := read(t.Context(), f, "whole", start, end); err != nil || !bytes.Equal(got, content(start, end)) {
				t.Errorf("%d to %d: %d bytes, %v", start, end, len(got), err)
			}
		})
	}
	wg.Wait()
	body, err := f.FetchLogSegment(t.Context(), direct.Segment{SegmentID: [16]byte{1, 15: 9}, ObjectKey: "same", Format: "X", CustomMetadata: []byte{1}, Size: 10, BaseOffset: 5,
		LogGrant: "log", ManifestGrant: "manifest"}, 0, 3)
	if err != nil {
		t.Fatal(err)
	}
	body.Close()
}

func TestErrorsKeepTheirMeaning(t *testing.T) {
	f := open(t, Options{})
	for kind, sentinel := range kinds {
		if _, err := read(t.Context(), f, "error:"+kind, 0, 1); !errors.Is(err, sentinel) || !strings.Contains(err.Error(), "by order") {
			t.Errorf("%s: %v", kind, err)
		}
		if got, err := read(t.Context(), f, "body:"+kind, 0, 300_000); !errors.Is(err, sentinel) || !bytes.Equal(got, content(0, 300_000)) {
			t.Errorf("%s in the body: %d bytes, %v", kind, len(got), err)
		}
	}
	for key, want := range map[string]string{"none": "no body", "panics": "in the fetch", "what": "what?", "long": "xxx"} {
		if _, err := read(t.Context(), f, key, 0, 1); err == nil || !strings.Contains(err.Error(), want) || len(err.Error()) > 2*maxText {
			t.Errorf("%s: %.200v", key, err)
		}
	}
	if got, err := read(t.Context(), f, "body:panics", 0, 10); err == nil || !strings.Contains(err.Error(), "in the body") || len(got) != 10 {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if _, err := read(t.Context(), f, "whole", 0, 10); err != nil {
		t.Errorf("the process did not outlive errors and panics: %v", err)
	}
}

func TestWhoeverGivesUpIsHeard(t *testing.T) {
	f := open(t, Options{})
	told := filepath.Join(t.TempDir(), "told")
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("no more time")
	go cancel(why)
	if _, err := read(ctx, f, "waits:"+told, 0, 1); !errors.Is(err, why) {
		t.Error(err)
	}
	exists := func(file string) func() bool {
		return func() bool { _, err := os.Stat(file); return err == nil }
	}
	eventually(t, "the call's context ends", exists(told))
	closed := filepath.Join(t.TempDir(), "closed")
	body, err := f.FetchLogSegment(t.Context(), direct.Segment{ObjectKey: "drips:" + closed}, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := body.Read(make([]byte, 1))
		ended <- err
	}()
	body.Close()
	if err := <-ended; err == nil {
		t.Error("a closed body was read")
	}
	eventually(t, "the body is closed on the other side", exists(closed))
}

func TestProcessesThatDieOrHangAreReplaced(t *testing.T) {
	var said safe
	f := open(t, Options{StuckAfter: 10 * time.Millisecond, MaxCalls: 2, Logger: slog.New(slog.NewTextHandler(&said, nil))})
	works := func() bool {
		got, err := read(t.Context(), f, "whole", 5, 15)
		return err == nil && bytes.Equal(got, content(5, 15))
	}
	if _, err := read(t.Context(), f, "exits", 0, 1); err == nil {
		t.Error("a call was answered by a process that ended")
	}
	eventually(t, "it is started again after it ended", works)
	if got, err := read(t.Context(), f, "body:exits", 0, 300_000); err == nil || len(got) > 300_000 {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	eventually(t, "it is started again after it ended in a body", works)
	// Two hang, and there is no room for a third.
	ctx, cancel := context.WithCancel(t.Context())
	var stuck sync.WaitGroup
	for range 2 {
		stuck.Go(func() {
			for {
				_, err := read(ctx, f, "stuck", 0, 1)
				if errors.Is(err, ErrBusy) && ctx.Err() == nil {
					continue // the call that looks for room has it
				}
				if !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
				return
			}
		})
	}
	eventually(t, "there is no room", func() bool { _, err := read(ctx, f, "whole", 0, 1); return errors.Is(err, ErrBusy) })
	cancel()
	stuck.Wait()
	eventually(t, "it is started again after it hung", works)
	if !strings.Contains(said.String(), "started again") {
		t.Error(said.String())
	}
	f.Close()
	f.Close()
	if _, err := read(t.Context(), f, "whole", 0, 1); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}

// safe is a buffer that a logger may write to meanwhile.
type safe struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safe) Write(p []byte) (int, error) { s.mu.Lock(); defer s.mu.Unlock(); return s.b.Write(p) }
func (s *safe) String() string              { s.mu.Lock(); defer s.mu.Unlock(); return s.b.String() }

func TestStartsThatFail(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("no program"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		o    Options
		want string
	}{
		{Options{}, "no executable"},
		{Options{Path: filepath.Join(t.TempDir(), "missing")}, "no such file"},
		{Options{Path: text}, "exec format"},
		{Options{Path: "/bin/true"}, "plugin"},
		{Options{Path: self, Properties: map[string]string{"open": "fails"}}, "no such store"},
		{Options{Path: self, Properties: map[string]string{"open": "panics"}}, "at the start"},
		{Options{Path: self, Properties: map[string]string{"open": "dies"}}, ""},
		{Options{Path: self, Properties: map[string]string{"open": "hangs"}, StartTimeout: 500 * time.Millisecond}, "does not answer"},
	} {
		if f, err := New(c.o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c.o, err)
			if f != nil {
				f.Close()
			}
		}
	}
}

// Whatever comes over a stream ends, with an error unless it was well formed.
func FuzzFrames(f *testing.F) {
	var good bytes.Buffer
	if err := send(&good, bytes.NewReader(content(0, 1000))); err != nil {
		f.Fatal(err)
	}
	f.Add(good.Bytes())
	f.Add([]byte{0x80, 0, 0, 2, '{', '}'})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := io.ReadAll(newFrames(bytes.NewReader(b)))
		if len(got) > len(b) || err == nil && !bytes.HasSuffix(b, []byte{0, 0, 0, 0}) && len(b) < 4 {
			t.Fatalf("%d bytes of %d, %v", len(got), len(b), err)
		}
	})
}
