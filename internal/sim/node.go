package sim

import (
	"fmt"
	"github.com/varve-io/varve/internal/checker"
	"path/filepath"
	"slices"
	"time"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/fetch"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tier/reader"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

// node is a machine: a disk and a clock. run is the broker process on it, nil while none runs.
type node struct {
	s       *sim
	id      int32
	rack    string
	mem     *vfs.Mem
	fs      *vfs.Faulty
	run     *run
	runs    int64
	skew    int64
	disk    int    // how often it was given an empty disk
	known   int    // disk, when it registered last
	lost    []bool // by slot: data was lost here, and the broker has not registered since
	hurt    bool   // its disk failed since it was last repaired
	quiet   bool   // the checks read: no fault is for them
	awaited bool   // an image is on its way
}

// disk is a machine's file system as its broker sees it.
type disk struct {
	*vfs.Faulty
	n *node
}

// Open is vfs.FS.Open.
func (d disk) Open(name string) (vfs.File, error) {
	if d.n.quiet {
		return d.Faulty.FS.Open(name)
	}
	return d.Faulty.Open(name)
}

// marks are what the checkpoints hold.
type marks struct{ recovery, starts, highs map[tp.Partition]int64 }

func noMarks() marks {
	return marks{map[tp.Partition]int64{}, map[tp.Partition]int64{}, map[tp.Partition]int64{}}
}

// run is one process of a broker.
type run struct {
	n           *node
	number      int64
	incarnation tp.UUID
	epoch       int64 // -1 before it is registered
	img         *metadata.Image
	parts       [8]*replica // by slot
	known       marks
	clean       bool
	contact     int64 // when the last answered heartbeat was sent
	suspended   bool
	leaving     bool
	reader      *reader.Reader
	fetch       *fetch.Service
	copies      map[tp.UUID]bool
	waits       []waiting
}

type waiting struct {
	index uint64
	do    func()
}

// replica is one partition on a broker.
type replica struct {
	r      *run
	id     tp.Partition
	slot   int
	p      *partition.Partition
	m      *member
	t      *task
	acks   []*ack
	parked []*parked
	isrDue bool
	end    int64 // when it was last looked at
	held   bool
	ledger *ledger // what is coordinated here, of a partition of the cluster's own topics
	desk   *desk
}

const dataDir = "/d"

// here says that the process still has this replica.
func (part *replica) here() bool { return part.r.parts[part.slot] == part }

func newNode(s *sim, id int32) *node {
	n := &node{s: s, id: id, rack: fmt.Sprint("r", int(id)%s.plan.racks), mem: vfs.NewMem(), lost: make([]bool, len(s.ids))}
	if s.plan.has(Clocks) {
		n.skew = s.between(-2000, 2000)
	}
	n.fs = vfs.NewFaulty(n.mem)
	return n
}

// wall is the machine's clock in ms, steady one that never jumps.
func (n *node) wall() int64       { return n.s.now + n.skew }
func (n *node) steady() time.Time { return at(n.s.now) }

func (n *node) file(name string) string { return filepath.Join(dataDir, name) }

// start begins a process. It reads its checkpoints, registers, and opens its partitions when it sees itself in the image.
func (n *node) start() {
	if n.run != nil {
		return
	}
	n.runs++
	r := &run{n: n, number: n.runs, epoch: -1, img: metadata.Empty(), copies: map[tp.UUID]bool{}, known: noMarks()}
	r.incarnation, _ = tp.NewUUID(random{n.s})
	r.reader = reader.New(reader.Options{Bucket: n.s.bucket, Prefix: keyPrefix, ReadAheadBytes: -1})
	r.fetch = &fetch.Service{Replicas: r, Tier: r.reader, KeyPrefix: keyPrefix, Validity: time.Second}
	n.run = r
	n.awaited = false
	n.s.note("broker %d: process %d starts", n.id, r.number)
	if err := n.fs.MkdirAll(dataDir); err != nil {
		n.s.after(300, func() { n.kill(r); n.start() })
		return
	}
	if _, err := n.fs.Stat(n.file(log.CleanShutdownFile)); err == nil {
		r.clean = n.fs.Remove(n.file(log.CleanShutdownFile)) == nil && n.fs.SyncDir(dataDir) == nil
	}
	r.known = marks{r.checkpointed(log.RecoveryPointFile), r.checkpointed(log.LogStartFile), r.checkpointed(log.HighWatermarkFile)}
	r.register()
	r.upkeep()
}

func (r *run) checkpointed(name string) map[tp.Partition]int64 {
	b, err := vfs.ReadFile(r.n.fs, r.n.file(name), 1<<20)
	if err == nil {
		if m, err := log.ParseCheckpoint(b); err == nil {
			return m
		}
		r.clean = false
	}
	return map[tp.Partition]int64{}
}

func (r *run) alive() bool { return r.n.run == r }

func (r *run) register() {
	if !r.alive() {
		return
	}
	s := r.n.s
	record := metadata.BrokerRecord{ID: r.n.id, Incarnation: r.incarnation, Rack: r.n.rack, PeerListener: "PLAINTEXT",
		Listeners: []metadata.Endpoint{{Name: "PLAINTEXT", Host: fmt.Sprint("b", r.n.id), Port: 9092}}}
	if s.o.Bug != SameDisk {
		record.Directory = tp.UUID{byte(r.n.id), byte(r.n.disk + 1)}
	}
	r.ask(controller.RegisterCommand{Broker: record}, 2000, false, func(reply any, err error) {
		if err != nil {
			s.after(100, r.register)
			return
		}
		r.epoch = reply.(controller.Registered).Epoch
		r.contact = s.now
		s.deliver(r.n)
	})
}

// kill ends the process; what it wrote is still there.
func (n *node) kill(r *run) {
	if r == nil || n.run != r {
		return
	}
	n.s.note("broker %d: process %d ends", n.id, r.number)
	n.run, n.awaited = nil, false
	r.reader.Close()
	if n.s.quorum.active == n.id {
		n.s.quorum.depose()
	}
}

// power cuts the machine off: what was not synced may be lost.
func (n *node) power() {
	n.kill(n.run)
	n.mem = n.mem.CrashClone(n.s.rng)
	n.replaceDisk(n.mem)
	n.loses()
}

// wipe gives the machine an empty disk.
func (n *node) wipe() {
	n.kill(n.run)
	n.disk++
	n.replaceDisk(vfs.NewMem())
	n.loses()
}

func (n *node) replaceDisk(mem *vfs.Mem) {
	n.mem, n.fs, n.hurt = mem, vfs.NewFaulty(mem), false
}

// loses notes that this machine has lost data. Until it registers anew its leaders do not know.
func (n *node) loses() {
	for slot, id := range n.s.ids {
		n.lost[slot] = n.s.state(id) != nil
	}
}

// Get finds a partition; run is fetch.Replicas.
func (r *run) Get(id tp.Partition) (*partition.Partition, bool) {
	slot := r.n.s.slot(id)
	if slot < 0 || r.parts[slot] == nil {
		return nil, false
	}
	return r.parts[slot].p, true
}

func (r *run) await(index uint64, do func()) {
	if r.img.Index >= index {
		do()
		return
	}
	r.waits = append(r.waits, waiting{index, do})
}

func (r *run) settleWaits() {
	if !r.alive() {
		return
	}
	var due []waiting
	r.waits = slices.DeleteFunc(r.waits, func(w waiting) bool {
		if r.img.Index >= w.index {
			due = append(due, w)
			return true
		}
		return false
	})
	for _, w := range due {
		w.do()
	}
}

// follow makes the partitions what an image says, in the order of broker.follow.
func (r *run) follow(img *metadata.Image) {
	me, ok := img.Brokers[r.n.id]
	if ok && me.Incarnation != r.incarnation && r.epoch >= 0 && me.Epoch > r.epoch && r.img.Index == 0 {
		r.register() // a registration of the run before came late
	}
	if !ok || me.Incarnation != r.incarnation || img == r.img {
		return // it has not joined yet
	}
	r.epoch = me.Epoch // the answer may have been lost
	defer r.n.s.touch(r)
	old := r.img
	d := metadata.Diff(old, img)
	type target struct {
		t *metadata.Topic
		p *metadata.Partition
	}
	var follow []target
	removed := false
	for _, t := range d.Changed {
		was := old.TopicsByID[t.ID]
		for i, p := range t.Partitions {
			if was != nil && !d.Configs && sameConfigs(was.Configs, t.Configs) && i < len(was.Partitions) && was.Partitions[i] == p {
				continue
			}
			if contains(p.Replicas, r.n.id) {
				follow = append(follow, target{t, p})
			} else if part := r.parts[r.n.s.slot(tp.Partition{Topic: t.Name, Index: p.Index})]; part != nil {
				r.remove(part)
				removed = true
			}
		}
	}
	if removed {
		r.checkpoint(log.RecoveryPointFile, log.LogStartFile, log.HighWatermarkFile)
	}
	defaults := config.TopicDefaults(r.n.s.static)
	for _, x := range follow {
		v := config.TopicValues(defaults, x.t.Configs)
		if part := r.parts[r.n.s.slot(tp.Partition{Topic: x.t.Name, Index: x.p.Index})]; part != nil {
			r.adjust(part, x.p, v)
		} else {
			r.open(x.t, x.p, v)
		}
	}
	r.img = img
}

func sameConfigs(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if w, ok := b[k]; !ok || v != w {
			return false
		}
	}
	return true
}

