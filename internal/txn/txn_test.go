package txn

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"testing"

	"github.com/varve-io/varve/internal/tp"
)

var (
	p0 = tp.Partition{Topic: "a", Index: 0}
	p1 = tp.Partition{Topic: "a", Index: 1}
	p2 = tp.Partition{Topic: "b", Index: 0}
)

// ids hands out producer ids 1000, 1001 and so on.
func ids() Allocate {
	next := int64(999)
	return func() (int64, error) { next++; return next, nil }
}

var errNoIDs = errors.New("no producer ids")

func noIDs() (int64, error) { return 0, errNoIDs }

// at is an id with producer 7 and epoch 5 in some state, by version 1 or 2, which began at 100 and was changed at 200.
func at(s State, v2 bool) Transaction {
	t := Transaction{id: "x", producerID: 7, previousID: 7, nextID: NoProducerID, epoch: 5, lastEpoch: NoEpoch, timeoutMs: 1000, state: s, start: 100, updated: 200, version: versionOf(v2)}
	if s == Ongoing || s.prepared() {
		t.partitions = []tp.Partition{p0, p2}
	}
	if s == Empty {
		t.start = -1
	}
	return t
}

var states = []State{Empty, Ongoing, PrepareCommit, PrepareAbort, CompleteCommit, CompleteAbort}

// outcome is what a step comes to, in short: "error", "ok" without a write, or the state with producer id and epoch.
func outcome(s Step) string {
	text := ""
	if s.Write {
		text = fmt.Sprintf("%s %d/%d", s.Next.state, s.Next.producerID, s.Next.epoch)
		if s.Next.nextID != NoProducerID {
			text += fmt.Sprintf(" then %d", s.Next.nextID)
		}
	}
	if s.Err != nil {
		if text != "" {
			text += ": "
		}
		return text + s.Err.Error()
	}
	if text == "" {
		return "ok"
	}
	return text
}

// text of the errors, to keep the tables narrow.
var (
	invalid    = ErrInvalidState.Error()
	mapping    = ErrInvalidMapping.Error()
	concurrent = ErrConcurrent.Error()
	fenced     = ErrProducerFenced.Error()
)

func TestFirstInit(t *testing.T) {
	n := New("x")
	s := n.InitProducerID(InitRequest{TimeoutMs: 10, TimeoutMaxMs: 10, ProducerID: -1, Epoch: -1, Allocate: ids()}, 50)
	if outcome(s) != "Empty 1000/0" || s.ProducerID != 1000 || s.Epoch != 0 || s.Next.updated != 50 || s.Next.timeoutMs != 10 || s.Next.start != -1 || s.End != nil {
		t.Fatalf("%+v", s)
	}
	// A producer that comes with an id of its own that has expired here gets a new one.
	s = n.InitProducerID(InitRequest{TimeoutMs: 10, TimeoutMaxMs: 10, ProducerID: 3, Epoch: 9, Allocate: ids()}, 50)
	if outcome(s) != "Empty 1000/0" {
		t.Fatal(outcome(s))
	}
	if n.Known() || !s.Next.Known() || n.Expired(0, 1000) || n.NextDeadline() != 0 {
		t.Fatal("known or not")
	}
	if _, err := n.Describe(); err != ErrNotFound {
		t.Fatal(err)
	}
	for what, s := range map[string]Step{
		"add":        n.AddPartitions(-1, -1, []tp.Partition{p0}, true, 1),
		"end":        n.End(EndRequest{ProducerID: -1, Epoch: -1}, 1),
		"end v2":     n.End(EndRequest{ProducerID: -1, Epoch: -1, V2: true, Allocate: noIDs}, 1),
		"end before": n.End(EndRequest{ProducerID: -1, Epoch: -2, V2: true, Allocate: noIDs}, 1),
	} {
		if outcome(s) != mapping {
			t.Errorf("%s of an unknown id: %s", what, outcome(s))
		}
	}
	if err := n.Verify(-1, -1, []tp.Partition{p0})[0]; err != ErrInvalidMapping {
		t.Fatal(err)
	}
}

