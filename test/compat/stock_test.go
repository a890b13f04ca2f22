package compat

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/kafkatier"
	"github.com/varve-io/varve/direct/objectstore"
)

// stock is an Apache Kafka that keeps its tier in a folder, and a transport that reads there.
type stock struct {
	*broker
	k         tools
	home, jmx string
	transport *direct.Transport
}

// stockKafka starts one until the end of the test. The count of remote reads is only told by a single node.
func stockKafka(t *testing.T, nodes int) *stock {
	t.Helper()
	asked(t)
	port := freePorts(t, 2*nodes+1)
	s := &stock{k: kafkaTools(t, ""), home: t.TempDir()}
	t.Cleanup(func() {
		if _, errs, err := (command{}).try(t, s.k.path, "stop", "--dir", s.home, "--kill"); err != nil {
			t.Errorf("stopping Kafka: %v\n%s", err, errs)
		}
	})
	var start command
	if nodes == 1 {
		jmx := strconv.Itoa(port + 2)
		s.jmx = "service:jmx:rmi:///jndi/rmi://127.0.0.1:" + jmx + "/jmxrmi"
		start.env = []string{"VARVE_PEER_JAVA_OPTS=-Dcom.sun.management.jmxremote.port=" + jmx + " -Dcom.sun.management.jmxremote.rmi.port=" + jmx +
			" -Dcom.sun.management.jmxremote.host=127.0.0.1 -Djava.rmi.server.hostname=127.0.0.1 -Dcom.sun.management.jmxremote.authenticate=false -Dcom.sun.management.jmxremote.ssl=false"}
	}
	s.k.found(t, start, s.home, "--port", strconv.Itoa(port), "--nodes", strconv.Itoa(nodes), "--heap", "300m", "--tiered",
		"--set", "log.segment.delete.delay.ms=500")
	var addrs []string
	for i := range nodes {
		addrs = append(addrs, "127.0.0.1:"+strconv.Itoa(port+i))
	}
	s.broker = &broker{addr: strings.Join(addrs, ",")}
	f, err := objectstore.Open(filepath.Join(s.home, "tier"), objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	l, err := kafkatier.Open(f, kafkatier.Options{Seeds: addrs, Layout: kafkatier.KafkaLocal("kafka-tiered-storage/"), Patience: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	if s.transport, err = direct.New(direct.Config{Enabled: true, Fetcher: f, Locator: l, ConnectTimeout: 30 * time.Second, ReadTimeout: 30 * time.Second}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.transport.Close()
		l.Close()
	})
	return s
}

// remoteReads is how often the broker has read its tier for consumers so far.
func (s *stock) remoteReads(t *testing.T) int {
	t.Helper()
	out := command{limit: 90 * time.Second}.run(t, s.k.path, "tool", "org.apache.kafka.tools.JmxTool", "--jmx-url", s.jmx, "--one-time", "--report-format", "properties",
		"--object-name", "kafka.server:type=BrokerTopicMetrics,name=RemoteFetchRequestsPerSec", "--attributes", "Count")
	m := regexp.MustCompile(`Count=(\d+)`).FindStringSubmatch(out)
	if m == nil {
		t.Fatalf("no count in %q", out)
	}
	n, err := strconv.Atoi(m[1])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// stockConfigs make small segments, of which only the last is local.
var stockConfigs = []string{"remote.storage.enable=true", "internal.segment.bytes=16384", "index.interval.bytes=512", "local.retention.bytes=1"}

// line is a record as a consumer sees it.
type line struct {
	partition int32
	offset    int64
	value     string
}

// drain reads a topic, from the given offsets or its start to its present end, as far as the isolation lets it. The records of a
// partition must come in order.
func (s *stock) drain(t *testing.T, topic string, opts ...kgo.Opt) []line {
	t.Helper()
	ctx := within(t)
	adm := s.admin(t)
	ends, err := adm.ListCommittedOffsets(ctx, topic)
	if err != nil || ends.Error() != nil {
		t.Fatal(err, ends.Error())
	}
	cl := s.client(t, append([]kgo.Opt{kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.KeepControlRecords(),
		kgo.FetchMaxWait(500 * time.Millisecond)}, opts...)...)
	defer cl.Close()
	at := map[int32]int64{}
	var out []line
	for {
		left := false
		ends.Each(func(o kadm.ListedOffset) { left = left || at[o.Partition] < o.Offset })
		if !left {
			break
		}
		fetches := cl.PollFetches(ctx)
		for _, e := range fetches.Errors() {
			t.Fatalf("at %v: %s-%d: %v", at, e.Topic, e.Partition, e.Err)
		}
		for _, r := range fetches.Records() {
			if r.Offset < at[r.Partition] {
				t.Fatalf("partition %d: offset %d behind %d", r.Partition, r.Offset, at[r.Partition])
			}
			at[r.Partition] = r.Offset + 1
			if end, _ := ends.Lookup(topic, r.Partition); !r.Attrs.IsControl() && r.Offset < end.Offset {
				out = append(out, line{r.Partition, r.Offset, string(r.Value)})
			}
		}
	}
	return sorted(out)
}

func sorted(lines []line) []line {
	slices.SortFunc(lines, func(a, b line) int {
		return cmp.Or(cmp.Compare(a.partition, b.partition), cmp.Compare(a.offset, b.offset))
	})
	return lines
}

func sameLines(t *testing.T, what string, got, want []line) {
	t.Helper()
	for i := range min(len(got), len(want)) {
		if got[i] != want[i] {
			t.Fatalf("%s: record %d is %+v instead of %+v", what, i, got[i], want[i])
		}
	}
	if len(got) != len(want) || len(got) == 0 {
		t.Fatalf("%s: %d records instead of %d", what, len(got), len(want))
	}
}

// direct are the options of a client whose fetches go through the transport.
func (s *stock) direct(more ...kgo.Opt) []kgo.Opt {
	return append([]kgo.Opt{kgo.Dialer(s.transport.DialContext)}, more...)
}

// transactions writes rounds of transactions of three producers, every other one aborted, some of them longer than a segment and
// lying across each other, with records of a plain producer between them and, for some segments, behind them.
func (s *stock) transactions(t *testing.T, topic string, rounds int) {
	t.Helper()
	ctx := within(t)
	raw := []kgo.Opt{kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(kgo.NoCompression())}
	plain := s.client(t, raw...)
	var producers []*kgo.Client
	for i := range 3 {
		producers = append(producers, s.client(t, append(raw, kgo.TransactionalID(fmt.Sprintf("%s-%d", topic, i)))...))
	}
	write := func(cl *kgo.Client, who string, n int) {
		for i := range n {
			r := &kgo.Record{Topic: topic, Partition: int32(i % 2), Value: fmt.Appendf(nil, "%s %d %s", who, i, strings.Repeat("x", 300))}
			if err := cl.ProduceSync(ctx, r).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
	}
	for round := range rounds {
		for i, cl := range producers {
			if err := cl.BeginTransaction(); err != nil {
				t.Fatal(err)
			}
			write(cl, fmt.Sprintf("txn %d of %d", round, i), 10)
		}
		write(plain, fmt.Sprintf("plain %d", round), 10)
		write(producers[round%3], fmt.Sprintf("more %d", round), 50*(round%3)) // more than a segment of each partition
		for i, cl := range producers {
			how := kgo.TryCommit
			if (round+i)%2 == 0 {
				how = kgo.TryAbort
			}
			if err := cl.EndTransaction(ctx, how); err != nil {
				t.Fatal(err)
			}
		}
	}
	write(plain, "at the end", 200)
}

// A stock Kafka's tier is read directly while the broker runs, with what its transactions aborted left out, after records were
// deleted, and while its retention goes on.
func TestStockKafkaTier(t *testing.T) {
	s := stockKafka(t, 1)
	s.topic(t, "t", 2, stockConfigs...)
	s.transactions(t, "t", 9)
	s.tiered(t, "t", 250)
	committed := s.drain(t, "t", s.direct(kgo.FetchIsolationLevel(kgo.ReadCommitted()))...)
	all := s.drain(t, "t", s.direct()...)
	stats := s.transport.Snapshot()
	if n := s.remoteReads(t); n != 0 {
		t.Errorf("the broker read its tier %d times for consumers that read it themselves", n)
	}
	if stats.Served < 4*stats.BrokerBytes || stats.Served == 0 {
		t.Errorf("most was not read directly: %+v", stats)
	}
	for cause, n := range stats.Fallbacks {
		if n > 0 {
			t.Errorf("%d fallbacks: %s", n, cause)
		}
	}
	sameLines(t, "read_committed", committed, s.drain(t, "t", kgo.FetchIsolationLevel(kgo.ReadCommitted())))
	sameLines(t, "read_uncommitted", all, s.drain(t, "t"))
	if len(committed) >= len(all) {
		t.Errorf("%d committed records of %d", len(committed), len(all))
	}
	if s.remoteReads(t) == 0 {
		t.Error("the count of the broker's remote reads does not tell of them")
	}

	t.Run("command line", func(t *testing.T) {
		tier := []string{"-b", s.addr, "--tier-layout", "kafka-local", "--bucket", filepath.Join(s.home, "tier"), "--key-prefix", "kafka-tiered-storage/"}
		out, errs, err := command{}.try(t, append([]string{binary, "consume", "t", "--direct", "--committed", "--until", "end", "-f", `%p %o %v\n`}, tier...)...)
		var got []line
		for _, text := range strings.Split(strings.TrimSpace(out), "\n") {
			var l line
			if _, err := fmt.Sscanf(text, "%d %d", &l.partition, &l.offset); err != nil {
				t.Fatalf("%q: %v", text, err)
			}
			l.value = strings.SplitN(text, " ", 3)[2]
			got = append(got, l)
		}
		sameLines(t, "consume", sorted(got), committed)
		if m := regexp.MustCompile(`([\d.]+) KiB read from the bucket`).FindStringSubmatch(errs); err != nil || m == nil {
			t.Errorf("consume: %v\n%s", err, errs)
		}
		if out, errs, err := (command{}).try(t, append([]string{binary, "verify", "t"}, tier...)...); err != nil || !strings.Contains(out, "are the same both ways") {
			t.Errorf("verify: %v\n%s\n%s", err, out, errs)
		}
	})

	t.Run("deleted records", func(t *testing.T) {
		var o kadm.Offsets
		o.AddOffset("t", 0, 50, -1)
		o.AddOffset("t", 1, 61, -1)
		if resp, err := s.admin(t).DeleteRecords(within(t), o); err != nil || resp.Error() != nil {
			t.Fatal(err, resp.Error())
		}
		sameLines(t, "the rest", s.drain(t, "t", s.direct(kgo.FetchIsolationLevel(kgo.ReadCommitted()))...), s.drain(t, "t", kgo.FetchIsolationLevel(kgo.ReadCommitted())))
		cl := s.client(t, s.direct(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"t": {0: kgo.NewOffset().At(10)}}), kgo.ConsumeResetOffset(kgo.NoResetOffset()))...)
		defer cl.Close()
		if errs := cl.PollFetches(within(t)).Errors(); len(errs) == 0 || !strings.Contains(errs[0].Err.Error(), "OFFSET_OUT_OF_RANGE") {
			t.Errorf("below the log's start: %v", errs)
		}
	})

	t.Run("while retention goes on", func(t *testing.T) {
		want := map[line]bool{}
		for _, l := range all {
			want[l] = true
		}
		cl := s.client(t, s.direct(kgo.ConsumeTopics("t"), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchMaxPartitionBytes(4096), kgo.FetchMaxBytes(4096))...)
		defer cl.Close()
		ctx, cancel := context.WithCancel(within(t))
		defer cancel()
		size := "60000"
		if resp, err := s.admin(t).AlterTopicConfigs(ctx, []kadm.AlterConfig{{Op: kadm.SetConfig, Name: "retention.bytes", Value: &size}}, "t"); err != nil || resp[0].Err != nil {
			t.Fatal(err, resp)
		}
		last := map[int32]int64{}
		goal := all[len(all)-1]
		for n := 0; last[goal.partition] < goal.offset; n++ {
			fetches := cl.PollRecords(ctx, 20)
			for _, e := range fetches.Errors() {
				t.Fatal(e.Err)
			}
			for _, r := range fetches.Records() {
				l := line{r.Partition, r.Offset, string(r.Value)}
				if !want[l] || r.Offset <= last[r.Partition] && last[r.Partition] > 0 {
					t.Fatalf("%+v behind %d", l, last[r.Partition])
				}
				last[r.Partition] = r.Offset
			}
			if n == 3 {
				await(t, "the broker deletes what is read next", func() bool {
					starts, err := s.admin(t).ListStartOffsets(ctx, "t")
					o, _ := starts.Lookup("t", 0)
					return err == nil && o.Offset > last[0]+100
				})
			}
		}
	})
}

// Another node leads a partition in the midst of reading it: the transport goes on with the new leader's word.
func TestStockKafkaLeaderChanges(t *testing.T) {
	s := stockKafka(t, 3)
	s.topic(t, "moved", 1, stockConfigs...)
	cl := s.client(t, kgo.ProducerBatchCompression(kgo.NoCompression()))
	ctx := within(t)
	var want []line
	write := func(n int) {
		for range n {
			r := &kgo.Record{Topic: "moved", Value: fmt.Appendf(nil, "%d %s", len(want), strings.Repeat("y", 300))}
			if err := cl.ProduceSync(ctx, r).FirstErr(); err != nil {
				t.Fatal(err)
			}
			want = append(want, line{0, r.Offset, string(r.Value)})
		}
	}
	leader := func() int32 {
		topics, err := s.admin(t).ListTopics(ctx, "moved")
		if err != nil {
			t.Fatal(err)
		}
		return topics["moved"].Partitions[0].Leader
	}
	write(200)
	s.tiered(t, "moved", 120)
	reader := s.client(t, s.direct(kgo.ConsumeTopics("moved"), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchMaxPartitionBytes(16384), kgo.FetchMaxBytes(16384))...)
	var got []line
	read := func(upTo int) {
		for len(got) < upTo {
			fetches := reader.PollRecords(ctx, upTo-len(got))
			for _, e := range fetches.Errors() {
				t.Fatal(e.Err)
			}
			for _, r := range fetches.Records() {
				got = append(got, line{r.Partition, r.Offset, string(r.Value)})
			}
		}
	}
	read(60)
	old := leader()
	command{}.run(t, s.k.path, "stop", "--dir", s.home, "--node", strconv.Itoa(int(old)))
	await(t, "another node leads", func() bool { l := leader(); return l >= 0 && l != old })
	write(200)
	s.tiered(t, "moved", 320)
	served := s.transport.Snapshot().Served
	read(len(want))
	sameLines(t, "across leaders", got, want)
	if stats := s.transport.Snapshot(); stats.Served-served < 80_000 {
		t.Errorf("too little was read directly behind the change: %+v", stats)
	}
	// A consumer that begins now reads what two leaders uploaded.
	served, sent := s.transport.Snapshot().Served, s.transport.Snapshot().BrokerBytes
	sameLines(t, "from the start", s.drain(t, "moved", s.direct()...), want)
	if stats := s.transport.Snapshot(); stats.Served-served < 4*(stats.BrokerBytes-sent) {
		t.Errorf("most was not read directly: %+v", stats)
	}
}
