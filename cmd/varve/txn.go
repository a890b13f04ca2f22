package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
)

func txnCommand() *cobra.Command {
	c := &connection{}
	cmd := &cobra.Command{Use: "txn", Short: "List transactions, find those that hang, and abort them"}
	c.flags(cmd)
	cmd.AddCommand(txnList(c), txnFindHanging(c), txnAbort(c))
	return cmd
}

// txnRow is a transactional id as its coordinator knows it.
type txnRow struct {
	ID          string   `json:"transactionalId"`
	State       string   `json:"state"`
	ProducerID  int64    `json:"producerId"`
	Epoch       int16    `json:"producerEpoch"`
	Coordinator int32    `json:"coordinator"`
	Started     string   `json:"started,omitempty"` // RFC 3339, of a transaction that is open
	TimeoutMs   int32    `json:"timeoutMs"`
	Partitions  []string `json:"partitions"` // TOPIC:PARTITION that are in it and have no marker yet
}

func txnList(c *connection) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List transactions that are open, with their partitions", Args: noArgs,
		Long: `List transactions that are open or just being ended, with the partitions that have no marker yet.

A partition of __consumer_offsets says that the transaction holds offsets of a group: until it ends, consumers of that group
that ask for stable offsets wait.`,
		Example: "  varve txn ls\n  varve txn ls --all --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			adm, err := c.admin(cmd.Context())
			if err != nil {
				return err
			}
			defer adm.Close()
			var states []string
			if !all {
				states = []string{"Ongoing", "PrepareCommit", "PrepareAbort"}
			}
			listed, failed := adm.ListTransactions(cmd.Context(), nil, states)
			described, err := adm.DescribeTransactions(cmd.Context(), listed.TransactionalIDs()...)
			failed = errors.Join(failed, err)
			rows := []txnRow{}
			for _, d := range described.Sorted() {
				if errors.Is(d.Err, kerr.TransactionalIDNotFound) {
					continue // gone since
				}
				if d.Err != nil {
					failed = errors.Join(failed, fmt.Errorf("transactional id %s: %w", d.TxnID, d.Err))
					continue
				}
				r := txnRow{ID: d.TxnID, State: d.State, ProducerID: d.ProducerID, Epoch: d.ProducerEpoch, Coordinator: d.Coordinator, TimeoutMs: d.TimeoutMillis, Partitions: []string{}}
				if d.StartTimestamp >= 0 {
					r.Started = clock(d.StartTimestamp)
				}
				for _, t := range d.Topics.Sorted() {
					for _, p := range t.Partitions {
						r.Partitions = append(r.Partitions, fmt.Sprintf("%s:%d", t.Topic, p))
					}
				}
				rows = append(rows, r)
			}
			err = c.print(cmd, rows, func(w io.Writer) {
				fmt.Fprintln(w, "TRANSACTIONAL ID\tSTATE\tPRODUCER\tEPOCH\tCOORDINATOR\tSTARTED\tTIMEOUT\tPARTITIONS")
				for _, r := range rows {
					fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%s\t%s\t%s\n", r.ID, r.State, r.ProducerID, r.Epoch, r.Coordinator, cmp.Or(r.Started, "-"),
						time.Duration(r.TimeoutMs)*time.Millisecond, strings.Join(r.Partitions, ","))
				}
			})
			return errors.Join(err, failed)
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "also ids without an open transaction")
	return cmd
}

func clock(ms int64) string { return time.UnixMilli(ms).UTC().Format(time.RFC3339) }

// openTxn is a transaction that a partition waits for.
type openTxn struct {
	Topic            string `json:"topic"`
	Partition        int32  `json:"partition"`
	Start            int64  `json:"startOffset"` // of its first record there
	ProducerID       int64  `json:"producerId"`
	Epoch            int16  `json:"producerEpoch"`
	CoordinatorEpoch int32  `json:"coordinatorEpoch"`
	LastWrite        string `json:"lastWrite"` // RFC 3339, by the records' timestamps
	Why              string `json:"why"`       // it is taken to hang, or is not
	lastMs           int64
}

// openTransactions asks the leaders of partitions for their open transactions; no topics are all.
func openTransactions(ctx context.Context, adm *kadm.Client, topics []string) ([]openTxn, error) {
	listed, err := adm.ListTopicsWithInternal(ctx, topics...)
	if err != nil {
		return nil, err
	}
	var failed error
	for _, t := range listed {
		if t.Err != nil {
			failed = errors.Join(failed, fmt.Errorf("topic %s: %w", t.Topic, t.Err))
			delete(listed, t.Topic)
		}
	}
	if len(listed) == 0 {
		return nil, failed
	}
	described, err := adm.DescribeProducers(ctx, listed.TopicsSet())
	failed = errors.Join(failed, err)
	var open []openTxn
	for _, t := range described.Sorted() {
		for _, p := range t.Partitions.Sorted() {
			if p.Err != nil {
				failed = errors.Join(failed, fmt.Errorf("%s:%d: %w", p.Topic, p.Partition, p.Err))
			}
			for _, a := range p.ActiveProducers.Sorted() {
				if a.CurrentTxnStartOffset >= 0 {
					open = append(open, openTxn{Topic: p.Topic, Partition: p.Partition, Start: a.CurrentTxnStartOffset, ProducerID: a.ProducerID,
						Epoch: a.ProducerEpoch, CoordinatorEpoch: a.CoordinatorEpoch, LastWrite: clock(a.LastTimestamp), lastMs: a.LastTimestamp})
				}
			}
		}
	}
	return open, failed
}

