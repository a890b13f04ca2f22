package log

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/vfs"
)

// ErrNotAdjoining: what was to be put in front of the log does not end where the log begins, or begins no more.
var ErrNotAdjoining = errors.New("the segment does not adjoin the local log")

// Front is a finished segment in the making that is to stand in front of the local log, which the remote tier holds
// already. Nothing of it is seen before Commit; a crash leaves none of it. It is used by one goroutine.
type Front struct {
	l    *Log
	base int64
	file vfs.File
	size int64
}

// NewFront begins a segment at base, below the local log start.
func (l *Log) NewFront(base int64) (*Front, error) {
	if base < l.Offsets().LogStart || base >= l.Offsets().LocalLogStart {
		return nil, fmt.Errorf("%s: offset %d: %w", l.partition, base, ErrNotAdjoining)
	}
	f := &Front{l: l, base: base}
	var err error
	f.file, err = l.fs.Create(f.staged())
	return f, err
}

func (f *Front) staged() string { return f.l.path(f.base, segment.LogSuffix) + ".tmp" }

// Write appends whole batches.
func (f *Front) Write(b []byte) (int, error) {
	n, err := f.file.WriteAt(b, f.size)
	f.size += int64(n)
	return n, err
}

// Abort throws it away.
func (f *Front) Abort() error {
	return errors.Join(f.file.Close(), f.l.fs.Remove(f.staged()))
}

// Commit verifies the batches and makes them the first segment of the local log, durably. aborted are the transactions
// whose markers they hold. Whatever the log has become meanwhile, it stays as it is with an error.
func (f *Front) Commit(aborted []AbortedTxn) error {
	l := f.l
	l.flushMu.Lock()
	defer l.flushMu.Unlock()
	x, next, err := f.verify(aborted)
	if err == nil {
		err = f.file.Sync()
	}
	if err != nil {
		return errors.Join(fmt.Errorf("%s: segment %d in front: %w", l.partition, f.base, err), f.Abort())
	}
	l.mu.Lock()
	err = l.writableLocked()
	if first := l.current.Load().at(0).Base; err == nil && (next != first || f.base < l.logStart) {
		err = fmt.Errorf("%s: segment %d to %d before %d: %w", l.partition, f.base, next-1, first, ErrNotAdjoining)
	}
	l.mu.Unlock()
	if err != nil {
		return errors.Join(err, f.Abort())
	}
	if err := f.file.Close(); err != nil {
		return errors.Join(err, l.fs.Remove(f.staged()))
	}
	// Indexes without their log are swept away when the log is opened; a log without its indexes would have to be scanned.
	r := segment.OpenInMemory(l.files, l.dir, f.base, next, f.size, x)
	if err := l.writeFront(r, x, f.staged()); err != nil {
		return l.die("put a segment in front", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sealed = append([]*segment.Reader{segment.OpenSealed(l.files, l.dir, f.base, next, f.size)}, l.sealed...)
	l.publishLocked()
	return nil
}

func (l *Log) writeFront(r *segment.Reader, x *segment.Indexes, staged string) error {
	for _, i := range []struct {
		suffix string
		data   []byte
	}{{segment.OffsetIndexSuffix, x.Offsets()}, {segment.TimeIndexSuffix, x.Times()}, {segment.TxnIndexSuffix, x.Txns()}} {
		l.files.Forget(r.Path(i.suffix))
		if i.suffix == segment.TxnIndexSuffix && len(i.data) == 0 {
			if err := l.fs.Remove(r.Path(i.suffix)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			continue
		}
		if err := vfs.WriteFile(l.fs, r.Path(i.suffix), i.data); err != nil {
			return err
		}
	}
	if err := l.fs.SyncDir(l.dir); err != nil {
		return err
	}
	l.files.Forget(r.Path(segment.LogSuffix))
	if err := l.fs.Rename(staged, r.Path(segment.LogSuffix)); err != nil {
		return err
	}
	return l.fs.SyncDir(l.dir)
}

// verify checks every batch and builds the indexes.
func (f *Front) verify(aborted []AbortedTxn) (x *segment.Indexes, next int64, err error) {
	x, next = segment.NewIndexes(f.base, f.l.config.Load().IndexIntervalBytes), f.base
	s := segment.NewBatchScanner(f.file, 0, f.size)
	defer s.Release()
	for s.Next() {
		h := s.Header()
		b, err := s.Batch()
		if err == nil {
			err = h.Verify(b)
		}
		if err == nil && (h.BaseOffset < next || next == f.base && h.BaseOffset != f.base) {
			err = fmt.Errorf("batch at offset %d where %d is expected: %w", h.BaseOffset, next, ErrNotAdjoining)
		}
		if err != nil {
			return nil, 0, err
		}
		x.Add(h, s.Pos())
		next = h.NextOffset()
	}
	x.Seal()
	for _, t := range aborted {
		if t.LastOffset >= f.base && t.LastOffset < next {
			x.AddTxn(t)
		}
	}
	return x, next, s.Err()
}
