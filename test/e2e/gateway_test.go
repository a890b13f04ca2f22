package e2e

import (
	"bytes"
	"context"
	endian "encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/testport"
	"github.com/varve-io/varve/internal/wire"
)

// gateway describes a gateway in front of brokers: a node whose process is another one. It takes four ports.
func gateway(t *testing.T, brokers string, args ...string) *node {
	t.Helper()
	n := newNode(t)
	n.web, n.port = testport.Free(t), testport.Free(t)
	for last := n.port; last < n.port+3; {
		if last++; testport.Free(t) != last {
			n.port = testport.Free(t)
			last = n.port
		}
	}
	n.args = append([]string{"gateway", "--brokers", brokers, "--listen", "127.0.0.1", "--ports", fmt.Sprintf("%d-%d", n.port, n.port+3), "--metrics", fmt.Sprintf("127.0.0.1:%d", n.web)}, args...)
	return n
}

// open starts the gateway and returns when it is ready.
func (n *node) open() {
	n.t.Helper()
	n.cmd = exec.Command(binary, n.args...)
	n.cmd.Stdout, n.cmd.Stderr = n, n
	if err := n.cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	n.done = make(chan error, 1)
	cmd, done := n.cmd, n.done
	go func() { done <- cmd.Wait() }()
	n.until("the gateway is ready", func() bool {
		_, status := n.get("/readyz")
		return status == 200
	})
}

// metric reads one of the gateway's metrics.
func (n *node) metric(name string) float64 {
	n.t.Helper()
	body, _ := n.get("/metrics")
	m := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + ` (\S+)$`).FindStringSubmatch(body)
	if m == nil {
		n.t.Fatalf("no metric %s in %d bytes", name, len(body))
	}
	v, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		n.t.Fatal(err)
	}
	return v
}

// A gateway is killed while half of a large answer is on its way, and again and again under a consumer. The connection ends,
// nothing is made up, and at the next gateway the consumer goes on where it was.
func TestGatewayIsKilled(t *testing.T) {
	const count = 6000
	n := newNode(t)
	n.start()
	n.createTopic("history", 1, tieredConfig...)
	produce(t, n.client(), "history", 0, count)
	n.tiered("history")
	n.createTopic("large", 1)
	record := &kgo.Record{Topic: "large", Value: make([]byte, 900_000)}
	for range 40 {
		if err := n.client(kgo.ProducerBatchCompression(kgo.NoCompression())).ProduceSync(context.Background(), record).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	g := gateway(t, n.address(), "--bucket", n.dir+"/bucket")
	g.open()
	t.Run("in the middle of an answer", func(t *testing.T) {
		conn, err := net.Dial("tcp", g.address())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		req := kmsg.NewPtrFetchRequest()
		req.Version, req.MaxBytes, req.MinBytes = 4, 40_000_000, 1
		p := kmsg.NewFetchRequestTopicPartition()
		p.PartitionMaxBytes = 40_000_000
		req.Topics = []kmsg.FetchRequestTopic{{Topic: "large", Partitions: []kmsg.FetchRequestTopicPartition{p}}}
		if _, err := conn.Write(wire.AppendRequest(nil, 1, "test", req)); err != nil {
			t.Fatal(err)
		}
		start := make([]byte, 1000)
		if _, err := io.ReadFull(conn, start); err != nil {
			t.Fatal(err)
		}
		g.kill()
		rest, _ := io.ReadAll(conn)
		if size := int(endian.BigEndian.Uint32(start)); size < 30_000_000 || len(start)+len(rest) >= size+4 {
			t.Errorf("%d bytes of an answer of %d came, though the gateway was killed", len(start)+len(rest), size)
		}
		g.open()
	})
	cl := g.client(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"history": {0: kgo.NewOffset().AtStart()}}), kgo.FetchMaxPartitionBytes(10_000))
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	kills := 0
	for next := 0; next < count; {
		if next >= (kills+1)*count/4 {
			g.kill()
			g.open()
			kills++
		}
		fetches := cl.PollRecords(ctx, 100)
		if err := fetches.Err(); err != nil {
			t.Fatalf("at record %d of %d: %v", next, count, err)
		}
		fetches.EachRecord(func(r *kgo.Record) {
			if string(r.Key) != fmt.Sprint(next) || !bytes.Equal(r.Value, value(next)) {
				t.Fatalf("offset %d holds record %q, want %d", r.Offset, r.Key, next)
			}
			next++
		})
	}
	if kills != 3 || g.metric("remote_fetch_served_bytes_total") == 0 {
		t.Errorf("%d kills, %v bytes from the bucket since the last", kills, g.metric("remote_fetch_served_bytes_total"))
	}
}

