package direct

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/directfetch"
)

// ahead is the read-ahead of a Transport: its streams, their memory, and the breaker. The Transport's mutex guards it.
type ahead struct {
	streams   map[streamKey]*stream
	byPart    map[partKey][]*stream
	holds     map[partKey]hold
	locals    map[partKey]local
	finding   map[streamKey]*found // questions to the Locator
	questions int                  // of them, under way
	breaker   breaker
	used      int64     // bytes of buffers
	hungry    []*stream // wait for memory, first come first served
	free      [][]byte  // buffers of RangeBytes for reuse
}

// hold keeps a range of offsets away from direct reads, after its object turned out to be of no use.
type hold struct {
	from, to int64
	until    time.Time
}

// crowded reports that there is as much read-ahead as memory has room for, a least range each. Whoever comes now is served by the
// broker: a client may name tens of thousands of partitions in one small request.
func (t *Transport) crowded() bool {
	return int64(len(t.ahead.streams)) >= max(t.cfg.MemoryBytes/minRange, leastStreams)
}

// local is from where on a broker was found to have a partition's records itself, and until when that counts.
type local struct {
	from  int64
	until time.Time
}

// passes reports whether a Fetch may go to the broker as it is: all that it asks for was found to be the broker's own a moment ago, so
// that nothing is to be had from the bucket. A reader that keeps up costs no more than a pass through a proxy, and is looked at
// again from time to time, as its data grow old.
func (t *Transport) passes(c *conn, req *kmsg.FetchRequest) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	for i := range req.Topics {
		topic := &req.Topics[i]
		for k := range topic.Partitions {
			p := &topic.Partitions[k]
			key := c.partKey(topic.Topic, topic.TopicID, p.Partition)
			if l := t.ahead.locals[key]; p.FetchOffset < l.from || !now.Before(l.until) || len(t.ahead.byPart[key]) > 0 {
				return false
			}
		}
	}
	return len(req.Topics) > 0
}

// check says what is wrong with a location for an offset, "" if nothing.
func (t *Transport) check(loc *directfetch.Location, offset int64) (cause, string) {
	switch {
	case !slices.Contains(t.formats, loc.Format):
		return causeFormat, "format " + loc.Format
	case offset < loc.BaseOffset || offset > loc.EndOffset:
		return causeLocation, fmt.Sprintf("offsets %d to %d", loc.BaseOffset, loc.EndOffset)
	case loc.EndOffset == math.MaxInt64:
		return causeLocation, "endless"
	case loc.ValidityMs <= 0:
		return causeExpired, "no validity"
	}
	return "", ""
}

// validity is for how long a location can be used.
func validity(loc *directfetch.Location) time.Duration {
	return time.Duration(min(loc.ValidityMs, int64(24*time.Hour/time.Millisecond))) * time.Millisecond
}

// open begins read-ahead for a request at an offset, with a range of about hint bytes: what the client takes at once if it waits for it.
// Another request that waits at the offset keeps its own, or the two would take it from each other for ever.
func (t *Transport) open(key streamKey, loc directfetch.Location, m marks, list aborted, hint int64, by *directfetch.Use) *stream {
	if old := t.ahead.streams[key]; old != nil && !old.busy {
		t.drop(old)
	}
	if all := t.ahead.byPart[key.partKey]; len(all) >= maxStreams {
		oldest := -1
		for i, s := range all {
			if !s.busy && (oldest < 0 || s.used.Before(all[oldest].used)) {
				oldest = i
			}
		}
		if oldest >= 0 {
			t.drop(all[oldest])
		}
	}
	s := &stream{key: key, loc: loc, marks: m, expires: m.at.Add(validity(&loc)), used: m.at, by: by, aborted: list, nextPos: loc.StartPosition, depth: 1,
		first: min(max(hint, minRange), t.cfg.RangeBytes),
		split: splitter{next: key.next, end: loc.EndOffset, left: loc.EndPosition - loc.StartPosition, maxBatch: t.cfg.MaxBatchBytes}}
	s.ctx, s.cancel = context.WithCancel(t.ctx)
	t.ahead.streams[key] = s
	t.ahead.byPart[key.partKey] = append(t.ahead.byPart[key.partKey], s)
	t.stats.locations++
	t.pump(s)
	return s
}

// move files a stream under its new next offset.
func (t *Transport) move(s *stream, from streamKey) {
	if t.ahead.streams[from] == s {
		delete(t.ahead.streams, from)
	}
	if other := t.ahead.streams[s.key]; other != nil && other != s && !other.busy {
		t.drop(other)
	}
	t.ahead.streams[s.key] = s
}

// drop ends a stream and frees its memory.
func (t *Transport) drop(s *stream) {
	if s.dropped {
		return
	}
	s.dropped = true
	s.cancel()
	if t.ahead.streams[s.key] == s {
		delete(t.ahead.streams, s.key)
	}
	if rest := slices.DeleteFunc(t.ahead.byPart[s.key.partKey], func(o *stream) bool { return o == s }); len(rest) > 0 {
		t.ahead.byPart[s.key.partKey] = rest
	} else {
		delete(t.ahead.byPart, s.key.partKey)
	}
	for i := range s.ready {
		t.unref(s.ready[i].chunk)
	}
	s.ready, s.readySize = nil, 0
	t.freeFlights(s)
	s.signal()
}

