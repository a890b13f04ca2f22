package compat

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	plainauth "github.com/twmb/franz-go/pkg/sasl/plain"
)

// gateway is a gateway under test.
type gateway struct {
	broker
	web string
}

// startGateway runs a gateway in front of a broker until the end of the test.
func startGateway(t *testing.T, b *broker, args ...string) *gateway {
	t.Helper()
	first := freePorts(t, 4)
	g := &gateway{broker: broker{addr: "127.0.0.1:" + strconv.Itoa(first)}, web: "127.0.0.1:" + strconv.Itoa(first+3)}
	g.process(t, append([]string{"gateway", "--brokers", b.addr, "--listen", "127.0.0.1", "--ports", fmt.Sprintf("%d-%d", first, first+2), "--metrics", g.web}, args...))
	await(t, "the gateway is ready", func() bool { _, status := g.get("/readyz"); return status == http.StatusOK })
	return g
}

func (g *gateway) get(path string) (string, int) {
	r, err := http.Get("http://" + g.web + path)
	if err != nil {
		return err.Error(), 0
	}
	defer r.Body.Close()
	b, _ := io.ReadAll(r.Body)
	return string(b), r.StatusCode
}

// metric reads one metric.
func (g *gateway) metric(t *testing.T, name string) float64 {
	t.Helper()
	text, _ := g.get("/metrics")
	m := regexp.MustCompile(`(?m)^` + name + ` (\S+)$`).FindStringSubmatch(text)
	if m == nil {
		t.Fatalf("no metric %s", name)
	}
	v, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// mixedHistory writes a history of transactions, every third aborted, of which all but the end is in the bucket alone. It
// returns how many records are committed, how many there are, and how many with the markers of transactions.
func mixedHistory(t *testing.T, b *broker, topic string) (committed, all, marked int) {
	t.Helper()
	cl := b.client(t, kgo.TransactionalID(topic), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.DefaultProduceTopic(topic), kgo.ProducerBatchCompression(kgo.NoCompression()))
	for i := range 40 {
		if err := cl.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		var batch []*kgo.Record
		for j := range 30 {
			batch = append(batch, &kgo.Record{Partition: int32(j % 3), Value: fmt.Appendf(nil, "transaction %d record %d committed %v %s", i, j, i%3 != 2, strings.Repeat("x", 200))})
		}
		if err := cl.ProduceSync(within(t), batch...).FirstErr(); err != nil {
			t.Fatal(err)
		}
		if err := cl.EndTransaction(within(t), kgo.TransactionEndTry(i%3 != 2)); err != nil {
			t.Fatal(err)
		}
		all, marked = all+30, marked+33
		if i%3 != 2 {
			committed += 30
		}
	}
	return committed, all, marked
}

// lines are the lines of a client's output that are records, in an order of their own.
func lines(out string) []string {
	var all []string
	for l := range strings.Lines(out) {
		if strings.Contains(l, "transaction ") {
			all = append(all, strings.TrimSpace(l))
		}
	}
	slices.Sort(all)
	return all
}

// Clients that know nothing of direct reads get through the gateway what they get from the broker, and most of it comes from
// the bucket.
func TestClientsThroughTheGateway(t *testing.T) {
	b := start(t)
	g := startGateway(t, b, "--bucket", filepath.Join(b.dir, "bucket"))
	const topic = "history"
	g.topic(t, topic, 3, tieredConfigs...)
	committed, all, marked := mixedHistory(t, &g.broker, topic)
	b.tiered(t, topic, int64(all/3*4/5))
	check := func(name string, want int, read func(t *testing.T, addr string) string) {
		t.Run(name, func(t *testing.T) {
			direct := lines(read(t, b.addr))
			served, sent := g.metric(t, "remote_fetch_served_bytes_total"), g.metric(t, "remote_fetch_broker_bytes_total")
			through := lines(read(t, g.addr))
			served, sent = g.metric(t, "remote_fetch_served_bytes_total")-served, g.metric(t, "remote_fetch_broker_bytes_total")-sent
			if len(direct) != want || !slices.Equal(direct, through) {
				t.Errorf("%d records through the gateway, %d from the broker, %d are there", len(through), len(direct), want)
			}
			if served < 2*sent {
				t.Errorf("%v bytes from the bucket, %v from the broker", served, sent)
			}
			t.Logf("%v bytes from the bucket, %v from the broker", served, sent)
		})
	}
	check("Java", committed, func(t *testing.T, addr string) string {
		return kafkaTools(t, addr).run(t, "consume", "--topic", topic, "--from-beginning", "--max-messages", fmt.Sprint(committed), "--timeout-ms", "30000",
			"--isolation-level", "read_committed", "--formatter-property", "print.partition=true", "--formatter-property", "print.offset=true")
	})
	check("librdkafka", committed, func(t *testing.T, addr string) string {
		return command{}.run(t, need(t, "kcat"), "-q", "-b", addr, "-C", "-t", topic, "-o", "beginning", "-e", "-X", "isolation.level=read_committed", "-f", "%p %o %s\n")
	})
	check("kafka-python", all, func(t *testing.T, addr string) string { // which has no read_committed, and shows markers
		return command{}.run(t, debianPython(t, "kafka"), filepath.Join("py", "kafka_python.py"), addr, topic, "print", fmt.Sprint(marked))
	})
	check("kafkajs", committed, func(t *testing.T, addr string) string {
		node := need(t, "node")
		if found, _ := filepath.Glob("js/node_modules/kafkajs"); len(found) == 0 {
			t.Skip("SKIPPED: kafkajs is missing; run test/compat/setup")
		}
		_, port, _ := net.SplitHostPort(addr)
		return command{}.run(t, node, filepath.Join("js", "kafkajs.js"), addr, topic, "print", fmt.Sprint(committed), "group-"+port)
	})
}

// The whole scripts of other clients, with groups, transactions and administration, through the gateway.
func TestScriptsThroughTheGateway(t *testing.T) {
	b := start(t)
	g := startGateway(t, b, "--bucket", filepath.Join(b.dir, "bucket"))
	run := func(name string, args ...string) {
		t.Run(name, func(t *testing.T) { script(t, &g.broker, name, args...) })
	}
	run("kafka-python", debianPython(t, "kafka"), filepath.Join("py", "kafka_python.py"))
	if found, _ := filepath.Glob("js/node_modules/kafkajs"); len(found) > 0 {
		run("kafkajs", need(t, "node"), filepath.Join("js", "kafkajs.js"))
	}
	t.Run("confluent transactions", func(t *testing.T) {
		python := []string{debianPython(t, "confluent_kafka"), filepath.Join("py", "confluent.py")}
		g.topic(t, "moved", 3, tieredConfigs...)
		g.topic(t, "moved-in", 3)
		command{}.run(t, append(python, g.addr, "moved", "transact")...)
		b.tiered(t, "moved", 1)
		command{}.run(t, append(python, g.addr, "moved", "committed")...)
	})
}

// An Apache Kafka behind the gateway: its own clients and others write and read through it, transactions included.
func TestGatewayInFrontOfKafka(t *testing.T) {
	asked(t)
	peer, _, _ := kafkaTools(t, "").peer(t)
	g := startGateway(t, peer)
	k := kafkaTools(t, g.addr)
	k.run(t, "topics", "--create", "--topic", "t", "--partitions", "3")
	committed, _, _ := mixedHistory(t, &g.broker, "t")
	out := k.run(t, "consume", "--topic", "t", "--from-beginning", "--max-messages", fmt.Sprint(committed), "--timeout-ms", "30000", "--isolation-level", "read_committed", "--group", "java")
	if n := len(lines(out)); n != committed || strings.Contains(out, "committed false") {
		t.Errorf("Java read %d of %d", n, committed)
	}
	out = command{}.run(t, need(t, "kcat"), "-q", "-b", g.addr, "-C", "-t", "t", "-o", "beginning", "-e", "-X", "isolation.level=read_committed")
	if n := len(lines(out)); n != committed {
		t.Errorf("librdkafka read %d of %d", n, committed)
	}
	if out := k.run(t, "groups", "--describe", "--group", "java"); !strings.Contains(out, "java") {
		t.Errorf("%s", out)
	}
}

// SASL passes: whoever the broker lets in is served, old clients whose tokens have no headers among them, and nobody else.
func TestSASLThroughTheGateway(t *testing.T) {
	asked(t)
	port := freePorts(t, 3)
	plain, control, sasl := port, port+1, port+2
	_, home, _ := kafkaTools(t, "").peerAt(t, port, "--tiered", fmt.Sprintf("listeners=PLAINTEXT://127.0.0.1:%d,CONTROLLER://127.0.0.1:%d,SASL://127.0.0.1:%d", plain, control, sasl),
		fmt.Sprintf("advertised.listeners=PLAINTEXT://127.0.0.1:%d,SASL://127.0.0.1:%d", plain, sasl), "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL:SASL_PLAINTEXT",
		"listener.name.sasl.sasl.enabled.mechanisms=PLAIN", `listener.name.sasl.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required user_me="secret";`)
	g := startGateway(t, &broker{addr: "127.0.0.1:" + strconv.Itoa(sasl)})
	values := values(30)
	me := kgo.SASL(plainauth.Auth{User: "me", Pass: "secret"}.AsMechanism())
	for i, v := range values {
		if err := g.client(t, me, kgo.AllowAutoTopicCreation(), kgo.ProducerBatchCompression(kgo.NoCompression())).ProduceSync(within(t), &kgo.Record{Topic: "t", Value: fmt.Appendf(nil, "transaction %d %s", i, v)}).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	kcat := func(password string) (string, error) {
		out, _, err := command{limit: 20 * time.Second}.try(t, need(t, "kcat"), "-q", "-b", g.addr, "-C", "-t", "t", "-o", "beginning", "-e", "-X", "security.protocol=SASL_PLAINTEXT", "-X", "sasl.mechanism=PLAIN",
			"-X", "sasl.username=me", "-X", "sasl.password="+password)
		return out, err
	}
	if out, err := kcat("secret"); err != nil || len(lines(out)) != len(values) {
		t.Errorf("librdkafka read %d, %v", len(lines(out)), err)
	}
	if out, err := kcat("wrong"); err == nil && len(lines(out)) > 0 {
		t.Error("a wrong password is as good as the right one")
	}
	// Its tier is read with the gateway's own user.
	open := &broker{addr: "127.0.0.1:" + strconv.Itoa(plain)}
	open.topic(t, "history", 1, stockConfigs...)
	const count = 400
	producer := open.client(t)
	for i := range count {
		if err := producer.ProduceSync(within(t), &kgo.Record{Topic: "history", Value: fmt.Appendf(nil, "%d %0300d", i, i)}).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	open.tiered(t, "history", count/2)
	password := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(password, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	reader := startGateway(t, &broker{addr: "127.0.0.1:" + strconv.Itoa(sasl)}, "--tier-layout", "kafka-local", "--key-prefix", "kafka-tiered-storage/", "--bucket", filepath.Join(home, "tier"),
		"--tier-user", "me", "--tier-password-file", password, "--tier-sasl-mechanism", "PLAIN")
	cl := reader.client(t, me, kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"history": {0: kgo.NewOffset().AtStart()}}))
	for n := 0; n < count; {
		fetches := cl.PollFetches(within(t))
		if err := fetches.Err(); err != nil {
			t.Fatal(err)
		}
		fetches.EachRecord(func(r *kgo.Record) {
			if want := fmt.Sprintf("%d %0300d", n, n); string(r.Value) != want {
				t.Fatalf("%.20q where %.20q is due", r.Value, want)
			}
			n++
		})
	}
	if reader.metric(t, "remote_fetch_served_bytes_total") < 100*300 {
		t.Error("Kafka's tier was not read by the gateway")
	}
	out := command{env: []string{"SASL=me:secret"}}.run(t, debianPython(t, "kafka"), filepath.Join("py", "kafka_python.py"), g.addr, "t", "print", fmt.Sprint(len(values)))
	if n := len(lines(out)); n != len(values) {
		t.Errorf("kafka-python read %d", n)
	}
}
