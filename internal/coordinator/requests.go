package coordinator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/group"
)

// Join serves JoinGroup; it waits for the other members.
func (gs *Groups) Join(ctx context.Context, groupID string, r group.JoinRequest) group.JoinResult {
	failed := group.JoinResult{MemberID: r.MemberID, Generation: -1}
	s, err := gs.begin(groupID)
	if err != nil {
		failed.Err = err
		return failed
	}
	h := s.group(groupID, r.MemberID == "")
	if h == nil {
		s.mu.Unlock()
		failed.Err = group.ErrUnknownMember
		return failed
	}
	s.token++
	token, c := s.token, make(chan group.JoinResult, 1)
	s.joins[token] = c
	s.apply(h, h.Join(r, token, now()))
	s.mu.Unlock()
	failed.Err = ErrUnavailable
	return wait(ctx, c, failed)
}

// Sync serves SyncGroup; it waits for the leader's assignment.
func (gs *Groups) Sync(ctx context.Context, groupID string, r group.SyncRequest) group.SyncResult {
	s, err := gs.begin(groupID)
	if err != nil {
		return group.SyncResult{Err: err}
	}
	h := s.group(groupID, false)
	if h == nil {
		s.mu.Unlock()
		return group.SyncResult{Err: group.ErrUnknownMember}
	}
	s.token++
	token, c := s.token, make(chan group.SyncResult, 1)
	s.syncs[token] = c
	s.apply(h, h.Sync(r, token, now()))
	s.mu.Unlock()
	return wait(ctx, c, group.SyncResult{Err: ErrUnavailable})
}

// begin checks the group id and returns the group's shard, locked.
func (gs *Groups) begin(groupID string) (*shard, error) {
	if groupID == "" {
		return nil, group.ErrInvalidGroupID
	}
	return gs.shard(groupID)
}

// Heartbeat serves Heartbeat.
func (gs *Groups) Heartbeat(groupID, memberID, instanceID string, generation int32) error {
	s, err := gs.begin(groupID)
	if err != nil {
		return err
	}
	defer s.mu.Unlock()
	h := s.group(groupID, false)
	if h == nil {
		return group.ErrUnknownMember
	}
	err = h.Heartbeat(memberID, instanceID, generation, now())
	s.apply(h, group.Effects{})
	return err
}

// Leaver is one member that leaves.
type Leaver struct{ MemberID, InstanceID string }

// Leave serves LeaveGroup; the errors are by member.
func (gs *Groups) Leave(groupID string, leavers []Leaver) ([]error, error) {
	s, err := gs.begin(groupID)
	if err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	errs := make([]error, len(leavers))
	h := s.group(groupID, false)
	for i, l := range leavers {
		if h == nil {
			errs[i] = group.ErrUnknownMember
			continue
		}
		var e group.Effects
		e, errs[i] = h.Leave(l.MemberID, l.InstanceID, now())
		s.apply(h, e)
	}
	return errs, nil
}

// Commit is one offset to commit.
type Commit struct {
	group.TopicPartition
	group.Offset
}

// Commit serves OffsetCommit; the errors are by commit. ok says which partitions exist. strict asks for
// GROUP_ID_NOT_FOUND instead of an illegal generation (OffsetCommit v9+).
func (gs *Groups) Commit(groupID string, by group.Committer, commits []Commit, strict bool) ([]error, error) {
	s, err := gs.begin(groupID)
	if err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	h := s.group(groupID, by.Generation < 0)
	if h == nil {
		if strict {
			return nil, group.ErrNotFound
		}
		return nil, group.ErrIllegalGeneration
	}
	if err := h.MayCommit(by, now()); err != nil {
		return nil, err
	}
	errs := make([]error, len(commits))
	var records []group.Record
	for i, c := range commits {
		if errs[i] = h.CheckMetadata(c.Metadata); errs[i] == nil {
			records = append(records, h.CommitRecord(c.TopicPartition, c.Offset))
		}
	}
	if len(records) > 0 {
		at, err := s.append(records)
		if err != nil {
			return nil, notPersisted(err)
		}
		for i, c := range commits {
			if errs[i] == nil {
				c.Offset.At = at
				h.SetOffset(c.TopicPartition, c.Offset)
			}
		}
	}
	s.apply(h, group.Effects{})
	return errs, nil
}

