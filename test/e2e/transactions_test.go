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
