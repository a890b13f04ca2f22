package log

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"time"

	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/segment"
)

// AppendRequest is what a leader appends.
type AppendRequest struct {
	Records     []byte // the caller's; may be changed in place
	LeaderEpoch int32
	Now         time.Time
	// Internal marks a coordinator's writes: control batches, several batches and batches without a sequence are
	// allowed.
	Internal bool
	// V2 marks markers of transaction version 2, which have to raise the epoch (KIP-890).
	V2 bool
	// Confirmed says that a batch was confirmed to belong to its producer's transaction, when the log ended at ConfirmedAt: it is refused
	// where the transaction has ended since. Not confirmed are batches of transactions that are open here.
	Confirmed   bool
	ConfirmedAt int64
	// AllowSeveralBatches is for Produce before version 3; not for producers with an id.
	AllowSeveralBatches bool
}

// AppendResult says where it went. LogAppendTime is -1 if the topic keeps the producer's timestamps.
type AppendResult struct {
	FirstOffset, LastOffset, LogAppendTime, LogStart int64
	// Duplicate: the batch had been appended before, at these offsets, and was not appended again.
	Duplicate bool
}

// AppendAsLeader validates batches (recordbatch.Validate and producerstate.Check; their errors), gives them
// offsets and the leader epoch, and appends them with one write.
func (l *Log) AppendAsLeader(req AppendRequest) (AppendResult, error) {
	cfg := l.config.Load()
	rules, err := cfg.rules(req.Internal, req.AllowSeveralBatches, req.Now)
	if err != nil {
		return AppendResult{}, fmt.Errorf("%s: append: %w", l.partition, err)
	}
	var room [2]recordbatch.Header
	raw, headers, err := recordbatch.Validate(req.Records, &rules, room[:0])
	if err != nil {
		return AppendResult{}, fmt.Errorf("%s: append: %w", l.partition, err)
	}
	if int64(len(raw)) > cfg.SegmentBytes {
		return AppendResult{}, fmt.Errorf("%s: append: %w: %d bytes, segments have %d", l.partition, ErrExceedsSegment, len(raw), cfg.SegmentBytes)
	}
	res := AppendResult{LogAppendTime: -1}
	if cfg.LogAppendTime {
		res.LogAppendTime = rules.NowMs
	}
	l.mu.Lock()
	err = l.appendLeaderLocked(raw, headers, &req, cfg, &res)
	flush := err == nil && !res.Duplicate && l.flushDueLocked(cfg, rules.NowMs)
	l.mu.Unlock()
	if flush {
		err = l.flushAt(math.MaxInt64, rules.NowMs)
	}
	return res, err
}

func (l *Log) appendLeaderLocked(raw []byte, headers []recordbatch.Header, req *AppendRequest, cfg *Config, res *AppendResult) error {
	if err := l.writableLocked(); err != nil {
		return err
	}
	res.LogStart = l.logStart
	pos := 0
	for i := range headers {
		h := &headers[i]
		batch := raw[pos : pos+h.Size]
		pos += h.Size
		if !h.HasProducer() {
			continue
		}
		if h.IsControl() {
			c, ok, err := recordbatch.ControlOf(batch)
			if err == nil && ok {
				err = l.producers.CheckMarker(h, c, req.V2)
			}
			if err != nil {
				return fmt.Errorf("%s: append: %w", l.partition, err)
			}
			continue
		}
		dup, isDup, err := l.producers.Check(h, req.Internal && h.BaseSequence < 0)
		if err != nil {
			return fmt.Errorf("%s: append: %w", l.partition, err)
		}
		if !isDup && req.Confirmed && h.IsTransactional() {
			if err := l.producers.CheckTxn(h, req.ConfirmedAt); err != nil {
				return fmt.Errorf("%s: append: %w", l.partition, err)
			}
		}
		if isDup && len(headers) == 1 {
			res.FirstOffset, res.LastOffset, res.Duplicate = dup.FirstOffset, dup.LastOffset, true
			if cfg.LogAppendTime {
				res.LogAppendTime = dup.Timestamp
			}
			return nil
		}
	}
	next := l.active.Next()
	res.FirstOffset = next
	pos = 0
	for i := range headers {
		h := &headers[i]
		if next > math.MaxInt64-1-int64(h.LastOffsetDelta) {
			return fmt.Errorf("%s: append: %w: offsets are used up", l.partition, recordbatch.ErrInvalidRecord)
		}
		h.BaseOffset, h.LeaderEpoch = next, req.LeaderEpoch
		recordbatch.SetBaseOffset(raw[pos:], next)
		recordbatch.SetLeaderEpoch(raw[pos:], req.LeaderEpoch)
		next = h.NextOffset()
		pos += h.Size
	}
	res.LastOffset = next - 1
	return l.appendLocked(raw, headers, cfg, req.Now.UnixMilli())
}

