package control

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/quorum"
	"github.com/varve-io/varve/internal/tier"
)

func TestCommandsRunWhereverTheyAreGiven(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, 2)
	c.up()
	for id, name := range map[int32]string{1: "a", 2: "b", 3: "c"} {
		if err := c.nodes[id].topic(name); err != nil {
			t.Fatal(err)
		}
		// Do waits until this broker lives by the command.
		if c.nodes[id].quorum.Image().Topics[name] == nil {
			t.Fatalf("node %d does not know its own topic %s", id, name)
		}
	}
	// Registering made them members.
	s, err := c.nodes[3].QuorumStatus(t.Context())
	if err != nil || s.Leader != 1 || len(s.Members) != 3 || !s.Members[0].Voter || s.Members[1].Voter || s.Members[2].Address != c.addresses[3] {
		t.Fatalf("%+v, %v", s, err)
	}
	// Refusals keep their kind and their words across the network.
	err = c.nodes[2].topic("a")
	if !errors.Is(err, controller.ErrTopicExists) {
		t.Fatal(err)
	}
	_, err = c.nodes[2].Do(t.Context(), controller.UnregisterCommand{Broker: 77})
	var refused *controller.Error
	if !errors.As(err, &refused) || !errors.Is(err, controller.ErrUnknownBroker) {
		t.Fatal(err)
	}
}

func TestProducerIDsAreNeverGivenTwice(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, 1)
	c.up()
	seen := map[int64]bool{}
	a, b := NewProducerIDs(c.nodes[1].Client), NewProducerIDs(c.nodes[2].Client)
	for range controller.ProducerIDBlock + 10 {
		for _, p := range []*ProducerIDs{a, b} {
			id, err := p.Next(t.Context())
			if err != nil || seen[id] {
				t.Fatal(id, err)
			}
			seen[id] = true
		}
	}
}

func TestGroupCommit(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, 0)
	c.up()
	l := c.leader()
	before := l.entries.Load()
	const n = 400
	start := make(chan struct{})
	var all sync.WaitGroup
	for i := range n {
		from := c.nodes[int32(1+i%3)]
		all.Go(func() {
			<-start
			if _, err := from.Record(from.ctx(), controller.ProducerIDsCommand{}); err != nil {
				t.Error(err)
			}
		})
	}
	close(start)
	all.Wait()
	if entries := l.entries.Load() - before; entries > n/2 {
		t.Fatalf("%d commands took %d entries", n, entries)
	}
	if next := l.quorum.Image().NextProducerID; next != n*controller.ProducerIDBlock {
		t.Fatalf("%d commands reserved up to %d", n, next)
	}
}

func TestLeaderDiesAndCommandsGoOn(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, 0)
	c.up()
	if err := c.follower().topic("before"); err != nil {
		t.Fatal(err)
	}
	old := c.leader()
	old.kill()
	delete(c.nodes, old.id)
	n := c.follower()
	if _, err := n.Do(n.ctx(), controller.ProducerIDsCommand{}); err != nil {
		t.Fatal(err)
	}
	if n.quorum.Image().Topics["before"] == nil {
		t.Fatal("the topic is lost")
	}
}

func TestSilentBrokersAreFenced(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, 2)
	c.session = time.Second
	c.up()
	l := c.leader()
	c.eventually("broker 2 is fenced", func() bool {
		c.nodes[1].beat()
		c.nodes[3].beat()
		return l.quorum.Image().Brokers[2].Fenced
	})
	if img := l.quorum.Image(); img.Brokers[1].Fenced || img.Brokers[3].Fenced {
		t.Fatal("others are fenced too")
	}
}

// A controller that was away itself must not take that for the silence of all others.
func TestClockThatJumpsFencesNobody(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, 2)
	c.up()
	l := c.leader()
	c.skew.Store(time.Hour.Milliseconds())
	l.mu.Lock()
	a := l.active
	l.mu.Unlock()
	c.eventually("the jump was noticed", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.sessions.Alive(2, time.Now().Add(time.Hour).UnixMilli())
	})
	for id, r := range l.quorum.Image().Brokers {
		if r.Fenced {
			t.Fatalf("broker %d is fenced", id)
		}
	}
}

