package kafkatier_test

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/remotelog"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/wire"
)

// batch is one of a log.
type batch struct {
	b           []byte
	first, last int64
	epoch       int32
}

// partitionLog is what a fakeKafka has of a partition. Its mutex guards it.
type partitionLog struct {
	topic        string
	id           tp.UUID
	index        int32
	batches      []batch
	aborted      []producerstate.AbortedTxn
	start, local int64 // log start, and first offset that the broker has itself
	stable       int64 // last stable offset, -1: the end
	epoch        int32
	lineage      []leaderepoch.Entry
	failing      int16 // error of every Fetch
}

func (l *partitionLog) end() int64 {
	if len(l.batches) == 0 {
		return 0
	}
	return l.batches[len(l.batches)-1].last + 1
}

// add appends stored batches, whose offsets are in them.
func (l *partitionLog) add(t testing.TB, stored []byte) {
	t.Helper()
	for len(stored) > 0 {
		h, err := recordbatch.ParseHeader(stored)
		if err != nil {
			t.Fatal(err)
		}
		l.batches = append(l.batches, batch{stored[:h.Size], h.BaseOffset, h.LastOffset(), h.LeaderEpoch})
		stored = stored[h.Size:]
	}
}

// write appends a batch of values.
func (l *partitionLog) write(t testing.TB, values ...[]byte) {
	t.Helper()
	b := recordbatch.NewBuilder()
	b.BaseOffset, b.LeaderEpoch = l.end(), l.epoch
	for _, v := range values {
		b.Add(recordbatch.Record{Timestamp: 1, Value: v})
	}
	data, err := b.Build()
	if err != nil {
		t.Fatal(err)
	}
	l.add(t, data)
}

// fakeKafka answers what a Locator and a consumer ask a stock broker, over logs in memory. It counts the bytes that a real one
// would have had to read from its tier.
type fakeKafka struct {
	ln   net.Listener
	wg   sync.WaitGroup
	quit chan struct{}

	mu      sync.Mutex
	logs    []*partitionLog
	conns   []net.Conn
	changed chan struct{}
	remote  int   // bytes of records below the local start
	fetches int   // of user partitions
	asked   []int // keys of requests other than Fetch
}

func newFakeKafka(t testing.TB, logs ...*partitionLog) *fakeKafka {
	t.Helper()
	k := startFakeKafka(t, logs...)
	t.Cleanup(k.close)
	return k
}

func (k *fakeKafka) close() {
	k.ln.Close()
	close(k.quit)
	k.mu.Lock()
	for _, c := range k.conns {
		c.Close()
	}
	k.mu.Unlock()
	k.wg.Wait()
}

func startFakeKafka(t testing.TB, logs ...*partitionLog) *fakeKafka {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	k := &fakeKafka{ln: ln, logs: logs, quit: make(chan struct{}), changed: make(chan struct{})}
	k.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			k.mu.Lock()
			k.conns = append(k.conns, c)
			k.mu.Unlock()
			k.wg.Go(func() { k.serve(c) })
		}
	})
	return k
}

func (k *fakeKafka) addr() string { return k.ln.Addr().String() }

// do changes the logs and wakes who waits for that.
func (k *fakeKafka) do(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f()
	close(k.changed)
	k.changed = make(chan struct{})
}

// remoteBytes is what was read for consumers from below the local start.
func (k *fakeKafka) remoteBytes() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.remote
}

// versions are those of the requests that are understood.
var versions = map[int16][2]int16{1: {4, 16}, 2: {1, 8}, 3: {4, 12}, 18: {0, 3}, 23: {2, 4}}

func (k *fakeKafka) serve(c net.Conn) {
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
		req := kmsg.RequestForKey(int16(binary.BigEndian.Uint16(frame)))
		h, body, err := wire.ParseHeader(frame, func(_, version int16) bool {
			req.SetVersion(version)
			return req.IsFlexible()
		})
		if err != nil || req.ReadFrom(body) != nil {
			return
		}
		resp := k.answer(req)
		resp.SetVersion(h.Version)
		if _, err := c.Write(wire.AppendResponse(nil, h.Correlation, resp)); err != nil {
			return
		}
	}
}

