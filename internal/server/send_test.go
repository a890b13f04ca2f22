package server

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/varve-io/varve/internal/wire"
)

// plainFile hides the descriptor, sentFile shows it.
type plainFile struct{ f *os.File }

func (p plainFile) ReadAt(b []byte, off int64) (int, error) { return p.f.ReadAt(b, off) }

type sentFile struct{ plainFile }

func (s sentFile) OSFile() *os.File { return s.f }

func randomFile(t *testing.T, size int) (*os.File, []byte) {
	t.Helper()
	data := make([]byte, size)
	random := rand.NewChaCha8([32]byte{1})
	random.Read(data)
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f, data
}

// Sections of files arrive as the same bytes by sendfile and by reading, among other pieces, small and large.
func TestFileSections(t *testing.T) {
	f, data := randomFile(t, 12<<20)
	var chunks []wire.Chunk
	released := make(chan struct{}, 1)
	r := serve(t, func(context.Context, *wire.Peer, []byte) (wire.Finish, error) {
		return func(context.Context) wire.Reply {
			return wire.Reply{Chunks: chunks, Release: func() { released <- struct{}{} }}
		}, nil
	}, nil)
	for name, file := range map[string]wire.File{"sendfile": sentFile{plainFile{f}}, "read": plainFile{f}} {
		t.Run(name, func(t *testing.T) {
			sections := [][2]int64{{5, 100}, {0, sendfileMin}, {77, 9 << 20}, {3 << 20, sendfileMin - 1}, {1 << 20, 1<<20 + 1}, {12<<20 - 1, 1}}
			var want []byte
			chunks = []wire.Chunk{{Bytes: make([]byte, 4)}}
			for i, s := range sections {
				text := strings.Repeat("|", i)
				chunks = append(chunks, wire.Chunk{File: file, Pos: s[0], Len: s[1]}, wire.Chunk{Bytes: []byte(text)})
				want = append(append(want, data[s[0]:s[0]+s[1]]...), text...)
			}
			binary.BigEndian.PutUint32(chunks[0].Bytes, uint32(len(want)))
			c := r.dial()
			r.write(c, framed("x"))
			got, err := reply(c)
			if err != nil || got != string(want) {
				t.Fatalf("%d bytes, want %d (%v)", len(got), len(want), err)
			}
			<-released
			c.Close()
			r.changed(-1)
		})
	}
}

// A file that is shorter than it was ends the connection: the client must not take zeros for records.
func TestFileShorterThanPromised(t *testing.T) {
	f, data := randomFile(t, 100<<10)
	for name, file := range map[string]wire.File{"sendfile": sentFile{plainFile{f}}, "read": plainFile{f}} {
		t.Run(name, func(t *testing.T) {
			released := make(chan struct{}, 1)
			r := serve(t, func(context.Context, *wire.Peer, []byte) (wire.Finish, error) {
				return func(context.Context) wire.Reply {
					return wire.Reply{Chunks: []wire.Chunk{{File: file, Pos: 0, Len: 200 << 10}}, Release: func() { released <- struct{}{} }}
				}, nil
			}, nil)
			c := r.dial()
			r.write(c, framed("x"))
			got, _ := io.ReadAll(c)
			if !bytes.HasPrefix(data, got) {
				t.Errorf("%d bytes that are not the file's", len(got))
			}
			<-released
		})
	}
}

func TestBigReplyInManyPieces(t *testing.T) {
	var chunks []wire.Chunk
	var want strings.Builder
	for i := range 3000 { // more than one writev takes
		b := bytes.Repeat([]byte{byte(i)}, 1000+i)
		chunks = append(chunks, wire.Chunk{Bytes: b})
		want.Write(b)
	}
	chunks = append([]wire.Chunk{{Bytes: binary.BigEndian.AppendUint32(nil, uint32(want.Len()))}}, chunks...)
	r := serve(t, func(context.Context, *wire.Peer, []byte) (wire.Finish, error) {
		return func(context.Context) wire.Reply { return wire.Reply{Chunks: chunks} }, nil
	}, nil)
	c := r.dial()
	r.write(c, framed("x"))
	r.expect(c, want.String())
	if chunks[7].Bytes[0] != 6 || len(chunks[7].Bytes) != 1006 {
		t.Error("sending changed the pieces")
	}
}

// A peer that stops reading in mid answer is given up when it goes, and its answer is released.
func TestReleaseWhenThePeerIsGone(t *testing.T) {
	f, _ := randomFile(t, 1<<20)
	released := make(chan struct{}, 1)
	r := serve(t, func(context.Context, *wire.Peer, []byte) (wire.Finish, error) {
		return func(context.Context) wire.Reply {
			var chunks []wire.Chunk
			for range 100 {
				chunks = append(chunks, wire.Chunk{File: sentFile{plainFile{f}}, Len: 1 << 20})
			}
			return wire.Reply{Chunks: chunks, Release: func() { released <- struct{}{} }}
		}, nil
	}, nil)
	c := r.dial()
	r.write(c, framed("x"))
	if _, err := io.ReadFull(c, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	c.Close()
	<-released
	r.changed(-1)
}

func TestReadFrame(t *testing.T) {
	for _, key := range []string{"\x00\x00", "\x00\x01"} {
		for _, size := range []int{1, 2, 3, pooledMin - 1, pooledMin, trusted - 1, trusted, trusted + 1, growth*trusted + 5} {
			body := []byte((key + strings.Repeat("0123456789", size/10+1))[:size])
			for range 2 { // the second from the pool
				frame, release, err := readFrame(bufio.NewReader(iotest.HalfReader(bytes.NewReader(body))), size)
				if err != nil || !bytes.Equal(frame, body) {
					t.Fatalf("%d: %d bytes, %v", size, len(frame), err)
				}
				clear(frame)
				release()
			}
			if _, _, err := readFrame(bufio.NewReader(bytes.NewReader(body[:size-1])), size); err == nil {
				t.Fatalf("%d: read although a byte is missing", size)
			}
		}
	}
}

// A frame that is announced and does not come costs a megabyte, not its size.
func TestAnnouncedFramesAreCheap(t *testing.T) {
	for _, key := range []string{"\x00\x00", "\x00\x01"} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		const n = 20
		for range n {
			if _, _, err := readFrame(bufio.NewReader(strings.NewReader(key+"abc")), 100<<20); err == nil {
				t.Fatal("read a frame of five bytes")
			}
		}
		runtime.ReadMemStats(&after)
		if each := (after.TotalAlloc - before.TotalAlloc) / n; each > 2*trusted {
			t.Errorf("%d bytes for a frame that did not come", each)
		}
	}
}

func FuzzReadFrame(f *testing.F) {
	f.Add([]byte("\x00\x00abc"), 3)
	f.Fuzz(func(t *testing.T, b []byte, size int) {
		if size <= 0 || size > 100<<20 {
			return
		}
		frame, release, err := readFrame(bufio.NewReader(bytes.NewReader(b)), size)
		if err != nil {
			if size <= len(b) {
				t.Fatal(err)
			}
			return
		}
		if !bytes.Equal(frame, b[:size]) {
			t.Fatal("other bytes")
		}
		release()
	})
}
