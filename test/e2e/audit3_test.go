package e2e

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/testport"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

// transactions writes batches of several transactional producers and of plain ones into the stopped node's log, as a broker
// with a transaction coordinator would, and returns the keys of committed records in order. Transactions overlap and
// span segments.
func (n *node) transactions(topic string, count int) (committed []string) {
	n.t.Helper()
	c := log.DefaultConfig()
	c.SegmentBytes, c.RetentionMs, c.Tiered = 30000, -1, true
	l, err := log.Open(log.Options{FS: vfs.OS{}, Dir: filepath.Join(n.dir, topic+"-0"), Partition: tp.Partition{Topic: topic}, Config: c, Clean: true, Now: time.Now()})
	if err != nil {
		n.t.Fatal(err)
	}
	write := func(b []byte) {
		if _, err := l.AppendAsLeader(log.AppendRequest{Records: b, LeaderEpoch: 0, Now: time.Now(), Internal: true}); err != nil {
			n.t.Fatal(err)
		}
		l.SetHighWatermark(l.Offsets().End)
	}
	type record struct {
		key      string
		producer int64
		run      int
	}
	var all []record
	outcome := map[[2]int64]bool{} // producer and run, committed
	r := mathrand.New(mathrand.NewPCG(1, 2))
	sequence, run, open := map[int64]int32{}, map[int64]int{}, map[int64]bool{}
	end := func(p int64) {
		commit := r.IntN(2) == 0
		outcome[[2]int64{p, int64(run[p])}] = commit
		write(recordbatch.EndTxnMarker(recordbatch.Marker{ProducerID: p, Commit: commit, Timestamp: time.Now().UnixMilli()}))
		run[p]++
		open[p] = false
	}
	for i := range count {
		p := int64(r.IntN(6)) // 0 writes outside of transactions
		if open[p] && r.IntN(12) == 0 {
			end(p)
		}
		b := recordbatch.NewBuilder()
		b.Codec = recordbatch.Codec(r.IntN(5))
		if p > 0 {
			b.ProducerID, b.ProducerEpoch, b.BaseSequence, b.Transactional = p, 0, sequence[p], true
			open[p] = true
		}
		for j := range 1 + r.IntN(4) {
			key := fmt.Sprint(i, ".", j)
			v := make([]byte, r.IntN(900))
			rand.Read(v)
			b.Add(recordbatch.Record{Timestamp: time.Now().UnixMilli(), Key: []byte(key), Value: v})
			all = append(all, record{key, p, run[p]})
			sequence[p]++
		}
		raw, err := b.Build()
		if err != nil {
			n.t.Fatal(err)
		}
		write(raw)
	}
	for p := range int64(6) {
		if open[p] {
			end(p)
		}
	}
	if err := l.Close(); err != nil {
		n.t.Fatal(err)
	}
	for _, r := range all {
		if r.producer == 0 || outcome[[2]int64{r.producer, int64(r.run)}] {
			committed = append(committed, r.key)
		}
	}
	return committed
}

// TestTransactionsThroughTheTier: read_committed sees the committed records and no other, from the log, from the tier, at the
// seam, and straight from the bucket, with large and with small fetches.
func TestTransactionsThroughTheTier(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("tx", 1, "remote.storage.enable=true", "internal.segment.bytes=30000", "retention.ms=-1", "remote.copy.lag.ms=-1")
	n.stop()
	want := n.transactions("tx", 1500)
	n.start()
	check := func(what string, opts ...kgo.Opt) {
		t.Helper()
		cl := n.client(append(opts, kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"tx": {0: kgo.NewOffset().AtStart()}}))...)
		defer cl.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		for i := 0; i < len(want); {
			f := cl.PollFetches(ctx)
			if err := f.Err0(); err != nil {
				t.Fatalf("%s: at %d of %d: %v", what, i, len(want), err)
			}
			f.EachRecord(func(r *kgo.Record) {
				if i >= len(want) || string(r.Key) != want[i] {
					t.Fatalf("%s: offset %d holds %s, want %s", what, r.Offset, r.Key, want[min(i, len(want)-1)])
				}
				i++
			})
		}
	}
	small := []kgo.Opt{kgo.FetchMaxPartitionBytes(3000)}
	all := func(what string) {
		t.Helper()
		check(what)
		check(what+", small", small...)
		f, err := objectstore.Open(filepath.Join(n.dir, "bucket"), objectstore.Options{})
		if err != nil {
			t.Fatal(err)
		}
		tr, err := direct.New(direct.Config{Enabled: true, Fetcher: f})
		if err != nil {
			t.Fatal(err)
		}
		defer tr.Close()
		check(what+", direct", kgo.Dialer(tr.DialContext))
		check(what+", direct, small", append(small, kgo.Dialer(tr.DialContext))...)
	}
	all("local")
	n.alter("tx", "remote.copy.lag.ms=0")
	n.until("tiered", func() bool { return n.tier("tx").LagSegments == 0 })
	n.alter("tx", "local.retention.bytes=60000")
	n.until("half is gone", func() bool { s := n.tier("tx"); return s.LocalStart > 0 })
	all("both tiers")
	n.alter("tx", "local.retention.bytes=1")
	n.tiered("tx")
	all("tier")
	n.trim("tx", n.tier("tx").End/3)
	n.kill()
	n.start()
	// Below the log start are records that nobody gets: find where the rest begins.
	cl := n.client(kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"tx": {0: kgo.NewOffset().AtStart()}}))
	first := string(cl.PollRecords(context.Background(), 1).Records()[0].Key)
	for len(want) > 0 && want[0] != first {
		want = want[1:]
	}
	if len(want) == 0 {
		t.Fatalf("%s is not committed", first)
	}
	all("trimmed")
}

