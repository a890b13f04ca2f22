package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/testport"
)

// quick makes nodes notice soon that another is gone.
var quick = []string{"broker.session.timeout.ms=2000", "broker.heartbeat.interval.ms=300"}

// cluster is several nodes of a test that share a bucket. Nodes have the ids from 1 on, by position.
type cluster struct {
	t      *testing.T
	nodes  []*node
	bucket string
	voters string
	sets   []string
}

// newCluster describes n nodes; sets are KEY=VALUE of all.
func newCluster(t *testing.T, n int, sets ...string) *cluster {
	t.Helper()
	c := &cluster{t: t, bucket: t.TempDir(), sets: append(append([]string{}, quick...), sets...)}
	var voters []string
	for i := range n {
		one := c.add()
		voters = append(voters, fmt.Sprintf("%d@%s", i+1, one.address()))
	}
	c.voters = strings.Join(voters, ",")
	for _, one := range c.nodes {
		one.args = append(one.args, "--voters", c.voters)
	}
	return c
}

func (c *cluster) add() *node {
	n := newNode(c.t, c.sets...)
	n.web = testport.Free(c.t)
	c.nodes = append(c.nodes, n)
	n.args = append(n.args, "--id", strconv.Itoa(len(c.nodes)), "--bucket", c.bucket, "--http", fmt.Sprintf("127.0.0.1:%d", n.web))
	return n
}

// start runs all nodes.
func (c *cluster) start() {
	c.t.Helper()
	for _, n := range c.nodes {
		n.launch()
	}
	for _, n := range c.nodes {
		n.serves()
	}
}

// join starts one more node.
func (c *cluster) join() *node {
	c.t.Helper()
	n := c.add()
	n.args = append(n.args, "--join", c.nodes[0].address())
	n.start()
	return n
}

// node returns the node of an id.
func (c *cluster) node(id int32) *node { return c.nodes[id-1] }

// pause stops a process as it is, with its connections open.
func (n *node) pause() { n.signal(syscall.SIGSTOP) }

func (n *node) resume() { n.signal(syscall.SIGCONT) }

// wipe empties the disk of a node that does not run.
func (n *node) wipe() {
	n.t.Helper()
	if err := os.RemoveAll(n.dir); err != nil {
		n.t.Fatal(err)
	}
}

func (c *cluster) seeds() string {
	var out []string
	for _, n := range c.nodes {
		out = append(out, n.address())
	}
	return strings.Join(out, ",")
}

func (c *cluster) client(opts ...kgo.Opt) *kgo.Client {
	c.t.Helper()
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(strings.Split(c.seeds(), ",")...), kgo.MetadataMinAge(50 * time.Millisecond), kgo.RetryTimeout(40 * time.Second)}, opts...)...)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(cl.Close)
	return cl
}

// varve runs a tool against all nodes and demands that it succeeds.
func (c *cluster) varve(args ...string) string {
	c.t.Helper()
	out, code := c.nodes[0].varve(append(args, "-b", c.seeds())...)
	if code != 0 {
		c.t.Fatalf("varve %s: exit %d: %s", strings.Join(args, " "), code, out)
	}
	return out
}

// refused runs a tool and demands that it is refused with these words.
func (c *cluster) refused(words string, args ...string) {
	c.t.Helper()
	if out, code := c.nodes[0].varve(append(args, "-b", c.seeds())...); code != 1 || !strings.Contains(out, words) {
		c.t.Errorf("varve %s: exit %d: %swant exit 1 and %q", strings.Join(args, " "), code, out, words)
	}
}

func (c *cluster) until(what string, ok func() bool) {
	c.t.Helper()
	c.nodes[0].until(what, ok)
}

// fenced waits until every node that runs knows that a broker is fenced: a tool may ask any of them, whatever it was given.
func (c *cluster) fenced(id int32) {
	c.t.Helper()
	cl := c.client()
	for i, n := range c.nodes {
		if n.cmd == nil {
			continue
		}
		c.until(fmt.Sprintf("node %d knows that %d is fenced", i+1, id), func() bool {
			ctx, cancel := context.WithTimeout(c.t.Context(), 5*time.Second)
			defer cancel()
			req := kmsg.NewPtrMetadataRequest()
			req.Topics = []kmsg.MetadataRequestTopic{} // none, where nil would be all
			resp, err := req.RequestWith(ctx, cl.Broker(i+1))
			return err == nil && !slices.ContainsFunc(resp.Brokers, func(b kmsg.MetadataResponseBroker) bool { return b.NodeID == id })
		})
	}
}

