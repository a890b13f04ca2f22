package direct

import "time"

// breaker lets direct reads rest after failures in a row, for a time that grows with each attempt that fails again. It is
// pure; its owner has a mutex.
type breaker struct {
	after    int
	min, max time.Duration

	failures int
	rest     time.Duration
	until    time.Time
}

func (b *breaker) resting(now time.Time) bool { return now.Before(b.until) }

// failed counts a failure and reports whether a rest begins with it. Failures of reads that were begun before the rest
// do not make it longer.
func (b *breaker) failed(now time.Time) bool {
	if b.resting(now) {
		return false
	}
	b.failures++
	if b.failures < b.after {
		return false
	}
	b.rest = min(max(2*b.rest, b.min), b.max)
	b.until = now.Add(b.rest)
	return true
}

// succeeded ends a row of failures.
func (b *breaker) succeeded(now time.Time) {
	if !b.resting(now) {
		b.failures, b.rest = 0, 0
	}
}
