// Package objstoretest is the acceptance suite of objstore.Bucket, which every driver passes.
package objstoretest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/varve-io/varve/internal/objstore"
)

// Run tests an empty bucket. large is the size of the largest object; give more than one part where parts exist.
func Run(t *testing.T, b objstore.Bucket, large int) {
	ctx := t.Context()
	put := func(t *testing.T, key, data string) {
		t.Helper()
		if err := b.Put(ctx, key, strings.NewReader(data), int64(len(data)), objstore.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	get := func(t *testing.T, key string, off, n int64) string {
		t.Helper()
		r, err := b.Get(ctx, key, off, n)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	list := func(t *testing.T, prefix, after string) []string {
		t.Helper()
		var keys []string
		if err := b.List(ctx, prefix, after, func(i objstore.Info) error {
			keys = append(keys, fmt.Sprintf("%s=%d", i.Key, i.Size))
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return keys
	}
	t.Run("ranges", func(t *testing.T) {
		put(t, "ranges/a", "0123456789")
		for _, c := range []struct {
			off, n int64
			want   string
		}{{0, -1, "0123456789"}, {0, 1, "0"}, {3, 4, "3456"}, {3, -1, "3456789"}, {8, 100, "89"}, {10, 1, ""}, {99, 5, ""}, {99, -1, ""}, {4, 0, ""}} {
			if got := get(t, "ranges/a", c.off, c.n); got != c.want {
				t.Errorf("range %d+%d: %q, want %q", c.off, c.n, got, c.want)
			}
		}
		if _, err := objstore.ReadRange(ctx, b, "ranges/a", 5, 6); !errors.Is(err, objstore.ErrShortBody) {
			t.Errorf("read past the end: %v", err)
		}
		if _, err := objstore.ReadAll(ctx, b, "ranges/a", 9); err == nil {
			t.Error("limit of ReadAll not kept")
		}
	})
	t.Run("empty object", func(t *testing.T) {
		put(t, "empty/o", "")
		if got := get(t, "empty/o", 0, -1); got != "" {
			t.Errorf("got %q", got)
		}
		if info, err := b.Stat(ctx, "empty/o"); err != nil || info.Size != 0 {
			t.Errorf("stat: %+v %v", info, err)
		}
	})
	t.Run("missing", func(t *testing.T) {
		if _, err := b.Get(ctx, "missing/o", 0, 5); !errors.Is(err, objstore.ErrNotFound) {
			t.Errorf("get: %v", err)
		}
		if _, err := b.Stat(ctx, "missing/o"); !errors.Is(err, objstore.ErrNotFound) || objstore.Retriable(err) {
			t.Errorf("stat: %v", err)
		}
		if err := b.Delete(ctx, "missing/o"); err != nil {
			t.Errorf("delete: %v", err)
		}
		if got := list(t, "missing/", ""); len(got) != 0 {
			t.Errorf("list: %v", got)
		}
	})
	t.Run("overwrite and create-only", func(t *testing.T) {
		put(t, "over/o", "first")
		before, err := b.Stat(ctx, "over/o")
		if err != nil {
			t.Fatal(err)
		}
		put(t, "over/o", "second!")
		after, err := b.Stat(ctx, "over/o")
		if err != nil {
			t.Fatal(err)
		}
		if before.ETag == after.ETag || after.Size != 7 || after.Key != "over/o" || after.LastModified.IsZero() {
			t.Errorf("%+v then %+v", before, after)
		}
		err = b.Put(ctx, "over/o", strings.NewReader("third"), 5, objstore.PutOptions{CreateOnly: true})
		if !errors.Is(err, objstore.ErrExists) {
			t.Errorf("create-only over an object: %v", err)
		}
		if got := get(t, "over/o", 0, -1); got != "second!" {
			t.Errorf("content %q", got)
		}
	})
	t.Run("one winner of create-only", func(t *testing.T) {
		var wins atomic.Int32
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				data := fmt.Sprint("writer ", i)
				err := b.Put(ctx, "race/o", strings.NewReader(data), int64(len(data)), objstore.PutOptions{CreateOnly: true})
				if err == nil {
					wins.Add(1)
				} else if !errors.Is(err, objstore.ErrExists) && !objstore.Retriable(err) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if wins.Load() != 1 {
			t.Errorf("%d winners", wins.Load())
		}
	})
	t.Run("list", func(t *testing.T) {
		for _, key := range []string{"l/b/2", "l/b/1", "l/a-b", "l/a/x", "l/c_d-e/0.log", "la", "l/é"} {
			put(t, key, key)
		}
		for _, c := range []struct{ prefix, after, want string }{
			{"l/", "", "[l/a-b=5 l/a/x=5 l/b/1=5 l/b/2=5 l/c_d-e/0.log=13 l/é=4]"},
			{"l/b", "", "[l/b/1=5 l/b/2=5]"},
			{"l/b/", "l/b/1", "[l/b/2=5]"},
			{"l/", "l/a/x", "[l/b/1=5 l/b/2=5 l/c_d-e/0.log=13 l/é=4]"},
			{"l/a", "l/a-", "[l/a-b=5 l/a/x=5]"},
			{"l", "l/z", "[l/é=4 la=2]"},
		} {
			got := list(t, c.prefix, c.after)
			if fmt.Sprint(got) != c.want {
				t.Errorf("list %q after %q:\n%v\nwant\n%v", c.prefix, c.after, got, c.want)
			}
		}
		stop := errors.New("stop")
		n := 0
		if err := b.List(ctx, "l/", "", func(objstore.Info) error { n++; return stop }); err != stop || n != 1 {
			t.Errorf("stopped listing: %v after %d", err, n)
		}
	})
	t.Run("delete", func(t *testing.T) {
		put(t, "del/x/y", "1")
		put(t, "del/x/z", "2")
		if err := b.Delete(ctx, "del/x/y"); err != nil {
			t.Fatal(err)
		}
		if got := list(t, "del/", ""); fmt.Sprint(got) != "[del/x/z=1]" {
			t.Errorf("left: %v", got)
		}
		put(t, "del/x/y", "again")
		if got := get(t, "del/x/y", 0, -1); got != "again" {
			t.Errorf("got %q", got)
		}
	})
	t.Run("large", func(t *testing.T) {
		data := make([]byte, large)
		for i := range data {
			data[i] = byte(i ^ i>>8 ^ i>>16)
		}
		body := bytes.NewReader(data)
		if err := b.Put(ctx, "large/o", body, int64(large), objstore.PutOptions{CreateOnly: true}); err != nil {
			t.Fatal(err)
		}
		if err := b.Put(ctx, "large/o", body, int64(large), objstore.PutOptions{CreateOnly: true}); !errors.Is(err, objstore.ErrExists) {
			t.Errorf("create-only again: %v", err)
		}
		if same, err := objstore.Same(ctx, b, "large/o", body, int64(large)); !same || err != nil {
			t.Errorf("stored bytes differ (%v)", err)
		}
		data[large-1]++
		if same, err := objstore.Same(ctx, b, "large/o", body, int64(large)); same || err != nil {
			t.Errorf("difference not seen (%v)", err)
		}
		mid := int64(large / 2)
		got, err := objstore.ReadRange(ctx, b, "large/o", mid, 1000)
		if err != nil || !bytes.Equal(got, data[mid:mid+1000]) {
			t.Errorf("range in the middle differs (%v)", err)
		}
	})
	t.Run("body too short", func(t *testing.T) {
		if err := b.Put(ctx, "short/o", strings.NewReader("abc"), 5, objstore.PutOptions{}); err == nil {
			t.Error("accepted")
		}
		if _, err := b.Stat(ctx, "short/o"); !errors.Is(err, objstore.ErrNotFound) {
			t.Errorf("left an object: %v", err)
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		dead, cancel := context.WithCancel(ctx)
		cancel()
		if err := b.Put(dead, "cancel/o", strings.NewReader("x"), 1, objstore.PutOptions{}); !errors.Is(err, context.Canceled) {
			t.Errorf("put: %v", err)
		}
		if _, err := b.Get(dead, "over/o", 0, -1); !errors.Is(err, context.Canceled) || objstore.Retriable(err) {
			t.Errorf("get: %v", err)
		}
	})
	t.Run("check", func(t *testing.T) {
		rep, err := objstore.Check(ctx, b)
		if err != nil || !rep.CreateOnly || len(rep.Notes) > 0 {
			t.Errorf("%+v %v", rep, err)
		}
		if got := list(t, "varve-probe/", ""); len(got) != 0 {
			t.Errorf("left behind: %v", got)
		}
	})
	t.Run("prefix", func(t *testing.T) {
		p := objstore.WithPrefix(b, "pre-")
		if err := p.Put(ctx, "k/1", strings.NewReader("x"), 1, objstore.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := p.Put(ctx, "k/2", strings.NewReader("y"), 1, objstore.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		var keys []string
		if err := p.List(ctx, "k/", "k/1", func(i objstore.Info) error { keys = append(keys, i.Key); return nil }); err != nil || fmt.Sprint(keys) != "[k/2]" {
			t.Errorf("%v %v", keys, err)
		}
		if info, err := b.Stat(ctx, "pre-k/1"); err != nil || info.Size != 1 {
			t.Errorf("%+v %v", info, err)
		}
	})
}
