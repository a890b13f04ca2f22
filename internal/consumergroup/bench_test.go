package consumergroup

import (
	"fmt"
	"testing"

	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

// BenchmarkHeartbeat is a heartbeat of one of many members to which nothing happens.
func BenchmarkHeartbeat(b *testing.B) {
	w := &world{g: New("g"), now: 1}
	w.env.Config = Config{SessionMs: 45_000, SizeMax: 10_000, Assignors: []string{"uniform"}, AssignmentMs: 1000}
	img := metadata.Empty()
	t := &metadata.Topic{Name: "t", ID: tp.UUID{1}, Partitions: make([]*metadata.Partition, 5000)}
	for i := range t.Partitions {
		t.Partitions[i] = &metadata.Partition{}
	}
	img.Topics["t"], img.TopicsByID[t.ID] = t, t
	w.env.Image = img
	beats := make([]Heartbeat, 2000)
	for i := range beats {
		beats[i] = Heartbeat{MemberID: fmt.Sprint("m", i), RebalanceMs: 60_000, Topics: []string{"t"}, Owned: Partitions{}}
	}
	for range 4 {
		for i := range beats {
			a, _, err := w.g.Heartbeat(beats[i], w.env, w.now)
			if err != nil {
				b.Fatal(err)
			}
			beats[i].Epoch = a.Epoch
			for id, partitions := range a.Assignment {
				beats[i].Owned[id] = nil
				for p := range partitions {
					beats[i].Owned[id] = append(beats[i].Owned[id], p)
				}
			}
			w.now++
		}
		w.now += 1000
	}
	if w.g.State() != Stable {
		b.Fatal(w.g.State())
	}
	for i := 0; b.Loop(); i++ {
		w.now++
		if _, _, err := w.g.Heartbeat(beats[i%len(beats)], w.env, w.now); err != nil {
			b.Fatal(err)
		}
		w.g.NextDeadline()
	}
}
