package kafkaapi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"regexp"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/committed"
	"github.com/varve-io/varve/internal/consumergroup"
	"github.com/varve-io/varve/internal/coordinator"
	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/txn"
)

// Enlist asks the coordinator of a transactional id, whichever broker that is, whether partitions are in the producer's transaction, or
// with add puts them there; the errors are by partition (KIP-890).
type Enlist func(ctx context.Context, id string, producerID int64, epoch int16, partitions []tp.Partition, add bool) ([]error, error)

// before KIP-588 clients knew no PRODUCER_FENCED.
func fencedCode(err error, version, since int16) int16 {
	c := code(err)
	if c == kerr.ProducerFenced.Code && version < since {
		return kerr.InvalidProducerEpoch.Code
	}
	return c
}

// initProducerID serves InitProducerId, with a transactional id or without (KIP-98, KIP-360).
func (a *API) initProducerID(ctx context.Context, _ *call, req *kmsg.InitProducerIDRequest) *kmsg.InitProducerIDResponse {
	resp := respond[*kmsg.InitProducerIDResponse](req)
	resp.ProducerID, resp.ProducerEpoch = -1, -1
	ctx, cancel := within(ctx, patience)
	defer cancel()
	if req.TransactionalID == nil {
		id, err := a.ProducerIDs.Next(ctx)
		if err != nil {
			resp.ErrorCode = code(coordinator.ErrUnavailable)
			return resp
		}
		resp.ProducerID, resp.ProducerEpoch = id, 0
		return resp
	}
	expectedID, expectedEpoch := int64(txn.NoProducerID), int16(txn.NoEpoch)
	if req.Version >= 3 {
		expectedID, expectedEpoch = req.ProducerID, req.ProducerEpoch
	}
	if *req.TransactionalID == "" || (expectedID < 0) != (expectedEpoch < 0) {
		resp.ErrorCode = code(errInvalidRequest)
		return resp
	}
	id, epoch, err := a.Transactions.Init(ctx, *req.TransactionalID, req.TransactionTimeoutMillis, expectedID, expectedEpoch)
	resp.ProducerID, resp.ProducerEpoch, resp.ErrorCode = id, epoch, fencedCode(err, req.Version, 4)
	return resp
}

// addPartitionsToTxn serves AddPartitionsToTxn: of a producer, or from version 4 of brokers for many (KIP-890).
func (a *API) addPartitionsToTxn(ctx context.Context, _ *call, req *kmsg.AddPartitionsToTxnRequest) *kmsg.AddPartitionsToTxnResponse {
	resp := respond[*kmsg.AddPartitionsToTxnResponse](req)
	until := time.Now().Add(imageLag)
	if req.Version < 4 {
		var ids []tp.Partition
		for _, t := range req.Topics {
			for _, p := range t.Partitions {
				ids = append(ids, tp.Partition{Topic: t.Topic, Index: p})
			}
		}
		errs := a.addPartitions(ctx, until, req.TransactionalID, req.ProducerID, req.ProducerEpoch, ids, false, false)
		next := 0
		for _, t := range req.Topics {
			rt := kmsg.NewAddPartitionsToTxnResponseTopic()
			rt.Topic = t.Topic
			for _, p := range t.Partitions {
				rp := kmsg.NewAddPartitionsToTxnResponseTopicPartition()
				rp.Partition, rp.ErrorCode = p, fencedCode(errs[next], req.Version, 2)
				rt.Partitions = append(rt.Partitions, rp)
				next++
			}
			resp.Topics = append(resp.Topics, rt)
		}
		return resp
	}
	for _, t := range req.Transactions {
		out := kmsg.NewAddPartitionsToTxnResponseTransaction()
		out.TransactionalID = t.TransactionalID
		var ids []tp.Partition
		for _, topic := range t.Topics {
			for _, p := range topic.Partitions {
				ids = append(ids, tp.Partition{Topic: topic.Topic, Index: p})
			}
		}
		errs := a.addPartitions(ctx, until, t.TransactionalID, t.ProducerID, t.ProducerEpoch, ids, t.VerifyOnly, true)
		next := 0
		for _, topic := range t.Topics {
			rt := kmsg.NewAddPartitionsToTxnResponseTransactionTopic()
			rt.Topic = topic.Topic
			for _, p := range topic.Partitions {
				rp := kmsg.NewAddPartitionsToTxnResponseTransactionTopicPartition()
				rp.Partition, rp.ErrorCode = p, code(errs[next])
				rt.Partitions = append(rt.Partitions, rp)
				next++
			}
			out.Topics = append(out.Topics, rt)
		}
		resp.Transactions = append(resp.Transactions, out)
	}
	return resp
}

