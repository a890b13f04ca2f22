// Package kafkaapi turns Kafka's messages into calls of the broker's services and their answers into messages: one file
// per API, one table of what is served, one table of error codes. It holds no state of its own.
//
// An API's versions in the table are what ApiVersions advertises, so what is advertised is what is handled.
package kafkaapi

import (
	"context"
	"fmt"
	"iter"
	"log/slog"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/control"
	"github.com/varve-io/varve/internal/coordinator"
	"github.com/varve-io/varve/internal/fetch"
	"github.com/varve-io/varve/internal/follower"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/quorum"
	"github.com/varve-io/varve/internal/quota"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tier/reader"
	"github.com/varve-io/varve/internal/tiering"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/wire"
)

// Replicas finds this broker's partitions.
type Replicas interface {
	Get(id tp.Partition) (*partition.Partition, bool)
}

// TierLookup finds offsets by time in the tier; *reader.Reader is one.
type TierLookup interface {
	OffsetForTimestamp(ctx context.Context, segments tier.Segments, timestamp, logStart int64) (reader.TimestampOffset, bool, error)
	MaxTimestamp(ctx context.Context, segments tier.Segments, logStart int64) (reader.TimestampOffset, bool, error)
}

// Services are what the APIs call. All are required.
type Services struct {
	NodeID       int32
	Quorum       func() quorum.Status // as this node knows it
	Image        func() *metadata.Image
	Changed      func() <-chan struct{} // closed when a newer image is there
	Static       config.Values          // the broker's settings as it was started
	Config       func() config.Values   // the same with the dynamic ones
	Control      *control.Client
	ProducerIDs  *control.ProducerIDs
	Replicas     Replicas
	Fetch        *fetch.Service
	Groups       *coordinator.Groups
	Transactions *coordinator.Transactions
	Enlist       Enlist
	TierLookup   TierLookup                                       // nil without a tier
	TierLag      func(tp.Partition) (tiering.Lag, bool)           // nil without a tier
	Replication  func(tp.Partition) (follower.Phase, error, bool) // what a follower is at; nil without one
	Thin         func(*partition.Partition) bool                  // whether a replica holds too little to be preferred as leader
	LogDir       string
	DiskUsage    func() (total, usable int64) // bytes of the volume, -1 unknown
	DirectFetch  bool                         // whether locations are handed out
	Log          *slog.Logger
	Metrics      *Metrics
}

// API serves requests. It is safe for concurrent use.
type API struct {
	Services
	table    []entry
	accounts quota.Accounts
	vain     vain
}

// New returns an API over its services.
func New(s Services) *API { return &API{Services: s, table: table()} }

// call is one request on its way.
type call struct {
	peer     *wire.Peer
	header   wire.Header
	received time.Time
}

// entry is one row of the table: the versions that are served, and by what.
type entry struct {
	key, min, max int16
	advertisedMin int16 // -1 if it is min
	// serve answers a request; it runs on the connection's writer, in the order of requests, and may wait.
	serve func(a *API, ctx context.Context, c *call, req kmsg.Request) kmsg.Response
	// start replaces serve where work must be done in arrival order or the reply is framed by hand. It must not wait.
	start func(a *API, ctx context.Context, c *call, req kmsg.Request) (wire.Finish, error)
}

// handler adapts a typed handler to a row of the table.
func handler[Q kmsg.Request, R kmsg.Response](f func(a *API, ctx context.Context, c *call, req Q) R) func(*API, context.Context, *call, kmsg.Request) kmsg.Response {
	return func(a *API, ctx context.Context, c *call, req kmsg.Request) kmsg.Response {
		return f(a, ctx, c, req.(Q))
	}
}

