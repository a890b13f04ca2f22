package direct

import (
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/directfetch"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/wire"
)

const (
	maxFetchVersion = 18
	// pollSlice is how long the broker may keep a request while an object read may end any moment.
	pollSlice = 50 * time.Millisecond
	// refreshPause is the least time between two questions of one request for the marks of a partition.
	refreshPause = 100 * time.Millisecond
	// errSessionNotFound is Kafka's FETCH_SESSION_ID_NOT_FOUND: there are no sessions here.
	errSessionNotFound = 70
	// OFFSET_OUT_OF_RANGE and OFFSET_NOT_AVAILABLE, where a replica's log ends before the offset.
	errOffsetOutOfRange   = 1
	errOffsetNotAvailable = 78
	// FENCED_LEADER_EPOCH and UNKNOWN_LEADER_EPOCH, where another leader than the one asked about leads.
	errFencedLeaderEpoch  = 74
	errUnknownLeaderEpoch = 75
)

// want is one partition of a client's Fetch and what is known about it so far.
type want struct {
	topic  int // index of the topic in the request
	req    *kmsg.FetchRequestTopicPartition
	key    streamKey
	stream *stream
	looked bool      // the stream was looked up
	plain  bool      // this offset must come from the broker
	asked  time.Time // when the broker last answered this request about it
	act    action
	stale  bool // marks should be refreshed
	answer *kmsg.FetchResponseTopicPartition
	found  *found // the question to the Locator, and its answer until it was used
	local  bool   // the Locator said that the broker is to be asked
}

// settled reports whether the broker's answer is what the client gets.
func (w *want) settled() bool {
	a := w.answer
	return a != nil && (a.ErrorCode != 0 || len(a.RecordBatches) > 0 || a.DivergingEpoch.EndOffset != -1 || a.PreferredReadReplica >= 0)
}

// job answers one Fetch.
type job struct {
	c        *conn
	t        *Transport
	h        wire.Header
	req      *kmsg.FetchRequest
	up       int16 // version towards the broker
	wants    []*want
	wake     chan struct{}
	deadline time.Time
	head     kmsg.FetchResponse // what is not of a topic, from the broker's answers
	over     bool               // the client is over its quota, and hears that alone
	held     int64              // bytes of records from the broker that wait for the answer's turn, see conn.held
	chunks   []*chunk
}

func newJob(c *conn, h wire.Header, req *kmsg.FetchRequest) *job {
	j := &job{c: c, t: c.t, h: h, req: req, up: max(h.Version, directfetch.MinVersion), wake: make(chan struct{}, 1)}
	for i := range req.Topics {
		topic := &req.Topics[i]
		for k := range topic.Partitions {
			p := &topic.Partitions[k]
			key := streamKey{c.partKey(topic.Topic, topic.TopicID, p.Partition), req.IsolationLevel == 1, p.FetchOffset}
			j.wants = append(j.wants, &want{topic: i, req: p, key: key})
		}
	}
	return j
}

// run waits for the broker and the read-ahead as the client asked for, and composes the answer.
func (j *job) run() (reply, error) {
	if j.h.Version >= 7 && j.req.SessionID != 0 {
		j.head.ErrorCode = errSessionNotFound
		return reply{parts: encodeFetch(j.h.Correlation, j.h.Version, &j.head, nil)}, nil
	}
	defer j.letGo()
	j.deadline = time.Now().Add(time.Duration(max(j.req.MaxWaitMillis, 0)) * time.Millisecond)
	for {
		enough, asks, wait := j.look()
		if len(asks) > 0 {
			if err := j.forward(asks, wait, enough); err != nil {
				return reply{}, err
			}
			if j.head.ErrorCode != 0 || j.over {
				return reply{parts: encodeFetch(j.h.Correlation, j.h.Version, &j.head, nil)}, nil
			}
			continue
		}
		left := time.Until(j.deadline)
		if enough || left <= 0 {
			return j.compose(), nil
		}
		timer := time.NewTimer(left)
		select {
		case <-j.wake:
		case <-timer.C:
		case <-j.c.ctx.Done():
			timer.Stop()
			return reply{}, errBroken
		}
		timer.Stop()
	}
}

