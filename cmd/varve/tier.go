package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/bucket"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tier/uploader"
	"github.com/varve-io/varve/internal/tierinfo"
	"github.com/varve-io/varve/internal/tp"
)

func tierCommand() *cobra.Command {
	c := &connection{}
	cmd := &cobra.Command{Use: "tier", Short: "Look at what is in the bucket, and mend it"}
	c.flags(cmd)
	cmd.AddCommand(tierList(c), tierFsck(c))
	return cmd
}

// Info is the broker's word on a partition; the name keeps its fields apart from the row's own.
type Info = tierinfo.Partition

// tierRow is one partition of tier ls.
type tierRow struct {
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	Info
	LocalBytes int64 `json:"localBytes"`
}

// askTier asks every broker what it knows of the tier of topics; nil asks for all.
func askTier(ctx context.Context, cl *kgo.Client, topics []string, ask tierinfo.Ask) ([]tierRow, []tierinfo.Deleted, error) {
	req := kmsg.NewPtrDescribeLogDirsRequest()
	for _, name := range topics {
		t := kmsg.NewDescribeLogDirsRequestTopic()
		t.Topic = name
		req.Topics = append(req.Topics, t)
	}
	if topics != nil {
		if err := partitionsOf(ctx, cl, req); err != nil {
			return nil, nil, err
		}
	}
	tierinfo.Request(req, ask)
	var rows []tierRow
	var gone []tierinfo.Deleted
	meta, err := kmsg.NewPtrMetadataRequest().RequestWith(ctx, cl)
	if err != nil {
		return nil, nil, err
	}
	for _, b := range meta.Brokers {
		// Broker by broker, as it is: the client's own way of splitting the request loses tagged fields.
		answer, err := cl.Broker(int(b.NodeID)).Request(ctx, req)
		if err != nil {
			return nil, nil, err
		}
		resp := answer.(*kmsg.DescribeLogDirsResponse)
		deleted, err := tierinfo.GetDeleted(resp)
		if err != nil {
			return nil, nil, err
		}
		gone = append(gone, deleted...)
		for _, dir := range resp.Dirs {
			for _, t := range dir.Topics {
				for i := range t.Partitions {
					info, ok, err := tierinfo.Get(&t.Partitions[i])
					if err != nil {
						return nil, nil, err
					}
					if !ok {
						return nil, nil, errors.New("the broker tells nothing of its tier: it is no Varve, or an old one")
					}
					rows = append(rows, tierRow{Topic: t.Topic, Partition: t.Partitions[i].Partition, Info: info, LocalBytes: t.Partitions[i].Size})
				}
			}
		}
	}
	slices.SortFunc(rows, func(a, b tierRow) int {
		return cmp.Or(strings.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	})
	return rows, gone, nil
}

// partitionsOf fills in the partitions of the topics that the request names.
func partitionsOf(ctx context.Context, cl *kgo.Client, req *kmsg.DescribeLogDirsRequest) error {
	meta := kmsg.NewPtrMetadataRequest()
	for _, t := range req.Topics {
		mt := kmsg.NewMetadataRequestTopic()
		mt.Topic = kmsg.StringPtr(t.Topic)
		meta.Topics = append(meta.Topics, mt)
	}
	resp, err := meta.RequestWith(ctx, cl)
	if err != nil {
		return err
	}
	for i, t := range resp.Topics {
		if t.ErrorCode != 0 {
			return fmt.Errorf("topic %s does not exist", *t.Topic)
		}
		for _, p := range t.Partitions {
			req.Topics[i].Partitions = append(req.Topics[i].Partitions, p.Partition)
		}
	}
	return nil
}

func tierList(c *connection) *cobra.Command {
	var segments bool
	cmd := &cobra.Command{
		Use: "ls [TOPIC…]", Short: "Show per partition what is local, what is remote, and what is on its way",
		Long: `Show per partition what is local, what is remote, and what is on its way.

LOCAL and REMOTE are offset ranges, the end not included. LAG is what is sealed and not in the tier yet. STATE says why
nothing moves: an open transaction holds uploads back from its first offset on, a failing store says its error.`,
		Example: "  varve tier ls\n  varve tier ls history --segments",
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client(cmd.Context())
			if err != nil {
				return err
			}
			defer cl.Close()
			ask := tierinfo.Summary
			if segments {
				ask = tierinfo.Segments
			}
			if len(args) == 0 {
				args = nil
			}
			rows, _, err := askTier(cmd.Context(), cl, args, ask)
			if err != nil {
				return err
			}
			if args == nil {
				rows = slices.DeleteFunc(rows, func(r tierRow) bool { return !r.Tiered && r.RemoteCount == 0 })
			}
			return c.print(cmd, rows, func(w io.Writer) {
				fmt.Fprintln(w, "PARTITION\tLOCAL\tREMOTE\tSEGMENTS\tBYTES\tLAG\tSTATE")
				for _, r := range rows {
					fmt.Fprintf(w, "%s-%d\t%s\t%s\t%d\t%s\t%s\t%s\n", r.Topic, r.Partition, span(r.LocalStart, r.End), span(r.RemoteStart, r.RemoteEnd+1),
						r.RemoteCount, bytesText(r.RemoteBytes), lagText(r), stateText(r))
					for _, s := range r.List {
						fmt.Fprintf(w, "  %s\t\t%s\t\t%s\t\t%s\n", s.ID, span(s.Start, s.End+1), bytesText(s.Size), s.State)
					}
				}
			})
		},
	}
	cmd.Flags().BoolVar(&segments, "segments", false, "list every remote segment")
	return cmd
}

