package direct_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
	"github.com/varve-io/varve/internal/broker"
	"github.com/varve-io/varve/internal/bucket"
	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/s3test"
	"github.com/varve-io/varve/internal/tierinfo"
)

// startBroker runs a real broker in this process until the test ends and returns its address.
func startBroker(t *testing.T, settings map[string]string) string {
	t.Helper()
	raw := map[string]string{"listeners": "PLAINTEXT://127.0.0.1:0", "log.dir": t.TempDir(), "remote.log.manager.task.interval.ms": "50",
		"log.retention.check.interval.ms": "50", "log.initial.task.delay.ms": "0", "group.initial.rebalance.delay.ms": "0", "offsets.topic.num.partitions": "1"}
	maps.Copy(raw, settings)
	values, err := config.Broker.NewValues(raw)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	started, ended := make(chan []string, 1), make(chan error, 1)
	go func() {
		ended <- broker.Run(ctx, broker.Options{Config: values, Logger: slog.New(slog.DiscardHandler), Started: func(a []string) { started <- a }})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("broker: %v", err)
		}
	})
	select {
	case a := <-started:
		return strings.TrimPrefix(a[0], "PLAINTEXT://")
	case err := <-ended:
		ended <- err
		t.Fatal(err)
		return ""
	}
}

// load creates a topic, fills it, and waits until nearly all of it is in the tier only. It returns the values of each
// partition in order.
func load(t *testing.T, addr, topic string, partitions int32, perPartition int) [][]string {
	t.Helper()
	ctx := t.Context()
	cl, err := kgo.NewClient(kgo.SeedBrokers(addr), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(kgo.NoCompression()))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	adm := kadm.NewClient(cl)
	s := func(v string) *string { return &v }
	if _, err := adm.CreateTopic(ctx, partitions, 1, map[string]*string{"remote.storage.enable": s("true"), "internal.segment.bytes": s("60000"),
		"local.retention.bytes": s("1"), "remote.copy.lag.bytes": s("0"), "index.interval.bytes": s("2000")}, topic); err != nil {
		t.Fatal(err)
	}
	out := make([][]string, partitions)
	for i := range perPartition {
		var batch []*kgo.Record
		for p := range partitions {
			v := fmt.Sprintf("%s-%d-%d-%s", topic, p, i, strings.Repeat("v", i%700))
			out[p] = append(out[p], v)
			batch = append(batch, &kgo.Record{Topic: topic, Partition: p, Value: []byte(v)})
		}
		if i%7 == 6 || i == perPartition-1 {
			if err := cl.ProduceSync(ctx, batch...).FirstErr(); err != nil {
				t.Fatal(err)
			}
			continue
		}
		for _, r := range batch {
			cl.Produce(ctx, r, nil)
		}
	}
	if err := cl.Flush(ctx); err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for range tick.C {
		local, err := adm.ListStartOffsets(ctx, topic) // the earliest of all: it must not move
		if err != nil {
			t.Fatal(err)
		}
		tiered := 0
		local.Each(func(o kadm.ListedOffset) {
			if o.Offset != 0 {
				t.Fatalf("log start moved to %d", o.Offset)
			}
		})
		for p := range partitions {
			// What is in the tier has left the broker, too: how much that serves does not hang on when retention came by.
			if at := localStart(t, cl, topic, p); at > int64(perPartition)-200 && at == offsetAt(t, cl, topic, p, earliestPendingUpload) {
				tiered++
			}
		}
		if tiered == int(partitions) {
			return out
		}
	}
	return nil
}

