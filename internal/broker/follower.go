package broker

import (
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/follower"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/replication"
	"github.com/varve-io/varve/internal/tp"
)

func (b *broker) openReplication() {
	o := replication.Options{Self: b.self, Epoch: b.epoch.Load, Dial: b.dialReplica, Fetchers: b.static.Int("num.replica.fetchers"),
		Config: b.replicationConfig, Checkpoint: func() { b.checkpoint(log.RecoveryPointFile, log.LogStartFile) }, Throttle: b.throttleFollower, Log: b.log, Observe: b.replicated.observe}
	if b.tier != nil {
		o.State = b.tier.reader
	}
	b.replication = replication.New(o)
}

func (b *broker) replicationConfig() replication.Config {
	c := b.static
	return replication.Config{MaxBytes: int32(c.Int("replica.fetch.max.bytes")), ResponseMaxBytes: int32(c.Int("replica.fetch.response.max.bytes")),
		MinBytes: int32(c.Int("replica.fetch.min.bytes")), MaxWait: c.Millis("replica.fetch.wait.max.ms"), Timeout: c.Millis("replica.socket.timeout.ms")}
}

// followerConfig is asked for at each decision of a follower, so that the option may be changed while it runs.
func (b *broker) followerConfig(p *partition.Partition) func() follower.Config {
	return func() follower.Config {
		c := p.Log().Config()
		return follower.Config{Tiered: c.Tiered && b.tier != nil, Compacted: c.Compact, FromTier: b.config().Bool("follower.fetch.last.tiered.offset.enable"),
			Backoff: b.static.Millis("replica.fetch.backoff.ms")}
	}
}

// thin lists the replicas here that are to lead only if nobody else can (KIP-1303).
func (b *broker) thin() []controller.PartitionRef {
	var out []controller.PartitionRef
	for _, p := range b.replicas.all() {
		if b.isThin(p) {
			out = append(out, controller.PartitionRef{Topic: p.TopicID(), Index: p.ID().Index})
		}
	}
	return out
}

func (b *broker) isThin(p *partition.Partition) bool {
	c := b.config()
	ms, bytes := c.Int64("leader.election.eligible.local.log.ms"), c.Int64("leader.election.eligible.local.log.bytes")
	l := p.Log()
	return (ms != -1 || bytes != -1) && b.tier != nil && l != nil && p.Cause() == nil && isThin(l, ms, bytes, time.Now())
}

// isThin reports whether a log's local span is below both limits, though the tier has more. A limit of -1 is none.
func isThin(l *log.Log, ms, bytes int64, now time.Time) bool {
	o, c := l.Offsets(), l.Config()
	if !c.Tiered || o.LocalLogStart <= o.LogStart {
		return false // all there is, is here
	}
	if bytes == -2 {
		bytes = c.SegmentBytes
	}
	if bytes >= 0 && o.Size >= bytes {
		return false
	}
	if ms >= 0 {
		if sealed := l.Sealed(); len(sealed) > 0 && now.UnixMilli()-sealed[0].MaxTimestamp >= ms {
			return false
		}
	}
	return true
}

// throttles are the limiters of replication; their rates follow the configuration.
type throttles struct {
	leader, follower *rate.Limiter
}

func newThrottles() *throttles {
	return &throttles{leader: rate.NewLimiter(rate.Inf, math.MaxInt32), follower: rate.NewLimiter(rate.Inf, math.MaxInt32)}
}

// limit takes over the rates of a configuration. A burst of a second's worth keeps the average.
func (t *throttles) limit(c config.Values) {
	for l, key := range map[*rate.Limiter]string{t.leader: "leader.replication.throttled.rate", t.follower: "follower.replication.throttled.rate"} {
		perSecond := c.Int64(key)
		bound(l, perSecond)
		l.SetBurst(int(min(max(perSecond, 1), math.MaxInt32)))
	}
}

func (b *broker) throttleLeader(id tp.Partition, _ int32) *rate.Limiter {
	if b.throttles.leader.Limit() == rate.Inf || !b.throttled(id, "leader.replication.throttled.replicas") {
		return nil
	}
	return b.throttles.leader
}

func (b *broker) throttleFollower(id tp.Partition) *rate.Limiter {
	if b.throttles.follower.Limit() == rate.Inf || !b.throttled(id, "follower.replication.throttled.replicas") {
		return nil
	}
	return b.throttles.follower
}

// throttled looks this broker's replica up in one of the lists of KIP-73.
func (b *broker) throttled(id tp.Partition, key string) bool {
	t, ok := b.quorum.Image().Topics[id.Topic]
	if !ok {
		return false
	}
	list := config.SplitList(t.Configs[key])
	return slices.Contains(list, "*") || slices.Contains(list, strconv.Itoa(int(id.Index))+":"+strconv.Itoa(int(b.self)))
}

// replicationMetrics count what followers do, under Kafka's names.
type replicationMetrics struct {
	bytesIn                          prometheus.Counter
	builds, buildErrors, truncations prometheus.Counter
}

func newReplicationMetrics(r prometheus.Registerer) (*replicationMetrics, error) {
	m := &replicationMetrics{
		bytesIn:     counter("kafka_server_brokertopicmetrics_replicationbytesin_total", "Bytes of record batches that followers here took over from leaders."),
		builds:      counter("kafka_server_brokertopicmetrics_buildremotelogauxstaterequests_total", "Times that a replica here took lineage and producers from the tier (KIP-405)."),
		buildErrors: counter("kafka_server_brokertopicmetrics_buildremotelogauxstateerrors_total", "Times that this failed and was tried again."),
		truncations: counter("varve_replica_truncations_total", "Times that a follower here cut its log where it departed from its leader's."),
	}
	return m, register(r, m.bytesIn, m.builds, m.buildErrors, m.truncations)
}

func counter(name, help string) prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
}

func register(r prometheus.Registerer, collectors ...prometheus.Collector) error {
	for _, c := range collectors {
		if err := r.Register(c); err != nil {
			return err
		}
	}
	return nil
}

func (m *replicationMetrics) observe(e replication.Event) {
	m.bytesIn.Add(float64(e.Appended))
	switch {
	case e.Err != nil:
		m.buildErrors.Inc()
	case e.Building:
		m.builds.Inc()
	case e.Truncated:
		m.truncations.Inc()
	}
}
