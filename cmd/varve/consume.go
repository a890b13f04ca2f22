package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/term"

	"github.com/varve-io/varve/direct"
)

// consumeFlags are the choices of consume.
type consumeFlags struct {
	offset, until, group, format string
	max                          int
	committed, direct            bool
	store                        storeFlags
	layout                       layoutFlags
}

func consumeCommand() *cobra.Command {
	c := &connection{}
	var o consumeFlags
	cmd := &cobra.Command{
		Use: "consume TOPIC", Short: "Print the records of a topic", Args: exactArgs(1, "a topic"),
		Long: `Print the records of a topic. With --direct, records that are in the bucket are read from there, not through the broker;
whatever goes wrong with that falls back to the broker. With --tier-layout the broker may be a stock Apache Kafka (3.6 or later)
whose tier Aiven's plug-in or Kafka's own LocalTieredStorage writes.

--offset says where to begin, in every partition:
` + whereForms + `

--until end takes the end of each partition as it is now and stops there.

--format prints each record in a form of its own: %t topic, %p partition, %o offset, %T timestamp (ms), %k key, %v value,
%h headers, \n and \t as usual.`,
		Example: `  varve consume orders
  varve consume orders --offset -10 --until end
  varve consume history --until end --direct --bucket 's3://logs/prod?endpoint=https://s3.example.com'
  varve consume history --until end --direct --tier-layout aiven --bucket s3://kafka-tier --key-prefix prod/ -b kafka:9092
  varve consume orders --group billing --format '%p/%o %k=%v\n'`,
		RunE: func(cmd *cobra.Command, args []string) error { return consume(cmd, c, args[0], &o) },
	}
	c.flags(cmd)
	f := cmd.Flags()
	f.StringVarP(&o.offset, "offset", "o", "start", "where to begin")
	f.StringVar(&o.until, "until", "", "end stops at the present end; empty goes on for ever")
	f.StringVarP(&o.group, "group", "g", "", "consume as a member of a group, which commits; --offset then only counts where nothing is committed")
	f.StringVarP(&o.format, "format", "f", `%v\n`, "how to print a record")
	f.IntVarP(&o.max, "max", "n", 0, "stop after so many records")
	f.BoolVar(&o.committed, "committed", false, "only records of committed transactions (read_committed)")
	f.BoolVar(&o.direct, "direct", false, "read tiered records from the bucket")
	o.store.add(cmd)
	o.store.addReads(cmd)
	o.layout.add(cmd)
	return cmd
}

func consume(cmd *cobra.Command, c *connection, topic string, o *consumeFlags) error {
	if o.until != "" && o.until != "end" {
		return usageError{fmt.Errorf("--until %q: want end", o.until)}
	}
	ctx := cmd.Context()
	w, err := parseWhere(o.offset)
	if err != nil {
		return err
	}
	var opts []kgo.Opt
	if o.committed {
		opts = append(opts, kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	}
	if o.direct {
		transport, end, err := o.store.transport(&o.layout, c.seeds(), direct.Config{})
		if err != nil {
			return err
		}
		defer func() {
			fmt.Fprintln(cmd.ErrOrStderr(), tell(transport.Snapshot()))
			end()
		}()
		opts = append(opts, kgo.Dialer(transport.DialContext))
	}
	adm, err := c.admin(ctx)
	if err != nil {
		return err
	}
	defer adm.Close()
	starts, notes, err := o.layout.offsets(ctx, adm, w, topic)
	if err != nil {
		return fmt.Errorf("topic %s: %w", topic, err)
	}
	for _, n := range notes {
		fmt.Fprintln(cmd.ErrOrStderr(), "note:", n)
	}
	ends, err := adm.ListEndOffsets(ctx, topic)
	if err == nil && o.committed {
		ends, err = adm.ListCommittedOffsets(ctx, topic)
	}
	if err != nil {
		return err
	}
	if o.group != "" {
		reset := kgo.NewOffset().AtStart()
		if w.kind == "end" {
			reset = kgo.NewOffset().AtEnd()
		}
		opts = append(opts, kgo.ConsumerGroup(o.group), kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(reset))
	} else {
		at := map[int32]kgo.Offset{}
		for _, l := range sortedOffsets(starts) {
			at[l.Partition] = kgo.NewOffset().At(l.Offset)
		}
		opts = append(opts, kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: at}), kgo.ConsumeResetOffset(kgo.NoResetOffset()))
	}
	opts = append(opts, kgo.FetchMaxPartitionBytes(8<<20), kgo.KeepControlRecords())
	cl, err := c.client(ctx, opts...)
	if err != nil {
		return err
	}
	defer cl.Close()
	goal := newGoal(starts, ends, o.until == "end")
	out := bufio.NewWriterSize(cmd.OutOrStdout(), 256<<10)
	defer out.Flush()
	p := newProgress(cmd, goal.total())
	defer p.close()
	return poll(ctx, cl, goal, o, printer(out, o.format, c.json), func() error { return out.Flush() }, p)
}

// poll prints records until the goal or the end of the context is reached.
func poll(ctx context.Context, cl *kgo.Client, goal *goal, o *consumeFlags, print func(*kgo.Record) error, flush func() error, p *progress) error {
	n := 0
	for !goal.reached() {
		fetches := cl.PollFetches(ctx)
		if ctx.Err() != nil {
			return nil // asked to stop, which is an ordinary end
		}
		for _, e := range fetches.Errors() {
			return fmt.Errorf("%s-%d: %w", e.Topic, e.Partition, e.Err)
		}
		iter := fetches.RecordIter()
		for !iter.Done() {
			r := iter.Next()
			if !goal.wants(r) {
				continue
			}
			if r.Attrs.IsControl() {
				continue
			}
			if err := print(r); err != nil {
				return err
			}
			if n++; o.max > 0 && n == o.max {
				return flush()
			}
		}
		p.set(goal.done())
		if err := flush(); err != nil {
			return err
		}
	}
	return nil
}

