package broker

import (
	"maps"
	"slices"

	"github.com/varve-io/varve/internal/compact"
	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

// target is what one partition of this broker has to be like.
type target struct {
	id    tp.Partition
	topic *metadata.Topic
	state *metadata.Partition
}

// actions is what has to be done to follow the image.
type actions struct {
	remove []tp.Partition // close and delete
	follow []target       // open if it is not there, then adjust
}

// reconcile compares what this broker hosts with a change of the image. It is pure; package-level so that a test can table it.
func reconcile(old *metadata.Image, d metadata.Delta, self int32, hosted func(tp.Partition) (topic tp.UUID, ok bool)) actions {
	var a actions
	drop := func(t *metadata.Topic) {
		for _, p := range t.Partitions {
			id := tp.Partition{Topic: t.Name, Index: p.Index}
			if topic, ok := hosted(id); ok && topic == t.ID {
				a.remove = append(a.remove, id)
			}
		}
	}
	for _, t := range d.Removed {
		drop(t)
	}
	for _, t := range d.Changed {
		was := old.TopicsByID[t.ID]
		if was == t || was != nil && !maps.Equal(was.Configs, t.Configs) {
			was = nil // every partition is touched
		}
		for i, p := range t.Partitions {
			if was != nil && i < len(was.Partitions) && was.Partitions[i] == p {
				continue
			}
			id := tp.Partition{Topic: t.Name, Index: p.Index}
			switch {
			case slices.Contains(p.Replicas, self):
				a.follow = append(a.follow, target{id, t, p})
			default:
				if topic, ok := hosted(id); ok && topic == t.ID {
					a.remove = append(a.remove, id)
				}
			}
		}
	}
	return a
}

// logConfig turns a topic's effective configs into the log's.
func logConfig(v config.Values, producerExpirationMs int64) log.Config {
	c := log.Config{
		SegmentBytes: v.Int64("segment.bytes"), SegmentMs: v.Int64("segment.ms"), SegmentJitterMs: v.Int64("segment.jitter.ms"),
		SegmentIndexBytes: v.Int("segment.index.bytes"), IndexIntervalBytes: v.Int("index.interval.bytes"),
		RetentionMs: v.Int64("retention.ms"), RetentionBytes: v.Int64("retention.bytes"),
		LocalRetentionMs: v.Int64("local.retention.ms"), LocalRetentionBytes: v.Int64("local.retention.bytes"),
		MaxMessageBytes: v.Int("max.message.bytes"), LogAppendTime: v.Get("message.timestamp.type") == "LogAppendTime",
		TimestampBeforeMaxMs: v.Int64("message.timestamp.before.max.ms"), TimestampAfterMaxMs: v.Int64("message.timestamp.after.max.ms"),
		Compression: v.Get("compression.type"), FlushMessages: v.Int64("flush.messages"), FlushMs: v.Int64("flush.ms"),
		Compact: slices.Contains(v.List("cleanup.policy"), "compact"), Delete: slices.Contains(v.List("cleanup.policy"), "delete"),
		Compaction: compact.Config{DirtyRatio: v.Float("min.cleanable.dirty.ratio"), MinLagMs: v.Int64("min.compaction.lag.ms"),
			MaxLagMs: v.Int64("max.compaction.lag.ms"), DeleteRetentionMs: v.Int64("delete.retention.ms")},
		Tiered: v.Bool("remote.storage.enable"), CopyDisabled: v.Bool("remote.log.copy.disable"),
		ProducerIDExpirationMs: producerExpirationMs, FileDeleteDelayMs: v.Int64("file.delete.delay.ms"),
	}
	if v.IsSet("internal.segment.bytes") {
		c.SegmentBytes = v.Int64("internal.segment.bytes")
	}
	if key := "compression." + c.Compression + ".level"; c.Compression == "gzip" || c.Compression == "lz4" || c.Compression == "zstd" {
		c.CompressionLevel = v.Int(key)
	}
	return c
}

// tierConfig turns a topic's effective configs into the tier planner's.
func tierConfig(v config.Values) tier.Config {
	c := tier.Config{
		RetentionMs: v.Int64("retention.ms"), RetentionBytes: v.Int64("retention.bytes"),
		LocalRetentionMs: v.Int64("local.retention.ms"), LocalRetentionBytes: v.Int64("local.retention.bytes"),
		CopyLagMs: v.Int64("remote.copy.lag.ms"), CopyLagBytes: v.Int64("remote.copy.lag.bytes"), CopyDisabled: v.Bool("remote.log.copy.disable"),
	}
	if !slices.Contains(v.List("cleanup.policy"), "delete") {
		c.RetentionMs, c.RetentionBytes = -1, -1 // an empty policy deletes nothing for good
	}
	return c
}
