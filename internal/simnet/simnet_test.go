package simnet

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// world is two hosts and a connection between them, in a bubble.
type world struct {
	n    *Network
	a, b *Host
	x, y net.Conn // a's end, b's end
}

func bubble(t *testing.T, test func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := New()
		w := &world{n: n, a: n.Host("a"), b: n.Host("b")}
		l, err := w.b.Listen("b:1")
		if err != nil {
			t.Fatal(err)
		}
		if w.x, err = w.a.DialContext(t.Context(), "b:1"); err != nil {
			t.Fatal(err)
		}
		if w.y, err = l.Accept(); err != nil {
			t.Fatal(err)
		}
		test(t, w)
		w.x.Close()
		w.y.Close()
		l.Close()
		if n.Open() != 0 {
			t.Error("connections are remembered that are closed")
		}
	})
}

// isTimeout is what programs ask of errors of deadlines.
func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout() && errors.Is(err, os.ErrDeadlineExceeded)
}

func read(t *testing.T, c net.Conn, want string) {
	t.Helper()
	b := make([]byte, len(want))
	if _, err := io.ReadFull(c, b); err != nil || string(b) != want {
		t.Fatalf("read %q, %v; want %q", b, err, want)
	}
}

func write(t *testing.T, c net.Conn, s string) {
	t.Helper()
	if n, err := c.Write([]byte(s)); err != nil || n != len(s) {
		t.Fatal(n, err)
	}
}

func TestBytesBothWays(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		big := bytes.Repeat([]byte("0123456789"), buffer/3)
		go w.x.Write(big) // more than fits
		got := make([]byte, len(big))
		if _, err := io.ReadFull(w.y, got); err != nil || !bytes.Equal(got, big) {
			t.Fatal("not the same bytes", err)
		}
		write(t, w.y, "answer")
		read(t, w.x, "answer")
		if w.x.RemoteAddr().String() != "b:1" || w.y.RemoteAddr().String() != w.x.LocalAddr().String() || w.x.LocalAddr().Network() != "tcp" {
			t.Error(w.x.LocalAddr(), w.x.RemoteAddr(), w.y.RemoteAddr())
		}
	})
}

func TestCloseArrivesBehindTheBytes(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		write(t, w.x, "last words")
		w.x.Close()
		read(t, w.y, "last words")
		if n, err := w.y.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Fatal(n, err)
		}
		if _, err := w.y.Write([]byte("x")); !errors.Is(err, syscall.EPIPE) {
			t.Fatal(err)
		}
		for _, do := range []func() error{func() error { _, err := w.x.Read(make([]byte, 1)); return err }, func() error { _, err := w.x.Write([]byte("x")); return err },
			func() error { return w.x.SetDeadline(time.Time{}) }, w.x.Close} {
			if err := do(); !errors.Is(err, net.ErrClosed) {
				t.Error(err)
			}
		}
	})
}

func TestCloseEndsWhatWaits(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		ended := make(chan error, 2)
		go func() { _, err := w.x.Read(make([]byte, 1)); ended <- err }()
		go func() { _, err := w.x.Write(make([]byte, 2*buffer)); ended <- err }()
		synctest.Wait()
		w.x.Close()
		for range 2 {
			if err := <-ended; !errors.Is(err, net.ErrClosed) {
				t.Error(err)
			}
		}
	})
}

func TestDeadlines(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		start := time.Now()
		w.x.SetReadDeadline(start.Add(time.Minute))
		if _, err := w.x.Read(make([]byte, 1)); !isTimeout(err) || time.Since(start) != time.Minute {
			t.Fatal(err, time.Since(start))
		}
		if _, err := w.x.Read(make([]byte, 1)); !isTimeout(err) {
			t.Fatal(err)
		}
		write(t, w.x, "writes go on")
		w.x.SetReadDeadline(time.Time{})
		write(t, w.y, "later")
		read(t, w.x, "later")
		// One that is set while a read waits.
		ended := make(chan error, 1)
		go func() { _, err := w.x.Read(make([]byte, 1)); ended <- err }()
		synctest.Wait()
		w.x.SetDeadline(time.Unix(1, 0))
		if err := <-ended; !isTimeout(err) {
			t.Fatal(err)
		}
		w.x.SetDeadline(time.Time{})
		w.x.SetWriteDeadline(time.Now().Add(time.Second))
		if n, err := w.x.Write(make([]byte, 2*buffer)); !isTimeout(err) || n != buffer-len("writes go on") {
			t.Fatal(n, err)
		}
	})
}

func TestHeldDirection(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.n.Hold("a", "b")
		write(t, w.y, "the other way works")
		read(t, w.x, "the other way works")
		write(t, w.x, "held")
		w.y.SetReadDeadline(time.Now().Add(time.Hour))
		if _, err := w.y.Read(make([]byte, 1)); !isTimeout(err) {
			t.Fatal(err)
		}
		w.y.SetReadDeadline(time.Time{})
		// Nobody connects, whichever way the bytes would go.
		for _, d := range []struct {
			from *Host
			to   string
		}{{w.a, "b:1"}, {w.b, "a:1"}} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			if _, err := d.from.DialContext(ctx, d.to); !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			cancel()
		}
		w.x.Close()
		dialed := make(chan error, 1)
		go func() {
			c, err := w.a.DialContext(t.Context(), "b:1")
			if err == nil {
				c.Close()
			}
			dialed <- err
		}()
		synctest.Wait()
		w.n.Release("a", "b")
		read(t, w.y, "held")
		if _, err := w.y.Read(make([]byte, 1)); err != io.EOF {
			t.Fatal(err)
		}
		if err := <-dialed; err != nil {
			t.Fatal(err)
		}
	})
}