func TestInitTimeout(t *testing.T) {
	for timeout, ok := range map[int32]bool{math.MinInt32: false, -1: false, 0: false, 1: true, 100: true, 101: false, math.MaxInt32: false} {
		s := New("x").InitProducerID(InitRequest{TimeoutMs: timeout, TimeoutMaxMs: 100, ProducerID: -1, Epoch: -1, Allocate: ids()}, 1)
		if (s.Err == nil) != ok || !ok && s.Err != ErrInvalidTimeout {
			t.Errorf("%d: %s", timeout, outcome(s))
		}
	}
}

func TestInitInEveryState(t *testing.T) {
	for _, c := range []struct {
		state    State
		expected [2]int64
		v1, v2   string // the cluster's version
	}{
		{Empty, [2]int64{-1, -1}, "Empty 7/6", ""},
		{Empty, [2]int64{7, 5}, "Empty 7/6", ""},
		{Empty, [2]int64{7, 4}, fenced, ""},
		{Empty, [2]int64{7, 6}, fenced, ""},
		{Empty, [2]int64{8, 5}, fenced, ""},
		{Ongoing, [2]int64{-1, -1}, "PrepareAbort 7/6: " + concurrent, ""},
		{Ongoing, [2]int64{7, 5}, "PrepareAbort 7/6: " + concurrent, ""},
		{Ongoing, [2]int64{7, 4}, fenced, ""}, // Kafka would abort the transaction of epoch 5 first
		{Ongoing, [2]int64{8, 5}, fenced, ""},
		{PrepareCommit, [2]int64{-1, -1}, concurrent, ""},
		{PrepareCommit, [2]int64{7, 5}, concurrent, ""},
		{PrepareCommit, [2]int64{8, 5}, concurrent, ""},
		{PrepareAbort, [2]int64{-1, -1}, concurrent, ""},
		{PrepareAbort, [2]int64{7, 4}, concurrent, ""},
		{CompleteCommit, [2]int64{-1, -1}, "Empty 7/6", ""},
		{CompleteCommit, [2]int64{7, 5}, "Empty 7/6", ""},
		{CompleteCommit, [2]int64{7, 4}, fenced, ""}, // after a load; see TestInitAgain
		{CompleteAbort, [2]int64{-1, -1}, "Empty 7/6", ""},
		{CompleteAbort, [2]int64{7, 5}, "Empty 7/6", ""},
		{CompleteAbort, [2]int64{8, 5}, fenced, ""},
	} {
		if c.v2 == "" {
			c.v2 = c.v1
		}
		for _, v2 := range []bool{false, true} {
			r := InitRequest{TimeoutMs: 77, TimeoutMaxMs: 1000, ProducerID: c.expected[0], Epoch: int16(c.expected[1]), V2: v2, Allocate: noIDs}
			s := at(c.state, v2).InitProducerID(r, 300)
			want := c.v1
			if v2 {
				want = c.v2
			}
			if got := outcome(s); got != want {
				t.Errorf("%s, v2 %v, has %v: got %q, want %q", c.state, v2, c.expected, got, want)
			}
			if s.Err == nil && (s.ProducerID != 7 || s.Epoch != 6 || s.Next.timeoutMs != 77 || s.Next.updated != 300 || s.Next.start != -1 || s.Next.partitions != nil) {
				t.Errorf("%s: %+v", c.state, s)
			}
			if s.Err != nil && (s.ProducerID != -1 || s.Epoch != -1) {
				t.Errorf("%s: %+v", c.state, s)
			}
			if c.state == Ongoing && s.Write && (s.End == nil || !reflect.DeepEqual(*s.End, Decision{false, 7, 6, []tp.Partition{p0, p2}, v2}) || s.Next.timeoutMs != 1000) {
				t.Errorf("%s: %+v", c.state, s)
			}
		}
	}
}

