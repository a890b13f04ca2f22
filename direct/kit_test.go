package direct_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/internal/directfetch"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/wire"
)

// fataler is testing.T and rapid.T.
type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
}

// record is what a client sees.
type record struct {
	offset     int64
	key, value string
}

// fakeBatch is one batch of a fake partition.
type fakeBatch struct {
	b           []byte
	first, last int64
}

type fakeTxn struct{ producer, first, last int64 }

// fakeSegment is a range of batches that lies in the bucket.
type fakeSegment struct {
	first, last int // batches
	id          tp.UUID
	key         string
	size        int64
	starts      []int64 // positions of batches
}

// fakePartition is a log whose front is tiered. Its broker's mutex guards it.
type fakePartition struct {
	batches     []fakeBatch
	aborted     []fakeTxn
	segments    []fakeSegment
	local       int64 // first offset that the broker has itself
	start       int64
	epoch       int32
	all, commit []record // what read_uncommitted and read_committed see
}

func (p *fakePartition) end() int64 {
	if len(p.batches) == 0 {
		return 0
	}
	return p.batches[len(p.batches)-1].last + 1
}

// append adds a batch.
func (p *fakePartition) append(t fataler, codec recordbatch.Codec, producer int64, txn bool, values ...string) {
	t.Helper()
	b := recordbatch.NewBuilder()
	b.BaseOffset, b.LeaderEpoch, b.Codec = p.end(), p.epoch, codec
	if producer >= 0 {
		b.ProducerID, b.ProducerEpoch, b.BaseSequence, b.Transactional = producer, 0, 0, txn
	}
	for _, v := range values {
		b.Add(recordbatch.Record{Timestamp: 1, Key: []byte("k" + v), Value: []byte(v)})
	}
	data, err := b.Build()
	if err != nil {
		t.Fatalf("%v", err)
	}
	for i, v := range values {
		p.all = append(p.all, record{p.end() + int64(i), "k" + v, v})
	}
	p.batches = append(p.batches, fakeBatch{data, p.end(), p.end() + int64(len(values)) - 1})
}

// finish ends a transaction that began at first.
func (p *fakePartition) finish(producer, first int64, commit bool) {
	at := p.end()
	m := recordbatch.EndTxnMarker(recordbatch.Marker{ProducerID: producer, Commit: commit, Timestamp: 1, BaseOffset: at, LeaderEpoch: p.epoch})
	p.batches = append(p.batches, fakeBatch{m, at, at})
	if !commit {
		p.aborted = append(p.aborted, fakeTxn{producer, first, at})
	}
}

// expect works out what clients must see.
func (p *fakePartition) expect(t fataler) {
	t.Helper()
	for _, b := range p.batches {
		h, err := recordbatch.ParseHeader(b.b)
		if err != nil {
			t.Fatalf("%v", err)
		}
		dropped := slices.ContainsFunc(p.aborted, func(x fakeTxn) bool {
			return h.IsTransactional() && x.producer == h.ProducerID && x.first <= b.first && b.last <= x.last
		})
		if dropped || h.IsControl() {
			continue
		}
		for _, r := range p.all {
			if r.offset >= b.first && r.offset <= b.last {
				p.commit = append(p.commit, r)
			}
		}
	}
}

// tier puts batches [from, to) into the bucket as one segment.
func (p *fakePartition) tier(t fataler, bucket objstore.Bucket, name string, from, to int) {
	t.Helper()
	s := fakeSegment{first: from, last: to - 1, key: fmt.Sprintf("%s/%020d.log", name, p.batches[from].first)}
	copy(s.id[:], fmt.Sprintf("%s-%d-0123456789abcdef", name, from))
	var log []byte
	for _, b := range p.batches[from:to] {
		s.starts = append(s.starts, int64(len(log)))
		log = append(log, b.b...)
	}
	s.size = int64(len(log))
	if err := bucket.Put(context.Background(), s.key, bytes.NewReader(log), s.size, objstore.PutOptions{}); err != nil {
		t.Fatalf("%v", err)
	}
	p.segments = append(p.segments, s)
	p.local = p.batches[to-1].last + 1
}

