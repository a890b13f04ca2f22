package direct

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
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

// readFrame reads a frame, whose size is least to limit bytes, and returns it with the four bytes of its size. The buffer
// grows with what arrives above a first megabyte, so that a size alone takes no memory.
func readFrame(r io.Reader, least, limit int) ([]byte, error) {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	n := int(int32(binary.BigEndian.Uint32(size[:])))
	if n < least || n > limit {
		return nil, fmt.Errorf("%w: %d bytes, allowed are %d to %d", errFrame, n, least, limit)
	}
	n += len(size)
	frame := append(make([]byte, 0, min(n, 1<<20)), size[:]...)
	for len(frame) < n {
		have := len(frame)
		frame = slices.Grow(frame, min(n-have, max(have, 1<<20)))
		frame = frame[:min(n, cap(frame))]
		if _, err := io.ReadFull(r, frame[have:]); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
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

// silent reports whether a request gets no answer: Produce with acks=0.
func silent(h head, frame []byte) bool {
	if h.key != keyProduce {
		return false
	}
	_, body, err := wire.ParseHeader(frame, func(_, version int16) bool { return version >= 9 })
	if err != nil {
		return false
	}
	if h.version >= 3 { // the transactional id comes first
		n := 0
		if h.version >= 9 {
			u, used := binary.Uvarint(body)
			if used <= 0 || u > uint64(len(body)) {
				return false
			}
			body, n = body[used:], int(u)-1
		} else {
			if len(body) < 2 {
				return false
			}
			body, n = body[2:], int(int16(binary.BigEndian.Uint16(body)))
		}
		if n > len(body) {
			return false
		}
		body = body[max(n, 0):]
	}
	return len(body) >= 2 && binary.BigEndian.Uint16(body) == 0
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
	body, err := skipTags(frame[4:])
	if err != nil {
		return nil, err
	}
	resp := kmsg.NewPtrFetchResponse()
	resp.Version = version
	if err := resp.ReadFrom(body); err != nil {
		return nil, fmt.Errorf("%w: Fetch response v%d: %w", errFrame, version, err)
	}
	return resp, nil
}

// skipTags skips the tagged fields of a header.
func skipTags(b []byte) ([]byte, error) {
	count, n := binary.Uvarint(b)
	if n <= 0 {
		return nil, fmt.Errorf("%w: tagged fields", errFrame)
	}
	b = b[n:]
	for ; count > 0; count-- {
		if _, n = binary.Uvarint(b); n <= 0 {
			return nil, fmt.Errorf("%w: tagged fields", errFrame)
		}
		b = b[n:]
		size, n := binary.Uvarint(b)
		if n <= 0 || size > uint64(len(b)-n) {
			return nil, fmt.Errorf("%w: tagged fields", errFrame)
		}
		b = b[n+int(size):]
	}
	return b, nil
}