func (r *run) open(t *metadata.Topic, state *metadata.Partition, v config.Values) {
	s := r.n.s
	id := tp.Partition{Topic: t.Name, Index: state.Index}
	part := &replica{r: r, id: id, slot: s.slot(id)}
	options := log.Options{FS: disk{r.n.fs, r.n}, Dir: r.n.file(id.String()), Partition: id, TopicID: t.ID, Config: logConfig(v), Clean: r.clean,
		RecoveryPoint: r.known.recovery[id], LogStart: r.known.starts[id], Now: at(r.n.wall())}
	l, err := log.Open(options)
	if err != nil && !r.n.hurt {
		s.check.Fail(checker.Opening, id, "broker %d: %v (recovery point %d)", r.n.id, err, options.RecoveryPoint)
		return
	}
	if err != nil {
		s.note("%s: broker %d cannot open it: %v", id, r.n.id, err)
		s.stats.Crippled++
		part.p = partition.Offline(id, t.ID, r.n.id, err)
		r.parts[part.slot] = part
		return
	}
	if rep := l.Recovery(); rep.TornBytes > 0 || rep.Restarted || l.Offsets().End > 0 {
		s.note("%s: broker %d opens it: %+v, recovered %+v", id, r.n.id, l.Offsets(), rep)
	}
	part.p = partition.New(id, t.ID, r.n.id, l, r.known.highs[id], partition.Hooks{
		Trimmed: func(*partition.Partition) { s.after(1, func() { r.flush(part) }) },
		Rolled:  func(*partition.Partition) { s.after(1, func() { r.flush(part) }); part.poke() },
		ISRDue:  func(*partition.Partition) { part.proposeSoon() },
	})
	part.p.Suspend(r.suspended)
	r.parts[part.slot] = part
	if l.Offsets().RecoveryPoint < options.RecoveryPoint {
		r.checkpoint(log.RecoveryPointFile)
	}
	r.adjust(part, state, v)
}

