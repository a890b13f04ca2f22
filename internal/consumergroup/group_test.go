package consumergroup

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/grouprecord"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func wantErr(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: want %v, got %v", what, want, err)
	}
}

func TestValidate(t *testing.T) {
	c := Config{Assignors: []string{"uniform"}}
	full := func(change func(*Heartbeat)) Heartbeat {
		r := Heartbeat{MemberID: "m", RebalanceMs: 1, Topics: []string{"t"}, Owned: Partitions{}}
		change(&r)
		return r
	}
	for _, x := range []struct {
		version int16
		r       Heartbeat
		want    string
	}{
		{1, full(func(r *Heartbeat) {}), ""},
		{0, full(func(r *Heartbeat) { r.MemberID = "" }), ""},
		{1, full(func(r *Heartbeat) { r.MemberID = "" }), "MemberId can't be empty."},
		{0, full(func(r *Heartbeat) { r.MemberID, r.Epoch = "", 3 }), "MemberId can't be empty."},
		{0, full(func(r *Heartbeat) { r.MemberID, r.Epoch = "", LeaveEpoch }), "MemberId can't be empty."},
		{1, full(func(r *Heartbeat) { r.InstanceID = pointer(" ") }), "InstanceId can't be empty."},
		{1, full(func(r *Heartbeat) { r.RackID = pointer("") }), "RackId can't be empty."},
		{1, full(func(r *Heartbeat) { r.RebalanceMs = -1 }), "RebalanceTimeoutMs must be provided in first request."},
		{1, full(func(r *Heartbeat) { r.Owned = nil }), "TopicPartitions must be empty when (re-)joining."},
		{1, full(func(r *Heartbeat) { r.Owned = Partitions{{1}: {0}} }), "TopicPartitions must be empty when (re-)joining."},
		{1, full(func(r *Heartbeat) { r.Topics = nil }), "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining."},
		{1, full(func(r *Heartbeat) { r.Topics, r.Regex = nil, pointer("") }), ""},
		{1, full(func(r *Heartbeat) { r.Epoch = LeaveStaticEpoch }), "InstanceId can't be null."},
		{1, full(func(r *Heartbeat) { r.Epoch = -3 }), "MemberEpoch is invalid."},
		{1, full(func(r *Heartbeat) { r.Assignor = pointer("x") }), "ServerAssignor x is not supported. Supported assignors: uniform."},
		{1, Heartbeat{MemberID: "m", Epoch: 3, RebalanceMs: -1}, ""},
	} {
		got := ""
		if err := x.r.Validate(x.version, c); err != nil {
			got = err.Error()
		}
		if got != x.want {
			t.Errorf("%+v: want %q, got %q", x.r, x.want, got)
		}
	}
}

// Members that wait, or that have just seen the group change, are told to come back soon.
func TestPace(t *testing.T) {
	w := newWorld(t)
	w.topic("t", 2)
	w.env.Config.HeartbeatMs = 5000
	told := func(c *consumer) int64 {
		t.Helper()
		a, changes, err := w.g.Heartbeat(c.request(), w.env, w.now)
		w.must(err)
		w.take(changes)
		c.epoch, c.wanted = a.Epoch, a.Assignment
		return a.HeartbeatMs
	}
	a, b := w.consumer("a", "t"), w.consumer("b", "t")
	w.must(a.beat(false))
	a.obey(true)
	w.now += 6000
	if ms := told(a); ms != 5000 {
		t.Fatalf("a settled group: %d ms", ms)
	}
	w.must(b.beat(false))
	if ms := told(a); ms != 500 {
		t.Fatalf("a, which has to give something up: %d ms", ms)
	}
	w.now += 6000
	if ms := told(b); ms != 500 {
		t.Fatalf("b, which waits for that: %d ms", ms)
	}
	w.env.Config.HeartbeatMs = 100
	if ms := told(b); ms != 100 {
		t.Fatalf("with a shorter interval: %d ms", ms)
	}
}

