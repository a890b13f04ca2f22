package tiering

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/tier"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// long is time enough for anything to be tried again and cleared away.
const long = time.Hour

func TestUpload(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, 9)
		w.run(0, false, time.Second) // no interval has to pass
		w.allTiered()
		w.readable()
		w.clean()
		started, copied := 0, int64(0)
		for _, e := range w.events {
			if e.Started {
				started++
			}
			copied += e.Copied
			if e.Err != nil {
				t.Error(e.Err)
			}
		}
		if started != len(w.part.Remote()) || copied != w.part.Remote().Bytes() || started == 0 {
			t.Errorf("%d started, %d bytes copied", started, copied)
		}
	})
}

// Whatever step a process dies at, before or after its effect: nothing is unreadable then, and the next one finishes the work
// and leaves nothing behind.
func TestCrashesInUploads(t *testing.T) {
	everyStep(t, func(w *world) {}, func(w *world) { w.allTiered() })
}

func TestCrashesInDeletions(t *testing.T) {
	everyStep(t, func(w *world) {
		w.run(0, false, time.Second)
		w.allTiered()
		w.config.RetentionBytes = 2 * w.part.Remote()[0].Size
	}, func(w *world) {
		if o := w.part.Log().Offsets(); o.LogStart == 0 || len(w.part.Remote()) == 0 || w.part.Remote().Start() != o.LogStart {
			w.t.Fatalf("log is %+v, the tier %d to %d", o, w.part.Remote().Start(), w.part.Remote().End())
		}
	})
}

func TestCrashesInLeavingTheTier(t *testing.T) {
	everyStep(t, func(w *world) {
		w.run(0, false, time.Second)
		c := w.part.Log().Config()
		c.Tiered = false
		w.part.Log().SetConfig(c)
	}, func(w *world) {
		if o := w.part.Log().Offsets(); len(w.known()) != 0 || o.LogStart != o.LocalLogStart {
			w.t.Fatalf("%d segments are left, log is %+v", len(w.known()), o)
		}
	})
}

func TestCrashesInTopicDeletion(t *testing.T) {
	everyStep(t, func(w *world) {
		w.run(0, false, time.Second)
		w.must(w.apply(metadata.RemoveTopicRecord{Topic: topicID}))
		w.must(w.follow(nil))
		w.bytes = nil
	}, func(w *world) {
		if len(w.img().Deleting) != 0 || len(w.known()) != 0 {
			w.t.Fatalf("%d segments of %d topics are left", len(w.known()), len(w.img().Deleting))
		}
	})
}

func everyStep(t *testing.T, prepare, check func(*world)) {
	t.Helper()
	for _, after := range []bool{false, true} {
		for step := 1; ; step++ {
			if step > 200 {
				t.Fatal("does not end")
			}
			steps := 0
			bubble(t, func(t *testing.T) {
				w := newWorld(t, 9)
				prepare(w)
				steps = w.run(step, after, long)
				w.must(w.follow(nil)) // as the next process does at its start
				w.readable()
				w.run(0, false, long)
				check(w)
				w.readable()
				w.clean()
			})
			if t.Failed() {
				t.Fatalf("the process died at step %d, after it: %v", step, after)
			}
			if steps < step {
				if step < 5 {
					t.Fatalf("only %d steps", steps)
				}
				break // it lived to the end
			}
		}
	}
}

// An error that hides a success: the store has the object, or the metadata log the record, and the caller does not know.
func TestErrorsAfterTheEffect(t *testing.T) {
	for _, f := range []objstore.Fault{{Op: objstore.OpPut}, {Op: objstore.OpPut, Key: ".rsm-manifest"}, {Op: objstore.OpPut, Key: ".indexes", Skip: 1}, {Op: objstore.OpDelete, Key: ".log"}} {
		for _, after := range []bool{false, true} {
			bubble(t, func(t *testing.T) {
				w := newWorld(t, 9)
				w.config.RetentionBytes = 900
				f.Err, f.AfterEffect, f.Times = errors.New("connection reset"), after, 2
				w.store.Add(f)
				w.run(0, false, long)
				w.readable()
				w.clean()
			})
		}
	}
}

// The store goes away and comes back: uploads wait, say why, leave nothing behind, and go on.
func TestStoreAwayAndBack(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, 9)
		p, s := w.start(0, false)
		away := errors.New("no route to host")
		w.store.Add(objstore.Fault{Err: away}) // before the service runs, which could have uploaded all
		done := p.runs(s)
		time.Sleep(6 * time.Hour)
		synctest.Wait()
		l, ok := s.Lag(id)
		if !ok || !errors.Is(l.Err, away) || l.Segments == 0 || l.Bytes == 0 {
			t.Errorf("%+v", l)
		}
		if n := len(w.known()); n > 10 {
			t.Errorf("%d attempts are remembered", n)
		}
		w.readable()
		w.store.Clear()
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if l, _ := s.Lag(id); l.Err != nil || l.Segments != 0 || !l.Copying.IsZero() {
			t.Errorf("%+v", l)
		}
		p.cancel()
		w.must(<-done)
		w.allTiered()
		w.readable()
		w.clean()
	})
}