// adjust makes an open partition what the image says, in the order of broker.adjust.
func (r *run) adjust(part *replica, state *metadata.Partition, v config.Values) {
	s := r.n.s
	l := part.p.Log()
	if l != nil {
		l.SetConfig(logConfig(v))
	}
	leads := state.Leader == r.n.id
	if leads && l != nil && part.p.Cause() == nil && partition.Lacks(l, state.Remote) && s.o.Bug != NoRestore {
		s.note("%s: broker %d restores it behind %d, it ends at %d", part.id, r.n.id, state.Remote.End(), l.Offsets().End)
		part.p.Hold(errRestoring)
		part.held = true
		s.after(s.between(1, 100), func() { r.restore(part, state) })
	}
	before, epoch := part.p.Leadership()
	part.p.Assume(partition.Role{Leader: state.Leader, LeaderEpoch: state.LeaderEpoch, PartitionEpoch: state.PartitionEpoch, Replicas: state.Replicas, ISR: state.ISR,
		MinISR: v.Int("min.insync.replicas")}, r.n.steady())
	if err := part.p.SetRemote(state.Remote, state.LogStart); err != nil {
		s.note("%s: broker %d: log start: %v", part.id, r.n.id, err)
	}
	if l == nil {
		return
	}
	if leads || state.Leader < 0 {
		part.m = nil
	} else {
		part.followLeader()
	}
	switch {
	case leads && (before != r.n.id || epoch != state.LeaderEpoch):
		r.elect(part)
	case !leads && before == r.n.id:
		part.resign()
	}
	if leads && (v.Bool("remote.storage.enable") || len(state.Remote) > 0) {
		part.lead()
	} else {
		part.t = nil
	}
}

var errRestoring = fmt.Errorf("it is being restored from the bucket")

