package fetch_test

import (
	"errors"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/fetch"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tp"
)

type noReplicas struct{}

func (noReplicas) Get(tp.Partition) (*partition.Partition, bool) { return nil, false }

// A consumer that waits for more does not keep a broker from stopping.
func TestStoppingEndsTheWait(t *testing.T) {
	stopping := make(chan struct{})
	close(stopping)
	s := &fetch.Service{Replicas: noReplicas{}, Stopping: stopping}
	unresolved := errors.New("unresolved") // does not end the wait by itself
	got := s.Fetch(t.Context(), &fetch.Request{Parts: []fetch.Part{{Topic: "t", Err: unresolved}}, MinBytes: 1, MaxBytes: 1, MaxWait: 24 * time.Hour})
	if len(got) != 1 || !errors.Is(got[0].Err, unresolved) {
		t.Errorf("%+v", got)
	}
}
