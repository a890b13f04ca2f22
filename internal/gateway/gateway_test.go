package gateway

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/internal/gateway/rewrite"
	"github.com/varve-io/varve/internal/testport"
)

func TestParsePorts(t *testing.T) {
	if p, err := ParsePorts("9200-9299"); err != nil || p != (Ports{9200, 9299}) {
		t.Error(p, err)
	}
	for _, s := range []string{"", "9200", "9200-9200", "9300-9200", "0-9", "1-65536", "a-b", "-1-5"} {
		if _, err := ParsePorts(s); err == nil {
			t.Errorf("%q passes", s)
		}
	}
}

func TestPortsOfBrokers(t *testing.T) {
	c := Config{Ports: Ports{9200, 9203}, FirstID: 100}
	for node, want := range map[int32]int{100: 9201, 102: 9203, 99: 0, 103: 0, -1: 0, 1<<31 - 1: 0} {
		if port, ok := c.port(node); port != want || ok != (want > 0) {
			t.Errorf("broker %d: port %d, %v", node, port, ok)
		}
	}
}

// Clients of several ages read history through the gateway, transactions included; what is tiered comes from the bucket.
func TestHistoryThroughTheGateway(t *testing.T) {
	bucket := tempBucket(t)
	n := newNode(t, map[string]string{"varve.bucket": bucket}).start()
	g := run(t, bucket, nil, n.addr)
	want := history(t, g.client(transactional("t")...), "h")
	fetch4 := kversion.Stable()
	fetch4.SetMaxKeyVersion(rewrite.Fetch, 4)
	for name, opts := range map[string][]kgo.Opt{"new": nil, "0.11": {kgo.MaxVersions(kversion.V0_11_0())}, "fetch v4": {kgo.MaxVersions(fetch4)}} {
		t.Run(name, func(t *testing.T) {
			before := g.cfg.Transport.Snapshot()
			consume(t, want, "h", "group-"+name, g.client, opts...)
			s := g.cfg.Transport.Snapshot()
			if served, sent := s.Served-before.Served, s.BrokerBytes-before.BrokerBytes; served < 2*sent || served == 0 {
				t.Errorf("%d bytes from the bucket, %d from the broker", served, sent)
			}
		})
	}
	if g.count("varve_gateway_requests_total", "Fetch") == 0 || g.count("varve_gateway_ready", "") != 1 || g.count("remote_fetch_served_bytes_total", "") == 0 {
		t.Error("no Fetch was counted")
	}
}

func TestWithoutBucketItIsAProxy(t *testing.T) {
	bucket := tempBucket(t)
	n := newNode(t, map[string]string{"varve.bucket": bucket}).start()
	g := run(t, "", nil, n.addr)
	want := history(t, g.client(transactional("t")...), "h")
	consume(t, want, "h", "group", g.client)
	consume(t, want, "h", "group-11", g.client, kgo.MaxVersions(kversion.V0_11_0()))
	if s := g.cfg.Transport.Snapshot(); s.Requests != 0 {
		t.Errorf("%+v", s)
	}
}

// A gateway that stops under a consumer is one of many: the next on the same ports knows nothing, and the consumer goes on.
func TestConsumersGoOnAtTheNextGateway(t *testing.T) {
	bucket := tempBucket(t)
	n := newNode(t, map[string]string{"varve.bucket": bucket}).start()
	abrupt := func(c *Config, _ *direct.Config) { c.Drain = time.Nanosecond }
	g := run(t, bucket, abrupt, n.addr)
	want := history(t, g.client(transactional("t")...), "h")
	ports := g.cfg.Ports
	restarts := 0
	client := func(opts ...kgo.Opt) *kgo.Client {
		hook := restartAt{at: 3, do: func() {
			restarts++
			g.stop()
			g = run(t, bucket, func(c *Config, d *direct.Config) { abrupt(c, d); c.Ports = ports }, n.addr)
		}}
		return g.client(append(opts, kgo.WithHooks(&hook), kgo.MaxConcurrentFetches(1))...)
	}
	consume(t, want, "h", "group", client, kgo.FetchMaxPartitionBytes(5000))
	if restarts != 1 {
		t.Errorf("%d restarts", restarts)
	}
}

// restartAt does something when so many answers to Fetch have come.
type restartAt struct {
	at, n int
	do    func()
}

func (r *restartAt) OnBrokerRead(_ kgo.BrokerMetadata, key int16, _ int, _, _ time.Duration, err error) {
	if key == rewrite.Fetch && err == nil {
		if r.n++; r.n == r.at {
			r.do()
		}
	}
}

