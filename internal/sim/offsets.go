package sim

import (
	"github.com/varve-io/varve/internal/commit"
	"github.com/varve-io/varve/internal/coordinator"
	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/recordbatch"
)

// desk is coordinator.shard: one partition of __consumer_offsets at its leader. What comes while something is being written waits.
type desk struct {
	part    *replica
	epoch   int32
	loading bool
	failed  error
	groups  map[string]*group.Group
	txns    map[int64]map[string]bool
	late    []func()
	busy    bool
	queue   []func()
}

func newDesk(part *replica, epoch int32) *desk {
	return &desk{part: part, epoch: epoch, loading: true, groups: map[string]*group.Group{}, txns: map[int64]map[string]bool{}}
}

func (d *desk) stopped() bool {
	return !d.part.r.alive() || !d.part.here() || d.part.desk != d
}

// load is coordinator.shard.load.
func (d *desk) load() {
	if d.stopped() {
		return
	}
	s := d.part.r.n.s
	_, err := coordinator.Read(d.part.p.Log(), func(h *recordbatch.Header, rec *recordbatch.Record) {
		if h.IsControl() {
			if m, err := recordbatch.ParseControl(rec.Key, rec.Value); err == nil {
				d.apply(h.ProducerID, m.Type == recordbatch.ControlCommit || s.o.Bug == ApplyAborted)
			}
			return
		}
		e, ok, err := group.ParseRecord(rec.Key, rec.Value)
		if err != nil || !ok || e.Offset == nil {
			s.check.Fail("settings", d.part.id, "offset %d: a record that nobody wrote: %v", rec.Offset, err)
			return
		}
		e.Offset.At = rec.Offset
		d.pend(e.GroupID, h.ProducerID, *e.Key, *e.Offset)
	})
	d.loading, d.failed = false, err
	for _, end := range d.late {
		end()
	}
	d.late = nil
}

func (d *desk) group(id string) *group.Group {
	if d.groups[id] == nil {
		d.groups[id] = group.New(id, group.Config{SizeMax: 10, MetadataMax: 100, OffsetRetentionMs: 1 << 40}, d.part.r.n.wall())
	}
	return d.groups[id]
}

// pend takes an offset that counts when its transaction is committed.
func (d *desk) pend(id string, producerID int64, key group.TopicPartition, o group.Offset) {
	d.group(id).SetPending(producerID, key, o)
	if d.txns[producerID] == nil {
		d.txns[producerID] = map[string]bool{}
	}
	d.txns[producerID][id] = true
}

func (d *desk) apply(producerID int64, commit bool) {
	for id := range d.txns[producerID] {
		d.groups[id].EndTxn(producerID, commit)
	}
	delete(d.txns, producerID)
}

// do runs what needs the partition for itself; it calls its argument when it has ended.
func (d *desk) do(f func(end func())) {
	if d.busy {
		d.queue = append(d.queue, func() { d.do(f) })
		return
	}
	d.busy = true
	f(func() {
		d.busy = false
		queue := d.queue
		d.queue = nil
		for _, next := range queue {
			next()
		}
	})
}

// ended is coordinator.Groups.EndTxn.
func (d *desk) ended(producerID int64, commit bool) {
	if d.loading {
		d.late = append(d.late, func() { d.apply(producerID, commit) })
		return
	}
	d.do(func(end func()) {
		d.apply(producerID, commit)
		end()
	})
}

// desk finds the place of a group.
func (r *run) desk(id string) (*desk, error) {
	part := r.parts[r.n.s.slot(offsetsOf(id))]
	switch {
	case part == nil || part.desk == nil:
		return nil, coordinator.ErrNotCoordinator
	case part.desk.loading:
		return nil, coordinator.ErrLoading
	case part.desk.failed != nil:
		return nil, coordinator.ErrUnavailable
	}
	return part.desk, nil
}

// commitInTxn is coordinator.Groups.CommitInTxn.
func (r *run) commitInTxn(id string, in coordinator.InTxn, key group.TopicPartition, o group.Offset, done func(error)) {
	d, err := r.desk(id)
	if err != nil {
		done(err)
		return
	}
	s := r.n.s
	d.do(func(end func()) {
		g := d.group(id)
		err := g.MayCommitInTxn(group.Committer{Generation: -1}, r.n.wall())
		var w commit.Write
		if err == nil {
			w, err = coordinator.Append(d.part.p, []coordinator.Record{coordinator.Record(g.CommitRecord(key, o))}, &in, d.epoch, at(r.n.wall()))
			s.touch(r)
		}
		if err != nil {
			end()
			done(err)
			return
		}
		s.note("%s: broker %d: %d/%d commits %d of %s at %d", d.part.id, r.n.id, in.ProducerID, in.Epoch, o.Offset, id, w.Next-1)
		o.At = w.Next - 1
		d.pend(id, in.ProducerID, key, o)
		if r.moment("before an offset is committed") {
			return
		}
		d.part.whenCommitted(w, func(err error) {
			end()
			done(err)
		})
	})
}

// fetchOffset is coordinator.Groups.FetchOffsets for one partition; -1 for none.
func (r *run) fetchOffset(id string, key group.TopicPartition, done func(offset int64, unstable bool, err error)) {
	d, err := r.desk(id)
	if err != nil {
		done(-1, false, err)
		return
	}
	d.do(func(end func()) {
		offset := int64(-1)
		if o, ok := d.group(id).Offset(key); ok {
			offset = o.Offset
		}
		unstable := d.group(id).Unstable(key)
		end()
		done(offset, unstable, nil)
	})
}
