package direct

import (
	"slices"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// aborted are the aborted transactions of a location that have not ended yet, in the broker's order. An answer about a
// part of the location must not name one that ended in front of it: the client would take a later transaction of the same
// producer for it.
type aborted []kmsg.FetchResponseTopicPartitionAbortedTransaction

// upTo are those that begin at or below an offset; never nil, which would mean read_uncommitted.
func (a aborted) upTo(last int64) []kmsg.FetchResponseTopicPartitionAbortedTransaction {
	out := make([]kmsg.FetchResponseTopicPartitionAbortedTransaction, 0, len(a))
	for _, x := range a {
		if x.FirstOffset <= last {
			out = append(out, x)
		}
	}
	return out
}

// ended forgets the transaction that an abort marker of a producer at an offset ends.
func (a aborted) ended(producer, offset int64) aborted {
	return slices.DeleteFunc(a, func(x kmsg.FetchResponseTopicPartitionAbortedTransaction) bool {
		return x.ProducerID == producer && x.FirstOffset <= offset
	})
}
