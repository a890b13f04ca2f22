// Package segment reads and writes the parts of a partition's log: files of record batches with their offset,
// time and transaction indexes, byte for byte as Kafka's (Kafka file formats "log segment", "offset index",
// "time index", "transaction index").
//
// The same look-ups serve local files and bytes from an object store: they work on an io.ReaderAt and a size.
// Positions are bytes and int64 everywhere; files themselves are limited to 2^31-1 by the index format.
//
// A Writer is used by one goroutine at a time; the Readers that it gives out are immutable views, which any
// number of goroutines may use while the Writer goes on.
package segment

import (
	"fmt"
	"strconv"
)

// Suffixes of the files of a partition's folder.
const (
	LogSuffix         = ".log"
	OffsetIndexSuffix = ".index"
	TimeIndexSuffix   = ".timeindex"
	TxnIndexSuffix    = ".txnindex"
	SnapshotSuffix    = ".snapshot"
	DeletedSuffix     = ".deleted"
)

// FileName is the name of a file that belongs to an offset: 20 digits and a suffix.
func FileName(offset int64, suffix string) string { return fmt.Sprintf("%020d%s", offset, suffix) }

// ParseFileName splits such a name. ok is false for all others.
func ParseFileName(name string) (offset int64, suffix string, ok bool) {
	if len(name) < 21 || name[20] != '.' {
		return 0, "", false
	}
	for _, c := range name[:20] {
		if c < '0' || c > '9' {
			return 0, "", false
		}
	}
	offset, err := strconv.ParseInt(name[:20], 10, 64)
	if err != nil {
		return 0, "", false
	}
	return offset, name[20:], true
}
