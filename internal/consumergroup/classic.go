package consumergroup

import (
	"cmp"
	"errors"
	"slices"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/grouprecord"
	"github.com/varve-io/varve/internal/metadata"
)

// protocolType is what consumers of the classic protocol call theirs.
const protocolType = "consumer"

// Join serves JoinGroup of a member that uses the classic protocol, in a group that is not empty. The answer is there at once: the member is
// nobody's leader, and its epoch is the generation. Whatever the answer says went wrong changed nothing.
func (g *Group) Join(r group.JoinRequest, env Env, now int64) (group.JoinResult, *Changes) {
	c := g.begin()
	result, err := c.join(r, env, now)
	if err != nil {
		c.Undo()
		result.Err, result.Generation = err, -1
		if result.MemberID == "" {
			result.MemberID = r.MemberID
		}
		return result, g.begin()
	}
	return result, c
}

func (c *Changes) join(r group.JoinRequest, env Env, now int64) (group.JoinResult, error) {
	g := c.g
	nothing := group.JoinResult{}
	switch {
	case r.SessionMs < env.Classic.SessionMinMs || r.SessionMs > env.Classic.SessionMaxMs:
		return nothing, group.ErrInvalidSession
	case !env.Config.Mixed:
		return nothing, refuse(group.ErrInconsistentProtocol, "Cannot join the consumer group %s with the classic protocol because the group migration is disabled.", g.id)
	}
	isNew := r.MemberID == ""
	id := r.MemberID
	if isNew {
		id = r.NewID
	}
	if err := g.full(id, r.InstanceID, env); err != nil {
		return nothing, err
	}
	if !g.speaks(r.ProtocolType, r.Protocols) {
		return nothing, refuse(group.ErrInconsistentProtocol, "Member %s's protocols are not supported.", id)
	}
	subscription := kmsg.NewConsumerMemberMetadata()
	if err := subscription.ReadFrom(r.Protocols[0].Metadata); err != nil {
		return nothing, refuse(group.ErrInconsistentProtocol, "Malformed embedded consumer protocol in subscription deserialization.")
	}
	if r.RequireID && isNew && r.InstanceID == "" {
		return group.JoinResult{MemberID: id}, group.ErrMemberIDRequired
	}
	before, downgrade, err := c.findClassic(id, r.InstanceID, isNew, env)
	if err != nil {
		return nothing, err
	}
	said := *before.said
	said.ClientID, said.ClientHost, said.RebalanceMs = r.ClientID, r.ClientHost, int32(r.RebalanceMs)
	said.Topics, said.Regex = sortedNames(subscription.Topics), ""
	update(&said.RackID, subscription.Rack)
	if r.InstanceID != "" {
		said.InstanceID = &r.InstanceID
	}
	said.Classic = &grouprecord.Classic{SessionMs: int32(r.SessionMs)}
	for _, p := range r.Protocols {
		said.Classic.Protocols = append(said.Classic.Protocols, grouprecord.Protocol(p))
	}
	m, err := c.step(before, &said, owned(&subscription, env.Image), !downgrade, env, now)
	if err != nil {
		return nothing, err
	}
	k := g.clocks[m.id]
	k.session, k.sync, k.join, k.rebalance = now+r.SessionMs, now+r.RebalanceMs, 0, 0
	if downgrade {
		c.downgrade(g.target.Epoch < g.epoch.Epoch, env, now)
	}
	return group.JoinResult{MemberID: m.id, Generation: m.has.Epoch, ProtocolType: protocolType, Protocol: r.Protocols[0].Name}, nil
}

// findClassic finds the member that joins, or makes it. downgrade says that only classic members are left once it is there.
func (c *Changes) findClassic(id, instance string, isNew bool, env Env) (m *member, downgrade bool, err error) {
	g := c.g
	if instance == "" {
		if m = g.member(id); m == nil {
			m = fresh(id)
		}
		return m, false, nil
	}
	old := g.static(instance)
	if !isNew {
		if err := g.holdsInstance(old, id, instance); err != nil {
			return nil, false, err
		}
		return old, false, nil
	}
	if old == nil {
		return fresh(id), false, nil
	}
	downgrade = !old.classic() && g.classics == len(g.said)-1 && env.Config.Downgrade && len(g.said) <= env.Classic.SizeMax
	return c.replace(old, id), downgrade, nil
}

