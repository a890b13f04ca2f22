package direct_test

import (
	"encoding/hex"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/directfetch"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/wire"
)

// TestDocumentedBytes holds the examples of docs/direct-fetch.md against the code, byte for byte.
func TestDocumentedBytes(t *testing.T) {
	req := kmsg.NewPtrFetchRequest()
	req.Version, req.MaxWaitMillis, req.MinBytes, req.MaxBytes, req.IsolationLevel, req.SessionEpoch = 12, 500, 1, 1<<20, 1, -1
	directfetch.SetFormats(req, []string{"ApacheKafkaV1"})
	rt := kmsg.NewFetchRequestTopic()
	rt.Topic = "t"
	rp := kmsg.NewFetchRequestTopicPartition()
	rp.FetchOffset, rp.PartitionMaxBytes = 1234, 1<<20
	directfetch.Request(&rp)
	rt.Partitions = append(rt.Partitions, rp)
	req.Topics = append(req.Topics, rt)

	resp := kmsg.NewPtrFetchResponse()
	resp.Version = 12
	topic := kmsg.NewFetchResponseTopic()
	topic.Topic = "t"
	p := kmsg.NewFetchResponseTopicPartition()
	p.HighWatermark, p.LastStableOffset, p.LogStartOffset, p.RecordBatches = 9000, 9000, 0, []byte{}
	p.AbortedTransactions = []kmsg.FetchResponseTopicPartitionAbortedTransaction{{ProducerID: 7, FirstOffset: 1300}}
	directfetch.SetLocations(&p, []directfetch.Location{{SegmentID: tp.UUID{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, ObjectKey: "t/0.log", Format: "ApacheKafkaV1",
		BaseOffset: 1000, EndOffset: 1999, StartPosition: 4096, EndPosition: 65536, SegmentSize: 65536, LeaderEpoch: 3, ValidityMs: 60000}})
	topic.Partitions = append(topic.Partitions, p)
	resp.Topics = append(resp.Topics, topic)

	doc, err := os.ReadFile("../docs/direct-fetch.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```hex\n(.*?)```").FindAllStringSubmatch(string(doc), -1)
	want := [][]byte{wire.AppendRequest(nil, 9, "me", req), wire.AppendResponse(nil, 9, resp)}
	if len(blocks) != len(want) {
		t.Fatalf("%d examples", len(blocks))
	}
	for i, b := range blocks {
		var text strings.Builder
		for line := range strings.Lines(b[1]) {
			line, _, _ = strings.Cut(line, "#")
			text.WriteString(strings.Join(strings.Fields(line), ""))
		}
		if got := text.String(); got != hex.EncodeToString(want[i]) {
			t.Errorf("example %d is\n%s\nand should be\n%x", i, got, want[i])
		}
	}
}
