package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/time/rate"
)

func benchCommand() *cobra.Command {
	c := &connection{}
	cmd := &cobra.Command{Use: "bench", Short: "Measure how fast a topic is written and read"}
	c.flags(cmd)
	cmd.AddCommand(benchProduce(c), benchConsume(c))
	return cmd
}

// benchResult is what a run prints. Latencies are from handing a record over to its acknowledgement; a reader has none.
type benchResult struct {
	Topic   string  `json:"topic"`
	Records int64   `json:"records"`
	Bytes   int64   `json:"bytes"`
	Seconds float64 `json:"seconds"`
	Rate    float64 `json:"recordsPerSecond"`
	MB      float64 `json:"megabytesPerSecond"` // 1e6 bytes
	P50     float64 `json:"p50Ms,omitempty"`
	P99     float64 `json:"p99Ms,omitempty"`
	P999    float64 `json:"p999Ms,omitempty"`
}

func newBenchResult(topic string, records, bytes int64, took time.Duration, latencies []time.Duration) benchResult {
	seconds := max(took.Seconds(), 1e-9)
	r := benchResult{Topic: topic, Records: records, Bytes: bytes, Seconds: seconds, Rate: float64(records) / seconds, MB: float64(bytes) / 1e6 / seconds}
	if len(latencies) > 0 {
		slices.Sort(latencies)
		// The nearest rank: the smallest latency that the share of all records does not exceed.
		at := func(perMille int) float64 {
			rank := (len(latencies)*perMille + 999) / 1000
			return float64(latencies[rank-1].Microseconds()) / 1000
		}
		r.P50, r.P99, r.P999 = at(500), at(990), at(999)
	}
	return r
}

func (r benchResult) print(cmd *cobra.Command, c *connection) error {
	return c.print(cmd, r, func(w io.Writer) {
		fmt.Fprintf(w, "%d records, %s in %.2f s\n%.0f records/s, %.1f MB/s\n", r.Records, bytesText(r.Bytes), r.Seconds, r.Rate, r.MB)
		if r.P50 > 0 {
			fmt.Fprintf(w, "latency ms: p50 %.2f, p99 %.2f, p99.9 %.2f\n", r.P50, r.P99, r.P999)
		}
	})
}

func benchProduce(c *connection) *cobra.Command {
	var acks, codec string
	var records int64
	var size int
	var perSecond float64
	cmd := &cobra.Command{
		Use: "produce TOPIC", Short: "Write records of random bytes", Args: exactArgs(1, "a topic"),
		Example: `  varve bench produce load --records 1000000 --size 1024
  varve bench produce load --records 60000 --rate 1000 --acks 1 --json`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if records < 1 || size < 0 || perSecond < 0 {
				return usageError{errors.New("--records must be above 0, --size and --rate not below")}
			}
			opts, err := produceOptions(acks, codec)
			if err != nil {
				return err
			}
			cl, err := c.client(cmd.Context(), append(opts, kgo.DefaultProduceTopic(args[0]), kgo.MaxBufferedRecords(50_000), kgo.ProducerBatchMaxBytes(1_000_000))...)
			if err != nil {
				return err
			}
			defer cl.Close()
			r, err := produceLoad(cmd, cl, args[0], records, size, perSecond)
			if err != nil {
				return err
			}
			return r.print(cmd, c)
		},
	}
	f := cmd.Flags()
	f.Int64VarP(&records, "records", "n", 100_000, "number of records")
	f.IntVar(&size, "size", 1024, "bytes of each value")
	f.Float64Var(&perSecond, "rate", 0, "records per second; 0 is as fast as it goes")
	f.StringVar(&acks, "acks", "all", "all, 1 or 0")
	f.StringVar(&codec, "compression", "none", "none, gzip, snappy, lz4 or zstd; the values are random and do not shrink")
	return cmd
}

