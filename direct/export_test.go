package direct

// Awaited is the answer that the writer of a Transport's only connection waits for, or waited for last: another value for each.
func (t *Transport) Awaited() any {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.conns {
		if e := c.current.Load(); e != nil {
			return e
		}
	}
	return nil
}
