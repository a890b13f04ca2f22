package broker

import (
	"context"
	"errors"
	"math"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"github.com/varve-io/varve/internal/compact"
	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tp"
)

// cleaner compacts logs, the one with the largest share of new bytes first (Kafka's LogCleanerManager). Leaders and followers compact
// for themselves.
type cleaner struct {
	limit *rate.Limiter // log.cleaner.io.max.bytes.per.second

	mu   sync.Mutex
	busy map[tp.Partition]bool
	// Logs whose compaction failed for good; they are left alone until they are opened anew.
	failed map[tp.Partition]*log.Log

	runs, read, written prometheus.Counter
	dirty               prometheus.Gauge
	seconds, used       prometheus.Gauge
}

func newCleaner(r prometheus.Registerer) (*cleaner, error) {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	c := &cleaner{limit: rate.NewLimiter(rate.Inf, burst), busy: map[tp.Partition]bool{}, failed: map[tp.Partition]*log.Log{},
		runs:    counter("varve_log_cleaner_runs_total", "Compactions that ended well."),
		read:    counter("varve_log_cleaner_read_bytes_total", "Bytes of segments that compactions went through."),
		written: counter("varve_log_cleaner_written_bytes_total", "Bytes of segments that compactions left."),
		dirty:   gauge("kafka_log_logcleanermanager_max_dirty_percent", "Largest share of a log here, in percent, that no compaction has seen."),
		seconds: gauge("kafka_log_logcleaner_max_clean_time_secs", "Seconds that the last compaction took."),
		used:    gauge("kafka_log_logcleaner_max_buffer_utilization_percent", "Share of the memory for keys that the last compaction used, in percent."),
	}
	failed := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kafka_log_logcleanermanager_uncleanable_partitions_count",
		Help: "Partitions here whose compaction failed and is not tried again before a restart."}, func() float64 {
		c.mu.Lock()
		defer c.mu.Unlock()
		return float64(len(c.failed))
	})
	return c, register(r, c.runs, c.read, c.written, c.dirty, c.seconds, c.used, failed)
}

// bound takes over the rate of a configuration.
func (c *cleaner) bound(v config.Values) {
	bound(c.limit, int64(min(v.Float("log.cleaner.io.max.bytes.per.second"), 1<<60)))
}

// throttle waits until so many bytes may be read or written.
func (c *cleaner) throttle(ctx context.Context, n int) error {
	for ; n > burst; n -= burst {
		if err := c.limit.WaitN(ctx, burst); err != nil {
			return err
		}
	}
	return c.limit.WaitN(ctx, n)
}

// compactLogs runs the compactions until ctx ends.
func (b *broker) compactLogs(ctx context.Context, group *errgroup.Group) {
	threads := b.static.Int("log.cleaner.threads")
	for range threads {
		group.Go(func() error {
			for {
				if b.compactOne(ctx, int(min(b.config().Int64("log.cleaner.dedupe.buffer.size")/int64(threads), math.MaxInt))) {
					continue
				}
				select {
				case <-ctx.Done():
					return nil
				case <-time.After(max(b.config().Millis("log.cleaner.backoff.ms"), 10*time.Millisecond)):
				}
			}
		})
	}
}

// filthiest picks the log that is most in need of a compaction, and takes it out of the others' reach.
func (b *broker) filthiest(now time.Time) (p *partition.Partition, plan compact.Plan) {
	c := b.cleaner
	c.mu.Lock()
	defer c.mu.Unlock()
	most := 0.0
	hosted := map[tp.Partition]*log.Log{}
	for _, candidate := range b.replicas.all() {
		l := candidate.Log()
		if l == nil || !l.Config().Compact || l.Config().Tiered {
			continue
		}
		hosted[candidate.ID()] = l
		if c.busy[candidate.ID()] || c.failed[candidate.ID()] == l || candidate.Cause() != nil {
			continue
		}
		stable := candidate.HighWatermark()
		if first, open := l.FirstUnstable(stable); open {
			stable = min(stable, first)
		}
		at, err := l.CompactionPlan(stable, now)
		if err != nil {
			b.uncleanableLocked(candidate.ID(), l, err)
			continue
		}
		most = max(most, at.Ratio())
		if at.Due && (p == nil || at.Ratio() > plan.Ratio()) {
			p, plan = candidate, at
		}
	}
	for id, l := range c.failed {
		if hosted[id] != l {
			delete(c.failed, id)
		}
	}
	c.dirty.Set(100 * most)
	if p != nil {
		c.busy[p.ID()] = true
	}
	return p, plan
}

func (b *broker) uncleanableLocked(id tp.Partition, l *log.Log, err error) {
	b.cleaner.failed[id] = l
	b.log.Error("compaction failed, the log is not compacted any more until the broker is started anew", "partition", id.String(), "cause", err)
}

// compactOne compacts the log that needs it most; did is false if none does.
func (b *broker) compactOne(ctx context.Context, memory int) (did bool) {
	c := b.cleaner
	now := time.Now()
	p, plan := b.filthiest(now)
	if p == nil {
		return false
	}
	l := p.Log()
	res, err := l.Compact(ctx, plan, log.CompactOptions{Memory: memory, Now: now, Throttle: c.throttle})
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.busy, p.ID())
	switch {
	case err == nil:
		took := time.Since(now)
		c.runs.Inc()
		c.read.Add(float64(res.Before))
		c.written.Add(float64(res.After))
		c.seconds.Set(took.Seconds())
		c.used.Set(100 * res.Used)
		b.log.Info("log was compacted", "partition", p.ID().String(), "from", res.From, "to", res.To, "keys", res.Keys, "bytes before", res.Before, "bytes after", res.After,
			"segments", res.Segments, "left", res.Left, "took", took.Round(time.Millisecond).String())
		b.checkpoint(log.CompactedFile)
	case ctx.Err() != nil, errors.Is(err, log.ErrClosed), errors.Is(err, log.ErrSegmentsGone):
		return false
	case errors.Is(err, syscall.ENOSPC):
		b.log.Warn("log was not compacted for want of space, it will be tried again", "partition", p.ID().String(), "cause", err)
		return false
	default:
		b.uncleanableLocked(p.ID(), l, err)
	}
	return true
}