// look plans every partition. enough says that the answer may go out; asks are what the broker has to be asked for, with
// how long it may wait.
func (j *job) look() (enough bool, asks []*want, wait time.Duration) {
	j.t.mu.Lock()
	defer j.t.mu.Unlock()
	now := time.Now()
	size := 0
	waiting := false
	var idle []*want // asked before, and there was nothing
	for _, w := range j.wants {
		if w.settled() {
			size += len(w.answer.RecordBatches)
			enough = enough || len(w.answer.RecordBatches) == 0
			continue
		}
		j.plan(w, now)
		due := w.stream != nil && w.stale && now.Sub(w.asked) >= max(j.t.cfg.MarksMaxAge, refreshPause)
		pending := j.c.locates && j.consult(w, due, now)
		switch {
		case w.act == actServe:
			size += w.stream.size(int(w.req.PartitionMaxBytes))
			enough = enough || w.stream.done || w.stream.failed != "" // it will not become more
		case w.act == actWait, w.act == actTag && pending:
			waiting = true
		case w.answer == nil:
			asks = append(asks, w)
		default:
			idle = append(idle, w)
		}
		// A Locator that is slow does not make the marks older than twice as old as they may be.
		if due && (!pending || now.Sub(w.stream.marks.at) >= 2*j.t.cfg.MarksMaxAge) {
			asks = append(asks, w)
		}
	}
	enough = enough || size >= int(max(j.req.MinBytes, 0)) && (size > 0 || j.req.MinBytes <= 0 && !waiting)
	left := j.deadline.Sub(now)
	if enough || left <= 0 {
		return enough, asks, 0
	}
	asks = append(asks, idle...)
	if waiting {
		left = min(left, pollSlice)
	}
	return enough, asks, left
}

// plan decides about one partition; the mutex is held.
func (j *job) plan(w *want, now time.Time) {
	t := j.t
	if !w.looked {
		w.looked = true
		if s := t.ahead.streams[w.key]; s != nil && !s.busy {
			j.claim(w, s, now)
		}
	}
	if w.stream != nil && w.stream.dropped {
		w.stream = nil
	}
	v := view{epoch: w.req.CurrentLeaderEpoch, capable: w.req.FetchOffset >= 0 && !w.local, plain: w.plain,
		resting: t.ahead.breaker.resting(now), held: t.held(w.key.partKey, w.req.FetchOffset, now)}
	if w.stream != nil {
		v.stream = w.stream.view()
	}
	d := plan(v, now, t.cfg.MarksMaxAge)
	w.act, w.stale = d.act, d.refresh
	if d.fallback != "" {
		j.fallback(w, d.fallback, now)
	}
	if d.drop {
		t.drop(w.stream)
		w.stream = nil
	}
}

// fallback sends a partition to the broker; the mutex is held.
func (j *job) fallback(w *want, c cause, now time.Time) {
	j.t.stats.fallbacks[c]++
	if c == causeExpired && w.stream != nil {
		j.t.hold(w.key.partKey, &w.stream.loc, now)
	}
	w.plain, w.answer, w.act = true, nil, actPlain
}

func (j *job) claim(w *want, s *stream, now time.Time) {
	s.busy, s.used, s.wake = true, now, j.wake
	w.stream = s
	j.askAhead(w, s, now)
}

// letGo gives the streams back.
func (j *job) letGo() {
	j.t.mu.Lock()
	defer j.t.mu.Unlock()
	for _, w := range j.wants {
		if s := w.stream; s != nil {
			s.busy, s.wake = false, nil
			if j.t.ahead.streams[s.key] != s {
				j.t.drop(s) // another one is filed there, and nobody would find this
			}
		}
	}
}