var fakeTopicID = [16]byte{0xfa, 0xce}

const fakeTopic = "topic"

// fakeBroker speaks ApiVersions and Fetch over partitions whose front is in a bucket. Its answers follow KIP-74 and
// KIP-1248; it never forgets what it was asked.
type fakeBroker struct {
	ln       net.Listener
	wg       sync.WaitGroup
	feature  bool
	fetchMax int16
	// spoil may change an answer before it goes out.
	spoil func(*kmsg.FetchResponse)

	mu          sync.Mutex
	parts       []*fakePartition
	changed     chan struct{}
	quit        chan struct{}
	conns       map[net.Conn]bool
	recordBytes int64
	tagged      int
	fetches     int
	errors      map[int]int16 // error of a partition
	validity    int64
}

func newFakeBroker(t fataler, parts ...*fakePartition) *fakeBroker {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("%v", err)
	}
	b := &fakeBroker{ln: ln, feature: true, fetchMax: 18, parts: parts, changed: make(chan struct{}), quit: make(chan struct{}), conns: map[net.Conn]bool{}, errors: map[int]int16{}, validity: 60_000}
	b.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			b.mu.Lock()
			b.conns[c] = true
			b.mu.Unlock()
			b.wg.Go(func() { b.serve(c) })
		}
	})
	return b
}

func (b *fakeBroker) close() {
	b.ln.Close()
	close(b.quit)
	b.mu.Lock()
	for c := range b.conns {
		c.Close()
	}
	b.mu.Unlock()
	b.wg.Wait()
}

// counts tells what was asked and sent so far.
func (b *fakeBroker) counts() (fetches, tagged int, recordBytes int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.fetches, b.tagged, b.recordBytes
}

func (b *fakeBroker) addr() string { return b.ln.Addr().String() }

// do changes the broker's state and wakes who waits for it.
func (b *fakeBroker) do(change func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change()
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *fakeBroker) serve(c net.Conn) {
	defer c.Close()
	in := bufio.NewReader(c)
	for {
		var size [4]byte
		if _, err := io.ReadFull(in, size[:]); err != nil {
			return
		}
		frame := make([]byte, binary.BigEndian.Uint32(size[:]))
		if _, err := io.ReadFull(in, frame); err != nil {
			return
		}
		var resp kmsg.Response
		h, body, err := wire.ParseHeader(frame, func(key, version int16) bool {
			return key == 1 && version >= 12 || key == 18 && version >= 3
		})
		if err != nil {
			return
		}
		switch h.Key {
		case 18:
			r := kmsg.NewPtrApiVersionsResponse()
			r.Version = h.Version
			k := kmsg.NewApiVersionsResponseApiKey()
			k.ApiKey, k.MinVersion, k.MaxVersion = 1, 4, b.fetchMax
			r.ApiKeys = append(r.ApiKeys, k)
			if b.feature {
				f := kmsg.NewApiVersionsResponseSupportedFeature()
				f.Name, f.MinVersion, f.MaxVersion = directfetch.Feature, 1, 1
				r.SupportedFeatures = append(r.SupportedFeatures, f)
			}
			resp = r
		case 1:
			req := kmsg.NewPtrFetchRequest()
			req.Version = h.Version
			if req.ReadFrom(body) != nil {
				return
			}
			resp = b.fetch(req)
		default: // an echo, for whatever else a test sends
			out := binary.BigEndian.AppendUint32(nil, uint32(4+len(body)))
			out = append(binary.BigEndian.AppendUint32(out, uint32(h.Correlation)), body...)
			if _, err := c.Write(out); err != nil {
				return
			}
			continue
		}
		if _, err := c.Write(wire.AppendResponse(nil, h.Correlation, resp)); err != nil {
			return
		}
	}
}

