package log

import (
	"bytes"
	"errors"
	"io/fs"
	"math"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

// rig is a log in memory whose clock the test moves.
type rig struct {
	*Log
	t   testing.TB
	fs  *vfs.Faulty
	cfg Config
	now int64
}

func newRig(t testing.TB, change func(*Config)) *rig {
	t.Helper()
	r := &rig{t: t, fs: vfs.NewFaulty(vfs.NewMem()), cfg: DefaultConfig(), now: 1_000_000}
	r.cfg.SegmentMs = math.MaxInt64
	r.cfg.IndexIntervalBytes = 100
	if change != nil {
		change(&r.cfg)
	}
	if err := r.fs.MkdirAll("/d"); err != nil {
		t.Fatal(err)
	}
	r.open(false, 0, 0)
	return r
}

func (r *rig) options(clean bool, rp, logStart int64) Options {
	return Options{FS: r.fs, Dir: "/d/t-0", Partition: tp.Partition{Topic: "t"}, TopicID: tp.UUID{1}, Config: r.cfg,
		Clean: clean, RecoveryPoint: rp, LogStart: logStart, Now: time.UnixMilli(r.now)}
}

func (r *rig) open(clean bool, rp, logStart int64) {
	r.t.Helper()
	l, err := Open(r.options(clean, rp, logStart))
	if err != nil {
		r.t.Fatal(err)
	}
	r.Log = l
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func records(t testing.TB, n int, ts int64, change func(*recordbatch.Builder)) []byte {
	t.Helper()
	b := recordbatch.NewBuilder()
	if change != nil {
		change(b)
	}
	for range n {
		b.Add(recordbatch.Record{Timestamp: ts, Key: []byte("k"), Value: make([]byte, 50)})
	}
	raw, err := b.Build()
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// add appends n records with the time of the rig and raises the high watermark.
func (r *rig) add(n int) AppendResult {
	r.t.Helper()
	res, err := r.AppendAsLeader(AppendRequest{Records: records(r.t, n, r.now, nil), LeaderEpoch: 3, Now: time.UnixMilli(r.now)})
	r.must(err)
	r.SetHighWatermark(math.MaxInt64)
	return res
}

func (r *rig) want(logStart, local, end int64) {
	r.t.Helper()
	if o := r.Offsets(); o.LogStart != logStart || o.LocalLogStart != local || o.End != end {
		r.t.Fatalf("offsets %+v, want log start %d, local start %d, end %d", o, logStart, local, end)
	}
}

func (r *rig) retain() RetentionResult {
	r.t.Helper()
	res, err := r.ApplyRetention(time.UnixMilli(r.now))
	r.must(err)
	return res
}

func TestAppendAndRead(t *testing.T) {
	r := newRig(t, nil)
	for i := range int64(5) {
		if res := r.add(2); res.FirstOffset != 2*i || res.LastOffset != 2*i+1 || res.LogAppendTime != -1 {
			t.Fatalf("append %d: %+v", i, res)
		}
	}
	v, err := r.Read(3, 1, 10, true)
	r.must(err)
	if v.FirstOffset != 2 || v.NextOffset != 4 || v.Size() == 0 || len(v.Sections()) != 1 {
		t.Errorf("view %+v", v)
	}
	v.Release()
	if v, err = r.Read(3, 1, 10, false); err != nil || v.Size() != 0 || v.NextOffset != 3 {
		t.Errorf("nothing fits: %+v, %v", v, err)
	}
	if v, err = r.Read(10, 100, 10, true); err != nil || v.Size() != 0 || v.NextOffset != 10 {
		t.Errorf("at the end: %+v, %v", v, err)
	}
	if v, err = r.Read(4, 1000, 5, true); err != nil || v.Size() != 0 {
		t.Errorf("a batch across the bound: %+v, %v", v, err)
	}
	var oor *OffsetOutOfRangeError
	if _, err := r.Read(11, 1, 10, true); !errors.As(err, &oor) || oor.End != 10 || !errors.Is(err, ErrOffsetOutOfRange) {
		t.Errorf("past the end: %v", err)
	}
	if e, end := r.EndOffsetForEpoch(3); e != 3 || end != 10 {
		t.Errorf("end of epoch: %d, %d", e, end)
	}
	if _, err := r.AppendAsLeader(AppendRequest{Records: records(t, 1, 0, func(b *recordbatch.Builder) { b.BaseOffset = 9 }), Now: time.UnixMilli(r.now)}); !errors.Is(err, recordbatch.ErrInvalidRecord) {
		t.Errorf("invalid batch: %v", err)
	}
	r.want(0, 0, 10)
}

func TestLogAppendTimeAndDuplicates(t *testing.T) {
	r := newRig(t, func(c *Config) { c.LogAppendTime = true })
	send := func(seq int32) AppendResult {
		t.Helper()
		raw := records(t, 2, 5, func(b *recordbatch.Builder) { b.ProducerID, b.ProducerEpoch, b.BaseSequence = 9, 0, seq })
		res, err := r.AppendAsLeader(AppendRequest{Records: raw, Now: time.UnixMilli(r.now)})
		r.must(err)
		return res
	}
	first := send(0)
	r.now += 50
	send(2)
	if again := send(0); !again.Duplicate || again.FirstOffset != first.FirstOffset || again.LogAppendTime != first.LogAppendTime || first.LogAppendTime != r.now-50 {
		t.Errorf("first %+v, again %+v", first, again)
	}
	raw := records(t, 1, 5, func(b *recordbatch.Builder) { b.ProducerID, b.ProducerEpoch, b.BaseSequence = 9, 0, 9 })
	if _, err := r.AppendAsLeader(AppendRequest{Records: raw, Now: time.UnixMilli(r.now)}); !errors.Is(err, producerstate.ErrOutOfOrderSequence) {
		t.Errorf("gap: %v", err)
	}
	r.must(r.Close())
	r.open(true, 4, 0)
	if again := send(2); !again.Duplicate || again.FirstOffset != 2 {
		t.Errorf("after a restart: %+v", again)
	}
	r.want(0, 0, 4)
}

// TestOddTimestamps is Kafka's behaviour with negative and falling timestamps, before and after a restart.
func TestOddTimestamps(t *testing.T) {
	r := newRig(t, nil)
	for _, ts := range []int64{10, 100, 50, -5} {
		_, err := r.AppendAsLeader(AppendRequest{Records: records(t, 1, ts, nil), Now: time.UnixMilli(r.now)})
		r.must(err)
	}
	check := func() {
		t.Helper()
		for ts, want := range map[int64]int64{5: 0, 11: 1, 60: 1, 101: -1} {
			f, ok, err := r.OffsetForTimestamp(ts)
			if err != nil || ok != (want >= 0) || ok && f.Offset != want {
				t.Errorf("time %d: %+v, %v, %v; want %d", ts, f, ok, err, want)
			}
		}
		if f, ok, err := r.MaxTimestamp(); err != nil || !ok || f.Offset != 1 || f.Timestamp != 100 {
			t.Errorf("maximum: %+v, %v, %v", f, ok, err)
		}
	}
	check()
	r.must(r.Close())
	r.open(true, 0, 0)
	check()
	r.CloseDirty()
	r.open(false, 0, 0)
	check()
}

func TestFollowerAppends(t *testing.T) {
	leader, r := newRig(t, nil), newRig(t, nil)
	for range 4 {
		leader.add(3)
	}
	all := readRaw(t, leader.Log, 0, 12, math.MaxInt32)
	size := len(all) / 4
	res, err := r.AppendAsFollower(bytes.Clone(all[:size*2+10]), math.MaxInt32, time.UnixMilli(r.now))
	if err != nil || res.FirstOffset != 0 || res.LastOffset != 5 {
		t.Fatalf("with a batch cut off: %+v, %v", res, err)
	}
	var unexpected *UnexpectedOffsetError
	if _, err := r.AppendAsFollower(bytes.Clone(all[size:]), math.MaxInt32, time.UnixMilli(r.now)); !errors.As(err, &unexpected) || unexpected.End != 6 {
		t.Errorf("batches the log has: %v", err)
	}
	bad := bytes.Clone(all[size*2:])
	bad[size-1] ^= 1
	if _, err := r.AppendAsFollower(bad, math.MaxInt32, time.UnixMilli(r.now)); !errors.Is(err, recordbatch.ErrCorrupt) {
		t.Errorf("damaged batch: %v", err)
	}
	if _, err := r.AppendAsFollower(bytes.Clone(all[size*3:]), math.MaxInt32, time.UnixMilli(r.now)); err != nil {
		t.Errorf("after a hole: %v", err)
	}
	r.want(0, 0, 12)
	got := readRaw(t, r.Log, 0, 12, math.MaxInt32)
	if want := append(bytes.Clone(all[:size*2]), all[size*3:]...); !bytes.Equal(got, want) {
		t.Error("other bytes than the leader's")
	}
	if es := r.Epochs(); !slices.Equal(es, []leaderepoch.Entry{{Epoch: 3, StartOffset: 0}}) {
		t.Errorf("epochs %v", es)
	}
	v, err := r.Read(7, math.MaxInt32, 12, true)
	if err != nil || v.FirstOffset != 9 {
		t.Errorf("read in the hole: %+v, %v", v, err)
	}
	v.Release()
	far := records(t, 1, 1, func(b *recordbatch.Builder) { b.BaseOffset, b.LeaderEpoch = 1<<33, 4 })
	_, err = r.AppendAsFollower(far, math.MaxInt32, time.UnixMilli(r.now))
	r.must(err)
	if o := r.Offsets(); o.ActiveBase != 1<<33 {
		t.Errorf("an offset that does not fit the segment: %+v", o)
	}
}

func TestRollRules(t *testing.T) {
	r := newRig(t, func(c *Config) { c.SegmentBytes, c.SegmentMs = 400, 1000 })
	r.add(1)
	r.now += 1000
	r.add(1)
	if o := r.Offsets(); o.ActiveBase != 0 {
		t.Fatalf("rolled at exactly segment.ms: %+v", o)
	}
	r.now++
	r.add(1)
	if o := r.Offsets(); o.ActiveBase != 2 {
		t.Fatalf("not rolled after segment.ms: %+v", o)
	}
	r.add(1)
	r.add(1)
	r.add(1)
	if s := r.Sealed(); len(s) != 2 || s[0].End != 1 || s[1].Base != 2 || s[1].MaxTimestamp != r.now {
		t.Fatalf("sealed %+v", s)
	}
	r.must(r.Roll(time.UnixMilli(r.now)))
	r.must(r.Roll(time.UnixMilli(r.now)))
	if o := r.Offsets(); o.ActiveBase != 6 || len(r.Sealed()) != 3 {
		t.Errorf("an empty segment was rolled: %+v, %+v", o, r.Sealed())
	}
	if _, err := r.AppendAsLeader(AppendRequest{Records: records(t, 10, r.now, nil), Now: time.UnixMilli(r.now)}); !errors.Is(err, ErrExceedsSegment) {
		t.Errorf("batch larger than a segment: %v", err)
	}
	index := newRig(t, func(c *Config) { c.SegmentIndexBytes, c.IndexIntervalBytes = 32, 0 })
	for range 10 {
		index.add(1)
	}
	if o := index.Offsets(); o.ActiveBase == 0 {
		t.Error("a full index does not roll")
	}
}

// TestEverythingExpires: offsets never move back, and a lone old record in the active segment goes too.
func TestEverythingExpires(t *testing.T) {
	r := newRig(t, func(c *Config) { c.RetentionMs = 2000; c.SegmentBytes = 300 })
	for range 10 {
		r.add(1)
	}
	r.now += 2000
	if res := r.retain(); len(res.Deleted) != 0 {
		t.Fatalf("deleted at exactly the limit: %+v", res)
	}
	view, err := r.Read(0, 1000, 10, true)
	r.must(err)
	r.now++
	r.SetHighWatermark(9)
	r.retain()
	if o := r.Offsets(); o.LogStart == 0 || o.LogStart >= 10 {
		t.Fatalf("retention above the high watermark: %+v", o)
	}
	r.SetHighWatermark(10)
	if res := r.retain(); !res.Rolled {
		t.Errorf("%+v", res)
	}
	r.want(10, 10, 10)
	if o := r.Offsets(); o.Size != 0 {
		t.Errorf("%d bytes left", o.Size)
	}
	if b, err := view.AppendTo(nil); err != nil || recordbatch.VerifyCRC(b) != nil {
		t.Errorf("a view does not outlive its segment: %v", err)
	}
	view.Release()
	if res := r.retain(); res.Rolled || len(res.Deleted) != 0 {
		t.Errorf("empty log: %+v", res)
	}
	r.CloseDirty()
	r.open(false, 10, 10)
	r.want(10, 10, 10)
	if res := r.add(1); res.FirstOffset != 10 {
		t.Errorf("next record at %+v", res)
	}
	if _, err := r.Read(9, 1, 11, true); !errors.Is(err, ErrOffsetOutOfRange) {
		t.Errorf("read below the start: %v", err)
	}
}

func TestSizeRetention(t *testing.T) {
	r := newRig(t, func(c *Config) { c.SegmentBytes = 300 })
	for range 10 {
		r.add(1)
	}
	size := r.Offsets().Size
	one := r.Sealed()[0].Size
	r.cfg.RetentionBytes = size - one + 1
	r.SetConfig(r.cfg)
	if res := r.retain(); len(res.Deleted) != 0 {
		t.Errorf("less than a segment too much: %+v", res)
	}
	r.cfg.RetentionBytes = size - one
	r.SetConfig(r.cfg)
	if res := r.retain(); len(res.Deleted) != 1 || res.Deleted[0].Base != 0 {
		t.Errorf("just a segment too much: %+v", res)
	}
	next := r.Sealed()[0].Base
	r.want(next, next, 10)
	if es := r.Epochs(); es[0].StartOffset != next {
		t.Errorf("epochs %v", es)
	}
	r.now -= 1000
	r.cfg.RetentionMs = 1
	r.SetConfig(r.cfg)
	if res := r.retain(); res.Blocking != nil {
		t.Errorf("records that came since the clock was read: %+v", res)
	}
	r.now -= 999_999
	if res := r.retain(); res.Blocking == nil || res.Blocking.Base != next {
		t.Errorf("records from the future: %+v", res)
	}
	r.cfg.Delete = false // they outlive nothing
	r.SetConfig(r.cfg)
	if res := r.retain(); res.Blocking != nil {
		t.Errorf("where time deletes nothing: %+v", res)
	}
}

func TestTieredRetention(t *testing.T) {
	tiered := func(c *Config) {
		c.Tiered, c.SegmentBytes, c.LocalRetentionMs, c.RetentionMs = true, 300, 1000, 100_000
	}
	r := newRig(t, tiered)
	for range 10 {
		r.add(1)
	}
	sealed := r.Sealed()
	r.now += 1001
	if res := r.retain(); len(res.Deleted) != 0 || !res.Rolled {
		t.Fatalf("nothing is uploaded: %+v", res)
	}
	if res := r.retain(); res.Rolled {
		t.Fatal("an empty segment was rolled")
	}
	r.SetRemoteEnd(sealed[1].End)
	if res := r.retain(); len(res.Deleted) != 2 {
		t.Fatalf("two are uploaded: %+v", res)
	}
	r.want(0, sealed[2].Base, 10)
	if es := r.Epochs(); es[0].StartOffset != 0 {
		t.Errorf("local retention trimmed the lineage: %v", es)
	}
	var oor *OffsetOutOfRangeError
	if _, err := r.Read(0, 1, 10, true); !errors.As(err, &oor) || oor.LogStart != 0 || oor.LocalLogStart != sealed[2].Base {
		t.Errorf("read of the remote tier: %v", err)
	}
	r.must(r.AdvanceLogStart(sealed[0].End + 1))
	r.want(sealed[0].End+1, sealed[2].Base, 10)
	r.CloseDirty()
	r.open(false, 0, 1)
	r.want(1, sealed[2].Base, 10)
	r.SetHighWatermark(10)
	r.now += 200_000
	r.retain()
	r.want(10, 10, 10) // past the total limit, uploaded or not
	copyOff := newRig(t, func(c *Config) { tiered(c); c.CopyDisabled = true })
	for range 10 {
		copyOff.add(1)
	}
	copyOff.SetRemoteEnd(copyOff.Sealed()[0].End)
	copyOff.now += 100_001
	copyOff.retain()
	copyOff.want(10, 10, 10)
}

func TestAdvanceLogStart(t *testing.T) {
	r := newRig(t, func(c *Config) { c.SegmentBytes = 300 })
	for range 9 {
		r.add(1)
	}
	r.SetHighWatermark(7)
	if err := r.AdvanceLogStart(8); !errors.Is(err, ErrOffsetOutOfRange) {
		t.Errorf("above the high watermark: %v", err)
	}
	r.must(r.AdvanceLogStart(5))
	r.must(r.AdvanceLogStart(3))
	r.want(5, 5, 9)
	if s := r.Sealed(); s[0].Base > 5 || s[0].End < 5 {
		t.Errorf("segments below the start stay, or too many went: %+v", s)
	}
	if f, ok, err := r.OffsetForTimestamp(0); err != nil || !ok || f.Offset != 5 {
		t.Errorf("time below the start: %+v, %v, %v", f, ok, err)
	}
	if e := r.Epochs(); e[0].StartOffset != 5 {
		t.Errorf("epochs %v", e)
	}
}

func TestTruncate(t *testing.T) {
	r := newRig(t, func(c *Config) { c.SegmentBytes = 300 })
	for i := range int32(9) {
		r.must(r.AssignEpoch(i, r.Offsets().End))
		_, err := r.AppendAsLeader(AppendRequest{Records: records(t, 2, r.now, func(b *recordbatch.Builder) { b.ProducerID, b.ProducerEpoch, b.BaseSequence = 9, 0, 2*i }), LeaderEpoch: i, Now: time.UnixMilli(r.now)})
		r.must(err)
	}
	r.must(r.Flush())
	r.must(r.TruncateTo(18))
	r.want(0, 0, 18)
	r.must(r.TruncateTo(7))
	r.want(0, 0, 6)
	if o := r.Offsets(); o.RecoveryPoint != 6 {
		t.Errorf("recovery point %+v", o)
	}
	if e := r.Epochs(); len(e) != 3 {
		t.Errorf("epochs %v", e)
	}
	if p := r.Producers(time.UnixMilli(r.now)); len(p) != 1 || p[0].LastSequence != 5 {
		t.Errorf("producers %+v", p)
	}
	r.add(1)
	r.must(r.TruncateTo(0))
	r.want(0, 0, 0)
	if len(r.Epochs()) != 0 || len(r.Producers(time.UnixMilli(r.now))) != 0 {
		t.Error("something is left")
	}
	r.add(2)
	r.must(r.AdvanceLogStart(2))
	r.must(r.Roll(time.UnixMilli(r.now)))
	r.add(2)
	r.must(r.TruncateFullyAndStartAt(100, 40, []leaderepoch.Entry{{Epoch: 0, StartOffset: 40}, {Epoch: 7, StartOffset: 90}}, producerstate.MarshalSnapshot([]producerstate.Entry{{ProducerID: 5, LastSequence: 1, LastOffset: 99, CoordinatorEpoch: -1, TxnFirstOffset: -1, Timestamp: r.now}})))
	r.want(40, 100, 100)
	if e, ok := r.EpochForOffset(95); !ok || e != 7 {
		t.Errorf("epoch of 95: %d, %v", e, ok)
	}
	r.add(1)
	r.must(r.TruncateTo(50))
	r.want(40, 50, 50)
	r.must(r.Close())
	r.cfg.Tiered = true
	r.open(true, 0, 40)
	r.want(40, 50, 50)
}

// TestRestartIsAtomic cuts the power at every operation of a restart: the log is then the old one or the new
// one, whole.
func TestRestartIsAtomic(t *testing.T) {
	snapshot := producerstate.MarshalSnapshot([]producerstate.Entry{{ProducerID: 5, Epoch: 2, LastSequence: 1, LastOffset: 99, CoordinatorEpoch: -1, TxnFirstOffset: -1, Timestamp: 1_000_000}})
	epochs := []leaderepoch.Entry{{Epoch: 0, StartOffset: 0}, {Epoch: 7, StartOffset: 90}}
	old, fresh := 0, 0
	for at := range 40 {
		for seed := range uint64(20) {
			r := newRig(t, func(c *Config) { c.SegmentBytes, c.Tiered = 300, true })
			for range 6 {
				r.add(1)
			}
			r.must(r.Flush())
			mem, _ := r.fs.FS.(*vfs.Mem)
			r.must(mem.SyncDir("/"))
			r.must(mem.SyncDir("/d"))
			var clone *vfs.Mem
			left := at
			r.fs.Before = func(vfs.Op, string) {
				if left == 0 {
					clone = mem.CrashClone(newRand(seed))
				}
				left--
			}
			r.must(r.TruncateFullyAndStartAt(100, 0, epochs, snapshot))
			r.fs.Before = nil
			if clone == nil {
				clone = mem.CrashClone(newRand(seed))
			}
			r.fs = vfs.NewFaulty(clone)
			r.open(false, 6, 0)
			switch o := r.Offsets(); o.End {
			case 6:
				old++
				if o.LocalLogStart != 0 || len(readRaw(t, r.Log, 0, 6, math.MaxInt32)) == 0 || len(r.Epochs()) != 1 {
					t.Fatalf("crash at %d: half of the old log: %+v %v", at, o, r.Epochs())
				}
			case 100:
				fresh++
				if p := r.Producers(time.UnixMilli(r.now)); o.LocalLogStart != 100 || !slices.Equal(r.Epochs(), epochs) || len(p) != 1 || p[0].ProducerID != 5 {
					t.Fatalf("crash at %d, seed %d: half of the new log: %+v %v %+v", at, seed, o, r.Epochs(), p)
				}
			default:
				t.Fatalf("crash at %d: %+v", at, o)
			}
		}
	}
	if old == 0 || fresh == 0 {
		t.Errorf("%d old, %d new", old, fresh)
	}
}

func TestUploadRanges(t *testing.T) {
	r := newRig(t, func(c *Config) { c.SegmentBytes, c.Tiered = 600, true })
	for i := range int32(9) {
		_, err := r.AppendAsLeader(AppendRequest{Records: records(t, 2, r.now+int64(i), func(b *recordbatch.Builder) {
			b.ProducerID, b.ProducerEpoch, b.BaseSequence, b.Transactional = 9, 0, 2*i, true
		}), LeaderEpoch: i / 2, Now: time.UnixMilli(r.now)})
		r.must(err)
	}
	_, err := r.AppendAsLeader(AppendRequest{Records: recordbatch.EndTxnMarker(recordbatch.Marker{ProducerID: 9}), LeaderEpoch: 4, Now: time.UnixMilli(r.now), Internal: true})
	r.must(err)
	r.must(r.Roll(time.UnixMilli(r.now)))
	sealed := r.Sealed()
	if u, err := r.UploadRange(0, sealed[0].End); u != nil || err != nil {
		t.Fatalf("a segment that is not stable: %+v, %v", u, err)
	}
	next := int64(0)
	for _, s := range sealed {
		u, err := r.UploadRange(next, 100)
		r.must(err)
		if u.Start != s.Base || u.End != s.End || u.Size != s.Size || u.MaxTimestamp != s.MaxTimestamp {
			t.Errorf("range %+v of %+v", u, s)
		}
		next = u.End + 1
		u.Close()
	}
	if u, err := r.UploadRange(next, 100); u != nil || err != nil {
		t.Errorf("past the sealed ones: %+v, %v", u, err)
	}
	last := sealed[len(sealed)-1]
	if u, err := r.UploadRange(last.Base, 100); err != nil || len(u.TxnIndex) != segment.TxnEntrySize {
		t.Errorf("transaction index: %v, %v", u, err)
	} else {
		u.Close()
	}
	// From the middle of a segment, with the snapshot lost.
	s := sealed[1]
	start := s.Base + 2
	r.must(r.fs.Remove(r.path(s.End+1, segment.SnapshotSuffix)))
	u, err := r.UploadRange(start, 100)
	r.must(err)
	defer u.Close()
	b := make([]byte, u.Size)
	if _, err := u.Log.ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	h, err := recordbatch.ParseHeader(b)
	if err != nil || h.BaseOffset != start || u.Epochs[0].StartOffset != start || u.Epochs[0].Epoch != h.LeaderEpoch {
		t.Errorf("range %+v begins with %+v, %v", u, h, err)
	}
	x := segment.NewOffsetIndex(start, u.OffsetIndex)
	at, err := x.Lookup(u.End)
	if err != nil || x.Check(u.End+1, u.Size) != nil {
		t.Errorf("offset index: %v, %v", err, x.Check(u.End+1, u.Size))
	}
	if h, err := recordbatch.ParseHeader(b[at.Position:]); err != nil || at.Position > 0 && h.LastOffset() != at.Offset {
		t.Errorf("entry %+v points at %+v, %v", at, h, err)
	}
	entries, err := producerstate.ParseSnapshot(u.ProducerSnapshot)
	if err != nil || len(entries) != 1 || entries[0].LastOffset != s.End || entries[0].TxnFirstOffset != 0 {
		t.Errorf("rebuilt snapshot: %+v, %v", entries, err)
	}
	if es, err := leaderepoch.Parse(u.LeaderEpochs); err != nil || es[0].StartOffset != 0 || es[len(es)-1].StartOffset > u.End {
		t.Errorf("lineage file: %v, %v", es, err)
	}
}

// rollsBehindProducer writes a batch of producer 5 and rolls behind it; its only trace in the active segment is the snapshot there. It returns
// the segment's base.
func (r *rig) rollsBehindProducer() int64 {
	r.t.Helper()
	raw := records(r.t, 2, r.now, func(b *recordbatch.Builder) { b.ProducerID, b.ProducerEpoch, b.BaseSequence = 5, 1, 0 })
	_, err := r.AppendAsLeader(AppendRequest{Records: raw, LeaderEpoch: 3, Now: time.UnixMilli(r.now)})
	r.must(err)
	for len(r.Sealed()) == 0 {
		r.add(1)
	}
	return r.Offsets().ActiveBase
}

// A power cut may take a snapshot whose segment it spares. What producers wrote must outlive the segments before it all the same.
func TestDeletedSegmentsLeaveTheirProducers(t *testing.T) {
	for _, lost := range []string{"gone", "torn"} {
		r := newRig(t, func(c *Config) { c.SegmentBytes = 400 })
		base := r.rollsBehindProducer()
		snapshot := r.path(base, segment.SnapshotSuffix)
		r.must(r.Close())
		if r.must(r.fs.Remove(snapshot)); lost == "torn" {
			r.must(writeSnapshot(r.fs, snapshot, make([]byte, 10), false))
		}
		r.open(false, base, 0)
		r.SetHighWatermark(math.MaxInt64)
		r.must(r.AdvanceLogStart(base))
		if o := r.Offsets(); o.LocalLogStart != base || len(r.Sealed()) > 0 {
			t.Fatalf("%s: %+v", lost, o)
		}
		r.open(false, base, base)
		if ps := r.Producers(time.UnixMilli(r.now)); len(ps) != 1 || ps[0].ProducerID != 5 || ps[0].LastSequence != 1 {
			t.Errorf("%s: producers %+v", lost, ps)
		}
	}
}

// A disk that fails while the log is closed must not take the only trace of producers whose segments are gone.
func TestCloseOnAFullDiskLeavesTheProducers(t *testing.T) {
	r := newRig(t, func(c *Config) { c.SegmentBytes = 400 })
	base := r.rollsBehindProducer()
	r.must(r.TruncateTo(base)) // whose snapshot is at the log's end
	r.SetHighWatermark(math.MaxInt64)
	r.must(r.AdvanceLogStart(base))
	if o := r.Offsets(); o.LocalLogStart != base || o.End != base {
		t.Fatalf("%+v", o)
	}
	r.fs.Inject(vfs.Fault{Op: vfs.OpWrite, Path: segment.SnapshotSuffix, Err: syscall.ENOSPC, Partial: 7})
	if err := r.Close(); !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	r.open(false, base, base)
	if ps := r.Producers(time.UnixMilli(r.now)); len(ps) != 1 || ps[0].ProducerID != 5 || ps[0].LastSequence != 1 {
		t.Errorf("producers %+v", ps)
	}
}

// A log start that moved, but for the lineage, is the one that readers and the last stable offset go by.
func TestLogStartMovesOnAFullDisk(t *testing.T) {
	r := newRig(t, nil)
	open := records(t, 1, r.now, func(b *recordbatch.Builder) {
		b.ProducerID, b.ProducerEpoch, b.BaseSequence, b.Transactional = 5, 1, 0, true
	})
	_, err := r.AppendAsLeader(AppendRequest{Records: open, LeaderEpoch: 2, Now: time.UnixMilli(r.now)})
	r.must(err)
	r.add(3) // in the next leader epoch
	r.fs.Inject(vfs.Fault{Op: vfs.OpWrite, Path: epochFile, Err: syscall.ENOSPC})
	if err := r.AdvanceLogStart(2); !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	if first, ok := r.FirstUnstable(4); !ok || first != r.Offsets().LogStart {
		t.Errorf("first unstable offset %d %v, log start %d", first, ok, r.Offsets().LogStart)
	}
}

func TestFullDiskAndFailedWrites(t *testing.T) {
	r := newRig(t, func(c *Config) { c.SegmentBytes = 400 })
	r.add(1)
	r.fs.Inject(vfs.Fault{Op: vfs.OpWrite, Path: ".log", Err: syscall.ENOSPC, Partial: 33})
	raw := records(t, 1, r.now, nil)
	if _, err := r.AppendAsLeader(AppendRequest{Records: bytes.Clone(raw), Now: time.UnixMilli(r.now)}); !errors.Is(err, syscall.ENOSPC) || errors.Is(err, ErrLogDead) {
		t.Fatalf("full disk: %v", err)
	}
	r.fs.Heal()
	if res := r.add(1); res.FirstOffset != 1 {
		t.Fatalf("after the disk has room again: %+v", res)
	}
	r.add(1)
	r.fs.Inject(vfs.Fault{Op: vfs.OpOpen, Path: "03.log", Err: syscall.ENOSPC})
	if _, err := r.AppendAsLeader(AppendRequest{Records: bytes.Clone(raw), Now: time.UnixMilli(r.now)}); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("full disk on a roll: %v", err)
	}
	r.fs.Heal()
	r.add(1)
	r.want(0, 0, 4)
	r.must(r.Flush())
	r.fs.Inject(vfs.Fault{Op: vfs.OpWrite, Path: ".log", Err: syscall.ENOSPC, Partial: 33})
	r.fs.Inject(vfs.Fault{Op: vfs.OpTruncate, Err: syscall.EIO})
	if _, err := r.AppendAsLeader(AppendRequest{Records: bytes.Clone(raw), Now: time.UnixMilli(r.now)}); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("full disk: %v", err)
	}
	r.fs.Heal()
	if _, err := r.AppendAsLeader(AppendRequest{Records: bytes.Clone(raw), Now: time.UnixMilli(r.now)}); !errors.Is(err, ErrLogDead) || !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("a log that could not be restored: %v", err)
	}
	if len(readRaw(t, r.Log, 0, 4, math.MaxInt32)) == 0 {
		t.Error("a dead log must still be read")
	}
	r.CloseDirty()
	r.open(false, 4, 0)
	if rep := r.Recovery(); rep.TornBytes != 33 || rep.Cause == nil {
		t.Errorf("recovery %+v", rep)
	}
	r.want(0, 0, 4)
	r.add(1)
	for _, f := range []vfs.Fault{{Op: vfs.OpSync, Path: ".log", Err: syscall.EIO}, {Op: vfs.OpWrite, Path: ".log", Err: syscall.EIO}} {
		r.fs.Inject(f)
		_, err := r.AppendAsLeader(AppendRequest{Records: bytes.Clone(raw), Now: time.UnixMilli(r.now)})
		if err == nil {
			err = r.Flush()
		}
		if !errors.Is(err, syscall.EIO) {
			t.Fatalf("%s: %v", f.Op, err)
		}
		r.fs.Heal()
		if err := r.Flush(); !errors.Is(err, ErrLogDead) || !errors.Is(err, syscall.EIO) {
			t.Errorf("flush after a failed %s: %v", f.Op, err)
		}
		if err := r.TruncateTo(0); !errors.Is(err, ErrLogDead) {
			t.Errorf("truncate after a failed %s: %v", f.Op, err)
		}
		r.CloseDirty()
		r.open(false, 4, 0)
	}
}

