package coordinator

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/varve-io/varve/internal/committed"
	"github.com/varve-io/varve/internal/consumergroup"
	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/txn"
	"github.com/varve-io/varve/internal/vfs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is the topic with one partition and a broker that leads it.
type world struct {
	t      *testing.T
	fs     *vfs.Faulty
	part   *partition.Partition
	groups *Groups
	lines  *bytes.Buffer
	config Config
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, fs: vfs.NewFaulty(vfs.NewMem()), lines: &bytes.Buffer{}, config: Config{Partitions: 1, MetadataMax: 100, OffsetRetentionMs: 1000_000,
		Image: metadata.Empty, Group: group.Config{SessionMinMs: 1000, SessionMaxMs: 3_600_000, SizeMax: 100},
		Consumer: func(string) consumergroup.Config {
			return consumergroup.Config{SessionMs: 45_000, HeartbeatMs: 5000, SizeMax: 100, Assignors: []string{"uniform", "range"}, RegexMs: 600_000,
				Upgrade: true, Downgrade: true, Mixed: true}
		}}}
	if err := w.fs.MkdirAll("/d"); err != nil {
		t.Fatal(err)
	}
	id := tp.Partition{Topic: Topic}
	c := log.DefaultConfig()
	c.SegmentBytes, c.RetentionMs = 2000, -1
	l, err := log.Open(log.Options{FS: w.fs, Dir: "/d/" + id.String(), Partition: id, Config: c, Now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	w.part = partition.New(id, tp.UUID{1}, 1, l, 0, partition.Hooks{})
	w.part.Assume(partition.Role{Leader: 1, LeaderEpoch: 0, Replicas: []int32{1}, ISR: []int32{1}}, time.Now())
	t.Cleanup(func() { w.part.Close() })
	w.groups = w.host()
	return w
}

// host is a broker's coordinator that has no partition yet.
func (w *world) host() *Groups {
	gs := New(func() Config { return w.config }, slog.New(slog.NewTextHandler(w.lines, nil)))
	w.t.Cleanup(gs.Close)
	return gs
}

// elect makes the partition's groups served and waits until they are loaded.
func (w *world) elect(gs *Groups) *Groups {
	w.t.Helper()
	done := make(chan struct{})
	gs.Elect(w.part, func() { close(done) })
	<-done
	return gs
}

// again is what a restart, or another broker, knows of the groups.
func (w *world) again() *Groups {
	w.t.Helper()
	return w.elect(w.host())
}

func (w *world) append(records ...recordbatch.Record) {
	w.t.Helper()
	b := recordbatch.NewBuilder()
	for _, r := range records {
		b.Add(r)
	}
	raw, err := b.Build()
	if err != nil {
		w.t.Fatal(err)
	}
	if _, err := w.part.Append(partition.Write{Records: raw, Now: time.Now(), Internal: true}); err != nil {
		w.t.Fatal(err)
	}
}

var (
	nobody  = group.Committer{Generation: -1}
	anybody = Fetcher{Epoch: -1}
)

func commitAt(topic string, offset int64) Commit {
	return Commit{committed.Partition{Topic: topic}, committed.Offset{Offset: offset, LeaderEpoch: -1, Metadata: "m", CommittedAt: now(), ExpiresAt: -1}}
}

func (w *world) commitAt(gs *Groups, id string, commits ...Commit) {
	w.t.Helper()
	errs, err := gs.Commit(id, Committer{nobody, 8}, commits)
	if err = errors.Join(append(errs, err)...); err != nil {
		w.t.Fatal(err)
	}
}

// offsets are a group's committed offsets, in words.
func (w *world) offsets(gs *Groups, id string) string {
	w.t.Helper()
	all, err := gs.FetchOffsets(id, anybody, nil, true)
	if err != nil {
		w.t.Fatal(err)
	}
	var out []string
	for _, f := range all {
		out = append(out, fmt.Sprintf("%s:%d", f.Topic, f.Offset.Offset))
	}
	return strings.Join(out, " ")
}

func join(member string) group.JoinRequest {
	return group.JoinRequest{MemberID: member, NewID: "new", ClientID: "c", ClientHost: "/h", SessionMs: 10_000, RebalanceMs: 60_000, ProtocolType: "consumer",
		Protocols: []group.Protocol{{Name: "range", Metadata: []byte{0, 0}}}}
}

// Java's String.hashCode counts UTF-16 units, and Kafka takes its absolute value, with 0 for the one that has none.
func TestPartitionFor(t *testing.T) {
	for _, c := range []struct {
		id        string
		hash      int32 // "…".hashCode()
		of50, of7 int32
	}{
		{"", 0, 0, 0},
		{"a", 97, 47, 6},
		{"group", 98629247, 47, 3},
		{"console-consumer-12345", 158455506, 6, 6},
		{"test-group", 627841412, 12, 2},
		{"my-consumer-group", 1513705513, 13, 5},
		{"é", 233, 33, 2},
		{"日本語", 25921943, 43, 5},
		{"😀", 1772899, 49, 2},
		{"g😀-群", 1798912673, 23, 5},
		{"orders", -1008770331, 31, 2},
		{"😀😀😀", -1662520855, 5, 2},
		{"日本語グループ", -305235731, 31, 3},
		{"consumer-7", -166239200, 0, 1},
		{"polygenelubricants", -2147483648, 0, 0},
		{"connect-cluster", 1440343063, 13, 5},
	} {
		if got := javaHash(c.id); got != c.hash {
			t.Errorf("%q: hash %d, want %d", c.id, got, c.hash)
		}
		if a, b := PartitionFor(c.id, 50), PartitionFor(c.id, 7); a != c.of50 || b != c.of7 {
			t.Errorf("%q: %d of 50 and %d of 7, want %d and %d", c.id, a, b, c.of50, c.of7)
		}
	}
}

func TestLoadsWhatWasWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		gs := w.elect(w.groups)
		for i := range 30 { // over several segments
			w.commitAt(gs, "g", commitAt("a", int64(i)), commitAt("b", int64(2*i)))
			w.commitAt(gs, fmt.Sprintf("other-%02d", i%10), commitAt("c", int64(i)))
		}
		if errs, err := gs.DeleteOffsets("g", []committed.Partition{{Topic: "b"}}); err != nil || errs[0] != nil {
			t.Fatal(errs, err)
		}
		if err := gs.Delete("other-03"); err != nil {
			t.Fatal(err)
		}
		r := gs.Join(t.Context(), "members", join(""))
		if r.Err != nil {
			t.Fatal(r.Err)
		}
		if s := gs.Sync(t.Context(), "members", group.SyncRequest{MemberID: r.MemberID, Generation: r.Generation, ProtocolType: "consumer", Protocol: "range",
			Assignments: map[string][]byte{r.MemberID: []byte("part")}}); s.Err != nil || string(s.Assignment) != "part" {
			t.Fatalf("%+v", s)
		}
		if len(w.part.Log().Sealed()) == 0 {
			t.Fatal("one segment only")
		}
		again := w.again()
		if got := w.offsets(again, "g"); got != "a:29" || got != w.offsets(gs, "g") {
			t.Error(got)
		}
		if got := w.offsets(again, "other-07"); got != "c:27" {
			t.Error(got)
		}
		if got := w.offsets(again, "other-03"); got != "" {
			t.Errorf("a deleted group has %s", got)
		}
		was, err := gs.Describe("members")
		if err != nil {
			t.Fatal(err)
		}
		is, err := again.Describe("members")
		if err != nil || is.State != group.Stable || !reflect.DeepEqual(is.Members, was.Members) || len(is.Members) != 1 {
			t.Errorf("%+v %v, was %+v", is, err, was)
		}
		// The member goes on where it was.
		if err := again.Heartbeat("members", r.MemberID, "", r.Generation); err != nil {
			t.Error(err)
		}
		listed, err := again.List()
		if err != nil || len(listed) != 11 || listed[0].ID != "g" || listed[1].ID != "members" || listed[10].ID != "other-09" {
			t.Errorf("%v %v", listed, err)
		}
	})
}

