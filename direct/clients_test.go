package direct_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"
	kafkago "github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
)

// history is a topic most of which is in a bucket, and a transport that reads it there.
type history struct {
	addr      string
	want      [][]string // values of each partition
	transport *direct.Transport
}

func newHistory(t *testing.T, topic string, partitions int32, perPartition int) *history {
	t.Helper()
	dir := t.TempDir()
	h := &history{addr: startBroker(t, map[string]string{"varve.bucket": dir})}
	h.want = load(t, h.addr, topic, partitions, perPartition)
	f, err := objectstore.Open(dir, objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	h.transport = newTransport(t, direct.Config{Fetcher: f, ConnectTimeout: 10 * time.Second})
	t.Cleanup(func() {
		s := h.transport.Snapshot()
		if s.Served < s.BrokerBytes || s.Served == 0 {
			t.Errorf("the bucket was not what was read: %+v", s)
		}
		for c, n := range s.Fallbacks {
			if n > 0 {
				t.Errorf("%d fallbacks for %s", n, c)
			}
		}
	})
	return h
}

func (h *history) total() (n int) {
	for _, w := range h.want {
		n += len(w)
	}
	return n
}

func (h *history) client(t *testing.T, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(h.addr), kgo.Dialer(h.transport.DialContext), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchMaxPartitionBytes(60_000), kgo.FetchMaxWait(200 * time.Millisecond)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cl.Close)
	return cl
}

// seen collects what any number of members have read; it holds their values against the topic's.
type seen struct {
	h  *history
	mu sync.Mutex
	// times of each offset of each partition
	times [][]int
	left  int
}

func newSeen(h *history) *seen {
	s := &seen{h: h, left: h.total()}
	for _, w := range h.want {
		s.times = append(s.times, make([]int, len(w)))
	}
	return s
}

func (s *seen) add(t *testing.T, partition int32, offset int64, value string) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if want := s.h.want[partition][offset]; value != want {
		t.Errorf("partition %d, offset %d: %.40q, not %.40q", partition, offset, value, want)
	}
	if s.times[partition][offset]++; s.times[partition][offset] == 1 {
		s.left--
	}
}

func (s *seen) missing() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.left
}

// once checks that nothing was read again.
func (s *seen) once(t *testing.T) {
	t.Helper()
	for p, times := range s.times {
		for o, n := range times {
			if n != 1 {
				t.Errorf("partition %d, offset %d was read %d times", p, o, n)
				return
			}
		}
	}
}

// poll takes up to most records, 100 if it is not told.
func poll(t *testing.T, ctx context.Context, cl *kgo.Client, most ...int) kgo.Fetches {
	t.Helper()
	fetches := cl.PollRecords(ctx, append(most, 100)[0])
	fetches.EachError(func(topic string, p int32, err error) {
		if !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, kgo.ErrClientClosed) {
			t.Errorf("%s-%d: %v", topic, p, err)
		}
	})
	return fetches
}

// Members come and go under cooperative rebalances, each committing what it gives up: nothing is missing and nothing comes twice.
func TestKgoCooperativeGroupUnderChurn(t *testing.T) {
	h := newHistory(t, "t", 6, 700)
	s := newSeen(h)
	var members sync.WaitGroup
	var joined atomic.Int32
	var guestsLeft atomic.Bool // after that whoever stays may hurry
	member := func(polls int) {
		commit := func(ctx context.Context, cl *kgo.Client, _ map[string][]int32) {
			if err := cl.CommitUncommittedOffsets(ctx); err != nil && ctx.Err() == nil {
				t.Errorf("commit: %v", err)
			}
		}
		cl := h.client(t, kgo.ConsumerGroup("churn"), kgo.ConsumeTopics("t"), kgo.Balancers(kgo.CooperativeStickyBalancer()), kgo.DisableAutoCommit(),
			kgo.BlockRebalanceOnPoll(), kgo.OnPartitionsRevoked(commit), kgo.HeartbeatInterval(50*time.Millisecond),
			kgo.OnPartitionsAssigned(func(context.Context, *kgo.Client, map[string][]int32) { joined.Add(1) }))
		defer cl.CloseAllowingRebalance()
		for i := 0; (i < polls || polls < 0) && s.missing() > 0; i++ {
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			n := 5
			if guestsLeft.Load() {
				n = 100
			}
			poll(t, ctx, cl, n).EachRecord(func(r *kgo.Record) { s.add(t, r.Partition, r.Offset, string(r.Value)) })
			cancel()
			if err := cl.CommitUncommittedOffsets(t.Context()); err != nil {
				t.Errorf("commit: %v", err)
			}
			cl.AllowRebalance()
		}
	}
	members.Go(func() { member(-1) })
	for round := range 4 {
		var guests sync.WaitGroup
		for range 2 {
			guests.Go(func() { member(3 + round) })
		}
		guests.Wait()
	}
	guestsLeft.Store(true)
	members.Wait()
	if s.missing() > 0 || joined.Load() < 2 {
		t.Errorf("%d are missing, %d assignments", s.missing(), joined.Load())
	}
	s.once(t)
}

