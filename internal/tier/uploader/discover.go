package uploader

import (
	"context"
	"errors"
	"fmt"
	"sort"

	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/tier"
)

// Discovered is a segment found in a bucket, or why its manifest could not be used.
type Discovered struct {
	Segment *tier.Segment
	Err     error
}

// Discover reads what a bucket alone tells about its segments below prefix: each manifest is one finished segment.
// It is how a cluster is recovered and how another's bucket is read. Results are sorted by topic, topic id, partition and start; a
// manifest that is malformed comes with its error and the names of its key. A failure of the store ends it.
func Discover(ctx context.Context, b objstore.Bucket, prefix string) ([]Discovered, error) {
	var out []Discovered
	err := b.List(ctx, prefix, "", func(info objstore.Info) error {
		k, o, err := remoteformat.ParseKey(prefix, info.Key)
		if err != nil || o != remoteformat.ObjectManifest {
			return nil
		}
		raw, err := objstore.ReadAll(ctx, b, info.Key, remoteformat.MaxManifestSize)
		if errors.Is(err, objstore.ErrNotFound) {
			return nil // deleted meanwhile
		}
		if err != nil {
			return err
		}
		out = append(out, discovered(k, raw, info.Key))
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("discover segments: %w", err)
	}
	sort.SliceStable(out, func(i, j int) bool {
		a, b := out[i].Segment, out[j].Segment
		if a.Topic != b.Topic {
			return a.Topic < b.Topic
		}
		if a.TopicID != b.TopicID {
			return a.TopicID.String() < b.TopicID.String()
		}
		if a.Partition != b.Partition {
			return a.Partition < b.Partition
		}
		return a.Start < b.Start
	})
	return out, nil
}

func discovered(k remoteformat.Key, raw []byte, key string) Discovered {
	d := Discovered{Segment: &tier.Segment{ID: k.ID, Topic: k.Topic, TopicID: k.TopicID, Partition: k.Partition, Start: k.Start, End: k.Start}}
	m, err := remoteformat.ParseManifest(raw)
	if err == nil && (m.Metadata.Key != k || m.Metadata.End < k.Start) {
		err = fmt.Errorf("%w: it describes %s to offset %d", remoteformat.ErrManifest, m.Metadata.Path(), m.Metadata.End)
	}
	if err != nil {
		d.Err = fmt.Errorf("segment %q: %w", key, err)
		return d
	}
	s := d.Segment
	s.End, s.MaxTimestamp, s.Broker, s.EventTime = m.Metadata.End, m.Metadata.MaxTimestamp, m.Metadata.Broker, m.Metadata.EventTime
	s.Epochs, s.State, s.Size = m.Metadata.Epochs, tier.CopyFinished, m.Chunks.FileSize
	s.TxnIndexEmpty = m.Indexes.Transaction == nil
	s.Format = tier.FormatChunkedV1
	if m.Plain() {
		s.Format = tier.FormatKafkaV1
	}
	if n := len(s.Epochs); n > 0 {
		s.LeaderEpoch = s.Epochs[n-1].Epoch
	}
	s.ObjectBytes = int64(len(raw)) + m.Chunks.StoredSize()
	for _, span := range []*remoteformat.Span{&m.Indexes.Offset, &m.Indexes.Timestamp, &m.Indexes.ProducerSnapshot, &m.Indexes.LeaderEpoch, m.Indexes.Transaction} {
		if span != nil {
			s.ObjectBytes += span.Size
		}
	}
	return d
}
