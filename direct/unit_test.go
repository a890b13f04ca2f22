package direct

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"
	"pgregory.net/rapid"

	"github.com/varve-io/varve/internal/directfetch"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/wire"
)

func TestPlan(t *testing.T) {
	now := time.Unix(1000, 0)
	good := streamView{epoch: 3, expires: now.Add(time.Second), marks: now}
	with := func(change func(*streamView)) *streamView {
		s := good
		change(&s)
		return &s
	}
	ready := with(func(s *streamView) { s.ready = true })
	for name, c := range map[string]struct {
		v    view
		want verdict
	}{
		"nothing known":            {view{epoch: -1, capable: true}, verdict{act: actTag}},
		"broker cannot":            {view{epoch: -1}, verdict{act: actPlain}},
		"store rests":              {view{epoch: -1, capable: true, resting: true}, verdict{act: actPlain}},
		"range is held":            {view{epoch: -1, capable: true, held: true}, verdict{act: actPlain}},
		"offset failed before":     {view{epoch: -1, capable: true, plain: true}, verdict{act: actPlain}},
		"data":                     {view{epoch: -1, capable: true, stream: ready}, verdict{act: actServe}},
		"data while resting":       {view{epoch: 3, capable: true, resting: true, held: true, stream: ready}, verdict{act: actServe}},
		"data, old marks":          {view{epoch: 3, capable: true, stream: with(func(s *streamView) { s.ready = true; s.marks = now.Add(-5 * time.Second) })}, verdict{act: actServe, refresh: true}},
		"reading":                  {view{epoch: 3, capable: true, stream: &good}, verdict{act: actWait}},
		"reading, old marks":       {view{epoch: 3, capable: true, stream: with(func(s *streamView) { s.marks = now.Add(-time.Minute) })}, verdict{act: actWait, refresh: true}},
		"newer epoch":              {view{epoch: 4, capable: true, stream: ready}, verdict{act: actTag, drop: true}},
		"older epoch":              {view{epoch: 2, capable: true, stream: ready}, verdict{act: actTag, drop: true}},
		"expired with data":        {view{epoch: 3, capable: true, stream: with(func(s *streamView) { s.ready = true; s.expires = now })}, verdict{act: actTag, drop: true}},
		"expired while reading":    {view{epoch: 3, capable: true, stream: with(func(s *streamView) { s.expires = now })}, verdict{act: actPlain, drop: true, fallback: causeExpired}},
		"failed":                   {view{epoch: 3, capable: true, stream: with(func(s *streamView) { s.failed = causeShort })}, verdict{act: actPlain, drop: true, fallback: causeShort}},
		"failed behind data":       {view{epoch: 3, capable: true, stream: with(func(s *streamView) { s.failed = causeShort; s.ready = true })}, verdict{act: actServe}},
		"read to the end":          {view{epoch: 3, capable: true, stream: with(func(s *streamView) { s.done = true })}, verdict{act: actTag, drop: true}},
		"read to the end, resting": {view{epoch: 3, capable: true, resting: true, stream: with(func(s *streamView) { s.done = true })}, verdict{act: actPlain, drop: true}},
	} {
		if got := plan(c.v, now, 5*time.Second); got != c.want {
			t.Errorf("%s: %+v instead of %+v", name, got, c.want)
		}
	}
}

func TestBreaker(t *testing.T) {
	now := time.Unix(1000, 0)
	b := breaker{after: 3, min: time.Second, max: 5 * time.Second}
	for i := range 3 {
		if b.resting(now) {
			t.Fatalf("rests after %d failures", i)
		}
		if began := b.failed(now); began != (i == 2) {
			t.Fatalf("failure %d: rest began %v", i, began)
		}
	}
	for _, rest := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 5 * time.Second, 5 * time.Second} {
		if b.failed(now) || !b.resting(now.Add(rest-1)) || b.resting(now.Add(rest)) {
			t.Fatalf("does not rest for %s", rest)
		}
		now = now.Add(rest)
		b.failed(now)
	}
	now = now.Add(5 * time.Second)
	b.succeeded(now)
	first, second, third := b.failed(now), b.failed(now), b.failed(now)
	if first || second || !third || b.resting(now.Add(time.Second)) {
		t.Fatal("success does not begin anew")
	}
}

