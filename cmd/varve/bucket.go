package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/internal/bucket"
	"github.com/varve-io/varve/internal/bucketlayout"
	"github.com/varve-io/varve/internal/bucketscan"
	"github.com/varve-io/varve/internal/inspect"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/producerstate"
)

func bucketCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "bucket", Short: "Read a bucket with no Kafka running",
		Long: `Read a bucket with no Kafka running: what Varve, Kafka with Aiven's plug-in, Kafka's LocalTieredStorage or Pinterest's uploader
stored there. Layouts are recognized by the keys, also side by side and below any folder. Nothing is ever written.

URL is a folder, or s3://BUCKET/PREFIX?endpoint=URL.`,
	}
	cmd.AddCommand(bucketLs(), bucketCat(), bucketVerify())
	return cmd
}

// openReader opens the bucket that a command names, for reading.
func (s *storeFlags) openReader(url string) (*bucketscan.Reader, error) {
	keys, err := readKeyPairs(s.pairs)
	if err != nil {
		return nil, usageError{err}
	}
	b, err := bucket.Open(url, bucket.Options{AccessKey: s.access, SecretKey: s.secret, ReadOnly: true})
	if err != nil {
		return nil, usageError{err}
	}
	return &bucketscan.Reader{Bucket: objstore.WithPrefix(b, s.prefix), Keys: keys}, nil
}

// bucketArgs are a URL and maybe TOPIC[:PARTITION].
func bucketArgs(least, most int) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) < least || len(args) > most {
			return usageError{errors.New("want the URL of a bucket, and TOPIC or TOPIC:PARTITION")}
		}
		return nil
	}
}

// chosen lists a bucket and takes what a name means, everything for none.
func chosen(ctx context.Context, r *bucketscan.Reader, args []string) ([]*bucketlayout.PartitionSegments, *bucketlayout.Catalog, error) {
	topic, partition := "", int64(-1)
	if len(args) > 1 {
		topic = args[1]
		if name, number, ok := strings.Cut(topic, ":"); ok {
			var err error
			if partition, err = strconv.ParseInt(number, 10, 32); err != nil || partition < 0 {
				return nil, nil, usageError{fmt.Errorf("%q: want TOPIC or TOPIC:PARTITION", topic)}
			}
			topic = name
		}
	}
	c, err := r.List(ctx)
	if err != nil {
		return nil, nil, err
	}
	var out []*bucketlayout.PartitionSegments
	for _, p := range c.Partitions() {
		if (topic == "" || p.Topic == topic) && (partition < 0 || int64(p.Partition.Partition) == partition) {
			out = append(out, p)
		}
	}
	if len(out) == 0 {
		switch {
		case topic != "":
			return nil, nil, fmt.Errorf("the bucket holds no segment of %s", args[1])
		case len(c.Foreign) > 0:
			return nil, nil, fmt.Errorf("none of the bucket's %d objects belongs to a segment, e.g. %q; is this the right place, and --key-prefix?", len(c.Foreign), c.Foreign[0])
		}
		return nil, nil, errors.New("the bucket is empty")
	}
	return out, c, nil
}

// bucketRow is a line of ls. Segment and Objects are of one segment alone.
type bucketRow struct {
	Topic     string               `json:"topic"`
	TopicID   string               `json:"topicId,omitempty"`
	Partition int32                `json:"partition"`
	Layout    bucketlayout.Layout  `json:"layout"`
	Prefix    string               `json:"prefix"`
	Segments  int                  `json:"segments"`
	Start     int64                `json:"startOffset"`
	End       *int64               `json:"endOffset"` // last offset; null if it cannot be told
	Bytes     int64                `json:"bytes"`
	Segment   string               `json:"segmentId,omitempty"`
	Objects   bucketlayout.Objects `json:"objects,omitempty"`
	Note      string               `json:"note,omitempty"`
}

func newBucketRow(p bucketlayout.Partition) bucketRow {
	row := bucketRow{Topic: p.Topic, Partition: p.Partition, Layout: p.Layout, Prefix: p.Prefix}
	if !p.TopicID.IsZero() {
		row.TopicID = p.TopicID.String()
	}
	return row
}

// offsets are those of a row, for people.
func (r *bucketRow) offsets() string {
	if r.End == nil {
		return fmt.Sprintf("%d..?", r.Start)
	}
	return fmt.Sprintf("%d..%d", r.Start, *r.End)
}