// TestInitAgain is about answers that were lost.
func TestInitAgain(t *testing.T) {
	request := func(id int64, epoch int16) InitRequest {
		return InitRequest{TimeoutMs: 1, TimeoutMaxMs: 1, ProducerID: id, Epoch: epoch, Allocate: ids()}
	}
	a := at(Empty, false).InitProducerID(request(7, 5), 1).Next
	if s := a.InitProducerID(request(7, 5), 2); outcome(s) != "Empty 7/6" || s.Epoch != 6 {
		t.Fatal(outcome(s))
	}
	b := a.InitProducerID(request(-1, -1), 2).Next // another instance: the first is fenced, again or not
	for _, epoch := range []int16{5, 6} {
		if s := b.InitProducerID(request(7, epoch), 3); s.Err != ErrProducerFenced {
			t.Fatal(outcome(s))
		}
	}
	// The raise to the last epoch may be repeated, too. (Kafka throws an IllegalStateException.)
	c := at(Empty, false)
	c.epoch = epochMax - 1
	c = c.InitProducerID(request(7, epochMax-1), 1).Next
	if s := c.InitProducerID(request(7, epochMax-1), 2); outcome(s) != "Empty 7/32766" {
		t.Fatal(outcome(s))
	}
	// So may the one to a new producer id.
	d := c.InitProducerID(request(7, epochMax), 2).Next
	if s := d.InitProducerID(request(7, epochMax), 3); outcome(s) != "Empty 1000/0" || s.ProducerID != 1000 || s.Epoch != 0 {
		t.Fatal(outcome(s))
	}
	if s := d.InitProducerID(request(7, epochMax-1), 3); s.Err != ErrProducerFenced {
		t.Fatal(outcome(s))
	}
	if e, _, err := ParseRecord(d.Record().Key, d.Record().Value); err != nil || e.Transaction.InitProducerID(request(7, epochMax), 3).Err != ErrProducerFenced {
		t.Fatal("the last epoch is not in the record", err) // as in Kafka
	}
	if s := d.InitProducerID(request(1000, 0), 3); outcome(s) != "Empty 1000/1" {
		t.Fatal(outcome(s))
	}
	// Once there is a transaction, the answer was not lost.
	f := a.AddPartitions(7, 6, []tp.Partition{p0}, false, 2).Next
	if s := f.InitProducerID(request(7, 5), 3); f.lastEpoch != 5 || outcome(s) != fenced {
		t.Fatal(outcome(s))
	}
	// A producer whose EndTxn v5 was not answered goes on with the epoch that the answer held.
	e := at(Ongoing, true).End(EndRequest{ProducerID: 7, Epoch: 5, Commit: true, V2: true, Allocate: noIDs}, 1).Next.Completed(2).Next
	if s := e.InitProducerID(request(7, 5), 3); outcome(s) != "Empty 7/6" {
		t.Fatal(outcome(s))
	}
}

