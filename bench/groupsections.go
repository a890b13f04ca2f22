package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"golang.org/x/sync/errgroup"
)

// transactionsSection writes in transactions, and reads what they committed.
func transactionsSection(b *bench) error {
	for _, replicas := range []int{1, 3} {
		section := fmt.Sprintf("Transactional produce, 1 KiB records, 6 partitions, replication factor %d", replicas)
		var v, k *process
		if replicas == 1 {
			var err error
			if v, k, err = b.pair("transactions", nil); err != nil {
				return err
			}
		} else {
			vn, kn, err := b.startNodes("transactions-3", 3, false, "min.insync.replicas=2", "default.replication.factor=3")
			if err != nil {
				return err
			}
			v, k = vn.process, processOf(kn)
		}
		peers := []*process{v, k}
		for _, c := range []struct{ per, txns int }{{100, 500}, {10_000, 15}} {
			loads, err := b.alternate(peers, func(p *process) (load, error) {
				topic := b.topic()
				if err := b.createReplicated(p, topic, 6, int16(replicas), nil); err != nil {
					return load{}, err
				}
				l, err := b.transact(p, topic, c.txns, c.per, 0, func(int) bool { return true })
				return l, errors.Join(err, b.drop(p, topic))
			})
			if err != nil {
				return err
			}
			b.add(row{section: section, what: fmt.Sprintf("%d records a transaction", c.per), unit: "MB/s", varve: pick(loads[v.name], load.mbps), kafka: pick(loads[nameOf(k)], load.mbps), target: "≥ 1.5×"})
		}
		loads, err := b.alternate(peers, func(p *process) (load, error) {
			topic := b.topic()
			if err := b.createReplicated(p, topic, 6, int16(replicas), nil); err != nil {
				return load{}, err
			}
			l, err := b.endToEnd(p, topic, 200)
			return l, errors.Join(err, b.drop(p, topic))
		})
		if err != nil {
			return err
		}
		what := "begin to all of it read with read_committed, 100 records, 20 transactions/s, "
		b.add(row{section: section, what: what + "p50", unit: "ms", varve: pick(loads[v.name], func(l load) float64 { return l.p50 }), kafka: pick(loads[nameOf(k)], func(l load) float64 { return l.p50 }), lowerIsBetter: true, target: "≥ 1×"})
		b.add(row{section: section, what: what + "p99", unit: "ms", varve: pick(loads[v.name], func(l load) float64 { return l.p99 }), kafka: pick(loads[nameOf(k)], func(l load) float64 { return l.p99 }), lowerIsBetter: true, target: "≥ 1×"})
		if err := end(peers...); err != nil {
			return err
		}
	}
	return nil
}

