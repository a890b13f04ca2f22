package segment

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/vfs"
)

// txnIndexMax bounds a transaction index in memory, in bytes: two million aborted transactions.
const txnIndexMax = 64 << 20

// Reader is a segment at one moment: offsets [Base, Next) in the first Size bytes of its file. Next is that of
// the segment after it where there is one, so that holes which compaction left belong to it.
type Reader struct {
	Base, Next, Size int64

	files *FileCache
	path  string // of the .log file, without the suffix
	grow  *growing
	seal  *sealed
}

// growing are the indexes of the segment that is written to, in memory.
type growing struct {
	offsets, times, txns []byte
	max                  TimestampOffset
}

// sealed is what is read from the indexes of a finished segment when it is first asked for.
type sealed struct {
	replaced atomic.Bool

	mu     sync.Mutex
	loaded bool
	max    TimestampOffset
}

// ErrReplaced: other files took the names of this segment's. Who has its files open reads on.
var ErrReplaced = errors.New("segment was replaced by a compacted one")

// Replace says that other files are about to take this finished segment's names: the reader opens none any more.
func (r *Reader) Replace() {
	r.seal.replaced.Store(true)
	for _, suffix := range []string{LogSuffix, OffsetIndexSuffix, TimeIndexSuffix, TxnIndexSuffix} {
		r.files.Forget(r.path + suffix)
	}
}

// acquire opens one of the segment's files for reading.
func (r *Reader) acquire(suffix string) (*Handle, error) {
	h, err := r.files.Acquire(r.path+suffix, false)
	// Asked afterwards: names change only once this has been said, so that without it the file is the right one.
	if r.seal != nil && r.seal.replaced.Load() {
		if err == nil {
			h.Release()
		}
		return nil, ErrReplaced
	}
	return h, err
}

// OpenSealed makes a reader of a finished segment in a folder. Nothing is read yet.
func OpenSealed(files *FileCache, dir string, base, next, size int64) *Reader {
	return &Reader{Base: base, Next: next, Size: size, files: files, path: filepath.Join(dir, FileName(base, "")), seal: &sealed{}}
}

// OpenInMemory makes a reader of a segment whose indexes are in memory, not in files.
func OpenInMemory(files *FileCache, dir string, base, next, size int64, x *Indexes) *Reader {
	return &Reader{Base: base, Next: next, Size: size, files: files, path: filepath.Join(dir, FileName(base, "")),
		grow: &growing{x.Offsets(), x.Times(), x.Txns(), x.Max()}}
}

// Path is the path of one of the segment's files.
func (r *Reader) Path(suffix string) string { return r.path + suffix }

// OpenLog opens the file of batches for reading, so that a reader of a removed segment cannot make it anew; the
// caller releases it.
func (r *Reader) OpenLog() (*Handle, error) { return r.acquire(LogSuffix) }

// useOffsets calls f with the offset index.
func (r *Reader) useOffsets(f func(*OffsetIndex) error) error {
	if r.grow != nil {
		return f(NewOffsetIndex(r.Base, r.grow.offsets))
	}
	h, size, err := r.openIndex(OffsetIndexSuffix)
	if err != nil {
		return err
	}
	defer h.Release()
	return f(OpenOffsetIndex(r.Base, h.File, size))
}

func (r *Reader) useTimes(f func(*TimeIndex) error) error {
	if r.grow != nil {
		return f(NewTimeIndex(r.Base, r.grow.times))
	}
	h, size, err := r.openIndex(TimeIndexSuffix)
	if err != nil {
		return err
	}
	defer h.Release()
	return f(OpenTimeIndex(r.Base, h.File, size))
}

func (r *Reader) openIndex(suffix string) (*Handle, int64, error) {
	h, err := r.acquire(suffix)
	if err != nil {
		return nil, 0, err
	}
	size, err := h.Size()
	if err != nil {
		h.Release()
		return nil, 0, err
	}
	return h, size, nil
}

// Found is a batch by its header and position.
type Found struct {
	Header   recordbatch.Header
	Position int64
}

// Find returns the first batch whose last offset is at least the one given. ok is false if there is none.
func (r *Reader) Find(log io.ReaderAt, offset int64) (f Found, ok bool, err error) {
	var at OffsetPosition
	if err := r.useOffsets(func(x *OffsetIndex) (err error) { at, err = x.Lookup(offset); return err }); err != nil {
		return f, false, err
	}
	return FindFrom(log, r.Size, at, offset)
}

