package metadata

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

// Image is the cluster's state after some prefix of the metadata log. It is immutable: never modify what it points to.
type Image struct {
	// Index is the position in the metadata log of the last batch that the image holds; the quorum sets it.
	Index           uint64
	ClusterID       string
	Brokers         map[int32]*BrokerRecord
	Topics          map[string]*Topic
	TopicsByID      map[tp.UUID]*Topic
	Deleting        map[tp.UUID]*Topic // removed topics that still have remote segments
	BrokerConfigs   map[int32]map[string]string
	GroupConfigs    map[string]map[string]string // of consumer groups that have any of their own
	ClientQuotas    map[QuotaEntity]map[string]float64
	NextProducerID  int64
	LastBrokerEpoch int64

	// What the last batches touched, so that Diff need not visit every topic. self names this image; it is a pointer
	// because only those of one process are ever compared.
	self   *byte
	recent []step
}

// step is one batch of an image's past: the image before it, and the topics that it touched.
type step struct {
	from   *byte
	topics []tp.UUID
}

// Bounds of what an image remembers of its past.
const (
	maxSteps      = 32
	maxStepTopics = 256 // a batch that touches more is worth a pass over all topics
)

// Topic is one topic of an image.
type Topic struct {
	Name       string
	ID         tp.UUID
	Configs    map[string]string // set by the user, over the defaults
	Partitions []*Partition      // by index, without gaps
}

// Partition is one partition of an image.
type Partition struct {
	PartitionRecord
	// Remote are the partition's remote segments by start offset, DeleteFinished ones excepted.
	Remote tier.Segments
	// LogStart is the first offset that remote deletions left, 0 if there were none.
	LogStart int64
}

// Empty is the image before the first record.
func Empty() *Image {
	return &Image{self: new(byte), Brokers: map[int32]*BrokerRecord{}, Topics: map[string]*Topic{}, TopicsByID: map[tp.UUID]*Topic{},
		Deleting: map[tp.UUID]*Topic{}, BrokerConfigs: map[int32]map[string]string{}, GroupConfigs: map[string]map[string]string{}, ClientQuotas: map[QuotaEntity]map[string]float64{}}
}

// builder is an image in the making: maps are cloned the first time that a batch touches them.
type builder struct {
	Image
	topicsCloned, deletingCloned bool
	fresh                        map[*Topic]bool     // topics of this batch, free to change
	touched                      map[tp.UUID]bool    // topics that came, changed or went
	freshPartitions              map[*Partition]bool // partitions of this batch, free to change with their segments
}

// Apply folds a batch of records into a new image and leaves img alone. An error means that the log and this program
// disagree about what is possible: the caller must stop.
func (img *Image) Apply(records []Record) (*Image, error) {
	b := &builder{Image: *img, fresh: map[*Topic]bool{}, touched: map[tp.UUID]bool{}, freshPartitions: map[*Partition]bool{}}
	for _, r := range records {
		if err := r.apply(b); err != nil {
			return nil, fmt.Errorf("apply %T: %w", r, err)
		}
	}
	next := b.Image
	next.self, next.recent = new(byte), nil
	if len(b.touched) <= maxStepTopics && img.self != nil {
		past := img.recent[max(0, len(img.recent)+1-maxSteps):]
		next.recent = append(slices.Clone(past), step{img.self, slices.Collect(maps.Keys(b.touched))})
	}
	return &next, nil
}

func (b *builder) cloneTopics() {
	if !b.topicsCloned {
		b.Topics, b.TopicsByID, b.topicsCloned = maps.Clone(b.Topics), maps.Clone(b.TopicsByID), true
	}
}

func (b *builder) cloneDeleting() {
	if !b.deletingCloned {
		b.Deleting, b.deletingCloned = maps.Clone(b.Deleting), true
	}
}

// topic returns a topic that this batch may change, living or deleting.
func (b *builder) topic(id tp.UUID) (*Topic, error) {
	t, living := b.TopicsByID[id]
	if !living {
		if t = b.Deleting[id]; t == nil {
			return nil, fmt.Errorf("no topic with id %s", id)
		}
	}
	if b.fresh[t] {
		return t, nil
	}
	c := *t
	c.Partitions = slices.Clone(t.Partitions)
	b.fresh[&c], b.touched[id] = true, true
	if living {
		b.cloneTopics()
		b.Topics[c.Name], b.TopicsByID[id] = &c, &c
	} else {
		b.cloneDeleting()
		b.Deleting[id] = &c
	}
	return &c, nil
}

// partition returns a partition of the new image that this batch may change.
func (b *builder) partition(id tp.UUID, index int32) (*Partition, error) {
	t, err := b.topic(id)
	if err != nil {
		return nil, err
	}
	if index < 0 || int(index) >= len(t.Partitions) {
		return nil, fmt.Errorf("topic %s has no partition %d", t.Name, index)
	}
	if p := t.Partitions[index]; b.freshPartitions[p] {
		return p, nil
	}
	c := *t.Partitions[index]
	c.Remote = slices.Clone(c.Remote)
	t.Partitions[index], b.freshPartitions[&c] = &c, true
	return &c, nil
}

