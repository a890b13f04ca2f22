package controller

import (
	"math"
	"slices"
	"testing"

	"github.com/varve-io/varve/internal/tp"
)

func TestSessions(t *testing.T) {
	w := newCluster(t, "", "", "")
	s := NewSessions(9000, 3000)
	silent := func(now int64, want ...int32) {
		t.Helper()
		if got := s.Silent(w.img, now); !slices.Equal(got, want) {
			t.Fatalf("at %d: %v, want %v", now, got, want)
		}
	}
	if s.Next(0) != math.MaxInt64 || s.Alive(1, 0) {
		t.Fatal("an empty table knows something")
	}
	s.Begin(w.img, 10_000, map[int32]int64{2: 4000, 9: 1})
	if s.Next(10_000) != 13_000 || !s.Alive(1, 18_999) || s.Alive(1, 19_000) || s.Alive(9, 1) {
		t.Fatal(s.Next(10_000))
	}
	silent(12_999)
	silent(13_000, 2)
	silent(19_000, 1, 2, 3)

	s.Touch(1, 1, 12_000)
	s.Touch(1, 0, 90_000) // an earlier run
	silent(20_999, 2, 3)
	silent(21_000, 1, 2, 3)

	// A broken connection shortens a session, and never makes it longer; a heartbeat over another one restores it.
	s.Touch(1, 1, 30_000)
	s.Touch(2, 2, 30_000)
	s.Touch(3, 3, 30_000)
	s.Disconnected(1, 31_000)
	s.Disconnected(2, 37_000)
	s.Disconnected(3, 31_000)
	s.Disconnected(77, 31_000)
	s.Touch(3, 3, 32_000)
	if s.Next(32_000) != 34_000 {
		t.Fatal(s.Next(32_000))
	}
	silent(33_999)
	silent(34_000, 1)
	silent(39_000, 1, 2)
	silent(41_000, 1, 2, 3)

	// A run that this controller never heard of gets a session from now on.
	w.up(2, 2, "")
	silent(50_000, 1, 3)
	silent(58_999, 1, 3)
	silent(59_000, 1, 2, 3)
	w.run(TickCommand{Silent: []int32{1, 3}})
	silent(59_000, 2)

	p := PartitionRef{tp.UUID{1}, 3}
	s.SetThin(2, []PartitionRef{p})
	s.SetThin(77, []PartitionRef{p})
	if !s.Thin(2, p) || s.Thin(2, PartitionRef{p.Topic, 4}) || s.Thin(1, p) || s.Thin(77, p) {
		t.Fatal("thin")
	}
	s.Touch(2, 4, 60_000)
	if !s.Thin(2, p) {
		t.Fatal("a heartbeat lost the list")
	}
	s.SetThin(2, nil)
	if s.Thin(2, p) {
		t.Fatal("thin for ever")
	}
	w.run(UnregisterCommand{Broker: 3, Force: true})
	silent(60_000)
	if len(s.brokers) != 2 {
		t.Fatal("a broker that is gone is kept", s.brokers)
	}
}
