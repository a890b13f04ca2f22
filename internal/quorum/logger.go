package quorum

import (
	"bytes"
	"context"
	"log/slog"

	"github.com/hashicorp/go-hclog"
)

// newLogger sends raft's lines to slog: errors and warnings at their level, the rest as debug. quiet turns warnings into
// debug lines: a node that is alone, or no member yet, "loses" its leader at every start.
func newLogger(l *slog.Logger, quiet func() bool) hclog.Logger {
	level := hclog.Warn
	if l.Enabled(context.Background(), slog.LevelDebug) {
		level = hclog.Debug
	}
	return hclog.New(&hclog.LoggerOptions{Name: "raft", Level: level, Output: slogWriter{l, quiet}, DisableTime: true})
}

// aboutOthers says that a line is about nodes that do not answer or that hung up, which is their trouble before it is this one's.
func aboutOthers(line []byte) bool {
	for _, what := range []string{"failed to appendEntries to", "failed to heartbeat to", "failed to make requestVote RPC", "failed to make requestPreVote RPC",
		"failed to pipeline appendEntries", "failed to decode incoming command"} {
		if bytes.Contains(line, []byte(what)) {
			return true
		}
	}
	return false
}

type slogWriter struct {
	l     *slog.Logger
	quiet func() bool
}

// Write takes one line, "[LEVEL] raft: text".
func (w slogWriter) Write(line []byte) (int, error) {
	level, text := slog.LevelDebug, line
	if t, ok := bytes.CutPrefix(line, []byte("[ERROR]")); ok {
		if level, text = slog.LevelError, t; aboutOthers(t) {
			level = slog.LevelWarn
		}
	} else if t, ok := bytes.CutPrefix(line, []byte("[WARN]")); ok {
		text = t
		if !w.quiet() {
			level = slog.LevelWarn
		}
	}
	w.l.Log(context.Background(), level, "quorum: "+string(bytes.TrimSpace(text)))
	return len(line), nil
}
