package clustertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/recordbatch"
)

// Ask sends a request to this node and to no other, once.
func (n *Node) Ask(req kmsg.Request) (kmsg.Response, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
	defer cancel()
	return n.admin.SeedBrokers()[0].Request(ctx, req)
}

type createResponse = kmsg.CreateTopicsResponse

// Partition is what a node knows of a partition.
type Partition struct {
	Leader, Epoch         int32
	Replicas, ISR, Adding []int32
}

func (p Partition) String() string {
	return fmt.Sprintf("leader %d epoch %d replicas %v isr %v", p.Leader, p.Epoch, p.Replicas, p.ISR)
}

// State is what this node knows of partition 0 of a topic; it leads nowhere and has no replicas if nothing is known.
func (n *Node) State(topic string) Partition {
	req := kmsg.NewPtrMetadataRequest()
	t := kmsg.NewMetadataRequestTopic()
	t.Topic = &topic
	req.Topics = append(req.Topics, t)
	resp, err := n.Ask(req)
	if err != nil {
		return Partition{Leader: -1}
	}
	for _, t := range resp.(*kmsg.MetadataResponse).Topics {
		for _, p := range t.Partitions {
			if p.Partition == 0 {
				s := Partition{Leader: p.Leader, Epoch: p.LeaderEpoch, Replicas: p.Replicas, ISR: slices.Clone(p.ISR)}
				slices.Sort(s.ISR)
				return s
			}
		}
	}
	return Partition{Leader: -1}
}

// Controller is the active controller as this node knows it, -1 if it knows none.
func (n *Node) Controller() int32 {
	req := kmsg.NewPtrDescribeQuorumRequest()
	t := kmsg.NewDescribeQuorumRequestTopic()
	t.Topic = "__cluster_metadata"
	t.Partitions = append(t.Partitions, kmsg.NewDescribeQuorumRequestTopicPartition())
	req.Topics = append(req.Topics, t)
	resp, err := n.Ask(req)
	if err != nil {
		return -1
	}
	q := resp.(*kmsg.DescribeQuorumResponse)
	if q.ErrorCode != 0 || len(q.Topics) != 1 || len(q.Topics[0].Partitions) != 1 || q.Topics[0].Partitions[0].ErrorCode != 0 {
		return -1
	}
	return q.Topics[0].Partitions[0].LeaderID
}

// Controller asks all nodes but the given ones until one knows an active controller that is none of those.
func (c *Cluster) Controller(but ...int32) (id int32) {
	c.T.Helper()
	c.Until("there is a controller", time.Minute, func() bool {
		for _, n := range c.Nodes {
			if slices.Contains(but, n.ID) {
				continue
			}
			if id = n.Controller(); id > 0 && !slices.Contains(but, id) {
				return true
			}
		}
		return false
	})
	return id
}

// newTopic asks for a topic of one partition.
func newTopic(name string, replicas []int32, configs ...[2]string) *kmsg.CreateTopicsRequest {
	req := kmsg.NewPtrCreateTopicsRequest()
	t := kmsg.NewCreateTopicsRequestTopic()
	t.Topic, t.NumPartitions, t.ReplicationFactor = name, -1, -1
	a := kmsg.NewCreateTopicsRequestTopicReplicaAssignment()
	a.Replicas = replicas
	t.ReplicaAssignment = append(t.ReplicaAssignment, a)
	for _, kv := range configs {
		k := kmsg.NewCreateTopicsRequestTopicConfig()
		k.Name, k.Value = kv[0], &kv[1]
		t.Configs = append(t.Configs, k)
	}
	req.Topics, req.TimeoutMillis = append(req.Topics, t), 10_000
	return req
}

// CreateTopic makes a topic of one partition with these replicas, the first of which leads. It returns when all brokers know.
func (c *Cluster) CreateTopic(name string, replicas []int32, configs ...[2]string) {
	c.T.Helper()
	req := newTopic(name, replicas, configs...)
	resp, err := c.Nodes[0].Ask(req)
	if err == nil {
		err = kerr.ErrorForCode(resp.(*createResponse).Topics[0].ErrorCode)
	}
	if err != nil {
		c.T.Fatalf("create %s: %v", name, err)
	}
	for _, n := range c.Nodes {
		c.Until(fmt.Sprintf("node %d knows %s", n.ID, name), 10*time.Second, func() bool { return n.State(name).Leader == replicas[0] })
	}
}

// InSync waits until a node knows all replicas of a topic to be in sync.
func (c *Cluster) InSync(via int32, topic string, limit time.Duration) time.Duration {
	c.T.Helper()
	return c.Until("all replicas of "+topic+" are in sync", limit, func() bool {
		s := c.Node(via).State(topic)
		return s.Leader > 0 && len(s.ISR) == len(s.Replicas)
	})
}

// Reassign moves a topic; nil cancels.
func (n *Node) Reassign(topic string, to []int32) error {
	req := kmsg.NewPtrAlterPartitionAssignmentsRequest()
	req.TimeoutMillis = 10_000
	t := kmsg.NewAlterPartitionAssignmentsRequestTopic()
	t.Topic = topic
	p := kmsg.NewAlterPartitionAssignmentsRequestTopicPartition()
	p.Replicas = to
	t.Partitions = append(t.Partitions, p)
	req.Topics = append(req.Topics, t)
	resp, err := n.Ask(req)
	if err != nil {
		return err
	}
	r := resp.(*kmsg.AlterPartitionAssignmentsResponse)
	if len(r.Topics) == 0 {
		return kerr.ErrorForCode(r.ErrorCode)
	}
	return errors.Join(kerr.ErrorForCode(r.ErrorCode), kerr.ErrorForCode(r.Topics[0].Partitions[0].ErrorCode))
}

