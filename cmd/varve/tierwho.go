package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/tierinfo"
)

func tierWho(c *connection) *cobra.Command {
	return &cobra.Command{
		Use: "who", Short: "Show which clients read from the bucket, and how much", Args: cobra.NoArgs,
		Long: `Show which clients read from the bucket by themselves, over all brokers since each of them started.

GRANTED is what brokers told a client the place of, in so many LOCATIONS. READ is what the client says it has read there, in so
many REQUESTS: the rest was skipped, is on its way, or was fetched from a broker after all. A client that only asks is one
whose reads fail.`,
		Example: "  varve tier who\n  varve tier who --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client(cmd.Context())
			if err != nil {
				return err
			}
			defer cl.Close()
			list, unknown := askReaders(cmd.Context(), cl)
			if list == nil {
				return unknown
			}
			err = c.print(cmd, list, func(w io.Writer) {
				fmt.Fprintln(w, "CLIENT\tHOST\tGRANTED\tLOCATIONS\tREAD\tREQUESTS\tLAST")
				for _, r := range list {
					fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%d\t%s\n", cmp.Or(r.Client, "(none)"), r.Host, bytesText(r.Granted), r.Locations, bytesText(r.Used), r.Requests,
						time.UnixMilli(r.Last).UTC().Format(time.RFC3339))
				}
			})
			return errors.Join(err, unknown)
		},
	}
}

// askReaders asks every living broker who reads from the bucket, and sums up by client and host. The list is nil only if no broker told;
// those that did not are the error.
func askReaders(ctx context.Context, cl *kgo.Client) ([]tierinfo.Reader, error) {
	req := kmsg.NewPtrDescribeLogDirsRequest()
	req.Topics = []kmsg.DescribeLogDirsRequestTopic{} // none
	tierinfo.Request(req, tierinfo.Readers)
	type key struct{ client, host string }
	sums := map[key]*tierinfo.Reader{}
	told := false
	silent, err := askEach(ctx, cl, req, func(_ int32, resp *kmsg.DescribeLogDirsResponse) error {
		list, ok, err := tierinfo.GetReaders(resp)
		if err != nil {
			return err
		}
		if !ok {
			return errors.New("it tells nothing of readers: it is no Varve, or an old one")
		}
		told = true
		for _, r := range list {
			sum := sums[key{r.Client, r.Host}]
			if sum == nil {
				sum = &tierinfo.Reader{Client: r.Client, Host: r.Host}
				sums[key{r.Client, r.Host}] = sum
			}
			sum.Locations += r.Locations
			sum.Granted += r.Granted
			sum.Requests += r.Requests
			sum.Used += r.Used
			sum.Last = max(sum.Last, r.Last)
		}
		return nil
	})
	for _, id := range slices.Sorted(maps.Keys(silent)) {
		err = errors.Join(err, fmt.Errorf("broker %d: %w", id, silent[id]))
	}
	if !told {
		return nil, err
	}
	out := []tierinfo.Reader{}
	for _, r := range sums {
		out = append(out, *r)
	}
	slices.SortFunc(out, func(a, b tierinfo.Reader) int {
		return cmp.Or(cmp.Compare(b.Granted, a.Granted), cmp.Compare(a.Client, b.Client), cmp.Compare(a.Host, b.Host))
	})
	return out, err
}
