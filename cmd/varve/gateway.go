package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/internal/debughttp"
	"github.com/varve-io/varve/internal/gateway"
	"github.com/varve-io/varve/internal/quietlog"
)

// gatewayFlags are the choices of gateway.
type gatewayFlags struct {
	listen, advertise, ports, metrics      string
	firstID                                int32
	cert, key, clientCA, brokerCA, logging string
	brokerTLS                              bool
	connections, frame                     int
	memory                                 int64
	drain                                  time.Duration
	store                                  storeFlags
	layout                                 layoutFlags
}

func gatewayCommand() *cobra.Command {
	c := &connection{}
	var o gatewayFlags
	cmd := &cobra.Command{
		Use: "gateway", Short: "Serve a cluster to clients nearby, old records from the bucket", Args: noArgs,
		Long: `Serve a cluster to clients in any language, from beside them: all requests are forwarded, and reads of records that are in the
bucket are answered from there. Without --bucket it is a proxy that forwards everything.

Clients bootstrap at the first of --ports. Each broker has one of the ports behind it: the broker with the id --first-id the
second, the next id the third, and so on. Gateways with the same --advertise, --ports and --first-id can stand for each other;
they keep nothing. SASL is the brokers' business and passes.

SIGTERM stops accepting and lets requests under way finish, up to --drain-timeout. See docs/gateway.md.`,
		Example: `  varve gateway --brokers b1:9092,b2:9092 --bucket s3://logs/prod
  varve gateway --brokers b1:9092 --bucket s3://logs/prod --listen 0.0.0.0 --advertise gw.zone-a.example.com --ports 9200-9299 --metrics :9308
  varve gateway --brokers b1:9093 --broker-tls --broker-ca ca.pem --tls-cert gw.pem --tls-key gw.key --advertise gw.example.com`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			limitMemory()
			return runGateway(cmd.Context(), c, &o)
		},
	}
	f := cmd.Flags()
	f.StringVarP(&c.brokers, "brokers", "b", "localhost:9092", "bootstrap brokers, HOST:PORT,…")
	f.StringVar(&o.listen, "listen", "localhost", "host to listen on; 0.0.0.0 is all")
	f.StringVar(&o.advertise, "advertise", "", "host that clients connect to; empty takes --listen")
	f.StringVar(&o.ports, "ports", "9200-9299", "ports to listen on: the first for bootstrap, the others for one broker each")
	f.Int32Var(&o.firstID, "first-id", 0, "id of the broker that has the second port")
	f.StringVar(&o.metrics, "metrics", "", "address of /metrics, /healthz and /readyz; empty is none")
	f.StringVar(&o.cert, "tls-cert", "", "certificate for clients, a PEM file; with it clients use TLS")
	f.StringVar(&o.key, "tls-key", "", "its private key, a PEM file")
	f.StringVar(&o.clientCA, "client-ca", "", "PEM file of the authorities that must have signed clients' certificates; empty asks for none")
	f.BoolVar(&o.brokerTLS, "broker-tls", false, "use TLS to the brokers")
	f.StringVar(&o.brokerCA, "broker-ca", "", "PEM file of the authorities of the brokers' certificates; empty takes the system's")
	f.IntVar(&o.connections, "max-connections", 10_000, "clients' connections at once")
	f.IntVar(&o.frame, "max-frame", 100<<20, "largest request or answer in bytes")
	f.Int64Var(&o.memory, "memory", 256<<20, "bytes of records to read ahead from the bucket, for all clients together")
	f.DurationVar(&o.drain, "drain-timeout", 30*time.Second, "how long requests under way may take after SIGTERM")
	f.StringVar(&o.logging, "log-level", "info", "debug, info, warn or error")
	o.store.add(cmd)
	o.store.addReads(cmd)
	o.layout.add(cmd)
	bucket := f.Lookup("bucket")
	o.store.url, bucket.DefValue = "", ""
	return cmd
}

