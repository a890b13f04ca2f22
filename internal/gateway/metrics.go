package gateway

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// metrics are those of a gateway.
type metrics struct {
	refused, dialErrors prometheus.Counter
	requests            *prometheus.CounterVec
	all                 []prometheus.Collector
}

func newMetrics(g *Gateway) metrics {
	m := metrics{
		refused:    prometheus.NewCounter(prometheus.CounterOpts{Name: "varve_gateway_connections_refused_total", Help: "Connections closed at once, since as many as are allowed were open."}),
		dialErrors: prometheus.NewCounter(prometheus.CounterOpts{Name: "varve_gateway_dial_errors_total", Help: "Clients whose broker could not be reached."}),
		requests:   prometheus.NewCounterVec(prometheus.CounterOpts{Name: "varve_gateway_requests_total", Help: "Requests of clients, and of the gateway itself that looks after brokers, by API."}, []string{"api"}),
	}
	gauge := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, f)
	}
	m.all = []prometheus.Collector{m.refused, m.dialErrors, m.requests, g.cfg.Transport.Collector(),
		gauge("varve_gateway_connections", "Connections of clients.", func() float64 { return float64(g.open.Load()) }),
		gauge("varve_gateway_brokers", "Brokers that are known.", func() float64 { return float64(g.book.size()) }),
		gauge("varve_gateway_ready", "1 while a broker answers.", func() float64 {
			if g.Ready() != nil {
				return 0
			}
			return 1
		})}
	return m
}

// request counts a request. Keys that do not exist count as one, since what a client makes up must not become series.
func (m metrics) request(key int16) {
	name := "unknown"
	if kmsg.RequestForKey(key) != nil {
		name = kmsg.NameForKey(key)
	}
	m.requests.WithLabelValues(name).Inc()
}

// Describe implements prometheus.Collector.
func (m metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.all {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (m metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.all {
		c.Collect(ch)
	}
}
