package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kgo"
)

func produceCommand() *cobra.Command {
	c := &connection{}
	var separator, acks, codec, file string
	var headers []string
	var partition int32
	cmd := &cobra.Command{
		Use: "produce TOPIC", Short: "Produce lines of standard input as records", Args: exactArgs(1, "a topic"),
		Example: `  echo hello | varve produce greetings
  varve produce orders --key-separator : --compression zstd < orders.txt`,
		RunE: func(cmd *cobra.Command, args []string) error {
			opts, err := produceOptions(acks, codec)
			if err != nil {
				return err
			}
			opts = append(opts, kgo.DefaultProduceTopic(args[0]), kgo.AllowAutoTopicCreation())
			if partition >= 0 {
				opts = append(opts, kgo.RecordPartitioner(kgo.ManualPartitioner()))
			}
			set, err := pairs(headers)
			if err != nil {
				return err
			}
			in := io.Reader(os.Stdin)
			if file != "" {
				f, err := os.Open(file)
				if err != nil {
					return err
				}
				defer f.Close()
				in = f
			}
			cl, err := c.client(cmd.Context(), opts...)
			if err != nil {
				return err
			}
			defer cl.Close()
			n, err := produceLines(cmd.Context(), cl, in, func(line string) *kgo.Record {
				r := &kgo.Record{Value: []byte(line), Partition: max(partition, 0)}
				if separator != "" {
					if k, v, ok := strings.Cut(line, separator); ok {
						r.Key, r.Value = []byte(k), []byte(v)
					}
				}
				for k, v := range set {
					r.Headers = append(r.Headers, kgo.RecordHeader{Key: k, Value: []byte(*v)})
				}
				return r
			})
			if err != nil {
				return err
			}
			return c.print(cmd, map[string]any{"topic": args[0], "records": n}, func(w io.Writer) { fmt.Fprintf(w, "produced %d records\n", n) })
		},
	}
	c.flags(cmd)
	f := cmd.Flags()
	f.StringVarP(&separator, "key-separator", "k", "", "text between key and value of a line; without it lines are values")
	f.StringVar(&acks, "acks", "all", "all, 1 or 0")
	f.StringVar(&codec, "compression", "none", "none, gzip, snappy, lz4 or zstd")
	f.StringVarP(&file, "file", "f", "", "read lines from a file")
	f.StringArrayVarP(&headers, "header", "H", nil, "header of every record, KEY=VALUE; may be repeated")
	f.Int32VarP(&partition, "partition", "p", -1, "partition; -1 lets keys decide")
	return cmd
}

func produceOptions(acks, codec string) ([]kgo.Opt, error) {
	var opts []kgo.Opt
	switch acks {
	case "all", "-1":
	case "1":
		opts = append(opts, kgo.RequiredAcks(kgo.LeaderAck()), kgo.DisableIdempotentWrite())
	case "0":
		opts = append(opts, kgo.RequiredAcks(kgo.NoAck()), kgo.DisableIdempotentWrite())
	default:
		return nil, usageError{fmt.Errorf("--acks %q: want all, 1 or 0", acks)}
	}
	codecs := map[string]kgo.CompressionCodec{"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(), "lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression()}
	chosen, ok := codecs[codec]
	if !ok {
		return nil, usageError{fmt.Errorf("--compression %q: want none, gzip, snappy, lz4 or zstd", codec)}
	}
	return append(opts, kgo.ProducerBatchCompression(chosen)), nil
}

// produceLines sends a record per line and returns how many the broker took. The first failure ends it.
func produceLines(ctx context.Context, cl *kgo.Client, in io.Reader, record func(string) *kgo.Record) (int, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var mu sync.Mutex
	sent := 0
	lines := bufio.NewReaderSize(in, 1<<20)
	for ctx.Err() == nil {
		line, err := lines.ReadString('\n')
		if line != "" {
			cl.Produce(ctx, record(strings.TrimRight(line, "\r\n")), func(_ *kgo.Record, err error) {
				if err != nil {
					cancel(err)
					return
				}
				mu.Lock()
				sent++
				mu.Unlock()
			})
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return sent, err
		}
	}
	flushErr := cl.Flush(ctx)
	mu.Lock()
	defer mu.Unlock()
	if err := context.Cause(ctx); err != nil {
		return sent, fmt.Errorf("after %d records: %w", sent, err)
	}
	return sent, flushErr
}
