// Package metadata is the truth of the cluster: the records that the controller writes, the immutable image that they
// fold into, and the codec of both. Every node folds the same records in the same order, so every node's image at an
// index is the same. The package is pure; images are safe for any number of readers.
package metadata

import (
	"fmt"

	"github.com/fxamacker/cbor/v2"

	"github.com/varve-io/varve/internal/tp"
)

// Record is one change of the cluster's state. Records are encoded as CBOR maps with integer keys: fields may be added,
// unknown ones are skipped, kinds are never reused.
type Record interface {
	kind() uint8
	apply(b *builder) error
}

// ClusterRecord names the cluster; the first record of every metadata log.
type ClusterRecord struct {
	ID string `cbor:"1,keyasint"`
}

// BrokerRecord registers a broker. A new incarnation (another process run) replaces the old one under a higher epoch.
type BrokerRecord struct {
	ID          int32      `cbor:"1,keyasint"`
	Epoch       int64      `cbor:"2,keyasint"`
	Incarnation tp.UUID    `cbor:"3,keyasint"`
	Listeners   []Endpoint `cbor:"4,keyasint"`
	Rack        string     `cbor:"5,keyasint,omitempty"`
}

// Endpoint is an address that clients are told to use.
type Endpoint struct {
	Name string `cbor:"1,keyasint"`
	Host string `cbor:"2,keyasint"`
	Port int32  `cbor:"3,keyasint"`
}

// TopicRecord creates a topic without partitions.
type TopicRecord struct {
	Name    string            `cbor:"1,keyasint"`
	ID      tp.UUID           `cbor:"2,keyasint"`
	Configs map[string]string `cbor:"3,keyasint,omitempty"`
}

// PartitionRecord creates partition Index, or replaces its assignment and leadership.
type PartitionRecord struct {
	Topic          tp.UUID `cbor:"1,keyasint"`
	Index          int32   `cbor:"2,keyasint"`
	Replicas       []int32 `cbor:"3,keyasint"`
	ISR            []int32 `cbor:"4,keyasint"`
	Leader         int32   `cbor:"5,keyasint"` // -1 none
	LeaderEpoch    int32   `cbor:"6,keyasint"`
	PartitionEpoch int32   `cbor:"7,keyasint"`
}

// TopicConfigRecord replaces the whole set of a topic's own configs.
type TopicConfigRecord struct {
	Topic   tp.UUID           `cbor:"1,keyasint"`
	Configs map[string]string `cbor:"2,keyasint"`
}

// BrokerConfigRecord replaces the dynamic configs of one broker, or with Broker -1 of the whole cluster.
type BrokerConfigRecord struct {
	Broker  int32             `cbor:"1,keyasint"`
	Configs map[string]string `cbor:"2,keyasint"`
}

// RemoveTopicRecord takes a topic out of sight at once. Its remote segments stay known, as those of a deleting topic,
// until their objects are gone.
type RemoveTopicRecord struct {
	Topic tp.UUID `cbor:"1,keyasint"`
}

// ForgetTopicRecord ends a deleting topic whose objects are gone.
type ForgetTopicRecord struct {
	Topic tp.UUID `cbor:"1,keyasint"`
}

// ProducerIDsRecord reserves all producer ids below Next for brokers that asked before.
type ProducerIDsRecord struct {
	Next int64 `cbor:"1,keyasint"`
}

func (ClusterRecord) kind() uint8       { return 1 }
func (BrokerRecord) kind() uint8        { return 2 }
func (TopicRecord) kind() uint8         { return 3 }
func (PartitionRecord) kind() uint8     { return 4 }
func (TopicConfigRecord) kind() uint8   { return 5 }
func (BrokerConfigRecord) kind() uint8  { return 6 }
func (RemoveTopicRecord) kind() uint8   { return 7 }
func (ForgetTopicRecord) kind() uint8   { return 8 }
func (ProducerIDsRecord) kind() uint8   { return 9 }
func (RemoteSegmentRecord) kind() uint8 { return 10 }
func (RemoteStateRecord) kind() uint8   { return 11 }
func (RemoteDisableRecord) kind() uint8 { return 12 }

// decoders makes an empty record of each kind; an array, so that decoding has no map order.
func decode(kind uint8, body []byte) (Record, error) {
	switch kind {
	case 1:
		return decodeAs[ClusterRecord](body)
	case 2:
		return decodeAs[BrokerRecord](body)
	case 3:
		return decodeAs[TopicRecord](body)
	case 4:
		return decodeAs[PartitionRecord](body)
	case 5:
		return decodeAs[TopicConfigRecord](body)
	case 6:
		return decodeAs[BrokerConfigRecord](body)
	case 7:
		return decodeAs[RemoveTopicRecord](body)
	case 8:
		return decodeAs[ForgetTopicRecord](body)
	case 9:
		return decodeAs[ProducerIDsRecord](body)
	case 10:
		return decodeAs[RemoteSegmentRecord](body)
	case 11:
		return decodeAs[RemoteStateRecord](body)
	case 12:
		return decodeAs[RemoteDisableRecord](body)
	}
	return nil, fmt.Errorf("metadata record of unknown kind %d: written by a newer version?", kind)
}

func decodeAs[R Record](body []byte) (Record, error) {
	var r R
	if err := cbor.Unmarshal(body, &r); err != nil {
		return nil, fmt.Errorf("metadata record %T: %w", r, err)
	}
	return r, nil
}

// envelope frames one record in a batch.
type envelope struct {
	_    struct{} `cbor:",toarray"`
	Kind uint8
	Body cbor.RawMessage
}

// Marshal encodes a batch of records, the unit that becomes visible at once.
func Marshal(records []Record) ([]byte, error) {
	batch := make([]envelope, len(records))
	for i, r := range records {
		body, err := cbor.Marshal(r)
		if err != nil {
			return nil, fmt.Errorf("encode %T: %w", r, err)
		}
		batch[i] = envelope{Kind: r.kind(), Body: body}
	}
	return cbor.Marshal(batch)
}

// Unmarshal decodes a batch. It refuses records of kinds that this version does not know.
func Unmarshal(b []byte) ([]Record, error) {
	var batch []envelope
	if err := cbor.Unmarshal(b, &batch); err != nil {
		return nil, fmt.Errorf("metadata batch: %w", err)
	}
	records := make([]Record, len(batch))
	for i, e := range batch {
		r, err := decode(e.Kind, e.Body)
		if err != nil {
			return nil, err
		}
		records[i] = r
	}
	return records, nil
}
