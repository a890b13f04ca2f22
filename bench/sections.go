package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"golang.org/x/sys/unix"
)

// pair starts both brokers, empty.
func (b *bench) pair(name string, varveSets []string, kafkaArgs ...string) (v, k *process, err error) {
	if v, _, err = b.startVarve("varve-"+name, varveSets...); err != nil {
		return nil, nil, err
	}
	if b.kafka != "" {
		if k, err = b.startKafka("kafka-"+name, kafkaArgs...); err != nil {
			return nil, nil, err
		}
	}
	return v, k, nil
}

func end(ps ...*process) error {
	var err error
	for _, p := range ps {
		if p != nil {
			err = errors.Join(err, p.end())
		}
	}
	return err
}

func nameOf(p *process) string {
	if p == nil {
		return ""
	}
	return p.name
}

func start(b *bench) error {
	const section = "Start and memory"
	empty := row{section: section, what: "start to first answer, empty", unit: "ms", lowerIsBetter: true, target: "< 300 ms, ≥ 10×"}
	full := row{section: section, what: "start to first answer, 1,000 partitions", unit: "ms", lowerIsBetter: true, target: "< 2 s, ≥ 10×"}
	idle := row{section: section, what: "resident memory, idle, empty", unit: "MB", lowerIsBetter: true, target: "≤ 60 MB"}
	many := row{section: section, what: "resident memory, idle, 1,000 partitions", unit: "MB", lowerIsBetter: true, target: "≤ 60 MB"}
	loaded := row{section: section, what: "resident memory after 1,000 partitions were written to", unit: "MB", lowerIsBetter: true, target: "≤ 300 MB"}
	// Formatting is no part of Kafka's start: its folder is made before.
	k := "kafka-start"
	if b.kafka != "" {
		p, err := b.startKafka(k)
		if err != nil {
			return err
		}
		if err := p.end(); err != nil {
			return err
		}
	}
	startOf := func(kafka bool) (*process, float64, error) {
		if !kafka {
			p, took, err := b.startVarve("varve-start")
			return p, ms(took), err
		}
		return b.timeKafka(k)
	}
	for _, phase := range []struct{ times, memory *row }{{&empty, &idle}, {&full, &many}} {
		for i := 0; i < b.rounds; i++ {
			for _, kafka := range []bool{false, true} {
				if kafka && b.kafka == "" {
					continue
				}
				p, took, err := startOf(kafka)
				if err != nil {
					return err
				}
				time.Sleep(2 * time.Second)
				side, memory := &phase.times.varve, &phase.memory.varve
				if kafka {
					side, memory = &phase.times.kafka, &phase.memory.kafka
				}
				*side, *memory = append(*side, took), append(*memory, resident(p.pid))
				if last := i == b.rounds-1; last && phase.times == &empty {
					if err := b.create(p, "thousand", 1000, nil); err != nil {
						return err
					}
				} else if last {
					if _, err := b.produce(p, "thousand", "all", b.n(500_000), 1024, 0); err != nil {
						return err
					}
					if kafka {
						loaded.kafka = append(loaded.kafka, resident(p.pid))
					} else {
						loaded.varve = append(loaded.varve, resident(p.pid))
					}
				}
				if err := p.end(); err != nil {
					return err
				}
			}
		}
	}
	for _, r := range []row{empty, full, idle, many, loaded} {
		b.add(r)
	}
	return nil
}

// timeKafka starts a Kafka that was formatted and stopped before, and takes the time to its first answer.
func (b *bench) timeKafka(folder string) (*process, float64, error) {
	dir := b.path(folder)
	address, err := exec.Command(b.kafka, "bootstrap", "--dir", dir).Output()
	if err != nil {
		return nil, 0, err
	}
	began := time.Now()
	answered := make(chan error, 1)
	var took time.Duration
	go func() {
		err := answers(b.ctx, strings.TrimSpace(string(address)), began)
		took = time.Since(began)
		answered <- err
	}()
	p, err := b.startKafka(folder)
	if err := errors.Join(err, <-answered); err != nil {
		return nil, 0, err
	}
	return p, ms(took), nil
}

