// Package listappend judges histories of transactions that append unique values to lists, as Jepsen's list-append workload makes them. A list
// is a partition, its order that of the offsets. The package is pure and for tests.
//
// Kafka's transactions lock nothing: of two that run at the same time each may come first on another partition, which Adya calls G0 and Kafka
// allows. What it promises is checked: real time between transactions (whoever began after another's commit comes behind it everywhere),
// atomicity, and that read_committed shows no aborted, undecided, lost or repeated values (KIP-98, "Transactional guarantees").
package listappend

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Outcome is what a transaction's client knows of its end.
type Outcome int8

const (
	Committed Outcome = iota
	Aborted           // nobody ever asked to commit it
	Unknown           // it asked and got no answer: either, but the same everywhere
)

// Append puts a value, which is unique in the history, at the end of a list.
type Append struct {
	List  int32
	Value string
}

// Txn is a transaction. Begin and End are times of one clock; End is when its outcome was known.
type Txn struct {
	Name       string
	Begin, End int64
	Appends    []Append
	Outcome    Outcome
}

// Read is all that a read_committed reader found in a list from its start to the last stable offset of one moment.
type Read struct {
	List   int32
	Values []string
}

// The anomalies, by the names that reports bear.
const (
	Phantom      = "a value that nobody wrote"
	Duplicate    = "a value twice in a list"
	G1a          = "G1a: an aborted value was read"
	G1b          = "G1b: a transaction was read in part"
	Reordered    = "two reads of a list are no prefixes of each other"
	LostWrite    = "a committed value is lost"
	NotAtomic    = "a transaction came through on some lists alone"
	G0InRealTime = "G0: a transaction that began after another's commit comes before it"
)

// Anomaly is an observation that must not be.
type Anomaly struct{ Kind, Text string }

func (a Anomaly) String() string { return a.Kind + ": " + a.Text }

// Check returns the anomalies of a history. last holds all that each list has once every transaction is decided; reads came before.
func Check(txns []Txn, reads []Read, last []Read) []Anomaly {
	c := checker{by: map[string]*Txn{}, final: map[int32][]string{}}
	for i := range txns {
		for _, a := range txns[i].Appends {
			c.by[a.Value] = &txns[i]
		}
	}
	for _, r := range last {
		c.final[r.List] = r.Values
	}
	for _, r := range append(slices.Clone(reads), last...) {
		c.read(r)
	}
	c.outcomes(txns)
	for list, values := range c.final {
		c.realTime(list, values)
	}
	slices.SortFunc(c.found, func(a, b Anomaly) int { return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Text, b.Text)) })
	return c.found
}

type checker struct {
	by    map[string]*Txn // by value
	final map[int32][]string
	found []Anomaly
}

func (c *checker) fail(kind, format string, args ...any) {
	c.found = append(c.found, Anomaly{kind, fmt.Sprintf(format, args...)})
}

// read looks at one read alone, and holds it against the list's end.
func (c *checker) read(r Read) {
	seen := map[string]bool{}
	for i, v := range r.Values {
		t := c.by[v]
		switch {
		case t == nil:
			c.fail(Phantom, "%s in list %d", v, r.List)
		case seen[v]:
			c.fail(Duplicate, "%s in list %d", v, r.List)
		case t.Outcome == Aborted:
			c.fail(G1a, "%s of %s in list %d", v, t.Name, r.List)
		}
		seen[v] = true
		if end := c.final[r.List]; i >= len(end) || end[i] != v {
			c.fail(Reordered, "list %d had %s as number %d, and not at last", r.List, v, i)
			return
		}
	}
	told := map[*Txn]bool{}
	for _, v := range r.Values {
		t := c.by[v]
		if t == nil || told[t] {
			continue
		}
		told[t] = true
		for _, a := range t.Appends {
			if a.List == r.List && !seen[a.Value] {
				c.fail(G1b, "list %d had %s of %s without %s", r.List, v, t.Name, a.Value)
			}
		}
	}
}

// outcomes compares what the lists hold at last with what was told.
func (c *checker) outcomes(txns []Txn) {
	there := map[string]bool{}
	for _, values := range c.final {
		for _, v := range values {
			there[v] = true
		}
	}
	for _, t := range txns {
		n := 0
		for _, a := range t.Appends {
			if there[a.Value] {
				n++
			} else if t.Outcome == Committed {
				c.fail(LostWrite, "%s of %s in list %d", a.Value, t.Name, a.List)
			}
		}
		if t.Outcome == Unknown && n > 0 && n < len(t.Appends) {
			c.fail(NotAtomic, "%d of %d values of %s", n, len(t.Appends), t.Name)
		}
	}
}

// realTime compares a list's order with that of transactions that did not overlap.
func (c *checker) realTime(list int32, values []string) {
	latest := &Txn{Begin: math.MinInt64}
	for _, v := range values {
		t := c.by[v]
		if t == nil {
			continue
		}
		if t.Outcome == Committed && latest.Begin > t.End {
			c.fail(G0InRealTime, "%s is behind %s in list %d, and had ended before that began", t.Name, latest.Name, list)
		}
		if t.Begin > latest.Begin {
			latest = t
		}
	}
}