// A static member that restarts finds its partitions where it left them, without a rebalance of the others.
func TestKgoStaticMembers(t *testing.T) {
	h := newHistory(t, "t", 4, 500)
	s := newSeen(h)
	open := func(instance string) *kgo.Client {
		return h.client(t, kgo.ConsumerGroup("static"), kgo.ConsumeTopics("t"), kgo.InstanceID(instance), kgo.DisableAutoCommit(), kgo.Balancers(kgo.RangeBalancer()))
	}
	clients := []*kgo.Client{open("a"), open("b")}
	mine := make([]map[int32]bool, 2)
	for round := 0; s.missing() > 0; round++ {
		for i, cl := range clients {
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			got := map[int32]bool{}
			poll(t, ctx, cl).EachRecord(func(r *kgo.Record) {
				s.add(t, r.Partition, r.Offset, string(r.Value))
				got[r.Partition] = true
			})
			cancel()
			_ = cl.CommitUncommittedOffsets(t.Context()) // a rebalance at the start may be in the way
			if round == 10 {
				mine[i] = got
				cl.Close() // which does not leave the group
				clients[i] = open([]string{"a", "b"}[i])
			}
			for p := range got {
				if round > 10 && len(mine[i]) == 2 && !mine[i][p] {
					t.Errorf("member %d has partition %d, not one of %v", i, p, mine[i])
				}
			}
		}
	}
}

// Partitions that are given by hand, from the middle on, taken away and given again.
func TestKgoManualAssignment(t *testing.T) {
	h := newHistory(t, "t", 2, 1000)
	cl := h.client(t, kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"t": {0: kgo.NewOffset().At(333)}}))
	next := map[int32]int64{0: 333, 1: 0}
	until := func(ok func() bool) {
		for !ok() && !t.Failed() {
			poll(t, t.Context(), cl).EachRecord(func(r *kgo.Record) {
				if r.Offset != next[r.Partition] || string(r.Value) != h.want[r.Partition][r.Offset] {
					t.Fatalf("partition %d: offset %d where %d is due", r.Partition, r.Offset, next[r.Partition])
				}
				next[r.Partition]++
			})
		}
	}
	until(func() bool { return next[0] >= 500 })
	cl.AddConsumePartitions(map[string]map[int32]kgo.Offset{"t": {1: kgo.NewOffset().At(0)}})
	until(func() bool { return next[1] >= 200 })
	cl.RemoveConsumePartitions(map[string][]int32{"t": {0}})
	at := next[0]
	until(func() bool { return next[1] == 1000 })
	if next[0] != at {
		t.Errorf("partition 0 went on from %d to %d", at, next[0])
	}
	next[0] = 100 // back to what was read before
	cl.AddConsumePartitions(map[string]map[int32]kgo.Offset{"t": {0: kgo.NewOffset().At(100)}})
	until(func() bool { return next[0] == 1000 })
}

// Topics that are found by an expression.
func TestKgoRegex(t *testing.T) {
	h := newHistory(t, "history-a", 1, 400)
	b := load(t, h.addr, "history-b", 1, 500)
	load(t, h.addr, "other", 1, 400)
	cl := h.client(t, kgo.ConsumeRegex(), kgo.ConsumeTopics("^history-.$"))
	next := map[string]int64{}
	for next["history-a"] < 400 || next["history-b"] < 500 {
		poll(t, t.Context(), cl).EachRecord(func(r *kgo.Record) {
			want := map[string][]string{"history-a": h.want[0], "history-b": b[0]}[r.Topic]
			if want == nil || r.Offset != next[r.Topic] || string(r.Value) != want[r.Offset] {
				t.Fatalf("%s: offset %d where %d is due", r.Topic, r.Offset, next[r.Topic])
			}
			next[r.Topic]++
		})
	}
}

// A paused partition brings nothing, and goes on where it was; what was read ahead of it is not lost or given twice.
func TestKgoPauseAndResume(t *testing.T) {
	h := newHistory(t, "t", 3, 600)
	s := newSeen(h)
	cl := h.client(t, kgo.ConsumerGroup("pause"), kgo.ConsumeTopics("t"))
	for i := 0; s.missing() > 0 && !t.Failed(); i++ {
		paused := int32(i / 4 % 4) // 3 pauses none
		if i%4 == 0 {
			cl.ResumeFetchPartitions(map[string][]int32{"t": {0, 1, 2}})
			cl.PauseFetchPartitions(map[string][]int32{"t": {paused}})
		}
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		poll(t, ctx, cl).EachRecord(func(r *kgo.Record) {
			if r.Partition == paused {
				t.Errorf("offset %d of a paused partition", r.Offset)
			}
			s.add(t, r.Partition, r.Offset, string(r.Value))
		})
		cancel()
	}
	s.once(t)
}

