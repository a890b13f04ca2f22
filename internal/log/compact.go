package log

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"slices"
	"time"

	"github.com/varve-io/varve/internal/compact"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/vfs"
)

const (
	cleanedSuffix = ".cleaned"   // of the files that a compaction has written and not yet put in place
	compactFile   = "compaction" // decides that they take the place of others
)

// compactWriteBytes is how much a compaction gathers before it writes.
const compactWriteBytes = 1 << 20

// compactBatch is how many groups of segments are replaced at once: each decision waits some times for the disk.
const compactBatch = 8

// CompactionPlan says how far the log can be compacted, and whether that is due; stable is the last stable offset.
func (l *Log) CompactionPlan(stable int64, now time.Time) (compact.Plan, error) {
	p, err := retry(l, func(v *view) (compact.Plan, error) { return l.compactionPlan(v, stable, now) })
	if err != nil {
		return p, fmt.Errorf("%s: plan a compaction: %w", l.partition, err)
	}
	return p, nil
}

func (l *Log) compactionPlan(v *view, stable int64, now time.Time) (compact.Plan, error) {
	c := l.config.Load().Compaction
	segments := make([]compact.Segment, len(v.sealed))
	for i, r := range v.sealed {
		s := compact.Segment{Base: r.Base, Next: r.Next, Size: r.Size, FirstTimestamp: -1, MaxTimestamp: -1}
		if latest, err := r.Max(); err == nil {
			s.MaxTimestamp = latest.Timestamp
		}
		if c.MaxLagMs < math.MaxInt64 && r.Size > 0 {
			first, err := firstTimestamp(r)
			if err != nil {
				return compact.Plan{}, err
			}
			s.FirstTimestamp = first
		}
		segments[i] = s
	}
	return compact.MakePlan(segments, l.Compacted(), stable, now.UnixMilli(), c), nil
}

// firstTimestamp is the maximum timestamp of a segment's first batch, -1 of an empty one.
func firstTimestamp(r *segment.Reader) (int64, error) {
	h, err := r.OpenLog()
	if err != nil {
		return -1, err
	}
	defer h.Release()
	s := segment.NewScanner(h.File, 0, r.Size)
	defer s.Release()
	if !s.Next() {
		return -1, s.Err()
	}
	return s.Header().MaxTimestamp, nil
}

// Compacted is the offset up to where the log has been compacted.
func (l *Log) Compacted() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.compacted
}

// CompactOptions bound a compaction. Memory is for the map of keys, in bytes. Throttle is told what is about to be read or written,
// in bytes, and may wait; nil does not.
type CompactOptions struct {
	Memory   int
	Now      time.Time
	Throttle func(ctx context.Context, bytes int) error
}

// CompactResult says what a compaction did. Before and After are the bytes of the segments that it went through.
type CompactResult struct {
	From, To      int64 // the range whose keys were new to it
	Keys          int
	Used          float64 // share of the map's room
	Before, After int64
	Records       int64 // that are left
	Segments      int   // that there were
	Left          int   // that there are
}

