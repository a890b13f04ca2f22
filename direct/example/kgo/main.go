// Command kgo consumes a topic with franz-go and reads its tiered records from the bucket directly.
//
//	go run ./direct/example/kgo -brokers localhost:9092 -topic events -bucket /var/lib/varve/bucket
//	go run ./direct/example/kgo -brokers broker:9092 -topic events -bucket 's3://logs/prod?endpoint=https://s3.example.com&path-style=true'
//	go run ./direct/example/kgo -brokers kafka:9092 -topic events -bucket s3://kafka-tier -aiven -prefix prod/    # a stock Apache Kafka
//
// S3 credentials come from the environment, as with other tools.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strings"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/kafkatier"
	"github.com/varve-io/varve/direct/objectstore"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "kgo:", err)
		os.Exit(1)
	}
}

func run() error {
	brokers := flag.String("brokers", "localhost:9092", "brokers to begin with, HOST:PORT,…")
	topic := flag.String("topic", "", "topic to read")
	group := flag.String("group", "direct-example", "consumer group")
	bucket := flag.String("bucket", "", "URL of the brokers' bucket")
	aiven := flag.Bool("aiven", false, "the broker is a stock Apache Kafka whose tier Aiven's plug-in writes")
	prefix := flag.String("prefix", "", "the plug-in's key.prefix")
	limit := flag.Int("n", 0, "records to read, 0 for no end")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()

	fetcher, err := objectstore.Open(*bucket, objectstore.Options{})
	if err != nil {
		return err
	}
	cfg := direct.Config{Enabled: true, Fetcher: fetcher, Logger: slog.Default()}
	if *aiven {
		locator, err := kafkatier.Open(fetcher, kafkatier.Options{Seeds: strings.Split(*brokers, ","), Layout: kafkatier.Aiven(*prefix), Logger: slog.Default()})
		if err != nil {
			return err
		}
		defer locator.Close()
		cfg.Locator = locator
	}
	transport, err := direct.New(cfg)
	if err != nil {
		return err
	}
	defer transport.Close()

	client, err := kgo.NewClient(
		kgo.SeedBrokers(strings.Split(*brokers, ",")...),
		kgo.Dialer(transport.DialContext), // the only line that direct reads need
		kgo.ConsumerGroup(*group),
		kgo.ConsumeTopics(*topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
	)
	if err != nil {
		return err
	}
	defer client.Close()
	n := 0
	for *limit == 0 || n < *limit {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			if errors.Is(err, context.Canceled) {
				break
			}
			return err
		}
		fetches.EachRecord(func(r *kgo.Record) {
			n++
			fmt.Printf("%s-%d@%d %s\n", r.Topic, r.Partition, r.Offset, r.Value)
		})
	}
	s := transport.Snapshot()
	fmt.Fprintf(os.Stderr, "%d records: %d bytes from the bucket, %d from brokers, fallbacks %v\n", n, s.Served, s.BrokerBytes, s.Fallbacks)
	return nil
}