func span(from, to int64) string {
	if from < 0 || to <= from {
		return "-"
	}
	return fmt.Sprintf("%d..%d", from, to)
}

func lagText(r tierRow) string {
	if r.LagSegments == 0 {
		return "0"
	}
	return fmt.Sprintf("%s in %d", bytesText(r.LagBytes), r.LagSegments)
}

func stateText(r tierRow) string {
	var parts []string
	switch {
	case !r.Tiered && r.RemoteCount == 0:
		parts = append(parts, "not tiered")
	case !r.Tiered:
		parts = append(parts, "leaving the tier")
	case r.CopyDisabled:
		parts = append(parts, "copying is disabled")
	case r.Copying:
		parts = append(parts, "copying")
	}
	if r.Deleting > 0 {
		parts = append(parts, fmt.Sprintf("%d being deleted", r.Deleting))
	}
	if r.Tiered && r.Unstable >= 0 {
		parts = append(parts, fmt.Sprintf("held back by a transaction open since offset %d", r.Unstable))
	}
	if r.Failure != "" {
		parts = append(parts, r.Failure)
	}
	if len(parts) == 0 {
		return "ok"
	}
	return strings.Join(parts, ", ")
}

func tierFsck(c *connection) *cobra.Command {
	var store storeFlags
	var repair bool
	var age time.Duration
	cmd := &cobra.Command{
		Use: "fsck", Short: "Compare the bucket with what the cluster knows", Args: noArgs,
		Long: `Compare the bucket with what the cluster knows: objects that no record knows, records that stand still, objects that are
missing, and unfinished multipart uploads, which no listing shows. With --repair orphans and unfinished uploads of this
cluster's topics that are older than --min-age are removed. What belongs to others is never touched.

Exit code 1 if anything needs attention.`,
		Example: "  varve tier fsck --bucket varve-data/bucket\n  varve tier fsck --bucket 's3://logs/prod?endpoint=https://s3.example.com' --repair",
		RunE: func(cmd *cobra.Command, _ []string) error {
			b, err := store.open()
			if err != nil {
				return err
			}
			cl, err := c.client(cmd.Context())
			if err != nil {
				return err
			}
			defer cl.Close()
			ids, err := topicIDs(cmd.Context(), cl)
			if err != nil {
				return err
			}
			rows, gone, err := askTier(cmd.Context(), cl, nil, tierinfo.Segments)
			if err != nil {
				return err
			}
			var known []*tier.Segment
			for i := range rows {
				for j := range rows[i].List {
					known = append(known, &rows[i].List[j])
				}
			}
			for i := range gone {
				ids[gone[i].ID] = true
				for j := range gone[i].List {
					known = append(known, &gone[i].List[j])
				}
			}
			report, err := uploader.Fsck(cmd.Context(), b, known, uploader.FsckOptions{Prefix: store.prefix, Now: time.Now(), MinAge: age, Repair: repair,
				Ours: func(id tp.UUID) bool { return ids[id] }})
			if err != nil {
				return err
			}
			err = c.print(cmd, report, func(w io.Writer) { printFsck(w, report) })
			if err == nil && !report.Clean() {
				err = errors.New("the bucket needs attention")
			}
			return err
		},
	}
	store.add(cmd)
	cmd.Flags().BoolVar(&repair, "repair", false, "remove orphans and unfinished uploads of this cluster")
	cmd.Flags().DurationVar(&age, "min-age", 24*time.Hour, "leave alone what is younger")
	return cmd
}

