package log

import (
	"errors"
	"fmt"
	"time"

	"github.com/varve-io/varve/internal/segment"
)

// SegmentInfo describes a segment. End is its last offset, inclusive; MaxTimestamp is -1 without timestamps.
type SegmentInfo struct {
	Base, End, Size, MaxTimestamp int64
}

// RetentionResult says what retention did.
type RetentionResult struct {
	Deleted []SegmentInfo
	Rolled  bool
	// Blocking is the oldest local segment if its records claim to be from the future: it and all after it will
	// outstay the time limit.
	Blocking *SegmentInfo
}

// Sealed lists the finished segments; their timestamps are read on first use. A segment whose index cannot be
// read has MaxTimestamp -1.
func (l *Log) Sealed() []SegmentInfo {
	v := l.current.Load()
	out := make([]SegmentInfo, len(v.sealed))
	for i, r := range v.sealed {
		out[i] = info(r)
	}
	return out
}

func info(r *segment.Reader) SegmentInfo {
	out := SegmentInfo{r.Base, r.Next - 1, r.Size, -1}
	if latest, err := r.Max(); err == nil {
		out.MaxTimestamp = latest.Timestamp
	}
	return out
}

// ActiveSize is the size of the active segment in bytes.
func (l *Log) ActiveSize() int64 { return l.current.Load().active.Size }

// AdvanceLogStart raises the log start, as DeleteRecords and the expiry of remote segments do, and deletes the
// segments that lie below it whole unless the log is tiered, where ApplyRetention does. Above the high watermark
// it is ErrOffsetOutOfRange; below the log start it does nothing.
func (l *Log) AdvanceLogStart(to int64) error {
	l.flushMu.Lock()
	defer l.flushMu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.writableLocked(); err != nil {
		return err
	}
	if to > l.highWatermark {
		o := l.current.Load().offsets
		return fmt.Errorf("%s: advance log start above the high watermark %d: %w", l.partition, l.highWatermark,
			&OffsetOutOfRangeError{to, o.LogStart, o.LocalLogStart, o.End})
	}
	if to <= l.logStart {
		return nil
	}
	if err := l.raiseLogStartLocked(to); err != nil {
		return err
	}
	n := 0
	for !l.config.Load().Tiered && n < len(l.sealed) && l.sealed[n].Next <= to {
		n++
	}
	_, err := l.deleteOldestLocked(n)
	return err
}

func (l *Log) raiseLogStartLocked(to int64) error {
	l.logStart = to
	l.producers.TruncateBefore(to)
	cut := l.epochs.TruncateFromStart(to)
	l.publishLocked() // before what may fail: a lineage that begins too early does no harm, a log start that readers do not know of does
	if cut {
		return l.writeEpochsLocked()
	}
	return nil
}

// deleteOldestLocked deletes the n oldest finished segments. Readers get the new local start before the files go.
// It runs under flushMu, too, and lets go of mu while files are removed.
func (l *Log) deleteOldestLocked(n int) ([]SegmentInfo, error) {
	if n == 0 {
		return nil, nil
	}
	first, dirty := l.active.Base(), l.dirDirty
	if n < len(l.sealed) {
		first = l.sealed[n].Base
	}
	l.dirDirty = false
	l.mu.Unlock()
	err := l.keepProducers(first, dirty)
	l.mu.Lock()
	if err != nil {
		return nil, l.failLocked("delete segment", err)
	}
	gone := l.sealed[:n]
	l.sealed = l.sealed[n:len(l.sealed):len(l.sealed)]
	l.syncedBelow = max(l.syncedBelow, gone[n-1].Next)
	l.publishLocked()
	// Nobody finds them any more, and flushMu keeps others from changing the folder's older part.
	l.mu.Unlock()
	var out []SegmentInfo
	out, err = l.removeSegments(gone)
	l.mu.Lock()
	if err != nil {
		return out, l.failLocked("delete segment", err)
	}
	l.removeSnapshotsLocked(func(o int64) bool { return o < first })
	l.dirDirty = true
	return out, nil
}

// keepProducers makes the snapshot at an offset durable, and with dirty its name: once the segments before it are gone,
// nothing else tells what producers wrote in them. One that a power cut took is made anew while they are there.
func (l *Log) keepProducers(offset int64, dirty bool) error {
	if _, err := l.readSnapshot(offset); err != nil {
		if _, err := l.remakeSnapshot(offset); err != nil {
			return err
		}
		dirty = true
	}
	f, err := l.fs.Open(l.path(offset, segment.SnapshotSuffix))
	if err == nil {
		err = errors.Join(f.Sync(), f.Close())
	}
	if err == nil && dirty {
		err = l.fs.SyncDir(l.dir)
	}
	return err
}

