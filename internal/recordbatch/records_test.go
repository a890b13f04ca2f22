package recordbatch

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/klauspost/compress/snappy"
	"pgregory.net/rapid"
)

func readAll(t testing.TB, b []byte) []Record {
	t.Helper()
	it, err := Records(b, 0)
	if err != nil {
		t.Fatal(err)
	}
	var out []Record
	for it.Next() {
		r := *it.Record()
		r.Headers = slices.Clone(r.Headers)
		out = append(out, r)
	}
	if it.Err() != nil {
		t.Fatal(it.Err())
	}
	return out
}

func TestRecordsOfKafkasBatch(t *testing.T) {
	got := readAll(t, unhex(t, vectorBatch))
	if len(got) != 2 || got[0].Offset != 100 || string(got[0].Key) != "k" || string(got[0].Value) != "v" ||
		got[1].Offset != 101 || got[1].Key != nil || string(got[1].Value) != "w" || got[1].Timestamp != 1700000000005 {
		t.Errorf("got %+v", got)
	}
	b := NewBuilder()
	b.BaseOffset, b.LeaderEpoch = 100, 5
	b.Add(Record{Timestamp: 1700000000000, Key: []byte("k"), Value: []byte("v")})
	b.Add(Record{Timestamp: 1700000000005, Value: []byte("w")})
	out, err := b.Build()
	if err != nil || hex.EncodeToString(out) != vectorBatch {
		t.Errorf("built %x, %v", out, err)
	}
}

func TestMarkerIsKafkas(t *testing.T) {
	m := EndTxnMarker(Marker{ProducerID: 1000, ProducerEpoch: 3, Commit: true, CoordinatorEpoch: 7, Timestamp: 1700000000010, BaseOffset: 102, LeaderEpoch: 5})
	if hex.EncodeToString(m) != vectorMarker {
		t.Errorf("got %x", m)
	}
	c, ok, err := ControlOf(m)
	if err != nil || !ok || c != (Control{ControlCommit, 7}) {
		t.Errorf("got %v, %v, %v", c, ok, err)
	}
	if _, _, err := ControlOf(unhex(t, vectorBatch)); !errors.Is(err, ErrInvalidRecord) {
		t.Errorf("data taken for control: %v", err)
	}
	for _, bad := range []string{"", "0000", "ffff0001"} {
		if _, err := ParseControl(unhex(t, bad), nil); err == nil {
			t.Errorf("key %s was read", bad)
		}
	}
	if _, err := ParseControl(unhex(t, "00000001"), unhex(t, "0000000000")); err == nil {
		t.Error("short marker value was read")
	}
}

func drawRecords(t *rapid.T) []Record {
	field := rapid.OneOf(rapid.Just([]byte(nil)), rapid.SliceOfN(rapid.Byte(), 0, 40))
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Record {
		r := Record{Timestamp: rapid.Int64Range(-5, 1<<41).Draw(t, "ts"), Key: field.Draw(t, "key"), Value: field.Draw(t, "value")}
		for range rapid.IntRange(0, 3).Draw(t, "headers") {
			r.Headers = append(r.Headers, RecordHeader{rapid.StringN(0, 5, 20).Draw(t, "name"), field.Draw(t, "hv")})
		}
		return r
	}), 1, 30).Draw(t, "records")
}

// TestBuildAndReadAgree takes random records through every codec and back.
func TestBuildAndReadAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := NewBuilder()
		b.Codec = Codec(rapid.IntRange(0, 4).Draw(t, "codec"))
		if b.Codec != CodecSnappy && b.Codec != CodecNone {
			b.Level = rapid.IntRange(0, 9).Draw(t, "level")
		}
		b.BaseOffset = rapid.Int64Range(0, math.MaxInt64/2).Draw(t, "base")
		want := drawRecords(t)
		for i := range want {
			want[i].Offset = b.BaseOffset + int64(i)
			b.Add(want[i])
		}
		raw, err := b.Build()
		if err != nil {
			t.Fatal(err)
		}
		if err := VerifyCRC(raw); err != nil {
			t.Fatal(err)
		}
		it, err := Records(raw, 0)
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; it.Next(); i++ {
			if got, w := fmt.Sprintf("%#v", *it.Record()), want[i]; !sameRecord(*it.Record(), w) {
				t.Fatalf("record %d: got %s, want %#v", i, got, w)
			}
		}
		if it.Err() != nil || it.left != 0 {
			t.Fatalf("%d left: %v", it.left, it.Err())
		}
	})
}

