package controller

import (
	"fmt"
	"reflect"

	"github.com/fxamacker/cbor/v2"

	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/tier"
	"github.com/varve-io/varve/internal/tp"
)

// Command is a request to the active controller. It is data, so that any node can send it to the one that leads the
// quorum; Run is pure and sees the newest image. Records are to be made durable in one batch; no records means that
// nothing has to change. A refusal is an *Error.
type Command interface {
	Run(img *metadata.Image, env Env) (records []metadata.Record, reply any, err error)
	// reply returns a pointer to the zero value of what Run answers, nil if it answers nothing.
	reply() any
}

// The commands. Fields are exported for their codec.
type (
	// BootstrapCommand names a new cluster; ID empty draws a name.
	BootstrapCommand struct{ ID string }

	// RegisterCommand announces a run of a broker; it begins fenced. Reply: Registered.
	RegisterCommand struct{ Broker metadata.BrokerRecord }

	// HeartbeatCommand says that a run of a broker lives. Reply: HeartbeatReply. Refused with ErrFenced if the epoch is
	// not the broker's.
	HeartbeatCommand struct {
		Broker  int32
		Epoch   int64
		Applied uint64         // index of the image that its partitions live by
		Ready   bool           // it serves, and wants to be unfenced
		Leave   bool           // it wants to stop: move its leaderships away
		Thin    []PartitionRef // what it holds too little of to be preferred as leader (KIP-1303); for Sessions, Run ignores it
	}

	// TickCommand is what the active controller gives itself from time to time: fences who is silent, fills leaderless
	// partitions, goes on with reassignments and drains, and elects preferred leaders where that is due.
	TickCommand struct {
		Silent    []int32 // brokers whose session has expired
		Preferred bool    // leader.imbalance.check.interval.seconds is over
	}

	// AlterPartitionsCommand proposes ISRs, by the leader of the partitions. Reply: AlterPartitionsReply.
	AlterPartitionsCommand struct {
		Broker     int32
		Epoch      int64
		Partitions []ISRChange
	}

	// ElectLeadersCommand elects the preferred or, with Unclean, any living leader. Nil Partitions are all. Reply: ElectLeadersReply.
	ElectLeadersCommand struct {
		Unclean    bool
		Partitions []PartitionRef
	}

	// ReassignCommand begins or, with nil Replicas, cancels reassignments (KIP-455). Reply: ReassignReply.
	ReassignCommand struct{ Partitions []Reassignment }

	// UnregisterCommand forgets a broker that is fenced.
	UnregisterCommand struct {
		Broker int32
		Force  bool // even if it is in replica lists
	}

	CreateTopicsCommand struct { // Reply: []CreatedTopic
		Topics       []NewTopic
		ValidateOnly bool
	}
	DeleteTopicsCommand     struct{ IDs []tp.UUID } // Reply: []*Error by position
	CreatePartitionsCommand struct {                // Reply: []*Error by position
		Topics       []NewPartitions
		ValidateOnly bool
	}
	AlterTopicCommand struct {
		Topic        string
		Changes      []Change
		ValidateOnly bool
	}
	ReplaceTopicCommand struct { // the old AlterConfigs
		Topic        string
		Configs      map[string]string
		ValidateOnly bool
	}
	AlterBrokerCommand struct { // ClusterWide for all
		Broker       int32
		Changes      []Change
		ValidateOnly bool
	}
	ReplaceBrokerCommand struct {
		Broker       int32
		Configs      map[string]string
		ValidateOnly bool
	}

	AlterGroupCommand struct {
		Group        string
		Changes      []Change
		ValidateOnly bool
	}
	ReplaceGroupCommand struct {
		Group        string
		Configs      map[string]string
		ValidateOnly bool
	}

	// AlterQuotasCommand changes client quotas. Reply: []*Error, nil for those that were changed, by position.
	AlterQuotasCommand struct {
		Changes      []QuotaChange
		ValidateOnly bool
	}

	// ProducerIDsCommand reserves a block of ProducerIDBlock ids. Reply: int64, the first.
	ProducerIDsCommand struct{}

	StartCopyCommand  struct{ Segment tier.Segment }
	FinishCopyCommand struct {
		Segment  tier.Segment
		Finished Finished
	}
	StartDeleteCommand struct {
		Topic         tp.UUID
		Index         int32
		Leader, Epoch int32 // the leader that asks, and its leader epoch
		Segments      []tp.UUID
		LogStart      int64
	}
	FinishDeleteCommand struct {
		Topic    tp.UUID
		Index    int32
		Segments []tp.UUID
	}
	DisableRemoteCommand struct {
		Topic         tp.UUID
		Index         int32
		Leader, Epoch int32
		LogStart      int64
	}
)

