package log

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

// history is a log with a model beside it: all batches that it should hold, and what its owner checkpointed.
type history struct {
	t    *testing.T
	r    *rand.Rand
	seed uint64
	cfg  Config
	mem  *vfs.Mem
	fs   *vfs.Faulty
	l    *Log

	batches  [][]byte // appended, with their final offsets
	epoch    int32
	now      int64
	seq      map[int64]int32 // next sequence of open producers
	pepoch   map[int64]int16
	rp       int64 // checkpointed recovery point
	logStart int64 // checkpointed
	trace    []string
}

func (h *history) fatalf(format string, args ...any) {
	h.t.Helper()
	h.t.Fatalf("seed %d: %s\n%v", h.seed, fmt.Sprintf(format, args...), h.trace)
}

func (h *history) note(format string, args ...any) {
	h.trace = append(h.trace, fmt.Sprintf(format, args...))
}

func (h *history) open(clean bool) {
	h.t.Helper()
	h.fs = vfs.NewFaulty(h.mem)
	l, err := Open(Options{FS: h.fs, Dir: "/d/p-0", Partition: tp.Partition{Topic: "p"}, TopicID: tp.UUID{1}, Config: h.cfg,
		Clean: clean, RecoveryPoint: h.rp, LogStart: h.logStart, Now: time.UnixMilli(h.now)})
	if err != nil {
		h.fatalf("open, clean %v: %v", clean, err)
	}
	if clean && !l.Recovery().Clean {
		h.fatalf("a clean log was scanned: %+v", l.Recovery())
	}
	h.l = l
	h.l.SetHighWatermark(math.MaxInt64)
}

// batch makes the next batch: plain, idempotent or transactional, often of one size so that damage may align.
func (h *history) batch() []byte {
	b := recordbatch.NewBuilder()
	n := 1 + h.r.IntN(3)
	if pid := int64(h.r.IntN(4)); pid > 0 {
		b.ProducerID, b.ProducerEpoch, b.BaseSequence = pid, h.pepoch[pid], h.seq[pid]
		b.Transactional = pid > 1
		h.seq[pid] += int32(n)
	}
	for range n {
		b.Add(recordbatch.Record{Timestamp: h.now - int64(h.r.IntN(5)), Value: make([]byte, []int{20, 20, 20, 90}[h.r.IntN(4)])})
	}
	raw, err := b.Build()
	if err != nil {
		h.fatalf("build: %v", err)
	}
	return raw
}

// step does one random operation. exact says that the model knows the outcome even if a crash hit its middle, up
// to a lost tail.
func (h *history) step() (name string, exact bool) {
	h.now += int64(h.r.IntN(10))
	h.l.SetHighWatermark(math.MaxInt64)
	switch k := h.r.IntN(20); {
	case k < 9:
		var raw []byte
		internal := h.r.IntN(5) == 0
		if !internal {
			raw = h.batch()
		} else {
			pid := int64(2 + h.r.IntN(2))
			h.pepoch[pid]++
			h.seq[pid] = 0
			raw = recordbatch.EndTxnMarker(recordbatch.Marker{ProducerID: pid, ProducerEpoch: h.pepoch[pid], Commit: h.r.IntN(2) == 0, Timestamp: h.now})
		}
		res, err := h.l.AppendAsLeader(AppendRequest{Records: raw, LeaderEpoch: h.epoch, Now: time.UnixMilli(h.now), Internal: internal})
		if err != nil {
			h.fatalf("append: %v", err)
		}
		if res.Duplicate {
			h.fatalf("duplicate of nothing")
		}
		h.batches = append(h.batches, raw)
		return fmt.Sprintf("append %d-%d", res.FirstOffset, res.LastOffset), true
	case k < 12:
		if err := h.l.Flush(); err != nil {
			h.fatalf("flush: %v", err)
		}
		return "flush", true
	case k == 12:
		if err := h.l.Roll(time.UnixMilli(h.now)); err != nil {
			h.fatalf("roll: %v", err)
		}
		return "roll", true
	case k == 13:
		if err := h.l.FlushUpTo(h.l.Offsets().ActiveBase); err != nil {
			h.fatalf("flush sealed: %v", err)
		}
		return "flush sealed", true
	case k == 14:
		if _, err := h.l.ApplyRetention(time.UnixMilli(h.now)); err != nil {
			h.fatalf("retention: %v", err)
		}
		return "retention", true
	case k == 15:
		o := h.l.Offsets()
		to := o.LogStart + h.r.Int64N(o.End-o.LogStart+1)
		if err := h.l.AdvanceLogStart(to); err != nil {
			h.fatalf("advance: %v", err)
		}
		return fmt.Sprintf("log start %d", to), true
	case k < 18:
		o := h.l.Offsets()
		to := max(0, o.End-h.r.Int64N(12))
		if err := h.l.TruncateTo(to); err != nil {
			h.fatalf("truncate: %v", err)
		}
		h.cutModel(h.l.Offsets().End)
		h.epoch++
		clear(h.seq) // the clients begin anew, with new epochs
		for pid := range int64(4) {
			h.pepoch[pid] += 2
		}
		return fmt.Sprintf("truncate %d", to), false
	case k == 18:
		h.epoch++
		if err := h.l.AssignEpoch(h.epoch, h.l.Offsets().End); err != nil {
			h.fatalf("epoch: %v", err)
		}
		return "epoch", true
	default:
		next := h.l.Offsets().End + 1 + h.r.Int64N(5)
		epochs := []leaderepoch.Entry{{Epoch: 0, StartOffset: 0}, {Epoch: h.epoch + 1, StartOffset: max(next-1, 1)}}
		snapshot := producerstate.MarshalSnapshot([]producerstate.Entry{{ProducerID: 77, Epoch: 1, LastSequence: 5, LastOffset: 3, CoordinatorEpoch: -1, TxnFirstOffset: -1}})
		if err := h.l.TruncateFullyAndStartAt(next, next, epochs, snapshot); err != nil {
			h.fatalf("restart: %v", err)
		}
		h.batches = nil
		h.epoch += 2
		return fmt.Sprintf("restart %d", next), false
	}
}

