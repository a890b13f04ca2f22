package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/varve-io/varve/internal/inspect"
	"github.com/varve-io/varve/internal/recordbatch"
)

// called runs the command line and returns what it printed.
func called(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := root()
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

func segmentFile(t *testing.T) string {
	t.Helper()
	var raw []byte
	for i := range 3 {
		b := recordbatch.NewBuilder()
		b.BaseOffset = int64(i)
		b.Add(recordbatch.Record{Key: []byte("k"), Value: []byte("v<>"), Timestamp: 1700000000000})
		one, err := b.Build()
		if err != nil {
			t.Fatal(err)
		}
		raw = append(raw, one...)
	}
	path := filepath.Join(t.TempDir(), "00000000000000000000.log")
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestDump(t *testing.T) {
	path := segmentFile(t)
	out, err := called(t, "dump", "--json", "--records", path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 6 {
		t.Fatalf("%d lines:\n%s", len(lines), out)
	}
	var batch struct {
		BaseOffset int64 `json:"baseOffset"`
		Valid      bool  `json:"valid"`
	}
	if err := json.Unmarshal([]byte(lines[4]), &batch); err != nil || batch.BaseOffset != 2 || !batch.Valid {
		t.Errorf("%+v, %v", batch, err)
	}
	if !strings.Contains(lines[5], `"value":"v<>"`) {
		t.Errorf("%s", lines[5])
	}
	if out, err = called(t, "dump", path, path); err != nil || strings.Count(out, "batch ") != 6 || strings.Count(out, path+":\n") != 2 {
		t.Errorf("%v\n%s", err, out)
	}
}

// A damaged file is shown as far as it is whole, and so are those after it.
func TestDumpDamaged(t *testing.T) {
	path, other := segmentFile(t), segmentFile(t)
	if err := os.Truncate(path, 150); err != nil {
		t.Fatal(err)
	}
	out, err := called(t, "dump", path, other)
	var damage *inspect.DamageError
	if !errors.As(err, &damage) || damage.Position != 144 || strings.Count(out, "batch ") != 5 {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestDumpUsage(t *testing.T) {
	for _, args := range [][]string{{"dump"}, {"dump", "x", "--kind", "tree"}, {"dump", "x", "--decode", "json"}, {"dump", "x", "--key-pair", "novalue"}, {"dump", "x", "--no-such-flag"}} {
		_, err := called(t, args...)
		var usage usageError
		if !errors.As(err, &usage) {
			t.Errorf("%v: %v", args, err)
		}
	}
}
