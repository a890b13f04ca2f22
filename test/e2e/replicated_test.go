package e2e

import (
	"testing"
	"time"
)

// underLoad is a cluster of three nodes with a topic "orders" of three partitions, and writes to it that are acknowledged.
func underLoad(t *testing.T) (*cluster, *load) {
	t.Helper()
	c := newCluster(t, 3)
	c.start()
	c.createTopic("orders", 3, 3, "min.insync.replicas=2")
	l := c.load("orders", 3)
	l.goesOn()
	return c, l
}

// TestEveryNodeDiesAndNothingIsLost: each of three nodes in turn is killed, and one hangs for longer than its session.
func TestEveryNodeDiesAndNothingIsLost(t *testing.T) {
	c, l := underLoad(t)
	for i, n := range c.nodes {
		l.longest()
		n.kill()
		l.goesOn()
		t.Logf("node %d killed: %v without an acknowledged write", i+1, l.longest().Round(time.Millisecond))
		n.start()
		c.level("orders")
	}
	l.longest()
	c.nodes[1].pause()
	c.until("the node that hangs is fenced", func() bool { return c.brokers()[2].Fenced })
	l.goesOn()
	t.Logf("node 2 paused: %v without an acknowledged write", l.longest().Round(time.Millisecond))
	c.nodes[1].resume()
	c.until("it is back", func() bool { b, ok := c.brokers()[2]; return ok && !b.Fenced })
	c.level("orders")
	l.goesOn()
	l.stop()
	c.identical("orders")
}

// TestTwoOfThreeDieAtOnce: without a majority nothing is acknowledged; when it is back, everything goes on by itself, on
// partitions too whose leader lived through it all.
func TestTwoOfThreeDieAtOnce(t *testing.T) {
	c, l := underLoad(t)
	c.nodes[1].kill()
	c.nodes[2].kill()
	c.until("the node that is left says why it is not ready", func() bool {
		body, status := c.nodes[0].get("/ready")
		return status == 503 && body != ""
	})
	body, _ := c.nodes[0].get("/ready")
	t.Logf("/ready: %s", body)
	c.nodes[1].launch()
	c.nodes[2].launch()
	c.nodes[1].serves()
	c.nodes[2].serves()
	l.goesOn()
	c.level("orders")
	l.stop()
	c.identical("orders")
}

// TestRollingRestart: a clean restart of each node costs no error and hardly any time.
func TestRollingRestart(t *testing.T) {
	c, l := underLoad(t)
	for i, n := range c.nodes {
		l.longest()
		n.stop()
		l.goesOn()
		t.Logf("node %d stopped: %v without an acknowledged write", i+1, l.longest().Round(time.Millisecond))
		n.start()
		c.level("orders")
		t.Logf("node %d started: %v without an acknowledged write", i+1, l.longest().Round(time.Millisecond))
	}
	l.stop()
	c.identical("orders")
}
