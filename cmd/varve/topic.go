package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/varve-io/varve/internal/tp"
)

func topicCommand() *cobra.Command {
	c := &connection{}
	cmd := &cobra.Command{Use: "topic", Short: "Create, list, describe, alter, move and delete topics"}
	c.flags(cmd)
	cmd.AddCommand(topicCreate(c), topicList(c), topicDescribe(c), topicAlter(c), topicGrow(c), topicReassign(c), topicElect(c), topicDelete(c))
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
			if known := r.Configs["min.insync.replicas"]; known.Value != nil {
				if n, err := strconv.Atoi(*known.Value); err == nil && n > int(r.ReplicationFactor) {
					fmt.Fprintf(cmd.ErrOrStderr(), "warning: min.insync.replicas=%d is above the number of replicas, %d, which is what counts\n", n, r.ReplicationFactor)
				}
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

// said puts the broker's own words in place of an error code's, which are for whoever writes clients.
func said(err error, message string) error {
	if message == "" {
		return err
	}
	return saidError{message, err}
}

type saidError struct {
	message string
	err     error
}

func (e saidError) Error() string {
	var code *kerr.Error
	if errors.As(e.err, &code) {
		return fmt.Sprintf("%s (%s)", e.message, code.Message)
	}
	return fmt.Sprintf("%s (%v)", e.message, e.err)
}

func (e saidError) Unwrap() error { return e.err }

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