// endOf sets the end of a row, or says why there is none.
func (r *bucketRow) endOf(ctx context.Context, reader *bucketscan.Reader, f *bucketlayout.Found) error {
	end, err := reader.End(ctx, f)
	if err != nil {
		if ctx.Err() != nil {
			return err
		}
		r.Note = err.Error()
		return nil
	}
	r.End = &end
	return nil
}

// segmentRows are those of a partition's segments, one by one.
func segmentRows(ctx context.Context, r *bucketscan.Reader, p *bucketlayout.PartitionSegments) (rows []bucketRow, err error) {
	for _, f := range p.Segments {
		row := newBucketRow(p.Partition)
		row.Segments, row.Start, row.Bytes, row.Objects = 1, f.Base, f.Bytes(), f.Objects
		if !f.ID.IsZero() {
			row.Segment = f.ID.String()
		}
		if !f.Committed() {
			row.Note = "unfinished"
		} else if err := row.endOf(ctx, r, f); err != nil {
			return nil, err
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// partitionRow sums a partition's segments up.
func partitionRow(ctx context.Context, r *bucketscan.Reader, p *bucketlayout.PartitionSegments) ([]bucketRow, error) {
	row := newBucketRow(p.Partition)
	var last *bucketlayout.Found
	for _, f := range p.Segments {
		if row.Bytes += f.Bytes(); f.Committed() {
			if row.Segments++; last == nil {
				row.Start = f.Base
			}
			last = f
		}
	}
	if last == nil {
		row.Start, row.Note = p.Segments[0].Base, "unfinished uploads alone"
	} else if err := row.endOf(ctx, r, last); err != nil {
		return nil, err
	}
	return []bucketRow{row}, nil
}

func bucketLs() *cobra.Command {
	var s storeFlags
	var asJSON, foreign bool
	cmd := &cobra.Command{
		Use: "ls URL [TOPIC[:PARTITION]]", Short: "List the partitions of a bucket, or the segments of a topic", Args: bucketArgs(1, 2),
		Long: `List the partitions of a bucket with their segments, offsets and sizes; with a topic, its segments one by one. Offsets are the first
and the last.`,
		Example: `  varve bucket ls varve-data/bucket
  varve bucket ls 's3://logs/prod?endpoint=https://s3.example.com' orders:3
  varve bucket ls /var/kafka-tiered-storage --json`,
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := s.openReader(args[0])
			if err != nil {
				return err
			}
			ctx := cmd.Context()
			found, catalog, err := chosen(ctx, r, args)
			if err != nil {
				return err
			}
			var rows []bucketRow
			bar := newBar(int64(len(found)), "partitions")
			for _, p := range found {
				list := partitionRow
				if len(args) > 1 {
					list = segmentRows
				}
				some, err := list(ctx, r, p)
				if err != nil {
					return err
				}
				rows = append(rows, some...)
				bar.add(1)
			}
			bar.close()
			c := connection{json: asJSON}
			if asJSON {
				for i := range rows {
					if err := c.print(cmd, rows[i], nil); err != nil {
						return err
					}
				}
			} else if err := c.print(cmd, nil, func(w io.Writer) { printBucketRows(w, rows, len(args) > 1) }); err != nil {
				return err
			}
			if n := len(catalog.Foreign); n > 0 {
				fmt.Fprintf(cmd.ErrOrStderr(), "note: %d objects are in no layout\n", n)
				for _, key := range catalog.Foreign {
					if foreign {
						fmt.Fprintln(cmd.ErrOrStderr(), "  "+key)
					}
				}
			}
			return nil
		},
	}
	s.addAccess(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "one line of JSON per partition or segment")
	cmd.Flags().BoolVar(&foreign, "foreign", false, "name the objects that are in no layout")
	return cmd
}

func printBucketRows(w io.Writer, rows []bucketRow, segments bool) {
	if segments {
		fmt.Fprintln(w, "PARTITION\tOFFSETS\tBYTES\tLAYOUT\tSEGMENT\tNOTE")
	} else {
		fmt.Fprintln(w, "PARTITION\tOFFSETS\tSEGMENTS\tBYTES\tLAYOUT\tTOPIC ID\tPREFIX\tNOTE")
	}
	for i := range rows {
		r := &rows[i]
		if segments {
			fmt.Fprintf(w, "%s-%d\t%s\t%s\t%s\t%s\t%s\n", r.Topic, r.Partition, r.offsets(), bytesText(r.Bytes), r.Layout, r.Segment, r.Note)
		} else {
			fmt.Fprintf(w, "%s-%d\t%s\t%d\t%s\t%s\t%s\t%s\t%s\n", r.Topic, r.Partition, r.offsets(), r.Segments, bytesText(r.Bytes), r.Layout, r.TopicID, r.Prefix, r.Note)
		}
	}
}

func bucketCat() *cobra.Command {
	var s storeFlags
	var format string
	var asJSON, committed bool
	var offset int64
	var most int
	cmd := &cobra.Command{
		Use: "cat URL TOPIC[:PARTITION]", Short: "Print the records of a topic", Args: bucketArgs(2, 2),
		Long: `Print the records of a topic, one partition after the other. With --committed, those of transactions that were aborted are left out, as
the transaction indexes tell; Pinterest's layout has none.

What is damaged ends the partition, after all that is intact in front of it; the exit code is then 1.

--format is that of varve consume: %t topic, %p partition, %o offset, %T timestamp (ms), %k key, %v value, %h headers.`,
		Example: `  varve bucket cat varve-data/bucket history | head
  varve bucket cat 's3://logs/prod?endpoint=https://s3.example.com' orders:3 --offset 1000000 -n 10 --json --key-pair prod=private.pem`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if offset < 0 || most < 0 {
				return usageError{errors.New("--offset and --max must not be negative")}
			}
			r, err := s.openReader(args[0])
			if err != nil {
				return err
			}
			found, _, err := chosen(cmd.Context(), r, args)
			if err != nil {
				return err
			}
			out := bufio.NewWriterSize(cmd.OutOrStdout(), 256<<10)
			defer out.Flush()
			cat := &catter{reader: r, committed: committed, from: offset, left: most, print: printer(out, format, asJSON)}
			var total int64
			for _, p := range found {
				for _, f := range p.Segments {
					total += f.Objects[bucketlayout.Log]
				}
			}
			cat.progress = newProgress(cmd, total)
			defer cat.progress.close()
			var failed []error
			for _, p := range found {
				err := cat.partition(cmd.Context(), p)
				if errors.Is(err, errEnough) {
					break
				}
				if failed = append(failed, err); cmd.Context().Err() != nil {
					break
				}
			}
			return errors.Join(failed...)
		},
	}
	s.addAccess(cmd)
	f := cmd.Flags()
	f.StringVarP(&format, "format", "f", `%v\n`, "how to print a record")
	f.BoolVar(&asJSON, "json", false, "print a line of JSON per record")
	f.BoolVar(&committed, "committed", false, "only records of committed transactions (read_committed)")
	f.Int64VarP(&offset, "offset", "o", 0, "where to begin, in every partition")
	f.IntVarP(&most, "max", "n", 0, "stop after so many records")
	return cmd
}

var errEnough = errors.New("as many records as were asked for")

// catter prints partitions.
type catter struct {
	reader    *bucketscan.Reader
	committed bool
	from      int64
	left      int // records to print, 0 for all
	print     func(*kgo.Record) error
	progress  *progress
}

func (c *catter) partition(ctx context.Context, p *bucketlayout.PartitionSegments) error {
	aborted := map[int64][]producerstate.AbortedTxn{} // by producer
	next := c.from                                    // what two segments hold is printed once
	for _, f := range p.Segments {
		if c.committed && f.Committed() {
			list, err := c.reader.Aborted(ctx, f)
			if err != nil {
				return fmt.Errorf("%s-%d: aborted transactions of the segment at offset %d: %w", p.Topic, p.Partition.Partition, f.Base, err)
			}
			for _, a := range list {
				aborted[a.ProducerID] = append(aborted[a.ProducerID], a)
			}
		}
	}
	for i, f := range p.Segments {
		if !f.Committed() || i+1 < len(p.Segments) && p.Segments[i+1].Base <= next && p.Segments[i+1].Committed() {
			c.progress.add(f.Objects[bucketlayout.Log])
			continue
		}
		err := c.reader.Records(ctx, f, func(i inspect.Item) error {
			r, ok := i.(*inspect.Record)
			if !ok || r.Offset < next {
				return nil
			}
			next = r.Offset + 1
			if r.Control != nil || r.Transactional && covered(aborted[r.ProducerID], r.Offset) {
				return nil
			}
			if err := c.print(kgoRecord(p, r)); err != nil {
				return err
			}
			if c.left--; c.left == 0 {
				return errEnough
			}
			return nil
		})
		if err != nil {
			return err
		}
		c.progress.add(f.Objects[bucketlayout.Log])
	}
	return nil
}

// covered reports whether an offset lies in one of a producer's aborted transactions.
func covered(list []producerstate.AbortedTxn, offset int64) bool {
	for _, a := range list {
		if a.FirstOffset <= offset && offset <= a.LastOffset {
			return true
		}
	}
	return false
}

func kgoRecord(p *bucketlayout.PartitionSegments, r *inspect.Record) *kgo.Record {
	out := &kgo.Record{Topic: p.Topic, Partition: p.Partition.Partition, Offset: r.Offset, Timestamp: time.UnixMilli(r.Timestamp), Key: r.Key, Value: r.Value}
	for _, h := range r.Headers {
		out.Headers = append(out.Headers, kgo.RecordHeader{Key: string(h.Key), Value: h.Value})
	}
	return out
}

func bucketVerify() *cobra.Command {
	var s storeFlags
	var asJSON bool
	cmd := &cobra.Command{
		Use: "verify URL [TOPIC[:PARTITION]]", Short: "Check every batch, index and manifest of a bucket", Args: bucketArgs(1, 2),
		Long: `Read all segments and check them: the checksum of every batch, that offsets go on from batch to batch and from segment to segment,
that manifests are of their segments, and that indexes point at what is there.

Findings are damaged, missing, gap (compaction leaves gaps, too) and unreadable, for which the exit code is 1; and, for which it is not, overlap (two segments
hold the same offsets, as after an unclean election), unfinished (an upload that never became a segment) and foreign (an object in
no layout).`,
		Example: `  varve bucket verify varve-data/bucket
  varve bucket verify 's3://logs/prod?endpoint=https://s3.example.com' orders --key-pair prod=private.pem --json`,
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := s.openReader(args[0])
			if err != nil {
				return err
			}
			found, catalog, err := chosen(cmd.Context(), r, args)
			if err != nil {
				return err
			}
			return verifyBucket(cmd, r, found, catalog, len(args) > 1, asJSON)
		},
	}
	s.addAccess(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "a line of JSON per finding, then one with the sum")
	return cmd
}

