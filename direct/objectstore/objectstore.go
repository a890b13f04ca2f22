// Package objectstore reads remote segments for package direct from S3 or a directory. It reads plain segments
// ("ApacheKafkaV1") and those that Aiven's plug-in layout compressed or encrypted ("AivenChunkedV1"), whose manifests it
// caches. A Fetcher is safe for concurrent use and only ever reads.
package objectstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/internal/bucket"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/tier"
)

// Options of Open. Zero values are fine.
type Options struct {
	// AccessKey, SecretKey and SessionToken are static S3 credentials. Without them the usual environment variables and
	// files are looked at.
	AccessKey, SecretKey, SessionToken string
	// Keys are PEM private keys by id, for encrypted segments.
	Keys map[string][]byte
	// Grants has objects read by the URLs that brokers sign (remote.fetch.grants=presigned), without credentials. A URL is used only
	// for the object of the location that it came with, in the bucket that was opened.
	Grants bool
	// ManifestsMax bounds the cached manifests (1000).
	ManifestsMax int
	Logger       *slog.Logger
}

// Store is all that a Fetcher needs of an object store: n bytes of an object from off, or all from off where n < 0. Its
// errors should match the sentinels of package direct; a reader over a range that ends early may just end.
type Store interface {
	Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error)
}

// Fetcher implements direct.Fetcher. Its errors match the sentinels of package direct.
type Fetcher struct {
	bucket Store
	signed objstore.SignedReader // nil without grants
	keys   *remoteformat.Keyring
	max    int

	mu        sync.Mutex
	manifests map[string]*remoteformat.Segment
}

var _ direct.Fetcher = (*Fetcher)(nil)

// Open opens a bucket by its URL: a path or file:///path for a directory, or s3://bucket/prefix?endpoint=…&region=…&path-style=…
// A directory must be there. Keys of objects are taken from the broker as they are, so the URL is the broker's. Nothing is retried here: a failed read
// goes to the broker at once.
func Open(url string, o Options) (*Fetcher, error) {
	b, err := bucket.Open(url, bucket.Options{AccessKey: o.AccessKey, SecretKey: o.SecretKey, SessionToken: o.SessionToken, NoRetry: true, ReadOnly: true, Logger: o.Logger})
	if err != nil {
		return nil, err
	}
	f, err := New(b, o)
	if err != nil || !o.Grants {
		return f, err
	}
	var ok bool
	if f.signed, ok = b.(objstore.SignedReader); !ok {
		return nil, fmt.Errorf("objectstore: no grants for %s: only S3 has signed URLs", b)
	}
	return f, nil
}

// New reads from any store, such as one that Open has no driver for.
func New(b Store, o Options) (*Fetcher, error) {
	f := &Fetcher{bucket: b, keys: &remoteformat.Keyring{}, max: o.ManifestsMax, manifests: map[string]*remoteformat.Segment{}}
	if f.max <= 0 {
		f.max = 1000
	}
	for id, pem := range o.Keys {
		if err := f.keys.Add(id, pem, nil); err != nil {
			return nil, err
		}
	}
	return f, nil
}

// Store is what the Fetcher reads from.
func (f *Fetcher) Store() Store { return f.bucket }

// Registry has the names for direct.ParseProperties: "s3" and "directory". Both open the URL in the property
// "varve.remote.bucket.url".
func Registry(o Options) direct.Fetchers {
	named := func(scheme string) func(map[string]string) (direct.Fetcher, error) {
		return func(p map[string]string) (direct.Fetcher, error) {
			url := p["varve.remote.bucket.url"]
			if is := strings.HasPrefix(url, "s3:"); url == "" || is != (scheme == "s3") {
				return nil, fmt.Errorf("varve.remote.bucket.url: %q is no URL of %s", url, scheme)
			}
			return Open(url, o)
		}
	}
	return direct.Fetchers{"s3": named("s3"), "directory": named("directory")}
}

// Formats implements direct.Fetcher.
func (f *Fetcher) Formats() []string { return []string{tier.FormatKafkaV1, tier.FormatChunkedV1} }

// FetchLogSegment implements direct.Fetcher.
func (f *Fetcher) FetchLogSegment(ctx context.Context, s direct.Segment, start, end int64) (io.ReadCloser, error) {
	if start < 0 || end < start {
		return nil, fmt.Errorf("objectstore: range of %d to %d", start, end)
	}
	switch s.Format {
	case tier.FormatKafkaV1:
		return f.plain(ctx, s, start, end)
	case tier.FormatChunkedV1:
		m, err := f.manifest(ctx, s)
		if err != nil {
			return nil, wrap(err)
		}
		if end > m.Size() {
			return nil, fmt.Errorf("%w: %q has %d plain bytes, wanted are %d to %d", direct.ErrShort, s.ObjectKey, m.Size(), start, end)
		}
		if m.Plain() {
			return f.plain(ctx, s, start, end)
		}
		return f.chunks(ctx, s, m, start, end)
	}
	return nil, fmt.Errorf("%w: %q", direct.ErrUnknownFormat, s.Format)
}

