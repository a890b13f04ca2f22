package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/internal/testport"
)

// TestKillLosesNothingAcknowledged kills the server again and again under an idempotent producer, while segments roll,
// are uploaded and deleted. What was acknowledged is there once and in order.
func TestKillLosesNothingAcknowledged(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("kill", 1, tieredConfig...)
	cl := n.client(kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.RecordRetries(1_000_000), kgo.ProducerLinger(0), kgo.RetryBackoffFn(func(int) time.Duration { return 20 * time.Millisecond }))
	const total = 60_000
	acked := make(chan struct{})
	var mu sync.Mutex
	var failed error
	go func() {
		defer close(acked)
		for i := 0; i < total; i++ {
			cl.Produce(context.Background(), &kgo.Record{Topic: "kill", Key: []byte(fmt.Sprint(i)), Value: value(i)}, func(_ *kgo.Record, err error) {
				mu.Lock()
				failed = errors.Join(failed, err)
				mu.Unlock()
			})
			if i%50 == 49 {
				if err := cl.Flush(context.Background()); err != nil {
					return
				}
			}
		}
		cl.Flush(context.Background())
	}()
	for round := 0; round < 6; round++ {
		select {
		case <-acked:
		case <-time.After(time.Duration(150+50*round) * time.Millisecond):
		}
		n.kill()
		n.start()
	}
	select {
	case <-acked:
	case <-time.After(2 * time.Minute):
		t.Fatal("the producer did not finish")
	}
	if failed != nil {
		t.Fatal(failed)
	}
	n.tiered("kill")
	readAll(t, n, "kill", total)
	n.until("what the kills left in the bucket is cleared away", func() bool {
		_, code := n.varve("tier", "fsck", "-b", n.address(), "--bucket", filepath.Join(n.dir, "bucket"), "--min-age", "1ns")
		return code == 0
	})
}

// refuses runs a server that is to end by itself at once. One that does not is made to say what it does.
func refuses(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, append([]string{"server"}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGQUIT) }
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestSecondServerOnTheSameDirectory(t *testing.T) {
	n := newNode(t)
	n.start()
	out, err := refuses("--dir", n.dir, "--listen", fmt.Sprintf("127.0.0.1:%d", testport.Free(t)))
	if err == nil || !strings.Contains(out, "in use by another server") {
		t.Fatalf("%v: %s", err, out)
	}
	produce(t, n.client(kgo.AllowAutoTopicCreation(), kgo.RecordPartitioner(kgo.ManualPartitioner())), "fine", 0, 1)
}

func TestDirectoryOfAnotherCluster(t *testing.T) {
	n := newNode(t)
	n.start()
	n.stop()
	for _, args := range [][]string{{"--set", "cluster.id=AAAAAAAAAAAAAAAAAAAAAQ"}, {"--id", "7"}} {
		out, err := refuses(append([]string{"--dir", n.dir, "--listen", n.address()}, args...)...)
		if err == nil || !strings.Contains(out, "belongs to") {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	n.start()
}

func TestBadConfiguration(t *testing.T) {
	out, err := refuses("--dir", t.TempDir(), "--set", "default.replecation.factor=3", "--set", "num.partitions=10GB")
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 2 {
		t.Fatalf("%v: %s", err, out)
	}
	for _, want := range []string{"did you mean default.replication.factor?", "num.partitions"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is missing in %s", want, out)
		}
	}
}

// blackHole accepts connections and never answers.
func blackHole(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var held []net.Conn
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			held = append(held, c)
			mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		ln.Close()
		mu.Lock()
		defer mu.Unlock()
		for _, c := range held {
			c.Close()
		}
	})
	return ln.Addr().String()
}

