package config

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"sort"
	"strconv"
	"strings"
	"time"
)

// Values holds one validated value for every key of its table that was set, and answers defaults for the rest.
// It is immutable; With returns a changed copy. Typed getters panic on a name that the table lacks, which is a programming error.
type Values struct {
	table *Table
	set   map[string]string
}

// NewValues validates raw settings against the table. All problems are reported at once, joined in key order.
func (t *Table) NewValues(raw map[string]string) (Values, error) {
	names := make([]string, 0, len(raw))
	for name := range raw {
		names = append(names, name)
	}
	sort.Strings(names)
	set := make(map[string]string, len(raw))
	var problems []error
	for _, name := range names {
		k, ok := t.Lookup(name)
		if !ok {
			problems = append(problems, t.unknown(name))
			continue
		}
		v, err := k.Normalize(raw[name])
		if err != nil {
			problems = append(problems, err)
			continue
		}
		set[name] = v
	}
	return Values{t, set}, errors.Join(problems...)
}

func (t *Table) unknown(name string) error {
	if near := t.Nearest(name); near != "" {
		return fmt.Errorf("Unknown configuration key %s: did you mean %s?", name, near)
	}
	return fmt.Errorf("Unknown configuration key %s", name)
}

// With returns a copy in which the given raw values replace those of v.
func (v Values) With(raw map[string]string) (Values, error) {
	merged := make(map[string]string, len(v.set)+len(raw))
	for k, s := range v.set {
		merged[k] = s
	}
	for k, s := range raw {
		merged[k] = s
	}
	return v.table.NewValues(merged)
}

// IsSet reports whether the key was given a value of its own.
func (v Values) IsSet(name string) bool { _, ok := v.set[name]; return ok }

// Get is the text of the value, or the default.
func (v Values) Get(name string) string {
	if s, ok := v.set[name]; ok {
		return s
	}
	return v.key(name).Default
}

func (v Values) key(name string) *Key {
	k, ok := v.table.Lookup(name)
	if !ok {
		panic("config: no key " + name)
	}
	return k
}

// Int64 is the value of an integer key.
func (v Values) Int64(name string) int64 {
	n, err := strconv.ParseInt(v.Get(name), 10, 64)
	if err != nil {
		panic("config: " + name + " is no integer: " + err.Error())
	}
	return n
}

// Int is Int64 for keys that hold 32 bits.
func (v Values) Int(name string) int { return int(v.Int64(name)) }

// Float is the value of a key of kind Double.
func (v Values) Float(name string) float64 {
	f, err := strconv.ParseFloat(v.Get(name), 64)
	if err != nil {
		panic("config: " + name + " is no number: " + err.Error())
	}
	return f
}

// Millis is the value of a key in milliseconds.
func (v Values) Millis(name string) time.Duration {
	return time.Duration(v.Int64(name)) * time.Millisecond
}

// Bool is the value of a boolean key.
func (v Values) Bool(name string) bool { return v.Get(name) == "true" }

// List is the value of a list key.
func (v Values) List(name string) []string { return SplitList(v.Get(name)) }

// Explicit lists the keys that were set, in name order.
func (v Values) Explicit() []string {
	names := make([]string, 0, len(v.set))
	for name := range v.set {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

// ReadProperties reads the syntax of server.properties: key=value, key:value or key value, # and ! comments, \ at a line's
// end continues it. The same key twice is an error, since one of the two would be silently lost.
func ReadProperties(r io.Reader) (map[string]string, error) {
	raw := map[string]string{}
	scanner := bufio.NewScanner(r)
	scanner.Buffer(make([]byte, 64<<10), 1<<20)
	var problems []error
	line, pending := 0, ""
	next := func() (string, bool) {
		if scanner.Scan() {
			line++
			return scanner.Text(), true
		}
		return "", pending != "" // what the last line wanted to continue ends with the file
	}
	for text, more := next(); more; text, more = next() {
		text = strings.TrimLeft(text, " \t\f")
		if pending == "" && (text == "" || text[0] == '#' || text[0] == '!') {
			continue
		}
		text = pending + text
		if slashes := len(text) - len(strings.TrimRight(text, `\`)); slashes%2 == 1 {
			pending = strings.TrimSuffix(text, `\`)
			continue
		}
		pending = ""
		name, value := splitProperty(text)
		if name == "" || value == "" && !strings.ContainsAny(text, "=:") {
			problems = append(problems, fmt.Errorf("line %d: want key=value, got %q", line, text))
			continue
		}
		if _, twice := raw[name]; twice {
			problems = append(problems, fmt.Errorf("line %d: %s is set twice", line, name))
			continue
		}
		raw[name] = strings.ReplaceAll(value, `\\`, `\`)
	}
	if err := scanner.Err(); err != nil {
		problems = append(problems, err)
	}
	return raw, errors.Join(problems...)
}

// splitProperty cuts at the first =, : or blank; blanks around an = or : belong to neither side.
func splitProperty(text string) (name, value string) {
	i := strings.IndexAny(text, "=: \t\f")
	if i < 0 {
		return text, ""
	}
	value = strings.TrimSpace(text[i:])
	if value != "" && (value[0] == '=' || value[0] == ':') {
		value = strings.TrimSpace(value[1:])
	}
	return text[:i], value
}
