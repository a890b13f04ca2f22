package control

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/quorum"
)

const (
	queueMax   = 4096 // commands that may wait
	batchMax   = 256  // commands of one entry
	recordsMax = 5000 // records after which no more commands go into an entry: about 1 MiB
	// changeTimeout bounds a change of the quorum's members on behalf of a command, which holds up the others.
	changeTimeout = 3 * time.Second
	// lagMax is how many entries a node may be behind and become a voter.
	lagMax = 1000
	// slowPace is the pause between two goes at what need not be quick: draining brokers, forgotten members.
	slowPace = time.Second
)

// active is the active controller, from its election to the next one.
type active struct {
	c     *Client
	queue chan job
	img   *metadata.Image
	rest  []job // taken from the queue, and to be run first

	lastTick, lastPreferred, lastSlow int64 // ms
	begun                             bool
	forgotten                         bool // members may have to be removed that are no broker's

	entry sync.RWMutex // of over
	over  bool         // nothing may be queued any more

	mu       sync.Mutex // of what follows
	sessions *controller.Sessions
	applied  map[int32]uint64 // by broker, index of the image that it lives by
}

// job is a command that waits.
type job struct {
	ctx     context.Context
	command controller.Command
	from    int32 // node that sent it, -1 for this one
	done    chan<- outcome
}

type outcome struct {
	answer
	err error
}

// lead is the active controller until this node does not lead any more.
func (c *Client) lead(ctx context.Context, l quorum.Leadership, turned <-chan struct{}) {
	a := &active{c: c, queue: make(chan job, queueMax), img: c.o.Quorum.Image(), forgotten: true, applied: map[int32]uint64{},
		sessions: controller.NewSessions(c.o.SessionTimeout.Milliseconds(), c.o.Grace.Milliseconds())}
	now := c.o.Env().Now
	heard := map[int32]int64{}
	if l.Former >= 0 && l.Former != c.o.NodeID && !l.Heard.IsZero() {
		heard[l.Former] = l.Heard.UnixMilli()
	}
	a.sessions.Begin(a.img, now, heard)
	if l.Former >= 0 && l.Former != c.o.NodeID {
		// Whoever led and does not any more may have died. If it lives, its next heartbeat comes here.
		a.sessions.Disconnected(l.Former, now)
	}
	a.lastPreferred, a.lastTick = now, now
	c.mu.Lock()
	c.active = a
	c.mu.Unlock()
	c.o.Logger.Info("this node is the active controller", "term", l.Term)
	defer func() {
		c.mu.Lock()
		c.active = nil
		c.mu.Unlock()
		a.drop()
		c.o.Logger.Info("this node is not the active controller any more", "term", l.Term)
	}()
	tick := time.NewTicker(c.o.TickInterval)
	defer tick.Stop()
	for {
		if len(a.rest) == 0 {
			select {
			case j := <-a.queue:
				a.rest = append(a.rest, j)
			case <-tick.C:
				a.tick(ctx)
				continue
			case <-turned:
				return
			case <-ctx.Done():
				return
			}
		}
		select {
		case <-turned:
			return
		case <-tick.C:
			a.tick(ctx) // however long the queue is
		default:
		}
		a.gather()
		a.rest = a.run(ctx, a.rest)
	}
}

// gather takes what waits.
func (a *active) gather() {
	for len(a.rest) < batchMax {
		select {
		case j := <-a.queue:
			a.rest = append(a.rest, j)
		default:
			return
		}
	}
}

// drop closes the queue and answers what was not run.
func (a *active) drop() {
	a.entry.Lock()
	a.over = true
	a.entry.Unlock()
	for _, j := range a.rest {
		j.done <- outcome{err: notLeader{}}
	}
	for {
		select {
		case j := <-a.queue:
			j.done <- outcome{err: notLeader{}}
		default:
			return
		}
	}
}

// submit queues a command and waits for its outcome.
func (a *active) submit(ctx context.Context, command controller.Command, from int32) (answer, error) {
	if beat, ok := command.(controller.HeartbeatCommand); ok {
		a.touch(beat)
	}
	done := make(chan outcome, 1)
	if err := a.enqueue(job{ctx, command, from, done}); err != nil {
		return answer{}, err
	}
	select {
	case o := <-done:
		return o.answer, o.err
	case <-ctx.Done():
		return answer{}, fmt.Errorf("%T: %w", command, ctx.Err())
	}
}

// enqueue takes only what will be answered.
func (a *active) enqueue(j job) error {
	a.entry.RLock()
	defer a.entry.RUnlock()
	if a.over {
		return notLeader{}
	}
	select {
	case a.queue <- j:
		return nil
	default:
		return ErrBusy
	}
}

