package s3

import (
	"context"
	"net"
	"net/http"
	"sync/atomic"
	"time"
)

// transport remembers how far the store's clock is from ours, for the message of a refused signature.
type transport struct {
	*http.Transport
	skew atomic.Int64 // ns, local minus store, of the last answer with a Date
}

func newTransport(o Options) (*transport, error) {
	tlsConfig, err := o.tls()
	if err != nil {
		return nil, err
	}
	dial := &net.Dialer{Timeout: o.DialTimeout, KeepAlive: 15 * time.Second}
	return &transport{Transport: &http.Transport{
		Proxy: http.ProxyFromEnvironment,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := dial.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return &idleConn{c, o.IdleTimeout}, nil
		},
		TLSClientConfig:       tlsConfig,
		TLSHandshakeTimeout:   2 * o.DialTimeout,
		ResponseHeaderTimeout: o.HeaderTimeout,
		ExpectContinueTimeout: time.Second,
		IdleConnTimeout:       o.IdleTimeout,
		MaxIdleConns:          256,
		MaxIdleConnsPerHost:   64,
		DisableCompression:    true,
	}}, nil
}

func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := t.Transport.RoundTrip(r)
	if err == nil {
		if date, derr := http.ParseTime(resp.Header.Get("Date")); derr == nil {
			t.skew.Store(int64(time.Since(date)))
		}
	}
	return resp, err
}

// idleConn fails when no byte moves for the timeout, which ends requests to a store that went silent.
type idleConn struct {
	net.Conn
	timeout time.Duration
}

func (c *idleConn) Read(p []byte) (int, error) {
	if err := c.SetReadDeadline(time.Now().Add(c.timeout)); err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

func (c *idleConn) Write(p []byte) (int, error) {
	// The read that waits for the answer must outlive a long body, too.
	if err := c.SetDeadline(time.Now().Add(c.timeout)); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}
