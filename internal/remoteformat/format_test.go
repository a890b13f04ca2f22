package remoteformat

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/tp"
)

func TestKeys(t *testing.T) {
	const key = "someprefix/topic-MWJ6FHTfRYy67jzwZdeqSQ/7/00000000000000001234-tqimKeZwStOEOwRzT3L5oQ.log"
	k, o, err := ParseKey("someprefix/", key)
	if err != nil || o != ObjectLog || k.Topic != "topic" || k.Partition != 7 || k.Start != 1234 || k.Object("someprefix/", o) != key {
		t.Errorf("%+v %v %v", k, o, err)
	}
	for _, bad := range []string{"", "x", "topic-MWJ6FHTfRYy67jzwZdeqSQ/7/1234-tqimKeZwStOEOwRzT3L5oQ.log", "topic-MWJ6FHTfRYy67jzwZdeqSQ/07/00000000000000001234-tqimKeZwStOEOwRzT3L5oQ.log",
		"-MWJ6FHTfRYy67jzwZdeqSQ/7/00000000000000001234-tqimKeZwStOEOwRzT3L5oQ.log", "topic-MWJ6FHTfRYy67jzwZdeqSQ/7/00000000000000001234-tqimKeZwStOEOwRzT3L5oQ.txt",
		"topic-MWJ6FHTfRYy67jzwZdeqSQ/7/-0000000000000001234-tqimKeZwStOEOwRzT3L5oQ.log", "a/topic-MWJ6FHTfRYy67jzwZdeqSQ/7/00000000000000001234-tqimKeZwStOEOwRzT3L5oQ.log"} {
		if _, _, err := ParseKey("", bad); !errors.Is(err, ErrKey) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestKeysRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		id := func(label string) (u tp.UUID) {
			copy(u[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, label))
			return u
		}
		k := Key{Topic: rapid.StringMatching(`[a-zA-Z0-9._-]{1,20}`).Draw(t, "topic"), TopicID: id("topic id"), ID: id("id"),
			Partition: rapid.Int32Range(0, 1<<31-1).Draw(t, "partition"), Start: rapid.Int64Range(0, 1<<62).Draw(t, "start")}
		prefix := rapid.SampledFrom([]string{"", "kafka/", "pre-", "a/b-"}).Draw(t, "prefix")
		o := Object(rapid.IntRange(0, 2).Draw(t, "object"))
		got, kind, err := ParseKey(prefix, k.Object(prefix, o))
		if err != nil || got != k || kind != o {
			t.Fatalf("%+v %v %v", got, kind, err)
		}
	})
}

func TestChunkSizesVectors(t *testing.T) {
	for _, c := range []struct {
		hex  string
		ends []int64
	}{
		{"000000030000000a01000a0000001e", []int64{10, 30, 60}},
		{"00000004000f424001000a1400000005", []int64{1000000, 2000010, 3000030, 3000035}},
		{"00000000", nil}, {"0000000100000007", []int64{7}},
		{"000000020000023801" + "00" + "000000d1", []int64{568, 777}},
	} {
		bin, err := hex.DecodeString(c.hex)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := decodeSizes(bin); err != nil || !reflect.DeepEqual(got, c.ends) {
			t.Errorf("%s: %v %v", c.hex, got, err)
		}
		if got := encodeSizes(c.ends); !bytes.Equal(got, bin) {
			t.Errorf("%v: %x instead of %s", c.ends, got, c.hex)
		}
	}
	var x ChunkIndex
	err := json.Unmarshal([]byte(`{"type":"variable","originalChunkSize":100,"originalFileSize":250,"transformedChunks":"KLUv/SAPeQAAAAAAAwAAAAoBAAoAAAAe"}`), &x)
	if err != nil || !reflect.DeepEqual(x.ends, []int64{10, 30, 60}) {
		t.Errorf("%+v %v", x, err)
	}
}

