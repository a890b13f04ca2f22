package partition_test

import (
	"errors"
	"math"
	"syscall"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

const self = 1

var (
	id    = tp.Partition{Topic: "t"}
	topic = tp.UUID{7}
	start = time.UnixMilli(1_000_000)
)

func openLog(t *testing.T, fs vfs.FS) *log.Log {
	t.Helper()
	if err := fs.MkdirAll("/d"); err != nil {
		t.Fatal(err)
	}
	c := log.DefaultConfig()
	c.SegmentBytes, c.Tiered = 400, true
	l, err := log.Open(log.Options{FS: fs, Dir: "/d/t-0", Partition: id, TopicID: topic, Config: c, Now: start})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func batch(t *testing.T, n int, change func(*recordbatch.Builder)) []byte {
	t.Helper()
	b := recordbatch.NewBuilder()
	if change != nil {
		change(b)
	}
	for range n {
		b.Add(recordbatch.Record{Timestamp: start.UnixMilli(), Value: make([]byte, 50)})
	}
	out, err := b.Build()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func led(t *testing.T) *partition.Partition {
	t.Helper()
	p := partition.New(id, topic, self, openLog(t, vfs.NewMem()), 0, partition.Hooks{})
	p.Assume(alone(self, 3), start)
	return p
}

// alone is the role of a partition whose only replica is leader.
func alone(leader, epoch int32) partition.Role {
	return partition.Role{Leader: leader, LeaderEpoch: epoch, Replicas: []int32{leader}, ISR: []int32{leader}}
}

func add(t *testing.T, p *partition.Partition, n int) {
	t.Helper()
	if _, err := p.Append(partition.Write{Records: batch(t, n, nil), Now: start}); err != nil {
		t.Fatal(err)
	}
}

func signalled(w *partition.Waiter) bool {
	select {
	case <-w.C:
		return true
	default:
		return false
	}
}

func TestRolesAndEpochs(t *testing.T) {
	p := partition.New(id, topic, self, openLog(t, vfs.NewMem()), 0, partition.Hooks{})
	if _, err := p.Append(partition.Write{Records: batch(t, 1, nil), Now: start}); !errors.Is(err, partition.ErrNotLeader) {
		t.Errorf("before a leader is known: %v", err)
	}
	p.Assume(alone(self, 3), start)
	add(t, p, 4)
	p.Assume(alone(2, 3), start) // the epoch is not newer: nothing changes
	p.Assume(alone(2, 1), start)
	for epoch, want := range map[int32]error{-1: nil, 3: nil, 2: partition.ErrFencedEpoch, 0: partition.ErrFencedEpoch, 4: partition.ErrUnknownEpoch} {
		marks, err := p.Offsets(epoch)
		if !errors.Is(err, want) || err == nil && (marks.End != 4 || marks.HighWatermark != 4 || marks.LastStable != 4) || marks.Leader != self || marks.LeaderEpoch != 3 {
			t.Errorf("epoch %d: %+v %v", epoch, marks, err)
		}
	}
	p.Assume(alone(2, 5), start)
	if _, err := p.Append(partition.Write{Records: batch(t, 1, nil), Now: start}); !errors.Is(err, partition.ErrNotLeader) {
		t.Errorf("a deposed leader appended: %v", err)
	}
	if marks, err := p.Offsets(-1); !errors.Is(err, partition.ErrNotLeader) || marks.Leader != 2 || marks.LeaderEpoch != 5 {
		t.Errorf("%+v %v", marks, err)
	}
	if _, err := p.DeleteRecords(1); !errors.Is(err, partition.ErrNotLeader) {
		t.Errorf("%v", err)
	}
	p.Assume(alone(self, 6), start)
	add(t, p, 2)
	if l, e := p.Leadership(); l != self || e != 6 {
		t.Errorf("%d in %d", l, e)
	}
	for _, c := range []struct {
		epoch, got int32
		end        int64
	}{{3, 3, 4}, {5, 3, 4}, {6, 6, 6}, {7, -1, -1}, {1, 1, 0}} {
		if e, end := p.EndOffsetForEpoch(c.epoch); e != c.got || end != c.end {
			t.Errorf("epoch %d ends at %d in %d, want %+v", c.epoch, end, e, c)
		}
	}
	if epochs := p.Log().Epochs(); len(epochs) != 2 || epochs[0] != (leaderepoch.Entry{Epoch: 3}) || epochs[1] != (leaderepoch.Entry{Epoch: 6, StartOffset: 4}) {
		t.Errorf("%v", epochs)
	}
}

func TestLastStableIsBelowOpenTransactions(t *testing.T) {
	p := led(t)
	add(t, p, 3)
	if _, err := p.Append(partition.Write{Now: start, Records: batch(t, 2, func(b *recordbatch.Builder) {
		b.ProducerID, b.ProducerEpoch, b.BaseSequence, b.Transactional = 9, 0, 0, true
	})}); err != nil {
		t.Fatal(err)
	}
	if m, err := p.Offsets(-1); err != nil || m.HighWatermark != 5 || m.LastStable != 3 {
		t.Errorf("%+v %v", m, err)
	}
}

// Whoever watches hears of appends, of a change of leadership, of retirement, of failure and of the end, and of nothing after.
func TestWatchers(t *testing.T) {
	fs := vfs.NewFaulty(vfs.NewMem())
	p := partition.New(id, topic, self, openLog(t, fs), 0, partition.Hooks{})
	w, gone := partition.NewWaiter(), partition.NewWaiter()
	p.Watch(w, partition.Committed)
	p.Watch(gone, partition.Committed)
	p.Unwatch(gone, partition.Committed)
	for _, c := range []struct {
		name   string
		change func()
	}{
		{"lead", func() { p.Assume(alone(self, 3), start) }},
		{"append", func() { add(t, p, 1); add(t, p, 1) }},
		{"follow", func() { p.Assume(alone(2, 5), start) }},
		{"retire", p.Retire},
	} {
		c.change()
		if !signalled(w) || signalled(w) {
			t.Errorf("%s: not one signal", c.name)
		}
	}
	p.Assume(alone(self, 9), start)
	signalled(w)
	fs.Inject(vfs.Fault{Op: vfs.OpWrite, Err: syscall.EIO, Sticky: true})
	if _, err := p.Append(partition.Write{Records: batch(t, 1, nil), Now: start}); !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
	if _, err := p.Append(partition.Write{Records: batch(t, 1, nil), Now: start}); !errors.Is(err, log.ErrLogDead) {
		t.Fatal(err)
	}
	if !signalled(w) {
		t.Error("failure is not signalled")
	}
	if _, err := p.Offsets(-1); !errors.Is(err, partition.ErrOffline) || !errors.Is(err, syscall.EIO) || p.Cause() == nil {
		t.Errorf("%v", err)
	}
	p.Close()
	if !signalled(w) || signalled(gone) {
		t.Error("end")
	}
}

func TestRefusedAppendKeepsThePartitionOnline(t *testing.T) {
	p := led(t)
	w := partition.NewWaiter()
	p.Watch(w, partition.Committed)
	bad := batch(t, 1, nil)
	bad[len(bad)-1] ^= 1
	if _, err := p.Append(partition.Write{Records: bad, Now: start}); !errors.Is(err, recordbatch.ErrCorrupt) {
		t.Fatal(err)
	}
	if p.Cause() != nil || signalled(w) {
		t.Error("a bad batch is no failure of the partition")
	}
	add(t, p, 1)
}

func TestRollIsToldOnce(t *testing.T) {
	rolls := 0
	var p *partition.Partition
	p = partition.New(id, topic, self, openLog(t, vfs.NewMem()), 0, partition.Hooks{Rolled: func(q *partition.Partition) {
		if _, err := q.Offsets(-1); err != nil || q != p { // not under the lock
			t.Error(err)
		}
		rolls++
	}})
	p.Assume(alone(self, 3), start)
	for range 6 {
		add(t, p, 2)
	}
	if sealed := len(p.Log().Sealed()); sealed == 0 || rolls != sealed {
		t.Errorf("%d calls for %d sealed segments", rolls, sealed)
	}
}

func TestDeleteRecords(t *testing.T) {
	p := led(t)
	for range 5 {
		add(t, p, 2)
	}
	for _, c := range []struct {
		offset, start int64
		out           bool
	}{{-2, 0, true}, {11, 0, true}, {math.MaxInt64, 0, true}, {3, 3, false}, {1, 3, false}, {0, 3, false}, {7, 7, false}, {-1, 10, false}, {10, 10, false}} {
		got, err := p.DeleteRecords(c.offset)
		var out *log.OffsetOutOfRangeError
		if errors.As(err, &out) != c.out || !c.out && (err != nil || got != c.start) {
			t.Errorf("%+v: %d %v", c, got, err)
		}
		if m, err := p.Offsets(-1); err != nil || m.LogStart != c.start || m.End != 10 {
			t.Errorf("%+v: %+v %v", c, m, err)
		}
	}
}

func TestSetRemoteMovesTheLogStart(t *testing.T) {
	p := led(t)
	for range 5 {
		add(t, p, 2)
	}
	segs := tier.Segments{{ID: tp.UUID{1}, Start: 0, End: 3, State: tier.CopyFinished}}
	if err := p.SetRemote(segs, 2); err != nil {
		t.Fatal(err)
	}
	if m, err := p.Offsets(-1); err != nil || m.LogStart != 2 || m.RemoteEnd != 3 {
		t.Errorf("%+v %v", m, err)
	}
	if err := p.SetRemote(segs, 1); err != nil { // it never falls
		t.Fatal(err)
	}
	if err := p.SetRemote(nil, 100); err != nil { // nor does it pass what is committed
		t.Fatal(err)
	}
	if m, err := p.Offsets(-1); err != nil || m.LogStart != 10 || m.RemoteEnd != -1 || len(p.Remote()) != 0 {
		t.Errorf("%+v %v", m, err)
	}
}

func TestHighWatermarkIsClampedToTheLog(t *testing.T) {
	fs := vfs.NewMem()
	l := openLog(t, fs)
	p := partition.New(id, topic, self, l, 99, partition.Hooks{})
	if p.HighWatermark() != 0 {
		t.Errorf("%d in an empty log", p.HighWatermark())
	}
	p.Assume(alone(self, 1), start)
	add(t, p, 3)
	for hw, want := range map[int64]int64{-1: 0, 2: 2, 3: 3, 9: 3} {
		if got := partition.New(id, topic, self, l, hw, partition.Hooks{}).HighWatermark(); got != want {
			t.Errorf("%d becomes %d", hw, got)
		}
	}
}

func TestOffline(t *testing.T) {
	cause := errors.New("damaged")
	p := partition.Offline(id, topic, self, cause)
	p.Assume(alone(self, 3), start)
	w := partition.NewWaiter()
	p.Watch(w, partition.Committed)
	p.Unwatch(w, partition.Committed)
	if err := p.SetRemote(nil, 5); err != nil {
		t.Error(err)
	}
	_, appended := p.Append(partition.Write{Records: nil, Now: start})
	_, deleted := p.DeleteRecords(0)
	_, marks := p.Offsets(-1)
	for _, err := range []error{appended, deleted, marks} {
		if !errors.Is(err, partition.ErrOffline) || !errors.Is(err, cause) {
			t.Errorf("%v", err)
		}
	}
	if e, end := p.EndOffsetForEpoch(3); e != -1 || end != -1 || p.Log() != nil || p.Cause() != cause {
		t.Error(e, end)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}
