package compat

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/internal/fixtures"
)

// tools are Apache Kafka's command line tools.
type tools struct {
	path, bootstrap string
}

func kafkaTools(t *testing.T, addr string) tools {
	t.Helper()
	need(t, "java")
	k := tools{fixtures.Shared(t, "peers/apache-kafka/kafka"), addr}
	if _, errs, err := (command{limit: 3 * time.Minute}).try(t, k.path, "fetch"); err != nil {
		t.Skipf("SKIPPED: Apache Kafka cannot be fetched: %v %s", err, tail(errs))
	}
	return k
}

// peer starts an Apache Kafka beside Varve until the end of the test: where it is, its folder, and the command that stops it sooner.
func (k tools) peer(t *testing.T) (peer *broker, home string, stop []string) {
	t.Helper()
	return k.peerAt(t, freePorts(t, 1))
}

// peerAt is peer on a port, and the next for its controller. Settings are KEY=VALUE.
func (k tools) peerAt(t *testing.T, port int, settings ...string) (peer *broker, home string, stop []string) {
	t.Helper()
	home = t.TempDir()
	stop = []string{k.path, "stop", "--dir", home}
	t.Cleanup(func() {
		if _, errs, err := (command{}).try(t, stop...); err != nil {
			t.Errorf("stopping Kafka: %v\n%s", err, errs)
		}
	})
	args := []string{"--port", fmt.Sprint(port), "--heap", "400m"}
	for _, s := range settings {
		if strings.HasPrefix(s, "--") { // a flag of the script
			args = append(args, s)
			continue
		}
		args = append(args, "--set", s)
	}
	k.found(t, command{}, home, args...)
	return &broker{addr: fmt.Sprintf("127.0.0.1:%d", port)}, home, stop
}

// found starts an Apache Kafka for the first time, in an empty folder. The script draws a cluster id, and now and then one that looks like
// a flag.
func (k tools) found(t *testing.T, c command, home string, args ...string) {
	t.Helper()
	c.limit = 2 * time.Minute
	for try := 1; ; try++ {
		out, errs, err := c.try(t, append([]string{k.path, "start", "--dir", home}, args...)...)
		if err == nil {
			return
		}
		if try == 5 || !strings.Contains(out+errs, "argument --cluster-id") {
			t.Fatalf("starting Kafka: %v\n%s\n%s", err, tail(out), tail(errs))
		}
		if err := os.RemoveAll(home); err != nil {
			t.Fatal(err)
		}
	}
}

// run calls one of the tools with the address of the broker.
func (k tools) run(t *testing.T, tool string, args ...string) string {
	t.Helper()
	return k.feed(t, "", tool, args...)
}

// class calls a tool that has no name of its own in the peer's script.
func (k tools) class(t *testing.T, class string, args ...string) string {
	t.Helper()
	return command{limit: 90 * time.Second}.run(t, append([]string{k.path, "tool", class, "--bootstrap-server", k.bootstrap}, args...)...)
}

func (k tools) feed(t *testing.T, stdin, tool string, args ...string) string {
	t.Helper()
	return command{stdin: stdin, limit: 90 * time.Second}.run(t, append([]string{k.path, tool, "--bootstrap-server", k.bootstrap}, args...)...)
}

func has(t *testing.T, what, out string, patterns ...string) {
	t.Helper()
	for _, p := range patterns {
		if !regexp.MustCompile(`(?m)` + p).MatchString(out) {
			t.Errorf("%s: no %q in\n%s", what, p, tail(out))
		}
	}
}

