package clustertest

import (
	"errors"
	"time"

	"github.com/varve-io/varve/internal/objstore"
)

var errAway = errors.New("the store is away")

// away makes every access of a node to the bucket fail.
func (c *Cluster) away(n *Node) { n.Store.Add(objstore.Fault{Err: errAway}) }

// slow makes a node's accesses to the bucket wait, so that one of them goes on each time that the pause is over, instead of
// what was wrong before. stop ends that.
func (c *Cluster) slow(n *Node, pause time.Duration) (stop func()) {
	turns, over := make(chan struct{}), make(chan struct{})
	n.Store.Clear()
	n.Store.Add(objstore.Fault{Block: turns})
	go func() {
		defer close(turns)
		for {
			select {
			case <-over:
				return
			case <-time.After(pause):
			}
			select {
			case turns <- struct{}{}:
			case <-over:
				return
			}
		}
	}()
	return func() {
		n.Store.Clear()
		close(over)
	}
}
