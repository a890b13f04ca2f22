// Package quorum makes metadata records durable and ordered: hashicorp/raft with a BoltDB log over connections of package
// peer, whose state machine is the metadata image. It decides nothing about the records.
//
// Voters elect the leader and make entries durable; every other node is a non-voter, which follows the log, so that its
// image is at hand too. Which nodes belong to the quorum is part of the log.
//
// Concurrency: everything may be called from anywhere at any time. Of two proposals that were computed from the same
// image one is refused.
package quorum

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/peer"
)

var (
	// ErrNotController is returned on a node that does not lead the quorum, or has just ceased to.
	ErrNotController = errors.New("this node is not the active controller")
	// ErrOutcomeUnknown comes with ErrNotController if leadership was lost while an entry was being committed: the next leader
	// may have it, or not.
	ErrOutcomeUnknown = errors.New("it is not known whether the change was made")
)

// The metadata log, and how many snapshots are beside it.
const (
	logFile       = "raft.db"
	snapshotsKept = 2
)

// Options of Open.
type Options struct {
	Dir    string // folder of the metadata log and its snapshots, created if missing
	NodeID int32
	Logger *slog.Logger
	// SnapshotThreshold is the number of entries after which a snapshot is taken; 0 means 8192.
	SnapshotThreshold uint64
	// ElectionTimeout is the silence after which voters elect another leader, and after which a leader that reaches no majority
	// gives up; 0 means a second. It does not delay a voter that is alone.
	ElectionTimeout time.Duration
	// Hub connects to the other nodes. The service "raft" is registered with it; its identity must tell Fresh and Voters.
	// nil makes a node that can only be alone.
	Hub *peer.Hub
	// Voters found the quorum, if this node has no metadata log yet. Empty, or this node alone, founds it at once; without this
	// node, it waits until a leader adds it.
	Voters []config.Voter
	// Address is where other nodes reach this one, HOST:PORT.
	Address string
	// Lost is what Open returns instead of founding a quorum of this node alone, if not nil: the caller knows that there was one,
	// so that an empty folder means a lost metadata log.
	Lost error
}

// Node is one member of the quorum, or one that waits to be.
type Node struct {
	o         Options
	raft      *raft.Raft
	store     *raftboltdb.BoltStore
	fsm       *fsm
	debt      *debt
	transport *transport
	found     []config.Voter // to be founded by Run
	closing   chan struct{}
	all       sync.WaitGroup
	former    atomic.Int32 // last leader that was not this node, -1 if none
	waiting   atomic.Pointer[string]

	mu         sync.Mutex
	leadership Leadership
	turned     chan struct{} // closed when leadership changes
	failed     chan struct{} // closed with failure
	failure    error
}

