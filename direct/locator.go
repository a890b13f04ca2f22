package direct

import (
	"context"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/directfetch"
	"github.com/varve-io/varve/internal/tp"
)

// Query is an offset that a client wants, as its Fetch names it.
type Query struct {
	Topic       string   // empty where the client uses ids (Fetch v13 and later)
	TopicID     [16]byte // zero where it uses names
	Partition   int32
	Offset      int64
	LeaderEpoch int32 // that the client knows, -1 none
	Committed   bool  // read_committed: Location.Aborted is needed
}

// Location says which bytes of which object hold the batches from an offset on.
type Location struct {
	SegmentID      [16]byte
	ObjectKey      string // key of the log object
	Format         string // storage format, one of Fetcher.Formats
	CustomMetadata []byte // opaque; nil if none
	BaseOffset     int64  // first offset of the segment
	EndOffset      int64  // last offset of the range, inclusive
	StartPosition  int64  // first byte, the start of a batch at or before the offset
	// EndPosition is the end of the range, exclusive: the end of a batch at or behind the one that holds EndOffset. What is
	// between is not delivered.
	EndPosition int64
	Size        int64 // plain bytes of the whole log
	LeaderEpoch int32 // of the partition, for which all this holds; -1 if that is not known
	// Validity is for how long, from now on, the location may be used.
	Validity time.Duration
	// Aborted are the aborted transactions with a record in [Query.Offset, EndOffset], in no order. Only for read_committed.
	Aborted []AbortedTransaction
	// HighWatermark of the partition, as fresh as it is known. The broker is asked at this offset, where it has nothing to
	// read, whether the client may read the partition, and for the present marks.
	HighWatermark int64
	// Archived says that the broker itself no longer has these offsets: they lie below its log start.
	Archived bool
}

// AbortedTransaction is one that a read_committed client must leave out: a producer's batches from FirstOffset to its abort
// marker.
type AbortedTransaction struct{ ProducerID, FirstOffset int64 }

// Locator knows where tiered batches are, in place of a broker that does not announce the feature. It serves one cluster, and
// so does a Transport with a Locator. Package direct/kafkatier has one for Apache Kafka.
//
// It must be safe for concurrent use. What it says must hold for every record of the range: it is in the log of the present
// leader. Bytes are checked by the Transport.
type Locator interface {
	// Tiered reports whether Locate should be asked, at once and without I/O: false for an offset that is surely not in the
	// tier alone, such as any at the end of a log.
	Tiered(q Query) bool
	// Locate finds the location of an offset. Nil without an error is an offset that the broker should be asked for. Errors
	// should match the sentinels of this package; all lead to a fallback. It returns when ctx ends.
	Locate(ctx context.Context, q Query) (*Location, error)
}

// found is one question to the Locator and its answer, which stays for a request that comes soon: a client that does not wait
// would ask for ever otherwise. The Transport's mutex guards it.
type found struct {
	loc  *Location
	err  error
	over time.Time // zero while it is under way
	wake []chan struct{}
}

// foundFresh is how long an answer is kept that nobody took.
const foundFresh = time.Second

// maxQuestions bounds the questions to the Locator that are under way; more wait: clients choose what they ask about, and each question
// may make the Locator ask brokers and the store.
const maxQuestions = 256

func (f *found) stale(now time.Time) bool { return !f.over.IsZero() && now.Sub(f.over) >= foundFresh }

// query is what a Locator is asked about a partition of a request.
func (w *want) query() Query {
	return Query{Topic: w.key.topic, TopicID: w.key.id, Partition: w.key.partition, Offset: w.req.FetchOffset, LeaderEpoch: w.req.CurrentLeaderEpoch,
		Committed: w.key.committed}
}

// locate asks the Locator about a partition, in the background since it may have to read indexes; the mutex is held. Requests
// that come for the same offset meanwhile share the answer, so that a slow store is not asked again and again.
func (j *job) locate(w *want, now time.Time) {
	t := j.t
	f := t.ahead.finding[w.key]
	if f == nil || f.stale(now) {
		f = &found{}
		t.ahead.finding[w.key] = f
		q := w.query()
		t.ahead.questions++
		t.wg.Add(1)
		go func() {
			defer t.wg.Done()
			loc, err := t.ask(q)
			t.mu.Lock()
			defer t.mu.Unlock()
			t.ahead.questions--
			f.loc, f.err, f.over = loc, err, time.Now()
			for _, wake := range f.wake {
				select {
				case wake <- struct{}{}:
				default:
				}
			}
			f.wake = nil
		}()
	}
	if f.over.IsZero() {
		f.wake = append(f.wake, j.wake)
	}
	w.found = f
}