func (h *history) cutModel(end int64) {
	h.batches = slices.DeleteFunc(slices.Clone(h.batches), func(b []byte) bool {
		hd, _ := recordbatch.ParseHeader(b)
		return hd.NextOffset() > end
	})
}

// compare reads all of the log and holds it against candidates for what it may be a prefix of; it returns the
// number of the one that fits.
func (h *history) compare(candidates ...[][]byte) int {
	h.t.Helper()
	o := h.l.Offsets()
	got := readRaw(h.t, h.l, o.LocalLogStart, o.End, 1+h.r.IntN(400))
	for i, batches := range candidates {
		var want []byte
		for _, b := range batches {
			hd, _ := recordbatch.ParseHeader(b)
			if hd.LastOffset() >= o.LocalLogStart && hd.NextOffset() <= o.End {
				want = append(want, b...)
			}
		}
		if bytes.Equal(got, want) {
			return i
		}
	}
	h.fatalf("log %+v holds %d bytes that were not appended so", o, len(got))
	return -1
}

// derived checks what the log keeps beside its batches against a walk over them.
func (h *history) derived() {
	h.t.Helper()
	o := h.l.Offsets()
	if es := h.l.Epochs(); len(es) > 0 && es[len(es)-1].StartOffset > o.End {
		h.fatalf("epoch beyond the end: %v, %+v", es, o)
	}
	v := h.l.current.Load()
	if v.at(0).Base == 0 {
		s := producerstate.New()
		var aborted []AbortedTxn
		for i := range v.count() {
			if err := h.l.replaySegment(s, v.at(i), 0, math.MaxInt64, func(a AbortedTxn) { aborted = append(aborted, a) }); err != nil {
				h.fatalf("replay: %v", err)
			}
		}
		if a, b := s.Snapshot(), h.l.producers.Snapshot(); !slices.Equal(a, b) {
			h.fatalf("producers %+v, the batches say %+v", b, a)
		}
		got, err := h.l.AbortedTransactions(0, math.MaxInt64)
		if err != nil || !slices.Equal(got, aborted) {
			h.fatalf("aborted %v, %v; the batches say %v", got, err, aborted)
		}
	}
	ts := h.now - h.r.Int64N(60)
	f, ok, err := h.l.OffsetForTimestamp(ts)
	if err != nil {
		h.fatalf("time %d: %v", ts, err)
	}
	raw := readRaw(h.t, h.l, o.LocalLogStart, o.End, math.MaxInt32)
	for len(raw) > 0 {
		it, err := recordbatch.Records(raw, 0)
		if err != nil {
			h.fatalf("%v", err)
		}
		raw = raw[it.Header().Size:]
		for it.Next() {
			if r := it.Record(); r.Timestamp >= ts && r.Offset >= o.LogStart {
				if !ok || f.Offset != r.Offset {
					h.fatalf("time %d: %+v, %v; want offset %d", ts, f, ok, r.Offset)
				}
				return
			}
		}
	}
	if ok {
		h.fatalf("time %d: %+v; want none", ts, f)
	}
}

