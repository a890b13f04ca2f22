package direct

import (
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/directfetch"
)

// askAhead asks for the location behind a stream once its last range is under way, so that a consumer does not stand
// still between two segments. The mutex is held. The answer, if it is a location, becomes read-ahead like any other; if
// not, it is ignored, and where the next offset is not in the tier one batch was sent in vain.
func (j *job) askAhead(w *want, s *stream, now time.Time) {
	t := j.t
	next := s.key
	next.next = s.loc.EndOffset + 1
	if s.ahead || s.nextPos < s.loc.EndPosition || t.closed || t.ahead.streams[next] != nil || t.ahead.breaker.resting(now) || t.held(next.partKey, next.next, now) {
		return
	}
	s.ahead = true
	if j.c.locates {
		q := w.query()
		q.Offset = next.next
		j.c.jobs.Go(func() {
			if resp, err := j.locateAhead(w.topic, *w.req, q); err == nil && resp != nil {
				t.takeAhead(next, resp, &j.c.use)
			}
		})
		return
	}
	req := kmsg.NewPtrFetchRequest()
	*req = *j.req
	req.Version = j.up
	req.SessionID, req.SessionEpoch, req.ForgottenTopics = 0, -1, nil
	req.MaxWaitMillis, req.MinBytes, req.MaxBytes = 0, 0, 1
	req.UnknownTags = kmsg.Tags{}
	directfetch.SetFormats(req, t.formats)
	topic := j.req.Topics[w.topic]
	p := *w.req
	p.FetchOffset, p.LastFetchedEpoch, p.PartitionMaxBytes, p.UnknownTags = next.next, -1, 1, kmsg.Tags{}
	directfetch.Request(&p)
	topic.Partitions = []kmsg.FetchRequestTopicPartition{p}
	req.Topics = []kmsg.FetchRequestTopic{topic}
	j.c.jobs.Go(func() {
		frame, err := j.c.ask(j.c.ctx, j.h.ClientID, req)
		if err != nil {
			return
		}
		if resp, err := parseFetchResponse(frame[4:], j.up); err == nil {
			t.takeAhead(next, resp, &j.c.use)
		}
	})
}

// takeAhead begins read-ahead at the location that an answer gives, if it is of use.
func (t *Transport) takeAhead(key streamKey, resp *kmsg.FetchResponse, by *directfetch.Use) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range resp.Topics {
		for k := range resp.Topics[i].Partitions {
			p := &resp.Topics[i].Partitions[k]
			t.stats.brokerBytes += int64(len(p.RecordBatches))
			locations, err := directfetch.Locations(p)
			loc := find(locations, key.next)
			if err != nil || loc == nil || p.ErrorCode != 0 || p.Partition != key.partition || t.closed || t.ahead.streams[key] != nil {
				continue
			}
			if c, _ := t.check(loc, key.next); c == "" && !t.crowded() {
				t.open(key, *loc, marks{p.HighWatermark, p.LastStableOffset, p.LogStartOffset, time.Now()}, p.AbortedTransactions, t.cfg.RangeBytes, by)
			}
		}
	}
}
