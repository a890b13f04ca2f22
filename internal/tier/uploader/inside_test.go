package uploader_test

import (
	"testing"

	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tier/uploader"
)

// A range may begin inside of its first batch, where DeleteRecords ended; no later batch may reach back.
func TestUploadFromInsideABatch(t *testing.T) {
	seg, src := make10(t, 1, 0, recordbatch.CodecNone)
	seg.Start = 9
	if _, err := uploader.Upload(t.Context(), objstore.NewMemory(), seg, src, uploader.Options{}); err != nil {
		t.Fatal(err)
	}
}
