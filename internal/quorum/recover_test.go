package quorum

import (
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	raftboltdb "github.com/hashicorp/raft-boltdb/v2"

	"github.com/varve-io/varve/internal/metadata"
)

var quiet = slog.New(slog.DiscardHandler)

func amend(*metadata.Image) []metadata.Record {
	return []metadata.Record{metadata.ProducerIDsRecord{Next: 70}}
}

// A quorum that lost two of three voters goes on from what the third one has.
func TestRecover(t *testing.T) {
	t.Parallel()
	for _, threshold := range []uint64{0, 2} { // without and with a snapshot
		c := newCluster(t, 3, 1)
		c.threshold = threshold
		c.all(1)
		if err := c.leader().AddNonvoter(t.Context(), 4, c.address(4)); err != nil {
			t.Fatal(err)
		}
		for i := range int64(6) {
			c.put(2 + i)
		}
		c.has(c.nodes[1], 7)
		c.has(c.nodes[4], 7)
		if threshold > 0 {
			if err := c.nodes[1].Snapshot(); err != nil {
				t.Fatal(err)
			}
		}
		want := c.nodes[1].Image().Index
		for id := range int32(4) {
			c.kill(id + 1)
		}
		c.wipe(2)
		c.wipe(3)

		before, err := Inspect(c.folder(1), 1, quiet)
		if err != nil || before.Image.Index != want || before.Index < want || before.Term == 0 || len(before.Members) != 4 || !before.Members[1].Voter || before.Members[3].Voter {
			t.Fatalf("%+v, %v; want the image of %d", before, err, want)
		}
		if other, err := Inspect(c.folder(4), 4, quiet); err != nil || other.Image.Index != want {
			t.Fatalf("%+v, %v", other, err)
		}
		for i := range uint64(2) { // it may be cut short, and run again
			after, err := Recover(c.folder(1), 1, amend, quiet)
			if err != nil || after.Index != before.Index+1+i || after.Term <= before.Term || after.Image.Index != after.Index || !after.Members[0].Voter || after.Members[1].Voter {
				t.Fatalf("%+v, %v", after, err)
			}
		}
		first := c.start(1)
		c.has(c.start(4), 70) // which has as many entries as the first had
		c.start(2)
		c.start(3)
		c.put(80)
		if !first.Leading() {
			t.Fatal("another node leads")
		}
		for _, id := range []int32{2, 3} {
			c.has(c.nodes[id], 80)
			c.eventually("the lost node may vote again", func() bool { return !c.nodes[id].debt.owes(c.nodes[id].raft.AppliedIndex()) })
			if err := first.AddVoter(t.Context(), id, c.address(id)); err != nil {
				t.Fatal(err)
			}
		}
		c.has(c.nodes[4], 80)
		c.kill(1)
		c.put(90)
	}
}

func TestRecoverRefuses(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, 0)
	c.all(1)
	for id := range int32(3) {
		c.kill(id + 1)
	}
	refused := func(words string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%v; want %q", err, words)
		}
	}
	_, err := Recover(c.folder(1), 9, amend, quiet)
	refused("node 9 is no member of the quorum", err)
	_, err = Recover(t.TempDir(), 1, amend, quiet)
	refused("no metadata log", err)

	// One that had not caught up with what its former self may have acknowledged.
	d := &debt{path: filepath.Join(c.folder(2), "catching-up")}
	if err := d.write("1000"); err != nil {
		t.Fatal(err)
	}
	if _, err = Recover(c.folder(2), 2, amend, quiet); !errors.Is(err, ErrIncomplete) {
		t.Errorf("%v", err)
	}
	if s, err := Inspect(c.folder(2), 2, quiet); err != nil || !s.Members[0].Voter {
		t.Errorf("%+v, %v: it was changed", s, err)
	}

	empty := t.TempDir()
	store, err := raftboltdb.New(raftboltdb.Options{Path: filepath.Join(empty, logFile)})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = Recover(empty, 3, amend, quiet)
	refused("the metadata log is empty", err)
}
