package uploader_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/crc32"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tier/uploader"
	"github.com/varve-io/varve/internal/tp"
)

// make10 is a segment of ten batches of ten records from offset start.
func make10(t *testing.T, n byte, start int64, codec recordbatch.Codec) (*tier.Segment, uploader.Source) {
	t.Helper()
	var log []byte
	for i := range int64(10) {
		b := recordbatch.NewBuilder()
		b.BaseOffset, b.Codec, b.LeaderEpoch = start+i*10, codec, 3
		for j := range 10 {
			b.Add(recordbatch.Record{Timestamp: 1000 + i, Value: bytes.Repeat([]byte{byte(j)}, 50)})
		}
		batch, err := b.Build()
		if err != nil {
			t.Fatal(err)
		}
		log = append(log, batch...)
	}
	x, err := segment.BuildIndexes(bytes.NewReader(log), 0, int64(len(log)), start, 100)
	if err != nil {
		t.Fatal(err)
	}
	x.Seal()
	epochs := []leaderepoch.Entry{{Epoch: 3, StartOffset: start}}
	return &tier.Segment{ID: tp.UUID{0: 9, 15: n}, Topic: "t", TopicID: tp.UUID{0: 1}, Start: start, End: start + 99, MaxTimestamp: 1009,
			Size: int64(len(log)), Epochs: epochs, LeaderEpoch: 3, Broker: 1, EventTime: 5000},
		uploader.Source{Log: bytes.NewReader(log), Size: int64(len(log)), OffsetIndex: x.Offsets(), TimeIndex: x.Times(), ProducerSnapshot: []byte("snapshot"), LeaderEpochs: leaderepoch.Marshal(epochs)}
}

func bytesOf(t *testing.T, src uploader.Source) []byte {
	t.Helper()
	b := make([]byte, src.Size)
	if n, _ := src.Log.ReadAt(b, 0); n != len(b) {
		t.Fatal("short source")
	}
	return b
}

