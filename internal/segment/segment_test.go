package segment

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"testing"

	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/vfs"
	"pgregory.net/rapid"
)

func TestIndexVectors(t *testing.T) {
	offsets, _ := hex.DecodeString("00000005000010680000000a00002134")
	x := NewOffsetIndex(50, offsets)
	for target, want := range map[int64]OffsetPosition{49: {50, 0}, 54: {50, 0}, 55: {55, 4200}, 59: {55, 4200}, 60: {60, 8500}, 99: {60, 8500}} {
		if got, err := x.Lookup(target); err != nil || got != want {
			t.Errorf("lookup %d: %v, %v", target, got, err)
		}
	}
	y := OpenOffsetIndex(50, bytes.NewReader(offsets), int64(len(offsets)))
	for pos, want := range map[int64]OffsetPosition{0: {50, 0}, 4199: {50, 0}, 4200: {55, 4200}, 9999: {60, 8500}} {
		if got, err := y.FloorPosition(pos); err != nil || got != want {
			t.Errorf("floor of position %d: %v, %v", pos, got, err)
		}
	}
	if got, ok, err := y.CeilingPosition(4201); err != nil || !ok || got.Offset != 60 {
		t.Errorf("ceiling of position: %v, %v, %v", got, ok, err)
	}
	if _, ok, _ := y.CeilingPosition(8501); ok {
		t.Error("ceiling past the end")
	}
	if got, ok, err := y.CeilingOffset(56); err != nil || !ok || got.Position != 8500 {
		t.Errorf("ceiling of offset: %v, %v, %v", got, ok, err)
	}
	if err := x.Check(61, 8501); err != nil {
		t.Error(err)
	}
	if err := x.Check(60, 8501); !errors.Is(err, ErrIndex) {
		t.Error("offset past the end passes")
	}
	if err := NewOffsetIndex(50, make([]byte, 4096)).Check(61, 8501); !errors.Is(err, ErrIndex) {
		t.Error("zeros pass")
	}
	times, _ := hex.DecodeString("0000018bcfe5680000000005")
	z := NewTimeIndex(50, times)
	if got, _ := z.Lookup(1700000000000); got != (TimestampOffset{1700000000000, 55}) {
		t.Errorf("time: %v", got)
	}
	if got, _ := z.Lookup(1699999999999); got != (TimestampOffset{-1, 50}) {
		t.Errorf("time before: %v", got)
	}
	if err := NewTimeIndex(50, make([]byte, 4092)).Check(61); !errors.Is(err, ErrIndex) {
		t.Error("zero times pass")
	}
}

func TestTxnVectorAndSearch(t *testing.T) {
	one := producerstate.AbortedTxn{ProducerID: 1000, FirstOffset: 42, LastOffset: 100, LastStableOffset: 101}
	b := AppendTxn(nil, one)
	if hex.EncodeToString(b) != "000000000000000003e8000000000000002a00000000000000640000000000000065" {
		t.Errorf("got %x", b)
	}
	b = AppendTxn(b, producerstate.AbortedTxn{ProducerID: 1, FirstOffset: 110, LastOffset: 120, LastStableOffset: 121})
	for _, c := range []struct {
		from, upTo int64
		n          int
		complete   bool
	}{{0, 42, 0, true}, {0, 43, 1, true}, {100, 101, 1, true}, {101, 110, 0, true}, {50, 111, 2, true}, {101, 200, 1, false}} {
		got, complete, err := SearchTxns(nil, b, c.from, c.upTo)
		if err != nil || len(got) != c.n || complete != c.complete {
			t.Errorf("[%d, %d): %v, %v, %v", c.from, c.upTo, got, complete, err)
		}
	}
	for _, bad := range [][]byte{b[:40], append([]byte{0, 1}, b[2:]...), append(b[34:68:68], b[:34]...)} {
		if _, err := ParseTxnIndex(bad); !errors.Is(err, ErrIndex) {
			t.Errorf("%x was read", bad)
		}
	}
}

