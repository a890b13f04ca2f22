package partition_test

import (
	"syscall"
	"testing"

	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

// What is in neither tier is gone, and the log starts behind it: a process that ended between deleting segments and
// noting the log start down begins with one that lies too low.
func TestSetRemoteSkipsWhatIsNowhere(t *testing.T) {
	finished := func(start, end int64) *tier.Segment {
		return &tier.Segment{ID: tp.UUID{byte(end)}, Start: start, End: end, State: tier.CopyFinished}
	}
	deleting := finished(0, 9)
	deleting.State = tier.DeleteStarted
	for _, c := range []struct {
		remote      tier.Segments
		start, want int64
	}{
		{nil, 0, 20},
		{tier.Segments{finished(0, 9), finished(10, 19)}, 0, 0},
		{tier.Segments{finished(0, 9), finished(10, 21)}, 3, 3},
		{tier.Segments{finished(5, 9), finished(10, 19)}, 0, 5},
		{tier.Segments{finished(0, 9)}, 0, 20},
		{tier.Segments{deleting, finished(10, 19)}, 0, 10},
		{tier.Segments{finished(10, 19)}, 15, 15},
	} {
		p := follows(t)
		if err := p.Restart(4, 20, c.start, nil, nil); err != nil {
			t.Fatal(err)
		}
		if err := p.SetRemote(c.remote, 0); err != nil {
			t.Fatal(err)
		}
		if o := p.Log().Offsets(); o.LogStart != c.want {
			t.Errorf("%+v from %d: log start %d, want %d", c.remote, c.start, o.LogStart, c.want)
		}
	}
}

// The tier never grows at its front, so that what a replica has below it would be lost with local retention, and its log
// start would lead nowhere. A leader that made the tier had deleted it.
func TestTheLogStartsNoLowerThanTheTier(t *testing.T) {
	p := led(t)
	for range 5 {
		add(t, p, 2)
	}
	if err := p.SetRemote(tier.Segments{{ID: tp.UUID{1}, Start: 4, End: 5, State: tier.CopyFinished}}, 0); err != nil {
		t.Fatal(err)
	}
	if o := p.Log().Offsets(); o.LogStart != 4 {
		t.Fatalf("%+v", o)
	}
}

// A leader whose log is empty and has no lineage answers for the epochs before its own: nothing diverges. Else a follower
// that has one would ask for ever.
func TestEndOfAnEpochBeforeAnEmptyLog(t *testing.T) {
	p := partition.New(id, topic, self, openLog(t, vfs.NewMem()), 0, partition.Hooks{})
	p.Assume(alone(2, 4), start)
	if err := p.Restart(4, 12, 12, nil, nil); err != nil {
		t.Fatal(err)
	}
	p.Assume(alone(self, 5), start)
	for _, epoch := range []int32{3, 4} {
		if e, end := p.EndOffsetForEpoch(epoch); e != epoch || end != 12 {
			t.Errorf("epoch %d: %d, %d", epoch, e, end)
		}
	}
	add(t, p, 1)
	if e, end := p.EndOffsetForEpoch(4); e != 4 || end != 12 {
		t.Errorf("with records: %d, %d", e, end)
	}
	if e, end := p.EndOffsetForEpoch(6); e != -1 || end != -1 {
		t.Errorf("an epoch to come: %d, %d", e, end)
	}
}

// A follower that was cut to where its leader's log starts, inside a batch, begins with that batch: what it has below is deleted.
func TestALogOfDeletedRecordsBeginsInsideABatch(t *testing.T) {
	for _, c := range []struct {
		logStart int64
		ok       bool
	}{{2, true}, {1, false}} {
		p := follows(t)
		if _, err := p.TakeFetched(partition.Fetched{LeaderEpoch: 4, Offset: 0, Records: from(t, 0, 3), HighWatermark: 0, Now: start}); err != nil {
			t.Fatal(err)
		}
		restarted, err := p.TakeFetched(partition.Fetched{LeaderEpoch: 4, Offset: 2, Records: from(t, 1, 4), HighWatermark: 3, LogStart: c.logStart, Now: start})
		if restarted != c.ok || (err == nil) != c.ok {
			t.Errorf("log start %d: restarted %v, %v", c.logStart, restarted, err)
		}
		if o := p.Log().Offsets(); c.ok && (o.LogStart != 2 || o.LocalLogStart != 2 || o.End != 3) {
			t.Errorf("%+v", o)
		}
	}
}

// When a log has begun anew inside a batch and that cannot be appended, the high watermark is not above the log's end.
func TestHighWatermarkFallsWithALogThatBeginsInsideABatch(t *testing.T) {
	fs := vfs.NewFaulty(vfs.NewMem())
	p := partition.New(id, topic, self, openLog(t, fs), 0, partition.Hooks{})
	p.Assume(partition.Role{Leader: 2, LeaderEpoch: 4, Replicas: []int32{1, 2}, ISR: []int32{1, 2}}, start)
	if err := p.Restart(4, 3, 3, nil, nil); err != nil {
		t.Fatal(err)
	}
	fs.Inject(vfs.Fault{Op: vfs.OpWrite, Path: "00002.log", Nth: 2, Err: syscall.EIO})
	if _, err := p.TakeFetched(partition.Fetched{LeaderEpoch: 4, Offset: 3, Records: from(t, 2, 4, 4), HighWatermark: 6, LogStart: 3, Now: start}); err == nil {
		t.Fatal("the disk did not fail")
	}
	if o := p.Log().Offsets(); o.End != 2 || p.HighWatermark() > o.End {
		t.Fatalf("%+v, high watermark %d", o, p.HighWatermark())
	}
}
