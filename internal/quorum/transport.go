package quorum

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/varve-io/varve/internal/peer"
)

// service is the name of raft's connections among those between nodes.
const service = "raft"

var errOwing = errors.New("this node's metadata log was empty and has not caught up: it may not lead")

// network is what raft's transports can do.
type network interface {
	raft.Transport
	raft.WithPreVote
	raft.WithClose
}

// transport stands between raft and the network: it tells the stream layer which node it means, and keeps a node with a
// debt out of elections.
type transport struct {
	network
	stream  *stream // nil without peers
	debt    *debt
	applied func() uint64                                                   // the last entry that this node applied
	leads   func(id raft.ServerID, at raft.ServerAddress, term uint64) bool // whether this node leads that member in the term
	out     chan raft.RPC
	done    chan struct{}
	all     sync.WaitGroup
	once    sync.Once
}

// redial is how often a member that cannot be reached is tried again.
const redial = 200 * time.Millisecond

func newTransport(n network, s *stream, d *debt) *transport {
	return &transport{network: n, stream: s, debt: d, out: make(chan raft.RPC), done: make(chan struct{})}
}

// start passes on what arrives.
func (t *transport) start() {
	t.all.Go(func() {
		in := t.network.Consumer()
		for {
			select {
			case rpc := <-in:
				if t.admit(rpc) {
					t.pass(rpc)
				}
			case <-t.done:
				return
			}
		}
	})
}

func (t *transport) pass(rpc raft.RPC) {
	select {
	case t.out <- rpc:
	case <-t.done:
	}
}

// admit learns and enforces the debt. False means that the message has been answered.
func (t *transport) admit(rpc raft.RPC) bool {
	switch m := rpc.Command.(type) {
	case *raft.AppendEntriesRequest:
		if heartbeat(m) {
			return true // it tells nothing
		}
		// What is sent now, to a member that is thought to be at PrevLogEntry, is new to it; what is before it may not be.
		if err := t.debt.learn(max(m.PrevLogEntry, m.LeaderCommitIndex)); err != nil {
			rpc.Respond(nil, err)
			return false
		}
	case *raft.InstallSnapshotRequest:
		if err := t.debt.learn(m.LastLogIndex); err != nil {
			_, _ = io.Copy(io.Discard, rpc.Reader)
			rpc.Respond(nil, err)
			return false
		}
	}
	if !t.debt.owes(t.applied()) {
		return true
	}
	header := raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax}
	switch m := rpc.Command.(type) {
	case *raft.RequestVoteRequest:
		rpc.Respond(&raft.RequestVoteResponse{RPCHeader: header, Term: m.Term}, nil)
		return false
	case *raft.RequestPreVoteRequest:
		rpc.Respond(&raft.RequestPreVoteResponse{RPCHeader: header, Term: m.Term}, nil)
		return false
	case *raft.TimeoutNowRequest:
		rpc.Respond(nil, errOwing)
		return false
	}
	return true
}

// nominate makes raft stand for election now instead of after its timeout.
func (t *transport) nominate() {
	answer := make(chan raft.RPCResponse, 1)
	t.pass(raft.RPC{Command: &raft.TimeoutNowRequest{RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax}}, RespChan: answer})
}

// Consumer is where raft takes messages from.
func (t *transport) Consumer() <-chan raft.RPC { return t.out }

func (t *transport) expect(id raft.ServerID, at raft.ServerAddress) {
	if t.stream != nil {
		t.stream.expect(id, at)
	}
}

// RequestVote and RequestPreVote ask for nothing while this node owes: a member that lags too might grant it.
func (t *transport) RequestVote(id raft.ServerID, at raft.ServerAddress, m *raft.RequestVoteRequest, r *raft.RequestVoteResponse) error {
	if t.debt.owes(t.applied()) {
		return errOwing
	}
	t.expect(id, at)
	return t.network.RequestVote(id, at, m, r)
}

// RequestPreVote as RequestVote.
func (t *transport) RequestPreVote(id raft.ServerID, at raft.ServerAddress, m *raft.RequestPreVoteRequest, r *raft.RequestPreVoteResponse) error {
	if t.debt.owes(t.applied()) {
		return errOwing
	}
	t.expect(id, at)
	return t.network.RequestPreVote(id, at, m, r)
}

// heartbeat reports whether a message carries nothing but the leader's term.
func heartbeat(m *raft.AppendEntriesRequest) bool {
	return m.PrevLogEntry == 0 && m.LeaderCommitIndex == 0 && len(m.Entries) == 0
}

// AppendEntries notes whom the address belongs to, as do the rest.
func (t *transport) AppendEntries(id raft.ServerID, at raft.ServerAddress, m *raft.AppendEntriesRequest, r *raft.AppendEntriesResponse) error {
	t.expect(id, at)
	if heartbeat(m) {
		return t.network.AppendEntries(id, at, m, r) // raft counts those that fail
	}
	return t.persist(id, at, m.Term, func() error { return t.network.AppendEntries(id, at, m, r) })
}

