package metadata

import (
	"fmt"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/varve-io/varve/internal/tp"
)

func TestDiffTellsWhatChanged(t *testing.T) {
	apply := func(img *Image, records ...Record) *Image {
		next, err := img.Apply(records)
		if err != nil {
			t.Fatal(err)
		}
		return next
	}
	a := apply(Empty(), TopicRecord{Name: "a", ID: tp.UUID{1}}, TopicRecord{Name: "b", ID: tp.UUID{2}}, PartitionRecord{Topic: tp.UUID{1}})
	b := apply(a, RemoveTopicRecord{tp.UUID{2}}, TopicRecord{Name: "b", ID: tp.UUID{3}}, BrokerConfigRecord{Broker: -1, Configs: map[string]string{"k": "v"}})
	d := Diff(a, b)
	if len(d.Removed) != 1 || d.Removed[0].ID != (tp.UUID{2}) || len(d.Changed) != 1 || d.Changed[0].ID != (tp.UUID{3}) || !d.Configs {
		t.Fatalf("%+v", d)
	}
	if len(a.Topics) != 2 || a.Topics["b"].ID != (tp.UUID{2}) {
		t.Fatal("applying changed the old image")
	}
	c := apply(b, PartitionRecord{Topic: tp.UUID{1}, LeaderEpoch: 1})
	if d = Diff(b, c); len(d.Changed) != 1 || d.Changed[0].Name != "a" || a.Topics["a"].Partitions[0].LeaderEpoch != 0 {
		t.Fatalf("%+v", d)
	}
}

func TestImpossibleRecords(t *testing.T) {
	img, err := Empty().Apply([]Record{TopicRecord{Name: "a", ID: tp.UUID{1}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []Record{TopicRecord{Name: "a", ID: tp.UUID{2}}, PartitionRecord{Topic: tp.UUID{1}, Index: 1}, PartitionRecord{Topic: tp.UUID{9}}, RemoveTopicRecord{tp.UUID{9}},
		RemoteStateRecord{Topic: tp.UUID{1}, Index: 0}} {
		if _, err := img.Apply([]Record{r}); err == nil {
			t.Errorf("%T was applied", r)
		}
	}
}

func FuzzUnmarshal(f *testing.F) {
	b, err := Marshal([]Record{ClusterRecord{ID: "c"}, TopicRecord{Name: "t", ID: tp.UUID{1}}, PartitionRecord{Topic: tp.UUID{1}, Replicas: []int32{1}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		records, err := Unmarshal(b)
		if err != nil {
			return
		}
		if img, err := Empty().Apply(records); err == nil {
			if _, err := Empty().Apply(img.Records()); err != nil {
				t.Fatal("an image does not survive its own snapshot:", err)
			}
		}
	})
}

// Whatever way it takes, Diff says what a comparison of all topics says.
func TestDiffRemembers(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		images := []*Image{Empty()}
		for range rapid.IntRange(1, 2*maxSteps).Draw(r, "length") {
			img := images[rapid.IntRange(max(0, len(images)-3), len(images)-1).Draw(r, "from")] // histories fork
			var records []Record
			many := rapid.IntRange(0, 9).Draw(r, "many") == 0
			for i := range rapid.IntRange(0, 3).Draw(r, "records") {
				id := tp.UUID{byte(rapid.IntRange(1, 5).Draw(r, "topic"))}
				switch _, exists := img.TopicsByID[id]; {
				case slices.ContainsFunc(records, func(r Record) bool { x, ok := r.(RemoveTopicRecord); return ok && x.Topic == id }):
				case !exists && i == 0:
					records = append(records, TopicRecord{Name: string(rune('a' + id[0])), ID: id}, PartitionRecord{Topic: id})
				case exists && rapid.Bool().Draw(r, "remove"):
					records = append(records, RemoveTopicRecord{id})
				case exists:
					records = append(records, PartitionRecord{Topic: id, LeaderEpoch: 1})
				}
			}
			for i := range maxStepTopics + 1 {
				if id := (tp.UUID{9, byte(i), byte(i >> 8)}); many && img.TopicsByID[id] == nil {
					records = append(records, TopicRecord{Name: fmt.Sprint("many", i), ID: id})
				}
			}
			next, err := img.Apply(records)
			if err != nil {
				r.Fatal(err)
			}
			images = append(images, next)
		}
		old, now := rapid.SampledFrom(images).Draw(r, "old"), images[len(images)-1]
		forgetful := *now
		forgetful.self, forgetful.recent = nil, nil
		if a, b := Diff(old, now), Diff(old, &forgetful); !reflect.DeepEqual(a, b) {
			r.Fatalf("%+v, but in fact %+v", a, b)
		}
	})
}

func TestALongBatchSurvives(t *testing.T) {
	records := make([]Record, 140_000)
	for i := range records {
		records[i] = ProducerIDsRecord{int64(i)}
	}
	b, err := Marshal(records)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := Unmarshal(b); err != nil || len(again) != len(records) {
		t.Fatal(len(again), err)
	}
}
