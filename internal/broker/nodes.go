package broker

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"sync"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/peer"
)

// replicaService is the name of connections on which followers speak Kafka, among those between nodes.
const replicaService = "kafka"

// nodes are the connections of other nodes to this one. They outlive everything that uses them.
type nodes struct {
	hub    *peer.Hub
	ctx    context.Context
	cancel context.CancelFunc
	all    sync.WaitGroup
}

func newNodes(b *broker) *nodes {
	n := &nodes{}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	var options []peer.Option
	if b.o.Network != nil {
		options = append(options, peer.WithDialer(b.o.Network.DialContext))
	}
	n.hub = peer.New(b.identity, b.checkNode, b.log, options...)
	n.hub.Handle(replicaService, func(ctx context.Context, c peer.Conn) {
		b.server.ServeNode(ctx, c.Conn, config.PeerListener(b.static), c.Hello.NodeID)
	})
	return n
}

// close ends all connections.
func (n *nodes) close() {
	n.cancel()
	n.all.Wait()
}

// serveNode takes over a connection of another node.
func (b *broker) serveNode(listener string, nc net.Conn) {
	if listener != config.PeerListener(b.static) {
		b.log.Warn("a node was turned away: it came by a listener that is not for nodes", "peer", nc.RemoteAddr().String(), "listener", listener, "inter.broker.listener.name", config.PeerListener(b.static))
		nc.Close()
		return
	}
	b.nodes.all.Add(1)
	go func() {
		defer b.nodes.all.Done()
		if err := b.nodes.hub.Serve(b.nodes.ctx, nc); err != nil {
			b.log.Debug("a node's connection ended", "peer", nc.RemoteAddr().String(), "cause", err)
		}
	}()
}

func (b *broker) identity() peer.Identity {
	id := peer.Identity{ClusterID: b.clusterID(), NodeID: b.self, Incarnation: b.incarnation, Address: b.address}
	if b.quorum == nil || b.quorum.Fresh() {
		id.Fresh = true
		for _, v := range b.voters {
			id.Voters = append(id.Voters, v.String())
		}
	}
	return id
}

// checkNode refuses what cannot be true by the metadata: a run of a node that replicates and is not the one that is
// registered. Others may have to connect before they can register.
func (b *broker) checkNode(h peer.Hello) error {
	if h.Service != replicaService {
		return nil
	}
	known, ok := b.quorum.Image().Brokers[h.NodeID]
	switch {
	case !ok:
		return fmt.Errorf("broker %d is not registered", h.NodeID)
	case known.Incarnation != h.Incarnation:
		return fmt.Errorf("broker %d has another incarnation than the one that is registered", h.NodeID)
	}
	return nil
}

// dialReplica connects to a broker to replicate from it.
func (b *broker) dialReplica(ctx context.Context, id int32) (net.Conn, error) {
	known, ok := b.quorum.Image().Brokers[id]
	if !ok {
		return nil, fmt.Errorf("broker %d is not registered", id)
	}
	e, ok := known.Peer()
	if !ok {
		return nil, fmt.Errorf("broker %d has no address for other nodes", id)
	}
	c, _, err := b.nodes.hub.Dial(ctx, net.JoinHostPort(e.Host, strconv.Itoa(int(e.Port))), id, replicaService)
	return c, err
}

// rack is a broker's rack, "" for none.
func (b *broker) rack(id int32) string {
	if known, ok := b.quorum.Image().Brokers[id]; ok {
		return known.Rack
	}
	return ""
}
