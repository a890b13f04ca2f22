package kafkaapi

import (
	"context"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/control"
	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/coordinator"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tp"
)

// How long requests that carry no time-out wait for the active controller, in ms: less than clients wait for an answer. A
// client that only asks for metadata, and would have a topic made, is not to be held up.
const (
	patience        = 9_000
	createdOnDemand = 2_000
)

// within bounds a command by the time-out that the client sent.
func within(ctx context.Context, ms int32) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, time.Duration(max(ms, 1000))*time.Millisecond)
}

// namedTwice refuses every one of n topics whose name another one bears too.
func namedTwice(n int, name func(int) string) []error {
	count := map[string]int{}
	for i := range n {
		count[name(i)]++
	}
	errs := make([]error, n)
	for i := range n {
		if count[name(i)] > 1 {
			errs[i] = refuse(errInvalidRequest, "Duplicate topic name.")
		}
	}
	return errs
}

// createTopics serves CreateTopics (KIP-4, KIP-525).
func (a *API) createTopics(ctx context.Context, _ *call, req *kmsg.CreateTopicsRequest) *kmsg.CreateTopicsResponse {
	resp := respond[*kmsg.CreateTopicsResponse](req)
	errs := namedTwice(len(req.Topics), func(i int) string { return req.Topics[i].Topic })
	var asked []controller.NewTopic
	var at []int
	for i := range req.Topics {
		rt := &req.Topics[i]
		if errs[i] != nil {
			continue
		}
		t, err := newTopic(rt)
		if err != nil {
			errs[i] = err
			continue
		}
		asked, at = append(asked, t), append(at, i)
	}
	ctx, cancel := within(ctx, req.TimeoutMillis)
	defer cancel()
	results, err := control.Do[[]controller.CreatedTopic](ctx, a.Control, controller.CreateTopicsCommand{Topics: asked, ValidateOnly: req.ValidateOnly})
	made := make([]*controller.CreatedTopic, len(req.Topics))
	for j, i := range at {
		if err != nil {
			errs[i] = err
			continue
		}
		made[i], errs[i] = &results[j], results[j].Err.OrNil()
	}
	d := a.describer()
	for i := range req.Topics {
		t := kmsg.NewCreateTopicsResponseTopic()
		t.Topic, t.ErrorCode, t.ErrorMessage = req.Topics[i].Topic, code(errs[i]), message(errs[i])
		if errs[i] == nil {
			t.TopicID, t.NumPartitions, t.ReplicationFactor = made[i].ID, made[i].Partitions, made[i].ReplicationFactor
			if req.ValidateOnly {
				t.TopicID = [16]byte{}
			}
			for _, c := range d.topics(made[i].Configs, nil) {
				e := kmsg.NewCreateTopicsResponseTopicConfig()
				e.Name, e.Value, e.Source = c.Key.Name, &c.Settings[0].Value, int8(c.Settings[0].Source)
				t.Configs = append(t.Configs, e)
			}
		}
		resp.Topics = append(resp.Topics, t)
	}
	return resp
}

func newTopic(rt *kmsg.CreateTopicsRequestTopic) (controller.NewTopic, error) {
	t := controller.NewTopic{Name: rt.Topic, Partitions: rt.NumPartitions, ReplicationFactor: rt.ReplicationFactor, Configs: map[string]string{}}
	for _, c := range rt.Configs {
		if c.Value == nil {
			return t, refuse(controller.ErrInvalidConfig, "Null value not supported for topic configs: %s", c.Name)
		}
		if _, twice := t.Configs[c.Name]; twice {
			return t, refuse(errInvalidRequest, "The config %s is given twice.", c.Name)
		}
		t.Configs[c.Name] = *c.Value
	}
	for _, r := range rt.ReplicaAssignment {
		if t.Assignments == nil {
			t.Assignments = map[int32][]int32{}
		}
		if _, twice := t.Assignments[r.Partition]; twice {
			return t, refuse(controller.ErrInvalidAssignment, "Found multiple manual partition assignments for partition %d", r.Partition)
		}
		t.Assignments[r.Partition] = r.Replicas
	}
	return t, nil
}

