// Package log is one partition's log: segments of record batches in a folder, with Kafka's files and names, so
// that either can open what the other closed.
//
// It guarantees that what a Flush covered survives a crash; that after a crash the log is a prefix of what was
// appended, at least up to the recovery point; that damage below the recovery point takes the log out of service
// (CorruptError) instead of being cut away; and that after a failed write or fsync nothing is appended any more
// until the log is opened anew (ErrLogDead).
//
// It knows nothing of leaders and followers, of the object store, or of the clock: the high watermark, the end
// of the remote tier and the time are told to it.
//
// All methods are safe for concurrent use. Reads take no lock: they work on a view that every change publishes.
// Lock order: flushMu, then mu. fsyncs run under flushMu alone, so that appends go on.
package log

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sort"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

// ErrLogDead is returned by all writes after a write or fsync failed; it wraps the cause.
var ErrLogDead = errors.New("log is out of service until it is opened again")

// ErrClosed is returned after Close and Delete.
var ErrClosed = errors.New("log is closed")

// ErrOffsetOutOfRange is what OffsetOutOfRangeError is (OFFSET_OUT_OF_RANGE 1).
var ErrOffsetOutOfRange = errors.New("offset out of range")

// ErrExceedsSegment: what is to be appended is larger than segment.bytes (RECORD_LIST_TOO_LARGE 18).
var ErrExceedsSegment = errors.New("record batches exceed the segment size")

// OffsetOutOfRangeError says what the log holds instead. On a tiered log an offset in [LogStart, LocalLogStart)
// is in the remote tier.
type OffsetOutOfRangeError struct{ Requested, LogStart, LocalLogStart, End int64 }

func (e *OffsetOutOfRangeError) Error() string {
	return fmt.Sprintf("offset %d is out of range: log start %d, local start %d, end %d", e.Requested, e.LogStart, e.LocalLogStart, e.End)
}

// Is makes errors.Is(err, ErrOffsetOutOfRange) hold.
func (e *OffsetOutOfRangeError) Is(target error) bool { return target == ErrOffsetOutOfRange }

// UnexpectedOffsetError: a follower's batch does not continue the log.
type UnexpectedOffsetError struct{ First, Last, End int64 }

func (e *UnexpectedOffsetError) Error() string {
	return fmt.Sprintf("batches [%d, %d] do not continue a log that ends at %d", e.First, e.Last, e.End)
}

// CorruptError says that a log cannot be opened: bytes that were once durable are damaged, or a file is not what
// it should be. Nothing was changed.
type CorruptError struct {
	File     string
	Position int64 // -1 if the file as a whole
	Err      error
}

func (e *CorruptError) Error() string {
	if e.Position < 0 {
		return fmt.Sprintf("%s: %v", e.File, e.Err)
	}
	return fmt.Sprintf("%s at byte %d: %v", e.File, e.Position, e.Err)
}

// Unwrap is Err.
func (e *CorruptError) Unwrap() error { return e.Err }

// AbortedTxn is an aborted transaction of the transaction index.
type AbortedTxn = producerstate.AbortedTxn

// FileCache bounds the open files of all logs.
type FileCache = segment.FileCache

// NewFileCache keeps at most maxOpen files open beyond those in use.
func NewFileCache(fsys vfs.FS, maxOpen int) *FileCache { return segment.NewFileCache(fsys, maxOpen) }

// Options say what to open. FS, Dir and Partition are required.
type Options struct {
	FS        vfs.FS
	Dir       string // the partition's folder
	Partition tp.Partition
	TopicID   tp.UUID // zero: that of partition.metadata
	Config    Config
	// Clean says that the log was closed and nothing needs to be scanned. RecoveryPoint and LogStart are those of
	// the checkpoints, 0 without one. After TruncateTo the recovery point must be checkpointed before the next append
	// is acknowledged: a stale higher one makes a torn tail look like damage.
	Clean                   bool
	RecoveryPoint, LogStart int64
	Compacted               int64 // that of the checkpoint of compactions, 0 without one
	Now                     time.Time
	Logger                  *slog.Logger // nil: discard
	Files                   *FileCache   // nil: a private one
	Jitter                  func() int64 // random numbers for segment.jitter.ms; nil: no jitter
}

