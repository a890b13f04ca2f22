package fetch

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tier/reader"
	"github.com/varve-io/varve/internal/tp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// timed runs fetch in a bubble and says how long it took.
func timed(t *testing.T, body func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { body(t, newWorld(t)) })
}

func TestLocalDataIsAnsweredAtOnce(t *testing.T) {
	timed(t, func(t *testing.T, w *world) {
		w.local("a", 3)
		w.local("b", 0)
		start := time.Now()
		r := w.fetch(request(part("b", 0), part("a", 2)))
		if time.Since(start) != 0 || r[0].Err != nil || r[0].HasData() || r[1].View == nil || r[1].View.FirstOffset != 2 || r[1].View.NextOffset != 6 {
			t.Errorf("after %s: %+v", time.Since(start), r)
		}
		if r[1].HighWatermark != 6 || r[1].LastStable != 6 || r[1].LogStart != 0 || r[0].HighWatermark != 0 {
			t.Errorf("%+v", r)
		}
	})
}

func TestWaitsForData(t *testing.T) {
	timed(t, func(t *testing.T, w *world) {
		p := w.local("a", 0)
		go func() {
			time.Sleep(50 * time.Millisecond)
			w.add(p, 2, nil)
		}()
		start := time.Now()
		r := w.fetch(request(part("a", 0)))
		if time.Since(start) != 50*time.Millisecond || r[0].View == nil || r[0].View.NextOffset != 2 || r[0].HighWatermark != 2 {
			t.Errorf("after %s: %+v", time.Since(start), r)
		}
		// More than one append may be needed; what there is goes out at the end.
		req := request(part("a", 0))
		req.MinBytes = 3 * r[0].Size()
		go func() {
			for range 2 {
				time.Sleep(100 * time.Millisecond)
				w.add(p, 2, nil)
			}
		}()
		start = time.Now()
		if r = w.fetch(req); time.Since(start) != 200*time.Millisecond || r[0].Size() != req.MinBytes {
			t.Errorf("after %s: %d bytes", time.Since(start), r[0].Size())
		}
		req.MinBytes++
		start = time.Now()
		if r = w.fetch(req); time.Since(start) != time.Second || r[0].Size() != req.MinBytes-1 {
			t.Errorf("after %s: %d bytes", time.Since(start), r[0].Size())
		}
	})
}

// A read ends with its segment, but what follows is there already: waiting for more bytes would only cost time.
func TestNoWaitWhereMoreIsThere(t *testing.T) {
	timed(t, func(t *testing.T, w *world) {
		p := w.partition("a", 6, smallSegment)
		req := request(part("a", 0))
		req.MinBytes = 1 << 20
		start := time.Now()
		if r := w.fetch(req); time.Since(start) != 0 || r[0].View == nil || r[0].View.NextOffset >= 12 {
			t.Errorf("after %s: %+v", time.Since(start), r)
		}
		w.toTier(p)
		w.tier.read = func(context.Context, tier.Segments, int64, int) (reader.Result, error) { return text("few", 0, 2), nil }
		if r := w.fetch(req); time.Since(start) != 0 || content(t, &r[0]) != "few" {
			t.Errorf("after %s: %+v", time.Since(start), r)
		}
	})
}

func TestWaitEndsWhenTheRoleDoes(t *testing.T) {
	timed(t, func(t *testing.T, w *world) {
		p := w.local("a", 1)
		for name, change := range map[string]func(){"retired": p.Retire, "moved": func() { p.Assume(alone(2, 9), time.Now()) }} {
			_, epoch := p.Leadership()
			p.Assume(alone(1, epoch+1), time.Now())
			go func() {
				time.Sleep(70 * time.Millisecond)
				change()
			}()
			start := time.Now()
			r := w.fetch(request(part("a", 2)))
			if time.Since(start) != 70*time.Millisecond || !errors.Is(r[0].Err, partition.ErrNotLeader) || r[0].HighWatermark != -1 {
				t.Errorf("%s: after %s: %+v", name, time.Since(start), r)
			}
		}
	})
}