// TestDamageBelowTheRecoveryPoint: nothing is cut away that was once durable, and the failed open changes nothing.
func TestDamageBelowTheRecoveryPoint(t *testing.T) {
	r := newRig(t, nil)
	for range 5 {
		r.add(1)
	}
	r.must(r.Flush())
	r.CloseDirty()
	path := r.path(0, segment.LogSuffix)
	good, err := vfs.ReadFile(r.fs, path, 1<<20)
	r.must(err)
	bad := bytes.Clone(good)
	bad[len(bad)/2] ^= 1
	r.must(vfs.WriteFile(r.fs, path, bad))
	var corrupt *CorruptError
	changed := false
	r.fs.Before = func(op vfs.Op, name string) { changed = changed || op != vfs.OpOpen }
	if _, err := Open(r.options(false, 5, 0)); !errors.As(err, &corrupt) || corrupt.File != path || corrupt.Position <= 0 {
		t.Errorf("got %v", err)
	}
	r.fs.Before = nil
	if changed {
		t.Error("the failed open changed something")
	}
	r.open(false, 2, 0) // the same damage above the recovery point is a torn tail
	r.want(0, 0, 2)
	if rep := r.Recovery(); rep.TornBytes == 0 || rep.Clean {
		t.Errorf("recovery %+v", rep)
	}
}

