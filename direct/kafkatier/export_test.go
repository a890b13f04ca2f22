package kafkatier

import "time"

// Sweep forgets what nobody asked for before a time.
func (l *Locator) Sweep(now time.Time) { l.sweep(now) }
