package clustertest

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/vfs"
)

// sluggish takes its time for the snapshots that are written when logs are closed.
type sluggish struct{ vfs.FS }

func (s sluggish) Create(name string) (vfs.File, error) {
	if strings.HasSuffix(name, segment.SnapshotSuffix) {
		time.Sleep(5 * time.Second)
	}
	return s.FS.Create(name)
}

// TestStopIsBounded: a node with more logs than its disk can close in the time for it stops all the same, and has everything
// when it is back.
func TestStopIsBounded(t *testing.T) {
	Run(t, 1, func(c *Cluster) {
		n := c.Nodes[0]
		n.Stop()
		n.FS = sluggish{vfs.OS{}}
		n.Start()
		n.Serves()
		const topics = 40
		for i := range topics {
			topic := fmt.Sprint("t", i)
			c.CreateTopic(topic, []int32{1})
			c.fill(topic, 0, 10)
		}
		began := time.Now()
		n.Stop()
		if took := time.Since(began); took > 14*time.Second {
			t.Errorf("stopped after %v", took)
		}
		if n.Logged("before all logs were closed") == 0 {
			t.Error("the log does not tell")
		}
		n.FS = nil
		n.Start()
		n.Serves()
		for i := range topics {
			topic := fmt.Sprint("t", i)
			c.fill(topic, 10, 20)
			c.Holds(topic, 20)
		}
	})
}
