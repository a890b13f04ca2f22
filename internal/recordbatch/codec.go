package recordbatch

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/snappy/xerial"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

// DefaultDecompressLimit bounds the records of one batch, in bytes, where a caller names no limit of its own.
const DefaultDecompressLimit = 128 << 20

// maxWindow is the largest zstd window: that of level 22, the highest Kafka lets a producer use.
const maxWindow = 128 << 20

// The pools hold idle decoders and encoders, which are costly to make. They carry nothing from one use to the
// next.
var (
	gzipReaders = sync.Pool{New: func() any { return new(gzip.Reader) }}
	lz4Readers  = sync.Pool{New: func() any { return lz4.NewReader(nil) }}
	zstdReaders = sync.Pool{New: func() any {
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
			zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecodeAllCapLimit(true))
		if err != nil {
			return err
		}
		return d
	}}
	zstdWriters = sync.Pool{New: func() any {
		e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedDefault))
		if err != nil {
			return err
		}
		return e
	}}
)

var errTooLong = errors.New("exceeds the limit")

// decompress returns the records of a compressed batch, at most limit bytes of them (0: the default), in dst
// if it has room. The memory it takes is bounded by a small multiple of the limit, whatever src claims.
func decompress(codec Codec, dst, src []byte, limit int) ([]byte, error) {
	if limit <= 0 {
		limit = DefaultDecompressLimit
	}
	var err error
	switch codec {
	case CodecGzip:
		r, _ := gzipReaders.Get().(*gzip.Reader)
		defer gzipReaders.Put(r)
		if err = r.Reset(bytes.NewReader(src)); err == nil {
			dst, err = readLimited(r, dst, len(src), limit)
		}
	case CodecLZ4:
		r, _ := lz4Readers.Get().(*lz4.Reader)
		defer lz4Readers.Put(r)
		r.Reset(bytes.NewReader(src))
		dst, err = readLimited(r, dst, len(src), limit)
	case CodecSnappy:
		dst, err = snappyDecode(dst, src, limit)
	case CodecZstd:
		r, ok := zstdReaders.Get().(*zstd.Decoder)
		if !ok {
			return nil, fmt.Errorf("%w: no zstd decoder", ErrCorrupt)
		}
		defer zstdReaders.Put(r)
		dst, err = zstdDecode(r, dst, src, limit)
	default:
		return nil, fmt.Errorf("%w: %s", ErrUnsupportedCompression, codec)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: decompress %d bytes of %s: %w", ErrCorrupt, len(src), codec, err)
	}
	return dst, nil
}

