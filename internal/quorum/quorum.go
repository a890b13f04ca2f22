// Package quorum makes metadata records durable and ordered: hashicorp/raft with a BoltDB log, whose state machine is the
// metadata image. It decides nothing about the records.
//
// Concurrency: Image and Changed may be called from anywhere at any time. Propose may be called concurrently, but a
// command that was computed from an image must be proposed before the next one is computed; package control sees to that.
package quorum

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"

	"github.com/varve-io/varve/internal/metadata"
)

// ErrNotController is returned by Propose on a node that does not lead the quorum.
var ErrNotController = errors.New("this node is not the active controller")

// Options of Open.
type Options struct {
	Dir    string // folder of the metadata log and its snapshots, created if missing
	NodeID int32
	Logger *slog.Logger
	// SnapshotThreshold is the number of entries after which a snapshot is taken; 0 means 8192.
	SnapshotThreshold uint64
}

// Node is one member of the quorum. With one voter, the only form so far, it leads as soon as it has opened its log.
type Node struct {
	raft  *raft.Raft
	store *raftboltdb.BoltStore
	fsm   *fsm
}

// Open starts the node; AwaitLeader tells when it serves. The same folder must not be open twice: BoltDB's lock refuses after a second.
func Open(o Options) (*Node, error) {
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return nil, err
	}
	id := raft.ServerID(fmt.Sprint(o.NodeID))
	logger := hclogAdapter(o.Logger)
	c := raft.DefaultConfig()
	c.LocalID = id
	c.Logger = logger
	// One voter waits for nobody's vote, so a short timeout only makes the start fast.
	c.HeartbeatTimeout, c.ElectionTimeout, c.LeaderLeaseTimeout, c.CommitTimeout = 20*time.Millisecond, 20*time.Millisecond, 20*time.Millisecond, 5*time.Millisecond
	c.SnapshotThreshold = 8192
	if o.SnapshotThreshold > 0 {
		c.SnapshotThreshold = o.SnapshotThreshold
	}
	c.SnapshotInterval = 30 * time.Second
	c.TrailingLogs = 1024
	c.NoLegacyTelemetry = true

	store, err := raftboltdb.New(raftboltdb.Options{Path: filepath.Join(o.Dir, "raft.db")})
	if err != nil {
		return nil, fmt.Errorf("open metadata log in %s: %w", o.Dir, err)
	}
	snapshots, err := raft.NewFileSnapshotStoreWithLogger(o.Dir, 2, logger)
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	address, transport := raft.NewInmemTransport(raft.ServerAddress(id))
	existing, err := raft.HasExistingState(store, store, snapshots)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("read metadata log in %s: %w", o.Dir, err), store.Close())
	}
	if !existing {
		servers := raft.Configuration{Servers: []raft.Server{{ID: id, Address: address}}}
		if err := raft.BootstrapCluster(c, store, store, snapshots, transport, servers); err != nil {
			return nil, errors.Join(fmt.Errorf("found the quorum: %w", err), store.Close())
		}
	}
	f := &fsm{changed: make(chan struct{})}
	f.image.Store(metadata.Empty())
	r, err := raft.NewRaft(c, f, store, store, snapshots, transport)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the quorum in %s: %w", o.Dir, err), store.Close())
	}
	return &Node{raft: r, store: store, fsm: f}, nil
}

