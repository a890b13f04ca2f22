package segment

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"path/filepath"

	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/vfs"
)

// Writer appends to a segment. Its indexes are in memory until Seal or WriteIndexes: after a crash they are
// rebuilt in any case.
type Writer struct {
	files *FileCache
	fs    vfs.FS
	dir   string
	path  string

	base, next, size int64
	indexes          *Indexes
	firstTime        int64 // maximum timestamp of the first batch; valid if size > 0
	created          int64 // wall clock in ms
}

// WriteError is a failed append. Restored says that the file is again what it was before.
type WriteError struct {
	Err      error
	Restored bool
}

func (e *WriteError) Error() string { return e.Err.Error() }

// Unwrap is Err.
func (e *WriteError) Unwrap() error { return e.Err }

// Create makes an empty segment, replacing a file of its name.
func Create(files *FileCache, fsys vfs.FS, dir string, base int64, interval int, nowMs int64) (*Writer, error) {
	w := &Writer{files: files, fs: fsys, dir: dir, path: filepath.Join(dir, FileName(base, "")),
		base: base, next: base, indexes: NewIndexes(base, interval), created: nowMs}
	files.Forget(w.path + LogSuffix)
	f, err := fsys.Create(w.path + LogSuffix)
	if err != nil {
		return nil, err
	}
	return w, f.Close()
}

// Resume continues a segment of size bytes that ends before next, with its indexes.
func Resume(files *FileCache, fsys vfs.FS, dir string, base, next, size int64, indexes *Indexes, nowMs int64) (*Writer, error) {
	w := &Writer{files: files, fs: fsys, dir: dir, path: filepath.Join(dir, FileName(base, "")),
		base: base, next: next, size: size, indexes: indexes, created: nowMs}
	if size == 0 {
		return w, nil
	}
	h, err := files.Acquire(w.path+LogSuffix, true)
	if err != nil {
		return nil, err
	}
	defer h.Release()
	s := NewScanner(h.File, 0, size)
	defer s.Release()
	if !s.Next() {
		return nil, s.Err()
	}
	w.firstTime = s.Header().MaxTimestamp
	return w, nil
}

// Append writes batches, whose offsets are final, with one write, and indexes them. An error is a *WriteError.
func (w *Writer) Append(b []byte, headers []recordbatch.Header) error {
	h, err := w.files.Acquire(w.path+LogSuffix, true)
	if err != nil {
		return &WriteError{Err: err, Restored: true}
	}
	defer h.Release()
	if n, err := h.WriteAt(b, w.size); err != nil || n < len(b) {
		if err == nil {
			err = io.ErrShortWrite
		}
		terr := h.Truncate(w.size)
		return &WriteError{Err: fmt.Errorf("append %d bytes to %s: %w", len(b), h.Name(), err), Restored: terr == nil}
	}
	if w.size == 0 && len(headers) > 0 {
		w.firstTime = headers[0].MaxTimestamp
	}
	for i := range headers {
		w.indexes.Add(&headers[i], w.size)
		w.size += int64(headers[i].Size)
		w.next = headers[i].NextOffset()
	}
	return nil
}

// AddTxn takes a transaction that a marker appended before aborted.
func (w *Writer) AddTxn(t producerstate.AbortedTxn) { w.indexes.AddTxn(t) }

// Base is the first offset, Next the one after the last batch, Size the bytes.
func (w *Writer) Base() int64 { return w.base }

// Next is the offset after the last batch.
func (w *Writer) Next() int64 { return w.next }

// Size is the size of the file of batches in bytes.
func (w *Writer) Size() int64 { return w.size }

// Max is Indexes.Max.
func (w *Writer) Max() TimestampOffset { return w.indexes.Max() }

// Limits say when a segment is full (Kafka topic configs segment.bytes, segment.ms less the jitter,
// segment.index.bytes).
type Limits struct {
	Bytes, Ms  int64
	IndexBytes int
}

