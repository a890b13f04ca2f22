// Package sim runs a whole cluster on one event queue, breaks it in every way that it is meant to survive, and has package
// checker watch. All that decides is production code: the controller's commands on a metadata image, sessions, partitions
// and their logs on a file system that loses what was not synced, followers, fetches, the tier's planner, uploader and
// reader. What is simulated are the shells: the network, the metadata quorum (one ordered log), clocks, processes, disks
// and the bucket.
//
// With Options.Transactions the cluster keeps __transaction_state and __consumer_offsets, too, and coordinates: package txn's states, the
// coordinator's reads and writes, markers, verification, a group's pending offsets. Clients copy partitions exactly once, write, abort, die, or
// are paused and come back as zombies; any process may end between two steps.
//
// A run is a function of its options: one seeded source of randomness, one clock, no goroutine of its own. (The tier reader
// fetches in goroutines; the simulator waits for each of them.) Each seed draws which kinds of faults there are, and how
// many. After the storm everything is healed, and the cluster must come to rest with nothing lost, left behind or
// different between replicas.
package sim

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"hash"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/varve-io/varve/internal/checker"
	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/coordinator"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

// Options of a run.
type Options struct {
	Seed uint64
	// Events is how many events the storm has; 0 is DefaultEvents.
	Events int
	// Off are kinds of faults that this run leaves out, whatever the seed draws.
	Off Fault
	// Transactions adds the topics that keep groups and transactions, their coordinators, and clients of them.
	Transactions bool
	// CrashAt ends the process that comes to so many moments between two steps of transactions; 0 for none.
	CrashAt int
	// Bug is planted, to see whether the checks find it.
	Bug Bug
	// Trace keeps the history in the result.
	Trace bool
}

// DefaultEvents is the length of a storm.
const DefaultEvents = 6000

// Result of a run.
type Result struct {
	Err    error // the first violation, nil if there was none
	Hash   uint64
	Events int
	Millis int64 // simulated
	Faults Fault // kinds that the seed drew
	Trace  []string
	Stats  Stats
}

// Stats count what happened, so that it can be seen whether a simulator still simulates.
type Stats struct {
	Acked, Refused, Read, Direct, FollowerRead, Elections, Unclean, Copied, Cleaned, Loads, Restores, Truncated, Kills, Power, Wipes, Tainted, Crippled,
	Commits, Aborts, Expired, Fenced, Markers, Hidden int
}

// event is something that happens at a time.
type event struct {
	at, seq int64
	do      func()
}

type queue []event

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].seq < q[j].seq
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)   { *q = append(*q, x.(event)) }
func (q *queue) Pop() any {
	old := *q
	e := old[len(old)-1]
	old[len(old)-1].do = nil
	*q = old[:len(old)-1]
	return e
}

// sim is a run.
type sim struct {
	o      Options
	rng    *rand.Rand
	now    int64 // ms since 1970, of the one true clock
	begun  int64
	seq    int64
	events int
	queue  queue
	hash   hash.Hash64
	trace  []string
	stats  Stats
	ctx    context.Context

	plan    plan
	check   *checker.Checker
	static  config.Values
	quorum  quorum
	nodes   []*node // by id - 1
	net     network
	bucket  *bucket
	clients clients
	ids     []tp.Partition // all partitions, those of the topic first
	topicID tp.UUID
	touched []*run // whose replicas are to be looked at after this event
	calm    bool   // the storm is over

	producerIDs  int64 // handed out
	transactions int   // begun
	moments      int   // between two steps
}

const topic = "t"

// ownPartitions is how many partitions each of the cluster's own topics has.
const ownPartitions = 2

// epoch0 is when simulations begin.
const epoch0 = 1_700_000_000_000

