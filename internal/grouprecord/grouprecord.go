// Package grouprecord is the format of the records of __consumer_offsets, as Kafka 4.4 writes them: committed offsets, the state of classic
// groups, and the parts that a group of the consumer protocol (KIP-848) consists of. It knows nothing of what the records mean.
//
// A record's key begins with two bytes that say what it is about. A record with that key replaces all earlier ones; one without a value, a
// tombstone, takes it away. Values are read in every version that Kafka has written, and bounds are checked; nothing is allocated on the word
// of a length.
package grouprecord

import (
	"encoding/binary"
	"fmt"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/tp"
)

// Record is a record of __consumer_offsets; a nil Value is a tombstone.
type Record struct {
	Key, Value []byte
}

// Kind is what a record is about, the version of its key.
type Kind int16

// The kinds; those of share and streams groups are skipped.
const (
	KindLegacyOffset   Kind = 0
	KindOffset         Kind = 1  // an *Offset
	KindClassicGroup   Kind = 2  // a *kmsg.GroupMetadataValue
	KindGroupEpoch     Kind = 3  // a *GroupEpoch
	KindPartitions     Kind = 4  // a *PartitionMetadata; not written since Kafka 4.1 (KIP-1101)
	KindMember         Kind = 5  // a *Member
	KindTargetEpoch    Kind = 6  // a *TargetEpoch
	KindTarget         Kind = 7  // an Assignment
	KindCurrent        Kind = 8  // a *Current
	KindRegex          Kind = 16 // a *Regex
	offsetValueVersion      = 3
	groupValueVersion       = 3
)

// String is Kafka's name of the kind.
func (k Kind) String() string {
	switch k {
	case KindLegacyOffset, KindOffset:
		return "OffsetCommit"
	case KindClassicGroup:
		return "GroupMetadata"
	case KindGroupEpoch:
		return "ConsumerGroupMetadata"
	case KindPartitions:
		return "ConsumerGroupPartitionMetadata"
	case KindMember:
		return "ConsumerGroupMemberMetadata"
	case KindTargetEpoch:
		return "ConsumerGroupTargetAssignmentMetadata"
	case KindTarget:
		return "ConsumerGroupTargetAssignmentMember"
	case KindCurrent:
		return "ConsumerGroupCurrentMemberAssignment"
	case KindRegex:
		return "ConsumerGroupRegularExpression"
	}
	return fmt.Sprintf("kind %d", int16(k))
}

// Key says what a record is about.
type Key struct {
	Kind  Kind
	Group string
	// Name is the member id of KindMember, KindTarget and KindCurrent, and the expression of KindRegex.
	Name string
	// Partition is that of an offset.
	Partition TopicPartition
}

// Entry is one record in words. Value is nil for a tombstone, otherwise of the type that goes with the kind.
type Entry struct {
	Key
	Value any
}

// TopicPartition names a partition in committed offsets.
type TopicPartition struct {
	Topic     string
	Partition int32
}

// Offset is a committed offset.
type Offset struct {
	Offset      int64
	LeaderEpoch int32 // -1 unknown
	Metadata    string
	CommittedAt int64 // ms
	ExpiresAt   int64 // ms, set by old clients that ask for a retention of their own; -1 otherwise
}

// GroupEpoch is the epoch of a group, and a hash of the topics that it is for (KIP-1101).
type GroupEpoch struct {
	Epoch        int32 `json:"epoch"`
	MetadataHash int64 `json:"metadataHash"`
}

// PartitionMetadata says that a group has a record of a kind that is not used any more. Its content is not read.
type PartitionMetadata struct{}

// Member is what a member said of itself.
type Member struct {
	InstanceID  *string  `json:"instanceId,omitempty"`
	RackID      *string  `json:"rackId,omitempty"`
	ClientID    string   `json:"clientId"`
	ClientHost  string   `json:"clientHost"`
	Topics      []string `json:"subscribedTopicNames"`
	Regex       string   `json:"subscribedTopicRegex,omitempty"`
	RebalanceMs int32    `json:"rebalanceTimeoutMs"` // -1 unknown
	Assignor    *string  `json:"serverAssignor,omitempty"`
	Classic     *Classic `json:"classicMemberMetadata,omitempty"` // of a member that uses the classic protocol
}

// Classic is what JoinGroup says beyond that.
type Classic struct {
	SessionMs int32      `json:"sessionTimeoutMs"`
	Protocols []Protocol `json:"supportedProtocols"` // in the member's order, never empty
}

// Protocol is one assignment strategy of a classic member, and its subscription under it.
type Protocol struct {
	Name     string `json:"name"`
	Metadata []byte `json:"metadata"`
}

// TargetEpoch is the group epoch that the target assignment was made for, and when.
type TargetEpoch struct {
	Epoch int32 `json:"assignmentEpoch"`
	At    int64 `json:"assignmentTimestamp"` // ms, 0 if the next one need not wait (KIP-1263)
}

