package log

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/compact"
	"github.com/varve-io/varve/internal/fixtures"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

// keyed is a compacted log with a model beside it.
type keyed struct {
	t    *testing.T
	r    *rand.Rand
	seed uint64
	mem  *vfs.Mem
	fs   *vfs.Faulty
	l    *Log
	cfg  Config
	now  int64
	rp   int64

	written map[int64]write // by offset
	open    map[int64][]int64
	seq     map[int64]int32
	trace   []string
	reach   int64 // below which compactions may have removed records, also those that a crash made the log forget
}

type write struct {
	key, value string // "" is a tombstone
	at         int64
	fate       fate
}

type fate int8

const (
	plain fate = iota
	undecided
	committed
	abortedFate
)

func (k *keyed) fatalf(format string, args ...any) {
	k.t.Helper()
	k.t.Fatalf("seed %d: %s\n%s", k.seed, fmt.Sprintf(format, args...), strings.Join(k.trace, "\n"))
}

func newKeyed(t *testing.T, seed uint64) *keyed {
	k := &keyed{t: t, r: rand.New(rand.NewPCG(seed, 11)), seed: seed, mem: vfs.NewMem(), now: 1000, written: map[int64]write{}, open: map[int64][]int64{}, seq: map[int64]int32{}}
	k.cfg = DefaultConfig()
	k.cfg.Compact, k.cfg.Delete, k.cfg.RetentionMs = true, false, -1
	k.cfg.SegmentBytes = []int64{300, 900, 4000}[k.r.IntN(3)]
	k.cfg.IndexIntervalBytes = []int{0, 200, 4096}[k.r.IntN(3)]
	k.cfg.Compression = []string{"producer", "lz4"}[k.r.IntN(2)]
	k.cfg.Compaction = compact.Config{DirtyRatio: 0, MaxLagMs: math.MaxInt64, DeleteRetentionMs: int64(k.r.IntN(3)) * 40}
	k.cfg.ProducerIDExpirationMs = math.MaxInt64 / 2
	if err := errors.Join(k.mem.MkdirAll("/d"), k.mem.SyncDir("/")); err != nil {
		t.Fatal(err)
	}
	k.start(false, 0)
	return k
}

func (k *keyed) start(clean bool, compacted int64) {
	k.t.Helper()
	k.fs = vfs.NewFaulty(k.mem)
	l, err := Open(Options{FS: k.fs, Dir: "/d/k-0", Partition: tp.Partition{Topic: "k"}, TopicID: tp.UUID{1}, Config: k.cfg, Clean: clean,
		RecoveryPoint: k.rp, Compacted: compacted, Now: time.UnixMilli(k.now)})
	if err != nil {
		k.fatalf("open: %v", err)
	}
	k.l = l
	k.l.SetHighWatermark(math.MaxInt64)
}

// put appends a batch, of a producer without transactions, of one with an open transaction, or a marker.
func (k *keyed) put() {
	k.now += int64(k.r.IntN(10))
	pid := int64(k.r.IntN(4)) // 0: none; 1: idempotent; others: transactional
	if offsets := k.open[pid]; pid > 1 && len(offsets) > 0 && k.r.IntN(3) == 0 {
		commit := k.r.IntN(2) == 0
		k.append(recordbatch.EndTxnMarker(recordbatch.Marker{ProducerID: pid, Commit: commit, Timestamp: k.now}), true)
		for _, o := range offsets {
			w := k.written[o]
			if w.fate = abortedFate; commit {
				w.fate = committed
			}
			k.written[o] = w
		}
		delete(k.open, pid)
		return
	}
	b := recordbatch.NewBuilder()
	n := 1 + k.r.IntN(4)
	if pid > 0 {
		b.ProducerID, b.ProducerEpoch, b.BaseSequence, b.Transactional = pid, 0, k.seq[pid], pid > 1
		k.seq[pid] += int32(n)
	}
	var writes []write
	for i := range n {
		w := write{key: fmt.Sprint("key", k.r.IntN(8)), at: k.now - int64(k.r.IntN(3))}
		if pid > 1 {
			w.fate = undecided
		}
		r := recordbatch.Record{Timestamp: w.at, Key: []byte(w.key), Headers: []recordbatch.RecordHeader{{Key: "h", Value: []byte{1}}}}
		if k.r.IntN(4) > 0 {
			w.value = fmt.Sprint(k.now, ".", i, strings.Repeat("x", k.r.IntN(30)))
			r.Value = []byte(w.value)
		}
		b.Add(r)
		writes = append(writes, w)
	}
	raw, err := b.Build()
	if err != nil {
		k.fatalf("%v", err)
	}
	at := k.append(raw, false)
	for i, w := range writes {
		k.written[at+int64(i)] = w
		if pid > 1 {
			k.open[pid] = append(k.open[pid], at+int64(i))
		}
	}
}