// A record that does not parse costs itself, and one line for all of them.
func TestCorruptRecordsAreSkipped(t *testing.T) {
	w := newWorld(t)
	gs := w.elect(w.groups)
	w.commitAt(gs, "g", commitAt("a", 1))
	w.append(recordbatch.Record{Key: nil, Value: []byte("x")}, recordbatch.Record{Key: []byte{0}, Value: []byte("x")},
		recordbatch.Record{Key: []byte{0, 1, 0, 99}, Value: []byte("x")}, recordbatch.Record{Key: []byte{0, 2, 0, 1, 'h'}, Value: []byte{9, 9}},
		recordbatch.Record{Key: []byte{0, 77, 1, 2}, Value: []byte("of a later version")})
	w.commitAt(gs, "g", commitAt("b", 2))
	again := w.again()
	if got := w.offsets(again, "g"); got != "a:1 b:2" {
		t.Error(got)
	}
	if n := strings.Count(w.lines.String(), "level=WARN"); n != 1 || !strings.Contains(w.lines.String(), "count=4") || !strings.Contains(w.lines.String(), "offset 1:") {
		t.Errorf("%d lines: %s", n, w.lines)
	}
	w.commitAt(again, "h", commitAt("c", 3))
}

func TestRefusals(t *testing.T) {
	w := newWorld(t)
	gs := w.groups
	if _, err := gs.FetchOffsets("g", anybody, nil, true); !errors.Is(err, ErrNotCoordinator) {
		t.Errorf("before the election: %v", err)
	}
	if _, err := gs.FetchOffsets("", anybody, nil, true); !errors.Is(err, group.ErrInvalidGroupID) {
		t.Errorf("%v", err)
	}
	w.elect(gs)
	for name, err := range map[string]error{
		"heartbeat": gs.Heartbeat("g", "m", "", 1),
		"join":      gs.Join(t.Context(), "g", join("m")).Err,
		"sync":      gs.Sync(t.Context(), "g", group.SyncRequest{MemberID: "m"}).Err,
	} {
		if !errors.Is(err, group.ErrUnknownMember) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := gs.Commit("g", Committer{group.Committer{MemberID: "m", Generation: 3}, 8}, []Commit{commitAt("a", 1)}); !errors.Is(err, group.ErrIllegalGeneration) {
		t.Errorf("%v", err)
	}
	if _, err := gs.Commit("g", Committer{group.Committer{MemberID: "m", Generation: 3}, 9}, []Commit{commitAt("a", 1)}); !errors.Is(err, group.ErrNotFound) {
		t.Errorf("%v", err)
	}
	if err := gs.Delete("g"); !errors.Is(err, group.ErrNotFound) {
		t.Errorf("%v", err)
	}
	long := commitAt("b", 2)
	long.Metadata = strings.Repeat("x", 101)
	if errs, err := gs.Commit("g", Committer{nobody, 8}, []Commit{commitAt("a", 1), long}); err != nil || errs[0] != nil || errs[1] == nil {
		t.Errorf("%v %v", errs, err)
	}
	if got := w.offsets(gs, "g"); got != "a:1" {
		t.Error(got)
	}
	// In the log there is what was said, and no more.
	if got := w.offsets(w.again(), "g"); got != "a:1" {
		t.Error(got)
	}
	gs.Resign(0)
	if err := gs.Heartbeat("g", "m", "", 1); !errors.Is(err, ErrNotCoordinator) {
		t.Errorf("after resigning: %v", err)
	}
}

// While the partition is read, requests are told to come again, and a list would not be whole.
func TestLoading(t *testing.T) {
	w := newWorld(t)
	w.commitAt(w.elect(w.groups), "g", commitAt("a", 1))
	gs := w.host()
	s := &shard{seat: newSeat(context.Background(), w.part), owner: gs, groups: map[string]*hosted{}, joins: map[group.Token]chan group.JoinResult{}, syncs: map[group.Token]chan group.SyncResult{}}
	gs.hosts.seats[0] = s
	if _, err := gs.FetchOffsets("g", anybody, nil, true); !errors.Is(err, ErrLoading) {
		t.Errorf("%v", err)
	}
	if _, err := gs.List(); !errors.Is(err, ErrLoading) {
		t.Errorf("%v", err)
	}
	if err := gs.Expire(func(string) bool { return true }); err != nil {
		t.Errorf("%v", err)
	}
	s.load()
	if got := w.offsets(gs, "g"); got != "a:1" {
		t.Error(got)
	}
	// One that resigned while it was loading stays resigned.
	late := &shard{seat: newSeat(context.Background(), w.part), owner: gs, groups: map[string]*hosted{}}
	late.close()
	late.load()
	if err := late.lock(); !errors.Is(err, ErrNotCoordinator) || len(late.groups) != 0 {
		t.Errorf("%v, %d groups", err, len(late.groups))
	}
}

func TestUnreadablePartitionIsUnavailable(t *testing.T) {
	w := newWorld(t)
	w.commitAt(w.elect(w.groups), "g", commitAt("a", 1))
	w.fs.Inject(vfs.Fault{Op: vfs.OpRead, Err: errors.New("bad sector"), Sticky: true})
	gs := w.again()
	if _, err := gs.FetchOffsets("g", anybody, nil, true); !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "bad sector") {
		t.Errorf("%v", err)
	}
	// Nothing was taken for empty: after the repair all is there.
	w.fs.Heal()
	if got := w.offsets(w.elect(gs), "g"); got != "a:1" {
		t.Error(got)
	}
}

