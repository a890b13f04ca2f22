package kafkaapi

import (
	"context"
	"slices"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tierinfo"
	"github.com/varve-io/varve/internal/tp"
)

// describeLogDirs serves DescribeLogDirs (KIP-113, KIP-827).
func (a *API) describeLogDirs(_ context.Context, _ *call, req *kmsg.DescribeLogDirsRequest) *kmsg.DescribeLogDirsResponse {
	resp := respond[*kmsg.DescribeLogDirsResponse](req)
	img := a.Image()
	ask := tierinfo.Ask(0)
	if req.Version >= tierinfo.MinVersion {
		ask = tierinfo.Requested(req)
	}
	dir := kmsg.NewDescribeLogDirsResponseDir()
	dir.Dir = a.LogDir
	dir.TotalBytes, dir.UsableBytes = a.DiskUsage()
	for _, name := range img.TopicNames() {
		asked := req.Topics == nil
		var only []int32
		for _, t := range req.Topics {
			if t.Topic == name {
				asked, only = true, append(only, t.Partitions...)
			}
		}
		if !asked {
			continue
		}
		rt := kmsg.NewDescribeLogDirsResponseDirTopic()
		rt.Topic = name
		for index := range img.Topics[name].Partitions {
			if only != nil && !slices.Contains(only, int32(index)) {
				continue
			}
			part, ok := a.Replicas.Get(tp.Partition{Topic: name, Index: int32(index)})
			if !ok || part.Log() == nil {
				continue
			}
			rp := kmsg.NewDescribeLogDirsResponseDirTopicPartition()
			rp.Partition, rp.Size = int32(index), part.Log().Offsets().Size
			rp.OffsetLag = a.offsetLag(part)
			if ask > 0 {
				if err := tierinfo.Set(&rp, a.tierInfo(part, ask)); err != nil {
					a.Log.Error("tier info was left out", "partition", part.ID().String(), "cause", err)
				}
			}
			rt.Partitions = append(rt.Partitions, rp)
		}
		if len(rt.Partitions) > 0 {
			dir.Topics = append(dir.Topics, rt)
		}
	}
	resp.Dirs = append(resp.Dirs, dir)
	var err error
	switch ask {
	case tierinfo.Segments:
		err = tierinfo.SetDeleted(resp, deleted(img))
	case tierinfo.Readers:
		err = tierinfo.SetReaders(resp, a.Metrics.readers.list())
	}
	if err != nil {
		a.Log.Error("a part of the tier info was left out", "cause", err)
	}
	return resp
}

// offsetLag is how far the local log end is behind the high watermark; a leader's is never.
func (a *API) offsetLag(p *partition.Partition) int64 {
	if marks, err := p.ReplicaOffsets(-1); err == nil {
		return max(marks.HighWatermark-marks.End, 0)
	}
	return 0
}

// tierInfo collects what an admin may want to know of a partition's tier.
func (a *API) tierInfo(p *partition.Partition, ask tierinfo.Ask) tierinfo.Partition {
	marks, err := p.ReplicaOffsets(-1)
	info := tierinfo.Partition{LocalStart: marks.LocalLogStart, LogStart: marks.LogStart, End: marks.HighWatermark, RemoteStart: -1, RemoteEnd: -1, Unstable: -1}
	if err != nil {
		info.Failure = err.Error()
		return info
	}
	if marks.LastStable < marks.HighWatermark {
		info.Unstable = marks.LastStable
	}
	info.LocalBytes, info.LogEnd, info.Follower, info.Thin = marks.Size, marks.End, !p.Leads(), a.Thin(p)
	if info.Follower && a.Replication != nil {
		if phase, cause, ok := a.Replication(p.ID()); ok {
			info.Phase = phase.String()
			if cause != nil {
				info.Failure = cause.Error()
			}
		}
	}
	c := p.Log().Config()
	info.Tiered, info.CopyDisabled = c.Tiered, c.CopyDisabled
	remote := p.Remote()
	info.RemoteStart, info.RemoteEnd, info.RemoteBytes = remote.Start(), remote.End(), remote.Bytes()
	for _, s := range remote {
		switch s.State {
		case tier.CopyFinished:
			info.RemoteCount++
		case tier.DeleteStarted:
			info.Deleting++
		}
		if ask == tierinfo.Segments {
			info.List = append(info.List, *s)
		}
	}
	if a.TierLag == nil {
		return info
	}
	if lag, ok := a.TierLag(p.ID()); ok {
		info.LagBytes, info.LagSegments, info.Copying = lag.Bytes, lag.Segments, !lag.Copying.IsZero()
		if lag.Err != nil {
			info.Failure = lag.Err.Error()
		}
	}
	return info
}

func deleted(img *metadata.Image) []tierinfo.Deleted {
	var out []tierinfo.Deleted
	for _, t := range img.DeletingTopics() {
		d := tierinfo.Deleted{Topic: t.Name, ID: t.ID}
		for _, p := range t.Partitions {
			for _, s := range p.Remote {
				d.List = append(d.List, *s)
			}
		}
		out = append(out, d)
	}
	return out
}
