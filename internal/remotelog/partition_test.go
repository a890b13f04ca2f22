package remotelog

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/varve-io/varve/internal/fixtures"
	"github.com/varve-io/varve/internal/leaderepoch"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tp"
)

// read returns the records of a metadata partition's folder, by the partition that they are about.
func read(t *testing.T, file string) (records []Record, raw [][]byte) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for len(b) > 0 {
		h, err := recordbatch.ParseHeader(b)
		if err != nil {
			t.Fatal(err)
		}
		it, err := recordbatch.Records(b[:h.Size], 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		for it.Next() {
			value := slices.Clone(it.Record().Value)
			r, err := Parse(value)
			if err != nil {
				t.Fatal(err)
			}
			records, raw = append(records, r), append(raw, value)
		}
		b = b[h.Size:]
	}
	return records, raw
}

// Every case's records are what Kafka's own tool reads in them, and are written back byte for byte.
func TestFixtures(t *testing.T) {
	dirs, err := filepath.Glob(filepath.Join(fixtures.Dir(t), "tiered", "*", "remote-log-metadata"))
	if err != nil || len(dirs) != 5 {
		t.Fatal(dirs, err)
	}
	for _, dir := range dirs {
		t.Run(filepath.Base(filepath.Dir(dir)), func(t *testing.T) {
			records, raw := read(t, filepath.Join(dir, Topic+"-0", "00000000000000000000.log"))
			dump, err := os.ReadFile(filepath.Join(dir, "dump.txt"))
			if err != nil {
				t.Fatal(err)
			}
			lines := regexp.MustCompile(`(?m)^\| offset: .* payload: (.*)$`).FindAllStringSubmatch(string(dump), -1)
			if len(lines) == 0 || len(lines) != len(records) {
				t.Fatalf("%d records, Kafka has %d", len(records), len(lines))
			}
			parts := map[PartitionID]*Partition{}
			for i, r := range records {
				if got, want := asKafka(r), lines[i][1]; got != want {
					t.Errorf("record %d\n%s\n%s", i, got, want)
				}
				if string(Marshal(r)) != string(raw[i]) {
					t.Errorf("record %d is written otherwise", i)
				}
				p := parts[r.Of()]
				if p == nil {
					p = &Partition{}
					parts[r.Of()] = p
				}
				p.Apply(r)
			}
			if len(parts) != 2 {
				t.Fatalf("%d partitions", len(parts))
			}
			for of, p := range parts {
				next := int64(0)
				for _, s := range p.Segments() {
					if s.Start != next {
						t.Errorf("%v: a segment begins at %d, the one before ends at %d", of, s.Start, next)
					}
					next = s.End + 1
				}
				want := map[string]int64{"plain": 70, "transactions": 89}[of.Topic]
				if next != want {
					t.Errorf("%v: %d offsets are in the tier instead of %d", of, next, want)
				}
			}
		})
	}
}

// asKafka writes a record as Kafka's classes print themselves.
func asKafka(r Record) string {
	of := r.Of()
	custom := func(b []byte) string {
		if b == nil {
			return "Optional.empty"
		}
		return fmt.Sprintf("Optional[CustomMetadata{%d bytes}]", len(b))
	}
	ids := func(u tp.UUID) string {
		return fmt.Sprintf("RemoteLogSegmentId{topicIdPartition=%s:%s-%d, id=%s}", of.TopicID, of.Topic, of.Index, u)
	}
	switch r := r.(type) {
	case *Segment:
		var epochs []string
		for _, e := range r.Epochs {
			epochs = append(epochs, strconv.Itoa(int(e.Epoch))+"="+strconv.FormatInt(e.StartOffset, 10))
		}
		return fmt.Sprintf("RemoteLogSegmentMetadata{remoteLogSegmentId=%s, startOffset=%d, endOffset=%d, brokerId=%d, maxTimestampMs=%d, eventTimestampMs=%d, segmentLeaderEpochs={%s}, segmentSizeInBytes=%d, customMetadata=%s, state=%s, txnIdxEmpty=%v}",
			ids(r.ID), r.Start, r.End, r.Broker, r.MaxTimestamp, r.EventTime, strings.Join(epochs, ", "), r.Size, custom(r.Custom), r.State, r.TxnIndexEmpty)
	case *Update:
		return fmt.Sprintf("RemoteLogSegmentMetadataUpdate{remoteLogSegmentId=%s, customMetadata=%s, state=%s, eventTimestampMs=%d, brokerId=%d}", ids(r.ID), custom(r.Custom), r.State, r.EventTime, r.Broker)
	}
	return fmt.Sprintf("%T", r)
}

// add makes a readable segment; its id is its number.
func add(p *Partition, number byte, start, end int64, epochs ...leaderepoch.Entry) {
	p.Apply(&Segment{ID: tp.UUID{number}, Start: start, End: end, Size: 1, Epochs: epochs})
	p.Apply(&Update{ID: tp.UUID{number}, State: CopyFinished})
}

