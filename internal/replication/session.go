package replication

import (
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/tierinfo"
	"github.com/varve-io/varve/internal/tp"
)

// fetchVersion is the version of Fetch between brokers: topic ids, the replica's state, no fields for consumers.
const fetchVersion = 17

type key struct {
	topic tp.UUID
	index int32
}

func (m *member) key() key { return key{m.topicID, m.id.Index} }

// session is this side of a fetch session (KIP-227): what the leader was told of each partition.
type session struct {
	id, epoch int32
	told      map[key]told
}

type told struct {
	offset, start, local int64
	epoch, last          int32
}

// request builds the fetch of a batch: all of it in a session's first, what changed in later ones.
func (s *session) request(batch []wanted, c Config, self int32, brokerEpoch int64) *kmsg.FetchRequest {
	req := kmsg.NewPtrFetchRequest()
	req.Version = fetchVersion
	req.ReplicaState.ID, req.ReplicaState.Epoch = self, brokerEpoch
	req.MaxWaitMillis, req.MinBytes, req.MaxBytes = int32(c.MaxWait.Milliseconds()), c.MinBytes, c.ResponseMaxBytes
	req.SessionID, req.SessionEpoch = s.id, s.epoch
	if s.told == nil {
		s.told = map[key]told{}
	}
	topics := map[tp.UUID]int{}
	now := make(map[key]struct{}, len(batch))
	for _, w := range batch {
		k := w.m.key()
		now[k] = struct{}{}
		o := w.m.machine.Partition().Log().Offsets()
		t := told{w.step.Offset, o.LogStart, o.LocalLogStart, w.step.LeaderEpoch, w.step.LastEpoch}
		if was, ok := s.told[k]; ok && was == t && s.epoch > 0 {
			continue
		}
		s.told[k] = t
		i, ok := topics[k.topic]
		if !ok {
			i = len(req.Topics)
			topics[k.topic] = i
			rt := kmsg.NewFetchRequestTopic()
			rt.TopicID = k.topic
			req.Topics = append(req.Topics, rt)
		}
		p := kmsg.NewFetchRequestTopicPartition()
		p.Partition, p.FetchOffset, p.PartitionMaxBytes = k.index, t.offset, c.MaxBytes
		p.CurrentLeaderEpoch, p.LastFetchedEpoch, p.LogStartOffset = t.epoch, t.last, t.start
		if t.local != t.start {
			tierinfo.SetLocalStart(&p, t.local)
		}
		req.Topics[i].Partitions = append(req.Topics[i].Partitions, p)
	}
	forgotten := map[tp.UUID]int{}
	for k := range s.told {
		if _, ok := now[k]; ok {
			continue
		}
		delete(s.told, k)
		i, ok := forgotten[k.topic]
		if !ok {
			i = len(req.ForgottenTopics)
			forgotten[k.topic] = i
			ft := kmsg.NewFetchRequestForgottenTopic()
			ft.TopicID = k.topic
			req.ForgottenTopics = append(req.ForgottenTopics, ft)
		}
		req.ForgottenTopics[i].Partitions = append(req.ForgottenTopics[i].Partitions, k.index)
	}
	return req
}

// accepted takes over what the leader made of it. A leader without room for a session gives none: every fetch is whole then.
func (s *session) accepted(resp *kmsg.FetchResponse) {
	if resp.SessionID == 0 {
		*s = session{}
		return
	}
	s.id = resp.SessionID
	if s.epoch++; s.epoch < 0 {
		s.epoch = 1
	}
}
