package peer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/fxamacker/cbor/v2"

	"github.com/varve-io/varve/internal/tp"
)

// Magic begins a connection between nodes. As a Kafka frame size it would be 1.4 GB, above any limit.
const Magic = "VRV1"

// handshakeMax bounds a hello or welcome, in bytes.
const handshakeMax = 64 << 10

// Identity is what a node says of itself. Fields may be added; unknown ones are skipped.
type Identity struct {
	ClusterID   string  `cbor:"1,keyasint,omitempty"` // empty: not known yet
	NodeID      int32   `cbor:"2,keyasint"`
	Incarnation tp.UUID `cbor:"3,keyasint"` // of this run of the process
	Address     string  `cbor:"4,keyasint"` // HOST:PORT on which other nodes reach it
	// Voters are those of controller.quorum.voters, each as ID@HOST:PORT, sorted. They matter only while the node is fresh.
	Voters []string `cbor:"5,keyasint,omitempty"`
	// Fresh nodes have no metadata: the quorum has either not been founded, or they have not heard of it.
	Fresh bool `cbor:"6,keyasint,omitempty"`
}

func (i Identity) String() string { return fmt.Sprintf("node %d at %s", i.NodeID, i.Address) }

// Hello is the dialer's half of the handshake.
type Hello struct {
	Identity
	Service string `cbor:"16,keyasint"`
	// To is the node that the dialer means to reach, -1 for any.
	To int32 `cbor:"17,keyasint"`
}

// Welcome is the acceptor's half. Refused says why there is no connection, in words, and is empty if there is one.
type Welcome struct {
	Identity
	Refused string `cbor:"16,keyasint,omitempty"`
}

// RefusedError says that one of two nodes does not want to talk to the other. Trying again helps only after somebody has
// changed something.
type RefusedError struct {
	Node    int32  // the other node
	Address string // where it was reached, or where it came from
	Reason  string // names both sides
	Cluster bool   // the two are of different clusters
	Voters  bool   // the two are to found one quorum, and disagree about its voters
}

func (e *RefusedError) Error() string { return e.Reason }

// errGarbage marks bytes that are no handshake.
var errGarbage = errors.New("not a handshake of a Varve node")

// readMessage reads a length and that many bytes of CBOR.
func readMessage(r io.Reader, into any) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	size := binary.BigEndian.Uint32(head[:])
	if size == 0 || size > handshakeMax {
		return fmt.Errorf("%w: it claims %d bytes", errGarbage, size)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(r, body); err != nil {
		return err
	}
	if err := cbor.Unmarshal(body, into); err != nil {
		return fmt.Errorf("%w: %w", errGarbage, err)
	}
	return nil
}

// message is the bytes that readMessage reads, behind a prefix.
func message(prefix string, m any) ([]byte, error) {
	body, err := cbor.Marshal(m)
	if err != nil {
		return nil, err
	}
	if len(body) > handshakeMax {
		return nil, fmt.Errorf("a handshake of %d bytes is too long, %d are allowed", len(body), handshakeMax)
	}
	out := binary.BigEndian.AppendUint32([]byte(prefix), uint32(len(body)))
	return append(out, body...), nil
}

// readHello reads the magic and a hello.
func readHello(r io.Reader) (Hello, error) {
	var magic [len(Magic)]byte
	if _, err := io.ReadFull(r, magic[:]); err != nil {
		return Hello{}, err
	}
	if string(magic[:]) != Magic {
		return Hello{}, errGarbage
	}
	var h Hello
	err := readMessage(r, &h)
	return h, err
}

// judge tells why self must not talk to other, nil if it may. Both sides of a handshake ask it.
func judge(self, other Identity) *RefusedError {
	refuse := func(reason string, args ...any) *RefusedError {
		return &RefusedError{Node: other.NodeID, Address: other.Address, Reason: fmt.Sprintf(reason, args...)}
	}
	switch {
	case self.ClusterID != "" && other.ClusterID != "" && self.ClusterID != other.ClusterID:
		e := refuse("%s belongs to cluster %s, %s to cluster %s", self, self.ClusterID, other, other.ClusterID)
		e.Cluster = true
		return e
	case self.NodeID == other.NodeID && self.Incarnation != other.Incarnation:
		return refuse("node id %d is used twice: here (%s) and at %s", self.NodeID, self.Address, other.Address)
	case self.Fresh && other.Fresh && len(self.Voters) > 0 && len(other.Voters) > 0 && !slices.Equal(self.Voters, other.Voters):
		e := refuse("voters differ: %s has controller.quorum.voters=%s, %s has %s", self, strings.Join(self.Voters, ","), other, strings.Join(other.Voters, ","))
		e.Voters = true
		return e
	}
	return nil
}

// judgeTo tells whether reached is the node that was meant.
func judgeTo(reached Identity, to int32, address string) *RefusedError {
	if to < 0 || to == reached.NodeID {
		return nil
	}
	return &RefusedError{Node: reached.NodeID, Address: address, Reason: fmt.Sprintf("node %d was expected at %s, but %s answers there", to, address, reached)}
}