func (n *node) http(port int, path string) string {
	r, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d%s", port, path))
	if err != nil {
		return err.Error()
	}
	defer r.Body.Close()
	b, _ := io.ReadAll(r.Body)
	return string(b)
}

// TestDirectReaderOutlivesChanges: restart, retention and deletion under a consumer that reads from the bucket.
func TestDirectReaderOutlivesChanges(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("d", 1, tieredConfig...)
	produce(t, n.manual(), "d", 0, 6000)
	n.tiered("d")
	f, err := objectstore.Open(filepath.Join(n.dir, "bucket"), objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	tr, err := direct.New(direct.Config{Enabled: true, Fetcher: f})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	cl := n.client(kgo.Dialer(tr.DialContext), kgo.FetchMaxPartitionBytes(20000), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"d": {0: kgo.NewOffset().AtStart()}}))
	next := int64(0)
	read := func(until int64) {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		for next < until {
			fs := cl.PollRecords(ctx, 100)
			if ctx.Err() != nil {
				t.Fatalf("at %d of %d", next, until)
			}
			fs.EachRecord(func(r *kgo.Record) {
				if r.Offset != next {
					t.Fatalf("got %d, want %d", r.Offset, next)
				}
				next++
			})
		}
	}
	read(1000)
	n.stop()
	n.start()
	read(2500)
	n.kill()
	n.start()
	read(4000)
	produce(t, n.manual(), "d", 6000, 1000)
	read(7000)
	if s := tr.Snapshot(); s.Served == 0 {
		t.Errorf("nothing came straight from the bucket: %+v", s)
	}
	// 200,000 bytes are some 1,600 records: what retention takes, the reader is always past.
	n.alter("d", "retention.bytes=200000")
	n.until("retention", func() bool { return n.tier("d").Deleting == 0 && n.tier("d").LogStart > 5000 })
	produce(t, n.manual(), "d", 7000, 1000)
	read(8000)
	if out, code := n.varve("topic", "delete", "d", "-b", n.address()); code != 0 {
		t.Fatal(out)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	cl.PollRecords(ctx, 1)
}

var goroutines = regexp.MustCompile(`(?m)^go_goroutines (\d+)`)

// TestThousandConnectionsAndTopics leave no goroutine and no descriptor.
func TestThousandConnectionsAndTopics(t *testing.T) {
	port := testport.Free(t)
	n := newNode(t, "log.segment.delete.delay.ms=0", fmt.Sprintf("varve.http.listener=127.0.0.1:%d", port))
	n.start()
	state := func() (descriptors, routines int) {
		e, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", n.cmd.Process.Pid))
		if g := goroutines.FindStringSubmatch(n.http(port, "/metrics")); g != nil {
			routines, _ = strconv.Atoi(g[1])
		}
		return len(e), routines
	}
	descriptors, routines := state()
	settled := func() {
		t.Helper()
		n.until("as few descriptors and goroutines as before", func() bool {
			d, r := state()
			return d <= descriptors+10 && r > 0 && r <= routines+20
		})
	}
	var wg sync.WaitGroup
	for range 10 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range 100 {
				cl, _ := kgo.NewClient(kgo.SeedBrokers(n.address()))
				if err := cl.Ping(context.Background()); err != nil {
					t.Error(err)
				}
				cl.Close()
			}
		}()
	}
	wg.Wait()
	settled()
	adm := n.admin()
	for i := range 10 {
		var names []string
		for j := range 100 {
			names = append(names, fmt.Sprint("t", i, "-", j))
		}
		on := "true"
		if _, err := adm.CreateTopics(context.Background(), 1, 1, map[string]*string{"remote.storage.enable": &on}, names...); err != nil {
			t.Fatal(err)
		}
		if _, err := adm.DeleteTopics(context.Background(), names...); err != nil {
			t.Fatal(err)
		}
	}
	settled()
	if strings.Contains(n.log(), "level=ERROR") || strings.Contains(n.log(), "level=WARN") {
		t.Error(n.log())
	}
}

// TestLongestTopicName: a name as long as Kafka allows can be deleted and used again.
func TestLongestTopicName(t *testing.T) {
	n := newNode(t, "log.segment.delete.delay.ms=600000")
	n.start()
	name := strings.Repeat("n", 249)
	for range 3 {
		n.createTopic(name, 1)
		cl := n.manual(kgo.RecordDeliveryTimeout(5 * time.Second))
		if err := cl.ProduceSync(context.Background(), &kgo.Record{Topic: name, Value: []byte("x")}).FirstErr(); err != nil {
			t.Fatal(err)
		}
		if out, code := n.varve("topic", "delete", name, "-b", n.address()); code != 0 {
			t.Fatal(out)
		}
	}
	if strings.Contains(n.log(), "level=ERROR") {
		t.Error(n.log())
	}
}

// TestVerifyNeedsTheBucket: where every direct read falls back to the broker, there is nothing to compare with.
func TestVerifyNeedsTheBucket(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("v", 1, tieredConfig...)
	produce(t, n.manual(), "v", 0, 1000)
	n.tiered("v")
	if out, code := n.varve("verify", "v", "-b", n.address(), "--bucket", t.TempDir()); code != 1 || !strings.Contains(out, "not_found") {
		t.Errorf("another bucket: exit %d: %s", code, out)
	}
	if out, code := n.varve("verify", "v", "-b", n.address(), "--bucket", filepath.Join(n.dir, "bucket")); code != 0 {
		t.Errorf("exit %d: %s", code, out)
	}
}
