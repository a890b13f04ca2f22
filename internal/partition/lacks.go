package partition

import (
	"github.com/varve-io/varve/internal/log"
	"github.com/varve-io/varve/internal/tier"
)

// Lacks reports whether a log that is to lead is without what the tier holds, which is committed: it ends before the tier does, or at the tier's
// end it was written in another leader epoch, and so has other records before that (an unclean election).
func Lacks(l *log.Log, remote tier.Segments) bool {
	end := remote.End()
	if end < 0 || end >= l.Offsets().End {
		return end >= 0
	}
	epochs := remote.Find(end).Epochs
	e, ok := l.EpochForOffset(end)
	return ok && len(epochs) > 0 && e != epochs[len(epochs)-1].Epoch
}
