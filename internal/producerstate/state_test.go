package producerstate

import (
	"encoding/hex"
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/varve-io/varve/internal/recordbatch"
	"pgregory.net/rapid"
)

const (
	transactional = 0x10
	control       = 0x20
)

// log drives a state as a leader would.
type log struct {
	*State
	end int64
}

func header(pid int64, epoch int16, seq, n int32, attrs int16) *recordbatch.Header {
	return &recordbatch.Header{ProducerID: pid, ProducerEpoch: epoch, BaseSequence: seq, LastOffsetDelta: n - 1, Count: n, Attributes: attrs}
}

func (l *log) write(h *recordbatch.Header) (Duplicate, bool, error) {
	d, dup, err := l.Check(h, false)
	if err == nil && !dup {
		h.BaseOffset = l.end
		l.Append(h)
		l.end = h.NextOffset()
	}
	return d, dup, err
}

func (l *log) mark(pid int64, epoch int16, typ recordbatch.ControlType, coordinator int32) (AbortedTxn, bool, error) {
	h := header(pid, epoch, -1, 1, transactional|control)
	c := recordbatch.Control{Type: typ, CoordinatorEpoch: coordinator}
	if err := l.CheckMarker(h, c, false); err != nil {
		return AbortedTxn{}, false, err
	}
	h.BaseOffset = l.end
	l.end++
	a, ok := l.AppendMarker(h, c)
	return a, ok, nil
}

func TestSnapshotVectors(t *testing.T) {
	one := []Entry{{1000, 3, 9, 99, 9, 1700000000000, 7, 42}}
	for want, entries := range map[string][]Entry{
		"0001f21700460000000100000000000003e80003000000090000000000000063000000090000018bcfe5680000000007000000000000002a": one,
		"000148674bc700000000": {},
	} {
		b := MarshalSnapshot(entries)
		if hex.EncodeToString(b) != want {
			t.Errorf("got %x, want %s", b, want)
		}
		got, err := ParseSnapshot(b)
		if err != nil || !slices.Equal(got, entries) {
			t.Errorf("got %v, %v", got, err)
		}
		for i := range b {
			c := slices.Clone(b)
			c[i] ^= 1
			if _, err := ParseSnapshot(c); !errors.Is(err, ErrMalformed) {
				t.Errorf("flipped bit in byte %d: %v", i, err)
			}
			if _, err := ParseSnapshot(b[:i]); !errors.Is(err, ErrMalformed) {
				t.Errorf("cut to %d bytes: %v", i, err)
			}
		}
	}
	s := FromSnapshot(one, 1700000000001, 1000)
	if got := s.Snapshot(); !slices.Equal(got, one) {
		t.Errorf("state of a snapshot: %v", got)
	}
	if first, ok := s.FirstUnstable(1000); !ok || first != 42 {
		t.Errorf("open transaction of a snapshot: %d, %v", first, ok)
	}
}