// get reads n bytes of an object, all where n < 0, by its grant if there are grants.
func (f *Fetcher) get(ctx context.Context, key string, grant direct.Grant, off, n int64) (io.ReadCloser, error) {
	if f.signed == nil {
		return f.bucket.Get(ctx, key, off, n)
	}
	if grant == "" {
		return nil, fmt.Errorf("%w: the broker granted no URL for %q", direct.ErrAuth, key)
	}
	return f.signed.GetSigned(ctx, string(grant), key, off, n)
}

// plain reads a range that is stored as it is.
func (f *Fetcher) plain(ctx context.Context, s direct.Segment, start, end int64) (io.ReadCloser, error) {
	body, err := f.get(ctx, s.ObjectKey, s.LogGrant, start, end-start)
	if err != nil {
		return nil, wrap(err)
	}
	return &plainBody{body}, nil
}

// manifest returns the decoder of a segment.
func (f *Fetcher) manifest(ctx context.Context, s direct.Segment) (*remoteformat.Segment, error) {
	f.mu.Lock()
	m := f.manifests[s.ObjectKey]
	f.mu.Unlock()
	if m != nil {
		return m, nil
	}
	base, ok := strings.CutSuffix(s.ObjectKey, remoteformat.ObjectLog.Suffix())
	if !ok {
		return nil, fmt.Errorf("%w: object %q has no manifest", direct.ErrUnknownFormat, s.ObjectKey)
	}
	b, err := f.object(ctx, base+remoteformat.ObjectManifest.Suffix(), s.ManifestGrant, remoteformat.MaxManifestSize)
	if err != nil {
		return nil, err
	}
	if m, err = remoteformat.Open(b, f.keys); err != nil {
		return nil, err
	}
	if m.Manifest().Metadata.ID != s.SegmentID {
		return nil, fmt.Errorf("%w: manifest of %q is of segment %s", direct.ErrDamaged, s.ObjectKey, m.Manifest().Metadata.ID)
	}
	if m.Size() != s.Size {
		return nil, fmt.Errorf("%w: manifest of %q is of %d plain bytes instead of %d", direct.ErrDamaged, s.ObjectKey, m.Size(), s.Size)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for key := range f.manifests {
		if len(f.manifests) < f.max {
			break
		}
		delete(f.manifests, key)
	}
	f.manifests[s.ObjectKey] = m
	return m, nil
}

// chunks streams the plain bytes of chunks that are compressed or encrypted, one chunk in memory at a time.
func (f *Fetcher) chunks(ctx context.Context, s direct.Segment, m *remoteformat.Segment, start, end int64) (io.ReadCloser, error) {
	x := m.Chunks()
	first, last, ok := x.Range(start, end)
	if !ok {
		return io.NopCloser(strings.NewReader("")), nil
	}
	off, n, from, _ := x.StoredRange(start, end)
	body, err := f.get(ctx, s.ObjectKey, s.LogGrant, off, n)
	if err != nil {
		return nil, wrap(err)
	}
	return &chunkBody{body: body, m: m, next: first, last: last, skip: start - from, left: end - start}, nil
}

// Index is a kind of index of a segment (KIP-405, RemoteStorageManager.IndexType).
type Index int

// The indexes that a reader needs.
const (
	OffsetIndex Index = iota
	ProducerSnapshot
	TransactionIndex
)

// MaxIndexBytes bounds an index that is read. Kafka's default of segment.index.bytes is 10 MiB.
const MaxIndexBytes = 64 << 20

// ReadObject reads an object whole. One of more than limit bytes is direct.ErrDamaged.
func (f *Fetcher) ReadObject(ctx context.Context, key string, limit int64) ([]byte, error) {
	return f.object(ctx, key, "", limit)
}

// object reads an object whole, by its grant if there are grants.
func (f *Fetcher) object(ctx context.Context, key string, grant direct.Grant, limit int64) ([]byte, error) {
	body, err := f.get(ctx, key, grant, 0, -1)
	if err != nil {
		return nil, wrap(err)
	}
	defer body.Close()
	b, err := io.ReadAll(io.LimitReader(body, limit+1))
	if err != nil {
		return nil, wrap(err)
	}
	if int64(len(b)) > limit {
		return nil, fmt.Errorf("%w: %q is larger than %d bytes", direct.ErrDamaged, key, limit)
	}
	return b, nil
}

// FetchIndex reads an index of a segment that has a manifest ("AivenChunkedV1") as Kafka wrote it; nil without an error is a
// segment that has none of that kind.
func (f *Fetcher) FetchIndex(ctx context.Context, s direct.Segment, index Index) ([]byte, error) {
	if s.Format != tier.FormatChunkedV1 {
		return nil, fmt.Errorf("%w: %q has no index of its own", direct.ErrUnknownFormat, s.Format)
	}
	m, err := f.manifest(ctx, s)
	if err != nil {
		return nil, wrap(err)
	}
	kind := [...]remoteformat.IndexKind{remoteformat.OffsetIndex, remoteformat.ProducerSnapshot, remoteformat.TransactionIndex}[index]
	span, ok := m.Span(kind)
	if !ok || span.Size == 0 {
		return nil, nil
	}
	key := strings.TrimSuffix(s.ObjectKey, remoteformat.ObjectLog.Suffix()) + remoteformat.ObjectIndexes.Suffix()
	if span.Size > MaxIndexBytes {
		return nil, fmt.Errorf("%w: %s index of %d bytes in %q", direct.ErrDamaged, kind, span.Size, key)
	}
	body, err := f.bucket.Get(ctx, key, span.Position, span.Size)
	if err != nil {
		return nil, wrap(err)
	}
	defer body.Close()
	stored, err := readExactly(body, nil, span.Size)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, wrap(err)
	}
	b, err := m.DecodeIndex(kind, stored)
	return b, wrap(err)
}

