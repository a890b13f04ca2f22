package remoteformat

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"sort"

	"github.com/klauspost/compress/zstd"
)

// Chunk is one chunk of a segment: where its bytes are in the plain segment and in the .log object.
type Chunk struct {
	Index                      int
	Position, Size             int64
	StoredPosition, StoredSize int64
}

// ChunkIndex maps positions of the plain segment to positions of the .log object. Every chunk but the last has
// ChunkSize plain bytes.
type ChunkIndex struct {
	ChunkSize int64 // plain bytes of a chunk
	FileSize  int64 // plain bytes of the segment

	// Fixed: all stored chunks have StoredChunkSize bytes, the last FinalStoredSize.
	Fixed           bool
	StoredChunkSize int64
	FinalStoredSize int64

	ends []int64 // variable: where each stored chunk ends in the object
}

// NewFixedIndex describes chunks that grow by overhead bytes each: 0 for plain, 28 for encrypted ones.
func NewFixedIndex(chunkSize, fileSize, overhead int64) ChunkIndex {
	last := fileSize % chunkSize
	if last == 0 && fileSize > 0 {
		last = chunkSize
	}
	return ChunkIndex{ChunkSize: chunkSize, FileSize: fileSize, Fixed: true,
		StoredChunkSize: chunkSize + overhead, FinalStoredSize: last + overhead}
}

// NewVariableIndex describes chunks whose stored sizes are given.
func NewVariableIndex(chunkSize, fileSize int64, stored []int64) (ChunkIndex, error) {
	x := ChunkIndex{ChunkSize: chunkSize, FileSize: fileSize}
	var end int64
	for _, n := range stored {
		end += n
		x.ends = append(x.ends, end)
	}
	return x, x.check()
}

func (x ChunkIndex) check() error {
	switch {
	case x.ChunkSize <= 0 || x.ChunkSize > MaxChunkSize:
		return fmt.Errorf("%w: chunk size %d", ErrManifest, x.ChunkSize)
	case x.FileSize < 0 || x.FileSize > 1<<40:
		return fmt.Errorf("%w: file size %d", ErrManifest, x.FileSize)
	}
	count := (x.FileSize + x.ChunkSize - 1) / x.ChunkSize
	if x.Fixed {
		most := x.ChunkSize + 1<<16 // far above any overhead, far below what would overflow
		if x.StoredChunkSize <= 0 || x.StoredChunkSize > most || x.FinalStoredSize < 0 || x.FinalStoredSize > most ||
			x.FinalStoredSize == 0 && count > 0 {
			return fmt.Errorf("%w: stored chunk sizes %d, %d", ErrManifest, x.StoredChunkSize, x.FinalStoredSize)
		}
		return nil
	}
	if count != int64(len(x.ends)) {
		return fmt.Errorf("%w: %d chunks for %d bytes in chunks of %d", ErrManifest, len(x.ends), x.FileSize, x.ChunkSize)
	}
	var last int64
	for i, end := range x.ends {
		if end <= last || end-last > math.MaxInt32 {
			return fmt.Errorf("%w: stored size %d of chunk %d", ErrManifest, end-last, i)
		}
		last = end
	}
	return nil
}

// Count is the number of chunks.
func (x ChunkIndex) Count() int { return int((x.FileSize + x.ChunkSize - 1) / x.ChunkSize) }

// Chunk returns chunk i in [0, Count).
func (x ChunkIndex) Chunk(i int) Chunk {
	c := Chunk{Index: i, Position: int64(i) * x.ChunkSize}
	c.Size = min(x.ChunkSize, x.FileSize-c.Position)
	if x.Fixed {
		c.StoredPosition, c.StoredSize = int64(i)*x.StoredChunkSize, x.StoredChunkSize
		if i == x.Count()-1 {
			c.StoredSize = x.FinalStoredSize
		}
		return c
	}
	if i > 0 {
		c.StoredPosition = x.ends[i-1]
	}
	c.StoredSize = x.ends[i] - c.StoredPosition
	return c
}

// Range returns the first and last chunk that hold plain bytes of [from, to); ok is false for an empty range.
func (x ChunkIndex) Range(from, to int64) (first, last int, ok bool) {
	from, to = max(from, 0), min(to, x.FileSize)
	if from >= to {
		return 0, 0, false
	}
	return int(from / x.ChunkSize), int((to - 1) / x.ChunkSize), true
}

// StoredRange returns the bytes of the .log object that hold the plain bytes of [from, to), and where in the plain
// segment they begin and end; all are 0 for an empty range.
func (x ChunkIndex) StoredRange(from, to int64) (stored, n, plainFrom, plainTo int64) {
	first, last, ok := x.Range(from, to)
	if !ok {
		return 0, 0, 0, 0
	}
	a, b := x.Chunk(first), x.Chunk(last)
	return a.StoredPosition, b.StoredPosition + b.StoredSize - a.StoredPosition, a.Position, b.Position + b.Size
}

// Find returns the chunk that holds a position of the stored object, the way back from StoredRange.
func (x ChunkIndex) Find(stored int64) (Chunk, bool) {
	if stored < 0 || stored >= x.StoredSize() {
		return Chunk{}, false
	}
	if x.Fixed {
		return x.Chunk(min(int(stored/x.StoredChunkSize), x.Count()-1)), true
	}
	return x.Chunk(sort.Search(len(x.ends), func(i int) bool { return x.ends[i] > stored })), true
}

// StoredSize is the size of the .log object.
func (x ChunkIndex) StoredSize() int64 {
	n := x.Count()
	if n == 0 {
		return 0
	}
	c := x.Chunk(n - 1)
	return c.StoredPosition + c.StoredSize
}

