package control

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/quorum"
)

// task is something for the node that leads: a command, or an act on the quorum.
type task struct {
	command controller.Command
	act     act
	id      int32
	address string
}

type act uint8

const (
	actCommand act = iota
	actAddVoter
	actRemoveVoter
	actStatus
	actGoodbye // of a connection: its end is no sign of a failure
)

func (t task) String() string {
	switch t.act {
	case actCommand:
		return fmt.Sprintf("%T", t.command)
	case actAddVoter:
		return "add a voter"
	case actRemoveVoter:
		return "remove a voter"
	}
	return "describe the quorum"
}

// repeatable tasks may be carried out twice.
func (t task) repeatable() bool {
	switch t.command.(type) {
	case controller.HeartbeatCommand, controller.RegisterCommand, controller.BootstrapCommand, controller.TickCommand, controller.AlterPartitionsCommand, controller.ProducerIDsCommand:
		return true
	}
	return t.act == actAddVoter || t.act == actStatus
}

// answer is what a task led to, and the index of the image that holds it.
type answer struct {
	reply any
	index uint64
}

// notLeader says that a node did not run a task since it does not lead, and which one does as far as it knows.
type notLeader struct{ address string }

func (notLeader) Error() string { return "the node asked is not the active controller" }

// unreached means that a task was not sent.
type unreached struct{ cause error }

func (e unreached) Error() string { return e.cause.Error() }
func (e unreached) Unwrap() error { return e.cause }

// lost means that a task was sent, or run, and that nothing is known of its outcome.
type lost struct{ cause error }

func (e lost) Error() string { return e.cause.Error() }
func (e lost) Unwrap() error { return e.cause }

var errOver = errors.New("this node is stopping and sends no more commands")

const (
	retryMin = 10 * time.Millisecond
	retryMax = 500 * time.Millisecond
)

// route has a task carried out by the node that leads.
func (c *Client) route(ctx context.Context, t task) (answer, error) {
	pause, hint := retryMin, ""
	for {
		a, err := c.attempt(ctx, t, hint)
		hint = ""
		var not notLeader
		var gone lost
		switch {
		case err == nil:
			return a, nil
		case errors.As(err, &not):
			hint = not.address
		case errors.As(err, &gone):
			if !t.repeatable() {
				return a, fmt.Errorf("%w: %w", ErrUnknownOutcome, gone.cause)
			}
		case !errors.As(err, new(unreached)):
			return a, err
		}
		if ctx.Err() != nil {
			return a, fmt.Errorf("%s: %w: %w", t, ctx.Err(), err)
		}
		if hint != "" && pause == retryMin {
			pause *= 2 // the first hint is followed at once
			continue
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, retryMax)
		case <-ctx.Done():
			return a, fmt.Errorf("%s: %w: %w", t, ctx.Err(), err)
		}
	}
}

// attempt tries one node: this one if it leads, else the one of hint, the leader as it is known here, or the next of Bootstrap.
func (c *Client) attempt(ctx context.Context, t task, hint string) (answer, error) {
	c.mu.Lock()
	active, over := c.active, c.over
	c.mu.Unlock()
	if active != nil {
		return c.perform(ctx, active, t, -1)
	}
	if over {
		return answer{}, errOver
	}
	if c.o.Hub == nil {
		return answer{}, notLeader{}
	}
	status := c.o.Quorum.Status()
	address := hint
	switch {
	case address != "":
	case status.Leader == c.o.NodeID:
		return answer{}, notLeader{} // it is about to begin, or to end
	case status.Leader >= 0 && status.LeaderAddress != "":
		address = status.LeaderAddress
	default:
		list := c.o.Bootstrap()
		if len(list) == 0 {
			return answer{}, notLeader{}
		}
		c.mu.Lock()
		c.next++
		address = list[c.next%len(list)]
		c.mu.Unlock()
	}
	ctx, cancel := context.WithTimeout(ctx, c.o.ForwardTimeout)
	defer cancel()
	l, err := c.link(ctx, address)
	if err != nil {
		return answer{}, unreached{err}
	}
	return l.call(ctx, t, func() bool {
		s := c.o.Quorum.Status()
		return s.Leader >= 0 && s.Leader != status.Leader && s.LeaderAddress != address
	})
}

// perform carries a task out on this node, for itself (from is -1) or for another one.
func (c *Client) perform(ctx context.Context, active *active, t task, from int32) (answer, error) {
	if t.act == actCommand {
		return active.submit(ctx, t.command, from)
	}
	a, err := c.admin(ctx, active, t)
	switch {
	case errors.Is(err, quorum.ErrOutcomeUnknown):
		return a, lost{err}
	case errors.Is(err, quorum.ErrNotController):
		return a, notLeader{}
	}
	return a, err
}
