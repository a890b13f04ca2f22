package compat

import (
	"strings"
	"testing"
	"time"
)

// franz-go's own integration tests, out of the module cache. Those of features that the broker does not advertise skip
// themselves; the transactional one does not, and waits for ever.
func TestFranzGoSuite(t *testing.T) { franzGo(t, start(t), "KGO_TEST_RF=1") }

// The same while the client's connections break every second.
func TestFranzGoSuiteInChaos(t *testing.T) { franzGo(t, start(t), "KGO_TEST_RF=1", "KGO_TEST_CHAOS=1") }

// The same against three brokers with three replicas of everything.
func TestFranzGoSuiteReplicated(t *testing.T) {
	franzGo(t, startCluster(t, 3, "min.insync.replicas=2"), "KGO_TEST_RF=3")
}

func TestFranzGoSuiteReplicatedInChaos(t *testing.T) {
	franzGo(t, startCluster(t, 3, "min.insync.replicas=2"), "KGO_TEST_RF=3", "KGO_TEST_CHAOS=1")
}

func franzGo(t *testing.T, b *broker, env ...string) {
	t.Helper()
	dir := strings.TrimSpace(command{}.run(t, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/twmb/franz-go"))
	c := command{dir: dir + "/pkg/kgo", limit: 5 * time.Minute, env: append(env, "KGO_SEEDS="+b.addr, "KGO_TEST_RECORDS=50000", "KGO_LOG_LEVEL=none")}
	goSuite(t, "kgo.txt", topLevel, func(args ...string) string {
		t.Helper()
		return c.goTest(t, append([]string{"-timeout", "240s", "."}, args...)...)
	})
}
