package kafkaapi

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/control"
	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

// Operations that everybody may perform, as a broker without an authorizer reports them: bits by ACL operation (KIP-430).
const (
	topicOperations   int32 = 1<<3 | 1<<4 | 1<<5 | 1<<6 | 1<<7 | 1<<8 | 1<<10 | 1<<11
	groupOperations   int32 = 1<<3 | 1<<6 | 1<<8 | 1<<10 | 1<<11
	clusterOperations int32 = 1<<5 | 1<<7 | 1<<8 | 1<<9 | 1<<10 | 1<<11 | 1<<12
)

// metadata serves Metadata: brokers, topics and their leaders. Topics that are asked for by name may be created.
func (a *API) metadata(ctx context.Context, c *call, req *kmsg.MetadataRequest) *kmsg.MetadataResponse {
	resp := respond[*kmsg.MetadataResponse](req)
	all := req.Topics == nil || req.Version == 0 && len(req.Topics) == 0
	if !all {
		a.autoCreate(ctx, req)
	}
	img := a.Image()
	for _, id := range img.BrokerIDs() {
		if e, ok := endpoint(img.Brokers[id], c.peer.Listener); ok && !img.Brokers[id].Fenced {
			b := kmsg.NewMetadataResponseBroker()
			b.NodeID, b.Host, b.Port = id, e.Host, e.Port
			b.Rack = optional(img.Brokers[id].Rack)
			resp.Brokers = append(resp.Brokers, b)
		}
	}
	resp.ClusterID = &img.ClusterID
	resp.ControllerID = a.controllerID(img)
	if req.IncludeClusterAuthorizedOperations {
		resp.AuthorizedOperations = clusterOperations
	}
	if all {
		for _, name := range img.TopicNames() {
			resp.Topics = append(resp.Topics, a.metadataTopic(img, img.Topics[name], req))
		}
		return resp
	}
	for i := range req.Topics {
		rt := &req.Topics[i]
		if t, err := findTopic(img, rt); err == nil {
			resp.Topics = append(resp.Topics, a.metadataTopic(img, t, req))
		} else {
			t := kmsg.NewMetadataResponseTopic()
			t.Topic, t.TopicID, t.ErrorCode = rt.Topic, rt.TopicID, code(err)
			if t.Topic == nil && req.Version < 12 {
				empty := ""
				t.Topic = &empty
			}
			resp.Topics = append(resp.Topics, t)
		}
	}
	return resp
}

func findTopic(img *metadata.Image, rt *kmsg.MetadataRequestTopic) (*metadata.Topic, error) {
	if rt.Topic != nil {
		if err := controller.CheckTopicName(*rt.Topic); err != nil {
			return nil, err
		}
		if t, ok := img.Topics[*rt.Topic]; ok {
			return t, nil
		}
		return nil, errUnknownTopic
	}
	if t, ok := img.TopicsByID[tp.UUID(rt.TopicID)]; ok {
		return t, nil
	}
	return nil, errUnknownTopicID
}

// autoCreate makes missing topics if the broker and the client allow it. Versions before 4 cannot say no.
func (a *API) autoCreate(ctx context.Context, req *kmsg.MetadataRequest) {
	if req.Version >= 4 && !req.AllowAutoTopicCreation || !a.Config().Bool("auto.create.topics.enable") {
		return
	}
	img := a.Image()
	var missing []controller.NewTopic
	for i := range req.Topics {
		name := req.Topics[i].Topic
		if name == nil || controller.CheckTopicName(*name) != nil {
			continue
		}
		if _, ok := img.Topics[*name]; !ok && !slices.ContainsFunc(missing, func(t controller.NewTopic) bool { return t.Name == *name }) {
			t := controller.NewTopic{Name: *name, Partitions: -1, ReplicationFactor: -1}
			if controller.IsInternal(*name) {
				t = a.internalTopic(*name)
			}
			missing = append(missing, t)
		}
	}
	if len(missing) == 0 {
		return
	}
	ctx, cancel := within(ctx, createdOnDemand)
	defer cancel()
	made, err := control.Do[[]controller.CreatedTopic](ctx, a.Control, controller.CreateTopicsCommand{Topics: missing})
	if err != nil {
		a.Log.Warn("topics were not created on demand", "cause", err)
	}
	for _, t := range made {
		if err := t.Err.OrNil(); err != nil && !errors.Is(err, controller.ErrTopicExists) {
			a.Log.Info("topic was not created on demand", "topic", t.Name, "cause", err)
		}
	}
}

func (a *API) metadataTopic(img *metadata.Image, t *metadata.Topic, req *kmsg.MetadataRequest) kmsg.MetadataResponseTopic {
	out := kmsg.NewMetadataResponseTopic()
	out.Topic, out.TopicID, out.IsInternal = &t.Name, t.ID, controller.IsInternal(t.Name)
	if req.IncludeTopicAuthorizedOperations {
		out.AuthorizedOperations = topicOperations
	}
	for _, state := range t.Partitions {
		p := kmsg.NewMetadataResponseTopicPartition()
		p.Partition, p.Leader, p.LeaderEpoch = state.Index, state.Leader, state.LeaderEpoch
		p.Replicas, p.ISR = state.Replicas, state.InSync()
		p.OfflineReplicas = a.offline(img, t, state)
		if slices.Contains(p.OfflineReplicas, p.Leader) {
			p.Leader = -1
		}
		if p.Leader < 0 {
			p.ErrorCode = kerr.LeaderNotAvailable.Code
		}
		out.Partitions = append(out.Partitions, p)
	}
	return out
}

