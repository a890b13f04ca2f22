package consumergroup

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/grouprecord"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

// TestRandomHistories lets members of both protocols come, go, crash and change their minds, answers get lost, writes fail, topics come, grow and
// go, and successors take over. No partition is ever used by two members that are in the group; and once it is quiet every partition has one
// owner and the group is Stable and balanced.
func TestRandomHistories(t *testing.T) {
	seeds := uint64(400)
	if testing.Short() {
		seeds = 40
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { history(t, rand.New(rand.NewPCG(seed, 1))) })
	}
}

type storm struct {
	*world
	r       *rand.Rand
	clients []*consumer
	olds    []*old
	born    int
}

func history(t *testing.T, r *rand.Rand) {
	s := &storm{world: newWorld(t), r: r}
	s.env.Config.Downgrade = false // TestMigration is about that
	s.env.Config.AssignmentMs = r.Int64N(2) * 1000
	s.env.Config.SizeMax = 6
	s.topic("a1", 4)
	s.topic("b1", 3)
	for range 120 {
		s.event()
		s.exclusive()
		if r.IntN(10) == 0 {
			g := s.reload()
			s.same("a successor knows another group", s.g, g)
			if r.IntN(2) == 0 {
				s.g = g
			}
		}
	}
	// The calm: who is there stays, the others' sessions end.
	s.topic("a1", 6)
	for range 40 {
		for _, c := range slices.Clone(s.clients) {
			c.obey(true)
			if err := c.beat(false); err != nil {
				s.again(c, err)
			}
			s.exclusive()
		}
		for _, o := range slices.Clone(s.olds) {
			if err := o.beat(); err != nil && !errors.Is(err, group.ErrRebalanceInProgress) {
				s.olds = slices.DeleteFunc(s.olds, func(other *old) bool { return other == o })
			}
			s.exclusive()
		}
		s.advance(4000)
	}
	s.converged()
}

func (s *storm) subscription() []string {
	return [][]string{{"a1"}, {"a1", "b1"}, {"b1"}, {"a1", "b1", "none", "a2"}}[s.r.IntN(4)]
}

func (s *storm) event() {
	switch n := s.r.IntN(20); {
	case n < 2:
		s.born++
		c := s.consumer(fmt.Sprint("m", s.born), s.subscription()...)
		if s.r.IntN(4) == 0 {
			c.instance = pointer(fmt.Sprint("i", s.r.IntN(2)))
		}
		if s.r.IntN(3) == 0 {
			c.regex, c.topics = pointer([]string{"a.*", "b.*", ".*1"}[s.r.IntN(3)]), nil
		}
		if s.r.IntN(3) == 0 {
			c.assignor = pointer([]string{"uniform", "range"}[s.r.IntN(2)])
		}
		if s.beat(c) {
			s.clients = append(s.clients, c)
		}
	case n == 2:
		s.born++
		o := s.old(fmt.Sprint("o", s.born), s.subscription()...)
		if s.g.State() != Empty && o.join(false) == nil {
			s.olds = append(s.olds, o)
		}
	case n < 10 && len(s.clients) > 0:
		c := s.clients[s.r.IntN(len(s.clients))]
		c.obey(s.r.IntN(3) > 0)
		s.beat(c)
	case n < 13 && len(s.olds) > 0:
		i := s.r.IntN(len(s.olds))
		if err := s.olds[i].beat(); err != nil && !errors.Is(err, group.ErrRebalanceInProgress) {
			s.olds = slices.Delete(s.olds, i, i+1)
		}
	case n == 13 && len(s.clients) > 0: // crashes or leaves
		i := s.r.IntN(len(s.clients))
		c := s.clients[i]
		s.clients = slices.Delete(s.clients, i, i+1)
		if s.r.IntN(2) == 0 && c.epoch > 0 {
			r := c.request()
			if r.Epoch = LeaveEpoch; c.instance != nil && s.r.IntN(2) == 0 {
				r.Epoch = LeaveStaticEpoch
			}
			if _, changes, err := s.g.Heartbeat(r, s.env, s.now); err == nil {
				s.take(changes)
			}
		}
	case n == 14 && len(s.clients) > 0: // changes its mind
		c := s.clients[s.r.IntN(len(s.clients))]
		if c.regex == nil {
			c.topics = s.subscription()
		} else {
			c.regex = pointer([]string{"a.*", "b.*", ""}[s.r.IntN(3)])
		}
		c.whole = true
	case n == 15 && len(s.olds) > 0:
		i := s.r.IntN(len(s.olds))
		errs, changes := s.g.Leave([]Leaver{{MemberID: s.olds[i].id}}, s.env, s.now)
		if errs[0] == nil {
			s.take(changes)
		}
		s.olds = slices.Delete(s.olds, i, i+1)
	case n == 16:
		s.topic([]string{"a1", "b1", "a2"}[s.r.IntN(3)], 1+s.r.IntN(3)+len(topicOf(s.env.Image, "a1")))
	case n == 17 && s.r.IntN(3) == 0:
		s.drop([]string{"b1", "a2"}[s.r.IntN(2)])
	default:
		s.advance(s.r.Int64N(15_000))
	}
}

