package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/internal/testport"
)

// TestDrainAndUnregister: a broker is emptied under load, stopped and forgotten; then it comes back with the same disk.
func TestDrainAndUnregister(t *testing.T) {
	c := newCluster(t, 3)
	c.start()
	fourth := c.join()
	c.createTopic("orders", 4, 3, "min.insync.replicas=2")
	l := c.load("orders", 4)
	l.goesOn()
	// Whichever node is asked learns of each change in its own time.
	c.until("something is on the fourth broker", func() bool { return c.brokers()[4].Replicas > 0 })
	c.refused("Broker 4 is running: stop it first", "broker", "unregister", "4")
	fourth.kill()
	c.until("it is fenced, and its replicas are counted", func() bool { b := c.brokers()[4]; return b.Fenced && b.Replicas > 0 })
	c.refused("move them off with varve broker drain 4 first", "broker", "unregister", "4")
	fourth.start()
	if out := c.varve("broker", "drain", "4"); !strings.Contains(out, "holds no replicas") {
		t.Fatal(out)
	}
	c.until("nothing is on it", func() bool { b := c.brokers()[4]; return b.Replicas == 0 && b.Leaders == 0 && b.Draining })
	l.goesOn()
	fourth.stop()
	c.fenced(4)
	c.varve("broker", "unregister", "4")
	c.until("it is listed no more", func() bool { all := c.brokers(); _, still := all[4]; return len(all) > 0 && !still })
	c.refused("No broker with id 4", "broker", "unregister", "4")
	l.goesOn()
	l.stop()
	fourth.start()
	c.until("it is back, empty", func() bool { b, ok := c.brokers()[4]; return ok && !b.Fenced && !b.Draining && b.Replicas == 0 })
}

// ends runs a server that is to be refused and returns what it said.
func (c *cluster) ends(args ...string) string {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	all := append([]string{"server", "--bucket", c.bucket}, args...)
	out, err := exec.CommandContext(ctx, binary, all...).CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || ctx.Err() != nil {
		c.t.Errorf("a server that must not run: %v\n%s", err, out)
	}
	return string(out)
}

// TestRefusals: what cannot be is refused in words that say what to do.
func TestRefusals(t *testing.T) {
	c := newCluster(t, 3)
	c.start()
	c.createTopic("orders", 2, 3)
	address := func() string { return fmt.Sprintf("127.0.0.1:%d", testport.Free(t)) }
	contains := func(what, out string, words ...string) {
		t.Helper()
		for _, w := range words {
			if !strings.Contains(out, w) {
				t.Errorf("%s: want %q in\n%s", what, w, out)
			}
		}
	}
	leader := c.quorumLeader()
	other := leader%3 + 1
	out := c.ends("--id", fmt.Sprint(other), "--dir", t.TempDir(), "--listen", address(), "--join", c.node(leader).address())
	contains("an id that is in use", out, fmt.Sprintf("broker id %d is in use by", other), c.node(other).address())
	// Who is turned away by the one that it wants to speak to, since it has the same id, says so for as long as it waits.
	words := fmt.Sprintf("node id %d is used twice", leader)
	n := newNode(t)
	n.web = testport.Free(t)
	n.args = append(n.args, "--id", fmt.Sprint(leader), "--join", c.node(leader).address(), "--http", fmt.Sprintf("127.0.0.1:%d", n.web))
	n.launch()
	c.until("it says that "+words, func() bool {
		body, status := n.get("/ready")
		return status == 503 && strings.Contains(body, words)
	})
	n.kill()
	out = c.ends("--id", "4", "--dir", t.TempDir(), "--listen", address(), "--join", c.nodes[0].address(), "--set", "cluster.id=another")
	contains("another cluster", out, "belongs to cluster another")
	if _, known := c.brokers()[4]; known {
		t.Error("a node of another cluster was registered")
	}
	out = c.ends("--id", "5", "--dir", c.nodes[0].dir, "--listen", address(), "--join", c.nodes[0].address())
	contains("a folder that is in use", out, "in use")
	c.nodes[2].kill()
	out = c.ends("--id", "7", "--dir", c.nodes[2].dir, "--listen", address(), "--join", c.nodes[0].address())
	contains("the folder of another node", out, "node")
	c.nodes[2].start()

	c.refused("only 3 broker(s) are registered", "topic", "create", "wide", "-r", "4")
	c.refused("more than once", "topic", "reassign", "orders:0", "--to", "1,2,2")
	c.refused("no such broker is registered", "topic", "reassign", "orders:0", "--to", "1,2,9")
	c.refused("No partition reassignment is in progress", "topic", "reassign", "orders:0", "--cancel")
	c.refused("cannot be drained", "broker", "drain", "3")
	c.refused("No broker with id 9", "broker", "drain", "9")
	c.refused("not registered", "quorum", "add", "9")
	c.refused("is no voter", "quorum", "remove", "9")
	c.varve("quorum", "remove", "3")
	c.varve("quorum", "remove", "2")
	c.refused("last voter", "quorum", "remove", "1")
}

