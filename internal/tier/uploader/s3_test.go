package uploader_test

import (
	"io"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/varve-io/varve/internal/objstore/s3"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/s3test"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tier/uploader"
	"github.com/varve-io/varve/internal/tp"
)

// Uploads that a killed process left open are found and ended, those of others stay.
func TestFsckUnfinishedUploads(t *testing.T) {
	server := s3test.Start(t)
	b, err := s3.New(server.Options())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	seg, src := make10(t, 1, 0, recordbatch.CodecNone)
	if _, err := uploader.Upload(t.Context(), b, seg, src, uploader.Options{Prefix: "p/"}); err != nil {
		t.Fatal(err)
	}
	seg.State, seg.Format = tier.CopyFinished, tier.FormatKafkaV1
	core, err := minio.NewCore(server.Endpoint[len("http://"):], &minio.Options{Creds: credentials.NewStaticV4(server.AccessKey, server.SecretKey, ""), Region: "us-east-1"})
	if err != nil {
		t.Fatal(err)
	}
	ours, _ := make10(t, 2, 100, recordbatch.CodecNone)
	foreign, _ := make10(t, 3, 0, recordbatch.CodecNone)
	foreign.TopicID = tp.UUID{7}
	for _, key := range []string{ours.Object("p/", remoteformat.ObjectLog), foreign.Object("p/", remoteformat.ObjectLog), "p/else"} {
		id, err := core.NewMultipartUpload(t.Context(), server.Bucket, key, minio.PutObjectOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := core.PutObjectPart(t.Context(), server.Bucket, key, id, 1, io.NewSectionReader(src.Log, 0, 1000), 1000, minio.PutObjectPartOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	o := uploader.FsckOptions{Prefix: "p/", Now: time.Now().Add(48 * time.Hour), Repair: true}
	r, err := uploader.Fsck(t.Context(), b, []*tier.Segment{seg}, o)
	if err != nil || len(r.Uploads) != 1 || r.UploadBytes != 1000 || r.Aborted != 1 || r.Foreign != 2 {
		t.Errorf("%+v %v", r, err)
	}
	if r, err = uploader.Fsck(t.Context(), b, []*tier.Segment{seg}, o); err != nil || !r.Clean() || r.Foreign != 2 {
		t.Errorf("after repair: %+v %v", r, err)
	}
}
