package direct

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/directfetch"
	"github.com/varve-io/varve/internal/wire"
)

// maxInFlight bounds the requests of a connection that wait for answers; a client that sends more waits.
const maxInFlight = 128

// errBroken is a connection that ended while an answer was due.
var errBroken = errors.New("direct: connection ended")

// reply is what is written to the client. The zero reply ends the connection.
type reply struct {
	parts   [][]byte
	release func() // after writing or giving up; may be nil
}

// entry is a client's request; answers go out in the order of requests.
type entry struct {
	ch  chan reply // one value
	raw chan struct{}
}

// pending is an answer that the broker owes.
type pending struct {
	correlation int32
	ch          chan reply
	raw         chan struct{} // closed when the answer was written, where raw tokens follow it
}

// conn is one client's connection. Three goroutines: one reads requests, one reads the broker's answers, one writes
// answers; and one for each Fetch that waits.
type conn struct {
	t       *Transport
	up      net.Conn
	down    net.Conn
	address string
	ctx     context.Context
	cancel  context.CancelFunc
	jobs    sync.WaitGroup

	sendMu      sync.Mutex // orders writes to the broker and owed
	owed        chan pending
	correlation int32

	answers chan *entry
	current *entry        // what the writer is at
	upDone  chan struct{} // closed when no more answers come from the broker

	// Only the reader of requests uses these.
	probed   bool
	direct   bool // the broker gives locations
	locates  bool // the Locator does, in its place
	fetchMax int16
}

func newConn(t *Transport, up, down net.Conn, address string) *conn {
	c := &conn{t: t, up: up, down: down, address: address, owed: make(chan pending, maxInFlight), answers: make(chan *entry, maxInFlight),
		upDone: make(chan struct{})}
	c.ctx, c.cancel = context.WithCancel(t.ctx)
	return c
}

// shutdown ends everything at once.
func (c *conn) shutdown() {
	c.cancel()
	c.up.Close()
	c.down.Close()
}

func (c *conn) run() {
	var wg sync.WaitGroup
	wg.Go(func() {
		c.answersFromBroker()
		close(c.upDone)
	})
	wg.Go(func() {
		c.writeAnswers()
		c.shutdown()
	})
	err := c.requests()
	if err != nil && c.ctx.Err() == nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrClosedPipe) {
		c.t.cfg.Logger.Debug("connection ends", "broker", c.address, "cause", err)
	}
	c.shutdown()
	wg.Wait()
	c.jobs.Wait()
	c.discard()
}

// discard releases the answers that were not written. Nothing else runs any more.
func (c *conn) discard() {
	close(c.answers)
	left := []*entry{c.current}
	for e := range c.answers {
		left = append(left, e)
	}
	for _, e := range left {
		if e == nil || len(e.ch) == 0 {
			continue
		}
		if r := <-e.ch; r.release != nil {
			r.release()
		}
	}
}

// requests reads what the client sends.
func (c *conn) requests() error {
	in := bufio.NewReaderSize(c.down, 32<<10)
	for {
		frame, err := readFrame(in, 8, c.t.cfg.MaxFrameBytes)
		if err != nil {
			return err
		}
		h := parseHead(frame[4:])
		e := &entry{ch: make(chan reply, 1)}
		if h.key == keyFetch && h.version >= 4 && h.version <= maxFetchVersion {
			taken, err := c.fetch(frame, e)
			if err != nil {
				return err
			}
			if taken {
				continue
			}
		}
		if silent(h, frame[4:]) {
			if err := c.send(frame, pending{}); err != nil {
				return err
			}
			continue
		}
		// The tokens behind a handshake of version 0 have no header, and nothing tells where they end.
		raw := h.key == keySaslHandshake && h.version == 0
		if raw {
			e.raw = make(chan struct{})
		}
		if err := c.queue(e); err != nil {
			return err
		}
		if err := c.send(frame, pending{h.correlation, e.ch, e.raw}); err != nil {
			return err
		}
		if raw {
			select {
			case <-e.raw:
			case <-c.ctx.Done():
				return errBroken
			}
			_, err := io.Copy(c.up, in)
			return err
		}
	}
}

// queue waits for a place among the answers.
func (c *conn) queue(e *entry) error {
	select {
	case c.answers <- e:
		return nil
	case <-c.ctx.Done():
		return errBroken
	}
}

// send writes a frame to the broker. ch of p, if any, gets the answer.
func (c *conn) send(frame []byte, p pending) error {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	if p.ch != nil {
		select {
		case c.owed <- p:
		case <-c.upDone:
			return errBroken
		case <-c.ctx.Done():
			return errBroken
		}
	}
	_, err := c.up.Write(frame)
	return err
}

