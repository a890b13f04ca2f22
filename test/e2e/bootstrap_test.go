package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// smallTiered topics have segments of 30,000 bytes. A leader of trimmed ones keeps little locally, of others everything.
var (
	smallTrimmed = []string{"remote.storage.enable=true", "internal.segment.bytes=30000", "local.retention.bytes=1", "retention.ms=-1", "min.insync.replicas=2"}
	smallKept    = []string{"remote.storage.enable=true", "internal.segment.bytes=30000", "retention.ms=-1", "min.insync.replicas=2"}
)

// copyMax is what a new replica may copy of such a topic: the open segment and what is not uploaded yet, of about a megabyte.
const copyMax = 100_000

// uploaded waits until what is sealed is in the tier.
func (c *cluster) uploaded(topic string) tierState {
	c.t.Helper()
	var s tierState
	c.until(topic+" is in the tier", func() bool {
		s = c.nodes[0].tierAt(topic, c.seeds())
		return s.LagSegments == 0 && s.Segments > 20
	})
	return s
}

// logSize is the size of a replica's segments on the disk.
func (n *node) logSize(partition string) (size int64) {
	n.t.Helper()
	files, err := filepath.Glob(filepath.Join(n.dir, partition, "*.log"))
	if err != nil || len(files) == 0 {
		n.t.Fatalf("%s has no segments (%v)", partition, err)
	}
	for _, f := range files {
		info, err := os.Stat(f)
		if err != nil {
			n.t.Fatal(err)
		}
		size += info.Size()
	}
	return size
}

func (c *cluster) lead(topic string, id int32) {
	c.t.Helper()
	adm := kadm.NewClient(c.client())
	var set kadm.TopicsSet
	set.Add(topic, 0)
	c.until(fmt.Sprintf("%d leads %s", id, topic), func() bool {
		p := c.describe(topic)
		if len(p) == 1 && p[0].Leader == id {
			return true
		}
		if _, err := adm.ElectLeaders(context.Background(), kadm.ElectPreferredReplica, set); err != nil {
			c.t.Log(err) // the next time perhaps
		}
		return false
	})
}

// TestANewBrokerCopiesOnlyWhatTheBucketLacks: a fourth broker takes over replicas and then the lead.
func TestANewBrokerCopiesOnlyWhatTheBucketLacks(t *testing.T) {
	c := newCluster(t, 3)
	c.start()
	cl := c.client(kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(kgo.NoCompression()))
	topics := []string{"trimmed", "kept"}
	for i, configs := range [][]string{smallTrimmed, smallKept} {
		name := topics[i]
		c.createTopic(name, 1, 3, configs...)
		produce(t, cl, name, 0, 10_000)
	}
	for _, name := range topics {
		c.uploaded(name)
	}
	if p := c.describe("kept"); p[0].Detail[0].LocalStart != 0 {
		t.Fatalf("a leader that keeps everything begins at %d", p[0].Detail[0].LocalStart)
	}
	fourth := c.join()
	var before int64
	for _, name := range topics {
		c.varve("topic", "reassign", name+":0", "--to", "4,1,2", "--wait")
		p := c.level(name)[0]
		copied, size := fourth.copied()-before, fourth.logSize(name+"-0")
		before += copied
		t.Logf("%s: %d bytes copied, %d on the disk, local from %d of %d", name, copied, size, p.Detail[0].LocalStart, p.End)
		if copied > copyMax || size > copyMax {
			t.Errorf("%s: %d bytes were copied, %d are on the disk, %d would do", name, copied, size, copyMax)
		}
	}
	for _, name := range topics {
		c.lead(name, 4)
		produce(t, cl, name, 10_000, 1000) // by the producer that the new replica knows from the bucket alone
		c.holds(name, 11_000)
		c.level(name)
		out := c.varve("tier", "ls", name)
		t.Log(out)
	}
}

// TestAWipedBrokerCopiesOnlyWhatTheBucketLacks: a node loses its whole disk, as a follower and as a leader, and is started
// again with the same command.
func TestAWipedBrokerCopiesOnlyWhatTheBucketLacks(t *testing.T) {
	c := newCluster(t, 3)
	c.start()
	c.createTopic("history", 1, 3, smallTrimmed...)
	cl := c.client(kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(kgo.NoCompression()))
	produce(t, cl, "history", 0, 10_000)
	c.uploaded("history")
	end := 10_000
	for _, leader := range []bool{false, true} {
		p := c.level("history")[0]
		id := p.Leader
		if !leader {
			for _, r := range p.Replicas {
				if r != p.Leader {
					id = r
				}
			}
		}
		n := c.node(id)
		n.kill()
		n.wipe()
		c.until("it leaves the ISR", func() bool {
			p := c.describe("history")
			return len(p) == 1 && len(p[0].ISR) == 2
		})
		produce(t, cl, "history", end, 500)
		end += 500
		n.start()
		c.level("history")
		if copied, size := n.copied(), n.logSize("history-0"); copied > copyMax || size > copyMax {
			t.Errorf("%d bytes were copied, %d are on the disk, %d would do", copied, size, copyMax)
		} else {
			t.Logf("node %d, leader %v: %d bytes copied, %d on the disk", id, leader, copied, size)
		}
		c.holds("history", end)
	}
	out := c.varve("quorum", "status")
	t.Log(out)
}
