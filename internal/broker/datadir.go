package broker

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"path/filepath"
	"strings"
	"sync"

	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

// dataDir is the folder of partitions, its lock and its checkpoints.
type dataDir struct {
	fs   vfs.FS
	path string
	lock io.Closer
	meta *log.Meta // nil in a new folder
	id   tp.UUID   // of the folder; zero if what was written there before knows of none

	clean bool // the last run ended well

	mu    sync.Mutex // orders the writers of checkpoints: the newest marks win, and nobody shares a temporary file
	known marks      // what the checkpoints hold
}

// marks are what the checkpoints hold of partitions, by the names of their files.
type marks map[string]map[tp.Partition]int64

// checkpoints are the files of marks.
var checkpoints = []string{log.RecoveryPointFile, log.LogStartFile, log.HighWatermarkFile, log.CompactedFile}

// mark returns a partition's mark in a checkpoint, 0 where none is known.
func (d *dataDir) mark(name string, id tp.Partition) int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.known[name][id]
}

// forget drops the marks of partitions that are deleted and tells whether a checkpoint holds any of them.
func (d *dataDir) forget(ids []tp.Partition) (held bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, m := range d.known {
		for _, id := range ids {
			if _, ok := m[id]; ok {
				delete(m, id)
				held = true
			}
		}
	}
	return held
}

// keep drops the marks of partitions that are not in the image any more.
func (d *dataDir) keep(known func(tp.Partition) bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, m := range d.known {
		maps.DeleteFunc(m, func(id tp.Partition, _ int64) bool { return !known(id) })
	}
}

const fileMax = 64 << 20

// metadataDir is the folder of the metadata log in the data directory.
const metadataDir = "metadata"

// openDataDir locks the folder and reads what the last run left.
func openDataDir(fsys vfs.FS, path string, logger *slog.Logger) (*dataDir, error) {
	if err := fsys.MkdirAll(path); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	lock, err := lockDataDir(fsys, path)
	if errors.Is(err, vfs.ErrLocked) {
		return nil, fmt.Errorf("%w: stop that one, or give this one a log.dir of its own", err)
	}
	if err != nil {
		return nil, err
	}
	d := &dataDir{fs: fsys, path: path, lock: lock}
	if err := d.read(logger); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return d, nil
}

// lockDataDir wraps vfs.ErrLocked.
func lockDataDir(fsys vfs.FS, path string) (io.Closer, error) {
	lock, err := fsys.Lock(filepath.Join(path, log.LockFile))
	if errors.Is(err, vfs.ErrLocked) {
		return nil, fmt.Errorf("data directory %s is in use by another server (%w)", path, err)
	}
	if err != nil {
		return nil, fmt.Errorf("lock data directory %s: %w", path, err)
	}
	return lock, nil
}

// readMeta reads whose folder it is; nil if it is nobody's yet.
func readMeta(fsys vfs.FS, path string) (*log.Meta, error) {
	b, err := vfs.ReadFile(fsys, filepath.Join(path, log.MetaFile), fileMax)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	m, err := log.ParseMeta(b)
	if err != nil {
		return nil, fmt.Errorf("data directory %s: %w", path, err)
	}
	return &m, nil
}

func (d *dataDir) read(logger *slog.Logger) error {
	var err error
	if d.meta, err = readMeta(d.fs, d.path); err != nil {
		return err
	}
	if d.meta != nil {
		d.id = d.meta.DirectoryID
	} else if d.id, err = tp.NewUUID(rand.Reader); err != nil {
		return err
	}
	if _, err := d.fs.Stat(d.file(log.CleanShutdownFile)); err == nil {
		d.clean = true
		// Gone before anything is opened: a crash from here on is an unclean end.
		if err := d.fs.Remove(d.file(log.CleanShutdownFile)); err != nil {
			return err
		}
		if err := d.fs.SyncDir(d.path); err != nil {
			return err
		}
	}
	d.known = marks{}
	for _, name := range checkpoints {
		d.known[name] = d.checkpoint(name, logger)
	}
	return nil
}

