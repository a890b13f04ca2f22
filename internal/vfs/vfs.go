// Package vfs is the seam between the log and the disk: a small file system interface, the operating system's
// implementation, one in memory that can lose what was not synced, and one that fails on demand.
//
// All implementations are safe for concurrent use; files too, as far as the bytes they touch do not overlap.
// Errors are those of package os: errors.Is(err, fs.ErrNotExist) holds for a missing file.
//
// Durability is POSIX's: what was written to a file survives a crash after Sync of that file; a created,
// renamed or removed name survives after SyncDir of its folder.
package vfs

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sync"
)

// File is an open file. Positions and sizes are in bytes.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	// Sync makes contents and size durable. After an error the state of unsynced bytes is unknown, and a second
	// Sync may succeed without them: treat the file as lost.
	Sync() error
	// Datasync is Sync that may leave out attributes which reading does not need.
	Datasync() error
	Truncate(size int64) error
	Size() (int64, error)
	// Name is the path the file was opened by.
	Name() string
}

// DirEntry is one name of a folder.
type DirEntry struct {
	Name  string
	IsDir bool
}

// Info is what Stat tells.
type Info struct {
	Size  int64
	IsDir bool
}

// FS is a file system. Paths are the operating system's.
type FS interface {
	// Create makes or empties a file and opens it for reading and writing.
	Create(name string) (File, error)
	// Open opens a file for reading.
	Open(name string) (File, error)
	// OpenFile opens a file for reading and writing and makes it, empty, if it is missing.
	OpenFile(name string) (File, error)
	Remove(name string) error
	// RemoveAll removes a tree; a missing one is no error.
	RemoveAll(name string) error
	// Rename replaces a file of the new name atomically.
	Rename(oldName, newName string) error
	MkdirAll(name string) error
	// ReadDir lists a folder in order of names.
	ReadDir(name string) ([]DirEntry, error)
	Stat(name string) (Info, error)
	// SyncDir makes the names in a folder durable.
	SyncDir(name string) error
	// Lock takes an exclusive advisory lock on a file, which it makes if needed, until the Closer is closed or
	// the process ends. ErrLocked if somebody holds it.
	Lock(name string) (io.Closer, error)
}

// ErrLocked says that another process, or another holder in this one, has the lock.
var ErrLocked = errors.New("lock is held")

// FreeSpacer is implemented by file systems that know how many bytes an unprivileged writer may still use.
type FreeSpacer interface {
	FreeSpace(dir string) (int64, error)
}

// ReadFile reads a whole file of at most limit bytes; a longer one is an error.
func ReadFile(fsys FS, name string, limit int64) ([]byte, error) {
	f, err := fsys.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	size, err := f.Size()
	if err != nil {
		return nil, err
	}
	if size > limit {
		return nil, fmt.Errorf("read %s: %d bytes exceed the limit of %d", name, size, limit)
	}
	b := make([]byte, size)
	if n, err := f.ReadAt(b, 0); n < len(b) {
		return nil, fmt.Errorf("read %s: %d of %d bytes: %w", name, n, size, err)
	}
	return b, nil
}

// WriteFileAtomic replaces a file so that after a crash it holds either its old or its new contents, and the
// new ones once this has returned: a temporary file, its Sync, a rename, SyncDir of the folder.
func WriteFileAtomic(fsys FS, name string, data []byte) error {
	tmp := name + ".tmp"
	if err := WriteFile(fsys, tmp, data); err != nil {
		return err
	}
	if err := fsys.Rename(tmp, name); err != nil {
		return err
	}
	return fsys.SyncDir(filepath.Dir(name))
}

// WriteFile creates or empties a file, writes it and syncs it, but not its folder.
func WriteFile(fsys FS, name string, data []byte) error {
	return writeFile(fsys, name, data, File.Sync)
}

// WriteFileUnsynced creates or empties a file and writes it. Until somebody syncs it, a crash may leave it empty.
func WriteFileUnsynced(fsys FS, name string, data []byte) error {
	return writeFile(fsys, name, data, func(File) error { return nil })
}

func writeFile(fsys FS, name string, data []byte, finish func(File) error) error {
	f, err := fsys.Create(name)
	if err != nil {
		return err
	}
	if _, err = f.WriteAt(data, 0); err == nil {
		err = finish(f)
	}
	if err != nil {
		f.Close()
		return err
	}
	return f.Close()
}

// SyncAll syncs files. On the OS's file system it does so at once: what a disk commits together takes hardly longer than one of them.
func SyncAll(fsys FS, files []File) error {
	errs := make([]error, len(files))
	if _, ok := fsys.(OS); !ok { // those of tests go step by step
		for i, f := range files {
			if errs[i] = f.Sync(); errs[i] != nil {
				break
			}
		}
		return errors.Join(errs...)
	}
	var all sync.WaitGroup
	for i, f := range files {
		all.Go(func() { errs[i] = f.Sync() })
	}
	all.Wait()
	return errors.Join(errs...)
}

// CloseBehind closes a file whose last name may be gone, when an error is of no use. On the OS's file system nobody waits for it: it
// gives back what the file took then, some milliseconds for 16 MiB that are in the page cache.
func CloseBehind(fsys FS, f File) {
	if _, ok := fsys.(OS); !ok { // those of tests go step by step
		_ = f.Close()
		return
	}
	go func() { _ = f.Close() }()
}
