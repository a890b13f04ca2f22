// Package remoteformat reads and writes remote segments as Aiven's KIP-405 plugin does, so that a JVM cluster can
// read our bucket and we can read theirs. A segment is three objects: .log (chunks, maybe compressed and encrypted),
// .indexes, and .rsm-manifest, a JSON document that is written last and commits the other two.
//
// Nothing here does I/O or keeps global state. Values are immutable once made and may be used concurrently. Parsers
// take hostile bytes: they check bounds, do not panic, and allocate no more than a small multiple of what they are given
// or of a limit stated here.
package remoteformat

import "errors"

// Errors that others wrap.
var (
	// ErrManifest: the manifest is not one of ours or contradicts itself.
	ErrManifest = errors.New("malformed manifest")
	// ErrKey: an object key is not of this layout.
	ErrKey = errors.New("not a remote segment key")
	// ErrChunk: stored bytes do not decode to what the manifest promises: damaged, or another key.
	ErrChunk = errors.New("stored bytes do not match the manifest")
	// ErrNoKey: the data key is wrapped by a key pair that is not in the keyring.
	ErrNoKey = errors.New("encryption key not in the keyring")
	// ErrCustomMetadata: custom metadata is not a block of tagged fields.
	ErrCustomMetadata = errors.New("malformed custom metadata")
)

// Limits on what is read.
const (
	MaxManifestSize = 16 << 20 // bytes; the chunk index alone may have 10 MiB before compression
	maxChunkBin     = 10 << 20
	// MaxChunkSize bounds the plain bytes of one chunk, which are held in memory as a whole.
	MaxChunkSize = 1 << 30
	// DefaultChunkSize is the plugin's recommendation.
	DefaultChunkSize = 4 << 20
)
