package kafkaapi

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/committed"
	"github.com/varve-io/varve/internal/control"
	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/coordinator"
	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

// findCoordinator serves FindCoordinator, one key or many (KIP-699). Kinds: 0 group, 1 transaction.
func (a *API) findCoordinator(ctx context.Context, c *call, req *kmsg.FindCoordinatorRequest) *kmsg.FindCoordinatorResponse {
	resp := respond[*kmsg.FindCoordinatorResponse](req)
	keys := req.CoordinatorKeys
	if req.Version < 4 {
		keys = []string{req.CoordinatorKey}
	}
	for _, key := range keys {
		b, err := a.coordinatorOf(ctx, req.CoordinatorType, key)
		out := kmsg.NewFindCoordinatorResponseCoordinator()
		out.Key, out.NodeID, out.Port, out.ErrorCode, out.ErrorMessage = key, -1, -1, code(err), message(err)
		if err == nil {
			if e, ok := endpoint(b, c.peer.Listener); ok {
				out.NodeID, out.Host, out.Port = b.ID, e.Host, e.Port
			}
		}
		if req.Version < 4 {
			resp.NodeID, resp.Host, resp.Port, resp.ErrorCode, resp.ErrorMessage = out.NodeID, out.Host, out.Port, out.ErrorCode, out.ErrorMessage
		} else {
			resp.Coordinators = append(resp.Coordinators, out)
		}
	}
	return resp
}

func (a *API) coordinatorOf(ctx context.Context, kind int8, key string) (*metadata.BrokerRecord, error) {
	topic := coordinator.Topic
	switch {
	case kind == 1:
		topic = coordinator.TransactionTopic
	case kind != 0:
		return nil, fmt.Errorf("%w: coordinator type %d", errInvalidRequest, kind)
	case key == "":
		return nil, group.ErrInvalidGroupID
	}
	id, img, err := a.placeOf(ctx, topic, key)
	if err != nil {
		return nil, err
	}
	_, p, _ := img.Partition(id)
	b, ok := img.Brokers[p.Leader]
	if !ok || b.Fenced {
		return nil, coordinator.ErrUnavailable
	}
	return b, nil
}

// placeOf is the partition of one of the cluster's own topics that keeps a group or transactional id, in the image that has it. The topic is
// made if it is missing.
func (a *API) placeOf(ctx context.Context, topic, key string) (tp.Partition, *metadata.Image, error) {
	if err := a.ensureInternal(ctx, topic); err != nil {
		return tp.Partition{}, nil, fmt.Errorf("%w: %w", coordinator.ErrUnavailable, err)
	}
	img := a.Image()
	t, ok := img.Topics[topic]
	if !ok {
		return tp.Partition{}, nil, coordinator.ErrUnavailable
	}
	return tp.Partition{Topic: topic, Index: coordinator.PartitionFor(key, len(t.Partitions))}, img, nil
}

// ensureInternal makes one of the cluster's own topics if it is missing.
func (a *API) ensureInternal(ctx context.Context, name string) error {
	if _, ok := a.Image().Topics[name]; ok {
		return nil
	}
	ctx, cancel := within(ctx, patience)
	defer cancel()
	made, err := control.Do[[]controller.CreatedTopic](ctx, a.Control, controller.CreateTopicsCommand{Topics: []controller.NewTopic{a.internalTopic(name)}})
	if err != nil {
		return err
	}
	if err := made[0].Err.OrNil(); !errors.Is(err, controller.ErrTopicExists) {
		return err
	}
	return nil
}

