// Package clustertest runs whole clusters in one process with fake time: real brokers and real kgo clients in a bubble of
// testing/synctest, on a network in memory (package simnet), over real files. A test sees minutes pass within a second, and
// every time-out is at its default unless it says otherwise.
//
// Everything in a bubble must wait in ways that the bubble sees: on channels, timers, conditions and wait groups of its own. A
// mutex that is held while its holder waits for the network makes time stand still as soon as somebody else wants it; Run
// then ends the process with all stacks. Records are not compressed here: pooled zstd coders have channels of the bubble that
// made them.
//
// Time is fake, but the schedule is the runtime's: a test may fail at one run and pass at the next, if the code under test
// depends on it.
package clustertest

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime/pprof"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/internal/broker"
	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/simnet"
	"github.com/varve-io/varve/internal/vfs"
)

// patience is how long a bubble may take, in real time.
const patience = 2 * time.Minute

// clientHost is where the clients of a test live, unless it says otherwise.
const clientHost = "client"

// port is that of every broker, on a host of its own.
const port = 9092

// Cluster is some brokers, with ids from 1 on, on hosts n1, n2 and so on.
type Cluster struct {
	T     *testing.T
	Net   *simnet.Network
	Nodes []*Node

	store   *objstore.Memory
	dir     string
	voters  string
	sets    []string
	clients *simnet.Host
	began   time.Time
	ended   sync.WaitGroup
}

// Run starts n brokers, all voters, in a bubble, and stops them after body. sets are KEY=VALUE of all. The test runs beside
// others: bubbles share nothing.
func Run(t *testing.T, n int, body func(c *Cluster), sets ...string) {
	t.Helper()
	t.Parallel()
	stuck := time.AfterFunc(patience, func() { // outside of the bubble: of real time
		pprof.Lookup("goroutine").WriteTo(os.Stderr, 1)
		panic(fmt.Sprintf("%s: time has stood still for %v", t.Name(), patience))
	})
	defer stuck.Stop()
	dir := t.TempDir()
	real := time.Now()
	synctest.Test(t, func(t *testing.T) {
		c := &Cluster{T: t, Net: simnet.New(), store: objstore.NewMemory(), dir: dir, sets: sets, began: time.Now()}
		c.clients = c.Net.Host(clientHost)
		var voters []string
		for id := 1; id <= n; id++ {
			voters = append(voters, fmt.Sprintf("%d@n%d:%d", id, id, port))
		}
		c.voters = strings.Join(voters, ",")
		for range n {
			c.add()
		}
		t.Cleanup(func() {
			for _, n := range c.Nodes {
				n.admin.Close()
				n.cancel()
			}
			c.ended.Wait()
			for _, n := range c.Nodes {
				if t.Failed() {
					t.Logf("log of node %d:\n%s", n.ID, n.log)
				}
			}
			fake := time.Since(c.began)
			t.Logf("%v of fake time", fake.Round(time.Millisecond))
		})
		for _, n := range c.Nodes {
			n.Start()
		}
		for _, n := range c.Nodes {
			n.Serves()
		}
		body(c)
	})
	t.Logf("%v of real time", time.Since(real).Round(time.Millisecond))
}

// Node is a broker that may be killed and started again.
type Node struct {
	ID    int32
	Host  string
	Store *objstore.Faults // the bucket as this process sees it
	FS    vfs.FS           // of the partitions, from the next start on; nil is the operating system's

	c       *Cluster
	sets    []string
	dir     string // of this process
	process int
	view    *simnet.Host
	cancel  context.CancelFunc
	started chan struct{}
	failed  chan error
	log     *logBuffer
	admin   *kgo.Client
}

func (c *Cluster) add() *Node {
	n := &Node{ID: int32(len(c.Nodes) + 1), c: c, log: &logBuffer{}, cancel: func() {}}
	n.Host = fmt.Sprintf("n%d", n.ID)
	n.dir = filepath.Join(c.dir, n.Host, "0")
	c.Net.Host(n.Host) // its name is known before it runs
	c.Nodes = append(c.Nodes, n)
	var err error
	if n.admin, err = kgo.NewClient(kgo.SeedBrokers(n.Address()), kgo.Dialer(c.dial), kgo.RequestRetries(0),
		kgo.RequiredAcks(kgo.LeaderAck()), kgo.DisableIdempotentWrite()); err != nil {
		c.T.Fatal(err)
	}
	return n
}

// dialTimeout is that of kgo's own dialer.
const dialTimeout = 10 * time.Second

func (c *Cluster) dial(ctx context.Context, _, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	return c.clients.DialContext(ctx, address)
}

// Node returns the node of an id.
func (c *Cluster) Node(id int32) *Node { return c.Nodes[id-1] }

// Address is where clients and other nodes find the broker.
func (n *Node) Address() string { return fmt.Sprintf("%s:%d", n.Host, port) }

// Set changes the configuration of the next start.
func (n *Node) Set(sets ...string) { n.sets = append(n.sets, sets...) }

