package consumergroup

import (
	"errors"
	"slices"
	"strings"

	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/grouprecord"
)

// Errors of heartbeats and commits beyond those that package group knows; each stands for one Kafka error code.
var (
	ErrFencedMemberEpoch     = errors.New("fenced member epoch")
	ErrUnreleasedInstance    = errors.New("unreleased instance id")
	ErrStaleMemberEpoch      = errors.New("stale member epoch")
	ErrUnsupportedAssignor   = errors.New("unsupported assignor")
	ErrInvalidRegex          = errors.New("invalid regular expression")
	ErrInvalidRequest        = errors.New("invalid request")
	ErrUnsupportedByProtocol = errors.New("version not supported for members of the consumer protocol")
)

var refuse = group.Refuse

// Heartbeat is one ConsumerGroupHeartbeat. What is nil or -1 is as the member last said.
type Heartbeat struct {
	MemberID             string
	Epoch                int32 // 0 to join, LeaveEpoch, LeaveStaticEpoch, or the member's own
	InstanceID, RackID   *string
	RebalanceMs          int32
	Topics               []string
	Regex                *string
	Assignor             *string
	Owned                Partitions
	ClientID, ClientHost string
	NewID                string // the id to give to a member that has none yet (version 0)
}

// Answer is what a member learns.
type Answer struct {
	MemberID    string
	Epoch       int32
	HeartbeatMs int64
	Assignment  grouprecord.Owned // nil if it has not changed
}

// Validate checks what can be told from the request alone. version is that of the API.
func (r *Heartbeat) Validate(version int16, c Config) error {
	switch {
	case (version >= 1 || r.Epoch > 0 || r.Epoch == LeaveEpoch) && strings.TrimSpace(r.MemberID) == "":
		return refuse(ErrInvalidRequest, "MemberId can't be empty.")
	case r.InstanceID != nil && strings.TrimSpace(*r.InstanceID) == "":
		return refuse(ErrInvalidRequest, "InstanceId can't be empty.")
	case r.RackID != nil && strings.TrimSpace(*r.RackID) == "":
		return refuse(ErrInvalidRequest, "RackId can't be empty.")
	case r.Epoch == 0 && r.RebalanceMs == -1:
		return refuse(ErrInvalidRequest, "RebalanceTimeoutMs must be provided in first request.")
	case r.Epoch == 0 && (r.Owned == nil || len(r.Owned) > 0):
		return refuse(ErrInvalidRequest, "TopicPartitions must be empty when (re-)joining.")
	case r.Epoch == 0 && r.Topics == nil && r.Regex == nil:
		return refuse(ErrInvalidRequest, "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining.")
	case r.Epoch == LeaveStaticEpoch && r.InstanceID == nil:
		return refuse(ErrInvalidRequest, "InstanceId can't be null.")
	case r.Epoch < LeaveStaticEpoch:
		return refuse(ErrInvalidRequest, "MemberEpoch is invalid.")
	case r.Assignor != nil && !slices.Contains(c.Assignors, *r.Assignor):
		return refuse(ErrUnsupportedAssignor, "ServerAssignor %s is not supported. Supported assignors: %s.", *r.Assignor, strings.Join(c.Assignors, ", "))
	}
	return nil
}

// Heartbeat takes a member in, along or out. With an error nothing has changed.
func (g *Group) Heartbeat(r Heartbeat, env Env, now int64) (Answer, *Changes, error) {
	if r.Epoch == LeaveEpoch || r.Epoch == LeaveStaticEpoch {
		return g.leave(r, env, now)
	}
	if r.MemberID == "" {
		r.MemberID = r.NewID
	}
	c := g.begin()
	a, err := c.heartbeat(r, env, now)
	if err != nil {
		c.Undo()
		return Answer{}, nil, err
	}
	return a, c, nil
}