func (b *fakeBroker) fetch(req *kmsg.FetchRequest) *kmsg.FetchResponse {
	deadline := time.Now().Add(time.Duration(req.MaxWaitMillis) * time.Millisecond)
	b.mu.Lock()
	b.fetches++
	b.mu.Unlock()
	for {
		b.mu.Lock()
		resp, size, enough := b.look(req)
		changed := b.changed
		b.mu.Unlock()
		left := time.Until(deadline)
		if enough || size >= int(req.MinBytes) || left <= 0 {
			b.mu.Lock()
			b.recordBytes += int64(size)
			b.mu.Unlock()
			if b.spoil != nil {
				b.spoil(resp)
			}
			return resp
		}
		timer := time.NewTimer(left)
		select {
		case <-changed:
		case <-timer.C:
		case <-b.quit:
			deadline = time.Time{}
		}
		timer.Stop()
	}
}

func (b *fakeBroker) look(req *kmsg.FetchRequest) (resp *kmsg.FetchResponse, size int, enough bool) {
	resp = kmsg.NewPtrFetchResponse()
	resp.Version = req.Version
	formats := directfetch.Formats(req)
	left, taken := int(req.MaxBytes), false
	for _, rt := range req.Topics {
		topic := kmsg.NewFetchResponseTopic()
		topic.Topic, topic.TopicID = rt.Topic, rt.TopicID
		for _, rp := range rt.Partitions {
			r := kmsg.NewFetchResponseTopicPartition()
			r.Partition, r.RecordBatches, r.HighWatermark, r.LastStableOffset, r.LogStartOffset = rp.Partition, []byte{}, -1, -1, -1
			b.one(req, &rp, &r, formats, min(int(rp.PartitionMaxBytes), left), !taken)
			if n := len(r.RecordBatches); n > 0 {
				left, taken, size = left-n, true, size+n
			}
			enough = enough || r.ErrorCode != 0 || r.UnknownTags.Len() > 0
			topic.Partitions = append(topic.Partitions, r)
		}
		resp.Topics = append(resp.Topics, topic)
	}
	return resp, size, enough
}

func (b *fakeBroker) one(req *kmsg.FetchRequest, rp *kmsg.FetchRequestTopicPartition, r *kmsg.FetchResponseTopicPartition, formats []string, limit int, minOne bool) {
	if int(rp.Partition) >= len(b.parts) {
		r.ErrorCode = 3
		return
	}
	p := b.parts[rp.Partition]
	if code := b.errors[int(rp.Partition)]; code != 0 {
		r.ErrorCode = code
		return
	}
	if rp.CurrentLeaderEpoch >= 0 && rp.CurrentLeaderEpoch != p.epoch {
		r.ErrorCode = 74 // FENCED_LEADER_EPOCH
		return
	}
	if rp.FetchOffset < p.start || rp.FetchOffset > p.end() {
		r.ErrorCode = 1
		return
	}
	r.HighWatermark, r.LastStableOffset, r.LogStartOffset = p.end(), p.end(), p.start
	abort := func(from, to int64) {
		if req.IsolationLevel != 1 {
			return
		}
		r.AbortedTransactions = []kmsg.FetchResponseTopicPartitionAbortedTransaction{}
		for _, x := range p.aborted {
			if x.last >= from && x.first <= to {
				r.AbortedTransactions = append(r.AbortedTransactions, kmsg.FetchResponseTopicPartitionAbortedTransaction{ProducerID: x.producer, FirstOffset: x.first})
			}
		}
	}
	abort(rp.FetchOffset, rp.FetchOffset-1)
	if directfetch.Requested(rp) {
		b.tagged++
		if rp.FetchOffset < p.local && slices.Contains(formats, "ApacheKafkaV1") {
			if l, ok := p.locate(rp.FetchOffset, b.validity); ok {
				directfetch.SetLocations(r, []directfetch.Location{l})
				abort(rp.FetchOffset, l.EndOffset)
				return
			}
		}
	}
	from := int64(-1)
	for _, x := range p.batches {
		if x.last < rp.FetchOffset {
			continue
		}
		if n := len(r.RecordBatches); n+len(x.b) > limit && (n > 0 || !minOne) {
			break
		}
		if from < 0 {
			from = x.first
		}
		r.RecordBatches = append(r.RecordBatches, x.b...)
		abort(from, x.last)
	}
}

