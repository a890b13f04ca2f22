package checker

import (
	"fmt"
	"slices"

	"github.com/varve-io/varve/internal/grouprecord"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tp"
)

// transactions are what the histories of all partitions tell of transactions, which bear numbers: each record's value begins with
// "transaction 7", that of a copy with "transaction 7 of t-0@12", and so does the metadata of a committed offset. A transaction is decided on
// a partition by the marker in its history, and nowhere else.
type transactions struct {
	broken   bool // a history was broken by force: nothing is promised any more
	byNumber map[int]*transaction
	open     map[producerOn]*unmarked
	verdicts map[place]bool         // of transactional batches, by partition and base offset: true is committed
	early    map[place]bool         // of batches, whether they were shown before they had a marker in the history
	copies   map[place]int          // by the record that was copied: the committed transaction that did
	offsets  map[tp.Partition]int64 // of inputs, as the last committed transaction left them
}

type producerOn struct {
	p  tp.Partition
	id int64
}

// unmarked is a producer's transaction on a partition as long as it has no marker there.
type unmarked struct {
	batches []int64
	numbers []int
	records []written
}

// written is a record of a transaction: a copy of what it is of, or an offset of its input.
type written struct {
	number int
	of     place // partition "" for none
	offset bool
}

type place struct {
	p      tp.Partition
	offset int64
}

// transaction is one attempt of a producer.
type transaction struct {
	committed bool // its producer has asked for the commit
	told      bool // and heard that it has ended as it asked
	wrote     map[tp.Partition]int
	seen      map[tp.Partition]int // records
	verdict   map[tp.Partition]bool
}

func newTransactions() transactions {
	return transactions{byNumber: map[int]*transaction{}, open: map[producerOn]*unmarked{}, verdicts: map[place]bool{}, early: map[place]bool{}, copies: map[place]int{}, offsets: map[tp.Partition]int64{}}
}

func (ts *transactions) of(number int) *transaction {
	t := ts.byNumber[number]
	if t == nil {
		t = &transaction{seen: map[tp.Partition]int{}, verdict: map[tp.Partition]bool{}}
		ts.byNumber[number] = t
	}
	return t
}

// Ends is told that a producer asks for the end of a transaction, before it does: with commit of all that it wrote, by partition the number of
// records. It has been told then that all of them are written.
func (c *Checker) Ends(number int, commit bool, wrote map[tp.Partition]int) {
	t := c.txns.of(number)
	t.committed, t.wrote = commit, wrote
}

// Ended is told that the producer got to know that its transaction has ended as it asked.
func (c *Checker) Ended(number int, commit bool) {
	t := c.txns.of(number)
	t.told = true
	for _, p := range sorted(t.verdict) {
		if t.verdict[p] != commit {
			c.failTxn(Outcome, p, "transaction %d has marker commit %v, its producer was told commit %v", number, t.verdict[p], commit)
		}
	}
}

func sorted[V any](m map[tp.Partition]V) []tp.Partition {
	out := make([]tp.Partition, 0, len(m))
	for p := range m {
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b tp.Partition) int {
		if a.Topic != b.Topic {
			if a.Topic < b.Topic {
				return -1
			}
			return 1
		}
		return int(a.Index - b.Index)
	})
	return out
}

// Broken says that the history of a partition was broken by force, so that nothing is promised of transactions any more.
func (c *Checker) Broken() bool { return c.txns.broken }

func (c *Checker) failTxn(check string, p tp.Partition, format string, args ...any) {
	if !c.txns.broken {
		c.Fail(check, p, format, args...)
	}
}