// errNotAttempted: another partition of the same request was refused (OPERATION_NOT_ATTEMPTED 55).
var errNotAttempted = errors.New("nothing was done, since another partition of the request is refused")

func (a *API) addPartitions(ctx context.Context, until time.Time, id string, producerID int64, epoch int16, ids []tp.Partition, verifyOnly, v2 bool) []error {
	errs := make([]error, len(ids))
	fill := func(err error) []error {
		for i := range errs {
			if errs[i] == nil {
				errs[i] = err
			}
		}
		return errs
	}
	if id == "" {
		return fill(errInvalidRequest)
	}
	img, unknown := a.imageWith(ctx, until, func(*metadata.Image) iter.Seq[tp.Partition] { return slices.Values(ids) }), false
	for i, p := range ids {
		if _, _, ok := img.Partition(p); !ok {
			errs[i], unknown = errUnknownTopic, true
		}
	}
	switch {
	case unknown:
		return fill(errNotAttempted)
	case verifyOnly:
		verified, err := a.Transactions.Verify(id, producerID, epoch, ids)
		if err != nil {
			return fill(err)
		}
		return verified
	}
	return fill(a.Transactions.Add(id, producerID, epoch, ids, v2))
}

// addOffsetsToTxn serves AddOffsetsToTxn: the partition that holds a group's offsets joins the transaction.
func (a *API) addOffsetsToTxn(ctx context.Context, _ *call, req *kmsg.AddOffsetsToTxnRequest) *kmsg.AddOffsetsToTxnResponse {
	resp := respond[*kmsg.AddOffsetsToTxnResponse](req)
	offsets, err := a.offsetsPartition(ctx, req.Group)
	if err == nil && req.TransactionalID == "" {
		err = errInvalidRequest
	}
	if err == nil {
		err = a.Transactions.Add(req.TransactionalID, req.ProducerID, req.ProducerEpoch, []tp.Partition{offsets}, false)
	}
	resp.ErrorCode = fencedCode(err, req.Version, 2)
	return resp
}

// offsetsPartition is where a group's offsets are kept.
func (a *API) offsetsPartition(ctx context.Context, groupID string) (tp.Partition, error) {
	if groupID == "" {
		return tp.Partition{}, group.ErrInvalidGroupID
	}
	id, _, err := a.placeOf(ctx, coordinator.Topic, groupID)
	return id, err
}

// endTxn serves EndTxn; the markers are written after the answer.
func (a *API) endTxn(ctx context.Context, _ *call, req *kmsg.EndTxnRequest) *kmsg.EndTxnResponse {
	resp := respond[*kmsg.EndTxnResponse](req)
	resp.ProducerID, resp.ProducerEpoch = -1, -1
	if req.TransactionalID == "" {
		resp.ErrorCode = code(errInvalidRequest)
		return resp
	}
	ctx, cancel := within(ctx, patience)
	defer cancel()
	id, epoch, err := a.Transactions.End(ctx, req.TransactionalID, req.ProducerID, req.ProducerEpoch, req.Commit, req.Version >= 5)
	resp.ErrorCode = fencedCode(err, req.Version, 2)
	if err == nil {
		resp.ProducerID, resp.ProducerEpoch = id, epoch
	}
	return resp
}

