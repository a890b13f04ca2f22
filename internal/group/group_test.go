package group

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/grouprecord"
)

// fixture drives one group by hand: a clock, and answers by token.
type fixture struct {
	t     *testing.T
	g     *Group
	now   int64
	next  Token
	joins map[Token]JoinResult
	syncs map[Token]SyncResult
	fail  error // outcome of the next write of an assignment
	log   []grouprecord.Entry
}

var testConfig = Config{SessionMinMs: 1000, SessionMaxMs: 60_000, SizeMax: 10}

func newFixture(t *testing.T, c Config) *fixture {
	f := &fixture{t: t, now: 1_000_000, joins: map[Token]JoinResult{}, syncs: map[Token]SyncResult{}}
	f.g = New("g", c, f.now)
	return f
}

func (f *fixture) apply(e Effects) {
	f.log = append(f.log, e.Write...)
	for _, r := range e.Joins {
		if _, twice := f.joins[r.Token]; twice {
			f.t.Fatalf("JoinGroup %d is answered twice", r.Token)
		}
		f.joins[r.Token] = r.Result
	}
	for _, r := range e.Syncs {
		if _, twice := f.syncs[r.Token]; twice {
			f.t.Fatalf("SyncGroup %d is answered twice", r.Token)
		}
		f.syncs[r.Token] = r.Result
	}
	if e.Confirm {
		f.apply(f.g.Persisted(f.g.Generation(), f.fail, f.now))
	}
}

func (f *fixture) join(r JoinRequest) Token {
	f.next++
	if r.SessionMs == 0 {
		r.SessionMs, r.RebalanceMs = 10_000, 30_000
	}
	if r.ProtocolType == "" {
		r.ProtocolType = "consumer"
	}
	if r.Protocols == nil {
		r.Protocols = []Protocol{{"range", []byte("r")}, {"sticky", []byte("s")}}
	}
	if r.NewID == "" {
		r.NewID = fmt.Sprintf("m%d", f.next)
	}
	token := f.next
	f.apply(f.g.Join(r, token, f.now))
	return token
}

func (f *fixture) sync(member string, assignments map[string][]byte) Token {
	f.next++
	token := f.next
	f.apply(f.g.Sync(SyncRequest{MemberID: member, Generation: f.g.Generation(), Assignments: assignments}, token, f.now))
	return token
}

// advance lets time pass, with a tick at every deadline on the way.
func (f *fixture) advance(ms int64) {
	end := f.now + ms
	for {
		due := f.g.NextDeadline()
		if due == 0 || due > end {
			break
		}
		f.now = max(f.now, due)
		f.apply(f.g.Tick(f.now))
	}
	f.now = end
}

func (f *fixture) joined(token Token) JoinResult {
	f.t.Helper()
	r, ok := f.joins[token]
	if !ok {
		f.t.Fatalf("JoinGroup %d waits, the group is %s", token, f.g.State())
	}
	return r
}

func (f *fixture) waits(token Token) {
	f.t.Helper()
	if r, ok := f.joins[token]; ok {
		f.t.Fatalf("JoinGroup %d was answered with %+v", token, r)
	}
}

// stable makes a stable group of n members and returns their ids, the leader first.
func (f *fixture) stable(n int) []string {
	f.t.Helper()
	first := f.join(JoinRequest{})
	f.joined(first)
	tokens := []Token{first}
	for i := 1; i < n; i++ {
		tokens = append(tokens, f.join(JoinRequest{}))
	}
	leader := f.joins[first].MemberID
	if n > 1 {
		delete(f.joins, first)
		tokens[0] = f.join(JoinRequest{MemberID: leader})
	}
	var ids []string
	for _, token := range tokens {
		ids = append(ids, f.joined(token).MemberID)
	}
	assignments := map[string][]byte{}
	for _, id := range ids {
		assignments[id] = []byte("for " + id)
	}
	for _, id := range ids[1:] {
		f.sync(id, nil)
	}
	f.sync(ids[0], assignments)
	if f.g.State() != Stable {
		f.t.Fatalf("group is %s", f.g.State())
	}
	return ids
}