func TestStates(t *testing.T) {
	epochs := []leaderepoch.Entry{{Epoch: 0, StartOffset: 0}}
	for name, c := range map[string]struct {
		steps []Record
		held  bool
		left  int
	}{
		"started":                  {[]Record{&Segment{End: 9, Size: 1, Epochs: epochs}}, false, 1},
		"finished":                 {[]Record{&Segment{End: 9, Size: 1, Epochs: epochs}, &Update{State: CopyFinished}}, true, 1},
		"finished twice":           {[]Record{&Segment{End: 9, Size: 1, Epochs: epochs}, &Update{State: CopyFinished}, &Update{State: CopyFinished}}, true, 1},
		"going":                    {[]Record{&Segment{End: 9, Size: 1, Epochs: epochs}, &Update{State: CopyFinished}, &Update{State: DeleteStarted}}, false, 1},
		"gone":                     {[]Record{&Segment{End: 9, Size: 1, Epochs: epochs}, &Update{State: CopyFinished}, &Update{State: DeleteStarted}, &Update{State: DeleteFinished}}, false, 0},
		"a failed copy is deleted": {[]Record{&Segment{End: 9, Size: 1, Epochs: epochs}, &Update{State: DeleteStarted}}, false, 1},
		"no way back":              {[]Record{&Segment{End: 9, Size: 1, Epochs: epochs}, &Update{State: CopyFinished}, &Update{State: DeleteStarted}, &Update{State: CopyFinished}}, false, 1},
		"finished before it began": {[]Record{&Update{State: CopyFinished}}, false, 0},
		"deleted, never finished":  {[]Record{&Segment{End: 9, Size: 1, Epochs: epochs}, &Update{State: DeleteFinished}}, false, 1},
		"begins as finished":       {[]Record{&Segment{End: 9, Size: 1, Epochs: epochs, State: CopyFinished}}, false, 0},
		"an unknown state":         {[]Record{&Segment{End: 9, Size: 1, Epochs: epochs}, &Update{State: 77}}, false, 1},
		"told twice":               {[]Record{&Segment{End: 9, Size: 1, Epochs: epochs}, &Update{State: CopyFinished}, &Segment{End: 3, Size: 1, Epochs: epochs}}, true, 1},
		"partition deleted":        {[]Record{&Segment{End: 9, Size: 1, Epochs: epochs}, &Update{State: CopyFinished}, &PartitionDelete{State: 0}}, false, 0},
		"a snapshot says nothing":  {[]Record{&Snapshot{Segment{End: 9, Size: 1, Epochs: epochs}}, &Update{State: CopyFinished}}, false, 0},
		"no epochs":                {[]Record{&Segment{End: 9, Size: 1}, &Update{State: CopyFinished}}, false, 0},
		"no bytes":                 {[]Record{&Segment{End: 9, Epochs: epochs}, &Update{State: CopyFinished}}, false, 0},
		"ends before it begins":    {[]Record{&Segment{Start: 10, End: 9, Size: 1, Epochs: epochs}, &Update{State: CopyFinished}}, false, 0},
		"epochs fall":              {[]Record{&Segment{End: 9, Size: 1, Epochs: []leaderepoch.Entry{{Epoch: 1}, {Epoch: 0, StartOffset: 3}}}, &Update{State: CopyFinished}}, false, 0},
	} {
		p := &Partition{}
		for _, r := range c.steps {
			p.Apply(r)
		}
		if p.Holds(5) != c.held || p.Len() != c.left {
			t.Errorf("%s: held %v, %d left", name, p.Holds(5), p.Len())
		}
	}
	p := &Partition{}
	p.Apply(&Segment{End: 9, Size: 1, Epochs: epochs})
	p.Apply(&Update{State: CopyFinished, Custom: []byte("where")})
	if s := p.Segments(); len(s) != 1 || string(s[0].Custom) != "where" {
		t.Errorf("custom metadata of an update: %+v", s)
	}
}

