package inspect

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tp"
)

// OffsetEntry is an entry of an offset index: the last offset of a batch and its position.
type OffsetEntry struct {
	File     string `json:"file"`
	Offset   int64  `json:"offset"`
	Position int64  `json:"position"`
}

// TimeEntry is an entry of a time index: the greatest timestamp up to an offset.
type TimeEntry struct {
	File      string `json:"file"`
	Timestamp int64  `json:"timestamp"`
	Offset    int64  `json:"offset"`
}

// Aborted is an entry of a transaction index.
type Aborted struct {
	File             string `json:"file"`
	ProducerID       int64  `json:"producerId"`
	FirstOffset      int64  `json:"firstOffset"`
	LastOffset       int64  `json:"lastOffset"`
	LastStableOffset int64  `json:"lastStableOffset"`
}

// Producer is an entry of a producer snapshot. Batches has the last batch, or none.
type Producer struct {
	File             string          `json:"file"`
	ProducerID       int64           `json:"producerId"`
	ProducerEpoch    int16           `json:"producerEpoch"`
	CoordinatorEpoch int32           `json:"coordinatorEpoch"`
	LastTimestamp    int64           `json:"lastTimestamp"`
	TxnFirstOffset   *int64          `json:"currentTxnFirstOffset"`
	Batches          []ProducerBatch `json:"batches"`
}

// ProducerBatch is the batch that a producer snapshot keeps.
type ProducerBatch struct {
	FirstSequence int32 `json:"firstSeq"`
	LastSequence  int32 `json:"lastSeq"`
	FirstOffset   int64 `json:"firstOffset"`
	LastOffset    int64 `json:"lastOffset"`
	Timestamp     int64 `json:"timestamp"`
}

// Epoch is an entry of a leader epoch checkpoint.
type Epoch struct {
	File        string `json:"file"`
	Epoch       int32  `json:"epoch"`
	StartOffset int64  `json:"startOffset"`
}

// Checkpoint is an entry of an offset checkpoint.
type Checkpoint struct {
	File      string `json:"file"`
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	Offset    int64  `json:"offset"`
}

// Property is a line of partition.metadata or meta.properties.
type Property struct {
	File  string `json:"file"`
	Name  string `json:"name"`
	Value string `json:"value"`
}

// Manifest is a .rsm-manifest, which is its own JSON form.
type Manifest struct {
	raw      json.RawMessage
	manifest *remoteformat.Manifest
}

// MarshalJSON is the document itself.
func (m *Manifest) MarshalJSON() ([]byte, error) { return m.raw, nil }

// Text and its like are the forms for people.
func (e *OffsetEntry) Text() string {
	return fmt.Sprintf("offset %d at position %d", e.Offset, e.Position)
}

// Text is the form for people.
func (e *TimeEntry) Text() string {
	return fmt.Sprintf("timestamp %d (%s) up to offset %d", e.Timestamp, timeText(e.Timestamp), e.Offset)
}

// Text is the form for people.
func (e *Aborted) Text() string {
	return fmt.Sprintf("producer %d aborted %d-%d, last stable offset then %d", e.ProducerID, e.FirstOffset, e.LastOffset, e.LastStableOffset)
}

// Text is the form for people.
func (e *Producer) Text() string {
	s := fmt.Sprintf("producer %d epoch %d, last active %s, coordinator epoch %d", e.ProducerID, e.ProducerEpoch, timeText(e.LastTimestamp), e.CoordinatorEpoch)
	for _, b := range e.Batches {
		s += fmt.Sprintf(", last batch %d-%d sequence %d-%d", b.FirstOffset, b.LastOffset, b.FirstSequence, b.LastSequence)
	}
	if e.TxnFirstOffset != nil {
		s += fmt.Sprintf(", open transaction from %d", *e.TxnFirstOffset)
	}
	return s
}

// Text is the form for people.
func (e *Epoch) Text() string { return fmt.Sprintf("epoch %d from offset %d", e.Epoch, e.StartOffset) }

// Text is the form for people.
func (e *Checkpoint) Text() string {
	return fmt.Sprintf("%s-%d %d", e.Topic, e.Partition, e.Offset)
}

// Text is the form for people.
func (e *Property) Text() string { return e.Name + ": " + e.Value }