func TestKafkaTopicsAndConfigs(t *testing.T) {
	b := start(t)
	k := kafkaTools(t, b.addr)
	has(t, "create", k.run(t, "topics", "--create", "--topic", "made", "--partitions", "2", "--config", "retention.ms=1234567"), `^Created topic made`)
	has(t, "list", k.run(t, "topics", "--list"), `^made$`)
	has(t, "describe", k.run(t, "topics", "--describe", "--topic", "made"), `PartitionCount: 2\s+ReplicationFactor: 1\s+Configs: .*retention.ms=1234567`,
		`Partition: 1\s+Leader: 1\s+Replicas: 1\s+Isr: 1`)
	k.run(t, "topics", "--alter", "--topic", "made", "--partitions", "5")
	has(t, "describe", k.run(t, "topics", "--describe", "--topic", "made"), `PartitionCount: 5`)
	k.run(t, "configs", "--alter", "--entity-type", "topics", "--entity-name", "made", "--add-config", "max.message.bytes=200000,cleanup.policy=[compact,delete]", "--delete-config", "retention.ms")
	out := k.run(t, "configs", "--describe", "--entity-type", "topics", "--entity-name", "made")
	has(t, "configs", out, `max.message.bytes=200000`, `cleanup.policy=compact,delete`)
	if strings.Contains(out, "retention.ms=1234567") {
		t.Errorf("retention.ms is still there:\n%s", out)
	}
	has(t, "all configs", k.run(t, "configs", "--describe", "--all", "--entity-type", "topics", "--entity-name", "made"), `segment.bytes=1073741824`, `remote.storage.enable=false`)
	has(t, "broker configs", k.run(t, "configs", "--describe", "--all", "--entity-type", "brokers", "--entity-name", "1"), `offsets.topic.num.partitions=4`)
	k.run(t, "configs", "--alter", "--entity-type", "clients", "--entity-name", "app", "--add-config", "consumer_byte_rate=2000000,producer_byte_rate=1000000")
	k.run(t, "configs", "--alter", "--entity-type", "clients", "--entity-name", "app", "--delete-config", "producer_byte_rate")
	k.run(t, "configs", "--alter", "--entity-type", "clients", "--entity-default", "--add-config", "consumer_byte_rate=3000000")
	has(t, "quotas", k.run(t, "configs", "--describe", "--entity-type", "clients"), `for client-id 'app' are consumer_byte_rate=2000000`, `default client-id are consumer_byte_rate=3000000`)
	k.run(t, "topics", "--delete", "--topic", "made")
	if out := k.run(t, "topics", "--list"); strings.Contains(out, "made") {
		t.Errorf("still listed:\n%s", out)
	}
	out, errs, err := command{}.try(t, k.path, "topics", "--bootstrap-server", b.addr, "--create", "--topic", "bad", "--replication-factor", "3")
	if err == nil || !strings.Contains(out+errs, "eplication factor") {
		t.Errorf("3 replicas on one broker: %v\n%s\n%s", err, tail(out), tail(errs))
	}
}

func TestKafkaConsoleAndGroups(t *testing.T) {
	b := start(t)
	k := kafkaTools(t, b.addr)
	lines := values(300)
	both(t, b, "console", 1, func(t *testing.T, topic string, toTier func(t *testing.T)) {
		k.feed(t, strings.Join(lines, "\n")+"\n", "produce", "--topic", topic, "--compression-codec", "zstd", "--batch-size", "1000")
		toTier(t)
		out := k.run(t, "consume", "--topic", topic, "--group", topic, "--from-beginning", "--max-messages", "300", "--timeout-ms", "30000")
		if out != strings.Join(lines, "\n")+"\n" {
			t.Fatalf("%d bytes: %s", len(out), tail(out))
		}
		// The offsets that Kafka names: latest, earliest, of the greatest timestamp, earliest local, latest tiered.
		for at, pattern := range map[string]string{"-1": `:0:300$`, "-2": `:0:0$`, "-3": `:0:\d+$`} {
			has(t, "--time "+at, k.run(t, "offsets", "--topic", topic, "--time", at), topic+pattern)
		}
		// A topic without a tier has no tiered offset, which the tool shows as no line.
		local, tiered := `:0:0$`, ``
		if strings.HasSuffix(topic, "-tiered") {
			local, tiered = `:0:[1-9]\d*$`, `:0:[1-9]\d*$`
		}
		has(t, "earliest local", k.run(t, "offsets", "--topic", topic, "--time", "-4"), topic+local)
		if out := k.run(t, "offsets", "--topic", topic, "--time", "-5"); tiered == "" && strings.TrimSpace(out) != "" {
			t.Errorf("latest tiered offset of a topic without a tier: %s", out)
		} else if tiered != "" {
			has(t, "latest tiered", out, topic+tiered)
		}
		t.Run("groups", func(t *testing.T) {
			has(t, "list", k.run(t, "groups", "--list"), `^`+topic+`$`)
			has(t, "describe", k.run(t, "groups", "--describe", "--group", topic), topic+`\s+`+topic+`\s+0\s+300\s+300\s+0`)
			has(t, "state", k.run(t, "groups", "--describe", "--group", topic, "--state"), topic+`.*\sEmpty\s`)
			k.run(t, "groups", "--reset-offsets", "--group", topic, "--topic", topic, "--to-offset", "7", "--execute")
			has(t, "describe", k.run(t, "groups", "--describe", "--group", topic), topic+`\s+`+topic+`\s+0\s+7\s+300\s+293`)
			out := k.run(t, "consume", "--topic", topic, "--group", topic, "--max-messages", "1", "--timeout-ms", "30000")
			if out != lines[7]+"\n" {
				t.Errorf("after the reset: %q", out)
			}
			k.run(t, "groups", "--reset-offsets", "--group", topic, "--topic", topic, "--to-earliest", "--execute")
			has(t, "delete", k.run(t, "groups", "--delete", "--group", topic), `was successful`)
		})
		t.Run("delete records", func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "offsets.json")
			text := fmt.Sprintf(`{"version":1,"partitions":[{"topic":%q,"partition":0,"offset":120}]}`, topic)
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			has(t, "delete-records", k.run(t, "delete-records", "--offset-json-file", file), `low_watermark: 120`)
			out := k.run(t, "consume", "--topic", topic, "--from-beginning", "--max-messages", "180", "--timeout-ms", "30000")
			if out != strings.Join(lines[120:], "\n")+"\n" {
				t.Fatalf("%d bytes: %s", len(out), tail(out))
			}
		})
	})
}