// consume reads a topic with a group, commits, and stops in the middle and begins again once.
func consume(t *testing.T, addr, topic, group string, transport *direct.Transport, want [][]string, opts ...kgo.Opt) {
	t.Helper()
	total := 0
	for _, w := range want {
		total += len(w)
	}
	got := make([][]string, len(want))
	n := 0
	for _, stop := range []int{total / 2, total} {
		cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(addr), kgo.Dialer(transport.DialContext), kgo.ConsumerGroup(group), kgo.ConsumeTopics(topic),
			kgo.DisableAutoCommit(), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchMaxPartitionBytes(100_000), kgo.FetchMaxWait(500 * time.Millisecond)}, opts...)...)
		if err != nil {
			t.Fatal(err)
		}
		for n < stop {
			fetches := cl.PollRecords(t.Context(), 500)
			if err := fetches.Err0(); err != nil {
				t.Fatal(err)
			}
			fetches.EachError(func(topic string, p int32, err error) { t.Fatalf("%s-%d: %v", topic, p, err) })
			fetches.EachRecord(func(r *kgo.Record) {
				if r.Offset != int64(len(got[r.Partition])) {
					t.Fatalf("partition %d: offset %d where %d is due", r.Partition, r.Offset, len(got[r.Partition]))
				}
				got[r.Partition] = append(got[r.Partition], string(r.Value))
				n++
			})
			if err := cl.CommitUncommittedOffsets(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		cl.Close()
	}
	for p := range want {
		if !slices.Equal(got[p], want[p]) {
			t.Errorf("partition %d: %d records, not those of %d", p, len(got[p]), len(want[p]))
		}
	}
}

func newTransport(t *testing.T, cfg direct.Config) *direct.Transport {
	t.Helper()
	cfg.Enabled = true
	transport, err := direct.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(transport.Close)
	return transport
}

// counted counts the bytes that come from brokers.
func counted(n *atomic.Int64) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return countedConn{c, n}, nil
	}
}

type countedConn struct {
	net.Conn
	n *atomic.Int64
}

func (c countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.n.Add(int64(n))
	return n, err
}

func TestKgoGroupOverDirectory(t *testing.T) {
	dir := t.TempDir()
	for _, format := range []string{"plain", "compressed"} {
		t.Run(format, func(t *testing.T) {
			addr := startBroker(t, map[string]string{"varve.bucket": dir + "/" + format, "rsm.config.compression.enabled": fmt.Sprint(format == "compressed"), "rsm.config.chunk.size": "20000"})
			want := load(t, addr, "t", 3, 1500)
			f, err := objectstore.Open(dir+"/"+format, objectstore.Options{})
			if err != nil {
				t.Fatal(err)
			}
			var wire atomic.Int64
			transport := newTransport(t, direct.Config{Fetcher: f, Dial: counted(&wire)})
			consume(t, addr, "t", "g", transport, want, kgo.FetchIsolationLevel(kgo.ReadCommitted()))
			s := transport.Snapshot()
			if s.Served < 4*s.BrokerBytes || s.Locations == 0 || wire.Load() > s.BrokerBytes+300_000 {
				t.Errorf("the broker sent %d bytes: %+v", wire.Load(), s)
			}
			for c, n := range s.Fallbacks {
				if n > 0 {
					t.Errorf("%d fallbacks for %s", n, c)
				}
			}
		})
	}
}

func TestKgoAndSaramaOverS3(t *testing.T) {
	server := s3test.Start(t)
	addr := startBroker(t, map[string]string{"varve.bucket": server.URL(), "varve.bucket.access.key": server.AccessKey, "varve.bucket.secret.key": server.SecretKey, "rsm.config.key.prefix": "tiered/"})
	want := load(t, addr, "t", 2, 1200)
	f, err := objectstore.Open(server.URL(), objectstore.Options{AccessKey: server.AccessKey, SecretKey: server.SecretKey})
	if err != nil {
		t.Fatal(err)
	}
	transport := newTransport(t, direct.Config{Fetcher: f, ConnectTimeout: 10 * time.Second})
	consume(t, addr, "t", "g", transport, want)
	if s := transport.Snapshot(); s.Served < 2*s.BrokerBytes {
		t.Errorf("%+v", s)
	}
	second := newTransport(t, direct.Config{Fetcher: f, ConnectTimeout: 10 * time.Second})
	consumeSarama(t, addr, "t", second, want)
	if s := second.Snapshot(); s.Served < 2*s.BrokerBytes {
		t.Errorf("sarama: %+v", s)
	}
	// A store that refuses: all of it comes from the broker.
	f, err = objectstore.Open(server.URL(), objectstore.Options{AccessKey: server.AccessKey, SecretKey: "wrong"})
	if err != nil {
		t.Fatal(err)
	}
	refused := newTransport(t, direct.Config{Fetcher: f, ConnectTimeout: 10 * time.Second})
	consume(t, addr, "t", "other", refused, want)
	if s := refused.Snapshot(); s.Served != 0 || s.Fallbacks["auth"] == 0 || s.Rests == 0 {
		t.Errorf("refused: %+v", s)
	}
}