func verifyBucket(cmd *cobra.Command, r *bucketscan.Reader, found []*bucketlayout.PartitionSegments, catalog *bucketlayout.Catalog, part, asJSON bool) error {
	var total int64
	for _, p := range found {
		for _, f := range p.Segments {
			total += f.Bytes()
		}
	}
	bar := newBar(total, "B")
	var findings []bucketscan.Finding
	note := func(f bucketscan.Finding) { findings = append(findings, f) }
	var sum struct {
		Partitions int `json:"partitions"`
		bucketscan.Checked
		Findings int `json:"findings"`
		Losses   int `json:"losses"`
	}
	for _, p := range found {
		checked, err := r.Verify(cmd.Context(), p, note, bar.add)
		if err != nil {
			return err
		}
		sum.Partitions++
		sum.Segments, sum.Batches, sum.Bytes = sum.Segments+checked.Segments, sum.Batches+checked.Batches, sum.Bytes+checked.Bytes
	}
	bar.close()
	if !part {
		for _, key := range catalog.Foreign {
			note(bucketscan.Finding{Class: bucketscan.Foreign, Key: key, Text: "in no layout"})
		}
	}
	out := bufio.NewWriter(cmd.OutOrStdout())
	defer out.Flush()
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	for _, f := range findings {
		if f.Class.Loss() {
			sum.Losses++
		}
		if asJSON {
			if err := encoder.Encode(f); err != nil {
				return err
			}
		} else {
			fmt.Fprintf(out, "%s: %s: %s\n", f.Class, f.Key, f.Text)
		}
	}
	sum.Findings = len(findings)
	if asJSON {
		if err := encoder.Encode(sum); err != nil {
			return err
		}
	} else {
		fmt.Fprintf(out, "%d partitions, %d segments, %d batches, %s: %d findings\n", sum.Partitions, sum.Segments, sum.Batches, bytesText(sum.Bytes), sum.Findings)
	}
	if sum.Losses > 0 {
		return fmt.Errorf("%d findings are losses", sum.Losses)
	}
	return nil
}
