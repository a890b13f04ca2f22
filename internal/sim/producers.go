package sim

import (
	"errors"
	"fmt"
	"slices"

	"github.com/varve-io/varve/internal/commit"
	"github.com/varve-io/varve/internal/committed"
	"github.com/varve-io/varve/internal/coordinator"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/txn"
)

// account is a transactional id, and the processes that have it one after the other: the one before may not know that it is over.
type account struct {
	s         *sim
	id        string
	v2        bool // its clients know KIP-890
	timeoutMs int32
	outputs   []tp.Partition
	input     *tp.Partition // copied, with its offset in the transaction; nil for one that only writes
	processes []*process
}

// group is the consumer group of one that copies.
func (a *account) group() string { return "of " + a.id }

// process is a transactional producer as Java's: it does one thing after the other, tries again what may be tried again, aborts what it cannot
// go on with, and ends when another has taken its transactional id.
type process struct {
	a        *account
	number   int
	pid      int64
	epoch    int16
	seq      map[tp.Partition]int32 // next, of the present epoch
	position int64                  // of the input, -1 unknown
	seek     bool                   // the position is not there any more
	tx       *transaction           // under way
	ready    bool                   // has its producer id
	over     bool                   // has ended
	until    int64                  // until then it is paused
}

// transaction is one attempt.
type transaction struct {
	number  int
	commit  bool // what is to become of it
	todo    []toWrite
	added   []tp.Partition // told to the coordinator (version 1)
	written map[tp.Partition]int
	next    int64 // of the input, once it is committed
	renew   bool  // sequence numbers are not known any more: the epoch has to be raised
}

type toWrite struct {
	to     tp.Partition
	values []string
}

func (c *clients) initTransactions() {
	s := c.s
	data := s.ids[:s.plan.partitions]
	for i, from := range data[:len(data)-1] {
		c.accounts = append(c.accounts, &account{id: fmt.Sprint("copy-", i), input: &from, outputs: data[i+1:]})
	}
	for i := range 2 {
		c.accounts = append(c.accounts, &account{id: fmt.Sprint("write-", i), outputs: data})
	}
	for _, a := range c.accounts {
		a.s, a.v2, a.timeoutMs = s, s.chance(2), int32(s.between(1000, 4000))
	}
	for _, id := range data {
		c.consumers = append(c.consumers, &consumer{s: s, id: id, offset: -1, committed: true}, &consumer{s: s, id: id, offset: -1, committed: true, direct: true})
	}
}

// begin starts a process, which fences those before.
func (a *account) begin() {
	p := &process{a: a, number: len(a.processes) + 1, pid: txn.NoProducerID, epoch: txn.NoEpoch, position: -1}
	a.processes = append(a.processes, p)
	p.init()
}

func (p *process) String() string { return fmt.Sprintf("%s/%d", p.a.id, p.number) }

// now runs what a process does at this moment, or when it is awake again.
func (p *process) now(do func()) {
	switch s := p.a.s; {
	case p.over:
	case s.now < p.until:
		s.after(p.until-s.now, func() { p.now(do) })
	default:
		do()
	}
}

func (p *process) later(ms int64, do func()) {
	p.a.s.after(ms, func() { p.now(do) })
}

// step goes on after a moment, unless the process dies or is paused there. Sooner or later another takes its place.
func (p *process) step(do func()) {
	s := p.a.s
	if !s.calm && s.chance(50) {
		if s.chance(2) {
			p.end("dies")
			return
		}
		p.until = s.now + s.between(300, 6000)
		s.note("%s: is paused until %d", p, p.until-s.begun)
		if s.chance(3) {
			s.after(s.between(100, 3000), p.replace)
		}
	}
	p.later(s.between(1, 30), do)
}

// end ends a process. What it had under way is left to the coordinator, or to its successor.
func (p *process) end(why string) {
	s := p.a.s
	s.note("%s: %s", p, why)
	p.over = true
	s.after(s.between(30, 4000), p.replace)
}

// replace starts the next process, unless there is one.
func (p *process) replace() {
	if p.a.processes[len(p.a.processes)-1] == p {
		p.a.begin()
	}
}

