package compat

import (
	"cmp"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Lines of `go test -v`.
var (
	verdict = regexp.MustCompile(`(?m)^\s*--- (PASS|FAIL|SKIP): (\S+) \(`)
	speaker = regexp.MustCompile(`^=== (?:RUN|PAUSE|CONT|NAME) +(\S+)\n`)
)

// allowed are the names in a list.
func allowed(t *testing.T, list string) (names []string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("allow", list))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if name := strings.TrimSpace(line); name != "" && name[0] != '#' {
			names = append(names, name)
		}
	}
	return names
}

// Suites of clients wait for seconds that a busy machine may not have, and some of their tests can't tell chance from a fault (FINDINGS.md).
// A few that fail beside others get one more try alone; many show a fault.
const secondTries = 3

// goSuite runs listed tests of another project and everything beside them. run runs `go test -v` with further arguments and returns its output.
// count tells which of the other tests' names could be listed.
func goSuite(t *testing.T, list string, count func(name string) bool, run func(args ...string) string) {
	t.Helper()
	out := run()
	got := verdicts(out)
	var failed []string
	for _, name := range allowed(t, list) {
		if got[name] != "PASS" {
			top, _, _ := strings.Cut(name, "/")
			failed = append(failed, top)
		}
	}
	slices.Sort(failed)
	failed = slices.Compact(failed)
	if n := len(failed); n > 0 && n <= secondTries {
		for _, name := range failed {
			t.Logf("%s gets a second try: %s\n%s", name, cmp.Or(got[name], "did not end"), about(out, name))
		}
		out += run("-run", "^("+strings.Join(failed, "|")+")$")
	}
	mustPass(t, list, out, count)
}

// goTest runs `go test -v` and returns what the tests printed, some of which may have failed.
func (c command) goTest(t *testing.T, args ...string) string {
	t.Helper()
	out, errs, err := c.try(t, append([]string{"go", "test", "-count=1", "-v"}, args...)...)
	if err != nil {
		t.Logf("go test: %v\n%s", err, tail(errs))
	}
	return out
}

// topLevel and everything are what goSuite may be told to count.
func topLevel(name string) bool { return !strings.Contains(name, "/") }
func everything(string) bool    { return true }

// verdicts are the last ones of each test.
func verdicts(output string) map[string]string {
	got := map[string]string{}
	for _, m := range verdict.FindAllStringSubmatch(output, -1) {
		got[m[2]] = m[1]
	}
	return got
}

// mustPass compares the output of `go test -v` with the list of tests that must pass, which only grows. Tests that pass and are
// not listed are told, so that they can be added.
func mustPass(t *testing.T, list, output string, count func(name string) bool) {
	t.Helper()
	got := verdicts(output)
	listed := map[string]bool{}
	for _, name := range allowed(t, list) {
		listed[name] = true
		switch got[name] {
		case "PASS":
		case "":
			t.Errorf("%s did not end", name)
		default:
			t.Errorf("%s: %s\n%s", name, got[name], about(output, name))
		}
	}
	if len(listed) == 0 {
		t.Errorf("allow/%s is empty", list)
	}
	var fresh, failed []string
	for name, v := range got {
		switch {
		case v == "PASS" && !listed[name] && count(name):
			fresh = append(fresh, name)
		case v == "FAIL":
			failed = append(failed, name)
		}
	}
	slices.Sort(fresh)
	slices.Sort(failed)
	if len(fresh) > 0 {
		t.Logf("these pass and can be added to allow/%s:\n%s", list, strings.Join(fresh, "\n"))
	}
	if len(failed) > 0 {
		t.Logf("these fail:\n%s", strings.Join(failed, "\n"))
	}
	if keep := os.Getenv("VARVE_COMPAT_OUTPUT"); keep != "" {
		if err := os.WriteFile(filepath.Join(keep, list), []byte(output), 0o600); err != nil {
			t.Error(err)
		}
	}
}

// about is what a test printed last, beside others that ran at the same time.
func about(output, name string) string {
	var said strings.Builder
	mine := false
	for line := range strings.Lines(output) {
		if m := speaker.FindStringSubmatch(line); m != nil {
			mine = m[1] == name || strings.HasPrefix(m[1], name+"/")
		} else if mine && !verdict.MatchString(line) {
			said.WriteString(line)
		}
	}
	text := said.String()
	return text[max(0, len(text)-1500):]
}