// Leaders 0 and 2 wrote what is in the log; leader 1 was elected uncleanly at 50 and what it wrote to 80 was lost.
func TestFindKeepsToTheLineage(t *testing.T) {
	lineage := Lineage{0: 60, 2: 200}
	p := &Partition{}
	add(p, 1, 0, 39, leaderepoch.Entry{Epoch: 0, StartOffset: 0})
	add(p, 2, 20, 59, leaderepoch.Entry{Epoch: 0, StartOffset: 20})                                               // overlaps
	add(p, 3, 40, 79, leaderepoch.Entry{Epoch: 0, StartOffset: 40}, leaderepoch.Entry{Epoch: 1, StartOffset: 50}) // right up to 49
	add(p, 4, 60, 99, leaderepoch.Entry{Epoch: 1, StartOffset: 60})                                               // of a dead leader
	add(p, 5, 55, 120, leaderepoch.Entry{Epoch: 0, StartOffset: 55}, leaderepoch.Entry{Epoch: 2, StartOffset: 60})
	add(p, 6, 150, 250, leaderepoch.Entry{Epoch: 2, StartOffset: 150}) // longer than the log
	for _, c := range []struct {
		offset int64
		id     byte
		end    int64
	}{{0, 1, 39}, {19, 1, 39}, {20, 2, 59}, {45, 2, 59}, {55, 5, 120}, {60, 5, 120}, {120, 5, 120}, {121, 0, -1}, {150, 6, 199}, {199, 6, 199}, {200, 0, -1}, {251, 0, -1}} {
		s, end, ok := p.Find(c.offset, lineage)
		if ok != (c.id != 0) || ok && s.ID[0] != c.id || end != c.end {
			t.Errorf("offset %d: %v to %d", c.offset, s, end)
		}
	}
	if got := p.Epochs(60); !slices.Equal(got, []int32{1, 2}) {
		t.Errorf("epochs at 60: %v", got)
	}
	// With leader 0's segments gone, the third is valid as far as the epoch that the log has.
	p.Apply(&Update{ID: tp.UUID{2}, State: DeleteStarted})
	if s, end, ok := p.Find(45, lineage); !ok || s.ID[0] != 3 || end != 49 {
		t.Errorf("cut segment: %v to %d", s, end)
	}
	if _, _, ok := p.Find(50, lineage); ok {
		t.Error("what a dead leader wrote is found")
	}
}

// A leader's answers that cannot be (an epoch that ends in the midst of what a later one has) are believed as far as they agree
// with the segment.
func TestFindStopsWhereTheLineageDeparts(t *testing.T) {
	p := &Partition{}
	add(p, 1, 0, 99, leaderepoch.Entry{Epoch: 0, StartOffset: 0}, leaderepoch.Entry{Epoch: 1, StartOffset: 50})
	for lineage, want := range map[*Lineage]int64{{0: 30, 1: 100}: 29, {0: 60, 1: 100}: 49, {0: 50, 1: 100}: 99, {0: 50}: 49, {1: 100}: -1} {
		if _, end, _ := p.Find(10, *lineage); end != want {
			t.Errorf("%v: up to %d instead of %d", *lineage, end, want)
		}
	}
}

// Random histories of leaders, clean and unclean, each of which copies what it has: whatever is found is what the last log
// holds, and where a segment of the log's own holds an offset something is found.
func TestFindIsTheLog(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var log []int32 // the epoch of each offset
		p := &Partition{}
		type copied struct {
			start  int
			epochs []int32
		}
		var copies []copied
		for epoch := range int32(rapid.IntRange(1, 6).Draw(t, "leaders")) {
			if cut := rapid.IntRange(0, 5).Draw(t, "lost"); cut <= len(log) && rapid.Bool().Draw(t, "unclean") {
				log = log[:len(log)-cut]
			}
			for range rapid.IntRange(0, 8).Draw(t, "written") {
				log = append(slices.Clone(log), epoch)
			}
			for range rapid.IntRange(0, 3).Draw(t, "copies") {
				if len(log) < 1 {
					continue
				}
				from := rapid.IntRange(0, len(log)-1).Draw(t, "from")
				to := rapid.IntRange(from+1, len(log)).Draw(t, "to")
				var entries []leaderepoch.Entry
				for i, e := range log[from:to] {
					if n := len(entries); n == 0 || entries[n-1].Epoch != e {
						entries = append(entries, leaderepoch.Entry{Epoch: e, StartOffset: int64(from + i)})
					}
				}
				copies = append(copies, copied{from, log[from:to]})
				add(p, byte(len(copies)), int64(from), int64(to-1), entries...)
			}
		}
		lineage := Lineage{}
		for o, e := range log {
			lineage[e] = int64(o + 1)
		}
		for o := range len(log) + 3 {
			s, end, ok := p.Find(int64(o), lineage)
			if ok {
				c := copies[s.ID[0]-1]
				for i := o; i <= int(end); i++ {
					if i >= len(log) || c.epochs[i-c.start] != log[i] {
						t.Fatalf("log %v: offsets %d to %d of %+v", log, o, end, c)
					}
				}
			}
			for _, c := range copies {
				if o < len(log) && c.start <= o && o < c.start+len(c.epochs) && c.epochs[o-c.start] == log[o] && !ok {
					t.Fatalf("log %v: nothing at %d, but %+v", log, o, c)
				}
			}
			for _, x := range p.Epochs(int64(o)) {
				if _, known := lineage[x]; known != slices.Contains(log, x) {
					t.Fatalf("epoch %d", x)
				}
			}
		}
	})
}

func TestHostileNumbersOfSegments(t *testing.T) {
	p := &Partition{}
	for i := range 1000 {
		p.Apply(&Segment{ID: tp.UUID{byte(i), byte(i >> 8)}, End: 1 << 40, Size: 1, Epochs: []leaderepoch.Entry{{Epoch: int32(i)}}})
		p.Apply(&Update{ID: tp.UUID{byte(i), byte(i >> 8)}, State: CopyFinished})
	}
	if n := len(p.Epochs(7)); n != maxCandidates {
		t.Errorf("%d epochs to ask about", n)
	}
}
