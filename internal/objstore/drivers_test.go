package objstore_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/objstore/objstoretest"
)

func TestMemory(t *testing.T) { objstoretest.Run(t, objstore.NewMemory(), 1<<20) }

func TestDir(t *testing.T) {
	d, err := objstore.NewDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	objstoretest.Run(t, d, 1<<20)
}

func TestWrapped(t *testing.T) {
	m, err := objstore.NewMetrics(nil)
	if err != nil {
		t.Fatal(err)
	}
	b := objstore.WithRetries(objstore.WithMetrics(objstore.WithFaults(objstore.NewMemory()), m), objstore.RetryPolicy{})
	objstoretest.Run(t, b, 1<<20)
}

func TestBadKeys(t *testing.T) {
	dir := t.TempDir()
	d, err := objstore.NewDir(filepath.Join(dir, "bucket"))
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []objstore.Bucket{d, objstore.NewMemory()} {
		for _, key := range []string{"", "/a", "a/", "a//b", "..", "../x", "a/../../x", "a/./b", "a\x00b", `a\b`, "a\nb", strings.Repeat("k", 1025)} {
			err := b.Put(t.Context(), key, strings.NewReader("x"), 1, objstore.PutOptions{})
			if !errors.Is(err, objstore.ErrBadKey) {
				t.Errorf("%s: key %q: %v", b, key, err)
			}
		}
	}
	if err := d.Put(t.Context(), ".varve-tmp/x", strings.NewReader("x"), 1, objstore.PutOptions{}); !errors.Is(err, objstore.ErrBadKey) {
		t.Errorf("reserved key: %v", err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("escaped: %v %v", entries, err)
	}
}

// A folder of another program's is read without a trace.
func TestDirWritesNothingByItself(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "theirs"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o500); err != nil {
		t.Fatal(err)
	}
	defer os.Chmod(dir, 0o700)
	d, err := objstore.NewDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Stat(t.Context(), "theirs"); err != nil {
		t.Error(err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("%v, %v", entries, err)
	}
}

func TestDirLeavesNoTemporaries(t *testing.T) {
	root := t.TempDir()
	d, err := objstore.NewDir(root)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		_ = d.Put(t.Context(), "k", strings.NewReader("data"), 4, objstore.PutOptions{CreateOnly: true})
		_ = d.Put(t.Context(), "short", strings.NewReader("data"), 9, objstore.PutOptions{})
	}
	entries, err := os.ReadDir(filepath.Join(root, ".varve-tmp"))
	if err != nil || len(entries) != 0 {
		t.Errorf("%v %v", entries, err)
	}
}
