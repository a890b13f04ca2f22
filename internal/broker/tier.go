package broker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"

	"github.com/varve-io/varve/internal/bucket"
	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/directfetch"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tier/reader"
	"github.com/varve-io/varve/internal/tier/uploader"
	"github.com/varve-io/varve/internal/tiering"
)

// tierParts is what a broker with a tier has.
type tierParts struct {
	bucket      objstore.Bucket
	reader      *reader.Reader
	service     *tiering.Service
	metrics     *copyMetrics
	copy, fetch *rate.Limiter // KIP-956; changed while running
}

// limit takes over the quotas of a configuration.
func (t *tierParts) limit(c config.Values) {
	bound(t.copy, c.Int64("remote.log.manager.copy.max.bytes.per.second"))
	bound(t.fetch, c.Int64("remote.log.manager.fetch.max.bytes.per.second"))
}

// OpenBucket opens the object store that a configuration names, LOG.DIR/bucket if it names none.
func OpenBucket(c config.Values, o bucket.Options) (objstore.Bucket, error) {
	url := c.Get("varve.bucket")
	if url == "" {
		url = filepath.Join(c.Get("log.dir"), "bucket")
	}
	o.AccessKey, o.SecretKey, o.SessionToken = c.Get("varve.bucket.access.key"), c.Get("varve.bucket.secret.key"), c.Get("varve.bucket.session.token")
	if file := c.Get("varve.bucket.credentials.file"); file != "" && strings.HasPrefix(url, "s3:") {
		joiner := "?"
		if strings.Contains(url, "?") {
			joiner = "&"
		}
		url += joiner + "credentials-file=" + file
	}
	b, err := bucket.Open(url, o)
	if err != nil {
		return nil, fmt.Errorf("varve.bucket: %w", err)
	}
	return b, nil
}

// Keyring reads the key pairs that a configuration names; nil without any.
func Keyring(c config.Values) (*remoteformat.Keyring, error) {
	pairs := c.List("rsm.config.encryption.key.pairs")
	if len(pairs) == 0 {
		return nil, nil
	}
	ring := &remoteformat.Keyring{}
	for _, pair := range pairs {
		id, file, ok := strings.Cut(pair, "=")
		if !ok {
			return nil, fmt.Errorf("rsm.config.encryption.key.pairs: want ID=PRIVATE-KEY-PEM-FILE, got %q", pair)
		}
		pem, err := os.ReadFile(file)
		if err == nil {
			err = ring.Add(id, pem, nil)
		}
		if err != nil {
			return nil, fmt.Errorf("rsm.config.encryption.key.pairs: key pair %s: %w", id, err)
		}
	}
	return ring, nil
}

// WriteOptions says how a configuration wants segments stored.
func WriteOptions(c config.Values, ring *remoteformat.Keyring) (remoteformat.WriteOptions, error) {
	w := remoteformat.WriteOptions{ChunkSize: c.Int64("rsm.config.chunk.size"), Compress: c.Bool("rsm.config.compression.enabled")}
	if c.Bool("rsm.config.encryption.enabled") {
		w.Keyring, w.ActiveKey, w.Rand = ring, c.Get("rsm.config.encryption.key.pair.id"), rand.Reader
		if ring == nil || w.ActiveKey == "" {
			return w, errors.New("rsm.config.encryption.enabled needs rsm.config.encryption.key.pair.id and rsm.config.encryption.key.pairs")
		}
	}
	return w, nil
}

// burst is how much a quota lets through at once: what is read from a file or asked of the bucket in one go, and what a compaction may be ahead by.
const burst = 4 << 20

// bound sets a limiter to bytes per second; Kafka's default is as good as none.
func bound(l *rate.Limiter, perSecond int64) {
	if perSecond >= 1<<50 {
		l.SetLimit(rate.Inf)
		return
	}
	l.SetLimit(rate.Limit(perSecond))
}

