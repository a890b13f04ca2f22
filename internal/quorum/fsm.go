package quorum

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"github.com/varve-io/varve/internal/metadata"
)

// ErrConflict is returned by Propose if the records were computed from an image that is not the newest one any more.
// Nothing has been changed then.
var ErrConflict = errors.New("the metadata has changed since the command was computed")

// An entry of the log is the index of the image that it was computed from, and its records; a snapshot is the index of the
// image, and its records.
const indexSize = 8

func encode(index uint64, records []metadata.Record) ([]byte, error) {
	b, err := metadata.Marshal(records)
	if err != nil {
		return nil, err
	}
	return append(binary.BigEndian.AppendUint64(make([]byte, 0, indexSize+len(b)), index), b...), nil
}

func decode(b []byte) (uint64, []metadata.Record, error) {
	if len(b) < indexSize {
		return 0, nil, fmt.Errorf("%d bytes are too few", len(b))
	}
	records, err := metadata.Unmarshal(b[indexSize:])
	return binary.BigEndian.Uint64(b), records, err
}

// fsm folds committed entries into the image. An entry that was computed from another image than the present one is
// refused, the same on every node. A batch that does not apply poisons the node: going on would diverge.
type fsm struct {
	image    atomic.Pointer[metadata.Image]
	mu       sync.Mutex
	changed  chan struct{}
	poisoned error
}

func newFSM() *fsm {
	f := &fsm{changed: make(chan struct{})}
	f.image.Store(metadata.Empty())
	return f
}

func (f *fsm) err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.poisoned
}

// Apply returns the new image, or the error of the entry.
func (f *fsm) Apply(entry *raft.Log) any {
	if err := f.err(); err != nil {
		return err
	}
	base, records, err := decode(entry.Data)
	if err == nil {
		image := f.image.Load()
		if base != image.Index {
			return fmt.Errorf("%w: it was computed from position %d, the newest is %d", ErrConflict, base, image.Index)
		}
		var next *metadata.Image
		if next, err = image.Apply(records); err == nil {
			next.Index = entry.Index
			f.publish(next)
			return next
		}
	}
	err = fmt.Errorf("metadata log entry %d: %w", entry.Index, err)
	f.mu.Lock()
	f.poisoned = err
	f.mu.Unlock()
	return err
}

func (f *fsm) publish(next *metadata.Image) {
	f.image.Store(next)
	f.mu.Lock()
	close(f.changed)
	f.changed = make(chan struct{})
	f.mu.Unlock()
}

// Snapshot is called by raft between two entries.
func (f *fsm) Snapshot() (raft.FSMSnapshot, error) {
	if err := f.err(); err != nil {
		return nil, err
	}
	return snapshot{f.image.Load()}, nil
}

// Restore replaces the image by that of a snapshot.
func (f *fsm) Restore(r io.ReadCloser) error {
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	index, records, err := decode(b)
	if err != nil {
		return fmt.Errorf("metadata snapshot: %w", err)
	}
	next, err := metadata.Empty().Apply(records)
	if err != nil {
		return fmt.Errorf("metadata snapshot: %w", err)
	}
	next.Index = index
	f.publish(next)
	return nil
}

type snapshot struct{ image *metadata.Image }

func (s snapshot) Persist(sink raft.SnapshotSink) error {
	b, err := encode(s.image.Index, s.image.Records())
	if err == nil {
		_, err = sink.Write(b)
	}
	if err != nil {
		return errors.Join(err, sink.Cancel())
	}
	return sink.Close()
}

func (snapshot) Release() {}
