package sim

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// Fault is a set of kinds of faults.
type Fault uint32

// The kinds.
const (
	Loss        Fault = 1 << iota // messages get lost, late or are given up
	Cuts                          // links that are dead in one direction
	Kills                         // processes die, disks live
	Power                         // machines lose what was not synced
	Wipes                         // a disk is replaced by an empty one
	Disks                         // writes and syncs fail
	Store                         // the bucket fails, before or after the effect
	Outages                       // the bucket is away
	Clocks                        // clocks are off, and jump
	Moves                         // partitions are reassigned
	Elections                     // preferred leaders are elected
	Shutdowns                     // brokers leave orderly
	Configs                       // settings of the topic change
	Unclean                       // unclean elections are allowed for a while
	Trims                         // DeleteRecords
	Retention                     // by size, in both tiers
	Disabling                     // the topic leaves the tier and comes back
	Controllers                   // the controller moves, and proposals lose their answers
	Stale                         // images arrive late
	Moments                       // brokers die between two steps of a transaction
	allFaults   Fault = 1<<iota - 1
)

var faultNames = []string{"loss", "cuts", "kills", "power", "wipes", "disks", "store", "outages", "clocks", "moves", "elections", "shutdowns", "configs", "unclean", "trims", "retention", "disabling", "controllers", "stale", "moments"}

// plainFaults are those of runs without transactions.
const plainFaults = 19

// String lists the kinds.
func (f Fault) String() string {
	var out []string
	for i, name := range faultNames {
		if f&(1<<i) != 0 {
			out = append(out, name)
		}
	}
	if len(out) == 0 {
		return "none"
	}
	return strings.Join(out, ",")
}

// Times in ms.
const (
	sessionMs   = 1500
	heartbeatMs = 300
	lagMs       = 1500
	backoffMs   = 200
	graceMs     = 700
	tierMs      = 1000
)

// plan is what a seed draws.
type plan struct {
	brokers, factor, partitions int
	racks                       int
	faults                      Fault
	every                       int64 // ms between faults
	lossOdds                    int   // one message in so many
	configs                     map[string]string
	deleteDelay                 int64
	fromTier                    bool
	localBytes, totalBytes      string
	leaderPause                 int64
}

func (p *plan) has(f Fault) bool { return p.faults&f != 0 }

func draw(r *rand.Rand, off Fault, transactions bool) plan {
	p := plan{brokers: 1 + r.IntN(5), partitions: 1 + r.IntN(3), racks: 1 + r.IntN(3), configs: map[string]string{}}
	if p.brokers < 3 && r.IntN(2) == 0 {
		p.brokers = 3
	}
	p.factor = min(1+r.IntN(3), p.brokers)
	if p.factor == 1 && r.IntN(2) == 0 {
		p.factor = min(3, p.brokers)
	}
	some := r.IntN(3)
	for i := range plainFaults {
		if r.IntN(3) <= some {
			p.faults |= 1 << i
		}
	}
	if r.IntN(3) > 0 {
		p.faults &^= Unclean
	}
	p.every = []int64{100, 300, 800}[r.IntN(3)]
	p.lossOdds = []int{10, 40, 200}[r.IntN(3)]
	p.deleteDelay = []int64{0, 500, 3000}[r.IntN(3)]
	p.fromTier = r.IntN(2) == 0
	p.leaderPause = []int64{20, 120, 400}[r.IntN(3)]
	segment := 450 + r.IntN(900)
	p.localBytes, p.totalBytes = fmt.Sprint(r.IntN(4)*segment), "-1"
	if r.IntN(3) == 0 {
		p.localBytes = "0"
	}
	p.faults &^= off
	if p.has(Retention) {
		p.totalBytes = fmt.Sprint((4 + r.IntN(12)) * segment)
	}
	p.configs["internal.segment.bytes"] = fmt.Sprint(segment)
	p.configs["index.interval.bytes"] = fmt.Sprint(r.IntN(300))
	p.configs["remote.storage.enable"] = fmt.Sprint(r.IntN(6) > 0)
	p.configs["min.insync.replicas"] = fmt.Sprint(1 + r.IntN(p.factor))
	p.configs["retention.ms"] = "-1"
	p.configs["retention.bytes"] = p.totalBytes
	p.configs["local.retention.bytes"] = p.local()
	p.configs["local.retention.ms"] = "-2"
	if transactions {
		p.partitions = max(p.partitions, 2)
		p.faults &^= Unclean // which break what transactions promise
		if r.IntN(2) == 0 {
			p.faults |= Moments &^ off
		}
	}
	return p
}

// local is local.retention.bytes that fits retention.bytes.
func (p *plan) local() string {
	if p.totalBytes == "-1" {
		return p.localBytes
	}
	var local, total int64
	fmt.Sscan(p.localBytes, &local)
	fmt.Sscan(p.totalBytes, &total)
	return fmt.Sprint(min(local, total))
}

// trims says whether there is any reason for a log start to move.
func (p *plan) trims() bool { return p.faults&(Trims|Retention|Disabling|Configs) != 0 }
