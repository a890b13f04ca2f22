package inspect

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/varve-io/varve/internal/grouprecord"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/segment"
)

// Batch is the header of a batch. Valid tells whether the checksum is right; LastSequence is -1 without a producer.
type Batch struct {
	Segment              string  `json:"segment"`
	Position             int64   `json:"position"`
	Size                 int     `json:"size"`
	BaseOffset           int64   `json:"baseOffset"`
	LastOffset           int64   `json:"lastOffset"`
	Count                int32   `json:"count"`
	PartitionLeaderEpoch int32   `json:"partitionLeaderEpoch"`
	Magic                int8    `json:"magic"`
	CRC                  uint32  `json:"crc"`
	Valid                bool    `json:"valid"`
	Compression          string  `json:"compression"`
	TimestampType        string  `json:"timestampType"`
	MaxTimestamp         int64   `json:"maxTimestamp"`
	Transactional        bool    `json:"transactional"`
	Control              bool    `json:"control"`
	DeleteHorizon        *int64  `json:"deleteHorizonMs"`
	ProducerID           int64   `json:"producerId"`
	ProducerEpoch        int16   `json:"producerEpoch"`
	BaseSequence         int32   `json:"baseSequence"`
	LastSequence         int32   `json:"lastSequence"`
	Marker               *Marker `json:"marker,omitempty"` // of control batches that are intact and not empty
}

// Marker is a control record: COMMIT, ABORT, LEADER_CHANGE, or a number.
type Marker struct {
	Type             string `json:"type"`
	CoordinatorEpoch int32  `json:"coordinatorEpoch"`
}

// Text is the form for people.
func (b *Batch) Text() string {
	var s strings.Builder
	fmt.Fprintf(&s, "batch %d-%d at %d, %d bytes: %d records, %s, epoch %d, %s %s", b.BaseOffset, b.LastOffset, b.Position, b.Size, b.Count,
		b.Compression, b.PartitionLeaderEpoch, b.TimestampType, timeText(b.MaxTimestamp))
	if b.ProducerID >= 0 {
		fmt.Fprintf(&s, ", producer %d epoch %d", b.ProducerID, b.ProducerEpoch)
		if b.BaseSequence >= 0 {
			fmt.Fprintf(&s, " sequence %d-%d", b.BaseSequence, b.LastSequence)
		}
	}
	if b.Transactional {
		s.WriteString(", transactional")
	}
	if b.Control {
		s.WriteString(", control")
	}
	if b.Marker != nil {
		fmt.Fprintf(&s, " %s (coordinator epoch %d)", b.Marker.Type, b.Marker.CoordinatorEpoch)
	}
	if b.DeleteHorizon != nil {
		fmt.Fprintf(&s, ", tombstones until %s", timeText(*b.DeleteHorizon))
	}
	if !b.Valid {
		s.WriteString(", WRONG CHECKSUM")
	}
	return s.String()
}

func timeText(ms int64) string {
	if ms < 0 || ms > 253402300799999 {
		return fmt.Sprint(ms)
	}
	return time.UnixMilli(ms).UTC().Format("2006-01-02T15:04:05.000Z")
}

func controlName(t recordbatch.ControlType) string {
	switch t {
	case recordbatch.ControlAbort:
		return "ABORT"
	case recordbatch.ControlCommit:
		return "COMMIT"
	case recordbatch.ControlLeaderChange:
		return "LEADER_CHANGE"
	}
	return fmt.Sprint(int16(t))
}

func (d *dump) log(r io.ReaderAt, size int64) error {
	if d.options.Manifest != nil {
		s, err := remoteformat.Open(d.options.Manifest, d.options.Keys)
		if err != nil {
			return d.damage(-1, fmt.Errorf("manifest: %w", err))
		}
		if stored := s.Chunks().StoredSize(); stored != size {
			return d.damage(-1, fmt.Errorf("%d bytes, but the manifest says %d", size, stored))
		}
		if !s.Plain() {
			r, size = &chunks{segment: s, object: r, have: -1}, s.Size()
		}
	}
	var first error // the first damage; what can be read after it still is
	scan := segment.NewBatchScanner(r, 0, size)
	defer scan.Release()
	for scan.Next() {
		h, pos := scan.Header(), scan.Pos()
		raw, err := scan.Batch()
		if err != nil {
			return d.at(pos, err)
		}
		b := d.batch(h, pos)
		if err := h.Verify(raw); err != nil {
			b.Valid = false
			first = keep(first, d.damage(pos, err))
		} else if h.IsControl() {
			c, ok, err := recordbatch.ControlOf(raw)
			if err != nil {
				first = keep(first, d.damage(pos, err))
			} else if ok {
				b.Marker = &Marker{controlName(c.Type), c.CoordinatorEpoch}
			}
		}
		if !d.options.Offsets && !d.put(b) {
			return d.failed
		}
		if (d.options.Records || d.options.Offsets) && b.Valid {
			if err := d.records(b, raw); err != nil {
				first = keep(first, d.damage(pos, err))
			}
			if d.failed != nil {
				return d.failed
			}
		}
	}
	if err := scan.Err(); err != nil {
		first = keep(first, d.at(scan.End(), err))
	}
	return first
}