// A broker that loses sight of the controller while it loads goes on where it was if it remains the leader, and answers nothing meanwhile: what it
// knows may be outdated.
func TestControllerOutOfSight(t *testing.T) {
	w := newWorld(t)
	w.commitAt(w.elect(w.groups), "g", commitAt("a", 1))
	w.part.Suspend(true)
	gs, done := w.host(), make(chan struct{})
	gs.Elect(w.part, func() { close(done) })
	if _, err := gs.FetchOffsets("g", anybody, nil, true); !errors.Is(err, ErrLoading) {
		t.Errorf("%v", err)
	}
	if _, err := w.groups.FetchOffsets("g", anybody, nil, true); !errors.Is(err, ErrNotCoordinator) {
		t.Errorf("%v", err)
	}
	w.part.Suspend(false)
	<-done
	for _, gs := range []*Groups{gs, w.groups} {
		if got := w.offsets(gs, "g"); got != "a:1" {
			t.Error(got)
		}
	}
}

// What a new leader has read may be lost again until it is committed, and is not told before.
func TestServesWhatIsCommitted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		role := partition.Role{Leader: 1, LeaderEpoch: 1, Replicas: []int32{1, 2}, ISR: []int32{1, 2}}
		w.part.Assume(role, time.Now())
		o := committed.New("g").Commit(committed.Partition{Topic: "a"}, committed.Offset{Offset: 1, LeaderEpoch: -1, ExpiresAt: -1}).Record()
		w.append(recordbatch.Record{Key: o.Key, Value: o.Value})
		gs, done := w.host(), make(chan struct{})
		gs.Elect(w.part, func() { close(done) })
		synctest.Wait()
		if _, err := gs.FetchOffsets("g", anybody, nil, true); !errors.Is(err, ErrLoading) {
			t.Errorf("%v", err)
		}
		role.ISR, role.PartitionEpoch = []int32{1}, 1
		w.part.Assume(role, time.Now())
		<-done
		if got := w.offsets(gs, "g"); got != "a:1" {
			t.Error(got)
		}
	})
}

