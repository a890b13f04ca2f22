package reader

import (
	"context"
	"fmt"

	"golang.org/x/time/rate"
)

// flight is one fetch that any number of callers may wait for. piece and err are set before done is closed.
type flight struct {
	done   chan struct{}
	piece  *piece
	err    error
	wanted bool
}

// load returns a piece from the cache, or fetches it. The fetch goes on when ctx ends.
func (r *Reader) load(ctx context.Context, k key, fetch func(context.Context) (*piece, error)) (*piece, error) {
	p, f, err := r.begin(k, r.o.Workers+r.o.MaxPending, fetch)
	if p != nil || err != nil {
		return p, err
	}
	select {
	case <-f.done:
		return f.piece, f.err
	case <-ctx.Done():
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-f.done: // it came at the last moment
		return f.piece, f.err
	default:
	}
	f.wanted = true
	r.o.Metrics.abandoned.Inc()
	return nil, fmt.Errorf("remote read: %w", context.Cause(ctx))
}

// begin returns a cached piece or a flight for it, which it starts unless limit flights are under way.
func (r *Reader) begin(k key, limit int, fetch func(context.Context) (*piece, error)) (*piece, *flight, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, nil, ErrClosed
	}
	if p := r.cacheOf(k).get(k); p != nil {
		r.o.Metrics.hit(k.kind)
		return p, nil, nil
	}
	if f := r.flights[k]; f != nil {
		return nil, f, nil
	}
	if len(r.flights) >= limit {
		r.o.Metrics.busy.Inc()
		return nil, nil, ErrBusy
	}
	r.o.Metrics.miss(k.kind)
	f := &flight{done: make(chan struct{})}
	r.flights[k] = f
	r.running.Add(1)
	go r.fly(k, f, fetch)
	return nil, f, nil
}

func (r *Reader) cacheOf(k key) *cache {
	if k.kind == kindBlock {
		return r.blocks
	}
	return r.indexes
}

func (r *Reader) fly(k key, f *flight, fetch func(context.Context) (*piece, error)) {
	defer r.running.Done()
	ctx, cancel := context.WithTimeout(r.base, r.o.FetchTimeout)
	defer cancel()
	var p *piece
	var err error
	select {
	case r.workers <- struct{}{}:
		p, err = fetch(ctx)
		<-r.workers
	case <-ctx.Done():
		err = fmt.Errorf("remote read: %w", ctx.Err())
	}
	if err != nil && r.base.Err() != nil {
		err = ErrClosed
	}
	if err != nil {
		r.o.Metrics.failed(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.flights, k)
	f.piece, f.err = p, err
	if err == nil {
		r.cacheOf(k).put(k, p, f.wanted)
	}
	close(f.done)
}

func wait(ctx context.Context, l *rate.Limiter, n int64) error {
	if l == nil || l.Limit() == rate.Inf || l.Burst() <= 0 {
		return nil
	}
	for n > 0 {
		k := min(n, int64(l.Burst()))
		if err := l.WaitN(ctx, int(k)); err != nil {
			return err
		}
		n -= k
	}
	return nil
}
