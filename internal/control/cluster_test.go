package control

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/peer"
	"github.com/varve-io/varve/internal/quorum"
	"github.com/varve-io/varve/internal/testport"
	"github.com/varve-io/varve/internal/tp"
)

// cluster is some nodes in one process, connected over loopback.
type cluster struct {
	t         testing.TB
	addresses map[int32]string
	voters    []config.Voter
	session   time.Duration
	grace     time.Duration
	nodes     map[int32]*node
	skew      atomic.Int64 // ms that the nodes' clocks are ahead
}

type node struct {
	*Client
	c       *cluster
	id      int32
	quorum  *quorum.Node
	hub     *peer.Hub
	address string
	entries atomic.Int64 // proposals of this node
	stop    func()
	kill    func() // without a word to the others
	epoch   int64
}

func newCluster(t testing.TB, voters, others int) *cluster {
	c := &cluster{t: t, addresses: map[int32]string{}, session: 10 * time.Second, grace: 10 * time.Second, nodes: map[int32]*node{}}
	for id := int32(1); id <= int32(voters+others); id++ {
		c.addresses[id] = testport.Address(t)
		if int(id) <= voters {
			c.voters = append(c.voters, config.Voter{ID: id, Address: c.addresses[id]})
		}
	}
	t.Cleanup(func() {
		for id := range c.addresses {
			c.stop(id)
		}
	})
	return c
}

func (c *cluster) stop(id int32) {
	if n := c.nodes[id]; n != nil {
		n.stop()
		delete(c.nodes, id)
	}
}

// counting counts the entries that a node proposes.
type counting struct {
	*quorum.Node
	entries *atomic.Int64
}

func (q counting) Propose(ctx context.Context, base *metadata.Image, records []metadata.Record) (*metadata.Image, error) {
	q.entries.Add(1)
	return q.Node.Propose(ctx, base, records)
}

func (c *cluster) start(id int32) *node {
	c.t.Helper()
	n := &node{c: c, id: id, address: c.addresses[id]}
	var words []string
	for _, v := range c.voters {
		words = append(words, v.String())
	}
	var node atomic.Pointer[quorum.Node]
	identity := func() peer.Identity {
		q := node.Load()
		return peer.Identity{NodeID: id, Incarnation: tp.UUID{byte(id)}, Address: n.address, Voters: words, Fresh: q == nil || q.Fresh()}
	}
	values, err := config.Broker.NewValues(nil)
	if err != nil {
		c.t.Fatal(err)
	}
	logger := slog.New(slog.DiscardHandler)
	var links sync.Map
	var dead atomic.Bool
	n.hub = peer.New(identity, nil, logger, peer.WithDialer(func(ctx context.Context, address string) (net.Conn, error) {
		nc, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
		if err == nil {
			links.Store(nc, true)
			if dead.Load() {
				nc.Close()
			}
		}
		return nc, err
	}))
	q, err := quorum.Open(quorum.Options{Dir: filepath.Join(c.t.TempDir(), "metadata"), NodeID: id, Logger: logger, Hub: n.hub, Voters: c.voters, Address: n.address, ElectionTimeout: 150 * time.Millisecond})
	if err != nil {
		c.t.Fatal(err)
	}
	node.Store(q)
	n.quorum = q
	n.Client = New(Options{NodeID: id, Quorum: counting{q, &n.entries}, Hub: n.hub, Logger: logger, SessionTimeout: c.session, Grace: c.grace, TickInterval: 10 * time.Millisecond,
		Env: func() controller.Env {
			return controller.Env{Now: time.Now().UnixMilli() + c.skew.Load(), Random: rand.Reader, Broker: values}
		},
		Await: func(ctx context.Context, index uint64) error {
			for {
				changed := q.Changed()
				if q.Image().Index >= index {
					return nil
				}
				select {
				case <-changed:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
		},
		Bootstrap: func() []string {
			var out []string
			for _, v := range c.voters {
				out = append(out, v.Address)
			}
			return out
		}})
	l, err := net.Listen("tcp", n.address)
	if err != nil {
		c.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	clientCtx, cancelClient := context.WithCancel(ctx)
	var all, client sync.WaitGroup
	all.Go(func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { _ = n.hub.Serve(ctx, nc) })
		}
	})
	all.Go(func() { _ = q.Run(ctx) })
	client.Go(func() { _ = n.Run(clientCtx) })
	var once sync.Once
	n.stop = func() {
		once.Do(func() {
			cancelClient()
			client.Wait()
			if err := q.Close(); err != nil {
				c.t.Error(err)
			}
			l.Close()
			cancel()
			all.Wait()
		})
	}
	n.kill = func() {
		dead.Store(true)
		links.Range(func(nc, _ any) bool { nc.(net.Conn).Close(); return true })
		l.Close()
		cancel() // and with it the connections of others
		n.stop()
	}
	c.nodes[id] = n
	return n
}