// TestVotersThatDisagree: nodes that were given different lists do not found a cluster, and say which they have.
func TestVotersThatDisagree(t *testing.T) {
	c := newCluster(t, 3)
	last := c.nodes[2]
	list := strings.Split(c.voters, ",")
	other := strings.Join([]string{list[1], list[2], "9" + strings.TrimPrefix(list[0], "1")}, ",") // by id, as it will be told
	for i, a := range last.args {
		if a == c.voters {
			last.args[i] = other
		}
	}
	for _, n := range c.nodes {
		n.launch()
	}
	said := func(n *node) bool {
		return strings.Contains(n.log(), "voters differ") && strings.Contains(n.log(), other)
	}
	ended := func(n *node) bool { return len(n.done) > 0 }
	// Of two that disagree the one gives up that hears of the other's list first, and the other one tells whom it refused.
	c.until("one gives up", func() bool { return slices.ContainsFunc(c.nodes, ended) })
	c.until("the odd one tells what is wrong", func() bool { return said(last) })
	for _, n := range c.nodes {
		if !ended(n) {
			continue
		}
		if err := n.wait(time.Second); err == nil {
			t.Error("it ended as if all were well")
		}
		if !said(n) {
			t.Errorf("it does not say why it ended:\n%s", n.log())
		}
	}
}

// TestQuorumChanges: voters come and go, the leader dies, the majority is lost and comes back.
func TestQuorumChanges(t *testing.T) {
	c := newCluster(t, 3)
	c.start()
	c.createTopic("orders", 2, 3, "min.insync.replicas=2") // none of it is on the fourth
	fourth := c.join()
	if out := c.varve("quorum", "add", "4"); !strings.Contains(out, "the voters are 1,2,3,4") || !strings.Contains(out, "warning: 4 voters survive the loss of 1") {
		t.Fatal(out)
	}
	leader := c.quorumLeader()
	l := c.load("orders", 2)
	l.goesOn()
	c.node(leader).kill()
	c.createTopic("after", 1, 3)
	l.goesOn()
	c.node(leader).start()
	if out := c.varve("quorum", "remove", "4"); !strings.Contains(out, "the voters are 1,2,3\n") {
		t.Fatal(out)
	}
	c.level("orders")
	fourth.stop()
	// Two of three voters die: nothing is decided, and whoever is left says so.
	leader = c.quorumLeader()
	others := []*node{}
	for i, n := range c.nodes[:3] {
		if int32(i+1) != leader {
			others = append(others, n)
		}
	}
	left := c.node(leader)
	for _, n := range others {
		n.kill()
	}
	c.until("the node that is left is not ready", func() bool {
		_, status := left.get("/ready")
		return status == 503
	})
	body, _ := left.get("/ready")
	t.Logf("/ready: %s", body)
	if !strings.Contains(body, "quorum") {
		t.Errorf("that is no cause: %s", body)
	}
	if out, code := left.varve("quorum", "status", "-b", left.address()); code != 1 {
		t.Errorf("quorum status: exit %d: %s", code, out)
	}
	for _, n := range others {
		n.launch()
	}
	for _, n := range others {
		n.serves()
	}
	l.goesOn()
	c.level("orders")
	l.stop()
	c.identical("orders")
}