func TestTwoMembersBecomeStable(t *testing.T) {
	f := newFixture(t, testConfig)
	a := f.joined(f.join(JoinRequest{}))
	if a.Err != nil || a.Leader != a.MemberID || a.Protocol != "range" || len(a.Members) != 1 || a.Generation != 1 {
		t.Fatalf("%+v", a)
	}
	second := f.join(JoinRequest{Protocols: []Protocol{{"sticky", nil}}})
	f.waits(second)
	if err := f.g.Heartbeat(a.MemberID, "", 1, f.now); !errors.Is(err, ErrRebalanceInProgress) {
		t.Fatal(err)
	}
	again := f.joined(f.join(JoinRequest{MemberID: a.MemberID}))
	b := f.joined(second)
	if again.Generation != 2 || b.Generation != 2 || b.Protocol != "sticky" || len(again.Members) != 2 || len(b.Members) != 0 || b.Leader != a.MemberID {
		t.Fatalf("%+v\n%+v", again, b)
	}
	w := f.sync(b.MemberID, nil)
	if _, ok := f.syncs[w]; ok {
		t.Fatal("a follower was answered before the leader")
	}
	l := f.sync(a.MemberID, map[string][]byte{a.MemberID: []byte("A"), b.MemberID: []byte("B")})
	if string(f.syncs[w].Assignment) != "B" || string(f.syncs[l].Assignment) != "A" || f.g.State() != Stable {
		t.Fatalf("%+v %+v %s", f.syncs[w], f.syncs[l], f.g.State())
	}
	if err := f.g.Heartbeat(b.MemberID, "", 1, f.now); !errors.Is(err, ErrIllegalGeneration) {
		t.Fatal(err)
	}
}

func TestInitialDelayGathersMembers(t *testing.T) {
	c := testConfig
	c.InitialDelayMs = 3000
	f := newFixture(t, c)
	a := f.join(JoinRequest{})
	f.advance(2000)
	b := f.join(JoinRequest{})
	f.advance(1500) // the delay ended at 3000, but a newcomer extended it
	f.waits(a)
	f.advance(3000)
	if r := f.joined(a); len(r.Members) != 2 || f.joined(b).Generation != 1 {
		t.Fatalf("%+v", r)
	}
}

func TestSilentMemberIsDropped(t *testing.T) {
	f := newFixture(t, testConfig)
	ids := f.stable(2)
	for i := 0; i < 4; i++ {
		f.advance(5000)
		err := f.g.Heartbeat(ids[0], "", f.g.Generation(), f.now)
		if err != nil && !errors.Is(err, ErrRebalanceInProgress) {
			t.Fatal(err)
		}
	}
	r := f.joined(f.join(JoinRequest{MemberID: ids[0]}))
	if len(r.Members) != 1 || f.g.Describe().State != CompletingRebalance {
		t.Fatalf("%+v", r)
	}
}

func TestMemberThatDoesNotRejoinIsDroppedAtTheTimeout(t *testing.T) {
	f := newFixture(t, testConfig)
	ids := f.stable(2)
	c := f.join(JoinRequest{})
	again := f.join(JoinRequest{MemberID: ids[0]})
	for i := 0; i < 8; i++ { // the other one lives, but does not join
		f.advance(4000)
		_ = f.g.Heartbeat(ids[1], "", f.g.Generation(), f.now)
	}
	if r := f.joined(again); len(r.Members) != 2 {
		t.Fatalf("%+v", r)
	}
	f.joined(c)
	if err := f.g.Heartbeat(ids[1], "", f.g.Generation(), f.now); !errors.Is(err, ErrUnknownMember) {
		t.Fatal(err)
	}
}

func TestLeaderThatNeverSyncs(t *testing.T) {
	f := newFixture(t, testConfig)
	f.joined(f.join(JoinRequest{RebalanceMs: 5000, SessionMs: 60_000}))
	f.advance(6000)
	if f.g.State() != Empty {
		t.Fatal(f.g.State())
	}
}

func TestIDIsRequiredAndExpires(t *testing.T) {
	f := newFixture(t, testConfig)
	r := f.joined(f.join(JoinRequest{RequireID: true}))
	if !errors.Is(r.Err, ErrMemberIDRequired) || r.MemberID == "" {
		t.Fatalf("%+v", r)
	}
	// A handed out id never holds a rebalance.
	other := f.joined(f.join(JoinRequest{}))
	if other.Err != nil {
		t.Fatal(other.Err)
	}
	f.advance(11_000)
	late := f.joined(f.join(JoinRequest{MemberID: r.MemberID, RequireID: true}))
	if !errors.Is(late.Err, ErrUnknownMember) {
		t.Fatal(late.Err)
	}
}

func TestLeavingWhileJoining(t *testing.T) {
	f := newFixture(t, testConfig)
	f.stable(2)
	token := f.join(JoinRequest{NewID: "late"})
	f.waits(token)
	e, err := f.g.Leave("late", "", f.now)
	if err != nil {
		t.Fatal(err)
	}
	f.apply(e)
	if r := f.joined(token); !errors.Is(r.Err, ErrUnknownMember) {
		t.Fatal(r.Err)
	}
}

