package bucketlayout

import (
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/varve-io/varve/internal/tp"
)

// Whatever has a name in a layout is recognized by it, under any prefix, dashes and all.
func TestKeysAreReadAsTheyAreWritten(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := Segment{Base: rapid.Int64Min(0).Draw(t, "base")}
		s.Layout = rapid.SampledFrom([]Layout{Aiven, Kafka, Pinterest}).Draw(t, "layout")
		s.Prefix = rapid.SampledFrom([]string{"", "kafka/", "a/b/", "1010/cluster/"}).Draw(t, "prefix")
		s.Topic = rapid.StringMatching(`[a-zA-Z0-9._-]{1,40}`).Draw(t, "topic")
		s.Partition.Partition = rapid.Int32Min(0).Draw(t, "partition")
		if s.Layout != Pinterest {
			copy(s.TopicID[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "topic id"))
			copy(s.ID[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "id"))
		}
		k := rapid.SampledFrom(kinds[s.Layout].all).Draw(t, "kind")
		got, kind, ok := Parse(s.Key(k))
		// A topic of Pinterest's whose name ends like an id and a partition cannot be told from one of Kafka's, but its file can.
		if !ok || got != s || kind != k {
			t.Fatalf("%s: %+v %s %v, want %+v", s.Key(k), got, kind, ok, s)
		}
	})
}

func TestVectors(t *testing.T) {
	id := func(s string) tp.UUID {
		u, err := tp.ParseUUID(s)
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	for key, want := range map[string]Segment{
		"someprefix/topic-MWJ6FHTfRYy67jzwZdeqSQ/7/00000000000000001234-tqimKeZwStOEOwRzT3L5oQ.log": {Partition{Aiven, "someprefix/", "topic", id("MWJ6FHTfRYy67jzwZdeqSQ"), 7}, 1234, id("tqimKeZwStOEOwRzT3L5oQ")},
		"k/transactions-0-UV7GWiPHTwuIAilJezqKpg/00000000000000000050-oPEPPYFDQfGoDF94enDTPw.log":   {Partition{Kafka, "k/", "transactions", id("UV7GWiPHTwuIAilJezqKpg"), 0}, 50, id("oPEPPYFDQfGoDF94enDTPw")},
		"base/1111110000/my-cluster/my-topic-0/00000000000000000100.log":                            {Partition{Pinterest, "base/1111110000/my-cluster/", "my-topic", tp.UUID{}, 0}, 100, tp.UUID{}},
	} {
		if got, k, ok := Parse(key); !ok || got != want || k != Log {
			t.Errorf("%s: %+v %s %v", key, got, k, ok)
		}
	}
	for _, key := range []string{"b/c/t-0/offset.wm", "b/c/t-0/_metadata"} {
		if s, _, ok := Parse(key); !ok || s.Base != -1 || s.Topic != "t" {
			t.Errorf("%s: %+v %v", key, s, ok)
		}
	}
	for _, key := range []string{"", "/", "a", "readme.txt", "t-0/00000000000000000100.txnindex", "t-0/100.log", "t-00/00000000000000000100.log", "t-0/-0000000000000000001.log", "offset.wm",
		"topic-MWJ6FHTfRYy67jzwZdeqSQ/07/00000000000000001234-tqimKeZwStOEOwRzT3L5oQ.log", "topic-MWJ6FHTfRYy67jzwZdeqSQ/7/00000000000000001234-tqimKeZwStOEOwRzT3L5oQ.index",
		"topic-MWJ6FHTfRYy67jzwZdeqSQ/7/99999999999999999999-tqimKeZwStOEOwRzT3L5oQ.log", "topic-MWJ6FHTfRYy67jzwZdeqSR/7/00000000000000001234-tqimKeZwStOEOwRzT3L5oQ.log"} {
		if s, k, ok := Parse(key); ok {
			t.Errorf("%q is %+v %s", key, s, k)
		}
	}
}

func TestCatalog(t *testing.T) {
	var c Catalog
	for _, key := range []string{"t-1/00000000000000000100.log", "t-1/00000000000000000100.index", "t-1/00000000000000000100.timeindex", "t-1/00000000000000000000.log", "t-1/offset.wm", "t-0/00000000000000000000.log", "what"} {
		c.Add(key, 10)
	}
	p := c.Partitions()
	if len(p) != 2 || p[0].Partition.Partition != 0 || len(p[1].Segments) != 2 || p[1].Segments[0].Base != 0 || p[1].Segments[1].Bytes() != 30 {
		t.Fatalf("%+v", p)
	}
	if m := p[1].Segments[0].Missing(); !slices.Equal(m, []Kind{Index, TimeIndex}) || p[1].Segments[0].Committed() || !p[1].Segments[1].Committed() {
		t.Errorf("%v", m)
	}
	if strings.Join(c.Foreign, " ") != "what" {
		t.Errorf("%q", c.Foreign)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("someprefix/topic-MWJ6FHTfRYy67jzwZdeqSQ/7/00000000000000001234-tqimKeZwStOEOwRzT3L5oQ.log")
	f.Add("t-0/00000000000000000100.log")
	f.Fuzz(func(t *testing.T, key string) {
		if s, k, ok := Parse(key); ok && s.Base >= 0 && s.Key(k) != key {
			t.Fatalf("%q is read as %q", key, s.Key(k))
		}
	})
}
