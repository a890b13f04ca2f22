// Package gateway puts a direct.Transport behind listeners, for clients in any language: a proxy that answers reads of tiered
// records from the object store. It hands out addresses of its own instead of the brokers', such that a connection to one of
// them means one broker: port First is any broker, port First + 1 + n the broker with id FirstID + n. It keeps nothing, so any
// number of gateways with the same settings stand for each other.
//
// Brokers are learned from the answers that pass. Until one is known, as after a restart, its port leads to a bootstrap broker
// for what any broker can answer; a client that asks for more is disconnected, and by then the broker is known.
package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/internal/gateway/rewrite"
)

// Config of a gateway. Zero values take the defaults in parentheses; fields without are required.
type Config struct {
	Bootstrap      []string // addresses of brokers
	Listen         string   // host to listen on (all)
	Advertise      string   // host that clients are told
	Ports          Ports
	FirstID        int32             // id of the broker whose port is the second (0)
	TLS            *tls.Config       // of the listeners (none)
	Transport      *direct.Transport // to the brokers; Run closes it
	ConnectionsMax int               // clients (10000)
	Drain          time.Duration     // how long requests under way may take when ctx ends (30 s)
	Stall          time.Duration     // how long a peer may take to go on (1 min)
	Logger         *slog.Logger      // (silence)
}

// Gateway serves clients. Its methods are safe for concurrent use.
type Gateway struct {
	cfg     Config
	log     *slog.Logger
	book    *book
	metrics metrics
	open    atomic.Int64
	turn    atomic.Uint32 // which bootstrap broker is next

	mu    sync.Mutex
	cause error // why it is not ready, nil if it is
}

// New makes a gateway that serves nothing yet.
func New(cfg Config) *Gateway {
	if cfg.ConnectionsMax == 0 {
		cfg.ConnectionsMax = 10_000
	}
	if cfg.Drain == 0 {
		cfg.Drain = 30 * time.Second
	}
	if cfg.Stall == 0 {
		cfg.Stall = time.Minute
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	g := &Gateway{cfg: cfg, log: cfg.Logger, book: newBook(), cause: errors.New("no broker has answered yet")}
	g.metrics = newMetrics(g)
	return g
}

// Ready is nil while a broker answers, else why there is nobody to serve.
func (g *Gateway) Ready() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.cause
}

func (g *Gateway) setReady(cause error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cause = cause
}

// Listen opens all ports.
func (g *Gateway) Listen() ([]net.Listener, error) {
	var all []net.Listener
	for port := g.cfg.Ports.First; port <= g.cfg.Ports.Last; port++ {
		ln, err := net.Listen("tcp", net.JoinHostPort(g.cfg.Listen, strconv.Itoa(port)))
		if err != nil {
			for _, ln := range all {
				ln.Close()
			}
			return nil, fmt.Errorf("port %d of %d-%d: %w", port, g.cfg.Ports.First, g.cfg.Ports.Last, err)
		}
		all = append(all, ln)
	}
	return all, nil
}

// Serve serves clients on the listeners, those of Listen in their order, until ctx ends and requests under way are answered or
// given up.
func (g *Gateway) Serve(ctx context.Context, listeners []net.Listener) error {
	var accepting, clients sync.WaitGroup
	stop := context.AfterFunc(ctx, func() {
		g.setReady(errors.New("the gateway stops"))
		for _, ln := range listeners {
			ln.Close()
		}
	})
	defer stop()
	failed := make(chan error, len(listeners))
	for i, ln := range listeners {
		accepting.Go(func() { failed <- g.accept(ctx, ln, i, &clients) })
	}
	probing := make(chan struct{})
	go func() {
		defer close(probing)
		g.probe(ctx)
	}()
	<-ctx.Done()
	accepting.Wait()
	close(failed)
	var err error
	for e := range failed {
		err = errors.Join(err, e)
	}
	late := time.AfterFunc(g.cfg.Drain, func() {
		g.log.Warn("requests are given up that were not answered in time", "connections", g.open.Load(), "drain-timeout", g.cfg.Drain.String())
		g.cfg.Transport.Close()
	})
	clients.Wait()
	late.Stop()
	g.cfg.Transport.Close()
	<-probing
	return err
}