// A second member gets its half when the first has given it up, and not before; what the epochs mean on the way.
func TestReconciliation(t *testing.T) {
	w := newWorld(t)
	w.topic("t", 4)
	a, b := w.consumer("a", "t"), w.consumer("b", "t")
	w.must(a.beat(false))
	a.obey(true)
	if a.epoch != 2 || a.has() != "t[0 1 2 3]" || w.g.State() != Stable {
		t.Fatal(a.epoch, a.has(), w.g.State())
	}
	w.must(b.beat(false))
	if b.epoch != 3 || len(b.wanted) != 0 || w.g.State() != Reconciling {
		t.Fatal(b.epoch, b.wanted, w.g.State())
	}
	w.must(a.beat(false)) // says that it owns all
	if a.epoch != 2 || len(a.wanted) != 1 {
		t.Fatal(a.epoch, a.wanted)
	}
	w.must(b.beat(false))
	if len(b.wanted) != 0 {
		t.Fatal("b gets what a has not given up:", b.wanted)
	}
	a.obey(true)
	first := a.request()
	w.must(a.beat(false))
	if a.epoch != 3 {
		t.Fatal(a.epoch)
	}
	w.must(b.beat(false))
	b.obey(true)
	if a.has() != "t[2 3]" || b.has() != "t[0 1]" || w.g.State() != Stable {
		t.Fatal(a.has(), b.has(), w.g.State())
	}

	// The answer was lost: the same again gives the same. With more than it was given, or without a word of it, it is fenced.
	again, _, err := w.g.Heartbeat(first, w.env, w.now)
	if err != nil || again.Epoch != 3 {
		t.Fatal(again, err)
	}
	id := w.env.Image.Topics["t"].ID
	for what, change := range map[string]func(*Heartbeat){
		"more than assigned": func(r *Heartbeat) { r.Owned = Partitions{id: {0, 1, 2}} },
		"nothing said":       func(r *Heartbeat) { r.Owned = nil },
		"an older epoch":     func(r *Heartbeat) { r.Epoch = 1 },
		"a newer epoch":      func(r *Heartbeat) { r.Epoch = 4 },
	} {
		r := first
		change(&r)
		_, _, err := w.g.Heartbeat(r, w.env, w.now)
		wantErr(t, what, err, ErrFencedMemberEpoch)
	}
	stranger := w.consumer("stranger")
	stranger.epoch = 3
	wantErr(t, "a member that nobody knows", stranger.beat(false), group.ErrUnknownMember)

	// Commits and fetches of offsets (KIP-1251).
	p := func(i int32) []grouprecord.TopicPartition {
		return []grouprecord.TopicPartition{{Topic: "t", Partition: i}}
	}
	by := func(id string, epoch int32) group.Committer {
		return group.Committer{MemberID: id, Generation: epoch}
	}
	for what, x := range map[string]struct {
		c    Commit
		want error
	}{
		"the epoch":                        {Commit{Committer: by("a", 3), Partitions: p(0)}, nil},
		"an older one, held all along":     {Commit{Committer: by("a", 2), Partitions: p(2)}, nil},
		"an older one, given up":           {Commit{Committer: by("a", 2), Partitions: p(0)}, ErrStaleMemberEpoch},
		"an older one than the assignment": {Commit{Committer: by("b", 2), Partitions: p(0)}, ErrStaleMemberEpoch},
		"an older one, no such topic":      {Commit{Committer: by("a", 2), Partitions: []grouprecord.TopicPartition{{Topic: "u"}}}, ErrStaleMemberEpoch},
		"a newer one":                      {Commit{Committer: by("a", 4), Partitions: p(2)}, ErrStaleMemberEpoch},
		"an old API":                       {Commit{Committer: by("a", 3), Partitions: p(2), Old: true}, ErrUnsupportedByProtocol},
		"a stranger":                       {Commit{Committer: by("c", 3), Partitions: p(2)}, group.ErrUnknownMember},
		"nobody":                           {Commit{Committer: by("", -1), Partitions: p(2)}, group.ErrUnknownMember},
		"nobody, in a transaction":         {Commit{Committer: by("", -1), Partitions: p(2), InTxn: true}, nil},
	} {
		wantErr(t, what, w.g.MayCommit(x.c, w.env.Image), x.want)
	}
	for what, x := range map[string]struct {
		id    *string
		epoch int32
		want  error
	}{
		"nobody":       {nil, -1, nil},
		"the epoch":    {pointer("a"), 3, nil},
		"an older one": {pointer("a"), 2, ErrStaleMemberEpoch},
		"a stranger":   {pointer("c"), 3, group.ErrUnknownMember},
	} {
		wantErr(t, what, w.g.MayFetch(x.id, x.epoch), x.want)
	}
	wantErr(t, "deletion", w.g.MayDelete(), group.ErrNotEmpty)

	d := w.g.Describe(w.env.Config)
	if d.State != Stable || d.Epoch != 3 || d.AssignmentEpoch != 3 || d.Assignor != "uniform" || len(d.Members) != 2 || d.Members[0].Epoch != 3 ||
		!reflect.DeepEqual(d.Members[0].Assigned, grouprecord.Assignment{id: {2, 3}}) || !reflect.DeepEqual(d.Members[0].Target, d.Members[0].Assigned) {
		t.Fatalf("%+v", d)
	}

	// One leaves, the other gets all; then it is silent for a session.
	b.epoch = LeaveEpoch
	w.must(b.beat(false))
	wantErr(t, "leaving twice", b.beat(false), group.ErrUnknownMember)
	w.settle(a)
	if a.has() != "t[0 1 2 3]" {
		t.Fatal(a.has())
	}
	w.advance(46_000)
	if w.g.State() != Empty || w.g.MayDelete() != nil || w.g.NextDeadline() != 0 {
		t.Fatal(w.g.State(), w.g.NextDeadline())
	}
	wantErr(t, "after the session", a.beat(false), group.ErrUnknownMember)
	w.must(w.g.MayCommit(Commit{Committer: by("", -1), Partitions: p(2)}, w.env.Image))
	for _, e := range w.g.Tombstones() {
		w.g.Apply(e)
	}
	w.same("a deleted group", New("g"), w.g)
}

