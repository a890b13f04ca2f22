// Package txn is the state machine of one transactional id as Kafka's transaction coordinator keeps it, and the records in
// which __transaction_state keeps it. It is pure: a request yields a Step, which holds the state that follows, whether that
// has to be durable first, the answer, and the markers to send. Times are ms since 1970.
//
// A Transaction is a value that never changes. Its owner handles the requests of one id one after the other: it makes a Step
// durable if the Step says so, goes over to Step.Next, answers, and sends the markers. Whoever owns the id later begins with
// the last record and with Pending, so a decision outlives the coordinator that took it.
//
// The rules are those of Kafka 4.4's TransactionCoordinator and TransactionMetadata (KIP-98, KIP-360, KIP-588, KIP-664,
// KIP-890). Version 2 is KIP-890's: each end of a transaction raises the epoch, so no two transactions share one.
package txn

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/varve-io/varve/internal/tp"
)

// Errors of transaction requests; each stands for one Kafka error code.
var (
	// ErrInvalidState: the transaction is not in a state in which it could end like that (INVALID_TXN_STATE 48).
	ErrInvalidState = errors.New("invalid transaction state")
	// ErrInvalidMapping: the producer id is not the one of the transactional id (INVALID_PRODUCER_ID_MAPPING 49).
	ErrInvalidMapping = errors.New("producer id is not assigned to the transactional id")
	// ErrInvalidTimeout: not positive, or above transaction.max.timeout.ms (INVALID_TRANSACTION_TIMEOUT 50).
	ErrInvalidTimeout = errors.New("invalid transaction timeout")
	// ErrConcurrent: an earlier transaction is being completed; the client tries again (CONCURRENT_TRANSACTIONS 51).
	ErrConcurrent = errors.New("concurrent transactions")
	// ErrProducerFenced: a newer instance has taken the transactional id, or the coordinator aborted the transaction
	// (PRODUCER_FENCED 90; to clients from before KIP-588 INVALID_PRODUCER_EPOCH 47).
	ErrProducerFenced = errors.New("producer is fenced")
	// ErrNotFound: nobody has used the transactional id (TRANSACTIONAL_ID_NOT_FOUND 105).
	ErrNotFound = errors.New("transactional id not found")
	// ErrAbortable: the partition is not in the transaction, which the client has to abort (TRANSACTION_ABORTABLE 120).
	ErrAbortable = errors.New("transaction has to be aborted")
)

// "None" of a producer id and of an epoch, as in requests and records.
const (
	NoProducerID int64 = -1
	NoEpoch      int16 = -1
)

// epochMax is the highest epoch that a client gets. The one above is left to the coordinator, which must be able to fence
// whoever has the highest (TransactionMetadata.isEpochExhausted).
const epochMax = math.MaxInt16 - 1

// State is the state of a transactional id. The numbers are those of the records (TransactionState). Kafka has two more,
// Dead and PrepareEpochFence, which are never written: they mark changes under way, of which a Transaction has none.
type State int8

const (
	Empty          State = iota // no transaction since InitProducerId
	Ongoing                     // has partitions
	PrepareCommit               // decided, markers are being written
	PrepareAbort                // likewise
	CompleteCommit              // all markers are written
	CompleteAbort               // likewise
)

var stateNames = [...]string{"Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort"}

func (s State) String() string { return stateNames[s] }

// StateNames are the names of all states, for the filters of ListTransactions. Those of states that Kafka never writes are among them.
func StateNames() []string {
	return append(stateNames[:len(stateNames):len(stateNames)], "Dead", "PrepareEpochFence")
}

func (s State) prepared() bool { return s == PrepareCommit || s == PrepareAbort }
func (s State) complete() bool { return s == CompleteCommit || s == CompleteAbort }

// version is the transaction version by which a transaction was begun or ended (ClientTransactionVersion of the record).
type version int16

const (
	version0 version = 0 // all that came before KIP-890; requests never say 1
	version2 version = 2
)

func versionOf(v2 bool) version {
	if v2 {
		return version2
	}
	return version0
}