// accept takes in the clients of one port.
func (g *Gateway) accept(ctx context.Context, ln net.Listener, index int, clients *sync.WaitGroup) error {
	for {
		c, err := ln.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			g.log.Warn("accept failed, trying again", "listener", ln.Addr().String(), "cause", err)
			pause(ctx, 10*time.Millisecond)
			continue
		}
		if g.open.Add(1) > int64(g.cfg.ConnectionsMax) {
			g.open.Add(-1)
			g.metrics.refused.Inc()
			g.log.Warn("connection refused: as many as are allowed are open", "peer", c.RemoteAddr().String(), "max-connections", g.cfg.ConnectionsMax)
			c.Close()
			continue
		}
		clients.Go(func() {
			defer g.open.Add(-1)
			g.client(ctx, c, index)
		})
	}
}

// handshakeMax bounds a TLS handshake.
const handshakeMax = 10 * time.Second

// client serves one connection to the port with an index.
func (g *Gateway) client(ctx context.Context, c net.Conn, index int) {
	if g.cfg.TLS != nil {
		secure := tls.Server(c, g.cfg.TLS)
		limited, cancel := context.WithTimeout(ctx, handshakeMax)
		err := secure.HandshakeContext(limited)
		cancel()
		if err != nil {
			g.log.Debug("TLS handshake failed", "peer", c.RemoteAddr().String(), "cause", err)
			c.Close()
			return
		}
		c = secure
	}
	node := int32(-1)
	if index > 0 {
		node = g.cfg.FirstID + int32(index-1)
	}
	if err := g.serve(ctx, c, node); err != nil {
		var dial *direct.DialError
		switch {
		case errors.As(err, &dial):
			g.metrics.dialErrors.Inc()
			g.log.Warn("broker cannot be reached", "broker", node, "cause", err)
		case errors.Is(err, rewrite.ErrAnswer):
			g.log.Warn("connection closed", "peer", c.RemoteAddr().String(), "broker", node, "cause", err)
		default:
			g.log.Debug("connection closed", "peer", c.RemoteAddr().String(), "broker", node, "cause", err)
		}
	}
}

// serve connects a client to a broker, to any for -1.
func (g *Gateway) serve(ctx context.Context, c net.Conn, node int32) error {
	h := direct.Hooks{Allow: g.allow, Rewrite: g.rewrite, Endpoint: g.endpoint, Stall: g.cfg.Stall}
	if address, ok := g.book.address(node); ok {
		return g.cfg.Transport.Serve(ctx, c, []string{address}, h)
	}
	if node >= 0 {
		h.Allow = func(key, version int16) bool { return g.allow(key, version) && slices.Contains(anywhere, key) }
	}
	n := len(g.cfg.Bootstrap)
	at := int(g.turn.Add(1)-1) % n
	return g.cfg.Transport.Serve(ctx, c, append(slices.Clone(g.cfg.Bootstrap[at:]), g.cfg.Bootstrap[:at]...), h)
}

const (
	saslHandshake    = 17
	saslAuthenticate = 36
)

// anywhere are the APIs that any broker answers alike.
var anywhere = []int16{rewrite.ApiVersions, saslHandshake, saslAuthenticate, rewrite.Metadata, rewrite.FindCoordinator, rewrite.DescribeCluster}

func (g *Gateway) allow(key, _ int16) bool {
	g.metrics.request(key)
	return true
}

func (g *Gateway) rewrite(key, version int16) func([]byte) ([]byte, error) {
	if !rewrite.Wanted(key, version) {
		return nil
	}
	return func(frame []byte) ([]byte, error) { return rewrite.Answer(key, version, frame, g.endpoint) }
}

// endpoint learns where a broker is and tells where clients find it.
func (g *Gateway) endpoint(node int32, host string, port int32) (string, int32, bool) {
	own, ok := g.cfg.port(node)
	if g.book.learn(node, host, port, ok) {
		if ok {
			g.log.Info("broker learned", "broker", node, "address", net.JoinHostPort(host, strconv.Itoa(int(port))), "port", own)
		} else {
			g.log.Error("broker has no port and is hidden from clients: its id is outside of what the ports begin and end with", "broker", node,
				"ids", fmt.Sprintf("%d-%d", g.cfg.FirstID, int64(g.cfg.FirstID)+int64(g.cfg.Ports.Last-g.cfg.Ports.First)-1))
		}
	}
	return g.cfg.Advertise, int32(own), ok
}

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// Collector reports the gateway's metrics and those of direct reads.
func (g *Gateway) Collector() prometheus.Collector { return g.metrics }
