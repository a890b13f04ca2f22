package coordinator

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/varve-io/varve/internal/committed"
	"github.com/varve-io/varve/internal/consumergroup"
	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/grouprecord"
)

// Join serves JoinGroup; it waits for the other members of a classic group.
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
	if g := h.consumer(); g != nil && !h.empty() {
		defer s.mu.Unlock()
		result, c := g.Join(r, s.env(groupID), now())
		if err := s.change(h, c); err != nil {
			failed.Err = err
			return failed
		}
		return result
	}
	if err := s.makeClassic(h); err != nil {
		s.mu.Unlock()
		failed.Err = err
		return failed
	}
	s.token++
	token, c := s.token, make(chan group.JoinResult, 1)
	s.joins[token] = c
	s.apply(h, h.classic().Join(r, token, now()))
	s.mu.Unlock()
	failed.Err = ErrUnavailable
	return wait(ctx, c, failed)
}

// makeClassic makes a consumer group without members a classic one.
func (s *shard) makeClassic(h *hosted) error {
	g := h.consumer()
	if g == nil {
		return nil
	}
	if _, err := s.append(g.Tombstones()); err != nil {
		return notPersisted(err)
	}
	h.members = group.New(h.id, s.owner.config().Group, now())
	return nil
}

// Sync serves SyncGroup; it waits for the assignment of a classic group's leader.
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
	if g := h.consumer(); g != nil {
		defer s.mu.Unlock()
		result := g.Sync(r, s.env(groupID), now())
		s.setClock(h)
		return result
	}
	s.token++
	token, c := s.token, make(chan group.SyncResult, 1)
	s.syncs[token] = c
	s.apply(h, h.classic().Sync(r, token, now()))
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
	switch g := h.members.(type) {
	case *group.Group:
		err = g.Heartbeat(memberID, instanceID, generation, now())
	case *consumergroup.Group:
		c, answer := g.BeatClassic(memberID, instanceID, generation, s.env(groupID), now())
		if err := s.change(h, c); err != nil {
			return err
		}
		return answer
	}
	s.setClock(h)
	return err
}

// Leaver is one member that leaves.
type Leaver = consumergroup.Leaver

// Leave serves LeaveGroup; the errors are by member.
func (gs *Groups) Leave(groupID string, leavers []Leaver) ([]error, error) {
	s, err := gs.begin(groupID)
	if err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	errs := make([]error, len(leavers))
	h := s.group(groupID, false)
	if h != nil && h.consumer() != nil {
		errs, c := h.consumer().Leave(leavers, s.env(groupID), now())
		return errs, s.change(h, c)
	}
	for i, l := range leavers {
		if h == nil {
			errs[i] = group.ErrUnknownMember
			continue
		}
		var e group.Effects
		e, errs[i] = h.classic().Leave(l.MemberID, l.InstanceID, now())
		s.apply(h, e)
	}
	return errs, nil
}

// Consumers is what holds for a consumer group at the moment.
func (gs *Groups) Consumers(groupID string) consumergroup.Config {
	return gs.config().Consumer(groupID)
}

// ConsumerHeartbeat serves ConsumerGroupHeartbeat (KIP-848). A member that joins finds or makes a consumer group of that name: an empty classic
// one becomes one, and so does a live one of consumers, if group.consumer.migration.policy says so.
func (gs *Groups) ConsumerHeartbeat(groupID string, r consumergroup.Heartbeat) (consumergroup.Answer, error) {
	s, err := gs.begin(groupID)
	if err != nil {
		return consumergroup.Answer{}, err
	}
	defer s.mu.Unlock()
	h, env := s.group(groupID, false), s.env(groupID)
	switch {
	case h == nil && r.Epoch != 0:
		return consumergroup.Answer{}, group.Refuse(group.ErrNotFound, "Group %s not found.", groupID)
	case h == nil:
		return s.convert(&hosted{id: groupID, offsets: committed.New(groupID)}, consumergroup.New(groupID), nil, r, env)
	case h.consumer() != nil:
		a, c, err := h.consumer().Heartbeat(r, env, now())
		if err == nil {
			err = s.change(h, c)
		}
		return a, err
	case r.Epoch != 0:
		return consumergroup.Answer{}, group.Refuse(group.ErrNotFound, "Group %s is not a consumer group.", groupID)
	}
	g, c, err := consumergroup.Upgrade(h.classic(), env, now())
	if err != nil {
		return consumergroup.Answer{}, err
	}
	return s.convert(h, g, c.Records, r, env)
}

// convert gives a group a new membership, whose first member of the consumer protocol joins, together with the records that lead there.
// Unless they are written all stays as it was.
func (s *shard) convert(h *hosted, g *consumergroup.Group, records []grouprecord.Entry, r consumergroup.Heartbeat, env consumergroup.Env) (consumergroup.Answer, error) {
	a, c, err := g.Heartbeat(r, env, now())
	if err != nil {
		return a, err
	}
	w, err := s.seat.append(encoded(append(records, c.Records...)), nil)
	if err != nil {
		return a, notPersisted(err)
	}
	switch old := h.classic(); {
	case old != nil:
		s.reply(old.Dismiss())
		h.members = g
	default:
		h = s.host(h.id, h.offsets, g)
	}
	s.setClock(h)
	if err := committedWithin(s.owner.config().CommitTimeout, w); err != nil {
		return a, notPersisted(err)
	}
	return a, nil
}

