package vfs

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
)

// TestContract runs one set of expectations against every implementation.
func TestContract(t *testing.T) {
	for name, make := range map[string]func(*testing.T) (FS, string){
		"os":     func(t *testing.T) (FS, string) { return OS{}, t.TempDir() },
		"mem":    func(*testing.T) (FS, string) { return NewMem(), "/root" },
		"faulty": func(*testing.T) (FS, string) { return NewFaulty(NewMem()), "/root" },
	} {
		t.Run(name, func(t *testing.T) {
			fsys, dir := make(t)
			contract(t, fsys, dir)
		})
	}
}

func contract(t *testing.T, fsys FS, dir string) {
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	sub := filepath.Join(dir, "a", "b")
	must(fsys.MkdirAll(sub))
	must(fsys.MkdirAll(sub))
	name := filepath.Join(sub, "file")
	if _, err := fsys.Open(name); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("open of a missing file: %v", err)
	}
	if _, err := fsys.Open(sub); err == nil {
		t.Fatal("a folder was opened")
	}
	if _, err := fsys.OpenFile(sub); err == nil {
		t.Fatal("a folder was opened for writing")
	}
	f, err := fsys.OpenFile(name)
	must(err)
	_, err = f.WriteAt([]byte("hello"), 3)
	must(err)
	must(f.Sync())
	must(f.Datasync())
	if size, _ := f.Size(); size != 8 || f.Name() != name {
		t.Fatalf("size %d, name %s", size, f.Name())
	}
	must(f.Truncate(5))
	must(f.Truncate(6))
	got, err := ReadFile(fsys, name, 6)
	must(err)
	if !bytes.Equal(got, []byte("\x00\x00\x00he\x00")) {
		t.Fatalf("got %q", got)
	}
	if _, err := ReadFile(fsys, name, 5); err == nil {
		t.Fatal("limit ignored")
	}
	b := make([]byte, 4)
	if n, err := f.ReadAt(b, 4); n != 2 || err != io.EOF {
		t.Fatalf("read over the end: %d, %v", n, err)
	}
	if n, err := f.ReadAt(b, 9); n != 0 || err != io.EOF {
		t.Fatalf("read past the end: %d, %v", n, err)
	}
	must(f.Close())
	if err := f.Close(); err == nil {
		t.Fatal("second close")
	}
	r, err := fsys.Open(name)
	must(err)
	if _, err := r.WriteAt([]byte("x"), 0); err == nil {
		t.Fatal("write to a file opened for reading")
	}
	must(WriteFileAtomic(fsys, name, []byte("new")))
	if n, _ := r.ReadAt(b, 0); n != 4 {
		t.Fatalf("an open file must keep its contents, read %d", n)
	}
	must(r.Close())
	list, err := fsys.ReadDir(sub)
	must(err)
	if !slices.Equal(list, []DirEntry{{"file", false}}) {
		t.Fatalf("got %v", list)
	}
	if i, err := fsys.Stat(name); err != nil || i.Size != 3 || i.IsDir {
		t.Fatalf("stat: %v, %v", i, err)
	}
	if err := fsys.Remove(sub); err == nil {
		t.Fatal("a full folder was removed")
	}
	must(fsys.Rename(sub, filepath.Join(dir, "c")))
	if i, err := fsys.Stat(filepath.Join(dir, "c", "file")); err != nil || i.Size != 3 {
		t.Fatalf("stat after rename: %v, %v", i, err)
	}
	l, err := fsys.Lock(filepath.Join(dir, ".lock"))
	must(err)
	if _, err := fsys.Lock(filepath.Join(dir, ".lock")); !errors.Is(err, ErrLocked) {
		t.Fatalf("second lock: %v", err)
	}
	must(l.Close())
	l, err = fsys.Lock(filepath.Join(dir, ".lock"))
	must(err)
	must(l.Close())
	must(fsys.Remove(filepath.Join(dir, "c", "file")))
	must(fsys.RemoveAll(filepath.Join(dir, "c")))
	must(fsys.RemoveAll(filepath.Join(dir, "c")))
	if _, err := fsys.Stat(filepath.Join(dir, "c")); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("stat of a removed folder: %v", err)
	}
	must(fsys.SyncDir(dir))
}

