package direct

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// ErrNotAllowed is a request that Hooks.Allow refused.
var ErrNotAllowed = errors.New("direct: request is not allowed here")

// Hooks is what Serve lets its caller see and change. The zero value changes nothing. All of them are called by many
// goroutines.
type Hooks struct {
	// Allow is asked about every request, by API key and version, before any of it is forwarded; false ends the connection.
	Allow func(key, version int16) bool
	// Rewrite returns what makes the client's answer out of the broker's, or nil if answers to such requests pass as they
	// are. It gets a frame with its size and returns one. An error ends the connection. It is asked for Fetch too, but a large
	// answer to Fetch passes unseen, without the endpoints of new leaders that KIP-951 puts behind the records: clients then
	// ask for metadata, as older ones always do.
	Rewrite func(key, version int16) func(answer []byte) ([]byte, error)
	// Endpoint maps a broker's address in answers to Fetch that the transport makes itself; ok false leaves it out.
	Endpoint func(node int32, host string, port int32) (newHost string, newPort int32, ok bool)
	// Stall bounds how long either side may take to accept what was written, or to go on with a frame of which it has sent a
	// part (for ever).
	Stall time.Duration
}

// Serve connects to the first of the brokers that can be reached and puts the transport between it and an accepted
// connection, until either ends. It closes client and returns why it ended, nil if that was ordinary. When ctx ends, requests
// under way are answered and no more are read; Close ends all at once. Read-ahead is not shared with other connections.
//
// Transports that read nothing directly serve as well: then Serve is a proxy.
func (t *Transport) Serve(ctx context.Context, client net.Conn, brokers []string, h Hooks) error {
	var up net.Conn
	var address string
	err := errors.New("direct: no broker to connect to")
	for _, address = range brokers {
		if up, err = t.dial(ctx, "tcp", address); err == nil {
			break
		}
		err = &DialError{Address: address, Err: err}
	}
	if err != nil {
		client.Close()
		return err
	}
	c := newConn(t, up, client, address)
	c.hooks = h
	t.mu.Lock()
	t.owners++
	c.owner = t.owners
	t.mu.Unlock()
	if !t.enter(c) {
		return ErrClosed
	}
	defer t.leave(c)
	stop := context.AfterFunc(ctx, c.drain)
	defer stop()
	return c.run()
}

// DialError is a broker that cannot be reached.
type DialError struct {
	Address string
	Err     error
}

func (e *DialError) Error() string { return fmt.Sprintf("connect to broker %s: %v", e.Address, e.Err) }
func (e *DialError) Unwrap() error { return e.Err }

// endpoints maps the addresses in an answer.
func (c *conn) endpoints(brokers []kmsg.FetchResponseBroker) []kmsg.FetchResponseBroker {
	if c.hooks.Endpoint == nil {
		return brokers
	}
	var out []kmsg.FetchResponseBroker
	for _, b := range brokers {
		var ok bool
		if b.Host, b.Port, ok = c.hooks.Endpoint(b.NodeID, b.Host, b.Port); ok {
			out = append(out, b)
		}
	}
	return out
}