func TestParseProperties(t *testing.T) {
	fetchers := Fetchers{"x": func(map[string]string) (Fetcher, error) { return panicFetcher{}, nil },
		"bad": func(map[string]string) (Fetcher, error) { return nil, errors.New("no") }}
	c, err := ParseProperties(nil, fetchers)
	if err != nil || c.Enabled || c.Fetcher != nil || c.ConnectTimeout != time.Second || c.ReadTimeout != 5*time.Second {
		t.Fatalf("defaults: %+v %v", c, err)
	}
	c, err = ParseProperties(map[string]string{"fetch.remote.enabled": "TRUE", "remote.storage.fetcher.class": "x", "fetch.remote.connect.timeout.ms": "7",
		"fetch.remote.read.timeout.ms": "8", "group.id": "ours"}, fetchers)
	if err != nil || !c.Enabled || c.Fetcher == nil || c.ConnectTimeout != 7*time.Millisecond || c.ReadTimeout != 8*time.Millisecond {
		t.Fatalf("all set: %+v %v", c, err)
	}
	for name, value := range map[string]string{"fetch.remote.enabled": "yes", "remote.storage.fetcher.class": "y", "fetch.remote.connect.timeout.ms": "0",
		"fetch.remote.read.timeout.ms": "soon", "remote.storage.fetcher.class.path": "/lib"} {
		if _, err := ParseProperties(map[string]string{name: value}, fetchers); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s=%s: %v", name, value, err)
		}
	}
	if _, err := ParseProperties(map[string]string{"remote.storage.fetcher.class": "bad"}, fetchers); err == nil {
		t.Error("a constructor's error is lost")
	}
}

type panicFetcher struct{}

func (panicFetcher) FetchLogSegment(context.Context, Segment, int64, int64) (io.ReadCloser, error) {
	panic("boom")
}
func (panicFetcher) Formats() []string { return []string{"X"} }

func TestCauses(t *testing.T) {
	for want, err := range map[cause]error{causeNotFound: ErrNotFound, causeAuth: ErrAuth, causeThrottle: ErrThrottled, causeConnect: ErrConnectTimeout,
		causeRead: ErrReadTimeout, causeShort: io.ErrUnexpectedEOF, causeFormat: ErrUnknownFormat, causeDamaged: ErrDamaged, causePanic: errPanic,
		causeTooLarge: errTooLarge, causeOther: errors.New("else")} {
		if got := causeOf(fmt.Errorf("while: %w", err)); got != want {
			t.Errorf("%v: %s", err, got)
		}
	}
}

func reader(b []byte) *bufio.Reader { return bufio.NewReader(bytes.NewReader(b)) }

func TestFrames(t *testing.T) {
	frame := []byte{0, 0, 0, 3, 1, 2, 3}
	if got, err := readFrame(reader(frame), 1, 3, 1<<20); err != nil || !bytes.Equal(got, frame) {
		t.Fatal(got, err)
	}
	for _, limits := range [][2]int{{4, 9}, {0, 2}} {
		if _, err := readFrame(reader(frame), limits[0], limits[1], 1<<20); !errors.Is(err, errFrame) {
			t.Errorf("%v: %v", limits, err)
		}
	}
	if _, err := readFrame(reader(frame[:6]), 1, 9, 1<<20); err != io.ErrUnexpectedEOF {
		t.Error(err)
	}
	if _, err := readFrame(reader([]byte{0xff, 0xff, 0xff, 0xff}), 1, 9, 1<<20); !errors.Is(err, errFrame) {
		t.Error(err)
	}
	big := make([]byte, 5<<20)
	binary.BigEndian.PutUint32(big, uint32(len(big)-4))
	big[len(big)-1] = 7
	if got, err := readFrame(reader(big), 1, 8<<20, 1<<20); err != nil || !bytes.Equal(got, big) {
		t.Fatal(len(got), err)
	}
	// A promise of 1 GiB behind which nothing comes must not take 1 GiB.
	if n := testing.AllocsPerRun(1, func() {
		_, _ = readFrame(reader(append([]byte{0x40, 0, 0, 0}, make([]byte, 100)...)), 1, 1<<31-1, 1<<20)
	}); n > 20 {
		t.Errorf("%v allocations", n)
	}
}

