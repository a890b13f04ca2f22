package direct_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/recordbatch"
)

// stockRig is a rig whose broker knows nothing of direct reads.
func stockRig(t *testing.T, cfg direct.Config, answer func(n int, q direct.Query, l *direct.Location) (*direct.Location, error), make func(objstore.Bucket) []*fakePartition) (*rig, *fakeLocator) {
	t.Helper()
	l := &fakeLocator{answer: answer}
	cfg.Locator = l
	r := newRig(t, cfg, make)
	r.broker.do(func() { r.broker.feature = false })
	l.b = r.broker
	return r, l
}

// The broker sends only what the tier does not have, is never asked with fields that it does not know, and tells the marks.
func TestLocatorInPlaceOfTheBroker(t *testing.T) {
	for _, version := range []int16{4, 11, 12, 18} {
		r, l := stockRig(t, direct.Config{}, nil, one(40, 10))
		o := patient
		o.version, o.committed, o.epoch = version, true, 5
		if version < 9 {
			o.epoch = -1
		}
		r.drain(o, 0, 0)
		last := int64(len(r.broker.parts[0].batches[39].b))
		if fetches, tagged, bytes := r.broker.counts(); bytes > last || tagged > 0 || fetches > 12 {
			t.Errorf("v%d: %d bytes in %d fetches, %d of them with a flag: %+v", version, bytes, fetches, tagged, r.transport.Snapshot())
		}
		if l.asked > 9 { // four segments, each once more where the question ahead came too late
			t.Errorf("v%d: the Locator was asked %d times", version, l.asked)
		}
	}
}

// A broker that gives locations is asked for them, not the Locator.
func TestLocatorLeavesBrokersWithTheFeature(t *testing.T) {
	r, l := stockRig(t, direct.Config{}, nil, one(20, 10))
	r.broker.do(func() { r.broker.feature = true })
	r.drain(patient, 0, 0)
	if _, tagged, _ := r.broker.counts(); tagged == 0 || l.asked > 0 {
		t.Errorf("%d flags, %d questions", tagged, l.asked)
	}
}

// What the broker says in the client's name is what the client gets: who may not read, or asks the wrong node, gets nothing from
// the bucket.
func TestLocatorErrorsPass(t *testing.T) {
	r, _ := stockRig(t, direct.Config{MarksMaxAge: time.Nanosecond}, nil, one(30, 29))
	o := patient
	o.partMax = 1
	r.broker.do(func() { r.broker.errors[0] = 29 }) // TOPIC_AUTHORIZATION_FAILED
	if p := r.client.fetch(o, []position{{0, 0}}).Topics[0].Partitions[0]; p.ErrorCode != 29 || len(p.RecordBatches) != 0 {
		t.Errorf("before anything was read: %+v", p)
	}
	if s := r.transport.Snapshot(); s.Requests > 0 {
		t.Errorf("the bucket was read: %+v", s)
	}
	r.broker.do(func() { delete(r.broker.errors, 0) })
	at := []int64{0}
	check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{0, 0}}))
	r.broker.do(func() { r.broker.errors[0] = 6 }) // NOT_LEADER_OR_FOLLOWER
	if p := r.client.fetch(o, []position{{0, at[0]}}).Topics[0].Partitions[0]; p.ErrorCode != 6 || len(p.RecordBatches) != 0 {
		t.Errorf("with read-ahead: %+v", p)
	}
	r.broker.do(func() { delete(r.broker.errors, 0) })
	o.epoch = 4
	if p := r.client.fetch(o, []position{{0, at[0]}}).Topics[0].Partitions[0]; p.ErrorCode != 74 || len(p.RecordBatches) != 0 {
		t.Errorf("an old epoch: %+v", p)
	}
	o.epoch = -1
	r.broker.do(func() { r.broker.parts[0].start = at[0] + 3 }) // DeleteRecords
	if p := r.client.fetch(o, []position{{0, at[0]}}).Topics[0].Partitions[0]; p.ErrorCode != 1 || len(p.RecordBatches) != 0 {
		t.Errorf("below the log start: %+v", p)
	}
	if p := r.client.fetch(o, []position{{0, 5000}}).Topics[0].Partitions[0]; p.ErrorCode != 1 {
		t.Errorf("out of range: %+v", p)
	}
}

