package coordinator

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tp"
	"github.com/varve-io/varve/internal/txn"
	"github.com/varve-io/varve/internal/vfs"
)

// bank is __transaction_state with one partition, and somebody who takes markers.
type bank struct {
	t      *testing.T
	part   *partition.Partition
	config TransactionConfig
	lines  *bytes.Buffer
	nextID int64

	mu      sync.Mutex
	refuse  int // so many tries, to payments
	markers []string
}

func newBank(t *testing.T, isr ...int32) *bank {
	b := &bank{t: t, lines: &bytes.Buffer{}, nextID: 100, config: TransactionConfig{Partitions: 1, CommitTimeout: time.Second, TimeoutMaxMs: 900_000, ExpirationMs: 1_000_000, V2: true}}
	fs := vfs.NewMem()
	if err := fs.MkdirAll("/d"); err != nil {
		t.Fatal(err)
	}
	id := tp.Partition{Topic: TransactionTopic}
	c := log.DefaultConfig()
	c.RetentionMs, c.Compact = -1, true
	l, err := log.Open(log.Options{FS: fs, Dir: "/d/" + id.String(), Partition: id, Config: c, Now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	b.part = partition.New(id, tp.UUID{1}, 1, l, 0, partition.Hooks{})
	b.lead(3, append([]int32{1}, isr...)...)
	t.Cleanup(func() { b.part.Close() })
	return b
}

func (b *bank) lead(epoch int32, isr ...int32) {
	b.part.Assume(partition.Role{Leader: 1, LeaderEpoch: epoch, Replicas: isr, ISR: isr}, time.Now())
}

// host is a broker's coordinator that has read the partition.
func (b *bank) host() *Transactions {
	b.t.Helper()
	ts, done := b.elect()
	<-done
	return ts
}

// elect is a broker's coordinator that reads the partition.
func (b *bank) elect() (*Transactions, chan struct{}) {
	b.t.Helper()
	allocate := func(context.Context) (int64, error) { b.nextID++; return b.nextID, nil }
	ts := NewTransactions(func() TransactionConfig { return b.config }, allocate, b.mark, slog.New(slog.NewTextHandler(b.lines, nil)))
	done := make(chan struct{})
	ts.Elect(b.part, func() { close(done) })
	b.t.Cleanup(ts.Close)
	return ts, done
}

// follow lets the other replica have all that there is.
func (b *bank) follow(epoch int32) {
	b.t.Helper()
	if err := b.part.Followed(partition.FollowerFetch{Follower: 2, BrokerEpoch: -1, LeaderEpoch: epoch, Offset: b.part.Log().Offsets().End, Now: time.Now()}); err != nil {
		b.t.Fatal(err)
	}
	synctest.Wait()
}

func (b *bank) mark(_ context.Context, e Ending, partitions []tp.Partition) (left []tp.Partition) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.refuse > 0 {
		b.refuse--
		partitions = slices.Clone(partitions)
		if i := slices.Index(partitions, payments); i >= 0 {
			left, partitions = []tp.Partition{payments}, slices.Delete(partitions, i, i+1)
		}
	}
	for _, p := range partitions {
		b.markers = append(b.markers, fmt.Sprintf("%s commit=%v id=%d epoch=%d by=%d", p, e.Commit, e.ProducerID, e.Epoch, e.CoordinatorEpoch))
	}
	return left
}

func (b *bank) marked() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.markers)
}

func (b *bank) state(ts *Transactions, id, want string) {
	b.t.Helper()
	d, err := ts.Describe(id)
	if err != nil || d.State != want {
		b.t.Fatalf("%s is %+v, %v; want %s", id, d, err, want)
	}
}

var (
	payments = tp.Partition{Topic: "payments", Index: 0}
	orders   = tp.Partition{Topic: "orders", Index: 2}
)

// begin makes a producer with a transaction on two partitions.
func (b *bank) begin(ts *Transactions, id string) (int64, int16) {
	b.t.Helper()
	producer, epoch, err := ts.Init(b.t.Context(), id, 60_000, -1, -1)
	if err == nil {
		err = ts.Add(id, producer, epoch, []tp.Partition{payments, orders}, true)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return producer, epoch
}

func TestTransactionEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBank(t)
		b.refuse = 3
		ts := b.host()
		id, epoch := b.begin(ts, "app")
		if errs, err := ts.Verify("app", id, epoch, []tp.Partition{orders, {Topic: "other"}}); err != nil || errs[0] != nil || !errors.Is(errs[1], txn.ErrAbortable) {
			t.Errorf("%v, %v", errs, err)
		}
		nextID, nextEpoch, err := ts.End(t.Context(), "app", id, epoch, true, true)
		if err != nil || nextID != id || nextEpoch != epoch+1 {
			t.Fatalf("%d, %d, %v", nextID, nextEpoch, err)
		}
		if err := ts.Add("app", nextID, nextEpoch, []tp.Partition{orders}, true); !errors.Is(err, txn.ErrConcurrent) {
			t.Errorf("before the markers: %v", err)
		}
		time.Sleep(time.Minute)
		want := []string{fmt.Sprintf("orders-2 commit=true id=%d epoch=1 by=3", id), fmt.Sprintf("payments-0 commit=true id=%d epoch=1 by=3", id)}
		if got := b.marked(); !slices.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
		b.state(ts, "app", "CompleteCommit")
		if list, err := ts.List(); err != nil || len(list) != 1 {
			t.Errorf("%v, %v", list, err)
		}
		b.state(b.host(), "app", "CompleteCommit") // what another broker reads
		if _, err := ts.Describe("nobody"); !errors.Is(err, txn.ErrNotFound) {
			t.Errorf("%v", err)
		}
	})
}