func (c *Changes) heartbeat(r Heartbeat, env Env, now int64) (Answer, error) {
	g := c.g
	if err := g.full(r.MemberID, text(r.InstanceID), env); err != nil {
		return Answer{}, err
	}
	before, err := c.find(r, now)
	if err != nil {
		return Answer{}, err
	}
	said := *before.said
	said.ClientID, said.ClientHost, said.Classic = r.ClientID, r.ClientHost, nil
	update(&said.InstanceID, r.InstanceID)
	update(&said.RackID, r.RackID)
	update(&said.Assignor, r.Assignor)
	if r.RebalanceMs != -1 {
		said.RebalanceMs = r.RebalanceMs
	}
	if r.Topics != nil {
		said.Topics = sortedNames(r.Topics)
	}
	if r.Regex != nil {
		said.Regex = *r.Regex
	}
	m, err := c.step(before, &said, r.Owned, true, env, now)
	if err != nil {
		return Answer{}, err
	}
	k := g.clocks[m.id]
	k.session, k.join, k.sync = now+env.Config.SessionMs, 0, 0
	a := Answer{MemberID: m.id, Epoch: m.has.Epoch, HeartbeatMs: g.pace(m, env.Config, now)}
	whole := r.RebalanceMs != -1 && (r.Topics != nil || r.Regex != nil) && r.Owned != nil
	if r.Epoch == 0 || whole || !same(m.has.Assigned, before.has.Assigned) {
		a.Assignment = m.has.Assigned
		if a.Assignment == nil {
			a.Assignment = grouprecord.Owned{}
		}
	}
	return a, nil
}

// restlessMs is the heartbeat interval of members that have something to do, or may have soon.
const restlessMs = 500

// pace is when a member is to send its next heartbeat. Kafka always says the configured interval, so that a rebalance, in which one member waits
// for another to give partitions up, takes two of them. Here members come back soon as long as they are on their way, and for one interval after
// the last change of the group.
func (g *Group) pace(m *member, c Config, now int64) int64 {
	if !m.reconciled(g.target.Epoch) || g.moved > 0 && now-g.moved < c.HeartbeatMs {
		return min(c.HeartbeatMs, restlessMs)
	}
	return c.HeartbeatMs
}

// step takes over what a member says of itself and lets the group and the member move on, with assign to a new target assignment, too.
func (c *Changes) step(before *member, said *grouprecord.Member, says Partitions, assign bool, env Env, now int64) (*member, error) {
	g := c.g
	preferred := g.assignor(env.Config)
	if said.Regex != before.said.Regex && said.Regex != "" && g.patterns[said.Regex] == 0 {
		if _, err := compile(said.Regex); err != nil {
			return nil, refuse(ErrInvalidRegex, "SubscribedTopicRegex `%s` is not a valid regular expression: %s.", said.Regex, reason(err))
		}
	}
	if g.said[before.id] == nil || !same(said, before.said) {
		c.put(grouprecord.KindMember, before.id, said)
	}
	if g.clocks[before.id] == nil {
		c.settle()
	}
	c.dropPatterns([]string{before.said.Regex})
	changed := !slices.Equal(said.Topics, before.said.Topics) || said.Regex != before.said.Regex
	changed = c.advance(changed || g.assignor(env.Config) != preferred, assign, env, now) || changed
	m := g.member(before.id)
	if m.has.State == grouprecord.Unknown && (says == nil || len(says) > 0) {
		return nil, refuse(ErrFencedMemberEpoch, "The consumer group member is in a unknown state. The member must abandon all its partitions and rejoin.")
	}
	c.reconcile(m, changed, says, env, now)
	return g.member(m.id), nil
}

// advance raises the group epoch if it must, or if the topics have changed, and with assign makes a target assignment for it. It says whether
// regular expressions stand for other topics than before.
func (c *Changes) advance(bump, assign bool, env Env, now int64) (found bool) {
	g := c.g
	if len(g.patterns) > 0 && c.refresh(env, now) {
		bump, found = true, true
	}
	if bump || g.seen != env.Image.Index {
		hash := g.hash(env.Image)
		if bump || hash != g.epoch.MetadataHash {
			c.put(grouprecord.KindGroupEpoch, "", &grouprecord.GroupEpoch{Epoch: g.epoch.Epoch + 1, MetadataHash: hash})
			g.moved = now
		}
		if g.stale {
			c.put(grouprecord.KindPartitions, "", nil)
		}
		g.seen = env.Image.Index
	}
	if assign {
		c.assign(env, now)
	}
	return found
}

// reason is what is wrong with an expression, without the expression.
func reason(err error) string {
	text := err.Error()
	if _, after, ok := strings.Cut(text, "error parsing regexp: "); ok {
		text = after
	}
	return text
}

func update(to **string, from *string) {
	if from != nil {
		*to = from
	}
}

func sortedNames(names []string) []string {
	names = slices.Clone(names)
	slices.Sort(names)
	return slices.Compact(names)
}

func (g *Group) full(id, instance string, env Env) error {
	if g.static(instance) == nil && len(g.said) >= env.Config.SizeMax && g.said[id] == nil {
		return refuse(group.ErrGroupFull, "The consumer group has reached its maximum capacity of %d members.", env.Config.SizeMax)
	}
	return nil
}

