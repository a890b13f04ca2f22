package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
)

// whereForms lists the ways to name a place in a topic.
const whereForms = `  start, end      the first offset, the one after the last record
  N               offset N
  +N, -N          N records after the start, the last N records, of each partition
  @TIME           the first record at TIME (RFC 3339) or later; @-1h counts back from now`

// where is a place in every partition of a topic.
type where struct {
	kind string // start, end, offset, fromStart, fromEnd, time
	n    int64  // offset, count, or ms since 1970
}

func parseWhere(s string) (where, error) {
	bad := usageError{fmt.Errorf("%q is no place in a topic; the forms are\n%s", s, whereForms)}
	switch {
	case s == "start" || s == "end":
		return where{kind: s}, nil
	case s == "":
		return where{}, bad
	case s[0] == '@':
		if d, err := time.ParseDuration(s[1:]); err == nil {
			return where{"time", time.Now().Add(d).UnixMilli()}, nil
		}
		for _, layout := range []string{time.RFC3339Nano, "2006-01-02T15:04Z07:00", "2006-01-02"} {
			if t, err := time.Parse(layout, s[1:]); err == nil {
				return where{"time", t.UnixMilli()}, nil
			}
		}
		return where{}, bad
	}
	n, err := strconv.ParseInt(strings.TrimLeft(s, "+-"), 10, 64)
	if err != nil || len(strings.TrimLeft(s, "+-")) < len(s)-1 {
		return where{}, bad
	}
	switch s[0] {
	case '+':
		return where{"fromStart", n}, nil
	case '-':
		return where{"fromEnd", n}, nil
	}
	return where{"offset", n}, nil
}

// offsets turns the place into an offset of each partition. An offset beyond the range is an error; a time or count beyond
// it is clamped, with a note.
func (w where) offsets(ctx context.Context, adm *kadm.Client, topics []string) (kadm.ListedOffsets, []string, error) {
	starts, err := adm.ListStartOffsets(ctx, topics...)
	if err == nil {
		err = starts.Error()
	}
	if err != nil {
		return nil, nil, err
	}
	ends, err := adm.ListEndOffsets(ctx, topics...)
	if err == nil {
		err = ends.Error()
	}
	if err != nil {
		return nil, nil, err
	}
	at := kadm.ListedOffsets{}
	if w.kind == "time" {
		if at, err = adm.ListOffsetsAfterMilli(ctx, w.n, topics...); err == nil {
			err = at.Error()
		}
		if err != nil {
			return nil, nil, err
		}
	}
	out := kadm.ListedOffsets{}
	var notes []string
	for _, s := range sortedOffsets(starts) {
		e, _ := ends.Lookup(s.Topic, s.Partition)
		o := s
		switch w.kind {
		case "start":
		case "end":
			o.Offset = e.Offset
		case "offset":
			if w.n < s.Offset || w.n > e.Offset {
				return nil, nil, fmt.Errorf("offset %d of %s-%d is out of range: it holds %d to %d", w.n, s.Topic, s.Partition, s.Offset, e.Offset)
			}
			o.Offset = w.n
		case "fromStart", "fromEnd":
			o.Offset = s.Offset + w.n
			if w.kind == "fromEnd" {
				o.Offset = e.Offset - w.n
			}
			if clamped := min(max(o.Offset, s.Offset), e.Offset); clamped != o.Offset {
				notes = append(notes, fmt.Sprintf("%s-%d holds fewer than %d records, taking all there are", s.Topic, s.Partition, w.n))
				o.Offset = clamped
			}
		case "time":
			found, ok := at.Lookup(s.Topic, s.Partition)
			o.Offset = found.Offset
			if !ok || found.Offset < 0 || found.Timestamp < 0 {
				o.Offset = e.Offset
				notes = append(notes, fmt.Sprintf("%s-%d has no record at that time or later, taking the end", s.Topic, s.Partition))
			}
		}
		if out[s.Topic] == nil {
			out[s.Topic] = map[int32]kadm.ListedOffset{}
		}
		out[s.Topic][s.Partition] = o
	}
	return out, notes, nil
}

func sortedOffsets(l kadm.ListedOffsets) []kadm.ListedOffset {
	var out []kadm.ListedOffset
	l.Each(func(o kadm.ListedOffset) { out = append(out, o) })
	slices.SortFunc(out, func(a, b kadm.ListedOffset) int {
		return cmp.Or(strings.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	})
	return out
}
