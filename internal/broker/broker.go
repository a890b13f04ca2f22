// Package broker puts a server together: it opens the data directory, joins the quorum, reconciles its partitions to the
// metadata image, and runs the services until it is told to stop. It decides nothing; what has to be done for an image is
// the pure function in reconcile.go.
package broker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/consumergroup"
	"github.com/varve-io/varve/internal/control"
	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/coordinator"
	"github.com/varve-io/varve/internal/debughttp"
	"github.com/varve-io/varve/internal/fetch"
	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/kafkaapi"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/quorum"
	"github.com/varve-io/varve/internal/replication"
	"github.com/varve-io/varve/internal/server"
	"github.com/varve-io/varve/internal/tiering"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/transact"
	"github.com/varve-io/varve/internal/vfs"
)

// Options of Run. Config and Logger are required.
type Options struct {
	Config  config.Values
	Logger  *slog.Logger
	Started func(addresses []string) // called once when clients are served, with the bound addresses
	FS      vfs.FS                   // of the partitions; nil is the operating system's
	Network Network                  // of clients and other nodes; nil is the operating system's
	Bucket  objstore.Bucket          // in place of the one that varve.bucket names, if not nil
}

// Network is what a broker listens on and reaches other nodes by. Addresses are HOST:PORT.
type Network interface {
	Listen(address string) (net.Listener, error)
	DialContext(ctx context.Context, address string) (net.Conn, error)
}

// Run serves until ctx ends and then stops cleanly within varve.shutdown.timeout.ms, whatever clients and store do.
func Run(ctx context.Context, o Options) error {
	b := &broker{o: o, static: o.Config, log: o.Logger, self: int32(o.Config.Int("node.id")), registry: prometheus.NewRegistry(),
		replicas: &replicas{byID: map[tp.Partition]*partitionOf{}}}
	var err error
	if b.incarnation, err = tp.NewUUID(rand.Reader); err != nil {
		return err
	}
	b.epoch.Store(-1)
	b.overlay(metadata.Empty())
	b.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	b.notReady("starting")
	err = b.run(ctx)
	if err != nil && ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = nil
	}
	return err
}

// broker is a server that runs.
type broker struct {
	o        Options
	static   config.Values
	log      *slog.Logger
	self     int32
	registry *prometheus.Registry
	ready    atomic.Pointer[string] // why not, nil when serving

	incarnation tp.UUID
	address     string // where other nodes reach this one
	voters      []config.Voter

	dir          *dataDir
	files        *log.FileCache
	nodes        *nodes
	quorum       *quorum.Node
	control      *control.Client
	replicas     *replicas
	replication  *replication.Service
	groups       *coordinator.Groups
	transactions *coordinator.Transactions
	transact     *transact.Service
	tier         *tierParts // nil if tiering is off
	metrics      *kafkaapi.Metrics
	replicated   *replicationMetrics
	throttles    *throttles
	cleaner      *cleaner
	server       *server.Server

	seen     *metadata.Image // the last one that was acted on; unopened is what is left of it
	unopened []tp.Partition
	applied  atomic.Pointer[metadata.Image] // what the partitions live by
	overlaid atomic.Pointer[config.Values]  // its configuration
	changed  atomic.Pointer[chan struct{}]  // closed when applied moves on
	epoch    atomic.Int64                   // broker epoch of this run, -1 before it is registered
	lease    lease

	flusher  *flusher
	isrs     *marked
	restores restores

	stopping chan struct{} // closed when no more requests are read
}

func (b *broker) notReady(why string) { b.ready.Store(&why) }

