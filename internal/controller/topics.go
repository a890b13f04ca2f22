package controller

import (
	"maps"
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

// CreatedTopic answers for one topic.
type CreatedTopic struct {
	Name              string
	ID                tp.UUID
	Partitions        int32
	ReplicationFactor int16
	Configs           map[string]string
	Err               *Error // nil if it was made
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

// collide reports whether two names differ only in '.' and '_': their metrics would be one.
func collide(a, b string) bool {
	if len(a) != len(b) || a == b {
		return false
	}
	for i := range len(a) {
		if a[i] != b[i] && !(a[i] == '.' && b[i] == '_' || a[i] == '_' && b[i] == '.') {
			return false
		}
	}
	return true
}

// creation is one CreateTopics request. Its image grows with every topic of the request, so that later ones see earlier
// ones: names collide within a request too, and load adds up.
type creation struct {
	img      *metadata.Image
	env      Env
	defaults map[string]string
	names    map[string]bool   // of topics that this request makes
	flat     map[string]string // names that could collide, with '.' as '_'; nil until it pays
	broker   *config.Values    // nil until it is needed
	placer   *placer           // for topics of factor replicas; nil until one is to be placed
	factor   int32
	placed   [][]int32 // replicas that this request placed
}

// taken reports whether a topic of this name exists.
func (c *creation) taken(name string) bool {
	_, exists := c.img.Topics[name]
	return exists || c.names[name]
}

// collision finds a topic that name collides with, the first by name if there are many.
func (c *creation) collision(name string) string {
	if !strings.ContainsAny(name, "._") {
		return ""
	}
	if c.flat == nil && len(c.names) < 8 {
		found := ""
		look := func(other string) {
			if collide(name, other) && (found == "" || other < found) {
				found = other
			}
		}
		for other := range c.img.Topics {
			look(other)
		}
		for other := range c.names {
			look(other)
		}
		return found
	}
	if c.flat == nil { // a large request: an index is cheaper than a pass over all names for each topic
		c.flat = map[string]string{}
		for _, other := range c.img.TopicNames() {
			c.index(other)
		}
		for _, other := range slices.Sorted(maps.Keys(c.names)) {
			c.index(other)
		}
	}
	return c.flat[flatten(name)]
}

func flatten(name string) string { return strings.ReplaceAll(name, ".", "_") }

func (c *creation) index(name string) {
	if flat := flatten(name); c.flat[flat] == "" || name < c.flat[flat] {
		c.flat[flat] = name
	}
}

// CreateTopics makes the topics that it can, all in one batch, and says of each what became of it. With validateOnly it returns no records.
func CreateTopics(img *metadata.Image, env Env, topics []NewTopic, validateOnly bool) ([]CreatedTopic, []metadata.Record, error) {
	c := &creation{img: img, env: env, defaults: env.Defaults(img), names: map[string]bool{}}
	results := make([]CreatedTopic, len(topics))
	var records []metadata.Record
	for i, t := range topics {
		results[i] = CreatedTopic{Name: t.Name}
		made, err := c.create(t, &results[i])
		if err != nil {
			if results[i].Err, err = row(err); err != nil {
				return nil, nil, err
			}
			continue
		}
		c.names[t.Name] = true
		if c.flat != nil {
			c.index(t.Name)
		}
		records = append(records, made...)
	}
	if validateOnly {
		records = nil
	}
	return results, records, nil
}

func (c *creation) create(t NewTopic, result *CreatedTopic) ([]metadata.Record, error) {
	if err := CheckTopicName(t.Name); err != nil {
		return nil, err
	}
	if c.taken(t.Name) {
		return nil, refuse(ErrTopicExists, "Topic '%s' already exists.", t.Name)
	}
	if other := c.collision(t.Name); other != "" {
		return nil, refuse(ErrInvalidTopic, "Topic '%s' collides with existing topic: %s", t.Name, other)
	}
	own, err := c.env.topicConfigs(c.defaults, t.Name, t.Configs, nil)
	if err != nil {
		return nil, err
	}
	replicas, err := c.assign(t)
	if err != nil {
		return nil, err
	}
	id, err := tp.NewUUID(c.env.Random)
	if err != nil {
		return nil, err
	}
	records := []metadata.Record{metadata.TopicRecord{Name: t.Name, ID: id, Configs: own}}
	for index, r := range replicas {
		records = append(records, newPartition(c.img, id, int32(index), r))
	}
	result.ID, result.Partitions, result.ReplicationFactor = id, int32(len(replicas)), int16(len(replicas[0]))
	result.Configs = own
	return records, nil
}

// newPartition is a partition's first record. Who is not there is not in sync, so that a leader that wrote alone is not
// followed by one that has nothing; nor is who is leaving, if others are there. With nobody there all are in the ISR, since
// all are equally empty, and the first to come leads.
func newPartition(img *metadata.Image, topic tp.UUID, index int32, replicas []int32) metadata.PartitionRecord {
	p := metadata.PartitionRecord{Topic: topic, Index: index, Replicas: replicas, Leader: -1}
	p.ISR = filter(replicas, func(id int32) bool { return !img.Brokers[id].Fenced && !img.Brokers[id].ShuttingDown })
	if len(p.ISR) == 0 {
		p.ISR = filter(replicas, func(id int32) bool { return !img.Brokers[id].Fenced })
	}
	if len(p.ISR) == 0 {
		p.ISR = replicas
	} else {
		p.Leader = p.ISR[0]
	}
	return p
}

// MaxPartitions bounds one request's partitions; beyond it an admin has most likely slipped.
const MaxPartitions = 10_000

// assign gives every partition its replicas, leader first.
func (c *creation) assign(t NewTopic) ([][]int32, error) {
	if len(t.Assignments) > 0 {
		return manual(c.img, t)
	}
	if c.broker == nil {
		v := c.env.brokerValues(c.img)
		c.broker = &v
	}
	broker := *c.broker
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
	if c.placer == nil || c.factor != factor {
		var err error
		if c.placer, err = placerFor(c.img, nil, factor); err != nil {
			return nil, err
		}
		c.factor = factor
		for _, list := range c.placed {
			c.placer.count(list, c.placer.replicas, c.placer.leaders)
		}
		c.placer.seen += len(c.placed)
	}
	out := c.placer.place(count, factor)
	c.placed = append(c.placed, out...)
	return out, nil
}

func manual(img *metadata.Image, t NewTopic) ([][]int32, error) {
	if t.ReplicationFactor != -1 {
		return nil, refuse(ErrInvalidRequest, "A manual partition assignment was specified, but replication factor was not set to -1.")
	}
	if t.Partitions != -1 {
		return nil, refuse(ErrInvalidRequest, "A manual partition assignment was specified, but numPartitions was not set to -1.")
	}
	if len(t.Assignments) > MaxPartitions {
		return nil, refuse(ErrInvalidPartitions, "Number of partitions %d is above the limit of %d for one topic.", len(t.Assignments), MaxPartitions)
	}
	out := make([][]int32, len(t.Assignments))
	for i := range out {
		r, ok := t.Assignments[int32(i)]
		if !ok {
			return nil, refuse(ErrInvalidAssignment, "partitions should be a consecutive 0-based integer sequence")
		}
		if err := checkNew(img, int32(i), r); err != nil {
			return nil, err
		}
		if i > 0 && len(r) != len(out[0]) {
			return nil, refuse(ErrInvalidAssignment, "The manual partition assignment includes a partition with %d replica(s), but this is not consistent with previous partitions, which have %d replica(s).", len(r), len(out[0]))
		}
		out[i] = r
	}
	return out, nil
}

// checkNew checks the replicas of a new partition: somebody must be there to lead it.
func checkNew(img *metadata.Image, index int32, replicas []int32) error {
	if err := checkReplicas(img, replicas); err != nil {
		return err
	}
	for _, id := range replicas {
		if b := img.Brokers[id]; !b.Fenced && !b.ShuttingDown {
			return nil
		}
	}
	return refuse(ErrInvalidAssignment, "All brokers specified in the manual partition assignment for partition %d are fenced or in controlled shutdown.", index)
}

// checkReplicas checks a replica list that a user made (validateManualPartitionAssignment of Kafka).
func checkReplicas(img *metadata.Image, replicas []int32) *Error {
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
		if draining(img, id) {
			return refuse(ErrInvalidAssignment, "The manual partition assignment includes broker %d, which is being drained.", id)
		}
	}
	return nil
}

// DeleteTopics removes topics by id; errors are by position.
func DeleteTopics(img *metadata.Image, env Env, ids []tp.UUID) ([]*Error, []metadata.Record) {
	errs := make([]*Error, len(ids))
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

// CreatePartitions grows topics; refusals are by position. A topic grows once in a request.
func CreatePartitions(img *metadata.Image, env Env, requests []NewPartitions, validateOnly bool) ([]*Error, []metadata.Record, error) {
	errs := make([]*Error, len(requests))
	var records []metadata.Record
	seen := map[string]bool{}
	for i, r := range requests {
		if seen[r.Topic] {
			errs[i] = refuse(ErrInvalidRequest, "Duplicate topic in request.")
			continue
		}
		seen[r.Topic] = true
		grown, err := growTopic(img, r)
		if errs[i], err = row(err); err != nil {
			return nil, nil, err
		}
		records = append(records, grown...)
	}
	if validateOnly {
		records = nil
	}
	return errs, records, nil
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
	// A reassignment in progress does not make the factor larger.
	factor := int32(len(without(t.Partitions[0].Replicas, t.Partitions[0].Removing)))
	var replicas [][]int32
	if r.Assignments != nil {
		if int32(len(r.Assignments)) != r.Count-have {
			return nil, refuse(ErrInvalidAssignment, "Attempted to add %d additional partition(s), but only %d assignment(s) were specified.", r.Count-have, len(r.Assignments))
		}
		for i, a := range r.Assignments {
			if err := checkNew(img, have+int32(i), a); err != nil {
				return nil, err
			}
			if int32(len(a)) != factor {
				return nil, refuse(ErrInvalidAssignment, "The manual partition assignment includes a partition with %d replica(s), but this is not consistent with previous partitions, which have %d replica(s).", len(a), factor)
			}
		}
		replicas = r.Assignments
	} else {
		p, err := placerFor(img, t, factor)
		if err != nil {
			return nil, err
		}
		replicas = p.place(r.Count-have, factor)
	}
	var records []metadata.Record
	for i, a := range replicas {
		records = append(records, newPartition(img, t.ID, have+int32(i), a))
	}
	return records, nil
}

// topicConfigs validates a topic's own configs as a whole and returns what is to be stored.
func (e Env) topicConfigs(defaults map[string]string, topic string, raw map[string]string, was *config.Values) (map[string]string, error) {
	own, err := config.Topic.NewValues(raw)
	if err != nil {
		return nil, refuse(ErrInvalidConfig, "%s", err)
	}
	stored := map[string]string{}
	for _, k := range own.Explicit() {
		stored[k] = own.Get(k)
	}
	values := config.TopicValues(defaults, stored)
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