// dropPart ends all read-ahead of a partition, whose leadership or log changed.
func (t *Transport) dropPart(key partKey) {
	for _, s := range slices.Clone(t.ahead.byPart[key]) {
		t.drop(s)
	}
}

// freeFlights frees the ranges that are over and that nobody will split. Those under way are freed by their reader.
func (t *Transport) freeFlights(s *stream) {
	for _, f := range s.flights {
		if f.over {
			t.unref(f.chunk)
		}
	}
	s.flights = nil
}

// unref gives up one use of a buffer.
func (t *Transport) unref(c *chunk) {
	if c.refs--; c.refs > 0 {
		return
	}
	t.ahead.used -= c.size
	c.stream.held--
	if int64(cap(c.b)) == t.cfg.RangeBytes && len(t.ahead.free) < t.cfg.RangesPerPartition && t.ahead.used+int64(len(t.ahead.free)+1)*t.cfg.RangeBytes <= t.cfg.MemoryBytes {
		t.ahead.free = append(t.ahead.free, c.b[:cap(c.b)])
	}
	c.b = nil
	t.pump(c.stream)
	for len(t.ahead.hungry) > 0 && t.ahead.used+minRange <= t.cfg.MemoryBytes {
		s := t.ahead.hungry[0]
		t.ahead.hungry = t.ahead.hungry[1:]
		s.hungry = false
		t.pump(s)
		if s.hungry {
			break
		}
	}
}

// release gives back what was written to a client.
func (t *Transport) release(chunks []*chunk) {
	if len(chunks) == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range chunks {
		t.unref(c)
	}
}

// newChunk takes memory for a stream.
func (t *Transport) newChunk(s *stream, size int64) *chunk {
	c := &chunk{size: size, refs: 1, stream: s}
	t.ahead.used += size
	s.held++
	return c
}

// pump begins as many ranges as depth and memory allow. A stream without any buffer may always begin one, of the least
// size if memory is short, so that no partition waits for another's consumer.
func (t *Transport) pump(s *stream) {
	for !s.dropped && s.failed == "" && s.held < s.depth && s.nextPos < s.loc.EndPosition {
		size := t.cfg.RangeBytes
		if s.nextPos == s.loc.StartPosition {
			size = s.first
		}
		if room := t.cfg.MemoryBytes - t.ahead.used; size > room {
			if s.held > 0 {
				if room < minRange {
					if !s.hungry {
						s.hungry = true
						t.ahead.hungry = append(t.ahead.hungry, s)
					}
					return
				}
				size = room
			} else {
				size = max(room, minRange)
			}
		}
		f := &flight{start: s.nextPos, end: min(s.nextPos+size, s.loc.EndPosition), segment: s.segment()}
		s.nextPos = f.end
		f.chunk = t.newChunk(s, f.end-f.start)
		n := f.end - f.start
		if last := len(t.ahead.free) - 1; last >= 0 && n > t.cfg.RangeBytes/2 {
			f.chunk.b = t.ahead.free[last][:n]
			t.ahead.free = t.ahead.free[:last]
		}
		s.flights = append(s.flights, f)
		t.wg.Add(1)
		go t.read(s, f)
	}
}

// read fetches one range and splits what is in order.
func (t *Transport) read(s *stream, f *flight) {
	defer t.wg.Done()
	n := f.end - f.start
	if f.chunk.b == nil {
		if n > t.cfg.RangeBytes/2 {
			f.chunk.b = make([]byte, n, t.cfg.RangeBytes)
		} else {
			f.chunk.b = make([]byte, n)
		}
	}
	begin := time.Now()
	err := t.fetch(s.ctx, f)
	took := time.Since(begin)
	t.mu.Lock()
	defer t.mu.Unlock()
	f.over, f.err = true, err
	if err == nil {
		t.stats.requests++
		t.stats.bytes += n
		s.by.Requests++
		s.by.Bytes += n
		t.latency.Observe(took.Seconds())
		t.ahead.breaker.succeeded(time.Now())
	}
	if s.dropped || s.failed != "" {
		t.unref(f.chunk)
		return
	}
	t.splitReady(s)
}

