// Package compat runs other people's software against a Varve broker: client libraries with their own suites, command line
// tools, and Apache Kafka's tools on the files that Varve wrote.
//
// The tests take minutes and need foreign programs (see setup); they are skipped, loudly, unless VARVE_COMPAT=1.
package compat

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// binary is the program under test, built once. Empty: the tests are not asked for.
var binary string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if os.Getenv("VARVE_COMPAT") == "" {
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "varve-compat-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "varve")
	build := exec.Command("go", "build", "-o", binary, "../../cmd/varve")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "building varve:", err)
		return 1
	}
	return m.Run()
}

func asked(t *testing.T) {
	t.Helper()
	if binary == "" {
		t.Skip("SKIPPED: set VARVE_COMPAT=1 to run foreign software against Varve (minutes; see test/compat/setup)")
	}
}

// need skips a test whose foreign program is missing.
func need(t *testing.T, program string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		t.Skipf("SKIPPED: %s is missing; run test/compat/setup", program)
	}
	return path
}

// broker is a node under test.
type broker struct {
	dir, addr string
	in        io.Closer // the broker is asked to stop when this closes, even if the test is killed
	ended     chan error
}

// start runs a broker until the end of the test. Settings are Kafka's, KEY=VALUE.
func start(t *testing.T, settings ...string) *broker {
	t.Helper()
	asked(t)
	b := &broker{dir: filepath.Join(t.TempDir(), "data"), addr: "127.0.0.1:" + strconv.Itoa(freePorts(t, 1))}
	b.run(t, []string{"server", "--dir", b.dir, "--listen", b.addr}, settings)
	return b
}

// startCluster runs several brokers, in one process. addr lists them all.
func startCluster(t *testing.T, nodes int, settings ...string) *broker {
	t.Helper()
	asked(t)
	port := freePorts(t, nodes)
	b := &broker{dir: filepath.Join(t.TempDir(), "data")}
	var addrs []string
	for i := range nodes {
		addrs = append(addrs, "127.0.0.1:"+strconv.Itoa(port+i))
	}
	b.addr = strings.Join(addrs, ",")
	b.run(t, []string{"cluster", "--nodes", strconv.Itoa(nodes), "--dir", b.dir, "--listen", addrs[0]}, settings)
	b.ready(t, nodes)
	return b
}

// ready waits for a cluster that can do all that its nodes will be asked.
func (b *broker) ready(t *testing.T, nodes int) {
	t.Helper()
	await(t, "all brokers are known", func() bool {
		brokers, err := b.admin(t).ListBrokers(within(t))
		return err == nil && len(brokers) == nodes
	})
	await(t, "groups have coordinators", func() bool {
		var o kadm.Offsets
		o.AddOffset("none", 0, 0, -1)
		_, err := b.admin(t).CommitOffsets(within(t), "warm-up", o)
		return err == nil
	})
}

// run starts one or several brokers and waits until every address is served.
func (b *broker) run(t *testing.T, command, settings []string) {
	t.Helper()
	given := map[string]bool{}
	for _, s := range settings {
		key, _, _ := strings.Cut(s, "=")
		given[key] = true
	}
	for _, s := range []string{"group.initial.rebalance.delay.ms=0", "remote.log.manager.task.interval.ms=500", "log.retention.check.interval.ms=500",
		"log.initial.task.delay.ms=500", "offsets.topic.num.partitions=4", "num.partitions=3"} {
		if key, _, _ := strings.Cut(s, "="); !given[key] {
			settings = append(settings, s)
		}
	}
	for _, s := range settings {
		command = append(command, "--set", s)
	}
	b.process(t, command)
}

// process runs the binary with arguments and waits until every address is served.
func (b *broker) process(t *testing.T, command []string) {
	t.Helper()
	args := append([]string{"-c", `"$@" </dev/null & p=$!; cat >/dev/null; kill -TERM $p 2>/dev/null; wait $p`, "compat", binary}, command...)
	cmd := exec.Command("bash", args...)
	output := filepath.Join(t.TempDir(), "server.log")
	out, err := os.Create(output)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = out, out
	if b.in, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	b.ended = make(chan error, 1)
	go func() { b.ended <- cmd.Wait() }()
	t.Cleanup(func() {
		b.stop(t)
		out.Close()
		if t.Failed() {
			text, _ := os.ReadFile(output)
			t.Logf("the broker's output ends with:\n%s", text[max(0, len(text)-3000):])
		}
	})
	for _, addr := range strings.Split(b.addr, ",") {
		await(t, addr+" serves", func() bool {
			conn, err := net.Dial("tcp", addr)
			if err == nil {
				conn.Close()
			}
			return err == nil
		})
	}
}

// stop ends the broker as SIGTERM does, and waits for it.
func (b *broker) stop(t *testing.T) {
	t.Helper()
	if b.in == nil {
		return
	}
	b.in.Close()
	b.in = nil
	select {
	case err := <-b.ended:
		if err != nil {
			t.Errorf("the broker ended with %v", err)
		}
	case <-time.After(30 * time.Second):
		t.Error("the broker does not stop")
	}
}

