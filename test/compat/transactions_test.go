package compat

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// Apache Kafka's tools about transactions, and its perf and console programs with them.
func TestKafkaTransactionTools(t *testing.T) {
	b := start(t)
	k := kafkaTools(t, b.addr)
	b.topic(t, "perf", 3)
	has(t, "perf-produce", command{limit: 90 * time.Second}.run(t, k.path, "perf-produce", "--topic", "perf", "--num-records", "20000", "--record-size", "100", "--throughput", "-1",
		"--transactional-id", "perf", "--transaction-duration-ms", "100", "--bootstrap-server", b.addr), `20000 records sent`)
	out := k.run(t, "consume", "--topic", "perf", "--from-beginning", "--max-messages", "20000", "--timeout-ms", "30000", "--isolation-level", "read_committed")
	if n := strings.Count(out, "\n"); n != 20000 {
		t.Errorf("%d records", n)
	}
	const tool = "org.apache.kafka.tools.TransactionsCommand"
	cl := b.client(t, kgo.TransactionalID("open"), kgo.DefaultProduceTopic("perf"), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err := cl.BeginTransaction(); err != nil {
		t.Fatal(err)
	}
	if err := cl.ProduceSync(within(t), &kgo.Record{Partition: 1, Value: []byte("x")}).FirstErr(); err != nil {
		t.Fatal(err)
	}
	has(t, "list", k.class(t, tool, "list"), `^open\s+1\s+\d+\s+Ongoing`, `^perf\s+1\s+\d+\s+CompleteCommit`)
	if out := k.class(t, tool, "list", "--duration-filter", "600000"); strings.Contains(out, "open") {
		t.Errorf("a young transaction is listed:\n%s", out)
	}
	has(t, "describe", k.class(t, tool, "describe", "--transactional-id", "open"), `open\s+\d+\s+\d+\s+Ongoing\s+\d+\s+\d+\s+\d+\s+perf-1`)
	producers := k.class(t, tool, "describe-producers", "--topic", "perf", "--partition", "1")
	has(t, "describe-producers", producers, `ProducerId`, `^\d+\s+\d+\s`)
	if out := k.class(t, tool, "find-hanging", "--broker-id", "1", "--max-transaction-timeout", "0"); strings.Contains(out, "perf") {
		t.Errorf("hanging:\n%s", out)
	}
	has(t, "forceTerminate", k.class(t, tool, "forceTerminateTransaction", "--transactionalId", "open"), ``)
	await(t, "the transaction is aborted", func() bool {
		return !strings.Contains(k.class(t, tool, "list"), "Ongoing")
	})
	if err := cl.EndTransaction(within(t), kgo.TryCommit); err == nil {
		t.Error("a transaction that was terminated was committed")
	}
}

// Apache Kafka's verifiable producer and consumer, as its system tests use them.
func TestKafkaVerifiable(t *testing.T) {
	b := start(t)
	k := kafkaTools(t, b.addr)
	b.topic(t, "verifiable", 3)
	const count = 5000
	type line struct {
		Name, Value string
		Partitions  []struct{ Count int }             // of records_consumed
		Offsets     []struct{ Partition, Offset int } // of offsets_committed
	}
	lines := func(out string, use func(line)) {
		for _, s := range strings.Split(out, "\n") {
			var l line
			if json.Unmarshal([]byte(s), &l) == nil {
				use(l)
			}
		}
	}
	var acked []string
	lines(k.class(t, "org.apache.kafka.tools.VerifiableProducer", "--topic", "verifiable", "--max-messages", fmt.Sprint(count), "--acks", "-1"), func(l line) {
		if l.Name == "producer_send_success" {
			acked = append(acked, l.Value)
		}
	})
	if len(acked) != count {
		t.Fatalf("%d acknowledged", len(acked))
	}
	read, committed := 0, map[int]int{}
	lines(k.class(t, "org.apache.kafka.tools.VerifiableConsumer", "--topic", "verifiable", "--group-id", "verifiable", "--max-messages", fmt.Sprint(count), "--reset-policy", "earliest"), func(l line) {
		for _, p := range l.Partitions {
			read += p.Count
		}
		for _, o := range l.Offsets {
			committed[o.Partition] = o.Offset
		}
	})
	sum := 0
	for _, o := range committed {
		sum += o
	}
	if read != count || sum != count {
		t.Errorf("%d records read, %d committed", read, sum)
	}
	var got []string
	for _, r := range b.consumed(t, "verifiable", count) {
		got = append(got, string(r.Value))
	}
	slices.Sort(got)
	slices.Sort(acked)
	if !slices.Equal(got, acked) {
		t.Error("what is there is not what was acknowledged")
	}
}
