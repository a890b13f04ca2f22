package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/varve-io/varve/internal/broker"
	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/quietlog"
)

func serverCommand() *cobra.Command {
	var file, dir, bucket, listen, http, voters, join, rack string
	var id int
	var sets []string
	cmd := &cobra.Command{
		Use:   "server",
		Short: "Run a broker",
		Long: `Run a broker. Without any option it is a cluster of its own: it serves localhost:9092, keeps its data in ./varve-data and its
bucket in ./varve-data/bucket.

With --voters it founds a cluster together with the nodes named there, which keep the metadata by majority; every one of them is
started with the same list. With --join it becomes one more broker of a cluster that runs. Nodes of a cluster share one --bucket.
A node that has its metadata knows where it belongs and needs neither.

Settings come from the defaults, then the file, then the flags; the later wins. Keys are Kafka's; see docs/configuration.md.`,
		Example: `  varve server
  varve server --dir /var/lib/varve --listen 0.0.0.0:9092 --set advertised.listeners=PLAINTEXT://broker1:9092
  varve server --id 1 --dir d1 --listen localhost:9092 --bucket b --voters 1@localhost:9092,2@localhost:9093,3@localhost:9094
  varve server --id 4 --dir d4 --listen localhost:9095 --bucket b --join localhost:9092
  varve server --bucket 's3://logs/prod?endpoint=https://s3.example.com&path-style=true' --http :9644
  varve server --config server.properties --set log.retention.hours=24`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			raw, err := settings(file, sets)
			if err != nil {
				return usageError{err}
			}
			flag := func(name, key, value string) {
				if cmd.Flags().Changed(name) {
					raw[key] = value
				}
			}
			flag("dir", "log.dir", dir)
			flag("bucket", "varve.bucket", bucket)
			flag("http", "varve.http.listener", http)
			flag("voters", "controller.quorum.voters", voters)
			flag("join", "controller.quorum.bootstrap.servers", join)
			flag("rack", "broker.rack", rack)
			flag("id", "node.id", fmt.Sprint(id))
			if !strings.Contains(listen, "://") {
				listen = "PLAINTEXT://" + listen
			}
			flag("listen", "listeners", listen)
			values, err := config.Broker.NewValues(raw)
			if err == nil {
				err = config.CheckBroker(values)
			}
			if err != nil {
				return usageError{fmt.Errorf("the configuration has problems:\n%w", err)}
			}
			logger := newLogger(values, os.Stderr)
			start := time.Now()
			logger.Info("varve starts", "version", versionText(), "node.id", values.Int("node.id"), "log.dir", values.Get("log.dir"))
			limitMemory()
			return broker.Run(cmd.Context(), broker.Options{Config: values, Logger: logger, Started: func(addresses []string) {
				logger.Info("varve serves", "listeners", strings.Join(addresses, ","), "took", time.Since(start).Round(time.Millisecond).String())
			}})
		},
	}
	f := cmd.Flags()
	f.StringVarP(&file, "config", "c", "", "file with settings, in the syntax of server.properties")
	f.StringVar(&dir, "dir", "varve-data", "data directory (log.dir)")
	f.StringVar(&bucket, "bucket", "", "object store: a folder, or s3://BUCKET/PREFIX?endpoint=URL (varve.bucket)")
	f.StringVar(&listen, "listen", "localhost:9092", "address to serve Kafka on (listeners)")
	f.StringVar(&http, "http", "", "address of /metrics, /live and /ready (varve.http.listener)")
	f.StringVar(&voters, "voters", "", "nodes that found the cluster, ID@HOST:PORT,… (controller.quorum.voters)")
	f.StringVar(&join, "join", "", "nodes of the cluster to join, HOST:PORT,… (controller.quorum.bootstrap.servers)")
	f.StringVar(&rack, "rack", "", "rack or zone of this node (broker.rack)")
	f.IntVar(&id, "id", 1, "id of this node (node.id)")
	f.StringArrayVar(&sets, "set", nil, "one setting, KEY=VALUE; may be repeated")
	return cmd
}

// settings merges the file and the --set flags. The same key twice on the command line is an error, as it is in the file.
func settings(file string, sets []string) (map[string]string, error) {
	raw := map[string]string{}
	if file != "" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		if raw, err = config.ReadProperties(f); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
	}
	var problems []error
	seen := map[string]bool{}
	for _, s := range sets {
		key, value, ok := strings.Cut(s, "=")
		key = strings.TrimSpace(key)
		switch {
		case !ok || key == "":
			problems = append(problems, fmt.Errorf("--set %q: want KEY=VALUE", s))
		case seen[key]:
			problems = append(problems, fmt.Errorf("--set %s is given twice", key))
		}
		seen[key] = true
		raw[key] = value
	}
	return raw, errors.Join(problems...)
}

func newLogger(v config.Values, w io.Writer) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(v.Get("varve.log.level"))) // one of four names that slog knows
	o := &slog.HandlerOptions{Level: level}
	if v.Get("varve.log.format") == "json" {
		return slog.New(quietlog.New(slog.NewJSONHandler(w, o)))
	}
	return slog.New(quietlog.New(slog.NewTextHandler(w, o)))
}
