package txn

import (
	"encoding/hex"
	"math"
	"reflect"
	"testing"

	"github.com/varve-io/varve/internal/tp"
)

func reload(t *testing.T, r Record) Transaction {
	t.Helper()
	e, ok, err := ParseRecord(r.Key, r.Value)
	if err != nil || !ok || e.Transaction == nil {
		t.Fatalf("%+v %v %v", e, ok, err)
	}
	return *e.Transaction
}

func TestRecordsInEveryState(t *testing.T) {
	for _, s := range states {
		for _, v2 := range []bool{false, true} {
			x := at(s, v2)
			if v2 {
				x.previousID = 6
			}
			if v2 && s.prepared() {
				x.nextID, x.epoch = 1000, math.MaxInt16
			}
			if got := reload(t, x.Record()); !reflect.DeepEqual(got, x) {
				t.Errorf("%s: %+v is not %+v", s, got, x)
			}
			if e, ok, err := ParseRecord(Tombstone("x").Key, Tombstone("x").Value); err != nil || !ok || e.ID != "x" || e.Transaction != nil {
				t.Error(e, ok, err)
			}
		}
	}
	x := at(Empty, true).InitProducerID(InitRequest{TimeoutMs: 1, TimeoutMaxMs: 1, ProducerID: 7, Epoch: 5}, 1).Next
	if got := reload(t, x.Record()); got.lastEpoch != NoEpoch || x.lastEpoch != 5 {
		t.Error("the last epoch is kept in memory alone")
	}
}

// The bytes that Kafka's schema asks for, written by hand.
var (
	keyX = unhex("0000" + "0001" + "78")
	// Version 0: producer 7, epoch 5, timeout 1000, Ongoing, one topic "a" with partitions 1 and 0, updated 200, started 100.
	valueV0 = unhex("0000" + "0000000000000007" + "0005" + "000003e8" + "01" + "00000001" + "000161" + "00000002" + "00000001" + "00000000" +
		"00000000000000c8" + "0000000000000064")
	// Version 1: the same in PrepareCommit, with previous producer id 6, next 1000, and transaction version 2.
	valueV1 = unhex("0001" + "0000000000000007" + "0005" + "000003e8" + "02" + "02" + "0261" + "03" + "00000000" + "00000001" + "00" +
		"00000000000000c8" + "0000000000000064" + "03" + "00080000000000000006" + "010800000000000003e8" + "02020002")
	// Version 1, Empty: the list is null; a next producer epoch (KIP-939) and an unknown tag are passed over.
	valueEmpty = unhex("0001" + "0000000000000007" + "0000" + "000003e8" + "00" + "00" + "00000000000000c8" + "ffffffffffffffff" + "02" + "03020001" + "0901ff")
)

func unhex(s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		panic(err)
	}
	return b
}

func TestRecordBytes(t *testing.T) {
	x := reload(t, Record{keyX, valueV0})
	want := at(Ongoing, false)
	want.partitions, want.previousID = []tp.Partition{p0, p1}, NoProducerID
	if !reflect.DeepEqual(x, want) {
		t.Errorf("%+v", x)
	}
	x = reload(t, Record{keyX, valueV1})
	want = at(PrepareCommit, true)
	want.partitions, want.previousID, want.nextID = []tp.Partition{p0, p1}, 6, 1000
	if !reflect.DeepEqual(x, want) {
		t.Errorf("%+v", x)
	}
	if r := x.Record(); string(r.Key) != string(keyX) || string(r.Value) != string(valueV1) {
		t.Errorf("%x\n%x", r.Key, r.Value)
	}
	x = reload(t, Record{keyX, valueEmpty})
	want = at(Empty, false)
	want.previousID, want.epoch = NoProducerID, 0
	if !reflect.DeepEqual(x, want) {
		t.Errorf("%+v", x)
	}
}

func TestParseRecordRefuses(t *testing.T) {
	if _, ok, err := ParseRecord([]byte{0, 1, 9}, nil); ok || err != nil {
		t.Error("a key of an unknown version is to be skipped", ok, err)
	}
	change := func(at int, b ...byte) []byte {
		out := append([]byte(nil), valueV1...)
		copy(out[at:], b)
		return out
	}
	for what, r := range map[string]Record{
		"no key":                     {nil, nil},
		"a key of one byte":          {[]byte{0}, nil},
		"a key that is cut":          {keyX[:4], nil},
		"an empty value":             {keyX, []byte{}},
		"an unknown version":         {keyX, change(0, 0, 2)},
		"a negative version":         {keyX, change(0, 0xff, 0xff)},
		"no producer id":             {keyX, change(2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff)},
		"a negative epoch":           {keyX, change(10, 0xff)},
		"state Dead":                 {keyX, change(16, 6)},
		"a negative state":           {keyX, change(16, 0xff)},
		"more topics than bytes":     {keyX, change(17, 0x7f)},
		"a topic without a name":     {keyX, append(append(change(17)[:18:18], 1), valueV1[20:]...)},
		"a negative partition":       {keyX, change(21, 0xff)},
		"a negative next id":         {keyX, change(len(valueV1)-12, 0xff)},
		"transaction version 3":      {keyX, change(len(valueV1)-1, 3)},
		"a negative transaction one": {keyX, change(len(valueV1)-2, 0xff)},
	} {
		if e, ok, err := ParseRecord(r.Key, r.Value); err == nil || ok {
			t.Errorf("%s: %+v", what, e)
		}
	}
	for i := range valueV1 {
		if e, ok, err := ParseRecord(keyX, valueV1[:i]); err == nil || ok {
			t.Errorf("cut at %d: %+v", i, e)
		}
	}
}

func FuzzParseRecord(f *testing.F) {
	f.Add(keyX, valueV0)
	f.Add(keyX, valueV1)
	f.Add(keyX, valueEmpty)
	f.Add(Tombstone("x").Key, []byte(nil))
	f.Add([]byte{0, 9}, []byte{1})
	for _, s := range states {
		r := at(s, true).Record()
		f.Add(r.Key, r.Value)
	}
	f.Fuzz(func(t *testing.T, key, value []byte) {
		e, ok, err := ParseRecord(key, value)
		if err != nil || !ok || e.Transaction == nil {
			return
		}
		x := *e.Transaction
		r := x.Record()
		again, ok, err := ParseRecord(r.Key, r.Value)
		if err != nil || !ok || !reflect.DeepEqual(*again.Transaction, x) {
			t.Fatalf("%+v is not stable: %+v, %v, %v", x, again, ok, err)
		}
		// Whatever was read must not make a request panic, nor lead to a record that does not read.
		for _, v2 := range []bool{false, true} {
			for _, s := range []Step{
				x.InitProducerID(InitRequest{TimeoutMs: 1, TimeoutMaxMs: 1, ProducerID: -1, Epoch: -1, V2: v2, Allocate: func() (int64, error) { return math.MaxInt64, nil }}, 1),
				x.AddPartitions(x.producerID, x.epoch, []tp.Partition{p1}, v2, 1),
				x.End(EndRequest{ProducerID: x.producerID, Epoch: x.epoch, V2: v2, Allocate: func() (int64, error) { return math.MaxInt64, nil }}, 1),
				x.Expire(v2, func() (int64, error) { return math.MaxInt64, nil }, math.MaxInt64),
				x.Completed(1),
			} {
				r := s.Next.Record()
				if _, ok, err := ParseRecord(r.Key, r.Value); err != nil || !ok {
					t.Fatalf("%+v: %v", s, err)
				}
			}
		}
	})
}