// TestDamagedIndexes damages each index in the ways that a power cut does: the answers stay the same.
func TestDamagedIndexes(t *testing.T) {
	for _, suffix := range []string{segment.OffsetIndexSuffix, segment.TimeIndexSuffix, segment.TxnIndexSuffix, segment.SnapshotSuffix} {
		for how, data := range map[string][]byte{"empty": {}, "odd": make([]byte, 7), "zeros": make([]byte, 8*12*340), "removed": nil, "beyond": bytes.Repeat([]byte{0x7f}, 8*12)} {
			if suffix == segment.TxnIndexSuffix && (how == "empty" || how == "removed") {
				continue // a segment without aborted transactions looks so
			}
			r := newRig(t, func(c *Config) { c.SegmentBytes = 700 })
			for i := range int32(20) {
				r.now += 10
				_, err := r.AppendAsLeader(AppendRequest{Records: records(t, 1, r.now, func(b *recordbatch.Builder) {
					b.ProducerID, b.ProducerEpoch, b.BaseSequence, b.Transactional = 9, int16(i), 0, true
				}), Now: time.UnixMilli(r.now)})
				r.must(err)
				_, err = r.AppendAsLeader(AppendRequest{Records: recordbatch.EndTxnMarker(recordbatch.Marker{ProducerID: 9, ProducerEpoch: int16(i) + 1, Timestamp: r.now}), Now: time.UnixMilli(r.now), Internal: true})
				r.must(err)
			}
			r.must(r.Flush())
			answers := func() []any {
				var out []any
				for ts := r.now - 300; ts < r.now+20; ts += 5 {
					f, ok, err := r.OffsetForTimestamp(ts)
					out = append(out, f, ok, err)
				}
				aborted, err := r.AbortedTransactions(0, 40)
				out = append(out, len(aborted), err, len(r.Producers(time.UnixMilli(r.now))))
				for o := range int64(40) {
					v, err := r.Read(o, 1, 40, true)
					r.must(err)
					out = append(out, v.FirstOffset, v.NextOffset)
					v.Release()
				}
				return out
			}
			before := answers()
			r.CloseDirty()
			for _, s := range r.Sealed() {
				path := r.path(s.Base, suffix)
				if _, err := r.fs.Stat(path); errors.Is(err, fs.ErrNotExist) {
					continue
				}
				if how == "removed" {
					r.must(r.fs.Remove(path))
				} else {
					r.must(vfs.WriteFile(r.fs, path, data))
				}
			}
			r.open(false, 40, 0)
			if after := answers(); !slices.Equal(before, after) {
				t.Errorf("%s %s: answers differ", how, suffix)
			}
			if rep := r.Recovery(); suffix != segment.SnapshotSuffix && rep.IndexesRebuilt == 0 {
				t.Errorf("%s %s: %+v", how, suffix, rep)
			}
			r.CloseDirty()
			r.open(false, 40, 0)
			if rep := r.Recovery(); rep.IndexesRebuilt != 0 {
				t.Errorf("%s %s: rebuilt a second time: %+v", how, suffix, rep)
			}
		}
	}
	r := newRig(t, func(c *Config) { c.SegmentBytes = 300 })
	for range 5 {
		r.add(1)
	}
	r.CloseDirty()
	path := r.path(0, segment.OffsetIndexSuffix)
	r.must(r.fs.Remove(path))
	r.must(r.fs.MkdirAll(path))
	var corrupt *CorruptError
	if _, err := Open(r.options(false, 0, 0)); !errors.As(err, &corrupt) || corrupt.File != path {
		t.Errorf("an index that is a folder: %v", err)
	}
}