func TestKafkaPerf(t *testing.T) {
	b := start(t)
	k := kafkaTools(t, b.addr)
	b.topic(t, "perf", 3)
	b.topic(t, "perf-tiered", 3, "remote.storage.enable=true", "segment.bytes=1048576", "local.retention.bytes=1")
	for _, topic := range []string{"perf", "perf-tiered"} {
		out := command{limit: 90 * time.Second}.run(t, k.path, "perf-produce", "--topic", topic, "--num-records", "20000", "--record-size", "1000", "--throughput", "-1",
			"--bootstrap-server", b.addr, "--command-property", "compression.type=lz4")
		has(t, "perf-produce", out, `20000 records sent`)
		if topic == "perf-tiered" {
			b.tiered(t, topic, 1)
		}
		has(t, "perf-consume", k.run(t, "perf-consume", "--topic", topic, "--num-records", "20000", "--timeout", "30000"), `, 20000, `)
	}
}

// Kafka's DumpLogSegments finds nothing to complain about in the files of a folder that Varve left, and as many batches and
// records as Varve's own reader.
func TestKafkaReadsOurFiles(t *testing.T) {
	b := start(t)
	k := kafkaTools(t, b.addr)
	b.topic(t, "dumped", 1, "internal.segment.bytes=16384", "index.interval.bytes=256")
	want := fill(t, b, "dumped")
	b.stop(t)
	dir := filepath.Join(b.dir, "dumped-0")
	files, err := filepath.Glob(filepath.Join(dir, "0*.*"))
	if err != nil || len(files) < 10 {
		t.Fatal(files, err)
	}
	kinds := map[string]int{}
	var logs []string
	for _, f := range files {
		kinds[filepath.Ext(f)]++
		if filepath.Ext(f) == ".log" {
			logs = append(logs, f)
		}
	}
	for _, ext := range []string{".log", ".index", ".timeindex", ".snapshot"} {
		if kinds[ext] == 0 {
			t.Errorf("no %s among %v", ext, kinds)
		}
	}
	out := command{}.run(t, k.path, "dump-log", "--deep-iteration", "--print-data-log", "--files", strings.Join(logs, ","))
	batches := len(regexp.MustCompile(`(?m)^baseOffset: .* isvalid: true$`).FindAllString(out, -1))
	records := len(regexp.MustCompile(`(?m)^\| offset: `).FindAllString(out, -1))
	ours := command{}.run(t, append([]string{binary, "dump", "--json"}, logs...)...)
	if n := strings.Count(ours, `"baseOffset"`); batches != n || records != want || strings.Contains(out, "isvalid: false") {
		t.Errorf("Kafka reads %d batches and %d records, we %d and %d\n%s", batches, records, n, want, tail(out))
	}
	for _, sane := range [][]string{{"--index-sanity-check"}, {"--verify-index-only"}, {}} {
		out, errs, err := command{}.try(t, append([]string{k.path, "dump-log", "--files", strings.Join(files, ",")}, sane...)...)
		for _, bad := range []string{"Mismatches in", "out of order", "Index timestamp", "not a valid", "Exception", "Found ", "corrupt"} {
			if strings.Contains(out+errs, bad) {
				t.Errorf("%v: %q in\n%s", sane, bad, tail(out+errs))
			}
		}
		if err != nil {
			t.Errorf("%v: %v\n%s", sane, err, tail(errs))
		}
	}
}

