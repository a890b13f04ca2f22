package txn

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/varve-io/varve/internal/tp"
)

// errUnwritten is what a client hears when its step was not written, or not for certain.
var errUnwritten = errors.New("not written")

// record is one data record of a client, and what became of it.
type record struct {
	client *client
	epoch  int16
	marker *Decision
	told   string // what its client was told: "", "commit", "abort"
}

// client is one instance of the application. It does what a producer does, with the answers that reach it.
type client struct {
	name       string
	v2         bool
	producerID int64
	epoch      int16
	ready      bool // has an id and epoch
	fenced     bool // another instance was initialised since
	open       []*record
	// sent are requests that were answered with success and come again. In version 2 they name their transaction, so they may do so
	// at any time; in version 1 until the next one begins.
	sent []EndRequest
	last *EndRequest // that was not answered with success
}

// log is a partition: which epoch each producer id has reached, and what it wrote since its last marker.
type log struct {
	epoch map[int64]int16
	open  map[int64][]*record
}

// world is a coordinator over a log that may fail, two clients and some partitions.
type world struct {
	t       *testing.T
	seed    uint64
	r       *rand.Rand
	v2      bool // cluster
	now     int64
	nextID  int64
	cur     Transaction
	durable *Record // last record of __transaction_state, nil before the first
	loaded  Transaction
	calm    bool // nothing fails any more
	clients []*client
	logs    map[tp.Partition]*log
	given   map[[2]int64]*client // id and epoch → to whom
	decided map[[2]int64]bool    // markers by producer id and epoch → commit
	ended   int
	trace   []string
}

func (w *world) note(format string, args ...any) {
	w.trace = append(w.trace, fmt.Sprintf(format, args...))
}

func (w *world) fatal(format string, args ...any) {
	w.t.Helper()
	for _, line := range w.trace[max(0, len(w.trace)-40):] {
		w.t.Log(line)
	}
	w.t.Fatalf("seed %d: %s", w.seed, fmt.Sprintf(format, args...))
}

func (w *world) allocate() (int64, error) {
	if !w.calm && w.r.IntN(8) == 0 {
		return 0, errNoIDs
	}
	w.nextID++
	return w.nextID, nil
}

// load is what a coordinator begins with after a crash.
func (w *world) load() {
	w.cur = w.loaded
	if w.durable == nil {
		return
	}
	e, ok, err := ParseRecord(w.durable.Key, w.durable.Value)
	if err != nil || !ok || e.Transaction == nil {
		w.fatal("load: %+v, %v, %v", e, ok, err)
	}
	w.cur = *e.Transaction
}

// take carries out a step and returns what the client hears.
func (w *world) take(what string, s Step) error {
	w.note("%s: %s", what, outcome(s))
	if !s.Write {
		if !reflect.DeepEqual(s.Next, w.cur) || s.End != nil {
			w.fatal("%s changes without a write: %+v", what, s)
		}
		return s.Err
	}
	if s.Next.producerID == w.cur.producerID && s.Next.epoch < w.cur.epoch {
		w.fatal("%s: the epoch falls from %d to %d", what, w.cur.epoch, s.Next.epoch)
	}
	if s.Next.producerID != w.cur.producerID && s.Next.epoch != 0 {
		w.fatal("%s: a new producer id begins at epoch %d", what, s.Next.epoch)
	}
	if was, is := w.cur.Pending(), s.Next.Pending(); was != nil && (is != nil || s.Next.state != map[bool]State{true: CompleteCommit, false: CompleteAbort}[was.Commit]) {
		w.fatal("%s: a decided outcome changes: %s after %s", what, s.Next.state, w.cur.state)
	}
	fate := 9
	if !w.calm {
		fate = w.r.IntN(10)
	}
	r := s.Next.Record()
	switch fate {
	case 0: // nothing was written
		w.note("  is not written")
		return errUnwritten
	case 1: // it was, but who asked does not learn it, and the coordinator loads anew
		w.note("  is written, with an error")
		w.durable = &r
		w.load()
		return errUnwritten
	}
	w.durable = &r
	if !reflect.DeepEqual(s.End, s.Next.Pending()) {
		w.fatal("%s: decision %+v, from the record %+v", what, s.End, s.Next.Pending())
	}
	kept := s.Next
	w.load()
	forgotten := kept
	forgotten.lastEpoch = NoEpoch
	if !reflect.DeepEqual(forgotten, w.cur) {
		w.fatal("%s: %+v comes back from its record as %+v", what, kept, w.cur)
	}
	w.cur = kept
	return s.Err
}

// crash is the fate of the coordinator between two steps, now and then.
func (w *world) crash() {
	if !w.calm && w.r.IntN(6) == 0 {
		w.note("crash")
		w.load()
	}
}

// owns is called with each success: only the instance that came last may have one.
func (w *world) owns(c *client, what string) {
	if c.fenced {
		w.fatal("%s succeeds for %s, which was fenced", what, c.name)
	}
}

