package compat

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// The Java client with group.protocol=consumer (KIP-848), and Kafka's tools on its group.
func TestKafkaConsumerProtocol(t *testing.T) {
	b := start(t)
	k := kafkaTools(t, b.addr)
	b.topic(t, "new", 3)
	lines := values(300)
	k.feed(t, strings.Join(lines, "\n")+"\n", "produce", "--topic", "new")
	k.run(t, "configs", "--alter", "--entity-type", "groups", "--entity-name", "new", "--add-config", "consumer.session.timeout.ms=50000")
	has(t, "configs", k.run(t, "configs", "--describe", "--entity-type", "groups", "--entity-name", "new"), `consumer.session.timeout.ms=50000 .*DYNAMIC_GROUP_CONFIG`)
	consume := []string{"consume", "--topic", "new", "--group", "new", "--command-property", "group.protocol=consumer", "--from-beginning", "--timeout-ms", "30000", "--max-messages"}
	if out := k.run(t, consume[0], append(consume[1:], "300")...); strings.Count(out, "\n") != 300 {
		t.Fatalf("%d bytes: %s", len(out), tail(out))
	}
	has(t, "list", k.run(t, "groups", "--list", "--type", "consumer", "--state", "empty"), `^new\s+Consumer\s+Empty`)
	more := make(chan string, 1)
	go func() {
		out, _, err := (command{limit: 90 * time.Second}).try(t, append([]string{k.path, consume[0], "--bootstrap-server", b.addr}, append(consume[1:], "1")...)...)
		more <- fmt.Sprint(out, err)
	}()
	await(t, "the group has a member", func() bool {
		d, err := b.admin(t).DescribeConsumerGroups(within(t), "new")
		return err == nil && d["new"].State == "Stable" && len(d["new"].Members) == 1
	})
	has(t, "members", k.run(t, "groups", "--describe", "--group", "new", "--members", "--verbose"), `^new\s+\S+\s+\S+\s+console-consumer\s+3\s+\d+\s+new:0,1,2\s+\d+\s+new:0,1,2`)
	has(t, "state", k.run(t, "groups", "--describe", "--group", "new", "--state", "--verbose"), `^new\s.*uniform\s+Stable\s+\d+\s+\d+\s+1`)
	has(t, "offsets", k.run(t, "groups", "--describe", "--group", "new", "--offsets", "--verbose"), `^new\s+new\s+[012]\s`)
	k.feed(t, "one more\n", "produce", "--topic", "new")
	if out := <-more; !strings.HasPrefix(out, "one more\n") {
		t.Errorf("the member read %s", tail(out))
	}
	k.run(t, "groups", "--reset-offsets", "--group", "new", "--topic", "new", "--to-earliest", "--execute")
	has(t, "delete", k.run(t, "groups", "--delete", "--group", "new"), `was successful`)
}

// A consumer group goes on where the partitions of __consumer_offsets are served by the other kind of broker: who finds them knows its members,
// their epochs, and what it committed.
func TestConsumerGroupsOfTheOtherBroker(t *testing.T) {
	t.Run("ours", func(t *testing.T) { movesGroups(t, true) })
	t.Run("theirs", func(t *testing.T) { movesGroups(t, false) })
}

const offsetsTopic = "__consumer_offsets"

