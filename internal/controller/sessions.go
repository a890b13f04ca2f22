package controller

import (
	"math"
	"slices"

	"github.com/varve-io/varve/internal/metadata"
)

// Sessions is what the active controller knows about brokers from their heartbeats alone: who was heard of when, and which
// replicas are thin. It is lost with the controller; Begin starts anew. Times are ms. Not safe for concurrent use.
type Sessions struct {
	timeout, grace int64
	brokers        map[int32]*session
}

type session struct {
	epoch int64
	until int64 // alive before this
	thin  map[PartitionRef]bool
}

// NewSessions makes an empty table: sessions of timeoutMs (broker.session.timeout.ms), that end graceMs after a broken
// connection if that is earlier (varve.broker.disconnect.grace.ms).
func NewSessions(timeoutMs, graceMs int64) *Sessions {
	return &Sessions{timeoutMs, graceMs, map[int32]*session{}}
}

// Begin forgets everything: this node has just become the active controller. Every unfenced broker gets a full session from
// now, those in lastContact, fenced or not, one that began then.
func (s *Sessions) Begin(img *metadata.Image, now int64, lastContact map[int32]int64) {
	s.brokers = map[int32]*session{}
	for id, r := range img.Brokers {
		if at, ok := lastContact[id]; ok {
			s.brokers[id] = &session{epoch: r.Epoch, until: min(at, now) + s.timeout}
		} else if !r.Fenced {
			s.brokers[id] = &session{epoch: r.Epoch, until: now + s.timeout}
		}
	}
}

// Touch notes a heartbeat of a run. One of an earlier run than is known is ignored.
func (s *Sessions) Touch(broker int32, epoch int64, now int64) {
	b := s.brokers[broker]
	if b == nil || epoch > b.epoch {
		b = &session{epoch: epoch}
		s.brokers[broker] = b
	}
	if epoch == b.epoch {
		b.until = now + s.timeout
	}
}

// Disconnected notes that a broker's connection to the controller broke: it is silent after the grace unless it is touched
// before, and never later than it would have been.
func (s *Sessions) Disconnected(broker int32, now int64) {
	if b := s.brokers[broker]; b != nil {
		b.until = min(b.until, now+s.grace)
	}
}

// Silent lists the unfenced brokers of img whose session is over, by id. Brokers of img that were never heard of get a
// session from now on; those that are not in img are forgotten.
func (s *Sessions) Silent(img *metadata.Image, now int64) []int32 {
	var out []int32
	for id, r := range img.Brokers {
		if r.Fenced {
			continue
		}
		b := s.brokers[id]
		if b == nil || b.epoch < r.Epoch {
			b = &session{epoch: r.Epoch, until: now + s.timeout}
			s.brokers[id] = b
		}
		if now >= b.until {
			out = append(out, id)
		}
	}
	for id := range s.brokers {
		if _, ok := img.Brokers[id]; !ok {
			delete(s.brokers, id)
		}
	}
	slices.Sort(out)
	return out
}

// Alive reports whether a broker has a session.
func (s *Sessions) Alive(broker int32, now int64) bool {
	b := s.brokers[broker]
	return b != nil && now < b.until
}

// SetThin replaces the list of a broker's thin replicas, as its heartbeat has it. A broker that was never heard of has none.
func (s *Sessions) SetThin(broker int32, thin []PartitionRef) {
	b := s.brokers[broker]
	if b == nil {
		return
	}
	b.thin = nil
	if len(thin) > 0 {
		b.thin = make(map[PartitionRef]bool, len(thin))
		for _, p := range thin {
			b.thin[p] = true
		}
	}
}

// Thin reports whether a replica holds too little local data to be preferred as leader (KIP-1303).
func (s *Sessions) Thin(broker int32, p PartitionRef) bool {
	b := s.brokers[broker]
	return b != nil && b.thin[p]
}

// Next is when Silent may change next without anything else happening, math.MaxInt64 if never.
func (s *Sessions) Next(now int64) int64 {
	next := int64(math.MaxInt64)
	for _, b := range s.brokers {
		if b.until > now {
			next = min(next, b.until)
		}
	}
	return next
}
