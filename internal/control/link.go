package control

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

const (
	writeTimeout = 5 * time.Second
	movedPace    = 100 * time.Millisecond // between looks whether another node leads by now
	// silenceMax is how long a task waits on a connection by which nothing comes before its end makes the next one connect anew.
	// What is written into a network that is down for minutes may come through only minutes after it is up again.
	silenceMax = 2 * time.Second
)

// link is a connection to a node that may lead. Tasks share it.
type link struct {
	nc   net.Conn
	done chan struct{} // closed when nothing is read from it any more, after err is set
	err  error

	heard   atomic.Int64 // when something was read, in ns since 1970
	writing sync.Mutex
	mu      sync.Mutex
	next    uint64
	waiting map[uint64]chan response
}

// link returns the connection to an address, a new one if there is none that works.
func (c *Client) link(ctx context.Context, address string) (*link, error) {
	c.mu.Lock()
	l := c.links[address]
	c.mu.Unlock()
	if l != nil {
		select {
		case <-l.done:
		default:
			return l, nil
		}
	}
	nc, _, err := c.o.Hub.Dial(ctx, address, -1, service)
	if err != nil {
		return nil, err
	}
	fresh := &link{nc: nc, done: make(chan struct{}), waiting: map[uint64]chan response{}}
	go fresh.read()
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := c.links[address]; c.over || now != l && now != nil {
		// Another task was faster; or there are to be no more.
		fresh.close()
		if c.over {
			return nil, net.ErrClosed
		}
		return now, nil
	}
	c.links[address] = fresh
	return fresh, nil
}

// hangUp closes all links, saying so, and waits for their readers.
func (c *Client) hangUp() {
	c.mu.Lock()
	c.over = true
	links := c.links
	c.links = map[string]*link{}
	c.mu.Unlock()
	for _, l := range links {
		l.close()
	}
	for _, l := range links {
		<-l.done
	}
}

// close says goodbye, so that the other side does not take the end for a failure.
func (l *link) close() {
	if b, err := frame(request{Act: actGoodbye}); err == nil {
		l.writing.Lock()
		l.nc.SetWriteDeadline(time.Now().Add(writeTimeout / 5))
		_, _ = l.nc.Write(b)
		l.writing.Unlock()
	}
	l.nc.Close()
}

func (l *link) read() {
	in := bufio.NewReader(l.nc)
	for {
		var r response
		if err := readFrame(in, &r); err != nil {
			l.err = fmt.Errorf("control connection to %s: %w", l.nc.RemoteAddr(), err)
			l.nc.Close()
			close(l.done)
			return
		}
		l.heard.Store(time.Now().UnixNano())
		l.mu.Lock()
		w := l.waiting[r.ID]
		delete(l.waiting, r.ID)
		l.mu.Unlock()
		if w != nil {
			w <- r
		}
	}
}

// call sends a task and waits for its answer; moved tells that it will not be worth waiting for.
func (l *link) call(ctx context.Context, t task, moved func() bool) (answer, error) {
	r, err := encodeTask(t)
	if err != nil {
		return answer{}, err
	}
	if deadline, ok := ctx.Deadline(); ok {
		r.Millis = max(1, time.Until(deadline).Milliseconds())
	}
	w := make(chan response, 1)
	l.mu.Lock()
	l.next++
	r.ID = l.next
	l.waiting[r.ID] = w
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		delete(l.waiting, r.ID)
		l.mu.Unlock()
	}()
	b, err := frame(r)
	if err != nil {
		return answer{}, err
	}
	sent := time.Now()
	if err := l.write(b); err != nil {
		return answer{}, lost{err}
	}
	look := time.NewTicker(movedPace)
	defer look.Stop()
	for {
		select {
		case r := <-w:
			return decodeAnswer(t, r)
		case <-l.done:
			select {
			case r := <-w: // it came just before the end
				return decodeAnswer(t, r)
			default:
			}
			return answer{}, lost{l.err}
		case <-look.C:
			if moved() {
				return answer{}, lost{errors.New("another node is the active controller by now")}
			}
		case <-ctx.Done():
			if time.Since(sent) >= silenceMax && l.heard.Load() < sent.UnixNano() {
				l.close()
			}
			return answer{}, lost{fmt.Errorf("no answer from %s: %w", l.nc.RemoteAddr(), ctx.Err())}
		}
	}
}

func (l *link) write(b []byte) error {
	l.writing.Lock()
	defer l.writing.Unlock()
	l.nc.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, err := l.nc.Write(b)
	if err != nil {
		l.nc.Close() // half a frame may be on its way
	}
	return err
}
