package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestFetcherPlugin reads through the example plug-in, built as its users would, and through ones that are of no use.
func TestFetcherPlugin(t *testing.T) {
	program := filepath.Join(t.TempDir(), "folder-fetcher")
	if out, err := exec.Command("go", "build", "-o", program, "../../direct/example/plugin").CombinedOutput(); err != nil {
		t.Fatalf("build the example: %v\n%s", err, out)
	}
	n := newNode(t)
	n.start()
	n.createTopic("history", 1, tieredConfig...)
	const count = 3000
	produce(t, n.client(), "history", 0, count)
	n.tiered("history")
	read := func(fetcher, bucket string) (records int, told string) {
		t.Helper()
		out, code := n.varve("consume", "history", "--until", "end", "--direct", "-f", `=%o\n`, "--fetcher", fetcher, "--bucket", bucket, "-b", n.address())
		if code != 0 {
			t.Fatalf("exit %d: %.500s", code, out)
		}
		for line := range strings.Lines(out) {
			if line == fmt.Sprintf("=%d\n", records) {
				records++
			} else if !strings.HasPrefix(line, "=") {
				told += line
			}
		}
		return records, told
	}
	bucket := n.dir + "/bucket"
	if records, told := read(program, bucket); records != count || !strings.Contains(told, "read from the bucket") || strings.HasPrefix(told, "0 B") || strings.Contains(told, "fallback") {
		t.Errorf("%d records: %s", records, told)
	}
	if records, told := read(program, t.TempDir()); records != count || !strings.Contains(told, "0 B read from the bucket") || !strings.Contains(told, "fallbacks (not_found)") {
		t.Errorf("of an empty folder %d records: %s", records, told)
	}
	// One that ends after a moment, over and over.
	dying := filepath.Join(t.TempDir(), "dying")
	if err := os.WriteFile(dying, []byte("#!/bin/sh\n"+program+" & p=$!\n(sleep 0.05; kill -9 $p) >/dev/null 2>&1 &\nwait $p\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if records, told := read(dying, bucket); records != count {
		t.Errorf("through one that dies %d records: %s", records, told)
	}
	if out, code := n.varve("consume", "history", "--direct", "--fetcher", "/bin/true", "-b", n.address()); code == 0 || !strings.Contains(out, "--fetcher") {
		t.Errorf("exit %d: %s", code, out)
	}
}