// Compact carries out a plan: for each key only the last record stays, tombstones and markers for as long as delete.retention.ms says
// (Kafka's LogCleaner). Offsets stay as they are. Where the map of keys is too small for the whole range, as much of it is done as it
// has room for. Segments are replaced some groups at a time, atomically: after a crash they are the old or the new ones. Readers
// go on meanwhile. Only one compaction of a log may run at a time.
//
// An error leaves the log as it is, or with some groups replaced; one while files change their names takes it out of service. Damage is
// a *CorruptError; where retention or a truncation removed what was being compacted it is ErrSegmentsGone, of a closed log ErrClosed.
func (l *Log) Compact(ctx context.Context, p compact.Plan, o CompactOptions) (CompactResult, error) {
	res := CompactResult{From: p.From, To: p.From}
	wrap := func(err error) error { return fmt.Errorf("%s: compact: %w", l.partition, err) }
	cfg := l.config.Load()
	v := l.current.Load()
	segments := slices.Clone(v.sealed[:v.find(p.To)])
	if len(segments) == 0 || p.From >= p.To {
		return res, nil
	}
	aborted, err := l.AbortedTransactions(segments[0].Base, p.To)
	if err != nil {
		return res, wrap(err)
	}
	slices.SortFunc(aborted, func(a, b AbortedTxn) int { return int(a.FirstOffset - b.FirstOffset) })
	c := &compact.Cleaner{Map: compact.NewMap(o.Memory, p.To-p.From), Txns: compact.NewTransactions(aborted), Producers: l.lastBatches(o.Now),
		Now: o.Now.UnixMilli(), Config: cfg.Compaction, Limit: cfg.DecompressLimit}
	work := &compaction{l: l, ctx: ctx, o: o, cleaner: c, interval: cfg.IndexIntervalBytes}
	whole, err := work.learn(segments, p, slices.Clone(aborted))
	if err != nil {
		return res, wrap(l.blame(err, segments))
	}
	if res.Keys = c.Map.Len(); res.Keys > 0 {
		res.Used = float64(res.Keys) / float64(res.Keys+c.Map.Room())
	}
	res.To = c.Map.Latest + 1
	if whole {
		res.To = p.To
	}
	if res.To <= p.From {
		return res, wrap(fmt.Errorf("not one batch of keys fits into %d bytes of log.cleaner.dedupe.buffer.size", o.Memory))
	}
	segments = segments[:min(v.find(res.To-1)+1, len(segments))]
	var batch []staged
	for _, group := range groups(segments, cfg.SegmentBytes) {
		for _, r := range group {
			res.Before += r.Size
		}
		res.Segments += len(group)
		g, records, err := work.stage(group)
		if err != nil {
			return res, wrap(errors.Join(l.blame(err, group), l.forget(batch)))
		}
		if g.changed {
			batch = append(batch, g)
		}
		if len(batch) == compactBatch {
			if err := l.flushAndReplace(p.To, batch); err != nil {
				return res, wrap(err)
			}
			batch = nil
		}
		res.After += g.size
		res.Records += records
		res.Left++
	}
	if err := l.flushAndReplace(p.To, batch); err != nil {
		return res, wrap(err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.active.Next() >= res.To { // else it was cut meanwhile
		l.compacted = max(l.compacted, res.To)
	}
	return res, nil
}

// lastBatches are the batches that must stay for the log to know its producers.
func (l *Log) lastBatches(now time.Time) map[int64]compact.LastBatch {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.producers.Expire(now.UnixMilli(), l.config.Load().ProducerIDExpirationMs)
	out := map[int64]compact.LastBatch{}
	for _, p := range l.producers.Active() {
		out[p.ProducerID] = compact.LastBatch{Offset: p.LastOffset, Epoch: p.Epoch}
	}
	return out
}

// groups puts neighbours together that fit into one segment.
func groups(segments []*segment.Reader, limit int64) (out [][]*segment.Reader) {
	size := int64(0)
	for i, r := range segments {
		last := len(out) - 1
		if i > 0 && size+r.Size <= limit && r.Next-1-out[last][0].Base <= math.MaxInt32 {
			out[last] = append(out[last], r)
			size += r.Size
			continue
		}
		out = append(out, []*segment.Reader{r})
		size = r.Size
	}
	return out
}

// compaction is the work of one Compact.
type compaction struct {
	l        *Log
	ctx      context.Context
	o        CompactOptions
	cleaner  *compact.Cleaner
	interval int
	buffer   []byte // of what is to be written, for one group after the other
}

func (w *compaction) throttle(n int) error {
	if err := w.ctx.Err(); err != nil || w.o.Throttle == nil {
		return err
	}
	return w.o.Throttle(w.ctx, n)
}

// scan calls visit with each batch of a segment from an offset on, whole and verified.
func (w *compaction) scan(r *segment.Reader, from int64, visit func(h *recordbatch.Header, batch []byte) (more bool, err error)) error {
	h, err := r.OpenLog()
	if err != nil {
		return err
	}
	defer h.Release()
	pos, ok, err := startOf(r, h, from)
	if err != nil || !ok {
		return err
	}
	ahead := vfs.NewAheadReader(h.File, pos, r.Size)
	defer ahead.Close()
	s := segment.NewBatchScanner(ahead, pos, r.Size)
	defer s.Release()
	for s.Next() {
		batch, err := s.Batch()
		if err == nil {
			err = s.Header().Verify(batch)
		}
		if err != nil {
			return &CorruptError{r.Path(segment.LogSuffix), s.Pos(), err}
		}
		if err := w.throttle(len(batch)); err != nil {
			return err
		}
		if more, err := visit(s.Header(), batch); err != nil || !more {
			return err
		}
	}
	if err := s.Err(); err != nil {
		return &CorruptError{r.Path(segment.LogSuffix), s.Pos(), err}
	}
	return nil
}

// learn fills the map with the keys of the plan's range; whole is false where it has no room for all.
func (w *compaction) learn(segments []*segment.Reader, p compact.Plan, aborted []AbortedTxn) (whole bool, err error) {
	// Not those that ended before: their markers are not met.
	aborted = slices.DeleteFunc(aborted, func(a AbortedTxn) bool { return a.LastOffset < p.From })
	m, txns := w.cleaner.Map, compact.NewTransactions(aborted)
	m.Latest = p.From - 1
	whole = true
	for _, r := range segments {
		if r.Next <= p.From || !whole {
			continue
		}
		err := w.scan(r, p.From, func(h *recordbatch.Header, batch []byte) (bool, error) {
			if h.IsControl() || txns.Data(h) {
				if h.IsControl() {
					txns.Marker(h, batch)
				}
				m.Latest = max(m.Latest, h.LastOffset())
				return true, nil
			}
			if int(h.Count) > m.Room() {
				whole = false
				return false, nil
			}
			it, err := recordbatch.Records(batch, w.cleaner.Limit)
			if err != nil {
				return false, err
			}
			for it.Next() {
				if rec := it.Record(); rec.Key != nil && rec.Offset >= p.From {
					m.Put(rec.Key, rec.Offset)
				}
			}
			m.Latest = max(m.Latest, h.LastOffset())
			return it.Err() == nil, it.Err()
		})
		if err != nil {
			return false, err
		}
	}
	return whole, nil
}

// staged is a group of segments whose successor lies aside.
type staged struct {
	group   []*segment.Reader
	size    int64      // of the successor's log
	txns    bool       // whether it has a transaction index
	changed bool       // or nothing lies aside, and the group stays as it is
	files   []vfs.File // of the successor, open until they are synced
}

func (g *staged) replacement() replacement {
	return replacement{g.group[0].Base, g.group[len(g.group)-1].Next, g.txns}
}

// stage writes what stays of a group aside, unless nothing goes.
func (w *compaction) stage(group []*segment.Reader) (g staged, records int64, err error) {
	l, base := w.l, group[0].Base
	g.group = group
	x := segment.NewIndexes(base, w.interval)
	path := l.path(base, segment.LogSuffix) + cleanedSuffix
	f, err := l.fs.Create(path)
	if err != nil {
		return g, 0, err
	}
	g.files = append(g.files, f)
	defer func() {
		if err != nil || !g.changed {
			err = errors.Join(err, l.forget([]staged{g}))
		}
	}()
	buffer := w.buffer[:0]
	defer func() { w.buffer = buffer }()
	written := int64(0)
	write := func() error {
		if err := w.throttle(len(buffer)); err != nil {
			return err
		}
		_, err := f.WriteAt(buffer, written)
		written += int64(len(buffer))
		buffer = buffer[:0]
		return err
	}
	g.changed = len(group) > 1
	copyAll := func() error {
		for _, r := range group {
			err := w.scan(r, r.Base, func(h *recordbatch.Header, batch []byte) (bool, error) {
				v, err := w.cleaner.Clean(h, batch)
				if err != nil {
					return false, err
				}
				if v.Aborted != nil {
					x.AddTxn(*v.Aborted)
				}
				if len(v.Batch) == 0 || &v.Batch[0] != &batch[0] {
					g.changed = true
				}
				if len(v.Batch) == 0 {
					return true, nil
				}
				head, err := recordbatch.ParseHeader(v.Batch)
				if err != nil {
					return false, err
				}
				records += int64(v.Records)
				x.Add(&head, g.size)
				g.size += int64(len(v.Batch))
				if buffer = append(buffer, v.Batch...); len(buffer) >= compactWriteBytes {
					return true, write()
				}
				return true, nil
			})
			if err != nil {
				return err
			}
		}
		return write()
	}
	if err = copyAll(); err != nil || !g.changed {
		return g, records, err
	}
	x.Seal()
	for _, index := range []struct {
		suffix string
		data   []byte
	}{{segment.OffsetIndexSuffix, x.Offsets()}, {segment.TimeIndexSuffix, x.Times()}, {segment.TxnIndexSuffix, x.Txns()}} {
		if index.suffix == segment.TxnIndexSuffix && len(index.data) == 0 {
			continue
		}
		f, err := l.fs.Create(l.path(base, index.suffix) + cleanedSuffix)
		if err != nil {
			return g, records, err
		}
		g.files = append(g.files, f)
		if _, err := f.WriteAt(index.data, 0); err != nil {
			return g, records, err
		}
	}
	g.txns = len(x.Txns()) > 0
	return g, records, nil
}

// forget removes what lies aside.
func (l *Log) forget(batch []staged) error {
	err := closeStaged(batch)
	var names []string
	for _, g := range batch {
		names = append(names, stagedNames(g.group[0].Base)...)
	}
	return errors.Join(err, l.removeFiles(names))
}

// closeStaged closes the files that are still open.
func closeStaged(batch []staged) (err error) {
	for i := range batch {
		for _, f := range batch[i].files {
			err = errors.Join(err, f.Close())
		}
		batch[i].files = nil
	}
	return err
}

func stagedNames(base int64) []string {
	names := segmentNames(base)
	for i := range names {
		names[i] += cleanedSuffix
	}
	return names
}

// ErrSegmentsGone: retention or a truncation removed what was being compacted. The next plan goes by what is left.
var ErrSegmentsGone = errors.New("segments were removed during their compaction")

// blame finds out what an error in the middle of a compaction comes of: the files that it reads may be gone or cut by then.
func (l *Log) blame(err error, read []*segment.Reader) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case errors.Is(l.dead, ErrClosed):
		return l.writableLocked()
	case l.placeLocked(read) < 0:
		return ErrSegmentsGone
	}
	return err
}