// Open starts the node; Run founds the quorum if that needs other nodes, AwaitLeader tells when there is one. The same
// folder must not be open twice: BoltDB's lock refuses after a second.
func Open(o Options) (_ *Node, err error) {
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return nil, err
	}
	if o.Address == "" {
		o.Address = fmt.Sprint(o.NodeID)
	}
	n := &Node{o: o, fsm: newFSM(), closing: make(chan struct{}), turned: make(chan struct{}), failed: make(chan struct{})}
	n.former.Store(-1)
	n.leadership.Former = -1
	var running atomic.Pointer[raft.Raft]
	logger := newLogger(o.Logger, func() bool {
		r := running.Load()
		return r == nil || len(r.GetConfiguration().Configuration().Servers) < 2
	})
	c := raft.DefaultConfig()
	c.LocalID = serverID(o.NodeID)
	c.Logger = logger
	c.HeartbeatTimeout = time.Second
	if o.ElectionTimeout > 0 {
		c.HeartbeatTimeout = o.ElectionTimeout
	}
	c.ElectionTimeout, c.LeaderLeaseTimeout = c.HeartbeatTimeout, c.HeartbeatTimeout
	// A follower learns that an entry is committed this much, or twice as much, later if no other entry follows.
	c.CommitTimeout = 10 * time.Millisecond
	c.SnapshotThreshold = 8192
	if o.SnapshotThreshold > 0 {
		c.SnapshotThreshold = o.SnapshotThreshold
	}
	c.SnapshotInterval = 30 * time.Second
	c.TrailingLogs = 1024
	if o.SnapshotThreshold > 0 && o.SnapshotThreshold < c.TrailingLogs {
		c.TrailingLogs = o.SnapshotThreshold
	}
	c.NoLegacyTelemetry = true

	n.store, err = raftboltdb.New(raftboltdb.Options{Path: filepath.Join(o.Dir, logFile)})
	if err != nil {
		return nil, fmt.Errorf("open metadata log in %s: %w", o.Dir, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.store.Close())
		}
	}()
	snapshots, err := raft.NewFileSnapshotStoreWithLogger(o.Dir, snapshotsKept, logger)
	if err != nil {
		return nil, err
	}
	existing, err := raft.HasExistingState(n.store, n.store, snapshots)
	if err != nil {
		return nil, fmt.Errorf("read metadata log in %s: %w", o.Dir, err)
	}
	alone := len(o.Voters) == 0 || len(o.Voters) == 1 && o.Voters[0].ID == o.NodeID
	if !existing && alone && o.Lost != nil {
		return nil, o.Lost
	}
	if n.debt, err = openDebt(o.Dir, !existing && !alone); err != nil {
		return nil, fmt.Errorf("metadata log in %s: %w", o.Dir, err)
	}
	n.transport = n.newTransport(logger, c.ElectionTimeout)
	n.transport.applied = func() uint64 {
		if r := running.Load(); r != nil {
			return r.AppliedIndex()
		}
		return 0
	}
	n.transport.leads = func(id raft.ServerID, at raft.ServerAddress, term uint64) bool {
		r := running.Load()
		if r == nil || r.State() != raft.Leader || r.CurrentTerm() != term {
			return false
		}
		return slices.ContainsFunc(r.GetConfiguration().Configuration().Servers, func(s raft.Server) bool { return s.ID == id && s.Address == at })
	}
	switch {
	case existing:
	case alone:
		if err := raft.BootstrapCluster(c, n.store, n.store, snapshots, n.transport, configuration([]config.Voter{{ID: o.NodeID, Address: o.Address}})); err != nil {
			return nil, errors.Join(fmt.Errorf("found the quorum: %w", err), n.transport.Close())
		}
		n.debt.forgive() // of a time when it was meant to have others beside it
	case slices.ContainsFunc(o.Voters, func(v config.Voter) bool { return v.ID == o.NodeID }):
		n.found = o.Voters
		n.wait("asking the voters whether there is a quorum")
	}
	n.raft, err = raft.NewRaft(c, n.fsm, n.store, n.store, snapshots, n.transport)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the quorum in %s: %w", o.Dir, err), n.transport.Close())
	}
	running.Store(n.raft)
	n.raft.RegisterObserver(raft.NewObserver(nil, false, n.observe))
	n.transport.start()
	n.all.Go(n.watch)
	if servers := n.raft.GetConfiguration().Configuration().Servers; len(servers) > 0 && n.onlyVoter(servers) {
		// It waits for nobody's vote.
		n.transport.nominate()
	}
	return n, nil
}

func (n *Node) newTransport(logger hclog.Logger, election time.Duration) *transport {
	if n.o.Hub == nil {
		_, t := raft.NewInmemTransport(raft.ServerAddress(n.o.Address))
		return newTransport(t, nil, n.debt)
	}
	s := newStream(n.o.Hub, n.o.Address)
	t := raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{Stream: s, MaxPool: 3, Logger: logger, Timeout: max(2*election, 2*time.Second)})
	return newTransport(t, s, n.debt)
}

func configuration(voters []config.Voter) raft.Configuration {
	var c raft.Configuration
	for _, v := range voters {
		c.Servers = append(c.Servers, raft.Server{ID: serverID(v.ID), Address: raft.ServerAddress(v.Address)})
	}
	return c
}

