package kafkatier

import (
	"container/list"
	"context"
	"sync"

	"github.com/varve-io/varve/internal/tp"
)

// pieceKey names an index of a segment.
type pieceKey struct {
	segment tp.UUID
	kind    indexKind
}

// pieces caches indexes, the least recently used going first. Each is read once however many ask for it, and read on if they
// give up, so that a slow store does not starve who comes again. Failures are not kept.
type pieces struct {
	ctx   context.Context
	limit int64
	wg    sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	size    int64
	entries map[pieceKey]*list.Element
	order   list.List // of *piece, the latest in front
	flights map[pieceKey]*flight
}

type piece struct {
	key  pieceKey
	data []byte
}

type flight struct {
	done chan struct{}
	data []byte
	err  error
}

func newPieces(ctx context.Context, limit int64) *pieces {
	return &pieces{ctx: ctx, limit: limit, entries: map[pieceKey]*list.Element{}, flights: map[pieceKey]*flight{}}
}

// get returns an index from the cache or through fetch. Its bytes must not be changed.
func (c *pieces) get(ctx context.Context, key pieceKey, fetch func(context.Context) ([]byte, error)) ([]byte, error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, context.Canceled
	}
	if e := c.entries[key]; e != nil {
		c.order.MoveToFront(e)
		c.mu.Unlock()
		return e.Value.(*piece).data, nil
	}
	f := c.flights[key]
	if f == nil {
		f = &flight{done: make(chan struct{})}
		c.flights[key] = f
		c.wg.Go(func() { c.fly(key, f, fetch) })
	}
	c.mu.Unlock()
	select {
	case <-f.done:
		return f.data, f.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (c *pieces) fly(key pieceKey, f *flight, fetch func(context.Context) ([]byte, error)) {
	ctx, cancel := context.WithTimeout(c.ctx, pieceLimit)
	defer cancel()
	f.data, f.err = fetch(ctx)
	c.mu.Lock()
	delete(c.flights, key)
	if f.err == nil {
		c.entries[key] = c.order.PushFront(&piece{key, f.data})
		c.size += cost(f.data)
		for c.size > c.limit && c.order.Len() > 1 {
			p := c.order.Remove(c.order.Back()).(*piece)
			delete(c.entries, p.key)
			c.size -= cost(p.data)
		}
	}
	c.mu.Unlock()
	close(f.done)
}

// cost is what a piece takes, of which an empty one takes something too.
func cost(b []byte) int64 { return int64(len(b)) + 200 }

// wait ends the cache, whose context is over, and waits for what is being read.
func (c *pieces) wait() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.wg.Wait()
}
