package peer

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/wire"
)

// Kafka speaks Kafka with another broker, one request at a time. It is for one goroutine.
type Kafka struct {
	net.Conn
	in          *bufio.Reader
	out, frame  []byte
	correlation int32
}

// frameMax bounds an answer: the bytes that were asked for and one batch that is larger.
const frameMax = 1 << 30

// NewKafka speaks over a connection.
func NewKafka(nc net.Conn) *Kafka { return &Kafka{Conn: nc, in: bufio.NewReaderSize(nc, 64<<10)} }

// RoundTrip sends a request and reads its answer; resp is valid until the next call.
func (c *Kafka) RoundTrip(ctx context.Context, req kmsg.Request, resp kmsg.Response, limit time.Duration) error {
	if err := c.SetDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	c.correlation++
	c.out = wire.AppendRequest(c.out[:0], c.correlation, "varve-replica", req)
	if _, err := c.Write(c.out); err != nil {
		return err
	}
	var head [4]byte
	if _, err := io.ReadFull(c.in, head[:]); err != nil {
		return err
	}
	size := int32(binary.BigEndian.Uint32(head[:]))
	if size < 4 || size > frameMax {
		return fmt.Errorf("answer of %d bytes", size)
	}
	if err := c.readFrame(int(size)); err != nil {
		return err
	}
	if got := int32(binary.BigEndian.Uint32(c.frame)); got != c.correlation {
		return fmt.Errorf("answer to request %d, want %d", got, c.correlation)
	}
	body := c.frame[4:]
	if resp.IsFlexible() {
		if len(body) == 0 || body[0] != 0 {
			return fmt.Errorf("answer with %d bytes of header", len(body))
		}
		body = body[1:]
	}
	return resp.ReadFrom(body)
}

// readFrame reads size bytes into frame, which grows with what arrives, not with what is announced.
func (c *Kafka) readFrame(size int) error {
	const step = 1 << 20
	c.frame = c.frame[:0]
	for len(c.frame) < size {
		n := len(c.frame)
		if cap(c.frame) < size {
			grown := make([]byte, n, min(size, max(2*n, step)))
			copy(grown, c.frame)
			c.frame = grown
		}
		c.frame = c.frame[:min(size, cap(c.frame))]
		if _, err := io.ReadFull(c.in, c.frame[n:]); err != nil {
			return err
		}
	}
	return nil
}