func TestChunkIndexMapsBothWays(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		chunk := rapid.Int64Range(1, 50).Draw(t, "chunk")
		file := rapid.Int64Range(1, 500).Draw(t, "file")
		var x ChunkIndex
		if rapid.Bool().Draw(t, "fixed") {
			x = NewFixedIndex(chunk, file, rapid.SampledFrom([]int64{0, 28}).Draw(t, "overhead"))
		} else {
			n := int((file + chunk - 1) / chunk)
			var err error
			if x, err = NewVariableIndex(chunk, file, rapid.SliceOfN(rapid.Int64Range(1, 1<<20), n, n).Draw(t, "sizes")); err != nil {
				t.Fatal(err)
			}
		}
		b, err := json.Marshal(x)
		if err != nil {
			t.Fatal(err)
		}
		var again ChunkIndex
		if err := json.Unmarshal(b, &again); err != nil || !reflect.DeepEqual(again, x) {
			t.Fatalf("%s: %+v %v", b, again, err)
		}
		var pos, stored int64
		for i := range x.Count() {
			c := x.Chunk(i)
			if c.Position != pos || c.StoredPosition != stored || c.Size <= 0 || c.StoredSize <= 0 {
				t.Fatalf("chunk %+v at %d, %d", c, pos, stored)
			}
			for _, p := range []int64{c.StoredPosition, c.StoredPosition + c.StoredSize - 1} {
				if back, ok := x.Find(p); !ok || back != c {
					t.Fatalf("find %d: %+v instead of %+v", p, back, c)
				}
			}
			pos, stored = pos+c.Size, stored+c.StoredSize
		}
		if pos != file || stored != x.StoredSize() {
			t.Fatalf("chunks end at %d, %d of %d, %d", pos, stored, file, x.StoredSize())
		}
		from := rapid.Int64Range(0, file-1).Draw(t, "from")
		to := rapid.Int64Range(from+1, file+20).Draw(t, "to")
		off, n, pf, pt := x.StoredRange(from, to)
		if pf > from || pt < min(to, file) || from-pf >= chunk || off < 0 || off+n > x.StoredSize() {
			t.Fatalf("range %d-%d: %d+%d, %d-%d", from, to, off, n, pf, pt)
		}
	})
}

func TestEpochsAreInNumericOrder(t *testing.T) {
	m := Manifest{Chunks: NewFixedIndex(10, 25, 0), Metadata: Metadata{Epochs: []leaderepoch.Entry{{Epoch: 2, StartOffset: 5}, {Epoch: 9, StartOffset: 7}, {Epoch: 10, StartOffset: 8}}}}
	b, err := m.Encode()
	if err != nil || !strings.Contains(string(b), `"segmentLeaderEpochs":{"2":5,"9":7,"10":8}`) {
		t.Errorf("%s %v", b, err)
	}
	again, err := ParseManifest(b)
	if err != nil || !reflect.DeepEqual(*again, m) {
		t.Errorf("%+v %v", again, err)
	}
}

