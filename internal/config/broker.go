package config

import (
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
)

// Broker is the table of server keys. Names are Kafka's; keys that begin with "varve." have no counterpart there.
var Broker = newTable(append(topicSynonyms(),
	Key{Name: "node.id", Kind: Int, Default: "1", Min: 0, Max: maxInt, Doc: "This node's id, unique in the cluster."},
	Key{Name: "cluster.id", Kind: String, Default: "", Doc: "Cluster id to create, or to insist on; empty takes the data directory's, or draws a new one."},
	Key{Name: "listeners", Kind: List, Default: "PLAINTEXT://localhost:9092", Doc: "Addresses to listen on, PROTOCOL://HOST:PORT; port 0 picks a free one.", check: checkListeners},
	Key{Name: "advertised.listeners", Kind: List, Default: "", Doc: "Addresses that clients are told to use; empty means listeners.", check: checkAdvertised},
	Key{Name: "listener.security.protocol.map", Kind: List, Default: "PLAINTEXT:PLAINTEXT", Doc: "Protocols of listeners with names of their own, NAME:PLAINTEXT; PLAINTEXT is the only protocol.", check: checkProtocolMap},
	Key{Name: "inter.broker.listener.name", Kind: String, Default: "", Doc: "Listener on which nodes reach each other: quorum, commands and replication. Empty takes the first."},
	Key{Name: "controller.quorum.voters", Kind: List, Default: "", Doc: "Nodes that found the metadata quorum, ID@HOST:PORT of their inter-broker listeners, the same on all of them. Needed by an empty node only: later the quorum knows its members. Empty makes this node a cluster of its own.", check: checkVoters},
	Key{Name: "controller.quorum.bootstrap.servers", Kind: List, Default: "", Doc: "Inter-broker addresses, HOST:PORT, of nodes that a new broker asks for the quorum; empty asks controller.quorum.voters.", check: checkAddresses},
	Key{Name: "controller.quorum.election.timeout.ms", Kind: Int, Default: "1000", Min: 50, Max: 600_000, Doc: "Silence of the quorum's leader after which voters elect another; also how long a leader that reaches no majority goes on."},
	Key{Name: "broker.session.timeout.ms", Kind: Int, Default: "9000", Min: 100, Max: maxInt, Doc: "Silence after which the controller fences a broker, and after which a broker that does not reach the controller stops leading."},
	Key{Name: "broker.heartbeat.interval.ms", Kind: Int, Default: "2000", Min: 10, Max: maxInt, Doc: "Pause between heartbeats to the controller."},
	Key{Name: "varve.broker.disconnect.grace.ms", Kind: Int, Default: "3000", Min: 0, Max: maxInt, Doc: "How soon after its connection to the controller broke a broker is fenced if it does not come back; broker.session.timeout.ms if that is less. A process that died is found out long before its session is over."},
	Key{Name: "varve.broker.drain", Kind: Boolean, Default: "false", Mode: Cluster, Doc: "Move all replicas off this broker, and place none on it. Set it with varve broker drain."},
	Key{Name: "broker.rack", Kind: String, Default: "", Doc: "Rack or zone of this node."},
	Key{Name: "log.dir", Kind: String, Default: "varve-data", Doc: "Folder of the partitions and of the metadata log."},
	Key{Name: "num.partitions", Kind: Int, Default: "1", Min: 1, Max: 100_000, Doc: "Partitions of a topic that is created without a count."},
	Key{Name: "default.replication.factor", Kind: Int, Default: "1", Min: 1, Max: 32767, Doc: "Replicas of a topic that is created without a count."},
	Key{Name: "auto.create.topics.enable", Kind: Boolean, Default: "true", Doc: "Create a topic when a client asks for its metadata and allows it."},
	Key{Name: "delete.topic.enable", Kind: Boolean, Default: "true", Doc: "Whether topics may be deleted."},
	Key{Name: "socket.request.max.bytes", Kind: Int, Default: "104857600", Min: 1, Max: maxInt, Doc: "Largest request frame; a longer one closes its connection before anything is allocated."},
	Key{Name: "max.connections", Kind: Int, Default: "2147483647", Min: 0, Max: maxInt, Doc: "Connections at one time; further ones are closed at once."},
	Key{Name: "connections.max.idle.ms", Kind: Long, Default: "600000", Min: 1, Max: maxLong, Doc: "Silence after which a connection is closed."},
	Key{Name: "max.request.partition.size.limit", Kind: Int, Default: "2000", Min: 1, Max: maxInt, Doc: "Partitions in one DescribeTopicPartitions answer."},
	Key{Name: "fetch.max.bytes", Kind: Int, Default: "57671680", Min: 1024, Max: maxInt, Doc: "Largest fetch answer, whatever the client asks."},
	Key{Name: "max.incremental.fetch.session.cache.slots", Kind: Int, Default: "1000", Min: 0, Max: maxInt, Doc: "Fetch sessions kept (KIP-227); beyond it clients send full fetches."},
	Key{Name: "replica.selector.class", Kind: String, Default: "rack", OneOf: []string{"", "rack", "org.apache.kafka.common.replica.RackAwareReplicaSelector"}, Doc: "How consumers that name their rack find a replica to read from (KIP-392): rack sends them to one of their rack that is in sync and holds the offset locally, empty to the leader alone. On by default, unlike in Kafka."},
	Key{Name: "num.replica.fetchers", Kind: Int, Default: "1", Min: 1, Max: 100, Doc: "Pairs of connections to each leader that replicate from it: one for partitions in sync, one for those that catch up."},
	Key{Name: "replica.lag.time.max.ms", Kind: Long, Default: "30000", Min: 1, Max: maxLong, Mode: Cluster, Doc: "How long a follower may be behind its leader's log end before it leaves the ISR."},
	Key{Name: "replica.fetch.max.bytes", Kind: Int, Default: "1048576", Min: 0, Max: maxInt, Doc: "Bytes that a follower asks of one partition at a time; a larger batch comes all the same."},
	Key{Name: "replica.fetch.response.max.bytes", Kind: Int, Default: "10485760", Min: 0, Max: maxInt, Doc: "Bytes that a follower asks of a leader at a time."},
	Key{Name: "replica.fetch.min.bytes", Kind: Int, Default: "1", Min: 0, Max: maxInt, Doc: "Bytes for which a follower's fetch waits."},
	Key{Name: "replica.fetch.wait.max.ms", Kind: Int, Default: "500", Min: 0, Max: maxInt, Doc: "How long a follower's fetch waits for them."},
	Key{Name: "replica.fetch.backoff.ms", Kind: Int, Default: "1000", Min: 0, Max: maxInt, Doc: "Pause of a partition after its fetch failed."},
	Key{Name: "replica.socket.timeout.ms", Kind: Int, Default: "30000", Min: 100, Max: maxInt, Doc: "How long a follower waits for an answer beyond the wait that it asked for."},
	Key{Name: "follower.fetch.last.tiered.offset.enable", Kind: Boolean, Default: "true", Mode: Cluster, Doc: "A replica that starts from the tier begins behind the last tiered offset and copies only what is not tiered yet (KIP-1023). On by default, unlike in Kafka."},
	Key{Name: "leader.election.eligible.local.log.ms", Kind: Long, Default: "-1", Min: -1, Max: maxLong, Mode: Cluster, Doc: "Span of local data, by time, from which a replica of a tiered partition is a preferred candidate for leader (KIP-1303); -1 is off."},
	Key{Name: "leader.election.eligible.local.log.bytes", Kind: Long, Default: "-2", Min: -2, Max: maxLong, Mode: Cluster, Doc: "The same by bytes; either limit suffices. -1 is off, -2 is one segment.bytes of the topic. Both off prefers nobody."},
	Key{Name: "follower.backfill.bytes.per.second", Kind: Long, Default: "0", Min: 0, Max: maxLong, Mode: Cluster, Doc: "Rate at which a replica that started from the tier fills its local log backwards from the bucket, up to its local retention; 0 is off."},
	Key{Name: "leader.replication.throttled.rate", Kind: Long, Default: strconv.FormatInt(maxLong, 10), Min: 0, Max: maxLong, Mode: Cluster, Doc: "Bytes per second that a leader sends to replicas out of sync, of the partitions in leader.replication.throttled.replicas."},
	Key{Name: "follower.replication.throttled.rate", Kind: Long, Default: strconv.FormatInt(maxLong, 10), Min: 0, Max: maxLong, Mode: Cluster, Doc: "Bytes per second that a follower takes in while it catches up, of the partitions in follower.replication.throttled.replicas."},
	Key{Name: "auto.leader.rebalance.enable", Kind: Boolean, Default: "true", Doc: "Elect preferred leaders from time to time."},
	Key{Name: "leader.imbalance.check.interval.seconds", Kind: Long, Default: "300", Min: 1, Max: maxInt, Doc: "Pause between checks for preferred leaders."},
	Key{Name: "log.retention.check.interval.ms", Kind: Long, Default: "300000", Min: 1, Max: maxLong, Doc: "Pause between passes of local retention."},
	Key{Name: "log.initial.task.delay.ms", Kind: Long, Default: "30000", Min: 0, Max: maxLong, Doc: "Delay of the first retention pass after start."},
	Key{Name: "log.cleaner.threads", Kind: Int, Default: "1", Min: 0, Max: 64, Doc: "Compactions of topics with cleanup.policy=compact that run at a time; 0 compacts nothing."},
	Key{Name: "log.cleaner.dedupe.buffer.size", Kind: Long, Default: "134217728", Min: 1 << 20, Max: maxLong, Mode: Cluster, Doc: "Memory for the keys of running compactions, shared by log.cleaner.threads, in bytes: 24 a key. A log with more new keys than fit takes several turns."},
	Key{Name: "log.cleaner.io.max.bytes.per.second", Kind: Double, Default: "1.7976931348623157E308", Mode: Cluster, Doc: "Bytes per second that compactions read and write together."},
	Key{Name: "log.cleaner.backoff.ms", Kind: Long, Default: "15000", Min: 0, Max: maxLong, Mode: Cluster, Doc: "Pause before the next look for logs to compact, when there was none."},
	Key{Name: "log.flush.offset.checkpoint.interval.ms", Kind: Int, Default: "60000", Min: 0, Max: maxInt, Doc: "Pause between writes of the recovery point and log start checkpoints."},
	Key{Name: "replica.high.watermark.checkpoint.interval.ms", Kind: Long, Default: "5000", Min: 1, Max: maxLong, Doc: "Pause between writes of the high watermark checkpoint."},
	Key{Name: "producer.id.expiration.ms", Kind: Int, Default: "86400000", Min: 1, Max: maxInt, Mode: Cluster, Doc: "Idle time after which a partition forgets a producer."},
	Key{Name: "producer.id.expiration.check.interval.ms", Kind: Int, Default: "600000", Min: 1, Max: maxInt, Doc: "Pause between passes that forget idle producers."},
	Key{Name: "offsets.topic.num.partitions", Kind: Int, Default: "50", Min: 1, Max: maxInt, Doc: "Partitions of __consumer_offsets."},
	Key{Name: "offsets.topic.replication.factor", Kind: Short, Default: "3", Min: 1, Max: 32767, Doc: "Replicas of __consumer_offsets; as many as there are brokers or voters where that is less."},
	Key{Name: "offsets.commit.timeout.ms", Kind: Int, Default: "5000", Min: 1, Max: maxInt, Doc: "How long a group's records may take to be committed by all replicas in sync."},
	Key{Name: "offsets.topic.segment.bytes", Kind: Int, Default: "104857600", Min: 1 << 20, Max: maxInt, Doc: "segment.bytes of __consumer_offsets."},
	Key{Name: "offsets.retention.minutes", Kind: Int, Default: "10080", Min: 1, Max: maxInt, Doc: "How long committed offsets outlive their group's last member or commit."},
	Key{Name: "offsets.retention.check.interval.ms", Kind: Long, Default: "600000", Min: 1, Max: maxLong, Doc: "Pause between passes that expire offsets."},
	Key{Name: "offset.metadata.max.bytes", Kind: Int, Default: "4096", Min: 0, Max: maxInt, Doc: "Largest metadata text of a committed offset."},
	Key{Name: "transaction.state.log.num.partitions", Kind: Int, Default: "50", Min: 1, Max: maxInt, Doc: "Partitions of __transaction_state."},
	Key{Name: "transaction.state.log.replication.factor", Kind: Short, Default: "3", Min: 1, Max: 32767, Doc: "Replicas of __transaction_state; as many as there are brokers or voters where that is less."},
	Key{Name: "transaction.state.log.min.isr", Kind: Int, Default: "2", Min: 1, Max: maxInt, Doc: "min.insync.replicas of __transaction_state, at most its replicas."},
	Key{Name: "transaction.state.log.segment.bytes", Kind: Int, Default: "104857600", Min: 1 << 20, Max: maxInt, Doc: "segment.bytes of __transaction_state."},
	Key{Name: "transaction.max.timeout.ms", Kind: Int, Default: "900000", Min: 1, Max: maxInt, Mode: Cluster, Doc: "Longest timeout that a transaction may ask for; one that outlives its timeout is aborted."},
	Key{Name: "transactional.id.expiration.ms", Kind: Int, Default: "604800000", Min: 1, Max: maxInt, Mode: Cluster, Doc: "Idle time after which a transactional id is forgotten."},
	Key{Name: "transaction.remove.expired.transaction.cleanup.interval.ms", Kind: Int, Default: "3600000", Min: 1, Max: maxInt, Doc: "Pause between passes that forget idle transactional ids."},
	Key{Name: "transaction.partition.verification.enable", Kind: Boolean, Default: "true", Doc: "Ask the coordinator before the first batch of a transaction is appended to a partition (KIP-890), so that a late batch never leaves a transaction hanging."},
	Key{Name: "group.min.session.timeout.ms", Kind: Int, Default: "6000", Min: 1, Max: maxInt, Doc: "Smallest session timeout a classic member may ask."},
	Key{Name: "group.max.session.timeout.ms", Kind: Int, Default: "1800000", Min: 1, Max: maxInt, Doc: "Largest session timeout a classic member may ask."},
	Key{Name: "group.initial.rebalance.delay.ms", Kind: Int, Default: "3000", Min: 0, Max: maxInt, Doc: "How long the first rebalance of an empty group waits for more members."},
	Key{Name: "group.max.size", Kind: Int, Default: "2147483647", Min: 1, Max: maxInt, Doc: "Members a classic group may have."},
	Key{Name: "group.consumer.session.timeout.ms", Kind: Int, Default: "45000", Min: 1, Max: maxInt, Doc: "Silence after which a member of a consumer group (KIP-848) is put out."},
	Key{Name: "group.consumer.min.session.timeout.ms", Kind: Int, Default: "45000", Min: 1, Max: maxInt, Doc: "Least value of group.consumer.session.timeout.ms."},
	Key{Name: "group.consumer.max.session.timeout.ms", Kind: Int, Default: "60000", Min: 1, Max: maxInt, Doc: "Largest value of group.consumer.session.timeout.ms."},
	Key{Name: "group.consumer.heartbeat.interval.ms", Kind: Int, Default: "5000", Min: 1, Max: maxInt, Doc: "How often members of consumer groups are told to send heartbeats. While a group changes it is 500 ms at most."},
	Key{Name: "group.consumer.min.heartbeat.interval.ms", Kind: Int, Default: "5000", Min: 1, Max: maxInt, Doc: "Least value of group.consumer.heartbeat.interval.ms."},
	Key{Name: "group.consumer.max.heartbeat.interval.ms", Kind: Int, Default: "15000", Min: 1, Max: maxInt, Doc: "Largest value of group.consumer.heartbeat.interval.ms."},
	Key{Name: "group.consumer.max.size", Kind: Int, Default: "2147483647", Min: 1, Max: maxInt, Doc: "Members a consumer group may have."},
	Key{Name: "group.consumer.assignors", Kind: List, Default: "uniform,range", OneOf: []string{"uniform", "range"}, check: checkNotEmpty, Doc: "Assignors that members of consumer groups may ask for; the first is taken where none does."},
	Key{Name: "group.consumer.assignment.interval.ms", Kind: Int, Default: "1000", Min: 0, Max: maxInt, Doc: "Least time between two target assignments of a consumer group, so that many members that come at once cost one (KIP-1263)."},
	Key{Name: "group.consumer.min.assignment.interval.ms", Kind: Int, Default: "0", Min: 0, Max: maxInt, Doc: "Least value of group.consumer.assignment.interval.ms."},
	Key{Name: "group.consumer.max.assignment.interval.ms", Kind: Int, Default: "15000", Min: 0, Max: maxInt, Doc: "Largest value of group.consumer.assignment.interval.ms."},
	Key{Name: "group.consumer.regex.refresh.interval.ms", Kind: Int, Default: "600000", Min: 10_000, Max: maxInt, Doc: "How old the topics of a consumer group's regular expressions may grow. When topics come or go they are looked for at once, at most every 10 s."},
	Key{Name: "group.consumer.migration.policy", Kind: String, Default: "bidirectional", OneOf: []string{"bidirectional", "upgrade", "downgrade", "disabled"}, Doc: "Whether a live classic group of consumers becomes a consumer group when the first member of that protocol joins (upgrade), and a classic one again when the last has left (downgrade). Groups without members change in any case."},
	Key{Name: "remote.log.storage.system.enable", Kind: Boolean, Default: "true", Doc: "Whether topics may be tiered. On by default, unlike in Kafka."},
	Key{Name: "varve.bucket", Kind: String, Default: "", Doc: "Object store: a folder or file:///PATH, s3://BUCKET/PREFIX?endpoint=URL&region=R&path-style=true, or mem: for tests. Empty means LOG.DIR/bucket."},
	Key{Name: "varve.bucket.access.key", Kind: String, Default: "", Doc: "Static S3 access key; empty takes the environment, then the credentials file, then the instance's role."},
	Key{Name: "varve.bucket.secret.key", Kind: Password, Default: "", Doc: "Secret of the static S3 access key."},
	Key{Name: "varve.bucket.session.token", Kind: Password, Default: "", Doc: "Session token of the static S3 access key."},
	Key{Name: "varve.bucket.credentials.file", Kind: String, Default: "", Doc: "AWS credentials file to read, and to read again when the store refuses."},
	Key{Name: "rsm.config.key.prefix", Kind: String, Default: "", Doc: "Text in front of every object key, as is; end it with a slash for a folder."},
	Key{Name: "rsm.config.chunk.size", Kind: Int, Default: "4194304", Min: 1, Max: 1 << 30, Doc: "Plain bytes of a chunk of compressed or encrypted objects."},
	Key{Name: "rsm.config.compression.enabled", Kind: Boolean, Default: "false", Doc: "Compress objects with zstd, chunk by chunk. Such objects are not offered for direct reads of plain bytes."},
	Key{Name: "rsm.config.encryption.enabled", Kind: Boolean, Default: "false", Doc: "Encrypt objects with AES-256-GCM under a data key of their own."},
	Key{Name: "rsm.config.encryption.key.pair.id", Kind: String, Default: "", Doc: "Key pair that wraps the data keys of new objects."},
	Key{Name: "rsm.config.encryption.key.pairs", Kind: List, Default: "", Doc: "Key pairs, ID=PRIVATE-KEY-PEM-FILE, that unwrap the data keys of old objects."},
	Key{Name: "remote.log.manager.task.interval.ms", Kind: Long, Default: "30000", Min: 1, Max: maxLong, Doc: "Pause between passes over a partition's uploads and remote retention. A roll starts a pass at once."},
	Key{Name: "remote.log.manager.copier.thread.pool.size", Kind: Int, Default: "10", Min: 1, Max: 1000, Doc: "Uploads and remote deletions at one time."},
	Key{Name: "remote.log.manager.copy.max.bytes.per.second", Kind: Long, Default: strconv.FormatInt(maxLong, 10), Min: 1, Max: maxLong, Mode: Cluster, Doc: "Upload rate of the broker (KIP-956)."},
	Key{Name: "remote.log.manager.fetch.max.bytes.per.second", Kind: Long, Default: strconv.FormatInt(maxLong, 10), Min: 1, Max: maxLong, Mode: Cluster, Doc: "Rate of reads from the tier (KIP-956)."},
	Key{Name: "remote.log.reader.threads", Kind: Int, Default: "10", Min: 1, Max: 1000, Doc: "Reads from the bucket at one time."},
	Key{Name: "remote.log.reader.max.pending.tasks", Kind: Int, Default: "100", Min: 1, Max: maxInt, Doc: "Reads from the bucket that may wait for their turn."},
	Key{Name: "remote.log.index.file.cache.total.size.bytes", Kind: Long, Default: "134217728", Min: 1, Max: maxLong, Doc: "Memory for indexes of remote segments. Kafka's default is 1 GiB, of disk."},
	Key{Name: "varve.remote.chunk.cache.bytes", Kind: Long, Default: "134217728", Min: 1 << 20, Max: maxLong, Doc: "Memory for data read from the bucket."},
	Key{Name: "varve.remote.readahead.bytes", Kind: Long, Default: "33554432", Min: 0, Max: maxLong, Doc: "How far a sequential read of the tier runs ahead of its consumer, across segments."},
	Key{Name: "remote.fetch.max.wait.ms", Kind: Int, Default: "500", Min: 1, Max: maxInt, Mode: Cluster, Doc: "How long a fetch waits for the bucket before the partition is answered empty; the read goes on into the cache."},
	Key{Name: "remote.list.offsets.request.timeout.ms", Kind: Long, Default: "30000", Min: 1, Max: maxLong, Mode: Cluster, Doc: "How long ListOffsets waits for the bucket."},
	Key{Name: "varve.direct.fetch.enable", Kind: Boolean, Default: "true", Doc: "Answer clients that ask for it with the place of tiered data in the bucket (KIP-1248)."},
	Key{Name: "remote.fetch.grants", Kind: String, Default: "none", OneOf: []string{"none", "presigned"}, Doc: "Whether a place in the bucket comes with a right to read it: presigned adds a signed, read-only URL of that object, so that readers need no access of their own. It holds for varve.remote.delete.delay.ms and five minutes, the difference that clocks may have. S3 only."},
	Key{Name: "varve.remote.delete.delay.ms", Kind: Long, Default: "60000", Min: 0, Max: maxLong, Doc: "How long objects outlive the record of their deletion, for readers that hold their place. Also the validity of a handed out place; with 0 none is handed out."},
	Key{Name: "varve.shutdown.timeout.ms", Kind: Int, Default: "8000", Min: 100, Max: 600_000, Doc: "Time that a clean shutdown may take before it is cut short."},
	Key{Name: "varve.http.listener", Kind: String, Default: "", Doc: "HOST:PORT of /metrics, /live and /ready; empty for none."},
	Key{Name: "varve.http.pprof", Kind: Boolean, Default: "false", Doc: "Serve /debug/pprof on the HTTP listener."},
	Key{Name: "varve.log.format", Kind: String, Default: "text", OneOf: []string{"text", "json"}, Doc: "Form of log lines."},
	Key{Name: "varve.log.level", Kind: String, Default: "info", OneOf: []string{"debug", "info", "warn", "error"}, Doc: "Least severity that is logged."},
	Key{Name: "varve.max.open.files", Kind: Int, Default: "4096", Min: 64, Max: 1_000_000, Doc: "Segment files kept open at one time."},
)...)

