package tier

import (
	"math/bits"
	"time"

	"github.com/varve-io/varve/internal/tp"
)

// Config are one topic's limits. Retention of -1 is none, local retention of -2 is that of the whole, and a copy
// lag of -1 is the effective local retention (KIP-1241). Milliseconds and bytes.
type Config struct {
	RetentionMs, RetentionBytes           int64
	LocalRetentionMs, LocalRetentionBytes int64
	CopyLagMs, CopyLagBytes               int64
	CopyDisabled                          bool // KIP-950: keep reading and expiring, upload nothing
	// DeleteDelay is how long objects outlive their DeleteStarted record: the validity of handed out locations.
	DeleteDelay time.Duration
}

// Local is a sealed local segment; End is inclusive.
type Local struct {
	Start, End, Size, MaxTimestamp int64
}

// Input is all that the next steps of one partition depend on, as its leader sees it.
type Input struct {
	Local      []Local // sealed segments by start
	ActiveSize int64   // bytes of the segment that is still written
	Remote     Segments
	LogStart   int64
	// Stable is the end (exclusive) of what may be uploaded: min(high watermark, last stable offset).
	Stable        int64
	HighWatermark int64
	LeaderEpoch   int32
	// Copying is the attempt that this broker is executing right now, zero for none.
	Copying tp.UUID
	Config  Config
	Now     time.Time
}

// Copy is a range to upload; End is inclusive. The upload is refused by the controller if it does not start where
// the tier ends.
type Copy struct {
	Start, End int64
}

// Plan are the next steps, to be done in the order of the fields. Each may fail alone; planning again repeats what is
// still due.
type Plan struct {
	// Abandon are attempts that nobody executes any more: CopyStarted to DeleteStarted. Their ranges are copied
	// again under new ids.
	Abandon []tp.UUID
	// LogStart is to be published before or with the deletions; it never falls.
	LogStart int64
	// Delete are finished segments past retention or below the log start: to DeleteStarted.
	Delete []tp.UUID
	// Skipped is how many bytes of sealed local data go without ever having been uploaded, being past total
	// retention. An operator wants to hear of it.
	Skipped int64
	// Clean are DeleteStarted segments whose objects may be deleted now; then DeleteFinished.
	Clean []tp.UUID
	// Copy is the next range to upload, nil if none.
	Copy *Copy
}

// MakePlan decides what a leader does next with the tier of one partition.
func MakePlan(in Input) Plan {
	p := Plan{LogStart: in.LogStart}
	for _, s := range in.Remote {
		if s.LeaderEpoch > in.LeaderEpoch && s.State != DeleteStarted {
			return p // somebody newer leads; the controller would refuse all of it
		}
	}
	for _, s := range in.Remote {
		switch {
		case s.State == CopyStarted && s.ID != in.Copying:
			p.Abandon = append(p.Abandon, s.ID)
		case s.Deletable(in.Now, in.Config.DeleteDelay):
			p.Clean = append(p.Clean, s.ID)
		}
	}
	kept := in.expire(&p)
	if in.Copying.IsZero() && !in.Config.CopyDisabled {
		p.Copy = in.nextCopy(kept, p.LogStart)
	}
	return p
}

// expire walks the log from its start, tiered segments first, as long as they breach a limit. It returns the
// finished segments that stay.
func (in *Input) expire(p *Plan) Segments {
	c := in.Config
	excess := int64(-1)
	if c.RetentionBytes >= 0 {
		excess = in.Remote.Bytes() + in.localOnly(in.Remote.End()) - c.RetentionBytes
	}
	breaches := func(size, maxTimestamp int64) bool {
		if cutoff := in.Now.UnixMilli() - c.RetentionMs; c.RetentionMs >= 0 && cutoff >= 0 && maxTimestamp < cutoff {
			return true
		}
		return excess >= size
	}
	kept := in.Remote.Finished()
	for len(kept) > 0 {
		s := kept[0]
		below := s.End < in.LogStart
		if !below && !breaches(s.Size, s.MaxTimestamp) {
			return kept
		}
		excess -= s.Size
		p.Delete = append(p.Delete, s.ID)
		p.LogStart = max(p.LogStart, s.End+1)
		kept = kept[1:]
	}
	// The whole tier goes. What is sealed here but not there yet is next: it is past its life even if the store
	// was away for all of it, and uploading it would only cost.
	copying := in.Remote.Get(in.Copying)
	end := in.Remote.End()
	for _, l := range in.Local {
		if l.End <= end || l.End < p.LogStart {
			continue
		}
		size := part(l, end)
		if l.End >= in.HighWatermark || copying != nil && l.End >= copying.Start || !breaches(size, l.MaxTimestamp) {
			break
		}
		excess -= size
		p.Skipped += size
		p.LogStart = max(p.LogStart, l.End+1)
	}
	return nil
}

// localOnly is how many bytes are here and not in the tier, which ends at remoteEnd.
func (in *Input) localOnly(remoteEnd int64) int64 {
	n := in.ActiveSize
	for _, l := range in.Local {
		n += part(l, remoteEnd)
	}
	return n
}

// part is the size of what lies above end in a local segment. Where the border is inside, bytes are taken to be
// spread evenly over offsets.
func part(l Local, end int64) int64 {
	switch {
	case l.Start > end:
		return l.Size
	case l.End <= end:
		return 0
	}
	hi, lo := bits.Mul64(uint64(max(l.Size, 0)), uint64(l.End-end))
	q, _ := bits.Div64(hi, lo, uint64(l.End-l.Start)+1)
	return int64(q)
}

func (in *Input) nextCopy(kept Segments, logStart int64) *Copy {
	start := logStart
	if end := kept.End(); end >= 0 {
		start = end + 1
	}
	after := in.ActiveSize
	for _, l := range in.Local {
		after += l.Size
	}
	for _, l := range in.Local {
		after -= l.Size
		if l.End < start {
			continue
		}
		if l.Start > start {
			if kept.End() >= 0 {
				return nil // a hole between tier and log: nothing that fits may be uploaded
			}
			start = l.Start
		}
		if l.End >= in.Stable || !in.ripe(l, after) {
			return nil
		}
		return &Copy{start, l.End}
	}
	return nil
}

// ripe applies the copy lag: either limit suffices, 0 is at once, and one that is unlimited says nothing.
func (in *Input) ripe(l Local, after int64) bool {
	c := in.Config
	lagMs := lag(c.CopyLagMs, c.LocalRetentionMs, c.RetentionMs)
	lagBytes := lag(c.CopyLagBytes, c.LocalRetentionBytes, c.RetentionBytes)
	if lagMs == 0 || lagBytes == 0 {
		return true
	}
	if age := in.Now.UnixMilli() - l.MaxTimestamp; lagMs > 0 && (age >= lagMs || age < 0) {
		return true
	}
	return lagBytes > 0 && after >= lagBytes
}

func lag(lag, local, total int64) int64 {
	if lag != -1 {
		return lag
	}
	if local != -2 {
		return local
	}
	return total
}

// Lag is how much sealed data is not in the tier yet (KIP-405 RemoteCopyLagBytes and -Segments). It is never
// negative, and 0 where copying is disabled.
func Lag(in Input) (bytes, segments int64) {
	if in.Config.CopyDisabled {
		return 0, 0
	}
	end := max(in.Remote.End(), in.LogStart-1)
	for _, l := range in.Local {
		if n := part(l, end); n > 0 {
			bytes += n
			segments++
		}
	}
	return bytes, segments
}
