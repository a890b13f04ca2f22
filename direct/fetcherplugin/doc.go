// Package fetcherplugin runs a direct.Fetcher as a process of its own, so that a private store needs no rebuild of the programs that
// read from it (remote.storage.fetcher.class.path of KIP-1254). The executable calls Serve; the program that reads calls New, or
// registers Open for direct.ParseProperties:
//
//	fetchers := objectstore.Registry(objectstore.Options{})
//	fetchers[direct.FromPath] = fetcherplugin.Open
//	config, err := direct.ParseProperties(properties, fetchers)
//
// Both ends speak hashicorp/go-plugin's net/rpc over a Unix socket; bytes of segments go over streams of their own beside the calls. The
// executable is trusted with the properties and with whatever it reads, not with being right: batches are checked by the
// transport as those of any Fetcher, and a process that hangs, lies or dies costs a fallback and is started again.
package fetcherplugin

import (
	"errors"

	"github.com/hashicorp/go-plugin"

	"github.com/varve-io/varve/direct"
)

// handshake tells an executable that it was started as a plug-in, of this protocol.
var handshake = plugin.HandshakeConfig{ProtocolVersion: 1, MagicCookieKey: "VARVE_FETCHER_PLUGIN", MagicCookieValue: "remote-storage-fetcher"}

// name is the only plug-in of an executable.
const name = "fetcher"

// maxText bounds an error's text from the other side, in bytes.
const maxText = 4 << 10

// FetchArgs asks for a range. Call names it for Cancel.
type FetchArgs struct {
	Call       uint64
	Segment    segment
	Start, End int64
}

// segment is direct.Segment as it travels; gob has no use for String methods and aliases.
type segment struct {
	SegmentID               [16]byte
	ObjectKey, Format       string
	CustomMetadata          []byte
	Size, BaseOffset        int64
	LogGrant, ManifestGrant string
}

// FetchReply names the stream that brings the bytes, or says why there is none.
type FetchReply struct {
	Stream uint32
	Failed failure
}

// failure is an error as it travels: Kind is one of kinds, "" for none of them. No Text is no error.
type failure struct{ Kind, Text string }

// kinds are the sentinels that keep their meaning.
var kinds = map[string]error{"not_found": direct.ErrNotFound, "expired": direct.ErrExpired, "auth": direct.ErrAuth, "throttled": direct.ErrThrottled,
	"connect": direct.ErrConnectTimeout, "read": direct.ErrReadTimeout, "short": direct.ErrShort, "format": direct.ErrUnknownFormat, "damaged": direct.ErrDamaged}

func failureOf(err error) failure {
	if err == nil {
		return failure{}
	}
	f := failure{Text: err.Error()}
	if f.Text == "" {
		f.Text = "error without a text"
	}
	f.Text = f.Text[:min(len(f.Text), maxText)]
	for kind, sentinel := range kinds {
		if errors.Is(err, sentinel) {
			f.Kind = kind
		}
	}
	return f
}

// remoteError is a failure of the plug-in.
type remoteError struct {
	sentinel error // nil for none
	text     string
}

func (e *remoteError) Error() string { return "fetcher plug-in: " + e.text }
func (e *remoteError) Unwrap() error { return e.sentinel }

func (f failure) err() error {
	if f.Text == "" {
		return nil
	}
	return &remoteError{kinds[f.Kind], f.Text[:min(len(f.Text), maxText)]}
}