// readersOf asks a broker who reads from the bucket.
func readersOf(t *testing.T, addr string) []tierinfo.Reader {
	t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(addr))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	req := kmsg.NewPtrDescribeLogDirsRequest()
	req.Topics = []kmsg.DescribeLogDirsRequestTopic{}
	tierinfo.Request(req, tierinfo.Readers)
	resp, err := cl.Broker(1).Request(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	list, ok, err := tierinfo.GetReaders(resp.(*kmsg.DescribeLogDirsResponse))
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	return list
}

// TestGrants reads by URLs that the broker signs, with no credentials at all.
func TestGrants(t *testing.T) {
	server := s3test.Start(t)
	for _, stored := range []map[string]string{
		{},
		{"rsm.config.compression.enabled": "true", "rsm.config.chunk.size": "10000"},
	} {
		t.Run(fmt.Sprint("compressed ", len(stored) > 0), func(t *testing.T) {
			settings := map[string]string{"varve.bucket": server.URL(), "varve.bucket.access.key": server.AccessKey, "varve.bucket.secret.key": server.SecretKey,
				"remote.fetch.grants": "presigned"}
			maps.Copy(settings, stored)
			addr := startBroker(t, settings)
			want := load(t, addr, "t", 2, 1200)
			f, err := objectstore.Open(server.URL(), objectstore.Options{Grants: true})
			if err != nil {
				t.Fatal(err)
			}
			var said bytes.Buffer
			log := slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelDebug}))
			transport := newTransport(t, direct.Config{Fetcher: f, ConnectTimeout: 10 * time.Second, Logger: log})
			consume(t, addr, "t", "g", transport, want, kgo.ClientID("reader"))
			s := transport.Snapshot()
			if s.Served < 2*s.BrokerBytes {
				t.Errorf("%+v", s)
			}
			list := readersOf(t, addr)
			i := slices.IndexFunc(list, func(r tierinfo.Reader) bool { return r.Client == "reader" })
			if i < 0 || list[i].Locations < s.Locations || list[i].Used == 0 || list[i].Used > s.Bytes || list[i].Requests == 0 || list[i].Granted < list[i].Used || list[i].Host != "/127.0.0.1" {
				t.Errorf("account of %+v: %+v", s, list)
			}
			// The same bucket at another address is not what the URLs are for.
			other, err := objectstore.Open(strings.Replace(server.URL(), "127.0.0.1", "localhost", 1), objectstore.Options{Grants: true})
			if err != nil {
				t.Fatal(err)
			}
			lost := newTransport(t, direct.Config{Fetcher: other, Logger: log})
			consume(t, addr, "t", "h", lost, want)
			if s := lost.Snapshot(); s.Bytes != 0 || s.Fallbacks["auth"] == 0 {
				t.Errorf("%+v", s)
			}
			lost.Close()
			transport.Close()
			if text := said.String(); !strings.Contains(text, "points to") || strings.Contains(text, "X-Amz") {
				t.Errorf("log: %s", text)
			}
		})
	}
}