// Transaction is the state of one transactional id. New or ParseRecord make the first, a Step each one after. It never
// changes and may be read by many at once.
//
//   - An id that is known has a producer id and an epoch ≥ 0.
//   - partitions is sorted, is never written to, and is empty unless the state is Ongoing or a prepared one.
//   - nextID is set only while a transaction of version 2 is prepared that used up the epochs of its producer id.
type Transaction struct {
	id         string
	producerID int64
	previousID int64 // the producer id before the last change of state
	nextID     int64 // to be taken once the markers are written
	epoch      int16
	lastEpoch  int16 // by which a producer may repeat the request that raised its epoch; not in the record
	timeoutMs  int32
	state      State
	partitions []tp.Partition
	start      int64 // of the transaction, -1 before the first
	updated    int64
	version    version
}

// New is a transactional id that nobody has used.
func New(id string) Transaction {
	return Transaction{id: id, producerID: NoProducerID, previousID: NoProducerID, nextID: NoProducerID, epoch: NoEpoch, lastEpoch: NoEpoch, start: -1}
}

// ID is the transactional id, State its state.
func (t Transaction) ID() string   { return t.id }
func (t Transaction) State() State { return t.state }

// Known tells whether the id has been used, and so has a record.
func (t Transaction) Known() bool { return t.producerID != NoProducerID }

// Step is what a request comes to. To be carried out in this order: the write, the change to Next, the answer, the markers.
type Step struct {
	Next Transaction
	// Write says that the record of Next has to be durable before anything else comes of the Step. If it certainly was not
	// written, the Step is dropped and the client told to try again. If that is not certain, the id has to be loaded anew.
	Write bool
	// Err is the answer, one of this package's errors or what Allocate returned. With a Write it is the answer after that.
	Err error
	// ProducerID and Epoch are for the answers to InitProducerId and EndTxn v5; -1 where there is nothing to say.
	ProducerID int64
	Epoch      int16
	// End is set if markers are to be sent after the write.
	End *Decision
}

// Decision is how a transaction ends: for each partition one marker. When all are written, Completed follows; at once if
// there are no partitions.
type Decision struct {
	Commit     bool
	ProducerID int64
	Epoch      int16
	Partitions []tp.Partition // sorted
	V2         bool           // the markers belong to version 2: their epoch is above that of all records (WriteTxnMarkers v2)
}

// Pending is the decision of a transaction whose markers are not known to be written, else nil. A coordinator that takes over
// carries it out: a partition that has its marker already takes it again.
func (t Transaction) Pending() *Decision {
	if !t.state.prepared() {
		return nil
	}
	return &Decision{t.state == PrepareCommit, t.producerID, t.epoch, slices.Clone(t.partitions), t.version >= version2}
}

// Description is what DescribeTransactions and ListTransactions tell (KIP-664).
type Description struct {
	TransactionalID string
	State           string
	TimeoutMs       int32
	StartMs         int64 // -1 before the first transaction
	ProducerID      int64
	Epoch           int16
	Partitions      []tp.Partition // sorted
}

// Describe describes the id, or returns ErrNotFound. As in Kafka, an id that is prepared for its next producer id still shows
// the old one.
func (t Transaction) Describe() (Description, error) {
	if !t.Known() {
		return Description{}, ErrNotFound
	}
	return Description{t.id, t.state.String(), t.timeoutMs, t.start, t.producerID, t.epoch, slices.Clone(t.partitions)}, nil
}

// answer leaves everything as it is.
func (t Transaction) answer(err error) Step {
	return Step{Next: t, Err: err, ProducerID: NoProducerID, Epoch: NoEpoch}
}

// enter is t after a change of state. It is from here that the previous producer id is known.
func (t Transaction) enter(s State, now int64) Transaction {
	t.previousID, t.state, t.updated = t.producerID, s, now
	return t
}

func (t Transaction) exhausted() bool { return t.epoch >= epochMax }

// check is whether a request comes from the producer that has the id now.
func (t Transaction) check(producerID int64, epoch int16) error {
	if !t.Known() || producerID != t.producerID {
		return ErrInvalidMapping
	}
	if epoch != t.epoch {
		return ErrProducerFenced
	}
	return nil
}

// Allocate hands out a producer id that nobody had before. It is called at most once for a request, and only if one is needed.
type Allocate func() (int64, error)

