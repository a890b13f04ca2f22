package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/recordbatch"
)

func (n *node) admin() *kadm.Client { return kadm.NewClient(n.client()) }

func (n *node) manual(opts ...kgo.Opt) *kgo.Client {
	return n.client(append([]kgo.Opt{kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(kgo.NoCompression())}, opts...)...)
}

// logStart and logEnd are the offsets of partition 0.
func (n *node) logStart(topic string) int64 { return n.offset(topic, n.admin().ListStartOffsets) }
func (n *node) logEnd(topic string) int64   { return n.offset(topic, n.admin().ListEndOffsets) }

func (n *node) offset(topic string, list func(context.Context, ...string) (kadm.ListedOffsets, error)) int64 {
	n.t.Helper()
	l, err := list(context.Background(), topic)
	if err == nil {
		err = l.Error()
	}
	if err != nil {
		n.t.Fatal(err)
	}
	o, _ := l.Lookup(topic, 0)
	return o.Offset
}

func (n *node) trim(topic string, at int64) {
	n.t.Helper()
	offsets := kadm.Offsets{}
	offsets.Add(kadm.Offset{Topic: topic, At: at})
	r, err := n.admin().DeleteRecords(context.Background(), offsets)
	if err == nil {
		err = r.Error()
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) alter(topic string, sets ...string) {
	n.t.Helper()
	args := []string{"topic", "alter", topic, "-b", n.address()}
	for _, s := range sets {
		args = append(args, "--set", s)
	}
	if out, code := n.varve(args...); code != 0 {
		n.t.Fatalf("alter %v: exit %d: %s", sets, code, out)
	}
}

// objects counts what the bucket in the data directory holds of a topic.
func (n *node) objects(topic string) int {
	count := 0
	filepath.WalkDir(filepath.Join(n.dir, "bucket"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && strings.Contains(path, "/"+topic+"-") {
			count++
		}
		return nil
	})
	return count
}

// TestRecreatedTopicStartsAtZero: what the checkpoints say of a deleted topic must not be taken for its successor's.
func TestRecreatedTopicStartsAtZero(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("again", 1)
	produce(t, n.manual(), "again", 0, 300)
	n.trim("again", 200)
	n.stop()
	n.start()
	if at := n.logStart("again"); at != 200 {
		t.Fatalf("starts at %d", at)
	}
	if out, code := n.varve("topic", "delete", "again", "-b", n.address()); code != 0 {
		t.Fatal(out)
	}
	n.createTopic("again", 1)
	if at := n.logStart("again"); at != 0 {
		t.Fatalf("the new topic starts at %d", at)
	}
	produce(t, n.manual(), "again", 0, 400)
	readAll(t, n, "again", 400)
	n.kill()
	n.start()
	if at := n.logStart("again"); at != 0 {
		t.Fatalf("after a kill the new topic starts at %d", at)
	}
	readAll(t, n, "again", 400)
}

// TestTopicDeletedWhileItIsUploaded: an upload that outlives its topic leaves no object behind.
func TestTopicDeletedWhileItIsUploaded(t *testing.T) {
	n := newNode(t, "remote.log.manager.copy.max.bytes.per.second=4000000")
	n.start()
	n.createTopic("gone", 1, "remote.storage.enable=true", "segment.bytes=6000000", "local.retention.bytes=1")
	cl := n.manual()
	big := make([]byte, 500_000)
	for range 40 {
		if err := cl.ProduceSync(context.Background(), &kgo.Record{Topic: "gone", Value: big}).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	written := func() int { // objects of which a part is there
		parts, err := os.ReadDir(filepath.Join(n.dir, "bucket", ".varve-tmp"))
		if err != nil {
			t.Fatal(err)
		}
		return len(parts)
	}
	n.until("the upload is under way", func() bool { return written() > 0 })
	if out, code := n.varve("topic", "delete", "gone", "-b", n.address()); code != 0 {
		t.Fatal(out)
	}
	// In this order: what was being written a moment ago is an object now.
	n.until("nothing of the topic is left", func() bool { return written() == 0 && n.objects("gone") == 0 })
}

func TestEncryptedObjects(t *testing.T) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "key.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	n := newNode(t, "rsm.config.encryption.enabled=true", "rsm.config.encryption.key.pair.id=one", "rsm.config.encryption.key.pairs=one="+file, "rsm.config.chunk.size=4096", "rsm.config.compression.enabled=true")
	n.start()
	n.createTopic("secret", 1, tieredConfig...)
	produce(t, n.manual(), "secret", 0, 3000)
	n.tiered("secret")
	readAll(t, n, "secret", 3000)
	filepath.WalkDir(filepath.Join(n.dir, "bucket"), func(path string, d fs.DirEntry, err error) error {
		if b, _ := os.ReadFile(path); err == nil && bytes.Contains(b, []byte("value 1")) {
			t.Errorf("%s holds plain text", path)
		}
		return nil
	})
	out, code := n.varve("verify", "secret", "-b", n.address(), "--bucket", filepath.Join(n.dir, "bucket"), "--key-pair", "one="+file)
	if code != 0 || !strings.Contains(out, "3000 records are the same both ways") || strings.Contains(out, "fallbacks") {
		t.Errorf("verify: exit %d: %s", code, out)
	}
	// Without the key nothing is lost: the broker reads it.
	if out, code := n.varve("verify", "secret", "-b", n.address(), "--bucket", filepath.Join(n.dir, "bucket")); code != 1 || !strings.Contains(out, "3000 records are the same") {
		t.Errorf("verify without the key: exit %d: %s", code, out)
	}
	n.kill()
	n.start()
	readAll(t, n, "secret", 3000)
	if out, code = n.varve("tier", "fsck", "-b", n.address(), "--bucket", filepath.Join(n.dir, "bucket"), "--min-age", "1ns"); code != 0 {
		t.Errorf("fsck: exit %d: %s", code, out)
	}
}

// TestFreezeLeaveAndReturn walks a topic through all transitions of KIP-950.
func TestFreezeLeaveAndReturn(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("moving", 1, "remote.storage.enable=true", "internal.segment.bytes=30000", "local.retention.ms=-2", "retention.ms=-1")
	cl := n.manual()
	produce(t, cl, "moving", 0, 2000)
	n.until("tiered", func() bool { s := n.tier("moving"); return s.LagSegments == 0 && s.Segments > 3 })
	n.alter("moving", "remote.log.copy.disable=true")
	frozen := n.tier("moving")
	produce(t, cl, "moving", 2000, 2000)
	readAll(t, n, "moving", 4000)
	n.alter("moving", "remote.log.copy.disable=false")
	n.until("copying goes on", func() bool { s := n.tier("moving"); return s.LagSegments == 0 && s.Segments > frozen.Segments+3 })
	n.alter("moving", "local.retention.bytes=1")
	s := n.tiered("moving")
	readAll(t, n, "moving", 4000)
	// Leave and come back at once, while the objects are still to be deleted.
	n.alter("moving", "remote.storage.enable=false", "remote.log.delete.on.disable=true")
	n.until("the log starts locally", func() bool { return n.tier("moving").LogStart >= s.RemoteEnd+1 })
	n.alter("moving", "remote.storage.enable=true")
	produce(t, cl, "moving", 4000, 2000)
	again := n.tiered("moving")
	if again.LogStart != s.RemoteEnd+1 {
		t.Fatalf("before %+v, after %+v", s, again)
	}
	n.until("old objects are gone", func() bool { return n.tier("moving").Deleting == 0 })
	first := int(again.LogStart)
	read := func() {
		t.Helper()
		readFrom(t, n, "moving", first, 6000)
	}
	read()
	n.kill()
	n.start()
	read()
	if at := n.logStart("moving"); at != again.LogStart {
		t.Fatalf("starts at %d", at)
	}
	// And off and on in one breath.
	n.alter("moving", "remote.storage.enable=false", "remote.log.delete.on.disable=true")
	n.alter("moving", "remote.storage.enable=true")
	produce(t, cl, "moving", 6000, 2000)
	n.tiered("moving")
	first = int(n.logStart("moving"))
	readFrom(t, n, "moving", first, 8000)
	n.stop()
	n.start()
	readFrom(t, n, "moving", first, 8000)
}

// readFrom demands records first to end-1.
func readFrom(t *testing.T, n *node, topic string, first, end int, opts ...kgo.Opt) {
	t.Helper()
	cl := n.client(append([]kgo.Opt{kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().AtStart()}})}, opts...)...)
	defer cl.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	for next := first; next < end; {
		f := cl.PollFetches(ctx)
		if err := f.Err0(); err != nil {
			t.Fatalf("at %d of %d to %d: %v", next, first, end, err)
		}
		f.EachRecord(func(r *kgo.Record) {
			if r.Offset != int64(next) || string(r.Key) != fmt.Sprint(next) {
				t.Fatalf("offset %d holds %q, want %d", r.Offset, r.Key, next)
			}
			next++
		})
	}
}

