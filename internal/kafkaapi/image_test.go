package kafkaapi

import (
	"iter"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

// What was created at another node a moment ago is waited for, what is not there for half a second.
func TestImageWithWhatIsOnItsWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var img atomic.Pointer[metadata.Image]
		old, newer := metadata.Empty(), metadata.Empty()
		img.Store(old)
		var changed atomic.Value // of chan struct{}
		changed.Store(make(chan struct{}))
		a := &API{Services: Services{Image: img.Load, Changed: func() <-chan struct{} { return changed.Load().(chan struct{}) }}}
		look := func(want *metadata.Image) (*metadata.Image, time.Duration) {
			began := time.Now()
			return a.imageWith(t.Context(), began.Add(imageLag), func(img *metadata.Image) iter.Seq[tp.Partition] {
				return func(yield func(tp.Partition) bool) {
					if img != want {
						yield(tp.Partition{Topic: "t"}) // which neither has
					}
				}
			}), time.Since(began)
		}
		if got, took := look(old); got != old || took != 0 {
			t.Errorf("what is known took %v", took)
		}
		time.AfterFunc(30*time.Millisecond, func() {
			img.Store(newer)
			close(changed.Swap(make(chan struct{})).(chan struct{}))
		})
		if got, took := look(newer); got != newer || took != 30*time.Millisecond {
			t.Errorf("what was on its way took %v", took)
		}
		for _, step := range []struct{ after, took time.Duration }{{0, imageLag}, {0, 0}, {vainFor, imageLag}} {
			time.Sleep(step.after)
			if got, took := look(old); got != newer || took != step.took {
				t.Errorf("what is unknown took %v, not %v", took, step.took)
			}
		}
	})
}