// A topic that was made anew under its name, in the same leader epoch, ends what is read of the old one.
func TestLocatorOfAnotherLog(t *testing.T) {
	r, _ := stockRig(t, direct.Config{MarksMaxAge: time.Nanosecond}, nil, one(30, 29))
	o := patient
	o.partMax = 1
	at := []int64{0}
	check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{0, 0}}))
	r.broker.do(func() {
		p := r.broker.parts[0]
		p.batches, p.segments, p.local = p.batches[:2], nil, 0
	})
	if p := r.client.fetch(o, []position{{0, 12}}).Topics[0].Partitions[0]; p.ErrorCode != 1 || len(p.RecordBatches) != 0 {
		t.Errorf("%+v", p)
	}
	resp := r.client.fetch(o, []position{{0, at[0]}})
	if h := resp.Topics[0].Partitions[0].HighWatermark; h != 6 {
		t.Errorf("high watermark %d", h)
	}
	if s := r.transport.Snapshot(); s.Streams != 0 {
		t.Errorf("read-ahead of a log that is no more: %+v", s)
	}
}

// Marks are those of the broker and the log's, and the broker reads no records to tell them.
func TestLocatorMarksAreFresh(t *testing.T) {
	r, _ := stockRig(t, direct.Config{MarksMaxAge: time.Nanosecond}, nil, one(30, 29))
	o := patient
	o.partMax = 1
	at := []int64{0}
	for i := range 10 {
		check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{0, at[0]}})) // checks the high watermark
		r.broker.do(func() { r.broker.parts[0].append(r, recordbatch.CodecNone, -1, false, fmt.Sprint("late", i)) })
	}
	if s := r.transport.Snapshot(); s.Locations != 1 {
		t.Errorf("%+v", s)
	}
}

// A client that tells the epoch of its last record wants its log compared with the leader's, which only the leader can.
func TestLocatorIsNotAskedForDivergence(t *testing.T) {
	r, l := stockRig(t, direct.Config{}, nil, one(20, 10))
	req := patient.request([]position{{0, 0}})
	req.Topics[0].Partitions[0].LastFetchedEpoch = 3
	resp := r.client.parse(patient.version, r.client.receive(r.client.send(req)))
	if p := resp.Topics[0].Partitions[0]; p.ErrorCode != 0 || len(p.RecordBatches) == 0 || l.asked > 0 {
		t.Errorf("%+v, %d questions", p, l.asked)
	}
}

// What the broker no longer has is read on while the Locator does not answer, and is never taken for what the log lost just now.
func TestArchivedOffsets(t *testing.T) {
	var silent atomic.Bool
	r, _ := stockRig(t, direct.Config{MarksMaxAge: time.Nanosecond}, func(_ int, _ direct.Query, l *direct.Location) (*direct.Location, error) {
		if silent.Load() || l == nil {
			return nil, direct.ErrThrottled // nil without an error would take back what it said
		}
		l.Archived = true
		return l, nil
	}, one(30, 29))
	r.broker.do(func() { r.broker.parts[0].start = 87 })
	o := patient
	o.partMax = 1
	at := []int64{0}
	for range 5 {
		check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{0, at[0]}}))
		silent.Store(true)
	}
	if at[0] != 15 {
		t.Errorf("at %d", at[0])
	}
	if p := r.client.fetch(o, []position{{0, 2}}).Topics[0].Partitions[0]; p.ErrorCode != 1 {
		t.Errorf("what nobody has: %+v", p)
	}
}