// TestCoordinatorDiesBeforeTheMarkers: the decision stands, and whoever takes over writes the markers, in its own epoch.
func TestCoordinatorDiesBeforeTheMarkers(t *testing.T) {
	for _, commit := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			b := newBank(t)
			b.refuse = 1 << 30
			ts := b.host()
			id, epoch := b.begin(ts, "app")
			if _, _, err := ts.End(t.Context(), "app", id, epoch, commit, true); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Minute)
			ts.Close()
			if _, err := ts.Describe("app"); !errors.Is(err, ErrNotCoordinator) {
				t.Errorf("closed: %v", err)
			}
			first := len(b.marked())
			b.mu.Lock()
			b.refuse = 0
			b.mu.Unlock()
			b.lead(7, 1)
			ts = b.host()
			time.Sleep(time.Minute)
			got := b.marked()[first:]
			if len(got) != 2 || !strings.Contains(got[0], fmt.Sprintf("commit=%v", commit)) || !strings.HasSuffix(got[0], "by=7") {
				t.Errorf("%v", got)
			}
			b.state(ts, "app", map[bool]string{true: "CompleteCommit", false: "CompleteAbort"}[commit])
		})
	}
}

func TestTransactionOutlivesItsTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBank(t)
		ts := b.host()
		id, epoch := b.begin(ts, "app")
		time.Sleep(59 * time.Second)
		b.state(ts, "app", "Ongoing")
		time.Sleep(2 * time.Second)
		b.state(ts, "app", "CompleteAbort")
		if _, _, err := ts.End(t.Context(), "app", id, epoch, true, true); !errors.Is(err, txn.ErrProducerFenced) {
			t.Errorf("a commit that comes too late: %v", err)
		}
		if !strings.Contains(b.lines.String(), "outlived its timeout") {
			t.Error(b.lines.String())
		}
		// The clock goes on after a failover.
		b.begin(ts, "other")
		time.Sleep(30 * time.Second)
		ts.Close()
		ts = b.host()
		time.Sleep(31 * time.Second)
		b.state(ts, "other", "CompleteAbort")
	})
}

// TestStateThatIsNotCommitted: nobody knows whether it counts, until it does or another broker leads.
func TestStateThatIsNotCommitted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBank(t, 2)
		ts := b.host()
		if _, _, err := ts.Init(t.Context(), "app", 60_000, -1, -1); !errors.Is(err, ErrUnavailable) {
			t.Fatalf("without the other replica: %v", err)
		}
		if _, _, err := ts.Init(t.Context(), "app", 60_000, -1, -1); !errors.Is(err, txn.ErrConcurrent) {
			t.Errorf("in doubt: %v", err)
		}
		b.follow(3)
		b.state(ts, "app", "Empty")
		// A leader that is deposed meanwhile says so.
		b.part.Assume(partition.Role{Leader: 2, LeaderEpoch: 4, Replicas: []int32{1, 2}, ISR: []int32{1, 2}}, time.Now())
		if _, _, err := ts.Init(t.Context(), "app", 60_000, -1, -1); !errors.Is(err, ErrNotCoordinator) {
			t.Errorf("deposed: %v", err)
		}
		// And one that leads again does not go by what it knew before.
		b.lead(5, 1)
		if _, _, err := ts.Init(t.Context(), "app", 60_000, -1, -1); !errors.Is(err, ErrNotCoordinator) {
			t.Errorf("in another epoch: %v", err)
		}
	})
}

// TestDecisionThatIsReadBeforeItIsCommitted: the next leader may be one that does not have it, so that no marker follows from it yet.
func TestDecisionThatIsReadBeforeItIsCommitted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBank(t)
		ts := b.host()
		id, epoch := b.begin(ts, "app")
		b.part.Assume(partition.Role{Leader: 1, LeaderEpoch: 3, PartitionEpoch: 1, Replicas: []int32{1, 2}, ISR: []int32{1, 2}}, time.Now())
		if _, _, err := ts.End(t.Context(), "app", id, epoch, true, true); !errors.Is(err, ErrUnavailable) {
			t.Fatalf("without the other replica: %v", err)
		}
		ts.Close()
		b.part.Assume(partition.Role{Leader: 1, LeaderEpoch: 4, PartitionEpoch: 2, Replicas: []int32{1, 2}, ISR: []int32{1, 2}}, time.Now())
		ts, _ = b.elect()
		time.Sleep(10 * time.Minute)
		if _, err := ts.Describe("app"); !errors.Is(err, ErrLoading) || len(b.marked()) > 0 {
			t.Errorf("before it is committed: %v, markers %v", err, b.marked())
		}
		b.follow(4)
		time.Sleep(time.Second)
		b.follow(4)
		b.state(ts, "app", "CompleteCommit")
		if len(b.marked()) != 2 {
			t.Errorf("markers %v", b.marked())
		}
	})
}

