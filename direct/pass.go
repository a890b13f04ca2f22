package direct

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"net"
	"slices"
	"time"
)

const (
	// passSlice is how much is passed on between two looks at the clock.
	passSlice = 1 << 20
	// passCopy is up to where bytes go through memory: below, a splice is more system calls than it saves.
	passCopy = 16 << 10
	// wholeFetch is up to which size answers to Fetch are read before they are passed on, so that they can be rewritten.
	wholeFetch = 64 << 10
)

// patience sets a deadline of the stall that is allowed from now on.
func (c *conn) patience(deadline func(time.Time) error) {
	if c.hooks.Stall > 0 {
		_ = deadline(time.Now().Add(c.hooks.Stall))
	}
}

// source reads from a connection, and within a frame bounds the time of each read.
type source struct {
	conn   net.Conn
	stall  time.Duration
	within bool
}

func (s *source) Read(p []byte) (int, error) {
	if s.within && s.stall > 0 {
		s.conn.SetReadDeadline(time.Now().Add(s.stall))
	}
	return s.conn.Read(p)
}

// between says that a frame is over; the next may take as long as it likes to come.
func (s *source) between() {
	if s.within && s.stall > 0 {
		s.conn.SetReadDeadline(time.Time{})
	}
	s.within = false
}

// pass copies the next n bytes of in, which reads from src, to dst. What in does not hold yet goes from socket to socket,
// where both are (net.TCPConn.ReadFrom splices).
func (c *conn) pass(dst net.Conn, in *bufio.Reader, src net.Conn, n int) error {
	for n > 0 {
		if have := in.Buffered(); have > 0 || n <= passCopy {
			b, err := in.Peek(min(n, max(have, 1)))
			if err != nil {
				return torn(err)
			}
			c.patience(dst.SetWriteDeadline)
			if _, err := dst.Write(b); err != nil {
				return err
			}
			n -= len(b)
			in.Discard(len(b))
			continue
		}
		slice := int64(min(n, passSlice))
		c.patience(src.SetReadDeadline)
		c.patience(dst.SetWriteDeadline)
		if _, err := io.CopyN(dst, src, slice); err != nil {
			return torn(err)
		}
		n -= int(slice)
	}
	return nil
}

// passFetch passes an answer to Fetch v12 to v18 of size bytes on as it comes, up to its tagged fields. Since its size goes out first, the
// endpoints among them cannot be rewritten any more: their tag becomes one that nobody knows, and so they are skipped.
func (c *conn) passFetch(in *bufio.Reader, size int, version int16) error {
	w := &walker{c: c, in: in, left: size}
	w.copy(4 + 4) // size, correlation id
	w.tags(false)
	w.copy(4 + 2 + 4) // throttle, error, session
	topics := w.length()
	for range topics {
		if version >= 13 {
			w.copy(16) // id
		} else {
			w.copy(w.length()) // name
		}
		partitions := w.length()
		for range partitions {
			w.copy(4 + 2 + 8 + 8 + 8)
			aborted := w.length()
			for range aborted {
				w.copy(8 + 8)
				if w.tags(false); w.err != nil {
					return w.err
				}
			}
			w.copy(4)
			w.copy(w.length()) // records
			w.tags(false)
			if w.err != nil {
				return w.err
			}
		}
		if w.tags(false); w.err != nil {
			return w.err
		}
	}
	w.tags(true)
	if w.err == nil && w.left > 0 {
		w.err = fmt.Errorf("%w: Fetch response v%d with %d bytes left over", errFrame, version, w.left)
	}
	w.flush()
	return w.err
}

// walker passes a message on field by field. Small fields are gathered. After an error it does nothing.
type walker struct {
	c    *conn
	in   *bufio.Reader
	left int // bytes of the message
	out  []byte
	err  error
}

// hiddenTag is a tag of one byte that no version of Fetch uses.
const hiddenTag = 0x7f

func (w *walker) take(n int) bool {
	if w.err == nil && (n < 0 || n > w.left) {
		w.err = fmt.Errorf("%w: field of %d bytes where %d are left", errFrame, n, w.left)
	}
	if w.err != nil {
		return false
	}
	w.left -= n
	return true
}

// copy passes n bytes on.
func (w *walker) copy(n int) {
	if !w.take(n) || n == 0 {
		return
	}
	if n > passCopy {
		if w.flush(); w.err == nil {
			w.err = w.c.pass(w.c.down, w.in, w.c.up, n)
		}
		return
	}
	if len(w.out)+n > 2*passCopy {
		w.flush()
	}
	if w.err != nil {
		return
	}
	at := len(w.out)
	w.out = slices.Grow(w.out, n)[:at+n]
	if _, err := io.ReadFull(w.in, w.out[at:]); err != nil {
		w.err = torn(err)
	}
}

func (w *walker) flush() {
	if w.err != nil || len(w.out) == 0 {
		return
	}
	w.c.patience(w.c.down.SetWriteDeadline)
	_, w.err = w.c.down.Write(w.out)
	w.out = w.out[:0]
}

// uvarint passes a number on and returns it, at most 2^31-1.
func (w *walker) uvarint() int {
	u := uint64(0)
	for shift := 0; shift < 7*binary.MaxVarintLen32; shift += 7 {
		if w.copy(1); w.err != nil {
			return 0
		}
		b := w.out[len(w.out)-1]
		if u |= uint64(b&0x7f) << shift; b < 0x80 && u <= math.MaxInt32 {
			return int(u)
		}
	}
	w.err = fmt.Errorf("%w: a length", errFrame)
	return 0
}

// length passes that of an array or of bytes on; 0 for null. Every element has a byte at least.
func (w *walker) length() int {
	n := max(w.uvarint()-1, 0)
	if n > w.left && w.err == nil {
		w.err = fmt.Errorf("%w: length %d where %d bytes are left", errFrame, n, w.left)
	}
	if w.err != nil {
		return 0
	}
	return n
}

// tags passes a section of tagged fields on; hide gives tag 0 another number.
func (w *walker) tags(hide bool) {
	for n := w.uvarint(); n > 0 && w.err == nil; n-- {
		tag := w.uvarint()
		if hide && tag == 0 && w.err == nil {
			w.out[len(w.out)-1] = hiddenTag
		}
		w.copy(w.uvarint())
	}
}
