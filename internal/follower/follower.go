// Package follower decides what a follower does next: fetch, cut its log where it departs from the leader's, or start from
// the tier (the follower protocol of KIP-405, KIP-595 and KIP-1023). It is pure: what it wants is a Step, what came of it
// is told by Fetched, Listed or Loaded, and the partition itself refuses whatever belongs to another leader epoch.
//
// A Machine is not safe for concurrent use. It has at most one Step outstanding.
package follower

import (
	"errors"
	"time"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tier"
)

// Phase is what a follower is at.
type Phase int8

const (
	Fetching      Phase = iota // appends what the leader has
	Bootstrapping              // finds out where to start and takes lineage and producers from there
	BackingOff                 // waits after a failure
	Failed                     // was fenced, and waits for another leader epoch
)

func (p Phase) String() string {
	return [...]string{"Fetching", "Bootstrapping", "BackingOff", "Failed"}[p]
}

// Config is asked for at each use.
type Config struct {
	Tiered    bool          // remote.storage.enable of the topic
	Compacted bool          // cleanup.policy has compact
	FromTier  bool          // follower.fetch.last.tiered.offset.enable
	Backoff   time.Duration // replica.fetch.backoff.ms: the longest pause after a failure
}

// Kind of a step.
type Kind int8

const (
	Idle  Kind = iota // nothing until the role changes
	Wait              // nothing before Until
	Fetch             // send a fetch for Offset
	Ask               // ask the leader for its offsets (ListOffsets -1, -2, -4 and, with Pending, -6)
	Load              // read leader epochs and producer snapshot of Segment from the bucket
)

// Step is what to do next. All of it is meant for the leader of exactly this epoch.
type Step struct {
	Kind        Kind
	Leader      int32
	LeaderEpoch int32
	Until       time.Time

	Offset    int64
	LastEpoch int32 // of the last batch in the log, -1 none

	Pending bool

	Segment *tier.Segment
}

// jumps says that an empty replica starts behind what is tiered (KIP-1023).
func (c Config) jumps() bool { return c.Tiered && c.FromTier && !c.Compacted }

// Machine is one follower. Partition may be called from anywhere at any time.
type Machine struct {
	part   *partition.Partition
	config func() Config
	state
}

// state is all that changes.
type state struct {
	phase    Phase
	epoch    int32 // leader epoch that phase belongs to, -1 before the first
	busy     bool
	due      time.Time
	asked    bool // whether an empty log has asked in this epoch where to start
	offsets  Offsets
	segment  *tier.Segment
	last     error
	failures int // in a row
	// level is whether the last fetch left nothing to be had: the follower keeps up.
	level bool
}

// New returns the machine of a partition.
func New(p *partition.Partition, config func() Config) *Machine {
	return &Machine{part: p, config: config, state: state{epoch: -1}}
}

// Partition is the follower's replica.
func (m *Machine) Partition() *partition.Partition { return m.part }

// Phase is the present phase, and the last error in it, nil if there was none.
func (m *Machine) Phase() (Phase, error) { return m.phase, m.last }

// Level reports whether the last fetch brought the log to the leader's end.
func (m *Machine) Level() bool { return m.level }

// Next returns the next step and makes it the outstanding one, if it is not Idle or Wait.
func (m *Machine) Next(now time.Time) Step {
	f, ok := m.part.Following()
	if !ok {
		m.epoch = -1
		return Step{}
	}
	if f.LeaderEpoch != m.epoch {
		// Whatever is outstanding belongs to another epoch, and its answer will be ignored.
		m.state = state{epoch: f.LeaderEpoch}
	}
	if m.busy || m.phase == Failed {
		return Step{}
	}
	s := Step{Leader: f.Leader, LeaderEpoch: f.LeaderEpoch, Offset: f.End, LastEpoch: f.LastEpoch}
	if m.due.After(now) {
		s.Kind, s.Until = Wait, m.due
		return s
	}
	if m.phase == BackingOff {
		m.phase = Fetching
	}
	// An empty log asks where to start before its first fetch, which might succeed: the leader may still have everything
	// locally that the tier has, too (the hole of KIP-1023).
	if m.phase == Fetching && f.Empty && !m.asked && m.config().jumps() {
		m.phase = Bootstrapping
	}
	m.busy = true
	switch {
	case m.phase == Fetching:
		s.Kind = Fetch
	case m.segment != nil:
		s.Kind, s.Segment = Load, m.segment
	default:
		s.Kind, s.Pending = Ask, m.config().jumps()
	}
	return s
}

