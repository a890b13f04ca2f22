// Package committed keeps the offsets that a group has committed, whatever protocol its members speak: those that count, and those of
// transactions that are not decided yet (KIP-447). It is pure. Times are ms since 1970.
//
// Offsets are not safe for concurrent use; their owner holds one lock for them.
package committed

import (
	"cmp"
	"maps"
	"slices"

	"github.com/varve-io/varve/internal/grouprecord"
)

// Partition names a partition, and Offset is what is committed for it.
type (
	Partition = grouprecord.TopicPartition
	Offset    = grouprecord.Offset
)

// placed is a committed offset and where its record is: the later one of two commits counts.
type placed struct {
	Offset
	at int64
}

// Offsets are the offsets of one group. The zero value is not usable: call New.
type Offsets struct {
	group   string
	offsets map[Partition]placed
	pending map[int64]map[Partition]placed // of transactions that are not decided, by producer id
}

// New returns the offsets of a group that has committed none.
func New(group string) *Offsets {
	return &Offsets{group: group, offsets: map[Partition]placed{}, pending: map[int64]map[Partition]placed{}}
}

// Set makes a committed offset visible, whose record is at an offset of the topic.
func (s *Offsets) Set(p Partition, o Offset, at int64) { s.offsets[p] = placed{o, at} }

// SetPending takes a commit of a transaction that is not decided yet.
func (s *Offsets) SetPending(producerID int64, p Partition, o Offset, at int64) {
	if s.pending[producerID] == nil {
		s.pending[producerID] = map[Partition]placed{}
	}
	s.pending[producerID][p] = placed{o, at}
}

// EndTxn makes the commits of a producer's transaction count, unless a later commit came in between, or forgets them.
func (s *Offsets) EndTxn(producerID int64, commit bool) {
	for p, o := range s.pending[producerID] {
		if before, ok := s.offsets[p]; commit && (!ok || before.at < o.at) {
			s.offsets[p] = o
		}
	}
	delete(s.pending, producerID)
}

// Unstable says whether a transaction that is not decided yet has a commit for the partition.
func (s *Offsets) Unstable(p Partition) bool {
	for _, offsets := range s.pending {
		if _, ok := offsets[p]; ok {
			return true
		}
	}
	return false
}

// Get returns a committed offset.
func (s *Offsets) Get(p Partition) (Offset, bool) {
	o, ok := s.offsets[p]
	return o.Offset, ok
}

// Partitions lists the partitions with committed offsets in order.
func (s *Offsets) Partitions() []Partition {
	return slices.SortedFunc(maps.Keys(s.offsets), func(a, b Partition) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	})
}

// Pending says that a transaction that is not decided yet has a commit.
func (s *Offsets) Pending() bool { return len(s.pending) > 0 }

// Empty says that nothing is committed, nor pending.
func (s *Offsets) Empty() bool { return len(s.offsets) == 0 && len(s.pending) == 0 }

// Forget drops a committed offset once its tombstone is durable, and what transactions would make of it.
func (s *Offsets) Forget(p Partition) {
	delete(s.offsets, p)
	for _, pending := range s.pending {
		delete(pending, p)
	}
}

// Tombstones delete some committed offsets; Forget follows once they are durable.
func (s *Offsets) Tombstones(partitions []Partition) []grouprecord.Entry {
	var out []grouprecord.Entry
	for _, p := range partitions {
		out = append(out, s.entry(p, nil))
	}
	return out
}

// AllTombstones delete all that the group committed, pending commits too.
func (s *Offsets) AllTombstones() []grouprecord.Entry {
	out := s.Tombstones(s.Partitions())
	for _, pending := range s.pending {
		for p := range pending {
			if _, ok := s.offsets[p]; !ok {
				out = append(out, s.entry(p, nil))
			}
		}
	}
	return out
}

// Commit is the record of a commit; Set or SetPending follows once it is written.
func (s *Offsets) Commit(p Partition, o Offset) grouprecord.Entry { return s.entry(p, &o) }

func (s *Offsets) entry(p Partition, o *Offset) grouprecord.Entry {
	e := grouprecord.Entry{Key: grouprecord.Key{Kind: grouprecord.KindOffset, Group: s.group, Partition: p}}
	if o != nil {
		e.Value = o
	}
	return e
}

// Expired lists the offsets that have outlived their retention at now, but for those that a transaction still waits to decide. since is when
// the group was last in use, 0 if that is of no account; keep says which topics are in use (KIP-211).
func (s *Offsets) Expired(retention, since, now int64, keep func(topic string) bool) []Partition {
	var out []Partition
	for _, p := range s.Partitions() {
		o := s.offsets[p]
		due := max(o.CommittedAt, since) + retention
		if o.ExpiresAt >= 0 {
			due = o.ExpiresAt
		}
		if now >= due && !keep(p.Topic) && !s.Unstable(p) {
			out = append(out, p)
		}
	}
	return out
}