// table lists every API that is served.
func table() []entry {
	rows := []entry{
		{key: 0, min: 3, max: 13, advertisedMin: 0, start: startProduce}, // librdkafka wants to see 0 (KAFKA-18659)
		{key: 1, min: 4, max: 18, advertisedMin: -1, start: startFetch},
		{key: 2, min: 1, max: 11, serve: handler((*API).listOffsets)},
		{key: 3, min: 0, max: 13, serve: handler((*API).metadata)},
		{key: 8, min: 2, max: 10, serve: handler((*API).offsetCommit)},
		{key: 9, min: 1, max: 10, serve: handler((*API).offsetFetch)},
		{key: 10, min: 0, max: 6, serve: handler((*API).findCoordinator)},
		{key: 11, min: 0, max: 9, serve: handler((*API).joinGroup)},
		{key: 12, min: 0, max: 4, serve: handler((*API).heartbeat)},
		{key: 13, min: 0, max: 5, serve: handler((*API).leaveGroup)},
		{key: 14, min: 0, max: 5, serve: handler((*API).syncGroup)},
		{key: 15, min: 0, max: 6, serve: handler((*API).describeGroups)},
		{key: 16, min: 0, max: 5, serve: handler((*API).listGroups)},
		{key: 17, min: 0, max: 1, serve: handler((*API).saslHandshake)},
		{key: 18, min: 0, max: 5, serve: handler((*API).apiVersions)},
		{key: 19, min: 2, max: 7, serve: handler((*API).createTopics)},
		{key: 20, min: 1, max: 6, serve: handler((*API).deleteTopics)},
		{key: 21, min: 0, max: 2, serve: handler((*API).deleteRecords)},
		{key: 22, min: 0, max: 5, serve: handler((*API).initProducerID)},
		{key: 23, min: 2, max: 4, serve: handler((*API).offsetForLeaderEpoch)},
		{key: 24, min: 0, max: 5, serve: handler((*API).addPartitionsToTxn)},
		{key: 25, min: 0, max: 4, serve: handler((*API).addOffsetsToTxn)},
		{key: 26, min: 0, max: 5, serve: handler((*API).endTxn)},
		{key: 27, min: 1, max: 2, serve: handler((*API).writeTxnMarkers)},
		{key: 28, min: 0, max: 5, serve: handler((*API).txnOffsetCommit)},
		{key: 32, min: 1, max: 4, serve: handler((*API).describeConfigs)},
		{key: 33, min: 0, max: 2, serve: handler((*API).alterConfigs)},
		{key: 35, min: 1, max: 5, serve: handler((*API).describeLogDirs)},
		{key: 36, min: 0, max: 2, serve: handler((*API).saslAuthenticate)},
		{key: 37, min: 0, max: 3, serve: handler((*API).createPartitions)},
		{key: 42, min: 0, max: 3, serve: handler((*API).deleteGroups)},
		{key: 43, min: 0, max: 2, serve: handler((*API).electLeaders)},
		{key: 44, min: 0, max: 1, serve: handler((*API).incrementalAlterConfigs)},
		{key: 45, min: 0, max: 1, serve: handler((*API).alterReassignments)},
		{key: 46, min: 0, max: 0, serve: handler((*API).listReassignments)},
		{key: 47, min: 0, max: 0, serve: handler((*API).offsetDelete)},
		{key: 55, min: 0, max: 2, serve: handler((*API).describeQuorum)},
		{key: 60, min: 0, max: 2, serve: handler((*API).describeCluster)},
		{key: 48, min: 0, max: 1, serve: handler((*API).describeClientQuotas)},
		{key: 49, min: 0, max: 1, serve: handler((*API).alterClientQuotas)},
		{key: 61, min: 0, max: 0, serve: handler((*API).describeProducers)},
		{key: 64, min: 0, max: 0, serve: handler((*API).unregisterBroker)},
		{key: 65, min: 0, max: 0, serve: handler((*API).describeTransactions)},
		{key: 66, min: 0, max: 2, serve: handler((*API).listTransactions)},
		{key: 68, min: 0, max: 1, serve: handler((*API).consumerGroupHeartbeat)},
		{key: 69, min: 0, max: 1, serve: handler((*API).consumerGroupDescribe)},
		{key: 75, min: 0, max: 0, serve: handler((*API).describeTopicPartitions)},
		{key: 80, min: 0, max: 1, serve: handler((*API).addRaftVoter)},
		{key: 81, min: 0, max: 0, serve: handler((*API).removeRaftVoter)},
	}
	for i := range rows {
		if rows[i].key != 0 {
			rows[i].advertisedMin = -1
		}
	}
	return rows
}

func (a *API) lookup(key int16) (entry, bool) {
	for _, e := range a.table {
		if e.key == key {
			return e, true
		}
	}
	return entry{}, false
}