// A failed write is not acknowledged and not visible.
func TestFailedWrites(t *testing.T) {
	w := newWorld(t)
	gs := w.elect(w.groups)
	w.commitAt(gs, "g", commitAt("a", 1))
	w.part.Assume(partition.Role{Leader: 2, LeaderEpoch: 5, Replicas: []int32{2}, ISR: []int32{2}}, time.Now())
	if _, err := gs.Commit("g", Committer{nobody, 8}, []Commit{commitAt("a", 2)}); !errors.Is(err, ErrNotCoordinator) {
		t.Errorf("deposed: %v", err)
	}
	if err := gs.Delete("g"); !errors.Is(err, ErrNotCoordinator) {
		t.Errorf("deposed: %v", err)
	}
	w.part.Assume(partition.Role{Leader: 1, LeaderEpoch: 6, Replicas: []int32{1}, ISR: []int32{1}}, time.Now())
	if _, err := gs.Commit("g", Committer{nobody, 8}, []Commit{commitAt("a", 2)}); !errors.Is(err, ErrNotCoordinator) {
		t.Errorf("with what was read in an earlier epoch: %v", err)
	}
	w.elect(gs)
	w.fs.Inject(vfs.Fault{Op: vfs.OpWrite, Err: errors.New("broken"), Sticky: true})
	if _, err := gs.Commit("g", Committer{nobody, 8}, []Commit{commitAt("a", 3)}); !errors.Is(err, ErrUnavailable) {
		t.Errorf("broken: %v", err)
	}
	if r := gs.Join(t.Context(), "h", join("")); r.Err == nil {
		// A member may join in memory; its generation needs no write.
		if s := gs.Sync(t.Context(), "h", group.SyncRequest{MemberID: r.MemberID, Generation: r.Generation}); s.Err == nil {
			t.Error("an assignment that is not on disk was handed out")
		}
	}
	if got := w.offsets(gs, "g"); got != "a:1" {
		t.Error(got)
	}
}

