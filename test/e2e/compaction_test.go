package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

var compactedConfig = []string{"cleanup.policy=compact", "internal.segment.bytes=20000", "min.cleanable.dirty.ratio=0.1"}

// keys is what a compacted topic must tell in the end: the last value of each key.
type keys struct {
	t     *testing.T
	topic string
	last  map[string]string
	count int
}

// write produces values of a hundred keys, and deletes one of them now and then.
func (k *keys) write(cl *kgo.Client, n int) {
	k.t.Helper()
	for range n {
		r := &kgo.Record{Topic: k.topic, Key: fmt.Append(nil, "key", rand.IntN(100))}
		if rand.IntN(10) > 0 {
			r.Value = fmt.Append(nil, "value ", k.count)
		}
		k.count++
		k.last[string(r.Key)] = string(r.Value)
		cl.Produce(context.Background(), r, func(_ *kgo.Record, err error) {
			if err != nil {
				k.t.Error(err)
			}
		})
		if k.count%50 == 0 {
			if err := cl.Flush(context.Background()); err != nil {
				k.t.Fatal(err)
			}
		}
	}
	if err := cl.Flush(context.Background()); err != nil {
		k.t.Fatal(err)
	}
}

// read returns the number of records in the topic, whose last values must be those that were written.
func (k *keys) read(n *node) int {
	k.t.Helper()
	end := n.logEnd(k.topic)
	cl := n.client(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{k.topic: {0: kgo.NewOffset().AtStart()}}))
	defer cl.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	got, records, at := map[string]string{}, 0, int64(-1)
	for at+1 < end {
		fetches := cl.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			k.t.Fatalf("behind offset %d of %d: %v", at, end, err)
		}
		fetches.EachRecord(func(r *kgo.Record) {
			if r.Offset <= at {
				k.t.Fatalf("offset %d after %d", r.Offset, at)
			}
			at = r.Offset
			records++
			got[string(r.Key)] = string(r.Value)
		})
	}
	for key, want := range k.last {
		if have := got[key]; have != want {
			k.t.Fatalf("%s is %q, want %q", key, have, want)
		}
	}
	return records
}

// TestCompactedTopic: of many values of few keys the last ones stay, through kills in the middle of compactions.
func TestCompactedTopic(t *testing.T) {
	n := newNode(t, "log.cleaner.backoff.ms=10")
	n.start()
	n.createTopic("state", 1, compactedConfig...)
	k := &keys{t: t, topic: "state", last: map[string]string{}}
	for range 4 {
		cl := n.client()
		k.write(cl, 5000)
		cl.Close()
		n.kill()
		n.start()
		k.read(n)
	}
	n.until("what is superseded is gone", func() bool { return k.read(n) < 2000 })
	n.stop()
	n.start()
	if records := k.read(n); records >= 2000 {
		t.Errorf("%d records after a restart", records)
	}
	if err := n.client().ProduceSync(context.Background(), &kgo.Record{Topic: "state", Value: []byte("no key")}).FirstErr(); err == nil {
		t.Error("a record without a key was taken")
	}
}

// TestCompactedTopicOnAFollower: a broker that lost its disk copies a log with holes, and compacts on its own.
func TestCompactedTopicOnAFollower(t *testing.T) {
	c := newCluster(t, 3, "log.cleaner.backoff.ms=10")
	c.start()
	c.createTopic("state", 1, 3, compactedConfig...)
	k := &keys{t: t, topic: "state", last: map[string]string{}}
	cl := c.client()
	k.write(cl, 10_000)
	for range 3 {
		state := c.level("state")[0]
		leader := c.node(state.Leader)
		leader.until("what is superseded is gone", func() bool { return k.read(leader) < 2000 })
		var follower *node
		for _, r := range state.Replicas {
			if n := c.node(r); n != leader {
				follower = n
			}
		}
		follower.kill()
		follower.wipe()
		k.write(cl, 2000)
		follower.start()
		c.level("state")
		leader.kill() // now it is one of the others, perhaps the one that began anew
		k.write(cl, 500)
		leader.start()
		k.read(c.node(c.level("state")[0].Leader))
	}
}
