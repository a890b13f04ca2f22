// Package bucketlayout tells what the objects of a bucket are by their keys alone: segments that Aiven's plug-in (and so Varve),
// Kafka's own LocalTieredStorage, or Pinterest's uploader put there, under whatever prefix. It is pure, takes hostile keys, and
// what it recognizes it writes again byte for byte.
package bucketlayout

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/tp"
)

// Layout is how the objects of a segment are named.
type Layout string

// The layouts. Of Kafka's it is that of LocalTieredStorage, a folder.
const (
	Aiven     Layout = "aiven"     // TOPIC-TOPICID/PARTITION/OFFSET-ID.KIND
	Kafka     Layout = "kafka"     // TOPIC-PARTITION-TOPICID/OFFSET-ID.KIND
	Pinterest Layout = "pinterest" // TOPIC-PARTITION/OFFSET.KIND, and two marks of the partition
)

// Kind is the end of an object's key, without the dot.
type Kind string

// The kinds of objects.
const (
	Log       Kind = "log"
	Index     Kind = "index"
	TimeIndex Kind = "timeindex"
	TxnIndex  Kind = "txnindex"
	Snapshot  Kind = "snapshot"
	Epochs    Kind = "leader_epoch_checkpoint"
	Indexes   Kind = "indexes"      // all indexes in one object
	Manifest  Kind = "rsm-manifest" // written last: what has one is complete
	Watermark Kind = "offset.wm"    // of a partition
	Metadata  Kind = "_metadata"    // of a partition
)

// kinds are the kinds of objects of a segment in each layout, and which of them every segment has.
var kinds = map[Layout]struct{ all, needed []Kind }{
	Aiven:     {[]Kind{Log, Indexes, Manifest}, []Kind{Log, Indexes, Manifest}},
	Kafka:     {[]Kind{Log, Index, TimeIndex, TxnIndex, Snapshot, Epochs}, []Kind{Log, Index, TimeIndex, Snapshot, Epochs}},
	Pinterest: {[]Kind{Log, Index, TimeIndex}, []Kind{Log, Index, TimeIndex}},
}

// Partition names a partition in a bucket. Prefix is what stands in front of the topic's name, up to and with the last slash.
// The topic id is zero where the layout has none.
type Partition struct {
	Layout    Layout
	Prefix    string
	Topic     string
	TopicID   tp.UUID
	Partition int32
}

// Segment names a segment. Its id is zero where the layout has none.
type Segment struct {
	Partition
	Base int64
	ID   tp.UUID
}

// Key is the key of one of the segment's objects.
func (s Segment) Key(k Kind) string {
	switch s.Layout {
	case Aiven:
		return s.Prefix + s.remote().Path() + "." + string(k)
	case Kafka:
		return fmt.Sprintf("%s%s-%d-%s/%020d-%s.%s", s.Prefix, s.Topic, s.Partition.Partition, s.TopicID, s.Base, s.ID, k)
	}
	return fmt.Sprintf("%s%s-%d/%020d.%s", s.Prefix, s.Topic, s.Partition.Partition, s.Base, k)
}

func (s Segment) remote() remoteformat.Key {
	return remoteformat.Key{Topic: s.Topic, TopicID: s.TopicID, Partition: s.Partition.Partition, Start: s.Base, ID: s.ID}
}

// Needed are the kinds of objects that every segment of a layout has.
func (l Layout) Needed() []Kind { return kinds[l].needed }

// Parse tells what an object is. For the marks of a partition Base is -1. ok is false for what is in no layout.
func Parse(key string) (s Segment, k Kind, ok bool) {
	parts := strings.Split(key, "/")
	for _, parse := range []func([]string) (Segment, Kind, bool){aiven, kafka, pinterest} {
		if s, k, ok = parse(parts); ok {
			if s.Base < 0 {
				return s, k, true
			}
			return s, k, slices.Contains(kinds[s.Layout].all, k) && s.Key(k) == key
		}
	}
	return Segment{}, "", false
}

// prefix joins what stands in front of the last n parts.
func prefix(parts []string, n int) string {
	if len(parts) == n {
		return ""
	}
	return strings.Join(parts[:len(parts)-n], "/") + "/"
}

// cutID cuts an id off the end of a name. Ids may have dashes in them.
func cutID(name string) (rest string, id tp.UUID, ok bool) {
	const idLen = 22
	cut := len(name) - idLen - 1
	if cut < 1 || name[cut] != '-' {
		return "", id, false
	}
	id, err := tp.ParseUUID(name[cut+1:])
	return name[:cut], id, err == nil
}

// file reads OFFSET[-ID].KIND.
func file(name string, hasID bool) (base int64, id tp.UUID, k Kind, ok bool) {
	stem, suffix, found := strings.Cut(name, ".")
	if !found {
		return 0, id, "", false
	}
	if hasID {
		if stem, id, ok = cutID(stem); !ok {
			return 0, id, "", false
		}
	}
	if len(stem) != 20 {
		return 0, id, "", false
	}
	base, err := strconv.ParseInt(stem, 10, 64)
	return base, id, Kind(suffix), err == nil && base >= 0
}