func produceSection(b *bench) error {
	const section = "Produce, 6 partitions"
	v, k, err := b.pair("produce", nil)
	if err != nil {
		return err
	}
	for _, c := range []struct {
		size, n int
		acks    string
		target  string
	}{{1024, 500_000, "1", "≥ 1.5×"}, {1024, 500_000, "all", "≥ 1.5×"}, {100, 2_000_000, "1", "≥ 2×"}, {100, 2_000_000, "all", "≥ 2×"}} {
		loads, err := b.alternate([]*process{v, k}, func(p *process) (load, error) {
			topic := b.topic()
			if err := b.create(p, topic, 6, map[string]string{"retention.bytes": "1"}); err != nil {
				return load{}, err
			}
			unix.Sync() // what rounds before have written must not make this one wait for the disk
			return b.produce(p, topic, c.acks, b.n(c.n), c.size, 0)
		})
		if err != nil {
			return err
		}
		what := fmt.Sprintf("%d B records, acks=%s", c.size, c.acks)
		b.add(row{section: section, what: what, unit: "MB/s", varve: pick(loads[v.name], load.mbps), kafka: pick(loads[nameOf(k)], load.mbps), target: c.target})
		b.add(row{section: section, what: what + ", broker CPU", unit: "s/GB", varve: pick(loads[v.name], load.cpuPerGB), kafka: pick(loads[nameOf(k)], load.cpuPerGB), lowerIsBetter: true, target: "≥ 2×"})
	}
	return end(v, k)
}

func latencySection(b *bench) error {
	const section = "Produce latency at 5,000 records/s of 1 KiB"
	v, k, err := b.pair("latency", nil)
	if err != nil {
		return err
	}
	for _, acks := range []string{"1", "all"} {
		loads, err := b.alternate([]*process{v, k}, func(p *process) (load, error) {
			topic := b.topic()
			if err := b.create(p, topic, 6, nil); err != nil {
				return load{}, err
			}
			return b.produce(p, topic, acks, b.n(25_000), 1024, 5000)
		})
		if err != nil {
			return err
		}
		b.add(row{section: section, what: "p50, acks=" + acks, unit: "ms", varve: pick(loads[v.name], func(l load) float64 { return l.p50 }), kafka: pick(loads[nameOf(k)], func(l load) float64 { return l.p50 }), lowerIsBetter: true, target: "≥ 1×"})
		b.add(row{section: section, what: "p99, acks=" + acks, unit: "ms", varve: pick(loads[v.name], func(l load) float64 { return l.p99 }), kafka: pick(loads[nameOf(k)], func(l load) float64 { return l.p99 }), lowerIsBetter: true, target: "≥ 1×"})
	}
	return end(v, k)
}

func consumeSection(b *bench) error {
	const section = "Hot consume, 6 partitions"
	v, k, err := b.pair("consume", nil)
	if err != nil {
		return err
	}
	for _, c := range []struct{ size, n int }{{1024, 600_000}, {100, 3_000_000}} {
		topic := b.topic()
		for _, p := range []*process{v, k} {
			if p == nil {
				continue
			}
			if err := b.create(p, topic, 6, nil); err != nil {
				return err
			}
			if err := b.fillEvenly(p, topic, b.n(c.n), c.size); err != nil {
				return err
			}
		}
		loads, err := b.alternate([]*process{v, k}, func(p *process) (load, error) { return b.consume(p, topic, b.n(c.n)) })
		if err != nil {
			return err
		}
		what := fmt.Sprintf("%d B records", c.size)
		b.add(row{section: section, what: what, unit: "MB/s", varve: pick(loads[v.name], load.mbps), kafka: pick(loads[nameOf(k)], load.mbps), target: "the client's ceiling"})
		b.add(row{section: section, what: what + ", broker CPU", unit: "s/GB", varve: pick(loads[v.name], load.cpuPerGB), kafka: pick(loads[nameOf(k)], load.cpuPerGB), lowerIsBetter: true, target: "≥ 2×"})
	}
	return end(v, k)
}

var tierSets = []string{"remote.log.manager.task.interval.ms=1000", "log.retention.check.interval.ms=1000", "log.initial.task.delay.ms=0"}

var tierTopic = map[string]string{"remote.storage.enable": "true", "segment.bytes": "67108864", "local.retention.bytes": "1", "retention.ms": "-1"}

