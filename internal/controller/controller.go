// Package controller turns commands into metadata records. Every function is pure: it reads an image, the time and the
// random source it is given, and returns records and an answer; it never changes the image. Whoever proposes the records
// must make sure that the image was the newest one (package control does, under one lock).
package controller

import (
	"io"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

// Env is what a command may know beside the image.
type Env struct {
	Now           int64     // ms since 1970
	Random        io.Reader // source of ids
	Broker        config.Values
	TierAvailable bool
	// Thin reports that a replica holds too little local data to be preferred as leader (KIP-1303); nil is never.
	Thin func(broker int32, p PartitionRef) bool
	// Alive reports that a broker has a valid session at this moment; nil takes whoever is not fenced.
	Alive func(broker int32) bool
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

// ProducerIDBlock is how many producer ids a broker gets at a time.
const ProducerIDBlock = 1000

// AllocateProducerIDs reserves the next block; it starts at the returned id.
func AllocateProducerIDs(img *metadata.Image) (first int64, records []metadata.Record) {
	return img.NextProducerID, []metadata.Record{metadata.ProducerIDsRecord{Next: img.NextProducerID + ProducerIDBlock}}
}