func sameRecord(a, b Record) bool {
	same := func(x, y []byte) bool { return (x == nil) == (y == nil) && bytes.Equal(x, y) }
	return a.Offset == b.Offset && a.Timestamp == b.Timestamp && same(a.Key, b.Key) && same(a.Value, b.Value) &&
		slices.EqualFunc(a.Headers, b.Headers, func(x, y RecordHeader) bool { return x.Key == y.Key && same(x.Value, y.Value) })
}

func TestBareSnappyIsReadToo(t *testing.T) {
	payload := bytes.Repeat([]byte("abcdefgh"), 1000)
	got, err := decompress(CodecSnappy, nil, snappy.Encode(nil, payload), 1<<20)
	if err != nil || !bytes.Equal(got, payload) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
}

// TestBombsAreBounded feeds each decoder much from little, and claims that no data back.
func TestBombsAreBounded(t *testing.T) {
	zeros := make([]byte, 64<<20)
	for _, codec := range []Codec{CodecGzip, CodecLZ4, CodecZstd, CodecSnappy} {
		bomb, err := compress(codec, 0, nil, zeros)
		if err != nil {
			t.Fatal(err)
		}
		var got []byte
		allocated := testing.AllocsPerRun(1, func() { got, err = decompress(codec, nil, bomb, 1<<20) })
		if !errors.Is(err, ErrCorrupt) || got != nil {
			t.Errorf("%s: %d bytes of %d allowed (%v allocations): %v", codec, len(got), 1<<20, allocated, err)
		}
		if got, err := decompress(codec, nil, bomb, 64<<20); err != nil || len(got) != len(zeros) {
			t.Errorf("%s at the limit: %d bytes, %v", codec, len(got), err)
		}
	}
	claim := binary.AppendUvarint(nil, 100<<20)
	if _, err := decompress(CodecSnappy, nil, append(claim, 0, 0), 128<<20); !errors.Is(err, ErrCorrupt) {
		t.Errorf("snappy claim: %v", err)
	}
	if _, err := decompress(Codec(5), nil, nil, 0); !errors.Is(err, ErrUnsupportedCompression) {
		t.Errorf("codec 5: %v", err)
	}
}

func plain(t testing.TB, n int, change func(*Builder)) []byte {
	t.Helper()
	b := NewBuilder()
	if change != nil {
		change(b)
	}
	for i := range n {
		b.Add(Record{Timestamp: 1000 + int64(i), Key: []byte("key"), Value: []byte("value")})
	}
	out, err := b.Build()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func lax() *Rules {
	return &Rules{NowMs: 5000, TimestampBeforeMaxMs: math.MaxInt64, TimestampAfterMaxMs: 3600000}
}

func reseal(b []byte) []byte {
	binary.BigEndian.PutUint32(b[posCRC:], Checksum(b))
	return b
}

func TestValidateRefuses(t *testing.T) {
	two := append(plain(t, 1, nil), plain(t, 2, nil)...)
	for name, c := range map[string]struct {
		raw   []byte
		rules func(*Rules)
		want  error
	}{
		"nothing":           {nil, nil, ErrInvalidRecord},
		"half a header":     {plain(t, 1, nil)[:30], nil, ErrCorrupt},
		"half a batch":      {plain(t, 1, nil)[:70], nil, ErrCorrupt},
		"magic 1":           {reseal(set(plain(t, 1, nil), posMagic, 1)), nil, ErrUnsupportedMagic},
		"flipped bit":       {set(plain(t, 1, nil), 65, 0xff), nil, ErrCorrupt},
		"codec 6":           {reseal(set(plain(t, 1, nil), posAttrs+1, 6)), nil, ErrUnsupportedCompression},
		"too large":         {plain(t, 1, nil), func(r *Rules) { r.MaxMessageBytes = 70 }, ErrTooLarge},
		"two batches":       {two, nil, ErrInvalidRecord},
		"base offset":       {plain(t, 1, func(b *Builder) { b.BaseOffset = 1 }), nil, ErrInvalidRecord},
		"control":           {EndTxnMarker(Marker{}), nil, ErrInvalidRecord},
		"log append time":   {plain(t, 1, func(b *Builder) { b.LogAppendTime = true }), nil, ErrInvalidTimestamp},
		"delete horizon":    {reseal(set(plain(t, 1, nil), posAttrs+1, attrDeleteHorizon)), nil, ErrInvalidRecord},
		"no sequence":       {plain(t, 1, func(b *Builder) { b.ProducerID, b.ProducerEpoch = 1, 0 }), nil, ErrInvalidRecord},
		"txn, no producer":  {plain(t, 1, func(b *Builder) { b.Transactional = true }), nil, ErrInvalidRecord},
		"count over":        {reseal(set(set(plain(t, 2, nil), posCount+3, 3), posLastDelta+3, 2)), nil, ErrInvalidRecord},
		"count under":       {reseal(set(set(plain(t, 2, nil), posCount+3, 1), posLastDelta+3, 0)), nil, ErrInvalidRecord},
		"delta and count":   {reseal(set(plain(t, 2, nil), posLastDelta+3, 2)), nil, ErrInvalidRecord},
		"empty":             {reseal(set(set(plain(t, 1, nil), posCount+3, 0), posLastDelta+3, 0)), nil, ErrInvalidRecord},
		"bad record length": {reseal(set(plain(t, 1, nil), HeaderSize, 2)), nil, ErrInvalidRecord},
		"bad compression":   {reseal(append(plain(t, 1, func(b *Builder) { b.Codec = CodecZstd })[:HeaderSize:HeaderSize], plain(t, 1, func(b *Builder) { b.Codec = CodecGzip })[HeaderSize:]...)), nil, ErrCorrupt},
		"gap in offsets":    {gap(t), nil, ErrInvalidRecord},
		"future":            {plain(t, 3, nil), func(r *Rules) { r.NowMs = -3599000 }, ErrInvalidTimestamp},
		"past":              {plain(t, 3, nil), func(r *Rules) { r.TimestampBeforeMaxMs = 10 }, ErrInvalidTimestamp},
		"keyless":           {keyless(t), func(r *Rules) { r.RequireKeys = true }, ErrInvalidRecord},
	} {
		rules := lax()
		if c.rules != nil {
			c.rules(rules)
		}
		if name == "bad compression" {
			binary.BigEndian.PutUint32(c.raw[posLength:], uint32(len(c.raw)-LengthOverhead))
		}
		if _, _, err := Validate(c.raw, rules, nil); !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, want %v", name, err, c.want)
		}
	}
	rules := lax()
	rules.Internal = true
	if _, hs, err := Validate(append(two, EndTxnMarker(Marker{})...), rules, nil); err != nil || len(hs) != 3 {
		t.Errorf("internal append: %d batches, %v", len(hs), err)
	}
}

