package remotelog

import (
	"bytes"
	"encoding/hex"
	"errors"
	"reflect"
	"testing"

	"pgregory.net/rapid"

	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/tp"
)

func id(t testing.TB, s string) tp.UUID {
	t.Helper()
	u, err := tp.ParseUUID(s)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// The bytes are those that Kafka's own serializer gave.
func TestRecordsAreKafkas(t *testing.T) {
	of := PartitionID{"foo", id(t, "LWgrMmVrT0a__7a4SasuPA"), 0}
	segment := id(t, "bCqX9U--S-6U8XUM9II25Q")
	head := "0004666f6f2d682b32656b4f46bfffb6b849ab2e3c0000000000" + "6c2a97f54fbe4bee94f1750cf48236e500"
	started := Segment{PartitionID: of, ID: segment, Start: 0, End: 99, Broker: 1, MaxTimestamp: 1000, EventTime: 2000, Size: 1024,
		Epochs: []leaderepoch.Entry{{Epoch: 0, StartOffset: 0}, {Epoch: 2, StartOffset: 50}}}
	empty := started
	empty.TxnIndexEmpty = true
	body := "00000000000000000000000000000063" + "00000001" + "00000000000003e8" + "00000000000007d0" + "03" + "00000000000000000000000000" + "00000002000000000000003200" + "00000400" + "00" + "00"
	for name, c := range map[string]struct {
		hex  string
		want Record
	}{
		"segment":             {"0100" + head + body + "00", &started},
		"segment without txn": {"0100" + head + body + "01000101", &empty},
		"update":              {"0101" + head + "00000001" + "0000000000000bb8" + "030102" + "01" + "00", &Update{of, segment, 1, 3000, []byte{1, 2}, CopyFinished}},
		"update, no custom":   {"0101" + head + "00000001" + "0000000000000fa0" + "00" + "02" + "00", &Update{of, segment, 1, 4000, nil, DeleteStarted}},
		"partition":           {"0102" + head[:52] + "00000001" + "0000000000001388" + "00" + "00", &PartitionDelete{of, 1, 5000, 0}},
	} {
		b, err := hex.DecodeString(c.hex)
		if err != nil {
			t.Fatal(err)
		}
		got, err := Parse(b)
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if again := Marshal(c.want); !bytes.Equal(again, b) {
			t.Errorf("%s: written as %x", name, again)
		}
	}
}

func TestForeignBytesAreRefused(t *testing.T) {
	good := Marshal(&Update{PartitionID: PartitionID{Topic: "t"}, Custom: []byte("x"), State: CopyFinished})
	for n := range good {
		if _, err := Parse(good[:n]); !errors.Is(err, ErrMalformed) {
			t.Errorf("%d of %d bytes: %v", n, len(good), err)
		}
	}
	for name, b := range map[string][]byte{
		"another frame":   append([]byte{2}, good[1:]...),
		"another kind":    {1, 9, 0, 1, 2, 3},
		"another version": {1, 1, 1, 0},
	} {
		if _, err := Parse(b); !errors.Is(err, ErrUnknown) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, b := range map[string][]byte{
		"bytes left over": append(good[:len(good):len(good)], 0),
		"a long name":     {1, 2, 0, 0xff, 0xff, 0xff, 0xff, 0x0f},
		"many epochs":     append([]byte{1, 3, 0}, append(make([]byte, 16+36), 0xff, 0xff, 0xff, 0xff, 0x0f)...),
	} {
		if _, err := Parse(b); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A field of a later Kafka is skipped.
	if r, err := Parse(append(good[:len(good)-1:len(good)-1], 1, 7, 2, 1, 2)); err != nil || r.(*Update).State != CopyFinished {
		t.Errorf("an unknown tag: %v, %v", r, err)
	}
}

func drawRecord(t *rapid.T) Record {
	of := PartitionID{rapid.String().Draw(t, "topic"), drawID(t, "topic id"), rapid.Int32().Draw(t, "partition")}
	custom := []byte(nil)
	if rapid.Bool().Draw(t, "has custom") {
		custom = append([]byte{}, rapid.SliceOf(rapid.Byte()).Draw(t, "custom")...)
	}
	s := Segment{PartitionID: of, ID: drawID(t, "id"), Start: rapid.Int64().Draw(t, "start"), End: rapid.Int64().Draw(t, "end"), Broker: 3, MaxTimestamp: -1,
		EventTime: rapid.Int64().Draw(t, "time"), Size: rapid.Int32().Draw(t, "size"), Custom: custom, State: State(rapid.Int8().Draw(t, "state")), TxnIndexEmpty: rapid.Bool().Draw(t, "empty")}
	for i := range rapid.IntRange(0, 4).Draw(t, "epochs") {
		s.Epochs = append(s.Epochs, leaderepoch.Entry{Epoch: int32(i), StartOffset: rapid.Int64().Draw(t, "epoch")})
	}
	switch rapid.IntRange(0, 3).Draw(t, "kind") {
	case 0:
		return &s
	case 1:
		return &Update{of, s.ID, 4, s.EventTime, custom, s.State}
	case 2:
		return &PartitionDelete{of, 5, s.EventTime, int8(s.State)}
	}
	s.PartitionID = PartitionID{}
	return &Snapshot{s}
}

func drawID(t *rapid.T, name string) (u tp.UUID) {
	copy(u[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, name))
	return u
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := drawRecord(t)
		got, err := Parse(Marshal(r))
		if err != nil || !reflect.DeepEqual(got, r) {
			t.Fatalf("%+v became %+v, %v", r, got, err)
		}
	})
}

func FuzzParse(f *testing.F) {
	f.Add(Marshal(&Segment{PartitionID: PartitionID{Topic: "t"}, Epochs: []leaderepoch.Entry{{Epoch: 1, StartOffset: 2}}, TxnIndexEmpty: true}))
	f.Add(Marshal(&Update{Custom: []byte("x")}))
	f.Add(Marshal(&PartitionDelete{}))
	f.Add(Marshal(&Snapshot{}))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := Parse(b)
		if err != nil {
			return
		}
		again, err := Parse(Marshal(r))
		if err != nil || !reflect.DeepEqual(again, r) {
			t.Fatalf("%+v became %+v, %v", r, again, err)
		}
	})
}

func TestMetadataPartition(t *testing.T) {
	for _, c := range []struct {
		topic string
		want  map[int32]int32
	}{
		{"LWgrMmVrT0a__7a4SasuPA", map[int32]int32{0: 1, 1: 18, 2: 30, 7: 23, 49: 12, 1000: 34}},
		{"o8CQPT86QQmbFmi3xRmiHA", map[int32]int32{0: 31, 1: 21, 2: 20, 7: 31, 49: 40, 1000: 40}},
		{"AAAAAAAAAAAAAAAAAAAAAQ", map[int32]int32{0: 35, 1: 6, 2: 18, 7: 46, 49: 43, 1000: 27}},
		{"MWJ6FHTfRYy67jzwZdeqSQ", map[int32]int32{0: 42, 1: 45, 7: 26}},
		{"tqimKeZwStOEOwRzT3L5oQ", map[int32]int32{0: 15, 1: 47, 7: 30}},
	} {
		for p, want := range c.want {
			if got := MetadataPartition(id(t, c.topic), p, 50); got != want {
				t.Errorf("%s-%d: %d instead of %d", c.topic, p, got, want)
			}
		}
	}
}
