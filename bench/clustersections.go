package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/recordbatch"
)

// replicatedSection writes to three brokers with three replicas.
func replicatedSection(b *bench) error {
	const section = "Produce to three brokers, three replicas, min.insync.replicas=2, acks=all, 6 partitions"
	v, k, err := b.startNodes("replicated", 3, false, "min.insync.replicas=2", "default.replication.factor=3")
	if err != nil {
		return err
	}
	peers := []*process{v.process}
	if k != nil {
		peers = append(peers, k.process)
	}
	for _, c := range []struct {
		size, n int
	}{{1024, 300_000}, {100, 1_000_000}} {
		loads, err := b.alternate(peers, func(p *process) (load, error) {
			topic := b.topic()
			if err := b.createReplicated(p, topic, 6, 3, nil); err != nil {
				return load{}, err
			}
			l, err := b.produce(p, topic, "all", b.n(c.n), c.size, 0)
			return l, errors.Join(err, b.drop(p, topic))
		})
		if err != nil {
			return err
		}
		b.add(row{section: section, what: fmt.Sprintf("%d B records", c.size), unit: "MB/s", varve: pick(loads[v.name], load.mbps), kafka: pick(loads[nameOf(processOf(k))], load.mbps), target: "≥ 2×"})
	}
	loads, err := b.alternate(peers, func(p *process) (load, error) {
		topic := b.topic()
		if err := b.createReplicated(p, topic, 6, 3, nil); err != nil {
			return load{}, err
		}
		return b.produce(p, topic, "all", b.n(25_000), 1024, 5000)
	})
	if err != nil {
		return err
	}
	b.add(row{section: section, what: "p50 at 5,000 records/s of 1 KiB", unit: "ms", varve: pick(loads[v.name], func(l load) float64 { return l.p50 }), kafka: pick(loads[nameOf(processOf(k))], func(l load) float64 { return l.p50 }), lowerIsBetter: true, target: "≥ 4×"})
	b.add(row{section: section, what: "p99 at 5,000 records/s of 1 KiB", unit: "ms", varve: pick(loads[v.name], func(l load) float64 { return l.p99 }), kafka: pick(loads[nameOf(processOf(k))], func(l load) float64 { return l.p99 }), lowerIsBetter: true, target: "≥ 2×"})
	return end(peers...)
}

func processOf(n *nodes) *process {
	if n == nil {
		return nil
	}
	return n.process
}

func seeds(p *process) kgo.Opt { return kgo.SeedBrokers(strings.Split(p.address, ",")...) }

func (b *bench) admin(p *process) (*kadm.Client, error) {
	cl, err := kgo.NewClient(seeds(p), kgo.MetadataMinAge(10*time.Millisecond), kgo.RetryTimeout(30*time.Second))
	if err != nil {
		return nil, err
	}
	return kadm.NewClient(cl), nil
}

func (b *bench) drop(p *process, topic string) error {
	adm, err := b.admin(p)
	if err != nil {
		return err
	}
	defer adm.Close()
	_, err = adm.DeleteTopic(b.ctx, topic)
	return err
}

// createReplicated makes a topic and waits until every partition has a leader and all replicas in sync.
func (b *bench) createReplicated(p *process, topic string, partitions int32, replicas int16, configs map[string]string) error {
	adm, err := b.admin(p)
	if err != nil {
		return err
	}
	defer adm.Close()
	set := map[string]*string{}
	for k, v := range configs {
		set[k] = &v
	}
	if _, err := adm.CreateTopic(b.ctx, partitions, replicas, set, topic); err != nil {
		return err
	}
	return b.poll("the replicas of "+topic, func() bool {
		d, err := adm.ListTopics(b.ctx, topic)
		if err != nil || d[topic].Err != nil || len(d[topic].Partitions) != int(partitions) {
			return false
		}
		for _, p := range d[topic].Partitions {
			if p.Leader < 0 || len(p.ISR) != int(replicas) {
				return false
			}
		}
		return true
	})
}

