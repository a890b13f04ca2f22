package quorum

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/peer"
)

// Pauses between two rounds of asking the voters, and the time that a round may take.
const (
	pauseMin    = 200 * time.Millisecond
	pauseMax    = time.Second
	probingTime = time.Second
)

// Run founds the quorum together with the other voters, if there is none yet, and then waits for ctx. It returns early only
// if that cannot succeed: the voters disagree about who they are.
func (n *Node) Run(ctx context.Context) error {
	if err := n.form(ctx); err != nil && ctx.Err() == nil {
		n.mu.Lock()
		n.failure = fmt.Errorf("found the quorum: %w", err)
		close(n.failed)
		n.mu.Unlock()
		return n.failure
	}
	select {
	case <-ctx.Done():
	case <-n.closing:
	}
	return nil
}

// Fresh reports whether this node has no metadata, not even the promise of a vote: the quorum may yet have to be founded.
func (n *Node) Fresh() bool { return n.raft.LastIndex() <= 1 && n.raft.CurrentTerm() <= 1 }

// contacted reports whether a leader has given this node something.
func (n *Node) contacted() bool { return n.raft.LastIndex() > 0 }

// form asks the voters until a majority of them, this one included, is fresh and means the same voters. One that is not
// fresh has a quorum already, whose leader will find this node.
func (n *Node) form(ctx context.Context) error {
	pause := pauseMin
	for len(n.found) > 0 && !n.contacted() {
		fresh, elder, problems, err := n.probe(ctx)
		switch {
		case err != nil:
			return err
		case elder != "":
			n.wait(fmt.Sprintf("%s has metadata already, waiting for the quorum's leader", elder))
		case fresh > len(n.found)/2:
			err := n.raft.BootstrapCluster(configuration(n.found)).Error()
			if errors.Is(err, raft.ErrCantBootstrap) {
				break // a leader was faster
			}
			if err != nil {
				return err
			}
			n.debt.forgive()
			n.waiting.Store(nil)
			n.o.Logger.Info("the metadata quorum is founded", "voters", fmt.Sprint(n.found))
			return nil
		default:
			n.wait("waiting for a majority of the voters: " + strings.Join(problems, "; "))
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, pauseMax)
		case <-ctx.Done():
			return ctx.Err()
		case <-n.closing:
			return nil
		}
	}
	n.waiting.Store(nil)
	return nil
}

// probe asks all voters at once: how many are fresh, this one included, which one is not, and what is wrong with the rest.
func (n *Node) probe(ctx context.Context) (fresh int, elder string, problems []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, probingTime)
	defer cancel()
	welcomes := make([]peer.Welcome, len(n.found))
	failures := make([]error, len(n.found))
	var all sync.WaitGroup
	for i, v := range n.found {
		if v.ID == n.o.NodeID {
			welcomes[i].Fresh = true
			continue
		}
		all.Go(func() { welcomes[i], failures[i] = n.ask(ctx, v) })
	}
	all.Wait()
	for i, v := range n.found {
		var refused *peer.RefusedError
		switch {
		case errors.As(failures[i], &refused) && refused.Voters:
			return 0, "", nil, refused
		case failures[i] != nil:
			problems = append(problems, fmt.Sprintf("%s: %v", v, failures[i]))
		case welcomes[i].Fresh:
			fresh++
		default:
			elder = v.String()
		}
	}
	return fresh, elder, problems, nil
}

func (n *Node) ask(ctx context.Context, v config.Voter) (peer.Welcome, error) {
	if n.o.Hub == nil {
		return peer.Welcome{}, errors.New("this node has no connections to others")
	}
	c, welcome, err := n.o.Hub.Dial(ctx, v.Address, v.ID, peer.Probe)
	if err == nil {
		c.Close()
	}
	return welcome, err
}

func (n *Node) wait(why string) { n.waiting.Store(&why) }

// Waiting says why there is no leader, in words, and is empty if one is known.
func (n *Node) Waiting() string {
	if n.LeaderID() >= 0 {
		return ""
	}
	if why := n.waiting.Load(); why != nil {
		return "no quorum: " + *why
	}
	servers := n.raft.GetConfiguration().Configuration().Servers
	if len(servers) == 0 {
		return "no quorum: this node is no member yet"
	}
	var problems []string
	for _, s := range servers {
		if err := n.transport.stream.why(string(s.Address)); err != nil && s.Suffrage == raft.Voter {
			problems = append(problems, fmt.Sprintf("%s@%s: %v", s.ID, s.Address, err))
		}
	}
	if len(problems) == 0 {
		return "no quorum: no leader of the metadata log is known"
	}
	return "no quorum: no leader of the metadata log is known; " + strings.Join(problems, "; ")
}