func (b *broker) openTier() error {
	c := b.static
	storeMetrics, err := objstore.NewMetrics(b.registry)
	if err != nil {
		return err
	}
	readMetrics, err := reader.NewMetrics(b.registry)
	if err != nil {
		return err
	}
	var store objstore.Bucket
	if b.o.Bucket != nil {
		store = objstore.WithRetries(objstore.WithMetrics(b.o.Bucket, storeMetrics), objstore.RetryPolicy{})
	} else if store, err = OpenBucket(c, bucket.Options{Metrics: storeMetrics, Logger: b.log}); err != nil {
		return err
	}
	if c.Get("remote.fetch.grants") == "presigned" {
		if _, err := store.PresignGet(context.Background(), "grant", time.Minute); errors.Is(err, objstore.ErrUnsupported) {
			return fmt.Errorf("remote.fetch.grants=presigned: %s has no signed URLs, only S3 has", store)
		}
	}
	ring, err := Keyring(c)
	if err != nil {
		return err
	}
	write, err := WriteOptions(c, ring)
	if err != nil {
		return err
	}
	spool := filepath.Join(b.dir.path, "spool")
	if err := errors.Join(os.RemoveAll(spool), os.MkdirAll(spool, 0o755)); err != nil {
		return err
	}
	prefix := c.Get("rsm.config.key.prefix")
	b.tier = &tierParts{bucket: store, copy: rate.NewLimiter(rate.Inf, burst), fetch: rate.NewLimiter(rate.Inf, burst)}
	b.tier.limit(b.config())
	r := reader.New(reader.Options{Bucket: store, Prefix: prefix, Keyring: ring, IndexCacheBytes: c.Int64("remote.log.index.file.cache.total.size.bytes"),
		ChunkCacheBytes: c.Int64("varve.remote.chunk.cache.bytes"), ReadAheadBytes: readAhead(c), Workers: c.Int("remote.log.reader.threads"),
		MaxPending: c.Int("remote.log.reader.max.pending.tasks"), FetchRate: b.tier.fetch, Metrics: readMetrics})
	copyMetrics := newCopyMetrics()
	b.registry.MustRegister(copyMetrics)
	service := tiering.New(tiering.Options{Self: b.self, Bucket: store, Control: b.control, Image: b.quorum.Image, Config: b.tierConfig, Forget: r.Forget,
		Upload:      uploader.Options{Prefix: prefix, Write: write, SkipCompressed: true, Limiter: b.tier.copy, Spool: uploader.FileSpool(spool)},
		Interval:    c.Millis("remote.log.manager.task.interval.ms"),
		DeleteDelay: b.deleteDelay(), Workers: c.Int("remote.log.manager.copier.thread.pool.size"), Log: b.log, Observe: func(e tiering.Event) {
			if _, ok := b.quorum.Image().Topics[e.Topic]; !ok {
				e.Topic = "" // a deleted topic has no series of its own
			}
			copyMetrics.observe(e)
		}})
	b.tier.reader, b.tier.service, b.tier.metrics = r, service, copyMetrics
	return nil
}

// grantSlack is by how much the clocks of this broker and of the store may differ, as S3 itself allows when a URL is young.
const grantSlack = 5 * time.Minute

// grant signs a URL that outlives the place it goes with.
func (b *broker) grant(ctx context.Context, key string) (directfetch.Grant, error) {
	u, err := b.tier.bucket.PresignGet(ctx, key, b.deleteDelay()+grantSlack)
	return directfetch.Grant(u), err
}

func readAhead(c config.Values) int64 {
	if n := c.Int64("varve.remote.readahead.bytes"); n > 0 {
		return n
	}
	return -1
}

// tierConfig is a topic's limits as the planner wants them.
func (b *broker) tierConfig(topic string) tier.Config {
	img := b.quorum.Image()
	var own map[string]string
	if t, ok := img.Topics[topic]; ok {
		own = t.Configs
	}
	return tierConfig(config.TopicValues(config.TopicDefaults(b.config()), own))
}

