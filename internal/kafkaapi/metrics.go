package kafkaapi

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/wire"
)

// Metrics count requests and bytes under the names that Kafka's own metrics get from the usual JMX exporter rules.
type Metrics struct {
	requests *prometheus.CounterVec
	errors   *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	bytesIn  *prometheus.CounterVec
	bytesOut *prometheus.CounterVec
	failed   *prometheus.CounterVec
	remote   *prometheus.CounterVec
	readers  *readers

	replicatedOut prometheus.Counter
}

// NewMetrics registers the metrics. Every series that is not by topic exists from the start.
func NewMetrics(r prometheus.Registerer) (*Metrics, error) {
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	m := &Metrics{
		requests: vec("kafka_network_requestmetrics_requests_total", "Requests answered, by API.", "request"),
		errors:   vec("kafka_network_requestmetrics_errors_total", "Partitions answered with an error, by API and Kafka error code.", "request", "error"),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "kafka_network_requestmetrics_totaltime_seconds", Help: "Time from the last byte of a request to its answer, waits included.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}}, []string{"request"}),
		bytesIn:  vec("kafka_server_brokertopicmetrics_bytesin_total", "Bytes of record batches appended for producers.", "topic"),
		bytesOut: vec("kafka_server_brokertopicmetrics_bytesout_total", "Bytes of record batches sent to consumers, remote ones included.", "topic"),
		failed:   vec("kafka_server_brokertopicmetrics_failedproducerequests_total", "Partitions of Produce requests that were refused.", "topic"),
		remote:   vec("kafka_server_brokertopicmetrics_remotefetchbytes_total", "Bytes sent to consumers that the broker read from the tier (KIP-405).", "topic"),
		readers:  newReaders(),

		replicatedOut: prometheus.NewCounter(prometheus.CounterOpts{Name: "kafka_server_brokertopicmetrics_replicationbytesout_total", Help: "Bytes of record batches sent to followers."}),
	}
	for _, c := range []prometheus.Collector{m.requests, m.errors, m.seconds, m.bytesIn, m.bytesOut, m.failed, m.remote, m.readers, m.replicatedOut} {
		if err := r.Register(c); err != nil {
			return nil, errors.Join(errors.New("register request metrics"), err)
		}
	}
	for _, e := range table() {
		m.requests.WithLabelValues(kmsg.NameForKey(e.key))
		m.seconds.WithLabelValues(kmsg.NameForKey(e.key))
	}
	return m, nil
}

func (m *Metrics) answered(h wire.Header, took time.Duration) {
	name := h.Name()
	m.requests.WithLabelValues(name).Inc()
	m.seconds.WithLabelValues(name).Observe(took.Seconds())
}

// Forget drops the series of a topic that was deleted.
func (m *Metrics) Forget(topic string) {
	for _, v := range []*prometheus.CounterVec{m.bytesIn, m.bytesOut, m.failed, m.remote} {
		v.DeleteLabelValues(topic)
	}
}