func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// joinGroup serves JoinGroup.
func (a *API) joinGroup(ctx context.Context, c *call, req *kmsg.JoinGroupRequest) *kmsg.JoinGroupResponse {
	resp := respond[*kmsg.JoinGroupResponse](req)
	r := group.JoinRequest{MemberID: req.MemberID, InstanceID: text(req.InstanceID), ClientID: c.header.ClientID, ClientHost: c.peer.Host(),
		SessionMs: int64(req.SessionTimeoutMillis), RebalanceMs: int64(req.RebalanceTimeoutMillis), ProtocolType: req.ProtocolType,
		RequireID: req.Version >= 4, SupportsSkip: req.Version >= 9}
	if req.Version == 0 {
		r.RebalanceMs = r.SessionMs // v0 has no time-out of its own for rebalances
	}
	for _, p := range req.Protocols {
		r.Protocols = append(r.Protocols, group.Protocol{Name: p.Name, Metadata: bytes.Clone(p.Metadata)})
	}
	prefix := c.header.ClientID
	if r.InstanceID != "" {
		prefix = r.InstanceID
	}
	// Shaped like Kafka's: client or instance id, '-', uuid.
	var id [16]byte
	rand.Read(id[:])
	h := hex.EncodeToString(id[:])
	r.NewID = strings.Join([]string{prefix, h[:8], h[8:12], h[12:16], h[16:20], h[20:]}, "-")
	result := a.Groups.Join(ctx, req.Group, r)
	resp.ErrorCode, resp.Generation, resp.MemberID, resp.LeaderID = code(result.Err), result.Generation, result.MemberID, result.Leader
	resp.SkipAssignment = result.SkipAssignment
	if result.Err == nil {
		resp.ProtocolType, resp.Protocol = &result.ProtocolType, &result.Protocol
	} else if req.Version < 7 {
		empty := ""
		resp.Protocol = &empty
	}
	for _, m := range result.Members {
		rm := kmsg.NewJoinGroupResponseMember()
		rm.MemberID, rm.InstanceID, rm.ProtocolMetadata = m.ID, optional(m.InstanceID), m.Metadata
		resp.Members = append(resp.Members, rm)
	}
	return resp
}

// syncGroup serves SyncGroup.
func (a *API) syncGroup(ctx context.Context, _ *call, req *kmsg.SyncGroupRequest) *kmsg.SyncGroupResponse {
	resp := respond[*kmsg.SyncGroupResponse](req)
	r := group.SyncRequest{MemberID: req.MemberID, InstanceID: text(req.InstanceID), Generation: req.Generation, ProtocolType: text(req.ProtocolType), Protocol: text(req.Protocol)}
	if len(req.GroupAssignment) > 0 {
		r.Assignments = map[string][]byte{}
		for _, m := range req.GroupAssignment {
			r.Assignments[m.MemberID] = bytes.Clone(m.MemberAssignment)
		}
	}
	result := a.Groups.Sync(ctx, req.Group, r)
	resp.ErrorCode, resp.MemberAssignment = code(result.Err), result.Assignment
	if resp.MemberAssignment == nil {
		resp.MemberAssignment = []byte{}
	}
	if result.Err == nil {
		resp.ProtocolType, resp.Protocol = &result.ProtocolType, &result.Protocol
	}
	return resp
}

// heartbeat serves Heartbeat.
func (a *API) heartbeat(_ context.Context, _ *call, req *kmsg.HeartbeatRequest) *kmsg.HeartbeatResponse {
	resp := respond[*kmsg.HeartbeatResponse](req)
	resp.ErrorCode = code(a.Groups.Heartbeat(req.Group, req.MemberID, text(req.InstanceID), req.Generation))
	return resp
}

// leaveGroup serves LeaveGroup, of one member or of many (KIP-345).
func (a *API) leaveGroup(_ context.Context, _ *call, req *kmsg.LeaveGroupRequest) *kmsg.LeaveGroupResponse {
	resp := respond[*kmsg.LeaveGroupResponse](req)
	var leavers []coordinator.Leaver
	if req.Version < 3 {
		leavers = []coordinator.Leaver{{MemberID: req.MemberID}}
	}
	for _, m := range req.Members {
		leavers = append(leavers, coordinator.Leaver{MemberID: m.MemberID, InstanceID: text(m.InstanceID)})
	}
	errs, err := a.Groups.Leave(req.Group, leavers)
	if resp.ErrorCode = code(err); err != nil {
		return resp
	}
	if req.Version < 3 {
		resp.ErrorCode = code(errs[0])
		return resp
	}
	for i, m := range req.Members {
		rm := kmsg.NewLeaveGroupResponseMember()
		rm.MemberID, rm.InstanceID, rm.ErrorCode = m.MemberID, m.InstanceID, code(errs[i])
		resp.Members = append(resp.Members, rm)
	}
	return resp
}

