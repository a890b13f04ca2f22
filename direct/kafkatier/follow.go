package kafkatier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/remotelog"
	"github.com/varve-io/varve/internal/tp"
)

const (
	// retryPause is between two attempts to begin with the metadata topic, and after its partitions gave errors.
	retryPause = time.Second
	// beginLimit is for one attempt.
	beginLimit = 30 * time.Second
)

// userPartition names a partition of a user's topic by what counts.
type userPartition struct {
	id    tp.UUID
	index int32
}

// followed is what the metadata topic said of one partition so far.
type followed struct {
	id    userPartition
	ready chan struct{} // closed when all was read that was there when it began

	mu    sync.Mutex
	state remotelog.Partition
	next  int64 // offset of the metadata topic from which on records are new
}

// caughtUp reports whether what there was has been read.
func (f *followed) caughtUp() bool {
	select {
	case <-f.ready:
		return true
	default:
		return false
	}
}

// follower reads the partitions of the metadata topic that are in use, and of their records those about partitions that are
// in use. One goroutine, run, uses the consumer; a partition of the topic is read anew from its beginning when another
// partition that it tells of comes into use.
type follower struct {
	client *kgo.Client
	topic  string
	logger *slog.Logger

	mu     sync.Mutex
	all    map[userPartition]*followed
	fresh  []*followed        // not yet assigned
	gone   bool               // some were given up
	nudge  context.CancelFunc // ends the present poll
	source map[int32]*source  // only run uses it
	count  int                // partitions of the topic, 0 unknown; only run uses it
	told   string             // the last error
}

// source is a partition of the metadata topic.
type source struct {
	next, end int64 // read up to, and to be read until those that wait are ready
	waiting   []*followed
	users     []*followed
}

func newFollower(client *kgo.Client, topic string, logger *slog.Logger) *follower {
	return &follower{client: client, topic: topic, logger: logger, all: map[userPartition]*followed{}, source: map[int32]*source{}}
}

// get follows a partition, from now on if it was not followed yet.
func (f *follower) get(id userPartition) *followed {
	f.mu.Lock()
	defer f.mu.Unlock()
	if p := f.all[id]; p != nil {
		return p
	}
	p := &followed{id: id, ready: make(chan struct{})}
	f.all[id] = p
	f.fresh = append(f.fresh, p)
	f.poke()
	return p
}

// keep gives up all but the partitions in use.
func (f *follower) keep(inUse map[*followed]bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, p := range f.all {
		if !inUse[p] {
			delete(f.all, id)
			f.gone = true
		}
	}
	if f.gone {
		f.poke()
	}
}

func (f *follower) poke() {
	if f.nudge != nil {
		f.nudge()
	}
}

// run follows until the context ends.
func (f *follower) run(ctx context.Context) {
	for ctx.Err() == nil {
		poll, cancel := context.WithCancel(ctx)
		f.mu.Lock()
		f.nudge = cancel
		fresh, gone := f.fresh, f.gone
		f.fresh, f.gone = nil, false
		f.mu.Unlock()
		if gone {
			f.retire()
		}
		if err := f.assign(ctx, fresh); err != nil {
			f.mu.Lock()
			f.fresh = append(fresh, f.fresh...)
			f.mu.Unlock()
			f.tell(ctx, err)
			cancel()
			continue
		}
		fetches := f.client.PollFetches(poll)
		nudged := poll.Err() != nil
		cancel()
		f.take(fetches)
		if errs := fetches.Errors(); len(errs) > 0 && !nudged {
			f.tell(ctx, errs[0].Err)
		}
	}
}