// TestStopWithADeadStore: SIGTERM ends the broker within 10 s whatever the store does, and the end is a clean one.
func TestStopWithADeadStore(t *testing.T) {
	n := newNode(t, "varve.bucket=s3://nowhere?path-style=true&endpoint=http://"+blackHole(t), "varve.bucket.access.key=a", "varve.bucket.secret.key=b")
	n.start()
	n.createTopic("stuck", 1, tieredConfig...)
	produce(t, n.client(kgo.RecordPartitioner(kgo.ManualPartitioner())), "stuck", 0, 2000)
	// The store being away stops nothing: the records are there.
	readAll(t, n, "stuck", 2000)
	n.stop()
	if _, err := os.Stat(filepath.Join(n.dir, ".kafka_cleanshutdown")); err != nil {
		t.Fatal("the end was not clean:", err)
	}
}

func TestSecondSignalEndsAtOnce(t *testing.T) {
	n := newNode(t, "varve.shutdown.timeout.ms=600000")
	n.start()
	// A member that waits in a rebalance of an hour keeps a slow shutdown busy.
	hold, err := net.Dial("tcp", n.address())
	if err != nil {
		t.Fatal(err)
	}
	defer hold.Close()
	n.signal(syscall.SIGTERM)
	n.signal(syscall.SIGTERM)
	n.wait(10 * time.Second)
}

// TestCorruptLogGoesOfflineAlone: damage below the recovery point takes its partition offline, with a message that names
// the file; other partitions serve.
func TestCorruptLogGoesOfflineAlone(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("bad", 1)
	n.createTopic("good", 1)
	cl := n.client(kgo.RecordPartitioner(kgo.ManualPartitioner()))
	produce(t, cl, "bad", 0, 100)
	produce(t, cl, "good", 0, 100)
	n.stop()
	os.Remove(filepath.Join(n.dir, ".kafka_cleanshutdown")) // as after a crash: the log is scanned
	path := filepath.Join(n.dir, "bad-0", "00000000000000000000.log")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[200] ^= 0xff
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	n.start()
	readAll(t, n, "good", 100)
	if !strings.Contains(n.log(), "partition is offline") || !strings.Contains(n.log(), path) {
		t.Error("the log does not name the partition and its file")
	}
	out, code := n.varve("topic", "ls", "-b", n.address())
	if code != 1 || !strings.Contains(out, "without a leader") {
		t.Errorf("exit %d: %s", code, out)
	}
	if after, err := os.ReadFile(path); err != nil || string(after) != string(b) {
		t.Error("the damaged file was touched")
	}
}

// TestDamageInASealedSegmentIsNotCutAway: what was sealed is flushed soon after, and after a kill damage in it takes the
// partition offline. It is no torn tail: nothing is cut off, and the segments behind it stay.
func TestDamageInASealedSegmentIsNotCutAway(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("sealed", 1, "internal.segment.bytes=30000")
	produce(t, n.client(kgo.RecordPartitioner(kgo.ManualPartitioner())), "sealed", 0, 3000)
	logs := func() []string {
		t.Helper()
		files, err := filepath.Glob(filepath.Join(n.dir, "sealed-0", "*.log"))
		if err != nil || len(files) < 3 {
			t.Fatal(files, err)
		}
		return files
	}
	before := logs()
	n.until("the sealed segments are below the recovery point", func() bool {
		b, err := os.ReadFile(filepath.Join(n.dir, "recovery-point-offset-checkpoint"))
		if err != nil {
			return false
		}
		base, err := strconv.Atoi(strings.TrimSuffix(filepath.Base(before[len(before)-1]), ".log"))
		return err == nil && strings.Contains(string(b), fmt.Sprintf("sealed 0 %d\n", base))
	})
	n.kill()
	b, err := os.ReadFile(before[0])
	if err != nil {
		t.Fatal(err)
	}
	b[16] ^= 1 // the format of the first batch
	if err := os.WriteFile(before[0], b, 0o644); err != nil {
		t.Fatal(err)
	}
	// The index of the first segment goes too, so that the start has a reason to read the segment.
	os.Remove(strings.TrimSuffix(before[0], ".log") + ".index")
	n.start()
	if !strings.Contains(n.log(), "partition is offline") || !strings.Contains(n.log(), before[0]) {
		t.Error("the log does not name the partition and its file")
	}
	if after := logs(); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("segments were removed: %v, before %v", after, before)
	}
}