// FindFrom is Find from an entry of an offset index on. An entry that does not point to its batch is not
// trusted: the search then begins at position 0.
func FindFrom(log io.ReaderAt, size int64, at OffsetPosition, offset int64) (f Found, ok bool, err error) {
	if at.Position >= size {
		at.Position = 0
	}
	s := NewScanner(log, at.Position, size)
	defer s.Release()
	for first := at.Position > 0; s.Next(); first = false {
		if first && s.h.LastOffset() != at.Offset {
			return FindFrom(log, size, OffsetPosition{}, offset)
		}
		if s.h.LastOffset() >= offset {
			return Found{s.h, s.pos}, true, nil
		}
	}
	if s.Err() != nil && s.pos == at.Position && at.Position > 0 {
		return FindFrom(log, size, OffsetPosition{}, offset)
	}
	return f, false, s.Err()
}

// Cut returns where a read of whole batches from the batch `from` on ends, and the offset to continue with: at
// most maxBytes, and only batches below upTo. With oneBatch the first batch is included even if it is larger.
func (r *Reader) Cut(log io.ReaderAt, from Found, maxBytes, upTo int64, oneBatch bool) (end, next int64, err error) {
	if from.Header.NextOffset() > upTo {
		return from.Position, from.Header.BaseOffset, nil
	}
	end, next = r.Size, r.Next
	if upTo < r.Next {
		f, ok, err := r.Find(log, upTo)
		if err != nil {
			return 0, 0, err
		}
		if ok {
			end, next = f.Position, f.Header.BaseOffset
		}
	}
	limit := from.Position + max(maxBytes, 0)
	if end <= limit || limit < 0 {
		return end, next, nil
	}
	firstEnd := from.Position + int64(from.Header.Size)
	if firstEnd > limit {
		if oneBatch && firstEnd == r.Size {
			return firstEnd, r.Next, nil
		}
		if oneBatch {
			return firstEnd, from.Header.NextOffset(), nil
		}
		return from.Position, from.Header.BaseOffset, nil
	}
	var at OffsetPosition
	if err := r.useOffsets(func(x *OffsetIndex) (err error) { at, err = x.FloorPosition(limit); return err }); err != nil {
		return 0, 0, err
	}
	return cutFrom(log, max(at.Position, from.Position), from.Position, limit, end)
}

// cutFrom walks to the last batch that ends at or before limit, which lies below end.
func cutFrom(log io.ReaderAt, at, start, limit, end int64) (int64, int64, error) {
	s := NewScanner(log, at, end)
	defer s.Release()
	for s.Next() {
		if s.End() > limit {
			return s.Pos(), s.h.BaseOffset, nil
		}
	}
	if at > start {
		// The index led astray, or the batch is damaged; the walk from the start tells which.
		return cutFrom(log, start, start, limit, end)
	}
	if s.Err() == nil {
		return 0, 0, fmt.Errorf("%w: no batch ends after %d in [%d, %d)", recordbatch.ErrCorrupt, limit, start, end)
	}
	return 0, 0, s.Err()
}

// Max is the maximum timestamp and the last offset of the batch that has it; (-1, -1) of an empty segment.
func (r *Reader) Max() (TimestampOffset, error) {
	if r.grow != nil {
		return r.grow.max, nil
	}
	r.seal.mu.Lock()
	defer r.seal.mu.Unlock()
	if r.seal.loaded {
		return r.seal.max, nil
	}
	err := r.useTimes(func(x *TimeIndex) (err error) {
		r.seal.max, err = x.Last()
		if x.Len() == 0 {
			r.seal.max.Offset = -1
		}
		return err
	})
	r.seal.loaded = err == nil
	return r.seal.max, err
}

// FoundRecord is a record by its time.
type FoundRecord struct {
	Timestamp, Offset int64
	LeaderEpoch       int32
}

