package sim

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/varve-io/varve/internal/commit"
	"github.com/varve-io/varve/internal/coordinator"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/txn"
)

// coordinatorMs is how long a coordinator waits for what it wrote to be committed.
const coordinatorMs = 1000

// elect makes a broker the coordinator of what a partition of one of the cluster's own topics holds.
func (r *run) elect(part *replica) {
	_, epoch := part.p.Leadership()
	switch part.id.Topic {
	case coordinator.TransactionTopic:
		l := &ledger{part: part, epoch: epoch, loading: true, ids: map[string]*entry{}}
		part.ledger = l
		r.n.s.after(r.n.s.between(1, 60), l.load)
	case coordinator.Topic:
		d := newDesk(part, epoch)
		part.desk = d
		r.n.s.after(r.n.s.between(1, 60), d.load)
	}
}

func (part *replica) resign() { part.ledger, part.desk = nil, nil }

// ledger is coordinator.ledger: one partition of __transaction_state at its leader.
type ledger struct {
	part    *replica
	epoch   int32
	loading bool
	failed  error
	ids     map[string]*entry
}

// entry is a transactional id. What comes while its state is being written waits.
type entry struct {
	l     *ledger
	held  txn.Held
	busy  bool
	queue []func()
	due   int64
}

func (l *ledger) stopped() bool {
	return !l.part.r.alive() || !l.part.here() || l.part.ledger != l
}

func (l *ledger) load() {
	if l.stopped() {
		return
	}
	r, s := l.part.r, l.part.r.n.s
	states := txn.States{}
	end, err := coordinator.Read(l.part.p.Log(), func(h *recordbatch.Header, rec *recordbatch.Record) {
		if h.IsControl() {
			return
		}
		if err := states.Take(rec.Key, rec.Value); err != nil {
			s.check.Fail("settings", l.part.id, "offset %d: %v", rec.Offset, err)
		}
	})
	s.note("%s: broker %d reads %d transactional ids up to %d: %v", l.part.id, r.n.id, len(states), end, err)
	if err != nil {
		l.loading, l.failed = false, err
		return
	}
	l.settle(states, commit.Write{Next: end, Epoch: l.epoch}, 0)
}

// settle is coordinator.ledger.settle.
func (l *ledger) settle(states txn.States, read commit.Write, tries int) {
	l.part.whenCommitted(read, func(err error) {
		switch {
		case l.stopped():
		case err == nil:
			l.loaded(states)
		default:
			l.part.r.n.s.after(pause(tries), func() { l.settle(states, read, tries+1) })
		}
	})
}

func (l *ledger) loaded(states txn.States) {
	s := l.part.r.n.s
	l.loading = false
	for _, id := range slices.Sorted(maps.Keys(states)) {
		e := l.host(states[id])
		if end := e.held.Pending(); s.o.Bug == ForgetDecisions {
			e.adopt(nil)
		} else {
			e.adopt(end)
		}
	}
}

func (l *ledger) host(t txn.Transaction) *entry {
	e := &entry{l: l, held: txn.Held{Transaction: t}}
	l.ids[t.ID()] = e
	return e
}

// ledger finds the place of a transactional id.
func (r *run) ledger(id string) (*ledger, error) {
	part := r.parts[r.n.s.slot(transactionsOf(id))]
	switch {
	case part == nil || part.ledger == nil:
		return nil, coordinator.ErrNotCoordinator
	case part.ledger.loading:
		return nil, coordinator.ErrLoading
	case part.ledger.failed != nil:
		return nil, coordinator.ErrUnavailable
	}
	return part.ledger, nil
}

// transact is coordinator.Transactions.step.
func (r *run) transact(id string, create bool, request func(txn.Transaction) txn.Step, done func(txn.Step, error)) {
	l, err := r.ledger(id)
	if err != nil {
		done(txn.Step{}, err)
		return
	}
	e := l.ids[id]
	if e == nil && create {
		e = l.host(txn.New(id))
	}
	if e == nil {
		done(request(txn.New(id)), nil) // which writes nothing
		return
	}
	e.take(request, done)
}

func (e *entry) take(request func(txn.Transaction) txn.Step, done func(txn.Step, error)) {
	if e.busy {
		e.queue = append(e.queue, func() { e.take(request, done) })
		return
	}
	s, err := e.held.Do(request)
	if err != nil {
		done(s, err)
		return
	}
	e.carryOut(s, func(err error) { done(s, err) })
}

