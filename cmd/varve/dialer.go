package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/fetcherplugin"
	"github.com/varve-io/varve/direct/kafkatier"
	"github.com/varve-io/varve/direct/objectstore"
)

// layoutFlags say how the tier of a stock Apache Kafka is laid out; none is a Varve broker, which tells by itself.
type layoutFlags struct {
	layout, cluster string
	entropy         int
}

func (l *layoutFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&l.layout, "tier-layout", "", "direct reads from a stock Apache Kafka's tier: aiven, kafka-local or pinterest, below --key-prefix; empty is a Varve broker")
	f.StringVar(&l.cluster, "tier-cluster", "", "id of the Kafka cluster, in keys of the layout pinterest")
	f.IntVar(&l.entropy, "tier-entropy-bits", 0, "bits of entropy, in keys of the layout pinterest")
}

// open makes the layout; nil is none.
func (l *layoutFlags) open(prefix string) (kafkatier.Layout, error) {
	switch l.layout {
	case "":
		return nil, nil
	case "aiven":
		return kafkatier.Aiven(prefix), nil
	case "kafka-local":
		return kafkatier.KafkaLocal(prefix), nil
	case "pinterest":
		return kafkatier.Pinterest(kafkatier.PinterestOptions{Prefix: strings.Trim(prefix, "/"), Cluster: l.cluster, EntropyBits: l.entropy}), nil
	}
	return nil, usageError{fmt.Errorf("--tier-layout %q: want aiven, kafka-local or pinterest", l.layout)}
}

// offsets is where to begin. Below its log start a broker knows nothing, but the layout pinterest may.
func (l *layoutFlags) offsets(ctx context.Context, adm *kadm.Client, w where, topic string) (kadm.ListedOffsets, []string, error) {
	if l.layout != "pinterest" || w.kind != "offset" {
		return w.offsets(ctx, adm, []string{topic})
	}
	starts, err := adm.ListStartOffsets(ctx, topic)
	for _, p := range starts[topic] {
		p.Offset = w.n
		starts[topic][p.Partition] = p
	}
	return starts, nil, err
}

// transport makes the transport of direct reads, and what ends it. cfg is what else it shall have.
func (s *storeFlags) transport(l *layoutFlags, seeds []string, cfg direct.Config) (*direct.Transport, func(), error) {
	cfg, end, err := s.direct(l, seeds, cfg)
	if err != nil {
		return nil, nil, err
	}
	t, err := direct.New(cfg)
	if err != nil {
		end()
		return nil, nil, err
	}
	return t, func() {
		t.Close()
		end()
	}, nil
}

// direct is the configuration of direct reads, and what ends it when its transport has ended.
func (s *storeFlags) direct(l *layoutFlags, seeds []string, cfg direct.Config) (direct.Config, func(), error) {
	cfg.Enabled = true
	layout, err := l.open(s.prefix)
	if err != nil {
		return cfg, nil, err
	}
	if s.plugin != "" {
		if layout != nil {
			return cfg, nil, usageError{errors.New("--fetcher and --tier-layout exclude each other: indexes are read as well")}
		}
		f, err := fetcherplugin.New(fetcherplugin.Options{Path: s.plugin, Logger: cfg.Logger,
			Properties: map[string]string{"remote.storage.fetcher.class.path": s.plugin, "varve.remote.bucket.url": s.url}})
		if err != nil {
			return cfg, nil, fmt.Errorf("--fetcher: %w", err)
		}
		cfg.Fetcher = f
		return cfg, f.Close, nil
	}
	f, err := s.objects()
	if err != nil {
		return cfg, nil, err
	}
	cfg.Fetcher = f
	if layout == nil {
		return cfg, func() {}, nil
	}
	locator, err := kafkatier.Open(f, kafkatier.Options{Seeds: seeds, Layout: layout})
	if err != nil {
		return cfg, nil, usageError{fmt.Errorf("--tier-layout %s: %w", l.layout, err)}
	}
	cfg.Locator = locator
	return cfg, locator.Close, nil
}

// objects reads the bucket itself.
func (s *storeFlags) objects() (*objectstore.Fetcher, error) {
	o := objectstore.Options{AccessKey: s.access, SecretKey: s.secret, Keys: map[string][]byte{}, Grants: s.grants}
	for _, pair := range s.pairs {
		id, file, ok := strings.Cut(pair, "=")
		if !ok {
			return nil, usageError{fmt.Errorf("--key-pair %q: want ID=PRIVATE-KEY-PEM-FILE", pair)}
		}
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, usageError{err}
		}
		o.Keys[id] = pem
	}
	f, err := objectstore.Open(s.url, o)
	if err != nil {
		return nil, usageError{fmt.Errorf("--bucket: %w", err)}
	}
	return f, nil
}

// tell says where the records came from.
func tell(s direct.Stats) string {
	text := fmt.Sprintf("%s read from the bucket in %d requests, %s sent by the broker", bytesText(s.Bytes), s.Requests, bytesText(s.BrokerBytes))
	for _, cause := range sortedKeys(s.Fallbacks) {
		if s.Fallbacks[cause] == 0 {
			continue
		}
		text += fmt.Sprintf(", %d fallbacks (%s)", s.Fallbacks[cause], cause)
	}
	return text
}
