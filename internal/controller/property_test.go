package controller

import (
	"fmt"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

// TestInvariants runs random commands over random clusters.
func TestInvariants(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		racks := make([]string, rapid.IntRange(1, 5).Draw(r, "brokers"))
		for i := range racks {
			racks[i] = fmt.Sprint(rapid.IntRange(0, 2).Draw(r, "rack"))
		}
		w := newCluster(t, racks...)
		d := &drawer{r, w, racks, 1}
		if rapid.Bool().Draw(r, "thin") {
			w.env.Thin = func(broker int32, p PartitionRef) bool { return (broker+p.Index)%2 == 0 }
		}
		for range rapid.IntRange(1, 60).Draw(r, "length") {
			c := d.command()
			before := w.img
			reply, err := w.try(c)
			if err != nil && w.img != before {
				r.Fatalf("%+v was refused and changed something", c)
			}
			if after := w.img; after != before {
				check(r, before, after, c)
			}
			_ = reply
		}
		w.restart()
	})
}

func check(r *rapid.T, before, after *metadata.Image, c Command) {
	for id, t := range after.TopicsByID {
		for i, p := range t.Partitions {
			fail := func(what string) { r.Helper(); r.Fatalf("after %T %+v: %s: %+v", c, c, what, p.PartitionRecord) }
			if len(p.Replicas) == 0 || len(p.ISR) == 0 {
				fail("nothing left")
			}
			if !subset(p.ISR, p.Replicas) || !subset(p.Adding, p.Replicas) || !subset(p.Removing, p.Replicas) || len(without(p.Replicas, p.Adding)) == 0 || len(without(p.Replicas, p.Removing)) == 0 {
				fail("not within the replicas")
			}
			for _, list := range [][]int32{p.Replicas, p.ISR, p.Adding, p.Removing} {
				if s := slices.Sorted(slices.Values(list)); len(slices.Compact(s)) != len(list) {
					fail("repeats")
				}
			}
			if p.Leader != -1 && !slices.Contains(p.ISR, p.Leader) {
				fail("the leader is not in the ISR")
			}
			for _, member := range p.ISR {
				b := after.Brokers[member]
				if fenced := b == nil || b.Fenced; fenced && (p.Leader == member || p.Leader != -1) {
					fail("a fenced member beside a leader")
				}
			}
			for _, member := range p.ISR {
				if b := after.Brokers[member]; p.Leader == -1 && !p.Lost && b != nil && !b.Fenced && !b.ShuttingDown {
					fail("no leader, though a member is there")
				}
			}
			if p.Lost && (p.Leader != -1 || len(p.ISR) != 1 || len(p.Replicas) == 1) {
				fail("lost, but led or not alone")
			}
			old, ok := before.TopicsByID[id]
			if !ok || i >= len(old.Partitions) {
				continue
			}
			q := old.Partitions[i]
			switch {
			case reflect.DeepEqual(p.PartitionRecord, q.PartitionRecord):
			case p.PartitionEpoch != q.PartitionEpoch+1:
				fail(fmt.Sprintf("one change, one partition epoch, after %+v", q.PartitionRecord))
			case p.Leader != q.Leader && p.LeaderEpoch != q.LeaderEpoch+1, p.Leader == q.Leader && p.LeaderEpoch != q.LeaderEpoch:
				fail(fmt.Sprintf("leader epoch, after %+v", q.PartitionRecord))
			}
			// Only an election that says so may lose the whole old ISR, or a reassignment that its leader's proposal completes.
			_, proposed := c.(AlterPartitionsCommand)
			if q.Lost && !p.Lost && !p.Unclean {
				fail("found again")
			}
			if !p.Unclean && !(proposed && len(q.Removing) > 0) && !slices.ContainsFunc(p.ISR, func(m int32) bool { return slices.Contains(q.ISR, m) }) {
				fail(fmt.Sprintf("the ISR was exchanged, from %v", q.ISR))
			}
		}
	}
	if after.LastBrokerEpoch < before.LastBrokerEpoch || after.NextProducerID < before.NextProducerID {
		r.Fatal("a counter fell")
	}
}

type drawer struct {
	*rapid.T
	w     *world
	racks []string
	runs  byte
}

