package kafkaapi

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/varve-io/varve/internal/directfetch"
	"github.com/varve-io/varve/internal/tierinfo"
)

// maxReaders bounds the clients that are kept account of; the one that was not heard of for longest makes room.
const maxReaders = 1000

// maxReaderName bounds the client ids that are told apart, in bytes.
const maxReaderName = 200

// readers keeps account of who reads from the bucket: what each client was told the place of, and what it says it has read. It is a
// prometheus.Collector, and safe for concurrent use.
type readers struct {
	mu    sync.Mutex
	byKey map[readerKey]*tierinfo.Reader
}

type readerKey struct{ client, host string }

// bucketRead is what one Fetch adds.
type bucketRead struct {
	locations, granted int64
	use                directfetch.Use
}

func newReaders() *readers { return &readers{byKey: map[readerKey]*tierinfo.Reader{}} }

func (r *readers) add(client, host string, x bucketRead, now time.Time) {
	if x == (bucketRead{}) {
		return
	}
	client = strings.ToValidUTF8(client[:min(len(client), maxReaderName)], "?") // a metric's label must be
	r.mu.Lock()
	defer r.mu.Unlock()
	k := readerKey{client, host}
	e := r.byKey[k]
	if e == nil {
		if len(r.byKey) >= maxReaders {
			oldest := slices.MinFunc(slices.Collect(maps.Values(r.byKey)), func(a, b *tierinfo.Reader) int { return cmp.Compare(a.Last, b.Last) })
			delete(r.byKey, readerKey{oldest.Client, oldest.Host})
		}
		e = &tierinfo.Reader{Client: client, Host: host}
		r.byKey[k] = e
	}
	e.Locations += x.locations
	e.Granted += x.granted
	e.Requests += x.use.Requests
	e.Used += x.use.Bytes
	e.Last = now.UnixMilli()
}

// list is everyone, by client and host.
func (r *readers) list() []tierinfo.Reader {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]tierinfo.Reader, 0, len(r.byKey))
	for _, e := range r.byKey {
		out = append(out, *e)
	}
	slices.SortFunc(out, func(a, b tierinfo.Reader) int {
		return cmp.Or(cmp.Compare(a.Client, b.Client), cmp.Compare(a.Host, b.Host))
	})
	return out
}

func readerDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("varve_direct_"+name, help, []string{"client_id", "host"}, nil)
}

var (
	descLocations = readerDesc("locations_total", "Places in the bucket that a client was told.")
	descGranted   = readerDesc("granted_bytes_total", "Plain bytes behind the places that a client was told.")
	descRequests  = readerDesc("requests_total", "Ranges of objects that a client says it has read.")
	descUsed      = readerDesc("used_bytes_total", "Plain bytes of the ranges that a client says it has read.")
)

// Describe implements prometheus.Collector.
func (r *readers) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descLocations, descGranted, descRequests, descUsed} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (r *readers) Collect(ch chan<- prometheus.Metric) {
	for _, e := range r.list() {
		for d, n := range map[*prometheus.Desc]int64{descLocations: e.Locations, descGranted: e.Granted, descRequests: e.Requests, descUsed: e.Used} {
			ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), e.Client, e.Host)
		}
	}
}
