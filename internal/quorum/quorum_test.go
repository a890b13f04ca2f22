package quorum

import (
	"context"
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
	if err := n.AwaitLeader(context.Background()); err != nil {
		t.Fatal(err)
	}
	return n
}

func propose(t *testing.T, n *Node, records ...metadata.Record) {
	t.Helper()
	if _, err := n.Propose(context.Background(), records); err != nil {
		t.Fatal(err)
	}
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
	propose(t, n, metadata.TopicRecord{Name: "b", ID: tp.UUID{2}})
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}

	n = open(t, dir)
	defer n.Close()
	img := n.Image()
	if img.ClusterID != "c" || len(img.Topics) != 2 || img.Topics["a"].Partitions[0].Leader != 1 {
		t.Fatalf("after restart: %+v", img)
	}
}

func TestImpossibleRecordPoisons(t *testing.T) {
	n := open(t, t.TempDir())
	defer n.Close()
	bad := []metadata.Record{metadata.RemoveTopicRecord{Topic: tp.UUID{9}}}
	if _, err := n.Propose(context.Background(), bad); err == nil {
		t.Fatal("removing a topic that is not there was applied")
	}
	if _, err := n.Propose(context.Background(), []metadata.Record{metadata.ClusterRecord{ID: "c"}}); err == nil {
		t.Fatal("a poisoned node went on")
	}
}