func (h *history) run(steps int) {
	for range steps {
		before := h.batches
		rp, logStart := h.l.Offsets().RecoveryPoint, h.l.Offsets().LogStart
		var clone *vfs.Mem
		crash := h.r.IntN(5) == 0
		left := -1
		if crash {
			left = h.r.IntN(12) // operations of the file system until the power goes; often past the step's end
			h.fs.Before = func(vfs.Op, string) {
				if left == 0 {
					clone = h.mem.CrashClone(h.r)
				}
				left--
			}
		}
		name, exact := h.step()
		h.note("%s", name)
		o := h.l.Offsets()
		if o.RecoveryPoint < h.rp || !exact && clone == nil {
			h.rp = o.RecoveryPoint // as the contract of TruncateTo demands
		}
		if h.r.IntN(3) == 0 && clone == nil {
			h.rp, h.logStart = o.RecoveryPoint, o.LogStart
		}
		switch {
		case crash:
			h.fs.Before = nil
			durable := o.RecoveryPoint
			if clone == nil {
				clone = h.mem.CrashClone(h.r)
			} else {
				durable = min(rp, o.RecoveryPoint)
				h.rp = min(h.rp, rp)
			}
			h.l.CloseDirty()
			h.mem = clone
			h.note("crash, rp %d", h.rp)
			h.open(false)
			got := h.l.Offsets()
			if exact && got.End < durable {
				h.fatalf("end %+v, but all below %d was flushed", got, durable)
			}
			_ = logStart
			if h.compare(h.batches, before) == 1 {
				h.batches = before
			}
			h.cutModel(got.End)
			h.rp, h.logStart = got.RecoveryPoint, got.LogStart
			clear(h.seq)
			for pid := range int64(4) {
				h.pepoch[pid] += 2
			}
			h.epoch += 2
			h.derived()
		case h.r.IntN(12) == 0:
			if err := h.l.Close(); err != nil {
				h.fatalf("close: %v", err)
			}
			if h.r.IntN(2) == 0 {
				h.mem = h.mem.CrashClone(h.r) // nothing is left that could be lost
			}
			h.rp, h.logStart = o.End, o.LogStart
			h.note("close")
			h.open(true)
			if got := h.l.Offsets(); got.End != o.End || got.LogStart != o.LogStart || got.LocalLogStart != o.LocalLogStart {
				h.fatalf("%+v after a close at %+v", got, o)
			}
			h.compare(h.batches)
			h.derived()
		}
	}
	h.compare(h.batches)
	h.derived()
}

// TestCrashes runs random histories on a disk that loses what was not synced, torn and out of order, also in
// the middle of an operation: what was flushed is there again, what is read is what was appended, and indexes,
// producers and times agree with it.
func TestCrashes(t *testing.T) {
	runs := uint64(3000)
	if testing.Short() {
		runs = 300
	}
	if n, err := strconv.ParseUint(os.Getenv("VARVE_CRASH_RUNS"), 10, 32); err == nil {
		runs = n
	}
	for seed := range runs {
		h := &history{t: t, r: rand.New(rand.NewPCG(seed, 7)), seed: seed, mem: vfs.NewMem(), now: 1000, seq: map[int64]int32{}, pepoch: map[int64]int16{}}
		h.cfg = DefaultConfig()
		h.cfg.SegmentBytes = []int64{400, 1000, 1 << 20}[h.r.IntN(3)]
		h.cfg.IndexIntervalBytes = []int{0, 150, 4096}[h.r.IntN(3)]
		h.cfg.ProducerIDExpirationMs = -1
		h.cfg.RetentionMs = -1
		if h.r.IntN(3) == 0 {
			h.cfg.RetentionBytes = 1500
		}
		if h.r.IntN(4) == 0 {
			h.cfg.FlushMessages = 5
		}
		if err := h.mem.MkdirAll("/d"); err != nil {
			t.Fatal(err)
		}
		if err := h.mem.SyncDir("/"); err != nil {
			t.Fatal(err)
		}
		h.open(false)
		h.run(40)
	}
}