// placeLocked is where some neighbours are among the finished segments, -1 if they are not there any more.
func (l *Log) placeLocked(group []*segment.Reader) int {
	at := slices.Index(l.sealed, group[0])
	if at < 0 || len(l.sealed) < at+len(group) || !slices.Equal(l.sealed[at:at+len(group)], group) {
		return -1
	}
	return at
}

// flushAndReplace is replaceSegments once what was read up to an offset is durable: a record must not go for a later one that a crash
// forgets. Segments are flushed when they are sealed, and what is left of that goes on while keys are learned.
func (l *Log) flushAndReplace(to int64, batch []staged) error {
	if err := l.FlushUpTo(to); err != nil {
		return errors.Join(err, l.forget(batch))
	}
	return l.replaceSegments(batch)
}

// replaceSegments puts compacted segments, which lie aside with their indexes, in the places of their groups. The decision is one
// file; Open finishes what a crash interrupts after it.
func (l *Log) replaceSegments(batch []staged) error {
	if len(batch) == 0 {
		return nil
	}
	var files []vfs.File
	for _, g := range batch {
		files = append(files, g.files...)
	}
	if err := errors.Join(vfs.SyncAll(l.fs, files), closeStaged(batch)); err != nil {
		return errors.Join(err, l.forget(batch))
	}
	// A rename onto a file's last name frees what the file took, which takes far longer than the rename: not under the log's locks.
	old, err := l.openLogs(batch)
	defer releaseAll(old)
	if err != nil {
		return errors.Join(err, l.forget(batch))
	}
	l.flushMu.Lock()
	defer l.flushMu.Unlock()
	l.mu.Lock()
	err = l.writableLocked()
	for _, g := range batch {
		if err == nil && l.placeLocked(g.group) < 0 {
			err = ErrSegmentsGone
		}
	}
	l.mu.Unlock()
	if err == nil {
		err = l.fs.SyncDir(l.dir) // the names of what lies aside
	}
	tmp := l.file(compactFile + ".tmp")
	if err == nil {
		var all []replacement
		for _, g := range batch {
			all = append(all, g.replacement())
		}
		if err = vfs.WriteFile(l.fs, tmp, marshalReplacements(all)); err != nil {
			err = errors.Join(err, l.removeFiles([]string{compactFile + ".tmp"}))
		}
	}
	if err != nil {
		return errors.Join(err, l.forget(batch))
	}
	// From here on nobody knows what a crash leaves if this fails: then the next start decides.
	if err = l.fs.Rename(tmp, l.file(compactFile)); err == nil {
		err = l.fs.SyncDir(l.dir)
	}
	if err == nil {
		err = l.switchSegments(batch)
	}
	if err == nil {
		err = l.settle()
	}
	if err != nil {
		return l.die("compact", err)
	}
	return nil
}