// ran is a command whose outcome waits for the records that it wrote or saw.
type ran struct {
	job
	outcome
}

// run carries out commands, in order, and returns those that are left for the next entry.
func (a *active) run(ctx context.Context, jobs []job) []job {
	env := a.env()
	work := a.img
	var records []metadata.Record
	var waiting []ran
	for i, j := range jobs {
		if len(records) >= recordsMax {
			jobs = jobs[i:]
			a.commit(ctx, records, waiting)
			return jobs
		}
		if err := j.ctx.Err(); err != nil {
			j.done <- outcome{err: fmt.Errorf("%T: %w", j.command, err)}
			continue
		}
		o, made := a.one(ctx, work, env, j)
		if len(made) > 0 {
			next, err := work.Apply(made)
			if err != nil {
				a.c.o.Logger.Error("a command made impossible records", "command", fmt.Sprintf("%T", j.command), "cause", err)
				o, made = outcome{err: fmt.Errorf("internal error: %w", err)}, nil
			} else {
				work, records = next, append(records, made...)
			}
		}
		if len(records) == 0 {
			o.index = a.img.Index
			j.done <- o
			continue
		}
		waiting = append(waiting, ran{j, o})
	}
	a.commit(ctx, records, waiting)
	return nil
}

// commit makes the records durable and answers those that wrote or saw them.
func (a *active) commit(ctx context.Context, records []metadata.Record, waiting []ran) {
	if len(records) == 0 {
		return
	}
	img, err := a.c.o.Quorum.Propose(ctx, a.img, records)
	switch {
	case err == nil:
		a.img = img
		a.tellLost(records)
	case errors.Is(err, quorum.ErrOutcomeUnknown):
		err = lost{err}
	case errors.Is(err, quorum.ErrNotController), errors.Is(err, quorum.ErrConflict):
		err = notLeader{}
	default:
		a.c.o.Logger.Error("metadata could not be written", "cause", err)
	}
	if err != nil {
		a.img = a.c.o.Quorum.Image()
	}
	for _, r := range waiting {
		if err != nil {
			r.outcome = outcome{err: err}
		} else {
			r.index = img.Index
			if u, ok := r.command.(controller.UnregisterCommand); ok && r.err == nil {
				a.remove(ctx, u.Broker)
			}
		}
		r.done <- r.outcome
	}
}

// tellLost says which partitions have nobody left who is known to have everything.
func (a *active) tellLost(records []metadata.Record) {
	var names []string
	var broker int32
	for _, r := range records {
		if p, ok := r.(metadata.PartitionRecord); ok && p.Lost {
			broker = p.ISR[0]
			if t := a.img.TopicsByID[p.Topic]; t != nil {
				names = append(names, fmt.Sprintf("%s-%d", t.Name, p.Index))
			}
		}
	}
	if n := len(names); n > 0 {
		a.c.o.Logger.Error("the last replica in sync came back with an empty disk: without a leader until varve topic elect --unclean makes one of the other replicas it",
			"partitions", n, "such as", strings.Join(names[:min(n, 5)], ","), "broker", broker)
	}
}

// one runs a command against the working image.
func (a *active) one(ctx context.Context, work *metadata.Image, env controller.Env, j job) (o outcome, records []metadata.Record) {
	defer func() {
		if p := recover(); p != nil {
			a.c.o.Logger.Error("panic in a command", "command", fmt.Sprintf("%T", j.command), "panic", p, "stack", string(debug.Stack()))
			o, records = outcome{err: fmt.Errorf("internal error: %v", p)}, nil
		}
	}()
	switch command := j.command.(type) {
	case controller.RegisterCommand:
		if j.from < 0 {
			// This process is the new run of this node, so the old one cannot be alive.
			alive := env.Alive
			env.Alive = func(id int32) bool { return id != command.Broker.ID && alive(id) }
		}
		if err := a.join(ctx, work, env, command); err != nil {
			return outcome{err: err}, nil
		}
	case controller.UnregisterCommand:
		if isVoter(a.c.o.Quorum.Status(), command.Broker) {
			return outcome{err: &controller.Error{Kind: controller.ErrInvalidRequest,
				Message: fmt.Sprintf("node %d is a voter of the quorum: remove it first with varve quorum remove %d", command.Broker, command.Broker)}}, nil
		}
	}
	records, reply, err := j.command.Run(work, env)
	if err != nil {
		return outcome{err: err}, nil
	}
	return outcome{answer: answer{reply: reply}}, records
}

