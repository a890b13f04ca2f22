package direct_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/wire"
)

// A Fetch takes memory by what it is, not by what its lengths claim: topics are many times as large in memory as the two bytes that
// they take at least.
func TestFetchOfManyTopicsTakesLittleMemory(t *testing.T) {
	near, far := net.Pipe()
	defer far.Close()
	f, err := objectstore.New(objstore.NewMemory(), objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	transport := newTransport(t, direct.Config{Fetcher: f, Dial: func(context.Context, string, string) (net.Conn, error) { return near, nil }})
	conn, err := transport.Dial("tcp", "broker:9092")
	if err != nil {
		t.Fatal(err)
	}
	const size = 16 << 20
	b := binary.BigEndian.AppendUint32(nil, size)
	b = append(b, 0, 1, 0, 4, 0, 0, 0, 7, 0, 0) // Fetch v4, correlation id, no client id
	b = append(b, bytes.Repeat([]byte{0xff}, 4+4+4+4+1)...)
	left := 4 + size - len(b) - 4
	b = append(binary.BigEndian.AppendUint32(b, uint32(left/2)), make([]byte, left)...)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	go conn.Write(b)
	far.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.ReadFull(far, make([]byte, 20)); err != nil { // it asks for features, or passes the request on
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 4*size {
		t.Errorf("a request of %d MiB took %d MiB", size>>20, n>>20)
	}
}

// Answers that wait for their turn are bounded, those to Fetch too: a client that asks and asks and never reads loses its connection.
func TestUnreadFetchesAreBounded(t *testing.T) {
	const limit = 1 << 20
	r := newRig(t, direct.Config{MaxFrameBytes: limit}, func(objstore.Bucket) []*fakePartition { return []*fakePartition{large(t)} })
	at := make(chan struct{})
	go func() {
		defer close(at)
		for i := range 100 {
			if _, err := r.client.conn.Write(wire.AppendRequest(nil, int32(i), "bare", patient.request([]position{{0, 0}}))); err != nil {
				return
			}
		}
	}()
	<-at
	time.Sleep(500 * time.Millisecond)
	if _, _, n := r.broker.counts(); n > 8*limit { // some are on the way
		t.Errorf("%d bytes of answers wait, allowed are %d", n, limit)
	}
}

// A partition that a request names again and again is asked about once.
func TestRepeatedPartitions(t *testing.T) {
	r := newRig(t, direct.Config{}, one(30, 10))
	var at []position
	for range 200 {
		at = append(at, position{0, r.broker.parts[0].end() - 1})
	}
	o := patient
	o.waitMs = 10
	r.client.fetch(o, at)
	if n, _, _ := r.broker.counts(); n > 2 {
		t.Errorf("one request became %d", n)
	}
}