// Text is the form for people.
func (m *Manifest) Text() string {
	md := &m.manifest.Metadata
	var s strings.Builder
	fmt.Fprintf(&s, "segment %s of %s-%d (%s), offsets %d-%d, %d bytes in %d chunks of %d, %d stored", md.ID, md.Topic, md.Partition, md.TopicID, md.Start, md.End,
		m.manifest.Chunks.FileSize, m.manifest.Chunks.Count(), m.manifest.Chunks.ChunkSize, m.manifest.Chunks.StoredSize())
	if m.manifest.Compressed {
		s.WriteString(", compressed")
	}
	if e := m.manifest.Encryption; e != nil {
		id, _, _ := strings.Cut(e.DataKey, ":")
		fmt.Fprintf(&s, ", encrypted with key pair %q", id)
	}
	fmt.Fprintf(&s, ", newest record %s, copied by broker %d at %s, epochs", timeText(md.MaxTimestamp), md.Broker, timeText(md.EventTime))
	for _, e := range md.Epochs {
		fmt.Fprintf(&s, " %d@%d", e.Epoch, e.StartOffset)
	}
	return s.String()
}

func (d *dump) whole(kind Kind, b []byte) error {
	switch kind {
	case KindOffsetIndex:
		return d.offsetIndex(b)
	case KindTimeIndex:
		return d.timeIndex(b)
	case KindTxnIndex:
		return d.txnIndex(b)
	case KindSnapshot:
		return d.snapshot(b)
	case KindEpochs:
		return d.epochs(b)
	case KindOffsets:
		return d.offsets(b)
	case KindPartition, KindMeta:
		return d.properties(kind, b)
	case KindManifest:
		m, err := remoteformat.ParseManifest(b)
		if err != nil {
			return d.damage(-1, err)
		}
		d.put(&Manifest{slices.Clone(b), m})
		return d.failed
	case KindIndexes:
		return d.indexes(b)
	}
	return d.damage(-1, fmt.Errorf("%w: kind %q", ErrUnknownKind, kind))
}

// entries calls read with each entry of an index and its position. Preallocated zeros at the end, as a broker that was killed
// leaves them, are passed over.
func (d *dump) entries(b []byte, size int, read func(e []byte) (Item, error)) error {
	used := len(bytes.TrimRight(b, "\x00"))
	for pos := 0; pos < used; pos += size {
		if pos+size > len(b) {
			return d.damage(int64(pos), fmt.Errorf("%w: %d bytes of an entry of %d", segment.ErrIndex, len(b)-pos, size))
		}
		item, err := read(b[pos : pos+size])
		if err != nil {
			return d.damage(int64(pos), fmt.Errorf("%w: %w", segment.ErrIndex, err))
		}
		if !d.put(item) {
			return d.failed
		}
	}
	if rest := len(b) % size; rest != 0 {
		return d.damage(int64(len(b)-rest), fmt.Errorf("%w: %d bytes of an entry of %d", segment.ErrIndex, rest, size))
	}
	return nil
}

func (d *dump) offsetIndex(b []byte) error {
	lastOffset, lastPosition := int64(-1), int64(-1)
	return d.entries(b, segment.OffsetEntrySize, func(e []byte) (Item, error) {
		offset, position := int64(int32(binary.BigEndian.Uint32(e))), int64(int32(binary.BigEndian.Uint32(e[4:])))
		if offset <= lastOffset || position <= lastPosition {
			return nil, fmt.Errorf("offset %d, position %d after %d, %d", d.base+offset, position, d.base+lastOffset, lastPosition)
		}
		lastOffset, lastPosition = offset, position
		return &OffsetEntry{d.short, d.base + offset, position}, nil
	})
}

func (d *dump) timeIndex(b []byte) error {
	lastTime, lastOffset := int64(-1), int64(-1)
	return d.entries(b, segment.TimeEntrySize, func(e []byte) (Item, error) {
		at, offset := int64(binary.BigEndian.Uint64(e)), int64(int32(binary.BigEndian.Uint32(e[8:])))
		if at <= lastTime || offset < lastOffset || offset < 0 {
			return nil, fmt.Errorf("timestamp %d, offset %d after %d, %d", at, d.base+offset, lastTime, d.base+lastOffset)
		}
		lastTime, lastOffset = at, offset
		return &TimeEntry{d.short, at, d.base + offset}, nil
	})
}

func (d *dump) txnIndex(b []byte) error {
	last := int64(-1)
	return d.entries(b, segment.TxnEntrySize, func(e []byte) (Item, error) {
		list, err := segment.ParseTxnIndex(e)
		if err != nil {
			return nil, err
		}
		t := list[0]
		if t.LastOffset <= last {
			return nil, fmt.Errorf("last offset %d after %d", t.LastOffset, last)
		}
		last = t.LastOffset
		return &Aborted{d.short, t.ProducerID, t.FirstOffset, t.LastOffset, t.LastStableOffset}, nil
	})
}

