package kafkatier_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"pgregory.net/rapid"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/kafkatier"
	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/remotelog"
	"github.com/varve-io/varve/internal/segment"
	"github.com/varve-io/varve/internal/tp"
)

// upload puts the batches of a log with offsets in [from, to] into the bucket as LocalTieredStorage does, and says so in the
// metadata topic. txns are those that were aborted in it, open the ones that are open at its end.
func upload(t testing.TB, m *memory, metadata *partitionLog, l *partitionLog, number byte, from, to int64, txns []producerstate.AbortedTxn, open []producerstate.Entry) {
	t.Helper()
	s := &remotelog.Segment{PartitionID: remotelog.PartitionID{Topic: l.topic, TopicID: l.id, Index: l.index}, ID: tp.UUID{0x80, number}, Start: from, End: to, TxnIndexEmpty: len(txns) == 0}
	var data, index, txnIndex []byte
	for _, b := range l.batches {
		if b.first < from || b.last > to {
			continue
		}
		if len(data) > 0 { // as dense as an index can be
			index = appendEntry(index, b.last-from, int64(len(data)))
		}
		data = append(data, b.b...)
		if n := len(s.Epochs); n == 0 || s.Epochs[n-1].Epoch != b.epoch {
			s.Epochs = append(s.Epochs, leaderepoch.Entry{Epoch: b.epoch, StartOffset: b.first})
		}
	}
	for _, x := range txns {
		txnIndex = segment.AppendTxn(txnIndex, x)
	}
	s.Size = int32(len(data))
	base := fmt.Sprintf("%s-%d-%s/%020d-%s", l.topic, l.index, l.id, from, s.ID)
	m.objects[base+".log"], m.objects[base+".index"], m.objects[base+".snapshot"] = data, index, producerstate.MarshalSnapshot(open)
	if len(txnIndex) > 0 {
		m.objects[base+".txnindex"] = txnIndex
	}
	metadata.write(t, remotelog.Marshal(s), remotelog.Marshal(&remotelog.Update{PartitionID: s.PartitionID, ID: s.ID, State: remotelog.CopyFinished}))
}

func appendEntry(b []byte, offset, position int64) []byte {
	for _, v := range []int64{offset, position} {
		b = append(b, byte(v>>24), byte(v>>16), byte(v>>8), byte(v))
	}
	return b
}

// writeAs appends ten records of a leader.
func (l *partitionLog) writeAs(t testing.TB, epoch int32, who string) {
	t.Helper()
	if l.epoch = epoch; len(l.lineage) == 0 || l.lineage[len(l.lineage)-1].Epoch != epoch {
		l.lineage = append(l.lineage, leaderepoch.Entry{Epoch: epoch, StartOffset: l.end()})
	}
	for i := range 10 {
		l.write(t, fmt.Appendf(nil, "%s %d", who, i))
	}
}