// goal is where each partition's reading ends.
type goal struct {
	bounded    bool
	start, end map[int32]int64 // of partitions that are not at their end when reading begins
	at         map[int32]int64
}

func newGoal(starts, ends kadm.ListedOffsets, bounded bool) *goal {
	g := &goal{bounded: bounded, start: map[int32]int64{}, end: map[int32]int64{}, at: map[int32]int64{}}
	for _, s := range sortedOffsets(starts) {
		if e, ok := ends.Lookup(s.Topic, s.Partition); ok && e.Offset > s.Offset {
			g.start[s.Partition], g.at[s.Partition], g.end[s.Partition] = s.Offset, s.Offset, e.Offset
		}
	}
	return g
}

// wants takes note of a record and says whether it is before the end. Control records count as progress.
func (g *goal) wants(r *kgo.Record) bool {
	end, known := g.end[r.Partition]
	if known {
		g.at[r.Partition] = max(g.at[r.Partition], r.Offset+1)
	}
	return !g.bounded || known && r.Offset < end
}

func (g *goal) reached() bool {
	if !g.bounded {
		return false
	}
	for p, end := range g.end {
		if g.at[p] < end {
			return false
		}
	}
	return true
}

func (g *goal) total() int64 {
	if !g.bounded {
		return -1
	}
	var n int64
	for p, end := range g.end {
		n += end - g.start[p]
	}
	return n
}

func (g *goal) done() int64 {
	var n int64
	for p, at := range g.at {
		n += min(at, g.end[p]) - g.start[p]
	}
	return n
}

// progress is a bar on standard error, where that is a terminal and records do not go to one.
type progress struct{ bar *progressbar.ProgressBar }

func newProgress(cmd *cobra.Command, total int64) *progress {
	if cmd.OutOrStdout() == os.Stdout && term.IsTerminal(int(os.Stdout.Fd())) {
		return &progress{}
	}
	return newBar(total, "records")
}

// newBar is a progress beside which nothing is printed.
func newBar(total int64, unit string) *progress {
	if total <= 0 || !term.IsTerminal(int(os.Stderr.Fd())) {
		return &progress{}
	}
	return &progress{progressbar.NewOptions64(total, progressbar.OptionSetWriter(os.Stderr), progressbar.OptionShowCount(), progressbar.OptionShowIts(),
		progressbar.OptionSetItsString(unit), progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish())}
}

func (p *progress) set(n int64) {
	if p.bar != nil {
		_ = p.bar.Set64(n) // a bar that cannot be drawn is no reason to stop
	}
}

// add is set for readers that share a bar.
func (p *progress) add(n int64) {
	if p.bar != nil {
		_ = p.bar.Add64(n)
	}
}

func (p *progress) close() {
	if p.bar != nil {
		_ = p.bar.Finish()
	}
}

// printer prints a record in the given form, or as a line of JSON.
func printer(w io.Writer, format string, asJSON bool) func(*kgo.Record) error {
	if asJSON {
		e := json.NewEncoder(w)
		e.SetEscapeHTML(false)
		type header struct {
			Key   string  `json:"key"`
			Value *string `json:"value"`
		}
		return func(r *kgo.Record) error {
			line := struct {
				Topic     string   `json:"topic"`
				Partition int32    `json:"partition"`
				Offset    int64    `json:"offset"`
				Timestamp int64    `json:"timestamp"`
				Key       *string  `json:"key"`
				Value     *string  `json:"value"`
				Headers   []header `json:"headers,omitempty"`
			}{r.Topic, r.Partition, r.Offset, r.Timestamp.UnixMilli(), nullable(r.Key), nullable(r.Value), nil}
			for _, h := range r.Headers {
				line.Headers = append(line.Headers, header{h.Key, nullable(h.Value)})
			}
			return e.Encode(line)
		}
	}
	format = strings.NewReplacer(`\n`, "\n", `\t`, "\t", `\\`, `\`).Replace(format)
	return func(r *kgo.Record) error {
		b := make([]byte, 0, len(r.Value)+64)
		for i := 0; i < len(format); i++ {
			if format[i] != '%' || i+1 == len(format) {
				b = append(b, format[i])
				continue
			}
			i++
			switch format[i] {
			case 't':
				b = append(b, r.Topic...)
			case 'p':
				b = strconv.AppendInt(b, int64(r.Partition), 10)
			case 'o':
				b = strconv.AppendInt(b, r.Offset, 10)
			case 'T':
				b = strconv.AppendInt(b, r.Timestamp.UnixMilli(), 10)
			case 'k':
				b = append(b, r.Key...)
			case 'v':
				b = append(b, r.Value...)
			case 'h':
				for j, h := range r.Headers {
					if j > 0 {
						b = append(b, ',')
					}
					b = append(append(append(b, h.Key...), '='), h.Value...)
				}
			case '%':
				b = append(b, '%')
			default:
				return usageError{errors.New("--format: %" + string(format[i]) + " is unknown")}
			}
		}
		_, err := w.Write(b)
		return err
	}
}

func nullable(b []byte) *string {
	if b == nil {
		return nil
	}
	s := string(b)
	return &s
}
