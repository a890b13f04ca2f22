package tp

import (
	"fmt"
	"testing"
)

func TestByTopic(t *testing.T) {
	for _, c := range []struct {
		in   []Partition
		want string
	}{
		{nil, "[]"},
		{[]Partition{{"a", 2}, {"a", 0}, {"b", 1}}, "[{a [2 0]} {b [1]}]"},
		{[]Partition{{"a", 0}, {"b", 0}, {"a", 1}}, "[{a [0]} {b [0]} {a [1]}]"},
	} {
		if got := fmt.Sprint(ByTopic(c.in)); got != c.want {
			t.Errorf("%v: %s, want %s", c.in, got, c.want)
		}
	}
}
