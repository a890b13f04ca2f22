// Package uploader moves segments into a bucket and out of it: it executes what tier.MakePlan decides, and finds what no
// metadata record knows.
//
// An upload puts .log, .indexes and the manifest in that order and never replaces an object; until CopyFinished is
// recorded nobody reads it. Every call may be repeated after any failure. All functions may be called concurrently for
// different segments and end when ctx ends.
package uploader

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"

	"golang.org/x/time/rate"

	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tier"
)

// ErrSource says that the local data is not what the segment claims, or is damaged; it must not reach the tier.
var ErrSource = errors.New("local data does not match the remote segment")

// Source is the data of one segment: Size bytes of whole batches, and indexes as files whose offsets and positions
// count from the segment's start. TxnIndex is nil without aborted transactions.
type Source struct {
	Log                                                              io.ReaderAt
	Size                                                             int64
	OffsetIndex, TimeIndex, TxnIndex, ProducerSnapshot, LeaderEpochs []byte
}

// Spool holds a transformed segment until it is put. Close removes it.
type Spool interface {
	io.Writer
	io.ReaderAt
	io.Closer
}

// Options are common to all uploads of a broker.
type Options struct {
	// Prefix is put in front of all keys as it is.
	Prefix string
	// Write says how segments are stored. The zero value stores them plain.
	Write remoteformat.WriteOptions
	// SkipCompressed leaves out Write.Compress for segments whose first batch is compressed already.
	SkipCompressed bool
	// Limiter bounds the bytes read for upload, retries included; one is shared by all uploads (KIP-956). Nil is no bound.
	Limiter *rate.Limiter
	// Spool makes the place of transformed segments; nil is FileSpool in the system's temporary folder.
	Spool func() (Spool, error)
	// CustomSize, CustomPrefix and CustomPath choose the fields of Kafka's custom metadata.
	CustomSize, CustomPrefix, CustomPath bool
}

// Result is what CopyFinished records.
type Result struct {
	ObjectBytes    int64  // of all three objects
	CRC            uint32 // CRC-32C of the plain log
	Format         string
	CustomMetadata []byte
}

// FileSpool makes spools of temporary files in dir.
func FileSpool(dir string) func() (Spool, error) {
	return func() (Spool, error) {
		f, err := os.CreateTemp(dir, "varve-upload-*")
		if err != nil {
			return nil, fmt.Errorf("make spool: %w", err)
		}
		return &fileSpool{f}, nil
	}
}

type fileSpool struct{ *os.File }

func (s *fileSpool) Close() error {
	return errors.Join(s.File.Close(), os.Remove(s.File.Name()))
}

// Upload verifies every batch of src, stores the segment and returns what to record. On failure objects may be left
// behind; they belong to the attempt's CopyStarted record and go with it.
func Upload(ctx context.Context, b objstore.Bucket, seg *tier.Segment, src Source, o Options) (Result, error) {
	res, err := upload(ctx, b, seg, src, o)
	if err != nil {
		return Result{}, fmt.Errorf("upload segment %s of %s-%d at %d: %w", seg.ID, seg.Topic, seg.Partition, seg.Start, err)
	}
	return res, nil
}

func upload(ctx context.Context, b objstore.Bucket, seg *tier.Segment, src Source, o Options) (Result, error) {
	crc, codec, err := verify(ctx, seg, src)
	if err != nil {
		return Result{}, err
	}
	wo := o.Write
	if o.SkipCompressed && codec != recordbatch.CodecNone {
		wo.Compress = false
	}
	var body io.ReaderAt = src.Log
	var spool Spool
	if wo.Transforms() {
		if spool, err = makeSpool(o); err != nil {
			return Result{}, err
		}
		defer spool.Close()
		body = spool
	}
	w, err := remoteformat.Write(remoteformat.Source{
		Log: ctxReaderAt{ctx, src.Log}, Size: src.Size,
		Indexes: remoteformat.Indexes{Offset: src.OffsetIndex, Timestamp: src.TimeIndex, ProducerSnapshot: src.ProducerSnapshot,
			LeaderEpoch: src.LeaderEpochs, Transaction: src.TxnIndex},
		Metadata: remoteformat.Metadata{Key: seg.Key(), End: seg.End, MaxTimestamp: seg.MaxTimestamp, Broker: seg.Broker,
			EventTime: seg.EventTime, Epochs: seg.Epochs},
	}, wo, spool)
	if err != nil {
		return Result{}, err
	}
	manifest, err := w.Manifest.Encode()
	if err != nil {
		return Result{}, err
	}
	if o.Limiter != nil {
		body = &limited{ctx, body, o.Limiter}
	}
	for _, x := range []struct {
		object remoteformat.Object
		body   io.ReaderAt
		size   int64
	}{{remoteformat.ObjectLog, body, w.LogSize}, {remoteformat.ObjectIndexes, bytes.NewReader(w.Indexes), int64(len(w.Indexes))},
		{remoteformat.ObjectManifest, bytes.NewReader(manifest), int64(len(manifest))}} {
		if err := putOnce(ctx, b, seg.Key().Object(o.Prefix, x.object), x.body, x.size); err != nil {
			return Result{}, err
		}
	}
	res := Result{ObjectBytes: w.LogSize + int64(len(w.Indexes)) + int64(len(manifest)), CRC: crc, Format: tier.FormatChunkedV1}
	if !wo.Transforms() {
		res.Format = tier.FormatKafkaV1
	}
	res.CustomMetadata = o.custom(seg, res.ObjectBytes)
	return res, nil
}

