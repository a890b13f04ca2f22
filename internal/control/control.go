// Package control is the way to the active controller, wherever it is, and the active controller's loop on the node that
// leads the quorum.
//
// The loop runs commands in order against a working image and makes the records of many durable as one entry, while the
// next ones gather. A node that does not lead sends its commands to the one that does, over a connection between nodes, and
// follows where that leads.
//
// A command that was sent and not answered has an unknown outcome. Commands that may run twice are sent again, the others
// fail with ErrUnknownOutcome. Everything is safe for concurrent use.
package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/peer"
	"github.com/varve-io/varve/internal/quorum"
)

// service is the name of control connections among those between nodes.
const service = "control"

var (
	// ErrUnknownOutcome is returned if the active controller went away with the command: it may have been carried out.
	ErrUnknownOutcome = errors.New("the active controller went away: it is not known whether the command was carried out")
	// ErrBusy is returned if too many commands wait for the active controller.
	ErrBusy = errors.New("the active controller has too many commands waiting")
)

// Quorum is what is needed of the metadata log.
type Quorum interface {
	Image() *metadata.Image
	Propose(ctx context.Context, base *metadata.Image, records []metadata.Record) (*metadata.Image, error)
	Leadership() (quorum.Leadership, <-chan struct{})
	Status() quorum.Status
	AddVoter(ctx context.Context, id int32, address string) error
	AddNonvoter(ctx context.Context, id int32, address string) error
	DemoteVoter(ctx context.Context, id int32) error
	Remove(ctx context.Context, id int32) error
}

// Options of New.
type Options struct {
	NodeID int32
	Quorum Quorum
	// Hub connects to the other nodes; the service "control" is registered with it. nil for a node that is alone.
	Hub *peer.Hub
	// Env is what commands may know of this moment: Now, Random, Broker and TierAvailable. The rest is added here.
	Env func() controller.Env
	// Await returns when this broker's partitions live by an image of at least this index; nil does not wait.
	Await func(ctx context.Context, index uint64) error
	// Bootstrap lists the addresses of nodes to ask for the leader when none is known here.
	Bootstrap func() []string
	// SessionTimeout and Grace are broker.session.timeout.ms and varve.broker.disconnect.grace.ms.
	SessionTimeout, Grace time.Duration
	TickInterval          time.Duration // between looks for silent brokers; 0 means 100 ms
	ForwardTimeout        time.Duration // one attempt to have another node run a command; 0 means 5 s
	Logger                *slog.Logger
}

// Client runs commands at the active controller.
type Client struct {
	o Options

	mu     sync.Mutex
	active *active           // while this node leads
	beats  map[int32]*served // the connection that carried a node's last heartbeat
	links  map[string]*link  // by address
	next   int               // of Bootstrap to ask
	over   bool
}

// New returns a client; Run makes it work.
func New(o Options) *Client {
	if o.TickInterval <= 0 {
		o.TickInterval = 100 * time.Millisecond
	}
	if o.ForwardTimeout <= 0 {
		o.ForwardTimeout = 5 * time.Second
	}
	if o.SessionTimeout <= 0 {
		o.SessionTimeout = 9 * time.Second
	}
	if o.Bootstrap == nil {
		o.Bootstrap = func() []string { return nil }
	}
	c := &Client{o: o, beats: map[int32]*served{}, links: map[string]*link{}}
	if o.Hub != nil {
		o.Hub.Handle(service, c.serve)
	}
	return c
}

// Run is the active controller whenever this node leads the quorum, and owns the connections to the others. It returns when
// ctx has ended and all that it started has.
func (c *Client) Run(ctx context.Context) error {
	defer c.hangUp()
	for {
		l, turned := c.o.Quorum.Leadership()
		if l.Leading {
			c.lead(ctx, l, turned)
		}
		select {
		case <-turned:
		case <-ctx.Done():
			return nil
		}
	}
}

// Do runs a command and returns what it answered when its records are durable and this broker lives by them.
func (c *Client) Do(ctx context.Context, command controller.Command) (any, error) {
	a, err := c.route(ctx, task{command: command})
	if err != nil {
		return a.reply, err
	}
	if c.o.Await == nil {
		return a.reply, nil
	}
	return a.reply, c.o.Await(ctx, a.index)
}

// Record runs a command and returns when its records are durable. The broker acts on them in its own time, so this may be
// called from what the broker waits for.
func (c *Client) Record(ctx context.Context, command controller.Command) (any, error) {
	a, err := c.route(ctx, task{command: command})
	return a.reply, err
}

// Do is Client.Do with the type of the answer.
func Do[R any](ctx context.Context, c *Client, command controller.Command) (R, error) {
	reply, err := c.Do(ctx, command)
	return typed[R](command, reply, err)
}

// Record is Client.Record with the type of the answer.
func Record[R any](ctx context.Context, c *Client, command controller.Command) (R, error) {
	reply, err := c.Record(ctx, command)
	return typed[R](command, reply, err)
}

func typed[R any](command controller.Command, reply any, err error) (R, error) {
	r, ok := reply.(R)
	if err == nil && !ok {
		err = fmt.Errorf("%T was answered with a %T", command, reply)
	}
	return r, err
}

// ErrNoProducerIDs is returned when a block of producer ids could not be reserved.
var ErrNoProducerIDs = errors.New("no producer id could be reserved")

// ProducerIDs hands out producer ids from blocks that the controller reserves.
type ProducerIDs struct {
	client *Client

	turn      chan struct{} // of one place: who holds it has what follows, and may wait for the controller
	next, end int64
}

// NewProducerIDs returns an allocator with no block yet.
func NewProducerIDs(c *Client) *ProducerIDs {
	return &ProducerIDs{client: c, turn: make(chan struct{}, 1)}
}

// Next returns an id that no other call anywhere returns.
func (p *ProducerIDs) Next(ctx context.Context) (int64, error) {
	select {
	case p.turn <- struct{}{}:
		defer func() { <-p.turn }()
	case <-ctx.Done():
		return 0, errors.Join(ErrNoProducerIDs, ctx.Err())
	}
	if p.next == p.end {
		first, err := Record[int64](ctx, p.client, controller.ProducerIDsCommand{})
		if err != nil {
			return 0, errors.Join(ErrNoProducerIDs, err)
		}
		p.next, p.end = first, first+controller.ProducerIDBlock
	}
	id := p.next
	p.next++
	return id, nil
}
