package clustertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// TestLeaderThatDoesNotReachTheController: its heartbeats are lost, or it is cut off from all other nodes, while clients
// reach it. It stops leading by its own clock when its session is over, not later than another begins to.
func TestLeaderThatDoesNotReachTheController(t *testing.T) {
	for _, x := range []struct {
		name string
		cut  func(c *Cluster, leader, controller *Node)
		heal func(c *Cluster, leader, controller *Node)
	}{
		{"heartbeats lost", func(c *Cluster, l, k *Node) { c.Net.Hold(l.Host, k.Host) }, func(c *Cluster, l, k *Node) { c.Net.Release(l.Host, k.Host) }},
		{"cut off", func(c *Cluster, l, _ *Node) { c.Isolate(l.ID) }, func(c *Cluster, l, _ *Node) { c.Rejoin(l.ID) }},
	} {
		t.Run(x.name, func(t *testing.T) {
			Run(t, 3, func(c *Cluster) {
				controller := c.Node(c.Controller())
				leader := c.Node(c.other(controller.ID))
				via := c.Node(c.other(controller.ID, leader.ID))
				for _, topic := range []string{"orders", "side"} {
					c.CreateTopic(topic, c.all(leader.ID), [2]string{"min.insync.replicas", "2"})
				}
				l := c.Load("orders")
				l.GoesOn(time.Minute)
				if err := leader.Write("side", "before"); err != nil {
					t.Fatal(err)
				}
				c.Pass(time.Second)
				l.Longest()
				x.cut(c, leader, controller)
				if err := leader.Write("side", "in its session"); err != nil {
					t.Errorf("a leader in its session refuses a write for itself alone: %v", err)
				}
				var suspended time.Duration
				start := time.Now()
				took := c.Until("another leads", time.Minute, func() bool {
					if suspended == 0 && leader.Logged("stops leading") > 0 {
						suspended = time.Since(start)
					}
					s := via.State("orders")
					return s.Leader > 0 && s.Leader != leader.ID
				})
				if suspended == 0 || suspended < session-2500*time.Millisecond || took < session-2500*time.Millisecond || took > session+time.Second {
					t.Errorf("the old leader stopped after %v, another began after %v", suspended, took)
				}
				if err := leader.Write("side", "after its session"); !errors.Is(err, kerr.NotLeaderForPartition) {
					t.Errorf("a stale leader answers a write with %v", err)
				}
				l.GoesOn(time.Minute)
				t.Logf("stopped after %v, another leads after %v; %v without an acknowledged write", suspended, took, l.Longest())
				c.Pass(time.Minute)
				if err := leader.Write("side", "much later"); !errors.Is(err, kerr.NotLeaderForPartition) {
					t.Errorf("a stale leader answers a write with %v", err)
				}
				x.heal(c, leader, controller)
				for _, topic := range []string{"orders", "side"} {
					c.InSync(via.ID, topic, time.Minute)
				}
				l.Stop()
				c.Pass(time.Second)
				c.Same("orders", c.all()...)
				c.Same("side", c.all()...)
			})
		})
	}
}

// TestLongPartition: a node that was cut off for minutes is back within seconds. Its connections are no help then: what was
// written into them comes through only when TCP tries again, up to two minutes later.
func TestLongPartition(t *testing.T) {
	for _, controls := range []bool{false, true} {
		t.Run(fmt.Sprintf("of the active controller %v", controls), func(t *testing.T) {
			Run(t, 3, func(c *Cluster) {
				id := c.Controller()
				if !controls {
					id = c.other(id)
				}
				via := c.Node(c.other(id))
				c.CreateTopic("orders", c.all(id), [2]string{"min.insync.replicas", "2"})
				c.fill("orders", 0, 100)
				c.Isolate(id)
				c.Until("another leads", time.Minute, func() bool { s := via.State("orders"); return s.Leader > 0 && s.Leader != id })
				c.fill("orders", 100, 200)
				c.Pass(4 * time.Minute)
				c.Rejoin(id)
				t.Logf("in sync %v after the network is back", c.InSync(via.ID, "orders", 15*time.Second))
				c.fill("orders", 200, 300)
				c.Holds("orders", 300)
				c.Pass(time.Second)
				c.Same("orders", c.all()...)
			})
		})
	}
}

// isrs notes how an ISR changes, as a node sees it, until it is stopped.
type isrs struct {
	stop, done chan struct{}
	seen       []string
}