// AwaitLeader returns once this node leads and has applied all that was committed before.
func (n *Node) AwaitLeader(ctx context.Context) error {
	for n.raft.State() != raft.Leader {
		select {
		case <-n.raft.LeaderCh():
		case <-time.After(2 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("no leader of the metadata quorum: %w", ctx.Err())
		}
	}
	if err := n.raft.Barrier(timeout(ctx)).Error(); err != nil {
		return fmt.Errorf("apply the metadata log: %w", err)
	}
	return n.fsm.err()
}

// Propose makes a batch of records durable and applies it. It returns the image that holds them.
func (n *Node) Propose(ctx context.Context, records []metadata.Record) (*metadata.Image, error) {
	if len(records) == 0 {
		return n.Image(), nil
	}
	if err := n.fsm.err(); err != nil {
		return nil, err
	}
	batch, err := metadata.Marshal(records)
	if err != nil {
		return nil, err
	}
	future := n.raft.Apply(batch, timeout(ctx))
	if err := future.Error(); err != nil {
		if errors.Is(err, raft.ErrNotLeader) || errors.Is(err, raft.ErrLeadershipLost) {
			return nil, fmt.Errorf("%w: %w", ErrNotController, err)
		}
		return nil, fmt.Errorf("write metadata: %w", err)
	}
	switch r := future.Response().(type) {
	case *metadata.Image:
		return r, nil
	case error:
		return nil, r
	}
	return n.Image(), nil
}

// Image is the newest applied image.
func (n *Node) Image() *metadata.Image { return n.fsm.image.Load() }

// Changed returns a channel that is closed when an image newer than the present one has been applied.
// Take the channel first, then the image, and none is missed.
func (n *Node) Changed() <-chan struct{} {
	n.fsm.mu.Lock()
	defer n.fsm.mu.Unlock()
	return n.fsm.changed
}

// Leading reports whether this node leads the quorum now.
func (n *Node) Leading() bool { return n.raft.State() == raft.Leader }

// Snapshot takes a snapshot now; raft takes them by itself too.
func (n *Node) Snapshot() error {
	err := n.raft.Snapshot().Error()
	if errors.Is(err, raft.ErrNothingNewToSnapshot) {
		return nil
	}
	return err
}

// Close stops the node and waits for it.
func (n *Node) Close() error {
	return errors.Join(n.raft.Shutdown().Error(), n.store.Close())
}

func timeout(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return max(time.Until(deadline), time.Millisecond)
	}
	return 30 * time.Second
}

// fsm folds committed entries into the image. A batch that does not apply poisons the node: going on would diverge.
type fsm struct {
	image    atomic.Pointer[metadata.Image]
	mu       sync.Mutex
	changed  chan struct{}
	poisoned error
}

func (f *fsm) err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.poisoned
}

func (f *fsm) Apply(entry *raft.Log) any {
	if err := f.err(); err != nil {
		return err
	}
	records, err := metadata.Unmarshal(entry.Data)
	if err == nil {
		var next *metadata.Image
		if next, err = f.image.Load().Apply(records); err == nil {
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

func (f *fsm) Snapshot() (raft.FSMSnapshot, error) {
	if err := f.err(); err != nil {
		return nil, err
	}
	return snapshot{f.image.Load()}, nil
}

func (f *fsm) Restore(r io.ReadCloser) error {
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	records, err := metadata.Unmarshal(b)
	if err != nil {
		return fmt.Errorf("metadata snapshot: %w", err)
	}
	next, err := metadata.Empty().Apply(records)
	if err != nil {
		return fmt.Errorf("metadata snapshot: %w", err)
	}
	f.publish(next)
	return nil
}

type snapshot struct{ image *metadata.Image }

func (s snapshot) Persist(sink raft.SnapshotSink) error {
	b, err := metadata.Marshal(s.image.Records())
	if err == nil {
		_, err = sink.Write(b)
	}
	if err != nil {
		return errors.Join(err, sink.Cancel())
	}
	return sink.Close()
}

func (snapshot) Release() {}

// hclogAdapter sends raft's lines to slog: its warnings and errors at their level, the rest as debug.
func hclogAdapter(l *slog.Logger) hclog.Logger {
	level := hclog.Warn
	if l.Enabled(context.Background(), slog.LevelDebug) {
		level = hclog.Debug
	}
	return hclog.New(&hclog.LoggerOptions{Name: "raft", Level: level, Output: slogWriter{l}, DisableTime: true})
}

type slogWriter struct{ l *slog.Logger }

func (w slogWriter) Write(p []byte) (int, error) {
	text := string(p)
	level := slog.LevelDebug
	switch {
	case len(text) > 7 && text[:7] == "[ERROR]":
		level, text = slog.LevelError, text[7:]
	case len(text) > 6 && text[:6] == "[WARN]":
		// Single voters "lose" heartbeats at every start; that is ordinary.
		level, text = slog.LevelDebug, text[6:]
	}
	for len(text) > 0 && (text[len(text)-1] == '\n' || text[len(text)-1] == ' ') {
		text = text[:len(text)-1]
	}
	w.l.Log(context.Background(), level, "quorum:"+text)
	return len(p), nil
}
