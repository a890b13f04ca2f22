package coordinator

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/committed"
	"github.com/varve-io/varve/internal/consumergroup"
	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/vfs"
)

// withTopic has the world's brokers know a topic "a" of 4 partitions.
func (w *world) withTopic() {
	img := metadata.Empty()
	t := &metadata.Topic{Name: "a", ID: tp.UUID{7}}
	for range 4 {
		t.Partitions = append(t.Partitions, &metadata.Partition{})
	}
	img.Topics[t.Name], img.TopicsByID[t.ID] = t, t
	w.config.Image = func() *metadata.Image { return img }
}

// beat sends a full heartbeat of a member of group "g" that subscribes to "a" and owns some of its partitions.
func beat(gs *Groups, id string, epoch int32, owned ...int32) (consumergroup.Answer, error) {
	r := consumergroup.Heartbeat{MemberID: id, Epoch: epoch, RebalanceMs: 60_000, Topics: []string{"a"}, Owned: consumergroup.Partitions{}, ClientID: "c", ClientHost: "/h"}
	if len(owned) > 0 {
		r.Owned[tp.UUID{7}] = owned
	}
	return gs.ConsumerHeartbeat("g", r)
}

func (w *world) beat(gs *Groups, id string, epoch int32, owned ...int32) consumergroup.Answer {
	w.t.Helper()
	a, err := beat(gs, id, epoch, owned...)
	if err != nil {
		w.t.Fatal(err)
	}
	return a
}

// two are two members that share the topic, and their epoch.
func (w *world) two(gs *Groups) int32 {
	w.t.Helper()
	first := w.beat(gs, "m1", 0)
	w.beat(gs, "m2", 0)
	w.beat(gs, "m1", first.Epoch, 0, 1, 2, 3)
	second := w.beat(gs, "m1", first.Epoch, 2, 3)
	w.beat(gs, "m2", second.Epoch)
	return second.Epoch
}

// A consumer group and what it committed survive its coordinator, and its members have a session from then on.
func TestConsumerGroupsAreLoaded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.withTopic()
		gs := w.elect(w.groups)
		epoch := w.two(gs)
		by := Committer{group.Committer{MemberID: "m1", Generation: epoch}, 9}
		if errs, err := gs.Commit("g", by, []Commit{commitAt("a", 5)}); err != nil || errs[0] != nil {
			t.Fatal(errs, err)
		}
		was, err := gs.DescribeConsumer("g")
		if err != nil || was.State != consumergroup.Stable || len(was.Members) != 2 {
			t.Fatal(was, err)
		}
		gs.Close()
		again := w.again()
		is, err := again.DescribeConsumer("g")
		if err != nil || is.Epoch != was.Epoch || is.State != was.State || is.Members[0].Epoch != epoch || !slices.Equal(is.Members[0].Assigned[tp.UUID{7}], was.Members[0].Assigned[tp.UUID{7}]) {
			t.Fatalf("was %+v, is %+v, %v", was, is, err)
		}
		if got := w.offsets(again, "g"); got != "a:5" {
			t.Fatal(got)
		}
		list, err := again.List()
		if err != nil || len(list) != 1 || list[0] != (Listed{"g", "consumer", TypeConsumer, "Stable"}) {
			t.Fatal(list, err)
		}
		time.Sleep(40 * time.Second)
		w.beat(again, "m2", epoch, 0, 1)
		time.Sleep(10 * time.Second) // m1's session is over
		if is, err := again.DescribeConsumer("g"); err != nil || len(is.Members) != 1 || is.Members[0].ID != "m2" {
			t.Fatal(is, err)
		}
		if _, err := beat(again, "m1", epoch, 2, 3); !errors.Is(err, group.ErrUnknownMember) {
			t.Fatal(err)
		}
		time.Sleep(46 * time.Second)
		if err := again.Delete("g"); err != nil {
			t.Fatal(err)
		}
		if list, err := w.again().List(); err != nil || len(list) != 0 {
			t.Fatal("a deleted group is back:", list, err)
		}
	})
}