func TestCustomMetadata(t *testing.T) {
	size, path, prefix := int64(100), "foo", "p/"
	b := CustomMetadata{RemoteSize: &size, Path: &path}.Encode()
	if hex.EncodeToString(b) != "02000"+"2c801020404666f6f" {
		t.Errorf("%x", b)
	}
	for _, c := range []CustomMetadata{{}, {RemoteSize: &size}, {Prefix: &prefix}, {&size, &prefix, &path}} {
		got, err := ParseCustomMetadata(c.Encode())
		if err != nil || !reflect.DeepEqual(got, c) {
			t.Errorf("%+v %v", got, err)
		}
	}
	if got, err := ParseCustomMetadata([]byte{1, 9, 1, 0xff}); err != nil || !reflect.DeepEqual(got, CustomMetadata{}) {
		t.Errorf("unknown tag: %+v %v", got, err)
	}
	for _, bad := range []string{"80", "01", "0100", "010005c801", "0200", "020001c8020001c8", "01010200ff", "0100"} {
		b, _ := hex.DecodeString(bad)
		if _, err := ParseCustomMetadata(b); !errors.Is(err, ErrCustomMetadata) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestKeyringRefusals(t *testing.T) {
	var k Keyring
	for id, pem := range map[string]string{"": "x", "a:b": "x", "c": "no pem", "d": ""} {
		if err := k.Add(id, []byte(pem), nil); err == nil {
			t.Errorf("%q accepted", id)
		}
	}
	if _, err := k.Unwrap("who:AAAA"); !errors.Is(err, ErrNoKey) {
		t.Errorf("%v", err)
	}
}

// A frame that promises little and holds much must not be unpacked.
func TestBombs(t *testing.T) {
	enc, err := newEncoder()
	if err != nil {
		t.Fatal(err)
	}
	bomb := enc.EncodeAll(make([]byte, 64<<20), nil)
	if _, err := unzstd(bomb, maxChunkBin); err == nil {
		t.Error("chunk index bomb unpacked")
	}
	x, err := NewVariableIndex(1000, 1000, []int64{int64(len(bomb))})
	if err != nil {
		t.Fatal(err)
	}
	m := Manifest{Chunks: x, Compressed: true}
	b, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	s, err := Open(b, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.DecodeChunk(0, bomb); !errors.Is(err, ErrChunk) {
		t.Errorf("%v", err)
	}
}

func TestWriteRefusals(t *testing.T) {
	short := strings.NewReader("abc")
	for i, c := range []struct {
		src Source
		o   WriteOptions
	}{{Source{Log: short, Size: 0}, WriteOptions{}}, {Source{Log: short, Size: 10}, WriteOptions{Compress: true}},
		{Source{Log: short, Size: 3}, WriteOptions{ActiveKey: "none", Rand: rand.NewChaCha8([32]byte{})}}, {Source{Log: short, Size: 3}, WriteOptions{ChunkSize: -1}}} {
		if _, err := Write(c.src, c.o, &bytes.Buffer{}); err == nil {
			t.Errorf("case %d accepted", i)
		}
	}
}

func FuzzManifest(f *testing.F) {
	m := Manifest{Chunks: NewFixedIndex(10, 25, 0), Metadata: Metadata{Epochs: []leaderepoch.Entry{{Epoch: 2, StartOffset: 5}}}}
	b, err := m.Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"version":"1","chunkIndex":{"type":"variable","originalChunkSize":100,"originalFileSize":250,"transformedChunks":"KLUv/SAPeQAAAAAAAwAAAAoBAAoAAAAe"},"compression":true}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := Open(b, nil)
		if err != nil {
			return
		}
		x := s.Chunks()
		if n := x.Count(); n > 0 {
			for _, i := range []int{0, n / 2, n - 1} {
				c := x.Chunk(i)
				if c.Size <= 0 || c.StoredSize <= 0 || c.Position < 0 || c.StoredPosition < 0 {
					t.Fatalf("%+v", c)
				}
			}
			if c, ok := x.Find(x.StoredSize() - 1); !ok || c.Index != n-1 {
				t.Fatalf("last byte in %+v %v", c, ok)
			}
		}
		_, _ = s.DecodeIndexes(b)
		_, _ = s.DecodeChunk(0, b)
	})
}

func FuzzChunkSizes(f *testing.F) {
	f.Add([]byte{0, 0, 0, 3, 0, 0, 0, 10, 1, 0, 10, 0, 0, 0, 30})
	f.Fuzz(func(t *testing.T, b []byte) {
		ends, err := decodeSizes(b)
		if err == nil && len(ends) > len(b) {
			t.Fatal("more chunks than bytes")
		}
	})
}

func FuzzKey(f *testing.F) {
	f.Add("topic-MWJ6FHTfRYy67jzwZdeqSQ/7/00000000000000001234-tqimKeZwStOEOwRzT3L5oQ.log")
	f.Fuzz(func(t *testing.T, s string) {
		k, o, err := ParseKey("", s)
		if err == nil && k.Object("", o) != s {
			t.Fatalf("%+v from %q", k, s)
		}
	})
}

func FuzzCustomMetadata(f *testing.F) {
	f.Add([]byte{2, 0, 2, 0xc8, 1, 2, 4, 4, 'f', 'o', 'o'})
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := ParseCustomMetadata(b)
		if err != nil {
			return
		}
		again, err := ParseCustomMetadata(c.Encode())
		if err != nil || !reflect.DeepEqual(again, c) {
			t.Fatalf("%+v %+v %v", c, again, err)
		}
	})
}