// A broker that is killed and comes back, one that hangs, and a stop that waits for nobody too long.
func TestGatewayOutlivesItsBrokers(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("t", 1)
	g := gateway(t, n.address(), "--drain-timeout", "1s")
	g.open()
	produce(t, g.client(), "t", 0, 500)
	n.kill()
	g.until("the gateway is not ready", func() bool { _, status := g.get("/readyz"); return status == 503 })
	if text, status := g.get("/healthz"); status != 200 {
		t.Errorf("%d %s", status, text)
	}
	n.start()
	readAll(t, g, "t", 500)
	g.until("the gateway is ready again", func() bool { _, status := g.get("/readyz"); return status == 200 })
	// A request waits at a broker that hangs; the gateway stops all the same.
	conn, err := net.Dial("tcp", g.address())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ask := wire.AppendRequest(nil, 1, "test", kmsg.NewPtrApiVersionsRequest())
	if _, err := conn.Write(ask); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	before := g.metric(`varve_gateway_requests_total{api="ApiVersions"}`)
	n.pause()
	if _, err := conn.Write(ask); err != nil {
		t.Fatal(err)
	}
	g.until("the request is under way", func() bool { return g.metric(`varve_gateway_requests_total{api="ApiVersions"}`) > before })
	g.stop()
	n.resume()
}

func TestGatewayRefusesBadFlags(t *testing.T) {
	n := newNode(t)
	ca := filepath.Join(t.TempDir(), "empty.pem")
	if err := os.WriteFile(ca, []byte("nothing"), 0o600); err != nil {
		t.Fatal(err)
	}
	for words, args := range map[string][]string{
		"want FIRST-LAST":           {"--ports", "9200"},
		"--brokers":                 {"--brokers", "nowhere"},
		"--advertise is needed":     {"--listen", "0.0.0.0"},
		"need each other":           {"--tls-cert", ca},
		"--tls-cert, --tls-key":     {"--tls-cert", ca, "--tls-key", ca},
		"--client-ca needs":         {"--client-ca", ca},
		"--broker-ca needs":         {"--broker-ca", ca},
		"no certificate":            {"--broker-tls", "--broker-ca", ca},
		"--max-connections":         {"--max-connections", "0"},
		"--drain-timeout":           {"--drain-timeout", "-1s"},
		"--log-level":               {"--log-level", "loud"},
		"--bucket":                  {"--bucket", "gopher://x"},
		"unknown flag":              {"--nothing"},
		"want no arguments|unknown": {"extra"},
	} {
		out, code := n.varve(append([]string{"gateway"}, args...)...)
		if code != 2 || !regexp.MustCompile(words).MatchString(out) {
			t.Errorf("%q: exit code %d, %s", args, code, out)
		}
	}
	g := gateway(t, "127.0.0.1:1")
	ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", g.port+2))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if out, code := n.varve(g.args...); code != 1 || !strings.Contains(out, fmt.Sprintf("port %d of %d-%d", g.port+2, g.port, g.port+3)) {
		t.Errorf("exit code %d, %s", code, out)
	}
}
