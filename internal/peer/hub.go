// Package peer connects nodes with each other on the Kafka port: a connection that begins with Magic is not a client's.
// The handshake tells each side who the other is; either may refuse, with a reason that names both. What follows belongs
// to the service that the dialer named.
//
// Everything is safe for concurrent use once serving has begun. Names are resolved anew at each dial.
package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// handshakeTimeout is the time that a handshake may take, the dial included.
	handshakeTimeout = 5 * time.Second
	// ConnectionsMax is how many connections of other nodes a hub serves at one time.
	ConnectionsMax = 1024
)

// Conn is a served connection, with what the dialer said.
type Conn struct {
	net.Conn
	Hello Hello
}

// Hub makes and serves connections between nodes.
type Hub struct {
	identity func() Identity
	check    func(Hello) error
	log      *slog.Logger
	dial     func(ctx context.Context, address string) (net.Conn, error)
	services map[string]func(context.Context, Conn)
	open     atomic.Int64
}

// Option changes how a hub works.
type Option func(*Hub)

// WithDialer replaces the network, which resolves the name and connects.
func WithDialer(dial func(ctx context.Context, address string) (net.Conn, error)) Option {
	return func(h *Hub) { h.dial = dial }
}

// New returns a hub without services. identity is asked at each handshake and may change over time. check may refuse the
// other side for what only the broker knows, nil refuses nobody; it is asked on both sides of a connection, on the dialer's with
// the identity that answered.
func New(identity func() Identity, check func(Hello) error, log *slog.Logger, options ...Option) *Hub {
	if check == nil {
		check = func(Hello) error { return nil }
	}
	h := &Hub{identity: identity, check: check, log: log, services: map[string]func(context.Context, Conn){}}
	dialer := &net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 3}}
	h.dial = func(ctx context.Context, address string) (net.Conn, error) {
		return dialer.DialContext(ctx, "tcp", address)
	}
	for _, o := range options {
		o(h)
	}
	return h
}

// Handle registers a service, before Serve is called. serve owns the connection until it returns; it is closed then, and
// when ctx ends.
func (h *Hub) Handle(service string, serve func(context.Context, Conn)) { h.services[service] = serve }

// Serve takes a connection whose Magic has not been read yet, and blocks until it is done. The error says why there was no
// service, nil if there was one.
func (h *Hub) Serve(ctx context.Context, nc net.Conn) error {
	defer nc.Close()
	defer h.open.Add(-1)
	if h.open.Add(1) > ConnectionsMax {
		return fmt.Errorf("%d connections of other nodes are open already", ConnectionsMax)
	}
	stop := context.AfterFunc(ctx, func() { nc.Close() })
	defer stop()
	nc.SetDeadline(time.Now().Add(handshakeTimeout))
	hello, err := readHello(nc)
	if err != nil {
		return fmt.Errorf("handshake with %s: %w", nc.RemoteAddr(), err)
	}
	self := h.identity()
	serve, refused := h.admit(self, hello)
	welcome := Welcome{Identity: self}
	if refused != nil {
		welcome.Refused = refused.Reason
	}
	b, err := message("", welcome)
	if err == nil {
		_, err = nc.Write(b)
	}
	if refused != nil {
		// The dialer logs it too; here it tells the operator of the other side.
		h.log.Warn("a node was refused", "peer", nc.RemoteAddr().String(), "cause", refused.Reason)
		return refused
	}
	if err != nil {
		return fmt.Errorf("handshake with %s: %w", nc.RemoteAddr(), err)
	}
	nc.SetDeadline(time.Time{})
	serve(ctx, Conn{nc, hello})
	return nil
}