func TestEpochsRunOut(t *testing.T) {
	init := InitRequest{TimeoutMs: 1, TimeoutMaxMs: 1, ProducerID: -1, Epoch: -1}
	for _, s := range []State{Empty, CompleteCommit, CompleteAbort} {
		for _, epoch := range []int16{epochMax, math.MaxInt16} {
			x := at(s, true)
			x.epoch = epoch
			r := init
			r.Allocate = ids()
			if got := outcome(x.InitProducerID(r, 1)); got != "Empty 1000/0" {
				t.Errorf("%s: %s", s, got)
			}
			r.Allocate = noIDs
			if got := x.InitProducerID(r, 1); got.Write || !errors.Is(got.Err, errNoIDs) {
				t.Errorf("%s: %s", s, outcome(got))
			}
			r.Allocate = func() (int64, error) { return 7, nil }
			if got := x.InitProducerID(r, 1); got.Write || got.Err == nil {
				t.Errorf("%s: the same producer id again: %s", s, outcome(got))
			}
		}
	}
	// Version 1: fencing takes the epoch that is kept for it; the next init takes a new producer id.
	x := at(Ongoing, false)
	x.epoch = epochMax
	s := x.Expire(false, noIDs, 5000)
	if outcome(s) != "PrepareAbort 7/32767" || s.End.Epoch != math.MaxInt16 {
		t.Fatal(outcome(s))
	}
	if s = s.Next.Completed(5001); outcome(s) != "CompleteAbort 7/32767" {
		t.Fatal(outcome(s))
	}
	// Version 2: the markers take that epoch, and the completed state is that of a new producer id.
	x = at(Ongoing, true)
	x.epoch = epochMax
	r := EndRequest{ProducerID: 7, Epoch: epochMax, Commit: true, V2: true, Allocate: ids()}
	s = x.End(r, 1)
	if outcome(s) != "PrepareCommit 7/32767 then 1000" || s.ProducerID != 1000 || s.Epoch != 0 || s.End.ProducerID != 7 || s.End.Epoch != math.MaxInt16 {
		t.Fatalf("%+v", s)
	}
	if got := s.Next.AddPartitions(1000, 0, []tp.Partition{p0}, true, 2); got.Err != ErrConcurrent {
		t.Fatal(outcome(got)) // the answer to EndTxn is out already
	}
	if s = s.Next.Completed(2); outcome(s) != "CompleteCommit 1000/0" {
		t.Fatal(outcome(s))
	}
	again := s.Next.End(r, 3)
	if outcome(again) != "ok" || again.ProducerID != 1000 || again.Epoch != 0 {
		t.Fatalf("%+v", again)
	}
	r.Commit = false
	if got := s.Next.End(r, 3); got.Err != ErrInvalidState {
		t.Fatal(outcome(got))
	}
	if got := s.Next.AddPartitions(1000, 0, []tp.Partition{p0}, true, 3).Next.End(r, 4); got.Err != ErrInvalidMapping {
		t.Fatal(outcome(got)) // it comes from before the next transaction
	}
	// So does an abort by the coordinator.
	s = x.Expire(true, ids(), 5000)
	if outcome(s) != "PrepareAbort 7/32767 then 1000" || s.ProducerID != -1 || s.Epoch != -1 {
		t.Fatalf("%+v", s)
	}
	for _, s := range []Step{x.Expire(true, noIDs, 5000), x.End(EndRequest{ProducerID: 7, Epoch: epochMax, V2: true, Allocate: noIDs}, 1), x.InitProducerID(InitRequest{TimeoutMs: 1, TimeoutMaxMs: 1, ProducerID: -1, Epoch: -1, V2: true, Allocate: noIDs}, 1)} {
		if s.Write || !errors.Is(s.Err, errNoIDs) {
			t.Fatalf("%+v", s)
		}
	}
	// A record that no coordinator should have written must not make the epoch wrap.
	for _, v2 := range []bool{false, true} {
		x.epoch = math.MaxInt16
		if s = x.Expire(v2, ids(), 5000); s.Next.epoch != math.MaxInt16 {
			t.Fatal(outcome(s))
		}
	}
}

func TestAddPartitionsInEveryState(t *testing.T) {
	for _, s := range states {
		for _, c := range []struct {
			producerID int64
			epoch      int16
			add        []tp.Partition
			want       string
		}{
			{7, 5, []tp.Partition{p1, p0}, "Ongoing 7/5"},
			{8, 5, []tp.Partition{p1}, mapping},
			{7, 4, []tp.Partition{p1}, fenced},
			{7, 6, []tp.Partition{p1}, fenced},
		} {
			if s.prepared() {
				c.want = concurrent
			}
			x := at(s, false)
			step := x.AddPartitions(c.producerID, c.epoch, c.add, true, 300)
			if got := outcome(step); got != c.want {
				t.Errorf("%s: %d/%d: got %q, want %q", s, c.producerID, c.epoch, got, c.want)
				continue
			}
			if step.Err != nil {
				continue
			}
			want, start := []tp.Partition{p0, p1}, int64(300)
			if s == Ongoing {
				want, start = []tp.Partition{p0, p1, p2}, 100
			}
			if n := step.Next; !slices.Equal(n.partitions, want) || n.start != start || n.updated != 300 || n.version != version2 || n.timeoutMs != 1000 {
				t.Errorf("%s: %+v", s, n)
			}
			if !reflect.DeepEqual(x, at(s, false)) {
				t.Errorf("%s: the value has changed", s)
			}
		}
	}
	if s := at(Ongoing, false).AddPartitions(7, 5, []tp.Partition{p2, p0, p2}, false, 300); outcome(s) != "ok" || s.Next.updated != 200 {
		t.Fatal(outcome(s))
	}
}

