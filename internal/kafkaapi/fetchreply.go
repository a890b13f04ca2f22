package kafkaapi

import (
	"encoding/binary"
	"slices"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/directfetch"
	"github.com/varve-io/varve/internal/fetch"
	"github.com/varve-io/varve/internal/wire"
)

// fetchReply frames a Fetch response by hand: kmsg would copy every record through memory, and here they are sections
// of files and cached blocks of the tier. The test of this file holds it against kmsg in every version.
type fetchReply struct {
	version     int16
	correlation int32
	throttle    int32 // ms
	code        int16
	session     int32
	committed   bool
	parts       []fetch.Part
	results     []fetch.Result
	keep        []bool
	brokers     []kmsg.FetchResponseBroker

	buf    []byte
	cuts   []cut
	failed error // records could not be read any more: the frame cannot be completed
}

// cut is where sections of files, or blocks of the tier, go between the bytes of buf.
type cut struct {
	at     int
	chunks []wire.Chunk
}

// inlineMax is the size up to which records are copied into the frame: one write is cheaper than several.
const inlineMax = 16 << 10

func (f *fetchReply) flexible() bool { return f.version >= 12 }

func (f *fetchReply) encode() wire.Reply {
	f.buf = make([]byte, 4, 128+64*len(f.results))
	f.buf = wire.AppendResponseHeader(f.buf, f.correlation, &kmsg.FetchResponse{Version: f.version})
	f.int32(f.throttle)
	if f.version >= 7 {
		f.int16(f.code)
		f.int32(f.session)
	}
	groups := f.topics()
	f.array(len(groups))
	for _, g := range groups {
		first := &f.parts[g[0]]
		if f.version >= 13 {
			f.buf = append(f.buf, first.TopicID[:]...)
		} else {
			f.string(first.Topic)
		}
		f.array(len(g))
		for _, i := range g {
			f.partition(&f.parts[i], &f.results[i])
		}
		f.tags()
	}
	f.brokerTags()
	return f.reply()
}

// topics groups the kept results by runs of one topic.
func (f *fetchReply) topics() [][]int {
	var groups [][]int
	for i := range f.results {
		if !f.keep[i] {
			continue
		}
		if n := len(groups); n > 0 {
			last := &f.parts[groups[n-1][0]]
			if last.Topic == f.parts[i].Topic && last.TopicID == f.parts[i].TopicID {
				groups[n-1] = append(groups[n-1], i)
				continue
			}
		}
		groups = append(groups, []int{i})
	}
	return groups
}

func (f *fetchReply) partition(p *fetch.Part, r *fetch.Result) {
	f.int32(p.Index)
	f.int16(code(r.Err))
	f.int64(r.HighWatermark)
	f.int64(r.LastStable)
	if f.version >= 5 {
		f.int64(r.LogStart)
	}
	if f.committed && r.Err == nil {
		f.array(len(r.Aborted))
		for _, t := range r.Aborted {
			f.int64(t.ProducerID)
			f.int64(t.FirstOffset)
			f.tags()
		}
	} else {
		f.array(-1)
	}
	if f.version >= 11 {
		preferred := int32(-1)
		if r.Preferred != nil {
			preferred = *r.Preferred
		}
		f.int32(preferred)
	}
	f.records(r)
	if f.flexible() {
		f.partitionTags(r)
	}
}

// records appends the length and, if they are few, the bytes; else it cuts the buffer here.
func (f *fetchReply) records(r *fetch.Result) {
	n := r.Size()
	if f.flexible() {
		f.buf = binary.AppendUvarint(f.buf, uint64(n+1))
	} else {
		f.int32(int32(n))
	}
	switch {
	case n == 0:
	case n <= inlineMax && r.View != nil:
		var err error
		if f.buf, err = r.View.AppendTo(f.buf); err != nil {
			f.failed = err
		}
	case n <= inlineMax:
		f.buf = r.Records.AppendTo(f.buf)
	case r.View != nil:
		c := cut{at: len(f.buf)}
		for _, s := range r.View.Sections() {
			c.chunks = append(c.chunks, wire.Chunk{File: s.File, Pos: s.Pos, Len: s.Len})
		}
		f.cuts = append(f.cuts, c)
	default:
		c := cut{at: len(f.buf)}
		for _, b := range r.Records {
			c.chunks = append(c.chunks, wire.Chunk{Bytes: b})
		}
		f.cuts = append(f.cuts, c)
	}
}

