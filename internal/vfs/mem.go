package vfs

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"syscall"
)

// Mem is a file system in memory that remembers what was synced, so that CrashClone can tell what a crash
// would leave. The root folder exists; all paths are taken from it.
type Mem struct {
	mu sync.Mutex
	// root and the nodes below it are what programs see. stable and synced of a node are what is on disk.
	root *node
	// names holds the changes of folders that no SyncDir has covered, oldest first.
	names []nameChange
	locks map[string]bool
}

type node struct {
	dir      bool
	children map[string]*node // of a folder: now
	stable   map[string]*node // of a folder: durable

	data   []byte // of a file: now
	synced []byte // of a file: durable
	writes []write
}

// write is a change of a file since its last sync: bytes at a position, or, if bytes is nil, a new size.
type write struct {
	pos   int64
	bytes []byte
}

// nameChange is a creation (to), a removal (from) or a rename (both), which a crash keeps or loses as a whole.
type nameChange struct {
	fromDir  *node
	fromName string
	toDir    *node
	toName   string
	node     *node
}

func (c nameChange) apply(children func(*node) map[string]*node) {
	if c.fromDir != nil {
		if m := children(c.fromDir); m[c.fromName] == c.node {
			delete(m, c.fromName)
		}
	}
	if c.toDir != nil {
		children(c.toDir)[c.toName] = c.node
	}
}

func newDir() *node {
	return &node{dir: true, children: map[string]*node{}, stable: map[string]*node{}}
}

// NewMem returns an empty file system.
func NewMem() *Mem { return &Mem{root: newDir(), locks: map[string]bool{}} }

func pathError(op, name string, err error) error { return &os.PathError{Op: op, Path: name, Err: err} }

func split(name string) []string {
	name = strings.Trim(filepath.ToSlash(filepath.Clean("/"+filepath.ToSlash(name))), "/")
	if name == "" {
		return nil
	}
	return strings.Split(name, "/")
}

func (m *Mem) find(parts []string) *node {
	n := m.root
	for _, p := range parts {
		if n == nil || !n.dir {
			return nil
		}
		n = n.children[p]
	}
	return n
}

// parent finds the folder of a name.
func (m *Mem) parent(op, name string) (*node, string, error) {
	parts := split(name)
	if len(parts) == 0 {
		return nil, "", pathError(op, name, fs.ErrInvalid)
	}
	d := m.find(parts[:len(parts)-1])
	if d == nil || !d.dir {
		return nil, "", pathError(op, name, fs.ErrNotExist)
	}
	return d, parts[len(parts)-1], nil
}

func (m *Mem) change(c nameChange) {
	c.apply(func(n *node) map[string]*node { return n.children })
	m.names = append(m.names, c)
}

func (m *Mem) open(op, name string, create, truncate, readOnly bool) (File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, base, err := m.parent(op, name)
	if err != nil {
		return nil, err
	}
	n := d.children[base]
	switch {
	case n == nil && !create:
		return nil, pathError(op, name, fs.ErrNotExist)
	case n == nil:
		n = &node{}
		m.change(nameChange{toDir: d, toName: base, node: n})
	case n.dir:
		return nil, pathError(op, name, syscall.EISDIR)
	case truncate:
		n.truncate(0)
	}
	return &memFile{fs: m, node: n, name: name, readOnly: readOnly}, nil
}

// Create is FS.Create.
func (m *Mem) Create(name string) (File, error) { return m.open("create", name, true, true, false) }

// Open is FS.Open.
func (m *Mem) Open(name string) (File, error) { return m.open("open", name, false, false, true) }

// OpenFile is FS.OpenFile.
func (m *Mem) OpenFile(name string) (File, error) { return m.open("open", name, true, false, false) }

