package log

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/compact"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

func benchLog(t testing.TB) *Log {
	t.Helper()
	dir := t.TempDir()
	cfg := DefaultConfig()
	cfg.MaxMessageBytes = 16 << 20
	l, err := Open(Options{FS: vfs.OS{}, Dir: dir + "/t-0", Partition: tp.Partition{Topic: "t"}, TopicID: tp.UUID{1}, Config: cfg, Now: time.UnixMilli(1000)})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func benchBatch(t testing.TB, size int) []byte {
	t.Helper()
	b := recordbatch.NewBuilder()
	value := make([]byte, min(size, 1000))
	for b.Size()+len(value) <= size || b.Count() == 0 {
		b.Add(recordbatch.Record{Timestamp: 1000, Value: value})
	}
	raw, err := b.Build()
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func appendOne(t testing.TB, l *Log, raw []byte) {
	recordbatch.SetBaseOffset(raw, 0)
	if _, err := l.AppendAsLeader(AppendRequest{Records: raw, Now: time.UnixMilli(1000)}); err != nil {
		t.Fatal(err)
	}
}

// TestAllocations holds appends and reads to a handful of allocations, whatever their size.
func TestAllocations(t *testing.T) {
	l := benchLog(t)
	raw := benchBatch(t, 1<<20)
	if n := testing.AllocsPerRun(20, func() { appendOne(t, l, raw) }); n > 8 {
		t.Errorf("append: %v allocations", n)
	}
	buf := make([]byte, 2<<20)
	offset := l.Offsets().End / 2
	if n := testing.AllocsPerRun(20, func() {
		v, err := l.Read(offset, 1<<20, math.MaxInt64, true)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := v.AppendTo(buf[:0]); err != nil {
			t.Fatal(err)
		}
		v.Release()
	}); n > 8 {
		t.Errorf("read: %v allocations", n)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestReadersBesideAWriter reads, looks up and flushes while batches are appended, segments roll and expire.
func TestReadersBesideAWriter(t *testing.T) {
	cfg := DefaultConfig()
	cfg.SegmentBytes, cfg.IndexIntervalBytes, cfg.RetentionBytes = 2000, 100, 10000
	l, err := Open(Options{FS: vfs.NewMem(), Dir: "/t-0", Partition: tp.Partition{Topic: "t"}, TopicID: tp.UUID{1}, Config: cfg, Now: time.UnixMilli(1000)})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	var group sync.WaitGroup
	for id := range 3 {
		group.Go(func() {
			next, last := int64(0), false
			for {
				select {
				case <-done:
					last = true
				default:
				}
				o := l.Offsets()
				if next < o.LocalLogStart {
					next = o.LocalLogStart
				}
				v, err := l.Read(next, 500*id, o.End, true)
				if _, gone := err.(*OffsetOutOfRangeError); gone {
					continue
				}
				if err != nil {
					t.Errorf("read at %d: %v", next, err)
					return
				}
				b, err := v.AppendTo(nil)
				if err != nil {
					t.Error(err)
				}
				for len(b) > 0 {
					h, err := recordbatch.ParseHeader(b)
					if err != nil || h.Verify(b) != nil {
						t.Errorf("batch at %d: %v", next, err)
						break
					}
					b = b[h.Size:]
				}
				next = v.NextOffset
				v.Release()
				if _, _, err := l.OffsetForTimestamp(1000); err != nil {
					t.Error(err)
				}
				if last && next >= l.Offsets().End {
					return
				}
			}
		})
	}
	raw := benchBatch(t, 300)
	for i := range 1000 {
		appendOne(t, l, raw)
		if i%50 == 0 {
			l.SetHighWatermark(math.MaxInt64)
			if _, err := l.ApplyRetention(time.UnixMilli(1000)); err != nil {
				t.Fatal(err)
			}
			if err := l.Flush(); err != nil {
				t.Fatal(err)
			}
		}
	}
	close(done)
	group.Wait()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

func BenchmarkAppend(b *testing.B) {
	for _, size := range []int{1 << 10, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			l := benchLog(b)
			raw := benchBatch(b, size)
			b.SetBytes(int64(len(raw)))
			b.ReportAllocs()
			for b.Loop() {
				appendOne(b, l, raw)
				if l.Offsets().Size > 2<<30 {
					b.StopTimer()
					if err := l.TruncateTo(0); err != nil {
						b.Fatal(err)
					}
					b.StartTimer()
				}
			}
			l.CloseDirty()
		})
	}
}

func BenchmarkRead(b *testing.B) {
	for _, size := range []int{1 << 10, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			l := benchLog(b)
			raw := benchBatch(b, size)
			for l.Offsets().Size < 64<<20 {
				appendOne(b, l, raw)
			}
			end := l.Offsets().End
			b.SetBytes(int64(max(1<<20/len(raw), 1) * len(raw)))
			b.ReportAllocs()
			buf := make([]byte, 0, 2<<20)
			offset := int64(0)
			for b.Loop() {
				v, err := l.Read(offset, 1<<20, end, true)
				if err != nil {
					b.Fatal(err)
				}
				if buf, err = v.AppendTo(buf[:0]); err != nil {
					b.Fatal(err)
				}
				if offset = v.NextOffset; offset >= end {
					offset = 0
				}
				v.Release()
			}
			_, _ = io.Discard.Write(buf)
			l.CloseDirty()
		})
	}
}

// BenchmarkCompact compacts records of 1 KiB, ten values a key, in segments of 16 MiB: MB/s of what is read.
func BenchmarkCompact(b *testing.B) {
	value := make([]byte, 1024)
	for i := range value {
		value[i] = 'a' + byte(i*7%26)
	}
	for b.Loop() {
		b.StopTimer()
		dir := b.TempDir()
		cfg := DefaultConfig()
		cfg.SegmentBytes = 16 << 20
		l, err := Open(Options{FS: vfs.OS{}, Dir: dir + "/t-0", Partition: tp.Partition{Topic: "t"}, TopicID: tp.UUID{1}, Config: cfg, Now: time.Now()})
		if err != nil {
			b.Fatal(err)
		}
		n := 0
		for n < 300_000 {
			x := recordbatch.NewBuilder()
			for range 60 {
				x.Add(recordbatch.Record{Timestamp: 1, Key: fmt.Appendf(nil, "key-%d", n%30_000), Value: value})
				n++
			}
			raw, err := x.Build()
			if err != nil {
				b.Fatal(err)
			}
			if _, err := l.AppendAsLeader(AppendRequest{Records: raw, Now: time.Now()}); err != nil {
				b.Fatal(err)
			}
		}
		if err := errors.Join(l.Roll(time.Now()), l.Flush()); err != nil { // as what was sealed is
			b.Fatal(err)
		}
		b.StartTimer()
		res, err := l.Compact(context.Background(), compact.Plan{From: 0, To: int64(n)}, CompactOptions{Memory: 128 << 20, Now: time.Now()})
		if err != nil {
			b.Fatal(err)
		}
		b.SetBytes(res.Before)
		b.StopTimer()
		l.Close()
		b.StartTimer()
	}
}