func TestVerifyInEveryState(t *testing.T) {
	for _, s := range states {
		in, out := error(nil), error(ErrAbortable)
		if s.prepared() {
			in, out = ErrConcurrent, ErrConcurrent
		} else if s != Ongoing {
			in = ErrAbortable
		}
		if got := at(s, true).Verify(7, 5, []tp.Partition{p2, p1, p0}); !slices.Equal(got, []error{in, out, in}) {
			t.Errorf("%s: %v", s, got)
		}
		if got := at(s, true).Verify(7, 4, []tp.Partition{p0}); got[0] != ErrProducerFenced {
			t.Errorf("%s: %v", s, got)
		}
		if got := at(s, true).Verify(6, 5, []tp.Partition{p0}); got[0] != ErrInvalidMapping {
			t.Errorf("%s: %v", s, got)
		}
	}
}

func TestEndInEveryState(t *testing.T) {
	for _, c := range []struct {
		state State
		epoch int16
		v1    [2]string // abort, commit
		v2    [2]string
	}{
		{Empty, 5, [2]string{invalid, invalid}, [2]string{"PrepareAbort 7/6", invalid}},
		{Empty, 4, [2]string{fenced, fenced}, [2]string{fenced, fenced}},
		{Empty, 6, [2]string{fenced, fenced}, [2]string{fenced, fenced}},
		{Ongoing, 5, [2]string{"PrepareAbort 7/5", "PrepareCommit 7/5"}, [2]string{"PrepareAbort 7/6", "PrepareCommit 7/6"}},
		{Ongoing, 4, [2]string{fenced, fenced}, [2]string{fenced, fenced}},
		{Ongoing, 6, [2]string{fenced, fenced}, [2]string{fenced, fenced}},
		{PrepareCommit, 5, [2]string{concurrent, concurrent}, [2]string{concurrent, concurrent}},
		{PrepareCommit, 4, [2]string{fenced, fenced}, [2]string{concurrent, concurrent}},
		{PrepareAbort, 5, [2]string{concurrent, concurrent}, [2]string{concurrent, concurrent}},
		{PrepareAbort, 4, [2]string{fenced, fenced}, [2]string{concurrent, concurrent}},
		{CompleteCommit, 5, [2]string{invalid, "ok"}, [2]string{"PrepareAbort 7/6", invalid}},
		{CompleteCommit, 4, [2]string{fenced, fenced}, [2]string{invalid, "ok"}},
		{CompleteCommit, 3, [2]string{fenced, fenced}, [2]string{fenced, fenced}},
		{CompleteCommit, 6, [2]string{fenced, fenced}, [2]string{fenced, fenced}},
		{CompleteAbort, 5, [2]string{"ok", invalid}, [2]string{"PrepareAbort 7/6", invalid}},
		{CompleteAbort, 4, [2]string{fenced, fenced}, [2]string{"ok", fenced}},
		{CompleteAbort, 3, [2]string{fenced, fenced}, [2]string{fenced, fenced}},
		{CompleteAbort, 6, [2]string{fenced, fenced}, [2]string{fenced, fenced}},
	} {
		for _, v2 := range []bool{false, true} {
			for i, commit := range []bool{false, true} {
				want := c.v1[i]
				if v2 {
					want = c.v2[i]
				}
				x := at(c.state, v2)
				s := x.End(EndRequest{ProducerID: 7, Epoch: c.epoch, Commit: commit, V2: v2, Allocate: noIDs}, 300)
				if got := outcome(s); got != want {
					t.Errorf("%s, epoch %d, v2 %v, commit %v: got %q, want %q", c.state, c.epoch, v2, commit, got, want)
					continue
				}
				id, epoch := NoProducerID, NoEpoch
				if v2 && s.Err == nil {
					id, epoch = 7, s.Next.epoch
				}
				if s.ProducerID != id || s.Epoch != epoch {
					t.Errorf("%s, epoch %d, v2 %v, commit %v: answers %d/%d", c.state, c.epoch, v2, commit, s.ProducerID, s.Epoch)
				}
				if !s.Write {
					continue
				}
				if !reflect.DeepEqual(s.End, &Decision{commit, 7, s.Next.epoch, x.partitions, v2}) || !reflect.DeepEqual(s.End, s.Next.Pending()) {
					t.Errorf("%s: %+v", c.state, s)
				}
				if start := s.Next.start; c.state == Ongoing && start != 100 || c.state != Ongoing && start != 300 {
					t.Errorf("%s: starts at %d", c.state, start)
				}
			}
			other := at(c.state, v2).End(EndRequest{ProducerID: 8, Epoch: c.epoch, V2: v2, Allocate: noIDs}, 300)
			if want := map[bool]string{true: concurrent, false: mapping}[v2 && c.state.prepared()]; outcome(other) != want {
				t.Errorf("%s, other producer: %s", c.state, outcome(other))
			}
		}
	}
	// The epoch before a transaction of version 1 is not that of a repeated request but of a producer that was fenced.
	for _, commit := range []bool{false, true} {
		for _, s := range []State{CompleteCommit, CompleteAbort} {
			if got := at(s, false).End(EndRequest{ProducerID: 7, Epoch: 4, Commit: commit, V2: true, Allocate: noIDs}, 1); got.Err != ErrProducerFenced {
				t.Errorf("%s: %s", s, outcome(got))
			}
		}
	}
}