func TestFileNames(t *testing.T) {
	if got := FileName(42, LogSuffix); got != "00000000000000000042.log" {
		t.Error(got)
	}
	if o, s, ok := ParseFileName("00000000000000000042.log"); o != 42 || s != LogSuffix || !ok {
		t.Error(o, s, ok)
	}
	for _, bad := range []string{"", "42.log", "0000000000000000004x.log", "00000000000000000042", "99999999999999999999.log", "+0000000000000000042.log"} {
		if _, _, ok := ParseFileName(bad); ok {
			t.Errorf("%q was read", bad)
		}
	}
}

// batches draws batches with rising offsets and any timestamps, as they lie in a file.
func batches(t *rapid.T, base int64) (raw []byte, headers []recordbatch.Header) {
	next := base
	for range rapid.IntRange(1, 40).Draw(t, "batches") {
		b := recordbatch.NewBuilder()
		b.BaseOffset = next + rapid.SampledFrom([]int64{0, 0, 0, 7}).Draw(t, "gap")
		for range rapid.IntRange(1, 4).Draw(t, "records") {
			b.Add(recordbatch.Record{Timestamp: rapid.Int64Range(0, 1000).Draw(t, "time"), Value: make([]byte, rapid.IntRange(0, 120).Draw(t, "size"))})
		}
		one, err := b.Build()
		if err != nil {
			t.Fatal(err)
		}
		h, err := recordbatch.ParseHeader(one)
		if err != nil {
			t.Fatal(err)
		}
		next = h.NextOffset()
		raw, headers = append(raw, one...), append(headers, h)
	}
	return raw, headers
}

// TestLookupsEqualAPlainWalk compares every look-up, on a growing and on a sealed segment, with what a walk over
// all batches gives.
func TestLookupsEqualAPlainWalk(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		fsys := vfs.NewMem()
		files := NewFileCache(fsys, 2)
		base := rapid.SampledFrom([]int64{0, 1000}).Draw(t, "base")
		raw, headers := batches(t, base)
		interval := rapid.SampledFrom([]int{0, 100, 1000}).Draw(t, "interval")
		w, err := Create(files, fsys, "/", base, interval, 0)
		if err != nil {
			t.Fatal(err)
		}
		pos := 0
		for i := 0; i < len(headers); {
			n := min(rapid.IntRange(1, 3).Draw(t, "together"), len(headers)-i)
			start := pos
			for _, h := range headers[i : i+n] {
				pos += h.Size
			}
			if err := w.Append(raw[start:pos], headers[i:i+n]); err != nil {
				t.Fatal(err)
			}
			i += n
		}
		next := headers[len(headers)-1].NextOffset()
		growing := w.Reader()
		check(t, growing, raw, headers)
		scanned, err := Scan(bytes.NewReader(raw), base, int64(len(raw)), interval, func(*recordbatch.Header, []byte, *Indexes) error { return nil })
		if err != nil || scanned.Corrupt != nil || scanned.Next != next {
			t.Fatalf("scan: %+v, %v", scanned, err)
		}
		if !bytes.Equal(scanned.Indexes.Offsets(), w.indexes.Offsets()) || !bytes.Equal(scanned.Indexes.Times(), w.indexes.Times()) {
			t.Fatal("scan builds other indexes than append")
		}
		sealed, err := w.Seal(next + 5)
		if err != nil {
			t.Fatal(err)
		}
		check(t, sealed, raw, headers)
		x, err := BuildIndexes(bytes.NewReader(raw), 0, int64(len(raw)), base, interval)
		if err != nil {
			t.Fatal(err)
		}
		offsets, times, err := sealed.Indexes()
		if err != nil || !bytes.Equal(x.Offsets(), offsets) || !bytes.Equal(x.Times(), times) {
			t.Fatalf("built indexes differ from sealed ones: %v", err)
		}
		if files.Len() > 2 {
			t.Fatalf("%d files open", files.Len())
		}
	})
}

