package coordinator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/varve-io/varve/internal/commit"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/txn"
)

// TransactionTopic is the internal topic that holds the states of transactional ids.
const TransactionTopic = "__transaction_state"

// TransactionConfig is asked for at each use, so that changes take effect.
type TransactionConfig struct {
	Partitions    int                    // of the topic
	Expects       func(index int32) bool // see Config
	CommitTimeout time.Duration          // how long a state may take to be committed
	TimeoutMaxMs  int32                  // transaction.max.timeout.ms
	ExpirationMs  int64                  // transactional.id.expiration.ms
	V2            bool                   // the cluster's transaction.version is 2 (KIP-890)
}

// Ending are the markers that end a transaction. CoordinatorEpoch is the leader epoch of the partition that holds its state, which
// partitions know an older coordinator by.
type Ending struct {
	txn.Decision
	CoordinatorEpoch int32
}

// Markers writes the markers of a transaction to some of its partitions, wherever they are led, and returns those that do not have
// theirs yet. It returns when it has tried all, or ctx ends.
type Markers func(ctx context.Context, e Ending, partitions []tp.Partition) (left []tp.Partition)

// Transactions hosts the transactional ids of this broker on the partitions of __transaction_state. The rules of an id are package
// txn's. Each id has a lock of its own, which is held while its state is written, so that writes of different ids share the way to the
// replicas.
type Transactions struct {
	hosts    hosts[*ledger]
	config   func() TransactionConfig
	allocate func(context.Context) (int64, error)
	markers  Markers
	log      *slog.Logger

	ctx    context.Context // of what goes on beside requests
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// NewTransactions returns a host without partitions. allocate hands out producer ids.
func NewTransactions(config func() TransactionConfig, allocate func(context.Context) (int64, error), markers Markers, log *slog.Logger) *Transactions {
	ts := &Transactions{hosts: newHosts[*ledger](), config: config, allocate: allocate, markers: markers, log: log}
	ts.ctx, ts.cancel = context.WithCancel(context.Background())
	return ts
}

// ledger is one partition of the topic.
type ledger struct {
	seat
	owner *Transactions
	ids   map[string]*entry
}

// entry is a transactional id and its clock.
type entry struct {
	ledger *ledger

	mu    sync.Mutex
	held  txn.Held
	gone  bool // out of the ledger
	timer *time.Timer
	due   int64
}

// Elect makes this broker the coordinator of a partition's transactional ids, as Groups.Elect does of groups.
func (ts *Transactions) Elect(part *partition.Partition, done func()) {
	l := &ledger{seat: newSeat(ts.ctx, part), owner: ts, ids: map[string]*entry{}}
	ts.hosts.elect(part.ID().Index, l, done)
}

// Resign stops coordinating a partition's ids.
func (ts *Transactions) Resign(index int32) { ts.hosts.resign(index) }

// Close resigns everywhere and for good, and returns when nothing goes on any more.
func (ts *Transactions) Close() {
	ts.cancel()
	ts.hosts.close()
	ts.wg.Wait()
}

func (l *ledger) close() {
	l.end()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, e := range l.ids {
		e.timer.Stop()
	}
}

func (l *ledger) load() {
	states := txn.States{}
	skipped, first := 0, error(nil)
	end, err := Read(l.part.Log(), func(h *recordbatch.Header, r *recordbatch.Record) {
		if h.IsControl() {
			return
		}
		if err := states.Take(r.Key, r.Value); err != nil {
			if skipped++; first == nil {
				first = fmt.Errorf("offset %d: %w", r.Offset, err)
			}
		}
	})
	if skipped > 0 {
		l.owner.log.Warn("unreadable records of transactions were skipped", "partition", l.part.ID().String(), "count", skipped, "first", first)
	}
	if err == nil {
		l.settle(end)
	}
	l.mu.Lock()
	l.loading, l.failed = false, err
	if err != nil {
		l.owner.log.Error("transactions could not be loaded", "partition", l.part.ID().String(), "cause", err)
	}
	var entries []*entry
	if err == nil && !l.closed {
		for _, t := range states {
			entries = append(entries, l.host(t))
		}
	}
	l.mu.Unlock()
	for _, e := range entries {
		e.mu.Lock()
		e.adopt(e.held.Pending())
		e.mu.Unlock()
	}
}

// host makes an entry; the ledger is locked.
func (l *ledger) host(t txn.Transaction) *entry {
	e := &entry{ledger: l, held: txn.Held{Transaction: t}}
	e.timer = time.AfterFunc(time.Hour, e.expire)
	e.timer.Stop()
	l.ids[t.ID()] = e
	return e
}

// find returns the entry of an id, locked; with create also of one that nobody has used.
func (ts *Transactions) find(id string, create bool) (*entry, error) {
	for {
		l, err := ts.hosts.ready(id, func() (int, func(int32) bool) {
			c := ts.config()
			return c.Partitions, c.Expects
		})
		if err != nil {
			return nil, err
		}
		e := l.ids[id]
		if e == nil && create {
			e = l.host(txn.New(id))
		}
		l.mu.Unlock()
		if e == nil {
			return nil, nil
		}
		e.mu.Lock()
		if !e.gone {
			return e, nil
		}
		e.mu.Unlock()
	}
}

// step carries out a request of an id: the write, the change, and what follows from it.
func (ts *Transactions) step(id string, create bool, do func(txn.Transaction) txn.Step) (txn.Step, error) {
	e, err := ts.find(id, create)
	if err != nil {
		return txn.Step{}, err
	}
	if e == nil {
		return do(txn.New(id)), nil // which writes nothing
	}
	defer e.mu.Unlock()
	s, err := e.held.Do(do)
	if err != nil {
		return txn.Step{}, err
	}
	if err := e.carryOut(s); err != nil {
		return txn.Step{}, err
	}
	return s, nil
}

// carryOut writes a step and goes over to what follows it; the entry is locked. An error says that the step does not count, or that
// nobody knows yet.
func (e *entry) carryOut(s txn.Step) error {
	if !s.Write {
		e.prune()
		return nil
	}
	w, err := e.ledger.append([]Record{Record(s.Next.Record())}, nil)
	if err != nil {
		e.prune()
		return stateNotWritten(err)
	}
	if err := committedWithin(e.ledger.owner.config().CommitTimeout, w); err != nil {
		e.held.Doubted()
		e.ledger.spawn(func() { e.resolve(w, s) })
		return stateNotWritten(err)
	}
	e.held.Written(s)
	e.adopt(s.End)
	return nil
}

// prune forgets an id that was not used after all.
func (e *entry) prune() {
	if e.held.Known() {
		return
	}
	e.remove()
}

func (e *entry) remove() {
	e.gone = true
	e.timer.Stop()
	e.ledger.mu.Lock()
	defer e.ledger.mu.Unlock()
	if e.ledger.ids[e.held.ID()] == e {
		delete(e.ledger.ids, e.held.ID())
	}
}

// stateNotWritten tells clients what a failed write means to them.
func stateNotWritten(err error) error {
	if errors.Is(err, partition.ErrNotLeader) || errors.Is(err, partition.ErrFencedEpoch) {
		return ErrNotCoordinator
	}
	return fmt.Errorf("%w: %v", ErrUnavailable, err)
}

// resolve waits for the fate of a write that took too long. If this broker leads no more, its successor reads what counts, and the ledger
// ends. Until then not to lead means nothing: a broker that does not reach the controller leads on once it does.
func (e *entry) resolve(w commit.Write, s txn.Step) {
	for tries := 0; e.ledger.ctx.Err() == nil; tries++ {
		if commit.Wait(e.ledger.ctx, time.Minute, []commit.Write{w})[0] == nil {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.held.Written(s)
			e.adopt(s.End)
			return
		}
		e.ledger.pause(tries)
	}
}

// spawn runs what goes on beside requests, unless the end has come.
func (l *ledger) spawn(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.owner.wg.Add(1)
	go func() {
		defer l.owner.wg.Done()
		f()
	}()
}

// adopt sets the clock of a state that is durable and sends the markers that are due; the entry is locked.
func (e *entry) adopt(end *txn.Decision) {
	if due := e.held.NextDeadline(); due != e.due {
		if e.due = due; due == 0 {
			e.timer.Stop()
		} else {
			e.timer.Reset(time.Duration(max(due-now(), 0)) * time.Millisecond)
		}
	}
	if end != nil {
		e.ledger.spawn(func() { e.finish(*end) })
	}
}

// Pauses between tries of what has to succeed in the end.
const (
	backoffMin = 5 * time.Millisecond
	backoffMax = 500 * time.Millisecond
)

// finish writes the markers of a decision, as long as it takes, and completes the transaction.
func (e *entry) finish(d txn.Decision) {
	ts, ctx := e.ledger.owner, e.ledger.ctx
	left := d.Partitions
	for tries := 0; len(left) > 0; tries++ {
		if left = ts.markers(ctx, Ending{d, e.ledger.epoch}, left); len(left) > 0 {
			e.ledger.pause(tries)
		}
		if ctx.Err() != nil {
			return
		}
	}
	for tries := 0; ctx.Err() == nil; tries++ {
		e.mu.Lock()
		err := error(nil)
		if !e.held.Doubtful() { // else it is written already, and its fate is waited for
			err = e.carryOut(e.held.Completed(now()))
		}
		e.mu.Unlock()
		if err == nil {
			return
		}
		e.ledger.pause(tries)
	}
}

// expire aborts a transaction that has outlived its timeout.
func (e *entry) expire() {
	e.ledger.spawn(func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.gone || e.held.Doubtful() {
			return
		}
		e.due = 0
		s := e.held.Expire(e.ledger.owner.config().V2, e.ledger.owner.allocator(e.ledger.ctx), now())
		err := s.Err
		if err == nil {
			err = e.carryOut(s)
		}
		if err == nil && s.Write {
			e.ledger.owner.log.Warn("a transaction outlived its timeout and is aborted", "transactional.id", e.held.ID())
		}
		if err != nil && e.ledger.ctx.Err() == nil { // once more, later
			e.timer.Reset(time.Second)
			return
		}
		if !s.Write {
			e.adopt(nil)
		}
	})
}

