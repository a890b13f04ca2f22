package fetch

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/varve-io/varve/internal/directfetch"
	"github.com/varve-io/varve/internal/tp"
)

func parts(names ...string) []Part {
	var out []Part
	for _, n := range names {
		out = append(out, Part{Topic: n})
	}
	return out
}

func topics(p []Part) string {
	s := ""
	for i := range p {
		s += p[i].Topic
	}
	return s
}

func begin(t *testing.T, s *Sessions, id, epoch int32, p []Part, forgotten ...Key) (*Session, []Part) {
	t.Helper()
	session, wanted, err := s.Begin(id, epoch, false, p, forgotten)
	if err != nil {
		t.Fatal(err)
	}
	return session, wanted
}

func TestSessionLife(t *testing.T) {
	s := NewSessions(10)
	x, wanted := begin(t, s, 0, InitialEpoch, parts("a", "b"))
	if x.ID() == 0 || topics(wanted) != "ab" || s.Len() != 1 {
		t.Fatalf("%d %v", x.ID(), wanted)
	}
	changed := Part{Topic: "b", Offset: 7}
	y, wanted := begin(t, s, x.ID(), 1, []Part{changed, {Topic: "c"}}, Key{Topic: "a"}, Key{Topic: "never"})
	if y != x || topics(wanted) != "bc" || wanted[0] != changed {
		t.Fatalf("%+v", wanted)
	}
	// An epoch that was used, or skipped, is refused and changes nothing.
	for _, epoch := range []int32{1, 3, math.MaxInt32} {
		if _, _, err := s.Begin(x.ID(), epoch, false, nil, []Key{{Topic: "b"}}); !errors.Is(err, ErrSessionEpoch) {
			t.Errorf("epoch %d: %v", epoch, err)
		}
	}
	if _, wanted = begin(t, s, x.ID(), 2, nil); topics(wanted) != "bc" {
		t.Errorf("%v", wanted)
	}
	if _, _, err := s.Begin(x.ID()+1, 1, false, nil, nil); !errors.Is(err, ErrSessionNotFound) {
		t.Errorf("%v", err)
	}
	// A new full fetch replaces the session, a final one ends it and is answered all the same.
	z, _ := begin(t, s, x.ID(), InitialEpoch, parts("d"))
	if s.Len() != 1 || z.ID() == 0 {
		t.Errorf("%d sessions", s.Len())
	}
	if none, wanted := begin(t, s, z.ID(), FinalEpoch, parts("e")); none.ID() != 0 || topics(wanted) != "e" || s.Len() != 0 {
		t.Errorf("%d %v", none.ID(), wanted)
	}
}

func TestSessionEpochsWrap(t *testing.T) {
	s := NewSessions(1)
	x, _ := begin(t, s, 0, InitialEpoch, parts("a"))
	x.epoch = math.MaxInt32
	begin(t, s, x.ID(), math.MaxInt32, nil)
	begin(t, s, x.ID(), 1, nil)
}

func TestSessionTopicIDs(t *testing.T) {
	s := NewSessions(1)
	p := []Part{{Topic: "a", TopicID: tp.UUID{1}}}
	x, _, err := s.Begin(0, InitialEpoch, true, p, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Begin(x.ID(), 1, false, parts("a"), nil); !errors.Is(err, ErrSessionTopicID) {
		t.Errorf("%v", err)
	}
	// The same name with another id is another partition: the topic was made anew.
	_, wanted, err := s.Begin(x.ID(), 1, true, []Part{{Topic: "a", TopicID: tp.UUID{2}}}, []Key{{TopicID: tp.UUID{1}}})
	if err != nil || len(wanted) != 1 || wanted[0].TopicID != (tp.UUID{2}) {
		t.Errorf("%v %v", wanted, err)
	}
}

func TestSessionsAreBounded(t *testing.T) {
	s := NewSessions(3)
	var ids []int32
	for i := range 3 {
		x, _ := begin(t, s, 0, InitialEpoch, parts(fmt.Sprint(i)))
		ids = append(ids, x.ID())
	}
	begin(t, s, ids[0], 1, nil) // used last
	begin(t, s, 0, InitialEpoch, parts("new"))
	if s.Len() != 3 {
		t.Errorf("%d sessions", s.Len())
	}
	begin(t, s, ids[0], 2, nil)
	if _, _, err := s.Begin(ids[1], 1, false, nil, nil); !errors.Is(err, ErrSessionNotFound) {
		t.Errorf("the one used least recently is still there: %v", err)
	}
	begin(t, s, ids[2], 1, nil)
	none := NewSessions(0)
	if x, wanted := begin(t, none, 0, InitialEpoch, parts("a")); x.ID() != 0 || len(wanted) != 1 || none.Len() != 0 {
		t.Errorf("%d %v", x.ID(), wanted)
	}
	if keep := (*Session)(nil).Filter(parts("a"), make([]Result, 1), false); len(keep) != 1 || !keep[0] {
		t.Error("without a session all is answered")
	}
}

func TestFilterAndRotation(t *testing.T) {
	s := NewSessions(1)
	x, wanted := begin(t, s, 0, InitialEpoch, parts("a", "b", "c", "d"))
	quiet := func() []Result {
		r := make([]Result, len(wanted))
		for i := range r {
			r[i] = Result{HighWatermark: 5, LastStable: 5}
		}
		return r
	}
	check := func(r []Result, full bool, want string) {
		t.Helper()
		got := ""
		for i, keep := range x.Filter(wanted, r, full) {
			if keep {
				got += wanted[i].Topic
			}
		}
		if got != want {
			t.Errorf("answered are %q, want %q", got, want)
		}
	}
	again := func(want string) {
		t.Helper()
		if _, wanted = begin(t, s, x.ID(), x.epoch, nil); topics(wanted) != want {
			t.Errorf("order is %q, want %q", topics(wanted), want)
		}
	}
	check(quiet(), true, "abcd")
	again("abcd")
	check(quiet(), false, "")
	again("abcd")
	// Data moves to the end, other news do not.
	r := quiet()
	r[0].Records = [][]byte{{1}}
	r[1].HighWatermark = 6
	r[2].Locations = []directfetch.Location{{}}
	check(r, false, "abc")
	again("bdac")
	r = quiet()
	r[0].HighWatermark = 6 // b, as it was
	r[1].LogStart = 1
	r[2].Err = errors.New("broken")
	r[3].Diverging = &Diverging{}
	check(r, false, "dac")
	again("bdac")
	// After an error a partition is answered again even if its marks are the same.
	r = quiet()
	r[0].HighWatermark, r[1].LogStart = 6, 1
	check(r, false, "a")
	// One that was forgotten meanwhile is not answered.
	begin(t, s, x.ID(), x.epoch, nil, Key{Topic: "d"})
	check(quiet(), true, "bac")
}