// locate describes the segment that holds an offset, from two batches before it on, as a sparse index would.
func (p *fakePartition) locate(offset, validity int64) (directfetch.Location, bool) {
	for _, s := range p.segments {
		if offset < p.batches[s.first].first || offset > p.batches[s.last].last {
			continue
		}
		i := s.first
		for p.batches[i].last < offset {
			i++
		}
		return directfetch.Location{SegmentID: s.id, ObjectKey: s.key, Format: "ApacheKafkaV1", BaseOffset: p.batches[s.first].first, EndOffset: p.batches[s.last].last,
			StartPosition: s.starts[max(i-2-s.first, 0)], EndPosition: s.size, SegmentSize: s.size, LeaderEpoch: p.epoch, ValidityMs: validity}, true
	}
	return directfetch.Location{}, false
}

// fakeLocator knows what a fake broker that does not announce the feature has in the bucket. It gives some ranges in parts, as a
// Locator may that has a sparse index alone.
type fakeLocator struct {
	b *fakeBroker

	mu    sync.Mutex
	asked int
	// answer may change what is said; nil says it as it is.
	answer func(n int, q direct.Query, l *direct.Location) (*direct.Location, error)
}

func (f *fakeLocator) Tiered(q direct.Query) bool {
	f.b.mu.Lock()
	defer f.b.mu.Unlock()
	return q.Offset < f.b.parts[q.Partition].local
}

func (f *fakeLocator) Locate(_ context.Context, q direct.Query) (*direct.Location, error) {
	f.mu.Lock()
	f.asked++
	n := f.asked
	f.mu.Unlock()
	f.b.mu.Lock()
	p := f.b.parts[q.Partition]
	l, ok := p.locate(q.Offset, f.b.validity)
	out := &direct.Location{SegmentID: l.SegmentID, ObjectKey: l.ObjectKey, Format: l.Format, BaseOffset: l.BaseOffset, EndOffset: l.EndOffset,
		StartPosition: l.StartPosition, EndPosition: l.EndPosition, Size: l.SegmentSize, LeaderEpoch: l.LeaderEpoch,
		Validity: time.Duration(l.ValidityMs) * time.Millisecond, HighWatermark: p.end()}
	if !ok {
		out = nil
	}
	for _, x := range p.aborted {
		if ok && q.Committed && x.last >= q.Offset && x.first <= out.EndOffset {
			out.Aborted = append(out.Aborted, direct.AbortedTransaction{ProducerID: x.producer, FirstOffset: x.first})
		}
	}
	f.b.mu.Unlock()
	if f.answer != nil {
		return f.answer(n, q, out)
	}
	return out, nil
}

// client is a bare Kafka client on one connection.
type client struct {
	t    fataler
	conn net.Conn
	in   *bufio.Reader
	corr int32
}

func newClient(t fataler, conn net.Conn) *client {
	return &client{t: t, conn: conn, in: bufio.NewReader(conn)}
}

func (c *client) send(req kmsg.Request) int32 {
	c.corr++
	if _, err := c.conn.Write(wire.AppendRequest(nil, c.corr, "bare", req)); err != nil {
		c.t.Fatalf("send: %v", err)
	}
	return c.corr
}

// receive reads the next frame, which must have that correlation id, and returns what follows it.
func (c *client) receive(corr int32) []byte {
	c.t.Helper()
	var head [8]byte
	if _, err := io.ReadFull(c.in, head[:]); err != nil {
		c.t.Fatalf("receive: %v", err)
	}
	if got := int32(binary.BigEndian.Uint32(head[4:])); got != corr {
		c.t.Fatalf("answer %d where %d is due", got, corr)
	}
	body := make([]byte, binary.BigEndian.Uint32(head[:4])-4)
	if _, err := io.ReadFull(c.in, body); err != nil {
		c.t.Fatalf("receive: %v", err)
	}
	return body
}

