package vfs

import (
	"io"
	"io/fs"
	"math/rand/v2"
)

type memFile struct {
	fs       *Mem
	node     *node
	name     string
	readOnly bool
	closed   bool
}

func (n *node) truncate(size int64) {
	n.data = resize(n.data, size)
	n.writes = append(n.writes, write{pos: size})
}

func resize(b []byte, size int64) []byte {
	if size <= int64(len(b)) {
		// What is cut must read as zero if the file grows again.
		clear(b[size:])
		return b[:size]
	}
	return append(b, make([]byte, size-int64(len(b)))...)
}

func writeAt(b []byte, p []byte, pos int64) []byte {
	if end := pos + int64(len(p)); end > int64(len(b)) {
		b = resize(b, end)
	}
	copy(b[pos:], p)
	return b
}

func (f *memFile) check(op string) error {
	if f.closed {
		return pathError(op, f.name, fs.ErrClosed)
	}
	return nil
}

func (f *memFile) ReadAt(p []byte, pos int64) (int, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.check("read"); err != nil {
		return 0, err
	}
	if pos < 0 {
		return 0, pathError("read", f.name, fs.ErrInvalid)
	}
	if pos >= int64(len(f.node.data)) {
		return 0, io.EOF
	}
	n := copy(p, f.node.data[pos:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *memFile) WriteAt(p []byte, pos int64) (int, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.check("write"); err != nil {
		return 0, err
	}
	if f.readOnly || pos < 0 {
		return 0, pathError("write", f.name, fs.ErrPermission)
	}
	if len(p) == 0 {
		return 0, nil
	}
	f.node.data = writeAt(f.node.data, p, pos)
	f.node.writes = append(f.node.writes, write{pos, append([]byte{}, p...)})
	return len(p), nil
}

func (f *memFile) Truncate(size int64) error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.check("truncate"); err != nil {
		return err
	}
	if f.readOnly || size < 0 {
		return pathError("truncate", f.name, fs.ErrPermission)
	}
	f.node.truncate(size)
	return nil
}

func (f *memFile) Sync() error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.check("sync"); err != nil {
		return err
	}
	n := f.node
	for _, w := range n.writes {
		n.synced = w.apply(n.synced, len(w.bytes))
	}
	n.writes = nil
	return nil
}

func (f *memFile) Datasync() error { return f.Sync() }

func (f *memFile) Size() (int64, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	return int64(len(f.node.data)), f.check("stat")
}

func (f *memFile) Name() string { return f.name }

func (f *memFile) Close() error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	err := f.check("close")
	f.closed = true
	return err
}

// apply does the write, or its first n bytes, to b.
func (w write) apply(b []byte, n int) []byte {
	if w.bytes == nil {
		return resize(b, w.pos)
	}
	return writeAt(b, w.bytes[:n], w.pos)
}

// CrashClone returns what the disk may hold after a power cut at this moment: all that was synced, and of the
// rest a random share, writes torn at any byte and in any order. The file system itself goes on.
func (m *Mem) CrashClone(r *rand.Rand) *Mem {
	m.mu.Lock()
	defer m.mu.Unlock()
	nameOdds, writeOdds := crashOdds(r), crashOdds(r)
	keep := make([]bool, len(m.names))
	for i := range keep {
		keep[i] = r.Float64() < nameOdds
	}
	clones := map[*node]*node{}
	var clone func(n *node) *node
	clone = func(n *node) *node {
		if c := clones[n]; c != nil {
			return c
		}
		c := &node{dir: n.dir}
		clones[n] = c
		if n.dir {
			c.children, c.stable = map[string]*node{}, map[string]*node{}
			for _, name := range sortedNames(n.stable) {
				c.children[name] = clone(n.stable[name])
			}
			return c
		}
		c.data = append([]byte(nil), n.synced...)
		for _, w := range n.writes {
			if r.Float64() >= writeOdds {
				continue
			}
			part := len(w.bytes)
			if part > 0 && r.IntN(4) == 0 {
				part = r.IntN(part)
			}
			c.data = w.apply(c.data, part)
		}
		return c
	}
	out := NewMem()
	out.root = clone(m.root)
	for i, c := range m.names {
		if !keep[i] {
			continue
		}
		d := nameChange{fromName: c.fromName, toName: c.toName, node: clone(c.node)}
		if c.fromDir != nil {
			d.fromDir = clone(c.fromDir)
		}
		if c.toDir != nil {
			d.toDir = clone(c.toDir)
		}
		d.apply(func(n *node) map[string]*node { return n.children })
	}
	out.root.settle()
	return out
}

// crashOdds draws how much of the unsynced survives: nothing, everything, or any share.
func crashOdds(r *rand.Rand) float64 {
	switch r.IntN(4) {
	case 0:
		return 0
	case 1:
		return 1
	}
	return r.Float64()
}

// settle makes what is there the durable state.
func (n *node) settle() {
	if !n.dir {
		n.synced = append([]byte(nil), n.data...)
		return
	}
	for name, c := range n.children {
		n.stable[name] = c
		c.settle()
	}
}
