package broker

import (
	"fmt"
	"net"

	"github.com/varve-io/varve/internal/config"
)

// ports are the sockets that a broker listens on. bound are those of kafka, in the same order.
type ports struct {
	kafka []config.Listener
	bound []net.Listener
	http  net.Listener // nil without one
}

// listen opens every port that the configuration names. What it has opened is returned with an error, too.
func listen(c config.Values, n Network) (*ports, error) {
	p := &ports{}
	bind := func(address string) (net.Listener, error) { return net.Listen("tcp", address) }
	if n != nil {
		bind = n.Listen
	}
	var err error
	if p.kafka, err = config.ParseListeners(c.Get("listeners")); err != nil {
		return p, err
	}
	for _, l := range p.kafka {
		ln, err := bind(l.Address())
		if err != nil {
			return p, fmt.Errorf("listener %s://%s: %w", l.Name, l.Address(), err)
		}
		p.bound = append(p.bound, ln)
	}
	if address := c.Get("varve.http.listener"); address != "" {
		if p.http, err = bind(address); err != nil {
			p.http = nil
			return p, fmt.Errorf("varve.http.listener: %w", err)
		}
	}
	return p, nil
}

// addresses are those that are bound, PROTOCOL://HOST:PORT.
func (p *ports) addresses() []string {
	out := make([]string, len(p.bound))
	for i, ln := range p.bound {
		out[i] = p.kafka[i].Name + "://" + ln.Addr().String()
	}
	return out
}

// close closes what is still open.
func (p *ports) close() {
	for _, ln := range p.bound {
		ln.Close()
	}
	if p.http != nil {
		p.http.Close()
	}
}
