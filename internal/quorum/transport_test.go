package quorum

import (
	"errors"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
)

// away is a network on which nobody can be reached before a time.
type away struct {
	network
	until time.Time
	mu    sync.Mutex
	sent  []string
}

var errAway = errors.New("refused")

func (a *away) try(what string) error {
	if time.Now().Before(a.until) {
		return errAway
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.sent = append(a.sent, what)
	return nil
}

func (a *away) AppendEntries(_ raft.ServerID, _ raft.ServerAddress, m *raft.AppendEntriesRequest, _ *raft.AppendEntriesResponse) error {
	if heartbeat(m) {
		return a.try("heartbeat")
	}
	return a.try("entries")
}

func (a *away) InstallSnapshot(_ raft.ServerID, _ raft.ServerAddress, _ *raft.InstallSnapshotRequest, _ *raft.InstallSnapshotResponse, data io.Reader) error {
	b, _ := io.ReadAll(data)
	return a.try(string(b))
}

func (a *away) Close() error { return nil }

// A node that returns is told at once, however long it was away: raft alone would wait for up to 10 s.
func TestReturningMemberIsToldAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &away{until: time.Now().Add(10 * time.Minute)}
		tr := newTransport(a, nil, nil)
		var term atomic.Uint64
		term.Store(7)
		tr.leads = func(id raft.ServerID, at raft.ServerAddress, in uint64) bool {
			return id == "2" && at == "x" && in == term.Load()
		}
		entries := &raft.AppendEntriesRequest{Term: 7, PrevLogEntry: 9}
		if err := tr.AppendEntries("2", "x", &raft.AppendEntriesRequest{Term: 7}, nil); !errors.Is(err, errAway) {
			t.Fatal("a heartbeat was held:", err)
		}
		for _, err := range []error{tr.AppendEntries("3", "x", entries, nil), tr.AppendEntries("2", "moved", entries, nil)} {
			if !errors.Is(err, errAway) {
				t.Fatal("held for one that is no member:", err)
			}
		}
		errs := make(chan error, 2)
		go func() { errs <- tr.AppendEntries("2", "x", entries, nil) }()
		go func() {
			errs <- tr.InstallSnapshot("2", "x", &raft.InstallSnapshotRequest{Term: 7}, nil, strings.NewReader("snapshot"))
		}()
		for range 2 {
			if err := <-errs; err != nil {
				t.Fatal(err)
			}
		}
		if late := time.Since(a.until); late > redial {
			t.Fatal("told after", late)
		}
		if got := strings.Join(a.sent, " "); !strings.Contains(got, "entries") || !strings.Contains(got, "heartbeat snapshot") && !strings.Contains(got, "heartbeat entries snapshot") {
			t.Fatal(got)
		}

		a.until = time.Now().Add(time.Hour)
		go func() { errs <- tr.AppendEntries("2", "x", entries, nil) }()
		time.Sleep(time.Minute)
		term.Store(8) // another leads
		if err := <-errs; !errors.Is(err, errAway) {
			t.Fatal(err)
		}
		term.Store(7)
		go func() { errs <- tr.AppendEntries("2", "x", entries, nil) }()
		time.Sleep(time.Minute)
		if err := tr.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-errs; !errors.Is(err, errAway) {
			t.Fatal(err)
		}
	})
}
