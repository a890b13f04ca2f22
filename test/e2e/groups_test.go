package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"
)

// soon are settings under which members of consumer groups notice everything soon.
var soon = []string{"group.consumer.min.session.timeout.ms=3000", "group.consumer.session.timeout.ms=6000", "group.consumer.min.heartbeat.interval.ms=100",
	"group.consumer.heartbeat.interval.ms=250", "group.consumer.assignment.interval.ms=100"}

// readers are clients in a group, and what they have read.
type readers struct {
	mu   sync.Mutex
	seen map[int32]map[int]bool // numbers by partition
	wg   sync.WaitGroup
}

func (r *readers) run(ctx context.Context, cl *kgo.Client) {
	r.wg.Go(func() {
		for ctx.Err() == nil {
			cl.PollFetches(ctx).EachRecord(func(rec *kgo.Record) {
				i, _ := strconv.Atoi(string(rec.Value))
				r.mu.Lock()
				defer r.mu.Unlock()
				if r.seen[rec.Partition] == nil {
					r.seen[rec.Partition] = map[int]bool{}
				}
				r.seen[rec.Partition][i] = true
			})
		}
	})
}

// all says whether every number up to n of every partition has been read.
func (r *readers) all(partitions, n int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for p := range int32(partitions) {
		for i := range n {
			if !r.seen[p][i] {
				return false
			}
		}
	}
	return true
}

// described is what varve group describe --json says.
type described struct {
	Type, State string
	Consumers   []struct {
		ID               string `json:"memberId"`
		Protocol         string
		Epoch            int32
		Assigned, Target map[string][]int32
	}
	Lag int64
}

func (n *node) describeGroup(name string) described {
	var d described
	if out, code := n.varve("group", "describe", name, "--json", "-b", n.address()); code == 0 {
		if err := json.Unmarshal([]byte(out), &d); err != nil {
			n.t.Fatalf("%v: %s", err, out)
		}
	}
	return d
}

// balanced says whether a group is stable with as many members, and every partition of the topic has one that reads it.
func (d described) balanced(members, partitions int) bool {
	owners := map[int32]string{}
	for _, m := range d.Consumers {
		for _, list := range m.Assigned {
			for _, p := range list {
				owners[p] = m.ID
			}
		}
	}
	return d.State == "Stable" && len(d.Consumers) == members && len(owners) == partitions
}

// TestConsumerGroupThroughKill: members of the consumer protocol (KIP-848) come and go while the broker is killed, and no partition stays
// unread. The group that comes back is the one that was.
func TestConsumerGroupThroughKill(t *testing.T) {
	const partitions = 8
	n := newNode(t, soon...)
	n.start()
	n.createTopic("t", partitions)
	ctx, stop := context.WithCancel(context.Background())
	r := &readers{seen: map[int32]map[int]bool{}}
	member := func(opts ...kgo.Opt) *kgo.Client {
		cl := n.client(append(opts, kgo.ConsumerGroup("g"), kgo.ConsumeTopics("t"), kgo.ServerSideBalancer(), kgo.AutoCommitInterval(200*time.Millisecond),
			kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchMaxWait(100*time.Millisecond))...)
		r.run(ctx, cl)
		return cl
	}
	members := []*kgo.Client{member(), member(), member(kgo.InstanceID("fixed"))}
	defer func() {
		stop()
		r.wg.Wait()
	}()
	producer := n.client(kgo.RecordPartitioner(kgo.ManualPartitioner()))
	var sent atomic.Int64
	write := func(rounds int) {
		t.Helper()
		for range rounds {
			for p := range int32(partitions) {
				limit, cancel := context.WithTimeout(ctx, 30*time.Second)
				if err := producer.ProduceSync(limit, &kgo.Record{Topic: "t", Partition: p, Value: []byte(fmt.Sprint(sent.Load()))}).FirstErr(); err != nil {
					t.Fatal(err)
				}
				cancel()
			}
			sent.Add(1)
		}
	}
	read := func(what string) {
		t.Helper()
		n.until(what, func() bool { return r.all(partitions, int(sent.Load())) })
	}
	write(20)
	read("all is read before the kill")
	n.until("the group is balanced", func() bool { return n.describeGroup("g").balanced(3, partitions) })
	before := n.describeGroup("g")
	n.kill()
	n.start()
	write(20)
	read("all is read after the kill")
	if after := n.describeGroup("g"); after.Type != "consumer" || len(after.Consumers) != 3 || after.Consumers[0].Protocol != "consumer" || after.Consumers[0].Epoch < before.Consumers[0].Epoch {
		t.Errorf("the group was %+v, and is %+v", before, after)
	}

	// One leaves, one comes, and the broker dies in the middle of that.
	members[0].Close()
	member()
	n.kill()
	n.start()
	write(20)
	read("all is read after a kill in a rebalance")
	n.until("the group is balanced again", func() bool { return n.describeGroup("g").balanced(3, partitions) })

	if out, code := n.varve("group", "ls", "-b", n.address()); code != 0 || !strings.Contains(out, "consumer") || !strings.Contains(out, "Stable") {
		t.Errorf("exit %d: %s", code, out)
	}
	if out, code := n.varve("group", "describe", "g", "-b", n.address()); code != 0 || !strings.Contains(out, "assignment epoch") || !strings.Contains(out, "fixed") && !strings.Contains(out, "t:") {
		t.Errorf("exit %d: %s", code, out)
	}
	if out, code := n.varve("group", "delete", "g", "-b", n.address()); code != 1 {
		t.Errorf("a group in use was deleted: %s", out)
	}
}

