// Package server owns listeners and connections: it cuts the byte stream into frames, hands them to a Handler and writes
// the replies in the order of the requests. It knows no API.
//
// Each connection has two goroutines. The reader takes frames off the socket and calls Handler.Start, so that appends of
// one connection happen in arrival order; the writer calls the finishers in the same order, waits where they wait, and
// writes. A waiting answer therefore never stops the reading of the next request, up to a bound.
package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/varve-io/varve/internal/wire"
)

// Handler serves requests. Start must not wait; it may use frame until the finisher has returned, except that the frame of
// a request with key 0 (Produce) is taken back as soon as Start returns. An error closes the connection.
type Handler interface {
	Start(ctx context.Context, peer *wire.Peer, frame []byte) (wire.Finish, error)
}

// Limits bound what peers may cost. All are required.
type Limits struct {
	FrameMax       int           // socket.request.max.bytes
	ConnectionsMax int           // max.connections
	Idle           time.Duration // connections.max.idle.ms
}

// InFlightMax bounds the requests of one connection that have started and are not answered.
const InFlightMax = 128

// Metrics hears of connections; any field may be nil.
type Metrics struct {
	Connections func(delta int)
	Refused     func()
}

// Server accepts connections on any number of listeners.
type Server struct {
	handler Handler
	limits  Limits
	log     *slog.Logger
	metrics Metrics
	open    atomic.Int64
	lines   *perPeer
	nodes   func(listener string, nc net.Conn)
	ready   chan struct{} // closed by Admit

	mu       sync.Mutex
	conns    map[*conn]struct{}
	draining bool
}

// New makes a server that serves nothing yet. Connections of other nodes are handed to nodes as they are, from their first
// byte on; it takes them over and must not wait. With nil they are strangers.
func New(h Handler, l Limits, log *slog.Logger, m Metrics, nodes func(listener string, nc net.Conn)) *Server {
	return &Server{handler: h, limits: l, log: log, metrics: m, conns: map[*conn]struct{}{}, lines: newPerPeer(), nodes: nodes, ready: make(chan struct{})}
}

// Admit lets clients in. Until then they wait, as they would for a port that is bound and not served; nodes do not. Call it once.
func (s *Server) Admit() { close(s.ready) }

// Serve accepts connections on ln until ctx ends or the listener fails, then waits until its connections are gone.
// When ctx ends, connections finish what they have started, within the grace that the caller gives through Drain.
func (s *Server) Serve(ctx context.Context, name string, ln net.Listener) error {
	group, connCtx := errgroup.WithContext(context.WithoutCancel(ctx))
	connCtx, cancel := context.WithCancel(connCtx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { ln.Close() })
	defer stop()
	var failed error
	for {
		c, err := ln.Accept()
		if err != nil {
			if ctx.Err() == nil && !errors.Is(err, net.ErrClosed) {
				if temporary(err) {
					s.log.Warn("accept failed, trying again", "listener", name, "cause", err)
					time.Sleep(10 * time.Millisecond)
					continue
				}
				failed = fmt.Errorf("accept on %s: %w", name, err)
			}
			break
		}
		if s.open.Load() >= int64(s.limits.ConnectionsMax) {
			if s.metrics.Refused != nil {
				s.metrics.Refused()
			}
			s.log.Warn("connection refused: max.connections are open", "peer", c.RemoteAddr().String(), "max.connections", s.limits.ConnectionsMax)
			c.Close()
			continue
		}
		s.count(1)
		group.Go(func() error {
			defer s.count(-1)
			s.serve(connCtx, c, &wire.Peer{Listener: name, Node: wire.NoNode})
			return nil
		})
	}
	s.stopReading()
	return errors.Join(failed, group.Wait())
}

func (s *Server) count(delta int) {
	s.open.Add(int64(delta))
	if s.metrics.Connections != nil {
		s.metrics.Connections(delta)
	}
}

// stopReading lets every connection finish what it has read and no more.
func (s *Server) stopReading() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining = true
	for c := range s.conns {
		c.drain()
	}
}

// CloseAll ends every connection at once, whatever it waits for.
func (s *Server) CloseAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining = true
	for c := range s.conns {
		c.abort()
	}
}

// ServeNode serves Kafka on a connection of another node, whose identity is known, until it ends. listener is the one that
// it came by.
func (s *Server) ServeNode(ctx context.Context, nc net.Conn, listener string, node int32) {
	s.serve(ctx, nc, &wire.Peer{Listener: listener, Node: node})
}

func (s *Server) serve(ctx context.Context, nc net.Conn, peer *wire.Peer) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c := newConn(s, peer, nc, cancel)
	s.mu.Lock()
	s.conns[c] = struct{}{}
	if s.draining {
		c.drain()
	}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
	}()
	if err := c.run(ctx); err != nil && s.lines.allow(c.peer.Host()+cause(err), time.Now()) {
		s.log.Warn("connection closed", "peer", nc.RemoteAddr().String(), "listener", peer.Listener, "cause", err)
	}
}

func temporary(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && !errors.Is(err, net.ErrClosed)
}

// errFrame is a size that no request has.
var errFrame = errors.New("frame")

// cause is what errors have in common that differ only in what a peer sent: one line about it is enough.
func cause(err error) string {
	for _, kind := range []error{errFrame, wire.ErrMalformed} {
		if errors.Is(err, kind) {
			return kind.Error()
		}
	}
	return err.Error()
}

// perPeer lets one line per peer and cause through in a minute.
type perPeer struct {
	mu   sync.Mutex
	last map[string]time.Time
}

func newPerPeer() *perPeer { return &perPeer{last: map[string]time.Time{}} }

func (p *perPeer) allow(key string, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t, ok := p.last[key]; ok && now.Sub(t) < time.Minute {
		return false
	}
	if len(p.last) >= 1024 { // forget all rather than grow with the number of peers
		clear(p.last)
	}
	p.last[key] = now
	return true
}
