package quorum

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"

	"github.com/varve-io/varve/internal/metadata"
)

// ErrIncomplete refuses to make a quorum of a node that lost its log and had not caught up again.
var ErrIncomplete = errors.New("its metadata log is not complete: it had lost its disk and was still catching up")

// Standing is what the metadata log of a node that does not run holds.
type Standing struct {
	Term    uint64 // of the last entry
	Index   uint64 // of the last entry, committed or not
	Members []Member
	Image   *metadata.Image // with all entries
}

// Inspect reads the log in dir and changes nothing that the node would notice. The node must not run.
func Inspect(dir string, node int32, logger *slog.Logger) (Standing, error) {
	s, release, err := openStopped(dir, node, logger)
	if err != nil {
		return Standing{}, err
	}
	defer release()
	return s.standing()
}

// Recover makes the node the only voter of its quorum, for good and without asking anybody; the other members follow, and can be made
// voters again. It is for a quorum whose majority of voters is lost. Entries that the lost ones had committed and this node never
// got are lost; those that this node has count as committed. What amend makes of the image is the next entry, of a term of its own:
// whatever the nodes that are left have, they get the image anew. None of them may run meanwhile, and the one with the greatest term
// and index should be taken. Lost voters must not come back with their old folders.
func Recover(dir string, node int32, amend func(*metadata.Image) []metadata.Record, logger *slog.Logger) (Standing, error) {
	s, release, err := openStopped(dir, node, logger)
	if err != nil {
		return Standing{}, err
	}
	defer release()
	was, err := s.standing()
	if err != nil {
		return Standing{}, err
	}
	d, err := openDebt(dir, false)
	if err != nil {
		return Standing{}, err
	}
	if d.owes(was.Index) {
		return Standing{}, ErrIncomplete
	}
	if err := s.add(was, amend(was.Image)); err != nil {
		return Standing{}, err
	}
	var next raft.Configuration
	for _, m := range was.Members {
		suffrage := raft.Nonvoter
		if m.ID == node {
			suffrage = raft.Voter
		}
		next.Servers = append(next.Servers, raft.Server{ID: serverID(m.ID), Address: raft.ServerAddress(m.Address), Suffrage: suffrage})
	}
	if err := raft.RecoverCluster(s.config, newFSM(), s.store, s.store, s.snapshots, s.transport, next); err != nil {
		return Standing{}, err
	}
	return s.standing()
}

// currentTerm is raft's key of the term that the node is in.
var currentTerm = []byte("CurrentTerm")

// add appends an entry in a new term. The term comes first, so that a crash in between leaves no entry beyond it.
func (s *stopped) add(to Standing, records []metadata.Record) error {
	term, err := s.store.GetUint64(currentTerm)
	if err != nil {
		return fmt.Errorf("the metadata log's term: %w", err)
	}
	term = max(term, to.Term) + 1
	data, err := encode(to.Image.Index, records)
	if err != nil {
		return err
	}
	if err := s.store.SetUint64(currentTerm, term); err != nil {
		return err
	}
	return s.store.StoreLog(&raft.Log{Index: to.Index + 1, Term: term, Type: raft.LogCommand, Data: data})
}

// stopped is the metadata log of a node that does not run.
type stopped struct {
	node      int32
	config    *raft.Config
	store     *raftboltdb.BoltStore
	snapshots *raft.FileSnapshotStore
	transport raft.Transport
}

func openStopped(dir string, node int32, logger *slog.Logger) (*stopped, func(), error) {
	path := filepath.Join(dir, logFile)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("there is no metadata log in %s", dir)
	} else if err != nil {
		return nil, nil, err
	}
	s := &stopped{node: node, config: raft.DefaultConfig()}
	s.config.LocalID = serverID(node)
	s.config.Logger = newLogger(logger, func() bool { return true })
	s.config.NoLegacyTelemetry = true
	_, s.transport = raft.NewInmemTransport(raft.ServerAddress(fmt.Sprint(node)))
	var err error
	if s.snapshots, err = raft.NewFileSnapshotStoreWithLogger(dir, snapshotsKept, s.config.Logger); err != nil {
		return nil, nil, err
	}
	if s.store, err = raftboltdb.New(raftboltdb.Options{Path: path}); err != nil {
		return nil, nil, fmt.Errorf("open metadata log in %s: %w", dir, err)
	}
	return s, func() { s.store.Close() }, nil
}

func (s *stopped) standing() (Standing, error) {
	if existing, err := raft.HasExistingState(s.store, s.store, s.snapshots); err != nil || !existing {
		return Standing{}, errors.Join(errors.New("the metadata log is empty"), err)
	}
	out := Standing{}
	f := newFSM()
	restored, err := s.snapshots.List()
	if err != nil {
		return Standing{}, err
	}
	// The newest that can be read, as raft does at a start.
	for _, meta := range restored {
		_, source, err := s.snapshots.Open(meta.ID)
		if err != nil {
			continue
		}
		if f.Restore(source) == nil {
			out.Term, out.Index = meta.Term, meta.Index
			break
		}
	}
	if len(restored) > 0 && out.Index == 0 {
		return Standing{}, errors.New("none of the metadata snapshots can be read")
	}
	last, err := s.store.LastIndex()
	if err != nil {
		return Standing{}, err
	}
	for i := out.Index + 1; i <= last; i++ {
		var entry raft.Log
		if err := s.store.GetLog(i, &entry); err != nil {
			return Standing{}, fmt.Errorf("metadata log entry %d: %w", i, err)
		}
		if entry.Type == raft.LogCommand {
			f.Apply(&entry)
		}
		out.Term, out.Index = entry.Term, entry.Index
	}
	if err := f.err(); err != nil {
		return Standing{}, err
	}
	out.Image = f.image.Load()
	c, err := raft.GetConfiguration(s.config, newFSM(), s.store, s.store, s.snapshots, s.transport)
	if err != nil {
		return Standing{}, err
	}
	out.Members = members(c.Servers)
	for _, m := range out.Members {
		if m.ID == s.node {
			return out, nil
		}
	}
	return Standing{}, fmt.Errorf("node %d is no member of the quorum %v", s.node, out.Members)
}
