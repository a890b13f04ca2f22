package compat

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
)

// Ports that sarama's suite insists on: those of toxiproxy's API and of the first of five proxies.
const (
	toxiproxyPort  = 8474
	firstProxyPort = 29091
	proxies        = 5
)

// The suite's tests with other names than TestFunc…; everything else of the package is a unit test.
const saramaSuite = "^(TestFunc.*|TestConsumerFetchFollowerFailover|TestConsumerHighWaterMarkOffset|TestConsumerPartialBatchRecovery|TestVersionMatrix.*|" +
	"TestReadOnlyAndAllCommittedMessages|TestConsumerGroupDeadlock|TestJava.*|TestInterceptors|TestAsyncProducerRemoteBrokerClosed)$"

// sarama's own functional tests, out of the module cache, against five brokers of five racks behind toxiproxy, two of which
// joined the other three. The tests break connections and, with a stand-in for docker, stop and start brokers.
func TestSaramaFunctional(t *testing.T) {
	asked(t)
	ports := []int{toxiproxyPort}
	for i := range proxies {
		ports = append(ports, firstProxyPort+i)
	}
	for _, port := range ports {
		l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port))
		if err != nil {
			t.Skipf("SKIPPED: sarama's suite needs port %d: %v", port, err)
		}
		l.Close()
	}
	began := time.Now()
	env := startProxied(t)
	dir := strings.TrimSpace(command{}.run(t, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/IBM/sarama"))
	env = append(env, fmt.Sprintf("TOXIPROXY_ADDR=http://127.0.0.1:%d", toxiproxyPort), "KAFKA_VERSION=4.0.0")
	goSuite(t, "sarama.txt", topLevel, func(args ...string) string {
		t.Helper()
		c := command{dir: dir, limit: 9*time.Minute - time.Since(began), env: env}
		return c.goTest(t, append([]string{"-tags", "functional", "-vet=off", "-timeout", "480s", "-run", saramaSuite, "."}, args...)...)
	})
}

// startProxied runs five brokers that tell clients to use toxiproxy's ports and reach each other without it. It returns the
// environment in which docker stops and starts them.
func startProxied(t *testing.T) []string {
	t.Helper()
	shim, err := filepath.Abs("shim")
	if err != nil {
		t.Fatal(err)
	}
	nodes := t.TempDir()
	life := filepath.Join(nodes, "life")
	if err := syscall.Mkfifo(life, 0o600); err != nil {
		t.Fatal(err)
	}
	// Opened for both, so that it does not wait for a reader. Brokers end when this process does.
	alive, err := os.OpenFile(life, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { alive.Close() })
	ports := freePorts(t, 2*proxies)
	client := func(id int) string { return "127.0.0.1:" + strconv.Itoa(ports+2*(id-1)) }
	peer := func(id int) string { return "127.0.0.1:" + strconv.Itoa(ports+2*(id-1)+1) }
	proxied := func(id int) string { return "127.0.0.1:" + strconv.Itoa(firstProxyPort+id-1) }
	voters := fmt.Sprintf("1@%s,2@%s,3@%s", peer(1), peer(2), peer(3))
	env := []string{"COMPAT_NODES=" + nodes, "PATH=" + shim + ":" + os.Getenv("PATH")}
	docker := func(verb string, id int) {
		t.Helper()
		if _, errs, err := (command{env: env}).try(t, filepath.Join(shim, "docker"), "compose", verb, fmt.Sprint("kafka-", id)); err != nil {
			t.Errorf("docker compose %s kafka-%d: %v\n%s", verb, id, err, errs)
		}
	}
	startToxiproxy(t, client, proxied)
	for id := 1; id <= proxies; id++ {
		folder := filepath.Join(nodes, strconv.Itoa(id))
		args := []string{binary, "server", "--id", strconv.Itoa(id), "--dir", filepath.Join(folder, "data"), "--bucket", filepath.Join(nodes, "bucket"), "--rack", strconv.Itoa(id)}
		if id <= 3 {
			args = append(args, "--voters", voters)
		} else {
			args = append(args, "--join", peer(1))
		}
		for _, s := range []string{
			fmt.Sprintf("listeners=PLAINTEXT://%s,NODES://%s", client(id), peer(id)),
			fmt.Sprintf("advertised.listeners=PLAINTEXT://%s,NODES://%s", proxied(id), peer(id)),
			"inter.broker.listener.name=NODES", "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,NODES:PLAINTEXT",
			// As the suite's own cluster is set up.
			"default.replication.factor=2", "offsets.topic.replication.factor=2", "auto.create.topics.enable=false", "group.initial.rebalance.delay.ms=0",
			"offsets.topic.num.partitions=10",
		} {
			args = append(args, "--set", s)
		}
		if err := os.Mkdir(folder, 0o700); err != nil {
			t.Fatal(err)
		}
		for name, text := range map[string]string{"command": strings.Join(args, "\n") + "\n", "port": strconv.Itoa(ports + 2*(id-1)), "log": ""} {
			if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		t.Cleanup(func() {
			docker("stop", id)
			log, err := os.ReadFile(filepath.Join(folder, "log"))
			if err != nil {
				t.Error(err)
			}
			if keep := os.Getenv("VARVE_COMPAT_OUTPUT"); keep != "" {
				if err := os.WriteFile(filepath.Join(keep, fmt.Sprintf("sarama-broker-%d.log", id)), log, 0o600); err != nil {
					t.Error(err)
				}
			}
			if t.Failed() {
				t.Logf("the output of broker %d ends with:\n%s", id, log[max(0, len(log)-1000):])
			}
		})
		docker("start", id)
	}
	b := &broker{addr: proxied(1)}
	await(t, "all brokers are known", func() bool {
		brokers, err := b.admin(t).ListBrokers(within(t))
		return err == nil && len(brokers) == proxies
	})
	await(t, "groups have coordinators", func() bool {
		var o kadm.Offsets
		o.AddOffset("none", 0, 0, -1)
		_, err := b.admin(t).CommitOffsets(within(t), "warm-up", o)
		return err == nil
	})
	return env
}

// startToxiproxy runs the proxy that tools/go.mod pins, with its proxies kafka1 to kafka5.
func startToxiproxy(t *testing.T, to, from func(id int) string) {
	t.Helper()
	path, errs, err := command{limit: 3 * time.Minute}.try(t, "go", "-C", "../../tools", "tool", "-n", "github.com/Shopify/toxiproxy/v2/cmd/server")
	if err != nil {
		t.Skipf("SKIPPED: toxiproxy cannot be built: %v %s", err, tail(errs))
	}
	// It is asked to end when its input does, even if the test is killed.
	cmd := exec.Command("bash", "-c", `"$1" -host 127.0.0.1 -port "$2" </dev/null >/dev/null 2>&1 & p=$!; cat >/dev/null; kill -TERM $p 2>/dev/null; wait $p`,
		"compat", strings.TrimSpace(path), strconv.Itoa(toxiproxyPort))
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Wait() // by the signal
	})
	api := fmt.Sprintf("http://127.0.0.1:%d/proxies", toxiproxyPort)
	await(t, "toxiproxy serves", func() bool {
		resp, err := http.Get(api)
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	for id := 1; id <= proxies; id++ {
		body, err := json.Marshal(map[string]any{"name": fmt.Sprint("kafka", id), "listen": from(id), "upstream": to(id), "enabled": true})
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.Post(api, "application/json", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusCreated {
			t.Fatalf("toxiproxy: proxy %d: %s", id, resp.Status)
		}
	}
}
