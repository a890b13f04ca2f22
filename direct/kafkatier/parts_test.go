package kafkatier

import (
	"fmt"
	"testing"
	"time"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
	"github.com/varve-io/varve/internal/objstore"
)

// Clients may ask for topics that do not exist, as many as they like.
func TestUnknownTopicsTakeLittle(t *testing.T) {
	f, err := objectstore.New(objstore.NewMemory(), objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	l, err := Open(f, Options{Seeds: []string{"localhost:1"}, Layout: Aiven("")})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for i := range 3 * maxParts {
		l.Tiered(direct.Query{Topic: fmt.Sprint("no", i)})
	}
	if n := len(l.parts); n > maxParts {
		t.Errorf("%d partitions are kept", n)
	}
	if l.Tiered(direct.Query{Topic: "one more"}) {
		t.Error("one more is asked for")
	}
	if loc, err := l.Locate(t.Context(), direct.Query{Topic: "one more"}); loc != nil || err != nil {
		t.Error(loc, err)
	}
	for _, p := range l.parts {
		p.failed = time.Now()
	}
	if l.sweep(time.Now().Add(time.Minute)); len(l.parts) != 0 {
		t.Errorf("%d partitions are kept that nobody knew", len(l.parts))
	}
}
