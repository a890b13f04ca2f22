package quorum

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hashicorp/raft"
)

// Member is one node of the quorum.
type Member struct {
	ID      int32
	Address string // where the others reach it
	Voter   bool
}

// Status is what this node knows of the quorum.
type Status struct {
	Leader        int32  // -1 if none is known
	LeaderAddress string // empty if none is known
	Term          uint64
	CommitIndex   uint64
	AppliedIndex  uint64
	Members       []Member  // by id
	LastContact   time.Time // with the leader; now on the leader itself, zero if never
}

// ErrLastVoter refuses to take the vote from the only node that has one.
var ErrLastVoter = errors.New("the last voter")

// Status never waits.
func (n *Node) Status() Status {
	at, id := n.raft.LeaderWithID()
	s := Status{Leader: -1, LeaderAddress: string(at), Term: n.raft.CurrentTerm(), CommitIndex: n.raft.CommitIndex(), AppliedIndex: n.raft.AppliedIndex(),
		LastContact: n.raft.LastContact(), Members: n.Members()}
	if id != "" {
		s.Leader = nodeID(id)
	}
	if s.Leader == n.o.NodeID {
		s.LastContact = time.Now()
	}
	return s
}

// Members are the nodes of the newest configuration, by id.
func (n *Node) Members() []Member { return members(n.raft.GetConfiguration().Configuration().Servers) }

func members(servers []raft.Server) []Member {
	var out []Member
	for _, m := range servers {
		out = append(out, Member{nodeID(m.ID), string(m.Address), m.Suffrage == raft.Voter})
	}
	slices.SortFunc(out, func(a, b Member) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

func (n *Node) member(id int32) (Member, bool) {
	for _, m := range n.Members() {
		if m.ID == id {
			return m, true
		}
	}
	return Member{}, false
}

// LeaderID is the node that leads the quorum, -1 if none is known.
func (n *Node) LeaderID() int32 {
	if _, id := n.raft.LeaderWithID(); id != "" {
		return nodeID(id)
	}
	return -1
}

// Leading reports whether this node leads the quorum now.
func (n *Node) Leading() bool { return n.raft.State() == raft.Leader }

// AddVoter makes a node a voter, or gives a voter another address. Only the leader can; so for the rest.
func (n *Node) AddVoter(ctx context.Context, id int32, address string) error {
	if m, ok := n.member(id); ok && m.Voter && m.Address == address {
		return n.leads()
	}
	return changeError(fmt.Sprintf("make node %d a voter", id), n.raft.AddVoter(serverID(id), raft.ServerAddress(address), 0, timeout(ctx)).Error())
}

// AddNonvoter makes a node follow the log, or gives a member another address; a voter stays one.
func (n *Node) AddNonvoter(ctx context.Context, id int32, address string) error {
	if m, ok := n.member(id); ok && m.Address == address {
		return n.leads()
	}
	return changeError(fmt.Sprintf("add node %d to the quorum", id), n.raft.AddNonvoter(serverID(id), raft.ServerAddress(address), 0, timeout(ctx)).Error())
}

// DemoteVoter makes a voter follow only. The last voter cannot be demoted.
func (n *Node) DemoteVoter(ctx context.Context, id int32) error {
	if m, ok := n.member(id); !ok || !m.Voter {
		return n.leads()
	}
	if err := n.notLast(id); err != nil {
		return err
	}
	return changeError(fmt.Sprintf("demote node %d", id), n.raft.DemoteVoter(serverID(id), 0, timeout(ctx)).Error())
}

// Remove makes a node no member any more. The last voter cannot be removed.
func (n *Node) Remove(ctx context.Context, id int32) error {
	if _, ok := n.member(id); !ok {
		return n.leads()
	}
	if err := n.notLast(id); err != nil {
		return err
	}
	return changeError(fmt.Sprintf("remove node %d from the quorum", id), n.raft.RemoveServer(serverID(id), 0, timeout(ctx)).Error())
}

// TransferLeadership hands leadership to another voter, and returns when this node does not lead any more.
func (n *Node) TransferLeadership(ctx context.Context) error {
	done := make(chan error, 1)
	go func() { done <- n.raft.LeadershipTransfer().Error() }() // raft bounds it by the election timeout, and by its own end
	select {
	case err := <-done:
		return changeError("transfer the quorum's leadership", err)
	case <-ctx.Done():
		return fmt.Errorf("transfer the quorum's leadership: %w", ctx.Err())
	}
}

func (n *Node) leads() error {
	if !n.Leading() {
		return ErrNotController
	}
	return nil
}

func (n *Node) notLast(id int32) error {
	for _, m := range n.Members() {
		if m.Voter && m.ID != id {
			return nil
		}
	}
	if m, ok := n.member(id); ok && m.Voter {
		return fmt.Errorf("node %d is %w", id, ErrLastVoter)
	}
	return nil
}

func changeError(what string, err error) error {
	if err == nil {
		return nil
	}
	return proposalError(what, err)
}