// internalTopic describes one of the cluster's own topics as Kafka makes them.
func (a *API) internalTopic(name string) controller.NewTopic {
	t := controller.NewTopic{Name: name, Partitions: -1, ReplicationFactor: -1, Internal: true}
	c := a.Config()
	switch name {
	case coordinator.Topic:
		t.Partitions = int32(c.Int("offsets.topic.num.partitions"))
		t.ReplicationFactor = int16(min(c.Int("offsets.topic.replication.factor"), a.size()))
		t.Configs = map[string]string{"cleanup.policy": "compact", "compression.type": "producer", "segment.bytes": c.Get("offsets.topic.segment.bytes")}
	case coordinator.TransactionTopic:
		t.Partitions = int32(c.Int("transaction.state.log.num.partitions"))
		t.ReplicationFactor = int16(min(c.Int("transaction.state.log.replication.factor"), a.size()))
		t.Configs = map[string]string{"cleanup.policy": "compact", "compression.type": "uncompressed", "segment.bytes": c.Get("transaction.state.log.segment.bytes"),
			"min.insync.replicas": strconv.Itoa(min(c.Int("transaction.state.log.min.isr"), int(t.ReplicationFactor))), "unclean.leader.election.enable": "false"}
	}
	return t
}

// size is how many brokers the cluster has, or is known to get: topics of its own are not made with fewer replicas because
// one of its founders is late.
func (a *API) size() int {
	voters := 0
	for _, m := range a.Quorum().Members {
		if m.Voter {
			voters++
		}
	}
	return max(len(a.Image().Brokers), voters, 1)
}

// deleteTopics serves DeleteTopics, by name or by id (KIP-516).
func (a *API) deleteTopics(ctx context.Context, _ *call, req *kmsg.DeleteTopicsRequest) *kmsg.DeleteTopicsResponse {
	resp := respond[*kmsg.DeleteTopicsResponse](req)
	topics := req.Topics
	for i := range req.TopicNames {
		t := kmsg.NewDeleteTopicsRequestTopic()
		t.Topic = &req.TopicNames[i]
		topics = append(topics, t)
	}
	img := a.Image()
	errs := make([]error, len(topics))
	var ids []tp.UUID
	var at []int
	for i, t := range topics {
		switch {
		case t.Topic != nil && t.TopicID != [16]byte{}:
			errs[i] = refuse(errInvalidRequest, "Topic name and id are both given.")
		case t.Topic != nil:
			if known, ok := img.Topics[*t.Topic]; ok {
				topics[i].TopicID = known.ID
				ids, at = append(ids, known.ID), append(at, i)
			} else {
				errs[i] = refuse(errUnknownTopic, "This server does not host this topic-partition.")
			}
		default:
			if known, ok := img.TopicsByID[tp.UUID(t.TopicID)]; ok {
				topics[i].Topic = &known.Name
			}
			ids, at = append(ids, tp.UUID(t.TopicID)), append(at, i)
		}
	}
	ctx, cancel := within(ctx, req.TimeoutMillis)
	defer cancel()
	results, err := control.Do[[]*controller.Error](ctx, a.Control, controller.DeleteTopicsCommand{IDs: ids})
	for j, i := range at {
		if errs[i] = err; err == nil {
			errs[i] = results[j].OrNil()
		}
	}
	for i, t := range topics {
		out := kmsg.NewDeleteTopicsResponseTopic()
		out.Topic, out.TopicID, out.ErrorCode, out.ErrorMessage = t.Topic, t.TopicID, code(errs[i]), message(errs[i])
		if out.Topic == nil && req.Version < 6 {
			empty := ""
			out.Topic = &empty
		}
		resp.Topics = append(resp.Topics, out)
	}
	return resp
}

