package metadata

import (
	"testing"

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
