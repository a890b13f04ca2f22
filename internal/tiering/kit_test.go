package tiering

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tier/reader"
	"github.com/varve-io/varve/internal/tier/uploader"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

var (
	id      = tp.Partition{Topic: "t"}
	topicID = tp.UUID{7}
)

const (
	deleteDelay = time.Minute
	interval    = 30 * time.Second
)

var errCrash = errors.New("the process has ended")

// process is one life of a broker. Its fate strikes at one step, before or after the step's effect; then nothing works.
type process struct {
	w      *world
	ctx    context.Context
	cancel context.CancelFunc

	mu    sync.Mutex
	steps int
	die   int // the step that it does not survive, 0 for none
	after bool
	dead  bool
}

// step carries out what is visible outside of the process.
func (p *process) step(do func() error) error {
	p.mu.Lock()
	if p.dead {
		p.mu.Unlock()
		return errCrash
	}
	p.steps++
	last := p.steps == p.die
	p.dead = last
	p.mu.Unlock()
	if !last {
		return do()
	}
	if p.after {
		_ = do()
	}
	p.cancel()
	return errCrash
}

// Image is the metadata as the process sees it.
func (p *process) Image() *metadata.Image { return p.w.img() }

// Do is the controller.
func (p *process) Do(_ context.Context, c controller.Command) (any, error) {
	if err := p.ctx.Err(); err != nil {
		return nil, err
	}
	p.w.commands.Lock()
	defer p.w.commands.Unlock()
	records, reply, err := c.Run(p.w.img(), controller.Env{Now: time.Now().UnixMilli()})
	if err == nil && len(records) > 0 {
		err = p.step(func() error { return p.w.apply(records...) })
	}
	if err == nil {
		err = p.w.follow(nil)
	}
	return reply, err
}

// bucket is the store as a process sees it.
type bucket struct {
	objstore.Bucket
	p *process
}

func (b bucket) Put(ctx context.Context, key string, body io.ReaderAt, size int64, o objstore.PutOptions) error {
	return b.p.step(func() error { return b.Bucket.Put(ctx, key, body, size, o) })
}

func (b bucket) Delete(ctx context.Context, key string) error {
	return b.p.step(func() error { return b.Bucket.Delete(ctx, key) })
}

// world is what outlives a process: the store, the metadata and the log.
type world struct {
	t      *testing.T
	store  *objstore.Faults
	part   *partition.Partition
	config tier.Config
	bytes  []byte // all that was appended
	events []Event

	rolled   func(*partition.Partition)
	commands sync.Mutex // one at a time

	mu    sync.Mutex
	image *metadata.Image
}

func (w *world) img() *metadata.Image {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.image
}

func (w *world) apply(records ...metadata.Record) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	next, err := w.image.Apply(records)
	if err == nil {
		w.image = next
	}
	return err
}

// follow lets the partition act on the image, as the broker does.
func (w *world) follow(*metadata.Image) error {
	_, s, ok := w.img().Partition(id)
	if !ok {
		w.part.Retire()
		return nil
	}
	w.part.Assume(partition.Role{Leader: s.Leader, LeaderEpoch: s.LeaderEpoch, PartitionEpoch: s.PartitionEpoch, Replicas: s.Replicas, ISR: s.ISR}, time.Now())
	if err := w.part.SetRemote(s.Remote, s.LogStart); err != nil {
		return err
	}
	_, err := w.part.Log().ApplyRetention(time.Now())
	return err
}

func newWorld(t *testing.T, batches int) *world {
	w := &world{t: t, store: objstore.WithFaults(objstore.NewMemory()), image: metadata.Empty(),
		config: tier.Config{RetentionMs: -1, RetentionBytes: -1, LocalRetentionMs: -2, LocalRetentionBytes: 1, CopyLagMs: 0, CopyLagBytes: 0}}
	w.must(w.apply(metadata.TopicRecord{Name: id.Topic, ID: topicID},
		metadata.PartitionRecord{Topic: topicID, Replicas: []int32{1}, ISR: []int32{1}, Leader: 1, LeaderEpoch: 3}))
	fs := vfs.NewMem()
	w.must(fs.MkdirAll("/d"))
	c := log.DefaultConfig()
	c.SegmentBytes, c.Tiered, c.LocalRetentionBytes, c.RetentionMs, c.SegmentMs = 400, true, 1, -1, math.MaxInt64
	l, err := log.Open(log.Options{FS: fs, Dir: "/d/t-0", Partition: id, TopicID: topicID, Config: c, Now: time.Now()})
	w.must(err)
	t.Cleanup(func() { l.Close() })
	w.part = partition.New(id, topicID, 1, l, 0, partition.Hooks{Rolled: func(p *partition.Partition) {
		if w.rolled != nil {
			w.rolled(p)
		}
	}})
	w.must(w.follow(nil))
	for range batches {
		w.add()
	}
	return w
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) add() {
	w.t.Helper()
	b := recordbatch.NewBuilder()
	for range 2 {
		b.Add(recordbatch.Record{Timestamp: time.Now().UnixMilli(), Value: make([]byte, 50)})
	}
	raw, err := b.Build()
	w.must(err)
	_, err = w.part.Append(partition.Write{Records: raw, Now: time.Now()})
	w.must(err)
	w.bytes = append(w.bytes, raw...) // stamped in place
}

