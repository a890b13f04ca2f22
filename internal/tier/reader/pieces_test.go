package reader_test

import (
	"bytes"
	"math"
	"testing"

	"github.com/varve-io/varve/internal/tier/reader"
)

// Reads give out the cached blocks themselves: one piece per block, the same memory each time, and no way to append into it.
func TestReadsShareTheirBlocks(t *testing.T) {
	w := makeWorld(t, plain)
	r := w.reader(t, func(o *reader.Options) { o.BlockBytes = 1500 })
	read := func(offset int64) reader.Pieces {
		res, err := r.Read(t.Context(), w.segs[:1], offset, math.MaxInt32, math.MaxInt64, true)
		if err != nil {
			t.Fatal(err)
		}
		return res.Records
	}
	first, again, later := read(0), read(0), read(10)
	if blocks := int((w.segs[0].Size + 1499) / 1500); len(first) != blocks {
		t.Errorf("%d pieces of %d blocks", len(first), blocks)
	}
	for i := range first {
		if &first[i][0] != &again[i][0] {
			t.Errorf("piece %d is a copy", i)
		}
		if len(first[i]) != cap(first[i]) {
			t.Errorf("piece %d can be appended to", i)
		}
	}
	if !bytes.HasSuffix(first.Bytes(), later.Bytes()) || later.Size() >= first.Size() {
		t.Error("a later read differs")
	}
}

// Pieces that were given out stay as they are when their blocks leave the cache.
func TestPiecesOutliveTheCache(t *testing.T) {
	w := makeWorld(t, plain)
	r := w.reader(t, func(o *reader.Options) { o.ChunkCacheBytes = 1 })
	res, err := r.Read(t.Context(), w.segs, 0, 5000, math.MaxInt64, true)
	if err != nil {
		t.Fatal(err)
	}
	want := bytes.Clone(res.Records.Bytes())
	for next := res.NextOffset; next < 300; {
		other, err := r.Read(t.Context(), w.segs, next, 5000, math.MaxInt64, true)
		if err != nil {
			t.Fatal(err)
		}
		next = other.NextOffset
	}
	r.Forget(w.segs[0].ID)
	if !bytes.Equal(res.Records.Bytes(), want) || !bytes.HasPrefix(w.log, want) {
		t.Error("the bytes have changed")
	}
}

func BenchmarkReadCached(b *testing.B) {
	w := makeWorld(b, plain)
	r := w.reader(b, func(o *reader.Options) { o.BlockBytes = 1 << 20 })
	b.SetBytes(w.segs[0].Size)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := r.Read(b.Context(), w.segs[:1], 0, math.MaxInt32, math.MaxInt64, true); err != nil {
			b.Fatal(err)
		}
	}
}