// Whether members may commit and fetch is their epoch's matter; a group of one kind is not found by calls for the other.
func TestRequestsToTheOtherKindOfGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.withTopic()
		gs := w.elect(w.groups)
		epoch := w.two(gs)
		m := func(epoch int32) Fetcher { id := "m1"; return Fetcher{&id, epoch} }
		commit := func(generation int32, version int16) error {
			_, err := gs.Commit("g", Committer{group.Committer{MemberID: "m1", Generation: generation}, version}, []Commit{commitAt("a", 1)})
			return err
		}
		inTxn := func(by group.Committer) error {
			_, err := gs.CommitInTxn("g", by, InTxn{ProducerID: 7, Checked: true}, []Commit{commitAt("a", 5)})
			return err
		}
		fetch := func(f Fetcher) error {
			_, err := gs.FetchOffsets("g", f, []committed.Partition{{Topic: "a"}}, false)
			return err
		}
		_, describe := gs.Describe("g")
		_, deleted := gs.DeleteOffsets("g", []committed.Partition{{Topic: "a"}})
		for what, x := range map[string]struct{ err, want error }{
			"fetch in the epoch":         {fetch(m(epoch)), nil},
			"fetch in an older one":      {fetch(m(epoch - 1)), consumergroup.ErrStaleMemberEpoch},
			"fetch by nobody":            {fetch(anybody), nil},
			"commit in a newer one":      {commit(epoch+1, 9), consumergroup.ErrStaleMemberEpoch},
			"commit by an old API":       {commit(epoch, 8), consumergroup.ErrUnsupportedByProtocol},
			"transaction in the epoch":   {inTxn(group.Committer{MemberID: "m1", Generation: epoch}), nil},
			"transaction in a newer one": {inTxn(group.Committer{MemberID: "m1", Generation: epoch + 1}), consumergroup.ErrStaleMemberEpoch},
			"transaction by nobody":      {inTxn(nobody), nil},
			"DescribeGroups":             {describe, group.ErrNotFound},
			"OffsetDelete":               {deleted, nil},
			"DeleteGroups":               {gs.Delete("g"), group.ErrNotEmpty},
			"SyncGroup":                  {gs.Sync(t.Context(), "g", group.SyncRequest{MemberID: "m1", Generation: epoch}).Err, group.ErrUnknownMember},
			"Heartbeat":                  {gs.Heartbeat("g", "m1", "", epoch), group.ErrUnknownMember},
		} {
			if !errors.Is(x.err, x.want) {
				t.Errorf("%s: want %v, got %v", what, x.want, x.err)
			}
		}
		if errs, _ := gs.DeleteOffsets("g", []committed.Partition{{Topic: "a"}, {Topic: "b"}}); !errors.Is(errs[0], group.ErrSubscribed) || errs[1] != nil {
			t.Error("offsets of a subscribed topic:", errs)
		}
		w.commitAt(gs, "plain", commitAt("a", 1))
		if _, err := gs.DescribeConsumer("plain"); !errors.Is(err, group.ErrNotFound) || !strings.Contains(err.Error(), "is not a consumer group") {
			t.Error(err)
		}
		r := consumergroup.Heartbeat{MemberID: "m", Epoch: 3, RebalanceMs: -1}
		for id, want := range map[string]string{"plain": "Group plain is not a consumer group.", "none": "Group none not found."} {
			if _, err := gs.ConsumerHeartbeat(id, r); !errors.Is(err, group.ErrNotFound) || err.Error() != want {
				t.Error(err)
			}
		}
		// LeaveGroup takes out whoever it is told, as an operator does.
		if errs, err := gs.Leave("g", []Leaver{{MemberID: "m1"}, {MemberID: "x"}}); err != nil || errs[0] != nil || !errors.Is(errs[1], group.ErrUnknownMember) {
			t.Error(errs, err)
		}
	})
}

// A group without members is what its next member wants; what it committed stays.
func TestEmptyGroupsChangeTheirKind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.withTopic()
		gs := w.elect(w.groups)
		w.commitAt(gs, "g", commitAt("a", 5))
		state := func(want Listed) {
			t.Helper()
			for _, gs := range []*Groups{gs, w.again()} {
				if list, err := gs.List(); err != nil || len(list) != 1 || list[0] != want || w.offsets(gs, "g") != "a:5" {
					t.Fatal(list, err, w.offsets(gs, "g"))
				}
			}
		}
		w.beat(gs, "m1", 0)
		state(Listed{"g", "consumer", TypeConsumer, "Stable"})
		if _, err := gs.ConsumerHeartbeat("g", consumergroup.Heartbeat{MemberID: "m1", Epoch: consumergroup.LeaveEpoch}); err != nil {
			t.Fatal(err)
		}
		state(Listed{"g", "consumer", TypeConsumer, "Empty"})
		r := gs.Join(t.Context(), "g", join(""))
		if r.Err != nil {
			t.Fatal(r.Err)
		}
		if s := gs.Sync(t.Context(), "g", group.SyncRequest{MemberID: r.MemberID, Generation: r.Generation}); s.Err != nil {
			t.Fatal(s.Err)
		}
		state(Listed{"g", "consumer", TypeClassic, "Stable"})
		if _, err := gs.Leave("g", []Leaver{{MemberID: r.MemberID}}); err != nil {
			t.Fatal(err)
		}
		w.beat(gs, "m1", 0)
		state(Listed{"g", "consumer", TypeConsumer, "Stable"})
	})
}

