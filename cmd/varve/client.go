package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// connection is how the tools reach a cluster, and how they answer.
type connection struct {
	brokers string
	json    bool
}

// flags adds the flags that all tools share.
func (c *connection) flags(cmd *cobra.Command) {
	cmd.PersistentFlags().StringVarP(&c.brokers, "brokers", "b", "localhost:9092", "bootstrap brokers, HOST:PORT,…")
	cmd.PersistentFlags().BoolVar(&c.json, "json", false, "answer in JSON, one document or one line per item")
}

func (c *connection) seeds() []string { return strings.Split(c.brokers, ",") }

// client connects; a cluster that cannot be reached is found out at once and said in words.
func (c *connection) client(ctx context.Context, opts ...kgo.Opt) (*kgo.Client, error) {
	all := append([]kgo.Opt{kgo.SeedBrokers(c.seeds()...), kgo.ClientID("varve"), kgo.DialTimeout(3 * time.Second), kgo.RetryTimeout(10 * time.Second)}, opts...)
	cl, err := kgo.NewClient(all...)
	if err != nil {
		return nil, usageError{err}
	}
	ping, cancel := context.WithTimeout(ctx, 4*time.Second)
	defer cancel()
	if err := cl.Ping(ping); err != nil {
		cl.Close()
		return nil, c.explain(err)
	}
	return cl, nil
}

func (c *connection) admin(ctx context.Context) (*kadm.Client, error) {
	cl, err := c.client(ctx)
	if err != nil {
		return nil, err
	}
	return kadm.NewClient(cl), nil
}

// patience is how long one broker may take to answer what needs no waiting: one that hangs must not hold up the rest.
const patience = 5 * time.Second

// askAny asks the bootstrap brokers, one after the other, what any broker can answer. The client by itself would pick one of
// those that it has heard of, which may be one that hangs.
func askAny(ctx context.Context, cl *kgo.Client, req kmsg.Request) (kmsg.Response, error) {
	var failed error
	for _, seed := range cl.SeedBrokers() {
		short, cancel := context.WithTimeout(ctx, patience)
		resp, err := seed.Request(short, req)
		cancel()
		if err == nil {
			return resp, nil
		}
		if failed = errors.Join(failed, err); ctx.Err() != nil {
			break
		}
	}
	return nil, failed
}

// askMetadata asks for brokers and topics; no topics is none, nil is all.
func askMetadata(ctx context.Context, cl *kgo.Client, topics []kmsg.MetadataRequestTopic) (*kmsg.MetadataResponse, error) {
	req := kmsg.NewPtrMetadataRequest()
	req.Topics = topics
	resp, err := askAny(ctx, cl, req)
	if err != nil {
		return nil, err
	}
	return resp.(*kmsg.MetadataResponse), nil
}

// explain says what may be wrong with the way to the cluster.
func (c *connection) explain(err error) error {
	hint := ""
	var dns *net.DNSError
	switch {
	case errors.As(err, &dns):
		hint = "the name does not resolve; if it is not what you gave with --brokers, it is what a broker advertises: check its advertised.listeners"
	case errors.Is(err, syscall.ECONNREFUSED):
		hint = "nothing listens there; is the server running, and is this the address that it advertises?"
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
		hint = "the connection was closed at once: does this listener want TLS or SASL?"
	case errors.Is(err, context.DeadlineExceeded):
		hint = "no answer in time; a firewall, or a port that speaks something else (TLS?)"
	}
	if hint == "" {
		return fmt.Errorf("cannot reach %s: %w", c.brokers, err)
	}
	return fmt.Errorf("cannot reach %s: %w\n  %s", c.brokers, err, hint)
}

// print writes v as JSON, or calls text.
func (c *connection) print(cmd *cobra.Command, v any, text func(w io.Writer)) error {
	if c.json {
		e := json.NewEncoder(cmd.OutOrStdout())
		e.SetEscapeHTML(false)
		return e.Encode(v)
	}
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 4, 2, ' ', 0)
	text(w)
	return w.Flush()
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

// bytesText is a size that a person can read.
func bytesText(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	f, i := float64(n), 0
	for f >= 1024 && i < len(units)-1 {
		f, i = f/1024, i+1
	}
	if i == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", f, units[i])
}

// someArgs wants at least one of what.
func someArgs(what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) == 0 {
			return usageError{fmt.Errorf("want at least one %s", what)}
		}
		return nil
	}
}

// printDeleted tells of each name whether it went, and returns what failed.
func (c *connection) printDeleted(cmd *cobra.Command, names []string, failure func(name string) error) error {
	var failed error
	for _, name := range names {
		if err := failure(name); err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", name, err))
			continue
		}
		if err := c.print(cmd, map[string]any{"deleted": name}, func(w io.Writer) { fmt.Fprintf(w, "deleted %s\n", name) }); err != nil {
			return err
		}
	}
	return failed
}

// pairs reads KEY=VALUE flags.
func pairs(list []string) (map[string]*string, error) {
	out := map[string]*string{}
	for _, s := range list {
		k, v, ok := strings.Cut(s, "=")
		if !ok {
			return nil, usageError{fmt.Errorf("%q: want KEY=VALUE", s)}
		}
		if _, twice := out[k]; twice {
			return nil, usageError{fmt.Errorf("%s is given twice", k)}
		}
		out[k] = &v
	}
	return out, nil
}
