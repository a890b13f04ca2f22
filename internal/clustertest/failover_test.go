package clustertest

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
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

// TestDeletedRecordsStayDeleted: who is told that records are deleted does not see them again, whoever leads then (KIP-107).
func TestDeletedRecordsStayDeleted(t *testing.T) {
	Run(t, 3, func(c *Cluster) {
		controller := c.Controller()
		leader := c.other(controller)
		follower := c.other(controller, leader)
		c.CreateTopic("orders", []int32{leader, follower, controller}, [2]string{"min.insync.replicas", "1"})
		c.fill("orders", 0, 300)
		c.InSync(controller, "orders", time.Minute)
		if low, err := c.Node(leader).Delete("orders", 120, 10*time.Second); low != 120 || err != nil {
			t.Fatalf("low watermark %d, %v", low, err)
		}
		c.Node(leader).Kill()
		var first int64
		c.Until("another leads", time.Minute, func() bool {
			var err error
			first, err = c.Node(follower).Offset("orders", Earliest)
			return err == nil
		})
		if first != 120 {
			t.Errorf("the new leader begins at %d", first)
		}

		// One that is dead is not waited for, one that is only not heard of is.
		if low, err := c.Node(follower).Delete("orders", 150, 10*time.Second); low != 150 || err != nil {
			t.Errorf("with a dead replica: low watermark %d, %v", low, err)
		}
		c.Node(leader).Start()
		c.Node(leader).Serves()
		c.InSync(controller, "orders", time.Minute)
		c.Isolate(leader)
		if _, err := c.Node(follower).Delete("orders", 200, time.Second); !errors.Is(err, kerr.RequestTimedOut) {
			t.Errorf("with a replica that is not heard of: %v", err)
		}
		if low, err := c.Node(follower).Delete("orders", 200, 2*session); low != 200 || err != nil {
			t.Errorf("when it has been fenced: low watermark %d, %v", low, err)
		}
		c.Rejoin(leader)
		c.InSync(controller, "orders", time.Minute)
		c.Pass(time.Second)
		c.Same("orders", c.all()...)
	})
}
