// Package tp holds the few words that every layer shares: partitions, topic ids and the sentinels of
// offsets and epochs. It knows nothing else and all its values are immutable.
package tp

import (
	"encoding/base64"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// UUID is Kafka's Uuid: 16 bytes, most significant first. The zero value means "none".
type UUID [16]byte

// Reserved ids, which Kafka never hands out (org.apache.kafka.common.Uuid).
var (
	ZeroUUID = UUID{}
	OneUUID  = UUID{15: 1}
)

// NewUUID draws a random (version 4) id from r. Kafka refuses ids whose text holds a '-', since command line
// tools would take it for a flag; so does this.
func NewUUID(r io.Reader) (UUID, error) {
	for {
		var u UUID
		if _, err := io.ReadFull(r, u[:]); err != nil {
			return UUID{}, fmt.Errorf("draw uuid: %w", err)
		}
		u[6] = u[6]&0x0f | 0x40
		u[8] = u[8]&0x3f | 0x80
		if u != ZeroUUID && u != OneUUID && !strings.Contains(u.String(), "-") {
			return u, nil
		}
	}
}

// ParseUUID reads Kafka's text form: base64url without padding, 22 characters.
func ParseUUID(s string) (UUID, error) {
	var u UUID
	if len(s) != 22 {
		return u, fmt.Errorf("uuid %q: want 22 characters of base64url", s)
	}
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil {
		return u, fmt.Errorf("uuid %q: %w", s, err)
	}
	copy(u[:], b)
	return u, nil
}

// String is Kafka's text form of the id.
func (u UUID) String() string { return base64.RawURLEncoding.EncodeToString(u[:]) }

// IsZero reports whether the id is absent.
func (u UUID) IsZero() bool { return u == ZeroUUID }

// MarshalText and UnmarshalText give the text form to JSON and configuration.
func (u UUID) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// UnmarshalText reads the text form.
func (u *UUID) UnmarshalText(b []byte) error {
	v, err := ParseUUID(string(b))
	if err == nil {
		*u = v
	}
	return err
}

// Partition names one partition of a topic.
type Partition struct {
	Topic string
	Index int32
}

// String is "topic-7", which is also the name of the partition's folder.
func (p Partition) String() string { return p.Topic + "-" + strconv.Itoa(int(p.Index)) }

// InTopic are partitions of one topic, as requests and answers list them.
type InTopic struct {
	Topic   string
	Indexes []int32
}

// ByTopic lists partitions by their topics, those of a topic together if they are neighbours.
func ByTopic(partitions []Partition) (out []InTopic) {
	for _, p := range partitions {
		if n := len(out); n == 0 || out[n-1].Topic != p.Topic {
			out = append(out, InTopic{Topic: p.Topic})
		}
		last := &out[len(out)-1]
		last.Indexes = append(last.Indexes, p.Index)
	}
	return out
}

// ParsePartition reads "topic-7"; topic names may themselves hold '-'.
func ParsePartition(s string) (Partition, error) {
	i := strings.LastIndexByte(s, '-')
	if i <= 0 {
		return Partition{}, fmt.Errorf("partition %q: want TOPIC-NUMBER", s)
	}
	n, err := strconv.ParseInt(s[i+1:], 10, 32)
	if err != nil || n < 0 || (s[i+1] == '+' || len(s[i+1:]) > 1 && s[i+1] == '0') {
		return Partition{}, fmt.Errorf("partition %q: %q is no partition number", s, s[i+1:])
	}
	return Partition{Topic: s[:i], Index: int32(n)}, nil
}

// NoOffset, NoEpoch and NoTimestamp are Kafka's "unknown" on the wire and on disk.
const (
	NoOffset    int64 = -1
	NoEpoch     int32 = -1
	NoTimestamp int64 = -1
)