// send produces n records and returns when all are acknowledged, or one is not.
func (b *bench) send(cl *kgo.Client, n int, record func(i int) *kgo.Record) error {
	var failed atomic.Pointer[error]
	for i := range n {
		cl.Produce(b.ctx, record(i), func(_ *kgo.Record, err error) {
			if err != nil {
				failed.Store(&err)
			}
		})
	}
	if err := cl.Flush(b.ctx); err != nil {
		return err
	}
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

// transact runs transactions one after the other, every is the time from begin to begin if it is not 0. commit says how each ends.
func (b *bench) transact(p *process, topic string, txns, per int, every time.Duration, commit func(i int) bool, more ...kgo.Opt) (load, error) {
	cl, err := kgo.NewClient(append(append(producerOptions(p, topic, "all"), kgo.TransactionalID(topic)), more...)...)
	if err != nil {
		return load{}, err
	}
	defer cl.Close()
	payload := values(1024)
	before, began := cpu(p.pid), time.Now()
	for i := range txns {
		if every > 0 {
			time.Sleep(time.Until(began.Add(time.Duration(i) * every)))
		}
		if err := cl.BeginTransaction(); err != nil {
			return load{}, err
		}
		at := time.Now()
		if err := b.send(cl, per, func(j int) *kgo.Record { return &kgo.Record{Value: payload[j%len(payload)], Timestamp: at} }); err != nil {
			return load{}, err
		}
		if err := cl.EndTransaction(b.ctx, kgo.TransactionEndTry(commit(i))); err != nil {
			return load{}, err
		}
	}
	return load{seconds: time.Since(began).Seconds(), bytes: int64(txns) * int64(per) * 1024, cpu: cpu(p.pid) - before}, nil
}

// endToEnd takes the time from the begin of each of some transactions until a consumer has all that it committed.
func (b *bench) endToEnd(p *process, topic string, txns int) (load, error) {
	const per = 100
	ctx, cancel := context.WithTimeout(b.ctx, 2*time.Minute)
	defer cancel()
	cl, err := kgo.NewClient(seeds(p), kgo.ConsumeTopics(topic), kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.MetadataMinAge(50*time.Millisecond))
	if err != nil {
		return load{}, err
	}
	defer cl.Close()
	written := make(chan error, 1)
	go func() {
		_, err := b.transact(p, topic, txns, per, 50*time.Millisecond, func(int) bool { return true })
		written <- err
	}()
	seen := map[int64]int{} // by the time of begin
	var took []float64
	for len(took) < txns {
		f := cl.PollFetches(ctx)
		if err := f.Err(); err != nil {
			return load{}, errors.Join(err, <-written)
		}
		f.EachRecord(func(r *kgo.Record) {
			at := r.Timestamp.UnixMilli()
			if seen[at]++; seen[at] == per {
				took = append(took, ms(time.Since(r.Timestamp)))
			}
		})
	}
	slices.Sort(took)
	return load{p50: took[txns/2], p99: took[txns*99/100]}, <-written
}

// committedSection reads tiered data of which a tenth was aborted, through the broker.
func committedSection(b *bench) error {
	const section = "read_committed catch-up of tiered data through the broker, 10 % aborted, one partition"
	v, k, err := b.pair("committed", tierSets, "--tiered")
	if err != nil {
		return err
	}
	visible := map[string]int{}
	for _, p := range []*process{v, k} {
		if p == nil {
			continue
		}
		if visible[p.name], err = b.fillAborted(p, "history", b.n(800_000)); err != nil {
			return err
		}
	}
	loads, err := b.alternate([]*process{v, k}, func(p *process) (load, error) {
		return b.consume(p, "history", visible[p.name], kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	})
	if err != nil {
		return err
	}
	b.add(row{section: section, what: "directory against LocalTieredStorage", unit: "MB/s", varve: pick(loads[v.name], load.mbps), kafka: pick(loads[nameOf(k)], load.mbps), target: "≥ 2×"})
	b.add(row{section: section, what: "broker CPU", unit: "s/GB", varve: pick(loads[v.name], load.cpuPerGB), kafka: pick(loads[nameOf(k)], load.cpuPerGB), lowerIsBetter: true})
	return end(v, k)
}

// rebalanceSection lets many members join a group at once.
func rebalanceSection(b *bench) error {
	const members, partitions = 200, 400
	section := fmt.Sprintf("%d members join a group of %d partitions at once", members, partitions)
	// Kafka's peer has a delay of 0.
	v, k, err := b.pair("rebalance", []string{"group.initial.rebalance.delay.ms=0"})
	if err != nil {
		return err
	}
	for _, p := range []*process{v, k} {
		if p != nil {
			if err := b.create(p, "many", partitions, nil); err != nil {
				return err
			}
		}
	}
	for _, protocol := range []string{"classic", "consumer"} {
		loads, err := b.alternate([]*process{v, k}, func(p *process) (load, error) { return b.join(p, protocol, members, partitions) })
		if err != nil {
			return err
		}
		b.add(row{section: section, what: protocol + " protocol, until each partition has its one owner", unit: "s", varve: pick(loads[v.name], func(l load) float64 { return l.seconds }), kafka: pick(loads[nameOf(k)], func(l load) float64 { return l.seconds }), lowerIsBetter: true, target: "< 5 s"})
	}
	return end(v, k)
}

// join starts the members of a new group and returns when each partition has an owner. A partition with two is an error.
func (b *bench) join(p *process, protocol string, members, partitions int) (load, error) {
	group := b.topic()
	balance := []kgo.Opt{kgo.Balancers(kgo.CooperativeStickyBalancer())}
	if protocol == "consumer" {
		balance = []kgo.Opt{kgo.Balancers(kgo.StickyBalancer()), kgo.ServerSideBalancer()}
	}
	var mu sync.Mutex
	owner := map[int32]int{}
	twice := error(nil)
	done := make(chan struct{})
	began := time.Now()
	l := load{}
	var clients []*kgo.Client
	defer func() {
		var wg sync.WaitGroup
		for _, cl := range clients {
			wg.Go(cl.CloseAllowingRebalance)
		}
		wg.Wait()
	}()
	for i := range members {
		cl, err := kgo.NewClient(append(balance, seeds(p), kgo.ConsumerGroup(group), kgo.ConsumeTopics("many"), kgo.DisableAutoCommit(),
			kgo.OnPartitionsAssigned(func(_ context.Context, _ *kgo.Client, got map[string][]int32) {
				mu.Lock()
				defer mu.Unlock()
				for _, p := range got["many"] {
					if o, is := owner[p]; is && twice == nil {
						twice = fmt.Errorf("partition %d belongs to members %d and %d", p, o, i)
					}
					owner[p] = i
				}
				if len(owner) == partitions && l.seconds == 0 {
					l.seconds = time.Since(began).Seconds()
					close(done)
				}
			}),
			kgo.OnPartitionsRevoked(func(_ context.Context, _ *kgo.Client, gone map[string][]int32) {
				mu.Lock()
				defer mu.Unlock()
				for _, p := range gone["many"] {
					delete(owner, p)
				}
			}))...)
		if err != nil {
			return l, err
		}
		clients = append(clients, cl)
	}
	select {
	case <-done:
	case <-time.After(time.Minute):
		return l, fmt.Errorf("%d of %d partitions have an owner after a minute", len(owner), partitions)
	}
	// Early owners hand over to members that came later: it counts when all are in and nothing moves.
	adm, err := b.admin(p)
	if err != nil {
		return l, err
	}
	defer adm.Close()
	err = b.poll("the group", func() bool {
		mu.Lock()
		busy := map[int]bool{}
		for _, o := range owner {
			busy[o] = true
		}
		whole := len(owner) == partitions && len(busy) == members
		mu.Unlock()
		if whole {
			l.seconds = time.Since(began).Seconds()
		}
		return whole
	})
	return l, errors.Join(err, twice)
}

// commitsSection commits offsets of many groups at once.
func commitsSection(b *bench) error {
	const section = "Offset commits, one broker, 64 groups at a time"
	v, k, err := b.pair("commits", nil)
	if err != nil {
		return err
	}
	for _, p := range []*process{v, k} {
		if p != nil {
			if err := b.create(p, "some", 10, nil); err != nil {
				return err
			}
		}
	}
	rate := func(l load) float64 { return 1 / l.seconds }
	micros := func(l load) float64 { return l.cpu * 1e6 }
	for _, at := range []int{1, 8} {
		loads, err := b.alternate([]*process{v, k}, func(p *process) (load, error) { return b.commitOffsets(p, b.n(200_000), at) })
		if err != nil {
			return err
		}
		shape := fmt.Sprintf("of 10 partitions, %d at a time on a connection", at)
		b.add(row{section: section, what: "commits " + shape, unit: "1/s", varve: pick(loads[v.name], rate), kafka: pick(loads[nameOf(k)], rate), target: "≥ 2×"})
		b.add(row{section: section, what: "broker CPU, commits " + shape, unit: "µs a commit", varve: pick(loads[v.name], micros), kafka: pick(loads[nameOf(k)], micros), lowerIsBetter: true})
	}
	return end(v, k)
}

// commitOffsets returns the time of one commit, of n that 64 groups make side by side, some at a time on a connection of each. The client
// costs as little as it can, since it shares the cores: it says nothing but commits.
func (b *bench) commitOffsets(p *process, n, atATime int) (load, error) {
	const groups = 64
	adm, err := b.admin(p)
	if err != nil {
		return load{}, err
	}
	defer adm.Close()
	committers := make([]*committer, groups)
	for i := range committers {
		group := fmt.Sprint(b.topic(), i)
		var o kadm.Offsets
		o.AddOffset("some", 0, 0, -1)
		if _, err := adm.CommitOffsets(b.ctx, group, o); err != nil { // which waits until the group's coordinator is ready
			return load{}, err
		}
		if committers[i], err = newCommitter(p.address, group); err != nil {
			return load{}, err
		}
		defer committers[i].conn.Close()
	}
	before, began := cpu(p.pid), time.Now()
	var all errgroup.Group
	for _, c := range committers {
		all.Go(func() error {
			for j := 0; j < n/groups; j += atATime {
				if err := c.commit(int64(j), atATime); err != nil {
					return err
				}
			}
			return nil
		})
	}
	err = all.Wait()
	return load{seconds: time.Since(began).Seconds() / float64(n), cpu: (cpu(p.pid) - before) / float64(n)}, err
}

// committer commits offsets of ten partitions for a group, without anything around it.
type committer struct {
	conn    net.Conn
	answers *bufio.Reader
	request *kmsg.OffsetCommitRequest
	format  *kmsg.RequestFormatter
	out, in []byte
}

func newCommitter(addr, group string) (*committer, error) {
	conn, err := net.DialTimeout("tcp", addr, 10*time.Second)
	if err != nil {
		return nil, err
	}
	r := kmsg.NewPtrOffsetCommitRequest()
	r.Version, r.Group, r.Generation = 8, group, -1
	t := kmsg.NewOffsetCommitRequestTopic()
	t.Topic = "some"
	for p := range int32(10) {
		x := kmsg.NewOffsetCommitRequestTopicPartition()
		x.Partition = p
		t.Partitions = append(t.Partitions, x)
	}
	r.Topics = append(r.Topics, t)
	return &committer{conn: conn, answers: bufio.NewReader(conn), request: r, format: kmsg.NewRequestFormatter(kmsg.FormatterClientID("bench")), in: make([]byte, 4<<10)}, nil
}

// commit commits offsets from one on, and returns when all are answered.
func (c *committer) commit(offset int64, n int) error {
	c.out = c.out[:0]
	for i := range n {
		for j := range c.request.Topics[0].Partitions {
			c.request.Topics[0].Partitions[j].Offset = offset + int64(i)
		}
		at := len(c.out) // the formatter writes the size at the start of what it is given
		c.out = append(c.out, c.format.AppendRequest(c.out[at:at:cap(c.out)], c.request, int32(i))...)
	}
	if err := c.conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return err
	}
	if _, err := c.conn.Write(c.out); err != nil {
		return err
	}
	for range n {
		if err := c.answer(); err != nil {
			return err
		}
	}
	return nil
}

// answer reads an answer, which has to commit all.
func (c *committer) answer() error {
	if _, err := io.ReadFull(c.answers, c.in[:4]); err != nil {
		return err
	}
	size := int(binary.BigEndian.Uint32(c.in))
	if size < 5 || size > len(c.in) {
		return fmt.Errorf("answer of %d bytes to an offset commit", size)
	}
	if _, err := io.ReadFull(c.answers, c.in[:size]); err != nil {
		return err
	}
	answer := kmsg.OffsetCommitResponse{Version: c.request.Version}
	if err := answer.ReadFrom(c.in[5:size]); err != nil { // behind the header: correlation id and no tags
		return err
	}
	partitions := 0
	for _, t := range answer.Topics {
		for _, p := range t.Partitions {
			partitions++
			if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
				return err
			}
		}
	}
	if partitions != len(c.request.Topics[0].Partitions) {
		return fmt.Errorf("answer for %d partitions", partitions)
	}
	return nil
}

