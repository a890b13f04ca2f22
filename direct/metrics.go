package direct

import (
	"maps"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// counters are guarded by the Transport's mutex.
type counters struct {
	requests, bytes, served, brokerBytes, locations, rests int64
	errors, fallbacks                                      map[cause]int64
}

func newCounters() counters {
	c := counters{errors: map[cause]int64{}, fallbacks: map[cause]int64{}}
	for _, x := range causes {
		c.errors[x], c.fallbacks[x] = 0, 0
	}
	return c
}

// Stats is what a Transport has done so far, and its present state.
type Stats struct {
	Locations   int64            // locations that the broker gave and that were used
	Requests    int64            // ranges read from objects
	Bytes       int64            // plain bytes of those ranges
	Served      int64            // bytes of records handed to clients from read-ahead
	BrokerBytes int64            // bytes of records in brokers' answers; of those that pass unread, all bytes
	Errors      map[string]int64 // reads and locations that failed, by cause
	Fallbacks   map[string]int64 // offsets asked from the broker after a failure, by cause
	Rests       int64            // how often direct reads began to rest
	Buffered    int64            // bytes of read-ahead in memory
	Streams     int              // partitions with read-ahead
	Resting     bool             // direct reads rest now
}

// Snapshot returns the present Stats.
func (t *Transport) Snapshot() Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := &t.stats
	s := Stats{Locations: c.locations, Requests: c.requests, Bytes: c.bytes, Served: c.served, BrokerBytes: c.brokerBytes, Rests: c.rests,
		Errors: map[string]int64{}, Fallbacks: map[string]int64{}, Buffered: t.ahead.used, Streams: len(t.ahead.streams), Resting: t.ahead.breaker.resting(time.Now())}
	for x, n := range maps.All(c.errors) {
		s.Errors[string(x)] = n
	}
	for x, n := range maps.All(c.fallbacks) {
		s.Fallbacks[string(x)] = n
	}
	return s
}

func newLatency() prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{Name: "remote_fetch_latency_seconds", Help: "Time to read one range of an object.",
		Buckets: prometheus.ExponentialBuckets(0.002, 2, 13)})
}

// Collector reports the remote-fetch metrics of KIP-1254, for a registry.
func (t *Transport) Collector() prometheus.Collector { return collector{t} }

type collector struct{ t *Transport }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("remote_fetch_"+name, help, labels, nil)
}

var (
	descRequests  = desc("requests_total", "Ranges read from objects.")
	descBytes     = desc("bytes_total", "Plain bytes read from objects.")
	descServed    = desc("served_bytes_total", "Bytes of records handed to clients from objects.")
	descBroker    = desc("broker_bytes_total", "Bytes of records that came from brokers.")
	descErrors    = desc("errors_total", "Reads and locations that failed, by cause.", "cause")
	descFallbacks = desc("fallbacks_total", "Offsets asked from the broker after a failure, by cause.", "cause")
	descRests     = desc("rests_total", "Times that direct reads began to rest.")
	descBuffered  = desc("buffered_bytes", "Bytes of read-ahead in memory.")
	descStreams   = desc("streams", "Partitions with read-ahead.")
	descResting   = desc("resting", "1 while direct reads rest after failures.")
)

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descRequests, descBytes, descServed, descBroker, descErrors, descFallbacks, descRests, descBuffered, descStreams, descResting} {
		ch <- d
	}
	c.t.latency.Describe(ch)
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	s := c.t.Snapshot()
	count := func(d *prometheus.Desc, n int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	gauge := func(d *prometheus.Desc, n int64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n))
	}
	count(descRequests, s.Requests)
	count(descBytes, s.Bytes)
	count(descServed, s.Served)
	count(descBroker, s.BrokerBytes)
	count(descRests, s.Rests)
	for x, n := range s.Errors {
		count(descErrors, n, x)
	}
	for x, n := range s.Fallbacks {
		count(descFallbacks, n, x)
	}
	gauge(descBuffered, s.Buffered)
	gauge(descStreams, int64(s.Streams))
	resting := int64(0)
	if s.Resting {
		resting = 1
	}
	gauge(descResting, resting)
	c.t.latency.Collect(ch)
}
