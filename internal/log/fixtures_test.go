package log

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/varve-io/varve/internal/fixtures"
	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

// kafkaTopic is topic.json: what Kafka answered about the partition.
type kafkaTopic struct {
	Topic   string
	TopicID string `json:"topicId"`
	Offsets struct {
		Earliest, EarliestLocal, MaxTimestamp, Latest struct{ Offset, Timestamp int64 }
		LastStable                                    int64
	}
	Producers []struct {
		ProducerID       int64  `json:"producerId"`
		ProducerEpoch    int16  `json:"producerEpoch"`
		LastSequence     int32  `json:"lastSequence"`
		CoordinatorEpoch int32  `json:"coordinatorEpoch"`
		TxnStart         *int64 `json:"currentTransactionStartOffset"`
	}
	ReadUncommitted, ReadCommitted []int64
}

type kafkaBatch struct {
	Segment              string
	Position             int64
	Size                 int
	BaseOffset           int64
	LastOffset           int64
	Count                int32
	PartitionLeaderEpoch int32
	CRC                  uint32
	Compression          string
	TimestampType        string
	MaxTimestamp         int64
	Transactional        bool
	Control              bool
	DeleteHorizonMs      *int64
	ProducerID           int64
	ProducerEpoch        int16
	BaseSequence         int32
	LastSequence         int32
}

func lines[T any](t *testing.T, path string) []T {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var out []T
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<24)
	for s.Scan() {
		var v T
		if err := json.Unmarshal(s.Bytes(), &v); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		out = append(out, v)
	}
	return out
}

func readJSON(t *testing.T, path string, into any) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

// cases lists the folders with a partition that Kafka wrote.
func cases(t *testing.T) map[string]string {
	root := fixtures.Dir(t)
	out := map[string]string{}
	for _, pattern := range []string{"local/*", "tiered/*/local/*"} {
		list, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, dir := range list {
			name, _ := filepath.Rel(root, dir)
			out[name] = dir
		}
	}
	if len(out) < 20 {
		t.Fatalf("%d cases only", len(out))
	}
	return out
}

// fixtureLog copies a case into a file system in memory and opens it.
func fixtureLog(t *testing.T, dir string, topic *kafkaTopic, clean bool) (*Log, *vfs.Mem) {
	t.Helper()
	mem := vfs.NewMem()
	from := filepath.Join(dir, topic.Topic+"-0")
	list, err := os.ReadDir(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := mem.MkdirAll("/p-0"); err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		b, err := os.ReadFile(filepath.Join(from, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if err := vfs.WriteFile(mem, "/p-0/"+e.Name(), b); err != nil {
			t.Fatal(err)
		}
	}
	id, err := tp.ParseUUID(topic.TopicID)
	if err != nil {
		t.Fatal(err)
	}
	cfg := DefaultConfig()
	cfg.SegmentBytes, cfg.IndexIntervalBytes, cfg.SegmentMs = 2048, 256, math.MaxInt64
	cfg.ProducerIDExpirationMs = -1
	cfg.Tiered = strings.Contains(dir, "tiered")
	cfg.Compact = strings.Contains(dir, "compacted")
	l, err := Open(Options{FS: mem, Dir: "/p-0", Partition: tp.Partition{Topic: topic.Topic}, TopicID: id, Config: cfg, Clean: clean, Now: time.UnixMilli(1795986264864)})
	if err != nil {
		t.Fatal(err)
	}
	return l, mem
}

// readRaw reads [from, upTo) in steps of maxBytes.
func readRaw(t testing.TB, l *Log, from, upTo int64, maxBytes int) []byte {
	t.Helper()
	var out []byte
	for from < upTo {
		v, err := l.Read(from, maxBytes, upTo, true)
		if err != nil {
			t.Fatal(err)
		}
		if v.NextOffset <= from {
			t.Fatalf("read at %d goes on at %d", from, v.NextOffset)
		}
		n := len(out)
		if out, err = v.AppendTo(out); err != nil {
			t.Fatal(err)
		}
		if len(out)-n != v.Size() {
			t.Fatalf("%d bytes of %d", len(out)-n, v.Size())
		}
		from = v.NextOffset
		v.Release()
	}
	return out
}

// TestKafkasLogs opens every partition that a real Kafka wrote, as cleanly closed and as crashed, and compares
// all that can be asked of it with Kafka's own answers.
func TestKafkasLogs(t *testing.T) {
	for name, dir := range cases(t) {
		for _, clean := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/clean=%v", name, clean), func(t *testing.T) {
				var topic kafkaTopic
				readJSON(t, filepath.Join(dir, "topic.json"), &topic)
				l, mem := fixtureLog(t, dir, &topic, clean)
				if r := l.Recovery(); r.Clean != (clean && name != "local/unclean") || r.TornBytes != 0 || r.SegmentsRemoved != 0 {
					t.Errorf("recovery %+v", r)
				}
				compareOffsets(t, l, &topic)
				compareBatches(t, l, dir)
				compareRecords(t, l, dir, &topic)
				compareProducers(t, l, &topic)
				if err := l.Close(); err != nil {
					t.Fatal(err)
				}
				compareIndexes(t, mem, name, dir, l.Offsets().End, !clean)
				again, err := Open(Options{FS: mem, Dir: "/p-0", Partition: l.Partition(), Config: l.Config(), Clean: true, Now: time.UnixMilli(1795986264864)})
				if err != nil || !again.Recovery().Clean || again.TopicID() != l.TopicID() {
					t.Fatalf("open again: %v", err)
				}
				compareOffsets(t, again, &topic)
				compareProducers(t, again, &topic)
			})
		}
	}
}