// checkBucket tries the bucket once at start and says what is wrong with it. The broker serves meanwhile, and uploads are
// tried again by themselves.
func (b *broker) checkBucket(ctx context.Context) {
	for pause := time.Second; ; pause = min(2*pause, time.Minute) {
		report, err := objstore.Check(ctx, b.tier.bucket)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			for _, note := range report.Notes {
				b.log.Warn("bucket: " + note)
			}
			b.log.Info("bucket is usable", "bucket", b.tier.bucket.String(), "create-only", report.CreateOnly)
			return
		}
		b.log.Error("bucket cannot be used: nothing is tiered until it can", "bucket", b.tier.bucket.String(), "cause", err, "next try", pause.String())
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// close ends reads of the bucket; a store that does not let go is left behind.
func (t *tierParts) close(limit time.Duration) {
	done := make(chan struct{})
	go func() {
		t.reader.Close()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(limit):
	}
}

// copyMetrics count uploads and deletions under the names of KIP-405 and KIP-963.
type copyMetrics struct {
	bytes, requests, errors, deletes, deleteErrors *prometheus.CounterVec
}

func newCopyMetrics() *copyMetrics {
	vec := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kafka_server_brokertopicmetrics_" + name + "_total", Help: help}, []string{"topic"})
	}
	m := &copyMetrics{
		bytes:    vec("remotecopybytes", "Bytes of segments copied to the tier."),
		requests: vec("remotecopyrequests", "Uploads that began."), errors: vec("remotecopyerrors", "Uploads that failed."),
		deletes: vec("remotedeleterequests", "Remote segments deleted."), deleteErrors: vec("remotedeleteerrors", "Deletions of remote segments that failed."),
	}
	for _, v := range []*prometheus.CounterVec{m.bytes, m.requests, m.errors, m.deletes, m.deleteErrors} {
		v.WithLabelValues("") // present from the start
	}
	return m
}

func (m *copyMetrics) all() []*prometheus.CounterVec {
	return []*prometheus.CounterVec{m.bytes, m.requests, m.errors, m.deletes, m.deleteErrors}
}

// Describe implements prometheus.Collector.
func (m *copyMetrics) Describe(c chan<- *prometheus.Desc) {
	for _, v := range m.all() {
		v.Describe(c)
	}
}

// Collect implements prometheus.Collector.
func (m *copyMetrics) Collect(c chan<- prometheus.Metric) {
	for _, v := range m.all() {
		v.Collect(c)
	}
}

// forget drops the series of a topic that was deleted.
func (m *copyMetrics) forget(topic string) {
	for _, v := range m.all() {
		v.DeleteLabelValues(topic)
	}
}

func (m *copyMetrics) observe(e tiering.Event) {
	switch {
	case e.Err != nil && e.Deleting:
		m.deleteErrors.WithLabelValues(e.Topic).Inc()
	case e.Err != nil:
		m.errors.WithLabelValues(e.Topic).Inc()
	case e.Started:
		m.requests.WithLabelValues(e.Topic).Inc()
	case e.Deleted > 0:
		m.deletes.WithLabelValues(e.Topic).Add(float64(e.Deleted))
	default:
		m.bytes.WithLabelValues(e.Topic).Add(float64(e.Copied))
	}
}

// gauges reports the state of partitions at the time of a scrape.
func (b *broker) gauges() prometheus.Collector { return gauges{b} }

type gauges struct{ b *broker }

var (
	descPartitions = prometheus.NewDesc("kafka_server_replicamanager_partitioncount", "Partitions of this broker.", nil, nil)
	descLeaders    = prometheus.NewDesc("kafka_server_replicamanager_leadercount", "Partitions that this broker leads.", nil, nil)
	descOffline    = prometheus.NewDesc("kafka_server_replicamanager_offlinereplicacount", "Partitions whose log cannot be used.", nil, nil)
	descLagBytes   = prometheus.NewDesc("kafka_server_brokertopicmetrics_remotecopylagbytes", "Bytes that are sealed and not in the tier yet (KIP-963).", []string{"topic"}, nil)
	descLagCount   = prometheus.NewDesc("kafka_server_brokertopicmetrics_remotecopylagsegments", "Segments that are sealed and not in the tier yet (KIP-963).", []string{"topic"}, nil)
	descRemote     = prometheus.NewDesc("kafka_server_brokertopicmetrics_remotelogsizebytes", "Bytes of readable remote segments (KIP-963).", []string{"topic"}, nil)
	descCount      = prometheus.NewDesc("kafka_server_brokertopicmetrics_remotelogmetadatacount", "Remote segments in any state (KIP-963).", []string{"topic"}, nil)
	descSpan       = prometheus.NewDesc("varve_replica_local_bytes", "Bytes of this broker's replica of a tiered partition: its local span, which decides how readily it is made leader (KIP-1303).", []string{"topic", "partition"}, nil)
	descThin       = prometheus.NewDesc("varve_replica_thin_count", "Replicas of this broker that hold too little locally to be preferred as leader.", nil, nil)
	descUnder      = prometheus.NewDesc("kafka_server_replicamanager_underreplicatedpartitions", "Partitions led here with fewer in sync than replicas.", nil, nil)
	descUnderMin   = prometheus.NewDesc("kafka_server_replicamanager_underminisrpartitioncount", "Partitions led here with fewer in sync than min.insync.replicas: writes for all replicas are refused.", nil, nil)
	descLag        = prometheus.NewDesc("kafka_server_replicafetchermanager_maxlag", "Offsets by which the furthest follower of a partition led here is behind.", nil, nil)
	descLate       = prometheus.NewDesc("kafka_server_replicamanager_partitionswithlatetransactionscount", "Partitions led here with a transaction that is open longer than any may be: readers of committed records, the tier and compaction stand still there (KIP-664).", nil, nil)
	descDeleting   = prometheus.NewDesc("varve_remote_deleting_topics", "Deleted topics whose objects are not gone yet.", nil, nil)
)

