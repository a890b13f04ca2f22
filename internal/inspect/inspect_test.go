package inspect_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/varve-io/varve/internal/fixtures"
	"github.com/varve-io/varve/internal/inspect"
	"github.com/varve-io/varve/internal/remoteformat"
)

// items reads a file and returns each item as JSON, generic, with its text checked to be a line.
func items(t testing.TB, path string, o inspect.Options) ([]map[string]any, error) {
	t.Helper()
	var out []map[string]any
	err := inspect.File(path, o, func(i inspect.Item) error {
		if text := i.Text(); text == "" || strings.ContainsRune(text, '\n') {
			t.Errorf("text %q", text)
		}
		b, err := json.Marshal(i)
		if err != nil {
			return err
		}
		var m map[string]any
		d := json.NewDecoder(bytes.NewReader(b))
		d.UseNumber()
		if err := d.Decode(&m); err != nil {
			return fmt.Errorf("%s: %w", b, err)
		}
		out = append(out, m)
		return nil
	})
	return out, err
}

func lines(t testing.TB, path string) []map[string]any {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var out []map[string]any
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		var m map[string]any
		d := json.NewDecoder(strings.NewReader(s.Text()))
		d.UseNumber()
		if err := d.Decode(&m); err != nil {
			t.Fatal(err)
		}
		out = append(out, m)
	}
	return out
}

// cases are the folders with what Kafka's own classes read in the files beside.
func cases(t testing.TB) map[string]string {
	t.Helper()
	root := fixtures.Dir(t)
	out := map[string]string{}
	for _, pattern := range []string{"local/*/*-0", "tiered/*/local/*/*-0"} {
		dirs, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range dirs {
			name, _ := filepath.Rel(root, d)
			out[name] = d
		}
	}
	if len(out) < 20 {
		t.Fatalf("only %d cases", len(out))
	}
	return out
}

func TestBatchesAndRecordsAreThoseThatKafkaReads(t *testing.T) {
	for name, dir := range cases(t) {
		t.Run(name, func(t *testing.T) {
			logs, _ := filepath.Glob(filepath.Join(dir, "*.log"))
			var batches, records []map[string]any
			for _, path := range logs {
				got, err := items(t, path, inspect.Options{Records: true})
				if err != nil {
					t.Fatal(err)
				}
				for _, i := range got {
					if i["segment"] == nil {
						records = append(records, i)
						continue
					}
					if (i["control"] == true && i["count"] != json.Number("0")) != (i["marker"] != nil) {
						t.Errorf("marker of %v", i)
					}
					delete(i, "marker")
					batches = append(batches, i)
				}
			}
			same(t, "batch", batches, lines(t, filepath.Join(dir, "../batches.ndjson")))
			want := lines(t, filepath.Join(dir, "../records.ndjson"))
			for _, r := range want {
				delete(r, "readCommitted") // which no file tells
			}
			same(t, "record", records, want)
		})
	}
}

func same(t *testing.T, what string, got, want []map[string]any) {
	t.Helper()
	if len(got) != len(want) || len(want) == 0 {
		t.Fatalf("%d %ss, want %d", len(got), what, len(want))
	}
	for i := range want {
		if !reflect.DeepEqual(got[i], want[i]) {
			t.Fatalf("%s %d:\n%v\nwant\n%v", what, i, got[i], want[i])
		}
	}
}

// shape brings what an item says into the form of indexes.json.
func shape(name string, i map[string]any) any {
	delete(i, "file")
	switch filepath.Ext(name) {
	case ".index":
		return []any{i["offset"], i["position"]}
	case ".timeindex":
		return []any{i["timestamp"], i["offset"]}
	case ".snapshot":
		batches := []any{}
		list, _ := i["batches"].([]any)
		for _, x := range list {
			b, _ := x.(map[string]any)
			batches = append(batches, fmt.Sprintf("BatchMetadata(firstSeq=%v, lastSeq=%v, firstOffset=%v, lastOffset=%v, timestamp=%v)", b["firstSeq"], b["lastSeq"], b["firstOffset"], b["lastOffset"], b["timestamp"]))
		}
		i["batches"] = batches
	}
	switch name {
	case "leader-epoch-checkpoint":
		return fmt.Sprintf("%v %v", i["epoch"], i["startOffset"])
	case "partition.metadata":
		return fmt.Sprintf("%v: %v", i["name"], i["value"])
	}
	return i
}