// SetOffsets goes back and forth within a group's session.
func TestKgoSetOffsets(t *testing.T) {
	h := newHistory(t, "t", 1, 1000)
	cl := h.client(t, kgo.ConsumerGroup("seek"), kgo.ConsumeTopics("t"), kgo.DisableAutoCommit())
	next := int64(0)
	until := func(offset int64) {
		for next < offset && !t.Failed() {
			poll(t, t.Context(), cl).EachRecord(func(r *kgo.Record) {
				if r.Offset != next || string(r.Value) != h.want[0][r.Offset] {
					t.Fatalf("offset %d where %d is due", r.Offset, next)
				}
				next++
			})
		}
	}
	until(150)
	for _, to := range []int64{700, 20, 21, 640, 0} {
		cl.SetOffsets(map[string]map[int32]kgo.EpochOffset{"t": {0: {Epoch: -1, Offset: to}}})
		next = to
		until(to + 150)
	}
	until(1000)
}

// A transactional session copies history exactly once, though it is ended in the middle.
func TestKgoGroupTransactSession(t *testing.T) {
	h := newHistory(t, "t", 2, 400)
	load(t, h.addr, "copy", 2, 0)
	total := h.total()
	copied := 0
	for round := 0; copied < total; round++ {
		session, err := kgo.NewGroupTransactSession(kgo.SeedBrokers(h.addr), kgo.Dialer(h.transport.DialContext), kgo.ConsumerGroup("session"), kgo.ConsumeTopics("t"),
			kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchIsolationLevel(kgo.ReadCommitted()),
			kgo.TransactionalID("session"), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.FetchMaxPartitionBytes(60_000), kgo.FetchMaxWait(200*time.Millisecond))
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; copied < total && (round > 1 || i < 5); i++ {
			fetches := session.PollRecords(t.Context(), 100)
			fetches.EachError(func(topic string, p int32, err error) { t.Errorf("%s-%d: %v", topic, p, err) })
			if err := session.Begin(); err != nil {
				t.Fatal(err)
			}
			n := 0
			fetches.EachRecord(func(r *kgo.Record) {
				session.Produce(t.Context(), &kgo.Record{Topic: "copy", Partition: r.Partition, Value: slices.Clone(r.Value)}, nil)
				n++
			})
			give := kgo.TryCommit
			if i == 3 {
				give = kgo.TryAbort
			}
			committed, err := session.End(t.Context(), give)
			if err != nil {
				t.Fatal(err)
			}
			if committed {
				copied += n
			}
		}
		session.Close()
	}
	cl := h.client(t, kgo.ConsumeTopics("copy"), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	got := make([][]string, 2)
	for n := 0; n < total; {
		poll(t, t.Context(), cl).EachRecord(func(r *kgo.Record) {
			got[r.Partition] = append(got[r.Partition], string(r.Value))
			n++
		})
	}
	for p := range got {
		if !slices.Equal(got[p], h.want[p]) {
			t.Errorf("partition %d: %d records, not those of %d", p, len(got[p]), len(h.want[p]))
		}
	}
}

// hooks counts what kgo tells of its connections and records.
type hooks struct{ connects, disconnects, reads, fetched, polled, batches atomic.Int64 }

func (h *hooks) OnBrokerConnect(_ kgo.BrokerMetadata, _ time.Duration, c net.Conn, err error) {
	if err == nil && c.RemoteAddr() != nil {
		h.connects.Add(1)
	}
}
func (h *hooks) OnBrokerDisconnect(kgo.BrokerMetadata, net.Conn) { h.disconnects.Add(1) }
func (h *hooks) OnBrokerRead(_ kgo.BrokerMetadata, key int16, n int, _, _ time.Duration, err error) {
	if err == nil && key == 1 {
		h.reads.Add(int64(n))
	}
}
func (h *hooks) OnFetchRecordBuffered(*kgo.Record) { h.fetched.Add(1) }
func (h *hooks) OnFetchRecordUnbuffered(_ *kgo.Record, polled bool) {
	if polled {
		h.polled.Add(1)
	}
}
func (h *hooks) OnFetchBatchRead(_ kgo.BrokerMetadata, _ string, _ int32, m kgo.FetchBatchMetrics) {
	h.batches.Add(int64(m.NumRecords))
}

// kgo's hooks tell of direct reads as of any others.
func TestKgoHooks(t *testing.T) {
	h := newHistory(t, "t", 2, 400)
	var k hooks
	cl := h.client(t, kgo.ConsumeTopics("t"), kgo.WithHooks(&k))
	bytes := 0
	for n := 0; n < 800; {
		poll(t, t.Context(), cl).EachRecord(func(r *kgo.Record) { n++; bytes += len(r.Value) })
	}
	cl.Close()
	if k.connects.Load() == 0 || k.disconnects.Load() != k.connects.Load() || k.fetched.Load() < 800 || k.polled.Load() != 800 || k.batches.Load() < 800 || k.reads.Load() < int64(bytes) {
		t.Errorf("connects %d, disconnects %d, buffered %d, polled %d, in batches %d, bytes read %d of %d", k.connects.Load(), k.disconnects.Load(), k.fetched.Load(),
			k.polled.Load(), k.batches.Load(), k.reads.Load(), bytes)
	}
}

// saramaMember hands on what its group is given.
type saramaMember struct {
	t *testing.T
	s *seen
}

func (saramaMember) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (saramaMember) Cleanup(sarama.ConsumerGroupSession) error { return nil }
func (m saramaMember) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for {
		select {
		case r, ok := <-claim.Messages():
			if !ok {
				return nil
			}
			m.s.add(m.t, r.Partition, r.Offset, string(r.Value))
			session.MarkMessage(r, "")
		case <-session.Context().Done():
			return nil
		}
	}
}

