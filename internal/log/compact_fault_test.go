package log

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/compact"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

// filled is a compacted log with many segments of few keys.
func filled(t *testing.T) *keyed {
	k := newKeyed(t, 3)
	k.cfg.SegmentBytes = 300
	k.l.SetConfig(k.cfg)
	for range 60 {
		k.put()
	}
	return k
}

// TestCompactionOfDamage: damage is reported and not made whole by writing it anew.
func TestCompactionOfDamage(t *testing.T) {
	k := filled(t)
	r := k.l.current.Load().sealed[3]
	f, err := k.mem.OpenFile(r.Path(segment.LogSuffix))
	if err != nil {
		t.Fatal(err)
	}
	var b [1]byte
	if _, err := f.ReadAt(b[:], recordbatch.HeaderSize+3); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 0x10
	if _, err := f.WriteAt(b[:], recordbatch.HeaderSize+3); err != nil {
		t.Fatal(err)
	}
	var corrupt *CorruptError
	if _, err := k.compact(); !errors.As(err, &corrupt) || corrupt.File != r.Path(segment.LogSuffix) {
		t.Fatalf("%v", err)
	}
	if k.l.current.Load().sealed[3] != r {
		t.Error("the damaged segment was replaced")
	}
	k.noneStaged()
	k.put() // the log goes on
}

func (k *keyed) noneStaged() {
	k.t.Helper()
	names, err := k.mem.ReadDir("/d/k-0")
	if err != nil {
		k.fatalf("%v", err)
	}
	for _, e := range names {
		if strings.HasSuffix(e.Name, cleanedSuffix) || strings.HasPrefix(e.Name, compactFile) {
			k.fatalf("%s was left behind", e.Name)
		}
	}
}

// TestCompactionOnAFailingDisk: a full disk costs the compaction, not the log; what fails after the decision takes the log out of
// service, and the next start finishes what was decided.
func TestCompactionOnAFailingDisk(t *testing.T) {
	for _, f := range []struct {
		fault vfs.Fault
		dead  bool
	}{
		{vfs.Fault{Op: vfs.OpOpen, Path: ".log" + cleanedSuffix, Err: syscall.ENOSPC}, false},
		{vfs.Fault{Op: vfs.OpWrite, Path: ".log" + cleanedSuffix, Err: syscall.ENOSPC, Partial: 7}, false},
		{vfs.Fault{Op: vfs.OpWrite, Path: ".index" + cleanedSuffix, Err: syscall.ENOSPC}, false},
		{vfs.Fault{Op: vfs.OpSync, Path: cleanedSuffix, Err: syscall.EIO}, false},
		{vfs.Fault{Op: vfs.OpWrite, Path: compactFile, Err: syscall.ENOSPC}, false},
		{vfs.Fault{Op: vfs.OpRename, Path: compactFile, Err: syscall.EIO}, true},
		{vfs.Fault{Op: vfs.OpRename, Path: ".timeindex", Err: syscall.EIO}, true},
		{vfs.Fault{Op: vfs.OpRename, Path: ".log", Err: syscall.EIO}, true},
		{vfs.Fault{Op: vfs.OpRemove, Path: compactFile, Err: syscall.EIO}, true},
	} {
		t.Run(string(f.fault.Op)+f.fault.Path, func(t *testing.T) {
			k := filled(t)
			k.fs.Inject(f.fault)
			if _, err := k.compact(); !errors.Is(err, f.fault.Err) {
				t.Fatalf("%v", err)
			}
			k.fs.Heal()
			if err := k.l.Flush(); errors.Is(err, ErrLogDead) != f.dead {
				t.Fatalf("afterwards: %v", err)
			}
			if f.dead {
				k.rp = k.l.Offsets().RecoveryPoint
				k.l.CloseDirty()
				k.start(false, 0)
			}
			k.check(-1)
			res, err := k.compact()
			if err != nil {
				t.Fatal(err)
			}
			k.check(res.To)
			k.noneStaged()
		})
	}
}

// TestSegmentsThatGoDuringTheirCompaction: retention, a truncation, and the end of the log, before any read or write of a compaction. The
// log is sound, nothing is left behind, and the error never says that the log is damaged or its disk fails.
func TestSegmentsThatGoDuringTheirCompaction(t *testing.T) {
	for name, change := range map[string]func(k *keyed) error{
		"retention": func(k *keyed) error {
			if err := k.l.AdvanceLogStart(k.l.Offsets().End / 2); err != nil {
				return err
			}
			_, err := k.l.ApplyRetention(time.UnixMilli(k.now))
			return err
		},
		"truncation": func(k *keyed) error { return k.l.TruncateTo(k.l.Offsets().End / 3) },
		"restart":    func(k *keyed) error { return k.l.TruncateFullyAndStartAt(10_000, 10_000, nil, nil) },
		"end":        func(k *keyed) error { k.l.CloseDirty(); return nil },
		"deletion":   func(k *keyed) error { _, err := k.l.Delete(); return err },
	} {
		t.Run(name, func(t *testing.T) {
			for step := 1; ; step += 1 + step/20 {
				k := filled(t)
				p, err := k.l.CompactionPlan(k.stable(), time.UnixMilli(k.now))
				if err != nil {
					t.Fatal(err)
				}
				steps := 0
				_, err = k.l.Compact(t.Context(), p, CompactOptions{Memory: 1 << 20, Now: time.UnixMilli(k.now), Throttle: func(context.Context, int) error {
					if steps++; steps == step {
						return change(k)
					}
					return nil
				}})
				if err != nil && !errors.Is(err, ErrSegmentsGone) && !errors.Is(err, ErrClosed) {
					t.Fatalf("step %d: %v", step, err)
				}
				if name == "retention" || name == "truncation" || name == "restart" {
					k.seen()
					k.noneStaged()
					k.add(recordbatch.Record{Timestamp: k.now, Key: []byte("k")})
				}
				if steps < step {
					break
				}
			}
		})
	}
}

