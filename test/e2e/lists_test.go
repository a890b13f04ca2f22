package e2e

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/listappend"
)

// lists is a history of transactions that append to partitions and commit an offset, while brokers die.
type lists struct {
	t     *testing.T
	c     *cluster
	zero  time.Time
	count int32 // of lists

	mu        sync.Mutex
	committed int
	txns      []listappend.Txn
	reads     []listappend.Read
	offsets   []porcupine.Operation
}

// offsetOp is a transactional commit of a group's offset, or a stable read of it (-1 is none).
type offsetOp struct {
	partition int32
	write     bool
	value     int64
}

// offsetRegister: what is committed with a transaction is there for whoever asks for stable offsets later, and stays (KIP-447).
var offsetRegister = porcupine.Model{
	Partition: func(ops []porcupine.Operation) [][]porcupine.Operation {
		by := map[int32][]porcupine.Operation{}
		for _, o := range ops {
			p := o.Input.(offsetOp).partition
			by[p] = append(by[p], o)
		}
		var out [][]porcupine.Operation
		for _, ops := range by {
			out = append(out, ops)
		}
		return out
	},
	Init: func() any { return int64(-1) },
	Step: func(state, input, output any) (bool, any) {
		if op := input.(offsetOp); op.write {
			return true, op.value
		}
		return output.(int64) == state.(int64), state
	},
}

func (l *lists) now() int64 { return int64(time.Since(l.zero)) }

// write runs transactions of one transactional id until ctx ends. A third of them is aborted.
func (l *lists) write(ctx context.Context, id int) {
	r := rand.New(rand.NewPCG(uint64(id), 7))
	for serial := 0; ctx.Err() == nil; {
		cl, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(l.c.seeds(), ",")...), kgo.TransactionalID(fmt.Sprint("lists-", id)), kgo.DefaultProduceTopic("lists"),
			kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.TransactionTimeout(5*time.Second), kgo.ProducerLinger(0), kgo.RetryTimeout(10*time.Second))
		if err != nil {
			l.t.Error(err)
			return
		}
		for alive := true; alive && ctx.Err() == nil; serial++ {
			alive = l.transaction(cl, r, fmt.Sprintf("%d.%d", id, serial))
		}
		cl.Close()
	}
}

// transaction runs one, and says whether its client may go on.
func (l *lists) transaction(cl *kgo.Client, r *rand.Rand, name string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	txn := listappend.Txn{Name: name, Begin: l.now(), Outcome: listappend.Aborted}
	if err := cl.BeginTransaction(); err != nil {
		return false
	}
	var records []*kgo.Record
	for i := range 1 + r.IntN(5) {
		a := listappend.Append{List: r.Int32N(l.count), Value: fmt.Sprintf("%s.%d", name, i)}
		txn.Appends = append(txn.Appends, a)
		records = append(records, &kgo.Record{Partition: a.List, Value: []byte(a.Value)})
	}
	err := cl.ProduceSync(ctx, records...).FirstErr()
	op := offsetOp{partition: r.Int32N(l.count), write: true, value: r.Int64N(math.MaxInt64)}
	if err == nil {
		err = commitOffset(ctx, cl, op)
	}
	if err != nil || r.IntN(3) == 0 {
		err = errors.Join(err, cl.EndTransaction(ctx, kgo.TryAbort))
	} else {
		txn.Outcome = listappend.Committed
		if err = cl.EndTransaction(ctx, kgo.TryCommit); err != nil {
			txn.Outcome = listappend.Unknown
		}
	}
	txn.End = l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.txns = append(l.txns, txn)
	switch txn.Outcome {
	case listappend.Committed:
		l.committed++
		l.offsets = append(l.offsets, porcupine.Operation{Input: op, Call: txn.Begin, Return: txn.End})
	case listappend.Unknown:
		l.offsets = append(l.offsets, porcupine.Operation{Input: op, Call: txn.Begin, Return: math.MaxInt64})
	}
	return err == nil
}

// commitOffset commits an offset in the client's transaction; the coordinator puts the group into it (KIP-890).
func commitOffset(ctx context.Context, cl *kgo.Client, op offsetOp) error {
	id, epoch, err := cl.ProducerID(ctx)
	if err != nil {
		return err
	}
	req := kmsg.NewPtrTxnOffsetCommitRequest()
	req.TransactionalID, _ = cl.OptValue(kgo.TransactionalID).(string)
	req.Group, req.ProducerID, req.ProducerEpoch, req.Generation = "lists", id, epoch, -1
	rt := kmsg.NewTxnOffsetCommitRequestTopic()
	rt.Topic = "lists"
	rp := kmsg.NewTxnOffsetCommitRequestTopicPartition()
	rp.Partition, rp.Offset = op.partition, op.value
	rt.Partitions = append(rt.Partitions, rp)
	req.Topics = append(req.Topics, rt)
	resp, err := req.RequestWith(ctx, cl)
	if err != nil {
		return err
	}
	return kerr.ErrorForCode(resp.Topics[0].Partitions[0].ErrorCode)
}

// look reads lists and offsets until ctx ends.
func (l *lists) look(ctx context.Context, id int) {
	cl := l.c.client()
	r := rand.New(rand.NewPCG(uint64(id), 8))
	for ctx.Err() == nil {
		list := r.Int32N(l.count)
		if values, err := l.snapshot(ctx, cl, list); err == nil {
			l.mu.Lock()
			l.reads = append(l.reads, listappend.Read{List: list, Values: values})
			l.mu.Unlock()
		}
		list = r.Int32N(l.count)
		begin := l.now()
		if at, err := stableOffset(ctx, cl, list); err == nil {
			l.mu.Lock()
			l.offsets = append(l.offsets, porcupine.Operation{ClientId: id, Input: offsetOp{partition: list}, Output: at, Call: begin, Return: l.now()})
			l.mu.Unlock()
		}
	}
}