// openLogs opens what a batch is to replace.
func (l *Log) openLogs(batch []staged) (open []*segment.Handle, err error) {
	for _, g := range batch {
		for _, r := range g.group {
			h, err := r.OpenLog()
			if err != nil {
				return open, l.blame(err, g.group)
			}
			open = append(open, h)
		}
	}
	return open, nil
}

func releaseAll(open []*segment.Handle) {
	for _, h := range open {
		h.Release()
	}
}

// switchSegments renames files and shows readers the result. It runs under flushMu, which keeps others from removing segments, but
// not from adding some at the end.
func (l *Log) switchSegments(batch []staged) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	replace := func() {
		for _, g := range batch {
			for _, old := range g.group {
				old.Replace()
			}
		}
	}
	replace()
	for _, g := range batch {
		if err := l.place(g.replacement()); err != nil {
			return err
		}
	}
	replace() // what was opened while the names changed
	for _, g := range batch {
		at, r := l.placeLocked(g.group), g.replacement()
		l.sealed = slices.Concat(l.sealed[:at], []*segment.Reader{segment.OpenSealed(l.files, l.dir, r.base, r.next, g.size)}, l.sealed[at+len(g.group):])
	}
	l.publishLocked()
	return nil
}

// replacement is one line of the file that decides some: the compacted segment at base stands for all from there up to next, and has
// a transaction index or none.
type replacement struct {
	base, next int64
	txns       bool
}

