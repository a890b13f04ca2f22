package controller

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

// world is an image that commands change.
type world struct {
	t   testing.TB
	img *metadata.Image
	env Env
}

// newWorld is a cluster of one broker, 1, that is up.
func newWorld(t testing.TB) *world { return newCluster(t, "") }

// newCluster is a cluster of brokers from 1 on, one per rack that is named, all of them up.
func newCluster(t testing.TB, racks ...string) *world {
	broker, err := config.Broker.NewValues(nil)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t, metadata.Empty(), Env{Now: 1000, Random: rand.NewChaCha8([32]byte{1}), Broker: broker, TierAvailable: true}}
	w.run(BootstrapCommand{})
	for i, rack := range racks {
		w.up(int32(i+1), 1, rack)
	}
	return w
}

func node(id int32, incarnation byte, rack string) metadata.BrokerRecord {
	return metadata.BrokerRecord{ID: id, Incarnation: tp.UUID{incarnation, byte(id)}, Rack: rack, PeerListener: "P",
		Listeners: []metadata.Endpoint{{Name: "P", Host: "h", Port: 1000 + id}}}
}

// up registers a run of a broker and unfences it.
func (w *world) up(id int32, incarnation byte, rack string) {
	w.t.Helper()
	w.run(RegisterCommand{node(id, incarnation, rack)})
	w.beat(id, true, false)
}

func (w *world) beat(id int32, ready, leave bool) HeartbeatReply {
	w.t.Helper()
	return w.run(HeartbeatCommand{Broker: id, Epoch: w.img.Brokers[id].Epoch, Ready: ready, Leave: leave}).(HeartbeatReply)
}

// try runs a command as over a network, and applies its records as through a log.
func (w *world) try(c Command) (any, error) {
	w.t.Helper()
	raw, err := MarshalCommand(c)
	if err != nil {
		w.t.Fatal(err)
	}
	c2, err := UnmarshalCommand(raw)
	if err != nil || !reflect.DeepEqual(c, c2) {
		w.t.Fatalf("%+v came as %+v: %v", c, c2, err)
	}
	records, reply, err := c2.Run(w.img, w.env)
	if err != nil {
		var e *Error
		if !errors.As(err, &e) || records != nil {
			w.t.Fatalf("%T: no refusal: %v, %v", c, err, records)
		}
		return nil, err
	}
	raw, err = MarshalReply(reply)
	if err != nil {
		w.t.Fatal(err)
	}
	reply2, err := UnmarshalReply(c, raw)
	if err != nil || !reflect.DeepEqual(reply, reply2) {
		w.t.Fatalf("%T: reply %+v came as %+v: %v", c, reply, reply2, err)
	}
	w.apply(records, nil)
	return reply2, nil
}

func (w *world) run(c Command) any {
	w.t.Helper()
	reply, err := w.try(c)
	if err != nil {
		w.t.Fatalf("%T: %v", c, err)
	}
	return reply
}

// refused demands that a command is refused, in words.
func (w *world) refused(c Command, kind error, words string) {
	w.t.Helper()
	if _, err := w.try(c); !errors.Is(err, kind) || !strings.Contains(err.Error(), words) {
		w.t.Fatalf("%+v: %v, want %v: %s", c, err, kind, words)
	}
}

// assigned makes a topic with the given replicas, which may be of several lengths.
func (w *world) assigned(name string, replicas ...[]int32) tp.UUID {
	w.t.Helper()
	id, err := tp.NewUUID(w.env.Random)
	records := []metadata.Record{metadata.TopicRecord{Name: name, ID: id}}
	for i, r := range replicas {
		records = append(records, newPartition(w.img, id, int32(i), r))
	}
	w.apply(records, err)
	return id
}

func (w *world) partition(topic string, index int) metadata.PartitionRecord {
	return w.img.Topics[topic].Partitions[index].PartitionRecord
}

