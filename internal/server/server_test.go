package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/varve-io/varve/internal/wire"
)

func TestFramesInAnyPieces(t *testing.T) {
	r := serve(t, echo, nil)
	c := r.dial()
	all := append(framed("one"), framed(strings.Repeat("x", 100_000))...)
	for _, b := range all[:40] {
		r.write(c, []byte{b})
	}
	r.write(c, all[40:])
	r.expect(c, "one")
	r.expect(c, strings.Repeat("x", 100_000))
	// One byte is a frame too.
	r.write(c, framed("z"))
	r.expect(c, "z")
}

// A peer that goes away in mid frame loses its request and nothing else.
func TestHalfAFrame(t *testing.T) {
	r := serve(t, echo, nil)
	other := r.dial()
	for _, b := range [][]byte{{0, 0}, {0, 0, 0, 9, 1}, framed(strings.Repeat("x", 3<<20))[:2<<20]} {
		c := r.dial()
		r.write(c, b)
		c.Close()
		r.changed(-1)
	}
	r.write(other, framed("still here"))
	r.expect(other, "still here")
	if n := r.lines.with("connection closed"); n != 0 {
		t.Errorf("%d lines about peers that went away", n)
	}
}

func TestSizesThatNobodySends(t *testing.T) {
	r := serve(t, echo, func(l *Limits) { l.FrameMax = 1000 })
	for _, size := range []string{"\x7f\xff\xff\xff", "\x80\x00\x00\x00", "\xff\xff\xff\xff", "\x00\x00\x00\x00", "\x00\x00\x03\xe9"} {
		c := r.dial()
		r.write(c, []byte(size+"abcdef"))
		r.closed(c)
		r.changed(-1)
	}
	if n := r.lines.with("socket.request.max.bytes is 1000"); n != 1 {
		t.Errorf("%d lines for one peer with wrong sizes", n)
	}
	c := r.dial()
	r.write(c, framed(strings.Repeat("x", 1000)))
	r.expect(c, strings.Repeat("x", 1000))
}

func TestOtherProtocols(t *testing.T) {
	r := serve(t, echo, nil)
	for range 3 {
		c := r.dial()
		r.write(c, []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
		r.closed(c)
		r.changed(-1)
		c = r.dial()
		if err := tls.Client(c, &tls.Config{InsecureSkipVerify: true}).Handshake(); err == nil {
			t.Error("handshake succeeded")
		}
		r.changed(-1)
	}
	for _, what := range []string{"an HTTP request", "a TLS hello on a PLAINTEXT listener"} {
		if n := r.lines.with("this is no Kafka client: it sent " + what); n != 1 {
			t.Errorf("%s: %d lines instead of one for the peer", what, n)
		}
	}
}

func TestRandomBytes(t *testing.T) {
	refuse := func(context.Context, *wire.Peer, []byte) (wire.Finish, error) {
		return nil, fmt.Errorf("%w: %d", wire.ErrMalformed, rand.Int())
	}
	r := serve(t, refuse, nil)
	random := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		c := r.dial()
		b := make([]byte, 1+random.IntN(300))
		for i := range b {
			b[i] = byte(random.Int())
		}
		if random.IntN(2) == 0 {
			copy(b, "\x00\x00\x00\x08") // a frame of a sane size
		}
		r.write(c, b)
		c.(*net.TCPConn).CloseWrite()
		r.closed(c)
		r.changed(-1)
	}
	if n := r.lines.with("connection closed"); n > 4 {
		t.Errorf("%d lines about one peer", n)
	}
}

// Answers go out in the order of the requests, and a slow first one does not keep later ones from starting.
func TestPipelining(t *testing.T) {
	const n = 20
	started, first := make(chan string, n), make(chan struct{})
	r := serve(t, func(ctx context.Context, p *wire.Peer, frame []byte) (wire.Finish, error) {
		body := string(frame)
		started <- body
		return func(ctx context.Context) wire.Reply {
			if body == "0" {
				<-first
			}
			return wire.Reply{Chunks: []wire.Chunk{{Bytes: framed(body)}}}
		}, nil
	}, nil)
	c := r.dial()
	for i := range n {
		r.write(c, framed(fmt.Sprint(i)))
	}
	for i := range n {
		if got := <-started; got != fmt.Sprint(i) {
			t.Fatalf("%s started as number %d", got, i)
		}
	}
	close(first)
	for i := range n {
		r.expect(c, fmt.Sprint(i))
	}
}

