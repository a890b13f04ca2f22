// Package directfetch is the extension of Kafka's Fetch that lets a consumer read tiered records from the object store
// itself (KIP-1248, KIP-1254). Everything travels in tagged fields of Fetch v12 and later, so that brokers and clients
// which do not know it ignore it (KIP-482). Both sides use this package and nothing else to read and write the fields.
// docs/direct-fetch.md is its specification. It is pure.
package directfetch

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/tp"
)

// Tag numbers. They are far above those that Kafka uses, and the same number is used at each level.
const (
	TagFormats   uint32 = 10001 // FetchRequest: SupportedStorageFormatVersions
	TagRequested uint32 = 10001 // FetchRequest partition: RemoteLogSegmentLocationRequested
	TagLocations uint32 = 10001 // FetchResponse partition: the locations
	TagUse       uint32 = 10002 // FetchRequest: what the client has read from the bucket
)

// MinVersion is the first Fetch version with tagged fields.
const MinVersion = 12

// Feature is the name under which a broker announces the extension in ApiVersions (SupportedFeatures, levels 1 to 1).
const Feature = "varve.direct.fetch"

// FeatureLevel is the only level of the extension so far.
const FeatureLevel = 1

// ErrMalformed is a field that does not parse.
var ErrMalformed = errors.New("malformed direct fetch field")

// Bounds on what is accepted from a peer.
const (
	maxFormats   = 64
	maxLocations = 64
)

// Location says where the batches of a remote segment are, from the one that holds the asked offset to the segment's end.
// Positions count plain bytes of the segment's log; formats that store it in another form map them.
type Location struct {
	SegmentID      tp.UUID // RemoteLogSegmentId
	CustomMetadata []byte  // RemoteLogSegmentCustomMetadata, opaque; nil if none
	ObjectKey      string  // key of the log object in the bucket, any prefix included
	Format         string  // storage format, one of those that the request listed
	BaseOffset     int64   // first offset of the segment
	EndOffset      int64   // last offset of the range, inclusive
	StartPosition  int64   // first byte of the range, inclusive: the start of a batch at or before the asked offset
	EndPosition    int64   // end of the range, exclusive: the end of the batch that holds EndOffset
	SegmentSize    int64   // plain bytes of the whole log object
	LeaderEpoch    int32   // leader epoch of the partition when the location was handed out
	ValidityMs     int64   // how long the object is sure to stay, from the receipt of the answer
	// LogGrant and ManifestGrant are signed URLs that read the log object and, where the format has one, its manifest; "" for none.
	LogGrant, ManifestGrant Grant
}

// Grant is a URL that carries the right to read what it names. It is not for logs and prints as what it is.
type Grant string

// String hides the URL.
func (g Grant) String() string {
	if g == "" {
		return "no grant"
	}
	return "a granted URL"
}

// GoString is String.
func (g Grant) GoString() string { return g.String() }

// Tagged fields of a location.
const (
	tagLogGrant      = 0
	tagManifestGrant = 1
)

// maxGrant bounds a granted URL, in bytes.
const maxGrant = 16 << 10

// SetFormats lists the storage formats that the client can read.
func SetFormats(r *kmsg.FetchRequest, formats []string) {
	b := binary.AppendUvarint(nil, uint64(len(formats)+1))
	for _, f := range formats {
		b = appendString(b, f)
	}
	r.UnknownTags.Set(TagFormats, b)
}

// Formats returns the listed formats; none if the field is missing or malformed, which is the classic answer.
func Formats(r *kmsg.FetchRequest) []string {
	b, ok := find(&r.UnknownTags, TagFormats)
	if !ok {
		return nil
	}
	d := decoder{b: b}
	n := d.length(maxFormats)
	var formats []string
	for i := 0; i < n; i++ {
		formats = append(formats, d.string())
	}
	if d.err != nil || len(d.b) != 0 {
		return nil
	}
	return formats
}

// Use is what a client has read from the bucket by itself.
type Use struct {
	Requests, Bytes int64 // of ranges of objects; plain bytes
}

// SetUse reports what was read since the last report.
func SetUse(r *kmsg.FetchRequest, u Use) {
	r.UnknownTags.Set(TagUse, binary.AppendUvarint(binary.AppendUvarint(nil, uint64(u.Requests)), uint64(u.Bytes)))
}

// Used returns what the client reports; nothing if the field is missing or malformed. It is the client's word.
func Used(r *kmsg.FetchRequest) Use {
	b, ok := find(&r.UnknownTags, TagUse)
	if !ok {
		return Use{}
	}
	d := decoder{b: b}
	requests, bytes := d.uvarint(), d.uvarint()
	const most = 1 << 50 // of one report
	if d.err != nil || len(d.b) != 0 || requests > most || bytes > most {
		return Use{}
	}
	return Use{int64(requests), int64(bytes)}
}

// Request asks for locations of one partition.
func Request(p *kmsg.FetchRequestTopicPartition) { p.UnknownTags.Set(TagRequested, []byte{1}) }

// Requested reports whether locations are asked for.
func Requested(p *kmsg.FetchRequestTopicPartition) bool {
	b, ok := find(&p.UnknownTags, TagRequested)
	return ok && len(b) == 1 && b[0] == 1
}

// SetLocations answers with locations, in offset order.
func SetLocations(p *kmsg.FetchResponseTopicPartition, locations []Location) {
	p.UnknownTags.Set(TagLocations, AppendLocations(nil, locations))
}

