package follower

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

var (
	id    = tp.Partition{Topic: "t"}
	topic = tp.UUID{7}
	start = time.UnixMilli(1_000_000)
)

func replica(t *testing.T, self int32) *partition.Partition {
	t.Helper()
	fs := vfs.NewMem()
	if err := fs.MkdirAll("/d"); err != nil {
		t.Fatal(err)
	}
	c := log.DefaultConfig()
	c.SegmentBytes, c.Tiered, c.LocalRetentionBytes, c.RetentionMs = 400, true, 1, -1
	l, err := log.Open(log.Options{FS: fs, Dir: "/d/t-0", Partition: id, TopicID: topic, Config: c, Now: start})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return partition.New(id, topic, self, l, 0, partition.Hooks{})
}

// pair is a leader, broker 2, and a follower, broker 1, with the machine under test.
type pair struct {
	t        *testing.T
	leader   *partition.Partition
	part     *partition.Partition
	m        *Machine
	config   Config
	now      time.Time
	epoch    int32
	sequence int32
}

func newPair(t *testing.T) *pair {
	p := &pair{t: t, leader: replica(t, 2), part: replica(t, 1), now: start, config: Config{Tiered: true, FromTier: true, Backoff: time.Second}}
	p.m = New(p.part, func() Config { return p.config })
	p.elect(2, 1)
	return p
}

// elect makes a broker lead in an epoch, 2 on the leader's side and on the follower's.
func (p *pair) elect(leader, epoch int32) {
	p.epoch = epoch
	r := partition.Role{Leader: leader, LeaderEpoch: epoch, PartitionEpoch: epoch, Replicas: []int32{1, 2}, ISR: []int32{2}}
	p.leader.Assume(r, p.now)
	p.part.Assume(r, p.now)
}