func TestWaitEndsWithItsContext(t *testing.T) {
	timed(t, func(t *testing.T, w *world) {
		w.local("a", 1)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
		defer cancel()
		start := time.Now()
		if r := w.service.Fetch(ctx, request(part("a", 2))); time.Since(start) != 30*time.Millisecond || len(r) != 1 {
			t.Errorf("after %s: %+v", time.Since(start), r)
		}
	})
}

func TestErrorsAreAnsweredAtOnce(t *testing.T) {
	timed(t, func(t *testing.T, w *world) {
		w.local("a", 2)
		epoch := func(known, last int32, offset int64) Part {
			p := part("a", offset)
			p.CurrentEpoch, p.LastFetchedEpoch = known, last
			return p
		}
		start := time.Now()
		r := w.fetch(request(part("nowhere", 0), epoch(2, -1, 4), epoch(4, -1, 4), epoch(3, 3, 4), epoch(3, 2, 3), epoch(3, 3, 9), part("a", 5), part("a", -1)))
		for i, want := range []error{partition.ErrNotLeader, partition.ErrFencedEpoch, partition.ErrUnknownEpoch, nil, nil, nil, ErrOffsetOutOfRange, ErrOffsetOutOfRange} {
			if !errors.Is(r[i].Err, want) || want != nil && r[i].HighWatermark != -1 {
				t.Errorf("%d: %+v", i, r[i])
			}
		}
		if r[1].Leader != 1 || r[1].LeaderEpoch != 3 || r[0].Leader != -1 {
			t.Errorf("leaders %+v", r[:2])
		}
		// The client's log went another way: it has offset 3 of an epoch that ended before, or more than there is.
		if r[3].Diverging != nil || r[4].Diverging == nil || *r[4].Diverging != (Diverging{2, 0}) || r[5].Diverging == nil || *r[5].Diverging != (Diverging{3, 4}) {
			t.Errorf("%+v %+v %+v", r[3].Diverging, r[4].Diverging, r[5].Diverging)
		}
		if time.Since(start) != 0 {
			t.Errorf("after %s", time.Since(start))
		}
	})
}

// All tiered partitions of a request are read at once, within its budget.
func TestAllTieredPartitionsInOneRequest(t *testing.T) {
	timed(t, func(t *testing.T, w *world) {
		var parts []Part
		for i := range 5 {
			topic := string(rune('a' + i))
			w.tiered(topic)
			parts = append(parts, part(topic, 1))
		}
		all, once := make(chan struct{}), sync.Once{}
		w.tier.read = func(ctx context.Context, segs tier.Segments, offset int64, maxBytes int) (reader.Result, error) {
			if w.tier.count() == 5 {
				once.Do(func() { close(all) })
			}
			<-all // nobody is answered before all have been asked
			return text("records of "+segs[0].Topic, 0, 2), nil
		}
		req := request(parts...)
		req.MaxBytes = 5 << 20
		r := w.fetch(req)
		for i := range r {
			if r[i].Err != nil || content(t, &r[i]) != "records of "+parts[i].Topic || r[i].HighWatermark != 20 {
				t.Errorf("%d: %+v", i, r[i])
			}
		}
		if n := w.tier.count(); n != 5 {
			t.Errorf("%d reads", n)
		}
	})
}