// A member that does not give up in its rebalance timeout is put out, although it sends heartbeats.
func TestRebalanceTimeout(t *testing.T) {
	w := newWorld(t)
	w.topic("t", 2)
	a, b := w.consumer("a", "t"), w.consumer("b", "t")
	w.must(a.beat(false))
	a.obey(true)
	w.must(b.beat(false))
	for range 5 {
		w.must(a.beat(false))
		w.must(b.beat(false))
		w.advance(11_000)
	}
	if w.g.member("a") == nil {
		t.Fatal("put out too early")
	}
	w.must(a.beat(false))
	w.must(b.beat(false))
	w.advance(11_000)
	wantErr(t, "after the rebalance timeout", a.beat(false), group.ErrUnknownMember)
	w.settle(b)
	if b.has() != "t[0 1]" {
		t.Fatal(b.has())
	}
}

// Static members keep what they have while they are away, for a session (KIP-345).
func TestStaticMembers(t *testing.T) {
	w := newWorld(t)
	w.topic("t", 2)
	a, b := w.consumer("a", "t"), w.consumer("b", "t")
	a.instance = pointer("i")
	w.settle(a, b)
	had := a.has()
	second := w.consumer("second", "t")
	second.instance = a.instance
	wantErr(t, "a second process with the instance id", second.beat(false), ErrUnreleasedInstance)
	second.epoch = 2
	wantErr(t, "one that says it has joined", second.beat(false), group.ErrFencedInstance)
	unknown := w.consumer("a", "t")
	unknown.instance, unknown.epoch = pointer("other"), 2
	wantErr(t, "an instance id that nobody knows", unknown.beat(false), group.ErrUnknownMember)

	epoch := w.g.Epoch()
	a.epoch = LeaveStaticEpoch
	w.must(a.beat(false))
	w.must(b.beat(false))
	if w.g.Epoch() != epoch {
		t.Fatal("its leaving for a while costs an epoch")
	}
	second.reset()
	w.must(second.beat(false))
	second.obey(true)
	if second.has() != had || w.g.Epoch() != epoch || second.epoch != epoch {
		t.Fatal(second.has(), w.g.Epoch(), second.epoch)
	}
	wantErr(t, "the first process again", a.beat(false), group.ErrFencedInstance)
	w.same("a successor knows another group", w.reload(), w.g)
	second.epoch = LeaveStaticEpoch
	w.must(second.beat(false))
	w.now += 40_000
	w.must(b.beat(false))
	w.advance(6000)
	w.settle(b)
	if b.has() != "t[0 1]" || len(w.g.statics) != 0 {
		t.Fatal(b.has())
	}
}

