package kafkatier

import (
	"context"
	"errors"
	"fmt"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
	"github.com/varve-io/varve/internal/bucketlayout"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/remotelog"
	"github.com/varve-io/varve/internal/tier"
)

// Layout is how a storage plug-in names and writes its objects: Aiven, KafkaLocal or Pinterest.
type Layout func(*objectstore.Fetcher) (layout, error)

// layout reads one with a fetcher.
type layout interface {
	// object names the log of a segment as the fetcher wants it.
	object(*remotelog.Segment) (direct.Segment, error)
	// index reads an index of a segment, whole; nil where the segment is sure to have none. errNoIndex says that the layout
	// keeps none, or that it cannot be told whether there is one.
	index(ctx context.Context, s *remotelog.Segment, kind indexKind) ([]byte, error)
}

// errNoIndex: what the index would say is not known.
var errNoIndex = errors.New("segment has no such index")

type indexKind = objectstore.Index

// Aiven is the layout of Aiven's plug-in. Prefix is its key.prefix; segments whose custom metadata tells prefix or path are
// found by those.
func Aiven(prefix string) Layout {
	return func(f *objectstore.Fetcher) (layout, error) { return &aiven{prefix, f}, nil }
}

type aiven struct {
	prefix  string
	fetcher *objectstore.Fetcher
}

func (a *aiven) object(s *remotelog.Segment) (direct.Segment, error) {
	custom, err := remoteformat.ParseCustomMetadata(s.Custom)
	if err != nil {
		return direct.Segment{}, fmt.Errorf("%w: custom metadata of segment %s: %w", direct.ErrDamaged, s.ID, err)
	}
	prefix, path := a.prefix, remoteformat.Key{Topic: s.Topic, TopicID: s.TopicID, Partition: s.Index, Start: s.Start, ID: s.ID}.Path()
	if custom.Prefix != nil {
		prefix = *custom.Prefix
	}
	if custom.Path != nil {
		path = *custom.Path
	}
	return direct.Segment{SegmentID: s.ID, ObjectKey: prefix + path + remoteformat.ObjectLog.Suffix(), Format: tier.FormatChunkedV1, CustomMetadata: s.Custom,
		Size: int64(s.Size), BaseOffset: s.Start}, nil
}

func (a *aiven) index(ctx context.Context, s *remotelog.Segment, kind indexKind) ([]byte, error) {
	o, err := a.object(s)
	if err != nil {
		return nil, err
	}
	return a.fetcher.FetchIndex(ctx, o, kind)
}

// KafkaLocal is the layout of LocalTieredStorage, which Kafka uses in its own tests: Kafka's files side by side in one folder
// per partition. Prefix is what the keys of these folders begin with, such as "kafka-tiered-storage/".
func KafkaLocal(prefix string) Layout {
	return func(f *objectstore.Fetcher) (layout, error) { return &kafkaLocal{prefix, f}, nil }
}

type kafkaLocal struct {
	prefix  string
	fetcher *objectstore.Fetcher
}

func (k *kafkaLocal) key(s *remotelog.Segment, kind bucketlayout.Kind) string {
	in := bucketlayout.Partition{Layout: bucketlayout.Kafka, Prefix: k.prefix, Topic: s.Topic, TopicID: s.TopicID, Partition: s.Index}
	return bucketlayout.Segment{Partition: in, Base: s.Start, ID: s.ID}.Key(kind)
}

func (k *kafkaLocal) object(s *remotelog.Segment) (direct.Segment, error) {
	return direct.Segment{SegmentID: s.ID, ObjectKey: k.key(s, bucketlayout.Log), Format: tier.FormatKafkaV1, CustomMetadata: s.Custom, Size: int64(s.Size), BaseOffset: s.Start}, nil
}

func (k *kafkaLocal) index(ctx context.Context, s *remotelog.Segment, kind indexKind) ([]byte, error) {
	name := map[indexKind]bucketlayout.Kind{objectstore.OffsetIndex: bucketlayout.Index, objectstore.TransactionIndex: bucketlayout.TxnIndex,
		objectstore.ProducerSnapshot: bucketlayout.Snapshot}[kind]
	b, err := k.fetcher.ReadObject(ctx, k.key(s, name), objectstore.MaxIndexBytes)
	// A segment without aborted transactions has no such file, and one that is being deleted has none any more.
	if kind == objectstore.TransactionIndex && errors.Is(err, direct.ErrNotFound) {
		return nil, errNoIndex
	}
	return b, err
}