// Remove is FS.Remove.
func (m *Mem) Remove(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, base, err := m.parent("remove", name)
	if err != nil {
		return err
	}
	n := d.children[base]
	if n == nil {
		return pathError("remove", name, fs.ErrNotExist)
	}
	if n.dir && len(n.children) > 0 {
		return pathError("remove", name, syscall.ENOTEMPTY)
	}
	m.change(nameChange{fromDir: d, fromName: base, node: n})
	return nil
}

// RemoveAll is FS.RemoveAll. Each name goes by itself, leaves first, as on a disk.
func (m *Mem) RemoveAll(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, base, err := m.parent("remove", name)
	if err != nil {
		return nil
	}
	if n := d.children[base]; n != nil {
		m.removeTree(d, base, n)
	}
	return nil
}

func (m *Mem) removeTree(d *node, base string, n *node) {
	for _, name := range sortedNames(n.children) {
		m.removeTree(n, name, n.children[name])
	}
	m.change(nameChange{fromDir: d, fromName: base, node: n})
}

func sortedNames(children map[string]*node) []string {
	names := make([]string, 0, len(children))
	for name := range children {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

// Rename is FS.Rename.
func (m *Mem) Rename(oldName, newName string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	from, fromBase, err := m.parent("rename", oldName)
	if err != nil {
		return err
	}
	to, toBase, err := m.parent("rename", newName)
	if err != nil {
		return err
	}
	n := from.children[fromBase]
	if n == nil {
		return pathError("rename", oldName, fs.ErrNotExist)
	}
	if old := to.children[toBase]; old != nil && old != n && old.dir && (!n.dir || len(old.children) > 0) {
		return pathError("rename", newName, syscall.ENOTEMPTY)
	}
	m.change(nameChange{fromDir: from, fromName: fromBase, toDir: to, toName: toBase, node: n})
	return nil
}

// MkdirAll is FS.MkdirAll.
func (m *Mem) MkdirAll(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.root
	for _, p := range split(name) {
		n := d.children[p]
		if n == nil {
			n = newDir()
			m.change(nameChange{toDir: d, toName: p, node: n})
		} else if !n.dir {
			return pathError("mkdir", name, syscall.ENOTDIR)
		}
		d = n
	}
	return nil
}

// ReadDir is FS.ReadDir.
func (m *Mem) ReadDir(name string) ([]DirEntry, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.find(split(name))
	if n == nil || !n.dir {
		return nil, pathError("readdir", name, fs.ErrNotExist)
	}
	var out []DirEntry
	for _, base := range sortedNames(n.children) {
		out = append(out, DirEntry{base, n.children[base].dir})
	}
	return out, nil
}

// Stat is FS.Stat.
func (m *Mem) Stat(name string) (Info, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.find(split(name))
	if n == nil {
		return Info{}, pathError("stat", name, fs.ErrNotExist)
	}
	return Info{int64(len(n.data)), n.dir}, nil
}

// SyncDir is FS.SyncDir.
func (m *Mem) SyncDir(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.find(split(name))
	if d == nil || !d.dir {
		return pathError("sync", name, fs.ErrNotExist)
	}
	left := m.names[:0]
	for _, c := range m.names {
		if c.fromDir == d || c.toDir == d {
			c.apply(func(n *node) map[string]*node { return n.stable })
		} else {
			left = append(left, c)
		}
	}
	m.names = left
	return nil
}

// Lock is FS.Lock; a crash clone starts without locks.
func (m *Mem) Lock(name string) (io.Closer, error) {
	f, err := m.OpenFile(name)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	key := strings.Join(split(name), "/")
	if m.locks[key] {
		return nil, pathError("lock", name, ErrLocked)
	}
	m.locks[key] = true
	return &memLock{m, key, f}, nil
}

type memLock struct {
	fs  *Mem
	key string
	File
}

func (l *memLock) Close() error {
	l.fs.mu.Lock()
	delete(l.fs.locks, l.key)
	l.fs.mu.Unlock()
	return l.File.Close()
}

// FreeSpace is FreeSpacer's: memory has room.
func (m *Mem) FreeSpace(string) (int64, error) { return 1 << 40, nil }
