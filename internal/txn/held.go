package txn

// Held is a transactional id as its coordinator holds it: the state that counts, and whether a write may have replaced it. Its owner
// carries out one Step after the other. The zero value holds nothing.
type Held struct {
	Transaction
	doubt bool
}

// Do takes a request to the state that counts. While nobody knows which one does, the client tries again: ErrConcurrent.
func (h *Held) Do(request func(Transaction) Step) (Step, error) {
	if h.doubt {
		return Step{}, ErrConcurrent
	}
	return request(h.Transaction), nil
}

// Doubted follows a write that is not committed in its time: it may be yet. Only Written ends that, or the next coordinator, which
// reads what counts.
func (h *Held) Doubted() { h.doubt = true }

// Doubtful says whether it is not known which state counts.
func (h *Held) Doubtful() bool { return h.doubt }

// Written makes the state of a Step count, since its record is durable.
func (h *Held) Written(s Step) { h.Transaction, h.doubt = s.Next, false }

// States are the transactional ids that a partition of __transaction_state holds, by the records of it that were taken in order.
type States map[string]Transaction

// Take takes the next record. One of a kind that we do not know changes nothing, nor does one that cannot be read, which is an error.
func (s States) Take(key, value []byte) error {
	e, ok, err := ParseRecord(key, value)
	switch {
	case err != nil:
		return err
	case !ok:
	case e.Transaction == nil:
		delete(s, e.ID)
	default:
		s[e.ID] = *e.Transaction
	}
	return nil
}
