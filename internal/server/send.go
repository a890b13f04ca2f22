package server

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/varve-io/varve/internal/wire"
)

// sendfileMin is the size from which a file section goes through sendfile; below it one copy is cheaper than one more system call.
const sendfileMin = 32 << 10

// osFiler is a file that has a descriptor of the operating system.
type osFiler interface{ OSFile() *os.File }

// send writes the pieces of a reply, behind others. Small pieces are gathered into one write.
func (c *conn) send(gather net.Buffers, r wire.Reply) error {
	if len(gather)+len(r.Chunks) == 0 {
		return nil
	}
	c.nc.SetWriteDeadline(time.Now().Add(c.server.limits.Idle))
	tcp := socket(c.nc)
	flush := func() error {
		if len(gather) == 0 {
			return nil
		}
		_, err := gather.WriteTo(c.nc)
		gather = nil
		return err
	}
	for _, chunk := range r.Chunks {
		if chunk.File == nil {
			gather = append(gather, chunk.Bytes)
			continue
		}
		if f, ok := chunk.File.(osFiler); ok && tcp != nil && chunk.Len >= sendfileMin {
			if file := f.OSFile(); file != nil {
				if err := flush(); err != nil {
					return err
				}
				if err := sendfile(tcp, file, chunk.Pos, chunk.Len); err != nil {
					return err
				}
				continue
			}
		}
		// Large sections of files without sendfile are copied through a bounded buffer.
		for pos, left := chunk.Pos, chunk.Len; left > 0; {
			b := make([]byte, min(left, 1<<20))
			if n, err := chunk.File.ReadAt(b, pos); n < len(b) {
				if err == nil || errors.Is(err, io.EOF) {
					err = io.ErrUnexpectedEOF // the file is shorter than promised
				}
				return fmt.Errorf("read records for an answer: %w", err)
			}
			gather = append(gather, b)
			pos, left = pos+int64(len(b)), left-int64(len(b))
			if left > 0 {
				if err := flush(); err != nil {
					return err
				}
			}
		}
	}
	return flush()
}

// sendfile copies n bytes of file at pos to the socket without passing them through this process. It leaves the file's own
// offset alone, so that many connections may send one file.
func sendfile(tcp *net.TCPConn, file *os.File, pos, n int64) error {
	socket, err := tcp.SyscallConn()
	if err != nil {
		return err
	}
	source, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var socketErr, fileErr error
	// Control keeps the file open for the time of the call.
	err = source.Control(func(src uintptr) {
		socketErr = socket.Write(func(dst uintptr) bool {
			for n > 0 && fileErr == nil {
				k, err := unix.Sendfile(int(dst), int(src), &pos, int(min(n, 1<<22)))
				if k > 0 {
					n -= int64(k)
				}
				switch {
				case err == unix.EAGAIN:
					return false // the runtime calls again when the socket takes more
				case err != nil && err != unix.EINTR:
					fileErr = os.NewSyscallError("sendfile", err)
				case err == nil && k == 0:
					fileErr = io.ErrUnexpectedEOF // the file is shorter than promised
				}
			}
			return true
		})
	})
	return errors.Join(err, socketErr, fileErr)
}

func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
