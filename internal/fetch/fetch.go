// Package fetch answers fetches. For a consumer it plans for each partition whether the records come from the local log, from
// the tier through the broker, by the client's own hand, or from another replica, reads within the request's byte budget,
// and waits for data. A follower gets what the local log has, up to its end, and an error where only the tier has it.
//
// Every tiered partition of a request is read, all at once and beside the local ones. A read that takes longer than the
// request may wait goes on into the tier reader's cache, where the next request finds it, and a slow store never holds
// back partitions that have data.
package fetch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/time/rate"

	"github.com/varve-io/varve/internal/directfetch"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tier/reader"
	"github.com/varve-io/varve/internal/tp"
)

// Part is what a request asks of one partition.
type Part struct {
	Topic            string
	TopicID          tp.UUID // zero where the client names topics
	Index            int32
	Offset           int64
	MaxBytes         int
	CurrentEpoch     int32 // leader epoch that the client knows, -1 none
	LastFetchedEpoch int32 // epoch of the last record that it has, -1 none
	LogStart         int64 // of a follower
	LocalStart       int64 // of a follower: where its local log starts
	WantLocation     bool
	Err              error // set by the caller where the topic could not be resolved
}

// Request is one fetch.
type Request struct {
	Parts     []Part
	MaxWait   time.Duration
	MinBytes  int
	MaxBytes  int
	Committed bool     // read_committed
	Formats   []string // storage formats that the client reads itself
	// TierWait is how long the bucket is waited for: remote.fetch.max.wait.ms.
	TierWait time.Duration
	Follower *Follower // nil for a consumer
	// Rack is a consumer's; AnyReplica allows it to read from a follower (KIP-392, Fetch v11+).
	Rack       string
	AnyReplica bool
	// Now is when the request came; zero is the present. A follower's place in the ISR depends on it.
	Now time.Time
}

// Follower is the broker that replicates by a request.
type Follower struct {
	ID    int32
	Epoch int64 // of its run
}

// Result answers for one partition. A local View must be released.
type Result struct {
	Err                                 error
	HighWatermark, LastStable, LogStart int64 // -1 with an error
	View                                *log.View
	Records                             reader.Pieces // from the tier
	Aborted                             []producerstate.AbortedTxn
	Locations                           []directfetch.Location
	Diverging                           *Diverging
	Leader, LeaderEpoch                 int32  // with errors of leadership, -1 otherwise
	Preferred                           *int32 // the replica that the consumer should read from instead, nil for none
}

// Diverging tells a client that its log and this one part ways (KIP-595).
type Diverging struct {
	Epoch     int32
	EndOffset int64
}

// Size is the number of bytes of records.
func (r *Result) Size() int {
	if r.View != nil {
		return r.View.Size()
	}
	return r.Records.Size()
}

// HasData reports whether the result brings the consumer forward.
func (r *Result) HasData() bool {
	return r.Size() > 0 || len(r.Locations) > 0 || r.Preferred != nil
}

// Tier reads the bucket; *reader.Reader is one. Calls end when ctx ends; what arrives later stays in its cache.
type Tier interface {
	Read(ctx context.Context, segments tier.Segments, offset int64, maxBytes int, upTo int64, minOne bool) (reader.Result, error)
	Aborted(ctx context.Context, segments tier.Segments, from, upTo int64) (txns []producerstate.AbortedTxn, complete bool, err error)
	Locate(ctx context.Context, segment *tier.Segment, offset, maxBytes int64) (start, end int64, err error)
}

// Replicas finds this broker's partitions.
type Replicas interface {
	Get(id tp.Partition) (*partition.Partition, bool)
}

// Service answers fetches. It is safe for concurrent use.
type Service struct {
	Replicas Replicas
	Tier     Tier // nil without a tier
	Sessions *Sessions
	// KeyPrefix is what object keys begin with, Validity how long the objects behind a location are sure to stay.
	KeyPrefix string
	Validity  time.Duration
	// TierFailed hears of reads of the bucket that failed; may be nil.
	TierFailed func(id tp.Partition, err error)
	// Grant signs a URL that reads an object, for readers without access of their own; nil for none. Where it fails the location goes
	// out without, and its reader asks the broker.
	Grant func(ctx context.Context, key string) (directfetch.Grant, error)
	// Racks tells a broker's rack, "" for none; nil keeps all consumers at the leader (replica.selector.class).
	Racks func(broker int32) string
	// Throttle returns what limits a leader's bytes to a follower that is out of sync, nil for nothing; may be nil.
	Throttle func(id tp.Partition, follower int32) *rate.Limiter
	// Stopping is closed when the broker stops: whoever waits for more is then answered with what there is. Nil never is.
	Stopping <-chan struct{}
}