func TestCompletedInEveryState(t *testing.T) {
	for s, want := range map[State]string{Empty: invalid, Ongoing: invalid, PrepareCommit: "CompleteCommit 7/5", PrepareAbort: "CompleteAbort 7/5", CompleteCommit: invalid, CompleteAbort: invalid} {
		step := at(s, true).Completed(300)
		if got := outcome(step); got != want {
			t.Errorf("%s: %s", s, got)
		}
		if step.Write && (step.Next.partitions != nil || step.Next.start != 100 || step.Next.updated != 300 || step.Next.timeoutMs != 1000 || step.Next.Pending() != nil) {
			t.Errorf("%s: %+v", s, step.Next)
		}
		if (at(s, true).Pending() != nil) != s.prepared() {
			t.Errorf("%s: %+v", s, at(s, true).Pending())
		}
	}
}

func TestExpireInEveryState(t *testing.T) {
	for _, v2 := range []bool{false, true} {
		for _, s := range states {
			x := at(s, v2)
			if want := map[bool]int64{true: 1101}[s == Ongoing]; x.NextDeadline() != want {
				t.Errorf("%s: due at %d", s, x.NextDeadline())
			}
			if got := outcome(x.Expire(v2, noIDs, 1100)); got != "ok" {
				t.Errorf("%s: %s", s, got)
			}
			want := "ok"
			if s == Ongoing {
				want = "PrepareAbort 7/6"
			}
			step := x.Expire(v2, noIDs, 1101)
			if got := outcome(step); got != want {
				t.Errorf("%s: %s", s, got)
			}
			if s == Ongoing && !reflect.DeepEqual(step.End, &Decision{false, 7, 6, []tp.Partition{p0, p2}, v2}) {
				t.Errorf("%+v", step.End)
			}
		}
	}
	x := at(Ongoing, true)
	x.timeoutMs = math.MaxInt32
	if x.NextDeadline() != 0 || x.Expire(true, noIDs, math.MaxInt64).Write {
		t.Error("a transaction without timeout ends")
	}
}

// TestLateCommit is a commit that arrives after the coordinator's own abort: never ErrInvalidState, which clients take for fatal.
func TestLateCommit(t *testing.T) {
	for _, v2 := range []bool{false, true} {
		r := EndRequest{ProducerID: 7, Epoch: 5, Commit: true, V2: v2, Allocate: noIDs}
		prepared := at(Ongoing, v2).Expire(v2, noIDs, 5000).Next
		if s := prepared.End(r, 5001); s.Err != ErrProducerFenced && (!v2 || s.Err != ErrConcurrent) {
			t.Errorf("v2 %v: %s", v2, outcome(s))
		}
		complete := prepared.Completed(5002).Next
		if s := complete.End(r, 5003); s.Err != ErrProducerFenced {
			t.Errorf("v2 %v: %s", v2, outcome(s))
		}
		r.Commit = false
		if s := complete.End(r, 5003); v2 != (s.Err == nil) || v2 && s.Epoch != 6 || !v2 && s.Err != ErrProducerFenced {
			t.Errorf("v2 %v: abort: %s", v2, outcome(s))
		}
		if s := complete.InitProducerID(InitRequest{TimeoutMs: 1, TimeoutMaxMs: 1, ProducerID: -1, Epoch: -1, V2: v2, Allocate: noIDs}, 5004); outcome(s) != "Empty 7/7" {
			t.Errorf("v2 %v: %s", v2, outcome(s))
		}
	}
}

