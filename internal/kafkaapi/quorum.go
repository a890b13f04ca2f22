package kafkaapi

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/quorum"
)

// metadataTopic is Kafka's name for the metadata log, which DescribeQuorum asks about.
const metadataTopic = "__cluster_metadata"

// describeQuorum serves DescribeQuorum (KIP-595, KIP-836, KIP-853): the active controller answers, through whoever is asked.
// What Raft does not tell of other nodes (their log ends and when they were level) is -1.
func (a *API) describeQuorum(ctx context.Context, _ *call, req *kmsg.DescribeQuorumRequest) *kmsg.DescribeQuorumResponse {
	resp := respond[*kmsg.DescribeQuorumResponse](req)
	var status quorum.Status
	var failed error
	asked := false
	for i := range req.Topics {
		rt := &req.Topics[i]
		t := kmsg.NewDescribeQuorumResponseTopic()
		t.Topic = rt.Topic
		for _, rp := range rt.Partitions {
			p := kmsg.NewDescribeQuorumResponseTopicPartition()
			p.Partition, p.LeaderID = rp.Partition, -1
			err := errUnknownTopic
			if rt.Topic == metadataTopic && rp.Partition == 0 {
				if !asked {
					asked = true
					ctx, cancel := within(ctx, patience)
					status, failed = a.Control.QuorumStatus(ctx)
					cancel()
				}
				if err = failed; err == nil {
					quorumRow(&p, status, time.Now())
				}
			}
			p.ErrorCode, p.ErrorMessage = code(err), message(err)
			t.Partitions = append(t.Partitions, p)
		}
		resp.Topics = append(resp.Topics, t)
	}
	if failed == nil {
		for _, m := range status.Members {
			host, port, err := net.SplitHostPort(m.Address)
			n, _ := strconv.ParseUint(port, 10, 16)
			if err != nil {
				continue
			}
			node := kmsg.NewDescribeQuorumResponseNode()
			node.NodeID = m.ID
			l := kmsg.NewDescribeQuorumResponseNodeListener()
			l.Name, l.Host, l.Port = "CONTROLLER", host, uint16(n)
			node.Listeners = append(node.Listeners, l)
			resp.Nodes = append(resp.Nodes, node)
		}
	}
	return resp
}

func quorumRow(p *kmsg.DescribeQuorumResponseTopicPartition, s quorum.Status, now time.Time) {
	p.LeaderID, p.LeaderEpoch, p.HighWatermark = s.Leader, int32(s.Term), int64(s.CommitIndex)
	for _, m := range s.Members {
		r := kmsg.NewDescribeQuorumResponseTopicPartitionReplicaState()
		r.ReplicaID, r.LogEndOffset, r.LastFetchTimestamp, r.LastCaughtUpTimestamp = m.ID, -1, -1, -1
		if m.ID == s.Leader {
			r.LogEndOffset, r.LastFetchTimestamp, r.LastCaughtUpTimestamp = int64(s.CommitIndex), now.UnixMilli(), now.UnixMilli()
		}
		if m.Voter {
			p.CurrentVoters = append(p.CurrentVoters, r)
		} else {
			p.Observers = append(p.Observers, r)
		}
	}
}

// addRaftVoter serves AddRaftVoter (KIP-853): a node that has registered becomes a voter of the metadata quorum.
func (a *API) addRaftVoter(ctx context.Context, _ *call, req *kmsg.AddRaftVoterRequest) *kmsg.AddRaftVoterResponse {
	resp := respond[*kmsg.AddRaftVoterResponse](req)
	ctx, cancel := within(ctx, req.TimeoutMillis)
	defer cancel()
	err := a.sameCluster(req.ClusterID)
	if err == nil {
		b, ok := a.Image().Brokers[req.VoterID]
		if !ok {
			err = refuse(errInvalidRequest, "Node %d is not registered: start it first, it joins as a broker and can then become a voter.", req.VoterID)
		} else if e, ok := b.Peer(); !ok {
			err = refuse(errInvalidRequest, "Node %d has no address for other nodes.", req.VoterID)
		} else {
			err = a.Control.AddVoter(ctx, req.VoterID, net.JoinHostPort(e.Host, fmt.Sprint(e.Port)))
		}
	}
	resp.ErrorCode, resp.ErrorMessage = code(err), message(err)
	return resp
}

// removeRaftVoter serves RemoveRaftVoter (KIP-853). The node stays a broker.
func (a *API) removeRaftVoter(ctx context.Context, _ *call, req *kmsg.RemoveRaftVoterRequest) *kmsg.RemoveRaftVoterResponse {
	resp := respond[*kmsg.RemoveRaftVoterResponse](req)
	ctx, cancel := within(ctx, patience)
	defer cancel()
	err := a.sameCluster(req.ClusterID)
	if err == nil {
		err = a.Control.RemoveVoter(ctx, req.VoterID)
	}
	resp.ErrorCode, resp.ErrorMessage = code(err), message(err)
	return resp
}

func (a *API) sameCluster(id *string) error {
	if img := a.Image(); id != nil && *id != "" && *id != img.ClusterID {
		return refuse(errClusterID, "This is cluster %s, not %s.", img.ClusterID, *id)
	}
	return nil
}
