// Package replication drives follower machines over connections to their leaders.
//
// For each leader there are pairs of lanes, a lane being a connection with a fetch session and a loop: one lane for
// partitions that keep up, whose fetches wait at the leader for more, and one for those that catch up, so that a partition
// which copies gigabytes never delays one that is in sync. What a partition needs beside fetches (the leader's offsets,
// lineage and producers from the bucket) is asked for in goroutines of its own and holds up nobody.
//
// Concurrency: Follow, Stop and Status may be called from anywhere. Run owns all goroutines and ends with its context.
package replication

import (
	"context"
	"hash/fnv"
	"log/slog"
	"net"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/time/rate"

	"github.com/varve-io/varve/internal/follower"
	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

// State reads from the bucket what a replica starts from; *reader.Reader is one.
type State interface {
	LeaderEpochs(ctx context.Context, s *tier.Segment) ([]leaderepoch.Entry, error)
	ProducerSnapshot(ctx context.Context, s *tier.Segment) ([]byte, error)
}

// Config is asked for at each use.
type Config struct {
	MaxBytes, ResponseMaxBytes, MinBytes int32
	MaxWait                              time.Duration
	Timeout                              time.Duration // beyond MaxWait
}

// Options of New. All but Throttle, State and Observe are required.
type Options struct {
	Self     int32
	Epoch    func() int64 // of this run of the broker
	Dial     func(ctx context.Context, broker int32) (net.Conn, error)
	State    State // nil without a tier
	Config   func() Config
	Fetchers int // pairs of lanes to each leader
	// Checkpoint writes recovery points and log starts; nothing is appended to a log that was cut or began anew before it returned.
	Checkpoint func()
	// Throttle limits what a partition that catches up takes in; nil for nothing.
	Throttle func(tp.Partition) *rate.Limiter
	Log      *slog.Logger
	Observe  func(Event)
}

// Event is something that metrics count.
type Event struct {
	Partition tp.Partition
	Appended  int64 // bytes
	Truncated bool
	Building  bool // lineage and producers are being read from the bucket
	Restarted bool // the replica starts from there, or from the leader's log start
	Err       error
}

// Service replicates.
type Service struct {
	o     Options
	loads *semaphore.Weighted

	mu      sync.Mutex
	ctx     context.Context // of Run; nil before and after
	wg      sync.WaitGroup
	members map[tp.Partition]*member
	sources map[int32]*source
}

// loadsMax bounds the reads of lineage and producers at one time.
const loadsMax = 8

// New returns a service that follows nothing.
func New(o Options) *Service {
	if o.Observe == nil {
		o.Observe = func(Event) {}
	}
	return &Service{o: o, loads: semaphore.NewWeighted(loadsMax), members: map[tp.Partition]*member{}, sources: map[int32]*source{}}
}

// member is one partition that follows.
type member struct {
	id      tp.Partition
	topicID tp.UUID
	leader  int32
	epoch   int32
	pair    [2]*lane
	next    *lane // that is to take it over; guarded by the lock of the lane it is in

	mu      sync.Mutex
	machine *follower.Machine
	stopped bool
	told    string    // the last trouble that was logged
	since   time.Time // when it began, zero without any
}

// source is one leader.
type source struct {
	id    int32
	pairs [][2]*lane // in sync, catching up
	asks  *asker
	stop  context.CancelFunc
	count int // members
}

// Follow makes a partition follow what its role says, or look again at once after its role changed.
func (s *Service) Follow(p *partition.Partition, config func() follower.Config) {
	role := p.Role()
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.members[p.ID()]
	if m != nil && m.machine.Partition() == p && m.leader == role.Leader && m.epoch == role.LeaderEpoch {
		m.pair[0].poke()
		m.pair[1].poke()
		return
	}
	// Another epoch begins in the lane for those that catch up, so that it need not wait for others' fetches.
	if m != nil {
		s.dropLocked(m)
	}
	if role.Leader < 0 || role.Leader == s.o.Self {
		return
	}
	m = &member{id: p.ID(), topicID: p.TopicID(), machine: follower.New(p, config), leader: role.Leader, epoch: role.LeaderEpoch}
	s.members[m.id] = m
	src := s.sources[m.leader]
	if src == nil {
		src = s.newSource(m.leader)
		s.sources[m.leader] = src
		if s.ctx != nil {
			s.start(src)
		}
	}
	src.count++
	h := fnv.New32a()
	h.Write([]byte(m.id.String()))
	m.pair = src.pairs[int(h.Sum32())%len(src.pairs)]
	m.pair[1].add(m)
}

// Stop ends the following of a partition. An answer that is on its way is not applied to a role that has changed.
func (s *Service) Stop(id tp.Partition) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.members[id]; m != nil {
		s.dropLocked(m)
	}
}