// carryOut is coordinator.entry.carryOut.
func (e *entry) carryOut(s txn.Step, done func(error)) {
	part, r := e.l.part, e.l.part.r
	sim := r.n.s
	if !s.Write {
		done(nil)
		return
	}
	if r.moment("before a state is written") {
		return
	}
	w, err := coordinator.Append(part.p, []coordinator.Record{coordinator.Record(s.Next.Record())}, nil, e.l.epoch, at(r.n.wall()))
	sim.touch(r)
	if err != nil {
		done(stateNotWritten(err))
		return
	}
	sim.note("%s: broker %d: %s (%d/%d) becomes %s at %d", part.id, r.n.id, s.Next.ID(), s.ProducerID, s.Epoch, s.Next.State(), w.Next-1)
	if sim.o.Bug == MarkEarly && s.End != nil {
		e.finish(*s.End, s.End.Partitions, 0)
	}
	e.busy = true
	if r.moment("before a state is committed") {
		return
	}
	part.whenCommitted(w, func(err error) {
		e.busy = false
		if err != nil {
			e.held.Doubted()
			e.resolve(w, s, 0)
			done(stateNotWritten(err))
		} else {
			e.held.Written(s)
			e.adopt(s.End)
			if !r.moment("before a step is answered") {
				done(nil)
			}
		}
		queue := e.queue
		e.queue = nil
		for _, next := range queue {
			next()
		}
	})
}

func stateNotWritten(err error) error {
	if errors.Is(err, partition.ErrNotLeader) || errors.Is(err, partition.ErrFencedEpoch) {
		return coordinator.ErrNotCoordinator
	}
	return fmt.Errorf("%w: %v", coordinator.ErrUnavailable, err)
}

// resolve waits for the fate of a write that took too long.
func (e *entry) resolve(w commit.Write, s txn.Step, tries int) {
	sim := e.l.part.r.n.s
	e.l.part.whenCommitted(w, func(err error) {
		switch {
		case e.l.stopped():
		case err == nil:
			e.held.Written(s)
			e.adopt(s.End)
		case sim.o.Bug != GiveUpDoubt || !errors.Is(err, partition.ErrNotLeader):
			sim.after(pause(tries), func() { e.resolve(w, s, tries+1) })
		}
	})
}

// adopt is coordinator.entry.adopt.
func (e *entry) adopt(end *txn.Decision) {
	if due := e.held.NextDeadline(); due != e.due {
		e.due = due
		if due > 0 {
			e.expireAt(due)
		}
	}
	if end != nil {
		e.finish(*end, end.Partitions, 0)
	}
}

func (e *entry) expireAt(due int64) {
	r, s := e.l.part.r, e.l.part.r.n.s
	s.after(max(due-r.n.wall(), 1), func() {
		if e.l.stopped() || e.due != due || e.held.Doubtful() {
			return
		}
		e.due = 0
		e.take(func(t txn.Transaction) txn.Step { return t.Expire(true, s.allocate, r.n.wall()) }, func(step txn.Step, err error) {
			switch {
			case err != nil:
				s.after(1000, func() {
					if e.due == 0 && !e.held.Doubtful() {
						e.adopt(nil)
					}
				})
			case step.Write:
				s.stats.Expired++
				s.note("%s outlived its timeout", e.held.ID())
			default:
				e.adopt(nil)
			}
		})
	})
}

// finish is coordinator.entry.finish: markers until all partitions have theirs, then the last state.
func (e *entry) finish(d txn.Decision, left []tp.Partition, tries int) {
	r, s := e.l.part.r, e.l.part.r.n.s
	if e.l.stopped() {
		return
	}
	if len(left) == 0 {
		e.complete(0)
		return
	}
	if r.moment("before markers are sent") {
		return
	}
	var rest []tp.Partition
	waiting := len(left)
	ending := coordinator.Ending{Decision: d, CoordinatorEpoch: e.l.epoch}
	for _, id := range left {
		leader := int32(-1)
		if _, state, ok := r.img.Partition(id); ok {
			leader = state.Leader
		}
		e.l.sendMarker(ending, id, leader, func(err error) {
			if waiting--; err != nil && !producerstate.Outdated(err) {
				rest = append(rest, id)
			}
			if s.o.Bug == CompleteEarly {
				rest = nil
			}
			switch {
			case r.moment("after a marker is answered") || waiting > 0 || e.l.stopped():
			case len(rest) == 0:
				e.complete(0)
			default:
				s.after(pause(tries), func() { e.finish(d, rest, tries+1) })
			}
		})
	}
	s.after(s.between(1, 5), func() {
		if r.alive() {
			r.moment("while markers are under way")
		}
	})
}

// pause is coordinator.ledger.pause, in ms.
func pause(tries int) int64 { return min(int64(5)<<min(tries, 10), 500) }

func (e *entry) complete(tries int) {
	r, s := e.l.part.r, e.l.part.r.n.s
	if e.l.stopped() || e.held.Doubtful() || r.moment("before a transaction is completed") {
		return
	}
	e.take(func(t txn.Transaction) txn.Step { return t.Completed(r.n.wall()) }, func(_ txn.Step, err error) {
		if err != nil {
			s.after(pause(tries), func() { e.complete(tries + 1) })
		}
	})
}

// sendMarker has the leader of a partition write the marker of a transaction. In version 1 nothing tells a marker that the coordinator has given
// up from the next one, so that it must not arrive: its connection is closed. What one sent that was deposed or died before it gave up does.
func (l *ledger) sendMarker(e coordinator.Ending, id tp.Partition, leader int32, done func(error)) {
	r, s := l.part.r, l.part.r.n.s
	here := func(err error) {
		if r.alive() {
			done(err)
		}
	}
	to := s.node(leader)
	if to == nil {
		s.after(1, func() { here(errLost) })
		return
	}
	gone := false
	s.net.call(r.n.id, leader, 1200, func(answer func(func())) {
		s.after(s.aside(), func() {
			if to.run != nil && (e.V2 || !gone) {
				to.run.mark(e, id, func(err error) { answer(func() { here(err) }) })
			}
		})
	}, func() {
		gone = !l.stopped()
		here(errLost)
	})
}

