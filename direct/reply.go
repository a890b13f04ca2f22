package direct

import (
	"encoding/binary"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/directfetch"
)

// part is one partition of an answer. The records of resp are not used; those of records follow each other.
type part struct {
	resp    kmsg.FetchResponseTopicPartition
	records [][]byte
}

func (p *part) size() int {
	n := 0
	for _, r := range p.records {
		n += len(r)
	}
	return n
}

// topicParts are the partitions of one topic.
type topicParts struct {
	topic kmsg.FetchResponseTopic // name, id and tags only
	parts []*part
}

// encodeFetch frames a Fetch response of version 4 to 18 as slices to be written one after another. Records are not
// copied. head gives what is not of a topic; its session is answered with 0, as there is none.
func encodeFetch(correlation int32, version int16, head *kmsg.FetchResponse, topics []topicParts) [][]byte {
	e := &encoder{flexible: version >= 12, version: version, b: make([]byte, 4, 256)}
	e.int32(correlation)
	e.tags(nil)
	e.int32(head.ThrottleMillis)
	if version >= 7 {
		e.int16(head.ErrorCode)
		e.int32(0)
	}
	e.length(len(topics))
	for i := range topics {
		t := &topics[i]
		if version >= 13 {
			e.b = append(e.b, t.topic.TopicID[:]...)
		} else {
			e.string(t.topic.Topic)
		}
		e.length(len(t.parts))
		for _, p := range t.parts {
			e.part(p)
		}
		e.tags(&t.topic.UnknownTags)
	}
	if e.flexible {
		e.b = append(e.b, headTags(head, version)...)
	}
	e.cut()
	size := 0
	for _, s := range e.out {
		size += len(s)
	}
	binary.BigEndian.PutUint32(e.out[0], uint32(size-4))
	return e.out
}

// headTags are the tagged fields at the end of a response.
func headTags(head *kmsg.FetchResponse, version int16) []byte {
	only := kmsg.FetchResponse{Version: version, UnknownTags: head.UnknownTags}
	if version >= 16 {
		only.Brokers = head.Brokers
	}
	return only.AppendTo(nil)[4+2+4+1:] // throttle, error, session, no topics
}

type encoder struct {
	version  int16
	flexible bool
	b        []byte
	out      [][]byte
}

// cut ends the present slice.
func (e *encoder) cut() {
	if len(e.b) > 0 {
		e.out = append(e.out, e.b)
		e.b = e.b[len(e.b):] // goes on in the memory behind
	}
}

func (e *encoder) part(p *part) {
	r := &p.resp
	e.int32(r.Partition)
	e.int16(r.ErrorCode)
	e.int64(r.HighWatermark)
	e.int64(r.LastStableOffset)
	if e.version >= 5 {
		e.int64(r.LogStartOffset)
	}
	if r.AbortedTransactions == nil {
		e.length(-1)
	} else {
		e.length(len(r.AbortedTransactions))
		for i := range r.AbortedTransactions {
			e.int64(r.AbortedTransactions[i].ProducerID)
			e.int64(r.AbortedTransactions[i].FirstOffset)
			e.tags(&r.AbortedTransactions[i].UnknownTags)
		}
	}
	if e.version >= 11 {
		e.int32(r.PreferredReadReplica)
	}
	n := p.size()
	if e.flexible {
		e.b = binary.AppendUvarint(e.b, uint64(n)+1)
	} else {
		e.int32(int32(n))
	}
	if n > 0 && n <= 4096 { // fewer writes are cheaper than a copy
		for _, s := range p.records {
			e.b = append(e.b, s...)
		}
	} else if n > 0 {
		e.cut()
		e.out = append(e.out, p.records...)
	}
	if e.flexible {
		e.partTags(r)
	}
}

func (e *encoder) partTags(r *kmsg.FetchResponseTopicPartition) {
	var fields []tagged
	if d := &r.DivergingEpoch; d.Epoch != -1 || d.EndOffset != -1 {
		s := encoder{flexible: true}
		s.int32(d.Epoch)
		s.int64(d.EndOffset)
		s.tags(nil)
		fields = append(fields, tagged{0, s.b})
	}
	if l := &r.CurrentLeader; l.LeaderID != -1 || l.LeaderEpoch != -1 {
		s := encoder{flexible: true}
		s.int32(l.LeaderID)
		s.int32(l.LeaderEpoch)
		s.tags(nil)
		fields = append(fields, tagged{1, s.b})
	}
	if x := &r.SnapshotID; x.EndOffset != -1 || x.Epoch != -1 {
		s := encoder{flexible: true}
		s.int64(x.EndOffset)
		s.int32(x.Epoch)
		s.tags(nil)
		fields = append(fields, tagged{2, s.b})
	}
	r.UnknownTags.Each(func(tag uint32, value []byte) {
		if tag != directfetch.TagLocations {
			fields = append(fields, tagged{tag, value})
		}
	})
	e.b = binary.AppendUvarint(e.b, uint64(len(fields)))
	for _, f := range fields {
		e.b = binary.AppendUvarint(e.b, uint64(f.tag))
		e.b = binary.AppendUvarint(e.b, uint64(len(f.value)))
		e.b = append(e.b, f.value...)
	}
}

type tagged struct {
	tag   uint32
	value []byte
}

// tags appends a section of tagged fields, empty for nil.
func (e *encoder) tags(tags *kmsg.Tags) {
	switch {
	case !e.flexible:
	case tags == nil:
		e.b = append(e.b, 0)
	default:
		e.b = tags.AppendEach(binary.AppendUvarint(e.b, uint64(tags.Len())))
	}
}

// length appends that of an array, -1 for null.
func (e *encoder) length(n int) {
	if e.flexible {
		e.b = binary.AppendUvarint(e.b, uint64(n+1))
	} else {
		e.int32(int32(n))
	}
}

func (e *encoder) string(s string) {
	if e.flexible {
		e.b = binary.AppendUvarint(e.b, uint64(len(s)+1))
	} else {
		e.int16(int16(len(s)))
	}
	e.b = append(e.b, s...)
}

func (e *encoder) int16(v int16) { e.b = binary.BigEndian.AppendUint16(e.b, uint16(v)) }
func (e *encoder) int32(v int32) { e.b = binary.BigEndian.AppendUint32(e.b, uint32(v)) }
func (e *encoder) int64(v int64) { e.b = binary.BigEndian.AppendUint64(e.b, uint64(v)) }
