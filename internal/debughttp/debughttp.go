// Package debughttp serves what an operator looks at: /metrics for Prometheus, /live and /ready (also /healthz and /readyz) for
// whatever restarts or routes, and on request pprof. It listens on an address of its own and knows nothing of Kafka.
package debughttp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Options of Serve.
type Options struct {
	Registry *prometheus.Registry
	Ready    func() error // nil error when the broker serves; else the cause that it does not
	Pprof    bool
}

// Serve answers on ln until ctx ends.
func Serve(ctx context.Context, ln net.Listener, o Options) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(o.Registry, promhttp.HandlerOpts{Registry: o.Registry}))
	live := func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "live") }
	ready := func(w http.ResponseWriter, _ *http.Request) {
		if err := o.Ready(); err != nil {
			http.Error(w, "not ready: "+err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ready")
	}
	for _, name := range []string{"/live", "/healthz"} {
		mux.HandleFunc("GET "+name, live)
	}
	for _, name := range []string{"/ready", "/readyz"} {
		mux.HandleFunc("GET "+name, ready)
	}
	if o.Pprof {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	stop := context.AfterFunc(ctx, func() { srv.Close() })
	defer stop()
	if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("http listener: %w", err)
	}
	return nil
}