// Moving are the replicas that are being added and removed.
func (n *Node) Moving(topic string) (adding, removing []int32, err error) {
	req := kmsg.NewPtrListPartitionReassignmentsRequest()
	req.TimeoutMillis = 10_000
	resp, err := n.Ask(req)
	if err != nil {
		return nil, nil, err
	}
	r := resp.(*kmsg.ListPartitionReassignmentsResponse)
	for _, t := range r.Topics {
		if t.Topic == topic {
			return t.Partitions[0].AddingReplicas, t.Partitions[0].RemovingReplicas, nil
		}
	}
	return nil, nil, kerr.ErrorForCode(r.ErrorCode)
}

// Prefer asks for the election of a topic's first replica.
func (n *Node) Prefer(topic string) error {
	req := kmsg.NewPtrElectLeadersRequest()
	req.TimeoutMillis = 10_000
	t := kmsg.NewElectLeadersRequestTopic()
	t.Topic, t.Partitions = topic, []int32{0}
	req.Topics = append(req.Topics, t)
	resp, err := n.Ask(req)
	if err != nil {
		return err
	}
	return kerr.ErrorForCode(resp.(*kmsg.ElectLeadersResponse).ErrorCode)
}

// Configure sets keys of all brokers ("") or of a topic.
func (n *Node) Configure(topic string, pairs ...[2]string) error {
	req := kmsg.NewPtrIncrementalAlterConfigsRequest()
	r := kmsg.NewIncrementalAlterConfigsRequestResource()
	r.ResourceType, r.ResourceName = kmsg.ConfigResourceTypeBroker, ""
	if topic != "" {
		r.ResourceType, r.ResourceName = kmsg.ConfigResourceTypeTopic, topic
	}
	for _, kv := range pairs {
		k := kmsg.NewIncrementalAlterConfigsRequestResourceConfig()
		k.Name, k.Value = kv[0], &kv[1]
		r.Configs = append(r.Configs, k)
	}
	req.Resources = append(req.Resources, r)
	resp, err := n.Ask(req)
	if err != nil {
		return err
	}
	return kerr.ErrorForCode(resp.(*kmsg.IncrementalAlterConfigsResponse).Resources[0].ErrorCode)
}

// Write sends one record to partition 0 of a topic at this node, leader or not, with acks=1. A nil error means that it was
// taken.
func (n *Node) Write(topic, text string) error {
	b := recordbatch.NewBuilder()
	b.Add(recordbatch.Record{Timestamp: time.Now().UnixMilli(), Value: []byte(text)})
	batch, err := b.Build()
	if err != nil {
		return err
	}
	req := kmsg.NewPtrProduceRequest()
	req.Acks, req.TimeoutMillis = 1, 10_000
	t := kmsg.NewProduceRequestTopic()
	t.Topic, t.TopicID = topic, n.topicID(topic)
	p := kmsg.NewProduceRequestTopicPartition()
	p.Records = batch
	t.Partitions = append(t.Partitions, p)
	req.Topics = append(req.Topics, t)
	resp, err := n.Ask(req)
	if err != nil {
		return err
	}
	r := resp.(*kmsg.ProduceResponse)
	return kerr.ErrorForCode(r.Topics[0].Partitions[0].ErrorCode)
}

// Delete has this node, as the leader, delete the records of a topic below an offset. It returns from where on there are records.
func (n *Node) Delete(topic string, below int64, timeout time.Duration) (low int64, err error) {
	req := kmsg.NewPtrDeleteRecordsRequest()
	req.TimeoutMillis = int32(timeout.Milliseconds())
	t := kmsg.NewDeleteRecordsRequestTopic()
	t.Topic = topic
	p := kmsg.NewDeleteRecordsRequestTopicPartition()
	p.Offset = below
	t.Partitions = append(t.Partitions, p)
	req.Topics = append(req.Topics, t)
	resp, err := n.Ask(req)
	if err != nil {
		return -1, err
	}
	r := resp.(*kmsg.DeleteRecordsResponse).Topics[0].Partitions[0]
	return r.LowWatermark, kerr.ErrorForCode(r.ErrorCode)
}

func (n *Node) topicID(topic string) [16]byte {
	req := kmsg.NewPtrMetadataRequest()
	t := kmsg.NewMetadataRequestTopic()
	t.Topic = &topic
	req.Topics = append(req.Topics, t)
	if resp, err := n.Ask(req); err == nil {
		return resp.(*kmsg.MetadataResponse).Topics[0].TopicID
	}
	return [16]byte{}
}

// Offset asks this node as a leader for an offset by one of the times that ListOffsets has names for (KIP-79, KIP-405).
func (n *Node) Offset(topic string, at int64) (int64, error) {
	req := kmsg.NewPtrListOffsetsRequest()
	req.ReplicaID = -1
	t := kmsg.NewListOffsetsRequestTopic()
	t.Topic = topic
	p := kmsg.NewListOffsetsRequestTopicPartition()
	p.Timestamp = at
	t.Partitions = append(t.Partitions, p)
	req.Topics = append(req.Topics, t)
	resp, err := n.Ask(req)
	if err != nil {
		return -1, err
	}
	r := resp.(*kmsg.ListOffsetsResponse).Topics[0].Partitions[0]
	return r.Offset, kerr.ErrorForCode(r.ErrorCode)
}

// Times that Offset knows.
const (
	Latest        = -1
	Earliest      = -2
	EarliestLocal = -4
	LatestTiered  = -5
)
