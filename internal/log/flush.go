package log

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path/filepath"
	"strings"

	"github.com/varve-io/varve/internal/segment"
)

// flushDueLocked applies flush.messages and flush.ms.
func (l *Log) flushDueLocked(cfg *Config, nowMs int64) bool {
	return l.active.Next()-l.recoveryPoint >= cfg.FlushMessages ||
		cfg.FlushMs != math.MaxInt64 && nowMs-l.flushedMs >= cfg.FlushMs
}

// Flush makes all that was appended before the call durable and advances the recovery point. A failure ends
// the log.
func (l *Log) Flush() error { return l.flushAt(math.MaxInt64, -1) }

// FlushUpTo is Flush for the offsets below upTo alone; with the base of the active segment it leaves that out.
func (l *Log) FlushUpTo(upTo int64) error { return l.flushAt(upTo, -1) }

func (l *Log) flushAt(upTo, nowMs int64) error {
	l.flushMu.Lock()
	defer l.flushMu.Unlock()
	return l.flushHeld(upTo, nowMs)
}

// flushHeld runs under flushMu.
func (l *Log) flushHeld(upTo, nowMs int64) error {
	l.mu.Lock()
	if err := l.writableLocked(); err != nil {
		l.mu.Unlock()
		return err
	}
	upTo = min(upTo, l.active.Next())
	var todo []*segment.Reader
	syncedBelow := l.syncedBelow
	for _, r := range l.sealed {
		if r.Base >= l.syncedBelow && r.Base < upTo {
			todo = append(todo, r)
			syncedBelow = r.Next
		}
	}
	if upTo > l.recoveryPoint && l.active.Base() < upTo {
		todo = append(todo, l.active.Reader())
	}
	dirty, newborn := l.dirDirty, l.newborn
	l.dirDirty, l.newborn = false, false
	l.mu.Unlock()
	if newborn {
		if err := l.bear(); err != nil {
			return l.die("flush", err)
		}
	}
	for _, r := range todo {
		if err := r.Sync(); err != nil {
			return l.die("flush", err)
		}
	}
	if dirty {
		if err := l.fs.SyncDir(l.dir); err != nil {
			return l.die("flush", err)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.syncedBelow = max(l.syncedBelow, syncedBelow)
	l.recoveryPoint = max(l.recoveryPoint, upTo)
	if nowMs >= 0 {
		l.flushedMs = nowMs
	}
	l.publishLocked()
	return nil
}

// bear makes the folder of a new log durable, with the file that says whose it is.
func (l *Log) bear() error {
	if h, err := l.files.Acquire(l.file(metadataFile), true); err == nil {
		err = h.Sync()
		h.Release()
		l.files.Forget(l.file(metadataFile))
		if err != nil {
			return err
		}
	} else if !errors.Is(err, fs.ErrNotExist) { // a log without a topic id has none
		return err
	}
	if err := l.fs.SyncDir(l.dir); err != nil {
		return err
	}
	return l.fs.SyncDir(filepath.Dir(l.dir))
}

// Close flushes, writes indexes and a producer snapshot, and lets go of the files: the log can be opened with
// Clean. Views stay readable.
func (l *Log) Close() error {
	l.flushMu.Lock()
	defer l.flushMu.Unlock()
	l.mu.Lock()
	if errors.Is(l.dead, ErrClosed) {
		l.mu.Unlock()
		return nil
	}
	l.mu.Unlock()
	err := l.flushHeld(math.MaxInt64, -1)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil {
		err = l.closeLocked()
	}
	l.dead = ErrClosed
	l.forgetLocked()
	return err
}

func (l *Log) closeLocked() error {
	if err := l.active.WriteIndexes(true); err != nil {
		return fmt.Errorf("%s: close: %w", l.partition, err)
	}
	if err := l.writeSnapshotLocked(l.active.Next(), true); err != nil {
		return err
	}
	if err := l.fs.SyncDir(l.dir); err != nil {
		return fmt.Errorf("%s: close: %w", l.partition, err)
	}
	l.publishLocked()
	return nil
}

// CloseDirty lets go of the files and writes nothing, as a crash would.
func (l *Log) CloseDirty() {
	l.flushMu.Lock()
	defer l.flushMu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dead = ErrClosed
	l.forgetLocked()
}

// forgetLocked closes the files, once their users are done.
func (l *Log) forgetLocked() {
	for _, r := range append(l.sealed[:len(l.sealed):len(l.sealed)], l.active.Reader()) {
		for _, suffix := range []string{segment.LogSuffix, segment.OffsetIndexSuffix, segment.TimeIndexSuffix, segment.TxnIndexSuffix} {
			l.files.Forget(r.Path(suffix))
		}
	}
}

// Delete closes the log and renames its folder to one that ends in "-delete", whose path it returns for later
// removal. Views stay readable.
func (l *Log) Delete() (string, error) {
	l.CloseDirty()
	for i := 0; ; i++ {
		unique := hex.EncodeToString(l.topicID[:])
		if i > 0 {
			unique += fmt.Sprintf("%02x", i)
		}
		to := filepath.Join(filepath.Dir(l.dir), AsideName(filepath.Base(l.dir), unique, "delete"))
		if _, err := l.fs.Stat(to); err == nil {
			continue
		} else if !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("%s: delete: %w", l.partition, err)
		}
		if err := l.fs.Rename(l.dir, to); err != nil {
			return "", fmt.Errorf("%s: delete: %w", l.partition, err)
		}
		if err := l.fs.SyncDir(filepath.Dir(l.dir)); err != nil {
			return to, fmt.Errorf("%s: delete: %w", l.partition, err)
		}
		return to, nil
	}
}

// fileNameMax is what the usual file systems allow, in bytes.
const fileNameMax = 255

// AsideName is what the folder TOPIC-PARTITION is called once it is out of service: TOPIC-PARTITION.UNIQUE-SUFFIX, as in
// Kafka (UnifiedLog.logDeleteDirName), with as much of the topic's name as a file name has room for.
func AsideName(folder, unique, suffix string) string {
	tail := "." + unique + "-" + suffix
	if over := len(folder) + len(tail) - fileNameMax; over > 0 {
		if i := strings.LastIndexByte(folder, '-'); i > over {
			folder = folder[:i-over] + folder[i:]
		}
	}
	return folder + tail
}