func (r ClusterRecord) apply(b *builder) error {
	if b.ClusterID != "" && b.ClusterID != r.ID {
		return fmt.Errorf("the cluster is %s already, not %s", b.ClusterID, r.ID)
	}
	b.ClusterID = r.ID
	b.LastBrokerEpoch = max(b.LastBrokerEpoch, r.LastBrokerEpoch)
	return nil
}

func (r BrokerRecord) apply(b *builder) error {
	b.Brokers = maps.Clone(b.Brokers)
	b.Brokers[r.ID] = &r
	b.LastBrokerEpoch = max(b.LastBrokerEpoch, r.Epoch)
	return nil
}

func (r BrokerStateRecord) apply(b *builder) error {
	old, ok := b.Brokers[r.ID]
	if !ok || old.Epoch != r.Epoch {
		return fmt.Errorf("no broker %d of epoch %d", r.ID, r.Epoch)
	}
	next := *old
	next.BrokerState = r.BrokerState
	b.Brokers = maps.Clone(b.Brokers)
	b.Brokers[r.ID] = &next
	return nil
}

func (r UnregisterBrokerRecord) apply(b *builder) error {
	if _, ok := b.Brokers[r.ID]; !ok {
		return fmt.Errorf("no broker %d", r.ID)
	}
	b.Brokers = maps.Clone(b.Brokers)
	delete(b.Brokers, r.ID)
	return nil
}

func (r TopicRecord) apply(b *builder) error {
	if _, ok := b.Topics[r.Name]; ok {
		return fmt.Errorf("topic %s exists", r.Name)
	}
	t := &Topic{Name: r.Name, ID: r.ID, Configs: r.Configs}
	b.cloneTopics()
	b.Topics[r.Name], b.TopicsByID[r.ID], b.fresh[t], b.touched[r.ID] = t, t, true, true
	return nil
}

func (r PartitionRecord) apply(b *builder) error {
	t, err := b.topic(r.Topic)
	if err != nil {
		return err
	}
	switch {
	case int(r.Index) == len(t.Partitions):
		t.Partitions = append(t.Partitions, &Partition{PartitionRecord: r})
	case r.Index >= 0 && int(r.Index) < len(t.Partitions):
		c := *t.Partitions[r.Index]
		c.PartitionRecord = r
		t.Partitions[r.Index] = &c
	default:
		return fmt.Errorf("partition %d of topic %s leaves a gap after %d", r.Index, t.Name, len(t.Partitions))
	}
	return nil
}

func (r TopicConfigRecord) apply(b *builder) error {
	t, err := b.topic(r.Topic)
	if err == nil {
		t.Configs = r.Configs
	}
	return err
}

func (r BrokerConfigRecord) apply(b *builder) error {
	b.BrokerConfigs = replaced(b.BrokerConfigs, r.Broker, r.Configs)
	return nil
}

func (r GroupConfigRecord) apply(b *builder) error {
	b.GroupConfigs = replaced(b.GroupConfigs, r.Group, r.Configs)
	return nil
}

func (r ClientQuotaRecord) apply(b *builder) error {
	b.ClientQuotas = replaced(b.ClientQuotas, r.Entity, r.Quotas)
	return nil
}

// replaced is a copy of m with another value under a key, or without the key for a value that is empty.
func replaced[K comparable, E any](m map[K]map[string]E, key K, value map[string]E) map[K]map[string]E {
	m = maps.Clone(m)
	if len(value) == 0 {
		delete(m, key)
	} else {
		m[key] = value
	}
	return m
}

func (r RemoveTopicRecord) apply(b *builder) error {
	t, ok := b.TopicsByID[r.Topic]
	if !ok {
		return fmt.Errorf("no topic with id %s", r.Topic)
	}
	b.cloneTopics()
	delete(b.Topics, t.Name)
	delete(b.TopicsByID, r.Topic)
	b.touched[r.Topic] = true
	for _, p := range t.Partitions {
		if len(p.Remote) > 0 {
			b.cloneDeleting()
			b.Deleting[r.Topic] = t
			delete(b.fresh, t)
			break
		}
	}
	return nil
}

func (r ForgetTopicRecord) apply(b *builder) error {
	b.cloneDeleting()
	delete(b.Deleting, r.Topic)
	return nil
}

func (r ProducerIDsRecord) apply(b *builder) error {
	b.NextProducerID = max(b.NextProducerID, r.Next)
	return nil
}

// TopicNames lists the topics in name order.
func (img *Image) TopicNames() []string { return slices.Sorted(maps.Keys(img.Topics)) }

// BrokerIDs lists the registered brokers in order.
func (img *Image) BrokerIDs() []int32 { return slices.Sorted(maps.Keys(img.Brokers)) }

// QuotaEntities lists those that have client quotas, in order.
func (img *Image) QuotaEntities() []QuotaEntity {
	return slices.SortedFunc(maps.Keys(img.ClientQuotas), func(a, b QuotaEntity) int {
		return cmp.Or(a.User.compare(b.User), a.ClientID.compare(b.ClientID))
	})
}

