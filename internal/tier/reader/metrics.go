package reader

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/varve-io/varve/internal/objstore"
)

// Metrics of remote reads. All series exist from the start.
type Metrics struct {
	lookups   *prometheus.CounterVec
	failures  *prometheus.CounterVec
	fetched   prometheus.Counter
	abandoned prometheus.Counter
	busy      prometheus.Counter
}

// NewMetrics creates the metrics and registers them with reg, which may be nil.
func NewMetrics(reg prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		lookups: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "varve_tier_cache_lookups_total",
			Help: "Look-ups of pieces of remote segments by kind of piece and whether they were cached."}, []string{"piece", "cached"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "varve_tier_fetch_failures_total",
			Help: "Failed fetches from the object store by cause."}, []string{"cause"}),
		fetched: prometheus.NewCounter(prometheus.CounterOpts{Name: "varve_tier_fetched_bytes_total",
			Help: "Stored bytes fetched from the object store."}),
		abandoned: prometheus.NewCounter(prometheus.CounterOpts{Name: "varve_tier_reads_abandoned_total",
			Help: "Reads whose caller stopped waiting; the fetch goes on into the cache."}),
		busy: prometheus.NewCounter(prometheus.CounterOpts{Name: "varve_tier_reads_refused_total",
			Help: "Fetches, read-ahead included, that were not started because too many were under way."}),
	}
	for k := kindManifest; k <= kindBlock; k++ {
		m.lookups.WithLabelValues(k.String(), "yes")
		m.lookups.WithLabelValues(k.String(), "no")
	}
	for _, cause := range []string{"gone", "corrupt", "closed", "access", "throttled", "error"} {
		m.failures.WithLabelValues(cause)
	}
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.lookups, m.failures, m.fetched, m.abandoned, m.busy} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (k kind) String() string { return [...]string{"manifest", "index", "block"}[k] }

func (m *Metrics) hit(k kind)  { m.lookups.WithLabelValues(k.String(), "yes").Inc() }
func (m *Metrics) miss(k kind) { m.lookups.WithLabelValues(k.String(), "no").Inc() }

func (m *Metrics) failed(err error) {
	cause := "error"
	switch {
	case errors.Is(err, ErrSegmentGone):
		cause = "gone"
	case errors.Is(err, ErrCorrupt):
		cause = "corrupt"
	case errors.Is(err, ErrClosed):
		cause = "closed"
	case errors.Is(err, objstore.ErrAccess), errors.Is(err, objstore.ErrThrottled):
		cause = objstore.Outcome(err)
	}
	m.failures.WithLabelValues(cause).Inc()
}
