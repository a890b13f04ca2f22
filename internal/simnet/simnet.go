// Package simnet is a network in memory for tests: hosts with names, listeners, and connections that behave as those of TCP
// do where programs notice. Connections between two hosts can be held up, delayed, reset, in one direction or both.
//
// It waits on channels and timers alone, and holds no lock while it waits, so that in a bubble of testing/synctest time goes
// on when all that is left is to wait for the network. Without delays nothing that it does takes time.
//
// What it does not model: loss of single packets (a direction works or holds everything back, in order, as a stream whose
// packets are sent again does), bandwidth, and keep-alives, so that an idle connection over a held direction never ends by
// itself. Acknowledgements do not travel, so that one direction works while the other is held, until a buffer is full.
//
// Everything is safe for concurrent use.
package simnet

import (
	"context"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// backlog is how many connections wait to be accepted.
const backlog = 128

// Addr is an end of a connection.
type Addr struct {
	Host string
	Port int
}

// Network is always "tcp".
func (Addr) Network() string { return "tcp" }

func (a Addr) String() string { return net.JoinHostPort(a.Host, strconv.Itoa(a.Port)) }

// direction names two hosts, in order.
type direction struct{ from, to string }

type state struct {
	held  bool
	delay time.Duration
}

// Network is where hosts live.
type Network struct {
	mu        sync.Mutex
	changed   chan struct{} // closed when a switch was moved
	names     map[string]bool
	listeners map[Addr]*listener
	states    map[direction]state
	pairs     map[*pair]struct{}
	port      int // last one that was given to a dialer
}

// New returns a network without hosts on which everything works.
func New() *Network {
	return &Network{changed: make(chan struct{}), names: map[string]bool{}, listeners: map[Addr]*listener{}, states: map[direction]state{}, pairs: map[*pair]struct{}{}, port: 32768}
}

// Hold stops what is sent from one host to another: bytes, the ends of connections, and new connections in either
// direction, wait until Release.
func (n *Network) Hold(from, to string) { n.set(from, to, func(s *state) { s.held = true }) }

// Release lets go what Hold stopped. As with TCP, what was sent meanwhile on a connection arrives when it is sent again, which
// is the later the longer the direction was held: at most two minutes after its release. New connections are made at once.
func (n *Network) Release(from, to string) { n.set(from, to, func(s *state) { s.held = false }) }

// Cut holds both directions.
func (n *Network) Cut(a, b string) {
	n.Hold(a, b)
	n.Hold(b, a)
}

// Join releases both directions.
func (n *Network) Join(a, b string) {
	n.Release(a, b)
	n.Release(b, a)
}

// Delay makes what is sent from one host to another from now on arrive so much later.
func (n *Network) Delay(from, to string, d time.Duration) {
	n.set(from, to, func(s *state) { s.delay = d })
}

func (n *Network) set(from, to string, change func(*state)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	d := direction{from, to}
	s := n.states[d]
	change(&s)
	n.states[d] = s
	for p := range n.pairs {
		p.set(d, s)
	}
	close(n.changed)
	n.changed = make(chan struct{})
}

// Reset breaks all connections between two hosts, on both sides, whatever is held.
func (n *Network) Reset(a, b string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for p := range n.pairs {
		if h := p.hosts; h == [2]string{a, b} || h == [2]string{b, a} {
			p.kill(0)
			p.kill(1)
			delete(n.pairs, p)
		}
	}
}

// Open is how many connections have an end that is not closed.
func (n *Network) Open() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.pairs)
}

// Host returns the network as a process on that host sees it.
func (n *Network) Host(name string) *Host {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.names[name] = true
	return &Host{n: n, name: name, dead: make(chan struct{})}
}

// Host is the view of one process. Two of one host share its name and its switches and nothing else.
type Host struct {
	n    *Network
	name string
	dead chan struct{}
	once sync.Once
}

// Name is the host's.
func (h *Host) Name() string { return h.name }

// Kill ends everything that the process has open, as the system does for one that dies: listeners are gone, and the other
// ends of connections are reset, as soon as that gets through. What the process itself tries from now on fails.
func (h *Host) Kill() {
	h.once.Do(func() { close(h.dead) })
	n := h.n
	n.mu.Lock()
	var gone []*listener
	for _, l := range n.listeners {
		if l.host == h {
			gone = append(gone, l)
		}
	}
	for p := range n.pairs {
		for i, of := range p.of {
			if of == h {
				p.abort(i)
			}
		}
	}
	n.mu.Unlock()
	for _, l := range gone {
		l.Close()
	}
}