// TestMomentWithoutTheController: a broker that does not reach the controller does not lead, and leads on once it does.
func TestMomentWithoutTheController(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBank(t, 2)
		ts := b.host()
		if _, _, err := ts.Init(t.Context(), "app", 60_000, -1, -1); !errors.Is(err, ErrUnavailable) {
			t.Fatalf("without the other replica: %v", err)
		}
		b.part.Suspend(true)
		time.Sleep(time.Minute)
		b.part.Suspend(false)
		b.follow(3)
		time.Sleep(time.Second)
		b.state(ts, "app", "Empty") // what was in doubt is known
		ts.Close()
		b.part.Suspend(true)
		ts, _ = b.elect()
		time.Sleep(time.Minute)
		if _, err := ts.Describe("app"); !errors.Is(err, ErrLoading) {
			t.Errorf("elected without it: %v", err)
		}
		b.part.Suspend(false)
		time.Sleep(time.Second)
		b.state(ts, "app", "Empty")
	})
}

// TestMarkerThatIsThereButNotCommitted: that it is refused as outdated says nothing before, since the next leader may lack it.
func TestMarkerThatIsThereButNotCommitted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBank(t, 2)
		gs := New(func() Config { return Config{CommitTimeout: time.Second} }, slog.New(slog.NewTextHandler(b.lines, nil)))
		r := recordbatch.NewBuilder()
		r.ProducerID, r.ProducerEpoch, r.BaseSequence, r.Transactional = 7, 0, 0, true
		r.Add(recordbatch.Record{Key: []byte("k")})
		raw, err := r.Build()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.part.Append(partition.Write{Records: raw, Now: time.Now()}); err != nil {
			t.Fatal(err)
		}
		mark := func() error {
			e := Ending{txn.Decision{Commit: true, ProducerID: 7, Epoch: 1, V2: true}, 3}
			return gs.WriteMarkers(t.Context(), e, []*partition.Partition{b.part})[0]
		}
		for range 2 {
			if err := mark(); err == nil || producerstate.Outdated(err) {
				t.Errorf("without the other replica: %v", err)
			}
		}
		b.follow(3)
		if err := mark(); !producerstate.Outdated(err) {
			t.Errorf("once it is committed: %v", err)
		}
	})
}

func TestIdleTransactionalIDs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBank(t)
		ts := b.host()
		id, epoch, err := ts.Init(t.Context(), "idle", 60_000, -1, -1)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(500 * time.Second)
		b.begin(ts, "busy")
		time.Sleep(501 * time.Second)
		if err := ts.Expire(); err != nil {
			t.Fatal(err)
		}
		for _, ts := range []*Transactions{ts, b.host()} {
			if _, err := ts.Describe("idle"); !errors.Is(err, txn.ErrNotFound) {
				t.Errorf("%v", err)
			}
			if _, err := ts.Describe("busy"); err != nil {
				t.Errorf("%v", err)
			}
		}
		if err := ts.Add("idle", id, epoch, []tp.Partition{orders}, true); !errors.Is(err, txn.ErrInvalidMapping) {
			t.Errorf("%v", err)
		}
		// A request that came to nothing leaves nothing behind.
		if _, _, err := ts.Init(t.Context(), "refused", 1_000_000, -1, -1); !errors.Is(err, txn.ErrInvalidTimeout) {
			t.Errorf("%v", err)
		}
		if list, _ := ts.List(); len(list) != 1 {
			t.Errorf("%+v", list)
		}
	})
}

// TestUnreadableTransactionRecords: what cannot be read is skipped and told, and is no reason to fail.
func TestUnreadableTransactionRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBank(t)
		ts := b.host()
		b.begin(ts, "app")
		ts.Close()
		r := recordbatch.NewBuilder()
		r.Add(recordbatch.Record{Key: []byte{0, 0, 0, 1, 'x'}, Value: []byte{0, 1, 99}})
		r.Add(recordbatch.Record{Key: []byte{9, 9}, Value: []byte("of another kind")})
		raw, err := r.Build()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.part.Append(partition.Write{Records: raw, Now: time.Now(), Internal: true}); err != nil {
			t.Fatal(err)
		}
		ts = b.host()
		b.state(ts, "app", "Ongoing")
		if !strings.Contains(b.lines.String(), "unreadable records of transactions were skipped") || !strings.Contains(b.lines.String(), "count=1") {
			t.Error(b.lines.String())
		}
	})
}