func compareOffsets(t *testing.T, l *Log, topic *kafkaTopic) {
	t.Helper()
	o := l.Offsets()
	if o.LogStart != topic.Offsets.Earliest.Offset || o.LocalLogStart != topic.Offsets.EarliestLocal.Offset || o.End != topic.Offsets.Latest.Offset {
		t.Errorf("offsets %+v, Kafka says %+v", o, topic.Offsets)
	}
	l.SetHighWatermark(o.End)
	stable, ok := l.FirstUnstable(o.End)
	if !ok {
		stable = o.End
	}
	if stable != topic.Offsets.LastStable {
		t.Errorf("last stable offset %d, Kafka says %d", stable, topic.Offsets.LastStable)
	}
	latest, ok, err := l.MaxTimestamp()
	if err != nil || !ok || latest.Offset != topic.Offsets.MaxTimestamp.Offset || latest.Timestamp != topic.Offsets.MaxTimestamp.Timestamp {
		t.Errorf("maximum timestamp %+v, %v, %v; Kafka says %+v", latest, ok, err, topic.Offsets.MaxTimestamp)
	}
}

func compareBatches(t *testing.T, l *Log, dir string) {
	t.Helper()
	want := lines[kafkaBatch](t, filepath.Join(dir, "batches.ndjson"))
	end := l.Offsets().End
	whole := readRaw(t, l, l.Offsets().LocalLogStart, end, math.MaxInt32)
	for _, maxBytes := range []int{1, 300, 700, 5000} {
		if !bytes.Equal(readRaw(t, l, l.Offsets().LocalLogStart, end, maxBytes), whole) {
			t.Errorf("reads of %d bytes give other bytes", maxBytes)
		}
	}
	for _, w := range want {
		h, err := recordbatch.ParseHeader(whole)
		if err != nil {
			t.Fatal(err)
		}
		typ := "CreateTime"
		if h.LogAppendTime() {
			typ = "LogAppendTime"
		}
		got := kafkaBatch{w.Segment, w.Position, h.Size, h.BaseOffset, h.LastOffset(), h.Count, h.LeaderEpoch, h.CRC, h.Codec().String(), typ,
			h.MaxTimestamp, h.IsTransactional(), h.IsControl(), w.DeleteHorizonMs, h.ProducerID, h.ProducerEpoch, h.BaseSequence, h.LastSequence()}
		if got != w || h.HasDeleteHorizon() != (w.DeleteHorizonMs != nil) || h.HasDeleteHorizon() && *w.DeleteHorizonMs != h.BaseTimestamp {
			t.Errorf("got %+v, want %+v", got, w)
		}
		if err := recordbatch.VerifyCRC(whole); err != nil {
			t.Error(err)
		}
		e, ok := l.EpochForOffset(h.BaseOffset)
		if !ok || e != h.LeaderEpoch {
			t.Errorf("epoch of %d is %d, %v; the batch says %d", h.BaseOffset, e, ok, h.LeaderEpoch)
		}
		whole = whole[h.Size:]
	}
	if len(whole) != 0 {
		t.Errorf("%d bytes more than Kafka has", len(whole))
	}
}

