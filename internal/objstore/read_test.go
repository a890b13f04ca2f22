package objstore_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/varve-io/varve/internal/objstore"
)

func TestReadRangeTakesWhatItNeeds(t *testing.T) {
	b := objstore.NewMemory()
	data := make([]byte, 20<<20)
	for i := range data {
		data[i] = byte(rand.Int())
	}
	if err := b.Put(t.Context(), "k", bytes.NewReader(data), int64(len(data)), objstore.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, n := range []int64{1, 1<<20 - 1, 1 << 20, 1<<20 + 1, 9 << 20, 20<<20 - 7} {
		got, err := objstore.ReadRange(t.Context(), b, "k", 7, n)
		if err != nil || !bytes.Equal(got, data[7:7+n]) || int64(cap(got)) != n {
			t.Errorf("%d: %d bytes, room for %d, %v", n, len(got), cap(got), err)
		}
	}
	// A size from a damaged manifest costs no more than the object.
	if _, err := objstore.ReadRange(t.Context(), b, "k", 19<<20, 1<<50); !errors.Is(err, objstore.ErrShortBody) {
		t.Errorf("%v", err)
	}
}
