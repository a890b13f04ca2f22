package direct_test

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"
	"pgregory.net/rapid"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/recordbatch"
)

// drawPartition makes a log of plain batches and interleaved transactions, most of it tiered.
func drawPartition(t *rapid.T, bucket objstore.Bucket, name string) *fakePartition {
	p := &fakePartition{epoch: 5}
	open := map[int64]int64{} // producer: first offset of its transaction
	value := 0
	for range rapid.IntRange(1, 25).Draw(t, "batches") {
		producer := rapid.Int64Range(-1, 3).Draw(t, "producer")
		first, inTxn := open[producer]
		if inTxn && rapid.Bool().Draw(t, "end") {
			p.finish(producer, first, rapid.Bool().Draw(t, "commit"))
			delete(open, producer)
			continue
		}
		var values []string
		for range rapid.IntRange(1, 4).Draw(t, "records") {
			value++
			values = append(values, fmt.Sprint(name, value, strings.Repeat("x", rapid.SampledFrom([]int{0, 5, 300, 90_000}).Draw(t, "length"))))
		}
		if !inTxn && producer >= 0 {
			open[producer] = p.end()
		}
		p.append(t, recordbatch.Codec(rapid.IntRange(0, 4).Draw(t, "codec")), producer, producer >= 0, values...)
	}
	for producer := range int64(4) {
		if first, ok := open[producer]; ok { // all is stable in the tier
			p.finish(producer, first, rapid.Bool().Draw(t, "commit"))
		}
	}
	p.expect(t)
	for from := 0; from < len(p.batches) && rapid.IntRange(0, 9).Draw(t, "more") > 0; {
		to := rapid.IntRange(from+1, len(p.batches)).Draw(t, "to")
		p.tier(t, bucket, name, from, to)
		from = to
	}
	return p
}

// TestSameRecords is the promise of the package: whatever the data, the client's version, limits and seeks, and whatever
// fails at the store, a client sees exactly the records of the log, in order; with a broker's locations as with a Locator's.
func TestSameRecords(t *testing.T) {
	seen := map[string]int64{}
	var served, stock int64
	rapid.Check(t, func(t *rapid.T) {
		bucket := objstore.WithFaults(objstore.NewMemory())
		var parts []*fakePartition
		for i := range rapid.IntRange(1, 3).Draw(t, "partitions") {
			parts = append(parts, drawPartition(t, bucket, fmt.Sprint("p", i)))
		}
		broker := newFakeBroker(t, parts...)
		defer broker.close()
		fetcher, err := objectstore.New(bucket, objectstore.Options{})
		if err != nil {
			t.Fatal(err)
		}
		var locator direct.Locator
		if rapid.Bool().Draw(t, "stock") {
			broker.feature = false
			locator = &fakeLocator{b: broker, answer: func(n int, q direct.Query, l *direct.Location) (*direct.Location, error) {
				switch {
				case n%7 == 3:
					return nil, []error{nil, direct.ErrThrottled, direct.ErrDamaged}[n%3]
				case l != nil && n%3 == 1: // the range ends before its bytes do
					for _, x := range parts[q.Partition].batches {
						if x.first <= q.Offset && q.Offset <= x.last {
							l.EndOffset = x.last
						}
					}
				}
				return l, nil
			}}
		}
		transport, err := direct.New(direct.Config{Enabled: true, Fetcher: fetcher, Locator: locator, ConnectTimeout: 3 * time.Millisecond, ReadTimeout: time.Second,
			RangeBytes: 64 << 10, MemoryBytes: rapid.SampledFrom([]int64{1, 200 << 10, 64 << 20}).Draw(t, "memory"), RangesPerPartition: rapid.IntRange(1, 4).Draw(t, "ranges"),
			RestMin: time.Millisecond, RestMax: 5 * time.Millisecond, MaxBatchBytes: rapid.SampledFrom([]int{1000, 64 << 20}).Draw(t, "max batch")})
		if err != nil {
			t.Fatal(err)
		}
		defer transport.Close()
		dialed := rapid.Bool().Draw(t, "dialed") // or served
		connect := func() net.Conn {
			if !dialed {
				conn, _ := serve(t, transport, context.Background(), direct.Hooks{}, broker.addr())
				return conn
			}
			conn, err := transport.DialContext(context.Background(), "tcp", broker.addr())
			if err != nil {
				t.Fatal(err)
			}
			return conn
		}
		conn := connect()
		c := newClient(t, conn)
		o := fetchOptions{version: int16(rapid.IntRange(4, 18).Draw(t, "version")), committed: rapid.Bool().Draw(t, "committed"), epoch: -1,
			maxBytes: rapid.SampledFrom([]int32{1, 1000, 200_000, 50 << 20}).Draw(t, "max"), partMax: rapid.SampledFrom([]int32{1, 700, 100_000, 1 << 20}).Draw(t, "partition max"),
			minimum: rapid.SampledFrom([]int32{0, 1, 5000}).Draw(t, "min"), waitMs: rapid.SampledFrom([]int32{0, 1, 20}).Draw(t, "wait")}
		if rapid.Bool().Draw(t, "epoch") {
			o.epoch = 5
		}
		faults := rapid.SliceOfN(rapid.SampledFrom([]string{"", "", "not found", "auth", "throttled", "short", "corrupt", "block", "reconnect", "seek"}), 0, 30).Draw(t, "events")
		never := make(chan struct{})
		at := make([]int64, len(parts))
		stuck := 0
		for round := 0; ; round++ {
			if round < len(faults) {
				f := objstore.Fault{Op: objstore.OpGet, Times: 1 + round%2}
				switch faults[round] {
				case "not found":
					f.Err = objstore.ErrNotFound
				case "auth":
					f.Err = objstore.ErrAccess
				case "throttled":
					f.Err = objstore.ErrThrottled
				case "short":
					f.Short = 20
				case "corrupt":
					f.Corrupt, f.CorruptAt = true, int64(round*37)
				case "block":
					f.Block = never
				case "reconnect":
					conn.Close()
					conn = connect()
					c = newClient(t, conn)
				case "seek":
					i := round % len(parts)
					at[i] = rapid.Int64Range(0, parts[i].end()).Draw(t, "to")
				}
				if f.Err != nil || f.Short > 0 || f.Corrupt || f.Block != nil {
					bucket.Add(f)
				}
			}
			var want []position
			for i := range parts {
				if at[i] < parts[i].end() {
					want = append(want, position{int32(i), at[i]})
				}
			}
			if len(want) == 0 {
				break
			}
			resp := c.fetch(o, want)
			moved := check(t, parts, at, o, resp)
			if stuck++; moved {
				stuck = 0
			}
			if stuck > 200_000 {
				t.Fatalf("no progress at %v: %+v", at, transport.Snapshot())
			}
		}
		s := transport.Snapshot()
		served += s.Served
		if locator != nil {
			stock += s.Served
		}
		for name, n := range s.Fallbacks {
			seen[name] += n
		}
		conn.Close()
		transport.Close()
		if s := transport.Snapshot(); s.Buffered != 0 || s.Streams != 0 {
			t.Fatalf("memory is lost: %+v", s)
		}
	})
	for _, name := range []string{"not_found", "auth", "throttled", "short", "damaged", "connect_timeout", "too_large"} {
		if seen[name] == 0 {
			t.Errorf("nothing fell back for %s: %v", name, seen)
		}
	}
	if stock == 0 || served == stock {
		t.Errorf("%d bytes read directly, %d of them from where a Locator said", served, stock)
	}
	t.Logf("%d bytes read directly, fallbacks %v", served, seen)
}

