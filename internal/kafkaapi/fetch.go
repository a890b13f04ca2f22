package kafkaapi

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/directfetch"
	"github.com/varve-io/varve/internal/fetch"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tierinfo"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/wire"
)

// startFetch serves Fetch, with sessions (KIP-227), topic ids (KIP-516) and locations (KIP-1248). The reply's records
// come straight from the log's files.
func startFetch(a *API, _ context.Context, c *call, request kmsg.Request) (wire.Finish, error) {
	req := request.(*kmsg.FetchRequest)
	return func(ctx context.Context) wire.Reply {
		a.unmuted(ctx, c.peer) // since what came before it may have been answered after this was read
		reply := a.fetch(ctx, c, req)
		a.Metrics.answered(c.header, time.Since(c.received))
		return reply
	}, nil
}

func (a *API) fetch(ctx context.Context, c *call, req *kmsg.FetchRequest) wire.Reply {
	ids := req.Version >= 13
	parts, forgotten := a.fetchParts(c, req, ids)
	epoch := req.SessionEpoch
	if req.Version < 7 {
		epoch = fetch.FinalEpoch
	}
	out := fetchReply{version: req.Version, correlation: c.header.Correlation}
	follower := followerOf(req)
	left, charged := int64(math.MaxInt32), a.quotaOf(metadata.ConsumerByteRate, c)
	if follower != nil {
		charged = nil
	}
	if charged != nil {
		left, out.throttle = charged.left(c.peer, time.Now())
	}
	incremental := epoch != fetch.FinalEpoch && epoch != fetch.InitialEpoch
	if left <= 0 && !incremental {
		return out.encode() // without a session or partitions, which clients know to be due to the throttling
	}
	session, wanted, err := a.Fetch.Sessions.Begin(req.SessionID, epoch, ids, parts, forgotten)
	if err != nil {
		out.code = code(err)
		return out.encode()
	}
	if left <= 0 {
		out.session = session.ID()
		return out.encode()
	}
	a.resolve(wanted, ids)
	cfg := a.Config()
	asked := &fetch.Request{
		Parts: wanted, MaxWait: time.Duration(max(req.MaxWaitMillis, 0)) * time.Millisecond,
		MinBytes: int(req.MinBytes), MaxBytes: min(int(max(req.MaxBytes, 0)), cfg.Int("fetch.max.bytes"), int(min(left, math.MaxInt32))),
		Committed: req.IsolationLevel == 1, Formats: directfetch.Formats(req),
		TierWait: cfg.Millis("remote.fetch.max.wait.ms"),
		Follower: follower, Rack: req.Rack, AnyReplica: req.Version >= 11,
	}
	if asked.Follower != nil {
		asked.MaxBytes = int(max(req.MaxBytes, 0)) // the follower's own setting, which may be larger than what clients get
	}
	results := a.Fetch.Fetch(ctx, asked)
	a.pointToLeaders(wanted, results)
	out.session, out.parts, out.results, out.committed = session.ID(), wanted, results, req.IsolationLevel == 1
	out.keep = session.Filter(wanted, results, !incremental)
	sent := int64(0)
	read := bucketRead{use: directfetch.Used(req)}
	for i := range results {
		for _, l := range results[i].Locations {
			read.locations++
			read.granted += l.EndPosition - l.StartPosition
		}
		switch n := float64(results[i].Size()); {
		case results[i].Err != nil:
			a.Metrics.errors.WithLabelValues("Fetch", errorName(results[i].Err)).Inc()
		case n > 0 && asked.Follower != nil:
			a.Metrics.replicatedOut.Add(n)
		case n > 0:
			sent += int64(n)
			a.Metrics.bytesOut.WithLabelValues(wanted[i].Topic).Add(n)
			if results[i].View == nil {
				a.Metrics.remote.WithLabelValues(wanted[i].Topic).Add(n)
			}
		}
	}
	a.Metrics.readers.add(c.header.ClientID, c.peer.Host(), read, time.Now())
	if charged != nil {
		out.throttle = charged.take(c.peer, sent, time.Now())
	}
	if req.Version >= 16 {
		out.brokers = a.endpoints(c, results)
	}
	return out.encode()
}