func (d *drawer) n(min, max int) int { return rapid.IntRange(min, max).Draw(d.T, "n") }
func (d *drawer) yes() bool          { return rapid.Bool().Draw(d.T, "yes") }
func (d *drawer) broker() int32      { return int32(d.n(1, len(d.racks))) }

// list draws distinct brokers, now and then one too many.
func (d *drawer) list() []int32 {
	var out []int32
	for range d.n(1, 3) {
		if b := d.broker(); !slices.Contains(out, b) || d.n(0, 20) == 0 {
			out = append(out, b)
		}
	}
	return out
}

func (d *drawer) name() string { return string(rune('a' + d.n(0, 3))) }

func (d *drawer) partition() *metadata.Partition {
	names := d.w.img.TopicNames()
	if len(names) == 0 {
		return nil
	}
	t := d.w.img.Topics[names[d.n(0, len(names)-1)]]
	return t.Partitions[d.n(0, len(t.Partitions)-1)]
}

func (d *drawer) epoch(broker int32) int64 {
	if b := d.w.img.Brokers[broker]; b != nil {
		return b.Epoch
	}
	return int64(d.n(0, 9))
}

func (d *drawer) heartbeat() Command {
	b := d.broker()
	return HeartbeatCommand{Broker: b, Epoch: d.epoch(b), Ready: d.n(0, 3) > 0, Leave: d.n(0, 5) == 0, Thin: []PartitionRef{{tp.UUID{1}, 2}}}
}

func (d *drawer) command() Command {
	switch d.n(0, 19) {
	case 0, 1:
		d.runs++
		b := d.broker()
		r := node(b, d.runs, d.racks[b-1])
		r.Directory = tp.UUID{byte(d.n(0, 2))} // 0 is not known
		return RegisterCommand{r}
	case 2, 3, 4, 5:
		return d.heartbeat()
	case 6:
		return TickCommand{Silent: d.list(), Preferred: d.yes()}
	case 7:
		return TickCommand{Preferred: d.yes()}
	case 8:
		return CreateTopicsCommand{Topics: []NewTopic{{Name: d.name(), Partitions: int32(d.n(1, 4)), ReplicationFactor: int16(d.n(1, 3))}}, ValidateOnly: d.n(0, 9) == 0}
	case 9:
		return CreateTopicsCommand{Topics: []NewTopic{{Name: d.name(), Partitions: -1, ReplicationFactor: -1, Assignments: map[int32][]int32{0: d.list()}}}}
	case 10:
		if d.n(0, 3) > 0 {
			return CreatePartitionsCommand{Topics: []NewPartitions{{Topic: d.name(), Count: int32(d.n(1, 6))}}, ValidateOnly: d.n(0, 9) == 0}
		}
		if p := d.partition(); p != nil {
			return DeleteTopicsCommand{IDs: []tp.UUID{p.Topic}}
		}
		return ProducerIDsCommand{}
	case 11:
		value := fmt.Sprint(d.yes())
		if d.yes() {
			return AlterTopicCommand{Topic: d.name(), Changes: []Change{{uncleanKey, Set, &value}}, ValidateOnly: d.n(0, 9) == 0}
		}
		return ReplaceTopicCommand{Topic: d.name()}
	case 12:
		value, broker, key := fmt.Sprint(d.yes()), d.broker(), drainKey
		if d.n(0, 3) == 0 {
			broker, key = ClusterWide, uncleanKey
		}
		if d.yes() {
			return ReplaceBrokerCommand{Broker: broker, Configs: map[string]string{key: value}}
		}
		return AlterBrokerCommand{Broker: broker, Changes: []Change{{key, Set, &value}}}
	case 13:
		return UnregisterCommand{Broker: d.broker(), Force: d.yes()}
	case 14:
		c := ElectLeadersCommand{Unclean: d.yes()}
		if p := d.partition(); p != nil && d.yes() {
			c.Partitions = []PartitionRef{{p.Topic, p.Index}}
		}
		return c
	}
	p := d.partition()
	if p == nil {
		return d.heartbeat()
	}
	t := d.w.img.TopicsByID[p.Topic]
	switch d.n(0, 4) {
	case 0:
		c := Reassignment{Topic: t.Name, Index: p.Index}
		if d.n(0, 3) > 0 {
			c.Replicas = d.list()
		}
		return ReassignCommand{[]Reassignment{c}}
	case 1:
		id := tp.UUID{byte(d.n(0, 3)), 9}
		s := tier.Segment{ID: id, TopicID: p.Topic, Topic: t.Name, Partition: p.Index, Start: p.Remote.End() + 1, End: p.Remote.End() + 10, Broker: p.Leader, LeaderEpoch: p.LeaderEpoch,
			Epochs: []leaderepoch.Entry{{}}}
		for _, have := range p.Remote {
			if have.State == tier.CopyStarted {
				return FinishCopyCommand{*have, Finished{ObjectBytes: 1, CustomMetadata: []byte{1}}}
			}
			if have.ID == id && d.yes() {
				if have.State == tier.DeleteStarted {
					return FinishDeleteCommand{p.Topic, p.Index, []tp.UUID{id}}
				}
				return StartDeleteCommand{p.Topic, p.Index, p.Leader, p.LeaderEpoch, []tp.UUID{id}, have.End + 1}
			}
		}
		if slices.ContainsFunc(p.Remote, func(s *tier.Segment) bool { return s.ID == id }) {
			return DisableRemoteCommand{p.Topic, p.Index, p.Leader, p.LeaderEpoch, 3}
		}
		return StartCopyCommand{s}
	}
	// What a leader does: take in who has caught up, or leave one out.
	change := ISRChange{PartitionRef: PartitionRef{p.Topic, p.Index}, LeaderEpoch: p.LeaderEpoch - int32(d.n(0, 9)/9), PartitionEpoch: p.PartitionEpoch - int32(d.n(0, 9)/9)}
	for _, id := range p.Replicas {
		if id == p.Leader || d.n(0, 3) > 0 {
			change.ISR = append(change.ISR, id)
			change.Epochs = append(change.Epochs, []int64{d.epoch(id), d.epoch(id), -1}[d.n(0, 2)])
		}
	}
	return AlterPartitionsCommand{p.Leader, d.epoch(p.Leader), []ISRChange{change}}
}