type plainBody struct{ io.ReadCloser }

func (b *plainBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	return n, wrap(err)
}

// chunkBody decodes chunk after chunk.
type chunkBody struct {
	body       io.ReadCloser
	m          *remoteformat.Segment
	next, last int
	skip, left int64
	stored     []byte
	plain      []byte
}

func (b *chunkBody) Close() error { return b.body.Close() }

func (b *chunkBody) Read(p []byte) (int, error) {
	for len(b.plain) == 0 {
		if b.left == 0 || b.next > b.last {
			return 0, io.EOF
		}
		c := b.m.Chunks().Chunk(b.next)
		var err error
		if b.stored, err = readExactly(b.body, b.stored[:0], c.StoredSize); err != nil {
			return 0, wrap(err)
		}
		plain, err := b.m.DecodeChunk(b.next, b.stored)
		if err != nil {
			return 0, wrap(err)
		}
		b.next++
		plain = plain[min(b.skip, int64(len(plain))):]
		b.plain, b.skip = plain[:min(int64(len(plain)), b.left)], 0
	}
	n := copy(p, b.plain)
	b.plain, b.left = b.plain[n:], b.left-int64(n)
	return n, nil
}

// readExactly appends n bytes; memory grows with what arrives.
func readExactly(r io.Reader, dst []byte, n int64) ([]byte, error) {
	for int64(len(dst)) < n {
		have := len(dst)
		step := int(min(n-int64(have), max(1<<20, int64(have))))
		if cap(dst)-have < step {
			dst = append(make([]byte, 0, have+step), dst...)
		}
		dst = dst[:have+step]
		if _, err := io.ReadFull(r, dst[have:]); err != nil {
			return dst[:have], err
		}
	}
	return dst, nil
}

// wrap gives an error the sentinel of package direct that it deserves.
func wrap(err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	for _, x := range []struct{ has, sentinel error }{
		{objstore.ErrNotFound, direct.ErrNotFound}, {objstore.ErrAccess, direct.ErrAuth}, {objstore.ErrExpired, direct.ErrExpired}, {objstore.ErrClockSkew, direct.ErrAuth},
		{objstore.ErrThrottled, direct.ErrThrottled}, {objstore.ErrShortBody, direct.ErrShort}, {io.ErrUnexpectedEOF, direct.ErrShort},
		{remoteformat.ErrNoKey, direct.ErrAuth}, {remoteformat.ErrManifest, direct.ErrDamaged}, {remoteformat.ErrChunk, direct.ErrDamaged},
	} {
		if errors.Is(err, x.has) {
			return fmt.Errorf("%w: %w", x.sentinel, err)
		}
	}
	if op := (*net.OpError)(nil); errors.As(err, &op) && op.Op == "dial" && op.Timeout() {
		return fmt.Errorf("%w: %w", direct.ErrConnectTimeout, err)
	}
	return err
}
