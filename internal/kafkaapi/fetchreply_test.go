package kafkaapi

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/directfetch"
	"github.com/varve-io/varve/internal/fetch"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/tp"
)

// flatten reads a reply as the socket would see it.
func flatten(t *testing.T, chunks []byte, size int64) []byte {
	t.Helper()
	if int64(len(chunks)) != size {
		t.Fatalf("reply of %d bytes says %d", len(chunks), size)
	}
	return chunks
}

// TestFetchReplyAgainstKmsg holds the hand-made frame against kmsg's reading of it, in every version.
func TestFetchReplyAgainstKmsg(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for version := int16(4); version <= 18; version++ {
		for round := 0; round < 50; round++ {
			f, want := randomReply(random, version)
			reply := f.encode()
			var wireBytes []byte
			for _, c := range reply.Chunks {
				if c.File != nil {
					t.Fatal("no files were given")
				}
				wireBytes = append(wireBytes, c.Bytes...)
			}
			flatten(t, wireBytes, reply.Size())
			body := wireBytes[8:]
			if version >= 12 {
				if body[0] != 0 {
					t.Fatal("response header has tags")
				}
				body = body[1:]
			}
			got := kmsg.NewPtrFetchResponse()
			got.Version = version
			if err := got.ReadFrom(body); err != nil {
				t.Fatalf("v%d: %v", version, err)
			}
			// Encoding what was read must give the same bytes: nothing was missing, nothing left over.
			if again := got.AppendTo(nil); !bytes.Equal(again, body) {
				t.Fatalf("v%d: kmsg reads the frame as something else\n got %x\nwant %x", version, body, again)
			}
			check(t, version, got, want)
		}
	}
}

type expected struct {
	parts   []fetch.Part
	results []fetch.Result
	keep    []bool
}

func randomReply(r *rand.Rand, version int16) (*fetchReply, expected) {
	f := &fetchReply{version: version, correlation: r.Int32(), session: r.Int32(), committed: r.IntN(2) == 0}
	for i := 0; i < r.IntN(6); i++ {
		topic := string(rune('a' + r.IntN(2)))
		p := fetch.Part{Topic: topic, Index: r.Int32N(10)}
		if version >= 13 {
			p.TopicID = tp.UUID{topic[0]}
		}
		res := fetch.Result{HighWatermark: r.Int64(), LastStable: r.Int64(), LogStart: r.Int64(), Leader: -1, LeaderEpoch: -1}
		switch r.IntN(5) {
		case 0:
			res.Err, res.Leader, res.LeaderEpoch = partition.ErrNotLeader, 3, 9
		case 1:
			res.Diverging = &fetch.Diverging{Epoch: r.Int32(), EndOffset: r.Int64()}
		case 2:
			res.Locations = []directfetch.Location{{ObjectKey: "k", Format: "f", EndOffset: 3, EndPosition: 9, SegmentSize: 9}}
		case 3:
			records := make([]byte, []int{1, 100, inlineMax, inlineMax + 1, 3 * inlineMax}[r.IntN(5)])
			for j := range records {
				records[j] = byte(r.Int())
			}
			for len(records) > 0 {
				n := 1 + r.IntN(len(records))
				res.Records, records = append(res.Records, records[:n]), records[n:]
			}
			for j := 0; j < r.IntN(3); j++ {
				res.Aborted = append(res.Aborted, producerstate.AbortedTxn{ProducerID: r.Int64(), FirstOffset: r.Int64()})
			}
		}
		f.parts, f.results, f.keep = append(f.parts, p), append(f.results, res), append(f.keep, r.IntN(5) > 0)
	}
	if version >= 16 && r.IntN(2) == 0 {
		rack := "r"
		f.brokers = []kmsg.FetchResponseBroker{{NodeID: 1, Host: "h", Port: 9, Rack: &rack}, {NodeID: 2, Host: "i", Port: 8}}
	}
	return f, expected{f.parts, f.results, f.keep}
}

func check(t *testing.T, version int16, got *kmsg.FetchResponse, want expected) {
	t.Helper()
	next := 0
	take := func() int {
		for !want.keep[next] {
			next++
		}
		next++
		return next - 1
	}
	kept := 0
	for _, k := range want.keep {
		if k {
			kept++
		}
	}
	seen := 0
	for _, topic := range got.Topics {
		for i := range topic.Partitions {
			g := &topic.Partitions[i]
			at := take()
			p, r := want.parts[at], &want.results[at]
			seen++
			if version >= 13 && topic.TopicID != p.TopicID || version < 13 && topic.Topic != p.Topic || g.Partition != p.Index {
				t.Fatalf("v%d: partition is %v %v, want %v", version, topic.Topic, g.Partition, p)
			}
			if g.ErrorCode != code(r.Err) || g.HighWatermark != r.HighWatermark || g.LastStableOffset != r.LastStable || !bytes.Equal(g.RecordBatches, r.Records.Bytes()) {
				t.Fatalf("v%d: %+v does not match", version, p)
			}
			if version >= 5 && g.LogStartOffset != r.LogStart {
				t.Fatal("log start")
			}
			if version >= 12 && r.Diverging != nil && (g.DivergingEpoch.Epoch != r.Diverging.Epoch || g.DivergingEpoch.EndOffset != r.Diverging.EndOffset) {
				t.Fatal("diverging epoch")
			}
			if version >= 12 && r.Err != nil && (g.CurrentLeader.LeaderID != r.Leader || g.CurrentLeader.LeaderEpoch != r.LeaderEpoch) {
				t.Fatal("current leader")
			}
			if version >= 12 {
				if l, err := directfetch.Locations(g); err != nil || !reflect.DeepEqual(l, r.Locations) {
					t.Fatal("locations", err)
				}
			}
		}
	}
	if seen != kept {
		t.Fatalf("v%d: %d of %d partitions", version, seen, kept)
	}
}

// TestFetchErrorsThatConsumersKnow: the Java consumer has no branch for other codes and dies of them.
func TestFetchErrorsThatConsumersKnow(t *testing.T) {
	known := map[int16]bool{0: true, 1: true, 2: true, 3: true, 6: true, 9: true, 29: true, 56: true, 74: true, 75: true, 78: true, 100: true, 103: true, -1: true}
	for _, err := range []error{nil, fetch.ErrOffsetOutOfRange, fetch.ErrReplicaUnavailable, partition.ErrNotLeader, partition.ErrFencedEpoch, partition.ErrUnknownEpoch,
		partition.ErrOffline, errUnknownTopic, errUnknownTopicID, errors.New("anything")} {
		if !known[code(err)] {
			t.Errorf("%v becomes %d", err, code(err))
		}
	}
}