// offline lists the replicas that cannot be used: on brokers that are fenced or gone, and on this one if its log is broken.
func (a *API) offline(img *metadata.Image, t *metadata.Topic, state *metadata.Partition) []int32 {
	var out []int32
	for _, id := range state.Replicas {
		b, ok := img.Brokers[id]
		broken := false
		if id == a.NodeID {
			part, here := a.Replicas.Get(tp.Partition{Topic: t.Name, Index: state.Index})
			broken = here && part.Cause() != nil
		}
		if !ok || b.Fenced || broken {
			out = append(out, id)
		}
	}
	return out
}

// controllerID is the broker that clients should send what is for the controller. Every broker sends it on, so any will do;
// the one that leads the quorum saves a hop.
func (a *API) controllerID(img *metadata.Image) int32 {
	if id := a.Quorum().Leader; id >= 0 {
		if b, ok := img.Brokers[id]; ok && !b.Fenced {
			return id
		}
	}
	return a.NodeID
}

// endpoint is where clients of a listener reach a broker.
func endpoint(b *metadata.BrokerRecord, listener string) (metadata.Endpoint, bool) {
	for _, e := range b.Listeners {
		if strings.EqualFold(e.Name, listener) {
			return e, true
		}
	}
	return metadata.Endpoint{}, false
}

func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// describeCluster serves DescribeCluster (KIP-700).
func (a *API) describeCluster(_ context.Context, c *call, req *kmsg.DescribeClusterRequest) *kmsg.DescribeClusterResponse {
	resp := respond[*kmsg.DescribeClusterResponse](req)
	img := a.Image()
	if req.EndpointType != 1 {
		resp.ErrorCode = kerr.UnsupportedEndpointType.Code
		text := "This is a broker: ask for endpoint type 1, brokers."
		resp.ErrorMessage = &text
		return resp
	}
	resp.EndpointType = 1
	resp.ClusterID, resp.ControllerID = img.ClusterID, a.controllerID(img)
	for _, id := range img.BrokerIDs() {
		known := img.Brokers[id]
		if e, ok := endpoint(known, c.peer.Listener); ok && (!known.Fenced || req.Version >= 2 && req.IncludeFencedBrokers) {
			b := kmsg.NewDescribeClusterResponseBroker()
			b.NodeID, b.Host, b.Port, b.Rack, b.IsFenced = id, e.Host, e.Port, optional(known.Rack), known.Fenced
			resp.Brokers = append(resp.Brokers, b)
		}
	}
	if req.IncludeClusterAuthorizedOperations {
		resp.ClusterAuthorizedOperations = clusterOperations
	}
	return resp
}

// describeTopicPartitions serves DescribeTopicPartitions: like Metadata, a page at a time (KIP-966).
func (a *API) describeTopicPartitions(_ context.Context, _ *call, req *kmsg.DescribeTopicPartitionsRequest) *kmsg.DescribeTopicPartitionsResponse {
	resp := respond[*kmsg.DescribeTopicPartitionsResponse](req)
	img := a.Image()
	var names []string
	for _, t := range req.Topics {
		names = append(names, t.Topic)
	}
	if len(names) == 0 {
		names = img.TopicNames()
	}
	slices.Sort(names)
	names = slices.Compact(names)
	first := int32(0)
	if req.Cursor != nil {
		i, _ := slices.BinarySearch(names, req.Cursor.Topic)
		names = names[i:]
		if len(names) > 0 && names[0] == req.Cursor.Topic {
			first = max(req.Cursor.Partition, 0)
		}
	}
	left := min(int(req.ResponsePartitionLimit), a.Config().Int("max.request.partition.size.limit"))
	if left <= 0 {
		left = a.Config().Int("max.request.partition.size.limit")
	}
	for _, name := range names {
		out := kmsg.NewDescribeTopicPartitionsResponseTopic()
		out.Topic = &name
		t, ok := img.Topics[name]
		if err := controller.CheckTopicName(name); err != nil {
			out.ErrorCode = code(err)
		} else if !ok {
			out.ErrorCode = kerr.UnknownTopicOrPartition.Code
		}
		if out.ErrorCode != 0 {
			resp.Topics = append(resp.Topics, out)
			continue
		}
		out.TopicID, out.IsInternal, out.AuthorizedOperations = t.ID, controller.IsInternal(name), topicOperations
		for _, state := range t.Partitions[min(int(first), len(t.Partitions)):] {
			if left == 0 {
				next := kmsg.NewDescribeTopicPartitionsResponseNextCursor()
				next.Topic, next.Partition = name, state.Index
				resp.NextCursor = &next
				if len(out.Partitions) > 0 {
					resp.Topics = append(resp.Topics, out)
				}
				return resp
			}
			left--
			p := kmsg.NewDescribeTopicPartitionsResponseTopicPartition()
			p.Partition, p.LeaderID, p.LeaderEpoch = state.Index, state.Leader, state.LeaderEpoch
			p.Replicas, p.ISR = state.Replicas, state.InSync()
			p.EligibleLeaderReplicas, p.LastKnownELR = []int32{}, []int32{}
			if state.Lost {
				p.LastKnownELR = state.ISR
			}
			p.OfflineReplicas = a.offline(img, t, state)
			if slices.Contains(p.OfflineReplicas, p.LeaderID) {
				p.LeaderID = -1
			}
			out.Partitions = append(out.Partitions, p)
		}
		first = 0
		resp.Topics = append(resp.Topics, out)
	}
	return resp
}