func (p *pair) must(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

// write appends batches of two records of one idempotent producer.
func (p *pair) write(batches int) {
	p.t.Helper()
	for range batches {
		b := recordbatch.NewBuilder()
		b.ProducerID, b.ProducerEpoch, b.BaseSequence = 9, 0, p.sequence
		p.sequence += 2
		for range 2 {
			b.Add(recordbatch.Record{Timestamp: p.now.UnixMilli(), Value: make([]byte, 50)})
		}
		raw, err := b.Build()
		p.must(err)
		_, err = p.leader.Append(partition.Write{Records: raw, Now: p.now})
		p.must(err)
	}
}

// strays has the follower lead in epoch 2 and write batches that nobody takes over.
func (p *pair) strays(batches int) {
	p.t.Helper()
	p.part.Assume(partition.Role{Leader: 1, LeaderEpoch: 2, PartitionEpoch: 2, Replicas: []int32{1, 2}, ISR: []int32{1, 2}}, p.now)
	lost, next := p.leader, p.sequence
	p.leader = p.part
	p.write(batches)
	p.leader, p.sequence = lost, next
}

// tier makes everything sealed at the leader known as tiered, on both sides if both know it.
func (p *pair) tier(both bool) tier.Segments {
	p.t.Helper()
	var segs tier.Segments
	for i, s := range p.leader.Log().Sealed() {
		segs = append(segs, &tier.Segment{ID: tp.UUID{9, byte(i)}, Topic: id.Topic, TopicID: topic, Start: s.Base, End: s.End, Size: s.Size, State: tier.CopyFinished})
	}
	p.must(p.leader.SetRemote(segs, 0))
	if both {
		p.must(p.part.SetRemote(segs, 0))
	}
	return segs
}

func (p *pair) trim() {
	p.t.Helper()
	_, err := p.leader.Log().ApplyRetention(p.now)
	p.must(err)
}

// answer is what the leader says to a fetch.
func (p *pair) answer(s Step) Answer {
	p.t.Helper()
	m, err := p.leader.Offsets(s.LeaderEpoch)
	switch {
	case errors.Is(err, partition.ErrFencedEpoch):
		return Answer{Code: Fenced, Err: err}
	case err != nil:
		return Answer{Code: TryAgain, Err: err}
	}
	if s.LastEpoch >= 0 {
		switch epoch, end := p.leader.EndOffsetForEpoch(s.LastEpoch); {
		case epoch < 0 || s.Offset < m.LogStart:
			return Answer{Code: OutOfRange, Err: errors.New("out of range")}
		case epoch < s.LastEpoch || end < s.Offset:
			return Answer{Diverging: true, Epoch: epoch, EndOffset: end, HighWatermark: m.HighWatermark, LogStart: m.LogStart}
		}
	}
	a := Answer{HighWatermark: m.HighWatermark, LogStart: m.LogStart}
	switch {
	case s.Offset < m.LogStart || s.Offset > m.End:
		a.Code, a.Err = OutOfRange, errors.New("out of range")
	case s.Offset < m.LocalLogStart:
		a.Code, a.Err = MovedToTier, errors.New("moved to the tier")
	default:
		v, err := p.leader.Log().Read(s.Offset, 500, m.End, true)
		p.must(err)
		a.Records, err = v.AppendTo(nil)
		p.must(err)
		v.Release()
	}
	return a
}

func (p *pair) offsets(s Step) Offsets {
	p.t.Helper()
	m, err := p.leader.Offsets(s.LeaderEpoch)
	p.must(err)
	o := Offsets{Start: m.LogStart, LocalStart: m.LocalLogStart, End: m.End, Pending: -1}
	if s.Pending {
		o.Pending = m.PendingUpload()
	}
	return o
}

// state is what the bucket has at the end of a segment.
func (p *pair) state(s *tier.Segment) ([]leaderepoch.Entry, []byte) {
	p.t.Helper()
	r, err := p.leader.Log().UploadRange(s.Start, s.End+1)
	p.must(err)
	defer r.Close()
	epochs, err := leaderepoch.Parse(r.LeaderEpochs)
	p.must(err)
	return epochs, r.ProducerSnapshot
}

// run lets the follower go on until it is level, and says by which kinds of steps it got there.
func (p *pair) run() (kinds string) {
	p.t.Helper()
	saved := map[tp.UUID][2]any{}
	for _, s := range p.part.Remote() {
		if s.Start >= p.leader.Log().Offsets().LocalLogStart {
			e, b := p.state(s)
			saved[s.ID] = [2]any{e, b}
		}
	}
	for range 200 {
		s := p.m.Next(p.now)
		switch s.Kind {
		case Fetch:
			kinds += "f"
			a := p.answer(s)
			p.m.Fetched(s, a, p.now)
			if p.m.Level() && len(a.Records) == 0 {
				return kinds
			}
		case Ask:
			kinds += "a"
			p.m.Listed(s, p.offsets(s), nil, p.now)
		case Load:
			kinds += "l"
			kept, ok := saved[s.Segment.ID]
			if !ok {
				p.t.Fatal("a segment that was not saved is loaded")
			}
			p.m.Loaded(s, kept[0].([]leaderepoch.Entry), kept[1].([]byte), nil, p.now)
		case Wait:
			kinds += "w"
			p.now = s.Until
		default:
			return kinds + "."
		}
	}
	p.t.Fatal("it never gets there:", kinds)
	return ""
}

// same compares what both sides have: lineage, producers, and bytes as far as both have them.
func (p *pair) same() {
	p.t.Helper()
	a, b := p.leader.Log(), p.part.Log()
	if a.Offsets().End != b.Offsets().End {
		p.t.Fatalf("leader ends at %d, follower at %d", a.Offsets().End, b.Offsets().End)
	}
	if x, y := fmt.Sprint(a.Epochs()), fmt.Sprint(b.Epochs()); x != y {
		p.t.Fatalf("lineage of the leader %s, of the follower %s", x, y)
	}
	strip := func(l *log.Log) (out []producerstate.Active) {
		for _, s := range l.Producers(p.now) {
			s.LastTimestamp = 0
			out = append(out, s)
		}
		return out
	}
	if x, y := fmt.Sprint(strip(a)), fmt.Sprint(strip(b)); x != y {
		p.t.Fatalf("producers of the leader %s, of the follower %s", x, y)
	}
	for at := max(a.Offsets().LocalLogStart, b.Offsets().LocalLogStart); at < a.Offsets().End; {
		x, err := a.Read(at, 1, a.Offsets().End, true)
		p.must(err)
		y, err := b.Read(at, 1, b.Offsets().End, true)
		p.must(err)
		xb, _ := x.AppendTo(nil)
		yb, _ := y.AppendTo(nil)
		if !bytes.Equal(xb, yb) {
			p.t.Fatalf("batches at %d differ", at)
		}
		at = x.NextOffset
		x.Release()
		y.Release()
	}
}

func TestCopiesWhatIsLocal(t *testing.T) {
	p := newPair(t)
	p.config = Config{Backoff: time.Second}
	p.write(9)
	if kinds := p.run(); kinds != "ffffff" {
		t.Fatal(kinds)
	}
	p.same()
}

// The empty follower asks before it fetches, and so jumps although the leader still has offset 0 (KIP-1023's known hole).
func TestStartsBehindTheTier(t *testing.T) {
	for _, trimmed := range []bool{false, true} {
		p := newPair(t)
		p.write(5)
		p.elect(2, 3)
		p.write(4)
		segs := p.tier(true)
		kept := map[tp.UUID][2]any{}
		for _, s := range segs {
			e, b := p.state(s)
			kept[s.ID] = [2]any{e, b}
		}
		if trimmed {
			p.trim()
		}
		s := p.m.Next(p.now)
		if s.Kind != Ask || !s.Pending {
			t.Fatalf("%+v", s)
		}
		p.m.Listed(s, p.offsets(s), nil, p.now)
		s = p.m.Next(p.now)
		if s.Kind != Load || s.Segment != segs[len(segs)-1] {
			t.Fatalf("%+v", s)
		}
		last := kept[s.Segment.ID]
		if e := p.m.Loaded(s, last[0].([]leaderepoch.Entry), last[1].([]byte), nil, p.now); !e.Restarted || !e.Checkpoint {
			t.Fatalf("%+v", e)
		}
		if o := p.part.Log().Offsets(); o.LogStart != 0 || o.LocalLogStart != segs.End()+1 || o.End != segs.End()+1 {
			t.Fatalf("%+v", o)
		}
		if kinds := p.run(); kinds[0] != 'f' {
			t.Fatal(kinds)
		}
		p.same()
		// It can lead at once: the producer goes on, and a repeated batch is known.
		p.part.Assume(partition.Role{Leader: 1, LeaderEpoch: 9, PartitionEpoch: 9, Replicas: []int32{1, 2}, ISR: []int32{1}}, p.now)
		p.leader = p.part
		p.write(1)
		p.sequence -= 2
		b := recordbatch.NewBuilder()
		b.ProducerID, b.ProducerEpoch, b.BaseSequence = 9, 0, p.sequence
		b.Add(recordbatch.Record{Timestamp: p.now.UnixMilli(), Value: make([]byte, 50)})
		b.Add(recordbatch.Record{Timestamp: p.now.UnixMilli(), Value: make([]byte, 50)})
		raw, err := b.Build()
		p.must(err)
		if r, err := p.part.Append(partition.Write{Records: raw, Now: p.now}); err != nil || !r.Duplicate {
			t.Fatal(r, err)
		}
	}
}

func TestOptionOffCopiesWhatTheLeaderHas(t *testing.T) {
	p := newPair(t)
	p.config.FromTier = false
	p.write(9)
	p.tier(true)
	if kinds := p.run(); kinds != "ffffff" {
		t.Fatal(kinds)
	}
	p.same()
}

// Whatever goes wrong on the way is tried again, with growing pauses, and leaves the log as it was until it succeeds.
func TestTroubleOnTheWay(t *testing.T) {
	p := newPair(t)
	p.write(9)
	segs := p.tier(false)
	last := segs[len(segs)-1]
	epochs, snapshot := p.state(last)
	p.trim()
	failed := errors.New("store is down")
	expect := func(kind Kind) Step {
		t.Helper()
		for {
			s := p.m.Next(p.now)
			if s.Kind == Wait {
				if s.Until.Sub(p.now) > time.Second {
					t.Fatal("pause of", s.Until.Sub(p.now))
				}
				p.now = s.Until
				continue
			}
			if s.Kind != kind {
				t.Fatalf("step of kind %d, want %d", s.Kind, kind)
			}
			if o := p.part.Log().Offsets(); o.End != 0 {
				t.Fatalf("the log has changed already: %+v", o)
			}
			return s
		}
	}
	for range 12 {
		s := expect(Ask)
		p.m.Listed(s, Offsets{}, failed, p.now)
	}
	if phase, err := p.m.Phase(); phase != BackingOff || !errors.Is(err, failed) {
		t.Fatal(phase, err)
	}
	s := expect(Ask)
	p.m.Listed(s, p.offsets(s), nil, p.now) // the image here does not know the segment yet
	if _, err := p.m.Phase(); !errors.Is(err, errNoSegment) {
		t.Fatal(err)
	}
	p.must(p.part.SetRemote(segs, 0))
	s = expect(Ask)
	p.m.Listed(s, Offsets{Start: 0, LocalStart: 10, End: 18, Pending: -1}, nil, p.now) // a leader that does not know yet
	if _, err := p.m.Phase(); !errors.Is(err, errPendingUnknown) {
		t.Fatal(err)
	}
	for _, err := range []error{failed, errors.New("segment is gone")} {
		s = expect(Ask)
		p.m.Listed(s, p.offsets(s), nil, p.now)
		s = expect(Load)
		p.m.Loaded(s, nil, nil, err, p.now)
	}
	s = expect(Ask)
	p.m.Listed(s, p.offsets(s), nil, p.now)
	s = expect(Load)
	p.m.Loaded(s, epochs, []byte("damaged"), nil, p.now)
	if phase, err := p.m.Phase(); phase != BackingOff || err == nil {
		t.Fatal(phase, err)
	}
	// A leader that is elected in the middle: what was asked of the old one counts for nothing.
	s = expect(Ask)
	p.elect(2, 7)
	if e := p.m.Listed(s, p.offsets(Step{LeaderEpoch: 7, Pending: true}), nil, p.now); e != (Effect{}) {
		t.Fatalf("%+v", e)
	}
	s = expect(Ask)
	if s.LeaderEpoch != 7 {
		t.Fatalf("%+v", s)
	}
	p.m.Listed(s, p.offsets(s), nil, p.now)
	s = expect(Load)
	p.elect(2, 8)
	if e := p.m.Loaded(s, epochs, snapshot, nil, p.now); e.Restarted {
		t.Fatal("state of another epoch was used")
	}
	s = expect(Ask)
	p.m.Listed(s, p.offsets(s), nil, p.now)
	s = expect(Load)
	p.m.Loaded(s, epochs, snapshot, nil, p.now)
	p.run()
	p.same()
}

func TestCutsWhereTheLogsPart(t *testing.T) {
	p := newPair(t)
	p.config = Config{Backoff: time.Second}
	p.write(4)
	p.run()
	p.strays(3)
	p.elect(2, 4)
	p.write(1)
	if kinds := p.run(); kinds != "ffff" && kinds != "fff" {
		t.Fatal(kinds)
	}
	p.same()
	if got := fmt.Sprint(p.part.Log().Epochs()); got != "[{1 0} {4 8}]" {
		t.Fatal(got)
	}
}

// The logs part below the leader's log start: where, nobody knows any more, and nothing of the follower's is kept.
func TestPartsBelowTheLogStart(t *testing.T) {
	p := newPair(t)
	p.config = Config{Backoff: time.Second}
	p.write(4)
	p.run()
	p.strays(6) // 8 to 20 of epoch 2
	p.elect(2, 4)
	p.write(4) // 8 to 16 of epoch 4
	if _, err := p.leader.DeleteRecords(13); err != nil {
		t.Fatal(err)
	}
	step := p.m.Next(p.now)
	p.m.Fetched(step, p.answer(step), p.now)
	if o := p.part.Log().Offsets(); o.LogStart != 13 || o.End != 13 {
		t.Fatalf("it keeps what the leader may never have had: %+v", o)
	}
	p.run()
	if o := p.part.Log().Offsets(); o.LogStart != 13 || o.End != 16 {
		t.Fatalf("%+v", o)
	}
}

// Elections without a write between them leave no trace, and no two logs disagree about them (KAFKA-10706).
func TestIdleElections(t *testing.T) {
	p := newPair(t)
	p.config = Config{Backoff: time.Second}
	p.write(2)
	p.run()
	for epoch := int32(2); epoch < 8; epoch++ {
		p.elect(2, epoch)
		p.run()
		p.same()
	}
	p.write(1)
	p.run()
	p.same()
	if got := fmt.Sprint(p.part.Log().Epochs()); got != "[{1 0} {7 4}]" {
		t.Fatal(got)
	}
}

func TestErrorsOfAFetch(t *testing.T) {
	p := newPair(t)
	p.config = Config{Backoff: time.Second}
	p.write(1)
	s := p.m.Next(p.now)
	if again := p.m.Next(p.now); again.Kind != Idle {
		t.Fatal("two steps at once")
	}
	p.m.Fetched(s, Answer{Code: TryAgain, Err: errors.New("not leader")}, p.now)
	if w := p.m.Next(p.now); w.Kind != Wait || w.Until.Sub(p.now) != backoffMin {
		t.Fatalf("%+v", w)
	}
	p.now = p.now.Add(backoffMin)
	s = p.m.Next(p.now)
	bad := p.answer(s)
	bad.Records = bytes.Clone(bad.Records)
	bad.Records[len(bad.Records)-1] ^= 1
	p.m.Fetched(s, bad, p.now)
	if phase, err := p.m.Phase(); phase != BackingOff || !errors.Is(err, recordbatch.ErrCorrupt) {
		t.Fatal(phase, err)
	}
	p.now = p.now.Add(time.Second)
	s = p.m.Next(p.now)
	p.m.Fetched(s, Answer{Code: Fenced, Err: errors.New("fenced")}, p.now)
	if phase, _ := p.m.Phase(); phase != Failed || p.m.Next(p.now.Add(time.Hour)).Kind != Idle {
		t.Fatal("a fenced follower goes on in its epoch")
	}
	p.elect(2, 2)
	p.run()
	p.same()
	// An answer that belongs to an epoch that is over is not applied, even if its offset fits.
	s = p.m.Next(p.now)
	p.write(1)
	a := p.answer(s)
	p.elect(2, 3)
	p.m.Fetched(s, a, p.now)
	if end := p.part.Log().Offsets().End; end != 2 {
		t.Fatal("applied, the log ends at", end)
	}
	p.m.Nothing(s)
	p.elect(1, 4)
	if s := p.m.Next(p.now); s.Kind != Idle {
		t.Fatalf("a leader follows: %+v", s)
	}
}

// Below the leader's log start a log that is not tiered begins anew there (case 2.1).
func TestBelowTheLogStart(t *testing.T) {
	p := newPair(t)
	p.config = Config{Backoff: time.Second}
	p.write(2)
	p.run()
	p.write(6)
	if _, err := p.leader.DeleteRecords(13); err != nil {
		t.Fatal(err)
	}
	p.leader.Log().SetConfig(func() log.Config { c := p.leader.Log().Config(); c.Tiered = false; return c }())
	p.run()
	o := p.part.Log().Offsets()
	if o.End != 16 || o.LogStart != 13 {
		t.Fatalf("%+v", o)
	}
}

// Whoever holds a machine may ask whose it is while another drives it into a new epoch (seen by the race detector).
func TestPartitionIsAskedForWhileTheEpochChanges(t *testing.T) {
	p := newPair(t)
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		for range 1000 {
			if p.m.Partition() != p.part {
				t.Error("another partition")
			}
		}
	}()
	for epoch := int32(2); epoch < 20; epoch++ {
		p.elect(2, epoch)
		p.m.Next(p.now)
	}
	<-asked
}
