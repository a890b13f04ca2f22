// Package transact carries what belongs to transactions between brokers: a coordinator's markers to the leaders of partitions, and a
// partition's question about a transaction to its coordinator (KIP-98, KIP-890). What this broker leads or coordinates itself is called
// directly. All methods may be called from any goroutine.
package transact

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/coordinator"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/peer"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/txn"
)

// Replicas finds this broker's partitions.
type Replicas interface {
	Get(id tp.Partition) (*partition.Partition, bool)
}

// Options are what a Service works with. All are required.
type Options struct {
	Self         int32
	Image        func() *metadata.Image
	Dial         func(ctx context.Context, broker int32) (net.Conn, error) // speaks Kafka
	Replicas     Replicas
	Groups       *coordinator.Groups
	Transactions func() *coordinator.Transactions // which needs this service, too
	Log          *slog.Logger
}

// Service asks other brokers on behalf of transactions, over one connection to each.
type Service struct {
	o Options

	mu    sync.Mutex
	conns map[int32]*ask
}

// New returns a service without connections.
func New(o Options) *Service { return &Service{o: o, conns: map[int32]*ask{}} }

type ask struct {
	turn chan struct{} // of one place: who holds it has the connection
	conn *peer.Kafka
}

// askPatience bounds a request to another broker.
const askPatience = 10 * time.Second

