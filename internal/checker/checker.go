// Package checker says whether what was seen of a cluster can be the work of one that keeps its promises. It is told of
// replicas, acknowledgements, reads and remote segments as they are observed, keeps for each partition the one history of
// committed batches that all of them must agree on, and names the first observation that contradicts it.
//
// Transactions are told by their producers, and judged by the markers in the histories of all partitions together.
//
// It knows formats and vocabulary alone, decides nothing for the cluster, and is pure. A Checker is not safe for
// concurrent use.
//
// What is promised of a partition whose history was broken by force (an unclean election, the loss of the last copy) is
// told by Reset: then the history begins anew, and nothing is promised of transactions any more.
package checker

import (
	"fmt"

	"github.com/varve-io/varve/internal/tp"
)

// The checks, by the names that violations bear.
const (
	Agreement   = "replicas agree below the high watermark"
	Durability  = "what is committed is on every later leader"
	HighMark    = "the high watermark does not fall within an epoch"
	Idempotent  = "no duplicate and no reorder of an idempotent producer"
	Acknowledge = "what is acknowledged is committed"
	RemoteSet   = "remote ranges are contiguous and disjoint"
	RemoteData  = "remote bytes are the log's bytes"
	Coverage    = "local and remote log cover the partition"
	LogStart    = "the log start moves up alone, and only for a reason"
	Reading     = "readers get what is committed, without gaps"
	Bounds      = "log start, local start, high watermark and end are in order"
	Lineage     = "leader epochs are those of a replica that copied everything"
	Producers   = "producer state is that of a replica that copied everything"
	Dangling    = "nothing dangles in the tier"
	Liveness    = "the cluster comes to rest"
	Opening     = "a log opens after every crash"
	Atomicity   = "a transaction is whole and has one outcome on all partitions"
	Outcome     = "a transaction ends as its producer asked and was told"
	Isolation   = "read_committed shows what is committed, and nothing that is aborted or undecided"
	Repeated    = "each record is copied exactly once, and the offset with it"
	Hanging     = "each transaction has its marker, behind all its records"
)

// Violation is an observation that must not be.
type Violation struct {
	Check     string
	Partition tp.Partition
	Text      string
}

// Error names the check, the partition and what was seen.
func (v *Violation) Error() string {
	return fmt.Sprintf("%s: %s: %s", v.Check, v.Partition, v.Text)
}

// Checker collects observations.
type Checker struct {
	parts map[tp.Partition]*history
	first *Violation
	txns  transactions
}

// New returns a checker that has seen nothing.
func New() *Checker { return &Checker{parts: map[tp.Partition]*history{}, txns: newTransactions()} }

// Err is the first violation, nil if there is none.
func (c *Checker) Err() error {
	if c.first == nil {
		return nil
	}
	return c.first
}

// Fail notes a violation that the observer found by itself.
func (c *Checker) Fail(check string, p tp.Partition, format string, args ...any) {
	if c.first == nil {
		c.first = &Violation{check, p, fmt.Sprintf(format, args...)}
	}
}

func (c *Checker) of(p tp.Partition) *history {
	h := c.parts[p]
	if h == nil {
		h = &history{end: 0, producers: map[int64]producer{}, ends: map[int32]int64{}, led: map[leadership]int64{}, replicas: map[int32]*replica{}}
		c.parts[p] = h
	}
	return h
}

// Reset forgets the committed batches from keep on, since they may be lost: nobody of the replicas that had them all is
// left, or another was elected in spite of that. What leaders of an epoch below epoch still do is not looked at any more.
// With keep 0 the new history may begin anywhere.
func (c *Checker) Reset(p tp.Partition, keep int64, epoch int32) {
	h := c.of(p)
	h.generation++
	c.txns.broken = true
	h.minEpoch = max(h.minEpoch, epoch)
	clear(h.producers)
	clear(h.ends)
	for _, r := range h.replicas {
		r.verified = -1
	}
	if keep <= 0 {
		h.batches, h.end = nil, -1
		return
	}
	if h.end < 0 || h.end <= keep {
		return
	}
	for n := len(h.batches); n > 0 && h.batches[n-1].last >= keep; n-- {
		h.batches = h.batches[:n-1]
	}
	h.end = 0
	if n := len(h.batches); n > 0 {
		h.end = h.batches[n-1].last + 1
	}
}

// Generation counts the resets of a partition.
func (c *Checker) Generation(p tp.Partition) int { return c.of(p).generation }

// End is the offset behind the last committed batch, -1 if nothing is known.
func (c *Checker) End(p tp.Partition) int64 { return c.of(p).end }
