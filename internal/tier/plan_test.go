package tier

import (
	"fmt"
	"reflect"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/varve-io/varve/internal/tp"
)

func id(n byte) tp.UUID { return tp.UUID{15: n + 2} }

// seg is a finished remote segment of 100 bytes whose newest record is from second ts.
func seg(n byte, start, end, ts int64) *Segment {
	return &Segment{ID: id(n), Start: start, End: end, Size: 100, MaxTimestamp: ts * 1000, State: CopyFinished}
}

func with(s *Segment, state State, event int64) *Segment {
	s.State, s.EventTime = state, event*1000
	return s
}

var unlimited = Config{RetentionMs: -1, RetentionBytes: -1, LocalRetentionMs: -2, LocalRetentionBytes: -2, CopyLagBytes: -1}

func limits(f func(*Config)) Config {
	c := unlimited
	f(&c)
	return c
}

func TestPlan(t *testing.T) {
	local := []Local{{0, 9, 100, 10_000}, {10, 19, 100, 20_000}, {20, 29, 100, 30_000}}
	for _, c := range []struct {
		name string
		in   Input
		want Plan
	}{
		{"first upload", Input{Local: local, Stable: 30}, Plan{Copy: &Copy{0, 9}}},
		{"continues", Input{Local: local, Stable: 30, Remote: Segments{seg(1, 0, 9, 10)}}, Plan{Copy: &Copy{10, 19}}},
		{"border inside a local segment", Input{Local: local, Stable: 30, Remote: Segments{seg(1, 0, 13, 10)}}, Plan{Copy: &Copy{14, 19}}},
		{"all there", Input{Local: local, Stable: 40, Remote: Segments{seg(1, 0, 29, 10)}}, Plan{}},
		{"end is exactly stable", Input{Local: local, Stable: 10}, Plan{Copy: &Copy{0, 9}}},
		{"open transaction", Input{Local: local, Stable: 9}, Plan{}},
		{"tiering begun on a trimmed log", Input{Local: local, Stable: 30, LogStart: 12}, Plan{LogStart: 12, Copy: &Copy{12, 19}}},
		{"hole between tier and log", Input{Local: local[1:], Stable: 30, Remote: Segments{seg(1, 0, 4, 10)}}, Plan{}},
		{"copy under way", Input{Local: local, Stable: 30, Copying: id(1), Remote: Segments{with(seg(1, 0, 9, 10), CopyStarted, 5)}}, Plan{}},
		{"dead attempt", Input{Local: local, Stable: 30, Remote: Segments{with(seg(1, 0, 9, 10), CopyStarted, 5)}},
			Plan{Abandon: []tp.UUID{id(1)}, Copy: &Copy{0, 9}}},
		{"copying disabled", Input{Local: local, Stable: 30, Config: limits(func(c *Config) { c.CopyDisabled = true })}, Plan{}},
		{"deposed", Input{Local: local, Stable: 30, Remote: Segments{{ID: id(1), Start: 0, End: 9, State: CopyStarted, LeaderEpoch: 1}}}, Plan{}},
		{"time is strict", Input{Remote: Segments{seg(1, 0, 9, 40)}, Config: limits(func(c *Config) { c.RetentionMs = 60_000 })}, Plan{}},
		{"time", Input{Remote: Segments{seg(1, 0, 9, 39), seg(2, 10, 19, 41)}, Config: limits(func(c *Config) { c.RetentionMs = 60_000 })},
			Plan{LogStart: 10, Delete: []tp.UUID{id(1)}}},
		{"time stops at the first that stays", Input{Remote: Segments{seg(1, 0, 9, 50), seg(2, 10, 19, 1)}, Config: limits(func(c *Config) { c.RetentionMs = 60_000 })}, Plan{}},
		{"size", Input{Remote: Segments{seg(1, 0, 9, 10), seg(2, 10, 19, 10), seg(3, 20, 29, 10)}, ActiveSize: 50, Config: limits(func(c *Config) { c.RetentionBytes = 200 })},
			Plan{LogStart: 10, Delete: []tp.UUID{id(1)}}},
		{"size needs a whole segment", Input{Remote: Segments{seg(1, 0, 9, 10)}, ActiveSize: 99, Config: limits(func(c *Config) { c.RetentionBytes = 100 })}, Plan{}},
		{"size counts what is in both tiers once", Input{Local: local, Stable: 30, Remote: Segments{seg(1, 0, 9, 10), seg(2, 10, 19, 10), seg(3, 20, 29, 10)}, Config: limits(func(c *Config) { c.RetentionBytes = 300 })}, Plan{}},
		{"below log start", Input{LogStart: 15, Remote: Segments{seg(1, 0, 9, 10), seg(2, 10, 19, 10)}}, Plan{LogStart: 15, Delete: []tp.UUID{id(1)}}},
		{"deletion waits for locations", Input{Remote: Segments{with(seg(1, 0, 9, 10), DeleteStarted, 95), with(seg(2, 10, 19, 10), DeleteStarted, 90)},
			Config: limits(func(c *Config) { c.DeleteDelay = 10 * time.Second })}, Plan{Clean: []tp.UUID{id(2)}}},
		{"expired is not uploaded", Input{Local: local, Stable: 30, HighWatermark: 30, Config: limits(func(c *Config) { c.RetentionMs = 75_000 })},
			Plan{LogStart: 20, Skipped: 200, Copy: &Copy{20, 29}}},
		{"expired, but behind something that stays", Input{Local: local[1:], Stable: 30, HighWatermark: 30, Remote: Segments{seg(1, 0, 9, 99)}, Config: limits(func(c *Config) { c.RetentionMs = 75_000 })},
			Plan{Copy: &Copy{10, 19}}},
		{"expired remote and local", Input{Local: local[1:], Stable: 30, HighWatermark: 30, Remote: Segments{seg(1, 0, 9, 9)}, Config: limits(func(c *Config) { c.RetentionMs = 75_000 })},
			Plan{LogStart: 20, Delete: []tp.UUID{id(1)}, Skipped: 100, Copy: &Copy{20, 29}}},
		{"expired while it is copied", Input{Local: local, Stable: 30, HighWatermark: 30, Copying: id(1), Remote: Segments{with(seg(1, 0, 9, 10), CopyStarted, 5)},
			Config: limits(func(c *Config) { c.RetentionMs = 75_000 })}, Plan{}},
		{"not below the high watermark", Input{Local: local, Stable: 5, HighWatermark: 9, Config: limits(func(c *Config) { c.RetentionMs = 1 })}, Plan{}},
		{"lag by time", Input{Local: local, Stable: 30, Config: limits(func(c *Config) { c.CopyLagMs = 90_001 })}, Plan{}},
		{"lag by time reached", Input{Local: local, Stable: 30, Config: limits(func(c *Config) { c.CopyLagMs = 90_000 })}, Plan{Copy: &Copy{0, 9}}},
		{"lag by time, record from the future", Input{Local: []Local{{0, 9, 100, 200_000}}, Stable: 30, Config: limits(func(c *Config) { c.CopyLagMs = 90_000 })}, Plan{Copy: &Copy{0, 9}}},
		{"lag by bytes", Input{Local: local, Stable: 30, ActiveSize: 49, Config: limits(func(c *Config) { c.CopyLagMs, c.CopyLagBytes = -1, 250 })}, Plan{}},
		{"lag by bytes reached", Input{Local: local, Stable: 30, ActiveSize: 50, Config: limits(func(c *Config) { c.CopyLagMs, c.CopyLagBytes = -1, 250 })}, Plan{Copy: &Copy{0, 9}}},
		{"lag is local retention", Input{Local: local, Stable: 30, Config: limits(func(c *Config) { c.CopyLagMs, c.LocalRetentionMs = -1, 95_000 })}, Plan{}},
		{"lag is unlimited", Input{Local: local, Stable: 30, ActiveSize: 1 << 40, Config: limits(func(c *Config) { c.CopyLagMs = -1 })}, Plan{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.in.Now = time.UnixMilli(100_000)
			if c.in.Config == (Config{}) {
				c.in.Config = unlimited
			}
			if got := MakePlan(c.in); !reflect.DeepEqual(got, c.want) {
				t.Errorf("got  %s\nwant %s", show(got), show(c.want))
			}
		})
	}
}