func TestTopicsComeGrowAndGo(t *testing.T) {
	w := newWorld(t)
	w.topic("logs", 1)
	a := w.consumer("a")
	a.topics, a.regex = nil, pointer("log.*|extra")
	w.settle(a)
	if a.has() != "logs[0]" || !w.g.Subscribed("logs") || w.g.Subscribed("other") {
		t.Fatal(a.has())
	}
	w.topic("logs", 2)
	w.topic("logs2", 1)
	w.topic("catalog", 1) // the expression has to match all of the name
	w.now += regexPauseMs
	w.settle(a)
	if a.has() != "logs[0 1]logs2[0]" {
		t.Fatal(a.has())
	}
	w.drop("logs")
	w.now += regexPauseMs
	w.settle(a)
	if a.has() != "logs2[0]" {
		t.Fatal(a.has())
	}
	epoch := w.g.Epoch()
	w.topic("other", 1)
	w.now += regexPauseMs
	w.settle(a)
	if w.g.Epoch() != epoch {
		t.Fatal("a topic that nobody reads costs an epoch")
	}
	bad := w.consumer("bad")
	bad.topics, bad.regex = nil, pointer("a)(b")
	err := bad.beat(false)
	wantErr(t, "an expression that is none", err, ErrInvalidRegex)
	if !strings.Contains(err.Error(), "SubscribedTopicRegex `a)(b` is not a valid regular expression") || w.g.member("bad") != nil {
		t.Fatal(err)
	}
	a.regex, a.topics, a.whole = pointer(""), []string{"other"}, true
	w.settle(a)
	if a.has() != "other[0]" || len(w.g.regexes) != 0 {
		t.Fatal(a.has(), w.g.regexes)
	}
}

// Members that come at once cost one target assignment per interval (KIP-1263).
func TestAssignmentInterval(t *testing.T) {
	w := newWorld(t)
	w.env.Config.AssignmentMs = 1000
	w.topic("t", 10)
	var all []*consumer
	for i := range 10 {
		c := w.consumer(fmt.Sprint("m", i), "t")
		w.must(c.beat(false))
		all = append(all, c)
	}
	if w.g.State() != Assigning || w.g.target.Epoch != 2 || len(w.g.targets) != 1 || all[9].epoch != 2 {
		t.Fatal(w.g.State(), w.g.target, all[9].epoch)
	}
	w.now += 1000
	w.settle(all...)
	for _, c := range all {
		if len(c.owned[w.env.Image.Topics["t"].ID]) != 1 {
			t.Fatal(c.id, c.has())
		}
	}
}

func TestAssignorOfTheMajority(t *testing.T) {
	w := newWorld(t)
	w.topic("t", 3)
	a, b, c := w.consumer("a", "t"), w.consumer("b", "t"), w.consumer("c", "t")
	a.assignor, b.assignor, c.assignor = pointer("range"), pointer("range"), pointer("uniform")
	w.settle(c)
	epoch := w.g.Epoch()
	w.settle(a, c)
	if w.g.assignor(w.env.Config) != "range" || w.g.Epoch() <= epoch {
		t.Fatal("at a tie the first by name counts")
	}
	w.settle(a, b, c)
	if a.has() != "t[0]" || b.has() != "t[1]" || c.has() != "t[2]" {
		t.Fatal(a.has(), b.has(), c.has())
	}
	w.env.Config.SizeMax = 3
	wantErr(t, "one too many", w.consumer("d", "t").beat(false), group.ErrGroupFull)
}

// TestHash: these are the values of Kafka's own Utils.computeTopicHash and computeGroupHash.
func TestHash(t *testing.T) {
	id := tp.UUID{1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18}
	topic := &metadata.Topic{Name: "topic-é😀", ID: id, Partitions: []*metadata.Partition{{PartitionRecord: metadata.PartitionRecord{Replicas: []int32{1, 2, 3}}}, {}}}
	img := &metadata.Image{Brokers: map[int32]*metadata.BrokerRecord{1: {Rack: "rack-a"}, 2: {}}}
	if got := hashTopic(topic, img); got != -3081551103957594340 {
		t.Error(got)
	}
	h := hasher{}
	h.int64(-3081551103957594340)
	h.int64(5)
	if got := h.sum(); got != 3391052466708605169 {
		t.Error(got)
	}
	if New("g").hash(img) != 0 {
		t.Error("the hash of nothing is 0")
	}
}

