package server

import (
	"context"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/varve-io/varve/internal/wire"
)

// countedWrites counts what is written to a connection.
type countedWrites struct {
	net.Conn
	n *atomic.Int64
}

func (c countedWrites) Write(b []byte) (int, error) {
	c.n.Add(1)
	return c.Conn.Write(b)
}

// pipelined serves a connection on which all requests of a list have started before the first is finished. A request "slow" is
// finished when release is closed, "big" has an answer that is not gathered, and all others are echoed.
func pipelined(t *testing.T, requests []string) (r *rig, c net.Conn, writes *atomic.Int64, release chan struct{}) {
	release, all := make(chan struct{}), make(chan struct{})
	started := 0
	ln := pipes{make(chan net.Conn), make(chan struct{})}
	r = serveOn(t, ln, func(_ context.Context, _ *wire.Peer, frame []byte) (wire.Finish, error) {
		body := string(frame)
		if started++; started == len(requests) {
			defer close(all)
		}
		return func(context.Context) wire.Reply {
			<-all
			switch body {
			case "slow":
				<-release
			case "big":
				body = strings.Repeat(body, gatherMax)
			case "panic":
				panic("a defect")
			}
			return wire.Reply{Chunks: []wire.Chunk{{Bytes: framed(body)}}}
		}, nil
	}, nil)
	writes = new(atomic.Int64)
	c, theirs := net.Pipe()
	ln.c <- countedWrites{theirs, writes}
	var sent []byte
	for _, body := range requests {
		sent = append(sent, framed(body)...)
	}
	r.write(c, sent)
	return r, c, writes, release
}

// Small answers to requests that came together leave together, in order.
func TestAnswersLeaveTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		requests := strings.Split("a b c d e f g h i j k l m n o p q r s t u v w x y z", " ")
		r, c, writes, _ := pipelined(t, requests)
		for _, want := range requests {
			r.expect(c, want)
		}
		if n := writes.Load(); n > 2 { // the last but one may find that nobody is behind it yet
			t.Errorf("%d answers took %d writes", len(requests), n)
		}
		r.stop()
	})
}

// An answer that is ready does not wait for the end of a request that takes its time, or for a big answer.
func TestAnAnswerDoesNotWaitForASlowOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, c, _, release := pipelined(t, []string{"a", "b", "slow", "c", "big", "d", "slow"})
		start := time.Now()
		r.expect(c, "a")
		r.expect(c, "b")
		if took := time.Since(start); took != gatherFor {
			t.Errorf("answers that were ready took %v", took)
		}
		close(release)
		r.expect(c, "slow")
		r.expect(c, "c")
		r.expect(c, strings.Repeat("big", gatherMax))
		r.expect(c, "d")
		r.expect(c, "slow")
		r.stop()
	})
}

// What was answered before a defect ended the connection still arrives.
func TestAnswersBeforeADefect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, c, _, _ := pipelined(t, []string{"a", "b", "panic", "c"})
		r.expect(c, "a")
		r.expect(c, "b")
		r.closed(c)
		r.stop()
	})
}

// A peer that has gone away ends its connection, also where the write that fails is that of gathered answers.
func TestGatheredAnswersToNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, c, _, release := pipelined(t, []string{"a", "b", "slow", "c"})
		c.Close()
		time.Sleep(gatherFor)
		synctest.Wait()
		close(release)
		r.changed(1)
		r.changed(-1)
		r.stop()
	})
}