// TestLargeBatchesNeedNoIndexEntry: a finished segment of one large batch has an empty offset index, and nothing is wrong with it.
func TestLargeBatchesNeedNoIndexEntry(t *testing.T) {
	r := newRig(t, func(c *Config) { c.SegmentBytes, c.IndexIntervalBytes = 4000, 1000 })
	r.add(50)
	r.add(1)
	r.add(50)
	r.add(50)
	if n := len(r.Sealed()); n < 2 {
		t.Fatalf("%d finished segments", n)
	}
	for _, clean := range []bool{true, false} {
		r.must(r.Close())
		r.open(clean, 0, 0)
		if rep := r.Recovery(); rep.IndexesRebuilt != 0 {
			t.Errorf("clean %v: %+v", clean, rep)
		}
	}
	// A segment of small batches that lost its entries is mended still.
	r = newRig(t, func(c *Config) { c.SegmentBytes, c.IndexIntervalBytes = 4000, 1000 })
	for range 60 {
		r.add(1)
	}
	r.must(r.Close())
	r.must(vfs.WriteFile(r.fs, r.path(0, segment.OffsetIndexSuffix), nil))
	r.open(true, 0, 0)
	if rep := r.Recovery(); rep.IndexesRebuilt != 1 {
		t.Errorf("lost entries: %+v", rep)
	}
}

