package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A bucket that Varve wrote is read with no server running: listed, printed, found whole, and found damaged when it is.
func TestBucketWithoutAServer(t *testing.T) {
	for _, settings := range [][]string{nil, {"rsm.config.compression.enabled=true", "rsm.config.chunk.size=10000", "rsm.config.key.prefix=some/where/"}} {
		t.Run(fmt.Sprint(len(settings)), func(t *testing.T) {
			const count = 3000
			n := newNode(t, settings...)
			n.start()
			n.createTopic("history", 1, tieredConfig...)
			produce(t, n.client(), "history", 0, count)
			end := int(n.tiered("history").RemoteEnd)
			n.stop()
			url := filepath.Join(n.dir, "bucket")
			out, code := n.varve("bucket", "ls", url)
			if code != 0 || !strings.Contains(out, "history-0") {
				t.Fatalf("%d %s", code, out)
			}
			out, code = n.varve("bucket", "cat", url, "history", "-f", `%o %k %v\n`)
			lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
			if code != 0 || len(lines) != end+1 {
				t.Fatalf("%d, %d records", code, len(lines))
			}
			for i, line := range lines {
				if line != fmt.Sprintf("%d %d %s", i, i, value(i)) {
					t.Fatalf("record %d is %q", i, line)
				}
			}
			if out, code := n.varve("bucket", "verify", url); code != 0 || !strings.HasSuffix(out, ": 0 findings\n") {
				t.Errorf("%d %s", code, out)
			}
			logs, err := filepath.Glob(filepath.Join(url, "*", "*", "*.log"))
			if deep, _ := filepath.Glob(filepath.Join(url, "some", "where", "*", "*", "*.log")); len(deep) > 0 {
				logs = deep
			}
			if err != nil || len(logs) < 2 {
				t.Fatal(logs, err)
			}
			if err := os.WriteFile(filepath.Join(url, "note.txt"), []byte("x"), 0o600); err != nil {
				t.Fatal(err)
			}
			if out, code := n.varve("bucket", "verify", url); code != 0 || !strings.Contains(out, "foreign: note.txt") {
				t.Errorf("%d %s", code, out)
			}
			b, err := os.ReadFile(logs[1])
			if err != nil {
				t.Fatal(err)
			}
			b[len(b)/2] ^= 1
			if err := os.WriteFile(logs[1], b, 0o600); err != nil {
				t.Fatal(err)
			}
			out, code = n.varve("bucket", "verify", url)
			if code != 1 || !strings.Contains(out, "damaged: ") || !strings.Contains(out, filepath.Base(logs[1])) {
				t.Errorf("%d %s", code, out)
			}
			if out, code := n.varve("bucket", "cat", url, "history", "-f", `%o\n`); code != 1 || !strings.HasPrefix(out, "0\n1\n") || !strings.Contains(out, "damaged at position") && !strings.Contains(out, "chunk") {
				t.Errorf("%d %.200s", code, out)
			}
		})
	}
}
