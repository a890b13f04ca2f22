package compat

import (
	"regexp"
	"strings"
	"testing"
)

// librdkafka by way of kcat: every codec, from its producer and to its consumer, local and tiered.
func TestKcat(t *testing.T) {
	b := start(t)
	kcat := need(t, "kcat")
	lines := values(400)
	for i, codec := range []string{"none", "gzip", "snappy", "lz4", "zstd"} {
		t.Run(codec, func(t *testing.T) {
			both(t, b, "kcat-"+codec, 1, func(t *testing.T, topic string, toTier func(t *testing.T)) {
				// Small batches, so that a small segment holds several.
				command{stdin: strings.Join(lines, "\n") + "\n"}.run(t, kcat, "-b", b.addr, "-P", "-t", topic, "-p", "0", "-z", codec, "-X", "batch.num.messages=20", "-X", "acks=all")
				toTier(t)
				out := command{}.run(t, kcat, "-q", "-b", b.addr, "-C", "-t", topic, "-o", "beginning", "-e", "-f", "%o %s\n")
				got := strings.Split(strings.TrimSpace(out), "\n")
				if len(got) != len(lines) {
					t.Fatalf("%d lines of %d", len(got), len(lines))
				}
				for j, r := range b.consumed(t, topic, len(lines)) {
					if string(r.Value) != lines[j] || !strings.HasSuffix(got[j], " "+lines[j]) || r.Attrs.CompressionType() != uint8(i) {
						t.Fatalf("record %d: kcat read %q, kgo %q with codec %d", j, got[j], r.Value, r.Attrs.CompressionType())
					}
				}
				for spec, want := range map[string]string{":0:-1": "offset 400", ":0:-2": "offset 0", ":0:1": "offset 0"} {
					if out := (command{}).run(t, kcat, "-b", b.addr, "-Q", "-t", topic+spec); !strings.Contains(out, want) {
						t.Errorf("-Q %s: %q", spec, out)
					}
				}
				last := command{}.run(t, kcat, "-q", "-b", b.addr, "-C", "-t", topic, "-o", "-3", "-e")
				if last != strings.Join(lines[397:], "\n")+"\n" {
					t.Errorf("the last three: %q", last)
				}
			})
		})
	}
	t.Run("metadata", func(t *testing.T) {
		b.topic(t, "kcat-list", 3)
		out := command{}.run(t, kcat, "-b", b.addr, "-L", "-t", "kcat-list")
		if !strings.Contains(out, b.addr) || len(regexp.MustCompile(`partition \d, leader 1, replicas: 1, isrs: 1`).FindAllString(out, -1)) != 3 {
			t.Errorf("%s", out)
		}
	})
	t.Run("keys, headers and a group", func(t *testing.T) {
		command{stdin: "a:1\nb:2\na:3\n"}.run(t, kcat, "-b", b.addr, "-P", "-t", "kcat-auto", "-K", ":", "-H", "h=x", "-X", "enable.idempotence=true")
		out := command{}.run(t, kcat, "-b", b.addr, "-G", "kcat-group", "-X", "auto.offset.reset=earliest", "-c", "3", "-f", "%k=%s %h\n", "kcat-auto")
		for _, want := range []string{"a=1 h=x", "b=2 h=x", "a=3 h=x"} {
			if !strings.Contains(out, want) {
				t.Errorf("%q lacks %q", out, want)
			}
		}
	})
}
