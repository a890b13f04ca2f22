package broker

import (
	"context"
	"errors"
	"sync"

	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
)

// marked are partitions that wait for somebody to see to them, one round at a time.
type marked struct {
	mu    sync.Mutex
	due   map[*partition.Partition]bool
	again chan struct{}
}

func newMarked() *marked {
	return &marked{due: map[*partition.Partition]bool{}, again: make(chan struct{}, 1)}
}

// mark asks for a round over p. It never waits.
func (f *marked) mark(p *partition.Partition) {
	f.mu.Lock()
	f.due[p] = true
	f.mu.Unlock()
	select {
	case f.again <- struct{}{}:
	default:
	}
}

func (f *marked) take() []*partition.Partition {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []*partition.Partition
	for p := range f.due {
		out = append(out, p)
	}
	clear(f.due)
	return out
}

// flusher makes durable what must not wait for the next checkpoint: segments that were sealed, so that damage in them is
// never taken for the torn tail of a crash, and log starts that DeleteRecords moved. It works beside the appends, one round
// at a time, so that many rolls share a checkpoint.
type flusher struct{ *marked }

// flushMarked runs rounds until ctx ends.
func (b *broker) flushMarked(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-b.flusher.again:
		}
		for _, p := range b.flusher.take() {
			l := p.Log()
			if l == nil || p.Cause() != nil {
				continue
			}
			if err := l.FlushUpTo(l.Offsets().ActiveBase); err != nil && ctx.Err() == nil && !errors.Is(err, log.ErrClosed) {
				b.log.Error("sealed segments were not flushed", "partition", p.ID().String(), "cause", err)
			}
		}
		b.checkpoint(log.RecoveryPointFile, log.LogStartFile)
	}
}