// ask asks the Locator, for no longer than one read of an object may take.
func (t *Transport) ask(q Query) (loc *Location, err error) {
	ctx, cancel := context.WithTimeout(t.ctx, t.cfg.ConnectTimeout+t.cfg.ReadTimeout)
	defer cancel()
	defer guard(&err)
	if loc, err = t.cfg.Locator.Locate(ctx, q); err != nil && ctx.Err() == context.DeadlineExceeded {
		err = ErrReadTimeout
	}
	return loc, err
}

// consult has the Locator asked where a partition's offset may be in the tier, or where it is due that a location is prolonged;
// the mutex is held. It reports whether the answer is still to come.
func (j *job) consult(w *want, due bool, now time.Time) (pending bool) {
	if w.act != actTag && !due {
		return false
	}
	if w.found == nil {
		// Who tells the epoch of its last record wants it compared with the log's, which the broker does.
		if w.act == actTag && (w.req.LastFetchedEpoch >= 0 || !j.t.cfg.Locator.Tiered(w.query())) {
			w.local, w.act = true, actPlain
			return false
		}
		if f := j.t.ahead.finding[w.key]; (f == nil || f.stale(now)) && j.t.ahead.questions >= maxQuestions {
			return w.act == actTag // and not the broker's, which may have no such offsets any more
		}
		j.locate(w, now)
	}
	return w.found.over.IsZero()
}

// hear parts those of which the Locator has said something, and of which the broker is to be asked at the log's end, from the
// others.
func (j *job) hear(asks []*want) (located, others []*want) {
	j.t.mu.Lock()
	defer j.t.mu.Unlock()
	now := time.Now()
	for _, w := range asks {
		f := w.found
		switch {
		case w.act == actPlain:
			others = append(others, w)
			continue
		case f == nil || f.over.IsZero(): // only the marks
			located = append(located, w)
			continue
		}
		if j.t.ahead.finding[w.key] == f {
			delete(j.t.ahead.finding, w.key)
		}
		if j.heard(w, f, now) {
			located = append(located, w)
		} else {
			others = append(others, w)
		}
	}
	return located, others
}

// located is what the Locator found, nil if it has not yet answered.
func (w *want) located() *Location {
	if w.found == nil || w.found.over.IsZero() {
		return nil
	}
	return w.found.loc
}

// heard takes in what the Locator said; the mutex is held. False sends the partition to the broker as it is.
func (j *job) heard(w *want, f *found, now time.Time) bool {
	epoch := w.req.CurrentLeaderEpoch
	if f.err == nil && f.loc != nil && (epoch < 0 || epoch == f.loc.LeaderEpoch) {
		return true
	}
	w.found = nil
	if f.err != nil {
		c := causeOf(f.err)
		j.t.stats.errors[c]++
		j.t.cfg.Logger.Warn("offset cannot be located, the broker is asked instead", "topic", w.key.topic, "partition", w.key.partition,
			"offset", w.req.FetchOffset, "cause", string(c), "error", f.err)
		if !c.ofObject() && j.t.ahead.breaker.failed(now) {
			j.t.stats.rests++
		}
		if w.stream == nil {
			j.fallback(w, c, now)
		}
	}
	if w.stream != nil && (f.err != nil || f.loc != nil) {
		return true // what there is may still be used, and the broker tells its marks
	}
	if w.stream != nil { // it was of another log, or what an election cut off
		j.t.drop(w.stream)
		w.stream = nil
	}
	w.local, w.act = true, actPlain
	return false
}

// atEnd asks the broker about the partitions that a Locator found, in the client's name: whether it leads them in the epoch
// that the client knows, whether the client may read them, and for their marks. It does so at the high watermark, where the
// broker has nothing to read.
func (j *job) atEnd(asks []*want) error {
	req := requestAtEnd(j.req, j.up)
	byKey := make(map[partKey]*want, len(asks))
	last := -1
	j.t.mu.Lock()
	for _, w := range asks {
		if w.topic != last {
			t := j.req.Topics[w.topic]
			t.Partitions = nil
			req.Topics = append(req.Topics, t)
			last = w.topic
		}
		high := int64(-1)
		if w.stream != nil {
			high = w.stream.marks.high
		}
		if loc := w.located(); loc != nil {
			high = max(high, loc.HighWatermark)
		}
		t := &req.Topics[len(req.Topics)-1]
		t.Partitions = append(t.Partitions, partitionAtEnd(w.req, high, w.epochAtEnd()))
		byKey[w.key.partKey] = w
	}
	j.t.mu.Unlock()
	return j.exchange(req, byKey, j.takeAtEnd)
}

// requestAtEnd is a client's Fetch without its partitions, to be answered at once.
func requestAtEnd(from *kmsg.FetchRequest, version int16) *kmsg.FetchRequest {
	req := kmsg.NewPtrFetchRequest()
	*req = *from
	req.Version, req.Topics = version, nil
	req.SessionID, req.SessionEpoch, req.ForgottenTopics = 0, -1, nil
	req.MaxWaitMillis, req.MinBytes, req.MaxBytes = 0, 0, 1
	return req
}