// A request without an answer (acks=0), by either way, takes no place among the answers.
func TestNothingToAnswer(t *testing.T) {
	r := serve(t, func(ctx context.Context, p *wire.Peer, frame []byte) (wire.Finish, error) {
		switch string(frame) {
		case "nil":
			return nil, nil
		case "empty":
			return func(context.Context) wire.Reply { return wire.Reply{} }, nil
		}
		return echo(ctx, p, frame)
	}, nil)
	c := r.dial()
	for range 2 * InFlightMax {
		r.write(c, framed("nil"))
		r.write(c, framed("empty"))
	}
	r.write(c, framed("answer"))
	r.expect(c, "answer")
}

// Beyond InFlightMax a peer is not read from.
func TestInFlightIsBounded(t *testing.T) {
	started, release := make(chan struct{}, 10*InFlightMax), make(chan struct{})
	r := serve(t, func(context.Context, *wire.Peer, []byte) (wire.Finish, error) {
		started <- struct{}{}
		return func(context.Context) wire.Reply {
			<-release
			return wire.Reply{Chunks: []wire.Chunk{{Bytes: framed("x")}}}
		}, nil
	}, nil)
	c := r.dial()
	const sent = 3 * InFlightMax
	for range sent {
		r.write(c, framed("x"))
	}
	for range InFlightMax + 2 { // the queue, one in the writer, one before the queue
		<-started
	}
	select {
	case <-started:
		t.Error("more were started")
	default:
	}
	close(release)
	for range sent {
		r.expect(c, "x")
	}
}