// ask sends a request of the transport's own and waits for the answer, a frame with its size.
func (c *conn) ask(ctx context.Context, clientID string, req kmsg.Request) ([]byte, error) {
	c.sendMu.Lock()
	c.correlation = (c.correlation + 1) & 0x7fffffff
	correlation := c.correlation
	c.sendMu.Unlock()
	ch := make(chan reply, 1)
	if err := c.send(wire.AppendRequest(nil, correlation, clientID, req), pending{correlation, ch, nil}); err != nil {
		return nil, err
	}
	select {
	case r := <-ch:
		return r.parts[0], nil
	case <-ctx.Done():
		return nil, errBroken
	case <-c.upDone:
	}
	select {
	case r := <-ch:
		return r.parts[0], nil
	default:
		return nil, errBroken
	}
}

// answersFromBroker hands each answer to whom it is owed.
func (c *conn) answersFromBroker() {
	in := bufio.NewReaderSize(c.up, 64<<10)
	for {
		frame, err := readFrame(in, 4, c.t.cfg.MaxFrameBytes)
		if err != nil {
			return
		}
		var p pending
		select {
		case p = <-c.owed:
		default:
			return // nobody asked
		}
		if got := int32(binary.BigEndian.Uint32(frame[4:])); got != p.correlation {
			c.t.cfg.Logger.Warn("broker answers out of order", "broker", c.address, "correlation", got, "expected", p.correlation)
			return
		}
		p.ch <- reply{parts: [][]byte{frame}}
		if p.raw != nil {
			select {
			case <-p.raw:
				_, _ = io.Copy(c.down, in)
			case <-c.ctx.Done():
			}
			return
		}
	}
}

// writeAnswers writes answers in the order of requests.
func (c *conn) writeAnswers() {
	for {
		var e *entry
		select {
		case e = <-c.answers:
		case <-c.ctx.Done():
			return
		case <-c.upDone:
			select {
			case e = <-c.answers:
			default:
				return
			}
		}
		c.current = e
		r, ok := c.await(e)
		if !ok {
			return
		}
		ok = r.parts != nil
		for _, p := range r.parts {
			if _, err := c.down.Write(p); err != nil {
				ok = false
				break
			}
		}
		if r.release != nil {
			r.release()
		}
		if !ok {
			return
		}
		if e.raw != nil {
			close(e.raw)
			select {
			case <-c.upDone:
			case <-c.ctx.Done():
			}
			return
		}
	}
}

// await waits for the answer of one request.
func (c *conn) await(e *entry) (reply, bool) {
	select {
	case r := <-e.ch:
		return r, true
	case <-c.ctx.Done():
	case <-c.upDone:
		// The last answer may have come just before the end, and a Fetch may need nothing of the broker.
		select {
		case r := <-e.ch:
			return r, true
		default:
		}
	}
	return reply{}, false
}

// fetch takes over a client's Fetch. taken is false if the broker shall see it as it is.
func (c *conn) fetch(frame []byte, e *entry) (taken bool, err error) {
	h, req, err := parseFetch(frame[4:])
	if err != nil {
		return false, nil // the broker knows what to say about it
	}
	replica := req.ReplicaID
	if h.Version >= 15 {
		replica = req.ReplicaState.ID
	}
	if replica >= 0 || directfetch.Formats(req) != nil {
		return false, nil // a follower, or a client that reads the bucket by itself
	}
	if !c.probed {
		if err := c.probe(h.ClientID); err != nil {
			return false, err
		}
		c.probed = true
	}
	if !c.direct && !c.locates || c.fetchMax < max(h.Version, directfetch.MinVersion) {
		return false, nil
	}
	if err := c.queue(e); err != nil {
		return false, err
	}
	c.jobs.Go(func() {
		r, err := newJob(c, h, req).run()
		if err != nil && c.ctx.Err() == nil {
			c.t.cfg.Logger.Debug("fetch failed", "broker", c.address, "cause", err)
		}
		e.ch <- r
	})
	return true, nil
}

// probe asks the broker, once per connection and when authentication is over, for the feature.
func (c *conn) probe(clientID string) error {
	req := kmsg.NewPtrApiVersionsRequest()
	req.Version, req.ClientSoftwareName, req.ClientSoftwareVersion = 3, "varve-direct", "1"
	frame, err := c.ask(c.ctx, clientID, req)
	if err != nil {
		return fmt.Errorf("ask for the broker's features: %w", err)
	}
	resp := kmsg.NewPtrApiVersionsResponse()
	resp.Version = 3
	if len(frame) < 8 || resp.ReadFrom(frame[8:]) != nil || resp.ErrorCode != 0 {
		return nil // an old broker
	}
	for _, f := range resp.SupportedFeatures {
		if f.Name == directfetch.Feature && f.MinVersion <= directfetch.FeatureLevel && f.MaxVersion >= directfetch.FeatureLevel {
			c.direct = true
		}
	}
	for _, k := range resp.ApiKeys {
		if k.ApiKey == keyFetch {
			c.fetchMax = k.MaxVersion
		}
	}
	c.locates = !c.direct && c.t.cfg.Locator != nil
	return nil
}