// Commit is one offset to commit.
type Commit struct {
	committed.Partition
	committed.Offset
}

// Committer is who commits, and how.
type Committer struct {
	group.Committer
	// Version is that of OffsetCommit: from 9 on GROUP_ID_NOT_FOUND takes the place of an illegal generation, and members of the consumer
	// protocol may commit.
	Version int16
}

// Commit serves OffsetCommit; the errors are by commit.
func (gs *Groups) Commit(groupID string, by Committer, commits []Commit) ([]error, error) {
	s, err := gs.begin(groupID)
	if err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	h := s.group(groupID, by.Generation < 0)
	if h == nil {
		if by.Version >= 9 {
			return nil, group.ErrNotFound
		}
		return nil, group.ErrIllegalGeneration
	}
	if g := h.consumer(); g != nil {
		err = g.MayCommit(consumergroup.Commit{Committer: by.Committer, Partitions: partitions(commits), Old: by.Version < 9}, s.env(groupID).Image)
	} else {
		err = h.classic().MayCommit(by.Committer, now())
	}
	if err != nil {
		return nil, err
	}
	errs, records := s.commits(h, commits)
	if len(records) > 0 {
		at, err := s.append(records)
		if err != nil {
			return nil, notPersisted(err)
		}
		for i, c := range commits {
			if errs[i] == nil {
				h.offsets.Set(c.Partition, c.Offset, at)
			}
		}
	}
	s.setClock(h)
	return errs, nil
}

func partitions(commits []Commit) []committed.Partition {
	out := make([]committed.Partition, len(commits))
	for i, c := range commits {
		out[i] = c.Partition
	}
	return out
}

