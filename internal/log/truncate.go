package log

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/vfs"
)

// TruncateTo removes the batches with records at or above offset, durably, with the lineage and producer state
// from there on. A batch that the offset falls into goes as a whole, so that the log may end below it. An offset
// below the local start leaves an empty log that begins there. The recovery point falls with the end: the caller
// checkpoints it before it appends.
func (l *Log) TruncateTo(offset int64) error {
	l.flushMu.Lock()
	defer l.flushMu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.writableLocked(); err != nil {
		return err
	}
	if offset < 0 {
		return fmt.Errorf("%s: truncate to %d: %w", l.partition, offset, ErrOffsetOutOfRange)
	}
	if offset >= l.active.Next() {
		return nil
	}
	v := l.current.Load()
	first := v.at(0).Base
	if offset < first {
		l.epochs.TruncateFromEnd(offset)
		return l.restartLocked(restart{next: offset, logStart: min(l.logStart, offset)}, l.epochs.Entries(), nil)
	}
	i := v.find(offset)
	if v.at(i).Base > offset { // the active segment, empty, begins above a hole
		i--
	}
	r := v.at(i)
	pos, end, err := l.cutPoint(r, offset)
	if err != nil {
		return fmt.Errorf("%s: truncate to %d: %w", l.partition, offset, err)
	}
	x, err := l.indexesUpTo(r, pos, end)
	if err != nil {
		return fmt.Errorf("%s: truncate to %d: %w", l.partition, offset, err)
	}
	l.removeSnapshotsLocked(func(o int64) bool { return o > end })
	if err := l.truncateFilesLocked(v, i, pos); err != nil {
		l.dead = err // what is left of the files is not what this log knows
		return err
	}
	if l.active, err = segment.Resume(l.files, l.fs, l.dir, r.Base, end, pos, x, l.flushedMs); err != nil {
		return l.failLocked("truncate", err)
	}
	l.sealed = slices.Clone(v.sealed[:i])
	l.recoveryPoint = min(l.recoveryPoint, end)
	l.syncedBelow = min(l.syncedBelow, r.Base)
	l.highWatermark = min(l.highWatermark, end)
	l.remoteEnd = min(l.remoteEnd, end-1)
	l.compacted = min(l.compacted, end)
	l.logStart = min(l.logStart, end)
	segments := append(slices.Clone(l.sealed), l.active.Reader())
	if l.producers, _, err = l.stateAt(end, l.snapshots, segments, l.flushedMs); err != nil {
		return l.failLocked("truncate", err)
	}
	l.publishLocked()
	// The lineage last: entries that lack their data are dropped when the log is opened. Data that lacks its entry would
	// count as that of an earlier epoch, or of none, and not be compared with the leader's.
	if l.epochs.TruncateFromEnd(end) {
		if err := l.writeEpochsLocked(); l.dead != nil { // else the next append writes it
			return err
		}
	}
	return nil
}

// cutPoint is the position of the first batch that must go, and the offset at which the log then ends.
func (l *Log) cutPoint(r *segment.Reader, offset int64) (pos, end int64, err error) {
	h, err := r.OpenLog()
	if err != nil {
		return 0, 0, err
	}
	defer h.Release()
	f, ok, err := r.Find(h.File, offset)
	if err != nil || !ok {
		return r.Size, offset, err
	}
	return f.Position, min(offset, f.Header.BaseOffset), nil
}

// indexesUpTo rebuilds the indexes of the batches that stay.
func (l *Log) indexesUpTo(r *segment.Reader, pos, end int64) (*segment.Indexes, error) {
	h, err := r.OpenLog()
	if err != nil {
		return nil, err
	}
	defer h.Release()
	x, err := segment.BuildIndexes(h.File, 0, pos, r.Base, l.config.Load().IndexIntervalBytes)
	if err != nil {
		return nil, err
	}
	b, err := r.Txns()
	if err != nil {
		return nil, err
	}
	txns, err := segment.ParseTxnIndex(b)
	if err != nil {
		return nil, err
	}
	for _, t := range txns {
		if t.LastOffset < end {
			x.AddTxn(t)
		}
	}
	return x, nil
}

// truncateFilesLocked removes the segments after i, the last one first and each durably so that a crash leaves no
// hole, and cuts segment i.
func (l *Log) truncateFilesLocked(v *view, i int, pos int64) error {
	for j := v.count() - 1; j > i; j-- {
		if err := v.at(j).Remove(l.fs); err != nil {
			return l.failLocked("truncate", err)
		}
	}
	if err := l.fs.SyncDir(l.dir); err != nil { // for the snapshots
		return l.failLocked("truncate", err)
	}
	for _, suffix := range []string{segment.LogSuffix, segment.OffsetIndexSuffix, segment.TimeIndexSuffix, segment.TxnIndexSuffix} {
		l.files.Forget(v.at(i).Path(suffix))
	}
	if err := l.cutFile(v.at(i).Path(segment.LogSuffix), pos); err != nil {
		return l.failLocked("truncate", err)
	}
	return nil
}