func printFsck(w io.Writer, r *uploader.Report) {
	fmt.Fprintf(w, "objects\t%d\t%s\n", r.Objects, bytesText(r.Bytes))
	fmt.Fprintf(w, "orphans\t%d\t%s\n", len(r.Orphans), bytesText(r.OrphanBytes))
	for _, o := range r.Orphans {
		fmt.Fprintf(w, "  %s\t\t%s\n", o.Key, bytesText(o.Size))
	}
	fmt.Fprintf(w, "too young to judge\t%d\n", r.Young)
	fmt.Fprintf(w, "missing objects\t%d\n", len(r.Missing))
	for _, m := range r.Missing {
		fmt.Fprintf(w, "  %s\n", m.Key)
	}
	fmt.Fprintf(w, "dangling records\t%d\n", len(r.Dangling))
	for _, s := range r.Dangling {
		fmt.Fprintf(w, "  %s of %s-%d\t%s\n", s.ID, s.Topic, s.Partition, s.State)
	}
	if r.UploadsUnknown != nil {
		fmt.Fprintf(w, "unfinished uploads\tnot listed: %v\n", r.UploadsUnknown)
	} else {
		fmt.Fprintf(w, "unfinished uploads\t%d\t%s\n", len(r.Uploads), bytesText(r.UploadBytes))
	}
	fmt.Fprintf(w, "of others\t%d\n", r.Foreign)
	if r.Removed+r.Aborted > 0 {
		fmt.Fprintf(w, "removed\t%d objects, %d uploads\n", r.Removed, r.Aborted)
	}
}

func topicIDs(ctx context.Context, cl *kgo.Client) (map[tp.UUID]bool, error) {
	resp, err := kmsg.NewPtrMetadataRequest().RequestWith(ctx, cl)
	if err != nil {
		return nil, err
	}
	ids := map[tp.UUID]bool{}
	for _, t := range resp.Topics {
		ids[tp.UUID(t.TopicID)] = true
	}
	return ids, nil
}

// storeFlags name the bucket for tools that read it themselves.
type storeFlags struct {
	url, prefix, access, secret string
	pairs                       []string
}

func (s *storeFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&s.url, "bucket", "varve-data/bucket", "object store: a folder, or s3://BUCKET/PREFIX?endpoint=URL")
	f.StringVar(&s.prefix, "key-prefix", "", "what object keys begin with (rsm.config.key.prefix)")
	f.StringVar(&s.access, "access-key", "", "S3 access key; empty takes the environment or the credentials file")
	f.StringVar(&s.secret, "secret-key", "", "S3 secret key")
	f.StringArrayVar(&s.pairs, "key-pair", nil, "key pair of encrypted objects, ID=PRIVATE-KEY-PEM-FILE; may be repeated")
}

func (s *storeFlags) open() (objstore.Bucket, error) {
	b, err := bucket.Open(s.url, bucket.Options{AccessKey: s.access, SecretKey: s.secret})
	if err != nil {
		return nil, usageError{fmt.Errorf("--bucket: %w", err)}
	}
	return b, nil
}
