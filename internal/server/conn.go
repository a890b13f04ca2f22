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

func newConn(s *Server, listener string, nc net.Conn, cancel context.CancelFunc) *conn {
	return &conn{server: s, nc: nc, cancel: cancel, queue: make(chan wire.Finish, InFlightMax),
		peer: &wire.Peer{Listener: listener, Local: nc.LocalAddr(), Remote: nc.RemoteAddr()}}
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
	readErr := c.read(ctx)
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

// read takes frames off the socket until the peer is done, and returns nil then.
func (c *conn) read(ctx context.Context) (err error) {
	defer func() {
		if p := recover(); p != nil {
			c.server.log.Error("panic while serving a request", "peer", c.nc.RemoteAddr().String(), "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("internal error: %v", p)
		}
	}()
	in := bufio.NewReaderSize(c.nc, 64<<10)
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
	for {
		if !c.drained.Load() {
			c.nc.SetReadDeadline(time.Now().Add(c.server.limits.Idle))
			if c.drained.Load() { // just now, and the line above may have undone its deadline
				c.nc.SetReadDeadline(time.Unix(1, 0))
			}
		}
		head, err := in.Peek(4)
		if err == nil {
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
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if c.pending.Load() > 0 && !c.drained.Load() {
				continue // not idle: it waits for an answer
			}
			return -1, nil
		}
		return -1, c.ended(err)
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
	for finish := range c.queue {
		reply := finish(ctx)
		err := c.send(reply)
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
	return nil
}
