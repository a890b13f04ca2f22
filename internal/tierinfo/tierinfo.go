// Package tierinfo lets an admin see the tier through Kafka's own protocol: what a broker knows of its remote segments
// travels in tagged fields of DescribeLogDirs v2 and later, which other clients ignore (KIP-482); and where a follower's local log
// starts, in one of Fetch. It is pure.
package tierinfo

import (
	"encoding/binary"
	"fmt"

	"github.com/fxamacker/cbor/v2"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

// Tag is the number of the field at every level of request and response.
const Tag uint32 = 10002

// MinVersion is the first DescribeLogDirs version with tagged fields.
const MinVersion = 2

// Ask says how much to tell; it is the value of the request's field.
type Ask byte

const (
	Summary  Ask = 1 // sums by partition
	Segments Ask = 2 // every remote segment too, and those of deleted topics
	Readers  Ask = 3 // sums by partition, and who reads from the bucket
)

// Partition is what a replica tells of one partition's tier.
type Partition struct {
	LocalStart   int64 `cbor:"1,keyasint" json:"localLogStartOffset"` // first offset on disk
	LogStart     int64 `cbor:"2,keyasint" json:"logStartOffset"`
	End          int64 `cbor:"3,keyasint" json:"highWatermark"`     // high watermark
	RemoteStart  int64 `cbor:"4,keyasint" json:"remoteStartOffset"` // -1 if nothing is in the tier
	RemoteEnd    int64 `cbor:"5,keyasint" json:"remoteEndOffset"`   // inclusive, -1
	RemoteBytes  int64 `cbor:"6,keyasint" json:"remoteBytes"`
	RemoteCount  int64 `cbor:"7,keyasint" json:"remoteSegments"`
	Deleting     int64 `cbor:"8,keyasint" json:"deleting"` // segments that wait for the removal of their objects
	LagBytes     int64 `cbor:"9,keyasint" json:"lagBytes"` // sealed and not in the tier
	LagSegments  int64 `cbor:"10,keyasint" json:"lagSegments"`
	Copying      bool  `cbor:"11,keyasint" json:"copying"`
	Tiered       bool  `cbor:"12,keyasint" json:"tiered"`
	CopyDisabled bool  `cbor:"13,keyasint" json:"copyDisabled"`
	// Failure says why the last pass over the partition failed, "" if it did not.
	Failure string `cbor:"14,keyasint,omitempty" json:"failure,omitempty"`
	// Unstable is the first offset of the oldest open transaction, which holds the tier back; -1 if there is none.
	Unstable int64          `cbor:"15,keyasint" json:"openTransactionSince"`
	List     []tier.Segment `cbor:"16,keyasint,omitempty" json:"segments,omitempty"`
	// LocalBytes is the local span of this replica, which decides how readily it is made leader (KIP-1303).
	LocalBytes int64 `cbor:"17,keyasint" json:"localBytes"`
	// Follower says that another broker leads; Phase is what it is at then.
	Follower bool   `cbor:"18,keyasint,omitempty" json:"follower,omitempty"`
	Phase    string `cbor:"19,keyasint,omitempty" json:"phase,omitempty"`
	LogEnd   int64  `cbor:"20,keyasint" json:"logEndOffset"`
	// Thin replicas hold too little locally to be preferred as leader.
	Thin bool `cbor:"21,keyasint,omitempty" json:"thin,omitempty"`
}

// Deleted are the remote segments of deleted topics that are not gone yet.
type Deleted struct {
	Topic string         `cbor:"1,keyasint"`
	ID    tp.UUID        `cbor:"2,keyasint"`
	List  []tier.Segment `cbor:"3,keyasint"`
}

// Reader is a client that was told places in the bucket, as one broker knows it since it started.
type Reader struct {
	Client    string `cbor:"1,keyasint" json:"clientId"`
	Host      string `cbor:"2,keyasint" json:"host"`
	Locations int64  `cbor:"3,keyasint" json:"locations"`    // that it was given
	Granted   int64  `cbor:"4,keyasint" json:"grantedBytes"` // plain bytes behind them
	Requests  int64  `cbor:"5,keyasint" json:"requests"`     // ranges of objects that it says it has read
	Used      int64  `cbor:"6,keyasint" json:"usedBytes"`    // plain bytes of those
	Last      int64  `cbor:"7,keyasint" json:"lastMs"`       // Unix time of the last of either
}

// Request asks for the tier in a DescribeLogDirs request.
func Request(r *kmsg.DescribeLogDirsRequest, a Ask) { r.UnknownTags.Set(Tag, []byte{byte(a)}) }

// Requested tells what was asked, 0 for nothing.
func Requested(r *kmsg.DescribeLogDirsRequest) Ask {
	b := find(&r.UnknownTags)
	if len(b) != 1 || b[0] > byte(Readers) {
		return 0
	}
	return Ask(b[0])
}

// Set answers for a partition.
func Set(r *kmsg.DescribeLogDirsResponseDirTopicPartition, p Partition) error {
	return set(&r.UnknownTags, p)
}

// Get reads the answer for a partition; ok is false if the broker told nothing.
func Get(r *kmsg.DescribeLogDirsResponseDirTopicPartition) (p Partition, ok bool, err error) {
	ok, err = get(&r.UnknownTags, &p)
	return p, ok, err
}

// SetDeleted answers for deleted topics.
func SetDeleted(r *kmsg.DescribeLogDirsResponse, d []Deleted) error { return set(&r.UnknownTags, d) }

// GetDeleted reads the answer for deleted topics.
func GetDeleted(r *kmsg.DescribeLogDirsResponse) (d []Deleted, err error) {
	_, err = get(&r.UnknownTags, &d)
	return d, err
}

// SetReaders answers with who reads from the bucket.
func SetReaders(r *kmsg.DescribeLogDirsResponse, list []Reader) error {
	return set(&r.UnknownTags, list)
}

// GetReaders reads who does; ok is false if the broker told nothing.
func GetReaders(r *kmsg.DescribeLogDirsResponse) (list []Reader, ok bool, err error) {
	ok, err = get(&r.UnknownTags, &list)
	return list, ok, err
}

// SetLocalStart says where the local log of the follower that fetches starts; its log start is in a field of its own.
func SetLocalStart(p *kmsg.FetchRequestTopicPartition, offset int64) {
	p.UnknownTags.Set(Tag, binary.BigEndian.AppendUint64(nil, uint64(offset)))
}

// LocalStart reads that; a follower that does not say has all of its log locally.
func LocalStart(p *kmsg.FetchRequestTopicPartition) int64 {
	if b := find(&p.UnknownTags); len(b) == 8 {
		return max(int64(binary.BigEndian.Uint64(b)), p.LogStartOffset)
	}
	return p.LogStartOffset
}

func set(tags *kmsg.Tags, v any) error {
	b, err := cbor.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode tier info: %w", err)
	}
	tags.Set(Tag, b)
	return nil
}

func get(tags *kmsg.Tags, v any) (bool, error) {
	b := find(tags)
	if b == nil {
		return false, nil
	}
	if err := cbor.Unmarshal(b, v); err != nil {
		return false, fmt.Errorf("decode tier info: %w", err)
	}
	return true, nil
}

func find(tags *kmsg.Tags) (value []byte) {
	tags.Each(func(k uint32, v []byte) {
		if k == Tag {
			value = v
		}
	})
	return value
}
