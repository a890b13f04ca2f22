package clustertest

import (
	"context"
	"fmt"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// TestElectionsWithNothingWritten: six times the leader dies, and nothing is written between; then one record is. The lineages
// of all replicas are equal, before and after it (C49).
func TestElectionsWithNothingWritten(t *testing.T) {
	for _, records := range []int{10, 0} {
		t.Run(fmt.Sprint(records, " records"), func(t *testing.T) {
			Run(t, 3, func(c *Cluster) {
				c.CreateTopic("idle", c.all(), [2]string{"min.insync.replicas", "2"})
				if records > 0 {
					c.fill("idle", 0, records)
				}
				epoch := c.Node(1).State("idle").Epoch
				for range 6 {
					s := c.Nodes[0].State("idle")
					down := c.Node(s.Leader)
					via := c.Node(c.other(down.ID))
					down.Kill()
					c.Until("another leads", time.Minute, func() bool { n := via.State("idle"); return n.Leader > 0 && n.Leader != down.ID })
					down.Start()
					down.Serves()
					for _, n := range c.Nodes {
						c.InSync(n.ID, "idle", 30*time.Second)
					}
				}
				c.Pass(time.Second)
				same := func() {
					t.Helper()
					first := c.Node(1).Files("idle-0", "leader-epoch-checkpoint")
					for _, n := range c.Nodes {
						if got := n.Files("idle-0", "leader-epoch-checkpoint"); string(got) != string(first) {
							t.Errorf("lineage of node 1 %q, of node %d %q", first, n.ID, got)
						}
					}
				}
				if records > 0 {
					same()
				}
				c.fill("idle", records, records+1)
				c.Pass(time.Second)
				s := c.Node(1).State("idle")
				if s.Epoch < epoch+6 || len(s.ISR) != 3 {
					t.Errorf("began at epoch %d, now %v", epoch, s)
				}
				same()
				c.Same("idle", c.all()...)
				c.Holds("idle", records+1)
			})
		})
	}
}

// reader consumes a topic and demands that its records come once each and in order.
type reader struct {
	next   atomic.Int64
	failed atomic.Pointer[string]
}

func (c *Cluster) reader(topic string, opts ...kgo.Opt) *reader {
	cl := c.Client(append([]kgo.Opt{kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().AtStart()}})}, opts...)...)
	r, done := &reader{}, make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			f := cl.PollFetches(ctx)
			f.EachRecord(func(rec *kgo.Record) {
				if want := r.next.Load(); string(rec.Key) != strconv.FormatInt(want, 10) {
					why := fmt.Sprintf("offset %d holds record %s, want %d", rec.Offset, rec.Key, want)
					r.failed.CompareAndSwap(nil, &why)
				}
				r.next.Add(1)
			})
		}
	}()
	c.T.Cleanup(func() { cancel(); <-done })
	return r
}

// goesOn waits until the reader has what is there now.
func (r *reader) goesOn(c *Cluster, l *Load, limit time.Duration) time.Duration {
	c.T.Helper()
	l.mu.Lock()
	to := l.acked
	l.mu.Unlock()
	return c.Until(fmt.Sprintf("record %d is read", to), limit, func() bool {
		if why := r.failed.Load(); why != nil {
			c.T.Fatal(*why)
		}
		return r.next.Load() >= int64(to)
	})
}

// fetches is how many bytes each node sent in answers to Fetch.
type fetches [8]atomic.Int64

func (f *fetches) OnBrokerRead(meta kgo.BrokerMetadata, key int16, n int, _, _ time.Duration, err error) {
	if key == 1 && err == nil && n > 200 && meta.NodeID >= 0 && int(meta.NodeID) < len(f) { // more than an answer without records
		f[meta.NodeID].Add(1)
	}
}

// refresh is how often a reader of a rack asks the leader whom to read from. kgo does so every 30 minutes unless it is told
// otherwise, and in between it stays with its replica, even if that is dead.
const refresh = 20 * time.Second