// commits are the records of commits, and by commit why it has none.
func (s *shard) commits(h *hosted, commits []Commit) (errs []error, records []grouprecord.Entry) {
	errs = make([]error, len(commits))
	records = make([]grouprecord.Entry, 0, len(commits))
	limit := s.owner.config().MetadataMax
	for i, c := range commits {
		if len(c.Metadata) > limit {
			errs[i] = ErrMetadataTooLarge
			continue
		}
		records = append(records, h.offsets.Commit(c.Partition, c.Offset))
	}
	return errs, records
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
	if g := h.consumer(); g != nil {
		err = g.MayCommit(consumergroup.Commit{Committer: by, Partitions: partitions(commits), InTxn: true}, s.env(groupID).Image)
	} else {
		err = h.classic().MayCommitInTxn(by, now())
	}
	if err != nil {
		return nil, err
	}
	errs, records := s.commits(h, commits)
	if len(records) > 0 {
		w, err := s.seat.append(encoded(records), &in)
		if err == nil {
			// Pending as soon as it is written: the marker may come before all replicas have it.
			for i, c := range commits {
				if errs[i] == nil {
					h.offsets.SetPending(in.ProducerID, c.Partition, c.Offset, w.Next-1)
				}
			}
			s.inTxn(in.ProducerID, groupID)
			err = committedWithin(s.owner.config().CommitTimeout, w)
		}
		if err != nil {
			return nil, notPersisted(err)
		}
	}
	s.setClock(h)
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

func (s *shard) endTxn(producerID int64, commit bool, groups func(string) *committed.Offsets) {
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
	s.endTxn(producerID, commit, func(id string) *committed.Offsets {
		if h := s.groups[id]; h != nil {
			return h.offsets
		}
		return nil
	})
}

// Fetched is one answer of FetchOffsets; Found is false where nothing was committed.
type Fetched struct {
	committed.Partition
	committed.Offset
	Found    bool
	Unstable bool // a transaction that is not decided has a commit of it
}

// Fetcher is who asks for committed offsets: a member of a consumer group in its epoch, or with nil and -1 nobody in particular.
type Fetcher struct {
	MemberID *string
	Epoch    int32
}

// FetchOffsets serves OffsetFetch for one group: the given partitions, or with all those that have offsets.
func (gs *Groups) FetchOffsets(groupID string, by Fetcher, wanted []committed.Partition, all bool) ([]Fetched, error) {
	s, err := gs.begin(groupID)
	if err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	h := s.group(groupID, false)
	if h != nil && h.consumer() != nil {
		if err := h.consumer().MayFetch(by.MemberID, by.Epoch); err != nil {
			return nil, err
		}
	}
	if all && h != nil {
		wanted = h.offsets.Partitions()
	}
	out := make([]Fetched, len(wanted))
	for i, tp := range wanted {
		out[i] = Fetched{Partition: tp, Offset: committed.Offset{Offset: -1, LeaderEpoch: -1}}
		if h != nil {
			if o, ok := h.offsets.Get(tp); ok {
				out[i].Offset, out[i].Found = o, true
			}
			out[i].Unstable = h.offsets.Unstable(tp)
		}
	}
	return out, nil
}

// Describe serves DescribeGroups for one group, which has to be a classic one.
func (gs *Groups) Describe(groupID string) (group.Description, error) {
	dead := group.Description{State: group.Dead}
	s, err := gs.begin(groupID)
	if err != nil {
		return dead, err
	}
	defer s.mu.Unlock()
	h := s.group(groupID, false)
	switch {
	case h == nil:
		return dead, group.Refuse(group.ErrNotFound, "Group %s not found.", groupID)
	case h.classic() == nil:
		return dead, group.Refuse(group.ErrNotFound, "Group %s is not a classic group.", groupID)
	}
	return h.classic().Describe(), nil
}

// DescribeConsumer serves ConsumerGroupDescribe for one group, which has to be a consumer group.
func (gs *Groups) DescribeConsumer(groupID string) (consumergroup.Description, error) {
	s, err := gs.begin(groupID)
	if err != nil {
		return consumergroup.Description{}, err
	}
	defer s.mu.Unlock()
	h := s.group(groupID, false)
	switch {
	case h == nil:
		return consumergroup.Description{}, group.Refuse(group.ErrNotFound, "Group %s not found.", groupID)
	case h.consumer() == nil:
		return consumergroup.Description{}, group.Refuse(group.ErrNotFound, "Group %s is not a consumer group.", groupID)
	}
	return h.consumer().Describe(s.owner.config().Consumer(groupID)), nil
}

// Types of groups, as ListGroups says them.
const (
	TypeClassic  = "classic"
	TypeConsumer = "consumer"
)

// Listed is one group of List.
type Listed struct {
	ID, ProtocolType string
	Type             string // TypeClassic or TypeConsumer
	State            string
}

func (h *hosted) listed() Listed {
	if g := h.consumer(); g != nil {
		return Listed{h.id, "consumer", TypeConsumer, g.State().String()}
	}
	return Listed{h.id, h.classic().ProtocolType(), TypeClassic, h.classic().State().String()}
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
		for _, h := range s.groups {
			out = append(out, h.listed())
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
	if err := h.members.MayDelete(); err != nil {
		return err
	}
	if _, err := s.append(h.tombstones()); err != nil {
		return notPersisted(err)
	}
	s.forget(h)
	return nil
}

// tombstones delete a group and all that it committed.
func (h *hosted) tombstones() []grouprecord.Entry {
	out := h.offsets.AllTombstones()
	if g := h.consumer(); g != nil {
		return append(out, g.Tombstones()...)
	}
	return append(out, h.classic().Tombstone())
}

func (s *shard) forget(h *hosted) {
	if g := h.classic(); g != nil {
		g.Kill(now())
	}
	h.timer.Stop()
	delete(s.groups, h.id)
}

// DeleteOffsets serves OffsetDelete; the errors are by partition. A topic to which members are subscribed is refused (KIP-496).
func (gs *Groups) DeleteOffsets(groupID string, partitions []committed.Partition) ([]error, error) {
	s, err := gs.begin(groupID)
	if err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	h := s.group(groupID, false)
	if h == nil {
		return nil, group.ErrNotFound
	}
	if g := h.classic(); g != nil {
		if err := g.MayDeleteOffsets(); err != nil {
			return nil, err
		}
	}
	errs := make([]error, len(partitions))
	var gone []committed.Partition
	for i, tp := range partitions {
		if h.members.Subscribed(tp.Topic) {
			errs[i] = group.ErrSubscribed
		} else if _, ok := h.offsets.Get(tp); ok {
			gone = append(gone, tp)
		}
	}
	if len(gone) > 0 {
		if _, err := s.append(h.offsets.Tombstones(gone)); err != nil {
			return nil, notPersisted(err)
		}
	}
	for i, tp := range partitions {
		if errs[i] == nil {
			h.offsets.Forget(tp)
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
	for _, id := range slices.Sorted(maps.Keys(s.groups)) {
		h := s.groups[id]
		gone := h.expired(s.owner.config().OffsetRetentionMs)
		for _, tp := range h.offsets.Partitions() {
			if deleted(tp.Topic) && !slices.Contains(gone, tp) {
				gone = append(gone, tp)
			}
		}
		whole := h.idle() && !h.offsets.Pending() && len(gone) == len(h.offsets.Partitions())
		var records []grouprecord.Entry
		switch {
		case whole:
			records = h.tombstones()
		case len(gone) > 0:
			records = h.offsets.Tombstones(gone)
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
			h.offsets.Forget(tp)
		}
	}
	return nil
}

// expired lists the offsets that have outlived their retention (KIP-211).
func (h *hosted) expired(retention int64) []committed.Partition {
	expire, since := true, int64(0)
	if g := h.classic(); g != nil {
		expire, since = g.Retention()
	}
	if !expire {
		return nil
	}
	return h.offsets.Expired(retention, since, now(), h.members.Subscribed)
}

// idle says that nobody is in the group, nor has asked to be.
func (h *hosted) idle() bool {
	if g := h.classic(); g != nil {
		return g.Idle()
	}
	return h.empty()
}