func (h *Host) alive() error {
	select {
	case <-h.dead:
		return syscall.ENETDOWN
	default:
		return nil
	}
}

func parse(address string) (Addr, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return Addr{}, err
	}
	p, err := strconv.ParseUint(port, 10, 16)
	return Addr{host, int(p)}, err
}

// Listen listens on an address of the host, NAME:PORT. A port of 0 is refused: tests name their ports.
func (h *Host) Listen(address string) (net.Listener, error) {
	a, err := parse(address)
	failed := func(err error) error { return &net.OpError{Op: "listen", Net: "tcp", Addr: a, Err: err} }
	switch {
	case err != nil:
		return nil, failed(err)
	case a.Host != h.name || a.Port == 0:
		return nil, failed(syscall.EADDRNOTAVAIL)
	}
	n := h.n
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := h.alive(); err != nil {
		return nil, failed(err)
	}
	if n.listeners[a] != nil {
		return nil, failed(syscall.EADDRINUSE)
	}
	l := &listener{host: h, addr: a, queue: make(chan *conn, backlog), closed: make(chan struct{})}
	n.listeners[a] = l
	return l, nil
}

// DialContext connects. A name that is no host's is not found, a port where nobody listens is refused, and a direction that
// is held makes it wait until ctx ends.
func (h *Host) DialContext(ctx context.Context, address string) (net.Conn, error) {
	a, err := parse(address)
	failed := func(err error) error { return &net.OpError{Op: "dial", Net: "tcp", Addr: a, Err: err} }
	if err != nil {
		return nil, failed(err)
	}
	n := h.n
	for travelled := time.Duration(0); ; {
		n.mu.Lock()
		there, back := n.states[direction{h.name, a.Host}], n.states[direction{a.Host, h.name}]
		if err := h.alive(); err != nil {
			n.mu.Unlock()
			return nil, failed(err)
		}
		if !n.names[a.Host] {
			n.mu.Unlock()
			return nil, failed(&net.DNSError{Err: "no such host", Name: a.Host, IsNotFound: true})
		}
		trip := there.delay + back.delay
		if !there.held && !back.held && travelled >= trip {
			c, err := n.connect(h, a, there, back)
			n.mu.Unlock()
			if err != nil {
				return nil, failed(err)
			}
			return c, nil
		}
		changed := n.changed
		n.mu.Unlock()
		var arrives <-chan time.Time
		if !there.held && !back.held {
			arrives = time.After(trip)
			changed = nil // it is on its way
		}
		select {
		case <-changed:
		case <-arrives:
			travelled = max(trip, travelled)
		case <-h.dead:
		case <-ctx.Done():
			return nil, failed(ctx.Err())
		}
	}
}

// connect is called with n locked.
func (n *Network) connect(h *Host, a Addr, there, back state) (net.Conn, error) {
	l := n.listeners[a]
	if l == nil {
		return nil, syscall.ECONNREFUSED
	}
	n.port++
	p := &pair{n: n, hosts: [2]string{h.name, a.Host}, of: [2]*Host{h, l.host}, addrs: [2]Addr{{h.name, n.port}, a}, changed: make(chan struct{})}
	p.halves = [2]half{{state: there}, {state: back}}
	select {
	case l.queue <- &conn{p, 1}:
	default:
		return nil, syscall.ECONNREFUSED
	}
	n.pairs[p] = struct{}{}
	return &conn{p, 0}, nil
}

// forget drops a connection that is closed on both sides.
func (n *Network) forget(p *pair) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.pairs, p)
}

type listener struct {
	host   *Host
	addr   Addr
	queue  chan *conn
	closed chan struct{}
	once   sync.Once
}

// Accept waits for the next connection.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case <-l.closed:
	default:
		select {
		case c := <-l.queue:
			return c, nil
		case <-l.closed:
		}
	}
	return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: l.addr, Err: net.ErrClosed}
}

// Close frees the address, and resets what nobody accepted.
func (l *listener) Close() error {
	l.once.Do(func() {
		n := l.host.n
		n.mu.Lock()
		if n.listeners[l.addr] == l {
			delete(n.listeners, l.addr)
		}
		close(l.closed)
		n.mu.Unlock() // nobody finds it any more, so nothing more is queued
		for {
			select {
			case c := <-l.queue:
				c.p.abort(1)
				c.Close()
			default:
				return
			}
		}
	})
	return nil
}

// Addr is the address that was asked for.
func (l *listener) Addr() net.Addr { return l.addr }
