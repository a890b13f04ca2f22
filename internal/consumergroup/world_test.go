package consumergroup

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/grouprecord"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

// world is a group, the topics it reads, a clock, and the log of its records.
type world struct {
	t       *testing.T
	g       *Group
	env     Env
	now     int64
	log     []grouprecord.Record
	classic *group.Group // what the group became
	ids     byte
}

func newWorld(t *testing.T) *world {
	return &world{t: t, g: New("g"), now: 1_000_000, env: Env{Image: metadata.Empty(), Classic: group.Config{SessionMinMs: 1, SessionMaxMs: 1 << 30, SizeMax: 100},
		Config: Config{SessionMs: 45_000, HeartbeatMs: 5000, SizeMax: 100, Assignors: []string{"uniform", "range"}, RegexMs: 600_000, Upgrade: true, Downgrade: true, Mixed: true}}}
}

// topics is an image with other topics.
func (w *world) change(topics func(map[string]*metadata.Topic)) {
	img := *w.env.Image
	img.Index++
	img.Topics = maps.Clone(img.Topics)
	topics(img.Topics)
	img.TopicsByID = map[tp.UUID]*metadata.Topic{}
	for _, t := range img.Topics {
		img.TopicsByID[t.ID] = t
	}
	w.env.Image = &img
}

func (w *world) topic(name string, partitions int) {
	w.change(func(topics map[string]*metadata.Topic) {
		t := &metadata.Topic{Name: name}
		if old := topics[name]; old != nil {
			t.ID = old.ID
		} else {
			w.ids++
			t.ID = tp.UUID{w.ids, 15: w.ids}
		}
		for range partitions {
			t.Partitions = append(t.Partitions, &metadata.Partition{})
		}
		topics[name] = t
	})
}

func (w *world) drop(name string) {
	w.change(func(topics map[string]*metadata.Topic) { delete(topics, name) })
}

// take writes what changed.
func (w *world) take(c *Changes) {
	w.t.Helper()
	for _, e := range c.Records {
		w.log = append(w.log, e.Record())
	}
	if c.Classic != nil {
		w.classic = c.Classic
	}
	w.check()
}

// check holds the group against what must always be so, and against what its records say.
func (w *world) check() {
	w.t.Helper()
	owner := map[tp.UUID]map[int32]string{}
	for _, id := range w.g.ids() {
		m := w.g.member(id)
		for _, owned := range []grouprecord.Owned{m.has.Assigned, m.has.Revoking} {
			for t, partitions := range owned {
				for p := range partitions {
					if other, twice := owner[t][p]; twice {
						w.t.Fatalf("%v-%d belongs to %s and to %s", t[0], p, other, id)
					}
					if owner[t] == nil {
						owner[t] = map[int32]string{}
					}
					owner[t][p] = id
				}
			}
		}
	}
	for id, k := range w.g.clocks {
		if w.g.said[id] == nil || k.session == 0 {
			w.t.Fatalf("the session of %s ends at %d", id, k.session)
		}
	}
	if !reflect.DeepEqual(owner, w.g.owners) {
		w.t.Fatalf("owners are %v, noted are %v", owner, w.g.owners)
	}
}

// reload is the group that a successor knows.
func (w *world) reload() *Group {
	w.t.Helper()
	g := New("g")
	for _, r := range w.log {
		e, ok, err := grouprecord.Parse(r.Key, r.Value)
		if err != nil || !ok || e.Group != "g" {
			w.t.Fatalf("%v %v %v", e, ok, err)
		}
		g.Apply(e)
	}
	g.Loaded(w.env.Config, w.now)
	return g
}

// lasting is all of a group that has to survive.
func lasting(g *Group) string {
	s := fmt.Sprintf("%v %v %v %v %v %v %v %v %d %v\n", g.epoch, g.target, g.stale, g.State(), g.topics, g.patterns, g.assignors, g.protocols, g.classics, g.statics)
	for _, id := range g.ids() {
		s += fmt.Sprintf("%s %+v %+v %v\n", id, g.said[id], g.has[id], g.targets[id])
	}
	for _, p := range slices.Sorted(maps.Keys(g.regexes)) {
		s += fmt.Sprintf("%s %+v\n", p, g.regexes[p])
	}
	return s
}

