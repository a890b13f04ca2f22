package log

import (
	"strings"
	"testing"
)

func TestAsideNameFitsAFileSystem(t *testing.T) {
	if got := AsideName("a-b-3", "12", "delete"); got != "a-b-3.12-delete" {
		t.Error(got)
	}
	id := strings.Repeat("f", 32)
	seen := map[string]bool{}
	for _, folder := range []string{"-0", "-1", "-10000"} {
		got := AsideName(strings.Repeat("n", 249)+folder, id, "delete")
		if len(got) != fileNameMax || !strings.HasSuffix(got, folder+"."+id+"-delete") || seen[got] {
			t.Errorf("%d bytes: %s", len(got), got)
		}
		seen[got] = true
	}
}
