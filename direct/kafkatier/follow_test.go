package kafkatier

import (
	"log/slog"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/remotelog"
	"github.com/varve-io/varve/internal/tp"
)

// A partition of the metadata topic that is read again, for the sake of a partition that came into use, brings nothing back to
// those that were in use: no segment that was deleted, not even for a moment.
func TestReplayBringsNothingBack(t *testing.T) {
	f := newFollower(nil, remotelog.Topic, slog.New(slog.DiscardHandler))
	of := remotelog.PartitionID{Topic: "t", TopicID: tp.UUID{1}}
	old := f.get(userPartition{of.TopicID, of.Index})
	f.source[0] = &source{}
	records := []remotelog.Record{
		&remotelog.Segment{PartitionID: of, End: 9, Size: 1, Epochs: []leaderepoch.Entry{{}}}, &remotelog.Update{PartitionID: of, State: remotelog.CopyFinished},
		&remotelog.Update{PartitionID: of, State: remotelog.DeleteStarted}, &remotelog.Update{PartitionID: of, State: remotelog.DeleteFinished},
	}
	read := func(n int) {
		p := kgo.FetchPartition{}
		for i, r := range records[:n] {
			p.Records = append(p.Records, &kgo.Record{Offset: int64(i), Value: remotelog.Marshal(r)})
		}
		f.take(kgo.Fetches{{Topics: []kgo.FetchTopic{{Topic: remotelog.Topic, Partitions: []kgo.FetchPartition{p}}}}})
	}
	if read(2); !old.state.Holds(5) {
		t.Fatal("a segment is not found")
	}
	if read(4); old.state.Holds(5) {
		t.Fatal("a deleted segment is found")
	}
	again := f.get(userPartition{of.TopicID, 1})
	f.source[0] = &source{end: 4, waiting: []*followed{again}}
	if read(2); old.state.Holds(5) || again.caughtUp() {
		t.Errorf("a deleted segment is back: %v", old.state.Holds(5))
	}
	if read(4); !again.caughtUp() {
		t.Error("all was read")
	}
}

// What nobody uses any more is let go, and with it the partition of the topic that told of nothing else.
func TestRetire(t *testing.T) {
	client, err := kgo.NewClient(kgo.SeedBrokers("localhost:1"))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	f := newFollower(client, remotelog.Topic, slog.New(slog.DiscardHandler))
	a, b, c := f.get(userPartition{index: 0}), f.get(userPartition{index: 1}), f.get(userPartition{index: 2})
	f.source[0], f.source[1] = &source{users: []*followed{a, b}}, &source{users: []*followed{c}}
	f.keep(map[*followed]bool{a: true})
	f.retire()
	if len(f.all) != 1 || len(f.source) != 1 || len(f.source[0].users) != 1 || f.source[0].users[0] != a {
		t.Errorf("%v, %v", f.all, f.source)
	}
}