func (k *keyed) append(raw []byte, internal bool) int64 {
	res, err := k.l.AppendAsLeader(AppendRequest{Records: raw, LeaderEpoch: 1, Now: time.UnixMilli(k.now), Internal: internal})
	if err != nil {
		k.fatalf("append: %v", err)
	}
	k.l.SetHighWatermark(math.MaxInt64)
	return res.FirstOffset
}

// add appends a batch of one record.
func (k *keyed) add(r recordbatch.Record) int64 {
	k.t.Helper()
	b := recordbatch.NewBuilder()
	b.Add(r)
	raw, err := b.Build()
	if err != nil {
		k.fatalf("build: %v", err)
	}
	return k.append(raw, false)
}

func (k *keyed) stable() int64 {
	end := k.l.Offsets().End
	if o, ok := k.l.FirstUnstable(end); ok {
		return o
	}
	return end
}

// compact runs a compaction with room for a few keys, or for all.
func (k *keyed) compact() (CompactResult, error) {
	p, err := k.l.CompactionPlan(k.stable(), time.UnixMilli(k.now))
	if err != nil {
		k.fatalf("plan: %v", err)
	}
	memory := 1 << 20
	if k.r.IntN(3) == 0 {
		memory = 30 * 10
	}
	res, err := k.l.Compact(context.Background(), p, CompactOptions{Memory: memory, Now: time.UnixMilli(k.now)})
	if k.reach = max(k.reach, res.To); err != nil {
		k.reach = max(k.reach, p.To)
	}
	k.trace = append(k.trace, fmt.Sprintf("at %d: plan %+v: %+v, %v", k.now, p, res, err))
	return res, err
}

// seen are the records that the log holds, and those that a consumer of committed ones gets.
func (k *keyed) seen() (all, visible map[int64]write) {
	all, visible = map[int64]write{}, map[int64]write{}
	o := k.l.Offsets()
	raw := readRaw(k.t, k.l, o.LocalLogStart, o.End, math.MaxInt32)
	aborted, err := k.l.AbortedTransactions(o.LocalLogStart, o.End)
	if err != nil {
		k.fatalf("%v", err)
	}
	next := int64(0)
	for len(raw) > 0 {
		h, err := recordbatch.ParseHeader(raw)
		if err == nil {
			err = h.Verify(raw[:h.Size])
		}
		if err != nil || h.BaseOffset < next {
			k.fatalf("batch at %d after %d: %v", h.BaseOffset, next, err)
		}
		next = h.NextOffset()
		it, err := recordbatch.Records(raw[:h.Size], 0)
		if err != nil {
			k.fatalf("%v", err)
		}
		raw = raw[h.Size:]
		for it.Next() {
			if h.IsControl() {
				continue
			}
			r := it.Record()
			w := write{key: string(r.Key), value: string(r.Value), at: r.Timestamp}
			if len(r.Headers) != 1 {
				k.fatalf("headers of offset %d: %v", r.Offset, r.Headers)
			}
			all[r.Offset] = w
			hidden := r.Offset >= k.stable()
			for _, a := range aborted {
				hidden = hidden || a.ProducerID == h.ProducerID && h.IsTransactional() && r.Offset >= a.FirstOffset && r.Offset < a.LastOffset
			}
			if !hidden {
				visible[r.Offset] = w
			}
		}
		if it.Err() != nil {
			k.fatalf("%v", it.Err())
		}
	}
	return all, visible
}