// Whatever a Locator says or does that is wrong, the broker serves.
func TestLocatorsThatFail(t *testing.T) {
	for name, answer := range map[string]func(int, direct.Query, *direct.Location) (*direct.Location, error){
		"nothing": func(int, direct.Query, *direct.Location) (*direct.Location, error) { return nil, nil },
		"an error": func(int, direct.Query, *direct.Location) (*direct.Location, error) {
			return nil, fmt.Errorf("%w: index", direct.ErrDamaged)
		},
		"a store that is away": func(int, direct.Query, *direct.Location) (*direct.Location, error) { return nil, direct.ErrThrottled },
		"a panic":              func(int, direct.Query, *direct.Location) (*direct.Location, error) { panic("no") },
		"another epoch": func(_ int, _ direct.Query, l *direct.Location) (*direct.Location, error) {
			l.LeaderEpoch++
			return l, nil
		},
		"another range": func(_ int, _ direct.Query, l *direct.Location) (*direct.Location, error) {
			l.BaseOffset, l.EndOffset = 900, 1000
			return l, nil
		},
		"no bytes": func(_ int, _ direct.Query, l *direct.Location) (*direct.Location, error) {
			l.EndPosition = l.StartPosition
			return l, nil
		},
		"bytes outside": func(_ int, _ direct.Query, l *direct.Location) (*direct.Location, error) {
			l.EndPosition, l.Size = 1<<40, 1<<40
			return l, nil
		},
		"no object": func(_ int, _ direct.Query, l *direct.Location) (*direct.Location, error) {
			l.ObjectKey = ""
			return l, nil
		},
		"another format": func(_ int, _ direct.Query, l *direct.Location) (*direct.Location, error) {
			l.Format = "Parquet"
			return l, nil
		},
		"no validity": func(_ int, _ direct.Query, l *direct.Location) (*direct.Location, error) {
			l.Validity = 0
			return l, nil
		},
		"a segment behind the log": func(_ int, _ direct.Query, l *direct.Location) (*direct.Location, error) {
			l.EndOffset = 60
			return l, nil
		},
		"a log that is longer": func(_ int, _ direct.Query, l *direct.Location) (*direct.Location, error) {
			l.HighWatermark = 1 << 40
			return l, nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, _ := stockRig(t, direct.Config{RestAfter: 1}, answer, one(20, 10))
			o := patient
			o.epoch = 5
			r.drain(o, 0, 0)
			if s := r.transport.Snapshot(); s.Served > 0 && name != "bytes outside" {
				t.Errorf("%+v", s)
			}
		})
	}
}

// A Locator that takes its time holds up no other partition, and what it says in the end is not lost on a client that has no
// patience.
func TestSlowLocatorDelaysNobody(t *testing.T) {
	gate := make(chan struct{})
	r, l := stockRig(t, direct.Config{}, func(_ int, q direct.Query, l *direct.Location) (*direct.Location, error) {
		if q.Partition == 0 {
			<-gate
		}
		return l, nil
	}, func(b objstore.Bucket) []*fakePartition {
		return []*fakePartition{tieredPartition(silentT{}, b, "slow", 6, 5), tieredPartition(silentT{}, b, "quick", 6, 5)}
	})
	at := []int64{0, 0}
	for at[1] < r.broker.parts[1].end() { // with a minute's patience, a delay would end this test
		check(r, r.broker.parts, at, patient, r.client.fetch(patient, []position{{0, at[0]}, {1, at[1]}}))
	}
	l.mu.Lock()
	asked := l.asked
	l.mu.Unlock()
	if at[0] != 0 || asked > 4 {
		t.Fatalf("the slow partition moved to %d, and %d questions", at[0], asked)
	}
	close(gate)
	hasty := patient
	hasty.waitMs, hasty.minimum = 0, 0
	for at[0] < r.broker.parts[0].end() {
		check(r, r.broker.parts, at, hasty, r.client.fetch(hasty, []position{{0, at[0]}}))
	}
	if s := r.transport.Snapshot(); s.BrokerBytes > int64(len(r.broker.parts[0].batches[5].b)+len(r.broker.parts[1].batches[5].b)) {
		t.Errorf("%+v", s)
	}
}

