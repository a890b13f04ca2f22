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
	if err := r.client.conn.SetWriteDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	for i := int32(0); ; i++ {
		_, err := r.client.conn.Write(wire.AppendRequest(nil, i, "bare", patient.request([]position{{0, 0}})))
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal("the connection goes on")
		}
		if err != nil {
			break
		}
	}
	if _, _, n := r.broker.counts(); n > 8*limit {
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

// A request of many tiered partitions takes as much memory for read-ahead as there is, not a range for each of them.
func TestManyTieredPartitionsTakeBoundedMemory(t *testing.T) {
	const partitions = 300
	r := newRig(t, direct.Config{MemoryBytes: 64 << 10}, func(b objstore.Bucket) []*fakePartition {
		var all []*fakePartition
		for i := range partitions {
			all = append(all, tieredPartition(t, b, fmt.Sprint("p", i), 6, 5))
		}
		return all
	})
	at := make([]int64, partitions)
	var from []position
	for i := range at {
		from = append(from, position{int32(i), 0})
	}
	o := patient
	o.minimum = 1 << 20
	o.waitMs = 200
	resp := r.client.fetch(o, from)
	if s := r.transport.Snapshot(); s.Locations > 100 || s.Locations == 0 {
		t.Errorf("%d places are being read", s.Locations)
	}
	check(r, r.broker.parts, at, o, resp)
}