func TestDisconnectedBrokersAreFenced(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, 2)
	c.grace = 50 * time.Millisecond
	c.up()
	l := c.leader()
	if err := c.nodes[2].topic("t"); err != nil {
		t.Fatal(err)
	}
	// Its session has ten seconds to go, but its connection is gone.
	for _, link := range c.nodes[2].links {
		link.nc.Close()
	}
	c.eventually("broker 2 is fenced", func() bool { return l.quorum.Image().Brokers[2].Fenced })
	if l.quorum.Image().Brokers[3].Fenced || l.quorum.Image().Brokers[1].Fenced {
		t.Fatal("others are fenced too")
	}
	c.nodes[2].beat()
	if l.quorum.Image().Brokers[2].Fenced {
		t.Fatal("it came back and is fenced")
	}
	// A goodbye is no failure: the session goes on.
	c.nodes[3].hangUp()
	if _, err := c.nodes[3].Do(t.Context(), controller.ProducerIDsCommand{}); !errors.Is(err, errOver) {
		t.Fatal(err)
	}
	c.eventually("the connection is known to be over", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.beats[3] == nil
	})
	l.mu.Lock()
	a := l.active
	l.mu.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.sessions.Alive(3, time.Now().Add(5*time.Second).UnixMilli()) {
		t.Fatal("a goodbye ended the session")
	}
}

func TestRefusedRegistrationChangesNoMembership(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, 1)
	c.up()
	n := c.nodes[2]
	twin := n.broker()
	twin.Incarnation[5] = 1
	twin.Listeners[0].Port += 20_000 // nobody's
	_, err := n.Do(n.ctx(), controller.RegisterCommand{Broker: twin})
	if !errors.Is(err, controller.ErrDuplicateBroker) {
		t.Fatal(err)
	}
	if s := c.nodes[1].quorum.Status(); s.Members[1].Address != c.addresses[2] {
		t.Fatalf("%+v", s)
	}
	// The leader's own new run knows that its old one is gone.
	again := c.nodes[1].broker()
	again.Incarnation[5] = 1
	again.Listeners[0].Port += 20_000 // nobody's
	if r, err := Do[controller.Registered](t.Context(), c.nodes[1].Client, controller.RegisterCommand{Broker: again}); err != nil || r.Epoch <= n.epoch {
		t.Fatal(r, err)
	}
}

func TestVotersAndUnregistering(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, 2)
	c.grace = 30 * time.Millisecond
	c.up()
	n := c.nodes[3]
	if err := n.RemoveVoter(t.Context(), 1); err == nil || !strings.Contains(err.Error(), "node 1 is the last voter") {
		t.Fatal(err)
	}
	if err := n.RemoveVoter(t.Context(), 2); err == nil || !strings.Contains(err.Error(), "node 2 is no voter") {
		t.Fatal(err)
	}
	if err := n.AddVoter(t.Context(), 9, ""); err == nil || !strings.Contains(err.Error(), "not registered") {
		t.Fatal(err)
	}
	l := c.leader()
	l.mu.Lock()
	a := l.active
	l.mu.Unlock()
	a.mu.Lock()
	a.sessions.Disconnected(2, time.Now().UnixMilli()-1000)
	a.mu.Unlock()
	if err := n.AddVoter(t.Context(), 2, ""); err == nil || !strings.Contains(err.Error(), "node 2 is not running") {
		t.Fatal(err)
	}
	c.nodes[2].beat()
	if err := a.keepsUp(2, 5000); err == nil || !strings.Contains(err.Error(), "caught up") {
		t.Fatal(err)
	}
	if err := n.AddVoter(t.Context(), 2, ""); err != nil {
		t.Fatal(err)
	}
	_, err := n.Do(t.Context(), controller.UnregisterCommand{Broker: 2})
	if !errors.Is(err, controller.ErrInvalidRequest) || !strings.Contains(err.Error(), "node 2 is a voter of the quorum") {
		t.Fatal(err)
	}
	if err := n.RemoveVoter(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	for _, l := range c.nodes[2].links {
		l.nc.Close()
	}
	c.eventually("broker 2 is fenced", func() bool { return l.quorum.Image().Brokers[2].Fenced })
	if _, err := n.Do(t.Context(), controller.UnregisterCommand{Broker: 2}); err != nil {
		t.Fatal(err)
	}
	if s := l.quorum.Status(); len(s.Members) != 2 || s.Members[1].ID != 3 {
		t.Fatalf("%+v", s)
	}
}

