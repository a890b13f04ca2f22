package recordbatch

import (
	"bytes"
	"fmt"
	"testing"
)

func compactable(t testing.TB, codec Codec, n int) []byte {
	t.Helper()
	b := NewBuilder()
	b.BaseOffset, b.LeaderEpoch, b.Codec = 100, 4, codec
	b.ProducerID, b.ProducerEpoch, b.BaseSequence = 9, 2, 30
	for i := range n {
		b.Add(Record{Timestamp: 1000 + int64(i)*7, Key: fmt.Append(nil, i), Value: bytes.Repeat([]byte{byte(i)}, i), Headers: []RecordHeader{{"h", nil}, {"i", []byte{1}}}})
	}
	raw, err := b.Build()
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func records(t testing.TB, batch []byte) (out []string) {
	t.Helper()
	h, err := ParseHeader(batch)
	if err == nil {
		err = h.Verify(batch)
	}
	if err != nil {
		t.Fatal(err)
	}
	it, err := Records(batch, 0)
	if err != nil {
		t.Fatal(err)
	}
	for it.Next() {
		out = append(out, fmt.Sprintf("%+v", *it.Record()))
	}
	if it.Err() != nil {
		t.Fatal(it.Err())
	}
	return out
}

func TestCompact(t *testing.T) {
	for _, codec := range []Codec{CodecNone, CodecGzip, CodecSnappy, CodecLZ4, CodecZstd} {
		raw := compactable(t, codec, 6)
		was, all := records(t, raw), func(*Record) bool { return true }
		if out, kept, err := new(Compactor).Compact(raw, 0, -1, all); err != nil || kept != 6 || &out[0] != &raw[0] {
			t.Errorf("%s: unchanged: %d, %v", codec, kept, err)
		}
		for horizon, rebased := range map[int64]bool{-1: false, 5000: true} {
			out, kept, err := new(Compactor).Compact(raw, 0, horizon, func(r *Record) bool { return r.Offset != 101 && r.Offset != 105 })
			if err != nil || kept != 4 {
				t.Fatalf("%s: %d, %v", codec, kept, err)
			}
			if got, want := fmt.Sprint(records(t, out)), fmt.Sprint([]string{was[0], was[2], was[3], was[4]}); got != want {
				t.Errorf("%s: %s, want %s", codec, got, want)
			}
			h, _ := ParseHeader(out)
			old, _ := ParseHeader(raw)
			if h.LastOffset() != 105 || h.BaseOffset != 100 || h.ProducerID != 9 || h.ProducerEpoch != 2 || h.BaseSequence != 30 || h.LastSequence() != old.LastSequence() ||
				h.LeaderEpoch != 4 || h.MaxTimestamp != 1028 || h.Codec() != codec || h.HasDeleteHorizon() != rebased || rebased && h.BaseTimestamp != horizon {
				t.Errorf("%s: %+v", codec, h)
			}
			// A second time: the horizon stays.
			again, kept, err := new(Compactor).Compact(out, 0, -1, func(r *Record) bool { return r.Offset == 103 })
			if err != nil || kept != 1 || records(t, again)[0] != was[3] {
				t.Errorf("%s: again: %v, %v", codec, kept, err)
			}
			if g, _ := ParseHeader(again); g.HasDeleteHorizon() != rebased || g.BaseTimestamp != h.BaseTimestamp {
				t.Errorf("%s: again: %+v", codec, g)
			}
		}
		out, kept, err := new(Compactor).Compact(raw, 0, 5000, func(*Record) bool { return false })
		if err != nil || kept != 0 || len(out) != HeaderSize {
			t.Fatalf("%s: empty: %d, %d bytes, %v", codec, kept, len(out), err)
		}
		if h, err := ParseHeader(out); err != nil || h.Verify(out) != nil || h.Count != 0 || h.LastOffset() != 105 || h.Codec() != CodecNone || h.HasDeleteHorizon() || h.MaxTimestamp != 1035 {
			t.Errorf("%s: empty: %+v, %v", codec, h, err)
		}
	}
}

func FuzzCompact(f *testing.F) {
	for _, codec := range []Codec{CodecNone, CodecZstd} {
		f.Add(compactable(f, codec, 5), int64(-1), byte(3))
		f.Add(compactable(f, codec, 5), int64(700), byte(2))
	}
	f.Fuzz(func(t *testing.T, raw []byte, horizon int64, every byte) {
		keep := func(r *Record) bool { return every == 0 || r.Offset%int64(every) == 0 }
		out, kept, err := new(Compactor).Compact(raw, 1<<20, horizon, keep)
		if err != nil {
			return
		}
		again, twice, err := new(Compactor).Compact(out, 1<<20, -1, keep)
		if err != nil || twice != kept || kept > 0 && &again[0] != &out[0] {
			t.Fatalf("%d records, then %d: %v", kept, twice, err)
		}
	})
}