func check(t *rapid.T, r *Reader, raw []byte, headers []recordbatch.Header) {
	log, err := r.OpenLog()
	if err != nil {
		t.Fatal(err)
	}
	defer log.Release()
	last := headers[len(headers)-1].LastOffset()
	for o := r.Base; o <= last+1; o++ {
		i, pos := 0, int64(0)
		for ; i < len(headers) && headers[i].LastOffset() < o; i++ {
			pos += int64(headers[i].Size)
		}
		f, ok, err := r.Find(log, o)
		if err != nil || ok != (i < len(headers)) || ok && (f.Position != pos || f.Header != headers[i]) {
			t.Fatalf("find %d: %+v, %v, %v; want batch %d", o, f, ok, err, i)
		}
		if !ok {
			continue
		}
		maxBytes := rapid.Int64Range(0, 600).Draw(t, "max")
		upTo := rapid.Int64Range(r.Base, last+3).Draw(t, "up to")
		one := rapid.Bool().Draw(t, "one")
		end := pos
		for j := i; j < len(headers) && headers[j].NextOffset() <= upTo && (end+int64(headers[j].Size) <= pos+maxBytes || one && j == i); j++ {
			end += int64(headers[j].Size)
		}
		gotEnd, gotNext, err := r.Cut(log, f, maxBytes, upTo, one)
		if err != nil || gotEnd != end {
			t.Fatalf("cut from %d, %d bytes, up to %d, one %v: end %d, %v; want %d", o, maxBytes, upTo, one, gotEnd, err, end)
		}
		if end == r.Size {
			if gotNext != r.Next {
				t.Fatalf("next %d at the end", gotNext)
			}
		} else if h, _ := recordbatch.ParseHeader(raw[end:]); gotNext > h.BaseOffset || end > pos && gotNext <= o {
			// In a hole between batches either end of it will do.
			t.Fatalf("next %d after %d, the next batch is at %d", gotNext, o, h.BaseOffset)
		}
	}
	ts, from := rapid.Int64Range(0, 1001).Draw(t, "ts"), rapid.Int64Range(r.Base, last+1).Draw(t, "from")
	want := fmt.Sprint(FindTimestampFrom(bytes.NewReader(raw), 0, int64(len(raw)), ts, from))
	if got := fmt.Sprint(r.FindTimestamp(ts, from)); got != want {
		t.Fatalf("time %d from %d: got %s, want %s", ts, from, got, want)
	}
	best := TimestampOffset{-1, -1}
	for _, h := range headers {
		if h.MaxTimestamp > best.Timestamp {
			best = TimestampOffset{h.MaxTimestamp, h.LastOffset()}
		}
	}
	if got, err := r.Max(); err != nil || got != best {
		t.Fatalf("max %v, %v, want %v", got, err, best)
	}
}

func TestDamagedIndexIsNotTrusted(t *testing.T) {
	var raw []byte
	for i := range int64(50) {
		b := recordbatch.NewBuilder()
		b.BaseOffset = i
		b.Add(recordbatch.Record{Value: make([]byte, 100)})
		one, err := b.Build()
		if err != nil {
			t.Fatal(err)
		}
		raw = append(raw, one...)
	}
	f, ok, err := FindFrom(bytes.NewReader(raw), int64(len(raw)), OffsetPosition{30, 777}, 31)
	if err != nil || !ok || f.Header.BaseOffset != 31 {
		t.Errorf("position inside a batch: %+v, %v, %v", f, ok, err)
	}
	f, ok, err = FindFrom(bytes.NewReader(raw), int64(len(raw)), OffsetPosition{3, 40 * int64(len(raw)) / 50}, 4)
	if err != nil || !ok || f.Header.BaseOffset != 4 {
		t.Errorf("another batch: %+v, %v, %v", f, ok, err)
	}
}

