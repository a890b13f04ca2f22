package main

import (
	"runtime"
	"testing"
)

func TestRoomForGarbage(t *testing.T) {
	const mb = 1 << 20
	for live, want := range map[uint64]int{0: 800, 4 * mb: 800, 8 * mb: 400, 32 * mb: 100, 64 * mb: 50, 4096 * mb: 50} {
		if got := gcPercent(live); got != want {
			t.Errorf("%d MiB live: %d %%, not %d", live/mb, got, want)
		}
	}
}

func TestAfterEachCollection(t *testing.T) {
	seen := make(chan struct{}, 1)
	afterEachCollection(func() {
		select {
		case seen <- struct{}{}:
		default: // the test is over, collections go on
		}
	})
	<-seen // the call that begins it
	for range 3 {
		runtime.GC()
		<-seen
	}
}
