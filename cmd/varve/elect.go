package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
)

func topicElect(c *connection) *cobra.Command {
	var partitions []int32
	var unclean bool
	cmd := &cobra.Command{
		Use: "elect NAME", Short: "Elect leaders of a topic's partitions", Args: exactArgs(1, "a topic name"),
		Long: `Elect leaders of a topic's partitions: the preferred ones, which are the first replicas, where they are in sync.

With --unclean it makes leaders where there are none. Nobody who is in sync can lead those: all are down, or the last one came back
with an empty disk. The first replica that runs becomes the leader, before those that lost their disks, and what only the lost
ones had is gone. So bring back first whoever may have more.

Exit code 1 if a partition that wants a leader did not get one.`,
		Example: "  varve topic elect orders\n  varve topic elect orders --unclean --partition 3",
		RunE: func(cmd *cobra.Command, args []string) error {
			adm, err := c.admin(cmd.Context())
			if err != nil {
				return err
			}
			defer adm.Close()
			t, err := findTopic(cmd.Context(), adm, args[0])
			if err != nil {
				return err
			}
			if len(partitions) == 0 {
				partitions = t.Partitions.Numbers()
			}
			var set kadm.TopicsSet
			set.Add(args[0], partitions...)
			how := kadm.ElectPreferredReplica
			if unclean {
				how = kadm.ElectLiveReplica
			}
			results, err := adm.ElectLeaders(cmd.Context(), how, set)
			if err != nil {
				return err
			}
			return c.printElected(cmd, args[0], results[args[0]])
		},
	}
	cmd.Flags().Int32SliceVar(&partitions, "partition", nil, "partitions, all if none is given; may be repeated")
	cmd.Flags().BoolVar(&unclean, "unclean", false, "make leaders where there are none, of replicas that may lack records")
	return cmd
}

func (c *connection) printElected(cmd *cobra.Command, topic string, results map[int32]kadm.ElectLeadersResult) error {
	elected := []int32{}
	var failed error
	for _, p := range sortedKeys(results) {
		switch r := results[p]; {
		case r.Err == nil:
			elected = append(elected, p)
		case !errors.Is(r.Err, kerr.ElectionNotNeeded):
			failed = errors.Join(failed, fmt.Errorf("%s-%d: %w", topic, p, said(r.Err, r.ErrMessage)))
		}
	}
	err := c.print(cmd, map[string]any{"topic": topic, "elected": elected}, func(w io.Writer) {
		if len(elected) == 0 {
			fmt.Fprintln(w, "nothing changed")
			return
		}
		fmt.Fprintf(w, "elected leaders of %s: %s\n", topic, idList(elected))
	})
	return errors.Join(err, failed)
}