// allocate fails with ids that would corrupt the record.
func (t Transaction) allocate(f Allocate) (int64, error) {
	id, err := f()
	if err != nil {
		return 0, fmt.Errorf("allocate producer id for %q: %w", t.id, err)
	}
	if id < 0 || id == t.producerID {
		return 0, fmt.Errorf("allocate producer id for %q: got %d", t.id, id)
	}
	return id, nil
}

// InitRequest is one InitProducerId.
type InitRequest struct {
	TimeoutMs, TimeoutMaxMs int32 // asked for, and transaction.max.timeout.ms
	// ProducerID and Epoch are those that a producer has and wants to go on from (KIP-360); -1 and -1 for a new instance. One
	// without the other is for the API to refuse.
	ProducerID int64
	Epoch      int16
	V2         bool // the cluster's transaction.version is 2, whatever the client speaks: the coordinator's own abort follows it
	Allocate   Allocate
}

// InitProducerID gives a producer its id and epoch, and fences all that had the transactional id before.
//
//   - A new instance gets the epoch after the present one. When epochs run out it gets a new producer id and epoch 0.
//   - A producer that names its own id and epoch gets the next one, too. If it names the ones before, its answer was lost and it
//     gets the present ones again, unless another instance came in between (KIP-360, prepareIncrementProducerEpoch).
//   - A transaction under way is aborted under an epoch above the one of its producer, and the client is told ErrConcurrent
//     until that is complete; then its next try gets an epoch of its own (prepareFenceProducerEpoch).
//
// Two answers differ from Kafka's. A producer that is behind the epoch of a transaction under way is fenced at once; Kafka
// first aborts that transaction, which belongs to its successor. And a repeated request whose answer was the last epoch gets
// that again, where Kafka throws.
func (t Transaction) InitProducerID(r InitRequest, now int64) Step {
	if r.TimeoutMs <= 0 || r.TimeoutMs > r.TimeoutMaxMs {
		return t.answer(ErrInvalidTimeout)
	}
	if t.state.prepared() {
		return t.answer(ErrConcurrent)
	}
	fresh := r.ProducerID == NoProducerID && r.Epoch == NoEpoch
	if t.Known() && !fresh && !t.mayContinue(r.ProducerID, r.Epoch) {
		return t.answer(ErrProducerFenced)
	}
	if t.state == Ongoing {
		s := t.fence(r.V2, r.Allocate, now)
		if s.Write {
			s.Err = ErrConcurrent
		}
		return s
	}
	n := t.enter(Empty, now)
	n.timeoutMs, n.partitions, n.start = r.TimeoutMs, nil, -1
	switch {
	case !t.Known():
		id, err := t.allocate(r.Allocate)
		if err != nil {
			return t.answer(err)
		}
		n.producerID, n.previousID, n.epoch, n.lastEpoch = id, id, 0, NoEpoch
	case !fresh && (r.ProducerID != t.producerID || r.Epoch != t.epoch):
		// Repeated: mayContinue saw to it that nobody else was here. The present epoch is the answer again.
	case t.exhausted():
		id, err := t.allocate(r.Allocate)
		if err != nil {
			return t.answer(err)
		}
		n.producerID, n.epoch, n.lastEpoch = id, 0, NoEpoch
		if !fresh {
			n.lastEpoch = t.epoch
		}
	default:
		n.epoch, n.lastEpoch = t.epoch+1, NoEpoch
		if !fresh {
			n.lastEpoch = t.epoch
		}
	}
	return Step{Next: n, Write: true, ProducerID: n.producerID, Epoch: n.epoch}
}

// mayContinue is whether a producer may go on from an id and epoch: the present ones, or those before the last change, if that
// was its own (a new instance leaves no last epoch). The epoch before is forgotten when the id is loaded, as in Kafka.
func (t Transaction) mayContinue(producerID int64, epoch int16) bool {
	if producerID == t.producerID && epoch == t.epoch {
		return true
	}
	if t.state == Ongoing || epoch < 0 || epoch != t.lastEpoch {
		return false
	}
	return producerID == t.producerID || producerID == t.previousID && epoch >= epochMax
}

