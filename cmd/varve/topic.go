package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/varve-io/varve/internal/tp"
)

func topicCommand() *cobra.Command {
	c := &connection{}
	cmd := &cobra.Command{Use: "topic", Short: "Create, list, describe, alter and delete topics"}
	c.flags(cmd)
	cmd.AddCommand(topicCreate(c), topicList(c), topicDescribe(c), topicAlter(c), topicGrow(c), topicDelete(c))
	return cmd
}

func topicCreate(c *connection) *cobra.Command {
	var partitions int32
	var replicas int16
	var configs []string
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Create a topic", Args: exactArgs(1, "a topic name"),
		Example: "  varve topic create orders -p 6\n  varve topic create history -c remote.storage.enable=true -c local.retention.ms=3600000",
		RunE: func(cmd *cobra.Command, args []string) error {
			set, err := pairs(configs)
			if err != nil {
				return err
			}
			adm, err := c.admin(cmd.Context())
			if err != nil {
				return err
			}
			defer adm.Close()
			r, err := adm.CreateTopic(cmd.Context(), partitions, replicas, set, args[0])
			if err != nil {
				return said(err, r.ErrMessage)
			}
			if v := set["min.insync.replicas"]; v != nil && *v > fmt.Sprint(r.ReplicationFactor) && len(*v) == 1 {
				fmt.Fprintf(cmd.ErrOrStderr(), "warning: min.insync.replicas=%s is above the number of replicas, %d, which is what counts\n", *v, r.ReplicationFactor)
			}
			return c.print(cmd, map[string]any{"topic": r.Topic, "id": tp.UUID(r.ID).String(), "partitions": r.NumPartitions, "replicas": r.ReplicationFactor}, func(w io.Writer) {
				fmt.Fprintf(w, "created %s with %d partitions, %d replicas\n", r.Topic, r.NumPartitions, r.ReplicationFactor)
			})
		},
	}
	cmd.Flags().Int32VarP(&partitions, "partitions", "p", -1, "number of partitions; -1 takes the broker's num.partitions")
	cmd.Flags().Int16VarP(&replicas, "replicas", "r", -1, "replicas of each; -1 takes the broker's default.replication.factor")
	cmd.Flags().StringArrayVarP(&configs, "config", "c", nil, "topic config, KEY=VALUE; may be repeated")
	return cmd
}

// said puts the broker's own words in front of an error code's.
func said(err error, message string) error {
	if message == "" {
		return err
	}
	return fmt.Errorf("%s (%w)", message, err)
}

