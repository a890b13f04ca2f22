package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/internal/tierinfo"
	"github.com/varve-io/varve/internal/tp"
)

// describedTopic is what topic describe prints.
type describedTopic struct {
	Topic      string               `json:"topic"`
	ID         string               `json:"id"`
	Configs    map[string]string    `json:"configs"` // set on the topic
	MinISR     int                  `json:"minInsyncReplicas"`
	Partitions []describedPartition `json:"partitions"`
}

type describedPartition struct {
	Partition   int32              `json:"partition"`
	Leader      int32              `json:"leader"` // -1 if there is none
	LeaderEpoch int32              `json:"leaderEpoch"`
	Replicas    []int32            `json:"replicas"`
	ISR         []int32            `json:"isr"`
	Offline     []int32            `json:"offline"`
	Adding      []int32            `json:"adding"`
	Removing    []int32            `json:"removing"`
	MinISR      int                `json:"minInsyncReplicas"` // as it counts: at most the number of replicas
	Start       int64              `json:"logStartOffset"`    // -1 if unknown
	End         int64              `json:"endOffset"`         // -1 if unknown
	Detail      []describedReplica `json:"detail"`
	Error       string             `json:"error,omitempty"`
}

// describedReplica is what a replica itself tells. Offsets are -1 where it was not heard.
type describedReplica struct {
	Broker     int32  `json:"broker"`
	Leader     bool   `json:"leader"`
	InSync     bool   `json:"inSync"`
	LocalStart int64  `json:"localLogStartOffset"`
	End        int64  `json:"logEndOffset"`
	Lag        int64  `json:"lag"` // of its end behind the leader's
	LocalBytes int64  `json:"localBytes"`
	Thin       bool   `json:"thin"` // holds too little locally to be a preferred leader (KIP-1303)
	Phase      string `json:"phase,omitempty"`
	Error      string `json:"error,omitempty"`
}