// AppendAsFollower appends batches as the leader has them. They must begin at or after the end of the log
// (UnexpectedOffsetError); a batch that is cut off at the end of records is left out, and so is one of a leader epoch above
// maxEpoch with all behind it. Size limits are not applied: the leader has accepted the batches.
func (l *Log) AppendAsFollower(records []byte, maxEpoch int32, now time.Time) (AppendResult, error) {
	var room [8]recordbatch.Header
	headers := room[:0]
	pos := 0
	for pos < len(records) {
		h, err := recordbatch.ParseHeader(records[pos:])
		if err == nil {
			err = h.Verify(records[pos:])
		}
		if errors.Is(err, recordbatch.ErrShort) && pos > 0 {
			break
		}
		if err == nil && len(headers) > 0 && h.BaseOffset < headers[len(headers)-1].NextOffset() {
			err = fmt.Errorf("%w: batch at offset %d after %d", recordbatch.ErrCorrupt, h.BaseOffset, headers[len(headers)-1].LastOffset())
		}
		if err != nil {
			return AppendResult{}, fmt.Errorf("%s: append as follower: %w", l.partition, err)
		}
		if h.LeaderEpoch > maxEpoch {
			break
		}
		headers = append(headers, h)
		pos += h.Size
	}
	res := AppendResult{LogAppendTime: -1}
	cfg := l.config.Load()
	l.mu.Lock()
	res.LogStart = l.logStart
	res.FirstOffset, res.LastOffset = l.active.Next(), l.active.Next()-1
	err := l.writableLocked()
	if err == nil && len(headers) > 0 {
		res.FirstOffset, res.LastOffset = headers[0].BaseOffset, headers[len(headers)-1].LastOffset()
		if end := l.active.Next(); res.FirstOffset < end {
			err = fmt.Errorf("%s: append as follower: %w", l.partition, &UnexpectedOffsetError{res.FirstOffset, res.LastOffset, end})
		} else {
			err = l.appendSplitLocked(records[:pos], headers, cfg, now.UnixMilli())
		}
	}
	flush := err == nil && l.flushDueLocked(cfg, now.UnixMilli())
	l.mu.Unlock()
	if flush {
		err = l.flushAt(math.MaxInt64, now.UnixMilli())
	}
	return res, err
}

// appendSplitLocked appends batches, in parts if their offsets do not fit one segment.
func (l *Log) appendSplitLocked(raw []byte, headers []recordbatch.Header, cfg *Config, nowMs int64) error {
	n := len(headers)
	if n > 1 && headers[n-1].LastOffset()-headers[0].BaseOffset > math.MaxInt32 {
		size := 0
		for _, h := range headers[:n/2] {
			size += h.Size
		}
		if err := l.appendSplitLocked(raw[:size], headers[:n/2], cfg, nowMs); err != nil {
			return err
		}
		return l.appendSplitLocked(raw[size:], headers[n/2:], cfg, nowMs)
	}
	return l.appendLocked(raw, headers, cfg, nowMs)
}