// newReplicaSection moves a replica of a partition, most of which is tiered, to a broker that has none of it.
func newReplicaSection(b *bench) error {
	const section = "A new replica of 2 GB, 97 % of it tiered, last-tiered-offset option on"
	sets := []string{"log.retention.check.interval.ms=1000", "remote.log.manager.task.interval.ms=1000", "log.initial.task.delay.ms=1000", "follower.fetch.last.tiered.offset.enable=true"}
	v, k, err := b.startNodes("newreplica", 3, true, sets...)
	if err != nil {
		return err
	}
	clusters := []*nodes{v}
	if k != nil {
		clusters = append(clusters, k)
	}
	for _, c := range []struct{ what, local, aim string }{{"leader trimmed to 1.5 GiB", "1610612736", "≤ 5 %; no later than Kafka"}, {"leader keeps everything", "-2", "≤ 5 %"}} {
		copied := row{section: section, what: "copied from the leader, " + c.what, unit: "MB", lowerIsBetter: true, target: c.aim}
		took := row{section: section, what: "time to the ISR, " + c.what, unit: "s", lowerIsBetter: true, target: "≥ 1×"}
		for _, n := range clusters {
			bytes, seconds, err := b.newReplica(n, c.local)
			if err != nil {
				return fmt.Errorf("%s: %w", n.name, err)
			}
			if n.kafka {
				copied.kafka, took.kafka = bytes, seconds
			} else {
				copied.varve, took.varve = bytes, seconds
			}
		}
		b.add(copied)
		b.add(took)
	}
	return end(v.process, processOf(k))
}

func (b *bench) newReplica(n *nodes, local string) (megabytes, seconds []float64, err error) {
	adm, err := b.admin(n.process)
	if err != nil {
		return nil, nil, err
	}
	defer adm.Close()
	topic := b.topic()
	set := map[string]*string{}
	for key, v := range map[string]string{"remote.storage.enable": "true", "segment.bytes": "67108864", "retention.ms": "-1", "local.retention.bytes": local} {
		set[key] = &v
	}
	if err := b.assign(n.process, topic, []int32{1, 2}, set); err != nil {
		return nil, nil, err
	}
	records := b.n(2_000_000)
	if _, err := b.produce(n.process, topic, "all", records, 1024, 0); err != nil {
		return nil, nil, err
	}
	const pendingUpload = -6
	if err := b.poll("the tier", func() bool {
		at, err := b.listOffset(n.process, topic, pendingUpload)
		return err == nil && at > int64(records)*9/10
	}); err != nil {
		return nil, nil, err
	}
	time.Sleep(3 * time.Second) // local retention
	for range b.rounds {
		began := time.Now()
		if err := b.reassign(adm, topic, []int32{1, 3}); err != nil {
			return nil, nil, err
		}
		if err := b.poll("the new replica", func() bool {
			d, err := adm.ListTopics(b.ctx, topic)
			return err == nil && slices.Contains(d[topic].Partitions[0].ISR, 3)
		}); err != nil {
			return nil, nil, err
		}
		seconds = append(seconds, time.Since(began).Seconds())
		megabytes = append(megabytes, float64(n.logBytes(3, topic))/1e6)
		if err := b.reassign(adm, topic, []int32{1, 2}); err != nil {
			return nil, nil, err
		}
		if err := b.poll("the way back", func() bool {
			d, err := adm.ListTopics(b.ctx, topic)
			return err == nil && len(d[topic].Partitions[0].Replicas) == 2 && slices.Contains(d[topic].Partitions[0].ISR, 2) && n.logBytes(3, topic) == 0
		}); err != nil {
			return nil, nil, err
		}
	}
	return megabytes, seconds, b.drop(n.process, topic)
}

func (b *bench) reassign(adm *kadm.Client, topic string, to []int32) error {
	var req kadm.AlterPartitionAssignmentsReq
	req.Assign(topic, 0, to)
	r, err := adm.AlterPartitionAssignments(b.ctx, req)
	if err != nil {
		return err
	}
	return r.Error()
}

// assign makes a topic of one partition on given brokers.
func (b *bench) assign(p *process, topic string, replicas []int32, configs map[string]*string) error {
	adm, err := b.admin(p)
	if err != nil {
		return err
	}
	defer adm.Close()
	cl, err := kgo.NewClient(seeds(p))
	if err != nil {
		return err
	}
	defer cl.Close()
	req := kmsg.NewPtrCreateTopicsRequest()
	req.TimeoutMillis = 15_000
	t := kmsg.NewCreateTopicsRequestTopic()
	t.Topic, t.NumPartitions, t.ReplicationFactor = topic, -1, -1
	a := kmsg.NewCreateTopicsRequestTopicReplicaAssignment()
	a.Replicas = replicas
	t.ReplicaAssignment = append(t.ReplicaAssignment, a)
	for k, v := range configs {
		c := kmsg.NewCreateTopicsRequestTopicConfig()
		c.Name, c.Value = k, v
		t.Configs = append(t.Configs, c)
	}
	req.Topics = append(req.Topics, t)
	resp, err := req.RequestWith(b.ctx, cl)
	if err == nil {
		err = kerr.ErrorForCode(resp.Topics[0].ErrorCode)
	}
	if err != nil {
		return err
	}
	return b.poll("the replicas of "+topic, func() bool {
		d, err := adm.ListTopics(b.ctx, topic)
		return err == nil && d[topic].Err == nil && len(d[topic].Partitions) == 1 && len(d[topic].Partitions[0].ISR) == len(replicas)
	})
}

