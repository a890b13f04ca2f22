package direct

import (
	"context"
	"errors"
	"io"

	"github.com/varve-io/varve/internal/directfetch"
)

// Segment names a remote segment to a Fetcher. The fields are those of the broker's answer.
type Segment struct {
	SegmentID      [16]byte
	ObjectKey      string // key of the log object in the bucket
	Format         string // storage format, one of Fetcher.Formats
	CustomMetadata []byte // opaque to everyone but the storage plug-in that wrote it; nil if none
	Size           int64  // plain bytes of the segment's log
	BaseOffset     int64  // first offset of the segment
	// LogGrant and ManifestGrant are signed URLs of the log object and of its manifest, from brokers that give such grants
	// (remote.fetch.grants); "" otherwise. They do not show in prints.
	LogGrant, ManifestGrant Grant
}

// Grant is a URL that carries the right to read what it names for some time. Its String does not tell it.
type Grant = directfetch.Grant

// Fetcher reads remote segments: the RemoteStorageFetcher of KIP-1254. It only reads, and knows no Kafka.
//
// Implementations must be safe for concurrent use and return when ctx ends. Errors should match one of the sentinels
// of this package, for the metrics; all of them, and panics, lead to a fallback.
type Fetcher interface {
	// FetchLogSegment streams the plain bytes [start, end) of the segment's log, decompressed and decrypted where the
	// format asks for it. The reader yields an error, or ends early, if there are fewer. Closing it must unblock a Read.
	// ctx covers the body too.
	FetchLogSegment(ctx context.Context, s Segment, start, end int64) (io.ReadCloser, error)
	// Formats lists the storage formats that can be read, e.g. "ApacheKafkaV1".
	Formats() []string
}

// Errors of a Fetcher.
var (
	ErrNotFound       = errors.New("remote segment not found")
	ErrExpired        = errors.New("the right to read the remote segment has expired")
	ErrAuth           = errors.New("access to the remote segment denied")
	ErrThrottled      = errors.New("throttled by the object store")
	ErrConnectTimeout = errors.New("object store did not answer in time")
	ErrReadTimeout    = errors.New("object store did not deliver in time")
	ErrShort          = errors.New("remote segment is shorter than promised")
	ErrUnknownFormat  = errors.New("unknown storage format")
	// ErrDamaged: stored bytes do not decode to what they should be.
	ErrDamaged = errors.New("remote segment is damaged")
)

// cause is why something fell back, a word for metrics and logs.
type cause string

const (
	causeNotFound cause = "not_found"
	causeAuth     cause = "auth"
	causeThrottle cause = "throttled"
	causeConnect  cause = "connect_timeout"
	causeRead     cause = "read_timeout"
	causeShort    cause = "short"
	causeFormat   cause = "unknown_format"
	causeDamaged  cause = "damaged"  // checksum, header or offsets of a batch
	causeLocation cause = "location" // what the broker said cannot be
	causeExpired  cause = "expired"
	causePanic    cause = "panic"
	causeTooLarge cause = "too_large"
	causeOther    cause = "other"
)

// causes lists all, so that every series exists from the start.
var causes = []cause{causeNotFound, causeAuth, causeThrottle, causeConnect, causeRead, causeShort, causeFormat, causeDamaged, causeLocation, causeExpired, causePanic, causeTooLarge, causeOther}

func causeOf(err error) cause {
	for _, x := range []struct {
		err error
		c   cause
	}{{ErrNotFound, causeNotFound}, {ErrAuth, causeAuth}, {ErrExpired, causeExpired}, {ErrThrottled, causeThrottle}, {ErrConnectTimeout, causeConnect}, {ErrReadTimeout, causeRead},
		{ErrShort, causeShort}, {ErrUnknownFormat, causeFormat}, {ErrDamaged, causeDamaged}, {errPanic, causePanic}, {errTooLarge, causeTooLarge},
		{io.ErrUnexpectedEOF, causeShort}, {io.EOF, causeShort}} {
		if errors.Is(err, x.err) {
			return x.c
		}
	}
	return causeOther
}

// ofObject says that the failure is that of one object, and says nothing about the store.
func (c cause) ofObject() bool {
	switch c {
	case causeNotFound, causeShort, causeFormat, causeDamaged, causeLocation, causeTooLarge, causeExpired:
		return true
	}
	return false
}

var (
	errPanic    = errors.New("panic in the fetcher")
	errTooLarge = errors.New("record batch larger than is read directly")
)