func TestCrashKeepsWhatWasSynced(t *testing.T) {
	lostWrite, torn, lostName, lostRename := false, false, false, false
	for seed := range uint64(300) {
		m := NewMem()
		if err := m.MkdirAll("/d"); err != nil {
			t.Fatal(err)
		}
		if err := m.SyncDir("/"); err != nil {
			t.Fatal(err)
		}
		f, _ := m.Create("/d/f")
		f.WriteAt([]byte("synced"), 0)
		f.Sync()
		m.SyncDir("/d")
		f.WriteAt([]byte("unsynced"), 6)
		m.Create("/d/g")
		WriteFile(m, "/d/h.tmp", []byte("h"))
		m.Rename("/d/h.tmp", "/d/h")
		c := m.CrashClone(rand.New(rand.NewPCG(seed, 0)))
		got, err := ReadFile(c, "/d/f", 100)
		if err != nil || !bytes.HasPrefix([]byte("syncedunsynced"), got) || !bytes.HasPrefix(got, []byte("synced")) {
			t.Fatalf("seed %d: %q, %v", seed, got, err)
		}
		lostWrite = lostWrite || len(got) == 6
		torn = torn || len(got) > 6 && len(got) < 14
		if _, err := c.Stat("/d/g"); err != nil {
			lostName = true
		}
		_, errOld := c.Stat("/d/h.tmp")
		if h, err := ReadFile(c, "/d/h", 10); err == nil {
			if string(h) != "h" || errOld == nil {
				t.Fatalf("seed %d: half a rename: %q, %v", seed, h, errOld)
			}
		} else {
			lostRename = true
		}
		if live, err := ReadFile(m, "/d/f", 100); err != nil || len(live) != 14 {
			t.Fatalf("the crash changed the living file system: %q, %v", live, err)
		}
	}
	if !lostWrite || !torn || !lostName || !lostRename {
		t.Errorf("not all losses happened: write %v, torn %v, name %v, rename %v", lostWrite, torn, lostName, lostRename)
	}
}

func TestWriteFileAtomicSurvivesACrash(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		m := NewMem()
		m.MkdirAll("/d")
		m.SyncDir("/")
		if err := WriteFileAtomic(m, "/d/f", []byte("old")); err != nil {
			t.Fatal(err)
		}
		if got, _ := ReadFile(m.CrashClone(r), "/d/f", 9); string(got) != "old" {
			t.Fatalf("seed %d: %q after the write", seed, got)
		}
		WriteFile(m, "/d/f.tmp", []byte("newer"))
		m.Rename("/d/f.tmp", "/d/f")
		if got, _ := ReadFile(m.CrashClone(r), "/d/f", 9); string(got) != "old" && string(got) != "newer" {
			t.Fatalf("seed %d: %q in the middle", seed, got)
		}
	}
}

func TestFaults(t *testing.T) {
	f := NewFaulty(NewMem())
	f.Inject(Fault{Op: OpWrite, Path: "x", Nth: 2, Err: syscall.ENOSPC, Partial: 2})
	f.Inject(Fault{Op: OpSync, Err: syscall.EIO, Sticky: true})
	x, err := f.Create("/x")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := x.WriteAt([]byte("abc"), 0); err != nil {
		t.Fatal(err)
	}
	if n, err := x.WriteAt([]byte("def"), 3); n != 2 || !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("second write: %d, %v", n, err)
	}
	if _, err := x.WriteAt([]byte("f"), 5); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := x.Sync(); !errors.Is(err, syscall.EIO) {
			t.Fatalf("sync: %v", err)
		}
	}
	f.Heal()
	if err := x.Sync(); err != nil {
		t.Fatal(err)
	}
	if got, _ := ReadFile(f, "/x", 9); string(got) != "abcdef" {
		t.Fatalf("got %q", got)
	}
}
