package direct_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/goleak"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
	"github.com/varve-io/varve/internal/directfetch"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/wire"
)

// rig is a fake broker, a bucket that may fail, and a transport between them and a bare client.
type rig struct {
	*testing.T
	bucket    *objstore.Faults
	broker    *fakeBroker
	transport *direct.Transport
	client    *client
}

// tieredPartition has n batches of three records, all but the last in the tier, cut into segments of per batches.
func tieredPartition(t fataler, bucket objstore.Bucket, name string, n, per int) *fakePartition {
	t.Helper()
	p := &fakePartition{epoch: 5}
	for i := range n {
		p.append(t, recordbatch.CodecNone, -1, false, fmt.Sprint(name, i, "a"), fmt.Sprint(name, i, "b"), fmt.Sprint(name, i, "c"))
	}
	for from := 0; from < n-1; from += per {
		p.tier(t, bucket, name, from, min(from+per, n-1))
	}
	p.expect(t)
	return p
}

func newRig(t *testing.T, cfg direct.Config, make func(objstore.Bucket) []*fakePartition) *rig {
	t.Helper()
	r := &rig{T: t, bucket: objstore.WithFaults(objstore.NewMemory())}
	r.broker = newFakeBroker(t, make(r.bucket)...)
	t.Cleanup(r.broker.close)
	if cfg.Fetcher == nil {
		f, err := objectstore.New(r.bucket, objectstore.Options{})
		if err != nil {
			t.Fatal(err)
		}
		cfg.Fetcher = f
	}
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = time.Hour
	}
	r.transport = newTransport(t, cfg)
	r.client = r.dial()
	return r
}

func (r *rig) dial() *client {
	r.Helper()
	conn, err := r.transport.DialContext(r.Context(), "tcp", r.broker.addr())
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { conn.Close() })
	return newClient(r, conn)
}

func one(n, per int) func(objstore.Bucket) []*fakePartition {
	return func(b objstore.Bucket) []*fakePartition {
		return []*fakePartition{tieredPartition(silentT{}, b, "p", n, per)}
	}
}

type silentT struct{}

func (silentT) Helper()                           {}
func (silentT) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

// patient waits for data as long as it takes.
var patient = fetchOptions{version: 18, maxBytes: 1 << 20, partMax: 1 << 20, minimum: 1, waitMs: 60_000, epoch: -1}

// drain reads a partition from an offset to its end.
func (r *rig) drain(o fetchOptions, partition int32, from int64) {
	r.Helper()
	log := r.broker.parts[partition]
	at := make([]int64, len(r.broker.parts))
	at[partition] = from
	for at[partition] < log.end() {
		check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{partition, at[partition]}}))
	}
}

func TestNothingChangesWithoutFetcher(t *testing.T) {
	broker := newFakeBroker(t, &fakePartition{})
	defer broker.close()
	for _, cfg := range []direct.Config{{Enabled: true}, {Fetcher: deadFetcher{}}, {Enabled: true, Fetcher: noFormats{}}} {
		transport, err := direct.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		conn, err := transport.Dial("tcp", broker.addr())
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := conn.(*net.TCPConn); !ok {
			t.Errorf("%+v: connection is a %T", cfg, conn)
		}
		conn.Close()
		transport.Close()
		if _, err := transport.Dial("tcp", broker.addr()); err != direct.ErrClosed {
			t.Errorf("after Close: %v", err)
		}
	}
}

type noFormats struct{ deadFetcher }

func (noFormats) Formats() []string { return nil }

func TestOldBrokers(t *testing.T) {
	for name, change := range map[string]func(*fakeBroker){
		"no feature": func(b *fakeBroker) { b.feature = false },
		"old Fetch":  func(b *fakeBroker) { b.fetchMax = 11 },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, direct.Config{}, one(10, 5))
			change(r.broker)
			o := patient
			o.version = 11
			r.drain(o, 0, 0)
			_, tagged, _ := r.broker.counts()
			if s := r.transport.Snapshot(); tagged != 0 || s.Locations != 0 || s.BrokerBytes != 0 {
				t.Errorf("%d tags, %+v", tagged, s)
			}
		})
	}
}