// TruncateFullyAndStartAt replaces the log by an empty one that continues at next, with a lineage and, unless it
// is nil, a producer snapshot (the file) of that offset. logStart is that of the whole partition: between it and
// next is the remote tier.
//
// It is atomic: what is needed is written aside, one rename decides, and Open finishes what a crash interrupts.
// After a crash the log is either the old or the new one, never an empty one without lineage.
func (l *Log) TruncateFullyAndStartAt(next, logStart int64, epochs []leaderepoch.Entry, snapshot []byte) error {
	l.flushMu.Lock()
	defer l.flushMu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.writableLocked(); err != nil {
		return err
	}
	if logStart < 0 || next < logStart {
		return fmt.Errorf("%s: restart at %d with log start %d: %w", l.partition, next, logStart, ErrOffsetOutOfRange)
	}
	if snapshot != nil {
		if _, err := producerstate.ParseSnapshot(snapshot); err != nil {
			return fmt.Errorf("%s: restart at %d: %w", l.partition, next, err)
		}
	}
	return l.restartLocked(restart{next, logStart, snapshot != nil}, epochs, snapshot)
}

func (l *Log) restartLocked(r restart, epochs []leaderepoch.Entry, snapshot []byte) error {
	staged := map[string][]byte{epochFile: leaderepoch.Marshal(epochs)}
	if snapshot != nil {
		staged[segment.FileName(r.next, segment.SnapshotSuffix)] = snapshot
	}
	for _, name := range []string{epochFile, segment.FileName(r.next, segment.SnapshotSuffix)} {
		if data, ok := staged[name]; ok {
			if err := vfs.WriteFile(l.fs, l.file(name+restartSuffix), data); err != nil {
				return l.failLocked("restart", err)
			}
		}
	}
	// The names of the staged files must be durable before the decision is.
	if l.newborn {
		if err := l.bear(); err != nil {
			return l.failLocked("restart", err)
		}
		l.newborn = false
	}
	if err := l.fs.SyncDir(l.dir); err != nil {
		return l.failLocked("restart", err)
	}
	if err := vfs.WriteFileAtomic(l.fs, l.file(restartFile), r.marshal()); err != nil {
		return l.failLocked("restart", err)
	}
	l.forgetLocked()
	if _, err := l.resumeRestart(); err != nil {
		l.dead = err
		return l.failLocked("restart", err)
	}
	entries := producerstate.New()
	l.snapshots = nil
	if snapshot != nil {
		parsed, err := producerstate.ParseSnapshot(snapshot)
		if err != nil {
			return l.failLocked("restart", err)
		}
		entries = producerstate.FromSnapshot(parsed, l.flushedMs, l.config.Load().ProducerIDExpirationMs)
		l.snapshots = []int64{r.next}
	}
	active, err := segment.Create(l.files, l.fs, l.dir, r.next, l.config.Load().IndexIntervalBytes, l.flushedMs)
	if err != nil {
		return l.failLocked("restart", err)
	}
	l.active, l.sealed, l.producers, l.epochs = active, nil, entries, leaderepoch.New(epochs)
	l.logStart, l.recoveryPoint, l.highWatermark, l.syncedBelow = r.logStart, r.next, r.next, r.next
	l.remoteEnd = min(l.remoteEnd, r.next-1)
	l.compacted = min(l.compacted, r.next)
	l.dirDirty = true
	l.publishLocked()
	return nil
}

// resumeRestart carries out a decided restart, as often as it takes: it removes the old segments and snapshots,
// puts the staged files in place, and makes the new segment. It returns nil if there is none.
func (l *Log) resumeRestart() (*restart, error) {
	b, err := vfs.ReadFile(l.fs, l.file(restartFile), 4096)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	r, err := parseRestart(b)
	if err != nil {
		return nil, &CorruptError{l.file(restartFile), -1, err}
	}
	names, err := l.fs.ReadDir(l.dir)
	if err != nil {
		return nil, err
	}
	snapshot := segment.FileName(r.next, segment.SnapshotSuffix)
	staged := map[string]bool{}
	for _, e := range slices.Backward(names) {
		_, suffix, ours := segment.ParseFileName(e.Name)
		switch {
		case strings.HasSuffix(suffix, restartSuffix), e.Name == epochFile+restartSuffix:
			staged[e.Name] = true
			continue
		case !ours, e.Name == snapshot && r.snapshot: // it is the new one, or will be replaced by it
			continue
		}
		if err := l.fs.Remove(l.file(e.Name)); err != nil {
			return nil, err
		}
	}
	if err := vfs.WriteFile(l.fs, l.path(r.next, segment.LogSuffix), nil); err != nil {
		return nil, err
	}
	for _, name := range []string{snapshot, epochFile} {
		if staged[name+restartSuffix] {
			if err := l.fs.Rename(l.file(name+restartSuffix), l.file(name)); err != nil {
				return nil, err
			}
		}
	}
	if err := l.fs.SyncDir(l.dir); err != nil {
		return nil, err
	}
	if err := l.fs.Remove(l.file(restartFile)); err != nil {
		return nil, err
	}
	return &r, l.fs.SyncDir(l.dir)
}