// subscriber is a JoinGroup of a consumer that reads "a".
func subscriber(member string) group.JoinRequest {
	s := kmsg.NewConsumerMemberMetadata()
	s.Topics = []string{"a"}
	r := join(member)
	r.Protocols = []group.Protocol{{Name: "range", Metadata: s.AppendTo(nil)}}
	return r
}

// A live classic group goes over when the first consumer comes, whoever waits in it is sent away to ask anew, and it goes back when the last
// consumer has left; a successor finds it as it is each time.
func TestLiveGroupsChangeTheirKind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.withTopic()
		gs := w.elect(w.groups)
		r := gs.Join(t.Context(), "g", subscriber(""))
		a := kmsg.NewConsumerMemberAssignment()
		a.Topics = []kmsg.ConsumerMemberAssignmentTopic{{Topic: "a", Partitions: []int32{0, 1, 2, 3}}}
		if s := gs.Sync(t.Context(), "g", group.SyncRequest{MemberID: r.MemberID, Generation: r.Generation, Assignments: map[string][]byte{r.MemberID: a.AppendTo(nil)}}); s.Err != nil {
			t.Fatal(s.Err)
		}
		waiting := make(chan group.JoinResult, 1)
		second := subscriber("")
		second.NewID = "late"
		go func() { waiting <- gs.Join(t.Context(), "g", second) }() // the group rebalances, and waits for the first
		synctest.Wait()
		c := w.beat(gs, "m1", 0)
		if late := <-waiting; !errors.Is(late.Err, group.ErrRebalanceInProgress) {
			t.Fatal(late)
		}
		for _, gs := range []*Groups{gs, w.again()} {
			d, err := gs.DescribeConsumer("g")
			if err != nil || len(d.Members) != 3 {
				t.Fatal(d, err)
			}
		}
		// The first member is told to join again, gives up what is not its any more, and the consumer gets it.
		if err := gs.Heartbeat("g", r.MemberID, "", r.Generation); !errors.Is(err, group.ErrRebalanceInProgress) {
			t.Fatal(err)
		}
		r = gs.Join(t.Context(), "g", subscriber(r.MemberID))
		if s := gs.Sync(t.Context(), "g", group.SyncRequest{MemberID: r.MemberID, Generation: r.Generation}); r.Err != nil || s.Err != nil {
			t.Fatal(r.Err, s.Err)
		}
		if c = w.beat(gs, "m1", c.Epoch); len(c.Assignment[tp.UUID{7}]) == 0 {
			t.Fatal("the consumer gets nothing:", c)
		}
		if _, err := gs.ConsumerHeartbeat("g", consumergroup.Heartbeat{MemberID: "m1", Epoch: consumergroup.LeaveEpoch}); err != nil {
			t.Fatal(err)
		}
		for i, gs := range []*Groups{gs, w.again()} {
			d, err := gs.Describe("g")
			if err != nil || len(d.Members) != 2 || i == 0 && d.State != group.PreparingRebalance || i == 1 && d.State != group.Stable {
				t.Fatal(i, d, err)
			}
		}
		if err := gs.Heartbeat("g", r.MemberID, "", r.Generation); !errors.Is(err, group.ErrIllegalGeneration) && !errors.Is(err, group.ErrRebalanceInProgress) {
			t.Fatal(err)
		}
	})
}

// A change that cannot be written has not happened.
func TestConsumerGroupOnABrokenDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.withTopic()
		gs := w.elect(w.groups)
		epoch := w.two(gs)
		was, _ := gs.DescribeConsumer("g")
		w.fs.Inject(vfs.Fault{Op: vfs.OpWrite, Err: errors.New("bad sector"), Sticky: true})
		other := consumergroup.Heartbeat{MemberID: "m", RebalanceMs: 1, Topics: []string{"a"}, Owned: consumergroup.Partitions{}}
		for what, send := range map[string]func() error{
			"a join":        func() error { _, err := beat(gs, "m3", 0); return err },
			"a leave":       func() error { _, err := beat(gs, "m2", consumergroup.LeaveEpoch); return err },
			"another group": func() error { _, err := gs.ConsumerHeartbeat("h", other); return err },
		} {
			if err := send(); !errors.Is(err, ErrUnavailable) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if is, err := gs.DescribeConsumer("g"); err != nil || is.Epoch != was.Epoch || len(is.Members) != 2 || is.Members[0].Epoch != epoch {
			t.Errorf("was %+v, is %+v %v", was, is, err)
		}
		time.Sleep(50 * time.Second) // sessions end, which cannot be written, again and again
		if list, err := gs.List(); err != nil || len(list) != 1 {
			t.Error(list, err)
		}
	})
}