// join makes a node that registers follow the metadata log, unless it is to be refused.
func (a *active) join(ctx context.Context, work *metadata.Image, env controller.Env, command controller.RegisterCommand) error {
	peer, ok := command.Broker.Peer()
	if _, _, err := command.Run(work, env); err != nil || !ok || a.c.o.Hub == nil {
		return nil // Run says why
	}
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	err := a.c.o.Quorum.AddNonvoter(ctx, command.Broker.ID, hostPort(peer.Host, peer.Port))
	if errors.Is(err, quorum.ErrNotController) {
		return lost{err}
	}
	return err
}

// remove makes a node that was unregistered no member of the quorum.
func (a *active) remove(ctx context.Context, id int32) {
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	if err := a.c.o.Quorum.Remove(ctx, id); err != nil {
		a.forgotten = true
		a.c.o.Logger.Warn("an unregistered node stays a member of the quorum for now", "node", id, "cause", err)
	}
}

// env adds what sessions know.
func (a *active) env() controller.Env {
	env := a.c.o.Env()
	env.Alive = func(id int32) bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.sessions.Alive(id, env.Now)
	}
	env.Thin = func(id int32, p controller.PartitionRef) bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.sessions.Thin(id, p)
	}
	return env
}

// touch notes a heartbeat at once: a broker is not silent because its heartbeats have to wait here.
func (a *active) touch(beat controller.HeartbeatCommand) {
	now := a.c.o.Env().Now
	a.mu.Lock()
	defer a.mu.Unlock()
	a.sessions.Touch(beat.Broker, beat.Epoch, now)
	a.sessions.SetThin(beat.Broker, beat.Thin)
	a.applied[beat.Broker] = beat.Applied
}

// keepsUp tells why a node that is to vote would be in the way of the others, nil if it follows the log.
func (a *active) keepsUp(id int32, newest uint64) error {
	now := a.c.o.Env().Now
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.sessions.Alive(id, now) {
		return refuse("node %d is not running: a voter that is down keeps the others from a majority", id)
	}
	if at := a.applied[id]; at+lagMax < newest {
		return fmt.Errorf("node %d has read the metadata log up to %d of %d: try again when it has caught up", id, at, newest)
	}
	return nil
}

// disconnected notes that the connection with a node's heartbeats broke.
func (a *active) disconnected(id int32) {
	now := a.c.o.Env().Now
	a.mu.Lock()
	defer a.mu.Unlock()
	a.sessions.Disconnected(id, now)
}

// tick does what time demands.
func (a *active) tick(ctx context.Context) {
	env := a.env()
	a.mu.Lock()
	if away := env.Now - a.lastTick; away > a.c.o.SessionTimeout.Milliseconds()/2 {
		// This node was stopped, or its clock was set. That is not the others' silence.
		a.sessions.Begin(a.img, env.Now, nil)
	}
	a.lastTick = env.Now
	silent := a.sessions.Silent(a.img, env.Now)
	a.mu.Unlock()
	if a.img.ClusterID == "" {
		return
	}
	slow := env.Now-a.lastSlow >= slowPace.Milliseconds()
	if slow {
		a.lastSlow = env.Now
		a.forget(ctx)
	}
	command := controller.TickCommand{Silent: silent, Preferred: a.preferredDue(env)}
	if len(silent) == 0 && !command.Preferred && !(slow && a.draining()) && a.begun {
		return
	}
	a.begun = true
	done := make(chan outcome, 1)
	a.run(ctx, []job{{ctx, command, -1, done}})
	if o := <-done; o.err != nil && ctx.Err() == nil {
		a.c.o.Logger.Warn("the controller's own work failed, it is tried again", "cause", o.err)
		return
	}
	if command.Preferred {
		a.lastPreferred = env.Now
	}
	for _, id := range silent {
		a.c.o.Logger.Warn("a broker is silent and fenced", "broker", id)
	}
}

func (a *active) preferredDue(env controller.Env) bool {
	v, err := env.Broker.With(a.img.BrokerConfigs[controller.ClusterWide])
	if err != nil {
		v = env.Broker
	}
	return v.Bool("auto.leader.rebalance.enable") && env.Now-a.lastPreferred >= 1000*v.Int64("leader.imbalance.check.interval.seconds")
}

func (a *active) draining() bool {
	for id := range a.img.Brokers {
		if a.img.BrokerConfigs[id]["varve.broker.drain"] == "true" {
			return true
		}
	}
	return false
}

// forget removes members of the quorum that neither vote nor are brokers: what unregistering left behind.
func (a *active) forget(ctx context.Context) {
	if !a.forgotten {
		return
	}
	a.forgotten = false
	for _, m := range a.c.o.Quorum.Status().Members {
		if _, ok := a.img.Brokers[m.ID]; !ok && !m.Voter {
			a.remove(ctx, m.ID)
		}
	}
}