// forward asks the broker about some partitions, in the client's name, and takes its answer in.
func (j *job) forward(asks []*want, wait time.Duration, enough bool) error {
	if j.c.locates {
		located, left := j.hear(asks)
		if len(located) > 0 {
			return j.atEnd(located) // the others come next, and how long they may wait depends on these
		}
		if asks = left; len(asks) == 0 {
			return nil
		}
	}
	req := kmsg.NewPtrFetchRequest()
	*req = *j.req
	req.Version = j.up
	req.SessionID, req.SessionEpoch, req.ForgottenTopics, req.Topics = 0, -1, nil, nil
	req.MaxWaitMillis = int32(wait.Milliseconds())
	if req.MinBytes = max(j.req.MinBytes, 1); enough || wait <= 0 {
		req.MaxWaitMillis, req.MinBytes = 0, 0
	}
	req.MaxBytes = j.room(asks)
	byKey := make(map[partKey]*want, len(asks))
	last := -1
	tags := false
	for _, w := range asks {
		if w.topic != last {
			t := j.req.Topics[w.topic]
			t.Partitions = nil
			req.Topics = append(req.Topics, t)
			last = w.topic
		}
		p := *w.req
		p.UnknownTags = kmsg.Tags{}
		w.req.UnknownTags.Each(func(tag uint32, value []byte) { p.UnknownTags.Set(tag, value) })
		if w.act != actPlain && j.c.direct {
			directfetch.Request(&p)
			tags = true
		}
		t := &req.Topics[len(req.Topics)-1]
		t.Partitions = append(t.Partitions, p)
		byKey[w.key.partKey] = w
	}
	req.UnknownTags = kmsg.Tags{}
	j.req.UnknownTags.Each(func(tag uint32, value []byte) { req.UnknownTags.Set(tag, value) })
	if tags {
		directfetch.SetFormats(req, j.t.formats)
	}
	return j.exchange(req, byKey, j.take)
}

// askBroker sends a Fetch on the client's connection.
func (j *job) askBroker(req *kmsg.FetchRequest) (*kmsg.FetchResponse, error) {
	if j.c.direct {
		j.c.report(req)
	}
	frame, err := j.c.ask(j.c.ctx, j.h.ClientID, req)
	if err != nil {
		return nil, err
	}
	return parseFetchResponse(frame[4:], j.up)
}

// exchange asks the broker and calls take, with the mutex, for each partition of the answer that was asked about.
func (j *job) exchange(req *kmsg.FetchRequest, byKey map[partKey]*want, take func(*want, *kmsg.FetchResponseTopicPartition, time.Time)) error {
	resp, err := j.askBroker(req)
	if err != nil {
		return err
	}
	if err := j.hold(resp); err != nil {
		return err
	}
	j.head.ThrottleMillis = max(j.head.ThrottleMillis, resp.ThrottleMillis)
	j.head.ErrorCode = resp.ErrorCode
	j.head.UnknownTags = resp.UnknownTags
	if len(resp.Brokers) > 0 {
		j.head.Brokers = j.c.endpoints(resp.Brokers)
	}
	// So brokers answer without a session who is over the quota, and clients know it.
	if j.over = len(resp.Topics) == 0 && resp.ThrottleMillis > 0; j.over {
		return nil
	}
	j.t.mu.Lock()
	defer j.t.mu.Unlock()
	now := time.Now()
	for i := range resp.Topics {
		t := &resp.Topics[i]
		for k := range t.Partitions {
			p := &t.Partitions[k]
			if w := byKey[j.c.partKey(t.Topic, t.TopicID, p.Partition)]; w != nil {
				take(w, p, now)
				delete(byKey, w.key.partKey)
			}
		}
	}
	for _, w := range byKey { // an answer must be somewhat complete, or this would ask for ever
		if w.stream != nil {
			w.asked = now
		} else if w.answer == nil {
			return fmt.Errorf("%w: the broker's answer lacks partition %d of %q", errFrame, w.key.partition, w.key.topic)
		}
	}
	return nil
}