func (b *broker) run(ctx context.Context) (err error) {
	// Ports first: a busy port is the most common reason to fail and needs no data directory.
	ports, err := listen(b.static, b.o.Network)
	defer ports.close()
	if err != nil {
		return err
	}
	fsys := b.o.FS
	if fsys == nil {
		fsys = vfs.OS{}
	}
	if b.dir, err = openDataDir(fsys, b.static.Get("log.dir"), b.log); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.dir.lock.Close()) }()
	if err := b.dir.check(b.static.Get("cluster.id"), b.self); err != nil {
		return err
	}
	b.files = log.NewFileCache(b.dir.fs, b.openFilesMax())
	endpoints, err := b.endpoints(ports)
	if err != nil {
		return err
	}
	if err := b.openQuorum(endpoints); err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, b.quorum.Close())
		b.nodes.close() // the quorum hands its leadership on over these
	}()
	if err := b.assemble(); err != nil {
		return err
	}
	// Everything that runs ends with this group. Its context is not ctx: what runs is stopped in order, not all at once.
	group, groupCtx := errgroup.WithContext(context.WithoutCancel(ctx))
	groupCtx, stopAll := context.WithCancel(groupCtx)
	defer stopAll()
	if ports.http != nil {
		group.Go(func() error {
			return debughttp.Serve(groupCtx, ports.http, debughttp.Options{Registry: b.registry, Ready: b.cause, Pprof: b.static.Bool("varve.http.pprof")})
		})
	}
	group.Go(func() error { return b.quorum.Run(groupCtx) })
	group.Go(func() error { return b.control.Run(groupCtx) })
	// Other nodes are served from now on, clients when the broker is ready for them.
	serveCtx, stopServing := context.WithCancel(groupCtx)
	defer stopServing()
	serving, servingCtx := errgroup.WithContext(serveCtx)
	for i, l := range ports.kafka {
		serving.Go(func() error { return b.server.Serve(servingCtx, l.Name, ports.bound[i]) })
	}
	startCtx, stopStart := context.WithCancel(groupCtx)
	defer context.AfterFunc(ctx, stopStart)()
	defer context.AfterFunc(servingCtx, stopStart)()
	if err := b.join(startCtx, endpoints); err != nil {
		stopServing()
		err = errors.Join(err, serving.Wait())
		stopAll()
		return errors.Join(err, ignoreCancel(group.Wait()), b.closeLogs(false, time.Now().Add(b.static.Millis("varve.shutdown.timeout.ms"))))
	}
	b.background(groupCtx, group)
	if err := b.enter(startCtx); err == nil {
		b.server.Admit()
		b.ready.Store(nil)
		if b.o.Started != nil {
			b.o.Started(ports.addresses())
		}
		debug.FreeOSMemory() // what start-up left behind is not needed again
	} else {
		b.server.Admit()
	}
	var failed error
	select {
	case <-ctx.Done():
	case <-groupCtx.Done():
		failed = context.Cause(groupCtx)
	case <-servingCtx.Done(): // a listener failed; stop returns why
	}
	return errors.Join(failed, b.stop(stopServing, serving.Wait, stopAll, group.Wait))
}

// openFilesMax is how many segment files may stay open: half of what the system allows at most, the rest is for connections.
func (b *broker) openFilesMax() int {
	wanted := b.static.Int("varve.max.open.files")
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Cur/2 >= uint64(wanted) {
		return wanted
	}
	half := max(int(limit.Cur/2), 16)
	b.log.Warn("the system's limit of open files is low: fewer segment files stay open", "limit", limit.Cur, "varve.max.open.files", wanted, "used", half)
	return half
}

// cause says why the broker is not ready.
func (b *broker) cause() error {
	if why := b.ready.Load(); why != nil {
		return errors.New(*why)
	}
	if why := b.quorum.Waiting(); why != "" {
		return errors.New(why)
	}
	if !b.lease.held() {
		return errors.New("the controller does not answer: this broker leads nothing until it does")
	}
	for _, p := range b.replicas.all() {
		if err := p.Cause(); err != nil {
			return fmt.Errorf("partition %s is offline: %w", p.ID(), err)
		}
	}
	return nil
}

// stop ends the server in order: no new requests, the running ones answered, then background work, logs, and the mark
// of a clean end. The time for it is bounded; what does not end by then is cut off, and the next start scans.
func (b *broker) stop(stopServing func(), served func() error, stopAll func(), ended func() error) error {
	b.notReady("stopping")
	limit := b.static.Millis("varve.shutdown.timeout.ms")
	b.log.Info("stopping", "timeout", limit.String())
	deadline := time.Now().Add(limit)
	grace := time.AfterFunc(limit/2, b.server.CloseAll)
	defer grace.Stop()
	b.leave(limit / 4)
	b.groups.Close() // answers members that wait for others
	b.transactions.Close()
	defer b.transact.Close()
	stopServing()
	close(b.stopping) // answers consumers that wait for more records
	err := served()
	stopAll()
	done := make(chan error, 1)
	go func() {
		err := ended()
		b.restores.Wait()
		done <- err
	}()
	select {
	case e := <-done:
		err = errors.Join(err, ignoreCancel(e))
	case <-time.After(limit / 4):
		b.log.Warn("background work did not end in time and is left behind")
	}
	if b.tier != nil {
		b.tier.close(limit / 8)
	}
	if least := time.Now().Add(limit / 4); least.After(deadline) {
		deadline = least
	}
	err = errors.Join(err, b.closeLogs(true, deadline))
	if err == nil {
		b.log.Info("stopped cleanly")
	}
	return err
}

