package config

import (
	"errors"
	"fmt"
	"math"
	"strconv"
)

const (
	maxInt  = math.MaxInt32
	maxLong = math.MaxInt64
)

var codecs = []string{"uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"}

// Topic is the table of topic configs (TopicConfig of Kafka 4.4). Synonym names the broker key that gives the default.
var Topic = newTable(
	Key{Name: "cleanup.policy", Kind: List, Default: "delete", OneOf: []string{"compact", "delete"}, Synonym: "log.cleanup.policy", Doc: "What happens to old segments: delete, compact, both, or neither when empty. Tiered topics allow delete or empty."},
	Key{Name: "compression.type", Kind: String, Default: "producer", OneOf: codecs, Synonym: "compression.type", Doc: "Codec of the log; producer keeps what the producer sent."},
	Key{Name: "compression.gzip.level", Kind: Int, Default: "-1", Min: -1, Max: 9, Synonym: "compression.gzip.level", Doc: "Level when the broker compresses with gzip; -1 is the codec's default.", check: notZero},
	Key{Name: "compression.lz4.level", Kind: Int, Default: "9", Min: 1, Max: 17, Synonym: "compression.lz4.level", Doc: "Level when the broker compresses with lz4."},
	Key{Name: "compression.zstd.level", Kind: Int, Default: "3", Min: -131072, Max: 22, Synonym: "compression.zstd.level", Doc: "Level when the broker compresses with zstd."},
	Key{Name: "delete.retention.ms", Kind: Long, Default: "86400000", Min: 0, Max: maxLong, Synonym: "log.cleaner.delete.retention.ms", Doc: "How long tombstones of a compacted topic stay readable."},
	Key{Name: "file.delete.delay.ms", Kind: Long, Default: "60000", Min: 0, Max: maxLong, Synonym: "log.segment.delete.delay.ms", Doc: "How long a deleted segment's files stay before they are removed."},
	Key{Name: "flush.messages", Kind: Long, Default: strconv.FormatInt(maxLong, 10), Min: 1, Max: maxLong, Synonym: "log.flush.interval.messages", Doc: "Records after which the log is fsynced. By default durability comes from replication."},
	Key{Name: "flush.ms", Kind: Long, Default: strconv.FormatInt(maxLong, 10), Min: 0, Max: maxLong, Synonym: "log.flush.interval.ms", Doc: "Age of unflushed records after which an append fsyncs the log."},
	Key{Name: "index.interval.bytes", Kind: Int, Default: "4096", Min: 0, Max: maxInt, Synonym: "log.index.interval.bytes", Doc: "Bytes of log between two entries of the offset index."},
	Key{Name: "local.retention.bytes", Kind: Long, Default: "-2", Min: -2, Max: maxLong, Synonym: "log.local.retention.bytes", Doc: "Bytes a tiered partition keeps on the broker; -2 follows retention.bytes."},
	Key{Name: "local.retention.ms", Kind: Long, Default: "-2", Min: -2, Max: maxLong, Synonym: "log.local.retention.ms", Doc: "Age a tiered partition keeps on the broker; -2 follows retention.ms."},
	Key{Name: "max.compaction.lag.ms", Kind: Long, Default: strconv.FormatInt(maxLong, 10), Min: 1, Max: maxLong, Synonym: "log.cleaner.max.compaction.lag.ms", Doc: "Longest time a record of a compacted topic may stay uncompacted."},
	Key{Name: "max.message.bytes", Kind: Int, Default: "1048588", Min: 0, Max: maxInt, Synonym: "message.max.bytes", Doc: "Largest record batch a producer may send, in bytes after compression."},
	Key{Name: "message.timestamp.after.max.ms", Kind: Long, Default: "3600000", Min: 0, Max: maxLong, Synonym: "log.message.timestamp.after.max.ms", Doc: "How far ahead of the broker's clock a CreateTime timestamp may be."},
	Key{Name: "message.timestamp.before.max.ms", Kind: Long, Default: strconv.FormatInt(maxLong, 10), Min: 0, Max: maxLong, Synonym: "log.message.timestamp.before.max.ms", Doc: "How far behind the broker's clock a CreateTime timestamp may be."},
	Key{Name: "message.timestamp.type", Kind: String, Default: "CreateTime", OneOf: []string{"CreateTime", "LogAppendTime"}, Synonym: "log.message.timestamp.type", Doc: "Whose clock stamps records: the producer's or the broker's."},
	Key{Name: "min.cleanable.dirty.ratio", Kind: Double, Default: "0.5", Min: 0, Max: 1, Synonym: "log.cleaner.min.cleanable.ratio", Doc: "Share of uncompacted bytes at which a compacted log is cleaned."},
	Key{Name: "min.compaction.lag.ms", Kind: Long, Default: "0", Min: 0, Max: maxLong, Synonym: "log.cleaner.min.compaction.lag.ms", Doc: "Shortest time a record of a compacted topic stays uncompacted."},
	Key{Name: "min.insync.replicas", Kind: Int, Default: "1", Min: 1, Max: maxInt, Synonym: "min.insync.replicas", Doc: "Replicas that must be in sync for an acks=all produce; capped at the number of replicas."},
	Key{Name: "preallocate", Kind: Boolean, Default: "false", Synonym: "log.preallocate", Doc: "Only false: Varve never preallocates log files.", check: onlyFalse},
	Key{Name: "remote.copy.lag.bytes", Kind: Long, Default: "-1", Min: -1, Max: maxLong, Synonym: "log.remote.copy.lag.bytes", Doc: "Bytes that must follow a segment before it is uploaded (KIP-1241); 0 at once, -1 the effective local retention."},
	Key{Name: "remote.copy.lag.ms", Kind: Long, Default: "0", Min: -1, Max: maxLong, Synonym: "log.remote.copy.lag.ms", Doc: "Age at which a segment is uploaded (KIP-1241); 0 at once, -1 the effective local retention."},
	Key{Name: "remote.log.copy.disable", Kind: Boolean, Default: "false", Doc: "Freeze the tier: no more uploads, reads and expiry go on (KIP-950)."},
	Key{Name: "remote.log.delete.on.disable", Kind: Boolean, Default: "false", Doc: "Allow remote.storage.enable to go back to false, deleting the remote data (KIP-950)."},
	Key{Name: "remote.storage.enable", Kind: Boolean, Default: "false", Doc: "Copy sealed segments to the bucket (KIP-405)."},
	Key{Name: "retention.bytes", Kind: Long, Default: "-1", Synonym: "log.retention.bytes", Doc: "Bytes a partition keeps in all, local and remote; -1 without limit."},
	Key{Name: "retention.ms", Kind: Long, Default: "604800000", Min: -1, Max: maxLong, Synonym: "log.retention.ms", Doc: "Age up to which records are kept, local and remote; -1 without limit."},
	Key{Name: "segment.bytes", Kind: Int, Default: "1073741824", Min: 1 << 20, Max: maxInt, Synonym: "log.segment.bytes", Doc: "Size at which the active segment is rolled."},
	Key{Name: "internal.segment.bytes", Kind: Int, Default: "", Min: 14, Max: maxInt, Hidden: true, Doc: "As segment.bytes but below 1 MiB too, for tests."},
	Key{Name: "segment.index.bytes", Kind: Int, Default: "10485760", Min: 4, Max: maxInt, Synonym: "log.index.size.max.bytes", Doc: "Largest offset index; a full index rolls the segment."},
	Key{Name: "segment.jitter.ms", Kind: Long, Default: "0", Min: 0, Max: maxLong, Synonym: "log.roll.jitter.ms", Doc: "Random share taken off segment.ms so that partitions do not roll together."},
	Key{Name: "segment.ms", Kind: Long, Default: "604800000", Min: 1, Max: maxLong, Synonym: "log.roll.ms", Doc: "Age, by record timestamps, at which the active segment is rolled by the next append."},
	Key{Name: "leader.replication.throttled.replicas", Kind: List, Default: "", Doc: "Replicas whose leader throttles what it sends them while they are out of sync: PARTITION:BROKER, or *.", check: checkThrottled},
	Key{Name: "follower.replication.throttled.replicas", Kind: List, Default: "", Doc: "Replicas that throttle themselves while they catch up: PARTITION:BROKER, or *.", check: checkThrottled},
	Key{Name: "unclean.leader.election.enable", Kind: Boolean, Default: "false", Synonym: "unclean.leader.election.enable", Doc: "Whether a replica outside the ISR may become leader."},
)

