package listappend

import (
	"slices"
	"testing"
)

// Two committed transactions after each other, one aborted, one whose outcome nobody knows and that came through.
func history() (txns []Txn, reads, last []Read) {
	txns = []Txn{
		{Name: "a", Begin: 1, End: 2, Appends: []Append{{0, "a0"}, {0, "a1"}, {1, "a2"}}},
		{Name: "b", Begin: 3, End: 6, Appends: []Append{{0, "b0"}, {1, "b1"}}},
		{Name: "c", Begin: 4, End: 5, Appends: []Append{{0, "c0"}}, Outcome: Aborted},
		{Name: "d", Begin: 5, End: 9, Appends: []Append{{0, "d0"}, {1, "d1"}}, Outcome: Unknown},
	}
	return txns, []Read{{0, nil}, {0, []string{"a0", "a1"}}, {1, []string{"a2", "d1"}}}, []Read{{0, []string{"a0", "a1", "b0", "d0"}}, {1, []string{"a2", "d1", "b1"}}}
}

func TestSoundHistory(t *testing.T) {
	// b and d overlap and come in two orders, which Kafka allows.
	if found := Check(history()); len(found) > 0 {
		t.Fatal(found)
	}
}

func TestEachAnomalyIsFound(t *testing.T) {
	for kind, spoil := range map[string]func(txns []Txn, reads, last []Read) ([]Txn, []Read, []Read){
		Phantom: func(txns []Txn, reads, last []Read) ([]Txn, []Read, []Read) {
			last[0].Values = append(last[0].Values, "x")
			return txns, reads, last
		},
		Duplicate: func(txns []Txn, reads, last []Read) ([]Txn, []Read, []Read) {
			last[0].Values = append(last[0].Values, "b0")
			return txns, reads, last
		},
		G1a: func(txns []Txn, reads, last []Read) ([]Txn, []Read, []Read) {
			return txns, append(reads, Read{0, []string{"a0", "a1", "b0", "d0", "c0"}}), []Read{{0, []string{"a0", "a1", "b0", "d0", "c0"}}, last[1]}
		},
		G1b: func(txns []Txn, reads, last []Read) ([]Txn, []Read, []Read) {
			return txns, append(reads, Read{0, []string{"a0"}}), last
		},
		Reordered: func(txns []Txn, reads, last []Read) ([]Txn, []Read, []Read) {
			return txns, append(reads, Read{0, []string{"a0", "a1", "d0"}}), last
		},
		LostWrite: func(txns []Txn, reads, last []Read) ([]Txn, []Read, []Read) {
			last[1].Values = []string{"a2", "d1"}
			return txns, reads, last
		},
		NotAtomic: func(txns []Txn, reads, last []Read) ([]Txn, []Read, []Read) {
			last[0].Values = []string{"a0", "a1", "b0"}
			return txns, reads, last
		},
		G0InRealTime: func(txns []Txn, reads, last []Read) ([]Txn, []Read, []Read) {
			last[0].Values = []string{"b0", "a0", "a1", "d0"}
			return txns, nil, last
		},
	} {
		found := Check(spoil(history()))
		if !slices.ContainsFunc(found, func(a Anomaly) bool { return a.Kind == kind }) {
			t.Errorf("%s: found %v", kind, found)
		}
	}
}