// judge splits open transactions into those that their coordinators will end and those that nobody will: of producers that no
// transactional id has, or whose transaction is another one or without that partition (KIP-664). Why says which.
func judge(ctx context.Context, adm *kadm.Client, open []openTxn) (hanging, alive []openTxn, err error) {
	if len(open) == 0 {
		return nil, nil, nil
	}
	var producers []int64
	for _, o := range open {
		producers = append(producers, o.ProducerID)
	}
	slices.Sort(producers)
	// A coordinator that does not answer may know the producer: nothing may be taken to hang then.
	listed, err := adm.ListTransactions(ctx, slices.Compact(producers), nil)
	if err != nil {
		return nil, nil, fmt.Errorf("not all coordinators answer, so nothing can be said to hang: %w", err)
	}
	described, err := adm.DescribeTransactions(ctx, listed.TransactionalIDs()...)
	if err != nil {
		return nil, nil, fmt.Errorf("not all coordinators answer, so nothing can be said to hang: %w", err)
	}
	byProducer := map[int64]kadm.DescribedTransaction{}
	for _, d := range described {
		if d.Err != nil && !errors.Is(d.Err, kerr.TransactionalIDNotFound) {
			return nil, nil, fmt.Errorf("transactional id %s: %w", d.TxnID, d.Err)
		}
		if d.Err == nil {
			byProducer[d.ProducerID] = d
		}
	}
	// What has ended since it was seen does not hang.
	topics := map[string]bool{}
	for _, o := range open {
		topics[o.Topic] = true
	}
	still, err := openTransactions(ctx, adm, slices.Sorted(maps.Keys(topics)))
	if err != nil {
		return nil, nil, err
	}
	for _, o := range open {
		if !slices.ContainsFunc(still, func(s openTxn) bool {
			return s.Topic == o.Topic && s.Partition == o.Partition && s.Start == o.Start && s.ProducerID == o.ProducerID && s.Epoch == o.Epoch
		}) {
			continue
		}
		d, known := byProducer[o.ProducerID]
		switch {
		case !known:
			o.Why = "no transactional id has this producer"
			hanging = append(hanging, o)
		case !d.Topics.Lookup(o.Topic, o.Partition):
			o.Why = fmt.Sprintf("transactional id %s is %s, without this partition", d.TxnID, d.State)
			hanging = append(hanging, o)
		default:
			o.Why = fmt.Sprintf("transactional id %s is %s since %s, with a timeout of %s", d.TxnID, d.State, clock(d.StartTimestamp), time.Duration(d.TimeoutMillis)*time.Millisecond)
			alive = append(alive, o)
		}
	}
	return hanging, alive, nil
}

// lateAfter is transaction.max.timeout.ms of the cluster: no transaction may be open for longer.
func lateAfter(ctx context.Context, adm *kadm.Client) (time.Duration, error) {
	brokers, err := adm.ListBrokers(ctx)
	if err != nil {
		return 0, err
	}
	configs, err := adm.DescribeBrokerConfigs(ctx, brokers.NodeIDs()...)
	if err != nil {
		return 0, err
	}
	longest := int64(-1)
	for _, c := range configs {
		for _, k := range c.Configs {
			if ms, err := strconv.ParseInt(k.MaybeValue(), 10, 64); k.Key == "transaction.max.timeout.ms" && err == nil {
				longest = max(longest, ms)
			}
		}
	}
	if longest < 0 {
		return 0, errors.New("no broker tells its transaction.max.timeout.ms: give --older-than")
	}
	return time.Duration(longest) * time.Millisecond, nil
}

