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