func notZero(v string) error {
	if v == "0" {
		return errors.New("Value must be -1 or from 1 to 9")
	}
	return nil
}

func onlyFalse(v string) error {
	if v != "false" {
		return errors.New("this is not supported")
	}
	return nil
}

// TopicDefaults are the values a topic has where it sets none of its own: broker settings through Synonym, else the table's defaults.
func TopicDefaults(broker Values) map[string]string {
	defaults := make(map[string]string, len(Topic.keys))
	for _, k := range Topic.keys {
		if k.Hidden {
			continue
		}
		defaults[k.Name] = k.Default
		if k.Synonym == "" {
			continue
		}
		if v, ok := brokerValue(broker, k.Name, k.Synonym); ok {
			defaults[k.Name] = v
		}
	}
	return defaults
}

// brokerValue resolves Kafka's families of broker keys: ms before minutes before hours.
func brokerValue(broker Values, topicKey, synonym string) (string, bool) {
	scaled := func(key string, factor int64) (string, bool) {
		if !broker.IsSet(key) {
			return "", false
		}
		n := broker.Int64(key)
		if n < 0 {
			return strconv.FormatInt(n, 10), true
		}
		return strconv.FormatInt(n*factor, 10), true
	}
	type unit struct {
		key    string
		factor int64
	}
	families := map[string][]unit{
		"retention.ms":      {{"log.retention.ms", 1}, {"log.retention.minutes", 60_000}, {"log.retention.hours", 3_600_000}},
		"segment.ms":        {{"log.roll.ms", 1}, {"log.roll.hours", 3_600_000}},
		"segment.jitter.ms": {{"log.roll.jitter.ms", 1}, {"log.roll.jitter.hours", 3_600_000}},
	}
	if units, ok := families[topicKey]; ok {
		for _, u := range units {
			if v, ok := scaled(u.key, u.factor); ok {
				return v, true
			}
		}
		return "", false
	}
	if broker.IsSet(synonym) {
		return broker.Get(synonym), true
	}
	return "", false
}

