package tierinfo

import (
	"reflect"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

func TestThroughTheWire(t *testing.T) {
	req := kmsg.NewPtrDescribeLogDirsRequest()
	req.Version = 4
	Request(req, Segments)
	got := kmsg.NewPtrDescribeLogDirsRequest()
	got.Version = 4
	if err := got.ReadFrom(req.AppendTo(nil)); err != nil || Requested(got) != Segments {
		t.Fatal(err, Requested(got))
	}
	if Requested(kmsg.NewPtrDescribeLogDirsRequest()) != 0 {
		t.Fatal("asked out of nothing")
	}
	want := Partition{LocalStart: 7, RemoteEnd: 6, Tiered: true, Failure: "x", Unstable: -1,
		List: []tier.Segment{{ID: tp.UUID{1}, Topic: "t", Start: 0, End: 6, Epochs: []leaderepoch.Entry{{Epoch: 1, StartOffset: 0}}, State: tier.CopyFinished}}}
	resp := kmsg.NewPtrDescribeLogDirsResponse()
	resp.Version = 4
	dir, topic, part := kmsg.NewDescribeLogDirsResponseDir(), kmsg.NewDescribeLogDirsResponseDirTopic(), kmsg.NewDescribeLogDirsResponseDirTopicPartition()
	if err := Set(&part, want); err != nil {
		t.Fatal(err)
	}
	if err := SetDeleted(resp, []Deleted{{Topic: "gone", ID: tp.UUID{2}, List: want.List}}); err != nil {
		t.Fatal(err)
	}
	topic.Partitions = append(topic.Partitions, part)
	dir.Topics = append(dir.Topics, topic)
	resp.Dirs = append(resp.Dirs, dir)
	back := kmsg.NewPtrDescribeLogDirsResponse()
	back.Version = 4
	if err := back.ReadFrom(resp.AppendTo(nil)); err != nil {
		t.Fatal(err)
	}
	p, ok, err := Get(&back.Dirs[0].Topics[0].Partitions[0])
	if err != nil || !ok || !reflect.DeepEqual(p, want) {
		t.Fatalf("%+v %v %v", p, ok, err)
	}
	if d, err := GetDeleted(back); err != nil || len(d) != 1 || d[0].Topic != "gone" {
		t.Fatal(d, err)
	}
}

func TestLocalStart(t *testing.T) {
	p := kmsg.NewFetchRequestTopicPartition()
	p.LogStartOffset = 5
	if got := LocalStart(&p); got != 5 {
		t.Errorf("of one that says nothing: %d", got)
	}
	SetLocalStart(&p, 9)
	if got := LocalStart(&p); got != 9 {
		t.Errorf("%d, want 9", got)
	}
	p.UnknownTags.Set(Tag, []byte{1, 2})
	if got := LocalStart(&p); got != 5 {
		t.Errorf("of half a field: %d", got)
	}
	SetLocalStart(&p, -3)
	if got := LocalStart(&p); got != 5 {
		t.Errorf("below the log start: %d", got)
	}
}
