package fetcherplugin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os/exec"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"

	"github.com/varve-io/varve/direct"
)

// Options of New. Only Path is required; zero values take the defaults in parentheses.
type Options struct {
	Path       string // of the executable
	Args       []string
	Properties map[string]string // that its Opener gets
	// MaxCalls bounds the ranges that are asked of it and not answered (64); more fail at once.
	MaxCalls int
	// StuckAfter is how long a call that nobody waits for any more may stay unanswered (10 s): then the process is killed.
	StuckAfter time.Duration
	// StartTimeout bounds a start (10 s). After a failure the next one waits RestartMin (1 s), and twice as long each time up to
	// RestartMax (1 min) until a start succeeds.
	StartTimeout, RestartMin, RestartMax time.Duration
	// Logger gets what the executable prints to standard error, and its ends; nil is silence.
	Logger *slog.Logger
}

// Fetcher is a direct.Fetcher in another process. It is safe for concurrent use.
type Fetcher struct {
	o       Options
	formats []string

	mu     sync.Mutex
	p      *process // nil while none runs
	busy   bool     // one is being started
	next   time.Time
	pause  time.Duration
	call   uint64
	calls  int
	closed bool
	wg     sync.WaitGroup // of starts, kills and calls
}

var _ direct.Fetcher = (*Fetcher)(nil)

// process is one run of the executable.
type process struct {
	client *plugin.Client
	ends   *ends
}

// Errors of a Fetcher whose process cannot serve.
var (
	ErrClosed   = errors.New("fetcher plug-in: closed")
	ErrStarting = errors.New("fetcher plug-in: is being started again")
	ErrBusy     = errors.New("fetcher plug-in: too many calls under way")
)

// Open is New for direct.ParseProperties: the executable is named by remote.storage.fetcher.class.path.
func Open(properties map[string]string) (direct.Fetcher, error) {
	return New(Options{Path: properties["remote.storage.fetcher.class.path"], Properties: properties})
}