// panicking is a command that fails in the worst way.
type panicking struct{ controller.ProducerIDsCommand }

func (panicking) Run(*metadata.Image, controller.Env) ([]metadata.Record, any, error) { panic("no") }

// impossible makes records that do not apply.
type impossible struct{ controller.ProducerIDsCommand }

func (impossible) Run(*metadata.Image, controller.Env) ([]metadata.Record, any, error) {
	return []metadata.Record{metadata.UnregisterBrokerRecord{ID: 99}}, nil, nil
}

func TestBadCommandsHarmOnlyThemselves(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, 0)
	c.up()
	n := c.nodes[1]
	for _, command := range []controller.Command{panicking{}, impossible{}} {
		if _, err := n.Do(t.Context(), command); err == nil || !strings.Contains(err.Error(), "internal error") {
			t.Fatal(err)
		}
	}
	if err := n.topic("t"); err != nil {
		t.Fatal(err)
	}
}

func TestQueueIsBounded(t *testing.T) {
	a := &active{queue: make(chan job, 1)}
	if err := a.enqueue(job{}); err != nil {
		t.Fatal(err)
	}
	if err := a.enqueue(job{}); !errors.Is(err, ErrBusy) {
		t.Fatal(err)
	}
	done := make(chan outcome, 1)
	<-a.queue
	if err := a.enqueue(job{done: done}); err != nil {
		t.Fatal(err)
	}
	a.drop()
	if o := <-done; !errors.As(o.err, new(notLeader)) {
		t.Fatal(o.err)
	}
	if err := a.enqueue(job{}); !errors.As(err, new(notLeader)) {
		t.Fatal(err)
	}
}

func TestNodesSpeakForThemselves(t *testing.T) {
	own := []controller.Command{
		controller.HeartbeatCommand{Broker: 2}, controller.RegisterCommand{Broker: metadata.BrokerRecord{ID: 2}}, controller.AlterPartitionsCommand{Broker: 2},
		controller.StartCopyCommand{Segment: tier.Segment{Broker: 2}}, controller.FinishCopyCommand{Segment: tier.Segment{Broker: 2}},
		controller.StartDeleteCommand{Leader: 2}, controller.DisableRemoteCommand{Leader: 2},
	}
	for _, command := range own {
		if err := permit(command, 2); err != nil {
			t.Error(err)
		}
		if err := permit(command, 3); err == nil {
			t.Errorf("node 3 may send a %T for node 2", command)
		}
	}
	for _, command := range []controller.Command{controller.TickCommand{}, controller.BootstrapCommand{}} {
		if err := permit(command, 2); err == nil {
			t.Errorf("%T came in from the network", command)
		}
	}
	if err := permit(controller.CreateTopicsCommand{}, 3); err != nil {
		t.Error(err)
	}
}

func TestForeignHeartbeatIsRefused(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, 1)
	c.up()
	n := c.nodes[2]
	_, err := n.Do(t.Context(), controller.HeartbeatCommand{Broker: 1, Epoch: c.nodes[1].epoch, Ready: true})
	if err == nil || !strings.Contains(err.Error(), "node 2 may not send") {
		t.Fatal(err)
	}
}

