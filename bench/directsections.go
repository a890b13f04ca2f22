package main

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"golang.org/x/sync/errgroup"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/kafkatier"
	"github.com/varve-io/varve/direct/objectstore"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tierinfo"
	"github.com/varve-io/varve/internal/wire"
)

// storage is one way to keep objects.
type storage struct {
	name string
	sets []string
	keys map[string][]byte // for readers
}

// storages are those that direct reads are measured with.
func (b *bench) storages() ([]storage, error) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	file := b.path("key.pem")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return nil, err
	}
	return []storage{
		{name: "plain"},
		{name: "compressed (zstd)", sets: []string{"rsm.config.compression.enabled=true"}},
		{name: "encrypted (AES-GCM)", sets: []string{"rsm.config.encryption.enabled=true", "rsm.config.encryption.key.pair.id=bench", "rsm.config.encryption.key.pairs=bench=" + file},
			keys: map[string][]byte{"bench": text}},
	}, nil
}

// directReadsSection reads a topic from S3 in all ways that objects are kept, alone, committed, and by many at once.
func directReadsSection(b *bench) error {
	if b.versitygw == "" {
		return nil
	}
	all, err := b.storages()
	if err != nil {
		return err
	}
	for _, s := range all {
		if err := b.directReads(s); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return b.manyReaders()
}

// transport makes one over S3; the caller closes it.
func (b *bench) transport(url string, keys map[string][]byte) (*direct.Transport, *objectstore.Fetcher, error) {
	f, err := objectstore.Open(url, objectstore.Options{AccessKey: "bench", SecretKey: "benchsecret", Keys: keys})
	if err != nil {
		return nil, nil, err
	}
	t, err := direct.New(direct.Config{Enabled: true, Fetcher: f})
	return t, f, err
}

func (b *bench) directReads(s storage) error {
	section := "Direct read from S3, one partition, objects " + s.name
	store, _, url, err := b.s3()
	if err != nil {
		return err
	}
	v, _, err := b.startVarve("varve-reads-"+s.name[:4], append(s3Sets(url), s.sets...)...)
	if err != nil {
		return err
	}
	n, err := b.fill(v, "history", b.n(1_000_000))
	if err != nil {
		return err
	}
	visible, err := b.fillAborted(v, "committed", b.n(500_000))
	if err != nil {
		return err
	}
	segments, err := b.segments(v, "history")
	if err != nil {
		return err
	}
	var ceiling, warm, thin, whole, committed, gets []float64
	for i := -1; i < b.rounds; i++ {
		t, f, err := b.transport(url, s.keys)
		if err != nil {
			return err
		}
		c, err := b.fetchAll(f, segments)
		if err != nil {
			return err
		}
		raw, err := b.thinRead(v, t.DialContext, "history", n)
		if err != nil {
			return err
		}
		t.Close()
		k, err := b.directly(v, url, s.keys, "history", n)
		if err != nil {
			return err
		}
		x, err := b.directly(v, url, s.keys, "committed", visible, kgo.FetchIsolationLevel(kgo.ReadCommitted()))
		if err != nil {
			return err
		}
		w, err := b.consume(v, "history", n) // mostly from the broker's cache and the page cache
		if err != nil {
			return err
		}
		if i < 0 {
			continue
		}
		ceiling, warm, thin = append(ceiling, c), append(warm, w.mbps()), append(thin, raw.mbps())
		whole, committed, gets = append(whole, k.mbps()), append(committed, x.mbps()), append(gets, k.gets)
	}
	b.add(row{section: section, what: "the Fetcher alone, 4 × 4 MiB, nothing parsed", unit: "MB/s", varve: ceiling})
	b.add(row{section: section, what: "over the transport, batches checked, no record decoded", unit: "MB/s", varve: thin, target: "≥ 80 % (plain), 50 % (others) of the Fetcher"})
	b.add(row{section: section, what: "kgo over the transport", unit: "MB/s", varve: whole, target: "the same, or the client's ceiling"})
	b.add(row{section: section, what: "kgo over the transport, read_committed, 10 % aborted", unit: "MB/s", varve: committed, target: "≥ 70 %, or the client's ceiling"})
	b.add(row{section: section, what: "kgo through the broker", unit: "MB/s", varve: warm})
	b.add(row{section: section, what: "ranges read per GB", unit: "GETs", varve: gets, target: "≤ 286 (1 GB ÷ 4 MiB, and 20 %)"})
	b.note("Direct reads, %s: the transport reaches %.0f %% of the Fetcher, kgo %.0f %%, kgo read_committed %.0f %%; %.1f× the 140–180 MB/s that kgo got of Kafka with the Aiven plug-in.",
		s.name, 100*median(thin)/median(ceiling), 100*median(whole)/median(ceiling), 100*median(committed)/median(ceiling), median(whole)/160)
	return end(v, store)
}

// fillAborted writes transactions, each tenth aborted, and returns how many records of the remote part are committed.
func (b *bench) fillAborted(p *process, topic string, n int) (int, error) {
	const per = 1000
	if err := b.create(p, topic, 1, tierTopic); err != nil {
		return 0, err
	}
	if _, err := b.transact(p, topic, n/per, per, 0, func(i int) bool { return i%10 != 9 }, kgo.ProducerLinger(50*time.Millisecond), kgo.ProducerBatchMaxBytes(64<<10)); err != nil {
		return 0, err
	}
	local, err := b.settle(p, topic)
	whole := local / (per + 1) // each with its marker
	return (whole - whole/10) * per, err
}

// directLoad is a load with the ranges that it took per GB.
type directLoad struct {
	load
	gets float64
}

// directly reads with kgo over a transport of its own.
func (b *bench) directly(p *process, url string, keys map[string][]byte, topic string, n int, opts ...kgo.Opt) (directLoad, error) {
	t, _, err := b.transport(url, keys)
	if err != nil {
		return directLoad{}, err
	}
	defer t.Close()
	l, err := b.consume(p, topic, n, append([]kgo.Opt{kgo.Dialer(t.DialContext)}, opts...)...)
	s := t.Snapshot()
	return directLoad{l, float64(s.Requests) / (float64(s.Bytes) / 1e9)}, err
}

// segments asks for the remote segments of a topic's only partition.
func (b *bench) segments(p *process, topic string) ([]tier.Segment, error) {
	cl, err := kgo.NewClient(seeds(p))
	if err != nil {
		return nil, err
	}
	defer cl.Close()
	req := kmsg.NewPtrDescribeLogDirsRequest()
	rt := kmsg.NewDescribeLogDirsRequestTopic()
	rt.Topic, rt.Partitions = topic, []int32{0}
	req.Topics = append(req.Topics, rt)
	tierinfo.Request(req, tierinfo.Segments)
	resp, err := cl.Broker(1).Request(b.ctx, req)
	if err != nil {
		return nil, err
	}
	for _, dir := range resp.(*kmsg.DescribeLogDirsResponse).Dirs {
		for _, t := range dir.Topics {
			for i := range t.Partitions {
				info, _, err := tierinfo.Get(&t.Partitions[i])
				return info.List, err
			}
		}
	}
	return nil, errors.New("the broker tells of no segments")
}

// fetchAll reads all segments as a Fetcher gives them, four ranges of 4 MiB at a time, and throws the bytes away: MB/s of plain bytes.
func (b *bench) fetchAll(f direct.Fetcher, segments []tier.Segment) (float64, error) {
	const size, workers = 4 << 20, 4
	var all errgroup.Group
	all.SetLimit(workers)
	buffers := sync.Pool{New: func() any { return new([size]byte) }}
	total, began := int64(0), time.Now()
	for i := range segments {
		s := &segments[i]
		for at := int64(0); at < s.Size; at += size {
			all.Go(func() error {
				buf := buffers.Get().(*[size]byte)
				defer buffers.Put(buf)
				to := min(at+size, s.Size)
				body, err := f.FetchLogSegment(b.ctx, direct.Segment{SegmentID: s.ID, ObjectKey: s.Object("", remoteformat.ObjectLog), Format: s.Format, Size: s.Size, BaseOffset: s.Start}, at, to)
				if err != nil {
					return err
				}
				defer body.Close()
				_, err = io.ReadFull(body, buf[:to-at])
				return err
			})
		}
		total += s.Size
	}
	err := all.Wait()
	return float64(total) / 1e6 / time.Since(began).Seconds(), err
}

// thinRead reads n records of a topic's only partition and decodes none: it follows the batches' headers.
func (b *bench) thinRead(p *process, dial func(context.Context, string, string) (net.Conn, error), topic string, n int) (load, error) {
	c, err := dial(b.ctx, "tcp", p.address)
	if err != nil {
		return load{}, err
	}
	defer c.Close()
	frame := []byte(nil)
	var l load
	before, began := cpu(p.pid), time.Now()
	for next := int64(0); next < int64(n); {
		req := kmsg.NewPtrFetchRequest()
		req.Version, req.MaxWaitMillis, req.MinBytes, req.MaxBytes, req.SessionEpoch = 12, 500, 1, 50<<20, -1
		rt := kmsg.NewFetchRequestTopic()
		rt.Topic = topic
		rp := kmsg.NewFetchRequestTopicPartition()
		rp.FetchOffset, rp.PartitionMaxBytes = next, 8<<20
		rt.Partitions = append(rt.Partitions, rp)
		req.Topics = append(req.Topics, rt)
		if _, err := c.Write(wire.AppendRequest(nil, 1, "thin", req)); err != nil {
			return l, err
		}
		var size [4]byte
		if _, err := io.ReadFull(c, size[:]); err != nil {
			return l, err
		}
		if need := int(binary.BigEndian.Uint32(size[:])); cap(frame) < need {
			frame = make([]byte, need)
		} else {
			frame = frame[:need]
		}
		if _, err := io.ReadFull(c, frame); err != nil {
			return l, err
		}
		resp := req.ResponseKind().(*kmsg.FetchResponse)
		if err := resp.ReadFrom(frame[5:]); err != nil {
			return l, err
		}
		r := &resp.Topics[0].Partitions[0]
		if err := errors.Join(kerr.ErrorForCode(resp.ErrorCode), kerr.ErrorForCode(r.ErrorCode)); err != nil {
			return l, err
		}
		for at := 0; at < len(r.RecordBatches); {
			h, err := recordbatch.ParseHeader(r.RecordBatches[at:])
			if err != nil || at+h.Size > len(r.RecordBatches) {
				break // the last may be cut
			}
			next, at = h.NextOffset(), at+h.Size
			l.bytes += int64(h.Size)
		}
	}
	l.seconds, l.cpu = time.Since(began).Seconds(), cpu(p.pid)-before
	return l, nil
}

// manyReaders has eight consumers read one topic at once.
func (b *bench) manyReaders() error {
	const section, readers = "Eight readers of one topic at once, S3, plain objects", 8
	store, _, url, err := b.s3()
	if err != nil {
		return err
	}
	v, _, err := b.startVarve("varve-many", s3Sets(url)...)
	if err != nil {
		return err
	}
	n, err := b.fill(v, "history", b.n(400_000))
	if err != nil {
		return err
	}
	segments, err := b.segments(v, "history")
	if err != nil {
		return err
	}
	together := func(read func() (load, error)) (load, error) {
		var all errgroup.Group
		var mu sync.Mutex
		var sum load
		before, began := cpu(v.pid), time.Now()
		for range readers {
			all.Go(func() error {
				l, err := read()
				mu.Lock()
				sum.bytes += l.bytes
				mu.Unlock()
				return err
			})
		}
		err := all.Wait()
		sum.seconds, sum.cpu = time.Since(began).Seconds(), cpu(v.pid)-before
		return sum, err
	}
	var ceiling, classic, straight, thin, classicCPU, straightCPU []float64
	for i := -1; i < b.rounds; i++ {
		f, err := objectstore.Open(url, objectstore.Options{AccessKey: "bench", SecretKey: "benchsecret"})
		if err != nil {
			return err
		}
		c, err := b.fetchAll(f, segments)
		if err != nil {
			return err
		}
		through, err := together(func() (load, error) { return b.consume(v, "history", n) })
		if err != nil {
			return err
		}
		d, err := together(func() (load, error) {
			l, err := b.directly(v, url, nil, "history", n)
			return l.load, err
		})
		if err != nil {
			return err
		}
		raw, err := together(func() (load, error) {
			t, _, err := b.transport(url, nil)
			if err != nil {
				return load{}, err
			}
			defer t.Close()
			return b.thinRead(v, t.DialContext, "history", n)
		})
		if err != nil {
			return err
		}
		if i < 0 {
			continue
		}
		ceiling, classic, straight, thin = append(ceiling, c), append(classic, through.mbps()), append(straight, d.mbps()), append(thin, raw.mbps())
		classicCPU, straightCPU = append(classicCPU, through.cpuPerGB()), append(straightCPU, d.cpuPerGB())
	}
	b.add(row{section: section, what: "the Fetcher alone, 4 × 4 MiB, nothing parsed", unit: "MB/s", varve: ceiling})
	b.add(row{section: section, what: "eight over transports, no record decoded", unit: "MB/s", varve: thin, target: "≥ 80 % of the Fetcher"})
	b.add(row{section: section, what: "eight kgo consumers over transports", unit: "MB/s", varve: straight})
	b.add(row{section: section, what: "eight kgo consumers through the broker", unit: "MB/s", varve: classic})
	b.add(row{section: section, what: "broker CPU, direct", unit: "s/GB", varve: straightCPU, target: "≤ 5 % of the classic path's"})
	b.add(row{section: section, what: "broker CPU, through the broker", unit: "s/GB", varve: classicCPU})
	b.note("Eight readers: the transports reach %.0f %% of the Fetcher, broker CPU %.1f %% of the classic path's.", 100*median(thin)/median(ceiling), 100*median(straightCPU)/median(classicCPU))
	return end(v, store)
}

// stockSection reads the tier of an Apache Kafka directly, while Kafka runs, and through Kafka itself.
func stockSection(b *bench) error {
	const section = "The tier of an Apache Kafka (LocalTieredStorage, live), one partition"
	if b.kafka == "" {
		return nil
	}
	k, err := b.startKafka("kafka-stock", "--tiered")
	if err != nil {
		return err
	}
	n, err := b.fill(k, "history", b.n(1_000_000))
	if err != nil {
		return err
	}
	var through, straight, throughCPU, straightCPU []float64
	for i := -1; i < b.rounds; i++ {
		t, err := b.consume(k, "history", n)
		if err != nil {
			return err
		}
		d, err := b.stockRead(k, n)
		if err != nil {
			return err
		}
		if i < 0 {
			continue
		}
		through, straight = append(through, t.mbps()), append(straight, d.mbps())
		throughCPU, straightCPU = append(throughCPU, t.cpuPerGB()), append(straightCPU, d.cpuPerGB())
	}
	b.add(row{section: section, what: "kgo over the transport against kgo through Kafka", unit: "MB/s", varve: straight, kafka: through, target: "≥ 3×, or the client's ceiling"})
	b.add(row{section: section, what: "Kafka's CPU", unit: "s/GB", varve: straightCPU, kafka: throughCPU, lowerIsBetter: true})
	return end(k)
}

// stockRead reads with a Locator and a transport of its own.
func (b *bench) stockRead(k *process, n int) (load, error) {
	f, err := objectstore.Open(filepath.Join(b.path(k.name), "tier"), objectstore.Options{})
	if err != nil {
		return load{}, err
	}
	l, err := kafkatier.Open(f, kafkatier.Options{Seeds: []string{k.address}, Layout: kafkatier.KafkaLocal("kafka-tiered-storage/")})
	if err != nil {
		return load{}, err
	}
	defer l.Close()
	t, err := direct.New(direct.Config{Enabled: true, Fetcher: f, Locator: l})
	if err != nil {
		return load{}, err
	}
	defer t.Close()
	got, err := b.consume(k, "history", n, kgo.Dialer(t.DialContext))
	if s := t.Snapshot(); err == nil && s.Served < s.BrokerBytes {
		err = fmt.Errorf("most came from the broker: %+v", s)
	}
	return got, err
}

// gatewaySection compares talking through a gateway with talking to the broker.
func gatewaySection(b *bench) error {
	const section = "Through varve gateway"
	if b.versitygw == "" {
		return nil
	}
	store, _, url, err := b.s3()
	if err != nil {
		return err
	}
	v, _, err := b.startVarve("varve-gateway", s3Sets(url)...)
	if err != nil {
		return err
	}
	proxy, err := b.startGateway(v)
	if err != nil {
		return err
	}
	reader, err := b.startGateway(v, "--bucket", url, "--access-key", "bench", "--secret-key", "benchsecret")
	if err != nil {
		return err
	}
	n := b.n(1_000_000)
	if err := b.create(v, "local", 6, nil); err != nil {
		return err
	}
	if err := b.fillEvenly(v, "local", n, 1024); err != nil {
		return err
	}
	remote, err := b.fill(v, "history", n)
	if err != nil {
		return err
	}
	all := []*process{v, proxy, reader}
	measure := func(round func(*process) (load, error)) (map[*process][]load, error) {
		out := map[*process][]load{}
		for i := -1; i < b.rounds; i++ {
			for _, p := range all {
				l, err := round(p)
				if err != nil {
					return nil, fmt.Errorf("%s: %w", p.name, err)
				}
				if i >= 0 {
					out[p] = append(out[p], l)
				}
			}
		}
		return out, nil
	}
	writes, err := measure(func(p *process) (load, error) {
		topic := b.topic()
		if err := b.create(v, topic, 6, nil); err != nil {
			return load{}, err
		}
		return b.produce(p, topic, "all", n/2, 1024, 0)
	})
	if err != nil {
		return err
	}
	late, err := measure(func(p *process) (load, error) {
		topic := b.topic()
		if err := b.create(v, topic, 6, nil); err != nil {
			return load{}, err
		}
		return b.produce(p, topic, "all", b.n(50_000), 1024, 5000)
	})
	if err != nil {
		return err
	}
	warm, err := measure(func(p *process) (load, error) { return b.consume(p, "local", n) })
	if err != nil {
		return err
	}
	old, err := measure(func(p *process) (load, error) { return b.consume(p, "history", remote) })
	if err != nil {
		return err
	}
	p99 := func(l load) float64 { return l.p99 }
	for _, r := range []struct {
		what, unit  string
		loads       map[*process][]load
		f           func(load) float64
		pass, reads string
	}{
		{"produce, 1 KiB, acks=all", "MB/s", writes, load.mbps, "≥ 80 %", ""},
		{"produce p99 at 5,000/s", "ms", late, p99, "+ < 1 ms", ""},
		{"consume what is local", "MB/s", warm, load.mbps, "≥ 80 %", ""},
		{"consume what is in S3", "MB/s", old, load.mbps, "", "≥ 1.5×"},
	} {
		b.add(row{section: section, what: r.what + ", the broker itself", unit: r.unit, varve: pick(r.loads[v], r.f)})
		b.add(row{section: section, what: r.what + ", a gateway that passes all", unit: r.unit, varve: pick(r.loads[proxy], r.f), target: r.pass})
		b.add(row{section: section, what: r.what + ", a gateway that reads the bucket", unit: r.unit, varve: pick(r.loads[reader], r.f), target: r.reads})
	}
	share := func(loads map[*process][]load, p *process) float64 {
		return 100 * median(pick(loads[p], load.mbps)) / median(pick(loads[v], load.mbps))
	}
	b.note("Gateway: passing reaches %.0f %% of the broker's produce and %.0f %% of its consume, p99 + %.2f ms; reading the bucket reaches %.0f %% of the broker path for history and %.0f %% for what is local. Client, gateway, broker and store share the cores.",
		share(writes, proxy), share(warm, proxy), median(pick(late[proxy], p99))-median(pick(late[v], p99)), share(old, reader), share(warm, reader))
	return end(proxy, reader, v, store)
}

// startGateway starts a gateway in front of a broker. CPU of its loads is the gateway's own.
func (b *bench) startGateway(v *process, args ...string) (*process, error) {
	port, err := freeRun(4)
	if err != nil {
		return nil, err
	}
	b.topics++ // a number that no other has
	name := fmt.Sprintf("gateway-%d", b.topics)
	p, err := b.command(name, nil, append([]string{b.binary, "gateway", "--brokers", v.address, "--listen", "127.0.0.1", "--ports", fmt.Sprintf("%d-%d", port, port+3)}, args...)...)
	if err != nil {
		return nil, err
	}
	p.address = fmt.Sprintf("127.0.0.1:%d", port)
	return p, answers(b.ctx, p.address, time.Now())
}