// snapshot reads a list up to its last stable offset of the beginning.
func (l *lists) snapshot(ctx context.Context, cl *kgo.Client, list int32) (values []string, err error) {
	topics, err := kadm.NewClient(cl).ListTopics(ctx, "lists")
	if err != nil || topics["lists"].Err != nil {
		return nil, errors.Join(err, topics["lists"].Err)
	}
	until := int64(-1)
	for at := int64(0); until < 0 || at < until; {
		req := kmsg.NewPtrFetchRequest()
		req.MaxBytes, req.IsolationLevel, req.SessionEpoch = 16<<20, 1, -1
		rt := kmsg.NewFetchRequestTopic()
		rt.Topic, rt.TopicID = "lists", topics["lists"].ID
		rp := kmsg.NewFetchRequestTopicPartition()
		rp.Partition, rp.FetchOffset, rp.PartitionMaxBytes = list, at, 16<<20
		rt.Partitions = append(rt.Partitions, rp)
		req.Topics = append(req.Topics, rt)
		resp, err := cl.Broker(int(topics["lists"].Partitions[list].Leader)).Request(ctx, req)
		if err != nil {
			return nil, err
		}
		f := resp.(*kmsg.FetchResponse)
		if len(f.Topics) == 0 {
			return nil, kerr.ErrorForCode(f.ErrorCode)
		}
		p := &f.Topics[0].Partitions[0]
		if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
			return nil, err
		}
		if until < 0 {
			until = p.LastStableOffset
		}
		got, next := kgo.ProcessFetchPartition(kgo.ProcessFetchPartitionOpts{Offset: at, IsolationLevel: kgo.ReadCommitted(), Topic: "lists", Partition: list}, p, kgo.DefaultDecompressor(), nil)
		if got.Err != nil {
			return nil, got.Err
		}
		for _, r := range got.Records {
			if r.Offset < until {
				values = append(values, string(r.Value))
			}
		}
		if next == at && at < until {
			return nil, fmt.Errorf("no progress at %d of %d", at, until)
		}
		at = next
	}
	return values, nil
}

// stableOffset asks for a group's offset that no transaction may change any more.
func stableOffset(ctx context.Context, cl *kgo.Client, partition int32) (int64, error) {
	req := kmsg.NewPtrOffsetFetchRequest()
	req.RequireStable = true
	rg := kmsg.NewOffsetFetchRequestGroup()
	rg.Group = "lists"
	rt := kmsg.NewOffsetFetchRequestGroupTopic()
	rt.Topic, rt.Partitions = "lists", []int32{partition}
	rg.Topics = append(rg.Topics, rt)
	req.Groups = append(req.Groups, rg)
	resp, err := req.RequestWith(ctx, cl)
	if err != nil {
		return 0, err
	}
	g := resp.Groups[0]
	if err := kerr.ErrorForCode(g.ErrorCode); err != nil {
		return 0, err
	}
	p := g.Topics[0].Partitions[0]
	return p.Offset, kerr.ErrorForCode(p.ErrorCode)
}

// progress waits for some more commits.
func (l *lists) progress(more int) {
	l.t.Helper()
	l.mu.Lock()
	until := l.committed + more
	l.mu.Unlock()
	l.c.until("transactions are committed", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.committed >= until
	})
}

// TestTransactionalLists: three writers append to lists in transactions while each broker is killed, and no reader ever sees what must not be.
func TestTransactionalLists(t *testing.T) {
	c := newCluster(t, 3)
	c.start()
	l := &lists{t: t, c: c, zero: time.Now(), count: 4}
	c.createTopic("lists", int(l.count), 3, "min.insync.replicas=2")
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() { l.write(ctx, i) })
	}
	for i := range 2 {
		wg.Go(func() { l.look(ctx, 10+i) })
	}
	for _, n := range c.nodes {
		l.progress(50)
		n.kill()
		l.progress(50)
		n.start()
	}
	l.progress(50)
	stop()
	wg.Wait()

	cl := c.client()
	c.until("every transaction is decided", func() bool {
		listed, err := kadm.NewClient(cl).ListTransactions(t.Context(), nil, []string{"Ongoing", "PrepareCommit", "PrepareAbort"})
		if err != nil || len(listed) > 0 {
			return false
		}
		stable, err := kadm.NewClient(cl).ListCommittedOffsets(t.Context(), "lists")
		ends, err2 := kadm.NewClient(cl).ListEndOffsets(t.Context(), "lists")
		same := err == nil && err2 == nil
		ends.Each(func(o kadm.ListedOffset) {
			s, _ := stable.Lookup("lists", o.Partition)
			same = same && o.Err == nil && s.Err == nil && s.Offset == o.Offset
		})
		return same
	})
	var last []listappend.Read
	for list := range l.count {
		values, err := l.snapshot(t.Context(), cl, list)
		if err != nil {
			t.Fatal(err)
		}
		last = append(last, listappend.Read{List: list, Values: values})
	}
	for _, a := range listappend.Check(l.txns, l.reads, last) {
		t.Error(a)
	}
	if verdict := porcupine.CheckOperationsTimeout(offsetRegister, l.offsets, time.Minute); verdict != porcupine.Ok {
		t.Errorf("the group's offsets are not linearizable: %v", verdict)
	}
	unknown := 0
	for _, txn := range l.txns {
		if txn.Outcome == listappend.Unknown {
			unknown++
		}
	}
	t.Logf("%d transactions, %d committed, %d unknown, %d reads of lists, %d operations on offsets", len(l.txns), l.committed, unknown, len(l.reads), len(l.offsets))
}
