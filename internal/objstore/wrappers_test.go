package objstore_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/varve-io/varve/internal/objstore"
)

var errBroken = errors.New("broken")

func TestRetriesAreBoundedAndStopAtFinalErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := objstore.WithFaults(objstore.NewMemory())
		b := objstore.WithRetries(f, objstore.RetryPolicy{Attempts: 4, Base: time.Second, Max: 3 * time.Second})
		f.Add(objstore.Fault{Op: objstore.OpStat, Err: objstore.ErrThrottled})
		start := time.Now()
		if _, err := b.Stat(t.Context(), "k"); !errors.Is(err, objstore.ErrThrottled) || f.Count(objstore.OpStat) != 4 {
			t.Errorf("%v after %d attempts", err, f.Count(objstore.OpStat))
		}
		// pauses are in the upper halves of 1, 2 and 3 s
		if took := time.Since(start); took < 3*time.Second || took > 6*time.Second {
			t.Errorf("took %s", took)
		}
		f.Clear()
		if _, err := b.Stat(t.Context(), "k"); !errors.Is(err, objstore.ErrNotFound) || f.Count(objstore.OpStat) != 5 {
			t.Errorf("%v after %d", err, f.Count(objstore.OpStat))
		}
		f.Add(objstore.Fault{Op: objstore.OpDelete, Err: errBroken})
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		if err := b.Delete(ctx, "k"); !errors.Is(err, errBroken) || f.Count(objstore.OpDelete) != 1 {
			t.Errorf("%v after %d", err, f.Count(objstore.OpDelete))
		}
	})
}

func TestCreateOnlyPutThatFailedAfterEffect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := objstore.WithFaults(objstore.NewMemory())
		b := objstore.WithRetries(f, objstore.RetryPolicy{})
		put := func(data string) error {
			return b.Put(t.Context(), "k", strings.NewReader(data), int64(len(data)), objstore.PutOptions{CreateOnly: true})
		}
		f.Add(objstore.Fault{Op: objstore.OpPut, Times: 1, Err: errBroken, AfterEffect: true})
		if err := put("mine"); err != nil {
			t.Errorf("own object taken for a foreign one: %v", err)
		}
		f.Add(objstore.Fault{Op: objstore.OpPut, Times: 1, Err: errBroken})
		if err := put("your"); !errors.Is(err, objstore.ErrExists) {
			t.Errorf("foreign object taken for its own: %v", err)
		}
		if err := put("mine"); !errors.Is(err, objstore.ErrExists) {
			t.Errorf("a first attempt must not claim an object: %v", err)
		}
	})
}

func TestBrokenBodyIsContinued(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := objstore.NewMemory()
		data := bytes.Repeat([]byte("0123456789"), 1000)
		if err := m.Put(t.Context(), "k", bytes.NewReader(data), int64(len(data)), objstore.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		f := objstore.WithFaults(m)
		b := objstore.WithRetries(f, objstore.RetryPolicy{Attempts: 3})
		f.Add(objstore.Fault{Op: objstore.OpGet, Times: 1, Short: 5000})
		f.Add(objstore.Fault{Op: objstore.OpGet, Times: 1, Short: 10})
		got, err := objstore.ReadRange(t.Context(), b, "k", 100, 9000)
		if err != nil || !bytes.Equal(got, data[100:9100]) {
			t.Errorf("%d bytes, %v", len(got), err)
		}
		f.Add(objstore.Fault{Op: objstore.OpGet, Short: 1 << 20}) // never a byte
		if _, err := objstore.ReadRange(t.Context(), b, "k", 0, 10); !errors.Is(err, objstore.ErrShortBody) {
			t.Errorf("endless: %v", err)
		}
	})
}

func TestListContinuesAfterFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := objstore.NewMemory()
		for _, k := range []string{"a", "b", "c"} {
			if err := m.Put(t.Context(), k, strings.NewReader(k), 1, objstore.PutOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		f := objstore.WithFaults(m)
		f.Add(objstore.Fault{Op: objstore.OpList, Times: 2, Err: errBroken, AfterEffect: true})
		var keys []string
		err := objstore.WithRetries(f, objstore.RetryPolicy{}).List(t.Context(), "", "", func(i objstore.Info) error {
			keys = append(keys, i.Key)
			return nil
		})
		if err != nil || strings.Join(keys, "") != "abc" {
			t.Errorf("%v %v", keys, err)
		}
	})
}