// txnOffsetCommit serves TxnOffsetCommit (KIP-447). From version 5 on it puts the offsets' partition into the transaction, which older
// clients do by AddOffsetsToTxn (KIP-890).
func (a *API) txnOffsetCommit(ctx context.Context, c *call, req *kmsg.TxnOffsetCommitRequest) *kmsg.TxnOffsetCommitResponse {
	resp := respond[*kmsg.TxnOffsetCommitResponse](req)
	var named []tp.Partition
	for _, rt := range req.Topics {
		for _, rp := range rt.Partitions {
			named = append(named, tp.Partition{Topic: rt.Topic, Index: rp.Partition})
		}
	}
	img := a.imageWith(ctx, time.Now().Add(imageLag), func(*metadata.Image) iter.Seq[tp.Partition] { return slices.Values(named) })
	now := c.received.UnixMilli()
	var commits []coordinator.Commit
	type place struct{ topic, partition int }
	var at []place
	for i, rt := range req.Topics {
		t := kmsg.NewTxnOffsetCommitResponseTopic()
		t.Topic = rt.Topic
		for _, rp := range rt.Partitions {
			p := kmsg.NewTxnOffsetCommitResponseTopicPartition()
			p.Partition = rp.Partition
			if _, _, ok := img.Partition(tp.Partition{Topic: rt.Topic, Index: rp.Partition}); !ok {
				p.ErrorCode = kerr.UnknownTopicOrPartition.Code
			} else {
				commits = append(commits, coordinator.Commit{Partition: committed.Partition{Topic: rt.Topic, Partition: rp.Partition},
					Offset: committed.Offset{Offset: rp.Offset, LeaderEpoch: rp.LeaderEpoch, Metadata: text(rp.Metadata), CommittedAt: now, ExpiresAt: -1}})
				at = append(at, place{i, len(t.Partitions)})
			}
			t.Partitions = append(t.Partitions, p)
		}
		resp.Topics = append(resp.Topics, t)
	}
	errs, err := a.commitInTxn(ctx, req, commits)
	for j, pl := range at {
		p := &resp.Topics[pl.topic].Partitions[pl.partition]
		if p.ErrorCode = code(err); err == nil {
			p.ErrorCode = code(errs[j])
		}
	}
	return resp
}

func (a *API) commitInTxn(ctx context.Context, req *kmsg.TxnOffsetCommitRequest, commits []coordinator.Commit) ([]error, error) {
	if req.TransactionalID == "" {
		return nil, errInvalidRequest
	}
	offsets, err := a.offsetsPartition(ctx, req.Group)
	if err != nil || len(commits) == 0 {
		return nil, err
	}
	part, err := a.replica(offsets.Topic, offsets.Index)
	if err != nil {
		return nil, coordinator.ErrNotCoordinator
	}
	at, inTxn := part.TxnState(req.ProducerID, req.ProducerEpoch)
	if !inTxn {
		ctx, cancel := within(ctx, patience)
		defer cancel()
		errs, err := a.Enlist(ctx, req.TransactionalID, req.ProducerID, req.ProducerEpoch, []tp.Partition{offsets}, req.Version >= 5)
		if err == nil {
			err = errs[0]
		}
		if errors.Is(err, coordinator.ErrNotCoordinator) {
			err = coordinator.ErrUnavailable // not this one, but the transaction's
		}
		if err != nil {
			return nil, err
		}
	}
	by := group.Committer{MemberID: req.MemberID, InstanceID: text(req.InstanceID), Generation: req.Generation}
	if req.Version < 3 {
		by.Generation = -1
	}
	errs, err := a.Groups.CommitInTxn(req.Group, by, coordinator.InTxn{ProducerID: req.ProducerID, Epoch: req.ProducerEpoch, Checked: req.Version >= 5, ConfirmedAt: at}, commits)
	if errors.Is(err, consumergroup.ErrStaleMemberEpoch) {
		err = group.ErrIllegalGeneration // the other code is known from version 6 on
	}
	return errs, err
}

