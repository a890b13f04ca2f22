package sim

import "fmt"

// Bug is a fault of the cluster's own making, planted between production cores to see that the checks would find it.
type Bug int

// The bugs.
const (
	None              Bug = iota
	NoDivergence          // a leader is not told the epoch that a follower's log ends in
	UploadUncommitted     // what is above the high watermark is uploaded
	DeleteEarly           // objects go before anybody has recorded that they will
	RetainUntiered        // local retention believes that all is in the tier
	ForgetProducers       // a follower that starts from the tier gets no producers
	ForgetEpochs          // and no lineage
	FakeFollowed          // a leader takes a fetch for the promise to have everything
	NoCheckpoint          // recovery points are not written after a log was cut
	KeepInISR             // a broker that comes back with another disk stays in sync
	NoRestore             // a leader behind the tier gives its offsets out again
	AckEarly              // a write is acknowledged when the leader has it
	LeaveObjects          // records of deleted segments go, their objects stay
	SameDisk              // a broker does not say that its disk is another than before
	MarkEarly             // markers are sent before the decision is committed
	CompleteEarly         // a transaction is complete before all markers are written
	NoVerification        // a partition does not ask whether a batch's transaction has it
	TrustOpen             // a batch is appended though its transaction has ended since it was looked at
	AnyCoordinator        // markers of an older coordinator are taken
	ApplyAborted          // offsets of an aborted transaction count
	ReadUndecided         // read_committed is answered up to the high watermark
	TrustRefusals         // a marker that is refused since it is there counts before it is committed
	GiveUpDoubt           // a coordinator that could not lead for a moment never learns what became of its writes
	ForgetDecisions       // a new coordinator does not go on with what was decided
)

// String names the bug.
func (b Bug) String() string {
	names := []string{"none", "no divergence", "upload uncommitted", "delete early", "retain untiered", "forget producers", "forget epochs", "fake followed",
		"no checkpoint", "keep in ISR", "no restore", "ack early", "leave objects", "same disk", "mark early",
		"complete early", "no verification", "trust open", "any coordinator", "apply aborted", "read undecided", "trust refusals", "give up doubt", "forget decisions"}
	if b < 0 || int(b) >= len(names) {
		return fmt.Sprint(int(b))
	}
	return names[b]
}
