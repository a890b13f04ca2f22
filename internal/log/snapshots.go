package log

import (
	"fmt"
	"path/filepath"
	"slices"

	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/vfs"
)

// snapshotMax bounds a producer snapshot file in bytes: more than five million producers.
const snapshotMax = 256 << 20

// writeSnapshotLocked writes the state of producers at the end of the log as the snapshot of an offset. Without
// sync a crash may tear it, which its checksum shows.
func (l *Log) writeSnapshotLocked(offset int64, sync bool) error {
	path, data := l.path(offset, segment.SnapshotSuffix), producerstate.MarshalSnapshot(l.producers.Snapshot())
	var err error
	if slices.Contains(l.snapshots, offset) {
		// The batches before it may be gone from here: nothing could replace it if it were torn.
		err = vfs.WriteFileAtomic(l.fs, path, data)
	} else {
		err = writeSnapshot(l.fs, path, data, sync)
	}
	if err != nil {
		return l.failLocked("write producer snapshot", err)
	}
	l.addSnapshotLocked(offset)
	l.dirDirty = true
	return nil
}

func (l *Log) addSnapshotLocked(offset int64) {
	if i, ok := slices.BinarySearch(l.snapshots, offset); !ok {
		l.snapshots = slices.Insert(l.snapshots, i, offset)
	}
}

func writeSnapshot(fsys vfs.FS, path string, data []byte, sync bool) error {
	f, err := fsys.Create(path)
	if err != nil {
		return err
	}
	if _, err = f.WriteAt(data, 0); err == nil && sync {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

// stateAt makes the state of producers before an offset from the newest usable snapshot and the batches after
// it. Snapshots that cannot be read are returned in bad, and passed over.
func (l *Log) stateAt(upTo int64, snapshots []int64, segments []*segment.Reader, nowMs int64) (s *producerstate.State, bad []int64, err error) {
	s, from := producerstate.New(), int64(0)
	for i := len(snapshots) - 1; i >= 0; i-- {
		if snapshots[i] > upTo {
			continue
		}
		var entries []producerstate.Entry
		b, err := vfs.ReadFile(l.fs, l.path(snapshots[i], segment.SnapshotSuffix), snapshotMax)
		if err == nil {
			entries, err = producerstate.ParseSnapshot(b)
		}
		if err != nil {
			bad = append(bad, snapshots[i])
			continue
		}
		s, from = producerstate.FromSnapshot(entries, nowMs, l.config.Load().ProducerIDExpirationMs), snapshots[i]
		break
	}
	return s, bad, l.replay(s, segments, from, upTo, nil)
}

// replay takes the batches in [from, upTo) into a state, and tells aborted transactions.
func (l *Log) replay(s *producerstate.State, segments []*segment.Reader, from, upTo int64, aborted func(AbortedTxn)) error {
	for _, r := range segments {
		if r.Next <= from || r.Base >= upTo || r.Size == 0 {
			continue
		}
		if err := l.replaySegment(s, r, from, upTo, aborted); err != nil {
			return fmt.Errorf("%s: read producers: %w", l.partition, &CorruptError{r.Path(segment.LogSuffix), -1, err})
		}
	}
	return nil
}

func (l *Log) replaySegment(s *producerstate.State, r *segment.Reader, from, upTo int64, aborted func(AbortedTxn)) error {
	h, err := r.OpenLog()
	if err != nil {
		return err
	}
	defer h.Release()
	pos, ok, err := startOf(r, h, from)
	if err != nil || !ok {
		return err
	}
	scan := segment.NewScanner(h.File, pos, r.Size)
	defer scan.Release()
	for scan.Next() && scan.Header().BaseOffset < upTo {
		if !scan.Header().HasProducer() || scan.Header().BaseOffset < from {
			continue
		}
		var batch []byte
		if scan.Header().IsControl() {
			if batch, err = scan.Batch(); err != nil {
				return err
			}
		}
		// A marker that cannot be read decides nothing, as when it was appended.
		if t, ok, err := applyProducer(s, scan.Header(), batch); err == nil && ok && aborted != nil {
			aborted(t)
		}
	}
	return scan.Err()
}

// startOf is the position of the first batch of a segment that is not wholly below an offset; ok is false if there is none.
func startOf(r *segment.Reader, log *segment.Handle, from int64) (pos int64, ok bool, err error) {
	if from <= r.Base {
		return 0, true, nil
	}
	f, ok, err := r.Find(log.File, from)
	return f.Position, ok, err
}

// removeSnapshotsLocked deletes the snapshots that drop chooses. A file that stays behind does no harm.
func (l *Log) removeSnapshotsLocked(drop func(int64) bool) {
	l.snapshots = slices.DeleteFunc(l.snapshots, func(o int64) bool {
		if !drop(o) {
			return false
		}
		if err := l.fs.Remove(l.path(o, segment.SnapshotSuffix)); err != nil {
			l.logger.Warn("remove producer snapshot", "partition", l.partition.String(), "offset", o, "cause", err)
		}
		return true
	})
}

func (l *Log) file(name string) string { return filepath.Join(l.dir, name) }
