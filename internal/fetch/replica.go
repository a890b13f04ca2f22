package fetch

import (
	"slices"
	"time"

	"golang.org/x/time/rate"

	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tp"
)

// marks are a partition's offsets as the request may use it: followers need the leader, consumers that can be sent
// elsewhere may read from any replica.
func (s *Service) marks(p *partition.Partition, part *Part, req *Request) (partition.Offsets, error) {
	if req.Follower == nil && req.AnyReplica && !p.Leads() {
		return p.ReplicaOffsets(part.CurrentEpoch)
	}
	return p.Offsets(part.CurrentEpoch)
}

// diverges compares the end of what the other side has with this log's lineage (KIP-595). Below the log start nothing
// diverges: it is out of range.
func diverges(p *partition.Partition, part *Part, marks partition.Offsets) (*Diverging, error) {
	if part.LastFetchedEpoch < 0 {
		return nil, nil
	}
	switch epoch, end := p.EndOffsetForEpoch(part.LastFetchedEpoch); {
	case epoch < 0 || end < 0 || part.Offset < marks.LogStart:
		return nil, ErrOffsetOutOfRange
	case epoch < part.LastFetchedEpoch || end < part.Offset:
		return &Diverging{epoch, end}, nil
	}
	return nil, nil
}

// followed takes note of how far a follower has come, before anything is read for it.
func (s *Service) followed(req *Request, now time.Time) {
	for i := range req.Parts {
		part := &req.Parts[i]
		if part.Err != nil {
			continue
		}
		p, ok := s.Replicas.Get(tp.Partition{Topic: part.Topic, Index: part.Index})
		if !ok {
			continue
		}
		marks, err := p.Offsets(part.CurrentEpoch)
		if err != nil || part.Offset < marks.LogStart || part.Offset > marks.End {
			continue // it is told so below
		}
		if d, err := diverges(p, part, marks); d != nil || err != nil {
			continue
		}
		part.Err = p.Followed(partition.FollowerFetch{Follower: req.Follower.ID, BrokerEpoch: req.Follower.Epoch, LeaderEpoch: part.CurrentEpoch,
			Offset: part.Offset, LogStart: part.LogStart, LocalStart: part.LocalStart, Now: now})
	}
}

// replicate answers a follower for one partition: with what the local log has, to its very end.
func (s *Service) replicate(req *Request, p *partition.Partition, part *Part, marks partition.Offsets, b *budget, r *Result) (hasMore bool) {
	switch {
	case part.Offset < marks.LogStart || part.Offset > marks.End:
		r.Err = ErrOffsetOutOfRange
		return false
	case part.Offset < marks.LocalLogStart:
		r.Err = ErrMovedToTier
	}
	r.HighWatermark, r.LastStable, r.LogStart = marks.HighWatermark, marks.LastStable, marks.LogStart
	maxBytes, minOne := b.limit(part.MaxBytes)
	if r.Err != nil || maxBytes == 0 && !minOne {
		return false
	}
	now := time.Now()
	limit := s.throttle(req, p)
	if Spent(limit, now) {
		return false
	}
	r.Err = s.local(p, part.Offset, maxBytes, marks.End, minOne, false, r)
	b.charge(r.Size())
	Charge(limit, now, r.Size())
	return r.Size() > 0 && r.View.NextOffset < marks.End
}

func (s *Service) throttle(req *Request, p *partition.Partition) *rate.Limiter {
	if s.Throttle == nil || slices.Contains(p.Role().ISR, req.Follower.ID) {
		return nil
	}
	return s.Throttle(p.ID(), req.Follower.ID)
}

// Spent reports whether a limiter, or nil for none, has nothing left at the moment (KIP-73).
func Spent(limit *rate.Limiter, now time.Time) bool { return limit != nil && limit.TokensAt(now) < 1 }

// Charge takes n bytes that have gone through already from a limiter: a debt that later ones wait for.
func Charge(limit *rate.Limiter, now time.Time, n int) {
	for limit != nil && n > 0 {
		part := min(n, max(limit.Burst(), 1))
		limit.ReserveN(now, part)
		n -= part
	}
}

// prefer finds the replica that a consumer should read from instead of this leader, nil if none is better (KIP-392): one of
// its rack that is in sync and holds the offset locally. A replica that would have to ask the bucket is no nearer than
// the leader, so replicas that hold little local data are passed over. Followers send nobody on.
func (s *Service) prefer(p *partition.Partition, part *Part, req *Request) *int32 {
	if s.Racks == nil || req.Rack == "" || !req.AnyReplica || !p.Leads() {
		return nil
	}
	role := p.Role()
	if s.Racks(role.Leader) == req.Rack {
		return nil
	}
	best := partition.FollowerState{ID: -1, End: -1}
	for _, f := range p.Followers() {
		if f.InSync && s.Racks(f.ID) == req.Rack && f.LocalStart <= part.Offset && part.Offset <= f.End && f.End > best.End {
			best = f
		}
	}
	if best.ID < 0 {
		return nil
	}
	return &best.ID
}
