package compat

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Apache Kafka's tools against three brokers: topics with replicas, reassignment, elections, the quorum.
func TestKafkaClusterTools(t *testing.T) {
	b := startCluster(t, 3)
	k := kafkaTools(t, b.addr)
	has(t, "create", k.run(t, "topics", "--create", "--topic", "made", "--replica-assignment", "1:2,2:3", "--config", "min.insync.replicas=2"), `^Created topic made`)
	has(t, "describe", k.run(t, "topics", "--describe", "--topic", "made"), `PartitionCount: 2\s+ReplicationFactor: 2`, `Partition: 0\s+Leader: 1\s+Replicas: 1,2\s+Isr: 1,2`,
		`Partition: 1\s+Leader: 2\s+Replicas: 2,3\s+Isr: 2,3`)
	values := []string{"one", "two", "three"}
	k.feed(t, strings.Join(values, "\n")+"\n", "produce", "--topic", "made", "--command-property", "acks=all")

	plan := filepath.Join(t.TempDir(), "plan.json")
	if err := os.WriteFile(plan, []byte(`{"version":1,"partitions":[{"topic":"made","partition":0,"replicas":[3,1]},{"topic":"made","partition":1,"replicas":[1,3]}]}`), 0o644); err != nil {
		t.Fatal(err)
	}
	has(t, "reassign", k.run(t, "reassign", "--reassignment-json-file", plan, "--execute", "--throttle", "50000000"), `Successfully started partition reassignments for made-0,made-1`)
	await(t, "the replicas have moved", func() bool {
		return strings.Contains(k.run(t, "reassign", "--reassignment-json-file", plan, "--verify"), "Reassignment of partition made-1 is completed")
	})
	has(t, "describe", k.run(t, "topics", "--describe", "--topic", "made"), `Partition: 0\s+Leader: \d\s+Replicas: 3,1\s+Isr: (1,3|3,1)`, `Partition: 1\s+Leader: \d\s+Replicas: 1,3\s+Isr: (1,3|3,1)`)
	k.class(t, "org.apache.kafka.tools.LeaderElectionCommand", "--election-type", "preferred", "--all-topic-partitions")
	has(t, "describe", k.run(t, "topics", "--describe", "--topic", "made"), `Partition: 0\s+Leader: 3`, `Partition: 1\s+Leader: 1`)
	var got []string
	for _, r := range b.consumed(t, "made", len(values)) {
		got = append(got, string(r.Value))
	}
	slices.Sort(got)
	slices.Sort(values)
	if !slices.Equal(got, values) {
		t.Errorf("read %q", got)
	}
	has(t, "quorum status", k.class(t, "org.apache.kafka.tools.MetadataQuorumCommand", "describe", "--status"), `^ClusterId:`, `^LeaderId:\s+[123]`, `^CurrentVoters:.*"id": 1.*"id": 2.*"id": 3`)
	has(t, "quorum replication", k.class(t, "org.apache.kafka.tools.MetadataQuorumCommand", "describe", "--replication"), `^[123]\s.*Leader`, `^[123]\s.*Follower`)
	if out, _, err := (command{}).try(t, k.path, "topics", "--bootstrap-server", b.addr, "--create", "--topic", "wide", "--partitions", "1", "--replication-factor", "4"); err == nil {
		t.Errorf("four replicas on three brokers:\n%s", out)
	}
}

// What one broker is asked another may have to do: an admin client that talks to a single node gets it done.
func TestEveryBrokerForwards(t *testing.T) {
	b := startCluster(t, 3)
	for i, addr := range strings.Split(b.addr, ",") {
		one := &broker{addr: addr}
		adm := one.admin(t)
		name := fmt.Sprint("made-", i)
		if r, err := adm.CreateTopic(within(t), 3, 3, nil, name); err != nil || r.ReplicationFactor != 3 {
			t.Fatal(r, err)
		}
		await(t, "every broker knows the topic", func() bool {
			d, err := adm.ListTopics(within(t), name)
			return err == nil && len(d[name].Partitions) == 3
		})
		v := "1234567"
		if _, err := adm.AlterTopicConfigs(within(t), []kadm.AlterConfig{{Op: kadm.SetConfig, Name: "retention.ms", Value: &v}}, name); err != nil {
			t.Fatal(err)
		}
		cl := one.client(t, kgo.DefaultProduceTopic(name))
		for range 20 {
			if err := cl.ProduceSync(within(t), kgo.StringRecord("x")).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
		b.consumed(t, name, 20)
	}
}
