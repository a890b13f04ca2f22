package kafkaapi

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/fetch"
	"github.com/varve-io/varve/internal/partition"
)

// Timestamps that mean something else, and the version from which each is served (KIP-79, KIP-734, KIP-405, KIP-1005, KIP-1023).
const (
	latest                int64 = -1
	earliest              int64 = -2
	maxTimestamp          int64 = -3
	earliestLocal         int64 = -4
	latestTiered          int64 = -5
	earliestPendingUpload int64 = -6
)

var specialSince = map[int64]int16{latest: 1, earliest: 1, maxTimestamp: 7, earliestLocal: 8, latestTiered: 9, earliestPendingUpload: 11}

// listed is the answer for one partition.
type listed struct {
	offset, timestamp int64
	epoch             int32
}

var notListed = listed{-1, -1, -1}

// listOffsets serves ListOffsets. Look-ups by time may have to ask the bucket and are bounded in time; all partitions
// of a request are looked up side by side.
func (a *API) listOffsets(ctx context.Context, _ *call, req *kmsg.ListOffsetsRequest) *kmsg.ListOffsetsResponse {
	resp := respond[*kmsg.ListOffsetsResponse](req)
	wait := a.Config().Millis("remote.list.offsets.request.timeout.ms")
	if req.Version >= 10 && req.TimeoutMillis > 0 {
		wait = time.Duration(req.TimeoutMillis) * time.Millisecond
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	type key struct {
		topic string
		index int32
	}
	count := map[key]int{}
	for i := range req.Topics {
		for _, rp := range req.Topics[i].Partitions {
			count[key{req.Topics[i].Topic, rp.Partition}]++
		}
	}
	var pending []func()
	for i := range req.Topics {
		rt := &req.Topics[i]
		t := kmsg.NewListOffsetsResponseTopic()
		t.Topic = rt.Topic
		t.Partitions = make([]kmsg.ListOffsetsResponseTopicPartition, len(rt.Partitions))
		for j := range rt.Partitions {
			rp, p := rt.Partitions[j], &t.Partitions[j]
			done := make(chan struct{})
			go func() {
				defer close(done)
				found, err := notListed, error(errInvalidRequest)
				if count[key{rt.Topic, rp.Partition}] == 1 {
					found, err = a.listOffset(ctx, req, rt.Topic, &rp)
				}
				*p = kmsg.NewListOffsetsResponseTopicPartition()
				if err != nil {
					found = notListed
				}
				p.Partition, p.ErrorCode, p.Offset, p.Timestamp, p.LeaderEpoch = rp.Partition, code(err), found.offset, found.timestamp, found.epoch
			}()
			pending = append(pending, func() { <-done })
		}
		resp.Topics = append(resp.Topics, t)
	}
	for _, wait := range pending {
		wait()
	}
	return resp
}

func (a *API) listOffset(ctx context.Context, req *kmsg.ListOffsetsRequest, topic string, rp *kmsg.ListOffsetsRequestTopicPartition) (listed, error) {
	if rp.Timestamp < 0 {
		if since, ok := specialSince[rp.Timestamp]; !ok || req.Version < since {
			return notListed, errUnsupported
		}
	}
	epoch := int32(-1)
	if req.Version >= 4 {
		epoch = rp.CurrentLeaderEpoch
	}
	p, err := a.replica(topic, rp.Partition)
	if err != nil {
		return notListed, err
	}
	marks, err := p.Offsets(epoch)
	if err != nil {
		return notListed, err
	}
	fetchable := marks.HighWatermark
	if req.ReplicaID != -1 {
		fetchable = marks.End
	} else if req.IsolationLevel == 1 {
		fetchable = marks.LastStable
	}
	// A new leader's high watermark may be below what a consumer was told before (KIP-207).
	if req.ReplicaID == -1 && marks.HighWatermark < marks.EpochStart && (rp.Timestamp == latest || rp.Timestamp >= 0 || rp.Timestamp == maxTimestamp) {
		if req.Version < 5 {
			return notListed, leaderTrouble{errBehind}
		}
		return notListed, fmt.Errorf("%w: %w", fetch.ErrNotAvailable, errBehind)
	}
	l := p.Log()
	at := func(offset int64) (listed, error) {
		e, ok := l.EpochForOffset(offset)
		if !ok {
			e = -1
		}
		return listed{offset, -1, e}, nil
	}
	switch rp.Timestamp {
	case latest:
		return listed{fetchable, -1, marks.LeaderEpoch}, nil
	case earliest:
		return at(marks.LogStart)
	case earliestLocal:
		return at(marks.LocalLogStart)
	case latestTiered:
		if !l.Config().Tiered || marks.RemoteEnd < 0 {
			return notListed, nil
		}
		return at(marks.RemoteEnd)
	case earliestPendingUpload:
		if !l.Config().Tiered {
			return notListed, nil
		}
		return at(marks.PendingUpload())
	}
	found, err := a.listByTime(ctx, p, marks, rp.Timestamp)
	if err == nil && found.offset >= fetchable {
		return notListed, nil
	}
	return found, err
}

// listByTime searches both tiers, the bucket first since it holds what is older.
func (a *API) listByTime(ctx context.Context, p *partition.Partition, marks partition.Offsets, timestamp int64) (listed, error) {
	l := p.Log()
	remote := p.Remote()
	tiered := a.TierLookup != nil && remote.End() >= marks.LogStart && marks.LogStart < marks.LocalLogStart
	if timestamp == maxTimestamp {
		best := notListed
		if f, ok, err := l.MaxTimestamp(); err != nil {
			return notListed, err
		} else if ok {
			best = listed{f.Offset, f.Timestamp, f.Epoch}
		}
		if tiered {
			f, ok, err := a.TierLookup.MaxTimestamp(ctx, remote, marks.LogStart)
			if err != nil {
				return notListed, tierLookupError(err)
			}
			if ok && f.Timestamp >= best.timestamp {
				best = listed{f.Offset, f.Timestamp, f.Epoch}
			}
		}
		return best, nil
	}
	if tiered {
		f, ok, err := a.TierLookup.OffsetForTimestamp(ctx, remote, timestamp, marks.LogStart)
		if err != nil {
			return notListed, tierLookupError(err)
		}
		if ok {
			return listed{f.Offset, f.Timestamp, f.Epoch}, nil
		}
	}
	f, ok, err := l.OffsetForTimestamp(timestamp)
	if err != nil || !ok {
		return notListed, err
	}
	return listed{f.Offset, f.Timestamp, f.Epoch}, nil
}

var errBehind = errors.New("the high watermark of the new leader has not caught up yet")

// tierLookupError makes every trouble with the bucket a retriable error: the client asks again, it never resets.
func tierLookupError(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return errTimedOut
	}
	return leaderTrouble{err}
}

// leaderTrouble is LEADER_NOT_AVAILABLE on the wire, which every client retries in ListOffsets.
type leaderTrouble struct{ error }

func (e leaderTrouble) Unwrap() error { return e.error }
func (e leaderTrouble) Code() int16   { return kerr.LeaderNotAvailable.Code }