// writeTxnMarkers serves WriteTxnMarkers, of transaction coordinators and of tools that end hanging transactions (KIP-664).
func (a *API) writeTxnMarkers(ctx context.Context, _ *call, req *kmsg.WriteTxnMarkersRequest) *kmsg.WriteTxnMarkersResponse {
	resp := respond[*kmsg.WriteTxnMarkersResponse](req)
	ctx, cancel := within(ctx, patience)
	defer cancel()
	for _, m := range req.Markers {
		out := kmsg.NewWriteTxnMarkersResponseMarker()
		out.ProducerID = m.ProducerID
		var parts []*partition.Partition
		type place struct{ topic, partition int }
		var at []place
		for i, t := range m.Topics {
			rt := kmsg.NewWriteTxnMarkersResponseMarkerTopic()
			rt.Topic = t.Topic
			for j, index := range t.Partitions {
				rp := kmsg.NewWriteTxnMarkersResponseMarkerTopicPartition()
				rp.Partition = index
				if p, err := a.replica(t.Topic, index); err == nil {
					parts, at = append(parts, p), append(at, place{i, j})
				} else {
					rp.ErrorCode = code(err)
				}
				rt.Partitions = append(rt.Partitions, rp)
			}
			out.Topics = append(out.Topics, rt)
		}
		e := coordinator.Ending{Decision: txn.Decision{Commit: m.Committed, ProducerID: m.ProducerID, Epoch: m.ProducerEpoch, V2: m.TransactionVersion >= 2},
			CoordinatorEpoch: m.CoordinatorEpoch}
		for k, err := range a.Groups.WriteMarkers(ctx, e, parts) {
			out.Topics[at[k].topic].Partitions[at[k].partition].ErrorCode = code(err)
		}
		resp.Markers = append(resp.Markers, out)
	}
	return resp
}

// describeTransactions serves DescribeTransactions (KIP-664).
func (a *API) describeTransactions(_ context.Context, _ *call, req *kmsg.DescribeTransactionsRequest) *kmsg.DescribeTransactionsResponse {
	resp := respond[*kmsg.DescribeTransactionsResponse](req)
	for _, id := range req.TransactionalIDs {
		t := kmsg.NewDescribeTransactionsResponseTransactionState()
		t.TransactionalID, t.ProducerID, t.ProducerEpoch, t.StartTimestamp = id, -1, -1, -1
		err := error(nil)
		if id == "" {
			err = errInvalidRequest
		}
		var d txn.Description
		if err == nil {
			d, err = a.Transactions.Describe(id)
		}
		if t.ErrorCode = code(err); err == nil {
			t.State, t.TimeoutMillis, t.StartTimestamp, t.ProducerID, t.ProducerEpoch = d.State, d.TimeoutMs, d.StartMs, d.ProducerID, d.Epoch
			for _, topic := range tp.ByTopic(d.Partitions) {
				t.Topics = append(t.Topics, kmsg.DescribeTransactionsResponseTransactionStateTopic{Topic: topic.Topic, Partitions: topic.Indexes})
			}
		}
		resp.TransactionStates = append(resp.TransactionStates, t)
	}
	return resp
}

// listTransactions serves ListTransactions with its filters (KIP-664, KIP-994, KIP-1152).
func (a *API) listTransactions(_ context.Context, c *call, req *kmsg.ListTransactionsRequest) *kmsg.ListTransactionsResponse {
	resp := respond[*kmsg.ListTransactionsResponse](req)
	var pattern *regexp.Regexp
	if req.Version >= 2 && text(req.TransactionalIDPattern) != "" {
		var err error
		if pattern, err = regexp.Compile("^(?:" + *req.TransactionalIDPattern + ")$"); err != nil {
			resp.ErrorCode = kerr.InvalidRegularExpression.Code
			return resp
		}
	}
	states := map[string]bool{}
	for _, s := range req.StateFilters {
		if slices.Contains(txn.StateNames(), s) {
			states[s] = true
		} else {
			resp.UnknownStateFilters = append(resp.UnknownStateFilters, s)
		}
	}
	list, err := a.Transactions.List()
	resp.ErrorCode = code(err)
	for _, d := range list {
		running := c.received.UnixMilli() - d.StartMs
		switch {
		case len(req.StateFilters) > 0 && !states[d.State], len(req.ProducerIDFilters) > 0 && !slices.Contains(req.ProducerIDFilters, d.ProducerID):
			continue
		case req.Version >= 1 && req.DurationFilterMillis >= 0 && (d.StartMs < 0 || running <= req.DurationFilterMillis):
			continue
		case pattern != nil && !pattern.MatchString(d.TransactionalID):
			continue
		}
		t := kmsg.NewListTransactionsResponseTransactionState()
		t.TransactionalID, t.ProducerID, t.TransactionState = d.TransactionalID, d.ProducerID, d.State
		resp.TransactionStates = append(resp.TransactionStates, t)
	}
	return resp
}