// Start implements the server's handler.
func (a *API) Start(ctx context.Context, peer *wire.Peer, frame []byte) (wire.Finish, error) {
	a.unmuted(ctx, peer)
	c := &call{peer: peer, received: time.Now()}
	var e entry
	var req kmsg.Request
	known := false
	flexible := func(key, version int16) bool {
		if e, known = a.lookup(key); !known {
			return false
		}
		req = kmsg.RequestForKey(key)
		req.SetVersion(version)
		return req.IsFlexible()
	}
	header, body, err := wire.ParseHeader(frame, flexible)
	c.header = header
	if err != nil {
		return nil, fmt.Errorf("client id %q: %w", header.ClientID, err)
	}
	if !known {
		return nil, fmt.Errorf("client id %q: API key %d is unknown here", header.ClientID, header.Key)
	}
	if header.Version < e.min || header.Version > e.max {
		if header.Key == apiVersionsKey {
			return a.finish(c, func(context.Context) kmsg.Response { return a.unsupportedApiVersions() }), nil
		}
		return nil, fmt.Errorf("client id %q: %s version %d is not supported, only %d to %d", header.ClientID, header.Name(), header.Version, e.min, e.max)
	}
	if err := req.ReadFrom(body); err != nil {
		return nil, fmt.Errorf("client id %q: %s version %d: %w", header.ClientID, header.Name(), header.Version, err)
	}
	if e.start != nil {
		return e.start(a, ctx, c, req)
	}
	return a.finish(c, func(ctx context.Context) kmsg.Response { return e.serve(a, ctx, c, req) }), nil
}

// finish frames what serve answers.
func (a *API) finish(c *call, serve func(context.Context) kmsg.Response) wire.Finish {
	return func(ctx context.Context) wire.Reply {
		resp := serve(ctx)
		a.Metrics.answered(c.header, time.Since(c.received))
		return wire.Message(c.header.Correlation, resp)
	}
}

// respond makes the answer of a request's kind and version.
func respond[R kmsg.Response](req kmsg.Request) R { return req.ResponseKind().(R) }

// topicName resolves an id to a name where a request names topics by id.
func (a *API) topicName(id [16]byte) (string, bool) {
	t, ok := a.Image().TopicsByID[tp.UUID(id)]
	if !ok {
		return "", false
	}
	return t.Name, true
}

// imageLag is how long what the controller has decided may take to this node, at most, before it is taken for unknown.
const imageLag = 500 * time.Millisecond

// imageWith returns the newest image, which is waited for until it knows all that a request names, but not beyond a time: who created a
// topic at another node, and was told so, must not hear from this one that there is none. Named are the partitions, as an image knows
// their topics. One that was waited for in vain is not waited for again for a while: a group goes on committing offsets of a topic that was deleted.
func (a *API) imageWith(ctx context.Context, until time.Time, named func(*metadata.Image) iter.Seq[tp.Partition]) *metadata.Image {
	var late <-chan time.Time
	for {
		changed := a.Changed()
		img := a.Image()
		id, missing := lacks(img, named(img))
		if !missing || a.vain.has(id, time.Now()) {
			return img
		}
		if late == nil {
			timer := time.NewTimer(time.Until(until))
			defer timer.Stop()
			late = timer.C
		}
		select {
		case <-changed:
		case <-late:
			a.vain.add(id, time.Now())
			return img
		case <-ctx.Done():
			return img
		}
	}
}

// vain are partitions that were waited for in vain, and until when that counts. The zero value has none.
type vain struct {
	mu    sync.Mutex
	until map[tp.Partition]time.Time
}

const (
	vainFor = 30 * time.Second
	maxVain = 10_000 // that are remembered
)

func (v *vain) add(id tp.Partition, now time.Time) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.until == nil || len(v.until) >= maxVain {
		v.until = map[tp.Partition]time.Time{}
	}
	v.until[id] = now.Add(vainFor)
}

func (v *vain) has(id tp.Partition, now time.Time) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return now.Before(v.until[id])
}

// lacks returns the first of some partitions that an image does not know.
func lacks(img *metadata.Image, ids iter.Seq[tp.Partition]) (tp.Partition, bool) {
	for id := range ids {
		if _, _, ok := img.Partition(id); !ok {
			return id, true
		}
	}
	return tp.Partition{}, false
}

// replica finds a partition of this broker, or the error that says why it cannot be used here.
func (a *API) replica(topic string, index int32) (*partition.Partition, error) {
	if p, ok := a.Replicas.Get(tp.Partition{Topic: topic, Index: index}); ok {
		return p, nil
	}
	if _, _, ok := a.Image().Partition(tp.Partition{Topic: topic, Index: index}); ok {
		return nil, partition.ErrNotLeader
	}
	return nil, errUnknownTopic
}