// call sends a request over a bare connection and decodes the answer.
func call(c net.Conn, req kmsg.Request) (kmsg.Response, error) {
	frame, err := exchange(c, req)
	if err != nil {
		return nil, err
	}
	resp := req.ResponseKind()
	head := 4
	if resp.IsFlexible() && resp.Key() != rewrite.ApiVersions {
		head++
	}
	return resp, resp.ReadFrom(frame[head:])
}

func dial(t *testing.T, address string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// The port of a broker that the gateway has not heard of leads to another one, for what any broker answers. That is how the
// gateway learns, and what else is asked is not answered by the wrong broker.
func TestPortOfAnUnknownBroker(t *testing.T) {
	n := newNode(t, nil).start()
	transport, err := direct.New(direct.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer transport.Close()
	g := New(Config{Bootstrap: []string{n.addr}, Advertise: "gw", Ports: Ports{100, 104}, Transport: transport})
	connect := func() net.Conn {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		c := dial(t, ln.Addr().String())
		accepted, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		go g.client(t.Context(), accepted, 2)
		return c
	}
	metadata := kmsg.NewPtrMetadataRequest()
	metadata.Version = 12
	offsets := kmsg.NewPtrListOffsetsRequest()
	offsets.Version = 7
	c := connect()
	if _, err := call(c, offsets); err == nil {
		t.Error("a request for broker 1 was answered by any")
	}
	c = connect()
	resp, err := call(c, metadata)
	if err != nil {
		t.Fatal(err)
	}
	if b := resp.(*kmsg.MetadataResponse).Brokers; len(b) != 1 || b[0].NodeID != 1 || b[0].Host != "gw" || b[0].Port != 102 {
		t.Errorf("%+v", b)
	}
	if address, ok := g.book.address(1); !ok || address != n.addr {
		t.Errorf("broker 1 is known at %q", address)
	}
	if _, err := call(c, offsets); err == nil {
		t.Error("the connection became one to broker 1")
	}
	if _, err := call(connect(), offsets); err != nil {
		t.Errorf("now that broker 1 is known: %v", err)
	}
}

// A broker that joins later gets a port of its own and is used; one that goes away takes only its own clients along.
func TestBrokersComeAndGo(t *testing.T) {
	bucket := tempBucket(t)
	first := newNode(t, map[string]string{"varve.bucket": bucket, "node.id": "0", "broker.session.timeout.ms": "2000", "broker.heartbeat.interval.ms": "200"}).start()
	g := run(t, bucket, nil, first.addr)
	cl := g.client()
	until(t, "the first broker is known", func() bool { return g.book.size() == 1 && g.Ready() == nil })
	second := newNode(t, map[string]string{"varve.bucket": bucket, "node.id": "2", "controller.quorum.bootstrap.servers": first.addr}).start()
	adm := kadm.NewClient(cl)
	until(t, "the client knows both", func() bool {
		brokers, err := adm.ListBrokers(t.Context())
		return err == nil && len(brokers) == 2
	})
	if g.book.size() != 2 {
		t.Fatalf("%d brokers", g.book.size())
	}
	// Topics with a partition on either broker.
	if _, err := adm.CreateTopic(t.Context(), 4, 1, nil, "spread"); err != nil {
		t.Fatal(err)
	}
	for p := range int32(4) {
		r := &kgo.Record{Topic: "spread", Partition: p, Value: []byte("x")}
		if err := g.client(kgo.RecordPartitioner(kgo.ManualPartitioner())).ProduceSync(t.Context(), r).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	c := dial(t, g.address(3))
	if _, err := call(c, kmsg.NewPtrApiVersionsRequest()); err != nil {
		t.Fatal(err)
	}
	second.stop()
	if _, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
	if _, err := io.ReadAll(dial(t, g.address(3))); errors.Is(err, os.ErrDeadlineExceeded) { // closed at once
		t.Error(err)
	}
	if _, err := call(dial(t, g.address(0)), kmsg.NewPtrApiVersionsRequest()); err != nil {
		t.Errorf("the other broker: %v", err)
	}
	until(t, "a dial error is counted", func() bool { return g.count("varve_gateway_dial_errors_total", "") > 0 })
}

func TestReadyWhenABrokerAnswers(t *testing.T) {
	n := newNode(t, nil)
	g := run(t, "", nil, n.addr)
	if g.Ready() == nil {
		t.Error("ready without a broker")
	}
	n.start()
	until(t, "the gateway is ready", func() bool { return g.Ready() == nil })
	g.stop()
	if g.Ready() == nil {
		t.Error("ready after the end")
	}
}

// A stop lets a request finish that waits at the broker, and takes no others.
func TestDrain(t *testing.T) {
	n := newNode(t, nil).start()
	g := run(t, "", nil, n.addr)
	if _, err := kadm.NewClient(g.client()).CreateTopic(t.Context(), 1, 1, nil, "t"); err != nil {
		t.Fatal(err)
	}
	c := dial(t, g.address(0))
	req := kmsg.NewPtrFetchRequest()
	req.Version, req.MaxWaitMillis, req.MinBytes, req.MaxBytes = 4, 1000, 1, 1<<20
	p := kmsg.NewFetchRequestTopicPartition()
	p.PartitionMaxBytes = 1 << 20
	req.Topics = []kmsg.FetchRequestTopic{{Topic: "t", Partitions: []kmsg.FetchRequestTopicPartition{p}}}
	answered := make(chan error, 1)
	before := g.count("varve_gateway_requests_total", "Fetch")
	go func() {
		_, err := call(c, req)
		answered <- err
	}()
	until(t, "the request is under way", func() bool { return g.count("varve_gateway_requests_total", "Fetch") > before })
	g.stop()
	if err := <-answered; err != nil {
		t.Errorf("the answer was lost: %v", err)
	}
	if _, err := net.Dial("tcp", g.address(0)); err == nil {
		t.Error("a port is still open")
	}
}

func TestConnectionsAreBounded(t *testing.T) {
	n := newNode(t, nil).start()
	g := run(t, "", func(c *Config, _ *direct.Config) { c.ConnectionsMax = 1 }, n.addr)
	c := dial(t, g.address(0))
	if _, err := call(c, kmsg.NewPtrApiVersionsRequest()); err != nil {
		t.Fatal(err)
	}
	if _, err := call(dial(t, g.address(0)), kmsg.NewPtrApiVersionsRequest()); err == nil {
		t.Error("a second connection is served")
	}
	c.Close()
	until(t, "there is room again", func() bool {
		_, err := call(dial(t, g.address(0)), kmsg.NewPtrApiVersionsRequest())
		return err == nil
	})
	if g.count("varve_gateway_connections_refused_total", "") == 0 { // which is before it is closed
		t.Error("nothing was counted")
	}
}

// A broker without a port is hidden, and the log says why.
func TestBrokerOutsideOfThePorts(t *testing.T) {
	n := newNode(t, map[string]string{"node.id": "900"}).start()
	g := run(t, "", nil, n.addr)
	req := kmsg.NewPtrMetadataRequest()
	req.Version = 12
	resp, err := call(dial(t, g.address(0)), req)
	if err != nil {
		t.Fatal(err)
	}
	if b := resp.(*kmsg.MetadataResponse).Brokers; len(b) != 0 {
		t.Errorf("%+v", b)
	}
	until(t, "the log says so", func() bool { return strings.Contains(g.lines.String(), "broker has no port") })
}

// certificate makes a certificate for 127.0.0.1 that signs itself.
func certificate(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

// tunnel ends TLS in front of a broker.
func tunnel(t *testing.T, broker string, cfg *tls.Config) string {
	t.Helper()
	ln, err := tls.Listen("tcp", testport.Address(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			in, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer in.Close()
				out, err := net.Dial("tcp", broker)
				if err != nil {
					return
				}
				go func() { io.Copy(out, in); out.(*net.TCPConn).CloseWrite() }()
				io.Copy(in, out)
				out.Close()
			}()
		}
	}()
	return ln.Addr().String()
}

// TLS on both sides: clients show a certificate, brokers are known by theirs.
func TestTLSOnBothSides(t *testing.T) {
	bucket := tempBucket(t)
	pair, pool := certificate(t)
	n := newNode(t, map[string]string{"varve.bucket": bucket})
	secure := tunnel(t, n.addr, &tls.Config{Certificates: []tls.Certificate{pair}})
	n.raw["advertised.listeners"] = "PLAINTEXT://" + secure
	n.start()
	g := run(t, bucket, func(c *Config, d *direct.Config) {
		c.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert}
		d.TLS = &tls.Config{RootCAs: pool}
	}, secure)
	with := func(cfg *tls.Config) func(...kgo.Opt) *kgo.Client {
		return func(opts ...kgo.Opt) *kgo.Client {
			return kgoClient(t, append([]kgo.Opt{kgo.SeedBrokers(g.address(0)), kgo.DialTLSConfig(cfg)}, opts...)...)
		}
	}
	client := with(&tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}})
	want := history(t, client(transactional("t")...), "h")
	consume(t, want, "h", "group", client)
	if s := g.cfg.Transport.Snapshot(); s.Served == 0 {
		t.Errorf("%+v", s)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	if with(&tls.Config{RootCAs: pool})(kgo.RetryTimeout(time.Second)).Ping(ctx) == nil {
		t.Error("a client without a certificate is served")
	}
}
