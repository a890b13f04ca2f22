package directfetch

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/tp"
)

var sample = []Location{
	{SegmentID: tp.UUID{1, 2}, CustomMetadata: []byte{}, ObjectKey: "p/t-x/0/1.log", Format: "ApacheKafkaV1", BaseOffset: 5, EndOffset: 9, StartPosition: 10, EndPosition: 3 << 31, SegmentSize: 3 << 31, LeaderEpoch: 7, ValidityMs: 60000},
	{ObjectKey: "k", BaseOffset: 10, EndOffset: 10, EndPosition: 1, SegmentSize: 2},
	{ObjectKey: "l", EndPosition: 1, SegmentSize: 2, LogGrant: "https://store/l?sig", ManifestGrant: "https://store/m?sig"},
	{ObjectKey: "m", EndPosition: 1, SegmentSize: 2, ManifestGrant: "https://store/n?sig"},
}

func TestThroughTheWire(t *testing.T) {
	for _, version := range []int16{12, 13, 18} {
		req := kmsg.NewPtrFetchRequest()
		req.Version = version
		SetFormats(req, []string{"ApacheKafkaV1", "X"})
		SetUse(req, Use{3, 4 << 40})
		rt := kmsg.NewFetchRequestTopic()
		a, b := kmsg.NewFetchRequestTopicPartition(), kmsg.NewFetchRequestTopicPartition()
		Request(&b)
		rt.Partitions = append(rt.Partitions, a, b)
		req.Topics = append(req.Topics, rt)
		got := kmsg.NewPtrFetchRequest()
		got.Version = version
		if err := got.ReadFrom(req.AppendTo(nil)); err != nil {
			t.Fatal(err)
		}
		if f := Formats(got); !reflect.DeepEqual(f, []string{"ApacheKafkaV1", "X"}) {
			t.Fatal(f)
		}
		if u := Used(got); u != (Use{3, 4 << 40}) {
			t.Fatal(u)
		}
		if Requested(&got.Topics[0].Partitions[0]) || !Requested(&got.Topics[0].Partitions[1]) {
			t.Fatal("requested flags are mixed up")
		}
		p := kmsg.NewFetchResponseTopicPartition()
		SetLocations(&p, sample)
		locations, err := Locations(&p)
		if err != nil || !reflect.DeepEqual(locations, sample) {
			t.Fatal(locations, err)
		}
	}
}

func TestAbsentAndMalformed(t *testing.T) {
	var p kmsg.FetchResponseTopicPartition
	if l, err := Locations(&p); l != nil || err != nil {
		t.Fatal(l, err)
	}
	whole := AppendLocations(nil, sample)
	for n := range whole {
		if _, err := ParseLocations(whole[:n]); n > 0 && !errors.Is(err, ErrMalformed) {
			t.Fatalf("%d of %d bytes: %v", n, len(whole), err)
		}
	}
	for _, l := range []Location{{ObjectKey: "k", BaseOffset: 2, EndOffset: 1, EndPosition: 1, SegmentSize: 1}, {ObjectKey: "k", StartPosition: 1, EndPosition: 1, SegmentSize: 1}, {EndPosition: 1, SegmentSize: 1}} {
		if _, err := ParseLocations(AppendLocations(nil, []Location{l})); !errors.Is(err, ErrMalformed) {
			t.Errorf("%+v: %v", l, err)
		}
	}
}

// A client may claim anything.
func TestUseIsBounded(t *testing.T) {
	for _, b := range [][]byte{nil, {}, {1}, {1, 2, 3}, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 1}, {1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f}} {
		req := kmsg.NewPtrFetchRequest()
		req.UnknownTags.Set(TagUse, b)
		if u := Used(req); u != (Use{}) {
			t.Errorf("%x: %+v", b, u)
		}
	}
}

func TestGrantsAreBoundedAndNotPrinted(t *testing.T) {
	l := Location{ObjectKey: "k", EndPosition: 1, SegmentSize: 2, LogGrant: "https://secret"}
	if text := fmt.Sprintf("%v %+v %#v %s", l, l, l, l.LogGrant); strings.Contains(text, "secret") || !strings.Contains(text, "granted") {
		t.Error(text)
	}
	l.ManifestGrant = Grant(strings.Repeat("x", maxGrant+1))
	if _, err := ParseLocations(AppendLocations(nil, []Location{l})); !errors.Is(err, ErrMalformed) || strings.Contains(err.Error(), "secret") {
		t.Error(err)
	}
}

func FuzzParseLocations(f *testing.F) {
	f.Add(AppendLocations(nil, sample))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := ParseLocations(b)
		if err == nil && len(l) > 0 {
			if again, err := ParseLocations(AppendLocations(nil, l)); err != nil || !reflect.DeepEqual(again, l) {
				t.Fatal(err)
			}
		}
	})
}
