package fetch

import (
	"errors"
	"testing"

	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

func TestChoose(t *testing.T) {
	const format = "kafka-log-v2"
	finished := &tier.Segment{ID: tp.UUID{1}, Start: 10, End: 49, State: tier.CopyFinished, Format: format}
	packed := &tier.Segment{ID: tp.UUID{2}, Start: 50, End: 79, State: tier.CopyFinished, Format: "packed"}
	going := &tier.Segment{ID: tp.UUID{3}, Start: 0, End: 9, State: tier.DeleteStarted, Format: format}
	remote := tier.Segments{going, finished, packed}
	marks := partition.Offsets{Offsets: log.Offsets{LogStart: 5, LocalLogStart: 100, End: 200}, HighWatermark: 200}
	for _, c := range []struct {
		name     string
		offset   int64
		upTo     int64
		location bool
		formats  []string
		source   Source
		segment  *tier.Segment
		err      error
	}{
		{"below the log", 4, 200, true, []string{format}, Nowhere, nil, ErrOffsetOutOfRange},
		{"above the end", 201, 200, true, []string{format}, Nowhere, nil, ErrOffsetOutOfRange},
		{"at the end", 200, 200, true, []string{format}, Local, nil, nil},
		{"first local", 100, 200, true, []string{format}, Local, nil, nil},
		{"in the tier", 10, 200, false, nil, Tiered, finished, nil},
		{"last of a segment", 49, 200, false, []string{format}, Tiered, finished, nil},
		{"in the tier by location", 30, 200, true, []string{"x", format}, Direct, finished, nil},
		{"all of the segment may be shown", 30, 50, true, []string{format}, Direct, finished, nil},
		{"its last record may not be shown yet", 30, 49, true, []string{format}, Tiered, finished, nil},
		{"format that the client lacks", 50, 200, true, []string{format}, Tiered, packed, nil},
		{"no formats", 30, 200, true, nil, Tiered, finished, nil},
		{"segment that goes away", 7, 200, true, []string{format}, Nowhere, nil, ErrReplicaUnavailable},
		{"hole between the tiers", 90, 200, true, []string{format}, Nowhere, nil, ErrReplicaUnavailable},
	} {
		source, segment, err := choose(c.offset, c.upTo, marks, remote, c.location, c.formats)
		if source != c.source || segment != c.segment || !errors.Is(err, c.err) {
			t.Errorf("%s: %v %v %v", c.name, source, segment, err)
		}
	}
	// Both tiers hold it: local is faster.
	marks.LocalLogStart = 20
	if source, _, err := choose(30, 200, marks, remote, true, []string{format}); source != Local || err != nil {
		t.Errorf("%v %v", source, err)
	}
}

func TestBudget(t *testing.T) {
	b := budget{left: 100}
	step := func(partitionMax, wantBytes int, wantOne bool, used int) {
		t.Helper()
		if n, one := b.limit(partitionMax); n != wantBytes || one != wantOne {
			t.Errorf("%d bytes, %v; want %d, %v", n, one, wantBytes, wantOne)
		}
		b.charge(used)
	}
	step(60, 60, true, 0)   // empty: the next one may still overshoot
	step(60, 60, true, 50)  // from now on nobody may
	step(60, 50, false, 30) //
	step(-5, 0, false, 0)
	step(60, 20, false, 20)
	step(60, 0, false, 0)
	b = budget{left: 10}
	step(10, 10, true, 500) // one large batch
	step(10, 0, false, 0)
	b = budget{left: -1}
	step(10, 0, true, 0)
}