// The records of a large group exceed max.message.bytes together, and are written all the same.
func TestLargeGroup(t *testing.T) {
	w := newWorld(t)
	c := w.part.Log().Config()
	c.SegmentBytes = 1 << 30
	w.part.Log().SetConfig(c)
	gs := w.elect(w.groups)
	commits := make([]Commit, 10_000)
	for i := range commits {
		commits[i] = commitAt(fmt.Sprintf("%0200d", i), int64(i))
	}
	w.commitAt(gs, "g", commits...)
	read := w.again()
	want := w.offsets(gs, "g")
	if n := strings.Count(want, ":"); n != len(commits) {
		t.Fatalf("%d offsets", n)
	}
	if w.offsets(read, "g") != want {
		t.Error("other offsets were loaded")
	}
	if err := gs.Delete("g"); err != nil {
		t.Fatal(err)
	}
	if got := w.offsets(w.again(), "g"); got != "" {
		t.Errorf("offsets outlive their group: %.100s", got)
	}
}

// Close answers whoever waits, and ends all clocks.
func TestCloseAnswersParkedRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.config.Group.InitialDelayMs = 3_600_000
		gs := w.elect(w.groups)
		joined, synced := make(chan group.JoinResult), make(chan group.SyncResult)
		go func() { joined <- gs.Join(t.Context(), "g", join("")) }()
		synctest.Wait()
		// A follower of another group waits for its leader's assignment.
		w.config.Group.InitialDelayMs = 0
		first := make(chan group.JoinResult, 2)
		go func() { first <- gs.Join(t.Context(), "h", join("")) }()
		leader := <-first
		second := join("")
		second.NewID = "second"
		go func() { first <- gs.Join(t.Context(), "h", second) }()
		synctest.Wait()
		back := join(leader.MemberID)
		go func() { first <- gs.Join(t.Context(), "h", back) }()
		a, b := <-first, <-first
		follower := a
		if len(a.Members) > 0 {
			follower = b
		}
		if a.Err != nil || b.Err != nil || follower.MemberID == follower.Leader {
			t.Fatalf("%+v %+v", a, b)
		}
		go func() {
			synced <- gs.Sync(t.Context(), "h", group.SyncRequest{MemberID: follower.MemberID, Generation: follower.Generation})
		}()
		synctest.Wait()
		select {
		case r := <-joined:
			t.Fatalf("did not wait: %+v", r)
		case r := <-synced:
			t.Fatalf("did not wait: %+v", r)
		default:
		}
		start := time.Now()
		gs.Close()
		if r := <-joined; !errors.Is(r.Err, ErrNotCoordinator) || r.Generation != -1 {
			t.Errorf("%+v", r)
		}
		if r := <-synced; !errors.Is(r.Err, ErrNotCoordinator) {
			t.Errorf("%+v", r)
		}
		if time.Since(start) != 0 {
			t.Errorf("after %s", time.Since(start))
		}
		if r := gs.Join(t.Context(), "g", join("")); !errors.Is(r.Err, ErrNotCoordinator) {
			t.Errorf("after close: %+v", r)
		}
	})
}

func TestWaitEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.config.Group.InitialDelayMs = 3_600_000
		gs := w.elect(w.groups)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if r := gs.Join(ctx, "g", join("")); !errors.Is(r.Err, ErrUnavailable) || r.Generation != -1 {
			t.Errorf("%+v", r)
		}
	})
}

