package bucketscan

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"

	"github.com/varve-io/varve/internal/bucketlayout"
	"github.com/varve-io/varve/internal/inspect"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/remoteformat"
)

// Class says how bad a finding is.
type Class string

// The classes. The first four are losses: data or what is needed to read it is not there or is wrong.
const (
	Damaged    Class = "damaged"    // bytes that are not what they should be
	Missing    Class = "missing"    // an object that a segment needs
	Gap        Class = "gap"        // offsets that nothing holds between some that are held
	Unreadable Class = "unreadable" // encrypted with a key that was not given
	Overlap    Class = "overlap"    // two segments hold the same offsets, as after an unclean election
	Unfinished Class = "unfinished" // an upload that never became a segment
	Foreign    Class = "foreign"    // an object in no layout
)

// Loss reports whether a finding means that something is lost.
func (c Class) Loss() bool { return c == Damaged || c == Missing || c == Gap || c == Unreadable }

// Finding is something that is not as it should be.
type Finding struct {
	Class Class  `json:"class"`
	Key   string `json:"key"` // of the object, or the segment's log
	Text  string `json:"text"`
}

// Checked counts what was looked at.
type Checked struct {
	Segments int   `json:"segments"`
	Batches  int64 `json:"batches"`
	Bytes    int64 `json:"bytes"` // of objects
}

// Verify reads all segments of a partition and reports what is wrong with them: checksums, offsets from batch to batch and
// segment to segment, manifests, and indexes against the batches that they point at. An error is one of the store; done is
// called with the size of each segment.
func (r *Reader) Verify(ctx context.Context, p *bucketlayout.PartitionSegments, report func(Finding), done func(bytes int64)) (Checked, error) {
	var sum Checked
	next := int64(-1) // behind the last segment
	for _, f := range p.Segments {
		if !f.Committed() && f.Layout == bucketlayout.Aiven {
			report(Finding{Unfinished, f.Key(bucketlayout.Log), fmt.Sprintf("segment at offset %d has no manifest: an upload that was not finished, or is under way", f.Base)})
			done(f.Bytes())
			continue
		}
		c := &check{Reader: r, ctx: ctx, f: f, report: report, end: -1}
		if err := c.all(); err != nil {
			return sum, err
		}
		switch {
		case next < 0 || f.Base == next:
		case f.Base > next:
			report(Finding{Gap, f.Key(bucketlayout.Log), fmt.Sprintf("offsets %d to %d are in no segment", next, f.Base-1)})
		default:
			report(Finding{Overlap, f.Key(bucketlayout.Log), fmt.Sprintf("offsets %d to %d are in an earlier segment too", f.Base, min(next-1, max(c.end, f.Base)))})
		}
		if next = max(next, c.end+1); !c.known {
			next = -1 // nobody knows where it ends
		}
		sum.Segments++
		sum.Batches += int64(len(c.batches))
		sum.Bytes += f.Bytes()
		done(f.Bytes())
	}
	return sum, nil
}

// check is the verification of one segment.
type check struct {
	*Reader
	ctx      context.Context
	f        *bucketlayout.Found
	report   func(Finding)
	manifest []byte
	batches  []place
	end      int64 // last offset that was seen, or that the manifest tells; -1 none
	whole    bool  // the log was read to its end
	known    bool  // so is end
}

// place is where a batch is, and whose transaction it aborts, -1 if it does not. Batches are in the order of their positions.
type place struct{ position, first, last, aborts int64 }

func (c *check) find(class Class, k bucketlayout.Kind, format string, args ...any) {
	c.report(Finding{class, c.f.Key(k), fmt.Sprintf(format, args...)})
}

// damage reports what a reader found, and returns what is no damage.
func (c *check) damage(k bucketlayout.Kind, err error) error {
	var d *inspect.DamageError
	switch {
	case err == nil:
	case errors.Is(err, remoteformat.ErrNoKey):
		c.find(Unreadable, k, "%v", err)
	case errors.As(err, &d):
		text := d.Err.Error()
		if d.Position >= 0 {
			text = fmt.Sprintf("position %d: %s", d.Position, text)
		}
		c.find(Damaged, k, "%s", text)
	case errors.Is(err, objstore.ErrNotFound):
		c.find(Missing, k, "it was listed and is gone")
	case errors.Is(err, objstore.ErrShortBody):
		c.find(Damaged, k, "%v", err)
	default:
		return err
	}
	return nil
}

func (c *check) all() error {
	for _, k := range c.f.Missing() {
		c.find(Missing, k, "segment at offset %d has no such object", c.f.Base)
	}
	readable, err := c.readManifest()
	if err != nil || !readable {
		return err
	}
	if _, ok := c.f.Objects[bucketlayout.Log]; ok {
		if err := c.log(); err != nil {
			return err
		}
	}
	for _, k := range []bucketlayout.Kind{bucketlayout.Index, bucketlayout.TimeIndex, bucketlayout.TxnIndex, bucketlayout.Snapshot, bucketlayout.Epochs, bucketlayout.Indexes} {
		if _, ok := c.f.Objects[k]; ok {
			if err := c.index(k); err != nil {
				return err
			}
		}
	}
	return nil
}

