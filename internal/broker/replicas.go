package broker

import (
	"slices"
	"strings"
	"sync"

	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tp"
)

// replicas are the partitions of this broker. It is safe for concurrent use.
type replicas struct {
	mu   sync.RWMutex
	byID map[tp.Partition]*partition.Partition
}

// Get finds a partition.
func (r *replicas) Get(id tp.Partition) (*partition.Partition, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	p, ok := r.byID[id]
	return p, ok
}

func (r *replicas) put(p *partition.Partition) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.byID[p.ID()] = p
}

func (r *replicas) take(id tp.Partition) (*partition.Partition, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, ok := r.byID[id]
	delete(r.byID, id)
	return p, ok
}

// all lists the partitions in order.
func (r *replicas) all() []*partition.Partition {
	r.mu.RLock()
	out := make([]*partition.Partition, 0, len(r.byID))
	for _, p := range r.byID {
		out = append(out, p)
	}
	r.mu.RUnlock()
	slices.SortFunc(out, func(a, b *partition.Partition) int {
		if c := strings.Compare(a.ID().Topic, b.ID().Topic); c != 0 {
			return c
		}
		return int(a.ID().Index) - int(b.ID().Index)
	})
	return out
}
