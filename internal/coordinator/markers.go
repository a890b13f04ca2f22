package coordinator

import (
	"context"
	"errors"
	"time"

	"github.com/varve-io/varve/internal/commit"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/recordbatch"
)

// Write is what a partition's leader appends to end the transaction there.
func (e Ending) Write(now time.Time) partition.Write {
	marker := recordbatch.EndTxnMarker(recordbatch.Marker{ProducerID: e.ProducerID, ProducerEpoch: e.Epoch, Commit: e.Commit,
		CoordinatorEpoch: e.CoordinatorEpoch, Timestamp: now.UnixMilli()})
	return partition.Write{Records: marker, Now: now, Internal: true, AllReplicas: true, V2: e.V2}
}

// WriteMarkers writes the markers that end a transaction to partitions that are led here, and returns when they are committed or cannot
// be; the errors are by position. Groups that committed offsets in the transaction learn of its end.
func (gs *Groups) WriteMarkers(ctx context.Context, e Ending, parts []*partition.Partition) []error {
	errs := make([]error, len(parts))
	now := time.Now()
	var writes []commit.Write
	var at []int
	for i, p := range parts {
		r, err := p.Append(e.Write(now))
		if errs[i] = err; err == nil {
			writes, at = append(writes, commit.Write{Part: p, Next: r.LastOffset + 1, Epoch: r.Epoch}), append(at, i)
		}
	}
	for j, err := range commit.Wait(ctx, gs.config().CommitTimeout, writes) {
		p := parts[at[j]]
		errs[at[j]] = err
		// Written is enough for groups to know: who reads the partition later finds it there, or the coordinator writes it again.
		if p.ID().Topic == Topic && (err == nil || errors.Is(err, commit.ErrLate)) {
			gs.EndTxn(p.ID().Index, e.ProducerID, e.Commit)
		}
	}
	return errs
}
