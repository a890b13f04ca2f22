package log

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/vfs"
)

// Once the segments that a producer wrote to are deleted, a power cut must not make the log forget the producer.
func TestRetentionKeepsProducersThroughAPowerCut(t *testing.T) {
	for seed := range uint64(40) {
		r := newRig(t, func(c *Config) { c.Tiered, c.LocalRetentionBytes = true, 0 })
		raw := records(t, 2, r.now, func(b *recordbatch.Builder) { b.ProducerID, b.ProducerEpoch, b.BaseSequence = 7, 0, 0 })
		_, err := r.AppendAsLeader(AppendRequest{Records: raw, LeaderEpoch: 3, Now: time.UnixMilli(r.now)})
		r.must(err)
		r.must(r.Roll(time.UnixMilli(r.now)))
		r.must(r.FlushUpTo(r.Offsets().ActiveBase))
		r.SetHighWatermark(math.MaxInt64)
		r.SetRemoteEnd(1)
		if gone := r.retain().Deleted; len(gone) != 1 {
			t.Fatalf("deleted %v", gone)
		}
		r.fs = vfs.NewFaulty(r.fs.FS.(*vfs.Mem).CrashClone(rand.New(rand.NewPCG(seed, 1))))
		r.open(false, 2, 0)
		if known := r.Producers(time.UnixMilli(r.now)); r.Offsets().End == 2 && len(known) != 1 {
			t.Fatalf("seed %d: producers %v, %+v", seed, known, r.Recovery())
		}
	}
}

// Where DeleteRecords ended inside of a batch the range to upload begins there, and its index with it.
func TestUploadRangeBeginsInsideABatch(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Tiered, c.IndexIntervalBytes = true, 1 })
	for range 4 {
		r.add(3)
	}
	r.must(r.Roll(time.UnixMilli(r.now)))
	r.SetHighWatermark(math.MaxInt64)
	r.must(r.AdvanceLogStart(4))
	u, err := r.UploadRange(4, 12)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	head := make([]byte, recordbatch.HeaderSize)
	if _, err := u.Log.ReadAt(head, 0); err != nil {
		t.Fatal(err)
	}
	if h, err := recordbatch.ParseHeader(head); err != nil || h.BaseOffset != 3 || u.Start != 4 {
		t.Fatalf("range from %d begins with %+v, %v", u.Start, h, err)
	}
	x := segment.NewOffsetIndex(u.Start, u.OffsetIndex)
	if x.Len() == 0 || x.Check(u.End+1, u.Size) != nil {
		t.Fatalf("index of %d entries: %v", x.Len(), x.Check(u.End+1, u.Size))
	}
	for i := range x.Len() {
		p, err := x.At(i)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := u.Log.ReadAt(head, p.Position); err != nil {
			t.Fatal(err)
		}
		if h, err := recordbatch.ParseHeader(head); err != nil || h.LastOffset() != p.Offset {
			t.Fatalf("entry %+v is at %+v, %v", p, h, err)
		}
	}
}
