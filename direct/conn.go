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
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/directfetch"
	"github.com/varve-io/varve/internal/wire"
)

const (
	// maxInFlight bounds the requests of a connection that wait for answers; a client that sends more waits.
	maxInFlight = 128
	// linger bounds how long answers are waited for after the client has stopped sending.
	linger = 10 * time.Second
	// produceHead is how much of a Produce is looked at first for its acks: client id and transactional id are seldom longer.
	produceHead = 512
	// fetchBytes is up to which size a Fetch is looked into, some 30,000 partitions: in memory it is dozens of times as large.
	fetchBytes = 1 << 20
)

// errBroken is a connection that ended while an answer was due.
var errBroken = errors.New("direct: connection ended")

// reply is what is written to the client. The zero reply ends the connection.
type reply struct {
	parts   [][]byte
	release func() // after writing or giving up; may be nil
	passed  bool   // it has been written already
	held    int64  // what it counts in conn.held
}

// entry is a request; answers go out in the order of requests.
type entry struct {
	ch  chan reply    // one value
	raw chan struct{} // closed when the answer was written, where raw tokens follow it
}

func newEntry() *entry { return &entry{ch: make(chan reply, 1)} }

// pending is an answer that the broker owes. The zero value is none.
type pending struct {
	head
	entry *entry
	own   bool // the transport asked
	token bool // it is a SASL token, which has no header
	// records says that its size counts as records of the broker: it answers a Fetch that might have been read directly.
	records bool
}

// conn is one client's connection. Three goroutines: one reads requests, one reads the broker's answers, one writes
// answers; and one for each Fetch that waits. What the transport has no interest in goes from socket to socket.
type conn struct {
	t       *Transport
	up      net.Conn
	down    net.Conn
	address string
	owner   uint64 // whose read-ahead it may use, see partKey
	hooks   Hooks
	ctx     context.Context
	cancel  context.CancelFunc
	jobs    sync.WaitGroup

	sendMu      sync.Mutex // orders writes to the broker and owed
	owed        chan pending
	correlation int32

	answers chan *entry           // nil is the last
	current atomic.Pointer[entry] // what the writer is at, or the last that it was at
	upDone  chan struct{}         // closed when no more answers come from the broker
	held    atomic.Int64          // bytes of the broker's answers that wait for their turn

	drainMu  sync.Mutex
	draining bool // no further request is read
	idle     bool // the reader waits for one

	use directfetch.Use // what was read since the broker was told; guarded by the Transport's mutex

	// Only the reader of requests uses these.
	probed   bool
	direct   bool // the broker gives locations
	locates  bool // the Locator does, in its place
	fetchMax int16
	tokens   int // SASL tokens without headers that are to come
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

// run serves the connection until it ends and returns why, nil if that was ordinary.
func (c *conn) run() error {
	var wg sync.WaitGroup
	var upErr, downErr error
	wg.Go(func() {
		upErr = c.answersFromBroker()
		close(c.upDone)
	})
	written := make(chan struct{})
	wg.Go(func() {
		downErr = c.writeAnswers()
		c.shutdown()
		close(written)
	})
	err := c.requests()
	if errors.Is(err, io.EOF) || errors.Is(err, errDrained) {
		c.finish(err, written)
		err = nil
	}
	ended := c.ctx.Err() != nil
	c.shutdown()
	wg.Wait()
	c.jobs.Wait()
	c.discard()
	if ended {
		err = nil // it is that of a closed connection
	}
	for _, err := range []error{downErr, upErr, err} {
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) && !errors.Is(err, io.ErrClosedPipe) {
			return err
		}
	}
	return nil
}

// finish writes the answers that are due after the last request. A client that has stopped sending may be gone: the broker
// hears of it at once, as it would without us, and nobody is waited for any longer than linger.
func (c *conn) finish(why error, written <-chan struct{}) {
	if c.queue(nil) != nil {
		return
	}
	if errors.Is(why, io.EOF) {
		timer := time.AfterFunc(linger, c.shutdown)
		defer timer.Stop()
		c.jobs.Wait()
		if half, ok := c.up.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite()
		}
	}
	<-written
}