// TestGroupMigratesOnline: a classic group goes over to the consumer protocol member by member and back, and reads on.
func TestGroupMigratesOnline(t *testing.T) {
	const partitions = 6
	n := newNode(t, soon...)
	n.start()
	n.createTopic("t", partitions)
	ctx, stop := context.WithCancel(context.Background())
	r := &readers{seen: map[int32]map[int]bool{}}
	defer func() {
		stop()
		r.wg.Wait()
	}()
	member := func(opts ...kgo.Opt) *kgo.Client {
		cl := n.client(append(opts, kgo.ConsumerGroup("g"), kgo.ConsumeTopics("t"), kgo.Balancers(kgo.RangeBalancer()), kgo.AutoCommitInterval(200*time.Millisecond),
			kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchMaxWait(100*time.Millisecond), kgo.HeartbeatInterval(250*time.Millisecond), kgo.RebalanceTimeout(10*time.Second))...)
		r.run(ctx, cl)
		return cl
	}
	producer := n.client(kgo.RecordPartitioner(kgo.ManualPartitioner()))
	sent := 0
	check := func(what string) {
		t.Helper()
		for p := range int32(partitions) {
			if err := producer.ProduceSync(ctx, &kgo.Record{Topic: "t", Partition: p, Value: []byte(fmt.Sprint(sent))}).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
		sent++
		n.until(what, func() bool { return r.all(partitions, sent) })
	}
	is := func(kind string, members int) {
		t.Helper()
		n.until("the group is "+kind, func() bool {
			d := n.describeGroup("g")
			return d.Type == kind && d.State == "Stable" && (kind == "classic" || d.balanced(members, partitions))
		})
	}
	old := []*kgo.Client{member(), member()}
	check("classic members read")
	is("classic", 2)
	first := member(kgo.ServerSideBalancer())
	is("consumer", 3)
	check("both kinds read")
	old[0].Close()
	second := member(kgo.ServerSideBalancer())
	is("consumer", 3)
	check("both kinds read, one of the old")
	first.Close()
	second.Close()
	is("classic", 1)
	check("the old one reads all again")
	old[1].Close()
	member(kgo.ServerSideBalancer())
	is("consumer", 1)
	check("the new one reads all")
}

// TestTenThousandGroups: as many groups commit, are listed and are all there after a kill.
func TestTenThousandGroups(t *testing.T) {
	const groups = 10_000
	n := newNode(t)
	n.start()
	n.createTopic("many", 1)
	var work errgroup.Group
	work.SetLimit(32)
	clients := make(chan *kadm.Client, 32)
	for range cap(clients) {
		clients <- n.admin()
	}
	for i := range groups {
		work.Go(func() error {
			adm := <-clients
			defer func() { clients <- adm }()
			var o kadm.Offsets
			o.AddOffset("many", 0, int64(i), -1)
			answers, err := adm.CommitOffsets(t.Context(), fmt.Sprint("group-", i), o)
			return errors.Join(err, answers.Error())
		})
	}
	if err := work.Wait(); err != nil {
		t.Fatal(err)
	}
	for _, after := range []string{"at first", "after a kill"} {
		listed, err := n.admin().ListGroups(t.Context())
		if err != nil || len(listed) != groups {
			t.Fatalf("%s %d groups are listed: %v", after, len(listed), err)
		}
		for i := 0; i < groups; i += 97 {
			o, err := n.admin().FetchOffsets(t.Context(), fmt.Sprint("group-", i))
			if at, ok := o.Lookup("many", 0); err != nil || !ok || at.At != int64(i) {
				t.Fatalf("%s group %d is at %v: %v", after, i, at, err)
			}
		}
		n.kill()
		n.start()
	}
}
