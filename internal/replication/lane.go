package replication

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
	"golang.org/x/time/rate"

	"github.com/varve-io/varve/internal/fetch"
	"github.com/varve-io/varve/internal/follower"
	"github.com/varve-io/varve/internal/peer"
	"github.com/varve-io/varve/internal/tp"
)

// handOverWait is how long fetches of a lane wait at the leader whose partitions have all caught up and go over to the
// other lane when that comes back from its own wait.
const handOverWait = 10 * time.Millisecond

// lane is one connection to a leader and the partitions that are fetched over it.
type lane struct {
	s   *Service
	src *source
	// One of the two is set: from is the lane that this one takes partitions over from, to the one that takes this one's.
	from, to *lane
	poked    chan struct{}

	mu      sync.Mutex
	members []*member
	idle    chan struct{} // closed while no fetch is under way
	yield   bool          // the other lane waits for the partitions that it is to have: no more fetches of them

	conn    *peer.Kafka
	session session
}

func newLane(s *Service, src *source) *lane {
	idle := make(chan struct{})
	close(idle)
	return &lane{s: s, src: src, poked: make(chan struct{}, 1), idle: idle}
}

func (l *lane) poke() {
	select {
	case l.poked <- struct{}{}:
	default:
	}
}

func (l *lane) add(m *member) {
	l.mu.Lock()
	l.members = append(l.members, m)
	l.mu.Unlock()
	l.poke()
}

// wanted is one partition of a fetch.
type wanted struct {
	m    *member
	step follower.Step
}