func TestSilent(t *testing.T) {
	id := "transaction"
	for version := int16(0); version <= 13; version++ {
		for _, acks := range []int16{-1, 0, 1} {
			for _, txn := range []*string{nil, &id} {
				req := kmsg.NewPtrProduceRequest()
				req.Version, req.Acks, req.TransactionID = version, acks, txn
				frame := wire.AppendRequest(nil, 1, "me", req)
				if got, sure := silent(parseHead(frame[4:]), frame[4:]); got != (acks == 0) || !sure {
					t.Errorf("v%d acks %d: %v", version, acks, got)
				}
				for n := range len(frame) - 4 { // a part either tells the same or that it is not enough
					if got, sure := silent(parseHead(frame[4:]), frame[4:4+n]); sure && got != (acks == 0) || !sure && got {
						t.Errorf("v%d acks %d, %d bytes: %v", version, acks, n, got)
					}
				}
			}
		}
	}
	if quiet, _ := silent(head{key: keyProduce, version: 9}, []byte{0, 0}); quiet {
		t.Error("what is no Produce is silent")
	}
}

// drawResponse fills what a broker may answer.
func drawResponse(t *rapid.T, version int16) *kmsg.FetchResponse {
	r := kmsg.NewPtrFetchResponse()
	r.Version = version
	r.ThrottleMillis = rapid.Int32().Draw(t, "throttle")
	r.ErrorCode = rapid.Int16().Draw(t, "error")
	for range rapid.IntRange(0, 3).Draw(t, "topics") {
		topic := kmsg.NewFetchResponseTopic()
		if version >= 13 {
			copy(topic.TopicID[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "id"))
		} else {
			topic.Topic = rapid.StringN(0, 5, -1).Draw(t, "topic")
		}
		for range rapid.IntRange(0, 3).Draw(t, "partitions") {
			p := kmsg.NewFetchResponseTopicPartition()
			p.Partition, p.ErrorCode = rapid.Int32().Draw(t, "partition"), rapid.Int16().Draw(t, "code")
			p.HighWatermark, p.LastStableOffset = rapid.Int64().Draw(t, "high"), rapid.Int64().Draw(t, "stable")
			if version >= 5 {
				p.LogStartOffset = rapid.Int64().Draw(t, "start")
			}
			if version >= 11 {
				p.PreferredReadReplica = rapid.Int32().Draw(t, "replica")
			}
			if rapid.Bool().Draw(t, "committed") {
				p.AbortedTransactions = []kmsg.FetchResponseTopicPartitionAbortedTransaction{}
				for range rapid.IntRange(0, 3).Draw(t, "aborted") {
					a := kmsg.NewFetchResponseTopicPartitionAbortedTransaction()
					a.ProducerID, a.FirstOffset = rapid.Int64().Draw(t, "producer"), rapid.Int64().Draw(t, "first")
					p.AbortedTransactions = append(p.AbortedTransactions, a)
				}
			}
			p.RecordBatches = rapid.SliceOfN(rapid.Byte(), 0, rapid.SampledFrom([]int{0, 10, 9000}).Draw(t, "size")).Draw(t, "records")
			if version >= 12 {
				if rapid.Bool().Draw(t, "diverging") {
					p.DivergingEpoch.Epoch, p.DivergingEpoch.EndOffset = 1, 2
				}
				if rapid.Bool().Draw(t, "leader") {
					p.CurrentLeader.LeaderID, p.CurrentLeader.LeaderEpoch = 3, 4
				}
				if rapid.Bool().Draw(t, "snapshot") {
					p.SnapshotID.EndOffset, p.SnapshotID.Epoch = 5, 6
				}
				if rapid.Bool().Draw(t, "unknown") {
					p.UnknownTags.Set(77, []byte{1, 2})
				}
			}
			topic.Partitions = append(topic.Partitions, p)
		}
		r.Topics = append(r.Topics, topic)
	}
	if version >= 16 && rapid.Bool().Draw(t, "brokers") {
		b := kmsg.NewFetchResponseBroker()
		b.NodeID, b.Host, b.Port = 1, "host", 9092
		r.Brokers = append(r.Brokers, b)
	}
	return r
}

