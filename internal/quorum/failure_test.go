package quorum

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/varve-io/varve/internal/metadata"
)

// A voter that lost its disk must not help to elect a leader without what its former self acknowledged.
func TestWipedVoterDoesNotVote(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, 0)
	c.all(1)
	a := c.leader()
	var others []int32
	for id := range c.nodes {
		if id != a.o.NodeID {
			others = append(others, id)
		}
	}
	b, lagging := others[0], others[1]
	c.kill(lagging)
	c.put(2) // on a and b
	c.has(c.nodes[b], 2)
	c.kill(b)
	c.wipe(b)
	c.kill(a.o.NodeID)

	l, w := c.start(lagging), c.start(b)
	for restart := range 2 {
		denied := l.log.denied.Load()
		c.eventually("the lagging voter is denied votes", func() bool { return l.log.denied.Load() >= denied+6 })
		if l.Leading() || w.Leading() || w.raft.LastIndex() > 1 {
			t.Fatal("a voter without the committed entry was elected")
		}
		if restart == 0 {
			c.stop(b)
			w = c.start(b) // the debt survives
		}
	}
	c.start(a.o.NodeID)
	if img := c.put(3); img.Index == 0 {
		t.Fatal("no index")
	}
	c.has(w, 3)
	c.eventually("the debt is paid", func() bool { return !w.debt.owes(w.raft.AppliedIndex()) })
	if _, err := os.Stat(w.debt.path); !errors.Is(err, os.ErrNotExist) {
		t.Fatal("the file of a paid debt stays:", err)
	}
	c.kill(a.o.NodeID)
	c.put(4)
}

func TestDebt(t *testing.T) {
	dir := t.TempDir()
	open := func(empty bool) *debt {
		t.Helper()
		d, err := openDebt(dir, empty)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	if d := open(false); d.owes(0) {
		t.Fatal("a node with a log owes")
	}
	if d := open(true); !d.owes(1 << 40) {
		t.Fatal("an empty node owes nothing")
	}
	d := open(false)
	if err := d.learn(10); err != nil {
		t.Fatal(err)
	}
	if err := d.learn(3); err != nil || !d.owes(9) {
		t.Fatal("a later word lowered the debt", err)
	}
	if d = open(false); !d.owes(9) {
		t.Fatal("the debt was forgotten by a restart")
	}
	if d = open(true); !d.owes(10) {
		t.Fatal("an emptied log paid the debt")
	}
	if d = open(false); d.owes(10) || d.owes(0) {
		t.Fatal("a paid debt is owed")
	}
	if d = open(false); d.owes(0) {
		t.Fatal("a paid debt came back")
	}
	if err := os.WriteFile(filepath.Join(dir, "catching-up"), []byte("soon"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := openDebt(dir, false); err == nil {
		t.Fatal("garbage was taken for a debt")
	}
}

// What a leader says first counts, even if it does not know yet what is committed.
func TestDebtIsTheLeadersPosition(t *testing.T) {
	d, err := openDebt(t.TempDir(), true)
	if err != nil {
		t.Fatal(err)
	}
	tr := newTransport(nil, nil, d)
	tr.applied = func() uint64 { return 5 }
	ask := func(command any) raft.RPCResponse {
		answer := make(chan raft.RPCResponse, 1)
		if tr.admit(raft.RPC{Command: command, RespChan: answer}) {
			return raft.RPCResponse{}
		}
		return <-answer
	}
	if r := ask(&raft.AppendEntriesRequest{Term: 3}); r.Response != nil || d.known {
		t.Fatal("a heartbeat fixed the debt")
	}
	if r := ask(&raft.RequestVoteRequest{Term: 4}); r.Response == nil || r.Response.(*raft.RequestVoteResponse).Granted {
		t.Fatalf("%+v", r)
	}
	if r := ask(&raft.TimeoutNowRequest{}); r.Error == nil {
		t.Fatal("it was made to stand for election")
	}
	if r := ask(&raft.AppendEntriesRequest{Term: 3, PrevLogEntry: 6, PrevLogTerm: 2}); r.Response != nil || d.upTo != 6 {
		t.Fatal(d.upTo)
	}
	if err := tr.RequestPreVote("2", "x", nil, nil); !errors.Is(err, errOwing) {
		t.Fatal(err)
	}
	if err := tr.RequestVote("2", "x", nil, nil); !errors.Is(err, errOwing) {
		t.Fatal(err)
	}
	tr.applied = func() uint64 { return 6 }
	if r := ask(&raft.RequestPreVoteRequest{Term: 4}); r.Response != nil {
		t.Fatal("a node without debts does not vote")
	}
}

func TestNonvoterFollowsAndCatchesUpBySnapshot(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, 1)
	c.threshold = 10
	c.start(1)
	for i := range int64(50) {
		c.put(i + 1)
	}
	if err := c.nodes[1].Snapshot(); err != nil {
		t.Fatal(err)
	}
	b := c.start(2)
	if b.Waiting() != "no quorum: this node is no member yet" {
		t.Fatal(b.Waiting())
	}
	l := c.leader()
	for range 2 { // the second changes nothing
		if err := l.AddNonvoter(t.Context(), 2, c.address(2)); err != nil {
			t.Fatal(err)
		}
	}
	c.has(b, 50)
	c.eventually("it came by a snapshot", func() bool { return b.raft.Stats()["last_snapshot_index"] != "0" })
	if img := c.put(51); img.Index <= b.Image().Index && b.Image().NextProducerID != 51 {
		t.Fatal("the follower is ahead of its leader")
	}
	c.has(b, 51)
	if b.Image().Index != l.Image().Index {
		t.Fatal("images of one content have two indexes")
	}
	if _, err := b.Propose(t.Context(), b.Image(), []metadata.Record{metadata.ProducerIDsRecord{Next: 52}}); !errors.Is(err, ErrNotController) || errors.Is(err, ErrOutcomeUnknown) {
		t.Fatal(err)
	}
	if s := b.Status(); s.Leader != 1 || s.LeaderAddress != c.address(1) || len(s.Members) != 2 || s.Members[1].Voter {
		t.Fatalf("%+v", s)
	}
	if err := b.AddVoter(t.Context(), 2, c.address(2)); !errors.Is(err, ErrNotController) {
		t.Fatal(err)
	}
	if err := l.Remove(t.Context(), 2); err != nil || len(l.Members()) != 1 {
		t.Fatal(err, l.Members())
	}
}

func TestLeaderDiesAndOthersGoOn(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, 0)
	c.all(1)
	old := c.leader()
	l, ended := old.Leadership()
	c.isolate(old.o.NodeID, true)
	<-ended
	if now, _ := old.Leadership(); now.Leading {
		t.Fatalf("cut off, it still leads: %+v", now)
	}
	c.put(2)
	next, _ := c.leader().Leadership()
	if next.Term <= l.Term || next.Former != old.o.NodeID || next.Heard.IsZero() {
		t.Fatalf("%+v after %+v of node %d", next, l, old.o.NodeID)
	}
	c.isolate(old.o.NodeID, false)
	c.has(old, 2)
}

func TestCloseHandsLeadershipOver(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, 0)
	c.all(1)
	old := c.leader()
	id := old.o.NodeID
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	// The successor was named, so it never had to miss anybody: it knows its predecessor from a moment ago.
	c.eventually("a successor", func() bool {
		for other, m := range c.nodes {
			if l, _ := m.Leadership(); other != id && l.Leading && l.Former == id {
				return true
			}
		}
		return false
	})
	if _, err := old.Propose(t.Context(), old.Image(), []metadata.Record{metadata.ProducerIDsRecord{Next: 2}}); !errors.Is(err, ErrNotController) {
		t.Fatal(err)
	}
}

