package vfs

import (
	"io"
	"strings"
	"sync"
)

// Op is a kind of operation that Faulty can fail.
type Op string

// The kinds. OpOpen covers Open, OpenFile and Create; OpSync covers Sync and Datasync.
const (
	OpOpen     Op = "open"
	OpRead     Op = "read"
	OpWrite    Op = "write"
	OpSync     Op = "sync"
	OpTruncate Op = "truncate"
	OpRemove   Op = "remove"
	OpRename   Op = "rename"
	OpMkdir    Op = "mkdir"
	OpReadDir  Op = "readdir"
	OpSyncDir  Op = "syncdir"
)

// Fault says which operation fails and how.
type Fault struct {
	Op   Op
	Path string // a part of the path; empty matches all
	Nth  int    // the first match that fails, from 1; 0 is 1
	Err  error
	// Sticky fails all matches from the Nth on, not just that one.
	Sticky bool
	// Partial is the number of bytes that a failing write still writes.
	Partial int
}

// Faulty is a file system that fails as told and otherwise passes everything on.
type Faulty struct {
	FS
	// Before, if set before use, is called ahead of each operation that changes or syncs something.
	Before func(op Op, path string)

	mu     sync.Mutex
	faults []*armed
}

type armed struct {
	Fault
	seen int
}

// NewFaulty wraps a file system.
func NewFaulty(fsys FS) *Faulty { return &Faulty{FS: fsys} }

// Inject arms a fault; Heal disarms all.
func (f *Faulty) Inject(fault Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.faults = append(f.faults, &armed{Fault: fault})
}

// Heal disarms all faults.
func (f *Faulty) Heal() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.faults = nil
}

// fail returns the fault that hits this operation.
func (f *Faulty) fail(op Op, path string) *Fault {
	if f.Before != nil && op != OpRead && op != OpReadDir {
		f.Before(op, path)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.faults {
		if a.Op != op || !strings.Contains(path, a.Path) {
			continue
		}
		a.seen++
		if nth := max(a.Nth, 1); a.seen == nth || a.Sticky && a.seen > nth {
			return &a.Fault
		}
	}
	return nil
}

func (f *Faulty) err(op Op, path string) error {
	if fault := f.fail(op, path); fault != nil {
		return pathError(string(op), path, fault.Err)
	}
	return nil
}

func (f *Faulty) wrap(name string, open func(string) (File, error)) (File, error) {
	if err := f.err(OpOpen, name); err != nil {
		return nil, err
	}
	file, err := open(name)
	if err != nil {
		return nil, err
	}
	return &faultyFile{file, f}, nil
}

// Create is FS.Create.
func (f *Faulty) Create(name string) (File, error) { return f.wrap(name, f.FS.Create) }

// Open is FS.Open.
func (f *Faulty) Open(name string) (File, error) { return f.wrap(name, f.FS.Open) }

// OpenFile is FS.OpenFile.
func (f *Faulty) OpenFile(name string) (File, error) { return f.wrap(name, f.FS.OpenFile) }

// Remove is FS.Remove.
func (f *Faulty) Remove(name string) error {
	if err := f.err(OpRemove, name); err != nil {
		return err
	}
	return f.FS.Remove(name)
}

// RemoveAll is FS.RemoveAll.
func (f *Faulty) RemoveAll(name string) error {
	if err := f.err(OpRemove, name); err != nil {
		return err
	}
	return f.FS.RemoveAll(name)
}

// Rename is FS.Rename; faults match the new name.
func (f *Faulty) Rename(oldName, newName string) error {
	if err := f.err(OpRename, newName); err != nil {
		return err
	}
	return f.FS.Rename(oldName, newName)
}

// MkdirAll is FS.MkdirAll.
func (f *Faulty) MkdirAll(name string) error {
	if err := f.err(OpMkdir, name); err != nil {
		return err
	}
	return f.FS.MkdirAll(name)
}

// ReadDir is FS.ReadDir.
func (f *Faulty) ReadDir(name string) ([]DirEntry, error) {
	if err := f.err(OpReadDir, name); err != nil {
		return nil, err
	}
	return f.FS.ReadDir(name)
}

// SyncDir is FS.SyncDir.
func (f *Faulty) SyncDir(name string) error {
	if err := f.err(OpSyncDir, name); err != nil {
		return err
	}
	return f.FS.SyncDir(name)
}

// Lock is FS.Lock.
func (f *Faulty) Lock(name string) (io.Closer, error) {
	if err := f.err(OpOpen, name); err != nil {
		return nil, err
	}
	return f.FS.Lock(name)
}

type faultyFile struct {
	File
	fs *Faulty
}

func (f *faultyFile) ReadAt(p []byte, pos int64) (int, error) {
	if err := f.fs.err(OpRead, f.Name()); err != nil {
		return 0, err
	}
	return f.File.ReadAt(p, pos)
}

func (f *faultyFile) WriteAt(p []byte, pos int64) (int, error) {
	if fault := f.fs.fail(OpWrite, f.Name()); fault != nil {
		n := 0
		if fault.Partial > 0 {
			n, _ = f.File.WriteAt(p[:min(fault.Partial, len(p))], pos)
		}
		return n, pathError("write", f.Name(), fault.Err)
	}
	return f.File.WriteAt(p, pos)
}

func (f *faultyFile) Sync() error {
	if err := f.fs.err(OpSync, f.Name()); err != nil {
		return err
	}
	return f.File.Sync()
}

func (f *faultyFile) Datasync() error {
	if err := f.fs.err(OpSync, f.Name()); err != nil {
		return err
	}
	return f.File.Datasync()
}

func (f *faultyFile) Truncate(size int64) error {
	if err := f.fs.err(OpTruncate, f.Name()); err != nil {
		return err
	}
	return f.File.Truncate(size)
}
