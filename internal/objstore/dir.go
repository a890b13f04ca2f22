package objstore

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"time"
)

// tmpDir holds objects that are being written; it is no part of the bucket's contents.
const tmpDir = ".varve-tmp"

// Dir is a Bucket in a directory: a key is a path below it. Objects are written aside, synced, and linked or
// renamed into place, so that a crash leaves no half object. Several processes may share one directory.
type Dir struct {
	root string
}

// NewDir returns the bucket in path, which is created if missing. Nothing is written to one that is there, which may be another
// program's, or may not be written to at all.
func NewDir(path string) (*Dir, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("bucket directory %q: %w", path, err)
	}
	if err := os.MkdirAll(abs, 0o755); err != nil {
		return nil, fmt.Errorf("bucket directory: %w", err)
	}
	return &Dir{root: abs}, nil
}

// OpenDir returns the bucket in path, which must be there, for reading: nothing is created, not even a folder for Put, which fails.
func OpenDir(path string) (*Dir, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("bucket directory %q: %w", path, err)
	}
	if info, err := os.Stat(abs); err != nil {
		return nil, fmt.Errorf("bucket directory: %w", err)
	} else if !info.IsDir() {
		return nil, fmt.Errorf("bucket directory: %s is a file", abs)
	}
	return &Dir{root: abs}, nil
}

// String is the file URL of the directory.
func (d *Dir) String() string { return "file://" + d.root }

func (d *Dir) path(op, key string) (string, error) {
	if err := checkKey(key); err != nil {
		return "", &Error{Op: op, Key: key, Kind: ErrBadKey, Err: err}
	}
	if key == tmpDir || strings.HasPrefix(key, tmpDir+"/") {
		return "", &Error{Op: op, Key: key, Kind: ErrBadKey, Err: errors.New("reserved for temporary files")}
	}
	return filepath.Join(d.root, filepath.FromSlash(key)), nil
}

func fileError(op, key string, err error) error {
	e := &Error{Op: op, Key: key, Err: err}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		e.Kind = ErrNotFound
	case errors.Is(err, fs.ErrExist):
		e.Kind = ErrExists
	case errors.Is(err, fs.ErrPermission):
		e.Kind = ErrAccess
	}
	return e
}

// Put implements Bucket.
func (d *Dir) Put(ctx context.Context, key string, body io.ReaderAt, size int64, opts PutOptions) error {
	path, err := d.path("put", key)
	if err != nil {
		return err
	}
	if opts.CreateOnly {
		if _, err := os.Lstat(path); err == nil {
			return &Error{Op: "put", Key: key, Kind: ErrExists}
		}
	}
	tmp, err := d.spool(ctx, key, body, size)
	if err != nil {
		return err
	}
	defer os.Remove(tmp)
	// A Delete may remove the parent as empty between MkdirAll and the link, hence the few attempts.
	for try := 0; ; try++ {
		err = d.publish(tmp, path, opts.CreateOnly)
		if err == nil || try == 10 || !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	if err != nil {
		return fileError("put", key, err)
	}
	return nil
}

func (d *Dir) spool(ctx context.Context, key string, body io.ReaderAt, size int64) (string, error) {
	var name [16]byte
	rand.Read(name[:])
	tmp := filepath.Join(d.root, tmpDir, hex.EncodeToString(name[:]))
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if errors.Is(err, fs.ErrNotExist) { // the first object
		if err = os.MkdirAll(filepath.Dir(tmp), 0o755); err == nil {
			f, err = os.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
		}
	}
	if err != nil {
		return "", &Error{Op: "put", Key: key, Err: err}
	}
	n, err := io.Copy(f, ctxReader{ctx, io.NewSectionReader(body, 0, size)})
	if err == nil && n != size {
		err = fmt.Errorf("body has %d bytes of %d", n, size)
	}
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		os.Remove(tmp)
		return "", &Error{Op: "put", Key: key, Err: err}
	}
	return tmp, nil
}