// An unclean election loses what a leader wrote and uploaded: nobody is shown it, and what was right of its segments is still
// used.
func TestUncleanElection(t *testing.T) {
	store, metadata := &memory{objects: map[string][]byte{}, gets: map[string]int{}}, metadataTopic()
	log := &partitionLog{topic: "t", id: tp.UUID{0xaa}, stable: -1}
	log.writeAs(t, 0, "first")  // 0 to 9
	log.writeAs(t, 0, "second") // 10 to 19
	lost := &partitionLog{topic: log.topic, id: log.id, batches: slices.Clone(log.batches[:15]), lineage: slices.Clone(log.lineage), epoch: 0}
	lost.writeAs(t, 1, "lost")  // 15 to 24, although the first leader had come to 19
	lost.writeAs(t, 1, "lost")  // 25 to 34
	lost.writeAs(t, 1, "lost")  // 35 to 44
	log.writeAs(t, 2, "third")  // 20 to 29
	log.writeAs(t, 2, "fourth") // 30 to 39
	log.writeAs(t, 4, "local")  // 40 to 49
	log.local = 40
	upload(t, store, metadata, lost, 1, 0, 9, nil, nil)
	upload(t, store, metadata, lost, 2, 10, 34, nil, nil) // right up to 14
	upload(t, store, metadata, lost, 3, 16, 39, nil, nil)
	kafka := newFakeKafka(t, log, metadata)
	w := open(t, kafka, store, kafkatier.KafkaLocal(""))
	find := func() *direct.Location {
		loc, err := w.locator.Locate(t.Context(), direct.Query{Topic: "t", Offset: 17, LeaderEpoch: 4})
		if err != nil {
			t.Fatal(err)
		}
		return loc
	}
	if loc := find(); loc != nil {
		t.Fatalf("a lost leader's record in place of an earlier one's: %+v", loc)
	}
	kafka.do(func() { upload(t, store, metadata, log, 4, 15, 39, nil, nil) })
	eventually(t, "the present leader's segment is found", func() bool { return find() != nil })
	want := read(t, kafka, "t", 0, false)
	before := kafka.remoteBytes()
	if got := read(t, kafka, "t", 0, false, kgo.Dialer(w.transport.DialContext)); !slices.Equal(got, want) {
		t.Fatalf("%q\ninstead of %q", got, want)
	}
	if n := kafka.remoteBytes() - before; n > 0 {
		t.Errorf("the broker had to read %d bytes of its tier", n)
	}
	if n := store.asked(tp.UUID{0x80, 3}.String(), ""); n > 0 {
		t.Errorf("%d reads of a segment of a lost leader", n)
	}
	// What the indexes of a segment say of transactions beyond its valid part is of no use to read_committed.
	before = kafka.remoteBytes()
	if got := read(t, kafka, "t", 0, true, kgo.Dialer(w.transport.DialContext)); !slices.Equal(got, want) {
		t.Fatalf("committed: %q\ninstead of %q", got, want)
	}
	if n := kafka.remoteBytes() - before; n == 0 {
		t.Error("a segment that is partly another lineage's was read for read_committed")
	}
	if loc, err := w.locator.Locate(t.Context(), direct.Query{Topic: "t", Offset: 12, LeaderEpoch: 4}); err != nil || loc == nil || loc.EndOffset != 14 || loc.LeaderEpoch != 4 || loc.EndPosition >= loc.Size {
		t.Errorf("%+v, %v", loc, err)
	}
	// Whoever asks as of another epoch is sent to the broker.
	for _, epoch := range []int32{3, 5} {
		if loc, err := w.locator.Locate(t.Context(), direct.Query{Topic: "t", Offset: 12, LeaderEpoch: epoch}); err != nil || loc != nil {
			t.Errorf("epoch %d: %+v, %v", epoch, loc, err)
		}
	}
	// Another leader that has still less.
	kafka.do(func() {
		log.batches, log.lineage = log.batches[:13], log.lineage[:1]
		log.writeAs(t, 6, "last")
	})
	if loc, err := w.locator.Locate(t.Context(), direct.Query{Topic: "t", Offset: 12, LeaderEpoch: 6}); err != nil || loc == nil || loc.EndOffset != 12 {
		t.Errorf("after another election: %+v, %v", loc, err)
	}
	if loc, err := w.locator.Locate(t.Context(), direct.Query{Topic: "t", Offset: 20, LeaderEpoch: 6}); err != nil || loc != nil {
		t.Errorf("what was lost: %+v, %v", loc, err)
	}
}

// eventually polls; a minute is far more than it takes.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	tick, deadline := time.NewTicker(time.Millisecond), time.After(time.Minute)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("it does not come to pass that %s", what)
		}
	}
}