func txnFindHanging(c *connection) *cobra.Command {
	var older time.Duration
	cmd := &cobra.Command{
		Use: "find-hanging [TOPIC…]", Short: "Find transactions that nobody will end",
		Long: `Find transactions that are open on a partition although no coordinator will end them. Readers of committed records wait
for them for ever, and the partition's tier stands still. They come from brokers and clients without KIP-890.

Looked at are transactions without a write for longer than the cluster's transaction.max.timeout.ms. Exit code 1 if any hangs.`,
		Example: "  varve txn find-hanging\n  varve txn find-hanging orders --older-than 1h",
		RunE: func(cmd *cobra.Command, args []string) error {
			adm, err := c.admin(cmd.Context())
			if err != nil {
				return err
			}
			defer adm.Close()
			if !cmd.Flags().Changed("older-than") {
				if older, err = lateAfter(cmd.Context(), adm); err != nil {
					return err
				}
			}
			open, failed := openTransactions(cmd.Context(), adm, args)
			limit := time.Now().Add(-older).UnixMilli()
			hanging, _, err := judge(cmd.Context(), adm, slices.DeleteFunc(open, func(o openTxn) bool { return o.lastMs > limit }))
			if err != nil {
				return errors.Join(failed, err)
			}
			if hanging == nil {
				hanging = []openTxn{}
			}
			err = c.print(cmd, hanging, func(w io.Writer) {
				fmt.Fprintln(w, "PARTITION\tSTART OFFSET\tPRODUCER\tEPOCH\tLAST WRITE\tWHY")
				for _, o := range hanging {
					fmt.Fprintf(w, "%s:%d\t%d\t%d\t%d\t%s\t%s\n", o.Topic, o.Partition, o.Start, o.ProducerID, o.Epoch, o.LastWrite, o.Why)
				}
			})
			if len(hanging) > 0 {
				failed = errors.Join(failed, fmt.Errorf("%d transactions hang; varve txn abort ends one", len(hanging)))
			}
			return errors.Join(err, failed)
		},
	}
	cmd.Flags().DurationVar(&older, "older-than", 0, "look at transactions without a write for this long (default transaction.max.timeout.ms of the cluster)")
	return cmd
}

func txnAbort(c *connection) *cobra.Command {
	var start int64
	var force bool
	cmd := &cobra.Command{
		Use: "abort TOPIC:PARTITION --start OFFSET", Short: "End a hanging transaction of one partition by an abort marker", Args: exactArgs(1, "TOPIC:PARTITION"),
		Long: `End a hanging transaction of one partition by an abort marker. Its records there are never shown to readers of committed records.

A transaction that its coordinator still knows is left to it, since a marker of one partition would tear it apart; --force
aborts it regardless.`,
		Example: "  varve txn abort orders:3 --start 118230",
		RunE: func(cmd *cobra.Command, args []string) error {
			topic, partition, err := topicPartition(args[0])
			if err != nil {
				return err
			}
			if partition < 0 {
				return usageError{fmt.Errorf("%q: want TOPIC:PARTITION", args[0])}
			}
			if start < 0 {
				return usageError{errors.New("give the offset of the transaction's first record with --start; find-hanging shows it")}
			}
			adm, err := c.admin(cmd.Context())
			if err != nil {
				return err
			}
			defer adm.Close()
			open, err := openTransactions(cmd.Context(), adm, []string{topic})
			if err != nil {
				return err
			}
			open = slices.DeleteFunc(open, func(o openTxn) bool { return o.Partition != partition })
			at := slices.IndexFunc(open, func(o openTxn) bool { return o.Start == start })
			if at < 0 {
				return fmt.Errorf("%s has no open transaction with its first record at offset %d%s", args[0], start, others(open))
			}
			o := open[at]
			if !force {
				hanging, alive, err := judge(cmd.Context(), adm, open[at:at+1])
				switch {
				case err != nil:
					return err
				case len(hanging)+len(alive) == 0:
					return fmt.Errorf("the transaction that began at offset %d of %s has just ended", start, args[0])
				case len(alive) > 0:
					return fmt.Errorf("it does not hang: %s, which its coordinator ends; --force aborts it here regardless", alive[0].Why)
				}
			}
			m := kadm.TxnMarkers{ProducerID: o.ProducerID, ProducerEpoch: o.Epoch, CoordinatorEpoch: max(o.CoordinatorEpoch, 0), Topics: kadm.TopicsSet{}}
			m.Topics.Add(topic, partition)
			answers, err := adm.WriteTxnMarkers(cmd.Context(), m)
			if err != nil {
				return err
			}
			for _, byTopic := range answers {
				for _, t := range byTopic.Topics {
					for _, p := range t.Partitions {
						err = errors.Join(err, p.Err)
					}
				}
			}
			if err != nil {
				return fmt.Errorf("%s: the marker was not written: %w", args[0], err)
			}
			return c.print(cmd, o, func(w io.Writer) {
				fmt.Fprintf(w, "aborted the transaction of producer %d that began at offset %d of %s\n", o.ProducerID, o.Start, args[0])
			})
		},
	}
	cmd.Flags().Int64Var(&start, "start", -1, "offset of the transaction's first record there, as find-hanging shows it")
	cmd.Flags().BoolVar(&force, "force", false, "abort it even if its coordinator knows it")
	return cmd
}

// others names what could have been meant.
func others(open []openTxn) string {
	if len(open) == 0 {
		return ", and no other"
	}
	var at []string
	for _, o := range open {
		at = append(at, strconv.FormatInt(o.Start, 10))
	}
	return ", but at " + strings.Join(at, ", ")
}
