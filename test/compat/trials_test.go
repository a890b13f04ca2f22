package compat

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/fixtures"
)

// trials runs the tests of known traps, which are modules of their own, against a node that they may stop and start.
func trials(t *testing.T, name string, limit time.Duration) {
	t.Helper()
	asked(t)
	shared := fixtures.Shared(t, "trials")
	work := t.TempDir()
	if err := os.CopyFS(filepath.Join(work, "trials"), os.DirFS(shared)); err != nil {
		t.Fatal(err)
	}
	ctl, err := filepath.Abs("ctl")
	if err != nil {
		t.Fatal(err)
	}
	port := strconv.Itoa(freePort(t))
	env := []string{"VARVE=" + binary, "CTL_DIR=" + filepath.Join(work, "node"), "CTL_SETTINGS=" + filepath.Join(work, "trials/logs/server.settings"),
		"CASES_SEEDS=127.0.0.1:" + port, "CASES_NODES=1", "CASES_CTL=" + ctl, "GOFLAGS=-mod=mod"}
	t.Cleanup(func() {
		if _, errs, err := (command{env: env}).try(t, ctl, "down"); err != nil {
			t.Errorf("ctl down: %v\n%s", err, errs)
		}
	})
	command{env: env}.run(t, ctl, "up", port)
	out, errs, err := command{dir: filepath.Join(work, "trials", name), env: env, limit: limit}.try(t,
		"go", "test", "-count=1", "-v", "-timeout", strconv.Itoa(int(limit.Seconds()))+"s", ".")
	if err != nil {
		t.Logf("go test: %v\n%s", err, tail(errs))
	}
	mustPass(t, "trials-"+name+".txt", out, func(string) bool { return true })
}

func TestTrialsClients(t *testing.T) { trials(t, "clients", 5*time.Minute) }

func TestTrialsLogs(t *testing.T) { trials(t, "logs", 15*time.Minute) }
