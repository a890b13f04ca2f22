package gateway

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
)

// Ports is a range of ports, both ends in it. The first is for bootstrap: any broker. Those behind it are for one broker each.
type Ports struct{ First, Last int }

// ParsePorts reads FIRST-LAST.
func ParsePorts(s string) (Ports, error) {
	a, b, ok := strings.Cut(s, "-")
	first, err1 := strconv.Atoi(a)
	last, err2 := strconv.Atoi(b)
	if !ok || err1 != nil || err2 != nil || first < 1 || last > 65535 || first >= last {
		return Ports{}, fmt.Errorf("%q: want FIRST-LAST, two ports at least", s)
	}
	return Ports{first, last}, nil
}

// port is that of a broker. It depends on nothing but the configuration, so that all gateways of a kind hand out the same.
func (c *Config) port(node int32) (port int, ok bool) {
	n := int64(node) - int64(c.FirstID)
	if n < 0 || n >= int64(c.Ports.Last-c.Ports.First) {
		return 0, false
	}
	return c.Ports.First + 1 + int(n), true
}

// book is what is known of brokers: the addresses that they gave last, and which of them have no port. It is bounded by the
// ports, and safe for concurrent use.
type book struct {
	mu    sync.Mutex
	at    map[int32]string
	stray map[int32]string
}

// strayMax bounds what is kept of brokers without a port.
const strayMax = 16

func newBook() *book { return &book{at: map[int32]string{}, stray: map[int32]string{}} }

// learn notes where a broker is and reports whether that is news.
func (b *book) learn(node int32, host string, port int32, hasPort bool) (news bool) {
	address := net.JoinHostPort(host, strconv.Itoa(int(port)))
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.at
	if !hasPort {
		if m = b.stray; len(m) >= strayMax {
			return false
		}
	}
	if m[node] == address {
		return false
	}
	m[node] = address
	return true
}

// address tells where a broker is.
func (b *book) address(node int32) (string, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a, ok := b.at[node]
	return a, ok
}

// size is the number of brokers that are known and have a port.
func (b *book) size() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.at)
}
