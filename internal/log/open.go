package log

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/vfs"
)

// RecoveryReport tells what Open found.
type RecoveryReport struct {
	Clean           bool  // nothing was scanned
	SegmentsScanned int   // read whole, from the one with the recovery point on
	IndexesRebuilt  int   // of finished segments below that
	TornBytes       int64 // cut off behind the last whole batch, with all that followed
	SegmentsRemoved int   // of those that followed
	Cause           error // why bytes were cut off; nil if none were
	Restarted       bool  // the log ended below its log start and began anew there
}

// plan is what Open will do. Making it only reads.
type plan struct {
	sealed      []*segment.Reader
	rebuilt     []*rebuild // finished segments whose index files must be written
	base        int64      // of the active segment
	next, size  int64
	indexes     *segment.Indexes
	cut         bool // the active segment's file is longer than size
	create      bool // the active segment does not exist
	state       *producerstate.State
	snapshots   []int64
	fresh       map[int64][]byte // snapshots to write
	remove      []string
	epochs      *leaderepoch.Cache
	epochsDirty bool
	scannedFrom int64 // segments from this base on are not known to be durable
	report      RecoveryReport
}

type rebuild struct {
	reader  *segment.Reader
	indexes *segment.Indexes
	sync    bool
}

// Open opens a partition's log or makes a new one. Whether it closed cleanly decides how much is read: nothing,
// or all from the recovery point on. A tail that was never flushed and is torn is cut off and reported; damage
// below the recovery point, or files that are not what they should be, are a *CorruptError, and then nothing
// has been changed.
func Open(o Options) (*Log, error) {
	l := &Log{fs: o.FS, dir: o.Dir, partition: o.Partition, topicID: o.TopicID, logger: o.Logger, files: o.Files, draw: o.Jitter, remoteEnd: -1}
	if l.logger == nil {
		l.logger = slog.New(slog.DiscardHandler)
	}
	if l.files == nil {
		l.files = NewFileCache(o.FS, 64)
	}
	l.config.Store(&o.Config)
	if err := l.open(o); err != nil {
		return nil, fmt.Errorf("open log %s: %w", o.Partition, err)
	}
	return l, nil
}

func (l *Log) open(o Options) error {
	if err := l.resumeCompaction(); err != nil {
		return err
	}
	restarted, err := l.resumeRestart()
	if err != nil {
		return err
	}
	if restarted != nil {
		o.LogStart, o.RecoveryPoint, o.Clean = restarted.logStart, 0, false
	}
	d, err := l.look()
	if err != nil {
		return err
	}
	if l.topicID.IsZero() {
		l.topicID = d.topicID
	}
	if !d.topicID.IsZero() && d.topicID != l.topicID {
		return &CorruptError{l.file(metadataFile), -1, fmt.Errorf("topic id is %s, want %s", d.topicID, l.topicID)}
	}
	p, err := l.plan(o, d)
	if err != nil {
		return err
	}
	return l.carryOut(o, d, p)
}

func (l *Log) plan(o Options, d *survey) (*plan, error) {
	logStart := max(o.LogStart, 0)
	p := &plan{epochs: &leaderepoch.Cache{}, remove: slices.Clone(d.stray), fresh: map[int64][]byte{}}
	b, err := vfs.ReadFile(l.fs, l.file(epochFile), 64<<20)
	if err == nil {
		var entries []leaderepoch.Entry
		if entries, err = leaderepoch.Parse(b); err == nil {
			p.epochs = leaderepoch.New(entries)
		}
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, &CorruptError{l.file(epochFile), -1, err}
	}
	ok := false
	if o.Clean && len(d.segments) > 0 {
		if ok, err = l.planClean(o, d, p); err != nil {
			return nil, err
		}
	}
	if !ok && len(d.segments) > 0 {
		if err := l.planScan(o, d, p); err != nil {
			return nil, err
		}
	}
	switch {
	case len(d.segments) == 0:
		p.begin(logStart, o.Config.IndexIntervalBytes)
		for _, s := range d.snapshots {
			p.remove = append(p.remove, segment.FileName(s, segment.SnapshotSuffix))
		}
		p.report.Clean = true
	case p.next < logStart:
		for _, s := range d.segments {
			p.remove = append(p.remove, segmentNames(s.base)...)
		}
		for _, s := range d.snapshots {
			p.remove = append(p.remove, segment.FileName(s, segment.SnapshotSuffix))
		}
		p.begin(logStart, o.Config.IndexIntervalBytes)
		p.report.Restarted = true
	}
	first := p.base
	if len(p.sealed) > 0 {
		first = p.sealed[0].Base
	}
	l.logStart = logStart
	if !o.Config.Tiered {
		l.logStart = max(logStart, first)
	}
	p.pruneSnapshots()
	if p.epochs.TruncateFromEnd(p.next) {
		p.epochsDirty = true
	}
	if err := l.completeEpochs(p, max(first, l.logStart)); err != nil {
		return nil, err
	}
	if p.epochs.TruncateFromStart(l.logStart) {
		p.epochsDirty = true
	}
	return p, nil
}