// Describe implements prometheus.Collector.
func (g gauges) Describe(c chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descPartitions, descLeaders, descOffline, descLagBytes, descLagCount, descRemote, descCount, descDeleting, descSpan, descThin, descUnder, descUnderMin, descLag, descLate} {
		c <- d
	}
}

// Collect implements prometheus.Collector.
func (g gauges) Collect(c chan<- prometheus.Metric) {
	type tierSums struct{ lagBytes, lagCount, size, count int64 }
	parts, leaders, offline := 0, 0, 0
	thin, under, underMin, late, lag := 0, 0, 0, 0, int64(0)
	now := time.Now()
	gauge := func(d *prometheus.Desc, v int64, labels ...string) {
		c <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	sums := map[string]*tierSums{"": {}}
	for _, p := range g.b.replicas.all() {
		parts++
		if p.Cause() != nil {
			offline++
		}
		if _, is := g.b.late(p, now); is {
			late++
		}
		role := p.Role()
		if role.Leader == g.b.self {
			leaders++
			if len(role.ISR) < len(role.Replicas) {
				under++
			}
			if len(role.ISR) < min(role.MinISR, len(role.Replicas)) {
				underMin++
			}
			if marks, err := p.Offsets(-1); err == nil {
				for _, f := range p.Followers() {
					lag = max(lag, marks.End-max(f.End, marks.LogStart))
				}
			}
		}
		if l := p.Log(); l != nil && l.Config().Tiered {
			gauge(descSpan, l.Offsets().Size, p.ID().Topic, strconv.Itoa(int(p.ID().Index)))
			if g.b.isThin(p) {
				thin++
			}
		}
		s := g.b.tieringOf()
		if s == nil {
			continue
		}
		if lag, ok := s.Lag(p.ID()); ok {
			sum := sums[p.ID().Topic]
			if sum == nil {
				sum = &tierSums{}
				sums[p.ID().Topic] = sum
			}
			remote := p.Remote()
			for _, t := range []*tierSums{sum, sums[""]} {
				t.lagBytes, t.lagCount = t.lagBytes+lag.Bytes, t.lagCount+lag.Segments
				t.size, t.count = t.size+remote.Bytes(), t.count+int64(len(remote))
			}
		}
	}
	gauge(descThin, int64(thin))
	gauge(descUnder, int64(under))
	gauge(descUnderMin, int64(underMin))
	gauge(descLag, lag)
	gauge(descLate, int64(late))
	gauge(descPartitions, int64(parts))
	gauge(descLeaders, int64(leaders))
	gauge(descOffline, int64(offline))
	img := g.b.quorum.Image()
	gauge(descDeleting, int64(len(img.Deleting)))
	for topic, s := range sums {
		gauge(descLagBytes, s.lagBytes, topic)
		gauge(descLagCount, s.lagCount, topic)
		gauge(descRemote, s.size, topic)
		gauge(descCount, s.count, topic)
	}
}