// fence aborts what is under way from the coordinator's side, so that its producer can go on only by InitProducerId. In
// version 2 it can also end its transaction by an abort, which then is no news and raises its epoch (see End).
func (t Transaction) fence(v2 bool, allocate Allocate, now int64) Step {
	if v2 {
		s := t.decide(false, version2, allocate, now)
		s.ProducerID, s.Epoch = NoProducerID, NoEpoch // of no concern to whoever caused this
		return s
	}
	n := t
	if n.epoch < math.MaxInt16 { // never above, but a foreign record must not make it wrap
		n.epoch++
	}
	n.lastEpoch = NoEpoch
	return n.decide(false, version0, nil, now)
}

// decide is the step that settles how a transaction ends (prepareAbortOrCommit).
func (t Transaction) decide(commit bool, v version, allocate Allocate, now int64) Step {
	n := t.enter(PrepareAbort, now)
	if commit {
		n.state = PrepareCommit
	}
	n.version, n.nextID = v, NoProducerID
	if t.state != Ongoing { // an abort of nothing; a transaction has to have a start
		n.start = now
	}
	s := Step{Write: true, ProducerID: NoProducerID, Epoch: NoEpoch}
	if v >= version2 {
		if t.exhausted() {
			id, err := t.allocate(allocate)
			if err != nil {
				return t.answer(err)
			}
			n.nextID = id
		}
		n.lastEpoch = t.epoch
		if n.epoch < math.MaxInt16 {
			n.epoch++
		}
		s.ProducerID, s.Epoch = n.successor()
	}
	s.Next, s.End = n, n.Pending()
	return s
}

// successor is the producer id and epoch under which a prepared transaction is completed.
func (t Transaction) successor() (int64, int16) {
	if t.version >= version2 && t.nextID != NoProducerID {
		return t.nextID, 0
	}
	return t.producerID, t.epoch
}

// AddPartitions puts partitions into the producer's transaction and begins it with the first (AddPartitionsToTxn;
// AddOffsetsToTxn adds the partition of the group). v2 says that the request is of version 4 or above, which is how the broker
// of a partition asks for clients of version 2. Nothing is written if all are in already.
func (t Transaction) AddPartitions(producerID int64, epoch int16, partitions []tp.Partition, v2 bool, now int64) Step {
	// First of all: in version 2 the producer has the next epoch while the last transaction still shows the old one.
	if t.state.prepared() {
		return t.answer(ErrConcurrent)
	}
	if err := t.check(producerID, epoch); err != nil {
		return t.answer(err)
	}
	all := slices.Clone(t.partitions)
	for _, p := range partitions {
		if i, ok := slices.BinarySearchFunc(all, p, compare); !ok {
			all = slices.Insert(all, i, p)
		}
	}
	if t.state == Ongoing && len(all) == len(t.partitions) {
		return t.answer(nil)
	}
	n := t.enter(Ongoing, now)
	n.partitions, n.version = all, versionOf(v2)
	if t.state != Ongoing {
		n.start = now
	}
	return Step{Next: n, Write: true, ProducerID: NoProducerID, Epoch: NoEpoch}
}

func compare(a, b tp.Partition) int {
	return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Index, b.Index))
}

// Verify tells for each partition whether it is in the producer's transaction; ErrAbortable if not. The leader of a partition
// asks so before the first write of a transaction (AddPartitionsToTxn with VerifyOnly, KIP-890).
func (t Transaction) Verify(producerID int64, epoch int16, partitions []tp.Partition) []error {
	err := t.check(producerID, epoch)
	if err == nil && t.state.prepared() {
		err = ErrConcurrent
	}
	out := make([]error, len(partitions))
	for i, p := range partitions {
		out[i] = err
		if _, ok := slices.BinarySearchFunc(t.partitions, p, compare); err == nil && !ok {
			out[i] = ErrAbortable
		}
	}
	return out
}

// EndRequest is one EndTxn.
type EndRequest struct {
	ProducerID int64
	Epoch      int16
	Commit     bool
	V2         bool // EndTxn v5 and above
	Allocate   Allocate
}

