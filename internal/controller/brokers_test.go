package controller

import (
	"errors"
	"slices"
	"testing"

	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

func TestRegister(t *testing.T) {
	w := newCluster(t, "", "")
	w.assigned("t", []int32{2, 1})
	b := node(2, 9, "")
	b.Listeners[0].Host = "elsewhere"
	w.refused(RegisterCommand{b}, ErrDuplicateBroker, "broker id 2 is in use by h:1002")
	if r := w.run(RegisterCommand{node(2, 1, "")}).(Registered); r.Epoch != 2 {
		t.Fatal("the same run got another epoch", r)
	}
	w.is("t", 0, "21 isr 21 leader 2 epoch 0")

	// On the same address it is a restart, which fences the old run.
	if r := w.run(RegisterCommand{node(2, 8, "")}).(Registered); r.Epoch != 3 || !w.img.Brokers[2].Fenced {
		t.Fatal(r, w.img.Brokers[2])
	}
	w.is("t", 0, "21 isr 1 leader 1 epoch 1")
	w.refused(HeartbeatCommand{Broker: 2, Epoch: 2, Ready: true}, ErrFenced, "epoch 2")

	// Fenced by now, but its session lives: it is only starting.
	w.env.Alive = func(int32) bool { return true }
	w.refused(RegisterCommand{b}, ErrDuplicateBroker, "in use")
	w.env.Alive = func(int32) bool { return false }
	if r := w.run(RegisterCommand{b}).(Registered); r.Epoch != 4 {
		t.Fatal(r)
	}
	nameless := node(3, 1, "")
	nameless.PeerListener = "other"
	w.refused(RegisterCommand{nameless}, ErrInvalidRequest, "no address for other nodes")
	w.refused(RegisterCommand{node(-1, 1, "")}, ErrInvalidRequest, "negative")
	w.restart()
}

// A broker on an empty disk is in sync with nothing, and leads nothing that another may have more of (KIP-966).
func TestAnEmptiedBroker(t *testing.T) {
	w := newWorld(t)
	incarnation := byte(1)
	register := func(id int32, disk byte) {
		t.Helper()
		incarnation++
		r := node(id, incarnation, "")
		r.Directory = tp.UUID{disk}
		w.run(RegisterCommand{r})
		w.beat(id, true, false)
	}
	for id := range int32(3) {
		register(id+1, 1)
	}
	w.assigned("t", []int32{1, 2, 3}, []int32{2, 1, 3}, []int32{2})
	w.run(TickCommand{Silent: []int32{1, 3}})
	w.is("t", 0, "123 isr 2 leader 2 epoch 1")
	register(2, 1)
	w.is("t", 0, "123 isr 2 leader 2 epoch 3")
	register(2, 2)
	w.is("t", 0, "123 isr 2 leader -1 epoch 4")
	w.is("t", 1, "213 isr 2 leader -1 epoch 3")
	w.is("t", 2, "2 isr 2 leader 2 epoch 4") // nobody else can have it
	w.run(TickCommand{Silent: []int32{2}, Preferred: true})
	w.beat(2, true, false)
	w.run(ElectLeadersCommand{})
	w.is("t", 1, "213 isr 2 leader -1 epoch 3")

	// Those that may have more come first, though 2 is the preferred one.
	register(3, 1)
	w.is("t", 1, "213 isr 2 leader -1 epoch 3")
	w.run(ElectLeadersCommand{Unclean: true, Partitions: []PartitionRef{{w.img.Topics["t"].ID, 1}}})
	w.is("t", 1, "213 isr 3 leader 3 epoch 4 unclean")
	// Nobody else is there: then it is the emptied one.
	w.run(TickCommand{Silent: []int32{3}})
	w.run(AlterTopicCommand{Topic: "t", Changes: []Change{{uncleanKey, Set, ptr("true")}}})
	w.is("t", 0, "123 isr 2 leader 2 epoch 5 unclean")
	w.restart()
}

// Those that fall silent together were all in sync: each of them may lead.
func TestFencingAllAtOnce(t *testing.T) {
	w := newCluster(t, "", "", "")
	w.assigned("t", []int32{1, 2, 3})
	w.run(TickCommand{Silent: []int32{3}})
	w.run(TickCommand{Silent: []int32{1, 2}})
	w.is("t", 0, "123 isr 12 leader -1 epoch 1")
	w.up(3, 2, "")
	w.is("t", 0, "123 isr 12 leader -1 epoch 1")
	w.up(2, 2, "")
	w.is("t", 0, "123 isr 2 leader 2 epoch 2")
	w.up(1, 2, "")
	w.is("t", 0, "123 isr 2 leader 2 epoch 2")
	w.restart()
}

// Whoever comes back first of a cluster that stood still leads what it is in sync with.
func TestHalted(t *testing.T) {
	w := newCluster(t, "", "", "")
	w.assigned("t", []int32{1, 2, 3}, []int32{3, 2})
	w.run(TickCommand{Silent: []int32{2}})
	w.apply(Halted(w.img), nil)
	w.is("t", 0, "123 isr 13 leader -1 epoch 1")
	w.is("t", 1, "32 isr 3 leader -1 epoch 1")
	w.up(2, 2, "")
	w.is("t", 0, "123 isr 13 leader -1 epoch 1")
	w.up(3, 2, "")
	w.is("t", 0, "123 isr 3 leader 3 epoch 2")
	w.is("t", 1, "32 isr 3 leader 3 epoch 2")
	w.restart()
}

func TestFencing(t *testing.T) {
	w := newCluster(t, "", "", "")
	w.assigned("t", []int32{1, 2, 3}, []int32{1}, []int32{2, 3})
	w.assigned("u", []int32{1})
	w.run(AlterTopicCommand{Topic: "u", Changes: []Change{{uncleanKey, Set, ptr("true")}}})
	w.run(TickCommand{Silent: []int32{1, 1, 7}})
	w.is("t", 0, "123 isr 23 leader 2 epoch 1")
	w.is("t", 1, "1 isr 1 leader -1 epoch 1")
	w.is("t", 2, "23 isr 23 leader 2 epoch 0")
	before := w.img
	w.run(TickCommand{Silent: []int32{1}})
	if w.img != before {
		t.Fatal("a fenced broker was fenced again")
	}
	w.run(TickCommand{Silent: []int32{3}})
	w.is("t", 0, "123 isr 2 leader 2 epoch 1")
	if p := w.partition("t", 0); p.PartitionEpoch != 2 {
		t.Fatal(p)
	}
	w.beat(1, true, false)
	w.is("t", 0, "123 isr 2 leader 2 epoch 1") // it is no member before it has caught up
	w.is("t", 1, "1 isr 1 leader 1 epoch 2")
	if r := w.beat(3, false, false); !r.Fenced || !w.img.Brokers[3].Fenced {
		t.Fatal("a broker that is not ready was unfenced")
	}
	// All at once: the leader alone is kept in the ISR.
	w.beat(3, true, false)
	w.run(TickCommand{Silent: []int32{1, 2, 3}})
	w.is("t", 2, "23 isr 2 leader -1 epoch 1")
	w.beat(3, true, false)
	w.is("t", 2, "23 isr 2 leader -1 epoch 1")
	w.beat(2, true, false)
	w.is("t", 2, "23 isr 2 leader 2 epoch 2")
	w.restart()
}

func ptr(s string) *string { return &s }

func TestUncleanElection(t *testing.T) {
	w := newCluster(t, "", "", "")
	w.assigned("t", []int32{1, 2, 3})
	w.run(TickCommand{Silent: []int32{2, 3}})
	w.beat(3, true, false)
	w.run(TickCommand{Silent: []int32{1}})
	w.is("t", 0, "123 isr 1 leader -1 epoch 1")
	w.run(AlterTopicCommand{Topic: "t", Changes: []Change{{uncleanKey, Set, ptr("true")}}, ValidateOnly: true})
	w.is("t", 0, "123 isr 1 leader -1 epoch 1")
	w.run(AlterTopicCommand{Topic: "t", Changes: []Change{{uncleanKey, Set, ptr("true")}}})
	w.is("t", 0, "123 isr 3 leader 3 epoch 2 unclean")
	w.restart()
	w.beat(2, true, false)
	if err := w.join("t", 0, 3, 2); err != nil {
		t.Fatal(err)
	}
	w.is("t", 0, "123 isr 23 leader 3 epoch 2")

	// By the cluster's default, at fencing and when it is set.
	w.assigned("u", []int32{2, 3})
	w.run(TickCommand{Silent: []int32{3}})
	w.run(TickCommand{Silent: []int32{2}})
	w.beat(3, true, false)
	w.is("u", 0, "23 isr 2 leader -1 epoch 1")
	w.run(AlterBrokerCommand{Broker: ClusterWide, Changes: []Change{{uncleanKey, Set, ptr("true")}}})
	w.is("u", 0, "23 isr 3 leader 3 epoch 2 unclean")
	w.beat(2, true, false)
	w.run(TickCommand{Silent: []int32{3}})
	w.is("u", 0, "23 isr 2 leader 2 epoch 3 unclean")
}

func TestHeartbeatsCostNothing(t *testing.T) {
	w := newCluster(t, "")
	w.run(CreateTopicsCommand{Topics: []NewTopic{{Name: "t", Partitions: MaxPartitions, ReplicationFactor: 1}}})
	c := HeartbeatCommand{Broker: 1, Epoch: 1, Ready: true}
	for _, c := range []Command{c, TickCommand{}} {
		if n := testing.AllocsPerRun(10, func() {
			if records, _, err := c.Run(w.img, w.env); len(records) > 0 || err != nil {
				t.Fatal(records, err)
			}
		}); n > 10 {
			t.Errorf("%T allocates %v times", c, n)
		}
	}
}

func TestLeaving(t *testing.T) {
	w := newCluster(t, "", "", "")
	w.assigned("t", []int32{1, 2}, []int32{1}, []int32{3, 1})
	if r := w.beat(1, true, true); r.Leave || r.Fenced {
		t.Fatal("it was let go before others took over", r)
	}
	w.is("t", 0, "12 isr 2 leader 2 epoch 1")
	w.is("t", 1, "1 isr 1 leader 1 epoch 0") // nobody else could
	w.is("t", 2, "31 isr 3 leader 3 epoch 0")
	if err := w.join("t", 0, 2, 1); !errors.Is(err, ErrIneligibleReplica) {
		t.Fatal("a leaving broker joined an ISR:", err)
	}
	if r := w.beat(1, true, true); !r.Leave || !r.Fenced {
		t.Fatal(r)
	}
	w.is("t", 1, "1 isr 1 leader -1 epoch 1")
	before := w.img
	if r := w.beat(1, true, true); !r.Leave || w.img != before {
		t.Fatal(r)
	}
	if r := w.beat(1, true, false); !r.Fenced {
		t.Fatal("a late heartbeat revived a run that has left")
	}
	w.up(1, 2, "")
	w.is("t", 1, "1 isr 1 leader 1 epoch 2")

	// The last two leave together: who can take over does, then the last one keeps the ISR.
	w.run(TickCommand{Silent: []int32{3}})
	w.assigned("u", []int32{1, 2})
	w.beat(2, true, true)
	w.is("u", 0, "12 isr 1 leader 1 epoch 0")
	if r := w.beat(1, true, true); !r.Leave {
		t.Fatal(r)
	}
	w.is("u", 0, "12 isr 1 leader -1 epoch 1")
	w.restart()
}

func TestUnregister(t *testing.T) {
	w := newCluster(t, "", "")
	w.assigned("t", []int32{1, 2}, []int32{2})
	w.run(AlterBrokerCommand{Broker: 2, Changes: []Change{{"log.retention.ms", Set, ptr("5")}}})
	w.refused(UnregisterCommand{Broker: 9}, ErrUnknownBroker, "No broker with id 9")
	w.refused(UnregisterCommand{Broker: 2}, ErrInvalidRequest, "stop it first")
	w.run(TickCommand{Silent: []int32{2}})
	w.refused(UnregisterCommand{Broker: 2}, ErrBrokersInUse, "2 replica(s): move them off with varve broker drain")
	w.run(UnregisterCommand{Broker: 2, Force: true})
	if w.img.Brokers[2] != nil || w.img.BrokerConfigs[2] != nil {
		t.Fatal("something of it is left")
	}
	w.is("t", 1, "2 isr 2 leader -1 epoch 1")
	w.restart()
	if r := w.run(RegisterCommand{node(2, 2, "")}).(Registered); r.Epoch != 3 {
		t.Fatal("an epoch was given twice", r)
	}
	w.beat(2, true, false)
	w.is("t", 1, "2 isr 2 leader 2 epoch 2")
}

func TestEpochsSurviveTheLastBroker(t *testing.T) {
	w := newCluster(t, "")
	w.run(TickCommand{Silent: []int32{1}})
	w.run(UnregisterCommand{Broker: 1})
	w.restart()
	if w.img.LastBrokerEpoch != 1 || len(w.img.Brokers) != 0 {
		t.Fatal(w.img)
	}
}

func TestElection(t *testing.T) {
	type list = []int32
	for _, c := range []struct {
		name                            string
		replicas, isr                   list
		leader                          int32
		fenced, leaving, thin, lifeless list
		unclean                         bool
		want                            int32
		wantISR                         list
	}{
		{name: "the present leader stays", replicas: list{1, 2}, isr: list{1, 2}, leader: 2, want: 2, wantISR: list{1, 2}},
		{name: "even if it is thin", replicas: list{1, 2}, isr: list{1, 2}, leader: 2, thin: list{2}, want: 2, wantISR: list{1, 2}},
		{name: "first of the assignment", replicas: list{3, 1, 2}, isr: list{1, 2}, leader: -1, want: 1, wantISR: list{1, 2}},
		{name: "not the thin one", replicas: list{1, 2, 3}, isr: list{1, 2, 3}, leader: -1, thin: list{1}, want: 2, wantISR: list{1, 2, 3}},
		{name: "the first thin one, if all are", replicas: list{1, 2, 3}, isr: list{2, 3}, leader: -1, thin: list{1, 2, 3}, want: 2, wantISR: list{2, 3}},
		{name: "not one whose session is over", replicas: list{1, 2}, isr: list{1, 2}, leader: -1, lifeless: list{1}, thin: list{2}, want: 2, wantISR: list{1, 2}},
		{name: "but rather that than none", replicas: list{1, 2}, isr: list{1}, leader: -1, lifeless: list{1}, want: 1, wantISR: list{1}},
		{name: "who leaves is relieved", replicas: list{1, 2}, isr: list{1, 2}, leader: 1, leaving: list{1}, want: 2, wantISR: list{1, 2}},
		{name: "but leads on where there is none", replicas: list{1, 2}, isr: list{1}, leader: 1, leaving: list{1}, unclean: true, want: 1, wantISR: list{1}},
		{name: "who leaves is not elected", replicas: list{1, 2}, isr: list{2}, leader: -1, leaving: list{2}, want: -1, wantISR: list{2}},
		{name: "nobody is there", replicas: list{1, 2, 3}, isr: list{1}, leader: 1, fenced: list{1}, want: -1, wantISR: list{1}},
		{name: "unclean", replicas: list{1, 2, 3}, isr: list{1}, leader: 1, fenced: list{1, 2}, unclean: true, want: 3, wantISR: list{3}},
		{name: "unclean only if need be", replicas: list{1, 2, 3}, isr: list{1, 3}, leader: 1, fenced: list{1}, unclean: true, want: 3, wantISR: list{3}},
		{name: "unclean and nobody", replicas: list{1, 2}, isr: list{1}, leader: 1, fenced: list{1, 2}, unclean: true, want: -1, wantISR: list{1}},
		{name: "a leader outside the ISR", replicas: list{2}, isr: list{2}, leader: 1, want: 2, wantISR: list{2}},
	} {
		in := func(l list) func(int32) bool { return func(id int32) bool { return slices.Contains(l, id) } }
		not := func(l list) func(int32) bool { return func(id int32) bool { return !slices.Contains(l, id) } }
		got := elect(metadata.PartitionRecord{Replicas: c.replicas, ISR: c.isr, Leader: c.leader}, electorate{not(c.fenced), in(c.leaving), not(c.lifeless), in(c.thin)}, c.unclean)
		if got.Leader != c.want || !slices.Equal(got.ISR, c.wantISR) || got.Unclean != (!slices.Contains(c.isr, c.want) && c.want >= 0) {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
}

func TestAlterPartitions(t *testing.T) {
	w := newCluster(t, "", "", "")
	id := w.assigned("t", []int32{1, 2, 3})
	w.run(TickCommand{Silent: []int32{3}})
	w.is("t", 0, "123 isr 12 leader 1 epoch 0")
	at := w.partition("t", 0).PartitionEpoch
	ref := PartitionRef{id, 0}
	for _, c := range []struct {
		name   string
		change ISRChange
		kind   error
	}{
		{"unknown topic", ISRChange{PartitionRef{tp.UUID{9}, 0}, 0, at, []int32{1}, []int64{1}}, ErrUnknownTopic},
		{"unknown partition", ISRChange{PartitionRef{id, 1}, 0, at, []int32{1}, []int64{1}}, ErrUnknownTopic},
		{"old leader epoch", ISRChange{ref, -1, at, []int32{1}, []int64{1}}, ErrFenced},
		{"old partition epoch", ISRChange{ref, 0, at - 1, []int32{1}, []int64{1}}, ErrStalePartitionEpoch},
		{"without the leader", ISRChange{ref, 0, at, []int32{2}, []int64{2}}, ErrInvalidRequest},
		{"empty", ISRChange{ref, 0, at, nil, nil}, ErrInvalidRequest},
		{"twice", ISRChange{ref, 0, at, []int32{1, 1}, []int64{1, 1}}, ErrInvalidRequest},
		{"no replica", ISRChange{ref, 0, at, []int32{1, 4}, []int64{1, 1}}, ErrInvalidRequest},
		{"no epochs", ISRChange{ref, 0, at, []int32{1, 2}, nil}, ErrInvalidRequest},
		{"fenced", ISRChange{ref, 0, at, []int32{1, 2, 3}, []int64{1, 2, 3}}, ErrIneligibleReplica},
		{"another run", ISRChange{ref, 0, at, []int32{1, 2}, []int64{1, 9}}, ErrIneligibleReplica},
	} {
		before := w.img
		reply := w.run(AlterPartitionsCommand{1, 1, []ISRChange{c.change}}).(AlterPartitionsReply)
		if err := reply.Errors[0].OrNil(); !errors.Is(err, c.kind) || before != w.img {
			t.Errorf("%s: %v, changed %v", c.name, err, before != w.img)
		}
	}
	w.refused(AlterPartitionsCommand{1, 7, nil}, ErrFenced, "epoch 7")
	w.refused(AlterPartitionsCommand{3, 3, nil}, ErrFenced, "fenced")
	if r := w.run(AlterPartitionsCommand{2, 2, []ISRChange{{ref, 0, at, []int32{1, 2}, []int64{1, 2}}}}).(AlterPartitionsReply); !errors.Is(r.Errors[0].OrNil(), ErrFenced) {
		t.Fatal("a follower changed the ISR", r)
	}
	// The present ISR is a change, too: what was proposed before is late then.
	if r := w.run(AlterPartitionsCommand{1, 1, []ISRChange{{ref, 0, at, []int32{2, 1}, []int64{-1, 1}}, {ref, 0, at, []int32{1}, []int64{1}}}}).(AlterPartitionsReply); r.Errors[0] != nil ||
		!errors.Is(r.Errors[1].OrNil(), ErrStalePartitionEpoch) || w.partition("t", 0).PartitionEpoch != at+1 {
		t.Fatal(r.Errors, w.partition("t", 0))
	}
	w.is("t", 0, "123 isr 12 leader 1 epoch 0")
	at++
	// A shrink does not raise the leader epoch; of two changes of a request the second is late.
	r := w.run(AlterPartitionsCommand{1, 1, []ISRChange{{ref, 0, at, []int32{1}, []int64{1}}, {ref, 0, at, []int32{1, 2}, []int64{1, 2}}}}).(AlterPartitionsReply)
	if r.Errors[0] != nil || !errors.Is(r.Errors[1].OrNil(), ErrStalePartitionEpoch) {
		t.Fatal(r.Errors)
	}
	w.is("t", 0, "123 isr 1 leader 1 epoch 0")
	w.beat(3, true, false)
	if err := w.join("t", 0, 3, 1); err != nil {
		t.Fatal(err)
	}
	w.is("t", 0, "123 isr 13 leader 1 epoch 0")
}