// What was sent into a held direction comes when TCP would send it again, and nothing overtakes it.
func TestSentAgain(t *testing.T) {
	for _, x := range []struct{ held, late time.Duration }{{time.Second, 400 * time.Millisecond}, {10 * time.Second, 2600 * time.Millisecond}, {30 * time.Minute, 2 * time.Minute}} {
		bubble(t, func(t *testing.T, w *world) {
			w.n.Hold("a", "b")
			write(t, w.x, "one")
			time.Sleep(x.held)
			w.n.Release("a", "b")
			released := time.Now()
			write(t, w.x, "two")
			read(t, w.y, "onetwo")
			if late := time.Since(released); late > x.late || late < x.late/2 && x.late < time.Minute {
				t.Errorf("held for %v: arrived %v after", x.held, late)
			}
			write(t, w.x, "three")
			read(t, w.y, "three")
			w.n.Hold("a", "b") // and nothing is sent
			time.Sleep(time.Hour)
			w.n.Release("a", "b")
			released = time.Now()
			write(t, w.x, "four")
			read(t, w.y, "four")
			if !time.Now().Equal(released) {
				t.Error("what was sent after the release was late")
			}
		})
	}
}

func TestDelay(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.n.Delay("a", "b", time.Second)
		start := time.Now()
		write(t, w.x, "one")
		w.n.Delay("a", "b", 0)
		write(t, w.x, "two") // does not overtake
		w.x.Close()
		read(t, w.y, "onetwo")
		if _, err := w.y.Read(make([]byte, 1)); err != io.EOF || time.Since(start) != time.Second {
			t.Fatal(err, time.Since(start))
		}
		w.n.Delay("a", "b", time.Second)
		w.n.Delay("b", "a", 2*time.Second)
		start = time.Now()
		c, err := w.a.DialContext(t.Context(), "b:1")
		if err != nil || time.Since(start) != 3*time.Second {
			t.Fatal(err, time.Since(start))
		}
		c.Close()
	})
}

func TestReset(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.n.Cut("a", "b")
		ended := make(chan error, 1)
		go func() { _, err := w.y.Read(make([]byte, 1)); ended <- err }()
		synctest.Wait()
		w.n.Reset("b", "a")
		if err := <-ended; !errors.Is(err, syscall.ECONNRESET) {
			t.Fatal(err)
		}
		if _, err := w.x.Write([]byte("x")); !errors.Is(err, syscall.ECONNRESET) {
			t.Fatal(err)
		}
	})
}

// A process that dies is noticed when its resets get through, and another one may take its place.
func TestKill(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.n.Hold("b", "a")
		w.b.Kill()
		if _, err := w.y.Write([]byte("x")); !errors.Is(err, syscall.ECONNRESET) {
			t.Fatal(err)
		}
		w.x.SetReadDeadline(time.Now().Add(time.Hour))
		if _, err := w.x.Read(make([]byte, 1)); !isTimeout(err) {
			t.Fatal("the reset came through a direction that is held:", err)
		}
		w.x.SetReadDeadline(time.Time{})
		w.n.Release("b", "a")
		if _, err := w.x.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Fatal(err)
		}
		if _, err := w.a.DialContext(t.Context(), "b:1"); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatal(err)
		}
		if _, err := w.b.Listen("b:2"); !errors.Is(err, syscall.ENETDOWN) {
			t.Fatal(err)
		}
		if _, err := w.b.DialContext(t.Context(), "a:1"); !errors.Is(err, syscall.ENETDOWN) {
			t.Fatal(err)
		}
		again, err := w.n.Host("b").Listen("b:1")
		if err != nil {
			t.Fatal(err)
		}
		c, err := w.a.DialContext(t.Context(), "b:1")
		if err != nil {
			t.Fatal(err)
		}
		again.Close() // which nobody accepted from
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Fatal(err)
		}
		c.Close()
	})
}

func TestAddresses(t *testing.T) {
	n := New()
	a := n.Host("a")
	for _, x := range []struct {
		address string
		want    error
	}{{"b:1", syscall.EADDRNOTAVAIL}, {"a:0", syscall.EADDRNOTAVAIL}} {
		if _, err := a.Listen(x.address); !errors.Is(err, x.want) {
			t.Error(x.address, err)
		}
	}
	l, err := a.Listen("a:1")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.Host("a").Listen("a:1"); !errors.Is(err, syscall.EADDRINUSE) {
		t.Error(err)
	}
	var dns *net.DNSError
	if _, err := a.DialContext(t.Context(), "c:1"); !errors.As(err, &dns) || !dns.IsNotFound {
		t.Error(err)
	}
	if _, err := a.DialContext(t.Context(), "nonsense"); err == nil {
		t.Error("an address without a port was dialed")
	}
	l.Close()
	l.Close()
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}