// partitionTags appends the tagged fields of a partition in the order of their numbers.
func (f *fetchReply) partitionTags(r *fetch.Result) {
	leader := r.Err != nil && r.Leader >= 0
	count := 0
	for _, has := range []bool{r.Diverging != nil, leader, len(r.Locations) > 0} {
		if has {
			count++
		}
	}
	f.buf = binary.AppendUvarint(f.buf, uint64(count))
	if r.Diverging != nil {
		f.buf = append(f.buf, 0, 13)
		f.int32(r.Diverging.Epoch)
		f.int64(r.Diverging.EndOffset)
		f.tags()
	}
	if leader {
		f.buf = append(f.buf, 1, 9)
		f.int32(r.Leader)
		f.int32(r.LeaderEpoch)
		f.tags()
	}
	if len(r.Locations) > 0 {
		value := directfetch.AppendLocations(nil, r.Locations)
		f.buf = binary.AppendUvarint(f.buf, uint64(directfetch.TagLocations))
		f.buf = binary.AppendUvarint(f.buf, uint64(len(value)))
		f.buf = append(f.buf, value...)
	}
}

// brokerTags appends the tagged fields of the response.
func (f *fetchReply) brokerTags() {
	if len(f.brokers) == 0 || f.version < 16 {
		f.tags()
		return
	}
	frame := &fetchReply{version: f.version}
	frame.array(len(f.brokers))
	for _, b := range f.brokers {
		frame.int32(b.NodeID)
		frame.string(b.Host)
		frame.int32(b.Port)
		if b.Rack == nil {
			frame.buf = append(frame.buf, 0)
		} else {
			frame.string(*b.Rack)
		}
		frame.tags()
	}
	f.buf = append(f.buf, 1, 0)
	f.buf = binary.AppendUvarint(f.buf, uint64(len(frame.buf)))
	f.buf = append(f.buf, frame.buf...)
}

// reply puts bytes and sections together and fills in the size.
func (f *fetchReply) reply() wire.Reply {
	var out wire.Reply
	at := 0
	for _, c := range f.cuts {
		out.Chunks = append(out.Chunks, wire.Chunk{Bytes: f.buf[at:c.at]})
		out.Chunks = append(out.Chunks, c.chunks...)
		at = c.at
	}
	if at < len(f.buf) {
		out.Chunks = append(out.Chunks, wire.Chunk{Bytes: f.buf[at:]})
	}
	out.Chunks = slices.Clip(out.Chunks)
	size := int64(0)
	for _, c := range out.Chunks {
		size += int64(len(c.Bytes)) + c.Len
	}
	binary.BigEndian.PutUint32(f.buf, uint32(size-4))
	results := f.results
	if f.failed != nil {
		out = wire.Hangup("records could not be read: " + f.failed.Error())
	}
	out.Release = func() {
		for i := range results {
			if results[i].View != nil {
				results[i].View.Release()
			}
		}
	}
	return out
}

func (f *fetchReply) int16(v int16) { f.buf = binary.BigEndian.AppendUint16(f.buf, uint16(v)) }
func (f *fetchReply) int32(v int32) { f.buf = binary.BigEndian.AppendUint32(f.buf, uint32(v)) }
func (f *fetchReply) int64(v int64) { f.buf = binary.BigEndian.AppendUint64(f.buf, uint64(v)) }

// array appends an array's length, -1 for null.
func (f *fetchReply) array(n int) {
	if f.flexible() {
		f.buf = binary.AppendUvarint(f.buf, uint64(n+1))
	} else {
		f.int32(int32(n))
	}
}

func (f *fetchReply) string(s string) {
	if f.flexible() {
		f.buf = binary.AppendUvarint(f.buf, uint64(len(s)+1))
	} else {
		f.int16(int16(len(s)))
	}
	f.buf = append(f.buf, s...)
}

// tags appends an empty section of tagged fields.
func (f *fetchReply) tags() {
	if f.flexible() {
		f.buf = append(f.buf, 0)
	}
}