func TestStaticMemberComesBackUnnoticed(t *testing.T) {
	f := newFixture(t, testConfig)
	a := f.joined(f.join(JoinRequest{InstanceID: "i"}))
	f.sync(a.MemberID, map[string][]byte{a.MemberID: []byte("A")})
	back := f.joined(f.join(JoinRequest{InstanceID: "i", SupportsSkip: true}))
	if back.Err != nil || back.Generation != 1 || !back.SkipAssignment || back.MemberID == a.MemberID || f.g.State() != Stable {
		t.Fatalf("%+v %s", back, f.g.State())
	}
	if err := f.g.Heartbeat(a.MemberID, "i", 1, f.now); !errors.Is(err, ErrFencedInstance) {
		t.Fatal(err)
	}
	s := f.sync(back.MemberID, nil)
	if string(f.syncs[s].Assignment) != "A" {
		t.Fatalf("%+v", f.syncs[s])
	}
	// With another subscription everybody has to hear of it.
	changed := f.joined(f.join(JoinRequest{InstanceID: "i", Protocols: []Protocol{{"range", []byte("other")}}}))
	if changed.Generation != 2 {
		t.Fatalf("%+v", changed)
	}
}

func TestAssignmentThatCannotBeWritten(t *testing.T) {
	f := newFixture(t, testConfig)
	a := f.joined(f.join(JoinRequest{}))
	f.fail = ErrNotPersisted
	s := f.sync(a.MemberID, nil)
	if !errors.Is(f.syncs[s].Err, ErrNotPersisted) || f.g.State() == Stable {
		t.Fatalf("%+v %s", f.syncs[s], f.g.State())
	}
}

func TestRefusals(t *testing.T) {
	f := newFixture(t, testConfig)
	f.stable(1)
	for name, c := range map[string]struct {
		r    JoinRequest
		want error
	}{
		"session too short":  {JoinRequest{SessionMs: 1}, ErrInvalidSession},
		"session too long":   {JoinRequest{SessionMs: 1 << 40}, ErrInvalidSession},
		"other type":         {JoinRequest{ProtocolType: "connect"}, ErrInconsistentProtocol},
		"no common strategy": {JoinRequest{Protocols: []Protocol{{"other", nil}}}, ErrInconsistentProtocol},
		"unknown member":     {JoinRequest{MemberID: "nobody"}, ErrUnknownMember},
	} {
		if r := f.joined(f.join(c.r)); !errors.Is(r.Err, c.want) {
			t.Errorf("%s: %v", name, r.Err)
		}
	}
}

