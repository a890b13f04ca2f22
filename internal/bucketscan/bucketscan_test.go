package bucketscan

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/varve-io/varve/internal/bucketlayout"
	"github.com/varve-io/varve/internal/fixtures"
	"github.com/varve-io/varve/internal/inspect"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/remoteformat"
)

// load copies the objects of a case into memory.
func load(t *testing.T, name string) (*objstore.Memory, *Reader) {
	t.Helper()
	dir := filepath.Join(fixtures.Dir(t), "tiered")
	b := objstore.NewMemory()
	root := filepath.Join(dir, name, "objects")
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		key, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		return put(b, filepath.ToSlash(key), text)
	})
	if err != nil {
		t.Fatal(err)
	}
	pem, err := os.ReadFile(filepath.Join(dir, "keys", "private.pem"))
	if err != nil {
		t.Fatal(err)
	}
	keys := &remoteformat.Keyring{}
	if err := keys.Add("fixture", pem, nil); err != nil {
		t.Fatal(err)
	}
	return b, &Reader{Bucket: b, Keys: keys}
}

func put(b objstore.Bucket, key string, text []byte) error {
	return b.Put(context.Background(), key, bytes.NewReader(text), int64(len(text)), objstore.PutOptions{})
}

// findings are those of a whole bucket, as "class kind".
func findings(t *testing.T, r *Reader) (out []string) {
	t.Helper()
	c, err := r.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range c.Partitions() {
		var total, done int64
		for _, f := range p.Segments {
			total += f.Bytes()
		}
		if _, err := r.Verify(t.Context(), p, func(f Finding) {
			if f.Text == "" {
				t.Errorf("%+v says nothing", f)
			}
			out = append(out, string(f.Class)+" "+f.Key[strings.LastIndexByte(f.Key, '.')+1:])
		}, func(n int64) { done += n }); err != nil {
			t.Fatal(err)
		}
		if done != total {
			t.Errorf("%d bytes were said to be done of %d", done, total)
		}
	}
	slices.Sort(out)
	return out
}