// completeEpochs gives batches from first on that the lineage lacks their epochs back, out of their headers: the file follows a
// log start that moves at once, and a process that ends before the log start is noted down forgets that it moved.
func (l *Log) completeEpochs(p *plan, first int64) error {
	upTo := p.next
	if e, ok := p.epochs.Earliest(); ok {
		upTo = min(upTo, e.StartOffset)
	}
	if first >= upTo {
		return nil
	}
	whole := leaderepoch.New(nil)
	segments := append(slices.Clone(p.sealed), segment.OpenInMemory(l.files, l.dir, p.base, p.next, p.size, p.indexes))
	for _, r := range segments {
		if r.Next <= first || r.Base >= upTo || r.Size == 0 {
			continue
		}
		h, err := l.files.Acquire(r.Path(segment.LogSuffix), false)
		if err != nil {
			return err
		}
		s := segment.NewScanner(h.File, 0, r.Size)
		for s.Next() && s.Header().BaseOffset < upTo {
			if s.Header().NextOffset() > first {
				whole.Assign(s.Header().LeaderEpoch, max(s.Header().BaseOffset, first))
			}
		}
		err = s.Err()
		s.Release()
		h.Release()
		if err != nil {
			return fmt.Errorf("leader epochs from %s: %w", r.Path(segment.LogSuffix), err)
		}
	}
	for _, e := range p.epochs.Entries() {
		whole.Assign(e.Epoch, e.StartOffset)
	}
	if whole.Len() > 0 {
		p.epochs, p.epochsDirty = whole, true
	}
	return nil
}

// begin plans an empty log.
func (p *plan) begin(at int64, interval int) {
	if p.epochs.Len() > 0 {
		p.epochs.Clear()
		p.epochsDirty = true
	}
	*p = plan{epochs: p.epochs, epochsDirty: p.epochsDirty, remove: p.remove, report: p.report, fresh: map[int64][]byte{},
		base: at, next: at, indexes: segment.NewIndexes(at, interval), create: true, state: producerstate.New(), scannedFrom: at}
}

// sealedBelow plans the finished segments before d.segments[n], and rebuilds the indexes that are damaged.
// The indexes of segment stale are rebuilt in any case.
func (l *Log) sealedBelow(o Options, d *survey, p *plan, n, stale int, deep bool) error {
	for i, s := range d.segments[:n] {
		next := s.base
		if i+1 < len(d.segments) {
			next = d.segments[i+1].base
		}
		index, txns := l.damaged(s, next, o.Config.IndexIntervalBytes, deep)
		r := segment.OpenSealed(l.files, l.dir, s.base, next, s.size)
		if i == stale {
			index, txns = true, true
		} else if index || txns {
			p.report.IndexesRebuilt++
		}
		if index || txns {
			x, err := l.rebuildIndexes(o, d, p, s, next, txns)
			if err != nil {
				return err
			}
			r = segment.OpenInMemory(l.files, l.dir, s.base, next, s.size, x)
			p.rebuilt = append(p.rebuilt, &rebuild{r, x, true})
		}
		p.sealed = append(p.sealed, r)
	}
	return nil
}

