package consumergroup

import (
	"cmp"
	"encoding/binary"
	"maps"
	"regexp"
	"slices"
	"unicode/utf16"

	"github.com/zeebo/xxh3"

	"github.com/varve-io/varve/internal/assignor"
	"github.com/varve-io/varve/internal/grouprecord"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tp"
)

// regexPauseMs is the least time between two looks for the topics of the group's expressions; a new expression is looked at right away.
const regexPauseMs = 10_000

// compile reads an expression, which has to match the whole name of a topic. The syntax is RE2's, as in Kafka.
func compile(pattern string) (*regexp.Regexp, error) {
	if _, err := regexp.Compile(pattern); err != nil {
		return nil, err // of the pattern itself: it must not be one only within the brackets below
	}
	return regexp.Compile(`^(?:` + pattern + `)$`)
}

// resolve finds the topics of an expression. One that is not valid any more matches none.
func resolve(pattern string, img *metadata.Image, now int64) *grouprecord.Regex {
	r := &grouprecord.Regex{Version: int64(img.Index), At: now}
	if e, err := compile(pattern); err == nil {
		for name := range img.Topics {
			if e.MatchString(name) {
				r.Topics = append(r.Topics, name)
			}
		}
		slices.Sort(r.Topics)
	}
	return r
}

// refresh looks for the topics of expressions that have not been looked at, or not for a while. It says whether any have changed.
func (c *Changes) refresh(env Env, now int64) (changed bool) {
	g := c.g
	all := now >= g.looked+regexPauseMs && (g.lookedIn != env.Image.Index || now >= g.looked+env.Config.RegexMs)
	if all {
		g.looked, g.lookedIn = now, env.Image.Index
	}
	for _, p := range slices.Sorted(maps.Keys(g.patterns)) {
		old := g.regexes[p]
		if old != nil && !all {
			continue
		}
		found := resolve(p, env.Image, now)
		if old == nil || !slices.Equal(old.Topics, found.Topics) {
			c.put(grouprecord.KindRegex, p, found)
			changed = true
		}
	}
	return changed
}

// subscribed lists the topics that anybody subscribes to, by name, whether they exist or not.
func (g *Group) subscribed() []string {
	names := slices.Collect(maps.Keys(g.topics))
	for p := range g.patterns {
		if r := g.regexes[p]; r != nil {
			names = append(names, r.Topics...)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// subscription lists the topics that a member subscribes to and that exist, by ascending id.
func (g *Group) subscription(said *grouprecord.Member, img *metadata.Image) []tp.UUID {
	names := said.Topics
	if r := g.regexes[said.Regex]; said.Regex != "" && r != nil {
		names = append(slices.Clone(names), r.Topics...)
	}
	var ids []tp.UUID
	for _, name := range names {
		if t, ok := img.Topics[name]; ok {
			ids = append(ids, t.ID)
		}
	}
	slices.SortFunc(ids, compareIDs)
	return slices.Compact(ids)
}

func compareIDs(a, b tp.UUID) int {
	return cmp.Or(cmp.Compare(binary.BigEndian.Uint64(a[:]), binary.BigEndian.Uint64(b[:])), cmp.Compare(binary.BigEndian.Uint64(a[8:]), binary.BigEndian.Uint64(b[8:])))
}

// hash is Kafka's hash of the topics that the group subscribes to (KIP-1101): XXH3 over those of each, which know its id, name, partitions and
// the racks of their replicas.
func (g *Group) hash(img *metadata.Image) int64 {
	h := hasher{}
	for _, name := range g.subscribed() {
		if t, ok := img.Topics[name]; ok {
			h.int64(hashTopic(t, img))
		}
	}
	if len(h.b) == 0 {
		return 0
	}
	return h.sum()
}

func hashTopic(t *metadata.Topic, img *metadata.Image) int64 {
	h := hasher{b: []byte{0}} // the version of the format
	h.int64(int64(binary.BigEndian.Uint64(t.ID[:])))
	h.int64(int64(binary.BigEndian.Uint64(t.ID[8:])))
	h.string(t.Name)
	h.int32(int32(len(t.Partitions)))
	for i, p := range t.Partitions {
		h.int32(int32(i))
		var racks []string
		for _, node := range p.Replicas {
			if b, ok := img.Brokers[node]; ok && b.Rack != "" {
				racks = append(racks, b.Rack)
			}
		}
		slices.Sort(racks)
		for _, rack := range slices.Compact(racks) {
			h.int32(int32(len(utf16.Encode([]rune(rack)))))
			h.string(rack)
		}
	}
	return h.sum()
}

// hasher lays values out as hash4j's streams do: little-endian, text as UTF-16 followed by its length.
type hasher struct{ b []byte }

func (h *hasher) int32(n int32) { h.b = binary.LittleEndian.AppendUint32(h.b, uint32(n)) }
func (h *hasher) int64(n int64) { h.b = binary.LittleEndian.AppendUint64(h.b, uint64(n)) }
func (h *hasher) sum() int64    { return int64(xxh3.Hash(h.b)) }

func (h *hasher) string(s string) {
	units := utf16.Encode([]rune(s))
	for _, u := range units {
		h.b = binary.LittleEndian.AppendUint16(h.b, u)
	}
	h.int32(int32(len(units)))
}

// assign makes the target assignment for the group epoch, if that is newer than the last one and the last one not too recent (KIP-1263).
func (c *Changes) assign(env Env, now int64) {
	g := c.g
	if g.target.Epoch >= g.epoch.Epoch || g.target.At != 0 && now < g.target.At+env.Config.AssignmentMs {
		return
	}
	var members []assignor.Member
	topics := assignor.Topics{}
	for _, id := range g.ids() {
		m := assignor.Member{ID: id, InstanceID: text(g.said[id].InstanceID), Topics: g.subscription(g.said[id], env.Image), Had: g.targets[id]}
		for _, t := range m.Topics {
			topics[t] = int32(len(env.Image.TopicsByID[t].Partitions))
		}
		members = append(members, m)
	}
	out := assignor.ByName(g.assignor(env.Config))(members, topics)
	for _, m := range members {
		next := out[m.ID]
		if next == nil {
			next = grouprecord.Assignment{}
		}
		if m.Had == nil || !same(m.Had, next) {
			c.put(grouprecord.KindTarget, m.ID, next)
		}
	}
	c.put(grouprecord.KindTargetEpoch, "", &grouprecord.TargetEpoch{Epoch: g.epoch.Epoch, At: now})
}
