package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/fetcherplugin"
	"github.com/varve-io/varve/direct/kafkatier"
	"github.com/varve-io/varve/direct/objectstore"
)

// layoutFlags say how the tier of a stock Apache Kafka is laid out; none is a Varve broker, which tells by itself.
type layoutFlags struct {
	layout, cluster                   string
	entropy                           int
	user, passwordFile, saslMechanism string
}

func (l *layoutFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&l.layout, "tier-layout", "", "direct reads from a stock Apache Kafka's tier: aiven, kafka-local or pinterest, below --key-prefix; empty is a Varve broker")
	f.StringVar(&l.user, "tier-user", "", "SASL user that reads what Kafka tells of its tier (__remote_log_metadata); empty is none")
	f.StringVar(&l.passwordFile, "tier-password-file", "", "file with that user's password")
	f.StringVar(&l.saslMechanism, "tier-sasl-mechanism", "SCRAM-SHA-512", "PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512")
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

// client is how the reader of Kafka's word about its tier connects.
func (l *layoutFlags) client(secure *tls.Config) (opts []kgo.Opt, err error) {
	if secure != nil {
		opts = append(opts, kgo.DialTLSConfig(secure.Clone()))
	}
	if (l.user == "") != (l.passwordFile == "") {
		return nil, usageError{errors.New("--tier-user and --tier-password-file need each other")}
	}
	if l.user == "" {
		return opts, nil
	}
	text, err := os.ReadFile(l.passwordFile)
	if err != nil {
		return nil, usageError{fmt.Errorf("--tier-password-file: %w", err)}
	}
	password := strings.TrimRight(string(text), "\r\n")
	switch l.saslMechanism {
	case "PLAIN":
		return append(opts, kgo.SASL(plain.Auth{User: l.user, Pass: password}.AsMechanism())), nil
	case "SCRAM-SHA-256":
		return append(opts, kgo.SASL(scram.Auth{User: l.user, Pass: password}.AsSha256Mechanism())), nil
	case "SCRAM-SHA-512":
		return append(opts, kgo.SASL(scram.Auth{User: l.user, Pass: password}.AsSha512Mechanism())), nil
	}
	return nil, usageError{fmt.Errorf("--tier-sasl-mechanism %q: want PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512", l.saslMechanism)}
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
	client, err := l.client(cfg.TLS)
	if err != nil {
		return cfg, nil, err
	}
	locator, err := kafkatier.Open(f, kafkatier.Options{Seeds: seeds, Layout: layout, Client: client, Logger: cfg.Logger})
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