// The metadata topic is followed: new segments are found, and those that are being deleted are not. Partitions that come into use
// later, and a topic that was made anew, are found too.
func TestFollowing(t *testing.T) {
	store, metadata := &memory{objects: map[string][]byte{}, gets: map[string]int{}}, metadataTopic()
	logs := []*partitionLog{{topic: "t", id: tp.UUID{0xaa}, stable: -1}, {topic: "t", id: tp.UUID{0xaa}, index: 1, stable: -1}, {topic: "u", id: tp.UUID{0xbb}, stable: -1}}
	for i, l := range logs {
		for range 4 {
			l.writeAs(t, 0, "x")
		}
		l.local = 30
		upload(t, store, metadata, l, byte(i), 0, 9, nil, nil)
	}
	kafka := newFakeKafka(t, append(logs, metadata)...)
	w := open(t, kafka, store, kafkatier.KafkaLocal(""))
	found := func(l *partitionLog, offset int64) bool {
		loc, err := w.locator.Locate(t.Context(), direct.Query{TopicID: l.id, Partition: l.index, Offset: offset, LeaderEpoch: -1})
		if err != nil {
			t.Fatal(err)
		}
		return loc != nil
	}
	tiered := func(l *partitionLog, offset int64) bool {
		return w.locator.Tiered(direct.Query{TopicID: l.id, Partition: l.index, Offset: offset, LeaderEpoch: -1})
	}
	for i, l := range logs {
		if !found(l, 0) || found(l, 10) || tiered(l, 10) || tiered(l, 35) {
			t.Fatalf("partition %d", i)
		}
		for _, before := range logs[:i] { // what was known stays
			if !found(before, 9) {
				t.Fatalf("partition %d is lost with the next", i-1)
			}
		}
	}
	kafka.do(func() { upload(t, store, metadata, logs[1], 9, 10, 19, nil, nil) })
	eventually(t, "a new segment is found", func() bool { return found(logs[1], 15) })
	if found(logs[0], 15) {
		t.Error("a segment of another partition")
	}
	of := remotelog.PartitionID{Topic: "t", TopicID: logs[1].id, Index: 1}
	kafka.do(func() {
		metadata.write(t, remotelog.Marshal(&remotelog.Update{PartitionID: of, ID: tp.UUID{0x80, 1}, State: remotelog.DeleteStarted}))
	})
	eventually(t, "a segment that is being deleted is not found", func() bool { return !tiered(logs[1], 5) })
	if !found(logs[1], 15) {
		t.Error("the other segment went too")
	}
	// The local start moves on, which the Locator learns in a moment; nothing below it is ever lost to the tier.
	kafka.do(func() { logs[2].local = 5 })
	eventually(t, "what is local is left to the broker", func() bool { return !found(logs[2], 7) })
	if !found(logs[2], 3) {
		t.Error("what is not local is lost")
	}
	// What nobody asks for is forgotten, and read anew for who comes back.
	w.locator.Sweep(time.Now().Add(time.Hour))
	if !found(logs[1], 15) || found(logs[1], 5) || !found(logs[0], 3) {
		t.Error("after a long time something else is found")
	}
	if loc, err := w.locator.Locate(t.Context(), direct.Query{Topic: "none", LeaderEpoch: -1}); loc != nil || err != nil {
		t.Errorf("a topic that there is not: %+v, %v", loc, err)
	}
	if w.locator.Tiered(direct.Query{Topic: "none", LeaderEpoch: -1}) {
		t.Error("a topic that there is not is asked for again and again")
	}
}

// Without a metadata topic nothing is found, and whoever asked first waited once.
func TestNoMetadataTopic(t *testing.T) {
	log := &partitionLog{topic: "t", id: tp.UUID{0xaa}, stable: -1}
	log.writeAs(t, 0, "x")
	log.local = 5
	kafka := newFakeKafka(t, log)
	want := read(t, kafka, "t", 0, false)
	w := openWith(t, kafka, &memory{gets: map[string]int{}}, nil, kafkatier.Options{Layout: kafkatier.KafkaLocal(""), Patience: time.Millisecond})
	if got := read(t, kafka, "t", 0, false, kgo.Dialer(w.transport.DialContext)); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if w.locator.Tiered(direct.Query{TopicID: log.id, LeaderEpoch: -1}) {
		t.Error("it would be asked again")
	}
}