func TestBrokerSendsNoTieredRecords(t *testing.T) {
	r := newRig(t, direct.Config{}, one(40, 10))
	r.drain(patient, 0, 0)
	last := int64(len(r.broker.parts[0].batches[39].b)) // the tail, once for the question ahead and once for the client
	if fetches, _, bytes := r.broker.counts(); bytes > 2*last || fetches > 10 {
		t.Errorf("%d bytes in %d fetches: %+v", bytes, fetches, r.transport.Snapshot())
	}
	// Four segments; the question ahead may be asked once more where its answer came too late to be used.
	if s := r.transport.Snapshot(); s.BrokerBytes > 2*last || s.Locations < 4 || s.Locations > 8 {
		t.Errorf("%+v", s)
	}
	families, err := registry(t, r.transport).Gather()
	if err != nil || len(families) != 11 {
		t.Errorf("%d metrics, %v", len(families), err)
	}
	for _, f := range families {
		if name := f.GetName(); name == "remote_fetch_served_bytes_total" && f.Metric[0].Counter.GetValue() != float64(r.transport.Snapshot().Served) {
			t.Errorf("%s: %v", name, f.Metric)
		} else if name == "remote_fetch_fallbacks_total" && len(f.Metric) != 13 {
			t.Errorf("%s: %d causes", name, len(f.Metric))
		}
	}
}

func TestSlowObjectDelaysNobody(t *testing.T) {
	r := newRig(t, direct.Config{}, func(b objstore.Bucket) []*fakePartition {
		return []*fakePartition{tieredPartition(silentT{}, b, "slow", 6, 5), tieredPartition(silentT{}, b, "quick", 6, 5), {epoch: 5}}
	})
	gate := make(chan struct{})
	r.bucket.Add(objstore.Fault{Op: objstore.OpGet, Key: "slow", Block: gate})
	at := []int64{0, 0, 0}
	for at[1] < r.broker.parts[1].end() { // with a minute's patience, a delay would end this test
		check(r, r.broker.parts, at, patient, r.client.fetch(patient, []position{{0, at[0]}, {1, at[1]}}))
	}
	if at[0] != 0 {
		t.Fatalf("the slow partition moved to %d", at[0])
	}
	// News at the tail of another partition end the wait, too.
	asked := r.client.send(patient.request([]position{{0, 0}, {2, 0}}))
	r.broker.do(func() {
		r.broker.parts[2].append(r, recordbatch.CodecNone, -1, false, "news")
		r.broker.parts[2].expect(r)
	})
	check(r, r.broker.parts, at, patient, r.client.parse(patient.version, r.client.receive(asked)))
	if at[0] != 0 || at[2] != 1 {
		t.Fatalf("at %v", at)
	}
	_, tagged, _ := r.broker.counts()
	close(gate)
	check(r, r.broker.parts, at, patient, r.client.fetch(patient, []position{{0, 0}}))
	if _, now, _ := r.broker.counts(); at[0] == 0 || now != tagged {
		t.Errorf("at %v after %d more questions: the read was not kept: %+v", at, now-tagged, r.transport.Snapshot())
	}
}

func TestOrderOfAnswers(t *testing.T) {
	r := newRig(t, direct.Config{}, one(6, 5))
	gate := make(chan struct{})
	r.bucket.Add(objstore.Fault{Op: objstore.OpGet, Times: 1, Block: gate})
	c := r.client
	first := c.send(patient.request([]position{{0, 0}}))
	silent := kmsg.NewPtrProduceRequest() // no answer is due, not even from a broker that knows it
	silent.Version, silent.Acks = 3, 0
	heartbeat := kmsg.NewPtrHeartbeatRequest()
	heartbeat.Group = "g"
	second := c.send(heartbeat)
	third := c.send(patient.request([]position{{0, 15}}))
	close(gate)
	if resp := c.parse(18, c.receive(first)); len(resp.Topics[0].Partitions[0].RecordBatches) == 0 {
		t.Error("no records")
	}
	if body := c.receive(second); !bytes.Equal(body, heartbeat.AppendTo(nil)) {
		t.Errorf("echo of %x", body)
	}
	if resp := c.parse(18, c.receive(third)); len(resp.Topics[0].Partitions[0].RecordBatches) == 0 {
		t.Error("no records")
	}
}

