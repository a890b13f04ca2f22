package objectstore

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

// store puts a segment of random, half compressible bytes into a bucket.
func store(t *testing.T, b objstore.Bucket, o remoteformat.WriteOptions) (direct.Segment, []byte) {
	t.Helper()
	plain := make([]byte, 10_000)
	for i := range plain {
		if i%100 < 50 {
			plain[i] = byte(mathrand.IntN(256))
		}
	}
	key := remoteformat.Key{Topic: "t", TopicID: tp.UUID{1}, Partition: 3, Start: 7, ID: tp.UUID{9}}
	var spool bytes.Buffer
	w, err := remoteformat.Write(remoteformat.Source{Metadata: remoteformat.Metadata{Key: key, End: 99}, Log: bytes.NewReader(plain), Size: int64(len(plain))}, o, &spool)
	if err != nil {
		t.Fatal(err)
	}
	log := plain
	if o.Transforms() {
		log = spool.Bytes()
	}
	manifest, err := w.Manifest.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for object, content := range map[remoteformat.Object][]byte{remoteformat.ObjectLog: log, remoteformat.ObjectManifest: manifest} {
		if err := b.Put(t.Context(), key.Object("p/", object), bytes.NewReader(content), int64(len(content)), objstore.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	s := direct.Segment{SegmentID: key.ID, ObjectKey: key.Object("p/", remoteformat.ObjectLog), Format: tier.FormatKafkaV1, Size: int64(len(plain)), BaseOffset: 7}
	if o.Transforms() {
		s.Format = tier.FormatChunkedV1
	}
	return s, plain
}

func pair(t *testing.T) (*remoteformat.Keyring, []byte) {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	private := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	var ring remoteformat.Keyring
	if err := ring.Add("k", private, nil); err != nil {
		t.Fatal(err)
	}
	return &ring, private
}

func read(f *Fetcher, s direct.Segment, start, end int64) ([]byte, error) {
	body, err := f.FetchLogSegment(context.Background(), s, start, end)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(body)
}

func TestRangesOfEveryFormat(t *testing.T) {
	ring, private := pair(t)
	for name, o := range map[string]remoteformat.WriteOptions{
		"plain":      {},
		"compressed": {Compress: true, ChunkSize: 700},
		"encrypted":  {ChunkSize: 256, ActiveKey: "k", Keyring: ring, Rand: rand.Reader},
		"both":       {Compress: true, ChunkSize: 4000, ActiveKey: "k", Keyring: ring, Rand: rand.Reader},
	} {
		t.Run(name, func(t *testing.T) {
			b := objstore.WithFaults(objstore.NewMemory())
			s, plain := store(t, b, o)
			f, err := New(b, Options{Keys: map[string][]byte{"k": private}})
			if err != nil {
				t.Fatal(err)
			}
			for range 100 {
				start := mathrand.Int64N(int64(len(plain)))
				end := start + mathrand.Int64N(int64(len(plain))-start+1)
				got, err := read(f, s, start, end)
				if err != nil || !bytes.Equal(got, plain[start:end]) {
					t.Fatalf("%d to %d: %d bytes, %v", start, end, len(got), err)
				}
			}
			if o.Transforms() {
				if gets := b.Count(objstore.OpGet); gets > 102 {
					t.Errorf("%d gets for 100 ranges: the manifest is not cached", gets)
				}
				if _, err := read(f, s, 0, int64(len(plain))+1); !errors.Is(err, direct.ErrShort) {
					t.Errorf("beyond the end: %v", err)
				}
				b.Add(objstore.Fault{Op: objstore.OpGet, Key: ".log", Times: 1, Corrupt: true, CorruptAt: 30})
				if o.ActiveKey == "" {
					return // compression alone may decode damage to as many other bytes; checksums of batches find it
				}
				if _, err := read(f, s, 0, 200); !errors.Is(err, direct.ErrDamaged) {
					t.Errorf("damaged chunk: %v", err)
				}
			}
		})
	}
}

func TestErrorsHaveNames(t *testing.T) {
	ring, private := pair(t)
	chunked := remoteformat.WriteOptions{Compress: true, ChunkSize: 700, ActiveKey: "k", Keyring: ring, Rand: rand.Reader}
	for _, o := range []remoteformat.WriteOptions{{}, chunked} {
		b := objstore.WithFaults(objstore.NewMemory())
		s, _ := store(t, b, o)
		for _, c := range []struct {
			fault objstore.Fault
			want  error
		}{
			{objstore.Fault{Err: objstore.ErrNotFound}, direct.ErrNotFound},
			{objstore.Fault{Err: objstore.ErrAccess}, direct.ErrAuth},
			{objstore.Fault{Err: objstore.ErrThrottled}, direct.ErrThrottled},
			{objstore.Fault{Short: 10, Key: ".log"}, direct.ErrShort},
		} {
			f, err := New(b, Options{Keys: map[string][]byte{"k": private}})
			if err != nil {
				t.Fatal(err)
			}
			b.Add(c.fault)
			if _, err := read(f, s, 0, 5000); !errors.Is(err, c.want) {
				t.Errorf("%s: %v instead of %v", s.Format, err, c.want)
			}
			b.Clear()
		}
	}
	b := objstore.NewMemory()
	s, _ := store(t, b, chunked)
	f, err := New(b, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := read(f, s, 0, 10); !errors.Is(err, direct.ErrAuth) {
		t.Errorf("without the key: %v", err)
	}
	other := s
	other.SegmentID[3]++
	f, _ = New(b, Options{Keys: map[string][]byte{"k": private}})
	if _, err := read(f, other, 0, 10); !errors.Is(err, direct.ErrDamaged) {
		t.Errorf("manifest of another segment: %v", err)
	}
	s.Format = "Other"
	if _, err := read(f, s, 0, 10); !errors.Is(err, direct.ErrUnknownFormat) {
		t.Errorf("unknown format: %v", err)
	}
	if !slices.Contains(f.Formats(), tier.FormatKafkaV1) {
		t.Error(f.Formats())
	}
	if _, err := Open("gs://x", Options{}); err == nil {
		t.Error("unknown scheme was accepted")
	}
}

func TestProperties(t *testing.T) {
	dir := t.TempDir()
	p := map[string]string{"fetch.remote.enabled": "true", "remote.storage.fetcher.class": "directory", "varve.remote.bucket.url": dir}
	c, err := direct.ParseProperties(p, Registry(Options{}))
	if err != nil || c.Fetcher == nil || !c.Enabled {
		t.Fatalf("%+v %v", c, err)
	}
	p["remote.storage.fetcher.class"] = "s3"
	if _, err := direct.ParseProperties(p, Registry(Options{})); err == nil {
		t.Error("a directory was taken for S3")
	}
}

// A Fetcher only reads: a directory that is not there is an error, and stays away.
func TestOpenMakesNoDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "typo")
	if _, err := Open(dir, Options{}); err == nil {
		t.Error("opened")
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("a folder was made")
	}
}
