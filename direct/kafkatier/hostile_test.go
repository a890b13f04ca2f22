package kafkatier_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/internal/fixtures"
	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/remotelog"
	"github.com/varve-io/varve/internal/tp"
)

// memory is a bucket in memory that knows what was asked for.
type memory struct {
	objects map[string][]byte

	mu   sync.Mutex
	gets map[string]int
}

func (m *memory) Get(_ context.Context, key string, off, n int64) (io.ReadCloser, error) {
	m.mu.Lock()
	m.gets[key]++
	m.mu.Unlock()
	b, ok := m.objects[key]
	if !ok {
		return nil, fmt.Errorf("%w: %s", direct.ErrNotFound, key)
	}
	b = b[min(off, int64(len(b))):]
	if n >= 0 {
		b = b[:min(n, int64(len(b)))]
	}
	return io.NopCloser(bytes.NewReader(b)), nil
}

func (m *memory) asked(part, suffix string) (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for key, c := range m.gets {
		if strings.Contains(key, part) && strings.HasSuffix(key, suffix) {
			n += c
		}
	}
	return n
}

func load(t testing.TB, dir string) *memory {
	t.Helper()
	m := &memory{objects: map[string][]byte{}, gets: map[string]int{}}
	root := os.DirFS(filepath.Join(dir, "objects"))
	err := fs.WalkDir(root, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		m.objects[path], err = fs.ReadFile(root, path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// key is the only key that holds all parts.
func (m *memory) key(t testing.TB, parts ...string) string {
	t.Helper()
	found := ""
	for key := range m.objects {
		if !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(key, p) }) {
			if found != "" {
				t.Fatalf("%q is in %s and %s", parts, found, key)
			}
			found = key
		}
	}
	if found == "" {
		t.Fatalf("no key with %q", parts)
	}
	return found
}

// values are the values of a metadata topic's records.
func (l *partitionLog) values(t testing.TB) (out [][]byte) {
	t.Helper()
	for _, b := range l.batches {
		it, err := recordbatch.Records(b.b, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		for it.Next() {
			out = append(out, slices.Clone(it.Record().Value))
		}
	}
	return out
}

// Whatever the bucket holds in place of a segment's objects, a client sees the log's records.
func TestHostileObjects(t *testing.T) {
	const first, second = "00000000000000000000-", "00000000000000000018-" // of the topic "transactions"
	log := func(m *memory, t *testing.T, segment, suffix string, change func([]byte) []byte) {
		key := m.key(t, "transactions", segment, suffix)
		if b := change(slices.Clone(m.objects[key])); b != nil {
			m.objects[key] = b
		} else {
			delete(m.objects, key)
		}
	}
	gone := func([]byte) []byte { return nil }
	entry := func(offset, position uint32) func([]byte) []byte {
		return func(b []byte) []byte {
			binary.BigEndian.PutUint32(b[len(b)-8:], offset)
			binary.BigEndian.PutUint32(b[len(b)-4:], position)
			return b
		}
	}
	manifest := func(change func(m map[string]any)) func([]byte) []byte {
		return func(b []byte) []byte {
			var m map[string]any
			if err := json.Unmarshal(b, &m); err != nil {
				t.Fatal(err)
			}
			change(m)
			b, err := json.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			return b
		}
	}
	in := func(m map[string]any, path ...string) map[string]any {
		for _, p := range path {
			m = m[p].(map[string]any)
		}
		return m
	}
	for _, c := range []struct {
		name, fixture string
		cause         string // of the fallback, "" none
		change        func(*memory, *testing.T)
	}{
		{"log is missing", "localtiered", "not_found", func(m *memory, t *testing.T) { log(m, t, first, ".log", gone) }},
		{"log is cut", "localtiered", "short", func(m *memory, t *testing.T) {
			log(m, t, first, ".log", func(b []byte) []byte { return b[:len(b)/2] })
		}},
		{"log is another segment's", "localtiered", "damaged", func(m *memory, t *testing.T) {
			log(m, t, first, ".log", func([]byte) []byte {
				return slices.Concat(m.objects[m.key(t, "transactions", second, ".log")], make([]byte, 200))
			})
		}},
		{"log is bent", "localtiered", "damaged", func(m *memory, t *testing.T) {
			log(m, t, first, ".log", func(b []byte) []byte { b[len(b)/2] ^= 1; return b })
		}},
		{"index is missing", "localtiered", "not_found", func(m *memory, t *testing.T) { log(m, t, first, ".index", gone) }},
		{"index is empty", "localtiered", "", func(m *memory, t *testing.T) { log(m, t, first, ".index", func([]byte) []byte { return []byte{} }) }},
		{"position behind the log", "localtiered", "damaged", func(m *memory, t *testing.T) { log(m, t, first, ".index", entry(17, 99999)) }},
		{"position below the log", "localtiered", "damaged", func(m *memory, t *testing.T) { log(m, t, first, ".index", entry(17, 1<<31)) }},
		{"offset of another segment", "localtiered", "damaged", func(m *memory, t *testing.T) { log(m, t, first, ".index", entry(18, 1658)) }},
		{"index ends in zeros", "localtiered", "damaged", func(m *memory, t *testing.T) {
			log(m, t, first, ".index", func(b []byte) []byte { return append(b, make([]byte, 80)...) })
		}},
		{"positions inside batches", "localtiered", "damaged", func(m *memory, t *testing.T) {
			log(m, t, first, ".index", func(b []byte) []byte {
				for i := 0; i < len(b); i += 8 {
					b[i+7] ^= 1
				}
				return b
			})
		}},
		{"snapshot is missing", "localtiered", "not_found", func(m *memory, t *testing.T) { log(m, t, first, ".snapshot", gone) }},
		{"snapshot is damaged", "localtiered", "damaged", func(m *memory, t *testing.T) {
			log(m, t, first, ".snapshot", func(b []byte) []byte { b[20] ^= 1; return b })
		}},
		{"transaction index is missing", "localtiered", "", func(m *memory, t *testing.T) { log(m, t, first, ".txnindex", gone) }},
		{"transaction index is cut", "localtiered", "damaged", func(m *memory, t *testing.T) {
			log(m, t, first, ".txnindex", func(b []byte) []byte { return b[:33] })
		}},
		{"manifest is missing", "aiven-both", "not_found", func(m *memory, t *testing.T) { log(m, t, first, ".rsm-manifest", gone) }},
		{"manifest is another segment's", "aiven-both", "damaged", func(m *memory, t *testing.T) {
			log(m, t, first, ".rsm-manifest", func([]byte) []byte { return m.objects[m.key(t, "transactions", second, ".rsm-manifest")] })
		}},
		{"manifest of more bytes", "aiven-plain", "damaged", func(m *memory, t *testing.T) {
			log(m, t, first, ".rsm-manifest", manifest(func(m map[string]any) { in(m, "chunkIndex")["originalFileSize"] = 1 << 39 }))
		}},
		{"manifest of fewer bytes", "aiven-encrypted", "damaged", func(m *memory, t *testing.T) {
			log(m, t, first, ".rsm-manifest", manifest(func(m map[string]any) { in(m, "chunkIndex")["originalFileSize"] = 100 }))
		}},
		{"manifest of huge chunks", "aiven-encrypted", "damaged", func(m *memory, t *testing.T) {
			log(m, t, first, ".rsm-manifest", manifest(func(m map[string]any) { in(m, "chunkIndex")["originalChunkSize"] = 1 << 40 }))
		}},
		{"manifest with an index outside", "aiven-plain", "short", func(m *memory, t *testing.T) {
			log(m, t, first, ".rsm-manifest", manifest(func(m map[string]any) { in(m, "segmentIndexes", "offset")["position"] = 1 << 30 }))
		}},
		{"manifest with a huge index", "aiven-plain", "damaged", func(m *memory, t *testing.T) {
			log(m, t, first, ".rsm-manifest", manifest(func(m map[string]any) { in(m, "segmentIndexes", "offset")["size"] = 1 << 29 }))
		}},
		{"manifest with a huger index", "aiven-plain", "damaged", func(m *memory, t *testing.T) {
			log(m, t, first, ".rsm-manifest", manifest(func(m map[string]any) { in(m, "segmentIndexes", "offset")["size"] = 1 << 50 }))
		}},
		{"manifest of endless size", "aiven-plain", "damaged", func(m *memory, t *testing.T) {
			log(m, t, first, ".rsm-manifest", func(b []byte) []byte { return append(b, bytes.Repeat([]byte(" "), 17<<20)...) })
		}},
		{"chunks are another segment's", "aiven-both", "damaged", func(m *memory, t *testing.T) {
			log(m, t, first, ".log", func([]byte) []byte { return m.objects[m.key(t, "transactions", second, ".log")] })
		}},
		{"chunks are cut", "aiven-compressed", "short", func(m *memory, t *testing.T) {
			log(m, t, first, ".log", func(b []byte) []byte { return b[:len(b)-1] })
		}},
		{"indexes are cut", "aiven-encrypted", "short", func(m *memory, t *testing.T) {
			log(m, t, first, ".indexes", func(b []byte) []byte { return b[:20] })
		}},
		{"indexes are bent", "aiven-encrypted", "damaged", func(m *memory, t *testing.T) {
			log(m, t, first, ".indexes", func(b []byte) []byte { b[20] ^= 1; return b })
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(fixtures.Dir(t), "tiered", c.fixture)
			txns, facts := fixtureLog(t, dir, "transactions")
			store := load(t, dir)
			c.change(store, t)
			kafka := newFakeKafka(t, txns, fixtureMetadata(t, dir))
			w := open(t, kafka, store, layouts[c.fixture])
			opts := []kgo.Opt{kgo.Dialer(w.transport.DialContext), kgo.FetchMaxPartitionBytes(1000)} // less than a segment
			for _, committed := range []bool{true, false} {
				want := facts.ReadUncommitted
				if committed {
					want = facts.ReadCommitted
				}
				if got := offsetsOf(t, read(t, kafka, "transactions", 0, committed, opts...)); !slices.Equal(got, want) {
					t.Errorf("committed %v: %v\ninstead of %v", committed, got, want)
				}
				// From the midst of the first segment, where its index counts.
				if got := offsetsOf(t, read(t, kafka, "transactions", 12, committed, opts...)); !slices.Equal(got, want[slices.IndexFunc(want, func(o int64) bool { return o >= 12 }):]) {
					t.Errorf("committed %v from 12: %v", committed, got)
				}
			}
			for _, suffix := range []string{"index", "indexes", "txnindex", "snapshot", "rsm-manifest"} {
				if n := store.asked(first, "."+suffix); n > 4 {
					t.Errorf("the %s was read %d times", suffix, n)
				}
			}
			s := w.transport.Snapshot()
			if s.Served == 0 {
				t.Error("the other segments were not read directly")
			}
			for cause, n := range s.Fallbacks {
				if (cause == c.cause) != (n > 0) {
					t.Errorf("%d fallbacks: %s", n, cause)
				}
			}
		})
	}
}

// The metadata topic may hold whatever: records of later versions, of other partitions, tombstones, noise, segments that
// contradict each other.
func TestHostileMetadata(t *testing.T) {
	dir := filepath.Join(fixtures.Dir(t), "tiered", "localtiered")
	for _, c := range []struct {
		name   string
		direct bool // all of the tier is read directly all the same
		change func(of remotelog.PartitionID, values [][]byte) [][]byte
	}{
		{"unknown records and tombstones", true, func(of remotelog.PartitionID, values [][]byte) (out [][]byte) {
			other := of
			other.Index = 7
			for _, v := range values {
				out = append(out, v, nil, []byte{}, []byte("noise"), []byte{1, 9, 0, 3, 4}, []byte{1, 0, 5, 1}, v[:len(v)-1], append(v[:len(v):len(v)], 0),
					remotelog.Marshal(&remotelog.PartitionDelete{PartitionID: other}), remotelog.Marshal(&remotelog.Snapshot{Segment: remotelog.Segment{ID: tp.UUID{1}, End: 5, Size: 5}}),
					remotelog.Marshal(&remotelog.Update{PartitionID: of, ID: tp.UUID{0xdd}, State: remotelog.CopyFinished}))
			}
			return out
		}},
		{"everything twice", true, func(_ remotelog.PartitionID, values [][]byte) [][]byte { return append(values, values...) }},
		{"stale epochs", true, func(of remotelog.PartitionID, values [][]byte) [][]byte {
			for _, e := range []int32{1, 3, 99} { // the log's only epoch is 0
				values = append(values, segmentRecords(of, tp.UUID{0xdd, byte(e)}, 0, 88, leaderepoch.Entry{Epoch: e, StartOffset: 0})...)
			}
			return values
		}},
		{"overlapping segments", false, func(of remotelog.PartitionID, values [][]byte) [][]byte {
			return append(values, segmentRecords(of, tp.UUID{0xdd}, 10, 40, leaderepoch.Entry{Epoch: 0, StartOffset: 10})...) // whose objects are not there
		}},
		{"the partition was deleted", false, func(of remotelog.PartitionID, values [][]byte) [][]byte {
			return append(values, remotelog.Marshal(&remotelog.PartitionDelete{PartitionID: of, State: 1}))
		}},
		{"nothing", false, func(remotelog.PartitionID, [][]byte) [][]byte { return nil }},
	} {
		t.Run(c.name, func(t *testing.T) {
			txns, facts := fixtureLog(t, dir, "transactions")
			metadata := metadataTopic()
			for _, v := range c.change(remotelog.PartitionID{Topic: "transactions", TopicID: txns.id}, fixtureMetadata(t, dir).values(t)) {
				metadata.write(t, v)
			}
			store := load(t, dir)
			kafka := newFakeKafka(t, txns, metadata)
			w := open(t, kafka, store, layouts["localtiered"])
			for _, committed := range []bool{true, false} {
				want, left := facts.ReadUncommitted, 0
				if committed {
					want, left = facts.ReadCommitted, bytesFrom(txns, openAt(t, dir, txns))
				}
				before := kafka.remoteBytes()
				if got := offsetsOf(t, read(t, kafka, "transactions", 0, committed, kgo.Dialer(w.transport.DialContext))); !slices.Equal(got, want) {
					t.Errorf("committed %v: %v\ninstead of %v", committed, got, want)
				}
				if n := kafka.remoteBytes() - before; (n == left) != c.direct {
					t.Errorf("committed %v: the broker had to read %d bytes of its tier, and %d at least", committed, n, left)
				}
			}
			for _, e := range []byte{1, 3, 99} {
				if n := store.asked(tp.UUID{0xdd, e}.String(), ""); n > 0 {
					t.Errorf("%d reads of a segment of epoch %d", n, e)
				}
			}
		})
	}
}

// segmentRecords announce a segment that was copied.
func segmentRecords(of remotelog.PartitionID, id tp.UUID, start, end int64, epochs ...leaderepoch.Entry) [][]byte {
	return [][]byte{remotelog.Marshal(&remotelog.Segment{PartitionID: of, ID: id, Start: start, End: end, Size: 1000, Epochs: epochs}),
		remotelog.Marshal(&remotelog.Update{PartitionID: of, ID: id, State: remotelog.CopyFinished})}
}