func (n *Node) onlyVoter(servers []raft.Server) bool {
	for _, s := range servers {
		if s.Suffrage == raft.Voter && s.ID != serverID(n.o.NodeID) {
			return false
		}
	}
	return slices.ContainsFunc(servers, func(s raft.Server) bool { return s.ID == serverID(n.o.NodeID) && s.Suffrage == raft.Voter })
}

// AwaitLeader returns once a leader is known; if that is this node, once it has applied all that was committed before.
func (n *Node) AwaitLeader(ctx context.Context) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		if n.raft.State() == raft.Leader {
			err := n.raft.Barrier(timeout(ctx)).Error()
			if err == nil {
				return n.fsm.err()
			}
			if !lostLeadership(err) {
				return fmt.Errorf("apply the metadata log: %w", err)
			}
		} else if n.LeaderID() >= 0 {
			return n.fsm.err()
		}
		select {
		case <-tick.C:
		case <-n.failed:
			return n.failure
		case <-n.closing:
			return errors.New("the quorum is being closed")
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", n.Waiting(), ctx.Err())
		}
	}
}

// Propose makes a batch of records durable, which were computed from base, and applies it. It returns the image that holds them.
// ErrConflict means that base is not the newest image, and that nothing was changed; ErrNotController that this node does not lead,
// with ErrOutcomeUnknown if it stopped to while the batch was on its way.
func (n *Node) Propose(ctx context.Context, base *metadata.Image, records []metadata.Record) (*metadata.Image, error) {
	if len(records) == 0 {
		return n.Image(), nil
	}
	if err := n.fsm.err(); err != nil {
		return nil, err
	}
	entry, err := encode(base.Index, records)
	if err != nil {
		return nil, err
	}
	future := n.raft.Apply(entry, timeout(ctx))
	if err := future.Error(); err != nil {
		return nil, proposalError("write metadata", err)
	}
	switch r := future.Response().(type) {
	case *metadata.Image:
		return r, nil
	case error:
		return nil, r
	}
	return n.Image(), nil
}

func lostLeadership(err error) bool {
	return errors.Is(err, raft.ErrNotLeader) || errors.Is(err, raft.ErrLeadershipLost) || errors.Is(err, raft.ErrLeadershipTransferInProgress) || errors.Is(err, raft.ErrRaftShutdown)
}

func proposalError(what string, err error) error {
	switch {
	case errors.Is(err, raft.ErrLeadershipLost) || errors.Is(err, raft.ErrRaftShutdown):
		return fmt.Errorf("%w: %w: %w", ErrNotController, ErrOutcomeUnknown, err)
	case lostLeadership(err):
		return fmt.Errorf("%w: %w", ErrNotController, err)
	}
	return fmt.Errorf("%s: %w", what, err)
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

// Snapshot takes a snapshot now; raft takes them by itself too.
func (n *Node) Snapshot() error {
	err := n.raft.Snapshot().Error()
	if errors.Is(err, raft.ErrNothingNewToSnapshot) {
		return nil
	}
	return err
}

// transferTimeout bounds how long Close looks for a successor.
const transferTimeout = 2 * time.Second

// Close hands leadership to another voter if there is one, stops the node and waits for it.
func (n *Node) Close() error {
	if n.raft.State() == raft.Leader && !n.onlyVoter(n.raft.GetConfiguration().Configuration().Servers) {
		ctx, cancel := context.WithTimeout(context.Background(), transferTimeout)
		if err := n.TransferLeadership(ctx); err != nil {
			n.o.Logger.Warn("no voter took over the metadata quorum, the others elect one when they miss this node", "cause", err)
		}
		cancel()
	}
	n.mu.Lock()
	select {
	case <-n.closing:
		n.mu.Unlock()
		return nil
	default:
	}
	close(n.closing)
	n.mu.Unlock()
	err := n.raft.Shutdown().Error()
	err = errors.Join(err, n.transport.Close())
	n.all.Wait()
	return errors.Join(err, n.store.Close())
}

func timeout(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return max(time.Until(deadline), time.Millisecond)
	}
	return 30 * time.Second
}
