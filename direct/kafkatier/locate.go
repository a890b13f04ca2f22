package kafkatier

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
	"golang.org/x/sync/errgroup"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/remotelog"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tp"
)

const (
	// maxEpochs bounds the leader epochs that one location asks about.
	maxEpochs = 64
	// maxWalk bounds the later segments that are searched for the ends of transactions.
	maxWalk = 64
)

var errNoLeader = errors.New("leader could not be asked a moment ago")

// facts are what the leader said of a partition.
type facts struct {
	at      time.Time // zero: nothing yet
	topic   string
	id      tp.UUID
	epoch   int32 // leader epoch in which all this was said
	start   int64 // first offset that the leader has itself
	high    int64 // high watermark
	lineage remotelog.Lineage
	log     *followed // nil with layouts that list
}

// part finds or begins the record of a partition; nil if there are too many.
func (l *Locator) part(q direct.Query) *part {
	key := partKey{q.Topic, tp.UUID(q.TopicID), q.Partition}
	if q.Topic != "" {
		key.id = tp.UUID{}
	}
	p := l.parts[key]
	if p == nil {
		if len(l.parts) >= maxParts {
			return nil
		}
		p = &part{key: key}
		l.parts[key] = p
	}
	p.used = time.Now()
	return p
}

// Tiered implements direct.Locator.
func (l *Locator) Tiered(q direct.Query) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.part(q)
	if p == nil {
		return false
	}
	switch {
	case l.ctx.Err() != nil, !p.failed.IsZero() && time.Since(p.failed) < factsOld:
		return false
	case p.facts.at.IsZero():
		return true
	case p.facts.log == nil:
		return q.Offset < p.facts.start && p.listing.holds(q.Offset)
	case q.Offset >= p.facts.start && time.Since(p.facts.at) < factsOld:
		return false
	case !p.facts.log.caughtUp():
		return !p.waited
	}
	log := p.facts.log
	log.mu.Lock()
	defer log.mu.Unlock()
	return log.state.Holds(q.Offset)
}

// Locate implements direct.Locator.
func (l *Locator) Locate(ctx context.Context, q direct.Query) (*direct.Location, error) {
	l.mu.Lock()
	p := l.part(q)
	l.mu.Unlock()
	if p == nil {
		return nil, nil
	}
	f, err := l.ask(ctx, p, factsFresh)
	if err == nil && q.LeaderEpoch > f.epoch { // somebody leads by now
		f, err = l.ask(ctx, p, 0)
	}
	if err != nil {
		// Who cannot be asked here is asked by the client in a moment, with more to say about what is wrong.
		l.o.Logger.Debug("leader cannot be asked", "topic", q.Topic, "partition", q.Partition, "error", err)
		return nil, nil
	}
	if q.LeaderEpoch >= 0 && q.LeaderEpoch != f.epoch {
		return nil, nil
	}
	if lists, ok := l.layout.(lister); ok {
		return l.locateListed(ctx, lists, p, f, q)
	}
	if q.Offset >= f.start || !l.patient(ctx, p, f.log) {
		return nil, nil
	}
	s, end := l.find(ctx, p, f, q.Offset)
	if s == nil || l.isBad(s) || q.Committed && end < s.End {
		return nil, nil // what its indexes say of transactions is that of another lineage
	}
	loc, err := l.place(ctx, p, f, s, end, q)
	if err != nil && ofSegment(err) {
		l.setBad(s)
	}
	return loc, err
}

// patient waits, once for each partition, until the metadata topic was read.
func (l *Locator) patient(ctx context.Context, p *part, log *followed) bool {
	if log.caughtUp() {
		return true
	}
	timer := time.NewTimer(l.o.Patience)
	defer timer.Stop()
	select {
	case <-log.ready:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	l.mu.Lock()
	p.waited = true
	l.mu.Unlock()
	return false
}

// ofSegment says that an error is one segment's, and that asking again is of no use.
func ofSegment(err error) bool {
	for _, x := range []error{direct.ErrNotFound, direct.ErrDamaged, direct.ErrShort, direct.ErrUnknownFormat} {
		if errors.Is(err, x) {
			return true
		}
	}
	return false
}

func (l *Locator) isBad(s *remotelog.Segment) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Now().Before(l.bad[s.ID])
}

func (l *Locator) setBad(s *remotelog.Segment) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bad[s.ID] = time.Now().Add(badFor)
}

