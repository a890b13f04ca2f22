package clustertest

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// fill writes records 0 to end of a topic and waits until all are acknowledged.
func (c *Cluster) fill(topic string, from, end int) {
	c.T.Helper()
	cl := c.Client()
	defer cl.Close()
	var records []*kgo.Record
	for i := from; i < end; i++ {
		records = append(records, &kgo.Record{Topic: topic, Key: fmt.Append(nil, i), Value: value(i)})
		if len(records) == 100 || i == end-1 { // some batches rather than one
			if err := cl.ProduceSync(c.T.Context(), records...).FirstErr(); err != nil {
				c.T.Fatal(err)
			}
			records = nil
		}
	}
}

// settled waits until nothing moves and the replicas are the given ones, all in sync.
func (c *Cluster) settled(via *Node, topic string, replicas []int32, limit time.Duration) time.Duration {
	c.T.Helper()
	return c.Until(fmt.Sprintf("%s is on %v", topic, replicas), limit, func() bool {
		adding, removing, err := via.Moving(topic)
		s := via.State(topic)
		return err == nil && len(adding)+len(removing) == 0 && slices.Equal(s.Replicas, replicas) && len(s.ISR) == len(replicas)
	})
}

// TestReassignmentWithThrottle takes as long as its throttle says; it is cancelled half way, and begun again and then survives
// the death of the active controller.
func TestReassignmentWithThrottle(t *testing.T) {
	Run(t, 4, func(c *Cluster) {
		c.CreateTopic("moving", []int32{1, 2, 3}, [2]string{"min.insync.replicas", "2"}, [2]string{"follower.replication.throttled.replicas", "*"})
		c.fill("moving", 0, 3000)
		size := len(c.Node(1).Files("moving-0", "*.log"))
		const rate = 10_000
		if err := c.Node(2).Configure("", [2]string{"follower.replication.throttled.rate", fmt.Sprint(rate)}); err != nil {
			t.Fatal(err)
		}
		should := time.Duration(size/rate) * time.Second
		c.CreateTopic("side", c.all(), [2]string{"min.insync.replicas", "2"})
		l := c.Load("side")
		target, fourth := []int32{1, 2, 4}, c.Node(4)
		move := func() {
			t.Helper()
			if err := c.Node(2).Reassign("moving", target); err != nil {
				t.Fatal(err)
			}
		}
		has := func() int { return len(fourth.Files("moving-0", "*.log")) }

		move()
		c.Pass(should / 2)
		if n := has(); n < size/4 || n > size*3/4+2*rate {
			t.Errorf("after half of the time %d of %d bytes are there", n, size)
		}
		if adding, removing, err := c.Node(3).Moving("moving"); err != nil || !slices.Equal(adding, []int32{4}) || !slices.Equal(removing, []int32{3}) {
			t.Error(adding, removing, err)
		}
		if err := c.Node(3).Reassign("moving", nil); err != nil {
			t.Fatal(err)
		}
		c.settled(c.Node(2), "moving", []int32{1, 2, 3}, 10*time.Second)
		c.Pass(time.Second)
		if has() != 0 {
			t.Error("what was copied stays after the cancellation")
		}
		c.Pass(time.Minute) // the folder that was set aside is gone, and the limiter full again

		controller := c.Controller()
		move()
		c.Pass(should / 3)
		c.Node(controller).Kill()
		via := c.Node(c.other(controller, 4))
		if controller == 4 {
			c.Pass(10 * time.Second)
			fourth.Start()
			fourth.Serves()
			c.settled(via, "moving", target, 2*should+time.Minute)
		} else {
			c.Until("the new replica is in sync", 2*should+time.Minute, func() bool { return slices.Contains(via.State("moving").ISR, 4) })
			c.Node(controller).Start()
			c.Node(controller).Serves()
			c.settled(via, "moving", target, time.Minute)
		}
		l.GoesOn(time.Minute)
		l.Stop()
		c.Holds("moving", 3000)
		c.Pass(time.Second)
		c.Same("moving", target...)
		if n := len(c.Node(3).Files("moving-0", "*.log")); n != 0 {
			t.Errorf("the replica that was removed has %d bytes", n)
		}
	}, "replica.fetch.max.bytes=5000")
}