// Random logs of interleaved transactions, cut into segments of which the first ones are in the tier: whatever offset a
// read_committed reader begins at, the location names every aborted transaction of its range, and no more than those which
// Kafka would name; where the range cannot be judged it ends in front of that.
func TestAbortedOfRandomLogs(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		store, metadata := &memory{objects: map[string][]byte{}, gets: map[string]int{}}, metadataTopic()
		log := &partitionLog{topic: "t", id: tp.UUID{0xaa}, stable: -1, lineage: []leaderepoch.Entry{{}}}
		open := map[int64]int64{}
		cuts := []int64{0}
		openAt := map[int64][]producerstate.Entry{}
		type ended struct{ first, last int64 }
		var all []ended
		for range rapid.IntRange(2, 40).Draw(rt, "batches") {
			if rapid.IntRange(0, 3).Draw(rt, "roll") == 0 && log.end() > cuts[len(cuts)-1] {
				cuts = append(cuts, log.end())
				for p, first := range open {
					openAt[log.end()] = append(openAt[log.end()], producerstate.Entry{ProducerID: p, TxnFirstOffset: first, CoordinatorEpoch: -1})
				}
			}
			producer := rapid.Int64Range(0, 3).Draw(rt, "producer")
			first, in := open[producer]
			if in && rapid.Bool().Draw(rt, "end") {
				commit := rapid.Bool().Draw(rt, "commit")
				at := log.end()
				log.add(t, recordbatch.EndTxnMarker(recordbatch.Marker{ProducerID: producer, Commit: commit, Timestamp: 1, BaseOffset: at}))
				delete(open, producer)
				all = append(all, ended{first, at})
				if !commit {
					stable := at + 1
					for _, o := range open {
						stable = min(stable, o)
					}
					log.aborted = append(log.aborted, producerstate.AbortedTxn{ProducerID: producer, FirstOffset: first, LastOffset: at, LastStableOffset: stable})
				}
				continue
			}
			if !in {
				open[producer] = log.end()
			}
			b := recordbatch.NewBuilder()
			b.BaseOffset, b.LeaderEpoch, b.ProducerID, b.ProducerEpoch, b.BaseSequence, b.Transactional = log.end(), 0, producer, 0, 0, true
			for range rapid.IntRange(1, 3).Draw(rt, "records") {
				b.Add(recordbatch.Record{Timestamp: 1, Value: []byte("v")})
			}
			data, err := b.Build()
			if err != nil {
				rt.Fatal(err)
			}
			log.add(t, data)
		}
		segments := rapid.IntRange(0, len(cuts)-1).Draw(rt, "tiered")
		for i := range segments {
			from, to := cuts[i], cuts[i+1]-1
			var txns []producerstate.AbortedTxn
			for _, a := range log.aborted {
				if from <= a.LastOffset && a.LastOffset <= to {
					txns = append(txns, a)
				}
			}
			upload(t, store, metadata, log, byte(i), from, to, txns, openAt[to+1])
		}
		log.local = cuts[segments]
		kafka := startFakeKafka(t, log, metadata)
		defer kafka.close()
		w := openWith(t, kafka, store, nil, kafkatier.Options{Layout: kafkatier.KafkaLocal(""), Patience: time.Minute})
		defer w.close()
		for offset := range log.local {
			loc, err := w.locator.Locate(t.Context(), direct.Query{Topic: "t", Offset: offset, LeaderEpoch: -1, Committed: true})
			if err != nil {
				rt.Fatal(err)
			}
			unknown := log.local // the first offset of a transaction that ends behind the tier
			for _, first := range open {
				unknown = min(unknown, first)
			}
			for _, x := range all {
				if x.last >= log.local {
					unknown = min(unknown, x.first)
				}
			}
			if (loc == nil) != (offset >= unknown) {
				rt.Fatalf("offset %d: %+v, and transactions are known up to %d", offset, loc, unknown)
			}
			if loc == nil {
				continue
			}
			for _, a := range log.aborted {
				named := slices.Contains(loc.Aborted, direct.AbortedTransaction{ProducerID: a.ProducerID, FirstOffset: a.FirstOffset})
				concerns := a.LastOffset >= offset && a.FirstOffset <= loc.EndOffset
				if concerns && !named {
					rt.Fatalf("offsets %d to %d: %+v is not named", offset, loc.EndOffset, a)
				}
			}
			for _, a := range loc.Aborted {
				if !slices.ContainsFunc(log.aborted, func(x producerstate.AbortedTxn) bool {
					return x.ProducerID == a.ProducerID && x.FirstOffset == a.FirstOffset && x.LastOffset >= offset
				}) {
					rt.Fatalf("offsets %d to %d: %+v was not aborted, or ended before", offset, loc.EndOffset, a)
				}
			}
			if unknown < log.local && loc.EndOffset >= unknown {
				rt.Fatalf("offsets %d to %d, and nobody can know of the transaction at %d", offset, loc.EndOffset, unknown)
			}
		}
	})
}