// describe puts a key or value as the fixtures do.
func describe(rec map[string]any, name string, b []byte) {
	switch {
	case b == nil:
		rec[name] = nil
	case len(b) > 1024:
		sum := sha256.Sum256(b)
		rec[name+"Length"], rec[name+"Sha256"] = float64(len(b)), hex.EncodeToString(sum[:])
	case !utf8.Valid(b):
		rec[name+"Base64"] = base64.StdEncoding.EncodeToString(b)
	default:
		rec[name] = string(b)
	}
}

func compareRecords(t *testing.T, l *Log, dir string, topic *kafkaTopic) {
	t.Helper()
	want := lines[map[string]any](t, filepath.Join(dir, "records.ndjson"))
	aborted, err := l.AbortedTransactions(l.Offsets().LocalLogStart, topic.Offsets.LastStable)
	if err != nil {
		t.Fatal(err)
	}
	var uncommitted, committed []int64
	whole := readRaw(t, l, l.Offsets().LocalLogStart, l.Offsets().End, math.MaxInt32)
	n := 0
	for len(whole) > 0 {
		it, err := recordbatch.Records(whole, 0)
		if err != nil {
			t.Fatal(err)
		}
		h := it.Header()
		whole = whole[h.Size:]
		for it.Next() {
			r := it.Record()
			got := map[string]any{"offset": float64(r.Offset), "timestamp": float64(r.Timestamp)}
			if h.IsControl() {
				c, err := recordbatch.ParseControl(r.Key, r.Value)
				if err != nil {
					t.Fatal(err)
				}
				got["control"] = map[recordbatch.ControlType]string{0: "ABORT", 1: "COMMIT"}[c.Type]
				got["coordinatorEpoch"] = float64(c.CoordinatorEpoch)
			} else {
				uncommitted = append(uncommitted, r.Offset)
				hidden := h.IsTransactional() && slices.ContainsFunc(aborted, func(a AbortedTxn) bool {
					return a.ProducerID == h.ProducerID && a.FirstOffset <= r.Offset && r.Offset <= a.LastOffset
				})
				if !hidden && r.Offset < topic.Offsets.LastStable {
					committed = append(committed, r.Offset)
				}
				describe(got, "key", r.Key)
				describe(got, "value", r.Value)
				headers := []any{}
				for _, rh := range r.Headers {
					one := map[string]any{"key": rh.Key}
					describe(one, "value", rh.Value)
					headers = append(headers, one)
				}
				got["headers"] = headers
			}
			if n == len(want) {
				t.Fatalf("more records than Kafka has: %v", got)
			}
			for k, v := range got {
				if fmt.Sprint(v) != fmt.Sprint(want[n][k]) {
					t.Errorf("record %v: %s is %v, want %v", want[n]["offset"], k, v, want[n][k])
				}
			}
			n++
			// The first record with at least this time, found by a plain walk over Kafka's list.
			if ts := r.Timestamp; !h.IsControl() {
				i := slices.IndexFunc(want, func(w map[string]any) bool { return w["timestamp"].(float64) >= float64(ts) })
				f, ok, err := l.OffsetForTimestamp(ts)
				if err != nil || !ok || float64(f.Offset) != want[i]["offset"] {
					t.Errorf("time %d: %+v, %v, %v; want offset %v", ts, f, ok, err, want[i]["offset"])
				}
			}
		}
		if it.Err() != nil {
			t.Fatal(it.Err())
		}
	}
	if n != len(want) {
		t.Errorf("%d records, Kafka has %d", n, len(want))
	}
	if !slices.Equal(uncommitted, topic.ReadUncommitted) {
		t.Errorf("read uncommitted: %v, Kafka says %v", uncommitted, topic.ReadUncommitted)
	}
	if !slices.Equal(committed, topic.ReadCommitted) {
		t.Errorf("read committed: %v, Kafka says %v", committed, topic.ReadCommitted)
	}
}