func TestWrongTopicID(t *testing.T) {
	r := newRig(t, nil)
	r.must(r.Close())
	o := r.options(true, 0, 0)
	o.TopicID = tp.UUID{2}
	var corrupt *CorruptError
	if _, err := Open(o); !errors.As(err, &corrupt) {
		t.Errorf("got %v", err)
	}
	o.TopicID = tp.UUID{}
	l, err := Open(o)
	if err != nil || l.TopicID() != (tp.UUID{1}) {
		t.Errorf("got %v, %v", l, err)
	}
}

func TestClosedAndDeleted(t *testing.T) {
	r := newRig(t, nil)
	r.add(1)
	view, err := r.Read(0, 1000, 1, true)
	r.must(err)
	r.must(r.Close())
	r.must(r.Close())
	if _, err := r.AppendAsLeader(AppendRequest{Records: records(t, 1, r.now, nil), Now: time.UnixMilli(r.now)}); !errors.Is(err, ErrClosed) {
		t.Errorf("append after close: %v", err)
	}
	dir, err := r.Delete()
	if _, serr := r.fs.Stat(dir); err != nil || serr != nil {
		t.Fatalf("delete: %s, %v, %v", dir, err, serr)
	}
	if b, err := view.AppendTo(nil); err != nil || len(b) == 0 {
		t.Errorf("view of a deleted log: %v", err)
	}
	view.Release()
	r.open(false, 0, 0)
	r.add(1)
	other, err := r.Delete()
	if err != nil || other == dir {
		t.Errorf("second delete: %s, %v", other, err)
	}
}

func TestFlushPolicy(t *testing.T) {
	r := newRig(t, func(c *Config) { c.FlushMessages = 3 })
	for i, want := range []int64{0, 0, 3, 3} {
		r.add(1)
		if o := r.Offsets(); o.RecoveryPoint != want {
			t.Errorf("after %d: %+v", i+1, o)
		}
	}
	r = newRig(t, func(c *Config) { c.FlushMs = 100 })
	r.add(1)
	r.now += 100
	r.add(1)
	if o := r.Offsets(); o.RecoveryPoint != 2 {
		t.Errorf("after flush.ms: %+v", o)
	}
	r = newRig(t, func(c *Config) { c.SegmentBytes = 300 })
	for range 7 {
		r.add(1)
	}
	r.must(r.FlushUpTo(r.Offsets().ActiveBase))
	if o := r.Offsets(); o.RecoveryPoint != o.ActiveBase || o.ActiveBase == 0 {
		t.Errorf("sealed segments: %+v", o)
	}
}
