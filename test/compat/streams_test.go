package compat

import (
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// streamsJars fetches Kafka Streams once for all runs and returns the class path.
func streamsJars(t *testing.T) string {
	t.Helper()
	need(t, "java")
	mvn := need(t, "mvn")
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	pom, err := os.ReadFile(filepath.Join("java", "pom.xml"))
	if err != nil {
		t.Fatal(err)
	}
	jars := filepath.Join(cache, "varve-compat", fmt.Sprintf("streams-%x", crc32.ChecksumIEEE(pom)))
	if _, err := os.Stat(jars); errors.Is(err, os.ErrNotExist) {
		fresh := jars + ".new-" + strconv.Itoa(os.Getpid())
		defer os.RemoveAll(fresh)
		if _, errs, err := (command{dir: "java", limit: 5 * time.Minute}).try(t, mvn, "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory="+fresh); err != nil {
			t.Skipf("SKIPPED: Kafka Streams cannot be fetched: %v %s", err, tail(errs))
		}
		if err := os.Rename(fresh, jars); err != nil && !errors.Is(err, os.ErrExist) {
			t.Fatal(err)
		}
	}
	return filepath.Join(jars, "*")
}

// wordCount runs an instance of the application. kill ends it as kill -9 does, stop as its user would.
func wordCount(t *testing.T, jars, addr string) (kill, stop func()) {
	t.Helper()
	var said strings.Builder
	cmd := exec.Command("timeout", "-k", "5", "200", "java", "-Xmx256m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", jars, filepath.Join("java", "WordCount.java"),
		addr, "lines", "counts", t.TempDir())
	cmd.Stdout, cmd.Stderr = &said, &said
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	over := false
	end := func(how func()) func() {
		return func() {
			if over {
				return
			}
			over = true
			how()
			if err := <-ended; err != nil && !t.Failed() && !strings.Contains(err.Error(), "killed") {
				t.Errorf("the application ended with %v\n%s", err, tail(said.String()))
			}
			if t.Failed() {
				t.Logf("the application said:\n%s", tail(said.String()))
			}
		}
	}
	kill = end(func() { syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
	t.Cleanup(kill)
	return kill, end(func() { in.Close() })
}

// Kafka Streams counts words with exactly_once_v2, while an instance is killed and so is a broker: every count of every word comes out once.
func TestKafkaStreams(t *testing.T) {
	asked(t)
	jars := streamsJars(t)
	n := startNode(t)
	const lines, words = 3000, 7
	for _, topic := range []string{"lines", "counts"} {
		n.topic(t, topic, 3)
	}
	cl := n.client(t, kgo.DefaultProduceTopic("lines"))
	write := func(from, to int) {
		t.Helper()
		for i := from; i < to; i++ {
			cl.Produce(within(t), kgo.StringRecord(fmt.Sprintf("all word-%d", i%words)), nil)
		}
		if err := cl.Flush(within(t)); err != nil {
			t.Fatal(err)
		}
	}
	counted := map[string]int{}
	reader := n.client(t, kgo.ConsumeTopics("counts"), kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	read := func(until int) {
		t.Helper()
		limit := time.Now().Add(90 * time.Second)
		for counted["all"] < until {
			if time.Now().After(limit) {
				t.Fatalf("%d of %d lines were counted", counted["all"], until)
			}
			reader.PollFetches(within(t)).EachRecord(func(r *kgo.Record) {
				word := string(r.Key)
				counted[word]++
				if string(r.Value) != strconv.Itoa(counted[word]) {
					t.Fatalf("count %s of %q comes as number %d, at offset %d of partition %d", r.Value, word, counted[word], r.Offset, r.Partition)
				}
			})
		}
	}
	kill, _ := wordCount(t, jars, n.addr)
	_, stop := wordCount(t, jars, n.addr)
	write(0, lines/3)
	read(lines / 6)
	kill()
	write(lines/3, 2*lines/3)
	read(lines / 2)
	n.do(t, "kill", "1")
	n.do(t, "start", "1")
	write(2*lines/3, lines)
	read(lines)
	stop()
	for w := range words {
		word := fmt.Sprint("word-", w)
		if want := (lines - w + words - 1) / words; counted[word] != want {
			t.Errorf("%s was counted %d times, not %d", word, counted[word], want)
		}
	}
	if counted["all"] != lines {
		t.Errorf("%d lines were counted, not %d", counted["all"], lines)
	}
}
