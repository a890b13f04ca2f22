package controller

import (
	"slices"
	"strings"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

// NewTopic asks for one topic.
type NewTopic struct {
	Name              string
	Partitions        int32 // -1 takes num.partitions
	ReplicationFactor int16 // -1 takes default.replication.factor
	Assignments       map[int32][]int32
	Configs           map[string]string
	Internal          bool // made by the cluster itself
}

// CreatedTopic answers for one topic; Err is an *Error or nil.
type CreatedTopic struct {
	Name              string
	ID                tp.UUID
	Partitions        int32
	ReplicationFactor int16
	Configs           map[string]string
	Err               error
}

const maxTopicName = 249

// internalTopics are the names that only the cluster itself may create and write (Topic.isInternal of Kafka).
var internalTopics = []string{"__consumer_offsets", "__transaction_state"}

// IsInternal reports whether a topic is the cluster's own.
func IsInternal(topic string) bool { return slices.Contains(internalTopics, topic) }

// CheckTopicName applies Kafka's rules for names (Topic.validate).
func CheckTopicName(name string) error {
	switch {
	case name == "":
		return refuse(ErrInvalidTopic, "Topic name is invalid: the empty string is not allowed")
	case name == "." || name == "..":
		return refuse(ErrInvalidTopic, "Topic name is invalid: '.' or '..' is not allowed")
	case len(name) > maxTopicName:
		return refuse(ErrInvalidTopic, "Topic name is invalid: the length of '%s' is longer than the max allowed length %d", name, maxTopicName)
	}
	for i := 0; i < len(name); i++ {
		c := name[i]
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '.' || c == '_' || c == '-') {
			return refuse(ErrInvalidTopic, "Topic name is invalid: '%s' contains one or more characters other than ASCII alphanumerics, '.', '_' and '-'", name)
		}
	}
	return nil
}

// collision finds a topic whose name differs from name only in '.' and '_': their metrics would be one.
func collision(img *metadata.Image, name string) string {
	if !strings.ContainsAny(name, "._") {
		return ""
	}
	flat := strings.ReplaceAll(name, ".", "_")
	for _, other := range img.TopicNames() {
		if other != name && strings.ReplaceAll(other, ".", "_") == flat {
			return other
		}
	}
	return ""
}

// CreateTopics makes the topics that it can, all in one batch, and says of each what became of it. With validateOnly it returns no records.
func CreateTopics(img *metadata.Image, env Env, topics []NewTopic, validateOnly bool) ([]CreatedTopic, []metadata.Record, error) {
	results := make([]CreatedTopic, len(topics))
	var records []metadata.Record
	now := img
	for i, t := range topics {
		results[i] = CreatedTopic{Name: t.Name}
		made, err := createTopic(now, env, t, &results[i])
		if err != nil {
			results[i].Err = err
			continue
		}
		// Later topics of the request must see this one: names collide within a request too.
		if now, err = now.Apply(made); err != nil {
			return nil, nil, err
		}
		records = append(records, made...)
	}
	if validateOnly {
		records = nil
	}
	return results, records, nil
}

func createTopic(img *metadata.Image, env Env, t NewTopic, result *CreatedTopic) ([]metadata.Record, error) {
	if err := CheckTopicName(t.Name); err != nil {
		return nil, err
	}
	if _, ok := img.Topics[t.Name]; ok {
		return nil, refuse(ErrTopicExists, "Topic '%s' already exists.", t.Name)
	}
	if other := collision(img, t.Name); other != "" {
		return nil, refuse(ErrInvalidTopic, "Topic '%s' collides with existing topic: %s", t.Name, other)
	}
	own, err := env.topicConfigs(img, t.Name, t.Configs, nil)
	if err != nil {
		return nil, err
	}
	replicas, err := assign(img, env, t)
	if err != nil {
		return nil, err
	}
	id, err := tp.NewUUID(env.Random)
	if err != nil {
		return nil, err
	}
	records := []metadata.Record{metadata.TopicRecord{Name: t.Name, ID: id, Configs: own}}
	for index, r := range replicas {
		records = append(records, metadata.PartitionRecord{Topic: id, Index: int32(index), Replicas: r, ISR: r, Leader: r[0]})
	}
	result.ID, result.Partitions, result.ReplicationFactor = id, int32(len(replicas)), int16(len(replicas[0]))
	result.Configs = own
	return records, nil
}

