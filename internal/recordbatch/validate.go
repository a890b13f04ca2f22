package recordbatch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"
)

// Rules are a topic's conditions for accepting batches as their leader.
type Rules struct {
	MaxMessageBytes       int   // of one batch, as sent and as stored; 0 is no limit
	NowMs                 int64 // the broker's clock
	LogAppendTime         bool  // stamp NowMs on all records
	TimestampBeforeMaxMs  int64 // message.timestamp.before.max.ms
	TimestampAfterMaxMs   int64 // message.timestamp.after.max.ms
	RequireKeys           bool  // the topic is compacted
	Recompress            bool  // the topic names a codec of its own: store with Codec at Level
	Codec                 Codec
	Level                 int
	DecompressLimit       int  // bytes of records of a compressed batch; 0 is DefaultDecompressLimit
	Internal              bool // a coordinator writes: control batches and several batches are allowed
	AllowSeveralBatches   bool // Produce before version 3, from producers without an id
	SkipTimestampChecking bool
}

// RecordError is what is wrong with one record of the request, counted from 0.
type RecordError struct {
	Index   int
	Message string
}

// RecordsError carries the causes by record, as Produce's RecordErrors. Err is ErrInvalidTimestamp or
// ErrInvalidRecord.
type RecordsError struct {
	Err     error
	Records []RecordError
}

// recordErrorsMax bounds the list: a client that gets one wrong mostly gets all wrong.
const recordErrorsMax = 1000

func (e *RecordsError) Error() string {
	return fmt.Sprintf("%v: record %d of the request: %s (%d such)", e.Err, e.Records[0].Index, e.Records[0].Message, len(e.Records))
}

// Unwrap is Err.
func (e *RecordsError) Unwrap() error { return e.Err }

// decodeBuffers hold the decompressed records while they are walked; nothing of them is kept.
var decodeBuffers = sync.Pool{New: func() any { return new([]byte) }}

// decodeBufferMax is the largest buffer that goes back to the pool.
const decodeBufferMax = 4 << 20

// Validate checks what a client, or with Internal a coordinator, wants appended, as Kafka's LogValidator does,
// and brings it into the form to be stored: it stamps timestamps and recompresses where the topic says so.
// Offsets and leader epochs are the caller's to stamp.
//
// raw may be changed in place. The bytes returned are raw itself, or a new slice if a batch was recompressed;
// the headers of the batches are appended to headers. Errors wrap one of the sentinels of this package.
func Validate(raw []byte, rules *Rules, headers []Header) ([]byte, []Header, error) {
	first := len(headers)
	rewrite := false
	for pos := 0; pos < len(raw); {
		h, err := ParseHeader(raw[pos:])
		if err != nil {
			return nil, headers, asCorrupt(err)
		}
		if h.Size > len(raw)-pos {
			return nil, headers, fmt.Errorf("%w: batch of %d bytes, %d sent", ErrCorrupt, h.Size, len(raw)-pos)
		}
		if rules.MaxMessageBytes > 0 && h.Size > rules.MaxMessageBytes {
			return nil, headers, fmt.Errorf("%w: %d bytes, limit %d", ErrTooLarge, h.Size, rules.MaxMessageBytes)
		}
		if err := h.Verify(raw[pos:]); err != nil {
			return nil, headers, asCorrupt(err)
		}
		headers = append(headers, h)
		if err := checkBatch(&h, rules, len(headers)-first); err != nil {
			return nil, headers, err
		}
		rewrite = rewrite || rules.Recompress && h.Codec() != rules.Codec && !h.IsControl()
		pos += h.Size
	}
	if len(headers) == first {
		return nil, headers, fmt.Errorf("%w: no record batch", ErrInvalidRecord)
	}
	var out []byte
	base := 0 // index of the batch's first record in the request
	pos := 0
	for i := first; i < len(headers); i++ {
		h := &headers[i]
		size := h.Size
		batch, err := validateRecords(raw[pos:pos+size:pos+size], h, rules, base, rewrite)
		if err != nil {
			return nil, headers, err
		}
		if rewrite {
			out = append(out, batch...)
		}
		base += int(h.Count)
		pos += size
	}
	if rewrite {
		return out, headers, nil
	}
	return raw, headers, nil
}

