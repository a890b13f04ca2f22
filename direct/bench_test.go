package direct_test

import (
	"bytes"
	"context"
	"io"
	"strings"
	"testing"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/recordbatch"
)

// BenchmarkTransport measures bytes of records from an object in memory through the transport to a bare client that only
// reads them. allocs/op are per answer of about a mebibyte.
func BenchmarkTransport(b *testing.B) {
	bucket := objstore.NewMemory()
	p := &fakePartition{epoch: 5}
	value := strings.Repeat("v", 1024)
	for range 64 << 20 / (16 << 10) {
		p.append(b, recordbatch.CodecNone, -1, false, value, value, value, value, value, value, value, value, value, value, value, value, value, value, value, value)
	}
	p.all = nil
	p.tier(b, bucket, "p", 0, len(p.batches))
	log, err := bucket.Get(context.Background(), p.segments[0].key, 0, -1)
	if err != nil {
		b.Fatal(err)
	}
	data, err := io.ReadAll(log)
	if err != nil {
		b.Fatal(err)
	}
	broker := newFakeBroker(b, p)
	defer broker.close()
	transport, err := direct.New(direct.Config{Enabled: true, Fetcher: memoryFetcher(data)})
	if err != nil {
		b.Fatal(err)
	}
	defer transport.Close()
	conn, err := transport.Dial("tcp", broker.addr())
	if err != nil {
		b.Fatal(err)
	}
	c := newClient(b, conn)
	o := patient
	o.version = 12
	b.ReportAllocs()
	total := int64(0)
	at := int64(0)
	buffer := make([]byte, 4<<20)
	for b.Loop() {
		if at >= p.end() {
			at = 0
		}
		c.send(o.request([]position{{0, at}}))
		if _, err := io.ReadFull(c.in, buffer[:4]); err != nil {
			b.Fatal(err)
		}
		n := int(buffer[0])<<24 | int(buffer[1])<<16 | int(buffer[2])<<8 | int(buffer[3])
		if _, err := io.ReadFull(c.in, buffer[:n]); err != nil {
			b.Fatal(err)
		}
		// The records end in front of three empty sections of tagged fields.
		records := buffer[n-3-(n-3)/len(p.batches[0].b)*len(p.batches[0].b) : n-3]
		for len(records) > 0 {
			h, err := recordbatch.ParseHeader(records)
			if err != nil {
				b.Fatal(err)
			}
			at = h.NextOffset()
			records = records[h.Size:]
		}
		total += int64(n)
	}
	b.SetBytes(total / int64(b.N))
	if s := transport.Snapshot(); s.BrokerBytes > 0 {
		b.Errorf("%+v", s)
	}
}

// memoryFetcher costs one copy.
type memoryFetcher []byte

func (m memoryFetcher) FetchLogSegment(_ context.Context, _ direct.Segment, start, end int64) (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(m[start:end])), nil
}
func (memoryFetcher) Formats() []string { return []string{"ApacheKafkaV1"} }