// CommitInTxn serves TxnOffsetCommit: the offsets count when the producer's transaction is committed.
func (gs *Groups) CommitInTxn(groupID string, by group.Committer, in InTxn, commits []Commit) ([]error, error) {
	s, err := gs.begin(groupID)
	if err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	h := s.group(groupID, by.Generation < 0)
	if h == nil {
		return nil, group.ErrIllegalGeneration
	}
	if err := h.MayCommitInTxn(by, now()); err != nil {
		return nil, err
	}
	errs := make([]error, len(commits))
	var records []group.Record
	for i, c := range commits {
		if errs[i] = h.CheckMetadata(c.Metadata); errs[i] == nil {
			records = append(records, h.CommitRecord(c.TopicPartition, c.Offset))
		}
	}
	if len(records) > 0 {
		w, err := s.seat.append(plain(records), &in)
		if err == nil {
			// Pending as soon as it is written: the marker may come before all replicas have it.
			for i, c := range commits {
				if errs[i] == nil {
					c.Offset.At = w.Next - 1
					h.SetPending(in.ProducerID, c.TopicPartition, c.Offset)
				}
			}
			s.inTxn(in.ProducerID, groupID)
			err = committed(s.owner.config().CommitTimeout, w)
		}
		if err != nil {
			return nil, notPersisted(err)
		}
	}
	s.apply(h, group.Effects{})
	return errs, nil
}

// inTxn remembers that a group has commits of a producer's transaction.
func (s *shard) inTxn(producerID int64, groupID string) {
	if s.txns == nil {
		s.txns = map[int64]map[string]bool{}
	}
	if s.txns[producerID] == nil {
		s.txns[producerID] = map[string]bool{}
	}
	s.txns[producerID][groupID] = true
}

func (s *shard) endTxn(producerID int64, commit bool, groups func(string) *group.Group) {
	for id := range s.txns[producerID] {
		if g := groups(id); g != nil {
			g.EndTxn(producerID, commit)
		}
	}
	delete(s.txns, producerID)
}

// ended is a transaction that has its marker.
type ended struct {
	producerID int64
	commit     bool
}