func (l *Log) rebuildIndexes(o Options, d *survey, p *plan, s foundSegment, next int64, txns bool) (*segment.Indexes, error) {
	name := l.path(s.base, segment.LogSuffix)
	h, err := l.files.Acquire(name, false)
	if err != nil {
		return nil, err
	}
	defer h.Release()
	x, err := segment.BuildIndexes(h.File, 0, s.size, s.base, o.Config.IndexIntervalBytes)
	if err != nil {
		return nil, &CorruptError{name, -1, err}
	}
	if !txns {
		if s.txns > 0 {
			b, err := vfs.ReadFile(l.fs, l.path(s.base, segment.TxnIndexSuffix), 64<<20)
			if err != nil {
				return nil, err
			}
			x.SetTxns(b)
		}
		return x, nil
	}
	state, _, err := l.stateAt(s.base, d.snapshots, p.sealed, o.Now.UnixMilli())
	if err != nil {
		return nil, err
	}
	r := segment.OpenInMemory(l.files, l.dir, s.base, next, s.size, x)
	return x, l.replay(state, []*segment.Reader{r}, s.base, next, x.AddTxn)
}

// planClean trusts the files of a log that was closed. ok is false if the active segment is not as a clean
// close leaves it; then it is scanned after all.
func (l *Log) planClean(o Options, d *survey, p *plan) (ok bool, err error) {
	last := d.segments[len(d.segments)-1]
	x, next, ok := l.loadActive(last, o.Config.IndexIntervalBytes)
	if !ok {
		return false, nil
	}
	if err := l.sealedBelow(o, d, p, len(d.segments)-1, -1, false); err != nil {
		return false, err
	}
	p.base, p.next, p.size, p.indexes, p.scannedFrom = last.base, next, last.size, x, last.base
	all := append(slices.Clone(p.sealed), segment.OpenInMemory(l.files, l.dir, last.base, next, last.size, x))
	var bad []int64
	if p.state, bad, err = l.stateAt(next, d.snapshots, all, o.Now.UnixMilli()); err != nil {
		return false, err
	}
	p.keepSnapshots(d.snapshots, bad, all[0].Base, next)
	p.report.Clean = true
	return true, nil
}

// loadActive reads the indexes of the segment to be continued and walks from their last entry to its end.
func (l *Log) loadActive(s foundSegment, interval int) (x *segment.Indexes, next int64, ok bool) {
	if s.offsets < 0 || s.times < 0 || s.offsets%segment.OffsetEntrySize != 0 || s.times%segment.TimeEntrySize != 0 || s.size > 0 && s.times == 0 {
		return nil, 0, false
	}
	var data [3][]byte
	for i, f := range []struct {
		suffix string
		size   int64
	}{{segment.OffsetIndexSuffix, s.offsets}, {segment.TimeIndexSuffix, s.times}, {segment.TxnIndexSuffix, s.txns}} {
		if f.size <= 0 {
			continue
		}
		b, err := vfs.ReadFile(l.fs, l.path(s.base, f.suffix), 1<<30)
		if err != nil {
			return nil, 0, false
		}
		data[i] = b
	}
	if _, err := segment.ParseTxnIndex(data[2]); err != nil {
		return nil, 0, false
	}
	x, err := segment.LoadIndexes(s.base, interval, data[0], data[1], data[2], s.size)
	if err != nil {
		return nil, 0, false
	}
	h, err := l.files.Acquire(l.path(s.base, segment.LogSuffix), false)
	if err != nil {
		return nil, 0, false
	}
	defer h.Release()
	at, err := x.OffsetIndex().FloorPosition(s.size)
	if err != nil {
		return nil, 0, false
	}
	scan := segment.NewScanner(h.File, at.Position, s.size)
	defer scan.Release()
	next = s.base
	for scan.Next() {
		if scan.Header().BaseOffset < next || at.Position > 0 && scan.Pos() == at.Position && scan.Header().LastOffset() != at.Offset {
			return nil, 0, false
		}
		x.Observe(scan.Header())
		next = scan.Header().NextOffset()
	}
	if scan.Err() != nil || scan.End() != s.size || x.OffsetIndex().Check(next, s.size) != nil || x.TimeIndex().Check(next) != nil {
		return nil, 0, false
	}
	return x, next, true
}