// classicGroup is a live classic group of cooperative consumers, as its members and their coordinator left it.
func classicGroup(t *testing.T, w *world, members int, userData []byte) (*group.Group, []*old) {
	var list []*group.Member
	var olds []*old
	partitions := len(w.env.Image.Topics["t"].Partitions)
	for i := range members {
		o := w.old(fmt.Sprint("o", i), "t")
		o.joined, o.generation = true, 7
		a := kmsg.NewConsumerMemberAssignment()
		at := kmsg.NewConsumerMemberAssignmentTopic()
		at.Topic = "t"
		o.owned[w.env.Image.Topics["t"].ID] = map[int32]bool{}
		for p := i; p < partitions; p += members {
			at.Partitions = append(at.Partitions, int32(p))
			o.owned[w.env.Image.Topics["t"].ID][int32(p)] = true
		}
		a.Topics, a.UserData = []kmsg.ConsumerMemberAssignmentTopic{at}, userData
		list = append(list, &group.Member{ID: o.id, SessionMs: 45_000, RebalanceMs: 60_000, Assignment: a.AppendTo(nil),
			Protocols: []group.Protocol{{Name: "cooperative-sticky", Metadata: o.subscription()}}})
		olds = append(olds, o)
	}
	g := group.Adopt("g", w.env.Classic, "consumer", 7, list, w.now)
	if g == nil {
		t.Fatal("no protocol in common")
	}
	return g, olds
}

// A live classic group becomes a consumer group when the first member of that protocol comes, goes on while both are there, and becomes a
// classic one again when the last has left.
func TestMigration(t *testing.T) {
	w := newWorld(t)
	w.topic("t", 6)
	classic, olds := classicGroup(t, w, 2, nil)
	w.log = append(w.log, classic.Record().Record())
	g, c, err := Upgrade(classic, w.env, w.now)
	w.must(err)
	w.log = nil // of the consumer group alone
	w.g = g
	c.Records = c.Records[1:]
	w.take(c)
	if g.State() != Stable || g.Epoch() != 7 {
		t.Fatal(g.State(), g.Epoch())
	}
	a := w.consumer("a", "t")
	for range 10 {
		w.must(a.beat(false))
		a.obey(true)
		for _, o := range olds {
			w.must(o.beat())
		}
	}
	w.same("a successor knows another group", w.reload(), w.g)
	id := w.env.Image.Topics["t"].ID
	if len(a.owned[id]) != 2 || len(olds[0].owned[id]) != 2 || len(olds[1].owned[id]) != 2 || w.g.State() != Stable {
		t.Fatal(a.owned, olds[0].owned, olds[1].owned, lasting(w.g))
	}
	wantErr(t, "a classic heartbeat of the other kind of member", func() error { _, err := w.g.BeatClassic("a", "", a.epoch, w.env, w.now); return err }(), group.ErrUnknownMember)
	wantErr(t, "another generation", func() error { _, err := w.g.BeatClassic("o0", "", 1, w.env, w.now); return err }(), group.ErrIllegalGeneration)
	wantErr(t, "an old commit", w.g.MayCommit(Commit{Committer: group.Committer{MemberID: "o0", Generation: 99}, Old: true}, w.env.Image), group.ErrIllegalGeneration)
	wantErr(t, "another protocol", func() error {
		r, _ := w.g.Join(group.JoinRequest{NewID: "n", SessionMs: 45_000, ProtocolType: "consumer", Protocols: []group.Protocol{{Name: "range", Metadata: olds[0].subscription()}}}, w.env, w.now)
		return r.Err
	}(), group.ErrInconsistentProtocol)
	r, _ := w.g.Join(group.JoinRequest{NewID: "n", RequireID: true, SessionMs: 45_000, ProtocolType: "consumer", Protocols: []group.Protocol{{Name: "cooperative-sticky", Metadata: olds[0].subscription()}}}, w.env, w.now)
	if !errors.Is(r.Err, group.ErrMemberIDRequired) || r.MemberID != "n" {
		t.Fatal(r)
	}
	w.env.Config.Mixed = false
	wantErr(t, "where they do not mix", w.old("p", "t").join(false), group.ErrInconsistentProtocol)
	w.env.Config.Mixed = true

	// The last consumer leaves.
	a.epoch = LeaveEpoch
	w.must(a.beat(false))
	if w.classic == nil || w.classic.State() != group.Stable || w.classic.Generation() != w.g.Epoch() || len(w.classic.Members()) != 2 {
		t.Fatal(w.classic)
	}
	left := w.reload()
	w.same("records of the consumer group are left", New("g"), left)
	last := w.log[len(w.log)-1]
	if e, ok, err := grouprecord.Parse(last.Key, last.Value); err != nil || !ok || e.Kind != grouprecord.KindClassicGroup || e.Value == nil {
		t.Fatal(e, ok, err)
	}
}

