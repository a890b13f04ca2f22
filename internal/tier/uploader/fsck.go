package uploader

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

// FsckOptions say what to look at and whether to mend it.
type FsckOptions struct {
	Prefix string
	Now    time.Time
	// MinAge protects what is younger: it may belong to records that are not among the known ones yet. Default 24 h.
	MinAge time.Duration
	// Ours tells whether a topic id is of this cluster. Objects and uploads of other topics are reported as foreign
	// and never touched. Nil takes the topics of the known segments.
	Ours func(topic tp.UUID) bool
	// Repair deletes orphans and aborts unfinished uploads that are old enough.
	Repair bool
}

// Missing is a finished segment's object that is not there or has another size.
type Missing struct {
	Segment *tier.Segment
	Key     string
	Size    int64 // -1 if the object is missing
}

// Report is the result of Fsck. Lists are in the order of keys, or of the known segments.
type Report struct {
	Objects int
	Bytes   int64
	// Orphans are objects of our topics that no record knows. Young ones are counted in Young alone.
	Orphans     []objstore.Info
	OrphanBytes int64
	Young       int
	// Dangling are records of copies and deletions that have not moved for MinAge.
	Dangling []*tier.Segment
	// Missing are objects of finished segments that are missing or have the wrong size: lost data.
	Missing []Missing
	// Uploads are unfinished multipart uploads of our topics, which no listing of objects shows.
	Uploads     []objstore.Upload
	UploadBytes int64
	// Foreign counts objects and uploads below the prefix that are not of this layout or cluster.
	Foreign int
	// UploadsUnknown says why unfinished uploads could not be listed; nil if they were.
	UploadsUnknown error
	// Removed and Aborted count what Repair did.
	Removed, Aborted int
}

// Clean reports whether nothing needs attention.
func (r *Report) Clean() bool {
	return len(r.Orphans)+len(r.Dangling)+len(r.Missing)+len(r.Uploads) == 0
}

// Fsck compares the bucket below the prefix with all known segments, in any state. The known ones must have been read before
// the call. It lists the bucket once.
func Fsck(ctx context.Context, b objstore.Bucket, known []*tier.Segment, o FsckOptions) (*Report, error) {
	if o.MinAge <= 0 {
		o.MinAge = 24 * time.Hour
	}
	f := &fsck{o: o, r: &Report{}, known: map[string]*tier.Segment{}, sizes: map[string]int64{}}
	topics := map[tp.UUID]bool{}
	for _, s := range known {
		topics[s.TopicID] = true
		for _, object := range objects {
			f.known[s.Object(o.Prefix, object)] = s
		}
		if (s.State == tier.CopyStarted || s.State == tier.DeleteStarted) && o.Now.Sub(time.UnixMilli(s.EventTime)) >= o.MinAge {
			f.r.Dangling = append(f.r.Dangling, s)
		}
	}
	if f.o.Ours == nil {
		f.o.Ours = func(topic tp.UUID) bool { return topics[topic] }
	}
	if err := b.List(ctx, o.Prefix, "", f.object); err != nil {
		return nil, fmt.Errorf("fsck: %w", err)
	}
	err := objstore.ListUploads(ctx, b, o.Prefix, f.upload)
	if errors.Is(err, objstore.ErrAccess) {
		f.r.UploadsUnknown = err
	} else if err != nil && !errors.Is(err, objstore.ErrUnsupported) {
		return nil, fmt.Errorf("fsck: %w", err)
	}
	for _, s := range known {
		if s.State != tier.CopyFinished {
			continue
		}
		for _, object := range objects {
			key := s.Object(o.Prefix, object)
			size, there := f.sizes[key]
			if !there { // perhaps below another prefix, or written since the listing
				info, err := b.Stat(ctx, key)
				if err == nil {
					size, there = info.Size, true
				} else if !errors.Is(err, objstore.ErrNotFound) {
					return nil, fmt.Errorf("fsck: %w", err)
				}
			}
			wrong := object == remoteformat.ObjectLog && s.Format == tier.FormatKafkaV1 && size != s.Size
			if !there {
				f.r.Missing = append(f.r.Missing, Missing{s, key, -1})
			} else if wrong {
				f.r.Missing = append(f.r.Missing, Missing{s, key, size})
			}
		}
	}
	if o.Repair {
		return f.r, f.repair(ctx, b)
	}
	return f.r, nil
}

var objects = []remoteformat.Object{remoteformat.ObjectLog, remoteformat.ObjectIndexes, remoteformat.ObjectManifest}

type fsck struct {
	o     FsckOptions
	r     *Report
	known map[string]*tier.Segment
	sizes map[string]int64
}

func (f *fsck) object(info objstore.Info) error {
	f.r.Objects++
	f.r.Bytes += info.Size
	if f.known[info.Key] != nil {
		f.sizes[info.Key] = info.Size
		return nil
	}
	k, _, err := remoteformat.ParseKey(f.o.Prefix, info.Key)
	switch {
	case err != nil || !f.o.Ours(k.TopicID):
		f.r.Foreign++
	case f.o.Now.Sub(info.LastModified) < f.o.MinAge:
		f.r.Young++
	default:
		f.r.Orphans = append(f.r.Orphans, info)
		f.r.OrphanBytes += info.Size
	}
	return nil
}

func (f *fsck) upload(u objstore.Upload) error {
	k, _, err := remoteformat.ParseKey(f.o.Prefix, u.Key)
	switch {
	case err != nil || !f.o.Ours(k.TopicID):
		f.r.Foreign++
	case f.o.Now.Sub(u.Initiated) < f.o.MinAge:
		f.r.Young++
	default:
		f.r.Uploads = append(f.r.Uploads, u)
		f.r.UploadBytes += u.Bytes
	}
	return nil
}

func (f *fsck) repair(ctx context.Context, b objstore.Bucket) error {
	for _, info := range f.r.Orphans {
		if err := b.Delete(ctx, info.Key); err != nil {
			return fmt.Errorf("fsck: remove orphan: %w", err)
		}
		f.r.Removed++
	}
	for _, u := range f.r.Uploads {
		if err := objstore.AbortUpload(ctx, b, u); err != nil {
			return fmt.Errorf("fsck: abort upload: %w", err)
		}
		f.r.Aborted++
	}
	return nil
}
