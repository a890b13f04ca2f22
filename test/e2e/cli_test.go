package e2e

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/internal/testport"
)

// produceAt writes 1,000 records with timestamps of their own, in batches of 50.
func produceAt(n *node, topic string, at func(int) time.Time) {
	n.t.Helper()
	cl := n.client(kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(kgo.NoCompression()))
	for i := 0; i < 1000; i += 50 {
		var batch []*kgo.Record
		for j := i; j < i+50; j++ {
			batch = append(batch, &kgo.Record{Topic: topic, Timestamp: at(j), Key: []byte("k"), Value: value(j)})
		}
		if err := cl.ProduceSync(context.Background(), batch...).FirstErr(); err != nil {
			n.t.Fatal(err)
		}
	}
}

// TestWhereToBeginAndStop: every form of a place, beyond the range, and nonsense; the same through the broker and directly.
func TestWhereToBeginAndStop(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("places", 1, tieredConfig...)
	base := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	produceAt(n, "places", func(i int) time.Time { return base.Add(time.Duration(i) * time.Second) })
	n.tiered("places")
	n.createTopic("nothing", 1)
	for _, direct := range []bool{false, true} {
		consume := func(topic string, args ...string) (string, int) {
			all := append([]string{"consume", topic, "--until", "end", "-f", `%o\n`, "-b", n.address()}, args...)
			if direct {
				all = append(all, "--direct", "--bucket", n.dir+"/bucket")
			}
			out, code := n.varve(all...)
			var offsets []string
			for _, line := range strings.Split(strings.TrimSpace(out), "\n") {
				if line != "" && !strings.Contains(line, "read from the bucket") && !strings.HasPrefix(line, "note:") {
					offsets = append(offsets, line)
				}
			}
			if code != 0 {
				return out, code
			}
			if len(offsets) == 0 {
				return "none", 0
			}
			return fmt.Sprintf("%s..%s %d", offsets[0], offsets[len(offsets)-1], len(offsets)), 0
		}
		for where, want := range map[string]string{"start": "0..999 1000", "end": "none", "5": "5..999 995", "-3": "997..999 3", "+3": "3..999 997", "1000": "none",
			"@2026-01-01T00:10:00Z": "600..999 400", "@2026-01-01": "0..999 1000", "@2030-01-01": "none", "-5000": "0..999 1000"} {
			if got, code := consume("places", "-o", where); got != want || code != 0 {
				t.Errorf("direct %v, %s: %q (exit %d), want %q", direct, where, got, code, want)
			}
		}
		if got, code := consume("nothing"); got != "none" || code != 0 {
			t.Errorf("an empty topic: %s, exit %d", got, code)
		}
		if out, code := consume("places", "-o", "99999999"); code != 1 || !strings.Contains(out, "holds 0 to 1000") {
			t.Errorf("beyond the range: exit %d: %s", code, out)
		}
		for _, banana := range []string{"banana", "@banana", "", "--5", "+-5"} {
			if out, code := consume("places", "--offset="+banana); code != 2 || !strings.Contains(out, "@TIME") {
				t.Errorf("%q: exit %d: %s", banana, code, out)
			}
		}
		if out, code := consume("missing"); code != 1 || !strings.Contains(out, "missing") {
			t.Errorf("a topic that does not exist: exit %d: %s", code, out)
		}
	}
}

func TestResetOfAGroupInUse(t *testing.T) {
	t.Run("classic", func(t *testing.T) { resetInUse(t) })
	t.Run("consumer", func(t *testing.T) { resetInUse(t, kgo.ServerSideBalancer()) })
}