// Offsets is a consistent set of a log's offsets. Size is the bytes of all local segments.
type Offsets struct {
	LogStart, LocalLogStart, End, ActiveBase, RecoveryPoint, Size int64
}

// view is what readers see; it is never changed once published.
type view struct {
	sealed  []*segment.Reader
	active  *segment.Reader
	offsets Offsets

	sealedSize int64
}

// find returns the number of the segment that holds offset, or would: at counts sealed ones first, then active.
func (v *view) find(offset int64) int {
	return sort.Search(len(v.sealed), func(i int) bool { return v.sealed[i].Next > offset })
}

// at returns segment i of count.
func (v *view) at(i int) *segment.Reader {
	if i == len(v.sealed) {
		return v.active
	}
	return v.sealed[i]
}

func (v *view) count() int { return len(v.sealed) + 1 }

// Log is an open log.
//
// Invariants: sealed and active are in order of their bases and do not overlap; logStart ≤ end; recoveryPoint ≤
// end; all sealed segments with a base below syncedBelow are durable with their indexes.
type Log struct {
	fs        vfs.FS
	dir       string
	partition tp.Partition
	topicID   tp.UUID
	logger    *slog.Logger
	files     *FileCache
	draw      func() int64
	report    RecoveryReport
	config    atomic.Pointer[Config]
	current   atomic.Pointer[view]

	flushMu sync.Mutex

	mu            sync.Mutex
	dead          error
	sealed        []*segment.Reader // replaced, never changed in place
	active        *segment.Writer
	activeJitter  int64
	logStart      int64
	recoveryPoint int64
	syncedBelow   int64
	dirDirty      bool // names were made or removed since the last sync of the folder
	newborn       bool // the folder itself was made and is not durable yet: thousands of topics need no thousand fsyncs
	flushedMs     int64
	highWatermark int64
	remoteEnd     int64
	epochs        *leaderepoch.Cache
	epochsStale   bool // the file lacks changes of epochs: writing it failed
	producers     *producerstate.State
	snapshots     []int64 // offsets of the snapshot files, rising
	compacted     int64   // offset up to where no key is new to compaction
}

// Dir is the partition's folder.
func (l *Log) Dir() string { return l.dir }

// Partition names the partition and TopicID its topic.
func (l *Log) Partition() tp.Partition { return l.partition }

// TopicID is the id in partition.metadata.
func (l *Log) TopicID() tp.UUID { return l.topicID }

// Recovery tells what Open found and did.
func (l *Log) Recovery() RecoveryReport { return l.report }

// Config returns the values in force.
func (l *Log) Config() Config { return *l.config.Load() }

// SetConfig replaces them; it holds from the next operation on.
func (l *Log) SetConfig(c Config) { l.config.Store(&c) }

// Offsets returns the offsets of this moment. It takes no lock.
func (l *Log) Offsets() Offsets { return l.current.Load().offsets }

// publishLocked makes the state visible to readers.
func (l *Log) publishLocked() {
	v := &view{sealed: l.sealed, active: l.active.Reader()}
	first := l.active.Base()
	if len(l.sealed) > 0 {
		first = l.sealed[0].Base
	}
	v.offsets = Offsets{LogStart: l.logStart, LocalLogStart: max(l.logStart, first), End: l.active.Next(),
		ActiveBase: l.active.Base(), RecoveryPoint: l.recoveryPoint, Size: l.active.Size()}
	if old := l.current.Load(); old != nil && len(old.sealed) == len(l.sealed) && (len(l.sealed) == 0 || &old.sealed[0] == &l.sealed[0]) {
		v.sealedSize = old.sealedSize // the list is replaced, never changed
	} else {
		for _, r := range l.sealed {
			v.sealedSize += r.Size
		}
	}
	v.offsets.Size += v.sealedSize
	l.current.Store(v)
}

func (l *Log) writableLocked() error {
	if l.dead == nil || errors.Is(l.dead, ErrClosed) {
		return l.dead
	}
	return fmt.Errorf("%s: %w: %w", l.partition, ErrLogDead, l.dead)
}

