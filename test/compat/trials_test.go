package compat

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/fixtures"
)

// trials runs the tests of known traps, which are modules of their own, against nodes that they may stop and start.
func trials(t *testing.T, name string, nodes int, limit time.Duration) {
	t.Helper()
	asked(t)
	work := copied(t)
	ctl, err := filepath.Abs("ctl")
	if err != nil {
		t.Fatal(err)
	}
	list := "trials-" + name + ".txt"
	var settings []string
	if nodes > 1 {
		list = fmt.Sprintf("trials-%s-%d.txt", name, nodes)
		settings = append(settings, replicated...)
	}
	// Only one of the modules wants settings of its own.
	if b, err := os.ReadFile(filepath.Join(work, "trials", name, "server.settings")); err == nil {
		settings = append(settings, strings.Split(strings.TrimSpace(string(b)), "\n")...)
	} else {
		settings = append(settings, forClients...)
	}
	file := filepath.Join(work, "settings")
	if err := os.WriteFile(file, []byte(strings.Join(settings, "\n")+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	port := freePorts(t, nodes)
	var b broker
	var addrs []string
	for i := range nodes {
		addrs = append(addrs, "127.0.0.1:"+strconv.Itoa(port+i))
	}
	b.addr = strings.Join(addrs, ",")
	top := filepath.Join(work, "nodes")
	env := []string{"VARVE=" + binary, "CTL_DIR=" + top, "CTL_SETTINGS=" + file, "CASES_SEEDS=" + b.addr, "CASES_NODES=" + strconv.Itoa(nodes), "CASES_CTL=" + ctl, "GOFLAGS=-mod=mod"}
	t.Cleanup(func() {
		if _, errs, err := (command{env: env}).try(t, ctl, "down"); err != nil {
			t.Errorf("ctl down: %v\n%s", err, errs)
		}
		keepLogs(t, list, top, nodes)
	})
	if modules, err := filepath.Abs("js/node_modules"); err == nil && os.Getenv("CASES_NODE_MODULES") == "" {
		if _, err := os.Stat(modules); err == nil {
			env = append(env, "CASES_NODE_MODULES="+modules)
		}
	}
	command{env: env}.run(t, ctl, "up", strconv.Itoa(nodes), strconv.Itoa(port))
	b.ready(t, nodes)
	args := []string{"-timeout", strconv.Itoa(int(limit.Seconds())) + "s"}
	if nodes > 1 {
		// It moves a coordinator, and outlives its test where no python is at hand.
		args = append(args, "-skip", "^TestC08_OffsetFetchWrongCoordinator$/librdkafka")
	}
	goSuite(t, list, everything, func(more ...string) string {
		t.Helper()
		pids := "CASES_PIDS=" + strings.TrimSpace(command{env: env}.run(t, ctl, "pids"))
		c := command{dir: filepath.Join(work, "trials", name), env: append(env, pids), limit: limit + 10*time.Second}
		out := c.goTest(t, slices.Concat(args, []string{"."}, more)...)
		for _, addr := range addrs {
			out = strings.ReplaceAll(out, addr, "BROKER") // in the names of sub-tests too
		}
		return out
	})
}

// replicated are the settings of a cluster that outlives any of its nodes.
var replicated = []string{"default.replication.factor=3", "min.insync.replicas=2", "offsets.topic.replication.factor=3", "transaction.state.log.replication.factor=3"}

// keepLogs keeps what the nodes printed beside the output of the suite.
func keepLogs(t *testing.T, list, top string, nodes int) {
	keep := os.Getenv("VARVE_COMPAT_OUTPUT")
	if keep == "" {
		return
	}
	for i := range nodes {
		text, err := os.ReadFile(filepath.Join(top, strconv.Itoa(i+1), "log"))
		if err == nil {
			err = os.WriteFile(filepath.Join(keep, fmt.Sprintf("%s.node%d.log", list, i+1)), text, 0o600)
		}
		if err != nil {
			t.Error(err)
		}
	}
}

// forClients keeps retention away from a module that writes old records: with the defaults they expire half a minute after the start,
// under whoever is about to read them then. Its traps that pause a node count on Kafka's nine seconds until it is fenced and do not
// wait much longer; fewer leave a busy machine some room.
var forClients = []string{"log.retention.check.interval.ms=3600000", "log.initial.task.delay.ms=3600000", "broker.session.timeout.ms=6000"}

// copied puts the trials where they may be built.
func copied(t *testing.T) string {
	t.Helper()
	work := t.TempDir()
	if err := os.CopyFS(filepath.Join(work, "trials"), os.DirFS(fixtures.Shared(t, "trials"))); err != nil {
		t.Fatal(err)
	}
	return work
}

func TestTrialsClients(t *testing.T) { trials(t, "clients", 1, 5*time.Minute) }

// The same traps against three nodes, and those that need as many.
func TestTrialsClientsReplicated(t *testing.T) { trials(t, "clients", 3, 8*time.Minute) }

func TestTrialsLogs(t *testing.T) { trials(t, "logs", 1, 15*time.Minute) }

// Whatever stops or kills a node goes on with another leader or coordinator here.
func TestTrialsLogsReplicated(t *testing.T) { trials(t, "logs", 3, 14*time.Minute) }