// partitionAtEnd asks at the high watermark, in the leader epoch that the client knows, or else in that of what is to be read: another
// leader may have another log.
func partitionAtEnd(from *kmsg.FetchRequestTopicPartition, high int64, epoch int32) kmsg.FetchRequestTopicPartition {
	p := *from
	p.FetchOffset, p.PartitionMaxBytes = high, 1
	if p.CurrentLeaderEpoch < 0 {
		p.CurrentLeaderEpoch = epoch
	}
	return p
}

// epochAtEnd is the leader epoch of what was found or is being read, -1 if it is not known.
func (w *want) epochAtEnd() int32 {
	if loc := w.located(); loc != nil {
		return loc.LeaderEpoch
	}
	if w.stream != nil {
		return w.stream.loc.LeaderEpoch
	}
	return -1
}

// takeAtEnd makes of the broker's answer at the log's end and the Locator's what a broker with the feature would have
// answered; the mutex is held.
func (j *job) takeAtEnd(w *want, p *kmsg.FetchResponseTopicPartition, now time.Time) {
	loc := w.located()
	if w.found != nil && !w.found.over.IsZero() {
		w.found = nil
	}
	j.t.stats.brokerBytes += int64(len(p.RecordBatches))
	// What is read ahead from below the log start was below it when it was found.
	archived := loc != nil && loc.Archived || w.stream != nil && w.req.FetchOffset < w.stream.marks.start
	if !merge(p, loc, w.query(), archived) {
		// The log is not what the Locator thought, or begins later by now. The broker knows what the client must be told.
		j.t.dropPart(w.key.partKey)
		w.stream, w.answer, w.local = nil, nil, true
		return
	}
	j.take(w, p, now)
}

// merge puts a location into the broker's answer at the end of the log. False says that the log is another than the location's:
// it ends before that does, as one does that was made anew under an old name, or begins behind the offset.
func merge(p *kmsg.FetchResponseTopicPartition, loc *Location, q Query, archived bool) bool {
	p.RecordBatches, p.AbortedTransactions = nil, nil
	switch p.ErrorCode {
	case errOffsetOutOfRange, errOffsetNotAvailable:
		return false
	case errFencedLeaderEpoch, errUnknownLeaderEpoch:
		if q.LeaderEpoch < 0 { // it was the Locator's, of which the client knows nothing
			return false
		}
	case 0:
		if q.Offset < p.LogStartOffset && !archived || loc != nil && loc.EndOffset >= p.HighWatermark {
			return false
		}
	}
	if p.ErrorCode != 0 || p.PreferredReadReplica >= 0 || p.DivergingEpoch.EndOffset != -1 || loc == nil {
		return true
	}
	if q.Committed {
		p.AbortedTransactions = []kmsg.FetchResponseTopicPartitionAbortedTransaction{}
		for _, a := range loc.Aborted {
			p.AbortedTransactions = append(p.AbortedTransactions, kmsg.FetchResponseTopicPartitionAbortedTransaction{ProducerID: a.ProducerID, FirstOffset: a.FirstOffset})
		}
	}
	directfetch.SetLocations(p, []directfetch.Location{{SegmentID: tp.UUID(loc.SegmentID), CustomMetadata: loc.CustomMetadata, ObjectKey: loc.ObjectKey, Format: loc.Format,
		BaseOffset: loc.BaseOffset, EndOffset: loc.EndOffset, StartPosition: loc.StartPosition, EndPosition: loc.EndPosition, SegmentSize: loc.Size,
		LeaderEpoch: loc.LeaderEpoch, ValidityMs: loc.Validity.Milliseconds()}})
	return true
}

// locateAhead asks the Locator for the location behind a stream, and the broker at the log's end. Nil is none.
func (j *job) locateAhead(topicIndex int, from kmsg.FetchRequestTopicPartition, q Query) (*kmsg.FetchResponse, error) {
	if !j.t.cfg.Locator.Tiered(q) {
		return nil, nil
	}
	loc, err := j.t.ask(q)
	if loc == nil || err != nil {
		return nil, err
	}
	req := requestAtEnd(j.req, j.up)
	topic := j.req.Topics[topicIndex]
	topic.Partitions = []kmsg.FetchRequestTopicPartition{partitionAtEnd(&from, loc.HighWatermark, loc.LeaderEpoch)}
	req.Topics = []kmsg.FetchRequestTopic{topic}
	resp, err := j.askBroker(req)
	if err != nil {
		return nil, err
	}
	for i := range resp.Topics {
		for k := range resp.Topics[i].Partitions {
			merge(&resp.Topics[i].Partitions[k], loc, q, loc.Archived)
		}
	}
	return resp, nil
}