// topicSynonyms are the broker keys that give topics their defaults, bounds and all.
func topicSynonyms() []Key {
	var keys []Key
	seen := map[string]bool{}
	for _, k := range Topic.keys {
		if k.Synonym == "" || seen[k.Synonym] {
			continue
		}
		seen[k.Synonym] = true
		keys = append(keys, Key{Name: k.Synonym, Kind: k.Kind, Default: k.Default, Min: k.Min, Max: k.Max, OneOf: k.OneOf, Mode: Cluster,
			check: k.check, Doc: "Default of the topic config " + k.Name + "."})
	}
	return append(keys,
		Key{Name: "log.retention.minutes", Kind: Int, Default: "", Doc: "As log.retention.ms, which wins; wins over log.retention.hours."},
		Key{Name: "log.retention.hours", Kind: Int, Default: "168", Doc: "As log.retention.ms, used when neither milliseconds nor minutes are given."},
		Key{Name: "log.roll.hours", Kind: Int, Default: "168", Min: 1, Max: maxInt, Doc: "As log.roll.ms, which wins."},
		Key{Name: "log.roll.jitter.hours", Kind: Int, Default: "0", Min: 0, Max: maxInt, Doc: "As log.roll.jitter.ms, which wins."},
	)
}

// Listener is one parsed element of listeners or advertised.listeners.
type Listener struct {
	Name string // PLAINTEXT, or what listener.security.protocol.map names
	Host string // empty listens on all interfaces
	Port int    // 0..65535
}

