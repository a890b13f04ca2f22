package sim

import (
	"github.com/varve-io/varve/internal/committed"
	"github.com/varve-io/varve/internal/coordinator"
	"github.com/varve-io/varve/internal/grouprecord"
	"github.com/varve-io/varve/internal/recordbatch"
)

// desk is coordinator.shard: one partition of __consumer_offsets at its leader. What comes while something is being written waits.
type desk struct {
	part    *replica
	epoch   int32
	loading bool
	failed  error
	groups  map[string]*committed.Offsets
	txns    map[int64]map[string]bool
	late    []func()
	busy    bool
	queue   []func()
}

func newDesk(part *replica, epoch int32) *desk {
	return &desk{part: part, epoch: epoch, loading: true, groups: map[string]*committed.Offsets{}, txns: map[int64]map[string]bool{}}
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
		e, ok, err := grouprecord.Parse(rec.Key, rec.Value)
		o, isOffset := e.Value.(*committed.Offset)
		if err != nil || !ok || !isOffset {
			s.check.Fail("settings", d.part.id, "offset %d: a record that nobody wrote: %v", rec.Offset, err)
			return
		}
		d.pend(e.Group, h.ProducerID, e.Partition, *o, rec.Offset)
	})
	d.loading, d.failed = false, err
	for _, end := range d.late {
		end()
	}
	d.late = nil
}

func (d *desk) group(id string) *committed.Offsets {
	if d.groups[id] == nil {
		d.groups[id] = committed.New(id)
	}
	return d.groups[id]
}

// pend takes an offset that counts when its transaction is committed, whose record is at an offset of the partition.
func (d *desk) pend(id string, producerID int64, key committed.Partition, o committed.Offset, at int64) {
	d.group(id).SetPending(producerID, key, o, at)
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
func (r *run) commitInTxn(id string, in coordinator.InTxn, key committed.Partition, o committed.Offset, done func(error)) {
	d, err := r.desk(id)
	if err != nil {
		done(err)
		return
	}
	s := r.n.s
	d.do(func(end func()) {
		w, err := coordinator.Append(d.part.p, []coordinator.Record{coordinator.Record(d.group(id).Commit(key, o).Record())}, &in, d.epoch, at(r.n.wall()))
		s.touch(r)
		if err != nil {
			end()
			done(err)
			return
		}
		s.note("%s: broker %d: %d/%d commits %d of %s at %d", d.part.id, r.n.id, in.ProducerID, in.Epoch, o.Offset, id, w.Next-1)
		d.pend(id, in.ProducerID, key, o, w.Next-1)
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
func (r *run) fetchOffset(id string, key committed.Partition, done func(offset int64, unstable bool, err error)) {
	d, err := r.desk(id)
	if err != nil {
		done(-1, false, err)
		return
	}
	d.do(func(end func()) {
		offset := int64(-1)
		if o, ok := d.group(id).Get(key); ok {
			offset = o.Offset
		}
		unstable := d.group(id).Unstable(key)
		end()
		done(offset, unstable, nil)
	})
}