// TestReplyIsKmsgs: in every version the hand-made frame is that of kmsg, byte for byte.
func TestReplyIsKmsgs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		version := int16(rapid.IntRange(4, maxFetchVersion).Draw(t, "version"))
		resp := drawResponse(t, version)
		var topics []topicParts
		for i := range resp.Topics {
			tp := topicParts{topic: resp.Topics[i]}
			for k := range resp.Topics[i].Partitions {
				p := &part{resp: resp.Topics[i].Partitions[k]}
				for rest := p.resp.RecordBatches; len(rest) > 0; {
					n := rapid.IntRange(1, len(rest)).Draw(t, "cut")
					p.records = append(p.records, rest[:n])
					rest = rest[n:]
				}
				if version >= 12 {
					p.resp.UnknownTags = kmsg.Tags{}
					resp.Topics[i].Partitions[k].UnknownTags.Each(func(k uint32, v []byte) { p.resp.UnknownTags.Set(k, v) })
					directfetch.SetLocations(&p.resp, nil) // never shown to the client
				}
				tp.parts = append(tp.parts, p)
			}
			topics = append(topics, tp)
		}
		got := bytes.Join(encodeFetch(42, version, resp, topics), nil)
		if want := wire.AppendResponse(nil, 42, resp); !bytes.Equal(got, want) {
			t.Fatalf("v%d:\n%x\n%x", version, got, want)
		}
	})
}

// TestRequestsUpward: whatever version a client speaks, the broker gets one with tagged fields and the same wishes.
func TestRequestsUpward(t *testing.T) {
	for version := int16(4); version <= maxFetchVersion; version++ {
		req := kmsg.NewPtrFetchRequest()
		req.Version, req.MaxWaitMillis, req.MinBytes, req.MaxBytes, req.IsolationLevel = version, 1, 2, 3, 1
		topic := kmsg.NewFetchRequestTopic()
		if version >= 13 {
			topic.TopicID = [16]byte{7}
		} else {
			topic.Topic = "t"
		}
		p := kmsg.NewFetchRequestTopicPartition()
		p.Partition, p.FetchOffset, p.PartitionMaxBytes = 4, 5, 6
		if version >= 9 {
			p.CurrentLeaderEpoch = 8
		}
		topic.Partitions = append(topic.Partitions, p)
		req.Topics = append(req.Topics, topic)
		frame := wire.AppendRequest(nil, 1, "me", req)
		h, got, err := parseFetch(frame[4:])
		if err != nil || h.ClientID != "me" {
			t.Fatal(err)
		}
		got.Version = max(version, directfetch.MinVersion)
		_, again, err := parseFetch(wire.AppendRequest(nil, 1, "me", got)[4:])
		if err != nil {
			t.Fatal(err)
		}
		again.Version = version
		if !reflect.DeepEqual(again, req) {
			t.Errorf("v%d:\n%+v\n%+v", version, again, req)
		}
	}
}

func FuzzClientFrame(f *testing.F) {
	f.Add(wire.AppendRequest(nil, 1, "x", &kmsg.FetchRequest{Version: 12})[4:])
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= 8 {
			silent(parseHead(b), b)
		}
		_, _, _ = parseFetch(b)
	})
}

func FuzzBrokerFrame(f *testing.F) {
	f.Add(wire.AppendResponse(nil, 1, &kmsg.FetchResponse{Version: 12}), int16(12))
	f.Fuzz(func(t *testing.T, b []byte, version int16) {
		if len(b) < 4 || version < 12 || version > 18 {
			return
		}
		resp, err := parseFetchResponse(b[4:], version)
		if err != nil {
			return
		}
		for i := range resp.Topics {
			for k := range resp.Topics[i].Partitions {
				p := &resp.Topics[i].Partitions[k]
				_, _ = directfetch.Locations(p)
				trim(p.RecordBatches, len(p.RecordBatches)/2, true)
			}
		}
	})
}

