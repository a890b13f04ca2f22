package checker

import (
	"fmt"

	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

// Replica is one replica as it is at a moment. Read returns the whole batches of its local log from the one that holds
// from on to the one before upTo.
type Replica struct {
	Broker int32
	Run    int64 // of its process
	Leads  bool
	Epoch  int32

	LogStart, LocalStart, End, HighWatermark int64

	Remote tier.Segments
	Shaky  bool // its disk failed: it may not have done all that it was to
	Read   func(from, upTo int64) ([]byte, error)
}

type replica struct {
	run      int64
	epoch    int32
	leads    bool
	verified int64 // below this it was found to agree with the history, -1 nothing
	logStart int64
}

// Replica observes a replica whose log can be used.
func (c *Checker) Replica(p tp.Partition, r Replica) {
	h := c.of(p)
	if r.Epoch < h.minEpoch {
		return
	}
	s := h.replicas[r.Broker]
	if s == nil || s.run != r.Run {
		s = &replica{run: r.Run, verified: -1, logStart: -1, epoch: -1}
		h.replicas[r.Broker] = s
	}
	who := func() string {
		role := "follower"
		if r.Leads {
			role = "leader"
		}
		return fmt.Sprintf("broker %d, %s in epoch %d (log start %d, local start %d, high watermark %d, end %d)", r.Broker, role, r.Epoch, r.LogStart, r.LocalStart, r.HighWatermark, r.End)
	}
	if r.LogStart > r.LocalStart || r.LocalStart > r.End || r.HighWatermark > r.End || r.LogStart < 0 {
		c.Fail(Bounds, p, "%s", who())
		return
	}
	if s.epoch == r.Epoch && s.leads == r.Leads && r.Leads && r.LogStart < s.logStart {
		c.Fail(LogStart, p, "%s had log start %d before", who(), s.logStart)
	}
	begins := r.Leads && (s.epoch != r.Epoch || !s.leads)
	s.epoch, s.leads, s.logStart = r.Epoch, r.Leads, r.LogStart
	s.verified = min(s.verified, r.End)
	if r.Leads {
		c.leader(p, h, s, &r, begins, who)
	}
	if h.generation > 0 && !r.Leads {
		return // until it has met its leader it may be of the history that is gone
	}
	c.compare(p, h, s, &r, r.HighWatermark, who)
}

func (c *Checker) leader(p tp.Partition, h *history, s *replica, r *Replica, begins bool, who func() string) {
	if h.generation > 0 && h.end >= 0 && r.LocalStart > h.end {
		// Of a history that was broken the log start may be from the time before: it deletes what is committed at once.
		clear(h.ends)
		clear(h.producers)
		h.batches, h.end = nil, -1
	}
	h.logStart = max(h.logStart, r.LogStart)
	key := leadership{r.Broker, r.Epoch}
	if was, ok := h.led[key]; ok && r.HighWatermark < was {
		c.Fail(HighMark, p, "%s had high watermark %d before", who(), was)
	}
	h.led[key] = r.HighWatermark
	if begins {
		need := int64(0)
		for epoch, end := range h.ends {
			if epoch < r.Epoch {
				need = max(need, end)
			}
		}
		if r.End < need {
			c.Fail(Durability, p, "%s begins to lead without what is committed up to %d", who(), need)
			return
		}
		c.compare(p, h, s, r, min(need, r.End), who)
	}
	at := r.LogStart
	for _, seg := range r.Remote {
		if at >= r.LocalStart {
			break
		}
		if seg.State == tier.CopyFinished && seg.Start <= at && seg.End >= at {
			at = seg.End + 1
		}
	}
	if at < r.LocalStart && !r.Shaky {
		c.Fail(Coverage, p, "%s: offset %d is neither local nor in the tier, which holds %s", who(), at, spans(r.Remote))
	}
}

func spans(remote tier.Segments) string {
	out := ""
	for _, s := range remote {
		out += fmt.Sprintf("[%d, %d] %s ", s.Start, s.End, s.State)
	}
	if out == "" {
		return "nothing"
	}
	return out
}

// compare holds the local log below upTo against the history. What a leader has committed beyond it is added.
func (c *Checker) compare(p tp.Partition, h *history, s *replica, r *Replica, upTo int64, who func() string) {
	from := max(s.verified, r.LocalStart)
	if upTo <= from {
		return
	}
	raw, err := r.Read(from, upTo)
	if err != nil {
		return // a disk that fails says nothing about what is committed
	}
	batches, headers, err := split(raw)
	if err != nil {
		c.Fail(Agreement, p, "%s: %v", who(), err)
		return
	}
	at := from
	for i, b := range batches {
		if i > 0 && b.base != at {
			c.Fail(Agreement, p, "%s has %s behind offset %d", who(), label(b), at)
			return
		}
		at = b.last + 1
		known, same := h.same(b)
		switch {
		case known && !same:
			check := Agreement
			if r.Leads {
				check = Durability
			}
			c.Fail(check, p, "%s has %s, where the history has %s", who(), label(b), h.describe(b.base))
			return
		case known || h.end >= 0 && b.base < h.end:
		case r.Leads && b.last < r.HighWatermark:
			if v := h.commit(b, &headers[i], r.Epoch, r.LogStart); v != nil {
				c.Fail(v.Check, p, "%s: %s", who(), v.Text)
				return
			}
			if headers[i].IsTransactional() {
				c.tookTransactional(p, b, &headers[i])
			}
		case r.Leads:
			s.verified = b.base // not committed yet
			return
		default:
			c.Fail(Agreement, p, "%s takes %s for committed, but the history ends at %d", who(), label(b), h.end)
			return
		}
	}
	s.verified = at
}
