package direct

import "time"

// action is what is done about one partition of a client's Fetch.
type action int8

const (
	actServe action = iota // answer from read-ahead
	actWait                // read-ahead is on its way: leave the partition out for now
	actTag                 // forward, and ask for a location
	actPlain               // forward, and want records
)

func (a action) String() string { return [...]string{"serve", "wait", "tag", "plain"}[a] }

// view is all that the planner may know about a partition. The client's offset is in it as the choice of stream: there is
// one only if its next offset is the client's.
type view struct {
	epoch   int32 // leader epoch that the client knows, -1 none
	capable bool  // broker and fetcher can, and the client's version can carry it
	resting bool  // the store is left alone for now
	held    bool  // this range is left alone for now
	plain   bool  // this very offset must come from the broker
	stream  *streamView
}

// streamView is the read-ahead whose next offset is the client's.
type streamView struct {
	epoch   int32
	expires time.Time
	marks   time.Time // when the broker last told high watermark and so on
	ready   bool      // it has a batch
	done    bool      // nothing more will come
	failed  cause     // nothing more will come, since reading failed; "" otherwise
}

// verdict is the planner's decision. drop says that the read-ahead is of no use any more; refresh, with serve and wait,
// that the broker should be asked for new marks.
type verdict struct {
	act      action
	drop     bool
	refresh  bool
	fallback cause // why the broker is asked for records that were to be read directly, "" if that is no fallback
}

// plan decides about one partition. It is pure.
//
// Read-ahead is used only by a request at exactly its next offset, so that seeks, rebalances and pauses need no further
// thought. A leader epoch that is not the location's, and a location whose validity is over, end it. What is intact in
// front of a failure is delivered first; the offset of the failure itself then comes from the broker.
func plan(v view, now time.Time, marksMaxAge time.Duration) verdict {
	var out verdict
	if s := v.stream; s != nil {
		refresh := v.capable && now.Sub(s.marks) >= marksMaxAge
		switch {
		case v.epoch >= 0 && v.epoch != s.epoch:
			out.drop = true
		case !now.Before(s.expires):
			out.drop = true
			if !s.ready && !s.done {
				out.fallback = causeExpired // or an object slower than the validity is begun for ever
				v.plain = true
			}
		case s.ready:
			return verdict{act: actServe, refresh: refresh}
		case s.failed != "":
			return verdict{act: actPlain, drop: true, fallback: s.failed}
		case s.done:
			out.drop = true
		default:
			return verdict{act: actWait, refresh: refresh}
		}
	}
	out.act = actTag
	if v.plain || !v.capable || v.resting || v.held {
		out.act = actPlain
	}
	return out
}