// batches makes n batches of up to per records from an offset on.
func batches(t testing.TB, from int64, n, per int) (data []byte, next int64) {
	t.Helper()
	for i := range n {
		b := recordbatch.NewBuilder()
		b.BaseOffset, b.LeaderEpoch = from, 1
		for k := range 1 + (i+per)%per {
			b.Add(recordbatch.Record{Key: []byte("k"), Value: bytes.Repeat([]byte{byte(i)}, 10+k*20)})
		}
		one, err := b.Build()
		if err != nil {
			t.Fatal(err)
		}
		from += int64(b.Count())
		data = append(data, one...)
	}
	return data, from
}

func TestSplit(t *testing.T) {
	data, next := batches(t, 100, 20, 5)
	rapid.Check(t, func(t *rapid.T) {
		offset := rapid.Int64Range(100, next-1).Draw(t, "offset")
		s := splitter{next: offset, end: next - 1, left: int64(len(data)), maxBatch: 1 << 20}
		var got []byte
		at := int64(-1)
		for rest := data; len(rest) > 0; {
			n := rapid.IntRange(1, min(len(rest), 400)).Draw(t, "n")
			pieces, err := s.feed(rest[:n])
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range pieces {
				if at >= 0 && p.first != at || at < 0 && (p.first > offset || p.last < offset) {
					t.Fatalf("batch of %d to %d at %d", p.first, p.last, at)
				}
				at = p.last + 1
				if p.own != nil {
					got = append(got, p.own...)
				} else {
					got = append(got, rest[p.at:p.at+p.size]...)
				}
			}
			rest = rest[n:]
		}
		if at != next || !bytes.HasSuffix(data, got) {
			t.Fatalf("ends at %d with %d bytes", at, len(got))
		}
	})
}

// TestSplitDamage: objects whose bytes are not those of the metadata (swapped, cut, longer, of another segment).
func TestSplitDamage(t *testing.T) {
	data, next := batches(t, 100, 6, 1)
	one := len(data) / 6
	other, _ := batches(t, 500, 6, 1)
	swapped := slices.Concat(data[:one], data[2*one:3*one], data[one:2*one], data[3*one:])
	bent := slices.Clone(data)
	bent[3*one+70] ^= 1
	huge := slices.Clone(data)
	binary.BigEndian.PutUint32(huge[one+8:], 1<<30)
	for name, c := range map[string]struct {
		data []byte
		good int64 // offset up to which all is delivered
		want error
	}{
		"whole":           {data, next, nil},
		"swapped":         {swapped, 101, ErrDamaged},
		"another segment": {other, 100, ErrDamaged},
		"bent":            {bent, 103, ErrDamaged},
		"huge":            {huge, 101, ErrDamaged},
		"last missing":    {data[:5*one], 105, ErrDamaged},
		"cut":             {data[:5*one+30], 105, ErrDamaged},
		"shifted":         {data[10:], 100, ErrDamaged},
		// What lies behind the last offset of a location is not looked at: an offset index does not tell where it ends.
		"longer":          {slices.Concat(data, data[:one]), next, nil},
		"noise behind it": {slices.Concat(data, bytes.Repeat([]byte{7}, 99)), next, nil},
	} {
		s := splitter{next: 100, end: next - 1, left: int64(len(c.data)), maxBatch: 1 << 20}
		pieces, err := s.feed(c.data)
		at := int64(100)
		for _, p := range pieces {
			if p.first != at {
				t.Errorf("%s: batch at %d where %d is due", name, p.first, at)
			}
			at = p.last + 1
		}
		if at != c.good || !errors.Is(err, c.want) || (err != nil) != (c.want != nil) {
			t.Errorf("%s: delivered up to %d, %v", name, at, err)
		}
	}
	s := splitter{next: 100, end: next - 1, left: int64(len(data)), maxBatch: one - 1}
	if _, err := s.feed(data); !errors.Is(err, errTooLarge) {
		t.Errorf("large batch: %v", err)
	}
}