func (n *node) broker() metadata.BrokerRecord {
	host, port, _ := net.SplitHostPort(n.address)
	number, _ := strconv.Atoi(port)
	return metadata.BrokerRecord{ID: n.id, Incarnation: tp.UUID{byte(n.id)}, PeerListener: "PLAINTEXT",
		Listeners: []metadata.Endpoint{{Name: "PLAINTEXT", Host: host, Port: int32(number)}}}
}

// enter registers a node and unfences it.
func (n *node) enter() {
	n.c.t.Helper()
	r, err := Do[controller.Registered](n.ctx(), n.Client, controller.RegisterCommand{Broker: n.broker()})
	if err != nil {
		n.c.t.Fatal(err)
	}
	n.epoch = r.Epoch
	n.beat()
}

func (n *node) beat() {
	n.c.t.Helper()
	h, err := Do[controller.HeartbeatReply](n.ctx(), n.Client, controller.HeartbeatCommand{Broker: n.id, Epoch: n.epoch, Applied: n.quorum.Image().Index, Ready: true})
	if err != nil || h.Fenced {
		n.c.t.Fatalf("node %d: %+v, %v", n.id, h, err)
	}
}

func (n *node) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	n.c.t.Cleanup(cancel)
	return ctx
}

func (n *node) topic(name string) error {
	created, err := Do[[]controller.CreatedTopic](n.ctx(), n.Client, controller.CreateTopicsCommand{Topics: []controller.NewTopic{{Name: name, Partitions: 1, ReplicationFactor: 1}}})
	if err != nil {
		return err
	}
	if len(created) != 1 {
		return fmt.Errorf("answer: %+v", created)
	}
	return created[0].Err.OrNil()
}

// eventually polls a condition that takes some real time to come true.
func (c *cluster) eventually(what string, ok func() bool) {
	c.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(20 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-limit:
			c.t.Fatalf("not in time: %s", what)
		}
	}
}

func (c *cluster) leader() *node {
	c.t.Helper()
	var found *node
	c.eventually("an active controller", func() bool {
		for _, n := range c.nodes {
			n.mu.Lock()
			if n.active != nil {
				found = n
			}
			n.mu.Unlock()
		}
		return found != nil
	})
	return found
}

// up starts all nodes, names the cluster and registers them.
func (c *cluster) up() {
	c.t.Helper()
	for id := range c.addresses {
		c.start(id)
	}
	l := c.leader()
	if _, err := l.Record(l.ctx(), controller.BootstrapCommand{}); err != nil {
		c.t.Fatal(err)
	}
	for id := int32(1); id <= int32(len(c.nodes)); id++ {
		c.nodes[id].enter()
	}
}

func (c *cluster) follower() *node {
	for id := int32(1); ; id++ {
		if n := c.nodes[id]; n != nil && n != c.leader() {
			return n
		}
	}
}
