package grouprecord

import (
	"encoding/hex"
	"reflect"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/tp"
)

func text(s string) *string { return &s }

// entries are one of each kind, full and bare.
func entries() []Entry {
	id := func(n byte) tp.UUID { return tp.UUID{n, 15: n} }
	group := kmsg.NewGroupMetadataValue()
	group.ProtocolType, group.Generation = "consumer", 4
	key := func(kind Kind, name string) Key { return Key{Kind: kind, Group: "group", Name: name} }
	offset := func(p int32) Key {
		return Key{Kind: KindOffset, Group: "group", Partition: TopicPartition{"topic", p}}
	}
	return []Entry{
		{offset(1), &Offset{5, 2, "m", 9, -1}},
		{offset(2), &Offset{5, -1, "", 9, 77}},
		{offset(3), nil},
		{key(KindClassicGroup, ""), &group},
		{key(KindClassicGroup, ""), nil},
		{key(KindGroupEpoch, ""), &GroupEpoch{7, -123456789}},
		{key(KindGroupEpoch, ""), &GroupEpoch{1, 0}},
		{key(KindGroupEpoch, ""), nil},
		{key(KindPartitions, ""), nil},
		{key(KindMember, "member"), &Member{text("instance"), text("rack"), "client", "/127.0.0.1", []string{"a", "b"}, "c.*", 300_000, text("uniform"), nil}},
		{key(KindMember, "member"), &Member{nil, nil, "", "", nil, "", -1, nil, &Classic{45_000, []Protocol{{"range", []byte{0, 1}}, {"sticky", []byte{9}}}}}},
		{key(KindMember, "member"), nil},
		{key(KindTargetEpoch, ""), &TargetEpoch{7, 1_700_000_000_000}},
		{key(KindTargetEpoch, ""), &TargetEpoch{3, 0}},
		{key(KindTarget, "member"), Assignment{id(2): {0, 1, 7}, id(1): {3}}},
		{key(KindTarget, "member"), Assignment{}},
		{key(KindTarget, "member"), nil},
		{key(KindCurrent, "member"), &Current{7, 6, UnrevokedPartitions, Owned{id(1): {0: 3, 1: 7}}, Owned{id(2): {5: 4}}}},
		{key(KindCurrent, "member"), &Current{-2, 6, Stable, Owned{}, Owned{}}},
		{key(KindRegex, "a.*"), &Regex{[]string{"a", "ab"}, 100, 1_700_000_000_000}},
		{key(KindRegex, "a.*"), nil},
	}
}

func TestRoundTrip(t *testing.T) {
	for _, e := range entries() {
		r := e.Record()
		got, ok, err := Parse(r.Key, r.Value)
		if err != nil || !ok {
			t.Errorf("%s %+v: %v %v", e.Kind, e.Value, ok, err)
			continue
		}
		if v, is := got.Value.(*kmsg.GroupMetadataValue); is {
			v.Version, e.Value.(*kmsg.GroupMetadataValue).Version = 0, 0
		}
		if !reflect.DeepEqual(got, e) {
			t.Errorf("wrote %+v %+v, read %+v", e.Key, e.Value, got)
		}
	}
}

// TestBytes: these are the bytes that Kafka 4.4's own classes write for the same values.
func TestBytes(t *testing.T) {
	for i, want := range map[int]string{
		0:  "0001000567726f75700005746f70696300000001 000300000000000000050000000200016d0000000000000009",
		1:  "0001000567726f75700005746f70696300000002 0001000000000000000500000000000000000009000000000000004d",
		3:  "0002000567726f7570 00030008636f6e73756d657200000004ffffffffffffffffffffffff00000000",
		5:  "0003000567726f7570 000000000007010008fffffffff8a432eb",
		6:  "0003000567726f7570 00000000000100",
		9:  "0005000567726f757000066d656d626572 000009696e7374616e6365057261636b07636c69656e740b2f3132372e302e302e31030261026204632e2a000493e008756e69666f726d01000100",
		10: "0005000567726f757000066d656d626572 0000000001010101ffffffff0001001b010000afc8030672616e67650300010007737469636b7902090000",
		12: "0006000567726f7570 0000000000070100080000018bcfe56800",
		13: "0006000567726f7570 00000000000300",
		14: "0007000567726f757000066d656d626572 0000030100000000000000000000000000000102000000030002000000000000000000000000000002040000000000000001000000070000",
		17: "0008000567726f757000066d656d626572 0000000000070000000601020100000000000000000000000000000103000000000000000101000903000000030000000702020000000000000000000000000000020200000005010005020000000400",
		18: "0008000567726f757000066d656d626572 0000fffffffe0000000600010100",
		19: "0010000567726f75700003612e2a 000003026103616200000000000000640000018bcfe5680000",
	} {
		r := entries()[i].Record()
		if got := hex.EncodeToString(r.Key) + " " + hex.EncodeToString(r.Value); got != want {
			t.Errorf("%s: wrote\n%s, Kafka\n%s", entries()[i].Kind, got, want)
		}
	}
}

// Parsing stops at whatever is cut off or of a version from the future, and skips what it does not know.
func TestDamage(t *testing.T) {
	for _, e := range entries() {
		r := e.Record()
		for n := range r.Key {
			if _, _, err := Parse(r.Key[:n], r.Value); err == nil {
				t.Errorf("%s: a key of %d bytes of %d was read", e.Kind, n, len(r.Key))
			}
		}
		for n := range r.Value {
			// Kafka's old values may end early by a null at the end; the newer ones end with their tags.
			if _, _, err := Parse(r.Key, r.Value[:n]); err == nil && e.Kind > KindClassicGroup {
				t.Errorf("%s: a value of %d bytes of %d was read", e.Kind, n, len(r.Value))
			}
		}
	}
	if _, ok, err := Parse([]byte{0, 11, 0, 1, 'g'}, []byte{0, 0}); ok || err != nil {
		t.Error("a share group's record:", ok, err)
	}
	if _, _, err := Parse(entries()[5].Record().Key, []byte{0, 1, 0, 0, 0, 0, 0}); err == nil || !strings.Contains(err.Error(), "version 1") {
		t.Error(err)
	}
	// Values of an older version have no epochs; a state from the future is unknown; tags from the future are skipped.
	v, _ := hex.DecodeString("0000" + "00000007" + "00000006" + "09" + "02" + "01000000000000000000000000000001" + "02" + "00000003" + "00" + "01" + "01" + "05" + "02" + "abcd")
	e, ok, err := Parse(Entry{Key: Key{Kind: KindCurrent, Group: "g", Name: "m"}}.Record().Key, v)
	if want := (&Current{7, 6, Unknown, Owned{tp.UUID{1, 15: 1}: {3: 7}}, Owned{}}); err != nil || !ok || !reflect.DeepEqual(e.Value, want) {
		t.Error(e.Value, ok, err)
	}
}

func FuzzParse(f *testing.F) {
	for _, e := range entries() {
		r := e.Record()
		f.Add(r.Key, r.Value)
	}
	f.Fuzz(func(t *testing.T, key, value []byte) {
		e, ok, err := Parse(key, value)
		if err != nil || !ok || e.Value == nil {
			return
		}
		switch e.Value.(type) {
		case *PartitionMetadata, *kmsg.GroupMetadataValue:
			return // not written, or as kmsg writes it
		}
		r := e.Record()
		again, ok, err := Parse(r.Key, r.Value)
		if err != nil || !ok || !reflect.DeepEqual(again, e) {
			t.Fatalf("%+v became %+v: %v", e, again, err)
		}
	})
}