// FindTimestamp returns the first record at or above an offset whose timestamp is at least the one given.
func (r *Reader) FindTimestamp(timestamp, fromOffset int64) (f FoundRecord, ok bool, err error) {
	var at TimestampOffset
	if err := r.useTimes(func(x *TimeIndex) (err error) { at, err = x.Lookup(timestamp); return err }); err != nil {
		return f, false, err
	}
	var pos OffsetPosition
	if err := r.useOffsets(func(x *OffsetIndex) (err error) { pos, err = x.Lookup(max(at.Offset, fromOffset)); return err }); err != nil {
		return f, false, err
	}
	log, err := r.OpenLog()
	if err != nil {
		return f, false, err
	}
	defer log.Release()
	f, ok, err = FindTimestampFrom(log.File, pos.Position, r.Size, timestamp, fromOffset)
	var corrupt *CorruptError
	if errors.As(err, &corrupt) && corrupt.Position == pos.Position && pos.Position > 0 {
		// The entry does not point to a batch.
		return FindTimestampFrom(log.File, 0, r.Size, timestamp, fromOffset)
	}
	return f, ok, err
}

// FindTimestampFrom is FindTimestamp in the batches of [pos, end).
func FindTimestampFrom(log io.ReaderAt, pos, end, timestamp, fromOffset int64) (f FoundRecord, ok bool, err error) {
	s := NewScanner(log, pos, end)
	defer s.Release()
	for s.Next() {
		if s.h.MaxTimestamp < timestamp || s.h.LastOffset() < fromOffset {
			continue
		}
		b, err := s.Batch()
		if err != nil {
			return f, false, err
		}
		it, err := recordbatch.Records(b, 0)
		if err != nil {
			return f, false, &CorruptError{s.pos, err}
		}
		for it.Next() {
			if rec := it.Record(); rec.Timestamp >= timestamp && rec.Offset >= fromOffset {
				return FoundRecord{rec.Timestamp, rec.Offset, s.h.LeaderEpoch}, true, nil
			}
		}
		if it.Err() != nil {
			return f, false, &CorruptError{s.pos, it.Err()}
		}
	}
	return f, false, s.Err()
}

// Txns is the transaction index as a file; nil if there is none.
func (r *Reader) Txns() ([]byte, error) {
	if r.grow != nil {
		return r.grow.txns, nil
	}
	h, size, err := r.openIndex(TxnIndexSuffix)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer h.Release()
	return readAll(h.File, size, txnIndexMax)
}

// Indexes reads the offset and time index as files.
func (r *Reader) Indexes() (offsets, times []byte, err error) {
	if r.grow != nil {
		return r.grow.offsets, r.grow.times, nil
	}
	for _, x := range []struct {
		suffix string
		into   *[]byte
	}{{OffsetIndexSuffix, &offsets}, {TimeIndexSuffix, &times}} {
		h, size, err := r.openIndex(x.suffix)
		if err != nil {
			return nil, nil, err
		}
		*x.into, err = readAll(h.File, size, 1<<30)
		h.Release()
		if err != nil {
			return nil, nil, err
		}
	}
	return offsets, times, nil
}

func readAll(f vfs.File, size, limit int64) ([]byte, error) {
	if size > limit {
		return nil, fmt.Errorf("%w: %s has %d bytes", ErrIndex, f.Name(), size)
	}
	b := make([]byte, size)
	if n, err := f.ReadAt(b, 0); n < len(b) {
		return nil, fmt.Errorf("read %s: %w", f.Name(), err)
	}
	return b, nil
}

// Sync makes the segment durable; for a finished one its indexes too. Its names are its folder's matter.
func (r *Reader) Sync() error {
	suffixes := []string{LogSuffix}
	if r.grow == nil {
		suffixes = []string{LogSuffix, OffsetIndexSuffix, TimeIndexSuffix, TxnIndexSuffix}
	}
	for _, suffix := range suffixes {
		h, err := r.files.Acquire(r.path+suffix, r.grow != nil)
		if suffix == TxnIndexSuffix && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if r.grow != nil {
			err = h.Datasync()
		} else {
			err = h.Sync()
		}
		h.Release()
		if err != nil {
			return err
		}
	}
	return nil
}

// Remove deletes the segment's files; those who have them open keep them. The batches go first, and durably: with
// them but without its transaction index a segment would tell less than it knows.
func (r *Reader) Remove(fsys vfs.FS) error {
	for _, suffix := range []string{LogSuffix, TxnIndexSuffix, TimeIndexSuffix, OffsetIndexSuffix} {
		r.files.Forget(r.path + suffix)
		if err := fsys.Remove(r.path + suffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if suffix == LogSuffix {
			if err := fsys.SyncDir(filepath.Dir(r.path)); err != nil {
				return err
			}
		}
	}
	return nil
}
