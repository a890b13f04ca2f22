package sim

import "errors"

var (
	errLost         = errors.New("no answer came")
	errNoController = errors.New("there is no active controller")
)

// network carries messages between nodes; node 0 are all clients. Nothing is delivered twice, as on a connection, but what
// was given up by its sender may still arrive.
type network struct {
	s   *sim
	cut map[[2]int32]bool
}

func (n *network) init(s *sim) { n.s, n.cut = s, map[[2]int32]bool{} }

// open reports whether messages get through.
func (n *network) open(from, to int32) bool { return from == to || !n.cut[[2]int32{from, to}] }

// send delivers a message or loses it.
func (n *network) send(from, to int32, do func()) {
	if from == to {
		n.s.after(0, do)
		return
	}
	if !n.open(from, to) {
		return
	}
	delay := n.s.between(1, 5)
	if n.s.plan.has(Loss) && !n.s.calm && n.s.chance(n.s.plan.lossOdds) {
		if n.s.chance(2) {
			return
		}
		delay = n.s.between(5, 3000)
	}
	n.s.after(delay, do)
}

// call sends a request and expects an answer within limit ms. serve runs at the other side and calls its argument once; done
// runs here, once: with the answer, or with errLost.
func (n *network) call(from, to int32, limit int64, serve func(answer func(done func())), lost func()) {
	over := false
	n.send(from, to, func() {
		serve(func(done func()) {
			n.send(to, from, func() {
				if !over {
					over = true
					done()
				}
			})
		})
	})
	n.s.after(limit, func() {
		if !over {
			over = true
			lost()
		}
	})
}