// TestCommitByAnotherProcess is what Flink does: a process that knows only id and epoch ends the transaction (C64).
func TestCommitByAnotherProcess(t *testing.T) {
	for _, v2 := range []bool{false, true} {
		r := EndRequest{ProducerID: 7, Epoch: 5, Commit: true, V2: v2, Allocate: noIDs}
		x := at(Ongoing, v2).End(r, 1).Next.Completed(2).Next
		again := x.End(r, 3)
		if outcome(again) != "ok" || v2 && again.Epoch != 6 {
			t.Errorf("v2 %v: %s", v2, outcome(again))
		}
		r.Commit = false
		if s := x.End(r, 3); s.Err != ErrInvalidState {
			t.Errorf("v2 %v: %s", v2, outcome(s))
		}
		x = x.InitProducerID(InitRequest{TimeoutMs: 1, TimeoutMaxMs: 1, ProducerID: -1, Epoch: -1, V2: v2, Allocate: noIDs}, 4).Next
		r.Commit = true
		if s := x.End(r, 5); s.Err != ErrProducerFenced {
			t.Errorf("v2 %v: %s", v2, outcome(s))
		}
	}
}

// TestEmptyAbortRightAfterACommit is KAFKA-18464: the producer is at its next epoch while the markers of the last are written.
func TestEmptyAbortRightAfterACommit(t *testing.T) {
	s := at(Ongoing, true).End(EndRequest{ProducerID: 7, Epoch: 5, Commit: true, V2: true, Allocate: noIDs}, 1)
	r := EndRequest{ProducerID: s.ProducerID, Epoch: s.Epoch, V2: true, Allocate: noIDs}
	if got := s.Next.End(r, 2); got.Err != ErrConcurrent {
		t.Fatal(outcome(got))
	}
	got := s.Next.Completed(3).Next.End(r, 4)
	if outcome(got) != "PrepareAbort 7/7" || got.End == nil || len(got.End.Partitions) != 0 {
		t.Fatal(outcome(got))
	}
}

func TestExpiredInEveryState(t *testing.T) {
	for _, s := range states {
		x := at(s, true)
		idle := s == Empty || s == CompleteCommit || s == CompleteAbort
		if x.Expired(1000, 1199) || x.Expired(1000, 1200) != idle {
			t.Errorf("%s", s)
		}
	}
}

func TestDescribe(t *testing.T) {
	for s, name := range map[State]string{Empty: "Empty", Ongoing: "Ongoing", PrepareCommit: "PrepareCommit", PrepareAbort: "PrepareAbort", CompleteCommit: "CompleteCommit", CompleteAbort: "CompleteAbort"} {
		x := at(s, true)
		d, err := x.Describe()
		if err != nil || !reflect.DeepEqual(d, Description{"x", name, 1000, x.start, 7, 5, x.partitions}) {
			t.Errorf("%+v: %v", d, err)
		}
		if x.ID() != "x" || x.State() != s {
			t.Errorf("%+v", x)
		}
	}
}

// TestValuesDoNotShare changes what was handed out.
func TestValuesDoNotShare(t *testing.T) {
	x := at(PrepareCommit, true)
	x.Pending().Partitions[0].Topic = "changed"
	d, _ := x.Describe()
	d.Partitions[0].Topic = "changed"
	given := []tp.Partition{p1}
	y := at(Ongoing, true)
	a := y.AddPartitions(7, 5, given, true, 1).Next
	b := y.AddPartitions(7, 5, []tp.Partition{{Topic: "z", Index: 9}}, true, 1).Next
	given[0].Topic = "changed"
	if !slices.Equal(x.partitions, []tp.Partition{p0, p2}) || !slices.Equal(a.partitions, []tp.Partition{p0, p1, p2}) || len(b.partitions) != 3 || b.partitions[1] != p2 {
		t.Fatal(x.partitions, a.partitions, b.partitions)
	}
}