// fill produces into a tiered topic and waits until only the active segment is local. It returns how many records are
// remote alone.
func (b *bench) fill(p *process, topic string, n int) (int, error) {
	if err := b.create(p, topic, 1, tierTopic); err != nil {
		return 0, err
	}
	if err := b.fillEvenly(p, topic, n, 1024); err != nil {
		return 0, err
	}
	return b.settle(p, topic)
}

// settle waits until the local log starts where it has stopped moving.
func (b *bench) settle(p *process, topic string) (int, error) {
	last, still := -1, 0
	for deadline := time.Now().Add(3 * time.Minute); ; {
		local, err := b.localStart(p, topic)
		if err != nil {
			return 0, err
		}
		if local == last && local > 0 {
			still++
		} else {
			still, last = 0, local
		}
		if still >= 8 {
			return local, nil
		}
		if time.Now().After(deadline) {
			return 0, fmt.Errorf("the tier of %s does not settle", topic)
		}
		time.Sleep(500 * time.Millisecond)
	}
}

func tierSection(b *bench) error {
	const section = "Tiered catch-up through the broker, one partition"
	v, k, err := b.pair("tier", tierSets, "--tiered")
	if err != nil {
		return err
	}
	remote := map[string]int{}
	for _, p := range []*process{v, k} {
		if p == nil {
			continue
		}
		if remote[p.name], err = b.fill(p, "history", b.n(1_000_000)); err != nil {
			return err
		}
	}
	loads, err := b.alternate([]*process{v, k}, func(p *process) (load, error) { return b.consume(p, "history", remote[p.name]) })
	if err != nil {
		return err
	}
	b.add(row{section: section, what: "directory against LocalTieredStorage", unit: "MB/s", varve: pick(loads[v.name], load.mbps), kafka: pick(loads[nameOf(k)], load.mbps), target: "≥ 2.5×"})
	b.add(row{section: section, what: "broker CPU", unit: "s/GB", varve: pick(loads[v.name], load.cpuPerGB), kafka: pick(loads[nameOf(k)], load.cpuPerGB), lowerIsBetter: true})
	b.add(row{section: section, what: "first record", unit: "ms", varve: pick(loads[v.name], func(l load) float64 { return l.firstBytes }), kafka: pick(loads[nameOf(k)], func(l load) float64 { return l.firstBytes }), lowerIsBetter: true})
	b.note("Kafka with the Aiven plug-in over S3, which cannot be had from the package registries, gave 140–180 MB/s with this client on a machine of this kind (first record 52–60 ms).")
	return end(v, k)
}

const bucketName = "bench"

