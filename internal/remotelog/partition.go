package remotelog

import (
	"cmp"
	"slices"
	"sort"

	"github.com/varve-io/varve/internal/tp"
)

// What is beyond these bounds is not found, and the broker serves it.
const (
	maxSegments   = 1 << 18 // of one partition
	maxCandidates = 64      // segments that hold one offset
)

// Partition is what the records of one partition say. The zero value knows nothing.
type Partition struct {
	segments map[tp.UUID]*Segment // in every state but DeleteFinished
	readable []*Segment           // CopyFinished by start, made when it is asked for
	reach    []int64              // the greatest end among readable[:i+1]
	stale    bool
}

// Apply takes in a record of this partition, in the order of the topic. Records that Kafka would refuse (of segments that
// are not known, of steps that are not allowed, of impossible segments) change nothing.
func (p *Partition) Apply(r Record) {
	switch r := r.(type) {
	case *Segment:
		if p.segments[r.ID] != nil || r.State != CopyStarted || !r.possible() || len(p.segments) >= maxSegments {
			return
		}
		if p.segments == nil {
			p.segments = map[tp.UUID]*Segment{}
		}
		p.segments[r.ID] = r
	case *Update:
		old := p.segments[r.ID]
		if old == nil || !old.State.before(r.State) {
			return
		}
		if r.State == DeleteFinished {
			delete(p.segments, r.ID)
		} else {
			s := *old
			s.State = r.State
			if r.Custom != nil {
				s.Custom = r.Custom
			}
			p.segments[r.ID] = &s
		}
		p.stale = true
	case *PartitionDelete: // in whatever state: nothing is to be read any more
		*p = Partition{}
	}
}

// before reports whether a segment may go from one state to another.
func (s State) before(next State) bool {
	switch s {
	case CopyStarted:
		return next == CopyFinished || next == DeleteStarted
	case CopyFinished:
		return next == DeleteStarted
	case DeleteStarted:
		return next == DeleteFinished
	}
	return false
}

// possible reports whether a segment can be: offsets and epochs rise, and there are bytes.
func (s *Segment) possible() bool {
	if s.Start < 0 || s.End < s.Start || s.End == 1<<63-1 || s.Size <= 0 || len(s.Epochs) == 0 || s.Epochs[0].StartOffset > s.Start || s.Epochs[0].Epoch < 0 {
		return false
	}
	for i, e := range s.Epochs[1:] {
		if e.Epoch <= s.Epochs[i].Epoch || e.StartOffset <= s.Epochs[i].StartOffset || e.StartOffset > s.End {
			return false
		}
	}
	return true
}

// Len is the number of segments in every state.
func (p *Partition) Len() int { return len(p.segments) }

// Segments are those that can be read, by start.
func (p *Partition) Segments() []*Segment {
	p.sort()
	return slices.Clone(p.readable)
}

func (p *Partition) sort() {
	if !p.stale {
		return
	}
	p.stale, p.readable, p.reach = false, nil, nil
	for _, s := range p.segments {
		if s.State == CopyFinished {
			p.readable = append(p.readable, s)
		}
	}
	slices.SortFunc(p.readable, func(a, b *Segment) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.End, b.End), slices.Compare(a.ID[:], b.ID[:]))
	})
	reach := int64(-1)
	for _, s := range p.readable {
		reach = max(reach, s.End)
		p.reach = append(p.reach, reach)
	}
}

// holding calls f with the readable segments that hold an offset, of whatever lineage, until f returns false.
func (p *Partition) holding(offset int64, f func(*Segment) bool) {
	p.sort()
	i := sort.Search(len(p.readable), func(i int) bool { return p.readable[i].Start > offset })
	for n := 0; i > 0 && n < maxCandidates && p.reach[i-1] >= offset; i-- {
		if s := p.readable[i-1]; s.End >= offset {
			if n++; !f(s) {
				return
			}
		}
	}
}

// Holds reports whether a readable segment holds an offset, in whatever lineage.
func (p *Partition) Holds(offset int64) (held bool) {
	p.holding(offset, func(*Segment) bool {
		held = true
		return false
	})
	return held
}

// Epochs are the leader epochs that Find has to know about an offset, rising.
func (p *Partition) Epochs(offset int64) (epochs []int32) {
	p.holding(offset, func(s *Segment) bool {
		for i, e := range s.Epochs {
			if s.epochEnd(i) >= offset && !slices.Contains(epochs, e.Epoch) {
				epochs = append(epochs, e.Epoch)
			}
		}
		return true
	})
	slices.Sort(epochs)
	return epochs
}

// Lineage is where leader epochs end in the present leader's log: the offset behind the last record of each, for the newest
// the log's end. Epochs that the leader does not know are not in it. (The answers to OffsetForLeaderEpoch that name the very
// epoch that was asked for.)
type Lineage map[int32]int64

// Find returns the readable segment whose batches, from an offset up to the inclusive end, are those of the leader's log; of
// several the one that reaches furthest. A record is known by its offset and leader epoch: a segment is valid as far as its
// epochs are the leader's, and what an unclean election cut off, or a leader wrote that is no more, is never found.
func (p *Partition) Find(offset int64, lineage Lineage) (best *Segment, end int64, ok bool) {
	end = -1
	p.holding(offset, func(s *Segment) bool {
		if e := s.valid(offset, lineage); e > end {
			best, end = s, e
		}
		return true
	})
	return best, end, best != nil
}

// epochEnd is the last offset of epoch i in the segment.
func (s *Segment) epochEnd(i int) int64 {
	if i+1 < len(s.Epochs) {
		return s.Epochs[i+1].StartOffset - 1
	}
	return s.End
}

// valid is the last offset up to which the segment, from an offset on, is that of the lineage; -1 if it is not.
func (s *Segment) valid(offset int64, lineage Lineage) int64 {
	valid := int64(-1)
	for i, e := range s.Epochs {
		last := s.epochEnd(i)
		if last < offset {
			continue
		}
		end, ok := lineage[e.Epoch]
		if !ok || end <= max(offset, e.StartOffset) {
			break
		}
		valid = min(last, end-1)
		if end != last+1 {
			break // the leader goes on otherwise than the segment
		}
	}
	return valid
}
