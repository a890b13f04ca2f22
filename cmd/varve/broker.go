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

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/tierinfo"
)

// drainKey is the broker config that moves everything off a broker.
const drainKey = "varve.broker.drain"

func brokerCommand() *cobra.Command {
	c := &connection{}
	cmd := &cobra.Command{Use: "broker", Short: "List, drain and unregister brokers"}
	c.flags(cmd)
	cmd.AddCommand(brokerList(c), brokerDrain(c), brokerUnregister(c))
	return cmd
}

// brokerRow is a broker of broker ls.
type brokerRow struct {
	ID         int32  `json:"id"`
	Address    string `json:"address"`
	Rack       string `json:"rack"`
	Fenced     bool   `json:"fenced"`
	Draining   bool   `json:"draining"` // false too if a fenced broker cannot be asked
	Leaders    int    `json:"leaders"`
	Replicas   int    `json:"replicas"`
	LocalBytes int64  `json:"localBytes"` // -1 if it did not answer
	Error      string `json:"error,omitempty"`
}

func (r brokerRow) state() string {
	state := "alive"
	switch {
	case r.Fenced:
		state = "fenced"
	case r.Draining && r.Replicas == 0:
		state = "drained"
	case r.Draining:
		state = "draining"
	}
	if r.Error != "" {
		state += ", " + r.Error
	}
	return state
}

func brokerList(c *connection) *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List brokers, those that are down too", Args: noArgs,
		Long: `List brokers, those that are down too. LEADERS and REPLICAS count partitions, LOCAL is what their logs take up on the disk.

STATE is alive; fenced, if the controller has not heard of it; draining or drained, after varve broker drain.`,
		Example: "  varve broker ls\n  varve broker ls --json | jq '.[] | select(.fenced) | .id'",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client(cmd.Context())
			if err != nil {
				return err
			}
			defer cl.Close()
			rows, err := listBrokers(cmd.Context(), cl)
			if err != nil {
				return err
			}
			return c.print(cmd, rows, func(w io.Writer) {
				fmt.Fprintln(w, "BROKER\tADDRESS\tRACK\tSTATE\tLEADERS\tREPLICAS\tLOCAL")
				for _, r := range rows {
					size := "-"
					if r.LocalBytes >= 0 {
						size = bytesText(r.LocalBytes)
					}
					fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%d\t%d\t%s\n", r.ID, r.Address, cmp.Or(r.Rack, "-"), r.state(), r.Leaders, r.Replicas, size)
				}
			})
		},
	}
}

func listBrokers(ctx context.Context, cl *kgo.Client) ([]brokerRow, error) {
	req := kmsg.NewPtrDescribeClusterRequest()
	req.EndpointType, req.IncludeFencedBrokers = 1, true
	answer, err := askAny(ctx, cl, req)
	if err != nil {
		return nil, err
	}
	cluster := answer.(*kmsg.DescribeClusterResponse)
	if err := refusal(cluster.ErrorCode, cluster.ErrorMessage); err != nil {
		return nil, err
	}
	meta, err := askMetadata(ctx, cl, nil)
	if err != nil {
		return nil, err
	}
	sizes, err := askReplicas(ctx, cl, nil, tierinfo.Summary)
	if err != nil {
		return nil, err
	}
	leaders, replicas, local := map[int32]int{}, map[int32]int{}, map[int32]int64{}
	for _, t := range meta.Topics {
		for _, p := range t.Partitions {
			leaders[p.Leader]++
			for _, id := range p.Replicas {
				replicas[id]++
			}
		}
	}
	for _, r := range sizes.rows {
		local[r.Broker] += r.Size
	}
	rows := []brokerRow{}
	adm := kadm.NewClient(cl)
	for _, b := range cluster.Brokers {
		r := brokerRow{ID: b.NodeID, Address: net.JoinHostPort(b.Host, strconv.Itoa(int(b.Port))), Fenced: b.IsFenced, Leaders: leaders[b.NodeID], Replicas: replicas[b.NodeID], LocalBytes: -1}
		if b.Rack != nil {
			r.Rack = *b.Rack
		}
		if err, silent := sizes.silent[b.NodeID]; silent {
			r.Error = fmt.Sprintf("does not answer: %v", err)
		} else if !b.IsFenced {
			r.LocalBytes = local[b.NodeID]
			r.Draining = isDraining(ctx, adm, b.NodeID)
		}
		rows = append(rows, r)
	}
	slices.SortFunc(rows, func(a, b brokerRow) int { return cmp.Compare(a.ID, b.ID) })
	return rows, nil
}

// isDraining asks a broker; one that does not answer is not called draining.
func isDraining(ctx context.Context, adm *kadm.Client, id int32) bool {
	short, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	configs, err := adm.DescribeBrokerConfigs(short, id)
	if err != nil {
		return false
	}
	for _, r := range configs {
		for _, k := range r.Configs {
			if k.Key == drainKey && k.MaybeValue() == "true" {
				return true
			}
		}
	}
	return false
}

