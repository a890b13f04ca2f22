package assignor

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/varve-io/varve/internal/grouprecord"
	"github.com/varve-io/varve/internal/tp"
)

func topic(n byte) tp.UUID { return tp.UUID{n} }

func member(id string, topics ...byte) Member {
	m := Member{ID: id}
	for _, t := range topics {
		m.Topics = append(m.Topics, topic(t))
	}
	return m
}

// show is an assignment in words.
func show(out map[string]grouprecord.Assignment) string {
	s := ""
	for _, id := range slices.Sorted(maps.Keys(out)) {
		s += id + ":"
		for _, t := range slices.SortedFunc(maps.Keys(out[id]), compareIDs) {
			s += fmt.Sprintf("%d%v", t[0], out[id][t])
		}
		s += " "
	}
	return s
}

func TestRange(t *testing.T) {
	static := member("z", 1)
	static.InstanceID = "i"
	for _, c := range []struct {
		members []Member
		topics  Topics
		want    string
	}{
		{nil, nil, ""},
		{[]Member{member("a", 1, 2), member("b", 1, 2)}, Topics{topic(1): 3, topic(2): 3}, "a:1[0 1]2[0 1] b:1[2]2[2] "},
		{[]Member{member("a", 1), member("b", 1), member("c", 1)}, Topics{topic(1): 2}, "a:1[0] b:1[1] "},
		{[]Member{member("a", 1), member("b", 1, 2)}, Topics{topic(1): 3, topic(2): 2}, "a:1[0 1] b:1[2]2[0 1] "},
		{[]Member{member("a", 1), static}, Topics{topic(1): 3}, "a:1[2] z:1[0 1] "},
	} {
		if got := show(Range(c.members, c.topics)); got != c.want {
			t.Errorf("want %q, got %q", c.want, got)
		}
	}
}

func TestUniform(t *testing.T) {
	had := func(m Member, topicID byte, partitions ...int32) Member {
		m.Had = grouprecord.Assignment{topic(topicID): partitions}
		return m
	}
	for _, c := range []struct {
		members []Member
		topics  Topics
		want    string
	}{
		{nil, nil, ""},
		{[]Member{member("a", 1), member("b", 1)}, Topics{topic(1): 3}, "a:1[0 2] b:1[1] "},
		// Who has the most keeps one more; what is beyond that moves.
		{[]Member{member("a", 1), had(member("b", 1), 1, 0, 1, 2)}, Topics{topic(1): 3}, "a:1[0] b:1[1 2] "},
		{[]Member{had(member("a", 1), 1, 0, 1), had(member("b", 1), 1, 2, 3), member("c", 1)}, Topics{topic(1): 4}, "a:1[0 1] b:1[3] c:1[2] "},
		// A topic that is gone, a partition that there never was, and one that two had.
		{[]Member{had(member("a", 1), 9, 0), had(member("b", 1), 1, 7)}, Topics{topic(1): 2}, "a:1[0] b:1[1] "},
		{[]Member{had(member("a", 1), 1, 0), had(member("b", 1), 1, 0)}, Topics{topic(1): 2}, "a:1[0] b:1[1] "},
		// Only b reads topic 2, so that a gets all of topic 1.
		{[]Member{member("a", 1), member("b", 1, 2)}, Topics{topic(1): 2, topic(2): 2}, "a:1[0 1] b:2[0 1] "},
		{[]Member{had(member("a", 1), 1, 0, 1, 2, 3), member("b", 1, 2)}, Topics{topic(1): 4, topic(2): 1}, "a:1[0 1 2] b:1[3]2[0] "},
	} {
		if got := show(Uniform(c.members, c.topics)); got != c.want {
			t.Errorf("want %q, got %q", c.want, got)
		}
	}
}

// Whatever members subscribe to and had: every partition has exactly one owner that subscribes to it, uniform loads are balanced, and what
// is balanced stays.
func TestRandomAssignments(t *testing.T) {
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 0))
		topics := Topics{}
		for i := range byte(r.IntN(6)) {
			topics[topic(i+1)] = int32(1 + r.IntN(12))
		}
		ids := slices.SortedFunc(maps.Keys(topics), compareIDs)
		var members []Member
		for i := range 1 + r.IntN(8) {
			m := Member{ID: fmt.Sprint("m", i), Had: grouprecord.Assignment{}}
			for _, t := range ids {
				if seed%2 == 0 || r.IntN(2) == 0 {
					m.Topics = append(m.Topics, t)
				}
				if r.IntN(2) == 0 {
					m.Had[t] = []int32{int32(r.IntN(14)), int32(r.IntN(14))}
				}
			}
			members = append(members, m)
		}
		for name, assign := range map[string]Assign{UniformName: Uniform, RangeName: Range} {
			out := assign(members, topics)
			check(t, seed, name, members, topics, out)
			if name == UniformName {
				again := slices.Clone(members)
				for i := range again {
					again[i].Had = out[again[i].ID]
				}
				if same := Uniform(again, topics); !reflect.DeepEqual(same, out) {
					t.Fatalf("seed %d: a balanced assignment changed:\n%s\n%s", seed, show(out), show(same))
				}
			}
		}
	}
}

func check(t *testing.T, seed uint64, name string, members []Member, topics Topics, out map[string]grouprecord.Assignment) {
	t.Helper()
	owner := map[tp.UUID]map[int32]string{}
	load := map[string]int{}
	for _, m := range members {
		for id, partitions := range out[m.ID] {
			if !slices.Contains(m.Topics, id) {
				t.Fatalf("seed %d %s: %s does not subscribe to %v", seed, name, m.ID, id)
			}
			if owner[id] == nil {
				owner[id] = map[int32]string{}
			}
			for _, p := range partitions {
				if other, twice := owner[id][p]; twice || p < 0 || p >= topics[id] {
					t.Fatalf("seed %d %s: %v-%d of %d goes to %s and %q", seed, name, id[0], p, topics[id], m.ID, other)
				}
				owner[id][p] = m.ID
				load[m.ID]++
			}
		}
	}
	for _, m := range members {
		for _, id := range m.Topics {
			if len(owner[id]) != int(topics[id]) {
				t.Fatalf("seed %d %s: %d of %d partitions of %v have an owner", seed, name, len(owner[id]), topics[id], id[0])
			}
			if name != UniformName {
				continue
			}
			for p, o := range owner[id] {
				if load[o]-load[m.ID] > 1 {
					t.Fatalf("seed %d: %v-%d is %s's, who has %d, and %s has %d: %s", seed, id[0], p, o, load[o], m.ID, load[m.ID], show(out))
				}
			}
		}
	}
}

func BenchmarkUniform(b *testing.B) {
	topics := Topics{}
	var ids []tp.UUID
	for i := range byte(20) {
		topics[topic(i+1)] = 500
		ids = append(ids, topic(i+1))
	}
	members := make([]Member, 500)
	for i := range members {
		members[i] = Member{ID: fmt.Sprintf("m%03d", i), Topics: ids}
	}
	for b.Loop() {
		Uniform(members, topics)
	}
}