// removeSegments removes segments one after another, each durably (segment.Reader.Remove): a crash must not bring back an older one
// without those between it and the rest.
func (l *Log) removeSegments(gone []*segment.Reader) (out []SegmentInfo, err error) {
	for _, r := range gone {
		out = append(out, info(r))
		if err := r.Remove(l.fs); err != nil {
			return out, err
		}
	}
	return out, nil
}

// futureSlackMs is by how much a record may be ahead of the clock before that is worth a word: it may have come since the clock was
// read, from a machine whose clock is not quite the same.
const futureSlackMs = 60_000

// ApplyRetention deletes the oldest segments that exceed the limits (retention.ms and .bytes; on a log whose
// segments are copied local.retention.ms and .bytes) or lie below the log start, as far as the high watermark.
//
// A tiered segment goes only if the remote tier holds it, and then the local start alone moves; unless it exceeds
// the total limits, or copying is disabled: then the log start moves too. The active segment goes as well if all
// its records are too old; where it is to be copied, it is rolled for that instead.
func (l *Log) ApplyRetention(now time.Time) (RetentionResult, error) {
	l.flushMu.Lock()
	defer l.flushMu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	var res RetentionResult
	if err := l.writableLocked(); err != nil {
		return res, err
	}
	cfg := l.config.Load()
	nowMs := now.UnixMilli()
	r := l.retentionLocked(cfg, nowMs)
	if r.err != nil {
		return res, fmt.Errorf("%s: retention: %w", l.partition, r.err)
	}
	if r.roll {
		if err := l.rollLocked(l.active.Next(), cfg, nowMs); err != nil {
			return res, err
		}
		res.Rolled = true
		l.publishLocked()
	}
	if r.n > 0 {
		next := l.sealed[r.n-1].Next
		if !(cfg.Tiered && next-1 <= l.remoteEnd) && next > l.logStart {
			if err := l.raiseLogStartLocked(next); err != nil {
				return res, err
			}
		}
		var err error
		if res.Deleted, err = l.deleteOldestLocked(r.n); err != nil {
			return res, err
		}
	}
	oldest := l.current.Load().at(0)
	if i := info(oldest); (cfg.Delete || cfg.Tiered) && cfg.RetentionMs >= 0 && i.MaxTimestamp > nowMs+futureSlackMs {
		res.Blocking = &i
	}
	return res, nil
}

// verdict is what retention wants: the n oldest segments gone, of which the last may be the active one, which is
// then rolled first.
type verdict struct {
	n    int
	roll bool
	err  error
}

func (l *Log) retentionLocked(cfg *Config, nowMs int64) verdict {
	v := l.current.Load()
	localMs, localBytes := cfg.LocalRetention()
	totalMs, totalBytes := cfg.RetentionMs, cfg.RetentionBytes
	if !cfg.Delete && !cfg.Tiered {
		localMs, localBytes, totalMs, totalBytes = -1, -1, -1, -1
	}
	left := v.offsets.Size // bytes of the segments from i on
	for i := range v.count() {
		r := v.at(i)
		active := i == len(v.sealed)
		if r.Size == 0 && active {
			return verdict{n: i}
		}
		latest, err := r.Max()
		if err != nil {
			return verdict{err: err}
		}
		exceeds := func(ms, bytes int64) bool {
			old := ms >= 0 && latest.Timestamp >= 0 && nowMs-latest.Timestamp > ms
			return old || bytes >= 0 && left-bytes >= r.Size
		}
		below := r.Next <= l.logStart && !active
		local, total := exceeds(localMs, localBytes), exceeds(totalMs, totalBytes)
		safe := !cfg.copies() || r.Next-1 <= l.remoteEnd || below || total
		switch {
		case !(below || local || total):
			return verdict{n: i}
		case r.Next > l.highWatermark:
			return verdict{n: i}
		case !safe:
			// It waits for its copy. What is active can only be copied once it is finished.
			return verdict{n: i, roll: l.activeExceeds(v, i, localMs, localBytes, nowMs)}
		case active:
			return verdict{n: i + 1, roll: true}
		}
		left -= r.Size
	}
	return verdict{n: v.count()}
}

// activeExceeds says whether all segments from i on, the active one included, exceed the local limits.
func (l *Log) activeExceeds(v *view, i int, ms, bytes, nowMs int64) bool {
	r := v.active
	if r.Size == 0 {
		return false
	}
	latest, err := r.Max()
	old := err == nil && ms >= 0 && latest.Timestamp >= 0 && nowMs-latest.Timestamp > ms
	for ; old && i < len(v.sealed); i++ {
		latest, err := v.sealed[i].Max()
		old = err == nil && latest.Timestamp >= 0 && nowMs-latest.Timestamp > ms
	}
	return old || bytes == 0
}