func (b *bench) listOffset(p *process, topic string, timestamp int64) (int64, error) {
	cl, err := kgo.NewClient(seeds(p))
	if err != nil {
		return 0, err
	}
	defer cl.Close()
	req := kmsg.NewPtrListOffsetsRequest()
	req.ReplicaID = -1
	t, rp := kmsg.NewListOffsetsRequestTopic(), kmsg.NewListOffsetsRequestTopicPartition()
	rp.Timestamp = timestamp
	t.Topic, t.Partitions = topic, append(t.Partitions, rp)
	req.Topics = append(req.Topics, t)
	resp, err := req.RequestWith(b.ctx, cl)
	if err != nil {
		return 0, err
	}
	r := resp.Topics[0].Partitions[0]
	return r.Offset, kerr.ErrorForCode(r.ErrorCode)
}

// wipeSection empties the disk of a broker with many partitions of which the tier has the most.
func wipeSection(b *bench) error {
	const section = "A broker of three loses its disk: 200 partitions, most of them tiered"
	v, _, err := b.startVarveOnly("wipe", "log.retention.check.interval.ms=1000", "remote.log.manager.task.interval.ms=1000", "log.initial.task.delay.ms=1000", "min.insync.replicas=2", "varve.remote.chunk.cache.bytes=67108864")
	if err != nil {
		return err
	}
	topic, steady := b.topic(), b.topic()
	if err := b.createReplicated(v.process, topic, 200, 3, map[string]string{"remote.storage.enable": "true", "internal.segment.bytes": "300000", "retention.ms": "-1"}); err != nil {
		return err
	}
	if err := b.createReplicated(v.process, steady, 6, 3, nil); err != nil {
		return err
	}
	if _, err := b.produce(v.process, topic, "all", b.n(2_000_000), 1024, 0, kgo.ProducerBatchMaxBytes(64<<10)); err != nil {
		return err
	}
	time.Sleep(10 * time.Second) // uploads
	whole := v.logBytes(3, topic)
	adm, err := b.admin(v.process)
	if err != nil {
		return err
	}
	defer adm.Close()
	copied := row{section: section, what: "copied from leaders, of what the replica has in all", unit: "%", lowerIsBetter: true, target: "≤ 5 %"}
	back := row{section: section, what: "start to in sync everywhere", unit: "s", lowerIsBetter: true}
	others := row{section: section, what: "p99 of writes to other partitions meanwhile, 1,000 records/s", unit: "ms", lowerIsBetter: true}
	for range b.rounds {
		if err := v.kill(3, false); err != nil {
			return err
		}
		if err := b.poll("node 3 is fenced", func() bool {
			brokers, err := adm.ListBrokers(b.ctx)
			return err == nil && len(brokers) == 2
		}); err != nil {
			return err
		}
		if err := os.RemoveAll(v.folder(3)); err != nil {
			return err
		}
		loads := make(chan load, 1)
		go func() {
			l, _ := b.produce(v.process, steady, "all", 5000, 1024, 1000)
			loads <- l
		}()
		began := time.Now()
		if err := v.start(3); err != nil {
			return err
		}
		if err := b.poll("all are in sync", func() bool {
			d, err := adm.ListTopics(b.ctx, topic)
			if err != nil {
				return false
			}
			for _, p := range d[topic].Partitions {
				if len(p.ISR) < 3 {
					return false
				}
			}
			return true
		}); err != nil {
			return err
		}
		back.varve = append(back.varve, time.Since(began).Seconds())
		copied.varve = append(copied.varve, 100*float64(v.logBytes(3, topic))/float64(whole))
		others.varve = append(others.varve, (<-loads).p99)
	}
	b.add(copied)
	b.add(back)
	b.add(others)
	return v.end()
}

func (b *bench) startVarveOnly(name string, sets ...string) (*nodes, *nodes, error) {
	v, err := b.varveNodes("varve-"+name, 3, sets)
	return v, nil, err
}

