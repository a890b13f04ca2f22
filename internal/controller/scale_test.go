package controller

import (
	"fmt"
	"testing"

	"github.com/varve-io/varve/internal/metadata"
)

func cluster5(b *testing.B) *world { return newCluster(b, "a", "b", "c", "a", "b") }

func (w *world) must(c Command) {
	records, _, err := c.Run(w.img, w.env)
	if err == nil {
		w.img, err = w.img.Apply(records)
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

func topics(n int, partitions int32) (out []NewTopic) {
	for i := range n {
		out = append(out, NewTopic{Name: fmt.Sprintf("topic.%d", i), Partitions: partitions, ReplicationFactor: 3})
	}
	return out
}

func BenchmarkCreateOneLargeTopic(b *testing.B) {
	w := cluster5(b)
	empty := w.img
	for b.Loop() {
		w.img = empty
		w.must(CreateTopicsCommand{Topics: topics(1, MaxPartitions)})
	}
}

func BenchmarkCreateManyTopics(b *testing.B) {
	w := cluster5(b)
	empty := w.img
	for b.Loop() {
		w.img = empty
		w.must(CreateTopicsCommand{Topics: topics(1000, 10)})
	}
}

// 10,000 topics exist; another comes and goes.
func BenchmarkCreateOneTopicMore(b *testing.B) {
	w := cluster5(b)
	w.must(CreateTopicsCommand{Topics: topics(10_000, 1)})
	full := w.img
	for b.Loop() {
		w.img = full
		w.must(CreateTopicsCommand{Topics: []NewTopic{{Name: "one.more", Partitions: 1, ReplicationFactor: 3}}})
	}
}

func BenchmarkAlterOnePartition(b *testing.B) {
	w := cluster5(b)
	w.must(CreateTopicsCommand{Topics: topics(10_000, 1)})
	p := w.partition("topic.7", 0)
	full := w.img
	c := AlterPartitionsCommand{p.Leader, w.img.Brokers[p.Leader].Epoch, []ISRChange{{PartitionRef{p.Topic, 0}, 0, 0, []int32{p.Leader}, []int64{-1}}}}
	for b.Loop() {
		w.img = full
		w.must(c)
	}
	if len(w.partition("topic.7", 0).ISR) != 1 {
		b.Fatal("not altered")
	}
}

// What one batch changed, among 10,000 topics.
func BenchmarkDiff(b *testing.B) {
	w := cluster5(b)
	w.must(CreateTopicsCommand{Topics: topics(10_000, 1)})
	old := w.img
	w.must(CreateTopicsCommand{Topics: []NewTopic{{Name: "one.more", Partitions: 1, ReplicationFactor: 3}}})
	now := w.img
	for b.Loop() {
		if d := metadata.Diff(old, now); len(d.Changed) != 1 {
			b.Fatal(d)
		}
	}
}

func BenchmarkFence(b *testing.B) {
	w := cluster5(b)
	w.must(CreateTopicsCommand{Topics: topics(1, MaxPartitions)})
	full := w.img
	for b.Loop() {
		w.img = full
		w.must(TickCommand{Silent: []int32{1}})
	}
}
