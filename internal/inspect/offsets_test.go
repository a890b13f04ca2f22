package inspect_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/grouprecord"
	"github.com/varve-io/varve/internal/inspect"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tp"
)

// groupLog is a batch of __consumer_offsets: an offset, its tombstone, a classic group's state, and parts of a consumer group.
func groupLog(t testing.TB) []byte {
	t.Helper()
	ok := kmsg.NewOffsetCommitKey()
	ok.Version, ok.Group, ok.Topic, ok.Partition = 1, "g", "topic", 3
	ov := kmsg.NewOffsetCommitValue()
	ov.Version, ov.Offset, ov.LeaderEpoch, ov.Metadata, ov.CommitTimestamp = 3, 42, 7, "note", 1700000000000
	gk := kmsg.NewGroupMetadataKey()
	gk.Version, gk.Group = 2, "g"
	gv := kmsg.NewGroupMetadataValue()
	gv.Version, gv.ProtocolType, gv.Generation = 3, "consumer", 5
	sub, as := kmsg.NewConsumerMemberMetadata(), kmsg.NewConsumerMemberAssignment()
	sub.Topics = []string{"topic"}
	at := kmsg.NewConsumerMemberAssignmentTopic()
	at.Topic, at.Partitions = "topic", []int32{3, 4}
	as.Topics = append(as.Topics, at)
	m := kmsg.NewGroupMetadataValueMember()
	m.MemberID, m.ClientHost, m.Subscription, m.Assignment = "m-1", "/10.0.0.1", sub.AppendTo(nil), as.AppendTo(nil)
	gv.Members = append(gv.Members, m)
	b := recordbatch.NewBuilder()
	b.Add(recordbatch.Record{Key: ok.AppendTo(nil), Value: ov.AppendTo(nil)})
	b.Add(recordbatch.Record{Key: ok.AppendTo(nil)})
	b.Add(recordbatch.Record{Key: gk.AppendTo(nil), Value: gv.AppendTo(nil)})
	for _, e := range []grouprecord.Entry{
		{Key: grouprecord.Key{Kind: grouprecord.KindCurrent, Group: "new", Name: "m"},
			Value: &grouprecord.Current{Epoch: 7, PreviousEpoch: 6, State: grouprecord.UnrevokedPartitions, Assigned: grouprecord.Owned{tp.UUID{1}: {0: 7}}, Revoking: grouprecord.Owned{}}},
		{Key: grouprecord.Key{Kind: grouprecord.KindGroupEpoch, Group: "new"}},
	} {
		b.Add(recordbatch.Record{Key: e.Record().Key, Value: e.Record().Value})
	}
	out, err := b.Build()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestGroupRecords(t *testing.T) {
	raw := groupLog(t)
	var got []string
	err := inspect.Read("00000000000000000000.log", bytes.NewReader(raw), int64(len(raw)), inspect.Options{Offsets: true}, func(i inspect.Item) error {
		b, err := json.Marshal(i)
		got = append(got, string(b), i.Text())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		`{"offset":0,"group":"g","topic":"topic","partition":3,"committedOffset":42,"leaderEpoch":7,"metadata":"note","commitTimestamp":1700000000000}`,
		`  0  group "g" topic-3: offset 42, epoch 7, "note", committed 2023-11-14T22:13:20.000Z`,
		`{"offset":1,"group":"g","deleted":true,"topic":"topic","partition":3}`,
		`  1  group "g" topic-3: deleted`,
		`{"offset":2,"group":"g","protocolType":"consumer","generation":5,"members":[{"memberId":"m-1","clientId":"","clientHost":"/10.0.0.1","topics":["topic"],"assigned":{"topic":[3,4]}}]}`,
		`  2  group "g": consumer generation 5, protocol "", leader "", 1 members; m-1 from /10.0.0.1 [topic] map[topic:[3 4]]`,
		`{"offset":3,"group":"new","kind":"ConsumerGroupCurrentMemberAssignment","name":"m","value":{"memberEpoch":7,"previousMemberEpoch":6,"state":1,"assignedPartitions":{"AQAAAAAAAAAAAAAAAAAAAA":{"0":7}},"partitionsPendingRevocation":{}}}`,
		`  3  group "new" ConsumerGroupCurrentMemberAssignment "m": {"memberEpoch":7,"previousMemberEpoch":6,"state":1,"assignedPartitions":{"AQAAAAAAAAAAAAAAAAAAAA":{"0":7}},"partitionsPendingRevocation":{}}`,
		`{"offset":4,"group":"new","deleted":true,"kind":"ConsumerGroupMetadata"}`,
		`  4  group "new" ConsumerGroupMetadata: deleted`,
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// No file, whatever is in it, makes the reader panic or hang.
func FuzzRead(f *testing.F) {
	for _, k := range inspect.Kinds() {
		f.Add(string(k), groupLog(f))
	}
	f.Add("leader-epochs", []byte("0\n1\n0 0\n"))
	f.Add("index", []byte{0, 0, 0, 6, 0, 0, 1, 33})
	f.Fuzz(func(t *testing.T, kind string, b []byte) {
		for _, o := range []inspect.Options{{Records: true}, {Offsets: true}, {Full: true, Manifest: b}} {
			o.Kind = inspect.Kind(kind)
			_ = inspect.Read("00000000000000000007.x", bytes.NewReader(b), int64(len(b)), o, func(i inspect.Item) error {
				if _, err := json.Marshal(i); err != nil {
					t.Fatal(err)
				}
				if i.Text() == "" {
					t.Fatal("an item without a text")
				}
				return nil
			})
		}
	})
}
