package sim

import (
	"errors"
	"flag"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/varve-io/varve/internal/checker"
)

var (
	seedsFlag  = flag.Int("sim.seeds", 200, "how many seeds to simulate, and half as many with transactions")
	fromFlag   = flag.Uint64("sim.from", 1, "the first seed")
	seedFlag   = flag.Uint64("sim.seed", 0, "simulate this seed alone")
	traceFlag  = flag.Bool("sim.trace", false, "print the history of -sim.seed")
	eventsFlag = flag.Int("sim.events", 0, "how many events a storm has; 0 is the default")
	offFlag    = flag.Uint("sim.off", 0, "kinds of faults to leave out, as a number")
	txnFlag    = flag.Bool("sim.transactions", false, "with -sim.seed: with transactions")
	bugFlag    = flag.Int("sim.bug", 0, "plant this bug")
)

// TestSeeds storms one cluster after another. What fails is shrunk and told with its history.
func TestSeeds(t *testing.T) {
	o := Options{Events: *eventsFlag, Off: Fault(*offFlag), Bug: Bug(*bugFlag)}
	if *seedFlag > 0 {
		o.Seed, o.Trace, o.Transactions = *seedFlag, *traceFlag, *txnFlag
		r := Run(o)
		t.Log(strings.Join(r.Trace, "\n"))
		t.Logf("faults %s, %d events, %d ms, hash %x, %+v", r.Faults, r.Events, r.Millis, r.Hash, r.Stats)
		if r.Err != nil {
			t.Error(r.Err)
		}
		return
	}
	n := *seedsFlag
	if testing.Short() {
		n = min(n, 60)
	}
	sum := storm(t, o, n)
	if n >= 200 && o == (Options{}) {
		// A simulator that does not simulate finds nothing.
		enough(t, map[string]int{"acknowledgements": sum.Acked, "reads": sum.Read, "direct reads": sum.Direct, "reads from followers": sum.FollowerRead, "uploads": sum.Copied,
			"deletions": sum.Cleaned, "starts from the tier": sum.Loads, "restores": sum.Restores, "truncations": sum.Truncated, "power cuts": sum.Power, "wipes": sum.Wipes, "unclean elections": sum.Unclean})
	}
}

// TestTransactions storms clusters that coordinate transactions.
func TestTransactions(t *testing.T) {
	o := Options{Events: *eventsFlag, Off: Fault(*offFlag), Bug: Bug(*bugFlag), Transactions: true}
	n := *seedsFlag / 2
	if testing.Short() {
		n = min(n, 30)
	}
	sum := storm(t, o, n)
	if n >= 100 && o == (Options{Transactions: true}) {
		enough(t, map[string]int{"commits": sum.Commits, "aborts": sum.Aborts, "timeouts": sum.Expired, "fenced producers": sum.Fenced, "markers": sum.Markers,
			"records that read_committed leaves out": sum.Hidden, "direct reads": sum.Direct, "power cuts": sum.Power})
	}
}

// TestCrashBetweenSteps ends the process that comes to the first moment between two steps of a transaction, then, in a run of its own, the
// second, and so on; nothing else goes wrong.
func TestCrashBetweenSteps(t *testing.T) {
	for _, seed := range []uint64{5, 12} { // of two and of three replicas, and clients of both versions
		each(max(60, *seedsFlag/5), 1, func(moment uint64) bool {
			r := Run(Options{Seed: seed, Transactions: true, Off: allFaults, CrashAt: int(moment), Events: 1500})
			if r.Err != nil {
				t.Errorf("seed %d, moment %d: %v", seed, moment, r.Err)
			}
			if moment <= 60 && r.Stats.Kills+r.Stats.Power == 0 {
				t.Errorf("seed %d: there are less than %d moments", seed, moment)
			}
			return true
		})
	}
}

func enough(t *testing.T, counts map[string]int) {
	t.Helper()
	for name, count := range counts {
		if count < 10 {
			t.Errorf("only %d %s", count, name)
		}
	}
}

// storm runs n seeds.
func storm(t *testing.T, o Options, n int) (sum Stats) {
	t.Helper()
	var mu sync.Mutex
	failed := 0
	each(n, *fromFlag, func(seed uint64) bool {
		o := o
		o.Seed = seed
		r := Run(o)
		mu.Lock()
		defer mu.Unlock()
		sum.add(r.Stats)
		if r.Err == nil {
			return true
		}
		failed++
		if failed > 3 {
			t.Errorf("seed %d: %v", seed, r.Err)
			return failed < 40
		}
		small, r := Shrink(o)
		trace := r.Trace[max(0, len(r.Trace)-60):]
		t.Errorf("seed %d: %v\nfaults %s, %d events; the end of its history:\n%s\nagain: go test ./internal/sim -run TestSeeds -sim.seed %d -sim.transactions=%v -sim.events %d -sim.off %d -sim.trace -v", seed, r.Err, r.Faults,
			small.Events, strings.Join(trace, "\n"), seed, small.Transactions, small.Events, uint32(small.Off))
		return true
	})
	t.Logf("%d seeds, %d failed: %+v", n, failed, sum)
	return sum
}

// each runs do for n seeds, on all processors, until it returns false.
func each(n int, from uint64, do func(seed uint64) bool) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	next, stop := uint64(0), false
	for range runtime.GOMAXPROCS(0) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for {
				mu.Lock()
				seed := from + next
				over := stop || next >= uint64(n)
				next++
				mu.Unlock()
				if over {
					return
				}
				if !do(seed) {
					mu.Lock()
					stop = true
					mu.Unlock()
				}
			}
		}()
	}
	wg.Wait()
}

