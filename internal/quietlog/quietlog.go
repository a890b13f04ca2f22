// Package quietlog is a slog.Handler that counts repeated warnings and errors instead of writing each: the first of a kind goes
// out at once, those of the next interval are counted, and the next one after it carries the count. Info and debug lines
// pass. A kind is a message with its cause; which partition, peer or object it was about does not make another kind.
package quietlog

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"
)

// Interval is how long lines of a kind are counted before one goes out again.
const Interval = time.Minute

// kindsMax bounds the kinds that are remembered; beyond it all are forgotten, which only costs repeated lines.
const kindsMax = 1024

// Handler wraps another handler. It is safe for concurrent use.
type Handler struct {
	next  slog.Handler
	state *state // shared by handlers made with WithAttrs and WithGroup
}

type state struct {
	mu    sync.Mutex
	kinds map[string]*kind
}

type kind struct {
	last    time.Time
	skipped int
}

// New wraps next.
func New(next slog.Handler) *Handler {
	return &Handler{next, &state{kinds: map[string]*kind{}}}
}

// Enabled asks the wrapped handler.
func (h *Handler) Enabled(ctx context.Context, l slog.Level) bool { return h.next.Enabled(ctx, l) }

// WithAttrs and WithGroup pass on to the wrapped handler and share the counts.
func (h *Handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &Handler{h.next.WithAttrs(attrs), h.state}
}

// WithGroup passes on to the wrapped handler and shares the counts.
func (h *Handler) WithGroup(name string) slog.Handler {
	return &Handler{h.next.WithGroup(name), h.state}
}

// Handle writes the record or counts it. Time is the record's own.
func (h *Handler) Handle(ctx context.Context, r slog.Record) error {
	if r.Level < slog.LevelWarn {
		return h.next.Handle(ctx, r)
	}
	key := r.Level.String() + r.Message
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "cause" {
			if r.Level < slog.LevelError {
				key += shape(a.Value.String())
			} else {
				key += a.Value.String() // each object that is in error is told of
			}
		}
		return true
	})
	skipped, ok := h.state.pass(key, r.Time)
	if !ok {
		return nil
	}
	if skipped > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int("repeated", skipped))
	}
	return h.next.Handle(ctx, r)
}

// shape leaves out of a cause what only says which object it was: keys, ids, paths and offsets. HTTP's codes of failure stay.
func shape(cause string) string {
	words := strings.Fields(cause)
	for i, w := range words {
		w = strings.Trim(w, `.,:;()"'`)
		number := strings.Trim(w, "0123456789") == ""
		status := len(w) == 3 && (w[0] == '4' || w[0] == '5')
		if len(w) >= 20 || number && !status {
			words[i] = "*"
		}
	}
	return strings.Join(words, " ")
}

func (s *state) pass(key string, now time.Time) (skipped int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kinds[key]
	if k == nil {
		if len(s.kinds) >= kindsMax {
			clear(s.kinds)
		}
		s.kinds[key] = &kind{last: now}
		return 0, true
	}
	if now.Sub(k.last) < Interval {
		k.skipped++
		return 0, false
	}
	skipped = k.skipped
	k.last, k.skipped = now, 0
	return skipped, true
}
