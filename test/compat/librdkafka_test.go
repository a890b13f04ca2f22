package compat

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
)

// librdkafkaRow is a line of the table that librdkafka's test program ends with.
var librdkafkaRow = regexp.MustCompile(`(?m)^\| (\d{4}_\w+) +\| +(PASSED|FAILED|SKIPPED) \| +([\d.]+s)`)

// librdkafka's own test program against one broker.
func TestLibrdkafkaSuite(t *testing.T) {
	// Its records are of 2010 and the like.
	librdkafkaSuite(t, start(t, "num.partitions=4", "log.retention.ms=-1", joinTogether), "librdkafka.txt")
}

// Those of its tests that want three replicas.
func TestLibrdkafkaSuiteReplicated(t *testing.T) {
	librdkafkaSuite(t, startCluster(t, 3, "num.partitions=4", joinTogether), "librdkafka-3.txt")
}

// joinTogether is Kafka's own delay, which the harness leaves out: librdkafka's tests of two consumers count on it that both are in
// the group's first generation (0118 polls one after the other).
const joinTogether = "group.initial.rebalance.delay.ms=3000"

// librdkafkaSuite runs the tests that are listed, in quick mode and a process each, since one that fails holds up or ends all others of its
// process.
func librdkafkaSuite(t *testing.T, b *broker, list string) {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	suite := filepath.Join(cache, "varve-compat", "librdkafka")
	runner := filepath.Join(suite, "tests", "test-runner")
	if _, err := os.Stat(runner); err != nil {
		t.Skip("SKIPPED: librdkafka's test program is missing; run test/compat/setup")
	}
	work := t.TempDir()
	if err := os.WriteFile(filepath.Join(work, "test.conf"), []byte("bootstrap.servers="+b.addr+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	env := []string{"LD_LIBRARY_PATH=" + filepath.Join(suite, "src") + ":" + filepath.Join(suite, "src-cpp"), "TEST_KAFKA_VERSION=3.4.0"}
	words := map[string]string{"PASSED": "PASS", "FAILED": "FAIL", "SKIPPED": "SKIP"}
	var mu sync.Mutex
	var verdicts strings.Builder
	var running errgroup.Group
	running.SetLimit(3)
	failed := map[string]bool{}
	try := func(name string) {
		c := command{dir: work, limit: 100 * time.Second, env: append([]string{"TESTS=" + name}, env...)}
		out, errs, _ := c.try(t, runner, "-L", "-Q", "-p1") // which of them failed its table tells
		said := regexp.MustCompile("\x1b\\[[0-9;]*m").ReplaceAllString(out+errs, "")
		mu.Lock()
		defer mu.Unlock()
		failed[name] = true
		for _, m := range librdkafkaRow.FindAllStringSubmatch(said, -1) {
			fmt.Fprintf(&verdicts, "--- %s: %s (%s)\n", words[m[2]], m[1], m[3])
			failed[name] = failed[name] && (m[1] != name || m[2] != "PASSED")
		}
		if failed[name] {
			_, why, _ := strings.Cut(said, "### Test ")
			t.Logf("%s failed: %s", name, why[:min(len(why), 600)])
		}
	}
	for _, name := range allowed(t, list) {
		running.Go(func() error {
			try(name)
			return nil
		})
	}
	running.Wait()
	// They wait for seconds that a busy machine may not have: what failed beside others gets a few more tries alone.
	for name := range maps.Clone(failed) {
		for tries := 0; failed[name] && tries < 3; tries++ {
			try(name)
		}
	}
	mustPass(t, list, verdicts.String(), func(string) bool { return false })
}
