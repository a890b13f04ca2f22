package kafkaapi

import (
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
)

func TestTableIsWhatKmsgCanRead(t *testing.T) {
	seen := map[int16]bool{}
	for _, e := range table() {
		if seen[e.key] {
			t.Errorf("key %d is in the table twice", e.key)
		}
		seen[e.key] = true
		req := kmsg.RequestForKey(e.key)
		if req == nil || e.max > req.MaxVersion() || e.min > e.max {
			t.Errorf("key %d: versions %d to %d", e.key, e.min, e.max)
		}
		if (e.serve == nil) == (e.start == nil) {
			t.Errorf("key %d has no handler, or two", e.key)
		}
	}
}

func TestEveryErrorOfTheTableHasItsCode(t *testing.T) {
	for _, row := range codes {
		if got := code(row.err); got != row.code.Code {
			t.Errorf("%v: %d (%s), want %s: an earlier row hides it", row.err, got, kerr.ErrorForCode(got), row.code.Message)
		}
	}
}
