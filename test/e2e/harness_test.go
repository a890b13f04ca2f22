// Package e2e runs the binary as its users do: real processes, real signals, a real S3 server.
package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/internal/testport"
)

var binary string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "varve-e2e-")
	if err != nil {
		panic(err)
	}
	binary = filepath.Join(dir, "varve")
	build := exec.Command("go", "build", "-o", binary, "../../cmd/varve")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "build varve:", err)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// fast makes the broker's clocks quick and its tier eager.
var fast = []string{"remote.log.manager.task.interval.ms=100", "log.retention.check.interval.ms=100", "log.initial.task.delay.ms=0", "group.initial.rebalance.delay.ms=0",
	"varve.remote.delete.delay.ms=1000", "offsets.topic.num.partitions=4"}

// node is one server of a test.
type node struct {
	t    *testing.T
	dir  string
	port int
	web  int // of /metrics and /ready, where a test wants them
	args []string

	cmd  *exec.Cmd
	done chan error
	mu   sync.Mutex
	out  bytes.Buffer
}

func (n *node) Write(p []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.out.Write(p)
}

func (n *node) log() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.out.String()
}

// newNode describes a server; sets are KEY=VALUE.
func newNode(t *testing.T, sets ...string) *node {
	t.Helper()
	n := &node{t: t, dir: t.TempDir(), port: testport.Free(t)}
	for _, s := range append(append([]string{}, fast...), sets...) {
		n.args = append(n.args, "--set", s)
	}
	t.Cleanup(func() {
		if n.cmd != nil {
			n.signal(syscall.SIGKILL)
			<-n.done
		}
		if t.Failed() {
			t.Logf("log of the node:\n%s", n.log())
		}
	})
	return n
}

func (n *node) address() string { return fmt.Sprintf("127.0.0.1:%d", n.port) }

// start runs the server and returns when it serves.
func (n *node) start() {
	n.t.Helper()
	n.launch()
	n.serves()
}

// launch runs the server.
func (n *node) launch() {
	n.t.Helper()
	n.cmd = exec.Command(binary, append([]string{"server", "--dir", n.dir, "--listen", n.address()}, n.args...)...)
	n.cmd.Stdout, n.cmd.Stderr = n, n
	if err := n.cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	n.done = make(chan error, 1)
	cmd, done := n.cmd, n.done
	go func() { done <- cmd.Wait() }()
}

// serves returns when clients are served.
func (n *node) serves() {
	n.t.Helper()
	n.until("the server serves", func() bool {
		select {
		case err := <-n.done:
			n.cmd = nil
			n.t.Fatalf("the server ended: %v\n%s", err, n.log())
		default:
		}
		// The port is open before the server is: ask something.
		cl, err := kgo.NewClient(kgo.SeedBrokers(n.address()), kgo.RetryTimeout(time.Second))
		if err != nil {
			n.t.Fatal(err)
		}
		defer cl.Close()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		return cl.Ping(ctx) == nil
	})
}

func (n *node) signal(s syscall.Signal) { n.cmd.Process.Signal(s) }

// wait returns how the process ended.
func (n *node) wait(limit time.Duration) error {
	n.t.Helper()
	select {
	case err := <-n.done:
		n.cmd = nil
		return err
	case <-time.After(limit):
		n.t.Fatalf("the server did not end within %v", limit)
		return nil
	}
}

func (n *node) kill() {
	n.t.Helper()
	n.signal(syscall.SIGKILL)
	n.wait(10 * time.Second)
}

func (n *node) stop() {
	n.t.Helper()
	n.signal(syscall.SIGTERM)
	if err := n.wait(10 * time.Second); err != nil {
		n.t.Fatalf("stop: %v", err)
	}
}

// until polls for something that another process does; the limit is far above what it takes.
func (n *node) until(what string, ok func() bool) {
	n.t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(30 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-limit:
			n.t.Fatalf("waiting for 30 s, but not: %s\n%s", what, n.log())
		}
	}
}

func (n *node) client(opts ...kgo.Opt) *kgo.Client {
	n.t.Helper()
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(n.address()), kgo.MetadataMinAge(50 * time.Millisecond)}, opts...)...)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(cl.Close)
	return cl
}

func (n *node) createTopic(name string, partitions int32, configs ...string) {
	n.t.Helper()
	set := map[string]*string{}
	for _, c := range configs {
		k, v, _ := strings.Cut(c, "=")
		set[k] = &v
	}
	if _, err := kadm.NewClient(n.client()).CreateTopic(context.Background(), partitions, 1, set, name); err != nil {
		n.t.Fatal(err)
	}
}

// tieredConfig makes data leave the broker as soon as it is sealed.
var tieredConfig = []string{"remote.storage.enable=true", "internal.segment.bytes=30000", "local.retention.bytes=1", "retention.ms=-1"}

// produce writes count records, numbered from first, and demands that all are acknowledged.
func produce(t *testing.T, cl *kgo.Client, topic string, first, count int) {
	t.Helper()
	var mu sync.Mutex
	var failed error
	for i := first; i < first+count; i++ {
		cl.Produce(context.Background(), &kgo.Record{Topic: topic, Partition: 0, Key: []byte(fmt.Sprint(i)), Value: value(i)}, func(_ *kgo.Record, err error) {
			mu.Lock()
			failed = errors.Join(failed, err)
			mu.Unlock()
		})
		if i%100 == 99 {
			if err := cl.Flush(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := cl.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
	if failed != nil {
		t.Fatal(failed)
	}
}

func value(i int) []byte { return bytes.Repeat([]byte(fmt.Sprintf("value %d ", i)), 10) }

// readAll reads partition 0 from its start to its end and demands records 0 to count-1, each once and in order.
func readAll(t *testing.T, n *node, topic string, count int, opts ...kgo.Opt) {
	t.Helper()
	cl := n.client(append([]kgo.Opt{kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().AtStart()}})}, opts...)...)
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	for next := 0; next < count; {
		fetches := cl.PollFetches(ctx)
		if err := fetches.Err0(); err != nil {
			t.Fatalf("at record %d of %d: %v", next, count, err)
		}
		fetches.EachError(func(topic string, p int32, err error) { t.Fatalf("%s-%d: %v", topic, p, err) })
		fetches.EachRecord(func(r *kgo.Record) {
			if string(r.Key) != fmt.Sprint(next) || !bytes.Equal(r.Value, value(next)) {
				t.Fatalf("offset %d holds record %q, want %d", r.Offset, r.Key, next)
			}
			next++
		})
	}
	cl.Close()
}

// varve runs a tool and returns its output and exit code.
func (n *node) varve(args ...string) (string, int) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, binary, args...).CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		n.t.Fatal(err)
	}
	if exit != nil {
		return string(out), exit.ExitCode()
	}
	return string(out), 0
}
