package txn

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/tp"
)

// Record is a record of __transaction_state; a nil Value is a tombstone.
type Record struct {
	Key, Value []byte
}

// Versions of the key and of the value that we write, as Kafka does from transaction.version 1 on. Values of version 0 lack
// the previous and the next producer id and the transaction version.
const (
	keyVersion   = 0
	valueVersion = 1
)

func recordKey(id string) []byte {
	k := kmsg.NewTxnMetadataKey()
	k.Version, k.TransactionalID = keyVersion, id
	return k.AppendTo(nil)
}

// Tombstone is the record that ends a transactional id.
func Tombstone(id string) Record { return Record{Key: recordKey(id)} }

// Record is the state as __transaction_state keeps it (TransactionLog). Only an id that is known has one.
func (t Transaction) Record() Record {
	v := kmsg.NewTxnMetadataValue()
	v.Version = valueVersion
	v.ProducerID, v.PreviousProducerID, v.NextProducerID, v.ProducerEpoch = t.producerID, t.previousID, t.nextID, t.epoch
	v.TimeoutMillis, v.State = t.timeoutMs, kmsg.TransactionState(t.state)
	v.LastUpdateTimestamp, v.StartTimestamp = t.updated, t.start
	v.ClientTransactionVersion = int16(t.version)
	if t.state != Empty {
		v.Topics = []kmsg.TxnMetadataValueTopic{} // null is for Empty alone: Kafka reads the list of all others
	}
	for _, p := range t.partitions {
		if n := len(v.Topics); n == 0 || v.Topics[n-1].Topic != p.Topic {
			v.Topics = append(v.Topics, kmsg.TxnMetadataValueTopic{Topic: p.Topic})
		}
		last := &v.Topics[len(v.Topics)-1]
		last.Partitions = append(last.Partitions, p.Index)
	}
	return Record{recordKey(t.id), v.AppendTo(nil)}
}

// Entry is one parsed record of __transaction_state; a tombstone has no Transaction.
type Entry struct {
	ID          string
	Transaction *Transaction
}

// ParseRecord reads a record. ok is false for keys of a kind that we do not know, which are skipped. A value of an unknown
// version is an error, though Kafka skips it: an older state of the transaction must not come back to life.
func ParseRecord(key, value []byte) (e Entry, ok bool, err error) {
	if len(key) < 2 {
		return e, false, fmt.Errorf("transaction record: key of %d bytes", len(key))
	}
	if binary.BigEndian.Uint16(key) != keyVersion {
		return e, false, nil
	}
	k := kmsg.NewTxnMetadataKey()
	if err := k.ReadFrom(key); err != nil {
		return e, false, fmt.Errorf("transaction record: key: %w", err)
	}
	e.ID = k.TransactionalID
	if value == nil {
		return e, true, nil
	}
	t, err := parseValue(k.TransactionalID, value)
	if err != nil {
		return Entry{}, false, fmt.Errorf("transaction record: state of %q: %w", k.TransactionalID, err)
	}
	e.Transaction = &t
	return e, true, nil
}

func parseValue(id string, b []byte) (Transaction, error) {
	if len(b) < 2 {
		return Transaction{}, fmt.Errorf("value of %d bytes", len(b))
	}
	if v := binary.BigEndian.Uint16(b); v > valueVersion {
		return Transaction{}, fmt.Errorf("value of unknown version %d", v)
	}
	v := kmsg.NewTxnMetadataValue()
	if err := v.ReadFrom(b); err != nil {
		return Transaction{}, err
	}
	t := Transaction{id: id, producerID: v.ProducerID, previousID: v.PreviousProducerID, nextID: v.NextProducerID, epoch: v.ProducerEpoch,
		lastEpoch: NoEpoch, timeoutMs: v.TimeoutMillis, state: State(v.State), start: v.StartTimestamp, updated: v.LastUpdateTimestamp,
		version: version(v.ClientTransactionVersion)}
	switch {
	case t.producerID < 0 || t.epoch < 0:
		return t, fmt.Errorf("producer id %d, epoch %d", t.producerID, t.epoch)
	case t.previousID < NoProducerID || t.nextID < NoProducerID:
		return t, fmt.Errorf("producer ids %d before and %d after", t.previousID, t.nextID)
	case t.state < Empty || t.state > CompleteAbort:
		return t, fmt.Errorf("unknown state %d", v.State)
	case t.version < version0 || t.version > version2:
		return t, fmt.Errorf("unknown transaction version %d", t.version)
	}
	if t.state != Ongoing && !t.state.prepared() {
		return t, nil
	}
	for _, topic := range v.Topics {
		for _, p := range topic.Partitions {
			if topic.Topic == "" || p < 0 {
				return t, fmt.Errorf("partition %d of topic %q", p, topic.Topic)
			}
			t.partitions = append(t.partitions, tp.Partition{Topic: topic.Topic, Index: p})
		}
	}
	slices.SortFunc(t.partitions, compare)
	t.partitions = slices.Compact(t.partitions)
	return t, nil
}