func produceLoad(cmd *cobra.Command, cl *kgo.Client, topic string, records int64, size int, perSecond float64) (benchResult, error) {
	ctx, cancel := context.WithCancelCause(cmd.Context())
	defer cancel(nil)
	// Values differ without a call of the generator for each: windows of one random buffer.
	pool := make([]byte, size+64<<10)
	if _, err := rand.Read(pool); err != nil {
		return benchResult{}, err
	}
	limiter := rate.NewLimiter(rate.Inf, 1)
	if perSecond > 0 {
		limiter = rate.NewLimiter(rate.Limit(perSecond), max(1, int(perSecond/100)))
	}
	p := newProgress(cmd, records)
	defer p.close()
	var mu sync.Mutex
	latencies := make([]time.Duration, 0, min(records, 1<<20))
	begin := time.Now()
	for i := range records {
		if err := limiter.Wait(ctx); err != nil {
			break // ctx tells why
		}
		from := int(i*61) % (64 << 10)
		handed := time.Now()
		cl.Produce(ctx, &kgo.Record{Value: pool[from : from+size]}, func(_ *kgo.Record, err error) {
			if err != nil {
				cancel(err)
				return
			}
			mu.Lock()
			latencies = append(latencies, time.Since(handed))
			n := int64(len(latencies))
			mu.Unlock()
			if n%1024 == 0 {
				p.set(n)
			}
		})
		if ctx.Err() != nil {
			break
		}
	}
	if err := cl.Flush(ctx); err != nil || ctx.Err() != nil {
		return benchResult{}, fmt.Errorf("producing to %s: %w", topic, context.Cause(ctx))
	}
	took := time.Since(begin)
	mu.Lock()
	defer mu.Unlock()
	n := int64(len(latencies))
	return newBenchResult(topic, n, n*int64(size), took, latencies), nil
}

func benchConsume(c *connection) *cobra.Command {
	var records int64
	cmd := &cobra.Command{
		Use: "consume TOPIC", Short: "Read a topic from its start", Args: exactArgs(1, "a topic"),
		Long: "Read a topic from its start to its present end, or until --records have been read, and throw the records away.",
		Example: `  varve bench consume load
  varve bench consume load --records 1000000 --json`,
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, topic := cmd.Context(), args[0]
			adm, err := c.admin(ctx)
			if err != nil {
				return err
			}
			defer adm.Close()
			starts, err := adm.ListStartOffsets(ctx, topic)
			if err == nil {
				err = starts.Error()
			}
			if err != nil {
				return fmt.Errorf("topic %s: %w", topic, err)
			}
			ends, err := adm.ListEndOffsets(ctx, topic)
			if err == nil {
				err = ends.Error()
			}
			if err != nil {
				return fmt.Errorf("topic %s: %w", topic, err)
			}
			cl, err := c.client(ctx, kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchMaxPartitionBytes(8<<20), kgo.KeepControlRecords())
			if err != nil {
				return err
			}
			defer cl.Close()
			r, err := consumeLoad(cmd, cl, topic, newGoal(starts, ends, true), records)
			if err != nil {
				return err
			}
			return r.print(cmd, c)
		},
	}
	cmd.Flags().Int64VarP(&records, "records", "n", 0, "stop after so many records; 0 reads to the end")
	return cmd
}

func consumeLoad(cmd *cobra.Command, cl *kgo.Client, topic string, goal *goal, records int64) (benchResult, error) {
	p := newProgress(cmd, goal.total())
	defer p.close()
	var n, size int64
	begin := time.Now()
	for !goal.reached() && (records == 0 || n < records) {
		fetches := cl.PollFetches(cmd.Context())
		if err := cmd.Context().Err(); err != nil {
			return benchResult{}, err
		}
		for _, e := range fetches.Errors() {
			return benchResult{}, fmt.Errorf("%s-%d: %w", e.Topic, e.Partition, e.Err)
		}
		fetches.EachRecord(func(r *kgo.Record) {
			if !goal.wants(r) || r.Attrs.IsControl() || records > 0 && n == records {
				return
			}
			n++
			size += int64(len(r.Key) + len(r.Value))
		})
		p.set(goal.done())
	}
	return newBenchResult(topic, n, size, time.Since(begin), nil), nil
}
