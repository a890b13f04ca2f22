package server

import (
	"bufio"
	"encoding/binary"
	"io"
	"math/bits"
	"sync"
)

const (
	produceKey = 0
	// pooledMin is the size from which frames of Produce requests come from pools.
	pooledMin = 16 << 10
	// trusted is how much memory a frame gets on its word alone. Above, it gets growth times what has arrived.
	trusted = 1 << 20
	growth  = 8
)

// readFrame reads a frame of size bytes; the caller has checked size against the limit. Frames of Produce requests, which
// are large, many, and done with when Start returns, come from pools, to which release gives them back. A size that was
// announced and is not sent costs little memory.
func readFrame(in *bufio.Reader, size int) (frame []byte, release func(), err error) {
	take, give := func(n int) []byte { return make([]byte, n) }, func([]byte) {}
	if size >= pooledMin {
		if key, err := in.Peek(2); err == nil && binary.BigEndian.Uint16(key) == produceKey {
			take, give = takeBuffer, returnBuffer
		}
	}
	for room := min(size, trusted); ; room = min(size, growth*room) {
		next := take(room)
		had := copy(next, frame)
		if frame != nil {
			give(frame)
		}
		frame = next
		if _, err := io.ReadFull(in, frame[had:room]); err != nil {
			give(frame)
			return nil, nil, err
		}
		if frame = frame[:room]; room == size {
			return frame, func() { give(frame) }, nil
		}
	}
}

// pools hold buffers by power of two.
var pools [32]sync.Pool

// takeBuffer returns a buffer of n bytes, n > 0.
func takeBuffer(n int) []byte {
	class := bits.Len(uint(n - 1))
	if b, ok := pools[class].Get().(*[]byte); ok {
		return (*b)[:n]
	}
	return make([]byte, n, 1<<class)
}

func returnBuffer(b []byte) {
	b = b[:cap(b)]
	pools[bits.Len(uint(len(b)-1))].Put(&b)
}
