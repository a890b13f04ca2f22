// Package controller turns commands into metadata records. Every function is pure: it reads an image, the time and the
// random source it is given, and returns records and an answer; it never changes the image. Whoever proposes the records
// must make sure that the image was the newest one (package control does, under one lock).
package controller

import (
	"errors"
	"fmt"
	"io"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

// Kinds of refusal. Each stands for one Kafka error code; the text for the user comes from Error.
var (
	ErrInvalidTopic             = errors.New("invalid topic")
	ErrTopicExists              = errors.New("topic already exists")
	ErrUnknownTopic             = errors.New("unknown topic or partition")
	ErrUnknownTopicID           = errors.New("unknown topic id")
	ErrInvalidPartitions        = errors.New("invalid partitions")
	ErrInvalidReplicationFactor = errors.New("invalid replication factor")
	ErrInvalidAssignment        = errors.New("invalid replica assignment")
	ErrInvalidConfig            = errors.New("invalid config")
	ErrInvalidRequest           = errors.New("invalid request")
	ErrFenced                   = errors.New("fenced")
	ErrDuplicateBroker          = errors.New("duplicate broker registration")
	ErrTopicDeletionDisabled    = errors.New("topic deletion is disabled")
)

// Error is a refusal: Kind says which, Message is for the user, in Kafka's words where Kafka has them.
type Error struct {
	Kind    error
	Message string
}

func (e *Error) Error() string { return e.Message }

// Unwrap makes errors.Is find the kind.
func (e *Error) Unwrap() error { return e.Kind }

func refuse(kind error, format string, args ...any) *Error {
	return &Error{kind, fmt.Sprintf(format, args...)}
}

// Env is what a command may know beside the image.
type Env struct {
	Now           int64     // ms since 1970
	Random        io.Reader // source of ids
	Broker        config.Values
	TierAvailable bool
}

// Defaults are the topic defaults that hold in img: the broker's settings overlaid with the cluster's dynamic ones.
func (e Env) Defaults(img *metadata.Image) map[string]string {
	return config.TopicDefaults(e.brokerValues(img))
}

// brokerValues overlays the cluster-wide dynamic configs, which were validated when they were stored.
func (e Env) brokerValues(img *metadata.Image) config.Values {
	v, err := e.Broker.With(img.BrokerConfigs[ClusterWide])
	if err != nil {
		return e.Broker
	}
	return v
}

// ClusterWide is the broker id of dynamic configs that hold for every broker.
const ClusterWide int32 = -1

// Bootstrap names a new cluster.
func Bootstrap(img *metadata.Image, env Env, id string) ([]metadata.Record, error) {
	if img.ClusterID != "" {
		if id != "" && id != img.ClusterID {
			return nil, refuse(ErrInvalidRequest, "the data directory belongs to cluster %s, not %s", img.ClusterID, id)
		}
		return nil, nil
	}
	if id == "" {
		u, err := tp.NewUUID(env.Random)
		if err != nil {
			return nil, err
		}
		id = u.String()
	}
	return []metadata.Record{metadata.ClusterRecord{ID: id}}, nil
}

// Register adds a broker or a new incarnation of it. The same incarnation again changes nothing.
func Register(img *metadata.Image, b metadata.BrokerRecord) []metadata.Record {
	if old, ok := img.Brokers[b.ID]; ok && old.Incarnation == b.Incarnation {
		return nil
	}
	b.Epoch = img.LastBrokerEpoch + 1
	records := []metadata.Record{b}
	// A broker that comes back leads its partitions in a new epoch, so that nothing of its former life is mistaken for now.
	for _, name := range img.TopicNames() {
		for _, p := range img.Topics[name].Partitions {
			if p.Leader == b.ID {
				next := p.PartitionRecord
				next.LeaderEpoch++
				next.PartitionEpoch++
				records = append(records, next)
			}
		}
	}
	return records
}

// ProducerIDBlock is how many producer ids a broker gets at a time.
const ProducerIDBlock = 1000

// AllocateProducerIDs reserves the next block; it starts at the returned id.
func AllocateProducerIDs(img *metadata.Image) (first int64, records []metadata.Record) {
	return img.NextProducerID, []metadata.Record{metadata.ProducerIDsRecord{Next: img.NextProducerID + ProducerIDBlock}}
}