// A static consumer that comes back as a classic member takes the group along, if no other consumer is left.
func TestDowngradeByReplacement(t *testing.T) {
	w := newWorld(t)
	w.topic("t", 2)
	a := w.consumer("a", "t")
	a.instance = pointer("i")
	w.settle(a)
	r := group.JoinRequest{NewID: "b", InstanceID: "i", SessionMs: 45_000, RebalanceMs: 60_000, ProtocolType: "consumer", Protocols: []group.Protocol{{Name: "range", Metadata: w.old("b", "t").subscription()}}}
	result, c := w.g.Join(r, w.env, w.now)
	w.must(result.Err)
	if c.Classic == nil || c.Rebalance || result.Generation != c.Classic.Generation() || result.MemberID != "b" {
		t.Fatalf("%+v %+v", result, c)
	}
	m := c.Classic.Members()[0]
	as := kmsg.NewConsumerMemberAssignment()
	if err := as.ReadFrom(m.Assignment); err != nil || m.ID != "b" || len(as.Topics) != 1 || !slices.Equal(as.Topics[0].Partitions, []int32{0, 1}) {
		t.Fatal(m, as, err)
	}
	c.Undo()
	w.same("the group as it was", w.reload(), w.g)
}

func TestUpgradesThatAreRefused(t *testing.T) {
	for what, x := range map[string]struct {
		change   func(*world)
		userData []byte
		text     string
	}{
		"by policy":          {func(w *world) { w.env.Config.Upgrade = false }, nil, "because online upgrade is disabled"},
		"too many":           {func(w *world) { w.env.Config.SizeMax = 1 }, nil, "exceeds the consumer group maximum size"},
		"a custom assignor":  {func(*world) {}, []byte{1}, "custom assignor"},
		"a malformed member": {func(*world) {}, nil, "malformed"},
		"no consumers":       {func(*world) {}, nil, "does not use the consumer embedded protocol"},
	} {
		w := newWorld(t)
		w.topic("t", 2)
		g, _ := classicGroup(t, w, 2, x.userData)
		if what == "a malformed member" {
			g.Members()[0].Protocols[0].Metadata = []byte{0}
		}
		if what == "no consumers" {
			g = group.Adopt("g", w.env.Classic, "connect", 7, g.Members(), w.now)
		}
		x.change(w)
		_, _, err := Upgrade(g, w.env, w.now)
		if !errors.Is(err, group.ErrNotFound) || !strings.Contains(err.Error(), x.text) {
			t.Errorf("%s: %v", what, err)
		}
	}
	w := newWorld(t)
	if _, c, err := Upgrade(group.New("g", w.env.Classic, 1), w.env, 1); err != nil || len(c.Records) != 1 || c.Records[0].Value != nil {
		t.Error("an empty group:", err)
	}
}

// What Kafka before 4.1 wrote of the topics is taken away at the next epoch.
func TestStalePartitionMetadata(t *testing.T) {
	w := newWorld(t)
	w.topic("t", 1)
	w.g.Apply(grouprecord.Entry{Key: grouprecord.Key{Kind: grouprecord.KindPartitions, Group: "g"}, Value: &grouprecord.PartitionMetadata{}})
	w.must(w.consumer("a", "t").beat(false))
	if w.g.stale || !slices.ContainsFunc(w.log, func(r grouprecord.Record) bool { return r.Key[1] == byte(grouprecord.KindPartitions) && r.Value == nil }) {
		t.Fatal("it is still there")
	}
}
