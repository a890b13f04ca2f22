package coordinator

import (
	"cmp"
	"context"
	"time"

	"github.com/varve-io/varve/internal/commit"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
)

// AppendMarker appends a marker to a partition that is led here and returns what to wait for, before anything is said to the coordinator. A
// partition that refuses it as outdated does so in refused, which counts only then: what refuses it may be this very marker, of an earlier
// try, and not be committed yet.
func AppendMarker(p *partition.Partition, e Ending, now time.Time) (w commit.Write, refused, err error) {
	_, epoch := p.Leadership()
	marker := recordbatch.EndTxnMarker(recordbatch.Marker{ProducerID: e.ProducerID, ProducerEpoch: e.Epoch, Commit: e.Commit,
		CoordinatorEpoch: e.CoordinatorEpoch, Timestamp: now.UnixMilli()})
	r, err := p.Append(partition.Write{Records: marker, Now: now, Internal: true, AllReplicas: true, V2: e.V2})
	if err == nil {
		return commit.Write{Part: p, Next: r.LastOffset + 1, Epoch: r.Epoch}, nil, nil
	}
	if !producerstate.Outdated(err) {
		return commit.Write{}, nil, err
	}
	marks, lost := p.Offsets(epoch)
	return commit.Write{Part: p, Next: marks.End, Epoch: epoch}, err, lost
}

// WriteMarkers writes the markers that end a transaction to partitions that are led here, and returns when they are committed or cannot
// be; the errors are by position. Groups that committed offsets in the transaction learn of its end.
func (gs *Groups) WriteMarkers(ctx context.Context, e Ending, parts []*partition.Partition) []error {
	errs := make([]error, len(parts))
	refused := make([]error, len(parts))
	now := time.Now()
	var writes []commit.Write
	var at []int
	for i, p := range parts {
		var w commit.Write
		if w, refused[i], errs[i] = AppendMarker(p, e, now); errs[i] != nil {
			continue
		}
		writes, at = append(writes, w), append(at, i)
		// Written is enough for groups to know: who reads the partition later finds it there, or the coordinator writes it again. And it is
		// now that they have to: once it is committed the producer may go on, and this would end its next transaction.
		if p.ID().Topic == Topic && refused[i] == nil {
			gs.EndTxn(p.ID().Index, e.ProducerID, e.Commit)
		}
	}
	for j, err := range commit.Wait(ctx, gs.config().CommitTimeout, writes) {
		errs[at[j]] = cmp.Or(err, refused[at[j]])
	}
	return errs
}
