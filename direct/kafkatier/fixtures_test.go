package kafkatier_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/kafkatier"
	"github.com/varve-io/varve/direct/objectstore"
	"github.com/varve-io/varve/internal/fixtures"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/segment"
)

// layouts are the layouts of the fixtures, as whoever reads them would configure them. Where custom metadata tells the prefix a
// wrong one does no harm.
var layouts = map[string]kafkatier.Layout{
	"localtiered": kafkatier.KafkaLocal("kafka-tiered-storage/"), "aiven-plain": kafkatier.Aiven("plain/"), "aiven-compressed": kafkatier.Aiven("compressed/"),
	"aiven-encrypted": kafkatier.Aiven("encrypted/"), "aiven-both": kafkatier.Aiven("renamed since/"),
}

// world is a stock cluster with a bucket, and a transport that reads there.
type world struct {
	kafka     *fakeKafka
	locator   *kafkatier.Locator
	transport *direct.Transport
}

func open(t testing.TB, kafka *fakeKafka, store objectstore.Store, layout kafkatier.Layout) *world {
	t.Helper()
	w := openWith(t, kafka, store, fixtureKeys(t), kafkatier.Options{Layout: layout, Patience: time.Minute})
	t.Cleanup(w.close)
	return w
}

// openWith is open without an end.
func openWith(t testing.TB, kafka *fakeKafka, store objectstore.Store, keys map[string][]byte, o kafkatier.Options) *world {
	t.Helper()
	f, err := objectstore.New(store, objectstore.Options{Keys: keys})
	if err != nil {
		t.Fatal(err)
	}
	o.Seeds = []string{kafka.addr()}
	l, err := kafkatier.Open(f, o)
	if err != nil {
		t.Fatal(err)
	}
	tr, err := direct.New(direct.Config{Enabled: true, Fetcher: f, Locator: l})
	if err != nil {
		t.Fatal(err)
	}
	return &world{kafka, l, tr}
}

func (w *world) close() {
	w.transport.Close()
	w.locator.Close()
}

func fixtureKeys(t testing.TB) map[string][]byte {
	t.Helper()
	pem, err := os.ReadFile(filepath.Join(fixtures.Dir(t), "tiered", "keys", "private.pem"))
	if err != nil {
		t.Fatal(err)
	}
	return map[string][]byte{"fixture": pem}
}

func bucketOf(t testing.TB, dir string) objectstore.Store {
	t.Helper()
	f, err := objectstore.Open(copyOf(t, filepath.Join(dir, "objects")), objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return f.Store()
}

// copyOf copies a folder, for a store that may write into it.
func copyOf(t testing.TB, dir string) string {
	t.Helper()
	to := t.TempDir()
	if err := os.CopyFS(to, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	return to
}

// read consumes a partition from an offset to its end, or the last stable offset: offset, key and value of each record.
func read(t testing.TB, kafka *fakeKafka, topic string, from int64, committed bool, opts ...kgo.Opt) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if committed {
		opts = append(opts, kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	}
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(kafka.addr()), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().At(from)}}),
		kgo.ConsumeResetOffset(kgo.NoResetOffset()), kgo.KeepControlRecords(), kgo.FetchMaxWait(100 * time.Millisecond), kgo.DisableClientMetrics()}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	var out []string
	for {
		fetches := cl.PollFetches(ctx)
		end, last := int64(-1), int64(-1)
		fetches.EachPartition(func(p kgo.FetchTopicPartition) {
			if p.Err != nil {
				t.Fatalf("%s-%d: %v", p.Topic, p.Partition, p.Err)
			}
			end = p.HighWatermark
			if committed {
				end = p.LastStableOffset
			}
			for _, r := range p.Records {
				last = r.Offset
				if !r.Attrs.IsControl() {
					out = append(out, fmt.Sprintf("%d %s=%s", r.Offset, text(r.Key), text(r.Value)))
				}
			}
		})
		if end >= 0 && last+1 >= end {
			return out
		}
	}
}

func offsetsOf(t testing.TB, lines []string) []int64 {
	t.Helper()
	out := make([]int64, len(lines))
	for i, l := range lines {
		if _, err := fmt.Sscanf(l, "%d ", &out[i]); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// openAt is where the first transaction begins that is open at the end of the tier.
func openAt(t testing.TB, dir string, l *partitionLog) int64 {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "local", l.topic, l.topic+"-0", segment.FileName(l.local, segment.SnapshotSuffix)))
	if err != nil {
		t.Fatal(err)
	}
	producers, err := producerstate.ParseSnapshot(b)
	if err != nil {
		t.Fatal(err)
	}
	first := l.local
	for _, p := range producers {
		if p.TxnFirstOffset >= 0 {
			first = min(first, p.TxnFirstOffset)
		}
	}
	if first == l.local {
		t.Fatal("no transaction is open at the end of the tier")
	}
	return first
}

// bytesFrom are those from an offset on that are in the tier alone.
func bytesFrom(l *partitionLog, offset int64) (n int) {
	for _, b := range l.batches {
		if b.first >= offset && b.first < l.local {
			n += len(b.b)
		}
	}
	return n
}

// What Kafka and the Aiven plug-in tiered is read by their metadata, for clients of both isolation levels, with names and with
// topic ids: the records that Kafka's own consumer delivers, and none of them through the broker's tier, but for those behind
// which a transaction is open at the tier's end.
func TestFixtures(t *testing.T) {
	root := filepath.Join(fixtures.Dir(t), "tiered")
	for name, layout := range layouts {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(root, name)
			plain, plainFacts := fixtureLog(t, dir, "plain")
			txns, txnFacts := fixtureLog(t, dir, "transactions")
			plain.stable = -1
			kafka := newFakeKafka(t, plain, txns, fixtureMetadata(t, dir))
			w := open(t, kafka, bucketOf(t, dir), layout)
			names := kversion.V3_0_0() // Fetch 12
			for _, c := range []struct {
				topic     string
				committed bool
				want      []int64
			}{
				{"plain", false, plainFacts.ReadUncommitted}, {"plain", true, plainFacts.ReadUncommitted},
				{"transactions", false, txnFacts.ReadUncommitted}, {"transactions", true, txnFacts.ReadCommitted},
			} {
				for _, opts := range [][]kgo.Opt{{}, {kgo.MaxVersions(names)}} {
					want := read(t, kafka, c.topic, 0, c.committed, opts...)
					remote, before := kafka.remoteBytes(), w.transport.Snapshot()
					got := read(t, kafka, c.topic, 0, c.committed, append(opts, kgo.Dialer(w.transport.DialContext))...)
					if !slices.Equal(got, want) || !slices.Equal(offsetsOf(t, got), c.want) {
						t.Errorf("%s, committed %v: %d records\n%q\ninstead of %d\n%q", c.topic, c.committed, len(got), got, len(want), want)
					}
					stats := w.transport.Snapshot()
					left := 0
					if c.topic == "transactions" && c.committed {
						left = bytesFrom(txns, openAt(t, dir, txns))
					}
					if n := kafka.remoteBytes() - remote; n != left {
						t.Errorf("%s, committed %v: the broker had to read %d bytes of its tier instead of %d", c.topic, c.committed, n, left)
					}
					if stats.Served == before.Served {
						t.Errorf("%s, committed %v: nothing was read directly", c.topic, c.committed)
					}
				}
			}
			for cause, n := range w.transport.Snapshot().Fallbacks {
				if n > 0 {
					t.Errorf("%d fallbacks: %s", n, cause)
				}
			}
		})
	}
}
