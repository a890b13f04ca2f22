// Package consumergroup is the state machine of one group of the consumer protocol (KIP-848): members say in heartbeats what they subscribe to
// and own, and the coordinator decides who reads what and leads each member there. Members of the classic protocol may take part, which is
// how a live group migrates. It is pure; times are ms since 1970.
//
// # Epochs
//
// The group epoch rises when members, their subscriptions or the topics change. A target assignment is made for a group epoch, which is then
// the assignment epoch. A member's epoch follows when it has given up what it must: from then on it gets partitions as soon as nobody else
// holds them. No partition is ever assigned to a member while another has it.
//
// # State and records
//
// All that lasts is a set of values by key, as in package grouprecord, and changes in no other way than by one value replacing another. So the
// records of a change are its values, loading is applying records in order, and a change whose records could not be written is undone by the
// values before it. What does not last are the members' clocks: after a load all get a fresh session.
//
// A group is not safe for concurrent use; its owner holds one lock for it. The source of the rules is Kafka 4.4's group coordinator (KIP-848,
// KIP-1101, KIP-1251, KIP-1263).
package consumergroup

import (
	"maps"
	"math"
	"reflect"
	"slices"

	"github.com/varve-io/varve/internal/assignor"
	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/grouprecord"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

// State is the state of a group.
type State int8

const (
	Empty       State = iota
	Assigning         // there is a new group epoch, and no target assignment for it yet
	Reconciling       // members are on their way to their target
	Stable
)

func (s State) String() string {
	return [...]string{"Empty", "Assigning", "Reconciling", "Stable"}[s]
}

// Config is what an operator may set.
type Config struct {
	SessionMs    int64
	HeartbeatMs  int64 // what members are told
	SizeMax      int
	Assignors    []string // what members may ask for; the first is the default
	AssignmentMs int64    // least time between two target assignments
	RegexMs      int64    // how old the topics of a regular expression may grow
	Upgrade      bool     // whether a live classic group is converted
	Downgrade    bool     // and back
	Mixed        bool     // whether classic members may join a consumer group
}

// Env is what a group sees of the world at an event.
type Env struct {
	Config  Config
	Classic group.Config // of the classic group that it may become
	Image   *metadata.Image
}

// Epochs that a member says to leave.
const (
	LeaveEpoch       = -1
	LeaveStaticEpoch = -2 // it will be back under its instance id
)

// member is what the group knows of a member.
type member struct {
	id   string
	said *grouprecord.Member
	has  *grouprecord.Current
}

func (m *member) classic() bool { return m.said.Classic != nil }

// instance is the member's instance id, "" of a dynamic one.
func (m *member) instance() string { return text(m.said.InstanceID) }

func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// reconciled says that the member has what an assignment epoch wants it to have.
func (m *member) reconciled(epoch int32) bool {
	return m.has.State == grouprecord.Stable && m.has.Epoch == epoch
}

// newborn is what a member has that just came.
var newborn = &grouprecord.Current{PreviousEpoch: -1}

// clock are a member's deadlines, 0 where there is none.
type clock struct {
	session   int64
	rebalance int64 // to give partitions up
	epoch     int32 // in which it began
	join      int64 // to come back, of classic members
	sync      int64
}

// Group is one group. The zero value is not usable: call New.
type Group struct {
	id      string
	epoch   grouprecord.GroupEpoch
	target  grouprecord.TargetEpoch
	targets map[string]grouprecord.Assignment // by member id
	said    map[string]*grouprecord.Member    // members by id
	has     map[string]*grouprecord.Current
	regexes map[string]*grouprecord.Regex
	stale   bool // there is a record of a kind that is not used any more

	// Counted and looked up, all out of the above.
	topics    counts            // members by topic that they name
	patterns  counts            // members by regular expression
	assignors counts            // members by assignor that they ask for
	protocols counts            // classic members by protocol that they support
	classics  int               // classic members
	statics   map[string]string // member ids by instance id
	owners    map[tp.UUID]map[int32]string

	clocks   map[string]*clock
	moved    int64  // when the group epoch last rose in this coordinator's time
	seen     uint64 // index of the image that the hash was last compared with; the image itself is not kept
	looked   int64  // when the regular expressions were last looked at, and in which image
	lookedIn uint64
}

// counts are numbers of members, without zeros.
type counts map[string]int

func (c counts) add(name string, n int) {
	if c[name] += n; c[name] == 0 {
		delete(c, name)
	}
}

// New returns an empty group.
func New(id string) *Group {
	return &Group{id: id, epoch: initialEpoch, target: initialTarget, targets: map[string]grouprecord.Assignment{}, said: map[string]*grouprecord.Member{},
		has: map[string]*grouprecord.Current{}, regexes: map[string]*grouprecord.Regex{}, topics: counts{}, patterns: counts{}, assignors: counts{}, protocols: counts{},
		statics: map[string]string{}, owners: map[tp.UUID]map[int32]string{}, clocks: map[string]*clock{}, seen: none, lookedIn: none}
}

// none is the index of no image.
const none = math.MaxUint64

// What a group begins with, before there is a record.
var (
	initialEpoch  = grouprecord.GroupEpoch{Epoch: 1}
	initialTarget = grouprecord.TargetEpoch{Epoch: 1}
)

// member returns a member by id, nil if there is none.
func (g *Group) member(id string) *member {
	said := g.said[id]
	if said == nil {
		return nil
	}
	m := &member{id, said, g.has[id]}
	if m.has == nil {
		m.has = newborn
	}
	return m
}

// static returns a member by instance id, nil if there is none.
func (g *Group) static(instance string) *member {
	id, ok := g.statics[instance]
	if !ok || instance == "" {
		return nil
	}
	return g.member(id)
}

// ids lists the members in order.
func (g *Group) ids() []string { return slices.Sorted(maps.Keys(g.said)) }

// ID is the group's id, Epoch the number of its last change, State its present state.
func (g *Group) ID() string   { return g.id }
func (g *Group) Epoch() int32 { return g.epoch.Epoch }

// State is the present state.
func (g *Group) State() State {
	switch {
	case len(g.said) == 0:
		return Empty
	case g.epoch.Epoch > g.target.Epoch:
		return Assigning
	}
	for id := range g.said {
		if !g.member(id).reconciled(g.target.Epoch) {
			return Reconciling
		}
	}
	return Stable
}

// Apply replaces one value of the group's state by that of a record of it.
func (g *Group) Apply(e grouprecord.Entry) {
	switch e.Kind {
	case grouprecord.KindGroupEpoch:
		g.epoch = initialEpoch
		if v, ok := e.Value.(*grouprecord.GroupEpoch); ok {
			g.epoch = *v
		}
	case grouprecord.KindPartitions:
		g.stale = e.Value != nil
	case grouprecord.KindTargetEpoch:
		g.target = initialTarget
		if v, ok := e.Value.(*grouprecord.TargetEpoch); ok {
			g.target = *v
		}
	case grouprecord.KindTarget:
		replace(g.targets, e)
	case grouprecord.KindMember:
		g.count(e.Name, g.said[e.Name], -1)
		replace(g.said, e)
		g.count(e.Name, g.said[e.Name], 1)
	case grouprecord.KindCurrent:
		g.own(e.Name, g.has[e.Name], false)
		replace(g.has, e)
		g.own(e.Name, g.has[e.Name], true)
	case grouprecord.KindRegex:
		replace(g.regexes, e)
	}
}

func replace[V any](values map[string]V, e grouprecord.Entry) {
	if v, ok := e.Value.(V); ok {
		values[e.Name] = v
	} else {
		delete(values, e.Name)
	}
}

// value is the entry that brings back the present value of a key.
func (g *Group) value(k grouprecord.Key) grouprecord.Entry {
	e := grouprecord.Entry{Key: k}
	switch k.Kind {
	case grouprecord.KindGroupEpoch:
		if v := g.epoch; v != initialEpoch {
			e.Value = &v
		}
	case grouprecord.KindPartitions:
		if g.stale {
			e.Value = &grouprecord.PartitionMetadata{}
		}
	case grouprecord.KindTargetEpoch:
		if v := g.target; v != initialTarget {
			e.Value = &v
		}
	case grouprecord.KindTarget:
		e.Value = present(g.targets, k.Name)
	case grouprecord.KindMember:
		e.Value = present(g.said, k.Name)
	case grouprecord.KindCurrent:
		e.Value = present(g.has, k.Name)
	case grouprecord.KindRegex:
		e.Value = present(g.regexes, k.Name)
	}
	return e
}

func present[V any](values map[string]V, name string) any {
	if v, ok := values[name]; ok {
		return v
	}
	return nil
}

// count takes a member into the counts, or with n -1 out of them.
func (g *Group) count(id string, said *grouprecord.Member, n int) {
	if said == nil {
		return
	}
	for _, t := range said.Topics {
		g.topics.add(t, n)
	}
	if said.Regex != "" {
		g.patterns.add(said.Regex, n)
	}
	if said.Assignor != nil {
		g.assignors.add(*said.Assignor, n)
	}
	if said.Classic != nil {
		g.classics += n
		for _, p := range said.Classic.Protocols {
			g.protocols.add(p.Name, n)
		}
	}
	switch instance := text(said.InstanceID); {
	case instance == "":
	case n > 0:
		g.statics[instance] = id
	case g.statics[instance] == id:
		delete(g.statics, instance)
	}
}

// own notes whom partitions belong to, given up or not, or with has false that they do not any more.
func (g *Group) own(id string, current *grouprecord.Current, has bool) {
	if current == nil {
		return
	}
	for _, owned := range []grouprecord.Owned{current.Assigned, current.Revoking} {
		for t, partitions := range owned {
			for p := range partitions {
				switch {
				case has:
					if g.owners[t] == nil {
						g.owners[t] = map[int32]string{}
					}
					g.owners[t][p] = id
				case g.owners[t][p] == id:
					delete(g.owners[t], p)
				}
			}
			if len(g.owners[t]) == 0 {
				delete(g.owners, t)
			}
		}
	}
}

// Changes are what an event changed in a group: the records to write, in order. The group has changed already; if nothing could be written it
// has to be told by Undo before the next event.
type Changes struct {
	Records []grouprecord.Entry
	// Classic is the group that takes this one's place, if it has become a classic one (KIP-848, downgrade). Rebalance says that its members
	// have to join again.
	Classic   *group.Group
	Rebalance bool

	g      *Group
	before []grouprecord.Entry
	clocks map[string]*clock // of members that are gone
}

func (g *Group) begin() *Changes { return &Changes{g: g} }

// put changes one value.
func (c *Changes) put(kind grouprecord.Kind, name string, value any) {
	e := grouprecord.Entry{Key: grouprecord.Key{Kind: kind, Group: c.g.id, Name: name}, Value: value}
	c.before = append(c.before, c.g.value(e.Key))
	c.g.Apply(e)
	c.Records = append(c.Records, e)
}

// Undo brings back the group that was before the changes. The clocks stay, but for those of members that are not there.
func (c *Changes) Undo() {
	for _, e := range slices.Backward(c.before) {
		c.g.Apply(e)
	}
	c.settle()
}

// settle has a clock for each member and for nobody else.
func (c *Changes) settle() {
	g := c.g
	for id, k := range g.clocks {
		if g.said[id] == nil {
			if c.clocks == nil {
				c.clocks = map[string]*clock{}
			}
			c.clocks[id] = k
			delete(g.clocks, id)
		}
	}
	for id := range g.said {
		if g.clocks[id] != nil {
			continue
		}
		if g.clocks[id] = c.clocks[id]; g.clocks[id] == nil {
			g.clocks[id] = &clock{}
		}
	}
}

// Loaded ends the applying of records: every member has one session from now on to be heard of.
func (g *Group) Loaded(c Config, now int64) {
	g.begin().settle()
	for id, k := range g.clocks {
		m := g.member(id)
		k.session = now + m.sessionMs(c)
		if m.has.State == grouprecord.UnrevokedPartitions && !m.classic() {
			k.rebalance, k.epoch = now+int64(m.said.RebalanceMs), m.has.Epoch
		}
	}
}

func (m *member) sessionMs(c Config) int64 {
	if m.classic() {
		return int64(m.said.Classic.SessionMs)
	}
	return c.SessionMs
}

// Tombstones delete the group.
func (g *Group) Tombstones() []grouprecord.Entry {
	var out []grouprecord.Entry
	add := func(kind grouprecord.Kind, names ...string) {
		for _, name := range names {
			out = append(out, grouprecord.Entry{Key: grouprecord.Key{Kind: kind, Group: g.id, Name: name}})
		}
	}
	add(grouprecord.KindCurrent, g.ids()...)
	add(grouprecord.KindTarget, g.ids()...)
	add(grouprecord.KindTargetEpoch, "")
	add(grouprecord.KindMember, g.ids()...)
	add(grouprecord.KindRegex, slices.Sorted(maps.Keys(g.regexes))...)
	add(grouprecord.KindPartitions, "")
	add(grouprecord.KindGroupEpoch, "")
	return out
}

// NextDeadline is when Tick must be called at the latest, 0 if never.
func (g *Group) NextDeadline() int64 {
	next := int64(0)
	for _, k := range g.clocks {
		for _, at := range []int64{k.session, k.rebalance, k.join, k.sync} {
			if at > 0 && (next == 0 || at < next) {
				next = at
			}
		}
	}
	return next
}

// Tick puts out the members that are due at now: those that were silent for a session, did not give up partitions within their rebalance
// timeout, or, of the classic ones, did not come back.
func (g *Group) Tick(env Env, now int64) *Changes {
	due := func(at int64) bool { return at > 0 && at <= now }
	var late []string
	for _, id := range g.ids() {
		k := g.clocks[id]
		if due(k.rebalance) && g.member(id).has.Epoch != k.epoch {
			k.rebalance = 0 // it went on meanwhile
		}
		if due(k.session) || due(k.rebalance) || due(k.join) || due(k.sync) {
			late = append(late, id)
		}
	}
	c := g.begin()
	c.fence(late, env, now)
	return c
}

// fence removes members. If only classic ones are left then, the group becomes a classic one.
func (c *Changes) fence(ids []string, env Env, now int64) {
	g := c.g
	if len(ids) == 0 {
		return
	}
	var gone []string // expressions
	for _, id := range ids {
		if regex := g.said[id].Regex; regex != "" {
			gone = append(gone, regex)
		}
		c.remove(id)
	}
	c.settle()
	if len(g.said) > 0 && g.classics == len(g.said) && env.Config.Downgrade && len(g.said) <= env.Classic.SizeMax {
		if c.downgrade(true, env, now) {
			return
		}
	}
	c.dropPatterns(gone)
	c.put(grouprecord.KindGroupEpoch, "", &grouprecord.GroupEpoch{Epoch: g.epoch.Epoch + 1, MetadataHash: g.hash(env.Image)})
	if len(g.said) == 0 {
		c.put(grouprecord.KindTargetEpoch, "", &grouprecord.TargetEpoch{Epoch: g.epoch.Epoch})
	}
}

// dropPatterns forgets the topics of expressions that nobody subscribes to any more.
func (c *Changes) dropPatterns(patterns []string) {
	slices.Sort(patterns)
	for _, p := range slices.Compact(patterns) {
		if c.g.patterns[p] == 0 && c.g.regexes[p] != nil {
			c.put(grouprecord.KindRegex, p, nil)
		}
	}
}

// remove takes a member out.
func (c *Changes) remove(id string) {
	c.put(grouprecord.KindCurrent, id, nil)
	c.put(grouprecord.KindTarget, id, nil)
	c.put(grouprecord.KindMember, id, nil)
}

// assignor is the one that most members ask for, and the first by name of several.
func (g *Group) assignor(c Config) string {
	best := ""
	for _, name := range slices.Sorted(maps.Keys(g.assignors)) {
		if best == "" || g.assignors[name] > g.assignors[best] {
			best = name
		}
	}
	if best == "" || assignor.ByName(best) == nil {
		return c.Assignors[0]
	}
	return best
}

// said and has of a member are compared as values.
func same(a, b any) bool { return reflect.DeepEqual(a, b) }