func (c *cluster) createTopic(name string, partitions, replicas int, configs ...string) {
	c.t.Helper()
	args := []string{"topic", "create", name, "-p", strconv.Itoa(partitions), "-r", strconv.Itoa(replicas)}
	for _, k := range configs {
		args = append(args, "-c", k)
	}
	c.varve(args...)
}

// partitionState is a partition of topic describe.
type partitionState struct {
	Partition int32
	Leader    int32
	Replicas  []int32
	ISR       []int32
	Adding    []int32
	Removing  []int32
	End       int64 `json:"endOffset"`
	Detail    []struct {
		Broker     int32
		Lag        int64
		LocalStart int64 `json:"localLogStartOffset"`
		LocalBytes int64
		Thin       bool
	}
}

// describe returns nothing while the cluster cannot tell.
func (c *cluster) describe(topic string) []partitionState {
	c.t.Helper()
	out, _ := c.nodes[0].varve("topic", "describe", topic, "--json", "-b", c.seeds())
	var d struct{ Partitions []partitionState }
	if line, _, _ := strings.Cut(out, "\n"); json.Unmarshal([]byte(line), &d) != nil {
		return nil
	}
	return d.Partitions
}

// level waits until all replicas of a topic are in sync and hold everything.
func (c *cluster) level(topic string) []partitionState {
	c.t.Helper()
	var all []partitionState
	c.until("all replicas of "+topic+" are in sync", func() bool {
		all = c.describe(topic)
		for _, p := range all {
			if p.Leader < 0 || len(p.ISR) != len(p.Replicas) || len(p.Adding)+len(p.Removing) > 0 {
				return false
			}
			for _, r := range p.Detail {
				if r.Lag != 0 {
					return false
				}
			}
		}
		return len(all) > 0
	})
	return all
}

// brokerState is a row of broker ls.
type brokerState struct {
	ID       int32
	Fenced   bool
	Draining bool
	Leaders  int
	Replicas int
}

// brokers are told by the first node; nothing is told while it cannot.
func (c *cluster) brokers() map[int32]brokerState {
	c.t.Helper()
	out, code := c.nodes[0].varve("broker", "ls", "--json", "-b", c.nodes[0].address())
	var rows []brokerState
	if code != 0 || json.Unmarshal([]byte(out), &rows) != nil {
		return nil // for the moment
	}
	by := map[int32]brokerState{}
	for _, r := range rows {
		by[r.ID] = r
	}
	return by
}

// identical demands that all replicas of a topic have the same bytes and the same lineage on their disks.
func (c *cluster) identical(topic string) {
	c.t.Helper()
	for _, p := range c.level(topic) {
		var first []byte
		var lineage string
		for i, id := range p.Replicas {
			dir := filepath.Join(c.node(id).dir, fmt.Sprintf("%s-%d", topic, p.Partition))
			data := logBytes(c.t, dir)
			checkpoint, err := os.ReadFile(filepath.Join(dir, "leader-epoch-checkpoint"))
			if err != nil {
				c.t.Fatal(err)
			}
			if i == 0 {
				first, lineage = data, string(checkpoint)
				continue
			}
			if !bytes.Equal(first, data) {
				c.t.Errorf("%s-%d: the logs of brokers %d and %d differ: %d and %d bytes", topic, p.Partition, p.Replicas[0], id, len(first), len(data))
			}
			if lineage != string(checkpoint) {
				c.t.Errorf("%s-%d: the lineage of broker %d is\n%s, that of %d\n%s", topic, p.Partition, p.Replicas[0], lineage, id, checkpoint)
			}
		}
	}
}

// logBytes are the segments of a folder, one after the other.
func logBytes(t *testing.T, dir string) []byte {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.log"))
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(files)
	var out []byte
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, b...)
	}
	return out
}

// get returns the body of a node's HTTP answer and its status.
func (n *node) get(path string) (string, int) {
	n.t.Helper()
	client := http.Client{Timeout: 5 * time.Second}
	r, err := client.Get(fmt.Sprintf("http://127.0.0.1:%d%s", n.web, path))
	if err != nil {
		return err.Error(), 0
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return err.Error(), 0
	}
	return string(body), r.StatusCode
}

var replicationIn = regexp.MustCompile(`(?m)^kafka_server_brokertopicmetrics_replicationbytesin_total (\S+)$`)

