package controller

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/varve-io/varve/internal/tp"
)

func (w *world) move(topic string, index int32, to ...int32) error {
	w.t.Helper()
	return w.run(ReassignCommand{[]Reassignment{{topic, index, to}}}).(ReassignReply).Errors[0].OrNil()
}

func TestReassign(t *testing.T) {
	w := newCluster(t, "", "", "", "")
	w.assigned("t", []int32{1, 2}, []int32{1, 2, 3})
	w.run(AlterBrokerCommand{Broker: 4, Changes: []Change{{drainKey, Set, ptr("true")}}})
	for _, c := range []struct {
		r    Reassignment
		kind error
	}{
		{Reassignment{"x", 0, []int32{1}}, ErrUnknownTopic}, {Reassignment{"t", 2, []int32{1}}, ErrUnknownTopic}, {Reassignment{"t", -1, nil}, ErrUnknownTopic},
		{Reassignment{"t", 0, []int32{}}, ErrInvalidAssignment}, {Reassignment{"t", 0, []int32{1, 1}}, ErrInvalidAssignment},
		{Reassignment{"t", 0, []int32{1, -2}}, ErrInvalidAssignment}, {Reassignment{"t", 0, []int32{1, 9}}, ErrInvalidAssignment},
		{Reassignment{"t", 0, []int32{1, 4}}, ErrInvalidAssignment}, {Reassignment{"t", 0, nil}, ErrNoReassignment},
	} {
		before := w.img
		if r := w.run(ReassignCommand{[]Reassignment{c.r}}).(ReassignReply); !errors.Is(r.Errors[0].OrNil(), c.kind) || before != w.img {
			t.Errorf("%+v: %v", c.r, r.Errors[0])
		}
	}
	w.run(ReplaceBrokerCommand{Broker: 4})

	if err := w.move("t", 0, 3, 4); err != nil {
		t.Fatal(err)
	}
	w.is("t", 0, "3412 isr 12 leader 1 epoch 0 adding 34 removing 12")
	w.restart()
	if err := w.join("t", 0, 1, 2, 3); err != nil {
		t.Fatal(err)
	}
	w.is("t", 0, "3412 isr 312 leader 1 epoch 0 adding 34 removing 12")
	// Another target before the first is reached: begun from the original replicas.
	if err := w.move("t", 0, 2, 4); err != nil {
		t.Fatal(err)
	}
	w.is("t", 0, "241 isr 12 leader 1 epoch 0 adding 4 removing 1")
	if err := w.join("t", 0, 1, 2, 4); err != nil {
		t.Fatal(err)
	}
	w.is("t", 0, "24 isr 24 leader 2 epoch 1") // complete, and led by one that stays

	// Cancel takes the new ones out again, leader or not.
	if err := w.move("t", 0, 1, 3); err != nil {
		t.Fatal(err)
	}
	if err := w.join("t", 0, 2, 4, 1); err != nil {
		t.Fatal(err)
	}
	w.run(ElectLeadersCommand{Partitions: []PartitionRef{{w.partition("t", 0).Topic, 0}}})
	w.is("t", 0, "1324 isr 124 leader 1 epoch 2 adding 13 removing 24")
	if err := w.move("t", 0); err != nil {
		t.Fatal(err)
	}
	w.is("t", 0, "24 isr 24 leader 2 epoch 3")

	// Only new replicas are in sync: neither may they go.
	if err := w.move("t", 0, 1, 3); err != nil {
		t.Fatal(err)
	}
	if err := w.join("t", 0, 2, 1); err != nil {
		t.Fatal(err)
	}
	w.run(TickCommand{Silent: []int32{2}})
	w.is("t", 0, "1324 isr 1 leader 1 epoch 4 adding 13 removing 24")
	for _, to := range [][]int32{nil, {2, 4}} {
		if err := w.move("t", 0, to...); !errors.Is(err, ErrInvalidAssignment) {
			t.Fatal(err)
		}
	}
	if err := w.join("t", 0, 1, 3); err != nil {
		t.Fatal(err)
	}
	w.is("t", 0, "13 isr 13 leader 1 epoch 4")

	// Fewer, or another order: at once.
	w.up(2, 2, "")
	if err := w.join("t", 1, 1, 2, 3); !errors.Is(err, nil) {
		t.Fatal(err)
	}
	if err := w.move("t", 1, 3, 2); err != nil {
		t.Fatal(err)
	}
	w.is("t", 1, "32 isr 23 leader 3 epoch 1")
	if err := w.move("t", 1, 2, 3); err != nil {
		t.Fatal(err)
	}
	w.is("t", 1, "23 isr 23 leader 3 epoch 1")
	before := w.img
	if err := w.move("t", 1, 2, 3); err != nil || w.img != before {
		t.Fatal("nothing to do was written:", err)
	}
}

