package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

func quorumCommand() *cobra.Command {
	c := &connection{}
	cmd := &cobra.Command{Use: "quorum", Short: "Show and change the nodes that keep the metadata",
		Long: "Show and change the nodes that keep the metadata. Voters decide by majority: three survive the loss of one, five of two.\nOther brokers follow as observers."}
	c.flags(cmd)
	cmd.AddCommand(quorumStatusCommand(c), quorumAdd(c), quorumRemove(c), quorumRecover(c))
	return cmd
}

// quorumStatus is what quorum status prints.
type quorumStatus struct {
	Leader      int32        `json:"leader"`
	Term        int32        `json:"term"`
	CommitIndex int64        `json:"commitIndex"`
	Voters      []quorumNode `json:"voters"`
	Observers   []quorumNode `json:"observers"`
}

type quorumNode struct {
	ID      int32  `json:"id"`
	Address string `json:"address"`
}

func (q *quorumStatus) voters() string {
	ids := make([]int32, len(q.Voters))
	for i, v := range q.Voters {
		ids[i] = v.ID
	}
	return idList(ids)
}

// warning says what is unwise about the number of voters, "" if nothing is.
func (q *quorumStatus) warning() string {
	n := len(q.Voters)
	switch {
	case n == 2:
		return "2 voters survive the loss of none, like 1, and there are two to lose: add a third"
	case n > 0 && n%2 == 0:
		return fmt.Sprintf("%d voters survive the loss of %d, no more than %d would: add one or remove one", n, (n-1)/2, n-1)
	}
	return ""
}

// askQuorum asks for the quorum's state, through whichever broker.
func askQuorum(ctx context.Context, cl *kgo.Client) (*quorumStatus, error) {
	req := kmsg.NewPtrDescribeQuorumRequest()
	t := kmsg.NewDescribeQuorumRequestTopic()
	t.Topic = "__cluster_metadata"
	t.Partitions = append(t.Partitions, kmsg.NewDescribeQuorumRequestTopicPartition())
	req.Topics = append(req.Topics, t)
	resp, err := req.RequestWith(ctx, cl)
	if err != nil {
		return nil, err
	}
	if err := refusal(resp.ErrorCode, resp.ErrorMessage); err != nil {
		return nil, err
	}
	if len(resp.Topics) != 1 || len(resp.Topics[0].Partitions) != 1 {
		return nil, errors.New("the broker's answer tells of no quorum")
	}
	p := resp.Topics[0].Partitions[0]
	if err := refusal(p.ErrorCode, p.ErrorMessage); err != nil {
		return nil, err
	}
	address := map[int32]string{}
	for _, n := range resp.Nodes {
		for _, l := range n.Listeners {
			address[n.NodeID] = net.JoinHostPort(l.Host, strconv.Itoa(int(l.Port)))
		}
	}
	nodes := func(states []kmsg.DescribeQuorumResponseTopicPartitionReplicaState) []quorumNode {
		out := []quorumNode{}
		for _, s := range states {
			out = append(out, quorumNode{s.ReplicaID, address[s.ReplicaID]})
		}
		slices.SortFunc(out, func(a, b quorumNode) int { return cmp.Compare(a.ID, b.ID) })
		return out
	}
	return &quorumStatus{Leader: p.LeaderID, Term: p.LeaderEpoch, CommitIndex: p.HighWatermark, Voters: nodes(p.CurrentVoters), Observers: nodes(p.Observers)}, nil
}

// refusal is the broker's answer as an error, in its own words.
func refusal(code int16, message *string) error {
	err := kerr.ErrorForCode(code)
	if err == nil {
		return nil
	}
	if message == nil {
		return err
	}
	return said(err, *message)
}