// is compares a partition with its short form, as "123 isr 12 leader 1 epoch 0".
func (w *world) is(topic string, index int, want string) {
	w.t.Helper()
	p := w.partition(topic, index)
	digits := func(list []int32) string {
		s := ""
		for _, id := range list {
			s += fmt.Sprint(id)
		}
		return s
	}
	got := fmt.Sprintf("%s isr %s leader %d epoch %d", digits(p.Replicas), digits(p.ISR), p.Leader, p.LeaderEpoch)
	if len(p.Adding)+len(p.Removing) > 0 {
		got += " adding " + digits(p.Adding) + " removing " + digits(p.Removing)
	}
	if p.Unclean {
		got += " unclean"
	}
	if got != want {
		w.t.Fatalf("%s-%d: %s, want %s", topic, index, got, want)
	}
}

// join proposes an ISR by the leader and returns what became of it.
func (w *world) join(topic string, index int, isr ...int32) error {
	w.t.Helper()
	p := w.partition(topic, index)
	c := ISRChange{PartitionRef{p.Topic, p.Index}, p.LeaderEpoch, p.PartitionEpoch, isr, nil}
	for _, id := range isr {
		c.Epochs = append(c.Epochs, w.img.Brokers[id].Epoch)
	}
	reply := w.run(AlterPartitionsCommand{p.Leader, w.img.Brokers[p.Leader].Epoch, []ISRChange{c}})
	return reply.(AlterPartitionsReply).Errors[0].OrNil()
}

