// Package remotelog knows what Apache Kafka's brokers write down about their tier: the records of the topic
// __remote_log_metadata (KIP-405), the partitioner of that topic, and what follows from the records of one partition: which
// remote segments can be read, and which of them holds an offset in the present leader's lineage.
//
// It is pure. Parse takes hostile bytes and allocates no more than a small multiple of them. A Partition is not safe for
// concurrent use; records and segments are not changed once made.
package remotelog

import (
	"errors"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/tp"
)

// Topic is the default name of the topic.
const Topic = "__remote_log_metadata"

// Errors of Parse.
var (
	// ErrUnknown: a record of a kind or version that is not known here, which may be skipped.
	ErrUnknown = errors.New("unknown remote log metadata record")
	// ErrMalformed: bytes that are no record.
	ErrMalformed = errors.New("malformed remote log metadata record")
)

// State is the state of a remote segment.
type State int8

// The states of a segment, in the order in which it may go through them.
const (
	CopyStarted State = iota
	CopyFinished
	DeleteStarted
	DeleteFinished
)

func (s State) String() string {
	if s < CopyStarted || s > DeleteFinished {
		return "UNKNOWN"
	}
	return [...]string{"COPY_SEGMENT_STARTED", "COPY_SEGMENT_FINISHED", "DELETE_SEGMENT_STARTED", "DELETE_SEGMENT_FINISHED"}[s]
}

// PartitionID names a partition of a user's topic. The id counts; the name is for people.
type PartitionID struct {
	Topic   string
	TopicID tp.UUID
	Index   int32
}

// Record is one of *Segment, *Update, *PartitionDelete and *Snapshot.
type Record interface {
	// Of is the partition that the record is about; zero for a *Snapshot, which does not say.
	Of() PartitionID
	key() uint64
}

// Segment announces a remote segment (RemoteLogSegmentMetadataRecord, key 0). Offsets are inclusive, times in ms.
type Segment struct {
	PartitionID
	ID            tp.UUID
	Start, End    int64
	Broker        int32
	MaxTimestamp  int64
	EventTime     int64
	Epochs        []leaderepoch.Entry // the lineage of [Start, End], the first entry beginning at Start
	Size          int32               // bytes of the log
	Custom        []byte              // the storage plug-in's own; nil if none
	State         State
	TxnIndexEmpty bool // false is "unknown" too
}

// Update tells a new state of a segment (RemoteLogSegmentMetadataUpdateRecord, key 1).
type Update struct {
	PartitionID
	ID        tp.UUID
	Broker    int32
	EventTime int64
	Custom    []byte
	State     State
}

// PartitionDelete says that a partition's segments are being deleted (RemotePartitionDeleteMetadataRecord, key 2).
type PartitionDelete struct {
	PartitionID
	Broker    int32
	EventTime int64
	State     int8
}

// Snapshot is a segment in a broker's own snapshot file (RemoteLogSegmentMetadataSnapshotRecord, key 3): its PartitionID is
// zero.
type Snapshot struct{ Segment }

// Of implements Record.
func (p PartitionID) Of() PartitionID { return p }

func (*Segment) key() uint64         { return 0 }
func (*Update) key() uint64          { return 1 }
func (*PartitionDelete) key() uint64 { return 2 }
func (*Snapshot) key() uint64        { return 3 }
