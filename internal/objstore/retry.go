package objstore

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"time"
)

// RetryPolicy bounds retries. Attempts counts the first one; pauses grow from Base by doubling up to Max, each
// drawn from the upper half of its span so that many clients spread out. Zero fields take the defaults 5, 100 ms, 5 s.
type RetryPolicy struct {
	Attempts  int
	Base, Max time.Duration
}

func (p RetryPolicy) filled() RetryPolicy {
	if p.Attempts <= 0 {
		p.Attempts = 5
	}
	if p.Base <= 0 {
		p.Base = 100 * time.Millisecond
	}
	if p.Max <= 0 {
		p.Max = 5 * time.Second
	}
	return p
}

// Pause is how long to wait after the given attempt (1 is the first) has failed.
func (p RetryPolicy) Pause(attempt int) time.Duration {
	p = p.filled()
	d := p.Max
	if attempt < 30 {
		d = min(p.Max, p.Base<<(attempt-1))
	}
	return d/2 + rand.N(d/2+1)
}

// Retry calls fn until it succeeds, fails for good (see Retriable), the attempts are used up or ctx ends. It
// returns fn's last error.
func Retry(ctx context.Context, p RetryPolicy, fn func(attempt int) error) error {
	p = p.filled()
	for attempt := 1; ; attempt++ {
		err := fn(attempt)
		if err == nil || !Retriable(err) || attempt >= p.Attempts || ctx.Err() != nil {
			return err
		}
		t := time.NewTimer(p.Pause(attempt))
		select {
		case <-ctx.Done():
			t.Stop()
			return err
		case <-t.C:
		}
	}
}

// WithRetries repeats failed operations of b. A create-only put that finds the object after an attempt that
// failed with unknown effect succeeds if the object's bytes are its own. A body that breaks off is continued
// from where it stopped.
func WithRetries(b Bucket, p RetryPolicy) Bucket { return &retrying{b, p.filled()} }

type retrying struct {
	b Bucket
	p RetryPolicy
}

func (r *retrying) String() string { return r.b.String() }

func (r *retrying) Put(ctx context.Context, key string, body io.ReaderAt, size int64, opts PutOptions) error {
	return Retry(ctx, r.p, func(attempt int) error {
		err := r.b.Put(ctx, key, body, size, opts)
		if attempt > 1 && errors.Is(err, ErrExists) {
			same, cerr := Same(ctx, r.b, key, body, size)
			if cerr != nil && !errors.Is(cerr, ErrNotFound) {
				return cerr
			}
			if same {
				return nil
			}
		}
		return err
	})
}

func (r *retrying) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	g := &resumingReader{r: r, ctx: ctx, key: key, off: max(off, 0), n: n}
	if err := g.open(); err != nil {
		return nil, err
	}
	return g, nil
}

// resumingReader reopens its range after an error in mid body, at most Attempts-1 times without progress.
type resumingReader struct {
	r      *retrying
	ctx    context.Context
	key    string
	off, n int64 // what is still to come; n < 0: to the end
	body   io.ReadCloser
	fails  int
}

func (g *resumingReader) open() error {
	return Retry(g.ctx, g.r.p, func(int) (err error) {
		g.body, err = g.r.b.Get(g.ctx, g.key, g.off, g.n)
		return err
	})
}

func (g *resumingReader) Read(p []byte) (int, error) {
	for {
		if g.body == nil {
			return 0, io.ErrClosedPipe
		}
		n, err := g.body.Read(p)
		if n > 0 {
			g.off += int64(n)
			if g.n >= 0 {
				g.n -= int64(n)
			}
			g.fails = 0
			if err != nil && err != io.EOF {
				err = nil // comes again at the next call
			}
			return n, err
		}
		if err == nil || err == io.EOF {
			return n, err
		}
		if g.fails++; g.fails >= g.r.p.Attempts || !Retriable(err) || g.ctx.Err() != nil {
			return 0, err
		}
		g.body.Close()
		t := time.NewTimer(g.r.p.Pause(g.fails))
		select {
		case <-g.ctx.Done():
			t.Stop()
			return 0, err
		case <-t.C:
		}
		if err := g.open(); err != nil {
			g.body = nil
			return 0, err
		}
	}
}

func (g *resumingReader) Close() error {
	if g.body == nil {
		return nil
	}
	err := g.body.Close()
	g.body = nil
	return err
}

func (r *retrying) Stat(ctx context.Context, key string) (info Info, err error) {
	err = Retry(ctx, r.p, func(int) error {
		info, err = r.b.Stat(ctx, key)
		return err
	})
	return info, err
}

// List continues after the last object that fn has seen; fn's own error is never retried.
func (r *retrying) List(ctx context.Context, prefix, after string, fn func(Info) error) error {
	var stop error
	err := Retry(ctx, r.p, func(int) error {
		err := r.b.List(ctx, prefix, after, func(info Info) error {
			if stop = fn(info); stop == nil {
				after = info.Key
			}
			return stop
		})
		if stop != nil {
			return nil
		}
		return err
	})
	if stop != nil {
		return stop
	}
	return err
}

func (r *retrying) Delete(ctx context.Context, key string) error {
	return Retry(ctx, r.p, func(int) error { return r.b.Delete(ctx, key) })
}

func (r *retrying) PresignGet(ctx context.Context, key string, ttl time.Duration) (string, error) {
	return r.b.PresignGet(ctx, key, ttl)
}

// ListUploads is not retried in the middle: uploads have no order to resume from.
func (r *retrying) ListUploads(ctx context.Context, prefix string, fn func(Upload) error) error {
	return ListUploads(ctx, r.b, prefix, fn)
}

func (r *retrying) AbortUpload(ctx context.Context, u Upload) error {
	return Retry(ctx, r.p, func(int) error { return AbortUpload(ctx, r.b, u) })
}
