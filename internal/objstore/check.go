package objstore

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Report is what Check found out about a bucket that works.
type Report struct {
	// CreateOnly is false where the store ignores the condition of a create-only put; nothing then guards
	// an object against a second writer but its unique name.
	CreateOnly bool
	// Presign is whether the store signs URLs, Multiparts whether unfinished uploads can be listed.
	Presign, Multiparts bool
	// Notes are sentences for the operator about what is degraded and which right would help.
	Notes []string
}

// Check tries every right that a broker needs, on one small object under "varve-probe/" that it removes
// again. The error of a bucket that cannot be used names the missing right or the setting to try.
func Check(ctx context.Context, b Bucket) (Report, error) {
	var rep Report
	var id [12]byte
	rand.Read(id[:])
	dir := "varve-probe/" + hex.EncodeToString(id[:])
	key := dir + "/object"
	const text = "a probe of the rights on this bucket; safe to delete"
	fail := func(right, consequence string, err error) (Report, error) {
		return rep, fmt.Errorf("check of %s: %s: %w", b, explain(right, consequence, err), err)
	}
	put := func() error {
		return b.Put(ctx, key, strings.NewReader(text), int64(len(text)), PutOptions{CreateOnly: true})
	}
	if err := put(); err != nil {
		return fail("write objects (s3:PutObject)", "nothing can be tiered", err)
	}
	defer b.Delete(context.WithoutCancel(ctx), key)
	switch err := put(); {
	case errors.Is(err, ErrExists):
		rep.CreateOnly = true
	case err == nil:
		rep.Notes = append(rep.Notes, "the store ignores the condition of create-only puts (If-None-Match): the guard against a second writer of an object is off")
	default:
		return fail("write objects (s3:PutObject) with a condition", "create-only puts fail; switch them off for this store", err)
	}
	if got, err := ReadRange(ctx, b, key, 2, 5); err != nil {
		return fail("read objects (s3:GetObject)", "tiered data cannot be read", err)
	} else if string(got) != text[2:7] {
		return rep, fmt.Errorf("check of %s: a ranged read returned %q instead of %q: the store or a proxy ignores Range", b, got, text[2:7])
	}
	if info, err := b.Stat(ctx, key); err != nil {
		return fail("read objects (s3:GetObject, HEAD)", "tiered data cannot be verified", err)
	} else if info.Size != int64(len(text)) {
		return rep, fmt.Errorf("check of %s: the stored object has %d bytes instead of %d: the store keeps upload framing in the object; turn off streaming signatures", b, info.Size, len(text))
	}
	found := false
	err := b.List(ctx, dir+"/", "", func(i Info) error {
		found = found || i.Key == key
		return nil
	})
	switch {
	case errors.Is(err, ErrAccess):
		rep.Notes = append(rep.Notes, "the right to list the bucket (s3:ListBucket) is missing: orphans cannot be found, and a missing object looks like a forbidden one")
	case err != nil:
		return fail("list the bucket (s3:ListBucket)", "orphans cannot be found", err)
	case !found:
		return rep, fmt.Errorf("check of %s: a listing right after the put does not show the object", b)
	}
	if err := b.Delete(ctx, key); err != nil {
		return fail("delete objects (s3:DeleteObject)", "expired data would stay in the bucket for ever", err)
	}
	if _, err := b.Stat(ctx, key); err == nil {
		return rep, fmt.Errorf("check of %s: an object is still there after its deletion", b)
	}
	switch err := ListUploads(ctx, b, dir, func(Upload) error { return nil }); {
	case err == nil:
		rep.Multiparts = true
	case errors.Is(err, ErrUnsupported):
	default:
		rep.Notes = append(rep.Notes, "unfinished multipart uploads cannot be listed (s3:ListBucketMultipartUploads): set a lifecycle rule that aborts them. Cause: "+err.Error())
	}
	_, err = b.PresignGet(ctx, key, time.Minute)
	rep.Presign = err == nil
	return rep, nil
}

func explain(right, consequence string, err error) string {
	switch {
	case errors.Is(err, ErrAccess):
		return "the right to " + right + " is missing, or the credentials are wrong; " + consequence
	case errors.Is(err, ErrClockSkew):
		return "set the clock of this machine"
	case errors.Is(err, ErrUnsupported):
		return "the store does not implement what is needed to " + right + "; try other checksum settings"
	case errors.Is(err, ErrNotFound):
		return "the bucket does not exist"
	}
	return "no answer that allows to " + right
}
