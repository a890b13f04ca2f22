package log

import (
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/vfs"
)

// View is a range of whole batches in one segment. Its file stays readable until Release, also when the segment
// is deleted meanwhile. An empty view needs no Release, but takes it.
type View struct {
	// FirstOffset is the base offset of the first batch, which may lie below or above the offset asked for; of an
	// empty view that offset itself. NextOffset is where to read on.
	FirstOffset, NextOffset int64

	handle *segment.Handle
	pos    int64
	size   int64
}

// FileSection is a range of bytes of a file, for sendfile.
type FileSection struct {
	File     vfs.File
	Pos, Len int64
}

// Size is the number of bytes.
func (v *View) Size() int { return int(v.size) }

// ReadAt reads from the view; it is io.ReaderAt.
func (v *View) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 || off >= v.size {
		return 0, io.EOF
	}
	short := int64(len(p)) > v.size-off
	if short {
		p = p[:v.size-off]
	}
	n, err := v.handle.ReadAt(p, v.pos+off)
	if err == nil && short {
		err = io.EOF
	}
	if n == len(p) && !short {
		err = nil
	}
	return n, err
}

// AppendTo appends the bytes of the view to b.
func (v *View) AppendTo(b []byte) ([]byte, error) {
	if v.size == 0 {
		return b, nil
	}
	n := len(b)
	b = slices.Grow(b, int(v.size))[:n+int(v.size)]
	if got, err := v.handle.ReadAt(b[n:], v.pos); got < int(v.size) {
		return b[:n], fmt.Errorf("read %s: %d of %d bytes at %d: %w", v.handle.Name(), got, v.size, v.pos, err)
	}
	return b, nil
}

// Sections lists the ranges of files that make up the view.
func (v *View) Sections() []FileSection {
	if v.size == 0 {
		return nil
	}
	return []FileSection{{v.handle.File, v.pos, v.size}}
}

// Release lets go of the file.
func (v *View) Release() {
	if v.handle != nil {
		v.handle.Release()
		v.handle = nil
		v.size = 0
	}
}

// Read returns the batches from the one that holds offset on, as many whole ones as fit into maxBytes and end
// below upTo (the high watermark, the last stable offset, or the end). With minOneBatch the first one is
// returned even if it is larger. Nothing to read is an empty view. Offsets below the local start or past the end
// are an OffsetOutOfRangeError. It takes no lock.
func (l *Log) Read(offset int64, maxBytes int, upTo int64, minOneBatch bool) (*View, error) {
	return retry(l, func(v *view) (*View, error) { return l.readView(v, offset, maxBytes, upTo, minOneBatch) })
}

// viewRetries is how often a read that failed begins anew because the log has changed since it began: its segment
// may have been deleted before its file was open.
const viewRetries = 5

func retry[T any](l *Log, read func(*view) (T, error)) (out T, err error) {
	for tries := 0; tries < viewRetries; {
		v := l.current.Load()
		out, err = read(v)
		if errors.Is(err, segment.ErrReplaced) {
			l.mu.Lock() // which is held until the replacement is to be seen
			again := l.current.Load() != v
			l.mu.Unlock()
			if again {
				continue
			}
			break
		}
		if tries++; err == nil || errors.Is(err, ErrOffsetOutOfRange) || l.current.Load() == v {
			break
		}
	}
	return out, err
}

func (l *Log) readView(v *view, offset int64, maxBytes int, upTo int64, minOneBatch bool) (*View, error) {
	if o := &v.offsets; offset < o.LocalLogStart || offset > o.End {
		return nil, &OffsetOutOfRangeError{offset, o.LogStart, o.LocalLogStart, o.End}
	}
	out := &View{FirstOffset: offset, NextOffset: offset}
	upTo = min(upTo, v.offsets.End)
	if offset >= upTo {
		return out, nil
	}
	for i := v.find(offset); i < v.count(); i++ {
		r := v.at(i)
		if r.Size == 0 || r.Base >= upTo {
			continue
		}
		done, err := l.readSegment(out, r, max(offset, r.Base), int64(maxBytes), upTo, minOneBatch)
		if err != nil {
			return nil, fmt.Errorf("%s: read at offset %d: %s: %w", l.partition, offset, r.Path(segment.LogSuffix), err)
		}
		if done {
			return out, nil
		}
	}
	// Only holes lie between offset and upTo.
	out.NextOffset = upTo
	return out, nil
}

// readSegment fills the view from a segment; done is false if no batch from offset on is in it.
func (l *Log) readSegment(out *View, r *segment.Reader, offset, maxBytes, upTo int64, minOneBatch bool) (done bool, err error) {
	h, err := r.OpenLog()
	if err != nil {
		return false, err
	}
	f, ok, err := r.Find(h.File, offset)
	if ok && f.Header.BaseOffset >= upTo {
		ok = false // only a hole lies before it
	}
	if err == nil && ok {
		var end int64
		end, out.NextOffset, err = r.Cut(h.File, f, maxBytes, upTo, minOneBatch)
		if err == nil && end > f.Position {
			out.FirstOffset, out.handle, out.pos, out.size = f.Header.BaseOffset, h, f.Position, end-f.Position
			return true, nil
		}
		out.NextOffset = out.FirstOffset
	}
	h.Release()
	return ok, err
}