func TestErrorsCrossTheNetwork(t *testing.T) {
	sent := []*Error{nil, {errWithoutName, "new"}}
	for _, k := range kinds {
		sent = append(sent, refuse(k.kind, "about %s", k.name))
	}
	raw, err := MarshalReply(sent)
	if err != nil {
		t.Fatal(err)
	}
	reply, err := UnmarshalReply(DeleteTopicsCommand{}, raw)
	if err != nil {
		t.Fatal(err)
	}
	got := reply.([]*Error)
	if got[0] != nil || got[0].OrNil() != nil || got[0].Error() != "" || got[1].Kind != ErrUnknown || got[1].Message != "new" || !reflect.DeepEqual(got[2:], sent[2:]) {
		t.Fatalf("%+v", got)
	}
	seen := map[string]bool{}
	for _, k := range kinds {
		if seen[k.name] {
			t.Fatal("two kinds are named", k.name)
		}
		seen[k.name] = true
	}
}

var errWithoutName = fmt.Errorf("of a newer version")

// FuzzCommand decodes and runs whatever comes from the network: it is refused or gives records that apply.
func FuzzCommand(f *testing.F) {
	for _, c := range commands {
		raw, err := MarshalCommand(c)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	w := newCluster(f, "a", "b")
	id := w.assigned("t", []int32{1, 2}, []int32{2})
	for _, c := range []Command{AlterPartitionsCommand{1, 1, []ISRChange{{PartitionRef{id, 0}, 0, 0, []int32{1}, []int64{1}}}},
		ReassignCommand{[]Reassignment{{"t", 1, []int32{1}}}}, HeartbeatCommand{Broker: 1, Epoch: 1, Leave: true}} {
		raw, err := MarshalCommand(c)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := UnmarshalCommand(raw)
		if err != nil {
			return
		}
		records, reply, err := c.Run(w.img, w.env)
		if err != nil {
			return
		}
		if _, err := w.img.Apply(records); err != nil {
			t.Fatalf("%+v: %v", c, err)
		}
		if _, err := MarshalReply(reply); err != nil {
			t.Fatal(err)
		}
	})
}
