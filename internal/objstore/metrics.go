package objstore

import (
	"context"
	"io"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics counts operations by outcome, and their time and bytes. One may serve several buckets.
type Metrics struct {
	operations *prometheus.CounterVec
	bytes      *prometheus.CounterVec
	seconds    *prometheus.HistogramVec
}

// NewMetrics creates the metrics and registers them with reg, which may be nil. Series of successes exist at once.
func NewMetrics(reg prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		operations: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "varve_objstore_operations_total",
			Help: "Object store requests by operation and outcome."}, []string{"operation", "outcome"}),
		bytes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "varve_objstore_bytes_total",
			Help: "Bytes of object bodies sent (put) and received (get)."}, []string{"operation"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "varve_objstore_operation_seconds",
			Help:    "Time of object store requests; of a get until its body is closed.",
			Buckets: []float64{.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30}}, []string{"operation"}),
	}
	for _, op := range []string{"put", "get", "stat", "list", "delete", "presign", "list_uploads", "abort_upload"} {
		m.operations.WithLabelValues(op, "ok")
		m.seconds.WithLabelValues(op)
	}
	m.bytes.WithLabelValues("put")
	m.bytes.WithLabelValues("get")
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.operations, m.bytes, m.seconds} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// WithMetrics counts what happens to b.
func WithMetrics(b Bucket, m *Metrics) Bucket { return &measured{b, m} }

type measured struct {
	b Bucket
	m *Metrics
}

func (m *measured) done(op string, start time.Time, err error) error {
	m.m.operations.WithLabelValues(op, Outcome(err)).Inc()
	m.m.seconds.WithLabelValues(op).Observe(time.Since(start).Seconds())
	return err
}

func (m *measured) String() string { return m.b.String() }

func (m *measured) Put(ctx context.Context, key string, body io.ReaderAt, size int64, opts PutOptions) error {
	start := time.Now()
	err := m.done("put", start, m.b.Put(ctx, key, body, size, opts))
	if err == nil {
		m.m.bytes.WithLabelValues("put").Add(float64(size))
	}
	return err
}

func (m *measured) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	start := time.Now()
	r, err := m.b.Get(ctx, key, off, n)
	if err != nil {
		return nil, m.done("get", start, err)
	}
	return &measuredBody{r, m, start, nil}, nil
}

type measuredBody struct {
	io.ReadCloser
	m     *measured
	start time.Time
	err   error
}

func (b *measuredBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.m.m.bytes.WithLabelValues("get").Add(float64(n))
	if err != nil && err != io.EOF {
		b.err = err
	}
	return n, err
}

func (b *measuredBody) Close() error {
	if !b.start.IsZero() {
		_ = b.m.done("get", b.start, b.err)
		b.start = time.Time{}
	}
	return b.ReadCloser.Close()
}

func (m *measured) Stat(ctx context.Context, key string) (Info, error) {
	start := time.Now()
	info, err := m.b.Stat(ctx, key)
	return info, m.done("stat", start, err)
}

func (m *measured) List(ctx context.Context, prefix, after string, fn func(Info) error) error {
	start := time.Now()
	var own error
	err := m.b.List(ctx, prefix, after, func(info Info) error {
		own = fn(info)
		return own
	})
	if own != nil { // the caller's wish, not the store's failure
		_ = m.done("list", start, nil)
		return own
	}
	return m.done("list", start, err)
}

func (m *measured) Delete(ctx context.Context, key string) error {
	start := time.Now()
	return m.done("delete", start, m.b.Delete(ctx, key))
}

func (m *measured) PresignGet(ctx context.Context, key string, ttl time.Duration) (string, error) {
	start := time.Now()
	u, err := m.b.PresignGet(ctx, key, ttl)
	return u, m.done("presign", start, err)
}

func (m *measured) ListUploads(ctx context.Context, prefix string, fn func(Upload) error) error {
	start := time.Now()
	return m.done("list_uploads", start, ListUploads(ctx, m.b, prefix, fn))
}

func (m *measured) AbortUpload(ctx context.Context, u Upload) error {
	start := time.Now()
	return m.done("abort_upload", start, AbortUpload(ctx, m.b, u))
}
