package kafkaapi

import (
	"context"
	"iter"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/committed"
	"github.com/varve-io/varve/internal/coordinator"
	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

// offsetCommit serves OffsetCommit.
func (a *API) offsetCommit(ctx context.Context, c *call, req *kmsg.OffsetCommitRequest) *kmsg.OffsetCommitResponse {
	resp := respond[*kmsg.OffsetCommitResponse](req)
	img := a.imageWith(ctx, time.Now().Add(imageLag), func(img *metadata.Image) iter.Seq[tp.Partition] {
		return func(yield func(tp.Partition) bool) {
			for i := range req.Topics {
				rt := &req.Topics[i]
				name := rt.Topic
				if t := img.TopicsByID[tp.UUID(rt.TopicID)]; req.Version >= 10 && t != nil {
					name = t.Name
				}
				for _, rp := range rt.Partitions {
					if !yield(tp.Partition{Topic: name, Index: rp.Partition}) {
						return
					}
				}
			}
		}
	})
	now := c.received.UnixMilli()
	n := 0
	for i := range req.Topics {
		n += len(req.Topics[i].Partitions)
	}
	type place struct{ topic, partition int }
	commits, at := make([]coordinator.Commit, 0, n), make([]place, 0, n)
	resp.Topics = make([]kmsg.OffsetCommitResponseTopic, 0, len(req.Topics))
	for i := range req.Topics {
		rt := &req.Topics[i]
		t := kmsg.NewOffsetCommitResponseTopic()
		t.Topic, t.TopicID = rt.Topic, rt.TopicID
		t.Partitions = make([]kmsg.OffsetCommitResponseTopicPartition, 0, len(rt.Partitions))
		name, failed := rt.Topic, int16(0)
		if req.Version >= 10 {
			var ok bool
			if name, ok = a.topicName(rt.TopicID); !ok {
				failed = kerr.UnknownTopicID.Code
			}
		}
		for _, rp := range rt.Partitions {
			p := kmsg.NewOffsetCommitResponseTopicPartition()
			p.Partition, p.ErrorCode = rp.Partition, failed
			if _, _, ok := img.Partition(tp.Partition{Topic: name, Index: rp.Partition}); !ok && failed == 0 {
				p.ErrorCode = kerr.UnknownTopicOrPartition.Code
			}
			if p.ErrorCode == 0 {
				o := committed.Offset{Offset: rp.Offset, LeaderEpoch: rp.LeaderEpoch, Metadata: text(rp.Metadata), CommittedAt: now, ExpiresAt: -1}
				if req.Version <= 4 && req.RetentionTimeMillis >= 0 {
					o.ExpiresAt = now + req.RetentionTimeMillis
				}
				commits = append(commits, coordinator.Commit{Partition: committed.Partition{Topic: name, Partition: rp.Partition}, Offset: o})
				at = append(at, place{i, len(t.Partitions)})
			}
			t.Partitions = append(t.Partitions, p)
		}
		resp.Topics = append(resp.Topics, t)
	}
	by := coordinator.Committer{Committer: group.Committer{MemberID: req.MemberID, InstanceID: text(req.InstanceID), Generation: req.Generation}, Version: req.Version}
	errs, err := a.Groups.Commit(req.Group, by, commits)
	for j, pl := range at {
		p := &resp.Topics[pl.topic].Partitions[pl.partition]
		if p.ErrorCode = code(err); err == nil {
			p.ErrorCode = code(errs[j])
		}
	}
	return resp
}

// offsetFetch serves OffsetFetch, of one group or of many (KIP-709). Where the request fails as a whole, rows are filled
// with the error too: some clients never look at the whole (librdkafka#5586).
func (a *API) offsetFetch(_ context.Context, _ *call, req *kmsg.OffsetFetchRequest) *kmsg.OffsetFetchResponse {
	resp := respond[*kmsg.OffsetFetchResponse](req)
	if req.Version >= 8 {
		for i := range req.Groups {
			resp.Groups = append(resp.Groups, a.fetchGroup(req, &req.Groups[i]))
		}
		return resp
	}
	all := req.Topics == nil
	var wanted []committed.Partition
	for _, t := range req.Topics {
		for _, p := range t.Partitions {
			wanted = append(wanted, committed.Partition{Topic: t.Topic, Partition: p})
		}
	}
	fetched, err := a.Groups.FetchOffsets(req.Group, coordinator.Fetcher{Epoch: -1}, wanted, all)
	resp.ErrorCode = code(err)
	if err != nil {
		fetched = unknown(wanted)
	}
	for _, f := range fetched {
		if n := len(resp.Topics); n == 0 || resp.Topics[n-1].Topic != f.Topic {
			t := kmsg.NewOffsetFetchResponseTopic()
			t.Topic = f.Topic
			resp.Topics = append(resp.Topics, t)
		}
		p := kmsg.NewOffsetFetchResponseTopicPartition()
		metadata := f.Metadata
		p.Partition, p.Offset, p.LeaderEpoch, p.Metadata, p.ErrorCode = f.Partition.Partition, f.Offset.Offset, f.LeaderEpoch, &metadata, code(err)
		if req.RequireStable && f.Unstable && err == nil {
			p.Offset, p.LeaderEpoch, p.ErrorCode = -1, -1, kerr.UnstableOffsetCommit.Code
		}
		t := &resp.Topics[len(resp.Topics)-1]
		t.Partitions = append(t.Partitions, p)
	}
	return resp
}

// unknown answers "nothing committed" for all.
func unknown(wanted []committed.Partition) []coordinator.Fetched {
	out := make([]coordinator.Fetched, len(wanted))
	for i, w := range wanted {
		out[i] = coordinator.Fetched{Partition: w, Offset: committed.Offset{Offset: -1, LeaderEpoch: -1}}
	}
	return out
}

func (a *API) fetchGroup(req *kmsg.OffsetFetchRequest, rg *kmsg.OffsetFetchRequestGroup) kmsg.OffsetFetchResponseGroup {
	out := kmsg.NewOffsetFetchResponseGroup()
	out.Group = rg.Group
	img := a.Image()
	var wanted []committed.Partition
	unknownIDs := map[[16]byte]bool{}
	for _, t := range rg.Topics {
		name := t.Topic
		if req.Version >= 10 {
			var ok bool
			if name, ok = a.topicName(t.TopicID); !ok {
				unknownIDs[t.TopicID] = true
				rt := kmsg.NewOffsetFetchResponseGroupTopic()
				rt.TopicID = t.TopicID
				for _, p := range t.Partitions {
					rp := kmsg.NewOffsetFetchResponseGroupTopicPartition()
					rp.Partition, rp.Offset, rp.LeaderEpoch, rp.ErrorCode = p, -1, -1, kerr.UnknownTopicID.Code
					rt.Partitions = append(rt.Partitions, rp)
				}
				out.Topics = append(out.Topics, rt)
				continue
			}
		}
		for _, p := range t.Partitions {
			wanted = append(wanted, committed.Partition{Topic: name, Partition: p})
		}
	}
	by := coordinator.Fetcher{Epoch: -1}
	if req.Version >= 9 {
		by = coordinator.Fetcher{MemberID: rg.MemberID, Epoch: rg.MemberEpoch}
	}
	fetched, err := a.Groups.FetchOffsets(rg.Group, by, wanted, rg.Topics == nil)
	out.ErrorCode = code(err)
	if err != nil {
		fetched = unknown(wanted)
	}
	byTopic := map[string]int{}
	for _, f := range fetched {
		i, ok := byTopic[f.Topic]
		if !ok {
			rt := kmsg.NewOffsetFetchResponseGroupTopic()
			rt.Topic = f.Topic
			if t, ok := img.Topics[f.Topic]; ok {
				rt.TopicID = t.ID
			} else if req.Version >= 10 {
				continue // without an id there is no way to name it
			}
			i = len(out.Topics)
			byTopic[f.Topic] = i
			out.Topics = append(out.Topics, rt)
		}
		rp := kmsg.NewOffsetFetchResponseGroupTopicPartition()
		metadata := f.Metadata
		rp.Partition, rp.Offset, rp.LeaderEpoch, rp.Metadata, rp.ErrorCode = f.Partition.Partition, f.Offset.Offset, f.LeaderEpoch, &metadata, code(err)
		if req.RequireStable && f.Unstable && err == nil {
			rp.Offset, rp.LeaderEpoch, rp.ErrorCode = -1, -1, kerr.UnstableOffsetCommit.Code
		}
		out.Topics[i].Partitions = append(out.Topics[i].Partitions, rp)
	}
	return out
}

// offsetForLeaderEpoch serves OffsetForLeaderEpoch (KIP-279, KIP-320).
func (a *API) offsetForLeaderEpoch(_ context.Context, _ *call, req *kmsg.OffsetForLeaderEpochRequest) *kmsg.OffsetForLeaderEpochResponse {
	resp := respond[*kmsg.OffsetForLeaderEpochResponse](req)
	for i := range req.Topics {
		rt := &req.Topics[i]
		t := kmsg.NewOffsetForLeaderEpochResponseTopic()
		t.Topic = rt.Topic
		for _, rp := range rt.Partitions {
			p := kmsg.NewOffsetForLeaderEpochResponseTopicPartition()
			p.Partition, p.LeaderEpoch, p.EndOffset = rp.Partition, -1, -1
			part, err := a.replica(rt.Topic, rp.Partition)
			if err == nil {
				if _, err = part.Offsets(rp.CurrentLeaderEpoch); err == nil {
					p.LeaderEpoch, p.EndOffset = part.EndOffsetForEpoch(rp.LeaderEpoch)
				}
			}
			p.ErrorCode = code(err)
			t.Partitions = append(t.Partitions, p)
		}
		resp.Topics = append(resp.Topics, t)
	}
	return resp
}

// describeProducers serves DescribeProducers (KIP-664).
func (a *API) describeProducers(_ context.Context, c *call, req *kmsg.DescribeProducersRequest) *kmsg.DescribeProducersResponse {
	resp := respond[*kmsg.DescribeProducersResponse](req)
	for i := range req.Topics {
		rt := &req.Topics[i]
		t := kmsg.NewDescribeProducersResponseTopic()
		t.Topic = rt.Topic
		for _, index := range rt.Partitions {
			p := kmsg.NewDescribeProducersResponseTopicPartition()
			p.Partition = index
			part, err := a.replica(rt.Topic, index)
			if err == nil {
				_, err = part.Offsets(-1)
			}
			p.ErrorCode, p.ErrorMessage = code(err), message(err)
			if err == nil {
				for _, s := range part.Log().Producers(c.received) {
					ap := kmsg.NewDescribeProducersResponseTopicPartitionActiveProducer()
					ap.ProducerID, ap.ProducerEpoch, ap.LastSequence = s.ProducerID, int32(s.Epoch), s.LastSequence
					ap.LastTimestamp, ap.CoordinatorEpoch, ap.CurrentTxnStartOffset = s.LastTimestamp, max(s.CoordinatorEpoch, 0), s.TxnFirstOffset // Kafka says 0 before the first marker
					p.ActiveProducers = append(p.ActiveProducers, ap)
				}
			}
			t.Partitions = append(t.Partitions, p)
		}
		resp.Topics = append(resp.Topics, t)
	}
	return resp
}