// PartitionRef names a partition by its topic's id.
type PartitionRef struct {
	Topic tp.UUID
	Index int32
}

// Registered answers RegisterCommand.
type Registered struct{ Epoch int64 }

// HeartbeatReply answers HeartbeatCommand.
type HeartbeatReply struct {
	Fenced bool
	// Leave: it asked to leave and leads nothing any more (or nobody else could): it may stop.
	Leave bool
}

// ISRChange is an ISR that a leader proposes. Epochs are those of the members' runs, by position, as the leader learned
// them from their fetches (KIP-903).
type ISRChange struct {
	PartitionRef
	LeaderEpoch    int32
	PartitionEpoch int32
	ISR            []int32
	Epochs         []int64
}

// AlterPartitionsReply has an *Error or nil per change, by position. A stale leader epoch is ErrFenced, a stale partition
// epoch ErrStalePartitionEpoch, a member that must not join ErrIneligibleReplica.
type AlterPartitionsReply struct{ Errors []*Error }

// ElectLeadersReply has a row per partition that was asked for, or for nil Partitions of those where something was done or failed.
type ElectLeadersReply struct {
	Partitions []PartitionRef
	Errors     []*Error // ErrElectionNotNeeded, ErrPreferredLeaderNotAvailable, ErrEligibleLeadersNotAvailable, ErrUnknownTopic
}

// Reassignment is what AlterPartitionReassignments asks of one partition.
type Reassignment struct {
	Topic    string
	Index    int32
	Replicas []int32 // nil cancels
}

// ReassignReply has an *Error or nil per partition, by position.
type ReassignReply struct{ Errors []*Error }

// commands lists every command; its position is not part of the codec, its type name is.
var commands = []Command{
	BootstrapCommand{}, RegisterCommand{}, HeartbeatCommand{}, TickCommand{}, AlterPartitionsCommand{}, ElectLeadersCommand{}, ReassignCommand{},
	UnregisterCommand{}, CreateTopicsCommand{}, DeleteTopicsCommand{}, CreatePartitionsCommand{}, AlterTopicCommand{}, ReplaceTopicCommand{},
	AlterBrokerCommand{}, ReplaceBrokerCommand{}, AlterGroupCommand{}, ReplaceGroupCommand{}, AlterQuotasCommand{}, ProducerIDsCommand{}, StartCopyCommand{}, FinishCopyCommand{}, StartDeleteCommand{},
	FinishDeleteCommand{}, DisableRemoteCommand{},
}

// envelope frames a command.
type envelope struct {
	_    struct{} `cbor:",toarray"`
	Name string
	Body cbor.RawMessage
}

// MarshalCommand encodes a command.
func MarshalCommand(c Command) ([]byte, error) {
	body, err := cbor.Marshal(c)
	if err != nil {
		return nil, fmt.Errorf("encode %T: %w", c, err)
	}
	return cbor.Marshal(envelope{Name: reflect.TypeOf(c).Name(), Body: body})
}

// UnmarshalCommand decodes a command.
func UnmarshalCommand(b []byte) (Command, error) {
	var e envelope
	if err := cbor.Unmarshal(b, &e); err != nil {
		return nil, fmt.Errorf("command: %w", err)
	}
	for _, c := range commands {
		if t := reflect.TypeOf(c); t.Name() == e.Name {
			v := reflect.New(t)
			if err := cbor.Unmarshal(e.Body, v.Interface()); err != nil {
				return nil, fmt.Errorf("command %s: %w", e.Name, err)
			}
			return v.Elem().Interface().(Command), nil
		}
	}
	return nil, fmt.Errorf("command %q is unknown here: was it sent by a newer version?", e.Name)
}

// MarshalReply encodes what Run answered; UnmarshalReply decodes it for the command that was sent.
func MarshalReply(reply any) ([]byte, error) { return cbor.Marshal(reply) }

// UnmarshalReply is nil for a command that answers nothing.
func UnmarshalReply(c Command, b []byte) (any, error) {
	r := c.reply()
	if r == nil {
		return nil, nil
	}
	if err := cbor.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("reply of %T: %w", c, err)
	}
	return reflect.ValueOf(r).Elem().Interface(), nil
}