func (h *Hub) admit(self Identity, hello Hello) (func(context.Context, Conn), *RefusedError) {
	if e := judgeTo(self, hello.To, self.Address); e != nil {
		e.Node, e.Address = hello.NodeID, hello.Address
		return nil, e
	}
	if e := judge(self, hello.Identity); e != nil {
		return nil, e
	}
	if err := h.check(hello); err != nil {
		return nil, &RefusedError{Node: hello.NodeID, Address: hello.Address, Reason: fmt.Sprintf("%s refused %s: %v", self, hello.Identity, err)}
	}
	if hello.Service == Probe {
		return func(context.Context, Conn) {}, nil
	}
	serve, ok := h.services[hello.Service]
	if !ok {
		return nil, &RefusedError{Node: hello.NodeID, Address: hello.Address, Reason: fmt.Sprintf("%s has no service %q for %s: is its version older?", self, hello.Service, hello.Identity)}
	}
	return serve, nil
}

// Probe is the service of a connection that is over after the handshake.
const Probe = "probe"

// Dial connects to a service of the node at address, of node to or any if that is -1. A refusal, by either side, is a
// *RefusedError, and the Welcome then still says who answered.
func (h *Hub) Dial(ctx context.Context, address string, to int32, service string) (net.Conn, Welcome, error) {
	dialing, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	nc, err := h.dial(dialing, address)
	if err != nil {
		return nil, Welcome{}, dialError(address, err)
	}
	welcome, err := h.introduce(dialing, nc, address, to, service)
	if err != nil {
		nc.Close()
		return nil, welcome, err
	}
	return nc, welcome, nil
}

func (h *Hub) introduce(ctx context.Context, nc net.Conn, address string, to int32, service string) (Welcome, error) {
	deadline, _ := ctx.Deadline()
	nc.SetDeadline(deadline)
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(interrupted)
		nc.SetDeadline(time.Unix(1, 0))
	})
	self := h.identity()
	var welcome Welcome
	b, err := message(Magic, Hello{Identity: self, Service: service, To: to})
	if err == nil {
		_, err = nc.Write(b)
	}
	if err == nil {
		err = readMessage(nc, &welcome)
	}
	if !stop() {
		<-interrupted
		if err == nil {
			err = ctx.Err()
		}
	}
	nc.SetDeadline(time.Time{})
	if err != nil {
		return Welcome{}, answerError(address, err)
	}
	// One's own judgement first: it is typed, and it sees the same two identities.
	if e := judge(self, welcome.Identity); e != nil {
		return welcome, e
	}
	if e := judgeTo(welcome.Identity, to, address); e != nil {
		return welcome, e
	}
	if welcome.Refused != "" {
		return welcome, &RefusedError{Node: welcome.NodeID, Address: address, Reason: welcome.Refused}
	}
	if err := h.check(Hello{Identity: welcome.Identity, Service: service, To: self.NodeID}); err != nil {
		return welcome, &RefusedError{Node: welcome.NodeID, Address: address, Reason: fmt.Sprintf("%s refused %s: %v", self, welcome.Identity, err)}
	}
	return welcome, nil
}

// dialError says in a few words why there is no connection.
func dialError(address string, err error) error {
	var dns *net.DNSError
	switch {
	case errors.As(err, &dns):
		return fmt.Errorf("cannot resolve %s: %w", dns.Name, err)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%s refused the connection: %w", address, err)
	case errors.Is(err, context.DeadlineExceeded) || isTimeout(err):
		return fmt.Errorf("%s does not answer: %w", address, err)
	}
	return fmt.Errorf("connect to %s: %w", address, err)
}

func answerError(address string, err error) error {
	switch {
	case errors.Is(err, errGarbage):
		return fmt.Errorf("%s does not answer as a Varve node does: %w", address, err)
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET):
		return fmt.Errorf("%s closed the connection instead of answering: is it a Varve node, of a version that has peers? %w", address, err)
	case isTimeout(err):
		return fmt.Errorf("%s does not answer: %w", address, err)
	}
	return fmt.Errorf("handshake with %s: %w", address, err)
}

func isTimeout(err error) bool {
	var timeout interface{ Timeout() bool }
	return errors.As(err, &timeout) && timeout.Timeout()
}
