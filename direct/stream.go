package direct

import (
	"context"
	"time"

	"github.com/varve-io/varve/internal/directfetch"
)

const (
	minRange     = 64 << 10
	leastStreams = 64 // read-aheads that there may always be
	maxStreams   = 8  // read-aheads of one partition: two for each of four consumers with positions of their own
)

// partKey names a partition. The broker's address is in it since one Transport may reach several clusters. The owner is 0
// for connections that were dialed, which share their read-ahead, and otherwise the one connection that it serves: what the
// broker gave one client is no answer to another, who may not be allowed to read it.
type partKey struct {
	owner     uint64
	address   string
	topic     string   // empty where the client uses ids
	id        [16]byte // zero where it uses names
	partition int32
}

// streamKey names read-ahead by the only request that may use it: one at exactly this offset.
type streamKey struct {
	partKey
	committed bool
	next      int64
}

// marks are what the broker last told about a partition.
type marks struct {
	high, stable, start int64
	at                  time.Time
}

// stream is read-ahead of one location. All fields are guarded by the Transport's mutex.
type stream struct {
	key     streamKey
	loc     directfetch.Location
	marks   marks
	expires time.Time
	used    time.Time
	by      *directfetch.Use // of the connection that opened it, where what is read is counted
	aborted aborted

	ctx     context.Context
	cancel  context.CancelFunc
	nextPos int64     // where the next range begins
	first   int64     // size of the first range
	depth   int       // ranges that may be in flight or in memory
	flights []*flight // ranges under way, in order
	held    int       // buffers in flight or in memory

	split     splitter
	splitting bool // a goroutine is using split
	ready     []batch
	readySize int64

	failed  cause // reading ended early
	done    bool  // all was read
	dropped bool
	busy    bool // a request is using it
	hungry  bool // waits for memory
	ahead   bool // the location behind it was asked for
	wake    chan struct{}
}

// flight is one range under way.
type flight struct {
	start, end int64
	segment    Segment
	chunk      *chunk
	over       bool
	err        error
}

// chunk is a buffer with its users: the stream until it is split, and every batch in it until it was written.
type chunk struct {
	b      []byte
	size   int64 // what it takes of the budget
	refs   int
	stream *stream
}

// batch is a piece with its memory.
type batch struct {
	piece
	chunk *chunk
}

func (b *batch) bytes() []byte { return b.chunk.b[b.at : b.at+b.size] }

// view is what the planner sees of a stream.
func (s *stream) view() *streamView {
	return &streamView{epoch: s.loc.LeaderEpoch, expires: s.expires, marks: s.marks.at, ready: len(s.ready) > 0, done: s.done, failed: s.failed}
}

// segment is what a Fetcher is told of the location.
func (s *stream) segment() Segment {
	l := &s.loc
	return Segment{SegmentID: l.SegmentID, ObjectKey: l.ObjectKey, Format: l.Format, CustomMetadata: l.CustomMetadata, Size: l.SegmentSize, BaseOffset: l.BaseOffset,
		LogGrant: l.LogGrant, ManifestGrant: l.ManifestGrant}
}

// signal wakes the request that waits, if any.
func (s *stream) signal() {
	if s.wake == nil {
		return
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// slice is what an answer takes from a stream.
type slice struct {
	records [][]byte
	chunks  []*chunk // one use each
	aborted aborted
}

// size is the number of bytes of the first batches, at least one, that fit into limit.
func (s *stream) size(limit int) int {
	n := 0
	for i := range s.ready {
		if n > 0 && n+s.ready[i].size > limit {
			break
		}
		n += s.ready[i].size
		if n >= limit {
			break
		}
	}
	return n
}

// take cuts batches off the front up to limit bytes; with minOne the first may be larger. ok is false if none fits.
func (s *stream) take(limit int, minOne bool) (out slice, ok bool) {
	n, size := 0, 0
	for n < len(s.ready) {
		b := &s.ready[n]
		if size+b.size > limit && (n > 0 || !minOne) {
			break
		}
		size += b.size
		if n > 0 && s.ready[n-1].chunk == b.chunk && s.ready[n-1].at+s.ready[n-1].size == b.at {
			last := len(out.records) - 1
			out.records[last] = out.records[last][:len(out.records[last])+b.size]
		} else {
			out.records = append(out.records, b.bytes())
		}
		out.chunks = append(out.chunks, b.chunk)
		n++
	}
	if n == 0 {
		return out, false
	}
	if s.key.committed {
		out.aborted = s.aborted.upTo(s.ready[n-1].last)
	}
	for _, b := range s.ready[:n] {
		if b.abort >= 0 {
			s.aborted = s.aborted.ended(b.abort, b.last)
		}
	}
	s.key.next = s.ready[n-1].last + 1
	s.readySize -= int64(size)
	clear(s.ready[:n])
	s.ready = s.ready[n:]
	return out, true
}