// mine reports whether an answer belongs to the outstanding step, which then is over.
func (m *Machine) mine(epoch int32) bool {
	f, ok := m.part.Following()
	if !ok || epoch != m.epoch || f.LeaderEpoch != m.epoch || !m.busy {
		return false
	}
	m.busy = false
	return true
}

// backoffMin is the first pause after a failure. Most pass in a moment: the leader has not heard yet that it leads.
const backoffMin = 10 * time.Millisecond

func (m *Machine) backOff(err error, now time.Time) {
	pause := min(backoffMin<<min(m.failures, 20), m.config().Backoff)
	m.phase, m.last, m.due, m.segment, m.level = BackingOff, err, now.Add(pause), nil, false
	m.failures++
}

// Code is what a leader answered for one partition, in the terms that matter to a follower.
type Code int8

const (
	OK          Code = iota
	OutOfRange       // OFFSET_OUT_OF_RANGE 1
	MovedToTier      // OFFSET_MOVED_TO_TIERED_STORAGE 109
	Fenced           // FENCED_LEADER_EPOCH 74
	TryAgain         // everything else: NOT_LEADER_OR_FOLLOWER, UNKNOWN_LEADER_EPOCH, UNKNOWN_TOPIC_OR_PARTITION, …
)

// Answer is what came of a Fetch step.
type Answer struct {
	Code          Code
	Err           error // its text, or why there was no answer (with TryAgain)
	HighWatermark int64
	LogStart      int64
	Records       []byte
	Diverging     bool // the logs part: EndOffset is the leader's end of Epoch
	Epoch         int32
	EndOffset     int64
	Full          bool // there may be more at once
}

// Effect is what the caller has to see to.
type Effect struct {
	// Checkpoint: recovery points and log starts must be written before the next append.
	Checkpoint bool
	Appended   int64 // bytes
	Truncated  bool
	Restarted  bool // it starts from the tier, or from the leader's log start
}

// Fetched tells what came of a Fetch step (facts of AbstractFetcherThread.processFetchRequest).
func (m *Machine) Fetched(step Step, a Answer, now time.Time) Effect {
	if !m.mine(step.LeaderEpoch) {
		return Effect{}
	}
	switch a.Code {
	case OK:
		if a.Diverging {
			return m.diverge(step, a, now)
		}
		return m.take(step, a, now)
	case OutOfRange, MovedToTier:
		m.phase, m.last, m.level = Bootstrapping, a.Err, false
	case Fenced:
		m.phase, m.last, m.level = Failed, a.Err, false
	default:
		m.backOff(a.Err, now)
	}
	return Effect{}
}

// Nothing tells that an answer to a Fetch step had no word on this partition: all is as before (KIP-227).
func (m *Machine) Nothing(step Step) {
	if m.mine(step.LeaderEpoch) {
		m.last, m.level, m.failures = nil, true, 0
	}
}

func (m *Machine) take(step Step, a Answer, now time.Time) Effect {
	restarted, err := m.part.TakeFetched(partition.Fetched{LeaderEpoch: step.LeaderEpoch, Offset: step.Offset, Records: a.Records,
		HighWatermark: a.HighWatermark, LogStart: a.LogStart, Now: now})
	switch {
	case err == nil:
		m.last, m.level, m.failures = nil, !a.Full, 0
		return Effect{Appended: int64(len(a.Records)), Checkpoint: restarted}
	case moved(err): // the role changed just now: Next finds out
	default:
		m.backOff(err, now) // damaged on the way, a full disk; a dead log leaves no follower
	}
	return Effect{Checkpoint: restarted}
}

// moved says that a partition refused what belongs to another role than its present one.
func moved(err error) bool {
	return errors.Is(err, partition.ErrFencedEpoch) || errors.Is(err, partition.ErrNotLeader)
}

