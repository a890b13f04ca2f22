// Command bench measures Varve against Apache Kafka on one machine: both run, the same client loads them in turn, and the
// result is a ratio. It writes docs/benchmarks.md.
//
// It needs the folder of peers (VARVE_SHARED, or ../shared) with Maven and Java for Kafka, and versitygw for the S3 rows; what
// is missing is left out, and said so in the page.
package main

import (
	"context"
	_ "embed"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	rounds := flag.Int("rounds", 3, "measured rounds of each row, after one that is thrown away")
	scale := flag.Float64("scale", 1, "size of the loads; 0.1 for a look")
	only := flag.String("only", "", "comma list of sections: start,produce,latency,consume,tier,direct,upload,replicated,newreplica,wipe,failover,controller,transactions,committed,rebalance,commits,compaction,directreads,stock,gateway")
	out := flag.String("out", "docs/benchmarks.md", "page to write; empty prints only")
	dir := flag.String("dir", "", "folder for data; empty makes one")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *rounds, *scale, *only, *out, *dir); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, rounds int, scale float64, only, out, dir string) error {
	if dir == "" {
		made, err := os.MkdirTemp("", "varve-bench-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(made)
		dir = made
	}
	b := &bench{ctx: ctx, rounds: rounds, scale: scale, dir: dir}
	defer b.close()
	if err := b.prepare(); err != nil {
		return err
	}
	sections := []struct {
		name string
		run  func(*bench) error
	}{{"start", start}, {"produce", produceSection}, {"latency", latencySection}, {"consume", consumeSection}, {"tier", tierSection}, {"direct", directSection}, {"upload", uploadSection},
		{"replicated", replicatedSection}, {"newreplica", newReplicaSection}, {"wipe", wipeSection}, {"failover", failoverSection}, {"controller", controllerSection},
		{"transactions", transactionsSection}, {"committed", committedSection}, {"rebalance", rebalanceSection}, {"commits", commitsSection}, {"compaction", compactionSection}, {"directreads", directReadsSection}, {"stock", stockSection}, {"gateway", gatewaySection}}
	for _, s := range sections {
		if only != "" && !slices.Contains(strings.Split(only, ","), s.name) {
			continue
		}
		fmt.Fprintf(os.Stderr, "== %s\n", s.name)
		began := time.Now()
		if err := s.run(b); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		fmt.Fprintf(os.Stderr, "   %s\n", time.Since(began).Round(time.Second))
	}
	page := b.page(only)
	fmt.Print(page)
	if out == "" {
		return nil
	}
	return os.WriteFile(out, []byte(page), 0o644)
}

// bench is one run.
type bench struct {
	ctx       context.Context
	rounds    int
	scale     float64
	dir       string
	binary    string
	kafka     string // the peer's script, "" without it
	versitygw string // "" without it
	running   []*process
	rows      []row
	notes     []string
	topics    int
}

func (b *bench) n(full int) int { return max(int(float64(full)*b.scale), 1000) }

// topic makes a name that no round has used.
func (b *bench) topic() string {
	b.topics++
	return fmt.Sprintf("bench-%d", b.topics)
}

// row is one line of the page. A ratio above 1 is in Varve's favour.
type row struct {
	section, what, unit string
	varve, kafka        []float64
	lowerIsBetter       bool
	target              string
}

func (b *bench) add(r row) {
	b.rows = append(b.rows, r)
	fmt.Fprintf(os.Stderr, "   %s: varve %s, kafka %s %s\n", r.what, spread(r.varve), spread(r.kafka), r.unit)
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	if len(s) == 0 {
		return 0
	}
	return s[len(s)/2]
}

func spread(v []float64) string {
	if len(v) == 0 {
		return "–"
	}
	return fmt.Sprintf("%s [%s–%s]", number(median(v)), number(slices.Min(v)), number(slices.Max(v)))
}

func number(f float64) string {
	switch {
	case f >= 100:
		return fmt.Sprintf("%.0f", f)
	case f >= 10:
		return fmt.Sprintf("%.1f", f)
	}
	return fmt.Sprintf("%.2f", f)
}

func (r row) ratio() string {
	v, k := median(r.varve), median(r.kafka)
	if v == 0 || k == 0 {
		return "–"
	}
	if r.lowerIsBetter {
		return number(k / v)
	}
	return number(v / k)
}

// limits is the part of the page that people write: why an aim is missed, as profiles showed.
//
//go:embed limits.md
var limits string

func (b *bench) page(only string) string {
	var p strings.Builder
	chosen := ""
	if only != "" {
		chosen = " -only " + only
	}
	cpu := "unknown processor"
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for _, line := range strings.Split(string(info), "\n") {
			if name, ok := strings.CutPrefix(line, "model name"); ok {
				cpu = strings.TrimLeft(name, "\t :")
				break
			}
		}
	}
	fmt.Fprintf(&p, "# Benchmarks\n\nVarve against Apache Kafka 4.4.0, on one machine and in one run: each round loads one and then the other with the same client, a round\nbefore the first is thrown away. Figures are medians with [least–most]. A ratio above 1 is in Varve's favour. Broker and client share the cores.\n\n")
	fmt.Fprintf(&p, "Measured %s on %d cores (%s), %s.\n\n    go run ./bench -rounds %d -scale %g%s\n", time.Now().UTC().Format("2006-01-02"), runtime.NumCPU(), cpu, runtime.Version(), b.rounds, b.scale, chosen)
	section := ""
	for _, r := range b.rows {
		if r.section != section {
			section = r.section
			fmt.Fprintf(&p, "\n## %s\n\n| what | unit | Varve | Kafka | ratio | aim |\n|---|---|---|---|---|---|\n", section)
		}
		fmt.Fprintf(&p, "| %s | %s | %s | %s | %s | %s |\n", r.what, r.unit, spread(r.varve), spread(r.kafka), r.ratio(), r.target)
	}
	if len(b.notes) > 0 {
		p.WriteString("\n## Notes\n\n")
		for _, n := range b.notes {
			fmt.Fprintf(&p, "- %s\n", n)
		}
	}
	if only == "" {
		p.WriteString("\n" + limits)
	}
	return p.String()
}

func (b *bench) note(format string, args ...any) {
	n := fmt.Sprintf(format, args...)
	if !slices.Contains(b.notes, n) {
		b.notes = append(b.notes, n)
	}
	fmt.Fprintln(os.Stderr, "   note:", n)
}

func (b *bench) path(name string) string { return filepath.Join(b.dir, name) }