func TestTieredReadsKeepTheBudget(t *testing.T) {
	timed(t, func(t *testing.T, w *world) {
		for _, topic := range []string{"a", "b", "c"} {
			w.tiered(topic)
		}
		var asked []int
		w.tier.read = func(_ context.Context, _ tier.Segments, _ int64, maxBytes int) (reader.Result, error) {
			w.tier.mu.Lock()
			defer w.tier.mu.Unlock()
			asked = append(asked, maxBytes)
			return text(string(make([]byte, maxBytes)), 0, 2), nil
		}
		req := request(part("a", 0), part("b", 0), part("c", 0))
		for i := range req.Parts {
			req.Parts[i].MaxBytes = 60
		}
		req.MaxBytes = 100
		r := w.fetch(req)
		if r[0].Size()+r[1].Size()+r[2].Size() != 100 || r[2].HasData() || r[2].Err != nil || r[2].HighWatermark != 20 || len(asked) != 2 {
			t.Errorf("%d, %d and %d bytes; asked for %d", r[0].Size(), r[1].Size(), r[2].Size(), asked)
		}
	})
}

// A slow bucket costs partitions with data no more than the grace, even while they are busy.
func TestSlowTierDoesNotDelayLocalData(t *testing.T) {
	timed(t, func(t *testing.T, w *world) {
		w.tiered("a")
		p := w.local("b", 1)
		w.tier.read = hang
		stop := make(chan struct{})
		defer close(stop)
		go func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(3 * time.Millisecond):
					w.add(p, 1, nil)
				}
			}
		}()
		start := time.Now()
		r := w.fetch(request(part("a", 0), part("b", 0)))
		if time.Since(start) > grace || r[0].HasData() || r[0].Err != nil || !r[1].HasData() {
			t.Errorf("after %s: %+v", time.Since(start), r)
		}
	})
}

// Reads that others have crowded out are not lost, and the answer stays within its budget.
func TestLateReadGivesItsPlaceToLocalData(t *testing.T) {
	timed(t, func(t *testing.T, w *world) {
		w.tiered("a")
		w.local("b", 4)
		w.tiered("c")
		w.tier.read = func(ctx context.Context, segs tier.Segments, offset int64, maxBytes int) (reader.Result, error) {
			if segs[0].Topic == "a" {
				return hang(ctx, segs, offset, maxBytes)
			}
			return text(string(make([]byte, maxBytes)), 0, 2), nil
		}
		req := request(part("a", 0), part("b", 0), part("c", 0))
		for i := range req.Parts {
			req.Parts[i].MaxBytes = 700
		}
		req.MaxBytes = 1000
		r := w.fetch(req)
		if r[0].HasData() || r[1].Size() == 0 || r[0].Size()+r[1].Size()+r[2].Size() > req.MaxBytes {
			t.Errorf("%d, %d and %d bytes", r[0].Size(), r[1].Size(), r[2].Size())
		}
	})
}

// What comes late is an empty answer; the next request finds it.
func TestLateTieredRead(t *testing.T) {
	timed(t, func(t *testing.T, w *world) {
		w.tiered("a")
		w.tier.read = hang
		start := time.Now()
		r := w.fetch(request(part("a", 0)))
		if time.Since(start) != 3*time.Second || r[0].Err != nil || r[0].HasData() || r[0].HighWatermark != 20 || w.failed != 0 {
			t.Errorf("after %s, %d failures: %+v", time.Since(start), w.failed, r)
		}
		w.tier.read = func(context.Context, tier.Segments, int64, int) (reader.Result, error) {
			return text("late", 0, 2), nil
		}
		start = time.Now()
		if r = w.fetch(request(part("a", 0))); time.Since(start) != 0 || content(t, &r[0]) != "late" {
			t.Errorf("after %s: %+v", time.Since(start), r)
		}
	})
}

// A bucket that fails is an empty answer after the usual wait, one read and one failure: no busy loop, whatever else happens.
func TestFailedTieredRead(t *testing.T) {
	timed(t, func(t *testing.T, w *world) {
		w.tiered("a")
		busy := w.local("b", 0)
		w.tier.read = func(context.Context, tier.Segments, int64, int) (reader.Result, error) {
			return reader.Result{}, reader.ErrBusy
		}
		go func() {
			for range 5 {
				time.Sleep(100 * time.Millisecond)
				w.add(busy, 1, nil)
			}
		}()
		req := request(part("a", 0), part("b", 0))
		req.MinBytes = 1 << 20
		start := time.Now()
		r := w.fetch(req)
		if time.Since(start) != time.Second || r[0].Err != nil || r[0].HasData() || r[0].HighWatermark != 20 {
			t.Errorf("after %s: %+v", time.Since(start), r)
		}
		if w.tier.count() != 1 || w.failed != 1 {
			t.Errorf("%d reads, %d failures told", w.tier.count(), w.failed)
		}
	})
}

