package inspect

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/grouprecord"
	"github.com/varve-io/varve/internal/recordbatch"
)

// longest is the length in bytes from which on keys and values are told by their length and hash.
const longest = 1024

// Record is one record of a batch. Its bytes are valid until emit returns. In JSON a key or value is "key" where its bytes
// are UTF-8, "keyBase64" where not, and "keyLength" with "keySha256" where it is long.
type Record struct {
	recordbatch.Record
	Sequence      int32 // -1 without a producer
	ProducerID    int64
	ProducerEpoch int16
	Transactional bool
	Control       *Marker // of control records, in place of key and value
	full          bool
}

// fields is a JSON object in order.
type fields []field

type field struct {
	name  string
	value any
}

// MarshalJSON writes the fields in their order.
func (f fields) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	b.WriteByte('{')
	for i, x := range f {
		if i > 0 {
			b.WriteByte(',')
		}
		if err := e.Encode(x.name); err != nil {
			return nil, err
		}
		b.WriteByte(':')
		if err := e.Encode(x.value); err != nil {
			return nil, err
		}
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

func (f fields) bytes(name string, v []byte, full bool) fields {
	switch {
	case v == nil:
		return append(f, field{name, nil})
	case len(v) > longest && !full:
		sum := sha256.Sum256(v)
		return append(f, field{name + "Length", len(v)}, field{name + "Sha256", hex.EncodeToString(sum[:])})
	case utf8.Valid(v):
		return append(f, field{name, string(v)})
	default:
		return append(f, field{name + "Base64", v})
	}
}

// MarshalJSON writes the form described at Record.
func (r *Record) MarshalJSON() ([]byte, error) {
	f := fields{{"offset", r.Offset}, {"timestamp", r.Timestamp}, {"sequence", r.Sequence}, {"producerId", r.ProducerID}, {"producerEpoch", r.ProducerEpoch}}
	if r.Control != nil {
		return append(f, field{"control", r.Control.Type}, field{"coordinatorEpoch", r.Control.CoordinatorEpoch}).MarshalJSON()
	}
	f = f.bytes("key", r.Key, r.full).bytes("value", r.Value, r.full)
	headers := make([]fields, 0, len(r.Headers))
	for _, h := range r.Headers {
		headers = append(headers, fields{{"key", string(h.Key)}}.bytes("value", h.Value, r.full))
	}
	return append(f, field{"headers", headers}, field{"transactional", r.Transactional}).MarshalJSON()
}

// Text is the form for people.
func (r *Record) Text() string {
	if r.Control != nil {
		return fmt.Sprintf("  %d  %s  %s, coordinator epoch %d", r.Offset, timeText(r.Timestamp), r.Control.Type, r.Control.CoordinatorEpoch)
	}
	var s strings.Builder
	fmt.Fprintf(&s, "  %d  %s  key %s  value %s", r.Offset, timeText(r.Timestamp), r.bytesText(r.Key), r.bytesText(r.Value))
	for _, h := range r.Headers {
		fmt.Fprintf(&s, "  %s=%s", h.Key, r.bytesText(h.Value))
	}
	return s.String()
}

func (r *Record) bytesText(b []byte) string {
	const width = 120
	switch {
	case b == nil:
		return "null"
	case len(b) > width && !r.full:
		return fmt.Sprintf("%q… (%d bytes)", b[:width], len(b))
	}
	return fmt.Sprintf("%q", b)
}

// GroupRecord is a record of __consumer_offsets: a committed offset if Topic is set, a part of a group of the consumer protocol (KIP-848) if Kind
// is, otherwise the state of a classic group. Deleted is a tombstone.
type GroupRecord struct {
	At      int64  `json:"offset"`
	Group   string `json:"group"`
	Deleted bool   `json:"deleted,omitempty"`

	Topic           string `json:"topic,omitempty"`
	Partition       *int32 `json:"partition,omitempty"`
	Committed       *int64 `json:"committedOffset,omitempty"`
	LeaderEpoch     *int32 `json:"leaderEpoch,omitempty"`
	Metadata        string `json:"metadata,omitempty"`
	CommitTimestamp int64  `json:"commitTimestamp,omitempty"`
	ExpireTimestamp int64  `json:"expireTimestamp,omitempty"`

	ProtocolType string        `json:"protocolType,omitempty"`
	Generation   *int32        `json:"generation,omitempty"`
	Protocol     string        `json:"protocol,omitempty"`
	Leader       string        `json:"leader,omitempty"`
	Members      []GroupMember `json:"members,omitempty"`

	Kind  string `json:"kind,omitempty"`
	Name  string `json:"name,omitempty"` // a member id, or a regular expression
	Value any    `json:"value,omitempty"`
}

// GroupMember is a member in the state of a group. Topics and Assigned are read where the protocol is that of consumers.
type GroupMember struct {
	ID         string             `json:"memberId"`
	InstanceID *string            `json:"groupInstanceId,omitempty"`
	ClientID   string             `json:"clientId"`
	Host       string             `json:"clientHost"`
	Topics     []string           `json:"topics,omitempty"`
	Assigned   map[string][]int32 `json:"assigned,omitempty"`
}

func groupItem(r *recordbatch.Record, e *grouprecord.Entry) *GroupRecord {
	g := &GroupRecord{At: r.Offset, Group: e.Group, Deleted: r.Value == nil}
	switch e.Kind {
	case grouprecord.KindOffset:
		g.Topic, g.Partition = e.Partition.Topic, &e.Partition.Partition
	case grouprecord.KindClassicGroup:
	default:
		g.Kind, g.Name, g.Value = e.Kind.String(), e.Name, e.Value
	}
	switch v := e.Value.(type) {
	case *grouprecord.Offset:
		g.Committed, g.LeaderEpoch, g.Metadata, g.CommitTimestamp = &v.Offset, &v.LeaderEpoch, v.Metadata, v.CommittedAt
		g.ExpireTimestamp = max(v.ExpiresAt, 0)
	case *kmsg.GroupMetadataValue:
		g.ProtocolType, g.Generation = v.ProtocolType, &v.Generation
		if v.Protocol != nil {
			g.Protocol = *v.Protocol
		}
		if v.Leader != nil {
			g.Leader = *v.Leader
		}
		for _, m := range v.Members {
			x := GroupMember{ID: m.MemberID, InstanceID: m.InstanceID, ClientID: m.ClientID, Host: m.ClientHost}
			if v.ProtocolType == "consumer" {
				x.consumer(m.Subscription, m.Assignment)
			}
			g.Members = append(g.Members, x)
		}
	}
	return g
}

// consumer reads what consumers put into the group's opaque bytes; what cannot be read is left out.
func (m *GroupMember) consumer(subscription, assignment []byte) {
	sub := kmsg.NewConsumerMemberMetadata()
	if sub.ReadFrom(subscription) == nil {
		m.Topics = sub.Topics
	}
	as := kmsg.NewConsumerMemberAssignment()
	if as.ReadFrom(assignment) == nil {
		for _, t := range as.Topics {
			if m.Assigned == nil {
				m.Assigned = map[string][]int32{}
			}
			m.Assigned[t.Topic] = append(m.Assigned[t.Topic], t.Partitions...)
		}
	}
}

// Text is the form for people.
func (g *GroupRecord) Text() string {
	switch {
	case g.Partition != nil && g.Committed != nil:
		return fmt.Sprintf("  %d  group %q %s-%d: offset %d, epoch %d, %q, committed %s", g.At, g.Group, g.Topic, *g.Partition, *g.Committed, *g.LeaderEpoch, g.Metadata, timeText(g.CommitTimestamp))
	case g.Partition != nil:
		return fmt.Sprintf("  %d  group %q %s-%d: deleted", g.At, g.Group, g.Topic, *g.Partition)
	case g.Kind != "":
		value := "deleted"
		if !g.Deleted {
			b, err := json.Marshal(g.Value)
			if value = string(b); err != nil {
				value = err.Error()
			}
		}
		name := g.Name
		if name != "" {
			name = fmt.Sprintf(" %q", name)
		}
		return fmt.Sprintf("  %d  group %q %s%s: %s", g.At, g.Group, g.Kind, name, value)
	case g.Deleted:
		return fmt.Sprintf("  %d  group %q: deleted", g.At, g.Group)
	}
	var s strings.Builder
	fmt.Fprintf(&s, "  %d  group %q: %s generation %d, protocol %q, leader %q, %d members", g.At, g.Group, g.ProtocolType, *g.Generation, g.Protocol, g.Leader, len(g.Members))
	for _, m := range g.Members {
		fmt.Fprintf(&s, "; %s from %s %v %v", m.ID, m.Host, m.Topics, m.Assigned)
	}
	return s.String()
}
