package segment

import (
	"encoding/binary"
	"fmt"

	"github.com/varve-io/varve/internal/producerstate"
)

// TxnEntrySize is the size of an entry of a transaction index in bytes.
const TxnEntrySize = 34

// AppendTxn adds an aborted transaction to a transaction index:
//
//	int16 version 0 · int64 producer id · int64 first offset · int64 last offset · int64 last stable offset
func AppendTxn(b []byte, t producerstate.AbortedTxn) []byte {
	b = append(b, 0, 0)
	for _, v := range []int64{t.ProducerID, t.FirstOffset, t.LastOffset, t.LastStableOffset} {
		b = binary.BigEndian.AppendUint64(b, uint64(v))
	}
	return b
}

func decodeTxn(b []byte) producerstate.AbortedTxn {
	be := binary.BigEndian
	return producerstate.AbortedTxn{ProducerID: int64(be.Uint64(b[2:])), FirstOffset: int64(be.Uint64(b[10:])),
		LastOffset: int64(be.Uint64(b[18:])), LastStableOffset: int64(be.Uint64(b[26:]))}
}

// ParseTxnIndex reads a transaction index. A partial entry, another version, and last offsets that do not
// rise are ErrIndex.
func ParseTxnIndex(b []byte) ([]producerstate.AbortedTxn, error) {
	if len(b)%TxnEntrySize != 0 {
		return nil, fmt.Errorf("%w: %d bytes of transactions", ErrIndex, len(b))
	}
	out := make([]producerstate.AbortedTxn, 0, len(b)/TxnEntrySize)
	for ; len(b) > 0; b = b[TxnEntrySize:] {
		t := decodeTxn(b)
		n := len(out)
		if b[0] != 0 || b[1] != 0 || t.FirstOffset > t.LastOffset || n > 0 && out[n-1].LastOffset >= t.LastOffset {
			return nil, fmt.Errorf("%w: aborted transaction %d: %+v", ErrIndex, n, t)
		}
		out = append(out, t)
	}
	return out, nil
}

// SearchTxns finds the aborted transactions with records in [from, upTo), in order of their markers, and adds
// them to dst. complete says that no later segment can hold another.
func SearchTxns(dst []producerstate.AbortedTxn, index []byte, from, upTo int64) (out []producerstate.AbortedTxn, complete bool, err error) {
	all, err := ParseTxnIndex(index)
	if err != nil {
		return dst, false, err
	}
	for _, t := range all {
		if t.LastOffset >= from && t.FirstOffset < upTo {
			dst = append(dst, t)
		}
		if t.LastStableOffset >= upTo {
			return dst, true, nil
		}
	}
	return dst, false, nil
}
