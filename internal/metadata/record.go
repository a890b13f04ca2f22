// Package metadata is the truth of the cluster: the records that the controller writes, the immutable image that they
// fold into, and the codec of both. Every node folds the same records in the same order, so every node's image at an
// index is the same. The package is pure; images are safe for any number of readers.
package metadata

import (
	"fmt"
	"math"

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
	// LastBrokerEpoch is for snapshots: epochs of brokers that are gone are not given again.
	LastBrokerEpoch int64 `cbor:"2,keyasint,omitempty"`
}

// BrokerRecord registers a broker. A new incarnation (another process run) replaces the old one under a higher epoch.
type BrokerRecord struct {
	ID          int32      `cbor:"1,keyasint"`
	Epoch       int64      `cbor:"2,keyasint"`
	Incarnation tp.UUID    `cbor:"3,keyasint"`
	Listeners   []Endpoint `cbor:"4,keyasint"`
	Rack        string     `cbor:"5,keyasint,omitempty"`
	// PeerListener names the element of Listeners on which other nodes reach this one.
	PeerListener string `cbor:"6,keyasint,omitempty"`
	BrokerState
	// Directory is the id of the broker's data directory (KIP-858). Another one than before means an empty disk. Zero is not known.
	Directory tp.UUID `cbor:"9,keyasint,omitempty"`
}

// BrokerState is what changes about a broker while it runs.
type BrokerState struct {
	// Fenced brokers lead nothing, are in no ISR but as its last members, and are not shown to clients.
	Fenced bool `cbor:"7,keyasint,omitempty"`
	// ShuttingDown brokers have asked to leave: they are to lead nothing any more.
	ShuttingDown bool `cbor:"8,keyasint,omitempty"`
}

// Peer is where other nodes reach the broker.
func (b *BrokerRecord) Peer() (Endpoint, bool) {
	for _, e := range b.Listeners {
		if e.Name == b.PeerListener {
			return e, true
		}
	}
	return Endpoint{}, false
}

// BrokerStateRecord replaces the state of a registered broker, of exactly this epoch.
type BrokerStateRecord struct {
	ID    int32 `cbor:"1,keyasint"`
	Epoch int64 `cbor:"2,keyasint"`
	BrokerState
}

// UnregisterBrokerRecord forgets a broker.
type UnregisterBrokerRecord struct {
	ID int32 `cbor:"1,keyasint"`
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
	// Adding and Removing are the replicas that a reassignment brings in and takes out (KIP-455). Both are in Replicas
	// until it is complete, the new ones and those that stay first, in their new order.
	Adding   []int32 `cbor:"8,keyasint,omitempty"`
	Removing []int32 `cbor:"9,keyasint,omitempty"`
	// Unclean marks the record of an election from outside the ISR: what only the old ISR held is lost. The next record
	// of the partition clears it.
	Unclean bool `cbor:"10,keyasint,omitempty"`
	// Lost says that the only member of the ISR came back without its data, while other replicas may have theirs. There is no leader
	// then, and only an unclean election makes one (as where KIP-966 leaves the ISR empty).
	Lost bool `cbor:"11,keyasint,omitempty"`
}

// InSync is the ISR as clients are told it: a member that lost its data is in sync with nothing.
func (r *PartitionRecord) InSync() []int32 {
	if r.Lost {
		return []int32{}
	}
	return r.ISR
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

// GroupConfigRecord replaces the configs of one consumer group.
type GroupConfigRecord struct {
	Group   string            `cbor:"1,keyasint"`
	Configs map[string]string `cbor:"2,keyasint"`
}

// Keys of client quotas that count here (KIP-13).
const (
	ProducerByteRate = "producer_byte_rate"
	ConsumerByteRate = "consumer_byte_rate"
)

// QuotaName is a part of a quota's entity: the zero value says nothing, else it names one or the default of all that have none.
type QuotaName struct {
	Named   bool   `cbor:"1,keyasint,omitempty"`
	Default bool   `cbor:"2,keyasint,omitempty"`
	Name    string `cbor:"3,keyasint,omitempty"`
}

// QuotaEntity is whom a client quota is for (KIP-55): a user, a client id, or both.
type QuotaEntity struct {
	User     QuotaName `cbor:"1,keyasint"`
	ClientID QuotaName `cbor:"2,keyasint"`
}

// ClientQuotaRecord replaces the quotas of an entity, in bytes per second by key.
type ClientQuotaRecord struct {
	Entity QuotaEntity        `cbor:"1,keyasint"`
	Quotas map[string]float64 `cbor:"2,keyasint"`
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

func (ClusterRecord) kind() uint8          { return 1 }
func (BrokerRecord) kind() uint8           { return 2 }
func (TopicRecord) kind() uint8            { return 3 }
func (PartitionRecord) kind() uint8        { return 4 }
func (TopicConfigRecord) kind() uint8      { return 5 }
func (BrokerConfigRecord) kind() uint8     { return 6 }
func (RemoveTopicRecord) kind() uint8      { return 7 }
func (ForgetTopicRecord) kind() uint8      { return 8 }
func (ProducerIDsRecord) kind() uint8      { return 9 }
func (RemoteSegmentRecord) kind() uint8    { return 10 }
func (RemoteStateRecord) kind() uint8      { return 11 }
func (RemoteDisableRecord) kind() uint8    { return 12 }
func (BrokerStateRecord) kind() uint8      { return 13 }
func (UnregisterBrokerRecord) kind() uint8 { return 14 }
func (GroupConfigRecord) kind() uint8      { return 15 }
func (ClientQuotaRecord) kind() uint8      { return 16 }

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
	case 13:
		return decodeAs[BrokerStateRecord](body)
	case 14:
		return decodeAs[UnregisterBrokerRecord](body)
	case 15:
		return decodeAs[GroupConfigRecord](body)
	case 16:
		return decodeAs[ClientQuotaRecord](body)
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

// batches decodes batches of any length: a snapshot has a record per partition and remote segment, which are more than the
// codec's default limit of 131,072 elements. Lengths are checked against the bytes before anything is allocated.
var batches = func() cbor.DecMode {
	mode, err := cbor.DecOptions{MaxArrayElements: math.MaxInt32, MaxMapPairs: math.MaxInt32}.DecMode()
	if err != nil {
		panic("metadata: " + err.Error())
	}
	return mode
}()

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
	if err := batches.Unmarshal(b, &batch); err != nil {
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