func runGateway(ctx context.Context, c *connection, o *gatewayFlags) error {
	cfg, transport, err := o.configs(c)
	if err != nil {
		return usageError{err}
	}
	end := func() { cfg.Transport.Close() }
	if o.store.url == "" && o.store.plugin == "" {
		cfg.Transport, err = direct.New(transport)
	} else {
		cfg.Transport, end, err = o.store.transport(&o.layout, c.seeds(), transport)
	}
	if err != nil {
		return err
	}
	defer end()
	g := gateway.New(cfg)
	listeners, err := g.Listen()
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	web, stopWeb := context.WithCancel(context.WithoutCancel(ctx)) // health is told until the last client is gone
	defer stopWeb()
	if o.metrics != "" {
		ln, err := net.Listen("tcp", o.metrics)
		if err != nil {
			for _, ln := range listeners {
				ln.Close()
			}
			return fmt.Errorf("--metrics: %w", err)
		}
		registry := prometheus.NewRegistry()
		registry.MustRegister(g.Collector(), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
		group.Go(func() error { return debughttp.Serve(web, ln, debughttp.Options{Registry: registry, Ready: g.Ready}) })
	}
	cfg.Logger.Info("gateway serves", "version", versionText(), "bootstrap", fmt.Sprintf("%s:%d", cfg.Advertise, cfg.Ports.First), "brokers", c.brokers, "bucket", o.store.url)
	group.Go(func() error {
		defer stopWeb()
		return g.Serve(ctx, listeners)
	})
	return group.Wait()
}

// configs makes what the flags say.
func (o *gatewayFlags) configs(c *connection) (gateway.Config, direct.Config, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(o.logging)); err != nil {
		return gateway.Config{}, direct.Config{}, fmt.Errorf("--log-level %q: want debug, info, warn or error", o.logging)
	}
	logger := slog.New(quietlog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})))
	cfg := gateway.Config{Bootstrap: c.seeds(), Listen: o.listen, Advertise: o.advertise, FirstID: o.firstID, ConnectionsMax: o.connections, Drain: o.drain, Logger: logger}
	transport := direct.Config{MemoryBytes: o.memory, MaxFrameBytes: o.frame, Logger: logger}
	var err error
	if cfg.Ports, err = gateway.ParsePorts(o.ports); err != nil {
		return cfg, transport, fmt.Errorf("--ports %w", err)
	}
	for _, b := range cfg.Bootstrap {
		if _, _, err := net.SplitHostPort(b); err != nil {
			return cfg, transport, fmt.Errorf("--brokers: %w", err)
		}
	}
	if cfg.Advertise == "" {
		if ip := net.ParseIP(o.listen); o.listen == "" || ip != nil && ip.IsUnspecified() {
			return cfg, transport, errors.New("--advertise is needed with a --listen that is no host to connect to")
		}
		cfg.Advertise = o.listen
	}
	for _, n := range []struct {
		name  string
		value int64
	}{{"max-connections", int64(o.connections)}, {"max-frame", int64(o.frame)}, {"memory", o.memory}, {"drain-timeout", int64(o.drain)}} {
		if n.value <= 0 {
			return cfg, transport, fmt.Errorf("--%s must be above 0", n.name)
		}
	}
	if o.firstID < 0 {
		return cfg, transport, errors.New("--first-id must not be negative")
	}
	if cfg.TLS, err = o.clientTLS(); err != nil {
		return cfg, transport, err
	}
	if o.brokerCA != "" && !o.brokerTLS {
		return cfg, transport, errors.New("--broker-ca needs --broker-tls")
	}
	if o.brokerTLS {
		transport.TLS = &tls.Config{}
		if o.brokerCA != "" {
			if transport.TLS.RootCAs, err = authorities("--broker-ca", o.brokerCA); err != nil {
				return cfg, transport, err
			}
		}
	}
	return cfg, transport, nil
}

// clientTLS is the TLS of the listeners, nil for none.
func (o *gatewayFlags) clientTLS() (*tls.Config, error) {
	if (o.cert == "") != (o.key == "") {
		return nil, errors.New("--tls-cert and --tls-key need each other")
	}
	if o.cert == "" {
		if o.clientCA != "" {
			return nil, errors.New("--client-ca needs --tls-cert and --tls-key")
		}
		return nil, nil
	}
	pair, err := tls.LoadX509KeyPair(o.cert, o.key)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert, --tls-key: %w", err)
	}
	cfg := &tls.Config{Certificates: []tls.Certificate{pair}}
	if o.clientCA != "" {
		cfg.ClientAuth = tls.RequireAndVerifyClientCert
		if cfg.ClientCAs, err = authorities("--client-ca", o.clientCA); err != nil {
			return nil, err
		}
	}
	return cfg, nil
}

// authorities reads certificates that are trusted.
func authorities(flag, file string) (*x509.CertPool, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s: no certificate in %s", flag, file)
	}
	return pool, nil
}