// s3 starts versitygw with an empty bucket.
func (b *bench) s3() (*process, *minio.Client, string, error) {
	root := b.path("s3")
	if err := os.MkdirAll(filepath.Join(root, bucketName), 0o755); err != nil {
		return nil, nil, "", err
	}
	port, err := freePort()
	if err != nil {
		return nil, nil, "", err
	}
	address := fmt.Sprintf("127.0.0.1:%d", port)
	p, err := b.command("versitygw", []string{"ROOT_ACCESS_KEY=bench", "ROOT_SECRET_KEY=benchsecret"}, b.versitygw, "--quiet", "--keep-alive", "--port", address, "posix", root)
	if err != nil {
		return nil, nil, "", err
	}
	cl, err := minio.New(address, &minio.Options{Creds: credentials.NewStaticV4("bench", "benchsecret", ""), BucketLookup: minio.BucketLookupPath})
	if err != nil {
		return nil, nil, "", err
	}
	for i := 0; ; i++ {
		if ok, err := cl.BucketExists(b.ctx, bucketName); ok {
			break
		} else if i > 500 {
			return nil, nil, "", fmt.Errorf("versitygw does not answer: %w", err)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return p, cl, fmt.Sprintf("s3://%s?endpoint=http://%s&path-style=true&region=us-east-1", bucketName, address), nil
}

func s3Sets(url string) []string {
	return append([]string{"varve.bucket=" + url, "varve.bucket.access.key=bench", "varve.bucket.secret.key=benchsecret"}, tierSets...)
}

func directSection(b *bench) error {
	const section = "Direct read from S3, one partition"
	if b.versitygw == "" {
		return nil
	}
	store, raw, url, err := b.s3()
	if err != nil {
		return err
	}
	v, _, err := b.startVarve("varve-direct", s3Sets(url)...)
	if err != nil {
		return err
	}
	n, err := b.fill(v, "history", b.n(1_000_000))
	if err != nil {
		return err
	}
	var plain, through, directly, brokerCPU, directCPU, requests []float64
	for i := -1; i < b.rounds; i++ {
		p, err := b.rangedRead(raw)
		if err != nil {
			return err
		}
		t, err := b.consume(v, "history", n)
		if err != nil {
			return err
		}
		d, err := b.directly(v, url, nil, "history", n)
		if err != nil {
			return err
		}
		if i < 0 {
			continue
		}
		plain, through, directly = append(plain, p), append(through, t.mbps()), append(directly, d.mbps())
		brokerCPU, directCPU, requests = append(brokerCPU, t.cpuPerGB()), append(directCPU, d.cpuPerGB()), append(requests, d.gets)
	}
	b.add(row{section: section, what: "plain parallel ranged reader (4 × 4 MiB), nothing parsed", unit: "MB/s", varve: plain})
	b.add(row{section: section, what: "kgo over the transport", unit: "MB/s", varve: directly, target: "≥ 70 % of the plain reader"})
	b.add(row{section: section, what: "kgo through the broker, S3", unit: "MB/s", varve: through})
	b.add(row{section: section, what: "broker CPU, direct", unit: "s/GB", varve: directCPU, target: "< 5 % of the broker path's"})
	b.add(row{section: section, what: "broker CPU, through the broker", unit: "s/GB", varve: brokerCPU})
	b.add(row{section: section, what: "ranges read per GB, direct", unit: "GETs", varve: requests})
	b.note("Direct read: %.0f %% of the plain ranged reader, broker CPU %.1f %% of the broker path's, %.1f× the 140–180 MB/s of Kafka with the Aiven plug-in.",
		100*median(directly)/median(plain), 100*median(directCPU)/median(brokerCPU), median(directly)/160)
	return end(v, store)
}

// rangedRead reads every log object with four ranges of 4 MiB in flight and throws the bytes away.
func (b *bench) rangedRead(cl *minio.Client) (float64, error) {
	const size, workers = 4 << 20, 4
	type piece struct {
		key      string
		from, to int64
	}
	var pieces []piece
	var total int64
	for o := range cl.ListObjects(b.ctx, bucketName, minio.ListObjectsOptions{Recursive: true}) {
		if o.Err != nil {
			return 0, o.Err
		}
		if !strings.HasSuffix(o.Key, ".log") {
			continue
		}
		for at := int64(0); at < o.Size; at += size {
			pieces = append(pieces, piece{o.Key, at, min(at+size, o.Size) - 1})
		}
		total += o.Size
	}
	next := make(chan piece)
	errs := make(chan error, workers)
	var wg sync.WaitGroup
	began := time.Now()
	for i := 0; i < workers; i++ {
		wg.Add(1)
		go func() {
			defer wg.Done()
			buf := make([]byte, size)
			for p := range next {
				o := minio.GetObjectOptions{}
				if err := o.SetRange(p.from, p.to); err != nil {
					errs <- err
					return
				}
				body, _, _, err := (&minio.Core{Client: cl}).GetObject(context.Background(), bucketName, p.key, o)
				if err == nil {
					_, err = io.ReadFull(body, buf[:p.to-p.from+1])
					body.Close()
				}
				if err != nil {
					errs <- err
					return
				}
			}
		}()
	}
	for _, p := range pieces {
		select {
		case next <- p:
		case err := <-errs:
			close(next)
			return 0, err
		}
	}
	close(next)
	wg.Wait()
	return float64(total) / 1e6 / time.Since(began).Seconds(), nil
}

func uploadSection(b *bench) error {
	const section = "Upload to S3"
	if b.versitygw == "" {
		return nil
	}
	store, raw, url, err := b.s3()
	if err != nil {
		return err
	}
	// The topic is filled while copying is off, then everything is uploaded at once.
	v, _, err := b.startVarve("varve-upload", s3Sets(url)...)
	if err != nil {
		return err
	}
	var plain, ours, quiet, beside, busy []float64
	for i := -1; i < b.rounds; i++ {
		topic := b.topic()
		configs := map[string]string{"remote.log.copy.disable": "true"}
		for k, s := range tierTopic {
			configs[k] = s
		}
		delete(configs, "local.retention.bytes")
		if err := b.create(v, topic, 1, configs); err != nil {
			return err
		}
		size := 1024
		if _, err := b.produce(v, topic, "all", b.n(500_000), size, 0); err != nil {
			return err
		}
		p, err := b.plainUpload(raw)
		if err != nil {
			return err
		}
		side := b.topic()
		if err := b.create(v, side, 1, nil); err != nil {
			return err
		}
		calm, err := b.produce(v, side, "all", b.n(5000), size, 5000)
		if err != nil {
			return err
		}
		// What another program's upload of the same kind does to the latency: the store shares cores and disk.
		foreign := make(chan error, 1)
		stop := make(chan struct{})
		go func() {
			for {
				if _, err := b.plainUpload(raw); err != nil {
					foreign <- err
					return
				}
				select {
				case <-stop:
					foreign <- nil
					return
				default:
				}
			}
		}()
		near, err := b.produce(v, side, "all", b.n(5000), size, 5000)
		close(stop)
		if err := errors.Join(err, <-foreign); err != nil {
			return err
		}
		before, err := b.remoteBytes(v, topic)
		if err != nil {
			return err
		}
		if out, err := exec.Command(b.binary, "topic", "alter", topic, "--delete", "remote.log.copy.disable", "-b", v.address).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		began := time.Now()
		during := make(chan load, 1)
		go func() {
			l, _ := b.produce(v, side, "all", b.n(5000), size, 5000)
			during <- l
		}()
		var bytes float64
		for {
			now, err := b.remoteBytes(v, topic)
			if err != nil {
				return err
			}
			if now.lag == 0 && now.bytes > 0 {
				bytes = now.bytes - before.bytes
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		took := time.Since(began).Seconds()
		l := <-during
		if i < 0 {
			continue
		}
		plain, ours, quiet, beside, busy = append(plain, p), append(ours, bytes/1e6/took), append(quiet, calm.p99), append(beside, near.p99), append(busy, l.p99)
	}
	b.add(row{section: section, what: "plain multipart upload of 64 MiB objects (minio-go)", unit: "MB/s", varve: plain})
	b.add(row{section: section, what: "segments of one partition", unit: "MB/s", varve: ours, target: "≥ 70 % of the plain upload"})
	b.add(row{section: section, what: "produce p99 at 5,000/s, no upload", unit: "ms", varve: quiet, lowerIsBetter: true})
	b.add(row{section: section, what: "produce p99 at 5,000/s, while another program uploads", unit: "ms", varve: beside, lowerIsBetter: true})
	b.add(row{section: section, what: "produce p99 at 5,000/s, during the upload", unit: "ms", varve: busy, lowerIsBetter: true, target: "≤ 2× without"})
	b.note("Upload: %.0f %% of the plain multipart upload; produce p99 %.1f× that without an upload, and %.1f× that beside another program's upload (store, client and broker share the cores).", 100*median(ours)/median(plain), median(busy)/median(quiet), median(busy)/median(beside))
	return end(v, store)
}

// plainUpload puts 8 objects of 64 MiB one after another.
func (b *bench) plainUpload(cl *minio.Client) (float64, error) {
	const size, count = 64 << 20, 8
	data := strings.Repeat(string(values(1 << 20)[0]), size>>20)
	began := time.Now()
	for i := 0; i < count; i++ {
		if _, err := cl.PutObject(b.ctx, bucketName, fmt.Sprintf("plain/%d", i), strings.NewReader(data), size, minio.PutObjectOptions{PartSize: 16 << 20}); err != nil {
			return 0, err
		}
	}
	return size * count / 1e6 / time.Since(began).Seconds(), nil
}

// tierState is what tier ls tells.
type tierState struct{ bytes, lag float64 }

func (b *bench) remoteBytes(p *process, topic string) (tierState, error) {
	out, err := exec.Command(b.binary, "tier", "ls", topic, "--json", "-b", p.address).Output()
	if err != nil {
		return tierState{}, err
	}
	var rows []struct {
		Bytes float64 `json:"remoteBytes"`
		Lag   float64 `json:"lagSegments"`
	}
	if err := json.Unmarshal(out, &rows); err != nil || len(rows) != 1 {
		return tierState{}, fmt.Errorf("tier ls: %w: %s", err, out)
	}
	return tierState{rows[0].Bytes, rows[0].Lag}, nil
}