func (w *world) apply(records []metadata.Record, err error) {
	w.t.Helper()
	if err == nil && len(records) == 0 {
		return
	}
	if err == nil {
		// Records must survive the log, not only memory.
		var b []byte
		if b, err = metadata.Marshal(records); err == nil {
			if records, err = metadata.Unmarshal(b); err == nil {
				w.img, err = w.img.Apply(records)
			}
		}
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) create(topics ...NewTopic) []CreatedTopic {
	w.t.Helper()
	return w.run(CreateTopicsCommand{Topics: topics}).([]CreatedTopic)
}

func TestCreateTopicsSaysWhatIsWrong(t *testing.T) {
	w := newWorld(t)
	w.create(NewTopic{Name: "a.b", Partitions: 3, ReplicationFactor: 1})
	for _, c := range []struct {
		topic NewTopic
		kind  error
		words string
	}{
		{NewTopic{Name: "a.b", Partitions: 1, ReplicationFactor: 1}, ErrTopicExists, "already exists"},
		{NewTopic{Name: "a_b", Partitions: 1, ReplicationFactor: 1}, ErrInvalidTopic, "collides with existing topic: a.b"},
		{NewTopic{Name: "", Partitions: 1, ReplicationFactor: 1}, ErrInvalidTopic, "empty string"},
		{NewTopic{Name: "..", Partitions: 1, ReplicationFactor: 1}, ErrInvalidTopic, "not allowed"},
		{NewTopic{Name: "ä", Partitions: 1, ReplicationFactor: 1}, ErrInvalidTopic, "other than ASCII"},
		{NewTopic{Name: strings.Repeat("x", 250), Partitions: 1, ReplicationFactor: 1}, ErrInvalidTopic, "longer than"},
		{NewTopic{Name: "n", Partitions: 0, ReplicationFactor: 1}, ErrInvalidPartitions, "non-positive"},
		{NewTopic{Name: "n", Partitions: 1, ReplicationFactor: 0}, ErrInvalidReplicationFactor, "larger than 0"},
		{NewTopic{Name: "n", Partitions: 1, ReplicationFactor: 2}, ErrInvalidReplicationFactor, "only 1 broker(s)"},
		{NewTopic{Name: "n", Partitions: -1, ReplicationFactor: -1, Assignments: map[int32][]int32{0: {7}}}, ErrInvalidAssignment, "no such broker"},
		{NewTopic{Name: "n", Partitions: -1, ReplicationFactor: -1, Assignments: map[int32][]int32{1: {1}}}, ErrInvalidAssignment, "consecutive"},
		{NewTopic{Name: "n", Partitions: 1, ReplicationFactor: -1, Assignments: map[int32][]int32{0: {1}}}, ErrInvalidRequest, "numPartitions"},
		{NewTopic{Name: "n", Partitions: 1, ReplicationFactor: 1, Configs: map[string]string{"retention.mss": "1"}}, ErrInvalidConfig, "did you mean retention.ms"},
		{NewTopic{Name: "n", Partitions: 1, ReplicationFactor: 1, Configs: map[string]string{"remote.storage.enable": "true", "cleanup.policy": "compact"}}, ErrInvalidConfig, "only supports topics with cleanup.policy=delete"},
		{NewTopic{Name: "__consumer_offsets", Partitions: 1, ReplicationFactor: 1, Configs: map[string]string{"remote.storage.enable": "true"}}, ErrInvalidConfig, "internal topic"},
	} {
		r := w.create(c.topic)
		if !errors.Is(r[0].Err, c.kind) || !strings.Contains(r[0].Err.Error(), c.words) {
			t.Errorf("%+v: %v", c.topic, r[0].Err)
		}
	}
	if len(w.img.Topics) != 1 {
		t.Fatal("a refused topic was made")
	}
}

func TestCreateWithinOneRequest(t *testing.T) {
	w := newWorld(t)
	r := w.create(NewTopic{Name: "x.y", Partitions: -1, ReplicationFactor: -1}, NewTopic{Name: "x_y", Partitions: 1, ReplicationFactor: 1})
	if r[0].Err != nil || r[0].Partitions != 1 || !errors.Is(r[1].Err, ErrInvalidTopic) {
		t.Fatalf("%+v", r)
	}
	results, records, err := CreateTopics(w.img, w.env, []NewTopic{{Name: "only.asked", Partitions: 1, ReplicationFactor: 1}}, true)
	if err != nil || results[0].Err != nil || records != nil {
		t.Fatal("validate only wrote something", err, records)
	}
}

func TestDeleteAndRecreateKeepsTheOldSegmentsApart(t *testing.T) {
	w := newWorld(t)
	id := w.create(NewTopic{Name: "t", Partitions: 1, ReplicationFactor: 1})[0].ID
	s := w.copied(id, 0, 9)
	errs, records := DeleteTopics(w.img, w.env, []tp.UUID{id, id, {9}})
	w.apply(records, nil)
	if errs[0] != nil || !errors.Is(errs[1], ErrUnknownTopicID) || !errors.Is(errs[2], ErrUnknownTopicID) {
		t.Fatal(errs)
	}
	second := w.create(NewTopic{Name: "t", Partitions: 1, ReplicationFactor: 1})[0]
	if second.Err != nil || len(w.img.DeletingTopics()) != 1 {
		t.Fatal(second.Err, w.img.DeletingTopics())
	}
	w.restart()
	if len(w.img.Deleting) != 1 || w.img.Topics["t"].ID != second.ID {
		t.Fatal("a snapshot lost the deleting topic")
	}
	records, err := FinishDelete(w.img, id, 0, []tp.UUID{s.ID})
	w.apply(records, err)
	if len(w.img.Deleting) != 0 {
		t.Fatal("the topic is not forgotten")
	}
}

// restart rebuilds the image from its snapshot and demands that nothing changed.
func (w *world) restart() {
	w.t.Helper()
	b, err := metadata.Marshal(w.img.Records())
	if err != nil {
		w.t.Fatal(err)
	}
	records, err := metadata.Unmarshal(b)
	if err != nil {
		w.t.Fatal(err)
	}
	again, err := metadata.Empty().Apply(records)
	if err != nil {
		w.t.Fatal(err)
	}
	content := func(i *metadata.Image) metadata.Image {
		return metadata.Image{ClusterID: i.ClusterID, Brokers: i.Brokers, Topics: i.Topics, TopicsByID: i.TopicsByID, Deleting: i.Deleting, BrokerConfigs: i.BrokerConfigs, GroupConfigs: i.GroupConfigs,
			NextProducerID: i.NextProducerID, LastBrokerEpoch: i.LastBrokerEpoch}
	}
	if !reflect.DeepEqual(content(w.img), content(again)) {
		w.t.Fatalf("a snapshot is another image: %+v, %+v", w.img, again)
	}
	w.img = again
}

func (w *world) segment(topic tp.UUID, start, end int64) tier.Segment {
	id, err := tp.NewUUID(w.env.Random)
	if err != nil {
		w.t.Fatal(err)
	}
	p := w.img.TopicsByID[topic].Partitions[0]
	return tier.Segment{ID: id, Topic: w.img.TopicsByID[topic].Name, TopicID: topic, Start: start, End: end, Size: 1, Broker: 1, LeaderEpoch: p.LeaderEpoch,
		Epochs: []leaderepoch.Entry{{Epoch: p.LeaderEpoch, StartOffset: start}}}
}

func (w *world) copied(topic tp.UUID, start, end int64) tier.Segment {
	w.t.Helper()
	s := w.segment(topic, start, end)
	records, err := StartCopy(w.img, s)
	w.apply(records, err)
	records, err = FinishCopy(w.img, s, Finished{ObjectBytes: 3, Format: tier.FormatKafkaV1}, 5)
	w.apply(records, err)
	return s
}

func TestRemoteSegmentsAreFencedAndContiguous(t *testing.T) {
	w := newWorld(t)
	id := w.create(NewTopic{Name: "t", Partitions: 1, ReplicationFactor: 1})[0].ID
	first := w.copied(id, 0, 9)
	refused := func(what string, s tier.Segment, kind error) {
		t.Helper()
		if _, err := StartCopy(w.img, s); !errors.Is(err, kind) {
			t.Errorf("%s: %v", what, err)
		}
	}
	refused("gap", w.segment(id, 11, 20), ErrInvalidRequest)
	refused("overlap", w.segment(id, 9, 20), ErrInvalidRequest)
	old := w.segment(id, 10, 20)
	old.LeaderEpoch--
	refused("deposed leader", old, ErrFenced)
	other := w.segment(id, 10, 20)
	other.Broker = 2
	refused("another broker", other, ErrFenced)
	gone := w.segment(id, 10, 20)
	gone.TopicID = tp.UUID{7}
	refused("unknown topic", gone, ErrUnknownTopic)

	second := w.segment(id, 10, 19)
	records, err := StartCopy(w.img, second)
	w.apply(records, err)
	refused("a second copy at one time", w.segment(id, 10, 19), ErrInvalidRequest)

	// The broker restarts: a new epoch. What the old one finishes is refused; the dangling start is abandoned and redone.
	w.up(1, 2, "")
	if _, err := FinishCopy(w.img, second, Finished{}, 5); !errors.Is(err, ErrFenced) {
		t.Fatal(err)
	}
	epoch := w.img.Topics["t"].Partitions[0].LeaderEpoch
	records, err = StartDelete(w.img, id, 0, 1, epoch, []tp.UUID{second.ID}, 0, 6)
	w.apply(records, err)
	w.copied(id, 10, 19)
	w.restart()
	p := w.img.Topics["t"].Partitions[0]
	if p.Remote.End() != 19 || p.Remote.Check() != nil {
		t.Fatal(p.Remote.End(), p.Remote.Check())
	}

	records, err = StartDelete(w.img, id, 0, 1, epoch, []tp.UUID{first.ID}, 10, 7)
	w.apply(records, err)
	p = w.img.Topics["t"].Partitions[0]
	if p.LogStart != 10 || p.Remote.Find(5) != nil || p.Remote.Start() != 10 {
		t.Fatalf("%+v", p)
	}
	if _, err := FinishDelete(w.img, id, 0, []tp.UUID{p.Remote[len(p.Remote)-1].ID}); !errors.Is(err, ErrInvalidRequest) {
		t.Fatal("a readable segment was forgotten:", err)
	}
	records, err = FinishDelete(w.img, id, 0, []tp.UUID{first.ID, second.ID})
	w.apply(records, err)
	if n := len(w.img.Topics["t"].Partitions[0].Remote); n != 1 {
		t.Fatal(n)
	}
	records, err = DisableRemote(w.img, id, 0, 1, epoch, 25, 8)
	w.apply(records, err)
	p = w.img.Topics["t"].Partitions[0]
	if p.LogStart != 25 || p.Remote.End() != -1 || len(p.Remote) != 1 {
		t.Fatalf("%+v", p)
	}
	w.restart()
}

func TestIncrementalConfigs(t *testing.T) {
	w := newWorld(t)
	w.create(NewTopic{Name: "t", Partitions: 1, ReplicationFactor: 1, Configs: map[string]string{"retention.ms": " 5 ", "cleanup.policy": "compact"}})
	text := func(s string) *string { return &s }
	alter := func(changes ...Change) error {
		records, err := AlterTopic(w.img, w.env, "t", changes)
		if err == nil {
			w.apply(records, nil)
		}
		return err
	}
	if err := alter(Change{"cleanup.policy", Append, text("delete")}, Change{"retention.ms", Delete, nil}, Change{"flush.ms", Set, text("7")}); err != nil {
		t.Fatal(err)
	}
	if got := w.img.Topics["t"].Configs; !maps.Equal(got, map[string]string{"cleanup.policy": "compact,delete", "flush.ms": "7"}) {
		t.Fatal(got)
	}
	if err := alter(Change{"cleanup.policy", Subtract, text("compact")}, Change{"cleanup.policy", Append, text("x")}); !errors.Is(err, ErrInvalidRequest) {
		t.Fatal("one key twice:", err)
	}
	if err := alter(Change{"flush.ms", Append, text("1")}); !errors.Is(err, ErrInvalidConfig) {
		t.Fatal("append to what is no list:", err)
	}
	records, err := ReplaceTopic(w.img, w.env, "t", map[string]string{"flush.ms": "9"})
	w.apply(records, err)
	if got := w.img.Topics["t"].Configs; !maps.Equal(got, map[string]string{"flush.ms": "9"}) {
		t.Fatal("the old call resets what it does not name:", got)
	}
	if err := func() error {
		_, err := AlterBroker(w.img, w.env, ClusterWide, []Change{{"node.id", Set, text("9")}})
		return err
	}(); !errors.Is(err, ErrInvalidRequest) {
		t.Fatal("a static key was altered:", err)
	}
	records, err = AlterBroker(w.img, w.env, ClusterWide, []Change{{"log.retention.ms", Set, text("42")}})
	w.apply(records, err)
	if got := w.env.Defaults(w.img)["retention.ms"]; got != "42" {
		t.Fatal(got)
	}
	w.restart()
}

func TestProducerIDsAreNeverGivenTwice(t *testing.T) {
	w := newWorld(t)
	seen := map[int64]bool{}
	for i := 0; i < 3; i++ {
		first, records := AllocateProducerIDs(w.img)
		w.apply(records, nil)
		w.restart()
		for id := first; id < first+ProducerIDBlock; id++ {
			if seen[id] {
				t.Fatal(id)
			}
			seen[id] = true
		}
	}
}

func TestAnotherClustersDirectory(t *testing.T) {
	w := newWorld(t)
	if _, err := Bootstrap(w.img, w.env, "other"); !errors.Is(err, ErrInvalidRequest) {
		t.Fatal(err)
	}
}