// pointToLeaders names the leader where a partition is not here at all (KIP-951).
func (a *API) pointToLeaders(parts []fetch.Part, results []fetch.Result) {
	img := a.Image()
	for i := range results {
		r := &results[i]
		if r.Leader >= 0 || !errors.Is(r.Err, partition.ErrNotLeader) {
			continue
		}
		if _, p, ok := img.Partition(tp.Partition{Topic: parts[i].Topic, Index: parts[i].Index}); ok && p.Leader != a.NodeID {
			r.Leader, r.LeaderEpoch = p.Leader, p.LeaderEpoch
		}
	}
}

// followerOf is the broker that a request says it replicates for, nil for a consumer.
func followerOf(req *kmsg.FetchRequest) *fetch.Follower {
	f := fetch.Follower{ID: req.ReplicaID, Epoch: -1}
	if req.Version >= 15 {
		f = fetch.Follower{ID: req.ReplicaState.ID, Epoch: req.ReplicaState.Epoch}
	}
	if f.ID < 0 {
		return nil
	}
	return &f
}

// resolve finds the topics of partitions that have not been found yet. What is not there stays in its place, with its error:
// it may be there for the next fetch of the session.
func (a *API) resolve(parts []fetch.Part, ids bool) {
	img := a.Image()
	for i := range parts {
		p := &parts[i]
		if errors.Is(p.Err, partition.ErrNotLeader) {
			continue
		}
		p.Err = nil
		if ids {
			if t, ok := img.TopicsByID[p.TopicID]; ok {
				p.Topic = t.Name
			} else {
				p.Err = errUnknownTopicID
				continue
			}
		}
		if _, _, ok := img.Partition(tp.Partition{Topic: p.Topic, Index: p.Index}); !ok {
			p.Err = errUnknownTopic
		}
	}
}

// fetchParts reads the request's partitions.
func (a *API) fetchParts(c *call, req *kmsg.FetchRequest, ids bool) (parts []fetch.Part, forgotten []fetch.Key) {
	stranger := false
	if f := followerOf(req); f != nil {
		stranger = f.ID != c.peer.Node
	}
	for i := range req.Topics {
		rt := &req.Topics[i]
		for j := range rt.Partitions {
			rp := &rt.Partitions[j]
			p := fetch.Part{Topic: rt.Topic, TopicID: tp.UUID(rt.TopicID), Index: rp.Partition, Offset: rp.FetchOffset, MaxBytes: int(max(rp.PartitionMaxBytes, 0)),
				CurrentEpoch: -1, LastFetchedEpoch: -1, WantLocation: a.DirectFetch && directfetch.Requested(rp)}
			if req.Version >= 9 {
				p.CurrentEpoch = rp.CurrentLeaderEpoch
			}
			if req.Version >= 12 {
				p.LastFetchedEpoch = rp.LastFetchedEpoch
			}
			if stranger {
				p.Err = partition.ErrNotLeader // it claims to be a broker and has not proved it
			}
			if req.Version >= 5 {
				p.LogStart, p.LocalStart = max(rp.LogStartOffset, 0), max(tierinfo.LocalStart(rp), 0)
			}
			parts = append(parts, p)
		}
	}
	for _, rt := range req.ForgottenTopics {
		for _, index := range rt.Partitions {
			forgotten = append(forgotten, fetch.Key{Topic: rt.Topic, TopicID: tp.UUID(rt.TopicID), Index: index})
		}
	}
	return parts, forgotten
}

// endpoints names the leaders that errors of leadership point to (KIP-951).
func (a *API) endpoints(c *call, results []fetch.Result) []kmsg.FetchResponseBroker {
	var out []kmsg.FetchResponseBroker
	img := a.Image()
	seen := map[int32]bool{}
	for i := range results {
		leader := results[i].Leader
		if results[i].Err == nil || leader < 0 || seen[leader] {
			continue
		}
		if b, ok := img.Brokers[leader]; ok {
			if e, ok := endpoint(b, c.peer.Listener); ok {
				n := kmsg.NewFetchResponseBroker()
				n.NodeID, n.Host, n.Port, n.Rack = b.ID, e.Host, e.Port, optional(b.Rack)
				out, seen[leader] = append(out, n), true
			}
		}
	}
	return out
}