// freePorts finds n consecutive ports below the ephemeral range, so that no outgoing connection takes them before the
// brokers do, and returns the first.
func freePorts(t *testing.T, n int) int {
	t.Helper()
next:
	for i := range 900 / n {
		port := 31050 + (os.Getpid()*7+i*n)%900
		for j := range n {
			l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port+j))
			if err != nil {
				continue next
			}
			l.Close()
		}
		return port
	}
	t.Fatal("no free ports")
	return 0
}

// await polls until the condition holds; half a minute is far more than any of them takes.
func await(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(30 * time.Second)
	for !cond() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("it does not come to pass that %s", what)
		}
	}
}

// command is a foreign program that must end within a time.
type command struct {
	dir, stdin string
	env        []string
	limit      time.Duration // 0: a minute
}

// try runs a program and returns its output. timeout(1) ends it with all its children, even if the test is gone.
func (c command) try(t *testing.T, args ...string) (stdout string, stderr string, err error) {
	t.Helper()
	if c.limit == 0 {
		c.limit = time.Minute
	}
	cmd := exec.Command("timeout", append([]string{"-k", "5", strconv.Itoa(int(c.limit.Seconds()))}, args...)...)
	cmd.Dir, cmd.Stdin = c.dir, strings.NewReader(c.stdin)
	cmd.Env = append(os.Environ(), c.env...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 124 {
		err = fmt.Errorf("not done after %v", c.limit)
	}
	return out.String(), errs.String(), err
}

// run is try that must succeed.
func (c command) run(t *testing.T, args ...string) string {
	t.Helper()
	out, errs, err := c.try(t, args...)
	if err != nil {
		t.Fatalf("%s: %v\n%s\n%s", strings.Join(args, " "), err, tail(out), tail(errs))
	}
	return out
}

func tail(s string) string { return s[max(0, len(s)-3000):] }

// client connects kgo, the judge of what the foreign software did.
func (b *broker) client(t *testing.T, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(strings.Split(b.addr, ",")...)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cl.Close)
	return cl
}

func (b *broker) admin(t *testing.T) *kadm.Client {
	t.Helper()
	return kadm.NewClient(b.client(t))
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// topic creates a topic with as many replicas as the broker thinks fit; configs are KEY=VALUE.
func (b *broker) topic(t *testing.T, name string, partitions int32, configs ...string) {
	t.Helper()
	set := map[string]*string{}
	for _, c := range configs {
		k, v, _ := strings.Cut(c, "=")
		set[k] = &v
	}
	if _, err := b.admin(t).CreateTopic(within(t), partitions, -1, set, name); err != nil {
		t.Fatalf("creating %s: %v", name, err)
	}
}

// tieredConfigs move all but the active segment out of the local log.
var tieredConfigs = []string{"remote.storage.enable=true", "internal.segment.bytes=4096", "local.retention.bytes=1"}

// tiered waits until at least the given number of offsets of each partition are in the bucket alone.
func (b *broker) tiered(t *testing.T, topic string, atLeast int64) {
	t.Helper()
	adm := b.admin(t)
	const earliestLocal = -4
	await(t, fmt.Sprintf("%d offsets of %s are in the bucket alone", atLeast, topic), func() bool {
		starts, err := adm.ListStartOffsets(within(t), topic)
		if err != nil || starts.Error() != nil {
			return false
		}
		local, err := adm.ListOffsetsAfterMilli(within(t), earliestLocal, topic)
		if err != nil || local.Error() != nil {
			t.Fatal(err, local.Error())
		}
		far := true
		starts.Each(func(s kadm.ListedOffset) {
			l, ok := local.Lookup(s.Topic, s.Partition)
			far = far && ok && l.Offset-s.Offset >= atLeast
		})
		return far
	})
}

// both runs a test on a plain topic and on one whose beginning is in the bucket. The test calls tiered between writing and
// reading.
func both(t *testing.T, b *broker, name string, partitions int32, f func(t *testing.T, topic string, toTier func(t *testing.T))) {
	t.Helper()
	t.Run("plain", func(t *testing.T) {
		b.topic(t, name, partitions)
		f(t, name, func(*testing.T) {})
	})
	t.Run("tiered", func(t *testing.T) {
		b.topic(t, name+"-tiered", partitions, tieredConfigs...)
		f(t, name+"-tiered", func(t *testing.T) { b.tiered(t, name+"-tiered", 1) })
	})
}

// values are n values of about 60 bytes that differ.
func values(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("value %06d %s", i, strings.Repeat(string(rune('a'+i%26)), 48))
	}
	return out
}

// consumed reads the first n records of a topic with kgo.
func (b *broker) consumed(t *testing.T, topic string, n int, opts ...kgo.Opt) []*kgo.Record {
	t.Helper()
	cl := b.client(t, append([]kgo.Opt{kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart())}, opts...)...)
	ctx := within(t)
	var out []*kgo.Record
	for len(out) < n {
		fetches := cl.PollRecords(ctx, n-len(out))
		for _, e := range fetches.Errors() {
			t.Fatalf("%d of %d records, then %s-%d: %v", len(out), n, e.Topic, e.Partition, e.Err)
		}
		out = append(out, fetches.Records()...)
	}
	return out
}