// restore is broker.continueBehind.
func (r *run) restore(part *replica, state *metadata.Partition) {
	s := r.n.s
	if !r.alive() || !part.here() {
		return
	}
	defer s.touch(r)
	segment := state.Remote.Find(state.Remote.End())
	epochs, err := r.reader.LeaderEpochs(s.ctx, segment)
	var snapshot []byte
	if err == nil {
		snapshot, err = r.reader.ProducerSnapshot(s.ctx, segment)
	}
	if err == nil {
		start := max(r.known.starts[part.id], state.LogStart, state.Remote.Start())
		err = part.p.Rebuild(segment.End+1, start, epochs, snapshot)
	}
	if err != nil {
		s.note("%s: broker %d: restore: %v", part.id, r.n.id, err)
		s.after(s.between(200, 1000), func() { r.restore(part, state) })
		return
	}
	s.stats.Restores++
	r.checkpoint(log.RecoveryPointFile, log.LogStartFile)
	part.p.Resume(r.n.steady())
	part.held = false
	s.note("%s: broker %d continues behind the tier: %+v", part.id, r.n.id, part.p.Log().Offsets())
}

// remove closes a partition that is not this broker's any more.
func (r *run) remove(part *replica) {
	r.n.s.note("%s: broker %d removes it", part.id, r.n.id)
	r.parts[part.slot] = nil
	part.p.Retire()
	part.m, part.t = nil, nil
	path := r.n.file(part.id.String())
	if l := part.p.Log(); l != nil {
		path, _ = l.Delete()
	}
	if path != "" {
		_ = r.n.fs.RemoveAll(path) // with a failing disk it stays, out of the way
	}
	for _, m := range []map[tp.Partition]int64{r.known.recovery, r.known.starts, r.known.highs} {
		delete(m, part.id)
	}
}

// checkpoint writes what broker.marks collects.
func (r *run) checkpoint(names ...string) {
	now := noMarks()
	for _, part := range r.parts {
		if part == nil {
			continue
		}
		l := part.p.Log()
		if l == nil {
			if at, ok := r.known.recovery[part.id]; ok {
				now.recovery[part.id] = at
			}
			if at, ok := r.known.starts[part.id]; ok {
				now.starts[part.id] = at
			}
			continue
		}
		o := l.Offsets()
		now.recovery[part.id], now.highs[part.id] = o.RecoveryPoint, part.p.HighWatermark()
		if l.Config().Tiered || o.LogStart > 0 {
			now.starts[part.id] = o.LogStart
		}
	}
	r.save(now, names...)
}

func (r *run) save(now marks, names ...string) (ok bool) {
	ok = true
	for _, name := range names {
		from, to := now.recovery, &r.known.recovery
		switch name {
		case log.LogStartFile:
			from, to = now.starts, &r.known.starts
		case log.HighWatermarkFile:
			from, to = now.highs, &r.known.highs
		}
		if err := vfs.WriteFileAtomic(r.n.fs, r.n.file(name), log.MarshalCheckpoint(from)); err != nil {
			ok = false
			continue
		}
		*to = from
	}
	return ok
}

// flush is what follows a roll.
func (r *run) flush(part *replica) {
	if !r.alive() || !part.here() {
		return
	}
	if l := part.p.Log(); l != nil && part.p.Cause() == nil {
		_ = l.FlushUpTo(l.Offsets().ActiveBase) // a failure shows at the next append
	}
	r.checkpoint(log.RecoveryPointFile, log.LogStartFile)
}

// upkeep is what a broker does from time to time.
func (r *run) upkeep() {
	s := r.n.s
	s.after(s.between(400, 900), func() {
		if !r.alive() {
			return
		}
		r.upkeep()
		if r.img.Index == 0 {
			return // background work begins when the partitions are open
		}
		defer s.touch(r)
		for _, part := range r.parts {
			if part == nil {
				continue
			}
			l := part.p.Log()
			if l == nil || part.p.Cause() != nil {
				continue
			}
			if s.o.Bug == RetainUntiered {
				l.SetRemoteEnd(l.Offsets().End)
			}
			if res, err := l.ApplyRetention(at(r.n.wall())); err == nil && res.Rolled {
				r.flush(part)
				part.poke()
			} else if err == nil && len(res.Deleted) > 0 {
				s.after(1, func() {
					if r.alive() {
						r.checkpoint(log.LogStartFile)
					}
				})
				s.note("%s: broker %d deletes %d segments, local start %d", part.id, r.n.id, len(res.Deleted), l.Offsets().LocalLogStart)
			}
		}
		switch s.rng.IntN(3) {
		case 0:
			r.checkpoint(log.HighWatermarkFile)
		case 1:
			r.checkpoint(log.RecoveryPointFile, log.LogStartFile)
		default:
			r.checkpoint(log.LogStartFile)
		}
		if part := r.parts[s.rng.IntN(len(s.ids))]; part != nil && part.p.Log() != nil && part.p.Cause() == nil && s.chance(3) {
			_ = part.p.Log().Flush()
		}
		for _, part := range r.parts {
			if part != nil {
				part.propose() // who has fallen behind says nothing
			}
		}
		for _, part := range r.parts {
			if part != nil && part.p.Cause() != nil && !part.held {
				s.note("%s: broker %d is out of service there: %v", part.id, r.n.id, part.p.Cause())
				s.after(s.between(100, 1500), func() { r.repair() })
				break
			}
		}
	})
}

