package fetch

import (
	"errors"
	"slices"

	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tier"
)

var (
	// ErrOffsetOutOfRange: the offset is below the log start or above the log end.
	ErrOffsetOutOfRange = errors.New("offset out of range")
	// ErrReplicaUnavailable: the offset should exist, but neither tier holds it at the moment; the consumer asks again.
	ErrReplicaUnavailable = errors.New("the offset is in neither tier at the moment")
	// ErrMovedToTier tells a follower, and nobody else, that only the tier has the offset (KIP-405).
	ErrMovedToTier = errors.New("the offset has moved to the tier")
	// ErrNotAvailable: a follower that serves consumers has not replicated the offset yet (KIP-392).
	ErrNotAvailable = errors.New("the offset is not available here yet")
)

// Source is where the records of an answer come from.
type Source int8

const (
	Local   Source = iota // the broker's log
	Tiered                // the bucket, read by the broker
	Direct                // the bucket, read by the client: the answer is a location
	Nowhere               // an error
)

// choose decides where a consumer's fetch at offset is served from (KIP-405, KIP-1248). A location is an answer only for
// an offset that the local log lacks, in a finished segment of a format that the client listed, all of which this replica may
// show: upTo is its high watermark, or last stable offset. (A follower may not know yet how a transaction ended that the leader has
// uploaded.) In every other case the answer is the classic one, never an error.
func choose(offset, upTo int64, marks partition.Offsets, remote tier.Segments, wantLocation bool, formats []string) (Source, *tier.Segment, error) {
	switch {
	case offset < marks.LogStart || offset > marks.End:
		return Nowhere, nil, ErrOffsetOutOfRange
	case offset >= marks.LocalLogStart:
		return Local, nil, nil
	}
	segment := remote.Find(offset)
	switch {
	case segment == nil:
		return Nowhere, nil, ErrReplicaUnavailable
	case wantLocation && segment.End < upTo && slices.Contains(formats, segment.Format):
		return Direct, segment, nil
	}
	return Tiered, segment, nil
}

// budget hands out the bytes of one request (KIP-74): every partition gets at most its own limit and what is left of the
// request's; only the first batch of the first partition with data may exceed them.
type budget struct {
	left    int
	taken   bool
	planned int // bytes of reads that have not come yet
}

// limit returns how much the next partition may read and whether its first batch may overshoot.
func (b *budget) limit(partitionMax int) (maxBytes int, minOne bool) {
	return max(min(partitionMax, b.left), 0), !b.taken
}

// plan accounts for n bytes that may come.
func (b *budget) plan(n int) {
	b.planned += n
	b.charge(n)
}

// charge accounts for n bytes.
func (b *budget) charge(n int) {
	b.left -= n
	if n > 0 {
		b.taken = true
	}
}