func FuzzSplit(f *testing.F) {
	data, next := batches(f, 100, 6, 3)
	f.Add(data, 100)
	f.Fuzz(func(t *testing.T, b []byte, cut int) {
		s := splitter{next: 100, end: next - 1, left: int64(len(b)), maxBatch: 1 << 20}
		if cut < 0 || cut > len(b) {
			cut = 0
		}
		if _, err := s.feed(b[:cut]); err == nil && s.left > 0 {
			_, _ = s.feed(b[cut:])
		}
	})
}

func TestAborted(t *testing.T) {
	entry := func(producer, first int64) kmsg.FetchResponseTopicPartitionAbortedTransaction {
		return kmsg.FetchResponseTopicPartitionAbortedTransaction{ProducerID: producer, FirstOffset: first}
	}
	a := aborted{entry(1, 10), entry(2, 5), entry(1, 50)}
	if got := a.upTo(20); len(got) != 2 || got[0].ProducerID != 1 || got[1].ProducerID != 2 {
		t.Errorf("%+v", got)
	}
	if got := a.upTo(1); got == nil || len(got) != 0 {
		t.Errorf("%+v: null would mean read_uncommitted", got)
	}
	a = a.ended(1, 30)
	if len(a) != 2 || a[0].FirstOffset != 5 || a[1].FirstOffset != 50 {
		t.Errorf("%+v", a)
	}
}

func TestTrim(t *testing.T) {
	data, _ := batches(t, 0, 4, 1)
	one := len(data) / 4
	for _, c := range []struct {
		limit  int
		minOne bool
		want   int
	}{{len(data), false, 4}, {len(data) - 1, false, 3}, {one, false, 1}, {one - 1, false, 0}, {one - 1, true, 1}, {0, true, 1}, {0, false, 0}} {
		if got := len(trim(data, c.limit, c.minOne)) / one; got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}

// passed is what passFetch makes of a frame.
func passed(frame []byte, version int16) ([]byte, error) {
	near, far := net.Pipe()
	c := &conn{down: near}
	out := make(chan []byte, 1)
	go func() {
		b, _ := io.ReadAll(far)
		out <- b
	}()
	err := c.passFetch(reader(frame), len(frame), version)
	near.Close()
	return <-out, err
}

// TestFetchesPassAsTheyAre: of an answer that passes, one byte changes at most, and with it the addresses are gone.
func TestFetchesPassAsTheyAre(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		version := int16(rapid.IntRange(12, maxFetchVersion).Draw(t, "version"))
		resp := drawResponse(t, version)
		if rapid.Bool().Draw(t, "later") {
			resp.UnknownTags.Set(99, []byte("later"))
		}
		frame := wire.AppendResponse(nil, 7, resp)
		out, err := passed(frame, version)
		if err != nil || len(out) != len(frame) {
			t.Fatalf("%d bytes of %d, %v", len(out), len(frame), err)
		}
		got, err := parseFetchResponse(out[4:], version)
		if err != nil || len(got.Brokers) > 0 {
			t.Fatalf("%+v, %v", got, err)
		}
		changed := 0
		for i := range out {
			if out[i] != frame[i] {
				changed++
			}
		}
		if want := len(resp.Brokers); changed != want {
			t.Fatalf("%d bytes changed, with %d brokers", changed, want)
		}
		cut := rapid.IntRange(0, len(frame)-1).Draw(t, "cut")
		if _, err := passed(frame[:cut], version); err == nil {
			t.Fatalf("%d bytes of %d are an answer", cut, len(frame))
		}
	})
}

// FuzzPassFetch: whatever a broker sends, an end is found.
func FuzzPassFetch(f *testing.F) {
	resp := kmsg.NewPtrFetchResponse()
	resp.Version = 18
	resp.Topics = []kmsg.FetchResponseTopic{{Partitions: []kmsg.FetchResponseTopicPartition{{RecordBatches: []byte("records")}}}}
	f.Add(wire.AppendResponse(nil, 7, resp), int16(18))
	f.Fuzz(func(t *testing.T, frame []byte, version int16) {
		out, err := passed(frame, version)
		if err == nil && len(out) != len(frame) {
			t.Fatalf("%d bytes of %d without an error", len(out), len(frame))
		}
	})
}