// TestRawTokens: a handshake of version 0 and the tokens behind it, which have no headers, pass as they are. Where it is not
// known how many a mechanism has, the connection passes untouched for good.
func TestRawTokens(t *testing.T) {
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
		defer c.Close()
		req := kmsg.NewPtrSASLHandshakeRequest()
		req.Mechanism = "GSSAPI"
		frame := make([]byte, len(wire.AppendRequest(nil, 1, "bare", req)))
		if _, err := io.ReadFull(c, frame); err != nil {
			return
		}
		resp := kmsg.NewPtrSASLHandshakeResponse()
		if _, err := c.Write(wire.AppendResponse(nil, 1, resp)); err != nil {
			return
		}
		_, _ = io.Copy(c, c)
	}()
	transport := newTransport(t, direct.Config{Fetcher: deadFetcher{}})
	conn, err := transport.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	c := newClient(t, conn)
	req := kmsg.NewPtrSASLHandshakeRequest()
	req.Mechanism = "GSSAPI"
	c.receive(c.send(req))
	token := []byte("\x00\x00\x00\x05\x00me\x00p and anything else")
	if _, err := conn.Write(token); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(token))
	if _, err := io.ReadFull(c.in, got); err != nil || !bytes.Equal(got, token) {
		t.Errorf("%q, %v", got, err)
	}
}

// Behind the tokens of a mechanism that is known come requests like any other. The broker says nothing to a handshake of
// version 0 but yes, and one empty token to PLAIN.
func TestTokensOfKnownMechanisms(t *testing.T) {
	for mechanism, rounds := range map[string]int{"PLAIN": 1, "SCRAM-SHA-256": 2, "SCRAM-SHA-512": 2, "OAUTHBEARER": 1} {
		for _, served := range []bool{false, true} {
			broker := newFakeBroker(t, large(t))
			defer broker.close()
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			handshake := kmsg.NewPtrSASLHandshakeRequest()
			handshake.Mechanism = mechanism
			token := []byte("\x00\x00\x00\x05\x00me\x00p")
			go func() {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				io.CopyN(io.Discard, c, int64(len(wire.AppendRequest(nil, 1, "bare", handshake))))
				c.Write(wire.AppendResponse(nil, 1, kmsg.NewPtrSASLHandshakeResponse()))
				for range rounds {
					io.CopyN(io.Discard, c, int64(len(token)))
					c.Write([]byte{0, 0, 0, 0})
				}
				broker.mu.Lock()
				broker.conns[c] = true
				broker.mu.Unlock()
				broker.serve(c)
			}()
			transport := newTransport(t, direct.Config{Fetcher: deadFetcher{}, ConnectTimeout: time.Millisecond})
			var conn net.Conn
			rewritten := make(chan int16, 10)
			if served {
				conn, _ = serve(t, transport, t.Context(), direct.Hooks{Rewrite: func(key, _ int16) func([]byte) ([]byte, error) {
					rewritten <- key
					return func(frame []byte) ([]byte, error) { return frame, nil }
				}}, ln.Addr().String())
			} else if conn, err = transport.Dial("tcp", ln.Addr().String()); err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			c := newClient(t, conn)
			c.receive(c.send(handshake))
			for range rounds {
				if _, err := conn.Write(token); err != nil {
					t.Fatal(err)
				}
				empty := make([]byte, 4)
				if _, err := io.ReadFull(c.in, empty); err != nil || !bytes.Equal(empty, make([]byte, 4)) {
					t.Fatalf("%x, %v", empty, err)
				}
			}
			check(t, broker.parts, []int64{0}, patient, c.fetch(patient, []position{{0, 0}}))
			if _, tagged, _ := broker.counts(); tagged == 0 {
				t.Errorf("%s: the broker was not asked for locations", mechanism)
			}
			if _, err := conn.Write(raw(99, []byte("x"))); err != nil {
				t.Fatal(err)
			}
			c.receive(99)
			if served && (<-rewritten != 17 || <-rewritten != 77) {
				t.Errorf("%s: hooks were not asked", mechanism)
			}
		}
	}
	// What cannot be followed must not pass by the hooks.
	broker := newFakeBroker(t)
	defer broker.close()
	conn, ended := serve(t, newTransport(t, direct.Config{}), t.Context(), direct.Hooks{Allow: func(int16, int16) bool { return true }}, broker.addr())
	handshake := kmsg.NewPtrSASLHandshakeRequest()
	handshake.Mechanism = "GSSAPI"
	newClient(t, conn).send(handshake)
	over(t, conn)
	if err := <-ended; !errors.Is(err, direct.ErrNotAllowed) {
		t.Error(err)
	}
}

