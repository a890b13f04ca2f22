package log

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

// whole opens a log of nine batches in small segments on a file system in memory.
func whole(t *testing.T) (*Log, *vfs.Mem, Options) {
	t.Helper()
	fs := vfs.NewMem()
	if err := errors.Join(fs.MkdirAll("/d"), fs.SyncDir("/")); err != nil {
		t.Fatal(err)
	}
	c := DefaultConfig()
	c.SegmentBytes, c.Tiered, c.RetentionMs, c.IndexIntervalBytes = 500, true, -1, 1
	o := Options{FS: fs, Dir: "/d/t-0", Partition: tp.Partition{Topic: "t"}, TopicID: tp.UUID{1}, Config: c, Now: time.UnixMilli(1000)}
	l, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 9 {
		b := recordbatch.NewBuilder()
		for range 2 {
			b.Add(recordbatch.Record{Timestamp: int64(1000 + i), Value: make([]byte, 50)})
		}
		raw, err := b.Build()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.AppendAsLeader(AppendRequest{Records: raw, Now: time.UnixMilli(1000)}); err != nil {
			t.Fatal(err)
		}
	}
	l.SetHighWatermark(1000)
	return l, fs, o
}

func bytesOf(t *testing.T, l *Log, from, to int64) (out []byte) {
	t.Helper()
	for from < to {
		v, err := l.Read(from, 1<<20, to, true)
		if err != nil {
			t.Fatal(err)
		}
		if out, err = v.AppendTo(out); err != nil {
			t.Fatal(err)
		}
		if v.Size() == 0 {
			t.Fatalf("nothing at offset %d of %d", from, to)
		}
		from = v.NextOffset
		v.Release()
	}
	return out
}

func TestFront(t *testing.T) {
	l, fs, o := whole(t)
	all := bytesOf(t, l, 0, 18)
	segments := l.Sealed()
	first, second := segments[0], segments[1]
	front, next := bytesOf(t, l, 0, first.End+1), bytesOf(t, l, second.Base, second.End+1)
	l.SetRemoteEnd(second.End)
	c := l.Config()
	c.LocalRetentionBytes = 1
	l.SetConfig(c)
	if r, err := l.ApplyRetention(time.UnixMilli(2000)); err != nil || len(r.Deleted) != 2 {
		t.Fatal(r, err)
	}
	put := func(base int64, b []byte) error {
		f, err := l.NewFront(base)
		if err != nil {
			return err
		}
		if _, err := f.Write(b); err != nil {
			return err
		}
		return f.Commit([]AbortedTxn{{ProducerID: 7, FirstOffset: base, LastOffset: base + 1, LastStableOffset: base}, {ProducerID: 8, FirstOffset: base, LastOffset: 17}})
	}
	damaged := bytes.Clone(next)
	damaged[len(damaged)-1] ^= 1
	for name, c := range map[string]struct {
		base int64
		b    []byte
		want error
	}{
		"not adjoining": {first.Base, front, ErrNotAdjoining}, "nothing": {second.Base, nil, ErrNotAdjoining}, "inside": {second.End + 1, next, ErrNotAdjoining},
		"damaged": {second.Base, damaged, recordbatch.ErrCorrupt}, "other offsets": {second.Base, front, ErrNotAdjoining}, "half": {second.Base, next[:len(next)-5], recordbatch.ErrShort},
	} {
		if err := put(c.base, c.b); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := l.Offsets().LocalLogStart; got != second.End+1 {
		t.Fatal("local log start is", got)
	}
	if err := put(second.Base, next); err != nil {
		t.Fatal(err)
	}
	if err := put(first.Base, front); err != nil {
		t.Fatal(err)
	}
	check := func(l *Log) {
		t.Helper()
		if got := bytesOf(t, l, 0, 18); !bytes.Equal(got, all) || l.Offsets().LocalLogStart != 0 {
			t.Fatalf("%d bytes from %d on, want %d", len(got), l.Offsets().LocalLogStart, len(all))
		}
		txns, err := l.AbortedTransactions(0, first.End+1)
		if err != nil || len(txns) != 1 || txns[0].ProducerID != 7 {
			t.Fatal(txns, err)
		}
		if f, ok, err := l.OffsetForTimestamp(1001); !ok || err != nil || f.Offset != 2 {
			t.Fatal(f, ok, err)
		}
	}
	check(l)
	if err := l.Flush(); err != nil {
		t.Fatal(err)
	}
	rp := l.Offsets().RecoveryPoint
	l.CloseDirty()
	o.FS, o.RecoveryPoint = fs.CrashClone(rand.New(rand.NewPCG(1, 1))), rp
	again, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	again.SetHighWatermark(18)
	check(again)
}

// At whatever step of it the machine stops, the log opens and holds what it held before, or more.
func TestFrontCrash(t *testing.T) {
	for fail := 1; ; fail++ {
		l, mem, o := whole(t)
		s := l.Sealed()[0]
		front := bytesOf(t, l, 0, s.End+1)
		l.SetRemoteEnd(s.End)
		c := l.Config()
		c.LocalRetentionBytes = 1
		l.SetConfig(c)
		if _, err := l.ApplyRetention(time.UnixMilli(2000)); err != nil {
			t.Fatal(err)
		}
		if err := l.Flush(); err != nil {
			t.Fatal(err)
		}
		start := l.Offsets().LocalLogStart
		l.CloseDirty()
		faulty := vfs.NewFaulty(mem)
		steps, armed := 0, false
		var disk *vfs.Mem
		faulty.Before = func(vfs.Op, string) {
			if armed {
				if steps++; steps == fail {
					disk = mem.CrashClone(rand.New(rand.NewPCG(uint64(fail), 2)))
				}
			}
		}
		o.FS, o.RecoveryPoint = faulty, 18
		l, err := Open(o)
		if err != nil {
			t.Fatal(err)
		}
		f, err := l.NewFront(0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Write(front); err != nil {
			t.Fatal(err)
		}
		armed = true
		if err := f.Commit(nil); err != nil {
			t.Fatal(err)
		}
		l.CloseDirty()
		if disk == nil {
			if steps < 5 {
				t.Fatal("only", steps, "steps")
			}
			return
		}
		o.FS = disk
		l, err = Open(o)
		if err != nil {
			t.Fatalf("step %d: %v", fail, err)
		}
		if got := l.Offsets().LocalLogStart; got != start && got != 0 || l.Offsets().End != 18 {
			t.Fatalf("step %d: %+v", fail, l.Offsets())
		}
		l.SetHighWatermark(18)
		bytesOf(t, l, l.Offsets().LocalLogStart, 18)
		l.CloseDirty()
	}
}
