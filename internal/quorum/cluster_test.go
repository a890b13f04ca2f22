package quorum

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/peer"
	"github.com/varve-io/varve/internal/testport"
	"github.com/varve-io/varve/internal/tp"
)

// cluster is some nodes in one process, which reach each other over loopback unless they are cut off.
type cluster struct {
	t         testing.TB
	dir       string
	listeners map[int32]net.Listener
	voters    []config.Voter
	threshold uint64

	mu     sync.Mutex
	cut    map[int32]bool // nodes that nobody reaches, and that reach nobody
	links  map[net.Conn][2]int32
	dark   map[string]bool // addresses that do not resolve
	closed map[int32]bool  // nodes that do not listen
	nodes  map[int32]*member
}

type member struct {
	*Node
	stop func()
	ran  chan error // what Run returned
	log  *counter
}

// counter is a log that counts how often this node was denied a vote.
type counter struct{ denied atomic.Int64 }

func (*counter) Enabled(context.Context, slog.Level) bool { return true }
func (c *counter) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, "pre-vote denied") {
		c.denied.Add(1)
	}
	return nil
}
func (c *counter) WithAttrs([]slog.Attr) slog.Handler { return c }
func (c *counter) WithGroup(string) slog.Handler      { return c }

func newCluster(t testing.TB, voters, others int) *cluster {
	c := &cluster{t: t, dir: t.TempDir(), listeners: map[int32]net.Listener{}, cut: map[int32]bool{}, dark: map[string]bool{}, closed: map[int32]bool{}, links: map[net.Conn][2]int32{}, nodes: map[int32]*member{}}
	for id := int32(1); id <= int32(voters+others); id++ {
		l, err := net.Listen("tcp", testport.Address(t))
		if err != nil {
			t.Fatal(err)
		}
		l.Close() // the port is its own from start to stop
		c.listeners[id], c.closed[id] = l, true
		if int(id) <= voters {
			c.voters = append(c.voters, config.Voter{ID: id, Address: l.Addr().String()})
		}
	}
	t.Cleanup(func() {
		for _, l := range c.listeners {
			l.Close()
		}
		for id := range c.listeners {
			c.kill(id)
		}
	})
	return c
}

func (c *cluster) address(id int32) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.listeners[id].Addr().String()
}

func (c *cluster) folder(id int32) string { return filepath.Join(c.dir, fmt.Sprint(id)) }

// start opens a node on its folder. Its listener is there already, so that others may have connected before.
func (c *cluster) start(id int32, voters ...config.Voter) *member {
	c.t.Helper()
	if voters == nil {
		voters = c.voters
	}
	var words []string
	for _, v := range voters {
		words = append(words, v.String())
	}
	m := &member{ran: make(chan error, 1), log: &counter{}}
	var node atomic.Pointer[Node]
	identity := func() peer.Identity {
		n := node.Load()
		i := peer.Identity{NodeID: id, Incarnation: tp.UUID{byte(id)}, Address: c.address(id), Voters: words, Fresh: n == nil || n.Fresh()}
		if n != nil {
			i.ClusterID = n.Image().ClusterID
		}
		return i
	}
	logger := slog.New(m.log)
	hub := peer.New(identity, nil, logger, peer.WithDialer(func(ctx context.Context, address string) (net.Conn, error) { return c.connect(ctx, id, address) }))
	n, err := Open(Options{Dir: c.folder(id), NodeID: id, Logger: logger, Hub: hub, Voters: voters, Address: c.address(id), ElectionTimeout: 150 * time.Millisecond, SnapshotThreshold: c.threshold})
	if err != nil {
		c.t.Fatal(err)
	}
	node.Store(n)
	m.Node = n
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	l := c.relisten(id)
	all.Go(func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { _ = hub.Serve(ctx, nc) })
		}
	})
	all.Go(func() { m.ran <- n.Run(ctx) })
	m.stop = func() {
		if err := n.Close(); err != nil {
			c.t.Error(err)
		}
		c.mu.Lock()
		l.Close()
		c.closed[id] = true
		c.mu.Unlock()
		cancel()
		all.Wait()
	}
	c.mu.Lock()
	c.nodes[id] = m
	c.mu.Unlock()
	return m
}

// relisten opens the address of a node again if it was closed with the node's former run.
func (c *cluster) relisten(id int32) net.Listener {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed[id] {
		l, err := net.Listen("tcp", c.listeners[id].Addr().String())
		if err != nil {
			c.t.Fatal(err)
		}
		c.listeners[id], c.closed[id] = l, false
	}
	return c.listeners[id]
}

// wipe empties the folder of a node that is down.
func (c *cluster) wipe(id int32) {
	c.t.Helper()
	if err := os.RemoveAll(c.folder(id)); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) connect(ctx context.Context, from int32, address string) (net.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dark[address] {
		return nil, &net.DNSError{Err: "no such host", Name: address, IsNotFound: true}
	}
	to := int32(-1)
	for id, l := range c.listeners {
		if l.Addr().String() == address {
			to = id
		}
	}
	if c.cut[from] || c.cut[to] {
		return nil, errors.New("cut off")
	}
	nc, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err == nil {
		c.links[nc] = [2]int32{from, to}
	}
	return nc, err
}