// grace is how long a request that has enough waits for tier reads that may be in the cache already.
const grace = 10 * time.Millisecond

// Fetch answers a request: at once if there is enough, else when there is or when its time is over.
func (s *Service) Fetch(ctx context.Context, req *Request) []Result {
	start := time.Now()
	if len(req.Parts) == 0 {
		return nil
	}
	event := partition.Committed
	if req.Follower != nil {
		event = partition.Appended
		now := req.Now
		if now.IsZero() {
			now = start
		}
		s.followed(req, now)
	}
	reads := &tierReads{results: map[int]*tierRead{}, done: make(chan struct{}, 1)}
	tierCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	results, enough := s.round(tierCtx, req, reads, false)
	if enough && reads.waiting == 0 {
		return results
	}
	w := partition.NewWaiter()
	for i := range req.Parts {
		if p, ok := s.Replicas.Get(tp.Partition{Topic: req.Parts[i].Topic, Index: req.Parts[i].Index}); ok && req.Parts[i].Err == nil {
			p.Watch(w, event)
			defer p.Unwatch(w, event)
		}
	}
	release(results)
	// Look again: what was appended before the watch is not signalled.
	results, enough = s.round(tierCtx, req, reads, false)
	var graceEnd time.Time // set when there is enough: appends that go on must not draw it out
	for {
		left := time.Until(start.Add(req.MaxWait))
		if reads.waiting > 0 {
			left = time.Until(start.Add(max(req.MaxWait, req.TierWait)))
			if enough {
				if graceEnd.IsZero() {
					graceEnd = time.Now().Add(grace)
				}
				left = min(left, time.Until(graceEnd))
			}
		} else if enough {
			return results
		}
		over := left <= 0
		if over && reads.waiting == 0 {
			return results
		}
		if !over {
			timer := time.NewTimer(left)
			select {
			case <-w.C:
			case <-reads.done:
			case <-timer.C:
				over = true
			case <-s.Stopping:
				over = true
			case <-ctx.Done():
				timer.Stop()
				return results
			}
			timer.Stop()
		}
		release(results)
		results, enough = s.round(tierCtx, req, reads, over)
		if over {
			return results
		}
	}
}

func release(results []Result) {
	for i := range results {
		if results[i].View != nil {
			results[i].View.Release()
			results[i].View = nil
		}
	}
}

// round looks at every partition once. enough says that the answer should go out; last, that it does: then reads of the
// bucket that are under way leave their share of the budget to others.
func (s *Service) round(ctx context.Context, req *Request, reads *tierReads, last bool) (results []Result, enough bool) {
	results = make([]Result, len(req.Parts))
	b := budget{left: req.MaxBytes}
	size := 0
	reads.waiting = 0
	for i := range req.Parts {
		part, r := &req.Parts[i], &results[i]
		*r = Result{HighWatermark: -1, LastStable: -1, LogStart: -1, Leader: -1, LeaderEpoch: -1, Err: part.Err}
		if part.Err != nil {
			continue // an unknown partition does not end the wait of the others
		}
		hasMore := s.one(ctx, req, i, &b, r, reads, last)
		size += r.Size()
		enough = enough || hasMore || r.Err != nil || r.Diverging != nil
	}
	return results, enough || size >= req.MinBytes
}

