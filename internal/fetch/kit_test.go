package fetch

import (
	"context"
	"fmt"
	"io"
	"math"
	"reflect"
	"sync"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tier/reader"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

// fakeTier answers as told and counts.
type fakeTier struct {
	mu      sync.Mutex
	reads   int
	read    func(ctx context.Context, segs tier.Segments, offset int64, maxBytes int) (reader.Result, error)
	aborted func(from, upTo int64) ([]producerstate.AbortedTxn, bool, error)
	locate  func(offset int64) (int64, int64, error)
}

func (f *fakeTier) Read(ctx context.Context, segs tier.Segments, offset int64, maxBytes int, upTo int64, minOne bool) (reader.Result, error) {
	f.mu.Lock()
	f.reads++
	f.mu.Unlock()
	return f.read(ctx, segs, offset, maxBytes)
}

func (f *fakeTier) Aborted(_ context.Context, _ tier.Segments, from, upTo int64) ([]producerstate.AbortedTxn, bool, error) {
	return f.aborted(from, upTo)
}

func (f *fakeTier) Locate(_ context.Context, _ *tier.Segment, offset, _ int64) (int64, int64, error) {
	return f.locate(offset)
}

func (f *fakeTier) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.reads
}

// text is a tier read's result, in two pieces.
func text(s string, first, next int64) reader.Result {
	return reader.Result{Records: reader.Pieces{[]byte(s[:1]), []byte(s[1:])}, FirstOffset: first, NextOffset: next}
}

// hang is a read that lasts until its context ends.
func hang(ctx context.Context, _ tier.Segments, _ int64, _ int) (reader.Result, error) {
	<-ctx.Done()
	return reader.Result{}, fmt.Errorf("remote read: %w", ctx.Err())
}

type replicas map[tp.Partition]*partition.Partition

func (r replicas) Get(id tp.Partition) (*partition.Partition, bool) {
	p, ok := r[id]
	return p, ok
}

type world struct {
	t       *testing.T
	parts   replicas
	tier    *fakeTier
	service *Service
	failed  int // calls of TierFailed
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, parts: replicas{}, tier: &fakeTier{}}
	w.service = &Service{Replicas: w.parts, Tier: w.tier, Sessions: NewSessions(10), KeyPrefix: "p/", Validity: time.Minute,
		TierFailed: func(tp.Partition, error) { w.failed++ }}
	return w
}

const format = "kafka-log-v2"

// local makes a partition of batches of two records in its log.
func (w *world) local(topic string, batches int) *partition.Partition {
	w.t.Helper()
	return w.partition(topic, batches, 1<<20)
}

// smallSegment holds two batches of two records.
const smallSegment = 400

func (w *world) partition(topic string, batches int, segmentBytes int64) *partition.Partition {
	w.t.Helper()
	id := tp.Partition{Topic: topic}
	fs := vfs.NewMem()
	if err := fs.MkdirAll("/d"); err != nil {
		w.t.Fatal(err)
	}
	c := log.DefaultConfig()
	c.SegmentBytes, c.Tiered, c.LocalRetentionBytes, c.RetentionMs, c.SegmentMs = segmentBytes, true, 1, -1, math.MaxInt64
	l, err := log.Open(log.Options{FS: fs, Dir: "/d/" + id.String(), Partition: id, TopicID: tp.UUID{topic[0]}, Config: c, Now: time.Now()})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { l.Close() })
	p := partition.New(id, tp.UUID{topic[0]}, 1, l, 0, partition.Hooks{})
	p.Assume(alone(1, 3), time.Now())
	w.parts[id] = p
	for range batches {
		w.add(p, 2, nil)
	}
	return p
}

func (w *world) add(p *partition.Partition, n int, change func(*recordbatch.Builder)) {
	w.t.Helper()
	b := recordbatch.NewBuilder()
	if change != nil {
		change(b)
	}
	for range n {
		b.Add(recordbatch.Record{Timestamp: time.Now().UnixMilli(), Value: make([]byte, 50)})
	}
	raw, err := b.Build()
	if err != nil {
		w.t.Fatal(err)
	}
	w.append(p, raw)
}

func (w *world) append(p *partition.Partition, raw []byte) {
	w.t.Helper()
	if _, err := p.Append(partition.Write{Records: raw, Now: time.Now(), Internal: true}); err != nil {
		w.t.Error(err)
	}
}

// toTier lets the partition's sealed segments be in the tier only and returns the first local offset.
func (w *world) toTier(p *partition.Partition) int64 {
	w.t.Helper()
	var segs tier.Segments
	for i, s := range p.Log().Sealed() {
		segs = append(segs, &tier.Segment{ID: tp.UUID{9, byte(i)}, Topic: p.ID().Topic, TopicID: p.TopicID(), Start: s.Base, End: s.End, Size: s.Size, State: tier.CopyFinished, Format: format})
	}
	if err := p.SetRemote(segs, 0); err != nil {
		w.t.Fatal(err)
	}
	if _, err := p.Log().ApplyRetention(time.Now()); err != nil {
		w.t.Fatal(err)
	}
	o := p.Log().Offsets()
	if len(segs) == 0 || o.LogStart != 0 || o.LocalLogStart != segs.End()+1 {
		w.t.Fatalf("%d segments, %+v", len(segs), o)
	}
	return o.LocalLogStart
}

// tiered makes a partition of ten batches, of which the tier holds all but the last.
func (w *world) tiered(topic string) *partition.Partition {
	p := w.partition(topic, 10, smallSegment)
	w.toTier(p)
	return p
}

func part(topic string, offset int64) Part {
	return Part{Topic: topic, Offset: offset, MaxBytes: 1 << 20, CurrentEpoch: -1, LastFetchedEpoch: -1}
}

func request(parts ...Part) *Request {
	return &Request{Parts: parts, MaxWait: time.Second, MinBytes: 1, MaxBytes: 1 << 20, TierWait: 3 * time.Second}
}

// fetch answers and releases.
func (w *world) fetch(req *Request) []Result {
	w.t.Helper()
	results := w.service.Fetch(w.t.Context(), req)
	w.t.Cleanup(func() { release(results) })
	if len(results) != len(req.Parts) {
		w.t.Fatalf("%d results for %d partitions", len(results), len(req.Parts))
	}
	for id, p := range w.parts {
		if lists := reflect.ValueOf(p).Elem().FieldByName("watchers"); lists.Index(0).Len()+lists.Index(1).Len() != 0 {
			w.t.Errorf("watchers are left at %s", id)
		}
	}
	return results
}

// content is the bytes of a result.
func content(t *testing.T, r *Result) string {
	t.Helper()
	if r.View == nil {
		return string(r.Records.Bytes())
	}
	b, err := io.ReadAll(io.NewSectionReader(r.View, 0, int64(r.View.Size())))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// alone is the role of a partition whose only replica is leader.
func alone(leader, epoch int32) partition.Role {
	return partition.Role{Leader: leader, LeaderEpoch: epoch, Replicas: []int32{leader}, ISR: []int32{leader}}
}
