package broker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/time/rate"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/testport"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

// running is a broker in this process, over a file system that fails on demand.
type running struct {
	t       *testing.T
	address string
	faults  *vfs.Faulty
	log     *lockedBuffer
	stop    func() error
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func run(t *testing.T, dir string, sets ...string) *running {
	t.Helper()
	raw := map[string]string{"listeners": "PLAINTEXT://127.0.0.1:0", "log.dir": dir, "log.initial.task.delay.ms": "0", "log.retention.check.interval.ms": "50",
		"remote.log.manager.task.interval.ms": "50", "group.initial.rebalance.delay.ms": "0", "offsets.topic.num.partitions": "2"}
	for _, s := range sets {
		k, v, _ := strings.Cut(s, "=")
		raw[k] = v
	}
	values, err := config.Broker.NewValues(raw)
	if err != nil {
		t.Fatal(err)
	}
	r := &running{t: t, faults: vfs.NewFaulty(vfs.OS{}), log: &lockedBuffer{}}
	ctx, cancel := context.WithCancel(context.Background())
	started, ended := make(chan string, 1), make(chan error, 1)
	go func() {
		ended <- Run(ctx, Options{Config: values, FS: r.faults, Logger: slog.New(slog.NewTextHandler(r.log, nil)), Started: func(a []string) { started <- a[0] }})
	}()
	select {
	case a := <-started:
		r.address = strings.TrimPrefix(a, "PLAINTEXT://")
	case err := <-ended:
		t.Fatalf("broker ended: %v\n%s", err, r.log)
	}
	r.stop = sync.OnceValue(func() error {
		cancel()
		return <-ended
	})
	t.Cleanup(func() {
		r.stop()
		if t.Failed() {
			t.Logf("log of the broker:\n%s", r.log)
		}
	})
	return r
}

func (r *running) client(opts ...kgo.Opt) *kgo.Client {
	r.t.Helper()
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(r.address), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.MetadataMinAge(10 * time.Millisecond),
		kgo.RetryBackoffFn(func(int) time.Duration { return 10 * time.Millisecond })}, opts...)...)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(cl.Close)
	return cl
}

func (r *running) topic(name string, configs ...string) {
	r.t.Helper()
	set := map[string]*string{}
	for _, c := range configs {
		k, v, _ := strings.Cut(c, "=")
		set[k] = &v
	}
	if _, err := kadm.NewClient(r.client()).CreateTopic(context.Background(), 1, 1, set, name); err != nil {
		r.t.Fatal(err)
	}
}

// once produces one record and gives up at the first error.
func (r *running) once(topic, value string) error {
	cl := r.client(kgo.RecordRetries(0), kgo.DisableIdempotentWrite(), kgo.RequiredAcks(kgo.LeaderAck()))
	defer cl.Close()
	return cl.ProduceSync(context.Background(), &kgo.Record{Topic: topic, Value: []byte(value)}).FirstErr()
}

func (r *running) values(topic string, n int) []string {
	r.t.Helper()
	cl := r.client(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().AtStart()}}))
	defer cl.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var out []string
	for len(out) < n {
		f := cl.PollFetches(ctx)
		if err := f.Err(); err != nil {
			r.t.Fatalf("after %d of %d: %v", len(out), n, err)
		}
		f.EachRecord(func(rec *kgo.Record) { out = append(out, string(rec.Value)) })
	}
	return out
}

// A partition's folder is gone, and the checkpoint still says how much of it was synced: that must not hold for what is written in its place.
func TestRecoveryPointOfALostFolder(t *testing.T) {
	dir := t.TempDir()
	r := run(t, dir)
	r.topic("t")
	for range 5 {
		if err := r.once("t", "v"); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	point := func() int64 {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(dir, log.RecoveryPointFile))
		if err != nil {
			t.Fatal(err)
		}
		points, err := log.ParseCheckpoint(b)
		if err != nil {
			t.Fatal(err)
		}
		return points[tp.Partition{Topic: "t"}]
	}
	if got := point(); got != 5 {
		t.Fatalf("recovery point %d after a clean end", got)
	}
	if err := os.RemoveAll(filepath.Join(dir, "t-0")); err != nil {
		t.Fatal(err)
	}
	again := run(t, dir)
	if err := again.once("t", "new"); err != nil {
		t.Fatal(err)
	}
	if got := point(); got != 0 {
		t.Errorf("recovery point %d of a log that is new", got)
	}
}