// check holds an answer against the log and moves the positions.
func check(t fataler, parts []*fakePartition, at []int64, o fetchOptions, resp *kmsg.FetchResponse) (moved bool) {
	t.Helper()
	if resp.ErrorCode != 0 || resp.SessionID != 0 {
		t.Fatalf("error %d, session %d", resp.ErrorCode, resp.SessionID)
	}
	total, first := 0, 0
	for _, topic := range resp.Topics {
		for i := range topic.Partitions {
			p := &topic.Partitions[i]
			log := parts[p.Partition]
			known := p.HighWatermark == log.end() || p.HighWatermark == -1 && len(p.RecordBatches) == 0
			if p.ErrorCode != 0 || !known || (p.AbortedTransactions != nil) != o.committed {
				t.Fatalf("partition %d: error %d, high watermark %d of %d, aborted %v", p.Partition, p.ErrorCode, p.HighWatermark, log.end(), p.AbortedTransactions)
			}
			if n := len(p.RecordBatches); n > 0 {
				h, _ := recordbatch.ParseHeader(p.RecordBatches)
				if total == 0 {
					first = h.Size
				}
				if n > int(o.partMax) && (total > 0 || n > h.Size) {
					t.Fatalf("partition %d: %d bytes of %d", p.Partition, n, o.partMax)
				}
				total += n
			}
			got, next := records(t, p, at[p.Partition], o.committed)
			visible := log.all
			if o.committed {
				visible = log.commit
			}
			var want []record
			for _, r := range visible {
				if r.offset >= at[p.Partition] && r.offset < next {
					want = append(want, r)
				}
			}
			if !slices.Equal(got, want) {
				t.Fatalf("partition %d from %d to %d: %d records instead of %d", p.Partition, at[p.Partition], next, len(got), len(want))
			}
			moved = moved || next > at[p.Partition]
			at[p.Partition] = next
		}
	}
	if total > int(o.maxBytes) && total > first {
		t.Fatalf("%d bytes of at most %d", total, o.maxBytes)
	}
	return moved
}
