package reader_test

import (
	"bytes"
	"encoding/json"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"sort"
	"strings"
	"testing"

	"github.com/varve-io/varve/internal/fixtures"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tier/reader"
	"github.com/varve-io/varve/internal/tier/uploader"
)

// A bucket that a JVM cluster wrote reads as its local log does: bytes, times, aborted transactions.
func TestForeignBuckets(t *testing.T) {
	for _, c := range []string{"plain", "compressed", "encrypted", "both"} {
		root := filepath.Join(fixtures.Dir(t), "tiered", "aiven-"+c)
		b := load(t, filepath.Join(root, "objects"))
		found, err := uploader.Discover(t.Context(), b, c+"/")
		if err != nil {
			t.Fatal(err)
		}
		topics := map[string]tier.Segments{}
		for _, d := range found {
			if d.Err != nil {
				t.Fatal(d.Err)
			}
			topics[d.Segment.Topic] = append(topics[d.Segment.Topic], d.Segment)
		}
		for _, topic := range []string{"plain", "transactions"} {
			t.Run(c+"/"+topic, func(t *testing.T) {
				segs := topics[topic]
				if err := segs.Check(); err != nil || len(segs) < 2 {
					t.Fatal(len(segs), err)
				}
				r := reader.New(reader.Options{Bucket: b, Prefix: c + "/", Keyring: ring(t)})
				defer r.Close()
				local := filepath.Join(root, "local", topic)
				readsAsLocal(t, r, segs, filepath.Join(local, topic+"-0"))
				timesAsLocal(t, r, segs, filepath.Join(local, "records.ndjson"))
			})
		}
	}
}

func load(t *testing.T, dir string) objstore.Bucket {
	t.Helper()
	b := objstore.NewMemory()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		key, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		return b.Put(t.Context(), filepath.ToSlash(key), bytes.NewReader(data), int64(len(data)), objstore.PutOptions{})
	})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func readsAsLocal(t *testing.T, r *reader.Reader, segs tier.Segments, dir string) {
	var want, txns []byte
	for _, s := range segs {
		log, err := os.ReadFile(filepath.Join(dir, segment.FileName(s.Start, segment.LogSuffix)))
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, log...)
		index, err := os.ReadFile(filepath.Join(dir, segment.FileName(s.Start, segment.TxnIndexSuffix)))
		if err == nil {
			txns = append(txns, index...)
		}
		snapshot, err := r.ProducerSnapshot(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		if have, err := os.ReadFile(filepath.Join(dir, segment.FileName(s.End+1, segment.SnapshotSuffix))); err != nil || !bytes.Equal(snapshot, have) {
			t.Errorf("snapshot at %d differs (%v)", s.End+1, err)
		}
		if epochs, err := r.LeaderEpochs(t.Context(), s); err != nil || len(epochs) != 1 {
			t.Errorf("%v %v", epochs, err)
		}
	}
	var got []byte
	for next := segs.Start(); next <= segs.End(); {
		res, err := r.Read(t.Context(), segs, next, 900, math.MaxInt64, true)
		if err != nil {
			t.Fatal(err)
		}
		got, next = res.Records.AppendTo(got), res.NextOffset
	}
	if !bytes.Equal(got, want) {
		t.Error("bytes differ from the local log")
	}
	for from := segs.Start(); from <= segs.End(); from += 7 {
		upTo := from + 9
		have, _, err := r.Aborted(t.Context(), segs, from, upTo)
		if err != nil {
			t.Fatal(err)
		}
		// Against all indexes at once.
		var all []producerstate.AbortedTxn
		for rest := txns; len(rest) > 0; rest = rest[segment.TxnEntrySize:] {
			one, err := segment.ParseTxnIndex(rest[:segment.TxnEntrySize])
			if err != nil {
				t.Fatal(err)
			}
			if x := one[0]; x.LastOffset >= from && x.FirstOffset < upTo {
				all = append(all, x)
			}
		}
		if len(have) != len(all) || len(all) > 0 && !reflect.DeepEqual(have, all) {
			t.Errorf("aborted in %d to %d: %v instead of %v", from, upTo, have, all)
		}
	}
}

func timesAsLocal(t *testing.T, r *reader.Reader, segs tier.Segments, file string) {
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	type record struct{ Offset, Timestamp int64 }
	var records []record
	var times []int64
	for line := range strings.Lines(string(data)) {
		var x record
		if err := json.Unmarshal([]byte(line), &x); err != nil {
			t.Fatal(err)
		}
		if x.Offset <= segs.End() {
			records = append(records, x)
			times = append(times, x.Timestamp-1, x.Timestamp, x.Timestamp+1)
		}
	}
	sort.Slice(times, func(i, j int) bool { return times[i] < times[j] })
	for _, logStart := range []int64{0, segs[1].Start + 3} {
		for _, ts := range times {
			want := int64(-1)
			for _, x := range records {
				if x.Offset >= logStart && x.Timestamp >= ts {
					want = x.Offset
					break
				}
			}
			got, ok, err := r.OffsetForTimestamp(t.Context(), segs, ts, logStart)
			if err != nil || ok != (want >= 0) || ok && got.Offset != want {
				t.Fatalf("time %d from %d: %+v %v %v, want %d", ts, logStart, got, ok, err, want)
			}
		}
	}
}
