package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"
)

// TestToolsWithABrokerDown: what can be known is shown, what cannot is named, and nothing is taken for an orphan because
// nobody could be asked. Each tool is asked through one broker that lives.
func TestToolsWithABrokerDown(t *testing.T) {
	c := newCluster(t, 3)
	c.start()
	c.createTopic("alone", 3, 1, "remote.storage.enable=true", "internal.segment.bytes=30000", "local.retention.bytes=1", "retention.ms=-1")
	cl := c.client(kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(kgo.NoCompression()))
	produce(t, cl, "alone", 0, 2000) // partition 0
	c.createTopic("safe", 1, 3)
	c.until("segments are in the tier", func() bool {
		var rows []tierState
		out, code := c.nodes[0].varve("tier", "ls", "alone", "--json", "-b", c.seeds())
		return code == 0 && json.Unmarshal([]byte(out), &rows) == nil && len(rows) == 3 && rows[0].Segments > 5 && rows[0].LagSegments == 0
	})
	down := c.describe("alone")[0].Leader
	up := c.node(down%3 + 1)
	c.node(down).kill()
	ask := func(args ...string) (string, int) { return up.varve(append(args, "-b", up.address())...) }
	c.fenced(down)
	for _, x := range []struct {
		args string
		code int
		want []string
	}{
		{"broker ls", 0, []string{"fenced"}},
		{"topic ls", 1, []string{"1 without a leader", "safe", "1 topics have partitions without a leader"}},
		{"topic describe alone", 1, []string{fmt.Sprintf("no leader; offline %d", down), "ok\n", "without a leader: 0"}},
		{"topic describe alone --replicas", 1, []string{"offline", "in sync"}},
		{"topic describe safe", 0, []string{fmt.Sprintf("offline %d", down)}},
		{"tier ls", 1, []string{"alone-1", "alone-2", fmt.Sprintf("nothing is known of alone-0: no broker of [%d] is alive", down)}},
		{"tier fsck --repair --min-age 0s --bucket " + c.bucket, 1, []string{"the bucket cannot be judged: nothing is known of alone-0"}},
		{"quorum status", 0, []string{"3 ", "voter, leader"}},
		{"topic create another -r 2", 0, []string{"created another"}},
		{"topic create lazy -r 2 -c min.insync.replicas=10", 0, []string{"warning: min.insync.replicas=10 is above the number of replicas, 2"}},
	} {
		out, code := ask(strings.Fields(x.args)...)
		if code != x.code {
			t.Errorf("varve %s: exit %d, want %d: %s", x.args, code, x.code, out)
		}
		for _, w := range x.want {
			if !strings.Contains(out, w) {
				t.Errorf("varve %s: want %q in\n%s", x.args, w, out)
			}
		}
	}
	c.until("the new topic is known everywhere", func() bool {
		out, code := ask("topic", "describe", "lazy")
		return code == 0 && strings.Contains(out, "warning: min.insync.replicas=10 is above the number of replicas, 2")
	})
	c.node(down).start()
	if out := c.varve("tier", "fsck", "--min-age", "0s", "--bucket", c.bucket); !strings.Contains(out, "missing objects     0") || !strings.Contains(out, "orphans             0") {
		t.Error(out)
	}
	c.holds("alone", 2000)
}

// TestReassignAndCancel: a reassignment to a broker that is down waits, is shown, and can be taken back.
func TestReassignAndCancel(t *testing.T) {
	c := newCluster(t, 3)
	c.start()
	c.createTopic("moving", 2, 2)
	before := c.level("moving")
	absent := func(p partitionState) int32 {
		for id := int32(1); id <= 3; id++ {
			if id != p.Replicas[0] && id != p.Replicas[1] {
				return id
			}
		}
		return 0
	}(before[0])
	c.node(absent).kill()
	c.fenced(absent)
	c.varve("topic", "reassign", "moving:0", "--to", fmt.Sprintf("%d,%d", absent, before[0].Replicas[0]))
	c.until("the reassignment is shown", func() bool {
		p := c.describe("moving")
		return len(p) == 2 && fmt.Sprint(p[0].Adding, p[0].Removing) == fmt.Sprint([]int32{absent}, []int32{before[0].Replicas[1]})
	})
	c.until("in words too", func() bool {
		out, _ := c.nodes[absent%3].varve("topic", "describe", "moving", "-b", c.seeds())
		return strings.Contains(out, fmt.Sprintf("adding %d; removing %d", absent, before[0].Replicas[1]))
	})
	if out := c.varve("topic", "reassign", "moving", "--cancel"); out != "moving-0 stays where it was\n" {
		t.Error(out)
	}
	c.until("it is where it was", func() bool {
		p := c.describe("moving")
		return len(p) == 2 && len(p[0].Adding)+len(p[0].Removing) == 0 && fmt.Sprint(p[0].Replicas) == fmt.Sprint(before[0].Replicas)
	})
	c.refused("no partition of moving is being reassigned", "topic", "reassign", "moving", "--cancel")
	c.node(absent).start()
	c.varve("topic", "reassign", "moving", "--to", fmt.Sprintf("%d,%d", absent, before[0].Replicas[0]), "--wait")
	want := map[int32]string{0: fmt.Sprint([]int32{absent, before[0].Replicas[0]}), 1: fmt.Sprint([]int32{before[0].Replicas[0], absent})} // turned by one
	c.until("all is on the brokers that it was moved to", func() bool {
		for _, p := range c.level("moving") {
			if fmt.Sprint(p.Replicas) != want[p.Partition] {
				return false
			}
		}
		return true
	})
}