// AppendLocations encodes the value of the response's field.
func AppendLocations(b []byte, locations []Location) []byte {
	b = binary.AppendUvarint(b, uint64(len(locations)+1))
	for _, l := range locations {
		b = append(b, l.SegmentID[:]...)
		if l.CustomMetadata == nil {
			b = append(b, 0)
		} else {
			b = append(binary.AppendUvarint(b, uint64(len(l.CustomMetadata)+1)), l.CustomMetadata...)
		}
		b = appendString(appendString(b, l.ObjectKey), l.Format)
		for _, n := range []int64{l.BaseOffset, l.EndOffset, l.StartPosition, l.EndPosition, l.SegmentSize} {
			b = binary.BigEndian.AppendUint64(b, uint64(n))
		}
		b = binary.BigEndian.AppendUint32(b, uint32(l.LeaderEpoch))
		b = binary.BigEndian.AppendUint64(b, uint64(l.ValidityMs))
		b = appendGrants(b, l.LogGrant, l.ManifestGrant)
	}
	return b
}

// appendGrants appends a location's tagged fields.
func appendGrants(b []byte, byTag ...Grant) []byte {
	n := 0
	for _, g := range byTag {
		if g != "" {
			n++
		}
	}
	b = binary.AppendUvarint(b, uint64(n))
	for tag, g := range byTag {
		if g != "" {
			b = binary.AppendUvarint(b, uint64(tag))
			b = append(binary.AppendUvarint(b, uint64(len(g))), g...)
		}
	}
	return b
}

// Locations returns the locations of an answer, none if it has no such field.
func Locations(p *kmsg.FetchResponseTopicPartition) ([]Location, error) {
	b, ok := find(&p.UnknownTags, TagLocations)
	if !ok {
		return nil, nil
	}
	return ParseLocations(b)
}

// ParseLocations decodes the value of the response's field and checks that each location is possible.
func ParseLocations(b []byte) ([]Location, error) {
	d := decoder{b: b}
	n := d.length(maxLocations)
	var out []Location
	for i := 0; i < n && d.err == nil; i++ {
		var l Location
		copy(l.SegmentID[:], d.take(16))
		l.CustomMetadata = d.nullableBytes()
		l.ObjectKey, l.Format = d.string(), d.string()
		l.BaseOffset, l.EndOffset = d.int64(), d.int64()
		l.StartPosition, l.EndPosition, l.SegmentSize = d.int64(), d.int64(), d.int64()
		l.LeaderEpoch = int32(d.int32())
		l.ValidityMs = d.int64()
		d.tags(func(tag uint64, value []byte) {
			switch tag {
			case tagLogGrant:
				l.LogGrant = Grant(value)
			case tagManifestGrant:
				l.ManifestGrant = Grant(value)
			}
			if len(value) > maxGrant && tag <= tagManifestGrant {
				d.fail()
			}
		})
		if d.err == nil && (l.BaseOffset < 0 || l.EndOffset < l.BaseOffset || l.StartPosition < 0 || l.EndPosition <= l.StartPosition || l.SegmentSize < l.EndPosition || l.ObjectKey == "") {
			d.err = fmt.Errorf("%w: impossible location %+v", ErrMalformed, l)
		}
		out = append(out, l)
	}
	if d.err == nil && len(d.b) != 0 {
		d.err = fmt.Errorf("%w: %d bytes behind the locations", ErrMalformed, len(d.b))
	}
	if d.err != nil {
		return nil, d.err
	}
	return out, nil
}

func find(tags *kmsg.Tags, key uint32) (value []byte, ok bool) {
	tags.Each(func(k uint32, v []byte) {
		if k == key {
			value, ok = v, true
		}
	})
	return value, ok
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s)+1)), s...)
}

// decoder reads Kafka's flexible encoding; after the first error it returns zeros.
type decoder struct {
	b   []byte
	err error
}

func (d *decoder) fail() {
	if d.err == nil {
		d.err = fmt.Errorf("%w: short", ErrMalformed)
	}
	d.b = nil
}

func (d *decoder) take(n int) []byte {
	if n < 0 || n > len(d.b) {
		d.fail()
		return nil
	}
	v := d.b[:n]
	d.b = d.b[n:]
	return v
}

func (d *decoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.fail()
		return 0
	}
	d.b = d.b[n:]
	return v
}

// length reads a compact array's length, 0 for null.
func (d *decoder) length(limit uint64) int {
	v := d.uvarint()
	if v == 0 {
		return 0
	}
	if v-1 > limit {
		d.fail()
		return 0
	}
	return int(v - 1)
}

func (d *decoder) nullableBytes() []byte {
	v := d.uvarint()
	if v == 0 || v-1 > uint64(len(d.b)) {
		if v != 0 {
			d.fail()
		}
		return nil
	}
	return append([]byte{}, d.take(int(v-1))...)
}

func (d *decoder) string() string {
	v := d.uvarint()
	if v == 0 || v-1 > uint64(len(d.b)) {
		d.fail()
		return ""
	}
	return string(d.take(int(v - 1)))
}

func (d *decoder) int64() int64 {
	if b := d.take(8); b != nil {
		return int64(binary.BigEndian.Uint64(b))
	}
	return 0
}

func (d *decoder) int32() uint32 {
	if b := d.take(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

// tags calls fn with each tagged field.
func (d *decoder) tags(fn func(tag uint64, value []byte)) {
	for n := d.uvarint(); n > 0 && d.err == nil; n-- {
		tag, size := d.uvarint(), d.uvarint()
		if size > uint64(len(d.b)) {
			d.fail()
			return
		}
		fn(tag, d.take(int(size)))
	}
}