// failoverSection ends the leader of a partition and takes the time to the first write that another broker acknowledges.
func failoverSection(b *bench) error {
	const section = "Failover: the leader of one partition of three replicas goes, to the first acknowledged write"
	v, k, err := b.startNodes("failover", 3, false, "min.insync.replicas=2")
	if err != nil {
		return err
	}
	clusters := []*nodes{v}
	if k != nil {
		clusters = append(clusters, k)
	}
	for _, how := range []struct {
		what, aim string
		clean     bool
	}{{"kill -9", "< 10 s", false}, {"SIGTERM", "< 0.5 s", true}} {
		r := row{section: section, what: how.what, unit: "s", lowerIsBetter: true, target: how.aim}
		for range b.rounds {
			for _, n := range clusters {
				took, err := b.failover(n, how.clean)
				if err != nil {
					return fmt.Errorf("%s: %w", n.name, err)
				}
				if n.kafka {
					r.kafka = append(r.kafka, took)
				} else {
					r.varve = append(r.varve, took)
				}
			}
		}
		b.add(r)
	}
	return end(v.process, processOf(k))
}

func (b *bench) failover(n *nodes, clean bool) (float64, error) {
	topic := b.topic()
	if err := b.createReplicated(n.process, topic, 1, 3, nil); err != nil {
		return 0, err
	}
	adm, err := b.admin(n.process)
	if err != nil {
		return 0, err
	}
	defer adm.Close()
	var d kadm.TopicDetails
	leader := int32(-1)
	if err := b.poll("the leader of "+topic, func() bool { // the broker that answers may be behind
		d, err = adm.ListTopics(b.ctx, topic)
		if err == nil && len(d[topic].Partitions) == 1 {
			leader = d[topic].Partitions[0].Leader
		}
		return leader > 0
	}); err != nil {
		return 0, err
	}
	brokers, err := adm.ListBrokers(b.ctx)
	if err != nil {
		return 0, err
	}
	time.Sleep(2 * time.Second)
	// Two probes write to the brokers that do not lead, so that no client's metadata or back-off is in the figure.
	ctx, stop := context.WithTimeout(b.ctx, time.Minute)
	defer stop()
	done := make(chan time.Time, len(brokers))
	var probes sync.WaitGroup
	for _, br := range brokers {
		if br.NodeID != leader {
			probes.Go(func() {
				if at, err := probe(ctx, fmt.Sprintf("%s:%d", br.Host, br.Port), d[topic]); err == nil {
					done <- at
				}
			})
		}
	}
	began := time.Now()
	killed := make(chan error, 1)
	go func() { killed <- n.kill(int(leader), clean) }()
	var took float64
	select {
	case at := <-done:
		took = at.Sub(began).Seconds()
	case <-ctx.Done():
		return 0, errors.New("nobody took over within a minute")
	}
	stop()
	probes.Wait()
	if err := <-killed; err != nil {
		return 0, err
	}
	if err := n.start(int(leader)); err != nil {
		return 0, err
	}
	if err := n.whole(3); err != nil {
		return 0, err
	}
	return took, b.poll("all are in sync", func() bool {
		d, err := adm.ListTopics(b.ctx, topic)
		return err == nil && len(d[topic].Partitions) == 1 && len(d[topic].Partitions[0].ISR) == 3
	})
}

// probe writes to one broker until that acknowledges.
func probe(ctx context.Context, address string, t kadm.TopicDetail) (time.Time, error) {
	cl, err := kgo.NewClient(kgo.SeedBrokers(address), kgo.RetryTimeout(0), kgo.RequestRetries(0))
	if err != nil {
		return time.Time{}, err
	}
	defer cl.Close()
	records := batchOfOne()
	for ctx.Err() == nil {
		req := kmsg.NewPtrProduceRequest()
		req.Acks, req.TimeoutMillis = -1, 30_000
		rt := kmsg.NewProduceRequestTopic()
		rt.Topic, rt.TopicID = t.Topic, t.ID
		rp := kmsg.NewProduceRequestTopicPartition()
		rp.Records = records
		rt.Partitions = append(rt.Partitions, rp)
		req.Topics = append(req.Topics, rt)
		resp, err := cl.SeedBrokers()[0].Request(ctx, req)
		if err == nil {
			if r := resp.(*kmsg.ProduceResponse); len(r.Topics) == 1 && r.Topics[0].Partitions[0].ErrorCode == 0 {
				return time.Now(), nil
			}
		}
		time.Sleep(5 * time.Millisecond)
	}
	return time.Time{}, ctx.Err()
}

