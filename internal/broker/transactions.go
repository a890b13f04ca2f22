package broker

import (
	"time"

	"github.com/varve-io/varve/internal/coordinator"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/tp"
)

// transactionConfig are the settings of transactions.
func (b *broker) transactionConfig() coordinator.TransactionConfig {
	c := b.config()
	partitions := c.Int("transaction.state.log.num.partitions")
	if t, ok := b.quorum.Image().Topics[coordinator.TransactionTopic]; ok {
		partitions = len(t.Partitions)
	}
	return coordinator.TransactionConfig{Partitions: partitions, Expects: b.expects(coordinator.TransactionTopic), CommitTimeout: c.Millis("offsets.commit.timeout.ms"),
		TimeoutMaxMs: int32(c.Int("transaction.max.timeout.ms")), ExpirationMs: c.Int64("transactional.id.expiration.ms"), V2: true}
}

// coordinatorOf is what keeps the content of a topic of the cluster's own, nil of any other.
func (b *broker) coordinatorOf(topic string) interface {
	Elect(*partition.Partition, func())
	Resign(int32)
} {
	switch topic {
	case coordinator.Topic:
		return b.groups
	case coordinator.TransactionTopic:
		return b.transactions
	}
	return nil
}

// expects says whether this broker leads a partition of a topic of the cluster's own, or may, for all it knows.
func (b *broker) expects(topic string) func(int32) bool {
	return func(index int32) bool {
		_, s, ok := b.quorum.Image().Partition(tp.Partition{Topic: topic, Index: index})
		return !ok || s.Leader == b.self
	}
}

// lateBuffer is how much longer than transaction.max.timeout.ms a transaction may be open before it counts as late (KIP-664).
const lateBuffer = 5 * time.Minute

// late says whether a partition that is led here has a transaction that its coordinator must have ended by now, and where it begins.
func (b *broker) late(p *partition.Partition, now time.Time) (first int64, late bool) {
	l := p.Log()
	if l == nil || p.Role().Leader != b.self {
		return 0, false
	}
	first, last, open := l.IdlestTransaction()
	return first, open && now.Sub(time.UnixMilli(last)) > b.config().Millis("transaction.max.timeout.ms")+lateBuffer
}