// same compares two groups but for the addresses of texts.
func (w *world) same(what string, a, b *Group) {
	w.t.Helper()
	equal := a.epoch == b.epoch && a.target == b.target && a.stale == b.stale && reflect.DeepEqual(a.said, b.said) && reflect.DeepEqual(a.has, b.has) &&
		reflect.DeepEqual(a.targets, b.targets) && reflect.DeepEqual(a.regexes, b.regexes) && reflect.DeepEqual(a.owners, b.owners) && maps.Equal(a.topics, b.topics) &&
		maps.Equal(a.patterns, b.patterns) && maps.Equal(a.assignors, b.assignors) && maps.Equal(a.protocols, b.protocols) && a.classics == b.classics && maps.Equal(a.statics, b.statics)
	if !equal {
		w.t.Fatalf("%s:\n%s\n%s", what, lasting(a), lasting(b))
	}
}

// advance lets time pass, with a tick at every deadline on the way.
func (w *world) advance(ms int64) {
	w.t.Helper()
	end := w.now + ms
	for due := w.g.NextDeadline(); due != 0 && due <= end && w.classic == nil; due = w.g.NextDeadline() {
		w.now = max(due, w.now)
		w.take(w.g.Tick(w.env, w.now))
	}
	w.now = end
}

// consumer is a client of the consumer protocol, as far as the group sees it.
type consumer struct {
	w        *world
	id       string
	instance *string
	topics   []string
	regex    *string
	assignor *string
	epoch    int32
	owned    map[tp.UUID]map[int32]bool
	wanted   grouprecord.Owned // the last assignment it was told
	whole    bool              // the next heartbeat says everything
}

func (w *world) consumer(id string, topics ...string) *consumer {
	return &consumer{w: w, id: id, topics: topics, owned: map[tp.UUID]map[int32]bool{}}
}

func (c *consumer) request() Heartbeat {
	r := Heartbeat{MemberID: c.id, Epoch: c.epoch, InstanceID: c.instance, RebalanceMs: -1, ClientID: "client", ClientHost: "/h"}
	if c.epoch == 0 || c.whole {
		r.RebalanceMs, r.Topics, r.Regex, r.Assignor = 60_000, c.topics, c.regex, c.assignor
		if r.Topics == nil && r.Regex == nil {
			r.Topics = []string{}
		}
	}
	r.Owned = Partitions{}
	for t, partitions := range c.owned {
		for p := range partitions {
			r.Owned[t] = append(r.Owned[t], p)
		}
	}
	return r
}

// beat sends a heartbeat. A lost answer changes the group and not the client.
func (c *consumer) beat(lost bool) error {
	c.w.t.Helper()
	a, changes, err := c.w.g.Heartbeat(c.request(), c.w.env, c.w.now)
	if err != nil {
		return err
	}
	c.w.take(changes)
	if lost {
		c.whole = true
		c.wanted = grouprecord.Owned{} // until it hears again it takes nothing on the word of older answers
		for t, partitions := range c.owned {
			for p := range partitions {
				set(c.wanted, t, p, 0)
			}
		}
		return nil
	}
	c.epoch, c.whole = a.Epoch, false
	if a.Assignment != nil {
		c.wanted = a.Assignment
	}
	return nil
}

// obey gives up what the client is not to have any more, and takes what it is to have.
func (c *consumer) obey(take bool) {
	for t, partitions := range c.owned {
		for p := range partitions {
			if _, ok := c.wanted[t][p]; !ok {
				delete(partitions, p)
			}
		}
		if len(partitions) == 0 {
			delete(c.owned, t)
		}
	}
	for t, partitions := range c.wanted {
		for p := range partitions {
			if take {
				if c.owned[t] == nil {
					c.owned[t] = map[int32]bool{}
				}
				c.owned[t][p] = true
			}
		}
	}
}