// batchOfOne is a record batch of one small record, without a producer.
func batchOfOne() []byte {
	build := recordbatch.NewBuilder()
	build.Add(recordbatch.Record{Timestamp: time.Now().UnixMilli(), Value: []byte("probe")})
	b, err := build.Build()
	if err != nil {
		panic(err) // of one record of a few bytes
	}
	return b
}

// controllerSection measures what goes through the metadata log.
func controllerSection(b *bench) error {
	const section = "Controller, three voters"
	v, k, err := b.startNodes("controller", 3, false)
	if err != nil {
		return err
	}
	clusters := []*nodes{v}
	if k != nil {
		clusters = append(clusters, k)
	}
	commits := row{section: section, what: "changes of a topic's config, 16 at a time", unit: "/s", target: "≥ 1,000/s"}
	late := row{section: section, what: "… p99", unit: "ms", lowerIsBetter: true, target: "< 20 ms"}
	made := row{section: section, what: "10,000 partitions of three replicas created and in sync", unit: "s", lowerIsBetter: true, target: "< 30 s"}
	back := row{section: section, what: "restart of a broker with 5,000 partitions, to in sync everywhere", unit: "s", lowerIsBetter: true, target: "< 10 s"}
	for _, n := range clusters {
		perSecond, p99, err := b.commits(n)
		if err != nil {
			return fmt.Errorf("%s: %w", n.name, err)
		}
		half, restart, whole, err := b.manyPartitions(n)
		if err != nil {
			return fmt.Errorf("%s: %w", n.name, err)
		}
		if n.kafka {
			commits.kafka, late.kafka, made.kafka, back.kafka = perSecond, p99, []float64{half + whole}, []float64{restart}
		} else {
			commits.varve, late.varve, made.varve, back.varve = perSecond, p99, []float64{half + whole}, []float64{restart}
		}
	}
	for _, r := range []row{commits, late, made, back} {
		b.add(r)
	}
	return end(v.process, processOf(k))
}

// commits changes a config over and over, and returns changes per second and their p99 in ms, by round.
func (b *bench) commits(n *nodes) (perSecond, p99 []float64, err error) {
	topic := b.topic()
	if err := b.createReplicated(n.process, topic, 1, 3, nil); err != nil {
		return nil, nil, err
	}
	const workers = 16
	for range b.rounds + 1 {
		var mu sync.Mutex
		var took []float64
		var failed error
		var all sync.WaitGroup
		began := time.Now()
		for w := range workers {
			all.Go(func() {
				adm, err := b.admin(n.process)
				if err != nil {
					failed = err
					return
				}
				defer adm.Close()
				for i := range 200 {
					value := fmt.Sprint(1_000_000 + w*1000 + i)
					at := time.Now()
					_, err := adm.AlterTopicConfigs(b.ctx, []kadm.AlterConfig{{Op: kadm.SetConfig, Name: "retention.ms", Value: &value}}, topic)
					mu.Lock()
					took = append(took, ms(time.Since(at)))
					failed = errors.Join(failed, err)
					mu.Unlock()
				}
			})
		}
		all.Wait()
		if failed != nil {
			return nil, nil, failed
		}
		slices.Sort(took)
		perSecond, p99 = append(perSecond, float64(len(took))/time.Since(began).Seconds()), append(p99, took[len(took)*99/100])
	}
	return perSecond[1:], p99[1:], nil
}

// manyPartitions makes 5,000 partitions, restarts a broker, and makes 5,000 more.
func (b *bench) manyPartitions(n *nodes) (half, restart, whole float64, err error) {
	create := func(topic string) (float64, error) {
		began := time.Now()
		err := b.createReplicated(n.process, topic, int32(b.n(5000)), 3, nil)
		return time.Since(began).Seconds(), err
	}
	first := b.topic()
	if half, err = create(first); err != nil {
		return
	}
	if err = n.kill(3, true); err != nil {
		return
	}
	began := time.Now()
	if err = n.start(3); err != nil {
		return
	}
	adm, err := b.admin(n.process)
	if err != nil {
		return
	}
	defer adm.Close()
	if err = b.poll("all are in sync", func() bool {
		d, err := adm.ListTopics(b.ctx, first)
		if err != nil || len(d[first].Partitions) == 0 {
			return false
		}
		for _, p := range d[first].Partitions {
			if len(p.ISR) < 3 {
				return false
			}
		}
		return true
	}); err != nil {
		return
	}
	restart = time.Since(began).Seconds()
	whole, err = create(b.topic())
	return
}