// TestRegressions storms again what once found a bug of the cores.
func TestRegressions(t *testing.T) {
	for _, c := range []struct {
		name         string
		seed         uint64
		transactions bool
	}{
		{"an upload that begins inside a batch", 2, false},
		{"producers that go with local segments", 2, false},
		{"a lineage that a full disk refused", 11, false},
		{"an append of several epochs that is tried again", 2480, false},
		{"a truncation on a full disk", 753, false},
		{"a truncation on a failing disk", 2640, false},
		{"names that a killed process left unsynced", 214, false},
		{"followers of an empty leader", 224, false},
		{"a tier that begins above the log start", 2902, false},
		{"a log start that a killed process did not note down", 38, false},
		{"a recovery point at the log start", 5493, false},
		{"a clean end beside a dead log", 710, false},
		{"records that came back without their lineage", 836, false},
		{"an empty member of the ISR that goes back for its lineage", 40524, false},
		{"a recovery point of a folder that is gone", 40700, false},
		{"logs that part below the leader's log start", 43614, false},
		{"a log start that waits for the high watermark", 37131, false},
		{"an unclean leader whose history is not the tier's", 67931, false},
		{"a refusal behind an accepted proposal that nobody heard of", 9, true},
	} {
		if r := Run(Options{Seed: c.seed, Transactions: c.transactions}); r.Err != nil {
			t.Errorf("%s, seed %d: %v", c.name, c.seed, r.Err)
		}
	}
}

// TestSameSeedSameHistory: what cannot be repeated cannot be mended.
func TestSameSeedSameHistory(t *testing.T) {
	for seed := uint64(1); seed <= 12; seed++ {
		a, b := Run(Options{Seed: seed, Transactions: seed%2 == 0}), Run(Options{Seed: seed, Transactions: seed%2 == 0, Trace: true})
		if a.Hash != b.Hash || a.Events != b.Events || fmt.Sprint(a.Stats) != fmt.Sprint(b.Stats) {
			t.Errorf("seed %d: %x with %d events, then %x with %d", seed, a.Hash, a.Events, b.Hash, b.Events)
		}
	}
}

// TestBugsAreFound plants one bug after another between the cores. Each must be found, by one of the checks that are there for it.
func TestBugsAreFound(t *testing.T) {
	for _, c := range []struct {
		bug    Bug
		checks []string
		off    Fault  // what only gets in the way
		from   uint64 // the first seed: for what is rare, where it is known to be near
	}{
		{NoDivergence, []string{checker.Agreement, checker.Durability, checker.Reading, checker.Liveness, checker.Lineage}, 0, 1},
		{UploadUncommitted, []string{checker.RemoteData}, 0, 1},
		{DeleteEarly, []string{checker.Reading}, 0, 1},
		{RetainUntiered, []string{checker.Coverage, checker.LogStart, checker.Reading, checker.Liveness}, 0, 1},
		{ForgetProducers, []string{checker.Producers, checker.Idempotent}, 0, 150},
		{ForgetEpochs, []string{checker.Lineage}, 0, 1},
		{FakeFollowed, []string{checker.Durability, checker.Agreement}, 0, 1},
		{NoCheckpoint, []string{checker.Opening}, 0, 185},
		{KeepInISR, []string{checker.Durability, checker.HighMark}, 0, 1},
		{NoRestore, []string{checker.Durability, checker.Coverage, checker.RemoteData, checker.Reading}, 0, 1},
		{AckEarly, []string{checker.Acknowledge}, 0, 1},
		{LeaveObjects, []string{checker.Dangling}, 0, 1},
		{SameDisk, []string{checker.Durability, checker.HighMark}, 0, 1},
		{MarkEarly, []string{checker.Outcome, checker.Atomicity}, 0, 1},
		{CompleteEarly, []string{checker.Atomicity, checker.Liveness}, 0, 1},
		{NoVerification, []string{checker.Liveness, checker.Hanging}, 0, 1},
		{TrustOpen, []string{checker.Hanging}, allFaults &^ (Loss | Moments | Elections | Moves | Controllers), 133},
		{AnyCoordinator, []string{checker.Outcome, checker.Atomicity}, allFaults &^ (Loss | Moments | Elections | Moves | Controllers), 382},
		{ApplyAborted, []string{checker.Repeated}, 0, 1},
		{ReadUndecided, []string{checker.Isolation}, 0, 1},
		{TrustRefusals, []string{checker.Atomicity, checker.Hanging, checker.Liveness}, allFaults &^ (Loss | Moments | Elections | Moves | Controllers), 59},
		{GiveUpDoubt, []string{checker.Liveness}, allFaults &^ (Loss | Cuts | Controllers | Stale), 1},
		{ForgetDecisions, []string{checker.Liveness, checker.Atomicity}, 0, 1},
	} {
		t.Run(c.bug.String(), func(t *testing.T) {
			found := false
			seeds := 0
			other := map[string]int{}
			var mu sync.Mutex
			each(600, c.from, func(seed uint64) bool {
				r := Run(Options{Seed: seed, Bug: c.bug, Off: c.off, Transactions: c.bug >= MarkEarly})
				mu.Lock()
				defer mu.Unlock()
				seeds++
				var v *checker.Violation
				if !errors.As(r.Err, &v) {
					return !found
				}
				for _, check := range c.checks {
					if v.Check == check {
						found = true
						return false
					}
				}
				other[v.Check]++
				return true
			})
			if !found {
				t.Errorf("not found in %d seeds: %v", seeds, other)
			}
			t.Logf("%d seeds, other checks: %v", seeds, other)
		})
	}
}
