package gateway

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/wire"
)

const (
	probePause    = 3 * time.Second // between two looks at brokers that answer
	probeRetry    = time.Second     // after a failure
	probePatience = 5 * time.Second // for one look
	probeMax      = 16 << 20
)

// probe looks again and again whether a broker answers, as a client of the gateway itself. What it asks for is what every
// client asks for, and so the gateway learns its brokers.
func (g *Gateway) probe(ctx context.Context) {
	for ctx.Err() == nil {
		err := g.look(ctx)
		if ctx.Err() != nil {
			return
		}
		wait := probePause
		if err != nil {
			wait = probeRetry
		}
		g.setReady(err)
		pause(ctx, wait)
	}
}

// look asks any broker for its versions, which it tells everybody, and for its cluster, which it may refuse.
func (g *Gateway) look(ctx context.Context) error {
	own, served := net.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- g.serve(context.WithoutCancel(ctx), served, -1) }()
	limited, cancel := context.WithTimeout(ctx, probePatience)
	defer cancel()
	stop := context.AfterFunc(limited, func() { own.Close() })
	defer stop()
	_, err := exchange(own, kmsg.NewPtrApiVersionsRequest())
	if err == nil {
		metadata := kmsg.NewPtrMetadataRequest()
		metadata.Version = 1
		metadata.Topics = []kmsg.MetadataRequestTopic{}
		_, _ = exchange(own, metadata)
	}
	own.Close()
	cause := <-ended
	switch {
	case err == nil:
		return nil
	case limited.Err() != nil:
		cause = limited.Err()
	case cause == nil:
		cause = err
	}
	return fmt.Errorf("no broker answers: %w", cause)
}

// exchange sends a request and returns its answer.
func exchange(c net.Conn, req kmsg.Request) ([]byte, error) {
	if _, err := c.Write(wire.AppendRequest(nil, 0, "varve-gateway", req)); err != nil {
		return nil, err
	}
	var size [4]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		return nil, err
	}
	n := int(binary.BigEndian.Uint32(size[:]))
	if n > probeMax {
		return nil, fmt.Errorf("answer of %d bytes", n)
	}
	frame := make([]byte, n)
	_, err := io.ReadFull(c, frame)
	return frame, err
}
