package direct_test

import (
	"context"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
	"github.com/varve-io/varve/internal/objstore"
)

// slowFetcher takes its time.
type slowFetcher struct {
	direct.Fetcher
	after time.Duration
}

func (f slowFetcher) FetchLogSegment(ctx context.Context, s direct.Segment, start, end int64) (io.ReadCloser, error) {
	select {
	case <-time.After(f.after):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return f.Fetcher.FetchLogSegment(ctx, s, start, end)
}

// Consumers of one Transport that are at the same offset do not take the read-ahead from each other before it has begun.
func TestConsumersAtTheSameOffset(t *testing.T) {
	bucket := objstore.NewMemory()
	f, err := objectstore.New(bucket, objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	p := tieredPartition(t, bucket, "p", 30, 10)
	r := newRig(t, direct.Config{Fetcher: slowFetcher{f, 100 * time.Millisecond}}, func(objstore.Bucket) []*fakePartition { return []*fakePartition{p} })
	o := patient
	o.waitMs = 2000
	var wg sync.WaitGroup
	began := time.Now()
	for _, c := range []*client{r.client, r.dial()} {
		wg.Go(func() { check(r, r.broker.parts, []int64{0}, o, c.fetch(o, []position{{0, 0}})) })
	}
	wg.Wait()
	if n, _, _ := r.broker.counts(); n > 10 || time.Since(began) > time.Second {
		t.Errorf("%d requests to the broker, %s: %+v", n, time.Since(began), r.transport.Snapshot())
	}
}
