// Package testport finds ports for servers of tests that are started after their addresses are known.
package testport

import (
	"fmt"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"testing"
)

// Servers listen below the range from which the system takes ports for connections: one of those could be the address of a server that
// is just not running. Where a process begins is left to chance, so that those of other packages are elsewhere.
const first, count = 10_000, 18_000

var last = func() *atomic.Uint32 { n := new(atomic.Uint32); n.Store(rand.Uint32N(count)); return n }()

// Free returns a port of the loopback address that nobody listens on and that no other call in this process returns.
func Free(t testing.TB) int {
	t.Helper()
	for range count {
		port := first + int(last.Add(1)%count)
		if ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			ln.Close()
			return port
		}
	}
	t.Fatal("no free ports")
	return 0
}

// Address is Free as an address.
func Address(t testing.TB) string {
	t.Helper()
	return fmt.Sprintf("127.0.0.1:%d", Free(t))
}