// Assignment are partitions by topic id, in ascending order, none empty.
type Assignment map[tp.UUID][]int32

// Owned are partitions by topic id, with the epoch in which the member got each (KIP-1251).
type Owned map[tp.UUID]map[int32]int32

// MemberState is how far a member is on its way to its target.
type MemberState int8

// The states, with Kafka's numbers.
const (
	Stable               MemberState = 0
	UnrevokedPartitions  MemberState = 1 // it has to give partitions up first
	UnreleasedPartitions MemberState = 2 // it waits for partitions that others hold
	Unknown              MemberState = 127
)

// Current is what a member has, and has to give up.
type Current struct {
	Epoch         int32       `json:"memberEpoch"`
	PreviousEpoch int32       `json:"previousMemberEpoch"`
	State         MemberState `json:"state"`
	Assigned      Owned       `json:"assignedPartitions"`
	Revoking      Owned       `json:"partitionsPendingRevocation"`
}

// Regex are the topics that a regular expression stands for.
type Regex struct {
	Topics  []string `json:"topics"`
	Version int64    `json:"version"`   // of the metadata in which they were found
	At      int64    `json:"timestamp"` // ms
}

// Record writes an entry.
func (e Entry) Record() Record { return Record{e.Key.encode(), encodeValue(e.Value)} }

func (k Key) encode() []byte {
	b := make([]byte, 0, 10+len(k.Group)+len(k.Partition.Topic)+len(k.Name))
	b = binary.BigEndian.AppendUint16(b, uint16(k.Kind))
	b = appendString(b, k.Group)
	switch k.Kind {
	case KindLegacyOffset, KindOffset:
		b = appendString(b, k.Partition.Topic)
		b = binary.BigEndian.AppendUint32(b, uint32(k.Partition.Partition))
	case KindMember, KindTarget, KindCurrent, KindRegex:
		b = appendString(b, k.Name)
	}
	return b
}

// Parse reads a record. ok is false for kinds that have no place here, which are skipped.
func Parse(key, value []byte) (e Entry, ok bool, err error) {
	r := reader{b: key}
	e.Kind = Kind(r.int16())
	switch e.Kind {
	case KindLegacyOffset, KindOffset:
		e.Group, e.Partition = r.string(), TopicPartition{r.string(), r.int32()}
		e.Kind = KindOffset
	case KindClassicGroup, KindGroupEpoch, KindPartitions, KindTargetEpoch:
		e.Group = r.string()
	case KindMember, KindTarget, KindCurrent, KindRegex:
		e.Group, e.Name = r.string(), r.string()
	default:
		if r.err == nil {
			return e, false, nil
		}
	}
	if r.err != nil {
		return Entry{}, false, fmt.Errorf("group record: key of kind %d: %w", e.Kind, r.err)
	}
	if value == nil {
		return e, true, nil
	}
	if e.Value, err = parseValue(e.Kind, value); err != nil {
		return Entry{}, false, fmt.Errorf("group record: kind %d of group %q: %w", e.Kind, e.Group, err)
	}
	return e, true, nil
}

func parseValue(kind Kind, b []byte) (any, error) {
	switch kind {
	case KindOffset:
		v := kmsg.NewOffsetCommitValue()
		if err := v.ReadFrom(b); err != nil {
			return nil, err
		}
		o := Offset{Offset: v.Offset, LeaderEpoch: -1, Metadata: v.Metadata, CommittedAt: v.CommitTimestamp, ExpiresAt: -1}
		if v.Version >= 3 {
			o.LeaderEpoch = v.LeaderEpoch
		}
		if v.Version == 1 && v.ExpireTimestamp >= 0 {
			o.ExpiresAt = v.ExpireTimestamp
		}
		return &o, nil
	case KindClassicGroup:
		v := kmsg.NewGroupMetadataValue()
		if err := v.ReadFrom(b); err != nil {
			return nil, err
		}
		return &v, nil
	}
	r := reader{b: b}
	if version := r.int16(); version != 0 && r.err == nil {
		return nil, fmt.Errorf("version %d is unknown", version)
	}
	v := r.value(kind)
	return v, r.err
}

func encodeValue(value any) []byte {
	switch v := value.(type) {
	case nil:
		return nil
	case *Offset:
		k := kmsg.NewOffsetCommitValue()
		k.Version = offsetValueVersion
		if v.ExpiresAt >= 0 {
			k.Version = 1 // the only version that carries an expiry of its own
			k.ExpireTimestamp = v.ExpiresAt
		}
		k.Offset, k.LeaderEpoch, k.Metadata, k.CommitTimestamp = v.Offset, v.LeaderEpoch, v.Metadata, v.CommittedAt
		return k.AppendTo(make([]byte, 0, 32+len(k.Metadata)))
	case *kmsg.GroupMetadataValue:
		v.Version = groupValueVersion
		return v.AppendTo(nil)
	}
	return appendValue([]byte{0, 0}, value)
}
