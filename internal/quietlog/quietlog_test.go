package quietlog

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestRepeatedWarningsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		l := slog.New(New(slog.NewTextHandler(&b, nil)))
		for i := 0; i < 1000; i++ {
			l.Warn("upload failed", "partition", i, "cause", errors.New("away"))
			l.With("x", 1).Warn("upload failed", "partition", i, "cause", errors.New("away"))
		}
		l.Warn("upload failed", "partition", 1, "cause", errors.New("denied"))
		l.Error("upload failed", "partition", 1, "cause", errors.New("away"))
		l.Info("upload failed", "cause", errors.New("away"))
		l.Info("upload failed", "cause", errors.New("away"))
		if n := strings.Count(b.String(), "\n"); n != 5 {
			t.Fatalf("%d lines:\n%s", n, &b)
		}
		time.Sleep(Interval)
		b.Reset()
		l.Warn("upload failed", "partition", 7, "cause", errors.New("away"))
		if !strings.Contains(b.String(), "repeated=1999") {
			t.Fatal(b.String())
		}
	})
}

func TestKindsAreBounded(t *testing.T) {
	h := New(slog.DiscardHandler)
	for i := 0; i < 10*kindsMax; i++ {
		h.state.pass(fmt.Sprint(i), time.Unix(0, 0))
	}
	if len(h.state.kinds) > kindsMax {
		t.Fatal(len(h.state.kinds))
	}
}

func TestObjectsMakeNoOtherKind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		l := slog.New(New(slog.NewTextHandler(&b, nil)))
		for _, status := range []int{403, 503} {
			for i := range 100 {
				cause := fmt.Errorf("upload offsets %d to %d: put t-%022d/%d.log: status %d", 1000*i, 1000*i+999, i, i, status)
				l.Warn("failed", "cause", cause)
			}
		}
		if n := strings.Count(b.String(), "\n"); n != 2 {
			t.Errorf("%d lines of warnings:\n%s", n, &b)
		}
		b.Reset()
		l.Error("offline", "cause", errors.New("/data/one-0/00000000000000000000.log is damaged"))
		l.Error("offline", "cause", errors.New("/data/two-0/00000000000000000000.log is damaged"))
		if n := strings.Count(b.String(), "\n"); n != 2 {
			t.Errorf("%d lines of errors:\n%s", n, &b)
		}
	})
}