// appendLocked writes batches whose offsets and epochs are final.
func (l *Log) appendLocked(raw []byte, headers []recordbatch.Header, cfg *Config, nowMs int64) error {
	maxTime := int64(-1)
	for i := range headers {
		maxTime = max(maxTime, headers[i].MaxTimestamp)
	}
	first, last := headers[0].BaseOffset, headers[len(headers)-1].LastOffset()
	if l.active.Full(int64(len(raw)), last, maxTime, nowMs, cfg.limits(l.activeJitter)) {
		if err := l.rollLocked(first, cfg, nowMs); err != nil {
			return err
		}
	}
	changed, before := l.epochsStale, l.epochs
	if last, ok := before.Latest(); !ok || last.Epoch != headers[len(headers)-1].LeaderEpoch {
		l.epochs = before.Clone() // one that fails leaves none of its epochs behind: they would contradict its next try
	}
	for i := range headers {
		if l.epochs.Assign(headers[i].LeaderEpoch, headers[i].BaseOffset) {
			changed = true
		}
	}
	if changed {
		// Before the data: an entry past the end is dropped when the log is opened, a missing one is not made up for.
		if err := l.writeEpochsLocked(); err != nil {
			l.epochs = before
			return err
		}
	}
	if err := l.active.Append(raw, headers); err != nil {
		l.epochs, l.epochsStale = before, changed
		return l.failLocked("append", err)
	}
	pos := 0
	for i := range headers {
		h := &headers[i]
		aborted, ok, err := applyProducer(l.producers, h, raw[pos:pos+h.Size])
		if err != nil {
			// The batch is in the log; a marker that cannot be read decides nothing, as for every later reader.
			l.logger.Warn("unreadable control batch", "partition", l.partition.String(), "offset", h.BaseOffset, "cause", err)
		}
		if ok {
			l.active.AddTxn(aborted)
		}
		pos += h.Size
	}
	l.publishLocked()
	return nil
}

// applyProducer takes a batch into the state of producers.
func applyProducer(s *producerstate.State, h *recordbatch.Header, batch []byte) (aborted AbortedTxn, ok bool, err error) {
	if !h.HasProducer() {
		return aborted, false, nil
	}
	if !h.IsControl() {
		s.Append(h)
		return aborted, false, nil
	}
	c, ok, err := recordbatch.ControlOf(batch)
	if err != nil || !ok {
		return aborted, false, err
	}
	aborted, ok = s.AppendMarker(h, c)
	return aborted, ok, nil
}

// Roll closes the active segment and begins another at the end of the log. An empty one stays.
func (l *Log) Roll(now time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.writableLocked(); err != nil {
		return err
	}
	if err := l.rollLocked(l.active.Next(), l.config.Load(), now.UnixMilli()); err != nil {
		return err
	}
	l.publishLocked()
	return nil
}

// rollLocked begins a segment at base. On an error the active segment stays in use.
func (l *Log) rollLocked(base int64, cfg *Config, nowMs int64) error {
	old := l.active
	if old.Size() == 0 && base == old.Base() {
		return nil
	}
	var done *segment.Reader
	if old.Size() > 0 {
		var err error
		if done, err = old.Seal(base); err != nil {
			return l.failLocked("roll", err)
		}
		if err := l.writeSnapshotLocked(base, false); err != nil {
			return err
		}
	}
	next, err := segment.Create(l.files, l.fs, l.dir, base, cfg.IndexIntervalBytes, nowMs)
	if err != nil {
		return l.failLocked("roll", err)
	}
	if done != nil {
		l.sealed = append(l.sealed[:len(l.sealed):len(l.sealed)], done)
	} else if err := old.Reader().Remove(l.fs); err != nil {
		return l.failLocked("roll", err)
	}
	l.active, l.activeJitter, l.dirDirty = next, cfg.jitter(l.draw), true
	return nil
}

// path is that of a file in the partition's folder.
func (l *Log) path(offset int64, suffix string) string {
	return filepath.Join(l.dir, segment.FileName(offset, suffix))
}