// planScan reads all batches from the segment with the recovery point on.
func (l *Log) planScan(o Options, d *survey, p *plan) error {
	rp := max(o.RecoveryPoint, 0)
	from := 0
	for from+1 < len(d.segments) && d.segments[from+1].base <= rp {
		from++
	}
	// Where the recovery point is a segment's base, the segment before may have been the active one when it was
	// flushed: then its batches are durable, but its indexes may be those of an earlier close.
	stale := -1
	if from > 0 && d.segments[from].base == rp {
		stale = from - 1
	}
	if err := l.sealedBelow(o, d, p, from, stale, true); err != nil {
		return err
	}
	start := d.segments[from].base
	p.scannedFrom = start
	state, bad, err := l.stateAt(start, d.snapshots, p.sealed, o.Now.UnixMilli())
	if err != nil {
		return err
	}
	p.state = state
	next := start
	for i := from; i < len(d.segments); i++ {
		s := d.segments[i]
		if i > from {
			if gap := s.base != next; gap && s.base < rp && s.base < next {
				return &CorruptError{l.path(s.base, segment.LogSuffix), -1, fmt.Errorf("begins at %d, the segment before it ends at %d", s.base, next)}
			} else if gap && (s.base < next || next >= rp && !o.Config.Compact) {
				// What lay between was never flushed and is gone, so that this is no continuation.
				p.drop(d.segments[i:], fmt.Errorf("segment %d does not continue offset %d", s.base, next))
				break
			}
			p.seal(l, s.base)
			p.fresh[s.base] = producerstate.MarshalSnapshot(p.state.Snapshot())
		}
		res, err := l.scanSegment(o, p, s)
		if err != nil {
			return err
		}
		if res.Corrupt != nil && res.Next < rp {
			return &CorruptError{l.path(s.base, segment.LogSuffix), res.Corrupt.Position, fmt.Errorf("below the recovery point %d: %w", rp, res.Corrupt.Err)}
		}
		p.report.SegmentsScanned++
		p.base, p.next, p.size, p.indexes = s.base, res.Next, res.Size, res.Indexes
		next = res.Next
		if res.Corrupt != nil {
			p.cut = true
			p.report.TornBytes += s.size - res.Size
			p.drop(d.segments[i+1:], res.Corrupt)
			break
		}
	}
	first := start
	if len(p.sealed) > 0 {
		first = p.sealed[0].Base
	}
	p.keepSnapshots(d.snapshots, bad, first, start)
	return nil
}

// seal takes the segment that was scanned last as finished: another follows at base.
func (p *plan) seal(l *Log, base int64) {
	p.indexes.Seal()
	r := segment.OpenInMemory(l.files, l.dir, p.base, base, p.size, p.indexes)
	p.rebuilt = append(p.rebuilt, &rebuild{r, p.indexes, false})
	p.sealed = append(p.sealed, r)
}

// drop plans the removal of segments that follow a cut.
func (p *plan) drop(segments []foundSegment, cause error) {
	p.report.Cause = cause
	for _, s := range slices.Backward(segments) {
		p.report.TornBytes += s.size
		p.report.SegmentsRemoved++
		p.remove = append(p.remove, segmentNames(s.base)...)
	}
}

// keepSnapshots keeps those that can be read, between the first offset and the last that may be trusted.
func (p *plan) keepSnapshots(have, bad []int64, first, last int64) {
	for _, s := range have {
		if s < first || s > last || slices.Contains(bad, s) {
			if p.fresh[s] == nil {
				p.remove = append(p.remove, segment.FileName(s, segment.SnapshotSuffix))
			}
			continue
		}
		p.snapshots = append(p.snapshots, s)
	}
}

// pruneSnapshots drops those that no segment begins at, which earlier closes left, but not the newest.
func (p *plan) pruneSnapshots() {
	kept := p.snapshots[:0]
	for i, s := range p.snapshots {
		if i == len(p.snapshots)-1 || s == p.base || slices.ContainsFunc(p.sealed, func(r *segment.Reader) bool { return r.Base == s }) {
			kept = append(kept, s)
		} else {
			p.remove = append(p.remove, segment.FileName(s, segment.SnapshotSuffix))
		}
	}
	p.snapshots = kept
}

func (l *Log) scanSegment(o Options, p *plan, s foundSegment) (segment.Scanned, error) {
	h, err := l.files.Acquire(l.path(s.base, segment.LogSuffix), false)
	if err != nil {
		return segment.Scanned{}, err
	}
	defer h.Release()
	return segment.Scan(h.File, s.base, s.size, o.Config.IndexIntervalBytes, func(h *recordbatch.Header, batch []byte, x *segment.Indexes) error {
		if latest, _ := p.epochs.Latest(); h.LeaderEpoch > latest.Epoch && p.epochs.Assign(h.LeaderEpoch, h.BaseOffset) {
			p.epochsDirty = true
		}
		// A marker that cannot be read decides nothing, as when it was appended.
		if t, ok, err := applyProducer(p.state, h, batch); err == nil && ok {
			x.AddTxn(t)
		}
		return nil
	})
}

