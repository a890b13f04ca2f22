package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
)

// groupMember is a member of a consumer group (KIP-848).
type groupMember struct {
	ID       string             `json:"memberId"`
	Instance string             `json:"groupInstanceId,omitempty"`
	Protocol string             `json:"protocol"` // consumer, or classic while a group migrates
	Epoch    int32              `json:"epoch"`
	Client   string             `json:"clientId"`
	Host     string             `json:"host"`
	Assigned map[string][]int32 `json:"assigned"`
	Target   map[string][]int32 `json:"target"`
}

// groupRow is a partition of a group.
type groupRow struct {
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	Committed int64  `json:"committed"`
	End       int64  `json:"end"`
	Lag       int64  `json:"lag"`
	Member    string `json:"member,omitempty"`
	Host      string `json:"host,omitempty"`
	Error     string `json:"error,omitempty"`
}

// groupView is what describe shows.
type groupView struct {
	Group           string        `json:"group"`
	Type            string        `json:"type"`
	State           string        `json:"state"`
	Members         int           `json:"members"`
	Lag             int64         `json:"lag"`
	Epoch           int32         `json:"epoch,omitempty"`
	AssignmentEpoch int32         `json:"assignmentEpoch,omitempty"`
	Assignor        string        `json:"assignor,omitempty"`
	Consumers       []groupMember `json:"consumers,omitempty"`
	Rows            []groupRow    `json:"partitions"`
}

func (v *groupView) print(w io.Writer) {
	fmt.Fprintf(w, "group %s, %s, %s, %d members, lag %d\n", v.Group, v.Type, v.State, v.Members, v.Lag)
	if v.Type == "consumer" {
		fmt.Fprintf(w, "epoch %d, assignment epoch %d by %s\n", v.Epoch, v.AssignmentEpoch, v.Assignor)
		fmt.Fprintln(w, "MEMBER\tEPOCH\tPROTOCOL\tCLIENT\tHOST\tASSIGNED\tTARGET")
		for _, m := range v.Consumers {
			fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\t%s\t%s\n", m.ID, m.Epoch, m.Protocol, m.Client, m.Host, partitionsText(m.Assigned), partitionsText(m.Target))
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintln(w, "TOPIC\tPARTITION\tCOMMITTED\tEND\tLAG\tMEMBER\tHOST\tERROR")
	for _, r := range v.Rows {
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%s\t%s\t%s\n", r.Topic, r.Partition, r.Committed, r.End, r.Lag, r.Member, r.Host, r.Error)
	}
}

// partitionsText is "orders:0,1 refunds:0", or "-".
func partitionsText(topics map[string][]int32) string {
	var list []string
	for topic, partitions := range topics {
		list = append(list, topic+":"+strings.Trim(strings.ReplaceAll(fmt.Sprint(partitions), " ", ","), "[]"))
	}
	if slices.Sort(list); len(list) == 0 {
		return "-"
	}
	return strings.Join(list, " ")
}

func partitionsOf(set kadm.TopicsSet) map[string][]int32 {
	out := map[string][]int32{}
	for _, t := range set.Sorted() {
		out[t.Topic] = t.Partitions
	}
	return out
}

// describeConsumerGroup describes a group of the consumer protocol; ok is false for any other.
func describeConsumerGroup(ctx context.Context, adm *kadm.Client, group string) (v *groupView, ok bool, err error) {
	described, err := adm.DescribeConsumerGroups(ctx, group)
	d, found := described[group]
	switch {
	case err != nil && !found || errors.Is(d.Err, kerr.GroupIDNotFound) || errors.Is(d.Err, kerr.UnsupportedVersion):
		return nil, false, nil // another kind of group, or brokers that know of no other; who asks for that says what is wrong
	case d.Err != nil:
		return nil, false, fmt.Errorf("group %s: %w", group, d.Err)
	}
	v = &groupView{Group: group, Type: "consumer", State: d.State, Members: len(d.Members), Epoch: d.Epoch, AssignmentEpoch: d.AssignmentEpoch, Assignor: d.AssignorName, Rows: []groupRow{}}
	type place struct {
		topic     string
		partition int32
	}
	rows := map[place]*groupRow{}
	row := func(topic string, partition int32) *groupRow {
		at := place{topic, partition}
		if rows[at] == nil {
			rows[at] = &groupRow{Topic: topic, Partition: partition, Committed: -1, End: -1, Lag: -1}
		}
		return rows[at]
	}
	for _, m := range d.Members {
		gm := groupMember{ID: m.MemberID, Protocol: "consumer", Epoch: m.MemberEpoch, Client: m.ClientID, Host: m.ClientHost, Assigned: partitionsOf(m.Assignment), Target: partitionsOf(m.TargetAssignment)}
		if m.MemberType == 0 {
			gm.Protocol = "classic"
		}
		if m.InstanceID != nil {
			gm.Instance = *m.InstanceID
		}
		v.Consumers = append(v.Consumers, gm)
		m.Assignment.Each(func(topic string, partition int32) {
			r := row(topic, partition)
			r.Member, r.Host = m.MemberID, m.ClientHost
		})
	}
	commits, err := adm.FetchOffsets(ctx, group)
	if err != nil {
		return nil, false, fmt.Errorf("group %s: offsets: %w", group, err)
	}
	commits.Each(func(o kadm.OffsetResponse) {
		r := row(o.Topic, o.Partition)
		if r.Committed = o.At; o.Err != nil {
			r.Error = o.Err.Error()
		}
	})
	var topics []string
	for at := range rows {
		topics = append(topics, at.topic)
	}
	slices.Sort(topics)
	if topics = slices.Compact(topics); len(topics) > 0 {
		starts, err := adm.ListStartOffsets(ctx, topics...)
		if err != nil {
			return nil, false, err
		}
		ends, err := adm.ListEndOffsets(ctx, topics...)
		if err != nil {
			return nil, false, err
		}
		for at, r := range rows {
			start, _ := starts.Lookup(at.topic, at.partition)
			end, found := ends.Lookup(at.topic, at.partition)
			switch {
			case found && end.Err != nil:
				r.Error = cmp.Or(r.Error, end.Err.Error())
			case found:
				r.End = end.Offset
				r.Lag = max(end.Offset-max(r.Committed, start.Offset), 0)
				v.Lag += r.Lag
			}
		}
	}
	for _, r := range rows {
		v.Rows = append(v.Rows, *r)
	}
	slices.SortFunc(v.Rows, func(a, b groupRow) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	})
	return v, true, nil
}
