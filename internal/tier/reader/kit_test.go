package reader_test

import (
	"bytes"
	"crypto/rand"
	"os"
	"path/filepath"
	"testing"

	"github.com/varve-io/varve/internal/fixtures"
	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tier/reader"
	"github.com/varve-io/varve/internal/tier/uploader"
	"github.com/varve-io/varve/internal/tp"
)

// world is a tier of three segments of 100 offsets each, ten batches of ten records; record i has timestamp 1000*i.
type world struct {
	bucket *objstore.Faults
	segs   tier.Segments
	log    []byte  // all plain bytes
	starts []int64 // base offsets of batches
	ring   *remoteformat.Keyring
}

const perBatch, perSegment, segmentsOfWorld = 10, 100, 3

func ring(t *testing.T) *remoteformat.Keyring {
	t.Helper()
	var k remoteformat.Keyring
	dir := filepath.Join(fixtures.Dir(t), "tiered/keys")
	private, err := os.ReadFile(filepath.Join(dir, "private.pem"))
	if err != nil {
		t.Fatal(err)
	}
	if err := k.Add("fixture", private, nil); err != nil {
		t.Fatal(err)
	}
	return &k
}

func makeWorld(t testing.TB, write remoteformat.WriteOptions) *world {
	t.Helper()
	w := &world{bucket: objstore.WithFaults(objstore.NewMemory()), ring: write.Keyring}
	for n := range int64(segmentsOfWorld) {
		start := n * perSegment
		var log []byte
		for base := start; base < start+perSegment; base += perBatch {
			b := recordbatch.NewBuilder()
			b.BaseOffset, b.LeaderEpoch = base, int32(n)
			for i := base; i < base+perBatch; i++ {
				b.Add(recordbatch.Record{Timestamp: 1000 * i, Key: []byte("key"), Value: bytes.Repeat([]byte{byte(i)}, 30)})
			}
			batch, err := b.Build()
			if err != nil {
				t.Fatal(err)
			}
			log = append(log, batch...)
			w.starts = append(w.starts, base)
		}
		x, err := segment.BuildIndexes(bytes.NewReader(log), 0, int64(len(log)), start, 600)
		if err != nil {
			t.Fatal(err)
		}
		x.Seal()
		var epochs []leaderepoch.Entry
		for e := range int32(n + 1) {
			epochs = append(epochs, leaderepoch.Entry{Epoch: e, StartOffset: int64(e) * perSegment})
		}
		s := &tier.Segment{ID: tp.UUID{1, 15: byte(n)}, Topic: "t", TopicID: tp.UUID{2}, Start: start, End: start + perSegment - 1, MaxTimestamp: 1000 * (start + perSegment - 1),
			Size: int64(len(log)), Epochs: epochs[n:], State: tier.CopyFinished, TxnIndexEmpty: n != 1}
		src := uploader.Source{Log: bytes.NewReader(log), Size: int64(len(log)), OffsetIndex: x.Offsets(), TimeIndex: x.Times(),
			ProducerSnapshot: producerstate.MarshalSnapshot(nil), LeaderEpochs: leaderepoch.Marshal(epochs)}
		if n == 1 {
			src.TxnIndex = segment.AppendTxn(nil, producerstate.AbortedTxn{ProducerID: 7, FirstOffset: 50, LastOffset: 150, LastStableOffset: 151})
		}
		res, err := uploader.Upload(t.Context(), w.bucket, s, src, uploader.Options{Prefix: "p/", Write: write})
		if err != nil {
			t.Fatal(err)
		}
		s.Format, s.ObjectBytes, s.CRC = res.Format, res.ObjectBytes, res.CRC
		w.segs = append(w.segs, s)
		w.log = append(w.log, log...)
	}
	return w
}

func (w *world) reader(t testing.TB, change func(*reader.Options)) *reader.Reader {
	t.Helper()
	o := reader.Options{Bucket: w.bucket, Prefix: "p/", Keyring: w.ring, BlockBytes: 1500, ReadAheadBytes: -1}
	if change != nil {
		change(&o)
	}
	r := reader.New(o)
	t.Cleanup(func() { r.Close() })
	return r
}

func variants(t *testing.T) map[string]remoteformat.WriteOptions {
	k := ring(t)
	return map[string]remoteformat.WriteOptions{
		"plain":      {},
		"compressed": {Compress: true, ChunkSize: 700},
		"both":       {Compress: true, ChunkSize: 4000, ActiveKey: "fixture", Keyring: k, Rand: rand.Reader},
		"encrypted":  {ChunkSize: 256, ActiveKey: "fixture", Keyring: k, Rand: rand.Reader},
	}
}

// bytesFrom are the batches from the one that holds offset up to upTo.
func (w *world) bytesFrom(t testing.TB, offset, upTo int64) []byte {
	t.Helper()
	var out []byte
	for rest := w.log; len(rest) > 0; {
		h, err := recordbatch.ParseHeader(rest)
		if err != nil {
			t.Fatal(err)
		}
		if h.LastOffset() >= offset && h.NextOffset() <= upTo {
			out = append(out, rest[:h.Size]...)
		}
		rest = rest[h.Size:]
	}
	return out
}

var plain = remoteformat.WriteOptions{}
