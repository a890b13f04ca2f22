package kafkaapi

import (
	"context"
	"crypto/rand"
	"slices"
	"strings"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/consumergroup"
	"github.com/varve-io/varve/internal/grouprecord"
	"github.com/varve-io/varve/internal/tp"
)

// consumerGroupHeartbeat serves ConsumerGroupHeartbeat (KIP-848). From version 1 on members make their ids (KIP-1082) and may subscribe by a
// regular expression.
func (a *API) consumerGroupHeartbeat(_ context.Context, c *call, req *kmsg.ConsumerGroupHeartbeatRequest) *kmsg.ConsumerGroupHeartbeatResponse {
	resp := respond[*kmsg.ConsumerGroupHeartbeatResponse](req)
	r := consumergroup.Heartbeat{MemberID: req.MemberID, Epoch: req.MemberEpoch, InstanceID: req.InstanceID, RackID: req.RackID, RebalanceMs: req.RebalanceTimeoutMillis,
		Topics: req.SubscribedTopicNames, Regex: req.SubscribedTopicRegex, Assignor: req.ServerAssignor, ClientID: c.header.ClientID, ClientHost: c.peer.Host()}
	if req.Topics != nil {
		r.Owned = consumergroup.Partitions{}
		for _, t := range req.Topics {
			r.Owned[t.TopicID] = append(r.Owned[t.TopicID], t.Partitions...)
		}
	}
	if r.MemberID == "" {
		if id, err := tp.NewUUID(rand.Reader); err == nil {
			r.NewID = id.String()
		}
	}
	err := r.Validate(req.Version, a.Groups.Consumers(req.Group))
	if err == nil && strings.TrimSpace(req.Group) == "" {
		err = refuse(errInvalidRequest, "GroupId can't be empty.")
	}
	var answer consumergroup.Answer
	if err == nil {
		answer, err = a.Groups.ConsumerHeartbeat(req.Group, r)
	}
	if resp.ErrorCode, resp.ErrorMessage = code(err), message(err); err != nil {
		return resp
	}
	resp.MemberID, resp.MemberEpoch, resp.HeartbeatIntervalMillis = &answer.MemberID, answer.Epoch, int32(answer.HeartbeatMs)
	if answer.Assignment != nil {
		resp.Assignment = &kmsg.ConsumerGroupHeartbeatResponseAssignment{Topics: []kmsg.ConsumerGroupHeartbeatResponseAssignmentTopic{}}
		for id, partitions := range answer.Assignment {
			t := kmsg.NewConsumerGroupHeartbeatResponseAssignmentTopic()
			t.TopicID = id
			for p := range partitions {
				t.Partitions = append(t.Partitions, p)
			}
			slices.Sort(t.Partitions)
			resp.Assignment.Topics = append(resp.Assignment.Topics, t)
		}
	}
	return resp
}

// consumerGroupDescribe serves ConsumerGroupDescribe (KIP-848).
func (a *API) consumerGroupDescribe(_ context.Context, _ *call, req *kmsg.ConsumerGroupDescribeRequest) *kmsg.ConsumerGroupDescribeResponse {
	resp := respond[*kmsg.ConsumerGroupDescribeResponse](req)
	for _, id := range req.Groups {
		g := kmsg.NewConsumerGroupDescribeResponseGroup()
		d, err := a.Groups.DescribeConsumer(id)
		g.Group, g.ErrorCode, g.ErrorMessage = id, code(err), message(err)
		if err == nil {
			g.State, g.Epoch, g.AssignmentEpoch, g.AssignorName = d.State.String(), d.Epoch, d.AssignmentEpoch, d.Assignor
		}
		if req.IncludeAuthorizedOperations {
			g.AuthorizedOperations = groupOperations
		}
		for _, m := range d.Members {
			rm := kmsg.NewConsumerGroupDescribeResponseGroupMember()
			rm.MemberID, rm.InstanceID, rm.RackID, rm.MemberEpoch = m.ID, m.Said.InstanceID, m.Said.RackID, m.Epoch
			rm.ClientID, rm.ClientHost, rm.SubscribedTopics, rm.SubscribedTopicRegex = m.Said.ClientID, m.Said.ClientHost, m.Said.Topics, &m.Said.Regex
			rm.Assignment, rm.TargetAssignment = a.assignment(m.Assigned), a.assignment(m.Target)
			if rm.MemberType = 1; m.Said.Classic != nil {
				rm.MemberType = 0
			}
			g.Members = append(g.Members, rm)
		}
		resp.Groups = append(resp.Groups, g)
	}
	return resp
}

// assignment names partitions of topics that exist.
func (a *API) assignment(partitions grouprecord.Assignment) kmsg.Assignment {
	out := kmsg.Assignment{TopicPartitions: []kmsg.AssignmentTopicPartition{}}
	for id, list := range partitions {
		if name, ok := a.topicName(id); ok {
			out.TopicPartitions = append(out.TopicPartitions, kmsg.AssignmentTopicPartition{TopicID: id, Topic: name, Partitions: list})
		}
	}
	return out
}
