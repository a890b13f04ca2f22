package broker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"time"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/control"
	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/peer"
	"github.com/varve-io/varve/internal/quorum"
)

// endpoints are the addresses that clients and other nodes are told to use.
func (b *broker) endpoints(ports *ports) ([]metadata.Endpoint, error) {
	advertised, err := config.ParseListeners(b.static.Get("advertised.listeners"))
	if err != nil {
		return nil, err
	}
	if len(advertised) == 0 {
		advertised = append(advertised, ports.kafka...)
	}
	var out []metadata.Endpoint
	for i, l := range advertised {
		if l.Port == 0 && i < len(ports.bound) {
			l.Port = ports.bound[i].Addr().(*net.TCPAddr).Port
		}
		if ip := net.ParseIP(l.Host); l.Host == "" || ip != nil && ip.IsUnspecified() {
			l.Host = "localhost"
			b.log.Warn("listening on all interfaces but telling clients to use localhost: set advertised.listeners so that other machines can connect", "listener", ports.kafka[min(i, len(ports.kafka)-1)].Address())
		}
		out = append(out, metadata.Endpoint{Name: l.Name, Host: l.Host, Port: int32(l.Port)})
	}
	name := config.PeerListener(b.static)
	for _, e := range out {
		if e.Name == name {
			b.address = net.JoinHostPort(e.Host, strconv.Itoa(int(e.Port)))
			return out, nil
		}
	}
	return nil, fmt.Errorf("inter.broker.listener.name: %s is not advertised, so that other nodes cannot reach this one", name)
}

// openQuorum opens the metadata log. Whether there is a quorum shows later.
func (b *broker) openQuorum(endpoints []metadata.Endpoint) (err error) {
	b.notReady("no quorum yet")
	if b.voters, err = config.ParseVoters(b.static.Get("controller.quorum.voters")); err != nil {
		return err
	}
	voters := b.voters
	if len(voters) == 0 && b.static.Get("controller.quorum.bootstrap.servers") != "" {
		// It joins a cluster, so that it must not found one of its own.
		voters = []config.Voter{{ID: -1, Address: b.static.List("controller.quorum.bootstrap.servers")[0]}}
	}
	for _, v := range voters {
		if v.ID == b.self && v.Address != b.address {
			return fmt.Errorf("controller.quorum.voters says that node %d is at %s, but other nodes will be told %s: make them the same", b.self, v.Address, b.address)
		}
	}
	b.nodes = newNodes(b)
	var lost error
	if b.dir.meta != nil && len(voters) == 0 {
		// A lost metadata log must not turn the directory into another cluster's.
		lost = fmt.Errorf("data directory %s belongs to cluster %s, but its metadata log in %s is empty: restore it from a copy", b.dir.path, b.dir.meta.ClusterID, filepath.Join(b.dir.path, metadataDir))
	}
	b.quorum, err = quorum.Open(quorum.Options{Dir: filepath.Join(b.dir.path, metadataDir), NodeID: b.self, Logger: b.log, Hub: b.nodes.hub, Voters: voters, Address: b.address,
		ElectionTimeout: b.static.Millis("controller.quorum.election.timeout.ms"), Lost: lost})
	return err
}

// clusterID is the cluster that this node belongs to, "" if it does not know yet.
func (b *broker) clusterID() string {
	if b.quorum != nil {
		if id := b.quorum.Image().ClusterID; id != "" {
			return id
		}
	}
	if b.dir.meta != nil {
		return b.dir.meta.ClusterID
	}
	return b.static.Get("cluster.id")
}

// bootstrapServers are the nodes to ask for the quorum's leader.
func (b *broker) bootstrapServers() []string {
	out := b.static.List("controller.quorum.bootstrap.servers")
	for _, v := range b.voters {
		if v.ID != b.self {
			out = append(out, v.Address)
		}
	}
	for _, m := range b.quorum.Status().Members {
		if m.ID != b.self {
			out = append(out, m.Address)
		}
	}
	return out
}

// join makes this run of the broker a member of the cluster, and opens its partitions.
func (b *broker) join(ctx context.Context, endpoints []metadata.Endpoint) error {
	b.notReady("joining the cluster")
	record := metadata.BrokerRecord{ID: b.self, Incarnation: b.incarnation, Rack: b.static.Get("broker.rack"), Listeners: endpoints, PeerListener: config.PeerListener(b.static), Directory: b.dir.id}
	said := ""
	// Whoever has this id may have died just now.
	taken := time.Now().Add(b.static.Millis("broker.session.timeout.ms"))
	for {
		if err := b.nameCluster(ctx); err != nil {
			return err
		}
		attempt, cancel := context.WithTimeout(ctx, 2*time.Second)
		registered, err := control.Record[controller.Registered](attempt, b.control, controller.RegisterCommand{Broker: record})
		cancel()
		if err == nil {
			b.epoch.Store(registered.Epoch)
			break
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if fatal(err) || errors.Is(err, controller.ErrDuplicateBroker) && time.Now().After(taken) {
			return fmt.Errorf("join the cluster: %w", err)
		}
		why := b.quorum.Waiting()
		var turned *peer.RefusedError
		switch {
		case errors.As(err, &turned):
			why = turned.Error() // which says more than that this node is no member yet
		case why == "":
			why = err.Error()
		}
		b.notReady(why)
		if why != said {
			b.log.Info("waiting for the cluster", "cause", why)
			said = why
		}
		if errors.Is(err, controller.ErrDuplicateBroker) {
			select {
			case <-time.After(200 * time.Millisecond):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	b.notReady("reading the metadata log")
	for {
		changed := b.quorum.Changed()
		img := b.quorum.Image()
		me, ok := img.Brokers[b.self]
		if ok && me.Incarnation == b.incarnation {
			break
		}
		if ok && me.Epoch > b.epoch.Load() {
			return b.join(ctx, endpoints) // a registration of the run before came late
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	cluster := b.quorum.Image().ClusterID
	if want := b.static.Get("cluster.id"); want != "" && want != cluster {
		return fmt.Errorf("this is cluster %s, not %s as cluster.id says", cluster, want)
	}
	if err := b.dir.claim(cluster, b.self); err != nil {
		return err
	}
	return b.begin(ctx)
}

// nameCluster gives a new cluster its name, if this node leads it.
func (b *broker) nameCluster(ctx context.Context) error {
	if l, _ := b.quorum.Leadership(); !l.Leading {
		// A quorum that is this node alone leads in a moment.
		wait, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		err := b.quorum.AwaitLeader(wait)
		cancel()
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
	}
	if l, _ := b.quorum.Leadership(); !l.Leading || b.quorum.Image().ClusterID != "" && b.static.Get("cluster.id") == "" {
		return nil
	}
	_, err := b.control.Record(ctx, controller.BootstrapCommand{ID: b.static.Get("cluster.id")})
	var refused *controller.Error
	if errors.As(err, &refused) {
		return err
	}
	return nil // leadership has moved on: the next attempt asks again
}

// fatal reports refusals that waiting does not mend.
func fatal(err error) bool {
	var refused *controller.Error
	var turned *peer.RefusedError
	return errors.As(err, &refused) && !errors.Is(err, controller.ErrFenced) && !errors.Is(err, controller.ErrDuplicateBroker) ||
		errors.As(err, &turned) && turned.Cluster
}
