package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"sync"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/direct"
)

func verifyCommand() *cobra.Command {
	c := &connection{}
	var store storeFlags
	var layout layoutFlags
	var committed bool
	cmd := &cobra.Command{
		Use: "verify TOPIC", Short: "Read a whole topic through the broker and from the bucket, and compare", Args: exactArgs(1, "a topic"),
		Long: `Read a whole topic twice, through the broker and directly from the bucket, and compare every record: offset, timestamp, key,
value and headers. Exit code 1 if anything differs.`,
		Example: "  varve verify history --bucket varve-data/bucket",
		RunE: func(cmd *cobra.Command, args []string) error {
			return verify(cmd, c, &store, &layout, args[0], committed)
		},
	}
	c.flags(cmd)
	store.add(cmd)
	store.addReads(cmd)
	layout.add(cmd)
	cmd.Flags().BoolVar(&committed, "committed", false, "compare what a read_committed consumer sees")
	return cmd
}

func verify(cmd *cobra.Command, c *connection, store *storeFlags, layout *layoutFlags, topic string, committed bool) error {
	ctx, cancel := context.WithCancelCause(cmd.Context())
	defer cancel(nil)
	transport, end, err := store.transport(layout, c.seeds(), direct.Config{})
	if err != nil {
		return err
	}
	defer end()
	adm, err := c.admin(ctx)
	if err != nil {
		return err
	}
	defer adm.Close()
	starts, _, err := where{kind: "start"}.offsets(ctx, adm, []string{topic})
	if err != nil {
		return fmt.Errorf("topic %s: %w", topic, err)
	}
	list := adm.ListEndOffsets
	if committed {
		list = adm.ListCommittedOffsets
	}
	ends, err := list(ctx, topic)
	if err != nil {
		return err
	}
	goals := [2]*goal{newGoal(starts, ends, true), newGoal(starts, ends, true)}
	p := newProgress(cmd, 2*goals[0].total())
	defer p.close()
	m := newMatch()
	var wg sync.WaitGroup
	var failures [2]error
	for side := range goals {
		opts := []kgo.Opt{kgo.FetchMaxPartitionBytes(8 << 20), kgo.KeepControlRecords(), kgo.ConsumeResetOffset(kgo.NoResetOffset()), kgo.ConsumePartitions(places(topic, starts))}
		if side == 1 {
			opts = append(opts, kgo.Dialer(transport.DialContext))
		}
		if committed {
			opts = append(opts, kgo.FetchIsolationLevel(kgo.ReadCommitted()))
		}
		cl, err := c.client(ctx, opts...)
		if err != nil {
			return err
		}
		defer cl.Close()
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer m.finish(side)
			if err := readInto(ctx, cl, goals[side], func(r *kgo.Record) error { return m.add(side, r) }, p); err != nil {
				failures[side] = err
				cancel(err)
				m.stop()
			}
		}()
	}
	wg.Wait()
	if err := errors.Join(failures[:]...); err != nil {
		return err
	}
	if err := m.rest(); err != nil {
		return err
	}
	s := transport.Snapshot()
	if s.Locations > 0 && s.Served == 0 {
		return fmt.Errorf("%d records are the same, but all came from the broker: nothing that it has a place for could be read from the bucket; %s", m.equal, tell(s))
	}
	return c.print(cmd, map[string]any{"topic": topic, "records": m.equal, "direct": s}, func(w io.Writer) {
		fmt.Fprintf(w, "%d records are the same both ways; %s\n", m.equal, tell(s))
	})
}

func places(topic string, starts kadm.ListedOffsets) map[string]map[int32]kgo.Offset {
	at := map[int32]kgo.Offset{}
	for _, l := range sortedOffsets(starts) {
		at[l.Partition] = kgo.NewOffset().At(l.Offset)
	}
	return map[string]map[int32]kgo.Offset{topic: at}
}

// readInto gives every record up to the goal to use.
func readInto(ctx context.Context, cl *kgo.Client, g *goal, use func(*kgo.Record) error, p *progress) error {
	for !g.reached() {
		fetches := cl.PollFetches(ctx)
		if err := context.Cause(ctx); err != nil {
			return err
		}
		for _, e := range fetches.Errors() {
			return fmt.Errorf("%s-%d: %w", e.Topic, e.Partition, e.Err)
		}
		before := g.done()
		for iter := fetches.RecordIter(); !iter.Done(); {
			if r := iter.Next(); g.wants(r) && !r.Attrs.IsControl() {
				if err := use(r); err != nil {
					return err
				}
			}
		}
		p.add(g.done() - before)
	}
	return nil
}

// match compares two streams of records, partition by partition, without keeping the records.
type match struct {
	mu     sync.Mutex
	moved  *sync.Cond
	queues map[int32]*[2][]digest
	lead   [2]int // records that wait for the other side
	over   [2]bool
	halt   bool
	equal  int64
}

// digest stands for one record.
type digest struct {
	offset int64
	sum    uint64
}

// leadMax bounds how far one side may run ahead of the other, in records.
const leadMax = 1 << 20

func newMatch() *match {
	m := &match{queues: map[int32]*[2][]digest{}}
	m.moved = sync.NewCond(&m.mu)
	return m
}

func digestOf(r *kgo.Record) digest {
	h := fnv.New64a()
	var n [8]byte
	field := func(b []byte) {
		size := int64(len(b))
		if b == nil {
			size = -1
		}
		binary.BigEndian.PutUint64(n[:], uint64(size))
		h.Write(n[:])
		h.Write(b)
	}
	binary.BigEndian.PutUint64(n[:], uint64(r.Timestamp.UnixMilli()))
	h.Write(n[:])
	field(r.Key)
	field(r.Value)
	for _, x := range r.Headers {
		field([]byte(x.Key))
		field(x.Value)
	}
	return digest{r.Offset, h.Sum64()}
}

// add takes a record of one side and compares it when its counterpart is there.
func (m *match) add(side int, r *kgo.Record) error {
	d := digestOf(r)
	m.mu.Lock()
	defer m.mu.Unlock()
	for m.lead[side] >= leadMax && !m.over[1-side] && !m.halt {
		m.moved.Wait()
	}
	q := m.queues[r.Partition]
	if q == nil {
		q = &[2][]digest{}
		m.queues[r.Partition] = q
	}
	other := &q[1-side]
	if len(*other) == 0 {
		q[side] = append(q[side], d)
		m.lead[side]++
		return nil
	}
	want := (*other)[0]
	*other = (*other)[1:]
	m.lead[1-side]--
	m.moved.Broadcast()
	if want != d {
		return fmt.Errorf("%s-%d differs: one side has offset %d, the other %d%s", r.Topic, r.Partition, min(d.offset, want.offset), max(d.offset, want.offset), sameOffset(d, want))
	}
	m.equal++
	return nil
}

func sameOffset(a, b digest) string {
	if a.offset == b.offset {
		return ", with other contents"
	}
	return ""
}

func (m *match) finish(side int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.over[side] = true
	m.moved.Broadcast()
}

func (m *match) stop() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.halt = true
	m.moved.Broadcast()
}

// rest complains about records that only one side has.
func (m *match) rest() error {
	var failed error
	for p, q := range m.queues {
		for side, name := range []string{"the broker", "the direct reader"} {
			if n := len(q[side]); n > 0 {
				failed = errors.Join(failed, fmt.Errorf("partition %d: %d records from offset %d on came from %s alone", p, n, q[side][0].offset, name))
			}
		}
	}
	return failed
}