// speaks says whether a classic member's protocols have one that all classic members support.
func (g *Group) speaks(kind string, protocols []group.Protocol) bool {
	return kind == protocolType && slices.ContainsFunc(protocols, func(p group.Protocol) bool { return g.protocols[p.Name] == g.classics })
}

// owned are the partitions that a classic member says it has.
func owned(s *kmsg.ConsumerMemberMetadata, img *metadata.Image) Partitions {
	out := Partitions{}
	for _, o := range s.OwnedPartitions {
		if t, ok := img.Topics[o.Topic]; ok {
			out[t.ID] = o.Partitions
		}
	}
	return out
}

// find finds a classic member by the marks that its requests carry.
func (g *Group) classicMember(id, instance string) (*member, error) {
	m := g.member(id)
	if instance != "" {
		if m = g.static(instance); m == nil {
			return nil, refuse(group.ErrUnknownMember, "Member with instance id %s is not a member of group %s.", instance, g.id)
		}
		if err := g.holdsInstance(m, id, instance); err != nil {
			return nil, err
		}
	}
	switch {
	case m == nil:
		return nil, g.unknown(id)
	case !m.classic():
		return nil, refuse(group.ErrUnknownMember, "Member %s does not use the classic protocol.", m.id)
	}
	return m, nil
}

func (m *member) inGeneration(generation int32) error {
	if m.has.Epoch != generation {
		return refuse(group.ErrIllegalGeneration, "The request generation id %d is not equal to the member epoch %d of member %s.", generation, m.has.Epoch, m.id)
	}
	return nil
}

// Sync serves SyncGroup of a classic member: it learns its assignment.
func (g *Group) Sync(r group.SyncRequest, env Env, now int64) group.SyncResult {
	m, err := g.classicMember(r.MemberID, r.InstanceID)
	if err == nil {
		err = m.inGeneration(r.Generation)
	}
	if err != nil {
		return group.SyncResult{Err: err}
	}
	k, protocol := g.clocks[m.id], m.said.Classic.Protocols[0]
	switch {
	case r.ProtocolType != "" && r.ProtocolType != protocolType, r.Protocol != "" && r.Protocol != protocol.Name:
		return group.SyncResult{Err: group.ErrInconsistentProtocol}
	case g.target.Epoch > m.has.Epoch && m.has.State != grouprecord.UnrevokedPartitions:
		k.comeBack(m, now)
		return group.SyncResult{Err: refuse(group.ErrRebalanceInProgress, "A new rebalance is triggered in group %s and member %s should rejoin to catch up.", g.id, m.id)}
	}
	k.session, k.sync = now+int64(m.said.Classic.SessionMs), 0
	return group.SyncResult{ProtocolType: protocolType, Protocol: protocol.Name, Assignment: encodeAssignment(plain(m.has.Assigned), protocol.Metadata, env.Image)}
}

// comeBack gives a member its rebalance timeout to join again.
func (k *clock) comeBack(m *member, now int64) {
	if k.join == 0 {
		k.join = now + int64(m.said.RebalanceMs)
	}
}

// BeatClassic serves Heartbeat of a classic member: it is told to join again when it is behind, has something to give up, or can get something.
// It moves the group on, too, since there may be no member of the other protocol that does.
func (g *Group) BeatClassic(id, instance string, generation int32, env Env, now int64) (*Changes, error) {
	c := g.begin()
	m, err := g.classicMember(id, instance)
	if err == nil {
		err = m.inGeneration(generation)
	}
	if err != nil {
		return c, err
	}
	c.advance(false, true, env, now)
	k := g.clocks[m.id]
	k.session = now + int64(m.said.Classic.SessionMs)
	if m.has.Epoch < g.target.Epoch || m.has.State == grouprecord.UnrevokedPartitions || m.has.State == grouprecord.UnreleasedPartitions && !g.waits(m) {
		k.comeBack(m, now)
		return c, group.ErrRebalanceInProgress
	}
	return c, nil
}