// persist tries until it succeeds, or this node does not lead that member in the term any more. If raft were told of a
// failure, it would wait before its next try, up to 10 s when there were many, and a node that is back, or can be reached
// again, would learn of nothing until then.
func (t *transport) persist(id raft.ServerID, at raft.ServerAddress, term uint64, try func() error) error {
	for {
		err := try()
		if err == nil || !t.leads(id, at, term) {
			return err
		}
		select {
		case <-time.After(redial):
		case <-t.done:
			return err
		}
	}
}

func (t *transport) AppendEntriesPipeline(id raft.ServerID, at raft.ServerAddress) (raft.AppendPipeline, error) {
	t.expect(id, at)
	return t.network.AppendEntriesPipeline(id, at)
}

func (t *transport) InstallSnapshot(id raft.ServerID, at raft.ServerAddress, m *raft.InstallSnapshotRequest, r *raft.InstallSnapshotResponse, data io.Reader) error {
	t.expect(id, at)
	hello := &raft.AppendEntriesRequest{RPCHeader: m.RPCHeader, Term: m.Term}
	err := t.persist(id, at, m.Term, func() error { return t.network.AppendEntries(id, at, hello, new(raft.AppendEntriesResponse)) })
	if err != nil {
		return err
	}
	return t.network.InstallSnapshot(id, at, m, r, data)
}

func (t *transport) TimeoutNow(id raft.ServerID, at raft.ServerAddress, m *raft.TimeoutNowRequest, r *raft.TimeoutNowResponse) error {
	t.expect(id, at)
	return t.network.TimeoutNow(id, at, m, r)
}

// Close ends the transport and all its connections.
func (t *transport) Close() error {
	var err error
	t.once.Do(func() {
		close(t.done)
		err = t.network.Close()
		t.all.Wait()
	})
	return err
}

// stream carries raft over connections between nodes.
type stream struct {
	hub     *peer.Hub
	address string
	accept  chan net.Conn
	closed  chan struct{}
	once    sync.Once
	nodes   sync.Map // raft.ServerAddress → raft.ServerID, whom raft means by an address
	trouble sync.Map // address → error of the last dial, if it failed
}

func newStream(hub *peer.Hub, address string) *stream {
	s := &stream{hub: hub, address: address, accept: make(chan net.Conn), closed: make(chan struct{})}
	hub.Handle(service, s.serve)
	return s
}

func (s *stream) expect(id raft.ServerID, at raft.ServerAddress) {
	if old, ok := s.nodes.Load(at); !ok || old != id {
		s.nodes.Store(at, id)
	}
}

// serve hands a connection to raft and waits for its end.
func (s *stream) serve(ctx context.Context, c peer.Conn) {
	conn := &closing{Conn: c.Conn, done: make(chan struct{})}
	defer conn.Close()
	select {
	case s.accept <- conn:
	case <-s.closed:
		return
	case <-ctx.Done():
		return
	}
	select {
	case <-conn.done:
	case <-s.closed:
	case <-ctx.Done():
	}
}

// Accept waits for the next connection.
func (s *stream) Accept() (net.Conn, error) {
	select {
	case c := <-s.accept:
		return c, nil
	case <-s.closed:
		return nil, net.ErrClosed
	}
}

// Close ends all accepted connections.
func (s *stream) Close() error {
	s.once.Do(func() { close(s.closed) })
	return nil
}

// Addr is where other nodes reach this one.
func (s *stream) Addr() net.Addr { return address(s.address) }

// Dial connects to the member that raft means by the address.
func (s *stream) Dial(at raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	to := int32(-1)
	if id, ok := s.nodes.Load(at); ok {
		to = nodeID(id.(raft.ServerID))
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	c, _, err := s.hub.Dial(ctx, string(at), to, service)
	if err != nil {
		s.trouble.Store(string(at), err)
	} else {
		s.trouble.Delete(string(at))
	}
	return c, err
}

// why is the last failure to reach an address, nil if there was none.
func (s *stream) why(at string) error {
	if s == nil {
		return nil
	}
	if err, ok := s.trouble.Load(at); ok {
		return err.(error)
	}
	return nil
}

type address string

func (address) Network() string  { return "tcp" }
func (a address) String() string { return string(a) }

// closing tells when it has been closed.
type closing struct {
	net.Conn
	done chan struct{}
	once sync.Once
}

func (c *closing) Close() error {
	c.once.Do(func() { close(c.done) })
	return c.Conn.Close()
}

func serverID(id int32) raft.ServerID { return raft.ServerID(strconv.Itoa(int(id))) }

// nodeID is -1 for what is no node id.
func nodeID(id raft.ServerID) int32 {
	n, err := strconv.ParseInt(string(id), 10, 32)
	if err != nil {
		return -1
	}
	return int32(n)
}