// Start runs the broker over what is in its folder. Serves waits until clients are let in.
func (n *Node) Start() {
	c := n.c
	raw := map[string]string{"node.id": fmt.Sprint(n.ID), "listeners": "PLAINTEXT://" + n.Address(), "log.dir": n.dir, "controller.quorum.voters": c.voters,
		"offsets.topic.num.partitions": "1"}
	for _, s := range append(append([]string(nil), c.sets...), n.sets...) {
		k, v, _ := strings.Cut(s, "=")
		raw[k] = v
	}
	values, err := config.Broker.NewValues(raw)
	if err != nil {
		c.T.Fatal(err)
	}
	n.process++
	n.view = c.Net.Host(n.Host)
	n.Store = objstore.WithFaults(c.store)
	n.started, n.failed = make(chan struct{}), make(chan error, 1)
	started, failed := n.started, n.failed
	ctx, cancel := context.WithCancel(context.Background())
	n.cancel = cancel
	logger := slog.New(slog.NewTextHandler(n.log, nil)).With("process", n.process)
	options := broker.Options{Config: values, Logger: logger, FS: n.FS, Network: n.view, Bucket: n.Store, Started: func([]string) { close(started) }}
	c.ended.Go(func() {
		err := broker.Run(ctx, options)
		if err != nil && ctx.Err() == nil {
			logger.Error("the broker ended", "cause", err)
		}
		failed <- err
	})
}

// Serves waits until clients are let in.
func (n *Node) Serves() {
	n.c.T.Helper()
	select {
	case <-n.started:
	case err := <-n.failed:
		n.c.T.Fatalf("node %d ended: %v", n.ID, err)
	case <-time.After(time.Minute):
		n.c.T.Fatalf("node %d does not serve", n.ID)
	}
}

// Kill is kill -9: its connections are reset, its ports are free, and the next start finds the folder as it is now. Files
// keep what was written and not synced, as they do when a process dies and the machine lives. The process that is left is
// cut off from network and bucket and ends by itself; nothing sees what it still does.
func (n *Node) Kill() {
	n.c.T.Helper()
	synctest.Wait() // nobody is in the middle of a write
	next := filepath.Join(n.c.dir, n.Host, fmt.Sprint(n.process))
	if err := copyFolder(next, n.dir); err != nil {
		n.c.T.Fatal(err)
	}
	n.view.Kill()
	n.Store.Add(objstore.Fault{Err: syscall.ENETDOWN})
	n.cancel()
	n.dir = next
}

// Stop ends the broker as SIGTERM does.
func (n *Node) Stop() {
	n.c.T.Helper()
	n.cancel()
	select {
	case err := <-n.failed:
		if err != nil {
			n.c.T.Fatalf("node %d: %v", n.ID, err)
		}
	case <-time.After(time.Minute):
		n.c.T.Fatalf("node %d does not stop", n.ID)
	}
}

// Wipe makes the next start find an empty disk. The broker must have been killed or stopped.
func (n *Node) Wipe() {
	n.c.T.Helper()
	if err := os.RemoveAll(n.dir); err != nil {
		n.c.T.Fatal(err)
	}
}

// copyFolder copies what a crash leaves; sockets and the like do not occur.
func copyFolder(to, from string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			return os.MkdirAll(filepath.Join(to, rel), 0o755)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(to, rel), b, 0o644)
	})
}

// Isolate cuts a node off from all others, not from clients.
func (c *Cluster) Isolate(id int32) {
	for _, o := range c.Nodes {
		if o.ID != id {
			c.Net.Cut(c.Node(id).Host, o.Host)
		}
	}
}

// Rejoin undoes Isolate.
func (c *Cluster) Rejoin(id int32) {
	for _, o := range c.Nodes {
		if o.ID != id {
			c.Net.Join(c.Node(id).Host, o.Host)
		}
	}
}

// Client returns a client of all brokers, closed at the end of the test. Its settings are kgo's defaults, but for those that
// a bubble needs and partitions that the test chooses.
func (c *Cluster) Client(opts ...kgo.Opt) *kgo.Client {
	c.T.Helper()
	var seeds []string
	for _, n := range c.Nodes {
		seeds = append(seeds, n.Address())
	}
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(seeds...), kgo.Dialer(c.dial), kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerBatchCompression(kgo.NoCompression())}, opts...)...)
	if err != nil {
		c.T.Fatal(err)
	}
	c.T.Cleanup(cl.Close)
	return cl
}

// Until waits for at most limit of fake time, looking every 20 ms, and returns how long it took.
func (c *Cluster) Until(what string, limit time.Duration, ok func() bool) time.Duration {
	c.T.Helper()
	start := time.Now()
	for !ok() {
		if time.Since(start) > limit {
			c.T.Fatalf("after %v: not yet that %s", limit, what)
		}
		c.Pass(20 * time.Millisecond)
	}
	return time.Since(start)
}

// Pass lets fake time pass.
func (c *Cluster) Pass(d time.Duration) { <-time.After(d) }

// Logged counts lines in a node's log that contain all words.
func (n *Node) Logged(words ...string) (count int) {
lines:
	for line := range strings.SplitSeq(n.log.String(), "\n") {
		for _, w := range words {
			if !strings.Contains(line, w) {
				continue lines
			}
		}
		count++
	}
	return count
}

// Files returns the bytes of a partition's files of the given pattern, in the order of their names.
func (n *Node) Files(partition, pattern string) []byte {
	n.c.T.Helper()
	names, err := filepath.Glob(filepath.Join(n.dir, partition, pattern))
	if err != nil {
		n.c.T.Fatal(err)
	}
	var out []byte
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			n.c.T.Fatal(err)
		}
		out = append(out, b...)
	}
	return out
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