func TestSessionsAreRefused(t *testing.T) {
	r := newRig(t, direct.Config{}, one(6, 5))
	req := patient.request([]position{{0, 0}})
	req.SessionID, req.SessionEpoch = 77, 3
	resp := r.client.parse(18, r.client.receive(r.client.send(req)))
	if resp.ErrorCode != 70 || resp.SessionID != 0 || len(resp.Topics) != 0 {
		t.Errorf("%+v", resp)
	}
	req = patient.request([]position{{0, 0}})
	req.SessionID, req.SessionEpoch = 0, 0 // a client that would like one
	resp = r.client.parse(18, r.client.receive(r.client.send(req)))
	if resp.ErrorCode != 0 || resp.SessionID != 0 || len(resp.Topics[0].Partitions[0].RecordBatches) == 0 {
		t.Errorf("%+v", resp)
	}
}

func TestNewLeaderEpochDropsReadAhead(t *testing.T) {
	r := newRig(t, direct.Config{}, one(30, 29))
	o := patient
	o.epoch, o.partMax = 5, 1
	at := []int64{0}
	check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{0, 0}}))
	r.broker.do(func() { r.broker.parts[0].epoch = 6 })
	o.epoch = 6
	for range 3 {
		check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{0, at[0]}}))
	}
	if s := r.transport.Snapshot(); s.Locations != 2 {
		t.Errorf("%+v", s)
	}
	o.epoch = 5
	resp := r.client.fetch(o, []position{{0, at[0]}})
	if p := resp.Topics[0].Partitions[0]; p.ErrorCode != 74 || len(p.RecordBatches) != 0 {
		t.Errorf("old epoch: %+v", p)
	}
	if s := r.transport.Snapshot(); s.Streams != 0 {
		t.Errorf("read-ahead outlives the error: %+v", s)
	}
}

func TestErrorsPass(t *testing.T) {
	r := newRig(t, direct.Config{MarksMaxAge: time.Nanosecond}, one(30, 29))
	o := patient
	o.partMax = 1
	at := []int64{0}
	check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{0, 0}}))
	r.broker.do(func() { r.broker.errors[0] = 6 }) // NOT_LEADER
	resp := r.client.fetch(o, []position{{0, at[0]}})
	if p := resp.Topics[0].Partitions[0]; p.ErrorCode != 6 || len(p.RecordBatches) != 0 {
		t.Errorf("%+v", p)
	}
	r.broker.do(func() { delete(r.broker.errors, 0) })
	r.drain(o, 0, at[0])
	if resp := r.client.fetch(o, []position{{0, 5000}}); resp.Topics[0].Partitions[0].ErrorCode != 1 {
		t.Error("an offset out of range is none")
	}
}

// TestMarksAreFresh: with a bound of nothing every answer asks the broker, which still sends no records.
func TestMarksAreFresh(t *testing.T) {
	r := newRig(t, direct.Config{MarksMaxAge: time.Nanosecond}, one(30, 29))
	o := patient
	o.partMax = 1
	at := []int64{0}
	for i := range 10 {
		check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{0, at[0]}})) // checks the high watermark
		r.broker.do(func() { r.broker.parts[0].append(r, recordbatch.CodecNone, -1, false, fmt.Sprint("late", i)) })
	}
	tail := int64(len(r.broker.parts[0].batches[29].b)) // sent in vain for the question ahead
	if fetches, _, _ := r.broker.counts(); fetches < 10 {
		t.Errorf("%d fetches", fetches)
	}
	if s := r.transport.Snapshot(); s.BrokerBytes > tail || s.Locations != 1 {
		t.Errorf("%+v", s)
	}
	r.broker.do(func() { r.broker.parts[0].start = at[0] + 3 }) // DeleteRecords
	if resp := r.client.fetch(o, []position{{0, at[0]}}); resp.Topics[0].Partitions[0].ErrorCode != 1 {
		t.Error("records below the log start")
	}
}