func TestDamageAndHolesAreErrors(t *testing.T) {
	timed(t, func(t *testing.T, w *world) {
		w.tiered("a")
		damage := &reader.CorruptError{Object: "o", Offset: 3, Err: errors.New("bits")}
		for _, c := range []struct{ got, want error }{{damage, reader.ErrCorrupt}, {fmt.Errorf("%w: 3", reader.ErrNotInTier), ErrReplicaUnavailable}, {reader.ErrSegmentGone, nil}} {
			w.tier.read = func(context.Context, tier.Segments, int64, int) (reader.Result, error) { return reader.Result{}, c.got }
			if r := w.fetch(request(part("a", 0))); !errors.Is(r[0].Err, c.want) || r[0].HasData() {
				t.Errorf("%v: %+v", c.got, r)
			}
		}
		w.service.Tier = nil
		if r := w.fetch(request(part("a", 0))); !errors.Is(r[0].Err, ErrReplicaUnavailable) {
			t.Errorf("without a tier: %+v", r)
		}
	})
}

func TestLocationIsAnAnswer(t *testing.T) {
	timed(t, func(t *testing.T, w *world) {
		p := w.tiered("a")
		seg := p.Remote()[1]
		w.tier.locate = func(offset int64) (int64, int64, error) { return 17, seg.Size, nil }
		want := part("a", seg.Start+1)
		want.WantLocation = true
		req := request(want)
		req.Formats, req.MinBytes = []string{format}, 1<<20
		start := time.Now()
		r := w.fetch(req)
		if time.Since(start) != 0 || len(r[0].Locations) != 1 || !r[0].HasData() || r[0].Size() != 0 || w.tier.count() != 0 {
			t.Fatalf("after %s: %+v", time.Since(start), r)
		}
		l := r[0].Locations[0]
		if l.SegmentID != seg.ID || l.BaseOffset != seg.Start || l.EndOffset != seg.End || l.StartPosition != 17 || l.EndPosition != seg.Size || l.LeaderEpoch != 3 ||
			l.ValidityMs != 60_000 || l.ObjectKey != "p/"+seg.Key().Path()+".log" || l.Format != format || l.SegmentSize != seg.Size {
			t.Errorf("%+v", l)
		}
		req.Formats = nil // the client reads no format: classic
		w.tier.read = func(context.Context, tier.Segments, int64, int) (reader.Result, error) {
			return text("bytes", 0, 2), nil
		}
		if r = w.fetch(req); len(r[0].Locations) != 0 || content(t, &r[0]) != "bytes" {
			t.Errorf("%+v", r)
		}
	})
}