func TestUnknownProducerStartsAnywhere(t *testing.T) {
	l := &log{State: New()}
	if _, _, err := l.write(header(1, 0, 5, 3, 0)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := l.write(header(1, 0, 0, 1, 0)); !errors.Is(err, ErrOutOfOrderSequence) {
		t.Errorf("sequence 0 after 7: %v", err)
	}
	if _, _, err := l.write(header(1, 0, 8, 1, 0)); err != nil {
		t.Error(err)
	}
	if _, _, err := l.write(header(1, 1, 3, 1, 0)); !errors.Is(err, ErrOutOfOrderSequence) {
		t.Errorf("new epoch at 3: %v", err)
	}
	if _, _, err := l.write(header(1, 1, 0, 1, 0)); err != nil {
		t.Error(err)
	}
	if _, _, err := l.write(header(1, 0, 1, 1, 0)); !errors.Is(err, ErrInvalidProducerEpoch) {
		t.Errorf("old epoch: %v", err)
	}
	if n := l.Expire(1000, 1000); n != 1 {
		t.Errorf("%d expired", n)
	}
	if _, _, err := l.write(header(1, 0, 77, 1, 0)); err != nil {
		t.Errorf("any sequence and a lower epoch once expired: %v", err)
	}
}

func TestRepeatsOfTheLastFive(t *testing.T) {
	l := &log{State: New()}
	for i := range int32(7) {
		if _, _, err := l.write(header(1, 0, 2*i, 2, 0)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range int32(7) {
		d, dup, err := l.write(header(1, 0, 2*i, 2, 0))
		if i < 2 {
			if !errors.Is(err, ErrOutOfOrderSequence) {
				t.Errorf("batch %d: %v", i, err)
			}
		} else if err != nil || !dup || d.FirstOffset != int64(2*i) || d.LastOffset != int64(2*i+1) {
			t.Errorf("batch %d: %v, %v, %v", i, d, dup, err)
		}
	}
	if _, _, err := l.write(header(1, 0, 12, 1, 0)); !errors.Is(err, ErrOutOfOrderSequence) {
		t.Errorf("last batch with another count: %v", err)
	}
	after := &log{State: FromSnapshot(l.Snapshot(), 0, 1000), end: l.end}
	if d, dup, err := after.write(header(1, 0, 12, 2, 0)); err != nil || !dup || d.FirstOffset != 12 {
		t.Errorf("last batch after a restart: %v, %v, %v", d, dup, err)
	}
	if d, dup, err := l.Clone().Check(header(1, 0, 6, 2, 0), false); err != nil || !dup || d.FirstOffset != 6 {
		t.Errorf("clone: %v, %v, %v", d, dup, err)
	}
}

func TestSequenceWrapsInsideABatch(t *testing.T) {
	l := &log{State: New()}
	for _, h := range []*recordbatch.Header{
		header(1, 0, math.MaxInt32-4, 3, 0), header(1, 0, math.MaxInt32-1, 4, 0), header(1, 0, 2, 1, 0),
	} {
		if _, dup, err := l.write(h); dup || err != nil {
			t.Fatal(dup, err)
		}
	}
	if _, dup, err := l.write(header(1, 0, math.MaxInt32-1, 4, 0)); !dup || err != nil {
		t.Errorf("repeat of the wrapping batch: %v, %v", dup, err)
	}
	l = &log{State: New()}
	l.write(header(1, 0, math.MaxInt32, 1, 0))
	if _, _, err := l.write(header(1, 0, 0, 1, 0)); err != nil {
		t.Errorf("0 after the greatest: %v", err)
	}
}

func TestTransactions(t *testing.T) {
	l := &log{State: New(), end: 10}
	l.write(header(1, 0, 0, 5, transactional)) // 10–14
	l.write(header(2, 0, 0, 5, transactional)) // 15–19
	if _, _, err := l.write(header(1, 0, 5, 1, 0)); !errors.Is(err, ErrInvalidTxnState) {
		t.Errorf("plain batch in a transaction: %v", err)
	}
	if first, ok := l.FirstUnstable(100); !ok || first != 10 {
		t.Errorf("first unstable %d, %v", first, ok)
	}
	a, ok, err := l.mark(1, 1, recordbatch.ControlAbort, 7)
	if err != nil || !ok || a != (AbortedTxn{1, 10, 20, 15}) {
		t.Errorf("abort: %v, %v, %v", a, ok, err)
	}
	if first, _ := l.FirstUnstable(20); first != 10 {
		t.Errorf("marker above the high watermark: first unstable %d", first)
	}
	if first, _ := l.FirstUnstable(21); first != 15 {
		t.Errorf("marker below the high watermark: first unstable %d", first)
	}
	if _, _, err := l.mark(1, 1, recordbatch.ControlCommit, 6); !errors.Is(err, ErrCoordinatorFenced) {
		t.Errorf("older coordinator: %v", err)
	}
	if _, _, err := l.mark(1, 0, recordbatch.ControlCommit, 7); !errors.Is(err, ErrInvalidProducerEpoch) {
		t.Errorf("marker of an older epoch: %v", err)
	}
	if _, ok, err := l.mark(1, 1, recordbatch.ControlAbort, 7); ok || err != nil {
		t.Errorf("abort without a transaction: %v, %v", ok, err)
	}
	if _, ok, _ := l.mark(2, 1, recordbatch.ControlCommit, 7); ok {
		t.Error("commit taken for an abort")
	}
	l.HighWatermarkTo(l.end)
	if first, ok := l.FirstUnstable(l.end); ok {
		t.Errorf("nothing open, first unstable %d", first)
	}
	// The marker raised the epoch, so that the next sequence is 0.
	if _, _, err := l.write(header(1, 1, 5, 1, transactional)); !errors.Is(err, ErrOutOfOrderSequence) {
		t.Errorf("sequence 5 after the epoch was raised: %v", err)
	}
	if _, _, err := l.write(header(1, 1, 0, 1, transactional)); err != nil {
		t.Error(err)
	}
	if n := l.Expire(1<<40, 1); n != 1 {
		t.Errorf("%d expired; one has a transaction open", n)
	}
	if got := l.Active(); len(got) != 1 || got[0].ProducerID != 1 || got[0].TxnFirstOffset != l.end-1 || got[0].CoordinatorEpoch != 7 {
		t.Errorf("active: %+v", got)
	}
	if _, _, err := l.Check(header(1, 1, -1, 1, transactional), true); err != nil {
		t.Errorf("coordinators have no sequence: %v", err)
	}
}

// TestNothingIsWrittenTwice lets a client with five batches in flight send, repeat and lose answers at random:
// what the state accepts is each number once and in order.
// A batch that was confirmed before a marker belongs to the transaction that has ended, whether the next one has begun or not.
func TestConfirmedBeforeAMarker(t *testing.T) {
	l := &log{State: New()}
	write := func(seq int32) {
		if _, _, err := l.write(header(7, 0, seq, 1, transactional)); err != nil {
			t.Fatal(err)
		}
	}
	write(0)
	confirmed := l.end
	late := header(7, 0, 2, 1, transactional)
	if err := l.CheckTxn(late, confirmed); err != nil {
		t.Errorf("without a marker: %v", err)
	}
	if _, _, err := l.mark(7, 0, recordbatch.ControlCommit, 0); err != nil {
		t.Fatal(err)
	}
	if err := l.CheckTxn(late, confirmed); !errors.Is(err, ErrInvalidTxnState) {
		t.Errorf("after the marker: %v", err)
	}
	if err := l.CheckTxn(late, l.end); err != nil {
		t.Errorf("confirmed since: %v", err)
	}
	write(1)
	if err := l.CheckTxn(late, confirmed); !errors.Is(err, ErrInvalidTxnState) {
		t.Errorf("in the next transaction: %v", err)
	}
}

func TestNothingIsWrittenTwice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := &log{State: New()}
		start := rapid.SampledFrom([]int32{0, math.MaxInt32 - 10}).Draw(t, "start")
		next := start
		l.write(header(1, 0, recordbatch.AddSequence(start, math.MaxInt32), 1, 0)) // makes the producer known at start-1
		var sent []*recordbatch.Header
		want := int64(1)
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			if len(sent) > 0 && rapid.Bool().Draw(t, "repeat") {
				i := max(0, len(sent)-rapid.IntRange(1, 5).Draw(t, "back"))
				h := *sent[i]
				d, dup, err := l.Check(&h, false)
				if err != nil || !dup || d.FirstOffset != sent[i].BaseOffset {
					t.Fatalf("repeat of %+v: %v, %v, %v", h, d, dup, err)
				}
				continue
			}
			n := rapid.Int32Range(1, 5).Draw(t, "records")
			h := header(1, 0, next, n, 0)
			if _, dup, err := l.write(h); dup || err != nil {
				t.Fatalf("%+v: %v, %v", h, dup, err)
			}
			if h.BaseOffset != want {
				t.Fatalf("written at %d, want %d", h.BaseOffset, want)
			}
			want += int64(n)
			next = recordbatch.AddSequence(next, n)
			sent = append(sent, h)
		}
	})
}

func FuzzParseSnapshot(f *testing.F) {
	f.Add(MarshalSnapshot([]Entry{{1000, 3, 9, 99, 9, 1700000000000, 7, 42}}))
	f.Add(MarshalSnapshot(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		entries, err := ParseSnapshot(b)
		if err != nil {
			return
		}
		again, err := ParseSnapshot(MarshalSnapshot(entries))
		if err != nil || !slices.Equal(entries, again) {
			t.Fatalf("%v is not stable: %v, %v", entries, again, err)
		}
		s := FromSnapshot(entries, 0, 1)
		s.FirstUnstable(0)
		for _, e := range entries {
			s.Check(header(e.ProducerID, e.Epoch, 0, 1, 0), false)
		}
	})
}
