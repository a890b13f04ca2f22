package main

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestClusterUsage(t *testing.T) {
	dir := t.TempDir()
	for _, args := range [][]string{{"cluster", "--nodes", "0"}, {"cluster", "--nodes", "10"}, {"cluster", "--listen", "localhost"}, {"cluster", "--listen", "localhost:0"},
		{"cluster", "--listen", "localhost:65535"}, {"cluster", "--http", "x"}, {"cluster", "--set", "no.such.key=1"}, {"cluster", "--set", "x"}, {"cluster", "extra"},
		{"quorum", "add"}, {"quorum", "add", "x"}, {"quorum", "remove", "-1"}, {"quorum", "status", "x"}, {"broker", "drain"}, {"broker", "drain", "x"},
		{"broker", "drain", "1", "--cancel", "--no-wait"}, {"broker", "unregister", "1", "2"}, {"broker", "ls", "x"}, {"topic", "reassign", "t"},
		{"topic", "reassign", "t", "--to", "1", "--cancel"}, {"topic", "reassign", "t:x", "--to", "1"}, {"topic", "reassign", ":1", "--to", "1"}, {"topic", "reassign", "t", "--to", "x"}} {
		if args[0] == "cluster" {
			args = append(args, "--dir", dir)
		}
		_, err := called(t, args...)
		var usage usageError
		if !errors.As(err, &usage) {
			t.Errorf("%v: %v", args, err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("a command line that makes no sense left %v (%v)", left, err)
	}
}

// TestClusterConfigs: of an even number of nodes the last only joins, and a folder that exists keeps its founders.
func TestClusterConfigs(t *testing.T) {
	dir := t.TempDir()
	l := laptop{nodes: 4, dir: dir, listen: "127.0.0.1:9000", http: ":8000", sets: []string{"min.insync.replicas=2"}}
	nodes, err := l.configs()
	if err != nil || len(nodes) != 4 {
		t.Fatal(nodes, err)
	}
	const three = "1@127.0.0.1:9000,2@127.0.0.1:9001,3@127.0.0.1:9002"
	for i, want := range []struct{ voters, join, listen, http string }{
		{three, "", "PLAINTEXT://127.0.0.1:9000", ":8000"}, {three, "", "PLAINTEXT://127.0.0.1:9001", ":8001"}, {three, "", "PLAINTEXT://127.0.0.1:9002", ":8002"},
		{"", "127.0.0.1:9000,127.0.0.1:9001,127.0.0.1:9002", "PLAINTEXT://127.0.0.1:9003", ":8003"}} {
		v := nodes[i]
		if v.Int("node.id") != i+1 || v.Get("controller.quorum.voters") != want.voters || v.Get("controller.quorum.bootstrap.servers") != want.join ||
			v.Get("listeners") != want.listen || v.Get("varve.http.listener") != want.http || v.Get("varve.bucket") != filepath.Join(dir, "bucket") ||
			v.Int("default.replication.factor") != 3 || v.Int("min.insync.replicas") != 2 {
			t.Errorf("node %d: %s, %s, %s, %s", i+1, v.Get("controller.quorum.voters"), v.Get("controller.quorum.bootstrap.servers"), v.Get("listeners"), v.Get("varve.http.listener"))
		}
	}
	for _, id := range []string{"1", "2", "3"} {
		if err := os.MkdirAll(filepath.Join(dir, id), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, id, "meta.properties"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	l.nodes = 5
	if nodes, err = l.configs(); err != nil || nodes[2].Get("controller.quorum.voters") != three || nodes[4].Get("controller.quorum.voters") != "" {
		t.Errorf("a cluster that grows: %v", err)
	}
	l.nodes = 2
	if _, err = l.configs(); err == nil {
		t.Error("fewer nodes than there are were accepted")
	}
	if nodes, err = (laptop{nodes: 2, dir: t.TempDir(), listen: "0.0.0.0:9000"}).configs(); err != nil || nodes[0].Get("controller.quorum.voters") != "1@localhost:9000" || nodes[0].Int("default.replication.factor") != 2 {
		t.Errorf("two nodes: %v", err)
	}
}

func TestQuorumWarning(t *testing.T) {
	for n, want := range []bool{false, false, true, false, true, false, true} {
		if got := (&quorumStatus{Voters: make([]quorumNode, n)}).warning(); (got != "") != want {
			t.Errorf("%d voters: %q", n, got)
		}
	}
}

func TestTopicState(t *testing.T) {
	p := describedPartition{Leader: 1, Replicas: []int32{1, 2, 3}, ISR: []int32{1, 2, 3}, MinISR: 2, Detail: []describedReplica{{Broker: 1, Leader: true}, {Broker: 2, Phase: fetching}, {Broker: 3, Phase: fetching}}}
	if got := p.state(); got != "ok" {
		t.Errorf("%q", got)
	}
	p.ISR, p.Offline, p.Adding, p.Removing = []int32{1}, []int32{3}, []int32{2}, []int32{3}
	p.Detail[1].Phase, p.Detail[1].Thin, p.Detail[2].Error = "Bootstrapping", true, "does not answer"
	if got, want := p.state(), "1 in sync, min.insync.replicas is 2; offline 3; adding 2; removing 3; 2 is Bootstrapping; thin 2"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
