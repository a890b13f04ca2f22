// Package wire is the frame around Kafka's messages: sizes, request and response headers, and replies whose records come
// straight from files. Message bodies are kmsg's. It is pure and knows no connection.
package wire

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// ErrMalformed is any frame whose header or body does not parse. The connection cannot be trusted any more and is closed.
var ErrMalformed = errors.New("malformed request")

// Header is a request header, v1 or v2 (KIP-482).
type Header struct {
	Key         int16
	Version     int16
	Correlation int32
	ClientID    string // "" if null
}

// Name is the API's name, for log lines and metrics.
func (h Header) Name() string { return kmsg.NameForKey(h.Key) }

// ParseHeader reads the header of a frame without its size and returns the body behind it. flexible says, for a key and
// version, whether the header is a v2 with tagged fields.
func ParseHeader(frame []byte, flexible func(key, version int16) bool) (Header, []byte, error) {
	var h Header
	if len(frame) < 8 {
		return h, nil, fmt.Errorf("%w: header of %d bytes", ErrMalformed, len(frame))
	}
	h.Key = int16(binary.BigEndian.Uint16(frame))
	h.Version = int16(binary.BigEndian.Uint16(frame[2:]))
	h.Correlation = int32(binary.BigEndian.Uint32(frame[4:]))
	rest := frame[8:]
	if len(rest) < 2 {
		return h, nil, fmt.Errorf("%w: no client id", ErrMalformed)
	}
	n := int(int16(binary.BigEndian.Uint16(rest)))
	rest = rest[2:]
	if n > len(rest) || n < -1 {
		return h, nil, fmt.Errorf("%w: client id of %d bytes", ErrMalformed, n)
	}
	if n > 0 {
		h.ClientID = string(rest[:n])
		rest = rest[n:]
	}
	if !flexible(h.Key, h.Version) {
		return h, rest, nil
	}
	n, err := Tags(rest)
	return h, rest[n:], err
}

var errHeaderTags = fmt.Errorf("%w: tagged fields of the header", ErrMalformed)

// Tags returns how many bytes the tagged fields at the start of b take.
func Tags(b []byte) (int, error) {
	count, at := binary.Uvarint(b)
	if at <= 0 {
		return 0, errHeaderTags
	}
	for ; count > 0; count-- {
		_, n := binary.Uvarint(b[at:])
		if n <= 0 {
			return 0, errHeaderTags
		}
		at += n
		size, n := binary.Uvarint(b[at:])
		if n <= 0 || size > uint64(len(b)-at-n) {
			return 0, errHeaderTags
		}
		at += n + int(size)
	}
	return at, nil
}

// AppendRequest frames a request.
func AppendRequest(dst []byte, correlation int32, clientID string, r kmsg.Request) []byte {
	start := len(dst)
	dst = append(dst, 0, 0, 0, 0)
	dst = binary.BigEndian.AppendUint16(dst, uint16(r.Key()))
	dst = binary.BigEndian.AppendUint16(dst, uint16(r.GetVersion()))
	dst = binary.BigEndian.AppendUint32(dst, uint32(correlation))
	dst = binary.BigEndian.AppendUint16(dst, uint16(len(clientID)))
	dst = append(dst, clientID...)
	if r.IsFlexible() {
		dst = append(dst, 0)
	}
	dst = r.AppendTo(dst)
	binary.BigEndian.PutUint32(dst[start:], uint32(len(dst)-start-4))
	return dst
}

const apiVersions = 18

// AppendResponse frames a response. ApiVersions always has a v0 header, so that a client which does not know the broker
// can read it (KIP-511).
func AppendResponse(dst []byte, correlation int32, r kmsg.Response) []byte {
	start := len(dst)
	dst = AppendResponseHeader(append(dst, 0, 0, 0, 0), correlation, r)
	dst = r.AppendTo(dst)
	binary.BigEndian.PutUint32(dst[start:], uint32(len(dst)-start-4))
	return dst
}

// AppendResponseHeader appends what stands between the size and the body.
func AppendResponseHeader(dst []byte, correlation int32, r kmsg.Response) []byte {
	dst = binary.BigEndian.AppendUint32(dst, uint32(correlation))
	if r.IsFlexible() && r.Key() != apiVersions {
		dst = append(dst, 0)
	}
	return dst
}

// File is what a reply's bytes may come from beside memory.
type File interface {
	ReadAt(p []byte, off int64) (int, error)
}

// Chunk is a piece of a reply: Bytes, or Len bytes of File at Pos.
type Chunk struct {
	Bytes []byte
	File  File
	Pos   int64
	Len   int64
}

// Reply is one framed response, in pieces. The zero Reply answers nothing (Produce with acks=0).
type Reply struct {
	Chunks  []Chunk
	Release func() // called once after the pieces were written or given up; may be nil
	Close   bool   // close the connection after writing
	Reason  string // why, for the log line
}

// Message is a reply of one framed response.
func Message(correlation int32, r kmsg.Response) Reply {
	return Reply{Chunks: []Chunk{{Bytes: AppendResponse(nil, correlation, r)}}}
}

// Hangup closes the connection without an answer.
func Hangup(reason string) Reply { return Reply{Close: true, Reason: reason} }

// Size is the number of bytes of the reply.
func (r Reply) Size() int64 {
	var n int64
	for _, c := range r.Chunks {
		n += int64(len(c.Bytes)) + c.Len
	}
	return n
}

// Finish completes a request that has been started. It may wait until ctx ends.
type Finish func(ctx context.Context) Reply

// Peer is the other end of a connection.
type Peer struct {
	Listener      string // name of the listener, PLAINTEXT
	Node          int32  // id of the node that it has proved to be, NoNode for a client
	Local, Remote net.Addr

	muted atomic.Int64 // see MutedUntil
}

// MuteUntil has further requests of the connection wait, if they do not wait longer already (KIP-219). Safe for concurrent use, as MutedUntil is.
func (p *Peer) MuteUntil(t time.Time) {
	for {
		now := p.muted.Load()
		if t.UnixNano() <= now || p.muted.CompareAndSwap(now, t.UnixNano()) {
			return
		}
	}
}

// MutedUntil is until when requests wait.
func (p *Peer) MutedUntil() time.Time { return time.Unix(0, p.muted.Load()) }

// NoNode is the Node of a client.
const NoNode int32 = -1

// Host is the peer's address without its port, as Kafka shows it in group members: "/127.0.0.1".
func (p *Peer) Host() string {
	host, _, err := net.SplitHostPort(p.Remote.String())
	if err != nil {
		return "/" + p.Remote.String()
	}
	return "/" + host
}
