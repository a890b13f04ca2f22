package server

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/varve-io/varve/internal/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// handlerFunc is a Handler.
type handlerFunc func(ctx context.Context, peer *wire.Peer, frame []byte) (wire.Finish, error)

func (h handlerFunc) Start(ctx context.Context, peer *wire.Peer, frame []byte) (wire.Finish, error) {
	return h(ctx, peer, frame)
}

// echo answers every frame with itself.
func echo(_ context.Context, _ *wire.Peer, frame []byte) (wire.Finish, error) {
	reply := framed(string(frame))
	return func(context.Context) wire.Reply { return wire.Reply{Chunks: []wire.Chunk{{Bytes: reply}}} }, nil
}

// framed is a frame with its size.
func framed(body string) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)
}

// lines collects log lines.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) with(part string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for line := range strings.Lines(l.b.String()) {
		if strings.Contains(line, part) {
			n++
		}
	}
	return n
}

// rig is a server on a loopback port.
type rig struct {
	t      *testing.T
	server *Server
	addr   string
	lines  *lines
	stop   func() // ends serving and waits until it has ended
	gone   chan struct{}
	opened chan int
}

func serve(t *testing.T, h handlerFunc, change func(*Limits)) *rig {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return serveOn(t, ln, h, change)
}

func serveOn(t *testing.T, ln net.Listener, h handlerFunc, change func(*Limits)) *rig {
	t.Helper()
	limits := Limits{FrameMax: 100 << 20, ConnectionsMax: 100, Idle: time.Hour}
	if change != nil {
		change(&limits)
	}
	r := &rig{t: t, addr: ln.Addr().String(), lines: &lines{}, gone: make(chan struct{}), opened: make(chan int, 1000)}
	r.server = New(h, limits, slog.New(slog.NewTextHandler(r.lines, nil)), Metrics{Connections: func(d int) { r.opened <- d }}, nil)
	r.server.Admit()
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer close(r.gone)
		if err := r.server.Serve(ctx, "PLAINTEXT", ln); err != nil {
			t.Error(err)
		}
	}()
	r.stop = func() { cancel(); <-r.gone }
	t.Cleanup(func() { cancel(); r.server.CloseAll(); <-r.gone })
	return r
}

// dial opens a connection and returns when the server has it.
func (r *rig) dial() net.Conn {
	r.t.Helper()
	c, err := net.Dial("tcp", r.addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	r.changed(1)
	return c
}

// changed waits until a connection has come (1) or gone (-1).
func (r *rig) changed(want int) {
	r.t.Helper()
	if got := <-r.opened; got != want {
		r.t.Fatalf("connections changed by %d instead of %d", got, want)
	}
}

func (r *rig) write(c net.Conn, b []byte) {
	r.t.Helper()
	if _, err := c.Write(b); err != nil {
		r.t.Fatal(err)
	}
}

// reply reads one frame.
func reply(c io.Reader) (string, error) {
	var head [4]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return "", err
	}
	body := make([]byte, binary.BigEndian.Uint32(head[:]))
	_, err := io.ReadFull(c, body)
	return string(body), err
}

func (r *rig) expect(c net.Conn, want string) {
	r.t.Helper()
	if got, err := reply(c); err != nil || got != want {
		r.t.Fatalf("got %.60q (%v), want %.60q", got, err, want)
	}
}

// closed checks that the server has closed the connection without another byte.
func (r *rig) closed(c net.Conn) {
	r.t.Helper()
	if b, err := io.ReadAll(c); len(b) > 0 || err != nil && !isReset(err) && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrClosedPipe) {
		r.t.Fatalf("%q, %v", b, err)
	}
}