// AbortedTransactions returns the aborted transactions with records in [from, upTo), in order of their markers.
func (l *Log) AbortedTransactions(from, upTo int64) ([]AbortedTxn, error) {
	return retry(l, func(v *view) ([]AbortedTxn, error) { return l.abortedIn(v, from, upTo) })
}

func (l *Log) abortedIn(v *view, from, upTo int64) ([]AbortedTxn, error) {
	var out []AbortedTxn
	for i := v.find(from); i < v.count(); i++ {
		r := v.at(i)
		// A marker may lie far behind the records, so that all later segments count until an entry says otherwise.
		index, err := r.Txns()
		if err != nil {
			return nil, fmt.Errorf("%s: aborted transactions: %w", l.partition, err)
		}
		if len(index) == 0 {
			continue
		}
		var complete bool
		if out, complete, err = segment.SearchTxns(out, index, from, upTo); err != nil {
			return nil, fmt.Errorf("%s: aborted transactions: %s: %w", l.partition, r.Path(segment.TxnIndexSuffix), err)
		}
		if complete {
			break
		}
	}
	return out, nil
}

// TimestampOffset is a record found by time. Epoch is the leader epoch of its batch.
type TimestampOffset struct {
	Offset, Timestamp int64
	Epoch             int32
}

// OffsetForTimestamp returns the first local record whose timestamp is at least ts.
func (l *Log) OffsetForTimestamp(ts int64) (out TimestampOffset, ok bool, err error) {
	out, err = retry(l, func(v *view) (found TimestampOffset, err error) { found, ok, err = l.timeIn(v, ts); return found, err })
	return out, ok, err
}

func (l *Log) timeIn(v *view, ts int64) (TimestampOffset, bool, error) {
	for i := v.find(v.offsets.LocalLogStart); i < v.count(); i++ {
		r := v.at(i)
		if r.Size == 0 {
			continue
		}
		latest, err := r.Max()
		if err == nil && latest.Timestamp < ts {
			continue
		}
		var f segment.FoundRecord
		ok := false
		if err == nil {
			f, ok, err = r.FindTimestamp(ts, v.offsets.LogStart)
		}
		if err != nil {
			return TimestampOffset{}, false, fmt.Errorf("%s: look up time %d: %s: %w", l.partition, ts, r.Path(""), err)
		}
		if ok {
			return TimestampOffset{f.Offset, f.Timestamp, f.LeaderEpoch}, true, nil
		}
	}
	return TimestampOffset{}, false, nil
}

// MaxTimestamp returns the first local record with the maximum timestamp. ok is false of a log without any.
func (l *Log) MaxTimestamp() (out TimestampOffset, ok bool, err error) {
	out, err = retry(l, func(v *view) (found TimestampOffset, err error) { found, ok, err = l.maxIn(v); return found, err })
	return out, ok, err
}

func (l *Log) maxIn(v *view) (TimestampOffset, bool, error) {
	var in *segment.Reader
	best := segment.TimestampOffset{Timestamp: -1, Offset: -1}
	for i := v.find(math.MinInt64); i < v.count(); i++ {
		r := v.at(i)
		if r.Size == 0 {
			continue
		}
		latest, err := r.Max()
		if err != nil {
			return TimestampOffset{}, false, fmt.Errorf("%s: maximum time: %w", l.partition, err)
		}
		if latest.Timestamp > best.Timestamp {
			best, in = latest, r
		}
	}
	if in == nil {
		return TimestampOffset{}, false, nil
	}
	out, err := maxRecord(in, best)
	if err != nil {
		return out, false, fmt.Errorf("%s: maximum time: %s: %w", l.partition, in.Path(""), err)
	}
	return out, true, nil
}

// maxRecord finds the record in the batch that ends at best.Offset.
func maxRecord(r *segment.Reader, best segment.TimestampOffset) (TimestampOffset, error) {
	h, err := r.OpenLog()
	if err != nil {
		return TimestampOffset{}, err
	}
	defer h.Release()
	f, ok, err := r.Find(h.File, best.Offset)
	if err != nil || !ok {
		return TimestampOffset{}, fmt.Errorf("%w: no batch at offset %d: %w", segment.ErrIndex, best.Offset, err)
	}
	b := make([]byte, f.Header.Size)
	if n, err := h.ReadAt(b, f.Position); n < len(b) {
		return TimestampOffset{}, err
	}
	it, err := recordbatch.Records(b, 0)
	if err != nil {
		return TimestampOffset{}, err
	}
	for it.Next() {
		if it.Record().Timestamp == best.Timestamp {
			return TimestampOffset{it.Record().Offset, best.Timestamp, f.Header.LeaderEpoch}, nil
		}
	}
	return TimestampOffset{f.Header.LastOffset(), best.Timestamp, f.Header.LeaderEpoch}, it.Err()
}