func TestFullDiskIsAnErrorThatGoesAway(t *testing.T) {
	r := run(t, t.TempDir())
	r.topic("t")
	if err := r.once("t", "before"); err != nil {
		t.Fatal(err)
	}
	r.faults.Inject(vfs.Fault{Op: vfs.OpWrite, Path: "t-0", Err: syscall.ENOSPC, Sticky: true})
	if err := r.once("t", "lost"); !errors.Is(err, kerr.KafkaStorageError) {
		t.Fatal(err)
	}
	if got := r.values("t", 1); got[0] != "before" {
		t.Fatal(got)
	}
	r.faults.Heal()
	if err := r.once("t", "after"); err != nil {
		t.Fatal("the fault is gone, but:", err)
	}
	if got := r.values("t", 2); got[1] != "after" {
		t.Fatal(got)
	}
}

func TestBrokenDiskTakesOnePartitionOffline(t *testing.T) {
	dir := t.TempDir()
	http_ := testport.Address(t)
	r := run(t, dir, "varve.http.listener="+http_)
	r.topic("bad")
	r.topic("good")
	for _, topic := range []string{"bad", "good"} {
		if err := r.once(topic, "before"); err != nil {
			t.Fatal(err)
		}
	}
	if code := get(t, http_, "/ready"); code != 200 {
		t.Fatal("not ready:", code)
	}
	r.faults.Inject(vfs.Fault{Op: vfs.OpWrite, Path: "bad-0", Err: syscall.EIO})
	if err := r.once("bad", "x"); !errors.Is(err, kerr.KafkaStorageError) {
		t.Fatal(err)
	}
	// The log is dead until it is opened again: nobody knows what the disk holds.
	if err := r.once("bad", "x"); err == nil {
		t.Fatal("a dead log took a record")
	}
	if err := r.once("good", "after"); err != nil {
		t.Fatal(err)
	}
	if code := get(t, http_, "/ready"); code != 503 {
		t.Fatal("ready with a partition offline:", code)
	}
	if code := get(t, http_, "/live"); code != 200 {
		t.Fatal(code)
	}
	r.stop()
	again := run(t, dir)
	if got := again.values("bad", 1); got[0] != "before" {
		t.Fatal(got)
	}
	if err := again.once("bad", "after"); err != nil {
		t.Fatal(err)
	}
}

func get(t *testing.T, address, path string) int {
	t.Helper()
	resp, err := http.Get("http://" + address + path)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	return resp.StatusCode
}

func TestFailedFsyncIsNotRetried(t *testing.T) {
	r := run(t, t.TempDir())
	r.topic("t", "flush.messages=1")
	r.faults.Inject(vfs.Fault{Op: vfs.OpSync, Path: "t-0", Err: syscall.EIO})
	if err := r.once("t", "x"); !errors.Is(err, kerr.KafkaStorageError) {
		t.Fatal(err)
	}
	if err := r.once("t", "y"); err == nil {
		t.Fatal("after a failed fsync the log took a record")
	}
}

