package peer

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

	"github.com/varve-io/varve/internal/tp"
)

func identity(id int32) Identity {
	return Identity{ClusterID: "c", NodeID: id, Incarnation: tp.UUID{byte(id)}, Address: "host:" + string(rune('0'+id))}
}

func hub(id Identity, check func(Hello) error, options ...Option) *Hub {
	return New(func() Identity { return id }, check, slog.New(slog.DiscardHandler), options...)
}

// serve runs a hub behind a listener and returns its address and what Serve returned.
func serve(t *testing.T, h *Hub) (string, <-chan error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	results := make(chan error, 16)
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { results <- h.Serve(t.Context(), c) })
		}
	})
	t.Cleanup(func() { l.Close(); all.Wait() })
	return l.Addr().String(), results
}

func TestServiceGetsTheStream(t *testing.T) {
	b := hub(identity(2), nil)
	b.Handle("echo", func(_ context.Context, c Conn) {
		if c.Hello.NodeID != 1 || c.Hello.To != 2 {
			t.Errorf("hello: %+v", c.Hello)
		}
		io.Copy(c, c)
	})
	address, results := serve(t, b)
	c, welcome, err := hub(identity(1), nil).Dial(t.Context(), address, 2, "echo")
	if err != nil || welcome.NodeID != 2 {
		t.Fatal(welcome, err)
	}
	c.Write([]byte("hello"))
	got := make([]byte, 5)
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "hello" {
		t.Fatal(string(got), err)
	}
	c.Close()
	if err := <-results; err != nil {
		t.Fatal(err)
	}
}