// A sequential reader takes few, large ranges, and leaves the bucket once, where the tier ends.
func TestFewRequestsAndOneReturn(t *testing.T) {
	dir := t.TempDir()
	addr := startBroker(t, map[string]string{"varve.bucket": dir})
	cl, err := kgo.NewClient(kgo.SeedBrokers(addr), kgo.ProducerBatchCompression(kgo.NoCompression()), kgo.DefaultProduceTopic("t"))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	s := func(v string) *string { return &v }
	if _, err := kadm.NewClient(cl).CreateTopic(t.Context(), 1, 1, map[string]*string{"remote.storage.enable": s("true"), "internal.segment.bytes": s("2000000"),
		"local.retention.bytes": s("1"), "index.interval.bytes": s("2000")}, "t"); err != nil {
		t.Fatal(err)
	}
	const count = 2000
	for i := range count {
		if err := cl.ProduceSync(t.Context(), kgo.SliceRecord(bytes.Repeat([]byte{byte(i)}, 10_000))).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for localStart(t, cl, "t", 0) < count-200 {
		<-tick.C
	}
	local := localStart(t, cl, "t", 0)
	f, err := objectstore.Open(dir, objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	const ranges = 250_000
	transport := newTransport(t, direct.Config{Fetcher: f, ConnectTimeout: 10 * time.Second, RangeBytes: ranges})
	reader, err := kgo.NewClient(kgo.SeedBrokers(addr), kgo.Dialer(transport.DialContext), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"t": {0: kgo.NewOffset().AtStart()}}),
		kgo.FetchMaxPartitionBytes(100_000), kgo.MaxConcurrentFetches(1))
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	for n := 0; n < count; {
		reader.PollFetches(t.Context()).EachRecord(func(*kgo.Record) { n++ })
	}
	got := transport.Snapshot()
	const batch = 10_000 + 100
	if want := int64(float64(got.Bytes) / ranges * 1.2); got.Requests > want {
		t.Errorf("%d requests for %d bytes, at most %d are due", got.Requests, got.Bytes, want)
	}
	// Batches more: the one that was sent when the place behind the last segment was asked for. Each turn back would bring others.
	if most := (count-local)*batch + 2*batch; got.BrokerBytes > most || got.Served < local*10_000 {
		t.Errorf("%d records are local, and the broker sent %d bytes, not at most %d: %+v", count-local, got.BrokerBytes, most, got)
	}
}

// confused is a store that answers with other objects of the same partition.
type confused struct {
	objectstore.Store
	keys []string // of log objects
}

func (c *confused) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	for i, k := range c.keys {
		if k == key {
			key = c.keys[(i+1)%len(c.keys)]
			break
		}
	}
	return c.Store.Get(ctx, key, off, n)
}

