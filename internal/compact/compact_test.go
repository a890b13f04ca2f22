package compact

import (
	"fmt"
	"math"
	"testing"

	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
)

func TestPlan(t *testing.T) {
	segments := []Segment{{0, 10, 100, 1000, 1100}, {10, 20, 100, 2000, 2100}, {20, 30, 100, 3000, 3100}}
	c := Config{DirtyRatio: 0.5, MaxLagMs: math.MaxInt64}
	with := func(change func(*Config)) Config { d := c; change(&d); return d }
	for _, x := range []struct {
		name            string
		cleaned, stable int64
		c               Config
		want            Plan
	}{
		{"all is new", 0, 100, c, Plan{0, 30, 0, 300, true}},
		{"a third is new", 20, 100, c, Plan{20, 30, 200, 100, false}},
		{"half is not more than half", 10, 20, with(func(c *Config) { c.DirtyRatio = 0.5 }), Plan{10, 20, 100, 100, false}},
		{"nothing is new", 30, 100, with(func(c *Config) { c.DirtyRatio = 0 }), Plan{30, 30, 300, 0, false}},
		{"an open transaction", 0, 29, c, Plan{0, 20, 0, 200, true}},
		{"all in doubt", 0, 5, c, Plan{0, 0, 0, 0, false}},
		{"in the middle of a segment", 25, 100, with(func(c *Config) { c.DirtyRatio = 0.1 }), Plan{25, 30, 200, 100, true}},
		{"retention passed it", 5, 100, c, Plan{5, 30, 0, 300, true}},
		{"another log", 900, 100, c, Plan{0, 30, 0, 300, true}},
		{"too young", 0, 100, with(func(c *Config) { c.MinLagMs = 1000 }), Plan{0, 20, 0, 200, true}},
		{"too old to wait", 20, 100, with(func(c *Config) { c.MaxLagMs = 500 }), Plan{20, 30, 200, 100, true}},
		{"not too old to wait", 20, 100, with(func(c *Config) { c.MaxLagMs = 1000 }), Plan{20, 30, 200, 100, false}},
	} {
		if got := MakePlan(segments, x.cleaned, x.stable, 3900, x.c); got != x.want {
			t.Errorf("%s: %+v, want %+v", x.name, got, x.want)
		}
	}
	if got := MakePlan(nil, 7, 100, 3900, c); got != (Plan{From: 7, To: 7}) {
		t.Errorf("no segments: %+v", got)
	}
	if got := MakePlan(segments[1:], 5, 100, 3900, c); got != (Plan{10, 30, 0, 200, true}) {
		t.Errorf("below the first segment: %+v", got)
	}
}

func TestMapIsBounded(t *testing.T) {
	m := NewMap(100*slotBytes, math.MaxInt32)
	room := m.Room()
	if room != 79 { // nine tenths of what is left beside the table that it grows from
		t.Fatalf("room for %d keys", room)
	}
	for i := range int64(room) {
		m.Put(fmt.Append(nil, i), i)
		m.Put(fmt.Append(nil, i), i+1000)
	}
	if m.Room() != 0 || m.Len() != room {
		t.Fatalf("room for %d beside %d", m.Room(), m.Len())
	}
	for i := range int64(room) {
		if key := fmt.Append(nil, i); !m.Superseded(key, i) || m.Superseded(key, i+1000) {
			t.Errorf("key %d", i)
		}
	}
	if m.Superseded([]byte("unknown"), 0) || m.Len() != room {
		t.Error("a key that nobody put")
	}
	if small := NewMap(1<<30, 3); len(small.slots) > 10 {
		t.Errorf("%d slots for three offsets", len(small.slots))
	}
	if tiny := NewMap(0, 100); tiny.Room() != 1 {
		t.Errorf("room for %d", tiny.Room())
	}
}

