package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/varve-io/varve/internal/broker"
	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/quorum"
)

// recovery is what quorum recover prints.
type recovery struct {
	ClusterID string       `json:"clusterId"`
	Node      int32        `json:"node"`
	Term      uint64       `json:"term"`
	Index     uint64       `json:"index"`
	Voters    []quorumNode `json:"voters"`
	Observers []quorumNode `json:"observers"`
	Topics    int          `json:"topics"`
	Recovered bool         `json:"recovered"`
}

func quorumRecover(c *connection) *cobra.Command {
	var dir string
	var yes bool
	cmd := &cobra.Command{
		Use: "recover", Short: "Make a node the only voter, after a majority of the voters was lost for good", Args: noArgs,
		Long: `Make a node the only voter, after a majority of the voters was lost for good. It works on the folder of a node that does not run,
a voter's or another's, and asks nobody: what only the lost voters knew is lost.

  1. Stop every node that is left.
  2. On each, run this without --yes, which changes nothing. Take the node with the greatest term, and the greatest index
     if terms are equal.
  3. There, run it with --yes. Start that node, then the others; lost ones come back with their ids and empty folders.
  4. Give votes back: varve quorum add ID.

Lost voters must never be started with their old folders: they would go on as the quorum that they were.`,
		Example: "  varve quorum recover --dir /data/varve\n  varve quorum recover --dir /data/varve --yes",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.recoverQuorum(cmd, dir, yes)
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "varve-data", "data directory of the stopped node")
	cmd.Flags().BoolVar(&yes, "yes", false, "do it; without, the command only tells what the node has")
	return cmd
}

func (c *connection) recoverQuorum(cmd *cobra.Command, dir string, yes bool) error {
	defaults, err := config.Broker.NewValues(nil)
	if err != nil {
		return err
	}
	node, err := broker.OpenStopped(dir, newLogger(defaults, cmd.ErrOrStderr()))
	if err != nil {
		return err
	}
	defer node.Close()
	found, err := node.Quorum()
	if err != nil {
		return err
	}
	if yes {
		if err := allStopped(cmd.Context(), node.NodeID, found.Members); err != nil {
			return err
		}
		if found, err = node.RecoverQuorum(); err != nil {
			return err
		}
	}
	r := recovery{ClusterID: node.ClusterID, Node: node.NodeID, Term: found.Term, Index: found.Index, Voters: []quorumNode{}, Observers: []quorumNode{}, Topics: len(found.Image.Topics), Recovered: yes}
	for _, m := range found.Members {
		if m.Voter {
			r.Voters = append(r.Voters, quorumNode{m.ID, m.Address})
		} else {
			r.Observers = append(r.Observers, quorumNode{m.ID, m.Address})
		}
	}
	return c.print(cmd, r, func(w io.Writer) {
		fmt.Fprintf(w, "cluster %s, node %d: term %d, index %d, %d topics\n", r.ClusterID, r.Node, r.Term, r.Index, r.Topics)
		printNodes(w, -1, r.Voters, r.Observers)
		if yes {
			fmt.Fprintf(w, "node %d is the only voter now: start it, then the others, and give back votes with varve quorum add ID\n", r.Node)
		} else {
			fmt.Fprintln(w, "nothing was changed: on the node with the greatest term and index, run this with --yes")
		}
	})
}

// allStopped finds members that still answer: they would go on from what the recovered node may not have.
func allStopped(ctx context.Context, self int32, members []quorum.Member) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	running := make([]error, len(members))
	var all sync.WaitGroup
	for i, m := range members {
		if m.ID == self {
			continue
		}
		all.Go(func() {
			if conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", m.Address); err == nil {
				conn.Close()
				running[i] = fmt.Errorf("node %d answers at %s: stop every node first", m.ID, m.Address)
			}
		})
	}
	all.Wait()
	return errors.Join(running...)
}