// A member that falls silent is put out by the clock alone.
func TestSessionsEndByTheClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		gs := w.elect(w.groups)
		r := gs.Join(t.Context(), "g", join(""))
		if s := gs.Sync(t.Context(), "g", group.SyncRequest{MemberID: r.MemberID, Generation: r.Generation}); r.Err != nil || s.Err != nil {
			t.Fatal(r.Err, s.Err)
		}
		time.Sleep(9 * time.Second)
		if err := gs.Heartbeat("g", r.MemberID, "", r.Generation); err != nil {
			t.Fatal(err)
		}
		time.Sleep(9 * time.Second)
		if d, err := gs.Describe("g"); err != nil || d.State != group.Stable {
			t.Fatalf("%+v %v", d, err)
		}
		time.Sleep(2 * time.Second)
		if d, err := gs.Describe("g"); err != nil || d.State != group.Empty || len(d.Members) != 0 {
			t.Errorf("%+v %v", d, err)
		}
		if err := gs.Heartbeat("g", r.MemberID, "", r.Generation); !errors.Is(err, group.ErrUnknownMember) {
			t.Errorf("%v", err)
		}
		// It is so after a restart as well.
		if d, err := w.again().Describe("g"); err != nil || d.State != group.Empty {
			t.Errorf("%+v %v", d, err)
		}
	})
}

func TestExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		gs := w.elect(w.groups)
		never := func(string) bool { return false }
		w.commitAt(gs, "old", commitAt("a", 1))
		time.Sleep(600 * time.Second)
		w.commitAt(gs, "mixed", commitAt("a", 1), commitAt("gone", 2))
		if err := gs.Expire(never); err != nil || w.offsets(gs, "old") != "a:1" {
			t.Errorf("too early: %v", err)
		}
		time.Sleep(500 * time.Second)
		if err := gs.Expire(func(topic string) bool { return topic == "gone" }); err != nil {
			t.Fatal(err)
		}
		for _, gs := range []*Groups{gs, w.again()} {
			if got := w.offsets(gs, "mixed"); got != "a:1" {
				t.Errorf("mixed has %q", got)
			}
			if l, err := gs.List(); err != nil || len(l) != 1 || l[0].ID != "mixed" {
				t.Errorf("%v %v", l, err)
			}
		}
		// What has expired is not written down again and again.
		end := w.part.HighWatermark()
		if err := gs.Expire(never); err != nil || w.part.HighWatermark() != end {
			t.Errorf("%d records for nothing (%v)", w.part.HighWatermark()-end, err)
		}
	})
}

// TestRequestsWaitForAnExpectedPartition: who is named as the coordinator a moment before it is ready answers when it is.
func TestRequestsWaitForAnExpectedPartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		expected := true
		w.config.Expects = func(int32) bool { return expected }
		gs := w.host()
		ask := func() (time.Duration, error) {
			start := time.Now()
			err := gs.Heartbeat("g", "nobody", "", 1)
			return time.Since(start), err
		}
		if took, err := ask(); !errors.Is(err, ErrNotCoordinator) || took != patience {
			t.Errorf("never elected: %v after %v", err, took)
		}
		expected = false
		if took, err := ask(); !errors.Is(err, ErrNotCoordinator) || took != 0 {
			t.Errorf("not expected: %v after %v", err, took)
		}
		expected = true
		time.AfterFunc(patience/2, func() { w.elect(gs) })
		if took, err := ask(); !errors.Is(err, group.ErrUnknownMember) || took != patience/2 {
			t.Errorf("elected meanwhile: %v after %v", err, took)
		}
		gs = w.host()
		time.AfterFunc(patience/2, gs.Close)
		if took, err := ask(); !errors.Is(err, ErrNotCoordinator) || took != patience/2 {
			t.Errorf("closed meanwhile: %v after %v", err, took)
		}
	})
}