// TestReaderOfARackWhoseReplicaIsCutOff reads from the follower of its rack; when that gets nothing any more, it goes on at the
// leader, from where it was, one refresh after the follower has left the ISR (C55).
func TestReaderOfARackWhoseReplicaIsCutOff(t *testing.T) {
	for _, x := range []struct {
		name string
		cut  func(c *Cluster, leader, follower *Node)
		out  time.Duration // when it leaves the ISR, at the latest
	}{
		{"from its leader", func(c *Cluster, leader, follower *Node) { c.Net.Cut(leader.Host, follower.Host) }, lagMax * 3 / 2},
		{"from all", func(c *Cluster, leader, follower *Node) {
			c.Isolate(follower.ID)
			c.Net.Cut(clientHost, follower.Host)
		}, session},
		{"dead", func(c *Cluster, leader, follower *Node) { follower.Kill() }, grace},
	} {
		t.Run(x.name, func(t *testing.T) {
			runRacks(t, func(c *Cluster) {
				controller := c.Controller()
				leader := c.Node(c.other(controller))
				follower := c.Node(c.other(controller, leader.ID))
				c.CreateTopic("racks", c.all(leader.ID), [2]string{"min.insync.replicas", "2"})
				l := c.Load("racks")
				l.GoesOn(time.Minute)
				var from fetches
				r := c.reader("racks", kgo.Rack(follower.Host), kgo.WithHooks(&from), kgo.RecheckPreferredReplicaInterval(refresh))
				r.goesOn(c, l, time.Minute)
				c.Pass(10 * time.Second)
				before := from[leader.ID].Load()
				c.Pass(10 * time.Second)
				if from[follower.ID].Load() == 0 || from[leader.ID].Load() > before+1 {
					t.Fatalf("it does not read from its rack: %d answers from the follower, %d from the leader", from[follower.ID].Load(), from[leader.ID].Load())
				}
				x.cut(c, leader, follower)
				cut := time.Now()
				c.Pass(5 * time.Second)
				l.GoesOn(2 * time.Minute)
				l.mu.Lock()
				after := l.acked
				l.mu.Unlock()
				wrote := time.Since(cut)
				limit := x.out + refresh + dialTimeout + 5*time.Second
				c.Until("what was written since is read", limit, func() bool { return r.next.Load() >= int64(after) })
				t.Logf("writes go on %v after the cut, the reader %v; %d answers from the leader, %d from the follower", wrote, time.Since(cut), from[leader.ID].Load(), from[follower.ID].Load())
				if why := r.failed.Load(); why != nil {
					t.Fatal(*why)
				}
				if from[leader.ID].Load() == before {
					t.Error("it did not go on at the leader")
				}
				r.goesOn(c, l, time.Minute)
				l.Stop()
			})
		})
	}
}

// runRacks runs three nodes, each in a rack that is called as its host.
func runRacks(t *testing.T, body func(*Cluster)) {
	t.Helper()
	Run(t, 3, func(c *Cluster) {
		for _, n := range c.Nodes {
			n.Stop()
			n.Set("broker.rack=" + n.Host)
			n.Start()
			n.Serves()
		}
		body(c)
	})
}

// TestProducerWhoseLeaderFallsSilent: its connection stays open and nothing comes through it any more (C56).
func TestProducerWhoseLeaderFallsSilent(t *testing.T) {
	for _, x := range []struct {
		name   string
		silent bool // towards the client too
		limit  time.Duration
	}{
		// The old leader says that it is none any more. kgo then waits until its metadata is five seconds old, and so again if it
		// happens to ask the node that knows nothing new.
		{"towards other nodes", false, 45 * time.Second},
		// kgo gives up on an answer after 20 seconds, of which the session was the first half, and may wait 10 more each time that
		// it connects to the silent node.
		{"towards all", true, 45 * time.Second},
	} {
		t.Run(x.name, func(t *testing.T) {
			Run(t, 3, func(c *Cluster) {
				leader := c.Node(c.other(c.Controller()))
				via := c.Node(c.other(leader.ID))
				c.CreateTopic("orders", c.all(leader.ID), [2]string{"min.insync.replicas", "2"})
				l := c.Load("orders")
				l.GoesOn(time.Minute)
				c.Pass(10 * time.Second)
				l.Longest()
				c.Isolate(leader.ID)
				if x.silent {
					c.Net.Cut(clientHost, leader.Host)
				}
				elected := c.Until("another leads", time.Minute, func() bool { s := via.State("orders"); return s.Leader > 0 && s.Leader != leader.ID })
				took := l.GoesOn(time.Minute)
				t.Logf("another leads after %v, the producer goes on %v after that", elected, took)
				if took > x.limit {
					t.Errorf("the producer goes on %v after another leads, want %v", took, x.limit)
				}
				c.Pass(time.Minute)
				c.Rejoin(leader.ID)
				c.Net.Join(clientHost, leader.Host)
				c.InSync(via.ID, "orders", time.Minute)
				l.Stop()
				c.Same("orders", c.all()...)
			})
		})
	}
}
