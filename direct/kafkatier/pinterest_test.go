package kafkatier_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/kafkatier"
	"github.com/varve-io/varve/direct/objectstore"
	"github.com/varve-io/varve/internal/fixtures"
	"github.com/varve-io/varve/internal/objstore"
)

// pinterestBucket holds the segments of a fixture's local log as Pinterest's uploader would: the files of each, but for what
// skip names, and _metadata with the base offsets that are known.
func pinterestBucket(t testing.TB, folder, skip string, known []int64) *objstore.Memory {
	t.Helper()
	m := objstore.NewMemory()
	put := func(key string, b []byte) {
		if err := m.Put(context.Background(), key, bytes.NewReader(b), int64(len(b)), objstore.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	files, err := filepath.Glob(filepath.Join(fixtures.Dir(t), "tiered", "localtiered", "local", "plain", "plain-0", "0*"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if name := filepath.Base(f); name != skip && !strings.HasSuffix(name, ".snapshot") {
			put(folder+name, b)
		}
	}
	put(folder+"offset.wm", []byte("00000000000000000070"))
	if known != nil {
		var entries []string
		for _, o := range known {
			entries = append(entries, fmt.Sprintf(`{"timestamp":1,"relativeOffset":0,"baseOffset":%d}`, o))
		}
		put(folder+"_metadata", fmt.Appendf(nil, `{"topicPartition":{"topic":"my-topic","partition":0},"metadata":{"timeindex":{"entries":[%s],"timeIndexType":"TOPIC_PARTITION","size":1}},"loadHash":"x"}`, strings.Join(entries, ",")))
	}
	return m
}

// The broker's log begins where the fixture's last segment does; all in front of it is in the bucket alone, and is read for who
// asks for it. The entropy of the keys is that of the uploader.
func TestPinterest(t *testing.T) {
	const folder = "base/1111110000/my-cluster/my-topic-0/"
	layout := kafkatier.Pinterest(kafkatier.PinterestOptions{Prefix: "base", Cluster: "my-cluster", EntropyBits: 10})
	log, facts := fixtureLog(t, filepath.Join(fixtures.Dir(t), "tiered", "localtiered"), "plain")
	log.topic, log.stable = "my-topic", -1
	kafka := newFakeKafka(t, log)
	want := read(t, kafka, "my-topic", 0, false)
	if !slices.Equal(offsetsOf(t, want), facts.ReadUncommitted) {
		t.Fatal(want)
	}
	kafka.do(func() { log.start, log.local = 65, 65 })
	bases := []int64{0, 25, 40, 50, 60, 70}
	for name, c := range map[string]struct {
		store *objstore.Memory
		holes []int64 // offsets that are not found
	}{
		"whole":                      {pinterestBucket(t, folder, "", nil), []int64{65, 70}},
		"with metadata":              {pinterestBucket(t, folder, "", bases), []int64{65, 70}},
		"an upload is not complete":  {pinterestBucket(t, folder, "00000000000000000025.timeindex", bases), []int64{25, 39, 65}},
		"metadata knows of one less": {pinterestBucket(t, folder, "", []int64{0, 25, 50, 60}), []int64{40, 49, 65}},
	} {
		t.Run(name, func(t *testing.T) {
			w := openWith(t, kafka, c.store, nil, kafkatier.Options{Layout: layout})
			defer w.close()
			for _, o := range []int64{0, 24, 25, 39, 40, 49, 50, 64, 65, 70} {
				loc, err := w.locator.Locate(t.Context(), direct.Query{Topic: "my-topic", Offset: o, LeaderEpoch: -1})
				if err != nil || (loc == nil) != (o >= 65 || slices.Contains(c.holes, o)) {
					t.Errorf("offset %d: %+v, %v", o, loc, err)
				}
			}
			if loc, err := w.locator.Locate(t.Context(), direct.Query{Topic: "my-topic", Offset: 5, LeaderEpoch: -1, Committed: true}); loc != nil || err != nil {
				t.Errorf("read_committed, of which nothing is known: %+v, %v", loc, err)
			}
			if len(c.holes) > 2 {
				return
			}
			if got := read(t, kafka, "my-topic", 0, false, kgo.Dialer(w.transport.DialContext)); !slices.Equal(got, want) {
				t.Errorf("%q\ninstead of %q", got, want)
			}
			if n := w.transport.Snapshot().Served; n == 0 {
				t.Error("nothing was read directly")
			}
		})
	}
}

// A store that cannot list, and settings without which keys cannot be made, are found out at once.
func TestPinterestOptions(t *testing.T) {
	for name, c := range map[string]struct {
		store objectstore.Store
		o     kafkatier.PinterestOptions
	}{
		"no list":    {&memory{}, kafkatier.PinterestOptions{Prefix: "p", Cluster: "c"}},
		"no prefix":  {objstore.NewMemory(), kafkatier.PinterestOptions{Cluster: "c"}},
		"no cluster": {objstore.NewMemory(), kafkatier.PinterestOptions{Prefix: "p"}},
		"entropy":    {objstore.NewMemory(), kafkatier.PinterestOptions{Prefix: "p", Cluster: "c", EntropyBits: 129}},
	} {
		f, err := objectstore.New(c.store, objectstore.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if l, err := kafkatier.Open(f, kafkatier.Options{Seeds: []string{"localhost:1"}, Layout: kafkatier.Pinterest(c.o)}); err == nil {
			l.Close()
			t.Errorf("%s: opened", name)
		}
	}
}
