package controller

import (
	"cmp"
	"slices"

	"github.com/varve-io/varve/internal/metadata"
)

// placer spreads replicas over brokers. Brokers are meant by their position in ids.
type placer struct {
	ids      []int32 // in order
	second   []bool  // fenced or leaving: only to fill up
	rack     []int   // number of the broker's rack
	racks    int
	replicas []int // of all topics
	leaders  []int // preferred leaderships of all topics
	own      []int // replicas of the topic
	ownLead  []int // preferred leaderships of the topic
	seen     int   // partitions of the image: where the rotation of ties goes on
}

// newPlacer counts the load of the image on the given brokers, which are in order. topic is the one that grows, or nil.
func newPlacer(img *metadata.Image, ids []int32, topic *metadata.Topic) *placer {
	n := len(ids)
	p := &placer{ids: ids, second: make([]bool, n), rack: make([]int, n), replicas: make([]int, n), leaders: make([]int, n), own: make([]int, n), ownLead: make([]int, n)}
	var names []string
	for i, id := range ids {
		b := img.Brokers[id]
		p.second[i] = b.Fenced || b.ShuttingDown
		if p.rack[i] = slices.Index(names, b.Rack); p.rack[i] < 0 {
			p.rack[i] = len(names)
			names = append(names, b.Rack)
		}
	}
	p.racks = len(names)
	for _, t := range img.TopicsByID {
		p.seen += len(t.Partitions)
		for _, q := range t.Partitions {
			p.count(q.Replicas, p.replicas, p.leaders)
		}
	}
	if topic != nil {
		for _, q := range topic.Partitions {
			p.count(q.Replicas, p.own, p.ownLead)
		}
	}
	return p
}

func (p *placer) count(list []int32, replicas, leaders []int) {
	for j, id := range list {
		if i, ok := slices.BinarySearch(p.ids, id); ok {
			replicas[i]++
			if j == 0 {
				leaders[i]++
			}
		}
	}
}

// placerFor makes a placer of the brokers that may get replicas: those that are there, and if they are too few for factor
// fenced and leaving ones too. None is draining. topic is the one that grows, or nil.
func placerFor(img *metadata.Image, topic *metadata.Topic, factor int32) (*placer, error) {
	var ids, rest []int32
	drained := ""
	for _, id := range img.BrokerIDs() {
		switch b := img.Brokers[id]; {
		case draining(img, id):
			drained = " and not being drained"
		case b.Fenced || b.ShuttingDown:
			rest = append(rest, id)
		default:
			ids = append(ids, id)
		}
	}
	if n := len(ids) + len(rest); int(factor) > n {
		return nil, refuse(ErrInvalidReplicationFactor, "Unable to replicate the partition %d time(s): The target replication factor of %d cannot be reached because only %d broker(s) are registered%s.", factor, factor, n, drained)
	}
	if len(ids) < int(factor) {
		ids = append(ids, rest...)
		slices.Sort(ids)
	}
	return newPlacer(img, ids, topic), nil
}

// place assigns count partitions of factor replicas each, leaders first, to a topic. Replicas of a partition are on
// different racks as far as there are racks; within the topic brokers hold equally many replicas and lead equally many
// partitions, to one, as far as racks allow; what is left over goes where the load of all topics is least.
func (p *placer) place(count, factor int32) [][]int32 {
	sets := make([][]int, count)
	for i := range sets {
		sets[i] = p.pick(i, int(factor))
	}
	p.lead(sets)
	out := make([][]int32, count)
	for i, set := range sets {
		out[i] = make([]int32, len(set))
		for j, at := range set {
			out[i][j] = p.ids[at]
		}
	}
	// The next topic begins with nothing of its own.
	p.seen += len(sets)
	clear(p.own)
	clear(p.ownLead)
	return out
}

