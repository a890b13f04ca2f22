package main

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// limitMemory sets the collector's pace unless the environment does (GOGC): most of a broker's memory should be page cache, but what
// lives in a small broker is so little that a share of it would be used up a hundred times a second.
func limitMemory() {
	if os.Getenv("GOGC") != "" {
		return
	}
	percent := gcPercent(0)
	debug.SetGCPercent(percent)
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	afterEachCollection(func() {
		metrics.Read(live)
		if next := gcPercent(live[0].Value.Uint64()); next > percent+percent/8 || next < percent-percent/8 {
			percent = next
			debug.SetGCPercent(percent)
		}
	})
}

// gcPercent is how much garbage may gather, in percent of the bytes that live: half of them, or 32 MiB if that is more.
func gcPercent(live uint64) int {
	const least, room, goMinimum = 50, 32 << 20, 4 << 20 // below that the runtime scales its own minimum of 4 MiB
	return max(least, int(100*room/max(live, goMinimum)))
}

// afterEachCollection calls f after every run of the collector, one call at a time.
func afterEachCollection(f func()) {
	type sentinel struct{ _ *int }
	var watch func(*sentinel)
	watch = func(*sentinel) {
		f()
		runtime.SetFinalizer(&sentinel{}, watch)
	}
	watch(nil)
}
