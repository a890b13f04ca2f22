package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/internal/s3test"
)

// tierState is a row of tier ls --json.
type tierState struct {
	LocalStart  int64  `json:"localLogStartOffset"`
	LogStart    int64  `json:"logStartOffset"`
	End         int64  `json:"highWatermark"`
	RemoteEnd   int64  `json:"remoteEndOffset"`
	Segments    int    `json:"remoteSegments"`
	LagSegments int    `json:"lagSegments"`
	Deleting    int    `json:"deleting"`
	Failure     string `json:"failure"`
}

func (n *node) tier(topic string) tierState {
	n.t.Helper()
	return n.tierAt(topic, n.address())
}

func (n *node) tierAt(topic, brokers string) tierState {
	n.t.Helper()
	out, code := n.varve("tier", "ls", topic, "--json", "-b", brokers)
	var rows []tierState
	if code != 0 || json.Unmarshal([]byte(out), &rows) != nil || len(rows) != 1 {
		n.t.Fatalf("tier ls: exit %d: %s", code, out)
	}
	return rows[0]
}

// tiered waits until everything sealed is in the tier and gone from the disk.
func (n *node) tiered(topic string) tierState {
	n.t.Helper()
	var s tierState
	n.until("all sealed segments are in the tier and gone locally", func() bool {
		s = n.tier(topic)
		return s.LagSegments == 0 && s.Segments > 0 && s.LocalStart == s.RemoteEnd+1
	})
	return s
}

// wholeLine produces, waits for the tier, and reads everything back through the broker and straight from the bucket, before
// and after a restart. store are the flags that name the bucket to the tools; none for the one in the data directory.
func wholeLine(t *testing.T, store []string, sets ...string) *node {
	n := newNode(t, sets...)
	if store == nil {
		store = []string{"--bucket", filepath.Join(n.dir, "bucket")}
	}
	directly := func() {
		t.Helper()
		out, code := n.varve(append([]string{"verify", "line", "-b", n.address()}, store...)...)
		if code != 0 || !strings.Contains(out, "5000 records are the same both ways") || strings.Contains(out, "fallbacks") || strings.Contains(out, "0 requests") {
			t.Fatalf("verify: exit %d: %s", code, out)
		}
		out, code = n.varve(append([]string{"consume", "line", "--until", "end", "--direct", "-f", `%o\n`, "-b", n.address()}, store...)...)
		lines := strings.Split(strings.TrimSpace(out), "\n")
		if code != 0 || len(lines) != 5001 || lines[0] != "0" && lines[1] != "0" {
			t.Fatalf("consume --direct: exit %d, %d lines: %.200s", code, len(lines), out)
		}
	}
	n.start()
	n.createTopic("line", 1, tieredConfig...)
	produce(t, n.client(kgo.RecordPartitioner(kgo.ManualPartitioner())), "line", 0, 5000)
	s := n.tiered("line")
	if s.Segments < 5 || s.LogStart != 0 || s.End != 5000 {
		t.Fatalf("%+v", s)
	}
	readAll(t, n, "line", 5000)
	directly()
	n.stop()
	if !strings.Contains(n.log(), "stopped cleanly") {
		t.Error("no word of a clean stop")
	}
	n.start()
	readAll(t, n, "line", 5000)
	directly()
	return n
}

