package replication

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/follower"
	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/peer"
	"github.com/varve-io/varve/internal/tier"
)

// asker asks one leader for offsets, over a connection of its own.
type asker struct {
	dial func(context.Context) (net.Conn, error)

	turn   chan struct{} // of one place: who holds it has what follows. A mutex would be held while waiting for the leader
	conn   *peer.Kafka
	closed bool
}

func (a *asker) close() {
	a.turn <- struct{}{}
	defer func() { <-a.turn }()
	a.closed = true
	if a.conn != nil {
		a.conn.Close()
		a.conn = nil
	}
}

// Questions of ListOffsets (KIP-79, KIP-405, KIP-1023).
const (
	latest                int64 = -1
	earliest              int64 = -2
	earliestLocal         int64 = -4
	earliestPendingUpload int64 = -6

	listOffsetsVersion = 11
)

// offsets asks for a partition's offsets. pending asks for the earliest that is not tiered as well: it stays -1 where the
// leader does not know it, or not the question.
func (a *asker) offsets(ctx context.Context, m *member, self int32, step follower.Step, limit time.Duration) (o follower.Offsets, err error) {
	select {
	case a.turn <- struct{}{}:
		defer func() { <-a.turn }()
	case <-ctx.Done():
		return o, ctx.Err()
	}
	if a.closed {
		return o, errClosed
	}
	if a.conn == nil {
		nc, err := a.dial(ctx)
		if err != nil {
			return o, err
		}
		a.conn = peer.NewKafka(nc)
	}
	o.Pending = -1
	// The end last: what is below a start that was told before is then never above it.
	asks := []struct {
		timestamp int64
		to        *int64
	}{{earliest, &o.Start}, {earliestLocal, &o.LocalStart}, {earliestPendingUpload, &o.Pending}, {latest, &o.End}}
	for _, q := range asks {
		if q.timestamp == earliestPendingUpload && !step.Pending {
			continue
		}
		req := kmsg.NewPtrListOffsetsRequest()
		req.Version, req.ReplicaID = listOffsetsVersion, self
		t := kmsg.NewListOffsetsRequestTopic()
		t.Topic = m.id.Topic
		p := kmsg.NewListOffsetsRequestTopicPartition()
		p.Partition, p.CurrentLeaderEpoch, p.Timestamp = m.id.Index, step.LeaderEpoch, q.timestamp
		t.Partitions = append(t.Partitions, p)
		req.Topics = append(req.Topics, t)
		resp := req.ResponseKind().(*kmsg.ListOffsetsResponse)
		if err := a.conn.RoundTrip(ctx, req, resp, limit); err != nil {
			a.conn.Close()
			a.conn = nil
			return o, err
		}
		if len(resp.Topics) != 1 || len(resp.Topics[0].Partitions) != 1 {
			return o, errors.New("the leader answered for other partitions")
		}
		got := &resp.Topics[0].Partitions[0]
		err := kerr.ErrorForCode(got.ErrorCode)
		if q.timestamp == earliestPendingUpload && errors.Is(err, kerr.UnsupportedVersion) {
			continue
		}
		if err != nil {
			return o, fmt.Errorf("ListOffsets %d: %w", q.timestamp, err)
		}
		*q.to = got.Offset
	}
	return o, nil
}

// aside carries out a step that is no fetch.
func (s *Service) aside(ctx context.Context, l *lane, m *member, step follower.Step) {
	s.wg.Add(1) // of a lane's goroutine, which counts, so Wait cannot have returned
	go func() {
		defer s.wg.Done()
		var e follower.Effect
		if step.Kind == follower.Ask {
			o, err := l.src.asks.offsets(ctx, m, s.o.Self, step, s.o.Config().Timeout)
			m.mu.Lock()
			e = m.machine.Listed(step, o, err, time.Now())
		} else {
			e = s.load(ctx, m, step)
		}
		s.effect(m, e)
		if ctx.Err() == nil {
			s.trouble(m, time.Now())
		}
		if e.Checkpoint {
			s.o.Checkpoint() // before the lock is free for a fetch
		}
		m.mu.Unlock()
		l.poke()
	}()
}

// Auxiliary reads what a replica needs that continues behind a remote segment: its lineage, and the snapshot of its
// producers (KIP-405, auxiliary state).
func Auxiliary(ctx context.Context, from State, s *tier.Segment) (epochs []leaderepoch.Entry, snapshot []byte, err error) {
	if epochs, err = from.LeaderEpochs(ctx, s); err != nil {
		return nil, nil, fmt.Errorf("leader epochs of segment %s: %w", s.ID, err)
	}
	if snapshot, err = from.ProducerSnapshot(ctx, s); err != nil {
		return nil, nil, fmt.Errorf("producers of segment %s: %w", s.ID, err)
	}
	return epochs, snapshot, nil
}

// load reads lineage and producers; it returns with m locked.
func (s *Service) load(ctx context.Context, m *member, step follower.Step) follower.Effect {
	s.o.Observe(Event{Partition: m.id, Building: true})
	err := s.loads.Acquire(ctx, 1)
	if err != nil {
		m.mu.Lock()
		return m.machine.Loaded(step, nil, nil, err, time.Now())
	}
	defer s.loads.Release(1)
	ctx, cancel := context.WithTimeout(ctx, s.o.Config().Timeout)
	defer cancel()
	epochs, snapshot, err := Auxiliary(ctx, s.o.State, step.Segment)
	if err != nil {
		s.o.Observe(Event{Partition: m.id, Building: true, Err: err})
	}
	m.mu.Lock()
	return m.machine.Loaded(step, epochs, snapshot, err, time.Now())
}
