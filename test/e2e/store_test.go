package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/internal/s3test"
)

// proxy stands between a broker and its store and can be switched off: then it resets connections.
type proxy struct {
	address string
	off     atomic.Bool

	mu    sync.Mutex
	conns map[net.Conn]bool
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{address: ln.Addr().String(), conns: map[net.Conn]bool{}}
	t.Cleanup(func() {
		ln.Close()
		p.cut()
	})
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			if p.off.Load() {
				c.Close()
				continue
			}
			up, err := net.Dial("tcp", target)
			if err != nil {
				c.Close()
				continue
			}
			p.mu.Lock()
			p.conns[c], p.conns[up] = true, true
			p.mu.Unlock()
			pipe := func(a, b net.Conn) {
				io.Copy(a, b)
				a.Close()
				b.Close()
				p.mu.Lock()
				delete(p.conns, a)
				p.mu.Unlock()
			}
			go pipe(c, up)
			go pipe(up, c)
		}
	}()
	return p
}

// cut ends the connections that are open.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.Close()
	}
}

func (p *proxy) away() { p.off.Store(true); p.cut() }
func (p *proxy) back() { p.off.Store(false) }

// overProxy starts a node whose S3 server can go away.
func overProxy(t *testing.T, sets ...string) (*node, *proxy) {
	t.Helper()
	s3 := s3test.Start(t)
	p := newProxy(t, strings.TrimPrefix(s3.Endpoint, "http://"))
	url := fmt.Sprintf("s3://%s?endpoint=http://%s&path-style=true&region=us-east-1", s3.Bucket, p.address)
	n := newNode(t, append([]string{"varve.bucket=" + url, "varve.bucket.access.key=" + s3.AccessKey, "varve.bucket.secret.key=" + s3.SecretKey}, sets...)...)
	n.start()
	return n, p
}

// TestStoreAwayForLongerThanTheDataLives: data past its total retention goes, uploaded or not; what is younger stays until the
// store is back, and then everything goes on by itself.
func TestStoreAwayForLongerThanTheDataLives(t *testing.T) {
	n, p := overProxy(t)
	n.createTopic("away", 1, "remote.storage.enable=true", "internal.segment.bytes=30000", "local.retention.bytes=1", "retention.bytes=150000")
	cl := n.client(kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(kgo.NoCompression()))
	p.away()
	produce(t, cl, "away", 0, 10_000) // more than a megabyte
	n.until("expired data goes although the store is away", func() bool {
		s := n.tier("away")
		return s.LogStart > 7000 && s.Segments == 0
	})
	n.until("somebody is told that uploads fail", func() bool { return n.tier("away").Failure != "" })
	s := n.tier("away")
	if s.LocalStart != s.LogStart {
		t.Fatalf("young data went: %+v", s)
	}
	p.back()
	s = n.tiered("away")
	out, code := n.varve("consume", "away", "--until", "end", "-b", n.address(), "-f", `%o\n`)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if code != 0 || lines[0] != fmt.Sprint(s.LogStart) || lines[len(lines)-1] != "9999" || int64(len(lines)) != 10_000-s.LogStart {
		t.Fatalf("exit %d, %d records from %s, log start %d", code, len(lines), lines[0], s.LogStart)
	}
}

// TestConsumersWaitForTheStore: while the bucket is away, consumers of tiered records get no error and no reset, and go on
// where they were when it is back. Local records of another topic arrive meanwhile.
func TestConsumersWaitForTheStore(t *testing.T) {
	n, p := overProxy(t)
	n.createTopic("old", 1, tieredConfig...)
	n.createTopic("new", 1)
	cl := n.client(kgo.RecordPartitioner(kgo.ManualPartitioner()))
	produce(t, cl, "old", 0, 3000)
	n.tiered("old")
	n.stop()
	n.start() // an empty cache
	p.away()
	c := n.client(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"old": {0: kgo.NewOffset().AtStart()}, "new": {0: kgo.NewOffset().AtStart()}}))
	produce(t, n.client(kgo.RecordPartitioner(kgo.ManualPartitioner())), "new", 0, 10)
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	got := map[string]int{}
	poll := func() {
		f := c.PollFetches(ctx)
		if err := f.Err(); err != nil {
			t.Fatal(got, err)
		}
		f.EachRecord(func(r *kgo.Record) {
			if int(r.Offset) != got[r.Topic] {
				t.Fatalf("%s: offset %d after %d records", r.Topic, r.Offset, got[r.Topic])
			}
			got[r.Topic]++
		})
	}
	for got["new"] < 10 {
		poll()
	}
	if got["old"] != 0 {
		t.Fatal("records out of nowhere")
	}
	p.back()
	for got["old"] < 3000 {
		poll()
	}
	if strings.Count(n.log(), "reading the tier failed") > 3 {
		t.Error("the same warning was written again and again")
	}
}

// TestTimesAtTheSeam compares look-ups by time with what a consumer reads, across the tiers and above a moved log start.
func TestTimesAtTheSeam(t *testing.T) {
	n, p := overProxy(t)
	n.createTopic("times", 1, tieredConfig...)
	base := time.Now().Add(-time.Hour).Truncate(time.Second)
	cl := n.client(kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(kgo.NoCompression()))
	const count = 1500
	for i := 0; i < count; i++ {
		r := &kgo.Record{Topic: "times", Timestamp: base.Add(time.Duration(i) * time.Second), Key: []byte(fmt.Sprint(i)), Value: value(i)}
		if err := cl.ProduceSync(context.Background(), r).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	n.tiered("times")
	adm := kadm.NewClient(n.client())
	lookup := func(at time.Time) (int64, error) {
		o, err := adm.ListOffsetsAfterMilli(context.Background(), at.UnixMilli(), "times")
		if err != nil {
			return 0, err
		}
		l, _ := o.Lookup("times", 0)
		return l.Offset, l.Err
	}
	check := func(start int64) {
		t.Helper()
		for i := int64(0); i < count; i += 37 {
			for _, d := range []int64{-1, 0, 1} {
				want := max(i, start)
				if d == 1 {
					want = max(i+1, start)
				}
				got, err := lookup(base.Add(time.Duration(i)*time.Second + time.Duration(d)*time.Millisecond))
				if err != nil || got != want {
					t.Fatalf("second %d %+d ms: offset %d, want %d (%v)", i, d, got, want, err)
				}
			}
		}
	}
	check(0)
	if _, err := adm.DeleteRecords(context.Background(), kadm.Offsets{"times": {0: {Topic: "times", At: 333}}}); err != nil {
		t.Fatal(err)
	}
	check(333)
	// With the store away: a retriable error for remote times, right answers for local ones.
	local := n.tier("times").LocalStart
	n.stop()
	n.start()
	p.away()
	last, err := lookup(base.Add(time.Duration(local) * time.Second))
	if err != nil && !errors.Is(err, kerr.LeaderNotAvailable) && !errors.Is(err, kerr.RequestTimedOut) {
		t.Fatal(last, err)
	}
	p.back()
	check(333)
}