func TestWholeLineOverADirectory(t *testing.T) {
	n := wholeLine(t, nil)
	logs, err := filepath.Glob(filepath.Join(n.dir, "bucket", "line-*", "0", "*.rsm-manifest"))
	if err != nil || len(logs) < 5 {
		t.Fatal(logs, err)
	}
	if out, code := n.varve("tier", "fsck", "-b", n.address(), "--bucket", filepath.Join(n.dir, "bucket"), "--min-age", "1ns"); code != 0 {
		t.Fatalf("fsck: exit %d\n%s", code, out)
	}
	// An object that nobody knows is found, and removed on request.
	orphan := strings.Replace(logs[0], "00000000000000000000", "00000000000000009999", 1)
	if err := os.WriteFile(orphan, []byte("{}"), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, code := n.varve("tier", "fsck", "-b", n.address(), "--bucket", filepath.Join(n.dir, "bucket"), "--min-age", "1ns"); code != 1 || !strings.Contains(out, "9999") {
		t.Fatalf("fsck: exit %d\n%s", code, out)
	}
	n.varve("tier", "fsck", "-b", n.address(), "--bucket", filepath.Join(n.dir, "bucket"), "--min-age", "1ns", "--repair")
	if _, err := os.Stat(orphan); !os.IsNotExist(err) {
		t.Fatal("the orphan is still there:", err)
	}
	readAll(t, n, "line", 5000)
}

func TestWholeLineOverS3(t *testing.T) {
	s3 := s3test.Start(t)
	wholeLine(t, []string{"--bucket", s3.URL(), "--access-key", s3.AccessKey, "--secret-key", s3.SecretKey}, "varve.bucket="+s3.URL(), "varve.bucket.access.key="+s3.AccessKey, "varve.bucket.secret.key="+s3.SecretKey, "rsm.config.key.prefix=some/prefix-")
}

func TestCompressedObjects(t *testing.T) {
	wholeLine(t, nil, "rsm.config.compression.enabled=true", "rsm.config.chunk.size=4096")
}

func TestDeletedTopicLeavesNothingInTheBucket(t *testing.T) {
	n := wholeLine(t, nil)
	if out, code := n.varve("topic", "delete", "line", "-b", n.address()); code != 0 {
		t.Fatal(out)
	}
	n.until("the objects are gone", func() bool {
		left, err := filepath.Glob(filepath.Join(n.dir, "bucket", "line-*", "0", "*"))
		return err == nil && len(left) == 0
	})
	// The same name is another topic.
	n.createTopic("line", 1)
	produce(t, n.client(kgo.RecordPartitioner(kgo.ManualPartitioner())), "line", 0, 10)
	readAll(t, n, "line", 10)
}

func TestRemoteRetention(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("short", 1, "remote.storage.enable=true", "internal.segment.bytes=30000", "local.retention.bytes=1", "retention.bytes=100000")
	produce(t, n.client(kgo.RecordPartitioner(kgo.ManualPartitioner())), "short", 0, 5000)
	n.until("old segments are gone for good", func() bool {
		s := n.tier("short")
		return s.LogStart >= 2400 && s.Deleting == 0 && s.LagSegments == 0
	})
	out, code := n.varve("consume", "short", "--until", "end", "-b", n.address(), "-f", `%o\n`)
	if code != 0 || strings.HasPrefix(out, "0\n") || !strings.HasSuffix(out, "4999\n") {
		t.Fatalf("exit %d: %.100s", code, out)
	}
}

func TestLeavingTheTier(t *testing.T) {
	n := wholeLine(t, nil)
	out, code := n.varve("topic", "alter", "line", "--set", "remote.storage.enable=false", "-b", n.address())
	if code != 1 || !strings.Contains(out, "remote.log.delete.on.disable=true") {
		t.Fatalf("exit %d: %s", code, out)
	}
	if out, code := n.varve("topic", "alter", "line", "--set", "remote.storage.enable=false", "--set", "remote.log.delete.on.disable=true", "-b", n.address()); code != 0 {
		t.Fatal(out)
	}
	n.until("remote data is gone and the log starts where the local one does", func() bool {
		s := n.tier("line")
		return s.Segments == 0 && s.Deleting == 0 && s.LogStart == s.LocalStart && s.LogStart > 0
	})
}

// TestEmptiedPartitionContinuesBehindTheTier: a partition whose folder is lost goes on where the tier ends. What the tier
// holds is read as before, offsets are never given out twice, and the producer's last batch is still known.
func TestEmptiedPartitionContinuesBehindTheTier(t *testing.T) {
	n := wholeLine(t, nil)
	before := n.tier("line")
	n.kill()
	if err := os.RemoveAll(filepath.Join(n.dir, "line-0")); err != nil {
		t.Fatal(err)
	}
	n.start()
	var s tierState
	n.until("the partition is restored", func() bool {
		out, _ := n.varve("tier", "ls", "line", "--json", "-b", n.address())
		var rows []tierState
		if json.Unmarshal([]byte(out), &rows) != nil || len(rows) != 1 {
			return false
		}
		s = rows[0]
		return s.End == before.RemoteEnd+1
	})
	if s.LogStart != 0 || s.LocalStart != s.End {
		t.Fatalf("%+v", s)
	}
	lost := int(before.End - s.End)
	if lost <= 0 || lost > 1000 {
		t.Fatalf("%+v, before %+v", s, before)
	}
	produce(t, n.client(kgo.RecordPartitioner(kgo.ManualPartitioner())), "line", int(s.End), 3000)
	readAll(t, n, "line", int(s.End)+3000)
	n.tiered("line")
	readAll(t, n, "line", int(s.End)+3000)
}
