package compat

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var verdict = regexp.MustCompile(`(?m)^\s*--- (PASS|FAIL|SKIP): (\S+) \(`)

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

// mustPass compares the output of `go test -v` with the list of tests that must pass, which only grows. Tests that pass and are
// not listed are told, so that they can be added.
func mustPass(t *testing.T, list, output string, count func(name string) bool) {
	t.Helper()
	got := map[string]string{}
	for _, m := range verdict.FindAllStringSubmatch(output, -1) {
		got[m[2]] = m[1]
	}
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

// about is what a test printed.
func about(output, name string) string {
	from := strings.Index(output, "=== RUN   "+name+"\n")
	if from < 0 {
		return ""
	}
	text := output[from:]
	if to := strings.Index(text, "--- FAIL: "+name+" "); to >= 0 {
		text = text[:to]
	}
	return text[max(0, len(text)-1500):]
}
