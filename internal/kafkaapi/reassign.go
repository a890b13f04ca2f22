package kafkaapi

import (
	"context"
	"slices"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/control"
	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

// alterReassignments serves AlterPartitionReassignments (KIP-455, KIP-860).
func (a *API) alterReassignments(ctx context.Context, _ *call, req *kmsg.AlterPartitionAssignmentsRequest) *kmsg.AlterPartitionAssignmentsResponse {
	resp := respond[*kmsg.AlterPartitionAssignmentsResponse](req)
	ctx, cancel := within(ctx, req.TimeoutMillis)
	defer cancel()
	resp.AllowReplicationFactorChange = req.Version < 1 || req.AllowReplicationFactorChange
	var cmd controller.ReassignCommand
	var rows [][2]int // of the answer, by partition of the command
	img := a.Image()
	for i := range req.Topics {
		rt := &req.Topics[i]
		t := kmsg.NewAlterPartitionAssignmentsResponseTopic()
		t.Topic = rt.Topic
		for _, rp := range rt.Partitions {
			p := kmsg.NewAlterPartitionAssignmentsResponseTopicPartition()
			p.Partition = rp.Partition
			if err := sameFactor(img, rt.Topic, rp, resp.AllowReplicationFactorChange); err != nil {
				p.ErrorCode, p.ErrorMessage = code(err), message(err)
			} else {
				cmd.Partitions = append(cmd.Partitions, controller.Reassignment{Topic: rt.Topic, Index: rp.Partition, Replicas: rp.Replicas})
				rows = append(rows, [2]int{i, len(t.Partitions)})
			}
			t.Partitions = append(t.Partitions, p)
		}
		resp.Topics = append(resp.Topics, t)
	}
	reply, err := control.Do[controller.ReassignReply](ctx, a.Control, cmd)
	if err != nil {
		resp.ErrorCode, resp.ErrorMessage = code(err), message(err)
		resp.Topics = nil
		return resp
	}
	for n, row := range rows {
		p := &resp.Topics[row[0]].Partitions[row[1]]
		err := reply.Errors[n].OrNil()
		p.ErrorCode, p.ErrorMessage = code(err), message(err)
	}
	return resp
}

// sameFactor refuses another number of replicas where the client forbids it (KIP-860).
func sameFactor(img *metadata.Image, topic string, rp kmsg.AlterPartitionAssignmentsRequestTopicPartition, allowed bool) error {
	_, p, ok := img.Partition(tp.Partition{Topic: topic, Index: rp.Partition})
	if allowed || !ok || rp.Replicas == nil {
		return nil
	}
	if now := len(p.Replicas) - len(p.Adding); now != len(rp.Replicas) {
		return refuse(controller.ErrInvalidReplicationFactor, "The replication factor is changed from %d to %d", now, len(rp.Replicas))
	}
	return nil
}

// listReassignments serves ListPartitionReassignments (KIP-455).
func (a *API) listReassignments(_ context.Context, _ *call, req *kmsg.ListPartitionReassignmentsRequest) *kmsg.ListPartitionReassignmentsResponse {
	resp := respond[*kmsg.ListPartitionReassignmentsResponse](req)
	img := a.Image()
	list := func(t *metadata.Topic, wanted func(int32) bool) {
		out := kmsg.NewListPartitionReassignmentsResponseTopic()
		out.Topic = t.Name
		for _, p := range t.Partitions {
			if len(p.Adding) == 0 && len(p.Removing) == 0 || !wanted(p.Index) {
				continue
			}
			row := kmsg.NewListPartitionReassignmentsResponseTopicPartition()
			row.Partition, row.Replicas, row.AddingReplicas, row.RemovingReplicas = p.Index, p.Replicas, p.Adding, p.Removing
			out.Partitions = append(out.Partitions, row)
		}
		if len(out.Partitions) > 0 {
			resp.Topics = append(resp.Topics, out)
		}
	}
	if req.Topics == nil {
		for _, name := range img.TopicNames() {
			list(img.Topics[name], func(int32) bool { return true })
		}
		return resp
	}
	for _, rt := range req.Topics {
		if t, ok := img.Topics[rt.Topic]; ok {
			list(t, func(index int32) bool { return slices.Contains(rt.Partitions, index) })
		}
	}
	return resp
}

// electLeaders serves ElectLeaders (KIP-183, KIP-460).
func (a *API) electLeaders(ctx context.Context, _ *call, req *kmsg.ElectLeadersRequest) *kmsg.ElectLeadersResponse {
	resp := respond[*kmsg.ElectLeadersResponse](req)
	ctx, cancel := within(ctx, req.TimeoutMillis)
	defer cancel()
	cmd := controller.ElectLeadersCommand{Unclean: req.Version >= 1 && req.ElectionType == 1}
	img := a.Image()
	row := func(topic string, index int32, err error) {
		i := slices.IndexFunc(resp.Topics, func(t kmsg.ElectLeadersResponseTopic) bool { return t.Topic == topic })
		if i < 0 {
			i = len(resp.Topics)
			t := kmsg.NewElectLeadersResponseTopic()
			t.Topic = topic
			resp.Topics = append(resp.Topics, t)
		}
		p := kmsg.NewElectLeadersResponseTopicPartition()
		p.Partition, p.ErrorCode, p.ErrorMessage = index, code(err), message(err)
		resp.Topics[i].Partitions = append(resp.Topics[i].Partitions, p)
	}
	if req.ElectionType < 0 || req.ElectionType > 1 {
		resp.ErrorCode = code(errInvalidRequest)
		return resp
	}
	if req.Topics != nil {
		cmd.Partitions = []controller.PartitionRef{}
	}
	for i := range req.Topics {
		rt := &req.Topics[i]
		for _, index := range rt.Partitions {
			if t, ok := img.Topics[rt.Topic]; ok {
				cmd.Partitions = append(cmd.Partitions, controller.PartitionRef{Topic: t.ID, Index: index})
			} else {
				row(rt.Topic, index, errUnknownTopic)
			}
		}
	}
	reply, err := control.Do[controller.ElectLeadersReply](ctx, a.Control, cmd)
	if err != nil {
		resp.ErrorCode, resp.Topics = code(err), nil
		return resp
	}
	img = a.Image()
	for i, ref := range reply.Partitions {
		if t, ok := img.TopicsByID[ref.Topic]; ok {
			row(t.Name, ref.Index, reply.Errors[i].OrNil())
		}
	}
	return resp
}

// unregisterBroker serves UnregisterBroker (KIP-631). A broker that is still in replica lists is not forgotten: drain it first.
func (a *API) unregisterBroker(ctx context.Context, _ *call, req *kmsg.UnregisterBrokerRequest) *kmsg.UnregisterBrokerResponse {
	resp := respond[*kmsg.UnregisterBrokerResponse](req)
	ctx, cancel := within(ctx, patience)
	defer cancel()
	_, err := a.Control.Do(ctx, controller.UnregisterCommand{Broker: req.BrokerID})
	resp.ErrorCode, resp.ErrorMessage = code(err), message(err)
	return resp
}