func ignoreCancel(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

func (b *broker) env() controller.Env {
	return controller.Env{Now: time.Now().UnixMilli(), Random: rand.Reader, Broker: b.static, TierAvailable: b.tier != nil}
}

// config is the static configuration overlaid with the dynamic one that the broker lives by.
func (b *broker) config() config.Values { return *b.overlaid.Load() }

// overlay takes over the dynamic configuration of an image, which was validated when it was stored.
func (b *broker) overlay(img *metadata.Image) {
	v, err := b.static.With(img.BrokerConfigs[controller.ClusterWide])
	if err != nil {
		v = b.static
	}
	if own, ok := img.BrokerConfigs[b.self]; ok {
		if w, err := v.With(own); err == nil {
			v = w
		}
	}
	b.overlaid.Store(&v)
}

// assemble makes the services. Nothing runs yet.
func (b *broker) assemble() error {
	var err error
	if b.metrics, err = kafkaapi.NewMetrics(b.registry); err != nil {
		return err
	}
	b.flusher = &flusher{marked: newMarked()}
	b.isrs = newMarked()
	b.stopping = make(chan struct{})
	first := make(chan struct{})
	b.changed.Store(&first)
	b.seen = metadata.Empty()
	b.applied.Store(b.seen)
	b.control = control.New(control.Options{NodeID: b.self, Quorum: b.quorum, Hub: b.nodes.hub, Env: b.env, Await: b.await, Bootstrap: b.bootstrapServers,
		SessionTimeout: b.static.Millis("broker.session.timeout.ms"), Grace: min(b.static.Millis("varve.broker.disconnect.grace.ms"), b.static.Millis("broker.session.timeout.ms")),
		Logger: b.log})
	b.groups = coordinator.New(b.groupConfig(), b.log)
	ids := control.NewProducerIDs(b.control)
	b.transact = transact.New(transact.Options{Self: b.self, Image: b.quorum.Image, Dial: b.dialReplica, Replicas: b.replicas, Groups: b.groups,
		Transactions: func() *coordinator.Transactions { return b.transactions }, Log: b.log})
	b.transactions = coordinator.NewTransactions(b.transactionConfig, ids.Next, b.transact.Markers, b.log)
	if b.replicated, err = newReplicationMetrics(b.registry); err != nil {
		return err
	}
	b.throttles = newThrottles()
	if b.cleaner, err = newCleaner(b.registry); err != nil {
		return err
	}
	b.cleaner.bound(b.config())
	if b.static.Bool("remote.log.storage.system.enable") {
		if err := b.openTier(); err != nil {
			return err
		}
	}
	fetcher := &fetch.Service{Replicas: b.replicas, Sessions: fetch.NewSessions(b.static.Int("max.incremental.fetch.session.cache.slots")),
		Validity: b.deleteDelay(), TierFailed: b.tierFailed, Stopping: b.stopping, Throttle: b.throttleLeader}
	if b.static.Get("replica.selector.class") != "" {
		fetcher.Racks = b.rack
	}
	b.openReplication()
	services := kafkaapi.Services{NodeID: b.self, Quorum: b.quorum.Status, Replication: b.replication.Status, Thin: b.isThin, Image: b.quorum.Image, Changed: b.quorum.Changed, Static: b.static, Config: b.config, Control: b.control, ProducerIDs: ids,
		Replicas: b.replicas, Fetch: fetcher, Groups: b.groups, Transactions: b.transactions, Enlist: b.transact.Enlist, LogDir: b.dir.path, DiskUsage: diskUsage(b.dir.path), Log: b.log, Metrics: b.metrics,
		// Without a delay a place could be gone before its reader gets there.
		DirectFetch: b.tier != nil && b.static.Bool("varve.direct.fetch.enable") && b.deleteDelay() > 0}
	if b.tier != nil {
		fetcher.Tier, fetcher.KeyPrefix = b.tier.reader, b.static.Get("rsm.config.key.prefix")
		if b.static.Get("remote.fetch.grants") == "presigned" {
			fetcher.Grant = b.grant
		}
		services.TierLookup, services.TierLag = b.tier.reader, b.tier.service.Lag
	}
	limits := server.Limits{FrameMax: b.static.Int("socket.request.max.bytes"), ConnectionsMax: b.static.Int("max.connections"),
		Idle: b.static.Millis("connections.max.idle.ms")}
	connections := prometheus.NewGauge(prometheus.GaugeOpts{Name: "kafka_server_socketservermetrics_connection_count", Help: "Open client connections."})
	refused := prometheus.NewCounter(prometheus.CounterOpts{Name: "varve_connections_refused_total", Help: "Connections closed because max.connections were open."})
	b.registry.MustRegister(connections, refused, b.gauges(), clusterGauges{b})
	b.server = server.New(kafkaapi.New(services), limits, b.log, server.Metrics{Connections: func(d int) { connections.Add(float64(d)) }, Refused: refused.Inc}, b.serveNode)
	return nil
}

// groupConfig returns the source of the groups' settings. All but the number of partitions are static: each request asks for them.
func (b *broker) groupConfig() func() coordinator.Config {
	c := b.static
	policy := c.Get("group.consumer.migration.policy")
	static := coordinator.Config{Partitions: c.Int("offsets.topic.num.partitions"), Image: b.quorum.Image, Expects: b.expects(coordinator.Topic), CommitTimeout: c.Millis("offsets.commit.timeout.ms"),
		MetadataMax: c.Int("offset.metadata.max.bytes"), OffsetRetentionMs: c.Int64("offsets.retention.minutes") * 60_000,
		Group: group.Config{SessionMinMs: c.Int64("group.min.session.timeout.ms"), SessionMaxMs: c.Int64("group.max.session.timeout.ms"),
			InitialDelayMs: c.Int64("group.initial.rebalance.delay.ms"), SizeMax: c.Int("group.max.size")},
		Consumer: func(id string) consumergroup.Config {
			own := config.GroupValues(c, b.quorum.Image().GroupConfigs[id])
			return consumergroup.Config{SessionMs: own.Int64("consumer.session.timeout.ms"), HeartbeatMs: own.Int64("consumer.heartbeat.interval.ms"),
				AssignmentMs: own.Int64("consumer.assignment.interval.ms"), SizeMax: c.Int("group.consumer.max.size"), Assignors: c.List("group.consumer.assignors"),
				RegexMs: c.Int64("group.consumer.regex.refresh.interval.ms"), Upgrade: policy == "bidirectional" || policy == "upgrade",
				Downgrade: policy == "bidirectional" || policy == "downgrade", Mixed: policy != "disabled"}
		}}
	return func() coordinator.Config {
		c := static
		if t, ok := b.quorum.Image().Topics[coordinator.Topic]; ok {
			c.Partitions = len(t.Partitions)
		}
		return c
	}
}

// begin brings the partitions to the present image, all at once.
func (b *broker) begin(ctx context.Context) error {
	b.notReady("opening partitions")
	start := time.Now()
	img := b.quorum.Image()
	if b.tier == nil {
		for _, name := range img.TopicNames() {
			if img.Topics[name].Configs["remote.storage.enable"] == "true" {
				return fmt.Errorf("topic %s is tiered, but remote.log.storage.system.enable is false: take the topic out of the tier first, or turn the tier on", name)
			}
		}
	}
	known := func(p tp.Partition) bool {
		_, state, ok := img.Partition(p)
		return ok && slices.Contains(state.Replicas, b.self) // or it was moved away while this broker was down
	}
	if err := b.dir.strays(known, b.log); err != nil {
		return err
	}
	b.dir.keep(known)
	for b.follow(ctx) {
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	n, offline := 0, 0
	for _, p := range b.replicas.all() {
		n++
		if p.Cause() != nil {
			offline++
		}
	}
	b.log.Info("partitions are open", "partitions", n, "offline", offline, "clean", b.dir.clean, "took", time.Since(start).Round(time.Millisecond).String())
	return nil
}

// workers is how many partitions are opened or closed at one time.
func workers() int { return max(4, 2*runtime.GOMAXPROCS(0)) }

func (b *broker) deleteDelay() time.Duration {
	return b.static.Millis("varve.remote.delete.delay.ms")
}

// tierFailed tells of failed reads of the bucket; the log counts what repeats.
func (b *broker) tierFailed(id tp.Partition, err error) {
	b.log.Warn("reading the tier failed, consumers ask again", "partition", id.String(), "cause", err)
}

// tieringOf is nil-safe access for code that runs with and without a tier.
func (b *broker) tieringOf() *tiering.Service {
	if b.tier == nil {
		return nil
	}
	return b.tier.service
}