// readLimited reads all of r into dst.
func readLimited(r io.Reader, dst []byte, hint, limit int) ([]byte, error) {
	dst = dst[:0]
	if cap(dst) == 0 {
		dst = make([]byte, 0, min(limit+1, max(512, 4*hint)))
	}
	for {
		if len(dst) == cap(dst) {
			grown := make([]byte, len(dst), min(limit+1, 2*cap(dst)))
			copy(grown, dst)
			dst = grown
		}
		n, err := r.Read(dst[len(dst):cap(dst)])
		dst = dst[:len(dst)+n]
		if len(dst) > limit {
			return nil, fmt.Errorf("%w of %d bytes", errTooLong, limit)
		}
		if err == io.EOF {
			return dst, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// zstdDecode decodes into a buffer that it enlarges step by step: a frame may claim any content size, and the
// decoder refuses to go past the capacity that it is given.
func zstdDecode(d *zstd.Decoder, dst, src []byte, limit int) ([]byte, error) {
	size := max(cap(dst), 4*len(src), 64<<10)
	for {
		size = min(size, limit)
		if cap(dst) < size {
			dst = make([]byte, 0, size)
		}
		out, err := d.DecodeAll(src, dst[:0:min(cap(dst), limit)])
		if !errors.Is(err, zstd.ErrDecoderSizeExceeded) {
			return out, err
		}
		if size >= limit {
			return nil, fmt.Errorf("%w of %d bytes", errTooLong, limit)
		}
		size = 4 * max(size, cap(dst))
	}
}

var xerialMagic = []byte{0x82, 'S', 'N', 'A', 'P', 'P', 'Y', 0}

// snappyDecode reads both framings that Kafka's clients write: that of Java's snappy stream (xerial) and the
// bare block.
func snappyDecode(dst, src []byte, limit int) ([]byte, error) {
	size, err := snappyLen(src, limit)
	if err != nil {
		return nil, err
	}
	if size > limit {
		return nil, fmt.Errorf("%w of %d bytes", errTooLong, limit)
	}
	// A copy of 64 bytes costs 3, so that no true block grows by more; what claims to is refused unseen.
	if size > 32*len(src)+64 {
		return nil, fmt.Errorf("%d bytes of snappy cannot hold %d", len(src), size)
	}
	if cap(dst) < size {
		dst = make([]byte, 0, size)
	}
	return xerial.DecodeCapped(dst[:cap(dst)], src)
}

// snappyLen adds up what the blocks claim to hold.
func snappyLen(src []byte, limit int) (int, error) {
	if !bytes.HasPrefix(src, xerialMagic) {
		return s2.DecodedLen(src)
	}
	const start = 16 // magic and two versions
	if len(src) < start {
		return 0, xerial.ErrMalformed
	}
	total := 0
	for b := src[start:]; len(b) > 0; {
		if len(b) < 4 {
			return 0, xerial.ErrMalformed
		}
		size := binary.BigEndian.Uint32(b)
		b = b[4:]
		if uint64(size) > uint64(len(b)) {
			return 0, xerial.ErrMalformed
		}
		n, err := s2.DecodedLen(b[:size])
		if err != nil {
			return 0, err
		}
		if total += n; total > limit {
			return total, nil
		}
		b = b[size:]
	}
	return total, nil
}

// Compress appends the compressed records to dst. Level is the codec's own (gzip 1–9, lz4 1–17, zstd 1–22;
// KIP-390); 0 is the codec's default and levels beyond our encoders' range are taken as their highest.
func compress(codec Codec, level int, dst, src []byte) ([]byte, error) {
	switch codec {
	case CodecNone:
		return append(dst, src...), nil
	case CodecGzip:
		if level == 0 {
			level = gzip.DefaultCompression
		}
		w := bytes.NewBuffer(dst)
		z, err := gzip.NewWriterLevel(w, level)
		if err != nil {
			return nil, fmt.Errorf("gzip level %d: %w", level, err)
		}
		return finish(w, z, src)
	case CodecSnappy:
		// Encode writes its magic only to an empty slice.
		return append(dst, xerial.Encode(nil, src)...), nil
	case CodecLZ4:
		w := bytes.NewBuffer(dst)
		z := lz4.NewWriter(w)
		// Kafka's default, level 9, is its fast compressor.
		l := lz4.Fast
		if level != 0 && level != 9 {
			l = lz4.CompressionLevel(1 << (8 + min(max(level, 1), 9)))
		}
		if err := z.Apply(lz4.BlockSizeOption(lz4.Block64Kb), lz4.CompressionLevelOption(l)); err != nil {
			return nil, fmt.Errorf("lz4 level %d: %w", level, err)
		}
		return finish(w, z, src)
	case CodecZstd:
		if level == 0 {
			z, ok := zstdWriters.Get().(*zstd.Encoder)
			if !ok {
				return nil, errors.New("no zstd encoder")
			}
			defer zstdWriters.Put(z)
			return z.EncodeAll(src, dst), nil
		}
		z, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.EncoderLevelFromZstd(level)))
		if err != nil {
			return nil, fmt.Errorf("zstd level %d: %w", level, err)
		}
		return z.EncodeAll(src, dst), nil
	}
	return nil, fmt.Errorf("%w: %s", ErrUnsupportedCompression, codec)
}

func finish(w *bytes.Buffer, z io.WriteCloser, src []byte) ([]byte, error) {
	if _, err := z.Write(src); err != nil {
		return nil, err
	}
	if err := z.Close(); err != nil {
		return nil, err
	}
	return w.Bytes(), nil
}