func brokerDrain(c *connection) *cobra.Command {
	var cancel, noWait bool
	cmd := &cobra.Command{
		Use: "drain ID", Short: "Move all replicas off a broker", Args: exactArgs(1, "a broker id"),
		Long: `Move all replicas off a broker and place none on it, and wait until it has none. Producers and consumers go on meanwhile.
An interrupted wait does not stop the draining. Afterwards stop the broker and unregister it, or bring it back with --cancel.`,
		Example: "  varve broker drain 4\n  varve broker drain 4 --cancel",
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := nodeID(args[0])
			if err != nil {
				return err
			}
			if cancel && noWait {
				return usageError{errors.New("--cancel waits for nothing: leave out --no-wait")}
			}
			ctx := cmd.Context()
			cl, err := c.client(ctx)
			if err != nil {
				return err
			}
			defer cl.Close()
			if err := setDraining(ctx, cl, id, !cancel); err != nil {
				return err
			}
			if cancel {
				return c.print(cmd, map[string]any{"broker": id, "draining": false}, func(w io.Writer) {
					fmt.Fprintf(w, "broker %d is not drained any more; what has moved stays where it is\n", id)
				})
			}
			left, err := replicasOn(ctx, cl, id)
			if err == nil && left > 0 && !noWait {
				bar := newBar(int64(left), "replicas")
				total := left
				err = awaitDone(ctx, func(ctx context.Context) (bool, error) {
					n, err := replicasOn(ctx, cl, id)
					if err != nil {
						return false, err
					}
					left = n
					bar.set(int64(max(total-left, 0)))
					return left == 0, nil
				})
				bar.close()
			}
			if err != nil {
				return fmt.Errorf("broker %d is being drained, %d replicas are left: %w", id, left, err)
			}
			return c.print(cmd, map[string]any{"broker": id, "draining": true, "replicas": left}, func(w io.Writer) {
				if left > 0 {
					fmt.Fprintf(w, "broker %d is being drained, %d replicas are left\n", id, left)
				} else {
					fmt.Fprintf(w, "broker %d holds no replicas: it may be stopped and unregistered\n", id)
				}
			})
		},
	}
	cmd.Flags().BoolVar(&cancel, "cancel", false, "stop draining, and let the broker have replicas again")
	cmd.Flags().BoolVar(&noWait, "no-wait", false, "return at once")
	return cmd
}

// setDraining asks any broker: the one that is drained may be down.
func setDraining(ctx context.Context, cl *kgo.Client, id int32, draining bool) error {
	req := kmsg.NewPtrIncrementalAlterConfigsRequest()
	r := kmsg.NewIncrementalAlterConfigsRequestResource()
	r.ResourceType, r.ResourceName = kmsg.ConfigResourceTypeBroker, strconv.Itoa(int(id))
	k := kmsg.NewIncrementalAlterConfigsRequestResourceConfig()
	k.Name, k.Op = drainKey, kmsg.IncrementalAlterConfigOpDelete
	if draining {
		k.Op, k.Value = kmsg.IncrementalAlterConfigOpSet, kmsg.StringPtr("true")
	}
	r.Configs = append(r.Configs, k)
	req.Resources = append(req.Resources, r)
	alive, err := askMetadata(ctx, cl, []kmsg.MetadataRequestTopic{})
	if err != nil {
		return err
	}
	answer, err := cl.Broker(int(alive.ControllerID)).RetriableRequest(ctx, req)
	if err != nil {
		return err
	}
	for _, r := range answer.(*kmsg.IncrementalAlterConfigsResponse).Resources {
		if err := refusal(r.ErrorCode, r.ErrorMessage); err != nil {
			return err
		}
	}
	return nil
}

// replicasOn counts the partitions that have a replica on a broker.
func replicasOn(ctx context.Context, cl *kgo.Client, id int32) (int, error) {
	meta, err := askMetadata(ctx, cl, nil)
	if err != nil {
		return 0, err
	}
	n := 0
	for _, t := range meta.Topics {
		for _, p := range t.Partitions {
			if slices.Contains(p.Replicas, id) {
				n++
			}
		}
	}
	return n, nil
}

func brokerUnregister(c *connection) *cobra.Command {
	return &cobra.Command{
		Use: "unregister ID", Short: "Forget a broker that is stopped for good", Args: exactArgs(1, "a broker id"),
		Long:    "Forget a broker that is stopped for good and holds no replicas. It is refused while the broker runs or is in replica lists.",
		Example: "  varve broker drain 4 && ssh broker4 systemctl stop varve && varve broker unregister 4",
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := nodeID(args[0])
			if err != nil {
				return err
			}
			cl, err := c.client(cmd.Context())
			if err != nil {
				return err
			}
			defer cl.Close()
			if q, err := askQuorum(cmd.Context(), cl); err == nil && slices.ContainsFunc(q.Voters, func(v quorumNode) bool { return v.ID == id }) {
				return fmt.Errorf("node %d is a voter of the quorum: varve quorum remove %d first", id, id)
			}
			req := kmsg.NewPtrUnregisterBrokerRequest()
			req.BrokerID = id
			resp, err := req.RequestWith(cmd.Context(), cl)
			if err != nil {
				return err
			}
			if err := refusal(resp.ErrorCode, resp.ErrorMessage); err != nil {
				return err
			}
			return c.print(cmd, map[string]any{"unregistered": id}, func(w io.Writer) { fmt.Fprintf(w, "broker %d is unregistered\n", id) })
		},
	}
}