func marshalReplacements(all []replacement) []byte {
	b := []byte("0\n") // the version
	for _, r := range all {
		b = appendDecision(b, r.base, r.next, r.txns)
	}
	return b
}

func parseReplacements(b []byte) (all []replacement, err error) {
	lines, err := decisions("compaction", b)
	if err != nil {
		return nil, err
	}
	last := int64(0)
	for _, line := range lines {
		var r replacement
		if r.base, r.next, r.txns, err = parseDecision("compaction", line); err == nil && (r.base < last || r.next <= r.base) {
			err = fmt.Errorf("compaction from %d to %d", r.base, r.next)
		}
		if err != nil {
			return nil, err
		}
		all, last = append(all, r), r.next
	}
	return all, nil
}

// place gives the files of a decided replacement their names, as often as it takes: a crash may have kept any of the changes.
func (l *Log) place(r replacement) error {
	names, err := l.fs.ReadDir(l.dir)
	if err != nil {
		return err
	}
	for _, e := range names {
		base, suffix, ok := segment.ParseFileName(e.Name)
		if !ok || base <= r.base || base >= r.next || suffix == segment.SnapshotSuffix {
			continue
		}
		if err := l.removeFiles([]string{e.Name}); err != nil {
			return err
		}
	}
	for _, name := range segmentNames(r.base) {
		if name == segment.FileName(r.base, segment.TxnIndexSuffix) && !r.txns {
			if err := l.removeFiles([]string{name}); err != nil {
				return err
			}
			continue
		}
		if err := l.fs.Rename(l.file(name+cleanedSuffix), l.file(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// settle ends a replacement: its names are durable, and then it need not be remembered.
func (l *Log) settle() error {
	if err := l.fs.SyncDir(l.dir); err != nil {
		return err
	}
	if err := l.removeFiles([]string{compactFile}); err != nil {
		return err
	}
	return l.fs.SyncDir(l.dir)
}

// resumeCompaction finishes a replacement that was decided before a crash.
func (l *Log) resumeCompaction() error {
	b, err := vfs.ReadFile(l.fs, l.file(compactFile), 64*(compactBatch+1))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	all, err := parseReplacements(b)
	if err != nil {
		return &CorruptError{l.file(compactFile), -1, err}
	}
	for _, r := range all {
		if err := l.place(r); err != nil {
			return err
		}
	}
	return l.settle()
}
