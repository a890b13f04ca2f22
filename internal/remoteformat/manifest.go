package remoteformat

import (
	"bytes"
	"encoding/json"
	"fmt"
	"sort"
	"strconv"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/tp"
)

// Span is where an index lies in the .indexes object, in stored bytes.
type Span struct {
	Position int64 `json:"position"`
	Size     int64 `json:"size"`
}

// Spans are the places of all indexes. Transaction is nil where the segment has no transaction index.
type Spans struct {
	Offset           Span  `json:"offset"`
	Timestamp        Span  `json:"timestamp"`
	ProducerSnapshot Span  `json:"producerSnapshot"`
	LeaderEpoch      Span  `json:"leaderEpoch"`
	Transaction      *Span `json:"transaction"`
}

// Encryption holds the wrapped data key ("keyId:base64") and the additional data of every chunk.
type Encryption struct {
	DataKey string `json:"dataKey"`
	AAD     []byte `json:"aad"`
}

// Metadata describes the segment as Kafka does (KIP-405, RemoteLogSegmentMetadata). Offsets are inclusive, times in ms.
type Metadata struct {
	Key
	End           int64
	MaxTimestamp  int64
	Broker        int32
	EventTime     int64
	Epochs        []leaderepoch.Entry
	TxnIndexEmpty bool // false is "unknown" too: plugins built against Kafka 3 do not write it
}

// Manifest is the .rsm-manifest object.
type Manifest struct {
	Chunks     ChunkIndex
	Indexes    Spans
	Compressed bool
	Encryption *Encryption // nil if not encrypted
	Metadata   Metadata
}

// Plain reports whether the .log object is the segment, byte for byte.
func (m *Manifest) Plain() bool { return !m.Compressed && m.Encryption == nil }

type manifestJSON struct {
	Version     string        `json:"version"`
	Chunks      ChunkIndex    `json:"chunkIndex"`
	Indexes     Spans         `json:"segmentIndexes"`
	Compression bool          `json:"compression"`
	Encryption  *Encryption   `json:"encryption,omitempty"`
	Metadata    *metadataJSON `json:"remoteLogSegmentMetadata"`
}

type metadataJSON struct {
	ID struct {
		TopicIDPartition struct {
			TopicID        tp.UUID `json:"topicId"`
			TopicPartition struct {
				Topic     string `json:"topic"`
				Partition int32  `json:"partition"`
			} `json:"topicPartition"`
		} `json:"topicIdPartition"`
		ID tp.UUID `json:"id"`
	} `json:"remoteLogSegmentId"`
	StartOffset    int64  `json:"startOffset"`
	EndOffset      int64  `json:"endOffset"`
	MaxTimestampMs int64  `json:"maxTimestampMs"`
	BrokerID       int32  `json:"brokerId"`
	EventTimeMs    int64  `json:"eventTimestampMs"`
	Epochs         epochs `json:"segmentLeaderEpochs"`
	TxnIdxEmpty    bool   `json:"txnIdxEmpty"`
}

// epochs is an object from epoch to start offset, ascending by number as Java's sorted map is.
type epochs []leaderepoch.Entry

func (e epochs) MarshalJSON() ([]byte, error) {
	b := []byte{'{'}
	for i, x := range e {
		if i > 0 {
			b = append(b, ',')
		}
		b = fmt.Appendf(b, `"%d":%d`, x.Epoch, x.StartOffset)
	}
	return append(b, '}'), nil
}

func (e *epochs) UnmarshalJSON(b []byte) error {
	var m map[string]int64
	if err := json.Unmarshal(b, &m); err != nil {
		return err
	}
	*e = nil
	for k, v := range m {
		n, err := strconv.ParseInt(k, 10, 32)
		if err != nil {
			return fmt.Errorf("%w: epoch %q", ErrManifest, k)
		}
		*e = append(*e, leaderepoch.Entry{Epoch: int32(n), StartOffset: v})
	}
	sort.Slice(*e, func(i, j int) bool { return (*e)[i].Epoch < (*e)[j].Epoch })
	return nil
}

// Encode writes the manifest as the plugin does: compact, fields in its order, no others.
func (m *Manifest) Encode() ([]byte, error) {
	md := &metadataJSON{StartOffset: m.Metadata.Start, EndOffset: m.Metadata.End, MaxTimestampMs: m.Metadata.MaxTimestamp,
		BrokerID: m.Metadata.Broker, EventTimeMs: m.Metadata.EventTime, Epochs: m.Metadata.Epochs, TxnIdxEmpty: m.Metadata.TxnIndexEmpty}
	md.ID.ID = m.Metadata.ID
	md.ID.TopicIDPartition.TopicID = m.Metadata.TopicID
	md.ID.TopicIDPartition.TopicPartition.Topic = m.Metadata.Topic
	md.ID.TopicIDPartition.TopicPartition.Partition = m.Metadata.Partition
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(manifestJSON{"1", m.Chunks, m.Indexes, m.Compressed, m.Encryption, md}); err != nil {
		return nil, fmt.Errorf("encode manifest: %w", err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// ParseManifest reads and checks a manifest. Unknown fields are ignored.
func ParseManifest(b []byte) (*Manifest, error) {
	if len(b) > MaxManifestSize {
		return nil, fmt.Errorf("%w: %d bytes", ErrManifest, len(b))
	}
	var j manifestJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrManifest, err)
	}
	if j.Version != "1" {
		return nil, fmt.Errorf("%w: version %q", ErrManifest, j.Version)
	}
	if err := j.Chunks.check(); err != nil { // a missing chunk index is not checked by its decoder
		return nil, err
	}
	m := &Manifest{Chunks: j.Chunks, Indexes: j.Indexes, Compressed: j.Compression, Encryption: j.Encryption}
	spans := []Span{j.Indexes.Offset, j.Indexes.Timestamp, j.Indexes.ProducerSnapshot, j.Indexes.LeaderEpoch}
	if j.Indexes.Transaction != nil {
		spans = append(spans, *j.Indexes.Transaction)
	}
	for _, s := range spans {
		if s.Position < 0 || s.Size < 0 || s.Size > MaxIndexSize || s.Position > 1<<40 {
			return nil, fmt.Errorf("%w: index at %d+%d", ErrManifest, s.Position, s.Size)
		}
	}
	if m.Plain() && (!m.Chunks.Fixed || m.Chunks.StoredSize() != m.Chunks.FileSize || m.Chunks.StoredChunkSize != m.Chunks.ChunkSize) {
		return nil, fmt.Errorf("%w: a plain object of %d bytes for %d", ErrManifest, m.Chunks.StoredSize(), m.Chunks.FileSize)
	}
	if j.Metadata != nil {
		id := j.Metadata.ID
		m.Metadata = Metadata{Key: Key{Topic: id.TopicIDPartition.TopicPartition.Topic, TopicID: id.TopicIDPartition.TopicID,
			Partition: id.TopicIDPartition.TopicPartition.Partition, Start: j.Metadata.StartOffset, ID: id.ID},
			End: j.Metadata.EndOffset, MaxTimestamp: j.Metadata.MaxTimestampMs, Broker: j.Metadata.BrokerID,
			EventTime: j.Metadata.EventTimeMs, Epochs: j.Metadata.Epochs, TxnIndexEmpty: j.Metadata.TxnIdxEmpty}
	}
	return m, nil
}