// mark is coordinator.Groups.WriteMarkers for one partition.
func (r *run) mark(e coordinator.Ending, id tp.Partition, done func(error)) {
	s := r.n.s
	part := r.parts[s.slot(id)]
	if part == nil {
		done(partition.ErrNotLeader)
		return
	}
	if s.o.Bug == AnyCoordinator {
		e.CoordinatorEpoch = 0
	}
	w, refused, err := coordinator.AppendMarker(part.p, e, at(r.n.wall()))
	s.touch(r)
	if err != nil {
		done(err)
		return
	}
	if refused != nil {
		s.note("%s: broker %d refuses a marker: %v", id, r.n.id, refused)
		if s.o.Bug == TrustRefusals {
			done(refused)
			return
		}
	} else {
		s.stats.Markers++
		s.note("%s: broker %d: marker of %d/%d, commit %v, by %d, at %d", id, r.n.id, e.ProducerID, e.Epoch, e.Commit, e.CoordinatorEpoch, w.Next-1)
		if part.desk != nil {
			part.desk.ended(e.ProducerID, e.Commit || s.o.Bug == ApplyAborted)
		}
		if r.moment("before a marker is committed") {
			return
		}
	}
	part.whenCommitted(w, func(err error) { done(either(err, refused)) })
}

// whenCommitted tells when what was appended is committed, or cannot be by this leader, or takes too long: errLost. A process that ends is told nothing.
func (part *replica) whenCommitted(w commit.Write, then func(error)) {
	r, s := part.r, part.r.n.s
	part.acks = append(part.acks, &ack{last: w.Next - 1, epoch: w.Epoch, deadline: s.now + coordinatorMs, answer: func(_, _ int64, err error) {
		s.after(0, func() {
			if r.alive() {
				then(err)
				s.touch(r)
			}
		})
	}})
	s.touch(r)
	s.after(coordinatorMs+1, func() { s.touch(r) })
}

// enlist is transact.Service.Enlist for one partition.
func (r *run) enlist(id string, producerID int64, epoch int16, part tp.Partition, add bool, done func(error)) {
	s := r.n.s
	here := func(err error) {
		if r.alive() {
			done(err)
		}
	}
	leader := int32(-1)
	if _, state, ok := r.img.Partition(transactionsOf(id)); ok {
		leader = state.Leader
	}
	to := s.node(leader)
	if to == nil {
		s.after(1, func() { here(coordinator.ErrUnavailable) })
		return
	}
	s.net.call(r.n.id, leader, 2000, func(answer func(func())) {
		if to.run == nil {
			return
		}
		reply := func(err error) { answer(func() { here(err) }) }
		if add {
			to.run.addToTxn(id, producerID, epoch, part, true, reply)
			return
		}
		to.run.transact(id, false, func(t txn.Transaction) txn.Step {
			return txn.Step{Next: t, Err: t.Verify(producerID, epoch, []tp.Partition{part})[0]}
		}, func(step txn.Step, err error) { reply(either(err, step.Err)) })
	}, func() { here(coordinator.ErrUnavailable) })
}

func (r *run) addToTxn(id string, producerID int64, epoch int16, part tp.Partition, v2 bool, done func(error)) {
	r.transact(id, false, func(t txn.Transaction) txn.Step {
		return t.AddPartitions(producerID, epoch, []tp.Partition{part}, v2, r.n.wall())
	}, func(step txn.Step, err error) { done(either(err, step.Err)) })
}

func either(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

// allocate hands out producer ids, far from those of plain producers.
func (s *sim) allocate() (int64, error) {
	s.producerIDs++
	return 1000 + s.producerIDs, nil
}

// transactionsOf is the partition that holds a transactional id, offsetsOf the one that holds a group.
func transactionsOf(id string) tp.Partition {
	return tp.Partition{Topic: coordinator.TransactionTopic, Index: coordinator.PartitionFor(id, ownPartitions)}
}

func offsetsOf(group string) tp.Partition {
	return tp.Partition{Topic: coordinator.Topic, Index: coordinator.PartitionFor(group, ownPartitions)}
}

// moment is a place between two steps of a transaction, where the process may end. It says whether it did.
func (r *run) moment(where string) bool {
	s := r.n.s
	if s.calm {
		return false
	}
	s.moments++
	if s.moments != s.o.CrashAt && !(s.plan.has(Moments) && s.chance(60)) {
		return false
	}
	s.note("broker %d: a crash %s", r.n.id, where)
	if s.spares(r.n) && s.chance(2) {
		s.stats.Power++
		r.n.power()
	} else {
		s.stats.Kills++
		r.n.kill(r)
	}
	s.comesBack(r.n)
	return true
}
