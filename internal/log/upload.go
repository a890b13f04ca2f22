package log

import (
	"fmt"
	"io"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/vfs"
)

// UploadRange is what is copied to the remote tier: the batches of offsets Start to End, inclusive, and the
// files that go with them. The producer snapshot is that of End+1; LeaderEpochs is the lineage file from Start on.
type UploadRange struct {
	Start, End, Size, MaxTimestamp int64
	Epochs                         []leaderepoch.Entry // the first begins at Start
	Log                            io.ReaderAt         // Size bytes
	OffsetIndex, TimeIndex         []byte
	TxnIndex                       []byte // nil without aborted transactions
	ProducerSnapshot, LeaderEpochs []byte

	handle *segment.Handle
}

// Close lets go of the segment's file.
func (u *UploadRange) Close() {
	if u.handle != nil {
		u.handle.Release()
		u.handle = nil
	}
}

// UploadRange returns the rest, from start on, of the finished segment that holds start, if all of it lies below
// stable, the minimum of high watermark and last stable offset; nil if there is none, or it is not local.
// A range that begins in the middle of a segment gets indexes of its own. Its first batch may begin below start, where
// DeleteRecords or another leader's range ended inside of it.
func (l *Log) UploadRange(start, stable int64) (*UploadRange, error) {
	return retry(l, func(v *view) (*UploadRange, error) { return l.uploadFrom(v, start, stable) })
}

func (l *Log) uploadFrom(v *view, start, stable int64) (*UploadRange, error) {
	if start < v.at(0).Base {
		return nil, nil
	}
	i := v.find(start)
	for i < len(v.sealed) && v.sealed[i].Size == 0 {
		i++
	}
	if i >= len(v.sealed) || v.sealed[i].Next > stable {
		return nil, nil
	}
	u, err := l.uploadRange(v.sealed[i], start)
	if err != nil {
		return nil, fmt.Errorf("%s: prepare upload from %d: %w", l.partition, start, err)
	}
	return u, nil
}

func (l *Log) uploadRange(r *segment.Reader, start int64) (*UploadRange, error) {
	h, err := r.OpenLog()
	if err != nil {
		return nil, err
	}
	u := &UploadRange{Start: start, End: r.Next - 1, Log: io.NewSectionReader(h.File, 0, r.Size), Size: r.Size, MaxTimestamp: -1, handle: h}
	if err := l.fillUpload(u, r, h); err != nil {
		u.Close()
		return nil, err
	}
	return u, nil
}

func (l *Log) fillUpload(u *UploadRange, r *segment.Reader, h *segment.Handle) error {
	var err error
	if u.Start <= r.Base {
		latest, err := r.Max()
		if err != nil {
			return err
		}
		u.MaxTimestamp = latest.Timestamp
		if u.OffsetIndex, u.TimeIndex, err = r.Indexes(); err != nil {
			return err
		}
		if u.Start < r.Base { // a hole before the segment
			if u.OffsetIndex, u.TimeIndex, err = l.rebase(u, r, h, 0); err != nil {
				return err
			}
		}
	} else {
		f, ok, err := r.Find(h.File, u.Start)
		if err != nil {
			return err
		}
		pos := r.Size
		if ok {
			pos = f.Position
		}
		u.Log, u.Size = io.NewSectionReader(h.File, pos, r.Size-pos), r.Size-pos
		if u.OffsetIndex, u.TimeIndex, err = l.rebase(u, r, h, pos); err != nil {
			return err
		}
	}
	txns, err := r.Txns()
	if err != nil {
		return err
	}
	all, err := segment.ParseTxnIndex(txns)
	if err != nil {
		return err
	}
	for _, t := range all {
		if t.LastOffset >= u.Start {
			u.TxnIndex = segment.AppendTxn(u.TxnIndex, t)
		}
	}
	if u.ProducerSnapshot, err = l.snapshotAt(u.End + 1); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	u.Epochs = l.epochs.EntriesInRange(u.Start, u.End+1)
	// The file holds the whole lineage up to the end, from which a new replica takes its own (Kafka's
	// LEADER_EPOCH index).
	u.LeaderEpochs = leaderepoch.Marshal(l.epochs.EntriesInRange(-1, u.End+1))
	return nil
}

// rebase makes indexes of the batches from pos on whose offsets count from u.Start.
func (l *Log) rebase(u *UploadRange, r *segment.Reader, h *segment.Handle, pos int64) (offsets, times []byte, err error) {
	x, err := segment.BuildIndexes(h.File, pos, r.Size, u.Start, l.config.Load().IndexIntervalBytes)
	if err != nil {
		return nil, nil, err
	}
	u.MaxTimestamp = x.Max().Timestamp
	return x.Offsets(), x.Times(), nil
}

// snapshotAt returns the producer snapshot file of an offset where segments meet. One that is lost or damaged
// is made anew from an older one and the batches after it.
func (l *Log) snapshotAt(offset int64) ([]byte, error) {
	if b, err := l.readSnapshot(offset); err == nil {
		return b, nil
	}
	l.flushMu.Lock()
	defer l.flushMu.Unlock()
	return l.remakeSnapshot(offset)
}

func (l *Log) readSnapshot(offset int64) ([]byte, error) {
	b, err := vfs.ReadFile(l.fs, l.path(offset, segment.SnapshotSuffix), snapshotMax)
	if err == nil {
		_, err = producerstate.ParseSnapshot(b)
	}
	return b, err
}

// remakeSnapshot runs under flushMu: no segment goes away.
func (l *Log) remakeSnapshot(offset int64) ([]byte, error) {
	l.mu.Lock()
	v, snapshots, nowMs := l.current.Load(), append([]int64(nil), l.snapshots...), l.flushedMs
	l.mu.Unlock()
	var segments []*segment.Reader
	for i := range v.count() {
		segments = append(segments, v.at(i))
	}
	state, _, err := l.stateAt(offset, snapshots, segments, nowMs)
	if err != nil {
		return nil, err
	}
	b := producerstate.MarshalSnapshot(state.Snapshot())
	if err := writeSnapshot(l.fs, l.path(offset, segment.SnapshotSuffix), b, false); err != nil {
		return nil, err
	}
	l.mu.Lock()
	l.addSnapshotLocked(offset)
	l.dirDirty = true
	l.mu.Unlock()
	return b, nil
}
