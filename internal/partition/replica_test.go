package partition_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

// at is a moment of the tests.
func at(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }

// of is a role of three replicas with broker 1 as leader.
func of(partitionEpoch int32, isr ...int32) partition.Role {
	return partition.Role{Leader: self, LeaderEpoch: 3, PartitionEpoch: partitionEpoch, Replicas: []int32{1, 2, 3}, ISR: isr, MinISR: 2}
}

type replicated struct {
	*partition.Partition
	t   *testing.T
	due int
}

func leads(t *testing.T, r partition.Role) *replicated {
	t.Helper()
	w := &replicated{t: t}
	w.Partition = partition.New(id, topic, self, openLog(t, vfs.NewMem()), 0, partition.Hooks{ISRDue: func(*partition.Partition) { w.due++ }})
	w.Assume(r, start)
	return w
}

func (w *replicated) write(n int, now time.Time) {
	w.t.Helper()
	if _, err := w.Append(partition.Write{Records: batch(w.t, n, nil), Now: now, AllReplicas: true}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *replicated) fetch(follower int32, offset int64, now time.Time) {
	w.t.Helper()
	if err := w.Followed(partition.FollowerFetch{Follower: follower, BrokerEpoch: int64(follower), LeaderEpoch: 3, Offset: offset, Now: now}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *replicated) high(want int64) {
	w.t.Helper()
	if got := w.HighWatermark(); got != want {
		w.t.Fatalf("high watermark is %d, want %d", got, want)
	}
}

const lagMax = 30 * time.Second

func (w *replicated) wants(now time.Time, isr string) partition.Proposal {
	w.t.Helper()
	o, ok := w.Propose(now, lagMax)
	got := "nothing"
	if ok {
		got = fmt.Sprint(o.ISR)
	}
	if got != isr {
		w.t.Fatalf("proposes %s, want %s", got, isr)
	}
	return o
}

func TestHighWatermarkIsWhatTheISRHas(t *testing.T) {
	w := leads(t, of(0, 1, 2, 3))
	w.write(4, start)
	w.high(0)
	w.fetch(2, 4, start)
	w.high(0) // 3 has nothing yet
	w.fetch(3, 2, start)
	w.high(2)
	if done, err := w.Await(3, 3); done || err != nil {
		t.Fatal(done, err)
	}
	w.fetch(3, 4, start)
	w.high(4)
	if done, err := w.Await(4, 3); !done || err != nil {
		t.Fatal(done, err)
	}
	// A fetch from a smaller offset, after the follower cut its log, does not lower it.
	w.fetch(3, 1, start)
	w.high(4)
}

func TestMinISR(t *testing.T) {
	w := leads(t, of(0, 1, 2))
	w.write(2, start)
	w.fetch(2, 2, start)
	w.high(2)
	w.Assume(of(1, 1), at(1))
	if _, err := w.Append(partition.Write{Records: batch(t, 1, nil), Now: at(1), AllReplicas: true}); !errors.Is(err, partition.ErrNotEnoughReplicas) {
		t.Fatal(err)
	}
	r, err := w.Append(partition.Write{Records: batch(t, 1, nil), Now: at(1)}) // acks=1 is taken, and not visible
	if err != nil {
		t.Fatal(err)
	}
	w.high(2)
	if done, err := w.Await(r.LastOffset+1, r.Epoch); done || err != nil {
		t.Fatal(done, err)
	}
	if err := w.LateWrite(); !errors.Is(err, partition.ErrNotEnoughAfterAppend) {
		t.Fatal(err)
	}
	w.Assume(of(2, 1, 2), at(2))
	w.high(2)
	w.fetch(2, 3, at(2))
	w.high(3)
	// More than there are replicas counts as all of them.
	one := leads(t, partition.Role{Leader: self, LeaderEpoch: 3, Replicas: []int32{1}, ISR: []int32{1}, MinISR: 2})
	one.write(1, start)
	one.high(1)
}

func TestShrink(t *testing.T) {
	w := leads(t, of(0, 1, 2, 3))
	w.write(2, start)
	w.fetch(2, 2, start)
	w.fetch(3, 2, start)
	w.wants(at(300), "nothing") // idle is not behind (KAFKA-19996)
	w.fetch(3, 2, at(300))
	w.write(1, at(300))
	w.fetch(2, 3, at(301))
	w.wants(at(329), "nothing")
	o := w.wants(at(331), "[1 2]")
	w.wants(at(331), "nothing") // one at a time
	w.high(2)                   // until the controller has decided
	w.Settle(o, partition.Accepted, at(331))
	w.high(2)
	w.Assume(of(1, 1, 2), at(331))
	w.high(3)
	if len(o.Epochs) != 2 || o.Epochs[0] != -1 || o.Epochs[1] != 2 || o.LeaderEpoch != 3 || o.PartitionEpoch != 0 {
		t.Fatalf("%+v", o)
	}
}

func TestANewLeaderGivesEverybodyTime(t *testing.T) {
	w := leads(t, of(0, 1, 2, 3))
	w.write(1, at(1))
	w.wants(at(29), "nothing")
	w.wants(at(31), "[1]")
}

func TestJoin(t *testing.T) {
	w := leads(t, of(0, 1, 2))
	for range 3 {
		w.write(2, start)
		w.fetch(2, w.Log().Offsets().End, start)
	}
	w.high(6)
	w.fetch(3, 0, at(1))
	w.wants(at(1), "nothing")
	w.fetch(3, 4, at(2))
	w.wants(at(2), "nothing")
	if w.due != 0 {
		t.Fatal("due before it is level")
	}
	w.fetch(3, 6, at(3))
	if w.due != 1 {
		t.Fatal("not due")
	}
	o := w.wants(at(3), "[1 2 3]")
	// From the proposal on it must have what is committed: it could be elected.
	w.write(1, at(3))
	w.fetch(2, 7, at(3))
	w.high(6)
	w.fetch(3, 7, at(3))
	w.high(7)
	w.Settle(o, partition.Accepted, at(3))
	w.Assume(of(1, 1, 2, 3), at(3))
	w.wants(at(4), "nothing")
}

// A follower that is nearly level under a stream of writes is waited for, but not for long.
func TestJoinUnderLoad(t *testing.T) {
	w := leads(t, partition.Role{Leader: self, LeaderEpoch: 3, Replicas: []int32{1, 2}, ISR: []int32{1}, MinISR: 1})
	w.write(4, start)
	w.high(4)
	w.fetch(2, 0, start)
	w.write(1, at(0.01))
	w.fetch(2, 4, at(0.02)) // all that there was at its last fetch
	w.write(1, at(0.03))
	w.high(5) // the new write waits for it
	w.wants(at(0.03), "nothing")
	w.fetch(2, 5, at(0.04))
	o := w.wants(at(0.04), "[1 2]")
	w.Settle(o, partition.Refused, at(0.05)) // its broker is fenced, perhaps
	w.high(6)
	w.fetch(2, 6, at(0.06))
	w.wants(at(0.06), "nothing") // not again at once
	w.fetch(2, 6, at(1.1))
	w.wants(at(1.1), "[1 2]")

	slow := leads(t, partition.Role{Leader: self, LeaderEpoch: 3, Replicas: []int32{1, 2}, ISR: []int32{1}, MinISR: 1})
	slow.write(4, start)
	slow.fetch(2, 0, start)
	slow.fetch(2, 4, start)
	slow.write(1, at(0.5))
	slow.write(1, at(1.5)) // it went silent: nobody waits
	slow.high(6)
}

// Whatever the answer to a proposal was, until the image has decided both ISRs count.
func TestUnknownOutcome(t *testing.T) {
	w := leads(t, of(0, 1, 2))
	w.fetch(3, 0, start)
	w.write(1, start)
	w.fetch(2, 1, start)
	w.fetch(3, 1, start)
	o := w.wants(start, "[1 2 3]")
	w.Settle(o, partition.Unknown, start)
	w.write(1, start)
	w.fetch(2, 2, start)
	w.high(1)
	w.fetch(3, 2, at(2))
	w.wants(at(2), "[1 2 3]") // asked again
	w.Settle(o, partition.Refused, at(2))
	w.Settle(partition.Proposal{LeaderEpoch: 2}, partition.Refused, at(2)) // of another life: ignored
	w.high(2)
}

// A proposal without an answer may have been accepted, and the next one be refused for that. Whoever it would bring in holds the high watermark
// until the image has a newer partition epoch, which the present ISR is proposed for.
func TestRefusalBehindAnUnknownOutcome(t *testing.T) {
	w := leads(t, of(0, 1, 2))
	w.fetch(3, 0, start)
	w.write(1, start)
	w.fetch(2, 1, start)
	w.fetch(3, 1, start)
	w.Settle(w.wants(start, "[1 2 3]"), partition.Unknown, start)
	w.write(1, start)
	w.fetch(2, 2, at(5))
	w.Settle(w.wants(at(5), "[1 2 3]"), partition.Refused, at(5))
	w.high(1)
	w.fetch(2, 2, at(8))
	w.high(1)
	w.Settle(w.wants(at(8), "[1 2]"), partition.Accepted, at(8))
	w.high(1)
	w.Assume(of(1, 1, 2), at(8))
	w.high(2)
	w.wants(at(9), "nothing")
}

func TestFollowedRefuses(t *testing.T) {
	w := leads(t, of(0, 1, 2))
	for _, c := range []struct {
		f    partition.FollowerFetch
		want error
	}{
		{partition.FollowerFetch{Follower: 4, LeaderEpoch: 3}, partition.ErrNotLeader},
		{partition.FollowerFetch{Follower: 1, LeaderEpoch: 3}, partition.ErrNotLeader},
		{partition.FollowerFetch{Follower: 2, LeaderEpoch: 2}, partition.ErrFencedEpoch},
		{partition.FollowerFetch{Follower: 2, LeaderEpoch: 4}, partition.ErrUnknownEpoch},
		{partition.FollowerFetch{Follower: 2, LeaderEpoch: 3, BrokerEpoch: 7}, nil},
		{partition.FollowerFetch{Follower: 2, LeaderEpoch: 3, BrokerEpoch: 6}, partition.ErrNotLeader}, // a run that is over (KIP-903)
	} {
		if err := w.Followed(c.f); !errors.Is(err, c.want) || c.want == nil && err != nil {
			t.Errorf("%+v: %v", c.f, err)
		}
	}
	w.Suspend(true)
	if err := w.Followed(partition.FollowerFetch{Follower: 2, LeaderEpoch: 3, BrokerEpoch: 7}); !errors.Is(err, partition.ErrNotLeader) {
		t.Error(err)
	}
	if _, err := w.Offsets(-1); !errors.Is(err, partition.ErrNotLeader) {
		t.Error(err)
	}
	w.Suspend(false)
	if _, err := w.Offsets(-1); err != nil {
		t.Error(err)
	}
}

func TestANewEpochBeginsAnew(t *testing.T) {
	w := leads(t, of(0, 1, 2, 3))
	w.write(3, start)
	w.fetch(2, 3, start)
	w.fetch(3, 3, start)
	again := of(1, 1, 2, 3)
	again.LeaderEpoch = 5
	w.Assume(again, at(1))
	if err := w.Followed(partition.FollowerFetch{Follower: 2, LeaderEpoch: 3, Offset: 3, Now: at(1)}); !errors.Is(err, partition.ErrFencedEpoch) {
		t.Fatal(err)
	}
	if _, err := w.Await(3, 3); !errors.Is(err, partition.ErrNotLeader) {
		t.Fatal(err)
	}
	// Epochs without records leave no entry, and still answer (KIP-279).
	for _, c := range [][3]int64{{3, 3, 3}, {4, 3, 3}, {5, 5, 3}, {6, -1, -1}, {2, 2, 0}} {
		if e, o := w.EndOffsetForEpoch(int32(c[0])); int64(e) != c[1] || o != c[2] {
			t.Errorf("epoch %d ends at %d of %d, want %d of %d", c[0], o, e, c[2], c[1])
		}
	}
	m, err := w.Offsets(-1)
	if err != nil || m.EpochStart != 3 {
		t.Fatal(m, err)
	}
}

// follows returns a replica on broker 1 that follows 2 in epoch 4.
func follows(t *testing.T) *partition.Partition {
	t.Helper()
	p := partition.New(id, topic, self, openLog(t, vfs.NewMem()), 0, partition.Hooks{})
	p.Assume(partition.Role{Leader: 2, LeaderEpoch: 4, Replicas: []int32{1, 2}, ISR: []int32{1, 2}}, start)
	return p
}

// from is what a leader has: batches of two records, written in the given epochs, from base on.
func from(t *testing.T, base int64, epochs ...int32) (out []byte) {
	t.Helper()
	fs := vfs.NewMem()
	p := partition.New(id, topic, 2, openLog(t, fs), 0, partition.Hooks{})
	if base > 0 {
		if err := p.Log().TruncateFullyAndStartAt(base, 0, nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, e := range epochs {
		p.Assume(alone(2, e), start)
		add(t, p, 2)
	}
	for at := base; at < p.Log().Offsets().End; {
		view, err := p.Log().Read(at, 1<<20, p.Log().Offsets().End, true)
		if err != nil {
			t.Fatal(err)
		}
		if out, err = view.AppendTo(out); err != nil {
			t.Fatal(err)
		}
		at = view.NextOffset
		view.Release()
	}
	return out
}

func TestTakeFetched(t *testing.T) {
	p := follows(t)
	take := func(epoch int32, offset int64, records []byte, high, logStart int64) error {
		_, err := p.TakeFetched(partition.Fetched{LeaderEpoch: epoch, Offset: offset, Records: records, HighWatermark: high, LogStart: logStart, Now: start})
		return err
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(take(4, 0, from(t, 0, 2, 4), 3, 0))
	if f, ok := p.Following(); !ok || f.End != 4 || f.LastEpoch != 4 || p.HighWatermark() != 3 {
		t.Fatalf("%+v %d", f, p.HighWatermark())
	}
	// An answer of another epoch, or to an older fetch, is never applied (KAFKA-18991).
	for _, c := range [][2]int64{{3, 4}, {5, 4}, {4, 0}, {4, 5}} {
		if err := take(int32(c[0]), c[1], from(t, c[1], 4), 9, 0); !errors.Is(err, partition.ErrFencedEpoch) {
			t.Errorf("epoch %d offset %d: %v", c[0], c[1], err)
		}
	}
	// Batches of a newer epoch than the fetch's stay out, with all behind them (KAFKA-18723).
	must(take(4, 4, from(t, 4, 4, 6, 6), 8, 0))
	if f, _ := p.Following(); f.End != 6 || p.HighWatermark() != 6 {
		t.Fatalf("%+v %d", f, p.HighWatermark())
	}
	// The leader's high watermark may lag behind what was heard before; its log start is followed as far as that.
	must(take(4, 6, nil, 2, 5))
	if o := p.Log().Offsets(); p.HighWatermark() != 6 || o.LogStart != 5 {
		t.Fatalf("%d %+v", p.HighWatermark(), o)
	}
	must(p.Truncate(4, 4))
	if f, _ := p.Following(); f.End != 4 || p.HighWatermark() != 4 {
		t.Fatalf("%+v %d", f, p.HighWatermark())
	}
	if err := p.Truncate(3, 0); !errors.Is(err, partition.ErrFencedEpoch) {
		t.Fatal(err)
	}
}

// The leader's log may start inside a batch: an empty log takes the whole batch.
func TestTakeFetchedFromInsideABatch(t *testing.T) {
	p := follows(t)
	if err := p.Restart(4, 3, 3, nil, nil); err != nil {
		t.Fatal(err)
	}
	restarted, err := p.TakeFetched(partition.Fetched{LeaderEpoch: 4, Offset: 3, Records: from(t, 2, 4, 4), HighWatermark: 6, LogStart: 3, Now: start})
	if o := p.Log().Offsets(); err != nil || !restarted || o.LogStart != 3 || o.End != 6 || p.HighWatermark() != 6 {
		t.Fatalf("%v %v %+v", restarted, err, o)
	}
	// One that does not hold the end is a gap or a repetition.
	if _, err := p.TakeFetched(partition.Fetched{LeaderEpoch: 4, Offset: 6, Records: from(t, 2, 4), HighWatermark: 6, Now: start}); err == nil {
		t.Fatal("a repeated batch was taken")
	}
}

func TestRestart(t *testing.T) {
	p := follows(t)
	epochs := []leaderepoch.Entry{{Epoch: 1, StartOffset: 0}, {Epoch: 3, StartOffset: 40}}
	if err := p.Restart(4, 100, 20, epochs, nil); err != nil {
		t.Fatal(err)
	}
	f, ok := p.Following()
	if o := p.Log().Offsets(); !ok || f.End != 100 || f.LastEpoch != 3 || o.LogStart != 20 || o.LocalLogStart != 100 || p.HighWatermark() != 100 || !f.Empty {
		t.Fatalf("%+v %+v", f, o)
	}
	if err := p.Restart(3, 7, 7, nil, nil); !errors.Is(err, partition.ErrFencedEpoch) {
		t.Fatal(err)
	}
	p.Assume(partition.Role{Leader: self, LeaderEpoch: 5, Replicas: []int32{1, 2}, ISR: []int32{1, 2}, PartitionEpoch: 1}, start)
	if err := p.Restart(5, 7, 7, nil, nil); !errors.Is(err, partition.ErrNotLeader) {
		t.Fatal(err)
	}
	if _, ok := p.Following(); ok {
		t.Fatal("a leader follows")
	}
}

// A leader that lacks what the tier holds serves nothing until its log continues behind that.
func TestHold(t *testing.T) {
	p := partition.New(id, topic, self, openLog(t, vfs.NewMem()), 0, partition.Hooks{})
	cause := errors.New("behind the tier")
	p.Hold(cause)
	p.Assume(alone(self, 3), start)
	if _, err := p.Append(partition.Write{Records: batch(t, 1, nil), Now: start}); !errors.Is(err, partition.ErrOffline) || !errors.Is(err, cause) {
		t.Fatal(err)
	}
	if err := p.Rebuild(50, 10, []leaderepoch.Entry{{Epoch: 1, StartOffset: 10}}, nil); err != nil {
		t.Fatal(err)
	}
	if p.Cause() == nil {
		t.Fatal("in service before it was resumed")
	}
	p.Resume(start)
	r, err := p.Append(partition.Write{Records: batch(t, 1, nil), Now: start})
	if err != nil || r.FirstOffset != 50 || p.HighWatermark() != 51 {
		t.Fatal(r, err)
	}
	if err := p.Rebuild(60, 10, nil, nil); err == nil {
		t.Fatal("a log in service was replaced")
	}
}

func TestReplicaOffsets(t *testing.T) {
	p := follows(t)
	if _, err := p.TakeFetched(partition.Fetched{LeaderEpoch: 4, Records: from(t, 0, 4, 4), HighWatermark: 2, Now: start}); err != nil {
		t.Fatal(err)
	}
	m, err := p.ReplicaOffsets(4)
	if err != nil || m.End != 4 || m.HighWatermark != 2 || m.LastStable != 2 || m.Leader != 2 {
		t.Fatalf("%+v %v", m, err)
	}
	if _, err := p.ReplicaOffsets(3); !errors.Is(err, partition.ErrFencedEpoch) {
		t.Fatal(err)
	}
	p.Assume(partition.Role{Leader: -1, LeaderEpoch: 5, Replicas: []int32{1, 2}, ISR: []int32{2}, PartitionEpoch: 1}, start)
	if _, err := p.ReplicaOffsets(tp.NoEpoch); !errors.Is(err, partition.ErrNotLeader) {
		t.Fatal(err)
	}
}

// Records are deleted where every follower that lives has deleted them (KIP-107).
func TestLowWatermark(t *testing.T) {
	w := leads(t, of(0, 1, 2, 3))
	w.write(3, start)
	w.write(3, start)
	everybody := func(int32) bool { return true }
	low := func(alive func(int32) bool, want int64) {
		t.Helper()
		if got, err := w.LowWatermark(alive); got != want || err != nil {
			t.Errorf("low watermark %d, %v, want %d", got, err, want)
		}
	}
	low(everybody, -1)
	low(func(int32) bool { return false }, 0)
	trim := func(follower int32, to int64) {
		t.Helper()
		if err := w.Followed(partition.FollowerFetch{Follower: follower, BrokerEpoch: int64(follower), LeaderEpoch: 3, Offset: 6, LogStart: to, LocalStart: 5, Now: start}); err != nil {
			t.Fatal(err)
		}
	}
	trim(2, 0)
	trim(3, 0)
	if _, err := w.DeleteRecords(4); err != nil {
		t.Fatal(err)
	}
	low(everybody, 0)
	waiter := partition.NewWaiter()
	w.Watch(waiter, partition.Trimmed)
	defer w.Unwatch(waiter, partition.Trimmed)
	signalled := func(want bool) {
		t.Helper()
		select {
		case <-waiter.C:
			if !want {
				t.Error("signalled")
			}
		default:
			if want {
				t.Error("not signalled")
			}
		}
	}
	trim(2, 4)
	signalled(true)
	low(everybody, 0)
	low(func(id int32) bool { return id != 3 }, 4)
	trim(2, 4)
	signalled(false)
	trim(3, 5)
	signalled(true)
	low(everybody, 4)
	r := of(0, 1, 2, 3)
	r.Leader, r.LeaderEpoch = 2, 4
	w.Assume(r, start)
	signalled(true)
	if _, err := w.LowWatermark(everybody); !errors.Is(err, partition.ErrNotLeader) {
		t.Errorf("of a follower: %v", err)
	}
}

// What the image has deleted goes when the high watermark allows it, not only with the next image.
func TestLogStartWaitsForTheHighWatermark(t *testing.T) {
	w := leads(t, of(0, 1, 2, 3))
	w.write(3, start)
	w.write(3, start)
	begins := func(want int64) {
		t.Helper()
		if got := w.Log().Offsets().LogStart; got != want {
			t.Errorf("log start %d, want %d", got, want)
		}
	}
	if err := w.SetRemote(nil, 4); err != nil {
		t.Fatal(err)
	}
	begins(0)
	w.fetch(2, 3, start)
	w.fetch(3, 3, start)
	w.high(3)
	begins(3)
	w.fetch(2, 6, start)
	w.fetch(3, 6, start)
	w.high(6)
	begins(4)
}

// A follower that does not say which run it is may be another one when its proposal is answered: it joins nothing.
func TestFollowerOfNoRunDoesNotJoin(t *testing.T) {
	r := of(0, 1, 2, 3)
	r.ISR = []int32{1, 2}
	w := leads(t, r)
	w.write(3, start)
	w.fetch(2, 3, start)
	if err := w.Followed(partition.FollowerFetch{Follower: 3, BrokerEpoch: -1, LeaderEpoch: 3, Offset: 3, Now: start}); err != nil {
		t.Fatal(err)
	}
	w.wants(start, "nothing")
	w.fetch(3, 3, start)
	w.wants(start, "[1 2 3]")
}