// A connection that breaks with a command on it: some commands are sent again, the others' outcome is unknown.
func TestUnknownOutcome(t *testing.T) {
	c := New(Options{NodeID: 2})
	a := &active{c: c, queue: make(chan job, 8)}
	c.active = a
	outcomes := []outcome{{err: lost{quorum.ErrOutcomeUnknown}}, {err: lost{quorum.ErrOutcomeUnknown}}, {answer: answer{reply: int64(7)}}, {err: lost{quorum.ErrOutcomeUnknown}}}
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() {
		for i, o := range outcomes {
			j := <-a.queue
			if i == len(outcomes)-1 {
				cancel()
			}
			j.done <- o
		}
	})
	if _, err := c.Record(t.Context(), controller.CreateTopicsCommand{}); !errors.Is(err, ErrUnknownOutcome) {
		t.Fatal(err)
	}
	if id, err := Record[int64](t.Context(), c, controller.ProducerIDsCommand{}); err != nil || id != 7 {
		t.Fatal(id, err)
	}
	if _, err := c.Record(ctx, controller.AlterPartitionsCommand{}); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	all.Wait()
}

func TestHostileFrames(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, 1)
	c.up()
	for name, b := range map[string][]byte{
		"length":  binary.BigEndian.AppendUint32(nil, frameMax+1),
		"empty":   {0, 0, 0, 0},
		"garbage": {0, 0, 0, 3, 0xff, 0xff, 0xff},
		"half":    {0, 0, 1, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			nc, _, err := c.nodes[2].hub.Dial(t.Context(), c.addresses[1], 1, service)
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			nc.Write(b)
			if name == "half" {
				nc.(interface{ CloseWrite() error }).CloseWrite()
			}
			if n, err := nc.Read(make([]byte, 1)); n != 0 || err == nil {
				t.Fatal("it was answered")
			}
		})
	}
	if err := c.nodes[2].topic("t"); err != nil {
		t.Fatal("the node suffered:", err)
	}
}

func TestUnknownCommandIsRefused(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, 1)
	c.up()
	nc, _, err := c.nodes[2].hub.Dial(t.Context(), c.addresses[1], 1, service)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	for _, r := range []request{{ID: 1, Command: []byte{1}}, {ID: 2, Act: 99}} {
		b, err := frame(r)
		if err != nil {
			t.Fatal(err)
		}
		nc.Write(b)
		var got response
		if err := readFrame(nc, &got); err != nil || got.ID != r.ID || got.Code != codeFailed || got.Text == "" {
			t.Fatalf("%+v, %v", got, err)
		}
	}
}

func FuzzFrame(f *testing.F) {
	command, err := encodeTask(task{command: controller.HeartbeatCommand{Broker: 1}})
	if err != nil {
		f.Fatal(err)
	}
	for _, v := range []any{command, response{ID: 3, Code: codeRefused, Error: &controller.Error{Kind: controller.ErrFenced, Message: "no"}}} {
		b, err := frame(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var r request
		if readFrame(bytes.NewReader(b), &r) == nil {
			if task, err := decodeTask(r); err == nil && task.command != nil {
				_ = permit(task.command, 1)
				if _, err := encodeTask(task); err != nil {
					t.Fatal(err)
				}
			}
		}
		var w response
		if readFrame(bytes.NewReader(b), &w) == nil {
			_, _ = decodeAnswer(task{command: controller.HeartbeatCommand{}}, w)
			_, _ = decodeAnswer(task{act: actStatus}, w)
		}
	})
}

func BenchmarkThreeVoters(b *testing.B) {
	c := newCluster(b, 3, 0)
	c.up()
	n := c.follower()
	ctx := context.Background()
	b.ResetTimer()
	b.SetParallelism(32)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, err := n.Record(ctx, controller.ProducerIDsCommand{}); err != nil {
				b.Error(err)
			}
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "commands/s")
}