// A Kafka broker that finds a partition's folder as Varve left it serves the same records: as it is after a clean end, and
// after it has checked every batch and made the indexes anew, as after a crash.
func TestKafkaServesOurFolder(t *testing.T) {
	t.Run("clean", func(t *testing.T) { kafkaServesOurFolder(t, true) })
	t.Run("recovered", func(t *testing.T) { kafkaServesOurFolder(t, false) })
}

func kafkaServesOurFolder(t *testing.T, clean bool) {
	b := start(t)
	k := kafkaTools(t, b.addr)
	b.topic(t, "moved", 1, "internal.segment.bytes=16384", "index.interval.bytes=256")
	n := fill(t, b, "moved")
	want := b.consumed(t, "moved", n)
	b.stop(t)
	home, port := t.TempDir(), freePorts(t, 1)
	peer := &broker{addr: fmt.Sprintf("127.0.0.1:%d", port)}
	t.Cleanup(func() {
		if _, errs, err := (command{}).try(t, k.path, "stop", "--dir", home); err != nil {
			t.Errorf("stopping Kafka: %v\n%s", err, errs)
		}
	})
	k.found(t, command{}, home, "--port", fmt.Sprint(port), "--heap", "400m")
	peer.topic(t, "moved", 1)
	command{}.run(t, k.path, "stop", "--dir", home)
	folder := filepath.Join(home, "node1", "data", "moved-0")
	id, err := os.ReadFile(filepath.Join(folder, "partition.metadata"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(folder, os.DirFS(filepath.Join(b.dir, "moved-0"))); err != nil {
		t.Fatal(err)
	}
	// The other cluster knows the topic by another id.
	if err := os.WriteFile(filepath.Join(folder, "partition.metadata"), id, 0o600); err != nil {
		t.Fatal(err)
	}
	if !clean {
		if err := os.Remove(filepath.Join(home, "node1", "data", ".kafka_cleanshutdown")); err != nil {
			t.Fatal(err)
		}
	}
	command{limit: 2 * time.Minute}.run(t, k.path, "start", "--dir", home)
	equal(t, peer.consumed(t, "moved", n), want)
	log, err := os.ReadFile(filepath.Join(home, "node1", "out.log"))
	if err != nil {
		t.Fatal(err)
	}
	if scanned := regexp.MustCompile(`partition=moved-0.*Recovering unflushed segment`).Match(log); scanned == clean {
		t.Errorf("Kafka scanned the segments: %v", scanned)
	}
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, "moved-0") && regexp.MustCompile(`ERROR|[Cc]orrupt|Found invalid|[Rr]ebuild.* index`).MatchString(line) {
			t.Errorf("Kafka: %s", line)
		}
	}
	if err := peer.client(t).ProduceSync(within(t), &kgo.Record{Topic: "moved", Value: []byte("one more")}).FirstErr(); err != nil {
		t.Errorf("going on in it: %v", err)
	}
}

// fill produces records with every codec and idempotence, in small batches, and returns their number.
func fill(t *testing.T, b *broker, topic string) int {
	t.Helper()
	n := 0
	for _, codec := range []kgo.CompressionCodec{kgo.NoCompression(), kgo.GzipCompression(), kgo.SnappyCompression(), kgo.Lz4Compression(), kgo.ZstdCompression()} {
		cl := b.client(t, kgo.DefaultProduceTopic(topic), kgo.ProducerBatchCompression(codec))
		for i := range 40 {
			var batch []*kgo.Record
			for j, v := range values(20) {
				batch = append(batch, &kgo.Record{Key: fmt.Appendf(nil, "key %d %d", i, j), Value: []byte(v), Headers: []kgo.RecordHeader{{Key: "h", Value: []byte("x")}}})
			}
			if err := cl.ProduceSync(within(t), batch...).FirstErr(); err != nil {
				t.Fatal(err)
			}
			n += len(batch)
		}
		cl.Close()
	}
	return n
}
