package server

import (
	"net"
	"sync"
	"time"

	"github.com/varve-io/varve/internal/wire"
)

const (
	// gatherFor is how long an answer waits at most for those behind it.
	gatherFor = 200 * time.Microsecond
	// gatherMax is how many bytes of answers are written at once at most.
	gatherMax = 16 << 10
)

// outbox writes a connection's answers. To a peer that sends requests without waiting it writes small answers together: each write
// costs more than most requests do. None waits for a request that takes its time. send is for one caller at a time.
type outbox struct {
	c     *conn
	timer *time.Timer // flushes what is gathered; nil before the first time

	mu  sync.Mutex
	buf []byte // gathered answers
	err error  // of the first write that failed
}

// send writes an answer, or with more lets it wait for those of the requests that are there already.
func (o *outbox) send(r wire.Reply, more bool) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err != nil {
		return o.err
	}
	if len(o.buf) == 0 && !more || !gathers(r) {
		return o.writeLocked(r)
	}
	first := len(o.buf) == 0
	for _, chunk := range r.Chunks {
		o.buf = append(o.buf, chunk.Bytes...)
	}
	switch {
	case !more || len(o.buf) >= gatherMax:
		return o.writeLocked(wire.Reply{})
	case !first:
	case o.timer == nil:
		o.timer = time.AfterFunc(gatherFor, func() { _ = o.flush() }) // an error waits for the next answer
	default:
		o.timer.Reset(gatherFor)
	}
	return nil
}

// gathers says whether a reply is small and in memory, and nobody waits for the end of its writing.
func gathers(r wire.Reply) bool {
	n := 0
	for _, chunk := range r.Chunks {
		if chunk.File != nil {
			return false
		}
		n += len(chunk.Bytes)
	}
	return n < gatherMax && r.Release == nil && !r.Close
}

// writeLocked writes what is gathered and a reply.
func (o *outbox) writeLocked(r wire.Reply) error {
	if o.timer != nil {
		o.timer.Stop()
	}
	var before net.Buffers
	if len(o.buf) > 0 {
		before = net.Buffers{o.buf}
	}
	o.err = o.c.send(before, r)
	if o.buf = o.buf[:0]; cap(o.buf) > gatherMax {
		o.buf = nil
	}
	return o.err
}

// flush writes what is gathered, unless a write has failed.
func (o *outbox) flush() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err != nil {
		return o.err
	}
	return o.writeLocked(wire.Reply{})
}
