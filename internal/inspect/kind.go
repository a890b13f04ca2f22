package inspect

import (
	"bytes"
	"path/filepath"
	"strings"

	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/segment"
)

// Kind is what a file is.
type Kind string

// The kinds, by the words that people type.
const (
	KindAuto        Kind = ""
	KindLog         Kind = "log"
	KindOffsetIndex Kind = "index"
	KindTimeIndex   Kind = "timeindex"
	KindTxnIndex    Kind = "txnindex"
	KindSnapshot    Kind = "snapshot"
	KindEpochs      Kind = "leader-epochs"
	KindOffsets     Kind = "offset-checkpoint"
	KindPartition   Kind = "partition-metadata"
	KindMeta        Kind = "meta-properties"
	KindManifest    Kind = "manifest"
	KindIndexes     Kind = "indexes"
)

// Kinds lists them all.
func Kinds() []Kind {
	return []Kind{KindLog, KindOffsetIndex, KindTimeIndex, KindTxnIndex, KindSnapshot, KindEpochs, KindOffsets, KindPartition, KindMeta, KindManifest, KindIndexes}
}

// KindOf tells a kind by a file's name, KindAuto if that says nothing. What Kafka adds to the names of files that are on
// their way out or in (.deleted, .swap, .cleaned) is passed over.
func KindOf(name string) Kind {
	name = filepath.Base(name)
	for _, suffix := range []string{".deleted", ".swap", ".cleaned", ".tmp"} {
		name = strings.TrimSuffix(name, suffix)
	}
	switch name {
	case "leader-epoch-checkpoint":
		return KindEpochs
	case log.RecoveryPointFile, log.LogStartFile, log.HighWatermarkFile, log.CompactedFile:
		return KindOffsets
	case "partition.metadata":
		return KindPartition
	case log.MetaFile:
		return KindMeta
	}
	switch filepath.Ext(name) {
	case segment.LogSuffix:
		return KindLog
	case segment.OffsetIndexSuffix:
		return KindOffsetIndex
	case segment.TimeIndexSuffix:
		return KindTimeIndex
	case segment.TxnIndexSuffix:
		return KindTxnIndex
	case segment.SnapshotSuffix:
		return KindSnapshot
	case ".leader_epoch_checkpoint":
		return KindEpochs
	case ".rsm-manifest":
		return KindManifest
	case ".indexes":
		return KindIndexes
	}
	return KindAuto
}

// kindOfContent tells a kind by how a file begins. Indexes cannot be told apart that way.
func kindOfContent(head []byte) Kind {
	text := bytes.TrimSpace(head)
	if _, err := recordbatch.ParseHeader(head); err == nil {
		return KindLog
	}
	if _, err := producerstate.ParseSnapshot(head); err == nil {
		return KindSnapshot
	}
	switch {
	case bytes.HasPrefix(text, []byte("{")):
		return KindManifest
	case bytes.HasPrefix(text, []byte("version: ")):
		return KindPartition
	case bytes.Contains(text, []byte("cluster.id=")):
		return KindMeta
	case bytes.HasPrefix(text, []byte("0\n")):
		lines := bytes.SplitN(text, []byte("\n"), 4)
		if len(lines) > 2 && len(bytes.Fields(lines[2])) == 3 {
			return KindOffsets
		}
		return KindEpochs
	}
	return KindAuto
}