// asCorrupt turns "cut short" into corruption: the whole batch was due.
func asCorrupt(err error) error {
	if errors.Is(err, ErrShort) {
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return err
}

// checkBatch applies the rules that the header alone decides. n is the number of batches so far.
func checkBatch(h *Header, rules *Rules, n int) error {
	if h.Codec() > CodecZstd {
		return fmt.Errorf("%w: %s", ErrUnsupportedCompression, h.Codec())
	}
	if h.Count == 0 || int64(h.Count) != int64(h.LastOffsetDelta)+1 {
		return fmt.Errorf("%w: %d records, last offset delta %d", ErrInvalidRecord, h.Count, h.LastOffsetDelta)
	}
	if rules.Internal {
		return nil
	}
	switch {
	case n > 1 && (!rules.AllowSeveralBatches || h.HasProducer()):
		return fmt.Errorf("%w: more than one record batch", ErrInvalidRecord)
	case h.BaseOffset != 0:
		return fmt.Errorf("%w: base offset %d of a client's batch, want 0", ErrInvalidRecord, h.BaseOffset)
	case h.IsControl():
		return fmt.Errorf("%w: clients may not write control records", ErrInvalidRecord)
	case h.HasDeleteHorizon():
		return fmt.Errorf("%w: a client's batch has a delete horizon", ErrInvalidRecord)
	case h.LogAppendTime():
		return fmt.Errorf("%w: the producer set the timestamp type to LogAppendTime", ErrInvalidTimestamp)
	case h.HasProducer() && (h.BaseSequence < 0 || h.ProducerEpoch < 0):
		return fmt.Errorf("%w: producer id %d with sequence %d, epoch %d", ErrInvalidRecord, h.ProducerID, h.BaseSequence, h.ProducerEpoch)
	case h.IsTransactional() && !h.HasProducer():
		return fmt.Errorf("%w: transactional batch without a producer id", ErrInvalidRecord)
	}
	return nil
}

// validateRecords walks the records of one batch and returns it as it is to be stored: the batch itself,
// changed in place, or, with rewrite, perhaps a new one. It updates h.
func validateRecords(batch []byte, h *Header, rules *Rules, base int, rewrite bool) ([]byte, error) {
	records := batch[HeaderSize:]
	if h.Codec() != CodecNone {
		buf, _ := decodeBuffers.Get().(*[]byte)
		decoded, err := decompress(h.Codec(), (*buf)[:0], records, rules.DecompressLimit)
		if err != nil {
			decodeBuffers.Put(buf)
			return nil, err
		}
		records = decoded
		defer func() {
			if cap(decoded) <= decodeBufferMax {
				*buf = decoded[:0]
			}
			decodeBuffers.Put(buf)
		}()
	}
	maxTime, err := walk(records, h, rules, base)
	if err != nil {
		return nil, err
	}
	if rewrite && rules.Recompress && h.Codec() != rules.Codec && !h.IsControl() {
		if batch, err = recompress(batch, records, rules); err != nil {
			return nil, err
		}
	}
	switch {
	case rules.LogAppendTime:
		SetMaxTimestamp(batch, rules.NowMs, true)
	case maxTime != h.MaxTimestamp && !h.LogAppendTime():
		// Retention and the time index trust the header, so a client's mistake must not reach them.
		SetMaxTimestamp(batch, maxTime, false)
	}
	if *h, err = ParseHeader(batch); err != nil {
		return nil, err
	}
	if rules.MaxMessageBytes > 0 && h.Size > rules.MaxMessageBytes {
		return nil, fmt.Errorf("%w: %d bytes once recompressed, limit %d", ErrTooLarge, h.Size, rules.MaxMessageBytes)
	}
	return batch, nil
}

// recompress puts the records, whose encoding does not depend on the codec, under the topic's codec.
func recompress(batch, records []byte, rules *Rules) ([]byte, error) {
	out := make([]byte, HeaderSize, HeaderSize+len(records)/2+64)
	copy(out, batch[:HeaderSize])
	out, err := compress(rules.Codec, rules.Level, out, records)
	if err != nil {
		return nil, err
	}
	if len(out)-LengthOverhead > math.MaxInt32 {
		return nil, fmt.Errorf("%w: %d bytes once recompressed", ErrTooLarge, len(out))
	}
	attrs := binary.BigEndian.Uint16(out[posAttrs:])&^attrCodec | uint16(rules.Codec)
	binary.BigEndian.PutUint16(out[posAttrs:], attrs)
	binary.BigEndian.PutUint32(out[posLength:], uint32(len(out)-LengthOverhead))
	binary.BigEndian.PutUint32(out[posCRC:], Checksum(out))
	return out, nil
}

// walk checks each record's form, the run of offset deltas 0, 1, 2, …, keys and timestamps, and returns the
// maximum timestamp.
func walk(records []byte, h *Header, rules *Rules, base int) (int64, error) {
	oldest, newest := int64(math.MinInt64), int64(math.MaxInt64)
	if !rules.LogAppendTime && !rules.SkipTimestampChecking && !rules.Internal {
		// Both limits may be 2^63-1, "none".
		if before := max(rules.TimestampBeforeMaxMs, 0); rules.NowMs >= math.MinInt64+before {
			oldest = rules.NowMs - before
		}
		if rules.TimestampAfterMaxMs < math.MaxInt64-max(rules.NowMs, 0) {
			newest = rules.NowMs + rules.TimestampAfterMaxMs
		}
	}
	var bad *RecordsError
	maxTime := int64(math.MinInt64)
	for i := int32(0); i < h.Count; i++ {
		p, rest, err := parseRecord(records)
		if err != nil {
			return 0, fmt.Errorf("record %d of %d: %w", i, h.Count, err)
		}
		records = rest
		if p.offsetDelta != int64(i) {
			return 0, fmt.Errorf("%w: record %d has offset delta %d", ErrInvalidRecord, i, p.offsetDelta)
		}
		ts := h.BaseTimestamp + p.timeDelta
		maxTime = max(maxTime, ts)
		if rules.RequireKeys && p.key == nil && !h.IsControl() {
			bad = bad.add(base+int(i), ErrInvalidRecord, "a compacted topic takes no record without a key")
		}
		if (ts < oldest || ts > newest) && ts != -1 {
			bad = bad.add(base+int(i), ErrInvalidTimestamp,
				fmt.Sprintf("timestamp %d is outside of [%d, %d]", ts, oldest, newest))
		}
	}
	if len(records) != 0 {
		return 0, fmt.Errorf("%w: %d bytes after the last of %d records", ErrInvalidRecord, len(records), h.Count)
	}
	if bad != nil {
		return 0, bad
	}
	return maxTime, nil
}

// add notes one more bad record; a bad timestamp decides the kind of the whole, as in Kafka.
func (e *RecordsError) add(index int, err error, message string) *RecordsError {
	if e == nil {
		e = &RecordsError{Err: err}
	}
	if err == ErrInvalidTimestamp {
		e.Err = err
	}
	if len(e.Records) < recordErrorsMax {
		e.Records = append(e.Records, RecordError{index, message})
	}
	return e
}

// ParseCodec reads a topic's compression.type. recompress is false for "producer", which keeps each batch's
// own codec.
func ParseCodec(name string) (codec Codec, recompress bool, err error) {
	switch name {
	case "producer", "":
		return CodecNone, false, nil
	case "uncompressed", "none":
		return CodecNone, true, nil
	case "gzip":
		return CodecGzip, true, nil
	case "snappy":
		return CodecSnappy, true, nil
	case "lz4":
		return CodecLZ4, true, nil
	case "zstd":
		return CodecZstd, true, nil
	}
	return CodecNone, false, fmt.Errorf("%w: %q", ErrUnsupportedCompression, name)
}