// diverge cuts the log where it departs from the leader's (KIP-595; the rule of getOffsetTruncationState).
func (m *Machine) diverge(step Step, a Answer, now time.Time) Effect {
	to := step.Offset
	if a.EndOffset >= 0 {
		to = min(a.EndOffset, step.Offset)
		if epoch, end := m.part.EndOfEpoch(a.Epoch); epoch >= 0 && a.Epoch >= 0 {
			to = min(end, step.Offset)
			if epoch == a.Epoch {
				to = min(to, a.EndOffset)
			}
		}
	}
	if a.LogStart > 0 && to <= a.LogStart {
		// They may have parted further down, of which the leader knows nothing any more.
		return m.restart(step, a.LogStart, a.LogStart, nil, nil, now)
	}
	if err := m.part.Truncate(step.LeaderEpoch, to); err != nil {
		if !moved(err) {
			m.backOff(err, now)
		}
		return Effect{}
	}
	m.level = false
	if f, ok := m.part.Following(); ok && f.End >= step.Offset {
		// Nothing was cut, so the same fetch would get the same answer: never at full speed.
		m.backOff(a.Err, now)
		return Effect{}
	}
	return Effect{Checkpoint: true, Truncated: true}
}

// Offsets are a leader's, as ListOffsets tells them. Pending is -1 where the leader does not know it yet, or knows no such
// question.
type Offsets struct {
	Start, LocalStart, End, Pending int64
}

// Listed tells what came of an Ask step.
func (m *Machine) Listed(step Step, o Offsets, err error, now time.Time) Effect {
	if !m.mine(step.LeaderEpoch) {
		return Effect{}
	}
	if err != nil {
		m.backOff(err, now)
		return Effect{}
	}
	f, ok := m.part.Following()
	if !ok {
		return Effect{}
	}
	p := place(f, o, m.config())
	switch p.kind {
	case retry:
		m.backOff(errPendingUnknown, now)
	case stay:
		m.phase, m.asked = Fetching, true
	case cut:
		if err := m.part.Truncate(step.LeaderEpoch, p.at); err != nil {
			m.backOff(err, now)
			return Effect{}
		}
		m.phase, m.asked = Fetching, true
		return Effect{Checkpoint: true, Truncated: true}
	case plain:
		return m.restart(step, p.at, p.at, nil, nil, now)
	case fromTier:
		m.offsets = o
		if m.segment = m.part.Remote().Find(p.at - 1); m.segment == nil {
			m.backOff(errNoSegment, now) // this broker's image is behind the leader's
		}
	}
	return Effect{}
}

var (
	errPendingUnknown = errors.New("the leader does not know yet what is tiered")
	errNoSegment      = errors.New("the remote segment before the leader's local log is not known here yet")
)

// Loaded tells what came of a Load step: the lineage and, unless the segment has none, the producer snapshot at the end of
// the segment.
func (m *Machine) Loaded(step Step, epochs []leaderepoch.Entry, snapshot []byte, err error, now time.Time) Effect {
	if !m.mine(step.LeaderEpoch) {
		return Effect{}
	}
	segment := m.segment
	m.segment = nil
	if err != nil || segment == nil {
		m.backOff(err, now)
		return Effect{}
	}
	// What a replica that copied everything has: the lineage from the log start on.
	lineage := leaderepoch.New(epochs).EntriesInRange(m.offsets.Start, segment.End+1)
	return m.restart(step, segment.End+1, m.offsets.Start, lineage, snapshot, now)
}

func (m *Machine) restart(step Step, next, logStart int64, epochs []leaderepoch.Entry, snapshot []byte, now time.Time) Effect {
	switch err := m.part.Restart(step.LeaderEpoch, next, logStart, epochs, snapshot); {
	case err == nil:
		m.phase, m.last, m.asked, m.level = Fetching, nil, true, false
		return Effect{Checkpoint: true, Restarted: true}
	case !moved(err):
		m.backOff(err, now) // a snapshot that does not parse, a full disk
	}
	return Effect{}
}
