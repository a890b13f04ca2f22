package control

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/fxamacker/cbor/v2"

	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/quorum"
)

// frameMax bounds a frame, in bytes.
const frameMax = 64 << 20

var errFrame = errors.New("bad frame on a control connection")

// request is a task on its way.
type request struct {
	ID      uint64 `cbor:"1,keyasint"`
	Act     act    `cbor:"2,keyasint,omitempty"`
	Command []byte `cbor:"3,keyasint,omitempty"` // of actCommand
	Node    int32  `cbor:"4,keyasint,omitempty"`
	Address string `cbor:"5,keyasint,omitempty"`
	Millis  int64  `cbor:"6,keyasint,omitempty"` // how long its sender waits
}

type code uint8

const (
	codeOK        code = iota
	codeRefused        // by the command: Error
	codeNotLeader      // it was not run: Text is the leader's address if known
	codeLost           // whether it was run is not known
	codeBusy
	codeFailed // for the reason in Text
)

// response is what became of it.
type response struct {
	ID    uint64            `cbor:"1,keyasint"`
	Code  code              `cbor:"2,keyasint,omitempty"`
	Reply []byte            `cbor:"3,keyasint,omitempty"`
	Index uint64            `cbor:"4,keyasint,omitempty"`
	Text  string            `cbor:"5,keyasint,omitempty"`
	Error *controller.Error `cbor:"6,keyasint,omitempty"`
}

// frame is a length and that many bytes of CBOR.
func frame(v any) ([]byte, error) {
	body, err := cbor.Marshal(v)
	if err != nil {
		return nil, err
	}
	if len(body) > frameMax {
		return nil, fmt.Errorf("%w: %d bytes are too many, %d are allowed", errFrame, len(body), frameMax)
	}
	return append(binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(body)), uint32(len(body))), body...), nil
}

// readFrame takes memory as bytes arrive, not as they are announced.
func readFrame(r io.Reader, into any) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	size := binary.BigEndian.Uint32(head[:])
	if size == 0 || size > frameMax {
		return fmt.Errorf("%w: it claims %d bytes", errFrame, size)
	}
	var body bytes.Buffer
	if _, err := io.CopyN(&body, r, int64(size)); err != nil {
		return err
	}
	if err := cbor.Unmarshal(body.Bytes(), into); err != nil {
		return fmt.Errorf("%w: %w", errFrame, err)
	}
	return nil
}

func encodeTask(t task) (request, error) {
	r := request{Act: t.act, Node: t.id, Address: t.address}
	var err error
	if t.act == actCommand {
		r.Command, err = controller.MarshalCommand(t.command)
	}
	return r, err
}

func decodeTask(r request) (task, error) {
	t := task{act: r.Act, id: r.Node, address: r.Address}
	var err error
	if t.act == actCommand {
		t.command, err = controller.UnmarshalCommand(r.Command)
	}
	return t, err
}

// encodeAnswer makes the response to a task.
func encodeAnswer(t task, a answer, err error) response {
	var refused *controller.Error
	var not notLeader
	switch {
	case err == nil:
	case errors.As(err, &refused):
		return response{Code: codeRefused, Error: refused, Index: a.index}
	case errors.As(err, &not):
		return response{Code: codeNotLeader, Text: not.address}
	case errors.As(err, new(lost)):
		return response{Code: codeLost, Text: err.Error()}
	case errors.Is(err, ErrBusy):
		return response{Code: codeBusy}
	default:
		return response{Code: codeFailed, Text: err.Error()}
	}
	r := response{Index: a.index}
	if a.reply != nil {
		if t.act == actCommand {
			r.Reply, err = controller.MarshalReply(a.reply)
		} else {
			r.Reply, err = cbor.Marshal(a.reply)
		}
		if err != nil {
			return response{Code: codeLost, Text: fmt.Sprintf("encode the answer of %s: %v", t, err)}
		}
	}
	return r
}

// decodeAnswer is what the response to a task says.
func decodeAnswer(t task, r response) (answer, error) {
	a := answer{index: r.Index}
	switch r.Code {
	case codeOK:
	case codeRefused:
		if r.Error == nil {
			return a, fmt.Errorf("%w: a refusal without a reason", errFrame)
		}
		return a, r.Error
	case codeNotLeader:
		return a, notLeader{r.Text}
	case codeLost:
		return a, lost{errors.New(r.Text)}
	case codeBusy:
		return a, ErrBusy
	default:
		return a, errors.New(r.Text)
	}
	var err error
	switch {
	case t.act == actStatus:
		var s quorum.Status
		err = cbor.Unmarshal(r.Reply, &s)
		a.reply = s
	case t.act == actCommand && len(r.Reply) > 0:
		a.reply, err = controller.UnmarshalReply(t.command, r.Reply)
	}
	if err != nil {
		return a, lost{err}
	}
	return a, nil
}