// Address is host:port.
func (l Listener) Address() string { return net.JoinHostPort(l.Host, strconv.Itoa(l.Port)) }

// ParseListeners reads a comma list of NAME://HOST:PORT.
func ParseListeners(list string) ([]Listener, error) {
	var out []Listener
	for _, item := range SplitList(list) {
		u, err := url.Parse(item)
		if err != nil || u.Scheme == "" || u.Port() == "" {
			return nil, fmt.Errorf("want PROTOCOL://HOST:PORT, got %q", item)
		}
		port, err := strconv.Atoi(u.Port())
		if err != nil || port > 65535 {
			return nil, fmt.Errorf("bad port in %q", item)
		}
		name := strings.ToUpper(u.Scheme)
		switch name {
		case "SSL", "SASL_PLAINTEXT", "SASL_SSL":
			return nil, fmt.Errorf("%q: only PLAINTEXT listeners are supported", item)
		}
		out = append(out, Listener{name, u.Hostname(), port})
	}
	return out, nil
}

func checkListeners(v string) error {
	l, err := ParseListeners(v)
	if err == nil && len(l) == 0 {
		err = fmt.Errorf("at least one listener is needed")
	}
	return err
}

func checkAdvertised(v string) error {
	listeners, err := ParseListeners(v)
	for _, l := range listeners {
		if ip := net.ParseIP(l.Host); l.Host == "" || ip != nil && ip.IsUnspecified() {
			return fmt.Errorf("clients cannot connect to %q: advertise a name or address of this machine", l.Host)
		}
	}
	return err
}
