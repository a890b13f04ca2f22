package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/varve-io/varve/internal/fixtures"
)

// wanted reads what Kafka's own consumer saw of a topic, up to an offset: offset, timestamp, key and value as JSON.
func wanted(t *testing.T, file string, end int64, committed bool) (out []string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		var r struct {
			Offset        int64
			Timestamp     int64
			Key, Value    any
			Control       *string
			ReadCommitted bool
		}
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		if r.Control == nil && r.Offset <= end && (!committed || r.ReadCommitted) {
			out = append(out, fmt.Sprint(r.Offset, r.Timestamp, r.Key, r.Value))
		}
	}
	return out
}

// printed brings the lines of cat into the same form.
func printed(t *testing.T, out string) (lines []string) {
	t.Helper()
	for line := range strings.Lines(out) {
		var r struct {
			Offset     int64
			Timestamp  int64
			Key, Value any
		}
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		lines = append(lines, fmt.Sprint(r.Offset, r.Timestamp, r.Key, r.Value))
	}
	return lines
}

// same compares records; binary values, which neither form shows as text, by their place alone.
func same(t *testing.T, got, want []string) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d records, want %d", len(got), len(want))
	}
	for i := range want {
		if got[i] != want[i] && !strings.Contains(got[i], "\ufffd") {
			t.Errorf("record %d is %s, want %s", i, got[i], want[i])
		}
	}
}

// What a real Kafka stored, with every layout that it can have, is read as Kafka's own consumer read it.
func TestBucketOfKafka(t *testing.T) {
	dir := filepath.Join(fixtures.Dir(t), "tiered")
	for _, name := range []string{"aiven-plain", "aiven-compressed", "aiven-encrypted", "aiven-both", "localtiered"} {
		t.Run(name, func(t *testing.T) {
			url := filepath.Join(dir, name, "objects")
			key := []string{"--key-pair", "fixture=" + filepath.Join(dir, "keys", "private.pem")}
			out, err := called(t, append([]string{"bucket", "ls", url, "--json"}, key...)...)
			if err != nil {
				t.Fatal(err)
			}
			for topic, end := range map[string]int64{"plain": 69, "transactions": 88} {
				if !strings.Contains(out, fmt.Sprintf(`"topic":"%s"`, topic)) || !strings.Contains(out, fmt.Sprintf(`"segments":5,"startOffset":0,"endOffset":%d`, end)) {
					t.Errorf("%s of %d offsets is not listed in %s", topic, end, out)
				}
				records := filepath.Join(dir, name, "local", topic, "records.ndjson")
				for _, committed := range []bool{false, true} {
					args := append([]string{"bucket", "cat", url, topic, "--json"}, key...)
					if committed {
						args = append(args, "--committed")
					}
					out, err := called(t, args...)
					if err != nil {
						t.Fatal(err)
					}
					same(t, printed(t, out), wanted(t, records, end, committed))
				}
			}
			if len(wanted(t, filepath.Join(dir, name, "local", "transactions", "records.ndjson"), 88, true)) == len(wanted(t, filepath.Join(dir, name, "local", "transactions", "records.ndjson"), 88, false)) {
				t.Error("no transaction was aborted, which proves nothing")
			}
			if out, err := called(t, append([]string{"bucket", "verify", url}, key...)...); err != nil || !strings.Contains(out, "2 partitions, 10 segments, 58 batches") || !strings.HasSuffix(out, ": 0 findings\n") {
				t.Errorf("%s, %v", out, err)
			}
		})
	}
}

// pinterest lays the segments of a broker's folder out as Pinterest's uploader does.
func pinterest(t *testing.T) string {
	t.Helper()
	from, to := filepath.Join(fixtures.Dir(t), "tiered", "localtiered", "local", "transactions", "transactions-0"), t.TempDir()
	folder := filepath.Join(to, "base", "1010", "cluster", "transactions-0")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, base := range []int{0, 18, 35, 50, 69} {
		for _, kind := range []string{"log", "index", "timeindex"} {
			name := fmt.Sprintf("%020d.%s", base, kind)
			b, err := os.ReadFile(filepath.Join(from, name))
			if err == nil {
				err = os.WriteFile(filepath.Join(folder, name), b, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, text := range map[string]string{"offset.wm": "00000000000000000069", "_metadata": "{}"} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return to
}

func TestBucketOfPinterest(t *testing.T) {
	url := pinterest(t)
	out, err := called(t, "bucket", "ls", url)
	if err != nil || !strings.Contains(out, "transactions-0  0..88    5") || strings.Contains(out, "note:") {
		t.Errorf("%s, %v", out, err)
	}
	if out, err = called(t, "bucket", "verify", url); err != nil {
		t.Errorf("%s, %v", out, err)
	}
	out, err = called(t, "bucket", "cat", url, "transactions:0", "--json")
	if err != nil {
		t.Fatal(err)
	}
	records := filepath.Join(fixtures.Dir(t), "tiered", "localtiered", "local", "transactions", "records.ndjson")
	same(t, printed(t, out), wanted(t, records, 88, false))
	if _, err := called(t, "bucket", "cat", url, "transactions", "--committed"); err == nil || !strings.Contains(err.Error(), "no transaction indexes") {
		t.Errorf("%v", err)
	}
	out, err = called(t, "bucket", "cat", url, "transactions", "--json", "--offset", "40", "-n", "5")
	if err != nil {
		t.Fatal(err)
	}
	var five []string
	for _, w := range wanted(t, records, 88, false) {
		var offset int
		if fmt.Sscan(w, &offset); offset >= 40 && len(five) < 5 {
			five = append(five, w)
		}
	}
	same(t, printed(t, out), five)
}

func TestBucketUsage(t *testing.T) {
	url := pinterest(t)
	for _, args := range [][]string{{"ls"}, {"ls", "a", "b", "c"}, {"cat", url}, {"cat", url, "t:x"}, {"cat", url, "t", "--offset", "-1"}, {"verify"}, {"ls", filepath.Join(url, "nowhere")}, {"ls", "gopher://x"},
		{"ls", url, "--key-pair", "x"}} {
		_, err := called(t, append([]string{"bucket"}, args...)...)
		var usage usageError
		if !errors.As(err, &usage) {
			t.Errorf("%q: %v", args, err)
		}
	}
	if _, err := os.Stat(filepath.Join(url, "nowhere")); err == nil {
		t.Error("a folder was made where only reading was asked for")
	}
	empty := t.TempDir()
	if _, err := called(t, "bucket", "ls", empty); err == nil || !strings.Contains(err.Error(), "is empty") {
		t.Error(err)
	}
	if left, _ := os.ReadDir(empty); len(left) > 0 {
		t.Errorf("%v was written", left)
	}
	if _, err := called(t, "bucket", "cat", url, "other"); err == nil || !strings.Contains(err.Error(), "no segment of other") {
		t.Error(err)
	}
}