func TestFallbacksOfLocations(t *testing.T) {
	tag := func(resp *kmsg.FetchResponse, change func(*directfetch.Location)) {
		for i := range resp.Topics {
			for k := range resp.Topics[i].Partitions {
				p := &resp.Topics[i].Partitions[k]
				if l, _ := directfetch.Locations(p); len(l) > 0 {
					change(&l[0])
					directfetch.SetLocations(p, l)
				}
			}
		}
	}
	for name, c := range map[string]struct {
		cause string
		spoil func(*kmsg.FetchResponse)
	}{
		"format": {"unknown_format", func(r *kmsg.FetchResponse) { tag(r, func(l *directfetch.Location) { l.Format = "Parquet" }) }},
		"offsets": {"location", func(r *kmsg.FetchResponse) {
			tag(r, func(l *directfetch.Location) { l.BaseOffset += 1000; l.EndOffset += 1000 })
		}},
		"expired": {"expired", func(r *kmsg.FetchResponse) { tag(r, func(l *directfetch.Location) { l.ValidityMs = 0 }) }},
		"key":     {"not_found", func(r *kmsg.FetchResponse) { tag(r, func(l *directfetch.Location) { l.ObjectKey = "elsewhere" }) }},
		"size": {"short", func(r *kmsg.FetchResponse) {
			tag(r, func(l *directfetch.Location) { l.EndPosition, l.SegmentSize = 1<<40, 1<<40 })
		}},
		"middle": {"damaged", func(r *kmsg.FetchResponse) { tag(r, func(l *directfetch.Location) { l.StartPosition += 7 }) }},
		"end":    {"damaged", func(r *kmsg.FetchResponse) { tag(r, func(l *directfetch.Location) { l.EndPosition -= 7 }) }},
		"garbage": {"location", func(r *kmsg.FetchResponse) {
			for i := range r.Topics {
				for k := range r.Topics[i].Partitions {
					if p := &r.Topics[i].Partitions[k]; p.UnknownTags.Len() > 0 {
						p.UnknownTags.Set(directfetch.TagLocations, []byte{9, 9, 9})
					}
				}
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, direct.Config{}, one(12, 11))
			r.broker.spoil = c.spoil
			r.drain(patient, 0, 0)
			if s := r.transport.Snapshot(); s.Fallbacks[c.cause] == 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// TestHostileAnswers: nothing that a broker says makes the transport panic or hang.
func TestHostileAnswers(t *testing.T) {
	for name, spoil := range map[string]func(*kmsg.FetchResponse){
		"nothing": func(r *kmsg.FetchResponse) { r.Topics = nil },
		"other":   func(r *kmsg.FetchResponse) { r.Topics[0].Partitions[0].Partition = 9 },
		"error":   func(r *kmsg.FetchResponse) { r.ErrorCode = 71 },
		"garbage": func(r *kmsg.FetchResponse) {
			r.Topics[0].Partitions[0].UnknownTags = kmsg.Tags{}
			r.Topics[0].Partitions[0].RecordBatches = bytes.Repeat([]byte{7}, 500)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, direct.Config{}, one(12, 11))
			r.broker.spoil = spoil
			o := patient
			o.maxBytes = 100 // so that garbage has to be trimmed
			r.client.send(o.request([]position{{0, 0}}))
			var head [4]byte
			_, err := io.ReadFull(r.client.in, head[:])
			if dead := name == "nothing" || name == "other"; (err != nil) != dead {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestPanickingFetcher(t *testing.T) {
	r := newRig(t, direct.Config{Fetcher: panicky{}}, one(12, 3))
	r.drain(patient, 0, 0)
	if s := r.transport.Snapshot(); s.Fallbacks["panic"] == 0 || s.Served != 0 {
		t.Errorf("%+v", s)
	}
}

type panicky struct{ deadFetcher }

func (panicky) FetchLogSegment(context.Context, direct.Segment, int64, int64) (io.ReadCloser, error) {
	panic("at the fetcher")
}

// TestRestAndReturn: a dead store is left alone after some failures, and used again when it is back.
func TestRestAndReturn(t *testing.T) {
	r := newRig(t, direct.Config{RestMin: time.Millisecond, RestMax: 4 * time.Millisecond}, one(60, 1))
	r.bucket.Add(objstore.Fault{Op: objstore.OpGet, Err: objstore.ErrThrottled})
	o := patient
	at := []int64{0}
	o.partMax = 1
	for r.transport.Snapshot().Rests == 0 {
		check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{0, at[0]}}))
	}
	r.bucket.Clear()
	for r.transport.Snapshot().Served == 0 {
		at[0] = 0
		for at[0] < r.broker.parts[0].end() {
			check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{0, at[0]}}))
		}
	}
}

// TestGapIsTheBrokersWord: a hole between batches may be compaction or damage; the broker decides.
func TestGapIsTheBrokersWord(t *testing.T) {
	r := newRig(t, direct.Config{}, func(b objstore.Bucket) []*fakePartition {
		p := tieredPartition(silentT{}, objstore.NewMemory(), "p", 12, 11)
		p.batches = append(p.batches[:4:4], p.batches[6:]...)
		p.all = append(p.all[:12:12], p.all[18:]...)
		p.segments, p.commit = nil, nil
		p.tier(silentT{}, b, "p", 0, 9)
		return []*fakePartition{p}
	})
	r.drain(patient, 0, 0)
	if s := r.transport.Snapshot(); s.Served == 0 || s.Fallbacks["damaged"] != 1 {
		t.Errorf("%+v", s)
	}
}

// TestMemoryIsBounded: many partitions share the budget, and all of them arrive.
func TestMemoryIsBounded(t *testing.T) {
	const partitions, budget = 20, 1 << 20
	r := newRig(t, direct.Config{MemoryBytes: budget, RangeBytes: 256 << 10}, func(b objstore.Bucket) (out []*fakePartition) {
		for i := range partitions {
			p := &fakePartition{epoch: 5}
			for k := range 40 {
				p.append(silentT{}, recordbatch.CodecNone, -1, false, fmt.Sprint(i, k, strings.Repeat("m", 20_000)))
			}
			p.tier(silentT{}, b, fmt.Sprint("p", i), 0, 39)
			out = append(out, p)
		}
		return out
	})
	at := make([]int64, partitions)
	for {
		var want []position
		for i, p := range r.broker.parts {
			if at[i] < p.end() {
				want = append(want, position{int32(i), at[i]})
			}
		}
		if len(want) == 0 {
			break
		}
		check(r, r.broker.parts, at, patient, r.client.fetch(patient, want))
		if s := r.transport.Snapshot(); s.Buffered > budget+partitions*(64<<10+20_200) {
			t.Fatalf("%+v", s)
		}
	}
	if s := r.transport.Snapshot(); s.Served < 39*partitions*20_000 || s.Streams != 0 {
		t.Errorf("%+v", s)
	}
}

// TestStateOutlivesConnections: a client that comes back on another connection finds its read-ahead.
func TestStateOutlivesConnections(t *testing.T) {
	r := newRig(t, direct.Config{}, one(30, 29))
	o := patient
	o.partMax = 1
	at := []int64{0}
	for range 5 {
		check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{0, at[0]}}))
		r.client.conn.Close()
		r.client = r.dial()
	}
	if s := r.transport.Snapshot(); s.Locations != 1 {
		t.Errorf("%+v", s)
	}
}

