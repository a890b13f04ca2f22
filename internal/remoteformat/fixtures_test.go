package remoteformat_test

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/varve-io/varve/internal/fixtures"
	"github.com/varve-io/varve/internal/remoteformat"
)

// theirs is one segment that the JVM plugin wrote, with the local files that it was made of.
type theirs struct {
	name, prefix           string
	key                    remoteformat.Key
	log, indexes, manifest []byte
	localLog               []byte
	local                  remoteformat.Indexes
}

func keyring(t testing.TB) *remoteformat.Keyring {
	t.Helper()
	var ring remoteformat.Keyring
	dir := filepath.Join(fixtures.Dir(t), "tiered/keys")
	if err := ring.Add("fixture", read(t, dir, "private.pem"), read(t, dir, "public.pem")); err != nil {
		t.Fatal(err)
	}
	return &ring
}

func read(t testing.TB, elem ...string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(elem...))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func segments(t testing.TB) []theirs {
	t.Helper()
	var out []theirs
	for _, c := range []string{"plain", "compressed", "encrypted", "both"} {
		root := filepath.Join(fixtures.Dir(t), "tiered/aiven-"+c)
		objects := filepath.Join(root, "objects")
		err := filepath.WalkDir(objects, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".rsm-manifest") {
				return err
			}
			rel, _ := filepath.Rel(objects, path)
			k, kind, err := remoteformat.ParseKey(c+"/", filepath.ToSlash(rel))
			if err != nil || kind != remoteformat.ObjectManifest {
				t.Fatal(kind, err)
			}
			if got := k.Object(c+"/", kind); got != rel {
				t.Fatalf("key %q instead of %q", got, rel)
			}
			s := theirs{name: c + "/" + k.Path(), prefix: c + "/", key: k,
				log:     read(t, objects, k.Object(c+"/", remoteformat.ObjectLog)),
				indexes: read(t, objects, k.Object(c+"/", remoteformat.ObjectIndexes)), manifest: read(t, path)}
			base := filepath.Join(root, "local", k.Topic, k.Topic+"-0", fmt.Sprintf("%020d", k.Start))
			s.localLog = read(t, base+".log")
			s.local.Offset, s.local.Timestamp = read(t, base+".index"), read(t, base+".timeindex")
			s.local.Transaction, _ = os.ReadFile(base + ".txnindex")
			m, err := remoteformat.ParseManifest(s.manifest)
			if err != nil {
				t.Fatal(err)
			}
			s.local.ProducerSnapshot = read(t, filepath.Dir(base), fmt.Sprintf("%020d.snapshot", m.Metadata.End+1))
			s.local.LeaderEpoch = read(t, filepath.Dir(base), "leader-epoch-checkpoint")
			out = append(out, s)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(out) < 16 {
		t.Fatalf("only %d segments", len(out))
	}
	return out
}

func decodeAll(s *remoteformat.Segment, log []byte) ([]byte, error) {
	var out []byte
	for i := range s.Chunks().Count() {
		c := s.Chunks().Chunk(i)
		if c.StoredPosition+c.StoredSize > int64(len(log)) {
			return nil, fmt.Errorf("object of %d bytes", len(log))
		}
		plain, err := s.DecodeChunk(i, log[c.StoredPosition:c.StoredPosition+c.StoredSize])
		if err != nil {
			return nil, err
		}
		out = append(out, plain...)
	}
	return out, nil
}

// What the plugin stored reads back as the local files that Kafka gave to it.
func TestReadTheirs(t *testing.T) {
	ring := keyring(t)
	for _, c := range segments(t) {
		t.Run(c.name, func(t *testing.T) {
			s, err := remoteformat.Open(c.manifest, ring)
			if err != nil {
				t.Fatal(err)
			}
			if s.Chunks().StoredSize() != int64(len(c.log)) || s.Size() != int64(len(c.localLog)) {
				t.Fatalf("sizes %d, %d of %d, %d", s.Chunks().StoredSize(), s.Size(), len(c.log), len(c.localLog))
			}
			if s.Plain() != (c.prefix == "plain/") {
				t.Errorf("plain: %v", s.Plain())
			}
			got, err := decodeAll(s, c.log)
			if err != nil || !bytes.Equal(got, c.localLog) {
				t.Errorf("log differs (%v)", err)
			}
			x, err := s.DecodeIndexes(c.indexes)
			if err != nil {
				t.Fatal(err)
			}
			for name, pair := range map[string][2][]byte{"offset": {x.Offset, c.local.Offset}, "time": {x.Timestamp, c.local.Timestamp},
				"snapshot": {x.ProducerSnapshot, c.local.ProducerSnapshot}, "transaction": {x.Transaction, c.local.Transaction}} {
				if !bytes.Equal(pair[0], pair[1]) {
					t.Errorf("%s index: %x instead of %x", name, pair[0], pair[1])
				}
			}
			if string(x.LeaderEpoch) != "0\n1\n0 0\n" {
				t.Errorf("epochs %q", x.LeaderEpoch)
			}
			md := s.Manifest().Metadata
			if md.Key != c.key || md.Broker != 1 || len(md.Epochs) != 1 || md.End < md.Start || md.TxnIndexEmpty != (c.local.Transaction == nil) {
				t.Errorf("metadata %+v", md)
			}
		})
	}
}

// shape is a JSON document with its field names and order, and the values that do not depend on chance.
func shape(t *testing.T, b []byte) string {
	t.Helper()
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber()
	var out strings.Builder
	for {
		tok, err := dec.Token()
		if err != nil {
			return out.String()
		}
		text := fmt.Sprint(tok)
		if s, ok := tok.(string); ok && len(s) > 40 {
			text = "LONG"
		}
		out.WriteString(text + "\n")
	}
}

// From the same input we write the same manifest; keys, IVs and the frames of another zstd may differ.
func TestWriteAsTheyDo(t *testing.T) {
	ring := keyring(t)
	for _, c := range segments(t) {
		t.Run(c.name, func(t *testing.T) {
			m, err := remoteformat.ParseManifest(c.manifest)
			if err != nil {
				t.Fatal(err)
			}
			o := remoteformat.WriteOptions{ChunkSize: m.Chunks.ChunkSize, Compress: m.Compressed, Keyring: ring, Rand: rand.Reader}
			if m.Encryption != nil {
				o.ActiveKey = "fixture"
			}
			x := c.local
			x.LeaderEpoch = []byte("0\n1\n0 0\n")
			var spool bytes.Buffer
			w, err := remoteformat.Write(remoteformat.Source{Log: bytes.NewReader(c.localLog), Size: int64(len(c.localLog)), Indexes: x, Metadata: m.Metadata}, o, &spool)
			if err != nil {
				t.Fatal(err)
			}
			ours, err := w.Manifest.Encode()
			if err != nil {
				t.Fatal(err)
			}
			object := spool.Bytes()
			if !o.Transforms() {
				object = c.localLog
				if !bytes.Equal(ours, c.manifest) {
					t.Errorf("plain manifest differs:\n%s\n%s", ours, c.manifest)
				}
				if !bytes.Equal(w.Indexes, c.indexes) {
					t.Error("indexes differ")
				}
			} else if !m.Compressed {
				if a, b := shape(t, ours), shape(t, c.manifest); a != b {
					t.Errorf("manifest:\n%s\ninstead of\n%s", a, b)
				}
			} else if a, b := fields(t, ours), fields(t, c.manifest); a != b {
				t.Errorf("fields:\n%s\ninstead of\n%s", a, b)
			}
			if int64(len(object)) != w.LogSize || len(w.Indexes) != len(c.indexes) {
				t.Errorf("%d bytes of log, %d of indexes", len(object), len(w.Indexes))
			}
			s, err := remoteformat.Open(ours, ring)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := decodeAll(s, object); err != nil || !bytes.Equal(got, c.localLog) {
				t.Errorf("own log differs (%v)", err)
			}
			if got, err := s.DecodeIndexes(w.Indexes); err != nil || !reflect.DeepEqual(got, x) {
				t.Errorf("own indexes differ (%v)", err)
			}
		})
	}
}

// fields lists the names of a document in order.
func fields(t *testing.T, b []byte) string {
	t.Helper()
	out := strings.Split(string(b), `"`)
	var names []string
	for i := 1; i+1 < len(out); i += 2 {
		if strings.HasPrefix(out[i+1], ":") {
			names = append(names, out[i])
		}
	}
	return strings.Join(names, "\n")
}

func TestDamage(t *testing.T) {
	ring := keyring(t)
	for _, c := range segments(t) {
		s, err := remoteformat.Open(c.manifest, ring)
		if err != nil {
			t.Fatal(err)
		}
		if s.Manifest().Encryption == nil {
			continue
		}
		bad := bytes.Clone(c.log)
		bad[len(bad)/2] ^= 1
		if _, err := decodeAll(s, bad); err == nil {
			t.Errorf("%s: damage not seen", c.name)
		}
		if _, err := remoteformat.Open(c.manifest, nil); err == nil {
			t.Errorf("%s: opened without a key", c.name)
		}
	}
}