// hold counts the records of an answer.
func (j *job) hold(resp *kmsg.FetchResponse) error {
	n := int64(0)
	for i := range resp.Topics {
		for k := range resp.Topics[i].Partitions {
			n += int64(len(resp.Topics[i].Partitions[k].RecordBatches))
		}
	}
	j.held += n
	return j.c.hold(n)
}

// room is how many bytes of records the broker may send: what the client allows, less what is ready in front.
func (j *job) room(asks []*want) int32 {
	first := asks[0]
	j.t.mu.Lock()
	defer j.t.mu.Unlock()
	left := int64(j.req.MaxBytes)
	for _, w := range j.wants {
		if w == first {
			break
		}
		if w.stream != nil && len(w.stream.ready) > 0 {
			left -= int64(w.stream.size(int(w.req.PartitionMaxBytes)))
		} else if w.answer != nil {
			left -= int64(len(w.answer.RecordBatches))
		}
	}
	return int32(max(left, 1))
}

// take deals with the broker's answer about one partition; the mutex is held.
func (j *job) take(w *want, p *kmsg.FetchResponseTopicPartition, now time.Time) {
	t := j.t
	w.asked = now
	t.stats.brokerBytes += int64(len(p.RecordBatches))
	locations, err := directfetch.Locations(p)
	if p.ErrorCode != 0 {
		t.dropPart(w.key.partKey)
		w.stream, w.answer = nil, p
		return
	}
	m := marks{p.HighWatermark, p.LastStableOffset, p.LogStartOffset, now}
	loc := find(locations, w.req.FetchOffset)
	if s := w.stream; s != nil && !s.dropped {
		switch {
		case len(p.RecordBatches) > 0:
			t.drop(s)
		case loc == nil || loc.SegmentID == s.loc.SegmentID && loc.LeaderEpoch == s.loc.LeaderEpoch && loc.ObjectKey == s.loc.ObjectKey:
			s.marks = m
			if loc != nil && loc.ValidityMs > 0 {
				s.expires = now.Add(validity(loc))
				s.loc.LogGrant, s.loc.ManifestGrant = loc.LogGrant, loc.ManifestGrant
			}
			return
		default:
			t.drop(s)
		}
	}
	w.stream = nil
	if len(p.RecordBatches) > 0 || w.act == actPlain || len(locations) == 0 && err == nil {
		w.answer = p
		own := w.act == actTag || j.c.locates && !t.cfg.Locator.Tiered(w.query())
		if own && (len(p.RecordBatches) > 0 || w.req.FetchOffset >= p.HighWatermark) {
			t.ahead.locals[w.key.partKey] = local{w.req.FetchOffset, now.Add(t.cfg.MarksMaxAge)}
		}
		return
	}
	c, what := causeLocation, "offset is in none"
	switch {
	case err != nil:
		what = err.Error()
	case loc != nil:
		if c, what = t.check(loc, w.req.FetchOffset); c == "" {
			w.answer = nil
			if s := t.ahead.streams[w.key]; s != nil && !s.busy && s.loc.SegmentID == loc.SegmentID && s.loc.LeaderEpoch == loc.LeaderEpoch {
				j.claim(w, s, now) // it was asked for ahead, and came just now
				return
			}
			if t.crowded() {
				w.plain, w.act = true, actPlain
				return
			}
			s := t.open(w.key, *loc, m, p.AbortedTransactions, int64(w.req.PartitionMaxBytes), &j.c.use)
			j.claim(w, s, now)
			return
		}
		t.hold(w.key.partKey, loc, now)
	}
	t.stats.errors[c]++
	t.cfg.Logger.Warn("location is of no use, the broker is asked instead", "topic", w.key.topic, "partition", w.key.partition, "cause", string(c), "error", what)
	j.fallback(w, c, now)
}