// start begins a process's life; it dies at a step, if that is not 0.
func (w *world) start(die int, after bool) (*process, *Service) {
	p := &process{w: w, die: die, after: after}
	p.ctx, p.cancel = context.WithCancel(w.t.Context())
	s := New(Options{Self: 1, Bucket: bucket{w.store, p}, Upload: uploader.Options{Prefix: "p/"}, Control: p,
		Image: p.Image, Config: func(string) tier.Config { return w.config }, Forget: func(tp.UUID) {}, Interval: interval, DeleteDelay: deleteDelay, Workers: 2,
		Log: slog.New(slog.DiscardHandler), Observe: func(e Event) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.events = append(w.events, e)
		}})
	if _, _, living := w.img().Partition(id); living {
		s.Lead(w.part)
	}
	return p, s
}

// runs starts the service for the life of the process; the channel gives its end.
func (p *process) runs(s *Service) <-chan error {
	done := make(chan error, 1) // a test that has failed does not read it
	go func() { done <- s.Run(p.ctx) }()
	return done
}

// blockUpload holds up the next upload, before its indexes, until the channel is closed.
func (w *world) blockUpload() chan struct{} {
	release := make(chan struct{})
	w.store.Add(objstore.Fault{Op: objstore.OpPut, Key: ".indexes", Times: 1, Block: release})
	return release
}

// run lets a process live for a time, or until its fate strikes, and ends it. It returns the steps that it took.
func (w *world) run(die int, after bool, d time.Duration) int {
	p, s := w.start(die, after)
	done := p.runs(s)
	timer := time.NewTimer(d)
	select {
	case <-p.ctx.Done():
	case <-timer.C:
		p.cancel()
	}
	timer.Stop()
	w.must(<-done)
	return p.steps
}

// known are all segments that the metadata knows, of living and deleting topics.
func (w *world) known() []*tier.Segment {
	var out []*tier.Segment
	img := w.img()
	for _, t := range img.TopicsByID {
		for _, p := range t.Partitions {
			out = append(out, p.Remote...)
		}
	}
	for _, t := range img.DeletingTopics() {
		for _, p := range t.Partitions {
			out = append(out, p.Remote...)
		}
	}
	return out
}

// readable checks that every offset from the log start on can be read, from one tier or the other, as it was written.
func (w *world) readable() {
	w.t.Helper()
	r := reader.New(reader.Options{Bucket: w.store, Prefix: "p/", ReadAheadBytes: -1})
	defer r.Close()
	o := w.part.Log().Offsets()
	want := w.bytes
	for len(want) > 0 {
		h, err := recordbatch.ParseHeader(want)
		w.must(err)
		batch := want[:h.Size]
		want = want[h.Size:]
		if h.LastOffset() < o.LogStart {
			continue
		}
		var got []byte
		if h.BaseOffset >= o.LocalLogStart {
			v, err := w.part.Log().Read(h.BaseOffset, 1, o.End, true)
			if err != nil {
				w.t.Fatalf("offset %d in the log: %v", h.BaseOffset, err)
			}
			got, err = v.AppendTo(nil)
			v.Release()
			w.must(err)
		} else {
			res, err := r.Read(w.t.Context(), w.part.Remote(), max(h.BaseOffset, o.LogStart), 1, math.MaxInt64, true)
			if err != nil {
				w.t.Fatalf("offset %d in the tier: %v", h.BaseOffset, err)
			}
			got = res.Records.Bytes()
		}
		if !bytes.Equal(got, batch) {
			w.t.Fatalf("offset %d is not what was written", h.BaseOffset)
		}
	}
}

// clean checks that bucket and metadata agree, to the last object.
func (w *world) clean() {
	w.t.Helper()
	known := w.known()
	r, err := uploader.Fsck(w.t.Context(), w.store, known, uploader.FsckOptions{Prefix: "p/", Now: time.Now().Add(time.Hour), MinAge: time.Nanosecond, Ours: func(t tp.UUID) bool { return t == topicID }})
	w.must(err)
	if !r.Clean() || r.Foreign != 0 {
		w.t.Fatalf("%+v", r)
	}
	finished := 0
	for _, s := range known {
		if s.State == tier.CopyFinished {
			finished++
		}
	}
	if r.Objects != 3*finished {
		w.t.Fatalf("%d objects of %d segments", r.Objects, finished)
	}
	if err := w.part.Remote().Check(); err != nil {
		w.t.Fatal(err)
	}
}

// allTiered checks that all sealed segments are in the tier.
func (w *world) allTiered() {
	w.t.Helper()
	if o := w.part.Log().Offsets(); w.part.Remote().End() != o.ActiveBase-1 || o.LocalLogStart != o.ActiveBase {
		w.t.Fatalf("the tier ends at %d, the log is %+v", w.part.Remote().End(), o)
	}
}

// bubble runs a test with a clock of its own.
func bubble(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, test)
}