func TestWhoMayCommit(t *testing.T) {
	f := newFixture(t, testConfig)
	admin := Committer{Generation: -1}
	if err := f.g.MayCommit(admin, f.now); err != nil {
		t.Fatal(err)
	}
	if err := f.g.MayCommit(Committer{MemberID: "x", Generation: 3}, f.now); !errors.Is(err, ErrIllegalGeneration) {
		t.Fatal(err)
	}
	ids := f.stable(1)
	for name, c := range map[string]struct {
		by   Committer
		want error
	}{
		"admin while in use": {admin, ErrUnknownMember},
		"stale":              {Committer{MemberID: ids[0], Generation: f.g.Generation() - 1}, ErrIllegalGeneration},
		"stranger":           {Committer{MemberID: "x", Generation: 1}, ErrUnknownMember},
		"member":             {Committer{MemberID: ids[0], Generation: f.g.Generation()}, nil},
	} {
		if err := f.g.MayCommit(c.by, f.now); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// subscription is a ConsumerProtocolSubscription v0.
func subscription(topics ...string) []byte {
	m := kmsg.NewConsumerMemberMetadata()
	m.Topics = topics
	return m.AppendTo(nil)
}

// Offsets of a group in use stay, but for topics that its consumers do not read (KIP-211).
func TestRetention(t *testing.T) {
	f := newFixture(t, testConfig)
	if expire, since := f.g.Retention(); !expire || since != 0 || !f.g.Idle() {
		t.Fatal("offsets of a group that never had a member count from their commit:", expire, since)
	}
	a := f.joined(f.join(JoinRequest{Protocols: []Protocol{{"range", subscription("a")}}}))
	if expire, _ := f.g.Retention(); expire || f.g.Idle() {
		t.Fatal("offsets of a group that rebalances expire")
	}
	f.sync(a.MemberID, nil)
	if expire, since := f.g.Retention(); !expire || since != 0 || !f.g.Subscribed("a") || f.g.Subscribed("own") {
		t.Fatal("a subscribed topic's offset expires, or another stays")
	}
	f.advance(20_000)
	if expire, since := f.g.Retention(); !expire || since != f.g.since || since == 0 || f.g.Subscribed("a") {
		t.Fatal("offsets of a group that has lost its members count from then:", expire, since)
	}
}

func TestRecordsRestoreTheGroup(t *testing.T) {
	f := newFixture(t, testConfig)
	ids := f.stable(2)
	again := New("g", testConfig, f.now)
	for _, e := range f.log {
		r := e.Record()
		e, ok, err := grouprecord.Parse(r.Key, r.Value)
		if err != nil || !ok || e.Group != "g" {
			t.Fatal(e, ok, err)
		}
		again.Restore(e, f.now)
	}
	if again.State() != Stable || again.Generation() != f.g.Generation() || again.Heartbeat(ids[1], "", again.Generation(), f.now) != nil {
		t.Fatalf("%+v", again.Describe())
	}
	f.g = again
	f.advance(20_000)
	if again.State() == Stable {
		t.Fatal("members that were never heard of again stay for ever")
	}
}

// Members may come from elsewhere, with their assignments; whoever waits in a group that is to be another is sent away.
func TestAdoptAndDismiss(t *testing.T) {
	members := func(protocols ...string) (out []*Member) {
		for i, p := range protocols {
			out = append(out, &Member{ID: fmt.Sprint("m", i), SessionMs: 10_000, RebalanceMs: 10_000, Protocols: []Protocol{{Name: p}}, Assignment: []byte{byte(i)}})
		}
		return out
	}
	if g := Adopt("g", testConfig, "consumer", 7, members("a", "b"), 1); g != nil {
		t.Fatal("a group without a common protocol")
	}
	f := newFixture(t, testConfig)
	f.g = Adopt("g", testConfig, "consumer", 7, members("a", "a"), f.now)
	if err := f.g.Heartbeat("m1", "", 7, f.now); err != nil || f.g.State() != Stable || f.g.Protocol() != "a" || f.g.NextDeadline() != f.now+10_000 {
		t.Fatal(err, f.g.State(), f.g.Protocol(), f.g.NextDeadline())
	}
	if r := f.syncs[f.sync("m1", nil)]; r.Err != nil || !slices.Equal(r.Assignment, []byte{1}) {
		t.Fatal(r)
	}
	f.apply(f.g.Rebalance(f.now))
	token := f.join(JoinRequest{MemberID: "m0", Protocols: []Protocol{{Name: "a"}}})
	f.apply(f.g.Dismiss())
	if r := f.joins[token]; !errors.Is(r.Err, ErrRebalanceInProgress) {
		t.Fatal(r)
	}
}

// TestRandomHistories lets members do anything at any time: every parked request is answered once, and a group whose
// members are gone is empty in the end.
func TestRandomHistories(t *testing.T) {
	for seed := uint64(0); seed < 300; seed++ {
		r := rand.New(rand.NewPCG(seed, 1))
		c := testConfig
		c.InitialDelayMs = r.Int64N(2) * 3000
		f := newFixture(t, c)
		var tokens []Token
		var syncs []Token
		members := func() []string { return append(slices.Clone(f.g.order), "stranger") }
		for i := 0; i < 60; i++ {
			id := members()[r.IntN(len(f.g.order)+1)]
			switch r.IntN(8) {
			case 0:
				tokens = append(tokens, f.join(JoinRequest{RequireID: r.IntN(2) == 0}))
			case 1:
				tokens = append(tokens, f.join(JoinRequest{InstanceID: fmt.Sprint("i", r.IntN(2))}))
			case 2, 3:
				tokens = append(tokens, f.join(JoinRequest{MemberID: id}))
			case 4:
				f.fail = nil
				if r.IntN(5) == 0 {
					f.fail = ErrNotPersisted
				}
				syncs = append(syncs, f.sync(id, map[string][]byte{id: {1}}))
			case 5:
				if e, err := f.g.Leave(id, "", f.now); err == nil {
					f.apply(e)
				}
			case 6:
				_ = f.g.Heartbeat(id, "", f.g.Generation(), f.now)
			case 7:
				f.advance(r.Int64N(9000))
			}
			if f.g.State() == Stable && f.g.leader != "" && f.g.members[f.g.leader] == nil {
				t.Fatalf("seed %d: the leader is no member", seed)
			}
		}
		f.advance(200_000)
		if f.g.State() != Empty {
			t.Fatalf("seed %d: %s with %v after everybody has gone silent", seed, f.g.State(), f.g.order)
		}
		for _, token := range tokens {
			if _, ok := f.joins[token]; !ok {
				t.Fatalf("seed %d: JoinGroup %d was never answered", seed, token)
			}
		}
		for _, token := range syncs {
			if _, ok := f.syncs[token]; !ok {
				t.Fatalf("seed %d: SyncGroup %d was never answered", seed, token)
			}
		}
	}
}