// ask returns facts that are not older than an age, from the leader if need be.
func (l *Locator) ask(ctx context.Context, p *part, age time.Duration) (facts, error) {
	p.asking.Lock()
	defer p.asking.Unlock()
	l.mu.Lock()
	old, failed := p.facts, p.failed
	l.mu.Unlock()
	if !old.at.IsZero() && time.Since(old.at) < age {
		return old, nil
	}
	if !failed.IsZero() && time.Since(failed) < factsFresh {
		return facts{}, errNoLeader // who waited for the mutex need not try again one by one
	}
	f, err := l.askLeader(ctx, p.key)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		p.failed = time.Now()
		return facts{}, err
	}
	f.log = old.log
	if f.lineage = old.lineage; old.epoch != f.epoch || old.id != f.id || f.lineage == nil {
		f.lineage = remotelog.Lineage{} // of another leader, or another topic of the name
	}
	if _, lists := l.layout.(lister); !lists && (f.log == nil || old.id != f.id) {
		f.log, p.waited = l.follow.get(userPartition{f.id, p.key.index}), false
	}
	p.facts, p.failed = f, time.Time{}
	return f, nil
}

func (l *Locator) askLeader(ctx context.Context, key partKey) (facts, error) {
	now := time.Now()
	t, err := describe(ctx, l.client, key)
	if err != nil {
		return facts{}, err
	}
	f := facts{at: now, topic: *t.Topic, id: tp.UUID(t.TopicID), epoch: -1}
	for _, x := range t.Partitions {
		if x.Partition != key.index {
			continue
		}
		if err := kerr.ErrorForCode(x.ErrorCode); err != nil && x.Leader < 0 {
			return facts{}, fmt.Errorf("%s-%d: %w", f.topic, key.index, err)
		}
		f.epoch = x.LeaderEpoch
	}
	if f.epoch < 0 {
		return facts{}, fmt.Errorf("%s-%d: leader epoch: %w", f.topic, key.index, errIncomplete)
	}
	begin := int64(earliestLocal)
	if _, lists := l.layout.(lister); lists {
		begin = earliest // the broker knows of no tier
	}
	var g errgroup.Group
	for at, to := range map[int64]*int64{begin: &f.start, latest: &f.high} {
		g.Go(func() error {
			got, err := listOffsets(ctx, l.client, f.topic, []int32{key.index}, f.epoch, at)
			*to = got[key.index]
			return err
		})
	}
	return f, g.Wait()
}

// find looks for the segment that holds an offset in the leader's lineage; nil if there is none, or no leader to ask.
func (l *Locator) find(ctx context.Context, p *part, f facts, offset int64) (*remotelog.Segment, int64) {
	f.log.mu.Lock()
	epochs := f.log.state.Epochs(offset)
	f.log.mu.Unlock()
	if len(epochs) > maxEpochs {
		return nil, -1
	}
	lineage := remotelog.Lineage{}
	for _, e := range epochs {
		end, err := l.epochEnd(ctx, p, f, e)
		if err != nil {
			return nil, -1
		}
		if end >= 0 {
			lineage[e] = end
		}
	}
	f.log.mu.Lock()
	defer f.log.mu.Unlock()
	s, end, _ := f.log.state.Find(offset, lineage)
	return s, end
}

// epochEnd is where a leader epoch ends in the leader's log, -1 if it is not in it.
func (l *Locator) epochEnd(ctx context.Context, p *part, f facts, epoch int32) (int64, error) {
	if epoch == f.epoch {
		return f.high, nil // and what lies above was never uploaded
	}
	l.mu.Lock()
	end, ok := f.lineage[epoch]
	l.mu.Unlock()
	if ok {
		return end, nil
	}
	req := kmsg.NewPtrOffsetForLeaderEpochRequest()
	t := kmsg.NewOffsetForLeaderEpochRequestTopic()
	t.Topic = f.topic
	x := kmsg.NewOffsetForLeaderEpochRequestTopicPartition()
	x.Partition, x.CurrentLeaderEpoch, x.LeaderEpoch = p.key.index, f.epoch, epoch
	t.Partitions = append(t.Partitions, x)
	req.Topics = append(req.Topics, t)
	resp, err := req.RequestWith(ctx, l.client)
	if err != nil {
		return -1, err
	}
	if len(resp.Topics) != 1 || len(resp.Topics[0].Partitions) != 1 {
		return -1, errIncomplete
	}
	got := resp.Topics[0].Partitions[0]
	if err := kerr.ErrorForCode(got.ErrorCode); err != nil {
		return -1, err
	}
	if end = got.EndOffset; got.LeaderEpoch != epoch {
		end = -1
	}
	l.mu.Lock()
	f.lineage[epoch] = end // while nobody else leads, what earlier leaders wrote stays as it is
	l.mu.Unlock()
	return end, nil
}

