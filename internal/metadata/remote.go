package metadata

import (
	"fmt"
	"slices"
	"sort"

	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

// RemoteSegmentRecord adds a remote segment: CopyStarted when an upload begins, any state in a snapshot (KIP-405, D2).
type RemoteSegmentRecord struct {
	Segment tier.Segment `cbor:"1,keyasint"`
}

// RemoteStateRecord moves a remote segment to another state, and with LogStart above 0 the partition's log start.
// A zero ID changes the log start alone.
type RemoteStateRecord struct {
	Topic          tp.UUID    `cbor:"1,keyasint"`
	Index          int32      `cbor:"2,keyasint"`
	ID             tp.UUID    `cbor:"3,keyasint,omitempty"`
	State          tier.State `cbor:"4,keyasint,omitempty"`
	EventTime      int64      `cbor:"5,keyasint,omitempty"`
	ObjectBytes    int64      `cbor:"6,keyasint,omitempty"` // CopyFinished: bytes of all objects
	CRC            uint32     `cbor:"7,keyasint,omitempty"` // CopyFinished: CRC-32C of the plain log bytes
	CustomMetadata []byte     `cbor:"8,keyasint,omitempty"`
	LogStart       int64      `cbor:"9,keyasint,omitempty"`
	Format         string     `cbor:"10,keyasint,omitempty"` // CopyFinished: how the objects were stored
}

// RemoteDisableRecord takes a partition out of the tier (KIP-950): every remote segment becomes DeleteStarted and the log
// starts where the local log does.
type RemoteDisableRecord struct {
	Topic     tp.UUID `cbor:"1,keyasint"`
	Index     int32   `cbor:"2,keyasint"`
	EventTime int64   `cbor:"3,keyasint"`
	LogStart  int64   `cbor:"4,keyasint"`
}

func (r RemoteSegmentRecord) apply(b *builder) error {
	s := r.Segment
	p, err := b.partition(s.TopicID, s.Partition)
	if err != nil {
		return err
	}
	if i := find(p.Remote, s.ID); i >= 0 {
		return fmt.Errorf("remote segment %s exists", s.ID)
	}
	at := sort.Search(len(p.Remote), func(i int) bool { return p.Remote[i].Start > s.Start })
	p.Remote = slices.Insert(p.Remote, at, &s)
	return nil
}

func (r RemoteStateRecord) apply(b *builder) error {
	p, err := b.partition(r.Topic, r.Index)
	if err != nil {
		return err
	}
	p.LogStart = max(p.LogStart, r.LogStart)
	if r.ID.IsZero() {
		return nil
	}
	i := find(p.Remote, r.ID)
	if i < 0 {
		return fmt.Errorf("no remote segment %s", r.ID)
	}
	s := *p.Remote[i]
	if !s.State.CanBecome(r.State) {
		return fmt.Errorf("remote segment %s cannot become %s from %s", r.ID, r.State, s.State)
	}
	if r.State == tier.DeleteFinished {
		if p.Remote = slices.Delete(p.Remote, i, i+1); len(p.Remote) == 0 {
			p.Remote = nil // as a snapshot makes it
		}
		return nil
	}
	s.State, s.EventTime = r.State, r.EventTime
	if r.State == tier.CopyFinished {
		s.ObjectBytes, s.CRC, s.CustomMetadata = r.ObjectBytes, r.CRC, r.CustomMetadata
		if r.Format != "" {
			s.Format = r.Format
		}
	}
	p.Remote[i] = &s
	return nil
}

func (r RemoteDisableRecord) apply(b *builder) error {
	p, err := b.partition(r.Topic, r.Index)
	if err != nil {
		return err
	}
	p.LogStart = max(p.LogStart, r.LogStart)
	remote := make(tier.Segments, len(p.Remote))
	for i, s := range p.Remote {
		c := *s
		if c.State != tier.DeleteStarted {
			c.State, c.EventTime = tier.DeleteStarted, r.EventTime
		}
		remote[i] = &c
	}
	p.Remote = remote
	return nil
}

func find(segments tier.Segments, id tp.UUID) int {
	return slices.IndexFunc(segments, func(s *tier.Segment) bool { return s.ID == id })
}