// pick chooses the brokers of one partition.
func (p *placer) pick(index, factor int) []int {
	round := (p.seen + index) / len(p.ids)
	set := make([]int, 0, factor)
	uses := make([]int, p.racks)
	spare := make([]int, p.racks)
	for len(set) < factor {
		// A rack that holds so large a share of the least loaded brokers that one per partition barely uses them up has
		// to be taken first: else the rest of its brokers would stay behind.
		least, total := -1, 0
		for i := range p.ids {
			if !slices.Contains(set, i) && (least < 0 || p.own[i] < least) {
				least = p.own[i]
			}
		}
		clear(spare)
		for i := range p.ids {
			if p.own[i] == least && !slices.Contains(set, i) {
				spare[p.rack[i]]++
				total++
			}
		}
		urgent := func(i int) int {
			if p.own[i] == least && spare[p.rack[i]]*factor >= total {
				return 0
			}
			return 1
		}
		best := -1
		for i := range p.ids {
			if !slices.Contains(set, i) && (best < 0 || cmp.Or(number(p.second[i])-number(p.second[best]), uses[p.rack[i]]-uses[p.rack[best]], p.own[i]-p.own[best],
				urgent(i)-urgent(best), p.replicas[i]-p.replicas[best], cmp.Compare(turn(round, i), turn(round, best))) < 0) {
				best = i
			}
		}
		set = append(set, best)
		uses[p.rack[best]]++
		p.own[best]++
		p.replicas[best]++
	}
	return set
}

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}

// turn orders brokers of equal load: by id in the first round, in another mixed order in each later one, so that replicas
// of what one broker leads are all over the cluster and not on its neighbours alone. (The mixer is that of SplitMix64.)
func turn(round, broker int) uint64 {
	if round == 0 {
		return uint64(broker)
	}
	x := uint64(round)<<32 + uint64(broker) + 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// lead puts a leader first in each set. It goes by chunks of as many partitions as there are brokers and matches brokers to
// partitions, one each (augmenting paths); brokers with less to lead first.
func (p *placer) lead(sets [][]int) {
	for start := 0; start < len(sets); start += len(p.ids) {
		chunk := sets[start:min(start+len(p.ids), len(sets))]
		leads := make([]int, len(p.ids)) // partition of the chunk, from 1; 0 none
		order := make([][]int, len(chunk))
		for i, set := range chunk {
			order[i] = slices.Clone(set)
			slices.SortStableFunc(order[i], func(a, b int) int {
				return cmp.Or(number(p.second[a])-number(p.second[b]), p.ownLead[a]-p.ownLead[b], p.leaders[a]-p.leaders[b])
			})
			p.match(order, leads, make([]bool, len(p.ids)), i)
		}
		leader := make([]int, len(chunk))
		for i := range leader {
			leader[i] = -1
		}
		for broker, partition := range leads {
			if partition > 0 {
				leader[partition-1] = broker
				p.ownLead[broker]++
				p.leaders[broker]++
			}
		}
		for i, set := range chunk {
			if leader[i] < 0 { // more partitions than brokers that could lead them
				leader[i] = slices.MinFunc(order[i], func(a, b int) int {
					return cmp.Or(number(p.second[a])-number(p.second[b]), p.ownLead[a]-p.ownLead[b])
				})
				p.ownLead[leader[i]]++
				p.leaders[leader[i]]++
			}
			at := slices.Index(set, leader[i])
			copy(set[1:at+1], set[:at])
			set[0] = leader[i]
		}
	}
}

// match finds a broker for partition i of a chunk, moving others if need be. Who is only to fill up does not lead.
func (p *placer) match(order [][]int, leads []int, tried []bool, i int) bool {
	for _, broker := range order[i] {
		if tried[broker] || p.second[broker] && !p.second[order[i][0]] {
			continue
		}
		tried[broker] = true
		if leads[broker] == 0 || p.match(order, leads, tried, leads[broker]-1) {
			leads[broker] = i + 1
			return true
		}
	}
	return false
}

// replace finds the best broker for position at of a replica list, none if all are in the list.
func (p *placer) replace(list []int32, at int) (int32, bool) {
	uses := make([]int, p.racks)
	for j, id := range list {
		if i, ok := slices.BinarySearch(p.ids, id); ok && j != at {
			uses[p.rack[i]]++
		}
	}
	best := -1
	for i, id := range p.ids {
		if slices.Contains(list, id) {
			continue
		}
		lead := func(k int) int {
			if at == 0 {
				return p.leaders[k]
			}
			return 0
		}
		if best < 0 || cmp.Or(uses[p.rack[i]]-uses[p.rack[best]], p.replicas[i]-p.replicas[best], lead(i)-lead(best)) < 0 {
			best = i
		}
	}
	if best < 0 {
		return -1, false
	}
	p.replicas[best]++
	if at == 0 {
		p.leaders[best]++
	}
	return p.ids[best], true
}
