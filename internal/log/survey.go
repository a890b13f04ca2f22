package log

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

const (
	metadataFile  = "partition.metadata"
	restartFile   = "restart"  // see restart.go
	restartSuffix = ".restart" // files that wait for it
)

// survey is what lies in a partition's folder.
type survey struct {
	exists    bool
	topicID   tp.UUID // zero without partition.metadata
	segments  []foundSegment
	snapshots []int64
	stray     []string // names that nobody needs
}

// foundSegment has the sizes of a segment's files; -1 is a missing one.
type foundSegment struct {
	base, size           int64
	offsets, times, txns int64
}

// look lists the folder. It writes nothing.
func (l *Log) look() (*survey, error) {
	d := &survey{}
	names, err := l.fs.ReadDir(l.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return d, nil
	}
	if err != nil {
		return nil, err
	}
	d.exists = true
	sizes := map[string]int64{}
	for _, e := range names {
		_, suffix, ours := segment.ParseFileName(e.Name)
		ours = ours || e.Name == metadataFile || e.Name == epochFile
		switch {
		case ours && e.IsDir:
			return nil, &CorruptError{l.file(e.Name), -1, errors.New("is a folder, not a file")}
		case strings.HasSuffix(e.Name, ".swap"):
			// A compaction of Kafka was interrupted in the middle of replacing segments.
			return nil, &CorruptError{l.file(e.Name), -1, errors.New("unfinished compaction; let Kafka open the log first")}
		case strings.HasSuffix(e.Name, ".deleted"), strings.HasSuffix(e.Name, ".cleaned"), strings.HasSuffix(e.Name, ".tmp"),
			strings.HasSuffix(e.Name, restartSuffix):
			d.stray = append(d.stray, e.Name)
		case suffix == segment.LogSuffix, suffix == segment.OffsetIndexSuffix, suffix == segment.TimeIndexSuffix, suffix == segment.TxnIndexSuffix:
			info, err := l.fs.Stat(l.file(e.Name))
			if err != nil {
				return nil, err
			}
			sizes[e.Name] = info.Size
		}
	}
	size := func(base int64, suffix string) int64 {
		if s, ok := sizes[segment.FileName(base, suffix)]; ok {
			return s
		}
		return -1
	}
	for _, e := range names { // in order of names, which is that of offsets
		base, suffix, ok := segment.ParseFileName(e.Name)
		switch {
		case !ok:
		case suffix == segment.LogSuffix:
			d.segments = append(d.segments, foundSegment{base, sizes[e.Name],
				size(base, segment.OffsetIndexSuffix), size(base, segment.TimeIndexSuffix), size(base, segment.TxnIndexSuffix)})
		case suffix == segment.SnapshotSuffix:
			d.snapshots = append(d.snapshots, base)
		case size(base, segment.LogSuffix) < 0 && sizes[e.Name] >= 0:
			if _, known := sizes[e.Name]; known {
				d.stray = append(d.stray, e.Name)
			}
		}
	}
	b, err := vfs.ReadFile(l.fs, l.file(metadataFile), 4096)
	// One that is cut short was never synced, and neither was anything else here.
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(b) < len(marshalMetadata(l.topicID)) {
		return d, nil
	}
	if err == nil {
		d.topicID, err = parseMetadata(b)
	}
	if err != nil {
		return nil, &CorruptError{l.file(metadataFile), -1, err}
	}
	return d, nil
}

// parseMetadata reads partition.metadata:
//
//	version: 0
//	topic_id: <22 characters>
func parseMetadata(b []byte) (tp.UUID, error) {
	var version, id string
	for i, line := range strings.Split(strings.TrimRight(string(b), "\n"), "\n") {
		name, value, ok := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch {
		case !ok || i > 1:
			return tp.UUID{}, fmt.Errorf("line %d of partition metadata: %.60q", i+1, line)
		case i == 0 && name == "version":
			version = value
		case i == 1 && name == "topic_id":
			id = value
		}
	}
	if v, err := strconv.ParseInt(version, 10, 32); err != nil || v < 0 {
		return tp.UUID{}, fmt.Errorf("version %.20q of partition metadata", version)
	}
	u, err := tp.ParseUUID(id)
	if err == nil && u.IsZero() {
		err = errors.New("topic id is zero")
	}
	return u, err
}

func marshalMetadata(id tp.UUID) []byte { return []byte("version: 0\ntopic_id: " + id.String()) }

