package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// TestSegmentBordersThatDiffer: segments of replicas end where they happened to, remote ones where the leader of the moment
// had its borders. Every replica lets go of what the tier has, and every one can serve the whole.
func TestSegmentBordersThatDiffer(t *testing.T) {
	c := newCluster(t, 3)
	c.start()
	c.createTopic("borders", 1, 3, smallTrimmed...)
	c.level("borders")
	cl := c.client(kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(kgo.NoCompression()))
	written := 0
	for round := range 6 {
		id := int32(round%3) + 1
		c.varve("topic", "reassign", "borders:0", "--to", []string{"", "1,2,3", "2,3,1", "3,1,2"}[id], "--wait")
		c.lead("borders", id)
		produce(t, cl, "borders", written, 1700)
		written += 1700
		c.node(id%3 + 1).stop() // a restart closes nobody's segment, and moves nobody's border
		c.node(id%3 + 1).start()
	}
	c.level("borders")
	c.uploaded("borders")
	c.until("every replica has let go of what the tier has", func() bool {
		p := c.describe("borders")
		if len(p) != 1 || len(p[0].Detail) != 3 {
			return false
		}
		for _, r := range p[0].Detail {
			if r.LocalBytes > 3*30_000 {
				return false
			}
		}
		return true
	})
	for id := int32(1); id <= 3; id++ {
		c.varve("topic", "reassign", "borders:0", "--to", []string{"", "1,2,3", "2,3,1", "3,1,2"}[id], "--wait")
		c.lead("borders", id)
		readAll(t, c.nodes[0], "borders", written)
	}
}

// TestReadersOfARack: a consumer that names its rack reads from its replica there, history from the bucket through the
// leader, and goes on at the leader when its replica is gone (KIP-392).
func TestReadersOfARack(t *testing.T) {
	c := newCluster(t, 3)
	for i, n := range c.nodes {
		n.args = append(n.args, "--rack", "rack-"+string(rune('a'+i)))
	}
	c.start()
	c.createTopic("racks", 1, 3, "min.insync.replicas=2")
	cl := c.client(kgo.RecordPartitioner(kgo.ManualPartitioner()))
	produce(t, cl, "racks", 0, 500)
	leader := c.level("racks")[0].Leader
	near := leader%3 + 1
	bytesOut := func(id int32) bool {
		body, _ := c.node(id).get("/metrics")
		return strings.Contains(body, `kafka_server_brokertopicmetrics_bytesout_total{topic="racks"}`)
	}
	// This client leaves a replica that died when it asks the leader again, which it does after half an hour unless told.
	reader := c.client(kgo.RecheckPreferredReplicaInterval(500*time.Millisecond), kgo.Rack("rack-"+string(rune('a'+near-1))), kgo.ConsumeTopics("racks"), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	next := 0
	read := func(upTo int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
		defer cancel()
		for next < upTo {
			reader.PollFetches(ctx).EachRecord(func(r *kgo.Record) {
				if r.Offset != int64(next) {
					t.Fatalf("offset %d after %d records", r.Offset, next)
				}
				next++
			})
			if ctx.Err() != nil {
				t.Fatalf("%d of %d records", next, upTo)
			}
		}
	}
	read(500)
	if !bytesOut(near) || bytesOut(leader) {
		t.Fatalf("read from the leader: %v, from the replica of the rack: %v", bytesOut(leader), bytesOut(near))
	}
	c.node(near).kill()
	produce(t, cl, "racks", 500, 500)
	read(1000)
}

// TestThinReplicasThicken: with a rate for it, replicas that hold little fill their local logs from the bucket.
func TestThinReplicasThicken(t *testing.T) {
	c := newCluster(t, 3)
	c.start()
	c.createTopic("thick", 1, 2, smallKept...)
	cl := c.client(kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(kgo.NoCompression()))
	produce(t, cl, "thick", 0, 10_000)
	c.uploaded("thick")
	first := c.level("thick")[0]
	third := int32(6)
	for _, r := range first.Replicas {
		third -= r
	}
	before := c.node(third).copied()
	c.varve("topic", "reassign", "thick:0", "--to", fmt.Sprintf("%d,%d", third, first.Leader), "--wait")
	local := func() (start, bytes int64) {
		for _, p := range c.describe("thick") {
			for _, r := range p.Detail {
				if r.Broker == third {
					return r.LocalStart, r.LocalBytes
				}
			}
		}
		return -1, -1
	}
	if start, bytes := local(); start == 0 || bytes > copyMax {
		t.Fatalf("the new replica begins at %d and has %d bytes", start, bytes)
	}
	rate := "100000000"
	if _, err := kadm.NewClient(c.client()).AlterBrokerConfigs(context.Background(), []kadm.AlterConfig{{Op: kadm.SetConfig, Name: "follower.backfill.bytes.per.second", Value: &rate}}); err != nil {
		t.Fatal(err)
	}
	c.until("the replica has everything", func() bool {
		start, bytes := local()
		return start == 0 && bytes > 500_000
	})
	if copied := c.node(third).copied() - before; copied > copyMax {
		t.Errorf("%d bytes came from the leader", copied)
	}
	c.lead("thick", third)
	readAll(t, c.nodes[0], "thick", 10_000)
}