// TestTwoReadersOfOnePartition keep their own read-ahead, and idle read-ahead goes away.
func TestTwoReadersOfOnePartition(t *testing.T) {
	r := newRig(t, direct.Config{IdleTimeout: 4 * time.Millisecond}, one(30, 29))
	o := patient
	o.partMax = 1
	other := r.dial()
	a, b := []int64{0}, []int64{45}
	for range 5 {
		check(r, r.broker.parts, a, o, r.client.fetch(o, []position{{0, a[0]}}))
		check(r, r.broker.parts, b, o, other.fetch(o, []position{{0, b[0]}}))
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for range tick.C {
		if s := r.transport.Snapshot(); s.Streams == 0 {
			if s.Buffered != 0 {
				t.Errorf("%+v", s)
			}
			return
		}
	}
}

func TestCloseEndsEverything(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	bucket := objstore.WithFaults(objstore.NewMemory())
	broker := newFakeBroker(t, tieredPartition(t, bucket, "p", 20, 19))
	defer broker.close()
	f, err := objectstore.New(bucket, objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	transport, err := direct.New(direct.Config{Enabled: true, Fetcher: f, ConnectTimeout: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	never := make(chan struct{})
	for i := range 4 {
		conn, err := transport.Dial("tcp", broker.addr())
		if err != nil {
			t.Fatal(err)
		}
		c := newClient(t, conn)
		o := patient
		o.partMax = 1
		c.fetch(o, []position{{0, 3 * int64(i)}}) // leaves read-ahead behind
		bucket.Add(objstore.Fault{Op: objstore.OpGet, Block: never})
		c.send(patient.request([]position{{0, 0}})) // waits for the store
		c.send(patient.request([]position{{0, 60}}))
		bucket.Clear()
		if i == 0 {
			conn.Close()
		}
	}
	transport.Close()
	transport.Close()
	if s := transport.Snapshot(); s.Streams != 0 || s.Buffered != 0 {
		t.Errorf("%+v", s)
	}
}

func TestTLS(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "broker"}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, io.LimitReader(c, 12))
			}()
		}
	}()
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	transport := newTransport(t, direct.Config{Fetcher: deadFetcher{}, TLS: &tls.Config{RootCAs: pool}})
	conn, err := transport.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	frame := binary.BigEndian.AppendUint32(nil, 8)
	frame = append(frame, 0, 3, 0, 0, 0, 3, 0, 0) // sent back as it is, this is the answer to itself
	if _, err := conn.Write(frame); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(frame))
	if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, frame) {
		t.Errorf("%x, %v", got, err)
	}
	strict := newTransport(t, direct.Config{Fetcher: deadFetcher{}, TLS: &tls.Config{}})
	if _, err := strict.Dial("tcp", ln.Addr().String()); err == nil || !strings.Contains(err.Error(), "TLS") {
		t.Errorf("an unknown certificate: %v", err)
	}
}