// damaged says whether the index files of a finished segment must be rebuilt. With deep their last entries are
// read, too.
func (l *Log) damaged(s foundSegment, next int64, interval int, deep bool) (index, txns bool) {
	txns = s.txns > 0 && s.txns%segment.TxnEntrySize != 0
	if s.size == 0 {
		return s.offsets < 0 || s.times < 0, txns
	}
	// A finished segment has a time entry, even if no record has a time.
	if s.offsets < 0 || s.offsets%segment.OffsetEntrySize != 0 || s.times <= 0 || s.times%segment.TimeEntrySize != 0 ||
		s.offsets == 0 && !l.needsNoEntry(s, interval) {
		return true, txns
	}
	if !deep {
		return false, txns
	}
	check := func(suffix string, f func(h *segment.Handle) error) bool {
		h, err := l.files.Acquire(l.path(s.base, suffix), false)
		if err != nil {
			return true
		}
		defer h.Release()
		return f(h) != nil
	}
	index = check(segment.OffsetIndexSuffix, func(h *segment.Handle) error {
		return segment.OpenOffsetIndex(s.base, h.File, s.offsets).Check(next, s.size)
	}) || check(segment.TimeIndexSuffix, func(h *segment.Handle) error {
		return segment.OpenTimeIndex(s.base, h.File, s.times).Check(next)
	})
	if s.txns > 0 && !txns {
		b, err := vfs.ReadFile(l.fs, l.path(s.base, segment.TxnIndexSuffix), 64<<20)
		if err == nil {
			_, err = segment.ParseTxnIndex(b)
		}
		txns = err != nil
	}
	return index, txns
}

// needsNoEntry says whether a segment has no batch that an offset index of that interval would have an entry for: batches may be of
// any size, and only those that begin above it count.
func (l *Log) needsNoEntry(s foundSegment, interval int) bool {
	if s.size <= int64(interval) {
		return true
	}
	h, err := l.files.Acquire(l.path(s.base, segment.LogSuffix), false)
	if err != nil {
		return false
	}
	defer h.Release()
	b := segment.NewScanner(h.File, 0, s.size)
	defer b.Release()
	for b.Next() {
		if b.Pos() > int64(interval) {
			return false
		}
	}
	return b.Err() == nil
}

// removeFiles deletes names of the folder; missing ones are fine.
func (l *Log) removeFiles(names []string) error {
	for _, name := range names {
		l.files.Forget(filepath.Join(l.dir, name))
		if err := l.fs.Remove(l.file(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// segmentNames are the files of a segment, the batches last: an index without batches is swept up later.
func segmentNames(base int64) []string {
	return []string{segment.FileName(base, segment.TxnIndexSuffix), segment.FileName(base, segment.TimeIndexSuffix),
		segment.FileName(base, segment.OffsetIndexSuffix), segment.FileName(base, segment.LogSuffix)}
}

// restart is the content of the restart file. With snapshot a producer snapshot comes with it.
type restart struct {
	next, logStart int64
	snapshot       bool
}

func (r restart) marshal() []byte { return marshalDecision(r.next, r.logStart, r.snapshot) }

// Files that decide what becomes of a log, version 0: the version, then a line each of two offsets and whether something comes with
// it.

func marshalDecision(a, b int64, with bool) []byte { return appendDecision([]byte("0\n"), a, b, with) }

func appendDecision(to []byte, a, b int64, with bool) []byte {
	return fmt.Appendf(to, "%d %d %t\n", a, b, with)
}

// decisions are the lines of such a file, at least one; what names it in errors.
func decisions(what string, data []byte) ([][]byte, error) {
	lines := bytes.Split(data, []byte("\n"))
	if len(lines) < 3 || string(lines[0]) != "0" || len(lines[len(lines)-1]) != 0 {
		return nil, fmt.Errorf("%s file %.60q", what, data)
	}
	return lines[1 : len(lines)-1], nil
}

// parseDecision reads one line.
func parseDecision(what string, line []byte) (a, b int64, with bool, err error) {
	f := bytes.Fields(line)
	if len(f) != 3 {
		return 0, 0, false, fmt.Errorf("%s file with the line %.60q", what, line)
	}
	a, err = strconv.ParseInt(string(f[0]), 10, 64)
	if err == nil {
		b, err = strconv.ParseInt(string(f[1]), 10, 64)
	}
	if err == nil {
		with, err = strconv.ParseBool(string(f[2]))
	}
	return a, b, with, err
}

func parseRestart(b []byte) (r restart, err error) {
	lines, err := decisions("restart", b)
	if err == nil && len(lines) > 1 {
		err = fmt.Errorf("restart file with %d lines", len(lines))
	}
	if err != nil {
		return r, err
	}
	r.next, r.logStart, r.snapshot, err = parseDecision("restart", lines[0])
	if err == nil && (r.logStart < 0 || r.next < r.logStart) {
		err = fmt.Errorf("restart at %d with log start %d", r.next, r.logStart)
	}
	return r, err
}

func sorted(offsets map[int64][]byte) []int64 {
	out := make([]int64, 0, len(offsets))
	for o := range offsets {
		out = append(out, o)
	}
	slices.Sort(out)
	return out
}