// JSON forms; the order of fields is the plugin's.
type fixedJSON struct {
	Type              string `json:"type"`
	OriginalChunkSize int64  `json:"originalChunkSize"`
	OriginalFileSize  int64  `json:"originalFileSize"`
	TransformedSize   int64  `json:"transformedChunkSize"`
	FinalSize         int64  `json:"finalTransformedChunkSize"`
}

type variableJSON struct {
	Type              string `json:"type"`
	OriginalChunkSize int64  `json:"originalChunkSize"`
	OriginalFileSize  int64  `json:"originalFileSize"`
	Chunks            string `json:"transformedChunks"`
}

// MarshalJSON writes the plugin's form.
func (x ChunkIndex) MarshalJSON() ([]byte, error) {
	if x.Fixed {
		return json.Marshal(fixedJSON{"fixed", x.ChunkSize, x.FileSize, x.StoredChunkSize, x.FinalStoredSize})
	}
	bin := encodeSizes(x.ends)
	if len(bin) > maxChunkBin {
		return nil, fmt.Errorf("chunk index of %d chunks is too large: use larger chunks", len(x.ends))
	}
	enc, err := newEncoder()
	if err != nil {
		return nil, err
	}
	return json.Marshal(variableJSON{"variable", x.ChunkSize, x.FileSize,
		base64.StdEncoding.EncodeToString(enc.EncodeAll(bin, nil))})
}

// UnmarshalJSON reads it.
func (x *ChunkIndex) UnmarshalJSON(b []byte) error {
	var all struct {
		fixedJSON
		Chunks string `json:"transformedChunks"`
	}
	if err := json.Unmarshal(b, &all); err != nil {
		return err
	}
	*x = ChunkIndex{ChunkSize: all.OriginalChunkSize, FileSize: all.OriginalFileSize}
	switch all.Type {
	case "fixed":
		x.Fixed, x.StoredChunkSize, x.FinalStoredSize = true, all.TransformedSize, all.FinalSize
	case "variable":
		stored, err := base64.StdEncoding.DecodeString(all.Chunks)
		if err != nil {
			return fmt.Errorf("%w: chunk index: %w", ErrManifest, err)
		}
		bin, err := unzstd(stored, maxChunkBin)
		if err != nil {
			return fmt.Errorf("%w: chunk index: %w", ErrManifest, err)
		}
		if x.ends, err = decodeSizes(bin); err != nil {
			return err
		}
	default:
		return fmt.Errorf("%w: chunk index of type %q", ErrManifest, all.Type)
	}
	return x.check()
}

// encodeSizes packs sizes as: count; then nothing, or one int32, or base, width, the first count-1 sizes above base in
// width bytes each, and the last in full.
func encodeSizes(ends []int64) []byte {
	sizes := make([]int64, len(ends))
	for i, end := range ends {
		sizes[i] = end
		if i > 0 {
			sizes[i] -= ends[i-1]
		}
	}
	out := binary.BigEndian.AppendUint32(nil, uint32(len(sizes)))
	if len(sizes) == 0 {
		return out
	}
	last := uint32(sizes[len(sizes)-1])
	if len(sizes) == 1 {
		return binary.BigEndian.AppendUint32(out, last)
	}
	body := sizes[:len(sizes)-1]
	lo, hi := body[0], body[0]
	for _, n := range body {
		lo, hi = min(lo, n), max(hi, n)
	}
	width := 1
	for (hi-lo)>>(8*width) > 0 {
		width++
	}
	out = binary.BigEndian.AppendUint32(out, uint32(lo))
	out = append(out, byte(width))
	var word [8]byte
	for _, n := range body {
		binary.BigEndian.PutUint64(word[:], uint64(n-lo))
		out = append(out, word[8-width:]...)
	}
	return binary.BigEndian.AppendUint32(out, last)
}

// decodeSizes returns where each chunk ends.
func decodeSizes(b []byte) ([]int64, error) {
	bad := fmt.Errorf("%w: chunk index of %d bytes", ErrManifest, len(b))
	if len(b) < 4 {
		return nil, bad
	}
	count := int64(binary.BigEndian.Uint32(b))
	b = b[4:]
	switch {
	case count == 0 && len(b) == 0:
		return nil, nil
	case count == 1 && len(b) == 4:
		return []int64{int64(binary.BigEndian.Uint32(b))}, nil
	case count < 2 || len(b) < 9:
		return nil, bad
	}
	base, width := int64(int32(binary.BigEndian.Uint32(b))), int64(b[4])
	b = b[5:]
	if width < 1 || width > 4 || base < 0 || int64(len(b)) != (count-1)*width+4 {
		return nil, bad
	}
	ends := make([]int64, 0, count)
	var end int64
	for range count - 1 {
		var v int64
		for _, c := range b[:width] {
			v = v<<8 | int64(c)
		}
		b = b[width:]
		end += base + v
		ends = append(ends, end)
	}
	return append(ends, end+int64(binary.BigEndian.Uint32(b))), nil
}

// newEncoder makes frames that carry their content size, which the plugin relies on.
func newEncoder() (*zstd.Encoder, error) {
	return zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithSingleSegment(true), zstd.WithEncoderCRC(false))
}

// unzstd decompresses to at most limit bytes.
func unzstd(b []byte, limit int) ([]byte, error) {
	var h zstd.Header
	if err := h.Decode(b); err != nil {
		return nil, err
	}
	if h.HasFCS && h.FrameContentSize > uint64(limit) {
		return nil, zstd.ErrDecoderSizeExceeded
	}
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(uint64(limit)+1<<10), zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, err
	}
	defer d.Close()
	out, err := d.DecodeAll(b, nil)
	if err == nil && len(out) > limit {
		err = zstd.ErrDecoderSizeExceeded
	}
	return out, err
}
