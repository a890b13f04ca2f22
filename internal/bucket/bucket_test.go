package bucket_test

import (
	"strings"
	"testing"

	"github.com/varve-io/varve/internal/bucket"
	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/s3test"
)

func TestOpen(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("AWS_ENDPOINT_URL", "")
	for url, want := range map[string]string{
		"mem:": "mem:", dir + "/a": "file://" + dir + "/a", "file://" + dir + "/b": "file://" + dir + "/b",
		"s3://name/pre/fix?endpoint=http://127.0.0.1:9&path-style=1": "s3://name at 127.0.0.1:9/pre/fix/",
	} {
		b, err := bucket.Open(url, bucket.Options{AccessKey: "key", SecretKey: "hidden"})
		if err != nil || b.String() != want {
			t.Errorf("%s: %v %v", url, b, err)
		}
	}
	for _, url := range []string{"", "gs://x", "s3://", "s3://user:hidden@b", "s3://b?colour=red", "s3://b?path-style=perhaps", "file://host/x", "s3://b?part-size=12"} {
		if _, err := bucket.Open(url, bucket.Options{}); err == nil || strings.Contains(err.Error(), "hidden") {
			t.Errorf("%s: %v", url, err)
		}
	}
}

func TestOpenRealServer(t *testing.T) {
	s := s3test.Start(t)
	url := strings.Replace(s.URL(), "?", "/some/prefix?", 1)
	b, err := bucket.Open(url, bucket.Options{AccessKey: s.AccessKey, SecretKey: s.SecretKey})
	if err != nil {
		t.Fatal(err)
	}
	if rep, err := objstore.Check(t.Context(), b); err != nil || !rep.CreateOnly || !rep.Multiparts || !rep.Presign {
		t.Errorf("%+v %v", rep, err)
	}
}
