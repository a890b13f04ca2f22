package leaderepoch

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
)

// ErrMalformed is wrapped by all errors of Parse.
var ErrMalformed = errors.New("malformed leader epoch checkpoint")

// Marshal writes Kafka's checkpoint text, version 0: the version, the number of entries, then one line
// "epoch startOffset" for each.
func Marshal(entries []Entry) []byte {
	b := make([]byte, 0, 8+24*len(entries))
	b = append(b, "0\n"...)
	b = strconv.AppendInt(b, int64(len(entries)), 10)
	b = append(b, '\n')
	for _, e := range entries {
		b = strconv.AppendInt(b, int64(e.Epoch), 10)
		b = append(b, ' ')
		b = strconv.AppendInt(b, e.StartOffset, 10)
		b = append(b, '\n')
	}
	return b
}

// Parse reads that text. An empty file holds no entries. Fields may be apart by any white space; a count that
// does not match, another version, and entries that do not rise in both fields are errors.
func Parse(b []byte) ([]Entry, error) {
	if len(b) == 0 {
		return nil, nil
	}
	lines := bytes.Split(bytes.TrimSuffix(b, []byte("\n")), []byte("\n"))
	if v := string(bytes.TrimSpace(lines[0])); v != "0" {
		return nil, fmt.Errorf("%w: version %.20q, want 0", ErrMalformed, v)
	}
	if len(lines) < 2 {
		return nil, fmt.Errorf("%w: no entry count", ErrMalformed)
	}
	count, err := strconv.ParseInt(string(bytes.TrimSpace(lines[1])), 10, 32)
	if err != nil || count != int64(len(lines)-2) {
		return nil, fmt.Errorf("%w: count %.20q for %d lines", ErrMalformed, lines[1], len(lines)-2)
	}
	var entries []Entry
	for i, line := range lines[2:] {
		f := bytes.Fields(line)
		if len(f) != 2 {
			return nil, fmt.Errorf("%w: line %d: want 2 fields, have %d", ErrMalformed, i+3, len(f))
		}
		epoch, err1 := strconv.ParseInt(string(f[0]), 10, 32)
		start, err2 := strconv.ParseInt(string(f[1]), 10, 64)
		if err1 != nil || err2 != nil || epoch < 0 || start < 0 {
			return nil, fmt.Errorf("%w: line %d: %.60q", ErrMalformed, i+3, line)
		}
		e := Entry{int32(epoch), start}
		if n := len(entries); n > 0 && (entries[n-1].Epoch >= e.Epoch || entries[n-1].StartOffset >= e.StartOffset) {
			return nil, fmt.Errorf("%w: line %d: %v after %v", ErrMalformed, i+3, e, entries[n-1])
		}
		entries = append(entries, e)
	}
	return entries, nil
}