// TestOffsetsOfTransactions: they count when the transaction is committed, for whoever asks and whoever reads the partition anew; a plain
// commit that came in between is the newer one.
func TestOffsetsOfTransactions(t *testing.T) {
	w := newWorld(t)
	gs := w.elect(w.groups)
	commitIn := func(gs *Groups, producer int64, epoch int16, c Commit) error {
		errs, err := gs.CommitInTxn("g", nobody, InTxn{ProducerID: producer, Epoch: epoch, ConfirmedAt: w.part.Log().Offsets().End}, []Commit{c})
		if err != nil {
			return err
		}
		return errs[0]
	}
	end := func(gs *Groups, producer int64, epoch int16, commit bool) {
		t.Helper()
		e := Ending{Decision: txn.Decision{Commit: commit, ProducerID: producer, Epoch: epoch, V2: true}, CoordinatorEpoch: 1}
		if err := gs.WriteMarkers(t.Context(), e, []*partition.Partition{w.part})[0]; err != nil {
			t.Fatal(err)
		}
	}
	unstable := func(gs *Groups) bool {
		t.Helper()
		f, err := gs.FetchOffsets("g", anybody, []committed.Partition{commitAt("a", 0).Partition}, false)
		if err != nil {
			t.Fatal(err)
		}
		return f[0].Unstable
	}
	w.commitAt(gs, "g", commitAt("a", 1))
	if err := commitIn(gs, 7, 0, commitAt("a", 5)); err != nil {
		t.Fatal(err)
	}
	for _, gs := range []*Groups{gs, w.again()} {
		if got := w.offsets(gs, "g"); got != "a:1" || !unstable(gs) {
			t.Errorf("open: %s, unstable %v", got, unstable(gs))
		}
	}
	end(gs, 7, 1, true)
	for _, gs := range []*Groups{gs, w.again()} {
		if got := w.offsets(gs, "g"); got != "a:5" || unstable(gs) {
			t.Errorf("committed: %s, unstable %v", got, unstable(gs))
		}
	}
	if err := commitIn(gs, 7, 1, commitAt("a", 9)); err != nil {
		t.Fatal(err)
	}
	end(gs, 7, 2, false)
	for _, gs := range []*Groups{gs, w.again()} {
		if got := w.offsets(gs, "g"); got != "a:5" || unstable(gs) {
			t.Errorf("aborted: %s, unstable %v", got, unstable(gs))
		}
	}
	// The transaction's own end comes late: what was committed after its commit stays.
	if err := commitIn(gs, 7, 2, commitAt("a", 20)); err != nil {
		t.Fatal(err)
	}
	w.commitAt(gs, "g", commitAt("a", 30))
	end(gs, 7, 3, true)
	for _, gs := range []*Groups{gs, w.again()} {
		if got := w.offsets(gs, "g"); got != "a:30" {
			t.Errorf("committed behind a plain commit: %s", got)
		}
	}
	// The producer's last transaction is over, and it has not learnt of its new epoch.
	if err := commitIn(gs, 7, 2, commitAt("a", 40)); !errors.Is(err, producerstate.ErrInvalidProducerEpoch) {
		t.Errorf("in an outdated epoch: %v", err)
	}
	// A marker that was written again changes nothing, and is refused so that it cannot end a later transaction.
	e := Ending{Decision: txn.Decision{Commit: true, ProducerID: 7, Epoch: 3, V2: true}, CoordinatorEpoch: 1}
	if err := gs.WriteMarkers(t.Context(), e, []*partition.Partition{w.part})[0]; !errors.Is(err, producerstate.ErrInvalidProducerEpoch) {
		t.Errorf("the same marker again: %v", err)
	}
}

// TestMarkerWhileLoading: a transaction that ends while the partition is being read ends for its groups, too.
func TestMarkerWhileLoading(t *testing.T) {
	w := newWorld(t)
	gs := w.elect(w.groups)
	if _, err := gs.CommitInTxn("g", nobody, InTxn{ProducerID: 7, Checked: true}, []Commit{commitAt("a", 5)}); err != nil {
		t.Fatal(err)
	}
	late := w.host()
	s := &shard{seat: newSeat(context.Background(), w.part), owner: late, groups: map[string]*hosted{}}
	late.hosts.seats[0] = s
	late.EndTxn(0, 7, true)
	s.load()
	if got := w.offsets(late, "g"); got != "a:5" {
		t.Error(got)
	}
}