// EndTxn takes a marker that was written to a partition of the topic.
func (gs *Groups) EndTxn(index int32, producerID int64, commit bool) {
	gs.hosts.mu.Lock()
	s := gs.hosts.seats[index]
	gs.hosts.mu.Unlock()
	if s == nil {
		return // whoever leads it reads the marker
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.loading {
		s.late = append(s.late, ended{producerID, commit}) // what is being read may end before the marker
		return
	}
	s.endTxn(producerID, commit, func(id string) *group.Group {
		if h := s.groups[id]; h != nil {
			return h.Group
		}
		return nil
	})
}

// Fetched is one answer of FetchOffsets; Found is false where nothing was committed.
type Fetched struct {
	group.TopicPartition
	group.Offset
	Found    bool
	Unstable bool // a transaction that is not decided has a commit of it
}

// FetchOffsets serves OffsetFetch for one group: the given partitions, or with nil all that have offsets.
func (gs *Groups) FetchOffsets(groupID string, wanted []group.TopicPartition, all bool) ([]Fetched, error) {
	s, err := gs.begin(groupID)
	if err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	h := s.group(groupID, false)
	if all && h != nil {
		wanted = h.Offsets()
	}
	out := make([]Fetched, len(wanted))
	for i, tp := range wanted {
		out[i] = Fetched{TopicPartition: tp, Offset: group.Offset{Offset: -1, LeaderEpoch: -1}}
		if h != nil {
			if o, ok := h.Offset(tp); ok {
				out[i].Offset, out[i].Found = o, true
			}
			out[i].Unstable = h.Unstable(tp)
		}
	}
	return out, nil
}

// Describe serves DescribeGroups for one group.
func (gs *Groups) Describe(groupID string) (group.Description, error) {
	s, err := gs.begin(groupID)
	if err != nil {
		return group.Description{State: group.Dead}, err
	}
	defer s.mu.Unlock()
	h := s.group(groupID, false)
	if h == nil {
		return group.Description{State: group.Dead}, &controller.Error{Kind: group.ErrNotFound, Message: fmt.Sprintf("Group %s not found.", groupID)}
	}
	return h.Describe(), nil
}

// Listed is one group of List.
type Listed struct {
	ID, ProtocolType string
	State            group.State
}

// List serves ListGroups: all groups of this broker in order of their ids. It fails while a partition is loading, since
// the list would not be whole.
func (gs *Groups) List() ([]Listed, error) {
	var out []Listed
	for _, s := range gs.all() {
		if err := s.lock(); err != nil {
			if errors.Is(err, ErrNotCoordinator) {
				continue
			}
			return nil, err
		}
		for id, h := range s.groups {
			out = append(out, Listed{id, h.Describe().ProtocolType, h.State()})
		}
		s.mu.Unlock()
	}
	slices.SortFunc(out, func(a, b Listed) int { return cmp.Compare(a.ID, b.ID) })
	return out, nil
}

func (gs *Groups) all() []*shard {
	out := gs.hosts.all()
	slices.SortFunc(out, func(a, b *shard) int { return cmp.Compare(a.part.ID().Index, b.part.ID().Index) })
	return out
}

// Delete serves DeleteGroups for one group.
func (gs *Groups) Delete(groupID string) error {
	s, err := gs.begin(groupID)
	if err != nil {
		return err
	}
	defer s.mu.Unlock()
	h := s.group(groupID, false)
	if h == nil {
		return group.ErrNotFound
	}
	if err := h.MayDelete(); err != nil {
		return err
	}
	if _, err := s.append(h.Tombstones()); err != nil {
		return notPersisted(err)
	}
	s.forget(h)
	return nil
}

func (s *shard) forget(h *hosted) {
	h.Kill(now())
	h.timer.Stop()
	delete(s.groups, h.ID())
}

// DeleteOffsets serves OffsetDelete; the errors are by partition.
func (gs *Groups) DeleteOffsets(groupID string, partitions []group.TopicPartition) ([]error, error) {
	s, err := gs.begin(groupID)
	if err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	h := s.group(groupID, false)
	if h == nil {
		return nil, group.ErrNotFound
	}
	if err := h.MayDeleteOffsets(); err != nil {
		return nil, err
	}
	errs := make([]error, len(partitions))
	var records []group.Record
	for i, tp := range partitions {
		var r group.Record
		var found bool
		if r, found, errs[i] = h.DeleteOffset(tp); found {
			records = append(records, r)
		}
	}
	if len(records) > 0 {
		if _, err := s.append(records); err != nil {
			return nil, notPersisted(err)
		}
	}
	for i, tp := range partitions {
		if errs[i] == nil {
			h.ForgetOffset(tp)
		}
	}
	return errs, nil
}

// Expire drops offsets and groups that have outlived their retention, and with topics those of deleted topics.
func (gs *Groups) Expire(deleted func(topic string) bool) error {
	var errs []error
	for _, s := range gs.all() {
		if s.lock() != nil {
			continue
		}
		errs = append(errs, s.expire(deleted))
		s.mu.Unlock()
	}
	return errors.Join(errs...)
}

func (s *shard) expire(deleted func(string) bool) error {
	ids := make([]string, 0, len(s.groups))
	for id := range s.groups {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for _, id := range ids {
		h := s.groups[id]
		gone, whole := h.Expired(now())
		for _, tp := range h.Offsets() {
			if deleted(tp.Topic) && !slices.Contains(gone, tp) {
				gone = append(gone, tp)
			}
		}
		var records []group.Record
		switch {
		case whole:
			records = h.Tombstones()
		case len(gone) > 0:
			records = h.OffsetTombstones(gone)
		default:
			continue
		}
		if _, err := s.append(records); err != nil {
			return notPersisted(err)
		}
		if whole {
			s.forget(h)
			continue
		}
		for _, tp := range gone {
			h.ForgetOffset(tp)
		}
	}
	return nil
}
