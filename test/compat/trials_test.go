package compat

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/fixtures"
)

// trials runs the tests of known traps, which are modules of their own, against a node that they may stop and start.
func trials(t *testing.T, name string, limit time.Duration) {
	t.Helper()
	asked(t)
	work := copied(t)
	ctl, err := filepath.Abs("ctl")
	if err != nil {
		t.Fatal(err)
	}
	port := strconv.Itoa(freePorts(t, 1))
	env := []string{"VARVE=" + binary, "CTL_DIR=" + filepath.Join(work, "node"), "CTL_SETTINGS=" + filepath.Join(work, "trials", name, "server.settings"),
		"CASES_SEEDS=127.0.0.1:" + port, "CASES_NODES=1", "CASES_CTL=" + ctl, "GOFLAGS=-mod=mod"}
	t.Cleanup(func() {
		if _, errs, err := (command{env: env}).try(t, ctl, "down"); err != nil {
			t.Errorf("ctl down: %v\n%s", err, errs)
		}
	})
	// Only one of the modules wants settings of its own.
	if _, err := os.Stat(filepath.Join(work, "trials", name, "server.settings")); err != nil {
		settings := filepath.Join(work, "settings")
		if err := os.WriteFile(settings, []byte(strings.Join(keepOld, "\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		env = append(env, "CTL_SETTINGS="+settings)
	}
	if modules, err := filepath.Abs("js/node_modules"); err == nil && os.Getenv("CASES_NODE_MODULES") == "" {
		if _, err := os.Stat(modules); err == nil {
			env = append(env, "CASES_NODE_MODULES="+modules)
		}
	}
	command{env: env}.run(t, ctl, "up", port)
	args := []string{"go", "test", "-count=1", "-v", "-timeout", strconv.Itoa(int(limit.Seconds())) + "s"}
	out, errs, err := command{dir: filepath.Join(work, "trials", name), env: env, limit: limit}.try(t, append(args, ".")...)
	if err != nil {
		t.Logf("go test: %v\n%s", err, tail(errs))
	}
	out = strings.ReplaceAll(out, "127.0.0.1:"+port, "BROKER") // in the names of sub-tests too
	mustPass(t, "trials-"+name+".txt", out, func(string) bool { return true })
}

// keepOld keeps retention away from a module that writes old records: with the defaults they expire half a minute after the start,
// under whoever is about to read them then.
var keepOld = []string{"log.retention.check.interval.ms=3600000", "log.initial.task.delay.ms=3600000"}

// copied puts the trials where they may be built.
func copied(t *testing.T) string {
	t.Helper()
	work := t.TempDir()
	if err := os.CopyFS(filepath.Join(work, "trials"), os.DirFS(fixtures.Shared(t, "trials"))); err != nil {
		t.Fatal(err)
	}
	return work
}

// The same traps against three brokers, and those that need as many.
func TestTrialsClientsReplicated(t *testing.T) {
	asked(t)
	work := copied(t)
	b := startCluster(t, 3, append(keepOld, "default.replication.factor=3", "min.insync.replicas=2")...)
	// The step of C08 that moves a coordinator outlives its test where no python is at hand.
	args := []string{"go", "test", "-count=1", "-v", "-timeout", "290s", "-skip", "^TestC08_OffsetFetchWrongCoordinator$/librdkafka"}
	env := []string{"CASES_SEEDS=" + b.addr, "CASES_NODES=3", "GOFLAGS=-mod=mod"}
	out, errs, err := command{dir: filepath.Join(work, "trials", "clients"), env: env, limit: 5 * time.Minute}.try(t, append(args, ".")...)
	if err != nil {
		t.Logf("go test: %v\n%s", err, tail(errs))
	}
	for _, addr := range strings.Split(b.addr, ",") {
		out = strings.ReplaceAll(out, addr, "BROKER")
	}
	mustPass(t, "trials-clients-3.txt", out, func(string) bool { return true })
}

func TestTrialsClients(t *testing.T) { trials(t, "clients", 5*time.Minute) }

func TestTrialsLogs(t *testing.T) { trials(t, "logs", 15*time.Minute) }