// tell logs why the topic cannot be read, each cause once in a row, and rests.
func (f *follower) tell(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	if text := err.Error(); text != f.told {
		f.told = text
		f.logger.Warn("the tier's metadata cannot be read, brokers are asked instead", "topic", f.topic, "error", err)
	}
	timer := time.NewTimer(retryPause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// assign begins to read for partitions that came into use. On an error nothing has begun.
func (f *follower) assign(ctx context.Context, fresh []*followed) error {
	if len(fresh) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, beginLimit)
	defer cancel()
	if f.count == 0 {
		n, err := f.partitions(ctx)
		if err != nil {
			return err
		}
		f.count = n
	}
	at := map[int32]*source{}
	var wanted []int32
	for _, p := range fresh {
		n := remotelog.MetadataPartition(p.id.id, p.id.index, f.count)
		if at[n] == nil {
			at[n] = &source{}
			wanted = append(wanted, n)
			if old := f.source[n]; old != nil {
				at[n].users, at[n].waiting = slices.Clone(old.users), slices.Clone(old.waiting)
			}
		}
		at[n].users, at[n].waiting = append(at[n].users, p), append(at[n].waiting, p)
	}
	starts, err := listOffsets(ctx, f.client, f.topic, wanted, -1, earliest)
	if err != nil {
		return err
	}
	ends, err := listOffsets(ctx, f.client, f.topic, wanted, -1, latest)
	if err != nil {
		return err
	}
	f.client.RemoveConsumePartitions(map[string][]int32{f.topic: wanted})
	begin := map[int32]kgo.Offset{}
	for n, s := range at {
		s.next, s.end = starts[n], ends[n]
		begin[n] = kgo.NewOffset().At(s.next)
		f.source[n] = s
		s.settle()
	}
	f.client.AddConsumePartitions(map[string]map[int32]kgo.Offset{f.topic: begin})
	return nil
}

// settle tells those that wait if all was read.
func (s *source) settle() {
	if s.next < s.end {
		return
	}
	for _, p := range s.waiting {
		close(p.ready)
	}
	s.waiting = nil
}

// retire stops reading what nobody uses any more.
func (f *follower) retire() {
	f.mu.Lock()
	defer f.mu.Unlock()
	var unused []int32
	for n, s := range f.source {
		var users []*followed
		for _, p := range s.users {
			if f.all[p.id] == p {
				users = append(users, p)
			}
		}
		if s.users = users; len(users) == 0 {
			unused = append(unused, n)
			delete(f.source, n)
		}
	}
	if len(unused) > 0 {
		f.client.RemoveConsumePartitions(map[string][]int32{f.topic: unused})
	}
}

// take applies what was read.
func (f *follower) take(fetches kgo.Fetches) {
	fetches.EachPartition(func(p kgo.FetchTopicPartition) {
		s := f.source[p.Partition]
		if s == nil {
			return
		}
		for _, r := range p.Records {
			s.next = r.Offset + 1
			if r.Attrs.IsControl() || r.Value == nil {
				continue
			}
			record, err := remotelog.Parse(r.Value)
			if err != nil {
				// Whatever it says, the segments that are known stay what they are.
				f.logger.Debug("record of the tier's metadata is skipped", "topic", f.topic, "partition", r.Partition, "offset", r.Offset, "error", err)
				continue
			}
			of := record.Of()
			f.mu.Lock()
			user := f.all[userPartition{of.TopicID, of.Index}]
			f.mu.Unlock()
			if user != nil {
				user.apply(record, r.Offset)
			}
		}
		s.settle()
	})
}

// apply takes in a record that is not yet known: a partition of the topic may be read again for the sake of others.
func (f *followed) apply(r remotelog.Record, offset int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if offset < f.next {
		return
	}
	f.next = offset + 1
	f.state.Apply(r)
}

// partitions is the number of the metadata topic's partitions.
func (f *follower) partitions(ctx context.Context) (int, error) {
	t, err := describe(ctx, f.client, partKey{topic: f.topic})
	if err != nil {
		return 0, err
	}
	return len(t.Partitions), nil
}

// Timestamps of ListOffsets.
const (
	latest        = -1
	earliest      = -2
	earliestLocal = -4
)

var errIncomplete = errors.New("answer is incomplete")

// describe asks for a topic by its name or id.
func describe(ctx context.Context, client *kgo.Client, key partKey) (*kmsg.MetadataResponseTopic, error) {
	req := kmsg.NewPtrMetadataRequest()
	t := kmsg.NewMetadataRequestTopic()
	if key.topic != "" {
		t.Topic = kmsg.StringPtr(key.topic)
	} else {
		t.TopicID = key.id
	}
	req.Topics = append(req.Topics, t)
	resp, err := req.RequestWith(ctx, client)
	if err != nil {
		return nil, fmt.Errorf("describe topic: %w", err)
	}
	if len(resp.Topics) != 1 {
		return nil, fmt.Errorf("describe topic: %w", errIncomplete)
	}
	got := &resp.Topics[0]
	if err := kerr.ErrorForCode(got.ErrorCode); err != nil {
		return nil, fmt.Errorf("describe topic: %w", err)
	}
	if got.Topic == nil || len(got.Partitions) == 0 {
		return nil, fmt.Errorf("describe topic: %w", errIncomplete)
	}
	return got, nil
}

// listOffsets asks the leaders of partitions for offsets. A leader epoch of -1 is that of whoever leads.
func listOffsets(ctx context.Context, client *kgo.Client, topic string, partitions []int32, epoch int32, at int64) (map[int32]int64, error) {
	req := kmsg.NewPtrListOffsetsRequest()
	req.ReplicaID = -1
	t := kmsg.NewListOffsetsRequestTopic()
	t.Topic = topic
	for _, n := range partitions {
		p := kmsg.NewListOffsetsRequestTopicPartition()
		p.Partition, p.CurrentLeaderEpoch, p.Timestamp = n, epoch, at
		t.Partitions = append(t.Partitions, p)
	}
	req.Topics = append(req.Topics, t)
	resp, err := req.RequestWith(ctx, client)
	if err != nil {
		return nil, fmt.Errorf("list offsets %d of %s: %w", at, topic, err)
	}
	out := map[int32]int64{}
	for _, t := range resp.Topics {
		for _, p := range t.Partitions {
			if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
				return nil, fmt.Errorf("list offsets %d of %s-%d: %w", at, topic, p.Partition, err)
			}
			out[p.Partition] = p.Offset
		}
	}
	for _, n := range partitions {
		if o, ok := out[n]; !ok || o < 0 {
			return nil, fmt.Errorf("list offsets %d of %s-%d: %w", at, topic, n, errIncomplete)
		}
	}
	return out, nil
}
