package log

import (
	"math"
	"time"

	"github.com/varve-io/varve/internal/compact"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/segment"
)

// Config holds one topic's effective values. It is immutable; SetConfig replaces it. Times are in milliseconds.
type Config struct {
	SegmentBytes, SegmentMs, SegmentJitterMs  int64 // segment.bytes, segment.ms, segment.jitter.ms
	SegmentIndexBytes, IndexIntervalBytes     int   // segment.index.bytes, index.interval.bytes
	RetentionMs, RetentionBytes               int64 // -1 is none
	LocalRetentionMs, LocalRetentionBytes     int64 // -1 is none, -2 takes the value without "local"
	MaxMessageBytes                           int
	LogAppendTime                             bool // message.timestamp.type
	TimestampBeforeMaxMs, TimestampAfterMaxMs int64
	Compression                               string // producer, uncompressed, gzip, snappy, lz4, zstd
	CompressionLevel                          int    // of that codec; 0 is its default
	FlushMessages, FlushMs                    int64
	Compact, Delete                           bool // cleanup.policy
	Compaction                                compact.Config
	Tiered, CopyDisabled                      bool // remote.storage.enable, remote.log.copy.disable
	ProducerIDExpirationMs                    int64
	FileDeleteDelayMs                         int64 // unused here: open views keep their files
	DecompressLimit                           int   // bytes of records of one compressed batch; 0 is the default
}

// DefaultConfig has Kafka's defaults.
func DefaultConfig() Config {
	return Config{
		SegmentBytes: 1 << 30, SegmentMs: 7 * 24 * 3600 * 1000, SegmentIndexBytes: 10 << 20, IndexIntervalBytes: 4096,
		RetentionMs: 7 * 24 * 3600 * 1000, RetentionBytes: -1, LocalRetentionMs: -2, LocalRetentionBytes: -2,
		MaxMessageBytes: 1048588, TimestampBeforeMaxMs: math.MaxInt64, TimestampAfterMaxMs: 3600 * 1000,
		Compression: "producer", FlushMessages: math.MaxInt64, FlushMs: math.MaxInt64, Delete: true,
		Compaction:             compact.Config{DirtyRatio: 0.5, MaxLagMs: math.MaxInt64, DeleteRetentionMs: 24 * 3600 * 1000},
		ProducerIDExpirationMs: 24 * 3600 * 1000, FileDeleteDelayMs: 60000,
	}
}

// copies says whether finished segments go to the remote tier.
func (c *Config) copies() bool { return c.Tiered && !c.CopyDisabled }

// LocalRetention is the limit for what is kept on disk.
func (c *Config) LocalRetention() (ms, bytes int64) {
	ms, bytes = c.RetentionMs, c.RetentionBytes
	if c.copies() {
		if c.LocalRetentionMs != -2 {
			ms = c.LocalRetentionMs
		}
		if c.LocalRetentionBytes != -2 {
			bytes = c.LocalRetentionBytes
		}
	}
	return ms, bytes
}

func (c *Config) limits(jitter int64) segment.Limits {
	ms := c.SegmentMs
	if c.Compact {
		ms = min(ms, c.Compaction.MaxLagMs) // what is in the active segment is not compacted (KIP-354)
	}
	return segment.Limits{Bytes: c.SegmentBytes, Ms: ms - jitter, IndexBytes: c.SegmentIndexBytes}
}

// jitter draws a segment's share of segment.jitter.ms.
func (c *Config) jitter(draw func() int64) int64 {
	most := min(c.SegmentJitterMs, c.SegmentMs)
	if most <= 0 || draw == nil {
		return 0
	}
	return (draw() & math.MaxInt64) % most
}

func (c *Config) rules(internal, several bool, now time.Time) (recordbatch.Rules, error) {
	codec, recompress, err := recordbatch.ParseCodec(c.Compression)
	return recordbatch.Rules{
		MaxMessageBytes: c.MaxMessageBytes, NowMs: now.UnixMilli(), LogAppendTime: c.LogAppendTime,
		TimestampBeforeMaxMs: c.TimestampBeforeMaxMs, TimestampAfterMaxMs: c.TimestampAfterMaxMs,
		RequireKeys: c.Compact, Recompress: recompress, Codec: codec, Level: c.CompressionLevel,
		DecompressLimit: c.DecompressLimit, Internal: internal, AllowSeveralBatches: several,
	}, err
}