func keys(t *testing.T, b objstore.Bucket) []string {
	t.Helper()
	var out []string
	if err := b.List(t.Context(), "", "", func(i objstore.Info) error { out = append(out, i.Key); return nil }); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestUploadAndDelete(t *testing.T) {
	for _, compress := range []bool{false, true} {
		b := objstore.WithFaults(objstore.NewMemory())
		seg, src := make10(t, 1, 100, recordbatch.CodecNone)
		o := uploader.Options{Prefix: "p/", Write: remoteformat.WriteOptions{Compress: compress, ChunkSize: 700}, CustomSize: true, CustomPath: true}
		var res uploader.Result
		for range 2 { // again, as after a lost answer of the controller
			var err error
			if res, err = uploader.Upload(t.Context(), b, seg, src, o); err != nil {
				t.Fatal(err)
			}
		}
		log := bytesOf(t, src)
		if res.CRC != crc32.Checksum(log, crc32.MakeTable(crc32.Castagnoli)) {
			t.Errorf("crc %x", res.CRC)
		}
		custom, err := remoteformat.ParseCustomMetadata(res.CustomMetadata)
		if err != nil || *custom.RemoteSize != res.ObjectBytes || *custom.Path != seg.Key().Path() || custom.Prefix != nil {
			t.Errorf("custom metadata %+v %v", custom, err)
		}
		var sum int64
		if err := b.List(t.Context(), "p/", "", func(i objstore.Info) error { sum += i.Size; return nil }); err != nil || sum != res.ObjectBytes {
			t.Errorf("%d bytes stored, %d reported, %v", sum, res.ObjectBytes, err)
		}
		manifest, err := objstore.ReadAll(t.Context(), b, seg.Object("p/", remoteformat.ObjectManifest), 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		m, err := remoteformat.Open(manifest, nil)
		if err != nil || m.Plain() == compress || (res.Format == tier.FormatKafkaV1) != m.Plain() || m.Manifest().Metadata.Key != seg.Key() || !m.Manifest().Metadata.TxnIndexEmpty {
			t.Errorf("%+v %v", m, err)
		}
		for range 2 {
			if err := uploader.Delete(t.Context(), b, "p/", seg); err != nil {
				t.Fatal(err)
			}
		}
		if left := keys(t, b); len(left) != 0 {
			t.Errorf("left %v", left)
		}
	}
}

func TestManifestIsLastAndFirstToGo(t *testing.T) {
	for _, o := range []remoteformat.Object{remoteformat.ObjectLog, remoteformat.ObjectIndexes} {
		b := objstore.WithFaults(objstore.NewMemory())
		b.Add(objstore.Fault{Op: objstore.OpPut, Key: o.Suffix(), Err: objstore.ErrThrottled})
		seg, src := make10(t, 1, 0, recordbatch.CodecNone)
		if _, err := uploader.Upload(t.Context(), b, seg, src, uploader.Options{}); !errors.Is(err, objstore.ErrThrottled) {
			t.Errorf("%v", err)
		}
		if _, err := b.Stat(t.Context(), seg.Object("", remoteformat.ObjectManifest)); !errors.Is(err, objstore.ErrNotFound) {
			t.Errorf("manifest without %s: %v", o.Suffix(), err)
		}
		b.Clear()
		if _, err := uploader.Upload(t.Context(), b, seg, src, uploader.Options{}); err != nil {
			t.Fatal(err)
		}
		b.Add(objstore.Fault{Op: objstore.OpDelete, Key: o.Suffix(), Err: objstore.ErrThrottled})
		if err := uploader.Delete(t.Context(), b, "", seg); !errors.Is(err, objstore.ErrThrottled) {
			t.Errorf("%v", err)
		}
		if _, err := b.Stat(t.Context(), seg.Object("", remoteformat.ObjectManifest)); !errors.Is(err, objstore.ErrNotFound) {
			t.Errorf("manifest outlives %s: %v", o.Suffix(), err)
		}
	}
}

func TestForeignObjectIsNotReplaced(t *testing.T) {
	b := objstore.NewMemory()
	seg, src := make10(t, 1, 0, recordbatch.CodecNone)
	if err := b.Put(t.Context(), seg.Object("", remoteformat.ObjectLog), bytes.NewReader([]byte("other")), 5, objstore.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := uploader.Upload(t.Context(), b, seg, src, uploader.Options{}); !errors.Is(err, objstore.ErrExists) {
		t.Errorf("%v", err)
	}
}

func TestDamagedDataIsNotUploaded(t *testing.T) {
	for name, damage := range map[string]func(*tier.Segment, *uploader.Source, []byte){
		"bit":        func(_ *tier.Segment, _ *uploader.Source, b []byte) { b[len(b)/2] ^= 1 },
		"cut":        func(_ *tier.Segment, s *uploader.Source, b []byte) { s.Size -= 5 },
		"range":      func(s *tier.Segment, _ *uploader.Source, b []byte) { s.End-- },
		"start":      func(s *tier.Segment, _ *uploader.Source, b []byte) { s.Start += 10 },
		"nothing":    func(_ *tier.Segment, s *uploader.Source, b []byte) { s.Size = 0 },
		"batch gone": func(_ *tier.Segment, s *uploader.Source, b []byte) { clear(b[:20]) },
	} {
		b := objstore.NewMemory()
		seg, src := make10(t, 1, 0, recordbatch.CodecNone)
		data := bytesOf(t, src)
		src.Log = bytes.NewReader(data)
		damage(seg, &src, data)
		if _, err := uploader.Upload(t.Context(), b, seg, src, uploader.Options{}); !errors.Is(err, uploader.ErrSource) {
			t.Errorf("%s: %v", name, err)
		}
		if left := keys(t, b); len(left) != 0 {
			t.Errorf("%s: stored %v", name, left)
		}
	}
}

func TestCompressedDataIsLeftAlone(t *testing.T) {
	for codec, format := range map[recordbatch.Codec]string{recordbatch.CodecNone: tier.FormatChunkedV1, recordbatch.CodecZstd: tier.FormatKafkaV1} {
		seg, src := make10(t, 1, 0, codec)
		res, err := uploader.Upload(t.Context(), objstore.NewMemory(), seg, src, uploader.Options{Write: remoteformat.WriteOptions{Compress: true}, SkipCompressed: true})
		if err != nil || res.Format != format {
			t.Errorf("%s: %s %v", codec, res.Format, err)
		}
	}
}

func TestRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seg, src := make10(t, 1, 0, recordbatch.CodecNone)
		l := rate.NewLimiter(rate.Limit(src.Size/10), 100)
		start := time.Now()
		if _, err := uploader.Upload(t.Context(), objstore.NewMemory(), seg, src, uploader.Options{Limiter: l}); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took < 9*time.Second || took > 12*time.Second {
			t.Errorf("took %s instead of 10 s", took)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		seg2, src2 := make10(t, 2, 0, recordbatch.CodecNone)
		if _, err := uploader.Upload(ctx, objstore.NewMemory(), seg2, src2, uploader.Options{Limiter: l}); err == nil {
			t.Error("upload outlives its context")
		}
	})
}

func TestFsck(t *testing.T) {
	b := objstore.NewMemory()
	put := func(key string) {
		if err := b.Put(t.Context(), key, bytes.NewReader([]byte("12345")), 5, objstore.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	var known []*tier.Segment
	for i := range byte(4) {
		seg, src := make10(t, i, int64(i)*100, recordbatch.CodecNone)
		res, err := uploader.Upload(t.Context(), b, seg, src, uploader.Options{Prefix: "p/", Write: remoteformat.WriteOptions{Rand: rand.Reader}})
		if err != nil {
			t.Fatal(err)
		}
		seg.State, seg.Format, seg.EventTime = tier.CopyFinished, res.Format, time.Now().UnixMilli()
		known = append(known, seg)
	}
	orphan, _ := make10(t, 50, 0, recordbatch.CodecNone)
	put(orphan.Object("p/", remoteformat.ObjectLog))
	foreign, _ := make10(t, 51, 0, recordbatch.CodecNone)
	foreign.TopicID = tp.UUID{5}
	put(foreign.Object("p/", remoteformat.ObjectLog))
	put("p/notes.txt")
	put("elsewhere/x")
	o := uploader.FsckOptions{Prefix: "p/", Now: time.Now(), MinAge: time.Hour}
	r, err := uploader.Fsck(t.Context(), b, known, o)
	if err != nil || !r.Clean() || r.Young != 1 || r.Foreign != 2 || r.Objects != 15 {
		t.Errorf("young: %+v %v", r, err)
	}
	if err := b.Delete(t.Context(), known[1].Object("p/", remoteformat.ObjectIndexes)); err != nil {
		t.Fatal(err)
	}
	put(known[2].Object("p/", remoteformat.ObjectLog)) // another size
	known[3].State = tier.CopyStarted
	o.Now, o.Repair = time.Now().Add(2*time.Hour), true
	r, err = uploader.Fsck(t.Context(), b, known, o)
	if err != nil || len(r.Orphans) != 1 || r.OrphanBytes != 5 || r.Removed != 1 || len(r.Dangling) != 1 || r.Dangling[0] != known[3] {
		t.Errorf("%+v %v", r, err)
	}
	got := fmt.Sprint(len(r.Missing))
	for _, m := range r.Missing {
		got += fmt.Sprint(" ", m.Segment.Start, ":", m.Size)
	}
	if got != "2 100:-1 200:5" {
		t.Errorf("missing %s", got)
	}
	if r, err = uploader.Fsck(t.Context(), b, known, o); err != nil || len(r.Orphans) != 0 || r.Foreign != 2 {
		t.Errorf("after repair: %+v %v", r, err)
	}
}

func TestDiscover(t *testing.T) {
	b := objstore.NewMemory()
	for _, n := range []byte{2, 0, 1} {
		seg, src := make10(t, n, int64(n)*100, recordbatch.CodecNone)
		if _, err := uploader.Upload(t.Context(), b, seg, src, uploader.Options{Prefix: "p/", Write: remoteformat.WriteOptions{Compress: n == 1}}); err != nil {
			t.Fatal(err)
		}
	}
	bad, _ := make10(t, 9, 900, recordbatch.CodecNone)
	if err := b.Put(t.Context(), bad.Object("p/", remoteformat.ObjectManifest), bytes.NewReader([]byte("{}")), 2, objstore.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	found, err := uploader.Discover(t.Context(), b, "p/")
	if err != nil || len(found) != 4 || !errors.Is(found[3].Err, remoteformat.ErrManifest) {
		t.Fatalf("%+v %v", found, err)
	}
	var segs tier.Segments
	for i, d := range found[:3] {
		want, src := make10(t, byte(i), int64(i)*100, recordbatch.CodecNone)
		want.State, want.TxnIndexEmpty, want.Format, want.ObjectBytes = tier.CopyFinished, true, tier.FormatKafkaV1, d.Segment.ObjectBytes
		if i == 1 {
			want.Format = tier.FormatChunkedV1
		}
		if d.Err != nil || !reflect.DeepEqual(d.Segment, want) || d.Segment.Size != src.Size {
			t.Errorf("%+v\ninstead of\n%+v %v", d.Segment, want, d.Err)
		}
		segs = append(segs, d.Segment)
	}
	if err := segs.Check(); err != nil {
		t.Error(err)
	}
}