// readManifest checks the manifest against the key and the objects' sizes. readable is false if nothing can be read without it.
func (c *check) readManifest() (readable bool, err error) {
	if c.manifest, err = c.Reader.manifest(c.ctx, c.f); err != nil || c.manifest == nil {
		return err == nil, c.damage(bucketlayout.Manifest, err)
	}
	m, err := remoteformat.ParseManifest(c.manifest)
	if err != nil {
		c.find(Damaged, bucketlayout.Manifest, "%v", err)
		return false, nil
	}
	md, f := &m.Metadata, c.f
	if !strings.HasSuffix(f.Topic, md.Topic) || md.TopicID != f.TopicID || md.Partition != f.Partition.Partition || md.Start != f.Base || md.ID != f.ID {
		c.find(Damaged, bucketlayout.Manifest, "it is of segment %s", md.Path())
		return false, nil
	}
	c.end, c.known = md.End, true
	if _, err := remoteformat.Open(c.manifest, c.Keys); err != nil {
		if errors.Is(err, remoteformat.ErrNoKey) {
			c.find(Unreadable, bucketlayout.Manifest, "%v", err)
		} else {
			c.find(Damaged, bucketlayout.Manifest, "%v", err)
		}
		return false, nil
	}
	return true, nil
}

// log checks every batch.
func (c *check) log() error {
	next := c.f.Base
	err := c.read(c.ctx, c.f, bucketlayout.Log, inspect.Options{Kind: inspect.KindLog, Manifest: c.manifest}, func(i inspect.Item) error {
		b := i.(*inspect.Batch)
		switch {
		case b.BaseOffset > next:
			c.find(Gap, bucketlayout.Log, "position %d: offsets %d to %d are missing", b.Position, next, b.BaseOffset-1)
		case b.BaseOffset < next:
			c.find(Damaged, bucketlayout.Log, "position %d: batch of offsets %d to %d where %d is due", b.Position, b.BaseOffset, b.LastOffset, next)
		}
		next = max(next, b.LastOffset+1)
		aborts := int64(-1)
		if b.Marker != nil && b.Marker.Type == "ABORT" {
			aborts = b.ProducerID
		}
		c.batches = append(c.batches, place{b.Position, b.BaseOffset, b.LastOffset, aborts})
		return nil
	})
	c.whole = err == nil
	c.known = c.known || c.whole
	told := c.end
	c.end = max(c.end, next-1)
	if c.whole && told >= 0 && next-1 != told {
		c.find(Gap, bucketlayout.Log, "it ends at offset %d, the manifest says %d", next-1, told)
	}
	return c.damage(bucketlayout.Log, err)
}

// index checks an object that holds one index, or all.
func (c *check) index(k bucketlayout.Kind) error {
	wrong := 0
	off := func(format string, args ...any) {
		if wrong++; wrong == 1 { // one is enough to know
			c.find(Damaged, k, format, args...)
		}
	}
	o := inspect.Options{Manifest: c.manifest}
	if k == bucketlayout.Indexes {
		o.Kind = inspect.KindIndexes
	}
	err := c.read(c.ctx, c.f, k, o, func(i inspect.Item) error {
		if !c.whole {
			return nil
		}
		switch e := i.(type) {
		case *inspect.OffsetEntry:
			at := sort.Search(len(c.batches), func(i int) bool { return c.batches[i].position >= e.Position })
			if at == len(c.batches) || c.batches[at].position != e.Position || e.Offset < c.batches[at].first || e.Offset > c.batches[at].last {
				off("the offset index has offset %d at position %d, where no such batch begins", e.Offset, e.Position)
			}
		case *inspect.TimeEntry:
			if e.Offset < c.f.Base || e.Offset > c.end {
				off("the time index names offset %d of a segment of %d to %d", e.Offset, c.f.Base, c.end)
			}
		case *inspect.Aborted:
			if e.LastOffset < c.f.Base || e.LastOffset > c.end || e.FirstOffset > e.LastOffset {
				off("the transaction index has a transaction of offsets %d to %d in a segment of %d to %d", e.FirstOffset, e.LastOffset, c.f.Base, c.end)
			} else if at, ok := slices.BinarySearchFunc(c.batches, e.LastOffset, func(p place, offset int64) int { return cmp.Compare(p.last, offset) }); !ok || c.batches[at].aborts != e.ProducerID {
				off("the transaction index has producer %d abort at offset %d, where no marker says so", e.ProducerID, e.LastOffset)
			}
		}
		return nil
	})
	var d *inspect.DamageError
	if wrong > 0 && errors.As(err, &d) {
		return nil // it has been said
	}
	return c.damage(k, err)
}