// createPartitions serves CreatePartitions (KIP-195).
func (a *API) createPartitions(ctx context.Context, _ *call, req *kmsg.CreatePartitionsRequest) *kmsg.CreatePartitionsResponse {
	resp := respond[*kmsg.CreatePartitionsResponse](req)
	errs := namedTwice(len(req.Topics), func(i int) string { return req.Topics[i].Topic })
	var asked []controller.NewPartitions
	var at []int
	for i := range req.Topics {
		rt := &req.Topics[i]
		if errs[i] != nil {
			continue
		}
		n := controller.NewPartitions{Topic: rt.Topic, Count: rt.Count}
		if rt.Assignment != nil {
			n.Assignments = [][]int32{}
			for _, r := range rt.Assignment {
				n.Assignments = append(n.Assignments, r.Replicas)
			}
		}
		asked, at = append(asked, n), append(at, i)
	}
	ctx, cancel := within(ctx, req.TimeoutMillis)
	defer cancel()
	results, err := control.Do[[]*controller.Error](ctx, a.Control, controller.CreatePartitionsCommand{Topics: asked, ValidateOnly: req.ValidateOnly})
	for j, i := range at {
		if errs[i] = err; err == nil {
			errs[i] = results[j].OrNil()
		}
	}
	for i := range req.Topics {
		t := kmsg.NewCreatePartitionsResponseTopic()
		t.Topic, t.ErrorCode, t.ErrorMessage = req.Topics[i].Topic, code(errs[i]), message(errs[i])
		resp.Topics = append(resp.Topics, t)
	}
	return resp
}

// deleteRecords serves DeleteRecords (KIP-107). It answers when all replicas whose brokers live have deleted them, so that a new leader
// does not bring them back, or with REQUEST_TIMED_OUT.
func (a *API) deleteRecords(ctx context.Context, _ *call, req *kmsg.DeleteRecordsRequest) *kmsg.DeleteRecordsResponse {
	resp := respond[*kmsg.DeleteRecordsResponse](req)
	var trims []*trim
	for i := range req.Topics {
		rt := &req.Topics[i]
		t := kmsg.NewDeleteRecordsResponseTopic()
		t.Topic = rt.Topic
		for _, rp := range rt.Partitions {
			p := kmsg.NewDeleteRecordsResponseTopicPartition()
			p.Partition, p.LowWatermark = rp.Partition, -1
			part, err := a.replica(rt.Topic, rp.Partition)
			if err == nil && controller.IsInternal(rt.Topic) {
				err = errInvalidTopic
			}
			x := &trim{part: part, topic: i, index: len(t.Partitions)}
			if err == nil {
				x.start, err = part.DeleteRecords(rp.Offset)
			}
			if err == nil {
				trims = append(trims, x)
			}
			p.ErrorCode = code(err)
			t.Partitions = append(t.Partitions, p)
		}
		resp.Topics = append(resp.Topics, t)
	}
	ctx, cancel := within(ctx, req.TimeoutMillis)
	defer cancel()
	a.trimmed(ctx, trims)
	for _, x := range trims {
		p := &resp.Topics[x.topic].Partitions[x.index]
		p.LowWatermark, p.ErrorCode = x.low, code(x.err)
	}
	return resp
}

// trim is a partition whose records below start are being deleted, and its place in the answer.
type trim struct {
	part         *partition.Partition
	topic, index int
	start        int64
	low          int64 // from where on records are still there, -1 with an error
	err          error
}

// look says whether it is known what became of it.
func (x *trim) look(alive func(broker int32) bool) bool {
	x.low, x.err = x.part.LowWatermark(alive)
	if x.err == nil && x.low < x.start {
		x.low, x.err = -1, errTimedOut
		return false
	}
	return true
}

// trimmed waits for the followers.
func (a *API) trimmed(ctx context.Context, trims []*trim) {
	w := partition.NewWaiter()
	for _, x := range trims {
		x.part.Watch(w, partition.Trimmed)
		defer x.part.Unwatch(w, partition.Trimmed)
	}
	for {
		changed := a.Changed()
		img := a.Image()
		alive := func(broker int32) bool { b := img.Brokers[broker]; return b != nil && !b.Fenced }
		waiting := false
		for _, x := range trims {
			waiting = !x.look(alive) || waiting
		}
		if !waiting {
			return
		}
		select {
		case <-w.C:
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}
