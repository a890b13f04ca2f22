package server

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/varve-io/varve/internal/peer"
	"github.com/varve-io/varve/internal/wire"
)

// conn is one connection: a reader, a writer, and the queue of started requests between them.
type conn struct {
	server  *Server
	peer    *wire.Peer
	nc      net.Conn
	queue   chan wire.Finish
	pending atomic.Int64
	drained atomic.Bool
	cancel  context.CancelFunc // ends what its requests wait for
}

func newConn(s *Server, p *wire.Peer, nc net.Conn, cancel context.CancelFunc) *conn {
	p.Local, p.Remote = nc.LocalAddr(), nc.RemoteAddr()
	return &conn{server: s, nc: nc, cancel: cancel, queue: make(chan wire.Finish, InFlightMax), peer: p}
}

// drain makes the reader stop at the next frame boundary.
func (c *conn) drain() {
	c.drained.Store(true)
	c.nc.SetReadDeadline(time.Unix(1, 0))
}

func (c *conn) abort() {
	c.drained.Store(true)
	c.cancel()
	c.nc.Close()
}

// run serves the connection until it ends and returns why, nil if that was ordinary.
func (c *conn) run(ctx context.Context) error {
	in := bufio.NewReaderSize(c.nc, 64<<10)
	if admitted, err := c.greet(ctx, in); !admitted {
		return err
	}
	written := make(chan error, 1)
	go func() {
		err := c.write(ctx)
		// The reader must not go on for a writer that is gone; and nobody will wait for what is still queued.
		c.cancel()
		c.nc.Close()
		for range c.queue {
			c.pending.Add(-1)
		}
		written <- err
	}()
	readErr := c.read(ctx, in)
	close(c.queue)
	if readErr != nil {
		// A peer that sends garbage gets no more answers.
		c.cancel()
		c.nc.Close()
	}
	writeErr := <-written
	if readErr != nil {
		return readErr
	}
	return writeErr
}

// greet finds out who is there. It returns false for a connection that is closed or belongs to another node.
func (c *conn) greet(ctx context.Context, in *bufio.Reader) (admitted bool, err error) {
	if c.peer.Node != wire.NoNode {
		return true, nil
	}
	head, err := c.peek(in)
	if head == nil {
		c.nc.Close()
		return false, err
	}
	if c.server.nodes != nil && string(head) == peer.Magic {
		c.nc.SetReadDeadline(time.Time{})
		c.server.nodes(c.peer.Listener, &replayed{c.nc, in})
		return false, nil
	}
	select {
	case <-c.server.ready:
		return true, nil
	case <-ctx.Done():
		c.nc.Close()
		return false, nil
	}
}

// replayed is a connection of which in has read ahead.
type replayed struct {
	net.Conn
	in *bufio.Reader
}

func (r *replayed) Read(p []byte) (int, error) { return r.in.Read(p) }

// NetConn is the connection itself, for what is written.
func (r *replayed) NetConn() net.Conn { return r.Conn }

// socket finds the socket under a connection, nil if it is none.
func socket(c net.Conn) *net.TCPConn {
	for c != nil {
		if tcp, ok := c.(*net.TCPConn); ok {
			return tcp
		}
		wrapped, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		c = wrapped.NetConn()
	}
	return nil
}

// read takes frames off the socket until the peer is done, and returns nil then.
func (c *conn) read(ctx context.Context, in *bufio.Reader) (err error) {
	defer func() {
		if p := recover(); p != nil {
			c.server.log.Error("panic while serving a request", "peer", c.nc.RemoteAddr().String(), "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("internal error: %v", p)
		}
	}()
	first := true
	for {
		size, err := c.nextSize(in, first)
		if err != nil || size < 0 {
			return err
		}
		first = false
		frame, release, err := readFrame(in, size)
		if err != nil {
			return c.ended(err)
		}
		finish, err := c.server.handler.Start(ctx, c.peer, frame)
		release()
		if err != nil {
			return err
		}
		if finish == nil {
			continue
		}
		c.pending.Add(1)
		select {
		case c.queue <- finish:
		case <-ctx.Done():
			return nil
		}
	}
}

// nextSize waits for the size of the next frame; -1 means that the peer is done.
func (c *conn) nextSize(in *bufio.Reader, first bool) (int, error) {
	head, err := c.peek(in)
	if head == nil {
		return -1, err
	}
	if first {
		if what := wire.Sniff(head); what != "" {
			return -1, fmt.Errorf("this is no Kafka client: it sent %s", what)
		}
	}
	size := int32(binary.BigEndian.Uint32(head))
	if size <= 0 || int(size) > c.server.limits.FrameMax {
		return -1, fmt.Errorf("%w of %d bytes, socket.request.max.bytes is %d", errFrame, size, c.server.limits.FrameMax)
	}
	in.Discard(4)
	return int(size), nil
}

// peek waits for the next four bytes; nil means that the peer is done.
func (c *conn) peek(in *bufio.Reader) ([]byte, error) {
	for {
		if !c.drained.Load() {
			c.nc.SetReadDeadline(time.Now().Add(c.server.limits.Idle))
			if c.drained.Load() { // just now, and the line above may have undone its deadline
				c.nc.SetReadDeadline(time.Unix(1, 0))
			}
		}
		head, err := in.Peek(4)
		if err == nil {
			return head, nil
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if c.pending.Load() > 0 && !c.drained.Load() {
				continue // not idle: it waits for an answer
			}
			return nil, nil
		}
		return nil, c.ended(err)
	}
}

// ended maps the ordinary ways in which connections end to nil.
func (c *conn) ended(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || c.drained.Load() || isReset(err) {
		return nil
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return nil // the peer went away in the middle of a frame: its loss
	}
	return err
}

// write finishes requests in order and writes their replies.
func (c *conn) write(ctx context.Context) (err error) {
	defer func() {
		if p := recover(); p != nil {
			c.server.log.Error("panic while serving a request", "peer", c.nc.RemoteAddr().String(), "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("internal error: %v", p)
		}
	}()
	out := &outbox{c: c}
	defer out.flush() // also what was answered before a panic
	for finish := range c.queue {
		reply := finish(ctx)
		err := out.send(reply, len(c.queue) > 0)
		if reply.Release != nil {
			reply.Release()
		}
		c.pending.Add(-1)
		if err != nil {
			return c.ended(err)
		}
		if reply.Close {
			if reply.Reason == "" {
				return nil
			}
			return errors.New(reply.Reason)
		}
	}
	return c.ended(out.flush())
}
