package s3_test

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/s3test"
)

// breaker is a TCP proxy that resets some connections after a random number of bytes from the client.
type breaker struct {
	l      net.Listener
	target string
	mu     sync.Mutex
	rnd    *rand.Rand
	broken int
}

func (p *breaker) serve() {
	for {
		c, err := p.l.Accept()
		if err != nil {
			return
		}
		go p.pipe(c.(*net.TCPConn))
	}
}

func (p *breaker) pipe(client *net.TCPConn) {
	defer client.Close()
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer server.Close()
	go func() {
		_, _ = io.Copy(client, server)
		client.Close()
	}()
	p.mu.Lock()
	limit := int64(1) << 40
	if p.rnd.IntN(10) < 3 {
		limit = p.rnd.Int64N(300 << 10)
		p.broken++
	}
	p.mu.Unlock()
	if n, _ := io.CopyN(server, client, limit); n == limit {
		_ = client.SetLinger(0) // a reset, not an end
	}
}

// Through connections that break in mid body every object arrives whole, and once.
func TestBrokenConnections(t *testing.T) {
	server := s3test.Start(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p := &breaker{l: l, target: strings.TrimPrefix(server.Endpoint, "http://"), rnd: rand.New(rand.NewPCG(1, 2))}
	go p.serve()
	o := server.Options()
	o.Endpoint, o.PartSize = "http://"+l.Addr().String(), 5<<20
	raw := open(t, o)
	b := objstore.WithRetries(raw, objstore.RetryPolicy{Attempts: 12, Base: time.Millisecond, Max: 10 * time.Millisecond})
	data := make([]byte, 6<<20)
	for i := range data {
		data[i] = byte(i * 7 >> 3)
	}
	sizes := map[string]int{}
	for i := range 60 {
		key, size := fmt.Sprintf("o/%02d", i), 1000+i*5000
		if i%20 == 0 {
			size = len(data)
		}
		sizes[key] = size
		if err := b.Put(t.Context(), key, bytes.NewReader(data[:size]), int64(size), objstore.PutOptions{CreateOnly: true}); err != nil {
			t.Fatalf("%s: %v", key, err)
		}
		raw.Close() // so that each object has the chance of a bad connection
		got, err := objstore.ReadRange(t.Context(), b, key, 0, int64(size))
		if err != nil || !bytes.Equal(got, data[:size]) {
			t.Fatalf("%s: read %d bytes, %v", key, len(got), err)
		}
	}
	n := 0
	if err := b.List(t.Context(), "o/", "", func(i objstore.Info) error {
		n++
		if int64(sizes[i.Key]) != i.Size {
			t.Errorf("%s has %d bytes", i.Key, i.Size)
		}
		return nil
	}); err != nil || n != 60 {
		t.Errorf("%d objects, %v", n, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.broken < 10 {
		t.Errorf("only %d connections broke", p.broken)
	}
}