// MaxPartitions bounds one request's partitions; beyond it an admin has most likely slipped.
const MaxPartitions = 10_000

// assign gives every partition its replicas, leader first.
func assign(img *metadata.Image, env Env, t NewTopic) ([][]int32, error) {
	if len(t.Assignments) > 0 {
		return manual(img, t)
	}
	broker := env.brokerValues(img)
	count, factor := t.Partitions, int32(t.ReplicationFactor)
	if count == -1 {
		count = int32(broker.Int("num.partitions"))
	}
	if factor == -1 {
		factor = int32(broker.Int("default.replication.factor"))
	}
	if factor <= 0 {
		return nil, refuse(ErrInvalidReplicationFactor, "Replication factor must be larger than 0, or -1 to use the default value.")
	}
	if count <= 0 {
		return nil, refuse(ErrInvalidPartitions, "Number of partitions was set to an invalid non-positive value.")
	}
	if count > MaxPartitions {
		return nil, refuse(ErrInvalidPartitions, "Number of partitions %d is above the limit of %d for one topic.", count, MaxPartitions)
	}
	return place(img, 0, count, factor)
}

func manual(img *metadata.Image, t NewTopic) ([][]int32, error) {
	if t.ReplicationFactor != -1 {
		return nil, refuse(ErrInvalidRequest, "A manual partition assignment was specified, but replication factor was not set to -1.")
	}
	if t.Partitions != -1 {
		return nil, refuse(ErrInvalidRequest, "A manual partition assignment was specified, but numPartitions was not set to -1.")
	}
	out := make([][]int32, len(t.Assignments))
	for i := range out {
		r, ok := t.Assignments[int32(i)]
		if !ok {
			return nil, refuse(ErrInvalidAssignment, "partitions should be a consecutive 0-based integer sequence")
		}
		if err := checkReplicas(img, r); err != nil {
			return nil, err
		}
		if i > 0 && len(r) != len(out[0]) {
			return nil, refuse(ErrInvalidAssignment, "The manual partition assignment includes a partition with %d replica(s), but this is not consistent with previous partitions, which have %d replica(s).", len(r), len(out[0]))
		}
		out[i] = r
	}
	return out, nil
}

func checkReplicas(img *metadata.Image, replicas []int32) error {
	if len(replicas) == 0 {
		return refuse(ErrInvalidAssignment, "The manual partition assignment includes an empty replica list.")
	}
	for i, id := range replicas {
		if slices.Contains(replicas[:i], id) {
			return refuse(ErrInvalidAssignment, "The manual partition assignment includes the broker %d more than once.", id)
		}
		if _, ok := img.Brokers[id]; !ok {
			return refuse(ErrInvalidAssignment, "The manual partition assignment includes broker %d, but no such broker is registered.", id)
		}
	}
	return nil
}

// place spreads partitions first..first+count-1 over the brokers in turn, each partition's replicas on neighbours.
func place(img *metadata.Image, first, count, factor int32) ([][]int32, error) {
	brokers := img.BrokerIDs()
	n := int32(len(brokers))
	if factor > n {
		return nil, refuse(ErrInvalidReplicationFactor, "Unable to replicate the partition %d time(s): The target replication factor of %d cannot be reached because only %d broker(s) are registered.", factor, factor, n)
	}
	out := make([][]int32, count)
	for i := range out {
		r := make([]int32, factor)
		for j := range r {
			r[j] = brokers[(first+int32(i)+int32(j))%n]
		}
		out[i] = r
	}
	return out, nil
}

