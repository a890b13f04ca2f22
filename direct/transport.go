package direct

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// ErrClosed is returned by DialContext after Close.
var ErrClosed = errors.New("direct: transport is closed")

// Transport makes connections to brokers and reads tiered records for whoever uses them. It is safe for concurrent use.
type Transport struct {
	cfg     Config
	active  bool
	formats []string
	latency prometheus.Histogram

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu     sync.Mutex
	closed bool
	conns  map[*conn]struct{}
	owners uint64 // connections that were served
	ahead  ahead
	stats  counters
}

// New makes a Transport. Close ends it.
func New(cfg Config) (*Transport, error) {
	cfg, err := cfg.filled()
	if err != nil {
		return nil, err
	}
	t := &Transport{cfg: cfg, conns: map[*conn]struct{}{}, stats: newCounters(), latency: newLatency(),
		ahead: ahead{streams: map[streamKey]*stream{}, byPart: map[partKey][]*stream{}, holds: map[partKey]hold{}, locals: map[partKey]local{}, finding: map[streamKey]*found{},
			breaker: breaker{after: cfg.RestAfter, min: cfg.RestMin, max: cfg.RestMax}}}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	if cfg.Enabled && cfg.Fetcher != nil {
		t.formats = slices.Clone(cfg.Fetcher.Formats())
		t.active = len(t.formats) > 0
	}
	if t.active {
		t.wg.Add(1)
		go t.janitor()
	}
	return t, nil
}

// Dial is DialContext without a context, for clients that take a proxy.Dialer (sarama's Config.Net.Proxy).
func (t *Transport) Dial(network, address string) (net.Conn, error) {
	return t.DialContext(context.Background(), network, address)
}

// DialContext connects to a broker. It is what kgo.Dialer takes. Where nothing is to be read directly, the result is the
// plain connection itself.
func (t *Transport) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	up, err := t.dial(ctx, network, address)
	if err != nil || !t.active {
		return up, err
	}
	client, server := net.Pipe()
	c := newConn(t, up, server, address)
	if !t.enter(c) {
		client.Close()
		return nil, ErrClosed
	}
	go func() {
		defer t.leave(c)
		if err := c.run(); err != nil {
			t.cfg.Logger.Debug("connection ends", "broker", address, "cause", err)
		}
	}()
	return &endpoint{Conn: client, c: c}, nil
}

// dial opens a connection to a broker, secured as configured.
func (t *Transport) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if t.ctx.Err() != nil {
		return nil, ErrClosed
	}
	up, err := t.cfg.Dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	if t.cfg.TLS != nil {
		cfg := t.cfg.TLS
		if cfg.ServerName == "" {
			host, _, err := net.SplitHostPort(address)
			if err != nil {
				up.Close()
				return nil, fmt.Errorf("direct: address %q: %w", address, err)
			}
			cfg = cfg.Clone()
			cfg.ServerName = host
		}
		secure := tls.Client(up, cfg)
		if err := secure.HandshakeContext(ctx); err != nil {
			up.Close()
			return nil, fmt.Errorf("direct: TLS with %s: %w", address, err)
		}
		up = secure
	}
	return up, nil
}

// enter counts a connection in; false, and closed, if the transport is.
func (t *Transport) enter(c *conn) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		c.shutdown()
		return false
	}
	t.conns[c] = struct{}{}
	t.wg.Add(1)
	return true
}

// leave counts a connection out.
func (t *Transport) leave(c *conn) {
	t.mu.Lock()
	delete(t.conns, c)
	if c.owner != 0 {
		for _, s := range t.ahead.streams {
			if s.key.owner == c.owner {
				t.drop(s)
			}
		}
	}
	t.mu.Unlock()
	t.wg.Done()
}

// janitor drops read-ahead that nobody wants.
func (t *Transport) janitor() {
	defer t.wg.Done()
	tick := time.NewTicker(max(t.cfg.IdleTimeout/4, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-t.ctx.Done():
			return
		case now := <-tick.C:
			t.mu.Lock()
			t.sweep(now)
			t.mu.Unlock()
		}
	}
}

// Close ends all connections and reads and waits for them. It is safe to call it again.
func (t *Transport) Close() {
	t.mu.Lock()
	t.closed = true
	for c := range t.conns {
		c.shutdown()
	}
	for _, s := range t.ahead.streams {
		t.drop(s)
	}
	t.cancel()
	t.mu.Unlock()
	t.wg.Wait()
}

// endpoint is the client's end of a connection. Its errors are those of a socket: clients tell by them whether to try again, and
// know nothing of io.ErrClosedPipe.
type endpoint struct {
	net.Conn
	c      *conn
	closed atomic.Bool
}

// Read implements net.Conn.
func (e *endpoint) Read(p []byte) (int, error) {
	n, err := e.Conn.Read(p)
	return n, e.socketError("read", err)
}

// Write implements net.Conn.
func (e *endpoint) Write(p []byte) (int, error) {
	n, err := e.Conn.Write(p)
	return n, e.socketError("write", err)
}

func (e *endpoint) socketError(op string, err error) error {
	switch {
	case err == nil || err == io.EOF:
		return err
	case errors.Is(err, io.ErrClosedPipe) && e.closed.Load():
		err = net.ErrClosed
	case errors.Is(err, io.ErrClosedPipe):
		err = os.NewSyscallError(op, syscall.EPIPE)
	}
	return &net.OpError{Op: op, Net: "tcp", Source: e.LocalAddr(), Addr: e.RemoteAddr(), Err: err}
}

func (e *endpoint) LocalAddr() net.Addr  { return e.c.up.LocalAddr() }
func (e *endpoint) RemoteAddr() net.Addr { return e.c.up.RemoteAddr() }

// Close ends the connection to the broker too.
func (e *endpoint) Close() error {
	e.closed.Store(true)
	err := e.Conn.Close()
	e.c.shutdown()
	return err
}
