package kafkaapi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/varve-io/varve/internal/consumergroup"
	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/coordinator"
	"github.com/varve-io/varve/internal/fetch"
	"github.com/varve-io/varve/internal/group"
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/partition"
	"github.com/varve-io/varve/internal/producerstate"
	"github.com/varve-io/varve/internal/quorum"
	"github.com/varve-io/varve/internal/recordbatch"
	"github.com/varve-io/varve/internal/tier/reader"
	"github.com/varve-io/varve/internal/txn"
)

// Refusals that arise here.
var (
	errUnknownTopic   = errors.New("unknown topic or partition")
	errUnknownTopicID = errors.New("unknown topic id")
	errInvalidRequest = errors.New("invalid request")
	errUnsupported    = errors.New("unsupported version")
	errTimedOut       = errors.New("request timed out")
	errRequiredAcks   = errors.New("invalid required acks")
	errNoTxnID        = errors.New("transactional records need a transactional id")
	errInvalidTopic   = errors.New("invalid topic")
	errClusterID      = errors.New("inconsistent cluster id")
)

// codes is the one translation from errors to Kafka's codes; the first match wins.
var codes = []struct {
	err  error
	code *kerr.Error
}{
	{errUnknownTopic, kerr.UnknownTopicOrPartition},
	{errUnknownTopicID, kerr.UnknownTopicID},
	{errInvalidRequest, kerr.InvalidRequest},
	{errUnsupported, kerr.UnsupportedVersion},
	{errTimedOut, kerr.RequestTimedOut},
	{errRequiredAcks, kerr.InvalidRequiredAcks},
	{errNoTxnID, kerr.TransactionalIDAuthorizationFailed},
	{errInvalidTopic, kerr.InvalidTopicException},
	{errClusterID, kerr.InconsistentClusterID},

	{recordbatch.ErrUnsupportedMagic, kerr.UnsupportedForMessageFormat},
	{recordbatch.ErrUnsupportedCompression, kerr.UnsupportedCompressionType},
	{recordbatch.ErrTooLarge, kerr.MessageTooLarge},
	{recordbatch.ErrInvalidTimestamp, kerr.InvalidTimestamp},
	{recordbatch.ErrInvalidRecord, kerr.InvalidRecord},
	{recordbatch.ErrCorrupt, kerr.CorruptMessage},
	{recordbatch.ErrShort, kerr.CorruptMessage},

	{producerstate.ErrOutOfOrderSequence, kerr.OutOfOrderSequenceNumber},
	{producerstate.ErrInvalidProducerEpoch, kerr.InvalidProducerEpoch},
	{producerstate.ErrInvalidTxnState, kerr.InvalidTxnState},
	{producerstate.ErrCoordinatorFenced, kerr.TransactionCoordinatorFenced},

	{partition.ErrNotLeader, kerr.NotLeaderForPartition},
	{partition.ErrFencedEpoch, kerr.FencedLeaderEpoch},
	{partition.ErrUnknownEpoch, kerr.UnknownLeaderEpoch},
	{partition.ErrNotEnoughReplicas, kerr.NotEnoughReplicas},
	{partition.ErrNotEnoughAfterAppend, kerr.NotEnoughReplicasAfterAppend},
	{partition.ErrOffline, kerr.KafkaStorageError},
	{log.ErrLogDead, kerr.KafkaStorageError},
	{log.ErrExceedsSegment, kerr.RecordListTooLarge},
	{log.ErrClosed, kerr.NotLeaderForPartition},
	{log.ErrOffsetOutOfRange, kerr.OffsetOutOfRange},
	{reader.ErrCorrupt, kerr.CorruptMessage},
	{fetch.ErrOffsetOutOfRange, kerr.OffsetOutOfRange},
	{fetch.ErrSessionNotFound, kerr.FetchSessionIDNotFound},
	{fetch.ErrSessionEpoch, kerr.InvalidFetchSessionEpoch},
	{fetch.ErrSessionTopicID, kerr.FetchSessionTopicIDError},
	{fetch.ErrMovedToTier, kerr.OffsetMovedToTieredStorage},
	{fetch.ErrNotAvailable, kerr.OffsetNotAvailable},
	{fetch.ErrReplicaUnavailable, kerr.ReplicaNotAvailable},

	{controller.ErrInvalidTopic, kerr.InvalidTopicException},
	{controller.ErrTopicExists, kerr.TopicAlreadyExists},
	{controller.ErrUnknownTopic, kerr.UnknownTopicOrPartition},
	{controller.ErrUnknownTopicID, kerr.UnknownTopicID},
	{controller.ErrInvalidPartitions, kerr.InvalidPartitions},
	{controller.ErrInvalidReplicationFactor, kerr.InvalidReplicationFactor},
	{controller.ErrInvalidAssignment, kerr.InvalidReplicaAssignment},
	{controller.ErrInvalidConfig, kerr.InvalidConfig},
	{controller.ErrInvalidRequest, kerr.InvalidRequest},
	{controller.ErrFenced, kerr.StaleBrokerEpoch},
	{controller.ErrTopicDeletionDisabled, kerr.TopicDeletionDisabled},
	{controller.ErrDuplicateBroker, kerr.DuplicateBrokerRegistration},
	{controller.ErrElectionNotNeeded, kerr.ElectionNotNeeded},
	{controller.ErrPreferredLeaderNotAvailable, kerr.PreferredLeaderNotAvailable},
	{controller.ErrEligibleLeadersNotAvailable, kerr.EligibleLeadersNotAvailable},
	{controller.ErrNoReassignment, kerr.NoReassignmentInProgress},
	{controller.ErrUnknownBroker, kerr.BrokerIDNotRegistered},
	{controller.ErrBrokersInUse, kerr.InvalidRequest},
	{quorum.ErrNotController, kerr.NotController},

	{group.ErrInvalidGroupID, kerr.InvalidGroupID},
	{group.ErrInvalidSession, kerr.InvalidSessionTimeout},
	{group.ErrInconsistentProtocol, kerr.InconsistentGroupProtocol},
	{group.ErrUnknownMember, kerr.UnknownMemberID},
	{group.ErrMemberIDRequired, kerr.MemberIDRequired},
	{group.ErrFencedInstance, kerr.FencedInstanceID},
	{group.ErrIllegalGeneration, kerr.IllegalGeneration},
	{group.ErrRebalanceInProgress, kerr.RebalanceInProgress},
	{group.ErrGroupFull, kerr.GroupMaxSizeReached},
	{group.ErrNotFound, kerr.GroupIDNotFound},
	{group.ErrNotEmpty, kerr.NonEmptyGroup},
	{group.ErrSubscribed, kerr.GroupSubscribedToTopic},
	{group.ErrNotPersisted, kerr.UnknownServerError},
	{consumergroup.ErrFencedMemberEpoch, kerr.FencedMemberEpoch},
	{consumergroup.ErrUnreleasedInstance, kerr.UnreleasedInstanceID},
	{consumergroup.ErrStaleMemberEpoch, kerr.StaleMemberEpoch},
	{consumergroup.ErrUnsupportedAssignor, kerr.UnsupportedAssignor},
	{consumergroup.ErrInvalidRegex, kerr.InvalidRegularExpression},
	{consumergroup.ErrInvalidRequest, kerr.InvalidRequest},
	{consumergroup.ErrUnsupportedByProtocol, kerr.UnsupportedVersion},
	{coordinator.ErrMetadataTooLarge, kerr.OffsetMetadataTooLarge},
	{coordinator.ErrNotCoordinator, kerr.NotCoordinator},
	{coordinator.ErrLoading, kerr.CoordinatorLoadInProgress},
	{coordinator.ErrUnavailable, kerr.CoordinatorNotAvailable},

	{txn.ErrInvalidState, kerr.InvalidTxnState},
	{txn.ErrInvalidMapping, kerr.InvalidProducerIDMapping},
	{txn.ErrInvalidTimeout, kerr.InvalidTransactionTimeout},
	{txn.ErrConcurrent, kerr.ConcurrentTransactions},
	{txn.ErrProducerFenced, kerr.ProducerFenced},
	{txn.ErrNotFound, kerr.TransactionalIDNotFound},
	{txn.ErrAbortable, kerr.TransactionAbortable},
	{errNotAttempted, kerr.OperationNotAttempted},

	{syscall.ENOSPC, kerr.KafkaStorageError},
	{syscall.EIO, kerr.KafkaStorageError},

	{context.DeadlineExceeded, kerr.RequestTimedOut},
	{context.Canceled, kerr.RequestTimedOut},
}

// code is Kafka's code of an error: 0 for nil, -1 for what the table does not know.
func code(err error) int16 {
	if err == nil {
		return 0
	}
	for _, row := range codes {
		if errors.Is(err, row.err) {
			return row.code.Code
		}
	}
	var coded interface{ Code() int16 }
	if errors.As(err, &coded) {
		return coded.Code()
	}
	// What the disk says, a full one included, is a storage error: clients try again.
	var path *fs.PathError
	if errors.As(err, &path) {
		return kerr.KafkaStorageError.Code
	}
	return kerr.UnknownServerError.Code
}

// refuse is an error of the table with a text of its own, Kafka's where Kafka has one.
func refuse(kind error, format string, args ...any) error {
	return &controller.Error{Kind: kind, Message: fmt.Sprintf(format, args...)}
}

// message is the text beside a code, nil without an error.
func message(err error) *string {
	if err == nil {
		return nil
	}
	text := err.Error()
	return &text
}

// errorName is the name of an error's code, for metrics.
func errorName(err error) string {
	if e, ok := kerr.ErrorForCode(code(err)).(*kerr.Error); ok {
		return e.Message
	}
	return "NONE"
}