func TestTrimIntoTheTier(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("trim", 1, tieredConfig...)
	produce(t, n.manual(), "trim", 0, 3000)
	n.tiered("trim")
	n.trim("trim", 1234)
	check := func() {
		t.Helper()
		if at := n.logStart("trim"); at != 1234 {
			t.Fatalf("starts at %d", at)
		}
		readFrom(t, n, "trim", 1234, 3000)
	}
	check()
	n.stop()
	n.start()
	check()
	n.until("remote segments below are gone", func() bool { s := n.tier("trim"); return s.Deleting == 0 })
	n.kill()
	n.start()
	check()
}

// TestMaxTimestampInTheTier asks for -3 where the newest time lies in the bucket.
func TestMaxTimestampInTheTier(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("times", 1, tieredConfig...)
	cl := n.manual()
	peak := time.Now().Add(30 * time.Minute)
	for i := range 600 {
		r := &kgo.Record{Topic: "times", Key: []byte(fmt.Sprint(i)), Value: value(i), Timestamp: time.UnixMilli(1_600_000_000_000 + int64(i))}
		if i == 77 {
			r.Timestamp = peak
		}
		if err := cl.ProduceSync(context.Background(), r).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	n.tiered("times")
	for range 2 {
		l, err := n.admin().ListMaxTimestampOffsets(context.Background(), "times")
		if err != nil || l.Error() != nil {
			t.Fatal(err, l.Error())
		}
		if o, _ := l.Lookup("times", 0); o.Offset != 77 || o.Timestamp != peak.UnixMilli() {
			t.Fatalf("%+v", o)
		}
		n.kill()
		n.start()
	}
}

// TestHugeBatches moves batches of many megabytes through the tier, and reads them with small limits.
func TestHugeBatches(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("huge", 1, "remote.storage.enable=true", "segment.bytes=25000000", "local.retention.bytes=1", "max.message.bytes=20000000")
	cl := n.manual(kgo.ProducerBatchMaxBytes(20_000_000), kgo.BrokerMaxWriteBytes(64<<20))
	for i := range 8 {
		v := make([]byte, 19_000_000)
		rand.Read(v[:1000])
		copy(v, fmt.Sprint(i))
		if err := cl.ProduceSync(context.Background(), &kgo.Record{Topic: "huge", Key: []byte(fmt.Sprint(i)), Value: v}).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	n.tiered("huge")
	readFrom(t, n, "huge", 0, 8, kgo.FetchMaxBytes(1<<20), kgo.FetchMaxPartitionBytes(64<<10), kgo.BrokerMaxReadBytes(100<<20))
	out, code := n.varve("verify", "huge", "-b", n.address(), "--bucket", filepath.Join(n.dir, "bucket"))
	if code != 0 || !strings.Contains(out, "8 records are the same both ways") {
		t.Errorf("verify: exit %d: %s", code, out)
	}
}

// rawProduce appends a batch as it is, of a transactional id unless that is nil.
func rawProduce(t *testing.T, cl *kgo.Client, topic string, batch []byte, txnID *string) error {
	t.Helper()
	req := kmsg.NewPtrProduceRequest()
	req.TransactionID = txnID
	req.Acks, req.TimeoutMillis = -1, 10000
	rt := kmsg.NewProduceRequestTopic()
	rt.Topic = topic
	m, err := kadm.NewClient(cl).ListTopics(context.Background(), topic)
	if err != nil {
		t.Fatal(err)
	}
	rt.TopicID = m[topic].ID
	rp := kmsg.NewProduceRequestTopicPartition()
	rp.Records = batch
	rt.Partitions = append(rt.Partitions, rp)
	req.Topics = append(req.Topics, rt)
	resp, err := req.RequestWith(context.Background(), cl)
	if err != nil {
		t.Fatal(err)
	}
	return kerr.ErrorForCode(resp.Topics[0].Partitions[0].ErrorCode)
}

// TestOpenTransactionHoldsTheTierBack: nothing above the last stable offset is uploaded, and read_committed sees what was there before.
func TestOpenTransactionHoldsTheTierBack(t *testing.T) {
	n := newNode(t, "transaction.partition.verification.enable=false")
	n.start()
	n.createTopic("txn", 1, tieredConfig...)
	cl := n.manual()
	produce(t, cl, "txn", 0, 1000)
	n.tiered("txn")
	b := recordbatch.NewBuilder()
	b.ProducerID, b.ProducerEpoch, b.BaseSequence, b.Transactional = 4711, 0, 0, true
	b.Add(recordbatch.Record{Timestamp: time.Now().UnixMilli(), Key: []byte("1000"), Value: value(1000)})
	batch, err := b.Build()
	if err != nil {
		t.Fatal(err)
	}
	if err := rawProduce(t, cl, "txn", batch, nil); !errors.Is(err, kerr.TransactionalIDAuthorizationFailed) {
		t.Fatal("without a transactional id: ", err)
	}
	if err := rawProduce(t, n.manual(beforeV2()), "txn", batch, kmsg.StringPtr("flink")); err != nil {
		t.Fatal("open transaction: ", err)
	}
	produce(t, cl, "txn", 1001, 2000)
	readAll(t, n, "txn", 3001)
	readAll(t, n, "txn", 1000, kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	if s := n.tier("txn"); s.RemoteEnd >= 1000 || s.LocalStart > 1000 {
		t.Fatalf("%+v", s)
	}
	n.kill()
	n.start()
	readAll(t, n, "txn", 3001)
	if s := n.tier("txn"); s.RemoteEnd >= 1000 || s.LocalStart > 1000 {
		t.Fatalf("%+v", s)
	}
}

// TestGrowingTieredTopic: new partitions of a tiered topic are tiered, under load, kills and growth.
func TestGrowingTieredTopic(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("many", 3, tieredConfig...)
	if _, err := n.admin().CreatePartitions(context.Background(), 3, "many"); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	acked := map[int32]int{}
	for round := range 3 {
		cl := n.manual(kgo.RequiredAcks(kgo.AllISRAcks()), kgo.RecordDeliveryTimeout(20*time.Second), kgo.RetryTimeout(20*time.Second))
		var wg sync.WaitGroup
		for p := range int32(6) {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for i := range 150 {
					r := &kgo.Record{Topic: "many", Partition: p, Key: []byte(fmt.Sprint(round*150 + i)), Value: bytes.Repeat([]byte{byte(i)}, 1000)}
					if err := cl.ProduceSync(context.Background(), r).FirstErr(); err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					acked[p]++
					mu.Unlock()
				}
			}()
		}
		n.until("half is written", func() bool { mu.Lock(); defer mu.Unlock(); return acked[0] > round*150+60 })
		n.kill()
		n.start()
		wg.Wait()
	}
	cl := n.client(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"many": {0: kgo.NewOffset().AtStart(), 1: kgo.NewOffset().AtStart(), 2: kgo.NewOffset().AtStart(), 3: kgo.NewOffset().AtStart(), 4: kgo.NewOffset().AtStart(), 5: kgo.NewOffset().AtStart()}}))
	next := map[int32]int{}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for done := 0; done < 6*450; {
		f := cl.PollFetches(ctx)
		if err := f.Err0(); err != nil {
			t.Fatal(err, next)
		}
		f.EachRecord(func(r *kgo.Record) {
			if string(r.Key) != fmt.Sprint(next[r.Partition]) {
				t.Fatalf("%d: offset %d holds %s, want %d", r.Partition, r.Offset, r.Key, next[r.Partition])
			}
			next[r.Partition]++
			done++
		})
	}
	n.until("no orphan is left", func() bool {
		_, code := n.varve("tier", "fsck", "-b", n.address(), "--bucket", filepath.Join(n.dir, "bucket"), "--min-age", "1ns")
		return code == 0
	})
}

