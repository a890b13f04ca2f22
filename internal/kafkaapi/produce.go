package kafkaapi

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/commit"
	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/wire"
)

// startProduce appends at once, so that the batches of a connection are appended in the order in which they came. With
// acks=all the answer waits until they are committed.
func startProduce(a *API, _ context.Context, c *call, request kmsg.Request) (wire.Finish, error) {
	req := request.(*kmsg.ProduceRequest)
	resp := respond[*kmsg.ProduceResponse](req)
	now := time.Now()
	img := a.Image()
	refused := error(nil) // all of it
	switch {
	case req.Acks < -1 || req.Acks > 1:
		refused = errRequiredAcks
	case req.TransactionID == nil && anyTransactional(req):
		refused = errNoTxnID // nobody could confirm that its transaction is open, or would end it
	}
	names := make([]string, len(req.Topics))
	for i, rt := range req.Topics {
		names[i] = rt.Topic
		if req.Version >= 13 {
			names[i] = ""
			if known, ok := img.TopicsByID[tp.UUID(rt.TopicID)]; ok {
				names[i] = known.Name
			}
		}
	}
	txns := a.confirm(req, names)
	var first error
	var writes []commit.Write
	var rows [][2]int // of the answer, by write
	for i := range req.Topics {
		rt := &req.Topics[i]
		t := kmsg.NewProduceResponseTopic()
		t.Topic, t.TopicID = rt.Topic, rt.TopicID
		name, topicErr := names[i], refused
		if name == "" && req.Version >= 13 && topicErr == nil {
			topicErr = errUnknownTopicID
		}
		if topicErr == nil && controller.IsInternal(name) {
			topicErr = fmt.Errorf("%w: %s is written by the cluster alone", errInvalidTopic, name)
		}
		for j := range rt.Partitions {
			rp := &rt.Partitions[j]
			p := kmsg.NewProduceResponseTopicPartition()
			p.Partition = rp.Partition
			err := topicErr
			var write commit.Write
			if err == nil {
				write, err = a.append(req, name, rp, &p, txns, now)
			}
			if err != nil {
				a.failProduce(c, req, name, err, &p, resp)
				if first == nil {
					first = fmt.Errorf("%s-%d: %w", name, rp.Partition, err)
				}
			} else if req.Acks == -1 {
				writes, rows = append(writes, write), append(rows, [2]int{i, j})
			}
			t.Partitions = append(t.Partitions, p)
		}
		resp.Topics = append(resp.Topics, t)
	}
	if charged := a.quotaOf(metadata.ProducerByteRate, c); charged != nil {
		size := int64(0)
		for i := range req.Topics {
			for j := range req.Topics[i].Partitions {
				size += int64(len(req.Topics[i].Partitions[j].Records))
			}
		}
		resp.ThrottleMillis = charged.take(c.peer, size, now)
	}
	if req.Acks == 0 {
		if first == nil {
			return nil, nil
		}
		// A producer that asked for no answer learns of a failure by the connection alone.
		return nil, fmt.Errorf("client id %q: Produce with acks=0 failed: %w", c.header.ClientID, first)
	}
	limit := time.Duration(max(req.TimeoutMillis, 0)) * time.Millisecond
	return a.finish(c, func(ctx context.Context) kmsg.Response {
		for i, err := range commit.Wait(ctx, limit, writes) {
			if err != nil {
				t := &resp.Topics[rows[i][0]]
				a.failProduce(c, req, writes[i].Part.ID().Topic, err, &t.Partitions[rows[i][1]], resp)
			}
		}
		return resp
	}), nil
}

func anyTransactional(req *kmsg.ProduceRequest) bool {
	for i := range req.Topics {
		for j := range req.Topics[i].Partitions {
			if h, err := recordbatch.ParseHeader(req.Topics[i].Partitions[j].Records); err == nil && h.IsTransactional() {
				return true
			}
		}
	}
	return false
}

