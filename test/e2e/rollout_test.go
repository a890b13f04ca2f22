package e2e

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
)

// foreign reads what objectstore reads and calls it by a name that no broker knows.
type foreign struct{ direct.Fetcher }

func (foreign) Formats() []string { return []string{"SomethingElseV1"} }

// TestRollout goes through the steps of KIP-1254, forward and back: brokers, fetcher, clients, the switch, the metrics. At each step
// every client of its compatibility table reads all of history, and two read on while brokers change.
func TestRollout(t *testing.T) {
	const count = 2000
	c := newCluster(t, 3)
	const off = "varve.direct.fetch.enable=false" // as a broker that does not know of it: it announces nothing and skips the fields
	for _, n := range c.nodes {
		n.args = append(n.args, "--set", off)
	}
	c.start()
	c.createTopic("history", 1, 3, tieredConfig...)
	writer := c.client()
	produce(t, writer, "history", 0, count)
	c.until("most is in the bucket, and only there", func() bool {
		all := c.describe("history")
		return len(all) == 1 && len(all[0].Detail) == 3 && all[0].Detail[0].LocalStart >= count-500 && all[0].Detail[1].LocalStart >= count-500 && all[0].Detail[2].LocalStart >= count-500
	})

	transport := func(cfg direct.Config) *direct.Transport {
		f, err := objectstore.Open(c.bucket, objectstore.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if cfg.Fetcher = f; cfg.RestAfter == 1 { // only to tell them apart
			cfg.Fetcher = foreign{f}
		}
		cfg.ConnectTimeout = 5 * time.Second
		tr, err := direct.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(tr.Close)
		return tr
	}
	enabled, unlisted := direct.Config{Enabled: true}, direct.Config{Enabled: true, RestAfter: 1}
	// pass reads records from first on, in order, until there are n.
	pass := func(ctx context.Context, cl *kgo.Client, first, n int) error {
		for next := first; next < first+n; {
			fetches := cl.PollRecords(ctx, first+n-next)
			if err := fetches.Err0(); err != nil {
				return fmt.Errorf("at %d: %w", next, err)
			}
			var wrong error
			fetches.EachRecord(func(r *kgo.Record) {
				if wrong == nil && (r.Offset != int64(next) || !bytes.Equal(r.Value, value(next))) {
					wrong = fmt.Errorf("offset %d where %d is due", r.Offset, next)
				}
				next++
			})
			if wrong != nil {
				return wrong
			}
		}
		return nil
	}
	dialer := func(tr *direct.Transport) []kgo.Opt {
		if tr == nil {
			return nil
		}
		return []kgo.Opt{kgo.Dialer(tr.DialContext)}
	}
	start := kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"history": {0: kgo.NewOffset().AtStart()}})
	limits := []kgo.Opt{kgo.FetchMaxPartitionBytes(20_000), kgo.FetchMaxWait(200 * time.Millisecond)}
	read := func(tr *direct.Transport) direct.Stats {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cl := c.client(slices.Concat(dialer(tr), limits, []kgo.Opt{start})...)
		defer cl.Close()
		if err := pass(ctx, cl, 0, count); err != nil {
			t.Fatal(err)
		}
		if tr == nil {
			return direct.Stats{}
		}
		return tr.Snapshot()
	}
	classic := func(what string, s direct.Stats) {
		t.Helper()
		if s.Served != 0 || s.Bytes != 0 || s.Locations != 0 {
			t.Errorf("%s: %+v", what, s)
		}
		for cause, n := range s.Fallbacks {
			if n > 0 {
				t.Errorf("%s: %d fallbacks for %s", what, n, cause)
			}
		}
	}
	straight := func(what string, s direct.Stats) {
		t.Helper()
		if s.Served < 2*s.BrokerBytes || s.Served == 0 {
			t.Errorf("%s: %+v", what, s)
		}
	}
	// meanwhile has an old and a new client read history again and again.
	meanwhile := func(change func()) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		stop := make(chan struct{})
		var readers sync.WaitGroup
		for _, tr := range []*direct.Transport{nil, transport(enabled)} {
			readers.Go(func() {
				for {
					cl := c.client(slices.Concat(dialer(tr), limits, []kgo.Opt{start})...)
					err := pass(ctx, cl, 0, count)
					cl.Close()
					if err != nil {
						t.Errorf("while brokers change, transport %v: %v", tr != nil, err)
						return
					}
					select {
					case <-stop:
						return
					default:
					}
				}
			})
		}
		change()
		close(stop)
		readers.Wait()
	}
	// roll restarts the brokers one after the other, with or without the feature.
	roll := func(from, to string) {
		t.Helper()
		for _, n := range c.nodes {
			n.stop()
			n.args[slices.Index(n.args, from)] = to
			n.start()
			c.level("history")
		}
	}

	read(nil)
	classic("old brokers, new client", read(transport(enabled)))
	on := strings.Replace(off, "false", "true", 1)
	meanwhile(func() { roll(off, on) }) // step 1
	read(nil)
	classic("new brokers, new client that is not switched on", read(transport(direct.Config{}))) // steps 2 and 3
	classic("new brokers, new client, format not listed", read(transport(unlisted)))
	used := transport(enabled) // step 4
	straight("new brokers, new client", read(used))
	reg := prometheus.NewRegistry() // step 5
	reg.MustRegister(used.Collector())
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		sum := 0.0
		for _, m := range f.GetMetric() {
			sum += m.GetCounter().GetValue()
		}
		switch name := f.GetName(); {
		case (name == "remote_fetch_requests_total" || name == "remote_fetch_bytes_total") && sum == 0,
			(name == "remote_fetch_errors_total" || name == "remote_fetch_fallbacks_total") && sum > 0:
			t.Errorf("%s is %v", name, sum)
		}
	}
	if out := c.varve("tier", "who"); !strings.Contains(out, "kgo") || !strings.Contains(out, "GRANTED") {
		t.Errorf("tier who: %s", out)
	}
	// Back: a group goes on where it was with the switch off, then with it on, then with no transport at all.
	at := 0
	for _, tr := range []*direct.Transport{transport(enabled), transport(direct.Config{}), transport(enabled), nil} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		cl := c.client(slices.Concat(dialer(tr), limits, []kgo.Opt{kgo.ConsumerGroup("group"), kgo.ConsumeTopics("history"), kgo.DisableAutoCommit()})...)
		if err := pass(ctx, cl, at, 350); err != nil {
			t.Fatal(err)
		}
		if err := cl.CommitUncommittedOffsets(ctx); err != nil {
			t.Fatal(err)
		}
		cl.Close()
		cancel()
		at += 350
	}
	meanwhile(func() { roll(on, off) })
	classic("old brokers again", read(transport(enabled)))
	read(nil)
}
