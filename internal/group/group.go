// Package group is the state machine of one consumer group under the classic protocol (JoinGroup, SyncGroup, Heartbeat,
// LeaveGroup), and the record in which __consumer_offsets keeps it. It is pure: requests that
// have to wait are parked under a token, and the answers come out as effects of a later event. Times are ms since 1970.
//
// A group is not safe for concurrent use; its owner holds one lock for it. The source of the rules is Kafka's group
// coordinator (KIP-62, KIP-345, KIP-394, KIP-559, KIP-814).
package group

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/varve-io/varve/internal/grouprecord"
)

// State is the state of a classic group.
type State int8

const (
	Empty State = iota
	PreparingRebalance
	CompletingRebalance
	Stable
	Dead
)

func (s State) String() string {
	return [...]string{"Empty", "PreparingRebalance", "CompletingRebalance", "Stable", "Dead"}[s]
}

// Errors of group requests; each stands for one Kafka error code.
var (
	ErrInvalidGroupID       = errors.New("invalid group id")
	ErrInvalidSession       = errors.New("invalid session timeout")
	ErrInconsistentProtocol = errors.New("inconsistent group protocol")
	ErrUnknownMember        = errors.New("unknown member id")
	ErrMemberIDRequired     = errors.New("member id required")
	ErrFencedInstance       = errors.New("fenced instance id")
	ErrIllegalGeneration    = errors.New("illegal generation")
	ErrRebalanceInProgress  = errors.New("rebalance in progress")
	ErrGroupFull            = errors.New("group max size reached")
	ErrNotFound             = errors.New("group id not found")
	ErrNotEmpty             = errors.New("non-empty group")
	ErrSubscribed           = errors.New("group is subscribed to the topic")
	ErrNotPersisted         = errors.New("group state could not be written")
)

// Refusal is an error with a text of its own, Kafka's where Kafka has one. Kind is one of the errors above, or of their like.
type Refusal struct {
	Kind error
	Text string
}

func (r *Refusal) Error() string { return r.Text }
func (r *Refusal) Unwrap() error { return r.Kind }

// Refuse makes a refusal.
func Refuse(kind error, format string, args ...any) error {
	return &Refusal{kind, fmt.Sprintf(format, args...)}
}

// Config bounds what members may ask.
type Config struct {
	SessionMinMs, SessionMaxMs int64
	InitialDelayMs             int64 // wait for more members when an empty group gets its first
	SizeMax                    int
}

// Token names a parked request; the owner makes them up.
type Token uint64

// Protocol is one assignment strategy that a member supports, and its subscription under it.
type Protocol struct {
	Name     string
	Metadata []byte
}

// Member is one member of the group. The group owns it; readers must not keep it.
type Member struct {
	ID, InstanceID       string // instance id "" for dynamic members
	ClientID, ClientHost string
	SessionMs            int64
	RebalanceMs          int64
	Protocols            []Protocol
	Assignment           []byte

	joining  Token // parked JoinGroup, 0 if none
	syncing  Token // parked SyncGroup
	synced   bool  // has sent SyncGroup in this generation
	deadline int64 // session end; not watched while a request is parked
}

func (m *Member) supports(name string) bool {
	return slices.ContainsFunc(m.Protocols, func(p Protocol) bool { return p.Name == name })
}

func (m *Member) metadata(name string) []byte {
	for _, p := range m.Protocols {
		if p.Name == name {
			return p.Metadata
		}
	}
	return nil
}

func sameProtocols(a, b []Protocol) bool {
	return slices.EqualFunc(a, b, func(x, y Protocol) bool { return x.Name == y.Name && string(x.Metadata) == string(y.Metadata) })
}

// Group is one group. The zero value is not usable: call New or Load.
type Group struct {
	id           string
	config       Config
	state        State
	since        int64 // when the state began
	generation   int32
	protocolType string // "" until a member joins
	protocol     string // selected strategy, "" in an empty group
	leader       string
	members      map[string]*Member
	statics      map[string]string // instance id → member id
	pending      map[string]int64  // ids handed out with MEMBER_ID_REQUIRED → when they expire
	order        []string          // members by time of joining: the oldest leads

	rebalanceEnd  int64 // PreparingRebalance: when stragglers are dropped. CompletingRebalance: when those that did not sync are
	delayEnd      int64 // first rebalance of an empty group: not complete before
	delayExtended bool  // a member joined during the delay
	persisting    bool  // an assignment waits for its record to be written
}

// New returns an empty group.
func New(id string, c Config, now int64) *Group {
	return &Group{id: id, config: c, since: now, members: map[string]*Member{}, statics: map[string]string{}, pending: map[string]int64{}}
}

// ID is the group's id, State its present state, Generation the number of its last rebalance.
func (g *Group) ID() string        { return g.id }
func (g *Group) State() State      { return g.state }
func (g *Group) Generation() int32 { return g.generation }

// Protocol is the strategy that was selected, "" if none was. ProtocolType is "" until a member joins.
func (g *Group) Protocol() string     { return g.protocol }
func (g *Group) ProtocolType() string { return g.protocolType }

// Members lists the members, oldest first. They stay the group's.
func (g *Group) Members() []*Member {
	var out []*Member
	for _, id := range g.order {
		out = append(out, g.members[id])
	}
	return out
}