func show(p Plan) string {
	s := fmt.Sprintf("%+v", p)
	if p.Copy != nil {
		s += fmt.Sprintf(" copy %+v", *p.Copy)
	}
	return s
}

func TestLag(t *testing.T) {
	local := []Local{{0, 9, 100, 0}, {10, 19, 100, 0}, {20, 29, 100, 0}}
	for _, c := range []struct {
		in              Input
		bytes, segments int64
	}{{Input{Local: local}, 300, 3}, {Input{Local: local, Remote: Segments{seg(1, 0, 14, 0)}}, 150, 2}, {Input{Local: local, Remote: Segments{seg(1, 0, 99, 0)}}, 0, 0},
		{Input{Local: local, Config: Config{CopyDisabled: true}}, 0, 0}, {Input{Local: local, LogStart: 10}, 200, 2}, {Input{ActiveSize: 5}, 0, 0}} {
		if b, s := Lag(c.in); b != c.bytes || s != c.segments {
			t.Errorf("%+v: %d bytes, %d segments", c.in, b, s)
		}
	}
}

func TestLookups(t *testing.T) {
	ss := Segments{with(seg(9, 0, 9, 0), DeleteStarted, 0), seg(1, 10, 19, 0), seg(2, 20, 29, 0), with(seg(3, 30, 39, 0), CopyStarted, 0)}
	ss[1].TxnIndexEmpty = true
	if err := ss.Check(); err != nil {
		t.Error(err)
	}
	for offset, want := range map[int64]*Segment{5: nil, 10: ss[1], 19: ss[1], 20: ss[2], 29: ss[2], 30: nil} {
		if got := ss.Find(offset); got != want {
			t.Errorf("find %d: %+v", offset, got)
		}
	}
	if ss.Start() != 10 || ss.End() != 29 || ss.Bytes() != 200 || ss.NextWithTxnIndex(10) != ss[2] || ss.NextWithTxnIndex(30) != nil ||
		len(ss.From(20)) != 1 || ss.Get(id(3)) != ss[3] || ss.Get(id(7)) != nil {
		t.Error("look-ups differ")
	}
	for _, bad := range []Segments{{seg(1, 0, 9, 0), seg(2, 11, 12, 0)}, {seg(1, 0, 9, 0), seg(2, 9, 12, 0)}, {seg(1, 5, 4, 0)}, {seg(2, 10, 12, 0), seg(1, 0, 9, 0)}} {
		if bad.Check() == nil {
			t.Errorf("accepted %v", bad)
		}
	}
}