// ask sends a request to another broker.
func (s *Service) ask(ctx context.Context, id int32, req kmsg.Request, resp kmsg.Response) error {
	s.mu.Lock()
	a := s.conns[id]
	if a == nil {
		a = &ask{turn: make(chan struct{}, 1)}
		s.conns[id] = a
	}
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	select {
	case a.turn <- struct{}{}:
		defer func() { <-a.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	fresh := a.conn == nil
	for {
		if a.conn == nil {
			nc, err := s.o.Dial(ctx, id)
			if err != nil {
				return err
			}
			a.conn = peer.NewKafka(nc)
		}
		err := a.conn.RoundTrip(ctx, req, resp, askPatience)
		if err == nil {
			return nil
		}
		a.conn.Close()
		a.conn = nil
		if fresh || ctx.Err() != nil {
			return err
		}
		fresh = true // an idle connection may have ended with the other's process; these requests may come twice
	}
}

// Close ends the connections. Who asks meanwhile ends with its context.
func (s *Service) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.conns {
		select {
		case c.turn <- struct{}{}:
			if c.conn != nil {
				c.conn.Close()
				c.conn = nil
			}
			<-c.turn
		default:
		}
	}
}

// Markers is coordinator.Markers.
func (s *Service) Markers(ctx context.Context, e coordinator.Ending, partitions []tp.Partition) (left []tp.Partition) {
	img := s.o.Image()
	byLeader := map[int32][]tp.Partition{}
	for _, id := range partitions {
		_, state, ok := img.Partition(id)
		switch {
		case !ok: // the topic was deleted, and its open transactions with it
		case state.Leader < 0:
			left = append(left, id)
		default:
			byLeader[state.Leader] = append(byLeader[state.Leader], id)
		}
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for leader, ids := range byLeader {
		wg.Go(func() {
			var rest []tp.Partition
			if leader == s.o.Self {
				rest = s.markHere(ctx, e, ids)
			} else {
				rest = s.markThere(ctx, leader, e, ids)
			}
			mu.Lock()
			defer mu.Unlock()
			left = append(left, rest...)
		})
	}
	wg.Wait()
	return left
}

// markHere writes markers to partitions that are led here.
func (s *Service) markHere(ctx context.Context, e coordinator.Ending, ids []tp.Partition) (left []tp.Partition) {
	var parts []*partition.Partition
	for _, id := range ids {
		if p, ok := s.o.Replicas.Get(id); ok {
			parts = append(parts, p)
		} else {
			left = append(left, id)
		}
	}
	for i, err := range s.o.Groups.WriteMarkers(ctx, e, parts) {
		if !s.marked(parts[i].ID(), e, err) {
			left = append(left, parts[i].ID())
		}
	}
	return left
}

// markThere has another broker write markers.
func (s *Service) markThere(ctx context.Context, leader int32, e coordinator.Ending, ids []tp.Partition) (left []tp.Partition) {
	req := kmsg.NewPtrWriteTxnMarkersRequest()
	req.Version = 2
	m := kmsg.NewWriteTxnMarkersRequestMarker()
	m.ProducerID, m.ProducerEpoch, m.Committed, m.CoordinatorEpoch = e.ProducerID, e.Epoch, e.Commit, e.CoordinatorEpoch
	if e.V2 {
		m.TransactionVersion = 2
	}
	for _, t := range tp.ByTopic(ids) {
		m.Topics = append(m.Topics, kmsg.WriteTxnMarkersRequestMarkerTopic{Topic: t.Topic, Partitions: t.Indexes})
	}
	req.Markers = append(req.Markers, m)
	resp := req.ResponseKind().(*kmsg.WriteTxnMarkersResponse)
	if err := s.ask(ctx, leader, req, resp); err != nil {
		if ctx.Err() == nil {
			s.o.Log.Debug("markers were not written, they will be tried again", "broker", leader, "cause", err)
		}
		return ids
	}
	done := map[tp.Partition]bool{}
	for _, m := range resp.Markers {
		for _, t := range m.Topics {
			for _, p := range t.Partitions {
				id := tp.Partition{Topic: t.Topic, Index: p.Partition}
				done[id] = s.marked(id, e, kerr.ErrorForCode(p.ErrorCode))
			}
		}
	}
	return slices.DeleteFunc(slices.Clone(ids), func(id tp.Partition) bool { return done[id] })
}

// marked says whether a partition needs no marker any more.
func (s *Service) marked(id tp.Partition, e coordinator.Ending, err error) bool {
	if err == nil {
		return true
	}
	if producerstate.Outdated(err) || errors.Is(err, kerr.InvalidProducerEpoch) || errors.Is(err, kerr.TransactionCoordinatorFenced) {
		s.o.Log.Warn("a marker was refused as outdated", "partition", id.String(), "producer id", e.ProducerID, "epoch", e.Epoch, "cause", err)
		return true
	}
	return false
}

// coordinates names the broker that coordinates an id on one of the cluster's own topics.
func coordinates(img *metadata.Image, topic, id string) (int32, error) {
	t, ok := img.Topics[topic]
	if !ok {
		return -1, coordinator.ErrUnavailable
	}
	leader := t.Partitions[coordinator.PartitionFor(id, len(t.Partitions))].Leader
	if leader < 0 {
		return -1, coordinator.ErrUnavailable
	}
	return leader, nil
}

// Enlist asks the coordinator of a transactional id whether partitions are in its transaction, or puts them there; the errors are by
// partition (KIP-890). Before partitions are put into a transaction, one that is just being completed is waited for, a moment.
func (s *Service) Enlist(ctx context.Context, id string, producerID int64, epoch int16, partitions []tp.Partition, add bool) ([]error, error) {
	deadline := time.Now().Add(enlistPatience)
	for {
		errs, err := s.enlistOnce(ctx, id, producerID, epoch, partitions, add)
		busy := errors.Is(err, txn.ErrConcurrent) || slices.ContainsFunc(errs, func(err error) bool { return errors.Is(err, txn.ErrConcurrent) })
		if !busy || !add || time.Now().After(deadline) {
			return errs, err
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-ctx.Done():
			return errs, err
		}
	}
}

// enlistPatience is how long the end of the transaction before is waited for.
const enlistPatience = 500 * time.Millisecond

func (s *Service) enlistOnce(ctx context.Context, id string, producerID int64, epoch int16, partitions []tp.Partition, add bool) ([]error, error) {
	leader, err := coordinates(s.o.Image(), coordinator.TransactionTopic, id)
	if err != nil {
		return nil, err
	}
	if leader == s.o.Self {
		if !add {
			return s.o.Transactions().Verify(id, producerID, epoch, partitions)
		}
		err := s.o.Transactions().Add(id, producerID, epoch, partitions, true)
		return make([]error, len(partitions)), err
	}
	req := kmsg.NewPtrAddPartitionsToTxnRequest()
	req.Version = 5
	t := kmsg.NewAddPartitionsToTxnRequestTransaction()
	t.TransactionalID, t.ProducerID, t.ProducerEpoch, t.VerifyOnly = id, producerID, epoch, !add
	for _, topic := range tp.ByTopic(partitions) {
		t.Topics = append(t.Topics, kmsg.AddPartitionsToTxnRequestTransactionTopic{Topic: topic.Topic, Partitions: topic.Indexes})
	}
	req.Transactions = append(req.Transactions, t)
	resp := req.ResponseKind().(*kmsg.AddPartitionsToTxnResponse)
	if err := s.ask(ctx, leader, req, resp); err != nil {
		return nil, fmt.Errorf("%w: %w", coordinator.ErrUnavailable, err)
	}
	if err := kerr.ErrorForCode(resp.ErrorCode); err != nil {
		return nil, fromCode(err)
	}
	answers := map[tp.Partition]error{}
	for _, t := range resp.Transactions {
		for _, topic := range t.Topics {
			for _, p := range topic.Partitions {
				answers[tp.Partition{Topic: topic.Topic, Index: p.Partition}] = fromCode(kerr.ErrorForCode(p.ErrorCode))
			}
		}
	}
	errs := make([]error, len(partitions))
	for i, p := range partitions {
		err, ok := answers[p]
		if !ok {
			err = fmt.Errorf("%w: the coordinator did not answer for %s", coordinator.ErrUnavailable, p)
		}
		errs[i] = err
	}
	return errs, nil
}

// fromCode gives an error of another broker back its meaning here.
func fromCode(err error) error {
	for code, meaning := range map[*kerr.Error]error{kerr.ConcurrentTransactions: txn.ErrConcurrent, kerr.InvalidTxnState: txn.ErrInvalidState,
		kerr.InvalidProducerIDMapping: txn.ErrInvalidMapping, kerr.ProducerFenced: txn.ErrProducerFenced, kerr.InvalidProducerEpoch: txn.ErrProducerFenced,
		kerr.TransactionAbortable: txn.ErrAbortable, kerr.NotCoordinator: coordinator.ErrNotCoordinator,
		kerr.CoordinatorLoadInProgress: coordinator.ErrLoading, kerr.CoordinatorNotAvailable: coordinator.ErrUnavailable} {
		if errors.Is(err, code) {
			return meaning
		}
	}
	return err
}