func topicDescribe(c *connection) *cobra.Command {
	var replicas bool
	cmd := &cobra.Command{
		Use: "describe NAME", Short: "Show a topic's configs, partitions, replicas and offsets", Args: exactArgs(1, "a topic name"),
		Long: `Show a topic's configs, partitions, replicas and offsets.

STATE tells what is out of the ordinary: replicas that are offline, being added or removed, that do not simply fetch, or that
hold little of the log locally (thin), which makes them second choice as leaders; and an ISR below min.insync.replicas, which
refuses writes with acks=all. With --replicas each replica has a line: the offsets that it holds locally, the end not
included, and how far its end is behind the leader's.

Exit code 1 if a partition has no leader.`,
		Example: "  varve topic describe orders\n  varve topic describe history --replicas",
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client(cmd.Context())
			if err != nil {
				return err
			}
			defer cl.Close()
			d, err := describeTopic(cmd.Context(), cl, args[0])
			if err != nil {
				return err
			}
			if err := c.print(cmd, d, func(w io.Writer) { printTopic(w, d, replicas) }); err != nil {
				return err
			}
			var without []string
			for _, p := range d.Partitions {
				if p.Leader < 0 {
					without = append(without, fmt.Sprint(p.Partition))
				}
			}
			if len(without) > 0 {
				return fmt.Errorf("topic %s has partitions without a leader: %s", d.Topic, strings.Join(without, ", "))
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&replicas, "replicas", false, "a line per replica")
	return cmd
}

func printTopic(w io.Writer, d *describedTopic, replicas bool) {
	fmt.Fprintf(w, "topic %s, id %s\n", d.Topic, d.ID)
	for _, k := range sortedKeys(d.Configs) {
		fmt.Fprintf(w, "  %s=%s\n", k, d.Configs[k])
	}
	if len(d.Partitions) > 0 && d.MinISR > len(d.Partitions[0].Replicas) {
		fmt.Fprintf(w, "warning: min.insync.replicas=%d is above the number of replicas, %d, which is what counts\n", d.MinISR, len(d.Partitions[0].Replicas))
	}
	if !replicas {
		fmt.Fprintln(w, "PARTITION\tLEADER\tEPOCH\tREPLICAS\tISR\tSTART\tEND\tSTATE")
		for _, p := range d.Partitions {
			fmt.Fprintf(w, "%d\t%d\t%d\t%v\t%v\t%s\t%s\t%s\n", p.Partition, p.Leader, p.LeaderEpoch, p.Replicas, p.ISR, offsetText(p.Start), offsetText(p.End), p.state())
		}
		return
	}
	fmt.Fprintln(w, "PARTITION\tBROKER\tROLE\tLOCAL\tBYTES\tLAG\tSTATE")
	for _, p := range d.Partitions {
		for _, r := range p.Detail {
			role := "follower"
			if r.Leader {
				role = "leader"
			}
			size, lag := "-", "-"
			if r.LocalBytes >= 0 {
				size, lag = bytesText(r.LocalBytes), fmt.Sprint(r.Lag)
			}
			fmt.Fprintf(w, "%d\t%d\t%s\t%s\t%s\t%s\t%s\n", p.Partition, r.Broker, role, span(r.LocalStart, r.End), size, lag, p.replicaState(r))
		}
		if why := p.state(); p.Leader < 0 || len(p.ISR) < p.MinISR {
			fmt.Fprintf(w, "%d\t\t\t\t\t\t%s\n", p.Partition, why)
		}
	}
}

func offsetText(o int64) string {
	if o < 0 {
		return "-"
	}
	return strconv.FormatInt(o, 10)
}

// state tells in one line what is out of the ordinary, "ok" if nothing is.
func (p describedPartition) state() string {
	var parts []string
	add := func(form string, args ...any) { parts = append(parts, fmt.Sprintf(form, args...)) }
	if p.Error != "" {
		add("%s", p.Error)
	}
	if p.lost() {
		add("the last in sync came back with an empty disk, see varve topic elect --help")
	}
	if len(p.ISR) < p.MinISR {
		add("%d in sync, min.insync.replicas is %d", len(p.ISR), p.MinISR)
	}
	for _, list := range []struct {
		what string
		ids  []int32
	}{{"offline", p.Offline}, {"adding", p.Adding}, {"removing", p.Removing}} {
		if len(list.ids) > 0 {
			add("%s %s", list.what, idList(list.ids))
		}
	}
	var thin []int32
	for _, r := range p.Detail {
		if r.Thin {
			thin = append(thin, r.Broker)
		}
		switch {
		case slices.Contains(p.Offline, r.Broker):
		case r.Error != "":
			add("%d: %s", r.Broker, r.Error)
		case r.Phase != "" && r.Phase != fetching:
			add("%d is %s", r.Broker, r.Phase)
		}
	}
	if len(thin) > 0 {
		add("thin %s", idList(thin))
	}
	if len(parts) == 0 {
		return "ok"
	}
	return strings.Join(parts, "; ")
}

// lost says that no replica is known to have everything: the last one that had came back without its data.
func (p describedPartition) lost() bool { return p.Leader < 0 && len(p.ISR) == 0 }

// fetching is the phase of a follower that does what it should.
const fetching = "Fetching"

func (p describedPartition) replicaState(r describedReplica) string {
	var parts []string
	switch {
	case slices.Contains(p.Offline, r.Broker):
		parts = append(parts, "offline")
	case r.InSync:
		parts = append(parts, "in sync")
	default:
		parts = append(parts, "not in sync")
	}
	if slices.Contains(p.Adding, r.Broker) {
		parts = append(parts, "being added")
	}
	if slices.Contains(p.Removing, r.Broker) {
		parts = append(parts, "being removed")
	}
	if r.Phase != "" && r.Phase != fetching {
		parts = append(parts, r.Phase)
	}
	if r.Thin {
		parts = append(parts, "thin")
	}
	if r.Error != "" && !slices.Contains(p.Offline, r.Broker) {
		parts = append(parts, r.Error)
	}
	return strings.Join(parts, ", ")
}

func idList(ids []int32) string {
	out := make([]string, len(ids))
	for i, id := range ids {
		out[i] = strconv.Itoa(int(id))
	}
	return strings.Join(out, ",")
}

// findTopic is a topic as the cluster knows it, also one of its own.
func findTopic(ctx context.Context, adm *kadm.Client, name string) (kadm.TopicDetail, error) {
	topics, err := adm.ListTopicsWithInternal(ctx, name)
	if err != nil {
		return kadm.TopicDetail{}, err
	}
	t, ok := topics[name]
	if !ok || t.Err != nil {
		return kadm.TopicDetail{}, fmt.Errorf("topic %s: %w", name, cmp.Or(t.Err, errors.New("not found")))
	}
	return t, nil
}

func describeTopic(ctx context.Context, cl *kgo.Client, name string) (*describedTopic, error) {
	adm := kadm.NewClient(cl)
	t, err := findTopic(ctx, adm, name)
	if err != nil {
		return nil, err
	}
	d := &describedTopic{Topic: name, ID: tp.UUID(t.ID).String(), Configs: map[string]string{}, MinISR: 1}
	configs, err := adm.DescribeTopicConfigs(ctx, name)
	if err != nil {
		return nil, err
	}
	for _, r := range configs {
		for _, k := range r.Configs {
			if k.Source.String() == "DYNAMIC_TOPIC_CONFIG" {
				d.Configs[k.Key] = k.MaybeValue()
			}
			if k.Key == "min.insync.replicas" {
				d.MinISR, _ = strconv.Atoi(k.MaybeValue())
			}
		}
	}
	// Partitions that cannot be asked have no offsets; the others are shown all the same.
	starts, err := within(ctx, func(ctx context.Context) (kadm.ListedOffsets, error) { return adm.ListStartOffsets(ctx, name) })
	if err != nil {
		return nil, err
	}
	ends, err := within(ctx, func(ctx context.Context) (kadm.ListedOffsets, error) { return adm.ListEndOffsets(ctx, name) })
	if err != nil {
		return nil, err
	}
	var all kadm.TopicsSet
	all.Add(name, t.Partitions.Numbers()...)
	moving, err := adm.ListPartitionReassignments(ctx, all)
	if err != nil {
		return nil, err
	}
	replicas, err := askReplicas(ctx, cl, all, tierinfo.Summary)
	if err != nil {
		return nil, err
	}
	for _, p := range t.Partitions.Sorted() {
		m := moving[name][p.Partition]
		row := describedPartition{Partition: p.Partition, Leader: p.Leader, LeaderEpoch: p.LeaderEpoch, Replicas: p.Replicas, ISR: p.ISR, Offline: some(p.OfflineReplicas),
			Adding: some(m.AddingReplicas), Removing: some(m.RemovingReplicas), MinISR: min(d.MinISR, len(p.Replicas)), Start: -1, End: -1, Detail: []describedReplica{}}
		slices.Sort(row.Offline)
		if o, ok := starts.Lookup(name, p.Partition); ok && o.Err == nil {
			row.Start = o.Offset
		}
		if o, ok := ends.Lookup(name, p.Partition); ok && o.Err == nil {
			row.End = o.Offset
		}
		switch {
		case p.Leader < 0:
			row.Error = "no leader"
		case p.Err != nil:
			row.Error = p.Err.Error()
		}
		for _, id := range p.Replicas {
			row.Detail = append(row.Detail, describeReplica(replicas, name, &row, id))
		}
		d.Partitions = append(d.Partitions, row)
	}
	return d, nil
}

// some is a list that JSON shows as one even if it is empty.
func some(ids []int32) []int32 {
	if ids == nil {
		return []int32{}
	}
	return ids
}

func describeReplica(replicas *replicaRows, topic string, p *describedPartition, id int32) describedReplica {
	r := describedReplica{Broker: id, Leader: id == p.Leader, InSync: slices.Contains(p.ISR, id), LocalStart: -1, End: -1, Lag: -1, LocalBytes: -1}
	info, ok := replicas.of(topic, p.Partition, id)
	if !ok {
		if err, silent := replicas.silent[id]; silent {
			r.Error = fmt.Sprintf("does not answer: %v", err)
		} else if !slices.Contains(p.Offline, id) {
			r.Error = "has no such replica yet"
		}
		return r
	}
	r.LocalStart, r.End, r.LocalBytes, r.Error, r.Phase, r.Thin = info.LocalStart, info.LogEnd, info.LocalBytes, info.Failure, info.Phase, info.Thin
	if leader, ok := replicas.of(topic, p.Partition, p.Leader); ok {
		r.Lag = max(leader.LogEnd-info.LogEnd, 0)
	}
	return r
}

// within gives what of a topic's offsets can be had in short time: partitions without a leader would be asked for again and again.
func within(ctx context.Context, list func(context.Context) (kadm.ListedOffsets, error)) (kadm.ListedOffsets, error) {
	short, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	out, err := list(short)
	var shards *kadm.ShardErrors
	if ctx.Err() == nil && (errors.As(err, &shards) || short.Err() != nil) {
		err = nil
	}
	return out, err
}