func TestOtherFilesAreWhatKafkaReads(t *testing.T) {
	for name, dir := range cases(t) {
		t.Run(name, func(t *testing.T) {
			b, err := os.ReadFile(filepath.Join(dir, "../indexes.json"))
			if err != nil {
				t.Fatal(err)
			}
			var want map[string][]any
			d := json.NewDecoder(bytes.NewReader(b))
			d.UseNumber()
			if err := d.Decode(&want); err != nil {
				t.Fatal(err)
			}
			for file, entries := range want {
				got, err := items(t, filepath.Join(dir, file), inspect.Options{})
				if err != nil {
					t.Fatal(err)
				}
				shaped := []any{}
				for _, i := range got {
					shaped = append(shaped, shape(file, i))
				}
				if file == "leader-epoch-checkpoint" {
					entries = entries[2:]
				}
				// Kafka's reader keeps producers in a hash map, ours keeps the order of ids; and it reads up to five batches of each
				// from a running broker, where a file has one.
				if filepath.Ext(file) == ".snapshot" {
					order := func(a, b any) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) }
					slices.SortFunc(shaped, order)
					slices.SortFunc(entries, order)
				}
				// Kafka's index of a killed broker has no entries but zeros; its reader takes the first for one.
				if strings.Contains(name, "unclean-0") && fmt.Sprint(entries) == "[[102 0]]" {
					entries = nil
				}
				if len(shaped)+len(entries) > 0 && !reflect.DeepEqual(shaped, entries) {
					t.Errorf("%s:\n%v\nwant\n%v", file, shaped, entries)
				}
			}
		})
	}
}

