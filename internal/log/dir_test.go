package log

import (
	"errors"
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/varve-io/varve/internal/tp"
)

func newRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 3)) }

func TestCheckpointText(t *testing.T) {
	offsets := map[tp.Partition]int64{{Topic: "b", Index: 0}: 7, {Topic: "a-1", Index: 10}: 0, {Topic: "a-1", Index: 2}: 1 << 40}
	b := MarshalCheckpoint(offsets)
	if want := "0\n3\na-1 2 1099511627776\na-1 10 0\nb 0 7\n"; string(b) != want {
		t.Errorf("got %q", b)
	}
	if got, err := ParseCheckpoint(b); err != nil || !maps.Equal(got, offsets) {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := ParseCheckpoint(nil); err != nil || len(got) != 0 {
		t.Errorf("empty: %v, %v", got, err)
	}
	for _, bad := range []string{"1\n0\n", "0\n", "0\n2\na 0 1\n", "0\n1\na 0\n", "0\n1\na x 1\n", "0\n1\na -1 1\n", "0\n2\na 0 1\na 0 2\n", "0\n99999999999\n"} {
		if _, err := ParseCheckpoint([]byte(bad)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestMeta(t *testing.T) {
	m := Meta{ClusterID: "LWgrMmVrT0a__7a4SasuPA", NodeID: 3, DirectoryID: tp.UUID{1, 2}}
	got, err := ParseMeta(MarshalMeta(m))
	if err != nil || got != m {
		t.Errorf("got %+v, %v", got, err)
	}
	if got, err := ParseMeta([]byte("#\n#Sun Nov 29 2026\nnode.id=1\nversion=1\ncluster.id=x\\=y\nother=z\n")); err != nil || got.ClusterID != "x=y" || !got.DirectoryID.IsZero() {
		t.Errorf("got %+v, %v", got, err)
	}
	for _, bad := range []string{"", "version=1\nnode.id=1\n", "version=0\nnode.id=1\ncluster.id=x\n", "version=1\nnode.id=x\ncluster.id=x\n", "version=1\nnode.id=1\ncluster.id=x\ndirectory.id=1\n"} {
		if _, err := ParseMeta([]byte(bad)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestPartitionMetadata(t *testing.T) {
	id, err := tp.ParseUUID("LWgrMmVrT0a__7a4SasuPA")
	if err != nil {
		t.Fatal(err)
	}
	b := marshalMetadata(id)
	if string(b) != "version: 0\ntopic_id: LWgrMmVrT0a__7a4SasuPA" {
		t.Errorf("got %q", b)
	}
	if got, err := parseMetadata(append(b, '\n')); err != nil || got != id {
		t.Errorf("got %v, %v", got, err)
	}
	for _, bad := range []string{"", "version: 0", "version: -1\ntopic_id: LWgrMmVrT0a__7a4SasuPA", "version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAA", "version: 0\ntopic_id: x", "a: b\nc: d\ne: f"} {
		if _, err := parseMetadata([]byte(bad)); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
}

func FuzzParsers(f *testing.F) {
	f.Add([]byte("0\n1\na 0 1\n"))
	f.Add([]byte("0\n5 3 true\n"))
	f.Add([]byte("version: 0\ntopic_id: LWgrMmVrT0a__7a4SasuPA"))
	f.Add(MarshalMeta(Meta{ClusterID: "c", NodeID: 1}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if m, err := ParseCheckpoint(b); err == nil {
			if again, err := ParseCheckpoint(MarshalCheckpoint(m)); err != nil || !maps.Equal(m, again) {
				t.Fatalf("%v is not stable: %v, %v", m, again, err)
			}
		}
		if r, err := parseRestart(b); err == nil {
			if again, err := parseRestart(r.marshal()); err != nil || again != r {
				t.Fatalf("%v is not stable: %v, %v", r, again, err)
			}
		}
		_, _ = parseMetadata(b)
		_, _ = ParseMeta(b)
	})
}