// Two of three voters are lost with their disks. The third one's folder becomes a quorum of one, which the lost ones join again, and
// nothing that was acknowledged is gone: every partition had a replica on a node that is left.
func TestRecoverALostQuorum(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	c.start()
	fourth := c.join()
	c.createTopic("orders", 2, 3, "min.insync.replicas=2")
	l := c.load("orders", 2)
	l.goesOn()
	c.level("orders")
	left := c.node(1)
	recovering := func(code int, words string, more ...string) {
		t.Helper()
		if out, got := left.varve(append([]string{"quorum", "recover", "--dir", left.dir}, more...)...); got != code || !strings.Contains(out, words) {
			t.Errorf("exit %d: %swant exit %d and %q", got, out, code, words)
		}
	}
	recovering(1, "in use by another server", "--yes")
	for _, id := range []int32{2, 3} {
		c.node(id).kill()
		c.node(id).wipe()
	}
	left.kill()
	recovering(1, "node 4 answers at "+fourth.address()+": stop every node first", "--yes")
	fourth.kill()
	recovering(0, "nothing was changed")
	recovering(0, "node 1 is the only voter now", "--yes")

	left.launch()
	fourth.launch()
	left.serves()
	fourth.serves()
	for _, id := range []int32{2, 3} {
		c.node(id).start()
	}
	c.level("orders")
	l.goesOn()
	c.varve("quorum", "add", "2")
	if out := c.varve("quorum", "add", "3"); !strings.Contains(out, "the voters are 1,2,3\n") {
		t.Errorf("%s", out)
	}
	left.kill()
	l.goesOn()
	left.start()
	l.stop()
	c.identical("orders")
}