func movesGroups(t *testing.T, fromUs bool) {
	b := start(t)
	k := kafkaTools(t, b.addr)
	peer, home, stop := k.peer(t)
	from, to := peer, b
	data := map[*broker]string{b: b.dir, peer: filepath.Join(home, "node1", "data")}
	if fromUs {
		from, to = b, peer
	}
	for _, x := range []*broker{from, to} {
		x.topic(t, "read", 4)
		x.beat(t, "warm-up", "nobody", 0, nil) // makes the topic of the groups
	}
	// Two members, of which one gave up partitions for the other; the other subscribes by an expression.
	from.beat(t, "g", "first", 0, nil, "read")
	first := from.beat(t, "g", "first", 2, nil, "read")
	from.beat(t, "g", "second", 0, pointer("rea."))
	await(t, "both are there", func() bool {
		d := from.describe(t, "g")
		from.beat(t, "g", "first", d.epochOf("first"), nil, "read")
		from.beat(t, "g", "second", d.epochOf("second"), pointer("rea."))
		return d.State == "Stable" && len(d.Members) == 2 && d.epochOf("first") > first.MemberEpoch && len(d.Members[0].Assignment["read"]) == 2 && len(d.Members[1].Assignment["read"]) == 2
	})
	var os kadm.Offsets
	os.AddOffset("read", 1, 42, -1)
	if err := from.admin(t).CommitAllOffsets(within(t), "plain", os); err != nil {
		t.Fatal(err)
	}
	want := from.describe(t, "g")
	b.stop(t)
	command{}.run(t, stop...)
	for i := range 4 {
		moveFolder(t, filepath.Join(data[from], fmt.Sprint(offsetsTopic, "-", i)), filepath.Join(data[to], fmt.Sprint(offsetsTopic, "-", i)))
	}
	if fromUs {
		command{limit: 2 * time.Minute}.run(t, k.path, "start", "--dir", home)
	} else {
		b.run(t, []string{"server", "--dir", b.dir, "--listen", b.addr}, nil)
	}
	var got description
	await(t, "the group is known", func() bool {
		got = to.describe(t, "g")
		return got.Err == nil
	})
	if got.Epoch != want.Epoch || got.AssignmentEpoch != want.AssignmentEpoch || len(got.Members) != 2 || got.epochOf("first") != want.epochOf("first") || got.epochOf("second") != want.epochOf("second") ||
		got.AssignorName != want.AssignorName || got.Members[1].SubscribedTopicRegex == nil || *got.Members[1].SubscribedTopicRegex != "rea." {
		t.Errorf("the group was %+v, and is %+v", want, got)
	}
	offsets, err := to.admin(t).FetchOffsets(within(t), "plain")
	if o, ok := offsets.Lookup("read", 1); err != nil || !ok || o.At != 42 {
		t.Errorf("committed: %+v %v", offsets, err)
	}
	// The members go on; that the topic has another id here is news to the group.
	if r := to.beat(t, "g", "first", want.epochOf("first"), nil, "read"); r.ErrorCode != 0 {
		t.Errorf("a member's next heartbeat: %+v", r)
	}
}

func pointer(s string) *string { return &s }

func moveFolder(t *testing.T, from, to string) {
	t.Helper()
	id, err := os.ReadFile(filepath.Join(to, "partition.metadata"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(to); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	// The other cluster knows the topic by another id.
	if err := os.WriteFile(filepath.Join(to, "partition.metadata"), id, 0o600); err != nil {
		t.Fatal(err)
	}
}

type description struct{ kadm.DescribedConsumerGroup }

func (d description) epochOf(member string) int32 {
	for _, m := range d.Members {
		if m.MemberID == member {
			return m.MemberEpoch
		}
	}
	return -1
}

func (b *broker) describe(t *testing.T, group string) description {
	t.Helper()
	all, err := b.admin(t).DescribeConsumerGroups(within(t), group)
	if err != nil {
		return description{kadm.DescribedConsumerGroup{Err: err}}
	}
	return description{all[group]}
}

// beat sends a full heartbeat of a member that owns what it last was assigned, until a coordinator answers.
func (b *broker) beat(t *testing.T, group, member string, epoch int32, regex *string, topics ...string) *kmsg.ConsumerGroupHeartbeatResponse {
	t.Helper()
	req := kmsg.NewPtrConsumerGroupHeartbeatRequest()
	req.Group, req.MemberID, req.MemberEpoch, req.RebalanceTimeoutMillis, req.SubscribedTopicNames, req.SubscribedTopicRegex = group, member, epoch, 60_000, topics, regex
	if topics == nil && regex == nil {
		req.SubscribedTopicNames = []string{}
	}
	req.Topics = []kmsg.ConsumerGroupHeartbeatRequestTopic{}
	for _, m := range b.describe(t, group).Members {
		if m.MemberID != member || epoch == 0 {
			continue
		}
		target := m.TargetAssignment["read"]
		rt := kmsg.NewConsumerGroupHeartbeatRequestTopic()
		details, err := b.admin(t).ListTopics(within(t), "read")
		if err != nil {
			t.Fatal(err)
		}
		rt.TopicID = details["read"].ID
		for p := range m.Assignment["read"] {
			if _, keeps := target[p]; keeps {
				rt.Partitions = append(rt.Partitions, p)
			}
		}
		if len(rt.Partitions) > 0 {
			req.Topics = append(req.Topics, rt)
		}
	}
	var resp *kmsg.ConsumerGroupHeartbeatResponse
	await(t, "a coordinator answers", func() bool {
		var err error
		resp, err = req.RequestWith(within(t), b.client(t))
		return err == nil && (resp.ErrorCode < 14 || resp.ErrorCode > 16)
	})
	if resp.ErrorCode != 0 {
		t.Errorf("heartbeat of %s in %d: %d %v", member, epoch, resp.ErrorCode, resp.ErrorMessage)
	}
	return resp
}
