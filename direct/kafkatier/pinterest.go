package kafkatier

import (
	"context"
	"crypto/md5"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"sort"
	"strings"
	"time"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/remotelog"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tier"
)

const (
	// listFresh is how old a listing of a partition's folder may be.
	listFresh = time.Minute
	// maxListed bounds the objects of one partition that are listed.
	maxListed = 1 << 18
	// maxListMetadata bounds the object _metadata.
	maxListMetadata = 64 << 20
)

// PinterestOptions are the settings of Pinterest's uploader that place its objects.
type PinterestOptions struct {
	Prefix      string // base prefix, without slashes around it
	Cluster     string // id of the Kafka cluster
	EntropyBits int    // ts.segment.uploader.s3.prefix.entropy.bits; 0 is none
}

// Pinterest is the layout of Pinterest's uploader, which copies closed segments beside the broker. The broker knows nothing of
// them: what is below its log start is in the bucket alone, and is read for clients that ask for such an offset by itself.
// There is no transaction index, so that only read_uncommitted is served. The newest segment is not read, since nothing tells
// where it ends. Keys name neither topic id nor leader epoch: it can only be trusted as far as the uploader.
func Pinterest(o PinterestOptions) Layout {
	return func(f *objectstore.Fetcher) (layout, error) {
		store, ok := f.Store().(listStore)
		if !ok {
			return nil, errors.New("this layout needs a store that lists objects, such as that of objectstore.Open")
		}
		if o.Prefix == "" || o.Cluster == "" || o.EntropyBits < 0 || o.EntropyBits > 8*md5.Size {
			return nil, errors.New("this layout needs a prefix, a cluster id, and 0 to 128 bits of entropy")
		}
		return &pinterest{o, f, store}, nil
	}
}

// lister is a layout that does not go by __remote_log_metadata.
type lister interface {
	// list returns a partition's segments by start. Their ids are made up.
	list(ctx context.Context, topic string, partition int32) ([]*remotelog.Segment, error)
}

type listStore interface {
	List(ctx context.Context, prefix, after string, fn func(objstore.Info) error) error
}

type pinterest struct {
	o       PinterestOptions
	fetcher *objectstore.Fetcher
	store   listStore
}

// folder is the common part of a partition's keys.
func (p *pinterest) folder(topic string, partition int32) string {
	entropy := ""
	if p.o.EntropyBits > 0 {
		sum := md5.Sum(fmt.Appendf(nil, "%s-%s-%d", p.o.Cluster, topic, partition))
		for i := range p.o.EntropyBits {
			entropy += string('0' + sum[i/8]>>(7-i%8)&1)
		}
		entropy += "/"
	}
	return fmt.Sprintf("%s/%s%s/%s-%d/", p.o.Prefix, entropy, p.o.Cluster, topic, partition)
}

func (p *pinterest) key(s *remotelog.Segment, suffix string) string {
	return p.folder(s.Topic, s.Index) + segment.FileName(s.Start, suffix)
}

func (p *pinterest) object(s *remotelog.Segment) (direct.Segment, error) {
	return direct.Segment{SegmentID: s.ID, ObjectKey: p.key(s, segment.LogSuffix), Format: tier.FormatKafkaV1, Size: int64(s.Size), BaseOffset: s.Start}, nil
}

func (p *pinterest) index(ctx context.Context, s *remotelog.Segment, kind indexKind) ([]byte, error) {
	if kind != objectstore.OffsetIndex {
		return nil, errNoIndex
	}
	return p.fetcher.ReadObject(ctx, p.key(s, segment.OffsetIndexSuffix), objectstore.MaxIndexBytes)
}