func (n *Node) watch(topic string) *isrs {
	w := &isrs{stop: make(chan struct{}), done: make(chan struct{})}
	start := time.Now()
	go func() {
		defer close(w.done)
		last := ""
		for {
			if s := n.State(topic); s.Leader > 0 {
				if now := fmt.Sprint(s.ISR); now != last {
					last = now
					w.seen = append(w.seen, fmt.Sprintf("%s at %v", now, time.Since(start).Round(time.Millisecond)))
				}
			}
			select {
			case <-w.stop:
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	}()
	return w
}

// changes ends the watching.
func (w *isrs) changes() []string {
	close(w.stop)
	<-w.done
	return w.seen[1:]
}

// underLoad makes a topic "orders" of three replicas, which neither the active controller leads nor follower, and writes to it.
func (c *Cluster) underLoad() (controller, leader int32, follower *Node, l *Load) {
	c.T.Helper()
	controller = c.Controller()
	leader = c.other(controller)
	follower = c.Node(c.other(controller, leader))
	c.CreateTopic("orders", c.all(leader), [2]string{"min.insync.replicas", "2"})
	l = c.Load("orders")
	l.GoesOn(time.Minute)
	return controller, leader, follower, l
}

// TestFollowerCutOffFromItsLeader leaves the ISR when it has been behind for replica.lag.time.max.ms, and comes back when it
// has caught up; nothing else happens to the ISR.
func TestFollowerCutOffFromItsLeader(t *testing.T) {
	Run(t, 3, func(c *Cluster) {
		controller, leader, follower, l := c.underLoad()
		w := c.Node(controller).watch("orders")
		l.Longest()
		c.Net.Cut(c.Node(leader).Host, follower.Host)
		took := c.Until("it is not in sync", 2*time.Minute, func() bool { return !slices.Contains(c.Node(controller).State("orders").ISR, follower.ID) })
		if took < lagMax-2*time.Second || took > lagMax*3/2+time.Second {
			t.Errorf("left the ISR after %v, want %v and up to half of that more", took, lagMax)
		}
		l.GoesOn(time.Minute)
		waited := l.Longest()
		c.Pass(2 * time.Minute)
		c.Net.Join(c.Node(leader).Host, follower.Host)
		back := c.InSync(controller, "orders", 2*time.Minute)
		c.Pass(time.Minute)
		changes := w.changes()
		t.Logf("left the ISR after %v, with writes waiting for %v; back %v after the network; %v", took, waited, back, changes)
		if len(changes) != 2 {
			t.Errorf("the ISR changed %d times: %v", len(changes), changes)
		}
		if s := c.Node(controller).State("orders"); s.Leader != leader {
			t.Errorf("the leader changed: %v", s)
		}
		l.Stop()
		c.Same("orders", c.all()...)
	})
}

// TestFollowerThatIsTooSlow gets half of what is written: it leaves the ISR once, and does not come and go (C50).
func TestFollowerThatIsTooSlow(t *testing.T) {
	Run(t, 3, func(c *Cluster) {
		controller, leader, follower, l := c.underLoad()
		w := c.Node(controller).watch("orders")
		// A fetch brings about five records, and there are fifty in a second.
		c.Net.Delay(c.Node(leader).Host, follower.Host, 200*time.Millisecond)
		c.Pass(3 * time.Minute)
		end, err1 := c.Node(leader).Offset("orders", Latest)
		have := int64(len(follower.Files("orders-0", "*.log"))) * end / int64(len(c.Node(leader).Files("orders-0", "*.log")))
		if err1 != nil || have > end*4/5 || have < end/5 {
			t.Errorf("the follower has about %d of %d records: it is not slow enough, or too slow (%v)", have, end, err1)
		}
		slow := w.changes()
		t.Logf("it has about %d of %d records; %v", have, end, slow)
		if len(slow) != 1 {
			t.Errorf("the ISR changed %d times: %v", len(slow), slow)
		}
		c.Net.Delay(c.Node(leader).Host, follower.Host, 0)
		t.Logf("in sync %v after the network is fast again", c.InSync(controller, "orders", 2*time.Minute))
		l.Stop()
		c.Same("orders", c.all()...)
	}, "replica.fetch.max.bytes=1000")
}

// TestMinorityDecidesNothing: the active controller is cut off with no majority: what it is asked to change fails, the others
// go on without it, and afterwards all have one history.
func TestMinorityDecidesNothing(t *testing.T) {
	Run(t, 3, func(c *Cluster) {
		old := c.Node(c.Controller())
		c.CreateTopic("before", c.all())
		c.Isolate(old.ID)
		create := func(n *Node, topic string) error {
			req := newTopic(topic, c.all()[:1])
			resp, err := n.Ask(req)
			if err != nil {
				return err
			}
			return kerr.ErrorForCode(resp.(*createResponse).Topics[0].ErrorCode)
		}
		failed := make(chan error, 1)
		go func() { failed <- create(old, "minority") }()
		start := time.Now()
		now := c.Controller(old.ID)
		t.Logf("another controller after %v", time.Since(start))
		if err := create(c.Node(now), "majority"); err != nil {
			t.Errorf("the majority refuses a topic: %v", err)
		}
		err := <-failed
		if err == nil {
			t.Error("the minority made a topic")
		}
		t.Logf("the minority answered after %v: %v", time.Since(start), err)
		// One that it forwards waits in the connection: nobody can know what becomes of it, and it says so.
		if err := create(old, "unknown"); !errors.Is(err, kerr.RequestTimedOut) && !errors.Is(err, kerr.NotController) {
			t.Errorf("a node that reaches nobody answers %v", err)
		}
		c.Pass(time.Minute)
		c.Rejoin(old.ID)
		c.Until("all know the majority's topic", 10*time.Second, func() bool {
			return !slices.ContainsFunc(c.Nodes, func(n *Node) bool { return n.State("majority").Leader < 0 })
		})
		c.Pass(time.Second)
		for _, n := range c.Nodes {
			if s := n.State("minority"); len(s.Replicas) > 0 {
				t.Errorf("node %d knows a topic that was refused: %v", n.ID, s)
			}
			if s, others := n.State("unknown"), c.Node(now).State("unknown"); s.String() != others.String() {
				t.Errorf("node %d: %v, node %d: %v", n.ID, s, now, others)
			}
			if s := n.State("before"); len(s.Replicas) != 3 {
				t.Errorf("node %d: %v", n.ID, s)
			}
		}
		c.InSync(now, "before", time.Minute)
	}, "auto.create.topics.enable=false")
}

// TestRequestsWithoutAController: whoever wants something of a controller is told after a while that there is none, before
// clients give up on the answer, and not one after the other; what needs none goes on.
func TestRequestsWithoutAController(t *testing.T) {
	Run(t, 3, func(c *Cluster) {
		left := c.Nodes[0]
		c.CreateTopic("orders", c.all(left.ID))
		c.fill("orders", 0, 10)
		c.Nodes[1].Kill()
		c.Nodes[2].Kill()
		c.Pass(10 * time.Second)
		made, broker := kmsg.NewPtrMetadataRequest(), kmsg.NewPtrUnregisterBrokerRequest()
		made.AllowAutoTopicCreation, broker.BrokerID = true, 2
		for _, name := range []string{"orders", "not-there"} {
			t := kmsg.NewMetadataRequestTopic()
			t.Topic = kmsg.StringPtr(name)
			made.Topics = append(made.Topics, t)
		}
		configs := kmsg.NewPtrIncrementalAlterConfigsRequest()
		r := kmsg.NewIncrementalAlterConfigsRequestResource()
		r.ResourceType, r.ResourceName = kmsg.ConfigResourceTypeTopic, "orders"
		k := kmsg.NewIncrementalAlterConfigsRequestResourceConfig()
		k.Name, k.Value = "retention.ms", kmsg.StringPtr("1000")
		r.Configs = append(r.Configs, k)
		configs.Resources = append(configs.Resources, r)
		group := kmsg.NewPtrFindCoordinatorRequest()
		group.CoordinatorKeys = []string{"g"}
		reqs := []kmsg.Request{made, broker, configs, group, newTopic("another", []int32{1})}
		for range 8 {
			reqs = append(reqs, kmsg.NewPtrInitProducerIDRequest())
		}
		start := time.Now()
		errs := make(chan error, len(reqs))
		for _, req := range reqs {
			cl := c.Client(kgo.SeedBrokers(left.Address())) // of its own: nobody waits for the answer before
			go func() {
				_, err := cl.SeedBrokers()[0].Request(context.Background(), req)
				if err != nil {
					err = fmt.Errorf("%T: %w", req, err)
				}
				errs <- err
			}()
		}
		for range reqs {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
		t.Logf("all were answered after %v", time.Since(start))
		if left.Controller() != -1 {
			t.Error("a controller is known")
		}
	})
}