// TestReplicaThatMovedAwayFromANodeThatWasDown: its folder does not stay as if it were a partition's, and what the node knew of
// it is not taken for what it gets when it comes back.
func TestReplicaThatMovedAwayFromANodeThatWasDown(t *testing.T) {
	Run(t, 4, func(c *Cluster) {
		down := c.Node(c.other(c.Controller()))
		others := c.all(down.ID)[1:]
		via := c.Node(others[0])
		before, after := []int32{down.ID, others[0], others[1]}, others
		c.CreateTopic("moving", before, [2]string{"min.insync.replicas", "2"})
		c.fill("moving", 0, 100)
		down.Kill()
		c.Until("another leads", time.Minute, func() bool { s := via.State("moving"); return s.Leader > 0 && s.Leader != down.ID })
		if err := via.Reassign("moving", after); err != nil {
			t.Fatal(err)
		}
		c.settled(via, "moving", after, time.Minute)
		c.fill("moving", 100, 200)
		down.Start()
		down.Serves()
		c.Pass(time.Minute)
		if n := len(down.Files("moving-0", "*")); n > 0 {
			t.Errorf("the folder of a replica that moved away still has %d bytes", n)
		}
		if err := via.Reassign("moving", before); err != nil {
			t.Fatal(err)
		}
		c.settled(via, "moving", before, time.Minute)
		c.Holds("moving", 200)
		c.Pass(time.Second)
		c.Same("moving", before...)
	})
}

// TestThrottledReassignmentTakesItsTime undisturbed.
func TestThrottledReassignmentTakesItsTime(t *testing.T) {
	Run(t, 3, func(c *Cluster) {
		c.CreateTopic("moving", []int32{1, 2}, [2]string{"follower.replication.throttled.replicas", "*"})
		c.fill("moving", 0, 3000)
		size := len(c.Node(1).Files("moving-0", "*.log"))
		const rate = 10_000
		if err := c.Node(2).Configure("", [2]string{"follower.replication.throttled.rate", fmt.Sprint(rate)}); err != nil {
			t.Fatal(err)
		}
		if err := c.Node(2).Reassign("moving", []int32{1, 3}); err != nil {
			t.Fatal(err)
		}
		took, should := c.settled(c.Node(1), "moving", []int32{1, 3}, 5*time.Minute), time.Duration(size/rate)*time.Second
		t.Logf("%d bytes in %v", size, took)
		if took < should*3/4 || took > should*5/4+5*time.Second {
			t.Errorf("%d bytes at %d a second took %v, want about %v", size, rate, took, should)
		}
		c.Same("moving", 1, 3)
	}, "replica.fetch.max.bytes=5000")
}

// tiered is the configuration of a topic most of which is in the bucket alone.
var tiered = [][2]string{{"remote.storage.enable", "true"}, {"internal.segment.bytes", "20000"}, {"local.retention.bytes", "1"}, {"retention.ms", "-1"}, {"min.insync.replicas", "2"}}

// TestWipedNodeStartsFromTheBucket while the bucket is away for minutes, and slow after that.
func TestWipedNodeStartsFromTheBucket(t *testing.T) {
	Run(t, 3, func(c *Cluster) {
		controller := c.Controller()
		leader := c.Node(c.other(controller))
		wiped := c.Node(c.other(controller, leader.ID))
		c.CreateTopic("history", c.all(leader.ID), tiered...)
		c.fill("history", 0, 3000)
		c.Until("what is sealed is in the bucket, and only there", 5*time.Minute, func() bool {
			local, err := leader.Offset("history", EarliestLocal)
			return err == nil && local > 2500
		})
		wiped.Kill()
		wiped.Wipe()
		c.Until("it is not in sync", time.Minute, func() bool { return len(leader.State("history").ISR) == 2 })
		c.fill("history", 3000, 3100)
		wiped.Start()
		c.away(wiped)
		wiped.Serves()
		c.Pass(3 * time.Minute)
		if s := leader.State("history"); len(s.ISR) != 2 {
			t.Errorf("a replica is in sync that could not read its lineage: %v", s)
		}
		c.fill("history", 3100, 3200) // which waits for nobody
		stop := c.slow(wiped, 5*time.Second)
		took := c.InSync(leader.ID, "history", 3*time.Minute)
		stop()
		t.Logf("in sync %v after the bucket was back", took)
		if n, all := len(wiped.Files("history-0", "*.log")), 3200*len(value(1000)); n == 0 || n > all/4 {
			t.Errorf("%d bytes were copied, of about %d", n, all)
		}
		// It leads, and hands out what it never had.
		for _, n := range c.Nodes {
			if n != wiped {
				n.Kill()
			}
		}
		for _, n := range c.Nodes {
			if n != wiped {
				n.Start()
			}
		}
		for _, n := range c.Nodes {
			n.Serves()
		}
		c.InSync(wiped.ID, "history", time.Minute)
		if err := wiped.Reassign("history", c.all(wiped.ID)); err != nil {
			t.Fatal(err)
		}
		c.Until("it leads", time.Minute, func() bool {
			_ = wiped.Prefer("history")
			return wiped.State("history").Leader == wiped.ID
		})
		c.fill("history", 3200, 3300)
		c.Holds("history", 3300)
	}, "remote.log.manager.task.interval.ms=1000", "log.retention.check.interval.ms=1000", "log.initial.task.delay.ms=1000")
}