// checkpoint reads an offset checkpoint. An unreadable one counts as empty, which costs scanning and nothing else.
func (d *dataDir) checkpoint(name string, logger *slog.Logger) map[tp.Partition]int64 {
	b, err := vfs.ReadFile(d.fs, d.file(name), fileMax)
	if errors.Is(err, fs.ErrNotExist) {
		return map[tp.Partition]int64{}
	}
	var offsets map[tp.Partition]int64
	if err == nil {
		offsets, err = log.ParseCheckpoint(b)
	}
	if err != nil {
		logger.Warn("checkpoint is unreadable, logs will be scanned", "file", d.file(name), "cause", err)
		d.clean = false
		return map[tp.Partition]int64{}
	}
	return offsets
}

func (d *dataDir) file(name string) string { return filepath.Join(d.path, name) }

// check refuses the folder of another node or cluster, before anything in it is opened. The cluster may be "", which is any.
func (d *dataDir) check(cluster string, node int32) error {
	switch {
	case d.meta == nil:
		return nil
	case d.meta.NodeID != node:
		return fmt.Errorf("data directory %s belongs to node %d, not %d: set node.id=%d or use another log.dir", d.path, d.meta.NodeID, node, d.meta.NodeID)
	case cluster != "" && d.meta.ClusterID != cluster:
		return fmt.Errorf("data directory %s belongs to cluster %s, not %s: use another log.dir", d.path, d.meta.ClusterID, cluster)
	}
	return nil
}

// claim writes the folder's identity, or checks it against this node's.
func (d *dataDir) claim(cluster string, node int32) error {
	if d.meta != nil {
		return d.check(cluster, node)
	}
	d.meta = &log.Meta{ClusterID: cluster, NodeID: node, DirectoryID: d.id}
	return vfs.WriteFileAtomic(d.fs, d.file(log.MetaFile), log.MarshalMeta(*d.meta))
}

// save writes the named checkpoints with the marks that collect returns.
func (d *dataDir) save(collect func(known marks) marks, names ...string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := collect(d.known)
	var errs []error
	for _, name := range names {
		err := vfs.WriteFileAtomic(d.fs, d.file(name), log.MarshalCheckpoint(now[name]))
		if err == nil {
			d.known[name] = now[name]
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// markClean says that every log was closed.
func (d *dataDir) markClean(epoch int64) error {
	return vfs.WriteFileAtomic(d.fs, d.file(log.CleanShutdownFile), log.MarshalCleanShutdown(epoch))
}

// setAside renames the folder of a deleted partition, which nobody has open, so that it goes at the next start at the latest.
// Without a folder there is no path.
func (d *dataDir) setAside(id tp.Partition, topic tp.UUID) (path string, err error) {
	from := d.file(id.String())
	path = d.file(log.AsideName(id.String(), hex.EncodeToString(topic[:]), "delete"))
	if err := d.fs.Rename(from, path); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	} else if err != nil {
		return "", err
	}
	return path, d.fs.SyncDir(d.path)
}

// strays moves folders of partitions that the image does not know out of the way, and finishes deletions that a crash
// interrupted. Nothing that may hold data is deleted here.
func (d *dataDir) strays(known func(tp.Partition) bool, logger *slog.Logger) error {
	entries, err := d.fs.ReadDir(d.path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.IsDir {
			continue
		}
		if strings.HasSuffix(e.Name, "-delete") {
			if err := d.fs.RemoveAll(d.file(e.Name)); err != nil {
				return err
			}
			continue
		}
		p, err := tp.ParsePartition(e.Name)
		if err != nil || known(p) {
			continue
		}
		if _, err := d.fs.Stat(filepath.Join(d.file(e.Name), "partition.metadata")); err != nil {
			continue
		}
		id, err := tp.NewUUID(rand.Reader)
		if err != nil {
			return err
		}
		stray := log.AsideName(e.Name, id.String(), "stray")
		logger.Warn("a partition's folder is not known to the cluster and was set aside", "folder", d.file(e.Name), "now", stray)
		if err := d.fs.Rename(d.file(e.Name), d.file(stray)); err != nil {
			return err
		}
	}
	return nil
}