// Where the store lets nothing be deleted, uploads go on all the same.
func TestDeletionForbidden(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, 9)
		w.run(0, false, time.Second)
		w.store.Add(objstore.Fault{Op: objstore.OpDelete, Err: objstore.ErrAccess})
		w.config.RetentionBytes = 900
		w.run(0, false, long)
		for range 9 {
			w.add()
		}
		w.run(0, false, long)
		w.allTiered()
		w.readable()
		w.store.Clear()
		w.run(0, false, long)
		w.clean()
	})
}

// A topic that is deleted while one of its segments is being uploaded leaves no object.
func TestDeletionDuringAnUpload(t *testing.T) {
	for _, object := range []string{".log", ".indexes", ".rsm-manifest"} {
		bubble(t, func(t *testing.T) {
			w := newWorld(t, 9)
			release := make(chan struct{})
			w.store.Add(objstore.Fault{Op: objstore.OpPut, Key: object, Skip: 1, Times: 1, Block: release})
			p, s := w.start(0, false)
			done := p.runs(s)
			synctest.Wait()
			if w.store.Blocked(objstore.OpPut) != 1 {
				t.Fatal("no upload is under way")
			}
			w.must(w.apply(metadata.RemoveTopicRecord{Topic: topicID}))
			w.must(w.follow(nil))
			s.Stop(id)
			s.Sweep()
			time.Sleep(5*time.Minute + interval/2)
			close(release)
			time.Sleep(time.Second) // the upload's end is what the sweep waits for, not its next turn
			p.cancel()
			w.must(<-done)
			if n := len(w.known()); n != 0 {
				t.Errorf("%d segments are still known", n)
			}
			w.clean()
		})
	}
}

// An upload whose segment another broker has cleared away meanwhile, as the new leader or after the topic's end, leaves no object.
func TestUploadThatOutlivesItsSegment(t *testing.T) {
	for name, change := range map[string]func(w *world){
		"topic deleted": func(w *world) { w.must(w.apply(metadata.RemoveTopicRecord{Topic: topicID})) },
		"new leader": func(w *world) {
			w.must(w.apply(metadata.PartitionRecord{Topic: topicID, Replicas: []int32{1}, ISR: []int32{1}, Leader: 1, LeaderEpoch: 4, PartitionEpoch: 1}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, object := range []string{".log", ".indexes", ".rsm-manifest"} {
				bubble(t, func(t *testing.T) {
					w := newWorld(t, 9)
					release := make(chan struct{})
					w.store.Add(objstore.Fault{Op: objstore.OpPut, Key: object, Times: 1, Block: release})
					p, s := w.start(0, false)
					done := p.runs(s)
					synctest.Wait()
					if w.store.Blocked(objstore.OpPut) != 1 {
						t.Fatal("no upload is under way")
					}
					stale := w.known()[0].ID
					change(w)
					w.must(w.follow(nil))
					s.Stop(id)
					w.run(0, false, 10*time.Minute) // the other broker
					if slices.ContainsFunc(w.known(), func(s *tier.Segment) bool { return s.ID == stale }) {
						t.Fatal("the other broker left the segment alone")
					}
					close(release)
					time.Sleep(time.Second)
					p.cancel()
					w.must(<-done)
					w.clean()
				})
			}
		})
	}
}

// An upload of a deposed leader is refused and cleared away by its successor.
func TestFencedUpload(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, 9)
		release := w.blockUpload()
		p, s := w.start(0, false)
		done := p.runs(s)
		synctest.Wait()
		stale := w.known()[0]
		w.must(w.apply(metadata.PartitionRecord{Topic: topicID, Replicas: []int32{1}, ISR: []int32{1}, Leader: 1, LeaderEpoch: 4, PartitionEpoch: 1}))
		w.must(w.follow(nil))
		s.Lead(w.part)
		synctest.Wait()
		close(release)
		time.Sleep(long)
		p.cancel()
		w.must(<-done)
		for _, seg := range w.known() {
			if seg.ID == stale.ID || seg.LeaderEpoch != 4 || seg.State != tier.CopyFinished {
				t.Errorf("%+v", seg)
			}
		}
		for _, e := range w.events {
			if e.Copied > 0 && w.part.Remote().Bytes() == 0 {
				t.Error("a fenced upload counts as done")
			}
		}
		w.allTiered()
		w.readable()
		w.clean()
	})
}

// A new pass of a partition that was stopped and led again leaves alone what the old one is still writing.
func TestUploadOutlivesItsEntry(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, 9)
		release := w.blockUpload()
		p, s := w.start(0, false)
		done := p.runs(s)
		synctest.Wait()
		s.Stop(id)
		s.Lead(w.part)
		time.Sleep(10 * time.Minute) // the new pass has given the old attempt up and uploaded all
		w.allTiered()
		close(release)
		time.Sleep(10 * time.Minute)
		p.cancel()
		w.must(<-done)
		w.readable()
		w.clean()
	})
}

// New segments are uploaded when they are sealed, not when the interval has passed.
func TestPoke(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, 9)
		p, s := w.start(0, false)
		w.rolled = s.Poke
		done := p.runs(s)
		synctest.Wait()
		before, start := len(w.part.Remote()), time.Now()
		for range 4 {
			w.add()
		}
		synctest.Wait()
		if after := len(w.part.Remote()); after <= before || time.Since(start) != 0 {
			t.Errorf("%d segments, then %d after %s", before, after, time.Since(start))
		}
		p.cancel()
		w.must(<-done)
		w.clean()
	})
}
