package fetch

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tp"
)

// replicated makes a partition that broker 1 leads, with followers 2 and 3 in sync.
func (w *world) replicated(topic string) *partition.Partition {
	p := w.partition(topic, 0, smallSegment)
	p.Assume(partition.Role{Leader: 1, LeaderEpoch: 4, PartitionEpoch: 1, Replicas: []int32{1, 2, 3}, ISR: []int32{1, 2, 3}, MinISR: 1}, time.Now())
	return p
}

func (w *world) follow(id int32, offset int64, lastEpoch int32, topic string) []Result {
	return w.service.Fetch(w.t.Context(), &Request{MaxBytes: 1 << 20, Follower: &Follower{ID: id, Epoch: 1},
		Parts: []Part{{Topic: topic, Offset: offset, MaxBytes: 1 << 20, CurrentEpoch: 4, LastFetchedEpoch: lastEpoch}}})
}

func TestFollowersGetUncommittedDataAndCommitIt(t *testing.T) {
	w := newWorld(t)
	p := w.replicated("a")
	w.add(p, 2, nil)
	if p.HighWatermark() != 0 {
		t.Fatal("committed by one replica")
	}
	r := w.follow(2, 0, -1, "a")[0]
	if r.Err != nil || r.Size() == 0 || r.HighWatermark != 0 {
		t.Fatalf("%+v", r)
	}
	release([]Result{r})
	w.follow(2, 2, 4, "a")
	if p.HighWatermark() != 0 {
		t.Fatal("committed without the third")
	}
	w.follow(3, 2, 4, "a")
	if p.HighWatermark() != 2 {
		t.Fatal("high watermark is", p.HighWatermark())
	}
	if r := w.follow(4, 2, 4, "a")[0]; !errors.Is(r.Err, partition.ErrNotLeader) {
		t.Fatal(r.Err)
	}
}

// The order of a leader's answers to followers: out of range, divergence, moved to the tier, records. Only followers hear of the tier.
func TestFollowersAndTheTier(t *testing.T) {
	w := newWorld(t)
	p := w.tiered("a")
	o := p.Log().Offsets()
	p.Assume(partition.Role{Leader: 1, LeaderEpoch: 4, PartitionEpoch: 1, Replicas: []int32{1, 2}, ISR: []int32{1, 2}, MinISR: 1}, time.Now())
	for _, c := range []struct {
		offset int64
		last   int32
		err    error
		cut    bool
	}{
		{0, -1, ErrMovedToTier, false}, {o.LocalLogStart - 1, 3, ErrMovedToTier, false}, {o.LocalLogStart, 3, nil, false}, {o.End, 3, nil, false},
		{o.End + 1, -1, ErrOffsetOutOfRange, false}, {o.End + 1, 3, nil, true}, {o.End, 9, ErrOffsetOutOfRange, false},
	} {
		r := w.follow(2, c.offset, c.last, "a")[0]
		if !errors.Is(r.Err, c.err) || (r.Diverging != nil) != c.cut || c.err == nil && r.Err != nil {
			t.Errorf("offset %d after epoch %d: %v, diverging %v", c.offset, c.last, r.Err, r.Diverging)
		}
		if errors.Is(r.Err, ErrMovedToTier) && (r.LogStart != o.LogStart || r.HighWatermark != o.End) {
			t.Errorf("moved to the tier, log start %d, high watermark %d", r.LogStart, r.HighWatermark)
		}
		release([]Result{r})
	}
}

