package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/varve-io/varve/internal/broker"
	"github.com/varve-io/varve/internal/config"
)

// nodesMax bounds varve cluster: more than that in one process is no cluster to learn from.
const nodesMax = 9

// laptop is what varve cluster was told.
type laptop struct {
	nodes                     int
	dir, listen, bucket, http string
	sets                      []string
}

func clusterCommand() *cobra.Command {
	var l laptop
	cmd := &cobra.Command{
		Use:   "cluster",
		Short: "Run several brokers in one process, for trying out and for tests",
		Long: `Run several brokers in one process, for trying out and for tests: a cluster with everything but machines that fail apart.
Nodes have the ids from 1 on, listen on consecutive ports from that of --listen, keep their data in DIR/1, DIR/2, … and share
one bucket. Topics have three replicas unless it is said otherwise, or as many as there are nodes. Of an even number of nodes
the last is no voter of the quorum.

A DIR that exists is continued, with as many nodes as it has or more. Each line of the log begins with its node.`,
		Example: `  varve cluster --nodes 3
  varve cluster --nodes 5 --dir /tmp/five --listen localhost:19092 --http localhost:9644 --set min.insync.replicas=2`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			configs, err := l.configs()
			if err != nil {
				return usageError{err}
			}
			return runCluster(cmd.Context(), configs)
		},
	}
	f := cmd.Flags()
	f.IntVar(&l.nodes, "nodes", 3, fmt.Sprintf("number of brokers, 1 to %d", nodesMax))
	f.StringVar(&l.dir, "dir", "varve-cluster", "folder of the nodes' data directories")
	f.StringVar(&l.listen, "listen", "localhost:9092", "address of the first node; the others take the ports after it")
	f.StringVar(&l.bucket, "bucket", "", "object store: a folder, or s3://BUCKET/PREFIX?endpoint=URL; empty takes DIR/bucket")
	f.StringVar(&l.http, "http", "", "address of the first node's /metrics, /live and /ready; the others take the ports after it")
	f.StringArrayVar(&l.sets, "set", nil, "one setting of all nodes, KEY=VALUE; may be repeated")
	return cmd
}

// configs are the nodes' settings, by position: node i+1 has the i-th.
func (l laptop) configs() ([]config.Values, error) {
	if l.nodes < 1 || l.nodes > nodesMax {
		return nil, fmt.Errorf("--nodes %d: want 1 to %d", l.nodes, nodesMax)
	}
	host, ports, err := portsFrom("--listen", l.listen, l.nodes)
	if err != nil {
		return nil, err
	}
	var httpHost string
	var httpPorts []int
	if l.http != "" {
		if httpHost, httpPorts, err = portsFrom("--http", l.http, l.nodes); err != nil {
			return nil, err
		}
	}
	old := 0 // nodes of the cluster that is continued
	for i := 1; i <= nodesMax; i++ {
		if _, err := os.Stat(filepath.Join(l.dir, strconv.Itoa(i), "meta.properties")); err == nil {
			old = i
		}
	}
	if old > l.nodes {
		return nil, fmt.Errorf("--nodes %d: %s has %d nodes already, and fewer may be no majority; start them all, or take another --dir", l.nodes, l.dir, old)
	}
	peer := host
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		peer = "localhost" // which is what such a node advertises
	}
	founders := l.nodes
	if old > 0 {
		founders = old
	}
	if founders%2 == 0 {
		founders--
	}
	var voters, bootstrap []string
	for i := range founders {
		address := net.JoinHostPort(peer, strconv.Itoa(ports[i]))
		voters, bootstrap = append(voters, fmt.Sprintf("%d@%s", i+1, address)), append(bootstrap, address)
	}
	bucket := l.bucket
	if bucket == "" {
		bucket = filepath.Join(l.dir, "bucket")
	}
	var out []config.Values
	for i := range l.nodes {
		raw, err := settings("", l.sets)
		if err != nil {
			return nil, err
		}
		if _, told := raw["default.replication.factor"]; !told {
			raw["default.replication.factor"] = strconv.Itoa(min(l.nodes, 3))
		}
		raw["node.id"] = strconv.Itoa(i + 1)
		raw["log.dir"] = filepath.Join(l.dir, strconv.Itoa(i+1))
		raw["varve.bucket"] = bucket
		raw["listeners"] = "PLAINTEXT://" + net.JoinHostPort(host, strconv.Itoa(ports[i]))
		if i < founders {
			raw["controller.quorum.voters"] = strings.Join(voters, ",")
		} else {
			raw["controller.quorum.bootstrap.servers"] = strings.Join(bootstrap, ",")
		}
		if l.http != "" {
			raw["varve.http.listener"] = net.JoinHostPort(httpHost, strconv.Itoa(httpPorts[i]))
		}
		values, err := config.Broker.NewValues(raw)
		if err == nil {
			err = config.CheckBroker(values)
		}
		if err != nil {
			return nil, fmt.Errorf("the configuration has problems:\n%w", err)
		}
		out = append(out, values)
	}
	return out, nil
}

// portsFrom are n consecutive ports from that of an address on.
func portsFrom(flag, address string, n int) (host string, ports []int, err error) {
	host, port, err := net.SplitHostPort(strings.TrimPrefix(address, "PLAINTEXT://"))
	first, err2 := strconv.Atoi(port)
	if err != nil || err2 != nil || first < 1 || first+n-1 > 65535 {
		return "", nil, fmt.Errorf("%s %q: want HOST:PORT, with room for %d ports", flag, address, n)
	}
	for i := range n {
		ports = append(ports, first+i)
	}
	return host, ports, nil
}

// runCluster runs the nodes until ctx ends or one of them fails, and then stops them all.
func runCluster(ctx context.Context, configs []config.Values) error {
	limitMemory()
	start := time.Now()
	var mu sync.Mutex
	var serving []string
	group, ctx := errgroup.WithContext(ctx)
	for _, values := range configs {
		id := values.Int("node.id")
		logger := nodeLogger(values, os.Stderr)
		group.Go(func() error {
			err := broker.Run(ctx, broker.Options{Config: values, Logger: logger, Started: func(addresses []string) {
				mu.Lock()
				defer mu.Unlock()
				serving = append(serving, addresses...)
				logger.Info("varve serves", "listeners", strings.Join(addresses, ","))
				if len(serving) == len(configs) {
					logger.Info("the cluster serves", "nodes", len(configs), "took", time.Since(start).Round(time.Millisecond).String())
				}
			}})
			if err != nil {
				return fmt.Errorf("node %d: %w", id, err)
			}
			if ctx.Err() == nil {
				return errors.New("node " + strconv.Itoa(id) + " ended by itself")
			}
			return nil
		})
	}
	return group.Wait()
}

// nodeLogger is a logger whose lines begin with the node, or whose JSON names it.
func nodeLogger(v config.Values, w io.Writer) *slog.Logger {
	if v.Get("varve.log.format") == "json" {
		return newLogger(v, w).With("node.id", v.Int("node.id"))
	}
	return newLogger(v, &prefixed{w: w, prefix: fmt.Sprintf("[%d] ", v.Int("node.id"))})
}

// prefixed puts a text in front of each write. A handler of slog writes a line at a time, and one at a time.
type prefixed struct {
	w      io.Writer
	prefix string
}

func (p *prefixed) Write(line []byte) (int, error) {
	if _, err := p.w.Write(append([]byte(p.prefix), line...)); err != nil {
		return 0, err
	}
	return len(line), nil
}
