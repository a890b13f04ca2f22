package quorum

import (
	"time"

	"github.com/hashicorp/raft"
)

// Leadership tells whether this node leads the quorum and has applied all that was committed before, so that its image is
// the newest.
type Leadership struct {
	Leading bool
	Term    uint64
	Former  int32     // the node that led before, -1 if none is known
	Heard   time.Time // when that node was last heard of, zero if never
}

// Leadership returns the present state, and a channel that is closed when there is another one.
func (n *Node) Leadership() (Leadership, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.leadership, n.turned
}

func (n *Node) turn(l Leadership) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.leadership == l {
		return
	}
	n.leadership = l
	close(n.turned)
	n.turned = make(chan struct{})
}

// observe is called by raft for each event, and keeps it none of them in a queue.
func (n *Node) observe(o *raft.Observation) bool {
	if l, ok := o.Data.(raft.LeaderObservation); ok && l.LeaderID != "" && l.LeaderID != serverID(n.o.NodeID) {
		n.former.Store(nodeID(l.LeaderID))
	}
	return false
}

// watch follows raft's leadership. Its channel keeps only the last change, which is enough: a term that has been left is told by
// its number.
func (n *Node) watch() {
	for {
		select {
		case <-n.closing:
			n.turn(Leadership{Former: -1})
			return
		case <-n.raft.LeaderCh():
		}
		heard, former := n.raft.LastContact(), n.former.Load()
		term := n.raft.CurrentTerm()
		if n.raft.State() != raft.Leader {
			n.turn(Leadership{Former: -1})
			continue
		}
		if l, _ := n.Leadership(); l.Leading && l.Term == term {
			continue
		}
		n.turn(Leadership{Former: -1})
		if err := n.raft.Barrier(0).Error(); err != nil || n.fsm.err() != nil {
			if !lostLeadership(err) {
				n.o.Logger.Error("this node leads the metadata quorum but cannot apply its log", "cause", cause(err, n.fsm.err()))
			}
			continue
		}
		if n.raft.State() == raft.Leader && n.raft.CurrentTerm() == term {
			n.turn(Leadership{Leading: true, Term: term, Former: former, Heard: heard})
		}
	}
}

func cause(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
