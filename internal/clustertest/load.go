package clustertest

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// Load writes numbered records to partition 0 of a topic, with acks=all and idempotently, until it is stopped.
type Load struct {
	c      *Cluster
	topic  string
	cl     *kgo.Client
	cancel context.CancelFunc
	ended  chan struct{}

	mu    sync.Mutex
	next  int
	acked int
	last  time.Time
	gap   time.Duration
	err   error
}

// pace is the time between two records of a load.
const pace = 20 * time.Millisecond

// value is what record i holds.
func value(i int) []byte { return bytes.Repeat([]byte(fmt.Sprintf("value %d ", i)), 10) }

// Load begins a load.
func (c *Cluster) Load(topic string, opts ...kgo.Opt) *Load {
	c.T.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	l := &Load{c: c, topic: topic, cancel: cancel, ended: make(chan struct{}), last: time.Now(), cl: c.Client(opts...)}
	go func() {
		defer close(l.ended)
		tick := time.NewTicker(pace)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			l.mu.Lock()
			i := l.next
			l.next++
			l.mu.Unlock()
			l.cl.Produce(context.Background(), &kgo.Record{Topic: topic, Key: []byte(strconv.Itoa(i)), Value: value(i)}, l.done)
		}
	}()
	c.T.Cleanup(cancel)
	return l
}

func (l *Load) done(_ *kgo.Record, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.err = err
		return
	}
	now := time.Now()
	l.gap, l.last = max(l.gap, now.Sub(l.last)), now
	l.acked++
}

// GoesOn waits until a write is acknowledged that was handed over after now, and returns how long that took.
func (l *Load) GoesOn(limit time.Duration) time.Duration {
	l.c.T.Helper()
	l.mu.Lock()
	from := l.next
	l.mu.Unlock()
	return l.c.Until("writes to "+l.topic+" are acknowledged", limit, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.err != nil {
			l.c.T.Fatalf("a write failed: %v", l.err)
		}
		return l.acked > from
	})
}

// Longest is the longest time without an acknowledgement since it was asked last.
func (l *Load) Longest() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	gap := max(l.gap, time.Since(l.last))
	l.gap = 0
	return gap
}

// Stop ends the load, and demands that every record was acknowledged and is there, once and in order. It returns how many.
func (l *Load) Stop() int {
	t := l.c.T
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	l.quiet()
	if err := l.cl.Flush(ctx); err != nil {
		t.Fatalf("writes that are not acknowledged: %v", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil || l.acked != l.next {
		t.Fatalf("%d of %d writes were acknowledged: %v", l.acked, l.next, l.err)
	}
	l.c.Holds(l.topic, l.next)
	return l.next
}

// quiet ends the writing.
func (l *Load) quiet() {
	l.cancel()
	<-l.ended
}

// Holds demands that partition 0 of a topic holds records 0 up to end, each once and in order.
func (c *Cluster) Holds(topic string, end int, opts ...kgo.Opt) {
	c.T.Helper()
	cl := c.Client(append([]kgo.Opt{kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().AtStart()}})}, opts...)...)
	defer cl.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	for next := 0; next < end; {
		f := cl.PollFetches(ctx)
		if ctx.Err() != nil {
			c.T.Fatalf("only %d of %d records of %s could be read", next, end, topic)
		}
		f.EachError(func(_ string, _ int32, err error) { c.T.Fatalf("%s: %v", topic, err) })
		f.EachRecord(func(r *kgo.Record) {
			if string(r.Key) != strconv.Itoa(next) || !bytes.Equal(r.Value, value(next)) {
				c.T.Fatalf("%s: offset %d holds record %q, want %d", topic, r.Offset, r.Key, next)
			}
			next++
		})
	}
}

// Same demands that the replicas of a topic on these nodes have the same log, byte for byte, and the same lineage.
func (c *Cluster) Same(topic string, ids ...int32) {
	c.T.Helper()
	for _, pattern := range []string{"*.log", "leader-epoch-checkpoint"} {
		want := c.Node(ids[0]).Files(topic+"-0", pattern)
		if len(want) == 0 {
			c.T.Fatalf("node %d has no %s of %s", ids[0], pattern, topic)
		}
		for _, id := range ids[1:] {
			if got := c.Node(id).Files(topic+"-0", pattern); !bytes.Equal(got, want) {
				if pattern != "*.log" {
					c.T.Errorf("%s of %s:\nnode %d %q\nnode %d %q", pattern, topic, ids[0], want, id, got)
					continue
				}
				c.T.Errorf("%s of %s: %d bytes on node %d, %d on node %d, or others", pattern, topic, len(want), ids[0], len(got), id)
			}
		}
	}
}