// check compares the log with what was written. cleaned is an offset below which no key may be there twice, unless a record above
// tells; -1 if a crash leaves that open.
func (k *keyed) check(cleaned int64) {
	k.t.Helper()
	all, visible := k.seen()
	end := k.l.Offsets().End
	latest := map[string]int64{} // of the committed records that the log was given
	for o, w := range k.written {
		if o < end && (w.fate == plain || w.fate == committed) && o < k.stable() {
			latest[w.key] = max(latest[w.key], o+1)
		}
	}
	for o, w := range all {
		want, ok := k.written[o]
		if want.fate = 0; !ok || want != w {
			k.fatalf("offset %d holds %+v, written was %+v", o, w, k.written[o])
		}
	}
	for o := range visible {
		if f := k.written[o].fate; f == abortedFate || f == undecided {
			k.fatalf("offset %d of fate %d is visible", o, f)
		}
	}
	for o, w := range k.written {
		if o >= end {
			continue
		}
		_, there := all[o]
		switch {
		case there:
		case o >= k.reach && cleaned >= 0 && w.fate != abortedFate:
			k.fatalf("offset %d is gone, and only what is below %d may be", o, k.reach)
		case w.fate == undecided:
			k.fatalf("offset %d of an open transaction is gone", o)
		case (w.fate == plain || w.fate == committed) && latest[w.key] == o+1 && w.value != "":
			k.fatalf("offset %d, the last of %s, is gone", o, w.key)
		}
	}
	last := map[string]int64{}
	for o, w := range visible {
		if o >= cleaned {
			continue
		}
		if before, twice := last[w.key]; twice {
			k.fatalf("offsets %d and %d of %s are below %d", before, o, w.key, cleaned)
		}
		last[w.key] = o
	}
	for o := range all {
		if o < cleaned && k.written[o].fate == abortedFate {
			k.fatalf("offset %d was aborted and is below %d", o, cleaned)
		}
	}
}

// producers are those that the log knows, without their times, which removed records take along.
func (k *keyed) producers() (out string) {
	for _, p := range k.l.Producers(time.UnixMilli(k.now)) {
		out += fmt.Sprintf("%d in epoch %d up to %d, transaction from %d; ", p.ProducerID, p.Epoch, p.LastSequence, p.TxnFirstOffset)
	}
	return out
}

// restart closes and opens the log; without clean as after a crash that left no snapshots.
func (k *keyed) restart(clean bool) {
	k.t.Helper()
	compacted := k.l.Compacted()
	if err := k.l.Close(); err != nil {
		k.fatalf("%v", err)
	}
	k.rp = k.l.Offsets().End
	if !clean {
		k.rp = 0
		for _, s := range k.l.snapshots {
			_ = k.mem.Remove(k.l.path(s, segment.SnapshotSuffix))
		}
	}
	k.start(clean, compacted)
}