// number cuts a partition off the end of a name.
func number(name string) (rest string, n int32, ok bool) {
	cut := strings.LastIndexByte(name, '-')
	if cut < 1 {
		return "", 0, false
	}
	v, err := strconv.ParseInt(name[cut+1:], 10, 32)
	return name[:cut], int32(v), err == nil && v >= 0 && strconv.FormatInt(v, 10) == name[cut+1:]
}

func aiven(parts []string) (s Segment, k Kind, ok bool) {
	if len(parts) < 3 {
		return s, k, false
	}
	s.Layout, s.Prefix = Aiven, prefix(parts, 3)
	if s.Topic, s.TopicID, ok = cutID(parts[len(parts)-3]); !ok {
		return s, k, false
	}
	n, err := strconv.ParseInt(parts[len(parts)-2], 10, 32)
	if err != nil {
		return s, k, false
	}
	s.Partition.Partition = int32(n)
	s.Base, s.ID, k, ok = file(parts[len(parts)-1], true)
	return s, k, ok
}

func kafka(parts []string) (s Segment, k Kind, ok bool) {
	if len(parts) < 2 {
		return s, k, false
	}
	s.Layout, s.Prefix = Kafka, prefix(parts, 2)
	name, id, ok := cutID(parts[len(parts)-2])
	if !ok {
		return s, k, false
	}
	s.TopicID = id
	if s.Topic, s.Partition.Partition, ok = number(name); !ok {
		return s, k, false
	}
	s.Base, s.ID, k, ok = file(parts[len(parts)-1], true)
	return s, k, ok
}

func pinterest(parts []string) (s Segment, k Kind, ok bool) {
	if len(parts) < 2 {
		return s, k, false
	}
	s.Layout, s.Prefix = Pinterest, prefix(parts, 2)
	if s.Topic, s.Partition.Partition, ok = number(parts[len(parts)-2]); !ok {
		return s, k, false
	}
	if k = Kind(parts[len(parts)-1]); k == Watermark || k == Metadata {
		s.Base = -1
		return s, k, true
	}
	s.Base, s.ID, k, ok = file(parts[len(parts)-1], false)
	return s, k, ok
}

// Objects are the sizes of a segment's objects in bytes.
type Objects map[Kind]int64

// Found is a segment with what there is of it.
type Found struct {
	Segment
	Objects Objects
}

// Missing are the kinds of objects that it should have and has not.
func (f *Found) Missing() (out []Kind) {
	for _, k := range f.Layout.Needed() {
		if _, ok := f.Objects[k]; !ok {
			out = append(out, k)
		}
	}
	return out
}

// Committed reports whether the upload was finished, as far as the objects tell.
func (f *Found) Committed() bool {
	if f.Layout == Aiven {
		_, ok := f.Objects[Manifest]
		return ok
	}
	return len(f.Missing()) == 0
}

// Bytes is the size of all its objects.
func (f *Found) Bytes() (n int64) {
	for _, size := range f.Objects {
		n += size
	}
	return n
}

// PartitionSegments are the segments of a partition by base offset.
type PartitionSegments struct {
	Partition
	Segments []*Found
}

// Catalog gathers what a listing tells. The zero value is ready; it is not for concurrent use. Its memory grows with the number
// of objects.
type Catalog struct {
	segments map[Segment]*Found
	Foreign  []string // keys that are in no layout, as they came
}

// Add takes an object in.
func (c *Catalog) Add(key string, size int64) {
	s, k, ok := Parse(key)
	if !ok {
		c.Foreign = append(c.Foreign, key)
		return
	}
	if s.Base < 0 {
		return // a mark tells nothing that the segments do not
	}
	if c.segments == nil {
		c.segments = map[Segment]*Found{}
	}
	f := c.segments[s]
	if f == nil {
		f = &Found{Segment: s, Objects: Objects{}}
		c.segments[s] = f
	}
	f.Objects[k] = size
}

// Partitions are those that have segments, in the order of their names.
func (c *Catalog) Partitions() []*PartitionSegments {
	byName := map[Partition]*PartitionSegments{}
	var out []*PartitionSegments
	for s, f := range c.segments {
		p := byName[s.Partition]
		if p == nil {
			p = &PartitionSegments{Partition: s.Partition}
			byName[s.Partition] = p
			out = append(out, p)
		}
		p.Segments = append(p.Segments, f)
	}
	for _, p := range out {
		slices.SortFunc(p.Segments, func(a, b *Found) int {
			return cmp.Or(cmp.Compare(a.Base, b.Base), strings.Compare(a.ID.String(), b.ID.String()))
		})
	}
	slices.SortFunc(out, func(a, b *PartitionSegments) int {
		return cmp.Or(strings.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition.Partition, b.Partition.Partition), strings.Compare(a.TopicID.String(), b.TopicID.String()),
			strings.Compare(string(a.Layout), string(b.Layout)), strings.Compare(a.Prefix, b.Prefix))
	})
	return out
}