// Adopt makes a stable group of members that come from elsewhere with their assignments; nil if they have no protocol in common. Each has one
// session from now on.
func Adopt(id string, c Config, protocolType string, generation int32, members []*Member, now int64) *Group {
	g := New(id, c, now)
	g.protocolType, g.generation = protocolType, generation
	for _, m := range members {
		m.synced, m.deadline = true, now+m.SessionMs
		g.members[m.ID] = m
		g.order = append(g.order, m.ID)
		if m.InstanceID != "" {
			g.statics[m.InstanceID] = m.ID
		}
	}
	if g.protocol = g.vote(); g.protocol == "" {
		return nil
	}
	g.leader = g.order[0]
	g.enter(Stable, now)
	return g
}

// Rebalance has all members join again.
func (g *Group) Rebalance(now int64) Effects { return g.prepare(now) }

// Dismiss answers all parked requests: the members have to ask anew, since the group is to be another.
func (g *Group) Dismiss() Effects {
	var e Effects
	for _, m := range g.Members() {
		if m.joining != 0 {
			e.Joins = append(e.Joins, JoinReply{m.joining, failedJoin(m.ID, ErrRebalanceInProgress)})
		}
		if m.syncing != 0 {
			e.Syncs = append(e.Syncs, SyncReply{m.syncing, SyncResult{Err: ErrRebalanceInProgress}})
		}
		m.joining, m.syncing = 0, 0
	}
	return e
}

// JoinResult answers JoinGroup.
type JoinResult struct {
	Err            error
	MemberID       string
	Generation     int32 // -1 with an error
	ProtocolType   string
	Protocol       string
	Leader         string
	SkipAssignment bool // a static leader came back and the assignment stands (KIP-814)
	Members        []JoinMember
}

// JoinMember is what the leader learns of each member.
type JoinMember struct {
	ID, InstanceID string
	Metadata       []byte
}

// SyncResult answers SyncGroup.
type SyncResult struct {
	Err          error
	ProtocolType string
	Protocol     string
	Assignment   []byte
}

// Effects are what an event made happen, to be carried out by the owner in this order: Write, then the replies.
type Effects struct {
	Write []grouprecord.Entry // group metadata; the outcome is reported to Persisted if Confirm is set
	// Confirm asks the owner to call Persisted once Write is durable or has failed.
	Confirm bool
	Joins   []JoinReply
	Syncs   []SyncReply
}

// JoinReply ends a parked JoinGroup.
type JoinReply struct {
	Token  Token
	Result JoinResult
}

// SyncReply ends a parked SyncGroup.
type SyncReply struct {
	Token  Token
	Result SyncResult
}

func (e *Effects) add(other Effects) {
	e.Write = append(e.Write, other.Write...)
	e.Confirm = e.Confirm || other.Confirm
	e.Joins = append(e.Joins, other.Joins...)
	e.Syncs = append(e.Syncs, other.Syncs...)
}

func (g *Group) enter(s State, now int64) {
	g.state, g.since = s, now
}

func failedJoin(memberID string, err error) JoinResult {
	return JoinResult{Err: err, MemberID: memberID, Generation: -1}
}

// check finds a member by the three marks that every member request carries.
func (g *Group) check(memberID, instanceID string) (*Member, error) {
	if instanceID != "" {
		known, ok := g.statics[instanceID]
		if !ok {
			return nil, ErrUnknownMember
		}
		if known != memberID {
			return nil, ErrFencedInstance
		}
	}
	m, ok := g.members[memberID]
	if !ok {
		return nil, ErrUnknownMember
	}
	return m, nil
}

// NextDeadline is when Tick must be called at the latest, 0 if never.
func (g *Group) NextDeadline() int64 {
	next := int64(0)
	at := func(t int64) {
		if t > 0 && (next == 0 || t < next) {
			next = t
		}
	}
	switch g.state {
	case PreparingRebalance:
		if g.delayEnd > 0 {
			at(g.delayEnd)
		} else {
			at(g.rebalanceEnd)
		}
	case CompletingRebalance:
		at(g.rebalanceEnd)
	}
	for _, m := range g.members {
		if m.joining == 0 && m.syncing == 0 {
			at(m.deadline)
		}
	}
	for _, t := range g.pending {
		at(t)
	}
	return next
}

// Tick expires what is due at now: ids that never joined, silent members, and rebalances that have waited long enough.
func (g *Group) Tick(now int64) Effects {
	var e Effects
	for _, id := range slices.Sorted(maps.Keys(g.pending)) {
		if g.pending[id] <= now {
			delete(g.pending, id)
		}
	}
	for _, id := range slices.Clone(g.order) {
		if m, ok := g.members[id]; ok && m.joining == 0 && m.syncing == 0 && m.deadline <= now {
			e.add(g.remove(m, ErrUnknownMember, now))
		}
	}
	switch {
	case g.state == PreparingRebalance && g.delayEnd > 0 && g.delayEnd <= now:
		if g.delayExtended && g.rebalanceEnd > now {
			g.delayEnd, g.delayExtended = min(now+g.config.InitialDelayMs, g.rebalanceEnd), false
		} else {
			g.delayEnd = 0
			e.add(g.completeJoin(now))
		}
	case g.state == PreparingRebalance && g.delayEnd == 0 && g.rebalanceEnd <= now:
		e.add(g.completeJoin(now))
	case g.state == CompletingRebalance && g.rebalanceEnd <= now && !g.persisting:
		var late []*Member
		for _, id := range g.order {
			if m := g.members[id]; !m.synced {
				late = append(late, m)
			}
		}
		for _, m := range late {
			e.add(g.remove(m, ErrUnknownMember, now))
		}
		if len(late) == 0 { // the leader synced but nothing came of it: begin again
			e.add(g.prepare(now))
		}
	}
	return e
}