func TestMaxConnections(t *testing.T) {
	r := serve(t, echo, func(l *Limits) { l.ConnectionsMax = 2 })
	a, b := r.dial(), r.dial()
	third, err := net.Dial("tcp", r.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer third.Close()
	r.closed(third)
	if r.lines.with("max.connections") != 1 {
		t.Error("not said")
	}
	a.Close()
	r.changed(-1)
	fourth := r.dial()
	for _, c := range []net.Conn{b, fourth} {
		r.write(c, framed("hi"))
		r.expect(c, "hi")
	}
}

func TestHandlerErrorClosesOnlyItsConnection(t *testing.T) {
	r := serve(t, func(ctx context.Context, p *wire.Peer, frame []byte) (wire.Finish, error) {
		switch string(frame) {
		case "error":
			return nil, errors.New("cannot be read")
		case "panic":
			panic("in start")
		case "late panic":
			return func(context.Context) wire.Reply { panic("in finish") }, nil
		case "hang up":
			return func(context.Context) wire.Reply { return wire.Hangup("because") }, nil
		}
		return echo(ctx, p, frame)
	}, nil)
	other := r.dial()
	for _, what := range []string{"error", "panic", "late panic", "hang up"} {
		c := r.dial()
		r.write(c, framed(what))
		r.closed(c)
		r.changed(-1)
	}
	for _, line := range []string{"cannot be read", "in start", "in finish", "because"} {
		if r.lines.with(line) == 0 {
			t.Errorf("no line with %q", line)
		}
	}
	r.write(other, framed("alive"))
	r.expect(other, "alive")
}

// Draining answers what was started and takes nothing new.
func TestDrain(t *testing.T) {
	started, release := make(chan struct{}, 10), make(chan struct{})
	r := serve(t, func(ctx context.Context, p *wire.Peer, frame []byte) (wire.Finish, error) {
		body := string(frame)
		started <- struct{}{}
		return func(context.Context) wire.Reply {
			<-release
			return wire.Reply{Chunks: []wire.Chunk{{Bytes: framed(body)}}}
		}, nil
	}, nil)
	idle, busy, half := r.dial(), r.dial(), r.dial()
	r.write(busy, framed("a"))
	r.write(busy, framed("b"))
	r.write(half, framed("c"))
	<-started
	<-started
	<-started
	r.write(half, []byte{0, 0, 0, 5, 'x'})
	stopped := make(chan struct{})
	go func() { r.stop(); close(stopped) }()
	r.closed(idle)
	r.changed(-1)
	close(release)
	r.expect(busy, "a")
	r.expect(busy, "b")
	r.closed(busy)
	r.expect(half, "c")
	r.closed(half)
	<-stopped
	if _, err := net.Dial("tcp", r.addr); err == nil {
		t.Error("the listener is still open")
	}
	if len(started) != 0 {
		t.Error("something was started while draining")
	}
}

func TestCloseAllWaitsForNobody(t *testing.T) {
	started := make(chan struct{}, 1)
	r := serve(t, func(context.Context, *wire.Peer, []byte) (wire.Finish, error) {
		return func(ctx context.Context) wire.Reply {
			started <- struct{}{}
			<-ctx.Done()
			return wire.Reply{}
		}, nil
	}, nil)
	c := r.dial()
	r.write(c, framed("x"))
	<-started
	r.server.CloseAll()
	r.closed(c)
	r.stop()
}

// pipes is a listener of connections in memory.
type pipes struct {
	c    chan net.Conn
	done chan struct{}
}

type pipeAddr struct{}

func (pipeAddr) Network() string { return "pipe" }
func (pipeAddr) String() string  { return "10.0.0.1:1" }

func (p pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.c:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}
func (p pipes) Close() error   { close(p.done); return nil }
func (p pipes) Addr() net.Addr { return pipeAddr{} }

func TestIdleConnectionsAreClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ln := pipes{make(chan net.Conn), make(chan struct{})}
		release := make(chan struct{})
		r := serveOn(t, ln, func(ctx context.Context, p *wire.Peer, frame []byte) (wire.Finish, error) {
			return func(context.Context) wire.Reply {
				<-release
				return wire.Reply{Chunks: []wire.Chunk{{Bytes: framed("late")}}}
			}, nil
		}, func(l *Limits) { l.Idle = 10 * time.Minute })
		start := time.Now()
		idle, theirs := net.Pipe()
		ln.c <- theirs
		waiting, theirs := net.Pipe()
		ln.c <- theirs
		r.write(waiting, framed("x"))
		if _, err := idle.Read(make([]byte, 1)); !errors.Is(err, io.EOF) || time.Since(start) != 10*time.Minute {
			t.Errorf("%v after %s", err, time.Since(start))
		}
		// One that waits for its answer is not idle, however long it takes.
		time.Sleep(time.Hour)
		close(release)
		r.expect(waiting, "late")
		r.closed(waiting)
		if since := time.Since(start); since < 70*time.Minute || since > 90*time.Minute {
			t.Errorf("closed after %s", since)
		}
		if r.lines.with("connection closed") != 0 {
			t.Error("idling is ordinary")
		}
		r.stop()
	})
}

// hooked is a connection that lets the test act just before its read deadline moves into the future.
type hooked struct {
	net.Conn
	hook func()
}

func (h *hooked) SetReadDeadline(at time.Time) error {
	if f := h.hook; f != nil && at.After(time.Now()) {
		h.hook = nil
		f()
	}
	return h.Conn.SetReadDeadline(at)
}

// Draining is not undone by a reader that is about to wait for its next request.
func TestDrainMeetsAReaderThatBeginsToWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ln := pipes{make(chan net.Conn), make(chan struct{})}
		r := serveOn(t, ln, echo, nil)
		ours, theirs := net.Pipe()
		start := time.Now()
		ln.c <- &hooked{theirs, func() { r.server.stopReading() }}
		if _, err := ours.Read(make([]byte, 1)); !errors.Is(err, io.EOF) || time.Since(start) != 0 {
			t.Errorf("%v after %s", err, time.Since(start))
		}
		r.stop()
	})
}