// reset is what a client does that was put out: it begins again, with nothing.
func (c *consumer) reset() {
	c.epoch, c.owned, c.wanted = 0, map[tp.UUID]map[int32]bool{}, nil
}

func (c *consumer) has() string {
	s := ""
	for _, t := range slices.SortedFunc(maps.Keys(c.owned), compareIDs) {
		s += fmt.Sprint(c.w.env.Image.TopicsByID[t].Name, slices.Sorted(maps.Keys(c.owned[t])))
	}
	return s
}

// settle lets all clients send heartbeats until nothing changes any more.
func (w *world) settle(clients ...*consumer) {
	w.t.Helper()
	for range 30 {
		for _, c := range clients {
			if err := c.beat(false); err != nil {
				w.t.Fatalf("%s: %v", c.id, err)
			}
			c.obey(true)
		}
		w.now += 1000
	}
	if w.g.State() != Stable {
		w.t.Fatalf("the group is %s:\n%s", w.g.State(), lasting(w.g))
	}
}

// old is a client of the classic protocol, of the cooperative kind.
type old struct {
	w          *world
	id         string
	topics     []string
	generation int32
	joined     bool
	owned      map[tp.UUID]map[int32]bool
}

func (w *world) old(id string, topics ...string) *old {
	return &old{w: w, id: id, topics: topics, owned: map[tp.UUID]map[int32]bool{}}
}

func (o *old) subscription() []byte {
	s := kmsg.NewConsumerMemberMetadata()
	s.Version, s.Topics = 1, o.topics
	for t, partitions := range o.owned {
		if topic := o.w.env.Image.TopicsByID[t]; topic != nil {
			op := kmsg.NewConsumerMemberMetadataOwnedPartition()
			op.Topic, op.Partitions = topic.Name, slices.Sorted(maps.Keys(partitions))
			s.OwnedPartitions = append(s.OwnedPartitions, op)
		}
	}
	return s.AppendTo(nil)
}

func (o *old) join(lost bool) error {
	o.w.t.Helper()
	r := group.JoinRequest{MemberID: o.id, NewID: o.id, ClientID: "old", ClientHost: "/o", SessionMs: 45_000, RebalanceMs: 60_000, ProtocolType: "consumer",
		Protocols: []group.Protocol{{Name: "cooperative-sticky", Metadata: o.subscription()}}}
	if !o.joined {
		r.MemberID = ""
	}
	result, c := o.w.g.Join(r, o.w.env, o.w.now)
	if result.Err != nil {
		return result.Err
	}
	o.w.take(c)
	if lost {
		return nil
	}
	o.joined, o.generation = true, result.Generation
	s := o.w.g.Sync(group.SyncRequest{MemberID: o.id, Generation: o.generation, ProtocolType: "consumer", Protocol: "cooperative-sticky"}, o.w.env, o.w.now)
	if s.Err != nil {
		return s.Err
	}
	a := kmsg.NewConsumerMemberAssignment()
	if err := a.ReadFrom(s.Assignment); err != nil {
		o.w.t.Fatal(err)
	}
	gave := false
	next := map[tp.UUID]map[int32]bool{}
	for _, at := range a.Topics {
		for _, p := range at.Partitions {
			id := o.w.env.Image.Topics[at.Topic].ID
			if next[id] == nil {
				next[id] = map[int32]bool{}
			}
			next[id][p] = true
		}
	}
	for t, partitions := range o.owned {
		for p := range partitions {
			gave = gave || !next[t][p]
		}
	}
	o.owned = next
	if gave {
		return o.join(false) // cooperative members come back when they have given something up
	}
	return nil
}

func (o *old) beat() error {
	o.w.t.Helper()
	c, err := o.w.g.BeatClassic(o.id, "", o.generation, o.w.env, o.w.now)
	o.w.take(c)
	if errors.Is(err, group.ErrRebalanceInProgress) {
		return o.join(false)
	}
	return err
}
