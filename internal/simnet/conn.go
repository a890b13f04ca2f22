package simnet

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// buffer is how many bytes a direction of a connection takes that have not been read.
const buffer = 256 << 10

// pair is a connection: two ends, 0 the dialer's, and a half for what each of them sends.
type pair struct {
	n     *Network
	hosts [2]string
	of    [2]*Host
	addrs [2]Addr

	mu      sync.Mutex
	changed chan struct{} // closed, and replaced, when anything below changes
	halves  [2]half
	ends    [2]end
}

// half is what one end sends.
type half struct {
	state
	chunks  []chunk
	size    int       // bytes in chunks
	last    time.Time // when the latest of what was sent arrives
	fin     bool      // no more follows the chunks
	reset   bool      // nor are the chunks worth anything
	finTime time.Time // when either arrives
	waits   time.Time // when the first of what was sent while the direction is held was sent, zero if nothing was
}

// chunk is bytes that can be read from a time on.
type chunk struct {
	at   time.Time
	data []byte
}

// end is one side's own state.
type end struct {
	closed      bool
	broken      bool // a reset has arrived
	read, write time.Time
}

// conn is one end of a pair.
type conn struct {
	p *pair
	i int
}

func (p *pair) broadcast() {
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *pair) set(d direction, s state) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.halves {
		if p.hosts[i] == d.from && p.hosts[1-i] == d.to {
			h := &p.halves[i]
			if h.held && !s.held {
				h.resend()
			}
			h.state = s
			p.broadcast()
		}
	}
}

// Pauses of TCP between two attempts to send what is not acknowledged: they double.
const (
	resendMin = 200 * time.Millisecond
	resendMax = 2 * time.Minute
)

// resend makes what was sent while the direction was held arrive at the next attempt.
func (h *half) resend() {
	if h.waits.IsZero() {
		return
	}
	at := h.waits
	for pause := resendMin; at.Before(time.Now()); pause = min(2*pause, resendMax) {
		at = at.Add(pause)
	}
	for i := range h.chunks {
		if h.chunks[i].at.Before(at) && !h.chunks[i].at.Before(h.waits) {
			h.chunks[i].at = at
		}
	}
	if (h.fin || h.reset) && h.finTime.Before(at) && !h.finTime.Before(h.waits) {
		h.finTime = at
	}
	if h.last.Before(at) {
		h.last = at
	}
	h.waits = time.Time{}
}

// kill breaks an end at once.
func (p *pair) kill(i int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ends[i].broken = true
	p.broadcast()
}

// abort closes an end as the system does when a process dies: what it sent and nobody read may be lost.
func (p *pair) abort(i int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ends[i].closed {
		return
	}
	h := &p.halves[i]
	h.reset, h.finTime = true, h.arrival()
	p.ends[i].broken = true
	p.broadcast()
}

// arrival is when what is sent now arrives: not before what was sent earlier.
func (h *half) arrival() time.Time {
	if h.held && h.waits.IsZero() {
		h.waits = time.Now()
	}
	at := time.Now().Add(h.delay)
	if at.Before(h.last) {
		at = h.last
	}
	h.last = at
	return at
}

// await waits for a change, or a time if that is not zero. It is called with p locked, and returns with it locked.
func (p *pair) await(times ...time.Time) {
	var first time.Time
	for _, t := range times {
		if !t.IsZero() && (first.IsZero() || t.Before(first)) {
			first = t
		}
	}
	changed := p.changed
	p.mu.Unlock()
	defer p.mu.Lock()
	if first.IsZero() {
		<-changed
		return
	}
	timer := time.NewTimer(time.Until(first))
	defer timer.Stop()
	select {
	case <-changed:
	case <-timer.C:
	}
}

func past(t time.Time) bool { return !t.IsZero() && !t.After(time.Now()) }

// down says why an end can do nothing any more.
func (p *pair) down(i int) error {
	in := &p.halves[1-i]
	if in.reset && !in.held && past(in.finTime) {
		p.ends[i].broken = true
	}
	switch {
	case p.ends[i].closed:
		return net.ErrClosed
	case p.ends[i].broken:
		return syscall.ECONNRESET
	}
	return nil
}