func makeSpool(o Options) (Spool, error) {
	if o.Spool != nil {
		return o.Spool()
	}
	return FileSpool("")()
}

func (o Options) custom(seg *tier.Segment, size int64) []byte {
	var c remoteformat.CustomMetadata
	if o.CustomSize {
		c.RemoteSize = &size
	}
	if o.CustomPrefix {
		c.Prefix = &o.Prefix
	}
	if o.CustomPath {
		path := seg.Key().Path()
		c.Path = &path
	}
	return c.Encode()
}

// putOnce creates an object, or finds that an earlier call of the same attempt has.
func putOnce(ctx context.Context, b objstore.Bucket, key string, body io.ReaderAt, size int64) error {
	err := b.Put(ctx, key, body, size, objstore.PutOptions{CreateOnly: true})
	if !errors.Is(err, objstore.ErrExists) {
		return err
	}
	same, cerr := objstore.Same(ctx, b, key, body, size)
	if cerr != nil {
		return cerr
	}
	if !same {
		return err
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// verify walks all batches, so that damage of the local disk does not become the only copy, and returns the CRC-32C of
// their bytes and the codec of the first.
func verify(ctx context.Context, seg *tier.Segment, src Source) (uint32, recordbatch.Codec, error) {
	s := segment.NewBatchScanner(ctxReaderAt{ctx, src.Log}, 0, src.Size)
	defer s.Release()
	var crc uint32
	codec := recordbatch.CodecNone
	next, first := seg.Start, true
	for s.Next() {
		h := s.Header()
		inside := first && h.BaseOffset < next && h.LastOffset() >= next // the range begins in the middle of a batch
		if h.BaseOffset < next && !inside || h.LastOffset() > seg.End {
			return 0, 0, fmt.Errorf("%w: batch of offsets %d to %d at position %d of a segment of %d to %d", ErrSource, h.BaseOffset, h.LastOffset(), s.Pos(), seg.Start, seg.End)
		}
		batch, err := s.Batch()
		if err != nil {
			return 0, 0, err
		}
		if err := recordbatch.VerifyCRC(batch); err != nil {
			return 0, 0, fmt.Errorf("%w: batch at offset %d: %w", ErrSource, h.BaseOffset, err)
		}
		crc = crc32.Update(crc, castagnoli, batch)
		if first {
			codec, first = h.Codec(), false
		}
		next = h.NextOffset()
	}
	if err := s.Err(); err != nil {
		if c := (*segment.CorruptError)(nil); errors.As(err, &c) {
			return 0, 0, fmt.Errorf("%w: %w", ErrSource, err)
		}
		return 0, 0, err
	}
	if s.End() != src.Size || first {
		return 0, 0, fmt.Errorf("%w: batches end at %d of %d bytes", ErrSource, s.End(), src.Size)
	}
	return crc, codec, nil
}

// Delete removes a segment's objects, the manifest first, so that a half deleted segment is not taken for a whole one.
// Missing objects are success.
func Delete(ctx context.Context, b objstore.Bucket, prefix string, seg *tier.Segment) error {
	for _, o := range []remoteformat.Object{remoteformat.ObjectManifest, remoteformat.ObjectIndexes, remoteformat.ObjectLog} {
		if err := b.Delete(ctx, seg.Object(prefix, o)); err != nil {
			return fmt.Errorf("delete segment %s of %s-%d at %d: %w", seg.ID, seg.Topic, seg.Partition, seg.Start, err)
		}
	}
	return nil
}

type ctxReaderAt struct {
	ctx context.Context
	r   io.ReaderAt
}

func (r ctxReaderAt) ReadAt(p []byte, off int64) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.ReadAt(p, off)
}

// limited waits for the rate before each read, in pieces no larger than the limiter's burst.
type limited struct {
	ctx context.Context
	r   io.ReaderAt
	l   *rate.Limiter
}

func (l *limited) ReadAt(p []byte, off int64) (int, error) {
	if err := wait(l.ctx, l.l, len(p)); err != nil {
		return 0, err
	}
	return l.r.ReadAt(p, off)
}

func wait(ctx context.Context, l *rate.Limiter, n int) error {
	burst := l.Burst()
	if l.Limit() == rate.Inf || burst <= 0 {
		return ctx.Err()
	}
	for n > 0 {
		k := min(n, burst)
		if err := l.WaitN(ctx, k); err != nil {
			return err
		}
		n -= k
	}
	return nil
}