// describeGroups serves DescribeGroups.
func (a *API) describeGroups(_ context.Context, _ *call, req *kmsg.DescribeGroupsRequest) *kmsg.DescribeGroupsResponse {
	resp := respond[*kmsg.DescribeGroupsResponse](req)
	for _, id := range req.Groups {
		d, err := a.Groups.Describe(id)
		g := kmsg.NewDescribeGroupsResponseGroup()
		g.Group, g.ErrorCode, g.ErrorMessage = id, code(err), message(err)
		if g.ErrorCode == kerr.GroupIDNotFound.Code && req.Version < 6 {
			g.ErrorCode, g.ErrorMessage = 0, nil // before v6 a missing group is a dead one
		}
		g.State, g.ProtocolType, g.Protocol = d.State.String(), d.ProtocolType, d.Protocol
		if req.IncludeAuthorizedOperations {
			g.AuthorizedOperations = groupOperations
		}
		for _, m := range d.Members {
			rm := kmsg.NewDescribeGroupsResponseGroupMember()
			rm.MemberID, rm.InstanceID, rm.ClientID, rm.ClientHost = m.ID, optional(m.InstanceID), m.ClientID, m.ClientHost
			rm.ProtocolMetadata, rm.MemberAssignment = m.Metadata, m.Assignment
			if rm.ProtocolMetadata == nil {
				rm.ProtocolMetadata = []byte{}
			}
			if rm.MemberAssignment == nil {
				rm.MemberAssignment = []byte{}
			}
			g.Members = append(g.Members, rm)
		}
		resp.Groups = append(resp.Groups, g)
	}
	return resp
}

// listGroups serves ListGroups with its filters (KIP-518, KIP-848).
func (a *API) listGroups(_ context.Context, _ *call, req *kmsg.ListGroupsRequest) *kmsg.ListGroupsResponse {
	resp := respond[*kmsg.ListGroupsResponse](req)
	list, err := a.Groups.List()
	resp.ErrorCode = code(err)
	fold := func(filter []string, v string) bool {
		return len(filter) == 0 || slices.ContainsFunc(filter, func(s string) bool { return strings.EqualFold(s, v) })
	}
	for _, l := range list {
		if !fold(req.StatesFilter, l.State) || !fold(req.TypesFilter, l.Type) {
			continue
		}
		g := kmsg.NewListGroupsResponseGroup()
		g.Group, g.ProtocolType, g.GroupState, g.GroupType = l.ID, l.ProtocolType, l.State, l.Type
		resp.Groups = append(resp.Groups, g)
	}
	return resp
}

// deleteGroups serves DeleteGroups (KIP-229).
func (a *API) deleteGroups(_ context.Context, _ *call, req *kmsg.DeleteGroupsRequest) *kmsg.DeleteGroupsResponse {
	resp := respond[*kmsg.DeleteGroupsResponse](req)
	for _, id := range req.Groups {
		err := a.Groups.Delete(id)
		g := kmsg.NewDeleteGroupsResponseGroup()
		g.Group, g.ErrorCode, g.ErrorMessage = id, code(err), message(err)
		resp.Groups = append(resp.Groups, g)
	}
	return resp
}

// offsetDelete serves OffsetDelete (KIP-496).
func (a *API) offsetDelete(_ context.Context, _ *call, req *kmsg.OffsetDeleteRequest) *kmsg.OffsetDeleteResponse {
	resp := respond[*kmsg.OffsetDeleteResponse](req)
	img := a.Image()
	var partitions []committed.Partition
	for _, t := range req.Topics {
		for _, p := range t.Partitions {
			if _, _, ok := img.Partition(tp.Partition{Topic: t.Topic, Index: p.Partition}); ok {
				partitions = append(partitions, committed.Partition{Topic: t.Topic, Partition: p.Partition})
			}
		}
	}
	errs, err := a.Groups.DeleteOffsets(req.Group, partitions)
	if resp.ErrorCode = code(err); err != nil {
		return resp
	}
	next := 0
	for _, t := range req.Topics {
		rt := kmsg.NewOffsetDeleteResponseTopic()
		rt.Topic = t.Topic
		for _, p := range t.Partitions {
			rp := kmsg.NewOffsetDeleteResponseTopicPartition()
			rp.Partition, rp.ErrorCode = p.Partition, kerr.UnknownTopicOrPartition.Code
			if _, _, ok := img.Partition(tp.Partition{Topic: t.Topic, Index: p.Partition}); ok {
				rp.ErrorCode = code(errs[next])
				next++
			}
			rt.Partitions = append(rt.Partitions, rp)
		}
		resp.Topics = append(resp.Topics, rt)
	}
	return resp
}
