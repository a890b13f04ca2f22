// Package inspect reads any file that a Kafka broker or Varve leaves on disk or in a bucket, and tells what is in it, one item
// at a time: batches and records of segments, entries of indexes, snapshots and checkpoints, manifests of remote segments.
//
// It never writes, trusts nothing that it reads, and goes on as far as a damaged file is intact: what was read is given out
// first, then the first damage is returned as a *DamageError. Functions are safe for concurrent use on different files.
package inspect

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/segment"
)

// Item is one thing found in a file. Its JSON form is the one for programs.
type Item interface {
	// Text is the form for people, one line.
	Text() string
}

// ErrUnknownKind: neither its name nor its content tells what a file is.
var ErrUnknownKind = errors.New("not a file that Kafka or Varve writes")

// DamageError says where a file stops making sense. Position is in bytes of the (plain) file; -1 is the file as a whole.
type DamageError struct {
	File     string
	Position int64
	Err      error
}

func (e *DamageError) Error() string {
	if e.Position < 0 {
		return fmt.Sprintf("%s: %v", e.File, e.Err)
	}
	return fmt.Sprintf("%s: damaged at position %d: %v", e.File, e.Position, e.Err)
}

// Unwrap is Err.
func (e *DamageError) Unwrap() error { return e.Err }

// Options say how to look at a file. The zero value shows batches alone.
type Options struct {
	Kind    Kind // KindAuto: by name, then by content
	Records bool // show the records of batches too
	Full    bool // keys and values of any length; otherwise those above 1024 bytes are told by length and SHA-256
	// Offsets decodes records as those of __consumer_offsets, instead of showing their bytes.
	Offsets bool
	// Manifest is the .rsm-manifest of a remote .log or .indexes. File looks for it beside the file if nil.
	Manifest []byte
	Keys     *remoteformat.Keyring // opens encrypted objects; nil for none
}

// maxWhole bounds files that are read as a whole: all but segments, in bytes.
const maxWhole = 256 << 20

// File reads the file at path and calls emit with each item in order. An error of emit ends it.
func File(path string, o Options, emit func(Item) error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if info.IsDir() {
		return &DamageError{path, -1, errors.New("is a folder; name a file in it")}
	}
	if o.Manifest == nil {
		if o.Manifest, err = manifestBeside(path); err != nil {
			return err
		}
	}
	return Read(path, f, info.Size(), o, emit)
}

// manifestBeside reads the manifest of the remote segment that a file belongs to; nil if there is none.
func manifestBeside(path string) ([]byte, error) {
	for _, object := range []remoteformat.Object{remoteformat.ObjectLog, remoteformat.ObjectIndexes} {
		stem, ok := strings.CutSuffix(path, object.Suffix())
		if !ok {
			continue
		}
		m, err := os.Open(stem + remoteformat.ObjectManifest.Suffix())
		if errors.Is(err, os.ErrNotExist) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		defer m.Close()
		return io.ReadAll(io.LimitReader(m, remoteformat.MaxManifestSize+1))
	}
	return nil, nil
}

// Read is File for a file of size bytes that r holds; its name tells the kind and, of indexes, the base offset.
func Read(name string, r io.ReaderAt, size int64, o Options, emit func(Item) error) error {
	if o.Kind == KindAuto {
		o.Kind = KindOf(name)
	}
	if o.Kind == KindAuto {
		head := make([]byte, min(size, 4096))
		if n, err := r.ReadAt(head, 0); err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("%s: %w", name, err)
		} else {
			o.Kind = kindOfContent(head[:n])
		}
	}
	d := &dump{name: name, short: filepath.Base(name), options: o, emit: emit}
	d.base, _ = baseOf(d.short)
	if o.Kind == KindLog {
		return d.log(r, size)
	}
	if o.Kind == KindAuto {
		return &DamageError{name, -1, ErrUnknownKind}
	}
	if size > maxWhole {
		return &DamageError{name, -1, fmt.Errorf("%d bytes are too many for a file of this kind", size)}
	}
	b := make([]byte, size)
	if n, err := r.ReadAt(b, 0); n < len(b) {
		return fmt.Errorf("%s: %w", name, err)
	}
	return d.whole(o.Kind, b)
}

// dump is the reading of one file.
type dump struct {
	name, short string
	base        int64 // offset in the name
	options     Options
	emit        func(Item) error
	failed      error // of emit
}

func (d *dump) put(i Item) bool {
	if d.failed == nil {
		d.failed = d.emit(i)
	}
	return d.failed == nil
}

func (d *dump) damage(pos int64, err error) error {
	if d.failed != nil {
		return d.failed
	}
	return &DamageError{d.name, pos, err}
}

// baseOf is the offset at the start of a file's name: 20 digits and a suffix, or 20 digits, a dash and an id.
func baseOf(short string) (offset int64, ok bool) {
	if len(short) < 20 {
		return 0, false
	}
	offset, _, ok = segment.ParseFileName(short[:20] + segment.LogSuffix)
	return offset, ok
}
