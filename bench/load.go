package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

func (b *bench) create(p *process, topic string, partitions int32, configs map[string]string) error {
	cl, err := kgo.NewClient(kgo.SeedBrokers(p.address), kgo.MetadataMinAge(10*time.Millisecond))
	if err != nil {
		return err
	}
	defer cl.Close()
	set := map[string]*string{}
	for k, v := range configs {
		set[k] = &v
	}
	if _, err = kadm.NewClient(cl).CreateTopic(b.ctx, partitions, 1, set, topic); err != nil {
		return err
	}
	// Metadata may lag behind the creation.
	for {
		topics, err := kadm.NewClient(cl).ListTopics(b.ctx, topic)
		ready := err == nil && topics[topic].Err == nil && len(topics[topic].Partitions) == int(partitions)
		if ready {
			for _, p := range topics[topic].Partitions {
				ready = ready && p.Err == nil && p.Leader >= 0
			}
		}
		if ready {
			return nil
		}
		if b.ctx.Err() != nil {
			return b.ctx.Err()
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func producerOptions(p *process, topic, acks string) []kgo.Opt {
	opts := []kgo.Opt{seeds(p), kgo.DefaultProduceTopic(topic), kgo.ProducerBatchCompression(kgo.NoCompression()), kgo.ProducerLinger(0),
		kgo.ProducerBatchMaxBytes(1_000_000), kgo.MaxBufferedRecords(20_000), kgo.MetadataMinAge(50 * time.Millisecond), kgo.RecordPartitioner(kgo.UniformBytesPartitioner(64<<10, true, true, nil))}
	if acks == "1" {
		opts = append(opts, kgo.RequiredAcks(kgo.LeaderAck()), kgo.DisableIdempotentWrite())
	}
	return opts
}

// values are random lower-case letters, so that nothing on the way is faster than it would be.
func values(size int) [][]byte {
	out := make([][]byte, 64)
	seed := uint64(88172645463325252)
	for i := range out {
		out[i] = make([]byte, size)
		for j := range out[i] {
			seed ^= seed << 13
			seed ^= seed >> 7
			seed ^= seed << 17
			out[i][j] = 'a' + byte(seed%26)
		}
	}
	return out
}

// load is the result of one round.
type load struct {
	seconds    float64
	bytes      int64
	cpu        float64 // of the broker, seconds
	p50, p99   float64 // ms
	firstBytes float64 // ms
}

func (l load) mbps() float64     { return float64(l.bytes) / 1e6 / l.seconds }
func (l load) cpuPerGB() float64 { return l.cpu / (float64(l.bytes) / 1e9) }

// fillEvenly writes n records for readers: a patient producer makes the same full batches on every broker, where a hasty one's
// would be the smaller the faster the broker answers, and reading them slower.
func (b *bench) fillEvenly(p *process, topic string, n, size int) error {
	_, err := b.produce(p, topic, "all", n, size, 0, kgo.ProducerLinger(200*time.Millisecond), kgo.ProducerBatchMaxBytes(64<<10), kgo.MaxBufferedRecords(200_000))
	return err
}

// produce sends n records, at rate per second if that is not 0.
func (b *bench) produce(p *process, topic, acks string, n, size, rate int, more ...kgo.Opt) (load, error) {
	cl, err := kgo.NewClient(append(producerOptions(p, topic, acks), more...)...)
	if err != nil {
		return load{}, err
	}
	defer cl.Close()
	payload := values(size)
	latencies := make([]time.Duration, n)
	var failed atomic.Pointer[error]
	var done sync.WaitGroup
	done.Add(n)
	before, began := cpu(p.pid), time.Now()
	for i := 0; i < n; i++ {
		if rate > 0 {
			if wait := time.Until(began.Add(time.Duration(i) * time.Second / time.Duration(rate))); wait > 0 {
				time.Sleep(wait)
			}
		}
		sent := time.Now()
		cl.Produce(b.ctx, &kgo.Record{Value: payload[i%len(payload)]}, func(_ *kgo.Record, err error) {
			latencies[i] = time.Since(sent)
			if err != nil {
				failed.Store(&err)
			}
			done.Done()
		})
	}
	done.Wait()
	l := load{seconds: time.Since(began).Seconds(), bytes: int64(n) * int64(size), cpu: cpu(p.pid) - before}
	if err := failed.Load(); err != nil {
		return l, *err
	}
	slices.Sort(latencies)
	l.p50, l.p99 = ms(latencies[n/2]), ms(latencies[n*99/100])
	return l, nil
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// consume reads n records of a topic from its start.
func (b *bench) consume(p *process, topic string, n int, opts ...kgo.Opt) (load, error) {
	cl, err := kgo.NewClient(append([]kgo.Opt{seeds(p), kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.MetadataMinAge(50 * time.Millisecond),
		kgo.FetchMaxBytes(50 << 20), kgo.FetchMaxPartitionBytes(8 << 20), kgo.FetchMaxWait(500 * time.Millisecond)}, opts...)...)
	if err != nil {
		return load{}, err
	}
	defer cl.Close()
	ctx, cancel := context.WithTimeout(b.ctx, 2*time.Minute)
	defer cancel()
	before, began := cpu(p.pid), time.Now()
	var l load
	for got := 0; got < n; {
		f := cl.PollFetches(ctx)
		if err := f.Err(); err != nil {
			return l, fmt.Errorf("after %d of %d records: %w", got, n, err)
		}
		f.EachRecord(func(r *kgo.Record) {
			if got == 0 {
				l.firstBytes = ms(time.Since(began))
			}
			got++
			l.bytes += int64(len(r.Value))
		})
	}
	l.seconds, l.cpu = time.Since(began).Seconds(), cpu(p.pid)-before
	return l, nil
}

// alternate runs a round for each peer in turn: one that is thrown away, then those that count.
func (b *bench) alternate(peers []*process, round func(*process) (load, error)) (map[string][]load, error) {
	out := map[string][]load{}
	for i := -1; i < b.rounds; i++ {
		for _, p := range peers {
			if p == nil {
				continue
			}
			l, err := round(p)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", p.name, err)
			}
			if i >= 0 {
				out[p.name] = append(out[p.name], l)
			}
		}
	}
	return out, nil
}

func pick(loads []load, f func(load) float64) []float64 {
	out := make([]float64, len(loads))
	for i, l := range loads {
		out[i] = f(l)
	}
	return out
}

// localStart asks for the first offset on the broker's disk (ListOffsets −4, KIP-405).
func (b *bench) localStart(p *process, topic string) (int, error) {
	cl, err := kgo.NewClient(kgo.SeedBrokers(p.address))
	if err != nil {
		return 0, err
	}
	defer cl.Close()
	req := kmsg.NewPtrListOffsetsRequest()
	req.ReplicaID = -1
	t, rp := kmsg.NewListOffsetsRequestTopic(), kmsg.NewListOffsetsRequestTopicPartition()
	rp.Timestamp = -4
	t.Topic, t.Partitions = topic, append(t.Partitions, rp)
	req.Topics = append(req.Topics, t)
	resp, err := req.RequestWith(b.ctx, cl)
	if err != nil {
		return 0, err
	}
	return int(resp.Topics[0].Partitions[0].Offset), nil
}
