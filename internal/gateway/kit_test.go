package gateway

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
	"github.com/varve-io/varve/internal/broker"
	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/testport"
)

// node is a real broker in this process.
type node struct {
	t      *testing.T
	raw    map[string]string
	addr   string
	cancel context.CancelFunc
	ended  chan error
}

// newNode describes a broker, which listens where nobody does.
func newNode(t *testing.T, settings map[string]string) *node {
	t.Helper()
	n := &node{t: t, addr: testport.Address(t)}
	n.raw = map[string]string{"listeners": "PLAINTEXT://" + n.addr, "log.dir": t.TempDir(), "remote.log.manager.task.interval.ms": "50", "log.retention.check.interval.ms": "50",
		"log.initial.task.delay.ms": "0", "group.initial.rebalance.delay.ms": "0", "offsets.topic.num.partitions": "1", "transaction.state.log.num.partitions": "1"}
	maps.Copy(n.raw, settings)
	t.Cleanup(n.stop)
	return n
}

func (n *node) start() *node {
	n.t.Helper()
	values, err := config.Broker.NewValues(n.raw)
	if err != nil {
		n.t.Fatal(err)
	}
	var ctx context.Context
	ctx, n.cancel = context.WithCancel(context.Background())
	started := make(chan struct{})
	n.ended = make(chan error, 1)
	go func() {
		n.ended <- broker.Run(ctx, broker.Options{Config: values, Logger: slog.New(slog.DiscardHandler), Started: func([]string) { close(started) }})
	}()
	select {
	case <-started:
	case err := <-n.ended:
		n.ended = nil
		n.t.Fatal(err)
	}
	return n
}

func (n *node) stop() {
	if n.ended == nil {
		return
	}
	n.cancel()
	if err := <-n.ended; err != nil {
		n.t.Errorf("broker: %v", err)
	}
	n.ended = nil
}

// running is a gateway that serves.
type running struct {
	*Gateway
	t     *testing.T
	stop  func() // drains and waits
	lines *lines
}

// lines collects log lines.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// run runs a gateway in front of brokers until the end of the test. bucket may be empty.
func run(t *testing.T, bucket string, change func(*Config, *direct.Config), brokers ...string) *running {
	t.Helper()
	r := &running{t: t, lines: &lines{}}
	cfg := Config{Bootstrap: brokers, Listen: "127.0.0.1", Advertise: "127.0.0.1", Logger: slog.New(slog.NewTextHandler(r.lines, nil))}
	d := direct.Config{ConnectTimeout: 10 * time.Second}
	if bucket != "" {
		f, err := objectstore.Open(bucket, objectstore.Options{})
		if err != nil {
			t.Fatal(err)
		}
		d.Enabled, d.Fetcher = true, f
	}
	if change != nil {
		change(&cfg, &d)
	}
	var err error
	if cfg.Transport, err = direct.New(d); err != nil {
		t.Fatal(err)
	}
	var listeners []net.Listener
	for listeners == nil {
		if cfg.Ports == (Ports{}) || err != nil {
			first := testport.Free(t)
			cfg.Ports = Ports{first, first + 4}
		}
		r.Gateway = New(cfg)
		listeners, err = r.Listen()
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Serve(ctx, listeners) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("gateway: %v", err)
		}
	})
	t.Cleanup(func() {
		r.stop()
		if t.Failed() {
			t.Logf("the gateway said:\n%s", r.lines)
		}
	})
	return r
}

// address is that of the port with an index.
func (r *running) address(index int) string {
	return "127.0.0.1:" + strconv.Itoa(r.cfg.Ports.First+index)
}

// client is a client that must never dial anything but the gateway.
func (r *running) client(opts ...kgo.Opt) *kgo.Client {
	r.t.Helper()
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		_, text, _ := net.SplitHostPort(address)
		if port, _ := strconv.Atoi(text); port < r.cfg.Ports.First || port > r.cfg.Ports.Last {
			r.t.Errorf("a client was told to go to %s", address)
		}
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}
	return kgoClient(r.t, append([]kgo.Opt{kgo.SeedBrokers(r.address(0)), kgo.Dialer(dial), kgo.MetadataMinAge(50 * time.Millisecond)}, opts...)...)
}