func compareProducers(t *testing.T, l *Log, topic *kafkaTopic) {
	t.Helper()
	var want []producerstate.Active
	for _, p := range topic.Producers {
		a := producerstate.Active{ProducerID: p.ProducerID, Epoch: p.ProducerEpoch, LastSequence: p.LastSequence, CoordinatorEpoch: p.CoordinatorEpoch, TxnFirstOffset: -1}
		if p.TxnStart != nil {
			a.TxnFirstOffset = *p.TxnStart
		}
		want = append(want, a)
	}
	slices.SortFunc(want, func(a, b producerstate.Active) int { return int(a.ProducerID - b.ProducerID) })
	got := l.Producers(time.UnixMilli(1795986264864))
	// Kafka had forgotten producers with old timestamps where its broker had restarted, and it answers 0 where its
	// snapshot says that no coordinator is known, -1.
	got = slices.DeleteFunc(got, func(a producerstate.Active) bool {
		return a.LastTimestamp < 1795900000000 && !slices.ContainsFunc(want, func(w producerstate.Active) bool { return w.ProducerID == a.ProducerID })
	})
	for i := range got {
		got[i].LastTimestamp = 0
		got[i].CoordinatorEpoch = max(got[i].CoordinatorEpoch, 0)
		got[i].LastOffset = 0 // it does not tell
	}
	if !slices.Equal(got, want) {
		t.Errorf("producers %+v, Kafka says %+v", got, want)
	}
}

// compareIndexes reads the folder after a close. Rebuilt indexes of a log that Kafka compacted may be denser than
// its own, so that there only each entry's truth is checked.
func compareIndexes(t *testing.T, mem *vfs.Mem, name, dir string, end int64, rebuilt bool) {
	t.Helper()
	if name == "local/unclean" {
		dir = filepath.Join(filepath.Dir(dir), "unclean-recovered")
	}
	var want map[string]json.RawMessage
	readJSON(t, filepath.Join(dir, "indexes.json"), &want)
	for file, raw := range want {
		base, suffix, ok := segment.ParseFileName(file)
		if !ok || suffix == segment.SnapshotSuffix || rebuilt && strings.Contains(name, "compacted") {
			continue
		}
		b, err := vfs.ReadFile(mem, "/p-0/"+file, 1<<20)
		if err != nil {
			t.Error(err)
			continue
		}
		got := []any{}
		switch suffix {
		case segment.OffsetIndexSuffix:
			x := segment.NewOffsetIndex(base, b)
			for i := range x.Len() {
				e, _ := x.At(i)
				got = append(got, []int64{e.Offset, e.Position})
			}
		case segment.TimeIndexSuffix:
			x := segment.NewTimeIndex(base, b)
			for i := range x.Len() {
				e, _ := x.At(i)
				got = append(got, []int64{e.Timestamp, e.Offset})
			}
		case segment.TxnIndexSuffix:
			txns, err := segment.ParseTxnIndex(b)
			if err != nil {
				t.Error(err)
			}
			for _, x := range txns {
				got = append(got, map[string]int64{"producerId": x.ProducerID, "firstOffset": x.FirstOffset, "lastOffset": x.LastOffset, "lastStableOffset": x.LastStableOffset})
			}
		}
		var w any
		if err := json.Unmarshal(raw, &w); err != nil {
			t.Fatal(err)
		}
		a, _ := json.Marshal(got)
		c, _ := json.Marshal(w)
		if !bytes.Equal(a, c) {
			t.Errorf("%s: %s, Kafka has %s", file, a, c)
		}
	}
	b, err := vfs.ReadFile(mem, "/p-0/"+epochFile, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	if err := json.Unmarshal(want[epochFile], &lines); err != nil {
		t.Fatal(err)
	}
	var entries []leaderepoch.Entry
	for _, line := range lines[2:] {
		var e leaderepoch.Entry
		if _, err := fmt.Sscan(line, &e.Epoch, &e.StartOffset); err != nil {
			t.Fatal(err)
		}
		// An epoch in which nothing was written yet is dropped by a load, as Kafka's does, until it is assigned again.
		if e.StartOffset < end {
			entries = append(entries, e)
		}
	}
	if got := leaderepoch.Marshal(entries); !bytes.Equal(got, b) {
		t.Errorf("leader epochs %q, Kafka has %q", b, got)
	}
}