// isolate cuts a node off, or lets it back in.
func (c *cluster) isolate(id int32, cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut[id] = cut
	for nc, ends := range c.links {
		if cut && (ends[0] == id || ends[1] == id) {
			nc.Close()
			delete(c.links, nc)
		}
	}
}

func (c *cluster) resolve(address string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dark[address] = !ok
}

// kill ends a node without its handing over leadership.
func (c *cluster) kill(id int32) {
	c.isolate(id, true)
	c.stop(id)
	c.isolate(id, false)
}

func (c *cluster) stop(id int32) {
	c.mu.Lock()
	m := c.nodes[id]
	delete(c.nodes, id)
	c.mu.Unlock()
	if m != nil {
		m.stop()
	}
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

// leader waits until one of the nodes leads and serves.
func (c *cluster) leader() *member {
	c.t.Helper()
	var found *member
	c.eventually("a leader", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		for id, m := range c.nodes {
			if l, _ := m.Leadership(); l.Leading && !c.cut[id] {
				found = m
			}
		}
		return found != nil
	})
	return found
}

// put makes one record durable, whoever leads.
func (c *cluster) put(next int64) *metadata.Image {
	c.t.Helper()
	for range 100 {
		l := c.leader()
		img, err := l.Propose(c.t.Context(), l.Image(), []metadata.Record{metadata.ProducerIDsRecord{Next: next}})
		if err == nil {
			return img
		}
		if !errors.Is(err, ErrNotController) && !errors.Is(err, ErrConflict) {
			c.t.Fatal(err)
		}
	}
	c.t.Fatal("no proposal got through")
	return nil
}

func (c *cluster) has(m *member, next int64) {
	c.t.Helper()
	c.eventually(fmt.Sprintf("node %d has %d", m.o.NodeID, next), func() bool { return m.Image().NextProducerID == next })
}

// all starts all nodes and waits until the voters have an entry.
func (c *cluster) all(next int64) {
	c.t.Helper()
	for id := range c.listeners {
		c.start(id)
	}
	c.put(next)
	for _, v := range c.voters {
		c.has(c.nodes[v.ID], next)
	}
}

func TestTwoOfThreeFormAndTheThirdJoins(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, 0)
	a := c.start(1)
	c.eventually("the first says what it waits for", func() bool {
		return strings.Contains(a.Waiting(), "no quorum: waiting for a majority of the voters") && strings.Contains(a.Waiting(), "2@"+c.address(2))
	})
	b := c.start(2)
	c.put(1)
	c.has(a, 1)
	c.has(b, 1)
	d := c.start(3)
	c.has(d, 1)
	c.put(2)
	c.has(d, 2)
	for _, m := range []*member{a, b, d} {
		if err := m.AwaitLeader(t.Context()); err != nil || m.Waiting() != "" {
			t.Fatal(err, m.Waiting())
		}
		c.eventually("no debts", func() bool { return !m.debt.owes(m.raft.AppliedIndex()) })
	}
}

func TestNamesThatResolveLater(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, 0)
	for id := int32(1); id <= 3; id++ {
		c.resolve(c.address(id), false)
	}
	for id := int32(1); id <= 3; id++ {
		c.start(id)
	}
	c.eventually("the cause is told", func() bool {
		return strings.Contains(c.nodes[1].Waiting(), "2@"+c.address(2)+": cannot resolve")
	})
	for id := int32(1); id <= 3; id++ {
		c.resolve(c.address(id), true)
	}
	c.put(1)
	// And once the quorum exists.
	for id := int32(1); id <= 3; id++ {
		c.resolve(c.address(id), false)
	}
	for id := int32(1); id <= 3; id++ {
		c.kill(id)
	}
	a := c.start(1)
	c.eventually("the cause is told", func() bool { return strings.Contains(a.Waiting(), "cannot resolve") })
	b := c.start(2)
	for id := int32(1); id <= 3; id++ {
		c.resolve(c.address(id), true)
	}
	c.put(2)
	c.has(a, 2)
	c.has(b, 2)
}

func TestVotersThatDifferAreFatal(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, 0)
	a := c.start(1)
	b := c.start(2, c.voters[0], c.voters[1], config.Voter{ID: 9, Address: "elsewhere:1"})
	for _, m := range []*member{a, b} {
		var refused *peer.RefusedError
		if err := <-m.ran; !errors.As(err, &refused) || !refused.Voters || !strings.Contains(err.Error(), "voters differ") {
			t.Fatal(err)
		}
		if err := m.AwaitLeader(t.Context()); !errors.As(err, &refused) {
			t.Fatal(err)
		}
	}
}

func TestWipedVoterRejoins(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, 0)
	c.all(1)
	c.kill(2)
	c.put(2)
	c.wipe(2)
	b := c.start(2)
	c.has(b, 2)
	c.eventually("the debt is paid", func() bool { return !b.debt.owes(b.raft.AppliedIndex()) })
	// From then on its vote counts: it and another one are a quorum.
	c.kill(c.leader().o.NodeID)
	c.put(3)
}