// allocatePatience bounds the wait for the controller that a request needs a producer id of.
const allocatePatience = 10 * time.Second

func (ts *Transactions) allocator(ctx context.Context) txn.Allocate {
	return func() (int64, error) {
		ctx, cancel := context.WithTimeout(ctx, allocatePatience)
		defer cancel()
		id, err := ts.allocate(ctx)
		if err != nil {
			err = fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		return id, err
	}
}

// Init serves InitProducerId with a transactional id; -1 and -1 for a producer that has none yet.
func (ts *Transactions) Init(ctx context.Context, id string, timeoutMs int32, producerID int64, epoch int16) (int64, int16, error) {
	c := ts.config()
	s, err := ts.step(id, true, func(t txn.Transaction) txn.Step {
		return t.InitProducerID(txn.InitRequest{TimeoutMs: timeoutMs, TimeoutMaxMs: c.TimeoutMaxMs, ProducerID: producerID, Epoch: epoch, V2: c.V2,
			Allocate: ts.allocator(ctx)}, now())
	})
	if err = cmp.Or(err, s.Err); err != nil {
		return txn.NoProducerID, txn.NoEpoch, err
	}
	return s.ProducerID, s.Epoch, nil
}

// Add puts partitions into a producer's transaction (AddPartitionsToTxn, AddOffsetsToTxn).
func (ts *Transactions) Add(id string, producerID int64, epoch int16, partitions []tp.Partition, v2 bool) error {
	s, err := ts.step(id, false, func(t txn.Transaction) txn.Step { return t.AddPartitions(producerID, epoch, partitions, v2, now()) })
	return cmp.Or(err, s.Err)
}

// Verify tells for each partition whether it is in a producer's transaction (AddPartitionsToTxn with VerifyOnly).
func (ts *Transactions) Verify(id string, producerID int64, epoch int16, partitions []tp.Partition) ([]error, error) {
	e, err := ts.find(id, false)
	if err != nil {
		return nil, err
	}
	if e == nil {
		return txn.New(id).Verify(producerID, epoch, partitions), nil
	}
	defer e.mu.Unlock()
	if e.held.Doubtful() {
		return nil, txn.ErrConcurrent
	}
	return e.held.Verify(producerID, epoch, partitions), nil
}

// End serves EndTxn. It returns when the decision is durable; the markers follow. v2 is EndTxn v5 and above, for which the producer id
// and epoch to go on with are returned.
func (ts *Transactions) End(ctx context.Context, id string, producerID int64, epoch int16, commit, v2 bool) (int64, int16, error) {
	s, err := ts.step(id, false, func(t txn.Transaction) txn.Step {
		return t.End(txn.EndRequest{ProducerID: producerID, Epoch: epoch, Commit: commit, V2: v2, Allocate: ts.allocator(ctx)}, now())
	})
	if err = cmp.Or(err, s.Err); err != nil {
		return txn.NoProducerID, txn.NoEpoch, err
	}
	return s.ProducerID, s.Epoch, nil
}

// Describe serves DescribeTransactions for one id.
func (ts *Transactions) Describe(id string) (txn.Description, error) {
	e, err := ts.find(id, false)
	if err != nil {
		return txn.Description{}, err
	}
	if e == nil {
		return txn.Description{}, txn.ErrNotFound
	}
	defer e.mu.Unlock()
	return e.held.Describe()
}

// List serves ListTransactions: all ids of this broker in their order. It fails while a partition is loading, since the list would not be
// whole.
func (ts *Transactions) List() ([]txn.Description, error) {
	var out []txn.Description
	for _, l := range ts.hosts.all() {
		if err := l.lock(); err != nil {
			if errors.Is(err, ErrNotCoordinator) {
				continue
			}
			return nil, err
		}
		entries := make([]*entry, 0, len(l.ids))
		for _, e := range l.ids {
			entries = append(entries, e)
		}
		l.mu.Unlock()
		for _, e := range entries {
			e.mu.Lock()
			d, err := e.held.Describe()
			e.mu.Unlock()
			if err == nil {
				out = append(out, d)
			}
		}
	}
	slices.SortFunc(out, func(a, b txn.Description) int { return cmp.Compare(a.TransactionalID, b.TransactionalID) })
	return out, nil
}

// Expire forgets ids that nobody has used for transactional.id.expiration.ms.
func (ts *Transactions) Expire() error {
	var errs []error
	limit := ts.config().ExpirationMs
	for _, l := range ts.hosts.all() {
		if l.lock() != nil {
			continue
		}
		var idle []*entry
		for _, e := range l.ids {
			idle = append(idle, e)
		}
		l.mu.Unlock()
		for _, e := range idle {
			e.mu.Lock()
			if !e.gone && !e.held.Doubtful() && e.held.Expired(limit, now()) {
				w, err := l.append([]Record{Record(txn.Tombstone(e.held.ID()))}, nil)
				if err == nil {
					err = committedWithin(ts.config().CommitTimeout, w)
				}
				if err == nil {
					e.remove()
				}
				errs = append(errs, err)
			}
			e.mu.Unlock()
		}
	}
	return errors.Join(errs...)
}