// waits says that a partition of the member's target still belongs to another.
func (g *Group) waits(m *member) bool {
	for t, partitions := range g.targets[m.id] {
		for _, p := range partitions {
			if owner, taken := g.owners[t][p]; taken && owner != m.id {
				return true
			}
		}
	}
	return false
}

// Leaver names a member that leaves by LeaveGroup: by its id, its instance id, or both.
type Leaver struct{ MemberID, InstanceID string }

// Leave serves LeaveGroup, which takes out members of either protocol. The errors are by leaver.
func (g *Group) Leave(leavers []Leaver, env Env, now int64) ([]error, *Changes) {
	errs := make([]error, len(leavers))
	var ids []string
	for i, l := range leavers {
		m := g.member(l.MemberID)
		if l.InstanceID != "" {
			id := l.MemberID
			if m = g.static(l.InstanceID); m != nil && id == "" {
				id = m.id
			}
			errs[i] = g.holdsInstance(m, id, l.InstanceID)
		} else if m == nil {
			errs[i] = g.unknown(l.MemberID)
		}
		if errs[i] == nil && !slices.Contains(ids, m.id) {
			ids = append(ids, m.id)
		}
	}
	c := g.begin()
	c.fence(ids, env, now)
	return errs, c
}

// plain is an assignment without epochs.
func plain(o grouprecord.Owned) grouprecord.Assignment {
	out := grouprecord.Assignment{}
	for t, partitions := range o {
		for p := range partitions {
			out[t] = append(out[t], p)
		}
		slices.Sort(out[t])
	}
	return out
}

// encodeAssignment writes partitions in the form that classic consumers read, in the version of their subscription.
func encodeAssignment(a grouprecord.Assignment, subscription []byte, img *metadata.Image) []byte {
	v := kmsg.NewConsumerMemberAssignment()
	if len(subscription) > 1 {
		v.Version = int16(subscription[0])<<8 | int16(subscription[1])
	}
	for id, partitions := range a {
		if t, ok := img.TopicsByID[id]; ok {
			vt := kmsg.NewConsumerMemberAssignmentTopic()
			vt.Topic, vt.Partitions = t.Name, partitions
			v.Topics = append(v.Topics, vt)
		}
	}
	slices.SortFunc(v.Topics, func(a, b kmsg.ConsumerMemberAssignmentTopic) int { return cmp.Compare(a.Topic, b.Topic) })
	return v.AppendTo(nil)
}

// downgrade makes the group, all of whose members are classic, a classic group. It says whether that went well.
func (c *Changes) downgrade(rebalance bool, env Env, now int64) bool {
	g := c.g
	var members []*group.Member
	for _, id := range g.ids() {
		m := g.member(id)
		gm := &group.Member{ID: id, InstanceID: m.instance(), ClientID: m.said.ClientID, ClientHost: m.said.ClientHost,
			SessionMs: int64(m.said.Classic.SessionMs), RebalanceMs: int64(m.said.RebalanceMs)}
		for _, p := range m.said.Classic.Protocols {
			gm.Protocols = append(gm.Protocols, group.Protocol(p))
		}
		gm.Assignment = encodeAssignment(g.targets[id], m.said.Classic.Protocols[0].Metadata, env.Image)
		members = append(members, gm)
	}
	classic := group.Adopt(g.id, env.Classic, protocolType, g.epoch.Epoch, members, now)
	if classic == nil {
		return false
	}
	c.Records = append(append(c.Records, g.Tombstones()...), classic.Record())
	c.Classic, c.Rebalance = classic, rebalance
	return true
}