// tookTransactional takes the next batch of a history that belongs to a transaction.
func (c *Checker) tookTransactional(p tp.Partition, b batch, hd *recordbatch.Header) {
	key := producerOn{p, hd.ProducerID}
	if hd.IsControl() {
		m, ok, err := recordbatch.ControlOf(b.raw)
		if err != nil || !ok {
			c.failTxn(Outcome, p, "marker at %d: %v", b.base, err)
			return
		}
		c.marked(p, c.txns.open[key], m.Type == recordbatch.ControlCommit)
		delete(c.txns.open, key)
		return
	}
	u := c.txns.open[key]
	if u == nil {
		u = &unmarked{}
		c.txns.open[key] = u
	}
	u.batches = append(u.batches, b.base)
	it, err := recordbatch.Records(b.raw, 0)
	if err != nil {
		c.failTxn(Reading, p, "batch at %d: %v", b.base, err)
		return
	}
	for it.Next() {
		w, err := parseWritten(p, it.Record())
		if err != nil {
			c.failTxn(Reading, p, "record at %d: %v", it.Record().Offset, err)
			return
		}
		t := c.txns.of(w.number)
		if verdict, ok := t.verdict[p]; ok {
			c.failTxn(Hanging, p, "a record of transaction %d at %d, behind its marker, commit %v", w.number, it.Record().Offset, verdict)
		}
		if !w.offset || !slices.Contains(u.records, w) { // a commit of an offset that is tried again is written again
			t.seen[p]++
		}
		u.records = append(u.records, w)
		if !slices.Contains(u.numbers, w.number) {
			u.numbers = append(u.numbers, w.number)
		}
	}
}

func parseWritten(p tp.Partition, r *recordbatch.Record) (written, error) {
	var w written
	if _, err := fmt.Sscanf(string(r.Value), "transaction %d", &w.number); err == nil {
		var name string
		if _, err := fmt.Sscanf(string(r.Value), "transaction %d of %s", &w.number, &name); err == nil {
			w.of, err = parsePlace(name)
			return w, err
		}
		return w, nil
	}
	e, ok, err := grouprecord.Parse(r.Key, r.Value)
	o, isOffset := e.Value.(*grouprecord.Offset)
	if err != nil || !ok || !isOffset {
		return w, fmt.Errorf("neither of a transaction nor an offset: %v", err)
	}
	w.of, w.offset = place{tp.Partition{Topic: e.Partition.Topic, Index: e.Partition.Partition}, o.Offset}, true
	_, err = fmt.Sscanf(o.Metadata, "transaction %d", &w.number)
	return w, err
}

func parsePlace(s string) (at place, err error) {
	i := len(s) - 1
	for i >= 0 && s[i] != '@' {
		i--
	}
	j := i
	for j >= 0 && s[j] != '-' {
		j--
	}
	if j < 0 {
		return at, fmt.Errorf("copy of %q", s)
	}
	at.p.Topic = s[:j]
	_, err = fmt.Sscanf(s[j:], "-%d@%d", &at.p.Index, &at.offset)
	return at, err
}

// marked takes the marker that decides what a producer wrote to a partition.
func (c *Checker) marked(p tp.Partition, u *unmarked, commit bool) {
	if u == nil {
		return // nothing was written there, or the marker came again
	}
	for _, base := range u.batches {
		c.txns.verdicts[place{p, base}] = commit
		if shown, ok := c.txns.early[place{p, base}]; ok && shown != commit {
			c.failTxn(Isolation, p, "the batch at %d was shown %v before its marker, commit %v", base, shown, commit)
		}
	}
	if len(u.numbers) > 1 {
		c.failTxn(Atomicity, p, "one marker, commit %v, ends transactions %v", commit, u.numbers)
	}
	for _, number := range u.numbers {
		t := c.txns.of(number)
		if commit && !t.committed {
			c.failTxn(Outcome, p, "transaction %d has a marker that commits it, which nobody asked for", number)
		}
		if t.told && commit != t.committed {
			c.failTxn(Outcome, p, "transaction %d has marker commit %v, its producer was told commit %v", number, commit, t.committed)
		}
		for _, other := range sorted(t.verdict) {
			if t.verdict[other] != commit {
				c.failTxn(Atomicity, p, "transaction %d has marker commit %v, on %s commit %v", number, commit, other, t.verdict[other])
			}
		}
		t.verdict[p] = commit
		if commit && t.seen[p] != t.wrote[p] {
			c.failTxn(Atomicity, p, "transaction %d is committed with %d records of %d", number, t.seen[p], t.wrote[p])
		}
	}
	if !commit {
		return
	}
	for _, w := range u.records {
		switch {
		case w.offset:
			if w.of.offset < c.txns.offsets[w.of.p] {
				c.failTxn(Repeated, p, "transaction %d commits offset %d of %s, behind %d", w.number, w.of.offset, w.of.p, c.txns.offsets[w.of.p])
			}
			c.txns.offsets[w.of.p] = w.of.offset
		case w.of.p.Topic != "":
			if first, ok := c.txns.copies[w.of]; ok {
				c.failTxn(Repeated, p, "transaction %d commits a copy of %s@%d, as transaction %d did", w.number, w.of.p, w.of.offset, first)
			}
			c.txns.copies[w.of] = w.number
		}
	}
}

