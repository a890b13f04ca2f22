// Package commit waits until what a leader appended is committed: in every replica that may be elected.
package commit

import (
	"context"
	"time"

	"github.com/varve-io/varve/internal/partition"
)

// Write is an append whose commitment is waited for.
type Write struct {
	Part  *partition.Partition
	Next  int64 // all below is to be committed
	Epoch int32 // leader epoch that it was appended in
}

// ErrLate is a write that was not committed in its time; it may still be.
var ErrLate = context.DeadlineExceeded

// Wait returns when all writes are committed, cannot be any more by this broker, or the time is over; the errors are by
// position. A canceled ctx ends it like a late write.
func Wait(ctx context.Context, limit time.Duration, writes []Write) []error {
	errs := make([]error, len(writes))
	open := make([]bool, len(writes))
	left := len(writes)
	look := func() {
		for i, w := range writes {
			if open[i] {
				if done, err := w.Part.Await(w.Next, w.Epoch); done || err != nil {
					errs[i], open[i] = err, false
					left--
				}
			}
		}
	}
	for i := range open {
		open[i] = true
	}
	if look(); left == 0 { // the only replica in sync commits at once
		return errs
	}
	waiter := partition.NewWaiter()
	for _, w := range writes {
		w.Part.Watch(waiter, partition.Committed)
		defer w.Part.Unwatch(waiter, partition.Committed)
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		if look(); left == 0 {
			return errs
		}
		select {
		case <-waiter.C:
			continue
		case <-timer.C:
		case <-ctx.Done():
		}
		look()
		for i, w := range writes {
			if open[i] {
				if errs[i] = w.Part.LateWrite(); errs[i] == nil {
					errs[i] = ErrLate
				}
			}
		}
		return errs
	}
}