func (k *fakeKafka) answer(req kmsg.Request) kmsg.Response {
	if f, ok := req.(*kmsg.FetchRequest); ok {
		return k.fetch(f)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.asked = append(k.asked, int(req.Key()))
	switch r := req.(type) {
	case *kmsg.ApiVersionsRequest:
		resp := kmsg.NewPtrApiVersionsResponse()
		for key, v := range versions {
			resp.ApiKeys = append(resp.ApiKeys, kmsg.ApiVersionsResponseApiKey{ApiKey: key, MinVersion: v[0], MaxVersion: v[1]})
		}
		return resp
	case *kmsg.MetadataRequest:
		return k.metadata(r)
	case *kmsg.ListOffsetsRequest:
		resp := kmsg.NewPtrListOffsetsResponse()
		for _, t := range r.Topics {
			rt := kmsg.NewListOffsetsResponseTopic()
			rt.Topic = t.Topic
			for _, p := range t.Partitions {
				rp := kmsg.NewListOffsetsResponseTopicPartition()
				rp.Partition = p.Partition
				l := k.find(t.Topic, tp.UUID{}, p.Partition)
				switch {
				case l == nil:
					rp.ErrorCode = 3
				case p.CurrentLeaderEpoch >= 0 && p.CurrentLeaderEpoch != l.epoch:
					rp.ErrorCode = 74
				default:
					rp.Offset = map[int64]int64{-1: l.end(), -2: l.start, -4: l.local}[p.Timestamp]
					if r.IsolationLevel == 1 && l.stable >= 0 {
						rp.Offset = min(rp.Offset, l.stable)
					}
				}
				rt.Partitions = append(rt.Partitions, rp)
			}
			resp.Topics = append(resp.Topics, rt)
		}
		return resp
	case *kmsg.OffsetForLeaderEpochRequest:
		resp := kmsg.NewPtrOffsetForLeaderEpochResponse()
		for _, t := range r.Topics {
			rt := kmsg.NewOffsetForLeaderEpochResponseTopic()
			rt.Topic = t.Topic
			for _, p := range t.Partitions {
				rp := kmsg.NewOffsetForLeaderEpochResponseTopicPartition()
				rp.Partition = p.Partition
				if l := k.find(t.Topic, tp.UUID{}, p.Partition); p.CurrentLeaderEpoch != l.epoch {
					rp.ErrorCode = 74
				} else {
					rp.LeaderEpoch, rp.EndOffset = leaderepoch.New(l.lineage).EndOffsetFor(p.LeaderEpoch, l.end())
				}
				rt.Partitions = append(rt.Partitions, rp)
			}
			resp.Topics = append(resp.Topics, rt)
		}
		return resp
	}
	panic("not understood")
}

func (k *fakeKafka) find(topic string, id tp.UUID, index int32) *partitionLog {
	for _, l := range k.logs {
		if (topic == "" && l.id == id || topic != "" && l.topic == topic) && l.index == index {
			return l
		}
	}
	return nil
}

func (k *fakeKafka) metadata(r *kmsg.MetadataRequest) *kmsg.MetadataResponse {
	resp := kmsg.NewPtrMetadataResponse()
	host, port, _ := net.SplitHostPort(k.addr())
	b := kmsg.NewMetadataResponseBroker()
	b.NodeID, b.Host = 1, host
	for _, c := range port {
		b.Port = 10*b.Port + c - '0'
	}
	resp.Brokers, resp.ControllerID = append(resp.Brokers, b), 1
	for _, t := range r.Topics {
		rt := kmsg.NewMetadataResponseTopic()
		rt.Topic, rt.TopicID, rt.ErrorCode = t.Topic, t.TopicID, 3
		for _, l := range k.logs {
			if t.Topic == nil && l.id != tp.UUID(t.TopicID) || t.Topic != nil && l.topic != *t.Topic {
				continue
			}
			rt.Topic, rt.TopicID, rt.ErrorCode = &l.topic, l.id, 0
			rp := kmsg.NewMetadataResponseTopicPartition()
			rp.Partition, rp.Leader, rp.LeaderEpoch, rp.Replicas, rp.ISR = l.index, 1, l.epoch, []int32{1}, []int32{1}
			rt.Partitions = append(rt.Partitions, rp)
		}
		resp.Topics = append(resp.Topics, rt)
	}
	return resp
}

func (k *fakeKafka) fetch(req *kmsg.FetchRequest) kmsg.Response {
	deadline := time.Now().Add(time.Duration(req.MaxWaitMillis) * time.Millisecond)
	for {
		k.mu.Lock()
		resp, enough := k.look(req)
		changed := k.changed
		k.mu.Unlock()
		left := time.Until(deadline)
		if enough || left <= 0 {
			return resp
		}
		timer := time.NewTimer(left)
		select {
		case <-changed:
		case <-timer.C:
		case <-k.quit:
			deadline = time.Time{}
		}
		timer.Stop()
	}
}

func (k *fakeKafka) look(req *kmsg.FetchRequest) (resp *kmsg.FetchResponse, enough bool) {
	resp = kmsg.NewPtrFetchResponse()
	left, taken := int(req.MaxBytes), false
	for _, t := range req.Topics {
		rt := kmsg.NewFetchResponseTopic()
		rt.Topic, rt.TopicID = t.Topic, t.TopicID
		for _, p := range t.Partitions {
			rp := kmsg.NewFetchResponseTopicPartition()
			rp.Partition, rp.RecordBatches, rp.HighWatermark, rp.LastStableOffset, rp.LogStartOffset = p.Partition, []byte{}, -1, -1, -1
			k.one(req, t, p, &rp, min(left, int(p.PartitionMaxBytes)), !taken)
			if n := len(rp.RecordBatches); n > 0 {
				left, taken, enough = left-n, true, true
			}
			enough = enough || rp.ErrorCode != 0
			rt.Partitions = append(rt.Partitions, rp)
		}
		resp.Topics = append(resp.Topics, rt)
	}
	return resp, enough
}

func (k *fakeKafka) one(req *kmsg.FetchRequest, t kmsg.FetchRequestTopic, p kmsg.FetchRequestTopicPartition, rp *kmsg.FetchResponseTopicPartition, limit int, minOne bool) {
	l := k.find(t.Topic, tp.UUID(t.TopicID), p.Partition)
	switch {
	case l == nil:
		rp.ErrorCode = 3
		return
	case l.failing != 0:
		rp.ErrorCode = l.failing
		return
	case p.CurrentLeaderEpoch >= 0 && p.CurrentLeaderEpoch != l.epoch:
		rp.ErrorCode = 74
		return
	case p.FetchOffset < l.start || p.FetchOffset > l.end():
		rp.ErrorCode = 1
		return
	}
	stable := l.end()
	if l.stable >= 0 {
		stable = l.stable
	}
	if l.topic != remotelog.Topic {
		k.fetches++
	}
	rp.HighWatermark, rp.LastStableOffset, rp.LogStartOffset = l.end(), stable, l.start
	upTo := l.end()
	if req.IsolationLevel == 1 {
		upTo = stable
		rp.AbortedTransactions = []kmsg.FetchResponseTopicPartitionAbortedTransaction{}
	}
	last := int64(-1)
	for _, b := range l.batches {
		if b.last < p.FetchOffset {
			continue
		}
		if n := len(rp.RecordBatches); b.last >= upTo || n+len(b.b) > limit && (n > 0 || !minOne) {
			break
		}
		if b.first < l.local {
			k.remote += len(b.b)
		}
		rp.RecordBatches, last = append(rp.RecordBatches, b.b...), b.last
	}
	for _, a := range l.aborted {
		if req.IsolationLevel == 1 && a.LastOffset >= p.FetchOffset && a.FirstOffset <= last {
			rp.AbortedTransactions = append(rp.AbortedTransactions, kmsg.FetchResponseTopicPartitionAbortedTransaction{ProducerID: a.ProducerID, FirstOffset: a.FirstOffset})
		}
	}
}

// topicFacts is what topic.json of a fixture tells.
type topicFacts struct {
	TopicID tp.UUID `json:"topicId"`
	Offsets struct {
		LatestTiered struct{ Offset int64 }
		LastStable   int64
	}
	ReadUncommitted, ReadCommitted []int64
}

// fixtureLog loads the local log of a fixture's topic; all that is in the tier is there alone.
func fixtureLog(t testing.TB, dir, topic string) (*partitionLog, topicFacts) {
	t.Helper()
	var facts topicFacts
	b, err := os.ReadFile(filepath.Join(dir, "local", topic, "topic.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &facts); err != nil {
		t.Fatal(err)
	}
	l := &partitionLog{topic: topic, id: facts.TopicID, local: facts.Offsets.LatestTiered.Offset + 1, stable: facts.Offsets.LastStable}
	for _, suffix := range []string{segment.LogSuffix, segment.TxnIndexSuffix} {
		files, err := filepath.Glob(filepath.Join(dir, "local", topic, topic+"-0", "*"+suffix))
		if err != nil || len(files) == 0 && suffix == segment.LogSuffix {
			t.Fatal(files, err)
		}
		slices.Sort(files)
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			if suffix == segment.LogSuffix {
				l.add(t, b)
				continue
			}
			txns, err := segment.ParseTxnIndex(b)
			if err != nil {
				t.Fatal(err)
			}
			l.aborted = append(l.aborted, txns...)
		}
	}
	for _, b := range l.batches {
		if n := len(l.lineage); n == 0 || l.lineage[n-1].Epoch < b.epoch {
			l.lineage = append(l.lineage, leaderepoch.Entry{Epoch: b.epoch, StartOffset: b.first})
		}
		l.epoch = b.epoch
	}
	return l, facts
}

// fixtureMetadata loads the metadata topic of a fixture.
func fixtureMetadata(t testing.TB, dir string) *partitionLog {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "remote-log-metadata", remotelog.Topic+"-0", "00000000000000000000.log"))
	if err != nil {
		t.Fatal(err)
	}
	l := metadataTopic()
	l.add(t, b)
	return l
}

func metadataTopic() *partitionLog {
	return &partitionLog{topic: remotelog.Topic, id: tp.UUID{0xee}, stable: -1, lineage: []leaderepoch.Entry{{}}}
}

func text(b []byte) string { return strings.ToValidUTF8(string(b), "?") }
