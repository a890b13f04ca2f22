package direct_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/objstore/s3"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/s3test"
)

// BenchmarkTransport measures bytes of records from an object in memory through the transport to a bare client that only
// reads them. allocs/op are per answer of about a mebibyte.
func BenchmarkTransport(b *testing.B) {
	bucket := objstore.NewMemory()
	p := bigPartition(b, bucket)
	log, err := bucket.Get(context.Background(), p.segments[0].key, 0, -1)
	if err != nil {
		b.Fatal(err)
	}
	data, err := io.ReadAll(log)
	if err != nil {
		b.Fatal(err)
	}
	benchmark(b, p, direct.Config{Fetcher: memoryFetcher(data)})
}

// BenchmarkS3Ranges is the same from a real S3 server on loopback, for the choice of RangeBytes and RangesPerPartition.
func BenchmarkS3Ranges(b *testing.B) {
	server := s3test.Start(b)
	bucket, err := s3.New(server.Options())
	if err != nil {
		b.Fatal(err)
	}
	p := bigPartition(b, bucket)
	f, err := objectstore.New(bucket, objectstore.Options{})
	if err != nil {
		b.Fatal(err)
	}
	for _, size := range []int64{1 << 20, 4 << 20, 8 << 20} {
		for _, n := range []int{1, 2, 4, 8} {
			b.Run(fmt.Sprintf("%dMiB/%d", size>>20, n), func(b *testing.B) {
				benchmark(b, p, direct.Config{Fetcher: f, RangeBytes: size, RangesPerPartition: n, ConnectTimeout: time.Minute})
			})
		}
	}
}

// bigPartition is 64 MiB in one segment.
func bigPartition(b *testing.B, bucket objstore.Bucket) *fakePartition {
	p := &fakePartition{epoch: 5}
	value := strings.Repeat("v", 1024)
	values := make([]string, 16)
	for i := range values {
		values[i] = value
	}
	for range 64 << 20 / (16 << 10) {
		p.append(b, recordbatch.CodecNone, -1, false, values...)
	}
	p.all = nil
	p.tier(b, bucket, "p", 0, len(p.batches))
	return p
}

func benchmark(b *testing.B, p *fakePartition, cfg direct.Config) {
	broker := newFakeBroker(b, p)
	defer broker.close()
	cfg.Enabled = true
	transport, err := direct.New(cfg)
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
