package recordbatch

import (
	"encoding/hex"
	"errors"
	"math"
	"testing"
)

// Two batches that Kafka's own classes wrote.
const (
	vectorBatch  = "000000000000006400000042000000050201949b280000000000010000018bcfe568000000018bcfe56805ffffffffffffffffffffffffffff0000000210000000026b0276000e000a0201027700"
	vectorMarker = "00000000000000660000004200000005029d3d22370030000000000000018bcfe5680a0000018bcfe5680a00000000000003e80003ffffffff000000012000000008000000010c00000000000700"
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestHeaderOfKafkasBatches(t *testing.T) {
	b := unhex(t, vectorBatch)
	h, err := ParseHeader(b)
	if err != nil {
		t.Fatal(err)
	}
	want := Header{BaseOffset: 100, Size: 78, LeaderEpoch: 5, CRC: 0x01949b28, LastOffsetDelta: 1, BaseTimestamp: 1700000000000,
		MaxTimestamp: 1700000000005, ProducerID: -1, ProducerEpoch: -1, BaseSequence: -1, Count: 2}
	if h != want {
		t.Errorf("got %+v", h)
	}
	if h.LastOffset() != 101 || h.NextOffset() != 102 || h.LastSequence() != -1 || h.HasProducer() || h.IsControl() {
		t.Errorf("derived fields of %+v", h)
	}
	if err := VerifyCRC(b); err != nil {
		t.Error(err)
	}
	m, err := ParseHeader(unhex(t, vectorMarker))
	if err != nil {
		t.Fatal(err)
	}
	if !m.IsControl() || !m.IsTransactional() || m.ProducerID != 1000 || m.ProducerEpoch != 3 || !m.HasProducer() {
		t.Errorf("marker: %+v", m)
	}
}

func TestHeaderRefusesWhatCannotBe(t *testing.T) {
	for name, c := range map[string]struct {
		change func([]byte) []byte
		want   error
	}{
		"short":          {func(b []byte) []byte { return b[:60] }, ErrShort},
		"magic 1":        {func(b []byte) []byte { b[16] = 1; return b[:20] }, ErrUnsupportedMagic},
		"magic 3":        {func(b []byte) []byte { b[16] = 3; return b }, ErrCorrupt},
		"length":         {func(b []byte) []byte { b[11] = 48; return b }, ErrCorrupt},
		"negative base":  {func(b []byte) []byte { b[0] = 0x80; return b }, ErrCorrupt},
		"negative delta": {func(b []byte) []byte { b[23] = 0x80; return b }, ErrCorrupt},
		"negative count": {func(b []byte) []byte { b[57] = 0x80; return b }, ErrCorrupt},
	} {
		if _, err := ParseHeader(c.change(unhex(t, vectorBatch))); !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, want %v", name, err, c.want)
		}
	}
	b := unhex(t, vectorBatch)
	b[70] ^= 1
	if err := VerifyCRC(b); !errors.Is(err, ErrCorrupt) {
		t.Errorf("flipped bit: %v", err)
	}
	if err := VerifyCRC(b[:70]); !errors.Is(err, ErrShort) {
		t.Errorf("cut batch: %v", err)
	}
}

func TestSettersKeepTheChecksum(t *testing.T) {
	b := unhex(t, vectorBatch)
	SetBaseOffset(b, 7)
	SetLeaderEpoch(b, 9)
	if err := VerifyCRC(b); err != nil {
		t.Errorf("offset and epoch are outside the checksum: %v", err)
	}
	SetMaxTimestamp(b, 42, true)
	if err := VerifyCRC(b); err != nil {
		t.Error(err)
	}
	h, _ := ParseHeader(b)
	if h.BaseOffset != 7 || h.LeaderEpoch != 9 || h.MaxTimestamp != 42 || !h.LogAppendTime() {
		t.Errorf("got %+v", h)
	}
}

func TestSequenceWraps(t *testing.T) {
	for _, c := range [][3]int32{{0, 0, 0}, {5, 4, 9}, {math.MaxInt32, 0, math.MaxInt32}, {math.MaxInt32, 1, 0}, {math.MaxInt32 - 1, 3, 1}} {
		if got := AddSequence(c[0], c[1]); got != c[2] {
			t.Errorf("%d + %d: got %d, want %d", c[0], c[1], got, c[2])
		}
	}
}

func FuzzParseHeader(f *testing.F) {
	f.Add(unhex(f, vectorBatch))
	f.Add(unhex(f, vectorMarker))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := ParseHeader(b)
		if err != nil {
			return
		}
		if h.Size < HeaderSize || h.NextOffset() <= h.BaseOffset {
			t.Fatalf("impossible header %+v", h)
		}
		h.LastSequence()
		_ = VerifyCRC(b)
	})
}

func TestVerifyPieces(t *testing.T) {
	b := unhex(t, vectorBatch)
	h, err := ParseHeader(b)
	if err != nil {
		t.Fatal(err)
	}
	for i := range len(b) + 1 {
		for j := i; j <= len(b); j++ {
			if err := h.VerifyPieces([][]byte{b[:i], b[i:j], b[j:]}); err != nil {
				t.Fatalf("cut at %d and %d: %v", i, j, err)
			}
		}
	}
	if err := h.VerifyPieces([][]byte{b[:40], b[40:77]}); !errors.Is(err, ErrShort) {
		t.Errorf("short: %v", err)
	}
	if err := h.VerifyPieces([][]byte{b, {0}}); !errors.Is(err, ErrShort) {
		t.Errorf("long: %v", err)
	}
	b[70] ^= 1
	if err := h.VerifyPieces([][]byte{b[:69], b[69:]}); !errors.Is(err, ErrCorrupt) {
		t.Errorf("damaged: %v", err)
	}
}
