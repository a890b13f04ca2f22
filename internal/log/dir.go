package log

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/varve-io/varve/internal/tp"
)

// Names of the files of a log directory (Kafka file names).
const (
	RecoveryPointFile = "recovery-point-offset-checkpoint"
	LogStartFile      = "log-start-offset-checkpoint"
	HighWatermarkFile = "replication-offset-checkpoint"
	CompactedFile     = "cleaner-offset-checkpoint"
	MetaFile          = "meta.properties"
	CleanShutdownFile = ".kafka_cleanshutdown"
	LockFile          = ".lock"
)

// ErrMalformed is wrapped by the errors of the parsers of this file.
var ErrMalformed = errors.New("malformed file")

// MarshalCheckpoint writes an offset checkpoint, version 0: the version, the number of entries, then lines
// "topic partition offset" in order of topics and partitions.
func MarshalCheckpoint(offsets map[tp.Partition]int64) []byte {
	keys := make([]tp.Partition, 0, len(offsets))
	for k := range offsets {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b tp.Partition) int {
		if c := strings.Compare(a.Topic, b.Topic); c != 0 {
			return c
		}
		return int(a.Index) - int(b.Index)
	})
	b := append([]byte("0\n"), strconv.Itoa(len(keys))...)
	b = append(b, '\n')
	for _, k := range keys {
		b = append(b, k.Topic...)
		b = strconv.AppendInt(append(b, ' '), int64(k.Index), 10)
		b = strconv.AppendInt(append(b, ' '), offsets[k], 10)
		b = append(b, '\n')
	}
	return b
}

// ParseCheckpoint reads that file; an empty one has no entries.
func ParseCheckpoint(b []byte) (map[tp.Partition]int64, error) {
	out := map[tp.Partition]int64{}
	if len(b) == 0 {
		return out, nil
	}
	lines := bytes.Split(bytes.TrimSuffix(b, []byte("\n")), []byte("\n"))
	if v := string(bytes.TrimSpace(lines[0])); v != "0" || len(lines) < 2 {
		return nil, fmt.Errorf("%w: offset checkpoint: version %.20q in %d lines", ErrMalformed, v, len(lines))
	}
	count, err := strconv.ParseInt(string(bytes.TrimSpace(lines[1])), 10, 32)
	if err != nil || count != int64(len(lines)-2) {
		return nil, fmt.Errorf("%w: offset checkpoint: count %.20q for %d lines", ErrMalformed, lines[1], len(lines)-2)
	}
	for i, line := range lines[2:] {
		f := bytes.Fields(line)
		if len(f) != 3 {
			return nil, fmt.Errorf("%w: offset checkpoint: line %d has %d fields", ErrMalformed, i+3, len(f))
		}
		p, err1 := strconv.ParseInt(string(f[1]), 10, 32)
		o, err2 := strconv.ParseInt(string(f[2]), 10, 64)
		key := tp.Partition{Topic: string(f[0]), Index: int32(p)}
		if _, twice := out[key]; err1 != nil || err2 != nil || p < 0 || twice {
			return nil, fmt.Errorf("%w: offset checkpoint: line %d: %.200q", ErrMalformed, i+3, line)
		}
		out[key] = o
	}
	return out, nil
}

// Meta is the identity of a log directory, meta.properties version 1. DirectoryID is zero if the file has none.
type Meta struct {
	ClusterID   string
	NodeID      int32
	DirectoryID tp.UUID
}

// MarshalMeta writes the file as Kafka's Properties do.
func MarshalMeta(m Meta) []byte {
	s := "#\ncluster.id=" + m.ClusterID + "\n"
	if !m.DirectoryID.IsZero() {
		s += "directory.id=" + m.DirectoryID.String() + "\n"
	}
	return []byte(s + "node.id=" + strconv.Itoa(int(m.NodeID)) + "\nversion=1\n")
}

// ParseMeta reads it. Unknown keys are passed over; another version, and a missing cluster or node id are
// errors.
func ParseMeta(b []byte) (Meta, error) {
	m := Meta{NodeID: -1}
	version := ""
	for _, line := range strings.Split(string(b), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' || line[0] == '!' {
			continue
		}
		key, value, _ := strings.Cut(line, "=")
		key, value = strings.TrimSpace(key), strings.ReplaceAll(strings.TrimSpace(value), `\`, "")
		var err error
		switch key {
		case "version":
			version = value
		case "cluster.id":
			m.ClusterID = value
		case "directory.id":
			m.DirectoryID, err = tp.ParseUUID(value)
		case "node.id":
			var n int64
			n, err = strconv.ParseInt(value, 10, 32)
			m.NodeID = int32(n)
		}
		if err != nil {
			return m, fmt.Errorf("%w: %s: %s: %w", ErrMalformed, MetaFile, key, err)
		}
	}
	if version != "1" || m.ClusterID == "" || m.NodeID < 0 {
		return m, fmt.Errorf("%w: %s: version %.20q, cluster id %.60q, node id %d", ErrMalformed, MetaFile, version, m.ClusterID, m.NodeID)
	}
	return m, nil
}

// MarshalCleanShutdown is the content of .kafka_cleanshutdown. That the file exists is what counts.
func MarshalCleanShutdown(brokerEpoch int64) []byte {
	return []byte(`{"version":0,"brokerEpoch":` + strconv.FormatInt(brokerEpoch, 10) + `}`)
}
