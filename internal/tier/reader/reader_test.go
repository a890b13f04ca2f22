package reader_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/tier/reader"
	"github.com/varve-io/varve/internal/tp"
)

func TestReadEverything(t *testing.T) {
	for name, write := range variants(t) {
		t.Run(name, func(t *testing.T) {
			w := makeWorld(t, write)
			for _, maxBytes := range []int{1, 1000, 5000, 1 << 20} {
				r := w.reader(t, nil)
				var got []byte
				next := int64(0)
				for next < 300 {
					res, err := r.Read(t.Context(), w.segs, next, maxBytes, math.MaxInt64, true)
					if err != nil || res.NextOffset <= next || res.Records.Size() == 0 || res.FirstOffset != next {
						t.Fatalf("at %d: %d bytes to %d, %v", next, res.Records.Size(), res.NextOffset, err)
					}
					if res.Records.Size() > maxBytes && res.Records.Size() > 700 {
						t.Fatalf("%d bytes instead of %d", res.Records.Size(), maxBytes)
					}
					got, next = res.Records.AppendTo(got), res.NextOffset
				}
				if !bytes.Equal(got, w.log) {
					t.Fatal("bytes differ")
				}
			}
		})
	}
}

func TestReadAnywhere(t *testing.T) {
	w := makeWorld(t, variants(t)["both"])
	r := w.reader(t, func(o *reader.Options) { o.ReadAheadBytes = 3000 })
	rapid.Check(t, func(rt *rapid.T) {
		offset := rapid.Int64Range(0, 299).Draw(rt, "offset")
		upTo := rapid.Int64Range(0, 310).Draw(rt, "up to")
		maxBytes := rapid.IntRange(1, 20000).Draw(rt, "max")
		minOne := rapid.Bool().Draw(rt, "min one")
		res, err := r.Read(t.Context(), w.segs, offset, maxBytes, upTo, minOne)
		if err != nil {
			rt.Fatal(err)
		}
		want := w.bytesFrom(t, offset, upTo)
		if offset >= upTo {
			want = nil
		}
		if !bytes.HasPrefix(want, res.Records.Bytes()) {
			rt.Fatal("bytes differ")
		}
		if res.Records.Size() == 0 {
			if len(want) > 0 && minOne {
				rt.Fatal("nothing, although one batch was due")
			}
			return
		}
		h, err := recordbatch.ParseHeader(res.Records.Bytes())
		if err != nil || h.BaseOffset != res.FirstOffset || res.NextOffset > max(upTo, offset) {
			rt.Fatalf("%+v %v", res.FirstOffset, err)
		}
		if res.Records.Size() > maxBytes && (!minOne || res.Records.Size() != h.Size) {
			rt.Fatal("too much")
		}
		if res.Records.Size() < len(want) && res.Records.Size()+h.Size+40 < maxBytes {
			rt.Fatalf("only %d bytes of %d, max %d", res.Records.Size(), len(want), maxBytes)
		}
	})
}

func TestNotInTier(t *testing.T) {
	w := makeWorld(t, plain)
	r := w.reader(t, nil)
	for _, offset := range []int64{-1, 300, 1000} {
		if _, err := r.Read(t.Context(), w.segs, offset, 1000, math.MaxInt64, true); !errors.Is(err, reader.ErrNotInTier) {
			t.Errorf("%d: %v", offset, err)
		}
	}
}

// A caller that stops waiting gets its data later from the cache, however often it is too impatient.
func TestSlowStoreDoesNotStarve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := makeWorld(t, plain)
		release := make(chan struct{})
		w.bucket.Add(objstore.Fault{Op: objstore.OpGet, Block: release})
		r := w.reader(t, func(o *reader.Options) { o.ChunkCacheBytes, o.IndexCacheBytes = 1, 1<<20 })
		defer r.Close()
		tries := 0
		for ; ; tries++ {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			res, err := r.Read(ctx, w.segs, 0, 1, math.MaxInt64, true)
			cancel()
			if err == nil {
				if res.NextOffset != 10 {
					t.Errorf("%+v", res)
				}
				break
			}
			if !errors.Is(err, context.DeadlineExceeded) || tries > 5 {
				t.Fatalf("try %d: %v", tries, err)
			}
			close(release) // the store answers only after everybody has gone
			synctest.Wait()
			release = make(chan struct{})
			w.bucket.Clear()
			w.bucket.Add(objstore.Fault{Op: objstore.OpGet, Block: release})
		}
		if tries != 2 { // the manifest, then the block
			t.Errorf("%d tries", tries)
		}
		close(release)
	})
}

func TestOneFetchForMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := makeWorld(t, plain)
		release := make(chan struct{})
		w.bucket.Add(objstore.Fault{Op: objstore.OpGet, Key: ".log", Block: release})
		r := w.reader(t, func(o *reader.Options) { o.BlockBytes = 1 << 20 })
		defer r.Close()
		results := make(chan error, 50)
		for range 50 {
			go func() {
				res, err := r.Read(t.Context(), w.segs, 0, 500, math.MaxInt64, true)
				if err == nil && res.Records.Size() == 0 {
					err = errors.New("nothing")
				}
				results <- err
			}()
		}
		synctest.Wait()
		close(release)
		for range 50 {
			if err := <-results; err != nil {
				t.Error(err)
			}
		}
		if n := w.bucket.Count(objstore.OpGet); n != 2 {
			t.Errorf("%d fetches instead of one manifest and one block", n)
		}
	})
}

func TestBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := makeWorld(t, plain)
		release := make(chan struct{})
		w.bucket.Add(objstore.Fault{Op: objstore.OpGet, Block: release})
		r := w.reader(t, func(o *reader.Options) { o.Workers, o.MaxPending = 1, 1 })
		defer r.Close()
		results := make(chan error, 3)
		for _, s := range w.segs {
			go func() {
				_, err := r.Read(t.Context(), w.segs, s.Start, 500, math.MaxInt64, true)
				results <- err
			}()
		}
		synctest.Wait()
		if err := <-results; !errors.Is(err, reader.ErrBusy) {
			t.Errorf("%v", err)
		}
		if n := w.bucket.Blocked(objstore.OpGet); n != 1 {
			t.Errorf("%d fetches run", n)
		}
		close(release)
		for range 2 {
			if err := <-results; err != nil {
				t.Error(err)
			}
		}
	})
}

func TestFailedReadsAreNotCached(t *testing.T) {
	for _, suffix := range []string{".rsm-manifest", ".indexes", ".log"} {
		for name, fault := range map[string]objstore.Fault{
			"error":   {Err: objstore.ErrThrottled},
			"short":   {Short: 40},
			"corrupt": {Corrupt: true, CorruptAt: 30},
		} {
			w := makeWorld(t, variants(t)["encrypted"])
			r := w.reader(t, func(o *reader.Options) { o.Keyring = w.ring })
			fault.Op, fault.Key, fault.Times = objstore.OpGet, suffix, 1
			w.bucket.Add(fault)
			if _, err := r.Read(t.Context(), w.segs, 55, 1, math.MaxInt64, true); err == nil {
				t.Errorf("%s of %s: not seen", name, suffix)
			}
			res, err := r.Read(t.Context(), w.segs, 55, 1, math.MaxInt64, true)
			if err != nil || !bytes.Equal(res.Records.Bytes(), w.bytesFrom(t, 55, 60)) {
				t.Errorf("%s of %s: second read: %v", name, suffix, err)
			}
		}
	}
}

func TestGone(t *testing.T) {
	for _, o := range []remoteformat.Object{remoteformat.ObjectManifest, remoteformat.ObjectIndexes, remoteformat.ObjectLog} {
		w := makeWorld(t, plain)
		if err := w.bucket.Delete(t.Context(), w.segs[0].Object("p/", o)); err != nil {
			t.Fatal(err)
		}
		if _, err := w.reader(t, nil).Read(t.Context(), w.segs, 55, 1, math.MaxInt64, true); !errors.Is(err, reader.ErrSegmentGone) {
			t.Errorf("%s: %v", o.Suffix(), err)
		}
	}
}