// confirmed is what is known of the transactions of batches, by partition: why one must not be appended, or where the log ended when its
// transaction was open, or before the coordinator was asked. In version 2 a marker raises the epoch, which keeps late batches out without that.
type confirmed map[tp.Partition]confirmation

type confirmation struct {
	err error
	at  int64
	v2  bool
}

// confirm has the coordinator confirm the transaction of batches that are the first of it on their partitions, or put the partitions into
// it (KIP-890). The connection's reader waits for that: what it has read later must not overtake these batches.
func (a *API) confirm(req *kmsg.ProduceRequest, names []string) confirmed {
	add := req.Version >= 12 // as its client does not do that itself
	if text(req.TransactionID) == "" || !add && !a.Static.Bool("transaction.partition.verification.enable") {
		return nil
	}
	var producerID int64
	var epoch int16
	var partitions []tp.Partition
	out := confirmed{}
	for i := range req.Topics {
		for j := range req.Topics[i].Partitions {
			rp := &req.Topics[i].Partitions[j]
			h, err := recordbatch.ParseHeader(rp.Records)
			if err != nil || !h.IsTransactional() {
				continue
			}
			p, err := a.replica(names[i], rp.Partition)
			if err != nil {
				continue
			}
			end, open := p.TxnState(h.ProducerID, h.ProducerEpoch)
			out[p.ID()] = confirmation{at: end, v2: add}
			if !open {
				if len(partitions) > 0 && (producerID != h.ProducerID || epoch != h.ProducerEpoch) {
					out[p.ID()] = confirmation{err: txn.ErrInvalidMapping} // a transactional id has one producer
					continue
				}
				producerID, epoch = h.ProducerID, h.ProducerEpoch
				partitions = append(partitions, p.ID())
			}
		}
	}
	if len(partitions) == 0 {
		return out
	}
	ctx, cancel := context.WithTimeout(context.Background(), confirmPatience)
	defer cancel()
	errs, err := a.Enlist(ctx, *req.TransactionID, producerID, epoch, partitions, add)
	for i, id := range partitions {
		why := err
		if why == nil {
			why = errs[i]
		}
		c := out[id]
		c.err = cmp.Or(c.err, refusal(why, req.Version))
		out[id] = c
	}
	return out
}

// confirmPatience bounds how long a Produce waits for a transaction's coordinator.
const confirmPatience = 5 * time.Second

// refusal is what a producer is told if its transaction was not confirmed.
func refusal(err error, version int16) error {
	for _, passing := range []error{coordinator.ErrNotCoordinator, coordinator.ErrLoading, coordinator.ErrUnavailable, txn.ErrConcurrent, context.DeadlineExceeded} {
		if errors.Is(err, passing) { // what every producer tries again
			return fmt.Errorf("%w: the transaction's coordinator could not confirm it: %v", partition.ErrNotEnoughReplicas, err)
		}
	}
	switch {
	case errors.Is(err, txn.ErrProducerFenced):
		return fmt.Errorf("%w: %w", producerstate.ErrInvalidProducerEpoch, err)
	case errors.Is(err, txn.ErrAbortable) && version < 11: // which know no TRANSACTION_ABORTABLE
		return fmt.Errorf("%w: %w", producerstate.ErrInvalidTxnState, err)
	}
	return err
}
