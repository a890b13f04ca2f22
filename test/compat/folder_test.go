package compat

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"
)

// Varve serves a partition's folder as an Apache Kafka broker left it, after a clean end and after a kill, the results of
// transactions included, and goes on in it.
func TestWeServeKafkasFolder(t *testing.T) {
	t.Run("clean", func(t *testing.T) { weServeKafkasFolder(t, true) })
	t.Run("killed", func(t *testing.T) { weServeKafkasFolder(t, false) })
}

func weServeKafkasFolder(t *testing.T, clean bool) {
	n := startNode(t)
	k := kafkaTools(t, n.addr)
	peer, home, stop := k.peer(t)
	configs := []string{"internal.segment.bytes=16384", "index.interval.bytes=256"}
	peer.topic(t, "theirs", 1, configs...)
	all := fill(t, peer, "theirs") + transactions(t, peer, "theirs")
	committed := kgo.FetchIsolationLevel(kgo.ReadCommitted())
	want := peer.consumed(t, "theirs", all)
	wantCommitted := peer.consumed(t, "theirs", all-40, committed)
	if !clean {
		stop = append(stop, "--kill")
	}
	command{}.run(t, stop...)

	n.topic(t, "theirs", 1, configs...)
	n.do(t, "stop", "1")
	folder := filepath.Join(n.dir, "data", "theirs-0")
	id, err := os.ReadFile(filepath.Join(folder, "partition.metadata"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(folder, os.DirFS(filepath.Join(home, "node1", "data", "theirs-0"))); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "partition.metadata"), id, 0o600); err != nil {
		t.Fatal(err)
	}
	if !clean {
		if err := os.Remove(filepath.Join(n.dir, "data", ".kafka_cleanshutdown")); err != nil {
			t.Fatal(err)
		}
	}
	n.do(t, "start", "1")
	equal(t, n.consumed(t, "theirs", all), want)
	equal(t, n.consumed(t, "theirs", all-40, committed), wantCommitted)
	if err := n.client(t).ProduceSync(within(t), &kgo.Record{Topic: "theirs", Value: []byte("one more")}).FirstErr(); err != nil {
		t.Errorf("going on in it: %v", err)
	}
}

func equal(t *testing.T, got, want []*kgo.Record) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d records, want %d", len(got), len(want))
	}
	for i, r := range got {
		if w := want[i]; r.Offset != w.Offset || string(r.Value) != string(w.Value) || string(r.Key) != string(w.Key) || !r.Timestamp.Equal(w.Timestamp) {
			t.Fatalf("record %d: %+v instead of %+v", i, r, w)
		}
	}
}

// transactions writes four of 20 records, every second aborted, and returns the number of records.
func transactions(t *testing.T, b *broker, topic string) int {
	t.Helper()
	cl := b.client(t, kgo.TransactionalID("compat"), kgo.DefaultProduceTopic(topic))
	ctx := within(t)
	for i := range 4 {
		if err := cl.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		for _, v := range values(20) {
			if err := cl.ProduceSync(ctx, &kgo.Record{Value: []byte(v)}).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
		if err := cl.EndTransaction(ctx, kgo.TransactionEndTry(i%2 == 0)); err != nil {
			t.Fatal(err)
		}
	}
	return 80
}