// TestStopUnderLoad ends a busy server with SIGTERM: soon, cleanly, without a word at error level.
func TestStopUnderLoad(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("busy", 4, tieredConfig...)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	cl := n.client(kgo.RecordDeliveryTimeout(5*time.Second), kgo.RetryTimeout(2*time.Second))
	wg.Add(1)
	count := 0
	var mu sync.Mutex
	go func() {
		defer wg.Done()
		for ctx.Err() == nil {
			cl.Produce(ctx, &kgo.Record{Topic: "busy", Value: make([]byte, 1000)}, func(*kgo.Record, error) { mu.Lock(); count++; mu.Unlock() })
		}
	}()
	for i := range 20 {
		c := n.client(kgo.ConsumerGroup(fmt.Sprint("g", i%4)), kgo.ConsumeTopics("busy"), kgo.FetchMaxWait(5*time.Second), kgo.FetchMinBytes(50<<20))
		wg.Add(1)
		go func() {
			defer wg.Done()
			for ctx.Err() == nil {
				c.PollFetches(ctx)
			}
		}()
	}
	n.until("there is load", func() bool { mu.Lock(); defer mu.Unlock(); return count > 20000 })
	n.stop()
	cancel()
	wg.Wait()
	if strings.Contains(n.log(), "level=ERROR") || strings.Contains(n.log(), "level=WARN") || strings.Contains(n.log(), "goroutine ") || !strings.Contains(n.log(), "stopped cleanly") {
		t.Error(n.log())
	}
	n.start()
	if strings.Contains(n.log(), "log was recovered") {
		t.Error(n.log())
	}
}
