//go:build unix

package vfs

import (
	"fmt"
	"io"
	"os"
	"syscall"
)

// OS is the operating system's file system.
type OS struct{}

// OSFiler is implemented by files that are files of the operating system, for sendfile.
type OSFiler interface{ OSFile() *os.File }

type osFile struct{ *os.File }

func (f osFile) OSFile() *os.File { return f.File }

func (f osFile) Size() (int64, error) {
	i, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return i.Size(), nil
}

func (f osFile) Datasync() error { return datasync(f.File) }

func open(name string, flags int) (File, error) {
	f, err := os.OpenFile(name, flags, 0o644)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

// Create is FS.Create.
func (OS) Create(name string) (File, error) { return open(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC) }

// Open is FS.Open. A folder cannot be opened.
func (OS) Open(name string) (File, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	if i, err := f.Stat(); err != nil || i.IsDir() {
		f.Close()
		if err == nil {
			err = &os.PathError{Op: "open", Path: name, Err: syscall.EISDIR}
		}
		return nil, err
	}
	return osFile{f}, nil
}

// OpenFile is FS.OpenFile.
func (OS) OpenFile(name string) (File, error) { return open(name, os.O_RDWR|os.O_CREATE) }

// Remove is FS.Remove.
func (OS) Remove(name string) error { return os.Remove(name) }

// RemoveAll is FS.RemoveAll.
func (OS) RemoveAll(name string) error { return os.RemoveAll(name) }

// Rename is FS.Rename.
func (OS) Rename(oldName, newName string) error { return os.Rename(oldName, newName) }

// MkdirAll is FS.MkdirAll.
func (OS) MkdirAll(name string) error { return os.MkdirAll(name, 0o755) }

// ReadDir is FS.ReadDir.
func (OS) ReadDir(name string) ([]DirEntry, error) {
	list, err := os.ReadDir(name)
	if err != nil {
		return nil, err
	}
	out := make([]DirEntry, len(list))
	for i, e := range list {
		out[i] = DirEntry{e.Name(), e.IsDir()}
	}
	return out, nil
}

// Stat is FS.Stat.
func (OS) Stat(name string) (Info, error) {
	i, err := os.Stat(name)
	if err != nil {
		return Info{}, err
	}
	return Info{i.Size(), i.IsDir()}, nil
}

// SyncDir is FS.SyncDir.
func (OS) SyncDir(name string) error {
	d, err := os.Open(name)
	if err != nil {
		return err
	}
	err = d.Sync()
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	return err
}

// Lock is FS.Lock, by flock(2).
func (OS) Lock(name string) (io.Closer, error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		if err == syscall.EWOULDBLOCK {
			return nil, fmt.Errorf("lock %s: %w by another process", name, ErrLocked)
		}
		return nil, fmt.Errorf("lock %s: %w", name, err)
	}
	return f, nil
}

// FreeSpace is FreeSpacer's.
func (OS) FreeSpace(dir string) (int64, error) {
	var s syscall.Statfs_t
	if err := syscall.Statfs(dir, &s); err != nil {
		return 0, fmt.Errorf("free space of %s: %w", dir, err)
	}
	return int64(s.Bavail) * int64(s.Bsize), nil
}