// Whatever is done to an object, what is intact is delivered, once, in order, and then an error names the place.
func TestDamagedObjects(t *testing.T) {
	w := makeWorld(t, plain)
	name := w.segs[1].Object("p/", remoteformat.ObjectLog)
	good, err := objstore.ReadAll(t.Context(), w.bucket, name, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	batch := len(good) / 10
	other, err := objstore.ReadAll(t.Context(), w.bucket, w.segs[2].Object("p/", remoteformat.ObjectLog), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	flip := bytes.Clone(good)
	flip[5*batch+100] ^= 1
	for _, c := range []struct {
		name string
		data []byte
		good int64 // offsets from 100 up to here are delivered
	}{
		{"appended", join(good, make([]byte, 1024)), 300},
		{"last batch cut off", good[:9*batch], 190},
		{"cut in mid batch", good[:9*batch+30], 190},
		{"cut in a header", good[:4*batch+3], 140},
		{"two batches swapped", join(good[:2*batch], good[3*batch:4*batch], good[2*batch:3*batch], good[4*batch:]), 140},
		{"another segment's", other, 100},
		{"batch repeated", join(good[:3*batch], good[2*batch:9*batch]), 130},
		{"one bit", flip, 150},
		{"zeros", make([]byte, len(good)), 100},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := w.bucket.Put(t.Context(), name, bytes.NewReader(c.data), int64(len(c.data)), objstore.PutOptions{}); err != nil {
				t.Fatal(err)
			}
			for _, block := range []int64{100, 1 << 20} {
				r := w.reader(t, func(o *reader.Options) { o.BlockBytes = block })
				next := int64(100)
				var err error
				for steps := 0; next < 300 && err == nil; steps++ {
					if steps > 100 {
						t.Fatal("does not end")
					}
					var res reader.Result
					if res, err = r.Read(t.Context(), w.segs, next, 1000, math.MaxInt64, true); err == nil {
						if res.NextOffset <= next {
							t.Fatalf("stays at %d", next)
						}
						if c.name != "two batches swapped" && !bytes.Equal(res.Records.Bytes(), w.bytesFrom(t, next, res.NextOffset)) {
							t.Fatalf("other bytes at %d", next)
						}
						next = res.NextOffset
					}
				}
				if next != c.good {
					t.Errorf("block %d: delivered up to %d instead of %d", block, next, c.good)
				}
				var ce *reader.CorruptError
				if next < 300 && (!errors.As(err, &ce) || ce.Object != name || ce.Offset < 100 || ce.Offset > next+10) {
					t.Errorf("block %d: at %d: %v", block, next, err)
				}
			}
		})
	}
}

func TestReadAheadIsBoundedAndCrossesSegments(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := makeWorld(t, plain)
		size := w.segs[0].Size
		r := w.reader(t, func(o *reader.Options) { o.BlockBytes, o.ReadAheadBytes = size/4+1, size })
		defer r.Close()
		read := func(offset int64) reader.Result {
			res, err := r.Read(t.Context(), w.segs, offset, int(size/4), math.MaxInt64, true)
			if err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			return res
		}
		res := read(0)
		res = read(res.NextOffset)
		before := w.bucket.Count(objstore.OpGet)
		res = read(res.NextOffset)
		// The whole next segment lies within the window or is asked for at most once per block.
		if after := w.bucket.Count(objstore.OpGet); after-before > 4 {
			t.Errorf("%d fetches for one step", after-before)
		}
		for res.NextOffset < 300 {
			res = read(res.NextOffset)
		}
		if n := w.bucket.Count(objstore.OpGet); n != 12+3+3 {
			t.Errorf("%d fetches for 12 blocks, 3 manifests and 3 offset indexes", n)
		}
		// At the end of the world nothing was waited for.
		w2 := makeWorld(t, plain)
		r2 := w2.reader(t, func(o *reader.Options) { o.BlockBytes, o.ReadAheadBytes = size/4+1, size })
		defer r2.Close()
		if _, err := r2.Read(t.Context(), w2.segs, 155, 100, math.MaxInt64, true); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if n := w2.bucket.Count(objstore.OpGet); n > 6 {
			t.Errorf("a single read in the middle made %d fetches", n)
		}
	})
}

func TestCloseDoesNotWaitForTheStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := makeWorld(t, plain)
		w.bucket.Add(objstore.Fault{Op: objstore.OpGet, Block: make(chan struct{})})
		r := w.reader(t, nil)
		results := make(chan error, 10)
		for range 10 {
			go func() {
				_, err := r.Read(context.WithoutCancel(t.Context()), w.segs, 0, 100, math.MaxInt64, true)
				results <- err
			}()
		}
		synctest.Wait()
		start := time.Now()
		r.Close()
		for range 10 {
			if err := <-results; !errors.Is(err, reader.ErrClosed) {
				t.Errorf("%v", err)
			}
		}
		if time.Since(start) != 0 {
			t.Errorf("close took %s", time.Since(start))
		}
		if _, err := r.Read(t.Context(), w.segs, 0, 100, math.MaxInt64, true); !errors.Is(err, reader.ErrClosed) {
			t.Errorf("after close: %v", err)
		}
	})
}

func TestSilentStoreTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := makeWorld(t, plain)
		w.bucket.Add(objstore.Fault{Op: objstore.OpGet, Block: make(chan struct{})})
		r := w.reader(t, func(o *reader.Options) { o.FetchTimeout = 7 * time.Second })
		defer r.Close()
		start := time.Now()
		if _, err := r.Read(t.Context(), w.segs, 0, 100, math.MaxInt64, true); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != 7*time.Second {
			t.Errorf("%v after %s", err, time.Since(start))
		}
	})
}

func TestOffsetForTimestamp(t *testing.T) {
	for name, write := range variants(t) {
		w := makeWorld(t, write)
		r := w.reader(t, nil)
		for _, logStart := range []int64{0, 55, 120} {
			for ts := int64(-1); ts < 301_000; ts += 499 {
				want := max((ts+999)/1000, 0, logStart)
				got, ok, err := r.OffsetForTimestamp(t.Context(), w.segs, ts, logStart)
				if err != nil || ok != (want < 300) || ok && (got.Offset != want || got.Timestamp != 1000*want || got.Epoch != int32(want/100)) {
					t.Fatalf("%s: time %d from %d: %+v %v %v, want %d", name, ts, logStart, got, ok, err, want)
				}
			}
		}
		if got, ok, err := r.MaxTimestamp(t.Context(), w.segs, 0); err != nil || !ok || got.Offset != 299 {
			t.Errorf("%s: max %+v %v %v", name, got, ok, err)
		}
	}
}

func TestMaxTimestampBelowLogStart(t *testing.T) {
	w := makeWorld(t, plain)
	early := *w.segs[0]
	early.MaxTimestamp = 500_000 // as if a later record of it were the greatest
	segs := append(w.segs[:0:0], w.segs...)
	segs[0] = &early
	if got, ok, err := w.reader(t, nil).MaxTimestamp(t.Context(), segs, 95); err != nil || !ok || got.Offset != 299 {
		t.Errorf("%+v %v %v", got, ok, err)
	}
}

func TestAborted(t *testing.T) {
	w := makeWorld(t, plain)
	r := w.reader(t, nil)
	for _, c := range []struct {
		from, upTo int64
		found      int
		complete   bool
	}{{0, 40, 0, true}, {0, 60, 1, false}, {60, 100, 1, false}, {150, 151, 1, false}, {151, 200, 0, false}, {200, 300, 0, false}} {
		txns, complete, err := r.Aborted(t.Context(), w.segs, c.from, c.upTo)
		// An entry whose last stable offset is at or above upTo ends the search.
		if err != nil || len(txns) != c.found || c.upTo <= 151 != complete {
			t.Errorf("%+v: %v %v %v", c, txns, complete, err)
		}
	}
	before := w.bucket.Count(objstore.OpGet)
	if _, _, err := r.Aborted(t.Context(), w.segs, 200, 300); err != nil || w.bucket.Count(objstore.OpGet) != before {
		t.Errorf("segments without transactions were asked (%v)", err)
	}
}

