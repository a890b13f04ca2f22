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
	"github.com/twmb/franz-go/pkg/kadm"
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
	cmd.AddCommand(tierList(c), tierWho(c), tierFsck(c))
	return cmd
}

// Info is the broker's word on a partition; the name keeps its fields apart from the row's own.
type Info = tierinfo.Partition

// tierRow is one partition of tier ls.
type tierRow struct {
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	Broker    int32  `json:"broker"` // who says so: the leader, if it can be asked
	Info
	LocalBytes int64 `json:"localBytes"`
}

// askTier asks for the tier of topics, nil for all: a row per partition as its leader knows it, or where there is none as
// another replica does. Partitions of which nobody tells anything are the error, beside the rows of the others.
func askTier(ctx context.Context, cl *kgo.Client, topics []string, ask tierinfo.Ask) ([]tierRow, []tierinfo.Deleted, error) {
	var names []kmsg.MetadataRequestTopic
	for _, name := range topics {
		t := kmsg.NewMetadataRequestTopic()
		t.Topic = kmsg.StringPtr(name)
		names = append(names, t)
	}
	resp, err := askMetadata(ctx, cl, names)
	if err != nil {
		return nil, nil, err
	}
	var wanted kadm.TopicsSet
	for _, t := range resp.Topics {
		if t.ErrorCode != 0 {
			return nil, nil, fmt.Errorf("topic %s does not exist", *t.Topic)
		}
		for _, p := range t.Partitions {
			if topics != nil {
				wanted.Add(*t.Topic, p.Partition)
			}
		}
	}
	replicas, err := askReplicas(ctx, cl, wanted, ask)
	if err != nil {
		return nil, nil, err
	}
	rows := []tierRow{}
	var unknown []error
	for _, t := range resp.Topics {
		for _, p := range t.Partitions {
			r, ok := replicas.best(*t.Topic, p.Partition, p.Leader)
			if !ok {
				unknown = append(unknown, fmt.Errorf("nothing is known of %s-%d: %w", *t.Topic, p.Partition, replicas.why(p.Replicas)))
				continue
			}
			if r.Broker != p.Leader && r.Failure == "" {
				r.Failure = fmt.Sprintf("without its leader, as broker %d knows it", r.Broker)
			}
			rows = append(rows, tierRow{Topic: r.Topic, Partition: r.Partition, Broker: r.Broker, Info: r.Info, LocalBytes: r.Size})
		}
	}
	slices.SortFunc(rows, func(a, b tierRow) int {
		return cmp.Or(strings.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	})
	return rows, replicas.deleted, errors.Join(unknown...)
}

func tierList(c *connection) *cobra.Command {
	var segments bool
	cmd := &cobra.Command{
		Use: "ls [TOPIC…]", Short: "Show per partition what is local, what is remote, and what is on its way",
		Long: `Show per partition what is local, what is remote, and what is on its way.

LOCAL and REMOTE are offset ranges, the end not included. LAG is what is sealed and not in the tier yet. STATE says why
nothing moves: an open transaction holds uploads back from its first offset on, a failing store says its error.

All of it is as the partition's leader sees it; varve topic describe --replicas shows what each replica holds.`,
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
			rows, _, unknown := askTier(cmd.Context(), cl, args, ask)
			if rows == nil {
				return unknown
			}
			if args == nil {
				rows = slices.DeleteFunc(rows, func(r tierRow) bool { return !r.Tiered && r.RemoteCount == 0 })
			}
			err = c.print(cmd, rows, func(w io.Writer) {
				fmt.Fprintln(w, "PARTITION\tLOCAL\tREMOTE\tSEGMENTS\tBYTES\tLAG\tSTATE")
				for _, r := range rows {
					fmt.Fprintf(w, "%s-%d\t%s\t%s\t%d\t%s\t%s\t%s\n", r.Topic, r.Partition, span(r.LocalStart, r.End), span(r.RemoteStart, r.RemoteEnd+1),
						r.RemoteCount, bytesText(r.RemoteBytes), lagText(r), stateText(r))
					for _, s := range r.List {
						fmt.Fprintf(w, "  %s\t\t%s\t\t%s\t\t%s\n", s.ID, span(s.Start, s.End+1), bytesText(s.Size), s.State)
					}
				}
			})
			return errors.Join(err, unknown)
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
				// Objects of a partition that nobody tells of would look like orphans.
				return fmt.Errorf("the bucket cannot be judged: %w", err)
			}
			var known []*tier.Segment
			for i := range rows {
				for j := range rows[i].List {
					known = append(known, &rows[i].List[j])
				}
			}
			told := map[tp.UUID]bool{}
			for i := range gone {
				ids[gone[i].ID] = true
				for j := range gone[i].List {
					if s := &gone[i].List[j]; !told[s.ID] { // every broker tells of it
						told[s.ID] = true
						known = append(known, s)
					}
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
	resp, err := askMetadata(ctx, cl, nil)
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
	grants                      bool
	plugin                      string // executable that reads the objects
}

func (s *storeFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&s.url, "bucket", "varve-data/bucket", "object store: a folder, or s3://BUCKET/PREFIX?endpoint=URL")
	s.addAccess(cmd)
}

// addAccess adds the flags beside the URL.
func (s *storeFlags) addAccess(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&s.prefix, "key-prefix", "", "what object keys begin with (rsm.config.key.prefix)")
	f.StringVar(&s.access, "access-key", "", "S3 access key; empty takes the environment or the credentials file")
	f.StringVar(&s.secret, "secret-key", "", "S3 secret key")
	f.StringArrayVar(&s.pairs, "key-pair", nil, "key pair of encrypted objects, ID=PRIVATE-KEY-PEM-FILE; may be repeated")
}

// addReads is for commands that read through a transport.
func (s *storeFlags) addReads(cmd *cobra.Command) {
	cmd.Flags().StringVar(&s.plugin, "fetcher", "", "executable that reads the objects in place of this program (remote.storage.fetcher.class.path)")
	cmd.Flags().BoolVar(&s.grants, "grants", false, "read objects of --bucket by the URLs that brokers sign (remote.fetch.grants=presigned), without credentials")
}

func (s *storeFlags) open() (objstore.Bucket, error) {
	b, err := bucket.Open(s.url, bucket.Options{AccessKey: s.access, SecretKey: s.secret})
	if err != nil {
		return nil, usageError{fmt.Errorf("--bucket: %w", err)}
	}
	return b, nil
}