func TestScanStopsAtDamage(t *testing.T) {
	b := recordbatch.NewBuilder()
	b.Add(recordbatch.Record{Value: []byte("v")})
	one, err := b.Build()
	if err != nil {
		t.Fatal(err)
	}
	second := bytes.Clone(one)
	recordbatch.SetBaseOffset(second, 1)
	whole := append(bytes.Clone(one), second...)
	for cut := len(one); cut <= len(whole); cut++ {
		got, err := Scan(bytes.NewReader(whole[:cut]), 0, int64(cut), 100, func(*recordbatch.Header, []byte, *Indexes) error { return nil })
		want, next := int64(len(one)), int64(1)
		if cut == len(whole) {
			want, next = int64(cut), 2
		}
		if err != nil || got.Size != want || got.Next != next || (got.Corrupt != nil) != (cut > len(one) && cut < len(whole)) {
			t.Fatalf("cut at %d: %+v, %v", cut, got, err)
		}
	}
	again := append(bytes.Clone(one), one...)
	got, err := Scan(bytes.NewReader(again), 0, int64(len(again)), 100, func(*recordbatch.Header, []byte, *Indexes) error { return nil })
	if err != nil || got.Corrupt == nil || got.Size != int64(len(one)) {
		t.Errorf("offsets that do not rise: %+v, %v", got, err)
	}
}

func TestForgottenFilesStayReadable(t *testing.T) {
	fsys := vfs.NewMem()
	files := NewFileCache(fsys, 4)
	if err := vfs.WriteFile(fsys, "/f", []byte("old")); err != nil {
		t.Fatal(err)
	}
	h, err := files.Acquire("/f", false)
	if err != nil {
		t.Fatal(err)
	}
	files.Forget("/f")
	if err := fsys.Remove("/f"); err != nil {
		t.Fatal(err)
	}
	if err := vfs.WriteFile(fsys, "/f", []byte("new")); err != nil {
		t.Fatal(err)
	}
	for want, h := range map[string]*Handle{"old": h, "new": must(files.Acquire("/f", false))} {
		b := make([]byte, 3)
		if _, err := h.ReadAt(b, 0); err != nil || string(b) != want {
			t.Errorf("got %q, %v, want %q", b, err, want)
		}
		h.Release()
	}
	if files.Len() != 1 {
		t.Errorf("%d files open", files.Len())
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func FuzzIndexes(f *testing.F) {
	f.Add([]byte{0, 0, 0, 5, 0, 0, 16, 104}, int64(55))
	f.Add(AppendTxn(nil, producerstate.AbortedTxn{ProducerID: 1, FirstOffset: 2, LastOffset: 3, LastStableOffset: 4}), int64(1))
	f.Fuzz(func(t *testing.T, b []byte, target int64) {
		x := NewOffsetIndex(50, b)
		if _, err := x.Lookup(target); err != nil {
			t.Fatal(err)
		}
		if _, err := x.FloorPosition(target); err != nil {
			t.Fatal(err)
		}
		x.CeilingPosition(target)
		_ = x.Check(target, target)
		z := NewTimeIndex(50, b)
		if _, err := z.Lookup(target); err != nil {
			t.Fatal(err)
		}
		_ = z.Check(target)
		if txns, err := ParseTxnIndex(b); err == nil {
			var again []byte
			for _, txn := range txns {
				again = AppendTxn(again, txn)
			}
			if !bytes.Equal(again, b) {
				t.Fatal("transaction index is not stable")
			}
		}
		SearchTxns(nil, b, target, target+10)
	})
}

func FuzzScan(f *testing.F) {
	b := recordbatch.NewBuilder()
	b.Add(recordbatch.Record{Value: []byte("v")})
	one := must(b.Build())
	f.Add(append(one, one...))
	f.Fuzz(func(t *testing.T, raw []byte) {
		got, err := Scan(bytes.NewReader(raw), 0, int64(len(raw)), 10, func(*recordbatch.Header, []byte, *Indexes) error { return nil })
		if err != nil || got.Size > int64(len(raw)) || got.Corrupt == nil && got.Size != int64(len(raw)) {
			t.Fatalf("%+v, %v", got, err)
		}
		FindTimestampFrom(bytes.NewReader(raw), 0, int64(len(raw)), 0, 0)
		FindFrom(bytes.NewReader(raw), int64(len(raw)), OffsetPosition{1, 1}, 1)
	})
}
