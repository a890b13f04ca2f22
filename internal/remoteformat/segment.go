package remoteformat

import (
	"crypto/cipher"
	"fmt"

	"github.com/klauspost/compress/zstd"
)

// MaxIndexSize bounds one index of a segment, in bytes. Kafka's default of segment.index.bytes is 10 MiB.
const MaxIndexSize = 1 << 30

// IndexKind names one index of a segment (KIP-405, RemoteStorageManager.IndexType).
type IndexKind int

// The kinds of indexes.
const (
	OffsetIndex IndexKind = iota
	TimestampIndex
	ProducerSnapshot
	TransactionIndex
	LeaderEpochIndex
)

func (k IndexKind) String() string {
	if k < 0 || int(k) > 4 {
		return fmt.Sprintf("IndexKind(%d)", int(k))
	}
	return [...]string{"offset", "timestamp", "producerSnapshot", "transaction", "leaderEpoch"}[k]
}

// Segment decodes the objects of one segment by its manifest. It is safe for concurrent use.
type Segment struct {
	m    *Manifest
	aead cipher.AEAD
	zstd *zstd.Decoder
}

// Open prepares the decoding of a segment. keys may be nil where nothing is encrypted; a data key that cannot be
// opened is ErrNoKey or another error, not ErrManifest.
func Open(manifest []byte, keys *Keyring) (*Segment, error) {
	m, err := ParseManifest(manifest)
	if err != nil {
		return nil, err
	}
	s := &Segment{m: m}
	if m.Encryption != nil {
		key, err := keys.Unwrap(m.Encryption.DataKey)
		if err != nil {
			return nil, err
		}
		if s.aead, err = newGCM(key); err != nil {
			return nil, err
		}
	}
	if m.Compressed {
		if s.zstd, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(2), zstd.WithDecoderLowmem(true),
			zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderMaxMemory(uint64(m.Chunks.ChunkSize)+1<<10)); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Manifest returns the manifest, which must not be changed.
func (s *Segment) Manifest() *Manifest { return s.m }

// Size is the plain size of the segment in bytes.
func (s *Segment) Size() int64 { return s.m.Chunks.FileSize }

// Plain reports whether the .log object is the segment itself.
func (s *Segment) Plain() bool { return s.m.Plain() }

// Chunks is the index of chunks.
func (s *Segment) Chunks() ChunkIndex { return s.m.Chunks }

// DecodeChunk returns the plain bytes of chunk i from its stored bytes; ErrChunk if they are not what the manifest says.
// The result may share the memory of stored.
func (s *Segment) DecodeChunk(i int, stored []byte) ([]byte, error) {
	if i < 0 || i >= s.m.Chunks.Count() {
		return nil, fmt.Errorf("%w: no chunk %d", ErrChunk, i)
	}
	c := s.m.Chunks.Chunk(i)
	if int64(len(stored)) != c.StoredSize {
		return nil, fmt.Errorf("%w: chunk %d has %d stored bytes instead of %d", ErrChunk, i, len(stored), c.StoredSize)
	}
	out := stored
	var err error
	if s.aead != nil {
		if out, err = unseal(s.aead, out, s.m.Encryption.AAD); err != nil {
			return nil, fmt.Errorf("chunk %d: %w", i, err)
		}
	}
	if s.zstd != nil {
		if err := checkFrame(out, c.Size); err != nil {
			return nil, fmt.Errorf("%w: chunk %d: %w", ErrChunk, i, err)
		}
		if out, err = s.zstd.DecodeAll(out, make([]byte, 0, c.Size)); err != nil {
			return nil, fmt.Errorf("%w: chunk %d: %w", ErrChunk, i, err)
		}
	}
	if int64(len(out)) != c.Size {
		return nil, fmt.Errorf("%w: chunk %d has %d bytes instead of %d", ErrChunk, i, len(out), c.Size)
	}
	return out, nil
}

// checkFrame refuses frames that announce another size, before memory is taken for them.
func checkFrame(b []byte, size int64) error {
	var h zstd.Header
	if err := h.Decode(b); err != nil {
		return err
	}
	if h.HasFCS && h.FrameContentSize != uint64(size) {
		return fmt.Errorf("frame of %d bytes instead of %d", h.FrameContentSize, size)
	}
	return nil
}

// Span returns where an index lies in the .indexes object; ok is false if the segment has none of that kind.
func (s *Segment) Span(kind IndexKind) (Span, bool) {
	x := s.m.Indexes
	switch kind {
	case OffsetIndex:
		return x.Offset, true
	case TimestampIndex:
		return x.Timestamp, true
	case ProducerSnapshot:
		return x.ProducerSnapshot, true
	case LeaderEpochIndex:
		return x.LeaderEpoch, true
	case TransactionIndex:
		if x.Transaction != nil {
			return *x.Transaction, true
		}
	}
	return Span{}, false
}

// DecodeIndex returns the plain bytes of one index from its stored bytes, which are exactly its span.
func (s *Segment) DecodeIndex(kind IndexKind, stored []byte) ([]byte, error) {
	span, ok := s.Span(kind)
	if !ok || int64(len(stored)) != span.Size {
		return nil, fmt.Errorf("%w: %s index of %d bytes instead of %d", ErrChunk, kind, len(stored), span.Size)
	}
	if s.aead == nil || len(stored) == 0 {
		return stored, nil
	}
	out, err := unseal(s.aead, stored, s.m.Encryption.AAD)
	if err != nil {
		return nil, fmt.Errorf("%s index: %w", kind, err)
	}
	return out, nil
}

// DecodeIndexes returns all indexes from the whole .indexes object.
func (s *Segment) DecodeIndexes(object []byte) (Indexes, error) {
	var x Indexes
	for kind, p := range map[IndexKind]*[]byte{OffsetIndex: &x.Offset, TimestampIndex: &x.Timestamp,
		ProducerSnapshot: &x.ProducerSnapshot, LeaderEpochIndex: &x.LeaderEpoch, TransactionIndex: &x.Transaction} {
		span, ok := s.Span(kind)
		if !ok {
			continue
		}
		if span.Position+span.Size > int64(len(object)) {
			return x, fmt.Errorf("%w: %s index at %d+%d in %d bytes", ErrChunk, kind, span.Position, span.Size, len(object))
		}
		plain, err := s.DecodeIndex(kind, object[span.Position:span.Position+span.Size])
		if err != nil {
			return x, err
		}
		*p = plain
	}
	return x, nil
}