// one answers for one partition within the budget. hasMore says that waiting would not bring more than an answer now and
// another request: the data is not at the end of the partition, where new records arrive.
func (s *Service) one(ctx context.Context, req *Request, i int, b *budget, r *Result, reads *tierReads, last bool) (hasMore bool) {
	part := &req.Parts[i]
	id := tp.Partition{Topic: part.Topic, Index: part.Index}
	p, ok := s.Replicas.Get(id)
	if !ok {
		r.Err = fmt.Errorf("%w: %s is not here", partition.ErrNotLeader, id)
		return false
	}
	marks, err := s.marks(p, part, req)
	if err != nil {
		r.Err, r.Leader, r.LeaderEpoch = err, marks.Leader, marks.LeaderEpoch
		return false
	}
	if req.Follower != nil || part.Offset >= marks.LocalLogStart {
		if r.Diverging, r.Err = diverges(p, part, marks); r.Err != nil || r.Diverging != nil {
			if r.Diverging != nil {
				r.HighWatermark, r.LastStable, r.LogStart = marks.HighWatermark, marks.LastStable, marks.LogStart
			}
			return false
		}
	}
	if req.Follower != nil {
		return s.replicate(req, p, part, marks, b, r)
	}
	if r.Preferred = s.prefer(p, part, req); r.Preferred != nil {
		r.HighWatermark, r.LastStable, r.LogStart = marks.HighWatermark, marks.LastStable, marks.LogStart
		return true
	}
	upTo := marks.HighWatermark
	if req.Committed {
		upTo = marks.LastStable
	}
	remote := p.Remote()
	if !p.Leads() && part.Offset > marks.End {
		r.Err = ErrNotAvailable // this follower has not got there: the consumer asks again, here or at the leader
		return false
	}
	source, segment, err := choose(part.Offset, upTo, marks, remote, part.WantLocation, req.Formats)
	if err == nil {
		r.HighWatermark, r.LastStable, r.LogStart = marks.HighWatermark, marks.LastStable, marks.LogStart
	}
	maxBytes, minOne := b.limit(part.MaxBytes)
	if maxBytes == 0 && !minOne && source != Nowhere {
		return source == Local && part.Offset < upTo && b.planned > 0 // a slow bucket must not keep local data waiting
	}
	switch source {
	case Nowhere:
		r.Err = err
	case Local:
		r.Err = s.local(p, part.Offset, maxBytes, upTo, minOne, req.Committed, r)
		b.charge(r.Size())
		return r.Size() > 0 && r.View.NextOffset < upTo
	case Tiered, Direct:
		if s.Tier == nil {
			r.Err = ErrReplicaUnavailable
			return false
		}
		if last && !reads.started(i) {
			return false
		}
		read := reads.get(i, func(read *tierRead) {
			if source == Direct {
				s.locate(ctx, p, segment, part.Offset, req.Committed, read)
			} else {
				s.tiered(ctx, p, remote, part.Offset, maxBytes, upTo, minOne, req.Committed, read)
			}
		})
		if !read.ready() {
			reads.waiting++
			if !last {
				b.plan(maxBytes) // planned bytes count, or many slow partitions would overrun the request (KAFKA-19462)
			}
			return false
		}
		if read.err != nil {
			s.tierError(ctx, id, read, r)
			return false
		}
		if b.taken && read.records.Size() > b.left {
			return false // others took the place of a read that was late; the next request finds it in the cache
		}
		r.Records, r.Aborted, r.Locations = read.records, read.aborted, read.locations
		b.charge(r.Records.Size())
		return r.HasData()
	}
	return false
}

func (s *Service) local(p *partition.Partition, offset int64, maxBytes int, upTo int64, minOne, committed bool, r *Result) error {
	l := p.Log()
	if l == nil {
		return partition.ErrOffline
	}
	if offset >= upTo {
		return nil // up to the high watermark there is nothing, and that is no error
	}
	view, err := l.Read(offset, maxBytes, upTo, minOne)
	if err != nil {
		var out *log.OffsetOutOfRangeError
		if errors.As(err, &out) && offset >= out.LogStart && offset <= out.End {
			return nil // local retention was faster: the next look plans anew
		}
		return err
	}
	r.View = view
	if committed && view.Size() > 0 {
		if r.Aborted, err = l.AbortedTransactions(view.FirstOffset, view.NextOffset); err != nil {
			view.Release()
			r.View = nil
			return err
		}
	}
	return nil
}

// tierError maps what went wrong with the bucket: late and failed reads are empty answers, for which the client simply
// asks again; an offset that is really gone is out of range; damage is said as such.
func (s *Service) tierError(ctx context.Context, id tp.Partition, read *tierRead, r *Result) {
	err := read.err
	if ctx.Err() != nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return
	}
	if s.TierFailed != nil && !read.told {
		s.TierFailed(id, err)
	}
	read.told = true
	switch {
	case errors.Is(err, reader.ErrCorrupt):
		r.Err = err
	case errors.Is(err, reader.ErrNotInTier):
		r.Err = fmt.Errorf("%w: %w", ErrReplicaUnavailable, err)
	}
}