func TestMetricsArePresentFromTheStart(t *testing.T) {
	address := testport.Address(t)
	run(t, t.TempDir(), "varve.http.listener="+address)
	resp, err := http.Get("http://" + address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var b bytes.Buffer
	b.ReadFrom(resp.Body)
	for _, name := range []string{"kafka_network_requestmetrics_requests_total{request=\"Fetch\"} 0", "kafka_server_brokertopicmetrics_remotecopyerrors_total", "kafka_server_brokertopicmetrics_remotecopylagbytes",
		"kafka_server_replicamanager_partitioncount 0", "kafka_server_socketservermetrics_connection_count", "go_goroutines"} {
		if !strings.Contains(b.String(), name) {
			t.Errorf("%s is missing", name)
		}
	}
}

func TestGroupsSurviveARestart(t *testing.T) {
	dir := t.TempDir()
	r := run(t, dir)
	r.topic("t")
	for i := 0; i < 3; i++ {
		if err := r.once("t", fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	consume := func(r *running, want ...string) {
		t.Helper()
		cl := r.client(kgo.ConsumerGroup("g"), kgo.ConsumeTopics("t"), kgo.DisableAutoCommit(), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
		defer cl.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		var got []string
		for len(got) < len(want) {
			f := cl.PollFetches(ctx)
			if err := f.Err(); err != nil {
				t.Fatal(got, err)
			}
			f.EachRecord(func(rec *kgo.Record) { got = append(got, string(rec.Value)) })
		}
		if err := cl.CommitUncommittedOffsets(ctx); err != nil {
			t.Fatal(err)
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Fatal(got, want)
		}
	}
	consume(r, "0", "1", "2")
	r.stop()
	r = run(t, dir)
	if err := r.once("t", "3"); err != nil {
		t.Fatal(err)
	}
	consume(r, "3")
}

func TestTierCannotBeTurnedOffUnderTieredTopics(t *testing.T) {
	dir := t.TempDir()
	r := run(t, dir)
	r.topic("t", "remote.storage.enable=true")
	r.stop()
	values, err := config.Broker.NewValues(map[string]string{"listeners": "PLAINTEXT://127.0.0.1:0", "log.dir": dir, "remote.log.storage.system.enable": "false"})
	if err != nil {
		t.Fatal(err)
	}
	err = Run(context.Background(), Options{Config: values, Logger: slog.New(slog.DiscardHandler)})
	if err == nil || !strings.Contains(err.Error(), "topic t is tiered") {
		t.Fatal(err)
	}
}

func TestQuotasOfTheTierChangeWhileRunning(t *testing.T) {
	parts := &tierParts{copy: rate.NewLimiter(rate.Inf, burst), fetch: rate.NewLimiter(rate.Inf, burst)}
	values, err := config.Broker.NewValues(map[string]string{"remote.log.manager.copy.max.bytes.per.second": "1000"})
	if err != nil {
		t.Fatal(err)
	}
	parts.limit(values)
	if parts.copy.Limit() != 1000 || parts.fetch.Limit() != rate.Inf {
		t.Fatal(parts.copy.Limit(), parts.fetch.Limit())
	}
}

func TestReconcile(t *testing.T) {
	topic := func(name string, id byte, replicas ...int32) *metadata.Topic {
		return &metadata.Topic{Name: name, ID: tp.UUID{id}, Partitions: []*metadata.Partition{{PartitionRecord: metadata.PartitionRecord{Topic: tp.UUID{id}, Replicas: replicas}}}}
	}
	hosted := map[tp.Partition]tp.UUID{{Topic: "old"}: {1}, {Topic: "again"}: {2}, {Topic: "moved"}: {4}}
	a := reconcile(metadata.Empty(), metadata.Delta{Removed: []*metadata.Topic{topic("old", 1, 1), topic("again", 2, 1), topic("never", 9, 1)},
		Changed: []*metadata.Topic{topic("again", 3, 1), topic("moved", 4, 2), topic("new", 5, 1), topic("elsewhere", 6, 2)}}, 1,
		func(p tp.Partition) (tp.UUID, bool) { id, ok := hosted[p]; return id, ok })
	if fmt.Sprint(a.remove) != "[old-0 again-0 moved-0]" {
		t.Error("remove", a.remove)
	}
	var follow []string
	for _, f := range a.follow {
		follow = append(follow, f.id.String())
	}
	if fmt.Sprint(follow) != "[again-0 new-0]" {
		t.Error("follow", follow)
	}
}