// fetchOptions are those of a Fetch.
type fetchOptions struct {
	version                    int16
	committed                  bool
	maxBytes, partMax, minimum int32
	waitMs                     int32
	epoch                      int32
	topicID                    [16]byte // fakeTopicID if zero
}

// position is where a client is in a partition.
type position struct {
	partition int32
	offset    int64
}

func (o fetchOptions) request(at []position) *kmsg.FetchRequest {
	req := kmsg.NewPtrFetchRequest()
	req.Version, req.MaxBytes, req.MinBytes, req.MaxWaitMillis = o.version, o.maxBytes, o.minimum, o.waitMs
	if o.committed {
		req.IsolationLevel = 1
	}
	topic := kmsg.NewFetchRequestTopic()
	topic.Topic = fakeTopic
	if o.version >= 13 {
		if topic.TopicID = o.topicID; topic.TopicID == ([16]byte{}) {
			topic.TopicID = fakeTopicID
		}
	}
	for _, p := range at {
		rp := kmsg.NewFetchRequestTopicPartition()
		rp.Partition, rp.FetchOffset, rp.PartitionMaxBytes, rp.CurrentLeaderEpoch = p.partition, p.offset, o.partMax, o.epoch
		topic.Partitions = append(topic.Partitions, rp)
	}
	req.Topics = append(req.Topics, topic)
	return req
}

func (c *client) fetch(o fetchOptions, at []position) *kmsg.FetchResponse {
	c.t.Helper()
	body := c.receive(c.send(o.request(at)))
	return c.parse(o.version, body)
}

func (c *client) parse(version int16, body []byte) *kmsg.FetchResponse {
	c.t.Helper()
	if version >= 12 {
		if body[0] != 0 {
			c.t.Fatalf("tagged fields in the header")
		}
		body = body[1:]
	}
	resp := kmsg.NewPtrFetchResponse()
	resp.Version = version
	if err := resp.ReadFrom(body); err != nil {
		c.t.Fatalf("v%d: %v", version, err)
	}
	return resp
}

// records decodes an answer for one partition as a consumer does (KIP-98): records below the offset are skipped, aborted
// transactions and markers filtered. next is the offset to go on at.
func records(t fataler, p *kmsg.FetchResponseTopicPartition, offset int64, committed bool) (out []record, next int64) {
	t.Helper()
	next = offset
	todo := slices.Clone(p.AbortedTransactions)
	slices.SortStableFunc(todo, func(a, b kmsg.FetchResponseTopicPartitionAbortedTransaction) int {
		return int(a.FirstOffset - b.FirstOffset)
	})
	active := map[int64]bool{}
	for rest := p.RecordBatches; len(rest) > 0; {
		h, err := recordbatch.ParseHeader(rest)
		if err == nil {
			err = h.Verify(rest)
		}
		if err != nil {
			t.Fatalf("partition %d at %d: %v", p.Partition, next, err)
		}
		b := rest[:h.Size]
		rest = rest[h.Size:]
		for len(todo) > 0 && todo[0].FirstOffset <= h.LastOffset() {
			active[todo[0].ProducerID] = true
			todo = todo[1:]
		}
		if h.LastOffset() < offset {
			continue
		}
		if h.NextOffset() <= next {
			t.Fatalf("partition %d: batch of %d to %d at %d", p.Partition, h.BaseOffset, h.LastOffset(), next)
		}
		next = h.NextOffset()
		if h.IsControl() {
			if ctl, ok, err := recordbatch.ControlOf(b); err != nil || !ok {
				t.Fatalf("%v", err)
			} else if ctl.Type == recordbatch.ControlAbort {
				delete(active, h.ProducerID)
			}
			continue
		}
		if committed && h.IsTransactional() && active[h.ProducerID] {
			continue
		}
		it, err := recordbatch.Records(b, 0)
		if err != nil {
			t.Fatalf("%v", err)
		}
		for it.Next() {
			if r := it.Record(); r.Offset >= offset {
				out = append(out, record{r.Offset, string(r.Key), string(r.Value)})
			}
		}
		if it.Err() != nil {
			t.Fatalf("%v", it.Err())
		}
	}
	return out, next
}