// carryOut makes the folder what the plan says, and the log usable.
func (l *Log) carryOut(o Options, d *survey, p *plan) error {
	nowMs := o.Now.UnixMilli()
	if !d.exists {
		if err := l.fs.MkdirAll(l.dir); err != nil {
			return err
		}
		l.newborn = true
	}
	if d.topicID.IsZero() && !l.topicID.IsZero() {
		write := vfs.WriteFileAtomic
		if l.newborn {
			write = vfs.WriteFileUnsynced
		}
		if err := write(l.fs, l.file(metadataFile), marshalMetadata(l.topicID)); err != nil {
			return err
		}
	}
	if err := l.removeFiles(p.remove); err != nil {
		return err
	}
	if p.cut {
		if err := l.cutFile(l.path(p.base, segment.LogSuffix), p.size); err != nil {
			return err
		}
	}
	for _, r := range p.rebuilt {
		w, err := segment.Resume(l.files, l.fs, l.dir, r.reader.Base, r.reader.Next, r.reader.Size, r.indexes, nowMs)
		if err == nil {
			err = w.WriteIndexes(r.sync)
		}
		if err != nil {
			return err
		}
		for i := range p.sealed {
			if p.sealed[i] == r.reader {
				l.files.Forget(r.reader.Path(segment.LogSuffix))
				p.sealed[i] = segment.OpenSealed(l.files, l.dir, r.reader.Base, r.reader.Next, r.reader.Size)
			}
		}
	}
	l.snapshots = p.snapshots
	for _, s := range sorted(p.fresh) {
		if err := writeSnapshot(l.fs, l.path(s, segment.SnapshotSuffix), p.fresh[s], false); err != nil {
			return err
		}
		l.addSnapshotLocked(s)
	}
	l.epochs, l.producers, l.sealed, l.report = p.epochs, p.state, p.sealed, p.report
	if p.epochsDirty {
		if err := l.writeEpochsLocked(); err != nil {
			return err
		}
	}
	var err error
	if p.create {
		l.active, err = segment.Create(l.files, l.fs, l.dir, p.base, o.Config.IndexIntervalBytes, nowMs)
	} else {
		l.active, err = segment.Resume(l.files, l.fs, l.dir, p.base, p.next, p.size, p.indexes, nowMs)
	}
	if err != nil {
		return err
	}
	if !l.newborn && p.create || p.cut || len(p.remove) > 0 || len(p.rebuilt) > 0 || len(p.fresh) > 0 {
		if err := l.fs.SyncDir(l.dir); err != nil {
			return err
		}
	}
	if !o.Clean {
		// Names that the last run made may be in memory alone, the folder's included: the next flush sees to them.
		l.newborn, l.dirDirty = true, true
	}
	first := l.active.Base()
	if len(l.sealed) > 0 {
		first = l.sealed[0].Base
	}
	local := max(l.logStart, first)
	// Not the log start: what lies below it in its segment need not be durable.
	l.recoveryPoint, l.syncedBelow = max(first, min(o.RecoveryPoint, p.next)), p.scannedFrom
	if p.report.Clean {
		l.recoveryPoint = p.next
	}
	l.highWatermark, l.flushedMs = local, nowMs
	l.compacted = min(max(o.Compacted, 0), p.next)
	l.activeJitter = o.Config.jitter(l.draw)
	if r := p.report; r.TornBytes > 0 || r.SegmentsRemoved > 0 || r.IndexesRebuilt > 0 || r.Restarted {
		l.logger.Warn("log was recovered", "partition", l.partition.String(), "torn bytes cut", r.TornBytes, "segments removed", r.SegmentsRemoved,
			"segments scanned", r.SegmentsScanned, "indexes rebuilt", r.IndexesRebuilt, "restarted", r.Restarted, "cause", r.Cause)
	}
	l.publishLocked()
	return nil
}

// cutFile shortens a file durably: what was cut off must not come back behind new batches.
func (l *Log) cutFile(path string, size int64) error {
	h, err := l.files.Acquire(path, true)
	if err != nil {
		return err
	}
	defer h.Release()
	if err := h.Truncate(size); err != nil {
		return err
	}
	return h.Sync()
}