// TopicValues overlays a topic's own configs on the defaults. Own values were validated when they were stored.
func TopicValues(defaults, own map[string]string) Values {
	set := make(map[string]string, len(defaults)+len(own))
	for k, v := range defaults {
		set[k] = v
	}
	for k, v := range own {
		set[k] = v
	}
	return Values{Topic, set}
}

// CheckTopic applies the rules that span several topic keys (LogConfig.validate of Kafka 4.4; KIP-405, KIP-950, KIP-1241).
// was holds the values before the change, nil for a new topic.
func CheckTopic(v Values, was *Values, tierAvailable bool) error {
	remote := v.Bool("remote.storage.enable")
	if remote {
		if !tierAvailable {
			return errors.New("Tiered Storage functionality is disabled in the broker. Topic cannot be configured with remote log storage.")
		}
		if contains(v.List("cleanup.policy"), "compact") {
			return errors.New("Remote log storage only supports topics with cleanup.policy=delete or cleanup.policy being an empty list.")
		}
	} else if was != nil && was.Bool("remote.storage.enable") && !v.Bool("remote.log.delete.on.disable") {
		return errors.New("It is invalid to disable remote storage without deleting remote data. " +
			"If you want to keep the remote data and turn to read only, please set `remote.storage.enable=true,remote.log.copy.disable=true`. " +
			"If you want to disable remote storage and delete all remote data, please set `remote.storage.enable=false,remote.log.delete.on.disable=true`.")
	}
	if v.Int64("min.compaction.lag.ms") > v.Int64("max.compaction.lag.ms") {
		return fmt.Errorf("conflict topic config setting min.compaction.lag.ms (%s) > max.compaction.lag.ms (%s)", v.Get("min.compaction.lag.ms"), v.Get("max.compaction.lag.ms"))
	}
	if !remote {
		return nil
	}
	for _, unit := range []string{"ms", "bytes"} {
		total, local := v.Int64("retention."+unit), v.Int64("local.retention."+unit)
		name := "local.retention." + unit
		if total != -1 && local == -1 {
			return fmt.Errorf("Invalid value %d for configuration %s: Value must not be -1 as retention.%s value is set as %d.", local, name, unit, total)
		}
		if total != -1 && local > total {
			return fmt.Errorf("Invalid value %d for configuration %s: Value must not be more than property: retention.%s value.", local, name, unit)
		}
		if v.Bool("remote.log.copy.disable") && local != -2 && local != total {
			return fmt.Errorf("When `remote.log.copy.disable` is set to true, the `local.retention.%s` and `retention.%s` must be set to the identical value or -2 because there will be no more logs copied to the remote storage.", unit, unit)
		}
		effective := local
		if local == -2 {
			effective = total
		}
		if lag := v.Int64("remote.copy.lag." + unit); lag > 0 && effective != -1 && lag > effective {
			return fmt.Errorf("Invalid value %d for configuration remote.copy.lag.%s: Value must not exceed the effective local retention of %d.", lag, unit, effective)
		}
	}
	return nil
}