func (w *world) init(c *client, again bool) {
	r := InitRequest{TimeoutMs: 100, TimeoutMaxMs: 1000, ProducerID: NoProducerID, Epoch: NoEpoch, V2: w.v2, Allocate: w.allocate}
	if again {
		r.ProducerID, r.Epoch = c.producerID, c.epoch
	}
	s := w.cur.InitProducerID(r, w.now)
	if s.Write && again && c.fenced {
		w.fatal("InitProducerId of %s is written, which was fenced", c.name)
	}
	err := w.take(fmt.Sprintf("%s InitProducerId (%d/%d)", c.name, r.ProducerID, r.Epoch), s)
	if s.Err == nil && !again && w.durable != nil && w.cur.state == Empty && w.cur.producerID == s.ProducerID && w.cur.epoch == s.Epoch {
		// It counts from when it is durable, whether the client learns it or not.
		for _, o := range w.clients {
			o.fenced = o != c || err != nil
		}
	}
	if err != nil {
		return
	}
	w.owns(c, "InitProducerId")
	key := [2]int64{s.ProducerID, int64(s.Epoch)}
	if o := w.given[key]; o != nil && (o != c || !again) {
		w.fatal("%v is given to %s and then to %s", key, o.name, c.name)
	}
	w.given[key] = c
	c.producerID, c.epoch, c.ready, c.open, c.last = s.ProducerID, s.Epoch, true, nil, nil
}

// write adds a partition and writes a record to it.
func (w *world) write(c *client) {
	p := tp.Partition{Topic: string(rune('a' + w.r.IntN(2))), Index: w.r.Int32N(2)}
	if !c.v2 {
		c.sent = nil
	}
	what := fmt.Sprintf("%s AddPartitions %s (%d/%d)", c.name, p, c.producerID, c.epoch)
	s := w.cur.AddPartitions(c.producerID, c.epoch, []tp.Partition{p}, c.v2, w.now)
	if s.Write && (w.cur.producerID != c.producerID || w.cur.epoch != c.epoch) {
		w.fatal("%s of another epoch is written", what)
	}
	if w.take(what, s) != nil {
		return
	}
	w.owns(c, "AddPartitions")
	w.crash()
	if err := w.cur.Verify(c.producerID, c.epoch, []tp.Partition{p})[0]; err != nil {
		w.fatal("%s: and then Verify says %v", what, err)
	}
	l := w.logs[p]
	if c.epoch < l.epoch[c.producerID] {
		w.fatal("%s: partition is at epoch %d", what, l.epoch[c.producerID])
	}
	l.epoch[c.producerID] = c.epoch
	r := &record{client: c, epoch: c.epoch}
	l.open[c.producerID] = append(l.open[c.producerID], r)
	c.open = append(c.open, r)
}

func (w *world) end(c *client, r EndRequest, late bool) {
	what := fmt.Sprintf("%s EndTxn (%d/%d, commit %v, v2 %v, late %v)", c.name, r.ProducerID, r.Epoch, r.Commit, r.V2, late)
	s := w.cur.End(r, w.now)
	if s.Write && (w.cur.producerID != r.ProducerID || w.cur.epoch != r.Epoch || c.fenced || late) {
		w.fatal("%s of another transaction is written", what)
	}
	if err := w.take(what, s); err != nil {
		if !late {
			c.last = &r
			if err != errUnwritten && err != ErrConcurrent && !errors.Is(err, errNoIDs) {
				c.last, c.ready = nil, false // fatal: it has to begin anew
			}
		}
		return
	}
	w.owns(c, "EndTxn")
	if late {
		return
	}
	for _, o := range c.open {
		o.told = map[bool]string{true: "commit", false: "abort"}[r.Commit]
		w.agree(o)
	}
	c.open, c.last = nil, nil
	c.sent = append(c.sent, r)
	if r.V2 {
		key := [2]int64{s.ProducerID, int64(s.Epoch)}
		if o := w.given[key]; o != nil && o != c {
			w.fatal("%s: %v is given to %s and then to %s", what, key, o.name, c.name)
		}
		w.given[key] = c
		c.producerID, c.epoch = s.ProducerID, s.Epoch
	}
}

// agree compares what a client was told of a record with the marker that ended it.
func (w *world) agree(r *record) {
	if r.marker != nil && r.told != "" && (r.told == "commit") != r.marker.Commit {
		w.fatal("%s was told %s of a record of epoch %d, the marker is %+v", r.client.name, r.told, r.epoch, *r.marker)
	}
}