// copied is how many bytes of batches this run of a node took over from leaders.
func (n *node) copied() int64 {
	n.t.Helper()
	body, _ := n.get("/metrics")
	m := replicationIn.FindStringSubmatch(body)
	if m == nil {
		n.t.Fatalf("no such metric in %d bytes", len(body))
	}
	v, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		n.t.Fatal(err)
	}
	return int64(v)
}

// load writes numbered records to all partitions of a topic, with acks=all and idempotently, until it is stopped.
type load struct {
	c      *cluster
	topic  string
	cl     *kgo.Client
	cancel context.CancelFunc
	ended  chan struct{}

	mu     sync.Mutex
	next   []int // by partition
	acked  int
	last   time.Time
	gap    time.Duration // longest between two acknowledgements
	failed error
}

func (c *cluster) load(topic string, partitions int) *load {
	c.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{c: c, topic: topic, cancel: cancel, ended: make(chan struct{}), next: make([]int, partitions), last: time.Now(),
		cl: c.client(kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(kgo.NoCompression()), kgo.MaxBufferedRecords(5000))}
	go func() {
		defer close(l.ended)
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			for p := range partitions {
				l.mu.Lock()
				i := l.next[p]
				l.next[p]++
				l.mu.Unlock()
				l.cl.Produce(context.Background(), &kgo.Record{Topic: topic, Partition: int32(p), Key: []byte(strconv.Itoa(i)), Value: value(i)}, l.done)
			}
		}
	}()
	c.t.Cleanup(cancel)
	return l
}

func (l *load) done(_ *kgo.Record, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.failed = err
		return
	}
	now := time.Now()
	l.gap, l.last = max(l.gap, now.Sub(l.last)), now
	l.acked++
}

// goesOn waits until writes are acknowledged that were handed over after now.
func (l *load) goesOn() {
	l.c.t.Helper()
	l.mu.Lock()
	from := 0
	for _, n := range l.next {
		from += n
	}
	l.mu.Unlock()
	l.c.until("writes are acknowledged", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.failed != nil {
			l.c.t.Fatalf("a write failed: %v", l.failed)
		}
		return l.acked > from
	})
}

// longest is the longest time without an acknowledgement since it was asked last.
func (l *load) longest() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	gap := max(l.gap, time.Since(l.last))
	l.gap = 0
	return gap
}

// stop ends the load and demands that every record was acknowledged, and that every one is there, once, in order.
func (l *load) stop() {
	t := l.c.t
	t.Helper()
	l.cancel()
	<-l.ended
	ctx, cancel := context.WithTimeout(context.Background(), 40*time.Second)
	defer cancel()
	if err := l.cl.Flush(ctx); err != nil {
		t.Fatalf("writes that are not acknowledged: %v", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed != nil {
		t.Fatalf("a write failed: %v", l.failed)
	}
	l.c.holds(l.topic, l.next...)
}

// holds demands that the partitions of a topic hold the records from 0 up to the given ends, each once and in order.
func (c *cluster) holds(topic string, ends ...int) {
	c.t.Helper()
	at := map[int32]kgo.Offset{}
	total := 0
	for p, end := range ends {
		at[int32(p)] = kgo.NewOffset().AtStart()
		total += end
	}
	cl := c.client(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: at}))
	defer cl.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	next := make([]int, len(ends))
	for n := 0; n < total; {
		fetches := cl.PollFetches(ctx)
		if err := ctx.Err(); err != nil {
			c.t.Fatalf("%s: only %v of %v could be read", topic, next, ends)
		}
		fetches.EachError(func(topic string, p int32, err error) { c.t.Fatalf("%s-%d: %v", topic, p, err) })
		fetches.EachRecord(func(r *kgo.Record) {
			want := next[r.Partition]
			if string(r.Key) != strconv.Itoa(want) || !bytes.Equal(r.Value, value(want)) {
				c.t.Fatalf("%s-%d: offset %d holds record %q, want %d", topic, r.Partition, r.Offset, r.Key, want)
			}
			next[r.Partition]++
			n++
		})
	}
	ended, err := kadm.NewClient(cl).ListEndOffsets(ctx, topic)
	if err != nil {
		c.t.Fatal(err)
	}
	for p, end := range ends {
		if o, _ := ended.Lookup(topic, int32(p)); o.Offset != int64(end) {
			c.t.Errorf("%s-%d ends at %d, want %d", topic, p, o.Offset, end)
		}
	}
}