func TestFollowersServeConsumers(t *testing.T) {
	w := newWorld(t)
	p := w.partition("a", 3, 1<<20)
	end := p.Log().Offsets().End
	p.Assume(partition.Role{Leader: 2, LeaderEpoch: 4, PartitionEpoch: 1, Replicas: []int32{1, 2}, ISR: []int32{1, 2}}, time.Now())
	get := func(offset int64, any bool) Result {
		r := w.service.Fetch(t.Context(), &Request{MaxBytes: 1 << 20, AnyReplica: any, Parts: []Part{{Topic: "a", Offset: offset, MaxBytes: 1 << 20, CurrentEpoch: -1, LastFetchedEpoch: -1}}})[0]
		release([]Result{r})
		return r
	}
	if r := get(0, false); !errors.Is(r.Err, partition.ErrNotLeader) || r.Leader != 2 {
		t.Errorf("%+v", r)
	}
	if r := get(0, true); r.Err != nil || r.HighWatermark != end {
		t.Errorf("%+v", r)
	}
	if r := get(end+1, true); !errors.Is(r.Err, ErrNotAvailable) {
		t.Errorf("%+v", r)
	}
	// What it has beyond its leader's high watermark is not for consumers.
	if _, err := p.TakeFetched(partition.Fetched{LeaderEpoch: 4, Offset: end, HighWatermark: end, Now: time.Now()}); err != nil {
		t.Fatal(err)
	}
	if r := get(end, true); r.Err != nil || r.Size() != 0 || r.HighWatermark != end {
		t.Errorf("%+v", r)
	}
}

func TestConsumersAreSentToTheirRack(t *testing.T) {
	w := newWorld(t)
	p := w.replicated("a")
	w.add(p, 2, nil)
	racks := map[int32]string{1: "a", 2: "b", 3: "c"}
	w.service.Racks = func(id int32) string { return racks[id] }
	w.follow(2, 2, 4, "a")
	w.follow(3, 2, 4, "a")
	get := func(rack string, offset int64) *int32 {
		r := w.service.Fetch(t.Context(), &Request{MaxBytes: 1 << 20, AnyReplica: true, Rack: rack, Parts: []Part{{Topic: "a", Offset: offset, MaxBytes: 1 << 20, CurrentEpoch: -1, LastFetchedEpoch: -1}}})[0]
		release([]Result{r})
		if r.Preferred != nil && (r.Size() > 0 || r.Err != nil || r.HighWatermark != 2) {
			t.Errorf("%+v", r)
		}
		return r.Preferred
	}
	for rack, want := range map[string]int32{"a": -1, "b": 2, "c": 3, "d": -1, "": -1} {
		if got := get(rack, 0); want < 0 && got != nil || want >= 0 && (got == nil || *got != want) {
			t.Errorf("rack %q: %v, want %d", rack, got, want)
		}
	}
	// A replica that holds the offset in the tier only is no nearer, and one that is out of sync lags.
	if err := p.Followed(partition.FollowerFetch{Follower: 2, BrokerEpoch: 1, LeaderEpoch: 4, Offset: 2, LocalStart: 1, Now: time.Now()}); err != nil {
		t.Fatal(err)
	}
	p.Assume(partition.Role{Leader: 1, LeaderEpoch: 4, PartitionEpoch: 2, Replicas: []int32{1, 2, 3}, ISR: []int32{1, 2}, MinISR: 1}, time.Now())
	if get("b", 0) != nil || get("b", 1) == nil || get("c", 0) != nil {
		t.Error("sent to a thin or a lagging replica")
	}
}

func TestThrottledFollowers(t *testing.T) {
	w := newWorld(t)
	p := w.replicated("a")
	w.add(p, 2, nil)
	limit := rate.NewLimiter(1, 10)
	w.service.Throttle = func(tp.Partition, int32) *rate.Limiter { return limit }
	sizes := func(follower int32) (n int) {
		for range 3 {
			r := w.follow(follower, 0, -1, "a")
			if r[0].Size() > 0 {
				n++
			}
			release(r)
		}
		return n
	}
	if n := sizes(2); n != 3 {
		t.Error("one in sync is held back:", n)
	}
	p.Assume(partition.Role{Leader: 1, LeaderEpoch: 4, PartitionEpoch: 2, Replicas: []int32{1, 2, 3}, ISR: []int32{1, 2}, MinISR: 1}, time.Now())
	if n := sizes(3); n != 1 {
		t.Errorf("one out of sync got %d answers, want one that exceeds the rate", n)
	}
}