// batchOf builds a batch at an offset; values "" are tombstones.
func batchOf(t *testing.T, base int64, change func(*recordbatch.Builder), pairs ...string) []byte {
	t.Helper()
	b := recordbatch.NewBuilder()
	b.BaseOffset = base
	if change != nil {
		change(b)
	}
	for i := 0; i < len(pairs); i += 2 {
		r := recordbatch.Record{Timestamp: 500, Key: []byte(pairs[i])}
		if pairs[i+1] != "" {
			r.Value = []byte(pairs[i+1])
		}
		b.Add(r)
	}
	raw, err := b.Build()
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func clean(t *testing.T, c *Cleaner, batch []byte) (Verdict, recordbatch.Header) {
	t.Helper()
	h, err := recordbatch.ParseHeader(batch)
	if err != nil {
		t.Fatal(err)
	}
	v, err := c.Clean(&h, batch)
	if err != nil {
		t.Fatal(err)
	}
	if v.Batch != nil {
		if h, err = recordbatch.ParseHeader(v.Batch); err != nil {
			t.Fatal(err)
		}
	}
	return v, h
}

// TestMarkers: a marker whose transaction has no batch left gets a horizon, and goes when that has passed (KIP-534); one with batches stays.
func TestMarkers(t *testing.T) {
	marker := func(commit bool, at int64) []byte {
		return recordbatch.EndTxnMarker(recordbatch.Marker{ProducerID: 7, Commit: commit, Timestamp: 500, BaseOffset: at})
	}
	txn := func(b *recordbatch.Builder) {
		b.ProducerID, b.ProducerEpoch, b.BaseSequence, b.Transactional = 7, 0, 0, true
	}
	for _, commit := range []bool{true, false} {
		fresh := func(now int64) *Cleaner {
			var aborted []producerstate.AbortedTxn
			if !commit {
				aborted = []producerstate.AbortedTxn{{ProducerID: 7, FirstOffset: 0, LastOffset: 2}}
			}
			m := NewMap(1000, 100)
			m.Latest = 100
			return &Cleaner{Map: m, Txns: NewTransactions(aborted), Now: now, Config: Config{DeleteRetentionMs: 50}}
		}
		c := fresh(1000)
		data, _ := clean(t, c, batchOf(t, 0, txn, "a", "1", "b", "2"))
		if (data.Records == 2) != commit {
			t.Errorf("commit %v: %d records of the transaction are left", commit, data.Records)
		}
		v, h := clean(t, c, marker(commit, 2))
		if v.Records != 1 || h.HasDeleteHorizon() || (v.Aborted != nil) == commit {
			t.Errorf("commit %v: marker beside its batch: %+v", commit, v)
		}
		v, h = clean(t, fresh(1000), marker(commit, 2))
		if v.Records != 1 || !h.HasDeleteHorizon() || h.BaseTimestamp != 1050 {
			t.Fatalf("commit %v: lone marker: %+v", commit, h)
		}
		if again, h := clean(t, fresh(1049), v.Batch); again.Records != 1 || h.BaseTimestamp != 1050 {
			t.Errorf("commit %v: before its horizon: %+v", commit, h)
		}
		if again, _ := clean(t, fresh(1050), v.Batch); again.Batch != nil {
			t.Errorf("commit %v: the marker outlived its horizon", commit)
		}
		c = fresh(1050)
		c.Producers = map[int64]LastBatch{7: {Offset: -1, Epoch: 0}}
		if again, h := clean(t, c, v.Batch); again.Batch == nil || again.Records != 0 || h.LastOffset() != 2 {
			t.Errorf("commit %v: the last word of a living producer is gone", commit)
		}
	}
}

// TestKeyless: what should not be there goes, but not above what the map has seen.
func TestKeyless(t *testing.T) {
	b := recordbatch.NewBuilder()
	b.Add(recordbatch.Record{Value: []byte("no key")})
	raw, err := b.Build()
	if err != nil {
		t.Fatal(err)
	}
	for latest, want := range map[int64]int{0: 0, -1: 1} {
		m := NewMap(1000, 100)
		m.Latest = latest
		if v, _ := clean(t, &Cleaner{Map: m, Txns: NewTransactions(nil)}, raw); v.Records != want {
			t.Errorf("map up to %d: %d records are left", latest, v.Records)
		}
	}
}

// A map grows with its keys, up to what memory allows, and knows all of them whatever its size was when they came.
func TestMapGrowsWithinItsMemory(t *testing.T) {
	const memory = 8 << 20
	m := NewMap(memory, math.MaxInt32)
	if n := len(m.slots); n > firstSlots {
		t.Errorf("an empty map has %d slots", n)
	}
	n := m.Room()
	if n < memory/30-1 {
		t.Errorf("room for %d keys in %d bytes", n, memory)
	}
	before := len(m.slots)
	for i := range n {
		m.Put(fmt.Appendf(nil, "key-%d", i), int64(i))
		if now := len(m.slots); now != before {
			if (before+now)*slotBytes > memory {
				t.Errorf("%d and %d slots at once", before, now)
			}
			before = now
		}
	}
	if m.Len() != n || m.Room() != 0 || before != m.max {
		t.Errorf("%d of %d keys, room for %d, %d slots", m.Len(), n, m.Room(), before)
	}
	for i := range n {
		if key := fmt.Appendf(nil, "key-%d", i); m.Superseded(key, int64(i)) || i > 0 && !m.Superseded(key, int64(i-1)) {
			t.Fatalf("key %d has another offset", i)
		}
	}
}
