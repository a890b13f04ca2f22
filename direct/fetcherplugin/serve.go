package fetcherplugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/rpc"
	"runtime/debug"
	"sync"

	"github.com/hashicorp/go-plugin"

	"github.com/varve-io/varve/direct"
)

// Opener makes the Fetcher of an executable from the reader's properties, remote.storage.fetcher.class among them.
type Opener func(properties map[string]string) (direct.Fetcher, error)

// Serve is all that the main function of a plug-in does. It returns when the reader has ended. An executable that is started by hand
// says that it is a plug-in and exits.
func Serve(open Opener) {
	plugin.Serve(&plugin.ServeConfig{HandshakeConfig: handshake, Plugins: plugin.PluginSet{name: &side{open: open}}})
}

// side is what both ends hand to go-plugin.
type side struct{ open Opener }

// Server implements plugin.Plugin.
func (s *side) Server(b *plugin.MuxBroker) (any, error) {
	return &Server{open: s.open, streams: b, calls: map[uint64]context.CancelFunc{}, gone: map[uint64]bool{}}, nil
}

// Client implements plugin.Plugin.
func (s *side) Client(b *plugin.MuxBroker, c *rpc.Client) (any, error) {
	return &ends{calls: c, streams: b}, nil
}

// Server answers the reader's calls, as net/rpc wants it. It is not for other use.
type Server struct {
	open    Opener
	streams *plugin.MuxBroker

	mu      sync.Mutex
	fetcher direct.Fetcher
	calls   map[uint64]context.CancelFunc // that are under way
	gone    map[uint64]bool               // that were cancelled and are not, or not yet
}

// maxGone bounds what is remembered of calls whose Cancel came first, or too late.
const maxGone = 1000

// Open makes the Fetcher and answers with its formats.
func (s *Server) Open(properties map[string]string, formats *[]string) (err error) {
	defer recovered(&err)
	f, err := s.open(properties)
	if err != nil {
		return err
	}
	if f == nil {
		return errors.New("the plug-in has no fetcher")
	}
	s.mu.Lock()
	s.fetcher = f
	s.mu.Unlock()
	*formats = f.Formats()
	return nil
}

// Cancel ends a call.
func (s *Server) Cancel(call uint64, _ *bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if cancel := s.calls[call]; cancel != nil {
		cancel()
		return nil
	}
	// Calls are answered side by side: this one may have overtaken the Fetch that it is about.
	if len(s.gone) >= maxGone {
		clear(s.gone)
	}
	s.gone[call] = true
	return nil
}

// Fetch opens a range. Its bytes wait on a stream for the reader to come for them.
func (s *Server) Fetch(a *FetchArgs, reply *FetchReply) error {
	ctx, cancel := context.WithCancel(context.Background())
	s.mu.Lock()
	f := s.fetcher
	s.calls[a.Call] = cancel
	if s.gone[a.Call] {
		delete(s.gone, a.Call)
		cancel()
	}
	s.mu.Unlock()
	end := func() {
		cancel()
		s.mu.Lock()
		delete(s.calls, a.Call)
		s.mu.Unlock()
	}
	body, err := fetch(ctx, f, a)
	if err != nil {
		end()
		reply.Failed = failureOf(err)
		return nil
	}
	reply.Stream = s.streams.NextId()
	go func() {
		defer end()
		defer body.Close()
		conn, err := s.streams.Accept(reply.Stream) // for five seconds
		if err != nil {
			return
		}
		defer conn.Close()
		go func() {
			_, _ = conn.Read(make([]byte, 1)) // the reader sends nothing: it hung up
			cancel()
		}()
		_ = send(conn, &guarded{body})
	}()
	return nil
}

func fetch(ctx context.Context, f direct.Fetcher, a *FetchArgs) (body io.ReadCloser, err error) {
	defer recovered(&err)
	if f == nil {
		return nil, errors.New("Fetch before Open")
	}
	x := &a.Segment
	body, err = f.FetchLogSegment(ctx, direct.Segment{SegmentID: x.SegmentID, ObjectKey: x.ObjectKey, Format: x.Format, CustomMetadata: x.CustomMetadata, Size: x.Size,
		BaseOffset: x.BaseOffset, LogGrant: direct.Grant(x.LogGrant), ManifestGrant: direct.Grant(x.ManifestGrant)}, a.Start, a.End)
	if err == nil && body == nil {
		err = errors.New("no body and no error")
	}
	return body, err
}

// guarded turns a panic of a body into its error.
type guarded struct{ io.Reader }

func (g *guarded) Read(p []byte) (n int, err error) {
	defer recovered(&err)
	return g.Reader.Read(p)
}

func recovered(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
	}
}

// ends are a running plug-in's calls and streams.
type ends struct {
	calls   *rpc.Client
	streams interface {
		Dial(id uint32) (net.Conn, error)
	}
}
