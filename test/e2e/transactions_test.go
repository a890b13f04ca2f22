package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/testport"
)

// pipe copies records of one topic to another exactly once, as a member of a group, until ctx ends. Now and then it aborts.
func pipe(ctx context.Context, t *testing.T, c *cluster, name string, opts ...kgo.Opt) {
	for ctx.Err() == nil {
		s, err := kgo.NewGroupTransactSession(append(opts, kgo.SeedBrokers(strings.Split(c.seeds(), ",")...), kgo.ConsumerGroup("pipe"), kgo.ConsumeTopics("in"), kgo.TransactionalID(name),
			kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.DefaultProduceTopic("out"), kgo.TransactionTimeout(10*time.Second),
			kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchMaxWait(200*time.Millisecond),
			kgo.SessionTimeout(6*time.Second), kgo.HeartbeatInterval(500*time.Millisecond), kgo.RetryTimeout(20*time.Second))...)
		if err != nil {
			t.Error(err)
			return
		}
		for ctx.Err() == nil {
			fetches := s.PollFetches(ctx)
			if ctx.Err() != nil {
				break
			}
			if fetches.Err() != nil || fetches.NumRecords() == 0 {
				continue
			}
			if err := s.Begin(); err != nil {
				break
			}
			failed := kgo.AbortingFirstErrPromise(s.Client())
			fetches.EachRecord(func(r *kgo.Record) {
				s.Produce(ctx, &kgo.Record{Partition: r.Partition, Key: r.Key, Value: r.Value}, failed.Promise())
			})
			commit := failed.Err() == nil && rand.IntN(5) > 0
			end, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			_, err := s.End(end, kgo.TransactionEndTry(commit))
			cancel()
			if err != nil && ctx.Err() == nil {
				t.Logf("%s begins anew: %v", name, err)
				break
			}
		}
		s.Close()
	}
}

// TestExactlyOnceUnderKills: two processes copy a topic in transactions while brokers die, and the copy has every record once.
func TestExactlyOnceUnderKills(t *testing.T) {
	t.Run("classic", func(t *testing.T) { exactlyOnce(t) })
	t.Run("consumer", func(t *testing.T) { exactlyOnce(t, kgo.ServerSideBalancer()) })
}

