package direct

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/wire"
)

// Keys of the requests that are looked into.
const (
	keyProduce       = 0
	keyFetch         = 1
	keySaslHandshake = 17
)

var errFrame = errors.New("direct: malformed frame")

// torn is what reading failed with in the middle of a frame.
func torn(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// frameSize looks at the next frame, whose size is least to limit bytes, and returns it with the four bytes of its size.
func frameSize(in *bufio.Reader, least, limit int) (int, error) {
	size, err := in.Peek(4)
	if err != nil {
		if len(size) > 0 {
			err = torn(err)
		}
		return 0, err
	}
	n := int(int32(binary.BigEndian.Uint32(size)))
	if n < least || n > limit {
		return 0, fmt.Errorf("%w: %d bytes, allowed are %d to %d", errFrame, n, least, limit)
	}
	return 4 + n, nil
}

const (
	// trustClient and trustBroker are how much memory a frame gets on its word alone.
	trustClient = 64 << 10
	trustBroker = 4 << 20
)

// readFrame reads a frame and returns it with the four bytes of its size. Above trust its memory grows with what arrives.
func readFrame(in *bufio.Reader, least, limit, trust int) ([]byte, error) {
	n, err := frameSize(in, least, limit)
	if err != nil {
		return nil, err
	}
	frame := make([]byte, 0, min(n, trust))
	for len(frame) < n {
		have := len(frame)
		frame = slices.Grow(frame, min(n-have, max(have, trust)))
		frame = frame[:min(n, cap(frame))]
		if _, err := io.ReadFull(in, frame[have:]); err != nil {
			return nil, torn(err)
		}
	}
	return frame, nil
}

// head is the start of a request's header.
type head struct {
	key, version int16
	correlation  int32
}

// parseHead needs at least 8 bytes behind the size.
func parseHead(frame []byte) head {
	return head{int16(binary.BigEndian.Uint16(frame)), int16(binary.BigEndian.Uint16(frame[2:])), int32(binary.BigEndian.Uint32(frame[4:]))}
}

// silent reports whether a request gets no answer: Produce with acks=0. frame may be cut; sure says that it holds enough to
// tell, or that the request is malformed.
func silent(h head, frame []byte) (quiet, sure bool) {
	_, body, err := wire.ParseHeader(frame, func(_, version int16) bool { return version >= 9 })
	if err != nil {
		return false, false
	}
	if h.version >= 3 { // the transactional id comes first
		n := 0
		if h.version >= 9 {
			u, used := binary.Uvarint(body)
			if used <= 0 || u > math.MaxInt32 {
				return false, used < 0 || u > math.MaxInt32
			}
			body, n = body[used:], int(u)-1
		} else {
			if len(body) < 2 {
				return false, false
			}
			n = int(int16(binary.BigEndian.Uint16(body)))
			body = body[2:]
		}
		if n > len(body) {
			return false, false
		}
		body = body[max(n, 0):]
	}
	return len(body) >= 2 && binary.BigEndian.Uint16(body) == 0, len(body) >= 2
}

// rounds tells of a SaslHandshake of version 0 how many tokens the client sends: those of its mechanism (RFC 4616, 5802, 7628),
// each with one answer. 0 is unknown.
func rounds(frame []byte) (mechanism string, tokens int) {
	_, body, err := wire.ParseHeader(frame, func(_, _ int16) bool { return false })
	req := kmsg.NewPtrSASLHandshakeRequest()
	if err != nil || req.ReadFrom(body) != nil {
		return "", 0
	}
	switch req.Mechanism {
	case "PLAIN", "OAUTHBEARER":
		tokens = 1
	case "SCRAM-SHA-256", "SCRAM-SHA-512":
		tokens = 2
	}
	return req.Mechanism, tokens
}

// parseFetch decodes a client's Fetch of version 4 or later. Unknown tags share the frame's memory.
func parseFetch(frame []byte) (wire.Header, *kmsg.FetchRequest, error) {
	h, body, err := wire.ParseHeader(frame, func(_, version int16) bool { return version >= 12 })
	if err != nil {
		return h, nil, err
	}
	req := kmsg.NewPtrFetchRequest()
	req.Version = h.Version
	if err := req.ReadFrom(body); err != nil {
		return h, nil, fmt.Errorf("%w: Fetch v%d: %w", errFrame, h.Version, err)
	}
	return h, req, nil
}

// parseFetchResponse decodes a broker's answer of version 12 or later. The records are those of the frame.
func parseFetchResponse(frame []byte, version int16) (*kmsg.FetchResponse, error) {
	if len(frame) < 5 {
		return nil, fmt.Errorf("%w: Fetch response of %d bytes", errFrame, len(frame))
	}
	tags, err := wire.Tags(frame[4:])
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errFrame, err)
	}
	resp := kmsg.NewPtrFetchResponse()
	resp.Version = version
	if err := resp.ReadFrom(frame[4+tags:]); err != nil {
		return nil, fmt.Errorf("%w: Fetch response v%d: %w", errFrame, version, err)
	}
	return resp, nil
}