func TestLocate(t *testing.T) {
	w := makeWorld(t, variants(t)["compressed"])
	r := w.reader(t, nil)
	seg := w.segs[1]
	log := w.bytesFrom(t, seg.Start, seg.End+1)
	for offset := seg.Start; offset <= seg.End; offset++ {
		for _, maxBytes := range []int64{-5, 0, 1, 2000, math.MaxInt64} {
			from, to, err := r.Locate(t.Context(), seg, offset, maxBytes)
			if err != nil {
				t.Fatal(err)
			}
			if to > int64(len(log)) || from >= to || maxBytes == math.MaxInt64 && to != int64(len(log)) {
				t.Fatalf("%d: %d to %d", offset, from, to)
			}
			found := false
			for rest := log[from:to]; len(rest) > 0; {
				h, err := recordbatch.ParseHeader(rest)
				if err != nil || h.Size > len(rest) {
					t.Fatalf("%d: range %d to %d cuts a batch: %v", offset, from, to, err)
				}
				found = found || h.BaseOffset <= offset && offset <= h.LastOffset()
				rest = rest[h.Size:]
			}
			if !found {
				t.Fatalf("%d: not in %d to %d", offset, from, to)
			}
		}
	}
	if _, _, err := r.Locate(t.Context(), seg, seg.End+1, 1); !errors.Is(err, reader.ErrNotInTier) {
		t.Errorf("%v", err)
	}
}

func TestWhatAReplicaNeeds(t *testing.T) {
	w := makeWorld(t, variants(t)["both"])
	r := w.reader(t, nil)
	epochs, err := r.LeaderEpochs(t.Context(), w.segs[2])
	if err != nil || fmt.Sprint(epochs) != "[{0 0} {1 100} {2 200}]" {
		t.Errorf("%v %v", epochs, err)
	}
	if b, err := r.ProducerSnapshot(t.Context(), w.segs[2]); err != nil || len(b) != 10 {
		t.Errorf("%x %v", b, err)
	}
	r.Forget(tp.UUID{})
	if w.segs[0].CRC == 0 {
		t.Error("no checksum")
	}
}

// Whatever an object holds, reading ends, in order, and without a panic.
func FuzzLogObject(f *testing.F) {
	f.Add([]byte{}, uint16(0))
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 100, 0, 0, 0, 49}, uint16(600))
	f.Fuzz(func(t *testing.T, patch []byte, at uint16) {
		w := makeWorld(t, plain)
		name := w.segs[1].Object("p/", remoteformat.ObjectLog)
		data, err := objstore.ReadAll(t.Context(), w.bucket, name, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		data = append(data[:min(int(at), len(data)):len(data)], append(patch, data[min(int(at)+len(patch), len(data)):]...)...)
		if err := w.bucket.Put(t.Context(), name, bytes.NewReader(data), int64(len(data)), objstore.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		r := w.reader(t, nil)
		for next := int64(100); next < 200; {
			res, err := r.Read(t.Context(), w.segs, next, 1000, math.MaxInt64, true)
			if err != nil {
				break
			}
			if res.NextOffset <= next {
				t.Fatalf("stays at %d", next)
			}
			next = res.NextOffset
		}
		_, _, _ = r.OffsetForTimestamp(t.Context(), w.segs, 150_000, 0)
	})
}

// Whatever an index holds, look-ups end and stay within the object.
func FuzzIndexes(f *testing.F) {
	f.Add([]byte{0, 0, 0, 5, 0x7f, 0, 0, 0}, uint16(0))
	f.Fuzz(func(t *testing.T, patch []byte, at uint16) {
		w := makeWorld(t, plain)
		name := w.segs[1].Object("p/", remoteformat.ObjectIndexes)
		data, err := objstore.ReadAll(t.Context(), w.bucket, name, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		copy(data[min(int(at), len(data)):], patch)
		if err := w.bucket.Put(t.Context(), name, bytes.NewReader(data), int64(len(data)), objstore.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		r := w.reader(t, nil)
		if from, to, err := r.Locate(t.Context(), w.segs[1], 155, 1000); err == nil && (from < 0 || to <= from || to > w.segs[1].Size) {
			t.Fatalf("%d to %d", from, to)
		}
		_, _ = r.Read(t.Context(), w.segs, 155, 1000, math.MaxInt64, true)
		_, _, _ = r.Aborted(t.Context(), w.segs, 100, 200)
		_, _, _ = r.OffsetForTimestamp(t.Context(), w.segs, 150_000, 0)
		_, _ = r.LeaderEpochs(t.Context(), w.segs[1])
		_, _ = r.ProducerSnapshot(t.Context(), w.segs[1])
	})
}