func registry(t *testing.T, transport *direct.Transport) *prometheus.Registry {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(transport.Collector()); err != nil {
		t.Fatal(err)
	}
	return r
}

// TestNextLocationComesAhead: when a consumer reaches the end of a segment, the beginning of the next one is there.
func TestNextLocationComesAhead(t *testing.T) {
	r := newRig(t, direct.Config{}, one(21, 10))
	o := patient
	o.partMax = 1
	at := []int64{0}
	check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{0, 0}}))
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for range tick.C {
		if r.transport.Snapshot().Requests == 2 {
			break
		}
	}
	_, tagged, _ := r.broker.counts()
	if tagged != 2 {
		t.Fatalf("%d questions", tagged)
	}
	r.broker.do(func() { r.broker.errors[0] = 6 }) // from here on the broker is of no help, and none is needed
	for at[0] < 60 {
		check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{0, at[0]}}))
	}
}

// TestStalledBody: an object that begins and never ends is given up after the read timeout.
func TestStalledBody(t *testing.T) {
	r := newRig(t, direct.Config{Fetcher: stalling{}, ReadTimeout: 3 * time.Millisecond}, one(12, 3))
	r.drain(patient, 0, 0)
	if s := r.transport.Snapshot(); s.Fallbacks["read_timeout"] == 0 || s.Served != 0 {
		t.Errorf("%+v", s)
	}
}

type stalling struct{ deadFetcher }

func (stalling) FetchLogSegment(context.Context, direct.Segment, int64, int64) (io.ReadCloser, error) {
	body, _ := io.Pipe() // a Read ends with Close only
	return body, nil
}

// TestClientsThatKnowTheExtension get the broker's locations as they are.
func TestClientsThatKnowTheExtension(t *testing.T) {
	r := newRig(t, direct.Config{}, one(12, 11))
	req := patient.request([]position{{0, 0}})
	directfetch.SetFormats(req, []string{"ApacheKafkaV1"})
	directfetch.Request(&req.Topics[0].Partitions[0])
	resp := r.client.parse(18, r.client.receive(r.client.send(req)))
	if l, err := directfetch.Locations(&resp.Topics[0].Partitions[0]); err != nil || len(l) != 1 {
		t.Errorf("%+v %v", l, err)
	}
	if s := r.transport.Snapshot(); s.Locations != 0 {
		t.Errorf("%+v", s)
	}
}

// TestSeekAway: read-ahead at another offset is of no use to a seek, and of none to the seek back until it is asked for.
func TestSeekAway(t *testing.T) {
	r := newRig(t, direct.Config{}, one(60, 20))
	o := patient
	o.partMax = 1
	for _, to := range []int64{0, 100, 3, 177, 6, 50, 9} {
		at := []int64{to}
		for range 3 {
			if was := at[0]; was < r.broker.parts[0].end() { // beyond it the broker would wait
				check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{0, was}}))
				if at[0] == was {
					t.Errorf("nothing at %d", was)
				}
			}
		}
	}
}

