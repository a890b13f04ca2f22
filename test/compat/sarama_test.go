package compat

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"testing"

	"github.com/IBM/sarama"
)

func saramaConfig() *sarama.Config {
	c := sarama.NewConfig()
	c.Version = sarama.MaxVersion
	c.ClientID = "compat"
	c.Producer.Return.Successes = true
	c.Producer.RequiredAcks = sarama.WaitForAll
	c.Consumer.Offsets.Initial = sarama.OffsetOldest
	return c
}

// sarama: every codec by an idempotent producer, a partition consumer, a group, the admin client.
func TestSarama(t *testing.T) {
	b := start(t)
	sarama.Logger = log.New(io.Discard, "", 0)
	const perCodec = 60
	codecs := []sarama.CompressionCodec{sarama.CompressionNone, sarama.CompressionGZIP, sarama.CompressionSnappy, sarama.CompressionLZ4, sarama.CompressionZSTD}
	both(t, b, "sarama", 1, func(t *testing.T, topic string, toTier func(t *testing.T)) {
		for n, codec := range codecs {
			c := saramaConfig()
			c.Producer.Compression = codec
			c.Producer.Idempotent, c.Net.MaxOpenRequests = true, 1
			p, err := sarama.NewSyncProducer([]string{b.addr}, c)
			if err != nil {
				t.Fatal(err)
			}
			for i, v := range values(perCodec) {
				_, offset, err := p.SendMessage(&sarama.ProducerMessage{Topic: topic, Key: sarama.StringEncoder(fmt.Sprint(i)), Value: sarama.StringEncoder(v), Headers: []sarama.RecordHeader{{Key: []byte("h"), Value: []byte("x")}}})
				if err != nil || offset != int64(n*perCodec+i) {
					t.Fatalf("%s: record %d at %d: %v", codec, i, offset, err)
				}
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		}
		toTier(t)
		total := perCodec * len(codecs)
		cl, err := sarama.NewClient([]string{b.addr}, saramaConfig())
		if err != nil {
			t.Fatal(err)
		}
		defer cl.Close()
		for at, want := range map[int64]int64{sarama.OffsetOldest: 0, sarama.OffsetNewest: int64(total)} {
			if got, err := cl.GetOffset(topic, 0, at); err != nil || got != want {
				t.Errorf("offset %d is %d, %v", at, got, err)
			}
		}
		consumer, err := sarama.NewConsumerFromClient(cl)
		if err != nil {
			t.Fatal(err)
		}
		part, err := consumer.ConsumePartition(topic, 0, sarama.OffsetOldest)
		if err != nil {
			t.Fatal(err)
		}
		ctx := within(t)
		for i := range total {
			select {
			case m := <-part.Messages():
				checkSarama(t, m, i, perCodec)
			case err := <-part.Errors():
				t.Fatal(err)
			case <-ctx.Done():
				t.Fatalf("%d of %d records", i, total)
			}
		}
		if err := errors.Join(part.Close(), consumer.Close()); err != nil {
			t.Error(err)
		}
		saramaGroup(t, b, topic, total, perCodec)
		saramaAdmin(t, b, topic, int64(total))
	})
}

func checkSarama(t *testing.T, m *sarama.ConsumerMessage, i, perCodec int) {
	t.Helper()
	if m.Offset != int64(i) || string(m.Value) != values(perCodec)[i%perCodec] || string(m.Key) != fmt.Sprint(i%perCodec) || len(m.Headers) != 1 {
		t.Fatalf("record %d is %+v", i, m)
	}
}

// counter is a group member that reads until it has all.
type counter struct {
	t               *testing.T
	total, perCodec int
	done            context.CancelFunc
	got             int
}

func (c *counter) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (c *counter) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (c *counter) ConsumeClaim(s sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for m := range claim.Messages() {
		if m.Offset != int64(c.got) {
			return fmt.Errorf("offset %d after %d records", m.Offset, c.got)
		}
		s.MarkMessage(m, "note")
		if c.got++; c.got == c.total {
			s.Commit()
			c.done()
			return nil
		}
	}
	return nil
}

func saramaGroup(t *testing.T, b *broker, topic string, total, perCodec int) {
	t.Helper()
	g, err := sarama.NewConsumerGroup([]string{b.addr}, topic, saramaConfig())
	if err != nil {
		t.Fatal(err)
	}
	ctx, done := context.WithCancel(within(t))
	defer done()
	c := &counter{t: t, total: total, perCodec: perCodec, done: done}
	for ctx.Err() == nil {
		if err := g.Consume(ctx, []string{topic}, c); err != nil {
			t.Fatal(err)
		}
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	if c.got != total {
		t.Errorf("the group read %d of %d", c.got, total)
	}
}

func saramaAdmin(t *testing.T, b *broker, topic string, total int64) {
	t.Helper()
	a, err := sarama.NewClusterAdmin([]string{b.addr}, saramaConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	offsets, err := a.ListConsumerGroupOffsets(topic, map[string][]int32{topic: {0}})
	if err != nil {
		t.Fatal(err)
	}
	if o := offsets.GetBlock(topic, 0); o == nil || o.Offset != total || o.Metadata != "note" {
		t.Errorf("committed %+v", o)
	}
	made, retention := topic+"-made", "1234567"
	if err := a.CreateTopic(made, &sarama.TopicDetail{NumPartitions: 2, ReplicationFactor: 1, ConfigEntries: map[string]*string{"retention.ms": &retention}}, false); err != nil {
		t.Fatal(err)
	}
	if err := a.CreatePartitions(made, 4, nil, false); err != nil {
		t.Error(err)
	}
	list, err := a.ListTopics()
	if err != nil {
		t.Fatal(err)
	}
	if d := list[made]; d.NumPartitions != 4 || d.ConfigEntries["retention.ms"] == nil || *d.ConfigEntries["retention.ms"] != retention {
		t.Errorf("%s is %+v", made, d)
	}
	groups, err := a.DescribeConsumerGroups([]string{topic})
	if err != nil || len(groups) != 1 || groups[0].State != "Empty" {
		t.Errorf("group %+v, %v", groups, err)
	}
	if err := errors.Join(a.DeleteRecords(topic, map[int32]int64{0: 5}), a.DeleteConsumerGroup(topic), a.DeleteTopic(made)); err != nil {
		t.Error(err)
	}
}