func (d *dump) snapshot(b []byte) error {
	list, err := producerstate.ParseSnapshot(b)
	if err != nil {
		return d.damage(0, err)
	}
	for _, e := range list {
		p := &Producer{File: d.short, ProducerID: e.ProducerID, ProducerEpoch: e.Epoch, CoordinatorEpoch: e.CoordinatorEpoch, LastTimestamp: e.Timestamp, Batches: []ProducerBatch{}}
		if e.TxnFirstOffset >= 0 {
			p.TxnFirstOffset = &e.TxnFirstOffset
		}
		if e.LastOffset >= 0 {
			// Sequence numbers wrap from 2^31-1 to 0.
			first := int32((int64(e.LastSequence) - int64(e.OffsetDelta)) & (1<<31 - 1))
			if e.LastSequence < 0 {
				first = e.LastSequence
			}
			p.Batches = append(p.Batches, ProducerBatch{first, e.LastSequence, e.LastOffset - int64(e.OffsetDelta), e.LastOffset, e.Timestamp})
		}
		if !d.put(p) {
			break
		}
	}
	return d.failed
}

func (d *dump) epochs(b []byte) error {
	list, err := leaderepoch.Parse(b)
	if err != nil {
		return d.damage(-1, err)
	}
	for _, e := range list {
		if !d.put(&Epoch{d.short, e.Epoch, e.StartOffset}) {
			break
		}
	}
	return d.failed
}

func (d *dump) offsets(b []byte) error {
	m, err := log.ParseCheckpoint(b)
	if err != nil {
		return d.damage(-1, err)
	}
	keys := make([]tp.Partition, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b tp.Partition) int {
		if c := strings.Compare(a.Topic, b.Topic); c != 0 {
			return c
		}
		return int(a.Index) - int(b.Index)
	})
	for _, k := range keys {
		if !d.put(&Checkpoint{d.short, k.Topic, k.Index, m[k]}) {
			break
		}
	}
	return d.failed
}

func (d *dump) properties(kind Kind, b []byte) error {
	separator := ":"
	if kind == KindMeta {
		separator = "="
		if _, err := log.ParseMeta(b); err != nil {
			return d.damage(-1, err)
		}
	}
	pos := int64(0)
	for line := range strings.Lines(string(b)) {
		text := strings.TrimSpace(line)
		if text != "" && text[0] != '#' && text[0] != '!' {
			name, value, ok := strings.Cut(text, separator)
			if !ok {
				return d.damage(pos, errors.New("not NAME"+separator+"VALUE"))
			}
			if value = strings.TrimSpace(value); name == "topic_id" {
				if _, err := tp.ParseUUID(value); err != nil {
					return d.damage(pos, err)
				}
			}
			if !d.put(&Property{d.short, strings.TrimSpace(name), value}) {
				return d.failed
			}
		}
		pos += int64(len(line))
	}
	return nil
}

// indexes shows the indexes in a .indexes object one after the other, each under the name of its kind.
func (d *dump) indexes(b []byte) error {
	if d.options.Manifest == nil {
		return d.damage(-1, errors.New("the manifest is needed to read indexes; it is not beside the file"))
	}
	s, err := remoteformat.Open(d.options.Manifest, d.options.Keys)
	if err != nil {
		return d.damage(-1, fmt.Errorf("manifest: %w", err))
	}
	name, base := d.short, s.Manifest().Metadata.Start
	var first error
	for _, part := range []struct {
		index remoteformat.IndexKind
		kind  Kind
	}{{remoteformat.OffsetIndex, KindOffsetIndex}, {remoteformat.TimestampIndex, KindTimeIndex}, {remoteformat.ProducerSnapshot, KindSnapshot},
		{remoteformat.LeaderEpochIndex, KindEpochs}, {remoteformat.TransactionIndex, KindTxnIndex}} {
		span, ok := s.Span(part.index)
		if !ok {
			continue
		}
		if span.Position < 0 || span.Size < 0 || span.Position > int64(len(b)) || span.Size > int64(len(b))-span.Position {
			first = keep(first, d.damage(int64(len(b)), fmt.Errorf("%s index: %d bytes at %d are past the end", part.index, span.Size, span.Position)))
			continue
		}
		plain, err := s.DecodeIndex(part.index, b[span.Position:span.Position+span.Size])
		if err != nil {
			first = keep(first, d.damage(span.Position, fmt.Errorf("%s index: %w", part.index, err)))
			continue
		}
		sub := &dump{name: d.name + " (" + string(part.kind) + ")", short: name + "#" + string(part.kind), base: base, options: d.options, emit: d.emit}
		first = keep(first, sub.whole(part.kind, plain))
		if sub.failed != nil {
			return sub.failed
		}
	}
	return first
}
