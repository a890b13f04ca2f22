package quorum

import (
	"errors"
	"log/slog"
	"testing"

	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

func open(t *testing.T, dir string) *Node {
	t.Helper()
	n, err := Open(Options{Dir: dir, NodeID: 1, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if err := n.AwaitLeader(t.Context()); err != nil {
		t.Fatal(err)
	}
	return n
}

func propose(t *testing.T, n *Node, records ...metadata.Record) *metadata.Image {
	t.Helper()
	img, err := n.Propose(t.Context(), n.Image(), records)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func TestRestartFromLogAndSnapshot(t *testing.T) {
	dir := t.TempDir()
	n := open(t, dir)
	changed := n.Changed()
	propose(t, n, metadata.ClusterRecord{ID: "c"}, metadata.TopicRecord{Name: "a", ID: tp.UUID{1}}, metadata.PartitionRecord{Topic: tp.UUID{1}, Replicas: []int32{1}, ISR: []int32{1}, Leader: 1})
	<-changed
	if err := n.Snapshot(); err != nil {
		t.Fatal(err)
	}
	last := propose(t, n, metadata.TopicRecord{Name: "b", ID: tp.UUID{2}})
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}

	n = open(t, dir)
	img := n.Image()
	if img.ClusterID != "c" || len(img.Topics) != 2 || img.Topics["a"].Partitions[0].Leader != 1 || img.Index != last.Index {
		t.Fatalf("after restart: %+v", img)
	}
	if err := n.Snapshot(); err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	n = open(t, dir)
	defer n.Close()
	if n.Image().Index != last.Index {
		t.Fatalf("a snapshot forgot its index: %d, want %d", n.Image().Index, last.Index)
	}
	propose(t, n, metadata.TopicRecord{Name: "c", ID: tp.UUID{3}})
}

func TestImpossibleRecordPoisons(t *testing.T) {
	n := open(t, t.TempDir())
	defer n.Close()
	bad := []metadata.Record{metadata.RemoveTopicRecord{Topic: tp.UUID{9}}}
	if _, err := n.Propose(t.Context(), n.Image(), bad); err == nil {
		t.Fatal("removing a topic that is not there was applied")
	}
	if _, err := n.Propose(t.Context(), n.Image(), []metadata.Record{metadata.ClusterRecord{ID: "c"}}); err == nil {
		t.Fatal("a poisoned node went on")
	}
}

func TestStaleBaseIsRefused(t *testing.T) {
	n := open(t, t.TempDir())
	defer n.Close()
	base := n.Image()
	now := propose(t, n, metadata.ClusterRecord{ID: "c"})
	if _, err := n.Propose(t.Context(), base, []metadata.Record{metadata.ProducerIDsRecord{Next: 5}}); !errors.Is(err, ErrConflict) {
		t.Fatal(err)
	}
	if n.Image() != now {
		t.Fatal("a refused entry changed the image")
	}
	propose(t, n, metadata.ProducerIDsRecord{Next: 7})
	if n.Image().NextProducerID != 7 {
		t.Fatal(n.Image().NextProducerID)
	}
}

func TestLoneVoterLeadsAtOnce(t *testing.T) {
	dir := t.TempDir()
	for range 2 {
		n := open(t, dir)
		for l, changed := n.Leadership(); !l.Leading; l, changed = n.Leadership() {
			<-changed
		}
		if s := n.Status(); s.Leader != 1 || len(s.Members) != 1 || !s.Members[0].Voter || n.Waiting() != "" {
			t.Fatalf("%+v", s)
		}
		if err := n.Remove(t.Context(), 1); err == nil || err.Error() != "node 1 is the last voter" {
			t.Fatal(err)
		}
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestLostLogIsNotFoundedAnew(t *testing.T) {
	gone := errors.New("restore it from a copy")
	dir := t.TempDir()
	for range 2 {
		if _, err := Open(Options{Dir: dir, NodeID: 1, Logger: slog.New(slog.DiscardHandler), Lost: gone}); !errors.Is(err, gone) {
			t.Fatal(err)
		}
	}
	if err := open(t, dir).Close(); err != nil {
		t.Fatal(err)
	}
	n, err := Open(Options{Dir: dir, NodeID: 1, Logger: slog.New(slog.DiscardHandler), Lost: gone})
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
}

func FuzzDecode(f *testing.F) {
	b, err := encode(3, []metadata.Record{metadata.ClusterRecord{ID: "c"}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		index, records, err := decode(b)
		if err != nil {
			return
		}
		again, err := encode(index, records)
		if err != nil {
			t.Fatal(err)
		}
		if i, r, err := decode(again); err != nil || i != index || len(r) != len(records) {
			t.Fatal(i, r, err)
		}
	})
}