func (s *Service) tiered(ctx context.Context, p *partition.Partition, remote tier.Segments, offset int64, maxBytes int, upTo int64, minOne, committed bool, read *tierRead) {
	result, err := s.Tier.Read(ctx, remote, offset, maxBytes, upTo, minOne)
	if err == nil && committed && result.Records.Size() > 0 {
		read.aborted, err = s.aborted(ctx, p, remote, result.FirstOffset, result.NextOffset)
	}
	read.records, read.err = result.Records, err
}

// aborted collects the aborted transactions of a range from the tier's indexes and, as a marker may come later, the log's.
func (s *Service) aborted(ctx context.Context, p *partition.Partition, remote tier.Segments, from, upTo int64) ([]producerstate.AbortedTxn, error) {
	list, complete, err := s.Tier.Aborted(ctx, remote, from, upTo)
	if err != nil || complete {
		return list, err
	}
	l := p.Log()
	if l == nil {
		return nil, partition.ErrOffline
	}
	later, err := l.AbortedTransactions(from, upTo)
	if err != nil {
		return nil, err
	}
	seen := make(map[producerstate.AbortedTxn]bool, len(list))
	for _, a := range list {
		seen[a] = true
	}
	for _, a := range later {
		if !seen[a] { // the tiers overlap
			list = append(list, a)
		}
	}
	return list, nil
}

// locate answers with the place of the rest of the segment, from the batch that holds offset on. The aborted transactions
// are those of exactly that range.
func (s *Service) locate(ctx context.Context, p *partition.Partition, segment *tier.Segment, offset int64, committed bool, read *tierRead) {
	start, end, err := s.Tier.Locate(ctx, segment, offset, segment.Size)
	if err == nil && committed {
		read.aborted, err = s.aborted(ctx, p, p.Remote(), offset, segment.End+1)
	}
	if read.err = err; err != nil {
		return
	}
	_, epoch := p.Leadership()
	loc := directfetch.Location{
		SegmentID: segment.ID, CustomMetadata: segment.CustomMetadata, ObjectKey: segment.Object(s.KeyPrefix, remoteformat.ObjectLog), Format: segment.Format,
		BaseOffset: segment.Start, EndOffset: segment.End, StartPosition: start, EndPosition: end, SegmentSize: segment.Size,
		LeaderEpoch: epoch, ValidityMs: s.Validity.Milliseconds(),
	}
	if s.Grant != nil {
		loc.LogGrant, err = s.Grant(ctx, loc.ObjectKey)
		if err == nil && segment.Format != tier.FormatKafkaV1 {
			loc.ManifestGrant, err = s.Grant(ctx, segment.Object(s.KeyPrefix, remoteformat.ObjectManifest))
		}
		if err != nil && s.TierFailed != nil {
			s.TierFailed(p.ID(), err)
		}
	}
	read.locations = []directfetch.Location{loc}
}

// tierReads are the reads of the bucket that one request has started, by partition. They outlive a look at the
// partitions, not the request. Only the request's goroutine uses them.
type tierReads struct {
	results map[int]*tierRead
	done    chan struct{} // signalled when a read has ended
	waiting int           // reads that had not ended when the last round looked
}

type tierRead struct {
	finished  chan struct{}
	records   reader.Pieces
	aborted   []producerstate.AbortedTxn
	locations []directfetch.Location
	err       error
	told      bool // TierFailed has heard of err
}

func (r *tierRead) ready() bool {
	select {
	case <-r.finished:
		return true
	default:
		return false
	}
}

func (rs *tierReads) started(i int) bool { return rs.results[i] != nil }

func (rs *tierReads) get(i int, start func(*tierRead)) *tierRead {
	if r, ok := rs.results[i]; ok {
		return r
	}
	r := &tierRead{finished: make(chan struct{})}
	rs.results[i] = r
	go func() {
		start(r)
		close(r.finished)
		select {
		case rs.done <- struct{}{}:
		default:
		}
	}()
	return r
}