// ask asks the broker that leads a partition, again and again until there is an answer that says more than "not now", or patience has come
// to its end: so many tries, 0 for no limit. In version 1, where nothing else keeps an old request from a new transaction, what the client has
// given up does not arrive: its connection is closed.
func (p *process) ask(leader tp.Partition, patience int, do func(r *run, answer func(reply any, err error)), then func(reply any, err error)) {
	s := p.a.s
	again := func(err error) {
		if patience == 1 {
			then(nil, err)
			return
		}
		p.later(s.between(20, 150), func() { p.ask(leader, max(patience-1, 0), do, then) })
	}
	n := s.node(s.leader(leader))
	if n == nil {
		p.later(1, func() { again(errLost) })
		return
	}
	given := false
	s.net.call(0, n.id, 1500, func(answer func(func())) {
		if n.run == nil || given && !p.a.v2 {
			return
		}
		do(n.run, func(reply any, err error) {
			answer(func() {
				p.now(func() {
					if final(err) {
						then(reply, err)
					} else {
						again(err)
					}
				})
			})
		})
	}, func() {
		p.now(func() {
			given = true
			again(errLost)
		})
	})
}

// final tells answers from those after which a client tries again.
func final(err error) bool {
	if err == nil {
		return true
	}
	for _, e := range []error{txn.ErrInvalidState, txn.ErrInvalidMapping, txn.ErrProducerFenced, txn.ErrAbortable, producerstate.ErrOutOfOrderSequence,
		producerstate.ErrInvalidProducerEpoch, producerstate.ErrInvalidTxnState} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// transact asks the coordinator of the transactional id.
func (p *process) transact(create bool, request func(t txn.Transaction, now int64) txn.Step, then func(step txn.Step, err error)) {
	p.ask(transactionsOf(p.a.id), 0, func(r *run, answer func(any, error)) {
		r.transact(p.a.id, create, func(t txn.Transaction) txn.Step { return request(t, r.n.wall()) }, func(step txn.Step, err error) { answer(step, either(err, step.Err)) })
	}, func(reply any, err error) {
		step, _ := reply.(txn.Step)
		then(step, err)
	})
}

// init gets the producer id and epoch, or the next epoch of a process that has them.
func (p *process) init() {
	s := p.a.s
	pid, epoch := p.pid, p.epoch
	p.transact(true, func(t txn.Transaction, now int64) txn.Step {
		return t.InitProducerID(txn.InitRequest{TimeoutMs: p.a.timeoutMs, TimeoutMaxMs: 900_000, ProducerID: pid, Epoch: epoch, V2: true, Allocate: s.allocate}, now)
	}, func(step txn.Step, err error) {
		if err != nil {
			s.stats.Fenced++
			p.end(fmt.Sprint("does not get a producer id: ", err))
			return
		}
		s.note("%s: gets %d/%d", p, step.ProducerID, step.Epoch)
		p.goOn(step.ProducerID, step.Epoch)
		if p.ready {
			p.rest()
			return
		}
		p.ready = true
		p.locate(p.rest)
	})
}

func (p *process) goOn(producerID int64, epoch int16) {
	if producerID != p.pid || epoch != p.epoch {
		p.pid, p.epoch, p.seq = producerID, epoch, map[tp.Partition]int32{}
	}
}

// locate finds out where the group has got to. An offset that a transaction may yet change is waited for (KIP-447).
func (p *process) locate(then func()) {
	if p.a.input == nil {
		then()
		return
	}
	p.ask(offsetsOf(p.a.group()), 0, func(r *run, answer func(any, error)) {
		r.fetchOffset(p.a.group(), committed.Partition{Topic: p.a.input.Topic, Partition: p.a.input.Index}, func(offset int64, unstable bool, err error) {
			if err == nil && unstable {
				err = errUnstable
			}
			answer(offset, err)
		})
	}, func(reply any, _ error) {
		p.position = reply.(int64)
		p.a.s.note("%s: the group is at %d", p, p.position)
		then()
	})
}

var errUnstable = errors.New("unstable offset commit")

// rest is between two transactions.
func (p *process) rest() {
	s := p.a.s
	p.tx = nil
	if s.calm && p.replaced() {
		p.over = true
		return
	}
	p.later(s.between(10, 200), func() {
		switch {
		case p.a.input != nil:
			p.read()
		case s.calm:
			p.rest()
		default:
			n := int(s.between(1, 4))
			var todo []toWrite
			for range n {
				todo = append(todo, toWrite{to: p.a.outputs[s.rng.IntN(len(p.a.outputs))], values: make([]string, s.between(1, 3))})
			}
			p.begin(todo, -1)
		}
	})
}

func (p *process) replaced() bool { return p.a.processes[len(p.a.processes)-1] != p }

// read reads the input. Each record that is shown becomes one of the output. A position that was deleted is left for the log start, but never
// for one below it: a new leader may have lost its word on where the log starts.
func (p *process) read() {
	s := p.a.s
	c := &consumer{s: s, id: *p.a.input, offset: p.position, committed: true, keep: true}
	if p.seek {
		c.offset = -1
	}
	n := s.node(s.leader(c.id))
	if n == nil {
		p.rest()
		return
	}
	s.net.call(0, n.id, 1000, func(answer func(func())) {
		if n.run == nil {
			return
		}
		n.run.serve(c)
		answer(func() {
			p.now(func() {
				var todo []toWrite
				next := c.offset
				for i, offset := range c.kept {
					if i == 4 {
						next = offset
						break
					}
					out := p.a.outputs[offset%int64(len(p.a.outputs))]
					at := slices.IndexFunc(todo, func(w toWrite) bool { return w.to == out })
					if at < 0 {
						at, todo = len(todo), append(todo, toWrite{to: out})
					}
					todo[at].values = append(todo[at].values, fmt.Sprintf(" of %s@%d", *p.a.input, offset))
				}
				if len(todo) == 0 {
					p.position, p.seek = max(p.position, next), next < 0
					p.rest()
					return
				}
				p.begin(todo, next)
			})
		})
	}, func() { p.now(p.rest) })
}

// begin begins a transaction; next is the offset of the input that belongs to it, -1 for none.
func (p *process) begin(todo []toWrite, next int64) {
	s := p.a.s
	s.transactions++
	tx := &transaction{number: s.transactions, commit: s.calm || !s.chance(4), todo: todo, written: map[tp.Partition]int{}, next: next}
	p.tx = tx
	s.note("%s: transaction %d", p, tx.number)
	p.write()
}

// write does the next of what the transaction consists of.
func (p *process) write() {
	tx := p.tx
	switch {
	case len(tx.todo) > 0:
		w := tx.todo[0]
		p.enter(w.to, func() { p.produce(w) })
	case tx.next >= 0:
		p.enter(offsetsOf(p.a.group()), p.commitOffset)
	default:
		p.finish(tx.commit)
	}
}

// enter puts a partition into the transaction, in version 1.
func (p *process) enter(id tp.Partition, then func()) {
	tx := p.tx
	if p.a.v2 || slices.Contains(tx.added, id) {
		then()
		return
	}
	pid, epoch := p.pid, p.epoch
	p.ask(transactionsOf(p.a.id), 0, func(r *run, answer func(any, error)) {
		r.addToTxn(p.a.id, pid, epoch, id, false, func(err error) { answer(nil, err) })
	}, func(_ any, err error) {
		switch {
		case errors.Is(err, txn.ErrProducerFenced), errors.Is(err, txn.ErrInvalidMapping):
			p.fenced(err)
		case err != nil:
			p.finish(false)
		default:
			tx.added = append(tx.added, id)
			p.step(then)
		}
	})
}

func (p *process) fenced(err error) {
	p.a.s.stats.Fenced++
	p.end(fmt.Sprint("is fenced: ", err))
}

// produce writes one batch.
func (p *process) produce(w toWrite) {
	tx, s := p.tx, p.a.s
	b := recordbatch.NewBuilder()
	b.ProducerID, b.ProducerEpoch, b.BaseSequence, b.Transactional = p.pid, p.epoch, p.seq[w.to], true
	for _, v := range w.values {
		b.Add(recordbatch.Record{Timestamp: s.now, Value: fmt.Appendf(nil, "transaction %d%s", tx.number, v)})
	}
	raw, err := b.Build()
	if err != nil {
		s.check.Fail("settings", w.to, "%v", err)
		return
	}
	patience := 0
	if !s.calm && s.chance(3) {
		patience = int(s.between(1, 3))
	}
	p.ask(w.to, patience, func(r *run, answer func(any, error)) {
		r.appendInTxn(p.a, w.to, slices.Clone(raw), func(err error) { answer(nil, err) })
	}, func(_ any, err error) {
		if err != nil {
			s.note("%s: transaction %d: %v", p, tx.number, err)
			tx.renew = true
			p.finish(false)
			return
		}
		p.seq[w.to] = recordbatch.AddSequence(p.seq[w.to], int32(len(w.values)))
		tx.written[w.to] += len(w.values)
		tx.todo = tx.todo[1:]
		p.step(p.write)
	})
}

// appendInTxn is kafkaapi's Produce of a transactional batch: confirm, then append.
func (r *run) appendInTxn(a *account, id tp.Partition, raw []byte, answer func(error)) {
	s := r.n.s
	part := r.parts[s.slot(id)]
	if part == nil {
		answer(partition.ErrNotLeader)
		return
	}
	h, err := recordbatch.ParseHeader(raw)
	if err != nil {
		s.check.Fail("settings", id, "%v", err)
		return
	}
	w := partition.Write{Records: raw, AllReplicas: true}
	end, open := part.p.TxnState(h.ProducerID, h.ProducerEpoch)
	w.Confirmed, w.ConfirmedAt = !a.v2 && s.o.Bug != TrustOpen, end
	write := func() {
		if !part.here() {
			return
		}
		w.Now = at(r.n.wall())
		res, err := part.p.Append(w)
		s.touch(r)
		if err != nil {
			answer(err)
			return
		}
		s.note("%s: broker %d: batch of %d/%d at %d", id, r.n.id, h.ProducerID, h.ProducerEpoch, res.FirstOffset)
		if r.moment("before a batch is committed") {
			return
		}
		part.whenCommitted(commit.Write{Next: res.LastOffset + 1, Epoch: res.Epoch}, answer)
	}
	if open || s.o.Bug == NoVerification {
		s.after(s.aside(), func() { // as long as other partitions of the request have to be asked for
			if r.alive() {
				write()
			}
		})
		return
	}
	r.enlist(a.id, h.ProducerID, h.ProducerEpoch, id, a.v2, func(err error) {
		if err != nil {
			answer(refusal(err))
			return
		}
		write()
	})
}

// aside is how long a request is held up by what does not concern it.
func (s *sim) aside() int64 {
	if s.calm || !s.chance(6) {
		return 0
	}
	return s.between(1, 3000)
}

// refusal is kafkaapi's.
func refusal(err error) error {
	if errors.Is(err, txn.ErrProducerFenced) {
		return fmt.Errorf("%w: %w", producerstate.ErrInvalidProducerEpoch, err)
	}
	return err
}

// commitOffset commits the input's offset in the transaction.
func (p *process) commitOffset() {
	tx := p.tx
	in := coordinator.InTxn{ProducerID: p.pid, Epoch: p.epoch, Checked: p.a.v2}
	o := committed.Offset{Offset: tx.next, LeaderEpoch: -1, Metadata: fmt.Sprint("transaction ", tx.number), ExpiresAt: -1}
	p.ask(offsetsOf(p.a.group()), 0, func(r *run, answer func(any, error)) {
		r.commitOffset(p.a, in, o, func(err error) { answer(nil, err) })
	}, func(_ any, err error) {
		switch {
		case errors.Is(err, txn.ErrProducerFenced), errors.Is(err, txn.ErrInvalidMapping), errors.Is(err, producerstate.ErrInvalidProducerEpoch):
			p.fenced(err)
		case err != nil:
			p.finish(false)
		default:
			tx.written[offsetsOf(p.a.group())]++
			p.position, tx.next = tx.next, -1
			p.step(p.write)
		}
	})
}

// commitOffset is kafkaapi's TxnOffsetCommit.
func (r *run) commitOffset(a *account, in coordinator.InTxn, o committed.Offset, answer func(error)) {
	id := offsetsOf(a.group())
	part := r.parts[r.n.s.slot(id)]
	if part == nil {
		answer(coordinator.ErrNotCoordinator)
		return
	}
	write := func() {
		r.commitInTxn(a.group(), in, committed.Partition{Topic: a.input.Topic, Partition: a.input.Index}, o, answer)
	}
	end, open := part.p.TxnState(in.ProducerID, in.Epoch)
	in.ConfirmedAt = end
	if open {
		write()
		return
	}
	r.enlist(a.id, in.ProducerID, in.Epoch, id, a.v2, func(err error) {
		if err != nil {
			answer(err)
			return
		}
		write()
	})
}

// finish ends the transaction.
func (p *process) finish(commit bool) {
	tx, s := p.tx, p.a.s
	if !commit && !p.a.v2 && len(tx.added) == 0 {
		p.ended(commit)
		return
	}
	s.check.Ends(tx.number, commit, tx.written)
	pid, epoch := p.pid, p.epoch
	p.transact(false, func(t txn.Transaction, now int64) txn.Step {
		return t.End(txn.EndRequest{ProducerID: pid, Epoch: epoch, Commit: commit, V2: p.a.v2, Allocate: s.allocate}, now)
	}, func(step txn.Step, err error) {
		if err != nil {
			p.fenced(err)
			return
		}
		s.note("%s: transaction %d is over, commit %v", p, tx.number, commit)
		s.check.Ended(tx.number, commit)
		if commit {
			s.stats.Commits++
		} else {
			s.stats.Aborts++
		}
		if p.a.v2 {
			p.goOn(step.ProducerID, step.Epoch)
		}
		p.step(func() { p.ended(commit) })
	})
}

// ended is after a transaction.
func (p *process) ended(commit bool) {
	then := p.rest
	if p.tx.renew && !p.a.v2 {
		then = p.init // the epoch after: nobody knows how far the sequences of this one got
	}
	if !commit {
		p.locate(then)
		return
	}
	then()
}