func TestStates(t *testing.T) {
	legal := map[[2]State]bool{{0, 0}: true, {0, 1}: true, {0, 2}: true, {1, 1}: true, {1, 2}: true, {2, 2}: true, {2, 3}: true, {3, 3}: true}
	for from := CopyStarted; from <= DeleteFinished; from++ {
		for to := CopyStarted; to <= DeleteFinished; to++ {
			if from.CanBecome(to) != legal[[2]State{from, to}] {
				t.Errorf("%s to %s", from, to)
			}
		}
	}
}

// world drives the planner as a leader does, with attempts that die and leaders that change.
type world struct {
	in     Input
	nextID byte
	end    int64 // of the log, exclusive
}

func (w *world) step(t *rapid.T, p Plan) {
	if p.LogStart < w.in.LogStart {
		t.Fatalf("log start falls from %d to %d", w.in.LogStart, p.LogStart)
	}
	w.unexpired(t, p)
	change := func(id tp.UUID, to State) {
		s := *w.in.Remote.Get(id)
		if !s.State.CanBecome(to) {
			t.Fatalf("%s to %s", s.State, to)
		}
		s.State, s.EventTime = to, w.in.Now.UnixMilli()
		for i := range w.in.Remote {
			if w.in.Remote[i].ID == id {
				w.in.Remote[i] = &s
			}
		}
	}
	for _, id := range p.Abandon {
		change(id, DeleteStarted)
	}
	w.in.LogStart = p.LogStart
	for _, id := range p.Delete {
		change(id, DeleteStarted)
	}
	for _, id := range p.Clean {
		var left Segments
		for _, s := range w.in.Remote {
			if s.ID != id {
				left = append(left, s)
			}
		}
		w.in.Remote = left
	}
	if p.Copy != nil {
		end := w.in.Remote.End()
		if end >= 0 && p.Copy.Start != end+1 || p.Copy.End >= w.in.Stable || p.Copy.End < p.Copy.Start {
			t.Fatalf("copy %+v, tier ends at %d, stable %d", p.Copy, end, w.in.Stable)
		}
		w.nextID++
		s := &Segment{ID: id(w.nextID), Start: p.Copy.Start, End: p.Copy.End, Size: p.Copy.End - p.Copy.Start + 1, MaxTimestamp: w.maxTimestamp(*p.Copy), LeaderEpoch: w.in.LeaderEpoch}
		at := len(w.in.Remote)
		for at > 0 && w.in.Remote[at-1].Start > s.Start {
			at--
		}
		w.in.Remote = append(w.in.Remote[:at:at], append(Segments{s}, w.in.Remote[at:]...)...)
		w.in.Copying = s.ID
	}
}