// Run simulates one seed.
func Run(o Options) Result {
	s := newSim(o)
	s.run()
	for _, n := range s.nodes {
		if n.run != nil {
			n.run.reader.Close()
		}
	}
	return Result{Err: s.check.Err(), Hash: s.hash.Sum64(), Events: s.events, Millis: s.now - s.begun, Faults: s.plan.faults, Trace: s.trace, Stats: s.stats}
}

func newSim(o Options) *sim {
	if o.Events <= 0 {
		o.Events = DefaultEvents
	}
	s := &sim{o: o, rng: rand.New(rand.NewPCG(o.Seed, 0x7661727665)), now: epoch0, begun: epoch0, hash: fnv.New64a(), ctx: context.Background(), check: checker.New()}
	s.plan = draw(s.rng, o.Off, o.Transactions)
	for index := range s.plan.partitions {
		s.ids = append(s.ids, tp.Partition{Topic: topic, Index: int32(index)})
	}
	if o.Transactions {
		for _, own := range []string{coordinator.TransactionTopic, coordinator.Topic} {
			for index := range ownPartitions {
				s.ids = append(s.ids, tp.Partition{Topic: own, Index: int32(index)})
			}
		}
	}
	s.net.init(s)
	s.bucket = newBucket(s)
	var err error
	s.static, err = config.Broker.NewValues(map[string]string{"broker.session.timeout.ms": fmt.Sprint(sessionMs), "broker.heartbeat.interval.ms": fmt.Sprint(heartbeatMs),
		"replica.lag.time.max.ms": fmt.Sprint(lagMs), "replica.fetch.backoff.ms": fmt.Sprint(backoffMs), "leader.imbalance.check.interval.seconds": "5"})
	if err != nil {
		s.check.Fail("settings", tp.Partition{}, "%v", err)
	}
	s.quorum.init(s)
	for i := range s.plan.brokers {
		s.nodes = append(s.nodes, newNode(s, int32(i+1)))
	}
	s.clients.init(s)
	return s
}

// note writes a line of history. It is part of the hash, so that two runs of a seed can be compared.
func (s *sim) note(format string, args ...any) {
	line := fmt.Sprintf("%8d  %s", s.now-s.begun, fmt.Sprintf(format, args...))
	s.hash.Write([]byte(line))
	if s.o.Trace {
		s.trace = append(s.trace, line)
	}
}

func (s *sim) after(ms int64, do func()) {
	s.seq++
	heap.Push(&s.queue, event{s.now + max(ms, 0), s.seq, do})
}

// step runs the next event and looks at what it touched.
func (s *sim) step() bool {
	if s.queue.Len() == 0 || s.check.Err() != nil {
		return false
	}
	e := heap.Pop(&s.queue).(event)
	s.now = max(s.now, e.at)
	s.events++
	e.do()
	s.observe()
	return s.check.Err() == nil
}

func (s *sim) run() {
	s.begin()
	for range s.o.Events {
		if !s.step() {
			return
		}
	}
	s.heal()
}

// begin makes the cluster: its name, its brokers, its topic.
func (s *sim) begin() {
	s.quorum.elect(1)
	s.command(controller.BootstrapCommand{ID: "simulated"})
	for _, n := range s.nodes {
		n.start()
	}
	s.createTopic()
	s.inject()
	s.clients.begin()
	for _, n := range s.nodes {
		s.heartbeats(n)
	}
	s.ticks()
}

// command runs a command of an administrator at once, wherever the controller is.
func (s *sim) command(c controller.Command) (any, error) {
	if s.quorum.active < 0 {
		return nil, errNoController
	}
	return s.quorum.run(c)
}

