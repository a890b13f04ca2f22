// Package tier knows what a remote segment is and what may become of it, and plans uploads and deletions. It is pure:
// executing plans is the uploader's, reading is the reader's.
package tier

import (
	"fmt"
	"sort"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/tp"
)

// State is where a remote segment is in its life (KIP-405, RemoteLogSegmentState). The numbers are Kafka's.
type State int8

const (
	CopyStarted    State = 0
	CopyFinished   State = 1
	DeleteStarted  State = 2
	DeleteFinished State = 3
)

func (s State) String() string {
	switch s {
	case CopyStarted:
		return "COPY_SEGMENT_STARTED"
	case CopyFinished:
		return "COPY_SEGMENT_FINISHED"
	case DeleteStarted:
		return "DELETE_SEGMENT_STARTED"
	case DeleteFinished:
		return "DELETE_SEGMENT_FINISHED"
	}
	return fmt.Sprintf("State(%d)", int8(s))
}

// CanBecome reports whether the change of state is legal: forward, abandoning an upload, or no change at all.
func (s State) CanBecome(to State) bool {
	switch s {
	case CopyStarted:
		return to == CopyStarted || to == CopyFinished || to == DeleteStarted
	case CopyFinished:
		return to == CopyFinished || to == DeleteStarted
	case DeleteStarted:
		return to == DeleteStarted || to == DeleteFinished
	}
	return s == to
}

// Storage formats, as a direct reader names them (KIP-1248, SupportedStorageFormatVersions).
const (
	FormatKafkaV1   = "ApacheKafkaV1"  // the object is the segment, byte for byte
	FormatChunkedV1 = "AivenChunkedV1" // chunks compressed, encrypted or both; the manifest says how
)

// Segment is one remote segment: a range of batches of one partition under an id that no other attempt shares.
// Offsets are inclusive at both ends. Values in an image are immutable.
type Segment struct {
	ID             tp.UUID             `cbor:"1,keyasint"`
	Topic          string              `cbor:"2,keyasint"`
	TopicID        tp.UUID             `cbor:"3,keyasint"`
	Partition      int32               `cbor:"4,keyasint"`
	Start          int64               `cbor:"5,keyasint"`
	End            int64               `cbor:"6,keyasint"`
	MaxTimestamp   int64               `cbor:"7,keyasint"`
	Size           int64               `cbor:"8,keyasint"` // plain bytes of the log
	ObjectBytes    int64               `cbor:"9,keyasint,omitempty"`
	Epochs         []leaderepoch.Entry `cbor:"10,keyasint"`
	LeaderEpoch    int32               `cbor:"11,keyasint"` // of the leader that uploads
	Broker         int32               `cbor:"12,keyasint"`
	EventTime      int64               `cbor:"13,keyasint"` // ms, of the last change of state
	State          State               `cbor:"14,keyasint"`
	TxnIndexEmpty  bool                `cbor:"15,keyasint,omitempty"`
	Format         string              `cbor:"16,keyasint,omitempty"`
	CustomMetadata []byte              `cbor:"17,keyasint,omitempty"`
	CRC            uint32              `cbor:"18,keyasint,omitempty"` // CRC-32C of the plain log bytes
}

// Segments are the remote segments of one partition by start offset.
type Segments []*Segment

// Find returns the finished segment that holds offset, or nil.
func (ss Segments) Find(offset int64) *Segment {
	i := sort.Search(len(ss), func(i int) bool { return ss[i].Start > offset })
	for i--; i >= 0; i-- {
		if s := ss[i]; s.State == CopyFinished {
			if s.End >= offset {
				return s
			}
			return nil // finished ranges are contiguous and disjoint: an earlier one ends earlier
		}
	}
	return nil
}

// Finished returns the readable segments.
func (ss Segments) Finished() Segments {
	var out Segments
	for _, s := range ss {
		if s.State == CopyFinished {
			out = append(out, s)
		}
	}
	return out
}

// End is the last offset that is readable in the tier, -1 if there is none.
func (ss Segments) End() int64 {
	for i := len(ss) - 1; i >= 0; i-- {
		if ss[i].State == CopyFinished {
			return ss[i].End
		}
	}
	return tp.NoOffset
}

// Start is the first offset that is readable in the tier, -1 if there is none.
func (ss Segments) Start() int64 {
	for _, s := range ss {
		if s.State == CopyFinished {
			return s.Start
		}
	}
	return tp.NoOffset
}
