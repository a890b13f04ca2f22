package fetcherplugin

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
)

// A stream is frames of a size, 4 bytes, and as many bytes. A size of 0 ends it; one with the highest bit is an error's, as JSON.
const (
	endFrame   = 0
	errorFrame = 1 << 31
	frameBytes = 128 << 10 // that are sent at once
)

// send writes what a body yields as frames.
func send(w io.Writer, body io.Reader) error {
	b := make([]byte, 4+frameBytes)
	for {
		n, err := body.Read(b[4:])
		if n > 0 {
			binary.BigEndian.PutUint32(b, uint32(n))
			if _, err := w.Write(b[:4+n]); err != nil {
				return err
			}
		}
		switch {
		case err == io.EOF:
			_, err := w.Write([]byte{0, 0, 0, endFrame})
			return err
		case err != nil:
			text, jerr := json.Marshal(failureOf(err))
			if jerr != nil {
				return jerr
			}
			_, err := w.Write(append(binary.BigEndian.AppendUint32(nil, errorFrame|uint32(len(text))), text...))
			return err
		}
	}
}

// frames reads what send wrote.
type frames struct {
	r    *bufio.Reader
	left uint32 // of the present frame
	over error
}

func newFrames(r io.Reader) *frames { return &frames{r: bufio.NewReaderSize(r, 64<<10)} }

// Read is io.Reader's. A stream that breaks off is io.ErrUnexpectedEOF.
func (f *frames) Read(p []byte) (int, error) {
	if f.over == nil && f.left == 0 {
		f.over = f.next()
	}
	if f.over != nil {
		return 0, f.over
	}
	n, err := f.r.Read(p[:min(len(p), int(f.left))])
	f.left -= uint32(n)
	if err != nil {
		f.over = broken(err)
	}
	if n > 0 {
		return n, nil
	}
	return 0, f.over
}

// next takes the head of a frame.
func (f *frames) next() error {
	var head [4]byte
	if _, err := io.ReadFull(f.r, head[:]); err != nil {
		return broken(err)
	}
	size := binary.BigEndian.Uint32(head[:])
	if size == endFrame {
		return io.EOF
	}
	if size&errorFrame == 0 {
		f.left = size
		return nil
	}
	if size &^= errorFrame; size > 4*maxText {
		return fmt.Errorf("fetcher plug-in: error of %d bytes", size)
	}
	text := make([]byte, size)
	if _, err := io.ReadFull(f.r, text); err != nil {
		return broken(err)
	}
	var failed failure
	if err := json.Unmarshal(text, &failed); err != nil || failed.Text == "" {
		return fmt.Errorf("fetcher plug-in: error that cannot be read: %q", text[:min(len(text), 100)])
	}
	return failed.err()
}

func broken(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
