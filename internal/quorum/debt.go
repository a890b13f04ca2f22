package quorum

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
)

// debt keeps a node whose metadata log is empty from voting, and from standing for election, before it has caught up.
//
// A voter that lost its disk may have acknowledged entries which it no longer has. Whoever counts its vote as that of a
// member that holds them could elect a leader without them, and lose what was committed. So it owes: everything up to the
// first position at which a leader speaks to it. That position is behind all that its former self can have acknowledged,
// because a leader goes on with a member where that member was, and a new leader goes on at the end of its log. The debt is
// paid when that position has been committed and applied here. A file keeps it across restarts, written before raft starts.
type debt struct {
	path string

	mu    sync.Mutex
	owing bool
	known bool   // upTo has been learned
	upTo  uint64 // to be applied
}

const unknownDebt = "unknown"

// openDebt reads the debt of dir; an empty node without one takes it on.
func openDebt(dir string, empty bool) (*debt, error) {
	d := &debt{path: filepath.Join(dir, "catching-up")}
	b, err := os.ReadFile(d.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if !empty {
			return d, nil
		}
		d.owing = true
		return d, d.write(unknownDebt)
	case err != nil:
		return nil, err
	}
	d.owing = true
	// An empty log starts anew whatever the file says.
	if text := strings.TrimSpace(string(b)); text != unknownDebt && !empty {
		if d.upTo, err = strconv.ParseUint(text, 10, 64); err != nil {
			return nil, fmt.Errorf("%s: %w", d.path, err)
		}
		d.known = true
	}
	return d, nil
}

// write makes the file durable before it returns.
func (d *debt) write(text string) error {
	next := d.path + ".tmp"
	f, err := os.Create(next)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text + "\n")
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(next, d.path)
	}
	if err != nil {
		return err
	}
	return syncDir(filepath.Dir(d.path))
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// learn fixes the debt at the first word of a leader. An error means that it could not be kept: the leader's message must
// not be acted on.
func (d *debt) learn(upTo uint64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.owing || d.known {
		return nil
	}
	if err := d.write(strconv.FormatUint(upTo, 10)); err != nil {
		return fmt.Errorf("keep what this voter has to catch up with: %w", err)
	}
	d.known, d.upTo = true, upTo
	return nil
}

// owes reports whether the node must not vote, having applied the log up to applied.
func (d *debt) owes(applied uint64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.owing && d.known && applied >= d.upTo {
		d.forget()
	}
	return d.owing
}

// forgive ends the debt of a node that founds the quorum: it cannot have acknowledged anything.
func (d *debt) forgive() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.owing {
		d.forget()
	}
}

// forget drops the debt. If the file stays, a restart finds a debt that is paid at once.
func (d *debt) forget() {
	d.owing = false
	_ = os.Remove(d.path)
}