func topicOf(img *metadata.Image, name string) []*metadata.Partition {
	if t := img.Topics[name]; t != nil {
		return t.Partitions
	}
	return nil
}

func pointer(s string) *string { return &s }

// beat sends a heartbeat whose answer may be lost, or whose records may not be written.
func (s *storm) beat(c *consumer) bool {
	if s.r.IntN(8) == 0 {
		before := s.reload()
		if _, changes, err := s.g.Heartbeat(c.request(), s.env, s.now); err == nil {
			changes.Undo()
		}
		s.same("what was not written is not undone", before, s.g)
		s.check()
		return false
	}
	err := c.beat(s.r.IntN(6) == 0)
	if err != nil {
		s.again(c, err)
	}
	return err == nil
}

// again has a client that was refused begin anew, or give up where it cannot.
func (s *storm) again(c *consumer, err error) {
	switch {
	case errors.Is(err, ErrFencedMemberEpoch), errors.Is(err, group.ErrUnknownMember):
		c.reset()
	case errors.Is(err, group.ErrGroupFull), errors.Is(err, group.ErrFencedInstance), errors.Is(err, ErrUnreleasedInstance):
		c.reset()
		s.clients = slices.DeleteFunc(s.clients, func(other *consumer) bool { return other == c })
	default:
		s.t.Fatal(err)
	}
}

// exclusive checks that no two clients use a partition that the group takes for members.
func (s *storm) exclusive() {
	s.t.Helper()
	user := map[tp.UUID]map[int32]string{}
	use := func(id string, owned map[tp.UUID]map[int32]bool) {
		if s.g.said[id] == nil {
			return // a zombie, which the group gave up
		}
		for t, partitions := range owned {
			for p := range partitions {
				if user[t] == nil {
					user[t] = map[int32]string{}
				}
				if other, twice := user[t][p]; twice {
					s.t.Fatalf("%v-%d is used by %s and by %s:\n%s", t[0], p, other, id, lasting(s.g))
				}
				user[t][p] = id
			}
		}
	}
	for _, c := range s.clients {
		use(c.id, c.owned)
	}
	for _, o := range s.olds {
		use(o.id, o.owned)
	}
}

func (s *storm) converged() {
	s.t.Helper()
	if state := s.g.State(); len(s.clients)+len(s.olds) == 0 {
		if state != Empty {
			s.t.Fatalf("everybody is gone, and the group is %s:\n%s", state, lasting(s.g))
		}
		return
	} else if state != Stable {
		s.t.Fatalf("the group is %s:\n%s", state, lasting(s.g))
	}
	if got, want := len(s.g.said), len(s.clients)+len(s.olds); got != want {
		s.t.Fatalf("%d members, but %d clients", got, want)
	}
	load := map[string]int{}
	owner := map[tp.UUID]map[int32]string{}
	add := func(id string, t tp.UUID, p int32) {
		load[id]++
		if owner[t] == nil {
			owner[t] = map[int32]string{}
		}
		owner[t][p] = id
	}
	for _, c := range s.clients {
		for t, partitions := range c.owned {
			for p := range partitions {
				add(c.id, t, p)
			}
		}
	}
	for _, o := range s.olds {
		for t, partitions := range o.owned {
			for p := range partitions {
				add(o.id, t, p)
			}
		}
	}
	uniform := s.g.assignor(s.env.Config) == "uniform"
	for _, id := range s.g.ids() {
		for _, t := range s.g.subscription(s.g.said[id], s.env.Image) {
			partitions := s.env.Image.TopicsByID[t].Partitions
			for p := range partitions {
				who := owner[t][int32(p)]
				if who == "" {
					s.t.Fatalf("nobody reads %s-%d, to which %s subscribes:\n%s", s.env.Image.TopicsByID[t].Name, p, id, lasting(s.g))
				}
				if uniform && load[who]-load[id] > 1 {
					s.t.Fatalf("%s has %d partitions, %s that may take %s-%d has %d:\n%s", who, load[who], id, s.env.Image.TopicsByID[t].Name, p, load[id], lasting(s.g))
				}
			}
		}
	}
	// Nothing is written when nothing happens.
	n := len(s.log)
	for _, c := range s.clients {
		if err := c.beat(false); err != nil {
			s.t.Fatal(err)
		}
	}
	if len(s.log) != n {
		e, _, _ := grouprecord.Parse(s.log[n].Key, s.log[n].Value)
		s.t.Fatalf("a quiet group writes %+v", e)
	}
}