// list finds the segments of which all three files are there and which the object _metadata, if there is one, names too. A
// segment ends where the next one begins.
func (p *pinterest) list(ctx context.Context, topic string, partition int32) ([]*remotelog.Segment, error) {
	folder := p.folder(topic, partition)
	sizes := map[int64]int64{}
	files := map[int64]int{}
	metadata, n := false, 0
	err := p.store.List(ctx, folder, "", func(i objstore.Info) error {
		if n++; n > maxListed {
			return fmt.Errorf("%w: more than %d objects below %q", direct.ErrUnknownFormat, maxListed, folder)
		}
		name := strings.TrimPrefix(i.Key, folder)
		metadata = metadata || name == "_metadata"
		base, suffix, ok := segment.ParseFileName(name)
		switch {
		case !ok:
		case suffix == segment.LogSuffix:
			sizes[base] = i.Size
			files[base]++
		case suffix == segment.OffsetIndexSuffix, suffix == segment.TimeIndexSuffix:
			files[base]++
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	var known map[int64]bool
	if metadata {
		if known, err = p.known(ctx, folder+"_metadata"); err != nil {
			return nil, err
		}
	}
	// A segment that is only half there still says where the one before it ends.
	var bases []int64
	for base := range files {
		bases = append(bases, base)
	}
	sort.Slice(bases, func(i, j int) bool { return bases[i] < bases[j] })
	var out []*remotelog.Segment
	for i, base := range bases {
		size := sizes[base]
		if i+1 == len(bases) || files[base] != 3 || size <= 0 || size > math.MaxInt32 || known != nil && !known[base] {
			continue
		}
		s := &remotelog.Segment{PartitionID: remotelog.PartitionID{Topic: topic, Index: partition}, Start: base, End: bases[i+1] - 1, Size: int32(size)}
		sum := sha256.Sum256([]byte(p.key(s, segment.LogSuffix)))
		copy(s.ID[:], sum[:])
		out = append(out, s)
	}
	return out, nil
}

// known reads the base offsets that _metadata names.
func (p *pinterest) known(ctx context.Context, key string) (map[int64]bool, error) {
	b, err := p.fetcher.ReadObject(ctx, key, maxListMetadata)
	if err != nil {
		return nil, err
	}
	var j struct {
		Metadata struct {
			TimeIndex struct {
				Entries []struct {
					BaseOffset int64 `json:"baseOffset"`
				} `json:"entries"`
			} `json:"timeindex"`
		} `json:"metadata"`
	}
	if err := json.Unmarshal(b, &j); err != nil {
		return nil, fmt.Errorf("%w: %q: %w", direct.ErrDamaged, key, err)
	}
	known := map[int64]bool{}
	for _, e := range j.Metadata.TimeIndex.Entries {
		known[e.BaseOffset] = true
	}
	return known, nil
}

// listing is what a partition's folder holds.
type listing struct {
	at       time.Time
	segments []*remotelog.Segment
}

func (l *listing) find(offset int64) *remotelog.Segment {
	i := sort.Search(len(l.segments), func(i int) bool { return l.segments[i].Start > offset })
	if i == 0 || l.segments[i-1].End < offset {
		return nil
	}
	return l.segments[i-1]
}

// holds reports whether an offset may be in the listing, if there is one that is not old.
func (l *listing) holds(offset int64) bool {
	return l == nil || time.Since(l.at) >= listFresh || l.find(offset) != nil
}

// locateListed is Locate for a layout that lists.
func (l *Locator) locateListed(ctx context.Context, lists lister, p *part, f facts, q direct.Query) (*direct.Location, error) {
	if q.Offset >= f.start {
		return nil, nil
	}
	l.mu.Lock()
	have := p.listing
	l.mu.Unlock()
	if have == nil || time.Since(have.at) >= listFresh {
		now := time.Now()
		segments, err := lists.list(ctx, f.topic, p.key.index)
		if err != nil {
			return nil, fmt.Errorf("list segments of %s-%d: %w", f.topic, p.key.index, err)
		}
		have = &listing{now, segments}
		l.mu.Lock()
		p.listing = have
		l.mu.Unlock()
	}
	s := have.find(q.Offset)
	if s == nil || l.isBad(s) {
		return nil, nil
	}
	loc, err := l.place(ctx, p, f, s, s.End, q)
	if err != nil && ofSegment(err) {
		l.setBad(s)
	}
	if loc != nil {
		loc.Archived = true
	}
	return loc, err
}
