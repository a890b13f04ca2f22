package direct_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/goleak"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/recordbatch"
)

// serve connects a client over TCP to a transport that serves it. What Serve returned comes through ended.
func serve(t fataler, transport *direct.Transport, ctx context.Context, hooks direct.Hooks, brokers ...string) (client *net.TCPConn, ended chan error) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("%v", err)
	}
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatalf("%v", err)
	}
	accepted, err := ln.Accept()
	if err != nil {
		t.Fatalf("%v", err)
	}
	ended = make(chan error, 1)
	go func() { ended <- transport.Serve(ctx, accepted, brokers, hooks) }()
	return c.(*net.TCPConn), ended
}

// raw is a request that the fake broker does not know and echoes.
func raw(correlation int32, body []byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(10+len(body)))
	b = append(b, 0, 77, 0, 0)
	b = binary.BigEndian.AppendUint32(b, uint32(correlation))
	return append(append(b, 0, 0), body...)
}

func over(t *testing.T, c net.Conn) {
	t.Helper()
	if b, err := io.ReadAll(c); len(b) > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%d more bytes, %v", len(b), err)
	}
}

// Requests that are sent all at once are answered in order, whatever their size, and whether answers are rewritten or pass.
func TestServePassesPipelinedRequests(t *testing.T) {
	for _, rewrites := range []bool{false, true} {
		t.Run(fmt.Sprint("rewrite ", rewrites), func(t *testing.T) {
			broker := newFakeBroker(t, &fakePartition{})
			defer broker.close()
			transport := newTransport(t, direct.Config{})
			var hooks direct.Hooks
			if rewrites {
				hooks.Rewrite = func(key, _ int16) func([]byte) ([]byte, error) {
					return func(frame []byte) ([]byte, error) { frame[8] ^= 0xff; return frame, nil }
				}
			}
			conn, ended := serve(t, transport, t.Context(), hooks, broker.addr())
			c := newClient(t, conn)
			var bodies [][]byte
			for i, size := range []int{1, 100, 16 << 10, 40_000, 3 << 20, 5, 1 << 20, 64 << 10, 7} {
				bodies = append(bodies, bytes.Repeat([]byte{byte(i + 1)}, size))
			}
			var all []byte
			for i, b := range bodies {
				all = append(all, raw(int32(i), b)...)
			}
			sent := make(chan error, 1)
			go func() {
				_, err := conn.Write(all)
				sent <- err
			}()
			for i, want := range bodies {
				if rewrites {
					want[0] ^= 0xff
				}
				if got := c.receive(int32(i)); !bytes.Equal(got, want) {
					t.Fatalf("answer %d differs", i)
				}
			}
			if err := <-sent; err != nil {
				t.Fatal(err)
			}
			conn.CloseWrite()
			over(t, conn)
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}

// large is a partition whose broker keeps all, some 200 kB.
func large(t *testing.T) *fakePartition {
	p := &fakePartition{epoch: 5}
	for i := range 20 {
		p.append(t, recordbatch.CodecNone, -1, false, fmt.Sprint(i, strings.Repeat("x", 10_000)))
	}
	p.expect(t)
	return p
}

// Large answers to Fetch pass as they come, without addresses of brokers; small ones are rewritten.
func TestServeHidesEndpointsOfLargeFetches(t *testing.T) {
	broker := newFakeBroker(t, large(t))
	defer broker.close()
	transport := newTransport(t, direct.Config{})
	var last any
	broker.spoil = func(r *kmsg.FetchResponse) {
		// An answer passes if it is waited for; one that comes before that is read, and rewritten.
		for transport.Awaited() == last {
			runtime.Gosched()
		}
		last = transport.Awaited()
		r.Brokers = []kmsg.FetchResponseBroker{{NodeID: 7, Host: "broker", Port: 9092}}
		r.UnknownTags.Set(99, []byte("later"))
	}
	var small atomic.Int32
	hooks := direct.Hooks{Rewrite: func(key, version int16) func([]byte) ([]byte, error) {
		if key != 1 {
			return nil
		}
		return func(frame []byte) ([]byte, error) { small.Add(1); return frame, nil }
	}}
	conn, _ := serve(t, transport, t.Context(), hooks, broker.addr())
	defer conn.Close()
	c := newClient(t, conn)
	for version := int16(12); version <= 18; version++ {
		o := patient
		o.version = version
		at := []int64{0}
		resp := c.fetch(o, []position{{0, 0}})
		if len(resp.Topics[0].Partitions[0].RecordBatches) < 200_000 {
			t.Fatal("a small answer")
		}
		check(t, broker.parts, at, o, resp)
		if len(resp.Brokers) > 0 {
			t.Errorf("v%d: clients see %+v", version, resp.Brokers)
		}
		later := ""
		resp.UnknownTags.Each(func(tag uint32, v []byte) {
			if tag == 99 {
				later = string(v)
			}
		})
		if later != "later" || small.Load() != 0 {
			t.Errorf("v%d: unknown tag %q, %d rewritten", version, later, small.Load())
		}
		o.maxBytes = 1
		if check(t, broker.parts, []int64{0}, o, c.fetch(o, []position{{0, 0}})); small.Load() != 1 {
			t.Errorf("v%d: %d small answers were rewritten", version, small.Load())
		}
		small.Store(0)
	}
}

func TestServeDrains(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	part := &fakePartition{epoch: 5}
	broker := newFakeBroker(t, part)
	defer broker.close()
	transport := newTransport(t, direct.Config{})
	ctx, cancel := context.WithCancel(context.Background())
	asked := make(chan struct{}, 10)
	hooks := direct.Hooks{Allow: func(int16, int16) bool { asked <- struct{}{}; return true }}
	conn, ended := serve(t, transport, ctx, hooks, broker.addr())
	idle, idleEnded := serve(t, transport, ctx, hooks, broker.addr())
	if _, err := idle.Write(raw(1, nil)); err != nil {
		t.Fatal(err)
	}
	newClient(t, idle).receive(1)
	<-asked
	c := newClient(t, conn)
	corr := c.send(patient.request([]position{{0, 0}}))
	<-asked
	cancel()
	over(t, idle) // which waits for nothing
	if err := <-idleEnded; err != nil {
		t.Error(err)
	}
	broker.do(func() {
		part.append(t, recordbatch.CodecNone, -1, false, "late")
		part.expect(t)
	})
	check(t, broker.parts, []int64{0}, patient, c.parse(patient.version, c.receive(corr)))
	over(t, conn)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	transport.Close()
}

// A client that has stopped sending still gets what it asked for, read directly or not.
func TestServeAnswersHalfOpenConnections(t *testing.T) {
	r := newRig(t, direct.Config{}, one(20, 19))
	conn, ended := serve(r, r.transport, t.Context(), direct.Hooks{}, r.broker.addr())
	c := newClient(t, conn)
	corr := c.send(patient.request([]position{{0, 0}}))
	c.send(patient.request([]position{{0, r.broker.parts[0].local}}))
	conn.CloseWrite()
	check(r, r.broker.parts, []int64{0}, patient, c.parse(patient.version, c.receive(corr)))
	check(r, r.broker.parts, []int64{r.broker.parts[0].local}, patient, c.parse(patient.version, c.receive(corr+1)))
	over(t, conn)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestServeGivesUpOnPeersThatStall(t *testing.T) {
	broker := newFakeBroker(t, &fakePartition{})
	defer broker.close()
	transport := newTransport(t, direct.Config{})
	hooks := direct.Hooks{Stall: 100 * time.Millisecond}
	// Two take no answers, whether these pass or are rewritten; the others stop in the middle of a request.
	deaf := func(hooks direct.Hooks) chan error {
		conn, ended := serve(t, transport, t.Context(), hooks, broker.addr())
		t.Cleanup(func() { conn.Close() })
		go conn.Write(raw(1, make([]byte, 64<<20)))
		return ended
	}
	passedEnded := deaf(hooks)
	hooks.Rewrite = func(int16, int16) func([]byte) ([]byte, error) {
		return func(frame []byte) ([]byte, error) { return frame, nil }
	}
	rewrittenEnded := deaf(hooks)
	torn, tornEnded := serve(t, transport, t.Context(), hooks, broker.addr())
	defer torn.Close()
	if _, err := torn.Write(raw(1, make([]byte, 100_000))[:50_000]); err != nil {
		t.Fatal(err)
	}
	short, shortEnded := serve(t, transport, t.Context(), hooks, broker.addr()) // of a frame that is read whole
	defer short.Close()
	if _, err := short.Write([]byte{0, 0, 1, 0, 0, 17, 0, 0, 0, 0, 0, 1}); err != nil {
		t.Fatal(err)
	}
	quiet, _ := serve(t, transport, t.Context(), hooks, broker.addr()) // asks late, and that is no stall
	defer quiet.Close()
	for _, ended := range []chan error{passedEnded, rewrittenEnded, tornEnded, shortEnded} {
		if err := <-ended; !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error(err)
		}
	}
	if _, err := quiet.Write(raw(1, []byte("x"))); err != nil {
		t.Fatal(err)
	}
	newClient(t, quiet).receive(1)
}

func TestServeRefusesHostileFrames(t *testing.T) {
	broker := newFakeBroker(t, &fakePartition{})
	defer broker.close()
	transport := newTransport(t, direct.Config{MaxFrameBytes: 1 << 20})
	for name, b := range map[string]string{"negative": "\xff\xff\xff\xff", "huge": "\x7f\xff\xff\xff", "above the limit": "\x00\x10\x00\x01", "no header": "\x00\x00\x00\x07",
		"HTTP": "GET / HTTP/1.1\r\n", "TLS": "\x16\x03\x01\x02\x00"} {
		conn, ended := serve(t, transport, t.Context(), direct.Hooks{}, broker.addr())
		if _, err := conn.Write([]byte(b)); err != nil {
			t.Fatal(err)
		}
		over(t, conn)
		if err := <-ended; err == nil || name == "HTTP" && !strings.Contains(err.Error(), "HTTP") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if fetches, _, _ := broker.counts(); fetches > 0 {
		t.Error("something got through")
	}
}

// A broker whose frames make no sense, and one that ends in the middle of an answer, end the client's connection.
func TestServeEndsWithItsBroker(t *testing.T) {
	for name, answer := range map[string]string{"cut": "\x00\x00\x10\x00\x00\x00\x00\x01abc", "hostile size": "\x7f\xff\xff\xff\x00\x00\x00\x01", "negative": "\xff\xff\xff\xff", "wrong correlation": "\x00\x00\x00\x04\x00\x00\x00\x09", "nothing": ""} {
		t.Run(name, func(t *testing.T) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			go func() {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				io.CopyN(io.Discard, c, 20)
				io.WriteString(c, answer)
				c.Close()
			}()
			conn, ended := serve(t, newTransport(t, direct.Config{MaxFrameBytes: 1 << 20}), t.Context(), direct.Hooks{}, ln.Addr().String())
			if _, err := conn.Write(raw(1, make([]byte, 6))); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadAll(conn); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error(err)
			}
			<-ended
		})
	}
}

func TestServeAsksWhatIsAllowed(t *testing.T) {
	broker := newFakeBroker(t, &fakePartition{})
	defer broker.close()
	conn, ended := serve(t, newTransport(t, direct.Config{}), t.Context(), direct.Hooks{Allow: func(key, _ int16) bool { return key != 77 }}, broker.addr())
	if _, err := conn.Write(raw(1, nil)); err != nil {
		t.Fatal(err)
	}
	over(t, conn)
	if err := <-ended; !errors.Is(err, direct.ErrNotAllowed) {
		t.Error(err)
	}
}

func TestServeTakesTheFirstBrokerThatAnswers(t *testing.T) {
	broker := newFakeBroker(t, &fakePartition{})
	defer broker.close()
	dead := newFakeBroker(t)
	dead.close()
	transport := newTransport(t, direct.Config{})
	conn, _ := serve(t, transport, t.Context(), direct.Hooks{}, dead.addr(), broker.addr())
	c := newClient(t, conn)
	if _, err := conn.Write(raw(3, []byte("hello"))); err != nil {
		t.Fatal(err)
	}
	if got := c.receive(3); string(got) != "hello" {
		t.Errorf("%q", got)
	}
	conn.Close()
	conn, ended := serve(t, transport, t.Context(), direct.Hooks{}, dead.addr())
	over(t, conn)
	var dial *direct.DialError
	if err := <-ended; !errors.As(err, &dial) || dial.Address != dead.addr() {
		t.Error(err)
	}
}

// What the broker allowed one client to read is not given to another: each asks for itself.
func TestServedConnectionsShareNoReadAhead(t *testing.T) {
	r := newRig(t, direct.Config{}, one(40, 39))
	o := patient
	o.partMax = 300
	next := int64(0)
	read := func(c *client) {
		at := []int64{next}
		check(r, r.broker.parts, at, o, c.fetch(o, []position{{0, next}}))
	}
	conn, ended := serve(r, r.transport, t.Context(), direct.Hooks{}, r.broker.addr())
	first := newClient(t, conn)
	at := []int64{0}
	check(r, r.broker.parts, at, o, first.fetch(o, []position{{0, 0}}))
	next = at[0]
	other, _ := serve(r, r.transport, t.Context(), direct.Hooks{}, r.broker.addr())
	defer other.Close()
	read(newClient(t, other))
	if n := r.transport.Snapshot().Locations; n != 2 {
		t.Errorf("the broker gave %d locations, the second client was answered without one of its own", n)
	}
	read(first)
	if n := r.transport.Snapshot().Locations; n != 2 {
		t.Error("the first client's read-ahead is gone")
	}
	conn.Close()
	other.Close()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if s := r.transport.Snapshot(); s.Streams > 1 {
		t.Errorf("what is read ahead outlives its client: %+v", s)
	}
}

// Endpoints of new leaders in answers that the transport makes are mapped too.
func TestServeMapsEndpoints(t *testing.T) {
	r := newRig(t, direct.Config{}, func(b objstore.Bucket) []*fakePartition { return one(20, 19)(b) })
	r.broker.do(func() { r.broker.errors[0] = 6 })
	r.broker.spoil = func(resp *kmsg.FetchResponse) {
		resp.Brokers = []kmsg.FetchResponseBroker{{NodeID: 1, Host: "broker", Port: 9092}, {NodeID: 2, Host: "broker", Port: 9093}}
	}
	hooks := direct.Hooks{Endpoint: func(node int32, host string, port int32) (string, int32, bool) {
		return "gateway-of-" + host, port + 1000, node == 2
	}}
	conn, _ := serve(r, r.transport, t.Context(), hooks, r.broker.addr())
	defer conn.Close()
	got := newClient(t, conn).fetch(patient, []position{{0, 0}}).Brokers
	if len(got) != 1 || got[0].NodeID != 2 || got[0].Host != "gateway-of-broker" || got[0].Port != 10093 {
		t.Errorf("%+v", got)
	}
}
