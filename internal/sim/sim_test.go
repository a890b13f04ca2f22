package sim

import (
	"flag"
	"testing"
	"time"
)

var (
	seedsFlag  = flag.Int("sim.seeds", 0, "how many seeds to simulate (default 300, 60 with -short)")
	fromFlag   = flag.Uint64("sim.from", 1, "the first seed")
	seedFlag   = flag.Uint64("sim.seed", 0, "simulate this seed alone")
	traceFlag  = flag.Bool("sim.trace", false, "print the history of -sim.seed")
	eventsFlag = flag.Int("sim.events", 0, "how many events a storm has")
	bugFlag    = flag.Int("sim.bug", 0, "plant a bug")
)

func TestOne(t *testing.T) {
	if *seedFlag == 0 {
		t.Skip("-sim.seed names one")
	}
	begun := time.Now()
	r := Run(Options{Seed: *seedFlag, Events: *eventsFlag, Bug: Bug(*bugFlag), Trace: *traceFlag})
	for _, line := range r.Trace {
		t.Log(line)
	}
	t.Logf("faults %s, %d events, %d ms, %v real, %+v, hash %x", r.Faults, r.Events, r.Millis, time.Since(begun), r.Stats, r.Hash)
	if r.Err != nil {
		t.Error(r.Err)
	}
}