// fetch reads a range into its buffer, which it fills.
func (t *Transport) fetch(ctx context.Context, f *flight) (err error) {
	defer func() { err = withoutGrants(err, &f.segment) }()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	timer := time.AfterFunc(t.cfg.ConnectTimeout, func() { cancel(ErrConnectTimeout) })
	defer timer.Stop()
	defer func() {
		if err != nil && ctx.Err() != nil {
			if c := context.Cause(ctx); !errors.Is(err, c) {
				err = fmt.Errorf("%w: %w", c, err)
			}
		}
	}()
	defer guard(&err)
	body, err := t.cfg.Fetcher.FetchLogSegment(ctx, f.segment, f.start, f.end)
	if err != nil {
		return err
	}
	if body == nil {
		return fmt.Errorf("%w: no body and no error", errPanic)
	}
	defer body.Close()
	if !timer.Stop() && ctx.Err() != nil {
		return ErrConnectTimeout
	}
	reading := time.AfterFunc(t.cfg.ReadTimeout, func() { cancel(ErrReadTimeout) })
	defer reading.Stop()
	stop := context.AfterFunc(ctx, func() { body.Close() })
	defer stop()
	if n, err := io.ReadFull(body, f.chunk.b); err != nil {
		return fmt.Errorf("%d of %d bytes from %d: %w", n, len(f.chunk.b), f.start, err)
	}
	return nil
}

// withoutGrants hides granted URLs in an error, which goes to the log: a fetcher's HTTP client likes to repeat what it asked for.
func withoutGrants(err error, s *Segment) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	for _, g := range []Grant{s.LogGrant, s.ManifestGrant} {
		if g == "" {
			continue
		}
		text = strings.ReplaceAll(text, string(g), g.String())
		if _, query, _ := strings.Cut(string(g), "?"); query != "" {
			text = strings.ReplaceAll(text, query, g.String())
		}
	}
	if text == err.Error() {
		return err
	}
	return &hiddenError{text, err}
}

// hiddenError is an error with another text.
type hiddenError struct {
	text string
	err  error
}

func (e *hiddenError) Error() string { return e.text }
func (e *hiddenError) Unwrap() error { return e.err }

// guard makes a panic of foreign code an error.
func guard(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("%w: %v", errPanic, p)
	}
}

// splitReady splits the ranges that are next in order, without the mutex while it does so.
func (t *Transport) splitReady(s *stream) {
	if s.splitting {
		return
	}
	s.splitting = true
	for !s.dropped && s.failed == "" && len(s.flights) > 0 && s.flights[0].over {
		f := s.flights[0]
		s.flights = s.flights[1:]
		if f.err != nil {
			t.fail(s, causeOf(f.err), f.err)
			t.unref(f.chunk)
			break
		}
		t.mu.Unlock()
		pieces, err := s.split.feed(f.chunk.b)
		t.mu.Lock()
		if s.dropped {
			t.unref(f.chunk)
			break
		}
		for _, p := range pieces {
			c := f.chunk
			if p.own != nil {
				c = t.newChunk(s, int64(len(p.own)))
				c.b, p.at, p.size, p.own = p.own, 0, len(p.own), nil
			} else {
				c.refs++
			}
			s.ready = append(s.ready, batch{p, c})
			s.readySize += int64(p.size)
		}
		if err != nil {
			t.fail(s, causeOf(err), err)
		} else if s.split.left == 0 {
			s.done = true
		}
		t.unref(f.chunk)
		s.signal()
		t.pump(s)
	}
	s.splitting = false
}

// fail ends a stream behind what it has ready.
func (t *Transport) fail(s *stream, c cause, err error) {
	s.failed = c
	s.cancel()
	t.freeFlights(s)
	t.stats.errors[c]++
	now := time.Now()
	t.cfg.Logger.Warn("direct read failed, the broker is asked instead", "topic", s.key.topic, "partition", s.key.partition, "object", s.loc.ObjectKey, "cause", string(c), "error", err)
	if c.ofObject() {
		t.hold(s.key.partKey, &s.loc, now)
	} else if t.ahead.breaker.failed(now) {
		t.stats.rests++
		t.cfg.Logger.Warn("direct reads rest", "for", t.ahead.breaker.rest.String())
	}
	s.signal()
}

// hold keeps a segment away from direct reads for a while.
func (t *Transport) hold(key partKey, loc *directfetch.Location, now time.Time) {
	t.ahead.holds[key] = hold{from: loc.BaseOffset, to: loc.EndOffset, until: now.Add(t.cfg.RestMax)}
}

// held reports whether an offset is kept away.
func (t *Transport) held(key partKey, offset int64, now time.Time) bool {
	h, ok := t.ahead.holds[key]
	return ok && h.from <= offset && offset <= h.to && now.Before(h.until)
}

// sweep drops what nobody asked for and what is over.
func (t *Transport) sweep(now time.Time) {
	for _, s := range t.ahead.streams {
		if !s.busy && (now.Sub(s.used) >= t.cfg.IdleTimeout || !now.Before(s.expires)) {
			t.drop(s)
		}
	}
	for key, l := range t.ahead.locals {
		if !now.Before(l.until) {
			delete(t.ahead.locals, key)
		}
	}
	for key, h := range t.ahead.holds {
		if !now.Before(h.until) {
			delete(t.ahead.holds, key)
		}
	}
	for key, f := range t.ahead.finding {
		if f.stale(now) {
			delete(t.ahead.finding, key)
		}
	}
	if len(t.ahead.streams) == 0 {
		t.ahead.free = nil
	}
}