func (l *lane) run(ctx context.Context) {
	defer l.hangUp()
	for ctx.Err() == nil {
		l.adopt(ctx)
		batch, next := l.collect(ctx, time.Now())
		if len(batch) > 0 {
			l.fetch(ctx, batch)
			continue
		}
		timer := time.NewTimer(time.Until(next))
		select {
		case <-ctx.Done():
		case <-l.poked:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// adopt takes over the partitions of the other lane that have caught up, between two of its fetches.
func (l *lane) adopt(ctx context.Context) {
	if l.from == nil {
		return
	}
	for {
		mine, idle := l.from.release(l)
		if idle == nil {
			l.mu.Lock()
			l.members = append(l.members, mine...)
			l.mu.Unlock()
			return
		}
		select { // its fetch is a short one
		case <-idle:
		case <-ctx.Done():
			return
		}
	}
}

// release gives up the partitions that another lane is to have; while a fetch is under way, it returns the channel that is
// closed when that is over instead.
func (l *lane) release(to *lane) (mine []*member, idle chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !slices.ContainsFunc(l.members, func(m *member) bool { return m.next == to }) {
		return nil, nil
	}
	select {
	case <-l.idle:
		l.yield = false
	default:
		l.yield = true // or the next fetch would begin before the other lane has noticed the end of this one
		return nil, l.idle
	}
	l.members = slices.DeleteFunc(l.members, func(m *member) bool {
		if m.next != to {
			return false
		}
		m.next = nil
		mine = append(mine, m)
		return true
	})
	return mine, nil
}

// collect takes the next step of every partition: fetches are returned, everything else is begun. next is when to look
// again if there is nothing to fetch.
func (l *lane) collect(ctx context.Context, now time.Time) (batch []wanted, next time.Time) {
	next = now.Add(time.Minute)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.members = slices.DeleteFunc(l.members, func(m *member) bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.stopped {
			return true
		}
		if l.yield && m.next != nil {
			return false
		}
		if fetch.Spent(l.limit(m), now) {
			next = earlier(next, now.Add(throttlePause))
			return false
		}
		switch step := m.machine.Next(now); step.Kind {
		case follower.Fetch:
			batch = append(batch, wanted{m, step})
		case follower.Wait:
			next = earlier(next, step.Until)
		case follower.Ask, follower.Load:
			l.s.aside(ctx, l, m, step)
		}
		return false
	})
	if len(batch) > 0 {
		l.idle = make(chan struct{})
	}
	return batch, next
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// limit is what throttles a partition, nil for nothing: only while it catches up.
func (l *lane) limit(m *member) *rate.Limiter {
	if l.to == nil || l.s.o.Throttle == nil {
		return nil
	}
	return l.s.o.Throttle(m.id)
}

// throttlePause is how long a partition waits whose limiter has nothing left.
const throttlePause = 50 * time.Millisecond

// fetch sends one fetch and applies its answer.
func (l *lane) fetch(ctx context.Context, batch []wanted) {
	defer func() {
		l.mu.Lock()
		close(l.idle)
		l.mu.Unlock()
	}()
	answers, err := l.exchange(ctx, batch)
	now := time.Now()
	checkpoint := false
	var level []*member
	for i, w := range batch {
		m := w.m
		m.mu.Lock()
		var e follower.Effect
		switch {
		case m.stopped:
		case err != nil:
			m.machine.Fetched(w.step, follower.Answer{Code: follower.TryAgain, Err: err}, now)
		case answers[i] == nil:
			m.machine.Nothing(w.step)
		default:
			e = m.machine.Fetched(w.step, *answers[i], now)
		}
		checkpoint = checkpoint || e.Checkpoint
		if e.Appended > 0 {
			fetch.Charge(l.limit(m), now, int(e.Appended))
		}
		l.s.effect(m, e)
		if ctx.Err() == nil {
			l.s.trouble(m, now)
		}
		if l.to != nil && m.machine.Level() {
			level = append(level, m)
		}
		m.mu.Unlock()
	}
	if checkpoint {
		l.s.o.Checkpoint()
	}
	if len(level) > 0 {
		l.mu.Lock()
		for _, m := range level {
			m.next = l.to
		}
		l.mu.Unlock()
		l.to.poke()
	}
}

func (l *lane) hangUp() {
	if l.conn != nil {
		l.conn.Close()
		l.conn = nil
	}
	l.session = session{}
}

// exchange sends the fetch of a batch and returns the answers by position; nil is no news.
func (l *lane) exchange(ctx context.Context, batch []wanted) ([]*follower.Answer, error) {
	c := l.s.o.Config()
	if l.conn == nil {
		dialCtx, cancel := context.WithTimeout(ctx, c.Timeout)
		nc, err := l.s.o.Dial(dialCtx, l.src.id)
		cancel()
		if err != nil {
			return nil, fmt.Errorf("connect to broker %d: %w", l.src.id, err)
		}
		l.conn, l.session = peer.NewKafka(nc), session{}
	}
	req := l.session.request(batch, c, l.s.o.Self, l.s.o.Epoch())
	if l.to != nil {
		req.MaxWaitMillis = 0
		if l.allLevel(batch) {
			req.MaxWaitMillis = int32(handOverWait.Milliseconds())
		}
	}
	resp := req.ResponseKind().(*kmsg.FetchResponse)
	if err := l.conn.RoundTrip(ctx, req, resp, c.MaxWait+c.Timeout); err != nil {
		l.hangUp()
		return nil, fmt.Errorf("fetch from broker %d: %w", l.src.id, err)
	}
	if resp.ErrorCode != 0 {
		l.session = session{} // the next fetch begins another
		if resp.ErrorCode == kerr.FetchSessionIDNotFound.Code || resp.ErrorCode == kerr.InvalidFetchSessionEpoch.Code {
			return make([]*follower.Answer, len(batch)), nil
		}
		return nil, fmt.Errorf("fetch from broker %d: %w", l.src.id, kerr.ErrorForCode(resp.ErrorCode))
	}
	l.session.accepted(resp)
	at := make(map[key]int, len(batch))
	for i, w := range batch {
		at[w.m.key()] = i
	}
	answers := make([]*follower.Answer, len(batch))
	for i := range resp.Topics {
		t := &resp.Topics[i]
		for j := range t.Partitions {
			if n, ok := at[key{tp.UUID(t.TopicID), t.Partitions[j].Partition}]; ok {
				answers[n] = answer(&t.Partitions[j], c)
			}
		}
	}
	return answers, nil
}

func (l *lane) allLevel(batch []wanted) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !slices.ContainsFunc(batch, func(w wanted) bool { return w.m.next == nil })
}

func answer(p *kmsg.FetchResponseTopicPartition, c Config) *follower.Answer {
	a := &follower.Answer{HighWatermark: p.HighWatermark, LogStart: p.LogStartOffset, Records: p.RecordBatches, Full: len(p.RecordBatches) >= int(c.MaxBytes)/2}
	if p.DivergingEpoch.EndOffset >= 0 {
		a.Diverging, a.Epoch, a.EndOffset = true, p.DivergingEpoch.Epoch, p.DivergingEpoch.EndOffset
	}
	a.Err = kerr.ErrorForCode(p.ErrorCode)
	switch p.ErrorCode {
	case 0:
	case kerr.OffsetOutOfRange.Code:
		a.Code = follower.OutOfRange
	case kerr.OffsetMovedToTieredStorage.Code:
		a.Code = follower.MovedToTier
	case kerr.FencedLeaderEpoch.Code:
		a.Code = follower.Fenced
	default:
		a.Code = follower.TryAgain
	}
	return a
}

// errClosed is a connection that was closed under a request.
var errClosed = errors.New("closed")
