package compat

import (
	"fmt"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
)

// node is a broker that can be killed and started again.
type node struct {
	broker
	ctl string
	env []string
	dir string // what ctl keeps of it
}

func startNode(t *testing.T) *node {
	t.Helper()
	asked(t)
	ctl, err := filepath.Abs("ctl")
	if err != nil {
		t.Fatal(err)
	}
	port := strconv.Itoa(freePorts(t, 1))
	top := filepath.Join(t.TempDir(), "node")
	n := &node{ctl: ctl, dir: filepath.Join(top, "1")}
	n.env = []string{"VARVE=" + binary, "CTL_DIR=" + top}
	n.addr = "127.0.0.1:" + port
	t.Cleanup(func() { n.do(t, "down") })
	n.do(t, "up", "1", port)
	return n
}

func (n *node) do(t *testing.T, args ...string) {
	t.Helper()
	if _, errs, err := (command{env: n.env}).try(t, append([]string{n.ctl}, args...)...); err != nil {
		t.Errorf("ctl %v: %v\n%s", args, err, errs)
	}
}

// disturbed kills, starts, stops and starts the node while a producer is at work, which began when the topic is not empty.
func (n *node) disturbed(t *testing.T, topic string, produce func() error) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- produce() }()
	adm := n.admin(t)
	end := func() (sum int64) {
		ends, err := adm.ListEndOffsets(within(t), topic)
		if err != nil || ends.Error() != nil {
			return 0
		}
		ends.Each(func(o kadm.ListedOffset) { sum += o.Offset })
		return sum
	}
	for i, how := range []string{"kill", "stop", "kill"} {
		before := end()
		await(t, "the producer goes on", func() bool { return end() > before+int64(200*(i+1)) })
		select {
		case err := <-done:
			t.Fatalf("the producer ended too early: %v", err)
		default:
		}
		n.do(t, how, "1")
		n.do(t, "start", "1")
	}
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("the producer does not end")
	}
}

// librdkafka's idempotent producer loses, repeats and reorders nothing when the broker is killed and started again.
func TestConfluentAcrossRestarts(t *testing.T) {
	python := debianPython(t, "confluent_kafka")
	n := startNode(t)
	n.topic(t, "restarts", 3)
	n.disturbed(t, "restarts", func() error {
		_, errs, err := command{limit: 2 * time.Minute}.try(t, python, filepath.Join("py", "confluent.py"), n.addr, "restarts", "paced")
		if err != nil {
			return fmt.Errorf("%w\n%s", err, tail(errs))
		}
		return nil
	})
	next := map[int32]int{0: 0, 1: 1, 2: 2}
	for _, r := range n.consumed(t, "restarts", 10000) {
		i := next[r.Partition]
		next[r.Partition] = i + 3
		if want := fmt.Sprintf("value %06d ", i); string(r.Value[:len(want)]) != want {
			t.Fatalf("partition %d offset %d is %q instead of %q", r.Partition, r.Offset, r.Value, want)
		}
	}
	n.exactly(t, "restarts", 10000)
}

// So does the Java client's.
func TestKafkaProducerAcrossRestarts(t *testing.T) {
	asked(t)
	n := startNode(t)
	k := kafkaTools(t, n.addr)
	n.topic(t, "restarts", 3)
	n.disturbed(t, "restarts", func() error {
		_, errs, err := command{limit: 2 * time.Minute}.try(t, k.path, "perf-produce", "--bootstrap-server", n.addr, "--topic", "restarts", "--num-records", "20000",
			"--record-size", "100", "--throughput", "1500", "--command-property", "reconnect.backoff.max.ms=500")
		if err != nil {
			return fmt.Errorf("%w\n%s", err, tail(errs))
		}
		return nil
	})
	n.exactly(t, "restarts", 20000)
}

// exactly checks the number of records of a topic without gaps.
func (n *node) exactly(t *testing.T, topic string, want int64) {
	t.Helper()
	ends, err := n.admin(t).ListEndOffsets(within(t), topic)
	if err != nil {
		t.Fatal(err)
	}
	var sum int64
	ends.Each(func(o kadm.ListedOffset) { sum += o.Offset })
	if sum != want {
		t.Errorf("%s holds %d records, want %d", topic, sum, want)
	}
}