// openFiles counts the users of each path.
type openFiles struct {
	vfs.FS
	mu   sync.Mutex
	open map[string]int
	free []string // paths that were renamed onto while nobody had them open
}

type counted struct {
	vfs.File
	of   *openFiles
	path string
}

func (o *openFiles) add(path string, n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.open[path] += n
}

func (o *openFiles) Open(path string) (vfs.File, error) {
	f, err := o.FS.Open(path)
	if err != nil {
		return nil, err
	}
	o.add(path, 1)
	return &counted{f, o, path}, nil
}

func (c *counted) Close() error {
	c.of.add(c.path, -1)
	return c.File.Close()
}

func (o *openFiles) Rename(from, to string) error {
	o.mu.Lock()
	if o.open[to] == 0 {
		o.free = append(o.free, to)
	}
	o.mu.Unlock()
	return o.FS.Rename(from, to)
}

// TestReplacedSegmentsAreFreedLater: a rename onto a file that nobody has open gives back what it took, for long, while nobody can append.
func TestReplacedSegmentsAreFreedLater(t *testing.T) {
	k := filled(t)
	k.restart(true)
	if err := k.l.Close(); err != nil {
		t.Fatal(err)
	}
	of := &openFiles{FS: k.mem, open: map[string]int{}}
	l, err := Open(Options{FS: of, Dir: "/d/k-0", Partition: tp.Partition{Topic: "k"}, TopicID: tp.UUID{1}, Config: k.cfg, Clean: true, RecoveryPoint: k.rp, Now: time.UnixMilli(k.now)})
	if err != nil {
		t.Fatal(err)
	}
	k.l = l
	l.SetHighWatermark(math.MaxInt64)
	of.free = nil
	p, err := l.CompactionPlan(k.stable(), time.UnixMilli(k.now))
	if err != nil {
		t.Fatal(err)
	}
	res, err := l.Compact(t.Context(), p, CompactOptions{Memory: 1 << 20, Now: time.UnixMilli(k.now)})
	if err != nil || res.Left == 0 {
		t.Fatalf("%+v, %v", res, err)
	}
	for _, path := range of.free {
		if strings.HasSuffix(path, segment.LogSuffix) {
			t.Errorf("%s was freed by a rename", path)
		}
	}
	l.CloseDirty()
	for path, n := range of.open {
		if n != 0 {
			t.Errorf("%s is still open", path)
		}
	}
}

// TestReadersDuringCompaction: who reads while segments are replaced sees whole batches of rising offsets and no error.
func TestReadersDuringCompaction(t *testing.T) {
	k := filled(t)
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for ctx.Err() == nil {
				o := k.l.Offsets()
				for at := o.LocalLogStart; at < o.End; {
					v, err := k.l.Read(at, 500, o.End, true)
					if err != nil {
						t.Errorf("read at %d: %v", at, err)
						return
					}
					raw, err := v.AppendTo(nil)
					if v.NextOffset <= at {
						t.Errorf("read at %d of %d goes on at %d with %d bytes", at, o.End, v.NextOffset, len(raw))
						return
					}
					at = v.NextOffset
					v.Release()
					for len(raw) > 0 && err == nil {
						var h recordbatch.Header
						if h, err = recordbatch.ParseHeader(raw); err == nil {
							err = h.Verify(raw[:h.Size])
							raw = raw[h.Size:]
						}
					}
					if err != nil {
						t.Errorf("before %d: %v", at, err)
						return
					}
				}
				if _, _, err := k.l.OffsetForTimestamp(k.l.current.Load().offsets.End); err != nil {
					t.Errorf("time: %v", err)
				}
				if _, err := k.l.AbortedTransactions(o.LocalLogStart, o.End); err != nil {
					t.Errorf("aborted: %v", err)
				}
			}
		})
	}
	for range 30 {
		for range 5 {
			k.put()
		}
		if _, err := k.compact(); err != nil && !strings.Contains(err.Error(), "not one batch") {
			t.Fatal(err)
		}
	}
	stop()
	wg.Wait()
	k.check(0)
}

