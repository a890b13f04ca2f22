package clustertest

import (
	"slices"
	"testing"
	"time"
)

// The times of a broker's defaults.
const (
	grace   = 3 * time.Second  // varve.broker.disconnect.grace.ms
	session = 9 * time.Second  // broker.session.timeout.ms
	lagMax  = 30 * time.Second // replica.lag.time.max.ms
)

// other is a node that is none of the given ones.
func (c *Cluster) other(but ...int32) int32 {
	for _, n := range c.Nodes {
		if !slices.Contains(but, n.ID) {
			return n.ID
		}
	}
	c.T.Fatal("no other node")
	return 0
}

// all are the ids of all nodes, first of them the given ones.
func (c *Cluster) all(first ...int32) []int32 {
	out := slices.Clone(first)
	for _, n := range c.Nodes {
		if !slices.Contains(first, n.ID) {
			out = append(out, n.ID)
		}
	}
	return out
}

// TestLeaderDies: a leader that is killed is found out by its connections, long before its session is over; what was
// acknowledged is there, and it comes back as a follower with the same log.
func TestLeaderDies(t *testing.T) {
	Run(t, 3, func(c *Cluster) {
		leader := c.other(c.Controller())
		c.CreateTopic("orders", c.all(leader), [2]string{"min.insync.replicas", "2"})
		via := c.Node(c.other(leader))
		l := c.Load("orders")
		l.GoesOn(time.Minute)
		l.Longest()
		c.Node(leader).Kill()
		took := c.Until("another leads", time.Minute, func() bool { s := via.State("orders"); return s.Leader > 0 && s.Leader != leader })
		if took < grace/2 || took > grace+time.Second {
			t.Errorf("another leads after %v, want about %v", took, grace)
		}
		l.GoesOn(time.Minute)
		t.Logf("another leads after %v; %v without an acknowledged write", took, l.Longest())
		s := via.State("orders")
		if slices.Contains(s.ISR, leader) {
			t.Errorf("the dead leader is in sync: %v", s)
		}
		c.Pass(time.Minute)
		c.Node(leader).Start()
		c.Node(leader).Serves()
		t.Logf("in sync again %v after it serves", c.InSync(via.ID, "orders", time.Minute))
		l.GoesOn(time.Minute)
		l.Stop()
		c.Pass(time.Second)
		c.Same("orders", c.all()...)
	})
}
