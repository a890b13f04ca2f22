package remoteformat

import (
	"crypto/cipher"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/klauspost/compress/zstd"
)

// Indexes are the plain bytes of a segment's indexes in Kafka's own formats. Transaction is nil for none.
type Indexes struct {
	Offset, Timestamp, ProducerSnapshot, LeaderEpoch, Transaction []byte
}

// Source is a segment to write. Metadata.TxnIndexEmpty is set by Write.
type Source struct {
	Log      io.ReaderAt
	Size     int64 // bytes of Log, 1 to 2^31-1
	Indexes  Indexes
	Metadata Metadata
}

// WriteOptions say how a segment is stored. The zero value stores it plain.
type WriteOptions struct {
	ChunkSize int64 // plain bytes; 0 is DefaultChunkSize
	Compress  bool
	// ActiveKey, if not empty, encrypts with that pair of Keyring. Rand is then needed (crypto/rand.Reader).
	Keyring   *Keyring
	ActiveKey string
	Rand      io.Reader
}

// Transforms reports whether the .log object differs from the segment, so that Write needs a spool.
func (o WriteOptions) Transforms() bool { return o.Compress || o.ActiveKey != "" }

// Written is what Write made. LogSize is the size of the .log object.
type Written struct {
	Manifest *Manifest
	Indexes  []byte
	LogSize  int64
}

// Write transforms a segment chunk by chunk, with one chunk in memory, and describes the result. The .log object is what
// was written to spool, or Source.Log itself where WriteOptions.Transforms is false; spool may then be nil.
func Write(src Source, o WriteOptions, spool io.Writer) (*Written, error) {
	if src.Size <= 0 || src.Size > math.MaxInt32 {
		return nil, fmt.Errorf("write remote segment: %d bytes is not between 1 and 2^31-1", src.Size)
	}
	if o.ChunkSize == 0 {
		o.ChunkSize = DefaultChunkSize
	}
	if o.ChunkSize < 0 || o.ChunkSize > MaxChunkSize {
		return nil, fmt.Errorf("write remote segment: chunk size %d", o.ChunkSize)
	}
	m := &Manifest{Compressed: o.Compress, Metadata: src.Metadata}
	m.Metadata.TxnIndexEmpty = len(src.Indexes.Transaction) == 0
	t := transformer{rand: o.Rand}
	if o.ActiveKey != "" {
		if err := t.encrypt(o, m); err != nil {
			return nil, fmt.Errorf("write remote segment: %w", err)
		}
	}
	if o.Compress {
		var err error
		if t.zstd, err = newEncoder(); err != nil {
			return nil, err
		}
	}
	w := &Written{Manifest: m, LogSize: src.Size}
	var err error
	if o.Transforms() {
		if m.Chunks, err = t.log(src, o, spool); err != nil {
			return nil, fmt.Errorf("write remote segment: %w", err)
		}
		w.LogSize = m.Chunks.StoredSize()
	} else {
		m.Chunks = NewFixedIndex(o.ChunkSize, src.Size, 0)
	}
	if w.Indexes, m.Indexes, err = t.indexes(src.Indexes); err != nil {
		return nil, fmt.Errorf("write remote segment: %w", err)
	}
	return w, nil
}

type transformer struct {
	rand io.Reader
	zstd *zstd.Encoder
	aead cipher.AEAD
	aad  []byte
}

func (t *transformer) encrypt(o WriteOptions, m *Manifest) error {
	if o.Rand == nil {
		return errors.New("encryption without a source of randomness")
	}
	secret := make([]byte, dataKeySize+aadSize)
	if _, err := io.ReadFull(o.Rand, secret); err != nil {
		return fmt.Errorf("draw data key: %w", err)
	}
	key, aad := secret[:dataKeySize], secret[dataKeySize:]
	wrapped, err := o.Keyring.Wrap(o.ActiveKey, o.Rand, key)
	if err != nil {
		return err
	}
	if t.aead, err = newGCM(key); err != nil {
		return err
	}
	t.aad = aad
	m.Encryption = &Encryption{DataKey: wrapped, AAD: aad}
	return nil
}

func (t *transformer) log(src Source, o WriteOptions, spool io.Writer) (ChunkIndex, error) {
	buf := make([]byte, min(o.ChunkSize, src.Size))
	var packed []byte
	var sizes []int64
	for pos := int64(0); pos < src.Size; pos += o.ChunkSize {
		chunk := buf[:min(o.ChunkSize, src.Size-pos)]
		if n, err := src.Log.ReadAt(chunk, pos); n < len(chunk) {
			if err == nil || err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return ChunkIndex{}, fmt.Errorf("read segment at %d: %w", pos, err)
		}
		if t.zstd != nil {
			packed = t.zstd.EncodeAll(chunk, packed[:0])
			chunk = packed
		}
		if t.aead != nil {
			var err error
			if chunk, err = seal(t.aead, t.rand, chunk, t.aad); err != nil {
				return ChunkIndex{}, err
			}
		}
		if _, err := spool.Write(chunk); err != nil {
			return ChunkIndex{}, fmt.Errorf("write spool: %w", err)
		}
		sizes = append(sizes, int64(len(chunk)))
	}
	if t.zstd != nil {
		return NewVariableIndex(o.ChunkSize, src.Size, sizes)
	}
	return NewFixedIndex(o.ChunkSize, src.Size, encryptOverhead), nil
}

// indexes joins the indexes in the order of the format. They are encrypted one by one and never compressed.
func (t *transformer) indexes(x Indexes) ([]byte, Spans, error) {
	var out []byte
	var spans Spans
	add := func(span *Span, plain []byte) error {
		stored := plain
		if t.aead != nil {
			var err error
			if stored, err = seal(t.aead, t.rand, plain, t.aad); err != nil {
				return err
			}
		}
		*span = Span{int64(len(out)), int64(len(stored))}
		out = append(out, stored...)
		return nil
	}
	for _, x := range []struct {
		span  *Span
		plain []byte
	}{{&spans.Offset, x.Offset}, {&spans.Timestamp, x.Timestamp}, {&spans.ProducerSnapshot, x.ProducerSnapshot}, {&spans.LeaderEpoch, x.LeaderEpoch}} {
		if err := add(x.span, x.plain); err != nil {
			return nil, spans, err
		}
	}
	if len(x.Transaction) > 0 {
		spans.Transaction = new(Span)
		if err := add(spans.Transaction, x.Transaction); err != nil {
			return nil, spans, err
		}
	}
	return out, spans, nil
}
