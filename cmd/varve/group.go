package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kadm"
)

func groupCommand() *cobra.Command {
	c := &connection{}
	cmd := &cobra.Command{Use: "group", Short: "List, describe, reset and delete consumer groups"}
	c.flags(cmd)
	cmd.AddCommand(groupList(c), groupDescribe(c), groupReset(c), groupDelete(c))
	return cmd
}

func groupList(c *connection) *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List groups", Args: noArgs, Example: "  varve group ls",
		RunE: func(cmd *cobra.Command, _ []string) error {
			adm, err := c.admin(cmd.Context())
			if err != nil {
				return err
			}
			defer adm.Close()
			groups, err := adm.ListGroups(cmd.Context())
			if err != nil {
				return err
			}
			type row struct {
				Group    string `json:"group"`
				Type     string `json:"type"`
				State    string `json:"state"`
				Protocol string `json:"protocolType"`
			}
			rows := []row{}
			for _, g := range groups.Sorted() {
				rows = append(rows, row{g.Group, g.GroupType, g.State, g.ProtocolType})
			}
			return c.print(cmd, rows, func(w io.Writer) {
				fmt.Fprintln(w, "GROUP\tTYPE\tSTATE\tPROTOCOL")
				for _, r := range rows {
					fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", r.Group, r.Type, r.State, r.Protocol)
				}
			})
		},
	}
}

func groupDescribe(c *connection) *cobra.Command {
	return &cobra.Command{
		Use: "describe GROUP", Short: "Show a group's members, assignments, offsets and lag", Args: exactArgs(1, "a group"), Example: "  varve group describe billing",
		RunE: func(cmd *cobra.Command, args []string) error {
			adm, err := c.admin(cmd.Context())
			if err != nil {
				return err
			}
			defer adm.Close()
			if v, ok, err := describeConsumerGroup(cmd.Context(), adm, args[0]); ok || err != nil {
				if err != nil {
					return err
				}
				return c.print(cmd, v, v.print)
			}
			lags, err := adm.Lag(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			g := lags[args[0]]
			if err := g.Error(); err != nil {
				return fmt.Errorf("group %s: %w", args[0], err)
			}
			if g.State == "Dead" {
				return fmt.Errorf("group %s does not exist", args[0])
			}
			out := &groupView{Group: g.Group, Type: "classic", State: g.State, Members: len(g.Members), Lag: g.Lag.Total(), Rows: []groupRow{}}
			for _, l := range g.Lag.Sorted() {
				r := groupRow{Topic: l.Topic, Partition: l.Partition, Committed: l.Commit.At, End: l.End.Offset, Lag: l.Lag}
				if l.Member != nil {
					r.Member, r.Host = l.Member.MemberID, l.Member.ClientHost
				}
				if l.Err != nil {
					r.Error = l.Err.Error()
				}
				out.Rows = append(out.Rows, r)
			}
			return c.print(cmd, out, out.print)
		},
	}
}

func groupReset(c *connection) *cobra.Command {
	var topics []string
	var to string
	var dry bool
	cmd := &cobra.Command{
		Use: "reset GROUP --topic T --to WHERE", Short: "Move a group's committed offsets", Args: exactArgs(1, "a group"),
		Long: "Move a group's committed offsets. The group must have no members. WHERE is one of:\n" + whereForms,
		Example: `  varve group reset billing --topic orders --to start --dry-run
  varve group reset billing --topic orders --to @2026-01-31T12:00:00Z`,
		RunE: func(cmd *cobra.Command, args []string) error {
			w, err := parseWhere(to)
			if err != nil {
				return err
			}
			adm, err := c.admin(cmd.Context())
			if err != nil {
				return err
			}
			defer adm.Close()
			if err := refuseActive(cmd.Context(), adm, args[0]); err != nil {
				return err
			}
			before, err := adm.FetchOffsets(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			target, notes, err := w.offsets(cmd.Context(), adm, topics)
			if err != nil {
				return err
			}
			for _, n := range notes {
				fmt.Fprintln(cmd.ErrOrStderr(), "note:", n)
			}
			if !dry {
				commit := make(kadm.Offsets)
				target.Each(func(o kadm.ListedOffset) { commit.AddOffset(o.Topic, o.Partition, o.Offset, -1) })
				if err := adm.CommitAllOffsets(cmd.Context(), args[0], commit); err != nil {
					return fmt.Errorf("group %s: %w", args[0], err)
				}
			}
			type row struct {
				Topic     string `json:"topic"`
				Partition int32  `json:"partition"`
				Before    int64  `json:"before"`
				After     int64  `json:"after"`
			}
			rows := []row{}
			for _, o := range sortedOffsets(target) {
				r := row{o.Topic, o.Partition, -1, o.Offset}
				if b, ok := before.Lookup(o.Topic, o.Partition); ok {
					r.Before = b.At
				}
				rows = append(rows, r)
			}
			return c.print(cmd, rows, func(w io.Writer) {
				fmt.Fprintln(w, "TOPIC\tPARTITION\tBEFORE\tAFTER")
				for _, r := range rows {
					fmt.Fprintf(w, "%s\t%d\t%d\t%d\n", r.Topic, r.Partition, r.Before, r.After)
				}
				if dry {
					fmt.Fprintln(w, "nothing was changed: --dry-run")
				}
			})
		},
	}
	cmd.Flags().StringArrayVar(&topics, "topic", nil, "topic whose offsets move; may be repeated")
	cmd.Flags().StringVar(&to, "to", "", "where to")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "only show what would happen")
	_ = cmd.MarkFlagRequired("topic")
	_ = cmd.MarkFlagRequired("to")
	return cmd
}

// refuseActive says who is still consuming, where the broker would only say "unknown member".
func refuseActive(ctx context.Context, adm *kadm.Client, group string) error {
	var active []string
	if v, ok, err := describeConsumerGroup(ctx, adm, group); err != nil {
		return err
	} else if ok {
		for _, m := range v.Consumers {
			active = append(active, m.Host)
		}
	} else {
		described, err := adm.DescribeGroups(ctx, group)
		if err != nil {
			return err
		}
		for _, m := range described[group].Members {
			active = append(active, m.ClientHost)
		}
	}
	if len(active) == 0 {
		return nil
	}
	hosts := map[string]bool{}
	var list []string
	for _, host := range active {
		if !hosts[host] {
			hosts[host] = true
			list = append(list, strings.TrimPrefix(host, "/"))
		}
	}
	return fmt.Errorf("group %s has %d active members (hosts %s): stop them first", group, len(active), strings.Join(list, ", "))
}

func groupDelete(c *connection) *cobra.Command {
	return &cobra.Command{
		Use: "delete GROUP…", Short: "Delete groups and their offsets", Example: "  varve group delete billing",
		Args: someArgs("group"),
		RunE: func(cmd *cobra.Command, args []string) error {
			adm, err := c.admin(cmd.Context())
			if err != nil {
				return err
			}
			defer adm.Close()
			results, err := adm.DeleteGroups(cmd.Context(), args...)
			if err != nil {
				return err
			}
			return c.printDeleted(cmd, args, func(name string) error { return results[name].Err })
		},
	}
}
