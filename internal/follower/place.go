package follower

import "github.com/varve-io/varve/internal/partition"

// placement is where a follower goes on.
type placement struct {
	kind placementKind
	at   int64
}

type placementKind int8

const (
	stay     placementKind = iota // at the end of its log
	cut                           // at an end that lies below it: the leader has less
	plain                         // at the leader's log start, with nothing before it
	fromTier                      // behind a remote segment, with the state that is stored there
	retry                         // the leader cannot say yet
)

// place decides it from the follower's log, the leader's offsets and the topic (KIP-405 and KIP-1023; each row has its
// test in place_test.go).
func place(f partition.Following, o Offsets, c Config) placement {
	fits := f.End >= o.LocalStart && f.End <= o.End // the leader can serve the follower's end
	switch {
	case f.End > o.End && f.End > o.Start && o.End >= o.LocalStart && !f.Empty:
		return placement{cut, o.End} // after an unclean election
	case !c.Tiered:
		if fits && f.End >= o.Start {
			return placement{kind: stay}
		}
		return placement{plain, o.Start}
	}
	bound := o.LocalStart
	if c.jumps() {
		switch {
		case o.Pending >= 0:
			// Below the leader's local start nothing can be fetched, below its log start nothing exists: what is pending
			// there was tiered long ago or never will be.
			bound = max(o.Pending, o.LocalStart)
		case o.Start != o.LocalStart:
			if fits && !f.Empty {
				return placement{kind: stay}
			}
			return placement{kind: retry}
		}
	}
	switch {
	case fits && (!f.Empty || bound < f.End || bound == f.End && f.LogStart <= o.Start):
		// An empty one may lack what the tier has before it. It gets that only where its end stays where it is: as a member of the ISR it
		// has said that it has everything below.
		return placement{kind: stay}
	case bound <= o.Start:
		return placement{plain, o.Start}
	}
	return placement{fromTier, bound}
}