// repair is what an operator does about a partition that is out of service: restart and, where the log cannot be opened,
// give up what is on this disk.
func (r *run) repair() {
	n := r.n
	if !r.alive() {
		return
	}
	n.fs.Heal()
	n.kill(r)
	for _, part := range r.parts {
		if part == nil || part.p.Log() != nil {
			continue
		}
		n.s.note("%s: broker %d loses its folder", part.id, n.id)
		_ = n.fs.RemoveAll(n.file(part.id.String()))
		_ = n.fs.SyncDir(dataDir)
		n.lost[part.slot] = true
	}
	n.hurt = false
	n.s.after(n.s.between(10, 300), n.start)
}

// shutdown leaves orderly: leaderships first, then the logs, then the mark of a clean end.
func (r *run) shutdown() {
	s := r.n.s
	if !r.alive() || r.leaving || r.epoch < 0 {
		return
	}
	r.leaving = true
	s.note("broker %d: leaves", r.n.id)
	deadline := s.now + 3000
	var beat func()
	beat = func() {
		r.ask(controller.HeartbeatCommand{Broker: r.n.id, Epoch: r.epoch, Applied: r.img.Index, Leave: true}, 1000, false, func(reply any, err error) {
			if err == nil && reply.(controller.HeartbeatReply).Leave || s.now > deadline {
				r.close()
				return
			}
			s.after(50, beat)
		})
	}
	beat()
}

func (r *run) close() {
	n := r.n
	clean, dead := r.img.Index > 0, map[*replica]bool{} // before it joined it has opened nothing, and cannot tell
	for _, part := range r.parts {
		if part == nil {
			continue
		}
		if part.p.Cause() != nil && !part.held {
			dead[part] = true
			clean = false
			continue
		}
		clean = part.p.Close() == nil && clean
	}
	now := noMarks()
	for _, part := range r.parts {
		if part == nil {
			continue
		}
		if l := part.p.Log(); l != nil {
			o := l.Offsets()
			now.recovery[part.id], now.highs[part.id], now.starts[part.id] = o.RecoveryPoint, part.p.HighWatermark(), o.LogStart
			if clean && !dead[part] {
				now.recovery[part.id] = o.End
			}
		}
	}
	clean = r.save(now, log.RecoveryPointFile, log.LogStartFile, log.HighWatermarkFile) && clean
	if clean {
		clean = vfs.WriteFileAtomic(n.fs, n.file(log.CleanShutdownFile), log.MarshalCleanShutdown(r.epoch)) == nil
	}
	n.s.note("broker %d: closed, clean %v", n.id, clean)
	n.kill(r)
	n.s.after(n.s.between(50, 2000), n.start)
}

// logConfig is broker.logConfig.
func logConfig(v config.Values) log.Config {
	c := log.DefaultConfig()
	c.SegmentBytes, c.IndexIntervalBytes = v.Int64("internal.segment.bytes"), v.Int("index.interval.bytes")
	c.RetentionMs, c.RetentionBytes = v.Int64("retention.ms"), v.Int64("retention.bytes")
	c.LocalRetentionMs, c.LocalRetentionBytes = v.Int64("local.retention.ms"), v.Int64("local.retention.bytes")
	c.Tiered, c.CopyDisabled = v.Bool("remote.storage.enable"), v.Bool("remote.log.copy.disable")
	return c
}

// tierConfig is broker.tierConfig.
func (r *run) tierConfig() tier.Config {
	var own map[string]string
	if t, ok := r.n.s.quorum.img.Topics[topic]; ok {
		own = t.Configs
	}
	v := config.TopicValues(config.TopicDefaults(r.n.s.static), own)
	return tier.Config{RetentionMs: v.Int64("retention.ms"), RetentionBytes: v.Int64("retention.bytes"), LocalRetentionMs: v.Int64("local.retention.ms"),
		LocalRetentionBytes: v.Int64("local.retention.bytes"), CopyLagMs: v.Int64("remote.copy.lag.ms"), CopyLagBytes: v.Int64("remote.copy.lag.bytes"),
		CopyDisabled: v.Bool("remote.log.copy.disable"), DeleteDelay: time.Duration(r.n.s.plan.deleteDelay) * time.Millisecond}
}
