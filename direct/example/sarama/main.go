// Command sarama consumes all partitions of a topic with sarama and reads its tiered records from the bucket directly.
//
//	go run ./direct/example/sarama -brokers localhost:9092 -topic events -bucket /var/lib/varve/bucket
//
// S3 credentials come from the environment, as with other tools.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"sync"

	"github.com/IBM/sarama"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "sarama:", err)
		os.Exit(1)
	}
}

func run() error {
	brokers := flag.String("brokers", "localhost:9092", "brokers to begin with, HOST:PORT,…")
	topic := flag.String("topic", "", "topic to read")
	bucket := flag.String("bucket", "", "URL of the brokers' bucket")
	limit := flag.Int("n", 0, "records to read, 0 for no end")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()

	fetcher, err := objectstore.Open(*bucket, objectstore.Options{})
	if err != nil {
		return err
	}
	transport, err := direct.New(direct.Config{Enabled: true, Fetcher: fetcher, Logger: slog.Default()})
	if err != nil {
		return err
	}
	defer transport.Close()

	cfg := sarama.NewConfig()
	cfg.Net.Proxy.Enable = true // the only two lines that direct reads need
	cfg.Net.Proxy.Dialer = transport
	consumer, err := sarama.NewConsumer(strings.Split(*brokers, ","), cfg)
	if err != nil {
		return err
	}
	defer consumer.Close()
	partitions, err := consumer.Partitions(*topic)
	if err != nil {
		return err
	}
	messages := make(chan *sarama.ConsumerMessage)
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, p := range partitions {
		pc, err := consumer.ConsumePartition(*topic, p, sarama.OffsetOldest)
		if err != nil {
			return err
		}
		wg.Go(func() {
			defer pc.Close()
			for {
				select {
				case m := <-pc.Messages():
					select {
					case messages <- m:
					case <-ctx.Done():
						return
					}
				case <-ctx.Done():
					return
				}
			}
		})
	}
	n := 0
	for more := true; more && (*limit == 0 || n < *limit); {
		select {
		case m := <-messages:
			n++
			fmt.Printf("%s-%d@%d %s\n", m.Topic, m.Partition, m.Offset, m.Value)
		case <-ctx.Done():
			more = false
		}
	}
	s := transport.Snapshot()
	fmt.Fprintf(os.Stderr, "%d records: %d bytes from the bucket, %d from brokers, fallbacks %v\n", n, s.Served, s.BrokerBytes, s.Fallbacks)
	return nil
}