// A client tells by the kind of an error whether a connection is worth another try: it must be a socket's.
func TestErrorsOfAConnectionAreASockets(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	transport := newTransport(t, direct.Config{Fetcher: foreignFetcher{}})
	dial := func() net.Conn {
		c, err := transport.DialContext(t.Context(), "tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	c := dial()
	broker, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	broker.Close()
	if _, err := c.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("read of a connection that the broker ended: %v", err)
	}
	call := (*os.SyscallError)(nil)
	if _, err := c.Write(make([]byte, 1)); !errors.As(err, &call) || call.Err != syscall.EPIPE {
		t.Errorf("write to a connection that the broker ended: %v", err)
	}
	c.Close()
	c = dial()
	c.Close()
	op := (*net.OpError)(nil)
	if _, err := c.Write(make([]byte, 1)); !errors.Is(err, net.ErrClosed) || !errors.As(err, &op) {
		t.Errorf("write to a connection of one's own that is closed: %v", err)
	}
	c = dial()
	defer c.Close()
	if err := c.SetReadDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) || !errors.As(err, &op) || !op.Timeout() {
		t.Errorf("read beyond a deadline: %v", err)
	}
}

// foreignFetcher is never asked.
type foreignFetcher struct{}

func (foreignFetcher) Formats() []string { return []string{"X"} }
func (foreignFetcher) FetchLogSegment(context.Context, direct.Segment, int64, int64) (io.ReadCloser, error) {
	return nil, direct.ErrNotFound
}

// Credentials change while a reader is at work: those of the file count, and nothing falls back.
func TestCredentialsThatRotate(t *testing.T) {
	file := filepath.Join(t.TempDir(), "credentials")
	var valid atomic.Value
	rotate := func(key string) {
		if err := os.WriteFile(file, []byte("[default]\naws_access_key_id="+key+"\naws_secret_access_key=s\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		valid.Store(key)
	}
	rotate("first")
	t.Setenv("AWS_ACCESS_KEY_ID", "")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "")
	var bucket objstore.Bucket
	var gets atomic.Int64
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if !strings.Contains(q.Header.Get("Authorization"), "Credential="+valid.Load().(string)+"/") {
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprint(w, "<Error><Code>InvalidAccessKeyId</Code></Error>")
			return
		}
		gets.Add(1)
		data, err := objstore.ReadAll(q.Context(), bucket, strings.TrimPrefix(q.URL.Path, "/bucket/"), 1<<20)
		if err != nil {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		http.ServeContent(w, q, "", time.Unix(1_700_000_000, 0), bytes.NewReader(data))
	}))
	defer store.Close()
	f, err := objectstore.Open("s3://bucket?path-style=true&endpoint="+store.URL+"&credentials-file="+file, objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, direct.Config{Fetcher: f}, one(40, 5))
	bucket = r.bucket
	r.drain(patient, 0, 60)
	before := gets.Load()
	rotate("second")
	r.drain(patient, 0, 0)
	s := r.transport.Snapshot()
	for cause, n := range s.Fallbacks {
		if n > 0 {
			t.Errorf("%d fallbacks for %s", n, cause)
		}
	}
	if before == 0 || gets.Load() == before {
		t.Errorf("%d and %d reads of the store", before, gets.Load()-before)
	}
}

// What the broker has itself is asked for as it is, once that was seen, and not for ever.
func TestLocalReadsPass(t *testing.T) {
	for age, again := range map[time.Duration]bool{time.Hour: false, time.Nanosecond: true} {
		for _, version := range []int16{4, 11, 12, 18} {
			r := newRig(t, direct.Config{MarksMaxAge: age}, one(40, 5))
			log := r.broker.parts[0]
			tail := log.end() - 3
			o := patient
			o.version = version
			at := []int64{tail}
			read := func() {
				at[0] = tail
				check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{0, tail}}))
			}
			read()
			_, before, _ := r.broker.counts()
			for range 5 {
				read()
			}
			if _, tagged, _ := r.broker.counts(); (tagged > before) != again {
				t.Errorf("version %d, age %v: %d fetches asked for locations, then %d", version, age, before, tagged)
			}
			r.drain(o, 0, 0) // what lies below is looked for in the bucket all the same
			if s := r.transport.Snapshot(); s.Served == 0 || s.BrokerBytes == 0 {
				t.Errorf("version %d: %+v", version, s)
			}
		}
	}
}
