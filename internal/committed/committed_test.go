package committed

import (
	"slices"
	"testing"

	"github.com/varve-io/varve/internal/grouprecord"
)

func at(topic string) Partition { return Partition{Topic: topic} }

func offset(n int64) Offset {
	return Offset{Offset: n, LeaderEpoch: -1, CommittedAt: 1000, ExpiresAt: -1}
}

func TestExpiry(t *testing.T) {
	s := New("g")
	s.Set(at("a"), offset(1), 0)
	own := offset(1)
	own.ExpiresAt = 6000
	s.Set(at("own"), own, 1)
	none := func(string) bool { return false }
	for _, c := range []struct {
		since, now int64
		keep       func(string) bool
		want       []Partition
	}{
		{0, 1999, none, nil},
		{0, 2000, none, []Partition{at("a")}},
		{1500, 2000, none, nil},
		{1500, 2500, none, []Partition{at("a")}},
		{0, 6000, none, []Partition{at("a"), at("own")}},
		{0, 6000, func(topic string) bool { return topic == "a" }, []Partition{at("own")}},
	} {
		if got := s.Expired(1000, c.since, c.now, c.keep); !slices.Equal(got, c.want) {
			t.Errorf("since %d at %d: %v, want %v", c.since, c.now, got, c.want)
		}
	}
	s.SetPending(7, at("a"), offset(2), 2)
	if got := s.Expired(1000, 0, 9000, none); !slices.Equal(got, []Partition{at("own")}) {
		t.Error("an offset expires for which a transaction has another:", got)
	}
}

// A transaction's commits count from its end on, unless a later one came in between.
func TestTransactions(t *testing.T) {
	s := New("g")
	s.Set(at("a"), offset(1), 10)
	s.SetPending(7, at("a"), offset(2), 11)
	s.SetPending(7, at("b"), offset(3), 12)
	s.SetPending(8, at("a"), offset(4), 13)
	s.Set(at("a"), offset(5), 14)
	if !s.Unstable(at("b")) || s.Unstable(at("c")) || s.Empty() {
		t.Fatal("pending commits are unstable")
	}
	s.EndTxn(8, false)
	s.EndTxn(7, true)
	a, _ := s.Get(at("a"))
	b, ok := s.Get(at("b"))
	if a.Offset != 5 || !ok || b.Offset != 3 || s.Pending() {
		t.Fatal(a, b)
	}
	s.SetPending(9, at("c"), offset(1), 15)
	if all := s.AllTombstones(); len(all) != 3 || all[2].Partition != at("c") || all[2].Value != nil || all[2].Group != "g" {
		t.Fatal(all)
	}
	s.Forget(at("c"))
	s.EndTxn(9, true)
	if _, ok := s.Get(at("c")); ok {
		t.Fatal("a deleted offset came back")
	}
	if e := s.Commit(at("a"), offset(6)); e.Kind != grouprecord.KindOffset || e.Value.(*Offset).Offset != 6 {
		t.Fatal(e)
	}
}