// TestReadOfAHole: a read whose limit lies in a hole that compaction left goes on behind the hole.
func TestReadOfAHole(t *testing.T) {
	k := newKeyed(t, 1)
	k.cfg.SegmentBytes = 1000
	k.l.SetConfig(k.cfg)
	for range 40 {
		k.now++
		k.add(recordbatch.Record{Timestamp: k.now, Key: []byte("the same")})
	}
	p, err := k.l.CompactionPlan(math.MaxInt64, time.UnixMilli(k.now))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.l.Compact(context.Background(), p, CompactOptions{Memory: 1 << 20, Now: time.UnixMilli(k.now)}); err != nil {
		t.Fatal(err)
	}
	for upTo := int64(1); upTo < p.To; upTo++ {
		v, err := k.l.Read(0, 1000, upTo, true)
		if err != nil || v.Size() != 0 || v.NextOffset != upTo {
			t.Fatalf("read up to %d: %d bytes, goes on at %d, %v", upTo, v.Size(), v.NextOffset, err)
		}
	}
}

// TestTombstones: a tombstone stays for delete.retention.ms after the compaction that first met it, then goes, and the batch that held
// it with it.
func TestTombstones(t *testing.T) {
	k := newKeyed(t, 1)
	k.cfg.Compaction.DeleteRetentionMs = 100
	k.l.SetConfig(k.cfg)
	add := func(key, value string) int64 {
		k.now++
		r := recordbatch.Record{Timestamp: k.now, Key: []byte(key), Headers: []recordbatch.RecordHeader{{Key: "h"}}}
		if value != "" {
			r.Value = []byte(value)
		}
		at := k.add(r)
		k.written[at] = write{key: key, value: value, at: k.now}
		return at
	}
	there := func(o int64) bool {
		all, _ := k.seen()
		_, ok := all[o]
		return ok
	}
	compact := func() {
		t.Helper()
		add("filler", "x")
		if err := k.l.Roll(time.UnixMilli(k.now)); err != nil {
			t.Fatal(err)
		}
		p, err := k.l.CompactionPlan(math.MaxInt64, time.UnixMilli(k.now))
		if err != nil || !p.Due {
			t.Fatalf("%+v, %v", p, err)
		}
		if _, err := k.l.Compact(context.Background(), p, CompactOptions{Memory: 1 << 20, Now: time.UnixMilli(k.now)}); err != nil {
			t.Fatal(err)
		}
	}
	value := add("a", "1")
	tombstone := add("a", "")
	compact()
	if there(value) || !there(tombstone) {
		t.Fatalf("value there: %v, tombstone there: %v", there(value), there(tombstone))
	}
	k.now += 50
	compact()
	if !there(tombstone) {
		t.Fatal("the tombstone is gone before its time")
	}
	k.now += 100
	compact()
	if there(tombstone) {
		t.Fatal("the tombstone outlived its time")
	}
}

// A record goes for a later one only when that is durable: a power cut at any step of a compaction leaves a value of each key.
func TestCompactionWaitsForWhatItRead(t *testing.T) {
	write := func(l *Log, value string) {
		b := recordbatch.NewBuilder()
		b.Add(recordbatch.Record{Timestamp: 1, Key: []byte("key"), Value: []byte(value)})
		raw, err := b.Build()
		if err == nil {
			_, err = l.AppendAsLeader(AppendRequest{Records: raw, Now: time.UnixMilli(1)})
		}
		if err == nil {
			err = l.Roll(time.UnixMilli(1))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	cut := false
	for step := range 80 {
		mem := vfs.NewMem()
		if err := errors.Join(mem.MkdirAll("/d"), mem.SyncDir("/")); err != nil {
			t.Fatal(err)
		}
		fs := vfs.NewFaulty(mem)
		cfg := DefaultConfig()
		cfg.Compact, cfg.Delete, cfg.RetentionMs = true, false, -1
		cfg.SegmentBytes = 100 // so that the new record is in a group of its own, and not written again
		open := func(fs vfs.FS) *Log {
			l, err := Open(Options{FS: fs, Dir: "/d/k-0", Partition: tp.Partition{Topic: "k"}, TopicID: tp.UUID{1}, Config: cfg, Now: time.UnixMilli(1)})
			if err != nil {
				t.Fatal(err)
			}
			l.SetHighWatermark(math.MaxInt64)
			return l
		}
		l := open(fs)
		write(l, "old")
		if err := l.Flush(); err != nil {
			t.Fatal(err)
		}
		write(l, "new") // is in the page cache alone
		var after *vfs.Mem
		left := step
		fs.Before = func(vfs.Op, string) {
			if left == 0 {
				after, cut = mem.CrashClone(rand.New(rand.NewPCG(uint64(step), 1))), true
			}
			left--
		}
		if _, err := l.Compact(t.Context(), compact.Plan{From: 0, To: 2}, CompactOptions{Memory: 1 << 20, Now: time.UnixMilli(1)}); err != nil {
			t.Fatal(err)
		}
		fs.Before = nil
		l.CloseDirty()
		if after == nil {
			continue
		}
		again := open(after)
		if o := again.Offsets(); len(readRaw(t, again, o.LocalLogStart, o.End, math.MaxInt32)) == 0 {
			t.Errorf("step %d: no value is left", step)
		}
		again.CloseDirty()
	}
	if !cut {
		t.Error("no step was cut")
	}
}