// DeleteTopics removes topics by id; errors are by position.
func DeleteTopics(img *metadata.Image, env Env, ids []tp.UUID) ([]error, []metadata.Record) {
	errs := make([]error, len(ids))
	var records []metadata.Record
	gone := map[tp.UUID]bool{}
	for i, id := range ids {
		if !env.Broker.Bool("delete.topic.enable") {
			errs[i] = refuse(ErrTopicDeletionDisabled, "Topic deletion is disabled.")
			continue
		}
		if _, ok := img.TopicsByID[id]; !ok || gone[id] {
			errs[i] = refuse(ErrUnknownTopicID, "This server does not host this topic ID.")
			continue
		}
		gone[id] = true
		records = append(records, metadata.RemoveTopicRecord{Topic: id})
	}
	return errs, records
}

// NewPartitions asks for more partitions of one topic.
type NewPartitions struct {
	Topic       string
	Count       int32     // in all
	Assignments [][]int32 // of the new ones, nil to let the controller place them
}

// CreatePartitions grows topics; errors are by position.
func CreatePartitions(img *metadata.Image, requests []NewPartitions, validateOnly bool) ([]error, []metadata.Record) {
	errs := make([]error, len(requests))
	var records []metadata.Record
	for i, r := range requests {
		grown, err := growTopic(img, r)
		errs[i] = err
		records = append(records, grown...)
	}
	if validateOnly {
		records = nil
	}
	return errs, records
}

func growTopic(img *metadata.Image, r NewPartitions) ([]metadata.Record, error) {
	t, ok := img.Topics[r.Topic]
	if !ok {
		return nil, refuse(ErrUnknownTopic, "This server does not host this topic-partition.")
	}
	have := int32(len(t.Partitions))
	switch {
	case r.Count == have:
		return nil, refuse(ErrInvalidPartitions, "Topic already has %d partition(s).", have)
	case r.Count < have:
		return nil, refuse(ErrInvalidPartitions, "The topic %s currently has %d partition(s); %d would not be an increase.", r.Topic, have, r.Count)
	case r.Count-have > MaxPartitions:
		return nil, refuse(ErrInvalidPartitions, "%d new partitions are above the limit of %d for one request.", r.Count-have, MaxPartitions)
	}
	factor := int32(len(t.Partitions[0].Replicas))
	var replicas [][]int32
	var err error
	if r.Assignments != nil {
		if int32(len(r.Assignments)) != r.Count-have {
			return nil, refuse(ErrInvalidAssignment, "Attempted to add %d additional partition(s), but only %d assignment(s) were specified.", r.Count-have, len(r.Assignments))
		}
		for _, a := range r.Assignments {
			if err := checkReplicas(img, a); err != nil {
				return nil, err
			}
			if int32(len(a)) != factor {
				return nil, refuse(ErrInvalidAssignment, "The manual partition assignment includes a partition with %d replica(s), but this is not consistent with previous partitions, which have %d replica(s).", len(a), factor)
			}
		}
		replicas = r.Assignments
	} else if replicas, err = place(img, have, r.Count-have, factor); err != nil {
		return nil, err
	}
	var records []metadata.Record
	for i, a := range replicas {
		records = append(records, metadata.PartitionRecord{Topic: t.ID, Index: have + int32(i), Replicas: a, ISR: a, Leader: a[0]})
	}
	return records, nil
}

// topicConfigs validates a topic's own configs as a whole and returns what is to be stored.
func (e Env) topicConfigs(img *metadata.Image, topic string, raw map[string]string, was *config.Values) (map[string]string, error) {
	own, err := config.Topic.NewValues(raw)
	if err != nil {
		return nil, refuse(ErrInvalidConfig, "%s", err)
	}
	stored := map[string]string{}
	for _, k := range own.Explicit() {
		stored[k] = own.Get(k)
	}
	values := config.TopicValues(e.Defaults(img), stored)
	if IsInternal(topic) && values.Bool("remote.storage.enable") {
		return nil, refuse(ErrInvalidConfig, "Remote log storage is not supported for the internal topic %s.", topic)
	}
	if err := config.CheckTopic(values, was, e.TierAvailable); err != nil {
		return nil, refuse(ErrInvalidConfig, "%s", err)
	}
	if len(stored) == 0 {
		stored = nil
	}
	return stored, nil
}
