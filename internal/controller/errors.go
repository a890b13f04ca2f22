package controller

import (
	"errors"
	"fmt"

	"github.com/fxamacker/cbor/v2"
)

// Kinds of refusal. Each stands for one Kafka error code; the text for the user comes from Error.
var (
	ErrInvalidTopic                = errors.New("invalid topic")
	ErrTopicExists                 = errors.New("topic already exists")
	ErrUnknownTopic                = errors.New("unknown topic or partition")
	ErrUnknownTopicID              = errors.New("unknown topic id")
	ErrInvalidPartitions           = errors.New("invalid partitions")
	ErrInvalidReplicationFactor    = errors.New("invalid replication factor")
	ErrInvalidAssignment           = errors.New("invalid replica assignment")
	ErrInvalidConfig               = errors.New("invalid config")
	ErrInvalidRequest              = errors.New("invalid request")
	ErrFenced                      = errors.New("fenced")
	ErrDuplicateBroker             = errors.New("duplicate broker registration")
	ErrTopicDeletionDisabled       = errors.New("topic deletion is disabled")
	ErrIneligibleReplica           = errors.New("ineligible replica")                                   // INELIGIBLE_REPLICA
	ErrStalePartitionEpoch         = errors.New("stale partition epoch")                                // INVALID_UPDATE_VERSION
	ErrElectionNotNeeded           = errors.New("election not needed")                                  // ELECTION_NOT_NEEDED
	ErrPreferredLeaderNotAvailable = errors.New("preferred leader not available")                       // PREFERRED_LEADER_NOT_AVAILABLE
	ErrEligibleLeadersNotAvailable = errors.New("eligible leaders not available")                       // ELIGIBLE_LEADERS_NOT_AVAILABLE
	ErrNoReassignment              = errors.New("no reassignment in progress")                          // NO_REASSIGNMENT_IN_PROGRESS
	ErrUnknownBroker               = errors.New("unknown broker")                                       // BROKER_ID_NOT_REGISTERED
	ErrBrokersInUse                = errors.New("broker is in replica lists")                           // INVALID_REQUEST on the wire
	ErrUnknown                     = errors.New("refused for a reason that this version does not know") // UNKNOWN_SERVER_ERROR
)

// kinds gives the kinds the names by which they cross the network. Names are never reused.
var kinds = [...]struct {
	name string
	kind error
}{
	{"InvalidTopic", ErrInvalidTopic}, {"TopicExists", ErrTopicExists}, {"UnknownTopic", ErrUnknownTopic}, {"UnknownTopicID", ErrUnknownTopicID},
	{"InvalidPartitions", ErrInvalidPartitions}, {"InvalidReplicationFactor", ErrInvalidReplicationFactor}, {"InvalidAssignment", ErrInvalidAssignment},
	{"InvalidConfig", ErrInvalidConfig}, {"InvalidRequest", ErrInvalidRequest}, {"Fenced", ErrFenced}, {"DuplicateBroker", ErrDuplicateBroker},
	{"TopicDeletionDisabled", ErrTopicDeletionDisabled}, {"IneligibleReplica", ErrIneligibleReplica}, {"StalePartitionEpoch", ErrStalePartitionEpoch},
	{"ElectionNotNeeded", ErrElectionNotNeeded}, {"PreferredLeaderNotAvailable", ErrPreferredLeaderNotAvailable},
	{"EligibleLeadersNotAvailable", ErrEligibleLeadersNotAvailable}, {"NoReassignment", ErrNoReassignment}, {"UnknownBroker", ErrUnknownBroker},
	{"BrokersInUse", ErrBrokersInUse},
}

// Error is a refusal: Kind says which, Message is for the user, in Kafka's words where Kafka has them. It is encodable as
// CBOR: of the kind its name, so that errors.Is works on the other side of the network too.
type Error struct {
	Kind    error
	Message string
}

// Error is the message; that of a nil *Error is empty.
func (e *Error) Error() string {
	if e == nil {
		return ""
	}
	return e.Message
}

// Unwrap makes errors.Is find the kind.
func (e *Error) Unwrap() error {
	if e == nil {
		return nil
	}
	return e.Kind
}

// OrNil is e as an error, a nil pointer as a nil error.
func (e *Error) OrNil() error {
	if e == nil {
		return nil
	}
	return e
}

type encodedError struct {
	_       struct{} `cbor:",toarray"`
	Kind    string
	Message string
}

// MarshalCBOR encodes the kind's name and the message.
func (e *Error) MarshalCBOR() ([]byte, error) {
	out := encodedError{Message: e.Message}
	for _, k := range kinds {
		if k.kind == e.Kind {
			out.Kind = k.name
		}
	}
	return cbor.Marshal(out)
}

// UnmarshalCBOR decodes an error; a kind of another version becomes ErrUnknown.
func (e *Error) UnmarshalCBOR(b []byte) error {
	var in encodedError
	if err := cbor.Unmarshal(b, &in); err != nil {
		return fmt.Errorf("error of a command: %w", err)
	}
	e.Kind, e.Message = ErrUnknown, in.Message
	for _, k := range kinds {
		if k.name == in.Kind {
			e.Kind = k.kind
		}
	}
	return nil
}

func refuse(kind error, format string, args ...any) *Error {
	return &Error{kind, fmt.Sprintf(format, args...)}
}

// row tells a refusal, which belongs in an answer's row, from an error that ends the whole command.
func row(err error) (*Error, error) {
	var e *Error
	if err == nil || errors.As(err, &e) {
		return e, nil
	}
	return nil, err
}
