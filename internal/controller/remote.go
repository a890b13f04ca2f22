package controller

import (
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

// partition finds a partition of a living topic whose leader speaks in the current epoch: the fence against a deposed
// leader's uploads (D2).
func partition(img *metadata.Image, topic tp.UUID, index, leader, epoch int32) (*metadata.Partition, error) {
	t, ok := img.TopicsByID[topic]
	if !ok || index < 0 || int(index) >= len(t.Partitions) {
		return nil, refuse(ErrUnknownTopic, "no partition %d of a topic with id %s", index, topic)
	}
	p := t.Partitions[index]
	if p.Leader != leader || p.LeaderEpoch != epoch {
		return nil, refuse(ErrFenced, "%s-%d is led by %d in epoch %d, not by %d in epoch %d", t.Name, index, p.Leader, p.LeaderEpoch, leader, epoch)
	}
	return p, nil
}

// StartCopy registers an upload. It is refused unless the range starts right behind the tier's end (or, where the tier is
// empty, anywhere), since ranges of a partition are contiguous and disjoint in any epoch (D7).
func StartCopy(img *metadata.Image, s tier.Segment) ([]metadata.Record, error) {
	p, err := partition(img, s.TopicID, s.Partition, s.Broker, s.LeaderEpoch)
	if err != nil {
		return nil, err
	}
	if s.State != tier.CopyStarted || s.End < s.Start || s.Start < 0 || len(s.Epochs) == 0 {
		return nil, refuse(ErrInvalidRequest, "remote segment %s: impossible range %d to %d", s.ID, s.Start, s.End)
	}
	if end := p.Remote.End(); end >= 0 && s.Start != end+1 {
		return nil, refuse(ErrInvalidRequest, "remote segment %s starts at %d, but the tier ends at %d", s.ID, s.Start, end)
	}
	for _, other := range p.Remote {
		if other.State == tier.CopyStarted {
			return nil, refuse(ErrInvalidRequest, "remote segment %s is being copied already", other.ID)
		}
	}
	return []metadata.Record{metadata.RemoteSegmentRecord{Segment: s}}, nil
}

// Finished is what an upload learned.
type Finished struct {
	ObjectBytes    int64
	CRC            uint32
	Format         string
	CustomMetadata []byte
}

// FinishCopy makes a remote segment readable.
func FinishCopy(img *metadata.Image, s tier.Segment, f Finished, now int64) ([]metadata.Record, error) {
	p, err := partition(img, s.TopicID, s.Partition, s.Broker, s.LeaderEpoch)
	if err != nil {
		return nil, err
	}
	for _, have := range p.Remote {
		if have.ID == s.ID && have.State == tier.CopyStarted {
			return []metadata.Record{metadata.RemoteStateRecord{Topic: s.TopicID, Index: s.Partition, ID: s.ID, State: tier.CopyFinished, EventTime: now,
				ObjectBytes: f.ObjectBytes, CRC: f.CRC, Format: f.Format, CustomMetadata: f.CustomMetadata}}, nil
		}
	}
	return nil, refuse(ErrFenced, "remote segment %s is not being copied any more", s.ID)
}

// StartDelete hides remote segments from readers and moves the log start with them, in one batch. A segment that is
// deleting already is skipped.
func StartDelete(img *metadata.Image, topic tp.UUID, index, leader, epoch int32, ids []tp.UUID, logStart, now int64) ([]metadata.Record, error) {
	p, err := partition(img, topic, index, leader, epoch)
	if err != nil {
		return nil, err
	}
	var records []metadata.Record
	if logStart > p.LogStart {
		records = append(records, metadata.RemoteStateRecord{Topic: topic, Index: index, LogStart: logStart})
	}
	for _, id := range ids {
		for _, s := range p.Remote {
			if s.ID == id && s.State != tier.DeleteStarted {
				records = append(records, metadata.RemoteStateRecord{Topic: topic, Index: index, ID: id, State: tier.DeleteStarted, EventTime: now})
			}
		}
	}
	return records, nil
}

// FinishDelete forgets remote segments whose objects are gone, of living and of deleting topics. Forgetting the last
// segment of a deleting topic forgets the topic.
func FinishDelete(img *metadata.Image, topic tp.UUID, index int32, ids []tp.UUID) ([]metadata.Record, error) {
	t, living := img.TopicsByID[topic]
	if !living {
		t = img.Deleting[topic]
	}
	if t == nil || index < 0 || int(index) >= len(t.Partitions) {
		return nil, refuse(ErrUnknownTopic, "no partition %d of a topic with id %s", index, topic)
	}
	done := map[tp.UUID]bool{}
	var records []metadata.Record
	for _, id := range ids {
		for _, s := range t.Partitions[index].Remote {
			if s.ID != id || done[id] {
				continue
			}
			done[id] = true
			if s.State != tier.DeleteStarted {
				if living {
					return nil, refuse(ErrInvalidRequest, "remote segment %s is %s, its objects must not be gone", id, s.State)
				}
				records = append(records, metadata.RemoteStateRecord{Topic: topic, Index: index, ID: id, State: tier.DeleteStarted})
			}
			records = append(records, metadata.RemoteStateRecord{Topic: topic, Index: index, ID: id, State: tier.DeleteFinished})
		}
	}
	if !living && remaining(t) == len(done) {
		records = append(records, metadata.ForgetTopicRecord{Topic: topic})
	}
	return records, nil
}

func remaining(t *metadata.Topic) int {
	n := 0
	for _, p := range t.Partitions {
		n += len(p.Remote)
	}
	return n
}

// DisableRemote takes one partition out of the tier once its topic says so (KIP-950).
func DisableRemote(img *metadata.Image, topic tp.UUID, index, leader, epoch int32, logStart, now int64) ([]metadata.Record, error) {
	p, err := partition(img, topic, index, leader, epoch)
	if err != nil {
		return nil, err
	}
	for _, s := range p.Remote {
		if s.State != tier.DeleteStarted {
			return []metadata.Record{metadata.RemoteDisableRecord{Topic: topic, Index: index, EventTime: now, LogStart: logStart}}, nil
		}
	}
	return nil, nil
}