func (s *Service) dropLocked(m *member) {
	delete(s.members, m.id)
	m.mu.Lock()
	m.stopped = true
	m.mu.Unlock()
	src := s.sources[m.leader]
	if src.count--; src.count == 0 {
		delete(s.sources, m.leader)
		if src.stop != nil {
			src.stop()
		}
	}
}

// Status tells what a follower is at. ok is false of a partition that does not follow.
func (s *Service) Status(id tp.Partition) (phase follower.Phase, cause error, ok bool) {
	s.mu.Lock()
	m := s.members[id]
	s.mu.Unlock()
	if m == nil {
		return 0, nil, false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	phase, cause = m.machine.Phase()
	return phase, cause, true
}

// Run replicates until ctx ends.
func (s *Service) Run(ctx context.Context) error {
	s.mu.Lock()
	s.ctx = ctx
	for _, src := range s.sources {
		s.start(src)
	}
	s.mu.Unlock()
	<-ctx.Done()
	s.mu.Lock()
	s.ctx = nil
	s.mu.Unlock()
	s.wg.Wait()
	return nil
}

func (s *Service) newSource(leader int32) *source {
	src := &source{id: leader, asks: &asker{turn: make(chan struct{}, 1), dial: func(ctx context.Context) (net.Conn, error) { return s.o.Dial(ctx, leader) }}}
	for range max(s.o.Fetchers, 1) {
		steady, catching := newLane(s, src), newLane(s, src)
		steady.from, catching.to = catching, steady
		src.pairs = append(src.pairs, [2]*lane{steady, catching})
	}
	return src
}

// start runs under the lock, in the life of Run.
func (s *Service) start(src *source) {
	ctx, stop := context.WithCancel(s.ctx)
	src.stop = stop
	for _, pair := range src.pairs {
		for _, l := range pair {
			s.wg.Add(1)
			go func() {
				defer s.wg.Done()
				l.run(ctx)
			}()
		}
	}
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		<-ctx.Done()
		src.asks.close()
	}()
}

// patience is how long trouble may last before it is logged: a leader that has not heard yet that it leads is no news.
const patience = time.Second

// trouble logs what goes wrong with a partition, once for each cause, if it lasts.
func (s *Service) trouble(m *member, now time.Time) {
	phase, err := m.machine.Phase()
	switch {
	case err == nil:
		m.told, m.since = "", time.Time{}
	case m.since.IsZero():
		m.since = now
	case now.Sub(m.since) >= patience && m.told != err.Error():
		m.told = err.Error()
		s.o.Log.Warn("replication is held up, it will be tried again", "partition", m.id.String(), "leader", m.leader, "phase", phase.String(), "cause", err)
	}
}

// effect sees to what an answer brought about.
func (s *Service) effect(m *member, e follower.Effect) {
	if e.Truncated {
		s.o.Log.Info("log was cut where it departs from the leader's", "partition", m.id.String(), "leader", m.leader, "log end", m.machine.Partition().Log().Offsets().End)
	}
	if e.Restarted {
		o := m.machine.Partition().Log().Offsets()
		s.o.Log.Info("replica starts anew", "partition", m.id.String(), "leader", m.leader, "log start", o.LogStart, "local log start", o.LocalLogStart)
	}
	if e.Appended > 0 || e.Truncated || e.Restarted {
		s.o.Observe(Event{Partition: m.id, Appended: e.Appended, Truncated: e.Truncated, Restarted: e.Restarted})
	}
}