func (l *Locator) index(ctx context.Context, s *remotelog.Segment, kind indexKind) ([]byte, error) {
	b, err := l.pieces.get(ctx, pieceKey{s.ID, kind}, func(ctx context.Context) ([]byte, error) { return l.layout.index(ctx, s, kind) })
	if err != nil && !errors.Is(err, errNoIndex) {
		err = fmt.Errorf("index of segment %s: %w", s.ID, err)
	}
	return b, err
}

// place makes the location of an offset in a segment that is valid up to end.
func (l *Locator) place(ctx context.Context, p *part, f facts, s *remotelog.Segment, end int64, q direct.Query) (*direct.Location, error) {
	object, err := l.layout.object(s)
	if err != nil {
		return nil, err
	}
	loc := &direct.Location{SegmentID: object.SegmentID, ObjectKey: object.ObjectKey, Format: object.Format, CustomMetadata: object.CustomMetadata, Size: object.Size,
		BaseOffset: s.Start, LeaderEpoch: f.epoch, Validity: l.o.Validity, HighWatermark: f.high}
	if q.Committed {
		if loc.Aborted, end, err = l.aborted(ctx, p, f, s, q.Offset, end); err != nil || end < q.Offset {
			if errors.Is(err, errNoIndex) {
				err = nil
			}
			return nil, err
		}
	}
	b, err := l.index(ctx, s, objectstore.OffsetIndex)
	if err != nil {
		return nil, err
	}
	loc.EndOffset = end
	if loc.StartPosition, loc.EndPosition, err = span(s, b, q.Offset, end); err != nil {
		return nil, err
	}
	return loc, nil
}

// span maps offsets to positions by the segment's offset index: from a batch at or before the first offset to the end of a
// batch at or behind the last one.
func span(s *remotelog.Segment, index []byte, from, to int64) (start, end int64, err error) {
	size := int64(s.Size)
	x := segment.NewOffsetIndex(s.Start, index)
	if err := x.Check(s.End+1, size); err != nil {
		return 0, 0, fmt.Errorf("%w: segment %s: %w", direct.ErrDamaged, s.ID, err)
	}
	at, err := x.Lookup(from)
	if err != nil {
		return 0, 0, err
	}
	start, end = at.Position, size
	if to < s.End {
		if p, ok, err := x.CeilingOffset(to + 1); err == nil && ok {
			end = p.Position
		}
	}
	if start < 0 || start >= end || end > size {
		return 0, 0, fmt.Errorf("%w: segment %s: offsets %d to %d at bytes %d to %d of %d", direct.ErrDamaged, s.ID, from, to, start, end, size)
	}
	return start, end, nil
}

// aborted lists the aborted transactions with records in [from, end] of a segment. They are in the transaction index of the
// segment that has their marker: this one or a later one. Which of them to look for, the segment's snapshot of producers
// says, which has the transactions that are open at its end. Where the end of one is not in the tier, the range is cut in
// front of it: the leader knows the end, the tier does not.
func (l *Locator) aborted(ctx context.Context, p *part, f facts, s *remotelog.Segment, from, end int64) ([]direct.AbortedTransaction, int64, error) {
	var out []direct.AbortedTransaction
	for range maxWalk {
		if !s.TxnIndexEmpty {
			b, err := l.index(ctx, s, objectstore.TransactionIndex)
			if err != nil {
				return nil, -1, err
			}
			txns, err := segment.ParseTxnIndex(b)
			if err != nil {
				return nil, -1, fmt.Errorf("%w: segment %s: %w", direct.ErrDamaged, s.ID, err)
			}
			for _, t := range txns {
				if a := (direct.AbortedTransaction{ProducerID: t.ProducerID, FirstOffset: t.FirstOffset}); t.LastOffset >= from && t.FirstOffset <= end && !slices.Contains(out, a) {
					out = append(out, a)
				}
			}
		}
		open, err := l.open(ctx, s)
		if err != nil {
			return nil, -1, err
		}
		if open > end {
			return out, end, nil
		}
		next, to := l.find(ctx, p, f, s.End+1)
		if next == nil || to < next.End {
			return out, open - 1, nil
		}
		s = next
	}
	return nil, -1, nil
}

// open is the first offset of the earliest transaction that is open at the end of a segment, far off if there is none.
func (l *Locator) open(ctx context.Context, s *remotelog.Segment) (int64, error) {
	b, err := l.index(ctx, s, objectstore.ProducerSnapshot)
	if err != nil {
		return 0, err
	}
	producers, err := producerstate.ParseSnapshot(b)
	if err != nil {
		return 0, fmt.Errorf("%w: segment %s: %w", direct.ErrDamaged, s.ID, err)
	}
	first := s.End + 1
	for _, x := range producers {
		if x.TxnFirstOffset >= 0 {
			first = min(first, x.TxnFirstOffset)
		}
	}
	return first, nil
}