// Every kind of damage is found, as what it is, in every layout; an untouched bucket is clean.
func TestDamageIsFound(t *testing.T) {
	change := func(f func([]byte) []byte) func(b *objstore.Memory, key string) error {
		return func(b *objstore.Memory, key string) error {
			text, err := objstore.ReadAll(context.Background(), b, key, 1<<20)
			if err != nil {
				return err
			}
			return put(b, key, f(bytes.Clone(text)))
		}
	}
	flip := func(at int) func(b *objstore.Memory, key string) error {
		return change(func(t []byte) []byte { t[(at+len(t))%len(t)] ^= 0x10; return t })
	}
	cut := change(func(t []byte) []byte { return t[:len(t)-7] })
	firstBatch := change(func(t []byte) []byte { return t[12+binary.BigEndian.Uint32(t[8:]):] })
	drop := func(b *objstore.Memory, key string) error { return b.Delete(context.Background(), key) }
	dropAll := func(b *objstore.Memory, key string) error {
		stem, _, _ := strings.Cut(key, ".")
		var keys []string
		err := b.List(context.Background(), stem, "", func(i objstore.Info) error { keys = append(keys, i.Key); return nil })
		for _, k := range keys {
			err = errors.Join(err, b.Delete(context.Background(), k))
		}
		return err
	}
	replace := func(from, to string) func(b *objstore.Memory, key string) error {
		return change(func(t []byte) []byte { return bytes.Replace(t, []byte(from), []byte(to), 1) })
	}
	for _, c := range []struct {
		layout, kind string
		damage       func(b *objstore.Memory, key string) error
		want         string // "class kind", comma-separated
	}{
		{"aiven-plain", "log", flip(100), "damaged log"},
		{"aiven-plain", "log", flip(-1), "damaged log"},
		{"aiven-plain", "log", cut, "damaged log"},
		{"aiven-plain", "log", drop, "missing log"},
		{"aiven-plain", "indexes", drop, "missing indexes"},
		{"aiven-plain", "indexes", cut, "damaged indexes"},
		{"aiven-plain", "indexes", flip(7), "damaged indexes"}, // a position of the offset index
		{"aiven-plain", "rsm-manifest", drop, "gap log,unfinished log"},
		{"aiven-plain", "rsm-manifest", cut, "damaged rsm-manifest"},
		{"aiven-plain", "rsm-manifest", replace(`"startOffset":`, `"startOffset":1`), "damaged rsm-manifest"},
		{"aiven-plain", "rsm-manifest", replace(`"endOffset":`, `"endOffset":1`), "gap log,overlap log,overlap log,overlap log"},
		{"aiven-plain", "log", dropAll, "gap log"},
		{"aiven-compressed", "log", flip(30), "damaged log"},
		{"aiven-encrypted", "log", flip(30), "damaged log"},
		{"aiven-encrypted", "indexes", flip(30), "damaged indexes"},
		{"aiven-both", "log", cut, "damaged log"},
		{"localtiered", "log", flip(100), "damaged log"},
		{"localtiered", "log", firstBatch, "damaged index,gap log"},
		{"localtiered", "index", flip(7), "damaged index"},
		{"localtiered", "timeindex", flip(11), "damaged timeindex"},
		{"localtiered", "timeindex", cut, "damaged timeindex"},
		{"localtiered", "snapshot", flip(10), "damaged snapshot"},
		{"localtiered", "leader_epoch_checkpoint", cut, "damaged leader_epoch_checkpoint"},
		{"localtiered", "index", drop, "missing index"},
		{"localtiered", "log", dropAll, "gap log"},
	} {
		t.Run(c.layout+" "+c.kind+" "+c.want, func(t *testing.T) {
			b, r := load(t, c.layout)
			if got := findings(t, r); len(got) > 0 {
				t.Fatalf("untouched: %v", got)
			}
			catalog, err := r.List(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			second := catalog.Partitions()[0].Segments[1]
			if err := c.damage(b, second.Key(bucketlayout.Kind(c.kind))); err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(findings(t, r), ","); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

func TestTransactionIndexesAreChecked(t *testing.T) {
	b, r := load(t, "localtiered")
	catalog, err := r.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range catalog.Partitions()[1].Segments {
		if f.Objects[bucketlayout.TxnIndex] == 0 {
			continue
		}
		key := f.Key(bucketlayout.TxnIndex)
		text, err := objstore.ReadAll(t.Context(), b, key, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		list, err := r.Aborted(t.Context(), f)
		if err != nil || len(list) == 0 {
			t.Fatal(list, err)
		}
		text[2+8+8+7]-- // the last offset, in its lowest byte
		if err := put(b, key, text); err != nil {
			t.Fatal(err)
		}
		break
	}
	if got := findings(t, r); !slices.Equal(got, []string{"damaged txnindex"}) {
		t.Error(got)
	}
}

func TestKeysThatAreNotGiven(t *testing.T) {
	_, r := load(t, "aiven-encrypted")
	r.Keys = nil
	if got := findings(t, r); len(got) != 10 || got[0] != "unreadable rsm-manifest" || got[9] != got[0] {
		t.Error(got)
	}
}

// What the store fails with is no finding.
func TestFailuresOfTheStore(t *testing.T) {
	b, r := load(t, "localtiered")
	catalog, err := r.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	faults := objstore.WithFaults(b)
	faults.Add(objstore.Fault{Op: objstore.OpGet, Err: objstore.ErrAccess, Times: 1000})
	r.Bucket = faults
	p := catalog.Partitions()[0]
	if _, err := r.Verify(t.Context(), p, func(f Finding) { t.Errorf("%+v", f) }, func(int64) {}); !errors.Is(err, objstore.ErrAccess) {
		t.Error(err)
	}
	if err := r.Records(t.Context(), p.Segments[0], func(inspect.Item) error { return nil }); !errors.Is(err, objstore.ErrAccess) {
		t.Error(err)
	}
}
