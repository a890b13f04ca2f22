package log

import (
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/vfs"
)

// An append of several epochs that fails and is tried again leaves the lineage that it would have had at once.
func TestEpochsOfAnAppendThatIsTriedAgain(t *testing.T) {
	leader := newRig(t, nil)
	for _, epoch := range []int32{2, 2, 6} {
		_, err := leader.AppendAsLeader(AppendRequest{Records: records(t, 1, leader.now, nil), LeaderEpoch: epoch, Now: time.UnixMilli(leader.now)})
		leader.must(err)
	}
	v, err := leader.Read(1, 1<<20, 3, true)
	leader.must(err)
	defer v.Release()
	raw, err := v.AppendTo(nil)
	leader.must(err)
	r := newRig(t, nil)
	_, err = r.AppendAsLeader(AppendRequest{Records: records(t, 1, r.now, nil), LeaderEpoch: 2, Now: time.UnixMilli(r.now)})
	r.must(err)
	r.fs.Inject(vfs.Fault{Op: vfs.OpWrite, Path: ".log", Err: syscall.ENOSPC})
	if _, err := r.AppendAsFollower(raw, 6, time.UnixMilli(r.now)); err == nil {
		t.Fatal("the disk did not fail")
	}
	_, err = r.AppendAsFollower(raw, 6, time.UnixMilli(r.now))
	r.must(err)
	if got, want := r.Epochs(), leader.Epochs(); !slices.Equal(got, want) {
		t.Fatalf("lineage %v, want %v", got, want)
	}
}

// A full disk in the middle of a truncation must not leave records whose epoch the log does not know.
func TestTruncationOnAFullDisk(t *testing.T) {
	r := newRig(t, nil)
	for range 4 {
		r.add(1)
	}
	r.fs.Inject(vfs.Fault{Op: vfs.OpWrite, Path: epochFile, Err: syscall.ENOSPC})
	err := r.TruncateTo(0)
	if e, ok := r.LatestEpoch(); r.Offsets().End > 0 && (!ok || e.Epoch != 3) {
		t.Fatalf("%v: %+v with lineage %v", err, r.Offsets(), r.Epochs())
	}
	r.add(1)
	r.must(r.Flush())
	r.CloseDirty()
	r.open(false, 1, 0)
	if e := r.Epochs(); r.Offsets().End != 1 || len(e) != 1 || e[0].Epoch != 3 {
		t.Fatalf("%+v with lineage %v", r.Offsets(), e)
	}
}