func set(b []byte, pos int, v byte) []byte { b[pos] = v; return b }

func gap(t testing.TB) []byte {
	b := NewBuilder()
	b.AddAt(Record{Offset: 0})
	b.AddAt(Record{Offset: 2})
	out, err := b.Build()
	if err != nil {
		t.Fatal(err)
	}
	return reseal(set(out, posCount+3, 3))
}

func keyless(t testing.TB) []byte {
	b := NewBuilder()
	b.Add(Record{Key: []byte{}})
	b.Add(Record{})
	out, err := b.Build()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestValidateNamesTheRecords(t *testing.T) {
	rules := lax()
	rules.NowMs = -3598998 // newest allowed is 1002 - 1
	rules.TimestampAfterMaxMs = 3600000 - 1
	_, _, err := Validate(plain(t, 4, nil), rules, nil)
	var re *RecordsError
	if !errors.As(err, &re) || len(re.Records) != 2 || re.Records[0].Index != 2 || re.Records[1].Index != 3 {
		t.Fatalf("got %v (%+v)", err, re)
	}
	rules = lax()
	rules.RequireKeys = true
	_, _, err = Validate(keyless(t), rules, nil)
	if !errors.As(err, &re) || len(re.Records) != 1 || re.Records[0].Index != 1 {
		t.Fatalf("got %v (%+v)", err, re)
	}
	rules.TimestampBeforeMaxMs = math.MaxInt64
	rules.RequireKeys = false
	b := NewBuilder()
	b.Add(Record{Timestamp: -5})
	b.Add(Record{Timestamp: math.MinInt64 / 2})
	raw, _ := b.Build()
	if _, _, err := Validate(raw, rules, nil); err != nil {
		t.Errorf("negative timestamps pass by default: %v", err)
	}
}

func TestValidateStampsAndCorrectsTimestamps(t *testing.T) {
	rules := lax()
	rules.LogAppendTime = true
	rules.NowMs = 77
	raw, hs, err := Validate(plain(t, 3, nil), rules, nil)
	if err != nil || hs[0].MaxTimestamp != 77 || !hs[0].LogAppendTime() || VerifyCRC(raw) != nil {
		t.Fatalf("%+v, %v, %v", hs, err, VerifyCRC(raw))
	}
	for _, r := range readAll(t, raw) {
		if r.Timestamp != 77 {
			t.Errorf("record time %d", r.Timestamp)
		}
	}
	lie := plain(t, 3, nil)
	SetMaxTimestamp(lie, 99999, false)
	raw, hs, err = Validate(lie, lax(), nil)
	if err != nil || hs[0].MaxTimestamp != 1002 || VerifyCRC(raw) != nil {
		t.Fatalf("%+v, %v", hs, err)
	}
}

func TestValidateRecompresses(t *testing.T) {
	for from := CodecNone; from <= CodecZstd; from++ {
		for to := CodecNone; to <= CodecZstd; to++ {
			src := plain(t, 50, func(b *Builder) { b.Codec = from; b.ProducerID, b.ProducerEpoch, b.BaseSequence = 9, 1, 5 })
			want := readAll(t, src)
			rules := lax()
			rules.Recompress, rules.Codec = true, to
			raw, hs, err := Validate(src, rules, nil)
			if err != nil {
				t.Fatal(err)
			}
			if hs[0].Codec() != to || hs[0].Size != len(raw) || hs[0].BaseSequence != 5 || VerifyCRC(raw) != nil {
				t.Errorf("%s to %s: %+v", from, to, hs[0])
			}
			if got := readAll(t, raw); !slices.EqualFunc(got, want, sameRecord) {
				t.Errorf("%s to %s: records differ", from, to)
			}
			if (from == to) != (&src[0] == &raw[0]) {
				t.Errorf("%s to %s: rewritten without need, or not at all", from, to)
			}
		}
	}
	for name, want := range map[string]Codec{"producer": CodecNone, "uncompressed": CodecNone, "gzip": CodecGzip, "snappy": CodecSnappy, "lz4": CodecLZ4, "zstd": CodecZstd} {
		if c, re, err := ParseCodec(name); c != want || re != (name != "producer") || err != nil {
			t.Errorf("%s: %v %v %v", name, c, re, err)
		}
	}
	if _, _, err := ParseCodec("brotli"); !errors.Is(err, ErrUnsupportedCompression) {
		t.Error(err)
	}
}

// TestValidateAllocatesNothingPerRecord holds the produce path to its budget.
func TestValidateAllocatesNothingPerRecord(t *testing.T) {
	raw := plain(t, 5000, nil)
	rules := lax()
	headers := make([]Header, 0, 1)
	if n := testing.AllocsPerRun(20, func() {
		if _, _, err := Validate(raw, rules, headers); err != nil {
			t.Fatal(err)
		}
	}); n > 2 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkValidate(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 2))
	value := make([]byte, 1000)
	for i := range value {
		value[i] = "abcdefghijklmnop"[r.IntN(16)]
	}
	for _, codec := range []Codec{CodecNone, CodecLZ4, CodecZstd} {
		bld := NewBuilder()
		bld.Codec = codec
		for range 1000 {
			bld.Add(Record{Timestamp: 1000, Value: value})
		}
		raw, err := bld.Build()
		if err != nil {
			b.Fatal(err)
		}
		b.Run(codec.String(), func(b *testing.B) {
			b.SetBytes(int64(bld.Size()))
			b.ReportAllocs()
			rules := lax()
			var hs [1]Header
			for b.Loop() {
				if _, _, err := Validate(raw, rules, hs[:0]); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func FuzzRecords(f *testing.F) {
	f.Add(unhex(f, vectorBatch))
	f.Add(unhex(f, vectorMarker))
	for c := CodecNone; c <= CodecZstd; c++ {
		f.Add(plain(f, 3, func(b *Builder) { b.Codec = c }))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		it, err := Records(b, 1<<20)
		if err != nil {
			return
		}
		n := 0
		for it.Next() {
			n++
		}
		if it.Err() == nil && n != int(it.Header().Count) {
			t.Fatalf("%d records of %d without an error", n, it.Header().Count)
		}
		_, _, _ = ControlOf(b)
	})
}

func FuzzValidate(f *testing.F) {
	f.Add(unhex(f, vectorBatch), false)
	f.Add(plain(f, 3, nil), true)
	f.Add(plain(f, 3, func(b *Builder) { b.Codec = CodecLZ4 }), true)
	f.Fuzz(func(t *testing.T, b []byte, seal bool) {
		if seal && len(b) >= HeaderSize {
			b = reseal(slices.Clone(b))
		}
		rules := lax()
		rules.DecompressLimit = 1 << 20
		rules.Recompress, rules.Codec = true, CodecLZ4
		raw, hs, err := Validate(b, rules, nil)
		if err != nil {
			return
		}
		// What was accepted can be read, and would be accepted again.
		if len(hs) != 1 || hs[0].Size != len(raw) {
			t.Fatalf("accepted %+v in %d bytes", hs, len(raw))
		}
		if _, _, err := Validate(raw, rules, nil); err != nil {
			t.Fatalf("not accepted again: %v", err)
		}
		it, err := Records(raw, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		for it.Next() {
		}
		if it.Err() != nil {
			t.Fatal(it.Err())
		}
	})
}
