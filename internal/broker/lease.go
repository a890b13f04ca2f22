package broker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/varve-io/varve/internal/control"
	"github.com/varve-io/varve/internal/controller"
)

// lease is how long this broker may lead without a word from the controller.
type lease struct {
	mu    sync.Mutex
	ended bool
}

func (l *lease) held() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.ended
}

// enter makes the broker one that clients see: its heartbeat says that it is ready, and it waits until the controller has
// believed it and its partitions live by that.
func (b *broker) enter(ctx context.Context) error {
	b.notReady("waiting to be unfenced")
	for {
		changed := *b.changed.Load()
		if me, ok := b.applied.Load().Brokers[b.self]; ok && me.Epoch == b.epoch.Load() && !me.Fenced {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// keepSession sends heartbeats until ctx ends. When the controller has not answered for broker.session.timeout.ms, it has
// fenced this broker or cannot be reached: others may lead, so this one stops to.
func (b *broker) keepSession(ctx context.Context) error {
	interval := b.static.Millis("broker.heartbeat.interval.ms")
	session := b.static.Millis("broker.session.timeout.ms")
	timer := time.NewTimer(0)
	defer timer.Stop()
	expiry := time.AfterFunc(session, func() { b.suspend(true) })
	defer expiry.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		sent := time.Now()
		attempt, cancel := context.WithTimeout(ctx, session)
		reply, err := b.beat(attempt, false)
		cancel()
		switch {
		case err == nil:
			expiry.Reset(time.Until(sent.Add(session)))
			b.suspend(false)
			if reply.Fenced {
				timer.Reset(min(interval, 100*time.Millisecond)) // it was forgotten for a while
				continue
			}
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, controller.ErrFenced):
			// Somebody else has this id now, or it was unregistered.
			b.suspend(true)
			return fmt.Errorf("this run of broker %d is over: %w", b.self, err)
		default:
			b.log.Warn("the controller did not answer a heartbeat", "cause", err)
			timer.Reset(min(interval, 200*time.Millisecond))
			continue
		}
		timer.Reset(interval)
	}
}

func (b *broker) beat(ctx context.Context, leave bool) (controller.HeartbeatReply, error) {
	return control.Record[controller.HeartbeatReply](ctx, b.control, controller.HeartbeatCommand{Broker: b.self, Epoch: b.epoch.Load(), Applied: b.applied.Load().Index,
		Ready: !leave, Leave: leave, Thin: b.thin()})
}

// suspend stops or resumes leading, wherever this broker leads.
func (b *broker) suspend(suspended bool) {
	b.lease.mu.Lock()
	defer b.lease.mu.Unlock()
	if b.lease.ended == suspended {
		return
	}
	b.lease.ended = suspended
	if suspended {
		b.log.Error("the controller has not answered for broker.session.timeout.ms: this broker stops leading until it does")
	} else {
		b.log.Info("the controller answers again")
	}
	for _, p := range b.replicas.all() {
		p.Suspend(suspended)
	}
}

// leave asks the controller to move the leaderships of this broker away and waits until that is done, for at most limit.
// The quorum's leadership goes next, so that nobody has to wait for a time-out.
func (b *broker) leave(limit time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if b.epoch.Load() < 0 || len(b.quorum.Image().Brokers) < 2 {
		return
	}
	for {
		reply, err := b.beat(ctx, true)
		if err != nil {
			b.log.Warn("leaderships were not moved away", "cause", err)
			break
		}
		if reply.Leave {
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
		if ctx.Err() != nil {
			b.log.Warn("not all leaderships were moved away in time")
			break
		}
	}
	if b.quorum.Leading() {
		b.warn("the lead of the quorum was not handed on", b.quorum.TransferLeadership(ctx))
	}
}
