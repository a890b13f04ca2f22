package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/tierinfo"
)

// replicaRow is what a broker tells of its replica of a partition.
type replicaRow struct {
	Broker    int32
	Topic     string
	Partition int32
	Size      int64
	Info
}

// replicaRows are the answers of all brokers that could be asked, by topic, partition and broker.
type replicaRows struct {
	rows    []replicaRow
	deleted []tierinfo.Deleted // of deleted topics, by each broker; only with tierinfo.Segments
	silent  map[int32]error    // brokers that did not answer
}

// askReplicas asks every living broker for its replicas of the partitions; nil asks for all. Brokers that do not answer are
// told, not an error.
func askReplicas(ctx context.Context, cl *kgo.Client, partitions kadm.TopicsSet, ask tierinfo.Ask) (*replicaRows, error) {
	req := kmsg.NewPtrDescribeLogDirsRequest()
	for _, list := range partitions.Sorted() {
		t := kmsg.NewDescribeLogDirsRequestTopic()
		t.Topic, t.Partitions = list.Topic, list.Partitions
		req.Topics = append(req.Topics, t)
	}
	tierinfo.Request(req, ask)
	out := &replicaRows{}
	var err error
	out.silent, err = askEach(ctx, cl, req, func(id int32, resp *kmsg.DescribeLogDirsResponse) error {
		rows, gone, err := rowsOf(id, resp)
		if err == nil {
			out.rows, out.deleted = append(out.rows, rows...), append(out.deleted, gone...)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(out.rows, func(a, b replicaRow) int {
		return cmp.Or(strings.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.Broker, b.Broker))
	})
	return out, nil
}

// askEach asks every living broker, as it is (the client's own way of splitting the request loses tagged fields), and hands each answer
// to take, one at a time. silent are the brokers that did not answer, or not with what take wants.
func askEach(ctx context.Context, cl *kgo.Client, req *kmsg.DescribeLogDirsRequest, take func(id int32, resp *kmsg.DescribeLogDirsResponse) error) (silent map[int32]error, err error) {
	brokers, err := askMetadata(ctx, cl, []kmsg.MetadataRequestTopic{})
	if err != nil {
		return nil, err
	}
	silent = map[int32]error{}
	var mu sync.Mutex
	var all sync.WaitGroup
	for _, b := range brokers.Brokers {
		all.Go(func() {
			limited, cancel := context.WithTimeout(ctx, patience)
			defer cancel()
			own := *req
			answer, err := cl.Broker(int(b.NodeID)).Request(limited, &own)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				err = take(b.NodeID, answer.(*kmsg.DescribeLogDirsResponse))
			}
			if err != nil {
				silent[b.NodeID] = err
			}
		})
	}
	all.Wait()
	return silent, ctx.Err()
}

// rowsOf reads a broker's answer.
func rowsOf(id int32, resp *kmsg.DescribeLogDirsResponse) ([]replicaRow, []tierinfo.Deleted, error) {
	gone, err := tierinfo.GetDeleted(resp)
	if err != nil {
		return nil, nil, err
	}
	var rows []replicaRow
	for _, dir := range resp.Dirs {
		for _, t := range dir.Topics {
			for i := range t.Partitions {
				p := &t.Partitions[i]
				info, ok, err := tierinfo.Get(p)
				if err != nil {
					return nil, nil, err
				}
				if !ok {
					return nil, nil, errors.New("the broker tells nothing of its tier: it is no Varve, or an old one")
				}
				rows = append(rows, replicaRow{Broker: id, Topic: t.Topic, Partition: p.Partition, Size: p.Size, Info: info})
			}
		}
	}
	return rows, gone, nil
}

// of returns a broker's replica of a partition.
func (r *replicaRows) of(topic string, partition, broker int32) (replicaRow, bool) {
	i, ok := slices.BinarySearchFunc(r.rows, replicaRow{Topic: topic, Partition: partition, Broker: broker}, func(a, b replicaRow) int {
		return cmp.Or(strings.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.Broker, b.Broker))
	})
	if !ok {
		return replicaRow{}, false
	}
	return r.rows[i], true
}

// best returns the word that counts on a partition: its leader's, or else that of any replica.
func (r *replicaRows) best(topic string, partition, leader int32) (replicaRow, bool) {
	if row, ok := r.of(topic, partition, leader); ok {
		return row, true
	}
	i := slices.IndexFunc(r.rows, func(row replicaRow) bool { return row.Topic == topic && row.Partition == partition })
	if i < 0 {
		return replicaRow{}, false
	}
	return r.rows[i], true
}

// why is the reason that nobody of the replicas answered.
func (r *replicaRows) why(replicas []int32) error {
	for _, id := range replicas {
		if err, ok := r.silent[id]; ok {
			return fmt.Errorf("broker %d does not answer: %w", id, err)
		}
	}
	return fmt.Errorf("no broker of %v is alive", replicas)
}
