package broker

import (
	"fmt"
	"io"
	"log/slog"
	"path/filepath"

	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/quorum"
	"github.com/varve-io/varve/internal/vfs"
)

// StoppedNode is the folder of a broker that does not run.
type StoppedNode struct {
	ClusterID string
	NodeID    int32
	path      string
	logger    *slog.Logger
	lock      io.Closer
}

// OpenStopped locks the folder, so that no broker can start on it until Close.
func OpenStopped(path string, logger *slog.Logger) (*StoppedNode, error) {
	fsys := vfs.OS{}
	meta, err := readMeta(fsys, path)
	if err != nil {
		return nil, err
	}
	if meta == nil {
		return nil, fmt.Errorf("%s is no data directory of a broker: there is no %s in it", path, log.MetaFile)
	}
	lock, err := lockDataDir(fsys, path)
	if err != nil {
		return nil, err
	}
	return &StoppedNode{ClusterID: meta.ClusterID, NodeID: meta.NodeID, path: path, logger: logger, lock: lock}, nil
}

// Quorum is what the node's metadata log holds.
func (n *StoppedNode) Quorum() (quorum.Standing, error) {
	return quorum.Inspect(filepath.Join(n.path, metadataDir), n.NodeID, n.logger)
}

// RecoverQuorum makes the node the quorum's only voter; quorum.Recover says what that costs. Nothing is led until the first in sync
// is there again, with its data.
func (n *StoppedNode) RecoverQuorum() (quorum.Standing, error) {
	return quorum.Recover(filepath.Join(n.path, metadataDir), n.NodeID, controller.Halted, n.logger)
}

// Close unlocks the folder.
func (n *StoppedNode) Close() error { return n.lock.Close() }