func (w *world) maxTimestamp(c Copy) int64 {
	ts := int64(-1)
	for _, l := range w.in.Local {
		if l.End >= c.Start && l.Start <= c.End {
			ts = max(ts, l.MaxTimestamp)
		}
	}
	return ts
}

// unexpired checks that whatever the plan drops is older than retention, beyond the size limit, or below the log start.
func (w *world) unexpired(t *rapid.T, p Plan) {
	c := w.in.Config
	total := w.in.ActiveSize
	oldEnough := func(ts int64) bool { return c.RetentionMs >= 0 && w.in.Now.UnixMilli()-ts > c.RetentionMs }
	end := w.in.Remote.End()
	total += w.in.Remote.Bytes()
	for _, l := range w.in.Local {
		if l.End > end {
			total += min(l.Size, l.End-end)
		}
	}
	for _, id := range p.Delete {
		s := w.in.Remote.Get(id)
		if s.State != CopyFinished || s.ID == w.in.Copying {
			t.Fatalf("deletes %+v", s)
		}
		total -= s.Size
		if s.End >= w.in.LogStart && !oldEnough(s.MaxTimestamp) && (c.RetentionBytes < 0 || total < c.RetentionBytes) {
			t.Fatalf("deletes %+v at %d with %d bytes left, %+v", s, w.in.Now.UnixMilli(), total, c)
		}
	}
	for _, l := range w.in.Local {
		if l.End <= end || l.End >= p.LogStart || l.End < w.in.LogStart {
			continue
		}
		total -= min(l.Size, l.End-end)
		if !oldEnough(l.MaxTimestamp) && (c.RetentionBytes < 0 || total < c.RetentionBytes) {
			t.Fatalf("drops local %+v, %+v", l, c)
		}
	}
}