func kgoClient(t *testing.T, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	cl, err := kgo.NewClient(opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cl.Close)
	return cl
}

// until polls for what others do; the limit is far above what it takes.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(60 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("it does not come to pass that %s", what)
		}
	}
}

// history fills a topic of two partitions with transactions, every third of them aborted, in 60 kB segments, and waits until
// most of it is in the bucket alone. It returns what a read_committed consumer sees of each partition.
func history(t *testing.T, cl *kgo.Client, topic string) [][]string {
	t.Helper()
	ctx := t.Context()
	adm := kadm.NewClient(cl)
	s := func(v string) *string { return &v }
	if _, err := adm.CreateTopic(ctx, 2, 1, map[string]*string{"remote.storage.enable": s("true"), "internal.segment.bytes": s("60000"),
		"local.retention.bytes": s("1"), "remote.copy.lag.bytes": s("0"), "index.interval.bytes": s("2000")}, topic); err != nil {
		t.Fatal(err)
	}
	out := make([][]string, 2)
	const rounds, each = 60, 20
	for i := range rounds {
		if err := cl.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		var batch []*kgo.Record
		for k := range each {
			v := fmt.Sprintf("%s-%d-%d-%s", topic, i, k, strings.Repeat("v", 400))
			batch = append(batch, &kgo.Record{Topic: topic, Partition: int32(k % 2), Value: []byte(v)})
			if i%3 != 2 {
				out[k%2] = append(out[k%2], v)
			}
		}
		if err := cl.ProduceSync(ctx, batch...).FirstErr(); err != nil {
			t.Fatal(err)
		}
		if err := cl.EndTransaction(ctx, kgo.TransactionEndTry(i%3 != 2)); err != nil {
			t.Fatal(err)
		}
	}
	const earliestLocal = -4
	until(t, "history is tiered", func() bool {
		ends, err := adm.ListEndOffsets(ctx, topic)
		if err != nil {
			t.Fatal(err)
		}
		local, err := adm.ListOffsetsAfterMilli(ctx, earliestLocal, topic)
		if err != nil {
			t.Fatal(err)
		}
		far := true
		ends.Each(func(e kadm.ListedOffset) {
			l, ok := local.Lookup(e.Topic, e.Partition)
			far = far && ok && e.Offset-l.Offset < e.Offset/4
		})
		return far
	})
	return out
}

func transactional(id string) []kgo.Opt {
	return []kgo.Opt{kgo.TransactionalID(id), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(kgo.NoCompression())}
}

// consume reads all of a topic as a group's member and compares.
func consume(t *testing.T, want [][]string, topic, group string, client func(...kgo.Opt) *kgo.Client, opts ...kgo.Opt) {
	t.Helper()
	cl := client(append([]kgo.Opt{kgo.ConsumerGroup(group), kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.FetchMaxPartitionBytes(100_000), kgo.FetchMaxWait(500 * time.Millisecond)}, opts...)...)
	got, n := make([][]string, len(want)), 0
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	total := 0
	for _, w := range want {
		total += len(w)
	}
	for n < total {
		fetches := cl.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			t.Fatalf("after %d of %d: %v", n, total, err)
		}
		fetches.EachRecord(func(r *kgo.Record) {
			got[r.Partition] = append(got[r.Partition], string(r.Value))
			n++
		})
	}
	for p := range want {
		if !slices.Equal(got[p], want[p]) {
			t.Errorf("partition %d: %d records, not those of %d", p, len(got[p]), len(want[p]))
		}
	}
	cl.Close()
}

func tempBucket(t *testing.T) string {
	t.Helper()
	dir := t.TempDir() + "/bucket"
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// count reads a metric; label is the value of its only label, if it has one.
func (r *running) count(name, label string) float64 {
	r.t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(r.Collector())
	families, err := registry.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && (label == "" || m.GetLabel()[0].GetValue() == label) {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return 0
}
