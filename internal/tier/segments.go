package tier

import (
	"fmt"
	"time"

	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/tp"
)

// Key names the segment's objects.
func (s *Segment) Key() remoteformat.Key {
	return remoteformat.Key{Topic: s.Topic, TopicID: s.TopicID, Partition: s.Partition, Start: s.Start, ID: s.ID}
}

// Object is the key of one object of the segment. Custom metadata, where it names prefix or path, wins over the
// configured prefix, which may have changed since.
func (s *Segment) Object(prefix string, o remoteformat.Object) string {
	path := s.Key().Path()
	if len(s.CustomMetadata) > 0 {
		if c, err := remoteformat.ParseCustomMetadata(s.CustomMetadata); err == nil {
			if c.Prefix != nil {
				prefix = *c.Prefix
			}
			if c.Path != nil {
				path = *c.Path
			}
		}
	}
	return prefix + path + o.Suffix()
}

// Deletable reports whether the segment's objects may go: it has been DeleteStarted for delay, which is how long
// locations that were handed out stay valid.
func (s *Segment) Deletable(now time.Time, delay time.Duration) bool {
	return s.State == DeleteStarted && now.UnixMilli()-s.EventTime >= delay.Milliseconds()
}

// NextWithTxnIndex returns the first finished segment that ends at offset or later and may hold aborted
// transactions, or nil.
func (ss Segments) NextWithTxnIndex(offset int64) *Segment {
	for _, s := range ss {
		if s.State == CopyFinished && s.End >= offset && !s.TxnIndexEmpty {
			return s
		}
	}
	return nil
}

// From returns the finished segments that end at offset or later.
func (ss Segments) From(offset int64) Segments {
	out := ss.Finished()
	for len(out) > 0 && out[0].End < offset {
		out = out[1:]
	}
	return out
}

// Bytes is the plain size of the finished segments.
func (ss Segments) Bytes() int64 {
	var n int64
	for _, s := range ss {
		if s.State == CopyFinished {
			n += s.Size
		}
	}
	return n
}

// Get returns the segment with an id, or nil.
func (ss Segments) Get(id tp.UUID) *Segment {
	for _, s := range ss {
		if s.ID == id {
			return s
		}
	}
	return nil
}

// Check verifies what look-ups rely on: segments sorted by start, finished ranges contiguous and disjoint.
func (ss Segments) Check() error {
	last := Segment{End: tp.NoOffset}
	for i, s := range ss {
		if s.Start < 0 || s.End < s.Start {
			return fmt.Errorf("remote segment %s: range %d to %d", s.ID, s.Start, s.End)
		}
		if i > 0 && s.Start < ss[i-1].Start {
			return fmt.Errorf("remote segment %s at %d comes after one at %d", s.ID, s.Start, ss[i-1].Start)
		}
		if s.State != CopyFinished {
			continue
		}
		if last.End >= 0 && s.Start != last.End+1 {
			return fmt.Errorf("remote segment %s starts at %d, but %s before it ends at %d", s.ID, s.Start, last.ID, last.End)
		}
		last = *s
	}
	return nil
}