func TestPlannerKeepsTierContiguous(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &world{in: Input{Now: time.UnixMilli(1_000_000)}}
		w.in.Config = Config{RetentionMs: rapid.SampledFrom([]int64{-1, 500, 5000}).Draw(t, "ms"), RetentionBytes: rapid.SampledFrom([]int64{-1, 30, 300}).Draw(t, "bytes"),
			LocalRetentionMs: -2, LocalRetentionBytes: -2, CopyLagMs: rapid.SampledFrom([]int64{0, 300}).Draw(t, "lag"), CopyLagBytes: -1, DeleteDelay: 100 * time.Millisecond}
		steps := rapid.IntRange(1, 60).Draw(t, "steps")
		for range steps {
			w.in.Now = w.in.Now.Add(time.Duration(rapid.IntRange(0, 400).Draw(t, "wait")) * time.Millisecond)
			switch rapid.IntRange(0, 6).Draw(t, "what") {
			case 0, 1: // one byte per offset
				n := rapid.Int64Range(1, 20).Draw(t, "n")
				w.in.Local = append(w.in.Local, Local{w.end, w.end + n - 1, n, w.in.Now.UnixMilli() - rapid.Int64Range(0, 1000).Draw(t, "age")})
				w.end += n
				w.in.HighWatermark = w.end
				w.in.Stable = max(w.in.Stable, rapid.Int64Range(0, w.end).Draw(t, "stable"))
			case 2: // the upload ends
				if !w.in.Copying.IsZero() {
					s := *w.in.Remote.Get(w.in.Copying)
					s.State = CopyFinished
					for i := range w.in.Remote {
						if w.in.Remote[i].ID == s.ID {
							w.in.Remote[i] = &s
						}
					}
					w.in.Copying = tp.UUID{}
				}
			case 3: // the attempt dies, with its leader or not; another leader has other borders
				w.in.Copying = tp.UUID{}
				w.in.LeaderEpoch++
				if n := len(w.in.Local); n > 1 && rapid.Bool().Draw(t, "merge") {
					a, b := w.in.Local[n-2], w.in.Local[n-1]
					w.in.Local = append(w.in.Local[:n-2:n-2], Local{a.Start, b.End, a.Size + b.Size, max(a.MaxTimestamp, b.MaxTimestamp)})
				}
			case 4: // local retention trims what is in the tier or below the log start
				for len(w.in.Local) > 0 && (w.in.Local[0].End <= w.in.Remote.End() || w.in.Local[0].End < w.in.LogStart) {
					w.in.Local = w.in.Local[1:]
				}
			case 5: // DeleteRecords
				w.in.LogStart = max(w.in.LogStart, rapid.Int64Range(0, w.in.HighWatermark).Draw(t, "delete records"))
			case 6:
			}
			w.step(t, MakePlan(w.in))
			if err := w.in.Remote.Check(); err != nil {
				t.Fatal(err)
			}
			// Everything from the log start on is in the tier or here.
			at := w.in.LogStart
			for at < w.end {
				s := w.in.Remote.Find(at)
				next := at
				if s != nil {
					next = s.End + 1
				}
				for _, l := range w.in.Local {
					if l.Start <= at && at <= l.End {
						next = max(next, l.End+1)
					}
				}
				if next == at {
					t.Fatalf("offset %d is nowhere", at)
				}
				at = next
			}
		}
		// Left alone, the planner finishes: all that is sealed and stable is in the tier, nothing dangles.
		w.in.Stable = w.end
		for range 2*len(w.in.Local) + 10 {
			w.in.Now = w.in.Now.Add(time.Second)
			if !w.in.Copying.IsZero() {
				s := *w.in.Remote.Get(w.in.Copying)
				s.State = CopyFinished
				for i := range w.in.Remote {
					if w.in.Remote[i].ID == s.ID {
						w.in.Remote[i] = &s
					}
				}
				w.in.Copying = tp.UUID{}
			}
			w.step(t, MakePlan(w.in))
		}
		for _, s := range w.in.Remote {
			if s.State != CopyFinished {
				t.Fatalf("dangling %+v", s)
			}
		}
		if end := max(w.in.Remote.End()+1, w.in.LogStart); end < w.end {
			t.Fatalf("tier ends at %d of %d", end, w.end)
		}
		if b, n := Lag(w.in); b != 0 || n != 0 {
			t.Fatalf("lag %d bytes, %d segments", b, n)
		}
	})
}
