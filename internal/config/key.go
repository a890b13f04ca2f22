// Package config is the one table of configuration keys: names, types, defaults, bounds and what each is for.
// Broker keys and topic keys carry Kafka's names wherever Kafka has one. The table validates files, flags, and the
// admin APIs, and it is where docs/configuration.md comes from. It is pure: parsing text, nothing else.
package config

import (
	"fmt"
	"math"
	"sort"
	"strconv"
	"strings"
)

// Kind is the type of a value, as DescribeConfigs reports it.
type Kind int8

// The numbers are those of DescribeConfigs (KIP-226, ConfigType).
const (
	Boolean  Kind = 1
	String   Kind = 2
	Int      Kind = 3
	Short    Kind = 4
	Long     Kind = 5
	Double   Kind = 6
	List     Kind = 7
	Class    Kind = 8
	Password Kind = 9
)

func (k Kind) String() string {
	return [...]string{"", "boolean", "string", "int", "short", "long", "double", "list", "class", "password"}[k]
}

// Mode says where and when a value may change.
type Mode int8

const (
	ReadOnly Mode = iota // at start only
	Cluster              // while running, for the whole cluster (DescribeConfigs source 3) or one broker
)

// Key is one row of the table.
type Key struct {
	Name     string
	Kind     Kind
	Default  string
	Min, Max float64  // numeric bounds, inclusive; both 0 means none
	OneOf    []string // allowed values of a String, or of each element of a List
	Mode     Mode
	Synonym  string // topic keys: the broker key that supplies the default
	Hidden   bool   // accepted but not listed unless set
	Doc      string
	check    func(string) error
}

// Normalize trims a value and rejects it with a reason that names the key and the rule. The returned text is what is stored.
func (k *Key) Normalize(value string) (string, error) {
	v := strings.TrimSpace(value)
	bad := func(why string) (string, error) {
		return "", fmt.Errorf("Invalid value %s for configuration %s: %s", value, k.Name, why)
	}
	switch k.Kind {
	case Boolean:
		switch strings.ToLower(v) {
		case "true", "false":
			v = strings.ToLower(v)
		default:
			return bad("Expected value to be either true or false")
		}
	case Int, Short, Long:
		bits := map[Kind]int{Int: 32, Short: 16, Long: 64}[k.Kind]
		n, err := strconv.ParseInt(v, 10, bits)
		if err != nil {
			return bad("Not a number of type " + strings.ToUpper(k.Kind.String()))
		}
		if why := k.bounds(float64(n)); why != "" {
			return bad(why)
		}
		v = strconv.FormatInt(n, 10)
	case Double:
		f, err := strconv.ParseFloat(v, 64)
		if err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
			return bad("Not a number of type DOUBLE")
		}
		if why := k.bounds(f); why != "" {
			return bad(why)
		}
	case List:
		items := SplitList(v)
		seen := map[string]bool{}
		for _, item := range items {
			if item == "" {
				return bad("Empty element in the list")
			}
			if len(k.OneOf) > 0 && !contains(k.OneOf, item) {
				return bad("String must be one of: " + strings.Join(k.OneOf, ", "))
			}
			if seen[item] {
				return bad("Duplicate element " + item)
			}
			seen[item] = true
		}
		v = strings.Join(items, ",")
	case String:
		if len(k.OneOf) > 0 && !contains(k.OneOf, v) {
			return bad("String must be one of: " + strings.Join(k.OneOf, ", "))
		}
	}
	if k.check != nil {
		if err := k.check(v); err != nil {
			return bad(err.Error())
		}
	}
	return v, nil
}

func (k *Key) bounds(n float64) string {
	if k.Min == 0 && k.Max == 0 {
		return ""
	}
	if n < k.Min {
		return fmt.Sprintf("Value must be at least %s", number(k.Min))
	}
	if k.Max != 0 && n > k.Max {
		return fmt.Sprintf("Value must be no more than %s", number(k.Max))
	}
	return ""
}

func number(f float64) string { return strconv.FormatFloat(f, 'f', -1, 64) }

// SplitList splits Kafka's comma lists; the empty text is the empty list.
func SplitList(v string) []string {
	if strings.TrimSpace(v) == "" {
		return nil
	}
	items := strings.Split(v, ",")
	for i := range items {
		items[i] = strings.TrimSpace(items[i])
	}
	return items
}

func contains(list []string, v string) bool {
	for _, s := range list {
		if s == v {
			return true
		}
	}
	return false
}

// Table is a set of keys by name. It is immutable.
type Table struct {
	keys  []Key
	index map[string]int
}

func newTable(keys ...Key) *Table {
	t := &Table{keys: keys, index: make(map[string]int, len(keys))}
	sort.Slice(t.keys, func(i, j int) bool { return t.keys[i].Name < t.keys[j].Name })
	for i, k := range t.keys {
		if _, twice := t.index[k.Name]; twice {
			panic("config: key " + k.Name + " is in the table twice")
		}
		t.index[k.Name] = i
	}
	return t
}

// Lookup finds a key by name.
func (t *Table) Lookup(name string) (*Key, bool) {
	i, ok := t.index[name]
	if !ok {
		return nil, false
	}
	return &t.keys[i], true
}

// Keys lists the table in name order. The slice is shared: do not modify it.
func (t *Table) Keys() []Key { return t.keys }

// Nearest names the known key most like name, or "" if none is close: the hint for a typing mistake.
func (t *Table) Nearest(name string) string {
	best, at := "", len(name)/3+2
	for i := range t.keys {
		if d := distance(name, t.keys[i].Name); d < at {
			best, at = t.keys[i].Name, d
		}
	}
	return best
}

// distance is the Levenshtein distance of two short strings.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := diagonal
			if a[i-1] != b[j-1] {
				cost = 1 + min(diagonal, row[j], row[j-1])
			}
			diagonal, row[j] = row[j], cost
		}
	}
	return row[len(b)]
}