// A consumer group of sarama with members that join late.
func TestSaramaConsumerGroup(t *testing.T) {
	h := newHistory(t, "t", 4, 600)
	s := newSeen(h)
	ctx, cancel := context.WithCancel(t.Context())
	var members sync.WaitGroup
	for range 3 {
		cfg := sarama.NewConfig()
		cfg.Version = sarama.V2_8_0_0
		cfg.Net.Proxy.Enable, cfg.Net.Proxy.Dialer = true, h.transport
		cfg.Consumer.Offsets.Initial = sarama.OffsetOldest
		cfg.Consumer.Fetch.Default = 30_000
		cfg.Consumer.MaxWaitTime = 100 * time.Millisecond
		cfg.Consumer.Group.Rebalance.GroupStrategies = []sarama.BalanceStrategy{sarama.NewBalanceStrategySticky()}
		group, err := sarama.NewConsumerGroup([]string{h.addr}, "sarama", cfg)
		if err != nil {
			t.Fatal(err)
		}
		members.Go(func() {
			defer group.Close()
			for ctx.Err() == nil {
				if err := group.Consume(ctx, []string{"t"}, saramaMember{t, s}); err != nil && ctx.Err() == nil {
					t.Errorf("sarama: %v", err)
					return
				}
			}
		})
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); s.missing() > 0 && time.Now().Before(deadline) && !t.Failed(); {
		<-tick.C
	}
	cancel()
	members.Wait()
	if n := s.missing(); n > 0 {
		t.Errorf("%d are missing", n)
	}
}

// segmentio/kafka-go's Reader, of one partition and in a group.
func TestKafkaGoReader(t *testing.T) {
	h := newHistory(t, "t", 2, 500)
	dialer := &kafkago.Dialer{DialFunc: h.transport.DialContext, Timeout: 10 * time.Second}
	r := kafkago.NewReader(kafkago.ReaderConfig{Brokers: []string{h.addr}, Topic: "t", Partition: 1, MinBytes: 1, MaxBytes: 200_000, MaxWait: 200 * time.Millisecond, Dialer: dialer})
	if err := r.SetOffset(120); err != nil {
		t.Fatal(err)
	}
	for offset := int64(120); offset < 500; offset++ {
		m, err := r.ReadMessage(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if m.Offset != offset || string(m.Value) != h.want[1][offset] {
			t.Fatalf("offset %d where %d is due", m.Offset, offset)
		}
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	s := newSeen(h)
	for round := 0; s.missing() > 0; round++ { // goes on where the one before stopped
		g := kafkago.NewReader(kafkago.ReaderConfig{Brokers: []string{h.addr}, GroupID: "kafka-go", GroupTopics: []string{"t"}, StartOffset: kafkago.FirstOffset, MinBytes: 1,
			MaxBytes: 200_000, MaxWait: 200 * time.Millisecond, Dialer: dialer, JoinGroupBackoff: 50 * time.Millisecond})
		for n := 0; s.missing() > 0 && n < 400; n++ {
			m, err := g.ReadMessage(t.Context()) // which commits
			if err != nil {
				t.Fatal(err)
			}
			s.add(t, int32(m.Partition), m.Offset, string(m.Value))
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	}
	s.once(t)
}