func keep(first, next error) error {
	if first != nil {
		return first
	}
	return next
}

func (d *dump) at(pos int64, err error) error {
	var c *segment.CorruptError
	if errors.As(err, &c) {
		return d.damage(c.Position, c.Err)
	}
	return d.damage(pos, err)
}

func (d *dump) batch(h *recordbatch.Header, pos int64) *Batch {
	b := &Batch{Segment: d.short, Position: pos, Size: h.Size, BaseOffset: h.BaseOffset, LastOffset: h.LastOffset(), Count: h.Count,
		PartitionLeaderEpoch: h.LeaderEpoch, Magic: 2, CRC: h.CRC, Valid: true, Compression: h.Codec().String(), TimestampType: "CreateTime",
		MaxTimestamp: h.MaxTimestamp, Transactional: h.IsTransactional(), Control: h.IsControl(),
		ProducerID: h.ProducerID, ProducerEpoch: h.ProducerEpoch, BaseSequence: h.BaseSequence, LastSequence: h.LastSequence()}
	if h.LogAppendTime() {
		b.TimestampType = "LogAppendTime"
	}
	if h.HasDeleteHorizon() {
		at := h.BaseTimestamp
		b.DeleteHorizon = &at
	}
	return b
}

func (d *dump) records(b *Batch, raw []byte) error {
	it, err := recordbatch.Records(raw, 0)
	if err != nil {
		return err
	}
	for it.Next() {
		r := it.Record()
		out := &Record{Record: *r, Sequence: -1, ProducerID: b.ProducerID, ProducerEpoch: b.ProducerEpoch, Transactional: b.Transactional, full: d.options.Full}
		if b.BaseSequence >= 0 && r.Offset >= b.BaseOffset && r.Offset-b.BaseOffset <= 1<<31-1 {
			out.Sequence = recordbatch.AddSequence(b.BaseSequence, int32(r.Offset-b.BaseOffset))
		}
		if b.Control {
			c, err := recordbatch.ParseControl(r.Key, r.Value)
			if err != nil {
				return fmt.Errorf("record %d: %w", r.Offset, err)
			}
			out.Control = &Marker{controlName(c.Type), c.CoordinatorEpoch}
		}
		if d.options.Offsets && !b.Control {
			e, ok, err := grouprecord.Parse(r.Key, r.Value)
			if err != nil {
				return fmt.Errorf("record %d: %w", r.Offset, err)
			}
			if ok {
				if !d.put(groupItem(r, &e)) {
					return d.failed
				}
				continue
			}
		}
		if !d.put(out) {
			return d.failed
		}
	}
	return it.Err()
}

// chunks reads a transformed .log object as the plain segment, one chunk in memory.
type chunks struct {
	segment *remoteformat.Segment
	object  io.ReaderAt
	have    int
	plain   []byte
}

// ReadAt reads plain bytes.
func (c *chunks) ReadAt(p []byte, off int64) (int, error) {
	n := 0
	for n < len(p) {
		at := off + int64(n)
		if at >= c.segment.Size() {
			return n, io.EOF
		}
		i, _, ok := c.segment.Chunks().Range(at, at+1)
		if !ok {
			return n, io.EOF
		}
		chunk := c.segment.Chunks().Chunk(i)
		if c.have != i {
			stored := make([]byte, chunk.StoredSize)
			if _, err := c.object.ReadAt(stored, chunk.StoredPosition); err != nil {
				return n, err
			}
			plain, err := c.segment.DecodeChunk(i, stored)
			if err != nil {
				return n, fmt.Errorf("chunk %d, stored at %d: %w", i, chunk.StoredPosition, err)
			}
			c.have, c.plain = i, plain
		}
		n += copy(p[n:], c.plain[at-chunk.Position:])
	}
	return n, nil
}