// find returns the first location that holds an offset; nil if none does.
func find(locations []directfetch.Location, offset int64) *directfetch.Location {
	for i := range locations {
		if l := &locations[i]; l.BaseOffset <= offset && offset <= l.EndOffset {
			return l
		}
	}
	return nil
}

// compose cuts the answer out of the read-ahead and what the broker said, in the client's order and within its limits:
// only the very first batch may exceed them (KIP-74).
func (j *job) compose() reply {
	j.t.mu.Lock()
	defer j.t.mu.Unlock()
	now := time.Now()
	left, taken := int(max(j.req.MaxBytes, 0)), false
	topics := make([]topicParts, len(j.req.Topics))
	for i := range topics {
		topics[i].topic.Topic, topics[i].topic.TopicID = j.req.Topics[i].Topic, j.req.Topics[i].TopicID
	}
	for _, w := range j.wants {
		p := &part{resp: kmsg.NewFetchResponseTopicPartition()}
		switch {
		case w.answer != nil:
			p.resp = *w.answer
			if b := trim(w.answer.RecordBatches, min(left, int(max(w.req.PartitionMaxBytes, 0))), !taken); len(b) > 0 {
				p.records = [][]byte{b}
			}
		case w.stream != nil:
			j.serve(w, p, left, !taken, now)
		default:
			// Nothing is known of it yet, or no longer. Kafka's consumer throws away a full answer that lacks a partition.
			p.resp.HighWatermark = -1
			if w.key.committed {
				p.resp.AbortedTransactions = aborted{}.upTo(0)
			}
		}
		p.resp.Partition = w.key.partition
		if n := p.size(); n > 0 {
			left, taken = left-n, true
		}
		topics[w.topic].parts = append(topics[w.topic].parts, p)
	}
	r := reply{parts: encodeFetch(j.h.Correlation, j.h.Version, &j.head, topics)}
	if chunks := j.chunks; len(chunks) > 0 {
		r.release = func() { j.t.release(chunks) }
	}
	return r
}

// serve fills a partition's answer from its read-ahead; the mutex is held.
func (j *job) serve(w *want, p *part, left int, minOne bool, now time.Time) {
	s := w.stream
	r := &p.resp
	r.HighWatermark, r.LastStableOffset, r.LogStartOffset, r.PreferredReadReplica = s.marks.high, s.marks.stable, s.marks.start, -1
	if w.key.committed {
		r.AbortedTransactions = aborted{}.upTo(0)
	}
	if s.dropped {
		return
	}
	from := s.key
	out, ok := s.take(min(int(w.req.PartitionMaxBytes), left), minOne)
	if !ok {
		return
	}
	p.records, r.AbortedTransactions = out.records, out.aborted
	j.chunks = append(j.chunks, out.chunks...)
	j.t.stats.served += int64(p.size())
	s.used, s.depth = now, j.t.cfg.RangesPerPartition
	if s.done && len(s.ready) == 0 {
		s.key = from
		j.askAhead(w, s, now)
		j.t.drop(s) // the next offset is beyond the location, and maybe another stream's
		return
	}
	j.t.move(s, from)
	j.t.pump(s)
	j.askAhead(w, s, now)
}

// trim cuts records to whole batches within limit; with minOne the first may be larger.
func trim(records []byte, limit int, minOne bool) []byte {
	if len(records) <= limit {
		return records
	}
	n := 0
	for n < len(records) {
		h, err := recordbatch.ParseHeader(records[n:])
		if err != nil || n+h.Size > len(records) || n+h.Size > limit && !(n == 0 && minOne) {
			break
		}
		n += h.Size
		if n > limit {
			break
		}
	}
	return records[:n]
}