func TestStoreThatConfusesObjects(t *testing.T) {
	dir := t.TempDir()
	addr := startBroker(t, map[string]string{"varve.bucket": dir})
	want := load(t, addr, "t", 1, 1000)
	b, err := bucket.Open(dir, bucket.Options{})
	if err != nil {
		t.Fatal(err)
	}
	c := &confused{Store: b}
	if err := b.List(t.Context(), "", "", func(i objstore.Info) error {
		if strings.HasSuffix(i.Key, ".log") {
			c.keys = append(c.keys, i.Key)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	f, err := objectstore.New(c, objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	transport := newTransport(t, direct.Config{Fetcher: f, ConnectTimeout: 10 * time.Second})
	consume(t, addr, "t", "g", transport, want)
	if s := transport.Snapshot(); s.Served != 0 || s.Fallbacks["damaged"]+s.Fallbacks["short"] == 0 {
		t.Errorf("%+v", s)
	}
}

// The bucket is emptied under a reader, for the broker too. When the objects are back, reading goes on where it was.
func TestBucketThatIsEmptied(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "bucket")
	addr := startBroker(t, map[string]string{"varve.bucket": dir, "varve.remote.chunk.cache.bytes": "1048576"})
	want := load(t, addr, "t", 1, 1400)
	f, err := objectstore.Open(dir, objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	transport := newTransport(t, direct.Config{Fetcher: f, ConnectTimeout: 10 * time.Second, RangeBytes: 64 << 10, RangesPerPartition: 1})
	cl, err := kgo.NewClient(kgo.SeedBrokers(addr), kgo.Dialer(transport.DialContext), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"t": {0: kgo.NewOffset().AtStart()}}),
		kgo.FetchMaxPartitionBytes(20_000), kgo.FetchMaxWait(100*time.Millisecond), kgo.KeepRetryableFetchErrors())
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	away := dir + "-away"
	n, hidden := 0, false
	for n < len(want[0]) {
		if n > 100 && !hidden {
			hidden = true
			if err := os.Rename(dir, away); err != nil {
				t.Fatal(err)
			}
		}
		before := n
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		cl.PollRecords(ctx, 50).EachRecord(func(r *kgo.Record) {
			if r.Offset != int64(n) || string(r.Value) != want[0][n] {
				t.Fatalf("offset %d where %d is due", r.Offset, n)
			}
			n++
		})
		cancel()
		if _, err := os.Stat(away); err == nil && n == before { // nobody can say more
			if err := errors.Join(os.RemoveAll(dir), os.Rename(away, dir)); err != nil { // the broker may have made the folder
				t.Fatal(err)
			}
		}
	}
	if _, err := os.Stat(away); err == nil {
		t.Error("nobody missed the bucket")
	}
}

// consumeSarama reads with sarama's consumer, all partitions at once.
func consumeSarama(t *testing.T, addr, topic string, transport *direct.Transport, want [][]string) {
	t.Helper()
	cfg := sarama.NewConfig()
	cfg.Net.Proxy.Enable, cfg.Net.Proxy.Dialer = true, transport
	cfg.Consumer.Fetch.Default = 100_000
	consumer, err := sarama.NewConsumer([]string{addr}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer consumer.Close()
	var wg sync.WaitGroup
	for p := range want {
		pc, err := consumer.ConsumePartition(topic, int32(p), 0)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			defer pc.Close()
			for i, w := range want[p] {
				m := <-pc.Messages()
				if m == nil || m.Offset != int64(i) || string(m.Value) != w {
					t.Errorf("partition %d: %v where offset %d is due", p, m, i)
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestDeadStore(t *testing.T) {
	dir := t.TempDir()
	addr := startBroker(t, map[string]string{"varve.bucket": dir})
	want := load(t, addr, "t", 1, 800)
	transport := newTransport(t, direct.Config{Fetcher: deadFetcher{}, ConnectTimeout: 5 * time.Millisecond})
	consume(t, addr, "t", "g", transport, want)
	if s := transport.Snapshot(); s.Served != 0 || s.Fallbacks["connect_timeout"] == 0 || s.Rests == 0 {
		t.Errorf("%+v", s)
	}
}

// deadFetcher never answers.
type deadFetcher struct{}

func (deadFetcher) FetchLogSegment(ctx context.Context, _ direct.Segment, _, _ int64) (io.ReadCloser, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}
func (deadFetcher) Formats() []string { return []string{"ApacheKafkaV1"} }

// localStart asks for the first offset that the broker has itself (KIP-405, ListOffsets -4).
func localStart(t *testing.T, cl *kgo.Client, topic string, partition int32) int64 {
	t.Helper()
	return offsetAt(t, cl, topic, partition, earliestLocal)
}

// Timestamps that stand for offsets (KIP-405, KIP-1023).
const (
	earliestLocal         = -4
	earliestPendingUpload = -6
)

func offsetAt(t *testing.T, cl *kgo.Client, topic string, partition int32, timestamp int64) int64 {
	t.Helper()
	req := kmsg.NewPtrListOffsetsRequest()
	rt := kmsg.NewListOffsetsRequestTopic()
	rt.Topic = topic
	rp := kmsg.NewListOffsetsRequestTopicPartition()
	rp.Partition, rp.Timestamp = partition, timestamp
	rt.Partitions = append(rt.Partitions, rp)
	req.Topics = append(req.Topics, rt)
	resp, err := req.RequestWith(t.Context(), cl)
	if err != nil {
		t.Fatal(err)
	}
	if code := resp.Topics[0].Partitions[0].ErrorCode; code != 0 {
		t.Fatalf("ListOffsets: error %d", code)
	}
	return resp.Topics[0].Partitions[0].Offset
}

// TestEveryVersionOfARealBroker: a bare client of any Fetch version, with and without topic ids, reads what was produced,
// and the broker sends next to none of it.
func TestEveryVersionOfARealBroker(t *testing.T) {
	dir := t.TempDir()
	addr := startBroker(t, map[string]string{"varve.bucket": dir})
	want := load(t, addr, fakeTopic, 2, 900)
	cl, err := kgo.NewClient(kgo.SeedBrokers(addr))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	topics, err := kadm.NewClient(cl).ListTopics(t.Context(), fakeTopic)
	if err != nil {
		t.Fatal(err)
	}
	f, err := objectstore.Open(dir, objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for version := int16(4); version <= 18; version++ {
		transport := newTransport(t, direct.Config{Fetcher: f, RangeBytes: 64 << 10})
		conn, err := transport.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		c := newClient(t, conn)
		o := fetchOptions{version: version, committed: version%2 == 0, maxBytes: 60_000, partMax: 20_000, minimum: 1, waitMs: 30_000, epoch: 0, topicID: topics[fakeTopic].ID}
		at := []int64{0, 0}
		for at[0]+at[1] < 1800 {
			var ask []position
			for p := range at {
				if at[p] < 900 {
					ask = append(ask, position{int32(p), at[p]})
				}
			}
			resp := c.fetch(o, ask)
			for i := range resp.Topics[0].Partitions {
				p := &resp.Topics[0].Partitions[i]
				if p.ErrorCode != 0 || p.HighWatermark != 900 {
					t.Fatalf("v%d: error %d, high watermark %d", version, p.ErrorCode, p.HighWatermark)
				}
				got, next := records(t, p, at[p.Partition], o.committed)
				for k, r := range got {
					if r.offset != at[p.Partition]+int64(k) || r.value != want[p.Partition][r.offset] {
						t.Fatalf("v%d: offset %d where %d is due", version, r.offset, at[p.Partition]+int64(k))
					}
				}
				at[p.Partition] = next
			}
		}
		conn.Close()
		if s := transport.Snapshot(); s.Served < 2*s.BrokerBytes || s.Locations < 4 {
			t.Errorf("v%d: %+v", version, s)
		}
	}
}

// gated holds reads of objects whose key contains part until the gate opens.
type gated struct {
	direct.Fetcher
	part string
	gate chan struct{}
}

func (g gated) FetchLogSegment(ctx context.Context, s direct.Segment, start, end int64) (io.ReadCloser, error) {
	if strings.Contains(s.ObjectKey, g.part) {
		select {
		case <-g.gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return g.Fetcher.FetchLogSegment(ctx, s, start, end)
}

// TestSlowTopicBesideAnother: one kgo consumer gets all of a topic while the objects of another do not answer at all.
func TestSlowTopicBesideAnother(t *testing.T) {
	dir := t.TempDir()
	addr := startBroker(t, map[string]string{"varve.bucket": dir})
	load(t, addr, "slow", 1, 600)
	load(t, addr, "quick", 2, 600)
	f, err := objectstore.Open(dir, objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	g := gated{f, "slow-", make(chan struct{})}
	transport := newTransport(t, direct.Config{Fetcher: g, ConnectTimeout: time.Hour})
	cl, err := kgo.NewClient(kgo.SeedBrokers(addr), kgo.Dialer(transport.DialContext), kgo.ConsumeTopics("slow", "quick"),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchMaxPartitionBytes(20_000), kgo.FetchMaxWait(200*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	got := map[string]int{}
	poll := func() {
		fetches := cl.PollFetches(t.Context())
		fetches.EachError(func(topic string, p int32, err error) { t.Fatalf("%s-%d: %v", topic, p, err) })
		fetches.EachRecord(func(r *kgo.Record) { got[r.Topic]++ })
	}
	for got["quick"] < 1200 {
		poll()
	}
	if got["slow"] > 0 {
		t.Errorf("%d records through a closed gate", got["slow"])
	}
	close(g.gate)
	for got["slow"] < 600 {
		poll()
	}
	if s := transport.Snapshot(); s.Served < 2*s.BrokerBytes || got["slow"] != 600 || got["quick"] != 1200 {
		t.Errorf("%v %+v", got, s)
	}
}
