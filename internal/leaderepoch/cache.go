// Package leaderepoch holds the lineage of a partition: which leader epoch began at which offset.
//
// Followers find the point where their log departs from the leader's by it, and a remote segment is stored
// with it. The rules are those of Kafka's LeaderEpochFileCache; the text form is the file
// leader-epoch-checkpoint. Nothing here does I/O: the caller writes what Marshal returns.
//
// A Cache is not safe for concurrent use.
package leaderepoch

import (
	"slices"
	"sort"
)

// Undefined is Kafka's "no such epoch" and "no such offset".
const (
	UndefinedEpoch  int32 = -1
	UndefinedOffset int64 = -1
)

// Entry says that the leader of Epoch began to write at StartOffset.
type Entry struct {
	Epoch       int32
	StartOffset int64
}

// Cache is the ordered list of epochs. The zero value is an empty cache.
//
// Both the epochs and the start offsets of its entries rise strictly.
type Cache struct{ entries []Entry }

// New makes a cache of entries, which must rise strictly as Parse guarantees; others are put through Assign
// one by one, so that the later entry wins.
func New(entries []Entry) *Cache {
	c := &Cache{}
	for _, e := range entries {
		c.Assign(e.Epoch, e.StartOffset)
	}
	return c
}

// Assign records that epoch began at start and reports whether the cache changed. Entries from the end that
// contradict it, with an epoch or a start not below the new one, are dropped. An epoch or start below zero
// is ignored.
func (c *Cache) Assign(epoch int32, start int64) bool {
	if epoch < 0 || start < 0 {
		return false
	}
	if n := len(c.entries); n > 0 && c.entries[n-1].Epoch == epoch && c.entries[n-1].StartOffset <= start {
		return false
	}
	n := len(c.entries)
	for n > 0 && (c.entries[n-1].Epoch >= epoch || c.entries[n-1].StartOffset >= start) {
		n--
	}
	c.entries = append(c.entries[:n:n], Entry{epoch, start})
	return true
}

// EndOffsetFor answers OffsetForLeaderEpoch: the greatest epoch not above the one asked, and where it ended.
// logEnd is the end of the log, which is the end of the latest epoch. An epoch older than the cache is
// answered with itself and the start of the first entry, as Kafka does. Undefined is (-1, -1).
func (c *Cache) EndOffsetFor(epoch int32, logEnd int64) (int32, int64) {
	n := len(c.entries)
	if epoch == UndefinedEpoch || n == 0 {
		return UndefinedEpoch, UndefinedOffset
	}
	if c.entries[n-1].Epoch == epoch {
		return epoch, logEnd
	}
	higher := sort.Search(n, func(i int) bool { return c.entries[i].Epoch > epoch })
	switch higher {
	case n:
		return UndefinedEpoch, UndefinedOffset
	case 0:
		return epoch, c.entries[0].StartOffset
	default:
		return c.entries[higher-1].Epoch, c.entries[higher].StartOffset
	}
}

// EpochForOffset returns the epoch in which offset was, or would be, written. It is absent below the first
// entry; past the log end it is the last epoch.
func (c *Cache) EpochForOffset(offset int64) (int32, bool) {
	i := sort.Search(len(c.entries), func(i int) bool { return c.entries[i].StartOffset > offset })
	if i == 0 {
		return UndefinedEpoch, false
	}
	return c.entries[i-1].Epoch, true
}

// TruncateFromEnd drops the entries that start at offset or later and reports whether there were any.
func (c *Cache) TruncateFromEnd(offset int64) bool {
	n := len(c.entries)
	for n > 0 && c.entries[n-1].StartOffset >= offset {
		n--
	}
	changed := n != len(c.entries)
	c.entries = c.entries[:n:n]
	return changed
}

// TruncateFromStart drops what lies below offset: the last entry that starts at offset or before begins at
// offset from now on, those before it go. It reports whether the cache changed.
func (c *Cache) TruncateFromStart(offset int64) bool {
	i := sort.Search(len(c.entries), func(i int) bool { return c.entries[i].StartOffset > offset })
	if i == 0 || i == 1 && c.entries[0].StartOffset == offset {
		return false
	}
	kept := slices.Clone(c.entries[i-1:])
	kept[0].StartOffset = offset
	c.entries = kept
	return true
}

// EntriesInRange returns the lineage of the offsets in [from, to) alone, the first entry rewritten to start at
// from; a negative from leaves the front as it is. It is what is stored beside a remote segment.
func (c *Cache) EntriesInRange(from, to int64) []Entry {
	d := c.Clone()
	if from >= 0 {
		d.TruncateFromStart(from)
	}
	d.TruncateFromEnd(to)
	return d.Entries()
}

// Entries returns a copy of all entries in order.
func (c *Cache) Entries() []Entry { return slices.Clone(c.entries) }

// Latest returns the last entry.
func (c *Cache) Latest() (Entry, bool) {
	if len(c.entries) == 0 {
		return Entry{UndefinedEpoch, UndefinedOffset}, false
	}
	return c.entries[len(c.entries)-1], true
}

// Earliest returns the first entry.
func (c *Cache) Earliest() (Entry, bool) {
	if len(c.entries) == 0 {
		return Entry{UndefinedEpoch, UndefinedOffset}, false
	}
	return c.entries[0], true
}

// Previous returns the greatest epoch below the one given.
func (c *Cache) Previous(epoch int32) (Entry, bool) {
	i := sort.Search(len(c.entries), func(i int) bool { return c.entries[i].Epoch >= epoch })
	if i == 0 {
		return Entry{UndefinedEpoch, UndefinedOffset}, false
	}
	return c.entries[i-1], true
}

// Len is the number of entries.
func (c *Cache) Len() int { return len(c.entries) }

// Clear drops all entries.
func (c *Cache) Clear() { c.entries = nil }

// Clone returns an independent copy.
func (c *Cache) Clone() *Cache { return &Cache{entries: slices.Clone(c.entries)} }