func TestRemoteObjectsReadAsTheLocalFiles(t *testing.T) {
	root := filepath.Join(fixtures.Dir(t), "tiered")
	private, err := os.ReadFile(filepath.Join(root, "keys/private.pem"))
	if err != nil {
		t.Fatal(err)
	}
	ring := &remoteformat.Keyring{}
	if err := ring.Add("fixture", private, nil); err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, c := range []string{"plain", "compressed", "encrypted", "both"} {
		objects := filepath.Join(root, "aiven-"+c, "objects")
		err := filepath.WalkDir(objects, func(path string, d fs.DirEntry, err error) error {
			stem, ok := strings.CutSuffix(path, ".rsm-manifest")
			if err != nil || !ok {
				return err
			}
			n++
			got, err := items(t, path, inspect.Options{})
			if err != nil || len(got) != 1 || got[0]["remoteLogSegmentMetadata"] == nil {
				t.Errorf("manifest %v (%v)", got, err)
			}
			topic, _, _ := strings.Cut(filepath.Base(filepath.Dir(filepath.Dir(path))), "-")
			local := filepath.Join(root, "aiven-"+c, "local", topic, topic+"-0", filepath.Base(path)[:20])
			o := inspect.Options{Records: true, Keys: ring}
			remote, err := items(t, stem+".log", o)
			if err != nil {
				t.Fatal(err)
			}
			want, err := items(t, local+".log", o)
			if err != nil {
				t.Fatal(err)
			}
			for _, list := range [][]map[string]any{remote, want} {
				for _, i := range list {
					delete(i, "segment")
				}
			}
			same(t, path, remote, want)
			if c == "encrypted" || c == "both" {
				if _, err := items(t, stem+".log", inspect.Options{}); !errors.Is(err, remoteformat.ErrNoKey) {
					t.Errorf("without the key: %v", err)
				}
			}
			indexes, err := items(t, stem+".indexes", o)
			if err != nil {
				t.Fatal(err)
			}
			want = nil
			for _, suffix := range []string{".index", ".timeindex"} {
				more, err := items(t, local+suffix, o)
				if err != nil {
					t.Fatal(err)
				}
				want = append(want, more...)
			}
			for i := range want {
				delete(want[i], "file")
				delete(indexes[i], "file")
			}
			same(t, path, indexes[:len(want)], want)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if n < 16 {
		t.Fatalf("only %d segments", n)
	}
}

// What is intact is told before the damage.
func TestDamage(t *testing.T) {
	dir := cases(t)["local/transactions/transactions-0"]
	for _, c := range []struct {
		file     string
		position int64 // of the changed byte; negative cuts the file there from its end
		items    int
		damaged  int64
	}{
		{"00000000000000000000.log", 700, -1, 674},    // a byte of the third batch
		{"00000000000000000000.log", -1, -2, -1},      // the end of the last batch
		{"00000000000000000000.index", 8, 1, 8},       // an offset that falls
		{"00000000000000000000.index", -3, 4, 32},     // a partial entry
		{"00000000000000000000.timeindex", 12, 1, 12}, // a time that jumps to the far past
		{"00000000000000000000.txnindex", 0, 0, 0},
		{"00000000000000000018.snapshot", 20, 0, 0},
		{"leader-epoch-checkpoint", 2, 0, -1},
	} {
		b, err := os.ReadFile(filepath.Join(dir, c.file))
		if err != nil {
			t.Fatal(err)
		}
		whole, err := items(t, filepath.Join(dir, c.file), inspect.Options{})
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case c.position < 0:
			b = b[:len(b)+int(c.position)]
		default:
			b[c.position] ^= 0x80
		}
		path := filepath.Join(t.TempDir(), c.file)
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := items(t, path, inspect.Options{})
		var damage *inspect.DamageError
		if !errors.As(err, &damage) {
			t.Fatalf("%s: %v", c.file, err)
		}
		want := c.items
		switch want {
		case -1: // a wrong checksum does not hide the batches after it
			want = len(whole)
			if got[2]["valid"] != false || got[3]["valid"] != true {
				t.Errorf("%s: %v", c.file, got)
			}
		case -2:
			want = len(whole) - 1
			c.damaged, _ = whole[want]["position"].(json.Number).Int64()
		}
		if len(got) != want || damage.Position != c.damaged {
			t.Errorf("%s: %d items, damage at %d, want %d and %d (%v)", c.file, len(got), damage.Position, want, c.damaged, err)
		}
	}
}

func TestKindsByContent(t *testing.T) {
	dir := cases(t)["local/transactions/transactions-0"]
	for name, least := range map[string]int{"00000000000000000000.log": 5, "00000000000000000018.snapshot": 3, "leader-epoch-checkpoint": 1, "partition.metadata": 2} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		err = inspect.Read("something", bytes.NewReader(b), int64(len(b)), inspect.Options{}, func(inspect.Item) error { n++; return nil })
		if err != nil || n < least {
			t.Errorf("%s: %d items, %v", name, n, err)
		}
	}
	for text, want := range map[string]int{"0\n2\nt 0 5\nt 1 6\n": 2, "#\ncluster.id=abc\nnode.id=1\nversion=1\n": 3} {
		n := 0
		if err := inspect.Read("x", strings.NewReader(text), int64(len(text)), inspect.Options{}, func(inspect.Item) error { n++; return nil }); err != nil || n != want {
			t.Errorf("%q: %d items, %v", text, n, err)
		}
	}
	if err := inspect.Read("x", strings.NewReader("hello"), 5, inspect.Options{}, nil); !errors.Is(err, inspect.ErrUnknownKind) {
		t.Errorf("%v", err)
	}
}

func TestEmitEndsTheReading(t *testing.T) {
	stop := errors.New("stop")
	for _, name := range []string{"00000000000000000000.log", "00000000000000000000.index", "00000000000000000018.snapshot"} {
		n := 0
		err := inspect.File(filepath.Join(cases(t)["local/transactions/transactions-0"], name), inspect.Options{Records: true}, func(inspect.Item) error { n++; return stop })
		if !errors.Is(err, stop) || n != 1 {
			t.Errorf("%s: %d items, %v", name, n, err)
		}
	}
}