func TestBlockedOperationEndsWithItsContext(t *testing.T) {
	f := objstore.WithFaults(objstore.NewMemory())
	f.Add(objstore.Fault{Block: make(chan struct{})})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := f.Get(ctx, "k", 0, -1)
		done <- err
	}()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	m, err := objstore.NewMetrics(reg)
	if err != nil {
		t.Fatal(err)
	}
	value := func(name string, labels ...string) float64 {
		t.Helper()
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			for _, s := range f.Metric {
				var have []string
				for _, l := range s.Label {
					have = append(have, l.GetValue())
				}
				if f.GetName() == name && strings.Join(have, ",") == strings.Join(labels, ",") {
					return s.GetCounter().GetValue()
				}
			}
		}
		t.Fatalf("no series %s %v", name, labels)
		return 0
	}
	if v := value("varve_objstore_operations_total", "put", "ok"); v != 0 {
		t.Errorf("put before any: %v", v)
	}
	b := objstore.WithMetrics(objstore.NewMemory(), m)
	if err := b.Put(t.Context(), "k", strings.NewReader("12345"), 5, objstore.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	r, err := b.Get(t.Context(), "k", 1, -1)
	if err != nil {
		t.Fatal(err)
	}
	if data, err := io.ReadAll(r); err != nil || len(data) != 4 {
		t.Fatal(data, err)
	}
	r.Close()
	_, _ = b.Stat(t.Context(), "missing")
	for _, c := range []struct {
		labels []string
		want   float64
	}{{[]string{"put", "ok"}, 1}, {[]string{"get", "ok"}, 1}, {[]string{"stat", "not_found"}, 1}} {
		if v := value("varve_objstore_operations_total", c.labels...); v != c.want {
			t.Errorf("%v: %v", c.labels, v)
		}
	}
	if v := value("varve_objstore_bytes_total", "get"); v != 4 {
		t.Errorf("bytes got: %v", v)
	}
}

func TestCheckNamesWhatIsMissing(t *testing.T) {
	for _, c := range []struct {
		op        objstore.Op
		err       error
		want      string
		onlyNoted bool
	}{
		{objstore.OpPut, objstore.ErrAccess, "s3:PutObject", false},
		{objstore.OpGet, objstore.ErrAccess, "s3:GetObject", false},
		{objstore.OpDelete, objstore.ErrAccess, "s3:DeleteObject", false},
		{objstore.OpList, objstore.ErrAccess, "s3:ListBucket", true},
		{objstore.OpPut, objstore.ErrClockSkew, "clock", false},
	} {
		f := objstore.WithFaults(objstore.NewMemory())
		f.Add(objstore.Fault{Op: c.op, Err: c.err})
		rep, err := objstore.Check(t.Context(), f)
		text := strings.Join(rep.Notes, " ")
		if !c.onlyNoted {
			if !errors.Is(err, c.err) {
				t.Errorf("%s: %v", c.op, err)
				continue
			}
			text = err.Error()
		} else if err != nil {
			t.Errorf("%s: %v", c.op, err)
		}
		if !strings.Contains(text, c.want) {
			t.Errorf("%s: %q does not name %s", c.op, text, c.want)
		}
	}
}

// careless is a store that ignores the condition of create-only puts, as some clones do.
type careless struct{ objstore.Bucket }

func (c careless) Put(ctx context.Context, key string, body io.ReaderAt, size int64, _ objstore.PutOptions) error {
	return c.Bucket.Put(ctx, key, body, size, objstore.PutOptions{})
}

// framing is a store that keeps the upload's framing in the object.
type framing struct{ objstore.Bucket }

func (f framing) Put(ctx context.Context, key string, body io.ReaderAt, size int64, o objstore.PutOptions) error {
	data := make([]byte, size+20)
	if _, err := body.ReadAt(data[:size], 0); err != nil && err != io.EOF {
		return err
	}
	return f.Bucket.Put(ctx, key, bytes.NewReader(data), size+20, o)
}

func TestCheckOfOddStores(t *testing.T) {
	rep, err := objstore.Check(t.Context(), careless{objstore.NewMemory()})
	if err != nil || rep.CreateOnly || len(rep.Notes) != 1 || !strings.Contains(rep.Notes[0], "If-None-Match") {
		t.Errorf("%+v %v", rep, err)
	}
	if _, err := objstore.Check(t.Context(), framing{objstore.NewMemory()}); err == nil || !strings.Contains(err.Error(), "framing") {
		t.Errorf("%v", err)
	}
	f := objstore.WithFaults(objstore.NewMemory())
	f.Add(objstore.Fault{Op: objstore.OpGet, Corrupt: true})
	if _, err := objstore.Check(t.Context(), f); err == nil || !strings.Contains(err.Error(), "Range") {
		t.Errorf("%v", err)
	}
}