func (s *sim) createTopic() {
	if s.check.Err() != nil {
		return
	}
	ready := 0
	for _, b := range s.quorum.img.Brokers {
		if !b.Fenced {
			ready++
		}
	}
	if ready < s.plan.factor {
		s.after(50, s.createTopic)
		return
	}
	topics := []controller.NewTopic{{Name: topic, Partitions: int32(s.plan.partitions), ReplicationFactor: int16(s.plan.factor), Configs: s.plan.configs}}
	if s.o.Transactions {
		for _, own := range []string{coordinator.TransactionTopic, coordinator.Topic} {
			topics = append(topics, controller.NewTopic{Name: own, Partitions: ownPartitions, ReplicationFactor: int16(s.plan.factor), Configs: map[string]string{
				"internal.segment.bytes": "2000", "retention.ms": "-1", "min.insync.replicas": s.plan.configs["min.insync.replicas"]}})
		}
	}
	reply, err := s.command(controller.CreateTopicsCommand{Topics: topics})
	if err == nil {
		for _, made := range reply.([]controller.CreatedTopic) {
			err = either(err, made.Err.OrNil())
		}
		s.topicID = reply.([]controller.CreatedTopic)[0].ID
	}
	if errors.Is(err, errNoController) || errors.Is(err, controller.ErrInvalidReplicationFactor) {
		s.after(50, s.createTopic)
	} else if err != nil {
		s.check.Fail("settings", tp.Partition{Topic: topic}, "%v", err)
	}
}

// slot is a partition's place in ids, -1 for what the simulation does not know.
func (s *sim) slot(id tp.Partition) int { return slices.Index(s.ids, id) }

// partition is the state of a partition of the topic in the newest image, nil before there is one.
func (s *sim) partition(index int32) *metadata.Partition {
	return s.state(tp.Partition{Topic: topic, Index: index})
}

// state is partition for any topic.
func (s *sim) state(id tp.Partition) *metadata.Partition {
	_, p, ok := s.quorum.img.Partition(id)
	if !ok {
		return nil
	}
	return p
}

func (s *sim) node(id int32) *node {
	if id < 1 || int(id) > len(s.nodes) {
		return nil
	}
	return s.nodes[id-1]
}

// chance is true once in n times.
func (s *sim) chance(n int) bool { return s.rng.IntN(n) == 0 }

// between draws from [low, high].
func (s *sim) between(low, high int64) int64 { return low + s.rng.Int64N(high-low+1) }

func (s *sim) touch(r *run) {
	if !slices.Contains(s.touched, r) {
		s.touched = append(s.touched, r)
	}
}

// observe looks at all replicas that the event may have changed, and then at what waits for them.
func (s *sim) observe() {
	for len(s.touched) > 0 {
		touched := s.touched
		s.touched = nil
		for _, r := range touched {
			r.observe()
		}
		for _, r := range touched {
			r.settleWaits()
		}
	}
}

// random is the source of ids.
type random struct{ s *sim }

func (r random) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(r.s.rng.Uint32())
	}
	return len(p), nil
}

func at(ms int64) time.Time { return time.UnixMilli(ms) }

// add sums up.
func (s *Stats) add(o Stats) {
	for _, x := range []struct{ to, from *int }{{&s.Acked, &o.Acked}, {&s.Refused, &o.Refused}, {&s.Read, &o.Read}, {&s.Direct, &o.Direct}, {&s.FollowerRead, &o.FollowerRead},
		{&s.Elections, &o.Elections}, {&s.Unclean, &o.Unclean}, {&s.Copied, &o.Copied}, {&s.Cleaned, &o.Cleaned}, {&s.Loads, &o.Loads}, {&s.Restores, &o.Restores},
		{&s.Truncated, &o.Truncated}, {&s.Kills, &o.Kills}, {&s.Power, &o.Power}, {&s.Wipes, &o.Wipes}, {&s.Tainted, &o.Tainted}, {&s.Crippled, &o.Crippled},
		{&s.Commits, &o.Commits}, {&s.Aborts, &o.Aborts}, {&s.Expired, &o.Expired}, {&s.Fenced, &o.Fenced}, {&s.Markers, &o.Markers}, {&s.Hidden, &o.Hidden}} {
		*x.to += *x.from
	}
}
