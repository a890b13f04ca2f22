package segment

import (
	"container/list"
	"fmt"
	"sync"

	"github.com/varve-io/varve/internal/vfs"
)

// FileCache keeps a bounded number of files open for all logs of one file system. Files in use are not closed,
// so that the number may be exceeded by those. It is safe for concurrent use.
type FileCache struct {
	fs  vfs.FS
	max int

	mu   sync.Mutex
	open map[fileKey]*Handle
	idle list.List // of *Handle without users, oldest first
}

type fileKey struct {
	path  string
	write bool
}

// Handle is a use of an open file, which ends with Release.
type Handle struct {
	vfs.File
	cache     *FileCache
	key       fileKey
	users     int
	forgotten bool
	elem      *list.Element
}

// DefaultOpenFiles is a bound for processes with the usual limits.
const DefaultOpenFiles = 4096

// NewFileCache keeps at most maxOpen files open beyond those in use.
func NewFileCache(fsys vfs.FS, maxOpen int) *FileCache {
	return &FileCache{fs: fsys, max: max(maxOpen, 1), open: map[fileKey]*Handle{}}
}

// Acquire opens a file, or shares it. With write the file is opened for reading and writing and must exist or
// be made by it.
func (c *FileCache) Acquire(path string, write bool) (*Handle, error) {
	key := fileKey{path, write}
	c.mu.Lock()
	defer c.mu.Unlock()
	if h := c.open[key]; h != nil {
		if h.elem != nil {
			c.idle.Remove(h.elem)
			h.elem = nil
		}
		h.users++
		return h, nil
	}
	open := c.fs.Open
	if write {
		open = c.fs.OpenFile
	}
	f, err := open(path)
	if err != nil {
		return nil, err
	}
	h := &Handle{File: f, cache: c, key: key, users: 1}
	c.open[key] = h
	c.evict()
	return h, nil
}

func (c *FileCache) evict() {
	for len(c.open) > c.max && c.idle.Len() > 0 {
		h, _ := c.idle.Remove(c.idle.Front()).(*Handle)
		h.elem = nil
		delete(c.open, h.key)
		// Nothing was written through an idle file that a sync has not been asked for; an error here is of no use.
		_ = h.File.Close()
	}
}

// Retain adds a use.
func (h *Handle) Retain() {
	h.cache.mu.Lock()
	defer h.cache.mu.Unlock()
	h.users++
}

// Release ends a use. The last one of a forgotten file closes it.
func (h *Handle) Release() {
	c := h.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	if h.users--; h.users > 0 {
		return
	}
	if h.users < 0 {
		panic(fmt.Sprintf("segment: file %s was released twice", h.key.path))
	}
	if h.forgotten {
		vfs.CloseBehind(c.fs, h.File)
		return
	}
	h.elem = c.idle.PushBack(h)
	c.evict()
}

// Forget drops a path, which was removed or renamed: users keep their file, later ones open anew.
func (c *FileCache) Forget(path string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, write := range []bool{false, true} {
		h := c.open[fileKey{path, write}]
		if h == nil {
			continue
		}
		delete(c.open, h.key)
		h.forgotten = true
		if h.elem != nil {
			c.idle.Remove(h.elem)
			h.elem = nil
			_ = h.File.Close()
		}
	}
}

// Len is the number of open files.
func (c *FileCache) Len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.open)
}