// Close ends what a Locator is at.
func TestCloseEndsLocating(t *testing.T) {
	b := newFakeBroker(t, &fakePartition{epoch: 5, local: 10})
	defer b.close()
	b.feature = false
	begun := make(chan struct{})
	f, err := objectstore.New(objstore.NewMemory(), objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	transport := newTransport(t, direct.Config{Fetcher: f, ConnectTimeout: time.Hour, Locator: endless{begun}})
	conn, err := transport.DialContext(t.Context(), "tcp", b.addr())
	if err != nil {
		t.Fatal(err)
	}
	newClient(t, conn).send(patient.request([]position{{0, 0}}))
	<-begun
	transport.Close()
}

type endless struct{ begun chan struct{} }

func (endless) Tiered(direct.Query) bool { return true }

func (e endless) Locate(ctx context.Context, _ direct.Query) (*direct.Location, error) {
	close(e.begun)
	<-ctx.Done()
	return nil, ctx.Err()
}

// A client decides about what the Locator is asked, and so not about how much at once.
func TestQuestionsAreBounded(t *testing.T) {
	r := newRig(t, direct.Config{}, one(3, 1))
	r.broker.do(func() { r.broker.feature = false })
	l := &stalled{}
	f, err := objectstore.New(r.bucket, objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	transport := newTransport(t, direct.Config{Fetcher: f, ConnectTimeout: time.Hour, Locator: l})
	conn, err := transport.Dial("tcp", r.broker.addr())
	if err != nil {
		t.Fatal(err)
	}
	var at []position
	for i := range int32(2000) {
		at = append(at, position{i, 0})
	}
	o := patient
	o.waitMs = 100
	newClient(t, conn).fetch(o, at)
	if n := l.most.Load(); n == 0 || n > 256 {
		t.Errorf("%d questions at once", n)
	}
}

// stalled is a Locator that does not answer.
type stalled struct{ now, most atomic.Int32 }

func (*stalled) Tiered(direct.Query) bool { return true }

func (s *stalled) Locate(ctx context.Context, _ direct.Query) (*direct.Location, error) {
	s.most.Store(max(s.most.Load(), s.now.Add(1)))
	defer s.now.Add(-1)
	<-ctx.Done()
	return nil, ctx.Err()
}

// A topic that was made anew under its name may have grown beyond the old one; then only the Locator knows that it is another.
func TestLocatorTakesBackWhatItSaid(t *testing.T) {
	log := func(name string) *fakePartition {
		p := &fakePartition{epoch: 5}
		for i := range 100 {
			p.append(t, recordbatch.CodecNone, -1, false, fmt.Sprint(name, i, strings.Repeat("x", 10_000)))
		}
		p.expect(t)
		return p
	}
	r, _ := stockRig(t, direct.Config{MarksMaxAge: time.Nanosecond, RangeBytes: 64 << 10}, nil, func(b objstore.Bucket) []*fakePartition {
		p := log("old")
		p.tier(t, b, "old", 0, 99)
		return []*fakePartition{p}
	})
	o := patient
	o.partMax = 1
	at := []int64{0}
	check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{0, 0}}))
	r.broker.do(func() {
		r.broker.parts[0] = log("new")
		r.broker.parts[0].append(t, recordbatch.CodecNone, -1, false, "more")
		r.broker.parts[0].expect(t)
	})
	o.minimum, o.waitMs = 1<<20, 300 // it is not answered before the Locator has
	for range 3 {
		check(r, r.broker.parts, at, o, r.client.fetch(o, []position{{0, at[0]}}))
	}
}

// An answer has all partitions of the request, as clients that know sessions want it, also those about which nothing is known yet:
// Kafka's own consumer throws away one that lacks any.
func TestAnswersAreWhole(t *testing.T) {
	slow := make(chan struct{})
	r, _ := stockRig(t, direct.Config{}, func(_ int, q direct.Query, l *direct.Location) (*direct.Location, error) {
		if q.Partition == 1 {
			<-slow
		}
		return l, nil
	}, func(b objstore.Bucket) []*fakePartition {
		return []*fakePartition{tieredPartition(t, b, "p", 6, 5), tieredPartition(t, b, "q", 6, 5)}
	})
	o := patient
	o.waitMs, o.minimum = 100, 1<<20
	resp := r.client.fetch(o, []position{{0, 0}, {1, 0}})
	close(slow)
	if n := len(resp.Topics[0].Partitions); n != 2 {
		t.Fatalf("%d of 2 partitions", n)
	}
	if p := resp.Topics[0].Partitions[1]; p.Partition != 1 || p.ErrorCode != 0 || len(p.RecordBatches) != 0 {
		t.Errorf("%+v", p)
	}
}

// A location of another leader epoch than the broker's is not used, though the client names none.
func TestLocationsOfAnotherEpoch(t *testing.T) {
	for _, epoch := range []int32{4, 6} {
		r, _ := stockRig(t, direct.Config{}, func(_ int, _ direct.Query, l *direct.Location) (*direct.Location, error) {
			if l == nil {
				return nil, nil
			}
			other := *l
			other.LeaderEpoch = epoch
			return &other, nil
		}, one(30, 10))
		r.drain(patient, 0, 0)
		if s := r.transport.Snapshot(); s.Served != 0 {
			t.Errorf("epoch %d: %+v", epoch, s)
		}
	}
}