// find finds the member that a heartbeat is of, or makes it if it joins.
func (c *Changes) find(r Heartbeat, now int64) (*member, error) {
	g := c.g
	joins := r.Epoch == 0
	if r.InstanceID == nil {
		m := g.member(r.MemberID)
		if m == nil {
			if !joins {
				return nil, g.unknown(r.MemberID)
			}
			return fresh(r.MemberID), nil
		}
		return m, m.check(r.Epoch, r.Owned)
	}
	m := g.static(*r.InstanceID)
	switch {
	case joins && m == nil:
		if m = g.member(r.MemberID); m == nil {
			m = fresh(r.MemberID)
		}
		return m, nil
	case joins && !m.classic() && m.has.Epoch != LeaveStaticEpoch:
		return nil, refuse(ErrUnreleasedInstance, "Static member %s with instance id %s cannot join the group because the instance id is owned by %s member.", r.MemberID, *r.InstanceID, m.id)
	case joins:
		return c.replace(m, r.MemberID), nil
	}
	if err := g.holdsInstance(m, r.MemberID, *r.InstanceID); err != nil {
		return nil, err
	}
	return m, m.check(r.Epoch, r.Owned)
}

func fresh(id string) *member {
	return &member{id, &grouprecord.Member{RebalanceMs: -1}, newborn}
}

// replace gives the place of a static member to the next process with its instance id.
func (c *Changes) replace(old *member, id string) *member {
	target := c.g.targets[old.id]
	has := *old.has
	has.Epoch, has.PreviousEpoch = 0, 0
	c.remove(old.id)
	c.put(grouprecord.KindMember, id, old.said)
	if target == nil {
		target = grouprecord.Assignment{}
	}
	c.put(grouprecord.KindTarget, id, target)
	c.put(grouprecord.KindCurrent, id, &has)
	return c.g.member(id)
}

// check compares the epoch that a member says with the one it is in. It may be the one before, if the last answer was lost: then the member
// owns no more than it was given.
func (m *member) check(epoch int32, says Partitions) error {
	switch {
	case epoch == 0 || epoch == m.has.Epoch:
		return nil
	case epoch > m.has.Epoch:
		return refuse(ErrFencedMemberEpoch, "The consumer group member has a greater member epoch (%d) than the one known by the group coordinator (%d). The member must abandon all its partitions and rejoin.", epoch, m.has.Epoch)
	case epoch != m.has.PreviousEpoch || !says.within(m.has.Assigned):
		return refuse(ErrFencedMemberEpoch, "The consumer group member has a smaller member epoch (%d) than the one known by the group coordinator (%d). The member must abandon all its partitions and rejoin.", epoch, m.has.Epoch)
	}
	return nil
}

func (g *Group) unknown(id string) error {
	return refuse(group.ErrUnknownMember, "Member %s is not a member of group %s.", id, g.id)
}

// holdsInstance checks that the member with an instance id is the one that says so.
func (g *Group) holdsInstance(m *member, id, instance string) error {
	switch {
	case m == nil:
		return refuse(group.ErrUnknownMember, "Instance id %s is unknown.", instance)
	case m.id != id:
		return refuse(group.ErrFencedInstance, "Static member %s with instance id %s was fenced by member %s.", id, instance, m.id)
	}
	return nil
}

// leave takes a member out, or notes that a static one will be back.
func (g *Group) leave(r Heartbeat, env Env, now int64) (Answer, *Changes, error) {
	m := g.member(r.MemberID)
	if r.InstanceID != nil {
		m = g.static(*r.InstanceID)
		if err := g.holdsInstance(m, r.MemberID, *r.InstanceID); err != nil {
			return Answer{}, nil, err
		}
	}
	if m == nil {
		return Answer{}, nil, g.unknown(r.MemberID)
	}
	c := g.begin()
	if r.Epoch == LeaveStaticEpoch {
		has := &grouprecord.Current{Epoch: LeaveStaticEpoch, PreviousEpoch: m.has.PreviousEpoch, State: m.has.State, Assigned: grouprecord.Owned{}, Revoking: grouprecord.Owned{}}
		for t, partitions := range m.has.Assigned {
			for p := range partitions {
				set(has.Assigned, t, p, 0)
			}
		}
		c.put(grouprecord.KindCurrent, m.id, has)
		g.clocks[m.id].rebalance = 0
	} else {
		c.fence([]string{m.id}, env, now)
	}
	return Answer{MemberID: m.id, Epoch: r.Epoch}, c, nil
}
