package direct

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Config configures a Transport. Zero values take the defaults in parentheses.
type Config struct {
	// Enabled turns direct reads on (fetch.remote.enabled of KIP-1254; false). Without it, or without a Fetcher, bytes
	// pass through untouched.
	Enabled bool
	// Fetcher reads the object store (remote.storage.fetcher.class).
	Fetcher Fetcher
	// Locator finds tiered batches for brokers that do not announce the feature, such as Apache Kafka's; nil leaves those
	// alone. A Transport with a Locator serves one cluster, the Locator's.
	Locator Locator
	// ConnectTimeout bounds the time until a Fetcher has opened a range (fetch.remote.connect.timeout.ms; 1 s),
	// ReadTimeout the time in which its bytes arrive (fetch.remote.read.timeout.ms; 5 s).
	ConnectTimeout, ReadTimeout time.Duration
	// MemoryBytes bounds the read-ahead of all partitions together (64 MiB). A partition may always hold one small range
	// and one batch, so that many partitions or large batches can exceed it a little and none can wait for ever.
	MemoryBytes int64
	// RangeBytes is the size of one read of an object (4 MiB, at least 64 KiB), RangesPerPartition (4) how many of them
	// one partition may have in flight or in memory.
	RangeBytes         int64
	RangesPerPartition int
	// MaxBatchBytes is the largest batch that is read directly (64 MiB); larger ones come from the broker.
	MaxBatchBytes int
	// MarksMaxAge bounds the age of the high watermark, stable offset and log start in answers from read-ahead (5 s).
	MarksMaxAge time.Duration
	// IdleTimeout drops read-ahead that nobody asked for (10 s).
	IdleTimeout time.Duration
	// RestAfter failures in a row (3) make direct reads rest for RestMin (1 s), and after each attempt that fails again
	// twice as long, up to RestMax (1 min).
	RestAfter        int
	RestMin, RestMax time.Duration
	// MaxFrameBytes bounds the frames of both sides (256 MiB).
	MaxFrameBytes int
	// TLS secures the connections to brokers, where set. The client above then must not use TLS itself.
	TLS *tls.Config
	// Dial opens connections to brokers (a net.Dialer with a timeout of 10 s).
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Logger gets one line per fallback and rest; nil is silence.
	Logger *slog.Logger
}

func (c Config) filled() (Config, error) {
	for _, d := range []struct {
		p   *time.Duration
		def time.Duration
	}{{&c.ConnectTimeout, time.Second}, {&c.ReadTimeout, 5 * time.Second}, {&c.MarksMaxAge, 5 * time.Second}, {&c.IdleTimeout, 10 * time.Second},
		{&c.RestMin, time.Second}, {&c.RestMax, time.Minute}} {
		if *d.p < 0 {
			return c, fmt.Errorf("direct: negative duration %s", *d.p)
		}
		if *d.p == 0 {
			*d.p = d.def
		}
	}
	for _, n := range []struct {
		p   *int64
		def int64
	}{{&c.MemoryBytes, 64 << 20}, {&c.RangeBytes, 4 << 20}} {
		if *n.p < 0 {
			return c, fmt.Errorf("direct: negative size %d", *n.p)
		}
		if *n.p == 0 {
			*n.p = n.def
		}
	}
	for _, n := range []struct {
		p   *int
		def int
	}{{&c.RangesPerPartition, 4}, {&c.MaxBatchBytes, 64 << 20}, {&c.RestAfter, 3}, {&c.MaxFrameBytes, 256 << 20}} {
		if *n.p < 0 {
			return c, fmt.Errorf("direct: negative number %d", *n.p)
		}
		if *n.p == 0 {
			*n.p = n.def
		}
	}
	c.RestMax = max(c.RestMax, c.RestMin)
	c.RangeBytes = max(c.RangeBytes, minRange)
	if c.Dial == nil {
		c.Dial = (&net.Dialer{Timeout: 10 * time.Second}).DialContext
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

// Fetchers names constructors of Fetchers for ParseProperties. The caller registers what it links, e.g.
//
//	direct.Fetchers{"s3": …, "directory": …}
//
// A constructor gets all properties.
type Fetchers map[string]func(properties map[string]string) (Fetcher, error)

// FromPath is the name in Fetchers of what serves remote.storage.fetcher.class.path, such as fetcherplugin.Open.
const FromPath = "remote.storage.fetcher.class.path"

// ParseProperties reads the consumer configs of KIP-1254: fetch.remote.enabled (false), remote.storage.fetcher.class
// (none; a name in fetchers), fetch.remote.connect.timeout.ms (1000) and fetch.remote.read.timeout.ms (5000). Other
// properties are left to the client and the constructor. remote.storage.fetcher.class.path names an executable that serves the Fetcher as
// a process of its own; the class is then its business, and the constructor is the one that is registered as FromPath.
func ParseProperties(properties map[string]string, fetchers Fetchers) (Config, error) {
	c := Config{ConnectTimeout: time.Second, ReadTimeout: 5 * time.Second}
	if v, ok := properties["fetch.remote.enabled"]; ok {
		switch strings.ToLower(strings.TrimSpace(v)) {
		case "true":
			c.Enabled = true
		case "false":
		default:
			return Config{}, fmt.Errorf("fetch.remote.enabled: %q is neither true nor false", v)
		}
	}
	for _, d := range []struct {
		name string
		p    *time.Duration
	}{{"fetch.remote.connect.timeout.ms", &c.ConnectTimeout}, {"fetch.remote.read.timeout.ms", &c.ReadTimeout}} {
		if v, ok := properties[d.name]; ok {
			n, err := strconv.ParseInt(strings.TrimSpace(v), 10, 32)
			if err != nil || n <= 0 {
				return Config{}, fmt.Errorf("%s: %q is not a number of milliseconds above 0", d.name, v)
			}
			*d.p = time.Duration(n) * time.Millisecond
		}
	}
	name := properties["remote.storage.fetcher.class"]
	if properties["remote.storage.fetcher.class.path"] != "" {
		if name = FromPath; fetchers[name] == nil {
			return Config{}, fmt.Errorf("remote.storage.fetcher.class.path: this program loads none: fetchers[direct.FromPath] is not set")
		}
	}
	if name != "" {
		open, ok := fetchers[name]
		if !ok {
			known := make([]string, 0, len(fetchers))
			for n := range fetchers {
				known = append(known, n)
			}
			slices.Sort(known)
			return Config{}, fmt.Errorf("remote.storage.fetcher.class: no fetcher %q among %q", name, known)
		}
		f, err := open(properties)
		if err != nil {
			return Config{}, fmt.Errorf("remote.storage.fetcher.class %s: %w", name, err)
		}
		c.Fetcher = f
	}
	return c, nil
}