// The only replica in sync loses its disk. The other one lacks what was written last, but has the rest: nobody leads, so that it is not cut to
// what the empty one has, until somebody decides.
func TestTheLastInSyncLosesItsDisk(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	c.start()
	c.createTopic("orders", 1, 2)
	cl := c.client(kgo.DefaultProduceTopic("orders"))
	write := func(from, to int) {
		t.Helper()
		for i := from; i < to; i++ {
			if err := cl.ProduceSync(t.Context(), &kgo.Record{Key: []byte(strconv.Itoa(i)), Value: value(i)}).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
	}
	write(0, 50)
	p := c.level("orders")[0]
	last, behind := c.node(p.Leader), c.node(p.Replicas[0]+p.Replicas[1]-p.Leader)
	behind.kill()
	c.until("one is in sync", func() bool { d := c.describe("orders"); return len(d) == 1 && len(d[0].ISR) == 1 })
	write(50, 60)
	last.kill()
	last.wipe()
	behind.start()
	last.start()
	c.until("nobody leads", func() bool {
		out, code := behind.varve("topic", "describe", "orders", "-b", c.seeds())
		return code == 1 && strings.Contains(out, "the last in sync came back with an empty disk")
	})
	c.until("nobody is in sync", func() bool { d := c.describe("orders"); return len(d) == 1 && d[0].Leader == -1 && len(d[0].ISR) == 0 })
	leaderless := func(n int) {
		t.Helper()
		c.until(fmt.Sprintf("/metrics counts %d partitions without a leader", n), func() bool {
			body, _ := behind.get("/metrics")
			return strings.Contains(body, fmt.Sprintf("\nkafka_controller_kafkacontroller_offlinepartitionscount %d\n", n))
		})
	}
	leaderless(1)
	c.refused("not alive or not in sync", "topic", "elect", "orders")
	if out := c.varve("topic", "elect", "orders", "--unclean"); !strings.Contains(out, "elected leaders of orders: 0\n") {
		t.Errorf("%s", out)
	}
	c.level("orders")
	leaderless(0)
	c.until("one controller is active", func() bool {
		active := 0
		for _, n := range c.nodes {
			body, _ := n.get("/metrics")
			active += strings.Count(body, "\nkafka_controller_kafkacontroller_activecontrollercount 1\n")
		}
		return active == 1
	})
	write(50, 55)
	c.holds("orders", 55)
	c.identical("orders")
	if out := c.varve("topic", "elect", "orders", "--unclean"); !strings.Contains(out, "nothing changed") {
		t.Errorf("%s", out)
	}
}

func (c *cluster) quorumLeader() int32 {
	c.t.Helper()
	var id int
	c.until("the quorum has a leader", func() bool {
		out, code := c.nodes[0].varve("quorum", "status", "-b", c.seeds())
		word, _, _ := strings.Cut(strings.TrimPrefix(out, "leader "), ",")
		var err error
		id, err = strconv.Atoi(word)
		return code == 0 && err == nil && id > 0
	})
	return int32(id)
}

// consecutive finds n ports in a row that are free at the moment.
func consecutive(t *testing.T, n int) int {
	t.Helper()
	for range 100 {
		base := testport.Free(t)
		if base+n < 65536 && free(base, n) {
			return base
		}
	}
	t.Fatal("no free ports in a row")
	return 0
}

func free(base, n int) bool {
	for i := range n {
		ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", base+i))
		if err != nil {
			return false
		}
		ln.Close()
	}
	return true
}

// TestClusterInOneProcess starts, serves, stops cleanly, and starts again with what it had, and a node more.
func TestClusterInOneProcess(t *testing.T) {
	base := consecutive(t, 5)
	n := &node{t: t, dir: t.TempDir(), port: base}
	var cmd *exec.Cmd
	start := func(nodes int) {
		t.Helper()
		cmd = exec.Command(binary, "cluster", "--nodes", strconv.Itoa(nodes), "--dir", n.dir, "--listen", n.address(), "--set", "offsets.topic.num.partitions=4")
		cmd.Stdout, cmd.Stderr = n, n
		n.cmd = cmd
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		n.done = make(chan error, 1)
		go func() { n.done <- cmd.Wait() }()
		n.serves()
		for i := 1; i < nodes; i++ {
			other := &node{t: t, port: base + i, cmd: cmd, done: n.done}
			other.serves()
		}
	}
	t.Cleanup(func() {
		if n.cmd != nil {
			n.signal(syscall.SIGKILL)
			<-n.done
		}
		if t.Failed() {
			t.Log(n.log())
		}
	})
	c := &cluster{t: t, nodes: []*node{n, {t: t, port: base + 1}, {t: t, port: base + 2}}}
	start(3)
	if out := c.varve("topic", "create", "t"); !strings.Contains(out, "3 replicas") {
		t.Fatal(out)
	}
	cl := c.client(kgo.RecordPartitioner(kgo.ManualPartitioner()))
	produce(t, cl, "t", 0, 1000)
	c.level("t")
	for _, prefix := range []string{"[1] ", "[2] ", "[3] "} {
		if !bytes.Contains([]byte(n.log()), []byte("\n"+prefix)) {
			t.Errorf("no line of the log begins with %s", prefix)
		}
	}
	n.stop()
	if strings.Count(n.log(), "stopped cleanly") != 3 {
		t.Error("not all nodes stopped cleanly")
	}
	start(4)
	c.holds("t", 1000)
	if out := c.varve("quorum", "status"); strings.Count(out, "voter") != 3 || strings.Count(out, "observer") != 1 {
		t.Error(out)
	}
	n.stop()
	out, err := exec.Command(binary, "cluster", "--nodes", "3", "--dir", n.dir, "--listen", n.address()).CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 2 || !strings.Contains(string(out), "has 4 nodes already") {
		t.Errorf("fewer nodes than there are: %v: %s", err, out)
	}
	if _, err := os.Stat(n.dir + "/bucket"); err != nil {
		t.Error(err)
	}
}
