package fetch

import (
	"container/list"
	"errors"
	"math/rand/v2"
	"sync"

	"github.com/varve-io/varve/internal/tp"
)

// Errors of fetch sessions (KIP-227, KIP-516).
var (
	ErrSessionNotFound = errors.New("fetch session not found")
	ErrSessionEpoch    = errors.New("invalid fetch session epoch")
	ErrSessionTopicID  = errors.New("fetch session used topic ids differently")
)

// Epochs of a session that mean something of their own.
const (
	InitialEpoch int32 = 0
	FinalEpoch   int32 = -1
)

// Key names a partition in a session, by id where the client uses ids.
type Key struct {
	Topic   string
	TopicID tp.UUID
	Index   int32
}

// member is one partition of a session: what was asked last and what was answered last.
type member struct {
	part                 Part
	element              *list.Element
	answered             bool
	highWatermark, start int64
}

// Session is the state of one client's incremental fetches. It is used by one request at a time: a client that sends a
// second request before the answer of the first breaks the protocol, and gets an epoch error.
type Session struct {
	mu      sync.Mutex
	id      int32
	epoch   int32 // expected of the next request
	ids     bool
	members map[Key]*member
	order   *list.List // of *member; the order in which partitions are read, rotated as they deliver
	slot    *list.Element
}

// Sessions is the bounded cache of sessions. When it is full the one that was used least recently gives way.
type Sessions struct {
	mu    sync.Mutex
	max   int
	byID  map[int32]*Session
	usage *list.List // of *Session, most recent first
}

// NewSessions returns a cache of at most slots sessions; with 0 there are none.
func NewSessions(slots int) *Sessions {
	return &Sessions{max: slots, byID: map[int32]*Session{}, usage: list.New()}
}

// Len is the number of sessions.
func (s *Sessions) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.byID)
}

// Begin finds or makes the session of a request and returns the partitions to fetch, in order. session is nil for a
// sessionless request. usesIDs says whether topics are named by id (Fetch v13+).
func (s *Sessions) Begin(id, epoch int32, usesIDs bool, parts []Part, forgotten []Key) (session *Session, wanted []Part, err error) {
	switch epoch {
	case FinalEpoch:
		s.drop(id)
		return nil, parts, nil
	case InitialEpoch:
		s.drop(id)
		if len(parts) == 0 {
			return nil, nil, nil
		}
		return s.create(usesIDs, parts), parts, nil
	}
	s.mu.Lock()
	session = s.byID[id]
	if session == nil {
		s.mu.Unlock()
		return nil, nil, ErrSessionNotFound
	}
	s.usage.MoveToFront(session.slot)
	s.mu.Unlock()
	session.mu.Lock()
	defer session.mu.Unlock()
	if session.epoch != epoch {
		return nil, nil, ErrSessionEpoch
	}
	if session.ids != usesIDs && (len(parts) > 0 || len(forgotten) > 0) {
		return nil, nil, ErrSessionTopicID
	}
	session.epoch = nextEpoch(epoch)
	for _, k := range forgotten {
		if m, ok := session.members[k]; ok {
			session.order.Remove(m.element)
			delete(session.members, k)
		}
	}
	for _, p := range parts {
		session.put(p)
	}
	for e := session.order.Front(); e != nil; e = e.Next() {
		wanted = append(wanted, e.Value.(*member).part)
	}
	return session, wanted, nil
}

func nextEpoch(e int32) int32 {
	if e++; e < 0 {
		return 1
	}
	return e
}

func (p Part) key() Key {
	if p.TopicID.IsZero() {
		return Key{Topic: p.Topic, Index: p.Index}
	}
	return Key{TopicID: p.TopicID, Index: p.Index}
}

// put adds a partition or changes what is asked of it.
func (s *Session) put(p Part) {
	if m, ok := s.members[p.key()]; ok {
		m.part = p
		return
	}
	m := &member{part: p}
	m.element = s.order.PushBack(m)
	s.members[p.key()] = m
}

func (s *Sessions) create(usesIDs bool, parts []Part) *Session {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.max == 0 {
		return nil
	}
	for len(s.byID) >= s.max {
		oldest := s.usage.Back().Value.(*Session)
		s.usage.Remove(oldest.slot)
		delete(s.byID, oldest.id)
	}
	session := &Session{epoch: 1, ids: usesIDs, members: map[Key]*member{}, order: list.New()}
	for session.id == 0 || s.byID[session.id] != nil {
		session.id = rand.Int32()
	}
	for _, p := range parts {
		session.put(p)
	}
	session.slot = s.usage.PushFront(session)
	s.byID[session.id] = session
	return session
}

func (s *Sessions) drop(id int32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if session := s.byID[id]; session != nil {
		s.usage.Remove(session.slot)
		delete(s.byID, id)
	}
}

// ID is the session's id, 0 for none.
func (s *Session) ID() int32 {
	if s == nil {
		return 0
	}
	return s.id
}

// Filter says of each result whether it has to be in the answer. The first answer has all; later ones have what changed:
// data, a location, an error, another high watermark or log start. Partitions that delivered move to the end of the order,
// so that no partition starves behind a busy one. results are those of wanted, in its order.
func (s *Session) Filter(wanted []Part, results []Result, full bool) []bool {
	keep := make([]bool, len(results))
	if s == nil {
		for i := range keep {
			keep[i] = true
		}
		return keep
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range results {
		r := &results[i]
		m := s.members[wanted[i].key()]
		if m == nil {
			continue
		}
		changed := !m.answered || m.highWatermark != r.HighWatermark || m.start != r.LogStart
		keep[i] = full || changed || r.HasData() || r.Err != nil || r.Diverging != nil
		if keep[i] {
			m.answered, m.highWatermark, m.start = r.Err == nil, r.HighWatermark, r.LogStart
			if !full && r.HasData() {
				s.order.MoveToBack(m.element)
			}
		}
	}
	return keep
}