func TestPreferredLeaders(t *testing.T) {
	w := newCluster(t, "", "", "")
	id := w.assigned("t", []int32{1, 2}, []int32{2, 3}, []int32{3, 1})
	w.run(TickCommand{Silent: []int32{1}})
	w.beat(1, true, false)
	before := w.img
	if w.run(TickCommand{}); w.img != before {
		t.Fatal("a tick without cause wrote something")
	}
	refs := []PartitionRef{{id, 0}, {id, 1}, {id, 7}}
	check := func(c ElectLeadersCommand, want ...error) {
		t.Helper()
		r := w.run(c).(ElectLeadersReply)
		if len(r.Errors) != len(want) || len(r.Partitions) != len(want) {
			t.Fatalf("%+v", r)
		}
		for i, e := range r.Errors {
			if !errors.Is(e.OrNil(), want[i]) {
				t.Fatalf("%d: %v, want %v", i, e, want[i])
			}
		}
	}
	check(ElectLeadersCommand{Partitions: refs}, ErrPreferredLeaderNotAvailable, ErrElectionNotNeeded, ErrUnknownTopic)
	check(ElectLeadersCommand{}, ErrPreferredLeaderNotAvailable)
	if err := w.join("t", 0, 2, 1); err != nil {
		t.Fatal(err)
	}
	w.env.Thin = func(broker int32, p PartitionRef) bool { return broker == 1 && p == refs[0] }
	w.run(TickCommand{Preferred: true})
	w.is("t", 0, "12 isr 12 leader 2 epoch 1") // it holds too little
	w.env.Thin = nil
	w.run(TickCommand{Preferred: true})
	w.is("t", 0, "12 isr 12 leader 1 epoch 2")

	check(ElectLeadersCommand{Unclean: true, Partitions: refs[:1]}, ErrElectionNotNeeded)
	w.run(TickCommand{Silent: []int32{3}})
	w.run(TickCommand{Silent: []int32{2}})
	w.is("t", 1, "23 isr 2 leader -1 epoch 1")
	check(ElectLeadersCommand{Unclean: true}, ErrEligibleLeadersNotAvailable, nil)
	w.is("t", 2, "31 isr 1 leader 1 epoch 2 unclean")
	w.beat(3, true, false)
	check(ElectLeadersCommand{Unclean: true}, nil)
	w.is("t", 1, "23 isr 3 leader 3 epoch 2 unclean")
	check(ElectLeadersCommand{Unclean: true})
}