func TestServeEndsWithItsContext(t *testing.T) {
	b := hub(identity(2), nil)
	serving := make(chan struct{})
	b.Handle("wait", func(_ context.Context, c Conn) { close(serving); io.Copy(io.Discard, c) })
	near, far := net.Pipe()
	defer near.Close()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- b.Serve(ctx, far) }()
	hello, err := message(Magic, Hello{Identity: identity(1), Service: "wait", To: -1})
	if err != nil {
		t.Fatal(err)
	}
	near.Write(hello)
	var w Welcome
	if err := readMessage(near, &w); err != nil || w.Refused != "" {
		t.Fatal(w, err)
	}
	<-serving
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestRefusals(t *testing.T) {
	fresh := func(id int32, voters ...string) Identity {
		i := identity(id)
		i.ClusterID, i.Fresh, i.Voters = "", true, voters
		return i
	}
	other := identity(2)
	other.ClusterID = "d"
	twin := identity(1)
	twin.Incarnation = tp.UUID{9}
	twin.Address = "elsewhere:1"
	for _, c := range []struct {
		name     string
		from, at Identity
		to       int32
		service  string
		check    func(Hello) error
		want     string // "" accepts
		voters   bool
	}{
		{name: "same cluster", from: identity(1), at: identity(2), to: 2},
		{name: "other cluster", from: identity(1), at: other, to: 2, want: "belongs to cluster"},
		{name: "a fresh node of no cluster", from: fresh(1), at: identity(2), to: -1},
		{name: "id used twice", from: identity(1), at: twin, to: -1, want: "node id 1 is used twice: here (host:1) and at elsewhere:1"},
		{name: "itself", from: identity(1), at: identity(1), to: -1},
		{name: "another node", from: identity(1), at: identity(2), to: 3, want: "node 3 was expected at"},
		{name: "voters differ", from: fresh(1, "1@a:1", "2@b:1"), at: fresh(2, "1@a:1", "3@b:1"), to: 2, want: "voters differ", voters: true},
		{name: "voters agree", from: fresh(1, "1@a:1", "2@b:1"), at: fresh(2, "1@a:1", "2@b:1"), to: 2},
		{name: "voters differ from one that knows better", from: fresh(1, "1@a:1", "2@b:1"), at: identity(2), to: 2},
		{name: "check", from: identity(1), at: identity(2), to: 2, check: func(Hello) error { return errors.New("an older run of node 1") }, want: "node 2 at host:2 refused node 1 at host:1: an older run of node 1"},
		{name: "no such service", from: identity(1), at: identity(2), to: 2, service: "mail", want: `has no service "mail"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.service == "" {
				c.service = Probe
			}
			address, results := serve(t, hub(c.at, c.check))
			nc, welcome, err := hub(c.from, nil).Dial(t.Context(), address, c.to, c.service)
			served := <-results
			if c.want == "" {
				if err != nil || served != nil {
					t.Fatal(err, served)
				}
				nc.Close()
				return
			}
			var here, there *RefusedError
			if !errors.As(err, &here) || !strings.Contains(err.Error(), c.want) || here.Node != c.at.NodeID || here.Voters != c.voters {
				t.Fatalf("dialer: %#v", err)
			}
			if !errors.As(served, &there) || there.Node != c.from.NodeID || welcome.Refused == "" {
				t.Fatalf("acceptor: %v, welcome: %+v", served, welcome)
			}
		})
	}
}

// The dialer must not rely on the acceptor: one that accepts everything is refused by the dialer.
func TestDialerRefusesToo(t *testing.T) {
	for name, c := range map[string]struct {
		answers Identity
		want    string
	}{
		"wrong node":    {identity(3), "node 2 was expected"},
		"wrong cluster": {Identity{ClusterID: "d", NodeID: 2}, "belongs to cluster"},
		"check":         {identity(2), "no thanks"},
	} {
		t.Run(name, func(t *testing.T) {
			near, far := net.Pipe()
			go func() {
				defer far.Close()
				if _, err := readHello(far); err == nil {
					b, _ := message("", Welcome{Identity: c.answers})
					far.Write(b)
				}
			}()
			h := hub(identity(1), func(h Hello) error {
				if h.NodeID == 2 && h.ClusterID == "c" {
					return errors.New("no thanks")
				}
				return nil
			}, WithDialer(func(context.Context, string) (net.Conn, error) { return near, nil }))
			var refused *RefusedError
			if _, _, err := h.Dial(t.Context(), "x:1", 2, Probe); !errors.As(err, &refused) || !strings.Contains(err.Error(), c.want) {
				t.Fatal(err)
			}
		})
	}
}

func TestDialErrorsSayWhat(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone := l.Addr().String()
	l.Close()
	if _, _, err := hub(identity(1), nil).Dial(t.Context(), gone, -1, Probe); err == nil || !strings.Contains(err.Error(), gone+" refused the connection") {
		t.Fatal(err)
	}
	h := hub(identity(1), nil, WithDialer(func(context.Context, string) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Err: &net.DNSError{Err: "no such host", Name: "broker-2"}}
	}))
	if _, _, err := h.Dial(t.Context(), "broker-2:1", -1, Probe); err == nil || !strings.Contains(err.Error(), "cannot resolve broker-2") {
		t.Fatal(err)
	}
	near, far := net.Pipe()
	go func() { readHello(far); far.Write([]byte("HTTP/1.1 400 Bad Request")); far.Close() }()
	h = hub(identity(1), nil, WithDialer(func(context.Context, string) (net.Conn, error) { return near, nil }))
	if _, _, err := h.Dial(t.Context(), "web:80", -1, Probe); err == nil || !strings.Contains(err.Error(), "does not answer as a Varve node does") {
		t.Fatal(err)
	}
	near, _ = net.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	h = hub(identity(1), nil, WithDialer(func(context.Context, string) (net.Conn, error) { cancel(); return near, nil }))
	if _, _, err := h.Dial(ctx, "mute:80", -1, Probe); err == nil {
		t.Fatal("a silent peer was accepted")
	}
}

func TestGarbageIsClosed(t *testing.T) {
	hello, err := message(Magic, Hello{Identity: identity(1), Service: Probe, To: -1})
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{
		"nothing":        {},
		"half a magic":   []byte("VR"),
		"no magic":       []byte("GET / HTTP/1.1\r\n"),
		"hostile length": append([]byte(Magic), 0xff, 0xff, 0xff, 0xff),
		"empty":          append([]byte(Magic), 0, 0, 0, 0),
		"half a hello":   hello[:len(hello)-1],
		"not cbor":       append([]byte(Magic), 0, 0, 0, 1, 0xff),
	} {
		t.Run(name, func(t *testing.T) {
			near, far := net.Pipe()
			go func() { near.Write(b); near.Close() }()
			if err := hub(identity(2), nil).Serve(t.Context(), far); err == nil {
				t.Fatal("accepted")
			}
		})
	}
}

func TestConnectionsAreBounded(t *testing.T) {
	h := hub(identity(2), nil)
	h.open.Store(ConnectionsMax)
	near, far := net.Pipe()
	defer near.Close()
	if err := h.Serve(t.Context(), far); err == nil || h.open.Load() != ConnectionsMax {
		t.Fatal(err, h.open.Load())
	}
}

func FuzzHandshake(f *testing.F) {
	for _, m := range []any{Hello{Identity: identity(1), Service: "raft", To: 2}, Welcome{Identity: identity(2), Refused: "no"}} {
		b, err := message(Magic, m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add(binary.BigEndian.AppendUint32([]byte(Magic), 1<<31))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := readHello(bytes.NewReader(b))
		if err == nil {
			again, err := message(Magic, h)
			if err != nil {
				t.Fatal(err)
			}
			if h2, err := readHello(bytes.NewReader(again)); err != nil || h2.NodeID != h.NodeID || h2.Service != h.Service {
				t.Fatal(h, h2, err)
			}
		}
		if len(b) > len(Magic) {
			var w Welcome
			_ = readMessage(bytes.NewReader(b[len(Magic):]), &w)
		}
	})
}