// discard releases the answers that were not written. Nothing else runs any more.
func (c *conn) discard() {
	close(c.answers)
	left := []*entry{c.current.Load()}
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

// errDrained ends the reading of requests.
var errDrained = errors.New("direct: connection is drained")

// drain lets the connection finish what it has read and no more.
func (c *conn) drain() {
	c.drainMu.Lock()
	defer c.drainMu.Unlock()
	c.draining = true
	if c.idle {
		c.down.SetReadDeadline(time.Unix(1, 0))
	}
}

// await waits for the next request. A request that has begun is read to its end, whatever happens.
func (c *conn) await(in *bufio.Reader, src *source) error {
	c.drainMu.Lock()
	src.between()
	c.idle = !c.draining
	c.drainMu.Unlock()
	if !c.idle {
		return errDrained
	}
	_, err := in.Peek(1)
	c.drainMu.Lock()
	defer c.drainMu.Unlock()
	c.idle, src.within = false, true
	if c.draining {
		if err != nil {
			return errDrained
		}
		c.down.SetReadDeadline(time.Time{})
	}
	return err
}

// requests reads what the client sends.
func (c *conn) requests() error {
	src := &source{conn: c.down, stall: c.hooks.Stall}
	in := bufio.NewReaderSize(src, 32<<10)
	for first := true; ; first = false {
		if err := c.await(in, src); err != nil {
			return err
		}
		if c.tokens > 0 {
			c.tokens--
			if err := c.token(in); err != nil {
				return err
			}
			continue
		}
		size, err := frameSize(in, 8, c.t.cfg.MaxFrameBytes)
		if err != nil {
			if b, _ := in.Peek(4); first && errors.Is(err, errFrame) && wire.Sniff(b) != "" {
				return fmt.Errorf("this is no Kafka client: it sent %s", wire.Sniff(b))
			}
			return err
		}
		start, err := in.Peek(4 + 8)
		if err != nil {
			return torn(err)
		}
		h := parseHead(start[4:])
		if c.hooks.Allow != nil && !c.hooks.Allow(h.key, h.version) {
			return fmt.Errorf("%w: key %d, version %d", ErrNotAllowed, h.key, h.version)
		}
		if err := c.request(in, size, h); err != nil {
			return err
		}
	}
}

// request deals with the request that in is at, which has size bytes.
func (c *conn) request(in *bufio.Reader, size int, h head) error {
	e := newEntry()
	var frame []byte // the whole of it, where that is needed
	var err error
	switch {
	case h.key == keyFetch && h.version >= 4 && h.version <= maxFetchVersion && size <= fetchBytes && c.t.active && (c.direct || c.locates || !c.probed):
		if frame, err = readFrame(in, 8, c.t.cfg.MaxFrameBytes, trustClient); err != nil {
			return err
		}
		if taken, err := c.fetch(frame, e); taken || err != nil {
			return err
		}
	case h.key == keyProduce:
		start, err := in.Peek(min(size, produceHead))
		if err != nil {
			return torn(err)
		}
		quiet, sure := silent(h, start[4:])
		if !sure && len(start) < size {
			if frame, err = readFrame(in, 8, c.t.cfg.MaxFrameBytes, trustClient); err != nil {
				return err
			}
			quiet, _ = silent(h, frame[4:])
		}
		if quiet {
			return c.send(pending{}, func() error { return c.forward(in, frame, size) })
		}
	case h.key == keySaslHandshake && h.version == 0: // tokens without headers follow
		if frame, err = readFrame(in, 8, c.t.cfg.MaxFrameBytes, trustClient); err != nil {
			return err
		}
		var mechanism string
		if mechanism, c.tokens = rounds(frame[4:]); c.tokens == 0 {
			if c.hooks.Rewrite != nil || c.hooks.Allow != nil {
				return fmt.Errorf("%w: SaslHandshake v0 for %q: nothing tells where its tokens end", ErrNotAllowed, mechanism)
			}
			e.raw = make(chan struct{})
		}
	}
	if err := c.queue(e); err != nil {
		return err
	}
	if err := c.send(pending{head: h, entry: e}, func() error { return c.forward(in, frame, size) }); err != nil {
		return err
	}
	if e.raw != nil {
		select {
		case <-e.raw:
		case <-c.ctx.Done():
			return errBroken
		}
		c.down.SetReadDeadline(time.Time{})
		c.up.SetWriteDeadline(time.Time{})
		_, err := io.Copy(c.up, in)
		return err
	}
	return nil
}

// token passes on a SASL token of the client, whose answer is one of the broker.
func (c *conn) token(in *bufio.Reader) error {
	size, err := frameSize(in, 0, c.t.cfg.MaxFrameBytes)
	if err != nil {
		return err
	}
	e := newEntry()
	if err := c.queue(e); err != nil {
		return err
	}
	return c.send(pending{entry: e, token: true}, func() error { return c.forward(in, nil, size) })
}

// forward writes a request to the broker: frame, or the next size bytes of in.
func (c *conn) forward(in *bufio.Reader, frame []byte, size int) error {
	if frame == nil {
		return c.pass(c.up, in, c.down, size)
	}
	c.patience(c.up.SetWriteDeadline)
	_, err := c.up.Write(frame)
	return err
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

// send has write write a request to the broker, whose answer is owed to p.
func (c *conn) send(p pending, write func() error) error {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	if p.entry != nil {
		select {
		case c.owed <- p:
		case <-c.upDone:
			return errBroken
		case <-c.ctx.Done():
			return errBroken
		}
	}
	return write()
}

// ask sends a request of the transport's own and waits for the answer, a frame with its size.
func (c *conn) ask(ctx context.Context, clientID string, req kmsg.Request) ([]byte, error) {
	c.sendMu.Lock()
	c.correlation = (c.correlation + 1) & 0x7fffffff
	correlation := c.correlation
	c.sendMu.Unlock()
	e := newEntry()
	frame := wire.AppendRequest(nil, correlation, clientID, req)
	if err := c.send(pending{head: parseHead(frame[4:]), entry: e, own: true}, func() error { return c.forward(nil, frame, 0) }); err != nil {
		return nil, err
	}
	select {
	case r := <-e.ch:
		return r.parts[0], nil
	case <-ctx.Done():
		return nil, errBroken
	case <-c.upDone:
	}
	select {
	case r := <-e.ch:
		return r.parts[0], nil
	default:
		return nil, errBroken
	}
}

// report tells the broker what was read from objects since it was told last. What a broken connection did not tell is lost: it is a
// figure for people.
func (c *conn) report(req *kmsg.FetchRequest) {
	c.t.mu.Lock()
	defer c.t.mu.Unlock()
	if c.use != (directfetch.Use{}) {
		directfetch.SetUse(req, c.use)
		c.use = directfetch.Use{}
	}
}

// answersFromBroker hands each answer to whom it is owed.
func (c *conn) answersFromBroker() error {
	src := &source{conn: c.up, stall: c.hooks.Stall}
	in := bufio.NewReaderSize(src, 64<<10)
	for {
		src.between()
		if _, err := in.Peek(4); err != nil {
			return err
		}
		src.within = true
		var p pending
		select {
		case p = <-c.owed:
		default:
			return fmt.Errorf("%w: broker %s answers what nobody asked", errFrame, c.address)
		}
		least := 4
		if p.token {
			least = 0
		}
		size, err := frameSize(in, least, c.t.cfg.MaxFrameBytes)
		if err != nil {
			return err
		}
		if !p.token {
			start, err := in.Peek(4 + 4)
			if err != nil {
				return torn(err)
			}
			if got := int32(binary.BigEndian.Uint32(start[4:])); got != p.correlation {
				return fmt.Errorf("%w: broker %s answers out of order: correlation id %d where %d is due", errFrame, c.address, got, p.correlation)
			}
		}
		if err := c.answer(in, size, p); err != nil {
			return err
		}
		if p.entry.raw != nil {
			src.between()
			select {
			case <-p.entry.raw:
				c.down.SetWriteDeadline(time.Time{})
				_, err = io.Copy(c.down, in)
			case <-c.ctx.Done():
			}
			return err
		}
	}
}

// answer deals with the answer that in is at, which has size bytes. If the client waits for this very answer it is passed on
// as it comes; otherwise, and if it is to be changed, it has to be read first.
func (c *conn) answer(in *bufio.Reader, size int, p pending) error {
	var rewrite func([]byte) ([]byte, error)
	if !p.own && !p.token && c.hooks.Rewrite != nil {
		rewrite = c.hooks.Rewrite(p.key, p.version)
	}
	if p.records {
		c.t.mu.Lock()
		c.t.stats.brokerBytes += int64(size)
		c.t.mu.Unlock()
	}
	if !p.own && p.entry.raw == nil && c.current.Load() == p.entry { // the writer does nothing until it has the reply
		switch {
		case rewrite == nil:
			if err := c.pass(c.down, in, c.up, size); err != nil {
				return err
			}
			p.entry.ch <- reply{passed: true}
			return nil
		case p.key == keyFetch && p.version >= 12 && p.version <= maxFetchVersion && size > wholeFetch:
			if err := c.passFetch(in, size, p.version); err != nil {
				return err
			}
			p.entry.ch <- reply{passed: true}
			return nil
		}
	}
	frame, err := readFrame(in, 0, c.t.cfg.MaxFrameBytes, trustBroker)
	if err != nil {
		return err
	}
	if rewrite != nil {
		if frame, err = rewrite(frame); err != nil {
			return fmt.Errorf("answer of broker %s: %w", c.address, err)
		}
	}
	r := reply{parts: [][]byte{frame}}
	if !p.own {
		r.held = int64(len(frame))
		if err := c.hold(r.held); err != nil {
			return err
		}
	}
	p.entry.ch <- r
	return nil
}

// hold counts n bytes that wait for their turn. Of those that wait already there may be MaxFrameBytes; more end the connection at
// once, as the client reads nothing.
func (c *conn) hold(n int64) error {
	if c.held.Add(n) > int64(c.t.cfg.MaxFrameBytes)+n {
		c.shutdown()
		return fmt.Errorf("%w: more answers wait for their turn than MaxFrameBytes", errFrame)
	}
	return nil
}

// writeAnswers writes answers in the order of requests, until the last or as long as there are any.
func (c *conn) writeAnswers() error {
	for {
		var e *entry
		select {
		case e = <-c.answers:
		case <-c.ctx.Done():
			return nil
		case <-c.upDone:
			select {
			case e = <-c.answers:
			default:
				return nil
			}
		}
		if e == nil {
			return nil
		}
		c.current.Store(e)
		r, ok := c.reply(e)
		if !ok {
			return nil
		}
		var err error
		if !r.passed {
			err = c.write(r.parts)
		}
		c.held.Add(-r.held)
		if r.release != nil {
			r.release()
		}
		if err != nil || !r.passed && r.parts == nil {
			return err
		}
		if e.raw != nil {
			close(e.raw)
			select {
			case <-c.upDone:
			case <-c.ctx.Done():
			}
			return nil
		}
	}
}

// write writes the parts of an answer with as few system calls as the connection allows.
func (c *conn) write(parts [][]byte) error {
	for n := 0; len(parts) > 0; parts = parts[n:] {
		size := 0
		for n = 0; n < len(parts) && (n == 0 || size < passSlice); n++ {
			size += len(parts[n])
		}
		c.patience(c.down.SetWriteDeadline)
		some := net.Buffers(parts[:n:n])
		if _, err := some.WriteTo(c.down); err != nil {
			return err
		}
	}
	return nil
}

// reply waits for the answer of one request.
func (c *conn) reply(e *entry) (reply, bool) {
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
	passes := (h.Version < 7 || req.SessionID == 0) && c.t.passes(c, req)
	if !passes && repeats(req) {
		return false, nil // no client that Kafka has
	}
	if err := c.queue(e); err != nil {
		return false, err
	}
	if passes {
		if h.Version >= 7 { // there are no sessions here, so that the next one is not of what this one left out
			req.SessionEpoch, req.ForgottenTopics = -1, nil
		}
		frame := wire.AppendRequest(nil, h.Correlation, h.ClientID, req)
		return true, c.send(pending{head: parseHead(frame[4:]), entry: e, records: true}, func() error { return c.forward(nil, frame, 0) })
	}
	c.jobs.Go(func() {
		j := newJob(c, h, req)
		r, err := j.run()
		r.held = j.held
		if err != nil && c.ctx.Err() == nil {
			c.t.cfg.Logger.Debug("fetch failed", "broker", c.address, "cause", err)
		}
		e.ch <- r
	})
	return true, nil
}

// partKey names a partition for whoever this connection serves.
func (c *conn) partKey(topic string, id [16]byte, partition int32) partKey {
	return partKey{c.owner, c.address, topic, id, partition}
}

// repeats reports whether a Fetch names a partition more than once.
func repeats(req *kmsg.FetchRequest) bool {
	seen := map[partKey]bool{}
	for i := range req.Topics {
		t := &req.Topics[i]
		for k := range t.Partitions {
			key := partKey{topic: t.Topic, id: t.TopicID, partition: t.Partitions[k].Partition}
			if seen[key] {
				return true
			}
			seen[key] = true
		}
	}
	return false
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