// New starts an executable and asks for its formats. Close ends it.
func New(o Options) (*Fetcher, error) {
	if o.Path == "" {
		return nil, errors.New("fetcher plug-in: no executable is named")
	}
	if o.MaxCalls <= 0 {
		o.MaxCalls = 64
	}
	for p, def := range map[*time.Duration]time.Duration{&o.StuckAfter: 10 * time.Second, &o.StartTimeout: 10 * time.Second, &o.RestartMin: time.Second, &o.RestartMax: time.Minute} {
		if *p <= 0 {
			*p = def
		}
	}
	o.Properties = maps.Clone(o.Properties)
	if o.Properties == nil {
		o.Properties = map[string]string{}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	f := &Fetcher{o: o, pause: o.RestartMin}
	p, formats, err := f.start()
	if err != nil {
		return nil, err
	}
	f.p, f.formats = p, formats
	return f, nil
}

// start runs the executable and opens its Fetcher.
func (f *Fetcher) start() (*process, []string, error) {
	fail := func(err error) (*process, []string, error) {
		return nil, nil, fmt.Errorf("fetcher plug-in %s: %w", f.o.Path, err)
	}
	client := plugin.NewClient(&plugin.ClientConfig{HandshakeConfig: handshake, Plugins: plugin.PluginSet{name: &side{}}, Cmd: exec.Command(f.o.Path, f.o.Args...),
		AllowedProtocols: []plugin.Protocol{plugin.ProtocolNetRPC}, StartTimeout: f.o.StartTimeout,
		Logger: hclog.New(&hclog.LoggerOptions{Name: "plugin", Level: hclog.Debug, Output: lines{f.o.Logger}, DisableTime: true})})
	protocol, err := client.Client()
	if err != nil {
		client.Kill()
		return fail(err)
	}
	raw, err := protocol.Dispense(name)
	if err != nil {
		client.Kill()
		return fail(err)
	}
	p := &process{client, raw.(*ends)}
	var formats []string
	opened := p.ends.calls.Go("Plugin.Open", f.o.Properties, &formats, nil)
	timer := time.NewTimer(f.o.StartTimeout)
	defer timer.Stop()
	select {
	case <-opened.Done:
		err = opened.Error
	case <-timer.C:
		err = errors.New("it does not answer")
	}
	if err != nil {
		client.Kill()
		return fail(err)
	}
	return p, formats, nil
}

// Formats implements direct.Fetcher: those that the executable told when it was started first.
func (f *Fetcher) Formats() []string { return slices.Clone(f.formats) }

// process returns the running process. Where there is none, one is started beside the caller, who gets an error meanwhile.
func (f *Fetcher) process() (*process, uint64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.p != nil && f.p.client.Exited() {
		f.lostLocked(f.p, "it has ended")
	}
	switch {
	case f.closed:
		return nil, 0, ErrClosed
	case f.p != nil && f.calls >= f.o.MaxCalls:
		return nil, 0, ErrBusy
	case f.p != nil:
		f.call++
		f.calls++
		f.wg.Add(1)
		return f.p, f.call, nil
	}
	if !f.busy && !time.Now().Before(f.next) {
		f.busy = true
		f.wg.Go(f.restart)
	}
	return nil, 0, ErrStarting
}

func (f *Fetcher) restart() {
	p, _, err := f.start()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.busy = false
	switch {
	case err != nil:
		f.o.Logger.Warn("fetcher plug-in cannot be started", "path", f.o.Path, "again in", f.pause.String(), "cause", err)
		f.next, f.pause = time.Now().Add(f.pause), min(2*f.pause, f.o.RestartMax)
	case f.closed:
		f.wg.Go(p.client.Kill)
	default:
		f.o.Logger.Info("fetcher plug-in was started again", "path", f.o.Path)
		f.p, f.pause = p, f.o.RestartMin
	}
}

// lost ends a process that is of no use any more.
func (f *Fetcher) lost(p *process, why string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lostLocked(p, why)
}

func (f *Fetcher) lostLocked(p *process, why string) {
	if f.p != p {
		return // somebody else has seen to it
	}
	f.p, f.next = nil, time.Now().Add(f.pause)
	f.o.Logger.Warn("fetcher plug-in is of no use, it will be started again", "path", f.o.Path, "cause", why)
	f.wg.Go(p.client.Kill) // which asks it first, and waits
}

// done ends a call.
func (f *Fetcher) done() {
	f.mu.Lock()
	f.calls--
	f.mu.Unlock()
	f.wg.Done()
}

// FetchLogSegment implements direct.Fetcher.
func (f *Fetcher) FetchLogSegment(ctx context.Context, s direct.Segment, start, end int64) (io.ReadCloser, error) {
	p, call, err := f.process()
	if err != nil {
		return nil, err
	}
	args := &FetchArgs{Call: call, Start: start, End: end, Segment: segment{SegmentID: s.SegmentID, ObjectKey: s.ObjectKey, Format: s.Format, CustomMetadata: s.CustomMetadata,
		Size: s.Size, BaseOffset: s.BaseOffset, LogGrant: string(s.LogGrant), ManifestGrant: string(s.ManifestGrant)}}
	type outcome struct {
		conn net.Conn
		err  error
	}
	out := make(chan outcome, 1)
	go func() {
		defer f.done()
		conn, err := p.fetch(args)
		out <- outcome{conn, err}
	}()
	select {
	case o := <-out:
		if o.err != nil {
			if !errors.As(o.err, new(*remoteError)) {
				f.lost(p, o.err.Error()) // the connection to it is broken
			}
			return nil, o.err
		}
		return newBody(o.conn), nil
	case <-ctx.Done():
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closed { // or the process is ending anyhow
		f.wg.Go(func() {
			p.ends.calls.Go("Plugin.Cancel", call, new(bool), nil)
			timer := time.NewTimer(f.o.StuckAfter)
			defer timer.Stop()
			select {
			case o := <-out:
				if o.conn != nil {
					o.conn.Close()
				}
			case <-timer.C:
				f.lost(p, "it does not answer")
			}
		})
	}
	return nil, context.Cause(ctx)
}

// fetch asks for a range and goes for its stream.
func (p *process) fetch(args *FetchArgs) (net.Conn, error) {
	var reply FetchReply
	if err := p.ends.calls.Call("Plugin.Fetch", args, &reply); err != nil {
		return nil, fmt.Errorf("fetcher plug-in: %w", err)
	}
	if err := reply.Failed.err(); err != nil {
		return nil, err
	}
	conn, err := p.ends.streams.Dial(reply.Stream)
	if err != nil {
		return nil, fmt.Errorf("fetcher plug-in: %w", err)
	}
	return conn, nil
}

// Close ends the process and waits for it.
func (f *Fetcher) Close() {
	f.mu.Lock()
	if !f.closed {
		f.closed = true
		if f.p != nil {
			f.wg.Go(f.p.client.Kill)
			f.p = nil
		}
	}
	f.mu.Unlock()
	f.wg.Wait()
}

// body is the bytes of one stream.
type body struct {
	*frames
	conn net.Conn
}

func newBody(conn net.Conn) *body { return &body{newFrames(conn), conn} }

// Close unblocks a Read.
func (b *body) Close() error { return b.conn.Close() }

// lines sends go-plugin's own lines and the executable's standard error to slog.
type lines struct{ l *slog.Logger }

func (w lines) Write(line []byte) (int, error) {
	level, text := slog.LevelDebug, line
	for prefix, l := range map[string]slog.Level{"[ERROR]": slog.LevelWarn, "[WARN]": slog.LevelWarn, "[INFO]": slog.LevelInfo} {
		if t, ok := bytes.CutPrefix(line, []byte(prefix)); ok {
			level, text = l, t
		}
	}
	w.l.Log(context.Background(), level, string(bytes.TrimSpace(text)))
	return len(line), nil
}