// TestCompaction runs random histories of keys, tombstones and transactions through compactions, crashes in their middle, and restarts.
func TestCompaction(t *testing.T) {
	runs := uint64(1500)
	if testing.Short() {
		runs = 150
	}
	finished := 0
	for seed := range runs {
		k := newKeyed(t, seed)
		for range 12 {
			for range k.r.IntN(12) {
				k.put()
			}
			if k.r.IntN(3) == 0 {
				if err := k.l.Roll(time.UnixMilli(k.now)); err != nil {
					k.fatalf("%v", err)
				}
			}
			if k.r.IntN(3) == 0 { // power cut at one of the steps
				if err := k.l.Flush(); err != nil {
					k.fatalf("%v", err)
				}
				k.rp = k.l.Offsets().RecoveryPoint
				var clone *vfs.Mem
				left := k.r.IntN(100) // several groups are staged before one decision
				k.fs.Before = func(vfs.Op, string) {
					if left == 0 {
						clone = k.mem.CrashClone(k.r)
					}
					left--
				}
				before := k.l.Compacted()
				_, _ = k.compact()
				k.fs.Before = nil
				if clone == nil {
					clone = k.mem.CrashClone(k.r)
				}
				k.l.CloseDirty()
				k.mem = clone
				k.start(false, before)
				k.check(-1)
				continue
			}
			producers := k.producers()
			res, err := k.compact()
			if err != nil && !strings.Contains(err.Error(), "not one batch") {
				k.fatalf("%v", err)
			}
			if err == nil {
				finished++
				k.check(res.To)
			}
			if k.r.IntN(3) > 0 {
				continue
			}
			k.restart(true)
			k.check(0)
			k.restart(false) // from the batches alone
			if got := k.producers(); got != producers {
				k.fatalf("what is left tells of producers %s, there were %s", got, producers)
			}
		}
		if err := k.l.Close(); err != nil {
			k.fatalf("%v", err)
		}
	}
	if finished < int(runs) {
		t.Errorf("only %d compactions", finished)
	}
}

// TestCompactionIsKafkas compacts what a real Kafka compacted, at its hour, and gets the same files.
func TestCompactionIsKafkas(t *testing.T) {
	root := fixtures.Dir(t)
	before, after := filepath.Join(root, "local/compacted-before"), filepath.Join(root, "local/compacted-after")
	var topic kafkaTopic
	readJSON(t, filepath.Join(before, "topic.json"), &topic)
	l, mem := fixtureLog(t, before, &topic, true)
	defer l.Close()
	l.SetHighWatermark(math.MaxInt64)
	cfg := l.Config()
	cfg.Compaction = compact.Config{DirtyRatio: 0.01, MaxLagMs: math.MaxInt64, DeleteRetentionMs: 86400000}
	l.SetConfig(cfg)
	var now int64 // when Kafka did it: its horizons tell
	for _, name := range []string{"00000000000000000000.log", "00000000000000000026.log", "00000000000000000052.log", "00000000000000000078.log"} {
		b, err := os.ReadFile(filepath.Join(after, "compacted-0", name))
		if err != nil {
			t.Fatal(err)
		}
		for s := segment.NewScanner(bytes.NewReader(b), 0, int64(len(b))); s.Next(); {
			if h := s.Header(); h.HasDeleteHorizon() {
				now = h.BaseTimestamp - cfg.Compaction.DeleteRetentionMs
			}
		}
	}
	p, err := l.CompactionPlan(math.MaxInt64, time.UnixMilli(now))
	if err != nil || !p.Due || p.To != 104 {
		t.Fatalf("%+v, %v", p, err)
	}
	if _, err := l.Compact(context.Background(), p, CompactOptions{Memory: 1 << 20, Now: time.UnixMilli(now)}); err != nil {
		t.Fatal(err)
	}
	for base := int64(0); base <= 78; base += 26 {
		for _, suffix := range []string{segment.LogSuffix, segment.OffsetIndexSuffix, segment.TimeIndexSuffix, segment.TxnIndexSuffix} {
			name := segment.FileName(base, suffix)
			want, err := os.ReadFile(filepath.Join(after, "compacted-0", name))
			if err != nil {
				t.Fatal(err)
			}
			got, err := vfs.ReadFile(mem, "/p-0/"+name, 1<<20)
			if err != nil && !(errors.Is(err, fs.ErrNotExist) && len(want) == 0) {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("%s: %d bytes, Kafka has %d", name, len(got), len(want))
				show := func(b []byte) (out string) {
					for s := segment.NewScanner(bytes.NewReader(b), 0, int64(len(b))); s.Next(); {
						out += fmt.Sprintf("  %+v\n", *s.Header())
					}
					return out
				}
				if suffix == segment.LogSuffix {
					t.Logf("ours:\n%sKafka's:\n%s", show(got), show(want))
				}
			}
		}
	}
}