func topicList(c *connection) *cobra.Command {
	var internal bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List topics", Args: noArgs,
		Example: "  varve topic ls\n  varve topic ls --json | jq -r .topic",
		RunE: func(cmd *cobra.Command, _ []string) error {
			adm, err := c.admin(cmd.Context())
			if err != nil {
				return err
			}
			defer adm.Close()
			topics, err := adm.ListTopicsWithInternal(cmd.Context())
			if err != nil {
				return err
			}
			broken := 0
			type row struct {
				Topic      string `json:"topic"`
				Partitions int    `json:"partitions"`
				Replicas   int    `json:"replicas"`
				Broken     int    `json:"leaderless"`
			}
			var rows []row
			for _, t := range topics.Sorted() {
				if t.IsInternal && !internal {
					continue
				}
				r := row{Topic: t.Topic, Partitions: len(t.Partitions), Replicas: t.Partitions.NumReplicas()}
				for _, p := range t.Partitions {
					if p.Leader < 0 || p.Err != nil {
						r.Broken++
					}
				}
				if r.Broken > 0 {
					broken++
				}
				rows = append(rows, r)
			}
			err = c.print(cmd, rows, func(w io.Writer) {
				fmt.Fprintln(w, "TOPIC\tPARTITIONS\tREPLICAS\tSTATE")
				for _, r := range rows {
					state := "ok"
					if r.Broken > 0 {
						state = fmt.Sprintf("%d without a leader", r.Broken)
					}
					fmt.Fprintf(w, "%s\t%d\t%d\t%s\n", r.Topic, r.Partitions, r.Replicas, state)
				}
			})
			if err == nil && broken > 0 {
				err = fmt.Errorf("%d topics have partitions without a leader", broken)
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&internal, "internal", false, "show the cluster's own topics too")
	return cmd
}

// describedTopic is what topic describe prints.
type describedTopic struct {
	Topic      string               `json:"topic"`
	ID         string               `json:"id"`
	Configs    map[string]string    `json:"configs"` // set on the topic
	Partitions []describedPartition `json:"partitions"`
}

type describedPartition struct {
	Partition   int32   `json:"partition"`
	Leader      int32   `json:"leader"`
	LeaderEpoch int32   `json:"leaderEpoch"`
	Replicas    []int32 `json:"replicas"`
	ISR         []int32 `json:"isr"`
	Start       int64   `json:"logStartOffset"`
	End         int64   `json:"endOffset"`
	Error       string  `json:"error,omitempty"`
}

func topicDescribe(c *connection) *cobra.Command {
	return &cobra.Command{
		Use: "describe NAME", Short: "Show a topic's configs, partitions and offsets", Args: exactArgs(1, "a topic name"),
		Example: "  varve topic describe orders",
		RunE: func(cmd *cobra.Command, args []string) error {
			adm, err := c.admin(cmd.Context())
			if err != nil {
				return err
			}
			defer adm.Close()
			d, err := describeTopic(cmd.Context(), adm, args[0])
			if err != nil {
				return err
			}
			return c.print(cmd, d, func(w io.Writer) {
				fmt.Fprintf(w, "topic %s, id %s\n", d.Topic, d.ID)
				keys := make([]string, 0, len(d.Configs))
				for k := range d.Configs {
					keys = append(keys, k)
				}
				slices.Sort(keys)
				for _, k := range keys {
					fmt.Fprintf(w, "  %s=%s\n", k, d.Configs[k])
				}
				fmt.Fprintln(w, "PARTITION\tLEADER\tEPOCH\tREPLICAS\tISR\tSTART\tEND\tERROR")
				for _, p := range d.Partitions {
					fmt.Fprintf(w, "%d\t%d\t%d\t%v\t%v\t%d\t%d\t%s\n", p.Partition, p.Leader, p.LeaderEpoch, p.Replicas, p.ISR, p.Start, p.End, p.Error)
				}
			})
		},
	}
}

func describeTopic(ctx context.Context, adm *kadm.Client, name string) (*describedTopic, error) {
	topics, err := adm.ListTopicsWithInternal(ctx, name)
	if err != nil {
		return nil, err
	}
	t, ok := topics[name]
	if !ok || t.Err != nil {
		return nil, fmt.Errorf("topic %s: %w", name, cmp.Or(t.Err, errors.New("not found")))
	}
	d := &describedTopic{Topic: name, ID: tp.UUID(t.ID).String(), Configs: map[string]string{}}
	starts, err := adm.ListStartOffsets(ctx, name)
	if err != nil {
		return nil, err
	}
	ends, err := adm.ListEndOffsets(ctx, name)
	if err != nil {
		return nil, err
	}
	for _, p := range t.Partitions.Sorted() {
		row := describedPartition{Partition: p.Partition, Leader: p.Leader, LeaderEpoch: p.LeaderEpoch, Replicas: p.Replicas, ISR: p.ISR, Start: -1, End: -1}
		if o, ok := starts.Lookup(name, p.Partition); ok && o.Err == nil {
			row.Start = o.Offset
		}
		if o, ok := ends.Lookup(name, p.Partition); ok && o.Err == nil {
			row.End = o.Offset
		}
		if p.Err != nil {
			row.Error = p.Err.Error()
		}
		d.Partitions = append(d.Partitions, row)
	}
	configs, err := adm.DescribeTopicConfigs(ctx, name)
	if err != nil {
		return nil, err
	}
	for _, r := range configs {
		for _, k := range r.Configs {
			if k.Source.String() == "DYNAMIC_TOPIC_CONFIG" {
				d.Configs[k.Key] = k.MaybeValue()
			}
		}
	}
	return d, nil
}

func topicAlter(c *connection) *cobra.Command {
	var set, del []string
	cmd := &cobra.Command{
		Use: "alter NAME", Short: "Change single configs of a topic; the others stay", Args: exactArgs(1, "a topic name"),
		Example: "  varve topic alter history --set local.retention.ms=60000 --delete retention.bytes",
		RunE: func(cmd *cobra.Command, args []string) error {
			values, err := pairs(set)
			if err != nil {
				return err
			}
			var changes []kadm.AlterConfig
			for k, v := range values {
				changes = append(changes, kadm.AlterConfig{Op: kadm.SetConfig, Name: k, Value: v})
			}
			for _, k := range del {
				changes = append(changes, kadm.AlterConfig{Op: kadm.DeleteConfig, Name: k})
			}
			if len(changes) == 0 {
				return usageError{errors.New("nothing to change: give --set KEY=VALUE or --delete KEY")}
			}
			slices.SortFunc(changes, func(a, b kadm.AlterConfig) int { return strings.Compare(a.Name, b.Name) })
			adm, err := c.admin(cmd.Context())
			if err != nil {
				return err
			}
			defer adm.Close()
			results, err := adm.AlterTopicConfigs(cmd.Context(), changes, args[0])
			if err != nil {
				return err
			}
			r, err := results.On(args[0], nil)
			if err == nil {
				err = r.Err
			}
			if err != nil {
				return said(err, r.ErrMessage)
			}
			return c.print(cmd, map[string]any{"topic": args[0], "changed": len(changes)}, func(w io.Writer) { fmt.Fprintf(w, "altered %s\n", args[0]) })
		},
	}
	cmd.Flags().StringArrayVar(&set, "set", nil, "KEY=VALUE; may be repeated")
	cmd.Flags().StringArrayVar(&del, "delete", nil, "KEY to set back to its default; may be repeated")
	return cmd
}

func topicGrow(c *connection) *cobra.Command {
	var to int
	cmd := &cobra.Command{
		Use: "grow NAME --to N", Short: "Add partitions to a topic", Args: exactArgs(1, "a topic name"),
		Example: "  varve topic grow orders --to 12",
		RunE: func(cmd *cobra.Command, args []string) error {
			adm, err := c.admin(cmd.Context())
			if err != nil {
				return err
			}
			defer adm.Close()
			results, err := adm.UpdatePartitions(cmd.Context(), to, args[0])
			if err != nil {
				return err
			}
			r := results[args[0]]
			if r.Err != nil {
				return said(r.Err, r.ErrMessage)
			}
			return c.print(cmd, map[string]any{"topic": args[0], "partitions": to}, func(w io.Writer) { fmt.Fprintf(w, "%s has %d partitions\n", args[0], to) })
		},
	}
	cmd.Flags().IntVar(&to, "to", 0, "number of partitions in all")
	_ = cmd.MarkFlagRequired("to")
	return cmd
}

func topicDelete(c *connection) *cobra.Command {
	return &cobra.Command{
		Use: "delete NAME…", Short: "Delete topics, their records in the bucket included", Args: someArgs("topic name"),
		Example: "  varve topic delete orders",
		RunE: func(cmd *cobra.Command, args []string) error {
			adm, err := c.admin(cmd.Context())
			if err != nil {
				return err
			}
			defer adm.Close()
			results, err := adm.DeleteTopics(cmd.Context(), args...)
			if err != nil {
				return err
			}
			return c.printDeleted(cmd, args, func(name string) error {
				if r := results[name]; r.Err != nil {
					return said(r.Err, r.ErrMessage)
				}
				return nil
			})
		},
	}
}
