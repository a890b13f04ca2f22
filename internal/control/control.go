// Package control is the way to the active controller: it computes a command's records from the newest image, proposes
// them, and waits until this broker lives by them. Commands run one at a time, so that each sees what the one before did.
package control

import (
	"context"
	"errors"
	"sync"

	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/metadata"
)

// Quorum is what the client needs of the metadata log.
type Quorum interface {
	Image() *metadata.Image
	Propose(ctx context.Context, records []metadata.Record) (*metadata.Image, error)
}

// Client runs commands. It is safe for concurrent use.
type Client struct {
	quorum Quorum
	env    func() controller.Env
	await  func(context.Context, *metadata.Image) error

	mu sync.Mutex
}

// New returns a client. env supplies what commands may know of this moment; await returns when the broker has reconciled
// itself to an image at least as new as the given one.
func New(q Quorum, env func() controller.Env, await func(context.Context, *metadata.Image) error) *Client {
	return &Client{quorum: q, env: env, await: await}
}

// Command computes records from an image; no records means that nothing has to change.
type Command func(img *metadata.Image, env controller.Env) ([]metadata.Record, error)

// Do runs a command and returns when its records are durable and this broker has acted on them.
func (c *Client) Do(ctx context.Context, command Command) error {
	img, err := c.propose(ctx, command)
	if err != nil {
		return err
	}
	return c.await(ctx, img)
}

// Record runs a command and returns when its records are durable. The broker acts on them in its own time, so this may be
// called from what the broker waits for.
func (c *Client) Record(ctx context.Context, command Command) error {
	_, err := c.propose(ctx, command)
	return err
}

func (c *Client) propose(ctx context.Context, command Command) (*metadata.Image, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	img := c.quorum.Image()
	records, err := command(img, c.env())
	if err != nil || len(records) == 0 {
		return img, err
	}
	return c.quorum.Propose(ctx, records)
}

// ErrNoProducerIDs is returned when a block of producer ids could not be reserved.
var ErrNoProducerIDs = errors.New("no producer id could be reserved")

// ProducerIDs hands out producer ids from blocks that the controller reserves.
type ProducerIDs struct {
	client *Client

	mu        sync.Mutex
	next, end int64
}

// NewProducerIDs returns an allocator with no block yet.
func NewProducerIDs(c *Client) *ProducerIDs { return &ProducerIDs{client: c} }

// Next returns an id that no other call anywhere returns.
func (p *ProducerIDs) Next(ctx context.Context) (int64, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.next == p.end {
		var first int64
		err := p.client.Record(ctx, func(img *metadata.Image, _ controller.Env) ([]metadata.Record, error) {
			var records []metadata.Record
			first, records = controller.AllocateProducerIDs(img)
			return records, nil
		})
		if err != nil {
			return 0, errors.Join(ErrNoProducerIDs, err)
		}
		p.next, p.end = first, first+controller.ProducerIDBlock
	}
	id := p.next
	p.next++
	return id, nil
}