// Full says whether batches of n bytes, which end at last and are as late as maxTime, must go to a new segment.
// Time is that of the records: the first batch's against the new ones', or, without timestamps, the clock's.
func (w *Writer) Full(n, last, maxTime, nowMs int64, l Limits) bool {
	if last-w.base > math.MaxInt32 {
		return true
	}
	if w.size > l.Bytes-n {
		// An empty segment takes any batch, as refusing it would not help.
		return w.size > 0
	}
	offsets, times := l.IndexBytes/OffsetEntrySize, l.IndexBytes/TimeEntrySize-1
	if w.size > 0 && (len(w.indexes.offsets)/OffsetEntrySize >= max(offsets, 1) || len(w.indexes.times)/TimeEntrySize >= max(times, 1)) {
		return true
	}
	if w.size == 0 {
		return false
	}
	waited := nowMs - w.created
	if w.firstTime >= 0 && maxTime >= 0 {
		waited = maxTime - w.firstTime
	}
	return waited > l.Ms
}

// Reader is the segment as it is now.
func (w *Writer) Reader() *Reader {
	return &Reader{Base: w.base, Next: w.next, Size: w.size, files: w.files, path: w.path,
		grow: &growing{w.indexes.Offsets(), w.indexes.Times(), w.indexes.Txns(), w.indexes.Max()}}
}

// WriteIndexes writes the index files, with the last time entry, and with sync makes them durable.
func (w *Writer) WriteIndexes(sync bool) error {
	w.indexes.Seal()
	if err := w.writeIndex(OffsetIndexSuffix, w.indexes.offsets, sync); err != nil {
		return err
	}
	if err := w.writeIndex(TimeIndexSuffix, w.indexes.times, sync); err != nil {
		return err
	}
	if len(w.indexes.txns) == 0 {
		w.files.Forget(w.path + TxnIndexSuffix)
		if err := w.fs.Remove(w.path + TxnIndexSuffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	return w.writeIndex(TxnIndexSuffix, w.indexes.txns, sync)
}

func (w *Writer) writeIndex(suffix string, data []byte, sync bool) error {
	w.files.Forget(w.path + suffix)
	f, err := w.fs.Create(w.path + suffix)
	if err != nil {
		return err
	}
	if _, err = f.WriteAt(data, 0); err == nil && sync {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("write index %s: %w", w.path+suffix, err)
	}
	return nil
}

// Seal writes the indexes and returns the finished segment, which goes up to next. The Writer must not be used
// after.
func (w *Writer) Seal(next int64) (*Reader, error) {
	if err := w.WriteIndexes(false); err != nil {
		return nil, err
	}
	w.files.Forget(w.path + LogSuffix)
	r := OpenSealed(w.files, w.dir, w.base, next, w.size)
	r.seal.loaded, r.seal.max = true, w.indexes.Max()
	return r, nil
}

// Scanned is what Scan found: the valid batches, and what follows them if not the end.
type Scanned struct {
	Indexes *Indexes
	Next    int64         // the offset after the last valid batch
	Size    int64         // bytes of valid batches
	Corrupt *CorruptError // why they end before the file does; nil if they do not
}

// Scan reads the batches of a file of size bytes that holds a segment from base on, verifies each checksum and
// that offsets rise, and calls visit with each. It writes nothing. An error is the reader's or visit's.
func Scan(log io.ReaderAt, base, size int64, interval int, visit func(h *recordbatch.Header, batch []byte, x *Indexes) error) (Scanned, error) {
	out := Scanned{Indexes: NewIndexes(base, interval), Next: base}
	s := NewBatchScanner(log, 0, size)
	defer s.Release()
	for s.Next() {
		b, err := s.Batch()
		if err != nil {
			return out, err
		}
		h := s.Header()
		err = h.Verify(b)
		if err == nil && (h.BaseOffset < out.Next || !fits(h.LastOffset(), base)) {
			err = fmt.Errorf("%w: offset %d, want %d or a later one", recordbatch.ErrCorrupt, h.BaseOffset, out.Next)
		}
		if err != nil {
			out.Corrupt = &CorruptError{s.Pos(), err}
			return out, nil
		}
		out.Indexes.Add(h, s.Pos())
		if err := visit(h, b, out.Indexes); err != nil {
			return out, err
		}
		out.Next, out.Size = h.NextOffset(), s.End()
	}
	if errors.As(s.Err(), &out.Corrupt) {
		return out, nil
	}
	return out, s.Err()
}