// failLocked takes a failed write: a full disk leaves the log usable as long as its files are as they were,
// anything else ends it.
func (l *Log) failLocked(doing string, err error) error {
	err = fmt.Errorf("%s: %s: %w", l.partition, doing, err)
	var we *segment.WriteError
	if errors.As(err, &we) && !we.Restored || !errors.Is(err, syscall.ENOSPC) {
		l.dead = err
		l.logger.Error("log is out of service", "partition", l.partition.String(), "cause", err)
	}
	return err
}

func (l *Log) die(doing string, err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	err = fmt.Errorf("%s: %s: %w", l.partition, doing, err)
	if l.dead == nil {
		l.dead = err
		l.logger.Error("log is out of service", "partition", l.partition.String(), "cause", err)
	}
	return err
}

// SetHighWatermark tells up to where the log is committed: transactions that ended below are stable, and
// retention stays below. It is clamped to the log; a lower value than before is taken too.
func (l *Log) SetHighWatermark(hw int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.highWatermark = min(max(hw, l.logStart), l.active.Next())
	l.producers.HighWatermarkTo(l.highWatermark)
}

// SetRemoteEnd tells the last offset, inclusive, that the remote tier holds; -1 is none.
func (l *Log) SetRemoteEnd(inclusive int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.remoteEnd = inclusive
}

// FirstUnstable is the first offset of the oldest transaction that is open or not decided below hw; without
// one the last stable offset is hw. It is never below the log start.
func (l *Log) FirstUnstable(hw int64) (offset int64, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	offset, ok = l.producers.FirstUnstable(hw)
	return max(offset, l.logStart), ok
}

// TxnState says whether a producer has a transaction open here, and where the log ends at this moment: what is confirmed about the
// transaction from now on holds unless a marker follows (AppendRequest.ConfirmedAt).
func (l *Log) TxnState(producerID int64, epoch int16) (end int64, open bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.active.Next(), l.producers.InTxn(producerID, epoch)
}

// Producers lists the producers that the log knows, without those that have expired by now.
func (l *Log) Producers(now time.Time) []producerstate.Active {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.producers.Expire(now.UnixMilli(), l.config.Load().ProducerIDExpirationMs)
	return l.producers.Active()
}

// IdlestTransaction is the open transaction that has not been written to for longest, by its first offset and the time of its last batch in ms.
func (l *Log) IdlestTransaction() (first, lastMs int64, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.producers.Idlest()
}

// ExpireProducers forgets producers after producer.id.expiration.ms and returns their number.
func (l *Log) ExpireProducers(now time.Time) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.producers.Expire(now.UnixMilli(), l.config.Load().ProducerIDExpirationMs)
}

// Epochs returns the lineage from the log start on.
func (l *Log) Epochs() []leaderepoch.Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.epochs.Entries()
}

// EpochForOffset returns the leader epoch of an offset.
func (l *Log) EpochForOffset(o int64) (int32, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.epochs.EpochForOffset(o)
}

// EndOffsetForEpoch answers OffsetForLeaderEpoch; (-1, -1) is undefined.
func (l *Log) EndOffsetForEpoch(e int32) (epoch int32, end int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.epochs.EndOffsetFor(e, l.active.Next())
}

// LatestEpoch is the last entry of the lineage.
func (l *Log) LatestEpoch() (leaderepoch.Entry, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.epochs.Latest()
}

// AssignEpoch records that a leader epoch begins at an offset, durably.
func (l *Log) AssignEpoch(e int32, start int64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.writableLocked(); err != nil {
		return err
	}
	if l.epochs.Assign(e, start) {
		return l.writeEpochsLocked()
	}
	return nil
}

const epochFile = "leader-epoch-checkpoint"

func (l *Log) writeEpochsLocked() error {
	l.epochsStale = true
	if err := vfs.WriteFileAtomic(l.fs, filepath.Join(l.dir, epochFile), leaderepoch.Marshal(l.epochs.Entries())); err != nil {
		return l.failLocked("write leader epochs", err)
	}
	l.epochsStale = false
	return nil
}