// compactionSection compacts a log in which each key has ten values.
func compactionSection(b *bench) error {
	const section = "Compaction of one partition, 1 KiB records, ten values a key, at most 128 MiB of memory for keys"
	sets := []string{"log.cleaner.backoff.ms=50", "log.cleaner.dedupe.buffer.size=134217728", "log.cleaner.threads=1"}
	var args []string
	for _, s := range sets {
		args = append(args, "--set", s)
	}
	v, k, err := b.pair("compaction", sets, args...)
	if err != nil {
		return err
	}
	n := b.n(500_000)
	loads, err := b.alternate([]*process{v, k}, func(p *process) (load, error) { return b.compact(p, n, n/10) })
	if err != nil {
		return err
	}
	b.add(row{section: section, what: "of what is read", unit: "MB/s", varve: pick(loads[v.name], load.mbps), kafka: pick(loads[nameOf(k)], load.mbps), target: "≥ 1×"})
	b.add(row{section: section, what: "broker CPU", unit: "s/GB", varve: pick(loads[v.name], load.cpuPerGB), kafka: pick(loads[nameOf(k)], load.cpuPerGB), lowerIsBetter: true})
	return end(v, k)
}

// compact fills a topic and takes the time from the moment it may be compacted until its size has come to rest.
func (b *bench) compact(p *process, n, keys int) (load, error) {
	topic := b.topic()
	if err := b.create(p, topic, 1, map[string]string{"segment.bytes": "16777216", "retention.ms": "-1"}); err != nil {
		return load{}, err
	}
	cl, err := kgo.NewClient(append(producerOptions(p, topic, "all"), kgo.ProducerLinger(200*time.Millisecond), kgo.ProducerBatchMaxBytes(64<<10), kgo.MaxBufferedRecords(200_000))...)
	if err != nil {
		return load{}, err
	}
	defer cl.Close()
	payload := values(1024)
	err = b.send(cl, n, func(i int) *kgo.Record {
		return &kgo.Record{Key: fmt.Appendf(nil, "key-%d", i%keys), Value: payload[i%len(payload)]}
	})
	if err != nil {
		return load{}, err
	}
	adm := kadm.NewClient(cl)
	size := func() (int64, error) {
		dirs, err := adm.DescribeAllLogDirs(b.ctx, kadm.TopicsSet{topic: {0: {}}})
		if err != nil {
			return 0, err
		}
		sum := int64(0)
		dirs.Each(func(d kadm.DescribedLogDir) { sum += d.Size() })
		return sum, nil
	}
	full, err := size()
	if err != nil {
		return load{}, err
	}
	before, began := cpu(p.pid), time.Now()
	policy, ratio := "compact", "0.01"
	if _, err := adm.AlterTopicConfigs(b.ctx, []kadm.AlterConfig{{Name: "cleanup.policy", Value: &policy}, {Name: "min.cleanable.dirty.ratio", Value: &ratio}}, topic); err != nil {
		return load{}, err
	}
	last, at := full, began
	l := load{bytes: full}
	for time.Since(at) < 2*time.Second || last == full {
		if time.Since(began) > 2*time.Minute {
			return l, errors.New("nothing is compacted")
		}
		now, err := size()
		if err != nil {
			return l, err
		}
		if now != last {
			last, at = now, time.Now()
			l.seconds, l.cpu = time.Since(began).Seconds(), cpu(p.pid)-before
		}
		time.Sleep(10 * time.Millisecond)
	}
	if last > full/3 {
		return l, fmt.Errorf("%d of %d bytes are left", last, full)
	}
	return l, b.drop(p, topic)
}