func resetInUse(t *testing.T, opts ...kgo.Opt) {
	n := newNode(t)
	n.start()
	n.createTopic("t", 1)
	produce(t, n.client(kgo.RecordPartitioner(kgo.ManualPartitioner())), "t", 0, 10)
	member := n.client(append(opts, kgo.ConsumerGroup("g"), kgo.ConsumeTopics("t"), kgo.DisableAutoCommit(), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := member.PollFetches(ctx).Err(); err != nil {
		t.Fatal(err)
	}
	if err := member.CommitUncommittedOffsets(ctx); err != nil {
		t.Fatal(err)
	}
	if out, code := n.varve("group", "reset", "g", "--topic", "t", "--to", "start", "-b", n.address()); code != 1 || !strings.Contains(out, "1 active members (hosts 127.0.0.1): stop them first") {
		t.Fatalf("exit %d: %s", code, out)
	}
	member.Close()
	n.until("the member is gone", func() bool {
		out, _ := n.varve("group", "ls", "-b", n.address())
		return strings.Contains(out, "Empty")
	})
	if out, code := n.varve("group", "reset", "g", "--topic", "t", "--to", "3", "--dry-run", "-b", n.address()); code != 0 || !strings.Contains(out, "nothing was changed") {
		t.Fatalf("exit %d: %s", code, out)
	}
	if out, code := n.varve("group", "reset", "g", "--topic", "t", "--to", "@2000-01-01", "-b", n.address()); code != 0 || !strings.Contains(out, "0") {
		t.Fatalf("exit %d: %s", code, out)
	}
	if out, code := n.varve("group", "describe", "g", "-b", n.address()); code != 0 || !strings.Contains(out, "lag 10") {
		t.Fatalf("exit %d: %s", code, out)
	}
	if out, code := n.varve("group", "delete", "g", "-b", n.address()); code != 0 {
		t.Fatal(out)
	}
	if out, code := n.varve("group", "describe", "g", "-b", n.address()); code != 1 || !strings.Contains(out, "does not exist") {
		t.Fatalf("exit %d: %s", code, out)
	}
}

func TestToolsSayWhyTheyCannotConnect(t *testing.T) {
	n := newNode(t, fmt.Sprintf("advertised.listeners=PLAINTEXT://127.0.0.1:%d", testport.Free(t)))
	if out, code := n.varve("topic", "ls", "-b", n.address()); code != 1 || !strings.Contains(out, "nothing listens there") {
		t.Errorf("exit %d: %s", code, out)
	}
	n.t = t
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	if out, code := n.varve("topic", "ls", "-b", ln.Addr().String()); code != 1 || !strings.Contains(out, "TLS or SASL") {
		t.Errorf("exit %d: %s", code, out)
	}
	if out, code := n.varve("topic", "create"); code != 2 || !strings.Contains(out, "a topic name") {
		t.Errorf("exit %d: %s", code, out)
	}
	if out, code := n.varve("topic", "ls", "--banana"); code != 2 {
		t.Errorf("exit %d: %s", code, out)
	}
}

// TestLogThatExpiredInBothTiers: offsets never move back, nothing is left, and the next record gets the next offset.
func TestLogThatExpiredInBothTiers(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("gone", 1, tieredConfig...)
	old := time.Now().Add(-time.Hour)
	produceAt(n, "gone", func(int) time.Time { return old })
	n.tiered("gone")
	if out, code := n.varve("topic", "alter", "gone", "--set", "retention.ms=60000", "-b", n.address()); code != 0 {
		t.Fatal(out)
	}
	check := func() {
		t.Helper()
		n.until("everything has expired", func() bool {
			s := n.tier("gone")
			return s.LogStart == 1000 && s.End == 1000 && s.LocalStart == 1000 && s.Segments == 0 && s.Deleting == 0
		})
	}
	check()
	n.kill()
	n.start()
	check()
	if err := n.client(kgo.RecordPartitioner(kgo.ManualPartitioner())).ProduceSync(context.Background(), &kgo.Record{Topic: "gone", Value: []byte("next")}).FirstErr(); err != nil {
		t.Fatal(err)
	}
	if out, code := n.varve("consume", "gone", "--until", "end", "-f", `%o %v\n`, "-b", n.address()); code != 0 || out != "1000 next\n" {
		t.Fatalf("exit %d: %s", code, out)
	}
}