// Committed is told what a read_committed consumer makes of an answer, which was given to Read before.
func (c *Checker) Committed(p tp.Partition, via string, shown []Shown) {
	for _, b := range shown {
		at := place{p, b.Base}
		switch verdict, decided := c.txns.verdicts[at]; {
		case !decided && b.Open:
			c.failTxn(Isolation, p, "%s gives the batch at %d of a transaction that is not decided", via, b.Base)
		case !decided:
			c.txns.early[at] = b.Shown
		case b.Shown != verdict:
			c.failTxn(Isolation, p, "%s: the batch at %d is shown %v, its transaction committed %v", via, b.Base, b.Shown, verdict)
		}
	}
}

// Shown is a transactional batch that a read_committed consumer was given.
type Shown struct {
	Base  int64
	Shown bool // to the application: it is not among those that the answer says are aborted
	// Open says that the replica has no marker of it. One that has started anew may have a marker above its high watermark, and show by that
	// what it decides; it is held against the marker that is committed in the end.
	Open bool
}

// Input is a partition that is copied.
type Input struct {
	Partition tp.Partition
	Offset    int64 // that the group has got to, as its coordinator says
}

// TransactionsSettled looks at the end at all transactions: none is open, those that were committed are so everywhere, and each record of the
// inputs was copied exactly once. Records below the log start of the end may have been deleted before they were.
func (c *Checker) TransactionsSettled(inputs []Input) {
	var open []string
	for k := range c.txns.open {
		open = append(open, fmt.Sprintf("producer %d on %s", k.id, k.p))
	}
	slices.Sort(open)
	if len(open) > 0 {
		c.failTxn(Hanging, tp.Partition{}, "transactions without a marker: %v", open)
	}
	numbers := make([]int, 0, len(c.txns.byNumber))
	for n := range c.txns.byNumber {
		numbers = append(numbers, n)
	}
	slices.Sort(numbers)
	for _, n := range numbers {
		t := c.txns.byNumber[n]
		if !t.told || !t.committed {
			continue
		}
		for _, p := range sorted(t.wrote) {
			if !t.verdict[p] || t.seen[p] != t.wrote[p] {
				c.failTxn(Outcome, p, "transaction %d was committed, but has %d records of %d, committed %v", n, t.seen[p], t.wrote[p], t.verdict[p])
			}
		}
	}
	for _, in := range inputs {
		c.copied(in)
	}
}

func (c *Checker) copied(in Input) {
	h := c.of(in.Partition)
	if at := c.txns.offsets[in.Partition]; in.Offset != at && !(at == 0 && in.Offset < 0) {
		c.failTxn(Repeated, in.Partition, "the group is at %d, its last committed transaction at %d", in.Offset, at)
	}
	beyond := int64(-1)
	for of := range c.txns.copies {
		if of.p == in.Partition && of.offset >= in.Offset {
			beyond = max(beyond, of.offset)
		}
	}
	if beyond >= 0 {
		c.failTxn(Repeated, in.Partition, "the record at %d was copied, but the group is at %d", beyond, in.Offset)
	}
	for _, b := range h.batches {
		hd, err := recordbatch.ParseHeader(b.raw)
		if err != nil || hd.IsControl() || hd.IsTransactional() && !c.txns.verdicts[place{in.Partition, b.base}] {
			continue
		}
		for offset := max(b.base, h.logStart); offset <= b.last; offset++ {
			if _, ok := c.txns.copies[place{in.Partition, offset}]; !ok {
				c.failTxn(Repeated, in.Partition, "the record at %d was not copied, the group is at %d", offset, in.Offset)
				return
			}
		}
	}
}