// markers sends the markers of a decision, maybe not all of them, and completes it if all were written.
func (w *world) markers() {
	d := w.cur.Pending()
	if d == nil {
		return
	}
	key := [2]int64{d.ProducerID, int64(d.Epoch)}
	if d.V2 { // the epoch is this transaction's alone
		if commit, ok := w.decided[key]; ok && commit != d.Commit {
			w.fatal("%v was decided the other way", key)
		}
		w.decided[key] = d.Commit
	}
	for _, p := range d.Partitions {
		if !w.calm && w.r.IntN(8) == 0 {
			w.note("markers are cut off")
			return
		}
		l := w.logs[p]
		if d.Epoch < l.epoch[d.ProducerID] {
			w.fatal("marker of epoch %d on %s, which is at %d", d.Epoch, p, l.epoch[d.ProducerID])
		}
		l.epoch[d.ProducerID] = d.Epoch
		for _, r := range l.open[d.ProducerID] {
			if d.V2 && d.Epoch <= r.epoch {
				w.fatal("marker of epoch %d for records of epoch %d in version 2", d.Epoch, r.epoch)
			}
			r.marker = d
			w.agree(r)
		}
		delete(l.open, d.ProducerID)
		w.crash()
		if again := w.cur.Pending(); !reflect.DeepEqual(again, d) {
			w.fatal("the decision was %+v and is %+v", d, again)
		}
	}
	if w.take("Completed", w.cur.Completed(w.now)) == nil {
		w.ended++
	}
	if w.cur.state.complete() {
		for p, l := range w.logs {
			for id, open := range l.open {
				if len(open) > 0 {
					w.fatal("%s: producer %d has records without an end after %s", p, id, w.cur.state)
				}
			}
		}
	}
}

func (w *world) step() {
	w.crash()
	c := w.clients[w.r.IntN(2)]
	switch w.r.IntN(12) {
	case 0:
		w.init(c, false)
	case 1:
		if c.ready {
			w.init(c, true)
		}
	case 2, 3, 4, 5:
		if c.ready && c.last == nil {
			w.write(c)
		}
	case 6, 7:
		if !c.ready {
			w.init(c, false)
			return
		}
		r := EndRequest{ProducerID: c.producerID, Epoch: c.epoch, Commit: w.r.IntN(3) > 0, V2: c.v2, Allocate: w.allocate}
		if c.last != nil {
			r = *c.last // a client asks again for the same
		}
		if len(c.open) > 0 || r.V2 && (!r.Commit || w.r.IntN(3) == 0) {
			w.end(c, r, false)
		}
	case 8:
		if len(c.sent) == 0 {
			return
		}
		r := c.sent[w.r.IntN(len(c.sent))]
		if w.r.IntN(3) == 0 { // or the contrary of what was done
			r.Commit = !r.Commit
			if s := w.cur.End(r, w.now); s.Err == nil {
				w.fatal("%s did the contrary of EndTxn %+v: %s", c.name, r, outcome(s))
			}
			return
		}
		w.end(c, r, true)
	case 9, 10:
		w.markers()
	case 11:
		w.now += w.r.Int64N(60)
		_ = w.take("Expire", w.cur.Expire(w.v2, w.allocate, w.now))
	}
}

// TestRandomHistories drives two instances of an application against a coordinator that crashes between any two steps and
// loses writes, with answers that get lost and requests that come again. Whatever happens: a decision stands, all records of a
// transaction end alike and as their client was told, no marker is below an epoch that wrote, an instance that was fenced has
// no more success, and in the end everything is completed.
func TestRandomHistories(t *testing.T) {
	ended, rotated := 0, 0
	for seed := uint64(0); seed < 2000; seed++ {
		w := &world{t: t, seed: seed, r: rand.New(rand.NewPCG(seed, 2)), now: 1000, nextID: 1000, given: map[[2]int64]*client{}, decided: map[[2]int64]bool{},
			logs: map[tp.Partition]*log{}}
		w.v2 = w.r.IntN(2) == 0
		w.loaded = New("x")
		if w.r.IntN(2) == 0 { // not far from the end of the epochs
			w.loaded = at(Empty, w.v2)
			w.loaded.epoch = epochMax - int16(w.r.IntN(6))
		}
		w.load()
		for _, name := range []string{"A", "B"} {
			w.clients = append(w.clients, &client{name: name, v2: w.v2 && w.r.IntN(3) > 0})
		}
		for _, topic := range []string{"a", "b"} {
			for i := range int32(2) {
				w.logs[tp.Partition{Topic: topic, Index: i}] = &log{map[int64]int16{}, map[int64][]*record{}}
			}
		}
		for range 80 {
			w.step()
		}
		w.calm = true
		w.now += 1000
		_ = w.take("Expire", w.cur.Expire(w.v2, w.allocate, w.now))
		w.markers()
		if w.cur.Pending() != nil || w.cur.state == Ongoing {
			w.fatal("%s does not complete", w.cur.state)
		}
		c := w.clients[0]
		w.init(c, false)
		if w.cur.state != Empty || c.fenced {
			w.fatal("a new instance does not get in: %s", w.cur.state)
		}
		w.write(c)
		w.end(c, EndRequest{ProducerID: c.producerID, Epoch: c.epoch, Commit: true, V2: c.v2, Allocate: w.allocate}, false)
		w.markers()
		if w.cur.state != CompleteCommit {
			w.fatal("a commit in peace ends in %s", w.cur.state)
		}
		ended += w.ended
		if w.cur.producerID != w.loaded.producerID {
			rotated++
		}
	}
	if ended < 5000 || rotated < 500 {
		t.Errorf("%d transactions ended, %d times with a new producer id: the test has lost its bite", ended, rotated)
	}
}