func TestDrain(t *testing.T) {
	w := newCluster(t, "a", "b", "a", "b")
	drain := AlterBrokerCommand{Broker: 2, Changes: []Change{{drainKey, Set, ptr("true")}}}
	w.assigned("wide", []int32{1, 2, 3, 4})
	w.refused(drain, ErrInvalidRequest, "topic wide has replication factor 4, and only 3 other broker(s)")
	check := drain
	check.Broker = ClusterWide
	w.refused(check, ErrInvalidRequest, "name it")
	w.run(DeleteTopicsCommand{IDs: []tp.UUID{w.img.Topics["wide"].ID}})

	var replicas [][]int32
	for i := range 150 {
		replicas = append(replicas, [][]int32{{2, 1}, {3, 2}, {1, 4}}[i%3])
	}
	w.assigned("t", replicas...)
	w.run(drain)
	if _, records, _ := CreateTopics(w.img, w.env, []NewTopic{{Name: "n", Partitions: 30, ReplicationFactor: 3}}, false); records == nil {
		t.Fatal("three brokers are enough")
	}
	if r := w.create(NewTopic{Name: "n", Partitions: 1, ReplicationFactor: 4}); !errors.Is(r[0].Err.OrNil(), ErrInvalidReplicationFactor) {
		t.Fatal("a replica was placed on a draining broker", r)
	}
	rounds := 0
	for {
		before := w.img
		if w.run(TickCommand{}); before == w.img {
			break
		}
		if rounds++; rounds > 3 {
			t.Fatal("no end")
		}
		moving := 0
		for i := range replicas {
			p := w.partition("t", i)
			if len(p.Adding)+len(p.Removing) == 0 {
				continue
			}
			moving++
			if len(p.Adding) != 1 || len(p.Removing) != 1 || p.Removing[0] != 2 {
				t.Fatalf("%+v", p)
			}
			// The other replica is in rack a: only broker 4 of rack b is left.
			if p.Adding[0] != 4 {
				t.Fatalf("the racks of %v are not two", p)
			}
		}
		if want := min(100, 100/rounds); moving == 0 || moving > 100 || rounds == 1 && moving != want {
			t.Fatal(moving)
		}
		before = w.img
		if w.run(TickCommand{}); rounds == 1 && before != w.img && moving >= maxDraining {
			t.Fatal("more than the bound are in flight")
		}
		for i := range replicas {
			if p := w.partition("t", i); len(p.Adding) > 0 {
				if err := w.join("t", i, append(slices.Clone(p.ISR), p.Adding...)...); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	for i := range replicas {
		if p := w.partition("t", i); slices.Contains(p.Replicas, 2) || len(p.Replicas) != 2 || len(p.ISR) != 2 || p.Leader == 2 {
			t.Fatalf("%+v", p)
		}
	}
	w.run(TickCommand{Silent: []int32{2}})
	w.run(UnregisterCommand{Broker: 2})
	w.restart()
}

func TestPlacement(t *testing.T) {
	for n := 1; n <= 9; n++ {
		for racks := 1; racks <= n; racks++ {
			if n%racks != 0 {
				continue
			}
			for factor := 1; factor <= n && (racks == 1 || factor <= racks); factor++ {
				var names []string
				for i := range n {
					names = append(names, fmt.Sprint("r", i%racks))
				}
				w := newCluster(t, names...)
				for k, count := range []int32{1, 5, 2, 1, int32(n) + 2, 3, 40} {
					name := fmt.Sprint("t", k)
					r := w.create(NewTopic{Name: name, Partitions: count, ReplicationFactor: int16(factor)})
					if r[0].Err != nil {
						t.Fatal(r[0].Err)
					}
					if k == 4 {
						if e := w.run(CreatePartitionsCommand{Topics: []NewPartitions{{Topic: name, Count: count + 5}}}).([]*Error); e[0] != nil {
							t.Fatal(e[0])
						}
					}
					where := fmt.Sprintf("%d brokers, %d racks, factor %d, topic %d", n, racks, factor, k)
					replicas, leaders := make([]int, n), make([]int, n)
					for _, p := range w.img.Topics[name].Partitions {
						used := map[string]bool{}
						for j, id := range p.Replicas {
							replicas[id-1]++
							if j == 0 {
								leaders[id-1]++
							}
							used[names[id-1]] = true
						}
						if len(used) != min(factor, racks) {
							t.Fatalf("%s: %v is in %d racks", where, p.Replicas, len(used))
						}
					}
					if d := slices.Max(replicas) - slices.Min(replicas); d > 1 {
						t.Fatalf("%s: replicas %v", where, replicas)
					}
					if d := slices.Max(leaders) - slices.Min(leaders); d > 1 && k != 4 {
						t.Fatalf("%s: leaders %v", where, leaders)
					}
				}
			}
		}
	}
}

func TestPlacementAcrossTopics(t *testing.T) {
	w := newCluster(t, "a", "b", "c", "a", "b", "c")
	for i := range 60 {
		if r := w.create(NewTopic{Name: fmt.Sprint("t", i), Partitions: 1, ReplicationFactor: 3}); r[0].Err != nil {
			t.Fatal(r[0].Err)
		}
	}
	replicas, leaders, pairs := map[int32]int{}, map[int32]int{}, map[[2]int32]int{}
	for _, topic := range w.img.Topics {
		r := topic.Partitions[0].Replicas
		leaders[r[0]]++
		for _, id := range r {
			replicas[id]++
			pairs[[2]int32{r[0], id}]++
		}
	}
	for id := int32(1); id <= 6; id++ {
		if replicas[id] != 30 || leaders[id] < 8 || leaders[id] > 12 {
			t.Fatalf("%v %v", replicas, leaders)
		}
		others := 0
		for other := int32(1); other <= 6; other++ {
			if other != id && pairs[[2]int32{id, other}] > 0 {
				others++
			}
		}
		if others < 4 {
			t.Fatalf("what %d leads is followed by %d others only", id, others)
		}
	}
}

func TestPlacementWithBrokersThatAreNotThere(t *testing.T) {
	w := newCluster(t, "", "", "")
	w.run(TickCommand{Silent: []int32{1}})
	r := w.create(NewTopic{Name: "two", Partitions: 4, ReplicationFactor: 2}, NewTopic{Name: "three", Partitions: 4, ReplicationFactor: 3}, NewTopic{Name: "four", Partitions: 1, ReplicationFactor: 4})
	if r[0].Err != nil || r[1].Err != nil || !errors.Is(r[2].Err.OrNil(), ErrInvalidReplicationFactor) {
		t.Fatalf("%+v", r)
	}
	for i := range 4 {
		if p := w.partition("two", i); slices.Contains(p.Replicas, 1) || len(p.ISR) != 2 {
			t.Fatalf("a fenced broker got a replica without need: %+v", p)
		}
		if p := w.partition("three", i); len(p.Replicas) != 3 || len(p.ISR) != 2 || slices.Contains(p.ISR, 1) || p.Replicas[0] == 1 || p.Leader != p.Replicas[0] {
			t.Fatalf("%+v", p)
		}
	}
	w.create(NewTopic{Name: "manual", Partitions: -1, ReplicationFactor: -1, Assignments: map[int32][]int32{0: {1, 2}}})
	w.is("manual", 0, "12 isr 2 leader 2 epoch 0")
	made := w.create(NewTopic{Name: "no", Partitions: -1, ReplicationFactor: -1, Assignments: map[int32][]int32{0: {1}}})
	if !errors.Is(made[0].Err.OrNil(), ErrInvalidAssignment) {
		t.Fatal(made)
	}
	w.run(TickCommand{Silent: []int32{2, 3}})
	w.create(NewTopic{Name: "dark", Partitions: 1, ReplicationFactor: 2})
	p := w.partition("dark", 0)
	if p.Leader != -1 || len(p.ISR) != 2 {
		t.Fatalf("%+v", p)
	}
	w.beat(p.Replicas[1], true, false)
	if q := w.partition("dark", 0); q.Leader != p.Replicas[1] || !slices.Equal(q.ISR, []int32{q.Leader}) {
		t.Fatalf("%+v", q)
	}
}
