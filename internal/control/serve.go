package control

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/peer"
)

// tasksMax is how many tasks of one connection run at one time; what comes after waits in the connection.
const tasksMax = 256

// served is a connection of another node.
type served struct {
	c       *Client
	conn    peer.Conn
	writing sync.Mutex
}

// serve carries out what another node sends, until its connection ends.
func (c *Client) serve(ctx context.Context, conn peer.Conn) {
	s := &served{c: c, conn: conn}
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	goodbye, err := s.read(ctx, &all)
	c.ended(s, goodbye)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) && ctx.Err() == nil {
		c.o.Logger.Debug("a control connection ended", "node", conn.Hello.NodeID, "cause", err)
	}
	cancel()
	conn.Close()
	all.Wait()
}

func (s *served) read(ctx context.Context, all *sync.WaitGroup) (goodbye bool, err error) {
	in := bufio.NewReader(s.conn)
	turns := make(chan struct{}, tasksMax)
	for {
		var r request
		if err := readFrame(in, &r); err != nil {
			return false, err
		}
		if r.Act == actGoodbye {
			return true, nil
		}
		select {
		case turns <- struct{}{}:
		case <-ctx.Done():
			return false, ctx.Err()
		}
		all.Go(func() {
			defer func() { <-turns }()
			s.answer(ctx, r)
		})
	}
}

func (s *served) answer(ctx context.Context, r request) {
	if r.Millis > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(min(r.Millis, 600_000))*time.Millisecond)
		defer cancel()
	}
	t, err := decodeTask(r)
	var a answer
	if err == nil {
		err = permit(t.command, s.conn.Hello.NodeID)
	}
	if err == nil {
		a, err = s.perform(ctx, t)
	}
	out := encodeAnswer(t, a, err)
	out.ID = r.ID
	b, err := frame(out)
	if err != nil {
		b, err = frame(response{ID: r.ID, Code: codeLost, Text: err.Error()})
	}
	if err == nil {
		s.writing.Lock()
		defer s.writing.Unlock()
		s.conn.SetWriteDeadline(time.Now().Add(writeTimeout))
		if _, err = s.conn.Write(b); err != nil {
			s.conn.Close()
		}
	}
}

// perform carries a task out if this node leads, and says who does if not.
func (s *served) perform(ctx context.Context, t task) (answer, error) {
	c := s.c
	c.mu.Lock()
	active := c.active
	if _, ok := t.command.(controller.HeartbeatCommand); ok {
		c.beats[s.conn.Hello.NodeID] = s
	}
	c.mu.Unlock()
	if active == nil {
		status := c.o.Quorum.Status()
		if status.Leader == c.o.NodeID {
			return answer{}, notLeader{} // not yet, or not any more
		}
		return answer{}, notLeader{status.LeaderAddress}
	}
	return c.perform(ctx, active, t, s.conn.Hello.NodeID)
}

// ended notes the end of a connection. One that carried a node's heartbeats and ends without a goodbye is a sign that the
// node died.
func (c *Client) ended(s *served, goodbye bool) {
	node := s.conn.Hello.NodeID
	c.mu.Lock()
	mine := c.beats[node] == s
	if mine {
		delete(c.beats, node)
	}
	active := c.active
	c.mu.Unlock()
	if mine && active != nil && !goodbye {
		active.disconnected(node)
	}
}

// permit refuses what a node may not ask for: it speaks for itself only.
func permit(command controller.Command, from int32) error {
	speaker := from
	switch command := command.(type) {
	case controller.TickCommand, controller.BootstrapCommand:
		return fmt.Errorf("node %d may not send a %T: it is the active controller's own", from, command)
	case controller.HeartbeatCommand:
		speaker = command.Broker
	case controller.RegisterCommand:
		speaker = command.Broker.ID
	case controller.AlterPartitionsCommand:
		speaker = command.Broker
	case controller.StartCopyCommand:
		speaker = command.Segment.Broker
	case controller.FinishCopyCommand:
		speaker = command.Segment.Broker
	case controller.StartDeleteCommand:
		speaker = command.Leader
	case controller.DisableRemoteCommand:
		speaker = command.Leader
	}
	if speaker != from {
		return fmt.Errorf("node %d may not send a %T for node %d", from, command, speaker)
	}
	return nil
}