func TestVotersComeAndGo(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, 2)
	a := c.start(1)
	c.put(1)
	c.start(2)
	c.start(3)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for id := int32(2); id <= 3; id++ {
		if err := a.AddNonvoter(ctx, id, c.address(id)); err != nil {
			t.Fatal(err)
		}
		if err := a.AddVoter(ctx, id, c.address(id)); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.AddNonvoter(ctx, 2, c.address(2)); err != nil || !a.Members()[1].Voter {
		t.Fatal("a voter was demoted", err)
	}
	c.put(2)
	c.eventually("no debts", func() bool {
		return !c.nodes[2].debt.owes(c.nodes[2].raft.AppliedIndex()) && !c.nodes[3].debt.owes(c.nodes[3].raft.AppliedIndex())
	})
	c.kill(1)
	c.put(3)
	l := c.leader()
	if err := l.Remove(ctx, 1); err != nil {
		t.Fatal(err)
	}
	last := l.o.NodeID
	if err := l.DemoteVoter(ctx, 5-last); err != nil {
		t.Fatal(err)
	}
	for _, change := range []func(context.Context, int32) error{l.DemoteVoter, l.Remove} {
		if err := change(ctx, last); err == nil {
			t.Fatal("the last voter went")
		}
	}
	c.put(4)
	c.has(c.nodes[5-last], 4)
}

func BenchmarkThreeVoters(b *testing.B) {
	c := newCluster(b, 3, 0)
	for id := range c.listeners {
		c.start(id)
	}
	c.put(1)
	l := c.leader()
	b.ResetTimer()
	for i := range b.N {
		if _, err := l.Propose(b.Context(), l.Image(), []metadata.Record{metadata.ProducerIDsRecord{Next: int64(i)}}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "commits/s")
}