// End commits or aborts the producer's transaction.
//
// In version 1 the producer keeps its epoch. A request that comes again after completion is answered with success if it is for
// the same outcome, else with ErrInvalidState, as is one without a transaction.
//
// In version 2 the epoch goes up with the decision, and the answer holds the new one, or a new producer id and epoch 0 when
// epochs have run out. So a repeated request is known by the epoch before:
//
//	                abort, before      abort, present    commit, before     commit, present
//	Empty           ErrProducerFenced  raises the epoch  ErrProducerFenced  ErrInvalidState
//	CompleteAbort   success            raises the epoch  ErrProducerFenced  ErrInvalidState
//	CompleteCommit  ErrInvalidState    raises the epoch  success            ErrInvalidState
//
// An abort without a transaction is for producers that do not know whether they had begun one. The commit that finds
// CompleteAbort lost to the coordinator's own abort (KAFKA-20785; Kafka 4.4.0 still says INVALID_TXN_STATE, which is fatal).
//
// While markers are being written, all is ErrConcurrent: in version 2 before the producer is even looked at, since it may be
// at its next transaction already (KAFKA-18464).
func (t Transaction) End(r EndRequest, now int64) Step {
	if !r.V2 {
		return t.endV1(r, now)
	}
	if t.state.prepared() {
		return t.answer(ErrConcurrent)
	}
	repeated := t.repeats(r)
	if err := t.check(r.ProducerID, r.Epoch); err != nil && !repeated {
		return t.answer(err)
	}
	switch {
	case t.state == Ongoing, !repeated && !r.Commit:
		return t.decide(r.Commit, version2, r.Allocate, now)
	case repeated && r.Commit == (t.state == CompleteCommit):
		s := t.answer(nil)
		s.ProducerID, s.Epoch = t.producerID, t.epoch
		return s
	case repeated && r.Commit:
		return t.answer(ErrProducerFenced)
	}
	return t.answer(ErrInvalidState)
}

// repeats is whether a request of version 2 is of the producer whose transaction is complete now, and from before it ended. The
// transaction has to have ended by version 2, which Kafka does not ask: else the epoch before is that of a fenced producer.
func (t Transaction) repeats(r EndRequest) bool {
	if !t.state.complete() || t.version < version2 {
		return false
	}
	if t.epoch == 0 { // under a new producer id
		return r.ProducerID == t.previousID && r.Epoch == epochMax
	}
	return r.ProducerID == t.producerID && r.Epoch == t.epoch-1
}

func (t Transaction) endV1(r EndRequest, now int64) Step {
	if err := t.check(r.ProducerID, r.Epoch); err != nil {
		return t.answer(err)
	}
	switch {
	case t.state.prepared():
		return t.answer(ErrConcurrent)
	case t.state == Ongoing:
		return t.decide(r.Commit, version0, nil, now)
	case t.state.complete() && r.Commit == (t.state == CompleteCommit):
		return t.answer(nil)
	}
	return t.answer(ErrInvalidState)
}

// Completed follows when all markers of Pending are written. In any other state there is nothing to complete: ErrInvalidState.
func (t Transaction) Completed(now int64) Step {
	if !t.state.prepared() {
		return t.answer(ErrInvalidState)
	}
	n := t.enter(CompleteAbort, now)
	if t.state == PrepareCommit {
		n.state = CompleteCommit
	}
	n.producerID, n.epoch = t.successor()
	n.nextID, n.partitions = NoProducerID, nil
	return Step{Next: n, Write: true, ProducerID: NoProducerID, Epoch: NoEpoch}
}

// NextDeadline is from when on Expire aborts the transaction, 0 if never. The longest timeout there is means none (KIP-939's
// mark of transactions that something else decides).
func (t Transaction) NextDeadline() int64 {
	if t.state != Ongoing || t.timeoutMs == math.MaxInt32 {
		return 0
	}
	return t.start + int64(t.timeoutMs) + 1
}

// Expire aborts a transaction that has outlived its timeout and fences its producer (abortTimedOutTransactions). In all other
// cases nothing happens. v2 says that the cluster's transaction.version is 2.
func (t Transaction) Expire(v2 bool, allocate Allocate, now int64) Step {
	if due := t.NextDeadline(); due == 0 || now < due {
		return t.answer(nil)
	}
	return t.fence(v2, allocate, now)
}

// Expired tells whether an id without a transaction has been idle for transactional.id.expiration.ms, so that a tombstone may
// follow. Its producer ids are not given out again, so whoever still has one gets ErrInvalidMapping.
func (t Transaction) Expired(expirationMs, now int64) bool {
	return t.Known() && (t.state == Empty || t.state.complete()) && now-t.updated >= expirationMs
}
