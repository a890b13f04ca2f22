package control

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"

	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/quorum"
)

// AddVoter makes a registered node that follows the log a voter of the quorum, or gives a voter another address. With an
// empty address it takes that which the broker has registered.
func (c *Client) AddVoter(ctx context.Context, id int32, address string) error {
	_, err := c.route(ctx, task{act: actAddVoter, id: id, address: address})
	return err
}

// RemoveVoter makes a voter one no more. As a registered broker it goes on following the log. The last voter cannot go.
func (c *Client) RemoveVoter(ctx context.Context, id int32) error {
	_, err := c.route(ctx, task{act: actRemoveVoter, id: id})
	return err
}

// QuorumStatus is the quorum as its leader sees it.
func (c *Client) QuorumStatus(ctx context.Context) (quorum.Status, error) {
	a, err := c.route(ctx, task{act: actStatus})
	s, _ := a.reply.(quorum.Status)
	return s, err
}

// admin carries out an act on the quorum, which this node leads.
func (c *Client) admin(ctx context.Context, active *active, t task) (answer, error) {
	q := c.o.Quorum
	status := q.Status()
	broker := q.Image().Brokers[t.id]
	a := answer{index: q.Image().Index}
	switch t.act {
	case actAddVoter:
		address := t.address
		if !isVoter(status, t.id) {
			if broker == nil {
				return a, refuse("node %d is not registered: start it first", t.id)
			}
			if err := active.keepsUp(t.id, a.index); err != nil {
				return a, err
			}
		}
		if address == "" {
			if broker == nil {
				return a, refuse("node %d is not registered: give its address", t.id)
			}
			peer, ok := broker.Peer()
			if !ok {
				return a, refuse("node %d has registered no address for other nodes", t.id)
			}
			address = hostPort(peer.Host, peer.Port)
		}
		return a, q.AddVoter(ctx, t.id, address)
	case actRemoveVoter:
		if !isVoter(status, t.id) {
			return a, refuse("node %d is no voter of the quorum", t.id)
		}
		if broker != nil {
			return a, refusal(q.DemoteVoter(ctx, t.id))
		}
		return a, refusal(q.Remove(ctx, t.id))
	case actStatus:
		a.reply = status
		return a, nil
	}
	return a, fmt.Errorf("the act %d is unknown here: was it sent by a newer version?", t.act)
}

// refuse is a refusal as those of commands are, so that it crosses the network with its kind.
func refuse(format string, args ...any) error {
	return &controller.Error{Kind: controller.ErrInvalidRequest, Message: fmt.Sprintf(format, args...)}
}

func refusal(err error) error {
	if errors.Is(err, quorum.ErrLastVoter) {
		return refuse("%s", err)
	}
	return err
}

func isVoter(s quorum.Status, id int32) bool {
	for _, m := range s.Members {
		if m.ID == id {
			return m.Voter
		}
	}
	return false
}

func hostPort(host string, port int32) string { return net.JoinHostPort(host, strconv.Itoa(int(port))) }