// append appends the records of one partition.
func (a *API) append(req *kmsg.ProduceRequest, topic string, rp *kmsg.ProduceRequestTopicPartition, p *kmsg.ProduceResponseTopicPartition, txns confirmed, now time.Time) (commit.Write, error) {
	part, err := a.replica(topic, rp.Partition)
	if err != nil {
		return commit.Write{}, err
	}
	if req.Version < 7 { // zstd came with v7 (KIP-110)
		if h, err := recordbatch.ParseHeader(rp.Records); err == nil && h.Codec() == recordbatch.CodecZstd {
			return commit.Write{}, fmt.Errorf("%w: Produce version %d does not allow zstd", recordbatch.ErrUnsupportedCompression, req.Version)
		}
	}
	size := len(rp.Records)
	w := partition.Write{Records: rp.Records, Now: now, AllReplicas: req.Acks == -1}
	if c, ok := txns[part.ID()]; ok {
		if c.err != nil {
			return commit.Write{}, c.err
		}
		w.Confirmed, w.ConfirmedAt = !c.v2, c.at
	}
	r, err := part.Append(w)
	if err != nil {
		return commit.Write{}, err
	}
	a.Metrics.bytesIn.WithLabelValues(topic).Add(float64(size))
	p.BaseOffset, p.LogAppendTime, p.LogStartOffset = r.FirstOffset, r.LogAppendTime, r.LogStart
	return commit.Write{Part: part, Next: r.LastOffset + 1, Epoch: r.Epoch}, nil
}

// failProduce answers for a partition with an error.
func (a *API) failProduce(c *call, req *kmsg.ProduceRequest, topic string, err error, p *kmsg.ProduceResponseTopicPartition, resp *kmsg.ProduceResponse) {
	p.ErrorCode = code(err)
	a.Metrics.errors.WithLabelValues("Produce", errorName(err)).Inc()
	if _, ok := a.Image().Topics[topic]; ok {
		a.Metrics.failed.WithLabelValues(topic).Inc()
	}
	if p.ErrorCode == kerr.NotLeaderForPartition.Code && req.Version >= 10 {
		a.hintProduce(c, topic, p, resp)
	}
	p.BaseOffset, p.LogAppendTime, p.LogStartOffset = -1, -1, -1
	// Older clients have no branch for INVALID_RECORD (KIP-467).
	if p.ErrorCode == kerr.InvalidRecord.Code && req.Version < 8 {
		p.ErrorCode = kerr.CorruptMessage.Code
	}
	if req.Version < 8 {
		return
	}
	p.ErrorMessage = message(err)
	var records *recordbatch.RecordsError
	if errors.As(err, &records) {
		for _, r := range records.Records {
			e := kmsg.NewProduceResponseTopicPartitionErrorRecord()
			e.RelativeOffset = int32(r.Index)
			text := r.Message
			e.ErrorMessage = &text
			p.ErrorRecords = append(p.ErrorRecords, e)
		}
	}
	var out *log.OffsetOutOfRangeError
	if errors.As(err, &out) {
		p.LogStartOffset = out.LogStart
	}
}

// hintProduce names the leader beside NOT_LEADER_OR_FOLLOWER (KIP-951).
func (a *API) hintProduce(c *call, topic string, p *kmsg.ProduceResponseTopicPartition, resp *kmsg.ProduceResponse) {
	img := a.Image()
	_, state, ok := img.Partition(tp.Partition{Topic: topic, Index: p.Partition})
	if !ok {
		return
	}
	p.CurrentLeader.LeaderID, p.CurrentLeader.LeaderEpoch = state.Leader, state.LeaderEpoch
	b, ok := img.Brokers[state.Leader]
	if !ok || slices.ContainsFunc(resp.Brokers, func(n kmsg.ProduceResponseBroker) bool { return n.NodeID == b.ID }) {
		return
	}
	if e, ok := endpoint(b, c.peer.Listener); ok {
		n := kmsg.NewProduceResponseBroker()
		n.NodeID, n.Host, n.Port, n.Rack = b.ID, e.Host, e.Port, optional(b.Rack)
		resp.Brokers = append(resp.Brokers, n)
	}
}