// Upgrade makes a consumer group of a classic group, whose members stay what they are. The group's records are the changes'.
func Upgrade(old *group.Group, env Env, now int64) (*Group, *Changes, error) {
	id := old.ID()
	g := New(id)
	c := g.begin()
	c.Records = append(c.Records, old.Tombstone())
	if old.State() == group.Empty {
		return g, c, nil
	}
	members := old.Members()
	switch {
	case !env.Config.Upgrade:
		return nil, nil, refuse(group.ErrNotFound, "Cannot upgrade classic group %s to consumer group because online upgrade is disabled.", id)
	case old.ProtocolType() != protocolType:
		return nil, nil, refuse(group.ErrNotFound, "Cannot upgrade classic group %s to consumer group because the group does not use the consumer embedded protocol.", id)
	case len(members) > env.Config.SizeMax:
		return nil, nil, refuse(group.ErrNotFound, "Cannot upgrade classic group %s to consumer group because the group size exceeds the consumer group maximum size.", id)
	}
	generation := old.Generation()
	for _, gm := range members {
		said, assigned, err := upgraded(gm, old.Protocol(), env.Image)
		if err != nil {
			return nil, nil, refuse(group.ErrNotFound, "Cannot upgrade classic group %s to consumer group because %s.", id, err)
		}
		has := &grouprecord.Current{Epoch: generation, PreviousEpoch: generation, Assigned: grouprecord.Owned{}, Revoking: grouprecord.Owned{}}
		for t, partitions := range assigned {
			for _, p := range partitions {
				if g.owners[t][p] == "" { // a classic leader may have given one partition to two members
					set(has.Assigned, t, p, generation)
				}
			}
		}
		c.put(grouprecord.KindMember, gm.ID, said)
		c.put(grouprecord.KindTarget, gm.ID, plain(has.Assigned))
		c.put(grouprecord.KindCurrent, gm.ID, has)
	}
	c.put(grouprecord.KindGroupEpoch, "", &grouprecord.GroupEpoch{Epoch: generation, MetadataHash: g.hash(env.Image)})
	c.put(grouprecord.KindTargetEpoch, "", &grouprecord.TargetEpoch{Epoch: generation})
	g.Loaded(env.Config, now)
	return g, c, nil
}

// Why a live classic group cannot become a consumer group, in Kafka's words.
var (
	errMalformed      = errors.New("the embedded consumer protocol is malformed")
	errCustomAssignor = errors.New("an unsupported custom assignor is in use. Please refer to the documentation or switch to a default assignor before re-attempting the upgrade")
)

// upgraded reads what a classic member said and has.
func upgraded(m *group.Member, protocol string, img *metadata.Image) (*grouprecord.Member, grouprecord.Assignment, error) {
	said := &grouprecord.Member{ClientID: m.ClientID, ClientHost: m.ClientHost, RebalanceMs: int32(m.RebalanceMs), Classic: &grouprecord.Classic{SessionMs: int32(m.SessionMs)}}
	if m.InstanceID != "" {
		said.InstanceID = &m.InstanceID
	}
	chosen := m.Protocols[0]
	for _, p := range m.Protocols {
		said.Classic.Protocols = append(said.Classic.Protocols, grouprecord.Protocol(p))
		if p.Name == protocol {
			chosen = p
		}
	}
	subscription := kmsg.NewConsumerMemberMetadata()
	if err := subscription.ReadFrom(chosen.Metadata); err != nil {
		return nil, nil, errMalformed
	}
	said.Topics, said.RackID = sortedNames(subscription.Topics), subscription.Rack
	assigned := grouprecord.Assignment{}
	if len(m.Assignment) == 0 {
		return said, assigned, nil
	}
	a := kmsg.NewConsumerMemberAssignment()
	if err := a.ReadFrom(m.Assignment); err != nil {
		return nil, nil, errMalformed
	}
	if len(a.UserData) > 0 {
		return nil, nil, errCustomAssignor
	}
	for _, at := range a.Topics {
		t, ok := img.Topics[at.Topic]
		if !ok {
			continue
		}
		for _, p := range at.Partitions {
			if p >= 0 && int(p) < len(t.Partitions) {
				assigned[t.ID] = append(assigned[t.ID], p)
			}
		}
	}
	return said, assigned, nil
}
