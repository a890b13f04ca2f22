package partition_test

import (
	"testing"
	"time"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

// A leader's log must hold what the tier holds: all of it, and nothing else in its place.
func TestLogsThatLackWhatTheTierHolds(t *testing.T) {
	fs := vfs.NewMem()
	if err := fs.MkdirAll("/d"); err != nil {
		t.Fatal(err)
	}
	c := log.DefaultConfig()
	c.Tiered = true
	l, err := log.Open(log.Options{FS: fs, Dir: "/d/t-0", Partition: tp.Partition{Topic: "t"}, TopicID: tp.UUID{1}, Config: c, Now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, epoch := range []int32{2, 2, 4, 4, 7} { // offsets 0 to 4
		b := recordbatch.NewBuilder()
		b.Add(recordbatch.Record{Timestamp: 1, Value: []byte("v")})
		raw, err := b.Build()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.AppendAsLeader(log.AppendRequest{Records: raw, LeaderEpoch: epoch, Now: time.Now()}); err != nil {
			t.Fatal(err)
		}
	}
	held := func(end int64, epochs ...leaderepoch.Entry) tier.Segments {
		return tier.Segments{{Start: 0, End: end, State: tier.CopyFinished, Epochs: epochs}}
	}
	for name, c := range map[string]struct {
		remote tier.Segments
		want   bool
	}{
		"no tier":                    {nil, false},
		"an unfinished copy":         {tier.Segments{{Start: 0, End: 9, State: tier.CopyStarted}}, false},
		"the same history":           {held(3, leaderepoch.Entry{Epoch: 2}, leaderepoch.Entry{Epoch: 4, StartOffset: 2}), false},
		"up to the end":              {held(4, leaderepoch.Entry{Epoch: 7, StartOffset: 4}), false},
		"more than the log":          {held(5, leaderepoch.Entry{Epoch: 7, StartOffset: 4}), true},
		"another leader's at offset": {held(3, leaderepoch.Entry{Epoch: 2}, leaderepoch.Entry{Epoch: 5, StartOffset: 2}), true},
		"no lineage":                 {held(3), false},
	} {
		if got := partition.Lacks(l, c.remote); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
