package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kadm"
)

func topicReassign(c *connection) *cobra.Command {
	var to []int32
	var wait, cancel bool
	cmd := &cobra.Command{
		Use: "reassign TOPIC[:PARTITION] --to ID,ID,…", Short: "Move the replicas of a topic to other brokers", Args: exactArgs(1, "a topic, or TOPIC:PARTITION"),
		Long: `Move the replicas of a topic, or of one of its partitions, to other brokers. The new replicas are added, catch up, and only
then the old ones are removed; of a tiered partition they copy only what the bucket does not hold. The first broker of the list
is the preferred leader. For a whole topic the list is turned by one from partition to partition, so that leaders spread.

--cancel goes back to the replicas from before.`,
		Example: `  varve topic reassign orders --to 2,3,4 --wait
  varve topic reassign orders:0 --to 4,2,3
  varve topic reassign orders --cancel`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cancel == (len(to) > 0) {
				return usageError{errors.New("give either --to ID,ID,… or --cancel")}
			}
			topic, only, err := topicPartition(args[0])
			if err != nil {
				return err
			}
			ctx := cmd.Context()
			adm, err := c.admin(ctx)
			if err != nil {
				return err
			}
			defer adm.Close()
			topics, err := adm.ListTopicsWithInternal(ctx, topic)
			if err != nil {
				return err
			}
			t, ok := topics[topic]
			if !ok || t.Err != nil {
				return fmt.Errorf("topic %s does not exist", topic)
			}
			partitions := t.Partitions.Numbers()
			if only >= 0 {
				partitions = []int32{only}
			}
			moves := map[int32][]int32{}
			if cancel {
				// Of a whole topic only that which moves is cancelled; a partition that was named is, or it is said why not.
				if only < 0 {
					var all kadm.TopicsSet
					all.Add(topic, partitions...)
					moving, err := adm.ListPartitionReassignments(ctx, all)
					if err != nil {
						return err
					}
					partitions = nil
					for p := range moving[topic] {
						partitions = append(partitions, p)
					}
					if len(partitions) == 0 {
						return fmt.Errorf("no partition of %s is being reassigned", topic)
					}
				}
				for _, p := range partitions {
					moves[p] = nil
				}
			} else {
				for _, p := range partitions {
					by := 0
					if only < 0 {
						by = int(p) % len(to)
					}
					moves[p] = append(append([]int32{}, to[by:]...), to[:by]...)
				}
			}
			results, err := adm.AlterPartitionAssignments(ctx, kadm.AlterPartitionAssignmentsReq{topic: moves})
			if err != nil {
				return err
			}
			type row struct {
				Topic     string  `json:"topic"`
				Partition int32   `json:"partition"`
				Replicas  []int32 `json:"replicas,omitempty"`
				Error     string  `json:"error,omitempty"`
			}
			rows := []row{}
			var begun kadm.TopicsSet
			var refused error
			for _, r := range results.Sorted() {
				out := row{Topic: r.Topic, Partition: r.Partition, Replicas: moves[r.Partition]}
				if r.Err != nil {
					err := said(r.Err, r.ErrMessage)
					out.Error = err.Error()
					refused = errors.Join(refused, fmt.Errorf("%s-%d: %w", r.Topic, r.Partition, err))
				} else {
					begun.Add(r.Topic, r.Partition)
				}
				rows = append(rows, out)
			}
			if wait && len(begun) > 0 {
				if err := waitReassigned(cmd, adm, begun); err != nil {
					return errors.Join(refused, err)
				}
			}
			err = c.print(cmd, rows, func(w io.Writer) {
				for _, r := range rows {
					switch {
					case r.Error != "":
					case cancel:
						fmt.Fprintf(w, "%s-%d stays where it was\n", r.Topic, r.Partition)
					case wait:
						fmt.Fprintf(w, "%s-%d is on %s\n", r.Topic, r.Partition, idList(r.Replicas))
					default:
						fmt.Fprintf(w, "%s-%d moves to %s\n", r.Topic, r.Partition, idList(r.Replicas))
					}
				}
			})
			return errors.Join(err, refused)
		},
	}
	f := cmd.Flags()
	f.Int32SliceVar(&to, "to", nil, "brokers of the replicas, the preferred leader first")
	f.BoolVar(&wait, "wait", false, "wait until the replicas have moved")
	f.BoolVar(&cancel, "cancel", false, "cancel what is in progress")
	return cmd
}

// topicPartition reads TOPIC or TOPIC:PARTITION; the partition is -1 for all.
func topicPartition(s string) (string, int32, error) {
	topic, index, one := strings.Cut(s, ":")
	if topic == "" {
		return "", 0, usageError{fmt.Errorf("%q names no topic", s)}
	}
	if !one {
		return topic, -1, nil
	}
	n, err := strconv.ParseInt(index, 10, 32)
	if err != nil || n < 0 {
		return "", 0, usageError{fmt.Errorf("%q: want TOPIC:PARTITION", s)}
	}
	return topic, int32(n), nil
}

// waitReassigned returns when none of the partitions is being reassigned.
func waitReassigned(cmd *cobra.Command, adm *kadm.Client, partitions kadm.TopicsSet) error {
	total := 0
	for _, p := range partitions {
		total += len(p)
	}
	bar := newBar(int64(total), "partitions")
	defer bar.close()
	return awaitDone(cmd.Context(), func(ctx context.Context) (bool, error) {
		moving, err := adm.ListPartitionReassignments(ctx, partitions)
		if err != nil {
			return false, err
		}
		left := 0
		for _, p := range moving {
			left += len(p)
		}
		bar.set(int64(total - left))
		return left == 0, nil
	})
}

// awaitDone asks four times a second until the answer is yes. Failures of the moment, while brokers come and go, are borne for as
// long as a broker may take to be replaced.
func awaitDone(ctx context.Context, done func(context.Context) (bool, error)) error {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	var failing time.Time
	for {
		ok, err := done(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil:
			failing = time.Time{}
		case failing.IsZero():
			failing = time.Now()
		case time.Since(failing) > 30*time.Second:
			return err
		}
		if ok && err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