func exactlyOnce(t *testing.T, member ...kgo.Opt) {
	const partitions, count = 3, 3000
	c := newCluster(t, 3, soon...)
	c.start()
	for _, name := range []string{"in", "out"} {
		c.createTopic(name, partitions, 3, "min.insync.replicas=2")
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Go(func() { pipe(ctx, t, c, fmt.Sprint("pipe-", i), member...) })
	}
	wg.Go(func() {
		cl := c.client(kgo.RecordPartitioner(kgo.ManualPartitioner()))
		for i := range count {
			cl.Produce(ctx, &kgo.Record{Topic: "in", Partition: int32(i % partitions), Key: []byte(strconv.Itoa(i))}, func(_ *kgo.Record, err error) {
				if err != nil && !errors.Is(err, context.Canceled) {
					t.Errorf("produce: %v", err)
				}
			})
			if i%100 == 99 {
				if err := cl.Flush(ctx); err != nil {
					return
				}
				time.Sleep(100 * time.Millisecond) // the copy goes on through all of the kills
			}
		}
	})
	seen := map[string]int64{}
	reader := c.client(kgo.ConsumeTopics("out"), kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	last := map[int32]int{0: -1, 1: -1, 2: -1}
	read := func(until int) {
		t.Helper()
		limit, done := context.WithTimeout(ctx, 90*time.Second)
		defer done()
		for len(seen) < until {
			fetches := reader.PollFetches(limit)
			if limit.Err() != nil {
				t.Fatalf("%d of %d records came through", len(seen), until)
			}
			fetches.EachRecord(func(r *kgo.Record) {
				if at, twice := seen[string(r.Key)]; twice {
					t.Fatalf("record %s is at offsets %d and %d", r.Key, at, r.Offset)
				}
				seen[string(r.Key)] = r.Offset
				n, _ := strconv.Atoi(string(r.Key))
				if n <= last[r.Partition] {
					t.Fatalf("record %d follows %d", n, last[r.Partition])
				}
				last[r.Partition] = n
			})
		}
	}
	for i, n := range c.nodes {
		read(count / 5 * (i + 1))
		n.kill()
		n.start()
	}
	read(count)
	cancel()
	wg.Wait()
}

// beforeV2 makes a client that knows no transaction version 2: brokers do not put its partitions into transactions.
func beforeV2() kgo.Opt {
	v := kversion.Stable()
	v.SetMaxKeyVersion(0, 11)
	return kgo.MaxVersions(v)
}

// TestHangingTransaction: a transaction that no coordinator knows is seen, found and aborted; one that its coordinator will end is left to it.
func TestHangingTransaction(t *testing.T) {
	port := testport.Free(t)
	n := newNode(t, "transaction.partition.verification.enable=false", fmt.Sprintf("varve.http.listener=127.0.0.1:%d", port))
	n.start()
	n.createTopic("txn", 1, tieredConfig...)
	cl := n.manual()
	produce(t, cl, "txn", 0, 1000)
	b := recordbatch.NewBuilder()
	b.ProducerID, b.ProducerEpoch, b.BaseSequence, b.Transactional = 4711, 0, 0, true
	b.Add(recordbatch.Record{Timestamp: time.Now().Add(-time.Hour).UnixMilli(), Key: []byte("1000"), Value: value(1000)})
	batch, err := b.Build()
	if err != nil {
		t.Fatal(err)
	}
	if err := rawProduce(t, n.manual(beforeV2()), "txn", batch, kmsg.StringPtr("old")); err != nil {
		t.Fatal(err)
	}
	produce(t, cl, "txn", 1001, 1500)
	// One that is alive, beside it.
	n.createTopic("live", 1)
	live := n.client(kgo.TransactionalID("alive"), kgo.DefaultProduceTopic("live"))
	if err := live.BeginTransaction(); err != nil {
		t.Fatal(err)
	}
	if err := live.ProduceSync(t.Context(), &kgo.Record{Value: []byte("x")}).FirstErr(); err != nil {
		t.Fatal(err)
	}

	says := func(wantCode int, wants []string, args ...string) {
		t.Helper()
		out, code := n.varve(append(args, "-b", n.address())...)
		if code != wantCode {
			t.Fatalf("varve %v: exit %d: %s", args, code, out)
		}
		for _, want := range wants {
			if !strings.Contains(out, want) {
				t.Errorf("varve %v: %q is missing in\n%s", args, want, out)
			}
		}
	}
	late := func(want string) bool {
		return strings.Contains(n.http(port, "/metrics"), "kafka_server_replicamanager_partitionswithlatetransactionscount "+want+"\n")
	}
	if !late("1") {
		t.Error("the metric of late transactions does not show it")
	}
	n.until("the tier says what holds it back", func() bool {
		out, _ := n.varve("tier", "ls", "-b", n.address())
		return strings.Contains(out, "held back by a transaction open since offset 1000")
	})
	says(0, []string{"alive", "Ongoing", "live:0"}, "txn", "ls")
	says(1, []string{"txn:0", "1000", "4711", "no transactional id has this producer", "1 transactions hang"}, "txn", "find-hanging")
	says(0, []string{"PARTITION"}, "txn", "find-hanging", "live", "--older-than", "0s")
	says(1, []string{"it does not hang", "transactional id alive is Ongoing"}, "txn", "abort", "live:0", "--start", "0")
	says(1, []string{"no open transaction with its first record at offset 7, but at 1000"}, "txn", "abort", "txn:0", "--start", "7")
	says(2, []string{"start"}, "txn", "abort", "txn:0")
	says(2, []string{"TOPIC:PARTITION"}, "txn", "abort", "txn", "--start", "1000")
	says(1, nil, "txn", "find-hanging", "nosuch")
	says(0, []string{"aborted the transaction of producer 4711"}, "txn", "abort", "txn:0", "--start", "1000")
	says(0, nil, "txn", "find-hanging", "txn", "--older-than", "0s")
	if !late("0") {
		t.Error("the metric of late transactions still shows it")
	}
	n.until("the tier goes on", func() bool {
		out, _ := n.varve("tier", "ls", "-b", n.address())
		return !strings.Contains(out, "held back")
	})
	keys := 0
	reader := n.client(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"txn": {0: kgo.NewOffset().AtStart()}}), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	for keys < 1499 {
		fetches := reader.PollFetches(t.Context())
		if err := fetches.Err(); err != nil {
			t.Fatal(err)
		}
		fetches.EachRecord(func(r *kgo.Record) {
			if string(r.Key) == "1000" {
				t.Error("an aborted record is shown")
			}
			keys++
		})
	}
	if err := live.EndTransaction(t.Context(), kgo.TryCommit); err != nil {
		t.Fatal(err)
	}
}