// A transaction that began in the tier and was aborted in the local log is in the lists of both, and once in the answer.
func TestAbortedTransactionsOfBothTiers(t *testing.T) {
	timed(t, func(t *testing.T, w *world) {
		p := w.partition("a", 0, smallSegment)
		begin := func(producer int64) {
			w.add(p, 2, func(b *recordbatch.Builder) {
				b.ProducerID, b.ProducerEpoch, b.BaseSequence, b.Transactional = producer, 0, 0, true
			})
		}
		abort := func(producer int64) {
			w.append(p, recordbatch.EndTxnMarker(recordbatch.Marker{ProducerID: producer, Timestamp: time.Now().UnixMilli()}))
		}
		begin(8) // 0, 1
		abort(8) // 2
		begin(9) // 3, 4
		for range 10 {
			w.add(p, 2, nil)
		}
		local := w.toTier(p)
		abort(9)
		early := producerstate.AbortedTxn{ProducerID: 8, FirstOffset: 0, LastOffset: 2, LastStableOffset: 3}
		late, err := p.Log().AbortedTransactions(0, math.MaxInt64)
		if err != nil || len(late) != 1 || late[0].ProducerID != 9 || local <= 5 {
			t.Fatalf("%+v %v", late, err)
		}
		w.tier.read = func(context.Context, tier.Segments, int64, int) (reader.Result, error) {
			return text("records", 0, 6), nil
		}
		for _, c := range []struct {
			tiers    []producerstate.AbortedTxn
			complete bool
			want     []producerstate.AbortedTxn
		}{
			{[]producerstate.AbortedTxn{early}, false, []producerstate.AbortedTxn{early, late[0]}},
			{[]producerstate.AbortedTxn{early, late[0]}, false, []producerstate.AbortedTxn{early, late[0]}},
			{[]producerstate.AbortedTxn{early}, true, []producerstate.AbortedTxn{early}},
		} {
			w.tier.aborted = func(from, upTo int64) ([]producerstate.AbortedTxn, bool, error) {
				if from != 0 || upTo != 6 {
					t.Errorf("asked for %d to %d", from, upTo)
				}
				return c.tiers, c.complete, nil
			}
			req := request(part("a", 0))
			req.Committed = true
			if r := w.fetch(req); !reflect.DeepEqual(r[0].Aborted, c.want) || r[0].Size() == 0 {
				t.Errorf("%+v: %+v", c, r[0].Aborted)
			}
		}
		// Without its list an answer would show aborted records as committed.
		w.tier.aborted = func(int64, int64) ([]producerstate.AbortedTxn, bool, error) { return nil, false, errors.New("store") }
		req := request(part("a", 0))
		req.Committed = true
		if r := w.fetch(req); r[0].HasData() || r[0].Err != nil {
			t.Errorf("%+v", r)
		}
	})
}

func TestReadCommittedStopsAtTheLastStableOffset(t *testing.T) {
	timed(t, func(t *testing.T, w *world) {
		p := w.local("a", 1)
		w.add(p, 2, func(b *recordbatch.Builder) {
			b.ProducerID, b.BaseSequence, b.Transactional, b.ProducerEpoch = 9, 0, true, 0
		})
		req := request(part("a", 0))
		req.Committed = true
		if r := w.fetch(req); r[0].View == nil || r[0].View.NextOffset != 2 || r[0].LastStable != 2 || r[0].HighWatermark != 4 {
			t.Errorf("%+v", r)
		}
		req.Parts[0].Offset = 2
		go func() {
			time.Sleep(40 * time.Millisecond)
			w.append(p, recordbatch.EndTxnMarker(recordbatch.Marker{ProducerID: 9, Timestamp: time.Now().UnixMilli()}))
		}()
		start := time.Now()
		if r := w.fetch(req); time.Since(start) != 40*time.Millisecond || r[0].View == nil || r[0].View.NextOffset != 5 || len(r[0].Aborted) != 1 {
			t.Errorf("after %s: %+v", time.Since(start), r)
		}
	})
}

// A partition that cannot be resolved is answered with its error and does not end the wait of the others.
func TestUnresolvedPartitions(t *testing.T) {
	timed(t, func(t *testing.T, w *world) {
		p := w.local("a", 0)
		unknown := errors.New("unknown topic id")
		go func() {
			time.Sleep(20 * time.Millisecond)
			w.add(p, 1, nil)
		}()
		start := time.Now()
		r := w.fetch(request(Part{TopicID: tp.UUID{1}, Err: unknown}, part("a", 0)))
		if time.Since(start) != 20*time.Millisecond || r[0].Err != unknown || !r[1].HasData() {
			t.Errorf("after %s: %+v", time.Since(start), r)
		}
		if r := w.service.Fetch(t.Context(), request()); r != nil {
			t.Errorf("%+v", r)
		}
	})
}