func quorumStatusCommand(c *connection) *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show the quorum's leader, voters and observers", Args: noArgs,
		Long: "Show the quorum's leader, voters and observers. The leader answers, through whichever broker is asked; without a majority\nof the voters there is none, and that is the error.",
		Example: `  varve quorum status
  varve quorum status --brokers broker3:9092 --json | jq .leader`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client(cmd.Context())
			if err != nil {
				return err
			}
			defer cl.Close()
			ctx, cancel := context.WithTimeout(cmd.Context(), 15*time.Second)
			defer cancel()
			q, err := askQuorum(ctx, cl)
			if err != nil {
				return fmt.Errorf("the quorum does not answer: %w", err)
			}
			return c.print(cmd, q, func(w io.Writer) {
				fmt.Fprintf(w, "leader %d, term %d, committed up to %d\n", q.Leader, q.Term, q.CommitIndex)
				printNodes(w, q.Leader, q.Voters, q.Observers)
				if why := q.warning(); why != "" {
					fmt.Fprintf(w, "warning: %s\n", why)
				}
			})
		},
	}
}

// printNodes prints a quorum's nodes; leader is -1 where none is known.
func printNodes(w io.Writer, leader int32, voters, observers []quorumNode) {
	fmt.Fprintln(w, "NODE\tROLE\tADDRESS")
	for _, v := range voters {
		role := "voter"
		if v.ID == leader {
			role = "voter, leader"
		}
		fmt.Fprintf(w, "%d\t%s\t%s\n", v.ID, role, v.Address)
	}
	for _, o := range observers {
		fmt.Fprintf(w, "%d\tobserver\t%s\n", o.ID, o.Address)
	}
}

// nodeID reads a node's id from the command line.
func nodeID(s string) (int32, error) {
	n, err := strconv.ParseInt(strings.TrimSpace(s), 10, 32)
	if err != nil || n < 0 {
		return 0, usageError{fmt.Errorf("%q is no node id", s)}
	}
	return int32(n), nil
}

func quorumAdd(c *connection) *cobra.Command {
	return &cobra.Command{
		Use: "add ID", Short: "Make a broker a voter", Args: exactArgs(1, "a node id"),
		Long:    "Make a broker that runs and follows the metadata a voter. Go from one odd number to the next: an even number of voters\nsurvives no more losses than one fewer.",
		Example: "  varve quorum add 4\n  varve quorum add 5",
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.changeQuorum(cmd, args[0], func(ctx context.Context, cl *kgo.Client, id int32) error {
				req := kmsg.NewPtrAddRaftVoterRequest()
				req.VoterID, req.TimeoutMillis = id, 10_000
				resp, err := req.RequestWith(ctx, cl)
				if err != nil {
					return err
				}
				return refusal(resp.ErrorCode, resp.ErrorMessage)
			})
		},
	}
}

func quorumRemove(c *connection) *cobra.Command {
	return &cobra.Command{
		Use: "remove ID", Short: "Make a voter one no more", Args: exactArgs(1, "a node id"),
		Long:    "Make a voter one no more. As a broker it stays and follows the metadata; to be rid of that too, drain and unregister it.",
		Example: "  varve quorum remove 2",
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.changeQuorum(cmd, args[0], func(ctx context.Context, cl *kgo.Client, id int32) error {
				req := kmsg.NewPtrRemoveRaftVoterRequest()
				req.VoterID = id
				resp, err := req.RequestWith(ctx, cl)
				if err != nil {
					return err
				}
				return refusal(resp.ErrorCode, resp.ErrorMessage)
			})
		},
	}
}

// changeQuorum makes one change of the voters and tells what they are then.
func (c *connection) changeQuorum(cmd *cobra.Command, arg string, change func(context.Context, *kgo.Client, int32) error) error {
	id, err := nodeID(arg)
	if err != nil {
		return err
	}
	cl, err := c.client(cmd.Context())
	if err != nil {
		return err
	}
	defer cl.Close()
	ctx, cancel := context.WithTimeout(cmd.Context(), 30*time.Second)
	defer cancel()
	if err := change(ctx, cl, id); err != nil {
		return err
	}
	var q *quorumStatus
	// A leader that removed itself has a successor in a moment.
	if err := awaitDone(ctx, func(ctx context.Context) (_ bool, err error) {
		q, err = askQuorum(ctx, cl)
		return err == nil, err
	}); err != nil {
		return fmt.Errorf("the change was made, but the quorum does not answer since: %w", err)
	}
	if why := q.warning(); why != "" {
		fmt.Fprintln(cmd.ErrOrStderr(), "warning:", why)
	}
	return c.print(cmd, q, func(w io.Writer) { fmt.Fprintf(w, "the voters are %s\n", q.voters()) })
}
