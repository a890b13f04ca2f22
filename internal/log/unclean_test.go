package log

import (
	"math"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/vfs"
)

// A process is killed, its successor flushes, and then the power is cut: what the first one made by name alone must be
// there, for the second one told that it is.
func TestPowerCutAfterAKill(t *testing.T) {
	for seed := range uint64(60) {
		r := newRig(t, func(c *Config) { c.SegmentBytes = 400 })
		r.must(r.fs.SyncDir("/"))
		for range 9 {
			r.add(1)
		}
		end := r.Offsets().End
		r.CloseDirty()
		r.open(false, 0, 0)
		r.must(r.Flush())
		if got := r.Offsets().RecoveryPoint; got != end {
			t.Fatalf("recovery point %d", got)
		}
		r.fs = vfs.NewFaulty(r.fs.FS.(*vfs.Mem).CrashClone(rand.New(rand.NewPCG(seed, 2))))
		l, err := Open(r.options(false, end, 0))
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		at := int64(0)
		for at < end {
			v, err := l.Read(at, math.MaxInt32, end, true)
			if err != nil || v.Size() == 0 || v.FirstOffset != at {
				t.Fatalf("seed %d: at offset %d of %d: %+v, %v", seed, at, end, v, err)
			}
			at = v.NextOffset
			v.Release()
		}
	}
}

// A log start inside of a segment says nothing of what is durable there.
func TestRecoveryPointBelowTheLogStart(t *testing.T) {
	r := newRig(t, nil)
	for range 4 {
		r.add(1)
	}
	r.must(r.AdvanceLogStart(3))
	r.CloseDirty()
	r.open(false, 0, 3)
	if o := r.Offsets(); o.LogStart != 3 || o.RecoveryPoint != 0 {
		t.Fatalf("%+v", o)
	}
}

// Where the lineage could not be written the append fails, and the next one writes it: records whose epoch no file tells
// would be found out only after a restart.
func TestEpochsAreWrittenAfterAFailure(t *testing.T) {
	r := newRig(t, nil)
	r.fs.Inject(vfs.Fault{Op: vfs.OpWrite, Path: epochFile, Err: syscall.ENOSPC})
	raw := func() []byte { return records(t, 1, r.now, nil) }
	if _, err := r.AppendAsLeader(AppendRequest{Records: raw(), LeaderEpoch: 3, Now: time.UnixMilli(r.now)}); err == nil {
		t.Fatal("the disk did not fail")
	}
	for range 2 {
		r.add(1)
	}
	r.must(r.Flush())
	r.CloseDirty()
	r.open(false, 2, 0)
	if e := r.Epochs(); len(e) != 1 || e[0].Epoch != 3 || e[0].StartOffset != 0 {
		t.Fatalf("lineage %v", e)
	}
}

// The lineage's file follows a log start at once. A process that ends before the log start is noted down forgets that it moved:
// the records that come back have their epochs in their headers.
func TestLineageOfRecordsThatComeBack(t *testing.T) {
	r := newRig(t, func(c *Config) { c.SegmentBytes = 400 })
	for epoch := range int32(6) {
		for range 2 {
			_, err := r.AppendAsLeader(AppendRequest{Records: records(t, 1, r.now, nil), LeaderEpoch: epoch, Now: time.UnixMilli(r.now)})
			r.must(err)
		}
	}
	r.SetHighWatermark(math.MaxInt64)
	want := r.Epochs()
	r.must(r.AdvanceLogStart(9))
	if got := r.Epochs(); len(got) >= len(want) {
		t.Fatal(got)
	}
	r.CloseDirty()
	r.open(false, 0, 0)
	first := r.Offsets().LocalLogStart
	got := r.Epochs()
	if len(got) == 0 || got[0].StartOffset != first || r.Offsets().LogStart != first {
		t.Fatalf("%v, local log start %d", got, first)
	}
	for _, e := range got[1:] {
		if !slices.Contains(want, e) {
			t.Errorf("%v is not in %v", e, want)
		}
	}
	if e, ok := r.EpochForOffset(first); !ok || e != want[first/2].Epoch {
		t.Errorf("epoch of offset %d is %d", first, e)
	}
}