func (c *conn) failed(op string, err error) error {
	return &net.OpError{Op: op, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
}

// Read returns what has arrived.
func (c *conn) Read(b []byte) (int, error) {
	p := c.p
	p.mu.Lock()
	defer p.mu.Unlock()
	in := &p.halves[1-c.i]
	for {
		if err := p.down(c.i); err != nil {
			return 0, c.failed("read", err)
		}
		if past(p.ends[c.i].read) {
			return 0, c.failed("read", os.ErrDeadlineExceeded)
		}
		if len(b) == 0 {
			return 0, nil
		}
		var next time.Time
		switch {
		case in.held:
		case len(in.chunks) > 0:
			first := &in.chunks[0]
			if past(first.at) {
				return in.take(b, p), nil
			}
			next = first.at
		case in.fin && past(in.finTime):
			return 0, io.EOF
		case in.fin:
			next = in.finTime
		}
		if in.reset && !in.held && (next.IsZero() || in.finTime.Before(next)) {
			next = in.finTime
		}
		p.await(p.ends[c.i].read, next)
	}
}

// take reads as much as has arrived and fits.
func (h *half) take(b []byte, p *pair) (n int) {
	for n < len(b) && len(h.chunks) > 0 && past(h.chunks[0].at) {
		k := copy(b[n:], h.chunks[0].data)
		n += k
		if h.chunks[0].data = h.chunks[0].data[k:]; len(h.chunks[0].data) == 0 {
			h.chunks = h.chunks[1:]
		}
	}
	h.size -= n
	p.broadcast() // there is room
	return n
}

// Write queues bytes, and waits for room.
func (c *conn) Write(b []byte) (n int, err error) {
	p := c.p
	p.mu.Lock()
	defer p.mu.Unlock()
	out, in := &p.halves[c.i], &p.halves[1-c.i]
	for {
		if err := p.down(c.i); err != nil {
			return n, c.failed("write", err)
		}
		if past(p.ends[c.i].write) {
			return n, c.failed("write", os.ErrDeadlineExceeded)
		}
		if p.ends[1-c.i].closed && !out.held && !in.held {
			// Nobody will read it, and says so.
			p.ends[c.i].broken = true
			return n, c.failed("write", syscall.EPIPE)
		}
		if k := min(len(b)-n, buffer-out.size); k > 0 {
			out.chunks = append(out.chunks, chunk{out.arrival(), append([]byte(nil), b[n:n+k]...)})
			out.size += k
			n += k
			p.broadcast()
		}
		if n == len(b) {
			return n, nil
		}
		var next time.Time
		if in.reset && !in.held {
			next = in.finTime
		}
		p.await(p.ends[c.i].write, next)
	}
}

// Close ends both directions; what was written before still arrives.
func (c *conn) Close() error {
	p := c.p
	p.mu.Lock()
	if p.ends[c.i].closed {
		p.mu.Unlock()
		return c.failed("close", net.ErrClosed)
	}
	p.ends[c.i].closed = true
	h := &p.halves[c.i]
	if !h.reset {
		h.fin, h.finTime = true, h.arrival()
	}
	over := p.ends[1-c.i].closed
	p.broadcast()
	p.mu.Unlock()
	if over {
		p.n.forget(p)
	}
	return nil
}

// LocalAddr is this end.
func (c *conn) LocalAddr() net.Addr { return c.p.addrs[c.i] }

// RemoteAddr is the other end.
func (c *conn) RemoteAddr() net.Addr { return c.p.addrs[1-c.i] }

// SetDeadline sets both.
func (c *conn) SetDeadline(t time.Time) error {
	return c.deadline(func(e *end) { e.read, e.write = t, t })
}

// SetReadDeadline ends reads at t, those that wait included; zero ends none.
func (c *conn) SetReadDeadline(t time.Time) error { return c.deadline(func(e *end) { e.read = t }) }

// SetWriteDeadline ends writes at t; zero ends none.
func (c *conn) SetWriteDeadline(t time.Time) error { return c.deadline(func(e *end) { e.write = t }) }

func (c *conn) deadline(set func(*end)) error {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if c.p.ends[c.i].closed {
		return c.failed("set deadline", net.ErrClosed)
	}
	set(&c.p.ends[c.i])
	c.p.broadcast()
	return nil
}
