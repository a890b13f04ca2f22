package leaderepoch

import (
	"bytes"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestAssignDropsWhatContradicts(t *testing.T) {
	for _, c := range []struct {
		have    []Entry
		epoch   int32
		start   int64
		want    []Entry
		changed bool
	}{
		{nil, 0, 0, []Entry{{0, 0}}, true},
		{[]Entry{{0, 0}}, 0, 5, []Entry{{0, 0}}, false},
		{[]Entry{{0, 5}}, 0, 3, []Entry{{0, 3}}, true},
		{[]Entry{{0, 0}, {2, 50}}, 3, 50, []Entry{{0, 0}, {3, 50}}, true},
		{[]Entry{{0, 0}, {2, 50}}, 3, 40, []Entry{{0, 0}, {3, 40}}, true},
		{[]Entry{{0, 0}, {2, 50}}, 1, 60, []Entry{{0, 0}, {1, 60}}, true},
		{[]Entry{{0, 0}, {2, 50}}, 0, 60, []Entry{{0, 60}}, true},
		{[]Entry{{0, 0}}, -1, 60, []Entry{{0, 0}}, false},
	} {
		cache := New(c.have)
		if got := cache.Assign(c.epoch, c.start); got != c.changed {
			t.Errorf("%v assign %d %d: changed %v", c.have, c.epoch, c.start, got)
		}
		if got := cache.Entries(); !slices.Equal(got, c.want) {
			t.Errorf("%v assign %d %d: got %v, want %v", c.have, c.epoch, c.start, got, c.want)
		}
	}
}

func TestEndOffsetFor(t *testing.T) {
	c := New([]Entry{{2, 10}, {4, 20}, {7, 30}})
	for _, q := range []struct {
		asked, epoch int32
		end          int64
	}{{-1, -1, -1}, {7, 7, 99}, {8, -1, -1}, {1, 1, 10}, {2, 2, 20}, {3, 2, 20}, {5, 4, 30}} {
		if e, o := c.EndOffsetFor(q.asked, 99); e != q.epoch || o != q.end {
			t.Errorf("epoch %d: got (%d, %d), want (%d, %d)", q.asked, e, o, q.epoch, q.end)
		}
	}
	if e, o := (&Cache{}).EndOffsetFor(3, 9); e != -1 || o != -1 {
		t.Errorf("empty cache: got (%d, %d)", e, o)
	}
}

func TestEpochForOffsetAndNeighbours(t *testing.T) {
	c := New([]Entry{{2, 10}, {4, 20}})
	if _, ok := c.EpochForOffset(9); ok {
		t.Error("offset below the first entry has an epoch")
	}
	for o, want := range map[int64]int32{10: 2, 19: 2, 20: 4, 1000: 4} {
		if e, ok := c.EpochForOffset(o); !ok || e != want {
			t.Errorf("offset %d: got %d, want %d", o, e, want)
		}
	}
	if e, ok := c.Previous(4); !ok || e.Epoch != 2 {
		t.Errorf("previous of 4: %v", e)
	}
	if _, ok := c.Previous(2); ok {
		t.Error("the first epoch has a previous one")
	}
}

func TestTruncate(t *testing.T) {
	all := []Entry{{0, 0}, {2, 50}, {3, 80}}
	for _, q := range []struct {
		from, to int64
		want     []Entry
	}{
		{60, 70, []Entry{{2, 60}}},
		{0, 51, []Entry{{0, 0}, {2, 50}}},
		{50, 80, []Entry{{2, 50}}},
		{-1, 80, []Entry{{0, 0}, {2, 50}}},
		{90, 100, []Entry{{3, 90}}},
		{10, 100, []Entry{{0, 10}, {2, 50}, {3, 80}}},
	} {
		c := New(all)
		if got := c.EntriesInRange(q.from, q.to); !slices.Equal(got, q.want) {
			t.Errorf("[%d, %d): got %v, want %v", q.from, q.to, got, q.want)
		}
		if !slices.Equal(c.Entries(), all) {
			t.Error("EntriesInRange changed its cache")
		}
	}
}

func TestCheckpointText(t *testing.T) {
	got := Marshal([]Entry{{0, 0}, {2, 50}})
	if string(got) != "0\n2\n0 0\n2 50\n" {
		t.Errorf("got %q", got)
	}
	for _, bad := range []string{"1\n0\n", "0\n", "0\n1\n", "0\n0\n0 0\n", "0\n1\n0 x\n", "0\n1\n0\n", "0\n2\n1 5\n0 6\n", "0\n2\n1 5\n2 5\n", "0\n1\n-1 0\n", "x"} {
		if _, err := Parse([]byte(bad)); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
	if e, err := Parse(nil); err != nil || e != nil {
		t.Errorf("empty file: %v, %v", e, err)
	}
	if e, err := Parse([]byte("0\n1\n3 \t 4\n")); err != nil || !slices.Equal(e, []Entry{{3, 4}}) {
		t.Errorf("white space: %v, %v", e, err)
	}
}

// TestCacheKeepsItsOrder drives a cache at random: it stays strictly rising, and each offset has the epoch
// that a plain search of the entries gives.
func TestCacheKeepsItsOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := &Cache{}
		for range rapid.IntRange(0, 30).Draw(t, "steps") {
			o := rapid.Int64Range(0, 60).Draw(t, "offset")
			switch rapid.IntRange(0, 3).Draw(t, "op") {
			case 0, 1:
				e := rapid.Int32Range(0, 20).Draw(t, "epoch")
				c.Assign(e, o)
				if l, _ := c.Latest(); l.Epoch != e || l.StartOffset > o {
					t.Fatalf("after assign(%d, %d) the latest is %v", e, o, l)
				}
			case 2:
				c.TruncateFromEnd(o)
			case 3:
				before, had := c.EpochForOffset(o)
				c.TruncateFromStart(o)
				if after, has := c.EpochForOffset(o); has != had || after != before {
					t.Fatalf("truncating the front at %d changed its epoch from %d to %d", o, before, after)
				}
			}
			es := c.Entries()
			for i := 1; i < len(es); i++ {
				if es[i-1].Epoch >= es[i].Epoch || es[i-1].StartOffset >= es[i].StartOffset {
					t.Fatalf("not rising: %v", es)
				}
			}
			back, err := Parse(Marshal(es))
			if err != nil || !slices.Equal(back, es) {
				t.Fatalf("round trip of %v: %v, %v", es, back, err)
			}
		}
	})
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("0\n2\n0 0\n2 50\n"))
	f.Add([]byte("0\n99999999999\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		entries, err := Parse(b)
		if err != nil {
			return
		}
		again, err := Parse(Marshal(entries))
		if err != nil || !slices.Equal(entries, again) {
			t.Fatalf("%q: %v is not stable: %v, %v", b, entries, again, err)
		}
		if len(entries) > bytes.Count(b, []byte("\n")) {
			t.Fatalf("%q: more entries than lines", b)
		}
	})
}