func (n QuotaName) compare(other QuotaName) int {
	rank := func(n QuotaName) int {
		switch {
		case n.Named:
			return 2
		case n.Default:
			return 1
		}
		return 0
	}
	return cmp.Or(cmp.Compare(rank(n), rank(other)), cmp.Compare(n.Name, other.Name))
}

// DeletingTopics lists the topics that wait for the removal of their objects, in the order of their ids.
func (img *Image) DeletingTopics() []*Topic {
	return slices.SortedFunc(maps.Values(img.Deleting), func(a, b *Topic) int { return slices.Compare(a.ID[:], b.ID[:]) })
}

// Partition finds a partition by topic name.
func (img *Image) Partition(p tp.Partition) (*Topic, *Partition, bool) {
	t, ok := img.Topics[p.Topic]
	if !ok || p.Index < 0 || int(p.Index) >= len(t.Partitions) {
		return t, nil, false
	}
	return t, t.Partitions[p.Index], true
}

// Records returns a batch that, applied to Empty, gives this image again: the content of a snapshot.
func (img *Image) Records() []Record {
	var out []Record
	if img.ClusterID != "" || img.LastBrokerEpoch > 0 {
		out = append(out, ClusterRecord{ID: img.ClusterID, LastBrokerEpoch: img.LastBrokerEpoch})
	}
	for _, id := range img.BrokerIDs() {
		out = append(out, *img.Brokers[id])
	}
	for _, id := range slices.Sorted(maps.Keys(img.BrokerConfigs)) {
		out = append(out, BrokerConfigRecord{id, img.BrokerConfigs[id]})
	}
	for _, group := range slices.Sorted(maps.Keys(img.GroupConfigs)) {
		out = append(out, GroupConfigRecord{group, img.GroupConfigs[group]})
	}
	for _, e := range img.QuotaEntities() {
		out = append(out, ClientQuotaRecord{e, img.ClientQuotas[e]})
	}
	if img.NextProducerID > 0 {
		out = append(out, ProducerIDsRecord{img.NextProducerID})
	}
	// Deleting topics come first: a living topic may bear the same name by now.
	for _, t := range img.DeletingTopics() {
		out = append(append(out, t.records()...), RemoveTopicRecord{t.ID})
	}
	for _, name := range img.TopicNames() {
		out = append(out, img.Topics[name].records()...)
	}
	return out
}

func (t *Topic) records() []Record {
	out := []Record{TopicRecord{t.Name, t.ID, t.Configs}}
	for _, p := range t.Partitions {
		out = append(out, p.PartitionRecord)
		for _, s := range p.Remote {
			out = append(out, RemoteSegmentRecord{*s})
		}
		if p.LogStart > 0 {
			out = append(out, RemoteStateRecord{Topic: t.ID, Index: p.Index, LogStart: p.LogStart})
		}
	}
	return out
}

// Delta is what changed between two images, as far as a broker must act on it. Lists are in name or id order.
type Delta struct {
	Removed []*Topic // as they were
	Changed []*Topic // new ones, and those of which anything changed, as they are
	Configs bool     // broker configs changed
	Brokers bool     // brokers came, went, or changed
}

// Diff compares two images of one history. It costs as much as the batches between them touched; where those are many, a
// pass over the topic maps: unchanged topics are the same pointers.
func Diff(old, now *Image) Delta {
	var d Delta
	compare := func(id tp.UUID) {
		was, is := old.TopicsByID[id], now.TopicsByID[id]
		switch {
		case was == is:
		case is == nil:
			d.Removed = append(d.Removed, was)
		default:
			d.Changed = append(d.Changed, is)
		}
	}
	if ids, ok := now.since(old); ok {
		for id := range ids {
			compare(id)
		}
	} else {
		for id := range old.TopicsByID {
			if _, ok := now.TopicsByID[id]; !ok {
				compare(id)
			}
		}
		for id := range now.TopicsByID {
			compare(id)
		}
	}
	order := func(a, b *Topic) int { return cmp.Or(cmp.Compare(a.Name, b.Name), slices.Compare(a.ID[:], b.ID[:])) }
	slices.SortFunc(d.Removed, order)
	slices.SortFunc(d.Changed, order)
	d.Brokers = !maps.Equal(old.Brokers, now.Brokers)
	d.Configs = !maps.EqualFunc(old.BrokerConfigs, now.BrokerConfigs, maps.Equal)
	return d
}

// since is what the batches from old to img touched, if img remembers.
func (img *Image) since(old *Image) (map[tp.UUID]bool, bool) {
	ids := map[tp.UUID]bool{}
	if old.self == nil || old.self == img.self {
		return ids, old == img
	}
	for i := len(img.recent) - 1; i >= 0; i-- {
		for _, id := range img.recent[i].topics {
			ids[id] = true
		}
		if img.recent[i].from == old.self {
			return ids, true
		}
	}
	return nil, false
}