func (d *Dir) publish(tmp, path string, createOnly bool) error {
	parent := filepath.Dir(path)
	first := parent
	for {
		if _, err := os.Stat(first); err == nil || first == d.root {
			break
		}
		first = filepath.Dir(first)
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return err
	}
	var err error
	if createOnly {
		err = os.Link(tmp, path)
	} else {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		return err
	}
	for dir := parent; ; dir = filepath.Dir(dir) {
		if err := syncDir(dir); err != nil {
			return err
		}
		if dir == first || len(dir) <= len(d.root) {
			return nil
		}
	}
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (r ctxReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}

type fileRange struct {
	io.Reader
	io.Closer
}

// Get implements Bucket.
func (d *Dir) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	path, err := d.path("get", key)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, &Error{Op: "get", Key: key, Err: err}
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fileError("get", key, err)
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fs.ErrNotExist
	}
	if err != nil {
		f.Close()
		return nil, fileError("get", key, err)
	}
	off, n = clip(info.Size(), off, n)
	return fileRange{ctxReader{ctx, io.NewSectionReader(f, off, n)}, f}, nil
}

func dirInfo(key string, fi fs.FileInfo) Info {
	return Info{Key: key, Size: fi.Size(), LastModified: fi.ModTime(),
		ETag: fmt.Sprintf("%x-%x", fi.ModTime().UnixNano(), fi.Size())}
}

// Stat implements Bucket.
func (d *Dir) Stat(ctx context.Context, key string) (Info, error) {
	path, err := d.path("stat", key)
	if err != nil {
		return Info{}, err
	}
	if err := ctx.Err(); err != nil {
		return Info{}, &Error{Op: "stat", Key: key, Err: err}
	}
	fi, err := os.Stat(path)
	if err == nil && !fi.Mode().IsRegular() {
		err = fs.ErrNotExist
	}
	if err != nil {
		return Info{}, fileError("stat", key, err)
	}
	return dirInfo(key, fi), nil
}

// List implements Bucket.
func (d *Dir) List(ctx context.Context, prefix, after string, fn func(Info) error) error {
	return d.list(ctx, "", prefix, after, fn)
}

// list walks the folder of keys that begin with dir, which is "" or ends in '/'. Folders sort as if their
// names ended in '/', which makes the walk ascend in whole keys.
func (d *Dir) list(ctx context.Context, dir, prefix, after string, fn func(Info) error) error {
	entries, err := os.ReadDir(filepath.Join(d.root, filepath.FromSlash(dir)))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fileError("list", prefix, err)
	}
	keys := make([]string, 0, len(entries))
	for _, e := range entries {
		key := dir + e.Name()
		if key == tmpDir {
			continue
		}
		if e.IsDir() {
			key += "/"
		}
		keys = append(keys, key)
	}
	sort.Strings(keys)
	for _, key := range keys {
		if err := ctx.Err(); err != nil {
			return &Error{Op: "list", Key: prefix, Err: err}
		}
		if strings.HasSuffix(key, "/") {
			outside := !strings.HasPrefix(key, prefix) && !strings.HasPrefix(prefix, key)
			if outside || key < after && !strings.HasPrefix(after, key) {
				continue
			}
			if err := d.list(ctx, key, prefix, after, fn); err != nil {
				return err
			}
			continue
		}
		if !strings.HasPrefix(key, prefix) || key <= after {
			continue
		}
		fi, err := os.Stat(filepath.Join(d.root, filepath.FromSlash(key)))
		if errors.Is(err, fs.ErrNotExist) {
			continue // deleted meanwhile
		}
		if err != nil {
			return fileError("list", key, err)
		}
		if err := fn(dirInfo(key, fi)); err != nil {
			return err
		}
	}
	return nil
}

// Delete implements Bucket. Folders that become empty go too.
func (d *Dir) Delete(ctx context.Context, key string) error {
	path, err := d.path("delete", key)
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return &Error{Op: "delete", Key: key, Err: err}
	}
	if fi, err := os.Lstat(path); err != nil || fi.IsDir() {
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return fileError("delete", key, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fileError("delete", key, err)
	}
	for dir := filepath.Dir(path); len(dir) > len(d.root); dir = filepath.Dir(dir) {
		if os.Remove(dir) != nil {
			break // not empty
		}
	}
	return nil
}

// PresignGet implements Bucket: ErrUnsupported.
func (d *Dir) PresignGet(_ context.Context, key string, _ time.Duration) (string, error) {
	return "", &Error{Op: "presign", Key: key, Kind: ErrUnsupported}
}
